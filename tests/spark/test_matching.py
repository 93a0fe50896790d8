"""Matching record batches of the log gives what each filter by itself says."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import msgspec
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.filters import Row, parse
from penstock.spark import matching
from penstock.spark.matching import match_batch, matcher_of
from penstock.tables.schemas import schema_of

FILTERS = {
    "books": "kind = 'book'",
    "dear": "price > 10",
    "first": "\"group\" = 'a' AND priority >= 5",
    "late": "published_at > 1700000000003",
    "small": "size < 3 AND kind IS NULL",
    "gold": "tier = 'gold'",
}
MESSAGES = st.lists(
    st.tuples(
        st.dictionaries(
            st.sampled_from(["kind", "price", "tier"]),
            st.sampled_from(["book", "gold", 5, 12.5, True, None]),
        ),
        st.sampled_from(["", "a"]),
        st.sampled_from([0, 5, 9]),
        st.integers(1_700_000_000_000, 1_700_000_000_006),
        st.integers(0, 6),
    ),
    max_size=12,
)
SCHEMA = schema_of("log", columns=list(matching.COLUMNS))


def batch_of(messages: list[tuple[dict[str, object], str, int, int, int]]) -> pa.RecordBatch:
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


@given(MESSAGES)
def test_batches_match_as_each_filter_does(
    messages: list[tuple[dict[str, object], str, int, int, int]],
) -> None:
    found = match_batch(matcher_of(FILTERS), batch_of(messages))
    assert list(zip(*found.to_pydict().values(), strict=True)) == [
        (7 + number, name)
        for number, message in enumerate(messages)
        for name in sorted(FILTERS)
        if parse(FILTERS[name]).matches(Row(*message))  # type: ignore[arg-type]
    ]


def test_added_columns_count_before_the_messages_own() -> None:
    messages = [({"tier": "gold"}, "", 0, 0, 0), ({"tier": "tin"}, "", 0, 0, 0), ({}, "", 0, 0, 0)]
    found = match_batch(
        matcher_of({"gold": "tier = 'gold'"}),
        batch_of(messages),  # type: ignore[arg-type]
        {"tier": ["tin", "gold", "gold"]},
    )
    assert found.column("offset").to_pylist() == [8, 9]


def test_compiled_filters_are_kept_but_not_for_ever() -> None:
    matching._matchers.clear()
    first = matcher_of({"a": "x = 0"})
    assert matcher_of({"a": "x = 0"}) is first
    for number in range(20):
        matcher_of({"a": f"x = {number}"})
    assert len(matching._matchers) <= 8
    assert matcher_of({"a": "x = 19"}).match([Row({"x": 19})]) == [["a"]]
