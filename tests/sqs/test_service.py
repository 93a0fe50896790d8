"""How the service is set up, and what it tells who counts."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from tests.docs.blocks import run_blocks
from tests.sqs.serving import client_of, serving
from tests.sqs.test_messages import receive
from tests.sqs.test_queues import attributes_of, spec_of

from penstock.server import running
from penstock.server.metrics import Metrics
from penstock.server.sqs import SqsOptions


def test_account_region_address_and_retention_can_be_chosen() -> None:
    options = SqsOptions(
        account="123456789012",
        region="eu-north-9",
        url="https://queues.test",
        done_retention_ms=5_000,
    )
    with serving(options=options) as served:
        sqs = client_of(served)
        url = sqs.create_queue(QueueName="q")["QueueUrl"]
        assert url == "https://queues.test/123456789012/q"
        assert attributes_of(sqs, url, "QueueArn") == {
            "QueueArn": "arn:aws:sqs:eu-north-9:123456789012:q"
        }
        assert spec_of(served, url).done_retention_ms == 5_000


def test_the_python_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "sqs.md"
    with running("memory:", http="127.0.0.1:0") as server:
        run_blocks(page, "http://localhost:8816", server.location("http"))
        assert server.broker.stats("jobs").done == 1
    assert capsys.readouterr().out == "work\n"


def test_retention_and_purges_are_settings_of_the_server() -> None:
    given: dict[str, Any] = {"sqs_done_retention": "5s", "sqs_purge_interval": "0"}
    with running("memory:", http="127.0.0.1:0", **given) as server:
        for action in ("Action=CreateQueue&QueueName=q", *["Action=PurgeQueue&QueueUrl=/0/q"] * 2):
            form = f"{action}&Version=2012-11-05".encode()
            with urllib.request.urlopen(server.location("http"), data=form) as answer:
                assert answer.status == 200
        assert server.broker.queue("q").done_retention_ms == 5_000


def test_requests_are_counted_by_operation_and_outcome() -> None:
    metrics = Metrics()
    with serving(metrics=metrics) as served:
        sqs = client_of(served)
        url = sqs.create_queue(QueueName="q")["QueueUrl"]
        receive(sqs, url, WaitTimeSeconds=1)
        with pytest.raises(ClientError):
            sqs.delete_message(QueueUrl=url, ReceiptHandle="x")
    page = metrics.page().decode()
    for operation, outcome in (
        ("CreateQueue", "ok"),
        ("ReceiveMessage", "ok"),
        ("DeleteMessage", "ReceiptHandleIsInvalid"),
    ):
        labels = f'operation="{operation}",outcome="{outcome}",protocol="sqs"'
        assert f"penstock_request_seconds_count{{{labels}}} 1.0" in page
    # In seconds: as milliseconds it would be a thousand.
    waited = re.search(r'penstock_claim_wait_seconds_sum{protocol="sqs"} (.*)', page)
    assert waited is not None
    assert 0.9 < float(waited[1]) < 500


def test_a_failure_of_the_server_is_not_the_sender_s(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as served:
        sqs: Any = client_of(served)
        url = sqs.create_queue(QueueName="q")["QueueUrl"]

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("of the test")

        served.batcher.publish = fail  # type: ignore[assignment, method-assign]
        with pytest.raises(ClientError) as error:
            sqs.send_message(QueueUrl=url, MessageBody="x")
    assert error.value.response["Error"]["Code"] == "InternalFailure"
    assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == 500
    assert "of the test" not in str(error.value)
    assert "of the test" in caplog.text
