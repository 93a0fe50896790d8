"""Workers: an optional runtime above the pull API, the same for every store.

``worker`` is the public face and ``runtime`` puts its parts together; ``source`` is the seam to
the store. What decides is pure and apart from the threads: ``verdicts``, ``hands``, the ``Ends``
of ``settling``. Nothing else in Penstock needs this package.
"""

from __future__ import annotations

from penstock.work.meters import Histogram, WorkerStats
from penstock.work.source import Claimed, Source
from penstock.work.verdicts import Retry, Settled
from penstock.work.worker import Worker

__all__ = ["Claimed", "Histogram", "Retry", "Settled", "Source", "Worker", "WorkerStats"]
