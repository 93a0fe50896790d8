"""``penstock copy`` between every two kinds of store: the copy is as the source was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.copying.places import HOUR_MS, KINDS, fill, show, work_off

import penstock
from penstock import Message, State
from penstock.clock import ManualClock
from penstock.copying import copy
from penstock.server import in_process_server

if TYPE_CHECKING:
    from tests.copying.places import Places


def sorted_ids(found: dict[str, list[int]]) -> dict[str, list[int]]:
    return {queue: sorted(ids) for queue, ids in found.items()}


PAIRS = [(source, target, "inline") for source in KINDS for target in KINDS]
# Who routes is the same for all of them.
PAIRS += [(kind, kind, "pipeline") for kind in KINDS]


@pytest.mark.parametrize(("source_kind", "target_kind", "routing"), PAIRS)
def test_a_copy_shows_what_the_source_shows(
    places: Places, source_kind: str, target_kind: str, routing: str
) -> None:
    source, target = places.make(source_kind, "source"), places.make(target_kind, "target")
    with penstock.open(source, background=False, routing=routing) as broker:  # type: ignore[arg-type]
        fill(broker)
    report = copy(source, target)
    assert report.in_flight == 2
    with penstock.open(target, background=False, create=False) as broker:
        shown = show(broker)
        assert broker.check().violations == []
        assert broker.info().store_id == report.target_id != report.source_id
        taken = work_off(broker)
    with penstock.open(source, background=False, create=False) as broker:
        assert shown == show(broker, copied_at_ms=report.at_ms)
        expected = work_off(broker)
    assert sorted_ids(taken) == sorted_ids(expected)
    # The order of groups, of which one was in flight, is the same.
    assert taken["lines"] == expected["lines"]


@pytest.mark.parametrize("target_kind", KINDS)
@pytest.mark.parametrize("source_kind", ["rocks-indexed", "sql"])
def test_a_copy_goes_on_as_the_source_would(
    places: Places, source_kind: str, target_kind: str
) -> None:
    source, target = places.make(source_kind, "source"), places.make(target_kind, "target")
    clock = ManualClock(now_ms=1_900_000_000_000)
    with penstock.open(source, background=False, clock=clock) as broker:
        fill(broker)
    report = copy(source, target, clock=clock)
    clock.advance(report.at_ms - clock.now_ms() + 1)
    ended: dict[str, Any] = {}
    for url in (source, target):
        with penstock.open(url, background=False, create=False, clock=clock) as broker:
            # Nothing comes in twice, be it that a move had brought it in.
            added = {queue.name: broker.backfill(queue.name).added for queue in broker.queues()}
            assert added["orders"] == 0 < added["late"]
            assert broker.move("bad", "copies", state=State.FAILED) == 4
            last = max(entry.message_id for entry in broker.browse("lines", limit=1_000))
            first = broker.publish([Message(b"new", {"queue": "orders", "price": 50})])[0]
            assert first > last
            assert broker.explain("copies", first).state is State.AVAILABLE
            # What was in flight, and all delays, are over.
            later = ManualClock(now_ms=clock.now_ms() + 2 * HOUR_MS)
        with penstock.open(url, background=False, create=False, clock=later) as broker:
            broker.sweep()
            work_off(broker)
            broker.sweep()
            assert broker.check().violations == []
            ended[url] = (
                added,
                {
                    queue.name: sorted(
                        (entry.message_id, entry.attempts)
                        for entry in broker.browse(queue.name, state=State.DONE, limit=1_000)
                        if entry.message_id != first
                    )
                    for queue in broker.queues()
                },
            )
    assert ended[source] == ended[target]


@pytest.mark.parametrize(
    ("source_kind", "target_kind"),
    [("rocks-indexed", "sql"), ("slate", "rocks-indexed"), ("sql", "rocks-buckets")],
)
def test_a_last_attempt_in_flight_is_over_in_the_copy(
    places: Places, source_kind: str, target_kind: str
) -> None:
    source, target = places.make(source_kind, "source"), places.make(target_kind, "target")
    with penstock.open(source, background=False) as broker:
        broker.create_queue("dead")
        broker.create_queue("over", max_messages=3, overflow="drop_oldest")
        broker.create_queue("dying", max_attempts=1, dead_letter="dead")
        broker.create_queue("once", max_attempts=1)
        broker.create_queue("twice", max_attempts=2)
        # What is due in the copy by its own settings waits until it is opened.
        for queue in ("over", "over", "dying"):
            broker.send(queue, b"x")
        for queue in ("over", "dying"):
            assert broker.claim(queue, limit=2, lease_ms=HOUR_MS)
        broker.update_queue("over", max_messages=1)
        for queue in ("once", "once", "twice"):
            broker.send(queue, b"x")
        broker.release([broker.claim("once")[0].receipt], reason="no")
        broker.redrive("once")
        for queue in ("once", "twice"):
            assert broker.claim(queue, limit=2, lease_ms=HOUR_MS, consumer="busy")
        before = {queue: broker.stats(queue) for queue in ("once", "twice")}
    report = copy(source, target)
    assert report.in_flight == 6
    failed = {each.name: each.messages["failed"] for each in report.queues}
    assert failed == {"dead": 0, "over": 0, "dying": 1, "once": 2, "twice": 0}
    later = ManualClock(now_ms=report.at_ms + 2 * HOUR_MS)
    with penstock.open(target, background=False, create=False, clock=later) as broker:
        broker.sweep()
        assert [broker.stats(name).available for name in ("dead", "over")] == [1, 1]
        assert len(broker.claim("twice", limit=2)) == 1
        assert not broker.claim("once", limit=2)
        stats, source_stats = broker.stats("once"), before["once"]
        assert (stats.failed, stats.failed_total) == (2, source_stats.failed_total + 2)
        assert stats.lease_expired_total == 2
        for entry in broker.browse("once", state=State.FAILED):
            assert (entry.reason, entry.ended_at_ms) == ("copied", report.at_ms)
            last = broker.attempts("once", entry.message_id)[-1]
            assert (last.number, last.end) == (entry.attempts, penstock.AttemptEnd.EXPIRED)
            assert last.consumer == "busy"
        assert broker.redrive("once") == 2
        assert broker.check().violations == []


@pytest.mark.parametrize("source_kind", ["rocks-indexed", "sql"])
def test_history_in_a_copy_is_found_and_kept_as_that_of_the_source(
    places: Places, source_kind: str
) -> None:
    source, target = places.make(source_kind, "source"), places.make("rocks-buckets", "target")
    clock = ManualClock(now_ms=1_900_000_000_000)
    with penstock.open(source, background=False, clock=clock) as broker:
        settings: dict[str, Any] = {"max_attempts": 1, "bucket_exponent": 1}
        broker.create_queue("q", done_retention_ms=HOUR_MS, failed_retention_ms=HOUR_MS, **settings)
        broker.publish([Message(b"x", {"queue": "q"}) for _ in range(24)])
        for _ in range(6):
            held = [each.receipt for each in broker.claim("q", limit=4)]
            broker.ack(held[:2])
            broker.release(held[2:], reason="no")
            clock.advance(1_000)
        begun_ms = clock.now_ms() - 6_000
    report = copy(source, target, clock=clock)
    # A database has a clock of its own.
    assert source_kind == "sql" or report.at_ms == clock.now_ms()
    with penstock.open(target, background=False, create=False, clock=clock) as broker:
        store = broker._store
        for state in (State.DONE, State.FAILED):
            for entry in broker.browse("q", state=state):
                found = list(broker.browse("q", message_id=entry.message_id))
                assert [each.message_id for each in found] == [entry.message_id]
                assert broker.explain("q", entry.message_id).state is state
            with store.pin(clock.now_ms()) as pinned:
                times = [begun_ms + 1_000 * second for second in range(6)]
                firsts = [pinned.first_ended(state, "q", time) for time in times]
            assert firsts == [(2 * second, time) for second, time in enumerate(times)]
        # Each of them is over in its own time, and until then a sweep changes nothing.
        for second in range(6):
            clock.advance(max(0, begun_ms + HOUR_MS + 1_000 * second - 1 - clock.now_ms()))
            commits = store.progress.commits
            counts = broker.sweep()
            assert (counts.total, store.progress.commits) == (0, commits)
            assert counts.next_due_ms == clock.now_ms() + 1
            clock.advance(1)
            assert broker.sweep().removed == 4
        assert broker.check().violations == []


@pytest.mark.parametrize("target_kind", ["rocks-indexed", "sql"])
@pytest.mark.parametrize("source_kind", ["rocks-buckets", "sql"])
def test_a_log_of_several_parts_is_copied_as_far_as_it_is_kept(
    places: Places, source_kind: str, target_kind: str
) -> None:
    source, target = places.make(source_kind, "source"), places.make(target_kind, "target")
    clock = ManualClock()
    with penstock.open(source, background=False, clock=clock, routing="pipeline") as broker:
        broker.configure_log(logs=3, retention_ms=3 * HOUR_MS)
        broker.create_queue("q")
        for hour in range(6):
            sent = [Message(b"%d" % n, {"queue": "q"}, group=f"g{n}") for n in range(20)]
            broker.publish([*sent, Message(b"nowhere")])
            if hour < 5:
                penstock.route_once(broker)
            clock.advance(HOUR_MS + 1)
            broker.sweep()
        before = broker.log_stats()
        assert 1 < before.earliest < before.routed_up_to < before.end
    copy(source, target, clock=clock)
    with penstock.open(target, background=False, create=False, clock=clock) as broker:
        after = broker.log_stats()
        assert (after.earliest, after.routed_up_to) == (before.earliest, before.routed_up_to)
        assert {log: after.cursors[log] for log in before.cursors} == before.cursors
        while penstock.route_once(broker):
            pass
        assert broker.stats("q").available == 120
        assert broker.check().violations == []
        clock.advance(24 * HOUR_MS)
        for _ in range(5):
            broker.sweep()
        assert broker.log_stats().earliest > before.earliest
        assert broker.check().violations == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_is_copied_while_it_serves(places: Places, kind: str) -> None:
    source, target = places.make(kind, "source"), places.make("rocks-indexed", "target")
    with penstock.open(source, background=False) as broker:
        fill(broker)
        with in_process_server(broker) as listener:
            told: list[Any] = []

            def publish(*step: Any) -> None:
                # After the snapshot: it is not in the copy.
                told.append(step)
                broker.publish([Message(b"later", {"queue": "orders"})])

            expected = show(broker)
            report = copy(listener.location, target, progress=publish)
    assert told
    with penstock.open(target, background=False, create=False) as broker:
        assert broker.check().violations == []
        assert len(show(broker)["log"][1]) == len(expected["log"][1]) == report.log


@pytest.mark.parametrize("kind", ["rocks-indexed", "sql"])
def test_a_copy_of_a_served_store_goes_on(places: Places, kind: str) -> None:
    source, target = places.make(kind, "source"), places.make("rocks-buckets", "target")
    steps: list[str] = []

    def stop(*_: Any) -> None:
        steps.append("")
        if len(steps) == 5:
            raise KeyboardInterrupt

    with penstock.open(source, background=False) as broker:
        fill(broker)
        with in_process_server(broker) as listener:
            with pytest.raises(KeyboardInterrupt):
                copy(listener.location, target, progress=stop)
            report = copy(listener.location, target)
            assert report.resumed
        expected = show(broker, copied_at_ms=report.at_ms)
    with penstock.open(target, background=False, create=False) as broker:
        assert show(broker) == expected
