"""Leases: which messages a claim holds until when, and for which consumer.

::

    table leases         lease (16)                          Cap'n Proto LeaseEntry
    table lease_expiry   expiry_ms u64 BE | lease (16)       the lease's key

A lease is 14 bytes of identity and 2 of *split*. A claim makes split 0 and its receipts name that.
Extending some of its messages moves them to a further split with a deadline of its own, so the
receipts stay good and the expiry index has exactly one entry per live lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.engines import get_each, scan_readable
from penstock.errors import StoreDamaged
from penstock.store.codec.stored import LeaseRecord, decode_lease, encode_lease
from penstock.store.kv.fronts import Fronts
from penstock.store.receipts import FAMILY_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from penstock.engines import Batch, Table

# Bound of the leases in memory.
RECENT_LEASES: Final = 5_000
# After every expiry entry.
_LAST: Final = b"\xff" * 9


class Leases:
    """The lease table and its expiry index."""

    def __init__(self, leases: Table, expiry: Table) -> None:
        self._leases = leases
        self._expiry = expiry
        self.fronts = Fronts(expiry)
        # No lease expires before this; a bound that is too low costs one look at the index.
        self.none_before_ms = 0
        # Leases of recent claims, as the table has them: an ack that follows reads nothing.
        self.recent: dict[bytes, LeaseRecord] = {}

    def get(self, leases: list[bytes]) -> list[bytes | None]:
        """Read the encoded records of leases."""
        return self._leases.multi_get(leases)

    def get_each(self, leases: list[bytes]) -> Sequence[bytes | StoreDamaged | None]:
        """Read the encoded records of leases; of one that can't be read, give the error."""
        return get_each(self._leases, leases)

    def put(
        self,
        batch: Batch,
        lease: bytes,
        keys: Sequence[bytes],
        deadline_ms: int,
        claimed_at_ms: int,
        queue: int,
        consumer: str,
    ) -> None:
        """Write a new lease with its expiry entry."""
        index_key = deadline_ms.to_bytes(8, "big") + lease
        record = encode_lease(keys, deadline_ms, index_key, claimed_at_ms, queue, consumer)
        batch.put(lease, record, self._leases.family)
        batch.put(index_key, lease, self._expiry.family)
        if len(self.recent) >= RECENT_LEASES:
            self.recent.clear()
        self.recent[lease] = LeaseRecord(
            list(keys), deadline_ms, index_key, claimed_at_ms, queue, consumer
        )
        if index_key < self.fronts.get(b"", b""):
            self.fronts[b""] = index_key
        self.none_before_ms = min(self.none_before_ms, deadline_ms)

    def delete(self, batch: Batch, lease: bytes, record: LeaseRecord) -> None:
        """Delete a lease and its expiry entry, always both."""
        self.recent.pop(lease, None)
        batch.delete(lease, self._leases.family)
        batch.delete(record.index_key, self._expiry.family)
        self.fronts.note_gone(b"", _LAST, 1)

    def drop_expiry_entry(self, batch: Batch, index_key: bytes, lease: bytes) -> None:
        """Delete an expiry entry whose lease is gone, or belongs to a queue that is gone."""
        self.recent.pop(lease, None)
        batch.delete(index_key, self._expiry.family)
        batch.delete(lease, self._leases.family)

    def let_go(
        self, batch: Batch, lease: bytes, record: LeaseRecord, keys: Collection[bytes]
    ) -> None:
        """Take messages out of a lease; a lease that holds nothing more is deleted."""
        rest = [key for key in record.ids if key not in keys]
        if not rest:
            self.delete(batch, lease, record)
        elif len(rest) < len(record.ids):
            self.recent.pop(lease, None)
            changed = encode_lease(
                rest,
                record.expiry_ms,
                record.index_key,
                record.claimed_at_ms,
                record.queue,
                record.consumer,
            )
            batch.put(lease, changed, self._leases.family)

    def next_split(self, lease: bytes, taken: dict[bytes, int]) -> bytes:
        """Return a split of this lease that is free, counting on from the highest in use.

        ``taken`` holds what one batch has taken so far, which no read can see yet.
        """
        family = lease[:FAMILY_BYTES]
        highest = taken.get(family)
        if highest is None:
            top = self._leases.scan_back(family, family + b"\xff\xff\xff", 1)
            highest = int.from_bytes(top[0][0][FAMILY_BYTES:], "big") if top else 0
        taken[family] = highest + 1
        return family + (highest + 1).to_bytes(2, "big")

    def splits(self, lease: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Read every live split of a lease, encoded."""
        family = lease[:FAMILY_BYTES]
        return self._leases.scan(family, family + b"\xff\xff\xff", 1 << 16)

    def due(
        self, now_ms: int, limit: int
    ) -> tuple[Sequence[tuple[bytes, bytes]], StoreDamaged | None]:
        """Read the expiry entries whose deadline has come: bounded at now + 1.

        With the reason, if not all of them can be read.
        """
        end = (now_ms + 1).to_bytes(8, "big")
        try:
            rows = self.fronts.scan(b"", end, limit)
            if not rows:
                self.none_before_ms = self.next_due_ms() or (1 << 63)
        except StoreDamaged:
            return scan_readable(self._expiry, b"", end, limit)
        return rows, None

    def differing(self) -> Iterator[bytes]:
        """Give the leases in memory that are not as the table has them: there must be none."""
        names = list(self.recent)
        for name, record in zip(names, self.get(names), strict=True):
            if record is None or decode_lease(record) != self.recent[name]:
                yield name

    def next_due_ms(self) -> int | None:
        """Return the earliest deadline."""
        rows = self.fronts.scan(b"", _LAST, 1)
        return int.from_bytes(rows[0][0][:8], "big") if rows else None
