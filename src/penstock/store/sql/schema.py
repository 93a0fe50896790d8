"""The two files of SQL: the tables of schema.sql, and the statements of queries.sql by name.

Everything is looked at before anything is written. The tables are made once, in one transaction,
in a schema that has none. A store that lacks a table, a column or an index was damaged: to make
that part again, empty, would hide the loss.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from psycopg import sql

from penstock.errors import StoreDamaged, StoreMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.store.sql.database import Database

# The version that schema.sql writes into the table schema_version. A database with any other is
# refused. A change of schema.sql after a release raises it, and this comment says how an older
# schema becomes the new one.
VERSION: Final = 1
# Any number that no other user of advisory locks is likely to take.
_LOCK: Final = 0x70656E73
# How schema.sql is written.
_TABLE: Final = re.compile(r"^CREATE TABLE (\w+) \((.*?)^\);", re.MULTILINE | re.DOTALL)
_COLUMN: Final = re.compile(r"^    ([a-z]\w*) ", re.MULTILINE)
_INDEX: Final = re.compile(r"^CREATE INDEX (\w+)", re.MULTILINE)


DIALECTS: Final = ("postgresql", "cockroachdb")
# How queries.sql is written.
_BLOCK: Final = re.compile(r"^-- (name|part): ", re.MULTILINE)
_EACH: Final = re.compile(r"^-- each: (.*)$", re.MULTILINE)
_DIALECT: Final = re.compile(r"^-- dialect: (\w+)$", re.MULTILINE)
_ONCE: Final = "plan: once"
# Not a cast, which has two colons.
_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z]\w*)")


# --- tables --------------------------------------------------------------------------------------


def prepare(database: Database) -> None:
    """Make the tables if the schema has none; refuse tables that are not those of this version.

    Several processes may call it at once: one makes the tables, the others wait.
    """
    if not is_there(database):
        with database.at_leisure():
            database.do(lambda: _make(database))


def find(database: Database, place: str) -> None:
    """Refuse a database that has no store; nothing is written. The error names the place."""
    if not is_there(database):
        raise StoreMismatch(f"there is no store {place}; 'penstock create' makes one")


def is_there(database: Database) -> bool:
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


@cache
def _parts() -> list[str]:
    """Return every ``table``, ``table.column`` and ``index name`` of schema.sql."""
    parts = []
    for table, body in _TABLE.findall(_text("schema.sql")):
        parts += [table, *(f"{table}.{column}" for column in _COLUMN.findall(body))]
    return parts + [f"index {name}" for name in _INDEX.findall(_text("schema.sql"))]


def _damaged(database: Database, missing: list[str]) -> StoreDamaged:
    # A missing table is told without its columns.
    whole = set(missing)
    told = [part for part in missing if "." not in part or part.partition(".")[0] not in whole]
    return StoreDamaged(
        f"the schema {database.schema!r} of the database was a store and lacks "
        f"{', '.join(told[:10])}; nothing was changed: bring it back from a backup of the database "
        "(an index: make it as Penstock's schema.sql does)"
    )


def _make(database: Database) -> None:
    with database.transaction():
        if database.dialect == "postgresql":
            database.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        if not is_there(database):
            name = sql.Identifier(database.schema)
            database.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
            # Without parameters, so that one text may hold many statements.
            database.execute(_text("schema.sql"))


# --- statements ----------------------------------------------------------------------------------


class Statement(NamedTuple):
    """A statement: what it is for, its text for psycopg and its parameters.

    ``planned_once``: the server may keep a plan that does not depend on the parameters.
    """

    purpose: str
    text: str
    parameters: frozenset[str]
    planned_once: bool


def parse_statements(text: str, dialect: str) -> dict[str, Statement]:
    """Read named statements; a variant for the dialect takes the place of the common one."""
    found: dict[str, Statement] = {}
    parts: dict[str, str] = {}
    _, *pieces = _BLOCK.split(text)
    for kind, block in zip(pieces[::2], pieces[1::2], strict=True):
        title, _, rest = block.partition("\n")
        if kind == "part":
            parts[title] = _code(rest).format_map(parts)
            continue
        each = _EACH.search(rest)
        for word in each[1].split() if each else ("",):
            name, whole = title.replace("{each}", word), rest.replace("{each}", word)
            if name in found:
                raise ValueError(f"two statements are named {name}")
            statement = _statement(name, whole, dialect, parts)
            if statement is not None:
                found[name] = statement
    return found


def _statement(name: str, text: str, dialect: str, parts: Mapping[str, str]) -> Statement | None:
    """Read one statement; None if the dialect has none."""
    common, *variants = _DIALECT.split(text)
    bodies = dict(zip(variants[::2], variants[1::2], strict=True))
    for unknown in bodies.keys() - set(DIALECTS):
        raise ValueError(f"statement {name}: no dialect {unknown!r}")
    about = [line[2:].strip() for line in takewhile(_is_comment, common.splitlines())]
    body = _code(bodies.get(dialect, common)).format_map(parts)
    if not body:
        return None
    return Statement(
        " ".join(line for line in about if line != _ONCE and not line.startswith("each:")),
        # Parameters go in binary: payloads are not to be spelt out.
        _PARAMETER.sub(r"%(\1)b", body.replace("%", "%%")),
        frozenset(_PARAMETER.findall(body)),
        _ONCE in about,
    )


def _code(text: str) -> str:
    """Return the text of a statement on one line, without comments."""
    lines = [line for line in text.splitlines() if not _is_comment(line)]
    return " ".join(line.partition("-- ")[0].strip() for line in lines).strip().rstrip(";")


def _is_comment(line: str) -> bool:
    return line.startswith("--")


@cache
def statements_of(dialect: str) -> Mapping[str, Statement]:
    """Return every statement of the store for a dialect."""
    return parse_statements(_text("queries.sql"), dialect)


@cache
def _text(name: str) -> str:
    return (files("penstock.store.sql") / name).read_text("utf-8")
