"""A store as pages that another store can load, whatever the designs of the two.

::

    CopyStart   settings of the store, its log and its queues
    CopyPage    sections in this order: the log; of each queue its live, done and failed messages;
                payloads that no queue holds
    CopyEnd     the last step, after which the store can be opened

A page holds messages as they are at the moment of the snapshot. A message in flight becomes one
that is delayed until the deadline of its lease, or a failed one if this was its last attempt: the
lease belongs to the store that gave it.
"""

from __future__ import annotations

from hashlib import blake2b
from heapq import merge
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import msgspec

from penstock.errors import StoreDamaged
from penstock.limits import MAX_OFFSET
from penstock.model import QueueSpec, State
from penstock.store.codec.metadata import decode_heads
from penstock.store.codec.records import AttemptRecord
from penstock.store.policy import Coverage, LogSettings, is_exhausted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.store.snapshot import PinnedStore

# Bounds of a page, which one commit writes.
PAGE_MESSAGES: Final = 500
PAGE_BYTES: Final = 4 << 20
PAGE_ATTEMPTS: Final = 10_000
# Payloads of unknown size that are read at a time.
UNHELD_MESSAGES: Final = 8
_EXPIRED: Final = 2
_REASON: Final = "copied"
_encode: Final = msgspec.msgpack.Encoder().encode


class QueueCopy(msgspec.Struct, array_like=True):
    """A queue: settings, coverage, totals by their names in QueueStats, and depths by table."""

    spec: QueueSpec
    coverage: Coverage
    totals: dict[str, int]
    depths: dict[str, int]


class CopyStart(msgspec.Struct, tag="start"):
    """A store without its rows. ``end``: the id of the next message. ``cursors``: of a tailer.

    ``in_flight``: how many messages leases hold.
    """

    store_id: str
    at_ms: int
    routing: str
    settings: LogSettings
    earliest: int
    end: int
    epoch: int
    cursors: dict[int, int]
    published: int
    duplicates: int
    unrouted: int
    in_flight: int
    queues: list[QueueCopy]

    def fingerprint(self) -> bytes:
        """Return what tells this state of this store from others, at whatever time."""
        return blake2b(_encode(msgspec.structs.replace(self, at_ms=0)), digest_size=16).digest()

    def sections(self) -> Iterator[tuple[str, str]]:
        """Give table and queue of each section."""
        yield "log", ""
        for queue in self.queues:
            for table in ("active", "done", "failed"):
                yield table, queue.spec.name
        yield "unheld", ""

    def section_rows(self) -> Iterator[int]:
        """Give about how many rows each section has; of queues, as their counters say."""
        # Offsets have gaps.
        yield min(self.end - self.earliest, self.published)
        for queue in self.queues:
            yield from queue.depths.values()
        yield 0

    def total(self) -> int:
        """Return about how many rows there are."""
        return sum(self.section_rows())


class CopiedMessage(msgspec.Struct, array_like=True):
    """A message of a queue; ``time_ms``: when it is visible, or when it ended.

    ``first_claimed_ms`` is when the first attempt at it began: by ``history``, if the source tells
    nothing else, as one of the version before does.
    """

    message_id: int
    metadata: bytes
    attempts: int
    forgiven: int
    time_ms: int
    reason: str
    payload: bytes = b""
    history: list[tuple[int, AttemptRecord]] = []
    first_claimed_ms: int | None = None

    def __post_init__(self) -> None:
        if self.first_claimed_ms is None:
            firsts = (record for number, record in self.history if number == 1)
            self.first_claimed_ms = next((each.claimed_at or None for each in firsts), None)


class CopyPage(msgspec.Struct, tag="page"):
    """Rows of one section; with them, ``rows`` of it are loaded.

    ``log``: log, message id, metadata. ``unheld``: message id, whether it was routed, payload.
    ``earliest``: where the log begins.
    """

    section: int
    rows: int
    table: str
    queue: str
    log: list[tuple[int, int, bytes]] = []
    messages: list[CopiedMessage] = []
    unheld: list[tuple[int, bool, bytes]] = []
    earliest: int = 0

    def __len__(self) -> int:
        return len(self.log) + len(self.messages) + len(self.unheld)


class CopyEnd(msgspec.Struct, tag="end"):
    """The last step: the store routes so from here on."""

    routing: str


class CopyProgress(msgspec.Struct, array_like=True):
    """How far a copy is: from which state of a source, at what time, and the next row."""

    fingerprint: bytes
    at_ms: int
    section: int
    rows: int


CopyPart: TypeAlias = CopyStart | CopyPage | CopyEnd
SectionSums: TypeAlias = dict[int, dict[str, tuple[int, int]]]


class CopyLoader(Protocol):
    """Writes a copy into a new store: first a start, then pages in their order, then the end."""

    def load(self, part: CopyPart | None) -> CopyProgress | None:
        """Write a part and the position behind it in one commit; return the position.

        None writes nothing. After the end there is no position.
        """


# --- reading --------------------------------------------------------------------------------------


def read_start(pinned: PinnedStore) -> CopyStart:
    """Describe a store that was pinned with its stats."""
    log, totals = pinned.log_stats, pinned.totals
    queues = []
    for stats in pinned.stats:
        named = msgspec.structs.asdict(stats)
        counted = {name: value for name, value in named.items() if name.endswith("_total")}
        # Their leases end with the copy.
        counted["lease_expired_total"] += stats.in_flight
        ending = sum(1 for _ in _ending(pinned, stats.queue, pinned.at_ms))
        counted["failed_total"] += ending
        live = stats.available + stats.delayed + stats.in_flight - ending
        depths = {"active": live, "done": stats.done, "failed": stats.failed + ending}
        spec, coverage = pinned.queues[stats.queue], pinned.coverage(stats.queue)
        queues.append(QueueCopy(spec, coverage, counted, depths))
    return CopyStart(
        store_id=pinned.store_id,
        at_ms=pinned.at_ms,
        routing=log.routing,
        settings=pinned.log_settings,
        earliest=log.earliest,
        end=pinned.next_offset,
        epoch=log.epoch,
        cursors={} if log.routing == "inline" else log.cursors,
        published=totals.published_total,
        duplicates=totals.duplicates_total,
        unrouted=totals.unrouted_total,
        in_flight=sum(stats.in_flight for stats in pinned.stats),
        queues=queues,
    )


def read_pages(
    pinned: PinnedStore, start: CopyStart, section: int = 0, skip: int = 0
) -> Iterator[CopyPage]:
    """Read pages from a row of a section on."""
    for number, (table, queue) in enumerate(start.sections()):
        if number < section:
            continue
        rows = skip if number == section else 0
        if table == "log":
            pages: Iterable[CopyPage] = _log_pages(pinned, start, rows)
        elif table == "unheld":
            pages = _unheld_pages(pinned, start, rows)
        else:
            pages = _message_pages(pinned, start.at_ms, table, queue, rows)
        for page in pages:
            rows += len(page)
            page.section, page.rows = number, rows
            yield page
        if pinned.left_out:
            place = f"{table} of queue {queue}" if queue else "the log"
            raise StoreDamaged(f"{pinned.left_out} records of {place} can't be read")


def _log_pages(pinned: PinnedStore, start: CopyStart, skip: int) -> Iterator[CopyPage]:
    logs = range(max(count for _, count in start.settings.changes))
    rows = islice(merge(*(_log_rows(pinned, start, log, 0) for log in logs)), skip, None)
    sized = ((row, len(row[1]), 0) for row in rows)
    for page in gather_pages(sized):
        log = [(number, message_id, metadata) for message_id, metadata, number in page]
        yield CopyPage(0, 0, "log", "", log=log, earliest=start.earliest)


def _log_rows(
    pinned: PinnedStore, start: CopyStart, log: int, begin: int
) -> Iterator[tuple[int, bytes, int]]:
    for page in pinned.log_rows(log, max(begin, start.earliest), start.end):
        for message_id, metadata in page:
            yield message_id, metadata, log


def _unheld_pages(pinned: PinnedStore, start: CopyStart, skip: int) -> Iterator[CopyPage]:
    """Read payloads that no queue holds: no filter took them, or no tailer has come to them."""
    pending = (_log_rows(pinned, start, log, at) for log, at in start.cursors.items())
    named = merge(
        ((message_id, True) for message_id in pinned.unheld()),
        *(((message_id, False) for message_id, _, _ in rows) for rows in pending),
    )
    by_id = groupby(named, itemgetter(0))
    ids = ((id_, all(routed for _, routed in how)) for id_, how in by_id)
    for page in gather_pages(_with_payloads(pinned, islice(ids, skip, None))):
        yield CopyPage(0, 0, "unheld", "", unheld=page)


def _with_payloads(
    pinned: PinnedStore, ids: Iterator[tuple[int, bool]]
) -> Iterator[tuple[tuple[int, bool, bytes], int, int]]:
    while some := list(islice(ids, UNHELD_MESSAGES)):
        payloads = pinned.payloads([message_id for message_id, _ in some])
        for (message_id, routed), payload in zip(some, payloads, strict=True):
            if payload is None:
                raise StoreDamaged(f"message {message_id}, which is in no queue, has no payload")
            yield (message_id, routed, payload), len(payload), 0


def _message_pages(
    pinned: PinnedStore, at_ms: int, table: str, queue: str, skip: int
) -> Iterator[CopyPage]:
    if table == "active":
        found = _live(pinned, queue, at_ms)
    else:
        found = _ended(pinned, State(table), queue)
    if table == "failed":
        found = chain(found, _ending(pinned, queue, at_ms))
    for page in gather_pages(_sized(queue, islice(found, skip, None))):
        payloads = pinned.payloads([message.message_id for message in page])
        tried: dict[int, list[tuple[int, AttemptRecord]]] = {}
        asked = [(message.message_id, message.attempts) for message in page if message.attempts]
        for message_id, number, record in pinned.attempts_at(queue, asked) if asked else ():
            tried.setdefault(message_id, []).append((number, record))
        # New ones: those of the page are in a list of many, which must not hold all payloads.
        messages = []
        for message, payload in zip(page, payloads, strict=True):
            if payload is None:
                raise StoreDamaged(f"message {message.message_id} of queue {queue} has no payload")
            history = [*tried.get(message.message_id, ()), *message.history]
            messages.append(msgspec.structs.replace(message, payload=payload, history=history))
        yield CopyPage(0, 0, table, queue, messages=messages)


def _ending(pinned: PinnedStore, queue: str, at_ms: int) -> Iterator[CopiedMessage]:
    """Read the messages whose last attempt ends with the copy: they are failed ones there."""
    if any(stats.in_flight for stats in pinned.stats if stats.queue == queue):
        yield from _live(pinned, queue, at_ms, ending=True)


def _live(
    pinned: PinnedStore, queue: str, at_ms: int, *, ending: bool = False
) -> Iterator[CopiedMessage]:
    """Read live messages: those that are so in the copy, or (``ending``) the others."""
    spec = pinned.queues[queue]
    for keys in pinned.cut("active", queue, 1):
        for rows in pinned.live_rows(keys):
            for row, lease in zip(rows, pinned.leases(rows), strict=True):
                message_id, state, attempts, time_ms, _, metadata, forgiven = row
                is_held = state == State.IN_FLIGHT
                if (is_held and is_exhausted(spec, attempts, forgiven)) is not ending:
                    continue
                message = CopiedMessage(message_id, metadata, attempts, forgiven, time_ms, "")
                if is_held:
                    if lease is None:
                        raise StoreDamaged(
                            f"the lease of message {message_id} of queue {queue} is lost"
                        )
                    message.time_ms = lease.deadline_ms
                    given = AttemptRecord(
                        lease.claimed_at_ms, lease.consumer, at_ms, _EXPIRED, _REASON
                    )
                    message.history = [(attempts, given)]
                if ending:
                    message.time_ms, message.forgiven, message.reason = at_ms, 0, _REASON
                yield message


def _ended(pinned: PinnedStore, state: State, queue: str) -> Iterator[CopiedMessage]:
    """Read done or failed messages in the order of their sequence numbers."""

    def numbered(pages: Iterator[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
        for numbers, rows in pages:
            yield from zip(numbers, rows, strict=True)

    runs = [
        numbered(pinned.ended_rows(state, keys, 0, MAX_OFFSET))
        for keys in pinned.cut(state.value, queue, 1)
    ]
    for _, (message_id, _, ended_at_ms, attempts, metadata, reason, claimed_ms) in merge(
        *runs, key=itemgetter(0)
    ):
        message = CopiedMessage(message_id, metadata, attempts, 0, ended_at_ms, reason)
        message.first_claimed_ms = claimed_ms
        yield message


def _sized(
    queue: str, messages: Iterator[CopiedMessage]
) -> Iterator[tuple[CopiedMessage, int, int]]:
    while some := list(islice(messages, PAGE_MESSAGES)):
        heads = decode_heads([message.metadata for message in some])
        for message, head in zip(some, heads, strict=True):
            if head is None:
                raise StoreDamaged(f"message {message.message_id} of queue {queue} can't be read")
            yield message, len(message.metadata) + head.size, message.attempts


def gather_pages(sized: Iterable[tuple[Any, int, int]]) -> Iterator[list[Any]]:
    """Gather rows (row, bytes, attempts) until they make a page."""
    page: list[Any] = []
    bytes_ = attempts = 0
    for row, size, tried in sized:
        full = len(page) >= PAGE_MESSAGES or attempts + tried > PAGE_ATTEMPTS
        if page and (full or bytes_ + size > PAGE_BYTES):
            yield page
            page, bytes_, attempts = [], 0, 0
        page.append(row)
        bytes_, attempts = bytes_ + size, attempts + tried
    if page:
        yield page


# --- comparing ------------------------------------------------------------------------------------


def sum_up(pages: Iterable[CopyPage], at_ms: int, told: Callable[[int], None]) -> SectionSums:
    """Count rows by section and state, add up their hashes; call back with the rows of a page."""
    found: SectionSums = {}
    for page in pages:
        sums = found.setdefault(page.section, {})
        for row in (*page.log, *page.messages, *page.unheld):
            state = page.table
            if isinstance(row, CopiedMessage) and state == "active":
                state = (State.DELAYED if row.time_ms > at_ms else State.AVAILABLE).value
            hashed = int.from_bytes(blake2b(_encode(row), digest_size=16).digest(), "big")
            count, sum_ = sums.get(state, (0, 0))
            sums[state] = count + 1, (sum_ + hashed) % (1 << 128)
        told(len(page))
    return found
