from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptRecord
from penstock.importers.queueber_source import (
    LEASE_EXPIRY,
    VISIBILITY_INDEX,
    parse_timed_key,
)

ID = bytes(range(0x10, 0x20))
INDEXES = (VISIBILITY_INDEX, LEASE_EXPIRY)


@pytest.mark.parametrize(
    ("namespace", "key"),
    [
        (VISIBILITY_INDEX, b"visibility_index/\0\0\0\0\0\0\1\2/" + ID),
        (LEASE_EXPIRY, b"lease_expiry/\0\0\0\0\0\0\1\2/" + ID),
    ],
)
def test_keys_of_indexes(namespace: bytes, key: bytes) -> None:
    assert parse_timed_key(namespace, key) == (258, ID)


@pytest.mark.parametrize(
    ("namespace", "key"),
    [
        (VISIBILITY_INDEX, b"visibility_index/12345678/"),
        (VISIBILITY_INDEX, b"visibility_index/12345678.x"),
        (VISIBILITY_INDEX, b"lease_expiry/12345678/x"),
        (LEASE_EXPIRY, b"lease_expiry/1234567/x"),
        (LEASE_EXPIRY, b"12345678/x"),
    ],
)
def test_wrong_keys_of_indexes(namespace: bytes, key: bytes) -> None:
    with pytest.raises(CorruptRecord, match="Queueber key"):
        parse_timed_key(namespace, key)


@given(st.sampled_from(INDEXES), st.binary(max_size=24), st.booleans())
def test_any_key_is_corrupt_or_is_read_whole(namespace: bytes, rest: bytes, own: bool) -> None:
    key = namespace + rest if own else rest
    try:
        secs, id_ = parse_timed_key(namespace, key)
        assert namespace + secs.to_bytes(8, "big") + b"/" + id_ == key
    except CorruptRecord:
        pass
