"""The contract over an ordered key-value engine, whichever way live messages are kept.

Nothing here waits, reads a clock or takes a lock: the broker does. Each verb is in the module of
its kind, over one :class:`~penstock.stores.core.Core`::

    intake     publish, claim (placing: into queues by their routes)
    settling   ack, release, extend; leases that expire
    upkeep     sweep, retention, purge, redrive, changed and deleted queues
    moving     from one queue to another; dead letters
    routing    the metadata log: read, assign, backfill
    restoring  backfill from an archive, below the log
    views      browse, attempts, stats
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.limits import MAX_VIEWS
from penstock.stores.core import Core
from penstock.stores.coverage import Coverage, Stretch
from penstock.stores.intake import Intake
from penstock.stores.moving import Moving
from penstock.stores.pinned import Pinned
from penstock.stores.placing import Placing
from penstock.stores.plans import Collected, StoreInfo
from penstock.stores.queues import Counts, Queue
from penstock.stores.restoring import Restoring
from penstock.stores.routing import Routing
from penstock.stores.settling import Settling
from penstock.stores.upkeep import ALL, Upkeep
from penstock.stores.views import Views

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.errors import PenstockError
    from penstock.kv import Engine
    from penstock.model import QueueSpec
    from penstock.stores.active import ActiveSet, Quarantine
    from penstock.stores.audit import AuditReport

__all__ = ["KvStore"]


class KvStore:
    """A store on a key-value engine."""

    def __init__(
        self,
        engine: Engine,
        design: str,
        make_active: Callable[[Engine, Quarantine], ActiveSet],
        *,
        store_id: int,
        routing: str | None,
        now_ms: int,
    ) -> None:
        core = Core(engine, design, make_active, store_id=store_id, routing=routing, now_ms=now_ms)
        self.core = core
        settling = Settling(core)
        placing = Placing(core)
        router = Routing(core, placing)
        upkeep = Upkeep(core, settling, router, Moving(core))
        intake = Intake(core, upkeep, placing)
        views = Views(core, upkeep)
        self.publish = intake.publish
        self.claim = intake.claim
        self.ack = settling.ack
        self.release = settling.release
        self.extend = settling.extend
        self.extend_lease = settling.extend_lease
        self.held = settling.held
        self.sweep = upkeep.sweep
        self.soonest_ms = upkeep.soonest_ms
        self.purge = upkeep.purge
        self.redrive = upkeep.redrive
        self.move = upkeep.move
        self.delete_queue = upkeep.delete_queue
        self.drain_queue = upkeep.drain_queue
        self.read_log = router.read_log
        self.assign = router.assign
        self.take_epoch = router.take_epoch
        self.route_plan = router.route_plan
        self.filters_at = router.filters_at
        self.backfill_plan = router.backfill_plan
        self.fill = router.fill
        self.restore = Restoring(core, placing).restore
        self.trim = upkeep.trim
        self.backfill = router.backfill
        self.configure_log = router.configure_log
        self.log_stats = router.stats
        self.browse = views.browse
        self.attempts = views.attempts
        self.queue_stats = views.queue_stats
        self.store_stats = views.store_stats
        self._upkeep = upkeep

    def create_queue(self, spec: QueueSpec, now_ms: int) -> None:
        """Add a queue, which takes messages from here on."""
        core = self.core
        batch = core.engine.batch()
        queue = Queue(spec, core.queue_numbers.allocate(batch, 1), Counts())
        core.put_spec(batch, queue)
        live = [Stretch(core.log.end, None, spec.filter)]
        core.put_coverage(batch, queue, Coverage(live, known_from=0))
        core.filters_changed(batch, core.log.end, now_ms)
        core.commit(batch, (queue,), now_ms)
        core.adopt(queue)

    def update_queue(self, spec: QueueSpec, now_ms: int, *, from_offset: int | None = None) -> None:
        """Change a queue's settings; name and ordering stay."""
        self._upkeep.respec(self.core.queue(spec.name), spec, from_offset, now_ms)

    def draining(self, queue_name: str) -> bool:
        """Whether a queue takes no more messages and is about to go."""
        return self.core.coverage[self.core.queue(queue_name).name].draining

    def live_filters(self) -> dict[str, str]:
        """Return the filters that new messages are routed by."""
        core = self.core
        return {
            name: text
            for name, coverage in core.coverage.items()
            if (text := coverage.filter_at(core.log.end)) is not None
        }

    @property
    def changed_elsewhere(self) -> int:
        """Return 0: a store on a key-value engine has one owner."""
        return 0

    def contention(self) -> None:
        """Return nothing: a store on a key-value engine has one owner."""

    @property
    def away(self) -> str | None:
        """Return None: it answers, or it is lost for good."""
        return None

    def routing(self) -> str:
        """Return how the store routes."""
        return self.core.identity.routing

    def info(self) -> StoreInfo:
        """Say which store this is."""
        identity = self.core.identity
        return StoreInfo(f"{identity.store_id:08x}", identity.design, identity.routing)

    def pin(
        self,
        now_ms: int,
        *,
        stats: bool = False,
        marks: bool = True,  # noqa: ARG002 - one process gives out all numbers, in order
    ) -> Pinned:
        """Pin the present state for reading; ``stats``: with the stats of every queue."""
        core = self.core
        # The rows do not say whether a delay is over: what is due must have been moved.
        self._upkeep.catch_up(now_ms, ALL)
        return Pinned(
            core.engine.view(),
            core.identity,
            at_ms=now_ms,
            log=self.log_stats(),
            totals=self.store_stats(),
            stats=[self.queue_stats(name, now_ms) for name in sorted(core.queues)] if stats else [],
        )

    @property
    def max_views(self) -> int:
        """How many states a server may have pinned at a time: each keeps deleted data on disk."""
        return MAX_VIEWS

    def collectable(self, message_ids: Sequence[int]) -> set[int]:
        """Return those messages that no queue can come to hold any more: the log has let go.

        What holds none of them now never will: assignments and backfills come from the log.
        """
        log = self.log_stats()
        gone = min(log.earliest, log.routed_up_to)
        return {message_id for message_id in message_ids if message_id < gone}

    def drop_payloads(self, message_ids: Sequence[int], now_ms: int, *, dry_run: bool) -> Collected:
        """Delete payloads that nothing refers to.

        The caller has made sure that they are collectable and that no queue holds them.
        """
        core = self.core
        batch = core.engine.batch()
        count, freed = core.payloads.discard(batch, message_ids)
        if count and not dry_run:
            core.commit(batch, (), now_ms)
        return Collected(count, freed)

    def offset_at(self, time_ms: int) -> int:
        """Return an offset at or before the first message of that time."""
        return self.core.log.offset_at(time_ms)

    def offsets_at(self, time_ms: int) -> list[int]:
        """Return the same: all offsets are in one range."""
        return [self.offset_at(time_ms)]

    def specs(self) -> list[QueueSpec]:
        """Return the settings of every queue, by name."""
        return [queue.spec for _, queue in sorted(self.core.queues.items())]

    def spec(self, queue_name: str) -> QueueSpec:
        """Return the settings of a queue."""
        return self.core.queue(queue_name).spec

    def available(self, queue_name: str) -> int | None:
        """Return how many messages of a queue are available, as last counted; None: it is gone."""
        queue = self.core.queues.get(queue_name)
        return None if queue is None else queue.counts.available

    @property
    def commits(self) -> int:
        """How many commits were made: a change is durable once its commit is."""
        return self.core.commits

    def audit(self, *, repair: bool, now_ms: int) -> AuditReport:
        """Hold the store to its invariants."""
        # Loaded when it is wanted: it is as large as the rest of the store.
        from penstock.stores.audit import audit  # noqa: PLC0415

        return audit(self, repair=repair, now_ms=now_ms)

    def take_woken(self) -> set[str]:
        """Return the queues that may have something to claim since the last call."""
        woken, self.core.woken = self.core.woken, set()
        return woken

    def time_floor_ms(self) -> int:
        """Return the latest time that this store has seen."""
        return self.core.time_floor_ms()

    def sync(self) -> None:
        """Make every commit so far durable."""
        self.core.engine.sync()

    def checkpoint(self, path: Path) -> None:
        """Copy the present state into a new directory."""
        self.core.engine.checkpoint(path)

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Call back if the engine is lost to this process."""
        self.core.engine.on_lost(told)

    def close(self) -> None:
        """Close the engine."""
        self.core.engine.close()
