"""What the data source reads from: a broker, through a Flight client with patience, or a bucket.

A broker that restarts must not fail a streaming query: reads of the log go on after the last
offset that came, and stages are put again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import pyarrow.flight as fl

from penstock import limits
from penstock.errors import InvalidInput, ServerUnreachable
from penstock.flight.client import FlightStore
from penstock.spark.options import is_direct

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from penstock.flight.client import ReadPlan, Watermarks
    from penstock.model import LogStats
    from penstock.spark.offsets import Stretch

__all__ = ["Source", "Store", "fenced", "offset_at", "source", "store"]

_GONE: Final = (ServerUnreachable, fl.FlightCancelledError)
_TRIES: Final = 4
_PROBE: Final = 256


class Store(FlightStore):
    """A broker, named by its location; picklable."""

    @property
    def store_id(self) -> str:
        """Which store the broker has open now."""
        return self.info().store_id

    @property
    def routing(self) -> str:
        """How the store routes."""
        return self.info().routing

    def last_log_stats(self) -> LogStats:
        """Describe the log as it is now: to ask a broker costs next to nothing."""
        return self.log_stats()

    def read_log(
        self,
        log: int,
        begin: int,
        end: int,
        *,
        columns: Sequence[str],
        payload: bool = False,
        filter: str | None = None,  # noqa: A002 - the word that users know
    ) -> Iterator[pa.RecordBatch]:
        """Read [begin, end) of a log, over restarts of the broker if ``offset`` is read too."""
        tries = 0
        # A filter may pass over much of the log before it finds a row.
        idle_ms = limits.MAX_READ_IDLE_MS if filter is None else limits.MAX_WORK_CALL_MS
        while True:
            ticket = self.log_ticket(
                log, begin, end, payload=payload, columns=columns, filter=filter
            )
            try:
                for batch in self.read(ticket, idle_ms=idle_ms):
                    if batch.num_rows:
                        yield batch
                        if "offset" in columns:
                            begin, tries = batch.column("offset")[-1].as_py() + 1, 0
            except _GONE:
                tries += 1
                if "offset" not in columns or tries > _TRIES:
                    raise
                self.info()
            else:
                return

    def plan_log(
        self,
        stretches: Sequence[Stretch],
        *,
        payload: bool,  # noqa: ARG002
        columns: Sequence[str],  # noqa: ARG002
        filter: str | None,  # noqa: A002, ARG002
    ) -> Sequence[bytes | None]:
        """Return nothing for each: a broker need not be told of a log that only grows."""
        return [None] * len(stretches)

    def put_stage(
        self,
        stage: str,
        batches: Sequence[pa.RecordBatch],
        *,
        log: int,
        begin: int,
        end: int,
        filters_version: int,
        epoch: int | None,
    ) -> None:
        """Stage a stretch, again if the broker went away meanwhile: a stage replaces its like."""
        for left in reversed(range(_TRIES)):
            try:
                self.stage(
                    stage,
                    batches,
                    log=log,
                    begin=begin,
                    end=end,
                    filters_version=filters_version,
                    epoch=epoch,
                )
            except _GONE:
                if not left:
                    raise
                self.info()
            else:
                return


class Source(Protocol):
    """What tables are read from: a broker, or a bucket."""

    @property
    def store_id(self) -> str:
        """Which store it is."""

    def log_stats(self) -> LogStats:
        """Describe the log as it is now."""

    def last_log_stats(self) -> LogStats:
        """Describe the log as it was last looked at, where a look has its price."""

    def plan_read(
        self,
        table: str,
        *,
        queue: Sequence[str] | None = None,
        payload: bool = False,
        columns: Sequence[str] | None = None,
        filter: str | None = None,  # noqa: A002
        partitions: int = 1,
    ) -> ReadPlan:
        """Take a snapshot of a table."""

    def read(self, ticket: bytes) -> Iterator[pa.RecordBatch]:
        """Read a part of a snapshot."""

    def narrowed(self, ticket: bytes, queues: Sequence[str]) -> bytes:
        """Make of a ticket one for some of its queues alone."""

    def read_log(
        self, log: int, begin: int, end: int, *, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Read [begin, end) of a log."""

    def plan_log(
        self,
        stretches: Sequence[Stretch],
        *,
        payload: bool,
        columns: Sequence[str],
        filter: str | None,  # noqa: A002
    ) -> Sequence[bytes | None]:
        """Return what an executor needs besides a stretch of a log to read it."""

    def watermarks(self) -> Watermarks:
        """Say how far the logs are routed."""

    @property
    def routing(self) -> str:
        """How the store routes."""


def store(location: str) -> Store:
    """Return the broker at a location."""
    return Store(location)


def source(location: str, *, following: bool = False) -> Source:
    """Return what tables are read from; ``following``: for a stream, which looks on and on."""
    if not is_direct(location):
        return Store(location)
    # Imported here: who reads from brokers need not have SlateDB.
    from penstock.spark.direct import direct_store  # noqa: PLC0415

    return direct_store(location, following=following)


def fenced(mine: int | None, now: int) -> InvalidInput:
    """Return the error of a pipeline that another one has taken the place of."""
    return InvalidInput(
        f"another pipeline has taken over: it took epoch {now}, this one has {mine}. Only the one "
        "that was started last routes; everything that this one had routed stays as it is"
    )


def offset_at(client: Source, at_ms: int) -> int:
    """Return the first offset that was published at a time or later."""
    stats = client.log_stats()
    logs, low, high = list(stats.cursors), stats.earliest, stats.end
    # Time in a store never goes back, so neither does it along the offsets.
    while low < high:
        middle = (low + high) // 2
        found = _first(client, logs, middle, high)
        if found is None:
            high = middle
        elif found[1] < at_ms:
            low = found[0] + 1
        else:
            high = middle
    return low


def _first(client: Source, logs: list[int], begin: int, end: int) -> tuple[int, int] | None:
    """Return offset and time of the first message at an offset or after it."""
    width = _PROBE
    while begin < end:
        until = min(end, begin + width)
        found = []
        for log in logs:
            for batch in client.read_log(log, begin, until, columns=("offset", "published_at")):
                row = batch.slice(0, 1).to_pylist()[0]
                found.append((row["offset"], int(row["published_at"].timestamp() * 1000)))
                break
        if found:
            return min(found)
        begin, width = until, width * 2
    return None
