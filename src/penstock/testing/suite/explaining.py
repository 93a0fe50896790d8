"""Why a message is, or is not, in a queue: each cause, by the life that leads to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import InvalidInput, QueueNotFound
from penstock.model import Cause, Message, State
from penstock.testing.suite.base import HOUR_MS, Suite, receipts_of

if TYPE_CHECKING:
    from penstock.model import MessageExplanation

__all__ = ["ExplainingSuite"]


def book(price: int, **fields: Any) -> Message:
    """Make a message that the queues of this suite judge by its price."""
    return Message(b"x", {"kind": "book", "price": price}, **fields)


class ExplainingSuite(Suite):
    """``explain``; nothing is changed by it."""

    def explained(self, message_id: int, cause: Cause, *said: str) -> MessageExplanation:
        """Explain a message in the queue ``q``: the cause, and parts of the text."""
        with self.unchanged():
            found = self.broker.explain("q", message_id)
        assert (found.queue, found.message_id, found.cause) == ("q", message_id, cause), found.text
        for part in said:
            assert part in found.text
        return found

    def test_explain_says_where_a_message_is(self) -> None:
        broker = self.start(filter="kind = 'book' AND price > 10", max_attempts=1)
        broker.create_queue("all", filter="TRUE")
        (message_id,) = broker.publish([book(12)])
        found = self.explained(message_id, Cause.TAKEN, "Queue q has it (available)", "its filter")
        assert (found.state, found.attempts, found.elsewhere) == (
            State.AVAILABLE,
            [],
            {"all": State.AVAILABLE},
        )
        assert (found.looked, found.queues) == (2, 2)
        assert found.filter is not None
        assert [(part.result, part.values) for part in found.filter.parts] == [
            (True, (("kind", "book"),)),
            (True, (("price", 12),)),
        ]
        assert found.filter_then is None
        assert found.counts_from is not None
        assert found.counts_from <= message_id
        delivery = self.take_one(consumer="me")
        found = self.explained(message_id, Cause.TAKEN, "in flight")
        assert found.entry is not None
        assert (found.entry.consumer, found.entry.payload) == ("me", None)
        assert [each.end.value for each in found.attempts] == ["running"]
        broker.release([delivery.receipt], reason="no paper")
        found = self.explained(message_id, Cause.TAKEN, "failed")
        assert (found.state, found.attempts[0].reason) == (State.FAILED, "no paper")

    def test_explain_a_delayed_and_a_done_message(self) -> None:
        broker = self.start(filter="kind = 'book'")
        now, later = broker.publish([book(1), book(2, delay_ms=HOUR_MS)])
        assert self.explained(later, Cause.TAKEN, "delayed").state is State.DELAYED
        broker.ack(receipts_of(self.take()))
        assert self.explained(now, Cause.TAKEN, "done").state is State.DONE

    def test_explain_a_filter_that_does_not_take_a_message(self) -> None:
        broker = self.start(filter="kind = 'book' AND price > 10")
        cheap, other = broker.publish([book(1), Message(b"", {"kind": "book", "price": "x"})])
        found = self.explained(cheap, Cause.NOT_TAKEN, "its filter does not take it")
        assert found.filter is not None
        assert (found.state, found.filter.result) == (None, False)
        assert found.filter.parts[1].values == (("price", 1),)
        found = self.explained(other, Cause.NOT_TAKEN)
        assert found.filter is not None
        assert found.filter.parts[1].result is None

    def test_explain_a_filter_that_has_changed(self) -> None:
        broker = self.start(filter="price > 10")
        old, oldest = broker.publish([book(12), book(3)])
        broker.update_queue("q", filter="price < 5")
        (new,) = broker.publish([book(1)])
        found = self.explained(old, Cause.TAKEN, "the filter that it had then took it")
        assert found.filter is not None
        assert found.filter_then is not None
        assert (found.filter.result, found.filter_then.result) == (False, True)
        assert found.filter_then.text == "price > 10"
        found = self.explained(
            oldest, Cause.NOT_TAKEN, "did not take it", "A backfill brings it in"
        )
        assert found.counts_from is not None
        assert oldest < found.counts_from <= new
        broker.backfill("q")
        self.explained(oldest, Cause.BACKFILLED)
        self.explained(new, Cause.TAKEN, "its filter took it")

    def test_explain_a_message_that_is_older_than_the_queue(self) -> None:
        broker = self.start(queue=None)
        broker.create_queue("all", filter="TRUE")
        wanted, other = broker.publish([book(12), book(1)])
        broker.create_queue("q", filter="price > 10")
        found = self.explained(wanted, Cause.TOO_EARLY, "this one is older", "A backfill brings")
        assert found.elsewhere == {"all": State.AVAILABLE}
        self.explained(other, Cause.NOT_TAKEN)
        broker.backfill("q")
        self.explained(wanted, Cause.BACKFILLED)
        broker.purge("q")
        self.explained(wanted, Cause.REMOVED, "A backfill took it", "a purge")

    def test_explain_a_queue_that_drains(self) -> None:
        broker = self.start(filter="TRUE")
        (before,) = broker.publish([book(1)])
        broker.delete_queue("q", drain=True)
        (after,) = broker.publish([book(2)])
        assert self.explained(before, Cause.TAKEN).counts_from is None
        self.explained(after, Cause.DRAINING, "it is draining")

    def test_explain_a_removed_message_by_what_can_have_removed_it(self) -> None:
        broker = self.start(filter="TRUE", done_retention_ms=HOUR_MS)
        broker.create_queue("log", filter="TRUE")
        purged, acked = broker.publish([book(1), book(2)])
        (delivery,) = self.take()
        assert delivery.message_id == purged
        broker.ack([delivery.receipt])
        broker.purge("q", states=["done"])
        found = self.explained(purged, Cause.REMOVED, "had it, by its filter", "a purge")
        assert "retention" not in found.text
        assert "a move" not in found.text
        broker.ack(receipts_of(self.take()))
        self.clock.advance(HOUR_MS)
        broker.sweep()
        self.explained(acked, Cause.REMOVED, "does not record", "done_retention_ms is 3600000")

    def test_explain_a_message_that_was_moved(self) -> None:
        broker = self.start(filter="kind = 'book'")
        broker.create_queue("dead")
        (message_id,) = broker.publish([book(1)])
        broker.move("q", "dead", state="available")
        self.explained(message_id, Cause.REMOVED, "a move", "Queue dead has it, though")
        found = broker.explain("dead", message_id)
        assert (found.cause, found.state) == (Cause.MOVED_IN, State.AVAILABLE)
        assert found.filter is not None
        assert found.filter.values == (("queue", None),)

    def test_explain_names_what_was_deduplicated(self) -> None:
        broker = self.start(filter="price > 10")
        first = broker.publish([book(1, dedup_id="a")])
        assert "dedup" not in self.explained(first[0], Cause.NOT_TAKEN).text
        assert broker.publish([book(12, dedup_id="a")]) == first
        self.explained(first[0], Cause.NOT_TAKEN, "the store has kept the first message alone")

    def test_explain_a_message_that_the_log_has_dropped(self) -> None:
        broker = self.start(filter="price > 10", done_retention_ms=1)
        broker.configure_log(retention_ms=HOUR_MS)
        (kept,) = broker.publish([book(12)])
        (gone,) = broker.publish([book(13)])
        (unrouted,) = broker.publish([book(1)])
        (delivery,) = (each for each in self.take(2) if each.message_id == gone)
        broker.ack([delivery.receipt])
        for _ in range(4):
            self.clock.advance(HOUR_MS)
            (latest,) = broker.publish([book(1)])
            while broker.sweep().total:
                pass
        assert broker.log_stats().earliest > unrouted
        self.explained(kept, Cause.TAKEN)
        for message_id in (gone, unrouted):
            found = self.explained(message_id, Cause.FORGOTTEN, "the log is kept from offset")
            assert (found.filter, found.filter_then) == (None, None)
            assert "If it satisfied price > 10, it was in the queue and was removed" in found.text
        self.explained(latest, Cause.NOT_TAKEN)

    def test_explain_an_id_that_no_message_has(self) -> None:
        broker = self.start(filter="TRUE")
        self.explained(0, Cause.NO_MESSAGE)
        broker.publish([book(1)])
        for message_id in (broker.log_stats().end, (1 << 64) - 1):
            self.explained(message_id, Cause.NO_MESSAGE, "No message has this id yet")
        for wrong in (-1, 1 << 64, "1"):
            with self.refused(InvalidInput, wrong):
                broker.explain("q", wrong)  # type: ignore[arg-type]
        with pytest.raises(QueueNotFound):
            broker.explain("other", 1)
