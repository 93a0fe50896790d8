"""Is this our database, and does it have the present schema? Asked before anything is written."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql

from penstock.errors import StoreMismatch

if TYPE_CHECKING:
    from penstock.stores.sql.database import Database

__all__ = ["FORMAT", "Migration", "applied", "find", "migrations", "prepare"]

FORMAT: Final = 1
PRODUCT: Final = "penstock"
# Any number that no other user of advisory locks is likely to take.
_LOCK: Final = 0x70656E73


class Migration(NamedTuple):
    """One step from an older schema to the next."""

    number: int
    name: str
    text: str


def migrations() -> list[Migration]:
    """Return every step, in order."""
    found = []
    for file in (files("penstock.stores.sql") / "migrations").iterdir():
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
    tables = {
        str(row[0])
        for row in database.execute(
            # Those that the user may not even see as well: they are not to be made again.
            "SELECT c.relname::text FROM pg_catalog.pg_class c "
            "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %(schema)b::text AND c.relkind IN ('r', 'p', 'v', 'm', 'f')",
            {"schema": database.schema},
        )
    }
    if not tables:
        return 0
    if not {"migrations", "instance", "log_head"} <= tables:
        shown = ", ".join(sorted(tables)[:5])
        raise StoreMismatch(
            f"the schema {database.schema!r} of the database holds tables that are not Penstock's "
            f"({shown}); name another with ?schema=NAME"
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
    if done != [(each.number, each.name) for each in known[: len(done)]]:
        raise StoreMismatch(
            f"the tables of the schema {database.schema!r} were not made by Penstock's migrations"
        )
    return len(done)


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
