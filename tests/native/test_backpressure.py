"""Room for answers: what waits for it, in which order, and that nothing is claimed without it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from tests.native.serving import Raw, Served, encoder, message, pause
from tests.waiting import wait_until as eventually

import penstock
from penstock import limits
from penstock.model import Message
from penstock.server.batcher import Batcher
from penstock.server.native import requests as backpressure
from penstock.server.native.requests import VERBS, Backpressure, MessageSizes, PendingRequest
from penstock.wire import native as wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.server.native.connection import NativeConnection

MEGABYTE = 1024 * 1024
ALL = limits.MAX_BYTES_AT_WORK


def unexpected(*_: object) -> None:
    """Take the answer of a request that is told none here."""
    raise AssertionError


def held_at(room: Backpressure) -> int:
    """Count the requests that wait for room."""
    return sum(map(len, room._held))


class Hall:
    """A room whose queues hold messages of known sizes."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = MessageSizes()
        for queue, size in sizes.items():
            self.sizes.learn(queue, size)
        # As often as somebody is to look whether there is room now.
        self.freed: list[str] = []
        self.room = Backpressure(self.sizes, lambda: self.freed.append("look"))

    def ask(self, queue: str, limit: int = 1) -> PendingRequest:
        request = wire.Claim(1, queue, limit)
        return PendingRequest(request, VERBS[wire.Claim], 0, 0.0, self.room, unexpected)

    def admit(self, asked: PendingRequest) -> bool:
        """Let in or hold, as a connection does."""
        if self.room.admit(asked):
            return True
        self.room.hold(asked)
        return False

    def let_in(self) -> list[PendingRequest]:
        found = []
        while (asked := self.room.next()) is not None:
            found.append(asked)
        return found


def test_sizes_go_up_at_once_and_down_by_and_by() -> None:
    sizes = MessageSizes()
    assert sizes.guess("q") == backpressure.UNKNOWN_MESSAGE_BYTES
    sizes.learn("q", 100)
    assert sizes.guess("q") == 100
    sizes.learn("q", 5_000)
    assert sizes.guess("q") == 5_000
    sizes.learn("q", 100)
    assert 4_000 < sizes.guess("q") < 5_000
    for _ in range(100):
        sizes.learn("q", 100)
    assert sizes.guess("q") == 100


def test_sizes_are_of_so_many_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backpressure, "MAX_SIZES", 3)
    sizes = MessageSizes()
    for n in range(10):
        sizes.learn(f"q{n}", n)
        assert sizes.guess(f"q{n}") == n
        assert len(sizes._by_queue) <= 3


def test_as_many_are_let_in_as_there_is_room_for() -> None:
    hall = Hall(big=MEGABYTE)
    asked = [hall.ask("big") for _ in range(20)]
    assert [hall.admit(each) for each in asked] == [True] * 8 + [False] * 12
    assert hall.let_in() == []
    asked[3].leave()
    asked[5].leave()
    assert hall.freed
    assert hall.let_in() == asked[8:10]
    assert held_at(hall.room) == 10


def test_one_that_needs_more_than_all_has_it_alone() -> None:
    hall = Hall(big=MEGABYTE)
    first, whole, last = hall.ask("big"), hall.ask("big", 1_000), hall.ask("big")
    assert [hall.admit(each) for each in (first, whole, last)] == [True, False, False]
    first.leave()
    assert hall.let_in() == [whole]
    whole.leave()
    assert hall.let_in() == [last]


def test_little_does_not_wait_behind_much() -> None:
    hall = Hall(big=ALL, small=100)
    assert [hall.admit(hall.ask("big")) for _ in range(3)] == [True, False, False]
    assert all(hall.admit(hall.ask("small")) for _ in range(100))
    assert held_at(hall.room) == 2


def test_much_does_not_wait_for_ever_behind_little() -> None:
    hall = Hall(big=ALL, small=1)
    while hall.admit(hall.ask("small")):
        pass
    assert hall.admit(hall.ask("big"))


def test_held_requests_go_by_what_is_known_by_then() -> None:
    hall = Hall()
    asked = [hall.ask("q", 1_000) for _ in range(9)]
    assert [hall.admit(each) for each in asked] == [True] + [False] * 8
    hall.sizes.learn("q", 100)
    assert hall.let_in() == asked[1:]


def test_nobody_is_let_in_while_answers_are_not_read() -> None:
    hall = Hall(small=100)
    hall.room.shut()
    asked = hall.ask("small")
    assert not hall.admit(asked)
    assert hall.let_in() == []
    assert hall.freed == []
    hall.room.reopen()
    assert hall.freed == ["look"]
    # In order: who comes now is behind.
    assert not hall.room.admit(hall.ask("small"))
    assert hall.let_in() == [asked]


def test_who_is_dropped_is_held_no_longer() -> None:
    hall = Hall(big=ALL // 2)
    first, whole, last = hall.ask("big"), hall.ask("big", 2), hall.ask("big")
    assert [hall.admit(each) for each in (first, whole, last)] == [True, False, False]
    hall.freed.clear()
    hall.room.drop(whole)
    assert held_at(hall.room) == 1
    # Who was behind it may find room.
    assert hall.freed == ["look"]
    assert hall.let_in() == [last]
    hall.room.hold(whole)
    assert hall.room.clear() == [whole]
    assert held_at(hall.room) == 0


def test_who_turns_out_to_need_much_does_not_hold_up_the_others() -> None:
    hall = Hall(grows=100, small=100, big=ALL)
    assert hall.admit(hall.ask("big"))
    hall.room.shut()
    growing, small = hall.ask("grows"), hall.ask("small")
    assert [hall.admit(each) for each in (growing, small)] == [False, False]
    hall.room.reopen()
    hall.sizes.learn("grows", ALL)
    assert hall.let_in() == [small]
    assert held_at(hall.room) == 1


# --- through a server -----------------------------------------------------------------------------


def at(served: Served, work: Callable[[NativeConnection], Any]) -> Any:
    """Do something with the only connection, on the server's loop."""

    async def do() -> Any:
        (connection,) = served.listener.connections
        return work(connection)

    return served.do(do())


def fill_up(served: Served) -> PendingRequest:
    """Take the room for large answers, and return what to leave it with."""
    blocker = PendingRequest(
        wire.Claim(0, "-", limits.MAX_CLAIM_LIMIT),
        VERBS[wire.Claim],
        0,
        0.0,
        Any,  # type: ignore[arg-type]
        unexpected,
    )

    def take(connection: NativeConnection) -> None:
        blocker.backpressure = connection._backpressure
        assert blocker.admit()

    at(served, take)
    return blocker


def test_what_brings_little_goes_on_while_claims_are_held(served: Served) -> None:
    served.broker.create_queue("small")
    for _ in range(2):
        served.broker.publish([message(b"x" * MEGABYTE), Message(b"y", {"queue": "small"})])
    with Raw(served) as raw:
        raw.read()
        raw.send(encoder.frame(wire.Claim(1, "small", 1)))
        (held,) = raw.claimed()
        blocker = fill_up(served)
        for n in range(3):
            raw.send(encoder.frame(wire.Claim(10 + n, "q", 1, None, 600_000 * (n % 2))))
        raw.send(encoder.frame(wire.Browse(19, "q", "available", 10)))
        assert isinstance(raw.ask(wire.Extend(2, [held["receipt"]], 60_000)), wire.Result)
        assert isinstance(raw.ask(wire.Ack(3, [held["receipt"]])), wire.Result)
        small = raw.ask(wire.Claim(4, "small", 1, None, 600_000))
        assert isinstance(small, wire.Result)
        assert small.id == 4
        assert at(served, lambda connection: held_at(connection._backpressure)) == 4
        assert served.broker.stats("q").in_flight == 0
        at(served, lambda _: blocker.leave())
        assert sum(len(raw.claimed()) for _ in range(2)) == 2


def test_a_held_claim_can_be_withdrawn(served: Served) -> None:
    with Raw(served) as raw:
        raw.read()
        blocker = fill_up(served)
        raw.send(encoder.frame(wire.Claim(1, "q", 1, None, 600_000)))
        eventually(lambda: at(served, lambda connection: held_at(connection._backpressure)) == 1)
        raw.send(encoder.frame(wire.Cancel(2, 1)))
        answers = {frame.id: bytes(frame.value) for frame in (raw.read(), raw.read())}  # type: ignore[union-attr]
        assert answers == {1: b"\xc0", 2: b"\xc3"}
        assert at(served, lambda connection: held_at(connection._backpressure)) == 0
        at(served, lambda _: blocker.leave())
        served.broker.publish([message()])
        assert isinstance(raw.ask(wire.Ping(3)), wire.Result)
        assert served.broker.stats("q").in_flight == 0


def test_a_claim_is_withdrawn_while_it_is_put_off(served: Served) -> None:
    with Raw(served) as raw:
        raw.read()
        raw.send(encoder.frame(wire.Claim(1, "q", 1, None, 600_000)))
        eventually(lambda: served.batcher.parked == 1)

        def refuse_and_withdraw(connection: NativeConnection) -> None:
            connection._backpressure.shut()
            served.batcher._wake_queue("q", 1)
            served.batcher._retry()
            assert connection._waits[1].refused
            connection._withdraw(wire.Cancel(2, 1))

        at(served, refuse_and_withdraw)
        answers = {frame.id: bytes(frame.value) for frame in (raw.read(), raw.read())}  # type: ignore[union-attr]
        assert answers == {1: b"\xc0", 2: b"\xc3"}
        assert isinstance(raw.ask(wire.Ping(3)), wire.Result)
        assert at(served, lambda connection: held_at(connection._backpressure)) == 0
        assert at(served, lambda connection: connection._bytes_at_work) == 0


def test_a_held_claim_waits_no_longer_than_it_may(served: Served) -> None:
    with Raw(served) as raw:
        raw.read()
        fill_up(served)
        raw.send(encoder.frame(wire.Claim(1, "q", 1, None, 50)))
        assert raw.result() is None
        assert at(served, lambda connection: held_at(connection._backpressure)) == 0
        refused = raw.ask(wire.Claim(2, "q", 1, None, limits.MAX_WAIT_MS + 1))
        assert isinstance(refused, wire.Failure)


def test_the_time_that_a_claim_was_held_is_of_its_wait(served: Served) -> None:
    with Raw(served) as raw:
        raw.read()
        blocker = fill_up(served)
        raw.send(encoder.frame(wire.Claim(1, "q", 1, None, 900_000)))
        eventually(lambda: at(served, lambda connection: held_at(connection._backpressure)) == 1)

        def let_in_later(connection: NativeConnection) -> float:
            # As if ten minutes had gone by.
            asked = connection._waits[1]
            assert asked.until is not None
            asked.until -= 600
            blocker.leave()
            return asked.until

        until = at(served, let_in_later)
        eventually(lambda: served.batcher.parked == 1)
        (waiting,) = served.batcher._waiting
        assert abs(waiting.until - until) < 300


def test_held_requests_that_fail_at_once_make_way(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_REQUESTS_AT_WORK", 3)
    with Raw(served) as raw:
        raw.read()
        blocker = fill_up(served)
        for n in range(4):
            raw.send(encoder.frame(wire.Claim(n, "q", limits.MAX_CLAIM_LIMIT + 1)))
        eventually(lambda: not at(served, lambda connection: connection._reading))
        at(served, lambda _: blocker.leave())
        failures = [raw.read() for _ in range(4)]
        assert all(isinstance(each, wire.Failure) for each in failures)
        assert isinstance(raw.ask(wire.Ping(9)), wire.Result)


def test_held_claims_count_by_their_bytes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES_AT_WORK", 100_000)
    with Raw(served) as raw:
        raw.read()
        blocker = fill_up(served)
        for n in range(5):
            raw.send(encoder.frame(wire.Claim(n, "q", 1, None, 600_000, "c" * 60_000)))
        eventually(lambda: not at(served, lambda connection: connection._reading))
        assert at(served, lambda connection: held_at(connection._backpressure)) == 2
        at(served, lambda _: blocker.leave())
        failures = [raw.read() for _ in range(5)]
        assert all(isinstance(each, wire.Failure) for each in failures)
        assert at(served, lambda connection: connection._bytes_at_work) == 0


def test_a_stop_leaves_held_requests_undone(served: Served) -> None:
    with Raw(served) as raw:
        raw.read()
        fill_up(served)
        raw.send(encoder.frame(wire.Claim(1, "q", 1, None, 600_000)))
        raw.send(encoder.frame(wire.Claim(2, "q", 1)))
        eventually(lambda: at(served, lambda connection: held_at(connection._backpressure)) == 2)
        served.stop()
        frames = [raw.read() for _ in range(3)]
        assert {frame.id for frame in frames if isinstance(frame, wire.Undone)} == {1, 2}
        assert raw.ended()


def test_what_one_has_no_room_for_goes_to_others(served: Served) -> None:
    with ExitStack() as stack:
        clogged = stack.enter_context(Raw(served))
        clogged.read()
        for n in range(3):
            clogged.send(encoder.frame(wire.Claim(n, "q", 1, None, 600_000)))
        eventually(lambda: served.batcher.parked == 3)
        (connection,) = served.listener.connections
        at(served, lambda each: each.pause_writing())
        other = stack.enter_context(Raw(served))
        other.read()
        for n in range(2):
            other.send(encoder.frame(wire.Claim(n, "q", 1, None, 600_000)))
        eventually(lambda: served.batcher.parked == 5)
        served.broker.publish([message() for _ in range(3)])
        got = [other.claimed() for _ in range(2)]
        assert [[each["attempts"] for each in some] for some in got] == [[1], [1]]
        assert served.broker.stats("q").available == 1

        async def resume() -> None:
            connection.resume_writing()

        served.do(resume())
        (delivery,) = clogged.claimed()
        assert delivery["attempts"] == 1
        eventually(lambda: served.batcher.parked == 2)


@pytest.mark.parametrize("wait_ms", [0, 600_000])
def test_many_claims_of_a_slow_reader_cost_no_attempt(served: Served, wait_ms: int) -> None:
    """Sizes that nobody could know before: small ones, and then large ones."""
    served.broker.update_queue("q", max_attempts=1)
    served.broker.publish([message(b"x" * 10) for _ in range(5)])
    served.broker.publish([message(b"x" * 700_000) for _ in range(45)])
    with Raw(served) as raw:
        raw.read()
        for n in range(50):
            raw.send(encoder.frame(wire.Claim(n, "q", 1, 600_000, wait_ms)))
        for n in range(50):
            if n % 10 == 0:
                pause(0.01)
            assert [each["attempts"] for each in raw.claimed()] == [1]
    assert served.broker.stats("q").failed == 0
    assert served.broker.stats("q").in_flight == 50


def test_who_reads_slowly_is_not_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STALL_MS", 2_000)
    with Raw(served) as raw:
        raw.read()

        def look(connection: NativeConnection) -> bool:
            """Play a reader that has taken something between two looks, and then nothing."""
            now = served.loop.time()
            connection.pause_writing()
            connection._stuck_taken = -1
            connection._stuck_since = now - 60
            connection.check(now)
            reads = connection._stuck_since == now
            connection.check(now + 1)
            connection.check(now + 3)
            return reads

        assert at(served, look)
        assert raw.ended()


def test_claims_that_go_away_leave_what_they_were_woken_for_to_others() -> None:
    async def story() -> None:
        with penstock.open("memory:", background=False) as broker:
            broker.create_queue("q")
            batcher = Batcher(broker, asyncio.get_running_loop())
            leaving = [batcher.claim("q", wait_ms=600_000) for _ in range(3)]
            staying = [batcher.claim("q", wait_ms=600_000) for _ in range(3)]
            while batcher.parked < 6:
                await asyncio.sleep(0)
            broker.publish([message() for _ in range(3)])
            for each in leaving:
                each.cancel()
            answers = await asyncio.wait_for(asyncio.gather(*staying), 60)
            assert [len(each) for each in answers] == [1, 1, 1]
            await batcher.close()

    asyncio.run(story())
