"""Messages that a claim got, as a store has them and as they travel to a client.

A row is MessagePack around bytes that are passed on as they are, the payload and the metadata
record (codec/metadata.py), which is a number, its version, and an array::

    [message_id, key, attempts, payload, version, [published_at_ms, group, ...]]
"""

from __future__ import annotations

from contextlib import suppress
from operator import itemgetter
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from penstock.errors import CorruptRecord
from penstock.model import Delivery
from penstock.store.codec.metadata import Metadata, decode_many, decode_metadata, read_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Message id, key in its queue, attempts, metadata record, payload.
StoredRow: TypeAlias = tuple[int, int, int, bytes, bytes]

_metadata_of: Final = itemgetter(3)
_encode: Final = msgspec.msgpack.Encoder().encode
# An array of six: id and key of 64 bits, attempts of 16, and the head of a payload of 32.
_row_head: Final = Struct(">BBQBQBHBI").pack
_ARRAY_32: Final = Struct(">BI").pack


class ClaimedMessages(msgspec.Struct, eq=False):
    """The messages of one claim. Deliveries are made of them only for a caller who wants some.

    ``token`` is that of the lease; ``waited_ms``: how long the first message could have been
    claimed before it was.
    """

    queue: str = ""
    token: str = ""
    deadline_ms: int = 0
    rows: list[StoredRow] = []
    waited_ms: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self.deliveries())

    def __getitem__(self, at: int) -> Delivery:
        return self.deliveries()[at]

    def receipts(self) -> list[str]:
        """Make the receipt of each, whether or not its metadata decodes."""
        return [f"{self.token}-{row[1]:016x}" for row in self.rows]

    def parts(self, most_bytes: int) -> list[ClaimedMessages]:
        """Part them, so that each part but for its last message has no more than so many bytes."""
        rows = self.rows
        sizes = [len(row[3]) + len(row[4]) for row in rows]
        if sum(sizes) <= most_bytes:
            return [self]
        parts = []
        begin = size = 0
        for end, more in enumerate(sizes, 1):
            size += more
            if size > most_bytes or end == len(rows):
                part = ClaimedMessages(self.queue, self.token, self.deadline_ms, rows[begin:end])
                parts.append(part)
                begin, size = end, 0
        return parts

    def deliveries(self) -> list[Delivery]:
        """Make a delivery of each whose metadata decodes."""
        rows, queue, token, deadline_ms = self.rows, self.queue, self.token, self.deadline_ms
        records = list(map(_metadata_of, rows))
        decoded: Sequence[Metadata | None] = (None,)
        with suppress(CorruptRecord):
            decoded = [decode_metadata(records[0])] if len(rows) == 1 else decode_many(records)
        made = []
        for (message_id, key, attempts, _, payload), found in zip(rows, decoded, strict=True):
            if found is not None:
                made.append(
                    Delivery(
                        message_id,
                        queue,
                        payload,
                        found.attributes,
                        found.group,
                        found.priority,
                        attempts,
                        found.published_at_ms,
                        f"{token}-{key:016x}",
                        deadline_ms,
                    )
                )
        return made

    def encode(self) -> bytes:
        """Encode them for a client, who decodes a :class:`ClaimedFrame`."""
        parts = [
            b"\x94",
            _encode(self.queue),
            _encode(self.token),
            _encode(self.deadline_ms),
            _ARRAY_32(0xDD, len(self.rows)),
        ]
        for message_id, key, attempts, metadata, payload in self.rows:
            head = _row_head(0x96, 0xCF, message_id, 0xCF, key, 0xCD, attempts, 0xC6, len(payload))
            parts += (head, payload, metadata)
        return b"".join(parts)


class ClaimedRow(msgspec.Struct, array_like=True, gc=False):
    """A message of a claim, as a client reads it."""

    message_id: int
    key: int
    attempts: int
    payload: bytes
    version: int
    metadata: Metadata


class ClaimedFrame(msgspec.Struct, array_like=True, gc=False):
    """The messages of one claim, as a client reads them.

    ``unread`` has the receipts of messages whose metadata does not decode, with the bytes of their
    payloads; it does not travel.
    """

    queue: str
    token: str
    deadline_ms: int
    rows: list[ClaimedRow]
    unread: dict[str, int] = {}

    def deliveries(self, kind: type[Any] = Delivery) -> list[Any]:
        """Make a delivery of each."""
        queue, token, deadline_ms = self.queue, self.token, self.deadline_ms
        return [
            kind(
                row.message_id,
                queue,
                row.payload,
                it.attributes,
                it.group,
                it.priority,
                row.attempts,
                it.published_at_ms,
                f"{token}-{row.key:016x}",
                deadline_ms,
            )
            for row in self.rows
            for it in (row.metadata,)
        ]


class LooseFrame(msgspec.Struct, array_like=True):
    """The messages of one claim, of which some have metadata that a store has spoiled."""

    queue: str
    token: str
    deadline_ms: int
    rows: list[tuple[int, int, int, bytes, int, msgspec.Raw]]

    def readable(self) -> ClaimedFrame:
        """Leave out those whose metadata does not decode: the others are good."""
        frame = ClaimedFrame(self.queue, self.token, self.deadline_ms, [])
        for message_id, key, attempts, payload, version, encoded in self.rows:
            metadata = read_metadata(b"\x01" + bytes(encoded))
            if metadata is None:
                frame.unread[f"{self.token}-{key:016x}"] = len(payload)
            else:
                row = ClaimedRow(message_id, key, attempts, payload, version, metadata)
                frame.rows.append(row)
        return frame


_decode_claimed: Final[Callable[[bytes], ClaimedFrame | None]] = msgspec.msgpack.Decoder(
    ClaimedFrame | None
).decode
_decode_loose: Final = msgspec.msgpack.Decoder(LooseFrame).decode


def read_claimed(answer: bytes) -> ClaimedFrame | None:
    """Read the messages that answer a claim; None: there are none."""
    try:
        return _decode_claimed(answer)
    except (msgspec.ValidationError, UnicodeDecodeError):
        return _decode_loose(answer).readable()
