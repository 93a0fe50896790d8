"""Messages: the fields of SQS, and those of Penstock.

::

    SQS                              Penstock
    Body                             payload, in UTF-8
    MessageAttributes  String        attribute: text
                       Number        attribute: number, if 64 bits hold it exactly; else text
                       Binary        attribute: base64
    MessageGroupId                   group
    QueueUrl                         attribute ``queue``
    (data types, odd numbers,        attribute ``sqs``: JSON, only if there is any of it
     trace header, dedup id, sender)

An attribute called ``queue`` or ``sqs`` by its sender is kept inside of ``sqs``, so that it can't
change where the message goes. Messages of other protocols are shown as closely as SQS can.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from hashlib import md5
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from penstock import limits
from penstock.wire.sqs.protocol import NOT_IN_XML, AttributeValue, SqsFault

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.model import Delivery, Value

RESERVED: Final = "sqs"
# The attribute of a body in base64, which has bytes that SQS has no text for.
ENCODING_ATTRIBUTE: Final = "penstock.encoding"
_ROUTING: Final = "queue"
_OWN: Final = frozenset({RESERVED, _ROUTING})
_INT64: Final = 1 << 63

_CONTROL_BYTES: Final = bytes({*range(0x20)} - {*b"\t\n\r"})
_NAME: Final = re.compile(r"[A-Za-z0-9_\-.]{1,256}")
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_MAX_NUMBER_CHARS: Final = 1_000


class Kept(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of the attribute ``sqs``.

    ``attributes`` has [data type, text] by name; the text is null if the attribute of that name
    says it exactly.
    """

    attributes: dict[str, tuple[str, str | None]] = msgspec.field(default={}, name="a")
    trace: str | None = msgspec.field(default=None, name="t")
    dedup_id: str | None = msgspec.field(default=None, name="d")
    sender: str | None = msgspec.field(default=None, name="s")


_NOTHING: Final = Kept()
_ENCODE: Final = msgspec.json.Encoder().encode
_DECODE: Final = msgspec.json.Decoder(Kept).decode


def message_uuid(store_id: int, message_id: int) -> str:
    """Lay the ids of a store and of a message out as a UUID of version 8."""
    if message_id < 1 << 36:
        # Of the same form, and formatted in half the time.
        return f"{store_id:08x}-0000-8000-8000-{message_id:012x}"
    return (
        f"{store_id:08x}-{message_id >> 48:04x}-8{message_id >> 36 & 0xFFF:03x}-8000-"
        f"{message_id & 0xFFFFFFFFF:012x}"
    )


# --- in -------------------------------------------------------------------------------------------


def check_body(body: str | None) -> bytes:
    """Turn a body into a payload."""
    if not body:
        raise SqsFault.missing("MessageBody")
    data = body.encode("utf-8", "surrogatepass")
    if not speakable(body, data):
        raise SqsFault(
            "InvalidMessageContents",
            "Invalid characters found. Valid unicode characters are "
            "#x9 | #xA | #xD | #x20 to #xD7FF | #xE000 to #xFFFD | #x10000 to #x10FFFF",
        )
    return data


def check_attributes(attributes: Mapping[str, AttributeValue] | None) -> int:
    """Check message attributes and return their size."""
    if not attributes:
        return 0
    if len(attributes) > limits.SQS_MAX_MESSAGE_ATTRIBUTES:
        raise SqsFault.invalid(
            f"Number of message attributes [{len(attributes)}] exceeds the allowed maximum "
            f"[{limits.SQS_MAX_MESSAGE_ATTRIBUTES}]."
        )
    for name, value in attributes.items():
        _check_name(name)
        _check_value(name, value)
    return sum(
        len(name.encode())
        + len((value.data_type or "").encode())
        + len((value.string_value or "").encode())
        + len(value.binary_value or b"")
        for name, value in attributes.items()
    )


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        reason = (
            "Attribute name can contain A-Z, a-z, 0-9, underscore (_), hyphen (-), and period (.) "
            "characters."
        )
    elif ".." in f".{name}." or name.lower().startswith(("aws.", "amazon.")):
        reason = "It must have text around each period, and not begin with AWS. or Amazon."
    else:
        return
    raise SqsFault.invalid(f"The message attribute name '{name[:300]}' is invalid. {reason}")


def _check_value(name: str, value: AttributeValue) -> None:
    data_type, about = value.data_type, f"The message attribute '{name}'"
    if not data_type:
        raise SqsFault.invalid(f"{about} must contain non-empty message attribute type.")
    kind = data_type.partition(".")[0]
    if kind not in {"String", "Number", "Binary"} or len(data_type) > 256:
        raise SqsFault.invalid(
            f"{about} has an invalid message attribute type, the set of supported type prefixes is "
            "Binary, Number, and String."
        )
    if not (value.binary_value if kind == "Binary" else value.string_value):
        raise SqsFault.invalid(
            f"{about} must contain non-empty message attribute value for message attribute type "
            f"'{data_type}'."
        )
    text = value.string_value
    if text is None:
        return
    if kind == "Binary" or value.binary_value is not None:
        raise SqsFault.invalid(f"{about} must have one value, not two.")
    if not (speakable(text) and speakable(data_type)):
        raise SqsFault("InvalidMessageContents", f"Invalid characters in attribute '{name}'.")
    if kind == "Number" and (len(text) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(text.strip())):
        raise SqsFault.invalid(
            f"Can't cast the value of message (user) attribute '{name}' to a number."
        )


def to_attributes(
    queue: str,
    attributes: Mapping[str, AttributeValue] | None,
    *,
    trace: str | None = None,
    dedup_id: str | None = None,
    sender: str | None = None,
) -> dict[str, Value]:
    """Make the attributes of a message for a queue out of checked message attributes."""
    made: dict[str, Value] = {_ROUTING: queue}
    kept: dict[str, tuple[str, str | None]] = {}
    for name, value in attributes.items() if attributes else ():
        data_type = value.data_type or "String"
        text = (
            b64encode(value.binary_value).decode()
            if value.binary_value is not None
            else value.string_value or ""
        )
        if name in _OWN:
            kept[name] = (data_type, text)
            continue
        stored = _number(text) if data_type.startswith("Number") else text
        made[name] = stored
        exact = _text(stored) == text
        if not exact or data_type != ("String" if isinstance(stored, str) else "Number"):
            kept[name] = (data_type, None if exact else text)
    if kept or trace is not None or dedup_id is not None or sender is not None:
        made[RESERVED] = _ENCODE(Kept(kept, trace, dedup_id, sender)).decode()
    return made


def _number(text: str) -> str | int | float:
    """Return the number that a text is if 64 bits hold it exactly, else the text."""
    try:
        whole = int(text)
    except ValueError:
        pass
    else:
        return whole if -_INT64 <= whole < _INT64 else text
    number = float(text)
    # The shortest text of a number has at most 17 digits; with more, some of them are lost.
    digits = sum(each.isdigit() for each in text.lower().partition("e")[0])
    return number if digits <= 15 and abs(number) < float("inf") else text


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


# --- out ------------------------------------------------------------------------------------------


def shown_attributes(attributes: Mapping[str, Value]) -> tuple[dict[str, AttributeValue], Kept]:
    """Return message attributes as they were sent, or the nearest to what others published."""
    kept = _kept(attributes.get(RESERVED))
    shown: dict[str, AttributeValue] = {}
    for name, value in attributes.items():
        if name in _OWN or value is None or not speakable(name):
            continue
        if name in kept.attributes:
            data_type, text = kept.attributes[name]
            text = _text(value) if text is None else text
            shown[name] = _attribute(data_type if speakable(text) else "Binary", text)
        elif isinstance(value, str) and not speakable(value):
            shown[name] = AttributeValue("Binary", None, value.encode("utf-8", "surrogatepass"))
        else:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            shown[name] = AttributeValue("Number" if number else "String", _text(value))
    for name in _OWN & kept.attributes.keys():
        data_type, text = kept.attributes[name]
        shown[name] = _attribute(data_type, text or "")
    return shown, kept


def _kept(stored: Value) -> Kept:
    if not isinstance(stored, str):
        return _NOTHING
    try:
        kept = _DECODE(stored.encode())
    except (msgspec.DecodeError, UnicodeEncodeError):
        # Another publisher's attribute of that name.
        return _NOTHING
    texts = [kept.trace, kept.dedup_id, kept.sender, *kept.attributes]
    for pair in kept.attributes.values():
        texts += pair
    return kept if all(text is None or speakable(text) for text in texts) else _NOTHING


def _attribute(data_type: str, text: str) -> AttributeValue:
    if data_type.startswith("Binary"):
        try:
            return AttributeValue(data_type, None, b64decode(text, validate=True))
        except ValueError:
            return AttributeValue("Binary", None, text.encode("utf-8", "surrogatepass"))
    return AttributeValue(data_type, text)


def shown_body(payload: bytes) -> tuple[str, bool]:
    """Return a payload as text, and whether that is base64 because it is no text for SQS."""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        text = None
    if text is None or not speakable(text, payload):
        return b64encode(payload).decode(), True
    return text, False


def speakable(text: str, data: bytes | None = None) -> bool:
    """Whether SQS can carry a text; ``data``: the text as bytes, if there are any."""
    if text.isascii():
        # Several times as fast as a search, and most texts are ASCII.
        data = text.encode() if data is None else data
        return len(data.translate(None, _CONTROL_BYTES)) == len(data)
    return NOT_IN_XML.search(text) is None


def select(
    attributes: dict[str, AttributeValue], names: Iterable[str]
) -> dict[str, AttributeValue]:
    """Keep the attributes that a receiver asks for: by name, by ``prefix.*``, or all."""
    wanted = set(names)
    if "All" in wanted or ".*" in wanted:
        return attributes
    prefixes = tuple(name[:-2] for name in wanted if name.endswith(".*"))
    return {
        name: value
        for name, value in attributes.items()
        if name in wanted or (prefixes and name.startswith(prefixes))
    }


# --- receipt handles: a receipt, and the number of its message ------------------------------------
#
#     ps1-SSSSSSSS-QQQQQQQQ-LLLLLLLLLLLLLLLLLLLLLLLLLLLLLLLL-KKKKKKKKKKKKKKKK.N
#
# A receipt names a place in a queue, which another message gets once this one is settled. The
# number is for a delete that comes again: was this message deleted before?


def handle_of(delivery: Delivery) -> str:
    """Return the handle of a message that was received: its receipt, its id, which attempt."""
    return f"{delivery.receipt}.{delivery.message_id}.{delivery.attempts}"


def receipt_of(handle: str) -> str:
    """Return the receipt in a handle; a receipt alone will do."""
    return handle.partition(".")[0]


def message_of(handle: str) -> int | None:
    """Return the message's id in a handle; None if it has none."""
    return _part_of(handle, 1)


def attempt_of(handle: str) -> int:
    """Return which attempt at the message a handle was given for; 0 if it does not say."""
    return min(_part_of(handle, 2) or 0, limits.MAX_ATTEMPTS)


def _part_of(handle: str, place: int) -> int | None:
    parts = handle.split(".", 3)
    number = parts[place] if place < len(parts) else ""
    # No number of a message is longer.
    return int(number) if number.isascii() and number.isdecimal() and len(number) < 20 else None


# --- MD5s: clients check by them what they sent and received --------------------------------------

_LENGTH = Struct(">I").pack


def md5_of_body(body: bytes) -> str:
    """Return the MD5 of a body, which clients check."""
    return md5(body, usedforsecurity=False).hexdigest()


def md5_of_attributes(attributes: Mapping[str, AttributeValue]) -> str:
    """Return the MD5 of message attributes: of each name, type and value with its length, by name.

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
