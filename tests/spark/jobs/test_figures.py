"""The figures of a report, without Spark: against the same counted by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import pyarrow as pa

from penstock.flight.tables import schema_of
from penstock.spark.jobs.figures import FIGURES, SHARES, figures

MESSAGE = ("message_id", "group", "attempts", "published_at")
COLUMNS = {
    "attempts": ("message_id", "claimed_at", "outcome", "reason"),
    "active": MESSAGE,
    "done": (*MESSAGE, "done_at"),
    "failed": (*MESSAGE, "failed_at"),
}


def made(**rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Make tables of rows."""
    tables = {}
    for name, columns in COLUMNS.items():
        dicts = [dict(zip(columns, row, strict=True)) for row in rows.get(name, [])]
        tables[name] = pa.Table.from_pylist(dicts, schema_of(name, columns=columns))
    return tables


def of_kind(found: pa.Table, kind: str) -> list[dict[str, Any]]:
    return [row for row in found.to_pylist() if row["kind"] == kind]


def test_a_queue_without_history() -> None:
    found = figures("q", **made())
    assert found.schema == FIGURES
    (row,) = found.to_pylist()
    assert (row["queue"], row["kind"], row["done"], row["done_p50_ms"]) == (
        "q",
        "queue",
        None,
        None,
    )


def test_counts_reasons_and_percentiles() -> None:
    # Numbers without an order that anybody would expect.
    times_ms = [at * 7_919 % 9_001 for at in range(200)]
    done = [(at, f"g{at % 3}", 1 + at % 2, 0, ms * 1_000) for at, ms in enumerate(times_ms)]
    claims = [(row[0], row[4] // (2 + row[0] % 5), "acked", "") for row in done]
    retried = [(row[0], row[4] * 2, "released", "torn") for row in done if row[2] == 2]
    tables = made(
        done=done,
        failed=[(900, "g0", 3, 0, 5_000_000)],
        active=[(901, "new", 1, 0)],
        attempts=[*claims, *retried, *([(900, 7_000_000, "expired", "")] * 3)],
    )
    found = figures("q", **tables)
    first = {row[0]: row[1] // 1_000 for row in claims}
    groups = {row["group"]: row for row in of_kind(found, "group")}
    assert set(groups) == {"g0", "g1", "g2", "new"}
    every: list[tuple[str | None, dict[str, Any]]] = [*groups.items()]
    for name, row in [*every, (None, of_kind(found, "queue")[0])]:
        own = [each for each in done if name in {each[1], None}]
        assert row["done"] == len(own)
        for share_name, share in SHARES.items():
            times = sorted(each[4] // 1_000 for each in own)
            claimed = [first[each[0]] for each in own]
            claimed = sorted(claimed + [7_000] * (name in {"g0", None}))
            for what, values in (("done", times), ("first_claim", claimed)):
                expected = values[math.ceil(len(values) * share) - 1] if values else None
                assert row[f"{what}_{share_name}_ms"] == expected, (name, what, share_name)
    assert groups["g0"]["failed"] == 1
    assert groups["new"]["attempts_max"] == 1
    assert sum(row["done"] for row in of_kind(found, "second")) == 200
    counted = {
        (row["state"], row["attempts"]): row["messages"] for row in of_kind(found, "attempts")
    }
    assert counted == {("done", 1): 100, ("done", 2): 100, ("failed", 3): 1}
    reasons = {
        (row["state"], row["reason"]): (row["attempts"], row["messages"])
        for row in of_kind(found, "reason")
    }
    assert reasons == {("released", "torn"): (100, 100), ("expired", ""): (3, 1)}
