"""From a URL to an open broker.

::

    memory:                       in memory, gone with the broker
    rocksdb:PATH                  a RocksDB directory, made if it is not there
    slatedb+file:///DIR           a SlateDB database in a directory
    slatedb+s3://BUCKET/PREFIX    a SlateDB database in an S3 bucket
    postgresql://USER@HOST/DB     tables in a PostgreSQL database, for any number of processes
    cockroachdb://USER@HOST/DB    the same in CockroachDB
    ...?schema=S&ring_size=N      SQL: the schema of the tables, tokens of a new store, and what
                                  docs/sql.md has under "What can be tuned"
    ...?design=indexed|buckets    which of the two storage designs a new store gets
    ...?min_free_bytes=N          RocksDB: what new messages leave free on the disk
    ...?write_buffer_mb=N         RocksDB: memory for rows that are not in files yet
    ...?block_cache_mb=N          RocksDB: memory for blocks of files
    ...?flush_ms=N                SlateDB: the least time from one write of its log to the next
    penstock://HOST:PORT,…        a server, or several of one store: :func:`penstock.connect`
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast
from urllib.parse import parse_qsl

import msgspec

from penstock.broker.broker import Broker
from penstock.clock import Clock, FollowingClock, SystemClock
from penstock.errors import InvalidUrl, StoreMismatch, did_you_mean, needs_extra
from penstock.limits import MAX_FLUSH_MS, MAX_OFFSET, MAX_STORE_MEMORY_MB, MIN_STORE_MEMORY_MB
from penstock.store.kv.state import SHARED_TABLES, Identity, can_open, describe_format
from penstock.store.kv.store import KvStore
from penstock.store.live import LIVE_TABLES
from penstock.store.policy import check_routing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.engines import Engine, Shape
    from penstock.engines.slatedb.binding import SlateLocation
    from penstock.store.contract import FullStore
    from penstock.store.sql.store import SqlStore

# Engines, SQL, the client and tracing are imported where they are used: a process loads those that
# it needs, and libraries that are extras are needed by their users alone.

# The tables of a store, by its design.
DESIGNS: Final[Mapping[str, Mapping[str, Shape]]] = {
    design: {**SHARED_TABLES, **live} for design, live in LIVE_TABLES.items()
}
DEFAULT_DESIGN: Final = "indexed"
# Where every operation is dear.
DEFAULT_SLATEDB_DESIGN: Final = "buckets"
IDENTITY_KEY: Final = b"meta"


def open(  # noqa: A001 - penstock.open is the way in
    url: str,
    *,
    durability: Literal["fsync", "relaxed"] = "fsync",
    dedup_window_ms: int = 300_000,
    background: bool = True,
    routing: Literal["inline", "pipeline"] | None = None,
    clock: Clock | None = None,
    create: bool = True,
    tracing: bool = False,
) -> Broker:
    """Open a store, making it if it is not there.

    ``create=False`` raises StoreMismatch instead of making one; ``memory:`` is always made.

    ``durability="relaxed"`` lets verbs return before the disk has their change: a crash of this
    process still loses nothing, a crash of the machine may lose the last tenth of a second.
    ``routing`` is that of a new store; an existing one must have it. ``inline`` (the default) puts
    messages into their queues as they are published, ``pipeline`` leaves that to a process that
    tails the metadata log: :class:`penstock.Tailer`, or the Spark pipeline.
    ``background=False`` starts no sweeper thread: call :meth:`Broker.sweep` yourself.
    ``tracing`` makes OpenTelemetry spans of what is published, and puts their context into the
    messages (:mod:`penstock.tracing`).
    """
    if durability not in {"fsync", "relaxed"}:
        raise InvalidUrl(f"durability is 'fsync' or 'relaxed', not {durability!r:.100}")
    if routing not in {None, "inline", "pipeline"}:
        raise InvalidUrl(f"routing is 'inline' or 'pipeline', not {routing!r:.100}")
    if str(url).startswith(("penstock:", "penstocks:")):
        if (durability, dedup_window_ms, background, routing) != ("fsync", 300_000, True, None):
            raise InvalidUrl(
                f"{url!r:.200} is a server, which has opened its store already: durability, "
                "dedup_window_ms, background and routing are settings of 'penstock serve'"
            )
        from penstock.client import connect  # noqa: PLC0415

        # A client has the verbs of a broker: its user need not know which of the two it is.
        return cast(Broker, connect(str(url), clock=clock, tracing=tracing))
    kind = Broker
    if tracing:
        from penstock.tracing import traced  # noqa: PLC0415

        kind = traced(Broker)
    clock = clock or SystemClock()
    relaxed = durability == "relaxed"
    with ExitStack() as opened:
        store: FullStore
        if str(url).startswith(("postgresql:", "cockroachdb:")):
            # Processes on many machines must agree about when a lease is over.
            clock = FollowingClock() if type(clock) is SystemClock else clock
            sql = open_sql(
                url, clock, routing, relaxed=relaxed, background=background, create=create
            )
            opened.callback(sql.close)
            if isinstance(clock, FollowingClock):
                clock.follow(sql.server_ms)
                sql.follow(partial(clock.follow, sql.server_ms))
            store, checkpoint = sql, sql.checkpoint
        else:
            engine, design = open_engine(parse_url(url), routing, create=create)
            opened.callback(engine.close)
            store = make_store(engine, design, clock, routing)
            checkpoint = engine.checkpoint
        broker = kind(
            store,
            clock=clock,
            relaxed=relaxed,
            dedup_window_ms=dedup_window_ms,
            background=background,
            checkpoint=checkpoint,
        )
        opened.pop_all()
    return broker


def open_sql(
    url: str,
    clock: Clock,
    routing: str | None,
    *,
    create: bool,
    relaxed: bool = False,
    background: bool = False,
) -> SqlStore:
    """Open a store on a SQL database."""
    from penstock.store.sql.location import parse_sql  # noqa: PLC0415

    named = parse_sql(url)
    with needs_extra("sql", f"a store at {named.dialect}:"):
        from penstock.store.sql.store import open_store  # noqa: PLC0415
    return open_store(
        named,
        store_id=int.from_bytes(clock.lease_id()[-4:], "big"),
        routing=routing,
        random=clock.random,
        clock=clock.now_ms,
        relaxed=relaxed,
        background=background,
        create=create,
    )


def open_engine(url: StoreUrl, routing: str | None, *, create: bool) -> tuple[Engine, str]:
    """Open the engine that a URL names; return it with the design of its store."""
    if url.scheme == "memory":
        from penstock.engines.memory import MemoryEngine  # noqa: PLC0415

        design = url.design or DEFAULT_DESIGN
        return MemoryEngine(DESIGNS[design]), design
    if url.scheme == "rocksdb":
        from penstock.engines.rocksdb import RocksEngine  # noqa: PLC0415

        path = Path(url.place)
        design = rocksdb_design(path, url.design, create=create)
        return RocksEngine(path, DESIGNS[design], mark=design, **url.numbers), design
    place = slatedb_place(url)
    from penstock.engines.slatedb import SlateEngine  # noqa: PLC0415

    # Opening takes the store from its owner, so reasons not to open it are looked for before.
    design = slatedb_design(place, url, routing, create=create)
    return SlateEngine(place, DESIGNS[design], **url.numbers), design


def make_store(engine: Engine, design: str, clock: Clock, routing: str | None = None) -> KvStore:
    """Put a store on an engine."""
    return KvStore(
        engine,
        design,
        store_id=int.from_bytes(clock.lease_id()[-4:], "big"),
        routing=routing,
        now_ms=clock.now_ms(),
    )


def rocksdb_design(path: Path, asked: str | None = None, *, create: bool) -> str:
    """Return the design of the store at ``path``, or of one that may be made there."""
    from penstock.engines.rocksdb.files import read_mark  # noqa: PLC0415

    found = read_mark(path, DESIGNS)
    if found is None:
        if not create:
            raise _no_store(path)
        return asked or DEFAULT_DESIGN
    _check_design(path, found, asked, "; or mend the file PENSTOCK, if that was damaged")
    return found


def _check_design(place: object, found: str, asked: str | None, also: str = "") -> None:
    if found not in DESIGNS:
        raise StoreMismatch(
            f"{place} holds a store of the design {found!r:.100}, which this version of Penstock "
            f"does not know: use a newer one{also}"
        )
    if asked not in {None, found}:
        raise StoreMismatch(
            f"{place} holds a store of the {found} design, not {asked}: leave ?design= out"
        )


def slatedb_design(
    place: SlateLocation, url: StoreUrl, routing: str | None, *, create: bool = True
) -> str:
    """Return the design of the store at a place, or of one that may be made there."""
    from penstock.engines.slatedb.objects import peek  # noqa: PLC0415

    if not create and place.kind == "file" and not Path(place.root).is_dir():
        raise _no_store(place)
    if found := peek(place, "default", IDENTITY_KEY):
        return check_identity(str(place), found, url.design, routing).design
    if not create:
        raise _no_store(place)
    return url.design or DEFAULT_SLATEDB_DESIGN


def _no_store(place: object) -> StoreMismatch:
    return StoreMismatch(f"there is no store at {place}; 'penstock create' makes one")


def slatedb_place(url: StoreUrl) -> SlateLocation:
    """Return where a SlateDB store is; nothing is opened."""
    with needs_extra("slatedb", f"a store at {url.scheme}:"):
        from penstock.engines.slatedb.binding import parse_location  # noqa: PLC0415
    return parse_location(url.scheme, url.place, os.environ)


def check_identity(place: str, record: bytes, design: str | None, routing: str | None) -> Identity:
    """Compare the store at a place with the design and routing asked for; return its identity."""
    try:
        found = msgspec.msgpack.decode(record, type=Identity)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StoreMismatch(f"{place}: its identity record does not decode: {error}") from error
    if not can_open(found.format):
        raise StoreMismatch(f"{place} holds a store of {describe_format(found.format)}")
    _check_design(place, found.design, design)
    check_routing(place, found.routing, routing)
    return found


# --- reading a URL --------------------------------------------------------------------------------

_SCHEMES: Final = ("memory", "rocksdb", "slatedb+file", "slatedb+s3")
_MEMORY: Final = (
    "rocksdb",
    range(MIN_STORE_MEMORY_MB, MAX_STORE_MEMORY_MB + 1),
    f"{MIN_STORE_MEMORY_MB} to {MAX_STORE_MEMORY_MB} MiB",
)
# Option that is a number: the schemes that take it, its bounds, and what an error says of it.
_NUMBERS: Final = {
    "flush_ms": ("slatedb", range(MAX_FLUSH_MS + 1), f"0 to {MAX_FLUSH_MS} milliseconds"),
    "min_free_bytes": ("rocksdb", range(MAX_OFFSET + 1), "a number of bytes, 0 for no reserve"),
    "write_buffer_mb": _MEMORY,
    "block_cache_mb": _MEMORY,
}


class StoreUrl(NamedTuple):
    """A URL of a store that is not on a SQL database, in its parts."""

    scheme: str
    place: str
    design: str | None
    numbers: dict[str, int]


def parse_url(url: object) -> StoreUrl:
    """Take the URL of a store that is not on a SQL database apart; raise if it names none."""
    if isinstance(url, list | tuple):
        from penstock.store.sql.location import SEVERAL  # noqa: PLC0415

        raise InvalidUrl(f"a list of URLs: {SEVERAL}")
    scheme, colon, rest = url.partition(":") if isinstance(url, str) else ("", "", "")
    place, _, query = rest.partition("?")
    if not colon or scheme not in _SCHEMES:
        from penstock.store.sql.location import without_password  # noqa: PLC0415

        hint = f"a directory is named by rocksdb:{url!s:.100}; " if url and not colon else ""
        raise InvalidUrl(
            f"no store is named by {without_password(str(url))!r:.200}; {hint}known are memory:, "
            "rocksdb:PATH, slatedb+file:///DIR, slatedb+s3://BUCKET/PREFIX, postgresql://HOST/DB, "
            "cockroachdb://HOST/DB and penstock://HOST:PORT"
        )
    if scheme == "rocksdb":
        _check_directory(place)
    if scheme == "memory" and place:
        raise InvalidUrl(f"memory: takes no place, got {place!r:.100}")
    options = dict(parse_qsl(query, keep_blank_values=True))
    numbers = [name for name, (schemes, _, _) in _NUMBERS.items() if scheme.startswith(schemes)]
    for unknown in options.keys() - {"design", *numbers}:
        hint = did_you_mean(unknown, ["design", *numbers])
        raise InvalidUrl(f"{scheme}: has no option {unknown!r:.100} ({url!r:.200}); {hint}")
    design = options.pop("design", None)
    if design is not None and design not in DESIGNS:
        raise InvalidUrl(f"there is no design {design!r:.100}; {did_you_mean(design, DESIGNS)}")
    for name, text in options.items():
        _, bounds, allowed = _NUMBERS[name]
        if not (text.isdecimal() and int(text) in bounds):
            raise InvalidUrl(f"{name} is {text!r:.100} in {url!r:.200}; it must be {allowed}")
    return StoreUrl(scheme, place, design, {name: int(text) for name, text in options.items()})


def _check_directory(place: str) -> None:
    """Refuse a place that reads as a directory at the root: rocksdb://./data would be /data."""
    if not place:
        raise InvalidUrl("rocksdb: needs a directory: rocksdb:./data")
    path = place.lstrip("/")
    relative = path.partition("/")[0] in {".", ".."}
    if place.startswith("//") and (relative or not place.startswith("///")):
        at_root = "" if relative else f", or rocksdb:/{path} at the root"
        raise InvalidUrl(
            f"rocksdb:{place!s:.200} has a host where a directory has none: "
            f"rocksdb:{path:.200} is the directory{at_root}"
        )
