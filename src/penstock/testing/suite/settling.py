"""Receipts: ack, release, extend, and the state of the message afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.clock import ManualClock
from penstock.errors import InvalidReceipt
from penstock.model import Attempt, AttemptEnd, OutcomeStatus
from penstock.testing.suite.base import HOUR_MS, Suite, message, receipts_of

if TYPE_CHECKING:
    from penstock.model import Delivery

__all__ = ["SettlingSuite"]


class SettlingSuite(Suite):
    """Receipts, retries and leases."""

    def refuse_all(self, delivery: Delivery, status: OutcomeStatus) -> None:
        """Check that every verb refuses a receipt in the same way and changes nothing."""
        broker = self.broker
        with self.unchanged():
            refused = broker.store_stats().stale_receipts_total
            outcomes = [
                *broker.ack([delivery.receipt]),
                *broker.release([delivery.receipt], reason="no"),
                *broker.extend([delivery.receipt], lease_ms=1000),
            ]
            assert [outcome.status for outcome in outcomes] == [status] * 3
            assert not any(outcomes)
            assert not any(outcome.ok for outcome in outcomes)
            assert not any(broker.extend(delivery.lease, lease_ms=1000))
            assert broker.store_stats().stale_receipts_total >= refused + 3

    # --- fencing -------------------------------------------------------------------------

    def test_a_receipt_is_stale_after_ack(self) -> None:
        broker = self.start()
        self.put(b"1")
        delivery = self.take_one()
        broker.ack([delivery.receipt])
        self.refuse_all(delivery, OutcomeStatus.STALE)

    def test_a_receipt_is_stale_after_release(self) -> None:
        broker = self.start()
        self.put(b"1")
        delivery = self.take_one()
        broker.release([delivery.receipt])
        self.refuse_all(delivery, OutcomeStatus.STALE)

    def test_a_receipt_is_stale_after_failure(self) -> None:
        self.start(max_attempts=1)
        self.put(b"1")
        self.refuse_all(self.fail_one(), OutcomeStatus.STALE)

    def test_a_receipt_is_stale_after_redelivery(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(b"1")
        first = self.take_one()
        self.clock.advance(1000)
        second = self.take_one()
        self.refuse_all(first, OutcomeStatus.STALE)
        assert broker.ack([second.receipt])[0].ok

    def test_a_receipt_is_refused_at_the_deadline_before_any_sweep(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(b"1", b"2", b"3")
        one, two, three = receipts_of(self.take(3))
        self.clock.advance(999)
        assert broker.ack([one])[0].ok
        self.clock.advance(1)
        assert broker.ack([two])[0].status is OutcomeStatus.EXPIRED
        assert broker.release([two])[0].status is OutcomeStatus.EXPIRED
        assert broker.extend([two, three], lease_ms=1000)[0].status is OutcomeStatus.EXPIRED
        assert broker.sweep().leases_expired == 1
        assert self.depth() == (2, 0, 0, 1, 0)

    def test_a_receipt_is_stale_after_the_sweep(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(b"1")
        delivery = self.take_one()
        self.clock.advance(1000)
        broker.sweep()
        self.refuse_all(delivery, OutcomeStatus.STALE)

    # --- late acks: for a protocol whose receipts outlive their lease -----------------------

    def test_a_late_ack_settles_what_nobody_has_claimed_since(self) -> None:
        broker = self.start(lease_ms=1_000, done_retention_ms=5_000, max_bytes=1_000)
        ids = self.put(b"now", b"later", b"before", b"after")
        held = [(each.receipt, each.attempts) for each in self.take(4, consumer="me")]
        broker.release([held[0][0]], delay_ms=0)
        broker.release([held[1][0]], delay_ms=HOUR_MS)
        self.clock.advance(1_000)
        # Whether a sweep has ended the lease or nobody has; the same message counts once.
        outcomes = self.ack_late(*held[:3], held[2])
        assert [each.status for each in outcomes] == ["done", "done", "done", "stale"]
        broker.sweep()
        assert [each.status for each in self.ack_late(held[3])] == ["done"]
        assert self.depth() == (0, 0, 0, 4, 0)
        assert broker.stats("q").acked_total == 4
        at_ms = self.clock.now_ms()
        for message_id in ids:
            (attempt,) = broker.attempts("q", message_id)
            assert (attempt.consumer, attempt.end, attempt.ended_at_ms) == ("me", "acked", at_ms)
            assert broker.browse("q", state="done", message_id=message_id)
        self.again()
        assert [each.status for each in self.ack_late(*held)] == ["stale"] * 4
        self.clock.advance(5_000)
        assert self.broker.sweep().removed == 4

    def test_a_late_ack_changes_nothing_that_somebody_has_claimed_since(self) -> None:
        broker = self.start(lease_ms=1_000, max_attempts=3)
        broker.create_queue("fifo", ordering="fifo")
        self.put(b"1", b"2")
        self.put(b"3", queue="fifo")
        first, other = ((each.receipt, each.attempts) for each in self.take(2))
        in_order = self.take_one(queue="fifo")
        broker.release([first[0], in_order.receipt], delay_ms=0)
        again = self.take_one()
        with self.unchanged():
            # It is held, by another attempt; after that, it waits for a third.
            assert not any(self.ack_late(first))
        broker.release([again.receipt], delay_ms=0)
        with self.unchanged():
            assert not any(self.ack_late(first, (first[0], 0), (again.receipt, 1)))
            # A message in flight is settled by an ack, and one of a FIFO queue by no other.
            assert not any(self.ack_late(other))
            assert not any(self.ack_late((in_order.receipt, 1), queue="fifo"))
            with pytest.raises(InvalidReceipt):
                self.ack_late(first, queue="fifo")
        # A claim that was given back unseen is none.
        broker.release([self.take_one().receipt], unseen=True)
        assert self.ack_late((again.receipt, 2))[0].ok

    def test_a_receipt_counts_once_in_a_call(self) -> None:
        broker = self.start()
        self.put(b"1")
        receipt = self.take_one().receipt
        statuses = [outcome.status for outcome in broker.ack([receipt, receipt])]
        assert statuses == [OutcomeStatus.DONE, OutcomeStatus.STALE]
        assert self.depth() == (0, 0, 0, 1, 0)

    def test_good_and_stale_receipts_in_one_call(self) -> None:
        broker = self.start()
        self.put(b"1", b"2")
        one, two = receipts_of(self.take(2))
        broker.ack([one])
        statuses = [outcome.status for outcome in broker.ack([one, two])]
        assert statuses == [OutcomeStatus.STALE, OutcomeStatus.DONE]

    def test_receipts_of_several_queues_and_leases_in_one_call(self) -> None:
        broker = self.start()
        broker.create_queue("r")
        self.put(b"1", b"2")
        self.put(b"3", queue="r")
        receipts = [self.take_one().receipt, self.take_one(queue="r").receipt]
        receipts.append(self.take_one().receipt)
        assert [outcome.receipt for outcome in broker.ack(receipts)] == receipts
        assert self.depth("q") == (0, 0, 0, 2, 0)
        assert self.depth("r") == (0, 0, 0, 1, 0)

    def test_a_receipt_of_another_queue_is_an_error_if_the_queue_is_named(self) -> None:
        broker = self.start()
        broker.create_queue("r")
        self.put(b"1")
        self.put(b"2", queue="r")
        one, two = self.take_one().receipt, self.take_one(queue="r").receipt
        with self.refused(InvalidReceipt):
            broker.ack([one, two], queue="q")
        with self.refused(InvalidReceipt):
            broker.release([one, two], queue="r")
        with self.refused(InvalidReceipt):
            broker.extend([two], queue="q", lease_ms=1000)
        assert all(broker.ack([one], queue="q"))

    def test_garbage_is_not_a_receipt(self) -> None:
        broker = self.start()
        self.put(b"1", b"2")
        good = self.take_one().receipt
        bad_ones: list[str] = ["", "x", "ps1-", good[:-1], good + "0", good.upper(), "é" * 72]
        bad_ones += [good[:-1] + "g", good.replace("-", "_"), "\0" + good[1:], f" {good[1:]}"]
        bad_ones += [good[:-17] + "+" + good[-16:], good[:-16] + "0x" + good[-14:]]
        for bad in [*bad_ones, None, 7, good.encode()]:
            with self.refused(InvalidReceipt):
                broker.ack([good, bad])  # type: ignore[list-item]
        for bad in ("", "nonsense", good):
            with self.refused(InvalidReceipt):
                broker.extend(bad, lease_ms=1000)
        assert broker.ack([good])[0].ok

    def test_a_receipt_of_another_store_is_not_a_receipt(self) -> None:
        broker = self.start()
        self.put(b"1")
        good = self.take_one().receipt
        store = good.split("-")[1]
        other = "0" * 8 if store != "0" * 8 else "1" * 8
        with self.refused(InvalidReceipt):
            broker.ack([good, good.replace(store, other, 1)])

    def test_a_receipt_of_a_deleted_queue_is_stale(self) -> None:
        broker = self.start()
        self.put(b"1")
        delivery = self.take_one()
        broker.delete_queue("q")
        broker.create_queue("q")
        self.put(b"2")
        assert broker.ack([delivery.receipt])[0].status is OutcomeStatus.STALE
        assert self.depth() == (1, 0, 0, 0, 0)

    # --- release and back-off ------------------------------------------------------------

    def test_release_with_a_delay(self) -> None:
        broker = self.start()
        self.put(b"1")
        (outcome,) = broker.release([self.take_one().receipt], delay_ms=700)
        assert outcome.status is OutcomeStatus.RETRYING
        self.clock.advance(699)
        assert self.take() == []
        self.clock.advance(1)
        assert self.take_one().attempts == 2

    def test_release_without_delay_is_at_once(self) -> None:
        broker = self.start()
        self.put(b"1")
        broker.release([self.take_one().receipt], delay_ms=0)
        assert self.take_one().attempts == 2

    def test_what_nobody_has_seen_is_back_at_its_place_and_counts_no_attempt(self) -> None:
        broker = self.start(max_attempts=2)
        ids = self.put(b"1", b"2")
        broker.release([self.take_one().receipt], delay_ms=0, reason="no")
        for _ in range(5):
            self.clock.advance(10)
            deliveries = self.take(2)
            assert {(each.payload, each.attempts) for each in deliveries} == {(b"1", 2), (b"2", 1)}
            outcomes = broker.release(receipts_of(deliveries), delay_ms=9_000, unseen=True)
            assert [outcome.status for outcome in outcomes] == [OutcomeStatus.RETRYING] * 2
            self.put(b"later")
            assert broker.ack(receipts_of(deliveries))[0].status is OutcomeStatus.STALE
        assert self.depth()[:3] == (7, 0, 0)
        assert [each.reason for each in broker.attempts("q", ids[0])] == ["no"]
        assert broker.attempts("q", ids[1]) == []
        assert {each.payload for each in self.take(2)} == {b"1", b"2"}

    def test_a_part_of_a_lease_that_nobody_has_seen(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(b"1", b"2", b"3")
        first, second, third = self.take(3)
        broker.release([second.receipt], unseen=True)
        assert self.take_one().payload == b"2"
        assert broker.ack([first.receipt, third.receipt])[1].ok
        self.clock.advance(1000)
        assert self.take_one().attempts == 2

    def test_an_unseen_message_that_is_retained_no_longer_goes(self) -> None:
        broker = self.start(unclaimed_retention_ms=1000)
        self.put(b"1")
        self.clock.advance(900)
        delivery = self.take_one()
        self.clock.advance(200)
        broker.release([delivery.receipt], unseen=True)
        broker.sweep()
        assert self.depth() == (0, 0, 0, 0, 0)

    def backoffs(self, count: int) -> list[int]:
        """Release one message ``count`` times; return how long it waited each time."""
        waits = []
        for _ in range(count):
            self.broker.release([self.take_one().receipt])
            (entry,) = self.everything("delayed")
            assert entry.visible_at_ms is not None
            waits.append(entry.visible_at_ms - self.clock.now_ms())
            self.clock.advance(waits[-1])
        return waits

    def test_backoff_doubles_up_to_its_cap_with_jitter(self) -> None:
        self.start(max_attempts=99, backoff_base_ms=1000, backoff_cap_ms=10_000)
        self.put(b"1")
        waits = self.backoffs(8)
        for wait_ms, full in zip(waits, [1000, 2000, 4000, 8000] + [10_000] * 4, strict=True):
            assert full / 2 <= wait_ms <= full
        assert len(set(waits[4:])) > 1

    def test_backoff_is_from_the_injected_clock(self) -> None:
        self.start(max_attempts=99)
        self.put(b"1")
        first = self.backoffs(5)
        self.clock = ManualClock()
        self.broker.close()
        self.place /= "another"
        self.start(max_attempts=99)
        self.put(b"1")
        assert self.backoffs(5) == first

    def test_backoff_of_zero_is_no_wait(self) -> None:
        broker = self.start(backoff_base_ms=0)
        self.put(b"1")
        broker.release([self.take_one().receipt])
        assert self.take_one().attempts == 2

    # --- failing -------------------------------------------------------------------------

    def test_out_of_attempts_by_release(self) -> None:
        broker = self.start(max_attempts=2)
        self.put(b"1")
        broker.release([self.take_one().receipt], delay_ms=0, reason="first")
        (outcome,) = broker.release([self.take_one().receipt], reason="disk on fire")
        assert outcome.status is OutcomeStatus.FAILED
        assert outcome.ok
        assert self.take() == []
        (entry,) = self.everything("failed")
        assert entry.reason == "disk on fire"
        assert entry.attempts == 2
        assert entry.ended_at_ms == self.clock.now_ms()
        assert entry.payload == b"1"

    def test_out_of_attempts_by_expiry(self) -> None:
        broker = self.start(max_attempts=1, lease_ms=1000)
        self.put(b"1")
        self.take_one()
        self.clock.advance(1000)
        counts = broker.sweep()
        assert (counts.leases_expired, counts.failed) == (1, 1)
        (entry,) = self.everything("failed")
        assert "expired" in entry.reason
        stats = broker.stats("q")
        assert (stats.failed_total, stats.lease_expired_total, stats.released_total) == (1, 1, 0)

    def test_a_long_reason_is_cut_and_a_strange_one_kept(self) -> None:
        self.start(max_attempts=1)
        self.put(b"1", b"2", b"3")
        self.fail_one("ü" * 100_000)
        self.fail_one("zero \0 and \N{GRINNING FACE}")
        self.fail_one("half a surrogate \ud800")
        reasons = [entry.reason for entry in self.everything("failed")]
        assert set(reasons[0]) == {"ü"}
        assert 1000 < len(reasons[0]) < 5000
        assert reasons[1] == "zero \0 and \N{GRINNING FACE}"
        assert reasons[2].startswith("half a surrogate ")

    # --- attempts ------------------------------------------------------------------------

    def test_the_history_of_attempts(self) -> None:
        broker = self.start(lease_ms=1000)
        start = self.clock.now_ms()
        (message_id,) = self.put(b"1")
        assert broker.attempts("q", message_id) == []
        delivery = self.take_one(consumer="ann")
        running = Attempt(1, "ann", start, None, AttemptEnd.RUNNING)
        assert broker.attempts("q", message_id) == [running]
        self.clock.advance(10)
        broker.release([delivery.receipt], delay_ms=0, reason="busy")
        self.take_one(consumer="bob")
        self.clock.advance(1000)
        broker.sweep()
        self.clock.advance(5)
        delivery = self.take_one(consumer="cy")
        self.clock.advance(7)
        broker.ack([delivery.receipt])
        assert broker.attempts("q", message_id) == [
            Attempt(1, "ann", start, start + 10, AttemptEnd.RELEASED, "busy"),
            Attempt(2, "bob", start + 10, start + 1010, AttemptEnd.EXPIRED),
            Attempt(3, "cy", start + 1015, start + 1022, AttemptEnd.ACKED),
        ]

    def test_an_attempt_is_over_at_its_deadline_before_any_sweep(self) -> None:
        broker = self.start(lease_ms=1000)
        (message_id,) = self.put(b"1")
        self.take_one()
        self.clock.advance(1000)
        (attempt,) = broker.attempts("q", message_id)
        assert attempt.end is AttemptEnd.EXPIRED

    def test_attempts_of_an_unknown_message(self) -> None:
        assert self.start().attempts("q", 12345) == []

    # --- redrive -------------------------------------------------------------------------

    def test_redrive_gives_a_full_allowance_and_attempts_go_on(self) -> None:
        broker = self.start(max_attempts=2, backoff_base_ms=0)
        (message_id,) = self.put(b"1")
        for expected in (1, 2):
            assert self.take_one().attempts == expected
            (entry,) = self.everything("in_flight")
            assert entry.attempts == expected
            self.clock.advance(60_000)
        broker.sweep()
        assert self.depth() == (0, 0, 0, 0, 1)
        assert broker.redrive("q") == 1
        assert self.depth() == (1, 0, 0, 0, 0)
        third = self.take_one()
        assert third.attempts == 3
        assert broker.release([third.receipt])[0].status is OutcomeStatus.RETRYING
        fourth = self.take_one()
        assert fourth.attempts == 4
        assert broker.release([fourth.receipt])[0].status is OutcomeStatus.FAILED
        numbers = [attempt.number for attempt in broker.attempts("q", message_id)]
        assert numbers == [1, 2, 3, 4]
        assert broker.stats("q").redriven_total == 1

    def fail_many(self, count: int) -> list[int]:
        """Fail messages whose attribute n counts from 0, in batches."""
        ids = self.broker.publish(
            [message(b"%d" % n, attributes={"n": n}, priority=n % 3) for n in range(count)]
        )
        while batch := self.take(7):
            self.broker.release(receipts_of(batch))
        assert self.depth()[4] == count
        return ids

    def test_redrive_all(self) -> None:
        broker = self.start(max_attempts=1)
        ids = self.fail_many(30)
        assert broker.redrive("q") == 30
        assert broker.redrive("q") == 0
        assert sorted(d.message_id for d in self.take(99)) == ids

    def test_redrive_by_ids(self) -> None:
        broker = self.start(max_attempts=1)
        ids = self.fail_many(10)
        wanted = [ids[3], ids[7], ids[3], 999_999]
        assert broker.redrive("q", message_ids=wanted) == 2
        assert {d.message_id for d in self.take(99)} == {ids[3], ids[7]}
        assert {e.message_id for e in self.everything("failed")} == set(ids) - {ids[3], ids[7]}

    def test_redrive_by_filter(self) -> None:
        broker = self.start(max_attempts=1)
        self.fail_many(10)
        assert broker.redrive("q", where="n BETWEEN 2 AND 4") == 3
        assert {d.attributes["n"] for d in self.take(99)} == {2, 3, 4}
        assert self.depth()[4] == 7

    def test_redrive_by_function(self) -> None:
        broker = self.start(max_attempts=1)
        ids = self.fail_many(10)
        odd = broker.redrive("q", message_ids=ids[:5], where=lambda a: a["n"] in (1, 3, 9))
        assert odd == 2
        assert {d.attributes["n"] for d in self.take(99)} == {1, 3}
        # It may call the broker.
        assert broker.redrive("q", where=lambda _: broker.stats("q").failed == 8) == 8
        assert self.depth()[4] == 0

    def test_what_failed_at_its_deadline_can_be_redriven_before_any_sweep(self) -> None:
        broker = self.start(max_attempts=1, lease_ms=1000)
        self.put(b"1")
        self.take_one()
        self.clock.advance(1000)
        assert broker.redrive("q") == 1

    # --- extend --------------------------------------------------------------------------

    def test_extend_a_whole_lease(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(b"1", b"2", b"3")
        deliveries = self.take(3)
        self.clock.advance(900)
        outcomes = broker.extend(deliveries[0].lease, lease_ms=2000)
        deadline_ms = self.clock.now_ms() + 2000
        assert {outcome.receipt for outcome in outcomes} == set(receipts_of(deliveries))
        assert {outcome.lease_deadline_ms for outcome in outcomes} == {deadline_ms}
        assert broker.sweep().next_due_ms == deadline_ms
        self.clock.advance(1999)
        assert broker.sweep().leases_expired == 0
        self.clock.advance(1)
        assert broker.sweep().leases_expired == 1
        assert self.depth() == (3, 0, 0, 0, 0)

    def test_extend_some_receipts_and_the_rest_keeps_its_deadline(self) -> None:
        broker = self.start(lease_ms=1000, done_retention_ms=0)
        self.put(b"1", b"2", b"3")
        deliveries = self.take(3)
        (outcome,) = broker.extend([deliveries[1].receipt], lease_ms=5000)
        assert outcome.status is OutcomeStatus.EXTENDED
        assert outcome.lease_deadline_ms == self.clock.now_ms() + 5000
        self.clock.advance(1000)
        assert broker.sweep().leases_expired == 1
        assert self.payloads("available") == [b"1", b"3"]
        assert self.payloads("in_flight") == [b"2"]
        assert broker.ack([deliveries[1].receipt])[0].ok
        assert self.next_due_ms() is None

    def test_extend_parts_of_two_splits_at_once(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(b"1", b"2", b"3", b"4")
        receipts = receipts_of(self.take(4))
        broker.extend(receipts[:2], lease_ms=2000)
        assert all(broker.extend([receipts[0], receipts[2]], lease_ms=3000))
        for at_ms, left in ((1000, {b"1", b"2", b"3"}), (2000, {b"1", b"3"}), (3000, set())):
            self.clock.advance(1000)
            broker.sweep()
            assert set(self.payloads("in_flight")) == left, at_ms
        assert self.depth() == (4, 0, 0, 0, 0)

    def test_the_lease_token_reaches_every_split(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(b"1", b"2", b"3")
        deliveries = self.take(3)
        broker.extend([deliveries[0].receipt], lease_ms=3000)
        broker.ack([deliveries[2].receipt])
        outcomes = broker.extend(deliveries[0].lease, lease_ms=9000)
        assert {o.receipt for o in outcomes} == set(receipts_of(deliveries[:2]))
        self.clock.advance(8999)
        assert self.depth() == (0, 0, 2, 1, 0)
        assert all(broker.ack(receipts_of(deliveries[:2])))

    def test_extend_may_shorten(self) -> None:
        broker = self.start(lease_ms=HOUR_MS)
        self.put(b"1")
        delivery = self.take_one()
        broker.extend([delivery.receipt], lease_ms=10)
        assert broker.sweep().next_due_ms == self.clock.now_ms() + 10
        self.clock.advance(10)
        assert broker.ack([delivery.receipt])[0].status is OutcomeStatus.EXPIRED
        assert self.take_one().attempts == 2

    def test_extend_is_not_an_attempt(self) -> None:
        broker = self.start()
        (message_id,) = self.put(b"1")
        delivery = self.take_one(consumer="ann")
        for _ in range(5):
            self.clock.advance(10)
            broker.extend([delivery.receipt], lease_ms=1000)
        (attempt,) = broker.attempts("q", message_id)
        assert (attempt.number, attempt.consumer) == (1, "ann")
        assert attempt.claimed_at_ms == delivery.published_at_ms

    # --- one expiry entry per live lease ---------------------------------------------------

    def test_a_lease_that_holds_nothing_is_gone(self) -> None:
        broker = self.start(lease_ms=1000, done_retention_ms=0)
        self.put(*[b"x"] * 6)
        first, second = self.take(3), self.take(3)
        broker.extend([first[0].receipt], lease_ms=500)
        broker.ack(receipts_of(first))
        broker.release(receipts_of(second[:1]), delay_ms=0)
        broker.ack(receipts_of(second[1:]))
        assert self.next_due_ms() is None
        self.clock.advance(1000)
        assert broker.sweep().leases_expired == 0

    @pytest.mark.parametrize("delete", [False, True])
    def test_removed_messages_leave_no_lease_behind(self, delete: bool) -> None:  # noqa: FBT001
        broker = self.start(lease_ms=1000)
        self.put(b"1", b"2")
        self.take(2)
        if delete:
            broker.delete_queue("q")
        else:
            broker.purge("q", states=["in_flight"])
        assert self.next_due_ms() is None
        self.clock.advance(1000)
        assert broker.sweep().total == 0

    def test_each_lease_expires_once(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(*[b"x"] * 30)
        for _ in range(10):
            self.take(3)
        self.clock.advance(1000)
        assert broker.sweep().leases_expired == 10
        assert broker.sweep().leases_expired == 0
        assert broker.stats("q").lease_expired_total == 30
