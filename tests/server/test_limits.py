"""Limits of queues and rates of keys, as the clients of each protocol meet them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import boto3
import pyarrow as pa
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

import penstock
from penstock import LimitReached, Message
from penstock.flight.client import FlightStore
from penstock.server import running
from penstock.server.keys import Keys, add_key, read_keys, write_keys
from penstock.server.security import Rate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.server import Server


class Key:
    """A key that may do anything, at its rate; and clients that use it."""

    def __init__(self, server: Server, key_id: str, secret: str) -> None:
        self.server, self.key_id, self.secret = server, key_id, secret
        self.token = f"{key_id}:{secret}"

    def native(self) -> Any:
        return penstock.connect(self.server.location("native"), token=self.token)

    def publish_rows(self, *payloads: bytes, times: int = 1) -> None:
        attributes = [[("queue", "q")]] * len(payloads)
        kind = pa.map_(pa.string(), pa.string())
        batch = pa.RecordBatch.from_arrays(
            [pa.array(payloads, pa.binary()), pa.array(attributes, kind)],
            ["payload", "attributes"],
        )
        store = FlightStore(self.server.location("flight"), token=self.token)
        store.publish([batch] * times)

    def sqs(self) -> Any:
        return boto3.client(
            "sqs",
            endpoint_url=self.server.location("http"),
            region_name="us-east-1",
            aws_access_key_id=self.key_id,
            aws_secret_access_key=self.secret,
            config=Config(retries={"total_max_attempts": 1}),
        )


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


@pytest.fixture
def server(keys: Path) -> Iterator[Server]:
    add_key(keys, "root", ["all"], sqs=True)
    anywhere: dict[str, Any] = dict.fromkeys(("native", "http", "flight"), "127.0.0.1:0")
    with running("memory:", **anywhere, keys=keys) as server:
        yield server


def key_of(server: Server, keys: Path, **rates: Any) -> Key:
    """Make a key with rates, and have the server read it."""
    secret = add_key(keys, "slow", ["all"], sqs=True, **rates)
    server.reload()
    return Key(server, "slow", secret)


# --- full queues ----------------------------------------------------------------------------------


def test_a_full_queue_refuses_clients_of_every_protocol(server: Server, keys: Path) -> None:
    key = key_of(server, keys)
    with key.native() as client:
        assert client.create_queue("q", max_messages=2).max_messages == 2
        client.send("q", b"1")
        client.send("q", b"2")
        with pytest.raises(LimitReached, match=r"'q' is full: .*max_messages=2"):
            client.send("q", b"3")
        sqs = key.sqs()
        url = sqs.get_queue_url(QueueName="q")["QueueUrl"]
        with pytest.raises(ClientError, match="max_messages=2") as caught:
            sqs.send_message(QueueUrl=url, MessageBody="3")
        assert caught.value.response["Error"]["Code"] == "OverLimit"
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
        with pytest.raises(LimitReached, match="max_messages=2"):
            key.publish_rows(b"3")
        assert client.stats("q").available == 2


def test_messages_of_an_sqs_batch_fail_one_by_one(server: Server, keys: Path) -> None:
    key = key_of(server, keys)
    with key.native() as client:
        client.create_queue("q", max_messages=2)
    entries = [{"Id": str(n), "MessageBody": str(n)} for n in range(3)]
    sqs = key.sqs()
    url = sqs.get_queue_url(QueueName="q")["QueueUrl"]
    answer = sqs.send_message_batch(QueueUrl=url, Entries=entries)
    assert [each["Id"] for each in answer["Successful"]] == ["0", "1"]
    assert [(each["Id"], each["Code"]) for each in answer["Failed"]] == [("2", "OverLimit")]


def test_a_refused_publish_does_not_refuse_its_neighbours(server: Server, keys: Path) -> None:
    key = key_of(server, keys)
    with key.native() as client:
        client.create_queue("full", max_messages=1)
        client.create_queue("q")
        client.send("full", b"")
        # Both are in one turn of the server's loop, as far as the network lets them.
        for _ in range(20):
            with pytest.raises(LimitReached):
                client.send("full", b"")
            client.send("q", b"")
        assert client.stats("q").available == 20


# --- rates ----------------------------------------------------------------------------------------


def test_a_key_keeps_to_its_rate_over_all_protocols(server: Server, keys: Path) -> None:
    # One message in a thousand seconds: the first publish uses up all there is.
    key = key_of(server, keys, messages_per_second=1)
    with key.native() as client:
        client.create_queue("q")
        client.publish([Message(b"", {"queue": "q"})] * 1_000)
        with pytest.raises(
            LimitReached,
            match=r"'slow' publishes too fast: messages_per_second=1\. .* try again in \d+ ms",
        ):
            client.send("q", b"")
        sqs = key.sqs()
        url = sqs.get_queue_url(QueueName="q")["QueueUrl"]
        with pytest.raises(ClientError) as caught:
            sqs.send_message(QueueUrl=url, MessageBody="x")
        answer = caught.value.response
        assert answer["Error"]["Code"] == "RequestThrottled"
        assert 900 < int(answer["ResponseMetadata"]["HTTPHeaders"]["retry-after"]) <= 1_000
        with pytest.raises(LimitReached, match="messages_per_second=1"):
            key.publish_rows(b"")
        assert client.stats("q").available == 1_000
        # Others are not kept from publishing, nor this key from consuming.
        assert client.claim("q")


def test_rows_that_are_too_fast_tell_how_many_were_published(server: Server, keys: Path) -> None:
    key = key_of(server, keys, messages_per_second=1)
    with key.native() as client:
        client.create_queue("q")
        with pytest.raises(LimitReached, match=r"=1\. 100 rows before were published; try again"):
            key.publish_rows(*[b""] * 100, times=2)
        assert client.stats("q").available == 100
        with pytest.raises(LimitReached, match="Nothing was changed; try again"):
            key.publish_rows(b"")


def test_the_file_says_how_fast_a_key_is(keys: Path) -> None:
    secret = add_key(keys, "a", ["all"], messages_per_second=3, bytes_per_second=4)
    assert read_keys(keys)["a"].bytes_per_second == 4
    known = Keys(keys)
    principal = known.by_token(f"a:{secret}")
    assert principal is not None
    principal.spend_rate([Message(b"x" * 4_000)])
    with pytest.raises(LimitReached, match="bytes_per_second=4"):
        principal.spend_rate([Message(b"")])
    # Read again: what was used up stays used up, unless the rates are others.
    assert known.reload()
    with pytest.raises(LimitReached):
        principal.spend_rate([Message(b"")])
    changed = read_keys(keys)
    changed["a"].bytes_per_second = 0
    write_keys(keys, changed)
    assert known.reload()
    principal.spend_rate([Message(b"12345")])


@pytest.mark.parametrize("line", ["messages_per_second = -1", 'bytes_per_second = "1"'])
def test_a_rate_that_is_none(keys: Path, line: str) -> None:
    add_key(keys, "a", ["all"])
    keys.write_text(f"{keys.read_text()}{line}\n")
    with pytest.raises(penstock.InvalidInput, match="per_second"):
        read_keys(keys)


def test_a_rate_saves_up_a_second_and_goes_into_debt() -> None:
    now = [0.0]
    rate = Rate(10, 0, lambda: now[0])
    now[0] = 100.0
    rate.spend("k", 10, 1_000)
    with pytest.raises(LimitReached) as caught:
        rate.spend("k", 1, 0)
    assert caught.value.retry_after_ms == 1
    now[0] += 0.1
    rate.spend("k", 21, 0)
    with pytest.raises(LimitReached) as caught:
        rate.spend("k", 1, 0)
    assert caught.value.retry_after_ms == 2_001
    now[0] += 1.9
    with pytest.raises(LimitReached):
        rate.spend("k", 1, 0)
    now[0] += 0.2
    rate.spend("k", 1, 0)
