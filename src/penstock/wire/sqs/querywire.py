"""The legacy query protocol: form fields in, XML out.

Lists and maps are numbered fields::

    Action=SendMessageBatch&SendMessageBatchRequestEntry.1.Id=a
      &SendMessageBatchRequestEntry.1.MessageAttribute.2.Value.StringValue=x
    Attribute.1.Name=DelaySeconds&Attribute.1.Value=5
"""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl

import msgspec

from penstock import limits
from penstock.wire.sqs.faults import SqsFault
from penstock.wire.sqs.requests import OPERATIONS, AttributeValue, SqsRequest

CONTENT_TYPE: Final = "text/xml"
_SPACE: Final = "http://queue.amazonaws.com/doc/2012-11-05/"
_DEPTH: Final = 8
_NOT_IN_XML: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

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


def fields_of(text: str) -> dict[str, str]:
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


def operation_of(fields: dict[str, str]) -> str:
    """Read the operation's name."""
    name = fields.get("Action")
    if name is None:
        raise SqsFault("MissingAction", "The request must contain the parameter Action.")
    if name not in OPERATIONS:
        raise SqsFault(
            "UnknownOperationException", f"The action {name[:200]} is not valid for this endpoint."
        )
    return name


def decode(operation: str, fields: dict[str, str]) -> SqsRequest:
    """Read the request of a known operation."""
    kind = OPERATIONS[operation]
    try:
        return msgspec.convert(_shape(kind, _tree(fields), operation), kind, strict=False)
    except msgspec.ValidationError as error:
        raise SqsFault.invalid(f"The request can't be read: {error}") from None


def _tree(fields: dict[str, str]) -> Tree:
    tree: Tree = {}
    for name, value in fields.items():
        *path, last = name.split(".")
        node = tree
        for step in path[:_DEPTH]:
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                raise SqsFault.invalid(f"The field {name[:200]} is both a value and a list.")
        if isinstance(node.get(last), dict):
            raise SqsFault.invalid(f"The field {name[:200]} is both a value and a list.")
        node[last] = value
    return tree


def _shape(kind: type, tree: Tree, operation: str) -> Tree:
    shaped: Tree = {}
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
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
            # The field is a list of entries, or missing.
            entry = field.type.__args__[0].__args__[0]
            shaped[name] = [
                _shape(entry, item, operation)
                for item in _numbered(tree.get(f"{operation}RequestEntry"))
                if isinstance(item, dict)
            ]
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


def encode(operation: str, answer: dict[str, Any], request_id: str) -> bytes:
    """Write an answer."""
    parts = [f'<?xml version="1.0"?><{operation}Response xmlns="{_SPACE}">']
    if answer:
        parts.append(f"<{operation}Result>")
        _write_fields(parts, answer, operation)
        parts.append(f"</{operation}Result>")
    parts.append(
        f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata>"
        f"</{operation}Response>"
    )
    return "".join(parts).encode()


def encode_fault(fault: SqsFault, request_id: str) -> bytes:
    """Write a fault."""
    blame = "Sender" if fault.sender else "Receiver"
    return (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{_SPACE}"><Error><Type>{blame}</Type>'
        f"<Code>{fault.query_code}</Code><Message>{_escape(fault.message)}</Message><Detail/>"
        f"</Error><RequestId>{request_id}</RequestId></ErrorResponse>"
    ).encode()


def _write_fields(parts: list[str], fields: dict[str, Any], operation: str) -> None:
    for name, value in fields.items():
        if isinstance(value, list):
            element = f"{operation}ResultEntry" if name == "Successful" else _ITEMS[name]
            for item in value:
                _write(parts, element, item, operation)
        elif name in _MAPS:
            element, key = _MAPS[name]
            for item_key, item in value.items():
                parts.append(f"<{element}>")
                _write(parts, key, item_key, operation)
                _write(parts, "Value", item, operation)
                parts.append(f"</{element}>")
        else:
            _write(parts, name, value, operation)


def _write(parts: list[str], element: str, value: Any, operation: str) -> None:
    parts.append(f"<{element}>")
    if isinstance(value, dict):
        _write_fields(parts, value, operation)
    elif isinstance(value, AttributeValue):
        if value.string_value is not None:
            _write(parts, "StringValue", value.string_value, operation)
        if value.binary_value is not None:
            _write(parts, "BinaryValue", b64encode(value.binary_value).decode(), operation)
        _write(parts, "DataType", value.data_type or "", operation)
    elif isinstance(value, bool):
        parts.append("true" if value else "false")
    else:
        parts.append(_escape(str(value)))
    parts.append(f"</{element}>")


def _escape(text: str) -> str:
    # Faults quote requests, whatever characters those had.
    text = _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)
    # A bare carriage return would be read back as a line feed.
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("\r", "&#xD;")
