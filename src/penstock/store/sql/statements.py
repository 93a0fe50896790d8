"""Reads queries.sql: statements by name, of the dialect that the database speaks."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DIALECTS", "Statement", "parse_statements", "statements_of"]

DIALECTS: Final = ("postgresql", "cockroachdb")
_NAME: Final = re.compile(r"^-- name: (\w+)$")
_DIALECT: Final = re.compile(r"^-- dialect: (\w+)$")
_ONCE: Final = "-- plan: once"
# Not a cast, which has two colons.
_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z]\w*)")


class Statement(NamedTuple):
    """A statement: its name, what it is for, its text for psycopg and its parameters.

    ``planned_once``: the server may keep a plan that does not depend on the parameters.
    """

    name: str
    purpose: str
    text: str
    parameters: frozenset[str]
    planned_once: bool


def parse_statements(text: str, dialect: str) -> dict[str, Statement]:
    """Read named statements; a variant for the dialect takes the place of the common one."""
    found: dict[str, Statement] = {}
    name = ""
    variant: str | None = None
    purpose: list[str] = []
    lines: list[str] = []
    once = False

    def add() -> None:
        body = " ".join(line.partition("-- ")[0].strip() for line in lines).strip().rstrip(";")
        if not name or not body:
            return
        if variant is None and name in found:
            raise ValueError(f"two statements are named {name}")
        if variant not in {None, *DIALECTS}:
            raise ValueError(f"statement {name}: no dialect {variant!r}")
        if variant in {None, dialect}:
            parameters = frozenset(_PARAMETER.findall(body))
            # Parameters go in binary: payloads are not to be spelt out.
            sql = _PARAMETER.sub(r"%(\1)b", body.replace("%", "%%"))
            found[name] = Statement(name, " ".join(purpose), sql, parameters, once)

    for line in text.splitlines():
        named, dialected = _NAME.match(line), _DIALECT.match(line)
        if named or dialected:
            add()
            lines = []
            if named:
                name, variant, purpose, once = named[1], None, [], False
            elif dialected:
                variant = dialected[1]
        elif line == _ONCE:
            once = True
        elif line.startswith("--"):
            if not lines:
                purpose.append(line.removeprefix("--").strip())
        elif line.strip():
            lines.append(line)
    add()
    return found


@cache
def statements_of(dialect: str) -> Mapping[str, Statement]:
    """Return every statement of the store for a dialect."""
    text = (files("penstock.store.sql") / "queries.sql").read_text("utf-8")
    return parse_statements(text, dialect)
