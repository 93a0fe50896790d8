"""Reads of a broker for the pages of queues and messages. Each is bounded, and says if it was cut.

They run on a thread and let others in between two pages of a browse. Only :func:`find_message`
reads a payload.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from penstock import limits
from penstock.broker.explain import likely_queues, row_of
from penstock.errors import QueueNotFound
from penstock.filters import Row
from penstock.model import Attempt, Entry, LogRecord, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.broker.broker import Broker
    from penstock.filters import Filter

# Messages that a browse reads before it lets others in.
STEP: Final = 1_000


# --- messages in a state --------------------------------------------------------------------------


class Scan(msgspec.Struct):
    """Messages that were found, how many were looked at, and where to go on (None: the end)."""

    entries: list[Entry]
    looked: int
    next_cursor: str | None


def scan(
    broker: Broker,
    queue: str,
    state: State,
    *,
    cursor: str | None = None,
    where: Callable[[Entry], bool] | None = None,
    count: int = limits.CONSOLE_MAX_SCAN,
) -> Scan:
    """Look for messages in a state, up to a count, among a bounded number of them."""
    found = Scan([], 0, cursor)
    while True:
        room = count - len(found.entries)
        limit = min(STEP, limits.CONSOLE_MAX_SCAN - found.looked, room if where is None else STEP)
        cursor = found.next_cursor
        page = broker.browse(queue, state=state, limit=limit, cursor=cursor, payloads=False)
        if where is not None:
            places = [at for at, entry in enumerate(page) if where(entry)]
            if len(places) > room:
                # Read again up to the last that there is room for: for the cursor behind it.
                limit = places[room - 1] + 1
                page = broker.browse(queue, state=state, limit=limit, cursor=cursor, payloads=False)
        found.entries += [entry for entry in page if where is None or where(entry)]
        found.looked += len(page)
        found.next_cursor = page.next_cursor
        full = len(found.entries) >= count or found.looked >= limits.CONSOLE_MAX_SCAN
        if page.next_cursor is None or full:
            return found


class Reason(msgspec.Struct):
    """Failed messages that share a reason."""

    text: str
    key: str
    count: int
    first_ms: int
    last_ms: int


def reason_key(text: str) -> str:
    """Return a short name for a reason, for addresses."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def reasons(failed: Iterable[Entry]) -> list[Reason]:
    """Group failed messages by their reasons, the most frequent first."""
    found: dict[str, Reason] = {}
    for entry in failed:
        ended_ms = entry.ended_at_ms or 0
        each = found.get(entry.reason)
        if each is None:
            key = reason_key(entry.reason)
            each = Reason(entry.reason, key, 0, ended_ms, ended_ms)
            found[entry.reason] = each
        each.count += 1
        each.last_ms = max(each.last_ms, ended_ms)
    return sorted(found.values(), key=lambda each: -each.count)


class Share(msgspec.Struct):
    """The part of a queue that one group or one consumer has."""

    name: str
    waiting: int = 0
    # Since when its oldest message waits.
    since_ms: int | None = None
    in_flight: int = 0
    # The soonest and the latest deadline of its leases.
    soonest_ms: int | None = None
    latest_ms: int | None = None
    attempts: int = 0


def shares(entries: Iterable[Entry], name_of: Callable[[Entry], str]) -> list[Share]:
    """Sum messages up by a name: the longest wait first, then the most in flight."""
    found: dict[str, Share] = {}
    for entry in entries:
        share = found.setdefault(name_of(entry), Share(name_of(entry)))
        share.attempts = max(share.attempts, entry.attempts)
        if entry.state is State.IN_FLIGHT:
            share.in_flight += 1
            deadline_ms = entry.lease_deadline_ms or 0
            share.soonest_ms = min(share.soonest_ms or deadline_ms, deadline_ms)
            share.latest_ms = max(share.latest_ms or 0, deadline_ms)
        else:
            share.waiting += 1
            since_ms = max(entry.visible_at_ms or 0, entry.published_at_ms)
            share.since_ms = min(share.since_ms or since_ms, since_ms)
    return sorted(
        found.values(), key=lambda each: (each.since_ms or limits.MAX_OFFSET, -each.in_flight)
    )


# --- one message ----------------------------------------------------------------------------------


class Place(msgspec.Struct):
    """A message in one queue, with its attempts."""

    entry: Entry
    attempts: list[Attempt]


class Whereabouts(msgspec.Struct):
    """A message in all its queues, as far as they were looked at.

    ``row`` is None if neither a queue nor the log has the message. ``looked`` of ``queues`` queues
    were looked at: those whose filters would take the message, and their dead letter queues, first.
    """

    row: Row | None
    places: list[Place]
    takers: list[str]
    looked: int
    queues: int


def find_message(
    broker: Broker, queue: str, message_id: int, may_see: Callable[[str | None], bool]
) -> tuple[Entry | None, Whereabouts]:
    """Find a message in a queue, with its payload, and in all queues that may be seen."""
    here = next(iter(broker.browse(queue, message_id=message_id)), None)
    # The log has messages of all queues.
    record = here or (log_record(broker, message_id) if may_see(None) else None)
    specs = {spec.name: spec for spec in broker.queues() if may_see(spec.name)}
    row = None if record is None else row_of(record)
    takers = [] if row is None else [name for name in broker.takers(row) if name in specs]
    names = likely_queues(queue, takers, specs)
    places = []
    for name in names[: limits.MAX_PLACES]:
        # One that was deleted since has no place.
        with suppress(QueueNotFound):
            page = broker.browse(name, message_id=message_id, payloads=False)
            places += [Place(entry, broker.attempts(name, message_id)) for entry in page]
    if row is None and places:
        row = row_of(places[0].entry)
        takers = [name for name in broker.takers(row) if name in specs]
    looked = min(len(names), limits.MAX_PLACES)
    return here, Whereabouts(row, places, takers, looked, len(specs))


def log_record(broker: Broker, message_id: int) -> LogRecord | None:
    """Read a message from the log, if that still has it."""
    stats = broker.log_stats()
    if stats.earliest <= message_id < stats.end:
        for log in range(stats.logs):
            for record in broker.read_log(log, begin=message_id, limit=1).records:
                if record.message_id == message_id:
                    return record
    return None


# --- a filter that is being written ---------------------------------------------------------------


def try_filter(broker: Broker, where: Filter) -> tuple[int, list[LogRecord]]:
    """Try a filter on the newest messages of the log: how many there are, and those it takes."""
    stats = broker.log_stats()
    newest: list[LogRecord] = []
    for log in range(stats.logs):
        begin = max(stats.earliest, stats.end - limits.CONSOLE_LOG_SAMPLE)
        while begin < stats.end:
            # A page ends where filters have changed.
            page = broker.read_log(log, begin=begin, limit=limits.CONSOLE_LOG_SAMPLE)
            newest += page.records
            if page.cursor.end <= begin:
                break
            begin = page.cursor.end
    newest.sort(key=lambda record: -record.message_id)
    return len(newest), [record for record in newest if where.matches(row_of(record))]
