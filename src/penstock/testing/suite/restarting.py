"""Restarts, waiting claims, and the passing of time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from penstock.clock import SystemClock
from penstock.errors import BrokerClosed, QueueNotFound
from penstock.model import OutcomeStatus
from penstock.testing.suite.base import HOUR_MS, Suite, receipts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.model import Delivery

__all__ = ["RestartingSuite", "WaitingSuite"]


class RestartingSuite(Suite):
    """Reopening, and clocks that step back."""

    def test_a_reopening_keeps_everything(self) -> None:
        broker = self.start(max_attempts=2, lease_ms=HOUR_MS)
        broker.create_queue("r", filter="queue = 'q'", ordering="fifo")
        for n in range(8):
            self.put(b"%d" % n, group="ab"[n % 2], priority=n, attributes={"n": n})
        self.put(b"later", delay_ms=1000)
        broker.ack(receipts_of(self.take(2)))
        for _ in range(2):
            broker.release([self.take_one().receipt], delay_ms=0, reason="no")
        self.take(2, consumer="ann")
        self.take(2, queue="r")
        broker.release(receipts_of(self.take(1)), delay_ms=500)
        with self.unchanged():
            self.again()

    def test_leases_go_on_after_a_reopening(self) -> None:
        self.start(lease_ms=1000)
        self.put(b"1", b"2", b"3")
        one, two, three = receipts_of(self.take(3))
        self.broker.extend([three], lease_ms=5000)
        broker = self.again()
        assert broker.ack([one])[0].ok
        self.clock.advance(1000)
        assert broker.ack([two])[0].status is OutcomeStatus.EXPIRED
        assert broker.ack([three])[0].ok
        assert self.taken(9) == [b"2"]

    def test_delays_and_retention_go_on_after_a_reopening(self) -> None:
        self.start(done_retention_ms=2000, unclaimed_retention_ms=5000)
        now_ms = self.clock.now_ms()
        self.put(b"1")
        self.broker.ack([self.take_one().receipt])
        self.put(b"2", delay_ms=1000)
        broker = self.again()
        assert broker.sweep().next_due_ms == now_ms + 1000
        self.clock.advance(1000)
        counts = broker.sweep()
        assert (counts.came_due, counts.next_due_ms) == (1, now_ms + 2000)
        broker = self.again()
        self.clock.advance(1000)
        counts = broker.sweep()
        assert counts.removed == 1
        # A look at a message that was claimed since may come earlier, and finds nothing to do.
        assert counts.next_due_ms is not None
        assert now_ms + 2000 < counts.next_due_ms <= now_ms + 6000
        broker = self.again()
        self.clock.advance(4000)
        assert broker.sweep().removed == 1

    def test_dedup_goes_on_after_a_reopening(self) -> None:
        self.start()
        first = self.put(b"1", dedup_id="x")
        self.again()
        assert self.put(b"2", dedup_id="x") == first

    def test_ids_never_repeat(self) -> None:
        self.start()
        seen: list[int] = []
        for _ in range(4):
            seen += self.put(b"1", b"2")
            self.broker.purge("q")
            self.again()
        assert seen == sorted(set(seen))

    def test_claim_order_survives_a_reopening(self) -> None:
        self.start()
        for n in range(30):
            self.put(b"%02d" % n, group="abc"[n % 3], priority=n % 2)
            self.clock.advance(1)
        self.again()
        by_group: dict[str, list[tuple[int, int]]] = {}
        for delivery in self.take(99):
            by_group.setdefault(delivery.group, []).append(
                (-delivery.priority, delivery.message_id)
            )
        assert sorted(by_group) == ["a", "b", "c"]
        for order in by_group.values():
            assert order == sorted(order)

    # --- time ----------------------------------------------------------------------------

    def test_time_never_goes_back(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(b"1")
        delivery = self.take_one()
        self.clock.advance(1000)
        assert broker.sweep().leases_expired == 1
        self.clock.advance(-HOUR_MS)
        assert broker.ack([delivery.receipt])[0].status is OutcomeStatus.STALE
        again = self.take_one()
        assert again.lease_deadline_ms >= delivery.lease_deadline_ms + 1000

    def test_time_goes_on_while_the_clock_is_behind(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(b"1")
        self.take_one()
        self.clock.advance(-HOUR_MS)
        assert broker.sweep().leases_expired == 0
        self.clock.advance(HOUR_MS // 2)
        assert broker.sweep().leases_expired == 1

    def test_time_never_goes_back_across_a_reopening(self) -> None:
        self.start(lease_ms=1000)
        published = self.clock.now_ms()
        self.put(b"1")
        self.clock.advance(-HOUR_MS)
        self.again()
        self.put(b"2")
        times = [entry.published_at_ms for entry in self.everything("available")]
        assert all(published <= at_ms for at_ms in times)
        assert len(times) == 2


# A claim that nobody wakes waits for all of it; one that was woken has come back long before.
WAIT_MS = 60_000
WOKEN_MS = WAIT_MS // 2


class WaitingSuite(Suite):
    """Claims that wait, on the real clock: short times, generous bounds."""

    def run(self, **settings: Any) -> None:
        """Open a broker with its sweeper and the machine's clock."""
        self.broker = self.open(SystemClock(), background=True)
        self.broker.create_queue("q", **settings)

    def wait_while(
        self, act: Callable[[], object] | None, *, wait_ms: int = WAIT_MS
    ) -> tuple[list[Delivery], int]:
        """Begin a waiting claim and act; return what came and how long the claim took.

        Without anything to act on, what the claim waits for comes by itself.
        """
        clock = SystemClock()
        result: list[tuple[list[Delivery], int]] = []
        errors: list[Exception] = []

        def claim() -> None:
            began_ms = clock.now_ms()
            try:
                result.append((self.broker.claim("q", wait_ms=wait_ms), clock.now_ms() - began_ms))
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=claim)
        thread.start()
        if act is not None:
            threading.Event().wait(0.05)
            # A short wait may be over by now, on a machine that has stalled.
            assert not result or wait_ms < WAIT_MS, "the claim did not wait"
            act()
        thread.join(2 * WAIT_MS / 1000)
        assert not thread.is_alive()
        if errors:
            raise errors[0]
        return result[0]

    def test_woken_by_a_publish(self) -> None:
        self.run()
        deliveries, took_ms = self.wait_while(lambda: self.put(b"1"))
        assert [d.payload for d in deliveries] == [b"1"]
        assert took_ms < WOKEN_MS

    def test_woken_when_a_delay_comes_due(self) -> None:
        self.run()
        deliveries, took_ms = self.wait_while(lambda: self.put(b"1", delay_ms=200))
        assert len(deliveries) == 1
        assert 190 <= took_ms < WOKEN_MS

    def test_woken_by_a_delay_that_was_there_before(self) -> None:
        self.run()
        self.put(b"1", delay_ms=300)
        deliveries, took_ms = self.wait_while(None)
        assert len(deliveries) == 1
        assert took_ms < WOKEN_MS

    def test_woken_by_a_release(self) -> None:
        self.run()
        self.put(b"1")
        receipt = self.take_one().receipt
        deliveries, took_ms = self.wait_while(lambda: self.broker.release([receipt], delay_ms=0))
        assert [d.attempts for d in deliveries] == [2]
        assert took_ms < WOKEN_MS

    def test_woken_by_an_expiry(self) -> None:
        self.run()
        self.put(b"1")
        self.take_one(lease_ms=300)
        deliveries, took_ms = self.wait_while(None)
        assert [d.attempts for d in deliveries] == [2]
        assert took_ms < WOKEN_MS

    def test_woken_by_a_redrive(self) -> None:
        self.run(max_attempts=1)
        self.put(b"1")
        self.fail_one()
        deliveries, took_ms = self.wait_while(lambda: self.broker.redrive("q"))
        assert len(deliveries) == 1
        assert took_ms < WOKEN_MS

    def test_woken_when_a_fifo_group_is_free_again(self) -> None:
        self.run(ordering="fifo")
        self.put(b"1", b"2", group="g")
        receipt = self.take_one().receipt
        deliveries, took_ms = self.wait_while(lambda: self.broker.ack([receipt]))
        assert [d.payload for d in deliveries] == [b"2"]
        assert took_ms < WOKEN_MS

    @pytest.mark.parametrize("state", ["delayed", "in_flight"])
    def test_woken_when_a_fifo_head_is_purged(self, state: str) -> None:
        self.run(ordering="fifo")
        self.put(b"1", group="g", delay_ms=HOUR_MS if state == "delayed" else 0)
        self.put(b"2", group="g")
        self.take(lease_ms=HOUR_MS)
        purge = lambda: self.broker.purge("q", states=[state])  # noqa: E731
        deliveries, took_ms = self.wait_while(purge)
        assert [d.payload for d in deliveries] == [b"2"]
        assert took_ms < WOKEN_MS

    def test_not_woken_to_return_empty(self) -> None:
        self.run()

        def tease() -> None:
            self.put(b"elsewhere", queue="nowhere")
            self.put(b"later", delay_ms=HOUR_MS)
            self.put(b"1")
            self.broker.purge("q", states=["available"])

        deliveries, took_ms = self.wait_while(tease, wait_ms=400)
        assert deliveries or took_ms >= 390

    def test_an_empty_wait_ends_at_its_time(self) -> None:
        self.run()
        deliveries, took_ms = self.wait_while(None, wait_ms=300)
        assert deliveries == []
        assert 290 <= took_ms < WOKEN_MS

    def test_a_close_wakes_with_an_error(self) -> None:
        self.run()
        with pytest.raises(BrokerClosed):
            self.wait_while(self.broker.close)

    def test_a_deleted_queue_wakes_with_an_error(self) -> None:
        self.run()
        with pytest.raises(QueueNotFound):
            self.wait_while(lambda: self.broker.delete_queue("q"))

    def test_every_waiting_claim_gets_one(self) -> None:
        self.run()
        got: list[bytes] = []

        def claim() -> None:
            got.extend(d.payload for d in self.broker.claim("q", wait_ms=WAIT_MS))

        threads = [threading.Thread(target=claim) for _ in range(6)]
        for thread in threads:
            thread.start()
        threading.Event().wait(0.05)
        self.put(*(b"%d" % n for n in range(6)))
        for thread in threads:
            thread.join(2 * WAIT_MS / 1000)
        assert sorted(got) == [b"%d" % n for n in range(6)]

    def test_waiting_works_without_a_sweeper(self) -> None:
        self.broker = self.open(SystemClock(), background=False)
        self.broker.create_queue("q")
        deliveries, took_ms = self.wait_while(lambda: self.put(b"1", delay_ms=100))
        assert len(deliveries) == 1
        assert took_ms < WOKEN_MS
