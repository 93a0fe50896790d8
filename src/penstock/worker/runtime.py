"""Puts the parts of a worker together, starts them, and takes them down again.

::

                 claim                take               put
    source ─────────────▶ floor ─────────────▶ pool ───────────▶ settler ──ack, release──▶ store
            feeder          ▲    what is done    │                  ▲
            (one a queue)   │ ◀──────────────────┘                  │ given back
                            └── lost ── leases ──extend──▶ store    └── over limit, cut off
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.worker.claimer import Feeder
from penstock.worker.handling import is_async, resolve
from penstock.worker.hands import Hands
from penstock.worker.heartbeat import Leases
from penstock.worker.pool_async import AsyncPool
from penstock.worker.pool_threads import ThreadPool
from penstock.worker.retry import Failures, Standing, Ticker
from penstock.worker.settler import Settler
from penstock.worker.state import Floor
from penstock.worker.stats import Meters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.worker.handling import Handler
    from penstock.worker.pool_threads import Pool
    from penstock.worker.settings import Settings
    from penstock.worker.source import Source
    from penstock.worker.stats import WorkerStats

__all__ = ["Runtime"]

log = logging.getLogger("penstock.worker")

# How long handlers that were cut off may take to end, and the store to confirm the last verdicts.
CUT_MS: Final = 1_000
LAST_SETTLE_MS: Final = 5_000


class Runtime:
    """A worker's threads. Made, started and stopped once."""

    def __init__(
        self,
        broker: Broker,
        sources: Sequence[Source],
        handler: Handler | str,
        middleware: Sequence[object],
        settings: Settings,
        clock: Clock,
        *,
        on_idle: Callable[[], None],
        on_error: Callable[[Exception], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        """``on_idle`` is told when a stopping worker has nothing left to do.

        ``on_error`` is told of trouble with the store, ``on_broken`` of a pool that has ended.
        """
        self.meters = Meters()
        self._clock = clock
        self._on_error = on_error
        self._on_idle = on_idle
        self._on_broken = on_broken
        self._standings: list[Standing] = []
        self._leases = Leases(broker, clock, self._standing("extending leases"))
        self._keeping = Ticker("penstock-leases", self._leases.tick, clock)
        self._settler = Settler(
            broker, clock, self._leases, self.meters, self._standing("settling")
        )
        self.floor = Floor(
            # A child process is a slot once it is ready.
            Hands(
                0 if settings.mode == "processes" else settings.concurrency, settings.prefetch or 0
            ),
            clock=clock,
            leases=self._leases,
            settler=self._settler,
            meters=self.meters,
            failures=Failures(),
            on_idle=on_idle,
        )
        self._leases.on_lost = self.floor.lost
        self._leases.on_moved = self._keeping.wake
        self._settler.on_settled = self.floor.settled
        self._feeders = [self._feeder(source, settings) for source in sources]
        self.pool = self._pool(handler, middleware, settings)

    def drained(self) -> bool:
        """Whether a worker that is stopping has nothing left to do."""
        if not all(feeder.ended for feeder in self._feeders):
            return False
        self.floor.give_back()
        return self.floor.idle

    def start(self) -> None:
        """Begin to work."""
        try:
            self._keeping.start()
            self._settler.start()
            self.pool.start()
            for feeder in self._feeders:
                feeder.start()
        except BaseException:
            # Such as no more threads: those that have begun are to end.
            self.floor.close()
            self.floor.end()
            raise

    def drain(self) -> None:
        """Claim no more; what has not begun goes back when the last claim has been answered."""
        back = self.floor.close()
        running, _ = self.floor.counts
        log.info("stopping: %d messages are finished, %d given back", running, back)

    def finish(self, *, settle: bool) -> None:
        """Cut off what runs, settle what can be, and end; without ``settle``, only end."""
        self.floor.close()
        # A claim that is under way would take again what is given back.
        for feeder in self._feeders:
            feeder.join(None if settle else CUT_MS)
        self.floor.give_back()
        if not self.floor.idle:
            self.pool.cut()
            if self.pool.can_cut:
                self.floor.wait_for_idle(CUT_MS)
        cut_off = self.floor.abandon()
        left = self._settler.stop(LAST_SETTLE_MS if settle else 0)
        self.floor.end()
        self.pool.join(CUT_MS)
        self._keeping.stop()
        if cut_off:
            log.warning("%d handlers were cut off; their messages were given back", cut_off)
        if left:
            log.warning("%d messages could not be settled; they come back with their lease", left)

    def stats(self) -> WorkerStats:
        """Return a snapshot."""
        running, waiting = self.floor.counts
        return self.meters.shown(
            in_progress=running,
            prefetched=waiting,
            unsettled=self._settler.unsettled,
            troubles=tuple(each.activity for each in self._standings if each.in_trouble),
        )

    def live(self, receipt: str) -> bool:
        """Whether a lease is held still."""
        return self._leases.live(receipt)

    def _standing(self, activity: str) -> Standing:
        standing = Standing(activity, self._clock, self._on_error)
        self._standings.append(standing)
        return standing

    def _feeder(self, source: Source, settings: Settings) -> Feeder:
        return Feeder(
            source,
            self.floor,
            clock=self._clock,
            meters=self.meters,
            standing=self._standing(f"claiming from {source.queue}"),
            dequeue_max=settings.dequeue_max,
            wait_ms=settings.wait_ms,
            scan_interval_ms=settings.scan_interval_ms,
            on_end=self._on_idle,
        )

    def _pool(
        self, handler: Handler | str, middleware: Sequence[object], settings: Settings
    ) -> Pool:
        concurrency, limit_ms = settings.concurrency, settings.time_limit_ms
        if settings.mode == "processes":
            # Loaded when used: threads need nothing of multiprocessing.
            from penstock.worker.pool_processes import ProcessPool  # noqa: PLC0415

            return ProcessPool(
                self.floor,
                handler,
                middleware,
                concurrency=concurrency,
                time_limit_ms=limit_ms,
                meters=self.meters,
                standing=self._standing("starting child processes"),
                on_broken=self._on_broken,
            )
        function = resolve(handler)
        if is_async(function):
            return AsyncPool(
                self.floor,
                function,
                middleware,
                concurrency=concurrency,
                time_limit_ms=limit_ms,
                on_broken=self._on_broken,
            )
        return ThreadPool(
            self.floor,
            function,
            middleware,
            concurrency=concurrency,
            time_limit_ms=limit_ms,
            clock=self._clock,
            on_broken=self._on_broken,
        )
