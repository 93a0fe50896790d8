"""The pure parts: both protocols, digests and mappings, with garbage and byte by byte."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from xml.etree import ElementTree as ET

import botocore
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import QueueSpec
from penstock.server.sqs import OPERATIONS
from penstock.wire.sqs import messages, protocol, queues
from penstock.wire.sqs.protocol import AttributeValue, SqsEntry, SqsFault, SqsRequest

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = Path(botocore.__file__).parent / "data/sqs/2012-11-05/service-2.json.gz"
VALUES = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), min_size=1
)
NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True)
ATTRIBUTES = st.dictionaries(
    NAMES,
    st.one_of(
        st.builds(AttributeValue, st.sampled_from(["String", "String.x"]), VALUES),
        st.builds(
            AttributeValue,
            st.sampled_from(["Number", "Number.int"]),
            st.one_of(
                st.integers().map(str),
                st.floats(allow_nan=False, allow_infinity=False).map(repr),
                st.sampled_from(["+1", "1.50", "1e5", "00", "-0", ".5", "5.", "1E-7"]),
            ),
        ),
        st.builds(
            AttributeValue,
            st.sampled_from(["Binary", "Binary.png"]),
            st.none(),
            st.binary(min_size=1),
        ),
    ),
    max_size=10,
)


def fault_of(work: Callable[[], object]) -> SqsFault | None:
    try:
        work()
    except SqsFault as fault:
        return fault
    return None


def test_the_requests_are_those_of_the_api_model() -> None:
    model = json.loads(gzip.decompress(MODEL.read_bytes()))
    shapes, operations = model["shapes"], model["operations"]
    assert operations.keys() == OPERATIONS.keys()
    theirs = [
        set(shapes[each["input"]["shape"]].get("members", {})) for each in operations.values()
    ]
    ours = {field.encode_name for field in msgspec.structs.fields(SqsRequest)}
    assert ours - {"Id"} == set().union(*theirs)
    entries = [set(shapes[each]["members"]) for each in shapes if each.endswith("RequestEntry")]
    assert {each.encode_name for each in msgspec.structs.fields(SqsEntry)} == set().union(*entries)


# --- JSON -----------------------------------------------------------------------------------------


@given(st.binary(max_size=60))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    fault = fault_of(lambda: protocol.decode_json(body))
    assert fault is None or fault.code == "SerializationException"


def test_a_body_is_read_whole_or_not_at_all() -> None:
    body = json.dumps({"QueueUrl": "u", "MessageBody": "é", "DelaySeconds": "5"}).encode()
    request: Any = protocol.decode_json(body)
    assert (request.queue_url, request.message_body, request.delay_seconds) == ("u", "é", 5)
    for end in range(1, len(body)):
        with pytest.raises(SqsFault):
            protocol.decode_json(body[:end])
    for more in (b"x", b"{}", b"\x00"):
        with pytest.raises(SqsFault):
            protocol.decode_json(body + more)
    assert protocol.decode_json(body + b"\n ") == request
    assert protocol.decode_json(b"") == SqsRequest()


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"1",
        b'{"QueueUrl": 1}',
        b'{"DelaySeconds": 1.5}',
        b'{"DelaySeconds": 1e999}',
        b'{"MessageAttributes": {"a": []}}',
        b'{"MessageAttributes": {"a": {"BinaryValue": "no base64!"}}}',
        b"[" * 100_000,
        b'{"QueueUrl": "\xff"}',
    ],
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(SqsFault) as fault:
        protocol.decode_json(body)
    assert fault.value.code == "SerializationException"


@pytest.mark.parametrize(
    "target", ["", "AmazonSQS", "AmazonSQS.", "SendMessage", "Other.SendMessage"]
)
def test_unknown_operations(target: str) -> None:
    with pytest.raises(SqsFault) as fault:
        protocol.json_operation(target, OPERATIONS)
    assert fault.value.status == 404
    assert fault.value.query_code == "InvalidAction"


# --- the query protocol ---------------------------------------------------------------------------


def test_a_batch_of_the_query_protocol() -> None:
    entry = "SendMessageBatchRequestEntry"
    text = urlencode(
        {
            "Action": "SendMessageBatch",
            "QueueUrl": "u",
            f"{entry}.2.Id": "b",
            f"{entry}.2.MessageBody": "2",
            f"{entry}.10.Id": "c",
            f"{entry}.10.MessageBody": "3",
            f"{entry}.1.Id": "a",
            f"{entry}.1.MessageBody": "é&=",
            f"{entry}.1.DelaySeconds": "5",
            f"{entry}.1.MessageAttribute.1.Name": "n",
            f"{entry}.1.MessageAttribute.1.Value.DataType": "Binary",
            f"{entry}.1.MessageAttribute.1.Value.BinaryValue": "AQ==",
            f"{entry}.1.MessageSystemAttribute.1.Name": "AWSTraceHeader",
            f"{entry}.1.MessageSystemAttribute.1.Value.StringValue": "t",
        }
    )
    fields = protocol.query_fields(text)
    assert protocol.query_operation(fields, OPERATIONS) == "SendMessageBatch"
    request = protocol.decode_query("SendMessageBatch", fields)
    first, *rest = request.entries or []
    assert [each.id for each in rest] == ["b", "c"]
    assert (first.message_body, first.delay_seconds) == ("é&=", 5)
    assert first.message_attributes == {"n": AttributeValue("Binary", None, b"\x01")}
    assert first.message_system_attributes == {"AWSTraceHeader": AttributeValue(None, "t")}


def test_lists_and_maps_of_the_query_protocol() -> None:
    fields = protocol.query_fields(
        "Action=CreateQueue&QueueName=q&Attribute.1.Name=DelaySeconds&Attribute.1.Value=5"
        "&Tag.1.Key=a&Tag.1.Value=b&Tag.2.Key=c&Tag.2.Value="
    )
    request: Any = protocol.decode_query("CreateQueue", fields)
    assert request.attributes == {"DelaySeconds": "5"}
    assert request.new_queue_tags == {"a": "b", "c": ""}
    request = protocol.decode_query(
        "GetQueueAttributes", protocol.query_fields("AttributeName.1=All&AttributeName.2=QueueArn")
    )
    assert request.attribute_names == ["All", "QueueArn"]
    request = protocol.decode_query(
        "GetQueueAttributes", protocol.query_fields("AttributeName=All")
    )
    assert request.attribute_names == ["All"]


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z]{0,9}(\.[0-9A-Za-z]{0,4}){0,12}", fullmatch=True)
        | st.sampled_from(["Entries", "SendMessageBatchRequestEntry.1", "Attribute.x.Name"]),
        st.text(max_size=5),
        max_size=8,
    ),
    st.sampled_from(sorted(OPERATIONS)),
)
def test_any_fields_are_read_or_refused(fields: dict[str, str], operation: str) -> None:
    fault = fault_of(
        lambda: protocol.decode_query(operation, protocol.query_fields(urlencode(fields)))
    )
    assert fault is None or fault.status == 400


@given(st.text(max_size=60))
def test_any_text_is_fields_or_refused(text: str) -> None:
    fault = fault_of(lambda: protocol.query_operation(protocol.query_fields(text), OPERATIONS))
    assert fault is None or fault.sender


@pytest.mark.parametrize(
    "text",
    [
        "&".join(f"a{i}=1" for i in range(1_001)),
        "a=%FF",
        "Attribute=1&Attribute.1.Name=x",
        "Attribute.1.Name=x&Attribute.1=1",
        "DelaySeconds=x",
    ],
)
def test_fields_that_are_refused(text: str) -> None:
    with pytest.raises(SqsFault):
        protocol.decode_query("SendMessage", protocol.query_fields(text))


@given(VALUES, st.binary())
def test_answers_are_xml_that_reads_back(text: str, data: bytes) -> None:
    answer = {
        "Messages": [
            {
                "Body": text + "\r\n\t<&>]]>",
                "Attributes": {"SenderId": text},
                "MessageAttributes": {"a": AttributeValue("Binary", None, data)},
            }
        ],
        "Failed": [{"Id": "1", "SenderFault": True}],
        "Successful": [{"Id": "2"}],
    }
    root = ET.fromstring(protocol.encode_query("SendMessageBatch", answer, "id"))
    space = {"s": "http://queue.amazonaws.com/doc/2012-11-05/"}

    def at(path: str) -> str | None:
        return root.findtext("s:SendMessageBatchResult/" + path, namespaces=space)

    assert at("s:Message/s:Body") == text + "\r\n\t<&>]]>"
    assert at("s:Message/s:Attribute/s:Value") == text
    assert at("s:Message/s:MessageAttribute/s:Value/s:DataType") == "Binary"
    assert at("s:BatchResultErrorEntry/s:SenderFault") == "true"
    assert at("s:SendMessageBatchResultEntry/s:Id") == "2"
    fault = ET.fromstring(protocol.encode_query_fault(SqsFault.value(text, "X", "<"), "id"))
    assert fault.findtext("s:Error/s:Code", namespaces=space) == "InvalidParameterValue"


# --- digests and mappings -------------------------------------------------------------------------


def test_digests_as_others_make_them() -> None:
    assert messages.md5_of_body(b"derp") == "58fd9edd83341c29f1aebba81c31e257"
    number = AttributeValue("Number", "1493147359900")
    assert messages.md5_of_attributes({"timestamp": number}) == "235c5c510d26fb653d073faed50ae77c"
    several = {
        "mybin": AttributeValue("Binary", None, b"kekchebukek"),
        "id": AttributeValue("String", "453ae55e-f03b-21a6-a4b1-70c2e2e8fe71"),
        "timestamp": AttributeValue("Number.java.lang.Long", "1603134247654"),
        "contentType": AttributeValue("String", "application/json"),
    }
    assert messages.md5_of_attributes(several) == "049075255ebc53fb95f7f9f3cedf3c50"


@given(ATTRIBUTES, st.none() | VALUES, st.none() | VALUES, st.none() | VALUES)
def test_attributes_come_back_as_they_were(
    attributes: dict[str, AttributeValue], trace: str | None, dedup: str | None, sender: str | None
) -> None:
    messages.check_attributes(attributes)
    made = messages.to_attributes(
        "the-queue", attributes, trace=trace, dedup_id=dedup, sender=sender
    )
    assert made["queue"] == "the-queue"
    shown, kept = messages.shown_attributes(made)
    assert shown == attributes
    assert (kept.trace, kept.dedup_id, kept.sender) == (trace, dedup, sender)


def test_plain_attributes_need_nothing_more() -> None:
    attributes = {"a": AttributeValue("String", "x"), "n": AttributeValue("Number", "5")}
    assert messages.to_attributes("q", attributes) == {"queue": "q", "a": "x", "n": 5}


@given(
    st.dictionaries(
        st.sampled_from(["a", "b"]) | st.text(min_size=1),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    ),
    st.text()
    | st.fixed_dictionaries(
        {
            "a": st.dictionaries(
                st.sampled_from(["a", "b", "queue", "sqs", "\0"]),
                st.tuples(
                    st.sampled_from(["Binary", "Number", "String"]) | st.text(),
                    st.none() | st.text(),
                ),
            )
        },
        optional={"t": st.text(), "d": st.text(), "s": st.text()},
    ).map(json.dumps),
)
def test_whatever_others_publish_can_be_shown(attributes: dict[str, Any], ours: Any) -> None:
    shown, kept = messages.shown_attributes({**attributes, "queue": "q", "sqs": ours})
    assert shown.get("queue") is None or "queue" in kept.attributes
    shown |= {"kept": AttributeValue("String", f"{kept.trace}{kept.dedup_id}{kept.sender}")}
    encoded = {"MessageAttributes": {**shown}}
    ET.fromstring(protocol.encode_query("ReceiveMessage", {"Messages": [encoded]}, "id"))
    messages.md5_of_attributes(shown)
    protocol.encode_json(encoded)


@given(st.binary())
def test_any_payload_is_a_body(payload: bytes) -> None:
    body, encoded = messages.shown_body(payload)
    assert encoded or body.encode() == payload
    if body:
        assert messages.check_body(body) == body.encode()


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_message_ids_are_uuids_and_all_different(store: int, message: int) -> None:
    made = messages.message_uuid(store, message)
    head, *rest = made.split("-")
    assert int(head, 16) == store
    assert [len(part) for part in rest] == [4, 4, 4, 12]
    assert rest[1][0] == rest[2][0] == "8"
    assert int(rest[0], 16) << 48 | int(rest[1][1:], 16) << 36 | int(rest[3], 16) == message


@given(st.dictionaries(st.text(), st.text(), max_size=4), st.booleans())
def test_any_attributes_of_a_queue_are_taken_or_refused(
    attributes: dict[str, str], fifo: bool
) -> None:
    fault = fault_of(
        lambda: queues.settings_for(queues.checked_attributes(attributes, fifo=fifo), {})
    )
    assert fault is None or fault.status == 400


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "sqs.MaximumMessageSize",
                "sqs.VisibilityTimeout",
                "sqs.tags",
                "sqs.Policy",
                "sqs.RedriveAllowPolicy",
                "sqs.ReceiveMessageWaitTimeSeconds",
            ]
        ),
        st.text() | st.sampled_from(["{}", "[]", "null", "1", '{"Statement": 1}']),
    )
)
def test_labels_that_others_wrote_do_no_harm(labels: dict[str, str]) -> None:
    spec = QueueSpec(name="q", filter="queue = 'q'", labels=labels)
    queues.attributes_of(spec, None, str.upper)
    queues.tags_of(labels)
    queues.allows_source(labels, "arn")
    request = SqsRequest(label="label", aws_account_ids=["1"], actions=["SendMessage"])
    queues.with_permission(labels, request, "arn")


@pytest.mark.parametrize("arn", ["", "x", "arn:aws:sqs:r:a:", "arn:aws:sns:r:a:q", "a:b:sqs:c:d:q"])
def test_what_is_no_arn_of_a_queue(arn: str) -> None:
    assert queues.name_of_arn(arn) is None
