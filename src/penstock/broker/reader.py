"""The reader of a store that another process owns.

A :class:`Reader` shows one moment of the store, straight from where it is kept. It asks nothing of
the owner and disturbs nobody. Messages that come due after that moment do so in memory.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from penstock import limits
from penstock.broker.verbs import StoreReader
from penstock.clock import TimeGuard
from penstock.errors import QueueNotFound, StoreDamaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.clock import Clock
    from penstock.model import LogPage, LogStats
    from penstock.store.check_report import AuditReport
    from penstock.store.kv.store import KvStore
    from penstock.store.snapshot import PinnedStore

T = TypeVar("T")


class Reader(StoreReader):
    """A store as it was when the reader was opened. Threads may share it."""

    def __init__(self, store: KvStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._guard = TimeGuard(store.info().time_floor_ms)
        self._lock = threading.Lock()
        # Records that can't be decoded and were put aside before this reader was opened.
        self._put_aside = store.store_stats().quarantined_total - store.has_aside

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log_stats(self) -> LogStats:
        """Return what the metadata log holds; its end is behind the last message."""
        return self._look(lambda _: self._log_stats())

    def read_log(self, log: int = 0, *, begin: int | None = 0, limit: int = 1_000) -> LogPage:
        """Read a page of a metadata log, from an offset on."""
        return super().read_log(log, begin=begin, limit=limit)

    def check(self) -> AuditReport:
        """Hold the store to its invariants."""
        return self._look(lambda now_ms: self._store.audit(repair=False, now_ms=now_ms))

    def pin(self, *, stats: bool = False) -> PinnedStore:
        """Give the rows of all tables, for reading in bulk; close it before the reader."""

        def pin(now_ms: int) -> PinnedStore:
            pinned = self._store.pin(now_ms, stats=stats)
            pinned.log_stats = self._log_stats()
            return pinned

        return self._look(pin)

    def pin_at(self, at_ms: int | None) -> PinnedStore:
        """Give all rows as of a time (None: now), and the end of the log as its next owner has it.

        That is behind every id that the owner may have given out. StoreDamaged if a record that
        was read on the way can't be decoded: it would be missing without a word.
        """
        store = self._store

        def pin(now_ms: int) -> PinnedStore:
            pinned = store.pin(at_ms or now_ms, stats=True)
            found = store.store_stats().quarantined_total - self._put_aside
            if found:
                pinned.close()
                raise StoreDamaged(f"{found} records can't be read")
            return pinned

        return self._look(pin)

    def close(self) -> None:
        """Let go of the store."""
        with self._lock:
            self._store.close()

    def _log_stats(self) -> LogStats:
        stats = self._store.log_stats()
        # An opened store begins a new block of ids. The owner goes on in its own: a reader that
        # took the end of that block for the end of the log would pass over coming messages.
        end = min(stats.end, self._store.offset_at(limits.MAX_OFFSET))
        routed = min(stats.routed_up_to, end)
        return msgspec.structs.replace(stats, end=end, routed_up_to=routed)

    def _look(self, read: Callable[[int], T]) -> T:
        with self._lock:
            try:
                return read(self._guard.now_ms(self._clock.now_ms()))
            except QueueNotFound as error:
                error.suggest()
                raise
