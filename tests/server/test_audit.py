"""The audit log: every change of queues by any client has its line, and no line is lost unseen."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.exceptions import ClientError
from tests.console.visiting import Visitor
from tests.server.conftest import request as ask_page
from tests.waiting import wait_until

import penstock
from penstock import InvalidInput, Message, QueueNotFound, QueueSpec
from penstock.flight.client import FlightStore
from penstock.server import running
from penstock.server.audit import VERBS
from penstock.server.console.queues import write_settings
from penstock.server.keys import add_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.client import Client
    from penstock.server import Server


class Served:
    """A server with an audit log and one key, and clients of it."""

    def __init__(self, server: Server, path: Path, secret: str) -> None:
        self.server, self.path, self.secret = server, path, secret

    def native(self) -> Client:
        return penstock.connect(self.server.location("native"), token=f"ops:{self.secret}")

    def sqs(self) -> Any:
        return boto3.client(
            "sqs",
            endpoint_url=self.server.location("http"),
            region_name="us-east-1",
            aws_access_key_id="ops",
            aws_secret_access_key=self.secret,
        )

    def lines(self) -> list[dict[str, Any]]:
        """Return the records, and check the fields that all have."""
        found = [json.loads(line) for line in self.path.read_text().splitlines()]
        for line in found:
            assert line["time"].endswith("Z")
            assert line["key"] == "ops"
            assert "127.0.0.1:" in line["address"]
            assert line["ms"] >= 0
        return found

    def told(self) -> list[tuple[Any, ...]]:
        """Return verb, queue, protocol, outcome and count of the records."""
        names = ("verb", "queue", "protocol", "outcome", "count")
        return [tuple(line.get(name) for name in names) for line in self.lines()]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    path, keys = tmp_path / "audit.jsonl", tmp_path / "keys.toml"
    secret = add_key(keys, "ops", ["all"], sqs=True)
    (tmp_path / "backups").mkdir()
    settings: dict[str, Any] = dict.fromkeys(("native", "http", "flight"), "127.0.0.1:0")
    settings |= {"keys": keys, "audit_path": path, "backup_directory": tmp_path / "backups"}
    with running(f"rocksdb:{tmp_path}/store", **settings) as server:
        yield Served(server, path, secret)


def fail_messages(client: Client, queue: str, count: int) -> list[int]:
    client.publish([Message(b"secret payload", {"queue": queue})] * count)
    deliveries = client.claim(queue, limit=count)
    client.release([each.receipt for each in deliveries], delay_ms=0)
    return [each.message_id for each in deliveries]


def test_a_native_client(served: Served) -> None:
    with served.native() as client:
        client.create_queue("q", max_attempts=1, labels={"team": "a"})
        client.create_queue("other")
        client.update_queue("q", lease_ms=1_000)
        ids = fail_messages(client, "q", 30)
        assert client.redrive("q", message_ids=ids[:25]) == 25
        assert client.move("q", "other", state="failed") == 5
        assert client.purge("q") == 25
        client.delete_queue("other")
        client.configure_log(retention_ms=3_600_000)
        client.backup("nightly")
        with pytest.raises(QueueNotFound):
            client.purge("nowhere")
    assert served.told() == [
        ("create_queue", "q", "native", "ok", None),
        ("create_queue", "other", "native", "ok", None),
        ("update_queue", "q", "native", "ok", None),
        ("redrive", "q", "native", "ok", 25),
        ("move", "q", "native", "ok", 5),
        ("purge", "q", "native", "ok", 25),
        ("delete_queue", "other", "native", "ok", 5),
        ("configure_log", "", "native", "ok", None),
        ("backup", "", "native", "ok", None),
        ("purge", "nowhere", "native", "QueueNotFound", None),
    ]
    lines = served.lines()
    told = [line["arguments"] for line in lines]
    assert told[0] == {"ordering": "standard", "max_attempts": 1, "labels": {"team": "a"}}
    assert told[2] == {"lease_ms": 1_000}
    assert told[3] == {"message_ids": ids[:20], "message_ids_count": 25}
    assert (told[4]["to"], told[4]["state"]) == ("other", "failed")
    assert told[8] == {"backup": "nightly", "incremental": False}
    assert "no queue named 'nowhere'" in lines[-1]["message"]
    assert "secret payload" not in served.path.read_text()


def test_no_client_makes_a_long_or_a_false_record(served: Served) -> None:
    with served.native() as client:
        client.create_queue("q", labels={f"label-{number}": "x" for number in range(64)})
        client.purge("q", states=["failed"] * 100_000)
        with pytest.raises(InvalidInput):
            client.create_queue("mine", queue="another", filter="x" * 500_000)
    first, second, third = served.lines()
    assert len(first["arguments"]["labels"]) == 64
    assert second["arguments"] == {"states": ["failed"] * 20, "states_count": 100_000}
    assert third["queue"] == "mine"
    assert len(json.dumps(third)) < 20_000


def test_a_record_behind_one_that_was_written_in_part(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with served.native() as client, monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda file, line: write(file, line[:10]))
        client.create_queue("torn")
        disk.setattr(os, "write", write)
        client.create_queue("whole")
    assert served.server.audit is not None
    assert served.server.audit.lost == 1
    torn, whole = served.path.read_text().splitlines()
    assert (len(torn), json.loads(whole)["queue"]) == (10, "whole")


def test_an_sqs_client(served: Served) -> None:
    sqs = served.sqs()
    url = sqs.create_queue(QueueName="q")["QueueUrl"]
    dead = sqs.create_queue(QueueName="dead")["QueueUrl"]
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": "5"})
    sqs.tag_queue(QueueUrl=url, Tags={"a": "b"})
    for _ in range(3):
        sqs.send_message(QueueUrl=dead, MessageBody="x")
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]
    to = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]
    policy = json.dumps({"deadLetterTargetArn": arn["QueueArn"], "maxReceiveCount": 1})
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy})
    sqs.start_message_move_task(SourceArn=arn["QueueArn"], DestinationArn=to["QueueArn"])
    wait_until(lambda: any(line["verb"] == "move" for line in served.lines()))
    sqs.purge_queue(QueueUrl=url)
    sqs.delete_queue(QueueUrl=url)
    with pytest.raises(ClientError):
        sqs.delete_queue(QueueUrl=url)
    told = served.told()
    assert [(*each[:2], each[3]) for each in told[:5]] == [
        ("create_queue", "q", "ok"),
        ("create_queue", "dead", "ok"),
        ("update_queue", "q", "ok"),
        ("update_queue", "q", "ok"),
        ("update_queue", "q", "ok"),
    ]
    assert told[5:] == [
        ("move", "dead", "sqs", "ok", 3),
        ("purge", "q", "sqs", "ok", 3),
        ("delete_queue", "q", "sqs", "ok", 0),
        ("delete_queue", "q", "sqs", "QueueNotFound", None),
    ]


def test_flight_and_the_backup_page(served: Served) -> None:
    with served.native() as client:
        client.create_queue("q", max_attempts=1)
        fail_messages(client, "q", 2)
    store = FlightStore(served.server.location("flight"), token=f"ops:{served.secret}")
    assert store.redrive("q") == 2
    assert store.trim("q", state="failed", before=1_000) == 0
    address, token = served.server.addresses["http"], f"ops:{served.secret}"
    body = b'{"name": "b"}'
    assert ask_page(address, "POST", "/admin/backup", body=body, token=token).status == 200
    assert [(each[0], each[2], each[4]) for each in served.told()[1:]] == [
        ("redrive", "flight", 2),
        ("trim", "flight", 0),
        ("backup", "admin", None),
    ]


def test_the_console(served: Served) -> None:
    visitor = Visitor(served.server)
    visitor.log_in(f"ops:{served.secret}")
    csrf = {"csrf": visitor.get().csrf()}
    form = {**write_settings(QueueSpec(name="made", filter="")), **csrf}
    assert visitor.post("create", {**form, "max_messages": "7"}).status == 303
    assert visitor.post("queues/made/delete", {"name": "made", **csrf}).status == 303
    assert served.told() == [
        ("create_queue", "made", "console", "ok", None),
        ("delete_queue", "made", "console", "ok", 0),
    ]
    told = served.lines()[0]["arguments"]
    assert (told["max_messages"], told["overflow"]) == (7, "refuse")


def test_a_file_that_is_moved_away_is_made_again(served: Served) -> None:
    with served.native() as client:
        client.create_queue("one")
        assert served.path.stat().st_mode & 0o777 == 0o640
        old = served.path.rename(served.path.with_suffix(".1"))
        client.create_queue("two")
    assert [line["queue"] for line in served.lines()] == ["two"]
    assert '"queue":"one"' in old.read_text()


def test_a_record_that_can_not_be_written_is_logged_and_counted(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with served.native() as client:
        client.create_queue("one")
        served.path.unlink()
        served.path.mkdir()
        with caplog.at_level(logging.ERROR):
            # The verb is done all the same.
            assert client.create_queue("two").name == "two"
    assert served.server.audit is not None
    assert served.server.audit.lost == 1
    (said,) = [each.getMessage() for each in caplog.records if "audit" in each.getMessage()]
    assert '"verb":"create_queue","queue":"two"' in said
    assert any(name == "audit_records_lost" and value == 1 for name, _, value, *_ in gauges(served))


def gauges(served: Served) -> list[Any]:
    return list(served.server.gauges())


def test_the_servers_log_in_place_of_a_file(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "penstock.audit"),
        running("memory:", native="127.0.0.1:0", audit_path="log") as server,
        penstock.connect(server.location("native")) as client,
    ):
        client.create_queue("q")
    (record,) = [each for each in caplog.records if each.name == "penstock.audit"]
    assert record.__dict__["fields"]["verb"] == "create_queue"


def test_a_path_that_can_not_be_written(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidInput, match=r"audit log .* can't be written"),
        running("memory:", native="127.0.0.1:0", audit_path=tmp_path / "nowhere" / "a"),
    ):
        pass


def test_the_verbs_are_those_of_a_broker() -> None:
    assert all(callable(getattr(penstock.Broker, verb)) for verb in VERBS)
