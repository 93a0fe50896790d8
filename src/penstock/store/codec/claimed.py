"""The messages of a claim, as a store has them and as they travel to a client; their receipts.

A worker shows a receipt to prove that it holds a message::

    ps1-SSSSSSSS-QQQQQQQQ-LLLLLLLLLLLLLLLLLLLLLLLLLLLLLLLL-KKKKKKKKKKKKKKKK
        store    queue    lease the message was claimed   message in that queue
                          under

Everything but the last part is the same for all messages of a claim: the token of the lease.

A message travels as MessagePack around bytes that are passed on as they are, the payload and the
metadata record (codec/metadata.py), which is a number, its version, and an array::

    [message_id, key, attempts, payload, version, [published_at_ms, group, ...]]
"""

from __future__ import annotations

import re
from contextlib import suppress
from operator import itemgetter
from struct import Struct, unpack
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgspec

from penstock.errors import CorruptRecord, InvalidReceipt
from penstock.model import Delivery
from penstock.store.codec.metadata import Metadata, decode_many, decode_metadata, read_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# A lease's identity; the other two bytes number its splits.
FAMILY_BYTES: Final = 14
_TOKEN: Final = re.compile(r"ps1-([0-9a-f]{8})-([0-9a-f]{8})-([0-9a-f]{32})")
_KEY: Final = re.compile(r"[0-9A-Fa-f]{16}")
# Of a receipt, the token of its lease.
TOKEN_CHARS: Final = 3 + 3 + 8 + 8 + 32
_RECEIPT_CHARS: Final = TOKEN_CHARS + 1 + 16
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
        head = map(_encode, (self.queue, self.token, self.deadline_ms))
        parts = [b"\x94", *head, _ARRAY_32(0xDD, len(self.rows))]
        for message_id, key, attempts, metadata, payload in self.rows:
            row = _row_head(0x96, 0xCF, message_id, 0xCF, key, 0xCD, attempts, 0xC6, len(payload))
            parts += (row, payload, metadata)
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


# --- receipts ---------------------------------------------------------------------------------


class LeaseToken(msgspec.Struct, frozen=True, gc=False):
    """A parsed token: the queue's number, the lease, and what all splits of it share."""

    queue: int
    lease: bytes
    family: bytes


def lease_token(store_id: int, queue: int, lease: bytes) -> str:
    """Make the part that all receipts of a lease share."""
    return f"ps1-{store_id:08x}-{queue:08x}-{lease.hex()}"


def parse_lease_token(store_id: int, token: object) -> LeaseToken:
    """Read a lease token of this store."""
    match = _TOKEN.fullmatch(token) if isinstance(token, str) else None
    if match is None:
        raise _not_a_receipt(token)
    if int(match[1], 16) != store_id:
        raise InvalidReceipt(
            f"receipt {_shown(token)} is of another store ({match[1]}; this one is {store_id:08x})"
        )
    lease = bytes.fromhex(match[3])
    return LeaseToken(int(match[2], 16), lease, lease[:FAMILY_BYTES])


def parse_receipts(
    store_id: int, receipts: Sequence[object]
) -> tuple[list[LeaseToken], Sequence[int]]:
    """Read receipts of this store: the lease and the message of each. One bad one refuses all."""
    for receipt in receipts:
        if not isinstance(receipt, str) or len(receipt) != _RECEIPT_CHARS:
            raise _not_a_receipt(receipt)
    texts = cast("Sequence[str]", receipts)
    # With the dash, which is checked with the token.
    heads = [text[: TOKEN_CHARS + 1] for text in texts]
    tokens = {}
    for head in set(heads):
        if head[-1] != "-":
            raise _not_a_receipt(head)
        tokens[head] = parse_lease_token(store_id, head[:-1])
    # All of them at once: a fourth of the time that one by one takes.
    try:
        keys = bytes.fromhex("".join([text[TOKEN_CHARS + 1 :] for text in texts]))
    except ValueError:
        keys = b""
    # fromhex skips blanks: with any of them it is too short.
    if len(keys) != 8 * len(texts):
        raise _not_a_receipt(next(each for each in texts if not _KEY.fullmatch(each[-16:])))
    return list(map(tokens.__getitem__, heads)), unpack(f">{len(texts)}Q", keys)


def queue_numbers(store_id: int, receipts: Sequence[object] | str) -> set[int]:
    """Return the numbers of the queues that receipts name, or a lease token if it is a string."""
    if isinstance(receipts, str):
        return {parse_lease_token(store_id, receipts).queue}
    return {token.queue for token in parse_receipts(store_id, receipts)[0]}


def _not_a_receipt(receipt: object) -> InvalidReceipt:
    return InvalidReceipt(f"not a receipt: {_shown(receipt)}; receipts come from claim()")


def _shown(receipt: object) -> str:
    text = repr(receipt)
    return text if len(text) <= 100 else text[:97] + "..."
