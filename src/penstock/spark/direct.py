"""A store on object storage as the data source sees it: read from the bucket, without a broker.

The process that plans a read looks at the bucket; executors are given tickets
(:mod:`penstock.moments`), so that all of them read the same moment. What is open is shared by all
reads of a process, and bounded.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from penstock.errors import InvalidInput
from penstock.flight.client import ReadPlan, SnapshotFacts, Watermarks
from penstock.limits import MAX_DIRECT_READERS

try:
    from penstock import moments
except ModuleNotFoundError as error:
    raise InvalidInput(
        "a store is read from its bucket with SlateDB, which is missing here: "
        "pip install 'penstock[spark,slatedb]', on the driver and on every executor"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from penstock.model import LogStats
    from penstock.moments import Looking, Seen
    from penstock.spark.offsets import Stretch

__all__ = ["DirectStore", "direct_store", "read_direct"]


class _Closes(Protocol):
    def close(self) -> None: ...


_C = TypeVar("_C", bound=_Closes)


class _Open(Generic[_C]):
    """What a process has open, by name: the oldest that nobody uses goes when there is another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[Any, ...], _C] = {}
        self._users: dict[tuple[Any, ...], int] = {}

    @contextmanager
    def using(self, name: tuple[Any, ...], make: Callable[[], _C]) -> Iterator[_C]:
        """Use what has this name, making it if it is not there."""
        # A forked worker must not use what its parent has opened.
        name = (os.getpid(), *name)
        with self._lock:
            found = self._open.pop(name, None) or make()
            self._open[name] = found
            self._users[name] = self._users.get(name, 0) + 1
            idle = [each for each in self._open if not self._users.get(each)]
            for each in idle[: max(0, len(self._open) - MAX_DIRECT_READERS)]:
                self._open.pop(each).close()
        try:
            yield found
        finally:
            with self._lock:
                self._users[name] -= 1
                if not self._users[name]:
                    del self._users[name]


_files: Final[_Open[moments.Files]] = _Open()
_stores: Final[_Open[DirectStore]] = _Open()


def read_direct(ticket: bytes) -> Iterator[pa.RecordBatch]:
    """Read what a ticket stands for, in whatever process."""
    known = moments.Ticket.unpacked(ticket)
    with _files.using((known.url, known.checkpoint), lambda: moments.files_of(known)) as files:
        yield from moments.read_ticket(known, files)


def direct_store(url: str, *, following: bool = False) -> DirectStore:
    """Return this process's way to a store; a stream has one of its own, ``following``."""
    with _stores.using((url, following), lambda: DirectStore(url, following=following)) as found:
        return found


class DirectStore:
    """The looking half of a broker's Flight client, over a bucket. Threads may share it."""

    def __init__(self, url: str, *, following: bool = False) -> None:
        self._url = url
        self._following = following
        self._lock = threading.Lock()
        self._looking: Looking | None = None
        self._seen: Seen | None = None

    def close(self) -> None:
        """Let go of the store; the next look opens it again."""
        with self._lock:
            if self._looking is not None:
                self._looking.close()
            self._looking = self._seen = None

    def _look(self) -> Seen:
        if self._looking is None:
            self._looking = moments.Looking(self._url, following=self._following)
        # A look that fails may have moved on from what the one before has seen.
        self._seen = None
        self._seen = self._looking.look()
        return self._seen

    def _last(self) -> Seen:
        return self._seen or self._look()

    @property
    def store_id(self) -> str:
        """Which store it is."""
        with self._lock:
            return self._last().store_id

    @property
    def routing(self) -> str:
        """How the store routes."""
        with self._lock:
            return self._last().identity.routing

    def watermarks(self) -> Watermarks:
        """Say how far the logs are routed."""
        with self._lock:
            stats = self._look().watermarks()
            return Watermarks(stats.cursors, stats.routed_up_to, stats.earliest, stats.end)

    # --- tables --------------------------------------------------------------------------

    def plan_read(
        self,
        table: str,
        *,
        queue: Sequence[str] | None = None,
        payload: bool = False,
        columns: Sequence[str] | None = None,
        filter: str | None = None,  # noqa: A002 - the word that users know
        partitions: int = 1,
    ) -> ReadPlan:
        """Look at the store; the tickets are good in any process, for one moment."""
        names = None if columns is None else list(columns)
        wanted = moments.Wanted(table, payload, names, filter)
        with self._lock:
            seen = self._look()
            plan = seen.plan(wanted, queues=queue, partitions=partitions)
            stats = seen.log_stats
            facts = SnapshotFacts(plan.at_ms, stats.end, stats.earliest, seen.store_id)
        return ReadPlan(plan.schema, plan.tickets, facts)

    def read(self, ticket: bytes) -> Iterator[pa.RecordBatch]:
        """Read what a ticket stands for."""
        return read_direct(ticket)

    @staticmethod
    def narrowed(ticket: bytes, queues: Sequence[str]) -> bytes:
        """Make of a ticket one for some of its queues alone."""
        return moments.narrowed(ticket, queues)

    # --- the log -------------------------------------------------------------------------

    def log_stats(self) -> LogStats:
        """Look at the store, and describe its log: it ends behind what is durable."""
        with self._lock:
            return self._look().log_stats

    def last_log_stats(self) -> LogStats:
        """Describe the log as it was last looked at."""
        with self._lock:
            return self._last().log_stats

    def read_log(
        self, log: int, begin: int, end: int, *, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Read a stretch of the log as it was last looked at, here."""
        with self._lock:
            yield from self._last().read_log(log, begin, end, columns=columns)

    def plan_log(
        self,
        stretches: Sequence[Stretch],
        *,
        payload: bool,
        columns: Sequence[str],
        filter: str | None,  # noqa: A002
    ) -> list[bytes]:
        """Make tickets for stretches of the log, which has to reach that far."""
        wanted = moments.Wanted("log", payload, list(columns), filter)
        furthest = max((stretch.end for stretch in stretches), default=0)
        with self._lock:
            seen = self._last()
            if seen.log_stats.end < furthest:
                seen = self._look()
            return seen.plan_log(wanted, stretches)
