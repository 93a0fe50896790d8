"""From a URL to an open broker.

::

    memory:                       in memory, gone with the broker
    rocksdb:PATH                  a RocksDB directory, made if it is not there
    ...?design=indexed|buckets    which of the two storage designs a new store gets
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple
from urllib.parse import parse_qsl

from penstock.broker import Broker
from penstock.clock import Clock, SystemClock
from penstock.errors import InvalidUrl, StorageFailed, StoreMismatch
from penstock.kv.memory import MemoryEngine
from penstock.stores import buckets, indexed
from penstock.stores.core import SHARED_TABLES
from penstock.stores.kvstore import KvStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.kv import Engine, Shape
    from penstock.stores.active import ActiveSet, Quarantine

__all__ = ["DESIGNS", "Design", "make_store", "open"]


class Design(NamedTuple):
    """A way to keep live messages: its tables, and what makes its active set."""

    tables: Mapping[str, Shape]
    make_active: Callable[[Engine, Quarantine], ActiveSet]


DESIGNS: Final[Mapping[str, Design]] = {
    "indexed": Design({**SHARED_TABLES, **indexed.TABLES}, indexed.IndexedActive),
    "buckets": Design({**SHARED_TABLES, **buckets.TABLES}, buckets.BucketActive),
}
DEFAULT_DESIGN: Final = "indexed"
_MARK: Final = "PENSTOCK"


def open(  # noqa: A001 - penstock.open is the way in
    url: str,
    *,
    durability: Literal["fsync", "relaxed"] = "fsync",
    dedup_window_ms: int = 300_000,
    background: bool = True,
    routing: Literal["inline", "pipeline"] | None = None,
    clock: Clock | None = None,
) -> Broker:
    """Open a store, making it if it is not there.

    ``durability="relaxed"`` lets verbs return before the disk has their change: a crash of this
    process still loses nothing, a crash of the machine may lose the last tenth of a second.
    ``routing`` is chosen when a store is made, and kept: ``inline`` (the default) puts messages
    into their queues as they are published, ``pipeline`` leaves that to a process that tails the
    metadata log (:func:`penstock.route_once`, or the Spark pipeline).
    ``background=False`` starts no sweeper thread: call :meth:`Broker.sweep` yourself.
    """
    if durability not in {"fsync", "relaxed"}:
        raise InvalidUrl(f"durability {durability!r:.100}: 'fsync' or 'relaxed'")
    if routing not in {None, "inline", "pipeline"}:
        raise InvalidUrl(f"routing {routing!r:.100}: 'inline' or 'pipeline'")
    scheme, place, design = _parse(url)
    clock = clock or SystemClock()
    if scheme == "memory":
        design = design or DEFAULT_DESIGN
        engine: Engine = MemoryEngine(DESIGNS[design].tables)
    else:
        engine, design = _open_rocksdb(Path(place), design)
    try:
        store = make_store(engine, design, clock, routing)
        return Broker(
            store,
            clock=clock,
            relaxed=durability == "relaxed",
            dedup_window_ms=dedup_window_ms,
            background=background,
        )
    except BaseException:
        engine.close()
        raise


def make_store(engine: Engine, design: str, clock: Clock, routing: str | None = None) -> KvStore:
    """Put a store on an engine."""
    return KvStore(
        engine,
        design,
        DESIGNS[design].make_active,
        store_id=int.from_bytes(clock.lease_id()[-4:], "big"),
        routing=routing,
        now_ms=clock.now_ms(),
    )


def _open_rocksdb(path: Path, design: str | None) -> tuple[Engine, str]:
    # Imported here: a process that only uses other engines need not load this one.
    from penstock.kv.rocksdb import RocksEngine  # noqa: PLC0415

    found = _design_at(path)
    if found is not None and design is not None and design != found:
        raise StoreMismatch(f"{path} holds a store of the {found} design, not {design}")
    design = found or design or DEFAULT_DESIGN
    if found is None:
        _mark(path, design)
    return RocksEngine(path, DESIGNS[design].tables), design


def _design_at(path: Path) -> str | None:
    """Return the design of the store at ``path``; None if there is nothing there yet."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    if (path / _MARK).is_file():
        design = (path / _MARK).read_text().strip()
        if design not in DESIGNS:
            raise StoreMismatch(
                f"{path} holds a store of the design {design!r:.100}, which this version of "
                "Penstock does not know: use a newer one"
            )
        return design
    from penstock.kv.rocksdb import tables_at  # noqa: PLC0415

    families = ", ".join(sorted(tables_at(path)))
    raise StoreMismatch(
        f"{path} holds a RocksDB database that is not a Penstock store (its column families: "
        f"{families}); to bring a Queueber database in, use 'penstock import queueber'"
    )


def _mark(path: Path, design: str) -> None:
    """Name the design before anything else is written, so that a crash can't leave it in doubt."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / _MARK).write_text(design)
    except OSError as error:
        raise StorageFailed(f"can't write to the directory {path}: {error}") from error


def _parse(url: object) -> tuple[str, str, str | None]:
    scheme, colon, rest = url.partition(":") if isinstance(url, str) else ("", "", "")
    place, _, query = rest.partition("?")
    if not colon or scheme not in {"memory", "rocksdb"}:
        raise InvalidUrl(f"no store is named by {url!r:.200}; known are memory: and rocksdb:PATH")
    if scheme == "rocksdb" and not place:
        raise InvalidUrl("rocksdb: needs a directory: rocksdb:./data")
    if scheme == "memory" and place:
        raise InvalidUrl(f"memory: takes no place, got {place!r:.100}")
    options = dict(parse_qsl(query, keep_blank_values=True))
    design = options.pop("design", None)
    if options:
        raise InvalidUrl(f"unknown option {next(iter(options))!r:.100} in {url!r:.200}: design")
    if design is not None and design not in DESIGNS:
        raise InvalidUrl(f"no design {design!r:.100}; there are {', '.join(DESIGNS)}")
    return scheme, place, design
