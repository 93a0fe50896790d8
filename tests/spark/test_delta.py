"""Tables of an archive, in a directory and on S3: transactions, races, upkeep, other readers."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("deltalake", reason="deltalake is not installed")

import duckdb
import polars as pl
import pyarrow as pa
from deltalake import DeltaTable
from tests.objectstore.conftest import PREFIXES, bucket, seaweed

from penstock.errors import InvalidInput, MissingExtra, StorageFailed, StoreMismatch
from penstock.flight.tables import schema_of
from penstock.spark import delta
from penstock.spark.delta import Archive, Mark, optimize, read_rows, vacuum, write_rows

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# Fixtures of the object storage.
__all__ = ["bucket", "seaweed"]

CREATED_MS = 1_900_000_000_000
START = datetime(2030, 1, 31, 23, 59, 59, tzinfo=UTC)


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "archive")
    name: str = request.getfixturevalue("bucket")
    return f"s3://{name}/archive-{next(PREFIXES)}"


def rows(queue: str, numbers: Iterable[int]) -> pa.RecordBatch:
    """Make done rows; they end a second after each other."""
    made = [
        {
            "queue": queue, "message_id": 1_000 + number, "sequence": number,
            "done_at": START + timedelta(seconds=number), "attempts": 1,
            "first_claimed_at": START, "published_at": START,
            "group": "g", "priority": 0, "size": 2, "delay_ms": 5,
            "attributes": [("n", str(number))], "attributes_json": f'{{"n": {number}}}',
            "payload": b"xy",
        }
        for number in numbers
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(made, schema_of("done", payload=True))


def mark(queue: str) -> Mark:
    return Mark(queue, CREATED_MS, "done")


def add(place: str, queue: str, begin: int, end: int) -> None:
    table = Archive.at(place).make("done", "store")
    batches = [rows(queue, range(begin, end))]
    files = write_rows(table.archive, "done", {queue: CREATED_MS}, batches)
    table.commit(list(files), {mark(queue): end})


def numbers(place: str) -> dict[str, list[int]]:
    archive = Archive.at(place)
    files = archive.tables()["done"].files()
    found: dict[str, list[int]] = {}
    for batch in read_rows(archive, "done", files, ("queue", "sequence")):
        for row in batch.to_pylist():
            found.setdefault(row["queue"], []).append(row["sequence"])
    return {queue: sorted(some) for queue, some in found.items()}


def test_files_and_marks_are_one_transaction(place: str) -> None:
    archive = Archive.at(place)
    first, second, third = (archive.make("done", "store") for _ in range(3))
    made = {"a": CREATED_MS, "b.c-d_E": CREATED_MS}
    files = list(write_rows(archive, "done", made, [rows("a", range(10))]))
    assert {each.date for each in files} == {"2030-01-31", "2030-02-01"}
    assert numbers(place) == {}, "files alone are not rows"
    first.commit(files, {mark("a"): 10})
    again = list(write_rows(archive, "done", made, [rows("a", range(12))]))
    with pytest.raises(StorageFailed, match="another run has changed"):
        second.commit(again, {mark("a"): 12})
    other = list(write_rows(archive, "done", made, [rows("b.c-d_E", range(3))]))
    third.commit(other, {mark("b.c-d_E"): 3})
    assert numbers(place) == {"a": [*range(10)], "b.c-d_E": [0, 1, 2]}
    now = archive.tables("store")["done"]
    assert (now.mark(mark("a")), now.mark(mark("b.c-d_E")), now.mark(mark("x"))) == (10, 3, 0)
    assert now.mark(Mark("a", CREATED_MS + 1, "done")) == 0, "of another queue of that name"
    with pytest.raises(StoreMismatch, match="archive of store store, not of other"):
        archive.tables("other")

    # Without us.
    table = DeltaTable(f"{place}/done", storage_options=archive.storage)
    assert table.metadata().partition_columns == ["date", "queue"]
    whole = table.to_pyarrow_table()
    assert whole.num_rows == 13
    assert whole.schema.field("done_at").type == pa.timestamp("us", tz="UTC")
    dataset = table.to_pyarrow_dataset()
    query = (
        "SELECT queue, count(*), max(done_at), sum(octet_length(payload)) FROM dataset GROUP BY ALL"
    )
    found = {row[0]: row[1:] for row in duckdb.execute(query).fetchall()}
    assert dataset is not None
    assert found["a"] == (10, START + timedelta(seconds=9), 20)
    frame = pl.read_delta(f"{place}/done", storage_options=archive.storage)
    assert dict(frame["queue"].value_counts().iter_rows()) == {"a": 10, "b.c-d_E": 3}
    assert frame.filter(pl.col("date") == date(2030, 2, 1)).height == 11
    assert table.to_pandas()["message_id"].nunique() == 10


def race(place: str, environment: dict[str, str], until: int, gate: Any, told: Any) -> None:
    """Archive ten rows at a time, as one of several that do."""
    os.environ.update(environment)
    gate.wait()
    won = lost = 0
    while True:
        table = Archive.at(place).make("done", "store")
        begin = table.mark(mark("a"))
        if begin >= until:
            break
        batches = [rows("a", range(begin, begin + 10))]
        files = list(write_rows(table.archive, "done", {"a": CREATED_MS}, batches))
        if not begin:
            # All commit the first rows, so that some lose however fast each of them is.
            gate.wait()
        try:
            table.commit(files, {mark("a"): begin + 10})
            won += 1
        except StorageFailed:
            lost += 1
    told.put((won, lost))


def test_of_runs_that_race_one_counts(place: str) -> None:
    context = multiprocessing.get_context("spawn")
    gate, told = context.Barrier(3), context.Queue()
    access = {name: text for name, text in os.environ.items() if name.startswith("AWS_")}
    racers = [context.Process(target=race, args=(place, access, 200, gate, told)) for _ in range(3)]
    for each in racers:
        each.start()
    counts = [told.get(timeout=300) for _ in racers]
    for each in racers:
        each.join()
    assert sum(won for won, _ in counts) == 20
    assert sum(lost for _, lost in counts) > 0
    assert numbers(place) == {"a": [*range(200)]}


def test_marks_and_rows_outlive_upkeep(place: str) -> None:
    for begin in range(0, 60, 10):
        add(place, "a", begin, begin + 10)
    table = Archive.at(place).tables()["done"]
    then = table.files()
    table.delta.create_checkpoint()
    table.delta.cleanup_metadata()
    done = optimize(place)
    assert (done.joined["done"], done.made["done"]) == (6, 1), "one day has one file already"
    now = Archive.at(place).tables()["done"]
    assert now.mark(mark("a")) == 60
    assert len(now.files()) == 2
    assert numbers(place) == {"a": [*range(60)]}
    add(place, "a", 60, 70)
    # Joined files stay for those that read them, and files of a run that goes on are not removed.
    archive = Archive.at(place)
    orphans = list(write_rows(archive, "done", {"a": CREATED_MS}, [rows("a", range(70, 80))]))
    for dry_run in (True, False):
        assert vacuum(place, dry_run=dry_run).files == {"done": 0}
    assert sum(batch.num_rows for batch in read_rows(archive, "done", then, ("sequence",))) == 60
    with pytest.raises(InvalidInput, match="at least 168"):
        vacuum(place, retention_hours=1)
    if archive.directory is not None:
        left = archive.directory / "done" / orphans[0].path
        os.utime(left, (1, 1))
        assert vacuum(place, dry_run=True).files == {"done": 1}
        assert left.exists()
        assert vacuum(place).files == {"done": 1}
        assert not left.exists()
    assert numbers(place) == {"a": [*range(70)]}
    # Statistics, of optimized files too, tell which files need not be read.
    later = Archive.at(place).tables()["done"].files(least_id=1_060)
    assert 0 < len(later) < len(Archive.at(place).tables()["done"].files())


def test_a_column_that_came_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path)
    whole = delta.table_schema("done")
    later = {"delay_ms", "attributes_json", "first_claimed_at"}
    old = pa.schema([field for field in whole if field.name not in later])
    monkeypatch.setattr(delta, "table_schema", lambda _: old)
    add(place, "a", 0, 3)
    monkeypatch.undo()
    add(place, "a", 3, 5)
    table = DeltaTable(f"{place}/done").to_pyarrow_table()
    by_number = dict(
        zip(*(table[name].to_pylist() for name in ("sequence", "delay_ms")), strict=True)
    )
    assert by_number == {0: None, 1: None, 2: None, 3: 5, 4: 5}
    assert table["first_claimed_at"].null_count == 3
    archive = Archive.at(place)
    files = archive.tables()["done"].files()
    read = [
        row
        for batch in read_rows(
            archive, "done", files, ("sequence", "delay_ms", "first_claimed_at", "payload")
        )
        for row in batch.to_pylist()
    ]
    claims = {row["sequence"]: row["first_claimed_at"] for row in read}
    assert claims == {0: None, 1: None, 2: None, 3: START, 4: START}
    assert {row["sequence"]: row["delay_ms"] for row in read} == {0: 0, 1: 0, 2: 0, 3: 5, 4: 5}


def test_many_queues_and_large_rows_in_one_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_GROUP_BYTES", 2_000)
    monkeypatch.setattr(delta, "_FILE_BYTES", 20_000)
    archive = Archive.at(tmp_path)
    table = archive.make("done", "store")
    names = [f"q{number}" for number in range(30)]
    mixed = pa.concat_batches([rows(name, range(5)) for name in names])
    mixed = mixed.take(pa.array([n * 7 % 150 for n in range(150)]))
    batches = [mixed, *(rows("big", range(n, n + 40)) for n in range(0, 400, 40))]
    made = dict.fromkeys([*names, "big"], CREATED_MS)
    files = list(write_rows(archive, "done", made, batches))
    table.commit(files, {mark("big"): 400, **{mark(name): 5 for name in names}})
    assert Counter(each.queue for each in files)["big"] > 2
    assert numbers(str(tmp_path)) == {"big": [*range(400)]} | {name: [*range(5)] for name in names}


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="there is no archive at"):
        Archive.at(tmp_path).tables()
    schema = delta.table_schema("done")
    vectors = {"delta.enableDeletionVectors": "true"}
    DeltaTable.create(str(tmp_path / "done"), schema, configuration=vectors)
    with pytest.raises(StorageFailed, match="does not read, such as deletion vectors"):
        Archive.at(tmp_path).tables()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(InvalidInput, match="set AWS_ALLOW_HTTP=true"):
        Archive.at("s3://bucket/x")
    for wrong in ("s3://", "s3:/bucket/x", "gs://bucket/x", "s3://Bucket/x"):
        with pytest.raises(InvalidInput, match="s3://BUCKET/PREFIX"):
            Archive.at(wrong)
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(MissingExtra, match=r"penstock\[delta\]"):
        Archive.at(tmp_path).tables()


def test_joined_files_are_synced_before_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for begin in range(0, 40, 10):
        add(str(tmp_path), "a", begin, begin + 10)
    old = {*(tmp_path / "done").rglob("queue=a/*.parquet")}
    synced: list[Path] = []
    monkeypatch.setattr(delta, "sync_path", synced.append)
    assert optimize(tmp_path).made == {"done": 1}
    (made,) = {*(tmp_path / "done").rglob("queue=a/*.parquet")} - old
    last = max((tmp_path / "done" / "_delta_log").glob("*.json"))
    assert synced.index(made) < synced.index(made.parent) < synced.index(last)
