"""The tables of a store as they were at one moment, for bulk reads.

``tables`` asks for no more than this, so that it need not know how a store keeps its rows. Several
threads may read one :class:`PinnedStore` at a time, a page each in turn; its maker closes it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from penstock.limits import MAX_OFFSET
from penstock.model import State
from penstock.store.codec.metadata import decode_heads

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from penstock.model import LogStats, QueueSpec, QueueStats, StoreStats
    from penstock.store.codec.records import AttemptRecord
    from penstock.store.policy import Coverage, LogSettings

# A message that waits or is in flight: message id, the state's name, attempts, when it is visible,
# what :meth:`PinnedStore.leases` tells its lease by, metadata, attempts that are forgiven. A plain
# tuple: the garbage collector lets go of those, and they come by the ten thousand.
LiveRow: TypeAlias = tuple[int, str, int, int, Any, bytes, int]


class Keys(NamedTuple):
    """A range of one queue's rows, which only the store that gave it can read.

    ``live``: they are messages that wait or are in flight, not what has ended.
    """

    table: str
    begin: bytes
    end: bytes
    live: bool


class LeaseHolder(NamedTuple):
    """The lease that holds a message: its consumer, since when and until when."""

    consumer: str
    claimed_at_ms: int
    deadline_ms: int


class Depths(NamedTuple):
    """How many messages of a queue are in which state."""

    available: int
    delayed: int
    in_flight: int
    done: int
    failed: int


class GroupDepths(NamedTuple):
    """How many live messages a group of a queue has, and when the oldest that waits came."""

    group: str
    available: int
    delayed: int
    in_flight: int
    oldest_published_ms: int | None


class PinnedStore(AbstractContextManager["PinnedStore"], Protocol):
    """A store as it was at ``at_ms``. Close it soon: it keeps deleted data."""

    at_ms: int
    # Whether the sequence numbers of a queue's done and failed messages are in the order of time.
    ordered: bool
    # How many records could not be read, and were left out.
    left_out: int
    # The id that the next message gets: above every one in the snapshot.
    next_offset: int
    log_stats: LogStats
    totals: StoreStats
    stats: Sequence[QueueStats]

    @property
    def store_id(self) -> str:
        """Which store it is."""

    @property
    def log_settings(self) -> LogSettings:
        """How the log is spread and kept."""

    @property
    def queues(self) -> Mapping[str, QueueSpec]:
        """Every queue's settings, by name and in the order of names."""

    @property
    def draining(self) -> Collection[str]:
        """The names of queues that take no more messages."""

    def coverage(self, queue: str) -> Coverage:
        """Return which offsets of the log a queue was filled from."""

    def depths(self, queue: str) -> Depths:
        """Count a queue's messages."""

    def number(self, queue: str) -> int:
        """Return the number that a queue got when it was made; no other queue gets it."""

    def sequence_ends(self, queue: str) -> dict[State, int]:
        """Return the sequence numbers that done and failed messages of a queue get next.

        Of a store that was pinned with ``marks``: no later one gets a lower number.
        """

    def first_ended(self, state: State, queue: str, since_ms: int) -> tuple[int, int] | None:
        """Return sequence and time of the first message that ended at a time or later.

        It is the one with the lowest sequence number; None: there is none.
        """

    def groups(self, queue: str) -> Iterator[GroupDepths]:
        """Count the live messages of each group of a queue."""

    # --- ranges, of which each row is in exactly one
    def about(self, table: str, queue: str) -> int:
        """Return about how many rows a queue has in active, attempts, done or failed."""

    def cut(
        self, table: str, queue: str, count: int, low: int = 0, high: int = MAX_OFFSET
    ) -> Iterator[Keys]:
        """Cut a queue's rows of one of these into about ``count`` ranges, neighbours together.

        Ended messages whose sequence, and ended attempts whose message id, is not in [low, high)
        may be left out.
        """

    def message_ends(self, begin: int, end: int) -> tuple[int, int] | None:
        """Return the first and the last id in [begin, end) whose payload is kept, if any is."""

    # --- rows, a page of bounded size in memory at a time
    def log_rows(self, log: int, begin: int, end: int) -> Iterator[list[tuple[int, bytes]]]:
        """Read messages (id, metadata) of [begin, end) of a log."""

    def payloads(self, message_ids: Sequence[int]) -> list[bytes | None]:
        """Read payloads; None for those that are gone."""

    def payload_rows(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Read every kept payload (message id, payload) of ids in [begin, end)."""

    def payload_sizes(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Read how large every kept payload of ids in [begin, end) is."""

    def live_rows(self, keys: Keys) -> Iterator[list[LiveRow]]:
        """Read live messages; of keys that were cut for attempts, maybe those in flight alone."""

    def leases(self, rows: Sequence[LiveRow]) -> list[LeaseHolder | None]:
        """Return the lease of each live message; None: no lease holds it, or it can't be read."""

    def first_claims(self, queue: str, rows: Sequence[LiveRow]) -> list[int | None]:
        """Return when the first attempt at each live message of a queue began.

        None: it was never claimed, or nobody knows. A claim that was given back unseen is none, and
        a message that was redriven or moved has its first attempt from before.
        """

    def ended_rows(
        self, state: State, keys: Keys, low: int, high: int
    ) -> Iterator[tuple[Sequence[int], Sequence[tuple[Any, ...]]]]:
        """Read done or failed messages whose sequence is in [low, high), with their sequences.

        Of each: message id, something of the store's own, when it ended, attempts, metadata, the
        reason (of failed ones), and ``first_claimed_ms``: when the first attempt at it began. None:
        it had none, or it ended under a version of Penstock that did not note it.
        """

    def attempt_rows(self, keys: Keys) -> Iterator[tuple[int, int, AttemptRecord]]:
        """Read ended attempts: message id, attempt, record."""

    def attempts_at(
        self, queue: str, messages: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int, AttemptRecord]]:
        """Read the ended attempts at messages (message id, attempts), as ``attempt_rows`` does."""

    def referenced(self, message_ids: set[int]) -> set[int]:
        """Return which of the messages any queue still holds, in whatever state."""

    def unheld(self) -> Iterator[int]:
        """Give the messages that no queue took and the log still has, ascending.

        Those that a tailer has not come to yet may be among them.
        """

    def close(self) -> None:
        """Let go of the pinned tables; a reader that goes on gets an error."""


def count_groups(pages: Iterable[Sequence[LiveRow]]) -> Iterator[GroupDepths]:
    """Count live messages by their groups; one whose record can't be read is left out."""
    found: dict[str, dict[str, int]] = {}
    oldest: dict[str, int] = {}
    in_flight = State.IN_FLIGHT.value
    for rows in pages:
        for row, metadata in zip(rows, decode_heads([row[5] for row in rows]), strict=True):
            if metadata is None:
                continue
            group, state = metadata.group, row[1]
            counts = found.get(group)
            if counts is None:
                counts = found[group] = dict.fromkeys(GroupDepths._fields[1:4], 0)
            counts[state] += 1
            if state != in_flight:
                published_ms = metadata.published_at_ms
                oldest[group] = min(oldest.get(group, published_ms), published_ms)
    for group, counts in found.items():
        yield GroupDepths(group, **counts, oldest_published_ms=oldest.get(group))


def cut_range(low: int, high: int, count: int) -> Iterator[tuple[int, int]]:
    """Cut [low, high) into at most ``count`` ranges of about the same width."""
    count = max(1, min(count, high - low))
    borders = [low + (high - low) * at // count for at in range(count + 1)]
    yield from pairwise(borders)
