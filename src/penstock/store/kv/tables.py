"""Small tables that every verb writes to, and small memories beside tables.

::

    table payloads
    01 01 | message u64 BE       the payload (the RFC's record)
    02 0d | message u64 BE       u32 BE: how many queues hold it, if not exactly one

    table dedup
    00 | scope, terminated | dedup id            message u64 BE | expires_at u64 BE
    01 | expires_at u64 BE | message u64 BE      the 00 keys to forget then, as MessagePack array

    table leases         lease (16)                          Cap'n Proto LeaseEntry
    table lease_expiry   expiry_ms u64 BE | lease (16)       the lease's key

An LSM tree steps over deleted keys until it is compacted. A range that is deleted at its head, as a
queue is, would cost a scan from its beginning as much as everything that has ever passed through
it. :class:`FirstKeys` remembers where such a range begins. :class:`DueHeap` finds the next due
time.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from heapq import heapify, heappop, heappush
from struct import Struct
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

from penstock.engines import rows_of, scan_readable
from penstock.errors import CorruptRecord, StoreDamaged
from penstock.store.codec.claimed import FAMILY_BYTES
from penstock.store.codec.opendata import payload_key, terminated
from penstock.store.codec.records import LeaseRecord, decode_lease, encode_lease
from penstock.store.policy import dedup_scope

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from penstock.engines import Batch, Table
    from penstock.model import Value
    from penstock.store.live import Quarantine

log = logging.getLogger(__name__)

K = TypeVar("K")

# A range that nobody reads is looked at after this many deletions.
LOOK_AFTER: Final = 1_000
# Bounds of one read of a table in pages: pages are counted in rows, and rows differ in size.
PAGE_BYTES: Final = 4 << 20
PAGE_ROWS: Final = 4_096
# Bound of the leases in memory.
RECENT_LEASES: Final = 5_000
# After every expiry entry.
_LAST: Final = b"\xff" * 9
REFERENCES: Final = b"\x02\x0d"
_WINDOWS: Final = b"\x01"
_pair: Final = Struct(">QQ")


class FirstKeys(dict[bytes, bytes]):
    """The lowest key that may be alive in each range of a table, by the range's beginning.

    A writer that puts a key into a range notes it here. A writer that deletes keys need not, if the
    range is read as often as keys are deleted from it.
    """

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._table = table
        self._gone: dict[bytes, int] = {}

    def note(self, begin: bytes, key: bytes) -> None:
        """Note that a key is put into a range."""
        if key < self.get(begin, begin):
            self[begin] = key

    def note_gone(self, begin: bytes, end: bytes, count: int) -> None:
        """Note that keys of a rarely read range are deleted; its first key is then looked for."""
        gone = self._gone.get(begin, 0) + count
        self._gone[begin] = gone % LOOK_AFTER
        if gone >= LOOK_AFTER:
            # The keys were deleted all the same; a reader of the range tells of the damage.
            with suppress(StoreDamaged):
                self.scan(begin, end, 1)

    def forget(self, *begins: bytes) -> None:
        """Let go of ranges that nobody will read any more."""
        for begin in begins:
            self.pop(begin, None)
            self._gone.pop(begin, None)

    def scan(self, begin: bytes, end: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), ascending; the end may differ each time."""
        first = self.get(begin, begin)
        if first >= end:
            return []
        rows = self._table.scan(first, end, limit)
        self[begin] = rows[0][0] if rows else end
        return rows

    def page(
        self, begin: bytes, end: bytes, after: bytes, limit: int
    ) -> Sequence[tuple[bytes, bytes]]:
        """Read up to ``limit`` pairs of [begin, end), from a key on or from the first one."""
        return self._table.scan(after, end, limit) if after else self.scan(begin, end, limit)

    def rows(self, begin: bytes, end: bytes, *, page: int) -> Iterator[tuple[bytes, bytes]]:
        """Read every pair of [begin, end), a page at a time."""
        rows = self.scan(begin, end, page)
        yield from rows
        if len(rows) == page:
            yield from rows_of(self._table, rows[-1][0] + b"\0", end, page=page)

    def overrun(self) -> Iterator[bytes]:
        """Give a live key before the first key of each range: there must be none."""
        for begin, first in self.items():
            for key, _ in self._table.scan(begin, first, 1):
                yield key


def pages_of(
    table: Table, begin: bytes, end: bytes, page: int = 16
) -> Iterator[tuple[bytes, bytes]]:
    """Read every pair of [begin, end) in pages of about as many bytes; the first has ``page``."""
    while rows := table.scan(begin, end, page):
        yield from rows
        if len(rows) < page:
            return
        begin = rows[-1][0] + b"\0"
        size = sum(len(value) for _, value in rows) // len(rows)
        page = max(1, min(PAGE_ROWS, PAGE_BYTES // (size + 64)))


class DueHeap(Generic[K]):
    """A due time, or another rank, per key; finding the lowest costs little, however many."""

    __slots__ = ("_heap", "ranks")

    def __init__(self) -> None:
        self.ranks: dict[K, int] = {}
        # Entries that `ranks` no longer agrees with are dropped when they come up.
        self._heap: list[tuple[int, K]] = []

    def set(self, key: K, rank: int | None) -> None:
        """Set or (None) clear the rank of a key."""
        ranks = self.ranks
        if rank is None:
            ranks.pop(key, None)
            if not ranks:
                self._heap.clear()
        elif ranks.get(key) != rank:
            ranks[key] = rank
            heappush(self._heap, (rank, key))
            if len(self._heap) > 8 + 2 * len(ranks):
                self._heap = [(rank, key) for key, rank in ranks.items()]
                heapify(self._heap)

    def lower(self, key: K, rank: int) -> None:
        """Bring the rank of a key down, never up."""
        present = self.ranks.get(key)
        if present is None or rank < present:
            self.set(key, rank)

    def first(self) -> tuple[int, K] | None:
        """Return the lowest rank and its key."""
        heap, ranks = self._heap, self.ranks
        while heap:
            rank, key = heap[0]
            if ranks.get(key) == rank:
                return rank, key
            heappop(heap)
        return None


class Payloads:
    """The payload of each message, once, and how many queues hold the message.

    A message of one queue has no count: the queue that lets go of it finds none and deletes the
    payload. A message that no queue took has a count of 0 until its segment of the metadata log is
    dropped. Counts are read from committed rows, so one commit must not let two queues go of one
    message.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def get(self, message_ids: Sequence[int]) -> list[bytes | None]:
        """Read payloads."""
        return self.table.multi_get([payload_key(message_id) for message_id in message_ids])

    def _counts(self, message_ids: Sequence[int]) -> list[tuple[int, int | None]]:
        """Read the count of each message; None: one queue holds it."""
        keys = [REFERENCES + message_id.to_bytes(8, "big") for message_id in message_ids]
        return [
            (message_id, None if record is None else int.from_bytes(record, "big"))
            for message_id, record in zip(message_ids, self.table.multi_get(keys), strict=True)
        ]

    def refer(self, batch: Batch, message_id: int, queues: int) -> None:
        """Note how many queues hold a message."""
        key = REFERENCES + message_id.to_bytes(8, "big")
        if queues == 1:
            batch.delete(key, self.table.family)
        else:
            batch.put(key, queues.to_bytes(4, "big"), self.table.family)

    def shared(self, message_ids: Sequence[int]) -> set[int]:
        """Return the messages that not exactly one queue holds."""
        counts = self._counts(message_ids)
        return {message_id for message_id, count in counts if count is not None}

    def hold(self, batch: Batch, sizes: Mapping[int, int]) -> list[bool]:
        """Note that one more queue holds messages; False for those whose payload is gone.

        ``sizes``: the bytes of each one's payload. A table tells what it has by reading it.
        """
        held: list[bool] = []
        some: list[int] = []
        room = PAGE_BYTES
        for message_id, size in sizes.items():
            if some and size > room:
                held += [payload is not None for payload in self.get(some)]
                some, room = [], PAGE_BYTES
            some.append(message_id)
            room -= size
        held += [payload is not None for payload in self.get(some)]
        for (message_id, count), is_here in zip(self._counts(list(sizes)), held, strict=True):
            if is_here:
                self.refer(batch, message_id, (1 if count is None else count) + 1)
        return held

    def put_again(self, batch: Batch, message_id: int, payload: bytes) -> None:
        """Store a payload that was gone, for one queue to hold."""
        batch.put(payload_key(message_id), payload, self.table.family)
        self.refer(batch, message_id, 1)

    def drop_unheld(self, batch: Batch, message_ids: Sequence[int]) -> int:
        """Delete those payloads that no queue holds; return how many."""
        unheld = [message_id for message_id, count in self._counts(message_ids) if count == 0]
        for message_id in unheld:
            self.refer(batch, message_id, 1)
            batch.delete(payload_key(message_id), self.table.family)
        return len(unheld)

    def discard(self, batch: Batch, message_ids: Sequence[int]) -> tuple[int, int]:
        """Delete payloads whatever their count says; return how many were there, and bytes."""
        count = freed = 0
        for message_id in message_ids:
            # One at a time: nobody knows how large they are.
            payload = self.table.get(payload_key(message_id))
            if payload is not None:
                batch.delete(payload_key(message_id), self.table.family)
                self.refer(batch, message_id, 1)
                count, freed = count + 1, freed + len(payload)
        return count, freed

    def let_go(self, batch: Batch, message_ids: Sequence[int]) -> None:
        """Let one queue go of messages; a payload that no queue holds any more is deleted."""
        for message_id, count in self._counts(message_ids):
            if count is None:
                batch.delete(payload_key(message_id), self.table.family)
            else:
                self.refer(batch, message_id, max(1, count - 1))


class Dedup:
    """Dedup ids: a repeated publish within the window gets the first one's message id."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.first_keys = FirstKeys(table)

    def key(self, attributes: Mapping[str, Value], dedup_id: str) -> bytes:
        """Return the key of a message's dedup id."""
        return b"\x00" + terminated(dedup_scope(attributes)) + dedup_id.encode()

    def known(self, keys: list[bytes], now_ms: int) -> dict[bytes, int]:
        """Return the keys that the window knows, with their message ids."""
        known = {}
        for key, record in zip(keys, self._table.multi_get(keys), strict=True):
            # A record that is no pair is as good as none: it is written over.
            if record is not None and len(record) == _pair.size:
                message_id, expires_at = _pair.unpack(record)
                if expires_at > now_ms:
                    known[key] = message_id
        return known

    def remember(self, batch: Batch, ids: Mapping[bytes, int], expires_at_ms: int) -> None:
        """Note fresh messages until ``expires_at_ms``."""
        for key, message_id in ids.items():
            batch.put(key, _pair.pack(message_id, expires_at_ms), self._table.family)
        index_key = _WINDOWS + _pair.pack(expires_at_ms, next(iter(ids.values())))
        batch.put(index_key, msgspec.msgpack.encode(list(ids)), self._table.family)
        self.first_keys.note(_WINDOWS, index_key)

    def forget(self, batch: Batch, now_ms: int, limit: int) -> int:
        """Delete ids past the window, of up to ``limit`` publishes; return how many ids."""
        forgotten = 0
        end = _WINDOWS + (now_ms + 1).to_bytes(8, "big")
        for index_key, record in self.first_keys.scan(_WINDOWS, end, limit):
            batch.delete(index_key, self._table.family)
            try:
                keys = msgspec.msgpack.decode(record, type=list[bytes])
            except (msgspec.MsgspecError, ValueError):
                log.exception("forgot a damaged list of dedup ids")
                continue
            for key, present in zip(keys, self._table.multi_get(keys), strict=True):
                # The id may have been published anew since, with a window of its own.
                if present is not None and present[8:] <= now_ms.to_bytes(8, "big"):
                    batch.delete(key, self._table.family)
                    forgotten += 1
        return forgotten

    def next_due_ms(self) -> int | None:
        """Return when the next ids can be forgotten."""
        rows = self.first_keys.scan(_WINDOWS, b"\x02", 1)
        return int.from_bytes(rows[0][0][1:9], "big") if rows else None


class Leases:
    """Leases, each with the messages that it holds, and their expiry index.

    A lease's name is 14 bytes of identity and 2 of *split*. A claim makes split 0 and its receipts
    name that. Extending some of its messages moves them to a further split with a deadline of its
    own, so the receipts stay good and the expiry index has exactly one entry per live lease.
    """

    def __init__(self, leases: Table, expiry: Table) -> None:
        self.table = leases
        self._expiry = expiry
        self.first_keys = FirstKeys(expiry)
        # No lease expires before this; a bound that is too low costs one look at the index.
        self.none_before_ms = 0
        # Leases of recent claims, as the table has them: an ack that follows reads nothing.
        self.recent: dict[bytes, LeaseRecord] = {}

    def read(self, names: Iterable[bytes], quarantine: Quarantine) -> dict[bytes, LeaseRecord]:
        """Read leases by name, recent ones from memory; undecodable ones are left out."""
        found, unknown = {}, []
        for name in names:
            lease = self.recent.get(name)
            if lease is None:
                unknown.append(name)
            else:
                found[name] = lease
        if unknown:
            for name, record in zip(unknown, self.table.multi_get(unknown), strict=True):
                lease = self.decode(name, record, quarantine)
                if lease is not None:
                    found[name] = lease
        return found

    def decode(
        self, name: bytes, record: bytes | None, quarantine: Quarantine
    ) -> LeaseRecord | None:
        """Decode a lease; one that does not decode is put aside."""
        try:
            return None if record is None else decode_lease(record)
        except CorruptRecord as error:
            quarantine("leases", name, record or b"", str(error))
            return None

    def put(
        self,
        batch: Batch,
        name: bytes,
        keys: list[bytes],
        deadline_ms: int,
        claimed_at_ms: int,
        queue: int,
        consumer: str,
    ) -> None:
        """Write a new lease with its expiry entry; ``keys`` are sorted for it."""
        # Claims take most messages in the order of their keys: this costs a comparison for each.
        keys.sort()
        index_key = deadline_ms.to_bytes(8, "big") + name
        record = LeaseRecord(keys, deadline_ms, index_key, claimed_at_ms, queue, consumer)
        batch.put(name, encode_lease(*record), self.table.family)
        batch.put(index_key, name, self._expiry.family)
        if len(self.recent) >= RECENT_LEASES:
            self.recent.clear()
        self.recent[name] = record
        if index_key < self.first_keys.get(b"", b""):
            self.first_keys[b""] = index_key
        self.none_before_ms = min(self.none_before_ms, deadline_ms)

    def delete(self, batch: Batch, name: bytes, index_key: bytes) -> None:
        """Delete a lease and its expiry entry, always both."""
        self.recent.pop(name, None)
        batch.delete(name, self.table.family)
        batch.delete(index_key, self._expiry.family)
        self.first_keys.note_gone(b"", _LAST, 1)

    def let_go(
        self, batch: Batch, name: bytes, record: LeaseRecord, keys: Collection[bytes]
    ) -> None:
        """Take messages out of a lease; a lease that holds nothing more is deleted."""
        rest = [key for key in record.ids if key not in keys]
        if not rest:
            self.delete(batch, name, record.index_key)
        elif len(rest) < len(record.ids):
            self.recent.pop(name, None)
            batch.put(name, encode_lease(*record._replace(ids=rest)), self.table.family)

    def next_split(self, name: bytes, taken: dict[bytes, int]) -> bytes:
        """Return a split of this lease that is free, counting on from the highest in use.

        ``taken`` holds the splits that one batch has taken so far, which no read can see yet.
        """
        family = name[:FAMILY_BYTES]
        highest = taken.get(family)
        if highest is None:
            top = self.table.scan_back(family, family + b"\xff\xff\xff", 1)
            highest = int.from_bytes(top[0][0][FAMILY_BYTES:], "big") if top else 0
        taken[family] = highest + 1
        return family + (highest + 1).to_bytes(2, "big")

    def splits(self, name: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Read every live split of a lease, encoded."""
        family = name[:FAMILY_BYTES]
        return self.table.scan(family, family + b"\xff\xff\xff", 1 << 16)

    def due(
        self, now_ms: int, limit: int
    ) -> tuple[Sequence[tuple[bytes, bytes]], StoreDamaged | None]:
        """Read the expiry entries whose deadline has come, and why some can't be read."""
        end = (now_ms + 1).to_bytes(8, "big")
        try:
            rows = self.first_keys.scan(b"", end, limit)
            if not rows:
                self.none_before_ms = self.next_due_ms() or (1 << 63)
        except StoreDamaged:
            return scan_readable(self._expiry, b"", end, limit)
        return rows, None

    def differing(self) -> Iterator[bytes]:
        """Give the leases in memory that are not as the table has them: there must be none."""
        names = list(self.recent)
        for name, record in zip(names, self.table.multi_get(names), strict=True):
            if record is None or decode_lease(record) != self.recent[name]:
                yield name

    def next_due_ms(self) -> int | None:
        """Return the earliest deadline."""
        rows = self.first_keys.scan(b"", _LAST, 1)
        return int.from_bytes(rows[0][0][:8], "big") if rows else None
