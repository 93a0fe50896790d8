"""How many files the process may have open, and what is kept of them for the store.

A store that can't open its next file can't be written any more, whoever has taken the descriptors.
So some are kept back, and connections get what is left. Those of Flight are made by gRPC, which
knows no bound: the ones that have been silent for longest are closed before they touch the rest.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
from typing import Final

from penstock import limits

__all__ = ["close_idle", "limit", "raise_limit", "room_for_connections", "room_for_files"]

# Taken for the limit where there is none; more would be of no use.
_NO_LIMIT: Final = 1 << 20
_OWN_FILES: Final = "/proc/self/fd"
# Of what Flight's connections have for themselves, should the others take all that they may.
_FLIGHT_SHARE: Final = 4
# Of the system's struct tcp_info: milliseconds since data was sent, and since it was received.
_LAST_SENT_AT: Final = 44
_LAST_RECEIVED_AT: Final = 52
_TCP_INFO_BYTES: Final = 104


def limit() -> int:
    """Return how many files the process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Raise the number of files that the process may open as far as the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NO_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _NO_LIMIT)
    if wanted > limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def room_for_files() -> int:
    """Return how many files may be open before those are touched that are kept back."""
    allowed = limit()
    store = min(limits.MAX_STORE_FILES, allowed // limits.STORE_FILES_SHARE)
    return allowed - store - min(limits.SPARE_FILES, allowed // 8)


def _open_files() -> list[int]:
    """Return the descriptors of the process; none where the system does not tell."""
    try:
        return [int(each) for each in os.listdir(_OWN_FILES)]  # noqa: PTH208 - called often
    except FileNotFoundError:
        return []
    except OSError:
        # There is none left to list them with.
        return [each for each in range(limit()) if os.path.lexists(f"{_OWN_FILES}/{each}")]


def room_for_connections(most: int, *, flight: bool) -> int:
    """Return how many connections there may be beside what is open now, ``most`` at the most.

    Files do not count as open: they are the store's, for which enough is kept back.
    """
    taken = sum(1 for each in _open_files() if not _is_file(each)) or limits.SPARE_FILES
    room = room_for_files() - taken
    if flight:
        room -= room // _FLIGHT_SHARE
    return max(1, min(most, room))


def _is_file(descriptor: int) -> bool:
    try:
        return os.readlink(f"{_OWN_FILES}/{descriptor}").startswith("/")  # noqa: PTH115
    except FileNotFoundError:
        return True


def close_idle(port: int) -> tuple[int, int]:
    """Close connections of a port until what is kept back is not touched.

    Those that have been silent for longest go first. Return how many were closed, and how many more
    files may be open.
    """
    descriptors = _open_files()
    if len(descriptors) > room_for_files():
        descriptors = [each for each in descriptors if not _is_file(each)]
    free = room_for_files() - len(descriptors)
    if free >= 0:
        return 0, free
    found = sorted(
        (silent_ms, each)
        for each in descriptors
        if (silent_ms := _connected_to(each, port)) is not None
    )
    closed = 0
    for _, each in found[free:]:
        closed += _connected_to(each, port, end=True) is not None
    return closed, 0


def _connected_to(descriptor: int, port: int, *, end: bool = False) -> int | None:
    """Return how long a connection to the port has been silent; None if it is no such thing."""
    # Without a copy of it, for which there may be no descriptor left.
    try:
        seen = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if seen.type is not socket.SOCK_STREAM or seen.getsockname()[1] != port:
            return None
        seen.getpeername()
        facts = seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if end:
            seen.shutdown(socket.SHUT_RDWR)
    except (OSError, IndexError, TypeError):
        return None
    finally:
        # It is not ours to close: whoever made it does, once it is at its end.
        seen.detach()
    silent_ms: int = min(
        *struct.unpack_from("=I", facts, _LAST_SENT_AT),
        *struct.unpack_from("=I", facts, _LAST_RECEIVED_AT),
    )
    return silent_ms
