"""Keys of the visibility index, and what memory keeps about a queue of the indexed design.

The key map is at the top of :mod:`penstock.stores.indexed`.
"""

from __future__ import annotations

from collections import OrderedDict
from struct import Struct
from typing import TYPE_CHECKING, Final

from penstock.stores.active import group_of

if TYPE_CHECKING:
    from penstock.kv import Table

__all__ = [
    "DELAYED",
    "READY",
    "Directory",
    "Held",
    "lane_of_key",
    "main_of",
    "pack_main",
    "pack_slot",
    "past",
    "timer_key",
    "visible_at_of_timer",
]

DELAYED: Final = b"\x00"
READY: Final = b"\x01"
_LANE_AT: Final = 5
_SLOT_BYTES: Final = 16

pack_main: Final = Struct(">IQ").pack
pack_slot: Final = Struct(">QQ").pack
_pack_timer: Final = Struct(">BIQQ").pack


def timer_key(queue: int, visible_at_ms: int, message_id: int) -> bytes:
    """Return the key under which a delayed message waits for its time."""
    return _pack_timer(0, queue, visible_at_ms, message_id)


def visible_at_of_timer(key: bytes) -> int:
    """Return when a delayed message comes due."""
    return int.from_bytes(key[_LANE_AT : _LANE_AT + 8], "big")


def main_of(index_key: bytes) -> bytes:
    """Return the key of the message that an index entry is for."""
    return index_key[1:5] + index_key[-8:]


def lane_of_key(index_key: bytes) -> bytes:
    """Return the lane of an entry of what can be claimed."""
    return index_key[_LANE_AT:-_SLOT_BYTES]


def past(prefix: bytes) -> bytes:
    """Return a key after every key with this prefix: what follows one never begins with ff."""
    return prefix + b"\xff" * (_SLOT_BYTES + 1)


class Held:
    """A FIFO group that can't be claimed from, and where its lane goes on.

    It has ``count`` messages in flight, or (0) a head that is not visible yet.
    """

    __slots__ = ("count", "lanes")

    def __init__(self, count: int, lanes: dict[bytes, bytes]) -> None:
        self.count = count
        self.lanes = lanes


class Directory:
    """A queue's groups in turn, and the lowest key that may be alive of every lane."""

    __slots__ = ("held", "prefix", "ring")

    def __init__(self, number: int) -> None:
        self.prefix = READY + number.to_bytes(4, "big")
        # group -> {lane: lowest key that may be alive}; the first group is next in turn
        self.ring: OrderedDict[bytes, dict[bytes, bytes]] = OrderedDict()
        self.held: dict[bytes, Held] = {}

    def offer(self, lane: bytes, key: bytes) -> None:
        """Note that a key can be claimed."""
        group = group_of(lane)
        held = self.held.get(group)
        lanes = self.ring.get(group) if held is None else held.lanes
        if lanes is None:
            self.ring[group] = {lane: key}
        else:
            lowest = lanes.get(lane)
            if lowest is None or key < lowest:
                lanes[lane] = key

    def move_on(self, lane: bytes, gone: set[bytes], index: Table) -> None:
        """Note what a lane begins with now that keys of it are gone.

        A group without any lane must not take a turn: others would go without their share.
        """
        group = group_of(lane)
        held = self.held.get(group)
        lanes = self.ring.get(group, {}) if held is None else held.lanes
        if lane not in lanes:
            return
        rows = index.scan(lanes[lane], past(self.prefix + lane), len(gone) + 1)
        left = next((key for key, _ in rows if key not in gone), None)
        if left is not None:
            lanes[lane] = left
            return
        del lanes[lane]
        if not lanes:
            self.ring.pop(group, None)

    def unblock(self, group: bytes) -> None:
        """Let a claim look again at a FIFO group whose head was not visible."""
        held = self.held.get(group)
        if held is not None and not held.count:
            del self.held[group]
            if held.lanes:
                self.ring[group] = held.lanes

    def let_go(self, group: bytes, count: int) -> int | None:
        """Count messages of a FIFO group out of flight; None if it has none, else what is left."""
        held = self.held.get(group)
        if held is None:
            return None
        held.count -= count
        if held.count <= 0:
            del self.held[group]
            if held.lanes:
                self.ring[group] = held.lanes
        return max(0, held.count)
