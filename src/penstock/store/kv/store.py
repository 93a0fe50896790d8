"""The contract over an ordered key-value engine, whichever way live messages are kept.

Nothing here waits, reads a clock or takes a lock: the broker does. Each verb is a method in the
module of its kind, in a subclass of :class:`~penstock.store.kv.state.Core`::

    publish   publish; from routes to places in queues
    claim     claim
    settle    ack, release, extend; leases that expire
    move      move, redrive; messages that come due; dead letters
    routing   the metadata log: read, assign, fill
    maintain  sweep, purge, collect; create, change and delete queues
    inspect   browse, attempts, stats
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.limits import MAX_VIEWS
from penstock.store.contract import Health, LiveQueue, StoreDetails
from penstock.store.kv.claim import ClaimVerbs
from penstock.store.kv.inspect import InspectVerbs
from penstock.store.kv.move import ALL
from penstock.store.kv.state import verb

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from penstock.errors import PenstockError
    from penstock.model import QueueSpec
    from penstock.store.check_report import AuditReport
    from penstock.store.kv.snapshot import Pinned


class KvStore(ClaimVerbs, InspectVerbs):
    """A store on a key-value engine."""

    # One writer: verbs of several threads would only wait for each other.
    parallel = False
    # Its verbs wait for no other machine, or have bounds of their own.
    patience_s: float | None = None

    # --- queues ----------------------------------------------------------------------------

    @verb
    def queues(self) -> list[LiveQueue]:
        """Return all queues, by name."""
        end = self.log.end
        return [
            LiveQueue(queue.spec, cover.filter_at(end), cover.draining, cover)
            for _, queue in sorted(self.by_name.items())
            for cover in (queue.coverage,)
        ]

    @verb
    def spec(self, queue_name: str) -> QueueSpec:
        """Return the settings of a queue."""
        return (self.by_name.get(queue_name) or self.queue(queue_name)).spec

    # --- reading in bulk ---------------------------------------------------------------------

    @verb
    def pin(
        self,
        now_ms: int,
        *,
        stats: bool = False,
        marks: bool = True,  # noqa: ARG002 - one process gives out all numbers, in order
    ) -> Pinned:
        """Make a snapshot for reading; ``stats``: with the stats of every queue."""
        # Loaded when it is wanted: programs that do not read in bulk need none of it.
        from penstock.store.kv.snapshot import Pinned  # noqa: PLC0415

        # The rows do not say whether a delay is over: due messages must have been moved.
        self.catch_up(now_ms, ALL)
        return Pinned(
            self.engine.view(),
            self.identity,
            at_ms=now_ms,
            log=self.log_stats(),
            totals=self.store_stats(),
            stats=[self.queue_stats(name, now_ms) for name in sorted(self.by_name)]
            if stats
            else [],
        )

    @verb
    def audit(self, *, repair: bool, now_ms: int) -> AuditReport:
        """Hold the store to its invariants."""
        # Loaded when it is wanted: it is as large as the rest of the store.
        from penstock.store.kv.check import audit  # noqa: PLC0415

        return audit(self, repair=repair, now_ms=now_ms)

    # --- the store -----------------------------------------------------------------------------

    def info(self) -> StoreDetails:
        """Return which store this is. Each snapshot keeps deleted data on disk."""
        identity = self.identity
        return StoreDetails(
            f"{identity.store_id:08x}",
            identity.design,
            identity.routing,
            MAX_VIEWS,
            self.time_floor_ms(),
        )

    def health(self, *, disk: bool = False) -> Health:
        """Return whether the engine takes writes, and how much room its disk has."""
        engine = self.engine
        away = None if engine.away is None else str(engine.away)
        if not disk:
            return Health(away)
        return Health(away, engine.free_bytes(), used_bytes=engine.used_bytes())

    def recover(self, alone: AbstractContextManager[None]) -> None:
        """Make an engine that is away take writes again, or raise why it does not."""
        self.engine.recover(alone, self._read_anew)

    def _read_anew(self) -> None:
        self.load()
        # Nobody doubts any more what is there now.
        self.progress.commits += 1
        for queue in self.by_name.values():
            self.wake(queue)

    def limit(self, seconds: float) -> None:
        """Do nothing: its verbs wait for nobody."""

    def sync(self) -> None:
        """Make every commit so far durable."""
        self.engine.sync()

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Call back if the engine is lost to this process."""
        self.engine.on_lost(told)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()
