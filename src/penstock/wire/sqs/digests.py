"""The MD5s that SQS clients check what they sent and received by."""

from __future__ import annotations

from hashlib import md5
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.wire.sqs.requests import AttributeValue

__all__ = ["of_attributes", "of_body"]

_LENGTH = Struct(">I").pack


def of_body(body: bytes) -> str:
    """Digest a message's body."""
    return md5(body, usedforsecurity=False).hexdigest()


def of_attributes(attributes: Mapping[str, AttributeValue]) -> str:
    """Digest message attributes: each name, type and value with its length, by name.

    ::

        length name | length type | 1 length text  or  2 length bytes
    """
    parts: list[bytes] = []
    for name in sorted(attributes):
        value = attributes[name]
        for text in (name, value.data_type or ""):
            data = text.encode()
            parts += (_LENGTH(len(data)), data)
        if value.binary_value is not None:
            parts += (b"\x02", _LENGTH(len(value.binary_value)), value.binary_value)
        else:
            data = (value.string_value or "").encode()
            parts += (b"\x01", _LENGTH(len(data)), data)
    return md5(b"".join(parts), usedforsecurity=False).hexdigest()
