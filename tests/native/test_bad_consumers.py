"""Consumers that behave badly are bounded, and hold up nobody."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
from tests.native.serving import Raw, Served, encoder
from tests.native.test_consume import fill, pushed
from tests.waiting import wait_until

from penstock import Message, limits
from penstock.wire import native as wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock import Broker
    from penstock.client import Client

MUCH = 1 << 24
MEGABYTE = 1 << 20


@pytest.fixture
def raw(served: Served) -> Iterator[Raw]:
    with Raw(served) as made:
        assert isinstance(made.read(), wire.Welcome)
        yield made


@pytest.fixture
def broker(served: Served) -> Broker:
    return served.batcher.broker


def all_come(client: Client, count: int) -> None:
    """Consume as a good client does, beside the bad one."""
    consumer = client.consume("q", wait_ms=60_000)
    for _ in range(count):
        next(consumer).ack()
    assert consumer.flush() == []


def consumer_of(served: Served, number: int = 0) -> Any:
    """Return a consumer of the connection that was made first, once there is one."""
    found: list[Any] = []

    def look() -> bool:
        subscribers = served.batcher._subscriptions.by_queue.get("q", ())
        found[:] = list(subscribers)
        return len(found) > number

    wait_until(look)
    return found[number]


def test_one_that_never_acks_has_what_its_credit_bought(
    broker: Broker, raw: Raw, client: Client
) -> None:
    broker.update_queue("q", lease_ms=200, backoff_base_ms=0)
    fill(client, 20)
    raw.send(encoder.frame(wire.Consume(1, "q", 5, MUCH)))
    held = {each["message_id"] for each in pushed(raw)}
    assert len(held) == 5
    # All of them come to the other, those five after their lease.
    all_come(client, 20)
    assert broker.stats("q").done == 20
    assert broker.stats("q").lease_expired_total == 5


def test_acks_of_what_it_does_not_hold_change_nothing(
    broker: Broker, raw: Raw, client: Client
) -> None:
    fill(client, 2)
    held = client.claim("q")
    client.ack([held[0].receipt])
    raw.send(encoder.frame(wire.Consume(1, "q", 1, MUCH)))
    (delivery,) = pushed(raw)
    stranger = delivery["receipt"][:-16] + "f" * 16
    raw.send(encoder.frame(wire.Ack(2, [held[0].receipt, stranger], None, refused_only=True)))
    outcomes = raw.result()
    assert [each["status"] for each in outcomes] == ["stale", "stale"]
    failure = raw.ask(wire.Ack(3, ["nonsense"], None, refused_only=True))
    assert isinstance(failure, wire.Failure)
    assert failure.name == "InvalidReceipt"
    raw.send(encoder.frame(wire.Ack(4, [delivery["receipt"]], None, refused_only=True)))
    assert raw.result() == []
    assert broker.stats("q").done == 2


def test_a_flood_of_credit_is_cut(served: Served, raw: Raw, client: Client) -> None:
    raw.send(encoder.frame(wire.Consume(1, "q", 1, 1)))
    consumer = consumer_of(served)
    more = encoder.frame(wire.Credit(1, limits.MAX_CREDIT, limits.MAX_CREDIT_BYTES))
    raw.send(more * 2_000)
    assert isinstance(raw.ask(wire.Ping(2)), wire.Result)
    assert consumer._credit == limits.MAX_CREDIT
    assert consumer._credit_bytes == limits.MAX_CREDIT_BYTES
    assert client.ping()


@pytest.mark.parametrize("credit", [(-1, 0), (0, -1), (limits.MAX_CREDIT + 1, 0), (0, 1 << 62)])
def test_impossible_credit_ends_the_consumer(
    served: Served, raw: Raw, credit: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    raw.send(encoder.frame(wire.Consume(1, "q", 1, MUCH)))
    with caplog.at_level(logging.WARNING):
        failure = raw.ask(wire.Credit(1, *credit))
    assert isinstance(failure, wire.Failure)
    assert (failure.id, failure.name) == (1, "InvalidInput")
    assert "was ended" in caplog.text
    assert not served.batcher._subscriptions.by_queue
    assert isinstance(raw.ask(wire.Ping(2)), wire.Result)


def test_consumers_of_a_connection_are_bounded(
    served: Served, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CONSUMERS", 3)
    for n in range(3):
        raw.send(encoder.frame(wire.Consume(n, "q", 1, MUCH)))
    failure = raw.ask(wire.Consume(4, "q", 1, MUCH))
    assert isinstance(failure, wire.Failure)
    assert "3 consumers" in failure.message
    again = raw.ask(wire.Consume(2, "q", 1, MUCH))
    assert isinstance(again, wire.Failure)
    assert again.id == 2
    assert len(served.batcher._subscriptions.by_queue["q"]) == 3


@pytest.mark.parametrize("cut", [False, True], ids=["leaves", "cut off"])
def test_messages_that_never_left_the_server_are_given_back_at_once(
    served: Served, broker: Broker, raw: Raw, client: Client, *, cut: bool
) -> None:
    for _ in range(20):
        client.send("q", b"x" * MEGABYTE)
    # None of them is thought to be larger than it is.
    served.listener.sizes.learn("q", MEGABYTE)
    raw.send(encoder.frame(wire.Consume(1, "q", 20, limits.MAX_CREDIT_BYTES)))
    consumer = consumer_of(served)
    (connection,) = (
        each for each in served.listener.connections if consumer.id in each._consumers.by_id
    )
    wait_until(lambda: connection._stuck_since is not None)
    leased = broker.stats("q").in_flight
    unsent = connection._transport.get_write_buffer_size() // MEGABYTE
    assert 0 < unsent <= leased
    if cut:
        served.loop.call_soon_threadsafe(connection.abort)
    else:
        raw.socket.close()
    # Of one, a part has left.
    wait_until(lambda: broker.stats("q").in_flight <= leased - unsent + 1)
    stats = broker.stats("q")
    assert stats.available + stats.in_flight == 20
    # The others had them, or may have had them.
    assert stats.in_flight > 0
    assert len(client.claim("q", limit=20)) == stats.available


def test_one_that_does_not_read_is_bounded_and_cut_off(
    served: Served,
    broker: Broker,
    raw: Raw,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    body, count = b"x" * 500_000, 200
    raw.send(encoder.frame(wire.Consume(1, "q", limits.MAX_CREDIT, limits.MAX_CREDIT_BYTES)))
    consumer_of(served)
    for _ in range(count // 10):
        client.publish([Message(body, {"queue": "q"})] * 10)
    # It has what was on its way, and nothing is claimed for it any more.
    most = 2 * limits.MAX_BYTES_AT_WORK // len(body)
    assert broker.stats("q").in_flight <= most
    consumer = client.consume("q", wait_ms=1_000)
    got = 0
    for delivery in consumer:
        delivery.ack()
        got += 1
    assert got >= count - most
    # A byte now and then is reading; nothing at all is not.
    assert raw.socket.recv(1)
    monkeypatch.setattr(limits, "MAX_STALL_MS", 100)
    with caplog.at_level(logging.WARNING):
        wait_until(lambda: "was cut off" in caplog.text)
    wait_until(lambda: len(served.batcher._subscriptions.by_queue["q"]) == 1)
    assert client.ping()


def test_one_that_is_cut_in_the_middle_of_a_frame_is_forgotten(
    served: Served, broker: Broker, client: Client
) -> None:
    fill(client, 10)
    request = encoder.frame(wire.Consume(1, "q", 5, MUCH))
    for cut in (2, len(request) - 1):
        with Raw(served) as half:
            half.read()
            half.send(request[:cut])
    assert broker.stats("q").in_flight == 0
    with Raw(served) as whole:
        whole.read()
        whole.send(request + encoder.frame(wire.Credit(1, 1, 0))[:5])
        assert len(pushed(whole)) == 5
    wait_until(lambda: not served.batcher._subscriptions.by_queue)
    # What was written may have come: it stays leased.
    assert broker.stats("q").in_flight == 5
    all_come(client, 5)


def test_what_was_claimed_and_not_written_is_given_back(
    served: Served, broker: Broker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, 5)
    raw = Raw(served)
    raw.read()
    # The client goes while its claim is being made durable.
    tell = broker.tell

    def cut() -> None:
        for connection in list(served.listener.connections):
            connection.abort()

    def cut_first(number: int, answer: Any) -> None:
        served.loop.call_soon(cut)
        served.loop.call_later(0.05, lambda: tell(number, answer))

    monkeypatch.setattr(broker, "tell", cut_first)
    raw.send(encoder.frame(wire.Consume(1, "q", 5, MUCH)))
    wait_until(lambda: broker.stats("q").released_total == 5)
    monkeypatch.undo()
    raw.socket.close()
    assert broker.stats("q").available == 5
    assert {each.attempts for each in broker.claim("q", limit=5)} == {1}


def test_frames_of_messages_with_much_metadata_are_not_too_long(
    broker: Broker, raw: Raw, served: Served
) -> None:
    # The server takes them for as small as those before.
    served.listener.sizes.learn("q", 100)
    text = "x" * (limits.MAX_ATTRIBUTES_BYTES - 100)
    broker.publish([Message(b"", {"queue": "q", "text": text}) for _ in range(50)])
    raw.send(encoder.frame(wire.Consume(7, "q", 50, MUCH)))
    came = 0
    while came < 50:
        each = pushed(raw)
        assert len(each) * len(text) <= limits.MAX_ANSWER_PART_BYTES + limits.MAX_ATTRIBUTES_BYTES
        came += len(each)
