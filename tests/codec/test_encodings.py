from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptRecord, InvalidInput
from penstock.store.codec import opendata as enc

U64 = st.integers(0, 2**64 - 1)
# Bytes that meet the escapes and the carry of `increment` far more often than chance would.
EDGY = st.lists(st.sampled_from([0, 1, 2, 3, 0x61, 0xFE, 0xFF]), max_size=6).map(bytes)
RAW = st.one_of(EDGY, st.binary(max_size=20))


@pytest.mark.parametrize(
    ("raw", "encoded"),
    [
        (b"hello", "68 65 6c 6c 6f 00"),
        (b"", "00"),
        (b"\x00", "01 01 00"),
        (b"\x01", "01 02 00"),
        (b"\xff", "ff 00"),
        (b"\x01\x02\x00\x01", "01 02 02 01 01 01 02 00"),
    ],
)
def test_terminated_bytes(raw: bytes, encoded: str) -> None:
    assert enc.terminated(raw) == bytes.fromhex(encoded)
    assert enc.read_terminated(bytes.fromhex(encoded), 0) == (raw, len(bytes.fromhex(encoded)))


@given(RAW, st.binary(max_size=4), st.binary(max_size=4))
def test_terminated_bytes_round_trip_inside_a_key(raw: bytes, before: bytes, after: bytes) -> None:
    key = before + enc.terminated(raw) + after
    assert enc.read_terminated(key, len(before)) == (raw, len(key) - len(after))


@given(RAW, RAW, st.binary(max_size=4), st.binary(max_size=4))
def test_terminated_bytes_sort_as_the_raw_bytes(a: bytes, b: bytes, x: bytes, y: bytes) -> None:
    if a == b:
        assert enc.terminated(a) == enc.terminated(b)
    else:
        # Whatever follows in the key must not change the order.
        assert (enc.terminated(a) + x < enc.terminated(b) + y) == (a < b)


@pytest.mark.parametrize("encoded", ["", "61", "01 00", "01 03 00", "61 01 00", "01 01 01 00"])
def test_wrong_terminated_bytes(encoded: str) -> None:
    with pytest.raises(CorruptRecord, match="queue: "):
        enc.read_terminated(bytes.fromhex(encoded), 0, "queue")


@pytest.mark.parametrize(
    ("raw", "after"),
    [
        (b"a", b"b"),
        (b"a\xff\xff", b"b"),
        (b"\x00", b"\x01"),
        (b"a\xfe", b"a\xff"),
        (b"\xff", None),
        (b"\xff\xff", None),
        (b"", None),
    ],
)
def test_increment(raw: bytes, after: bytes | None) -> None:
    assert enc.increment(raw) == after


@given(RAW, RAW)
def test_increment_bounds_exactly_the_extensions(raw: bytes, other: bytes) -> None:
    after = enc.increment(raw)
    assert (raw <= other and (after is None or other < after)) == other.startswith(raw)


def test_utf8() -> None:
    encoded = bytes.fromhex("05 00 68 65 6c 6c 6f")
    assert enc.utf8("hello") == encoded
    assert enc.read_utf8(b"??" + encoded + b"?", 2) == ("hello", 9)
    assert enc.utf8("é") == bytes.fromhex("02 00 c3 a9")
    assert enc.utf8("") == b"\0\0"
    assert len(enc.utf8("x" * 65_535)) == 65_537
    with pytest.raises(InvalidInput, match="65535"):
        enc.utf8("x" * 65_536)


@pytest.mark.parametrize("encoded", ["", "05", "05 00 68", "02 00 c3 28", "01 00 ff"])
def test_wrong_utf8(encoded: str) -> None:
    with pytest.raises(CorruptRecord, match="Utf8: "):
        enc.read_utf8(bytes.fromhex(encoded), 0)


@given(st.text(max_size=20), st.binary(max_size=20))
def test_utf8_round_trips_before_other_bytes(text: str, raw: bytes) -> None:
    encoded = enc.utf8(text)
    assert enc.read_utf8(encoded + raw, 0) == (text, len(encoded))


@pytest.mark.parametrize(
    ("x", "encoded"),
    [
        (0, "00"),
        (15, "0f"),
        (16, "10 10"),
        (100, "10 64"),
        (4095, "1f ff"),
        (4096, "20 10 00"),
        (2**64 - 1, "80 ff ff ff ff ff ff ff ff"),
    ],
)
def test_var_u64(x: int, encoded: str) -> None:
    assert enc.var_u64(x) == bytes.fromhex(encoded)
    assert enc.read_var_u64(bytes.fromhex(encoded), 0) == (x, len(bytes.fromhex(encoded)))


@given(U64, U64, st.binary(max_size=3))
def test_var_u64_round_trips_and_sorts_as_the_number(x: int, y: int, after: bytes) -> None:
    assert enc.read_var_u64(enc.var_u64(x) + after, 0) == (x, len(enc.var_u64(x)))
    assert (enc.var_u64(x) < enc.var_u64(y)) == (x < y)


@pytest.mark.parametrize("x", [-1, 2**64])
def test_var_u64_has_bounds(x: int) -> None:
    with pytest.raises(InvalidInput):
        enc.var_u64(x)


@pytest.mark.parametrize(
    "encoded",
    [
        "",
        "10",
        "20 10",
        "10 0f",  # 15 fits in one byte
        "20 00 10",
        "81 00 00 00 00 00 00 00 00",  # 2^64
        "90 ff ff ff ff ff ff ff ff ff",
    ],
)
def test_wrong_var_u64(encoded: str) -> None:
    with pytest.raises(CorruptRecord, match="var_u64: "):
        enc.read_var_u64(bytes.fromhex(encoded), 0)


def test_seq_block() -> None:
    encoded = bytes.fromhex("01 02 03 04 05 06 07 08 11 12 13 14 15 16 17 18")
    block = (0x0102030405060708, 0x1112131415161718)
    assert enc.encode_seq_block(*block) == encoded
    assert enc.decode_seq_block(encoded) == block
    for wrong in (encoded[:-1], encoded + b"\0", b""):
        with pytest.raises(CorruptRecord, match="SeqBlock"):
            enc.decode_seq_block(wrong)
