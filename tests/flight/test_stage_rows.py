"""What stages hold, and for how long; and the log's records as they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock import Message
from penstock.clock import ManualClock
from penstock.flight.protocol import LogTicket, StageCommand
from penstock.flight.writes import KEPT_COMMITTED, Stage, Stages
from penstock.store.codec.metadata import decode_metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    import penstock
    from penstock.flight.client import FlightStore

ROWS = st.lists(st.tuples(st.integers(1, 30), st.sampled_from(["a", "b", "c"])), max_size=20)


def staged(name: str, *batches: list[tuple[int, str]]) -> Stage:
    schema = pa.schema([("offset", pa.int64()), ("queue", pa.string())])
    columns = [list(zip(*rows, strict=True)) or [(), ()] for rows in batches]
    rows = [
        pa.record_batch([pa.array(c, f.type) for c, f in zip(each, schema, strict=True)], schema)
        for each in columns
    ]
    return Stage(StageCommand(stage=name, log=0, begin=1, end=31, rows=0), rows)


@given(st.lists(ROWS, max_size=3), st.lists(ROWS, max_size=2), st.integers(0, 31))
def test_assignments_are_the_rows_in_their_order(
    first: list[list[tuple[int, str]]], second: list[list[tuple[int, str]]], at: int
) -> None:
    found: dict[int, Sequence[str]] = {}
    staged("one", *first).assignments(0, found)
    # Rows of another stage count from where the one before ends.
    staged("two", *second).assignments(at, found)
    expected: dict[int, list[str]] = {}
    for offset, queue in (row for rows in first for row in rows):
        expected.setdefault(offset, []).append(queue)
    for offset, queue in (row for rows in second for row in rows):
        if offset >= at:
            expected.setdefault(offset, []).append(queue)
    assert {offset: list(names) for offset, names in found.items()} == expected


def test_a_slice_is_read_from_where_it_begins() -> None:
    whole = staged("s", [(n, "abc"[n % 3]) for n in range(1, 20)])._batches[0]
    stage = Stage(
        StageCommand(stage="s", log=0, begin=1, end=31, rows=0),
        [whole.slice(5, 4).set_column(1, "queue", whole.slice(5, 4).column(1).dictionary_decode())],
    )
    found: dict[int, Sequence[str]] = {}
    stage.assignments(0, found)
    assert found == {6: ("a",), 7: ("b",), 8: ("c",), 9: ("a",)}


def test_stages_that_were_committed_go_when_others_have_followed() -> None:
    held = Stages(ManualClock())
    held.add(staged("waiting", [(1, "a")]))
    for number in range(KEPT_COMMITTED + 50):
        stage = staged(f"s{number}", [(1, "a")])
        held.add(stage)
        stage.clear()
    assert len(held) == KEPT_COMMITTED + 2
    assert [each.rows for each in held.get(["waiting"])] == [1]
    last = KEPT_COMMITTED + 49
    assert held.get([f"s{last}", f"s{last - KEPT_COMMITTED + 1}"])


def test_the_log_as_it_is_stored(piped: penstock.Broker, piped_store: FlightStore) -> None:
    piped.publish([Message(b"abc", {"n": n}, group=f"g{n}", priority=n) for n in range(3)])
    ticket = LogTicket(0, 1, 4, columns=["metadata", "offset"])
    rows = [row for batch in piped_store.read(ticket) for row in batch.to_pylist()]
    assert [row["offset"] for row in rows] == [1, 2, 3]
    for number, row in enumerate(rows):
        found = decode_metadata(row["metadata"])
        assert (found.attributes, found.group, found.size) == ({"n": number}, f"g{number}", 3)
    assert "metadata" not in piped_store.schema("log").names
