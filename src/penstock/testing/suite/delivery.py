"""Publish, claim, ack: what goes in comes out, in which order, and in whose turn."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from penstock.errors import InvalidMessage
from penstock.model import Message, OutcomeStatus, State
from penstock.testing.suite.base import YEAR_MS, Suite, message, receipts_of

__all__ = ["DeliverySuite"]


class DeliverySuite(Suite):
    """From a producer to a worker."""

    # --- the plain way -------------------------------------------------------------------

    def test_publish_claim_ack(self) -> None:
        broker = self.start(lease_ms=30_000)
        (message_id,) = broker.publish(
            [message(b"body", attributes={"kind": "book", "n": 3, "x": 0.5, "y": True, "z": None})]
        )
        delivery = self.take_one(consumer="w1")
        assert delivery.message_id == message_id
        assert delivery.queue == "q"
        assert delivery.payload == b"body"
        assert delivery.attributes == {
            "queue": "q",
            "kind": "book",
            "n": 3,
            "x": 0.5,
            "y": True,
            "z": None,
        }
        assert delivery.attempts == 1
        assert delivery.published_at_ms == self.clock.now_ms()
        assert delivery.lease_deadline_ms == self.clock.now_ms() + 30_000
        assert delivery.receipt.startswith(delivery.lease)
        (outcome,) = broker.ack([delivery.receipt])
        assert outcome.ok
        assert outcome.status is OutcomeStatus.DONE
        assert outcome.receipt == delivery.receipt
        assert self.take() == []
        assert self.depth() == (0, 0, 0, 1, 0)

    def test_send_is_publish_to_one_queue(self) -> None:
        broker = self.start()
        message_id = broker.send("q", b"one", kind="x")
        delivery = self.take_one()
        assert (delivery.message_id, delivery.payload) == (message_id, b"one")
        assert delivery.attributes == {"queue": "q", "kind": "x"}

    def test_send_takes_every_field_of_a_message(self) -> None:
        broker = self.start()
        late = broker.send("q", b"late", delay_ms=1_000)
        first = broker.send(
            "q", b"1", group="a", priority=3, dedup_id="once", attributes={"group": 5}, kind="x"
        )
        assert broker.send("q", b"2", dedup_id="once") == first
        delivery = self.take_one()
        assert (delivery.message_id, delivery.payload) == (first, b"1")
        assert (delivery.group, delivery.priority) == ("a", 3)
        assert delivery.attributes == {"queue": "q", "group": 5, "kind": "x"}
        assert self.take() == []
        self.clock.advance(1_000)
        assert self.take_one().message_id == late
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("sent to 'q'.* not 'other'", {"queue": "other"}),
            ("sent to 'q'.* not 'other'", {"attributes": {"queue": "other"}}),
            ("must be a mapping, not list", {"attributes": ["kind"]}),
            ("'kind' is given twice", {"attributes": {"kind": 1}, "kind": 1}),
            ("priority", {"priority": 256}),
            ("delay_ms", {"delay_ms": -1}),
            ("group", {"group": 5}),
        ]
        for text, options in wrong:
            with pytest.raises(InvalidMessage, match=text):
                broker.send("q", b"", **options)

    def test_empty_and_large_payloads(self) -> None:
        self.start()
        large = bytes(range(256)) * 4096
        self.put(b"", large)
        assert self.taken(2) == [b"", large]

    def test_batches_of_every_verb(self) -> None:
        broker = self.start(max_attempts=9)
        ids = self.put(*(b"%d" % n for n in range(100)))
        assert len(set(ids)) == 100
        assert ids == sorted(ids)
        deliveries = self.take(100)
        assert [d.message_id for d in deliveries] == ids
        assert len({d.lease for d in deliveries}) == 1
        assert len({d.receipt for d in deliveries}) == 100
        acked = broker.ack(receipts_of(deliveries[:40]))
        released = broker.release(receipts_of(deliveries[40:70]), delay_ms=0)
        extended = broker.extend(receipts_of(deliveries[70:]), lease_ms=5)
        assert [o.status for o in acked] == [OutcomeStatus.DONE] * 40
        assert [o.status for o in released] == [OutcomeStatus.RETRYING] * 30
        assert [o.status for o in extended] == [OutcomeStatus.EXTENDED] * 30
        assert self.depth() == (30, 0, 30, 40, 0)

    def test_empty_batches_change_nothing(self) -> None:
        broker = self.start()
        self.put(b"x")
        with self.unchanged():
            assert broker.publish([]) == []
            assert broker.ack([]) == []
            assert broker.release([]) == []
            assert broker.extend([], lease_ms=1000) == []
            assert broker.redrive("q", message_ids=[]) == 0
            assert broker.purge("q", states=[]) == 0

    def test_claim_takes_no_more_than_the_limit(self) -> None:
        self.start()
        self.put(*[b"x"] * 7)
        assert len(self.take(3)) == 3
        assert len(self.take(3)) == 3
        assert len(self.take(3)) == 1
        assert self.take(3) == []

    def test_each_claim_has_a_lease_of_its_own(self) -> None:
        self.start()
        self.put(b"1", b"2")
        assert self.take_one().lease != self.take_one().lease

    def test_what_is_in_flight_is_not_given_out(self) -> None:
        self.start(lease_ms=1000)
        self.put(b"1")
        self.take_one()
        self.clock.advance(999)
        assert self.take() == []
        self.clock.advance(1)
        assert self.take_one().attempts == 2

    def test_a_claim_may_bring_its_own_lease_time(self) -> None:
        self.start(lease_ms=1000)
        self.put(b"1")
        assert self.take_one(lease_ms=5000).lease_deadline_ms == self.clock.now_ms() + 5000
        self.clock.advance(4999)
        assert self.take() == []
        self.clock.advance(1)
        assert len(self.take()) == 1

    # --- routing -------------------------------------------------------------------------

    def test_a_message_goes_into_every_queue_whose_filter_it_satisfies(self) -> None:
        broker = self.start(queue=None)
        broker.create_queue("books", filter="kind = 'book'")
        broker.create_queue("dear", filter="price > 10")
        broker.create_queue("films", filter="kind = 'film'")
        (both, dear, none) = broker.publish(
            [
                Message(b"both", {"kind": "book", "price": 20}),
                Message(b"dear", {"price": 11}),
                Message(b"none", {"kind": "song"}),
            ]
        )
        assert [d.message_id for d in self.take(9, queue="books")] == [both]
        assert [d.message_id for d in self.take(9, queue="dear")] == [both, dear]
        assert self.take(9, queue="films") == []
        assert broker.store_stats().unrouted_total == 1
        assert broker.store_stats().published_total == 3
        assert none not in (both, dear)

    def test_queues_of_one_message_are_independent(self) -> None:
        broker = self.start(queue=None)
        broker.create_queue("a", filter="x = 1")
        broker.create_queue("b", filter="x = 1", max_attempts=1)
        broker.publish([Message(b"m", {"x": 1})])
        broker.ack([self.take_one(queue="a").receipt])
        broker.release([self.take_one(queue="b").receipt])
        assert self.depth("a") == (0, 0, 0, 1, 0)
        assert self.depth("b") == (0, 0, 0, 0, 1)

    # --- delay ---------------------------------------------------------------------------

    def test_a_delayed_message_comes_at_its_time(self) -> None:
        self.start()
        self.put(b"later", delay_ms=5000)
        self.clock.advance(4999)
        assert self.take() == []
        assert self.depth() == (0, 1, 0, 0, 0)
        self.clock.advance(1)
        assert self.depth() == (1, 0, 0, 0, 0)
        assert self.taken() == [b"later"]

    def test_delays_have_no_limit_that_matters(self) -> None:
        self.start()
        self.put(b"y", delay_ms=100 * YEAR_MS)
        self.clock.advance(100 * YEAR_MS - 1)
        assert self.take() == []
        self.clock.advance(1)
        assert self.taken() == [b"y"]

    def test_a_queue_delay_is_the_default_of_its_messages(self) -> None:
        self.start(delay_ms=1000)
        self.put(b"default")
        self.put(b"own", delay_ms=500)
        self.clock.advance(500)
        assert self.taken(9) == [b"own"]
        self.clock.advance(500)
        assert self.taken(9) == [b"default"]

    def test_delayed_messages_come_in_the_order_of_their_time(self) -> None:
        self.start()
        self.put(b"third", delay_ms=300)
        self.put(b"first", delay_ms=100)
        self.put(b"second", delay_ms=200)
        self.clock.advance(1000)
        assert self.taken(9) == [b"first", b"second", b"third"]

    # --- order within a group -------------------------------------------------------------

    def test_order_is_by_time_of_visibility(self) -> None:
        self.start()
        self.put(b"late", delay_ms=100)
        self.clock.advance(50)
        self.put(b"early")
        self.clock.advance(50)
        assert self.taken(9) == [b"early", b"late"]

    def test_a_released_message_goes_behind_those_that_waited_longer(self) -> None:
        broker = self.start()
        self.put(b"1", b"2")
        first = self.take_one()
        self.clock.advance(10)
        broker.release([first.receipt], delay_ms=0)
        assert self.taken(9) == [b"2", b"1"]

    def test_higher_priority_goes_first_within_a_group(self) -> None:
        self.start()
        for priority in (0, 255, 7, 128, 7):
            self.put(b"%d" % priority, priority=priority)
            self.clock.advance(1)
        assert self.taken(2) == [b"255", b"128"]
        assert self.taken(9) == [b"7", b"7", b"0"]

    def test_a_later_message_of_higher_priority_overtakes(self) -> None:
        self.start()
        self.put(*[b"low"] * 5, priority=1)
        assert self.taken() == [b"low"]
        self.clock.advance(1)
        self.put(b"high", priority=2)
        assert self.taken() == [b"high"]
        assert self.taken() == [b"low"]

    def test_a_delayed_message_of_higher_priority_does_not_block(self) -> None:
        self.start()
        self.put(b"high", priority=9, delay_ms=100)
        self.put(b"low", b"low")
        assert self.taken() == [b"low"]
        self.clock.advance(100)
        assert self.taken(9) == [b"high", b"low"]

    # --- fairness between groups ------------------------------------------------------------

    def test_groups_take_turns(self) -> None:
        self.start()
        self.put(*[b"a"] * 4, group="a")
        self.put(*[b"b"] * 4, group="b")
        turns = [self.taken()[0] for _ in range(8)]
        assert turns[0::2] == [turns[0]] * 4
        assert turns[1::2] == [turns[1]] * 4
        assert turns[0] != turns[1]

    def test_groups_share_a_batch(self) -> None:
        self.start()
        for group in "abcde":
            self.put(*[group.encode()] * 50, group=group)
        assert Counter(self.taken(25)) == Counter({g.encode(): 5 for g in "abcde"})

    def test_every_group_has_a_share_of_a_batch_that_is_large_enough(self) -> None:
        self.start()
        self.put(*[b"a"] * 9, group="a")
        self.put(*[b"b"] * 9, group="b")
        self.put(b"c", group="c")
        assert set(self.taken(4)) == {b"a", b"b", b"c"}

    def test_a_batch_is_filled_when_groups_run_out(self) -> None:
        self.start()
        self.put(*[b"a"] * 50, group="a")
        self.put(b"b", group="b")
        assert Counter(self.taken(20)) == Counter({b"a": 19, b"b": 1})

    def test_a_backlog_does_not_delay_another_groups_message(self) -> None:
        self.start()
        self.put(*[b"backlog"] * 1000, group="big")
        assert self.taken(3) == [b"backlog"] * 3
        self.put(b"single", group="small")
        assert b"single" in [self.taken()[0] for _ in range(2)]

    def test_priority_does_not_reach_across_groups(self) -> None:
        self.start()
        self.put(*[b"vip"] * 10, group="loud", priority=255)
        self.put(b"quiet", group="quiet")
        assert b"quiet" in self.taken(2)

    def test_groups_are_any_text(self) -> None:
        self.start()
        names = ["", "a", "a\0", "a\0b", "\0", "ü", "\N{GRINNING FACE}", "z" * 256]
        for name in names:
            self.put(name.encode(), group=name)
        deliveries = self.take(99)
        assert {d.group for d in deliveries} == set(names)
        assert all(d.group.encode() == d.payload for d in deliveries)

    def test_group_of_many_messages_keeps_its_order_beside_others(self) -> None:
        self.start()
        for n in range(30):
            self.put(b"%02d" % n, group="ab"[n % 2])
        seen: dict[str, list[bytes]] = {"a": [], "b": []}
        while batch := self.take(4):
            for delivery in batch:
                seen[delivery.group].append(delivery.payload)
        assert seen["a"] == sorted(seen["a"])
        assert seen["b"] == sorted(seen["b"])
        assert len(seen["a"]) == len(seen["b"]) == 15

    def test_groups_ready_counts_groups(self) -> None:
        broker = self.start()
        self.put(b"1", b"2", group="a")
        self.put(b"3", group="b")
        assert broker.stats("q").groups_ready == 2
        self.take(9)
        assert broker.stats("q").groups_ready == 0

    # --- dedup ---------------------------------------------------------------------------

    def test_dedup_within_a_call(self) -> None:
        broker = self.start()
        first, second, other = broker.publish(
            [message(b"1", dedup_id="x"), message(b"2", dedup_id="x"), message(b"3", dedup_id="y")]
        )
        assert first == second != other
        assert self.taken(9) == [b"1", b"3"]
        assert broker.store_stats().duplicates_total == 1
        assert broker.store_stats().published_total == 2

    def test_dedup_within_the_window_and_after_it(self) -> None:
        self.broker = self.open(self.clock, background=False, dedup_window_ms=1000)
        self.broker.create_queue("q")
        first = self.put(b"1", dedup_id="x")
        self.clock.advance(999)
        assert self.put(b"2", dedup_id="x") == first
        self.clock.advance(1)
        assert self.put(b"3", dedup_id="x") != first
        assert self.taken(9) == [b"1", b"3"]

    def test_the_window_begins_anew_with_a_new_message(self) -> None:
        self.broker = self.open(self.clock, background=False, dedup_window_ms=1000)
        self.broker.create_queue("q")
        self.put(b"1", dedup_id="x")
        self.clock.advance(1000)
        second = self.put(b"2", dedup_id="x")
        assert self.broker.sweep().dedup_forgotten == 0
        self.clock.advance(999)
        assert self.put(b"3", dedup_id="x") == second
        self.clock.advance(1)
        assert self.broker.sweep().dedup_forgotten == 1

    def test_dedup_is_scoped_by_the_queue_attribute(self) -> None:
        broker = self.start()
        broker.create_queue("r")
        broker.create_queue("any", filter="shared = 1")
        (in_q,) = broker.publish([message(b"q", dedup_id="x")])
        (in_r,) = broker.publish([message(b"r", queue="r", dedup_id="x")])
        (one,) = broker.publish([Message(b"s", {"shared": 1}, dedup_id="x")])
        (two,) = broker.publish([Message(b"t", {"shared": 1, "k": 2}, dedup_id="x")])
        assert len({in_q, in_r, one}) == 3
        assert one == two

    def test_a_duplicate_is_known_whatever_became_of_the_first(self) -> None:
        broker = self.start()
        first = self.put(b"1", dedup_id="x")
        broker.ack([self.take_one().receipt])
        assert self.put(b"2", dedup_id="x") == first
        broker.purge("q", states=[State.DONE])
        assert self.put(b"3", dedup_id="x") == first
        assert self.take() == []
