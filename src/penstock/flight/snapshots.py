"""Snapshots that clients read: a pinned store, and a table of it cut into parts.

A part is a list of pieces, a piece is a range of keys (or of offsets, or of ids). Each row of the
table is in exactly one piece of exactly one part, so that readers may read parts side by side.

A snapshot keeps deleted data on disk, so the server closes it when nobody has read it for a while.
When there is no room for another, the server closes one that nobody reads at that moment: a
finished one first, then one that has waited for its reader for a while, then one of the key that
holds the most.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from penstock import limits
from penstock.errors import InvalidInput, QueueNotFound
from penstock.limits import MAX_OFFSET
from penstock.store.snapshot import cut_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.clock import Clock
    from penstock.flight.tables import Selection
    from penstock.store.snapshot import PinnedStore


class Piece(NamedTuple):
    """A range of a table: rows of a queue (the empty name: of the store), or of no queue.

    Of a queue, those of ``keys``, or all; else offsets of a ``log``, or message ids. ``low`` and
    ``high`` bound offsets, ids or sequence numbers.
    """

    queue: str | None
    keys: Any = None
    low: int = 0
    high: int = MAX_OFFSET
    log: int = 0


Part: TypeAlias = list[Piece]
_RANGED: Final = {"log", "messages", "done", "failed"}


def partition(
    pinned: PinnedStore,
    table: str,
    count: int,
    *,
    queues: Sequence[str] | None = None,
    begin: int | None = None,
    end: int | None = None,
    logs: Sequence[int] | None = None,
) -> list[Part]:
    """Cut a table into at most ``count`` parts; at least one, which may have no rows.

    ``begin`` and ``end`` count offsets (log), message ids (messages) or sequence numbers.
    """
    if (begin is not None or end is not None) and table not in _RANGED:
        names = ", ".join(sorted(_RANGED))
        raise InvalidInput(f"table {table} has no begin and end; those that have: {names}")
    if logs is not None and table != "log":
        raise InvalidInput(f"logs are for the table log, not for {table}")
    if queues is not None and table in {"log", "messages"}:
        raise InvalidInput(f"table {table} has no queues to choose from")
    low = 0 if begin is None else begin
    high = MAX_OFFSET if end is None else end
    if table == "log":
        pieces = _log_pieces(pinned, count, low, high, logs)
    elif table == "messages":
        # The ids whose payload is kept.
        ends = pinned.message_ends(low, high)
        cuts = [] if ends is None else cut_range(ends[0], ends[1] + 1, count)
        pieces = [Piece(None, None, *cut) for cut in cuts]
    else:
        chosen = list(pinned.queues) if queues is None else list(dict.fromkeys(queues))
        for name in chosen:
            if name not in pinned.queues:
                raise QueueNotFound(f"no queue named {name!r:.100}")
        if table in {"queues", "groups", "stats"}:
            pieces = [Piece(queue) for queue in chosen]
            if table == "stats":
                pieces += [Piece("")] if queues is None else []
                count = 1
        else:
            pieces = list(_queue_pieces(pinned, table, chosen, count, low, high))
    count = max(1, min(count, len(pieces)))
    # Neighbours stay together.
    borders = [len(pieces) * at // count for at in range(count + 1)]
    return [pieces[borders[at] : borders[at + 1]] for at in range(count)]


def _log_pieces(
    pinned: PinnedStore, count: int, low: int, high: int, logs: Sequence[int] | None
) -> list[Piece]:
    stats = pinned.log_stats
    known = sorted(stats.cursors)
    for log in logs or ():
        if log not in stats.cursors:
            raise InvalidInput(f"no log {log}; there are logs 0 to {known[-1]}")
    chosen = known if logs is None else list(dict.fromkeys(logs))
    low, high = max(low, stats.earliest), min(high, stats.end)
    if not chosen or low >= high:
        return []
    each = -(-count // len(chosen))
    return [Piece(None, None, *cut, log) for log in chosen for cut in cut_range(low, high, each)]


def _queue_pieces(
    pinned: PinnedStore, table: str, queues: Sequence[str], count: int, low: int, high: int
) -> Iterator[Piece]:
    """Cut each queue into as many pieces as its share of the rows asks for."""
    depths = [max(1, pinned.about(table, queue)) for queue in queues]
    total = sum(depths)
    for queue, depth in zip(queues, depths, strict=True):
        share = max(1, -(-depth * count // total))
        for keys in pinned.cut(table, queue, share, low):
            yield Piece(queue, keys, low, high)


def of_queues(part: Part, queues: Sequence[str] | None) -> Part:
    """Return the pieces of a part that belong to these queues; None: all of them."""
    if queues is None:
        return part
    if any(piece.queue is None for piece in part):
        raise InvalidInput("a part of the log, or of all messages, has no queues to choose from")
    chosen = set(queues)
    return [piece for piece in part if piece.queue in chosen]


@dataclass(eq=False)
class Snapshot:
    """A pinned store, with one table cut into parts for one reader.

    ``owner`` is the key that it was made for, empty if there are no keys; ``queues`` are those that
    it shows.
    """

    pinned: PinnedStore
    parts: list[Part]
    selection: Selection
    owner: str
    queues: Sequence[str]
    name: str = ""
    used_at_ms: int = 0
    readers: int = 0

    def __post_init__(self) -> None:
        self.unread = set(range(len(self.parts)))
        # Of parts that are read a queue at a time: the queues that were.
        self._seen: dict[int, set[str]] = {}

    def seen(self, part: int, queues: Sequence[str] | None) -> None:
        """Note that a part was read to its end, or that of some of its queues."""
        if queues is not None:
            known = self._seen.setdefault(part, set())
            known.update(queues)
            if any(piece.queue not in known for piece in self.parts[part]):
                return
        self.unread.discard(part)


class Snapshots:
    """The live snapshots of a server. Thread-safe."""

    def __init__(self, clock: Clock, most: int) -> None:
        self._clock = clock
        self._most = most
        self._lock = threading.Lock()
        self._live: dict[str, Snapshot] = {}
        self._making = 0

    def __len__(self) -> int:
        with self._lock:
            return len(self._live)

    def add(self, make: Callable[[], Snapshot], owner: str = "") -> Snapshot:
        """Make a snapshot for a key, if there is room for it, and give it a name."""
        self.expire()
        with self._lock:
            self._make_room(owner)
            self._making += 1
        try:
            snapshot = make()
        except BaseException:
            with self._lock:
                self._making -= 1
            raise
        snapshot.name = self._clock.lease_id().hex()
        with self._lock:
            self._making -= 1
            snapshot.used_at_ms = self._clock.now_ms()
            self._live[snapshot.name] = snapshot
        return snapshot

    def _make_room(self, owner: str) -> None:
        """Close a snapshot that nobody reads now, if there are as many as there may be."""
        if len(self._live) + self._making < self._most:
            return
        held = Counter(snapshot.owner for snapshot in self._live.values())
        waited_ms = self._clock.now_ms() - limits.MIN_VIEW_IDLE_MS
        candidates = [
            (name, (bool(snapshot.unread), -held[snapshot.owner], snapshot.used_at_ms))
            for name, snapshot in self._live.items()
            if not snapshot.readers
            and (
                not snapshot.unread
                or snapshot.used_at_ms <= waited_ms
                or held[snapshot.owner] > held[owner] + 1
            )
        ]
        if not candidates:
            raise InvalidInput(
                f"{self._most} snapshots wait for their readers or are being read, which is all "
                f"there may be: try again in {limits.MIN_VIEW_IDLE_MS // 1000} seconds"
            )
        first, _ = min(candidates, key=itemgetter(1))
        self._live.pop(first).pinned.close()

    def find(self, name: str, part: int) -> Snapshot:
        """Return the snapshot that has this part."""
        with self._lock:
            return self._find(name, part)

    def _find(self, name: str, part: int) -> Snapshot:
        snapshot = self._live.get(name)
        if snapshot is None:
            raise InvalidInput(
                f"the snapshot {name[:64]} has expired, or the server was restarted: ask for a "
                "new one"
            )
        if not 0 <= part < len(snapshot.parts):
            raise InvalidInput(f"the snapshot has parts 0 to {len(snapshot.parts) - 1}")
        snapshot.used_at_ms = self._clock.now_ms()
        return snapshot

    @contextmanager
    def reading(
        self, name: str, part: int, queues: Sequence[str] | None = None
    ) -> Iterator[Snapshot]:
        """Use a part of a snapshot (of some queues), which does not expire meanwhile."""
        with self._lock:
            snapshot = self._find(name, part)
            snapshot.readers += 1
        try:
            yield snapshot
            snapshot.seen(part, queues)
        finally:
            with self._lock:
                snapshot.readers -= 1
                snapshot.used_at_ms = self._clock.now_ms()

    def drop(self, name: str) -> None:
        """Close a snapshot."""
        self._close(lambda snapshot: snapshot.name == name)

    def expire(self) -> int:
        """Close snapshots that nobody has used for a while; return how many."""
        before_ms = self._clock.now_ms() - limits.MAX_VIEW_IDLE_MS
        return self._close(
            lambda snapshot: not snapshot.readers and snapshot.used_at_ms <= before_ms
        )

    def close(self) -> None:
        """Close all snapshots; a read that goes on gets an error."""
        self._close(lambda _: True)

    def _close(self, chosen: Callable[[Snapshot], bool]) -> int:
        with self._lock:
            gone = [snapshot for snapshot in self._live.values() if chosen(snapshot)]
            for snapshot in gone:
                del self._live[snapshot.name]
        for snapshot in gone:
            snapshot.pinned.close()
        return len(gone)
