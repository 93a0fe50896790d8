"""A store on a SQL database, as one object with the verbs of all modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.errors import InvalidInput, PenstockError
from penstock.limits import MAX_DATABASE_VIEWS, MAX_RING_SIZE
from penstock.model import Collected, Contention
from penstock.store.contract import Health, StoreDetails
from penstock.store.sql.database import Database
from penstock.store.sql.inspect import SqlInspect
from penstock.store.sql.location import Tunables, without_password
from penstock.store.sql.maintain import SqlMaintain
from penstock.store.sql.publish import SqlPublish
from penstock.store.sql.schema import find, prepare
from penstock.store.sql.session import Session
from penstock.store.sql.snapshot import SqlSnapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.store.check_report import AuditReport


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
        # Where contention is expensive, pointers are spread from the beginning.
        tunables = Tunables(ring_size=16 if dialect == "cockroachdb" else 1)
    tunables = msgspec.structs.replace(tunables, **(tuned or {}))
    clock_ms = clock or (lambda: now_ms)
    database = Database(
        conninfo, schema, dialect, relaxed=relaxed, tunables=tunables, clock=clock_ms
    )
    try:
        database.connect()
        if create:
            prepare(database)
        else:
            find(database, f"at {without_password(conninfo)}, schema {schema!r}")
        core = Session(
            database,
            tunables,
            store_id=store_id,
            routing=routing,
            ring_size=ring_size,
            random=random,
            now_ms=now_ms,
            clock=clock_ms,
        )
    except BaseException:
        database.close()
        raise
    return SqlStore(core, background=background)


class SqlStore(SqlPublish, SqlMaintain, SqlInspect, SqlSnapshots):
    """A store on a SQL database.

    Its verbs are methods of the classes that it inherits from, each in the module of its kind.
    """

    # A commit is durable when the database has answered it.
    durable_on_commit = True

    def __init__(self, core: Session, *, background: bool) -> None:
        super().__init__(core, background=background)
        self.progress = core.progress
        self._time_floor_ms = int(self.database.run("time_floor")[0][0] or 0)
        # How long a verb waits for the database, and for other verbs of this process.
        self.patience_s: float | None = core.tunables.verb_timeout_ms / 1000

    # --- the store -------------------------------------------------------------------------

    def info(self) -> StoreDetails:
        """Return which store this is. Each snapshot has a connection of its own."""
        store_id, routing = self.core.identity
        return StoreDetails(
            f"{store_id:08x}", "sql", routing, MAX_DATABASE_VIEWS, self._time_floor_ms
        )

    def health(self, *, disk: bool = False) -> Health:  # noqa: ARG002 - it is the database's
        """Return whether the database has answered, and the cost of sharing it."""
        zones, database = self.core.zones, self.database
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
        """Bound how long the statements from here on wait for the database."""
        self.database.limit(seconds)

    def recover(self, alone: AbstractContextManager[None]) -> None:
        """Do nothing: every verb tries to connect."""

    def on_lost(self, told: Callable[[PenstockError], None]) -> None:
        """Do nothing: the database is never lost to one process alone."""

    def sync(self) -> None:
        """Do nothing: see ``durable_on_commit``."""

    # --- tokens ----------------------------------------------------------------------------

    def set_ring_size(self, ring_size: int, now_ms: int) -> None:
        """Give new zones a token of another ring; zones that are there keep theirs."""
        if not 1 <= ring_size <= MAX_RING_SIZE:
            raise InvalidInput(f"ring_size {ring_size}: from 1 to {MAX_RING_SIZE}")
        core = self.core

        def work() -> None:
            core.lock_head()
            self.database.run("put_ring", ring_size=ring_size)
            core.ring_high = self.database.run("put_ring_high")[0][0]
            core.ring_size = ring_size
            core.changed(now_ms)

        core.change(work)

    def split_tokens(self, queue_name: str, now_ms: int) -> int:
        """Give each token of a queue a range of its own; return how many. CockroachDB only."""
        core = self.core
        if self.database.dialect != "cockroachdb":
            raise InvalidInput("a table of PostgreSQL is in one place: no ranges to split")
        core.refresh(now_ms)
        queue = core.queue(queue_name)
        for statement in ("split_pointers", "split_vesting"):
            self.database.run(statement, queue=queue.number, tokens=core.ring_high)
        return core.ring_high

    # --- payloads --------------------------------------------------------------------------

    def collect(
        self,
        message_ids: Sequence[int],
        now_ms: int,  # noqa: ARG002 - the contract's
        *,
        dry_run: bool,
    ) -> Collected:
        """Delete payloads that no queue refers to."""
        ids = [message_id for message_id in message_ids if message_id < 1 << 63]

        def work() -> Collected:
            rows = self.database.run("unheld", message_ids=ids)
            if rows and not dry_run:
                self.database.run("drop_messages", message_ids=[row[0] for row in rows])
            return Collected(len(rows), sum(row[1] for row in rows))

        return self.core.change(work)

    # --- time and durability ---------------------------------------------------------------

    def follow(self, look: Callable[[], None]) -> None:
        """Call ``look`` about every minute, by which a clock follows the database's."""
        self.on_minute = look

    def audit(self, *, repair: bool, now_ms: int) -> AuditReport:
        """Check the store's invariants; with ``repair``, mend the tables."""
        from penstock.store.sql.check import audit  # noqa: PLC0415 - seldom wanted

        with self.database.at_leisure():
            return audit(self.core, repair=repair, now_ms=now_ms)

    def server_ms(self) -> int:
        """Return the time of the server."""
        return int(self.database.run("server_time")[0][0])

    def checkpoint(self, path: Path) -> None:
        """Refuse: a database has its own backup."""
        raise PenstockError(
            f"a store on a SQL database is not copied to {path}: use the database's own backup, "
            "such as pg_dump or BACKUP"
        )
