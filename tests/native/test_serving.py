"""The server's side of a connection: bounds, bad input, keys, and how it ends."""

from __future__ import annotations

import asyncio
import resource
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from tests.native.serving import HELLO, Raw, Served, encoder, make_impatient, message, pause
from tests.waiting import wait_until as eventually

import penstock
from penstock import limits
from penstock.errors import InvalidInput, NotAllowed, ServerUnreachable
from penstock.model import Message
from penstock.packing import pack_messages
from penstock.server.keys import Keys, add_key
from penstock.server.native.requests import VERBS
from penstock.wire import native as wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_byte_by_byte(served: Served) -> None:
    with Raw(served, b"") as raw:
        for byte in HELLO + encoder.frame(wire.Ping(5)):
            raw.send(bytes([byte]))
        assert isinstance(raw.read(), wire.Welcome)
        assert raw.result() > 0


def test_the_welcome_names_the_store_and_the_bounds(served: Served) -> None:
    with Raw(served) as raw:
        welcome = raw.read()
    assert isinstance(welcome, wire.Welcome)
    assert welcome.version == wire.VERSION
    assert welcome.store_id == served.broker.info().store_id
    assert welcome.limits["frame_bytes"] == limits.MAX_FRAME_BYTES
    assert "dedup_window_ms" not in welcome.limits


def test_the_welcome_tells_of_a_short_dedup_window() -> None:
    with (
        penstock.open("memory:", dedup_window_ms=5_000) as broker,
        Served(broker) as served,
        Raw(served) as raw,
    ):
        welcome = raw.read()
    assert isinstance(welcome, wire.Welcome)
    assert welcome.limits["dedup_window_ms"] == 5_000


def test_a_newer_client_is_spoken_to_in_the_servers_version(served: Served) -> None:
    with Raw(served, encoder.frame((0, wire.MAGIC, 99, "", "", 0, "more"))) as raw:
        welcome = raw.read()
    assert isinstance(welcome, wire.Welcome)
    assert welcome.version == wire.VERSION


@pytest.mark.parametrize(
    "greeting",
    [
        encoder.frame((0, "somebody", 1)),
        encoder.frame((0, wire.MAGIC, 0)),
        encoder.frame(wire.Ping(1)),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        (limits.MAX_HELLO_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x01\xc1",
    ],
)
def test_a_wrong_greeting_is_the_last_word(served: Served, greeting: bytes) -> None:
    with Raw(served, greeting) as raw:
        bye = raw.read()
        assert isinstance(bye, wire.Bye)
        assert (bye.name, bye.final) == ("InvalidInput", True)
        assert raw.ended()
    with penstock.connect(served.url) as client:
        assert client.ping() > 0


@pytest.mark.parametrize(
    "garbage",
    [
        (limits.MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\x00\x00\x00\x02\xc1\xc1",
        encoder.frame(wire.Ping(1))[:4] + b"\xff" * 3,
        b"\x00\x00\x00\x04" + encoder.frame(wire.Ping(1))[4:] + b"\x00",
        encoder.frame("text"),
    ],
)
def test_a_broken_frame_ends_the_connection_with_a_reason(served: Served, garbage: bytes) -> None:
    with Raw(served) as raw:
        raw.read()
        raw.send(encoder.frame(wire.Ping(1)) + garbage + encoder.frame(wire.Ping(2)))
        assert raw.result() > 0
        bye = raw.read()
        assert isinstance(bye, wire.Bye)
        assert bye.name == "InvalidInput"
        assert raw.ended()


def test_a_wrong_request_costs_only_itself(served: Served) -> None:
    with Raw(served) as raw:
        raw.read()
        for wrong in ((99, 1), (2, 1, 5), (2, 1), (1, 1, [{"payload": "text"}]), (25, 1, 2)):
            failure = raw.ask(wrong)
            assert isinstance(failure, wire.Failure)
            assert (failure.id, failure.name) == (1, "InvalidInput")
        for setting in ("name", "self"):
            failure = raw.ask(wire.CreateQueue(1, "q", {setting: "r"}))
            assert isinstance(failure, wire.Failure)
            assert (failure.name, failure.message) == (
                "InvalidQueue",
                f"a queue has no setting {setting!r}",
            )
        assert isinstance(raw.ask(wire.Ping(2)), wire.Result)


def test_a_bug_of_the_server_is_told_without_its_text(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(served.broker._store, "store_stats", lambda *_: explode(None))
    with penstock.connect(served.url) as client:
        with pytest.raises(penstock.PenstockError, match="RuntimeError") as caught:
            client.store_stats()
        assert "secret" not in str(caught.value)
        assert client.ping() > 0


def test_who_says_nothing_is_let_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_GREETING_MS", 100)
    with Raw(served, HELLO[:-1]) as raw:
        assert raw.ended()


def test_a_frame_that_is_never_ended_is_let_go(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_STALL_MS", 100)
    with Raw(served) as raw:
        raw.read()
        raw.send(b"\x00\x00\x00\x09abc")
        assert isinstance(raw.read(), wire.Bye)
        assert raw.ended()


def test_an_idle_connection_is_let_go_and_made_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with penstock.connect(served.url) as client:
        monkeypatch.setattr(limits, "MAX_IDLE_MS", 100)
        eventually(lambda: not served.listener.connections)
        monkeypatch.setattr(limits, "MAX_IDLE_MS", 300_000)
        assert client.ping() > 0


def test_too_many_connections(served: Served) -> None:
    served.listener.slots.places.most = 2
    with Raw(served) as one, Raw(served) as two:
        assert isinstance(one.read(), wire.Welcome)
        assert isinstance(two.read(), wire.Welcome)
        with Raw(served) as three:
            assert isinstance(three.read(), wire.Bye)
            assert three.ended()
        assert isinstance(one.ask(wire.Ping(1)), wire.Result)


def test_who_does_not_read_is_not_read(served: Served) -> None:
    served.broker.publish([message(b"x" * 1_000_000) for _ in range(20)])
    browse = encoder.frame(wire.Browse(1, "q", "available", 20))
    with Raw(served) as raw:
        raw.read()
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        raw.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            raw.send(browse * 1_000_000)
        (connection,) = served.listener.connections
        eventually(lambda: connection._stuck_since is not None)
        assert connection._reader.pending <= 1 << 20
        # A million answers of 20 MB were asked for.
        after_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert after_kb - before_kb < 600_000
        with penstock.connect(served.url) as client:
            assert client.ping() > 0


def test_who_does_not_read_for_long_is_cut_off(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.broker.publish([message(b"x" * 1_000_000) for _ in range(20)])
    monkeypatch.setattr(limits, "MAX_STALL_MS", 100)
    with Raw(served) as raw:
        raw.read()
        raw.send(encoder.frame(wire.Browse(1, "q", "available", 20)) * 20)
        eventually(lambda: not served.listener.connections)


def test_what_all_connections_have_begun_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BUFFERED_BYTES", 5 << 20)
    begun = (10 << 20).to_bytes(4, "big") + bytes(3 << 20)
    with penstock.open("memory:") as broker, Served(broker) as served:
        held = served.listener.slots
        with Raw(served) as one, Raw(served) as two:
            one.read()
            two.read()
            one.send(begun)
            eventually(lambda: held.held_bytes == len(begun))
            two.send(begun)
            # Who has kept the others waiting for longest is the one to go.
            bye = one.read()
            assert isinstance(bye, wire.Bye)
            assert not bye.final
            eventually(lambda: held.held_bytes == len(begun))
            with penstock.connect(served.url) as client:
                assert client.ping() > 0
        eventually(lambda: held.held_bytes == 0)


def test_what_all_connections_have_at_work_is_bounded(served: Served) -> None:
    served.listener.at_work.most = 2 << 20
    most = 0

    def publish() -> None:
        with penstock.connect(served.url, dedup=False) as client:
            for _ in range(5):
                client.publish([message(b"x" * 700_000)])

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most = max(most, served.listener.at_work.total)
        pause(0.0005)
    # Of this host's half, one more than there is room for is begun, and all of them are in the end.
    assert most < (1 << 20) + 800_000
    assert served.broker.stats("q").available == 40
    assert served.listener.at_work.total == 0
    assert not any(served.listener.waiting.values())


def test_requests_at_work_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REQUESTS_AT_WORK", 3)
    most = 0
    with Raw(served) as raw:
        raw.read()
        (connection,) = served.listener.connections
        raw.send(b"".join(encoder.frame(wire.Stats(n, "q")) for n in range(300)))
        for _ in range(300):
            assert isinstance(raw.read(), wire.Result)
            most = max(most, len(connection._at_work))
    assert most <= 3


def test_a_thousand_claims_wait_without_threads(served: Served) -> None:
    threads = threading.active_count()
    with Raw(served) as raw:
        raw.read()
        raw.send(b"".join(encoder.frame(wire.Claim(n, "q", 1, None, 600_000)) for n in range(1000)))
        eventually(lambda: served.batcher.parked == 1000)
        assert threading.active_count() <= threads
        assert isinstance(raw.ask(wire.Ping(2000)), wire.Result)
        served.broker.publish([message() for _ in range(1000)])
        ids = {raw.read().id for _ in range(1000)}  # type: ignore[union-attr]
    assert ids == set(range(1000))


def test_too_many_waiting_claims_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_WAITING_CLAIMS", 2)
    with Raw(served) as raw:
        raw.read()
        for n in range(2):
            raw.send(encoder.frame(wire.Claim(n, "q", 1, None, 600_000)))
        failure = raw.ask(wire.Claim(2, "q", 1, None, 600_000))
        assert isinstance(failure, wire.Failure)
        assert isinstance(raw.ask(wire.Claim(3, "q")), wire.Result)


def test_a_lost_connection_takes_its_waiting_claims_along(served: Served) -> None:
    with Raw(served) as raw:
        raw.read()
        raw.send(encoder.frame(wire.Claim(1, "q", 1, None, 600_000)))
        eventually(lambda: served.batcher.parked == 1)
    eventually(lambda: served.batcher.parked == 0)
    with penstock.connect(served.url) as client:
        client.send("q", b"x")
        assert [d.attempts for d in client.claim("q")] == [1]


def test_who_sends_nothing_more_has_no_claims_that_wait(served: Served) -> None:
    with Raw(served) as raw:
        raw.read()
        raw.send(encoder.frame(wire.Claim(1, "q", 1, None, 600_000)))
        eventually(lambda: served.batcher.parked == 1)
        (connection,) = served.listener.connections
        # As the loop calls it, which then sends what is unsent for as long as that takes.
        served.loop.call_soon_threadsafe(connection.eof_received)
        eventually(lambda: served.batcher.parked == 0)
        assert served.listener.connections


def test_a_farewell_lets_waiting_claims_go(served: Served) -> None:
    with Raw(served) as raw:
        raw.read()
        raw.send(encoder.frame(wire.Claim(1, "q", 1, None, 600_000)))
        eventually(lambda: served.batcher.parked == 1)
        raw.send(b"\x00\x00\x00\x01\xc1")
        assert isinstance(raw.read(), wire.Bye)
        eventually(lambda: not served.batcher.parked)
        served.broker.publish([message()])
        assert served.broker.stats("q").in_flight == 0
        assert len(served.broker.claim("q")) == 1


def test_what_comes_for_a_claim_behind_the_last_word_goes_back(served: Served) -> None:
    with Raw(served) as raw:
        raw.read()
        raw.send(encoder.frame(wire.Claim(1, "q", 1, None, 600_000)))
        eventually(lambda: served.batcher.parked == 1)
        (connection,) = served.listener.connections
        connection._shut = True
        served.broker.publish([message()])
        eventually(lambda: served.broker.stats("q").released_total == 1)
        (delivery,) = served.broker.claim("q", wait_ms=60_000)
        assert delivery.attempts == 1


def test_claims_of_who_does_not_read_take_no_more_than_fits(served: Served) -> None:
    count, size = 60, 1_000_000
    # Whatever was claimed and not delivered would have failed.
    served.broker.update_queue("q", max_attempts=1)
    with Raw(served) as raw:
        raw.read()
        for n in range(count + 40):
            raw.send(encoder.frame(wire.Claim(n + 1, "q", 1, 600_000, 600_000)))
        eventually(lambda: served.batcher.parked == count + 40)
        (connection,) = served.listener.connections
        served.broker.publish([message(b"x" * size) for _ in range(count)])
        eventually(
            lambda: connection._stuck_since is not None and any(connection._backpressure._held)
        )
        assert connection._unsent <= limits.MAX_BYTES_AT_WORK + 2 * size
        # What the kernel holds is its own; the rest is there for others, and stays so.
        assert served.broker.stats("q").available >= count // 2
        threading.Event().wait(0.1)
        assert served.broker.stats("q").available >= count // 2
        assert connection._unsent <= limits.MAX_BYTES_AT_WORK + 2 * size
        assert {entry.attempts for entry in served.broker.browse("q", limit=count)} == {0}
        (one,) = served.broker.claim("q")
        served.broker.ack([one.receipt])
        got = [raw.claimed() for _ in range(count - 1)]
        assert [[each["attempts"] for each in some] for some in got] == [[1]] * (count - 1)
        eventually(lambda: served.batcher.parked == 41)
    stats = served.broker.stats("q")
    assert (stats.failed, stats.released_total) == (0, 0)


def test_sixty_four_connections(served: Served) -> None:
    async def main() -> None:
        clients = [await penstock.connect_async(served.url) for _ in range(64)]
        ids = await asyncio.gather(
            *(client.publish([message() for _ in range(3)]) for client in clients for _ in range(5))
        )
        assert len({each for some in ids for each in some}) == 64 * 15
        taken = await asyncio.gather(*(client.claim("q", limit=15) for client in clients))
        assert sum(map(len, taken)) == 64 * 15
        for client in clients:
            await client.close()

    asyncio.run(main())
    eventually(lambda: not served.listener.connections)


# --- the end --------------------------------------------------------------------------------------


def test_a_stop_answers_what_is_in_hand_and_hands_back_claims() -> None:
    with penstock.open("memory:") as broker, Served(broker) as served, Raw(served) as raw:
        broker.create_queue("q")
        raw.read()
        raw.send(encoder.frame(wire.Claim(1, "q", 1, None, 600_000)))
        eventually(lambda: served.batcher.parked == 1)
        raw.send(encoder.frame(wire.Publish(2, pack_messages([Message(b"", {"queue": "other"})]))))
        served.stop()
        frames = [raw.read() for _ in range(3)]
        results = {each.id: bytes(each.value) for each in frames if isinstance(each, wire.Result)}
        assert results[1] == b"\xc0"
        assert 2 in results or any(isinstance(each, wire.Undone) for each in frames)
        assert any(isinstance(each, wire.Bye) and not each.final for each in frames)
        assert raw.ended()


def test_a_port_that_is_taken(served: Served) -> None:
    with pytest.raises(InvalidInput, match=str(served.port)), penstock.open("memory:") as broker:
        Served(broker, port=served.port)


# --- keys -----------------------------------------------------------------------------------------


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[Served, dict[str, str], Path]]:
    path = tmp_path / "keys.toml"
    grants = {
        "root": ["all"],
        "writer": ["publish:q"],
        "reader": ["consume:q"],
        "keeper": ["admin:q*"],
    }
    tokens = {name: f"{name}:{add_key(path, name, allow)}" for name, allow in grants.items()}
    with penstock.open("memory:") as broker, Served(broker, keys=Keys(path)) as served:
        broker.create_queue("q")
        yield served, tokens, path


Secured = tuple[Served, dict[str, str], "Path"]


@pytest.mark.parametrize("token", ["", "root", "root:wrong", "nobody:x", "x" * 5000])
def test_a_wrong_token_is_refused_for_good(secured: Secured, token: str) -> None:
    with pytest.raises(NotAllowed) as caught:
        penstock.connect(secured[0].url, token=token)
    assert "wrong" not in str(caught.value)
    assert ("wants a key" if token == "" else "the key is not known") in str(caught.value)


def test_what_comes_behind_a_wrong_token_is_read_and_dropped(secured: Secured) -> None:
    served, _, _ = secured
    with Raw(served, b"") as raw:
        eventually(lambda: served.listener.connections)
        (connection,) = served.listener.connections
        raw.send(encoder.frame(wire.Hello(wire.MAGIC, wire.VERSION, "nobody:x")))
        assert isinstance(raw.read(), wire.Bye)

        async def reading() -> bool:
            return connection._reading

        assert served.do(reading())


def test_keys_allow_what_they_say(secured: Secured) -> None:
    served, tokens, _ = secured
    with ExitStack() as stack:
        root, writer, reader, keeper = (
            stack.enter_context(penstock.connect(served.url, token=tokens[name]))
            for name in ("root", "writer", "reader", "keeper")
        )
        writer.send("q", b"1")
        writer.publish([message(b"2")])
        deliveries = reader.claim("q", limit=2)
        assert reader.ack([deliveries[0].receipt])[0].ok
        assert reader.release([deliveries[1].receipt], queue="q")[0].ok
        assert reader.queue("q") == keeper.queue("q") == writer.queue("q")
        assert keeper.create_queue("q2").name == "q2"
        assert root.queues() == served.broker.queues()
        refused: list[Any] = [
            lambda: writer.claim("q"),
            lambda: writer.publish([Message(b"")]),
            lambda: writer.publish([message(), Message(b"", {"queue": "other"})]),
            lambda: writer.ack(["x"]),
            lambda: reader.send("q", b""),
            lambda: reader.claim("other"),
            lambda: reader.purge("q"),
            lambda: reader.ack(["x"], queue="other"),
            reader.queues,
            reader.read_log,
            lambda: keeper.create_queue("other"),
            lambda: keeper.delete_queue("other"),
            lambda: keeper.move("q", "other"),
            keeper.take_epoch,
            lambda: keeper.configure_log(logs=2),
        ]
        for ask in refused:
            with pytest.raises(NotAllowed):
                ask()


def test_a_key_that_is_taken_away_ends_its_connections(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, tokens, _ = secured
    assert served.listener.keys is not None
    with penstock.connect(served.url, token=tokens["writer"]) as client:
        client.send("q", b"1")
        served.listener.keys._adopt({})
        eventually(lambda: not served.listener.connections)
        with pytest.raises(NotAllowed):
            client.send("q", b"1")


def test_a_consumer_whose_key_is_taken_away_gets_no_more(secured: Secured) -> None:
    served, tokens, _ = secured
    assert served.listener.keys is not None
    with penstock.connect(served.url, token=tokens["reader"]) as client:
        consumer = client.consume("q")
        served.broker.send("q", b"1")
        next(consumer).ack().result()
        served.listener.keys._adopt({})
        served.broker.send("q", b"2")
        with pytest.raises(NotAllowed):
            next(consumer)
        assert served.broker.stats("q").available == 1


def test_every_request_has_a_row() -> None:
    others = {wire.Ping, wire.Cancel, wire.Consume, wire.Credit}
    kinds = set(wire.Request.__subclasses__()) - others
    assert set(VERBS) == kinds


def test_requests_are_counted() -> None:
    counted: list[tuple[str, str, str]] = []

    class Counts:
        def request(
            self, protocol: str, operation: str, seconds: float, outcome: str, *_: object
        ) -> None:
            assert seconds >= 0
            counted.append((protocol, operation, outcome))

    with (
        penstock.open("memory:") as broker,
        Served(broker, metrics=Counts()) as served,
        penstock.connect(served.url) as client,
    ):
        client.create_queue("q")
        with pytest.raises(penstock.QueueNotFound):
            client.stats("nowhere")
    assert counted == [
        ("native", "CreateQueue", "ok"),
        ("native", "Stats", "QueueNotFound"),
    ]


def test_the_stats_of_many_queues_take_few_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STATS_LIMIT", 10)
    counted: list[str] = []

    class Counts:
        def request(
            self, protocol: str, operation: str, seconds: float, outcome: str, *_: object
        ) -> None:
            counted.append(operation)

    with (
        penstock.open("memory:") as broker,
        Served(broker, metrics=Counts()) as served,
        penstock.connect(served.url) as client,
    ):
        assert client.all_stats() == []
        names = [f"q{number:02}" for number in range(25)]
        for name in names:
            broker.create_queue(name)
        broker.send("q24", b"x")
        counted.clear()
        found = client.all_stats()
    assert [each.queue for each in found] == names
    assert [each.available for each in found] == [0] * 24 + [1]
    assert counted == ["AllStats"] * 3


def test_a_server_that_is_gone(served: Served) -> None:
    with penstock.connect(served.url) as client:
        make_impatient(client, 200)
        served.stop()
        with pytest.raises(ServerUnreachable):
            client.stats("q")
