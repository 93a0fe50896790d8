"""Receipts: what a worker shows to prove that it holds a message.

::

    ps1-SSSSSSSS-QQQQQQQQ-LLLLLLLLLLLLLLLLLLLLLLLLLLLLLLLL-KKKKKKKKKKKKKKKK
        store    queue    lease the message was claimed   message in that queue
                          under

Everything but the last part is the same for all messages of a claim: the token of the lease.
"""

from __future__ import annotations

import re
from struct import unpack
from typing import TYPE_CHECKING, Final, cast

import msgspec

from penstock.errors import InvalidReceipt

if TYPE_CHECKING:
    from collections.abc import Sequence

# A lease's identity; the other two bytes number its splits.
FAMILY_BYTES: Final = 14
_TOKEN: Final = re.compile(r"ps1-([0-9a-f]{8})-([0-9a-f]{8})-([0-9a-f]{32})")
_KEY: Final = re.compile(r"[0-9A-Fa-f]{16}")
_TOKEN_CHARS: Final = 3 + 3 + 8 + 8 + 32
_RECEIPT_CHARS: Final = _TOKEN_CHARS + 1 + 16


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
    heads = [text[: _TOKEN_CHARS + 1] for text in texts]
    tokens = {}
    for head in set(heads):
        if head[-1] != "-":
            raise _not_a_receipt(head)
        tokens[head] = parse_lease_token(store_id, head[:-1])
    # All of them at once: a fourth of the time that one by one takes.
    try:
        keys = bytes.fromhex("".join([text[_TOKEN_CHARS + 1 :] for text in texts]))
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
