"""The query protocol through the server: forms in, XML out, as older clients speak it."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from xml.etree import ElementTree as ET

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sqs.serving import Served

SPACE = {"s": "http://queue.amazonaws.com/doc/2012-11-05/"}


def ask(url: str, action: str, get: bool = False, /, **fields: str) -> ET.Element:
    """Send a form, as a POST or in the address, and return the answer."""
    text = urlencode({"Action": action, "Version": "2012-11-05", **fields})
    request = (
        urllib.request.Request(f"{url}?{text}")
        if get
        else urllib.request.Request(url, data=text.encode())
    )
    try:
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["Content-Type"] == "text/xml"
            return ET.fromstring(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return ET.fromstring(error.read())


def text_at(root: ET.Element, *path: str) -> str | None:
    return root.findtext("/".join(f"s:{part}" for part in path), namespaces=SPACE)


def error_code(root: ET.Element) -> str | None:
    assert text_at(root, "Error", "Type") == "Sender"
    return text_at(root, "Error", "Code")


@pytest.mark.parametrize("get", [False, True])
def test_a_message_there_and_back(served: Served, get: bool) -> None:
    base = served.url
    made = ask(
        f"{base}/",
        "CreateQueue",
        get,
        QueueName=f"query-{get}",
        **{"Attribute.1.Name": "VisibilityTimeout", "Attribute.1.Value": "40"},
    )
    url = text_at(made, "CreateQueueResult", "QueueUrl")
    assert url == f"{base}/000000000000/query-{get}"
    sent = ask(
        url,
        "SendMessage",
        get,
        MessageBody="a & b\r\n",
        **{
            "MessageAttribute.1.Name": "kind",
            "MessageAttribute.1.Value.DataType": "String",
            "MessageAttribute.1.Value.StringValue": "<x>",
        },
    )
    got = ask(
        url,
        "ReceiveMessage",
        get,
        **{"MessageAttributeName.1": "All", "AttributeName.1": "All"},
    )
    message = ("ReceiveMessageResult", "Message")
    assert text_at(got, *message, "Body") == "a & b\r\n"
    assert text_at(got, *message, "MessageAttribute", "Name") == "kind"
    assert text_at(got, *message, "MessageAttribute", "Value", "StringValue") == "<x>"
    assert text_at(got, *message, "MessageId") == text_at(sent, "SendMessageResult", "MessageId")
    names = [each.text for each in got.iterfind(".//s:Attribute/s:Name", SPACE)]
    assert "ApproximateReceiveCount" in names
    handle = text_at(got, *message, "ReceiptHandle") or ""
    gone = ask(url, "DeleteMessage", get, ReceiptHandle=handle)
    assert text_at(gone, "ResponseMetadata", "RequestId")
    found = ask(url, "GetQueueAttributes", get, **{"AttributeName.1": "VisibilityTimeout"})
    assert text_at(found, "GetQueueAttributesResult", "Attribute", "Value") == "40"


def test_batches_and_lists(served: Served, url: str) -> None:
    entry = "SendMessageBatchRequestEntry"
    sent = ask(
        url,
        "SendMessageBatch",
        **{
            f"{entry}.1.Id": "good",
            f"{entry}.1.MessageBody": "1",
            f"{entry}.2.Id": "late",
            f"{entry}.2.MessageBody": "2",
            f"{entry}.2.DelaySeconds": "901",
        },
    )
    result = "SendMessageBatchResult"
    assert text_at(sent, result, "SendMessageBatchResultEntry", "Id") == "good"
    assert text_at(sent, result, "BatchResultErrorEntry", "Code") == "InvalidParameterValue"
    assert text_at(sent, result, "BatchResultErrorEntry", "SenderFault") == "true"
    listed = ask(served.url, "ListQueues", QueueNamePrefix=url.rpartition("/")[2])
    assert text_at(listed, "ListQueuesResult", "QueueUrl") == url
    ask(url, "TagQueue", **{"Tag.1.Key": "a", "Tag.1.Value": "b"})
    tags = ask(url, "ListQueueTags")
    assert text_at(tags, "ListQueueTagsResult", "Tag", "Key") == "a"
    assert text_at(tags, "ListQueueTagsResult", "Tag", "Value") == "b"


def test_both_protocols_see_the_same_queue(sqs: Any, make: Callable[..., str]) -> None:
    url = make()
    sqs.send_message(QueueUrl=url, MessageBody="by JSON")
    got = ask(url, "ReceiveMessage", VisibilityTimeout="0")
    assert text_at(got, "ReceiveMessageResult", "Message", "Body") == "by JSON"


@pytest.mark.parametrize(
    ("action", "fields", "code"),
    [
        ("Nonsense", {}, "InvalidAction"),
        ("SendMessage", {}, "MissingParameter"),
        ("SendMessage", {"MessageBody": "x", "DelaySeconds": "x"}, "InvalidParameterValue"),
        ("ReceiveMessage", {"QueueUrl": "nowhere"}, "AWS.SimpleQueueService.NonExistentQueue"),
        ("DeleteMessage", {"ReceiptHandle": "<&>"}, "ReceiptHandleIsInvalid"),
        ("SendMessageBatch", {}, "AWS.SimpleQueueService.EmptyBatchRequest"),
        ("SetQueueAttributes", {"Attribute.x.Name": "y"}, "InvalidParameterValue"),
    ],
)
def test_errors_are_xml(url: str, action: str, fields: dict[str, str], code: str) -> None:
    assert error_code(ask(url, action, **fields)) == code


def test_a_request_without_an_action(served: Served) -> None:
    request = urllib.request.Request(served.url, data=b"\xff\xfe")
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    with error.value:
        assert error_code(ET.fromstring(error.value.read())) == "MalformedInput"
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(served.url, data=b"x=1")
    with error.value:
        assert error_code(ET.fromstring(error.value.read())) == "MissingAction"


@pytest.mark.parametrize("path", ["/", "/favicon.ico", "/000000000000/q?x=1"])
def test_a_browser_is_told_which_pages_there_are(served: Served, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(served.url + path)
    with error.value:
        assert error.value.code == 404
        assert b"Pages: /health, /ready, /metrics" in error.value.read()
