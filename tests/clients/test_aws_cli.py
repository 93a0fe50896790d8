"""The AWS CLI, with signatures on."""

from __future__ import annotations

import hashlib
import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from tests.clients import tools

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.clients.process import Served

pytestmark = pytest.mark.slow


class Aws:
    """The command, told which server to ask."""

    def __init__(self, served: Served, **more: str) -> None:
        self._command = [tools.aws_cli(), "--endpoint-url", served.url, "--output", "json", "sqs"]
        self._environment = {**served.environment, **more}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def __call__(self, *words: str) -> Any:
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) if done.stdout.strip() else None


@pytest.fixture(scope="module")
def aws(served: Served) -> Aws:
    return Aws(served)


def test_the_life_of_a_queue(aws: Aws, served: Served, name: str) -> None:
    url = aws("create-queue", "--queue-name", name, "--attributes", "VisibilityTimeout=45")[
        "QueueUrl"
    ]
    assert url == f"{served.url}/000000000000/{name}"
    assert aws("get-queue-url", "--queue-name", name) == {"QueueUrl": url}
    assert url in aws("list-queues", "--queue-name-prefix", name)["QueueUrls"]
    sent = aws(
        *("send-message", "--queue-url", url, "--message-body", "héllo & <goodbye>"),
        *("--message-attributes", '{"kind":{"DataType":"String","StringValue":"greeting"}}'),
    )
    assert sent["MD5OfMessageBody"] == hashlib.md5("héllo & <goodbye>".encode()).hexdigest()
    attributes = aws("get-queue-attributes", "--queue-url", url, "--attribute-names", "All")
    assert attributes["Attributes"]["VisibilityTimeout"] == "45"
    assert attributes["Attributes"]["ApproximateNumberOfMessages"] == "1"
    assert attributes["Attributes"]["QueueArn"] == f"arn:aws:sqs:us-east-1:000000000000:{name}"
    [message] = aws(
        *("receive-message", "--queue-url", url, "--wait-time-seconds", "5"),
        *("--attribute-names", "All", "--message-attribute-names", "All"),
    )["Messages"]
    assert message["MessageId"] == sent["MessageId"]
    assert message["Body"] == "héllo & <goodbye>"
    assert message["MessageAttributes"]["kind"]["StringValue"] == "greeting"
    assert message["Attributes"]["ApproximateReceiveCount"] == "1"
    aws("delete-message", "--queue-url", url, "--receipt-handle", message["ReceiptHandle"])
    assert aws("receive-message", "--queue-url", url) is None
    aws("send-message", "--queue-url", url, "--message-body", "too many")
    aws("purge-queue", "--queue-url", url)
    assert aws("receive-message", "--queue-url", url) is None
    aws("delete-queue", "--queue-url", url)
    gone = aws.run("get-queue-url", "--queue-name", name)
    assert gone.returncode != 0
    assert "(QueueDoesNotExist)" in gone.stderr or "NonExistentQueue" in gone.stderr


def test_batches_succeed_in_part(aws: Aws, name: str) -> None:
    url = aws("create-queue", "--queue-name", name)["QueueUrl"]
    entries = [
        {"Id": "good", "MessageBody": "one"},
        {"Id": "late", "MessageBody": "two", "DelaySeconds": 901},
    ]
    answer = aws("send-message-batch", "--queue-url", url, "--entries", json.dumps(entries))
    assert [each["Id"] for each in answer["Successful"]] == ["good"]
    assert [(each["Id"], each["SenderFault"]) for each in answer["Failed"]] == [("late", True)]
    received = aws("receive-message", "--queue-url", url, "--max-number-of-messages", "10")
    [handle] = [each["ReceiptHandle"] for each in received["Messages"]]
    entries = [{"Id": "a", "ReceiptHandle": handle}, {"Id": "b", "ReceiptHandle": "nonsense"}]
    answer = aws("delete-message-batch", "--queue-url", url, "--entries", json.dumps(entries))
    assert [each["Id"] for each in answer["Successful"]] == ["a"]
    assert [each["Code"] for each in answer["Failed"]] == ["ReceiptHandleIsInvalid"]


def test_a_wrong_secret_opens_nothing(served: Served, name: str) -> None:
    wrong = Aws(served, AWS_SECRET_ACCESS_KEY="wrong")
    refused = wrong.run("create-queue", "--queue-name", name)
    assert refused.returncode != 0
    assert "(SignatureDoesNotMatch)" in refused.stderr
    assert "wrong" not in served.log.read_text()


def test_without_keys_any_credentials_do(serve: Callable[..., Served], name: str) -> None:
    aws = Aws(serve())
    url = aws("create-queue", "--queue-name", f"{name}.fifo", "--attributes", "FifoQueue=true")
    assert url["QueueUrl"].endswith(f"/{name}.fifo")
    sent = aws(
        *("send-message", "--queue-url", url["QueueUrl"], "--message-body", "x"),
        *("--message-group-id", "g", "--message-deduplication-id", "d"),
    )
    assert int(sent["SequenceNumber"]) > 0
