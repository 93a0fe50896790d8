"""FIFO queues: order within a group, and one lease at a time."""

from __future__ import annotations

import pytest

from penstock.model import OutcomeStatus
from penstock.testing.suite.base import HOUR_MS, Suite, receipts_of

__all__ = ["FifoSuite"]


class FifoSuite(Suite):
    """Order, and what holds it up."""

    def test_order_within_a_group(self) -> None:
        broker = self.start(ordering="fifo")
        for n in range(20):
            self.put(b"%02d" % n, group="g")
        seen = []
        while batch := self.take(3):
            seen += [delivery.payload for delivery in batch]
            broker.ack(receipts_of(batch))
        assert seen == [b"%02d" % n for n in range(20)]

    def test_one_live_lease_per_group(self) -> None:
        broker = self.start(ordering="fifo")
        self.put(b"1", b"2", b"3", group="g")
        first = self.take(2)
        assert [d.payload for d in first] == [b"1", b"2"]
        assert self.take(9) == []
        broker.ack([first[0].receipt])
        assert self.take(9) == []
        broker.ack([first[1].receipt])
        assert self.taken(9) == [b"3"]

    def test_groups_do_not_hold_each_other(self) -> None:
        self.start(ordering="fifo")
        self.put(b"a1", b"a2", group="a")
        assert self.taken() == [b"a1"]
        self.put(b"b1", group="b")
        self.put(b"none")
        assert set(self.taken(9)) == {b"b1", b"none"}

    def test_groups_take_turns(self) -> None:
        broker = self.start(ordering="fifo")
        self.put(*[b"a"] * 5, group="a")
        self.put(*[b"b"] * 5, group="b")
        turns = []
        for _ in range(10):
            delivery = self.take_one()
            turns.append(delivery.payload)
            broker.ack([delivery.receipt])
        assert sorted(turns[:2]) == sorted(turns[2:4]) == [b"a", b"b"]

    def test_a_released_head_comes_back_first(self) -> None:
        broker = self.start(ordering="fifo")
        self.put(b"1", b"2", b"3", group="g")
        self.clock.advance(50)
        broker.release([self.take_one().receipt], delay_ms=0)
        assert self.taken(2) == [b"1", b"2"]

    def test_what_nobody_has_seen_comes_back_in_order(self) -> None:
        broker = self.start(ordering="fifo", max_attempts=1)
        self.put(b"1", b"2", b"3", group="g")
        for _ in range(3):
            deliveries = self.take(2)
            assert [each.payload for each in deliveries] == [b"1", b"2"]
            broker.release([deliveries[1].receipt], unseen=True)
            assert self.take(9) == []
            broker.release([deliveries[0].receipt], unseen=True)
        assert self.taken(9) == [b"1", b"2", b"3"]

    def test_an_expired_head_comes_back_first(self) -> None:
        self.start(ordering="fifo", lease_ms=1000)
        self.put(b"1", b"2", b"3", group="g")
        self.take(2)
        self.clock.advance(1000)
        assert self.taken(9) == [b"1", b"2", b"3"]

    def test_a_delayed_head_holds_its_group(self) -> None:
        self.start(ordering="fifo")
        self.put(b"1", group="g", delay_ms=1000)
        self.put(b"2", group="g")
        self.put(b"other", group="h")
        assert self.taken(9) == [b"other"]
        self.clock.advance(999)
        assert self.take(9) == []
        self.clock.advance(1)
        assert self.taken(9) == [b"1", b"2"]

    def test_a_delayed_message_further_back_ends_the_batch(self) -> None:
        broker = self.start(ordering="fifo")
        self.put(b"1", group="g")
        self.put(b"2", group="g", delay_ms=1000)
        self.put(b"3", group="g")
        first = self.take(9)
        assert [d.payload for d in first] == [b"1"]
        broker.ack(receipts_of(first))
        assert self.take(9) == []
        self.clock.advance(1000)
        assert self.taken(9) == [b"2", b"3"]

    def test_a_head_in_backoff_holds_its_group(self) -> None:
        broker = self.start(ordering="fifo")
        self.put(b"1", b"2", group="g")
        broker.release([self.take_one().receipt], delay_ms=5000)
        assert self.take(9) == []
        self.clock.advance(5000)
        assert self.taken(9) == [b"1", b"2"]

    def test_overdue_delays_of_another_queue_hold_nothing_up(self) -> None:
        broker = self.start(ordering="fifo")
        broker.create_queue("other")
        for _ in range(3):
            self.put(*[b"later"] * 800, queue="other", delay_ms=1_000)
        self.put(b"delayed", group="d", delay_ms=HOUR_MS)
        self.clock.advance(10_000)
        self.put(b"1", b"2", group="g")
        first = self.take(9)
        assert [delivery.payload for delivery in first] == [b"1", b"2"]
        broker.release(receipts_of(first), delay_ms=1_000)
        assert self.take(9) == []
        while broker.sweep().came_due:
            pass
        self.clock.advance(HOUR_MS)
        assert sorted(self.taken(9)) == [b"1", b"2", b"delayed"]

    def test_a_failed_head_does_not_block(self) -> None:
        self.start(ordering="fifo", max_attempts=1)
        self.put(b"1", b"2", group="g")
        self.fail_one()
        assert self.taken() == [b"2"]

    def test_a_head_that_fails_by_expiry_does_not_block(self) -> None:
        self.start(ordering="fifo", max_attempts=1, lease_ms=1000)
        self.put(b"1", b"2", group="g")
        self.take_one()
        self.clock.advance(1000)
        assert self.taken() == [b"2"]

    def test_priority_is_ignored(self) -> None:
        self.start(ordering="fifo")
        self.put(b"1", group="g", priority=1)
        self.put(b"2", group="g", priority=255)
        self.put(b"3", group="g")
        deliveries = self.take(9)
        assert [d.payload for d in deliveries] == [b"1", b"2", b"3"]
        assert [d.priority for d in deliveries] == [1, 255, 0]

    def test_a_redriven_message_takes_its_place_again(self) -> None:
        broker = self.start(ordering="fifo", max_attempts=1)
        self.put(b"1", b"2", b"3", group="g")
        self.fail_one()
        assert broker.redrive("q") == 1
        assert self.taken(9) == [b"1", b"2", b"3"]

    def test_a_redriven_message_goes_before_a_delayed_head(self) -> None:
        broker = self.start(ordering="fifo", max_attempts=1)
        self.put(b"1", group="g")
        self.fail_one()
        self.put(b"2", group="g", delay_ms=HOUR_MS)
        assert self.take(9) == []
        broker.redrive("q")
        assert self.taken(9) == [b"1"]

    def test_a_redriven_message_waits_for_the_groups_lease(self) -> None:
        broker = self.start(ordering="fifo", max_attempts=1)
        self.put(b"1", b"2", group="g")
        self.fail_one()
        second = self.take_one()
        broker.redrive("q")
        assert self.take(9) == []
        broker.ack([second.receipt])
        assert self.taken(9) == [b"1"]

    def test_a_split_lease_still_holds_the_group(self) -> None:
        broker = self.start(ordering="fifo", lease_ms=1000)
        self.put(b"1", b"2", b"3", group="g")
        deliveries = self.take(2)
        broker.extend([deliveries[1].receipt], lease_ms=5000)
        self.clock.advance(1000)
        assert self.take(9) == []
        broker.ack([deliveries[1].receipt])
        assert self.taken(9) == [b"1", b"3"]

    @pytest.mark.parametrize("state", ["delayed", "in_flight"])
    def test_purging_the_head_frees_the_group(self, state: str) -> None:
        broker = self.start(ordering="fifo")
        self.put(b"1", group="g", delay_ms=HOUR_MS if state == "delayed" else 0)
        self.put(b"2", group="g")
        self.take()
        assert broker.purge("q", states=[state]) == 1
        assert self.taken(9) == [b"2"]

    def test_retention_of_a_head_frees_the_group(self) -> None:
        broker = self.start(ordering="fifo", unclaimed_retention_ms=1000)
        self.put(b"1", group="g")
        self.clock.advance(600)
        self.put(b"2", group="g")
        self.clock.advance(400)
        assert broker.sweep().removed == 1
        assert self.taken(9) == [b"2"]

    def test_a_message_in_a_held_group_counts_as_available(self) -> None:
        self.start(ordering="fifo")
        self.put(b"1", b"2", group="g")
        self.take_one()
        assert self.depth() == (1, 0, 1, 0, 0)

    def test_stale_receipts_do_not_free_a_group(self) -> None:
        broker = self.start(ordering="fifo", lease_ms=1000)
        self.put(b"1", b"2", group="g")
        old = self.take_one()
        self.clock.advance(1000)
        self.take_one()
        assert broker.ack([old.receipt])[0].status is OutcomeStatus.STALE
        assert self.take(9) == []

    def test_many_groups_in_one_claim_share_one_lease(self) -> None:
        broker = self.start(ordering="fifo")
        for n in range(30):
            self.put(b"%d" % n, group=f"g{n % 10}")
        deliveries = self.take(10)
        assert {d.group for d in deliveries} == {f"g{n}" for n in range(10)}
        assert len({d.lease for d in deliveries}) == 1
        assert self.take(10) == []
        broker.ack(receipts_of(deliveries[:4]))
        assert {d.group for d in self.take(4)} == {d.group for d in deliveries[:4]}

    def test_order_survives_a_reopening(self) -> None:
        self.start(ordering="fifo", lease_ms=1000)
        self.put(b"1", b"2", group="g")
        self.put(b"h1", group="h", delay_ms=5000)
        self.put(b"h2", group="h")
        held = self.take_one()
        broker = self.again()
        assert self.take(9) == []
        broker.release([held.receipt], delay_ms=0)
        assert self.taken(9) == [b"1", b"2"]
        self.clock.advance(5000)
        assert sorted(self.taken(9)) == [b"1", b"2", b"h1", b"h2"]
