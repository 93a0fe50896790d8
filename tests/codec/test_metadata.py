"""Many metadata records at once read as each of them does by itself."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptRecord
from penstock.packing import Envelope, metadata_head
from penstock.store.codec.metadata import (
    Metadata,
    decode_heads,
    decode_many,
    decode_metadata,
    encode_metadata,
)

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=5), st.floats()
)
METADATA = st.builds(
    Metadata,
    st.integers(0, 2**48),
    st.text(max_size=5),
    st.integers(0, 9),
    st.integers(0, 2**24),
    st.integers(0, 2**32),
    st.dictionaries(st.text(max_size=4), VALUES, max_size=4),
)
GOOD = METADATA.map(encode_metadata)
# Cut short, of another version, with something after its end, or anything at all.
BAD = st.one_of(
    st.tuples(GOOD, st.integers(0, 9)).map(lambda each: each[0][: each[1]]),
    GOOD.map(lambda record: b"\x02" + record[1:]),
    GOOD.map(lambda record: record + b"\x01"),
    st.binary(max_size=12),
)


def each(record: bytes) -> Metadata | None:
    try:
        return decode_metadata(record)
    except CorruptRecord:
        return None


def head(metadata: Metadata) -> tuple[int, str, int, int, int]:
    return (
        metadata.published_at_ms,
        metadata.group,
        metadata.priority,
        metadata.size,
        metadata.delay_ms,
    )


@given(st.lists(GOOD, max_size=6))
def test_many_records_that_are_whole(records: list[bytes]) -> None:
    # By text: a float that is not a number does not equal itself.
    assert repr(decode_many(records)) == repr([each(record) for record in records])
    heads = [head(found) for found in decode_heads(records)]  # type: ignore[arg-type]
    assert heads == [head(decode_metadata(record)) for record in records]


@given(st.lists(GOOD, max_size=4), BAD, st.lists(GOOD, max_size=4))
def test_one_that_is_damaged_spoils_no_other(
    before: list[bytes], bad: bytes, after: list[bytes]
) -> None:
    records = [*before, bad, *after]
    assert repr(decode_many(records)) == repr([each(record) for record in records])
    heads = decode_heads(records)
    for record, found in zip(records, heads, strict=True):
        expected = each(record)
        if expected is not None:
            assert found is not None
            assert head(expected) == head(found)  # type: ignore[arg-type]


def test_heads_do_not_look_at_attributes() -> None:
    record = encode_metadata(Metadata(5, "g", 1, 2, 3, {}))[:-1] + b"\x07"
    assert each(record) is None
    assert decode_many([record]) == [None]
    found = decode_heads([record])[0]
    assert found is not None
    assert (found.published_at_ms, found.group, found.delay_ms) == (5, "g", 3)


@given(metadata=METADATA)
def test_a_publish_lays_a_record_out_as_the_codec_does(metadata: Metadata) -> None:
    about = (metadata.group, metadata.priority, metadata.delay_ms, metadata.attributes)
    envelope = Envelope(msgspec.msgpack.encode(about), *about)
    head = metadata_head(metadata.published_at_ms)
    assert envelope.metadata(head, metadata.size) == encode_metadata(metadata)
