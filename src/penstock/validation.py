"""Checks of arguments. Every refusal says what was wrong and what is allowed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from penstock import limits
from penstock.errors import InvalidInput, InvalidMessage, InvalidQueue
from penstock.model import Cursor, Message, Ordering, Overflow, QueueSpec, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.model import LogRecord, Value

_QUEUE_NAME: Final = re.compile(
    rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{limits.MAX_QUEUE_NAME_CHARS - 1}}}"
)
_ANY_TIME: Final = (0, limits.MAX_DURATION_MS)
# The settings of a queue that are whole numbers: the least and the most that each may be.
_SETTING_BOUNDS: Final = {
    "lease_ms": (1, limits.MAX_LEASE_MS),
    "max_attempts": (1, limits.MAX_ATTEMPTS),
    "bucket_exponent": (0, limits.MAX_BUCKET_EXPONENT),
    "max_messages": (0, limits.MAX_OFFSET),
    "max_bytes": (0, limits.MAX_OFFSET),
    **dict.fromkeys(("backoff_base_ms", "backoff_cap_ms", "delay_ms"), _ANY_TIME),
    **dict.fromkeys(
        ("done_retention_ms", "failed_retention_ms", "unclaimed_retention_ms"), _ANY_TIME
    ),
}
_INT64: Final = 1 << 63
_MAX_FLOAT: Final = sys.float_info.max


def check_messages(messages: Iterable[Message]) -> list[Message]:
    """Check a batch of messages; the error names the first that is wrong."""
    if type(messages) is not list and (
        isinstance(messages, Message) or not isinstance(messages, Iterable)
    ):
        raise InvalidInput(f"messages must be a list of messages, not {type(messages).__name__}")
    batch = list(messages)
    if len(batch) > limits.MAX_PUBLISH_MESSAGES:
        raise InvalidInput(
            f"{len(batch)} messages in one publish; at most {limits.MAX_PUBLISH_MESSAGES}: "
            "publish in several calls"
        )
    total = 0
    for index, message in enumerate(batch):
        try:
            total += check_message(message)
        except InvalidMessage as error:
            raise InvalidMessage(f"message {index}: {error}") from None
    if total > limits.MAX_PUBLISH_BYTES:
        raise InvalidInput(
            f"{total} bytes of payload in one publish; at most {limits.MAX_PUBLISH_BYTES}: "
            "publish in several calls"
        )
    return batch


def check_message(message: Message) -> int:
    """Check a message; return the bytes of its payload."""
    if type(message) is not Message:
        raise InvalidMessage(f"expected a penstock.Message, got {type(message).__name__}")
    payload = message.payload
    if type(payload) is not bytes:
        kind = type(payload).__name__
        hint = ": encode the text" if kind == "str" else ""
        raise InvalidMessage(f"payload must be bytes, not {kind}{hint}")
    if len(payload) > limits.MAX_PAYLOAD_BYTES:
        raise InvalidMessage(
            f"payload has {len(payload)} bytes; at most {limits.MAX_PAYLOAD_BYTES}"
        )
    check_attributes(message.attributes)
    # One comparison checks a field that most messages leave at its default.
    if message.group != "":
        check_text(message.group, "group", limits.MAX_GROUP_BYTES, InvalidMessage)
    if type(message.priority) is not int or message.priority:
        check_count(message.priority, "priority", 0, limits.MAX_PRIORITY, InvalidMessage)
    if type(message.delay_ms) is not int or message.delay_ms:
        check_count(message.delay_ms, "delay_ms", error=InvalidMessage)
    if message.dedup_id is not None:
        check_text(message.dedup_id, "dedup_id", limits.MAX_DEDUP_ID_BYTES, InvalidMessage)
        if not message.dedup_id:
            raise InvalidMessage("dedup_id is empty; leave it out (None) for no dedup")
    return len(payload)


def attributes_to(
    queue: str, attributes: Mapping[str, Value] | None, more: Mapping[str, Value]
) -> dict[str, Value]:
    """Return the attributes of a message that is sent straight to a queue, which they name."""
    given = attributes or {}
    if not isinstance(given, Mapping):
        raise InvalidMessage(f"attributes must be a mapping, not {type(given).__name__}")
    if twice := [name for name in more if name in given]:
        raise InvalidMessage(f"attribute {twice[0]!r} is given twice: by keyword and in attributes")
    together = {**given, **more}
    if together.setdefault("queue", queue) != queue:
        raise InvalidMessage(
            f"a message that is sent to {queue!r} has that as its attribute queue, not "
            f"{together['queue']!r:.100}; publish() takes any attributes"
        )
    return together


def check_attributes(attributes: Mapping[str, Any]) -> None:
    """Refuse attributes that a message may not have: of another type, or too many or too long."""
    if not isinstance(attributes, dict | Mapping):
        raise InvalidMessage(f"attributes must be a mapping, not {type(attributes).__name__}")
    if len(attributes) > limits.MAX_ATTRIBUTES:
        raise InvalidMessage(f"{len(attributes)} attributes; at most {limits.MAX_ATTRIBUTES}")
    size = 0
    for name, value in attributes.items():
        kind = type(value)
        if kind is str:
            size += len(value) if value.isascii() else _utf8_bytes(value, name)
        elif kind is float:
            size += 8
            if not -_MAX_FLOAT <= value <= _MAX_FLOAT:
                raise InvalidMessage(f"attribute {name!r} is {value}: numbers must be finite")
        elif kind is int:
            size += 8
            if not -_INT64 <= value < _INT64:
                raise InvalidMessage(
                    f"attribute {name!r} is {_number(value)}: integers have 64 bits"
                )
        elif kind is bool or value is None:
            size += 8
        else:
            raise InvalidMessage(
                f"attribute {name!r} is a {kind.__name__}; attributes are flat: "
                "string, number, boolean or None"
            )
        if type(name) is not str or not name:
            raise InvalidMessage(f"attribute name {name!r:.100} must be a non-empty string")
        name_bytes = len(name) if name.isascii() else _utf8_bytes(name, name)
        size += name_bytes
        if name_bytes > limits.MAX_ATTRIBUTE_NAME_BYTES:
            raise InvalidMessage(
                f"attribute name {name[:40]!r}... has {name_bytes} bytes; "
                f"at most {limits.MAX_ATTRIBUTE_NAME_BYTES}"
            )
    if size > limits.MAX_ATTRIBUTES_BYTES:
        raise InvalidMessage(f"attributes take {size} bytes; at most {limits.MAX_ATTRIBUTES_BYTES}")


def _utf8_bytes(text: str, name: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidMessage(f"attribute {name!r} is not valid Unicode text") from None


def check_queue_name(name: object) -> str:
    """Check a queue's name."""
    if not isinstance(name, str) or not _QUEUE_NAME.fullmatch(name):
        raise InvalidQueue(
            f"queue name {name!r:.100} is not allowed: 1 to {limits.MAX_QUEUE_NAME_CHARS} of "
            "A-Z a-z 0-9 . _ - and the first no dot"
        )
    return name


def check_spec(spec: QueueSpec) -> QueueSpec:
    """Check every setting of a queue."""
    check_queue_name(spec.name)
    if not isinstance(spec.ordering, Ordering):
        raise InvalidQueue(f"ordering is 'standard' or 'fifo', not {spec.ordering!r:.100}")
    if not isinstance(spec.overflow, Overflow):
        raise InvalidQueue(f"overflow is 'refuse' or 'drop_oldest', not {spec.overflow!r:.100}")
    for name, (low, high) in _SETTING_BOUNDS.items():
        check_count(getattr(spec, name), name, low, high, InvalidQueue)
    check_text(spec.description, "description", limits.MAX_DESCRIPTION_BYTES, InvalidQueue)
    if spec.dead_letter != "":
        check_queue_name(spec.dead_letter)
        if spec.dead_letter == spec.name:
            raise InvalidQueue(f"queue {spec.name!r} can't be its own dead letter queue")
    _check_labels(spec.labels)
    return spec


def _check_labels(labels: object) -> None:
    if type(labels) is not dict:
        raise InvalidQueue(f"labels must be a dict of text, not {type(labels).__name__}")
    if len(labels) > limits.MAX_LABELS:
        raise InvalidQueue(f"{len(labels)} labels; at most {limits.MAX_LABELS}")
    size = 0
    for name, value in labels.items():
        check_text(name, "the name of a label", limits.MAX_LABEL_NAME_BYTES, InvalidQueue)
        if not name:
            raise InvalidQueue("the name of a label is empty")
        check_text(value, f"label {name!r}", limits.MAX_LABELS_BYTES, InvalidQueue)
        size += len(name.encode()) + len(value.encode())
    if size > limits.MAX_LABELS_BYTES:
        raise InvalidQueue(f"labels take {size} bytes; at most {limits.MAX_LABELS_BYTES}")


def check_receipts(receipts: Iterable[str]) -> list[str]:
    """Check the size of a batch of receipts; their text is checked by the store."""
    if isinstance(receipts, str):
        raise InvalidInput("receipts must be a list of receipts, not one string")
    if type(receipts) is not list and not isinstance(receipts, Iterable):
        raise InvalidInput(f"receipts must be a list of receipts, not {type(receipts).__name__}")
    batch = list(receipts)
    if len(batch) > limits.MAX_RECEIPTS:
        raise InvalidInput(f"{len(batch)} receipts in one call; at most {limits.MAX_RECEIPTS}")
    return batch


def check_assignments(cursor: object, assignments: object) -> None:
    """Check what a tailer hands back."""
    if not isinstance(cursor, Cursor):
        raise InvalidInput(f"cursor must be a page's cursor, not {type(cursor).__name__}")
    check_count(cursor.begin, "cursor.begin", 0, limits.MAX_OFFSET)
    check_count(cursor.end, "cursor.end", 0, limits.MAX_OFFSET)
    if not isinstance(assignments, Mapping):
        raise InvalidInput("assignments must map message ids to lists of queue names")
    values = assignments.values()
    # All of them at once in the usual case; one by one to find the wrong one.
    if (
        set(map(type, assignments)) <= {int}
        and set(map(type, values)) <= {list, tuple}
        and set(map(type, chain.from_iterable(values))) <= {str}
        and min(assignments, default=0) >= 0
        and max(assignments, default=0) <= limits.MAX_OFFSET
    ):
        return
    for message_id, names in assignments.items():
        check_count(message_id, "message id", 0, limits.MAX_OFFSET)
        if (
            isinstance(names, str)
            or not isinstance(names, Iterable)
            or not all(isinstance(name, str) for name in names)
        ):
            raise InvalidInput(f"message {message_id}: a list of queue names is expected")


def check_archived(begin: int, end: int, records: Sequence[tuple[LogRecord, bytes | None]]) -> None:
    """Check messages that are to be restored into [begin, end), each with its payload or None."""
    if len(records) > limits.MAX_RESTORE_MESSAGES:
        raise InvalidInput(
            f"{len(records)} messages in one restore; at most {limits.MAX_RESTORE_MESSAGES}"
        )
    at = begin
    for record, payload in records:
        if not at <= record.message_id < end:
            raise InvalidInput(f"the messages to restore must ascend and lie in [{begin}, {end})")
        at = record.message_id + 1
        check_count(record.published_at_ms, "published_at_ms", 0, limits.MAX_DURATION_MS)
        check_count(record.size, "size", 0, limits.MAX_PAYLOAD_BYTES)
        if payload is not None and len(payload) != record.size:
            raise InvalidMessage(
                f"message {record.message_id} has a payload of {len(payload)} bytes, not of "
                f"{record.size}"
            )
        check_message(
            Message(
                payload or b"", record.attributes, record.group, record.priority, record.delay_ms
            )
        )


def check_states(states: Iterable[State | str]) -> list[State]:
    """Return the states that were named; a single one is to be in a list."""
    if isinstance(states, str):
        raise InvalidInput(f"states must be a list of states, not {states!r:.100} alone")
    return [check_state(state) for state in states]


def check_state(state: State | str) -> State:
    """Turn a state's name into the state."""
    try:
        return State(state)
    except ValueError:
        allowed = ", ".join(known.value for known in State)
        raise InvalidInput(f"no state named {state!r:.100}; there are {allowed}") from None


def check_count(
    value: object,
    name: str,
    low: int = 0,
    high: int = limits.MAX_DURATION_MS,
    error: type[InvalidInput] = InvalidInput,
) -> int:
    """Check a whole number; without bounds, a time in milliseconds."""
    if type(value) is not int:
        raise error(f"{name} must be a whole number, not {type(value).__name__}")
    if not low <= value <= high:
        raise error(f"{name} is {_number(value)}; allowed are {low} to {high}")
    return value


def check_optional(
    value: object, name: str, low: int = 0, high: int = limits.MAX_DURATION_MS
) -> None:
    """Check a whole number that may be left out."""
    if value is not None:
        check_count(value, name, low, high)


def check_routing(value: object) -> None:
    """Check the name of a way to route, which may be left out."""
    if value not in (None, "inline", "pipeline"):
        raise InvalidInput(f"routing is 'inline' or 'pipeline', not {value!r:.100}")


def _number(value: int) -> str:
    # Python refuses to print integers of thousands of digits.
    return str(value) if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"


def check_text(
    value: object, name: str, max_bytes: int, error: type[InvalidInput] = InvalidInput
) -> str:
    """Check a text's type and size."""
    if type(value) is not str:
        raise error(f"{name} must be text, not {type(value).__name__}")
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        raise error(f"{name} is not valid Unicode text") from None
    if size > max_bytes:
        raise error(f"{name} has {size} bytes; at most {max_bytes}")
    return value


def cut_text(value: object, max_bytes: int) -> str:
    """Make a text fit: an error message too long to keep must not stop what it is about."""
    return str(value).encode(errors="replace")[:max_bytes].decode(errors="ignore")


def check_ids(message_ids: Sequence[int]) -> list[int]:
    """Check a list of message ids."""
    ids = list(message_ids)
    for message_id in ids:
        check_count(message_id, "message id", 0, (1 << 64) - 1)
    return ids
