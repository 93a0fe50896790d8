"""What the URL of a SQL database says: where it is, and how claims go about there.

Here and not beside the store: a URL is read and refused without the database's driver.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

from penstock.errors import InvalidUrl
from penstock.limits import MAX_RING_SIZE

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "SEVERAL",
    "SQL_SCHEMES",
    "TUNED",
    "SqlPlace",
    "parse_sql",
    "without_password",
]

SQL_SCHEMES: Final = ("postgresql:", "cockroachdb:")
# The error of a list of databases.
SEVERAL: Final = (
    "a store is in one database. Name one, with ?schema=NAME if applications share it, or open a "
    "store for each application"
)
# Options that are tunables of the store, with the least and the most that they may be.
TUNED: Final[Mapping[str, tuple[int, int]]] = {
    "peek_max": (1, 10_000),
    "selection_max": (1, 100),
    "sequential": (0, 1),
    "dequeue_max": (1, 10_000),
    "threshold_ms": (0, 60_000),
    "min_inactive_ms": (1_000, 86_400_000),
    "poll_ms": (10, 60_000),
    "idle_poll_ms": (10, 60_000),
    "verb_timeout_ms": (100, 3_600_000),
    "statement_timeout_ms": (100, 3_600_000),
    "lock_timeout_ms": (100, 3_600_000),
    "bulk_timeout_ms": (1_000, 86_400_000),
}


class SqlPlace(NamedTuple):
    """A database that holds a store; ``shown`` is its URL without password."""

    dialect: str
    conninfo: str
    schema: str
    ring_size: int | None
    tuned: Mapping[str, int]
    shown: str


def parse_sql(url: str) -> SqlPlace:
    """Read the URL of a SQL database."""
    shown = without_password(url)
    if not url.startswith(SQL_SCHEMES):
        raise InvalidUrl(
            f"{shown!r:.200} is not on a SQL database: postgresql://HOST/DB, cockroachdb://HOST/DB"
        )
    if re.search(rf"[;,]\s*(?:{'|'.join(SQL_SCHEMES)})", url):
        raise InvalidUrl(f"{shown!r:.200}: {SEVERAL}")
    dialect, _, rest = url.partition(":")
    place, _, query = rest.partition("?")
    if not place.startswith("//"):
        raise InvalidUrl(f"{shown!r:.200}: {dialect}://USER:PASSWORD@HOST:PORT/DATABASE")
    # What libpq can't read it quotes, and that may be a part of the password.
    who, _, _ = place[2:].rpartition("@")
    if not re.fullmatch(r"(?:[^\s@/%]|%(?!00)[0-9A-Fa-f]{2})*", who):
        raise InvalidUrl(
            f"{dialect}: user or password has characters that are to be written as %XX, like %40 "
            "for @ and %2F for /"
        )
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not all(re.fullmatch(r"[a-z_]+", name) for name in options):
        raise InvalidUrl(f"{dialect}: options are ?NAME=VALUE&NAME=VALUE; a ? elsewhere is %3F")
    schema = options.pop("schema", "penstock")
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema) or schema.startswith("pg_"):
        raise InvalidUrl(f"schema {schema!r:.100}: lower case letters, digits and _")
    ring_size = _number(options, "ring_size", 1, MAX_RING_SIZE)
    tuned = {
        name: value
        for name, bounds in TUNED.items()
        if (value := _number(options, name, *bounds)) is not None
    }
    # The rest is for the driver.
    told = urlencode(options, quote_via=quote)
    conninfo = f"postgresql:{place}" + (f"?{told}" if told else "")
    return SqlPlace(dialect, conninfo, schema, ring_size, tuned, shown)


def without_password(url: str) -> str:
    """Return the URL of a store as it may be shown."""
    if url.startswith("rocksdb:"):
        return url
    shown = re.sub(r"(?<=:)(?!//).*(?=@)", "...", url, flags=re.DOTALL)
    return re.sub(r"(?<=password=)[^&]*", "...", shown)


def _number(options: dict[str, str], name: str, least: int, most: int) -> int | None:
    text = options.pop(name, None)
    if text is None:
        return None
    if not (text.isdecimal() and text.isascii() and least <= int(text) <= most):
        raise InvalidUrl(f"{name} {text!r:.100}: from {least} to {most}")
    return int(text)
