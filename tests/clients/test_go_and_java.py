"""Go Cloud's own tests of its SQS driver, and the AWS SDK for Java 2 (``java/Sqs.java``)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.clients import tools

if TYPE_CHECKING:
    from tests.clients.process import Served

pytestmark = pytest.mark.slow


def run(served: Served, name: str, *command: str) -> str:
    done = subprocess.run(
        command,
        env={**served.environment, "QUEUE_PREFIX": name},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_go_cloud(served: Served, name: str) -> None:
    told = run(
        served,
        name,
        tools.built("go", "awssnssqs.test"),
        "-test.run",
        "TestConformancePenstock",
        "-test.v",
    )
    passed = set(re.findall(r"^    --- PASS: TestConformancePenstock/(\w+)", told, re.MULTILINE))
    # A queue has no two subscriptions.
    assert re.findall(r"^    --- SKIP: (\S+)", told, re.MULTILINE) == [
        "TestConformancePenstock/TestSendReceiveTwo"
    ]
    assert {"TestNack", "TestDoubleAck", "TestBatching", "TestAs"} <= passed
    assert len(passed) >= 13


def test_java(served: Served, name: str) -> None:
    place = Path(tools.built("java", "Sqs.class")).parent
    told = run(served, name, "java", "-cp", f"{place}:{place}/jars/*", "Sqs")
    program = (Path(__file__).parent / "java" / "Sqs.java").read_text()
    assert re.findall(r"^ok (.*)$", told, re.MULTILINE) == re.findall(r' check\("(.*)", ', program)
