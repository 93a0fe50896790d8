"""Clients that close their socket in the middle of a receive: nothing is taken for them."""

from __future__ import annotations

import json
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.sqs.serving import Served, serving
from tests.waiting import wait_until

from penstock import limits
from penstock.clock import ManualClock
from penstock.model import Message

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.broker.broker import Broker

MESSAGES = 200


@contextmanager
def serving_queue(store: str, ordering: str) -> Iterator[Served]:
    with serving(store=store) as server:
        server.broker.create_queue(
            "q", ordering=ordering, max_attempts=1, lease_ms=3_600_000, backoff_base_ms=0
        )
        yield server


@pytest.fixture(params=["standard", "fifo"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving_queue("memory:", request.param) as server:
        yield server


@pytest.fixture(params=["standard", "fifo"])
def synced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    """Serve a store whose answers wait for a sync."""
    with serving_queue(f"rocksdb:{tmp_path}/db", request.param) as server:
        yield server


def receive(wait_s: int) -> bytes:
    body = json.dumps(
        {
            "QueueUrl": "q",
            "WaitTimeSeconds": wait_s,
            "MaxNumberOfMessages": 10,
            "MessageSystemAttributeNames": ["All"],
        }
    ).encode()
    head = "POST / HTTP/1.1\r\nHost: here\r\nX-Amz-Target: AmazonSQS.ReceiveMessage\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def ask(served: Served, wait_s: int) -> socket.socket:
    connection = socket.create_connection((served.host, served.port), timeout=60)
    connection.sendall(receive(wait_s))
    return connection


def leave(connection: socket.socket, how: str) -> None:
    if how == "half":
        connection.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def put(broker: Broker, count: int) -> None:
    broker.publish([Message(b"%d" % n, {"queue": "q"}, group=f"g{n % 20}") for n in range(count)])


def check_all_are_there(broker: Broker, count: int) -> None:
    wait_until(lambda: broker.stats("q").in_flight == 0)
    assert broker.stats("q").available == count
    while deliveries := broker.claim("q", limit=1_000):
        assert {each.attempts for each in deliveries} == {1}
        for group in {each.group for each in deliveries}:
            ids = [each.message_id for each in deliveries if each.group == group]
            assert ids == sorted(ids)
        count -= len(broker.ack([each.receipt for each in deliveries]))
    assert count == 0


@pytest.mark.parametrize("how", ["close", "half", "reset"])
def test_a_long_poll_ends_with_its_connection(
    served: Served, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long who has closed its side may still be answered.
    monkeypatch.setattr(limits, "HTTP_HALF_CLOSED_MS", 600_000)
    connections = [ask(served, 20) for _ in range(5)]
    wait_until(lambda: served.batcher.parked == 5)
    for connection in connections:
        leave(connection, how)
    wait_until(lambda: not served.batcher.parked)
    put(served.broker, MESSAGES)
    check_all_are_there(served.broker, MESSAGES)
    assert served.broker.stats("q").claimed_total == MESSAGES
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("how", ["close", "half", "reset"])
def test_what_was_claimed_for_who_has_gone_is_given_back(
    synced: Served, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_HALF_CLOSED_MS", 600_000)
    put(synced.broker, MESSAGES)
    go_on = threading.Event()
    sync = synced.broker._store.sync

    def slow_sync() -> None:
        assert go_on.wait(60)
        sync()

    monkeypatch.setattr(synced.broker._store, "sync", slow_sync)
    connection = ask(synced, 0)
    wait_until(lambda: synced.broker.stats("q").in_flight)
    leave(connection, how)
    wait_until(
        lambda: all(each._asked is None or each._asked.left for each in synced.http.connections)
    )
    go_on.set()
    check_all_are_there(synced.broker, MESSAGES)
    connection.close()


def test_a_storm_of_closing_long_polls_takes_nothing(served: Served) -> None:
    chance = ManualClock(seed=6)

    def poll(_: int) -> None:
        connection = ask(served, 20)
        if chance.random() < 0.5:
            wait_until(lambda: served.batcher.parked)
        leave(connection, "close" if chance.random() < 0.5 else "reset")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(poll, range(100)))
    wait_until(lambda: not served.http.connections)
    put(served.broker, MESSAGES)
    check_all_are_there(served.broker, MESSAGES)
