"""Several logs, and how long they are kept."""

from __future__ import annotations

from collections import defaultdict

import pytest

from penstock import limits
from penstock.broker.tailer import route_once
from penstock.clock import ManualClock
from penstock.errors import InvalidInput
from penstock.model import AssignStatus, Message
from penstock.testing.suite.base import HOUR_MS
from penstock.testing.suite.routed import Mode, RoutedSuite, made

__all__ = ["LogsSuite"]


def grouped(groups: int, each: int = 1) -> list[Message]:
    """Make messages of several groups, taking turns."""
    return [Message(b"", group=f"group {number}") for _ in range(each) for number in range(groups)]


class LogsSuite(RoutedSuite):
    """Distribution, changes of the number of logs, segments and retention."""

    def groups_of(self, log: int) -> set[str]:
        return {record.group for record in self.broker.read_log(log, begin=0).records}

    # --- several logs ----------------------------------------------------------------------

    def test_a_group_is_in_one_log(self, mode: Mode) -> None:
        self.begin(mode)
        stats = self.broker.configure_log(logs=4)
        assert (stats.logs, sorted(stats.cursors)) == (4, [0, 1, 2, 3])
        self.broker.publish(grouped(64, each=3))
        found = [self.groups_of(log) for log in range(4)]
        assert sum(map(len, found)) == len(set().union(*found)) == 64
        assert min(map(len, found)) > 64 // 4 // 3
        assert sum(len(self.broker.read_log(log, begin=0).records) for log in range(4)) == 192

    def test_publishes_without_a_group_take_turns_at_the_logs(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.configure_log(logs=4)
        self.broker.create_queue("q", filter="TRUE")
        published = [self.broker.publish([made(), made()]) for _ in range(12)]
        found = [self.broker.read_log(log, begin=0).records for log in range(4)]
        ids = [[record.message_id for record in records] for records in found]
        assert [len(each) for each in ids] == [6] * 4
        assert all(any(set(pair) <= set(each) for each in ids) for pair in published)

    def test_messages_that_a_fifo_queue_may_take_stay_in_one_log(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.configure_log(logs=4)
        self.broker.create_queue("fifo", filter="TRUE", ordering="fifo")
        for _ in range(8):
            self.publish(made())
        found = [self.broker.read_log(log, begin=0).records for log in range(4)]
        assert sorted(map(len, found)) == [0, 0, 0, 8]

    def test_the_same_group_stays_in_its_log_after_a_restart(self) -> None:
        self.begin("pipeline")
        self.broker.configure_log(logs=3)
        self.broker.publish(grouped(30))
        before = [self.groups_of(log) for log in range(3)]
        self.again()
        self.broker.publish(grouped(30))
        assert [self.groups_of(log) for log in range(3)] == before

    def test_every_log_is_read_past_a_change(self, mode: Mode) -> None:
        self.begin(mode)
        ids = self.broker.publish(grouped(3))
        self.broker.configure_log(logs=3)
        ids += self.broker.publish(grouped(12))
        self.broker.configure_log(logs=2)
        ids += self.broker.publish(grouped(12))
        seen: list[int] = []
        begins = [0, 0, 0]
        for _ in range(4):
            for log in range(3):
                page = self.broker.read_log(log, begin=begins[log])
                begins[log] = page.cursor.end
                seen += [record.message_id for record in page.records]
                if mode == "pipeline":
                    self.hand_back(page)
        assert sorted(seen) == ids

    def test_no_log_is_routed_past_a_change_before_the_others(self) -> None:
        self.begin("pipeline")
        self.broker.create_queue("q", filter="TRUE")
        self.broker.configure_log(logs=2)
        self.broker.publish(grouped(10))
        change = self.broker.log_stats().end
        self.broker.configure_log(logs=3)
        self.broker.publish(grouped(10))
        page = self.broker.read_log(0)
        assert page.cursor.end == change
        assert self.hand_back(page)
        assert self.broker.read_log(0).records == []
        assert self.broker.read_log(2).records == []
        self.hand_back(self.broker.read_log(1))
        assert self.broker.read_log(0).records
        assert self.broker.read_log(2).records
        self.route()
        assert len(self.held("q")) == 20

    def test_a_log_without_messages_does_not_hold_the_others_back(self) -> None:
        self.begin("pipeline")
        self.broker.configure_log(logs=5)
        self.broker.create_queue("q", filter="TRUE")
        ids = self.broker.publish([Message(b"", group="only")] * 3)
        route_once(self.broker)
        assert self.held("q") == ids
        stats = self.broker.log_stats()
        assert stats.routed_up_to == stats.end
        assert set(stats.cursors.values()) == {stats.end}

    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_groups_keep_their_order_while_logs_come_and_go(self, seed: int) -> None:
        self.begin("pipeline")
        self.broker.create_queue("fifo", filter="TRUE", ordering="fifo")
        chance = ManualClock(seed=seed).random
        published: dict[str, list[int]] = defaultdict(list)
        delivered: dict[str, list[int]] = defaultdict(list)
        for turn in range(60):
            messages = [
                Message(b"", group=("", *"abcdefghijk")[int(chance() * 12)])
                for _ in range(int(chance() * 20))
            ]
            for message, message_id in zip(messages, self.broker.publish(messages), strict=True):
                published[message.group].append(message_id)
            if turn % 6 == 5:
                self.broker.configure_log(logs=1 + int(chance() * 6))
            log = int(chance() * len(self.broker.log_stats().cursors))
            page = self.broker.read_log(log, limit=1 + int(chance() * 15))
            self.hand_back(page)
            for delivery in self.broker.claim("fifo", limit=int(chance() * 10) + 1):
                delivered[delivery.group].append(delivery.message_id)
                self.broker.ack([delivery.receipt])
        self.route(limit=7)
        while deliveries := self.broker.claim("fifo", limit=50):
            for delivery in deliveries:
                delivered[delivery.group].append(delivery.message_id)
            self.broker.ack([delivery.receipt for delivery in deliveries])
        assert delivered == published

    def test_a_replay_in_each_of_several_logs_changes_nothing(self) -> None:
        self.begin("pipeline")
        self.broker.configure_log(logs=3)
        self.broker.create_queue("q", filter="TRUE")
        self.broker.publish(grouped(20))
        pages = [self.broker.read_log(log) for log in range(3)]
        assert [self.hand_back(page).status for page in pages] == [AssignStatus.APPLIED] * 3
        with self.unchanged():
            assert [self.hand_back(page).status for page in pages] == [AssignStatus.STALE] * 3

    def test_settings_of_the_log_are_bounded_and_kept(self) -> None:
        self.begin("pipeline")
        for logs in (0, -1, limits.MAX_LOGS + 1, True):
            with self.refused(InvalidInput):
                self.broker.configure_log(logs=logs)
        with self.refused(InvalidInput):
            self.broker.configure_log(retention_ms=-1)
        self.broker.configure_log(logs=7, retention_ms=123_456)
        self.again()
        stats = self.broker.log_stats()
        assert (stats.logs, stats.retention_ms) == (7, 123_456)
        assert self.broker.configure_log(logs=1).logs == 1
        assert self.broker.configure_log(retention_ms=0).retention_ms == 0

    # --- segments and retention --------------------------------------------------------------

    def test_segments_begin_by_the_hour(self, mode: Mode) -> None:
        self.begin(mode)
        self.publish(made())
        self.clock.advance(HOUR_MS - 1)
        self.publish(made())
        assert self.broker.log_stats().segments == 1
        self.clock.advance(1)
        self.publish(made())
        assert self.broker.log_stats().segments == 2
        assert len(self.broker.read_log(begin=0).records) == 3
        self.again()
        assert self.broker.log_stats().segments == 2
        assert len(self.broker.read_log(begin=0).records) == 3

    def test_the_log_is_kept_for_its_retention(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.configure_log(retention_ms=10 * HOUR_MS)
        ids = []
        for _ in range(30):
            ids += self.publish(made())
            self.clock.advance(HOUR_MS)
            self.broker.sweep()
            kept = [record.message_id for record in self.broker.read_log(begin=0).records]
            assert kept == ids[-len(kept) :]
            assert len(kept) >= min(len(ids), 10)
            assert len(kept) <= 11
            assert self.broker.log_stats().earliest == kept[0]
        for _ in range(24):
            self.clock.advance(HOUR_MS)
            self.broker.sweep()
        stats = self.broker.log_stats()
        assert stats.earliest == stats.end == stats.routed_up_to
        assert self.broker.read_log(begin=0).records == []
        (later,) = self.publish(made())
        assert [record.message_id for record in self.broker.read_log(begin=0).records] == [later]

    def test_without_a_retention_nothing_is_dropped(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.configure_log(retention_ms=0)
        ids = self.publish(made())
        for _ in range(5):
            self.clock.advance(1_000 * HOUR_MS)
            ids += self.publish(made())
            self.broker.sweep()
        assert [record.message_id for record in self.broker.read_log(begin=0).records] == ids

    def test_what_is_not_routed_is_never_dropped(self) -> None:
        self.begin("pipeline")
        self.broker.configure_log(retention_ms=HOUR_MS, logs=2)
        self.broker.create_queue("q", filter="n = 1")
        wanted = [Message(b"", {"n": 1}, group=f"{number}") for number in range(20)]
        ids = self.broker.publish([*wanted, made(n=2)])
        for _ in range(10):
            self.clock.advance(HOUR_MS)
            counts = self.broker.sweep()
            assert counts.next_due_ms is None or counts.next_due_ms > self.clock.now_ms()
        assert self.broker.log_stats().earliest == ids[0]
        self.hand_back(self.broker.read_log(0))
        self.broker.sweep()
        assert self.broker.log_stats().earliest == ids[0]
        self.route()
        self.broker.sweep()
        assert self.broker.log_stats().earliest > ids[-1]
        assert self.held("q") == ids[:-1]
        assert sorted(self.drained("q")) == ids[:-1]
        assert not self.is_kept(ids[-1])

    def test_messages_outlive_their_log(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.configure_log(retention_ms=HOUR_MS)
        self.broker.create_queue("a", filter="TRUE")
        self.broker.create_queue("b", filter="TRUE")
        (message_id,) = self.publish(made(b"still here", n=1))
        for _ in range(3):
            self.clock.advance(HOUR_MS)
            self.broker.sweep()
        assert self.broker.log_stats().earliest > message_id
        self.again()
        assert self.taken(queue="a") == self.taken(queue="b") == [b"still here"]

    def test_a_tailer_far_behind_begins_at_the_earliest(self) -> None:
        self.begin("pipeline")
        self.broker.configure_log(retention_ms=HOUR_MS)
        self.publish(made())
        for _ in range(4):
            self.clock.advance(HOUR_MS)
            self.broker.sweep()
        (later,) = self.broker.publish([made()])
        page = self.broker.read_log(begin=0)
        assert page.cursor.begin == page.earliest == self.broker.log_stats().earliest
        assert [record.message_id for record in page.records] == [later]
