"""The audit of dedup ids: each is listed to be forgotten when its window is over."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.store.check_report import Kind, all_of, outside

if TYPE_CHECKING:
    from penstock.store.check_report import Findings

__all__ = ["check_dedup"]

_pair: Final = Struct(">QQ")
_INDEX_KEY_BYTES: Final = 17


def check_dedup(findings: Findings) -> None:
    """Check the table ``dedup``; it is as large as one dedup window, and so is the memory."""
    table = findings.table("dedup")
    listed: set[tuple[bytes, int]] = set()
    for key, value in all_of(table, b"\x01"):
        findings.count("dedup rows")
        try:
            if len(key) != _INDEX_KEY_BYTES:
                raise msgspec.ValidationError(f"a key of {len(key)} bytes")
            expires_at_ms = int.from_bytes(key[1:9], "big")
            for named in msgspec.msgpack.decode(value, type=list[bytes]):
                listed.add((named, expires_at_ms))
        except msgspec.MsgspecError as error:
            findings.reject(Kind.UNDECODABLE, "dedup", key, value, str(error))
    unlisted: dict[bytes, list[bytes]] = {}
    for key, value in all_of(table, b"\x00"):
        findings.count("dedup ids")
        if len(value) != _pair.size:
            text = f"a dedup id's record has {len(value)} bytes, not {_pair.size}"
            findings.reject(Kind.UNDECODABLE, "dedup", key, value, text)
            continue
        message_id, expires_at_ms = _pair.unpack(value)
        if (key, expires_at_ms) in listed:
            listed.discard((key, expires_at_ms))
            continue
        text = f"the dedup id of message {message_id} would never be forgotten"
        findings.violate(Kind.DEDUP, "dedup", key, text)
        row = b"\x01" + _pair.pack(expires_at_ms, message_id)
        unlisted.setdefault(row, []).append(key)
    for row, keys in unlisted.items():
        present = table.get(row)
        try:
            known = msgspec.msgpack.decode(present or b"\x90", type=list[bytes])
        except msgspec.MsgspecError:
            known = []
        findings.put("dedup", row, msgspec.msgpack.encode([*known, *keys]))
    for key, expires_at_ms in listed:
        text = f"listed to be forgotten at {expires_at_ms}, and not there: published anew, or gone"
        findings.note(Kind.DEDUP, "dedup", key, text)
    for key, value in outside(table, [b"\x00", b"\x01"]):
        findings.reject(Kind.STRANGER, "dedup", key, value, "a key that nothing uses")
