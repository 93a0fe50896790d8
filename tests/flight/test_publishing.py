from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest

from penstock import InvalidInput, InvalidMessage, limits

if TYPE_CHECKING:
    import penstock
    from penstock.flight.client import FlightStore
    from penstock.flight.protocol import Published

MAP = pa.map_(pa.string(), pa.string())


def publish(store: FlightStore, **columns: Any) -> Published:
    table = pa.table(columns)
    return store.publish(table.to_batches())


def logged(store: FlightStore, *columns: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = store.read_table("log", columns=columns).to_pylist()
    return rows


def test_every_column(broker: penstock.Broker, store: FlightStore) -> None:
    broker.create_queue("q")
    answer = publish(
        store,
        delay_ms=[0, 5_000, None],
        payload=[b"a", b"b", b""],
        queue=["q", None, "q"],
        attributes_json=['{"n": 1, "f": 1.5, "both": 2}', None, "{}"],
        attributes=pa.array([[("both", "1"), ("t", "x")], [("nil", None)], None], MAP),
        group=["g", None, ""],
        priority=[7, None, 0],
        dedup_id=["d1", None, "d2"],
    )
    assert (answer.published, answer.duplicates) == (3, 0)
    found = logged(store, "payload", "attributes_json", "group", "priority", "delay_ms", "size")
    for row in found:
        row["attributes_json"] = msgspec.json.decode(row["attributes_json"])
    first = {"both": 2, "t": "x", "n": 1, "f": 1.5, "queue": "q"}
    assert [tuple(row.values()) for row in found] == [
        (b"a", first, "g", 7, 0, 1),
        (b"b", {"nil": None}, "", 0, 5_000, 1),
        (b"", {"queue": "q"}, "", 0, 0, 0),
    ]
    assert broker.stats("q").available == 2


def test_duplicates_leave_no_gaps_in_the_log(broker: penstock.Broker, store: FlightStore) -> None:
    publish(store, payload=[b"a", b"b"], dedup_id=["1", "2"])
    answer = publish(store, payload=[b"b", b"c", b"c", b"d"], dedup_id=["2", "3", "3", "4"])
    assert (answer.published, answer.duplicates) == (4, 2)
    publish(store, payload=[b"a"] * 5, dedup_id=["1"] * 5)
    first, *others = (row["offset"] for row in logged(store, "offset"))
    assert others == [first + 1, first + 2, first + 3]
    assert broker.log_stats().end == first + 4


@pytest.mark.parametrize(
    "payload",
    [
        pa.array(["a", "é"]),
        pa.array([b"a", "é".encode()], pa.large_binary()),
        pa.array(["a", "é"], pa.large_string()),
        pa.array(["a", "é"], pa.string_view()),
        pa.array(["a", "é"]).dictionary_encode(),
    ],
    ids=lambda array: str(array.type).replace(" ", ""),
)
def test_payloads_of_other_types(store: FlightStore, payload: pa.Array) -> None:
    group = pa.array(["x", "x"], pa.large_string()).dictionary_encode()
    publish(store, payload=payload, group=group, priority=pa.array([1, 2], pa.int8()))
    assert [row["payload"] for row in logged(store, "payload")] == [b"a", "é".encode()]
    assert [row["priority"] for row in logged(store, "priority")] == [1, 2]


def test_a_slice_of_a_batch(store: FlightStore) -> None:
    table = pa.table(
        {
            "payload": [b"%d" % n for n in range(10)],
            "attributes": pa.array([[("n", str(n))] for n in range(10)], MAP),
        }
    )
    part = table.slice(3, 4)
    store.publish(part.to_batches())
    assert [row["attributes"] for row in logged(store, "attributes")] == [
        [("n", str(n))] for n in range(3, 7)
    ]


def test_duplicates_are_counted(store: FlightStore) -> None:
    assert publish(store, payload=[b"a"], dedup_id=["x"]).duplicates == 0
    answer = publish(store, payload=[b"a", b"b", b"c", b"d"], dedup_id=["x", "y", "y", None])
    assert (answer.published, answer.duplicates) == (4, 2)
    assert len(logged(store, "offset")) == 3


def test_many_batches_are_answered_each(store: FlightStore) -> None:
    batch = pa.record_batch({"payload": [b"x"] * 500})
    answer = store.publish(batch for _ in range(30))
    assert answer.published == 15_000
    assert len(logged(store, "offset")) == 15_000


def test_nothing_to_publish(store: FlightStore) -> None:
    assert store.publish([]).published == 0
    assert publish(store, payload=pa.array([], pa.binary())).published == 0


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"payload": [b"a", None]}, "row 1: payload is null"),
        (
            {"payload": [b"a", b"b"], "attributes_json": ["{}", '{"a": [1]}']},
            "row 1: attributes are not a flat JSON object",
        ),
        ({"payload": [b"a"], "attributes_json": ["nonsense"]}, "row 0: attributes are not"),
        ({"payload": [b"a", b"b"], "priority": [0, 256]}, "row 1: priority is 256"),
        ({"payload": [b"a"], "delay_ms": [-1]}, "row 0: delay_ms is -1"),
        ({"payload": [b"a"], "dedup_id": [""]}, "row 0: dedup_id is empty"),
        ({"payload": [b"a", b"b"], "group": ["", "g" * 300]}, "row 1: group has 300 bytes"),
    ],
)
def test_bad_rows_are_named(
    kept_life: penstock.Broker, kept_store: FlightStore, columns: dict[str, Any], match: str
) -> None:
    end = kept_life.log_stats().end
    with pytest.raises(InvalidMessage, match=match):
        publish(kept_store, **columns)
    assert kept_life.log_stats().end == end


def test_a_bad_row_leaves_earlier_chunks(broker: penstock.Broker, store: FlightStore) -> None:
    count = limits.MAX_PUT_CHUNK_MESSAGES
    good = pa.record_batch({"payload": [b"x"] * 10, "priority": [0] * 10})
    priorities = [0] * (count + 5)
    priorities[count + 3] = 999
    bad = pa.record_batch({"payload": [b"x"] * (count + 5), "priority": priorities})
    with pytest.raises(InvalidMessage, match=rf"row {count + 13}: .*\({count + 10} rows before"):
        store.publish([good, bad])
    assert broker.log_stats().end == count + 11


@pytest.mark.parametrize("url", ["rocksdb-buckets", "postgresql"], indirect=True)
def test_large_payloads_are_cut_into_chunks(broker: penstock.Broker, store: FlightStore) -> None:
    payload = bytes(limits.MAX_PAYLOAD_BYTES)
    answer = publish(store, payload=[payload] * 9)
    assert answer.published == 9
    assert broker.log_stats().end == 10
    with pytest.raises(InvalidMessage, match="row 0: payload has"):
        publish(store, payload=[payload + b"x"])


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"payload": [b"a"], "colour": ["x"]}, "'colour'"),
        ({"group": ["a"]}, "'payload' is needed"),
        ({"payload": [b"a"], "priority": ["high"]}, "column 'priority' is string"),
        ({"payload": [1]}, "column 'payload' is int64"),
        ({"payload": [b"a"], "attributes": ["x"]}, "column 'attributes' is string"),
        ({"payload": [b"a"], "group": pa.array([b"\xff"])}, "column 'group'"),
    ],
)
def test_wrong_columns(kept_store: FlightStore, columns: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        publish(kept_store, **columns)


def test_text_that_is_not_unicode_is_refused(broker: penstock.Broker, store: FlightStore) -> None:
    raw = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    for column in ("group", "dedup_id", "queue", "attributes_json"):
        with pytest.raises(InvalidInput, match="not valid"):
            publish(store, payload=[b"a"], **{column: raw})
    assert broker.log_stats().end == 1
