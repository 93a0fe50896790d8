"""The messages and leases that a worker holds, apart from its threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from penstock import Delivery, ManualClock, Outcome, OutcomeStatus
from penstock.worker.leases import Heartbeat, Settler
from penstock.worker.outcome import ACK, Action
from penstock.worker.state import WorkerSettings, WorkerState
from penstock.worker.stats import WorkerCounters

if TYPE_CHECKING:
    from penstock import Broker
    from penstock.worker.state import Task
    from penstock.worker.stats import WorkerStats

MINUTE_MS = 60_000


def delivery(number: int) -> Delivery:
    return Delivery(number, "q", b"x", {}, "", 0, 1, 1_000, f"receipt-{number}", 0)


class Extending:
    """A store that extends leases, besides those it is told to refuse; or does not answer."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int]] = []
        self.refused: set[str] = set()
        self.away = False

    def extend(self, receipts: list[str], *, lease_ms: int) -> list[Outcome]:
        self.calls.append((receipts, lease_ms))
        if self.away:
            raise OSError("away")
        stale, fine = OutcomeStatus.STALE, OutcomeStatus.EXTENDED
        return [Outcome(each, stale if each in self.refused else fine) for each in receipts]


class Parts:
    """The parts of a worker that has no threads."""

    def __init__(self, slots: int = 2, prefetch: int = 4, filled: int = 0) -> None:
        self.clock = ManualClock()
        self.store = Extending()
        broker = cast("Broker", self.store)
        counters = WorkerCounters(self.clock, lambda _: None)
        self.heartbeat = Heartbeat(broker, self.clock, counters)
        self.settler = Settler(broker, self.clock, counters, self.heartbeat)
        self.state = WorkerState(
            WorkerSettings(print, prefetch=prefetch),
            slots,
            clock=self.clock,
            counters=counters,
            heartbeat=self.heartbeat,
            settler=self.settler,
            on_change=lambda: None,
        )
        self.lost: list[str] = []
        self.heartbeat.on_lost = self.lost.extend
        self.add(*range(filled))

    def add(self, *numbers: int, lease_ms: int = MINUTE_MS) -> None:
        self.state.add([delivery(number) for number in numbers], lease_ms=lease_ms)

    def take(self) -> Task:
        task = self.state.take(wait=False)
        assert task is not None
        return task

    def finish(self, task: Task) -> None:
        self.state.finish(task, ACK)

    def settled(self) -> list[tuple[Action, list[str]]]:
        """Return what was given to the settler since the last call."""
        return [(batch.action, batch.receipts) for batch in self.settler.take()]

    @property
    def waiting(self) -> int:
        return self.state.counts[1]

    @property
    def running(self) -> int:
        return self.state.counts[0]

    def stats(self) -> WorkerStats:
        return self.state.counters.snapshot()


# --- messages -------------------------------------------------------------------------------------


def test_room_comes_when_half_of_the_prefetch_is_gone() -> None:
    assert Parts().state.room() == 6
    parts = Parts(filled=6)
    assert parts.state.room() == 0
    first, _, _ = parts.take(), parts.take(), parts.take()
    assert parts.state.room() == 0
    parts.take()
    assert (parts.waiting, parts.running, parts.state.room()) == (2, 4, 0)
    parts.finish(first)
    assert parts.state.room() == 1


def test_without_prefetch_only_free_slots_are_filled() -> None:
    parts = Parts(slots=2, prefetch=0)
    assert parts.state.room() == 2
    parts.add(1)
    assert parts.state.room() == 0
    parts.take()
    assert parts.state.room() == 1


def test_the_first_to_come_is_the_first_to_begin() -> None:
    parts = Parts(filled=3)
    assert [parts.take().delivery.message_id for _ in range(3)] == [0, 1, 2]
    assert parts.state.take(wait=False) is None


def test_a_lost_lease() -> None:
    parts = Parts(filled=2)
    task = parts.take()
    parts.state.lose(["receipt-0", "receipt-1", "receipt-7"])
    assert parts.stats().lost == 2
    parts.state.lose(["receipt-0"])
    assert parts.stats().lost == 2
    assert parts.state.idle
    assert parts.state.take(wait=False) is None
    parts.finish(task)
    assert (parts.running, parts.settled(), parts.stats().late) == (0, [], 0)


def test_a_lease_that_ended_before_its_message_began_takes_no_slot() -> None:
    parts = Parts(slots=1)
    parts.add(1, lease_ms=1_000)
    parts.add(2)
    parts.clock.advance(1_000)
    assert parts.take().delivery.message_id == 2
    assert (parts.state.counts, parts.settler.unsettled) == ((1, 0), 0)
    assert parts.stats().lost == 1


def test_over_the_time_limit_the_slot_stays_taken() -> None:
    parts = Parts(slots=2, prefetch=0, filled=2)
    early = parts.take()
    parts.clock.advance(60)
    late = parts.take()
    parts.clock.advance(39)
    assert (parts.state.release_overdue(100), parts.settled()) == (1, [])
    parts.clock.advance(1)
    assert parts.state.release_overdue(100) == 60
    assert parts.settled() == [(Action.RELEASE, ["receipt-0"])]
    parts.clock.advance(20)
    assert (parts.state.release_overdue(100), parts.settled()) == (40, [])
    assert (parts.running, parts.state.room()) == (2, 0)
    assert not parts.state.idle
    parts.finish(early)
    assert (parts.stats().late, parts.settled()) == (1, [])
    parts.finish(late)
    assert parts.settled() == [(Action.ACK, ["receipt-1"])]
    assert parts.state.room() == 2


def test_messages_that_have_not_begun_are_given_back() -> None:
    parts = Parts(slots=1, prefetch=4)
    parts.add(1, 2)
    running = parts.take()
    assert parts.state.close() == 1
    assert parts.state.room() == 0
    parts.add(3, 4)
    assert parts.state.take(wait=False) is None
    parts.state.lose(["receipt-4"])
    assert parts.stats().lost == 1
    parts.finish(running)
    assert parts.settled() == [(Action.ACK, ["receipt-1"])]
    assert not parts.state.idle
    parts.state.give_back()
    assert parts.settled() == [(Action.GIVE_BACK, ["receipt-2", "receipt-3"])]
    assert parts.state.idle


def test_abandoned() -> None:
    parts = Parts(filled=3)
    task = parts.take()
    assert parts.state.abandon() == 1
    assert parts.settled() == [
        (Action.GIVE_BACK, ["receipt-1", "receipt-2"]),
        (Action.RELEASE, ["receipt-0"]),
    ]
    assert parts.state.idle
    assert (parts.state.abandon(), parts.settled()) == (0, [])
    parts.finish(task)
    assert (parts.stats().late, parts.settled()) == (1, [])


def test_without_a_slot_that_could_take_them_messages_are_stranded() -> None:
    parts = Parts(slots=1, prefetch=4, filled=3)
    task = parts.take()
    assert parts.settled() == []
    parts.clock.advance(100)
    parts.state.release_overdue(100)
    assert parts.settled() == [
        (Action.RELEASE, ["receipt-0"]),
        (Action.GIVE_BACK, ["receipt-1", "receipt-2"]),
    ]
    assert (parts.waiting, parts.state.room()) == (0, 0)
    parts.finish(task)
    assert parts.state.room() == 5
    parts.add(3)
    last = parts.take()
    parts.state.lose(["receipt-3"])
    assert parts.state.room() == 0
    parts.finish(last)
    assert parts.state.room() == 5


def test_slots_come_and_go() -> None:
    parts = Parts(slots=0)
    assert parts.state.room() == 0
    parts.state.open_slot()
    assert parts.state.room() == 5
    parts.add(1)
    assert parts.settled() == []
    parts.state.shut_slot()
    assert parts.settled() == [(Action.GIVE_BACK, ["receipt-1"])]
    assert parts.state.room() == 0


# --- leases ---------------------------------------------------------------------------------------


@pytest.fixture
def parts() -> Parts:
    parts = Parts()
    parts.heartbeat.hold(["a", "b"], lease_ms=900)
    return parts


def test_leases_are_extended_three_times_within_themselves(parts: Parts) -> None:
    assert parts.heartbeat.tick() == 300
    parts.clock.advance(299)
    assert (parts.heartbeat.tick(), parts.store.calls) == (1, [])
    parts.clock.advance(1)
    assert (parts.heartbeat.tick(), parts.store.calls) == (300, [(["a", "b"], 900)])
    assert (parts.heartbeat.tick(), len(parts.store.calls)) == (300, 1)
    parts.clock.advance(809)
    assert parts.heartbeat.is_live("a")
    parts.clock.advance(1)
    assert not parts.heartbeat.is_live("a")


def test_a_refused_extension_is_a_lost_lease(parts: Parts) -> None:
    parts.store.refused = {"a"}
    parts.clock.advance(300)
    parts.heartbeat.tick()
    assert parts.lost == ["a"]
    assert not parts.heartbeat.is_live("a")
    assert parts.heartbeat.is_live("b")


def test_what_is_being_settled_is_not_lost_by_an_extension() -> None:
    parts = Parts(filled=3)
    parts.heartbeat.on_lost = parts.state.lose
    parts.store.refused = {f"receipt-{number}" for number in range(3)}
    parts.finish(parts.take())
    parts.take()
    parts.clock.advance(MINUTE_MS // 3)
    assert parts.heartbeat.tick() is None
    assert (parts.stats().lost, parts.waiting) == (2, 0)
    assert parts.settled() == [(Action.ACK, ["receipt-0"])]
    assert not parts.heartbeat.is_live("receipt-1")


def test_no_answer_until_the_deadline_is_a_lost_lease(parts: Parts) -> None:
    parts.store.away = True
    for _ in range(2):
        parts.clock.advance(300)
        assert parts.heartbeat.tick() is not None
    assert len(parts.store.calls) == 2
    parts.clock.advance(209)
    assert (parts.heartbeat.tick(), parts.lost) == (1, [])
    parts.clock.advance(1)
    assert (parts.heartbeat.tick(), parts.lost) == (None, ["a", "b"])


def test_forgotten_leases_are_neither_extended_nor_lost(parts: Parts) -> None:
    parts.heartbeat.forget(["a", "unknown"])
    parts.store.refused = {"b"}
    parts.clock.advance(300)
    real = parts.store.extend

    def forgets_meanwhile(receipts: list[str], *, lease_ms: int) -> list[Outcome]:
        parts.heartbeat.forget(["b"])
        return real(receipts, lease_ms=lease_ms)

    parts.store.extend = forgets_meanwhile  # type: ignore[method-assign]
    assert parts.heartbeat.tick() is None
    assert (parts.store.calls, parts.lost) == ([(["b"], 900)], [])
