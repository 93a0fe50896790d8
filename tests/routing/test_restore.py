"""What the log has let go of comes into a queue once, and goes as everything else does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.soaking import examples

import penstock
from penstock import InvalidInput, InvalidMessage, InvalidQueue, LogRecord, Message, State, limits
from penstock.clock import ManualClock
from penstock.store.filling import RESTORE_MESSAGES
from penstock.store.kv.tables import PAGE_BYTES
from penstock.store.policy import Coverage, Stretch
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOUR_MS = 3_600_000
Kept = tuple[LogRecord, bytes | None]


@pytest.fixture(params=["indexed", "buckets"])
def broker(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[penstock.Broker]:
    url = f"memory:?design={request.param}"
    with penstock.open(url, clock=clock, background=False) as opened:
        opened.configure_log(retention_ms=1)
        yield opened
        assert_clean(opened)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def publish(broker: penstock.Broker, count: int) -> list[Kept]:
    """Publish messages, and return them as an archive would have them."""
    first = broker.log_stats().end
    broker.publish(Message(b"p%d" % n, {"n": n}, f"g{n % 3}", n % 2) for n in range(count))
    records = broker.read_log(begin=first, limit=count).records
    return [(record, b"p%d" % int(record.attributes["n"] or 0)) for record in records]


def let_go(broker: penstock.Broker, clock: ManualClock) -> int:
    """Have the log let go of all that was published; return where it begins."""
    for _ in range(4):
        clock.advance(2 * HOUR_MS)
        broker.sweep()
    stats = broker.log_stats()
    assert stats.earliest == stats.end
    return stats.end


def payloads(broker: penstock.Broker) -> dict[int, bytes]:
    with broker.view() as view:
        return dict(view.payload_rows(0, limits.MAX_OFFSET))


def counts(filled: Any) -> tuple[int, int, int]:
    return filled.added, filled.already, filled.missing


def test_a_payload_that_is_gone_is_stored_again_and_goes_again(
    broker: penstock.Broker, clock: ManualClock
) -> None:
    broker.create_queue("first", filter="n >= 0", done_retention_ms=1)
    kept = publish(broker, 10)
    broker.ack([each.receipt for each in broker.claim("first", limit=10)])
    end = let_go(broker, clock)
    assert payloads(broker) == {}
    broker.create_queue("late", filter="n < 6")
    assert broker.backfill_plan("late").stretches == []
    plan = broker.backfill_plan("late", archived=True)
    assert (plan.stretches, plan.earliest, plan.end) == ([(1, end)], end, end)
    kept[0] = (kept[0][0], None)
    for expected in ((5, 0, 1), (0, 6, 0)):
        assert counts(broker.restore("late", 1, end, kept[:6])) == expected
        assert len(payloads(broker)) == 5
    assert broker.backfill_plan("late", archived=True).stretches == []
    got = {each.message_id: each for each in broker.claim("late", limit=10)}
    assert sorted(got) == [record.message_id for record, _ in kept[1:6]]
    for record, payload in kept[1:6]:
        delivery = got[record.message_id]
        assert (delivery.payload, delivery.attributes) == (payload, record.attributes)
        assert (delivery.group, delivery.priority) == (record.group, record.priority)
        assert delivery.published_at_ms == record.published_at_ms
    assert_clean(broker)
    broker.ack([each.receipt for each in got.values()])
    assert broker.trim("late", state="done", before=100) == 5
    assert payloads(broker) == {}


def test_a_payload_that_is_here_is_held_once_more(
    broker: penstock.Broker, clock: ManualClock
) -> None:
    broker.create_queue("first", filter="n >= 0")
    broker.create_queue("second", filter="n < 3")
    kept = publish(broker, 5)
    end = let_go(broker, clock)
    broker.create_queue("late", filter="n >= 0")
    # Whether the archive has payloads makes no difference while the store has them.
    assert counts(broker.restore("late", 1, end, [(r, None) for r, _ in kept])) == (5, 0, 0)
    ids = [record.message_id for record, _ in kept]
    assert broker.collect(ids, dry_run=False).freed_messages == 0
    broker.sweep()
    assert_clean(broker)
    for name, left in (("first", 5), ("second", 5), ("late", 0)):
        broker.delete_queue(name)
        assert len(payloads(broker)) == left
        assert_clean(broker)


def test_what_the_queue_has_had_stays_known(broker: penstock.Broker, clock: ManualClock) -> None:
    """By whichever filter, live or by a backfill, long after the log has forgotten it."""
    broker.create_queue("q", filter="n < 2", done_retention_ms=1)
    kept = publish(broker, 10)
    broker.update_queue("q", filter="n = 5")
    assert broker.backfill("q").added == 1
    broker.purge("q")
    let_go(broker, clock)
    kept += publish(broker, 10)
    broker.purge("q")
    end = let_go(broker, clock)
    broker.update_queue("q", filter="n < 7")
    plan = broker.backfill_plan("q", archived=True)
    assert plan.stretches == [(1, end)]
    wanted = [each for each in kept if int(each[0].attributes["n"] or 0) < 7]
    # n = 0, 1 and 5 of the first ten, 5 of the second.
    assert counts(broker.restore("q", 1, end, wanted)) == (14 - 4, 4, 0)
    assert broker.backfill_plan("q", archived=True).stretches == []
    broker.update_queue("q", filter="n < 8")
    wanted = [each for each in kept if int(each[0].attributes["n"] or 0) < 8]
    assert counts(broker.restore("q", 1, end, wanted)) == (2, 14, 0)


def test_steps_are_bounded_and_go_on(
    broker: penstock.Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = RESTORE_MESSAGES * 2 + 10
    broker.create_queue("first", filter="n >= 0", unclaimed_retention_ms=1)
    kept = publish(broker, count)
    end = let_go(broker, clock)
    assert payloads(broker) == {}
    broker.create_queue("q", filter="n >= 0")
    step, steps = broker._store.fill, []

    def failing(*args: Any, **named: Any) -> Any:
        steps.append(args)
        if len(steps) == 2:
            raise penstock.StorageFailed("the disk is on fire")
        return step(*args, **named)

    monkeypatch.setattr(broker._store, "fill", failing)
    with pytest.raises(penstock.StorageFailed, match="on fire"):
        broker.restore("q", 1, end, kept)
    assert broker.stats("q").available == RESTORE_MESSAGES
    assert_clean(broker)
    (stretch,) = broker.backfill_plan("q", archived=True).stretches
    assert stretch == (RESTORE_MESSAGES + 1, end)
    done = broker.restore("q", 1, end, kept)
    assert counts(done) == (count - RESTORE_MESSAGES, RESTORE_MESSAGES, 0)
    assert broker.stats("q").available == count
    coverage = broker._store.by_name["q"].coverage  # type: ignore[attr-defined]
    assert len(coverage.backfilled) == 1
    monkeypatch.setattr("penstock.store.filling.RESTORE_BYTES", 10)
    broker.create_queue("bytes", filter="n < 9")
    before = broker._store.progress.commits
    assert broker.restore("bytes", 1, end, kept[:9]).added == 9
    # Five payloads of two bytes fit, then the four that are left.
    assert broker._store.progress.commits - before == 2


def test_a_restored_message_is_as_late_as_it_was(
    broker: penstock.Broker, clock: ManualClock
) -> None:
    broker.create_queue("first", filter="n >= 0", done_retention_ms=1)
    day_ms = 24 * HOUR_MS
    broker.publish([Message(b"", {"n": 1}, delay_ms=day_ms), Message(b"", {"n": 2})])
    records = broker.read_log(begin=1, limit=2).records
    end = let_go(broker, clock)
    broker.create_queue("late", filter="n >= 0", ordering="fifo", delay_ms=2 * day_ms)
    assert broker.restore("late", 1, end, [(each, None) for each in records]).added == 2
    assert [each.message_id for each in broker.claim("late", limit=5)] == []
    clock.advance(day_ms)
    assert [each.message_id for each in broker.claim("late", limit=5)] == [1]


def test_what_is_refused(broker: penstock.Broker, clock: ManualClock) -> None:
    broker.create_queue("first", filter="n >= 0")
    old = publish(broker, 3)
    end = let_go(broker, clock)
    new = publish(broker, 3)
    broker.create_queue("q", filter="n >= 0")
    record, payload = old[0]
    for begin, until, records, says in (
        (1, end + 3, new, "the log is kept from offset"),
        (1, end, [old[1], old[0]], "must ascend"),
        (2, end, old, "must ascend"),
        (1, end, [(record, b"more")], "payload of 4 bytes, not of 2"),
        (1, end, [(msgspec.structs.replace(record, priority=256), payload)], "priority"),
        (1, end, [(msgspec.structs.replace(record, group="g" * 300), payload)], "group"),
        (1, end, old * limits.MAX_RESTORE_MESSAGES, "messages in one restore"),
    ):
        with pytest.raises((InvalidInput, InvalidMessage), match=says):
            broker.restore("q", begin, until, records)
    with pytest.raises(InvalidInput, match="plan the backfill again"):
        broker.restore("q", 1, end, old, filter="n > 0")
    assert broker.claim("first")
    broker.delete_queue("first", drain=True)
    with pytest.raises(InvalidQueue, match="draining"):
        broker.restore("first", 1, end, old)
    assert broker.stats("q").available == 0


def test_old_stretches_go_and_the_queue_says_what_it_knows(
    broker: penstock.Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.policy.MAX_COVERAGE_STRETCHES", 3)
    broker.create_queue("q", filter="n < 0")
    kept: list[Kept] = []
    for number in range(6):
        kept += publish(broker, 2)
        broker.update_queue("q", filter=f"n < -{number + 1}")
    coverage = broker._store.by_name["q"].coverage  # type: ignore[attr-defined]
    assert len(coverage.live) == 7
    assert coverage.known_from == 0, "the log needs them all"
    end = let_go(broker, clock)
    broker.update_queue("q", filter="n >= 0")
    assert len(coverage.live) == 3
    known_from = coverage.known_from
    assert known_from == 9
    with pytest.raises(InvalidInput, match=f"from offset {known_from} on"):
        broker.backfill_plan("q", archived=True)
    with pytest.raises(InvalidInput, match="might come twice"):
        broker.restore("q", 1, end, kept)
    plan = broker.backfill_plan("q", from_=known_from, archived=True)
    assert plan.stretches == [(known_from, end)]
    rest = [each for each in kept if each[0].message_id >= known_from]
    assert broker.restore("q", known_from, end, rest).added == len(rest) == 4


def test_a_record_of_before_knows_what_the_log_keeps(clock: ManualClock) -> None:
    with penstock.open("memory:", clock=clock, background=False) as broker:
        broker.configure_log(retention_ms=1)
        broker.create_queue("q", filter="n >= 0")
        publish(broker, 3)
        end = let_go(broker, clock)
        core: Any = broker._store
        family = core.engine.table("queues").family
        for record in ({"live": [Stretch(1, None, "n >= 0")]}, None):
            batch = core.engine.batch()
            if record is None:
                batch.delete(b"\x02\x13q", family)
            else:
                batch.put(b"\x02\x13q", msgspec.msgpack.encode(record), family)
            core.engine.commit(batch)
            core.load()
            # Of nothing at all not even that is known.
            known_from = end if record else core.log.end
            assert core.by_name["q"].coverage.known_from == known_from
        with pytest.raises(InvalidInput, match="has forgotten"):
            broker.backfill_plan("q", archived=True)


def test_a_restore_waits_for_a_collection(
    broker: penstock.Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_queue("first", filter="n >= 0", unclaimed_retention_ms=1)
    kept = publish(broker, 4)
    end = let_go(broker, clock)
    broker.create_queue("late", filter="n < 2")
    from penstock.store.kv.snapshot import Pinned  # noqa: PLC0415

    look = Pinned.referenced
    other = threading.Thread(target=broker.restore, args=("late", 1, end, kept[:2]))

    def restore(self: Pinned, message_ids: set[int]) -> set[int]:
        held = look(self, message_ids)
        # What was looked at must not change before the collection is done.
        other.start()
        other.join(0.1)
        assert other.is_alive()
        return held

    monkeypatch.setattr(Pinned, "referenced", restore)
    ids = [record.message_id for record, _ in kept]
    assert broker.collect(ids, dry_run=False).freed_messages == 0
    other.join(60)
    assert len(payloads(broker)) == 2


def test_a_queue_that_was_made_anew_is_not_trimmed(
    broker: penstock.Broker, clock: ManualClock
) -> None:
    def work() -> int:
        made_at_ms = broker.create_queue("q", filter="n >= 0").created_at_ms
        publish(broker, 3)
        broker.ack([each.receipt for each in broker.claim("q", limit=3)])
        return made_at_ms

    before = work()
    broker.delete_queue("q")
    clock.advance(1)
    after = work()
    assert after > before
    assert broker.trim("q", state=State.DONE, before=9, created_at_ms=before) == 0
    assert broker.stats("q").done == 3
    assert broker.trim("q", state=State.DONE, before=9, created_at_ms=after) == 3
    with pytest.raises(InvalidInput, match="created_at_ms"):
        broker.trim("q", state=State.DONE, before=9, created_at_ms=-1)


spans = st.tuples(st.integers(0, 30), st.integers(1, 10), st.sampled_from(["a", "b"]))


@given(st.lists(spans, max_size=12))
def test_notes_join_and_cover_what_was_noted(noted: Sequence[tuple[int, int, str]]) -> None:
    coverage = Coverage([])
    model: dict[str, set[int]] = {"a": set(), "b": set()}
    for begin, width, text in noted:
        coverage.note(begin, begin + width, text)
        model[text] |= set(range(begin, begin + width))
    for text, offsets in model.items():
        mine = [s for s in coverage.backfilled if s.filter == text]
        assert {at for s in mine for at in range(s.begin, s.end or 0)} == offsets
        # Joined: as few stretches as there can be.
        assert len(mine) == len([at for at in offsets if at - 1 not in offsets])
        for at in range(45):
            assert (coverage.skip(at, text) != at) == (at in offsets)


@examples(25)
@given(st.lists(spans, max_size=20), st.integers(0, 45))
def test_what_is_forgotten_is_said_to_be(
    noted: Sequence[tuple[int, int, str]], earliest: int
) -> None:
    coverage = Coverage([Stretch(50, None, "c")], known_from=0)
    for begin, width, text in noted:
        coverage.note(begin, begin + width, text)
    before = list(coverage.backfilled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.store.policy.MAX_COVERAGE_STRETCHES", 3)
        coverage.bound(earliest)
    assert coverage.known_from is not None
    assert coverage.known_from <= earliest
    lost = [each for each in before if each not in coverage.backfilled]
    assert all(each.end is not None and each.end <= coverage.known_from for each in lost)
    left = [each for each in coverage.backfilled if each.end is not None and each.end <= earliest]
    assert len(before) + 1 <= 3 or not left or len(coverage.backfilled) + 1 <= 3
    assert coverage.live


class ReadTable:
    """A table that notes how much each call has read."""

    def __init__(self, table: Any) -> None:
        self.table, self.family, self.read = table, table.family, list[int]()

    def multi_get(self, keys: list[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = self.table.multi_get(keys)
        self.read.append(sum(len(each or b"") for each in found))
        return found

    def get(self, key: bytes) -> bytes | None:
        return self.multi_get([key])[0]


def test_payloads_are_not_read_all_at_once_to_see_that_they_are_there(
    broker: penstock.Broker, clock: ManualClock
) -> None:
    store: Any = broker._store
    payload = bytes(1 << 20)
    broker.publish(Message(payload, {"n": n}) for n in range(20))
    store.payloads.table = table = ReadTable(store.payloads.table)
    broker.create_queue("q", filter="TRUE")
    assert broker.backfill("q").added == 20
    assert len(payload) < max(table.read) <= PAGE_BYTES
    table.read.clear()
    assert store.collect(list(range(1, 21)), clock.now_ms(), dry_run=True).freed_messages == 20
    assert max(table.read) == len(payload)
    store.payloads.table = table.table
