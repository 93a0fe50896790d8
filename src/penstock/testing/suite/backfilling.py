"""Filling a queue from the retained log: everything that it wants, and nothing twice."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import InvalidInput, QueueNotFound
from penstock.model import Backfilled, Message
from penstock.testing.suite.base import HOUR_MS, receipts_of
from penstock.testing.suite.routed import Mode, RoutedSuite, made

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BackfillSuite"]


class Interrupted(Exception):
    """An error that a test raises from a progress callback."""


class BackfillSuite(RoutedSuite):
    """Backfill, in both ways of routing."""

    def past(self, mode: Mode, messages: int = 10, **fields: Any) -> list[int]:
        """Begin with numbered messages in the log, of which no queue knows."""
        self.begin(mode)
        return self.publish(
            *(Message(b"%d" % n, {"n": n, "odd": n % 2 == 1}, **fields) for n in range(messages))
        )

    # --- from where to where -----------------------------------------------------------------

    def test_a_new_queue_gets_the_whole_past(self, mode: Mode) -> None:
        ids = self.past(mode)
        self.broker.create_queue("q", filter="odd")
        later = self.publish(made(b"11", odd=True))
        done = self.broker.backfill("q")
        assert done == Backfilled(scanned=11, added=5, missing=0, next=self.broker.log_stats().end)
        assert self.held("q") == ids[1::2] + later
        assert sorted(self.taken(10)) == sorted([b"1", b"3", b"5", b"7", b"9", b"11"])
        assert self.broker.stats("q").enqueued_total == 6

    def test_from_an_offset_to_an_offset(self, mode: Mode) -> None:
        ids = self.past(mode)
        self.broker.create_queue("q", filter="TRUE")
        assert self.broker.backfill("q", from_=ids[3], to=ids[6]).added == 3
        assert self.held("q") == ids[3:6]
        assert self.broker.backfill("q", from_=ids[8]).added == 2
        assert self.broker.backfill("q", to=ids[1]).added == 1
        assert self.held("q") == [ids[0], *ids[3:6], *ids[8:]]
        assert self.broker.backfill("q").added == 4
        assert self.held("q") == ids

    def test_from_a_time_to_a_time(self, mode: Mode) -> None:
        self.begin(mode)
        ids = []
        start_ms = self.clock.now_ms()
        for _ in range(12):
            ids += self.publish(made(), made())
            self.clock.advance(HOUR_MS // 4)

        def after(quarters: float) -> datetime:
            return datetime.fromtimestamp((start_ms + quarters * HOUR_MS / 4) / 1000, UTC)

        self.broker.create_queue("from", filter="TRUE")
        assert self.broker.backfill("from", from_=after(5)).added == 14
        assert self.held("from") == ids[10:]
        self.broker.create_queue("to", filter="TRUE")
        self.broker.backfill("to", to=after(5))
        assert self.held("to") == ids[:10]
        self.broker.create_queue("both", filter="TRUE")
        self.broker.backfill("both", from_=after(1.5), to=after(3.5))
        assert self.held("both") == ids[4:8]
        self.broker.create_queue("none", filter="TRUE")
        self.broker.backfill("none", from_=after(50))
        self.broker.backfill("none", to=after(-50))
        assert self.held("none") == []

    def test_only_what_has_been_routed(self) -> None:
        self.begin("pipeline")
        ids = self.broker.publish([made(n=number) for number in range(6)])
        self.broker.create_queue("q", filter="TRUE")
        self.hand_back(self.broker.read_log(limit=2))
        done = self.broker.backfill("q")
        assert done == Backfilled(scanned=2, added=2, missing=0, next=ids[2])
        self.route()
        assert self.held("q") == ids[:2]
        assert self.broker.backfill("q").added == 4
        assert self.held("q") == ids

    def test_nothing_to_fill_from(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="TRUE")
        assert self.broker.backfill("q").scanned == 0
        ids = self.publish(made())
        assert self.broker.backfill("q", from_=1 << 40).added == 0
        assert self.broker.backfill("q", from_=ids[0], to=ids[0]).scanned == 0
        assert self.broker.backfill("q", from_=5, to=1).scanned == 0

    def test_what_is_no_place_to_begin_is_refused(self, mode: Mode) -> None:
        self.past(mode)
        self.broker.create_queue("q", filter="TRUE")
        wrong: list[Any] = ["latest", -1, 1.5, None, True, 1 << 80]
        for place in wrong:
            with self.refused(InvalidInput):
                self.broker.backfill("q", from_=place)
            if place is not None:
                with self.refused(InvalidInput):
                    self.broker.backfill("q", to=place)
        with self.refused(QueueNotFound):
            self.broker.backfill("nobody")

    # --- never twice -------------------------------------------------------------------------

    def test_a_second_backfill_adds_nothing(self, mode: Mode) -> None:
        ids = self.past(mode)
        self.broker.create_queue("q", filter="TRUE")
        self.broker.backfill("q", from_=ids[4])
        assert self.broker.backfill("q").added == 4
        with self.unchanged():
            assert self.broker.backfill("q").added == 0
            assert self.broker.backfill("q", from_=ids[2]).added == 0

    def test_what_came_live_does_not_come_again(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="TRUE")
        ids = self.publish(*[made()] * 5)
        with self.unchanged():
            assert self.broker.backfill("q").added == 0
        assert self.held("q") == ids

    @pytest.mark.parametrize("end", ["acked", "failed", "in flight", "purged", "forgotten"])
    def test_what_has_left_does_not_come_again(self, mode: Mode, end: str) -> None:
        ids = self.past(mode, 3)
        self.broker.create_queue("keeps", filter="TRUE")
        self.broker.backfill("keeps")
        self.broker.create_queue("q", filter="TRUE", max_attempts=1, done_retention_ms=1_000)
        self.broker.backfill("q")
        ids += self.publish(made())
        leave: dict[str, Callable[[], Any]] = {
            "acked": lambda: self.broker.ack(receipts_of(self.take(10))),
            "failed": lambda: self.broker.release(receipts_of(self.take(10))),
            "in flight": lambda: self.take(10),
            "purged": lambda: self.broker.purge("q"),
            "forgotten": lambda: self.broker.ack(receipts_of(self.take(10))),
        }
        leave[end]()
        if end == "forgotten":
            self.clock.advance(2_000)
            self.broker.sweep()
        with self.unchanged():
            assert self.broker.backfill("q").added == 0
            assert self.broker.backfill("q", from_=ids[1]).added == 0
        self.again()
        assert self.broker.backfill("q").added == 0

    def test_after_another_filter_only_what_is_new(self, mode: Mode) -> None:
        ids = self.past(mode)
        self.broker.create_queue("q", filter="n < 4")
        assert self.broker.backfill("q").added == 4
        self.broker.ack(receipts_of(self.take(4)))
        self.broker.update_queue("q", filter="n < 6 AND n >= 2")
        assert self.broker.backfill("q").added == 2
        self.broker.update_queue("q", filter="TRUE")
        assert self.broker.backfill("q", to=ids[8]).added == 2
        self.broker.update_queue("q", filter="n < 4")
        assert self.broker.backfill("q").added == 0
        self.broker.update_queue("q", filter="TRUE")
        assert self.broker.backfill("q").added == 2
        assert self.held("q") == ids

    def test_live_stretches_of_earlier_filters_count(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="n = 1")
        ids = self.publish(made(n=1), made(n=2))
        self.broker.update_queue("q", filter="n = 2")
        ids += self.publish(made(n=1), made(n=2))
        assert self.held("q") == [ids[0], ids[3]]
        self.broker.update_queue("q", filter="n IN (1, 2)")
        assert self.broker.backfill("q").added == 2
        assert self.held("q") == ids
        assert sorted(self.drained("q")) == ids

    def test_a_queue_made_anew_begins_anew(self, mode: Mode) -> None:
        ids = self.past(mode)
        self.broker.create_queue("keeps", filter="TRUE")
        self.broker.backfill("keeps")
        for _ in range(2):
            self.broker.create_queue("q", filter="TRUE")
            assert self.broker.backfill("q").added == 10
            assert self.held("q") == ids
            self.broker.delete_queue("q")

    # --- steps ---------------------------------------------------------------------------------

    def test_progress_is_told_and_an_interrupted_backfill_goes_on(self, mode: Mode) -> None:
        ids = self.past(mode, 9_000)
        self.broker.create_queue("q", filter="odd")
        told: list[Backfilled] = []

        def interrupt(sums: Backfilled, end: int) -> None:
            assert end == self.broker.log_stats().routed_up_to
            told.append(sums)
            if len(told) == 2:
                raise Interrupted

        with pytest.raises(Interrupted):
            self.broker.backfill("q", progress=interrupt)
        first, second = told
        assert 0 < first.added < second.added < 4_500
        assert first.next < second.next < ids[-1]
        assert second.added == (second.scanned + 1) // 2 or second.added == second.scanned // 2
        self.again()
        assert self.broker.stats("q").available == second.added
        told.clear()
        rest = self.broker.backfill("q", progress=lambda sums, _: told.append(sums))
        assert told[-1] == rest
        assert rest.added + second.added == 4_500
        assert rest.scanned + second.scanned == 9_000
        assert self.held("q") == ids[1::2]

    def test_publishing_and_working_go_on_between_steps(self, mode: Mode) -> None:
        ids = self.past(mode, 5_000)
        self.broker.create_queue("q", filter="TRUE")
        worked: list[int] = []

        def work(_sums: Backfilled, _end: int) -> None:
            ids.extend(self.publish(made(b"live")))
            deliveries = self.take(100)
            worked.extend(delivery.message_id for delivery in deliveries)
            self.broker.ack(receipts_of(deliveries))

        assert self.broker.backfill("q", progress=work).added == 5_000
        assert len(worked) > 100
        worked += self.drained("q")
        assert sorted(worked) == ids

    # --- what comes in ---------------------------------------------------------------------------

    def test_a_payload_that_is_gone_is_counted(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("first", filter="odd")
        ids = self.publish(*(made(b"%d" % n, odd=n % 2 == 1) for n in range(10)))
        self.broker.purge("first")
        self.broker.create_queue("q", filter="TRUE")
        done = self.broker.backfill("q")
        assert (done.scanned, done.added, done.missing) == (10, 5, 5)
        assert self.held("q") == ids[0::2]
        assert self.broker.backfill("q").missing == 0

    def test_a_backfilled_message_holds_its_payload(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("first", filter="TRUE")
        (message_id,) = self.publish(made(b"kept"))
        for name in ("second", "third"):
            self.broker.create_queue(name, filter="TRUE")
            self.broker.backfill(name)
        for name in ("first", "second"):
            self.broker.purge(name)
            assert self.is_kept(message_id)
        assert self.taken(queue="third") == [b"kept"]
        self.broker.purge("third", states=["in_flight"])
        assert not self.is_kept(message_id)

    def test_an_unrouted_message_is_let_go_by_its_only_queue(self, mode: Mode) -> None:
        (message_id,) = self.past(mode, 1)
        self.broker.create_queue("q", filter="TRUE")
        self.broker.backfill("q")
        assert self.is_kept(message_id)
        self.broker.purge("q")
        assert not self.is_kept(message_id)

    def test_a_fifo_queue_is_filled_in_the_order_of_ids(self, mode: Mode) -> None:
        ids = self.past(mode, 6, group="g")
        self.clock.advance(1_000)
        self.broker.create_queue("q", filter="TRUE", ordering="fifo")
        ids += self.publish(*[Message(b"live", group="g")] * 2)
        self.clock.advance(1_000)
        self.broker.backfill("q", from_=ids[3])
        self.clock.advance(1_000)
        self.broker.backfill("q")
        assert self.drained("q") == ids

    def test_a_delay_counts_from_publish(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.publish([Message(b"over", {}, delay_ms=1_000)])
        self.broker.publish([Message(b"runs", {}, delay_ms=60_000)])
        self.route()
        self.clock.advance(30_000)
        self.broker.create_queue("q", filter="TRUE")
        self.broker.backfill("q")
        assert self.depth() == (1, 1, 0, 0, 0)
        (over,) = self.take(2)
        assert over.payload == b"over"
        self.broker.ack([over.receipt])
        self.clock.advance(29_999)
        assert self.taken(2) == []
        self.clock.advance(1)
        assert self.taken(2) == [b"runs"]

    def test_a_delay_that_is_over_does_not_begin_again(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("live", filter="TRUE", delay_ms=60_000)
        self.broker.publish([Message(b"own", {}, delay_ms=1_000)])
        self.clock.advance(2_000)
        self.route()
        assert self.taken(queue="live") == [b"own"]
        self.broker.create_queue("late", filter="TRUE", delay_ms=60_000)
        self.broker.backfill("late")
        assert self.taken(queue="late") == [b"own"]

    def test_priorities_and_groups_come_along(self, mode: Mode) -> None:
        self.begin(mode)
        self.publish(Message(b"low", {"n": 1}, "g", 1), Message(b"high", {"n": 2}, "g", 200))
        self.broker.create_queue("q", filter="TRUE")
        self.broker.backfill("q")
        high, low = self.take(2)
        assert (high.payload, high.group, high.priority) == (b"high", "g", 200)
        assert (low.payload, low.group, low.attributes) == (b"low", "g", {"n": 1})

    def test_what_the_log_has_dropped_is_not_to_be_had(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.configure_log(retention_ms=HOUR_MS)
        self.broker.create_queue("keeps", filter="TRUE")
        self.publish(made(b"old"))
        for _ in range(3):
            self.clock.advance(HOUR_MS)
            self.broker.sweep()
        kept = self.publish(made(b"new"))
        self.broker.create_queue("q", filter="TRUE")
        done = self.broker.backfill("q", from_=0)
        assert (done.scanned, done.added, done.missing) == (1, 1, 0)
        assert self.held("q") == kept

    def test_every_log_is_filled_from(self, mode: Mode) -> None:
        self.begin(mode)
        ids = self.publish(*(Message(b"", group=f"{number}") for number in range(10)))
        for logs in (3, 2, 5):
            self.broker.configure_log(logs=logs)
            ids += self.publish(*(Message(b"", group=f"{number}") for number in range(20)))
        self.broker.create_queue("q", filter="TRUE", ordering="fifo")
        assert self.broker.backfill("q").added == 70
        assert self.held("q") == ids
