"""The URL of a SQL database: where it is, and the tunables that it sets.

Apart from the store: a URL is read and refused without the database's driver.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from penstock.errors import InvalidUrl
from penstock.limits import MAX_LOGS, MAX_RING_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SQL_SCHEMES: Final = ("postgresql:", "cockroachdb:")
# The error of a list of databases.
SEVERAL: Final = (
    "a store is in one database. Name one, with ?schema=NAME if applications share it, or open a "
    "store for each application"
)
_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
_Poll = Annotated[int, msgspec.Meta(ge=10, le=60_000)]
_Timeout = Annotated[int, msgspec.Meta(ge=100, le=3_600_000)]


class Tunables(msgspec.Struct, frozen=True, kw_only=True):
    """How claims look for zones, when zones are collected, and how long the database may take.

    ``ring_size``, ``logs``: tokens and logs of a new store. ``peek_max``: pointers that a claim
    looks at. Of these it visits up to ``selection_max`` at a time, fewer if it wants fewer messages
    or other processes are at them; if there are more, random ones, unless ``sequential`` turns the
    randomness off. ``dequeue_max``: messages that one zone gives at a visit while other zones wait.
    ``threshold_ms``: a pointer that is this little late for a delayed message is left alone.
    ``trust_ms``: for how long a publish does not look at a pointer that it saw vested; ``cool_ms``,
    longer than that: how long after a zone was found empty it is looked at once more.
    ``min_inactive_ms``: how long a zone is empty before its pointer is collected. ``poll_ms``: how
    often a process looks for messages of other processes while a claim waits, ``idle_poll_ms``
    else.

    ``connections``: connections of a process, and so how many of its verbs go on side by side.
    ``verb_timeout_ms``: how long a verb waits for the database in all before it fails, also for a
    connection that other verbs of its process have. The server ends a statement that takes
    ``statement_timeout_ms``, or waits for a lock for ``lock_timeout_ms``; maintenance (a check, a
    new schema, reading in bulk) has ``bulk_timeout_ms`` for each.

    Those with bounds can be set by a URL.
    """

    ring_size: int = 1
    logs: Annotated[int, msgspec.Meta(ge=1, le=MAX_LOGS)] = 16
    peek_max: _Count = 100
    selection_max: Annotated[int, msgspec.Meta(ge=1, le=100)] = 10
    sequential: bool = False
    dequeue_max: _Count = 10
    threshold_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 250
    trust_ms: int = 100
    cool_ms: int = 300
    min_inactive_ms: Annotated[int, msgspec.Meta(ge=1_000, le=86_400_000)] = 30_000
    poll_ms: _Poll = 100
    idle_poll_ms: _Poll = 1_000
    connections: Annotated[int, msgspec.Meta(ge=1, le=100)] = 4
    verb_timeout_ms: _Timeout = 30_000
    statement_timeout_ms: _Timeout = 20_000
    lock_timeout_ms: _Timeout = 10_000
    bulk_timeout_ms: Annotated[int, msgspec.Meta(ge=1_000, le=86_400_000)] = 600_000


def _bounds() -> Iterator[tuple[str, tuple[int, int]]]:
    for field in msgspec.structs.fields(Tunables):
        if field.type is bool:
            yield field.name, (0, 1)
        elif meta := getattr(field.type, "__metadata__", ()):
            yield field.name, (meta[0].ge, meta[0].le)


# Options of a URL that are tunables, with the least and the most that they may be.
TUNED: Final[Mapping[str, tuple[int, int]]] = dict(_bounds())


class SqlPlace(NamedTuple):
    """A database that holds a store; ``shown`` is its URL without password.

    ``prepare``: whether sessions keep settings and prepared statements; not so behind a pooler that
    hands transactions to different ones.
    """

    dialect: str
    conninfo: str
    schema: str
    tunables: Tunables
    shown: str
    prepare: bool = True


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
    # libpq quotes a text that it can't read, and that may be a part of the password.
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
        raise InvalidUrl(f"schema is {schema!r:.100}; it must be lower case letters, digits and _")
    # Where contention is expensive, pointers are spread from the beginning.
    spread = 16 if dialect == "cockroachdb" else 1
    ring_size = _number(options, "ring_size", 1, MAX_RING_SIZE) or spread
    tuned: dict[str, Any] = {
        name: bool(value) if name == "sequential" else value
        for name, bounds in TUNED.items()
        if (value := _number(options, name, *bounds)) is not None
    }
    prepare = options.pop("prepare", "on")
    if prepare not in {"on", "off"}:
        raise InvalidUrl(f"prepare is {prepare!r:.100}; it must be on or off")
    # The rest is for the driver.
    told = urlencode(options, quote_via=quote)
    conninfo = f"postgresql:{place}" + (f"?{told}" if told else "")
    tunables = Tunables(ring_size=ring_size, **tuned)
    return SqlPlace(dialect, conninfo, schema, tunables, shown, prepare == "on")


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
        raise InvalidUrl(f"{name} is {text!r:.100}; it must be from {least} to {most}")
    return int(text)
