"""The contract over an ordered key-value engine, whichever way live messages are kept.

Nothing here waits, reads a clock or takes a lock: the broker does. Each verb is in the module of
its kind, over one :class:`~penstock.store.kv.state.Core`::

    intake     publish, claim (placing: into queues by their routes)
    settling   ack, release, extend; leases that expire
    upkeep     sweep, retention, purge, redrive, changed and deleted queues
    moving     from one queue to another; dead letters
    routing    the metadata log: read, assign, backfill
    restoring  backfill from an archive, below the log
    views      browse, attempts, stats
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from penstock.errors import StoreDamaged
from penstock.limits import MAX_VIEWS
from penstock.store.coverage import Coverage, Stretch
from penstock.store.kv.inspect import Views
from penstock.store.kv.maintain import ALL, Upkeep
from penstock.store.kv.move import Moving
from penstock.store.kv.placing import Placing
from penstock.store.kv.publish import Intake
from penstock.store.kv.queues import Counts, Queue
from penstock.store.kv.restoring import Restoring
from penstock.store.kv.routing import Routing
from penstock.store.kv.settle import Settling
from penstock.store.kv.snapshot import Pinned
from penstock.store.kv.state import Core
from penstock.store.plans import Collected, StoreInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.engines import Engine
    from penstock.errors import PenstockError
    from penstock.model import QueueSpec
    from penstock.store.kv.check import AuditReport
    from penstock.store.live import ActiveSet, Quarantine

__all__ = ["KvStore"]

P = ParamSpec("P")
T = TypeVar("T")


def _guarded(method: Callable[Concatenate[KvStore, P], T]) -> Callable[Concatenate[KvStore, P], T]:
    """Wrap a method of a store: memory is as the disk says it is, however the method ends."""

    @wraps(method)
    def run(store: KvStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return store.core.run(method, store, *args, **kwargs)

    return run


class KvStore:
    """A store on a key-value engine."""

    # Its verbs wait for no other machine, or have bounds of their own.
    patience_s: None = None

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
        try:
            core = Core(
                engine, design, make_active, store_id=store_id, routing=routing, now_ms=now_ms
            )
        except StoreDamaged as error:
            raise StoreDamaged(
                f"{error}. The store can't do without that: restore a backup, or bring what can be "
                "read into a new store: penstock salvage STORE TARGET",
                table=error.table,
                begin=error.begin,
                end=error.end,
            ) from error
        self.core = core
        settling = Settling(core)
        placing = Placing(core)
        router = Routing(core, placing)
        upkeep = Upkeep(core, settling, router, Moving(core))
        intake = Intake(core, upkeep, placing)
        views = Views(core, upkeep)
        guarded = core.guarded
        self.publish = guarded(intake.publish)
        self.claim = guarded(intake.claim)
        self.ack = guarded(settling.ack)
        self.release = guarded(settling.release)
        self.extend = guarded(settling.extend)
        self.extend_lease = guarded(settling.extend_lease)
        self.held = guarded(settling.held)
        self.queues_of = guarded(settling.queues_of)
        self.sweep = guarded(upkeep.sweep)
        self.soonest_ms = upkeep.soonest_ms
        self.purge = guarded(upkeep.purge)
        self.redrive = guarded(upkeep.redrive)
        self.move = guarded(upkeep.move)
        self.delete_queue = guarded(upkeep.delete_queue)
        self.drain_queue = guarded(upkeep.drain_queue)
        self.read_log = guarded(router.read_log)
        self.assign = guarded(router.assign)
        self.take_epoch = guarded(router.take_epoch)
        self.route_plan = guarded(router.route_plan)
        self.filters_at = guarded(router.filters_at)
        self.backfill_plan = guarded(router.backfill_plan)
        self.fill = guarded(router.fill)
        self.restore = guarded(Restoring(core, placing).restore)
        self.trim = guarded(upkeep.trim)
        self.backfill = guarded(router.backfill)
        self.configure_log = guarded(router.configure_log)
        self.log_stats = guarded(router.stats)
        self.browse = guarded(views.browse)
        self.attempts = guarded(views.attempts)
        self.queue_stats = guarded(views.queue_stats)
        self.store_stats = guarded(views.store_stats)
        self._upkeep = upkeep

    @_guarded
    def create_queue(self, spec: QueueSpec, now_ms: int) -> None:
        """Add a queue, which takes messages from here on."""
        core = self.core
        batch = core.begin()
        queue = Queue(spec, core.queue_numbers.allocate(batch, 1), Counts())
        core.put_spec(batch, queue)
        live = [Stretch(core.log.end, None, spec.filter)]
        core.put_coverage(batch, queue, Coverage(live, known_from=0))
        core.filters_changed(batch, core.log.end, now_ms)
        core.commit(batch, (queue,), now_ms)
        core.adopt(queue)

    @_guarded
    def update_queue(self, spec: QueueSpec, now_ms: int, *, from_offset: int | None = None) -> None:
        """Change a queue's settings; name and ordering stay."""
        self._upkeep.respec(self.core.queue(spec.name), spec, from_offset, now_ms)

    @_guarded
    def draining(self, queue_name: str) -> bool:
        """Whether a queue takes no more messages and is about to go."""
        return self.core.coverage[self.core.queue(queue_name).name].draining

    @_guarded
    def live_filters(self) -> dict[str, str]:
        """Return the filters that new messages are routed by."""
        core = self.core
        return {
            name: text
            for name, coverage in core.coverage.items()
            if (text := coverage.filter_at(core.log.end)) is not None
        }

    @property
    def filter_changes(self) -> int:
        """How often the live filters have changed, or may have."""
        return self.core.live_changes

    def contention(self) -> None:
        """Return nothing: a store on a key-value engine has one owner."""

    @property
    def away(self) -> str | None:
        """Why nothing can be written at present; what is there can be read."""
        why = self.core.engine.away
        return None if why is None else str(why)

    def recover(self, alone: AbstractContextManager[None]) -> None:
        """Make an engine that is away take writes again, or raise why it does not."""
        self.core.engine.recover(alone, self._read_anew)

    def _read_anew(self) -> None:
        self.core.load()
        # What is there now is nobody's doubtful change any more.
        self.core.commits += 1
        for queue in self.core.queues.values():
            self.core.wake(queue)

    def free_bytes(self) -> int | None:
        """Return how many bytes the store's disk has left."""
        return self.core.engine.free_bytes()

    def limit(self, seconds: float) -> None:
        """Do nothing: see above."""

    def routing(self) -> str:
        """Return how the store routes."""
        return self.core.identity.routing

    def info(self) -> StoreInfo:
        """Say which store this is."""
        identity = self.core.identity
        return StoreInfo(f"{identity.store_id:08x}", identity.design, identity.routing)

    @_guarded
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

    @_guarded
    def drop_payloads(self, message_ids: Sequence[int], now_ms: int, *, dry_run: bool) -> Collected:
        """Delete payloads that nothing refers to.

        The caller has made sure that they are collectable and that no queue holds them.
        """
        core = self.core
        batch = core.begin()
        count, freed = core.payloads.discard(batch, message_ids)
        if count and not dry_run:
            core.commit(batch, (), now_ms)
        return Collected(count, freed)

    @_guarded
    def offset_at(self, time_ms: int) -> int:
        """Return an offset at or before the first message of that time."""
        return self.core.log.offset_at(time_ms)

    @_guarded
    def specs(self) -> list[QueueSpec]:
        """Return the settings of every queue, by name."""
        return [queue.spec for _, queue in sorted(self.core.queues.items())]

    @_guarded
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

    @_guarded
    def audit(self, *, repair: bool, now_ms: int) -> AuditReport:
        """Hold the store to its invariants."""
        # Loaded when it is wanted: it is as large as the rest of the store.
        from penstock.store.kv.check import audit  # noqa: PLC0415

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
