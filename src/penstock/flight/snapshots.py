"""Snapshots that clients read from: how many there may be, and when they go.

A snapshot keeps deleted data on disk, so it goes when nobody has read from it for a while. When
there is no room for another, one goes that nobody reads at that moment: a finished one first, then
one that has waited for its reader for a while, then one of the key that holds the most.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING

from penstock import limits
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.clock import Clock
    from penstock.flight import Part, Selection
    from penstock.store.snapshot import PinnedStore

__all__ = ["Snapshot", "Snapshots"]


class Snapshot:
    """A pinned store, cut into parts for one reader."""

    def __init__(
        self, pinned: PinnedStore, parts: list[Part], selection: Selection, owner: str = ""
    ) -> None:
        self.pinned = pinned
        self.parts = parts
        self.selection = selection
        # The key that it was made for, empty if there are no keys, and the queues that it shows.
        self.owner = owner
        self.queues: Sequence[str] = ()
        self.used_at_ms = 0
        self.readers = 0
        self.unread = set(range(len(parts)))
        # Of parts that are read a queue at a time: the queues that were.
        self._seen: dict[int, set[str]] = {}

    def seen(self, part: int, queues: Sequence[str] | None) -> None:
        """Note that a part was read to its end, or that of some of its queues."""
        if queues is not None:
            known = self._seen.setdefault(part, set())
            known.update(queues)
            if any(getattr(piece, "queue", None) not in known for piece in self.parts[part]):
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

    def add(self, make: Callable[[], Snapshot], owner: str = "") -> str:
        """Make a snapshot for a key if there is room for it, and return its name."""
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
        name = self._clock.lease_id().hex()
        with self._lock:
            self._making -= 1
            snapshot.used_at_ms = self._clock.now_ms()
            self._live[name] = snapshot
        return name

    def _make_room(self, owner: str) -> None:
        """Let go of a snapshot that nobody reads now, if there are as many as there may be."""
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
        """Let go of a snapshot."""
        with self._lock:
            snapshot = self._live.pop(name, None)
        if snapshot is not None:
            snapshot.pinned.close()

    def expire(self) -> int:
        """Let go of what nobody has used for a while; return how many."""
        with self._lock:
            before_ms = self._clock.now_ms() - limits.MAX_VIEW_IDLE_MS
            idle = [
                name
                for name, snapshot in self._live.items()
                if not snapshot.readers and snapshot.used_at_ms <= before_ms
            ]
            gone = [self._live.pop(name) for name in idle]
        for snapshot in gone:
            snapshot.pinned.close()
        return len(gone)

    def close(self) -> None:
        """Let go of everything; who still reads gets an error."""
        with self._lock:
            gone = list(self._live.values())
            self._live.clear()
        for snapshot in gone:
            snapshot.pinned.close()
