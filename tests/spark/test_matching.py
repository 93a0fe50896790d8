"""Matching record batches of the log gives what each filter by itself says."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import msgspec
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.filters import Row, parse
from penstock.flight.protocol import MATCHES
from penstock.flight.tables import schema_of
from penstock.spark import log as matching
from penstock.spark.log import compiled, match_batch, matcher_of
from penstock.store.codec.metadata import Metadata, encode_metadata

FILTERS = {
    "books": "kind = 'book'",
    "dear": "price > 10",
    "first": "\"group\" = 'a' AND priority >= 5",
    "late": "published_at > 1700000000003",
    "small": "size < 3 AND kind IS NULL",
    "gold": "tier = 'gold'",
}
NAMES = ("kind", "price", "tier")
VALUES = ("book", "gold", "", "5", 0, 1, 5, -3, 2**53 + 1, 12.5, 1.0, True, False, None)
Given = tuple[dict[str, object], str, int, int, int]
MESSAGES = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES)),
        st.sampled_from(["", "a", "book"]),
        st.sampled_from([0, 5, 9]),
        st.integers(1_700_000_000_000, 1_700_000_000_006),
        st.integers(0, 6),
    ),
    max_size=12,
)


def literal(value: object) -> str:
    return str(value).upper() if isinstance(value, bool) else repr(value)


ATOMS = st.one_of(
    st.tuples(
        st.sampled_from([*NAMES, '"group"', "priority", "size", "published_at"]),
        st.sampled_from(["=", "<>", "<", ">="]),
        st.sampled_from([value for value in VALUES if value is not None]),
    ).map(lambda parts: f"{parts[0]} {parts[1]} {literal(parts[2])}"),
    st.tuples(
        st.sampled_from(NAMES), st.lists(st.sampled_from(VALUES[:-1]), min_size=1, max_size=3)
    ).map(lambda parts: f"{parts[0]} IN ({', '.join(map(literal, parts[1]))})"),
    st.sampled_from(NAMES).map(lambda name: f"{name} IS NULL"),
    st.sampled_from(NAMES).map(lambda name: f"{name} LIKE 'b%'"),
    st.integers(1_700_000_000_000, 1_700_000_000_006).map(lambda ms: f"published_at <= {ms}"),
)
TEXTS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["AND", "OR"]), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        ),
        inner.map(lambda text: f"NOT ({text})"),
    ),
    max_leaves=4,
)
SCHEMA = schema_of("log", columns=list(matching.COLUMNS))


def batch_of(messages: list[Given]) -> pa.RecordBatch:
    columns = [
        [7 + number for number in range(len(messages))],
        [msgspec.json.encode(message[0]).decode() for message in messages],
        [message[1] for message in messages],
        [message[2] for message in messages],
        [message[3] * 1000 for message in messages],
        [message[4] for message in messages],
    ]
    arrays = [pa.array(v, f.type) for v, f in zip(columns, SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=SCHEMA)


def packed_of(messages: list[Given]) -> pa.RecordBatch:
    records = [
        encode_metadata(Metadata(published, group, priority, size, 0, attributes))  # type: ignore[arg-type]
        for attributes, group, priority, published, size in messages
    ]
    offsets = pa.array([7 + number for number in range(len(messages))], pa.int64())
    return pa.record_batch([offsets, pa.array(records, pa.binary())], ["offset", "metadata"])


def naive(filters: dict[str, str], messages: list[Given]) -> list[tuple[int, str]]:
    parsed = {name: parse(text) for name, text in filters.items()}
    return [
        (7 + number, name)
        for number, message in enumerate(messages)
        for name in sorted(filters)
        if parsed[name].matches(Row(*message))  # type: ignore[arg-type]
    ]


def pairs(found: pa.RecordBatch) -> list[tuple[int, str]]:
    assert found.schema == MATCHES
    return list(zip(*found.to_pydict().values(), strict=True))


@given(MESSAGES)
def test_batches_match_as_each_filter_does(messages: list[Given]) -> None:
    expected = naive(FILTERS, messages)
    assert pairs(match_batch(matcher_of(FILTERS), batch_of(messages))) == expected
    assert pairs(match_batch(matcher_of(FILTERS), packed_of(messages))) == expected


@given(st.lists(TEXTS, max_size=6), MESSAGES, st.integers(1, 5))
def test_any_filters_in_parts_of_any_size(
    texts: list[str], messages: list[Given], at_once: int
) -> None:
    filters = {f"q{number}": text for number, text in enumerate(texts)}
    expected = naive(filters, messages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "_AT_ONCE", at_once)
        assert pairs(match_batch(matcher_of(filters), batch_of(messages))) == expected
        assert pairs(match_batch(matcher_of(filters), packed_of(messages))) == expected


def test_records_that_do_not_decode_match_nothing() -> None:
    messages: list[Given] = [({"kind": "book"}, "", 0, 0, 0)] * 3
    whole = packed_of(messages)
    for broken in (b"", b"\x02\x90", b"\x01\xc1", whole.column("metadata")[1].as_py()[:-1]):
        records = whole.column("metadata").to_pylist()
        records[1] = broken
        batch = whole.set_column(1, "metadata", pa.array(records, pa.binary()))
        found = match_batch(matcher_of({"books": "kind = 'book'"}), batch)
        assert pairs(found) == [(7, "books"), (9, "books")]


def test_added_columns_count_before_the_messages_own() -> None:
    messages = [({"tier": "gold"}, "", 0, 0, 0), ({"tier": "tin"}, "", 0, 0, 0), ({}, "", 0, 0, 0)]
    found = match_batch(
        matcher_of({"gold": "tier = 'gold'"}),
        batch_of(messages),  # type: ignore[arg-type]
        {"tier": ["tin", "gold", "gold"]},
    )
    assert found.column("offset").to_pylist() == [8, 9]


@pytest.mark.parametrize("wrong", ['{"kind":"book"},{}', "", "null", '{"a":[]}', '{"a"'])
def test_attributes_that_are_no_json_object_are_an_error(wrong: str) -> None:
    batch = batch_of([({"kind": "book"}, "", 0, 0, 0)] * 3)
    texts = batch.column("attributes_json").to_pylist()
    batch = batch.set_column(1, "attributes_json", pa.array([texts[0], wrong, texts[2]]))
    with pytest.raises(msgspec.DecodeError):
        match_batch(matcher_of(FILTERS), batch)


def test_what_a_transformation_has_left_null_is_unknown() -> None:
    batch = batch_of([({"kind": "book"}, "a", 5, 1_700_000_000_005, 1)] * 2)
    for at, name in enumerate(batch.schema.names):
        if name != "offset":
            value = batch.column(name)[0].as_py()
            column = pa.array([value, None], batch.schema.field(name).type)
            batch = batch.set_column(at, pa.field(name, column.type), column)
    found = pairs(match_batch(matcher_of(FILTERS), batch))
    assert found == [(7, "books"), (7, "first"), (7, "late")]


def test_compiled_filters_are_kept_but_not_for_ever() -> None:
    compiled.cache_clear()
    first = matcher_of({"a": "x = 0"})
    assert matcher_of({"a": "x = 0"}) is first
    for number in range(20):
        matcher_of({"a": f"x = {number}"})
    assert compiled.cache_info().currsize <= 8
    assert matcher_of({"a": "x = 19"}).match([Row({"x": 19})]) == [["a"]]
