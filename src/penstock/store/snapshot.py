"""The tables of a store as they were at one moment, for bulk reads.

``tables`` asks for no more than this, so that it need not know how a store keeps its rows. Several
threads may read one :class:`PinnedStore` at a time, a page each in turn; its maker closes it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from penstock.model import LogStats, QueueSpec, QueueStats, State, StoreStats
    from penstock.store.codec.records import AttemptRecord

# A message that waits or is in flight: message id, the state's name, attempts, when it is visible,
# what :meth:`PinnedStore.leases` tells its lease by, metadata. A plain tuple: the garbage collector
# lets go of those, and they come by the ten thousand.
LiveRow: TypeAlias = tuple[int, str, int, int, Any, bytes]


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


class PinnedStore(AbstractContextManager["PinnedStore"], Protocol):
    """A store as it was at ``at_ms``. Close it soon: it keeps deleted data."""

    at_ms: int
    log_stats: LogStats
    totals: StoreStats
    stats: Sequence[QueueStats]

    @property
    def store_id(self) -> str:
        """Which store it is."""

    @property
    def queues(self) -> Mapping[str, QueueSpec]:
        """Every queue's settings, by name and in the order of names."""

    @property
    def draining(self) -> Collection[str]:
        """The names of queues that take no more messages."""

    def depths(self, queue: str) -> Depths:
        """Count a queue's messages."""

    # --- ranges, of which each row is in exactly one
    def about(self, table: str, queue: str) -> int:
        """Return about how many rows a queue has in active, attempts, done or failed."""

    def cut(self, table: str, queue: str, count: int, least: int = 0) -> Iterator[Keys]:
        """Cut a queue's rows of one of these into about ``count`` ranges, neighbours together.

        Ended messages whose sequence is below ``least`` may be left out.
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

    def ended_rows(
        self, state: State, keys: Keys, low: int, high: int
    ) -> Iterator[tuple[Sequence[int], Sequence[tuple[Any, ...]]]]:
        """Read done or failed messages whose sequence is in [low, high), with their sequences.

        Of each: message id, something of the store's own, when it ended, attempts, metadata, and
        of failed ones the reason.
        """

    def attempt_rows(self, keys: Keys) -> Iterator[tuple[int, int, AttemptRecord]]:
        """Read ended attempts: message id, attempt, record."""

    def referenced(self, message_ids: set[int]) -> set[int]:
        """Return which of the messages any queue still holds, in whatever state."""

    def close(self) -> None:
        """Let go of the pinned tables; a reader that goes on gets an error."""


def cut_range(low: int, high: int, count: int) -> Iterator[tuple[int, int]]:
    """Cut [low, high) into at most ``count`` ranges of about the same width."""
    count = max(1, min(count, high - low))
    borders = [low + (high - low) * at // count for at in range(count + 1)]
    yield from pairwise(borders)
