"""The two SQS protocols: bytes to requests, answers and faults to bytes.

The JSON protocol has ``X-Amz-Target: AmazonSQS.<Operation>`` and a JSON object each way. The legacy
query protocol has form fields in, where lists and maps are numbered fields, and XML out::

    Action=SendMessageBatch&SendMessageBatchRequestEntry.1.Id=a
      &SendMessageBatchRequestEntry.1.MessageAttribute.2.Value.StringValue=x
    Attribute.1.Name=DelaySeconds&Attribute.1.Value=5
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import parse_qsl

import msgspec

from penstock import errors, limits

if TYPE_CHECKING:
    from collections.abc import Container

# --- faults ---------------------------------------------------------------------------------------

_PREFIX: Final = "AWS.SimpleQueueService."

# Errors that the query protocol names otherwise: most with a prefix.
QUERY_CODES: Final = {
    **{
        name: f"{_PREFIX}{name}"
        for name in (
            *("BatchEntryIdsNotDistinct", "BatchRequestTooLong", "EmptyBatchRequest"),
            *("InvalidBatchEntryId", "PurgeQueueInProgress", "TooManyEntriesInBatchRequest"),
        )
    },
    "QueueDoesNotExist": f"{_PREFIX}NonExistentQueue",
    "QueueNameExists": "QueueAlreadyExists",
    "InvalidParameterValueException": "InvalidParameterValue",
    "MissingRequiredParameterException": "MissingParameter",
    "AccessDeniedException": "AccessDenied",
    "UnknownOperationException": "InvalidAction",
    "SerializationException": "MalformedInput",
    "MissingAuthenticationTokenException": "MissingAuthenticationToken",
    "IncompleteSignatureException": "IncompleteSignature",
    "InvalidSignatureException": "SignatureDoesNotMatch",
    "UnrecognizedClientException": "InvalidClientTokenId",
}


class SqsFault(Exception):
    """A request that SQS would refuse, with the code, text and status that it would give."""

    def __init__(self, code: str, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        # The code of the query protocol, and whether the request is to blame, not the server.
        self.query_code = QUERY_CODES.get(code, code)
        self.sender = status < 500

    @classmethod
    def invalid(cls, message: str) -> SqsFault:
        """Say that a parameter's value is not allowed."""
        return cls("InvalidParameterValueException", message)

    @classmethod
    def value(cls, value: object, parameter: str, reason: str) -> SqsFault:
        """Say which value of a parameter is not allowed, and why."""
        shown = str(value)
        shown = shown if len(shown) <= 200 else shown[:197] + "..."
        return cls.invalid(f"Value {shown} for parameter {parameter} is invalid. Reason: {reason}")

    @classmethod
    def missing(cls, parameter: str) -> SqsFault:
        """Say that a parameter was left out."""
        text = f"The request must contain the parameter {parameter}."
        return cls("MissingRequiredParameterException", text)

    @classmethod
    def attribute_name(cls, name: str) -> SqsFault:
        """Say that queues have no such attribute."""
        return cls("InvalidAttributeName", f"Unknown Attribute {name[:200]}.")

    @classmethod
    def attribute_value(cls, name: str) -> SqsFault:
        """Say that a queue's attribute can't have that value."""
        return cls("InvalidAttributeValue", f"Invalid value for the parameter {name}.")


# Error of the broker: code, text and status of the fault. The first that fits counts.
_FAULTS: Final = (
    (errors.QueueNotFound, "QueueDoesNotExist", "The specified queue does not exist.", 400),
    (errors.NotAllowed, "AccessDeniedException", "{}", 403),
    (errors.InvalidReceipt, "ReceiptHandleIsInvalid", "The input receipt handle is invalid.", 400),
    (errors.QueueExists, "QueueNameExists", "{}", 400),
    (errors.InvalidInput, "InvalidParameterValueException", "{}", 400),
    (errors.BrokerClosed, "ServiceUnavailable", "The server is stopping.", 503),
    # The runner logs a store that can't be used, once.
    (errors.StorageFailed, "ServiceUnavailable", "The store failed: {}.", 503),
    # A full queue. SDKs try again after a while at a rate that is reached.
    (errors.LimitReached, "OverLimit", "{}", 403),
    (Exception, "InternalFailure", "The request failed because of an error of the server.", 500),
)


def fault_of(error: Exception) -> SqsFault:
    """Make an error of the broker one of SQS; ``InternalFailure`` if it is none of the broker's."""
    if isinstance(error, SqsFault):
        return error
    if isinstance(error, errors.LimitReached) and error.retry_after_ms is not None:
        return SqsFault("RequestThrottled", str(error))
    _, code, text, status = next(each for each in _FAULTS if isinstance(error, each[0]))
    return SqsFault(code, text.format(error), status=status)


# --- requests -------------------------------------------------------------------------------------


class AttributeValue(msgspec.Struct, rename="pascal", gc=False, omit_defaults=True):
    """The value of a message attribute."""

    data_type: str | None = None
    string_value: str | None = None
    binary_value: bytes | None = None


class SqsEntry(msgspec.Struct, rename="pascal", kw_only=True, gc=False):
    """One message to send, to delete, or to change the visibility of: an entry of a batch."""

    id: str | None = None
    message_body: str | None = None
    delay_seconds: int | None = None
    message_attributes: dict[str, AttributeValue] | None = None
    message_system_attributes: dict[str, AttributeValue] | None = None
    message_deduplication_id: str | None = None
    message_group_id: str | None = None
    receipt_handle: str | None = None
    visibility_timeout: int | None = None


class SqsRequest(SqsEntry, gc=False):
    """A request: the fields of all operations. Each reads its own, and checks for missing ones.

    The names are those of the API model in Python's spelling; the wire's are made from them.
    """

    queue_url: str | None = None
    entries: list[SqsEntry] | None = None
    # Of queues.
    queue_name: str | None = None
    queue_name_prefix: str | None = None
    queue_owner_aws_account_id: str | None = msgspec.field(
        default=None, name="QueueOwnerAWSAccountId"
    )
    attributes: dict[str, str] | None = None
    attribute_names: list[str] | None = None
    tags: dict[str, str] | None = None
    new_queue_tags: dict[str, str] | None = msgspec.field(default=None, name="tags")
    tag_keys: list[str] | None = None
    label: str | None = None
    aws_account_ids: list[str] | None = msgspec.field(default=None, name="AWSAccountIds")
    actions: list[str] | None = None
    # Of lists, and of move tasks.
    next_token: str | None = None
    max_results: int | None = None
    source_arn: str | None = None
    destination_arn: str | None = None
    task_handle: str | None = None
    max_number_of_messages_per_second: int | None = None
    # Of ReceiveMessage.
    message_system_attribute_names: list[str] | None = None
    message_attribute_names: list[str] | None = None
    max_number_of_messages: int | None = None
    wait_time_seconds: int | None = None
    receive_request_attempt_id: str | None = None


def check_range(value: int, parameter: str, low: int, high: int, reason: str = "") -> int:
    """Check a number; ``reason`` is what SQS says of one that is out of bounds."""
    if not low <= value <= high:
        raise SqsFault.value(value, parameter, reason or f"Must be between {low} and {high}.")
    return value


def _unknown(operation: str, status: int) -> SqsFault:
    text = f"The action {operation[:200]} is not valid for this endpoint."
    return SqsFault("UnknownOperationException", text, status=status)


# --- the JSON protocol ----------------------------------------------------------------------------

JSON_CONTENT: Final = "application/x-amz-json-1.0"
_TARGET: Final = "AmazonSQS."

# Numbers may come as text: some clients have them from a configuration file.
_DECODE: Final = msgspec.json.Decoder(SqsRequest, strict=False).decode
# Bytes become base64.
encode_json: Final = msgspec.json.Encoder().encode


def json_operation(target: str, known: Container[str]) -> str:
    """Read the operation's name from the header; a known one."""
    name = target[len(_TARGET) :] if target.startswith(_TARGET) else ""
    if name not in known:
        raise _unknown(target, 404)
    return name


def decode_json(body: bytes) -> SqsRequest:
    """Read a request."""
    try:
        return _DECODE(body or b"{}")
    except msgspec.ValidationError as error:
        raise SqsFault("SerializationException", f"The request can't be read: {error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SqsFault("SerializationException", f"The body is not JSON: {error}") from None


def encode_json_fault(fault: SqsFault) -> bytes:
    """Write a fault."""
    space = "com.amazon.coral.service" if fault.code.endswith("Exception") else "com.amazonaws.sqs"
    return encode_json({"__type": f"{space}#{fault.code}", "message": fault.message})


# --- the query protocol: requests -----------------------------------------------------------------

QUERY_CONTENT: Final = "text/xml"
_SPACE: Final = "http://queue.amazonaws.com/doc/2012-11-05/"
_DEPTH: Final = 8
# Characters that XML 1.0 can't carry; SQS refuses them in bodies and values, in both protocols.
NOT_IN_XML: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

Tree: TypeAlias = dict[str, Any]

# Field of the request: what its numbered form fields are called.
_LISTS: Final = {
    "AttributeNames": "AttributeName",
    "MessageAttributeNames": "MessageAttributeName",
    "MessageSystemAttributeNames": "MessageSystemAttributeName",
    "AWSAccountIds": "AWSAccountId",
    "Actions": "ActionName",
    "TagKeys": "TagKey",
}
_MAPS: Final = {
    "Attributes": ("Attribute", "Name"),
    "MessageAttributes": ("MessageAttribute", "Name"),
    "MessageSystemAttributes": ("MessageSystemAttribute", "Name"),
    "Tags": ("Tag", "Key"),
    "tags": ("Tag", "Key"),
}
# Field of an answer: the element that stands once for each of its items.
_ITEMS: Final = {
    "QueueUrls": "QueueUrl",
    "queueUrls": "QueueUrl",
    "Messages": "Message",
    "Failed": "BatchResultErrorEntry",
    "Results": "ListMessageMoveTasksResultEntry",
}


def query_fields(text: str) -> dict[str, str]:
    """Read form fields; of a field that comes twice, the first counts."""
    try:
        pairs = parse_qsl(
            text, keep_blank_values=True, errors="strict", max_num_fields=limits.SQS_MAX_FORM_FIELDS
        )
    except ValueError:
        raise SqsFault("SerializationException", "The form fields can't be read.") from None
    fields: dict[str, str] = {}
    for name, value in pairs:
        fields.setdefault(name, value)
    return fields


def query_operation(fields: dict[str, str], known: Container[str]) -> str:
    """Read the operation's name; a known one."""
    name = fields.get("Action")
    if name is None:
        raise SqsFault("MissingAction", "The request must contain the parameter Action.")
    if name not in known:
        raise _unknown(name, 400)
    return name


def decode_query(operation: str, fields: dict[str, str]) -> SqsRequest:
    """Read the request of a known operation."""
    try:
        shaped = _shape(SqsRequest, _tree(fields), f"{operation}RequestEntry")
        return msgspec.convert(shaped, SqsRequest, strict=False)
    except msgspec.ValidationError as error:
        raise SqsFault.invalid(f"The request can't be read: {error}") from None


def _tree(fields: dict[str, str]) -> Tree:
    tree: Tree = {}
    for name, value in fields.items():
        *path, last = name.split(".")
        node: Any = tree
        for step in path[:_DEPTH]:
            node = node.setdefault(step, {}) if isinstance(node, dict) else node
        if not isinstance(node, dict) or isinstance(node.get(last), dict):
            raise SqsFault.invalid(f"The field {name[:200]} is both a value and a list.")
        node[last] = value
    return tree


def _shape(kind: type[SqsEntry], tree: Tree, entry: str) -> Tree:
    """Bring a tree of form fields into the shape of a struct; ``entry``: the name of entries."""
    shaped: Tree = {}
    for name in kind.__struct_encode_fields__:
        if name in _LISTS:
            items = _numbered(tree.get(_LISTS[name]))
            if items:
                shaped[name] = items
        elif name in _MAPS:
            element, key = _MAPS[name]
            pairs = [item for item in _numbered(tree.get(element)) if isinstance(item, dict)]
            if pairs:
                shaped[name] = {str(item.get(key, "")): item.get("Value", "") for item in pairs}
        elif name == "Entries":
            items = [item for item in _numbered(tree.get(entry)) if isinstance(item, dict)]
            shaped[name] = [_shape(SqsEntry, item, entry) for item in items]
        elif name in tree:
            shaped[name] = tree[name]
    return shaped


def _numbered(node: Any) -> list[Any]:
    if node is None:
        return []
    if isinstance(node, str):
        return [node]
    try:
        return [node[key] for key in sorted(node, key=int)]
    except ValueError:
        raise SqsFault.invalid("The items of a list must be numbered.") from None


# --- the query protocol: answers ------------------------------------------------------------------


def encode_query(operation: str, answer: dict[str, Any], request_id: str) -> bytes:
    """Write an answer."""
    parts = [f'<?xml version="1.0"?><{operation}Response xmlns="{_SPACE}">']
    if answer:
        _write(parts, f"{operation}Result", answer, operation)
    parts.append(
        f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata>"
        f"</{operation}Response>"
    )
    return "".join(parts).encode()


def encode_query_fault(fault: SqsFault, request_id: str) -> bytes:
    """Write a fault."""
    blame = "Sender" if fault.sender else "Receiver"
    return (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{_SPACE}"><Error><Type>{blame}</Type>'
        f"<Code>{fault.query_code}</Code><Message>{_escape(fault.message)}</Message><Detail/>"
        f"</Error><RequestId>{request_id}</RequestId></ErrorResponse>"
    ).encode()


def _write(parts: list[str], element: str, value: Any, operation: str) -> None:
    parts.append(f"<{element}>")
    if isinstance(value, AttributeValue):
        # Bytes become base64.
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        for name, item in value.items():
            _write_field(parts, name, item, operation)
    else:
        parts.append(_escape(str(value).lower() if isinstance(value, bool) else str(value)))
    parts.append(f"</{element}>")


def _write_field(parts: list[str], name: str, value: Any, operation: str) -> None:
    if isinstance(value, list):
        element = f"{operation}ResultEntry" if name == "Successful" else _ITEMS[name]
        for item in value:
            _write(parts, element, item, operation)
    elif name in _MAPS:
        element, key = _MAPS[name]
        for item_key, item in value.items():
            _write(parts, element, {key: item_key, "Value": item}, operation)
    else:
        _write(parts, name, value, operation)


def _escape(text: str) -> str:
    # Faults quote requests, whatever characters those had.
    text = NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)
    # A bare carriage return would be read back as a line feed.
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("\r", "&#xD;")
