"""What a worker decides, apart from its threads."""

from __future__ import annotations

import asyncio
import logging
import pickle
from typing import TYPE_CHECKING, Any, cast

import pytest

import penstock
from penstock import (
    BrokerClosed,
    Delivery,
    InvalidInput,
    ManualClock,
    Outcome,
    OutcomeStatus,
    Retry,
    ServerUnreachable,
    Settled,
    StorageFailed,
    StoreFenced,
)
from penstock.server import running
from penstock.worker.handling import handle, handle_async, is_async, resolve
from penstock.worker.hands import End, Hands
from penstock.worker.heartbeat import Leases
from penstock.worker.outcome import Act, Verdict, verdict_of
from penstock.worker.retry import Failures, Standing, is_final
from penstock.worker.settings import Settings
from penstock.worker.settler import Batch, Ends
from penstock.worker.stats import Meters

if TYPE_CHECKING:
    from penstock.worker.hands import Task


def delivery(number: int, attempts: int = 1) -> Delivery:
    return Delivery(number, "q", b"x", {}, "", 0, attempts, 1_000, f"receipt-{number}", 13_000)


# --- verdicts -------------------------------------------------------------------------------------


def raised(error: BaseException) -> Verdict:
    with pytest.raises(type(error)) as caught:
        raise error
    return verdict_of(caught.value)


def test_what_a_handler_raises_is_the_reason() -> None:
    verdict = raised(KeyError("name"))
    assert (verdict.act, verdict.delay_ms, verdict.failed) == (Act.RELEASE, None, True)
    assert verdict.reason == "KeyError: 'name'"
    assert verdict.place.startswith("KeyError at ")
    assert "raise error" in verdict.trace
    assert raised(SystemExit(3)).reason == "SystemExit: 3"


def test_a_reason_is_cut_and_always_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    assert len(raised(ValueError("x" * 10_000)).reason.encode()) == 4096
    assert "Mute" in raised(Mute()).reason
    raised(ValueError("\ud800")).reason.encode()


def test_retry_and_settled() -> None:
    verdict = raised(Retry("busy", delay_ms=50))
    assert (verdict.act, verdict.delay_ms, verdict.reason) == (Act.RELEASE, 50, "busy")
    assert raised(Retry()).reason == "retry"
    assert raised(Settled()).act is Act.LEAVE
    with pytest.raises(InvalidInput, match="delay_ms"):
        Retry(delay_ms=-1)
    copy = pickle.loads(pickle.dumps(Retry("busy", delay_ms=50)))
    assert (copy.reason, copy.delay_ms) == ("busy", 50)


# --- handlers and middleware ----------------------------------------------------------------------


class Notes:
    """Middleware that notes its calls."""

    def __init__(self, name: str, notes: list[str], fails: str = "") -> None:
        self.name, self.notes, self.fails = name, notes, fails

    def _note(self, hook: str) -> None:
        self.notes.append(f"{self.name}.{hook}")
        if self.fails == hook:
            raise RuntimeError(hook)

    def before(self, delivery: Delivery) -> None:
        self._note("before")

    def after(self, delivery: Delivery, result: object) -> None:
        self._note(f"after {result}")

    def on_error(self, delivery: Delivery, error: BaseException) -> None:
        self._note(f"on_error {type(error).__name__}")


class OnlyBefore:
    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    async def before(self, delivery: Delivery) -> None:
        self.notes.append("awaited")


def test_middleware_is_wrapped_around_the_handler() -> None:
    notes: list[str] = []
    around = [Notes("a", notes), Notes("b", notes), object()]
    assert handle(lambda _: 5, around, delivery(1)).act is Act.ACK
    assert notes == ["a.before", "b.before", "b.after 5", "a.after 5"]
    notes.clear()
    assert handle(lambda _: 1 / 0, around, delivery(1)).act is Act.RELEASE
    assert notes[2:] == ["b.on_error ZeroDivisionError", "a.on_error ZeroDivisionError"]


def test_a_handler_that_settled_by_itself_did_not_fail() -> None:
    notes: list[str] = []

    def settles(_: Delivery) -> None:
        raise Settled

    assert handle(settles, [Notes("a", notes)], delivery(1)).act is Act.LEAVE
    assert notes == ["a.before", "a.after None"]


def test_hooks_that_raise(caplog: pytest.LogCaptureFixture) -> None:
    notes: list[str] = []
    called: list[Delivery] = []
    verdict = handle(called.append, [Notes("a", notes, fails="before")], delivery(1))
    assert (verdict.act, verdict.reason) == (Act.RELEASE, "RuntimeError: before")
    assert called == []
    after = Notes("a", notes, fails="after None")
    assert handle(called.append, [after], delivery(1)).act is Act.RELEASE
    bad = Notes("a", notes, fails="on_error ValueError")

    def fails(_: Delivery) -> None:
        raise ValueError("first")

    assert handle(fails, [bad], delivery(1)).reason == "ValueError: first"
    assert "on_error failed" in caplog.text


def test_coroutine_handlers() -> None:
    notes: list[str] = []

    async def good(_: Delivery) -> int:
        await asyncio.sleep(0)
        return 1

    async def bad(_: Delivery) -> None:
        raise Retry("again", delay_ms=1)

    around = [Notes("a", notes), OnlyBefore(notes)]
    assert asyncio.run(handle_async(good, around, delivery(1))).act is Act.ACK
    assert notes == ["a.before", "awaited", "a.after 1"]
    assert asyncio.run(handle_async(bad, around, delivery(1))).delay_ms == 1
    assert notes[-1] == "a.on_error Retry"


def test_which_handlers_are_awaited() -> None:
    class Called:
        async def __call__(self, _: Delivery) -> None: ...

    class Plain:
        def __call__(self, _: Delivery) -> None: ...

    assert is_async(Called())
    assert not is_async(Plain())
    assert is_async(resolve("tests.work.handlers:nothing_async"))
    assert not is_async(resolve("tests.work.handlers:nothing"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.work.handlers", "MODULE:FUNCTION"),
        ("tests.work.handlers:", "MODULE:FUNCTION"),
        ("tests.work.nowhere:f", "there is no module 'tests.work.nowhere'"),
        ("tests.work.handlers:nowhere", "has no 'nowhere'"),
        ("tests.work.handlers:NOT_CALLABLE", "is no function, but int"),
        (5, "a handler is a function, not int"),
    ],
)
def test_a_handler_that_is_not_there(name: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        resolve(name)


def test_a_module_that_can_not_be_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "penstock_broken_a.py").write_text("\n1 / 0\n")
    (tmp_path / "penstock_broken_b.py").write_text("import penstock_nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput, match=r"ZeroDivisionError: .*broken_a.py, line 2\)"):
        resolve("penstock_broken_a:f")
    with pytest.raises(InvalidInput, match="can't be imported: ModuleNotFoundError"):
        resolve("penstock_broken_b:f")


# --- hands ----------------------------------------------------------------------------------------


def filled(count: int, concurrency: int = 2, prefetch: int = 4) -> Hands:
    hands = Hands(concurrency, prefetch)
    hands.add([delivery(n) for n in range(count)])
    return hands


def begin(hands: Hands, now_ms: int = 0) -> Task:
    task = hands.begin(now_ms)
    assert task is not None
    return task


def test_room_comes_when_half_of_the_prefetch_is_gone() -> None:
    assert filled(0).room() == 6
    hands = filled(6)
    assert hands.room() == 0
    first, _, _ = begin(hands), begin(hands), begin(hands)
    assert hands.room() == 0
    begin(hands)
    assert (hands.waiting, hands.running, hands.room()) == (2, 4, 0)
    hands.finish(first)
    assert hands.room() == 1


def test_without_prefetch_only_free_slots_are_filled() -> None:
    hands = filled(0, concurrency=2, prefetch=0)
    assert hands.room() == 2
    hands.add([delivery(1)])
    assert hands.room() == 0
    begin(hands)
    assert hands.room() == 1


def test_the_first_to_come_is_the_first_to_begin() -> None:
    hands = filled(3)
    assert [begin(hands).delivery.message_id for _ in range(3)] == [0, 1, 2]
    assert hands.begin(0) is None


def test_a_lost_lease() -> None:
    hands = filled(2)
    task = begin(hands)
    unbegun, running = hands.lose(["receipt-0", "receipt-1", "receipt-7"])
    assert ([t.delivery.message_id for t in unbegun], running) == ([1], [task])
    assert hands.lose(["receipt-0"]) == ([], [])
    assert hands.idle
    assert hands.begin(0) is None
    assert hands.finish(task) is End.LOST
    assert hands.running == 0


def test_over_the_time_limit_the_slot_stays_taken() -> None:
    hands = filled(2, concurrency=2, prefetch=0)
    early = begin(hands, now_ms=0)
    late = begin(hands, now_ms=60)
    assert hands.overdue(99, 100) == ([], 100)
    assert hands.overdue(100, 100) == ([early], 160)
    assert hands.overdue(120, 100) == ([], 160)
    assert (hands.running, hands.room()) == (2, 0)
    assert not hands.idle
    assert hands.finish(early) is End.LATE
    assert hands.finish(late) is End.ENDED
    assert hands.room() == 2


def test_what_has_not_begun_is_given_back() -> None:
    hands = Hands(1, 4)
    hands.add([delivery(1), delivery(2)])
    running = begin(hands)
    assert hands.close() == 1
    assert hands.room() == 0
    hands.add([delivery(3), delivery(4)])
    assert hands.begin(0) is None
    assert len(hands.lose(["receipt-4"])[0]) == 1
    assert hands.finish(running) is End.ENDED
    assert not hands.idle
    assert [task.delivery.message_id for task in hands.give_back()] == [2, 3]
    assert hands.idle


def test_abandoned() -> None:
    hands = filled(3)
    task = begin(hands)
    unbegun, running = hands.abandon()
    assert [t.delivery.message_id for t in unbegun] == [1, 2]
    assert running == [task]
    assert hands.idle
    assert hands.abandon() == ([], [])
    assert hands.finish(task) is End.LATE


# --- settling -------------------------------------------------------------------------------------


def test_ends_that_are_alike_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    for n in range(5):
        ends.put(Batch(Act.ACK, None, "", [f"a{n}"]))
    ends.put(Batch(Act.RELEASE, None, "x", ["b"]))
    ends.put(Batch(Act.RELEASE, 0, "x", ["c"]))
    ends.put(Batch(Act.RELEASE, None, "x", ["d"]))
    assert len(ends) == 8
    monkeypatch.setattr("penstock.limits.MAX_RECEIPTS", 3)
    assert ends.take() == [
        Batch(Act.ACK, None, "", ["a0", "a1", "a2"]),
        Batch(Act.ACK, None, "", ["a3", "a4"]),
        Batch(Act.RELEASE, None, "x", ["b", "d"]),
        Batch(Act.RELEASE, 0, "x", ["c"]),
    ]
    assert (len(ends), ends.take()) == (0, [])


class Refusing:
    """A store that has settled everything already."""

    def extend(self, receipts: list[str], *, lease_ms: int) -> list[Outcome]:
        return [Outcome(receipt, OutcomeStatus.STALE) for receipt in receipts]


def test_what_is_being_settled_is_not_lost_by_an_extension() -> None:
    clock = ManualClock()
    standing = Standing("extending", clock, lambda _: None)
    leases = Leases(cast("penstock.Broker", Refusing()), clock, standing)
    lost: list[str] = []
    leases.on_lost = lost.extend
    leases.hold(["a", "b", "c"], lease_ms=30_000)
    assert leases.tick() == 10_000
    leases.settling(["a"])
    leases.forget(["c"])
    clock.advance(10_000)
    assert leases.tick() is None
    assert lost == ["b"]
    assert not leases.live("b")


# --- trouble --------------------------------------------------------------------------------------


def test_the_log_tells_of_a_change_not_of_every_try(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    told: list[Exception] = []
    standing = Standing("claiming", clock, told.append)
    standing.worked()
    pauses = [standing.failed(ServerUnreachable("gone")) for _ in range(10)]
    assert standing.in_trouble
    assert 125 <= pauses[0] <= 250
    assert 5_000 <= pauses[-1] <= 10_000
    standing.failed(StorageFailed("worse"))
    clock.advance(4_000)
    standing.worked()
    standing.worked()
    assert [record.getMessage() for record in caplog.records] == [
        "claiming does not work, it is tried again: gone",
        "claiming does not work, it is tried again: worse",
        "claiming works again after 4.0 s and 11 failures",
    ]
    assert len(told) == 11


def test_failures_of_a_kind_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    failures = Failures()
    for n in range(3):
        failures.tell(Verdict(Act.RELEASE, None, f"no {n}", True, "here:1", "trace"), "q", n)
    failures.tell(Verdict(Act.RELEASE, None, "other", True, "here:2"), "q", 9)
    assert [record.getMessage() for record in caplog.records] == [
        "message 0 of q failed: no 0\ntrace",
        "message 9 of q failed: other",
    ]


def test_what_can_not_get_better() -> None:
    with penstock.open("memory:") as broker:
        assert is_final(StoreFenced("x"), broker)
        assert is_final(BrokerClosed("x"), broker)
        assert not is_final(StorageFailed("x"), broker)
    with running("memory:", native="127.0.0.1:0") as server:
        client = penstock.connect(server.location("native"))
        # At a server, the next owner of the store may answer.
        assert not is_final(StoreFenced("x"), client)
        assert not is_final(BrokerClosed("the server is stopping"), client)
        client.close()
        assert is_final(BrokerClosed("x"), client)


# --- settings and counters ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("concurrency", 0),
        ("concurrency", True),
        ("mode", "fibers"),
        ("lease_ms", 0),
        ("prefetch", -1),
        ("time_limit_ms", 0),
        ("consumer", "x" * 300),
        ("drain_ms", -1),
        ("dequeue_max", 0),
        ("wait_ms", -1),
        ("scan_interval_ms", 0),
    ],
)
def test_settings_are_checked(option: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=option):
        Settings(**{option: value}).checked()


def test_settings_that_are_left_open() -> None:
    settings = Settings(concurrency=7).checked()
    assert settings.prefetch == 7
    assert settings.consumer


def test_counters() -> None:
    meters = Meters()
    meters.claimed([delivery(1), delivery(2, attempts=3)], lease_ms=10_000)
    meters.handled(0.02, failed=True, attempts=3)
    answers = (OutcomeStatus.DONE, OutcomeStatus.STALE, OutcomeStatus.EXPIRED)
    assert meters.settled(Act.ACK, [Outcome("r", each) for each in answers]) == 2
    back = (OutcomeStatus.RETRYING, OutcomeStatus.FAILED)
    assert meters.settled(Act.RELEASE, [Outcome("r", each) for each in back]) == 0
    stats = meters.shown(in_progress=1, prefetched=2, unsettled=3, troubles=("x",))
    assert (stats.claimed, stats.processed, stats.stale) == (2, 1, 2)
    assert (stats.failed, stats.released, stats.exhausted) == (1, 2, 1)
    assert (stats.lag_seconds.count, stats.lag_seconds.sum) == (1, 2.0)
    third = stats.failed_by_attempt.bounds.index(3.0)
    assert stats.failed_by_attempt.counts[third] == stats.failed_by_attempt.count == 1
    assert stats.handler_seconds.sum == 0.02
