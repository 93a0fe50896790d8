"""Workers: an optional runtime above the pull API, the same for every store.

``worker`` is the public face. It claims, extends leases and settles (``leases``), and runs handlers
(``pools``); its threads share the messages in ``state``. Nothing else in Penstock
needs this package.
"""

from __future__ import annotations

from penstock.histogram import Histogram
from penstock.worker.outcome import Retry, Settled
from penstock.worker.stats import QueueWork, WorkerStats
from penstock.worker.worker import Worker

__all__ = ["Histogram", "QueueWork", "Retry", "Settled", "Worker", "WorkerStats"]
