"""The literal table of moves, exhausted; and every row of it seen on a broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest

import penstock
from penstock import model
from penstock.broker.requests import Change, Joint
from penstock.clock import ManualClock
from penstock.model import (
    TRANSITIONS,
    Assigned,
    AssignStatus,
    Delivery,
    Entry,
    Event,
    Message,
    Outcome,
    OutcomeStatus,
    Page,
    QueueSpec,
    State,
    SweepCounts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.broker.broker import Broker

# What each event does to a message in each state; a dash: it can't happen there.
GRID = """
event          not-there  available  delayed    in_flight  done  failed
enqueue        available  -          -          -          -     -
enqueue_later  delayed    -          -          -          -     -
come_due       -          -          available  -          -     -
claim          -          in_flight  -          -          -     -
ack            -          -          -          done       -     -
ack_late       -          done       done       -          -     -
release        -          -          -          available  -     -
release_later  -          -          -          delayed    -     -
expire         -          -          -          available  -     -
exhaust        -          -          -          failed     -     -
overflow       -          failed     failed     -          -     -
redrive        -          -          -          -          -     available
move_out       -          gone       gone       -          -     gone
move_in        available  -          -          -          available available
move_in_later  delayed    -          -          -          delayed delayed
remove         -          gone       gone       gone       gone  gone
"""


def moves() -> Iterator[tuple[State | None, Event, str]]:
    header, *rows = (line.split() for line in GRID.strip().splitlines())
    for event, *cells in rows:
        for state, cell in zip(header[1:], cells, strict=True):
            yield None if state == "not-there" else State(state), Event(event), cell


def test_the_grid_names_every_state_and_event() -> None:
    assert {(state, event) for state, event, _ in moves()} == {
        (state, event) for state in (None, *State) for event in Event
    }


@pytest.mark.parametrize(("state", "event", "cell"), list(moves()))
def test_every_event_in_every_state(state: State | None, event: Event, cell: str) -> None:
    if cell == "-":
        assert (state, event) not in TRANSITIONS
    else:
        expected = None if cell == "gone" else State(cell)
        assert TRANSITIONS[state, event] is expected


# --- the table and a broker -----------------------------------------------------------------------


class Stage:
    """One message on one queue, brought into a state; then something happens to it."""

    def __init__(self, url: str) -> None:
        self.clock = ManualClock()
        self.broker: Broker = penstock.open(url, clock=self.clock, background=False)
        self.broker.create_queue("q", max_attempts=2, lease_ms=1_000)
        self.broker.create_queue("other", filter="queue IN ('q', 'other')")
        self.receipts: list[str] = []

    def publish(self, delay_ms: int = 0) -> None:
        self.broker.publish([Message(b"", {"queue": "q"}, delay_ms=delay_ms)])

    def claim(self) -> None:
        self.receipts = [delivery.receipt for delivery in self.broker.claim("q")]
        assert self.receipts

    def state(self) -> State | None:
        found = [state for state in State if self.broker.browse("q", state=state)]
        assert len(found) <= 1, "a message is in one state"
        depths = self.broker.stats("q")
        assert [state for state in State if getattr(depths, state.value)] == found
        return found[0] if found else None

    def bring(self, state: State | None) -> None:
        if state is None:
            return
        self.publish(delay_ms=5_000 if state is State.DELAYED else 0)
        if state in {State.IN_FLIGHT, State.DONE, State.FAILED}:
            self.claim()
        if state is State.DONE:
            self.broker.ack(self.receipts)
        if state is State.FAILED:
            self.broker.release(self.receipts, delay_ms=0)
            self.claim()
            self.broker.release(self.receipts)

    def purge(self) -> None:
        assert self.broker.purge("q", states=list(State)) == 1

    def move_in(self, delay_ms: int) -> None:
        """Have the other queue hand over a message: the one that is in history, or a new one."""
        if self.state() is None:
            self.broker.publish([Message(b"", {"queue": "other"})])
        (delivery,) = self.broker.claim("other")
        self.broker.release([delivery.receipt], delay_ms=delay_ms)
        state = State.DELAYED if delay_ms else State.AVAILABLE
        assert self.broker.move("other", "q", state=state) == 1

    def move_out(self) -> None:
        (state,) = [state for state in State if self.broker.browse("q", state=state)]
        assert self.broker.move("q", "other", state=state) == 1

    def overflow(self) -> None:
        """Have the queue drop the message for a newer one, which is then removed."""
        self.broker.update_queue("q", max_messages=1, overflow="drop_oldest")
        self.publish()
        (newer,) = self.broker.claim("q")
        assert self.broker.ack([newer.receipt])[0]
        assert self.broker.purge("q", states=["done"]) == 1

    def ack_late(self) -> None:
        """Have the message claimed and given back, to where it was, before it is settled."""
        delay_ms = 5_000 if self.state() is State.DELAYED else 0
        self.clock.advance(delay_ms)
        self.claim()
        self.broker.release(self.receipts, delay_ms=delay_ms)
        change = Change(self.broker.acking_late(self.receipts, [1], "q"))
        self.broker.begin(Joint(changes=[change]))
        assert change.answer[0].ok

    def exhaust(self) -> None:
        self.broker.update_queue("q", max_attempts=1)
        assert self.broker.release(self.receipts)[0].status is OutcomeStatus.FAILED


HAPPEN: dict[Event, Callable[[Stage], Any]] = {
    Event.ENQUEUE: lambda stage: stage.publish(),
    Event.ENQUEUE_LATER: lambda stage: stage.publish(delay_ms=1),
    Event.COME_DUE: lambda stage: stage.clock.advance(5_000),
    Event.CLAIM: lambda stage: stage.claim(),
    Event.ACK: lambda stage: stage.broker.ack(stage.receipts),
    Event.ACK_LATE: Stage.ack_late,
    Event.RELEASE: lambda stage: stage.broker.release(stage.receipts, delay_ms=0),
    Event.RELEASE_LATER: lambda stage: stage.broker.release(stage.receipts, delay_ms=1),
    Event.EXPIRE: lambda stage: stage.clock.advance(1_000),
    Event.EXHAUST: Stage.exhaust,
    Event.OVERFLOW: Stage.overflow,
    Event.REDRIVE: lambda stage: stage.broker.redrive("q"),
    Event.MOVE_OUT: Stage.move_out,
    Event.MOVE_IN: lambda stage: stage.move_in(0),
    Event.MOVE_IN_LATER: lambda stage: stage.move_in(1),
    Event.REMOVE: Stage.purge,
}


@pytest.mark.parametrize("design", ["indexed", "buckets"])
@pytest.mark.parametrize(("state", "event"), list(TRANSITIONS))
def test_a_broker_makes_the_moves_of_the_table(
    design: str, state: State | None, event: Event
) -> None:
    stage = Stage(f"memory:?design={design}")
    with stage.broker:
        stage.bring(state)
        assert stage.state() is state
        HAPPEN[event](stage)
        assert stage.state() is TRANSITIONS[state, event]


# --- nouns ----------------------------------------------------------------------------------------


class Example(NamedTuple):
    thing: msgspec.Struct
    field: str


DELIVERY = Delivery(7, "q", b"", {}, "", 0, 1, 0, f"ps1-0-0-{'ab' * 16}-{7:016x}", 1_000)


@pytest.mark.parametrize(
    "example",
    [
        Example(Message(b""), "payload"),
        Example(DELIVERY, "receipt"),
        Example(QueueSpec(name="q", filter="a = 1"), "lease_ms"),
        Example(Outcome("r", OutcomeStatus.DONE), "status"),
        Example(SweepCounts(), "removed"),
    ],
)
def test_nouns_are_frozen(example: Example) -> None:
    with pytest.raises(AttributeError):
        setattr(example.thing, example.field, None)


def test_every_public_struct_is_frozen() -> None:
    structs = [
        kind
        for kind in vars(model).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]
    assert len(structs) > 10
    assert [kind for kind in structs if not kind.__struct_config__.frozen] == []


def test_a_delivery_knows_the_token_of_its_lease() -> None:
    assert DELIVERY.lease == f"ps1-0-0-{'ab' * 16}"


def test_an_outcome_is_true_if_the_receipt_was_good() -> None:
    good = {status for status in OutcomeStatus if Outcome("r", status)}
    assert good == {
        OutcomeStatus.DONE,
        OutcomeStatus.RETRYING,
        OutcomeStatus.FAILED,
        OutcomeStatus.EXTENDED,
    }
    assert all(Outcome("r", status).ok is (status in good) for status in OutcomeStatus)


def test_an_assignment_is_true_if_anything_was_new() -> None:
    assert {status for status in AssignStatus if Assigned(status, 1, 0)} == {
        AssignStatus.APPLIED,
        AssignStatus.TRIMMED,
    }


def test_sweep_counts_add_up() -> None:
    counts = SweepCounts(
        leases_expired=1,
        came_due=2,
        failed=4,
        removed=8,
        dedup_forgotten=16,
        moved=32,
        next_due_ms=99,
    )
    assert counts.total == 63


def test_a_page_is_a_sequence_with_a_way_on() -> None:
    entries = [
        Entry(
            message_id=number,
            queue="q",
            state=State.AVAILABLE,
            payload=None,
            attributes={},
            group="",
            priority=0,
            attempts=0,
            published_at_ms=0,
        )
        for number in range(3)
    ]
    page = Page(entries, "next")
    assert len(page) == 3
    assert page[1] is entries[1]
    assert page[1:] == tuple(entries[1:])
    assert list(page) == entries
    assert repr(page) == "Page(3 entries, next_cursor='next')"
