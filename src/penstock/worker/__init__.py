"""Workers: an optional runtime above the pull API, the same for every store.

``worker`` is the public face and ``runtime`` puts its parts together; ``source`` is the seam to
the store. What decides is pure and apart from the threads: ``verdicts``, ``hands``, the ``Ends``
of ``settling``. Nothing else in Penstock needs this package.
"""

from __future__ import annotations

from penstock.worker.outcome import Retry, Settled
from penstock.worker.source import Claimed, Source
from penstock.worker.stats import Histogram, WorkerStats
from penstock.worker.worker import Worker

__all__ = ["Claimed", "Histogram", "Retry", "Settled", "Source", "Worker", "WorkerStats"]
