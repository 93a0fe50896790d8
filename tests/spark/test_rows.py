"""Rows that become messages, and rows that can't: the part of a writer that needs no session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from penstock.errors import InvalidInput, InvalidMessage
from penstock.flight.client import FlightStore
from penstock.spark.source import Options
from penstock.spark.writer import BatchPublisher, Rows, shown_row

if TYPE_CHECKING:
    from collections.abc import Mapping

NAN, INFINITE = float("nan"), float("inf")
TEXTS = pa.map_(pa.string(), pa.float64())


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"payload": pa.array([None], pa.binary())}, "payload is null"),
        ({"priority": [300]}, "priority is 300"),
        ({"delay_ms": [-1]}, "delay_ms"),
        ({"group": ["g" * 257]}, "group"),
        ({"dedup_id": ["d" * 257]}, "dedup_id"),
        ({"attributes": ["[1]"]}, "attributes are not a flat JSON object: "),
        ({"attributes": ['{"n": NaN}']}, "attributes are not a flat JSON object: "),
        ({"attributes": ['{"n": 1e999}']}, "attributes are not a flat JSON object: "),
        ({"attributes": ['{"n": {"m": 1}}']}, "attributes are not a flat JSON object: "),
        ({"attributes_json": ['{"n": 99999999999999999999}']}, "attribute"),
        ({"attributes": [{"a": 1, "price": NAN}]}, "attribute 'price' is nan"),
        ({"attributes": pa.array([[("price", -INFINITE)]], TEXTS)}, "attribute 'price' is -inf"),
        ({"attributes": [{"many": [1, 2]}]}, "attributes are not a flat JSON object: "),
        ({"attributes": [{"": 1}]}, "attribute name"),
    ],
)
def test_a_bad_row(columns: dict[str, Any], reason: str) -> None:
    bad = pa.record_batch({"payload": pa.array([b"bad"]), **columns})
    found: list[tuple[int, Mapping[int, str]]] = []
    rows = Rows("task")
    assert list(rows.messages([bad], lambda batch, why: found.append((batch.num_rows, why)))) == []
    ((count, why),) = found
    assert (count, list(why)) == (1, [0])
    assert why[0].startswith(reason)


def test_good_rows_keep_their_dedup_ids_beside_bad_ones() -> None:
    schema = pa.schema([("payload", pa.string()), ("priority", pa.int32())])
    mixed = pa.record_batch([["a", "b", "a", "a"], [1, 999, 1, 999]], schema=schema)
    (made,) = Rows("task").messages([mixed], lambda *_: None)
    alone = pa.record_batch([["a", "a"], [1, 1]], schema=schema)
    assert list(Rows("task").messages([alone], lambda *_: None)) == [made]
    assert len(set(made.column("dedup_id").to_pylist())) == 2


def test_a_row_is_shown_in_one_short_line() -> None:
    row = pa.record_batch(
        {
            "payload": pa.array([b"\xff\n" + b"x" * 1_000]),
            "group": pa.array([None], pa.string()),
            "attributes": pa.array([[("price", NAN)]], TEXTS),
        }
    )
    shown = shown_row(row, 0)
    assert shown.startswith('{"payload": "\N{REPLACEMENT CHARACTER}\\nxxx')
    assert shown.endswith('x…", "attributes": {"price": NaN}}')
    assert len(shown) < 200
    wide = pa.record_batch({"payload": [b"x"], "attributes": [{f"a{n}": n for n in range(200)}]})
    assert len(shown_row(wide, 0)) == 301


SCHEMA = StructType([StructField("payload", StringType()), StructField("priority", IntegerType())])
BATCH = pa.record_batch([["a", "b", "c"], [1, 300, 1]], names=["payload", "priority"])


def writer_of(world: Any, **options: Any) -> BatchPublisher:
    return BatchPublisher(Options(location=world.location, table="messages", **options), SCHEMA)


def test_rows_that_are_left_out_are_counted_and_shown(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    writer = writer_of(world, on_bad_row="skip")
    with caplog.at_level("INFO", logger="penstock.spark.writer"):
        writer.commit([writer.write(iter([BATCH])), None])
    counted, left_out = caplog.messages
    assert counted == "this write: 2 published, 0 of them duplicates"
    shown = '{"payload": "b", "priority": 300}: priority is 300; allowed are 0 to 255'
    assert left_out == f"this write: bad rows left out: 1: {shown}"


def test_a_write_that_is_given_up_leaves_no_spool(world: Any) -> None:
    writer = writer_of(world)
    good = BATCH.slice(0, 1)
    with pytest.raises(InvalidMessage, match="a row can't be published: priority is 300"):
        writer.write(iter([good, BATCH]))
    # No task has come to its end, so none tells of the spool.
    writer.abort([None, None])
    spool = f"{writer._run}-{writer._run}"
    assert FlightStore(world.location).drop_spool(spool) is False
    assert world.broker.store_stats().published_total == 0


def test_a_broker_that_restarts_within_a_write(world: Any) -> None:
    writer = writer_of(world)
    good = BATCH.slice(0, 1)
    sent = writer.write(iter([good]))
    world.close()
    world.open()
    with pytest.raises(InvalidInput, match=r"restarted\?.* \(0 of 1 rows of this write were publ"):
        writer.commit([sent])
    writer.commit([writer.write(iter([good]))])
    assert world.broker.store_stats().published_total == 1
