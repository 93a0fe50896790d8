"""Conditions on columns: the rows that they keep, against DuckDB, and the ranges they read."""

from __future__ import annotations

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.flight.test_reading import SOME_KEPT

from penstock import InvalidFilter, InvalidInput, State
from penstock.flight import partition
from penstock.flight.conditions import Span, parse_condition
from penstock.flight.snapshots import next_batch
from penstock.flight.tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    import penstock
    from penstock.flight.client import FlightStore

duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")

# The middle of what a table has stands for {…}.
CONDITIONS = {
    "log": (
        "offset > {offset}",
        "{offset} > offset AND offset >= 3",
        "offset BETWEEN 4 AND {offset} OR offset = 2",
        "offset NOT IN (1, 2, 3) AND \"group\" <> 'g1'",
        "published_at >= '{published_at}'",
        "published_at < '{published_at}' AND priority < 2",
        "NOT (size > {size}) AND offset < 90000000000",
        "\"group\" LIKE 'g%' AND FALSE",
        "\"group\" >= 'g1'",
        "TRUE",
    ),
    "messages": ("message_id <= {message_id}", "message_id IN (2, 5) OR size = {size}"),
    "active": (
        "queue = 'q' AND state = 'in_flight'",
        "state IN ('delayed', 'available')",
        "consumer IS NULL AND message_id > {message_id}",
        "NOT consumer = 'ada'",
        "consumer NOT IN ('ada', 'bob')",
        "lease_deadline > '{published_at}'",
        "queue = 'nope' OR queue LIKE 'b_g'",
        "NOT FALSE",
    ),
    "done": (
        "sequence >= {sequence}",
        "sequence = 1 AND queue = 'q'",
        "done_at > '{done_at}'",
        "TRUE",
    ),
    "failed": ("sequence < {sequence}", "reason <> '' AND attempts >= 1"),
    "attempts": (
        "message_id > {message_id}",
        "message_id BETWEEN 2 AND {message_id} AND queue = 'q'",
        "outcome = 'running' OR ended_at IS NULL",
    ),
    "queues": ("name = 'q'", "draining", "NOT draining AND available > 0"),
    "groups": ("available > 1 AND queue <> 'q'",),
    "stats": ("queue IS NULL", "metric = 'available' AND value > 0"),
}


@SOME_KEPT
@pytest.mark.parametrize("table", TABLES)
def test_rows_are_those_that_sql_keeps(
    kept_life: penstock.Broker, kept_store: FlightStore, table: str
) -> None:
    whole = kept_store.read_table(table)
    middle = {
        name: whole.column(name).sort()[whole.num_rows // 2].as_py()
        for name in ("offset", "message_id", "sequence", "size", "published_at", "done_at")
        if name in whole.column_names
    }
    kept = []
    for template in CONDITIONS[table]:
        where = template.format(**middle)
        # DuckDB has a keyword of this name.
        quoted = re.sub(r"\boffset\b", '"offset"', where)
        expected = duckdb.sql(f"SELECT * FROM whole WHERE {quoted}").to_arrow_table()
        for columns in (None, [whole.column_names[-1]]):
            found = kept_store.read_table(table, where=where, columns=columns, partitions=3)
            wanted = expected if columns is None else expected.select(columns)
            assert sorted(map(repr, found.to_pylist())) == sorted(
                map(repr, wanted.cast(found.schema).to_pylist())
            ), where
        kept.append(found.num_rows)
    # Some conditions take some of the rows.
    assert any(0 < count < whole.num_rows for count in kept)


def test_payloads_and_filters_go_with_it(
    kept_life: penstock.Broker, kept_store: FlightStore
) -> None:
    whole = kept_store.read_table("log", payload=True, filter="n > 5")
    found = kept_store.read_table("log", payload=True, filter="n > 5", where="priority = 1")
    assert found.to_pylist() == [row for row in whole.to_pylist() if row["priority"] == 1]
    assert 0 < found.num_rows < whole.num_rows
    # Attributes that nobody has asked for, but the condition.
    sizes = [row["size"] for row in whole.to_pylist() if '"n":7' in row["attributes_json"]]
    only = kept_store.read_table("log", columns=["size"], where="attributes_json LIKE '%\"n\":7%'")
    assert only.column("size").to_pylist() == sizes != []


def test_only_ranges_that_can_hold_rows_are_read(kept_life: penstock.Broker) -> None:
    def pieces(table: str, where: str) -> list[Any]:
        condition = parse_condition(where, TABLES[table])
        return [piece for part in partition(pinned, table, 4, where=condition) for piece in part]

    with kept_life.view() as pinned:
        end = pinned.log_stats.end
        assert {piece[2:4] for piece in pieces("log", "offset > 5 AND offset <= 6")} == {(6, 7)}
        assert max(piece.high for piece in pieces("log", f"offset >= {end - 2}")) == end
        assert pieces("log", "offset < 0 AND priority = 1") == []
        assert {piece[2:4] for piece in pieces("messages", "message_id = 3")} == {(3, 4)}
        assert {piece.queue for piece in pieces("done", "queue = 'q' AND attempts > 0")} == {"q"}
        assert {piece.queue for piece in pieces("queues", "name IN ('q', 'nope')")} == {"q"}
        last = pinned.sequence_ends("q")[State.DONE]
        assert pieces("done", f"queue = 'q' AND sequence >= {last}") == []
        assert {piece.high for piece in pieces("done", "sequence <= 7")} <= {8}
        assert pieces("attempts", "queue = 'empty' AND message_id = 4") == []


@pytest.mark.parametrize(
    ("where", "offset", "group"),
    [
        ("offset > 5 AND offset > 3", Span(6), None),
        ("offset = 5 OR offset = 9", Span(5, 9), None),
        ("offset = 5 OR priority = 9", Span(), None),
        ("NOT offset > 5", Span(), None),
        ("5 <= offset AND offset < 8 AND \"group\" = 'a'", Span(5, 7), {"a"}),
        ("\"group\" = 'a' OR \"group\" IN ('b', 'c')", Span(), {"a", "b", "c"}),
        ("\"group\" = 'a' AND \"group\" = 'b'", Span(), set()),
        ("offset <> 5", Span(), None),
    ],
)
def test_bounds(where: str, offset: Span, group: set[str] | None) -> None:
    condition = parse_condition(where, TABLES["log"])
    assert condition.span("offset") == offset
    assert condition.texts.get("group") == group


@pytest.mark.parametrize(
    ("where", "match"),
    [
        ("offsett > 5", "did you mean 'offset'"),
        ("offset > '5'", "offset is compared with a whole number, which offset > '5' is not"),
        ("offset > 5.5", "a whole number"),
        ("offset > 1e300", "a whole number"),
        ("offset > priority", "a whole number"),
        ("offset + 1 > 5", "compares a column with values"),
        ("1 = 1", "compares a column with values"),
        ("published_at > '2026-01-31'", "a time with its zone"),
        ("published_at > 'soon'", "a time with its zone"),
        ("attributes = 'a'", "use a filter"),
        ("priority LIKE 'a'", "is no text"),
        ("offset", "a whole number"),
    ],
)
def test_wrong_conditions_say_so(where: str, match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        parse_condition(where, TABLES["log"])


def test_a_wrong_condition_changes_nothing(kept_store: FlightStore) -> None:
    with pytest.raises(InvalidFilter, match="column 8"):
        kept_store.read_table("log", where="offset >")
    with pytest.raises(InvalidInput, match="no column 'kind'"):
        kept_store.read_table("active", where="kind = 'a'")


def test_milliseconds_are_times() -> None:
    batch = pa.record_batch(
        [pa.array([999, 1_000, 1_001], pa.int64()).cast(TABLES["log"].field("published_at").type)],
        names=["published_at"],
    )
    condition = parse_condition("published_at > 1", TABLES["log"])
    assert condition.kept(batch).to_pylist() == [2]


def test_a_reader_whose_store_is_slow_holds_up_no_other() -> None:
    usual = sys.getswitchinterval()
    batch = pa.record_batch([pa.array([1])], names=["n"])
    reads, goes_on = threading.Event(), threading.Event()

    def slow() -> Iterator[pa.RecordBatch]:
        reads.set()
        goes_on.wait()
        yield batch

    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(next_batch, slow())
        reads.wait()
        assert sys.getswitchinterval() < usual
        assert next_batch(iter([batch])) is batch
        assert not waiting.done()
        goes_on.set()
        assert waiting.result() is batch
    assert next_batch(iter([])) is None
    assert sys.getswitchinterval() == usual
