"""Spark over a broker: the data source ``penstock``, the route job, and pipelines of your own.

This package is the only one that imports pyspark; ``import penstock`` never does.
"""

from __future__ import annotations

from penstock.errors import needs_extra

with needs_extra("spark", "penstock.spark"):
    # First, since its absence says the most: without it numpy and others are missing as well.
    import pyspark as _  # noqa: F401

    from penstock.spark.pipelines import Pipeline, pipeline
    from penstock.spark.sessions import PinnedSnapshot, read, session, snapshot
    from penstock.spark.source import PenstockSource
    from penstock.spark.stream import Progress, progress

__all__ = [
    "PenstockSource",
    "PinnedSnapshot",
    "Pipeline",
    "Progress",
    "pipeline",
    "progress",
    "read",
    "session",
    "snapshot",
]
