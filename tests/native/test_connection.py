"""The client's core, without a socket: what is sent, what is repeated, what is given up."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.client import calls
from penstock.client.calls import Uncertain, Verb, Verbs
from penstock.client.connection import (
    PING_MS,
    REFUSED_MS,
    SILENCE_MS,
    ClientConnection,
    Options,
    Phase,
)
from penstock.errors import (
    BrokerClosed,
    InvalidInput,
    NotAllowed,
    PenstockError,
    QueueNotFound,
    ServerUnreachable,
    StoreFenced,
)
from penstock.model import Message, Outcome, OutcomeStatus
from penstock.wire import native as wire
from penstock.wire.frames import FrameReader, Progress

encoder = wire.Encoder()
WELCOME = wire.Welcome(wire.VERSION, "test", "s", {})
# A claim of one message: its queue, lease and deadline, and a row of the message.
CLAIMED = ["q", "r", 1, [[1, 1, 1, b"", 1, [1, "", 1, 0, 0, {}]]]]
RECEIPT = "r-0000000000000001"


def taken(items: list[Any]) -> list[Any]:
    """Take everything out of a list, as the transport does."""
    found = items[:]
    items.clear()
    return found


def asked(verb: Verb[..., Any], *args: Any) -> calls.Call[Any]:
    """Make the call of a verb."""
    call = verb.__wrapped__(*args)
    assert isinstance(call, calls.Call)
    return call


class Talk:
    """A client's connection, what it wrote, and what its callers were told."""

    def __init__(self, **options: Any) -> None:
        self.now_ms = 1000
        self.core = ClientConnection(
            Options(patience_ms=5_000, **options), now_ms=1000, random=lambda: 1.0, fresh=b"f" * 16
        )
        self.results: dict[str, Any] = {}
        self.reader = FrameReader()

    def call(self, name: str, call: calls.Call[Any]) -> Any:
        def told(result: Any, error: BaseException | None) -> None:
            assert name not in self.results, "told twice"
            self.results[name] = error if error is not None else result

        return self.core.submit(call, told, self.now_ms)

    def sent(self) -> list[wire.Request]:
        self.reader.feed(b"".join(taken(self.core.output)))
        requests = []
        while (frame := self.reader.take()) is not None:
            request = wire.read_request(frame)
            assert isinstance(request, wire.Request)
            requests.append(request)
        self.told()
        return requests

    def told(self) -> dict[str, Any]:
        for told, result, error in taken(self.core.done):
            told(result, error)
        return self.results

    def greet(self, welcome: wire.Welcome = WELCOME) -> None:
        self.core.connected(self.now_ms)
        (hello,) = taken(self.core.output)
        assert wire.read_hello(hello[4:]).magic == "penstock"
        self.say(welcome)

    def say(self, frame: object) -> None:
        self.core.received(encoder.frame(frame), self.now_ms)
        self.told()

    def lose(self) -> None:
        self.core.lost("cut", self.now_ms)
        self.told()


@pytest.fixture
def talk() -> Talk:
    made = Talk()
    made.greet()
    return made


def test_answers_come_in_any_order(talk: Talk) -> None:
    talk.call("a", calls.ping())
    talk.call("b", asked(Verbs.stats, "q"))
    talk.call("c", calls.ping())
    a, b, c = talk.sent()
    talk.say((1, c.id, 3))
    talk.say(wire.Failure(b.id, "QueueNotFound", "no queue"))
    talk.say((1, a.id, 1))
    assert (talk.results["a"], talk.results["c"]) == (1, 3)
    assert type(talk.results["b"]) is QueueNotFound
    assert not talk.core._sent


def test_answers_come_in_any_pieces(talk: Talk) -> None:
    talk.call("a", calls.ping())
    (request,) = talk.sent()
    for byte in encoder.frame((1, request.id, 77)):
        talk.core.received(bytes([byte]), talk.now_ms)
    assert talk.told() == {"a": 77}


def test_calls_wait_for_the_welcome() -> None:
    talk = Talk()
    talk.call("a", calls.ping())
    talk.core.connected(talk.now_ms)
    assert len(taken(talk.core.output)) == 1
    talk.say(WELCOME)
    assert len(talk.sent()) == 1


REPEATED = [
    asked(Verbs.stats, "q"),
    calls.extend(["r"], lease_ms=1),
    calls.ack(["r"]),
    calls.release(["r"]),
    calls.publish([Message(b"", dedup_id="d")]),
    calls.create_queue("q"),
]
NOT_REPEATED = [
    calls.claim("q"),
    calls.publish([Message(b"", dedup_id="d"), Message(b"")]),
    calls.send("q", b""),
    asked(Verbs.purge, "q"),
    asked(Verbs.redrive, "q"),
    asked(Verbs.move, "q", "r"),
    asked(Verbs.delete_queue, "q"),
    calls.update_queue("q"),
]


@pytest.mark.parametrize("call", REPEATED, ids=lambda call: type(call.request).__name__)
def test_what_is_safe_is_sent_again(talk: Talk, call: calls.Call[Any]) -> None:
    talk.call("a", call)
    talk.sent()
    talk.lose()
    assert talk.results == {}
    talk.greet()
    (again,) = talk.sent()
    assert type(again) is type(call.request)


@pytest.mark.parametrize("call", NOT_REPEATED, ids=lambda call: type(call.request).__name__)
def test_what_is_not_safe_is_told(talk: Talk, call: calls.Call[Any]) -> None:
    talk.call("a", call)
    talk.sent()
    talk.lose()
    assert type(talk.results["a"]) is ServerUnreachable
    assert "was lost before" in str(talk.results["a"])
    talk.greet()
    assert talk.sent() == []


@pytest.mark.parametrize("call", NOT_REPEATED, ids=lambda call: type(call.request).__name__)
def test_what_was_not_sent_can_be_sent_later(talk: Talk, call: calls.Call[Any]) -> None:
    talk.lose()
    talk.call("a", call)
    assert talk.sent() == []
    talk.greet()
    assert len(talk.sent()) == 1


def test_the_order_is_kept_across_connections(talk: Talk) -> None:
    for n in range(3):
        talk.call(str(n), asked(Verbs.stats, str(n)))
    talk.sent()
    talk.lose()
    talk.call("3", asked(Verbs.stats, "3"))
    talk.greet()
    assert [request.queue for request in talk.sent() if isinstance(request, wire.Stats)] == [
        "0",
        "1",
        "2",
        "3",
    ]


def test_a_stale_receipt_of_a_repeated_ack_is_uncertain(talk: Talk) -> None:
    talk.call("a", calls.ack(["one", "two", "three"]))
    talk.sent()
    talk.lose()
    talk.greet()
    (again,) = talk.sent()
    said = [
        Outcome("one", OutcomeStatus.STALE),
        Outcome("two", OutcomeStatus.DONE),
        Outcome("three", OutcomeStatus.EXPIRED),
    ]
    talk.say((1, again.id, said))
    outcomes = talk.results["a"]
    assert [type(each) for each in outcomes] == [Uncertain, Outcome, Outcome]
    assert [bool(each) for each in outcomes] == [False, True, False]


def test_a_stale_receipt_of_a_first_ack_is_stale(talk: Talk) -> None:
    talk.call("a", calls.ack(["one"]))
    (request,) = talk.sent()
    talk.say((1, request.id, [Outcome("one", OutcomeStatus.STALE)]))
    assert [type(each) for each in talk.results["a"]] == [Outcome]


def test_what_a_stopping_server_did_not_do_is_sent_to_the_next(talk: Talk) -> None:
    talk.call("a", calls.claim("q"))
    (request,) = talk.sent()
    talk.say(wire.Bye("BrokerClosed", "stopping", final=False))
    talk.say(wire.Undone(request.id))
    talk.call("b", calls.claim("q"))
    assert talk.sent() == []
    assert talk.core.phase is Phase.LEAVING
    talk.lose()
    talk.greet()
    assert len(talk.sent()) == 2
    assert talk.results == {}


def test_a_final_farewell_ends_the_client(talk: Talk) -> None:
    talk.call("a", asked(Verbs.stats, "q"))
    talk.sent()
    talk.say(wire.Bye("NotAllowed", "no key", final=True))
    talk.call("b", asked(Verbs.stats, "q"))
    talk.told()
    assert [type(talk.results[name]) for name in "ab"] == [NotAllowed, NotAllowed]
    assert talk.core.hang_up
    talk.core.lost("cut", talk.now_ms)
    # A call tries again, now and then: the key may be known again.
    for known in (False, True):
        talk.now_ms += REFUSED_MS
        talk.call(f"c{known}", asked(Verbs.stats, "q"))
        assert talk.core.failure is None
        talk.core.connected(talk.now_ms)
        if not known:
            talk.say(wire.Bye("NotAllowed", "no key", final=True))
            assert type(talk.told()["cFalse"]) is NotAllowed
    talk.greet()
    assert len(talk.sent()) == 1
    talk.core.close()
    talk.now_ms += REFUSED_MS
    talk.call("d", asked(Verbs.stats, "q"))
    assert type(talk.told()["d"]) is BrokerClosed


def test_a_server_that_has_lost_its_store_is_left_for_the_next_owner(talk: Talk) -> None:
    talk.call("safe", asked(Verbs.queues))
    talk.call("unsafe", calls.claim("q"))
    safe, unsafe = talk.sent()
    talk.say(wire.Failure(unsafe.id, "StoreFenced", "another has it"))
    assert isinstance(talk.results["unsafe"], StoreFenced)
    assert talk.core.hang_up
    talk.lose()
    # Not at once: the address may lead to the same server until it has ended.
    assert talk.core.connect_at_ms - talk.now_ms >= 200
    talk.greet()
    (again,) = talk.sent()
    assert type(again) is type(safe)
    talk.say(wire.Failure(again.id, "StoreFenced", "another has it"))
    assert "safe" not in talk.results
    talk.lose()
    talk.greet()
    (third,) = talk.sent()
    talk.say((1, third.id, []))
    assert talk.results["safe"] == []


def test_what_a_server_said_before_it_is_left_counts(talk: Talk) -> None:
    talk.call("refused", calls.claim("q"))
    talk.call("answered", calls.ping())
    refused, answered = talk.sent()
    frames = [wire.Failure(refused.id, "StoreFenced", "another has it"), (1, answered.id, 7)]
    talk.core.received(b"".join(encoder.frame(frame) for frame in frames), talk.now_ms)
    assert talk.told()["answered"] == 7
    assert isinstance(talk.results["refused"], StoreFenced)
    assert talk.core.hang_up


def test_patience_ends_with_servers_that_have_lost_their_store(talk: Talk) -> None:
    talk.call("safe", asked(Verbs.queues))
    for _ in range(3):
        (request,) = talk.sent()
        talk.say(wire.Failure(request.id, "StoreFenced", "another has it"))
        assert "safe" not in talk.results
        talk.lose()
        talk.now_ms += 2_000
        talk.greet()
    (request,) = talk.sent()
    talk.say(wire.Failure(request.id, "StoreFenced", "another has it"))
    assert isinstance(talk.results["safe"], StoreFenced)


def test_a_subscription_outlives_more_than_one_server_that_has_lost_its_store() -> None:
    talk = Talk()
    talk.call("consume", calls.Call(wire.Consume(0, "q", 1, 1), None, on_push=lambda _: None))
    for _ in range(3):
        talk.greet(wire.Welcome(wire.VERSION, "test", "s", {}))
        (request,) = talk.sent()
        # The server had its store for long, or pushed something shortly before.
        talk.now_ms += 6_000
        talk.say(wire.Failure(request.id, "StoreFenced", "another has it"))
        talk.lose()
        talk.greet(wire.Welcome(wire.VERSION, "test", "s", {}))
        (request,) = talk.sent()
        talk.now_ms += 4_999
        talk.say((6, request.id, 1_000, []))
        talk.say(wire.Failure(request.id, "StoreFenced", "another has it"))
        talk.lose()
    assert "consume" not in talk.results


def test_patience_ends(talk: Talk) -> None:
    talk.lose()
    talk.call("a", asked(Verbs.stats, "q"))
    talk.now_ms += 4_999
    talk.core.tick(talk.now_ms)
    assert talk.told() == {}
    talk.now_ms += 1
    talk.core.tick(talk.now_ms)
    assert type(talk.told()["a"]) is ServerUnreachable


def test_back_off_grows_to_a_cap_and_starts_anew(talk: Talk) -> None:
    waits = []
    for _ in range(12):
        talk.lose()
        waits.append(talk.core.connect_at_ms - talk.now_ms)
    assert waits[:4] == [50, 100, 200, 400]
    assert waits[-1] == 5_000
    talk.greet()
    talk.lose()
    assert talk.core.connect_at_ms - talk.now_ms == 50


def test_a_silent_server_is_asked_and_then_given_up(talk: Talk) -> None:
    talk.now_ms += PING_MS
    talk.core.tick(talk.now_ms)
    (request,) = talk.sent()
    assert isinstance(request, wire.Ping)
    talk.now_ms += SILENCE_MS - 1
    talk.core.tick(talk.now_ms)
    assert not talk.core.hang_up
    talk.now_ms += 1
    talk.core.tick(talk.now_ms)
    assert talk.core.hang_up


def test_a_server_that_takes_a_long_frame_is_not_silent(talk: Talk) -> None:
    talk.now_ms += PING_MS
    talk.core.tick(talk.now_ms)
    # A minute of upload, and a look at it now and then.
    for taken in range(1, 13):
        talk.now_ms += SILENCE_MS // 2
        talk.core.progressed(Progress(taken, all=False), talk.now_ms)
        talk.core.tick(talk.now_ms)
        assert not talk.core.hang_up
    talk.now_ms += 100
    talk.core.progressed(Progress(13, all=True), talk.now_ms)
    # From here on it has to answer, whatever else is sent and taken.
    for taken in range(14, 18):
        talk.now_ms += SILENCE_MS // 4 - 25
        talk.core.progressed(Progress(taken, all=False), talk.now_ms)
        talk.core.tick(talk.now_ms)
        assert talk.core.hang_up is (taken == 17)


def test_a_server_that_dies_in_the_middle_of_a_long_frame_is_noticed(talk: Talk) -> None:
    talk.core.progressed(Progress(5, all=False), talk.now_ms)
    talk.now_ms += PING_MS
    for after_ms in (0, SILENCE_MS - 1, 1):
        assert not talk.core.hang_up
        talk.now_ms += after_ms
        talk.core.progressed(Progress(5, all=False), talk.now_ms)
        talk.core.tick(talk.now_ms)
    assert talk.core.hang_up


def test_a_call_that_is_not_answered_in_time_fails(talk: Talk) -> None:
    talk.call("stats", asked(Verbs.stats, "q"))
    talk.call("claim", calls.claim("q", wait_ms=2_000))
    talk.call("long", asked(Verbs.purge, "q"))
    stats, claim, purge = talk.sent()
    for ms, over in [(4_999, set()), (1, {"stats"}), (1_999, {"stats"}), (1, {"stats", "claim"})]:
        talk.now_ms += ms
        talk.core.tick(talk.now_ms)
        assert talk.told().keys() == over
    for name in ("stats", "claim"):
        assert isinstance(talk.results[name], ServerUnreachable)
        assert "within 5000 ms" in str(talk.results[name])
    (cancelled,) = talk.sent()
    assert isinstance(cancelled, wire.Cancel)
    assert cancelled.claim == claim.id
    # What comes too late is nobody's, and what was claimed is given back.
    talk.say((1, stats.id, {}))
    talk.say((1, claim.id, CLAIMED))
    (back,) = talk.sent()
    assert isinstance(back, wire.Release)
    assert back.receipts == [RECEIPT]
    talk.say((1, purge.id, 7))
    assert talk.results["long"] == 7


def test_a_call_is_not_late_while_bytes_go_out_or_come_in(talk: Talk) -> None:
    talk.call("a", asked(Verbs.stats, "q"))
    talk.call("b", asked(Verbs.stats, "q"))
    first, _ = talk.sent()
    for taken in (0, 1_000, 2_000, 3_000):
        talk.core.progressed(Progress(taken, all=False), talk.now_ms)
        talk.now_ms += 4_000
        talk.core.tick(talk.now_ms)
    assert talk.told() == {}
    # The answer to the one comes in slowly, and that to the other behind it.
    answer = encoder.frame(wire.Part(first.id, b"x" * 100, last=False))
    for at in range(0, len(answer), 10):
        talk.core.received(answer[at : at + 10], talk.now_ms)
        talk.now_ms += 4_000
        talk.core.tick(talk.now_ms)
    talk.say(wire.Part(first.id, b"x", last=False))
    talk.now_ms += 4_999
    talk.core.tick(talk.now_ms)
    assert talk.told() == {}
    talk.now_ms += 1
    talk.core.tick(talk.now_ms)
    assert talk.told().keys() == {"a", "b"}


def test_a_server_that_answers_is_not_given_up(talk: Talk) -> None:
    for _ in range(5):
        talk.now_ms += PING_MS
        talk.core.tick(talk.now_ms)
        (request,) = talk.sent()
        talk.say((1, request.id, 0))
    assert not talk.core.hang_up


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b"HTTP/1.1 400"])
def test_garbage_ends_the_connection(talk: Talk, garbage: bytes) -> None:
    talk.core.received(garbage, talk.now_ms)
    assert talk.core.hang_up


def test_an_answer_of_another_type_fails_its_call_alone(talk: Talk) -> None:
    talk.call("a", asked(Verbs.stats, "q"))
    talk.call("b", calls.ping())
    a, b = talk.sent()
    talk.say((1, a.id, "not stats"))
    talk.say((1, b.id, 5))
    assert isinstance(talk.results["a"], PenstockError)
    assert talk.results["b"] == 5


def test_an_answer_in_parts(talk: Talk) -> None:
    talk.call("a", calls.publish([]))
    (request,) = talk.sent()
    talk.say(wire.Part(request.id, b"\x92\x01", last=False))
    assert talk.results == {}
    talk.say(wire.Part(request.id, b"\x02", last=True))
    assert talk.results == {"a": [1, 2]}


def test_what_can_not_be_sent_fails_alone(talk: Talk) -> None:
    talk.call("a", calls.create_queue("q", lease_ms=object()))
    talk.call("b", asked(Verbs.stats, "q"))
    assert len(talk.sent()) == 1
    assert isinstance(talk.results["a"], InvalidInput)


def test_a_withdrawn_claim_is_cancelled_and_what_came_is_given_back(talk: Talk) -> None:
    pending = talk.call("a", calls.claim("q", wait_ms=1000))
    (claim,) = talk.sent()
    talk.core.withdraw(pending, talk.now_ms)
    (ended,) = talk.sent()
    assert isinstance(ended, wire.Cancel)
    assert ended.claim == claim.id
    talk.say((1, claim.id, CLAIMED))
    (back,) = talk.sent()
    assert isinstance(back, wire.Release)
    assert back.receipts == [RECEIPT]
    assert back.unseen


def test_a_client_leaves_an_older_server_for_good() -> None:
    talk = Talk()
    talk.greet(wire.Welcome(4, "test", "s", {}))
    talk.call("a", asked(Verbs.stats, "q"))
    assert not talk.sent()
    assert "the server speaks version 4" in str(talk.results["a"])


def test_dedup_ids_are_made_once_and_are_all_different() -> None:
    talk = Talk(dedup=True)
    talk.greet()
    talk.call("a", calls.publish([Message(b""), Message(b"", dedup_id="mine"), Message(b"")]))
    (first,) = talk.sent()
    talk.lose()
    talk.greet()
    (again,) = talk.sent()
    assert isinstance(first, wire.Publish)
    assert isinstance(again, wire.Publish)
    ids = [message.dedup_id for message in first.messages]
    assert ids == [message.dedup_id for message in again.messages]
    assert ids[1] == "mine"
    assert None not in ids
    assert len(set(ids)) == 3


def test_a_closed_client_fails_everything(talk: Talk) -> None:
    talk.call("a", asked(Verbs.stats, "q"))
    talk.core.close()
    talk.call("b", asked(Verbs.stats, "q"))
    talk.told()
    assert [type(talk.results[name]) for name in "ab"] == [BrokerClosed, BrokerClosed]


# --- how long a publish is repeated -------------------------------------------------------------


def publish(talk: Talk) -> None:
    talk.call("publish", calls.publish([Message(b"", {"queue": "q"})]))
    assert len(talk.sent()) == 1


@pytest.mark.parametrize(("window_ms", "last_ms"), [(None, 240_000), (10_000, 8_000)])
def test_a_publish_is_repeated_only_while_its_dedup_ids_are_remembered(
    window_ms: int | None, last_ms: int
) -> None:
    talk = Talk(dedup=True)
    bounds = {} if window_ms is None else {"dedup_window_ms": window_ms}
    talk.core.connected(talk.now_ms)
    taken(talk.core.output)
    talk.say(wire.Welcome(wire.VERSION, "test", "s", bounds))
    publish(talk)
    for passed_ms in (1, last_ms // 2, last_ms):
        talk.now_ms = 1000 + passed_ms
        talk.lose()
        talk.core.connected(talk.now_ms)
        taken(talk.core.output)
        talk.say(wire.Welcome(wire.VERSION, "test", "s", bounds))
        assert len(talk.sent()) == 1
    talk.now_ms = 1000 + last_ms + 1
    talk.lose()
    error = talk.results["publish"]
    assert type(error) is ServerUnreachable
    assert "may or may not have been stored" in str(error)
    assert "forgotten" in str(error)


def test_a_publish_that_waited_too_long_for_a_connection_is_not_repeated() -> None:
    talk = Talk(dedup=True)
    talk.greet()
    publish(talk)
    talk.lose()
    talk.now_ms += 240_001
    talk.greet()
    assert talk.sent() == []
    assert "forgotten" in str(talk.results["publish"])


def test_a_publish_that_the_server_did_not_begin_has_all_its_time() -> None:
    talk = Talk(dedup=True)
    talk.greet()
    talk.call("publish", calls.publish([Message(b"", {"queue": "q"})]))
    (request,) = talk.sent()
    talk.say(wire.Undone(request.id))
    talk.now_ms += 240_001
    talk.lose()
    talk.greet()
    assert len(talk.sent()) == 1
