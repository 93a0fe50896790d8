from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptRecord
from penstock.importers import queueber_keys as qb

if TYPE_CHECKING:
    from collections.abc import Callable

ID = bytes(range(0x10, 0x20))
ID_HEX = "101112131415161718191a1b1c1d1e1f"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (qb.available_key(ID), b"available/".hex() + ID_HEX),
        (qb.in_progress_key(ID), b"in_progress/".hex() + ID_HEX),
        (
            qb.visibility_key(258, ID),
            b"visibility_index/".hex() + "0000000000000102" + "2f" + ID_HEX,
        ),
        (qb.lease_key(ID), b"leases/".hex() + ID_HEX),
        (
            qb.lease_expiry_key(258, ID),
            b"lease_expiry/".hex() + "0000000000000102" + "2f" + ID_HEX,
        ),
    ],
)
def test_keys(key: bytes, expected: str) -> None:
    assert key.hex() == expected


@given(st.integers(0, 2**64 - 1), st.binary(min_size=1, max_size=20))
def test_keys_round_trip(secs: int, id_: bytes) -> None:
    assert qb.parse_available_key(qb.available_key(id_)) == id_
    assert qb.parse_in_progress_key(qb.in_progress_key(id_)) == id_
    assert qb.parse_visibility_key(qb.visibility_key(secs, id_)) == (secs, id_)
    assert qb.parse_lease_key(qb.lease_key(id_)) == id_
    assert qb.parse_lease_expiry_key(qb.lease_expiry_key(secs, id_)) == (secs, id_)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_indexes_sort_by_time(a: int, b: int) -> None:
    assert (qb.visibility_key(a, ID) < qb.visibility_key(b, ID)) == (a < b)
    assert (qb.lease_expiry_key(a, ID) < qb.lease_expiry_key(b, ID)) == (a < b)


WRONG_KEYS: list[tuple[Callable[[bytes], object], bytes]] = [
    (qb.parse_available_key, b""),
    (qb.parse_available_key, b"available/"),
    (qb.parse_available_key, b"in_progress/x"),
    (qb.parse_in_progress_key, b"available/x"),
    (qb.parse_lease_key, b"lease/x"),
    (qb.parse_visibility_key, b"visibility_index/12345678/"),
    (qb.parse_visibility_key, b"visibility_index/12345678.x"),
    (qb.parse_visibility_key, b"lease_expiry/12345678/x"),
    (qb.parse_lease_expiry_key, b"lease_expiry/1234567/x"),
    (qb.parse_lease_expiry_key, b"12345678/x"),
]


@pytest.mark.parametrize(("parse", "key"), WRONG_KEYS)
def test_wrong_keys(parse: Callable[[bytes], object], key: bytes) -> None:
    with pytest.raises(CorruptRecord, match="Queueber key"):
        parse(key)
