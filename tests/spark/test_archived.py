"""``includeArchive``: live and archived rows as one table, each exactly once."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import penstock
from penstock.errors import InvalidInput, QueueNotFound, StorageFailed, StoreMismatch
from penstock.flight.client import FlightStore
from penstock.flight.protocol import HistoryStretch, HistoryTicket
from penstock.spark import delta
from penstock.spark.archive import ArchivedPartition, _Known
from penstock.spark.delta import Archive, Mark
from penstock.spark.jobs import archive, optimize
from penstock.spark.reader import TableReader, spark_schema
from penstock.spark.sessions import snapshot
from penstock.spark.source import read_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

Row = dict[str, Any]


class Site:
    """A store with two queues, and an archive of it; rows are read without a Spark job."""

    def __init__(self, world: Any, place: Path) -> None:
        self.world = world
        self.broker: penstock.Broker = world.broker
        self.place = place
        for name, text in (("all", "n >= 0"), ("few", "price < 10")):
            self.broker.create_queue(
                name, filter=text, max_attempts=2, backoff_base_ms=0, backoff_cap_ms=0
            )

    def work(self, count: int) -> None:
        """Publish, and work off: what costs 3 or 13 fails after two attempts."""
        self.world.publish(count)
        self.settle()

    def settle(self) -> None:
        for queue in ("all", "few"):
            while held := self.broker.claim(queue, limit=100, consumer="w"):
                bad = [e.receipt for e in held if int(e.attributes["price"] or 0) % 10 == 3]
                good = [e.receipt for e in held if e.receipt not in set(bad)]
                self.broker.ack(good)
                self.broker.release(bad, delay_ms=0, reason="no")

    def archive(self, spark: SparkSession, **settings: Any) -> Any:
        return archive(spark, self.world.location, self.place, **settings)

    def reader(self, table: str, **options: str) -> TableReader:
        whole = {"location": self.world.location, "table": table, "includeArchive": str(self.place)}
        checked = read_options({**whole, **options}, streaming=False)
        return TableReader(checked, spark_schema(checked))

    def rows(self, table: str, **options: str) -> list[Row]:
        reader = self.reader(table, **options)
        return [row for part in reader.partitions() for row in read(reader, part)]

    def live(self, table: str, **options: str) -> list[Row]:
        checked = read_options(
            {"location": self.world.location, "table": table, **options}, streaming=False
        )
        reader = TableReader(checked, spark_schema(checked))
        return [row for part in reader.partitions() for row in read(reader, part)]


def read(reader: TableReader, part: Any) -> list[Row]:
    return [row for batch in reader.read(part) for row in batch.to_pylist()]


def named(rows: Iterable[Row]) -> Counter[Any]:
    """Count rows by everything in them but the sequence, which may move."""
    return Counter(
        repr(sorted((name, value) for name, value in row.items() if name != "sequence"))
        for row in rows
    )


@pytest.fixture
def site(make_world: Callable[..., Any], tmp_path: Path) -> Site:
    return Site(make_world(routing="inline"), tmp_path / "archive")


TABLES = ("done", "failed", "attempts")


def archive_as_before(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Archive all history as the version did that knew no first claims; nothing is trimmed."""
    client, place = FlightStore(site.world.location), Archive.at(site.place)
    now = delta.table_schema

    def schema(name: str) -> pa.Schema:
        return pa.schema([each for each in now(name) if each.name != "first_claimed_at"])

    monkeypatch.setattr(delta, "table_schema", schema)
    history = client.history_ends()
    ends = {
        Mark(queue, found.created_at_ms, state): end
        for queue, found in history.queues.items()
        for state, end in found.ends.items()
    }
    made_at = {mark.queue: mark.created_at_ms for mark in ends}
    for name in TABLES:
        table = place.make(name, history.store_id)
        marks = {mark: end for mark, end in ends.items() if name in {mark.state, "attempts"}}
        stretches = [HistoryStretch(*mark, 0, end) for mark, end in marks.items()]
        batches = client.read(HistoryTicket(name, stretches, name != "attempts"))
        table.commit(list(delta.write_rows(place, name, made_at, batches)), marks)
    monkeypatch.undo()


def test_an_archive_that_knew_no_first_claims_is_added_to(
    spark: SparkSession, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.work(40)
    archive_as_before(site, monkeypatch)
    old = {table: site.live(table) for table in ("done", "failed")}
    named_old = {table: {(r["queue"], r["message_id"]) for r in old[table]} for table in old}
    assert all(row["first_claimed_at"] for rows in old.values() for row in rows)

    def check(table: str, claims: dict[tuple[str, int], Any]) -> None:
        rows = site.rows(table)
        found = {(row["queue"], row["message_id"]): row["first_claimed_at"] for row in rows}
        assert len(found) == len(rows)
        assert {key: at for key, at in found.items() if key in named_old[table]} == dict.fromkeys(
            named_old[table]
        )
        assert {key: at for key, at in found.items() if key not in named_old[table]} == claims

    for table in old:
        check(table, {})
    site.work(40)
    claims = {
        table: {
            (row["queue"], row["message_id"]): row["first_claimed_at"]
            for row in site.live(table)
            if (row["queue"], row["message_id"]) not in named_old[table]
        }
        for table in old
    }
    assert all(claims.values())
    assert None not in claims["done"].values()
    made = site.archive(spark)
    assert made.trimmed > made.rows["done"] > 0
    for _ in range(2):
        for table in old:
            check(table, claims[table])
        # Files of both kinds become one.
        optimize(site.place)


def test_rows_are_there_once_wherever_they_are(spark: SparkSession, site: Site) -> None:
    site.work(150)
    whole = {table: named(site.live(table)) for table in TABLES}
    assert all(whole.values())

    def check() -> None:
        for table in TABLES:
            assert named(site.rows(table)) == whole[table], table

    # Archived and not trimmed: what a crash leaves.
    site.archive(spark, trim=False)
    check()
    # Some of those are redriven and fail or end again; others come.
    assert site.broker.redrive("few", where="price = 3") > 0
    site.broker.publish(
        penstock.Message(b"new", {"n": 1, "price": price, "kind": "k"}) for price in range(20)
    )
    before = {table: named(site.rows(table)) for table in ("done", "failed")}
    assert before["failed"] == whole["failed"], "that they had failed stays true"
    site.settle()
    for table in TABLES:
        # Whatever is live is in the whole, and nothing of the whole is there twice.
        found = named(site.rows(table))
        assert not named(site.live(table)) - found
        assert not whole[table] - found
        assert max(found.values()) == 1
        whole[table] = found
    again = site.archive(spark)
    assert again.rows["failed"] > 0
    check()
    assert not site.live("done")
    site.work(40)
    for table in TABLES:
        whole[table] += named(site.live(table))
    check()
    kinds = [each["attempt"] for each in site.rows("attempts", queue="few")]
    assert max(kinds) == 4, "a redriven message goes on counting"


def test_queue_columns_filter_payload_and_partitions(spark: SparkSession, site: Site) -> None:
    site.work(100)
    whole = site.live("done", payload="true")
    site.archive(spark, states=["done"])
    site.work(60)
    whole += site.live("done", payload="true")
    chosen = [row for row in whole if row["queue"] == "few"]
    assert named(site.rows("done", queue="few", payload="true")) == named(chosen)
    for partitions in ("1", "3", "9"):
        found = site.rows("done", payload="true", partitions=partitions)
        assert named(found) == named(whole)
        assert all(row["payload"] == b"m" * len(row["payload"]) for row in found)
    text = "kind = 'k1' AND \"group\" <> 'g0' AND size > 1 AND price < 30"
    kept = [
        row
        for row in whole
        if row["size"] > 1 and row["group"] != "g0" and ("kind", "k1") in row["attributes"]
        and int(dict(row["attributes"])["price"]) < 30
    ]  # fmt: skip
    found = site.rows("done", filter=text, columns="message_id,queue,done_at")
    assert [list(row) for row in found] == [["message_id", "queue", "done_at"]] * len(found)
    assert Counter((row["queue"], row["message_id"]) for row in found) == Counter(
        (row["queue"], row["message_id"]) for row in kept
    )
    assert len(kept) > 3
    # And through Spark.
    frame = site.world.reader(spark, "done", includeArchive=str(site.place), filter=text)
    assert frame.count() == len(kept)


def test_payloads_that_were_left_out_are_null(spark: SparkSession, site: Site) -> None:
    site.work(50)
    site.archive(spark, payload=False)
    site.work(50)
    rows = site.rows("done", payload="true")
    kinds = Counter(row["payload"] is None for row in rows)
    assert set(kinds) == {True, False}
    assert kinds[False] == len(site.live("done"))


def test_each_action_reads_the_present(spark: SparkSession, site: Site) -> None:
    site.work(60)
    site.archive(spark, trim=False)
    site.work(60)
    readers = {table: site.reader(table) for table in TABLES}
    parts = {table: reader.partitions() for table, reader in readers.items()}
    frame = site.world.reader(spark, "done", includeArchive=str(site.place))
    before = frame.count()

    names = map(str, itertools.count())

    def check() -> None:
        """Read with the plans from the beginning, and compare with new ones."""
        for table, reader in readers.items():
            # Outside of Spark all reads of a DataFrame are one action.
            name = next(names)
            fresh = [renamed(part, name) for part in parts[table]]
            found = named(row for part in fresh for row in read(reader, part))
            assert found == named(site.rows(table)), table
            assert max(found.values()) == 1

    check()
    # Rows that came, rows that were archived and trimmed meanwhile, and files that were joined.
    site.work(30)
    check()
    site.archive(spark)
    assert not site.live("done")
    check()
    optimize(site.place)
    site.work(30)
    check()
    site.archive(spark, trim=False)
    assert site.broker.redrive("few", where="price = 3") > 0
    site.settle()
    check()
    # And queues that came, went, or were made anew.
    site.broker.create_queue("late", filter="n >= 0")
    site.broker.backfill("late")
    site.broker.delete_queue("few")
    site.broker.create_queue("few", filter="price < 10")
    site.work(30)
    check()
    site.archive(spark)
    site.broker.delete_queue("all")
    check()
    assert frame.count() == len(site.rows("done")) > before


def renamed(part: Any, frame: str) -> Any:
    """Make a part one of another DataFrame, if it reads a snapshot."""
    ticket = getattr(part, "ticket", None)
    if ticket is None:
        return part
    return replace(part, ticket=msgspec.structs.replace(ticket, frame=frame))


def test_a_snapshot_has_what_had_ended_by_then(spark: SparkSession, site: Site) -> None:
    site.work(60)
    site.archive(spark, queues=["few"])
    site.work(60)
    # In files, and live in the snapshot too.
    site.archive(spark, trim=False)
    assert site.broker.redrive("few", where="price = 3") > 0
    site.settle()
    with snapshot(site.world.location, spark=spark) as then:
        whole = {table: named(site.rows(table)) for table in TABLES}
        settings = {"snapshot": then.options["snapshot"], "partitions": "3"}

        def check() -> None:
            for table in TABLES:
                assert named(site.rows(table, **settings)) == whole[table], table

        check()
        # What had failed in the snapshot fails again, and only that gets into files.
        assert site.broker.redrive("all") > 0
        site.work(60)
        site.archive(spark)
        check()
        for table in ("done", "attempts"):
            parts = [
                {file.queue for file in part.files}
                for part in site.reader(table, **settings).partitions()
                if isinstance(part, ArchivedPartition)
            ]
            # Several tasks read what is archived of a queue.
            assert sum("all" in queues for queues in parts) >= 2


def test_queues_that_are_gone_or_were_made_anew(spark: SparkSession, site: Site) -> None:
    site.work(60)
    whole = site.live("done")
    old = [row for row in whole if row["queue"] == "few"]
    site.archive(spark, states=["done"], queues=["few"])
    attempts = named(site.rows("attempts"))
    site.broker.delete_queue("few")
    assert named(site.rows("done", queue="few")) == named(old)
    assert named(site.rows("done")) == named(whole)
    # Attempts at what had failed went with the queue; the archive keeps its own.
    assert not named(site.rows("attempts", queue="few")) - attempts
    site.broker.create_queue("few", filter="price < 10")
    site.broker.backfill("few")
    site.settle()
    # The same messages again, in another queue of that name.
    new = [row for row in site.live("done") if row["queue"] == "few"]
    assert new
    assert named(site.rows("done", queue="few")) == named(old + new)
    tries = site.rows("attempts", queue="few")
    assert max(named(tries).values()) == 1
    assert len({(row["message_id"], row["attempt"]) for row in tries}) < len(tries)


def test_what_is_refused(
    spark: SparkSession, site: Site, make_world: Callable[..., Any], tmp_path: Path
) -> None:
    site.work(20)
    with pytest.raises(InvalidInput, match="there is no archive at"):
        site.rows("done")
    site.archive(spark)
    with pytest.raises(QueueNotFound, match="nor is one archived"):
        site.rows("done", queue="nobody")
    with pytest.raises(InvalidInput, match="has no attributes to filter by"):
        site.rows("attempts", filter="n > 1")
    place = str(site.place)
    for table in ("active", "log", "queues"):
        with pytest.raises(InvalidInput, match="are for done, failed, attempts"):
            read_options({"location": "grpc://x:1", "table": table, "includeArchive": place})
    with pytest.raises(InvalidInput, match="includearchive are for batch reads"):
        read_options(
            {"location": "grpc://x:1", "table": "done", "includeArchive": place}, streaming=True
        )
    other = make_world(routing="inline")
    frame = other.reader(spark, "done", includeArchive=place)
    with pytest.raises(Exception, match=re.compile("StoreMismatch.*archive of store", re.DOTALL)):
        frame.collect()
    with pytest.raises(StoreMismatch):
        Archive.at(place).tables(other.broker.info().store_id)
    next((site.place / "done").rglob("queue=*/*.parquet")).unlink()
    with pytest.raises(StorageFailed, match="any more: it was vacuumed"):
        site.rows("done")


def test_rows_are_told_apart_by_code_and_time() -> None:
    live = [(np.array([7, 5, 7]), np.array([30, 10, 20])), (np.array([7]), np.array([10]))]
    codes, times = np.array([7, 7, 7, 7, 5, 5, 6, 9]), np.array([10, 20, 30, 40, 10, 20, 10, 10])
    absent = [False, False, False, True, False, True, True, True]
    assert _Known(live).absent(codes, times).to_pylist() == absent
    assert _Known([]).absent(codes, times).to_pylist() == [True] * 8
    assert _Known(live).absent(codes[:0], times[:0]).to_pylist() == []
