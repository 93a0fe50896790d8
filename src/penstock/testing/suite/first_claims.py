"""When a message was first claimed: of live, done and failed ones, whatever has become of them."""

from __future__ import annotations

from typing import Any, Final

from penstock.model import State
from penstock.testing.suite.base import HOUR_MS, Suite, receipts_of

__all__ = ["FirstClaimSuite"]

RETRY: Final[dict[str, Any]] = {"backoff_base_ms": 0, "backoff_cap_ms": 0}


class FirstClaimSuite(Suite):
    """The first claim of a message is that of attempt number 1, in the record of the message."""

    def first_claims(self, queue: str = "q") -> dict[bytes | None, int | None]:
        """Return when each message was first claimed, by payload; attempts must say the same."""
        found = {}
        for state in State:
            for entry in self.everything(state, queue=queue):
                attempts = self.broker.attempts(queue, entry.message_id)
                firsts = [each.claimed_at_ms for each in attempts if each.number == 1]
                assert entry.first_claimed_ms == (firsts[0] if firsts else None)
                found[entry.payload] = entry.first_claimed_ms
        return found

    def test_live_and_done_messages_say_when_they_were_first_claimed(self) -> None:
        """A lease that is extended in part, and acks of several leases at once, change nothing."""
        self.start()
        self.put(b"1", b"2", b"3", b"4")
        first_ms = self.clock.now_ms()
        first = self.take(2)
        second_ms = self.clock.advance(10)
        second = self.take(1)
        claims = {b"1": first_ms, b"2": first_ms, b"3": second_ms, b"4": None}
        assert self.first_claims() == claims
        self.clock.advance(10)
        self.broker.extend([first[1].receipt], lease_ms=HOUR_MS)
        assert all(self.broker.ack(receipts_of([*first, *second])))
        assert self.first_claims() == claims
        self.again()
        assert self.first_claims() == claims

    def test_attempts_after_the_first_change_nothing(self) -> None:
        """A message that is released, expires, fails and is redriven keeps its first claim."""
        self.start(max_attempts=2, **RETRY)
        self.put(b"done", b"failed")
        first_ms = self.clock.now_ms()
        claims = dict.fromkeys((b"done", b"failed"), first_ms)
        self.broker.release(receipts_of(self.take(2)), delay_ms=1_000)
        assert self.first_claims() == claims
        self.clock.advance(1_000)
        done, _ = self.take(2, lease_ms=1_000)
        # Others of the same ack were never tried before.
        self.put(b"new")
        new_ms = self.clock.advance(1)
        new = self.take_one()
        assert all(self.broker.ack([done.receipt, new.receipt]))
        claims[b"new"] = new_ms
        assert self.first_claims() == claims
        self.clock.advance(1_000)
        self.broker.sweep()
        assert self.depth() == (0, 0, 0, 2, 1)
        assert self.first_claims() == claims
        assert self.broker.redrive("q") == 1
        assert self.first_claims() == claims
        self.again()
        self.broker.ack([self.take_one().receipt])
        assert self.depth() == (0, 0, 0, 3, 0)
        assert self.first_claims() == claims

    def test_a_claim_that_was_given_back_unseen_is_none(self) -> None:
        """The claim after it is the first."""
        self.start(max_attempts=1)
        self.put(b"x")
        self.broker.release([self.take_one().receipt], unseen=True)
        assert self.first_claims() == {b"x": None}
        claimed_ms = self.clock.advance(10)
        (delivery,) = self.take()
        assert self.first_claims() == {b"x": claimed_ms}
        self.clock.advance(10)
        self.broker.release([delivery.receipt], reason="no")
        assert self.depth() == (0, 0, 0, 0, 1)
        assert self.first_claims() == {b"x": claimed_ms}

    def test_a_moved_message_brings_its_first_claim_along(self) -> None:
        """Also as a dead letter; where it had ended before, that of its first attempt there."""
        self.start(queue=None)
        filter_ = "kind = 1"
        self.broker.create_queue("dead", filter=filter_)
        self.broker.create_queue("q", filter=filter_, max_attempts=1, dead_letter="dead")
        both = {"kind": 1}
        # The dead letter queue has both of them as well: one is done there, after that of q began.
        self.put(b"ended", b"fresh", attributes=both)
        first_ms = self.clock.now_ms()
        letters = self.take(2)
        there_ms = self.clock.advance(10)
        ended, fresh = self.take(2, queue="dead")
        self.broker.ack([ended.receipt])
        self.broker.release([fresh.receipt], unseen=True)
        self.broker.purge("dead")
        assert self.first_claims("dead") == {b"ended": there_ms}
        self.broker.release(receipts_of(letters), reason="no")
        self.clock.advance(10)
        self.broker.sweep()
        claims = {b"ended": there_ms, b"fresh": first_ms}
        assert self.first_claims("dead") == claims
        self.broker.ack(receipts_of(self.take(2, queue="dead")))
        assert self.depth("dead") == (0, 0, 0, 2, 0)
        assert self.first_claims("dead") == claims

    def test_a_message_that_nobody_claimed_has_none(self) -> None:
        """A full queue has dropped one; one that waits was tried before it was dropped."""
        self.start(max_messages=1, overflow="drop_oldest", **RETRY)
        self.put(b"never")
        self.put(b"tried")
        assert self.first_claims() == {b"never": None, b"tried": None}
        tried_ms = self.clock.advance(5)
        self.broker.release(receipts_of(self.take()), delay_ms=0)
        self.put(b"waits")
        assert self.first_claims() == {b"never": None, b"tried": tried_ms, b"waits": None}

    def test_a_late_ack_has_the_first_claim(self) -> None:
        """Of an attempt that had expired: of the first one, or of one after it."""
        self.start()
        self.put(b"x", b"y")
        first_ms = self.clock.now_ms()
        x, _ = self.take(2, lease_ms=1_000)
        self.clock.advance(1_000)
        assert all(self.ack_late((x.receipt, 1)))
        self.clock.advance(1_000)
        (y,) = self.take(lease_ms=1_000)
        self.clock.advance(1_000)
        assert all(self.ack_late((y.receipt, 2)))
        assert self.depth() == (0, 0, 0, 2, 0)
        assert self.first_claims() == {b"x": first_ms, b"y": first_ms}
