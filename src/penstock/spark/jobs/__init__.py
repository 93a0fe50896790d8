"""Jobs over a broker's tables: archive, report, redrive, publish, backfill and collect.

Each is a function that takes a Spark session and the broker's Flight location, and returns a
report. ``token`` is the key to the broker, and ``ca`` the file of its authority; without them the
job takes PENSTOCK_TOKEN and PENSTOCK_CA of this process, and tells them to the executors. Jobs that
remove or change something have ``dry_run``.
"""

from __future__ import annotations

from penstock.spark.delta import Optimized, Vacuumed, optimize, vacuum
from penstock.spark.jobs.archive import Archived, archive, follow
from penstock.spark.jobs.backfill import Backfill, backfill
from penstock.spark.jobs.messages import (
    CollectReport,
    PublishReport,
    RedriveReport,
    collect,
    publish,
    redrive,
)
from penstock.spark.jobs.report import report, save_report

__all__ = [
    "Archived",
    "Backfill",
    "CollectReport",
    "Optimized",
    "PublishReport",
    "RedriveReport",
    "Vacuumed",
    "archive",
    "backfill",
    "collect",
    "follow",
    "optimize",
    "publish",
    "redrive",
    "report",
    "save_report",
    "vacuum",
]
