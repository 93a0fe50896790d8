"""The figures of a report: cells that tasks count, merged by Spark, against the same by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.flight.tables import schema_of
from penstock.spark.jobs import figures
from penstock.spark.jobs.figures import CELLS, EXACT_MS, READS, SHARES, cells, count, merged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

Rows = dict[str, list[tuple[Any, ...]]]


def batches(rows: Rows, size: int) -> Iterator[tuple[str, list[pa.RecordBatch]]]:
    """Make tables of rows, in batches; each row begins after the queue."""
    for name, given in rows.items():
        columns = READS[name][0]
        dicts = [dict(zip(columns, ("q", *row), strict=True)) for row in given]
        table = pa.Table.from_pylist(dicts, schema_of(name, columns=columns))
        yield name, table.to_batches(size)


def found(spark: SparkSession, counted: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    table = pa.Table.from_batches(counted, CELLS)
    frame = spark.createDataFrame(table, from_arrow_schema(CELLS))
    return [row.asDict() for row in merged(frame).collect()]


def test_chunks_of_any_size_give_the_same_figures(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Numbers without an order that anybody would expect; rows: group, attempts, published, first
    # claim, done.
    times_ms = [at * 7_919 % 9_001 * (1 + at % 7) for at in range(200)]
    done: list[tuple[Any, ...]] = [
        (f"g{at % 3}", 1 + at % 2, 0, ms * 1_000 // (2 + at % 5), ms * 1_000)
        for at, ms in enumerate(times_ms)
    ]
    # These ended before the store kept when they were first claimed.
    done += [("g0", 1, 0, None, 4_000)] * 3
    torn = [(at, "released", "torn") for at in range(0, 200, 2)]
    rows: Rows = {
        "done": done,
        # The second was never claimed: a full queue has dropped it.
        "failed": [("g0", 3, 0, 7_000_000, 5_000_000), ("g1", 0, 0, None, 5_000_000)],
        "active": [("new", 1, 0, None)],
        "attempts": [*torn, *torn[:30], *([(900, "expired", "")] * 3), (7, "acked", "")],
    }
    monkeypatch.setattr(figures, "_CHUNK_ROWS", 64)
    counted = [cell for name, some in batches(rows, 10) for cell in count(name, some)]
    every = found(spark, counted)

    def of(kind: str) -> dict[str | None, dict[str, Any]]:
        return {row["name"]: row for row in every if row["kind"] == kind}

    def shown(ms: int, row: dict[str, Any], name: str) -> None:
        if ms < EXACT_MS:
            assert row[name] == ms
        else:
            assert ms * 0.999 < row[name] <= ms

    groups = of("group")
    assert set(groups) == {"g0", "g1", "g2", "new"}
    every_one: list[tuple[Any, Any]] = [*groups.items(), *of("queue").items()]
    for name, row in every_one:
        own = [each for each in done if name is None or name == each[0]]
        assert row["done"] == len(own)
        ended = sorted(each[4] // 1_000 for each in own)
        claims = [each[3] // 1_000 for each in own if each[3] is not None]
        claimed = sorted(claims + [7_000] * (name is None or name == "g0"))
        for share_name, share in SHARES.items():
            for what, values in (("done", ended), ("first_claim", claimed)):
                at = math.ceil(len(values) * share) - 1
                if values:
                    shown(values[at], row, f"{what}_{share_name}_ms")
                else:
                    assert row[f"{what}_{share_name}_ms"] is None
    assert of("queue")[None]["unknown"] == 4
    assert (groups["g0"]["failed"], groups["g0"]["unknown"]) == (1, 3)
    assert (groups["g1"]["failed"], groups["g1"]["unknown"]) == (1, 0)
    assert (groups["new"]["attempts_max"], groups["new"]["spent"]) == (1, None)
    by_attempts = {
        (row["name"], row["number"]): row["messages"] for row in every if row["kind"] == "attempts"
    }
    assert by_attempts == {("done", 1): 103, ("done", 2): 100, ("failed", 0): 1, ("failed", 3): 1}
    assert sum(row["done"] for row in every if row["kind"] == "second") == 203
    # Parts of a reason have its messages between them, each in one.
    reasons: dict[Any, list[int]] = {}
    for row in every:
        if row["kind"] == "reason":
            sums = reasons.setdefault((row["name"], row["reason"]), [0, 0])
            sums[0] += row["messages"]
            sums[1] += row["different"]
    assert reasons == {("released", "torn"): [130, 100], ("expired", ""): [3, 1]}


def test_a_queue_has_few_cells_however_many_messages() -> None:
    """Ten times the rows, over the same time, add nothing that a task hands on."""
    sizes = []
    for rows in (40_000, 400_000):
        hour = 3_600_000
        done = pa.table(
            {
                "queue": pa.repeat("q", rows),
                "group": pa.repeat("", rows),
                "attempts": pa.repeat(pa.scalar(1, pa.int32()), rows),
                **{
                    name: pa.array((at * hour // rows * 1_000 for at in range(rows)), pa.int64())
                    for name in ("first_claimed_at", "done_at")
                },
                "published_at": pa.repeat(0, rows),
            }
        )
        done = done.select(READS["done"][0]).cast(schema_of("done", columns=READS["done"][0]))
        sizes.append(cells("done", done).num_rows)
    # Of eleven binary digits there are 1,024 numbers between two powers of two.
    assert sizes[0] <= sizes[1] <= 4 * 12 * 1_024 + 2_048 * 4 + 200


def test_many_small_batches_are_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that reads ten thousand queues gets a batch of each."""
    seen: list[pa.Table] = []

    def noting(_: str, rows: pa.Table) -> pa.Table:
        seen.append(rows)
        return pa.table({})

    monkeypatch.setattr(figures, "cells", noting)
    rows: Rows = {"done": [("g", 1, 0, 0, 5_000)] * 100}
    assert [cell for name, some in batches(rows, 1) for cell in count(name, some)] == []
    assert [(len(each), each.column("queue").num_chunks) for each in seen] == [(100, 1)]
