"""``penstock copy``: brings everything of one store into a new one, whatever the two are.

The source is read as of one moment, and is not changed. Pages of it are loaded into the target
together with the position behind them, so that the next call goes on after a crash. At the end both
are read again and compared. :mod:`penstock.store.transfer` has the pages.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from penstock.clock import Clock, SystemClock
from penstock.errors import CorruptRecord, InvalidUrl, StoreDamaged, StoreMismatch
from penstock.model import State
from penstock.readers import open_copy, open_reader
from penstock.store.kv.load import KvLoader
from penstock.store.policy import COPYING
from penstock.store.transfer import CopyEnd, read_pages, read_start, sum_up
from penstock.urls import make_store, open_engine, open_sql, parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.flight.client import ServedSource
    from penstock.store.contract import FullStore
    from penstock.store.snapshot import PinnedStore
    from penstock.store.transfer import CopyLoader, CopyPage, CopyProgress, CopyStart

    CopySource: TypeAlias = "PinnedSource | ServedSource"

__all__ = ["CopiedQueue", "CopyReport", "copy"]

# Pages after which the target is made durable: an engine may hold what is not in memory.
SYNC_PAGES: Final = 16
_SQL: Final = ("postgresql:", "cockroachdb:")
_SERVERS: Final = ("penstock:", "penstocks:", "grpc:", "grpc+tcp:", "grpc+tls:")


class CopiedQueue(msgspec.Struct, frozen=True):
    """A queue of the target, with its messages by state."""

    name: str
    messages: dict[str, int]


class CopyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that a copy has brought over, after they were compared with the source.

    ``resumed``: an earlier call had begun it. ``in_flight`` counts messages that a lease of the
    source held at ``at_ms``; in the target they are delayed until its deadline.
    """

    source_id: str
    target_id: str
    at_ms: int
    resumed: bool
    queues: list[CopiedQueue]
    in_flight: int
    log: int
    unheld: int


class PinnedSource:
    """A store that this process reads itself, as of one moment."""

    def __init__(self, pinned: PinnedStore) -> None:
        self._pinned = pinned
        self.start = read_start(pinned)

    def pages(self, section: int = 0, rows: int = 0) -> Iterator[CopyPage]:
        """Read pages from a row of a section on."""
        return read_pages(self._pinned, self.start, section, rows)


def copy(
    source: str,
    target: str,
    *,
    clock: Clock | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> CopyReport:
    """Copy the store at ``source`` to ``target``, where nothing is or a copy of it was begun.

    ``progress`` is told what is being done, how many rows of it are, and about how many there are.
    """
    clock = clock or SystemClock()
    told = progress or (lambda _text, _done, _total: None)
    _check_urls(source, target)
    with ExitStack() as opened:
        # Reasons not to open the source are found before a target is made.
        pin = opened.enter_context(_open_source(source, clock))
        store, loader = _open_target(target, clock)
        opened.enter_context(closing(store))
        position = loader.load(None)
        resumed = position is not None
        with _reading_source():
            reading = opened.enter_context(pin(None if position is None else position.at_ms))
        if position is None:
            position = loader.load(reading.start)
        assert position is not None
        if position.fingerprint != reading.start.fingerprint():
            raise StoreMismatch(
                f"{target!r:.200} is the target of a copy of another store, or the source has "
                "changed since that began: remove the target and copy again, while nobody works "
                "on the source"
            )
        reading.start.at_ms = position.at_ms
        _load(reading, store, loader, position, told)
        report = _verify(reading, store, told, resumed=resumed)
        loader.load(CopyEnd(reading.start.routing))
        store.sync()
    return report


# --- opening --------------------------------------------------------------------------------------


def _check_urls(source: str, target: str) -> None:
    for url in (source, target):
        if url.partition("?")[0] == "memory:":
            raise InvalidUrl("memory: keeps nothing once its process has ended: name another store")
    if target.startswith(_SERVERS):
        raise InvalidUrl(
            f"{target!r:.200} is a server, which can't be copied to: name a new store, such as "
            "rocksdb:./new, and let a server serve that when the copy is complete"
        )
    if source.startswith(("penstock:", "penstocks:")):
        raise InvalidUrl(
            f"{source!r:.200}: a server is copied through its Flight listener, by a key that may "
            "admin: grpc://HOST:8815, or grpc+tls://"
        )
    # On SQL an option names the schema.
    same_place = source.partition("?")[0] == target.partition("?")[0]
    if source == target or (same_place and not source.startswith(_SQL)):
        raise InvalidUrl(f"source and target are the same store: {source!r:.200}")


@contextmanager
def _open_source(
    url: str, clock: Clock
) -> Iterator[Callable[[int | None], AbstractContextManager[CopySource]]]:
    """Open a store for reading; give the function that pins it as of a time."""
    view: Callable[[int | None], PinnedStore]
    with ExitStack() as opened:
        if url.startswith(_SERVERS):
            # Imported here: it needs an extra.
            from penstock.flight.client import ServedSource  # noqa: PLC0415

            yield lambda _at_ms: ServedSource.hold(url)
            return
        with _reading_source():
            if url.startswith(_SQL):
                sql = open_sql(url, clock, None, create=False)
                opened.callback(sql.close)
                now_ms = max(sql.server_ms(), sql.info().time_floor_ms)
                view = lambda at_ms: sql.pin(at_ms or now_ms, stats=True, marks=False)  # noqa: E731
            elif url.startswith("rocksdb:"):
                view = opened.enter_context(
                    open_copy(Path(parse_url(url).place), clock=clock)
                ).pin_at
            else:
                view = opened.enter_context(open_reader(url, clock=clock)).pin_at

        @contextmanager
        def pin(at_ms: int | None) -> Iterator[CopySource]:
            with view(at_ms) as pinned:
                yield PinnedSource(pinned)

        yield pin


def _open_target(url: str, clock: Clock) -> tuple[FullStore, CopyLoader]:
    """Open a store that is being copied to, or make it where nothing is."""
    if url.startswith(_SQL):
        sql = open_sql(url, clock, COPYING, create=True)
        # Imported here: it needs an extra.
        from penstock.store.sql.load import SqlLoader  # noqa: PLC0415

        return sql, SqlLoader(sql)
    engine, design = open_engine(parse_url(url), COPYING, create=True)
    try:
        store = make_store(engine, design, clock, COPYING)
    except BaseException:
        engine.close()
        raise
    return store, KvLoader(store)


@contextmanager
def _reading_source() -> Iterator[None]:
    try:
        yield
    except (CorruptRecord, StoreDamaged) as error:
        raise StoreDamaged(
            f"the source can't be read: {error}. 'penstock check' says what is wrong; 'penstock "
            "check --repair' mends it, or 'penstock salvage' makes a sound store of what is left"
        ) from error


# --- copying and comparing ------------------------------------------------------------------------


def _pages(source: CopySource, section: int, rows: int) -> Iterator[CopyPage]:
    with _reading_source():
        yield from source.pages(section, rows)


def _load(
    source: CopySource,
    store: FullStore,
    loader: CopyLoader,
    position: CopyProgress,
    told: Callable[[str, int, int], None],
) -> None:
    total, done = source.start.total(), position.rows
    if position.section:
        # About: the log and the queues before this one.
        log, *queues = source.start.section_rows()
        done += log + sum(queues[: position.section - 1])
    for number, page in enumerate(_pages(source, position.section, position.rows), 1):
        loader.load(page)
        done += len(page)
        told("copying", min(done, total), total)
        if number % SYNC_PAGES == 0:
            store.sync()
    store.sync()
    told("copying", total, total)


def _verify(
    source: CopySource,
    store: FullStore,
    told: Callable[[str, int, int], None],
    *,
    resumed: bool,
) -> CopyReport:
    """Compare both stores; raise if they differ."""
    start, done, total = source.start, 0, source.start.total()
    section_rows = list(start.section_rows())

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        told("verifying", min(done, total), total)

    there = sum_up(_pages(source, 0, 0), start.at_ms, count)
    with store.pin(start.at_ms, stats=True, marks=False) as pinned:
        copied = read_start(pinned)
        # A store may have more logs than it was copied from; one that is not tailed has no cursors.
        copied.cursors = {log: copied.cursors[log] for log in start.cursors}
        _compare_starts(start, copied)
        here = sum_up(read_pages(pinned, copied), start.at_ms, lambda _: None)
    found: dict[str, dict[str, int]] = {
        each.spec.name: dict.fromkeys([*State], 0) for each in start.queues
    }
    others: dict[str, int] = {}
    for number, (table, queue) in enumerate(start.sections()):
        place = f"queue {queue}" if queue else "the store"
        left, right = there.get(number, {}), here.get(number, {})
        rows, expected = sum(many for many, _ in left.values()), section_rows[number]
        if queue and rows != expected:
            raise StoreDamaged(
                f"the source can't be read: {place} has {expected} messages of {table} by its "
                f"counters, and {rows} can be read: 'penstock check' says what is wrong"
            )
        for state in sorted(left.keys() | right.keys()):
            a, b = left.get(state, (0, 0)), right.get(state, (0, 0))
            if a != b:
                raise _differs(f"{place}, {state}: {a[0]} rows of sum {a[1]:032x} in the source"
                               f", {b[0]} of sum {b[1]:032x} in the target")  # fmt: skip
            (found[queue] if queue else others)[state] = a[0]
    told("verifying", total, total)
    return CopyReport(
        source_id=start.store_id,
        target_id=copied.store_id,
        at_ms=start.at_ms,
        resumed=resumed,
        queues=[CopiedQueue(name, counts) for name, counts in found.items()],
        in_flight=start.in_flight,
        log=others.get("log", 0),
        unheld=others.get("unheld", 0),
    )


def _compare_starts(start: CopyStart, copied: CopyStart) -> None:
    names = ("end", "cursors", "published", "duplicates", "unrouted")
    for name in names:
        a, b = getattr(start, name), getattr(copied, name)
        if a != b:
            raise _differs(f"the store, {name}: {a} in the source, {b} in the target")
    for left, right in zip(start.queues, copied.queues, strict=True):
        if left != right:
            raise _differs(f"queue {left.spec.name}, settings: {left} in the source, {right}")


def _differs(what: str) -> StoreMismatch:
    return StoreMismatch(
        f"the copy differs from the source: {what}. It can't be opened: remove the target and copy "
        "again"
    )
