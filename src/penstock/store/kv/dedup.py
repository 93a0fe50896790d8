"""Dedup ids: a repeated publish within the window gets the first one's message id.

::

    table dedup
    00 | scope, terminated | dedup id            message u64 BE | expires_at u64 BE
    01 | expires_at u64 BE | message u64 BE      the 00 keys to forget then, as MessagePack array
"""

from __future__ import annotations

import logging
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.store.codec.encodings import terminated
from penstock.store.kv.fronts import Fronts
from penstock.store.policy import dedup_scope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.engines import Batch, Table
    from penstock.model import Message

log = logging.getLogger(__name__)

_pair: Final = Struct(">QQ")
_WINDOWS: Final = b"\x01"


class Dedup:
    """The dedup window."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.fronts = Fronts(table)

    def key(self, message: Message) -> bytes:
        """Return the key of a message that has a dedup id."""
        assert message.dedup_id is not None
        return b"\x00" + terminated(dedup_scope(message)) + message.dedup_id.encode()

    def known(self, messages: Sequence[Message], now_ms: int) -> dict[bytes, int]:
        """Return keys of these messages and the ids under which the window knows them."""
        known = {}
        keys = [self.key(message) for message in messages]
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
        self.fronts.note(_WINDOWS, index_key)

    def forget(self, batch: Batch, now_ms: int, limit: int) -> int:
        """Delete what is past the window, up to ``limit`` publishes; say how many ids."""
        forgotten = 0
        end = _WINDOWS + (now_ms + 1).to_bytes(8, "big")
        for index_key, record in self.fronts.scan(_WINDOWS, end, limit):
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
        rows = self.fronts.scan(_WINDOWS, b"\x02", 1)
        return int.from_bytes(rows[0][0][1:9], "big") if rows else None
