"""The routing of a store is switched while it lives: no message is routed twice, or not at all."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, get_args

import pytest

from penstock.clock import ManualClock
from penstock.errors import InvalidInput, StoreMismatch
from penstock.model import AssignStatus, Message
from penstock.store import filling
from penstock.testing.suite.routed import Mode, RoutedSuite, made

if TYPE_CHECKING:
    from penstock.model import LogStats

MODES: tuple[Mode, ...] = get_args(Mode)


class SwitchingSuite(RoutedSuite):
    """``configure_log(routing=…)``."""

    def switch(self, mode: Mode) -> LogStats:
        stats = self.broker.configure_log(routing=mode)
        assert stats.routing == self.broker.info().routing == mode
        return stats

    def test_a_tailer_routes_from_the_switch_on(self) -> None:
        self.begin("inline")
        self.broker.configure_log(logs=3)
        self.broker.create_queue("q", filter="TRUE")
        before = self.broker.publish([Message(b"", group=str(n)) for n in range(9)])
        stats = self.switch("pipeline")
        assert set(stats.cursors.values()) == {stats.end} == {stats.routed_up_to}
        after = self.broker.publish([Message(b"", group=str(n)) for n in range(9)])
        assert self.held("q") == before
        self.route(limit=2)
        assert self.held("q") == before + after
        assert self.broker.store_stats().unrouted_total == 0

    def test_publish_routes_from_the_switch_on(self) -> None:
        self.begin("pipeline")
        self.broker.configure_log(logs=3)
        self.broker.create_queue("q", filter="n >= 0")
        ids = self.broker.publish([made(n=n) for n in range(4)])
        ids += self.broker.publish([Message(b"", {"n": 1}, group=str(n)) for n in range(9)])
        none = self.broker.publish([made(n=-1)])
        # One log is part of the way, the others have not begun.
        self.hand_back(self.broker.read_log(1, limit=1))
        stats = self.switch("inline")
        assert stats.routed_up_to == stats.end
        assert self.held("q") == ids
        ids += self.broker.publish([made(n=5)])
        assert self.held("q") == ids
        assert self.broker.store_stats().unrouted_total == 1
        self.broker.create_queue("rest", filter="n < 0")
        assert self.broker.backfill("rest").added == 1
        assert self.held("rest") == none

    def test_filters_count_at_the_offsets_that_they_were_live_at(self) -> None:
        self.begin("pipeline")
        self.broker.create_queue("q", filter="n = 1")
        ids = self.broker.publish([made(n=1), made(n=2)])
        self.broker.update_queue("q", filter="n = 2")
        ids += self.broker.publish([made(n=1), made(n=2)])
        self.switch("inline")
        assert self.held("q") == [ids[0], ids[3]]

    def test_a_switch_with_too_much_to_route_changes_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(filling, "SWITCH_OFFSETS", 10)
        self.begin("pipeline")
        self.broker.create_queue("q", filter="TRUE")
        ids = self.broker.publish([made()] * 11)
        with self.refused(InvalidInput):
            self.broker.configure_log(routing="inline", logs=2)
        assert self.broker.log_stats().logs == 1
        self.hand_back(self.broker.read_log(limit=1))
        self.switch("inline")
        assert self.held("q") == ids

    @pytest.mark.parametrize("first", MODES)
    def test_a_switch_fences_every_tailer(self, first: Mode) -> None:
        """Also one that took its epoch before the store was switched away and back."""
        self.begin("pipeline")
        self.broker.create_queue("q", filter="TRUE")
        epoch = self.broker.take_epoch()
        ids = self.broker.publish([made()] * 3)
        page = self.broker.read_log(limit=2)
        self.switch("inline")
        ids += self.broker.publish([made()])
        later = self.broker.read_log(begin=ids[-1])
        if first == "inline":
            with self.refused(InvalidInput):
                self.broker.assign(0, later.cursor, {ids[-1]: ["q"]})
            with self.refused(InvalidInput):
                self.broker.route_plan()
        else:
            self.switch("pipeline")
            assert self.hand_back(later).status is AssignStatus.STALE
            assert self.hand_back(page).status is AssignStatus.STALE
        for each in (page, later):
            fenced = self.broker.assign(0, each.cursor, {}, epoch=epoch)
            assert fenced.status is AssignStatus.FENCED
        assert self.held("q") == ids

    def test_a_switch_to_what_is_set_fences_nobody(self, mode: Mode) -> None:
        self.begin(mode)
        self.broker.create_queue("q", filter="TRUE")
        epoch = self.broker.take_epoch()
        ids = self.broker.publish([made()])
        self.switch(mode)
        if mode == "pipeline":
            page = self.broker.read_log()
            assert self.broker.assign(0, page.cursor, {ids[0]: ["q"]}, epoch=epoch)
        assert self.held("q") == ids

    def test_a_switch_is_kept(self, mode: Mode) -> None:
        other = MODES[mode == "inline"]
        self.begin(mode)
        self.broker.create_queue("q", filter="TRUE")
        self.switch(other)
        self.broker = self.open_as(background=False)
        assert self.broker.info().routing == other
        ids = self.publish(made(), made())
        assert self.held("q") == ids
        with pytest.raises(StoreMismatch, match=f"penstock log configure --routing {mode}"):
            self.open_as(routing=mode, background=False)
        self.broker = self.open_as(routing=other, background=False)
        assert self.held("q") == ids

    def test_routing_is_one_of_two(self) -> None:
        self.begin("inline")
        for wrong in ("", "Inline", 1, b"pipeline", ["pipeline"], "pipeline" * 100):
            with self.refused(InvalidInput):
                self.broker.configure_log(routing=wrong)  # type: ignore[arg-type]

    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_groups_keep_their_order_through_switches(self, seed: int) -> None:
        self.begin("inline")
        self.broker.create_queue("fifo", filter="TRUE", ordering="fifo")
        chance = ManualClock(seed=seed).random
        published: dict[str, list[int]] = defaultdict(list)
        delivered: dict[str, list[int]] = defaultdict(list)
        for turn in range(40):
            messages = [Message(b"", group="abc"[: int(chance() * 4)]) for _ in range(5)]
            for message, message_id in zip(messages, self.broker.publish(messages), strict=True):
                published[message.group].append(message_id)
            if turn % 5 == 4:
                self.switch(MODES[int(chance() * 2)])
            if turn % 7 == 6:
                self.broker.configure_log(logs=1 + int(chance() * 4))
            if self.broker.info().routing == "pipeline":
                log = int(chance() * len(self.broker.log_stats().cursors))
                self.hand_back(self.broker.read_log(log, limit=1 + int(chance() * 9)))
            for delivery in self.broker.claim("fifo", limit=int(chance() * 10) + 1):
                delivered[delivery.group].append(delivery.message_id)
                self.broker.ack([delivery.receipt])
        self.switch("inline")
        while deliveries := self.broker.claim("fifo", limit=50):
            for delivery in deliveries:
                delivered[delivery.group].append(delivery.message_id)
            self.broker.ack([delivery.receipt for delivery in deliveries])
        assert delivered == published
