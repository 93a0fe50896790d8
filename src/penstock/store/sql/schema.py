"""Looks whether a database is ours, has the present schema, and lacks none of it.

It does so before anything is written. A schema is made once, in one transaction, where nothing is:
one that lacks a part was damaged by somebody, and to make that part anew, empty, would hide it.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql

from penstock.errors import StoreDamaged, StoreMismatch

if TYPE_CHECKING:
    from penstock.store.sql.database import Database

__all__ = ["FORMAT", "Migration", "applied", "find", "migrations", "prepare"]

FORMAT: Final = 1
PRODUCT: Final = "penstock"
# Any number that no other user of advisory locks is likely to take.
_LOCK: Final = 0x70656E73
# How migrations are written.
_TABLE: Final = re.compile(r"^CREATE TABLE (\w+) \((.*?)^\);", re.MULTILINE | re.DOTALL)
_COLUMN: Final = re.compile(r"^    ([a-z]\w*) ", re.MULTILINE)
_ADDED: Final = re.compile(r"^ALTER TABLE (\w+) ADD COLUMN (\w+)", re.MULTILINE)
_INDEX: Final = re.compile(r"^CREATE INDEX (\w+)", re.MULTILINE)


class Migration(NamedTuple):
    """One step from an older schema to the next."""

    number: int
    name: str
    text: str


def migrations() -> list[Migration]:
    """Return every step, in order."""
    found = []
    for file in (files("penstock.store.sql") / "migrations").iterdir():
        number, _, name = file.name.removesuffix(".sql").partition("_")
        if file.name.endswith(".sql"):
            found.append(Migration(int(number), name, file.read_text("utf-8")))
    return sorted(found)


def prepare(database: Database) -> None:
    """Bring the schema up to date, or refuse a database that is not ours or is of a newer version.

    Several processes may do it at once: one does, the others wait.
    """
    known = migrations()
    if applied(database, known) == len(known):
        return
    with database.at_leisure():
        database.do(lambda: _migrate(database, known))


def find(database: Database) -> None:
    """Refuse a database that has no store of the present schema; nothing is written."""
    known = migrations()
    done = applied(database, known)
    if done == 0:
        raise StoreMismatch(f"there is no store in the schema {database.schema!r} of the database")
    if done < len(known):
        raise StoreMismatch(
            f"the database has schema {done} of {len(known)}: whoever opens the store next brings "
            "it up to date"
        )


def applied(database: Database, known: list[Migration]) -> int:
    """Return how many steps have been done; nothing is written."""
    present = _present(database)
    tables = {each.partition(".")[0] for each in present if not each.startswith("index ")}
    if not tables:
        return 0
    ours = {part for part in _parts(known) if "." not in part and not part.startswith("index ")}
    if "migrations" not in tables:
        if len(tables & ours) > len(tables - ours):
            raise _damaged(database, ["migrations"])
        raise StoreMismatch(
            f"the schema {database.schema!r} of the database holds tables that are not Penstock's "
            f"({', '.join(sorted(tables)[:5])}); name another with ?schema=NAME"
        )
    # By its whole name: without the right to use the schema it would not be found at all.
    name = sql.Identifier(database.schema, "migrations")
    query = sql.SQL("SELECT number, name::text FROM {} ORDER BY number").format(name)
    done = [(int(row[0]), str(row[1])) for row in database.execute(query)]
    if len(done) > len(known):
        raise StoreMismatch(
            f"the database has schema {done[-1][0]}; this version of Penstock knows up to "
            f"{known[-1].number}: use a newer one"
        )
    if not done and tables <= ours:
        raise _damaged(database, ["the rows of migrations"])
    if not done or done != [(each.number, each.name) for each in known[: len(done)]]:
        raise StoreMismatch(
            f"the tables of the schema {database.schema!r} were not made by Penstock's migrations"
        )
    missing = [part for part in _parts(known[: len(done)]) if part not in present]
    if missing:
        raise _damaged(database, missing)
    return len(done)


def _present(database: Database) -> set[str]:
    """Return what the schema holds, as :func:`_parts` names it, and a table without columns."""
    rows = database.execute(
        # Those that the user may not even see as well: they are not to be made again.
        "SELECT c.relname::text, c.relkind IN ('i', 'I'), a.attname::text "
        "FROM pg_catalog.pg_class c "
        "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        "LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid "
        "AND a.attnum > 0 AND NOT a.attisdropped AND c.relkind NOT IN ('i', 'I') "
        "WHERE n.nspname = %(schema)b::text "
        "AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'i', 'I')",
        {"schema": database.schema},
    )
    found = set()
    for name, is_index, column in rows:
        found |= {f"index {name}"} if is_index else {name, f"{name}.{column}"}
    return found


def _parts(done: list[Migration]) -> list[str]:
    """Return every ``table``, ``table.column`` and ``index name`` that steps have made."""
    parts = []
    for step in done:
        for table, body in _TABLE.findall(step.text):
            parts += [table, *(f"{table}.{column}" for column in _COLUMN.findall(body))]
        parts += [f"{table}.{column}" for table, column in _ADDED.findall(step.text)]
        parts += [f"index {name}" for name in _INDEX.findall(step.text)]
    return parts


def _damaged(database: Database, missing: list[str]) -> StoreDamaged:
    # A table is told without its columns.
    whole = set(missing)
    told = [part for part in missing if "." not in part or part.partition(".")[0] not in whole]
    return StoreDamaged(
        f"the schema {database.schema!r} of the database was a store and lacks "
        f"{', '.join(told[:10])}; nothing was changed: bring it back from a backup of the database "
        "(an index: make it as Penstock's schema.sql does)"
    )


def _migrate(database: Database, known: list[Migration]) -> None:
    with database.transaction():
        if database.dialect == "postgresql":
            database.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        done = applied(database, known)
        if done == 0:
            name = sql.Identifier(database.schema)
            database.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
        for step in known[done:]:
            # Without parameters, so that one text may hold many statements.
            database.execute(step.text)
            database.execute(
                "INSERT INTO migrations VALUES (%(number)b, %(name)b)",
                {"number": step.number, "name": step.name},
            )
