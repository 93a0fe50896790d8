"""Keys of the visibility index, and the memory of the indexed design.

A :class:`Directory` knows the groups and lanes of one queue.

This is Queueber's layout made for many queues. Its namespaces are tables here, so the keys drop
the namespace prefix; a queue's number takes its place::

    table available         queue u32 | id u64          StoredItem (codec/records.py): waiting
    table in_progress       queue u32 | id u64          the same record, with its lease filled in
    table visibility_index  01 | queue u32 | lane | visible_at u64 | id u64   empty
                            00 | queue u32 | visible_at u64 | id u64   key of `available`, then lane
    table groups            queue u32 | group           u32: FIFO messages in flight: group is held

All big-endian. A lane is ``terminated(group) | 255 - priority``. What can be claimed stands under
01, in the order in which it is claimed; what is delayed stands under 00 in the order in which it
comes due, and moves over when it does. On a FIFO queue ``visible_at`` is 0 in the 01 key, so that
ids alone decide, and a delayed message stands under both: it holds its place, and its group.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.engines import rows_of
from penstock.errors import CorruptRecord, StoreDamaged
from penstock.store.codec.records import decode_stored_item
from penstock.store.live import Beliefs, Item, count_attempt, group_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.engines import Batch, Table
    from penstock.store.live import Quarantine

DELAYED: Final = b"\x00"
READY: Final = b"\x01"
_LANE_AT: Final = 5
_SLOT_BYTES: Final = 16
# After every key of a range, behind its prefix: what follows a prefix never begins with ff.
PAST: Final = b"\xff" * (_SLOT_BYTES + 1)
# Bounds of recent messages: some 20 MB of each kind at the very most.
RECENT_ITEMS: Final = 20_000
# A lane of which all keys are in memory has up to so many.
KNOWN_KEYS: Final = 100
RECENT_BYTES: Final = 1_024

# After every key of every lane.
_LAST: Final = b"\xff"

_main: Final = Struct(">IQ")
pack_main, unpack_main = _main.pack, _main.unpack
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


def slot_of(index_key: bytes) -> bytes:
    """Return the time and id of an entry of what can be claimed."""
    return index_key[-_SLOT_BYTES:]


def past(prefix: bytes) -> bytes:
    """Return a key after every key with this prefix."""
    return prefix + PAST


class HeldGroup(msgspec.Struct):
    """A FIFO group that can't be claimed from, and where its lane goes on.

    It has ``count`` messages in flight, or (0) a head that is not visible yet.
    """

    count: int
    lanes: dict[bytes, bytes]


class Directory:
    """A queue's groups in turn, and the lowest key that may be alive of every lane.

    ``known`` has all keys of a short lane, ascending, since it was empty: a claim reads no index
    for those. A lane that is not there has to be read.
    """

    __slots__ = ("_groups", "held", "known", "prefix", "ring")

    def __init__(self, number: int, groups: Table) -> None:
        self._groups = groups
        self.prefix = READY + number.to_bytes(4, "big")
        # group -> {lane: lowest key that may be alive}; the first group is next in turn
        self.ring: OrderedDict[bytes, dict[bytes, bytes]] = OrderedDict()
        self.held: dict[bytes, HeldGroup] = {}
        self.known: dict[bytes, list[bytes]] = {}

    def all_lanes(self) -> Iterator[dict[bytes, bytes]]:
        """Give the lanes of every group, held or not."""
        yield from self.ring.values()
        yield from (held.lanes for held in self.held.values())

    def lowest(self) -> bytes:
        """Return the lowest key that may be alive of all lanes."""
        end = past(self.prefix)
        return min((key for lanes in self.all_lanes() for key in lanes.values()), default=end)

    def find_held(self, quarantine: Quarantine) -> bool:
        """Find the groups with messages in flight; whether these have to be counted."""
        number = self.prefix[1:]
        uncounted = False
        for key, record in rows_of(self._groups, number, past(number)):
            self.held[key[4:]] = HeldGroup(int.from_bytes(record, "big"), {})
            if len(record) != 4:
                quarantine("groups", key, record, f"{len(record)} bytes, not 4")
                self.held[key[4:]] = HeldGroup(1, {})
                uncounted = True
        return uncounted

    def find_lanes(self, index: Table) -> None:
        """Find the lanes in use by skipping from lane to lane: one seek each, at any depth."""
        seek, end = self.prefix, past(self.prefix)
        try:
            while rows := index.scan(seek, end, 1):
                lane = lane_of_key(rows[0][0])
                self.offer(lane, rows[0][0])
                seek = past(self.prefix + lane)
        except StoreDamaged:
            # From behind, as far as to where the damage is met again.
            while rows := index.scan_back(seek, end, 1):
                lane = lane_of_key(rows[0][0])
                end = self.prefix + lane
                self.offer(lane, index.scan(end, past(end), 1)[0][0])

    def offer(self, lane: bytes, key: bytes) -> None:
        """Note that a key can be claimed."""
        self.known.pop(lane, None)
        group = group_of(lane)
        held = self.held.get(group)
        lanes = self.ring.get(group) if held is None else held.lanes
        if lanes is None:
            self.ring[group] = {lane: key}
        else:
            lowest = lanes.get(lane)
            if lowest is None or key < lowest:
                lanes[lane] = key

    def add(self, lane: bytes, keys: list[bytes], *, learn: bool) -> bool:
        """Note new keys of a lane; say whether one of them is its lowest.

        ``learn``: keep all keys of the lane from here on if it was empty.
        """
        keys.sort()
        lanes = self.ring.get(lane[:-1])
        is_first = lanes is None or lanes.get(lane, _LAST) > keys[0]
        if is_first:
            is_empty = lane not in (lanes or ())
            self.offer(lane, keys[0])
            if learn and is_empty and len(keys) <= KNOWN_KEYS:
                self.known[lane] = keys
        elif (known := self.known.get(lane)) is not None:
            if keys[0] > known[-1] and len(known) + len(keys) <= KNOWN_KEYS:
                known += keys
            else:
                del self.known[lane]
        return is_first

    def take_known(
        self, lanes: dict[bytes, bytes], lane: bytes, room: int
    ) -> list[tuple[bytes, bytes]]:
        """Take up to so many keys of a lane of which all are known; values are not needed."""
        keys = self.known.pop(lane)
        if len(keys) > room:
            self.known[lane] = keys[room:]
            lanes[lane] = keys[room]
        else:
            del lanes[lane]
        return [(key, b"") for key in keys[:room]]

    def move_on(self, lane: bytes, gone: set[bytes], index: Table) -> None:
        """Note what a lane begins with now that keys of it are gone.

        A group without any lane must not take a turn: others would go without their share.
        """
        self.known.pop(lane, None)
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

    def hold(self, batch: Batch, group: bytes, count: int, lanes: dict[bytes, bytes]) -> None:
        """Take a FIFO group out of turn: it has messages in flight, or a head that is delayed."""
        self.held[group] = HeldGroup(count, lanes)
        if count:
            self._put_held(batch, group, count)

    def unhold(self, batch: Batch, group: bytes, count: int) -> None:
        """Count messages of a FIFO group out of flight; with the last it has its turn again."""
        held = self.held.get(group)
        if held is None:
            return
        held.count -= count
        if held.count <= 0:
            del self.held[group]
            if held.lanes:
                self.ring[group] = held.lanes
        self._put_held(batch, group, held.count)

    def unhold_all(self, batch: Batch, items: Iterable[Item]) -> None:
        """Count messages of any FIFO groups out of flight."""
        for group, count in Counter(group_of(item.lane) for item in items).items():
            self.unhold(batch, group, count)

    def _put_held(self, batch: Batch, group: bytes, count: int) -> None:
        key = self.prefix[1:] + group
        if count > 0:
            batch.put(key, count.to_bytes(4, "big"), self._groups.family)
        else:
            batch.delete(key, self._groups.family)

    def beliefs(
        self, index: Table, is_delayed: Callable[[Sequence[tuple[bytes, bytes]]], bool]
    ) -> Beliefs:
        """Tell of groups in flight, the beginnings of lanes, and groups that wait for nothing."""
        found = Beliefs({}, {})
        for lanes in self.all_lanes():
            found.bounds.update((("lane", lane), lowest) for lane, lowest in lanes.items())
        for group, held in self.held.items():
            if held.count:
                found.facts["in flight", group] = held.count
                continue
            # A FIFO group has one lane.
            heads = [index.scan(low, past(self.prefix + at), 1) for at, low in held.lanes.items()]
            if not any(is_delayed(head) for head in heads if head):
                found.facts["waits for nothing", group] = True
        return found


def differing(
    number: int,
    fresh: Mapping[bytes, tuple[bytes, Item]],
    claimed: Mapping[tuple[int, int], Item],
    available: Table,
    in_progress: Table,
) -> Iterator[bytes]:
    """Give the keys of a queue's messages that are not kept in memory as the tables have them."""
    prefix = pack_main(number, 0)[:4]
    mains = [main for main in fresh if main[:4] == prefix]
    for main, record in zip(mains, available.multi_get(mains), strict=True):
        if record is None or fresh[main] != (record, item_of(main, record)):
            yield main
    items = [item for (of, _), item in claimed.items() if of == number]
    mains = [pack_main(number, item.key) for item in items]
    for main, item, record in zip(mains, items, in_progress.multi_get(mains), strict=True):
        stored = None if record is None else item_of(main, record)
        if stored is not None:
            count_attempt(stored)
        if stored != item:
            yield main


def item_of(main: bytes, record: bytes) -> Item:
    """Decode a record of `available` or `in_progress`."""
    metadata, lane, attempts, forgiven, visible_at, lease = decode_stored_item(record)
    key = int.from_bytes(main[4:], "big")
    return Item(key, key, lane, attempts, forgiven, visible_at, metadata, lease)


def visible_at_of(record: bytes) -> int:
    """Return when a message becomes visible; 0 if its record does not decode."""
    try:
        return decode_stored_item(record)[4]
    except CorruptRecord:
        return 0
