from __future__ import annotations

from importlib import resources
from typing import Any

import capnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.store.codec
from penstock.errors import CorruptRecord
from penstock.store.codec import records as stored

U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TIME = st.integers(0, 2**63 - 1)
ID = st.binary(min_size=8, max_size=8)
DATA = st.binary(max_size=40)

ITEM_HEX = (
    "01"  # waiting
    "01 00 02 01"  # attempts 1, forgiven 258
    "88 77 66 55 44 33 22 11"  # visible at
    "04 00 6c 61 6e 65"
    "68 65 6c 6c 6f"
)
FLYING_HEX = "02" + ITEM_HEX[2:] + "4c" * 16
ITEM = (b"hello", b"lane", 1, 258, 0x1122334455667788)

LEASE_HEX = (
    "00 00 00 00 0f 00 00 00"  # one segment of 15 words
    "00 00 00 00 04 00 03 00"  # a struct of 4 words of data and 3 pointers
    "02 00 00 00 00 00 00 00"  # 1,500 ms rounded up to seconds
    "dc 05 00 00 00 00 00 00"
    "07 00 00 00 00 00 00 00"
    "09 00 00 00 00 00 00 00"
    "09 00 00 00 16 00 00 00"  # 2 pointers, 2 words on
    "15 00 00 00 4a 00 00 00"  # 9 bytes, 5 words on
    "19 00 00 00 3a 00 00 00"  # 6 bytes and their NUL, 6 words on
    "05 00 00 00 42 00 00 00"  # 8 bytes, 1 word on, twice
    "05 00 00 00 42 00 00 00"
    "41 41 41 41 41 41 41 41 42 42 42 42 42 42 42 42"
    "69 6e 64 65 78 6b 65 79 39 00 00 00 00 00 00 00"
    "77 6f 72 6b 65 72 00 00"
)
LEASE = stored.LeaseRecord([b"AAAAAAAA", b"BBBBBBBB"], 1500, b"indexkey9", 7, 9, "worker")


@pytest.fixture(scope="module")
def schema() -> Any:
    source = resources.files(penstock.store.codec) / "queueber.capnp"
    with resources.as_file(source) as path:
        return capnp.load(str(path))


def encode_lease(lease: stored.LeaseRecord) -> bytes:
    return stored.encode_lease(
        lease.ids,
        lease.expiry_ms,
        lease.index_key,
        lease.claimed_at_ms,
        lease.queue,
        lease.consumer,
    )


def test_of_queuebers_items_the_schema_has_what_queueber_writes(schema: Any) -> None:
    assert [*schema.StoredItem.schema.fieldnames] == ["contents", "visibilityTsIndexKey", "id"]


def test_stored_item_bytes() -> None:
    assert stored.encode_stored_item(*ITEM) == bytes.fromhex(ITEM_HEX)
    assert stored.decode_stored_item(bytes.fromhex(ITEM_HEX)) == (*ITEM, stored.NO_LEASE)
    assert stored.with_lease(bytes.fromhex(ITEM_HEX), b"L" * 16) == bytes.fromhex(FLYING_HEX)
    assert stored.decode_stored_item(bytes.fromhex(FLYING_HEX)) == (*ITEM, b"L" * 16)


def test_lease_bytes() -> None:
    assert encode_lease(LEASE) == bytes.fromhex(LEASE_HEX)
    assert stored.decode_lease(bytes.fromhex(LEASE_HEX)) == LEASE


@given(DATA, DATA, U16, U16, U64, st.binary(min_size=16, max_size=16).filter(any))
def test_a_stored_item_is_read_as_it_was_written(
    metadata: bytes, lane: bytes, attempts: int, forgiven: int, visible_at_ms: int, lease: bytes
) -> None:
    item = (metadata, lane, attempts, forgiven, visible_at_ms)
    encoded = stored.encode_stored_item(*item)
    assert stored.decode_stored_item(encoded) == (*item, stored.NO_LEASE)
    flying = stored.with_lease(encoded, lease)
    assert stored.decode_stored_item(flying) == (*item, lease)
    assert stored.with_lease(flying, b"M" * 16) == stored.with_lease(encoded, b"M" * 16)


@given(st.lists(ID, max_size=6), TIME, DATA, TIME, U32, st.text(max_size=10))
def test_lease_is_what_pycapnp_writes(
    schema: Any,
    ids: list[bytes],
    expiry_ms: int,
    index_key: bytes,
    claimed_at_ms: int,
    queue: int,
    consumer: str,
) -> None:
    lease = stored.LeaseRecord(ids, expiry_ms, index_key, claimed_at_ms, queue, consumer)
    encoded = encode_lease(lease)
    message = schema.LeaseEntry.new_message()
    message.ids = ids
    message.expiryTsSecs = (expiry_ms + 999) // 1000
    message.expiryTsIndexKey = index_key
    message.expiryTsMs = expiry_ms
    message.claimedAtMs = claimed_at_ms
    message.queue = queue
    message.consumer = consumer
    assert encoded == message.to_bytes()
    assert stored.decode_lease(encoded) == lease


@pytest.mark.parametrize("count", [63, 64, 65, 128, 129, 5_000])
def test_leases_of_many_ids(schema: Any, count: int) -> None:
    ids = [n.to_bytes(8, "big") for n in range(count)]
    encoded = encode_lease(LEASE._replace(ids=ids))
    assert stored.decode_lease(encoded) == LEASE._replace(ids=ids)
    with schema.LeaseEntry.from_bytes(encoded) as message:
        assert list(message.ids) == ids
        assert message.consumer == "worker"


def test_fields_of_queueber_keep_their_places(schema: Any, tmp_path: Any) -> None:
    path = tmp_path / "theirs.capnp"
    path.write_text(
        "@0xd1c0ffee0ddba110;\n"
        "struct StoredItem { contents @0 :Data; visibilityTsIndexKey @1 :Data; id @2 :Data; }\n"
        "struct LeaseEntry { ids @0 :List(Data); expiryTsSecs @1 :UInt64;"
        " expiryTsIndexKey @2 :Data; }\n"
    )
    theirs = capnp.load(str(path))
    with theirs.LeaseEntry.from_bytes(bytes.fromhex(LEASE_HEX)) as lease:
        assert (list(lease.ids), lease.expiryTsSecs) == (LEASE.ids, 2)
    old = theirs.StoredItem.new_message(contents=b"c", visibilityTsIndexKey=b"k", id=b"i" * 16)
    with schema.StoredItem.from_bytes(old.to_bytes()) as item:
        assert (item.contents, item.id) == (b"c", b"i" * 16)


def test_every_changed_byte_of_a_layout_is_noticed() -> None:
    # What is not noticed must be a field: all of an item's bytes but the first and the lane's size.
    item_fields = {*range(1, 13), *range(15, 24)}
    # Expiry, inside its second; claimed at (of 63 bits), queue; ids, key and consumer.
    lease_fields = {24, *range(32, 39), *range(40, 44), *range(88, 113), *range(120, 126)}
    for hexed, fields, decode in (
        (ITEM_HEX, item_fields, stored.decode_stored_item),
        (LEASE_HEX, lease_fields, stored.decode_lease),
    ):
        good = bytes.fromhex(hexed)
        for at in range(len(good)):
            bad = bytearray(good)
            bad[at] ^= 0x80
            try:
                decode(bytes(bad))
            except CorruptRecord:
                # A byte of the consumer's name that is no longer UTF-8.
                assert at not in fields or (decode is stored.decode_lease and at >= 120)
            else:
                assert at in fields


def test_expiry_in_seconds_must_agree() -> None:
    bad = bytearray.fromhex(LEASE_HEX)
    bad[16] = 3
    with pytest.raises(CorruptRecord, match="LeaseEntry"):
        stored.decode_lease(bytes(bad))


def test_a_consumer_without_its_nul_is_refused() -> None:
    bad = bytearray(encode_lease(LEASE._replace(consumer="")))[:-8]
    bad[4] -= 1
    bad[68] = 2
    with pytest.raises(CorruptRecord, match="LeaseEntry"):
        stored.decode_lease(bytes(bad))


@pytest.mark.parametrize("size", [0, 7, 14, 15, 18, 30])
def test_short_items(size: int) -> None:
    for hexed in (ITEM_HEX, FLYING_HEX):
        if size < len(ITEM_HEX.replace(" ", "")) // 2 - len(ITEM[0]) or hexed is FLYING_HEX:
            with pytest.raises(CorruptRecord, match=f"StoredItem: {size} bytes"):
                stored.decode_stored_item(bytes.fromhex(hexed)[:size])


@pytest.mark.parametrize("size", [0, 7, 8, 55, 56, 63])
def test_short_leases(size: int) -> None:
    with pytest.raises(CorruptRecord, match=f"LeaseEntry: {size} bytes"):
        stored.decode_lease(bytes.fromhex(LEASE_HEX)[:size])


def test_ids_are_8_bytes() -> None:
    with pytest.raises(AssertionError, match="16 bytes"):
        stored.with_lease(bytes.fromhex(ITEM_HEX), bytes(15))
    with pytest.raises(AssertionError, match="8 bytes"):
        encode_lease(LEASE._replace(ids=[b"1234567"]))
