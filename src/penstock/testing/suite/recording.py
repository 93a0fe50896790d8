"""The life-cycle log: whatever the store, each transition of a message has the same records."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.tailer import route_once
from penstock.limits import MAX_OFFSET
from penstock.model import TRANSITIONS, Event, Message, State
from penstock.store.life import MOST_IDS, life
from penstock.testing.suite.base import HOUR_MS, Suite, receipts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["WAYS", "LifeLogSuite", "Way"]

AVAILABLE, DELAYED, IN_FLIGHT, DONE, FAILED = State


class Way(NamedTuple):
    """A transition, the act that makes it, and the records that it has, with settings of the queue.

    A record is written as its event, and its reason and its other queue if it has them.
    """

    begin: State | None
    event: Event
    act: str
    records: list[tuple[str, ...]]
    settings: Mapping[str, Any] = {}


OTHER: Final = "other"
ONE_ATTEMPT: Final = {"max_attempts": 1}
LATER: Final = {"delay_ms": HOUR_MS}
FULL: Final = {"max_messages": 1, "overflow": "drop_oldest"}
DROPPED: Final = ("fail", "dropped as the oldest of a full queue: max_messages=1")
WAYS: Final = [
    *(
        Way(None, event, act, [(act,)], settings)
        for event, settings in ((Event.ENQUEUE, {}), (Event.ENQUEUE_LATER, LATER))
        for act in ("publish", "assign", "backfill")
    ),
    Way(None, Event.ENQUEUE, "switch", [("assign",)]),
    Way(DELAYED, Event.COME_DUE, "come_due", [("come_due",)], LATER),
    Way(AVAILABLE, Event.CLAIM, "claim", [("claim",)]),
    Way(IN_FLIGHT, Event.ACK, "ack", [("ack",)]),
    Way(AVAILABLE, Event.ACK_LATE, "ack_late", [("ack", "late")]),
    Way(DELAYED, Event.ACK_LATE, "ack_late", [("ack", "late")]),
    Way(IN_FLIGHT, Event.RELEASE, "release", [("release", "why")]),
    Way(IN_FLIGHT, Event.RELEASE_LATER, "release_later", [("release", "why")]),
    Way(IN_FLIGHT, Event.EXPIRE, "expire", [("expire",)]),
    Way(IN_FLIGHT, Event.EXHAUST, "release", [("release", "why"), ("fail", "why")], ONE_ATTEMPT),
    Way(
        IN_FLIGHT,
        Event.EXHAUST,
        "expire",
        [("expire",), ("fail", "lease expired")],
        ONE_ATTEMPT,
    ),
    Way(AVAILABLE, Event.OVERFLOW, "overflow", [DROPPED], FULL),
    Way(DELAYED, Event.OVERFLOW, "overflow", [DROPPED], FULL | LATER),
    Way(FAILED, Event.REDRIVE, "redrive", [("redrive",)]),
    *(
        Way(begin, Event.MOVE_OUT, "move_out", [("move_out", OTHER)], settings)
        for begin, settings in ((AVAILABLE, {}), (DELAYED, LATER), (FAILED, {}))
    ),
    Way(FAILED, Event.MOVE_OUT, "dead_letter", [("move_out", "dead letter", OTHER)]),
    *(
        Way(begin, event, event.value, [("move_in", OTHER)])
        for event in (Event.MOVE_IN, Event.MOVE_IN_LATER)
        for begin in (None, DONE, FAILED)
    ),
    Way(None, Event.MOVE_IN, "get_dead_letter", [("move_in", "dead letter", OTHER)]),
    *(
        Way(begin, Event.REMOVE, act, [("remove", "purge")], LATER if begin is DELAYED else {})
        for begin in State
        for act in ("purge", "delete_queue")
    ),
    *(
        Way(begin, Event.REMOVE, act, [("remove", "purge")])
        for begin in (DONE, FAILED)
        for act in ("trim", "drain")
    ),
    *(
        Way(begin, Event.REMOVE, "wait", [("remove", "retention")], {f"{kept}_retention_ms": 1_000})
        for begin, kept in ((AVAILABLE, "unclaimed"), (DONE, "done"), (FAILED, "failed"))
    ),
]


class LifeLogSuite(Suite):
    """The records of the life-cycle log."""

    @contextmanager
    def recorded(self) -> Iterator[list[dict[str, Any]]]:
        """Turn the log on, and collect the fields of its records."""
        found: list[dict[str, Any]] = []

        class Collector(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                found.append(record.__dict__["fields"])

        handler, level = Collector(), life.level
        life.addHandler(handler)
        life.setLevel(logging.INFO)
        try:
            yield found
        finally:
            life.setLevel(level)
            life.removeHandler(handler)

    def test_each_transition_has_its_records(self) -> None:
        assert {(way.begin, way.event) for way in WAYS} == set(TRANSITIONS)
        self.start(queue=None)
        for way in WAYS:
            queue, ids, held = self.bring(way)
            with self.recorded() as records:
                ids += self.act(queue, way, held)
                for each in self.told(records, queue, ids[0], way.records):
                    assert each["count"] == len(each["messages"])
                    assert ("lease" in each) == (
                        each["event"] in {"claim", "ack", "release", "expire"}
                        or (each["event"] == "fail" and way.begin is IN_FLIGHT)
                    )
            after = TRANSITIONS[way.begin, way.event]
            if after is not None:
                assert self.everything(after, queue=queue)

    def test_a_delay_that_is_over_is_told_before_what_comes_next(self) -> None:
        """A sweep or another verb, whichever comes first, tells that a message has come due."""
        broker = self.start(queue=OTHER)
        acts: dict[tuple[str, ...], Callable[[str], object]] = {
            ("claim",): lambda queue: self.take(queue=queue),
            ("remove", "purge"): lambda queue: broker.purge(queue, states=["available"]),
            ("move_out", OTHER): lambda queue: broker.move(queue, OTHER, state="available"),
        }
        for told, act in acts.items():
            broker.create_queue(told[0])
            with self.recorded() as records:
                (id_,) = self.put(b"", queue=told[0], delay_ms=1_000)
                self.clock.advance(1_000)
                act(told[0])
                self.told(records, told[0], id_, [("publish",), ("come_due",), told])

    def test_the_ids_of_all_messages_are_told(self) -> None:
        broker = self.start(queue=None)
        names = ["a", "b"]
        for name in names:
            broker.create_queue(name, filter="TRUE")
        with self.recorded() as records:
            ids = broker.publish([Message(b"")] * (2 * MOST_IDS + 1))
        for name in names:
            its = [each["messages"] for each in records if each["queue"] == name]
            assert [len(each) for each in its] == [MOST_IDS, MOST_IDS, 1]
            assert [message_id for each in its for message_id in each] == ids

    def bring(self, way: Way) -> tuple[str, list[int], list[str]]:
        """Bring a message into the state where a way begins; return queue, id and receipt."""
        broker, queue = self.broker, f"{way.act}_{way.begin}_{way.event}"
        # The queue OTHER takes what comes into this one as well, if it is to move it there.
        shared = queue if way.event in {Event.MOVE_IN, Event.MOVE_IN_LATER} else OTHER
        if shared == queue or way.event is Event.MOVE_OUT:
            if OTHER in {spec.name for spec in broker.queues()}:
                broker.delete_queue(OTHER)
            delay_ms = HOUR_MS if way.event is Event.MOVE_IN_LATER else 0
            taken = f"queue IN ('{OTHER}', '{shared}')"
            broker.create_queue(OTHER, filter=taken, max_attempts=1, delay_ms=delay_ms)
        attempts: Mapping[str, Any] = ONE_ATTEMPT if way.begin is FAILED else {}
        broker.create_queue(queue, lease_ms=1_000, **attempts, **way.settings)
        ids = [] if way.begin is None else self.put(b"", queue=queue)
        held = receipts_of(self.take(queue=queue)) if way.begin in {IN_FLIGHT, DONE, FAILED} else []
        if way.begin is DONE:
            broker.ack(held)
        elif way.begin is FAILED:
            broker.release(held)
        elif way.event is Event.ACK_LATE:
            held = receipts_of(self.take(queue=queue))
            broker.release(held, delay_ms=HOUR_MS if way.begin is DELAYED else 0)
        return queue, ids, held

    def told(
        self,
        records: list[dict[str, Any]],
        queue: str,
        message_id: int,
        expected: list[tuple[str, ...]],
    ) -> list[dict[str, Any]]:
        """Return the records of a message in a queue, which are these.

        They may come in a moment: the sweeper of a server may be at work as well.
        """
        for _ in range(500):
            its = [
                each
                for each in [*records]
                if each["queue"] == queue and message_id in each["messages"]
            ]
            found = [
                (each["event"], *(each[name] for name in ("reason", "to", "from") if name in each))
                for each in its
            ]
            if found == expected:
                break
            threading.Event().wait(0.01)
        assert found == expected
        return its

    def act(self, queue: str, way: Way, held: list[str]) -> list[int]:
        """Do what makes the transition; return the messages that were published for it."""
        broker = self.broker
        match way.act:
            case "publish":
                return self.put(b"", queue=queue)
            case "assign":
                broker.configure_log(routing="pipeline")
                ids = self.put(b"", queue=queue)
                route_once(broker)
                broker.configure_log(routing="inline")
                return ids
            case "switch":
                broker.configure_log(routing="pipeline")
                ids = self.put(b"", queue=queue)
                broker.configure_log(routing="inline")
                return ids
            case "backfill":
                broker.update_queue(queue, filter="FALSE")
                ids = self.put(b"", queue=queue)
                broker.update_queue(queue, filter=f"queue = '{queue}'")
                broker.backfill(queue)
                return ids
            case "come_due":
                self.clock.advance(HOUR_MS)
                broker.sweep()
            case "claim":
                self.take(queue=queue)
            case "ack":
                broker.ack(held)
            case "ack_late":
                self.ack_late((held[0], 1), queue=queue)
            case "release":
                broker.release(held, delay_ms=0, reason="why")
            case "release_later":
                broker.release(held, delay_ms=HOUR_MS, reason="why")
            case "expire" | "wait":
                self.clock.advance(1_000)
                broker.sweep()
            case "overflow":
                self.put(b"", queue=queue)
                broker.sweep()
            case "redrive":
                broker.redrive(queue)
            case "move_out":
                assert way.begin is not None
                broker.move(queue, OTHER, state=way.begin)
            case "dead_letter":
                broker.update_queue(queue, dead_letter=OTHER)
                broker.sweep()
            case "move_in" | "move_in_later":
                ids = [] if way.begin else self.put(b"", queue=OTHER)
                broker.move(OTHER, queue, state=AVAILABLE if way.act == "move_in" else DELAYED)
                return ids
            case "get_dead_letter":
                broker.update_queue(OTHER, dead_letter=queue)
                ids = self.put(b"", queue=OTHER)
                broker.release(receipts_of(self.take(queue=OTHER)))
                broker.sweep()
                return ids
            case "purge":
                assert way.begin is not None
                broker.purge(queue, states=[way.begin])
            case "trim":
                assert way.begin is not None
                broker.trim(queue, state=way.begin, before=MAX_OFFSET)
            case "delete_queue":
                broker.delete_queue(queue)
            case "drain":
                broker.delete_queue(queue, drain=True)
                broker.sweep()
        return []
