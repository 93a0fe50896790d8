"""The life of a message, and the nouns of the contract.

::

              publish                claim                    ack
    producer ────────▶ available ───────────▶ in_flight ────────────▶ done ──retention──▶ gone
                 │        ▲  ▲  └─retention─▶ gone │ │
                 │ delay  │  │                     │ │ no attempts left
                 ▼        │  └──expiry─────────────┤ └────────────────▶ failed ─retention─▶ gone
              delayed ────┘                        │                      │
                 ▲  comes due                      │ release              │ redrive
                 └─────────────────────────────────┘   (back to available ◀┘)

A queue that is full may let its oldest waiting messages fail (``overflow``). Each arrow is one row
of :data:`TRANSITIONS`; a store makes no other move. All types here are frozen: a delivery in a
worker's hands never changes under it. Those that come by the thousand hold only plain values, so
the cycle collector need not follow them (``gc=False``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, Self, TypeAlias

import msgspec

__all__ = [
    "AssignStatus",
    "Assigned",
    "Attempt",
    "AttemptEnd",
    "Backfilled",
    "Cause",
    "Cursor",
    "Delivery",
    "Entry",
    "Explanation",
    "LogPage",
    "LogRecord",
    "LogStats",
    "Message",
    "MessageExplanation",
    "Ordering",
    "Outcome",
    "OutcomeStatus",
    "Overflow",
    "Page",
    "QueueSpec",
    "QueueStats",
    "State",
    "StoreStats",
    "SweepCounts",
]

Value: TypeAlias = str | int | float | bool | None
"""A value of an attribute."""


class State(StrEnum):
    """Where a message stands in one queue."""

    AVAILABLE = "available"
    DELAYED = "delayed"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    FAILED = "failed"


class Event(StrEnum):
    """An event in the life of a message in one queue."""

    ENQUEUE = "enqueue"
    ENQUEUE_LATER = "enqueue_later"
    COME_DUE = "come_due"
    CLAIM = "claim"
    ACK = "ack"
    ACK_LATE = "ack_late"
    RELEASE = "release"
    RELEASE_LATER = "release_later"
    EXPIRE = "expire"
    EXHAUST = "exhaust"
    OVERFLOW = "overflow"
    REDRIVE = "redrive"
    MOVE_IN = "move_in"
    MOVE_IN_LATER = "move_in_later"
    MOVE_OUT = "move_out"
    REMOVE = "remove"


# None is "not in the queue": before it came, and after retention, a move, purge or delete took it.
TRANSITIONS: Final[Mapping[tuple[State | None, Event], State | None]] = {
    (None, Event.ENQUEUE): State.AVAILABLE,
    (None, Event.ENQUEUE_LATER): State.DELAYED,
    (State.DELAYED, Event.COME_DUE): State.AVAILABLE,
    (State.AVAILABLE, Event.CLAIM): State.IN_FLIGHT,
    (State.IN_FLIGHT, Event.ACK): State.DONE,
    (State.AVAILABLE, Event.ACK_LATE): State.DONE,
    (State.DELAYED, Event.ACK_LATE): State.DONE,
    (State.IN_FLIGHT, Event.RELEASE): State.AVAILABLE,
    (State.IN_FLIGHT, Event.RELEASE_LATER): State.DELAYED,
    (State.IN_FLIGHT, Event.EXPIRE): State.AVAILABLE,
    (State.IN_FLIGHT, Event.EXHAUST): State.FAILED,
    (State.AVAILABLE, Event.OVERFLOW): State.FAILED,
    (State.DELAYED, Event.OVERFLOW): State.FAILED,
    (State.FAILED, Event.REDRIVE): State.AVAILABLE,
    (State.AVAILABLE, Event.MOVE_OUT): None,
    (State.DELAYED, Event.MOVE_OUT): None,
    (State.FAILED, Event.MOVE_OUT): None,
    (None, Event.MOVE_IN): State.AVAILABLE,
    (None, Event.MOVE_IN_LATER): State.DELAYED,
    (State.DONE, Event.MOVE_IN): State.AVAILABLE,
    (State.DONE, Event.MOVE_IN_LATER): State.DELAYED,
    (State.FAILED, Event.MOVE_IN): State.AVAILABLE,
    (State.FAILED, Event.MOVE_IN_LATER): State.DELAYED,
    (State.AVAILABLE, Event.REMOVE): None,
    (State.DELAYED, Event.REMOVE): None,
    (State.IN_FLIGHT, Event.REMOVE): None,
    (State.DONE, Event.REMOVE): None,
    (State.FAILED, Event.REMOVE): None,
}


class Message(msgspec.Struct, frozen=True, gc=False):
    """A payload with its attributes, as a producer publishes it.

    ``attributes`` is a flat mapping that queue filters look at; ``group`` gives fairness on a
    standard queue and order on a FIFO queue; a higher ``priority`` (0 to 255) is claimed first
    within its group; ``dedup_id`` makes a repeated publish return the first one's id.
    """

    payload: bytes
    attributes: Mapping[str, Value] = {}
    group: str = ""
    priority: int = 0
    delay_ms: int = 0
    dedup_id: str | None = None


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """A message in a worker's hands, under a lease that ends at ``lease_deadline_ms``."""

    message_id: int
    queue: str
    payload: bytes
    attributes: dict[str, Value]
    group: str
    priority: int
    attempts: int
    published_at_ms: int
    receipt: str
    lease_deadline_ms: int

    @property
    def lease(self) -> str:
        """The token of the whole lease: every delivery of one claim has the same."""
        return self.receipt[:-17]


class OutcomeStatus(StrEnum):
    """The outcome of a verb for one receipt."""

    DONE = "done"
    RETRYING = "retrying"
    FAILED = "failed"
    EXTENDED = "extended"
    EXPIRED = "expired"
    STALE = "stale"


_ACCEPTED: Final = frozenset(
    {OutcomeStatus.DONE, OutcomeStatus.RETRYING, OutcomeStatus.FAILED, OutcomeStatus.EXTENDED}
)


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The answer to one receipt. False in a condition if the receipt was refused.

    ``expired``: the lease's deadline has passed. ``stale``: the message is no longer held under
    that lease: it was settled before, or given out again. Either way nothing was changed.
    """

    receipt: str
    status: OutcomeStatus
    lease_deadline_ms: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the verb took effect."""
        return self.status in _ACCEPTED

    def __bool__(self) -> bool:
        return self.status in _ACCEPTED


class Ordering(StrEnum):
    """How a queue orders its messages."""

    STANDARD = "standard"
    FIFO = "fifo"


class Overflow(StrEnum):
    """The answer of a full queue to more messages: refuse them, or let its oldest fail."""

    REFUSE = "refuse"
    DROP_OLDEST = "drop_oldest"


class QueueSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a queue. A retention of 0 keeps for ever.

    What fails is moved into the queue ``dead_letter``, if one is named. ``labels`` are kept for
    the caller that set them; they mean nothing here. ``max_messages`` and ``max_bytes`` (of their
    payloads) bound the messages that wait or are in flight; 0: no limit.
    """

    name: str
    filter: str
    ordering: Ordering = Ordering.STANDARD
    lease_ms: int = 30_000
    max_attempts: int = 5
    backoff_base_ms: int = 1_000
    backoff_cap_ms: int = 300_000
    delay_ms: int = 0
    done_retention_ms: int = 86_400_000
    failed_retention_ms: int = 14 * 86_400_000
    unclaimed_retention_ms: int = 0
    bucket_exponent: int = 2
    description: str = ""
    dead_letter: str = ""
    labels: dict[str, str] = {}
    created_at_ms: int = 0
    version: int = 1
    max_messages: int = 0
    max_bytes: int = 0
    overflow: Overflow = Overflow.REFUSE


class AttemptEnd(StrEnum):
    """How an attempt to process a message ended."""

    ACKED = "acked"
    RELEASED = "released"
    EXPIRED = "expired"
    RUNNING = "running"


class Attempt(msgspec.Struct, frozen=True):
    """One claim of one message: who, when, and how it ended (``ended_at_ms`` is None: not yet)."""

    number: int
    consumer: str
    claimed_at_ms: int
    ended_at_ms: int | None
    end: AttemptEnd
    reason: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A message as ``browse`` shows it. Times that do not apply to its state are None.

    ``size`` is that of its payload in bytes; an older server does not tell. ``first_claimed_ms``
    is when the first attempt at it began, wherever that was: None if there was none, or if it
    ended under a version of Penstock that did not note it.
    """

    message_id: int
    queue: str
    state: State
    payload: bytes | None
    attributes: dict[str, Value]
    group: str
    priority: int
    attempts: int
    published_at_ms: int
    visible_at_ms: int | None = None
    lease_deadline_ms: int | None = None
    consumer: str | None = None
    ended_at_ms: int | None = None
    reason: str = ""
    size: int = 0
    first_claimed_ms: int | None = None


class Page(tuple[Entry, ...]):  # noqa: SLOT001 - a tuple with an attribute
    """A page of entries; ``next_cursor`` continues after it, or is None at the end."""

    next_cursor: str | None

    def __new__(cls, entries: Sequence[Entry], next_cursor: str | None) -> Self:
        """Make a page of these entries."""
        page = super().__new__(cls, entries)
        page.next_cursor = next_cursor
        return page

    def __getnewargs__(self) -> tuple[tuple[Entry, ...], str | None]:
        return tuple(self), self.next_cursor

    def __repr__(self) -> str:
        return f"Page({len(self)} entries, next_cursor={self.next_cursor!r})"


class Explanation(msgspec.Struct, frozen=True):
    """Why a filter did or did not take a message: the result of one condition of the filter.

    ``result`` is True, False or None for unknown. An atom such as ``price > 10`` gives in
    ``values`` the values it read, as ``("price", 12)``; AND, OR and NOT give ``parts`` instead.
    """

    text: str
    result: bool | None
    values: tuple[tuple[str, Value], ...] = ()
    parts: tuple[Explanation, ...] = ()


class Cause(StrEnum):
    """Why a queue has a message (the first three), or does not have it."""

    TAKEN = "taken"
    BACKFILLED = "backfilled"
    MOVED_IN = "moved_in"
    NOT_TAKEN = "not_taken"
    TOO_EARLY = "too_early"
    DRAINING = "draining"
    NOT_ROUTED = "not_routed"
    REMOVED = "removed"
    NO_MESSAGE = "no_message"
    # Whether the queue has it or not: the records that would tell are gone, or not for this key.
    FORGOTTEN = "forgotten"
    HIDDEN = "hidden"


class MessageExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a message is, or is not, in a queue. ``text`` says it in sentences.

    ``entry``: the message in the queue, without its payload; None: it is not there. ``filter``:
    the queue's filter with the values that its conditions read; ``filter_then``: the same of the
    filter that counted at the message's offset, if that was another. Both are None if nothing is
    known of the message. ``counts_from``: the offset from which on the queue's filter counts; None:
    the queue is draining. ``elsewhere``: other queues that have the message, by name; ``looked`` of
    ``queues`` queues were looked at.
    """

    queue: str
    message_id: int
    cause: Cause
    text: str
    entry: Entry | None
    attempts: list[Attempt]
    filter: Explanation | None
    filter_then: Explanation | None
    counts_from: int | None
    elsewhere: dict[str, State]
    looked: int
    queues: int

    @property
    def state(self) -> State | None:
        """The state of the message in the queue; None: it is not there."""
        return None if self.entry is None else self.entry.state


class LogRecord(msgspec.Struct, frozen=True, gc=False):
    """A message as the metadata log has it: everything but its payload. Its id is its offset."""

    message_id: int
    attributes: dict[str, Value]
    group: str
    priority: int
    published_at_ms: int
    size: int
    delay_ms: int


class Cursor(msgspec.Struct, frozen=True):
    """A stretch of a log: [begin, end), and the version of the filters that were live for it."""

    begin: int
    end: int
    filters_version: int | None = None


class LogPage(msgspec.Struct, frozen=True):
    """A page of a log, and what a tailer needs to route it.

    Hand ``cursor`` back with the assignments; go on reading from ``cursor.end``. ``filters`` are
    those that are live for every message of the page, by queue. ``earliest`` is the lowest offset
    that is still kept, ``end`` the offset up to which there is something to read now.
    """

    log: int
    records: list[LogRecord]
    cursor: Cursor
    earliest: int
    end: int
    filters: Mapping[str, str]


class AssignStatus(StrEnum):
    """The outcome of assigning one page of a log."""

    APPLIED = "applied"
    TRIMMED = "trimmed"
    STALE = "stale"
    AHEAD = "ahead"
    OUTDATED = "outdated"
    FENCED = "fenced"


class Assigned(msgspec.Struct, frozen=True):
    """The answer to ``assign``; true in a condition if anything was new.

    ``applied``: all of it. ``trimmed``: the part that had not been assigned before. ``stale``:
    all of it had been, nothing was changed. ``ahead``: the page begins after the log's cursor,
    so that messages would be left out; nothing was changed, read from ``cursor`` on.
    ``outdated``: a filter has changed for offsets of this page since it was read; nothing was
    changed, read it again. ``fenced``: another pipeline has taken over since this one took its
    epoch; nothing was changed, and nothing that this one does will be.
    """

    status: AssignStatus
    cursor: int
    placed: int

    def __bool__(self) -> bool:
        return self.status in {AssignStatus.APPLIED, AssignStatus.TRIMMED}


class Backfilled(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a backfill so far, and the offset that it goes on from.

    ``missing`` counts messages that the filter wants but whose payload is gone: every queue that
    held them has let go of them.
    """

    scanned: int
    added: int
    missing: int
    next: int


class LogStats(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata log: how it is spread, what it holds, and how far it has been routed.

    ``epoch``: of the tailer or pipeline that was started last.
    """

    routing: str
    logs: int
    earliest: int
    end: int
    routed_up_to: int
    segments: int
    retention_ms: int
    cursors: dict[int, int]
    epoch: int = 0

    @property
    def kept(self) -> int:
        """How many offsets are kept."""
        return self.end - self.earliest


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """Depth by state, the oldest messages, and totals since the queue was made.

    ``oldest_age_ms``: for how long the oldest available message can be claimed by now;
    ``oldest_in_flight_ms``: how long ago the oldest claim of a message in flight was made. None:
    there is no such message, or a server of an earlier version did not say.
    ``live_bytes``: of the payloads that wait or are in flight, if the queue has ``max_bytes``.
    """

    queue: str
    available: int
    delayed: int
    in_flight: int
    done: int
    failed: int
    oldest_age_ms: int | None
    groups_ready: int
    enqueued_total: int
    claimed_total: int
    acked_total: int
    released_total: int
    lease_expired_total: int
    failed_total: int
    redriven_total: int
    removed_total: int
    moved_in_total: int
    moved_out_total: int
    oldest_in_flight_ms: int | None = None
    live_bytes: int = 0


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the whole store; the last three count since it was opened."""

    published_total: int
    duplicates_total: int
    unrouted_total: int
    quarantined_total: int
    healed_total: int
    stale_receipts_total: int
    unreadable_total: int = 0


class SweepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one sweep, and when the next one has something to do (None: nothing is due)."""

    leases_expired: int = 0
    came_due: int = 0
    failed: int = 0
    moved: int = 0
    removed: int = 0
    dedup_forgotten: int = 0
    next_due_ms: int | None = None

    @property
    def total(self) -> int:
        """How many things were done."""
        *counts, _ = msgspec.structs.astuple(self)
        return sum(counts)


class LeaseRequest(msgspec.Struct, frozen=True, gc=False):
    """One claim: how many messages, for how long, for whom; ``lease`` is sixteen fresh bytes."""

    limit: int
    lease_ms: int
    consumer: str
    lease: bytes


class StoreInfo(msgspec.Struct, frozen=True):
    """Which store this is."""

    store_id: str
    design: str
    routing: str


class LogStretch(msgspec.Struct, frozen=True):
    """Offsets [begin, end) of one log."""

    log: int
    begin: int
    end: int


class RoutePlan(msgspec.Struct, frozen=True):
    """The stretches that a router may match next; the live filters do not change within one.

    ``epoch`` is the one that may assign now; ``lag`` counts offsets, by log. ``cursors``, ``end``
    and ``earliest`` are those of the log, whose store is ``store_id``.
    """

    epoch: int
    filters_version: int
    stretches: list[LogStretch]
    lag: dict[int, int]
    cursors: dict[int, int]
    store_id: str
    end: int
    earliest: int


class LiveFilters(msgspec.Struct, frozen=True):
    """The filters that are live at an offset, and the offset at which they change, if any."""

    filters: dict[str, str]
    filters_version: int
    until: int | None


class BackfillPlan(msgspec.Struct, frozen=True):
    """The stretches that a queue has not been filled from by its present filter.

    ``earliest`` is where the log begins; what lies below comes from an archive.
    """

    stretches: list[tuple[int, int]]
    filter: str
    end: int
    earliest: int


class Collected(msgspec.Struct, frozen=True):
    """Payloads that nobody can ever ask for again, and their bytes."""

    freed_messages: int
    freed_bytes: int
