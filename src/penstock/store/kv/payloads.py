"""The payload store: each payload once, however many queues hold its message.

::

    table payloads
    01 01 | message u64 BE       the payload (the RFC's record)
    02 0d | message u64 BE       u32 BE: how many queues hold it, if not exactly one

A message of one queue has no count: whoever lets go of it finds none and deletes the payload.
A message that no queue took has a count of 0 until its segment of the metadata log is dropped.
Counts are read from what was committed, so one commit must not let two queues go of one message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.store.codec.opendata import payload_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engines import Batch, Table

_REFERENCES: Final = b"\x02\x0d"


class Payloads:
    """Payloads and their reference counts."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def get(self, message_ids: Sequence[int]) -> list[bytes | None]:
        """Read payloads."""
        return self.table.multi_get([payload_key(message_id) for message_id in message_ids])

    def refer(self, batch: Batch, message_id: int, queues: int) -> None:
        """Note that a new message is held by none or by more than one queue."""
        batch.put(_references_key(message_id), queues.to_bytes(4, "big"), self.table.family)

    def shared(self, message_ids: Sequence[int]) -> set[int]:
        """Return those messages that more than one queue holds."""
        counts = self.table.multi_get([_references_key(id_) for id_ in message_ids])
        return {id_ for id_, count in zip(message_ids, counts, strict=True) if count is not None}

    def hold(self, batch: Batch, message_ids: Sequence[int]) -> list[bool]:
        """Note that one more queue holds messages; False for those whose payload is gone."""
        keys = [_references_key(message_id) for message_id in message_ids]
        counts = self.table.multi_get(keys)
        held = []
        for key, count, payload in zip(keys, counts, self.get(message_ids), strict=True):
            held.append(payload is not None)
            if payload is None:
                continue
            holders = (1 if count is None else int.from_bytes(count, "big")) + 1
            if holders == 1:
                batch.delete(key, self.table.family)
            else:
                batch.put(key, holders.to_bytes(4, "big"), self.table.family)
        return held

    def put_again(self, batch: Batch, message_id: int, payload: bytes) -> None:
        """Store a payload that was gone, for one queue to hold."""
        batch.put(payload_key(message_id), payload, self.table.family)
        batch.delete(_references_key(message_id), self.table.family)

    def drop_unheld(self, batch: Batch, message_ids: Sequence[int]) -> int:
        """Delete those payloads that no queue holds; say how many."""
        keys = [_references_key(message_id) for message_id in message_ids]
        dropped = 0
        records = self.table.multi_get(keys)
        for message_id, key, record in zip(message_ids, keys, records, strict=True):
            if record is not None and not int.from_bytes(record, "big"):
                batch.delete(key, self.table.family)
                batch.delete(payload_key(message_id), self.table.family)
                dropped += 1
        return dropped

    def discard(self, batch: Batch, message_ids: Sequence[int]) -> tuple[int, int]:
        """Delete payloads whatever their count says; return how many were there, and bytes."""
        count = freed = 0
        for message_id, payload in zip(message_ids, self.get(message_ids), strict=True):
            if payload is not None:
                batch.delete(payload_key(message_id), self.table.family)
                batch.delete(_references_key(message_id), self.table.family)
                count, freed = count + 1, freed + len(payload)
        return count, freed

    def let_go(self, batch: Batch, message_ids: Sequence[int]) -> None:
        """Let one queue go of messages; a payload that nobody holds any more is deleted."""
        keys = [_references_key(message_id) for message_id in message_ids]
        records = self.table.multi_get(keys)
        for message_id, key, record in zip(message_ids, keys, records, strict=True):
            if record is None:
                batch.delete(payload_key(message_id), self.table.family)
                continue
            left = int.from_bytes(record, "big") - 1
            if left > 1:
                batch.put(key, left.to_bytes(4, "big"), self.table.family)
            else:
                batch.delete(key, self.table.family)


def _references_key(message_id: int) -> bytes:
    return _REFERENCES + message_id.to_bytes(8, "big")
