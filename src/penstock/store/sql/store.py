"""The contract on a SQL database, as one object; each verb is in the module of its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.errors import InvalidInput, PenstockError
from penstock.limits import MAX_DATABASE_VIEWS, MAX_RING_SIZE
from penstock.model import Collected, Contention
from penstock.store.contract import Health, LiveQueue, StoreDetails
from penstock.store.sql.claim import Claiming
from penstock.store.sql.database import Database
from penstock.store.sql.filling import Filling
from penstock.store.sql.inspect import Views
from penstock.store.sql.location import without_password
from penstock.store.sql.maintain import ALL, Upkeep
from penstock.store.sql.move import Moving
from penstock.store.sql.pins import Pins
from penstock.store.sql.polling import Watching
from penstock.store.sql.publish import Intake
from penstock.store.sql.routing import Routing
from penstock.store.sql.schema import find, prepare
from penstock.store.sql.session import Core
from penstock.store.sql.settle import Settling
from penstock.store.sql.statements import statements_of
from penstock.store.sql.tunables import Tunables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.model import QueueSpec
    from penstock.store.check_report import AuditReport
    from penstock.store.sql.snapshot import SqlPinned

__all__ = ["SqlStore", "open_store"]


def open_store(
    conninfo: str,
    *,
    schema: str,
    dialect: str,
    store_id: int,
    routing: str | None,
    random: Callable[[], float],
    now_ms: int,
    clock: Callable[[], int] | None = None,
    ring_size: int | None = None,
    tunables: Tunables | None = None,
    tuned: Mapping[str, int] | None = None,
    relaxed: bool = False,
    background: bool = False,
    create: bool = True,
) -> SqlStore:
    """Open a store, making it if the database has none and ``create`` is set.

    Nothing is written to a database that holds anything else. ``tuned`` are tunables as a URL
    names them.
    """
    if tunables is None:
        # Where contention is dear, pointers are spread from the beginning.
        tunables = Tunables(ring_size=16 if dialect == "cockroachdb" else 1)
    if tuned:
        told = {**msgspec.structs.asdict(tunables), **tuned}
        # Not strictly: a URL says yes by 1.
        tunables = msgspec.convert(told, Tunables, strict=False)
    database = Database(
        conninfo,
        schema,
        dialect,
        relaxed=relaxed,
        tunables=tunables,
        clock=clock or (lambda: now_ms),
    )
    database.use(statements_of(dialect))
    try:
        database.connect()
        if create:
            prepare(database)
        else:
            find(database, f"at {without_password(conninfo)}, schema {schema!r}")
        core = Core(
            database,
            tunables,
            store_id=store_id,
            routing=routing,
            ring_size=ring_size,
            random=random,
            now_ms=now_ms,
            clock=clock,
        )
    except BaseException:
        database.close()
        raise
    return SqlStore(core, background=background)


class SqlStore:
    """A store on a SQL database."""

    # A commit is durable when the database has answered it.
    durable_on_commit = True

    def __init__(self, core: Core, *, background: bool) -> None:
        self.core = core
        self.progress = core.progress
        self._time_floor_ms = int(core.database.run("time_floor")[0][0] or 0)
        # A verb waits so long for the database, and for other verbs of this process.
        self.patience_s: float | None = core.tunables.verb_timeout_ms / 1000
        routing = Routing(core)
        settling = Settling(core)
        moving = Moving(core)
        upkeep = Upkeep(core, settling, routing, moving)
        claiming = Claiming(core, upkeep)
        watching = Watching(core, claiming, upkeep, background=background)
        filling = Filling(core, routing)
        views = Views(core, upkeep)
        self.create_queue = upkeep.create_queue
        self.update_queue = upkeep.update_queue
        self.delete_queue = upkeep.delete_queue
        self.publish = Intake(core).publish
        self.claim = watching.claim
        self.ack = settling.ack
        self.release = settling.release
        self.extend = settling.extend
        self.held = settling.held
        self.queues_of = settling.queues_of
        self.redrive = upkeep.redrive
        self.move = upkeep.move
        self.purge = upkeep.purge
        self.read_log = routing.read_log
        self.assign = routing.assign
        self.take_epoch = routing.take_epoch
        self.route_plan = routing.route_plan
        self.filters_at = routing.filters_at
        self.configure_log = routing.configure_log
        self.offset_at = routing.offset_at
        self.log_stats = routing.stats
        self.backfill_plan = filling.backfill_plan
        self.fill = filling.fill
        self.browse = views.browse
        self.attempts = views.attempts
        self.queue_stats = views.queue_stats
        self.store_stats = views.store_stats
        self.soonest_ms = watching.soonest_ms
        self.take_woken = watching.take_woken
        self.sweep = watching.sweep
        self._watching = watching
        self._upkeep = upkeep
        self.pins = Pins(core, lambda now_ms: upkeep.catch_up(now_ms, ALL))

    def follow(self, look: Callable[[], None]) -> None:
        """Have something called about every minute: a clock looks at the database's."""
        self._watching.follow = look

    # --- queues ----------------------------------------------------------------------------

    def spec(self, queue_name: str) -> QueueSpec:
        """Return the settings of a queue."""
        return self.core.queue(queue_name).spec

    def queues(self) -> list[LiveQueue]:
        """Return all queues, by name."""
        self.core.refresh()
        live = self.core.live_filters()
        return [
            LiveQueue(queue.spec, live.get(name), queue.coverage.draining)
            for name, queue in sorted(self.core.queues.items())
        ]

    def health(self) -> Health:
        """Return whether the database has answered, and the cost of sharing it.

        The disk is the database's.
        """
        zones, database = self.core.zones, self.core.database
        contention = Contention(
            collisions=zones.collisions,
            collected=zones.collected,
            repeated=database.repeated,
            reconnected=database.reconnected,
            statements=database.statements,
        )
        why = database.away
        away = None if why is None else f"the database does not answer: {why}"
        return Health(away, contention=contention)

    def limit(self, seconds: float) -> None:
        """Let what is asked for from here on wait for the database for so long."""
        self.core.database.limit(seconds)

    def recover(self, alone: AbstractContextManager[None]) -> None:
        """Do nothing: every verb tries to connect."""

    def info(self) -> StoreDetails:
        """Return which store this is. Each snapshot has a connection of its own."""
        identity = self.core.identity
        return StoreDetails(
            f"{identity.store_id:08x}",
            "sql",
            identity.routing,
            MAX_DATABASE_VIEWS,
            self._time_floor_ms,
        )

    def set_ring_size(self, ring_size: int, now_ms: int) -> None:
        """Give zones that come from here on a token of another ring; others keep theirs."""
        if not 1 <= ring_size <= MAX_RING_SIZE:
            raise InvalidInput(f"ring_size {ring_size}: from 1 to {MAX_RING_SIZE}")
        core = self.core

        def work() -> None:
            core.lock_head()
            core.database.run("put_ring", ring_size=ring_size)
            core.ring_high = core.database.run("put_ring_high")[0][0]
            core.ring_size = ring_size
            core.changed(now_ms)

        core.change(work)

    def split_tokens(self, queue_name: str, now_ms: int) -> int:
        """Give each token of a queue a range of its own; return how many. CockroachDB only."""
        core = self.core
        if core.database.dialect != "cockroachdb":
            raise InvalidInput("a table of PostgreSQL is in one place: no ranges to split")
        core.refresh(now_ms)
        queue = core.queue(queue_name)
        for statement in ("split_pointers", "split_vesting"):
            core.database.run(statement, queue=queue.number, tokens=core.ring_high)
        return core.ring_high

    # --- payloads --------------------------------------------------------------------------

    def collect(
        self,
        message_ids: Sequence[int],
        now_ms: int,  # noqa: ARG002
        *,
        dry_run: bool,
    ) -> Collected:
        """Delete payloads that nothing refers to."""
        core = self.core
        ids = [message_id for message_id in message_ids if message_id < 1 << 63]

        def work() -> Collected:
            rows = core.database.run("unheld", message_ids=ids)
            if rows and not dry_run:
                core.database.run("drop_messages", message_ids=[row[0] for row in rows])
            return Collected(len(rows), sum(row[1] for row in rows))

        dropped: Collected = core.change(work)
        return dropped

    def pin(self, now_ms: int, *, stats: bool = False, marks: bool = True) -> SqlPinned:
        """Pin what is committed for reading in bulk, on a connection of its own."""
        return self.pins.pin(now_ms, stats=stats, marks=marks)

    # --- time and durability ---------------------------------------------------------------

    def audit(self, *, repair: bool, now_ms: int) -> AuditReport:
        """Hold the store to its invariants."""
        from penstock.store.sql.check import audit  # noqa: PLC0415 - seldom wanted

        with self.core.database.at_leisure():
            return audit(self.core, repair=repair, now_ms=now_ms)

    def server_ms(self) -> int:
        """Return what time the server has."""
        return int(self.core.database.run("server_time")[0][0])

    def sync(self) -> None:
        """Do nothing: see ``durable_on_commit``."""

    def checkpoint(self, path: Path) -> None:
        """Refuse: a database has its own ways to be backed up."""
        raise PenstockError(
            f"a store on a SQL database is not copied to {path}: use the database's own backup, "
            "such as pg_dump or BACKUP"
        )

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Do nothing: the database is never lost to one process alone."""

    def close(self) -> None:
        """Let go of the connections."""
        self.pins.close()
        self.core.database.close()
