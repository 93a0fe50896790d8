"""Rules of messages that come into queues from the log, which all stores follow.

A pipeline assigns pages of the log, a switch to inline routing does so once, and a fill brings
older messages into one queue. They read and write nothing. Loaded when used.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.errors import InvalidInput, InvalidQueue
from penstock.filters import Matcher, parse
from penstock.model import AssignStatus, BackfillPlan, LogStretch
from penstock.store.codec.metadata import Head, Metadata, decode_heads, read_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.filters import Filter
    from penstock.model import Cursor, LogPage, LogRecord, QueueSpec
    from penstock.store.policy import Coverage

# Offsets that one step of a backfill looks at.
BACKFILL_WINDOW: Final = 2_000
# Bounds of one step of a fill from the log: offsets looked at, messages added.
FILL_WINDOW: Final = 20_000
FILL_MESSAGES: Final = 5_000
# Bounds of one step of a fill from an archive: what commits together.
RESTORE_MESSAGES: Final = 1_000
RESTORE_BYTES: Final = 16 << 20
# Offsets that a switch to inline routing may find unrouted, and routes itself.
SWITCH_OFFSETS: Final = 10_000


# --- pages that are assigned ------------------------------------------------------------------


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


# --- filling a queue from the log or an archive -------------------------------------------------


class Filled(msgspec.Struct, frozen=True):
    """The counts of one step of a fill, and where the next begins.

    ``already``: the queue has had the message, or its filter does not want it. ``missing``: the
    log or the payload store has it no longer.
    """

    added: int
    already: int
    missing: int
    next: int


def metadata_of(record: LogRecord) -> Metadata:
    """Return the metadata of a message that a reader of the log was given."""
    r = record
    return Metadata(r.published_at_ms, r.group, r.priority, r.size, r.delay_ms, r.attributes)


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
