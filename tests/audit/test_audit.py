"""What an audit promises as a whole: what it keeps, what it leaves alone, what it can't mend."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import penstock
from penstock import Message
from penstock.clock import ManualClock
from penstock.model import State
from penstock.store.codec import opendata, records
from penstock.store.codec.opendata import payload_key
from penstock.store.codec.records import (
    decode_lease,
    decode_stored_item,
    encode_lease,
    encode_stored_item,
)
from penstock.store.kv.check import Kind, _Reading, audit
from penstock.store.kv.check import tables as audit_tables
from penstock.store.kv.history import sequence_of
from penstock.store.kv.queues import Counts, Queue, QueueTable
from penstock.testing.checking import assert_clean

DESIGNS = pytest.mark.parametrize("design", ["indexed", "buckets"])


def check(hand: Any, *, repair: bool = False) -> Any:
    return audit(hand.store, repair=repair, now_ms=hand.clock.now_ms())


@DESIGNS
@pytest.mark.parametrize("engine", ["memory", "rocksdb"])
@pytest.mark.parametrize("routing", ["inline", "pipeline"])
def test_a_clean_store_is_left_as_it_is(
    make_hand: Any, engine: str, design: str, routing: str
) -> None:
    hand = make_hand(engine, design, routing)
    before, commits = hand.contents(), hand.store.progress.commits
    report = check(hand, repair=True)
    assert report.clean
    assert report.rounds == 1
    assert hand.contents() == before
    assert hand.store.progress.commits == commits
    held = sum(len(ids) for ids in hand.ids.values())
    assert report.checked["payloads"] > 0
    assert report.checked["queues"] == 3 * len(["spec", "counters", "coverage"])
    assert 0 < report.checked["leases"] == report.checked["lease_expiry"] < held


@DESIGNS
def test_receipts_stay_good_when_their_lease_is_mended(make_hand: Any, design: str) -> None:
    hand = make_hand("memory", design, "inline")
    (lease,) = hand.leases_of("fifo")
    record = decode_lease(hand.get("leases", lease))
    assert len(record.ids) == 2
    hand.put("leases", lease, encode_lease(*record._replace(ids=record.ids[:1])))
    report = check(hand, repair=True)
    assert report.found == {Kind.NOT_HELD: 1}
    assert decode_lease(hand.get("leases", lease)).ids == record.ids
    assert all(hand.broker.ack(hand.receipts["fifo"]))
    assert_clean(hand.broker)


@DESIGNS
def test_a_message_without_its_lease_comes_back_at_once(make_hand: Any, design: str) -> None:
    hand = make_hand("memory", design, "inline")
    (lease,) = hand.leases_of("fifo")
    hand.delete("leases", lease)
    assert check(hand, repair=True).ok
    assert not any(hand.broker.ack(hand.receipts["fifo"]))
    again = hand.broker.claim("fifo", limit=10)
    assert set(hand.ids["fifo in flight"]) <= {each.message_id for each in again}
    assert {each.attempts for each in again if each.message_id in hand.ids["fifo in flight"]} == {2}


@DESIGNS
def test_what_is_done_stays_done(make_hand: Any, design: str) -> None:
    hand = make_hand("memory", design, "inline")
    message_id = hand.ids["retried"][0]
    ((key, value),) = hand.rows("history", opendata.DONE.prefix(b"plain"))
    (entry, _) = records.decode_ended(value, failed=False)
    part = opendata.DONE.key(b"plain", opendata.make_id(1, 0), 1)
    hand.put(
        "history", part, records.encode_ended([entry._replace(message_id=message_id)], failed=False)
    )
    assert check(hand, repair=True).ok
    done = {each.message_id for each in hand.broker.browse("plain", state=State.DONE)}
    assert done == {*hand.ids["done"], message_id}
    delivered = {each.message_id for each in hand.broker.claim("plain", limit=100)}
    assert message_id not in delivered
    assert key != part


def end_five(hand: Any, state: State) -> tuple[opendata.QueueKeys, list[int]]:
    """End five messages of a new queue in one part; return the keys of parts, and the ids."""
    hand.broker.create_queue("five", max_attempts=1, bucket_exponent=1)
    ids = hand.broker.publish([Message(b"x", {"queue": "five"}) for _ in range(5)])
    receipts = [each.receipt for each in hand.broker.claim("five", limit=5)]
    if state is State.FAILED:
        hand.broker.release(receipts, reason="no")
        return opendata.FAILED, ids
    hand.broker.ack(receipts)
    return opendata.DONE, ids


def ended(hand: Any, state: State) -> dict[int, int]:
    """Return the ids of the queue's ended messages by sequence number."""
    with hand.store.pin(hand.clock.now_ms()) as pinned:
        return {
            number: row[0]
            for keys in pinned.cut(state.value, "five", 1)
            for numbers, rows in pinned.ended_rows(state, keys)
            for number, row in zip(numbers, rows, strict=True)
        }


@pytest.mark.parametrize("state", [State.DONE, State.FAILED])
def test_first_claims_are_those_of_first_attempts(make_hand: Any, state: State) -> None:
    hand = make_hand("memory", "indexed", "inline")
    keys, ids = end_five(hand, state)
    ((part, value),) = hand.rows("history", keys.prefix(b"five"))
    failed = state is State.FAILED
    right = records.decode_ended(value, failed=failed)
    claimed_ms = right[0].first_claimed_ms
    assert {each.first_claimed_ms for each in right} == {claimed_ms}
    assert claimed_ms == hand.broker.attempts("five", ids[0])[0].claimed_at_ms
    # One is earlier than its attempt, one after its end without a record of its attempt, and one of
    # format 2.
    hand.delete("history", opendata.ATTEMPTS.key(b"five", ids[1], 1))
    hand.delete("history", opendata.ATTEMPTS.key(b"five", ids[3], 1))
    assert claimed_ms is not None
    # In a copy of a database: another broker, whose clock is behind, has ended the last one.
    late_ms = right[4].ended_at_ms + 3
    attempt = opendata.ATTEMPTS.key(b"five", ids[4], 1)
    given = dict(hand.rows("history", attempt))[attempt]
    recorded = records.decode_attempt(given)._replace(claimed_at=late_ms)
    hand.put("history", attempt, records.encode_attempt(recorded))
    after = (claimed_ms - 1, right[1].ended_at_ms + 1, None, claimed_ms, late_ms)
    wrong = [e._replace(first_claimed_ms=at) for e, at in zip(right, after, strict=True)]
    hand.put("history", part, records.encode_ended(wrong, failed=failed))
    report = check(hand, repair=True)
    assert report.found == {Kind.WRONG_FIELD: 2}
    assert_clean(hand.broker)
    ((_, value),) = hand.rows("history", keys.prefix(b"five"))
    mended = [each.first_claimed_ms for each in records.decode_ended(value, failed=failed)]
    assert mended == [claimed_ms, None, None, claimed_ms, late_ms]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a repair commit each row, so that it meets those that it has written."""
    monkeypatch.setattr(audit_tables, "_BATCH_CHANGES", 1)
    monkeypatch.setattr("penstock.store.kv.check.queue.LARGE_PAGE", 1)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("state", [State.DONE, State.FAILED])
def test_messages_of_a_mended_part_keep_their_numbers(make_hand: Any, state: State) -> None:
    hand = make_hand("memory", "indexed", "inline")
    keys, ids = end_five(hand, state)
    ((part, value),) = hand.rows("history", keys.prefix(b"five"))
    failed = state is State.FAILED
    entries = records.decode_ended(value, failed=failed)
    entries[1] = entries[1]._replace(metadata=b"?")
    hand.put("history", part, records.encode_ended(entries, failed=failed))
    assert check(hand, repair=True).ok
    assert_clean(hand.broker)
    assert ended(hand, state) == {0: ids[0], 2: ids[2], 3: ids[3], 4: ids[4]}
    if failed:
        assert hand.broker.redrive("five", message_ids=ids[2:4]) == 2
        assert_clean(hand.broker)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("state", [State.DONE, State.FAILED])
def test_a_part_of_several_times_is_cut_into_one_for_each(make_hand: Any, state: State) -> None:
    hand = make_hand("memory", "indexed", "inline")
    keys, ids = end_five(hand, state)
    ((part, value),) = hand.rows("history", keys.prefix(b"five"))
    failed = state is State.FAILED
    entries = records.decode_ended(value, failed=failed)
    times = [entries[0].ended_at_ms + each for each in (-3, -3, -2, 0, 0)]
    mixed = [
        each._replace(ended_at_ms=at, first_claimed_ms=None)
        for each, at in zip(entries, times, strict=True)
    ]
    # As copies by older versions have them: retention comes when all of the part is over.
    hand.put("history", part, records.encode_ended(mixed, failed=failed))
    first_ms = hand.core.history.first_ended_at_ms(hand.queue("five"), state)
    assert first_ms == times[-1]
    found = [(each.kind, each.key) for each in check(hand).violations]
    # The index of failed messages leads to the parts that there should be.
    index = [(Kind.WRONG_FIELD, found_key) for _, found_key in found[1:]]
    assert found == [(Kind.ORDER, part.hex()), *index]
    assert len(index) == (3 if failed else 0)
    assert check(hand, repair=True).ok
    assert_clean(hand.broker)
    assert ended(hand, state) == dict(enumerate(ids))
    with hand.store.pin(hand.clock.now_ms()) as pinned:
        firsts = [pinned.first_ended(state, "five", times[0] + each) for each in range(4)]
    assert firsts == [(number, times[number]) for number in (0, 2, 3, 3)]
    if failed:
        assert hand.broker.redrive("five", message_ids=ids[1:4]) == 3
        assert_clean(hand.broker)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("state", [State.DONE, State.FAILED])
@pytest.mark.parametrize(("exponent", "damaged"), [(1, False), (2, False), (1, True)])
def test_parts_that_share_numbers_are_told_apart(
    make_hand: Any, state: State, exponent: int, *, damaged: bool
) -> None:
    hand = make_hand("memory", "indexed", "inline")
    keys, ids = end_five(hand, state)
    ((part, value),) = hand.rows("history", keys.prefix(b"five"))
    failed = state is State.FAILED
    entries = records.decode_ended(value, failed=failed)
    second = keys.key(b"five", opendata.make_id(exponent, 0), 2)
    if damaged:
        # Those behind it keep numbers that the second part has.
        entries[1] = entries[1]._replace(metadata=b"?")
    hand.put("history", part, records.encode_ended(entries[:3], failed=failed))
    hand.put("history", second, records.encode_ended(entries[3:], failed=failed))
    for message_id in ids[3:] if failed else ():
        index = b"\x02\x0a" + opendata.terminated(b"five") + message_id.to_bytes(8, "big")
        hand.put("history", index, second)
    found = [(each.kind, each.key) for each in check(hand).violations]
    assert (Kind.ORDER, second.hex()) in found
    assert damaged or len(found) == 1
    # A process that dies after the first reading gives out no number that it has used.
    first = _Reading(hand.core, set(), repair=True, now_ms=0, keep_payloads=False)
    first.run()
    hand.core.load()
    counts = hand.queue("five").counts
    last = max(sequence_of(key) for key, _ in hand.rows("history", keys.prefix(b"five")))
    assert (counts.next_failed if failed else counts.next_done) > last
    assert check(hand, repair=True).ok
    assert_clean(hand.broker)
    # Behind all others, where a bucket begins.
    begin = 10**exponent
    numbers = dict(zip((0, 1, 2, begin, begin + 1), ids, strict=True))
    if damaged:
        del numbers[1]
    assert ended(hand, state) == numbers
    if failed:
        assert hand.broker.redrive("five", message_ids=list(numbers.values())) == len(numbers)
        assert_clean(hand.broker)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("state", [State.DONE, State.FAILED])
@pytest.mark.parametrize("fault", ["several times", "shared numbers"])
def test_a_repair_that_dies_between_two_commits_loses_no_history(
    make_hand: Any, monkeypatch: pytest.MonkeyPatch, state: State, fault: str
) -> None:
    left = 0
    died = True
    while died:
        hand = make_hand("memory", "indexed", "inline")
        keys, ids = end_five(hand, state)
        ((part, value),) = hand.rows("history", keys.prefix(b"five"))
        failed = state is State.FAILED
        entries = records.decode_ended(value, failed=failed)
        if fault == "several times":
            entries = [each._replace(ended_at_ms=each.message_id) for each in entries]
            hand.put("history", part, records.encode_ended(entries, failed=failed))
        else:
            second = keys.key(b"five", opendata.make_id(1, 0), 2)
            hand.put("history", part, records.encode_ended(entries[:3], failed=failed))
            hand.put("history", second, records.encode_ended(entries[3:], failed=failed))
        with monkeypatch.context() as patched:
            commits = iter([hand.engine.commit] * left)
            patched.setattr(hand.engine, "commit", lambda batch, rest=commits: next(rest)(batch))
            died = False
            try:
                check(hand, repair=True)
            except StopIteration:
                died = True
        hand.core.load()
        assert check(hand, repair=True).ok
        assert_clean(hand.broker)
        assert sorted(ended(hand, state).values()) == ids, f"after {left} commits"
        left += 1


@DESIGNS
def test_payloads_of_quarantined_records_are_kept(make_hand: Any, design: str) -> None:
    hand = make_hand("memory", design, "inline")
    if design == "indexed":
        table, key = "available", hand.rows("available", hand.number("fifo"))[0][0]
    else:
        table, key = "buckets", hand.rows("buckets", opendata.ACTIVE.prefix(b"fifo"))[0][0]
    payloads = [row for row, _ in hand.rows("payloads", b"\x01\x01")]
    hand.put(table, key, b"?")
    report = check(hand, repair=True)
    assert report.ok
    assert report.notes
    assert {note.kind for note in report.notes} == {Kind.GARBAGE}
    assert [row for row, _ in hand.rows("payloads", b"\x01\x01")] == payloads
    assert hand.get("default", b"\x02\x0f" + table.encode() + b"\0" + key)
    assert_clean(hand.broker)


@DESIGNS
def test_an_unrepaired_check_forgets_nothing(make_hand: Any, design: str) -> None:
    hand = make_hand("memory", design, "inline")
    hand.put("payloads", payload_key(4_000), b"?")
    with pytest.raises(AssertionError, match=r"1 violations .*\n.*garbage in payloads, key 0101"):
        assert_clean(hand.broker)
    assert check(hand).left == 1


def test_violations_are_bounded_and_all_counted(
    make_hand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = make_hand("memory", "indexed", "inline")
    monkeypatch.setattr(audit_tables, "KEPT", 10)
    for message_id in range(1_000, 1_050):
        hand.put("payloads", payload_key(message_id), b"?")
    report = check(hand)
    assert len(report.violations) == 10
    assert report.found == {Kind.GARBAGE: 50}
    assert report.left == 50
    repaired = check(hand, repair=True)
    assert repaired.ok
    assert all(each.repaired for each in repaired.violations)
    assert hand.get("payloads", payload_key(1_049)) is None


def test_repairs_commit_in_bounded_batches(make_hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = make_hand("memory", "indexed", "inline")
    monkeypatch.setattr(audit_tables, "_BATCH_CHANGES", 7)
    for message_id in range(1_000, 1_050):
        hand.put("payloads", payload_key(message_id), b"?")
    sizes: list[int] = []
    commit = hand.engine.commit

    def spy(batch: Any) -> None:
        sizes.append(len(batch))
        commit(batch)

    monkeypatch.setattr(hand.engine, "commit", spy)
    assert check(hand, repair=True).ok
    assert sum(sizes) == 100  # payload and count of each
    assert max(sizes) <= 7


def test_two_queues_of_one_number_are_beyond_repair() -> None:
    clock = ManualClock()
    with penstock.open("memory:", clock=clock, background=False) as broker:
        broker.create_queue("a")
        broker.create_queue("b")
        store: Any = broker._store
        core: Any = store
        twin = Queue(core.by_name["b"].spec, core.by_name["a"].number, Counts())
        batch = core.engine.batch()
        QueueTable(core.engine.table("queues")).put_spec(batch, twin)
        core.engine.commit(batch)
        core.load()
        report = audit(store, repair=True, now_ms=clock.now_ms())
        assert report.found == {Kind.NUMBER: 1}
        assert report.left == 1
        assert not report.ok
        assert not report.violations[0].repaired


def test_a_queue_that_took_nothing_takes_messages_again() -> None:
    """Coverage that was lost before the store was opened can't be told: it begins anew."""
    clock = ManualClock()
    with penstock.open("memory:", clock=clock, background=False) as broker:
        broker.create_queue("a")
        broker.publish([Message(b"1", {"queue": "a"})])
        store: Any = broker._store
        batch = store.engine.batch()
        batch.delete(b"\x02\x13a", store.engine.table("queues").family)
        store.engine.commit(batch)
        store.load()
        assert [queue.filter for queue in store.queues()] == [None]
        report = audit(store, repair=True, now_ms=clock.now_ms())
        assert report.found == {Kind.COVERAGE: 1}
        assert report.ok
        assert [queue.filter for queue in store.queues()] == ["queue = 'a'"]


def test_a_filter_that_was_garbled_is_told_from_what_the_queue_was_filled_by() -> None:
    clock = ManualClock()
    with penstock.open("memory:", clock=clock, background=False) as broker:
        broker.create_queue("a")
        store: Any = broker._store
        core: Any = store
        core.by_name["a"].respec(
            msgspec.structs.replace(core.by_name["a"].spec, filter="queue = 'a")
        )
        batch = core.engine.batch()
        core.queue_table.put_spec(batch, core.by_name["a"])
        core.engine.commit(batch)
        report = audit(store, repair=True, now_ms=clock.now_ms())
        assert report.found == {Kind.SPEC: 1}
        assert report.ok
        assert core.by_name["a"].spec.filter == "queue = 'a'"


@DESIGNS
def test_a_lease_from_the_future_is_mended(make_hand: Any, design: str) -> None:
    hand = make_hand("memory", design, "inline")
    (lease,) = hand.leases_of("fifo")
    record = decode_lease(hand.get("leases", lease))
    hand.put("leases", lease, encode_lease(*record._replace(claimed_at_ms=(1 << 63) - 1)))
    report = check(hand, repair=True)
    assert report.found == {Kind.WRONG_FIELD: 1}
    assert decode_lease(hand.get("leases", lease)) == record
    hand.clock.advance(86_400_000)
    assert hand.broker.sweep().leases_expired


def test_a_message_that_would_never_come_is_mended(make_hand: Any) -> None:
    hand = make_hand("memory", "indexed", "inline")
    message_id = hand.ids["delayed"][0]
    main = hand.number("plain") + message_id.to_bytes(8, "big")
    fields: list[Any] = list(decode_stored_item(hand.get("available", main)))
    fields[4] = (1 << 64) - 1
    hand.put("available", main, encode_stored_item(*fields[:5]))
    report = check(hand, repair=True)
    assert report.ok
    assert (Kind.WRONG_FIELD, main.hex()) in {(each.kind, each.key) for each in report.violations}
    assert_clean(hand.broker)
