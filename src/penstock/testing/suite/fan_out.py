"""Filters define queues: which messages a queue gets, and who keeps the one payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from penstock.errors import InvalidInput, InvalidMessage, InvalidQueue, QueueExists, StoreMismatch
from penstock.model import Message
from penstock.testing.suite.base import receipts_of
from penstock.testing.suite.routed import Mode, RoutedSuite, made

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FanOutSuite"]

RETENTION_MS: Final = 60_000


class FanOutSuite(RoutedSuite):
    """Queues by filters, in both ways of routing."""

    def test_one_message_goes_to_every_queue_that_wants_it(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("books", filter="kind = 'book'")
        self.broker.create_queue("dear", filter="price > 100")
        self.broker.create_queue("all", filter="TRUE")
        ids = self.publish(
            made(b"cheap book", kind="book", price=5),
            made(b"dear book", kind="book", price=500),
            made(b"dear car", kind="car", price=9_000),
            made(b"stamp", kind="stamp", price=1),
        )
        assert self.held("books") == [ids[0], ids[1]]
        assert self.held("dear") == [ids[1], ids[2]]
        assert self.held("all") == ids
        assert self.broker.store_stats().unrouted_total == 0

    def test_each_queue_settles_on_its_own(self, mode: Mode) -> None:
        self.begin(mode)
        for name in ("a", "b", "c"):
            self.broker.create_queue(name, filter="TRUE", max_attempts=1)
        (message_id,) = self.publish(made(b"one"))
        (in_a,) = self.broker.claim("a")
        (in_b,) = self.broker.claim("b")
        assert in_a.message_id == in_b.message_id == message_id
        assert in_a.payload == in_b.payload == b"one"
        assert self.broker.ack([in_a.receipt])[0].status == "done"
        assert self.broker.release([in_b.receipt])[0].status == "failed"
        assert self.depth("a") == (0, 0, 0, 1, 0)
        assert self.depth("b") == (0, 0, 0, 0, 1)
        assert self.depth("c") == (1, 0, 0, 0, 0)
        assert self.broker.redrive("b") == 1
        assert self.taken(queue="b") == self.taken(queue="c") == [b"one"]

    def test_without_a_filter_a_queue_takes_what_names_it(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q")
        self.broker.create_queue("r")
        sent = self.broker.send("q", b"sent", kind="x")
        (named,) = self.publish(made(b"published", queue="q"))
        self.publish(made(b"nobody's", queue="Q"), made(b"nobody's either"))
        assert self.held("q") == [sent, named]
        assert self.held("r") == []

    def test_send_to_a_queue_that_does_not_want_it_is_refused(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="kind = 'book'")
        with self.refused(InvalidMessage):
            self.broker.send("q", b"", kind="car")
        self.broker.send("q", b"", kind="book")
        self.route()
        assert len(self.held("q")) == 1

    def test_filters_read_the_message_itself(self, mode: Mode) -> None:
        self.begin(mode)
        now_ms = self.clock.now_ms()
        for name, text in {
            "by-group": "\"group\" = 'g'",
            "by-priority": "priority >= 7",
            "by-size": "size BETWEEN 2 AND 3",
            "by-time": f"published_at > {now_ms}",
        }.items():
            self.broker.create_queue(name, filter=text)
        ids = self.broker.publish([Message(b"", group="g"), Message(b"xy", priority=7)])
        self.clock.advance(1)
        ids += self.broker.publish([Message(b"wxyz", {"group": "g", "priority": 9})])
        self.clock.advance(10_000)
        self.route()
        assert self.held("by-group") == [ids[0]]
        assert self.held("by-priority") == [ids[1]]
        assert self.held("by-size") == [ids[1]]
        assert self.held("by-time") == [ids[2]]

    def test_unknown_is_not_true(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("not", filter="NOT (kind = 'book')")
        self.broker.create_queue("null", filter="kind IS NULL")
        self.broker.create_queue("typed", filter="n = 1")
        nothing, number, null, one, text, truth = self.publish(
            made(), made(kind=1), made(kind=None), made(n=1.0), made(n="1"), made(n=True)
        )
        assert self.held("not") == []
        assert self.held("null") == [nothing, null, one, text, truth]
        assert self.held("typed") == [one]
        assert number not in self.held("null")

    # --- queues come, change and go --------------------------------------------------------

    def test_a_new_queue_takes_messages_from_here_on(self, mode: Mode) -> None:
        self.begin(mode)
        before = self.broker.publish([made(b"before")])
        self.broker.create_queue("q", filter="TRUE")
        after = self.broker.publish([made(b"after")])
        self.route()
        assert self.held("q") == after
        assert before[0] < after[0]

    def test_another_filter_counts_from_here_on(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="n = 1")
        first = self.broker.publish([made(n=1), made(n=2)])
        self.broker.update_queue("q", filter="n = 2")
        second = self.broker.publish([made(n=1), made(n=2)])
        self.route()
        assert self.held("q") == [first[0], second[1]]
        assert self.broker.queue("q").filter == "n = 2"

    def test_other_settings_leave_the_routing_alone(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="n = 1")
        ids = self.broker.publish([made(n=1)])
        self.broker.update_queue("q", lease_ms=5_000)
        ids += self.broker.publish([made(n=1)])
        self.route()
        assert self.held("q") == ids

    def test_a_filter_can_change_from_a_position_not_yet_routed(self) -> None:
        self.begin("pipeline")
        self.broker.create_queue("q", filter="n = 1")
        ids = [self.broker.publish([made(n=1), made(n=2)]) for _ in range(4)]
        self.hand_back(self.broker.read_log(0, limit=2))
        self.broker.update_queue("q", filter="n = 2", from_offset=ids[2][0])
        self.route()
        assert self.held("q") == [ids[0][0], ids[1][0], ids[2][1], ids[3][1]]

    def test_the_filter_in_force_can_be_moved_back_to_a_position(self) -> None:
        self.begin("pipeline")
        self.broker.create_queue("q", filter="n = 1")
        ids = self.broker.publish([made(n=2)] * 3)
        self.broker.update_queue("q", filter="n = 2")
        self.broker.update_queue("q", filter="n = 2", from_offset=ids[1])
        self.route()
        assert self.held("q") == ids[1:]

    def test_a_filter_can_not_change_what_was_routed(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="n = 1")
        ids = self.publish(made(n=1), made(n=2))
        end = self.broker.log_stats().end
        for offset in (0, ids[0], ids[1], end + 1):
            with self.refused(InvalidInput):
                self.broker.update_queue("q", filter="n = 2", from_offset=offset)
        self.broker.update_queue("q", filter="n = 2", from_offset=end)
        (later,) = self.publish(made(n=2))
        assert self.held("q") == [ids[0], later]

    def test_a_deleted_queue_takes_its_messages_along(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("gone", filter="TRUE")
        self.broker.create_queue("stays", filter="TRUE")
        first = self.publish(made(b"1"), made(b"2"))
        (delivery,) = self.broker.claim("gone")
        assert self.broker.delete_queue("gone") == 2
        second = self.publish(made(b"3"))
        self.broker.create_queue("gone", filter="TRUE")
        assert self.held("gone") == []
        assert self.broker.ack([delivery.receipt])[0].status == "stale"
        third = self.publish(made(b"4"))
        assert self.held("gone") == third
        assert self.taken(10, queue="stays") == [b"1", b"2", b"3", b"4"]
        assert self.held("stays") == first + second + third

    def test_a_draining_queue_is_worked_off_and_goes(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="TRUE", max_attempts=2, backoff_base_ms=1_000)
        ids = self.broker.publish([made(b"1"), made(b"2")])
        assert self.broker.delete_queue("q", drain=True) == 0
        self.broker.publish([made(b"too late")])
        self.route()
        assert self.held("q") == ids
        first, second = self.take(2)
        self.broker.ack([first.receipt])
        self.broker.release([second.receipt])
        self.clock.advance(300_000)
        self.broker.sweep()
        again = self.take_one()
        assert again.payload == b"2"
        self.broker.sweep()
        assert [spec.name for spec in self.broker.queues()] == ["q"]
        self.broker.ack([again.receipt])
        self.broker.sweep()
        assert self.broker.queues() == []

    def test_a_draining_queue_takes_nothing_more_after_a_restart(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="TRUE")
        ids = self.publish(made(b"1"))
        self.broker.delete_queue("q", drain=True)
        self.again()
        self.publish(made(b"2"))
        assert self.held("q") == ids

    def test_a_draining_queue_can_not_be_revived(self, mode: Mode) -> None:
        self.begin(mode)
        self.publish(made(b"old"))
        self.broker.create_queue("q", filter="TRUE")
        self.publish(made(b"1"))
        self.broker.delete_queue("q", drain=True)
        with self.refused(InvalidQueue):
            self.broker.update_queue("q", filter="FALSE")
        with self.refused(InvalidQueue):
            self.broker.backfill("q")
        with self.refused(QueueExists):
            self.broker.create_queue("q", filter="TRUE")

    def test_an_empty_queue_that_drains_is_gone_at_once(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="TRUE")
        self.broker.delete_queue("q", drain=True)
        self.route()
        self.broker.sweep()
        assert self.broker.queues() == []

    def test_a_store_keeps_to_its_way_of_routing(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="n = 1")
        self.broker.update_queue("q", filter="n = 2")
        other = "pipeline" if mode == "inline" else "inline"
        with pytest.raises(StoreMismatch, match=mode):
            self.open_as(routing=other, background=False)
        self.broker = self.open_as(background=False)
        assert self.broker.log_stats().routing == mode
        ids = self.broker.publish([made(n=1), made(n=2)])
        assert self.held("q") == (ids[1:] if mode == "inline" else [])
        self.route()
        assert self.held("q") == ids[1:]

    # --- a message that nobody wants -------------------------------------------------------

    def test_what_matches_nothing_stays_in_the_log(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="n = 1")
        ids = self.publish(made(b"a", n=2), made(b"b", n=1), made(b"c", n=2))
        assert self.broker.store_stats().unrouted_total == 2
        assert [record.message_id for record in self.broker.read_log(begin=0).records] == ids
        self.broker.create_queue("late", filter="n = 2")
        assert self.broker.backfill("late").added == 2
        assert self.taken(10, queue="late") == [b"a", b"c"]

    def test_what_matches_nothing_goes_with_its_segment(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.configure_log(retention_ms=RETENTION_MS)
        self.broker.create_queue("q", filter="n = 1", done_retention_ms=0)
        nobody, somebody, late = self.publish(made(n=2), made(n=1), made(n=3))
        self.broker.create_queue("late", filter="n = 3")
        self.broker.backfill("late")
        self.clock.advance(3_600_000)
        self.broker.sweep()
        assert self.is_kept(nobody)
        self.clock.advance(RETENTION_MS)
        self.broker.sweep()
        assert self.broker.log_stats().earliest > late
        assert not self.is_kept(nobody)
        assert self.is_kept(somebody)
        assert self.is_kept(late)
        assert self.drained("late") == [late]

    # --- one payload -----------------------------------------------------------------------

    def test_the_last_queue_to_let_go_takes_the_payload(self, mode: Mode) -> None:
        self.begin(mode)
        ways: list[Callable[[str], None]] = [
            self._by_done_retention,
            self._by_failed_retention,
            self._by_purge_of_failed,
            self._by_purge_of_waiting,
            self._by_unclaimed_retention,
            self._by_delete,
            self._by_drain,
        ]
        # Each way comes first and last, with itself and with another.
        pairs = [*zip(ways, ways, strict=True), *zip(ways, [*ways[1:], ways[0]], strict=True)]
        for number, (first, second) in enumerate(pairs):
            names = [f"a{number}", f"b{number}"]
            for name in names:
                self.broker.create_queue(
                    name,
                    filter=f"n = {number}",
                    max_attempts=1,
                    done_retention_ms=RETENTION_MS,
                    failed_retention_ms=RETENTION_MS,
                )
            (message_id,) = self.publish(made(b"shared", n=number))
            first(names[0])
            told = (first.__name__, second.__name__)
            assert self.is_kept(message_id), told
            assert self.taken(queue=names[1]) == [b"shared"], told
            self.broker.purge(names[1], states=["in_flight"])
            assert not self.is_kept(message_id), told
            (message_id,) = self.publish(made(b"shared", n=number))
            if first not in {self._by_delete, self._by_drain}:
                first(names[0])
            assert self.is_kept(message_id), told
            second(names[1])
            assert not self.is_kept(message_id), told

    def _by_done_retention(self, queue: str) -> None:
        self.broker.ack(receipts_of(self.take(queue=queue)))
        self._let_time_pass()

    def _by_failed_retention(self, queue: str) -> None:
        self.broker.release(receipts_of(self.take(queue=queue)))
        self._let_time_pass()

    def _by_purge_of_failed(self, queue: str) -> None:
        self.broker.release(receipts_of(self.take(queue=queue)))
        assert self.broker.purge(queue, states=["failed"]) == 1

    def _by_purge_of_waiting(self, queue: str) -> None:
        assert self.broker.purge(queue) == 1

    def _by_unclaimed_retention(self, queue: str) -> None:
        self.broker.update_queue(queue, unclaimed_retention_ms=RETENTION_MS)
        self._let_time_pass()
        self.broker.update_queue(queue, unclaimed_retention_ms=0)

    def _by_delete(self, queue: str) -> None:
        assert self.broker.delete_queue(queue) == 1

    def _by_drain(self, queue: str) -> None:
        self.broker.delete_queue(queue, drain=True)
        self.broker.ack(receipts_of(self.take(queue=queue)))
        self.broker.sweep()
        assert queue not in [spec.name for spec in self.broker.queues()]

    def _let_time_pass(self) -> None:
        self.clock.advance(RETENTION_MS)
        self.broker.sweep()
