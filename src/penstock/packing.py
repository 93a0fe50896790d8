"""Messages on their way to a store: packed once, by whoever publishes, and checked once.

An :class:`Envelope` is everything of a message but its payload and its dedup id. It travels as the
bytes that a store keeps (:mod:`penstock.store.codec.metadata`): a MessagePack array of group,
priority, delay and attributes. A server checks those bytes when it reads a request, in one pass;
the envelopes that came last are remembered by their bytes, since most messages of a producer
have the same.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from penstock import limits
from penstock.errors import InvalidMessage
from penstock.model import Message
from penstock.validation import check_attributes, check_messages, check_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.model import Value

# Envelopes that are remembered, and the most bytes and attributes of each, whose objects take far
# more memory than their bytes: some 30 MB at most.
MAX_REMEMBERED: Final = 4_096
REMEMBERED_BYTES: Final = 512
REMEMBERED_ATTRIBUTES: Final = 32
# No part of an envelope of so many bytes can be beyond a bound of its own.
_SURE_BYTES: Final = min(limits.MAX_GROUP_BYTES, limits.MAX_ATTRIBUTE_NAME_BYTES)

# Of a metadata record: its version, and the head of an array of six.
_HEAD: Final = b"\x01\x96"

_Integer = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class _Fields(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    group: str
    priority: Annotated[int, Meta(ge=0, le=limits.MAX_PRIORITY)]
    delay_ms: Annotated[int, Meta(ge=0, le=limits.MAX_DURATION_MS)]
    attributes: dict[Annotated[str, Meta(min_length=1)], str | _Integer | _Finite | bool | None]


_decode: Final = msgspec.msgpack.Decoder(_Fields).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class Envelope:
    """Everything of a message but its payload and its dedup id. Many messages may share it.

    ``packed`` are its bytes.
    """

    __slots__ = ("_after", "_before", "attributes", "delay_ms", "group", "packed", "priority")

    def __init__(
        self,
        packed: bytes,
        group: str,
        priority: int,
        delay_ms: int,
        attributes: dict[str, Value],
    ) -> None:
        """``packed`` is known to be the encoding of the others."""
        self.packed = packed
        self.group = group
        self.priority = priority
        self.delay_ms = delay_ms
        self.attributes = attributes
        # The bytes that a store writes before and after the size of a payload.
        self._before = _encode(group) + _encode(priority)
        # Behind the head of the array.
        self._after = packed[1 + len(self._before) :]

    def metadata(self, head: bytes, size: int) -> bytes:
        """Lay out the metadata record of a message, from its beginning and the payload's size."""
        return head + self._before + _encode(size) + self._after

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Envelope) and other.packed == self.packed

    def __hash__(self) -> int:
        return hash(self.packed)


def metadata_head(published_at_ms: int) -> bytes:
    """Return the beginning of the metadata records of messages that are published at a time."""
    return _HEAD + _encode(published_at_ms)


class PackedMessage(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A message as it is sent to a server, and as a store takes it."""

    payload: Annotated[bytes, Meta(max_length=limits.MAX_PAYLOAD_BYTES)]
    envelope: Envelope
    dedup_id: Annotated[str, Meta(min_length=1)] | None = None


_remembered: Final[dict[bytes, Envelope]] = {}


def _remember(envelope: Envelope) -> Envelope:
    if (
        len(envelope.packed) <= REMEMBERED_BYTES
        and len(envelope.attributes) <= REMEMBERED_ATTRIBUTES
    ):
        if len(_remembered) >= MAX_REMEMBERED:
            _remembered.clear()
        _remembered[envelope.packed] = envelope
    return envelope


def pack_messages(messages: Iterable[Message]) -> list[PackedMessage]:
    """Check messages and pack them."""
    packed = []
    for message in check_messages(messages):
        group, priority, delay_ms = message.group, message.priority, message.delay_ms
        attributes = message.attributes
        if type(attributes) is not dict:
            attributes = dict(attributes)
        key = _encode((group, priority, delay_ms, attributes))
        envelope = _remembered.get(key)
        if envelope is None:
            # A copy: the caller may change its own.
            envelope = _remember(Envelope(key, group, priority, delay_ms, {**attributes}))
        packed.append(PackedMessage(message.payload, envelope, message.dedup_id))
    return packed


def unpack_messages(packed: Sequence[PackedMessage]) -> list[Message]:
    """Return messages as a caller has them."""
    return [
        Message(each.payload, it.attributes, it.group, it.priority, it.delay_ms, each.dedup_id)
        for each in packed
        for it in (each.envelope,)
    ]


def read_envelope(_: type, packed: Any) -> Envelope:
    """Read an envelope that somebody else has packed; a hook of msgspec's decoders."""
    try:
        return _remembered[packed]
    except (KeyError, TypeError):
        return _remember(_check_envelope(packed))


def _check_envelope(packed: object) -> Envelope:
    """Read and check an envelope."""
    if type(packed) is not bytes:
        raise InvalidMessage(f"metadata must be binary, not {type(packed).__name__}")
    try:
        fields = _decode(packed)
        is_exact = _encode(fields) == packed
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidMessage(f"metadata that can't be read: {error}") from None
    if len(packed) > _SURE_BYTES:
        check_text(fields.group, "group", limits.MAX_GROUP_BYTES, InvalidMessage)
        check_attributes(fields.attributes)
    if not is_exact:
        raise InvalidMessage(
            "metadata has an attribute twice, or a value that is not in its shortest form"
        )
    return Envelope(packed, *msgspec.structs.astuple(fields))


def check_packed(messages: Iterable[PackedMessage]) -> None:
    """Check what a decoder does not: the bytes of dedup ids."""
    for message in messages:
        if message.dedup_id is not None:
            check_text(message.dedup_id, "dedup_id", limits.MAX_DEDUP_ID_BYTES, InvalidMessage)


def write_envelope(envelope: Any) -> bytes:
    """Return the bytes of an envelope; a hook of msgspec's encoders."""
    if type(envelope) is not Envelope:
        raise TypeError(f"Encoding objects of type {type(envelope).__name__} is unsupported")
    return envelope.packed
