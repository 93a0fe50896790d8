"""Several databases that are one store, pinned to be read in bulk.

Each is pinned by itself, one after the other, so that it is one moment for each of them. A message
is in one database only: none is seen twice, and none in two states.

Why what was read may be trimmed
--------------------------------
Sequence numbers of done and failed messages are given out by each database for itself, and those of
two may be the same. All of them are raised to the same marks, each before its own moment: whatever
is seen, wherever, is below its queue's mark, and whatever ends later, wherever, is not. If numbers
were given out beyond the marks before a database was reached, all is done again with marks that are
further ahead. ``pins`` has the reasoning for one of them.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.errors import PenstockError, StorageFailed
from penstock.limits import MAX_OFFSET
from penstock.store.snapshot import Depths
from penstock.store.sql.joining import join_log_stats, join_queue_stats, join_store_stats
from penstock.store.sql.pins import Overtaken
from penstock.store.sql.tokens import cluster_of_id, first_offset

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from penstock.model import QueueSpec, QueueStats, State
    from penstock.store.codec.records import AttemptRecord
    from penstock.store.snapshot import Held, Keys, LiveRow
    from penstock.store.sql.members import Member
    from penstock.store.sql.snapshot import SqlPinned

__all__ = ["PinnedTogether", "pin_together"]

# How far marks are ahead of the numbers that were seen, from one attempt to the next.
_AHEAD: Final = (0, 1 << 10, 1 << 14, 1 << 18, 1 << 22)


def pin_together(
    members: Sequence[Member],
    now_ms: int,
    *,
    stats: bool,
    marks: bool,
    settle: Callable[[Member], object],
) -> PinnedTogether:
    """Pin every database; ``settle`` gives one the queues of the first."""
    for ahead in _AHEAD:
        wanted = _marks(members, ahead) if marks else None
        with ExitStack() as undo:
            parts = []
            try:
                for member in members:
                    part = _pin(member, now_ms, stats=stats, marks=marks, ahead=wanted)
                    undo.callback(part.close)
                    parts.append(part)
            except Overtaken:
                continue
            together = PinnedTogether(parts, [member.name for member in members])
            behind = together.behind() if marks else []
            if not behind:
                undo.pop_all()
                return together
        # A queue that it gets later would give out numbers from the beginning.
        for number in behind:
            settle(members[number])
    raise StorageFailed("messages end, or queues change, faster than the databases can be pinned")


def _pin(
    member: Member, now_ms: int, *, stats: bool, marks: bool, ahead: Mapping[int, int] | None
) -> SqlPinned:
    member.check()
    try:
        return member.store.pins.pin(now_ms, stats=stats, marks=marks, ahead=ahead)
    except Overtaken:
        raise
    except StorageFailed as error:
        # Maybe it has no room for one more connection: that does not mean that it is away.
        with member.use() as store:
            store.core.read_head()
        raise StorageFailed(f"{member.name} of the store: {error}") from error


def _marks(members: Sequence[Member], ahead: int) -> dict[int, int]:
    """Return marks that are so far ahead of what any database has given out."""
    found: dict[int, int] = {}
    for member in members:
        with member.use() as store:
            for queue, mark in store.pins.marks().items():
                found[queue] = max(found.get(queue, 0), mark + ahead)
    return found


class PinnedTogether:
    """A store of several databases; see :class:`~penstock.store.snapshot.PinnedStore`.

    The queues are those that the first database has. Keys name the database that they are of.
    """

    def __init__(self, parts: Sequence[SqlPinned], names: Sequence[str]) -> None:
        self._parts = list(parts)
        self._names = list(names)
        truth = parts[0]
        self.at_ms = truth.at_ms
        self.store_id = truth.store_id
        self.log_stats = join_log_stats([part.log_stats for part in parts])
        self.totals = join_store_stats([part.totals for part in parts])
        # A name may stand for another queue by now, where it was pinned later.
        self._holders = {
            name: [number for number, part in enumerate(parts) if part.numbers.get(name) == own]
            for name, own in truth.numbers.items()
        }
        by_queue: dict[str, list[QueueStats]] = {each.queue: [] for each in truth.stats}
        for number, part in enumerate(parts):
            for each in part.stats:
                if number in self._holders.get(each.queue, ()):
                    by_queue[each.queue].append(each)
        self.stats: Sequence[QueueStats] = [join_queue_stats(some) for some in by_queue.values()]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of every database; who still reads is told so."""
        for part in self._parts:
            part.close()

    def behind(self) -> list[int]:
        """Return the databases that lack a queue which they are about to get."""
        wanted = [name for name in self.queues if name not in self.draining]
        return [
            number
            for number in range(1, len(self._parts))
            if any(number not in self._holders[name] for name in wanted)
        ]

    # --- what there is -------------------------------------------------------------------

    @property
    def queues(self) -> Mapping[str, QueueSpec]:
        """Every queue's settings, by name."""
        return self._parts[0].queues

    @property
    def draining(self) -> Collection[str]:
        """The names of queues that take no more messages."""
        return self._parts[0].draining

    def depths(self, queue: str) -> Depths:
        """Count a queue's messages."""
        found = []
        for number in self._holders[queue]:
            with self._named(number) as part:
                found.append(part.depths(queue))
        return Depths(*map(sum, zip(*found, strict=True)))

    # --- ranges --------------------------------------------------------------------------

    def about(self, table: str, queue: str) -> int:
        """Say about how many rows a queue has in active, attempts, done or failed."""
        return sum(self._about(table, queue))

    def _about(self, table: str, queue: str) -> list[int]:
        found = []
        for number in self._holders[queue]:
            with self._named(number) as part:
                found.append(part.about(table, queue))
        return found

    def cut(self, table: str, queue: str, count: int, least: int = 0) -> Iterator[Keys]:
        """Cut a queue's rows into about ``count`` ranges, each of one database."""
        rows = self._about(table, queue)
        for number, own in zip(self._holders[queue], rows, strict=True):
            share = max(1, -(-own * count // max(1, sum(rows))))
            read = partial(_cut, table=table, queue=queue, count=share, least=least)
            for keys in self._read(number, read):
                yield keys._replace(table=f"{number}/{keys.table}")

    def message_runs(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the first and the last id of each database in [begin, end)."""
        found = []
        for number, low, high in self._within(begin, end):
            with self._named(number) as part:
                found += part.message_runs(low, high)
        return found

    def _within(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Cut a range of ids where those of a database end."""
        for number in range(len(self._parts)):
            low = max(begin, first_offset(number) - 1)
            high = min(end, first_offset(number + 1) - 1)
            if low < high:
                yield number, low, high

    # --- rows ----------------------------------------------------------------------------

    @contextmanager
    def _named(self, number: int) -> Iterator[SqlPinned]:
        """Give a database; if it fails, say which one it is."""
        try:
            yield self._parts[number]
        except PenstockError as error:
            raise type(error)(f"{self._names[number]} of the store: {error}") from error

    def _read(self, number: int, read: Callable[[SqlPinned], Iterable[Any]]) -> Iterator[Any]:
        # Whoever takes the rows may fail in between, which no database has to do with.
        rows: Iterator[Any] | None = None
        while True:
            with self._named(number) as part:
                rows = iter(read(part)) if rows is None else rows
                row = next(rows, self)
            if row is self:
                return
            yield row

    def _of(self, keys: Keys) -> tuple[int, Keys]:
        number, _, table = keys.table.partition("/")
        return int(number), keys._replace(table=table)

    def log_rows(self, log: int, begin: int, end: int) -> Iterator[list[tuple[int, bytes]]]:
        """Read messages (id, metadata) of [begin, end) of a log."""
        own, number = divmod(log, len(self._parts))
        return self._read(number, lambda part: part.log_rows(own, begin, end))

    def payloads(self, message_ids: Sequence[int]) -> list[bytes | None]:
        """Read payloads; None for those that are gone."""
        found: dict[int, bytes | None] = {}
        by_part: dict[int, list[int]] = {}
        for message_id in message_ids:
            by_part.setdefault(cluster_of_id(message_id), []).append(message_id)
        for number, ids in by_part.items():
            if number < len(self._parts):
                with self._named(number) as part:
                    found.update(zip(ids, part.payloads(ids), strict=True))
        return [found.get(message_id) for message_id in message_ids]

    def payload_rows(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Read every kept payload (message id, payload) of ids in [begin, end)."""
        for number, low, high in self._within(begin, end):
            yield from self._read(number, partial(_payload_rows, begin=low, end=high))

    def payload_sizes(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Read how large every kept payload of ids in [begin, end) is."""
        for number, low, high in self._within(begin, end):
            yield from self._read(number, partial(_payload_sizes, begin=low, end=high))

    def live_rows(self, keys: Keys) -> Iterator[list[LiveRow]]:
        """Read live messages."""
        number, own = self._of(keys)
        return self._read(number, lambda part: part.live_rows(own))

    def leases(self, rows: Sequence[LiveRow]) -> list[Held | None]:
        """Say who holds each of some live messages; each row says so itself."""
        return self._parts[0].leases(rows)

    def ended_rows(
        self, state: State, keys: Keys, low: int = 0, high: int = MAX_OFFSET
    ) -> Iterator[tuple[Sequence[int], Sequence[tuple[Any, ...]]]]:
        """Read done or failed messages whose sequence is in [low, high), with their sequences."""
        number, own = self._of(keys)
        return self._read(number, lambda part: part.ended_rows(state, own, low, high))

    def attempt_rows(self, keys: Keys) -> Iterator[tuple[int, int, AttemptRecord]]:
        """Read ended attempts: message id, attempt, record."""
        number, own = self._of(keys)
        return self._read(number, lambda part: part.attempt_rows(own))

    def referenced(self, message_ids: set[int]) -> set[int]:
        """Return which of the messages any queue still holds, in whatever state."""
        held: set[int] = set()
        for number in range(len(self._parts)):
            own = {each for each in message_ids if cluster_of_id(each) == number}
            if own:
                with self._named(number) as part:
                    held |= part.referenced(own)
        return held


def _cut(part: SqlPinned, table: str, queue: str, count: int, least: int) -> Iterator[Keys]:
    return part.cut(table, queue, count, least)


def _payload_rows(part: SqlPinned, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    return part.payload_rows(begin, end)


def _payload_sizes(part: SqlPinned, begin: int, end: int) -> Iterator[tuple[int, int]]:
    return part.payload_sizes(begin, end)
