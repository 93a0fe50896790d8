"""Where a key may have messages of its queues go: dead letter queues, and targets of moves."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from tests.sqs.serving import client_of, pause, serving
from tests.sqs.test_messages import code_of

from penstock.model import Message
from penstock.server.keys import Keys, add_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.broker.broker import Broker

GRANTS = {
    "team": ["admin:team-*", "consume:team-*"],
    "sender": ["admin:team-*", "publish:secret"],
}


def arn(name: str) -> str:
    return f"arn:aws:sqs:us-east-1:000000000000:{name}"


def policy(name: str) -> dict[str, str]:
    return {"RedrivePolicy": json.dumps({"deadLetterTargetArn": arn(name), "maxReceiveCount": 1})}


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[tuple[Broker, dict[str, Any]]]:
    path = tmp_path / "keys.toml"
    secrets = {name: add_key(path, name, each, sqs=True) for name, each in GRANTS.items()}
    with serving(keys=Keys(path)) as served:
        for name in ("secret", "team-dead"):
            served.broker.create_queue(name)
        yield (
            served.broker,
            {
                name: client_of(served, aws_access_key_id=name, aws_secret_access_key=secret)
                for name, secret in secrets.items()
            },
        )


def refused(act: Any, why: str = "on queue 'secret'", **arguments: Any) -> None:
    with pytest.raises(ClientError) as error:
        act(**arguments)
    assert code_of(error) == "AccessDenied"
    assert f"may not publish {why}" in str(error.value)


def ended(client: Any) -> dict[str, Any]:
    deadline = time.perf_counter() + 60
    while True:
        (task,) = client.list_message_move_tasks(SourceArn=arn("team-dead"))["Results"]
        if task["Status"] != "RUNNING" or time.perf_counter() > deadline:
            return dict(task)
        pause(0.02)


def test_a_dead_letter_queue_wants_publish_or_admin(
    clients: tuple[Broker, dict[str, Any]],
) -> None:
    broker, each = clients
    team, sender = each["team"], each["sender"]
    refused(team.create_queue, QueueName="team-a", Attributes=policy("secret"))
    url = team.create_queue(QueueName="team-a", Attributes=policy("team-dead"))["QueueUrl"]
    refused(team.set_queue_attributes, QueueUrl=url, Attributes=policy("secret"))
    assert broker.queue("team-a").dead_letter == "team-dead"
    sender.set_queue_attributes(QueueUrl=url, Attributes=policy("secret"))
    assert broker.queue("team-a").dead_letter == "secret"


def test_a_move_wants_publish_or_admin_where_it_goes(
    clients: tuple[Broker, dict[str, Any]],
) -> None:
    broker, each = clients
    team, sender = each["team"], each["sender"]
    broker.create_queue("team-a", dead_letter="team-dead", max_attempts=1)
    broker.send("team-dead", b"x")
    start = {"SourceArn": arn("team-dead"), "DestinationArn": arn("secret")}
    refused(team.start_message_move_task, **start)
    sender.start_message_move_task(**start)
    assert ended(sender)["Status"] == "COMPLETED"
    assert broker.stats("secret").available == 1


def test_a_move_without_a_destination_wants_it_for_each_origin(
    clients: tuple[Broker, dict[str, Any]],
) -> None:
    broker, each = clients
    team, sender = each["team"], each["sender"]
    broker.create_queue("team-a", dead_letter="team-dead", max_attempts=1)
    # It says of itself that it came from a queue that has nothing to do with the dead letters.
    broker.update_queue("team-dead", filter="kind = 'spoof'")
    broker.publish([Message(b"x", {"kind": "spoof", "queue": "secret"})])
    waiting = broker.stats("secret").available
    team.start_message_move_task(SourceArn=arn("team-dead"))
    task = ended(team)
    assert task["Status"] == "FAILED"
    assert "may not publish on every queue" in task["FailureReason"]
    assert "secret" not in task["FailureReason"]
    assert broker.stats("team-dead").available == 1
    assert broker.stats("secret").available == waiting
    broker.update_queue("secret", dead_letter="team-dead", max_attempts=1)
    refused(team.start_message_move_task, "on every queue", SourceArn=arn("team-dead"))
    sender.start_message_move_task(SourceArn=arn("team-dead"))
    assert ended(sender)["Status"] == "COMPLETED"
