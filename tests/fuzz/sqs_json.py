"""The JSON protocol of SQS: a body is a request, which can be written again, or a fault."""

from __future__ import annotations

import json

import msgspec

from penstock.server.sqs import OPERATIONS
from penstock.wire.sqs import messages, protocol, queues
from penstock.wire.sqs.protocol import SqsFault

__all__ = ["SEEDS", "one"]

_NAMES = sorted(OPERATIONS)


def _seed(operation: str, arguments: object) -> bytes:
    return bytes([_NAMES.index(operation)]) + json.dumps(arguments).encode()


_URL = "http://127.0.0.1/000000000000/q"
SEEDS = (
    _seed(
        "CreateQueue", {"QueueName": "q", "Attributes": {"DelaySeconds": "5"}, "tags": {"a": ""}}
    ),
    _seed(
        "CreateQueue",
        {
            "QueueName": "q.fifo",
            "Attributes": {
                "FifoQueue": "true",
                "RedrivePolicy": '{"deadLetterTargetArn":"arn:aws:sqs:r:1:d","maxReceiveCount":3}',
            },
        },
    ),
    _seed(
        "SendMessage",
        {
            "QueueUrl": _URL,
            "MessageBody": "x",
            "DelaySeconds": "3",
            "MessageAttributes": {"a": {"DataType": "Number", "StringValue": "1.5e3"}},
        },
    ),
    _seed("CreateQueue", {"QueueName": "q", "Attributes": {"RedrivePolicy": "[" * 2_000}}),
    _seed("SendMessageBatch", {"QueueUrl": _URL, "Entries": [{"Id": "a", "MessageBody": "b"}]}),
    _seed("ReceiveMessage", {"QueueUrl": _URL, "AttributeNames": ["All"], "WaitTimeSeconds": 1}),
    b"\x01[[[[[[",
)


def one(data: bytes) -> None:
    """Read a body: what was read is written and read as the same."""
    if not data:
        return
    operation = _NAMES[data[0] % len(_NAMES)]
    try:
        request = protocol.decode_json(data[1:])
    except SqsFault as fault:
        _check_fault(fault)
        return
    assert protocol.decode_json(msgspec.json.encode(request)) == request
    try:
        if operation == "SendMessage":
            messages.check_body(request.message_body)
            messages.check_attributes(request.message_attributes)
        elif operation == "CreateQueue":
            name = queues.check_name(request.queue_name)
            queues.checked_attributes(request.attributes or {}, fifo=name.endswith(".fifo"))
    except SqsFault as fault:
        _check_fault(fault)


def _check_fault(fault: SqsFault) -> None:
    assert msgspec.json.decode(protocol.encode_json_fault(fault))["message"]
