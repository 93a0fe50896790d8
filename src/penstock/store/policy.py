"""Rules that the key-value store and the SQL store share. They read and write nothing.

Retry or fail, back-off, the scope of dedup ids, the limits of queues, where a page of the log ends,
and which offsets of the log a queue has been filled from. :mod:`penstock.store.filling` has the
rules of the rest of the way from the log into queues.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final
from zlib import crc32

import msgspec

from penstock.errors import CorruptRecord, InvalidInput, InvalidQueue, LimitReached, StoreMismatch
from penstock.filters import parse
from penstock.limits import MAX_ATTEMPTS, MAX_COVERAGE_STRETCHES
from penstock.model import LogRecord, Overflow
from penstock.store.codec.metadata import decode_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from penstock.filters import Filter, RowTuple
    from penstock.model import QueueSpec, Value

log_ = logging.getLogger(__name__)

# The age at which a segment of the log is closed.
SEGMENT_MS: Final = 3_600_000
# The routing of a store that is being copied to: no broker opens it.
COPYING: Final = "copying"


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


# --- between queues ---------------------------------------------------------------------------


def check_move(queue_name: str, to_name: str, *, draining: bool) -> None:
    """Refuse a move into the same queue, or into one that is draining."""
    if queue_name == to_name:
        raise InvalidInput(f"queue {queue_name!r} can't be moved to itself: name another")
    if draining:
        raise InvalidQueue(f"queue {to_name!r} is draining: it takes no more messages")


# --- the limits of a queue --------------------------------------------------------------------

# A limit counts the messages that wait or are in flight, and the bytes of their payloads.


def is_limited(spec: QueueSpec) -> bool:
    """Whether a queue has a limit."""
    return bool(spec.max_messages or spec.max_bytes)


def drops_oldest(spec: QueueSpec) -> bool:
    """Whether a queue has a limit, and lets its oldest messages fail for it."""
    return is_limited(spec) and spec.overflow is Overflow.DROP_OLDEST


def check_room(
    spec: QueueSpec,
    live: int,
    live_bytes: int,
    messages: int,
    message_bytes: int,
    *,
    largest: int = 0,
    older: bool = False,
) -> None:
    """Refuse messages that would pass a limit of a queue, unless it drops its oldest for them.

    It does not for a message that can't fit (``largest``: the bytes of one), as all others would be
    dropped and then that one; nor for messages that are ``older``, which would be dropped at once.
    """
    drops = spec.overflow is Overflow.DROP_OLDEST
    if drops and spec.max_bytes and largest > spec.max_bytes:
        raise LimitReached(
            f"a message of {largest} bytes does not fit into queue {spec.name!r}, which drops its "
            f"oldest beyond max_bytes={spec.max_bytes}: nothing was changed. Send a smaller one or "
            "raise the limit"
        )
    if (drops and not older) or not messages:
        return
    for name, limit, has, more, what in (
        ("max_messages", spec.max_messages, live, messages, "messages"),
        ("max_bytes", spec.max_bytes, live_bytes, message_bytes, "bytes of payload"),
    ):
        if not limit or has + more <= limit:
            continue
        why = f"{has} {what} wait or are in flight, and {more} more would pass {name}={limit}"
        hint = "consume or purge messages, or raise the limit"
        if drops:
            hint += "; they have the lowest ids, and would be the first to be dropped"
        else:
            hint += ", or set overflow to 'drop_oldest'"
        if more > limit:
            hint = f"so many at once never fit: send fewer, or raise the limit; {hint}"
        # A verb that goes in steps may have brought others in before.
        came = f"None of {messages} came in" if messages > 1 else "The message did not come in"
        raise LimitReached(f"queue {spec.name!r} is full: {why}. {came}; {hint}")


def is_over(spec: QueueSpec, live: int, live_bytes: int) -> bool:
    """Whether a queue has more than its limits allow."""
    return bool(
        (spec.max_messages and live > spec.max_messages)
        or (spec.max_bytes and live_bytes > spec.max_bytes)
    )


def guess_excess(spec: QueueSpec, live: int, live_bytes: int) -> int:
    """Guess how many messages a queue has too many, by their mean size; at least one."""
    over = live - spec.max_messages if spec.max_messages else 0
    if spec.max_bytes and live_bytes > spec.max_bytes:
        over = max(over, (live_bytes - spec.max_bytes) * live // live_bytes)
    return max(1, over)


def count_excess(spec: QueueSpec, live: int, live_bytes: int, sizes: Iterable[int]) -> int:
    """Return how many of the oldest messages, of these sizes, must go for the limits to hold."""
    count = 0
    for size in sizes:
        if not is_over(spec, live, live_bytes):
            break
        live, live_bytes, count = live - 1, live_bytes - size, count + 1
    return count


def drop_reason(spec: QueueSpec) -> str:
    """Return the reason that is kept with messages which failed because their queue was full."""
    limits = (("max_messages", spec.max_messages), ("max_bytes", spec.max_bytes))
    told = " and ".join(f"{name}={limit}" for name, limit in limits if limit)
    return f"dropped as the oldest of a full queue: {told}"


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
            raise StoreMismatch("the target holds a store already: name an empty place for a copy")
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
