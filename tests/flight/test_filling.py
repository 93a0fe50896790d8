from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock import InvalidInput, InvalidQueue, Message, QueueNotFound, State, limits
from penstock.clock import ManualClock
from penstock.flight import protocol
from penstock.flight.protocol import OFFSETS
from penstock.store.filling import FILL_MESSAGES, FILL_WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.flight.client import FlightStore
    from penstock.store.filling import Filled

HOUR_MS = 3_600_000


def offsets(values: Iterable[int]) -> list[pa.RecordBatch]:
    return [pa.record_batch({"offset": pa.array(list(values), pa.int64())})]


def publish(broker: penstock.Broker, count: int) -> None:
    for start in range(0, count, 10_000):
        some = range(start, min(count, start + 10_000))
        broker.publish(Message(b"x", {"n": n}, group=f"g{n % 7}") for n in some)


def fill(store: FlightStore, queue: str, begin: int, end: int, wanted: Iterable[int]) -> Filled:
    return store.fill(offsets(wanted), queue=queue, begin=begin, end=end)


def test_a_backfill_is_planned_and_filled_once(broker: penstock.Broker, store: FlightStore) -> None:
    broker.configure_log(logs=3)
    publish(broker, 100)
    broker.create_queue("q", filter="n < 10")
    publish(broker, 20)
    plan = store.backfill_plan("q")
    # What has been live since the queue was made is not to be done.
    assert (plan.stretches, plan.filter, plan.end) == ([(1, 101)], "n < 10", 121)
    counts = fill(store, "q", 1, 51, range(1, 11))
    assert (counts.added, counts.already, counts.missing) == (10, 0, 0)
    assert store.backfill_plan("q").stretches == [(51, 101)]
    again = fill(store, "q", 1, 51, range(1, 11))
    assert (again.added, again.already) == (0, 10)
    assert fill(store, "q", 51, 101, []).added == 0
    assert store.backfill_plan("q").stretches == []
    assert broker.stats("q").available == 20
    # The broker's own backfill finds nothing left to do either.
    assert broker.backfill("q").added == 0


def test_a_fill_whose_sender_dies_fills_nothing(
    broker: penstock.Broker, store: FlightStore
) -> None:
    """Its stream ends like one that is whole."""
    publish(broker, 20)
    broker.create_queue("q", filter="n < 10")
    command = protocol.FillCommand("q", 1, 21, rows=10)
    for rows in (offsets(range(1, 6)), [], offsets(range(1, 12))):
        with pytest.raises(InvalidInput, match="rows early"):
            store._put(command, rows, OFFSETS)
    assert store.backfill_plan("q").stretches == [(1, 21)]
    assert fill(store, "q", 1, 21, range(1, 11)).added == 10


def test_plans_follow_what_is_asked_for(
    broker: penstock.Broker, store: FlightStore, clock: ManualClock
) -> None:
    publish(broker, 10)
    clock.advance(1_000)
    noon_ms = clock.now_ms()
    publish(broker, 10)
    broker.create_queue("q", filter="n < 5")
    assert store.backfill_plan("q", from_=4, to=8).stretches == [(4, 8)]
    assert store.backfill_plan("q", from_="earliest", to=8).stretches == [(1, 8)]
    assert store.offset_at(noon_ms) == 11
    assert (store.offset_at(0), store.offset_at(limits.MAX_OFFSET)) == (1, 21)
    fill(store, "q", 5, 8, [5])
    assert store.backfill_plan("q").stretches == [(1, 5), (8, 21)]
    broker.update_queue("q", filter="n < 6")
    assert store.backfill_plan("q").stretches == [(1, 21)]
    with pytest.raises(InvalidInput, match="'latest'"):
        store.backfill_plan("q", from_="latest")
    with pytest.raises(QueueNotFound):
        store.backfill_plan("nope")


def test_what_the_queue_has_had_is_not_filled(broker: penstock.Broker, store: FlightStore) -> None:
    broker.create_queue("q", filter="n < 5")
    publish(broker, 10)
    broker.update_queue("q", filter="n < 8")
    assert store.backfill_plan("q").stretches == [(1, 11)]
    broker.ack([each.receipt for each in broker.claim("q", limit=3)])
    counts = fill(store, "q", 1, 11, range(1, 9))
    assert (counts.added, counts.already, counts.missing) == (3, 5, 0)
    stats = broker.stats("q")
    assert (stats.available, stats.done) == (5, 3)


def test_a_message_that_the_filter_does_not_want_is_left_out(
    broker: penstock.Broker, store: FlightStore
) -> None:
    publish(broker, 10)
    broker.create_queue("q", filter="n < 3")
    counts = fill(store, "q", 1, 11, range(1, 11))
    assert (counts.added, counts.already) == (3, 7)


def test_a_payload_that_is_gone_is_missing(broker: penstock.Broker, store: FlightStore) -> None:
    broker.create_queue("first", filter="n >= 0", done_retention_ms=1)
    publish(broker, 10)
    broker.purge("first")
    broker.create_queue("q", filter="n < 5")
    counts = fill(store, "q", 1, 11, range(1, 6))
    assert (counts.added, counts.already, counts.missing) == (0, 0, 5)


def test_a_large_fill_goes_in_bounded_steps(broker: penstock.Broker, store: FlightStore) -> None:
    count = FILL_WINDOW + FILL_MESSAGES * 2 + 10
    publish(broker, count)
    broker.create_queue("q", filter="n >= 0")
    before = broker._store.progress.commits
    counts = fill(store, "q", 1, count + 1, range(1, count + 1))
    assert counts.added == count
    assert broker._store.progress.commits - before >= count // FILL_MESSAGES
    assert broker.stats("q").available == count
    # One stretch, not one for each step.
    kept: Any = broker._store
    assert len(kept.queue("q").coverage.backfilled) == 1


def test_a_fill_that_was_interrupted_goes_on(
    broker: penstock.Broker, store: FlightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = FILL_MESSAGES * 2
    publish(broker, count)
    broker.create_queue("q", filter="n >= 0")
    steps = []
    step = broker._store.fill

    def failing(*args: Any, **options: Any) -> object:
        steps.append(args)
        if len(steps) == 2:
            raise penstock.StorageFailed("the disk is on fire")
        return step(*args, **options)

    monkeypatch.setattr(broker._store, "fill", failing)
    with pytest.raises(penstock.StorageFailed, match="on fire"):
        fill(store, "q", 1, count + 1, range(1, count + 1))
    assert broker.stats("q").available == FILL_MESSAGES
    assert store.backfill_plan("q").stretches == [(FILL_MESSAGES + 1, count + 1)]
    counts = fill(store, "q", 1, count + 1, range(1, count + 1))
    assert (counts.added, counts.already) == (FILL_MESSAGES, FILL_MESSAGES)
    assert fill(store, "q", 1, count + 1, range(1, count + 1)).added == 0
    assert broker.stats("q").available == count


def test_a_changed_filter_refuses_what_was_matched_before(
    broker: penstock.Broker, store: FlightStore
) -> None:
    publish(broker, 10)
    broker.create_queue("q", filter="n < 5")
    plan = store.backfill_plan("q")
    broker.update_queue("q", filter="n < 9")
    with pytest.raises(InvalidInput, match="plan the backfill again"):
        store.fill(offsets(range(1, 6)), queue="q", begin=1, end=11, filter=plan.filter)
    assert store.backfill_plan("q").stretches == [(1, 11)]


def test_wrong_fills(piped: penstock.Broker, piped_store: FlightStore) -> None:
    store = piped_store
    publish(piped, 10)
    piped.create_queue("q", filter="n >= 0")
    with pytest.raises(InvalidInput, match="routed up to offset 1"):
        fill(store, "q", 1, 11, range(1, 11))
    assert store.backfill_plan("q").stretches == []
    with pytest.raises(QueueNotFound):
        fill(store, "nope", 1, 11, [])
    for wrong in ([2, 1], [1, 1], [0], [11]):
        with pytest.raises(InvalidInput, match="must ascend and lie in"):
            fill(store, "q", 1, 11, wrong)
    nulls = pa.record_batch({"offset": pa.array([None], pa.int64())})
    with pytest.raises(InvalidInput, match="a fill: offset of a row is null"):
        store.fill([nulls], queue="q", begin=1, end=11)
    publish(piped, 5)
    while penstock.route_once(piped):
        pass
    assert piped.claim("q")
    piped.delete_queue("q", drain=True)
    with pytest.raises(InvalidQueue, match="draining"):
        fill(store, "q", 1, 5, [])


# --- redrive, trim ------------------------------------------------------------------------------


def fail_all(broker: penstock.Broker, queue: str) -> None:
    while taken := broker.claim(queue, limit=100):
        broker.release([each.receipt for each in taken], reason="no")


def test_redrive(broker: penstock.Broker, store: FlightStore) -> None:
    broker.create_queue("q", filter="n >= 0", max_attempts=1)
    publish(broker, 10)
    fail_all(broker, "q")
    assert store.redrive("q", message_ids=[1, 2, 99]) == 2
    assert store.redrive("q", where="n > 7") == 2
    assert store.read_table("failed", columns=["message_id"]).num_rows == 6
    assert store.redrive("q") == 6
    with pytest.raises(QueueNotFound):
        store.redrive("nope")


@pytest.mark.parametrize("state", ["done", "failed"])
def test_trim_takes_what_was_read(broker: penstock.Broker, store: FlightStore, state: str) -> None:
    broker.create_queue("q", filter="n >= 0", max_attempts=1, bucket_exponent=0)
    publish(broker, 10)
    if state == "failed":
        fail_all(broker, "q")
    else:
        broker.ack([each.receipt for each in broker.claim("q", limit=10)])
    numbers = sorted(store.read_table(state, columns=["sequence"]).column(0).to_pylist())
    read = (
        store.read_table(state, columns=["sequence"], where=f"sequence < {numbers[6]}")
        .column(0)
        .to_pylist()
    )
    assert sorted(read) == numbers[:6]
    assert store.trim("q", state=state, before=max(read) + 1) == 6
    assert store.trim("q", state=state, before=max(read) + 1) == 0
    assert sorted(store.read_table(state).column("sequence").to_pylist()) == numbers[6:]
    with pytest.raises(InvalidInput, match="only done and failed"):
        store.trim("q", state="available", before=1)


# --- collect ------------------------------------------------------------------------------------


def forget_log(broker: penstock.Broker, clock: ManualClock) -> None:
    """Have retention drop every segment but an empty one."""
    broker.configure_log(retention_ms=1)
    for _ in range(2):
        clock.advance(2 * HOUR_MS)
        broker.sweep()


def orphan(broker: penstock.Broker, message_ids: Iterable[int]) -> None:
    """Make payloads that nobody holds, as a fault might."""
    core: Any = broker._store
    if not hasattr(core, "engine"):
        for message_id in message_ids:
            core.database.execute(f"INSERT INTO messages VALUES ({message_id}, 0, '', 'lost')")
        return
    batch = core.engine.batch()
    for message_id in message_ids:
        batch.put(b"\x01\x01" + message_id.to_bytes(8, "big"), b"lost", core.payloads.table.family)
    core.engine.commit(batch)


def test_collect_frees_what_nobody_holds(
    broker: penstock.Broker, store: FlightStore, clock: ManualClock
) -> None:
    broker.create_queue("q", filter="n >= 5", done_retention_ms=0)
    publish(broker, 10)
    forget_log(broker, clock)
    assert broker.log_stats().earliest > 10
    orphan(broker, [2, 3])
    everything = list(range(20))
    assert store.collect(everything).freed_messages == 2
    assert store.read_table("messages").num_rows == 5 + 2
    freed = store.collect(everything, dry_run=False)
    assert (freed.freed_messages, freed.freed_bytes) == (2, 8)
    assert store.collect(everything, dry_run=False).freed_messages == 0
    assert sorted(store.read_table("messages").column("message_id").to_pylist()) == [6, 7, 8, 9, 10]


def test_collect_leaves_what_the_log_still_has(broker: penstock.Broker, store: FlightStore) -> None:
    publish(broker, 10)
    assert store.read_table("messages").num_rows == 10
    assert store.collect(list(range(11)), dry_run=False).freed_messages == 0
    broker.create_queue("late", filter="n >= 0")
    assert broker.backfill("late").added == 10


def test_collect_leaves_what_is_not_routed_yet(
    piped: penstock.Broker, piped_store: FlightStore, clock: ManualClock
) -> None:
    piped.create_queue("q", filter="n >= 0")
    publish(piped, 10)
    forget_log(piped, clock)
    assert piped_store.collect(list(range(11)), dry_run=False).freed_messages == 0
    penstock.route_once(piped)
    assert piped.stats("q").available == 10


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), design=st.sampled_from(["indexed", "buckets"]))
def test_collect_never_takes_a_payload_that_is_held(data: st.DataObject, design: str) -> None:
    clock = ManualClock()
    with penstock.open(f"memory:?design={design}", clock=clock, background=False) as broker:
        for name, text in (("a", "n < 20"), ("b", "n >= 10"), ("c", "n = 3")):
            broker.create_queue(
                name, filter=text, max_attempts=1, bucket_exponent=1, done_retention_ms=5_000
            )
        for _ in range(data.draw(st.integers(1, 3))):
            publish(broker, 30)
            for name in ("a", "b", "c"):
                taken = broker.claim(name, limit=data.draw(st.integers(1, 30)))
                cut = data.draw(st.integers(0, len(taken)))
                broker.ack([each.receipt for each in taken[:cut]])
                kept = data.draw(st.integers(cut, len(taken)))
                broker.release([each.receipt for each in taken[cut:kept]])
            if data.draw(st.booleans()):
                broker.redrive("a")
            if data.draw(st.booleans()):
                broker.purge("b", states=[data.draw(st.sampled_from(list(State)))])
            if data.draw(st.booleans()):
                forget_log(broker, clock)
        ids = range(1, broker.log_stats().end)
        lost = data.draw(st.sets(st.sampled_from(list(ids)), max_size=5))
        held = {
            entry.message_id: entry.payload
            for name in ("a", "b", "c")
            for state in State
            for entry in broker.browse(name, state=state, limit=1_000)
        }
        assert None not in held.values()
        orphan(broker, lost - held.keys())
        broker.collect(ids, dry_run=False)
        after = {
            entry.message_id: entry.payload
            for name in ("a", "b", "c")
            for state in State
            for entry in broker.browse(name, state=state, limit=1_000)
        }
        assert after == held
        earliest = broker.log_stats().earliest
        with broker.view() as pinned:
            kept_ids = {message_id for message_id, _ in pinned.payload_rows(0, 10_000)}
        assert {each for each in kept_ids if each < earliest} <= held.keys()


def test_collect_stops_where_a_record_can_not_be_read(
    broker: penstock.Broker, store: FlightStore, clock: ManualClock, *, on_sql: bool
) -> None:
    broker.create_queue("q", filter="n >= 0", done_retention_ms=0)
    publish(broker, 10)
    broker.ack([each.receipt for each in broker.claim("q", limit=10)])
    forget_log(broker, clock)
    if on_sql:
        pytest.skip("what holds a message is a column, not part of a record")
    core: Any = broker._store
    table = core.engine.table("history")
    key = table.scan(b"\x02\x03", b"\x02\x04", 1)[0][0]
    batch = core.engine.batch()
    batch.put(key, b"\xff\xff damaged", table.family)
    core.engine.commit(batch)
    with pytest.raises(penstock.CorruptRecord, match="nobody knows"):
        store.collect(list(range(11)), dry_run=False)
    assert store.read_table("messages").num_rows == 10
