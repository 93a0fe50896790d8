"""The JSON protocol: ``X-Amz-Target: AmazonSQS.<Operation>`` and a JSON object each way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.wire.sqs.faults import SqsFault
from penstock.wire.sqs.requests import OPERATIONS, SqsRequest

if TYPE_CHECKING:
    from collections.abc import Callable

CONTENT_TYPE: Final = "application/x-amz-json-1.0"
_TARGET: Final = "AmazonSQS."

# Numbers may come as text: some clients have them from a configuration file.
_DECODERS: Final[dict[str, Callable[[bytes], SqsRequest]]] = {
    name: msgspec.json.Decoder(kind, strict=False).decode for name, kind in OPERATIONS.items()
}
_ENCODE: Final = msgspec.json.Encoder().encode


def operation_of(target: str) -> str:
    """Read the operation's name from the header."""
    name = target[len(_TARGET) :] if target.startswith(_TARGET) else ""
    if name not in OPERATIONS:
        raise SqsFault(
            "UnknownOperationException",
            f"The action {target[:200]} is not valid for this endpoint.",
            status=404,
        )
    return name


def decode(operation: str, body: bytes) -> SqsRequest:
    """Read the request of a known operation."""
    try:
        return _DECODERS[operation](body or b"{}")
    except msgspec.ValidationError as error:
        raise SqsFault("SerializationException", f"The request can't be read: {error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SqsFault("SerializationException", f"The body is not JSON: {error}") from None


def encode(answer: dict[str, Any]) -> bytes:
    """Write an answer; bytes become base64."""
    return _ENCODE(answer)


def encode_fault(fault: SqsFault) -> bytes:
    """Write a fault."""
    space = "com.amazon.coral.service" if fault.code.endswith("Exception") else "com.amazonaws.sqs"
    return _ENCODE({"__type": f"{space}#{fault.code}", "message": fault.message})
