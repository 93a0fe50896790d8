"""Limits of a queue: what is refused, what is dropped, and that both keep to their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.broker.tailer import route_once
from penstock.errors import InvalidQueue, LimitReached
from penstock.model import Message
from penstock.testing.checking import assert_clean
from penstock.testing.suite.base import Suite, message, receipts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.broker.broker import Broker

__all__ = ["LimitSuite"]


class LimitSuite(Suite):
    """The settings ``max_messages``, ``max_bytes`` and ``overflow``."""

    @pytest.fixture(autouse=True)
    def _limits_leave_a_sound_store(
        self, _around: None, request: pytest.FixtureRequest
    ) -> Iterator[None]:
        yield
        # Other parts of the suite share the class.
        if request.function.__qualname__.startswith(LimitSuite.__name__):
            assert_clean(self.broker)

    def dropping(self, **settings: Any) -> Broker:
        """Begin with a queue that drops its oldest messages."""
        return self.start(overflow="drop_oldest", **settings)

    # --- refuse ----------------------------------------------------------------------------

    def test_a_full_queue_refuses(self) -> None:
        self.start(max_messages=3)
        self.put(b"1", b"2")
        with self.refused(LimitReached):
            self.put(b"3", b"4")
        self.put(b"3")
        with pytest.raises(LimitReached, match=r"'q' is full: 3 messages .* max_messages=3"):
            self.put(b"4")
        assert self.payloads("available") == [b"1", b"2", b"3"]

    def test_delayed_and_in_flight_messages_count(self) -> None:
        self.start(max_messages=3)
        self.put(b"1", delay_ms=1_000)
        self.put(b"2", b"3")
        delivery = self.take_one()
        with self.refused(LimitReached):
            self.put(b"4")
        self.broker.release([delivery.receipt], delay_ms=0)
        with self.refused(LimitReached):
            self.put(b"4")
        self.broker.ack([self.take_one().receipt])
        self.put(b"4")
        assert self.depth() == (2, 1, 0, 1, 0)

    def test_what_ends_makes_room(self) -> None:
        self.start(max_messages=1, max_attempts=1)
        for end in (self.fail_one, lambda: self.broker.purge("q", states=["available"])):
            self.put(b"x")
            with self.refused(LimitReached):
                self.put(b"y")
            end()
        self.put(b"z")
        assert self.depth() == (1, 0, 0, 0, 1)

    def test_bytes_are_those_of_payloads(self) -> None:
        broker = self.start(max_bytes=10)
        self.put(b"x" * 4, b"y" * 5, attributes={"long": "attribute" * 100})
        assert broker.stats("q").live_bytes == 9
        with self.refused(LimitReached):
            self.put(b"zz")
        self.put(b"z")
        self.put(b"")
        deliveries = self.take(2)
        assert broker.stats("q").live_bytes == 10
        broker.ack(receipts_of(deliveries))
        assert broker.stats("q").live_bytes == 1
        with pytest.raises(LimitReached, match=r"11 more would pass max_bytes=10.* never fit"):
            self.put(b"x" * 11)

    def test_a_message_of_several_queues_is_refused_by_one(self) -> None:
        broker = self.start(max_messages=1, filter="TRUE")
        broker.create_queue("other", filter="TRUE")
        broker.create_queue("third")
        self.put(b"1", queue="third")
        with self.refused(LimitReached):
            self.put(b"2", b"3", queue="third")
        assert self.depth("third") == self.depth("other") == (1, 0, 0, 0, 0)

    def test_a_duplicate_needs_no_room(self) -> None:
        self.start(max_messages=1, max_bytes=2)
        first = self.put(b"1", dedup_id="a")
        assert self.put(b"1", dedup_id="a") == first
        self.broker.purge("q")
        two = self.broker.publish([message(b"22", dedup_id="b"), message(b"22", dedup_id="b")])
        assert two[0] == two[1]

    def test_a_refused_publish_is_no_duplicate_when_it_comes_again(self) -> None:
        self.start(max_messages=1)
        self.put(b"1")
        with self.refused(LimitReached):
            self.put(b"2", dedup_id="a")
        self.broker.purge("q")
        self.put(b"2", dedup_id="a")
        assert self.payloads("available") == [b"2"]

    def test_send_is_refused_too(self) -> None:
        self.start(max_messages=1).send("q", b"1")
        with self.refused(LimitReached):
            self.broker.send("q", b"2")

    def test_redrive_is_refused(self) -> None:
        broker = self.start(max_messages=2, max_attempts=1)
        self.put(b"1", b"2")
        broker.release(receipts_of(self.take(2)))
        self.put(b"3")
        with self.refused(LimitReached):
            broker.redrive("q")
        failed = self.everything("failed")[0].message_id
        assert broker.redrive("q", message_ids=[failed]) == 1
        assert self.depth() == (2, 0, 0, 0, 1)

    def test_move_is_refused_and_a_dead_letter_never(self) -> None:
        broker = self.start(queue="to", max_messages=1, max_bytes=1)
        broker.create_queue("q", max_attempts=1)
        self.put(b"1", b"2", b"3")
        assert broker.move("q", "to", state="available", limit=1) == 1
        with self.refused(LimitReached):
            broker.move("q", "to", state="available", limit=1)
        broker.update_queue("q", dead_letter="to")
        broker.release(receipts_of(self.take(2)))
        broker.sweep()
        assert self.depth("to") == (3, 0, 0, 0, 0)
        assert broker.stats("to").live_bytes == 3

    def test_backfill_is_refused_whole(self) -> None:
        broker = self.start(queue="past", filter="TRUE")
        self.put(b"1", b"2", b"3", queue="none")
        broker.create_queue("q", filter="TRUE", max_messages=2)
        with self.refused(LimitReached):
            broker.backfill("q")
        broker.update_queue("q", max_messages=3)
        assert broker.backfill("q").added == 3

    def test_a_message_that_comes_back_is_never_refused(self) -> None:
        broker = self.start(max_messages=2)
        self.put(b"1", b"2")
        deliveries = self.take(2, lease_ms=1_000)
        broker.update_queue("q", max_messages=1)
        broker.release([deliveries[0].receipt], delay_ms=0)
        self.clock.advance(1_000)
        broker.sweep()
        assert self.depth() == (2, 0, 0, 0, 0)

    # --- drop the oldest ---------------------------------------------------------------------

    def test_the_oldest_fail_with_a_reason(self) -> None:
        broker = self.dropping(max_messages=3)
        self.put(b"1", b"2", b"3")
        self.put(b"4", b"5")
        assert self.payloads("available") == [b"3", b"4", b"5"]
        dropped = self.everything("failed")
        assert [entry.payload for entry in dropped] == [b"1", b"2"]
        assert {entry.reason for entry in dropped} == {
            "dropped as the oldest of a full queue: max_messages=3"
        }
        stats = broker.stats("q")
        assert (stats.enqueued_total, stats.failed_total) == (5, 2)
        assert broker.attempts("q", dropped[0].message_id) == []

    def test_priority_does_not_keep_an_old_message(self) -> None:
        self.dropping(max_messages=2)
        self.put(b"1", priority=9)
        self.put(b"2", b"3", group="g")
        assert self.payloads("available") == [b"2", b"3"]

    def test_the_lowest_ids_fail_wherever_they_lie(self) -> None:
        broker = self.start(bucket_exponent=1, max_attempts=1)
        self.put(b"0")
        self.fail_one()
        self.put(*[b"%d" % n for n in range(1, 30)])
        # It has the lowest id, behind all others.
        broker.redrive("q")
        broker.update_queue("q", max_messages=30, overflow="drop_oldest")
        self.put(*[b"%d" % n for n in range(30, 45)])
        assert self.payloads("available") == [b"%d" % n for n in range(15, 45)]
        assert self.payloads("failed") == [b"%d" % n for n in range(15)]

    def test_the_oldest_may_be_delayed(self) -> None:
        self.dropping(max_messages=2)
        self.put(b"1", delay_ms=1_000)
        self.put(b"2", b"3")
        assert self.depth() == (2, 0, 0, 0, 1)
        self.clock.advance(1_000)
        assert self.taken(10) == [b"2", b"3"]

    def test_messages_in_flight_stay(self) -> None:
        self.dropping(max_messages=2)
        self.put(b"1", b"2")
        deliveries = self.take(2)
        self.put(b"3")
        assert self.depth() == (0, 0, 2, 0, 1)
        assert all(self.broker.ack(receipts_of(deliveries)))
        self.put(b"4")
        assert self.payloads("available") == [b"4"]

    def test_a_message_that_comes_back_may_be_dropped(self) -> None:
        broker = self.dropping(max_messages=2)
        self.put(b"1", b"2")
        delivery = self.take_one(lease_ms=1_000)
        broker.update_queue("q", max_messages=1)
        assert self.depth() == (0, 0, 1, 0, 1)
        self.put(b"3")
        self.clock.advance(1_000)
        broker.sweep()
        assert self.depth() == (1, 0, 0, 0, 2) or self.depth() == (0, 0, 0, 0, 3)
        assert delivery.payload == b"1"

    def test_by_bytes(self) -> None:
        broker = self.dropping(max_bytes=10)
        self.put(b"1" * 4, b"2" * 4)
        self.put(b"3" * 6)
        assert self.payloads("available") == [b"2" * 4, b"3" * 6]
        self.put(b"4" * 9)
        assert self.payloads("available") == [b"4" * 9]
        assert broker.stats("q").live_bytes == 9
        # One that can't ever fit would take all others with it.
        with self.refused(LimitReached):
            self.put(b"5" * 11)
        broker.create_queue("from")
        self.put(b"5" * 11, queue="from")
        with pytest.raises(LimitReached, match="11 bytes does not fit into queue 'q'"):
            broker.move("from", "q", state="available")
        assert self.depth() == (1, 0, 0, 0, 3)

    def test_other_queues_of_a_message_are_not_touched(self) -> None:
        broker = self.dropping(max_messages=1, filter="TRUE")
        broker.create_queue("other", filter="TRUE")
        self.put(b"1", b"2")
        assert self.depth() == (1, 0, 0, 0, 1)
        assert self.depth("other") == (2, 0, 0, 0, 0)
        assert self.taken(5, queue="other") == [b"1", b"2"]

    def test_dropped_messages_can_be_redriven(self) -> None:
        broker = self.dropping(max_messages=1)
        self.put(b"1")
        self.put(b"2")
        # It would be dropped again, as the oldest.
        with self.refused(LimitReached):
            broker.redrive("q")
        broker.update_queue("q", max_messages=2)
        assert broker.redrive("q") == 1
        assert self.depth() == (2, 0, 0, 0, 0)

    def test_dropped_messages_go_to_the_dead_letter_queue(self) -> None:
        broker = self.start(queue="dead", max_messages=1)
        broker.create_queue("q", max_messages=1, overflow="drop_oldest", dead_letter="dead")
        self.put(b"1", b"2", b"3")
        broker.sweep()
        assert self.depth() == (1, 0, 0, 0, 0)
        assert self.payloads("available", queue="dead") == [b"1", b"2"]

    def test_dead_letters_push_out_the_oldest(self) -> None:
        broker = self.start(queue="dead", max_messages=1, overflow="drop_oldest")
        broker.create_queue("q", max_attempts=1, dead_letter="dead")
        self.put(b"1", b"2")
        broker.release(receipts_of(self.take(2)))
        broker.sweep()
        assert self.depth("dead") == (1, 0, 0, 0, 1)

    def test_move_and_backfill_push_out_the_oldest(self) -> None:
        broker = self.start(queue="from", filter="TRUE")
        self.put(b"1", b"2", b"3", queue="none")
        broker.create_queue("q", filter="TRUE", max_messages=2, overflow="drop_oldest")
        assert broker.backfill("q").added == 3
        assert self.payloads("available") == [b"2", b"3"]
        broker.create_queue("to", max_messages=1, overflow="drop_oldest")
        assert broker.move("from", "to", state="available") == 3
        assert self.payloads("available", queue="to") == [b"3"]

    def test_a_fifo_queue_goes_on_behind_what_was_dropped(self) -> None:
        self.dropping(ordering="fifo", max_messages=2)
        self.put(b"1", group="g", delay_ms=1_000)
        self.put(b"2", b"3", group="g")
        assert self.taken(10) == [b"2", b"3"]

    def test_a_lower_limit_drops_in_steps(self) -> None:
        broker = self.start()
        self.put(*(b"%d" % n for n in range(10)))
        broker.update_queue("q", max_messages=3, overflow="drop_oldest")
        counts = broker.sweep(budget=4)
        assert (counts.failed, counts.next_due_ms) == (4, self.clock.now_ms())
        broker.sweep(budget=4)
        assert self.payloads("available") == [b"7", b"8", b"9"]

    def test_unclaimed_retention_and_a_drop_agree(self) -> None:
        broker = self.dropping(max_messages=1, unclaimed_retention_ms=1_000)
        self.put(b"1")
        self.put(b"2")
        self.clock.advance(1_000)
        broker.sweep()
        assert self.depth() == (0, 0, 0, 0, 1)

    def test_a_pipeline_is_never_refused(self) -> None:
        broker = self.broker = self.open(self.clock, background=False, routing="pipeline")
        broker.create_queue("q", max_messages=1)
        drops: dict[str, Any] = {"max_messages": 1, "overflow": "drop_oldest"}
        broker.create_queue("dropping", filter="TRUE", **drops)
        self.put(b"1", b"2", b"3")
        assert route_once(broker)
        assert self.depth() == (3, 0, 0, 0, 0)
        assert self.depth("dropping") == (1, 0, 0, 0, 2)

    # --- settings ------------------------------------------------------------------------------

    def test_limits_last(self) -> None:
        self.start(max_messages=2, max_bytes=5)
        self.put(b"123")
        broker = self.again()
        assert broker.queue("q").max_bytes == 5
        assert broker.stats("q").live_bytes == 3
        with self.refused(LimitReached):
            self.put(b"456")
        self.put(b"45")
        with self.refused(LimitReached):
            self.put(b"")

    def test_bytes_are_counted_from_when_a_limit_is_set(self) -> None:
        broker = self.start()
        self.put(b"1" * 5, b"2" * 6)
        self.put(b"3" * 7, delay_ms=1_000)
        delivery = self.take_one()
        assert broker.stats("q").live_bytes == 0
        broker.update_queue("q", max_bytes=100)
        assert broker.stats("q").live_bytes == 18
        broker.ack([delivery.receipt])
        assert broker.stats("q").live_bytes == 13
        broker.update_queue("q", max_bytes=0)
        assert broker.stats("q").live_bytes == 0
        self.put(b"4")
        broker.update_queue("q", max_bytes=100)
        assert broker.stats("q").live_bytes == 14

    def test_settings_that_are_not_allowed(self) -> None:
        broker = self.start()
        for settings in ({"max_messages": -1}, {"max_bytes": "1"}, {"overflow": "block"}):
            with self.refused(InvalidQueue, settings):
                broker.update_queue("q", **settings)

    def test_dropped_messages_can_not_go_in_a_circle(self) -> None:
        drops: dict[str, Any] = {"max_messages": 1, "overflow": "drop_oldest"}
        broker = self.start(**drops)
        broker.create_queue("b", dead_letter="q", **drops)
        broker.create_queue("c", dead_letter="b", max_messages=1)
        with self.refused(InvalidQueue):
            broker.update_queue("q", dead_letter="b")
        broker.update_queue("q", dead_letter="c")
        with self.refused(InvalidQueue):
            broker.update_queue("c", overflow="drop_oldest")

    def test_a_large_publish_leaves_what_fits(self) -> None:
        self.dropping(max_messages=5)
        self.broker.publish([Message(b"%d" % n, {"queue": "q"}) for n in range(2_500)])
        assert self.depth() == (5, 0, 0, 0, 2_495)
        assert self.taken(5) == [b"%d" % n for n in range(2_495, 2_500)]
