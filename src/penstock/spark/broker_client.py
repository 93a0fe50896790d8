"""The Flight client of the data source: it waits for a broker that restarts.

A broker that restarts must not fail a streaming query: reads of the log go on after the last
offset that came, and stages are put again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow.flight as fl

from penstock import limits
from penstock.errors import InvalidInput, ServerUnreachable
from penstock.flight.client import FlightStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from penstock.spark.offsets import Stretch

_GONE: Final = (ServerUnreachable, fl.FlightCancelledError)
_TRIES: Final = 4
_PROBE: Final = 256


class Queues(NamedTuple):
    """The time of the broker, and its queues with the time that each was made at."""

    at_ms: int
    created_at_ms: dict[str, int]


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

    def queues(self, names: Sequence[str] | None = None) -> Queues:
        """Ask which queues there are; one of ``names`` that is not there is an error."""
        plan = self.plan_read("queues", queue=names, columns=["name", "created_at_ms"])
        # Read to its end, so that the broker need not keep the snapshot.
        rows = [row for part in plan.tickets for b in self.read(part) for row in b.to_pylist()]
        return Queues(plan.facts.at_ms, {row["name"]: row["created_at_ms"] for row in rows})

    def read_log(
        self, log: int, begin: int, end: int, *, columns: Sequence[str], **selection: Any
    ) -> Iterator[pa.RecordBatch]:
        """Read [begin, end) of a log, over restarts of the broker if ``offset`` is read too.

        ``selection``: payload and filter.
        """
        tries = 0
        # A filter may pass over much of the log before it finds a row.
        filtered = selection.get("filter") is not None
        idle_ms = limits.MAX_WORK_CALL_MS if filtered else limits.MAX_READ_IDLE_MS
        while True:
            ticket = self.log_ticket(log, begin, end, columns=columns, **selection)
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

    def put_stage(
        self, stage: str, batches: Sequence[pa.RecordBatch], stretch: Stretch, **matched_by: Any
    ) -> None:
        """Stage a stretch, again if the broker went away meanwhile: a stage replaces its like.

        ``matched_by``: filters_version and epoch.
        """
        for left in reversed(range(_TRIES)):
            try:
                self.stage(stage, batches, **stretch._asdict(), **matched_by)
            except _GONE:
                if not left:
                    raise
                self.info()
            else:
                return


def fenced(mine: int | None, now: int) -> InvalidInput:
    """Return the error of a pipeline that another one has taken the place of."""
    return InvalidInput(
        f"another pipeline has taken over: it took epoch {now}, this one has {mine}. Only the one "
        "that was started last routes; everything that this one had routed stays as it is"
    )


def offset_at(client: Store, at_ms: int) -> int:
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


def _first(client: Store, logs: list[int], begin: int, end: int) -> tuple[int, int] | None:
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
