"""A store on a SQL database, as one object with the verbs of all modules; its tables.

Everything is looked at before anything is written. The tables are made once, in one transaction,
in a schema that has none. A store that lacks a table, a column or an index was damaged: to make
that part again, empty, would hide the loss.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from typing import TYPE_CHECKING, Final

import msgspec
from psycopg import sql

from penstock.errors import (
    InvalidInput,
    PenstockError,
    StoreDamaged,
    StoreMismatch,
)
from penstock.limits import MAX_DATABASE_VIEWS, MAX_RING_SIZE
from penstock.model import Collected
from penstock.store.contract import Contention, Health, StoreDetails
from penstock.store.policy import LogSettings, check_routing
from penstock.store.sql.database import Database, read_sql
from penstock.store.sql.inspect import SqlInspect
from penstock.store.sql.location import without_password
from penstock.store.sql.maintain import SqlMaintain
from penstock.store.sql.session import row_lost
from penstock.store.sql.snapshot import SqlSnapshots
from penstock.store.sql.zones import NEVER_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.store.sql.location import SqlPlace

log = logging.getLogger(__name__)

# The version that schema.sql writes into the table schema_version. A database with any other is
# refused. A change of schema.sql after a release raises it, and this comment says how an older
# schema becomes the new one. Version 1 was in no release: its messages are moved by a broker of the
# older Penstock that claims, and one of this that publishes.
VERSION: Final = 2
# Any number that no other user of advisory locks is likely to take.
_LOCK: Final = 0x70656E73
# How schema.sql is written.
_TABLE: Final = re.compile(r"^CREATE TABLE (\w+) \((.*?)^\);", re.MULTILINE | re.DOTALL)
_COLUMN: Final = re.compile(r"^    ([a-z]\w*) ", re.MULTILINE)
_INDEX: Final = re.compile(r"^CREATE INDEX (\w+)", re.MULTILINE)
_SEQUENCE: Final = re.compile(r"^CREATE SEQUENCE (\w+)", re.MULTILINE)


def open_store(
    place: SqlPlace,
    *,
    store_id: int,
    routing: str | None,
    random: Callable[[], float],
    clock: Callable[[], int],
    relaxed: bool = False,
    background: bool = False,
    create: bool = True,
) -> SqlStore:
    """Open a store, making it if the database has none and ``create`` is set.

    Nothing is written to a database that holds anything else.
    """
    if place.dialect == "cockroachdb":
        log.warning(
            "Penstock has not been run on CockroachDB: its statements were only compared with the "
            "documentation (docs/cockroachdb.md); try it with messages you can lose"
        )
    database = Database(place, relaxed=relaxed, clock=clock)

    def opened() -> SqlStore:
        _prepare(database, place, create=create)
        _make_instance(database, store_id, routing)
        return SqlStore(database, random, background=background)

    try:
        database.connect()
        # Once there is a database, a connection that is lost is made again, as for every verb.
        return database.do(opened, again=True)
    except BaseException:
        database.close()
        raise


# --- tables ---------------------------------------------------------------------------------------


def _prepare(database: Database, place: SqlPlace, *, create: bool) -> None:
    """Make the tables if the schema has none; refuse tables that are not those of this version.

    Several processes may call it at once: one makes the tables, the others wait.
    """
    _refuse_encoding(database)
    if _is_there(database):
        return
    if not create:
        where = f"{without_password(place.conninfo)}, schema {place.schema!r}"
        raise StoreMismatch(f"there is no store at {where}; 'penstock create' makes one")
    with database.at_leisure():
        database.do(lambda: _make_tables(database))


def _refuse_encoding(database: Database) -> None:
    """Refuse a database that does not say which characters its bytes are: text comes as bytes."""
    for name in ("server_encoding", "client_encoding"):
        if database.execute(f"SELECT current_setting('{name}') = 'SQL_ASCII'") == [(True,)]:
            raise StoreMismatch(
                f"the {name} of the database is SQL_ASCII, which can't hold text: make a database "
                "by CREATE DATABASE NAME TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C', and leave "
                "client_encoding to it"
            )


def _is_there(database: Database) -> bool:
    """Whether the schema holds a store; raise if it holds a damaged one, or anything else."""
    present = _present(database)
    tables = {each.partition(".")[0] for each in present if not each.startswith("index ")}
    if not tables:
        return False
    ours = {part for part in _parts() if "." not in part and not part.startswith("index ")}
    if "schema_version.version" not in present:
        if len(tables & ours) > len(tables - ours):
            raise _damaged(database, ["schema_version"])
        raise StoreMismatch(
            f"the schema {database.schema!r} of the database holds tables that are not Penstock's "
            f"({', '.join(sorted(tables)[:5])}); name another with ?schema=NAME"
        )
    # By its whole name: without the right to use the schema it would not be found at all.
    name = sql.Identifier(database.schema, "schema_version")
    rows = database.execute(sql.SQL("SELECT version::text FROM {}").format(name))
    if not rows:
        raise _damaged(database, ["the row of schema_version"])
    if rows != [(str(VERSION),)]:
        raise StoreMismatch(
            f"the schema {database.schema!r} of the database has version {rows[0][0]!s:.100}; this "
            f"Penstock reads version {VERSION}: use the Penstock that made it, or name another "
            "schema with ?schema=NAME"
        )
    missing = [part for part in _parts() if part not in present]
    if missing:
        raise _damaged(database, missing)
    return True


def _present(database: Database) -> set[str]:
    """Return the parts of the schema, as :func:`_parts` names them, and tables without columns."""
    rows = database.execute(
        # Tables that the user may not even see count as well: they are not to be made again.
        "SELECT c.relname::text, c.relkind IN ('i', 'I'), a.attname::text "
        "FROM pg_catalog.pg_class c "
        "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        "LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid "
        "AND a.attnum > 0 AND NOT a.attisdropped AND c.relkind NOT IN ('i', 'I') "
        "WHERE n.nspname = %(schema)b::text "
        "AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'i', 'I', 'S')",
        {"schema": database.schema},
    )
    found = set()
    for name, is_index, column in rows:
        found |= {f"index {name}"} if is_index else {name, f"{name}.{column}"}
    return found


@cache
def _parts() -> list[str]:
    """Return every sequence, ``table``, ``table.column`` and ``index name`` of schema.sql."""
    parts = _SEQUENCE.findall(read_sql("schema.sql"))
    for table, body in _TABLE.findall(read_sql("schema.sql")):
        parts += [table, *(f"{table}.{column}" for column in _COLUMN.findall(body))]
    return parts + [f"index {name}" for name in _INDEX.findall(read_sql("schema.sql"))]


def _damaged(database: Database, missing: list[str]) -> StoreDamaged:
    # A missing table is told without its columns.
    whole = set(missing)
    told = [part for part in missing if "." not in part or part.partition(".")[0] not in whole]
    return StoreDamaged(
        f"the schema {database.schema!r} of the database was a store and lacks "
        f"{', '.join(told[:10])}; nothing was changed: bring it back from a backup of the database "
        "(an index: make it as Penstock's schema.sql does)"
    )


def _make_tables(database: Database) -> None:
    with database.transaction():
        if database.dialect == "cockroachdb":
            # Else each CREATE would be a transaction by itself.
            database.execute("SET LOCAL autocommit_before_ddl = off")
        else:
            database.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        if not _is_there(database):
            name = sql.Identifier(database.schema)
            database.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
            # Without parameters, so that one text may hold many statements.
            database.execute(read_sql("schema.sql"))


def _make_instance(database: Database, store_id: int, routing: str | None) -> None:
    """Write the rows of ``instance`` and ``log_heads`` if the tables are new; check the routing."""
    # Before the row: a store that another process is making has both.
    remains = database.run("find_remains")[0][0]
    rows = database.run("load_instance")
    if remains and not rows:
        raise row_lost("instance")
    if not rows:
        logs = database.tunables.logs
        database.run(
            "make_instance",
            store_id=store_id,
            now_ms=database.clock(),
            routing=routing or "inline",
            ring_size=database.tunables.ring_size,
            logs=logs,
            never=NEVER_MS,
            log_settings=msgspec.msgpack.encode(LogSettings(changes=[(0, logs)])),
            filter_changes=msgspec.msgpack.encode([]),
            segment_ms=-(1 << 62),
        )
        rows = database.run("load_instance")
    check_routing("the store", rows[0][1], routing)


# --- the store ------------------------------------------------------------------------------------


class SqlStore(SqlMaintain, SqlInspect, SqlSnapshots):
    """A store on a SQL database.

    Its verbs are methods of the classes that it inherits from, each in the module of its kind.
    """

    # A commit is durable when the database has answered it.
    durable_on_commit = True
    # Each call has a connection of its own, as far as there are enough.
    parallel = True

    def __init__(
        self, database: Database, random: Callable[[], float], *, background: bool
    ) -> None:
        super().__init__(database, random)
        self._background = background
        self._time_floor_ms = int(self.database.run("time_floor")[0][0] or 0)
        # How long a verb waits for the database, and for other verbs of this process.
        self.patience_s: float | None = self.tunables.verb_timeout_ms / 1000

    # --- the store -------------------------------------------------------------------------

    def info(self) -> StoreDetails:
        """Return which store this is. Each snapshot has a connection of its own."""
        return StoreDetails(
            f"{self.store_id:08x}", "sql", self.routing, MAX_DATABASE_VIEWS, self._time_floor_ms
        )

    def health(self, *, disk: bool = False) -> Health:  # noqa: ARG002 - it is the database's
        """Return whether the database has answered, and the cost of sharing it."""
        zones, database = self.zones, self.database
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
        """Bound how long the statements of this thread wait for the database from here on."""
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
            raise InvalidInput(f"ring_size is {ring_size}; it must be from 1 to {MAX_RING_SIZE}")

        def work() -> None:
            self.lock_heads()
            self.database.run("put_ring_size", value=ring_size)
            self.zones.put_ring_high(now_ms)

        self.change_queues(work, again=True)

    def split_tokens(self, queue_name: str, now_ms: int) -> int:
        """Give each token of a queue a range of its own; return how many. CockroachDB only."""
        if self.database.dialect != "cockroachdb":
            raise InvalidInput("a table of PostgreSQL is in one place: no ranges to split")
        self.refresh(now_ms)
        queue = self.queue(queue_name)
        for statement in ("split_pointers", "split_vesting"):
            self.database.run(statement, queue=queue.number, tokens=self.ring_high)
        return self.ring_high

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
        name = "find_unheld" if dry_run else "drop_messages"
        sizes = self.change(lambda: self.database.run(name, message_ids=ids))
        return Collected(len(sizes), sum(size for (size,) in sizes))

    # --- time and durability ---------------------------------------------------------------

    def follow(self, look: Callable[[], None]) -> None:
        """Call ``look`` about every minute, by which a clock follows the database's."""
        self.on_minute = look

    def server_ms(self) -> int:
        """Return the time of the server."""
        return int(self.database.ask("server_time")[0][0])

    def checkpoint(self, path: Path) -> None:
        """Refuse: a database has its own backup."""
        raise PenstockError(
            f"a store on a SQL database is not copied to {path}: use the database's own backup, "
            "such as pg_dump or BACKUP"
        )
