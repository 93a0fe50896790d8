"""Two brokers on one database, as two processes would have it: each with a clock and a memory."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import InvalidMessage, ManualClock, Message, QueueExists, QueueNotFound, SystemClock
from penstock.store.sql import session
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock import Broker


class Two:
    """Two brokers whose clocks go together."""

    def __init__(self, url: str, **options: Any) -> None:
        self._clocks = [ManualClock(seed=1), ManualClock(seed=2)]
        self.brokers = [
            penstock.open(url, clock=clock, background=False, **options) for clock in self._clocks
        ]

    def advance(self, ms: int) -> None:
        for clock in self._clocks:
            clock.advance(ms)


@pytest.fixture
def two(url: str) -> Iterator[Two]:
    found = Two(url)
    yield found
    assert_clean(found.brokers[0])
    for broker in found.brokers:
        broker.close()


def receipts(deliveries: list[penstock.Delivery]) -> list[str]:
    return [delivery.receipt for delivery in deliveries]


# --- queues ---------------------------------------------------------------------------------------


def test_a_queue_made_by_one_is_used_by_the_other(two: Two) -> None:
    first, second = two.brokers
    first.create_queue("q", lease_ms=1_234)
    second.send("q", b"1")
    (delivery,) = first.claim("q")
    assert delivery.payload == b"1"
    first.send("q", b"2")
    (delivery,) = second.claim("q", consumer="second")
    assert delivery.lease_deadline_ms == ManualClock().now_ms() + 1_234
    assert all(first.ack([delivery.receipt]))
    assert first.stats("q").done == second.stats("q").done == 1
    assert [spec.name for spec in second.queues()] == ["q"]
    assert second.create_queue("q", lease_ms=1_234) == first.queue("q")
    with pytest.raises(QueueExists):
        second.create_queue("q", lease_ms=5)


def test_a_misspelt_queue_is_named_though_the_other_has_made_it(two: Two) -> None:
    first, second = two.brokers
    first.create_queue("orders")
    with pytest.raises(QueueNotFound, match=r"did you mean 'orders'\?"):
        second.claim("oders")


def test_only_queues_that_have_changed_are_decoded(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two.brokers
    for n in range(20):
        first.create_queue(f"q{n}")
    second.queues()
    decoded: list[int] = []
    decode = session.decode_queue

    def noting(number: int, spec: bytes, coverage: bytes) -> session.SqlQueue:
        decoded.append(number)
        return decode(number, spec, coverage)

    monkeypatch.setattr(session, "decode_queue", noting)
    first.create_queue("new")
    first.update_queue("q1", filter="n = 1")
    assert second.queue("new").name == "new"
    assert second.queue("q1").filter == "n = 1"
    # Each process each of the two, and the one that it changes once more.
    assert len(decoded) <= 6
    assert set(decoded) == {2, 21}


def test_filters_count_from_the_change_on(two: Two) -> None:
    first, second = two.brokers
    first.create_queue("q", filter="n = 1")
    ids = second.publish([Message(b"", {"n": 1}), Message(b"", {"n": 2})])
    first.update_queue("q", filter="n = 2")
    ids += second.publish([Message(b"", {"n": 1}), Message(b"", {"n": 2})])
    first.create_queue("r", filter="n = 3")
    ids += second.publish([Message(b"", {"n": 3})])
    first.delete_queue("r")
    ids += second.publish([Message(b"", {"n": 3})])
    assert [d.message_id for d in first.claim("q", limit=9)] == [ids[0], ids[3]]
    assert second.store_stats().unrouted_total == 3
    with pytest.raises(QueueNotFound):
        second.claim("r")


def test_filters_count_in_a_batch_of_a_server_as_well(two: Two) -> None:
    from penstock.broker.requests import Joint, Publish  # noqa: PLC0415
    from penstock.packing import pack_messages  # noqa: PLC0415

    first, second = two.brokers
    first.create_queue("q", filter="n = 1")
    second.queues()
    first.update_queue("q", filter="n = 2")
    publish = Publish(pack_messages([Message(b"", {"n": 1}), Message(b"", {"n": 2})]), None)
    second.begin(Joint(publishes=[publish]))
    assert publish.error is None
    assert [d.message_id for d in first.claim("q", limit=9)] == publish.answer[1:]


def test_a_send_to_a_queue_that_another_has_changed(two: Two) -> None:
    first, second = two.brokers
    first.create_queue("q")
    second.send("q", b"")
    first.update_queue("q", filter="queue = 'q' AND size > 3")
    with pytest.raises(InvalidMessage):
        second.send("q", b"")
    second.send("q", b"long enough")
    assert first.stats("q").available == 2


def test_settings_of_both_are_kept(two: Two) -> None:
    first, second = two.brokers
    first.create_queue("q")
    second.update_queue("q", lease_ms=5_000)
    first.update_queue("q", max_attempts=3)
    second.update_queue("q", description="both")
    spec = first.queues()[0]
    assert (spec.lease_ms, spec.max_attempts, spec.description) == (5_000, 3, "both")
    assert spec.version == 4


def test_deleted_and_made_again_by_the_other(two: Two) -> None:
    first, second = two.brokers
    first.create_queue("q")
    second.send("q", b"old")
    held = first.claim("q")
    second.delete_queue("q")
    second.create_queue("q")
    assert first.ack(receipts(held))[0].status == "stale"
    first.send("q", b"new")
    assert [d.payload for d in second.claim("q", limit=9)] == [b"new"]


def test_a_backfill_of_one_is_known_to_the_other(two: Two) -> None:
    first, second = two.brokers
    first.publish([Message(b"%d" % n, {"n": n}) for n in range(5)])
    second.create_queue("q", filter="n >= 0")
    assert first.backfill("q").added == 5
    assert second.backfill("q").added == 0
    second.update_queue("q", filter="n >= 1")
    assert first.backfill("q").added == 0
    assert first.backfill_plan("q").stretches == second.backfill_plan("q").stretches


# --- claims ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordering", ["standard", "fifo"])
def test_claims_never_overlap(url: str, ordering: str) -> None:
    with penstock.open(url) as first, penstock.open(url) as second:
        first.create_queue("q", ordering=ordering)
        sent = first.publish(
            [Message(b"", {"queue": "q"}, group=f"{n % 7}", priority=n % 3) for n in range(400)]
        )

        def work(broker: Broker) -> list[int]:
            seen: list[int] = []
            while deliveries := broker.claim("q", limit=7, wait_ms=500):
                seen += [d.message_id for d in deliveries]
                assert all(broker.ack(receipts(deliveries)))
            return seen

        with ThreadPoolExecutor(4) as pool:
            seen = [each for found in pool.map(work, [first, second] * 2) for each in found]
        assert sorted(seen) == sent
        assert first.stats("q").done == 400
        assert_clean(first)


def test_a_lease_of_one_expires_for_the_other(two: Two) -> None:
    first, second = two.brokers
    first.create_queue("q", lease_ms=1_000)
    first.send("q", b"x")
    (held,) = first.claim("q")
    two.advance(999)
    assert second.claim("q") == []
    two.advance(1)
    (again,) = second.claim("q")
    assert again.attempts == 2
    assert first.ack([held.receipt])[0].status == "stale"
    assert second.ack([again.receipt])[0].status == "done"
    assert [each.end for each in first.attempts("q", again.message_id)] == ["expired", "acked"]


def test_who_sets_the_clock_of_a_machine_ends_no_lease_and_hides_no_message(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        penstock.open(url, background=False) as first,
        penstock.open(url, background=False) as second,
    ):
        first.create_queue("q", lease_ms=600_000)
        first.send("q", b"1")
        (held,) = first.claim("q")
        with monkeypatch.context() as wrong:
            told = time.time_ns  # noqa: TID251 - it is set here
            wrong.setattr(time, "time_ns", lambda: told() + 3_600_000_000_000)
            assert second.claim("q") == []
            assert second.sweep().leases_expired == 0
            second.send("q", b"2")
        second.send("q", b"3")
        assert [each.payload for each in first.claim("q", limit=9)] == [b"2", b"3"]
        assert all(first.ack([held.receipt]))
        assert_clean(first)


def test_each_lease_is_ended_once(two: Two) -> None:
    first, second = two.brokers
    first.create_queue("q", lease_ms=1_000, max_attempts=1)
    first.publish([Message(b"", {"queue": "q"})] * 30)
    for _ in range(10):
        second.claim("q", limit=3)
    two.advance(1_000)
    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(lambda broker: broker.sweep(), two.brokers))
    assert sum(each.leases_expired for each in counts) == 10
    assert sum(each.failed for each in counts) == 30
    stats = first.stats("q")
    assert (stats.failed, stats.lease_expired_total) == (30, 30)


def test_a_zone_that_one_has_emptied_is_filled_by_the_other(two: Two) -> None:
    first, second = two.brokers
    first.create_queue("q")
    for n in range(5):
        second.send("q", b"%d" % n)
        # Whoever published trusts for a moment that the pointer has vested; it is found after.
        got = first.claim("q", limit=5)
        two.advance(400)
        got += first.claim("q", limit=5)
        assert [d.payload for d in got] == [b"%d" % n]


@pytest.mark.parametrize("delay_ms", [0, 200])
def test_a_waiting_claim_is_woken_by_the_other(url: str, delay_ms: int) -> None:
    with penstock.open(url) as first, penstock.open(url) as second:
        first.create_queue("q")
        clock = SystemClock()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(first.claim, "q", wait_ms=60_000)
            while not first._runner._waiters:
                threading.Event().wait(0.001)
            began = clock.now_ms()
            second.publish([Message(b"x", {"queue": "q"}, delay_ms=delay_ms)])
            (delivery,) = waiting.result(timeout=50)
            assert delivery.payload == b"x"
            assert clock.now_ms() - began >= delay_ms - 50
        assert_clean(first)


def test_many_waiting_claims_are_woken_by_the_other(url: str) -> None:
    with penstock.open(url) as first, penstock.open(url) as second:
        first.create_queue("q")
        with ThreadPoolExecutor(5) as pool:
            waiting = [pool.submit(first.claim, "q", wait_ms=60_000)]
            while not first._runner._waiters:
                threading.Event().wait(0.001)
            # Others of this process get something without waiting: the first still waits.
            second.publish([Message(b"%d" % n, {"queue": "q"}) for n in range(5)])
            waiting += [pool.submit(first.claim, "q", wait_ms=60_000) for _ in range(4)]
            found = [each.result(timeout=50) for each in waiting]
        assert sorted(d.payload for each in found for d in each) == [b"%d" % n for n in range(5)]


def test_a_claim_that_finds_something_leaves_others_waiting(url: str) -> None:
    clock = ManualClock()
    with (
        penstock.open(url, background=False, clock=clock) as first,
        penstock.open(url, background=False, clock=clock) as second,
    ):
        first.create_queue("q")
        assert first.claim("q") == []
        second.publish([Message(b"", {"queue": "q"})] * 2)
        assert len(first.claim("q")) == 1
        first._store.take_woken()
        first._store.sweep(clock.now_ms(), 100)
        assert "q" in first._store.take_woken()


def test_a_claim_that_waits_for_a_queue_that_another_deletes(url: str) -> None:
    with penstock.open(url) as first, penstock.open(url) as second:
        first.create_queue("q")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(first.claim, "q", wait_ms=60_000)
            while not first._runner._waiters:
                threading.Event().wait(0.001)
            second.delete_queue("q")
            with pytest.raises(QueueNotFound):
                waiting.result(timeout=50)


# --- dedup, totals, the log -----------------------------------------------------------------------


def test_dedup_ids_are_one_for_all(two: Two) -> None:
    first, second = two.brokers
    first.create_queue("q")
    (one,) = first.publish([Message(b"1", {"queue": "q"}, dedup_id="x")])
    (two_,) = second.publish([Message(b"2", {"queue": "q"}, dedup_id="x")])
    assert one == two_
    assert second.store_stats().duplicates_total == 1


def test_the_same_dedup_id_at_the_same_time(url: str) -> None:
    with penstock.open(url) as first, penstock.open(url) as second:
        first.create_queue("q")
        start = threading.Barrier(2)

        def publish(broker: Broker) -> list[int]:
            found = []
            for n in range(30):
                start.wait(30)
                found += broker.publish([Message(b"", {"queue": "q"}, dedup_id=f"{n}")])
            return found

        with ThreadPoolExecutor(2) as pool:
            left, right = pool.map(publish, [first, second])
        assert left == right
        assert first.stats("q").available == 30
        assert first.store_stats().duplicates_total == 30


def test_no_cursor_passes_a_message_by_that_commits_late(url: str) -> None:
    """Whoever reads the logs while many publish sees every message, each log's in order."""
    brokers = [penstock.open(url, routing="pipeline") for _ in range(4)]
    over = threading.Event()

    def publish(broker: Broker) -> list[int]:
        ids: list[int] = []
        for n in range(40):
            ids += broker.publish([Message(b"x" * (n * 97 % 5_000), {"n": n})] * (n % 4 + 1))
        return ids

    def follow(broker: Broker) -> list[int]:
        seen: list[list[int]] = [[] for _ in broker.log_stats().cursors]
        at = [1] * len(seen)
        while True:
            last = over.is_set()
            found = 0
            for log in range(len(seen)):
                page = broker.read_log(log, begin=at[log], limit=50)
                seen[log] += [record.message_id for record in page.records]
                assert at[log] <= page.cursor.end
                at[log] = page.cursor.end
                found += len(page.records)
            if last and not found:
                assert all(seen)
                assert seen == [sorted(each) for each in seen]
                return sorted(chain(*seen))

    try:
        with ThreadPoolExecutor(4) as pool:
            reading = pool.submit(follow, brokers[3])
            written = sorted(each for ids in pool.map(publish, brokers[:3]) for each in ids)
            over.set()
            assert reading.result(timeout=120) == written
        assert written == list(range(1, len(written) + 1))
    finally:
        for broker in brokers:
            broker.close()


def test_a_tailer_is_fenced_by_another_process(url: str) -> None:
    two = Two(f"{url}?logs=1", routing="pipeline")
    first, second = two.brokers
    first.create_queue("q", filter="TRUE")
    second.publish([Message(b"")] * 3)
    epoch = first.take_epoch()
    page = first.read_log()
    assert second.take_epoch() == epoch + 1
    assigned = first.assign(0, page.cursor, {1: ["q"]}, epoch=epoch)
    assert assigned.status == "fenced"
    assert second.assign(0, page.cursor, {1: ["q"]}, epoch=epoch + 1).placed == 1
    assert first.assign(0, page.cursor, {1: ["q"]}).status == "stale"
    for broker in two.brokers:
        broker.close()


def test_a_page_matched_by_filters_that_another_has_changed(url: str) -> None:
    two = Two(f"{url}?logs=1", routing="pipeline")
    first, second = two.brokers
    first.create_queue("q", filter="n = 1")
    ids = first.publish([Message(b"", {"n": n}) for n in (1, 2)])
    page = first.read_log()
    second.update_queue("q", filter="n = 2", from_offset=ids[0])
    assert first.assign(0, page.cursor, {ids[0]: ["q"]}).status == "outdated"
    penstock.route_once(second)
    assert [d.message_id for d in first.claim("q", limit=9)] == ids[1:]
    for broker in two.brokers:
        broker.close()


def test_a_queue_that_is_made_again_is_not_removed_in_place_of_the_drained_one(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two.brokers
    first.create_queue("q")
    first.send("q", b"old")
    held = receipts(first.claim("q"))
    first.delete_queue("q", drain=True)
    second.queues()
    first.ack(held)
    store: Any = second._store
    has_live = store._has_live

    def make_again(*args: Any) -> bool:
        monkeypatch.setattr(store, "_has_live", has_live)
        found: bool = has_live(*args)
        # The other process has removed the queue meanwhile, and somebody has made it anew.
        two.advance(10)
        first.sweep()
        first.create_queue("q")
        first.send("q", b"new")
        first.ack(receipts(first.claim("q")))
        return found

    monkeypatch.setattr(store, "_has_live", make_again)
    second.sweep()
    assert store._has_live == has_live
    assert first.stats("q").done == second.stats("q").done == 1
