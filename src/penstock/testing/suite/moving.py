"""From one queue to another: whatever a message is, it is in exactly one of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, InvalidQueue, QueueNotFound
from penstock.model import Message, State
from penstock.testing.checking import assert_clean
from penstock.testing.suite.base import Suite, message, receipts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.broker.broker import Broker

__all__ = ["MovingSuite"]

BOTH = "queue IN ('q', 'both')"


class MovingSuite(Suite):
    """The verb ``move``."""

    @pytest.fixture(autouse=True)
    def _moving_leave_a_sound_store(
        self, _around: None, request: pytest.FixtureRequest
    ) -> Iterator[None]:
        yield
        # Other parts of the suite share the class.
        if request.function.__qualname__.startswith(MovingSuite.__name__):
            assert_clean(self.broker)

    def two(self, **settings: Any) -> Broker:
        """Begin with two queues: ``q``, which allows one attempt, and ``to``."""
        broker = self.start(max_attempts=1)
        broker.create_queue("to", max_attempts=2, backoff_base_ms=0, **settings)
        return broker

    def shared(self) -> Broker:
        """Begin with two queues that take the same messages."""
        broker = self.start(max_attempts=1)
        broker.create_queue("to", filter="queue = 'q'", max_attempts=2, backoff_base_ms=0)
        return broker

    # --- what it keeps -------------------------------------------------------------------

    def test_a_failed_message_keeps_what_it_is(self) -> None:
        broker = self.two()
        (id_,) = self.put(b"x", group="g", priority=7, attributes={"n": 1, "s": None})
        published_ms = self.clock.now_ms()
        self.clock.advance(10)
        self.fail_one("no")
        self.clock.advance(10)
        assert broker.move("q", "to") == 1
        assert self.depth() == (0, 0, 0, 0, 0)
        (entry,) = self.everything("available", queue="to")
        assert (entry.message_id, entry.payload) == (id_, b"x")
        assert entry.attributes == {"queue": "q", "n": 1, "s": None}
        assert (entry.group, entry.priority, entry.attempts) == ("g", 7, 1)
        assert (entry.published_at_ms, entry.visible_at_ms) == (published_ms, published_ms + 20)
        delivery = self.take_one(queue="to")
        assert (delivery.message_id, delivery.payload, delivery.attempts) == (id_, b"x", 2)

    def test_attempts_go_on_and_are_a_full_set(self) -> None:
        broker = self.two()
        (id_,) = self.put(b"x")
        self.take_one(consumer="ann")
        self.clock.advance(60_000)
        assert self.depth() == (0, 0, 0, 0, 1)
        broker.move("q", "to")
        first = self.take_one(queue="to", consumer="bob")
        assert broker.release([first.receipt], reason="one")[0].status == "retrying"
        second = self.take_one(queue="to", consumer="bob")
        assert broker.release([second.receipt], reason="two")[0].status == "failed"
        tries = broker.attempts("to", id_)
        assert [(t.number, t.consumer, t.end, t.reason) for t in tries] == [
            (1, "ann", "expired", ""),
            (2, "bob", "released", "one"),
            (3, "bob", "released", "two"),
        ]
        assert broker.attempts("q", id_) == []

    def test_available_ones_are_available_at_once(self) -> None:
        broker = self.two()
        ids = self.put(b"1", b"2", b"3")
        self.clock.advance(5)
        assert broker.move("q", "to", state="available") == 3
        assert self.take(5) == []
        assert [d.message_id for d in self.take(5, queue="to")] == ids

    def test_delayed_ones_stay_delayed(self) -> None:
        broker = self.two()
        self.put(b"now")
        self.put(b"later", delay_ms=1_000)
        assert broker.move("q", "to", state="delayed") == 1
        assert self.depth() == (1, 0, 0, 0, 0)
        assert self.depth("to") == (0, 1, 0, 0, 0)
        self.clock.advance(999)
        assert self.take(queue="to") == []
        self.clock.advance(1)
        assert self.taken(queue="to") == [b"later"]

    def test_by_ids_only_those_of_the_state(self) -> None:
        broker = self.two()
        ids = self.put(b"1", b"2", b"3", b"4")
        late = self.put(b"5", delay_ms=1_000)
        self.take_one()
        wanted = [*ids[:3], *late, 10_000]
        assert broker.move("q", "to", state="available", message_ids=wanted) == 2
        assert self.payloads("available") == [b"4"]
        assert self.payloads("available", queue="to") == [b"2", b"3"]
        assert broker.move("q", "to", state="delayed", message_ids=wanted) == 1
        assert self.depth("to") == (2, 1, 0, 0, 0)

    def test_failed_ones_by_ids(self) -> None:
        broker = self.two()
        ids = self.put(b"1", b"2", b"3")
        broker.release(receipts_of(self.take(3)))
        assert broker.move("q", "to", message_ids=[ids[2], ids[0], ids[0], 99]) == 2
        assert self.payloads("failed") == [b"2"]
        assert self.payloads("available", queue="to") == [b"1", b"3"]
        assert broker.redrive("q") == 1

    def test_a_limit_and_the_rest_later(self) -> None:
        broker = self.two()
        self.put(*(b"%d" % n for n in range(7)))
        broker.release(receipts_of(self.take(7)))
        assert broker.move("q", "to", limit=3) == 3
        assert (self.depth()[4], self.depth("to")[0]) == (4, 3)
        assert broker.move("q", "to", limit=100) == 4
        assert broker.move("q", "to") == 0
        assert len({d.payload for d in self.take(10, queue="to")}) == 7

    @pytest.mark.parametrize("state", ["failed", "available"])
    def test_more_than_one_commit_holds(self, state: str) -> None:
        broker = self.two(bucket_exponent=1)
        self.put(*(b"%d" % n for n in range(2_345)))
        if state == "failed":
            broker.release(receipts_of(self.take(10_000)))
        assert broker.move("q", "to", state=state) == 2_345
        assert self.depth() == (0, 0, 0, 0, 0)
        assert len({d.payload for d in self.take(10_000, queue="to")}) == 2_345

    def test_there_and_back(self) -> None:
        broker = self.two()
        self.put(b"x")
        for _ in range(3):
            assert broker.move("q", "to", state="available") == 1
            assert broker.move("to", "q", state="available") == 1
        assert self.taken() == [b"x"]
        stats = broker.stats("q")
        assert (stats.moved_in_total, stats.moved_out_total, stats.enqueued_total) == (3, 3, 1)
        assert stats.removed_total == 0

    def test_a_restart_keeps_a_move(self) -> None:
        broker = self.two()
        (id_,) = self.put(b"x")
        self.fail_one("no")
        broker.move("q", "to")
        before = self.snapshot()
        self.again()
        assert self.snapshot() == before
        assert [t.reason for t in self.broker.attempts("to", id_)] == ["no"]

    # --- what the other queue has already --------------------------------------------------

    def test_one_that_waits_there_is_merged(self) -> None:
        broker = self.shared()
        (id_,) = self.put(b"x")
        self.fail_one("no")
        assert broker.move("q", "to") == 1
        assert self.depth() == (0, 0, 0, 0, 0)
        assert broker.attempts("q", id_) == broker.attempts("to", id_) == []
        delivery = self.take_one(queue="to")
        assert delivery.attempts == 1
        assert self.take(queue="to") == []
        stats = broker.stats("to")
        assert (stats.moved_in_total, broker.stats("q").moved_out_total) == (0, 1)

    def test_one_in_flight_there_is_merged_and_its_receipt_is_good(self) -> None:
        broker = self.shared()
        (id_,) = self.put(b"x")
        held = self.take_one(queue="to")
        assert broker.move("q", "to", state="available") == 1
        assert self.depth("to") == (0, 0, 1, 0, 0)
        assert broker.ack([held.receipt])[0]
        assert self.payload_kept(id_) is not False
        broker.purge("to", states=["done"])
        assert not self.payload_kept(id_)

    def test_one_that_failed_there_is_live_again(self) -> None:
        broker = self.shared()
        (id_,) = self.put(b"x")
        for reason in ("a", "b"):
            broker.release(receipts_of(self.take(queue="to")), reason=reason)
        assert self.depth("to") == (0, 0, 0, 0, 1)
        self.fail_one("c")
        assert broker.move("q", "to") == 1
        assert self.depth("to") == (1, 0, 0, 0, 0)
        tries = broker.attempts("to", id_)
        assert [(t.number, t.reason) for t in tries] == [(1, "a"), (2, "b"), (3, "c")]
        delivery = self.take_one(queue="to")
        assert delivery.attempts == 4
        assert broker.release([delivery.receipt])[0].status == "retrying"
        assert broker.stats("to").redriven_total == 1

    def test_one_that_is_done_there_is_live_again(self) -> None:
        broker = self.shared()
        ids = self.put(b"1", b"2", b"3")
        broker.ack(receipts_of(self.take(3, queue="to")))
        self.fail_one("no")
        assert broker.move("q", "to", message_ids=ids) == 1
        assert self.depth("to") == (1, 0, 0, 2, 0)
        delivery = self.take_one(queue="to")
        assert (delivery.payload, delivery.attempts) == (b"1", 3)
        broker.ack([delivery.receipt])
        assert self.payloads("done", queue="to") == [b"1", b"2", b"3"]

    def test_moved_twice_it_is_there_once(self) -> None:
        broker = self.start(filter=BOTH)
        broker.create_queue("second", filter=BOTH)
        broker.create_queue("to")
        (id_,) = self.put(b"x", queue="both")
        assert broker.move("q", "to", state="available") == 1
        assert broker.move("second", "to", state="available") == 1
        assert self.depth("to") == (1, 0, 0, 0, 0)
        broker.ack(receipts_of(self.take(queue="to")))
        assert self.payload_kept(id_) is not False
        broker.purge("to", states=["done"])
        assert not self.payload_kept(id_)

    @pytest.mark.parametrize("how", ["redriven", "done"])
    def test_moved_twice_after_it_has_had_a_life_there(self, how: str) -> None:
        broker = self.start(filter=BOTH)
        broker.create_queue("second", filter=BOTH)
        broker.create_queue("to", max_attempts=1)
        self.put(b"x", queue="both")
        broker.move("q", "to", state="available")
        held = receipts_of(self.take(queue="to"))
        if how == "done":
            broker.ack(held)
        else:
            broker.release(held)
            broker.redrive("to")
        assert broker.move("second", "to", state="available") == 1
        assert self.depth("to") == (1, 0, 0, 0, 0)
        assert self.take_one(queue="to").attempts == 2

    def test_a_payload_lives_while_any_queue_holds_it(self) -> None:
        broker = self.start(filter=BOTH)
        broker.create_queue("second", filter=BOTH)
        broker.create_queue("to")
        (id_,) = self.put(b"x", queue="both")
        broker.move("q", "to", state="available")
        broker.purge("to")
        assert self.payload_kept(id_) is not False
        assert self.taken(queue="second") == [b"x"]
        broker.purge("second", states=["in_flight"])
        assert not self.payload_kept(id_)

    # --- order, time, waiting --------------------------------------------------------------

    def test_into_a_fifo_queue_it_goes_to_its_place(self) -> None:
        broker = self.start()
        broker.create_queue("to", ordering="fifo")
        self.put(b"1", group="g", priority=0)
        broker.publish([message(b"2", queue="to", group="g")])
        self.put(b"3", group="g", priority=9)
        broker.publish([message(b"4", queue="to", group="g")])
        held = self.take_one(queue="to")
        assert held.payload == b"2"
        assert broker.move("q", "to", state="available") == 2
        assert self.take(5, queue="to") == []
        broker.ack([held.receipt])
        assert self.taken(5, queue="to") == [b"1", b"3", b"4"]

    @pytest.mark.parametrize("ordering", ["standard", "fifo"])
    def test_a_group_that_has_gone_takes_no_turn(self, ordering: str) -> None:
        broker = self.start(ordering=ordering)
        broker.create_queue("to", ordering=ordering)
        ids = self.put(b"1", b"2", group="a")
        self.put(b"3", b"4", group="b")
        self.put(b"5", b"6", group="c")
        assert broker.move("q", "to", state="available", message_ids=ids) == 2
        assert [delivery.group for delivery in self.take(2)] == ["b", "c"]
        assert broker.move("to", "q", state="available") == 2
        assert "a" in {delivery.group for delivery in self.take(3)}

    def test_out_of_a_fifo_queue_the_group_goes_on(self) -> None:
        broker = self.start(ordering="fifo")
        broker.create_queue("to")
        self.put(b"1", group="g", delay_ms=1_000, priority=3)
        self.put(b"2", group="g")
        assert self.take() == []
        assert broker.move("q", "to", state="delayed") == 1
        assert self.taken() == [b"2"]
        self.clock.advance(1_000)
        delivery = self.take_one(queue="to")
        assert (delivery.payload, delivery.priority) == (b"1", 3)

    def test_a_delayed_one_holds_its_group_in_a_fifo_queue(self) -> None:
        broker = self.start()
        broker.create_queue("to", ordering="fifo")
        self.put(b"1", group="g", delay_ms=1_000)
        broker.publish([message(b"2", queue="to", group="g")])
        broker.move("q", "to", state="delayed")
        assert self.take(queue="to") == []
        self.clock.advance(1_000)
        assert self.taken(5, queue="to") == [b"1", b"2"]

    def test_unclaimed_retention_counts_from_the_move(self) -> None:
        broker = self.two(unclaimed_retention_ms=1_000)
        self.put(b"x")
        self.clock.advance(5_000)
        broker.move("q", "to", state="available")
        assert self.next_due_ms() == self.clock.now_ms() + 1_000
        self.clock.advance(1_000)
        assert broker.sweep().removed == 1
        assert self.depth("to") == (0, 0, 0, 0, 0)

    def test_what_has_expired_is_no_longer_in_flight(self) -> None:
        broker = self.two()
        self.put(b"x")
        self.take_one(lease_ms=100)
        self.clock.advance(100)
        assert broker.move("q", "to") == 1

    def test_a_waiting_claim_gets_it(self) -> None:
        self.broker = broker = self.open(SystemClock())
        broker.create_queue("q")
        broker.create_queue("to")
        self.put(b"x")
        with ThreadPoolExecutor(1) as pool:
            claimed = pool.submit(broker.claim, "to", wait_ms=60_000)
            assert broker.move("q", "to", state="available") == 1
            assert [delivery.payload for delivery in claimed.result(timeout=120)] == [b"x"]

    # --- what can't be ---------------------------------------------------------------------

    def test_what_is_refused_changes_nothing(self) -> None:
        broker = self.two()
        self.put(b"x")
        self.fail_one()
        with self.refused(InvalidInput):
            broker.move("q", "q")
        with self.refused(QueueNotFound):
            broker.move("q", "nowhere")
        with self.refused(QueueNotFound):
            broker.move("nowhere", "q")
        for state in ("in_flight", "done", "lost"):
            with self.refused(InvalidInput):
                broker.move("q", "to", state=state)
        with self.refused(InvalidInput):
            broker.move("q", "to", limit=0)
        with self.refused(InvalidInput):
            broker.move("q", "to", message_ids=[-1])

    def test_a_draining_queue_takes_nothing(self) -> None:
        broker = self.two()
        self.put(b"x")
        broker.publish([Message(b"", {"queue": "to"})])
        broker.delete_queue("to", drain=True)
        with self.refused(InvalidQueue):
            broker.move("q", "to", state=State.AVAILABLE)
        broker.create_queue("other")
        assert broker.move("to", "other", state="available") == 1
        broker.sweep()
        assert [spec.name for spec in broker.queues()] == ["other", "q"]
