"""Messages in and out, with boto3, against a server on loopback."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from tests.sqs.serving import client_of, pause
from tests.waiting import wait_until

from penstock import limits
from penstock.model import Message, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sqs.serving import Served


def code_of(error: pytest.ExceptionInfo[ClientError]) -> str:
    code: str = error.value.response["Error"]["Code"]
    return code


def receive(sqs: Any, url: str, **options: Any) -> list[dict[str, Any]]:
    answer: dict[str, Any] = sqs.receive_message(
        QueueUrl=url,
        MaxNumberOfMessages=options.pop("limit", 10),
        MessageAttributeNames=["All"],
        MessageSystemAttributeNames=["All"],
        **options,
    )
    found: list[dict[str, Any]] = answer.get("Messages", [])
    return found


def name_of(url: str) -> str:
    return url.rpartition("/")[2]


def test_a_message_comes_back_as_it_was_sent(sqs: Any, url: str) -> None:
    attributes = {
        "text": {"DataType": "String", "StringValue": "é <&> 1"},
        "whole": {"DataType": "Number", "StringValue": "-12"},
        "odd": {"DataType": "Number", "StringValue": "+1.50"},
        "huge": {"DataType": "Number", "StringValue": "123456789012345678901234567890"},
        "custom": {"DataType": "Number.java.lang.Long", "StringValue": "7"},
        "bytes": {"DataType": "Binary.gif", "BinaryValue": b"\x00\xff"},
        "queue": {"DataType": "String", "StringValue": "elsewhere"},
        "sqs": {"DataType": "String", "StringValue": "mine"},
        "group": {"DataType": "String", "StringValue": "not the group"},
    }
    trace = "Root=1-5759e988-bd862e3fe1be46a994272793"
    sent = sqs.send_message(
        QueueUrl=url,
        MessageBody="Grüße\r\n",
        MessageAttributes=attributes,
        MessageSystemAttributes={"AWSTraceHeader": {"DataType": "String", "StringValue": trace}},
    )
    (got,) = receive(sqs, url)
    assert got["Body"] == "Grüße\r\n"
    assert got["MessageAttributes"] == attributes
    assert got["Attributes"]["AWSTraceHeader"] == trace
    assert got["MessageId"] == sent["MessageId"]
    assert re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-8[0-9a-f]{3}-[0-9a-f]{12}", got["MessageId"]
    )
    assert got["MD5OfBody"] == sent["MD5OfMessageBody"]
    assert got["MD5OfBody"] == hashlib.md5("Grüße\r\n".encode()).hexdigest()
    assert got["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    assert "MD5OfMessageSystemAttributes" in sent
    assert "SequenceNumber" not in sent


def test_a_sent_message_is_an_ordinary_one(served: Served, sqs: Any, url: str) -> None:
    sqs.send_message(
        QueueUrl=url,
        MessageBody="body",
        MessageGroupId="tenant",
        MessageAttributes={
            "kind": {"DataType": "String", "StringValue": "book"},
            "price": {"DataType": "Number", "StringValue": "12.5"},
            "cover": {"DataType": "Binary", "BinaryValue": b"\x01"},
        },
    )
    (delivery,) = served.broker.claim(name_of(url))
    assert delivery.payload == b"body"
    assert delivery.group == "tenant"
    seen = {name: value for name, value in delivery.attributes.items() if name != "sqs"}
    assert seen == {"queue": name_of(url), "kind": "book", "price": 12.5, "cover": "AQ=="}


def test_filters_of_other_queues_see_message_attributes(served: Served, sqs: Any, url: str) -> None:
    served.broker.create_queue("dear", filter="price > 10 AND kind = 'book'")
    for price in ("9.5", "20"):
        sqs.send_message(
            QueueUrl=url,
            MessageBody=price,
            MessageAttributes={
                "kind": {"DataType": "String", "StringValue": "book"},
                "price": {"DataType": "Number", "StringValue": price},
            },
        )
    assert [each.payload for each in served.broker.claim("dear", limit=10)] == [b"20"]


def test_what_was_published_otherwise_can_be_received(served: Served, sqs: Any, url: str) -> None:
    name = name_of(url)
    served.broker.publish(
        [
            Message(
                b"text",
                {
                    "queue": name,
                    "n": 3,
                    "f": 0.5,
                    "yes": True,
                    "none": None,
                    "t": "x",
                    "odd": "a\x00b",
                },
                group="g",
            ),
            Message(b"\xff\x00", {"queue": name}),
            Message(b"with \x01", {"queue": name, "sqs": "not ours {"}),
        ]
    )
    by_body = {got["Body"]: got for got in receive(sqs, url)}
    assert by_body["text"]["MessageAttributes"] == {
        "n": {"DataType": "Number", "StringValue": "3"},
        "f": {"DataType": "Number", "StringValue": "0.5"},
        "yes": {"DataType": "String", "StringValue": "true"},
        "t": {"DataType": "String", "StringValue": "x"},
        "odd": {"DataType": "Binary", "BinaryValue": b"a\x00b"},
    }
    assert by_body["text"]["Attributes"]["MessageGroupId"] == "g"
    for payload in (b"\xff\x00", b"with \x01"):
        got = by_body[base64.b64encode(payload).decode()]
        assert got["MessageAttributes"]["penstock.encoding"]["StringValue"] == "base64"


def test_attributes_are_given_only_if_asked_for(sqs: Any, url: str) -> None:
    attributes = {name: {"DataType": "String", "StringValue": name} for name in ("a.x", "a.y", "b")}
    sqs.send_message(QueueUrl=url, MessageBody="1", MessageAttributes=attributes)

    def names(*wanted: str) -> set[str]:
        (got,) = sqs.receive_message(
            QueueUrl=url, MessageAttributeNames=list(wanted), VisibilityTimeout=0
        )["Messages"]
        assert "Attributes" not in got
        return set(got.get("MessageAttributes", {}))

    assert names() == set()
    assert names("b", "none") == {"b"}
    assert names("a.*") == {"a.x", "a.y"}
    assert names(".*") == names("All") == {"a.x", "a.y", "b"}


def test_system_attributes_count_receives(sqs: Any, url: str) -> None:
    sqs.send_message(QueueUrl=url, MessageBody="1")
    (first,) = receive(sqs, url, VisibilityTimeout=0)
    pause(0.01)
    (second,) = receive(sqs, url, VisibilityTimeout=0)
    pause(0.01)
    (third,) = receive(sqs, url)
    shown = [each["Attributes"] for each in (first, second, third)]
    assert [each["ApproximateReceiveCount"] for each in shown] == ["1", "2", "3"]
    (stamp,) = {each["ApproximateFirstReceiveTimestamp"] for each in shown}
    assert int(shown[0]["SentTimestamp"]) <= int(stamp)
    (got,) = sqs.receive_message(QueueUrl=url, WaitTimeSeconds=0).get("Messages", [None])
    assert got is None


def with_header(sqs: Any, value: str) -> None:
    """Have every request carry a trace header, as a proxy or an instrumented SDK does."""
    sqs.meta.events.register(
        "before-call.sqs", lambda params, **_: params["headers"].update({"X-Amzn-Trace-Id": value})
    )


def traces(sqs: Any, url: str) -> list[str | None]:
    got = receive(sqs, url)
    got.sort(key=lambda each: each["Body"])
    return [each["Attributes"].get("AWSTraceHeader") for each in got]


def test_the_trace_header_of_a_request_is_that_of_its_messages(
    served: Served, sqs: Any, url: str
) -> None:
    own = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-own"}}
    traced = client_of(served)
    with_header(traced, "Root=1-header;Sampled=1")
    traced.send_message(QueueUrl=url, MessageBody="1")
    answer = traced.send_message_batch(
        QueueUrl=url,
        Entries=[
            {"Id": "2", "MessageBody": "2"},
            {"Id": "3", "MessageBody": "3", "MessageSystemAttributes": own},
        ],
    )
    # A digest is only of what the client has sent as attributes.
    digests = ["MD5OfMessageSystemAttributes" in each for each in answer["Successful"]]
    assert digests == [False, True]
    assert traces(sqs, url) == ["Root=1-header;Sampled=1"] * 2 + ["Root=1-own"]


def test_a_trace_header_that_is_none_refuses_nothing(served: Served, sqs: Any, url: str) -> None:
    traced = client_of(served)
    with_header(traced, "x" * (limits.SQS_MAX_TRACE_CHARS + 1))
    traced.send_message(QueueUrl=url, MessageBody="1")
    assert traces(sqs, url) == [None]


@pytest.mark.parametrize("attempt", ["", "a b", "x" * 129, "\u00e9", "tab\t"])
def test_the_id_of_a_receive_is_checked(sqs: Any, url: str, attempt: str) -> None:
    with pytest.raises(ClientError) as refused:
        sqs.receive_message(QueueUrl=url, ReceiveRequestAttemptId=attempt)
    assert "ReceiveRequestAttemptId" in str(refused.value)
    assert "Messages" not in sqs.receive_message(
        QueueUrl=url, ReceiveRequestAttemptId="!" + "x" * 126 + "~"
    )


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"MessageBody": ""}, "MissingParameter"),
        ({"MessageBody": "\x00"}, "InvalidMessageContents"),
        ({"MessageBody": "\ufffe"}, "InvalidMessageContents"),
        ({"MessageBody": "x" * (1024 * 1024 + 1)}, "InvalidParameterValue"),
        ({"MessageBody": "x", "DelaySeconds": 901}, "InvalidParameterValue"),
        ({"MessageBody": "x", "DelaySeconds": -1}, "InvalidParameterValue"),
        ({"MessageBody": "x", "MessageGroupId": "a b"}, "InvalidParameterValue"),
        ({"MessageBody": "x", "MessageDeduplicationId": "d" * 129}, "InvalidParameterValue"),
        (
            {
                "MessageBody": "x",
                "MessageSystemAttributes": {"Other": {"DataType": "String", "StringValue": "x"}},
            },
            "InvalidParameterValue",
        ),
    ],
)
def test_what_can_not_be_sent(sqs: Any, url: str, fields: dict[str, Any], code: str) -> None:
    with pytest.raises(ClientError) as error:
        sqs.send_message(QueueUrl=url, **fields)
    assert code_of(error) == code
    assert receive(sqs, url) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("", {"DataType": "String", "StringValue": "x"}),
        ("a..b", {"DataType": "String", "StringValue": "x"}),
        (".a", {"DataType": "String", "StringValue": "x"}),
        ("AWS.x", {"DataType": "String", "StringValue": "x"}),
        ("a" * 257, {"DataType": "String", "StringValue": "x"}),
        ("a b", {"DataType": "String", "StringValue": "x"}),
        ("a", {"DataType": "String", "StringValue": ""}),
        ("a", {"DataType": "String"}),
        ("a", {"DataType": "", "StringValue": "x"}),
        ("a", {"DataType": "Text", "StringValue": "x"}),
        ("a", {"DataType": "Number", "StringValue": "1x"}),
        ("a", {"DataType": "Binary", "StringValue": "x"}),
        ("a", {"DataType": "String", "StringValue": "x", "BinaryValue": b"x"}),
    ],
)
def test_attributes_that_can_not_be_sent(
    sqs: Any, url: str, name: str, value: dict[str, Any]
) -> None:
    with pytest.raises(ClientError) as error:
        sqs.send_message(QueueUrl=url, MessageBody="x", MessageAttributes={name: value})
    assert code_of(error) == "InvalidParameterValue"


def test_eleven_attributes_are_too_many(sqs: Any, url: str) -> None:
    value = {"DataType": "String", "StringValue": "x"}
    with pytest.raises(ClientError, match="exceeds the allowed maximum"):
        sqs.send_message(
            QueueUrl=url, MessageBody="x", MessageAttributes={f"a{i}": value for i in range(11)}
        )


def test_a_batch_succeeds_in_part(sqs: Any, url: str) -> None:
    answer = sqs.send_message_batch(
        QueueUrl=url,
        Entries=[
            {"Id": "good", "MessageBody": "1"},
            {"Id": "bad", "MessageBody": "\x02"},
            {"Id": "late", "MessageBody": "2", "DelaySeconds": 901},
            {"Id": "also-good", "MessageBody": "3"},
        ],
    )
    assert [each["Id"] for each in answer["Successful"]] == ["good", "also-good"]
    assert {each["Id"]: each["Code"] for each in answer["Failed"]} == {
        "bad": "InvalidMessageContents",
        "late": "InvalidParameterValue",
    }
    assert all(each["SenderFault"] for each in answer["Failed"])
    assert sorted(each["Body"] for each in receive(sqs, url)) == ["1", "3"]


@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ([], "EmptyBatchRequest"),
        ([{"Id": str(i), "MessageBody": "x"} for i in range(11)], "TooManyEntriesInBatchRequest"),
        ([{"Id": "a", "MessageBody": "x"}] * 2, "BatchEntryIdsNotDistinct"),
        ([{"Id": "a b", "MessageBody": "x"}], "InvalidBatchEntryId"),
        ([{"Id": "a" * 81, "MessageBody": "x"}], "InvalidBatchEntryId"),
        (
            [{"Id": str(i), "MessageBody": "x" * 600_000} for i in range(2)],
            "BatchRequestTooLong",
        ),
    ],
)
def test_batches_that_are_refused(
    sqs: Any, url: str, entries: list[dict[str, Any]], code: str
) -> None:
    with pytest.raises(ClientError) as error:
        sqs.send_message_batch(QueueUrl=url, Entries=entries)
    assert code_of(error) == f"AWS.SimpleQueueService.{code}"


def test_attributes_larger_than_ours_are_refused_one_by_one(sqs: Any, url: str) -> None:
    huge = {"a": {"DataType": "String", "StringValue": "x" * 70_000}}
    answer = sqs.send_message_batch(
        QueueUrl=url,
        Entries=[
            {"Id": "huge", "MessageBody": "1", "MessageAttributes": huge},
            {"Id": "small", "MessageBody": "2"},
        ],
    )
    assert [each["Id"] for each in answer["Successful"]] == ["small"]
    assert [each["Id"] for each in answer["Failed"]] == ["huge"]


def test_a_delayed_message_is_not_there_yet(sqs: Any, make: Callable[..., str]) -> None:
    url = make(DelaySeconds="900")
    sqs.send_message(QueueUrl=url, MessageBody="much later")
    sqs.send_message(QueueUrl=url, MessageBody="now", DelaySeconds=0)
    pause(0.01)
    assert [each["Body"] for each in receive(sqs, url)] == ["now"]
    began = time.perf_counter()
    sqs.send_message(QueueUrl=url, MessageBody="soon", DelaySeconds=1)
    assert [each["Body"] for each in receive(sqs, url, WaitTimeSeconds=20)] == ["soon"]
    assert time.perf_counter() - began > 0.9
    assert receive(sqs, url) == []


def test_a_long_poll_ends_with_the_first_message(served: Served, sqs: Any, url: str) -> None:
    def send() -> None:
        wait_until(lambda: served.batcher.parked)
        sqs.send_message(QueueUrl=url, MessageBody="at last")

    sending = threading.Thread(target=send)
    sending.start()
    began = time.perf_counter()
    assert [each["Body"] for each in receive(sqs, url, WaitTimeSeconds=20)] == ["at last"]
    assert time.perf_counter() - began < 19
    sending.join()


def test_a_queue_has_its_own_waiting_time(sqs: Any, make: Callable[..., str]) -> None:
    url = make(ReceiveMessageWaitTimeSeconds="1")
    began = time.perf_counter()
    assert receive(sqs, url) == []
    assert time.perf_counter() - began > 0.9
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"ReceiveMessageWaitTimeSeconds": "20"})
    began = time.perf_counter()
    assert receive(sqs, url, WaitTimeSeconds=0) == []
    assert time.perf_counter() - began < 19


@pytest.mark.parametrize(
    "fields",
    [
        {"MaxNumberOfMessages": 0},
        {"MaxNumberOfMessages": 11},
        {"WaitTimeSeconds": 21},
        {"WaitTimeSeconds": -1},
        {"VisibilityTimeout": 43_201},
        {"VisibilityTimeout": -1},
    ],
)
def test_receives_that_are_refused(sqs: Any, url: str, fields: dict[str, int]) -> None:
    with pytest.raises(ClientError) as error:
        sqs.receive_message(QueueUrl=url, **fields)
    assert code_of(error) == "InvalidParameterValue"


def test_a_message_is_invisible_until_its_timeout(sqs: Any, make: Callable[..., str]) -> None:
    url = make(VisibilityTimeout="1")
    sqs.send_message(QueueUrl=url, MessageBody="1")
    began = time.perf_counter()
    (first,) = receive(sqs, url)
    (again,) = receive(sqs, url, WaitTimeSeconds=20)
    assert time.perf_counter() - began > 0.9
    assert again["MessageId"] == first["MessageId"]
    assert again["ReceiptHandle"] != first["ReceiptHandle"]


def test_without_visibility_a_message_is_there_for_the_next(
    sqs: Any, make: Callable[..., str]
) -> None:
    url = make(VisibilityTimeout="0")
    sqs.send_message(QueueUrl=url, MessageBody="1")
    assert sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["VisibilityTimeout"])[
        "Attributes"
    ] == {"VisibilityTimeout": "0"}
    for count in ("1", "2", "3"):
        (got,) = receive(sqs, url)
        assert got["Attributes"]["ApproximateReceiveCount"] == count


def test_deleting_settles_a_message_in_the_history(served: Served, sqs: Any, url: str) -> None:
    sqs.send_message(QueueUrl=url, MessageBody="1")
    (got,) = receive(sqs, url)
    for _ in range(2):
        sqs.delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
    (done,) = served.broker.browse(name_of(url), state=State.DONE)
    assert done.payload == b"1"


def test_the_last_handle_deletes_a_message_after_its_timeout(
    served: Served, sqs: Any, make: Callable[..., str]
) -> None:
    """As long as nobody has received it since; alone and in a batch."""
    url = make(VisibilityTimeout="1")
    for body in "1234":
        sqs.send_message(QueueUrl=url, MessageBody=body)
    expired = [each["ReceiptHandle"] for each in receive(sqs, url, limit=2)]
    given_back = [each["ReceiptHandle"] for each in receive(sqs, url, VisibilityTimeout=20)]
    for handle in given_back:
        sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=handle, VisibilityTimeout=0)
    wait_until(lambda: served.broker.stats(name_of(url)).available == 4)
    sqs.delete_message(QueueUrl=url, ReceiptHandle=expired[0])
    sqs.delete_message(QueueUrl=url, ReceiptHandle=given_back[0])
    answer = sqs.delete_message_batch(
        QueueUrl=url,
        Entries=[
            {"Id": str(at), "ReceiptHandle": handle}
            for at, handle in enumerate([expired[1], given_back[1], given_back[0]])
        ],
    )
    assert [each["Id"] for each in answer["Successful"]] == ["0", "1", "2"]
    assert receive(sqs, url) == []
    assert served.broker.stats(name_of(url)).done == 4


def test_a_stale_handle_deletes_nothing_and_succeeds(sqs: Any, url: str) -> None:
    sqs.send_message(QueueUrl=url, MessageBody="1")
    (old,) = receive(sqs, url, VisibilityTimeout=0)
    (new,) = receive(sqs, url)
    sqs.delete_message(QueueUrl=url, ReceiptHandle=old["ReceiptHandle"])
    sqs.change_message_visibility(
        QueueUrl=url, ReceiptHandle=new["ReceiptHandle"], VisibilityTimeout=0
    )
    (again,) = receive(sqs, url, VisibilityTimeout=0)
    # It waits, and two handles are older than the last.
    for got in (old, new):
        sqs.delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
    # One that does not say which receive it is of is good for its own time alone.
    for handle in (again["ReceiptHandle"].rpartition(".")[0], f"{again['ReceiptHandle'][:-1]}0"):
        sqs.delete_message(QueueUrl=url, ReceiptHandle=handle)
    assert len(receive(sqs, url)) == 1


def test_visibility_can_be_changed(sqs: Any, url: str) -> None:
    sqs.send_message(QueueUrl=url, MessageBody="1")
    (got,) = receive(sqs, url)
    handle = got["ReceiptHandle"]
    began = time.perf_counter()
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=handle, VisibilityTimeout=1)
    (got,) = receive(sqs, url, WaitTimeSeconds=20)
    assert time.perf_counter() - began > 0.9
    with pytest.raises(ClientError, match="not available for visibility timeout change") as error:
        sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=handle, VisibilityTimeout=5)
    assert code_of(error) == "InvalidParameterValue"
    handle = got["ReceiptHandle"]
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=handle, VisibilityTimeout=0)
    assert len(receive(sqs, url)) == 1
    with pytest.raises(ClientError) as error:
        sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=handle, VisibilityTimeout=43_201)
    assert code_of(error) == "InvalidParameterValue"


def test_handles_of_nothing_and_of_other_queues(
    sqs: Any, url: str, make: Callable[..., str]
) -> None:
    other = make()
    sqs.send_message(QueueUrl=other, MessageBody="1")
    (got,) = receive(sqs, other)
    for handle in ("nonsense", got["ReceiptHandle"], "ps1-00000000-00000001-" + "0" * 49):
        with pytest.raises(ClientError) as error:
            sqs.delete_message(QueueUrl=url, ReceiptHandle=handle)
        assert code_of(error) == "ReceiptHandleIsInvalid"
        with pytest.raises(ClientError) as error:
            sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=handle, VisibilityTimeout=3)
        assert code_of(error) == "ReceiptHandleIsInvalid"


def test_batches_of_handles_succeed_in_part(sqs: Any, url: str) -> None:
    for body in "123":
        sqs.send_message(QueueUrl=url, MessageBody=body)
    handles = [each["ReceiptHandle"] for each in receive(sqs, url)]
    changed = sqs.change_message_visibility_batch(
        QueueUrl=url,
        Entries=[
            {"Id": "back", "ReceiptHandle": handles[0], "VisibilityTimeout": 0},
            {"Id": "longer", "ReceiptHandle": handles[1], "VisibilityTimeout": 100},
            {"Id": "nonsense", "ReceiptHandle": "x", "VisibilityTimeout": 100},
            {"Id": "too-long", "ReceiptHandle": handles[2], "VisibilityTimeout": 43_201},
        ],
    )
    assert {each["Id"] for each in changed["Successful"]} == {"back", "longer"}
    assert {each["Id"]: each["Code"] for each in changed["Failed"]} == {
        "nonsense": "ReceiptHandleIsInvalid",
        "too-long": "InvalidParameterValue",
    }
    deleted = sqs.delete_message_batch(
        QueueUrl=url,
        Entries=[
            {"Id": "a", "ReceiptHandle": handles[1]},
            {"Id": "b", "ReceiptHandle": "nonsense"},
            {"Id": "c", "ReceiptHandle": handles[2]},
        ],
    )
    assert [each["Id"] for each in deleted["Successful"]] == ["a", "c"]
    assert [each["Code"] for each in deleted["Failed"]] == ["ReceiptHandleIsInvalid"]
    changed = sqs.change_message_visibility_batch(
        QueueUrl=url,
        Entries=[{"Id": "gone", "ReceiptHandle": handles[1], "VisibilityTimeout": 100}],
    )
    assert changed["Failed"] == [
        {
            "Id": "gone",
            "SenderFault": True,
            "Code": "ReceiptHandleIsInvalid",
            "Message": "Message does not exist or is not available for visibility timeout change",
        }
    ]
    assert len(receive(sqs, url)) == 1
    with pytest.raises(ClientError) as error:
        sqs.delete_message_batch(QueueUrl=url, Entries=[])
    assert code_of(error) == "AWS.SimpleQueueService.EmptyBatchRequest"


def test_groups_share_a_standard_queue_fairly(sqs: Any, url: str) -> None:
    for group, count in (("large", 8), ("small", 1)):
        for index in range(count):
            sqs.send_message(QueueUrl=url, MessageBody=f"{group}{index}", MessageGroupId=group)
    first = [receive(sqs, url, limit=1)[0]["Attributes"]["MessageGroupId"] for _ in range(2)]
    assert set(first) == {"large", "small"}


def test_a_queue_that_is_not_there(sqs: Any, served: Served) -> None:
    url = f"{served.url}/000000000000/nowhere"
    calls: list[Callable[[], Any]] = [
        lambda: sqs.send_message(QueueUrl=url, MessageBody="1"),
        lambda: sqs.send_message_batch(QueueUrl=url, Entries=[{"Id": "1", "MessageBody": "1"}]),
        lambda: sqs.receive_message(QueueUrl=url),
        lambda: sqs.delete_message(QueueUrl=url, ReceiptHandle="x"),
        lambda: sqs.purge_queue(QueueUrl=url),
        lambda: sqs.delete_queue(QueueUrl=url),
        lambda: sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"]),
        lambda: sqs.list_queue_tags(QueueUrl=url),
        lambda: sqs.list_dead_letter_source_queues(QueueUrl=url),
    ]
    for call in calls:
        with pytest.raises(sqs.exceptions.QueueDoesNotExist) as error:
            call()
        assert code_of(error) == "AWS.SimpleQueueService.NonExistentQueue"


def test_a_queue_removed_by_other_means_is_gone_at_once(served: Served, sqs: Any, url: str) -> None:
    sqs.send_message(QueueUrl=url, MessageBody="1")
    served.broker.delete_queue(name_of(url))
    with pytest.raises(sqs.exceptions.QueueDoesNotExist):
        sqs.send_message(QueueUrl=url, MessageBody="2")
    with pytest.raises(sqs.exceptions.QueueDoesNotExist):
        sqs.receive_message(QueueUrl=url)
