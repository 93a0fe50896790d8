"""The seam between the two key-value designs: where a queue's live messages are kept.

Everything else (leases, history, payloads, dedup, counters) is the same for both and lives in
:mod:`penstock.store.kv.store`. An active set is called under the store's lock with a batch to
write into; it reads only what was committed before, keeps ``queue.counts.available``,
``.delayed``, ``.in_flight`` and ``.live_bytes`` right, and may keep a directory in memory that
:meth:`ActiveSet.load` rebuilds from disk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec

from penstock.engines import Shape
from penstock.limits import MAX_ATTEMPTS
from penstock.store.codec.metadata import decode_heads
from penstock.store.codec.opendata import read_terminated, terminated
from penstock.store.codec.records import NO_LEASE
from penstock.store.kv.tables import DueHeap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.engines import Batch, Engine
    from penstock.errors import StoreDamaged
    from penstock.model import State
    from penstock.store.kv.queues import Queue
    from penstock.store.kv.tables import FirstKeys

D = TypeVar("D")

# The tables of each design.
LIVE_TABLES: Final[Mapping[str, Mapping[str, Shape]]] = {
    "indexed": {
        "available": Shape.VALUES,
        "in_progress": Shape.SHORT_LIVED,
        "visibility_index": Shape.TIME_INDEX,
        "groups": Shape.SHORT_LIVED,
    },
    "buckets": {"buckets": Shape.SHORT_LIVED},
}

# Lanes of a queue that are looked at for its oldest message, and those of them that are read.
MOST_LANES: Final = 1_000
MOST_HEADS: Final = 8


class Item(msgspec.Struct, gc=False):
    """A live message of one queue.

    ``key`` names it within the queue (in receipts and leases); ``lane`` is its group and
    inverted priority in sort order; ``attempts`` counts claims so far, the running one included.
    """

    key: int
    message_id: int
    lane: bytes
    attempts: int
    forgiven: int
    visible_at_ms: int
    metadata: bytes
    lease: bytes = NO_LEASE


def count_attempt(item: Item) -> None:
    """Count a claim; one more than a record can hold is not counted."""
    if item.attempts < MAX_ATTEMPTS:
        item.attempts += 1


def uncount_attempt(item: Item) -> None:
    """Count a claim as not made. At the bound it stays: attempts never go below what they were."""
    if item.attempts < MAX_ATTEMPTS:
        item.attempts -= 1


@lru_cache(maxsize=8192)
def lane_of(group: str, priority: int) -> bytes:
    """Encode a lane: lanes of a group sort together, the highest priority first."""
    return terminated(group.encode()) + bytes([255 - priority])


def group_of(lane: bytes) -> bytes:
    """Return the group's part of a lane."""
    return lane[:-1]


def split_lane(lane: bytes) -> tuple[str, int]:
    """Return group and priority of a lane."""
    return read_terminated(lane, 0)[0].decode(), 255 - lane[-1]


Grant: TypeAlias = tuple[bytes, int]
"""A lease's name and its deadline: what a message goes in flight under."""

# quarantine(table name, key, value, why): have a record that does not decode put aside with the
# next commit. If it answers True, the caller corrects its queue's counters.
Quarantine: TypeAlias = Callable[[str, bytes, bytes, str], bool]


class Directories(dict[int, D]):
    """The part of each queue that is in memory, by number; ``damage``: why it may be incomplete.

    Of a queue without a directory because of that, looking it up raises the reason.
    """

    def __init__(self) -> None:
        super().__init__()
        self.damage: dict[int, StoreDamaged] = {}

    def __missing__(self, number: int) -> D:
        raise self.damage[number].anew()


class Beliefs(NamedTuple):
    """The beliefs of memory about the disk, in a form that two memories can be compared by.

    Facts are the same in a memory that is made anew. Bounds are keys or times before which there
    is nothing to be found: too low costs a look in vain, too high or missing hides something.
    """

    facts: dict[tuple[Any, ...], Any]
    bounds: dict[tuple[Any, ...], Any]


class ActiveSet(Protocol[D]):
    """Available, delayed and in-flight messages of all queues of a store.

    Each design has a directory of each queue (``D``), and the methods without a body here.

    ``healed`` counts index or directory entries that had no message and were removed.
    ``first_keys`` are those of its tables.

    ``passed`` are waiting messages that claims pass over, by queue number and key, and why they
    can't be read; ``unread`` has the reasons that were met since somebody took it. ``damage`` is
    why a queue, by number, may have more to claim than is known of.
    """

    healed: int
    passed: dict[int, dict[int, StoreDamaged]]
    unread: list[StoreDamaged]
    damage: dict[int, StoreDamaged]
    first_keys: Sequence[FirstKeys]
    _directories: Directories[D]
    _queues: dict[int, Queue]
    # By queue number: no message comes due before this.
    _due: DueHeap[int]
    _quarantine: Quarantine

    def __init__(self, quarantine: Quarantine, first_keys: Sequence[FirstKeys] = ()) -> None:
        self._quarantine, self.first_keys = quarantine, first_keys
        self.healed, self.passed, self.unread = 0, {}, []
        self._directories, self._queues, self._due = Directories(), {}, DueHeap()
        self.damage = self._directories.damage

    def load(self, queue: Queue) -> None:
        """Rebuild what memory keeps about a queue from what is on disk."""

    def _count_bytes(self, queue: Queue, items: Sequence[Item], sign: int) -> None:
        """Count the payload bytes of messages that come (1) or go (-1); for ``max_bytes`` alone."""
        heads = decode_heads([item.metadata for item in items])
        queue.counts.live_bytes += sign * sum(head.size for head in heads if head is not None)

    def forget(self, queue: Queue) -> None:
        """Drop what memory keeps about a queue: it is read anew, or was deleted."""
        self._directories.pop(queue.number, None)
        self.damage.pop(queue.number, None)
        self._queues.pop(queue.number, None)
        self._due.set(queue.number, None)

    def drop(self, queue: Queue) -> None:
        """Let go of a queue that was deleted."""
        self.forget(queue)
        self.passed.pop(queue.number, None)

    def add(self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int) -> None:
        """Put messages in: available, or delayed if ``visible_at_ms`` is after now.

        Sets ``item.key`` where the design chooses it. On a FIFO queue, order is by message id.
        """

    def take(
        self, batch: Batch, queue: Queue, limit: int, grants: Iterator[Grant], now_ms: int
    ) -> list[Item]:
        """Move up to ``limit`` available messages to in flight, each under the next of the grants.

        Groups take turns; within a group the highest priority goes first, then the longest
        visible. On a FIFO queue a group that has anything in flight, or whose head is not
        visible, is passed over; all that is taken of it must go under one lease, so the grants
        must be of one. ``attempts`` of what is returned counts this claim.
        """

    def find(self, queue: Queue, keys: Sequence[int]) -> list[Item | None]:
        """Look messages up in flight."""

    def live(self, queue: Queue, message_ids: Sequence[int], most: int | None = None) -> list[Item]:
        """Look messages up by their ids, waiting or in flight; may have to read all there are.

        ``most``: if nothing leads to them, read only so many rows, those that are most likely to
        have the newest of them.
        """

    def in_flight_by_message(self, queue: Queue, message_id: int) -> Item | None:
        """Look a message up in flight by its id."""

    def settle(self, batch: Batch, queue: Queue, items: Sequence[Item]) -> None:
        """Remove messages from in flight: they are done, failed or removed."""

    def put_back(self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int) -> None:
        """Move messages from in flight back to waiting, as :meth:`add` does."""

    def pass_over(self, queue: Queue, unread: Mapping[int, StoreDamaged]) -> None:
        """Make claims pass waiting messages over, by key; on a FIFO queue, also those behind."""
        self.unread += unread.values()
        self.passed.setdefault(queue.number, {}).update(unread)

    def unpass(self, queue: Queue, items: Sequence[Item]) -> None:
        """Forget messages that do not wait any more."""
        passed = self.passed.get(queue.number, {})
        for item in items if passed else ():
            passed.pop(item.key, None)
        if not passed:
            self.passed.pop(queue.number, None)

    def unseen(self, queue: Queue) -> StoreDamaged | None:
        """Return why a claim may not get everything that waits in a queue, if so."""
        passed = self.passed.get(queue.number, {}).values()
        return self.damage.get(queue.number) or next(iter(passed), None)

    def relabel(self, batch: Batch, queue: Queue, items: Sequence[Item], lease: bytes) -> None:
        """Note in flight messages as held under another split of their lease."""

    def come_due(self, batch: Batch, now_ms: int, budget: int) -> list[tuple[Queue, list[int]]]:
        """Make delayed messages available whose time has come; return their ids, by queue."""
        moved: list[tuple[Queue, list[int]]] = []
        while budget > 0 and (first := self._due.first()) and first[0] <= now_ms:
            queue = self._queues[first[1]]
            ids = self._come_due(batch, queue, now_ms, budget)
            queue.counts.delayed -= len(ids)
            queue.counts.available += len(ids)
            budget -= len(ids)
            moved.append((queue, ids))
        return moved

    def _come_due(self, batch: Batch, queue: Queue, now_ms: int, budget: int) -> list[int]:
        """Move due messages of a queue, note when the next one is due, and return their ids."""

    def next_due_ms(self) -> int | None:
        """Return when the next delayed message comes due."""
        first = self._due.first()
        return first[0] if first else None

    def ready_groups(self, queue: Queue) -> int:
        """Return how many groups a claim would visit (possibly in vain)."""

    def waiting(self, queue: Queue, keys: Sequence[int]) -> list[Item | None]:
        """Look messages up among available and delayed."""

    def remove(self, batch: Batch, queue: Queue, items: Sequence[Item]) -> None:
        """Remove waiting messages."""

    def page(
        self, queue: Queue, state: State, after: bytes, limit: int
    ) -> tuple[list[Item], bytes | None]:
        """Read a page of available, delayed or in-flight messages, and where the next begins."""

    def oldest_ms(self, queue: Queue, now_ms: int) -> int | None:
        """Return since when the message can be claimed that can be for longest.

        Looks at so many lanes as :data:`MOST_LANES` says; of a FIFO queue at the first messages of
        the groups whose messages are oldest.
        """

    def oldest(self, queue: Queue, limit: int) -> list[Item]:
        """Return the waiting messages that were published first, up to a limit.

        At least one if any waits and can be read; the bucket design gives those of one bucket.
        """

    def beliefs(self, queue: Queue) -> Beliefs:
        """Tell what memory believes of a queue's messages."""


def make_active_set(design: str, engine: Engine, quarantine: Quarantine) -> ActiveSet[Any]:
    """Make the active set of a design; a process loads only the designs that it uses."""
    if design == "indexed":
        from penstock.store.live.indexed import IndexedActive  # noqa: PLC0415

        return IndexedActive(engine, quarantine)
    from penstock.store.live.buckets import BucketActive  # noqa: PLC0415

    return BucketActive(engine, quarantine)
