"""Rules that the key-value store and the SQL store share. They read and write nothing.

Retry or fail, back-off, the scope of dedup ids, where a page of the log ends, which offsets of the
log a queue has been filled from, which messages it wants, and where one step of a fill ends.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from functools import cache
from typing import TYPE_CHECKING, Final
from zlib import crc32

import msgspec

from penstock.errors import CorruptRecord, InvalidInput, InvalidQueue, StoreMismatch
from penstock.filters import Matcher, parse
from penstock.limits import MAX_ATTEMPTS, MAX_COVERAGE_STRETCHES
from penstock.model import AssignStatus, BackfillPlan, LogRecord, LogStretch
from penstock.store.codec.metadata import (
    Head,
    Metadata,
    decode_heads,
    decode_metadata,
    read_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from penstock.filters import Filter, RowTuple
    from penstock.model import Cursor, LogPage, QueueSpec, Value

log_ = logging.getLogger(__name__)

# The age at which a segment of the log is closed.
SEGMENT_MS: Final = 3_600_000
# Offsets that one step of a backfill looks at.
BACKFILL_WINDOW: Final = 2_000
# Bounds of one step of a fill from the log: offsets looked at, messages added.
FILL_WINDOW: Final = 20_000
FILL_MESSAGES: Final = 5_000
# Bounds of one step of a fill from an archive: what commits together.
RESTORE_MESSAGES: Final = 1_000
RESTORE_BYTES: Final = 16 << 20
# The routing of a store that is being copied to: no broker opens it.
COPYING: Final = "copying"
# Offsets that a switch to inline routing may find unrouted, and routes itself.
SWITCH_OFFSETS: Final = 10_000


# --- one message ------------------------------------------------------------------------------


def backoff_ms(spec: QueueSpec, failures: int, random: Callable[[], float]) -> int:
    """Double the base with every failure up to the cap; jitter takes away up to half of it."""
    # Past 63 doublings the cap has long been reached; the bound keeps the number small.
    full = min(spec.backoff_cap_ms, spec.backoff_base_ms << min(max(failures, 1) - 1, 63))
    return full - int(random() * (full / 2))


def is_exhausted(spec: QueueSpec, attempts: int, forgiven: int) -> bool:
    """Whether a message whose attempt has failed fails for good."""
    return attempts - forgiven >= spec.max_attempts or attempts >= MAX_ATTEMPTS


def fail_reason(spec: QueueSpec, reason: str) -> str:
    """Return the reason that is kept with a failed message."""
    return reason or f"released {spec.max_attempts} times"


def dedup_scope(attributes: Mapping[str, Value]) -> bytes:
    """Return the scope of a message's dedup id: its ``queue`` attribute, if that is text.

    Producers of different queues can't collide; messages without the attribute share one scope.
    """
    scope = attributes.get("queue")
    return scope.encode() if isinstance(scope, str) else b""


def metadata_of(record: LogRecord) -> Metadata:
    """Return the metadata of a message that a reader of the log was given."""
    r = record
    return Metadata(r.published_at_ms, r.group, r.priority, r.size, r.delay_ms, r.attributes)


# --- between queues ---------------------------------------------------------------------------


def check_move(queue_name: str, to_name: str, *, draining: bool) -> None:
    """Refuse a move into the same queue, or into one that is draining."""
    if queue_name == to_name:
        raise InvalidInput(f"queue {queue_name!r} can't be moved to itself: name another")
    if draining:
        raise InvalidQueue(f"queue {to_name!r} is draining: it takes no more messages")


# --- the log ----------------------------------------------------------------------------------


class LogSettings(msgspec.Struct):
    """How messages are spread over logs, and how long they are kept (0: for ever).

    ``changes`` holds (offset, number of logs), ascending, the first at offset 0.
    """

    changes: list[tuple[int, int]] = msgspec.field(default_factory=lambda: [(0, 1)])
    retention_ms: int = 7 * 86_400_000


def check_log(log: int, known: int) -> None:
    """Refuse a log that the store does not have."""
    if not 0 <= log < known:
        raise InvalidInput(f"no log {log}; there are logs 0 to {known - 1}")


def logs_of(
    groups: Sequence[str],
    routes: Sequence[Sequence[str]] | None,
    fifo: AbstractSet[str],
    logs: int,
    turn: int,
) -> list[int]:
    """Return the log of each message of one publish.

    A group has a log of its own. Messages without a group go to the log whose ``turn`` it is, so
    that publishes spread over the logs. A FIFO queue promises the order of the empty group as well:
    a message that one may take goes to that group's own log. ``routes`` names the queues of each
    message (None: a tailer will route them), ``fifo`` the FIFO queues of the store.
    """
    here = turn % logs
    if routes is None:
        here = crc32(b"") % logs if fifo else here
        return [crc32(group.encode()) % logs if group else here for group in groups]
    return [
        crc32(group.encode()) % logs if group or not fifo.isdisjoint(names) else here
        for group, names in zip(groups, routes, strict=True)
    ]


def check_routing(place: str, routing: str, wanted: str | None) -> None:
    """Refuse to open a store that routes another way than the one asked for, or none known."""
    if COPYING in {routing, wanted}:
        if routing == wanted:
            return
        if wanted == COPYING:
            raise StoreMismatch(f"{place} holds a store: a copy goes to where nothing is")
        raise StoreMismatch(
            f"{place} is the target of a copy that has not come to its end: the same 'penstock "
            "copy' again goes on; or remove it"
        )
    if routing not in {"inline", "pipeline"}:
        raise StoreMismatch(f"{place} routes {routing!r:.100}, which is not known")
    if wanted not in {None, routing}:
        raise StoreMismatch(
            f"{place} has routing={routing!r}: it can't be opened with {wanted!r}. Open it without "
            f"routing, and switch: penstock log configure --routing {wanted}"
        )


def check_pipeline(routing: str) -> None:
    """Refuse to route a store whose publishes do it themselves."""
    if routing == "inline":
        raise InvalidInput(
            "this store routes inline: messages are in their queues when publish returns, and "
            "there is nothing to assign; to have a tailer or Spark route it, switch it: penstock "
            "log configure --routing pipeline"
        )


def check_switch(routed_up_to: int, log_end: int) -> None:
    """Refuse to switch to inline routing while a tailer is far behind."""
    if log_end - routed_up_to > SWITCH_OFFSETS:
        raise InvalidInput(
            f"the log ends at offset {log_end} and is routed up to {routed_up_to}: route the rest "
            "first ('penstock route'), then switch to inline"
        )


def match_page(page: LogPage, matcher: Matcher[str] | None = None) -> dict[int, list[str]]:
    """Match a page of the log: which queues each message goes to; those of none are left out.

    ``matcher`` has the page's filters, if they were compiled before.
    """
    if matcher is None:
        matcher = Matcher({name: parse(text) for name, text in page.filters.items()})
    routes = matcher.match(
        [
            (record.attributes, record.group, record.priority, record.published_at_ms, record.size)
            for record in page.records
        ]
    )
    return {
        record.message_id: names
        for record, names in zip(page.records, routes, strict=True)
        if names
    }


def filters_at(
    coverages: Iterable[tuple[str, Coverage]], offset: int
) -> tuple[dict[str, str], int, int | None]:
    """Return the filters that are live at an offset, since which offset, and until which."""
    live: dict[str, str] = {}
    begin, until = 0, None
    for name, coverage in sorted(coverages):
        text = coverage.filter_at(offset)
        if text is not None:
            live[name] = text
        for border in coverage.borders():
            if border > offset:
                until = border if until is None else min(until, border)
            else:
                begin = max(begin, border)
    return live, begin, until


def page_end(
    begin: int, end: int, changes: Iterable[tuple[int, int]], other_cursors: Sequence[int]
) -> int:
    """Return where a page ends that begins at an offset, because the number of logs changes.

    It ends there until every other log has been assigned up to there, so that a group that moves to
    another log keeps its order.
    """
    for change, _ in changes:
        if begin < change < end and any(cursor < change for cursor in other_cursors):
            end = change
        elif change == begin and any(cursor < change for cursor in other_cursors):
            end = begin
    return end


def records_of(rows: Iterable[tuple[int, bytes]], log: int) -> list[LogRecord]:
    """Decode a page of a log. An unreadable message stays in the log, and the reader goes on."""
    records = []
    for message_id, encoded in rows:
        try:
            m = decode_metadata(encoded)
        except CorruptRecord:
            log_.exception("message %d of log %d can't be routed", message_id, log)
            continue
        about = (m.attributes, m.group, m.priority, m.published_at_ms, m.size, m.delay_ms)
        records.append(LogRecord(message_id, *about))
    return records


def route_stretches(
    cursors: Mapping[int, int],
    log_end: int,
    max_offsets: int | None,
    changes: Sequence[tuple[int, int]],
    filters_until: Callable[[int], int | None],
) -> list[LogStretch]:
    """Return the stretches that a router may match next, by the cursors of the logs.

    The slowest log decides where the others stop, so that logs stay in step.
    """
    limit = log_end if max_offsets is None else min(cursors.values()) + max_offsets
    stretches = []
    for log, begin in cursors.items():
        until = filters_until(begin)
        end = min(limit, log_end, log_end if until is None else until)
        for change, _ in changes:
            # A group that moves to another log must not overtake itself.
            if begin <= change < end and any(other < change for other in cursors.values()):
                end = max(begin, change)
        if begin < end:
            stretches.append(LogStretch(log, begin, end))
    return stretches


def refuse_page(cursor: Cursor, at: int, earliest: int) -> AssignStatus | None:
    """Return why a page can't be assigned to a log whose cursor is ``at``; None: it can."""
    if cursor.end <= at:
        return AssignStatus.STALE
    if cursor.begin > max(at, earliest):
        return AssignStatus.AHEAD
    return None


def is_outdated(cursor: Cursor, version: int, history: Sequence[tuple[int, int]]) -> bool:
    """Whether filters have changed for offsets of a page since it was read.

    ``history`` holds the last changes as (version, offset from which on).
    """
    read_at = cursor.filters_version
    if read_at is None or read_at == version:
        return False
    # Changes before the oldest one on record are not known: read again, to be sure.
    if not history or history[0][0] > read_at + 1:
        return True
    return any(at > read_at and offset < cursor.end for at, offset in history)


def check_page(
    log: int, cursor: Cursor, assignments: Mapping[int, Sequence[str]], log_end: int
) -> None:
    """Refuse assignments of messages outside of their page, and a page beyond the log's end."""
    for message_id in (min(assignments), max(assignments)) if assignments else ():
        if not cursor.begin <= message_id < cursor.end:
            raise InvalidInput(
                f"message {message_id} is not in the page [{cursor.begin}, {cursor.end})"
            )
    if log_end < cursor.end:
        raise InvalidInput(
            f"log {log} ends at offset {log_end}; the cursor to assign is {cursor.end}"
        )


def check_assigned(
    log: int, begin: int, assignments: Mapping[int, Sequence[str]], page: Iterable[int]
) -> None:
    """Refuse assignments of messages from ``begin`` on that are not among the page's ids."""
    strangers = {each for each in assignments if each >= begin}.difference(page)
    if strangers:
        raise InvalidInput(f"message {min(strangers)} is not in this page of log {log}")


def assigned(
    rows: Sequence[tuple[int, bytes]],
    assignments: Mapping[int, Sequence[str]],
    wanting: Callable[[Sequence[str], int], Sequence[str]],
) -> Iterator[tuple[int, bytes, Head | Metadata, Sequence[str]]]:
    """Give the readable messages (id, metadata) of a page, each with the queues that want it."""
    heads = decode_heads([encoded for _, encoded in rows])
    for (message_id, encoded), head in zip(rows, heads, strict=True):
        names = assignments.get(message_id, ())
        # The attributes of a message that goes nowhere are read here for the first time.
        if head is not None and (names or read_metadata(encoded)):
            yield message_id, encoded, head, wanting(names, message_id)


def queues_wanting(
    coverage_of: Callable[[str], Coverage | None], begin: int, end: int
) -> Callable[[Sequence[str], int], Sequence[str]]:
    """Return a function: which of these queues still want this message of a page [begin, end).

    A queue may have been deleted, and made again, since the page was matched: it wants nothing that
    came before it.
    """

    def wants(name: str, offset: int) -> bool:
        coverage = coverage_of(name)
        return coverage is not None and coverage.filter_at(offset) is not None

    @cache
    def is_sure(name: str) -> bool:
        """Whether the answer is the same for all messages of the page."""
        coverage = coverage_of(name)
        return coverage is None or any(
            stretch.begin <= begin and (stretch.end is None or end <= stretch.end)
            for stretch in coverage.live
        )

    # Most messages of a page share their queues with many others.
    known: dict[Sequence[str], Sequence[str]] = {(): ()}

    def wanting(names: Sequence[str], offset: int) -> Sequence[str]:
        names = tuple(names)
        kept = known.get(names)
        if kept is None:
            kept = tuple(name for name in dict.fromkeys(names) if wants(name, offset))
            if all(map(is_sure, names)):
                known[names] = kept
        return kept

    return wanting


# --- which offsets of the log a queue has been filled from ------------------------------------


class Stretch(msgspec.Struct):
    """Offsets [begin, end) (None: to the end of the log and on) and the filter they passed."""

    begin: int
    end: int | None
    filter: str

    def covers(self, offset: int) -> bool:
        """Whether the offset lies in this stretch."""
        return self.begin <= offset and (self.end is None or offset < self.end)


class Coverage(msgspec.Struct):
    """The offsets that a queue was filled from, live and by backfills. ``draining``: not live.

    A queue takes messages live from the offset of its creation on; a changed filter counts from the
    offset of the change on; a backfill adds a stretch of the past. Together these stretches say of
    any message whether the queue has had it, so that no backfill brings it in twice: neither from
    the log nor, when the log has let go of it, from an archive.

    Stretches are kept for as long as the queue is, up to a bound. Beyond it the oldest ones go that
    the log needs no longer, and the queue knows what it has had from ``known_from`` on alone. A
    record without ``known_from`` tells for sure of what the log keeps, and of no more.
    """

    live: list[Stretch]
    backfilled: list[Stretch] = []
    draining: bool = False
    known_from: int | None = None

    def filter_at(self, offset: int) -> str | None:
        """Return the filter that is live at an offset."""
        for stretch in self.live:
            if stretch.covers(offset):
                return stretch.filter
        return None

    def change(self, offset: int, filter_text: str) -> None:
        """Make another filter live from an offset on."""
        self.close(offset)
        self.live.append(Stretch(offset, None, filter_text))

    def close(self, offset: int) -> None:
        """End the live filter at an offset."""
        self.live = [stretch for stretch in self.live if stretch.begin < offset]
        if self.live and (self.live[-1].end is None or self.live[-1].end > offset):
            self.live[-1].end = offset

    def bound(self, earliest: int) -> None:
        """Forget the oldest stretches if there are too many, but none that the log still needs."""
        over = len(self.live) + len(self.backfilled) - MAX_COVERAGE_STRETCHES
        if over <= 0:
            return
        ends = sorted(
            stretch.end
            for stretch in (*self.live, *self.backfilled)
            if stretch.end is not None and stretch.end <= earliest
        )[:over]
        if ends:
            # A stretch that ends below the last one to go would be of no use without it.
            self.known_from = max(self.known_from or 0, ends[-1])
            self.live = [s for s in self.live if s.end is None or s.end > ends[-1]]
            self.backfilled = [s for s in self.backfilled if s.end is None or s.end > ends[-1]]

    def borders(self) -> Iterable[int]:
        """Return the offsets at which the live filter changes."""
        for stretch in self.live:
            yield stretch.begin
            if stretch.end is not None:
                yield stretch.end

    def skip(self, offset: int, filter_text: str) -> int:
        """Return the first offset from here on that no backfill by this filter has done."""
        moved = True
        while moved:
            moved = False
            for stretch in self.backfilled:
                if stretch.filter == filter_text and stretch.covers(offset):
                    assert stretch.end is not None
                    offset, moved = stretch.end, True
        return offset

    def missing(self, begin: int, end: int, filter_text: str) -> list[tuple[int, int]]:
        """Return the stretches of [begin, end) that this filter has not filled the queue from."""
        done = sorted(
            (stretch.begin, end if stretch.end is None else stretch.end)
            for stretch in (*self.live, *self.backfilled)
            if stretch.filter == filter_text
        )
        found = []
        for first, last in done:
            if begin < min(first, end):
                found.append((begin, min(first, end)))
            begin = max(begin, last)
        if begin < end:
            found.append((begin, end))
        return found

    def note(self, begin: int, end: int, filter_text: str) -> None:
        """Note a backfilled stretch, joined to those of the same filter that it meets."""
        rest = []
        for stretch in self.backfilled:
            assert stretch.end is not None
            if stretch.filter == filter_text and stretch.begin <= end and begin <= stretch.end:
                begin, end = min(begin, stretch.begin), max(end, stretch.end)
            else:
                rest.append(stretch)
        self.backfilled = [*rest, Stretch(begin, end, filter_text)]

    def had(self, row: RowTuple, offset: int, compiled: dict[str, Filter]) -> bool:
        """Whether a message has come into the queue before."""
        for stretch in (*self.live, *self.backfilled):
            if stretch.covers(offset):
                known = compiled.get(stretch.filter)
                if known is None:
                    known = compiled[stretch.filter] = parse(stretch.filter)
                if known.matches(row):
                    return True
        return False


# --- filling a queue from the log or an archive -------------------------------------------------


def check_fill(name: str, spec: QueueSpec, coverage: Coverage, filter_text: str | None) -> None:
    """Refuse to fill a queue that is draining, or with messages that an old filter matched."""
    if coverage.draining:
        raise InvalidQueue(f"queue {name!r} is draining: it takes no more messages")
    if filter_text is not None and spec.filter != filter_text:
        raise InvalidInput(
            f"queue {name!r} now takes messages where {spec.filter}; these were "
            f"matched by {filter_text}: plan the backfill again"
        )


def check_archived(name: str, coverage: Coverage, begin: int, end: int, earliest: int) -> None:
    """Refuse to fill a queue from an archive where the log is kept, or coverage is forgotten."""
    if end > earliest:
        raise InvalidInput(
            f"the log is kept from offset {earliest} on: what is there is filled from the log, so "
            f"that a restore can't go to {end}"
        )
    check_known(coverage, name, begin)


def check_known(coverage: Coverage, queue_name: str, begin: int) -> None:
    """Refuse offsets of which nobody knows any more whether the queue has had them."""
    known_from = coverage.known_from or 0
    # Offsets begin at 1.
    if max(begin, 1) < known_from:
        raise InvalidInput(
            f"queue {queue_name!r} has forgotten what it has had below offset {known_from}, so "
            f"that messages might come twice: an archive can fill it from offset {known_from} on"
        )


def backfill_plan(
    spec: QueueSpec, coverage: Coverage, begin: int, end: int, earliest: int, *, archived: bool
) -> BackfillPlan:
    """Return the stretches of [begin, end) that a queue was not filled from by its filter."""
    text = spec.filter
    # Offsets begin at 1.
    at = max(begin, 1 if archived else earliest)
    if archived and at < earliest:
        check_known(coverage, spec.name, at)
    return BackfillPlan(coverage.missing(at, end, text), text, end, earliest)


def fill_step(
    coverage: Coverage,
    filter_text: str,
    bounds: tuple[int, int],
    log: tuple[int, int],
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None = None,
) -> tuple[int, int, int, Sequence[int] | None]:
    """Cut the next step from [begin, end). ``log`` is where the log begins and ends.

    ``offsets`` are all messages in it that were matched elsewhere, ascending; ``sizes``, of their
    payloads, if they come from an archive. Without offsets the store matches the log itself.
    Return where the step starts and stops, how many messages lie before it (the queue has had
    those), and the messages in it.
    """
    begin, end = bounds
    if offsets is None:
        start = coverage.skip(max(begin, log[0]), filter_text)
        return start, min(end, log[1], start + BACKFILL_WINDOW), 0, None
    start = min(end, coverage.skip(begin, filter_text))
    first = bisect_left(offsets, start)
    if sizes is not None:
        last = _archived_end(sizes, first)
        stop = end if last == len(offsets) else offsets[last]
    else:
        stop = min(end, start + FILL_WINDOW)
        last = bisect_left(offsets, stop, lo=first)
        if last - first > FILL_MESSAGES:
            last = first + FILL_MESSAGES
            stop = offsets[last]
    return start, stop, first, offsets[first:last]


def _archived_end(sizes: Sequence[int], first: int) -> int:
    """Return where a step of bounded size ends that begins with a message."""
    total = 0
    for at in range(first, len(sizes)):
        total += sizes[at]
        if at - first >= RESTORE_MESSAGES or (total > RESTORE_BYTES and at > first):
            return at
    return len(sizes)


def wanted(
    filter_text: str, coverage: Coverage, rows: Iterable[tuple[int, bytes]]
) -> dict[int, tuple[Metadata, bytes]]:
    """Return the messages (id, encoded metadata) that a queue wants and has not had, by id."""
    matcher = parse(filter_text)
    compiled: dict[str, Filter] = {matcher.text: matcher}
    found = {}
    for message_id, encoded in rows:
        m = read_metadata(encoded)
        if m is None:
            continue
        row = (m.attributes, m.group, m.priority, m.published_at_ms, m.size)
        if matcher.matches(row) and not coverage.had(row, message_id, compiled):
            found[message_id] = (m, encoded)
    return found
