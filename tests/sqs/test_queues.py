"""Queues: made, changed, listed, tagged, purged and removed, with boto3."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from tests.sqs.serving import client_of, serving
from tests.sqs.test_messages import code_of, name_of, receive

from penstock import limits
from penstock.errors import StorageFailed
from penstock.model import Ordering

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sqs.serving import Served


def attributes_of(sqs: Any, url: str, *names: str) -> dict[str, str]:
    answer: dict[str, Any] = sqs.get_queue_attributes(
        QueueUrl=url, AttributeNames=list(names) or ["All"]
    )
    found: dict[str, str] = answer.get("Attributes", {})
    return found


def spec_of(served: Served, url: str) -> Any:
    return next(spec for spec in served.broker.queues() if spec.name == name_of(url))


def test_a_queue_has_the_defaults_of_sqs(served: Served, sqs: Any, url: str) -> None:
    found = attributes_of(sqs, url)
    made = found.pop("CreatedTimestamp")
    assert found.pop("LastModifiedTimestamp") == made
    assert found == {
        "QueueArn": f"arn:aws:sqs:us-east-1:000000000000:{name_of(url)}",
        "VisibilityTimeout": "30",
        "MaximumMessageSize": "1048576",
        "MessageRetentionPeriod": "345600",
        "DelaySeconds": "0",
        "ReceiveMessageWaitTimeSeconds": "0",
        "SqsManagedSseEnabled": "false",
        "ApproximateNumberOfMessages": "0",
        "ApproximateNumberOfMessagesNotVisible": "0",
        "ApproximateNumberOfMessagesDelayed": "0",
    }
    assert url == f"{served.url}/000000000000/{name_of(url)}"
    spec = spec_of(served, url)
    assert spec.filter == f"queue = '{name_of(url)}'"
    assert spec.max_attempts == limits.MAX_ATTEMPTS
    assert spec.backoff_base_ms == 0
    assert spec.done_retention_ms == 3_600_000


def test_attributes_become_settings(served: Served, sqs: Any, make: Callable[..., str]) -> None:
    url = make(VisibilityTimeout="7", DelaySeconds="3", MessageRetentionPeriod="90")
    spec = spec_of(served, url)
    assert (spec.lease_ms, spec.delay_ms, spec.unclaimed_retention_ms) == (7_000, 3_000, 90_000)
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": "8"})
    spec = spec_of(served, url)
    assert (spec.lease_ms, spec.delay_ms, spec.unclaimed_retention_ms) == (8_000, 3_000, 90_000)


def test_what_has_no_setting_is_kept_and_given_back(sqs: Any, make: Callable[..., str]) -> None:
    given = {
        "KmsMasterKeyId": "alias/key",
        "KmsDataKeyReusePeriodSeconds": "600",
        "MaximumMessageSize": "2048",
        "ReceiveMessageWaitTimeSeconds": "4",
        "SqsManagedSseEnabled": "true",
        "Policy": json.dumps({"Version": "2012-10-17", "Statement": []}),
        "RedriveAllowPolicy": json.dumps({"redrivePermission": "allowAll"}),
    }
    url = make(**given)
    assert attributes_of(sqs, url, *given) == given
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"Policy": "", "KmsMasterKeyId": ""})
    left = attributes_of(sqs, url)
    assert not {"Policy", "KmsMasterKeyId"} & left.keys()
    assert left["MaximumMessageSize"] == "2048"
    with pytest.raises(ClientError, match="shorter than 2048 bytes"):
        sqs.send_message(QueueUrl=url, MessageBody="x" * 2049)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("VisibilityTimeout", "43201", "InvalidAttributeValue"),
        ("VisibilityTimeout", "-1", "InvalidAttributeValue"),
        ("VisibilityTimeout", "x", "InvalidAttributeValue"),
        ("DelaySeconds", "901", "InvalidAttributeValue"),
        ("MaximumMessageSize", "1023", "InvalidAttributeValue"),
        ("MessageRetentionPeriod", "1209601", "InvalidAttributeValue"),
        ("ReceiveMessageWaitTimeSeconds", "21", "InvalidAttributeValue"),
        ("SqsManagedSseEnabled", "perhaps", "InvalidAttributeValue"),
        ("FifoQueue", "tru", "InvalidAttributeValue"),
        ("ContentBasedDeduplication", "true", "InvalidAttributeName"),
        ("QueueArn", "x", "InvalidAttributeName"),
        ("Nonsense", "1", "InvalidAttributeName"),
        ("Policy", "no json", "InvalidParameterValue"),
        ("RedrivePolicy", "{", "InvalidParameterValue"),
        ("RedrivePolicy", '{"maxReceiveCount": 3}', "InvalidParameterValue"),
    ],
)
def test_attributes_that_are_refused(sqs: Any, url: str, name: str, value: str, code: str) -> None:
    before = attributes_of(sqs, url)
    with pytest.raises(ClientError) as error:
        sqs.set_queue_attributes(QueueUrl=url, Attributes={name: value})
    assert code_of(error) == code
    with pytest.raises(ClientError) as error:
        sqs.create_queue(QueueName="never-made", Attributes={name: value})
    assert code_of(error) == code
    assert attributes_of(sqs, url) == before
    assert "never-made" not in str(sqs.list_queues())


@pytest.mark.parametrize("name", ["", "a" * 81, "a.b", "a b", "é", ".x", "x.fifo"])
def test_names_that_are_refused(sqs: Any, name: str) -> None:
    with pytest.raises(ClientError) as error:
        sqs.create_queue(QueueName=name)
    assert code_of(error) == "InvalidParameterValue"


def test_names_may_begin_with_any_letter_that_they_may_have(sqs: Any, url: str) -> None:
    """AWS's client of temporary queues makes such names."""
    for name in (f"__RequesterClientQueues__{name_of(url)}", f"-{name_of(url)}"):
        made = sqs.create_queue(QueueName=name)["QueueUrl"]
        sqs.send_message(QueueUrl=made, MessageBody=name)
        (got,) = sqs.receive_message(QueueUrl=made)["Messages"]
        assert got["Body"] == name
        sqs.delete_queue(QueueUrl=made)


def test_making_a_queue_again(sqs: Any, make: Callable[..., str]) -> None:
    url = make(DelaySeconds="3", VisibilityTimeout="10")
    name = name_of(url)
    assert sqs.create_queue(QueueName=name)["QueueUrl"] == url
    same = {"VisibilityTimeout": "10"}
    assert sqs.create_queue(QueueName=name, Attributes=same)["QueueUrl"] == url
    with pytest.raises(sqs.exceptions.QueueNameExists, match="VisibilityTimeout") as error:
        sqs.create_queue(QueueName=name, Attributes={"VisibilityTimeout": "11"})
    assert code_of(error) == "QueueAlreadyExists"
    assert sqs.get_queue_url(QueueName=name)["QueueUrl"] == url


def test_unknown_attributes_can_not_be_asked_for(sqs: Any, url: str) -> None:
    with pytest.raises(ClientError, match="Unknown Attribute Other") as error:
        attributes_of(sqs, url, "QueueArn", "Other")
    assert code_of(error) == "InvalidAttributeName"
    assert "Attributes" not in sqs.get_queue_attributes(QueueUrl=url)


def test_depth_is_counted_by_state(sqs: Any, url: str) -> None:
    for delay in (0, 0, 0, 900):
        sqs.send_message(QueueUrl=url, MessageBody="1", DelaySeconds=delay)
    (got,) = receive(sqs, url, limit=1)
    counts = attributes_of(
        sqs,
        url,
        "ApproximateNumberOfMessages",
        "ApproximateNumberOfMessagesNotVisible",
        "ApproximateNumberOfMessagesDelayed",
    )
    assert list(counts.values()) == ["2", "1", "1"]
    sqs.delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
    assert attributes_of(sqs, url)["ApproximateNumberOfMessagesNotVisible"] == "0"


def test_a_purge_takes_all_and_is_allowed_once_a_minute(sqs: Any, url: str) -> None:
    for delay in (0, 0, 900):
        sqs.send_message(QueueUrl=url, MessageBody="1", DelaySeconds=delay)
    receive(sqs, url, limit=1)
    sqs.purge_queue(QueueUrl=url)
    found = attributes_of(sqs, url)
    assert {found[name] for name in found if name.startswith("Approximate")} == {"0"}
    with pytest.raises(sqs.exceptions.PurgeQueueInProgress) as error:
        sqs.purge_queue(QueueUrl=url)
    assert code_of(error) == "AWS.SimpleQueueService.PurgeQueueInProgress"


def test_a_purge_that_failed_can_be_tried_again_at_once(
    served: Served, sqs: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise StorageFailed("the disk is gone")

    sqs.send_message(QueueUrl=url, MessageBody="1")
    with monkeypatch.context() as broken:
        broken.setattr(served.broker, "purge", fail)
        with pytest.raises(ClientError) as error:
            sqs.purge_queue(QueueUrl=url)
    assert code_of(error) == "ServiceUnavailable"
    sqs.purge_queue(QueueUrl=url)
    assert receive(sqs, url) == []


def test_a_removed_queue_can_be_made_anew(sqs: Any, make: Callable[..., str]) -> None:
    url = make(".fifo")
    message = {"MessageBody": "1", "MessageGroupId": "g", "MessageDeduplicationId": "d"}
    sqs.send_message(QueueUrl=url, **message)
    sqs.delete_queue(QueueUrl=url)
    assert url not in sqs.list_queues().get("QueueUrls", [])
    again = sqs.create_queue(QueueName=name_of(url), Attributes={"FifoQueue": "true"})["QueueUrl"]
    assert receive(sqs, again) == []
    sqs.send_message(QueueUrl=again, **message)
    assert len(receive(sqs, again)) == 1, "a dedup id of the old queue counted in the new one"


def test_queues_are_listed_by_prefix_and_in_pages(sqs: Any) -> None:
    urls = [sqs.create_queue(QueueName=f"paged-{i}")["QueueUrl"] for i in range(5)]
    sqs.create_queue(QueueName="other")
    assert sqs.list_queues(QueueNamePrefix="paged-")["QueueUrls"] == urls
    pages = sqs.get_paginator("list_queues").paginate(
        QueueNamePrefix="paged-", PaginationConfig={"PageSize": 2}
    )
    assert [page["QueueUrls"] for page in pages] == [urls[:2], urls[2:4], urls[4:]]
    assert "QueueUrls" not in sqs.list_queues(QueueNamePrefix="nothing-")
    for bad in ({"MaxResults": 0}, {"MaxResults": 1001}, {"MaxResults": 1, "NextToken": "é"}):
        with pytest.raises(ClientError) as error:
            sqs.list_queues(**bad)
        assert code_of(error) == "InvalidParameterValue"


def test_tags(sqs: Any, served: Served) -> None:
    url = sqs.create_queue(QueueName="tagged", tags={"a": "1", "b": ""})["QueueUrl"]
    sqs.tag_queue(QueueUrl=url, Tags={"b": "2", "é": "ü"})
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"a": "1", "b": "2", "é": "ü"}
    sqs.untag_queue(QueueUrl=url, TagKeys=["b", "none"])
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"a": "1", "é": "ü"}
    assert json.loads(spec_of(served, url).labels["sqs.tags"]) == {"a": "1", "é": "ü"}
    with pytest.raises(ClientError, match="Too many tags"):
        sqs.tag_queue(QueueUrl=url, Tags={f"k{i}": "v" for i in range(50)})
    with pytest.raises(ClientError) as error:
        sqs.tag_queue(QueueUrl=url, Tags={})
    assert code_of(error) == "MissingParameter"
    sqs.untag_queue(QueueUrl=url, TagKeys=["a", "é"])
    assert "Tags" not in sqs.list_queue_tags(QueueUrl=url)


def test_permissions_are_kept_in_the_policy(sqs: Any, url: str) -> None:
    def add(label: str, *actions: str, accounts: tuple[str, ...] = ("111111111111",)) -> None:
        sqs.add_permission(
            QueueUrl=url, Label=label, AWSAccountIds=list(accounts), Actions=list(actions)
        )

    add("one", "SendMessage")
    add("two", "*", accounts=("111111111111", "222222222222"))
    policy = json.loads(attributes_of(sqs, url, "Policy")["Policy"])
    assert [each["Sid"] for each in policy["Statement"]] == ["one", "two"]
    assert policy["Statement"][0]["Action"] == "SQS:SendMessage"
    assert len(policy["Statement"][1]["Principal"]["AWS"]) == 2
    for label, actions, accounts, code in (
        ("one", ["SendMessage"], ("1",), "InvalidParameterValue"),
        ("new", ["DeleteQueue"], ("1",), "InvalidParameterValue"),
        ("new", ["SendMessage"], (), "InvalidParameterValue"),
        ("new", [], ("1",), "MissingParameter"),
        ("new", ["SendMessage"] * 8, ("1",), "OverLimit"),
    ):
        with pytest.raises(ClientError) as error:
            add(label, *actions, accounts=accounts)
        assert code_of(error) == code
    sqs.remove_permission(QueueUrl=url, Label="one")
    sqs.remove_permission(QueueUrl=url, Label="two")
    assert "Policy" not in attributes_of(sqs, url)
    with pytest.raises(ClientError, match="can't find label"):
        sqs.remove_permission(QueueUrl=url, Label="two")


def test_queues_made_otherwise_are_queues_too(served: Served, sqs: Any) -> None:
    served.broker.create_queue(
        "native", lease_ms=1_500, delay_ms=100, max_attempts=3, labels={"sqs.tags": "no json"}
    )
    url = sqs.get_queue_url(QueueName="native")["QueueUrl"]
    found = attributes_of(sqs, url)
    assert found["VisibilityTimeout"] == "2"
    assert found["DelaySeconds"] == "1"
    assert found["MessageRetentionPeriod"] == "0"
    assert "RedrivePolicy" not in found
    assert "Tags" not in sqs.list_queue_tags(QueueUrl=url)
    served.broker.create_queue("native.ordered", ordering=Ordering.FIFO)
    url = sqs.get_queue_url(QueueName="native.ordered")["QueueUrl"]
    assert attributes_of(sqs, url)["FifoQueue"] == "true"


def test_a_setting_changed_otherwise_is_seen(served: Served, sqs: Any, url: str) -> None:
    served.broker.update_queue(name_of(url), lease_ms=77_000)
    assert attributes_of(sqs, url, "VisibilityTimeout") == {"VisibilityTimeout": "77"}


def test_queues_and_messages_are_there_after_a_restart(tmp_path: Any) -> None:
    store = f"rocksdb:{tmp_path / 'store'}"
    with serving(store=store) as served:
        sqs = client_of(served)
        url = sqs.create_queue(
            QueueName="kept", Attributes={"VisibilityTimeout": "9"}, tags={"a": "b"}
        )["QueueUrl"]
        sent = sqs.send_message(QueueUrl=url, MessageBody="still here")
    with serving(store=store) as served:
        sqs = client_of(served)
        url = sqs.get_queue_url(QueueName="kept")["QueueUrl"]
        (got,) = receive(sqs, url)
        assert (got["Body"], got["MessageId"]) == ("still here", sent["MessageId"])
        assert attributes_of(sqs, url, "VisibilityTimeout") == {"VisibilityTimeout": "9"}
        assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"a": "b"}
