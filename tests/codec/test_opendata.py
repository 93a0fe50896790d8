from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptRecord, InvalidInput
from penstock.store.codec import opendata as od

QUEUE = st.one_of(
    st.binary(max_size=12), st.lists(st.sampled_from([0, 1, 2, 255]), max_size=5).map(bytes)
)
U64 = st.integers(0, 2**64 - 1)
U16 = st.integers(0, 2**16 - 1)

BUCKET = 0x1000_0000_0000_0014  # exponent 1, number 20
ORDERS = "6f 72 64 65 72 73"
TWENTY = "10 00 00 00 00 00 00 14"
SEVEN = "00 00 00 00 00 00 00 07"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (od.payload_key(7), f"01 01 {SEVEN}"),
        (od.ACTIVE.key(b"orders", BUCKET), f"02 02 {ORDERS} 00 {TWENTY}"),
        (od.ACTIVE.key(b"a\x00\x01", BUCKET), f"02 02 61 01 01 01 02 00 {TWENTY}"),
        (od.DONE.key(b"orders", BUCKET, 7), f"02 03 {ORDERS} 00 {TWENTY} {SEVEN}"),
        (od.DONE.key(b"orders", BUCKET, 0), f"02 03 {ORDERS} 00 {TWENTY} {'00 ' * 8}"),
        (od.FAILED.key(b"orders", BUCKET, 7), f"02 04 {ORDERS} 00 {TWENTY} {SEVEN}"),
        (od.ATTEMPTS.key(b"orders", 7, 258), f"02 05 {ORDERS} 00 {SEVEN} 01 02"),
        (od.SUMMARY.key(b"orders", BUCKET), f"02 09 {ORDERS} 00 {TWENTY}"),
        (od.PAYLOAD, "01 01"),
        (od.ACTIVE.prefix(b"orders"), f"02 02 {ORDERS} 00"),
        (od.DONE.prefix(b"orders"), f"02 03 {ORDERS} 00"),
        (od.FAILED.prefix(b"orders"), f"02 04 {ORDERS} 00"),
        (od.ATTEMPTS.prefix(b"orders"), f"02 05 {ORDERS} 00"),
        (od.SUMMARY.prefix(b"orders"), f"02 09 {ORDERS} 00"),
    ],
)
def test_keys(key: bytes, expected: str) -> None:
    assert key.hex(" ") == bytes.fromhex(expected).hex(" ")


def test_parsed_keys() -> None:
    assert od.ACTIVE.parse(od.ACTIVE.key(b"orders", BUCKET)) == (b"orders", BUCKET)
    assert od.DONE.parse(od.DONE.key(b"orders", BUCKET, 0)) == (b"orders", BUCKET, 0)
    assert od.FAILED.parse(od.FAILED.key(b"q", BUCKET, 3)) == (b"q", BUCKET, 3)
    assert od.ATTEMPTS.parse(od.ATTEMPTS.key(b"q", 7, 1)) == (b"q", 7, 1)


@given(QUEUE, U64, U64, U16)
def test_keys_round_trip(queue: bytes, id_: int, part: int, attempt: int) -> None:
    assert od.ACTIVE.parse(od.ACTIVE.key(queue, id_)) == (queue, id_)
    assert od.DONE.parse(od.DONE.key(queue, id_, part)) == (queue, id_, part)
    assert od.FAILED.parse(od.FAILED.key(queue, id_, part)) == (queue, id_, part)
    assert od.ATTEMPTS.parse(od.ATTEMPTS.key(queue, id_, attempt)) == (queue, id_, attempt)


@given(QUEUE, U64, QUEUE, U64)
def test_keys_sort_by_queue_then_bucket(a: bytes, i: int, b: bytes, j: int) -> None:
    assert (od.ACTIVE.key(a, i) < od.ACTIVE.key(b, j)) == ((a, i) < (b, j))


@given(QUEUE, QUEUE, U64, U64)
def test_a_prefix_holds_its_own_queue_only(a: bytes, b: bytes, i: int, j: int) -> None:
    assert od.ACTIVE.key(b, i).startswith(od.ACTIVE.prefix(a)) == (a == b)
    assert od.DONE.key(b, i, j).startswith(od.DONE.prefix(a)) == (a == b)
    assert od.FAILED.key(b, i, j).startswith(od.FAILED.prefix(a)) == (a == b)
    assert od.ATTEMPTS.key(b, i, 1).startswith(od.ATTEMPTS.prefix(a)) == (a == b)


WRONG_KEYS: list[tuple[od.QueueKeys, str]] = [
    (od.ACTIVE, "02"),
    (od.ACTIVE, f"02 03 61 00 {TWENTY}"),
    (od.ACTIVE, f"01 02 61 00 {TWENTY}"),
    (od.ACTIVE, f"03 02 61 00 {TWENTY}"),
    (od.ACTIVE, f"02 02 61 {TWENTY[:2]}"),
    (od.ACTIVE, f"02 02 61 00 {TWENTY} 00"),
    (od.ACTIVE, f"02 02 61 01 03 00 {TWENTY}"),
    (od.DONE, f"01 03 61 00 {TWENTY} {SEVEN}"),
    (od.DONE, f"02 03 61 00 {TWENTY}"),
    (od.FAILED, f"02 04 61 00 {TWENTY} 00"),
    (od.ATTEMPTS, f"02 05 61 00 {SEVEN}"),
    (od.ATTEMPTS, f"01 05 61 00 {SEVEN} 00 01"),
]


@pytest.mark.parametrize(("keys", "key"), WRONG_KEYS)
def test_wrong_keys(keys: od.QueueKeys, key: str) -> None:
    with pytest.raises(CorruptRecord, match=f"^{keys.record}: "):
        keys.parse(bytes.fromhex(key))


def test_ids() -> None:
    assert [od.capacity(e) for e in range(5)] == [1, 10, 100, 1_000, 10_000]
    assert od.make_id(1, 20) == BUCKET
    assert od.make_id(4, 2**60 - 1) == 0x4FFF_FFFF_FFFF_FFFF
    assert od.split_id(BUCKET) == (1, 20)
    assert od.bucket_of(od.make_id(1, 23)) == BUCKET
    assert od.bucket_of(od.make_id(0, 23)) == od.make_id(0, 23)
    assert od.bucket_of(od.make_id(4, 9_999)) == od.make_id(4, 0)
    assert od.bucket_of(od.make_id(4, 10_000)) == od.make_id(4, 10_000)


@given(st.integers(0, 4), st.integers(0, 2**60 - 1))
def test_ids_round_trip_and_bucket_rule(exponent: int, number: int) -> None:
    claim = od.make_id(exponent, number)
    size = 10**exponent
    assert od.split_id(claim) == (exponent, number)
    assert od.split_id(od.bucket_of(claim)) == (exponent, (number // size) * size)


@pytest.mark.parametrize("exponent", [-1, 5, 15])
def test_exponents_have_bounds(exponent: int) -> None:
    with pytest.raises(InvalidInput, match="0 to 4"):
        od.capacity(exponent)
    with pytest.raises(InvalidInput, match="0 to 4"):
        od.make_id(exponent, 0)


@pytest.mark.parametrize("number", [-1, 2**60])
def test_numbers_have_bounds(number: int) -> None:
    with pytest.raises(InvalidInput, match=r"2\^60"):
        od.make_id(0, number)


@pytest.mark.parametrize("id_", [0x5000_0000_0000_0000, 0xFFFF_FFFF_FFFF_FFFF, -1])
def test_ids_of_no_exponent_are_corrupt(id_: int) -> None:
    with pytest.raises(CorruptRecord, match="exponent"):
        od.split_id(id_)
    with pytest.raises(CorruptRecord, match="exponent"):
        od.bucket_of(id_)
