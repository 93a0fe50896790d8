"""Looking and letting go: browse, stats, retention, purge, payloads, sweeps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.broker.requests import Claim, Joint
from penstock.errors import InvalidInput, QueueNotFound
from penstock.model import Message, OutcomeStatus, State
from penstock.testing.suite.base import HOUR_MS, YEAR_MS, Suite, receipts_of

__all__ = ["KeepingSuite"]


class KeepingSuite(Suite):
    """Retention: the messages that are kept, for how long, and how they show."""

    def fill(self, count: int = 1) -> None:
        """Put ``count`` messages into each state; the queue allows two attempts."""
        for state in ("failed", "done", "in_flight"):
            self.put(*[state.encode()] * count, attributes={"state": state}, group=state)
            deliveries = self.take(count, consumer="ann", lease_ms=YEAR_MS)
            if state == "done":
                self.broker.ack(receipts_of(deliveries))
            elif state == "failed":
                self.broker.release(receipts_of(deliveries), delay_ms=0, reason="once")
                again = receipts_of(self.take(count))
                self.broker.release(again, delay_ms=0, reason="twice")
        self.put(*[b"available"] * count, attributes={"state": "available"}, priority=3)
        self.put(*[b"delayed"] * count, attributes={"state": "delayed"}, delay_ms=YEAR_MS)

    # --- browse --------------------------------------------------------------------------

    def test_browse_every_state(self) -> None:
        self.start(max_attempts=2)
        now_ms = self.clock.now_ms()
        self.fill()
        expected: dict[str, dict[str, Any]] = {
            "available": {"priority": 3, "attempts": 0, "visible_at_ms": now_ms},
            "delayed": {"attempts": 0, "visible_at_ms": now_ms + YEAR_MS},
            "in_flight": {
                "attempts": 1,
                "consumer": "ann",
                "lease_deadline_ms": now_ms + YEAR_MS,
            },
            "done": {"attempts": 1, "ended_at_ms": now_ms},
            "failed": {"attempts": 2, "ended_at_ms": now_ms, "reason": "twice"},
        }
        for state, fields in expected.items():
            (entry,) = self.everything(state)
            assert entry.state is State(state)
            assert entry.queue == "q"
            assert entry.payload == state.encode()
            assert entry.attributes == {"queue": "q", "state": state}
            assert entry.published_at_ms == now_ms
            assert {name: getattr(entry, name) for name in fields} == fields

    def test_browse_in_pages(self) -> None:
        self.start(max_attempts=2)
        self.fill(23)
        for state in State:
            whole = self.everything(state)
            assert len({entry.message_id for entry in whole}) == 23
            for limit in (1, 7, 22, 23, 24):
                paged = self.everything(state, limit=limit)
                assert [e.message_id for e in paged] == [e.message_id for e in whole]

    def test_browse_without_payloads(self) -> None:
        broker = self.start()
        self.put(b"1")
        (entry,) = broker.browse("q", payloads=False)
        assert entry.payload is None
        assert entry.attributes == {"queue": "q"}

    def test_browse_one_message_in_every_state(self) -> None:
        """A message is found by its id, as the page of its state has it."""
        broker = self.start(max_attempts=1)
        ids = self.put(*(b"%d" % n for n in range(40)))
        for n in range(10):
            # Messages that were acked at different times, several of them at the same.
            broker.ack(receipts_of(self.take(2)))
            self.clock.advance(n % 3)
        for n in range(5):
            self.fail_one(f"reason {n}")
        self.take(5)
        ids += self.put(b"later", delay_ms=HOUR_MS)
        entries = [entry for state in State for entry in self.everything(state)]
        assert sorted(entry.message_id for entry in entries) == sorted(ids)
        for entry in entries:
            assert list(broker.browse("q", message_id=entry.message_id)) == [entry]
        (bare,) = broker.browse("q", message_id=ids[0], payloads=False)
        assert (bare.payload, bare.size) == (None, 1)
        for unknown in (ids[-1] + 1, 0, (1 << 63) - 1, (1 << 64) - 1):
            assert list(broker.browse("q", message_id=unknown)) == []
        broker.purge("q", states=["done"])
        assert list(broker.browse("q", message_id=ids[0])) == []

    def test_browse_one_message_after_retention_and_a_move(self) -> None:
        """Done messages before it may be gone, and it may have been done before elsewhere."""
        broker = self.start(max_attempts=1, done_retention_ms=HOUR_MS)
        broker.create_queue("other", filter="false = true")
        ids = self.put(*(b"%d" % n for n in range(6)))
        broker.ack(receipts_of(self.take(3)))
        self.clock.advance(HOUR_MS - 1)
        failed = self.fail_one("no")
        broker.ack(receipts_of(self.take(1)))
        self.clock.advance(1)
        broker.sweep()
        assert [list(broker.browse("q", message_id=id_)) for id_ in ids[:3]] == [[], [], []]
        (done,) = broker.browse("q", message_id=ids[4])
        assert (done.state, done.payload) == (State.DONE, b"4")
        broker.move("q", "other", message_ids=[failed.message_id])
        assert list(broker.browse("q", message_id=failed.message_id)) == []
        (moved,) = broker.browse("other", message_id=failed.message_id)
        assert (moved.state, moved.queue) == (State.AVAILABLE, "other")
        broker.ack(receipts_of(self.take(1, queue="other")))
        (moved,) = broker.browse("other", message_id=failed.message_id)
        assert moved.state is State.DONE

    def test_browse_changes_nothing_and_leases_nothing(self) -> None:
        self.start(max_attempts=2)
        self.fill(3)
        with self.unchanged():
            for state in State:
                self.everything(state)
        assert [d.attempts for d in self.take(9)] == [1, 1, 1]

    def test_browse_sees_what_the_clock_says(self) -> None:
        self.start(lease_ms=1000)
        self.put(b"leased")
        self.take_one()
        self.put(b"delayed", delay_ms=1000)
        self.clock.advance(1000)
        assert self.payloads("available") == [b"leased", b"delayed"]
        assert self.payloads("in_flight") == self.payloads("delayed") == []

    # --- stats ---------------------------------------------------------------------------

    def test_stats_in_every_state(self) -> None:
        broker = self.start(max_attempts=2)
        self.fill(3)
        self.clock.advance(500)
        stats = msgspec.structs.asdict(broker.stats("q"))
        assert stats == {
            "queue": "q",
            "available": 3,
            "delayed": 3,
            "in_flight": 3,
            "done": 3,
            "failed": 3,
            "oldest_age_ms": 500,
            "groups_ready": 1,
            "enqueued_total": 15,
            "claimed_total": 12,
            "acked_total": 3,
            "released_total": 6,
            "lease_expired_total": 0,
            "failed_total": 3,
            "redriven_total": 0,
            "removed_total": 0,
            "moved_in_total": 0,
            "moved_out_total": 0,
            "oldest_in_flight_ms": 500,
            "live_bytes": 0,
        }

    def test_age_of_the_oldest_waiting_message(self) -> None:
        broker = self.start()
        assert broker.stats("q").oldest_age_ms is None
        self.put(b"1")
        self.clock.advance(100)
        self.put(b"2")
        self.clock.advance(10)
        assert broker.stats("q").oldest_age_ms == 110
        delivery = self.take_one()
        assert broker.stats("q").oldest_age_ms == 10
        # It can be claimed since now; the other one has waited for longer.
        broker.release([delivery.receipt], delay_ms=0)
        assert broker.stats("q").oldest_age_ms == 10
        self.take(2)
        assert broker.stats("q").oldest_age_ms is None

    @pytest.mark.parametrize("ordering", ["standard", "fifo"])
    def test_the_oldest_counts_from_when_it_could_be_claimed(self, ordering: str) -> None:
        broker = self.start(ordering=ordering)
        self.put(b"delayed", delay_ms=1000, group="a")
        self.clock.advance(999)
        assert broker.stats("q").oldest_age_ms is None
        self.put(b"at once", group="b")
        self.clock.advance(501)
        assert broker.stats("q").oldest_age_ms == 501
        # Which group comes first is left to the store.
        self.take(1)
        assert broker.stats("q").oldest_age_ms in {500, 501}

    @pytest.mark.parametrize("ordering", ["standard", "fifo"])
    def test_a_claim_tells_how_long_its_first_message_has_waited(self, ordering: str) -> None:
        broker = self.start(ordering=ordering)
        self.put(b"1", group="a")
        self.clock.advance(300)
        self.put(b"2", group="b", delay_ms=500)
        self.clock.advance(700)
        claims = [Claim("q", 1, None, "") for _ in range(3)]
        broker.begin(Joint(claims=[*claims]))
        assert sorted(claim.answer.waited_ms for claim in claims) == [0, 200, 1000]
        assert [len(claim.answer) for claim in claims] == [1, 1, 0]

    def test_age_of_the_oldest_message_in_flight(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(b"1", b"2")
        stuck = self.take_one()
        assert broker.stats("q").oldest_in_flight_ms == 0
        for _ in range(5):
            self.clock.advance(900)
            broker.extend([stuck.receipt], lease_ms=1000)
        assert broker.stats("q").oldest_in_flight_ms == 4500
        self.take_one()
        assert broker.stats("q").oldest_in_flight_ms == 4500
        broker.ack([stuck.receipt])
        assert broker.stats("q").oldest_in_flight_ms == 0
        self.clock.advance(1000)
        assert broker.stats("q").oldest_in_flight_ms is None
        # Its lease has ended: it can be claimed since then.
        assert broker.stats("q").oldest_age_ms == 0

    def test_none_is_lost(self) -> None:
        broker = self.start(max_attempts=2)
        self.fill(4)
        for step in range(6):
            if step:
                broker.purge("q", states=[list(State)[step - 1]])
            stats = broker.stats("q")
            present = sum(self.depth())
            assert stats.enqueued_total == 20 == present + stats.removed_total
            assert present == 20 - 4 * step

    # --- purge and delete ------------------------------------------------------------------

    def test_purge_up_to_a_limit(self) -> None:
        broker = self.start()
        self.put(*(b"%d" % n for n in range(5)))
        self.put(b"later", delay_ms=1_000)
        assert broker.purge("q", limit=2) == 2
        assert self.depth() == (3, 1, 0, 0, 0)
        assert broker.purge("q", limit=10) == 4
        assert broker.purge("q", limit=1) == 0
        with self.refused(InvalidInput):
            broker.purge("q", limit=0)

    @pytest.mark.parametrize("state", [state.value for state in State])
    def test_purge_one_state(self, state: str) -> None:
        broker = self.start(max_attempts=2)
        self.fill(5)
        before = dict(zip([s.value for s in State], self.depth(), strict=True))
        assert broker.purge("q", states=[state]) == 5
        after = dict(zip([s.value for s in State], self.depth(), strict=True))
        assert after == {**before, state: 0}
        assert self.everything(state) == []

    def test_purge_failed_messages_by_ids(self) -> None:
        """Only failed messages go, with their attempts, and no payload stays behind."""
        broker = self.start(max_attempts=1)
        ids = self.put(*(b"%d" % n for n in range(6)))
        failed = [self.fail_one("no").message_id for _ in range(4)]
        assert broker.purge("q", states=["failed"], message_ids=[*failed[:2], ids[5], 12345]) == 2
        assert [entry.message_id for entry in self.everything("failed")] == failed[2:]
        assert self.depth() == (2, 0, 0, 0, 2)
        assert broker.stats("q").removed_total == 2
        assert broker.attempts("q", failed[0]) == []
        assert self.payload_kept(failed[0]) in {False, None}
        assert broker.purge("q", states=["failed"], message_ids=failed[:2]) == 0
        for states in (["available"], ["failed", "done"], []):
            with self.refused(InvalidInput, states):
                broker.purge("q", states=states, message_ids=ids)
        with self.refused(QueueNotFound):
            broker.purge("unknown", states=["failed"], message_ids=[])

    def test_purge_takes_what_waits(self) -> None:
        broker = self.start(max_attempts=2)
        self.fill(5)
        assert broker.purge("q") == 10
        assert self.depth() == (0, 0, 5, 5, 5)
        assert self.take(9) == []

    def test_purge_of_what_is_in_flight_makes_receipts_stale(self) -> None:
        broker = self.start()
        self.put(b"1")
        delivery = self.take_one()
        assert broker.purge("q", states=["in_flight"]) == 1
        assert broker.ack([delivery.receipt])[0].status is OutcomeStatus.STALE
        self.clock.advance(YEAR_MS)
        broker.sweep()
        assert self.depth() == (0, 0, 0, 0, 0)

    def test_purge_sees_what_the_clock_says(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(b"1")
        self.take_one()
        self.put(b"2", delay_ms=1000)
        self.clock.advance(1000)
        assert broker.purge("q", states=["available"]) == 2

    def test_purge_of_more_than_one_commit(self) -> None:
        broker = self.start()
        self.put(*[b"x"] * 2500)
        assert broker.purge("q") == 2500
        assert self.depth() == (0, 0, 0, 0, 0)
        self.put(b"new")
        assert self.taken(9) == [b"new"]

    def test_delete_a_queue(self) -> None:
        broker = self.start(max_attempts=2)
        broker.create_queue("other")
        self.put(b"kept", queue="other")
        self.fill(2)
        assert broker.delete_queue("q") == 10
        assert [spec.name for spec in broker.queues()] == ["other"]
        assert self.taken(queue="other") == [b"kept"]
        broker.create_queue("q")
        stats = broker.stats("q")
        assert (stats.enqueued_total, sum(self.depth())) == (0, 0)
        for state in State:
            assert self.everything(state) == []

    def test_a_new_queue_of_an_old_name_has_no_history(self) -> None:
        broker = self.start(max_attempts=1)
        (message_id,) = self.put(b"1")
        self.fail_one()
        broker.delete_queue("q")
        broker.create_queue("q")
        assert broker.attempts("q", message_id) == []
        assert broker.redrive("q", message_ids=[message_id]) == 0

    # --- retention -----------------------------------------------------------------------

    def put_in(self, state: str) -> int:
        """Put one message into a state; return when its retention began."""
        self.put(b"x")
        if state == "unclaimed":
            return self.clock.now_ms()
        delivery = self.take_one()
        self.clock.advance(10)
        if state == "done":
            self.broker.ack([delivery.receipt])
        else:
            self.broker.release([delivery.receipt])
        return self.clock.now_ms()

    @pytest.mark.parametrize("state", ["done", "failed", "unclaimed"])
    def test_retention_ends_exactly_at_its_time(self, state: str) -> None:
        settings: dict[str, Any] = {f"{state}_retention_ms": 5000}
        broker = self.start(max_attempts=1, **settings)
        since_ms = self.put_in(state)
        self.clock.advance(4999)
        counts = broker.sweep()
        assert (counts.removed, counts.next_due_ms) == (0, since_ms + 5000)
        assert sum(self.depth()) == 1
        self.clock.advance(1)
        assert broker.sweep().removed == 1
        assert self.next_due_ms() is None
        assert self.depth() == (0, 0, 0, 0, 0)

    @pytest.mark.parametrize("state", ["done", "failed", "unclaimed"])
    def test_retention_of_zero_is_for_ever(self, state: str) -> None:
        settings: dict[str, Any] = {f"{state}_retention_ms": 0}
        broker = self.start(max_attempts=1, **settings)
        self.put_in(state)
        assert self.next_due_ms() is None
        self.clock.advance(100 * YEAR_MS)
        assert broker.sweep().removed == 0
        assert sum(self.depth()) == 1

    @pytest.mark.parametrize("state", ["done", "failed", "unclaimed"])
    def test_retention_can_be_changed(self, state: str) -> None:
        name = f"{state}_retention_ms"
        settings: dict[str, Any] = {name: 0}
        broker = self.start(max_attempts=1, **settings)
        since_ms = self.put_in(state)
        broker.update_queue("q", **{name: 5000})
        assert broker.sweep().next_due_ms == since_ms + 5000
        broker.update_queue("q", **{name: 9000})
        assert broker.sweep().next_due_ms == since_ms + 9000
        self.clock.advance(8999)
        assert broker.sweep().removed == 0
        broker.update_queue("q", **{name: 100})
        assert broker.sweep().removed == 1

    def test_retention_of_unclaimed_begins_anew_when_a_message_comes_back(self) -> None:
        broker = self.start(unclaimed_retention_ms=1000, lease_ms=60_000)
        self.put(b"1", b"2")
        delivery = self.take_one()
        self.clock.advance(999)
        broker.release([delivery.receipt], delay_ms=500)
        self.clock.advance(1)
        assert broker.sweep().removed == 1
        self.clock.advance(1498)
        assert broker.sweep().removed == 0
        assert self.depth() == (1, 0, 0, 0, 0)
        self.clock.advance(1)
        assert broker.sweep().removed == 1

    def test_retention_of_unclaimed_reaches_every_message_of_a_batch(self) -> None:
        broker = self.start(unclaimed_retention_ms=1000)
        self.put(b"1", b"2", b"3")
        broker.release([self.take_one().receipt], delay_ms=0)
        self.clock.advance(1000)
        assert broker.sweep().removed == 3

    def test_retention_of_unclaimed_leaves_what_is_in_flight(self) -> None:
        broker = self.start(unclaimed_retention_ms=1000, lease_ms=60_000)
        self.put(b"1")
        delivery = self.take_one()
        self.clock.advance(1000)
        assert broker.sweep().removed == 0
        assert broker.ack([delivery.receipt])[0].ok

    def test_retention_counts_from_visibility_of_a_delayed_message(self) -> None:
        broker = self.start(unclaimed_retention_ms=1000)
        self.put(b"1", delay_ms=5000)
        self.clock.advance(5999)
        assert broker.sweep().removed == 0
        self.clock.advance(1)
        assert broker.sweep().removed == 1

    def test_what_retention_removed_is_gone_with_its_attempts(self) -> None:
        broker = self.start(done_retention_ms=1000)
        (message_id,) = self.put(b"1")
        broker.ack([self.take_one().receipt])
        assert len(broker.attempts("q", message_id)) == 1
        self.clock.advance(1000)
        broker.sweep()
        assert broker.attempts("q", message_id) == []

    def test_retention_after_the_size_of_buckets_has_changed(self) -> None:
        broker = self.start(done_retention_ms=1000)
        for exponent in (2, 0, 3, 1):
            broker.update_queue("q", bucket_exponent=exponent)
            self.put(*[b"x"] * 15)
            for _ in range(3):
                broker.ack(receipts_of(self.take(5)))
            self.clock.advance(10)
        assert len({e.message_id for e in self.everything("done", limit=7)}) == 60
        self.clock.advance(960)
        assert [broker.sweep().removed, self.depth()[3]] == [15, 45]
        self.clock.advance(1000)
        assert [broker.sweep().removed, self.depth()[3]] == [45, 0]

    # --- payloads ------------------------------------------------------------------------

    def test_a_payload_lives_while_any_queue_refers_to_it(self) -> None:
        broker = self.start(queue=None)
        for name in ("a", "b", "c"):
            broker.create_queue(name, filter="x = 1", done_retention_ms=1000)
        (message_id,) = broker.publish([Message(b"shared", {"x": 1})])
        broker.ack([self.take_one(queue="a").receipt])
        self.clock.advance(1000)
        assert broker.sweep().removed == 1
        broker.purge("b")
        assert self.depth("a") == self.depth("b") == (0, 0, 0, 0, 0)
        assert self.payload_kept(message_id) in {True, None}
        (entry,) = broker.browse("c")
        assert entry.payload == b"shared"
        assert self.take_one(queue="c").payload == b"shared"
        broker.delete_queue("c")
        assert self.payload_kept(message_id) in {False, None}

    def test_a_payload_stays_with_done_and_failed_messages(self) -> None:
        broker = self.start(max_attempts=1)
        done, failed = self.put(b"done", b"failed")
        broker.ack([self.take_one().receipt])
        self.fail_one()
        assert self.payloads("done") == [b"done"]
        assert self.payloads("failed") == [b"failed"]
        broker.purge("q", states=["done", "failed"])
        assert self.payload_kept(done) in {False, None}
        assert self.payload_kept(failed) in {False, None}

    def test_a_message_that_no_queue_takes_is_not_kept_for_ever(self) -> None:
        broker = self.start()
        (message_id,) = broker.publish([Message(b"stray", {})])
        assert broker.store_stats().unrouted_total == 1
        for _ in range(10):
            due_ms = broker.sweep().next_due_ms
            if due_ms is None:
                break
            self.clock.advance(due_ms - self.clock.now_ms())
        assert self.payload_kept(message_id) in {False, None}

    # --- sweep ---------------------------------------------------------------------------

    def test_a_sweep_says_when_the_next_thing_is_due(self) -> None:
        self.broker = broker = self.open(self.clock, background=False, dedup_window_ms=400)
        broker.create_queue("q", lease_ms=300, done_retention_ms=100, unclaimed_retention_ms=0)
        assert broker.sweep().next_due_ms is None
        now_ms = self.clock.now_ms()
        self.put(b"1", dedup_id="x")
        assert broker.sweep().next_due_ms == now_ms + 400
        delivery = self.take_one()
        assert broker.sweep().next_due_ms == now_ms + 300
        self.put(b"2", delay_ms=200)
        assert broker.sweep().next_due_ms == now_ms + 200
        broker.ack([delivery.receipt])
        assert broker.sweep().next_due_ms == now_ms + 100
        for at_ms, name in ((100, "removed"), (200, "came_due"), (400, "dedup_forgotten")):
            self.clock.advance(now_ms + at_ms - self.clock.now_ms())
            counts = broker.sweep()
            assert getattr(counts, name) == counts.total == 1
        assert self.next_due_ms() is None

    def test_a_sweep_with_nothing_due_does_nothing(self) -> None:
        broker = self.start()
        self.fill(2)
        with self.unchanged():
            assert broker.sweep().total == 0

    def test_the_budget_bounds_a_sweep(self) -> None:
        broker = self.start(lease_ms=1000)
        self.put(*[b"x"] * 30)
        for _ in range(30):
            self.take_one()
        self.put(*[b"y"] * 30, delay_ms=1000)
        self.clock.advance(1000)
        for _ in range(3):
            counts = broker.sweep(budget=10)
            assert counts.leases_expired <= 10
            assert counts.came_due <= 10
        for _ in range(9):
            broker.sweep(budget=10)
        assert self.depth() == (60, 0, 0, 0, 0)

    def test_a_sweep_that_ran_out_of_budget_is_due_again_at_once(self) -> None:
        broker = self.start()
        self.put(*[b"y"] * 30, delay_ms=1000)
        self.clock.advance(1000)
        counts = broker.sweep(budget=10)
        assert counts.came_due == 10
        assert counts.next_due_ms is not None
        assert counts.next_due_ms <= self.clock.now_ms()
