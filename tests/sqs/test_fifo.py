"""FIFO queues: order, dedup, and receives that are tried again."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from tests.sqs.test_messages import code_of, receive
from tests.sqs.test_queues import attributes_of

if TYPE_CHECKING:
    from collections.abc import Callable


def send(sqs: Any, url: str, body: str, group: str = "g", dedup_id: str | None = None) -> Any:
    extra = {} if dedup_id is None else {"MessageDeduplicationId": dedup_id}
    return sqs.send_message(QueueUrl=url, MessageBody=body, MessageGroupId=group, **extra)


@pytest.fixture
def fifo(make: Callable[..., str]) -> str:
    return make(".fifo", ContentBasedDeduplication="true")


def test_attributes_of_a_fifo_queue(sqs: Any, make: Callable[..., str]) -> None:
    url = make(".fifo", DeduplicationScope="messageGroup", FifoThroughputLimit="perMessageGroupId")
    found = attributes_of(sqs, url)
    assert found["FifoQueue"] == "true"
    assert found["ContentBasedDeduplication"] == "false"
    assert found["DeduplicationScope"] == "messageGroup"
    assert found["FifoThroughputLimit"] == "perMessageGroupId"


def test_a_group_is_delivered_in_order_and_by_one_at_a_time(sqs: Any, fifo: str) -> None:
    sent = [send(sqs, fifo, str(i)) for i in range(4)]
    numbers = [each["SequenceNumber"] for each in sent]
    assert numbers == sorted(numbers)
    assert all(len(each) == 20 for each in numbers)
    (first,) = receive(sqs, fifo, limit=1)
    assert first["Body"] == "0"
    assert first["Attributes"]["SequenceNumber"] == numbers[0]
    assert first["Attributes"]["MessageGroupId"] == "g"
    assert receive(sqs, fifo) == []
    sqs.delete_message(QueueUrl=fifo, ReceiptHandle=first["ReceiptHandle"])
    assert [each["Body"] for each in receive(sqs, fifo)] == ["1", "2", "3"]


def test_a_released_message_comes_first_again(sqs: Any, fifo: str) -> None:
    for body in "ab":
        send(sqs, fifo, body)
    (got,) = receive(sqs, fifo, limit=1)
    sqs.change_message_visibility(
        QueueUrl=fifo, ReceiptHandle=got["ReceiptHandle"], VisibilityTimeout=0
    )
    assert [each["Body"] for each in receive(sqs, fifo)] == ["a", "b"]


def test_content_makes_the_dedup_id(sqs: Any, fifo: str) -> None:
    first, again = send(sqs, fifo, "same"), send(sqs, fifo, "same", group="other")
    assert first["MessageId"] == again["MessageId"]
    assert first["SequenceNumber"] == again["SequenceNumber"]
    (got,) = receive(sqs, fifo)
    digest = hashlib.sha256(b"same").hexdigest()
    assert got["Attributes"]["MessageDeduplicationId"] == digest


def test_a_dedup_id_counts_in_one_queue(sqs: Any, make: Callable[..., str]) -> None:
    one, other = make(".fifo"), make(".fifo")
    for url in (one, other):
        for body in "ab":
            send(sqs, url, body, dedup_id="d")
    for url in (one, other):
        (got,) = receive(sqs, url)
        assert got["Body"] == "a"
        assert got["Attributes"]["MessageDeduplicationId"] == "d"


def test_a_dedup_id_counts_in_one_group_if_the_queue_says_so(
    sqs: Any, make: Callable[..., str]
) -> None:
    url = make(".fifo", DeduplicationScope="messageGroup")
    for group in ("a" * 128, "b" * 128):
        for _ in range(2):
            send(sqs, url, group[0], group=group, dedup_id="d" * 128)
    assert sorted(each["Body"] for each in receive(sqs, url)) == ["a", "b"]


def test_what_a_fifo_queue_refuses(sqs: Any, make: Callable[..., str]) -> None:
    url = make(".fifo")
    for fields, code in (
        ({"MessageDeduplicationId": "d"}, "MissingParameter"),
        ({"MessageGroupId": "g"}, "InvalidParameterValue"),
        (
            {"MessageGroupId": "g", "MessageDeduplicationId": "d", "DelaySeconds": 5},
            "InvalidParameterValue",
        ),
    ):
        with pytest.raises(ClientError) as error:
            sqs.send_message(QueueUrl=url, MessageBody="x", **fields)
        assert code_of(error) == code
    with pytest.raises(ClientError) as error:
        sqs.send_message_batch(QueueUrl=url, Entries=[{"Id": "1", "MessageBody": "x"}])
    assert code_of(error) == "MissingParameter"
    assert receive(sqs, url) == []


def test_an_expired_handle_is_an_error_but_a_repeated_delete_is_not(sqs: Any, fifo: str) -> None:
    send(sqs, fifo, "1")
    (old,) = receive(sqs, fifo, VisibilityTimeout=0)
    (got,) = receive(sqs, fifo)
    with pytest.raises(ClientError, match="The receipt handle has expired") as error:
        sqs.delete_message(QueueUrl=fifo, ReceiptHandle=old["ReceiptHandle"])
    assert code_of(error) == "InvalidParameterValue"
    answer = sqs.delete_message_batch(
        QueueUrl=fifo, Entries=[{"Id": "old", "ReceiptHandle": old["ReceiptHandle"]}]
    )
    assert [each["Code"] for each in answer["Failed"]] == ["InvalidParameterValue"]
    for _ in range(2):
        sqs.delete_message(QueueUrl=fifo, ReceiptHandle=got["ReceiptHandle"])
    answer = sqs.delete_message_batch(
        QueueUrl=fifo, Entries=[{"Id": "again", "ReceiptHandle": got["ReceiptHandle"]}]
    )
    assert [each["Id"] for each in answer["Successful"]] == ["again"]


def test_a_receive_can_be_tried_again(sqs: Any, fifo: str) -> None:
    for body in "ab":
        send(sqs, fifo, body, group=body)
    first = receive(sqs, fifo, limit=1, ReceiveRequestAttemptId="try")
    again = receive(sqs, fifo, limit=1, ReceiveRequestAttemptId="try")
    assert [each["ReceiptHandle"] for each in again] == [each["ReceiptHandle"] for each in first]
    other = receive(sqs, fifo, limit=1, ReceiveRequestAttemptId="another")
    assert other[0]["Body"] != first[0]["Body"]
    sqs.delete_message(QueueUrl=fifo, ReceiptHandle=first[0]["ReceiptHandle"])
    assert receive(sqs, fifo, ReceiveRequestAttemptId="try") == []


def test_a_standard_queue_dedups_as_well(sqs: Any, url: str) -> None:
    ids = {
        sqs.send_message(QueueUrl=url, MessageBody="x", MessageDeduplicationId="d")["MessageId"]
        for _ in range(2)
    }
    assert len(ids) == 1
    assert len(receive(sqs, url)) == 1
