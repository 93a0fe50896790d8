"""One moment of a broker for several DataFrames, kept for as long as the user wants it."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock import limits
from penstock.errors import InvalidInput, PenstockError
from penstock.flight.client import FlightStore
from penstock.spark.sessions import place_of, read, session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from penstock.flight.protocol import HeldSnapshot


class PinnedSnapshot:
    """A snapshot that is open: its tables, and the options that read from it.

    ``at`` is its time by the broker's clock.
    """

    def __init__(self, spark: SparkSession | None, location: str, held: HeldSnapshot) -> None:
        self._spark = spark
        self._location = location
        self._name = held.snapshot
        self.at = datetime.fromtimestamp(held.at_ms / 1000, UTC)

    @property
    def options(self) -> dict[str, str]:
        """The options of ``spark.read.format("penstock")`` that read from this snapshot."""
        return {**place_of(self._location), "snapshot": self._name}

    def table(self, name: str, **options: Any) -> DataFrame:
        """Return a table of the snapshot, with more options of the data source if wanted."""
        spark = self._spark or session()
        return read(spark, self._location, name, snapshot=self._name, **options)


@contextmanager
def snapshot(
    location: str,
    *,
    spark: SparkSession | None = None,
    token: str | None = None,
    ca: str | Path | None = None,
) -> Iterator[PinnedSnapshot]:
    """Pin a moment of a broker: every table that is read from it is as it was then.

    >>> with snapshot("grpc://127.0.0.1:8815") as then:                  # doctest: +SKIP
    ...     every = then.table("active").select("queue", "message_id").union(
    ...         then.table("done").select("queue", "message_id"))
    ...     every.count()

    The broker keeps it while the block runs, and deleted data with it: leave it soon. DataFrames of
    it can't be read afterwards, unless they are cached.
    """
    client = FlightStore(location, token=token, ca=ca)
    held = client.hold_snapshot()
    over = threading.Event()

    def keep() -> None:
        while not over.wait(limits.MIN_VIEW_IDLE_MS / 3_000):
            try:
                client.hold_snapshot(held.snapshot)
            except InvalidInput:
                # It is gone: the next read says so.
                return
            except PenstockError:
                # A broker that is away for a while.
                continue

    keeper = threading.Thread(target=keep, name="penstock-snapshot", daemon=True)
    keeper.start()
    try:
        yield PinnedSnapshot(spark, client.location, held)
    finally:
        over.set()
        with suppress(PenstockError):
            client.drop_snapshot(held.snapshot)
