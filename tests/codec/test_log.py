from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptRecord, InvalidInput
from penstock.store.codec import opendata as log

if TYPE_CHECKING:
    from collections.abc import Callable

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
KEY = st.one_of(
    st.binary(max_size=10), st.lists(st.sampled_from([0, 1, 2, 255]), max_size=5).map(bytes)
)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (log.entry_key(1, b"k", 100), "03 01 00 00 00 01 10 6b 00 10 64"),
        (log.entry_key(258, b"\x00", 0), "03 01 00 00 01 02 10 01 01 00 00"),
        (log.entry_prefix(1, b"k"), "03 01 00 00 00 01 10 6b 00"),
        (log.SEQ_BLOCK_KEY, "03 01 00 00 00 00 20"),
        (log.SEGMENT_META_PREFIX, "03 01 00 00 00 00 30"),
        (log.segment_meta_key(258), "03 01 00 00 00 00 30 00 00 01 02"),
        (log.listing_key(1, b"k\x00"), "03 01 00 00 00 01 40 6b 00"),
        (log.listing_key(1, b""), "03 01 00 00 00 01 40"),
    ],
)
def test_keys(key: bytes, expected: str) -> None:
    assert key.hex(" ") == expected


def test_metadata_log_key() -> None:
    assert log.metadata_log_key("i1", "main") == b"opendata-queue/i1/messages/metadata/main"


def test_segment_meta() -> None:
    value = bytes.fromhex("01 02 03 04 05 06 07 08 ff ff ff ff ff ff ff fe")
    assert log.encode_segment_meta(0x0102030405060708, -2) == value
    assert log.decode_segment_meta(value) == (0x0102030405060708, -2)
    for wrong in (b"", value[:-1], value + b"\0"):
        with pytest.raises(CorruptRecord, match="segment meta"):
            log.decode_segment_meta(wrong)


def test_metadata_batch() -> None:
    value = bytes.fromhex(
        "02 00 07 00 00 00 00 00 00 00 02 00 00 00 68 69 08 00 00 00 00 00 00 00 00 00 00 00"
    )
    assert log.encode_metadata_batch([(7, b"hi"), (8, b"")]) == value
    assert log.decode_metadata_batch(value) == [(7, b"hi"), (8, b"")]
    assert log.encode_metadata_batch([]) == bytes(2)
    with pytest.raises(InvalidInput, match="65535"):
        log.encode_metadata_batch([(0, b"")] * 65_536)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "01",
        "01 00",
        "00 00 00",
        "01 00 07 00 00 00 00 00 00 00 03 00 00 00 68 69",
        "01 00 07 00 00 00 00 00 00 00 02 00 00 00 68 69 00",
        "02 00 07 00 00 00 00 00 00 00 02 00 00 00 68 69",
    ],
)
def test_wrong_metadata_batch(value: str) -> None:
    with pytest.raises(CorruptRecord, match="metadata record"):
        log.decode_metadata_batch(bytes.fromhex(value))


@given(U32, KEY, U64, st.lists(st.tuples(U64, st.binary(max_size=8)), max_size=5))
def test_round_trips(segment: int, key: bytes, seq: int, items: list[tuple[int, bytes]]) -> None:
    assert log.parse_entry_key(log.entry_key(segment, key, seq)) == (segment, key, seq)
    assert log.parse_listing_key(log.listing_key(segment, key)) == (segment, key)
    assert log.parse_segment_meta_key(log.segment_meta_key(segment)) == segment
    assert log.decode_metadata_batch(log.encode_metadata_batch(items)) == items


@given(U32, KEY, U64, U32, KEY, U64)
def test_entries_sort_by_segment_key_and_sequence(
    s: int, a: bytes, i: int, t: int, b: bytes, j: int
) -> None:
    assert (log.entry_key(s, a, i) < log.entry_key(t, b, j)) == ((s, a, i) < (t, b, j))


WRONG_KEYS: list[tuple[Callable[[bytes], object], str]] = [
    (log.parse_entry_key, ""),
    (log.parse_entry_key, "03 01 00 00 00 01"),
    (log.parse_entry_key, "03 01 00 00 00 01 40 6b 00 10 64"),
    (log.parse_entry_key, "03 02 00 00 00 01 10 6b 00 10 64"),
    (log.parse_entry_key, "03 01 00 00 00 01 10 6b"),
    (log.parse_entry_key, "03 01 00 00 00 01 10 6b 00"),
    (log.parse_entry_key, "03 01 00 00 00 01 10 6b 00 10"),
    (log.parse_entry_key, "03 01 00 00 00 01 10 6b 00 10 64 00"),
    (log.parse_listing_key, "03 01 00 00 00 01 10 6b"),
    (log.parse_segment_meta_key, "03 01 00 00 00 00 30 00 00 01"),
    (log.parse_segment_meta_key, "03 01 00 00 00 00 20 00 00 01 02"),
]


@pytest.mark.parametrize(("parse", "key"), WRONG_KEYS)
def test_wrong_keys(parse: Callable[[bytes], object], key: str) -> None:
    with pytest.raises(CorruptRecord, match=" key: "):
        parse(bytes.fromhex(key))
