"""What a worker decides, apart from its threads."""

from __future__ import annotations

import asyncio
import logging
import pickle
from typing import Any, cast

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
    Worker,
)
from penstock.server import running
from penstock.worker.leases import Batch, Heartbeat, Settler
from penstock.worker.outcome import (
    ACK,
    Action,
    Settlement,
    handle,
    handle_async,
    is_async,
    resolve,
    settlement_of,
)
from penstock.worker.stats import Activity, WorkerCounters
from penstock.worker.worker import is_final


def delivery(number: int, attempts: int = 1) -> Delivery:
    return Delivery(number, "q", b"x", {}, "", 0, attempts, 1_000, f"receipt-{number}", 13_000)


# --- settlements ----------------------------------------------------------------------------------


def raised(error: BaseException) -> Settlement:
    with pytest.raises(type(error)) as caught:
        raise error
    return settlement_of(caught.value)


def test_what_a_handler_raises_is_the_reason() -> None:
    settlement = raised(KeyError("name"))
    assert (settlement.action, settlement.delay_ms, settlement.failed) == (
        Action.RELEASE,
        None,
        True,
    )
    assert settlement.reason == "KeyError: 'name'"
    assert settlement.place.startswith("KeyError at ")
    assert "raise error" in settlement.trace
    assert raised(SystemExit(3)).reason == "SystemExit: 3"


def test_a_reason_is_cut_and_always_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    assert len(raised(ValueError("x" * 10_000)).reason.encode()) == 4096
    assert "Mute" in raised(Mute()).reason
    raised(ValueError("\ud800")).reason.encode()


def test_retry_and_settled() -> None:
    settlement = raised(Retry("busy", delay_ms=50))
    assert (settlement.action, settlement.delay_ms, settlement.reason) == (
        Action.RELEASE,
        50,
        "busy",
    )
    assert raised(Retry()).reason == "retry"
    assert raised(Settled()).action is Action.LEAVE
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
    assert handle(lambda _: 5, around, delivery(1)).action is Action.ACK
    assert notes == ["a.before", "b.before", "b.after 5", "a.after 5"]
    notes.clear()
    assert handle(lambda _: 1 / 0, around, delivery(1)).action is Action.RELEASE
    assert notes[2:] == ["b.on_error ZeroDivisionError", "a.on_error ZeroDivisionError"]


def test_a_handler_that_settled_by_itself_did_not_fail() -> None:
    notes: list[str] = []

    def settles(_: Delivery) -> None:
        raise Settled

    assert handle(settles, [Notes("a", notes)], delivery(1)).action is Action.LEAVE
    assert notes == ["a.before", "a.after None"]


def test_hooks_that_raise(caplog: pytest.LogCaptureFixture) -> None:
    notes: list[str] = []
    called: list[Delivery] = []
    settlement = handle(called.append, [Notes("a", notes, fails="before")], delivery(1))
    assert (settlement.action, settlement.reason) == (Action.RELEASE, "RuntimeError: before")
    assert called == []
    after = Notes("a", notes, fails="after None")
    assert handle(called.append, [after], delivery(1)).action is Action.RELEASE
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
    assert asyncio.run(handle_async(good, around, delivery(1))).action is Action.ACK
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


# --- settling -------------------------------------------------------------------------------------


def test_ends_that_are_alike_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    counters = WorkerCounters(clock, lambda _: None)
    broker = cast("penstock.Broker", None)
    settler = Settler(broker, clock, counters, Heartbeat(broker, clock, counters))
    for n in range(5):
        settler.put(ACK, [f"a{n}"], hurry=False)
    settler.put(Settlement(Action.RELEASE, None, "x"), ["b"], hurry=False)
    settler.put(Settlement(Action.RELEASE, 0, "x"), ["c"], hurry=False)
    settler.put(Settlement(Action.RELEASE, None, "x"), ["d"], hurry=False)
    assert settler.unsettled == 8
    monkeypatch.setattr("penstock.limits.MAX_RECEIPTS", 3)
    assert settler.take() == [
        Batch(Action.ACK, None, "", ["a0", "a1", "a2"]),
        Batch(Action.ACK, None, "", ["a3", "a4"]),
        Batch(Action.RELEASE, None, "x", ["b", "d"]),
        Batch(Action.RELEASE, 0, "x", ["c"]),
    ]
    assert settler.take() == []


# --- trouble --------------------------------------------------------------------------------------


def test_the_log_tells_of_a_change_not_of_every_try(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    told: list[Exception] = []
    activity = Activity("claiming", clock, told.append)
    activity.worked()
    pauses = [activity.failed(ServerUnreachable("gone")) for _ in range(10)]
    assert activity.in_trouble
    assert 125 <= pauses[0] <= 250
    assert 5_000 <= pauses[-1] <= 10_000
    activity.failed(StorageFailed("worse"))
    clock.advance(4_000)
    activity.worked()
    activity.worked()
    assert [record.getMessage() for record in caplog.records] == [
        "claiming does not work, it is tried again: gone",
        "claiming does not work, it is tried again: worse",
        "claiming works again after 4.0 s and 11 failures",
    ]
    assert len(told) == 11


def test_failures_of_a_kind_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    counters = WorkerCounters(ManualClock(), lambda _: None)
    for n in range(3):
        failure = Settlement(Action.RELEASE, None, f"no {n}", True, "here:1", "trace")
        counters.add_handled(delivery(n), failure, 0.1)
    other = Settlement(Action.RELEASE, None, "other", True, "here:2")
    counters.add_handled(delivery(9), other, 0.1)
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
        Worker("memory:", "q", "tests.work.handlers:nothing", **{option: value})


def test_settings_that_are_left_open() -> None:
    worker = Worker("memory:", "q", "tests.work.handlers:nothing", concurrency=7)
    assert worker._settings.prefetch is None
    assert worker._settings.consumer


def test_counters() -> None:
    counters = WorkerCounters(ManualClock(), lambda _: None)
    counters.add_claimed([delivery(1), delivery(2, attempts=3)], lease_ms=10_000)
    failed = Settlement(Action.RELEASE, failed=True)
    counters.add_handled(delivery(2, attempts=3), failed, 0.02)
    answers = (OutcomeStatus.DONE, OutcomeStatus.STALE, OutcomeStatus.EXPIRED)
    assert counters.add_settled(Action.ACK, [Outcome("r", each) for each in answers]) == 2
    back = (OutcomeStatus.RETRYING, OutcomeStatus.FAILED)
    assert counters.add_settled(Action.RELEASE, [Outcome("r", each) for each in back]) == 0
    stats = counters.snapshot([("q", 0.5)], ["q", "q"], unsettled=3)
    assert (stats.in_progress, stats.prefetched, stats.longest_seconds) == (1, 2, 0.5)
    assert (stats.claimed, stats.processed, stats.stale) == (2, 1, 2)
    assert (stats.queues["q"].claimed, stats.queues["q"].failed) == (2, 1)
    assert (stats.failed, stats.released, stats.exhausted) == (1, 2, 1)
    assert (stats.lag_seconds.count, stats.lag_seconds.sum) == (1, 2.0)
    third = stats.failed_by_attempt.bounds.index(3.0)
    assert stats.failed_by_attempt.counts[third] == stats.failed_by_attempt.count == 1
    assert stats.handler_seconds.sum == 0.02
