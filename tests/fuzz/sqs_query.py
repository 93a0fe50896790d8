"""The query protocol of SQS: form fields are a request or a fault, and faults are XML."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from penstock.server.sqs import OPERATIONS
from penstock.wire.sqs import protocol
from penstock.wire.sqs.protocol import SqsFault

__all__ = ["SEEDS", "one"]

SEEDS = (
    b"Action=ListQueues&Version=2012-11-05",
    b"Action=CreateQueue&QueueName=q&Attribute.1.Name=DelaySeconds&Attribute.1.Value=5&Tag.1.Key=a",
    b"Action=SendMessage&MessageBody=a%20b&MessageAttribute.1.Name=a&MessageAttribute.1.Value.X=x",
    b"Action=SendMessageBatch&SendMessageBatchRequestEntry.2.MessageAttribute.1.Value.BinaryValue=A",
    b"Action=ReceiveMessage&AttributeName.1=All&AttributeName=b&MaxNumberOfMessages=10",
    b"Action=ChangeMessageVisibility&VisibilityTimeout=zero",
    b"Action=%00&a=%ff",
)


def one(data: bytes) -> None:
    """Read form fields."""
    text = data.decode("latin-1")
    try:
        fields = protocol.query_fields(text)
        operation = protocol.query_operation(fields, OPERATIONS)
        protocol.decode_query(operation, fields)
    except SqsFault as fault:
        ET.fromstring(protocol.encode_query_fault(fault, "id"))
