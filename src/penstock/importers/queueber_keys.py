"""Keys of a Queueber database, which the importer reads and which ours are modelled on.

Key map; each name is also a column family (older databases have all of them in ``default``)::

    available/<id>               StoredItem    an item that can be polled
    in_progress/<id>             StoredItem    an item under a lease
    visibility_index/<s>/<id>    available/<id>    by the second from which it is visible
    leases/<lease>               LeaseEntry    the items of a lease
    lease_expiry/<s>/<lease>     leases/<lease>    by the second at which it ends

``<s>`` is seconds since the epoch, u64 big-endian. Ids and leases are UUIDv7, 16 bytes, but
their length is not checked here: nothing depends on it, and an import must not stop at an
item that somebody named otherwise. The records are in ``queueber.capnp``.

Upgrade recipe: none. The keys carry no version and are not ours to change.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from penstock.errors import CorruptRecord

__all__ = [
    "AVAILABLE",
    "IN_PROGRESS",
    "LEASES",
    "LEASE_EXPIRY",
    "VISIBILITY_INDEX",
    "available_key",
    "in_progress_key",
    "lease_expiry_key",
    "lease_key",
    "parse_available_key",
    "parse_in_progress_key",
    "parse_lease_expiry_key",
    "parse_lease_key",
    "parse_visibility_key",
    "visibility_key",
]

AVAILABLE: Final = b"available/"
IN_PROGRESS: Final = b"in_progress/"
VISIBILITY_INDEX: Final = b"visibility_index/"
LEASES: Final = b"leases/"
LEASE_EXPIRY: Final = b"lease_expiry/"

_SECS: Final = Struct(">Qc")


def available_key(id_: bytes) -> bytes:
    """Key of an item that can be polled."""
    return AVAILABLE + id_


def parse_available_key(key: bytes) -> bytes:
    """Give the item's id."""
    return _after(AVAILABLE, key)


def in_progress_key(id_: bytes) -> bytes:
    """Key of an item under a lease."""
    return IN_PROGRESS + id_


def parse_in_progress_key(key: bytes) -> bytes:
    """Give the item's id."""
    return _after(IN_PROGRESS, key)


def visibility_key(ts_secs: int, id_: bytes) -> bytes:
    """Key of an item in the index by time."""
    return VISIBILITY_INDEX + _SECS.pack(ts_secs, b"/") + id_


def parse_visibility_key(key: bytes) -> tuple[int, bytes]:
    """Give the second from which the item is visible, and its id."""
    return _timed(VISIBILITY_INDEX, key)


def lease_key(lease: bytes) -> bytes:
    """Key of a lease."""
    return LEASES + lease


def parse_lease_key(key: bytes) -> bytes:
    """Give the lease."""
    return _after(LEASES, key)


def lease_expiry_key(ts_secs: int, lease: bytes) -> bytes:
    """Key of a lease in the index by the time it ends."""
    return LEASE_EXPIRY + _SECS.pack(ts_secs, b"/") + lease


def parse_lease_expiry_key(key: bytes) -> tuple[int, bytes]:
    """Give the second at which the lease ends, and the lease."""
    return _timed(LEASE_EXPIRY, key)


def _after(prefix: bytes, key: bytes) -> bytes:
    rest = key.removeprefix(prefix)
    if not rest or len(rest) == len(key):
        raise CorruptRecord(f"Queueber key: {key!r} is not {prefix.decode()}<id>")
    return rest


def _timed(prefix: bytes, key: bytes) -> tuple[int, bytes]:
    rest = key.removeprefix(prefix)
    if len(rest) == len(key) or len(rest) < 10 or rest[8:9] != b"/":
        raise CorruptRecord(f"Queueber key: {key!r} is not {prefix.decode()}<seconds>/<id>")
    return int.from_bytes(rest[:8], "big"), rest[9:]
