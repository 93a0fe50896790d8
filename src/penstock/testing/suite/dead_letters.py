"""Dead letter queues: what runs out of attempts goes there, and nothing is lost on the way."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import InvalidQueue, QueueExists
from penstock.testing.checking import assert_clean
from penstock.testing.suite.base import Suite, message, receipts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.broker.broker import Broker

__all__ = ["DeadLetterSuite"]


class DeadLetterSuite(Suite):
    """The settings ``dead_letter`` and ``labels``."""

    @pytest.fixture(autouse=True)
    def _dead_letters_leave_a_sound_store(
        self, _around: None, request: pytest.FixtureRequest
    ) -> Iterator[None]:
        yield
        # Other parts of the suite share the class.
        if request.function.__qualname__.startswith(DeadLetterSuite.__name__):
            assert_clean(self.broker)

    def dying(self, **settings: Any) -> Broker:
        """Begin with a queue that allows one attempt, and its dead letter queue."""
        broker = self.start(queue="dead", **settings)
        broker.create_queue("q", max_attempts=1, dead_letter="dead", **settings)
        return broker

    def fail_all(self, *payloads: bytes, queue: str = "q", **fields: Any) -> None:
        """Publish messages, and have them fail."""
        self.put(*payloads, queue=queue, **fields)
        outcomes = self.broker.release(receipts_of(self.take(100, queue=queue)), reason="no")
        assert [outcome.status for outcome in outcomes] == ["failed"] * len(payloads)

    # --- moving ----------------------------------------------------------------------------

    def test_the_sweep_moves_what_has_failed(self) -> None:
        broker = self.dying()
        self.fail_all(b"1", b"2")
        counts = broker.sweep()
        assert counts.moved == counts.total == 2
        assert self.depth() == (0, 0, 0, 0, 0)
        assert self.payloads("available", queue="dead") == [b"1", b"2"]
        delivery = self.take_one(queue="dead")
        assert delivery.attempts == 2
        assert [t.reason for t in broker.attempts("dead", delivery.message_id)] == ["no", ""]
        stats = broker.stats("q")
        assert (stats.failed_total, stats.moved_out_total) == (2, 2)
        assert broker.stats("dead").moved_in_total == 2

    def test_a_claim_of_the_dead_letter_queue_needs_no_sweep(self) -> None:
        self.dying()
        self.fail_all(b"x")
        assert self.taken(queue="dead") == [b"x"]

    def test_a_lease_that_expires_for_the_last_time(self) -> None:
        self.dying()
        self.put(b"x")
        self.take_one(lease_ms=100)
        self.clock.advance(100)
        assert self.taken(queue="dead") == [b"x"]

    def test_in_steps_that_a_budget_bounds(self) -> None:
        broker = self.dying()
        self.fail_all(*(b"%d" % n for n in range(5)))
        counts = broker.sweep(budget=2)
        assert (counts.moved, counts.next_due_ms) == (2, self.clock.now_ms())
        assert broker.sweep(budget=2).moved == 2
        assert broker.sweep(budget=2).moved == 1
        counts = broker.sweep(budget=2)
        assert counts.moved == 0
        assert counts.next_due_ms is None or counts.next_due_ms > self.clock.now_ms()

    def test_the_sweeper_is_woken(self) -> None:
        self.broker = broker = self.open(SystemClock())
        broker.create_queue("dead")
        broker.create_queue("q", max_attempts=1, dead_letter="dead")
        self.put(b"x")
        delivery = self.take_one()
        broker.release([delivery.receipt])
        (dead,) = broker.claim("dead", wait_ms=60_000)
        assert dead.payload == b"x"

    def test_a_fifo_queue_has_a_fifo_dead_letter_queue(self) -> None:
        self.dying(ordering="fifo")
        self.put(b"1", b"2", b"3", group="g")
        for _ in range(3):
            self.fail_one()
        assert self.taken(5, queue="dead") == [b"1", b"2", b"3"]

    def test_two_queues_that_share_messages_and_a_dead_letter_queue(self) -> None:
        broker = self.dying()
        broker.create_queue("r", filter="queue = 'q'", max_attempts=1, dead_letter="dead")
        (id_,) = self.put(b"x")
        for name in ("q", "r"):
            broker.release(receipts_of(self.take(queue=name)))
            broker.sweep()
            assert self.depth("dead") == (1, 0, 0, 0, 0)
        broker.ack(receipts_of(self.take(queue="dead")))
        broker.purge("dead", states=["done"])
        assert not self.payload_kept(id_)

    def test_from_one_dead_letter_queue_to_the_next(self) -> None:
        broker = self.dying()
        broker.create_queue("last")
        broker.update_queue("dead", dead_letter="last", max_attempts=1)
        self.fail_all(b"x")
        broker.release(receipts_of(self.take(queue="dead")))
        assert self.take_one(queue="last").attempts == 3

    def test_a_queue_that_is_drained_hands_its_failures_on(self) -> None:
        broker = self.dying()
        self.fail_all(b"x")
        broker.delete_queue("q", drain=True)
        broker.sweep()
        assert [spec.name for spec in broker.queues()] == ["dead"]
        assert self.taken(queue="dead") == [b"x"]

    # --- settings ----------------------------------------------------------------------------

    def test_what_had_failed_before_goes_as_well(self) -> None:
        broker = self.start(max_attempts=1)
        self.fail_all(b"x")
        broker.create_queue("dead")
        broker.sweep()
        assert self.depth() == (0, 0, 0, 0, 1)
        broker.update_queue("q", dead_letter="dead")
        assert broker.sweep().moved == 1
        broker.update_queue("q", dead_letter="")
        self.fail_all(b"y")
        assert broker.sweep().moved == 0
        assert broker.redrive("q") == 1

    def test_a_restart_goes_on_with_it(self) -> None:
        self.dying()
        self.fail_all(b"x")
        broker = self.again()
        assert broker.queue("q").dead_letter == "dead"
        assert broker.sweep().moved == 1

    def test_without_its_dead_letter_queue_nothing_is_lost(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        broker = self.dying()
        broker.delete_queue("dead")
        with caplog.at_level(logging.WARNING):
            for payload in (b"1", b"2"):
                self.fail_all(payload)
                assert broker.sweep().moved == 0
        assert sum("dead letter" in record.message for record in caplog.records) == 1
        assert self.depth() == (0, 0, 0, 0, 2)
        counts = broker.sweep()
        assert counts.next_due_ms is None or counts.next_due_ms > self.clock.now_ms()
        assert broker.update_queue("q", description="d").dead_letter == "dead"
        broker = self.again()
        assert broker.sweep().moved == 0
        broker.create_queue("dead")
        assert broker.sweep().moved == 2
        assert self.depth("dead") == (2, 0, 0, 0, 0)

    def test_a_dead_letter_queue_that_drains_takes_nothing_more(self) -> None:
        broker = self.dying()
        broker.publish([message(b"", queue="dead")])
        broker.delete_queue("dead", drain=True)
        self.fail_all(b"x")
        assert broker.sweep().moved == 0
        broker.ack(receipts_of(self.take(queue="dead")))
        broker.sweep()
        broker.create_queue("dead")
        assert broker.sweep().moved == 1

    def test_what_is_refused(self) -> None:
        broker = self.dying()
        broker.create_queue("fifo", ordering="fifo")
        for name, dead_letter in (("q", "q"), ("q", "nowhere"), ("q", "fifo"), ("fifo", "q")):
            with self.refused(InvalidQueue):
                broker.update_queue(name, dead_letter=dead_letter)
        with self.refused(InvalidQueue):
            broker.update_queue("q", dead_letter=None)
        with self.refused(InvalidQueue):
            broker.create_queue("new", dead_letter="new")
        with self.refused(InvalidQueue):
            broker.create_queue("new", dead_letter="nowhere")
        with self.refused(QueueExists):
            broker.create_queue("q", max_attempts=1)
        assert broker.create_queue("q", max_attempts=1, dead_letter="dead").version == 1

    # --- labels ------------------------------------------------------------------------------

    def test_labels_are_kept(self) -> None:
        labels = {"Policy": "{}", "empty": "", "ü": "\N{SNOWMAN}"}
        broker = self.start(labels=labels)
        assert broker.queue("q").labels == labels
        labels["mine"] = "now"
        assert "mine" not in broker.queue("q").labels
        assert self.again().queue("q").labels == broker_labels(labels)
        changed = self.broker.update_queue("q", labels={"a": "b"})
        assert (changed.labels, changed.version) == ({"a": "b"}, 2)
        assert self.broker.update_queue("q", lease_ms=1).labels == {"a": "b"}
        assert self.broker.update_queue("q", labels={}).labels == {}
        assert self.again().queue("q").labels == {}

    def test_labels_up_to_their_bounds(self) -> None:
        many = {f"{n:0{limits.MAX_LABEL_NAME_BYTES}}": "v" for n in range(limits.MAX_LABELS)}
        long = {"n": "v" * (limits.MAX_LABELS_BYTES - 1)}
        broker = self.start(labels=many)
        broker.create_queue("long", labels=long)
        broker = self.again()
        assert (broker.queue("q").labels, broker.queue("long").labels) == (many, long)
        too_much: tuple[Any, ...] = (
            {**many, "one more": ""},
            {"n": long["n"] + "v"},
            {"n" * (limits.MAX_LABEL_NAME_BYTES + 1): ""},
            {"": "v"},
            {"n": 1},
            {1: "v"},
            [("n", "v")],
            None,
        )
        for labels in too_much:
            with self.refused(InvalidQueue):
                broker.update_queue("q", labels=labels)


def broker_labels(labels: dict[str, str]) -> dict[str, str]:
    """Return what was there before the caller went on with his own."""
    return {name: value for name, value in labels.items() if name != "mine"}
