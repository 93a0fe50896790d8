from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from penstock import InvalidInput, LimitReached, Message, QueueExists, limits
from penstock.filters import Matcher, parse
from penstock.flight import protocol
from penstock.flight.protocol import MATCHES, LogTicket

if TYPE_CHECKING:
    from collections.abc import Sequence

    import penstock
    from penstock.clock import ManualClock
    from penstock.flight.client import FlightStore
    from penstock.model import LogStretch, RoutePlan


def pairs(rows: Sequence[tuple[int, str]]) -> list[pa.RecordBatch]:
    offsets = pa.array([offset for offset, _ in rows], pa.int64())
    return [
        pa.record_batch({"offset": offsets, "queue": pa.array([q for _, q in rows], pa.string())})
    ]


def publish(broker: penstock.Broker, count: int, **attributes: str) -> None:
    broker.publish(Message(b"x", {"n": n, **attributes}, group=f"g{n}") for n in range(count))


def match(store: FlightStore, stretch: LogStretch) -> list[tuple[int, str]]:
    """Do what a router does with a stretch."""
    live = store.filters(stretch.begin)
    assert live.until is None or live.until >= stretch.end
    matcher = Matcher({name: parse(text) for name, text in live.filters.items()})
    page = store.read(LogTicket(stretch.log, stretch.begin, stretch.end))
    found = []
    for batch in page:
        for row in batch.to_pylist():
            attributes = {name: value for name, value in row["attributes"] if value is not None}
            attributes["n"] = int(attributes["n"])
            names = matcher.match([(attributes, row["group"], row["priority"], 0, row["size"])])[0]
            found += [(row["offset"], name) for name in names]
    return found


def stage_all(store: FlightStore, plan: RoutePlan, name: str = "s") -> list[str]:
    names = []
    for stretch in plan.stretches:
        names.append(f"{name}-{stretch.log}")
        store.stage(
            names[-1],
            pairs(match(store, stretch)),
            log=stretch.log,
            begin=stretch.begin,
            end=stretch.end,
            filters_version=plan.filters_version,
            epoch=plan.epoch or None,
        )
    return names


def test_a_routed_store_is_as_if_it_were_inline(
    piped: penstock.Broker, piped_store: FlightStore
) -> None:
    store = piped_store
    piped.configure_log(logs=3)
    piped.create_queue("even", filter="n IN (0, 2, 4, 6, 8)")
    publish(piped, 10)
    piped.create_queue("all", filter="n >= 0")
    publish(piped, 10)
    piped.configure_log(logs=2)
    publish(piped, 10)
    piped.update_queue("even", filter="n = 0")
    publish(piped, 10)
    for _ in range(100):
        plan = store.route_plan(max_offsets=7)
        if not plan.stretches:
            break
        assert all(stretch.end - stretch.begin <= 7 for stretch in plan.stretches)
        results = store.commit_stages(stage_all(store, plan), epoch=None)
        assert {each.status for each in results} == {"applied"}
    assert plan.lag == {0: 0, 1: 0, 2: 0}
    active = store.read_table("active").to_pylist()
    assert sorted(r["message_id"] for r in active if r["queue"] == "all") == list(range(11, 41))
    assert len([row for row in active if row["queue"] == "even"]) == 15 + 1
    assert store.log_stats().routed_up_to == 41
    assert store.log_stats().cursors == piped.log_stats().cursors


def test_committing_twice_changes_nothing(piped: penstock.Broker, piped_store: FlightStore) -> None:
    store = piped_store
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 20)
    names = stage_all(store, store.route_plan())
    first = store.commit_stages(names)
    assert (first[0].status, first[0].placed, first[0].cursor) == ("applied", 20, 21)
    for _ in range(2):
        again = store.commit_stages(names)
        assert (again[0].status, again[0].placed, again[0].cursor) == ("stale", 0, 21)
    # As a replay does it: staged again, under other names.
    store.stage("other", pairs([(1, "q"), (2, "q")]), log=0, begin=1, end=21)
    assert store.commit_stages(["other"])[0].status == "stale"
    assert piped.stats("q").available == 20


def test_a_stage_whose_sender_dies_is_refused(
    piped: penstock.Broker, piped_store: FlightStore
) -> None:
    """Its stream ends like one that is whole, and it would be assigned at once."""
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 20)
    epoch = piped_store.take_epoch()
    command = protocol.StageCommand("s", 0, 1, 21, rows=20, epoch=epoch, assign=True)
    with pytest.raises(InvalidInput, match="15 rows early"):
        piped_store._put(command, pairs([(n, "q") for n in range(1, 6)]), MATCHES)
    assert piped.log_stats().routed_up_to == 1
    assert piped.stats("q").available == 0


def test_stages_join_and_overlaps_are_trimmed(
    piped: penstock.Broker, piped_store: FlightStore
) -> None:
    store = piped_store
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 30)
    store.stage("c", pairs([(n, "q") for n in range(21, 31)]), log=0, begin=21, end=31)
    store.stage("a", pairs([(n, "q") for n in range(1, 11)]), log=0, begin=1, end=11)
    store.stage("b", pairs([(n, "q") for n in range(6, 21)]), log=0, begin=6, end=21)
    # The same task, run twice.
    store.stage("b2", pairs([(n, "q") for n in range(6, 21)]), log=0, begin=6, end=21)
    store.stage("inner", [], log=0, begin=12, end=14)
    result = store.commit_stages(["c", "inner", "b2", "a", "b"])
    assert [(r.status, r.placed, r.cursor) for r in result] == [("applied", 30, 31)]
    assert piped.stats("q").available == 30


def test_a_straddling_replay_is_trimmed(piped: penstock.Broker, piped_store: FlightStore) -> None:
    store = piped_store
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 20)
    store.stage("a", pairs([(n, "q") for n in range(1, 11)]), log=0, begin=1, end=11)
    store.commit_stages(["a"])
    store.stage("b", pairs([(n, "q") for n in range(6, 21)]), log=0, begin=6, end=21)
    result = store.commit_stages(["a", "b"])[0]
    assert (result.status, result.placed, result.cursor) == ("trimmed", 10, 21)


def test_a_gap_is_refused(piped: penstock.Broker, piped_store: FlightStore) -> None:
    store = piped_store
    piped.configure_log(logs=2)
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 20)
    store.stage("good", [], log=0, begin=1, end=11)
    store.stage("a", [], log=1, begin=1, end=5)
    store.stage("b", [], log=1, begin=6, end=21)
    with pytest.raises(InvalidInput, match=r"stages of log 1 leave a gap: \[5, 6\)"):
        store.commit_stages(["good", "a", "b"])
    assert store.log_stats().cursors == {0: 1, 1: 1}
    ahead = store.commit_stages(["b"])[0]
    assert (ahead.status, ahead.cursor) == ("ahead", 1)
    # Nothing was lost: the stage is still there when its turn comes.
    store.stage("middle", [], log=1, begin=5, end=6)
    assert store.commit_stages(["a", "middle", "b"])[0].status == "applied"


def test_unknown_and_dropped_stages(piped: penstock.Broker, piped_store: FlightStore) -> None:
    store = piped_store
    publish(piped, 5)
    with pytest.raises(InvalidInput, match="stage 'nope' is not here"):
        store.commit_stages(["nope"])
    store.stage("s", [], log=0, begin=1, end=6)
    assert store.drop_stages(["s", "nope"]) == 1
    with pytest.raises(InvalidInput, match="stage 's' is not here"):
        store.commit_stages(["s"])
    store.stage("s", [], log=0, begin=1, end=6)
    store.stage("s", [], log=0, begin=1, end=3)
    assert store.commit_stages(["s", "s"])[0].cursor == 3
    assert store.commit_stages([]) == []


def test_an_empty_stage_moves_the_cursor(piped: penstock.Broker, piped_store: FlightStore) -> None:
    store = piped_store
    publish(piped, 5)
    store.stage("none", [], log=0, begin=1, end=4)
    empty = pairs([])
    store.stage("empty", empty, log=0, begin=4, end=6)
    result = store.commit_stages(["none", "empty"])[0]
    assert (result.status, result.cursor, result.placed) == ("applied", 6, 0)


def test_a_fenced_epoch(piped: penstock.Broker, piped_store: FlightStore) -> None:
    store = piped_store
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 5)
    old = store.take_epoch()
    new = store.take_epoch()
    assert new == old + 1 == store.route_plan().epoch
    for name, in_stage, in_commit in (("a", old, None), ("b", None, old), ("c", old, new)):
        store.stage(name, pairs([(1, "q")]), log=0, begin=1, end=6, epoch=in_stage)
        result = store.commit_stages([name], epoch=in_commit)[0]
        assert (result.status, result.cursor, result.placed) == ("fenced", 1, 0)
    store.stage("d", pairs([(1, "q")]), log=0, begin=1, end=6, epoch=new)
    assert store.commit_stages(["d"], epoch=new)[0].status == "applied"


def test_stages_are_assigned_when_the_cursor_has_come_to_them(
    piped: penstock.Broker, piped_store: FlightStore
) -> None:
    store = piped_store
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 30)
    epoch = store.take_epoch()

    def stage(name: str, begin: int, end: int) -> int:
        rows = pairs([(n, "q") for n in range(begin, end)])
        store.stage(name, rows, log=0, begin=begin, end=end, epoch=epoch, assign=True)
        return store.log_stats().cursors[0]

    assert stage("c", 21, 31) == 1
    assert stage("a", 1, 11) == 11
    assert piped.stats("q").available == 10
    assert stage("b", 6, 21) == 31
    # As a task that runs a second time does it, and one whose answer got lost.
    assert stage("b2", 6, 21) == stage("a", 1, 11) == 31
    for _ in range(2):
        result = store.commit_stages(["c", "a", "b", "b2"], epoch=epoch)
        assert [(r.status, r.cursor, r.placed) for r in result] == [("stale", 31, 0)]
    assert piped.stats("q").available == 30


def test_the_commit_tells_why_a_stage_was_not_assigned(
    piped: penstock.Broker, piped_store: FlightStore
) -> None:
    store = piped_store
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 20)
    epoch, version = store.take_epoch(), store.route_plan().filters_version
    later = store.take_epoch()
    rows = pairs([(n, "q") for n in range(1, 21)])
    here = {"log": 0, "begin": 1, "end": 21, "assign": True}
    store.stage("fenced", rows, **here, epoch=epoch)
    piped.update_queue("q", filter="n > 10", from_offset=5)
    store.stage("outdated", rows, **here, epoch=later, filters_version=version)
    store.stage("strange", pairs([(1, "q")]), **{**here, "end": 30}, epoch=later)
    assert store.log_stats().cursors == {0: 1}
    for status in ("fenced", "outdated"):
        assert store.commit_stages([status])[0].status == status
    with pytest.raises(InvalidInput, match="log 0 ends at offset 21"):
        store.commit_stages(["strange"])
    # Those in the way keep no other from being assigned.
    store.stage("right", rows, **here, epoch=later)
    assert store.log_stats().cursors == {0: 21}
    assert piped.stats("q").available == 20


def test_no_stage_is_left_when_many_come_at_once(
    piped: penstock.Broker, piped_store: FlightStore
) -> None:
    store = piped_store
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 200)

    def stage(offset: int) -> None:
        here = {"log": 0, "begin": offset, "end": offset + 1, "assign": True}
        store.stage(f"s{offset}", pairs([(offset, "q")]), **here)

    with ThreadPoolExecutor(8) as threads:
        # Every offset once, in no order.
        list(threads.map(stage, [n * 73 % 200 + 1 for n in range(200)]))
    assert store.log_stats().cursors == {0: 201}
    assert piped.stats("q").available == 200


def test_outdated_filters(piped: penstock.Broker, piped_store: FlightStore) -> None:
    store = piped_store
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 20)
    plan = store.route_plan()
    names = stage_all(store, plan)
    piped.update_queue("q", filter="n > 10", from_offset=5)
    result = store.commit_stages(names)[0]
    assert (result.status, result.cursor) == ("outdated", 1)
    # The next plan stops where the filter changes.
    assert [(s.begin, s.end) for s in store.route_plan().stretches] == [(1, 5)]
    assert store.filters(4).until == 5
    while plan.stretches:
        plan = store.route_plan()
        store.commit_stages(stage_all(store, plan, "again"))
    assert piped.stats("q").available == 4 + 9


def test_a_queue_that_is_gone_gets_nothing(
    piped: penstock.Broker, piped_store: FlightStore
) -> None:
    store = piped_store
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 5)
    store.stage("s", pairs([(1, "q"), (2, "q")]), log=0, begin=1, end=6)
    piped.delete_queue("q")
    assert store.commit_stages(["s"])[0].placed == 0


def test_wrong_stages(piped: penstock.Broker, piped_store: FlightStore) -> None:
    store = piped_store
    publish(piped, 5)
    with pytest.raises(InvalidInput, match=r"an offset is not in \[1, 3\)"):
        store.stage("s", pairs([(1, "q"), (3, "q")]), log=0, begin=1, end=3)
    nulls = pa.record_batch({"offset": pa.array([None], pa.int64()), "queue": ["q"]})
    with pytest.raises(InvalidInput, match="a row has a null"):
        store.stage("s", [nulls], log=0, begin=1, end=3)
    with pytest.raises(InvalidInput, match="end is 1; allowed are 3"):
        store.stage("s", [], log=0, begin=3, end=1)
    with pytest.raises(InvalidInput, match="stage has 300 bytes"):
        store.stage("s" * 300, [], log=0, begin=1, end=3)
    store.stage("beyond", [], log=0, begin=1, end=100)
    with pytest.raises(InvalidInput, match="ends at offset 6"):
        store.commit_stages(["beyond"])
    store.stage("strange", [], log=9, begin=1, end=2)
    with pytest.raises(InvalidInput, match="no log 9"):
        store.commit_stages(["strange"])


def test_stages_are_bounded_and_expire(
    piped: penstock.Broker,
    piped_store: FlightStore,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = piped_store
    monkeypatch.setattr(limits, "MAX_STAGED_BYTES", 20_000)
    monkeypatch.setattr(limits, "MAX_STAGES", 5)
    rows = pairs([(n, "q") for n in range(1, 1_001)])
    store.stage("a", rows, log=0, begin=1, end=1_001)
    with pytest.raises(LimitReached, match="bytes would be staged"):
        store.stage("b", rows, log=0, begin=1, end=1_001)
    store.stage("a", rows, log=0, begin=1, end=1_001)
    for n in range(4):
        store.stage(f"small{n}", [], log=0, begin=1, end=2)
    with pytest.raises(LimitReached, match="5 stages wait"):
        store.stage("more", [], log=0, begin=1, end=2)
    clock.advance(limits.MAX_STAGE_IDLE_MS)
    store.stage("b", rows, log=0, begin=1, end=1_001)
    with pytest.raises(InvalidInput, match="stage 'a' is not here"):
        store.commit_stages(["a"])


def test_an_inline_store_has_nothing_to_route(broker: penstock.Broker, store: FlightStore) -> None:
    publish(broker, 3)
    with pytest.raises(InvalidInput, match="routes inline"):
        store.route_plan()
    store.stage("s", [], log=0, begin=1, end=2)
    with pytest.raises(InvalidInput, match="routes inline"):
        store.commit_stages(["s"])
    broker.create_queue("q")
    with pytest.raises(QueueExists):
        broker.create_queue("q", filter="n = 1")
    assert store.filters(broker.log_stats().end).filters == {"q": "queue = 'q'"}


# --- parts ----------------------------------------------------------------------------------------


def part(store: FlightStore, name: str, rows: Sequence[tuple[int, str]], **fields: int) -> str:
    """Stage some of the assignments of a stretch."""
    given = {"log": 0, "begin": 1, "end": 11, **fields}
    store.stage(name, pairs(rows), **given, part=True)
    return name


def ids_in(broker: penstock.Broker, queue: str) -> list[int]:
    return sorted(entry.message_id for entry in broker.browse(queue, limit=1_000))


def test_parts_of_a_stretch_are_all_of_it_together(
    piped: penstock.Broker, piped_store: FlightStore
) -> None:
    store = piped_store
    for name in ("a", "b"):
        piped.create_queue(name, filter="n >= 0")
    publish(piped, 20)
    names = [
        part(store, "x-1", [(1, "a"), (4, "a"), (4, "b")]),
        # One message may be in several parts, for other queues or for the same.
        part(store, "x-2", [(9, "b"), (1, "b"), (4, "a")]),
        part(store, "x-none", []),
        part(store, "y-1", [(12, "a")], begin=11, end=21),
    ]
    # Nothing is assigned before the commit, which alone knows whether they are all.
    assert piped.log_stats().routed_up_to == 1
    part(store, "x-late", [(2, "a")])
    done = store.commit_stages(names, others="x-")
    assert [(each.status, each.placed) for each in done] == [("applied", 6)]
    assert (ids_in(piped, "a"), ids_in(piped, "b")) == ([1, 4, 12], [1, 4, 9])
    # What another attempt has left is gone, and the same commit may come again.
    with pytest.raises(InvalidInput, match="'x-late' is not here"):
        store.commit_stages(["x-late"])
    assert [each.status for each in store.commit_stages(names, others="x-")] == ["stale"]
    assert (ids_in(piped, "a"), ids_in(piped, "b")) == ([1, 4, 12], [1, 4, 9])


def test_parts_that_are_given_up(piped: penstock.Broker, piped_store: FlightStore) -> None:
    store = piped_store
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 10)
    for name in ("x-1", "x-2", "y-1"):
        part(store, name, [(1, "q")])
    assert store.drop_stages(["x-1"], others="x-") == 2
    assert store.drop_stages([], others="") == 0
    with pytest.raises(InvalidInput, match="assigned with the others, by their commit"):
        store.stage("z", [], log=0, begin=1, end=11, part=True, assign=True)
    # Filters that change meanwhile are told by the commit, of all parts.
    version = store.route_plan().filters_version
    names = [
        part(store, "x-1", [(1, "q")], filters_version=version),
        part(store, "x-2", [(2, "q")], filters_version=version),
    ]
    piped.update_queue("q", filter="n < 0", from_offset=2)
    assert [each.status for each in store.commit_stages(names)] == ["outdated"]
    assert ids_in(piped, "q") == []


def test_a_stage_that_another_has_made_needless_takes_no_room(
    piped: penstock.Broker, piped_store: FlightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = piped_store
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 100)
    # Room for one of them.
    monkeypatch.setattr(limits, "MAX_STAGED_BYTES", 2_000)
    rows = pairs([(offset, "q") for offset in range(1, 101)])
    for name in ("first", "again", "and again"):
        store.stage(name, rows, log=0, begin=1, end=101, assign=True)
    stages = store.commit_stages(["again"])
    assert [(each.status, each.placed) for each in stages] == [("stale", 0)]
    assert piped.stats("q").available == 100
