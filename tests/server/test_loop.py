"""What costs more than a millisecond does not run on the loop, where it would hold up everybody."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
from botocore.exceptions import ClientError
from tests.console.visiting import Visitor
from tests.server.test_logs import sqs_of
from tests.waiting import wait_until

import penstock
from penstock import NotAllowed
from penstock.filters import parser
from penstock.flight.client import FlightStore
from penstock.server import access, keys, running
from penstock.server.keys import add_key
from penstock.server.sqs import queues
from penstock.wire import native as wire
from penstock.wire.frames import FrameReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.server.conftest import Certificates

    from penstock.server import Server

ENCODER = wire.Encoder()
LOOP = "penstock-server"
# In another form than the default filter has, which is told by its shape.
FILTER = "(queue) = 'a'"


class Noted(NamedTuple):
    """The threads that have run a function, by name; ``take`` empties the list."""

    threads: list[str]

    def take(self) -> list[str]:
        taken = self.threads[:]
        self.threads.clear()
        return taken


@pytest.fixture
def note(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], Noted]:
    """Note the threads that run a function, which does what it did."""

    def noting(place: Any, name: str) -> Noted:
        noted, function = Noted([]), getattr(place, name)

        def run(*given: Any, **named: Any) -> Any:
            noted.threads.append(threading.current_thread().name)
            return function(*given, **named)

        monkeypatch.setattr(place, name, run)
        return noted

    return noting


@pytest.fixture
def token(tmp_path: Path) -> str:
    secret = add_key(tmp_path / "keys.toml", "low", ["admin:a", "publish:a", "consume:a"])
    return f"low:{secret}"


@pytest.fixture
def sqs_token(tmp_path: Path) -> str:
    return f"sqs:{add_key(tmp_path / 'keys.toml', 'sqs', ['all'], sqs=True)}"


@pytest.fixture
def server(token: str, sqs_token: str, tmp_path: Path) -> Iterator[Server]:
    assert token != sqs_token
    listeners: dict[str, Any] = dict.fromkeys(("native", "http", "flight"), "127.0.0.1:0")
    with running("memory:", **listeners, keys=tmp_path / "keys.toml") as started:
        yield started


def test_filters_are_parsed_on_threads(
    server: Server, token: str, note: Callable[[Any, str], Noted]
) -> None:
    parsed = note(parser, "parse_text")
    with penstock.connect(server.location("native"), token=token) as client:
        client.create_queue("a", filter=FILTER)
        assert parsed.take()
        client.update_queue("a", filter=FILTER)
        with pytest.raises(NotAllowed, match="a filter of its own"):
            client.update_queue("a", filter=f"{FILTER} OR TRUE")
        found = parsed.take()
        assert found
        assert LOOP not in found
    visitor = Visitor(server)
    visitor.log_in(token)
    csrf = visitor.get("queues/a").csrf()
    settings = {"csrf": csrf, "version": "2", "name": "a", "filter": FILTER, "lease_ms": "30s"}
    for path, form in (
        ("filter", {"filter": FILTER}),
        ("filter", {"filter": "queue = ("}),
        ("queues/a/settings", {**settings, "check": "1"}),
        ("queues/a/settings", {**settings, "filter": f"{FILTER} OR TRUE"}),
        ("queues/a/act", {"scope": "found", "where": "x = 1", "action": "purge"}),
    ):
        visitor.post(path, {"csrf": csrf, **form})
        found = parsed.take()
        assert found, path
        assert LOOP not in found, path
    visitor.get("queues/a?where=x+%3D+1")
    assert parsed.take()[0] != LOOP


def test_hashes_of_tokens_are_made_on_one_thread(
    server: Server, token: str, note: Callable[[Any, str], Noted]
) -> None:
    hashed = note(keys, "_scrypt")
    visitor = Visitor(server)

    def native(wrong: str) -> None:
        with (
            pytest.raises(NotAllowed),
            penstock.connect(server.location("native"), token=wrong) as client,
        ):
            client.queues()

    def flight(wrong: str) -> None:
        with pytest.raises(NotAllowed):
            FlightStore(server.location("flight"), token=wrong).queues()

    def page(wrong: str) -> None:
        assert visitor.ask("GET", "/metrics", authorization=f"Bearer {wrong}").status == 401

    for enter in (native, flight, page, visitor.log_in):
        enter("low:wrong")
        assert hashed.take() == ["penstock-login_0"]
    assert "location" in visitor.log_in(token).headers
    assert hashed.take() == ["penstock-login_0"]
    # The key's own secret is known now, so that any other is wrong.
    page("low:wrong")
    with penstock.connect(server.location("native"), token=token) as client:
        client.create_queue("a")
    assert hashed.take() == []


def test_a_greeting_that_is_checked_holds_back_what_follows(server: Server, token: str) -> None:
    """Requests that come with the greeting are begun once the token is known."""
    hello = ENCODER.frame(wire.Hello(wire.MAGIC, wire.VERSION, token=token))
    with socket.create_connection(server.addresses["native"], timeout=60) as line:
        line.sendall(hello + ENCODER.frame(wire.Ping(7)))
        reader = FrameReader()
        answers: list[Any] = []
        while len(answers) < 2:
            reader.feed(line.recv(65_536))
            while (frame := reader.take()) is not None:
                answers.append(msgspec.msgpack.decode(frame))
    assert [each[:2] for each in answers][1:] == [[1, 7]]


def test_sqs_reads_one_queue_for_one_and_lists_on_a_thread(
    server: Server, sqs_token: str, note: Callable[[Any, str], Noted]
) -> None:
    for number in range(3):
        server.broker.create_queue(f"a-{number}")
    read, of_all = note(type(server.broker), "queue"), note(type(server.broker), "queues")
    paged = note(queues, "_page")
    key_id, _, secret = sqs_token.partition(":")
    sqs = sqs_of(server.location("http"), key_id, secret)
    url = sqs.get_queue_url(QueueName="a-1")["QueueUrl"]
    sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])
    sqs.list_queue_tags(QueueUrl=url)
    sqs.send_message(QueueUrl=url, MessageBody="x")
    sqs.send_message(QueueUrl=url, MessageBody="x")
    sqs.create_queue(QueueName="a-4")
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": "7"})
    with pytest.raises(ClientError, match="does not exist"):
        sqs.get_queue_url(QueueName="none")
    assert of_all.take() == []
    assert LOOP not in read.take()
    assert len(sqs.list_queues()["QueueUrls"]) == 4
    assert LOOP not in [*of_all.take(), *paged.take()]
    assert (
        sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"][
            "VisibilityTimeout"
        ]
        == "7"
    )


def test_keys_and_certificate_are_read_again_on_a_thread(
    token: str, certs: Certificates, tmp_path: Path, note: Callable[[Any, str], Noted]
) -> None:
    read = [note(keys, "read_keys"), note(access, "make_context")]
    settings: dict[str, Any] = {
        "native": "127.0.0.1:0",
        "keys": tmp_path / "keys.toml",
        "tls_certificate": certs.certificate,
        "tls_key": certs.key,
    }
    with running("memory:", **settings) as server:
        assert all(each.take() for each in read)
        server.batcher._loop.call_soon_threadsafe(server.reload_soon)
        found: set[str] = set()
        wait_until(lambda: all(each.threads for each in read))
        for each in read:
            found.update(each.take())
        assert LOOP not in found
    assert token
