"""The two verbs of a tailer: read a page of the log, hand the assignments back."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.broker.tailer import route_once
from penstock.errors import BrokerClosed, InvalidInput
from penstock.model import Assigned, AssignStatus, Cursor, LogPage, Message
from penstock.testing.suite.routed import RoutedSuite, made

__all__ = ["TailingSuite"]


class TailingSuite(RoutedSuite):
    """read_log and assign on a store whose routing is pipeline, unless said otherwise."""

    def ready(self, messages: int = 6) -> list[int]:
        """Begin with one queue that takes everything, and messages that wait to be routed."""
        self.begin("pipeline")
        self.broker.create_queue("q", filter="TRUE")
        return self.broker.publish([made(b"%d" % number, n=number) for number in range(messages)])

    def all_to_q(self, page: LogPage) -> dict[int, list[str]]:
        return {record.message_id: ["q"] for record in page.records}

    # --- reading ---------------------------------------------------------------------------

    def test_a_page_has_all_but_the_payload(self) -> None:
        self.begin("pipeline")
        self.broker.create_queue("q", filter="n > 0")
        self.broker.create_queue("r")
        attributes: dict[str, Any] = {"n": 1, "x": 1.0, "t": True, "z": None, "s": "ü"}
        (message_id,) = self.broker.publish([Message(b"four", attributes, "g", 7, 90)])
        page = self.broker.read_log()
        (record,) = page.records
        assert record.message_id == message_id
        assert record.attributes == attributes
        assert [type(v) for v in record.attributes.values()] == [int, float, bool, type(None), str]
        assert (record.group, record.priority, record.size, record.delay_ms) == ("g", 7, 4, 90)
        assert record.published_at_ms == self.clock.now_ms()
        assert page.log == 0
        assert (page.cursor.begin, page.cursor.end) == (message_id, page.end)
        assert page.earliest == message_id
        assert page.end == self.broker.log_stats().end == message_id + 1
        assert page.filters == {"q": "n > 0", "r": "queue = 'r'"}

    def test_an_empty_log_gives_an_empty_page(self) -> None:
        self.begin("pipeline")
        page = self.broker.read_log()
        assert page.records == []
        assert page.cursor.begin == page.cursor.end == page.earliest == page.end
        assert self.broker.assign(0, page.cursor, {}).placed == 0

    def test_pages_follow_each_other_without_gap_or_overlap(self) -> None:
        ids = self.ready(57)
        for limit in (1, 2, 56, 57, 58):
            seen: list[int] = []
            at: int | None = None
            while (page := self.broker.read_log(begin=at, limit=limit)).records:
                assert len(page.records) <= limit
                assert page.cursor.begin == (at or ids[0])
                seen += [record.message_id for record in page.records]
                at = page.cursor.end
            assert seen == ids

    def test_reading_begins_anywhere(self) -> None:
        ids = self.ready(10)
        for at in range(10):
            page = self.broker.read_log(begin=ids[at])
            assert [record.message_id for record in page.records] == ids[at:]
        assert self.broker.read_log(begin=0).cursor.begin == ids[0]
        beyond = self.broker.read_log(begin=ids[-1] + 100)
        assert beyond.records == []
        assert beyond.cursor.begin == beyond.cursor.end

    def test_reading_changes_nothing(self) -> None:
        self.ready()
        first = self.broker.read_log(limit=2)
        with self.unchanged():
            self.broker.read_log(begin=4)
            assert self.broker.read_log(limit=2) == first

    def test_a_page_ends_where_filters_change(self) -> None:
        self.begin("pipeline")
        self.broker.create_queue("q", filter="TRUE")
        ids = self.broker.publish([made()])
        self.broker.update_queue("q", filter="FALSE")
        ids += self.broker.publish([made()])
        self.broker.create_queue("r", filter="TRUE")
        ids += self.broker.publish([made()])
        self.broker.delete_queue("q", drain=True)
        ids += self.broker.publish([made()])
        seen = []
        at = 0
        while (page := self.broker.read_log(begin=at)).records:
            seen.append(([record.message_id for record in page.records], page.filters))
            at = page.cursor.end
        assert seen == [
            ([ids[0]], {"q": "TRUE"}),
            ([ids[1]], {"q": "FALSE"}),
            ([ids[2]], {"q": "FALSE", "r": "TRUE"}),
            ([ids[3]], {"r": "TRUE"}),
        ]

    def test_filters_version_changes_with_the_filters(self) -> None:
        self.ready()
        versions: list[int | None] = [self._version()]
        self.broker.create_queue("r", filter="n = 1")
        versions.append(self._version())
        self.broker.update_queue("r", filter="n = 2")
        versions.append(self._version())
        self.broker.delete_queue("r")
        versions.append(self._version())
        assert len(set(versions)) == 4
        self.again()
        assert self._version() == versions[-1]

    def _version(self) -> int | None:
        return self.broker.read_log().cursor.filters_version

    def test_an_inline_store_can_be_read_as_well(self) -> None:
        self.begin("inline")
        self.broker.create_queue("q", filter="TRUE")
        ids = self.broker.publish([made(n=1), made(n=2)])
        page = self.broker.read_log()
        assert [record.message_id for record in page.records] == ids
        with self.refused(InvalidInput):
            self.broker.assign(0, page.cursor, self.all_to_q(page))

    # --- assigning -------------------------------------------------------------------------

    def test_nothing_is_in_a_queue_until_it_is_assigned(self) -> None:
        ids = self.ready()
        assert self.held("q") == []
        answer = self.hand_back(self.broker.read_log(limit=4))
        assert answer == Assigned(AssignStatus.APPLIED, ids[4], 4)
        assert answer
        assert self.held("q") == ids[:4]
        assert self.broker.log_stats().cursors == {0: ids[4]}
        assert self.broker.log_stats().routed_up_to == ids[4]
        assert self.broker.read_log().cursor.begin == ids[4]

    def test_a_replayed_page_changes_nothing(self) -> None:
        ids = self.ready()
        page = self.broker.read_log(limit=4)
        self.hand_back(page)
        self.broker.ack([d.receipt for d in self.take(2)])
        with self.unchanged():
            answer = self.hand_back(page)
        assert answer == Assigned(AssignStatus.STALE, ids[4], 0)
        assert not answer

    def test_an_older_page_changes_nothing(self) -> None:
        ids = self.ready()
        older = self.broker.read_log(limit=2)
        self.hand_back(older)
        self.hand_back(self.broker.read_log(limit=2))
        with self.unchanged():
            assert self.hand_back(older) == Assigned(AssignStatus.STALE, ids[4], 0)

    def test_an_overlapping_page_is_trimmed(self) -> None:
        ids = self.ready()
        longer = self.broker.read_log()
        self.hand_back(self.broker.read_log(limit=4))
        answer = self.hand_back(longer)
        assert answer == Assigned(AssignStatus.TRIMMED, longer.cursor.end, 2)
        assert answer
        assert self.held("q") == ids
        assert self.drained("q") == ids

    def test_a_page_ahead_of_the_cursor_is_refused(self) -> None:
        ids = self.ready()
        page = self.broker.read_log(begin=ids[2])
        with self.unchanged():
            answer = self.hand_back(page)
        assert answer.status is AssignStatus.AHEAD
        assert not answer
        assert answer.cursor <= ids[0]
        self.hand_back(self.broker.read_log(begin=answer.cursor, limit=2))
        assert self.hand_back(page).status is AssignStatus.APPLIED
        assert self.held("q") == ids

    def test_a_page_of_nothing_moves_the_cursor(self) -> None:
        ids = self.ready()
        page = self.broker.read_log()
        assert self.broker.assign(0, page.cursor, {}).placed == 0
        assert self.broker.log_stats().routed_up_to == ids[-1] + 1
        assert self.broker.store_stats().unrouted_total == len(ids)
        assert self.held("q") == []

    def test_a_message_that_is_not_in_the_page_is_refused(self) -> None:
        ids = self.ready()
        page = self.broker.read_log(limit=3)
        for stranger in (0, ids[0] - 1, ids[3], ids[-1], ids[-1] + 1, 1 << 40):
            before = self.broker.log_stats()
            with self.refused(InvalidInput):
                self.broker.assign(0, page.cursor, {**self.all_to_q(page), stranger: ["q"]})
            assert self.broker.log_stats() == before
        self.hand_back(page)
        assert self.held("q") == ids[:3]

    def test_a_message_of_another_log_is_refused(self) -> None:
        self.begin("pipeline")
        self.broker.configure_log(logs=2)
        self.broker.create_queue("q", filter="TRUE")
        self.broker.publish([Message(b"", group=str(number)) for number in range(20)])
        page, other = self.broker.read_log(0), self.broker.read_log(1)
        stranger = other.records[3].message_id
        with self.refused(InvalidInput):
            self.broker.assign(0, page.cursor, {stranger: ["q"]})
        self.route()
        assert len(self.held("q")) == 20

    def test_a_cursor_past_the_end_is_refused(self) -> None:
        ids = self.ready()
        end = self.broker.log_stats().end
        with self.refused(InvalidInput):
            self.broker.assign(0, Cursor(ids[0], end + 1), {})
        assert self.broker.log_stats().routed_up_to <= ids[0]

    def test_a_deleted_queue_wants_nothing_any_more(self) -> None:
        ids = self.ready()
        self.broker.create_queue("gone", filter="TRUE")
        later = self.broker.publish([made()])
        self.hand_back(self.broker.read_log())
        page = self.broker.read_log()
        assert set(page.filters) == {"q", "gone"}
        self.broker.delete_queue("gone")
        answer = self.broker.assign(0, page.cursor, {later[0]: ["gone", "q", "never was"]})
        assert answer == Assigned(AssignStatus.APPLIED, page.cursor.end, 1)
        assert self.held("q") == ids + later
        assert self.broker.store_stats().unrouted_total == 0

    def test_a_queue_made_anew_does_not_get_what_was_matched_for_the_old_one(self) -> None:
        ids = self.ready(2)
        page = self.broker.read_log()
        self.broker.delete_queue("q")
        self.broker.create_queue("q", filter="TRUE")
        self.broker.assign(0, page.cursor, self.all_to_q(page))
        assert self.held("q") == []
        assert self.broker.backfill("q").added == 2
        assert self.drained("q") == ids

    def test_a_queue_named_twice_gets_the_message_once(self) -> None:
        ids = self.ready(1)
        page = self.broker.read_log()
        assert self.broker.assign(0, page.cursor, {ids[0]: ["q", "q"]}).placed == 1
        assert self.depth() == (1, 0, 0, 0, 0)
        assert self.drained("q") == ids
        assert self.broker.purge("q", states=["done"]) == 1
        assert self.payload_kept(ids[0]) in {False, None}

    def test_a_page_matched_by_filters_that_were_changed_behind_it_is_not_taken(self) -> None:
        self.begin("pipeline")
        self.broker.create_queue("q", filter="n = 1")
        ids = self.broker.publish([made(n=1), made(n=2)] * 2)
        page = self.broker.read_log()
        self.broker.update_queue("q", filter="n = 2", from_offset=ids[2])
        with self.unchanged():
            assert self.hand_back(page).status is AssignStatus.OUTDATED
        self.route()
        assert self.held("q") == [ids[0], ids[3]]

    def test_filters_that_change_after_a_page_do_not_spoil_it(self) -> None:
        ids = self.ready()
        page = self.broker.read_log()
        self.broker.update_queue("q", filter="FALSE")
        self.broker.create_queue("r", filter="TRUE")
        self.broker.publish([made()])
        assert self.hand_back(page).status is AssignStatus.APPLIED
        assert self.held("q") == ids

    def test_a_tailer_that_was_relieved_changes_nothing(self) -> None:
        ids = self.ready()
        first = self.broker.take_epoch()
        page = self.broker.read_log(limit=2)
        assert self.broker.assign(0, page.cursor, self.all_to_q(page), epoch=first)
        second = self.broker.take_epoch()
        assert second > first
        page = self.broker.read_log(limit=2)
        with self.unchanged():
            answer = self.broker.assign(0, page.cursor, self.all_to_q(page), epoch=first)
        assert answer == Assigned(AssignStatus.FENCED, ids[2], 0)
        assert not answer
        self.again()
        assert not self.broker.assign(0, page.cursor, self.all_to_q(page), epoch=first)
        assert self.broker.assign(0, page.cursor, self.all_to_q(page), epoch=second)
        assert self.held("q") == ids[:4]

    def test_there_is_no_such_log(self) -> None:
        self.ready()
        page = self.broker.read_log()
        for log in (-1, 1, 1 << 32):
            with self.refused(InvalidInput):
                self.broker.read_log(log)
            with self.refused(InvalidInput):
                self.broker.assign(log, page.cursor, {})

    @pytest.mark.parametrize(
        ("log", "cursor", "assignments"),
        [
            ("0", Cursor(1, 2), {}),
            (0, (1, 2), {}),
            (0, Cursor("1", 2), {}),  # type: ignore[arg-type]
            (0, Cursor(1, 2), [1]),
            (0, Cursor(1, 2), {"1": ["q"]}),
            (0, Cursor(1, 2), {1: "q"}),
            (0, Cursor(1, 2), {1: [3]}),
            (0, Cursor(1, 2), {1: None}),
        ],
    )
    def test_what_is_not_an_assignment_is_refused(
        self, log: Any, cursor: Any, assignments: Any
    ) -> None:
        ids = self.ready(1)
        assert ids == [1]
        with self.refused(InvalidInput):
            self.broker.assign(log, cursor, assignments)
        assert self.broker.log_stats().routed_up_to <= 1

    def test_what_is_not_a_place_is_refused(self) -> None:
        self.ready(1)
        wrong: list[Any] = ["0", None, 1.5]
        for value in wrong:
            with self.refused(InvalidInput):
                self.broker.read_log(value)
            if value is not None:
                with self.refused(InvalidInput):
                    self.broker.read_log(0, begin=value)
                with self.refused(InvalidInput):
                    self.broker.update_queue("q", filter="n = 1", from_offset=value)
        for limit in (0, -1, 1 << 40):
            with self.refused(InvalidInput):
                self.broker.read_log(0, limit=limit)

    def test_a_closed_broker_refuses_both(self) -> None:
        self.ready()
        page = self.broker.read_log()
        self.broker.close()
        with pytest.raises(BrokerClosed):
            self.broker.read_log()
        with pytest.raises(BrokerClosed):
            self.broker.assign(0, page.cursor, {})

    # --- restarts and company --------------------------------------------------------------

    def test_a_page_outlives_a_restart(self) -> None:
        ids = self.ready()
        page = self.broker.read_log(limit=4)
        self.again()
        assert self.held("q") == []
        assert self.hand_back(page).status is AssignStatus.APPLIED
        self.again()
        assert self.held("q") == ids[:4]
        with self.unchanged():
            assert self.hand_back(page).status is AssignStatus.STALE
        self.route()
        assert self.drained("q") == ids

    def test_a_claim_that_waits_is_woken_by_an_assignment(self) -> None:
        (message_id,) = self.ready(1)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.broker.claim, "q", wait_ms=60_000)
            while not self.broker._runner._waiters:  # noqa: SLF001 - nothing else says that it waits
                threading.Event().wait(0.001)
            self.route()
            (delivery,) = waiting.result(timeout=120)
        assert delivery.message_id == message_id

    def test_two_tailers_at_once_route_everything_once(self) -> None:
        ids = self.ready(400)
        start = threading.Barrier(3)

        def tail(limit: int) -> int:
            start.wait(60)
            placed = 0
            while (page := self.broker.read_log(limit=limit)).records:
                placed += self.hand_back(page).placed
            return placed

        with ThreadPoolExecutor(3) as pool:
            placed = sum(pool.map(tail, (7, 11, 64)))
        assert placed == len(ids)
        assert self.held("q") == ids
        assert self.depth() == (400, 0, 0, 0, 0)

    def test_a_log_is_read_while_it_is_written(self) -> None:
        self.begin("pipeline")
        self.broker.create_queue("q", filter="TRUE")
        published: list[int] = []
        over = threading.Event()

        def write() -> None:
            for number in range(60):
                published.extend(self.broker.publish([made(n=number)] * (number % 5 + 1)))
            over.set()

        def follow() -> list[int]:
            seen: list[int] = []
            at = 0
            while True:
                last = over.is_set()
                page = self.broker.read_log(begin=at, limit=13)
                assert page.cursor.begin >= at
                seen += [record.message_id for record in page.records]
                at = page.cursor.end
                if last and not page.records:
                    return seen

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(follow), pool.submit(follow)]
            pool.submit(write).result(timeout=300)
            while route_once(self.broker):
                pass
            assert [reader.result(timeout=300) for reader in readers] == [published, published]
        assert self.held("q") == published
