"""Filling queues that messages were moved into, or out of: nothing twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.model import LogRecord, Message
from penstock.testing.checking import assert_clean
from penstock.testing.suite.base import HOUR_MS, receipts_of
from penstock.testing.suite.routed import Mode, RoutedSuite

if TYPE_CHECKING:
    from penstock.broker.broker import Broker

__all__ = ["MovedSuite"]


class MovedSuite(RoutedSuite):
    """Backfill, fill and restore after ``move``."""

    def moved(self, mode: Mode, messages: int = 6) -> tuple[Broker, list[int]]:
        """Begin with a queue that wants all and got two: the others were there before it."""
        broker = self.begin(mode)
        broker.create_queue("first", filter="n >= 0", max_attempts=1)
        ids = self.publish(*(Message(b"%d" % n, {"n": n}) for n in range(messages)))
        broker.create_queue("q", filter="n >= 0", max_attempts=1)
        assert broker.move("first", "q", state="available", message_ids=ids[1:3]) == 2
        return broker, ids

    def settle(self, broker: Broker, state: str) -> None:
        """Bring what was moved into a state."""
        if state != "available":
            held = receipts_of(broker.claim("q", limit=10))
            assert len(held) == 2
            if state == "done":
                broker.ack(held)
            elif state == "failed":
                broker.release(held)

    @pytest.mark.parametrize("state", ["available", "in_flight", "done", "failed"])
    def test_a_backfill_leaves_alone_what_was_moved_in(self, mode: Mode, state: str) -> None:
        broker, ids = self.moved(mode)
        self.settle(broker, state)
        assert broker.backfill("q").added == 4
        assert self.held("q") == ids
        assert len(self.everything(state, queue="q")) == (6 if state == "available" else 2)
        assert_clean(broker)
        broker.redrive("q")
        self.drained("q")
        broker.purge("q", states=["done", "in_flight"])
        assert_clean(broker)

    def test_a_fill_leaves_alone_what_was_moved_in(self, mode: Mode) -> None:
        broker, ids = self.moved(mode)
        broker = self.broker = self.again()
        done = broker.fill("q", ids[0], ids[-1] + 1, ids)
        assert (done.added, done.already, done.missing) == (4, 2, 0)
        assert self.held("q") == ids
        assert_clean(broker)

    def test_what_has_left_again_comes_like_any_other(self, mode: Mode) -> None:
        broker, ids = self.moved(mode)
        broker.create_queue("keeps", filter="n >= 0")
        assert broker.backfill("keeps").added == 6
        broker.purge("q")
        assert broker.backfill("q").added == 6
        assert self.held("q") == ids
        assert_clean(broker)

    def test_a_backfill_does_not_bring_back_what_was_moved_out(self, mode: Mode) -> None:
        broker, ids = self.moved(mode)
        assert broker.backfill("first").added == 0
        assert self.held("first") == [ids[0], *ids[3:]]
        broker.update_queue("first", filter="n >= 1")
        assert broker.backfill("first").added == 0

    def test_a_restore_leaves_alone_what_was_moved_in(self, mode: Mode) -> None:
        broker, ids = self.moved(mode)
        broker.configure_log(retention_ms=HOUR_MS)
        for _ in range(3):
            self.clock.advance(HOUR_MS)
            broker.sweep()
        assert broker.log_stats().earliest > ids[-1]
        archived = [
            (LogRecord(id_, {"n": n}, "", 0, 0, 1, 0), b"%d" % n) for n, id_ in enumerate(ids)
        ]
        done = broker.restore("q", ids[0], ids[-1] + 1, archived)
        assert (done.added, done.already) == (4, 2)
        assert self.held("q") == ids
        assert_clean(broker)

    def test_from_two_queues_that_were_filled_with_it(self, mode: Mode) -> None:
        broker, ids = self.moved(mode)
        broker.create_queue("second", filter="n >= 0")
        assert broker.backfill("second").added == 6
        assert broker.move("second", "q", state="available") == 6
        assert self.held("q") == ids
        assert broker.move("first", "q", state="available") == 4
        assert self.held("q") == ids
        assert broker.backfill("q").added == 0
        assert sorted(self.drained("q")) == ids
        assert_clean(broker)
