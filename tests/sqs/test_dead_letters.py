"""Dead letter queues, and the tasks that move what is in them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from tests.sqs.test_messages import code_of, name_of, receive
from tests.sqs.test_queues import attributes_of, spec_of
from tests.waiting import wait_until

from penstock.model import Message

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sqs.serving import Served


def arn_of(sqs: Any, url: str) -> str:
    return attributes_of(sqs, url, "QueueArn")["QueueArn"]


def policy(arn: str, count: int | str = 1) -> str:
    return json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": count})


@pytest.fixture
def dead(make: Callable[..., str]) -> str:
    return make()


@pytest.fixture
def source(sqs: Any, make: Callable[..., str], dead: str) -> str:
    return make(RedrivePolicy=policy(arn_of(sqs, dead)))


def waiting_in(sqs: Any, url: str) -> int:
    return int(attributes_of(sqs, url)["ApproximateNumberOfMessages"])


def fail(sqs: Any, url: str, dead: str, *bodies: str) -> None:
    """Have messages of a queue become dead letters, which happens in the background."""
    expected = waiting_in(sqs, dead) + len(bodies)
    for body in bodies:
        sqs.send_message(QueueUrl=url, MessageBody=body)
        receive(sqs, url, VisibilityTimeout=0)
    wait_until(lambda: waiting_in(sqs, dead) == expected)


def ended(sqs: Any, arn: str) -> dict[str, Any]:
    """Wait for the end of a move and return what is said of it."""
    tasks: list[dict[str, Any]] = []

    def look() -> bool:
        tasks[:] = sqs.list_message_move_tasks(SourceArn=arn)["Results"]
        return "TaskHandle" not in tasks[0]

    wait_until(look)
    return tasks[0]


def wait_for(count: int, look: Callable[[], list[Any]]) -> list[Any]:
    found: list[Any] = []
    deadline = time.perf_counter() + 60
    while len(found) < count and time.perf_counter() < deadline:
        found += look()
    return found


def test_what_was_received_too_often_goes_to_the_dead_letter_queue(
    sqs: Any, make: Callable[..., str], dead: str
) -> None:
    url = make(RedrivePolicy=policy(arn_of(sqs, dead), 2))
    sent = sqs.send_message(QueueUrl=url, MessageBody="1")
    for _ in range(2):
        assert len(receive(sqs, url, VisibilityTimeout=0)) == 1
    (got,) = wait_for(1, lambda: receive(sqs, dead, WaitTimeSeconds=1))
    assert receive(sqs, url) == []
    assert got["Body"] == "1"
    assert got["MessageId"] == sent["MessageId"]
    assert got["Attributes"]["DeadLetterQueueSourceArn"] == arn_of(sqs, url)


def test_the_policy_is_kept_in_settings(served: Served, sqs: Any, dead: str, source: str) -> None:
    spec = spec_of(served, source)
    assert (spec.max_attempts, spec.dead_letter) == (1, name_of(dead))
    found = attributes_of(sqs, source, "RedrivePolicy")["RedrivePolicy"]
    assert json.loads(found) == json.loads(policy(arn_of(sqs, dead)))
    sqs.set_queue_attributes(
        QueueUrl=source, Attributes={"RedrivePolicy": policy(arn_of(sqs, dead), "7")}
    )
    assert spec_of(served, source).max_attempts == 7
    sqs.set_queue_attributes(QueueUrl=source, Attributes={"RedrivePolicy": ""})
    spec = spec_of(served, source)
    assert (spec.max_attempts, spec.dead_letter) == (65_535, "")
    assert "RedrivePolicy" not in attributes_of(sqs, source)


def test_sources_of_a_dead_letter_queue_are_listed(
    sqs: Any, make: Callable[..., str], dead: str, source: str
) -> None:
    other = make(RedrivePolicy=policy(arn_of(sqs, dead)))
    found = sqs.list_dead_letter_source_queues(QueueUrl=dead)
    assert found["queueUrls"] == sorted([source, other])
    page = sqs.list_dead_letter_source_queues(QueueUrl=dead, MaxResults=1)
    assert len(page["queueUrls"]) == 1
    rest = sqs.list_dead_letter_source_queues(
        QueueUrl=dead, MaxResults=1, NextToken=page["NextToken"]
    )
    assert page["queueUrls"] + rest["queueUrls"] == found["queueUrls"]
    assert sqs.list_dead_letter_source_queues(QueueUrl=source)["queueUrls"] == []


def test_policies_that_are_refused(sqs: Any, make: Callable[..., str], dead: str) -> None:
    arn = arn_of(sqs, dead)
    closed = make(RedriveAllowPolicy=json.dumps({"redrivePermission": "denyAll"}))
    for bad in (
        policy(arn, 0),
        policy(arn, 1001),
        policy(arn, "x"),
        policy(arn + "-not-there"),
        policy(arn + '"'),
        policy("no-arn"),
        policy(arn_of(sqs, closed)),
        policy(arn_of(sqs, make(".fifo"))),
    ):
        with pytest.raises(ClientError) as error:
            make(RedrivePolicy=bad)
        assert code_of(error) == "InvalidParameterValue"
    url = make()
    with pytest.raises(ClientError):
        sqs.set_queue_attributes(
            QueueUrl=url, Attributes={"RedrivePolicy": policy(arn_of(sqs, url))}
        )
    by_queue = {"redrivePermission": "byQueue", "sourceQueueArns": [arn_of(sqs, url)]}
    chosen = make(RedriveAllowPolicy=json.dumps(by_queue))
    sqs.set_queue_attributes(
        QueueUrl=url, Attributes={"RedrivePolicy": policy(arn_of(sqs, chosen))}
    )


def test_dead_letters_go_back_to_where_they_came_from(
    sqs: Any, make: Callable[..., str], dead: str, source: str
) -> None:
    other = make(RedrivePolicy=policy(arn_of(sqs, dead)))
    fail(sqs, source, dead, "1", "2")
    fail(sqs, other, dead, "3")
    sqs.start_message_move_task(SourceArn=arn_of(sqs, dead))
    back = wait_for(2, lambda: receive(sqs, source, WaitTimeSeconds=1))
    assert sorted(each["Body"] for each in back) == ["1", "2"]
    (got,) = wait_for(1, lambda: receive(sqs, other, WaitTimeSeconds=1))
    assert got["Body"] == "3"
    task = ended(sqs, arn_of(sqs, dead))
    assert task["Status"] == "COMPLETED"
    assert task["ApproximateNumberOfMessagesMoved"] == 3
    assert task["ApproximateNumberOfMessagesToMove"] == 3
    assert "TaskHandle" not in task


def test_dead_letters_go_where_they_are_sent(
    sqs: Any, make: Callable[..., str], dead: str, source: str
) -> None:
    fail(sqs, source, dead, "1")
    target = make()
    sqs.start_message_move_task(
        SourceArn=arn_of(sqs, dead),
        DestinationArn=arn_of(sqs, target),
        MaxNumberOfMessagesPerSecond=100,
    )
    (got,) = wait_for(1, lambda: receive(sqs, target, WaitTimeSeconds=1))
    assert got["Body"] == "1"
    (task,) = sqs.list_message_move_tasks(SourceArn=arn_of(sqs, dead))["Results"]
    assert task["DestinationArn"] == arn_of(sqs, target)
    assert task["MaxNumberOfMessagesPerSecond"] == 100


@pytest.mark.usefixtures("source")
def test_a_slow_move_can_be_cancelled(served: Served, sqs: Any, dead: str) -> None:
    served.broker.publish(Message(b"x", {"queue": name_of(dead)}) for _ in range(900))
    arn = arn_of(sqs, dead)
    began = time.perf_counter()
    handle = sqs.start_message_move_task(SourceArn=arn, MaxNumberOfMessagesPerSecond=1)[
        "TaskHandle"
    ]
    with pytest.raises(ClientError, match="already a task running"):
        sqs.start_message_move_task(SourceArn=arn)
    (task,) = sqs.list_message_move_tasks(SourceArn=arn)["Results"]
    assert (task["Status"], task["TaskHandle"]) == ("RUNNING", handle)
    moved = sqs.cancel_message_move_task(TaskHandle=handle)["ApproximateNumberOfMessagesMoved"]
    # One at once and one a second from then on; a second more for a clock that is not exact.
    assert moved < 3 + time.perf_counter() - began
    task = ended(sqs, arn)
    assert task["Status"] == "CANCELLED"
    assert waiting_in(sqs, dead) == 900 - task["ApproximateNumberOfMessagesMoved"] > 0
    with pytest.raises(ClientError) as error:
        sqs.cancel_message_move_task(TaskHandle=handle)
    assert code_of(error) == "ResourceNotFoundException"


def test_a_move_of_what_came_from_nowhere_fails(
    served: Served, sqs: Any, make: Callable[..., str], dead: str
) -> None:
    for _ in range(2):
        make(RedrivePolicy=policy(arn_of(sqs, dead)))
    sqs.send_message(QueueUrl=dead, MessageBody="sent here")
    sqs.start_message_move_task(SourceArn=arn_of(sqs, dead))

    task = ended(sqs, arn_of(sqs, dead))
    assert task["Status"] == "FAILED"
    assert task["FailureReason"] == "CouldNotDetermineMessageSource"
    assert len(receive(sqs, dead)) == 1


def test_moves_that_are_refused(sqs: Any, url: str, dead: str, source: str) -> None:
    arn = arn_of(sqs, dead)
    for fields, code in (
        ({"SourceArn": arn_of(sqs, url)}, "InvalidParameterValue"),
        ({"SourceArn": arn + "-not-there"}, "ResourceNotFoundException"),
        ({"SourceArn": "nonsense"}, "InvalidParameterValue"),
        ({"SourceArn": arn, "DestinationArn": arn}, "InvalidParameterValue"),
        ({"SourceArn": arn, "DestinationArn": arn + "x"}, "ResourceNotFoundException"),
        ({"SourceArn": arn, "MaxNumberOfMessagesPerSecond": 501}, "InvalidParameterValue"),
    ):
        with pytest.raises(ClientError) as error:
            sqs.start_message_move_task(**fields)
        assert code_of(error) == code
    with pytest.raises(ClientError) as error:
        sqs.cancel_message_move_task(TaskHandle="nonsense")
    assert code_of(error) == "ResourceNotFoundException"
    assert sqs.list_message_move_tasks(SourceArn=arn).get("Results", []) == []
