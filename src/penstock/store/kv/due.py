"""When is what due: a heap that forgets."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DueHeap"]

K = TypeVar("K")


class DueHeap(Generic[K]):
    """One due time per key; finding the next costs nothing that grows with the number of keys."""

    def __init__(self) -> None:
        self._due: dict[K, int] = {}
        # Entries that `_due` no longer agrees with are dropped when they come up.
        self._heap: list[tuple[int, int, K]] = []
        self._tie = 0

    def set(self, key: K, due_ms: int | None) -> None:
        """Set or (None) clear the due time of a key."""
        if due_ms is None:
            self._due.pop(key, None)
        elif self._due.get(key) != due_ms:
            self._due[key] = due_ms
            self._tie += 1
            heappush(self._heap, (due_ms, self._tie, key))
            if len(self._heap) > 64 + 4 * len(self._due):
                self._heap = [row for row in self._heap if self._due.get(row[2]) == row[0]]
                heapify(self._heap)

    def lower(self, key: K, due_ms: int) -> None:
        """Bring the due time of a key forward, never back."""
        present = self._due.get(key)
        if present is None or due_ms < present:
            self.set(key, due_ms)

    def get(self, key: K) -> int | None:
        """Return the due time of a key."""
        return self._due.get(key)

    def items(self) -> Iterable[tuple[K, int]]:
        """Give every key with its due time."""
        return self._due.items()

    def first(self) -> tuple[int, K] | None:
        """Return the earliest due time and its key."""
        while self._heap:
            due_ms, _, key = self._heap[0]
            if self._due.get(key) == due_ms:
                return due_ms, key
            heappop(self._heap)
        return None
