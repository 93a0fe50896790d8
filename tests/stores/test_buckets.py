"""The bucket design by itself, against a model of what an active set is."""

from __future__ import annotations

import tracemalloc
from itertools import repeat
from typing import Any

import msgspec
import pytest

import penstock
from penstock.clock import ManualClock
from penstock.engines.memory import MemoryEngine
from penstock.errors import CorruptRecord, InvalidInput
from penstock.model import Ordering, QueueSpec, State
from penstock.store.codec import buckets, opendata
from penstock.store.codec.buckets import (
    Summary,
    decode_summary,
    encode_head,
    encode_held,
    pack_summary,
)
from penstock.store.kv.queues import Counts, Queue
from penstock.store.live import LIVE_TABLES, Item, bucket_cache, lane_of, split_lane
from penstock.store.live.buckets import BucketActive

NOW = 1_700_000_000_000
LEASE = bytes(range(16))


class Bench:
    """A queue on a memory engine, driven call by call, each call in a commit of its own."""

    def __init__(self, *, fifo: bool = False, exponent: int = 1) -> None:
        self.engine = MemoryEngine(LIVE_TABLES["buckets"])
        self.table = self.engine.table("buckets")
        self.aside: list[tuple[str, bytes, bytes, str]] = []
        ordering = Ordering.FIFO if fifo else Ordering.STANDARD
        spec = QueueSpec(name="q", filter="true", ordering=ordering, bucket_exponent=exponent)
        self.queue = Queue(spec, 7, Counts())
        self.now_ms = NOW
        self.next_id = 1
        self.open()

    def open(self) -> None:
        """Start from disk, with counters as a store reads them back."""
        counts = Counts(*msgspec.structs.astuple(self.queue.counts))
        self.queue = Queue(self.queue.spec, self.queue.number, counts)
        self.active = BucketActive(self.engine, self.quarantine)
        self.active.load(self.queue)

    def quarantine(self, table: str, key: bytes, value: bytes, why: str) -> bool:
        self.aside.append((table, key, value, why))
        return True

    def commit(self, batch: Any) -> None:
        for table, key, _, _ in self.aside:
            batch.delete(key, self.engine.table(table))
        self.queue.counts.time_floor_ms = self.now_ms
        self.engine.commit(batch)

    def resize(self, exponent: int) -> None:
        spec = self.queue.spec
        self.queue.respec(msgspec.structs.replace(spec, bucket_exponent=exponent))

    def items(self, *lanes: tuple[str, int, int]) -> list[Item]:
        """Make new messages from group, priority and delay."""
        made = []
        for group, priority, delay_ms in lanes:
            metadata = f"m{self.next_id}".encode()
            lane = lane_of(group, priority)
            made.append(Item(0, self.next_id, lane, 0, 0, self.now_ms + delay_ms, metadata))
            self.next_id += 1
        return made

    def add(self, *lanes: tuple[str, int, int]) -> list[Item]:
        items = self.items(*lanes)
        self.add_items(items)
        return items

    def add_items(self, items: list[Item]) -> None:
        batch = self.engine.batch()
        self.active.add(batch, self.queue, items, self.now_ms)
        self.commit(batch)

    def take(self, limit: int, lease: bytes = LEASE) -> list[Item]:
        batch = self.engine.batch()
        grants = repeat((lease, self.now_ms + 30_000))
        taken = self.active.take(batch, self.queue, limit, grants, self.now_ms)
        self.commit(batch)
        return taken

    def take_ids(self, limit: int) -> list[int]:
        return [item.message_id for item in self.take(limit)]

    def settle(self, items: list[Item]) -> None:
        batch = self.engine.batch()
        self.active.settle(batch, self.queue, items)
        self.commit(batch)

    def put_back(self, items: list[Item], delay_ms: int = 0) -> None:
        batch = self.engine.batch()
        for item in items:
            item.visible_at_ms = self.now_ms + delay_ms
        self.active.put_back(batch, self.queue, items, self.now_ms)
        self.commit(batch)

    def come_due(self, budget: int = 1_000_000) -> int:
        batch = self.engine.batch()
        moved = self.active.come_due(batch, self.now_ms, budget)
        self.commit(batch)
        return sum(len(ids) for _, ids in moved)

    def page_ids(self, state: State, limit: int = 3) -> list[int]:
        ids: list[int] = []
        after: bytes | None = b""
        while after is not None:
            items, after = self.active.page(self.queue, state, after, limit)
            ids += [item.message_id for item in items]
        return ids

    def found(self, keys: list[int]) -> list[Item]:
        return [item for item in self.active.find(self.queue, keys) if item is not None]

    def depths(self) -> tuple[int, int, int]:
        counts = self.queue.counts
        return counts.available, counts.delayed, counts.in_flight

    def keys(self, prefix: bytes) -> list[bytes]:
        return [key for key in self.table.rows if key.startswith(prefix)]

    def bucket_keys(self) -> list[bytes]:
        return self.keys(opendata.ACTIVE.prefix(b"q"))

    def summary_keys(self) -> list[bytes]:
        return self.keys(opendata.SUMMARY.prefix(b"q"))


PLAIN = ("", 0, 0)


# --- the summary's bytes --------------------------------------------------------------------

SUMMARY_BYTES = bytes.fromhex(
    "0200 0100 0300 0700000000000000"
    "0100 0900 6400000000000000 0800000000000000"
    "0200 0100 61 05 3200000000000000 0700000000000000"
    "0000 00 3300000000000000 0b00000000000000"
    "0100 0100 61 0300"
)


def test_summary_bytes_are_fixed() -> None:
    packed = pack_summary(
        ready=2,
        in_flight=3,
        oldest=7,
        late=[9],
        due=(100, 8),
        heads_encoded=[encode_head("a", 5, 50, 7), encode_head("", 0, 51, 11)],
        held_encoded=[encode_held("a", 3)],
    )
    assert packed.hex() == SUMMARY_BYTES.hex()
    assert decode_summary(packed) == Summary(
        2,
        1,
        3,
        7,
        (9,),
        (100, 8),
        [("a", 5, 50, 7), ("", 0, 51, 11)],
        [("a", 3)],
    )


def test_summary_cut_or_lengthened_anywhere_is_corrupt() -> None:
    for size in range(len(SUMMARY_BYTES)):
        with pytest.raises(CorruptRecord):
            decode_summary(SUMMARY_BYTES[:size])
    with pytest.raises(CorruptRecord):
        decode_summary(SUMMARY_BYTES + b"\0")
    with pytest.raises(CorruptRecord, match="2 delayed messages, but 1"):
        decode_summary(SUMMARY_BYTES[:2] + b"\2" + SUMMARY_BYTES[3:])


# --- buckets and claim ids ------------------------------------------------------------------


def test_claim_ids_place_messages_in_buckets_of_the_rfc() -> None:
    bench = Bench(exponent=1)
    items = bench.add(*[PLAIN] * 12)
    assert [item.key for item in items] == [1 << 60 | number for number in range(12)]
    assert bench.bucket_keys() == [
        opendata.ACTIVE.key(b"q", 1 << 60),
        opendata.ACTIVE.key(b"q", 1 << 60 | 10),
    ]
    available, in_flight = buckets.decode_active(bench.table.rows[bench.bucket_keys()[1]])
    assert [entry.message_id for entry, _ in available] == [11, 12]
    assert in_flight == []


def test_in_flight_record_has_claim_and_lease() -> None:
    bench = Bench()
    bench.add(("g", 3, 0))
    bench.now_ms += 5
    (item,) = bench.take(1)
    assert (item.attempts, item.lease) == (1, LEASE)
    available, in_flight = buckets.decode_active(bench.table.rows[bench.bucket_keys()[0]])
    assert available == []
    assert in_flight[0][0] == buckets.InFlight(
        1, item.key, NOW + 5, NOW + 30_005, 1, b"m1", NOW, 0, 3, "g", LEASE
    )


def test_retry_keeps_claim_id_and_a_redriven_message_gets_a_new_one() -> None:
    bench = Bench()
    bench.add(*[PLAIN] * 3)
    first = bench.take(2)
    keys = [item.key for item in first]
    bench.now_ms += 1
    bench.put_back(first)
    again = bench.take(3)
    assert {item.message_id: item.key for item in again[1:]} == dict(zip([1, 2], keys, strict=True))
    assert [item.attempts for item in again] == [1, 2, 2]
    bench.settle(again)
    assert bench.bucket_keys() == []
    redriven = Item(keys[0], 1, lane_of("", 0), 2, 2, bench.now_ms, b"m1")
    bench.add_items([redriven])
    assert redriven.key == 1 << 60 | 3
    assert bench.found(keys) == []


def test_empty_buckets_and_their_summaries_are_deleted() -> None:
    bench = Bench()
    bench.add(*[PLAIN] * 25)
    bench.settle(bench.take(20))
    assert len(bench.bucket_keys()) == len(bench.summary_keys()) == 1
    bench.settle(bench.take(20))
    assert list(bench.table.rows) == []
    assert bench.depths() == (0, 0, 0)
    assert bench.active.oldest_ms(bench.queue, bench.now_ms) is None
    assert bench.active.oldest(bench.queue, 1) == []


def test_relabel_changes_the_lease_only() -> None:
    bench = Bench()
    bench.add(*[PLAIN] * 3)
    taken = bench.take(3)
    before = bench.table.rows[bench.bucket_keys()[0]]
    other = LEASE[:14] + b"\x00\x09"
    batch = bench.engine.batch()
    bench.active.relabel(batch, bench.queue, taken[1:2], other)
    bench.commit(batch)
    bench.open()
    assert [item.lease for item in bench.found([i.key for i in taken])] == [LEASE, other, LEASE]
    assert bench.table.rows[bench.bucket_keys()[0]].replace(other, LEASE) == before


def test_what_a_look_up_returns_is_the_callers_own() -> None:
    bench = Bench()
    bench.add(PLAIN, ("", 0, 50))
    (taken,) = bench.take(1)
    (found,) = bench.found([taken.key])
    found.visible_at_ms = 0
    (waiting,) = bench.active.page(bench.queue, State.DELAYED, b"", 9)[0]
    waiting.visible_at_ms = 0
    assert bench.found([taken.key])[0].visible_at_ms == NOW
    again = bench.active.waiting(bench.queue, [waiting.key])[0]
    assert again is not None
    assert again.visible_at_ms == NOW + 50


def test_numbers_that_are_no_claim_ids_are_not_found() -> None:
    bench = Bench()
    bench.add(PLAIN)
    keys = [15 << 60, 3, 4 << 60 | 5, 2**64 - 1]
    assert bench.active.find(bench.queue, keys) == [None] * 4
    assert bench.active.waiting(bench.queue, keys) == [None] * 4


@pytest.mark.parametrize("cursor", [b"\0" * 4, b"\0" * 9, b"\xff" * 8])
def test_cursor_that_no_page_gave_is_refused(cursor: bytes) -> None:
    bench = Bench()
    with pytest.raises(InvalidInput, match="not a cursor"):
        bench.active.page(bench.queue, State.AVAILABLE, cursor, 10)


# --- changed exponent -----------------------------------------------------------------------


@pytest.mark.parametrize("reopened", [False, True])
def test_exponent_changes_with_messages_in_every_state(reopened: bool) -> None:
    bench = Bench(exponent=1)
    bench.add(*[PLAIN] * 8, ("", 0, 100))
    flying = bench.take(3)
    for exponent in (3, 0, 2):
        bench.resize(exponent)
        bench.now_ms += 1
        bench.add(PLAIN, PLAIN, ("", 0, 50))
        if reopened:
            bench.open()
    assert {int.from_bytes(key[-8:], "big") >> 60 for key in bench.bucket_keys()} == {0, 1, 2, 3}
    assert bench.depths() == (11, 4, 3)
    assert len(bench.found([item.key for item in flying])) == 3
    assert sorted(bench.page_ids(State.DELAYED)) == [9, 12, 15, 18]
    assert sorted(bench.page_ids(State.AVAILABLE)) == [4, 5, 6, 7, 8, 10, 11, 13, 14, 16, 17]
    assert bench.active.oldest_ms(bench.queue, bench.now_ms) == bench.now_ms - 3
    assert [item.message_id for item in bench.active.oldest(bench.queue, 1)] == [4]
    bench.put_back(bench.found([item.key for item in flying]))
    bench.now_ms += 200
    assert bench.come_due() == 4
    # By time: those of the first batch, each later batch, what was put back, what was delayed.
    expected = [4, 5, 6, 7, 8, 10, 11, 13, 14, 1, 2, 3, 16, 17]
    late = [12, 15, 18, 9]
    by_time = sorted([1, 2, 3, 16, 17])
    assert bench.take_ids(9) == expected[:9]
    assert bench.take_ids(9) == by_time + late
    bench.settle(bench.active.page(bench.queue, State.IN_FLIGHT, b"", 100)[0])
    assert list(bench.table.rows) == []


def test_fifo_order_is_by_message_id_over_all_exponents() -> None:
    bench = Bench(fifo=True, exponent=0)
    early = bench.items(*[("g", 9, 0)] * 3)
    late = bench.items(*[("g", 0, 0)] * 3)
    bench.add_items(late[1:])
    bench.resize(2)
    bench.add_items([early[2], late[0]])
    bench.resize(1)
    bench.add_items(early[:2])
    assert bench.take_ids(4) == [1, 2, 3, 4]
    assert bench.take_ids(4) == []
    bench.settle(bench.active.page(bench.queue, State.IN_FLIGHT, b"", 9)[0])
    assert bench.take_ids(4) == [5, 6]


# --- reopening ------------------------------------------------------------------------------


def test_directory_comes_from_summaries_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.add(*[(f"g{n % 3}", n % 2, 100 if n % 7 == 0 else 0) for n in range(50)])
    bench.take(5)
    expected = bench.depths()
    buckets = {key: bench.table.rows.pop(key) for key in bench.bucket_keys()}

    def refuse(key: bytes) -> bytes | None:
        raise AssertionError(f"read {key.hex()}")

    with monkeypatch.context() as patched:
        patched.setattr(bench.table, "get", refuse)
        patched.setattr(bench.table, "multi_get", refuse)
        bench.open()
        assert bench.active.ready_groups(bench.queue) == 3
        assert bench.active.next_due_ms() == NOW + 100
    assert bench.depths() == expected
    assert bench.active.healed == 0
    bench.table.rows.update(buckets)
    assert len(bench.take(100)) == expected[0]


def test_a_claim_reads_only_the_bucket_that_it_takes_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.add(*[PLAIN] * 200)
    bench.open()
    read: list[bytes] = []
    get = bench.table.get

    def note(key: bytes) -> bytes | None:
        read.append(key)
        return get(key)

    monkeypatch.setattr(bench.table, "get", note)
    assert bench.take_ids(10) == list(range(1, 11))
    assert read == [opendata.ACTIVE.key(b"q", 1 << 60)]


def test_failed_commit_is_forgotten_on_load() -> None:
    bench = Bench(fifo=True)
    bench.add(("a", 0, 0), ("a", 0, 0), ("b", 0, 0))
    counts = msgspec.structs.astuple(bench.queue.counts)
    batch = bench.engine.batch()
    bench.active.add(batch, bench.queue, bench.items(PLAIN), NOW)
    bench.active.take(batch, bench.queue, 3, repeat((LEASE, NOW + 1)), NOW)
    bench.queue.counts = Counts(*counts)
    bench.active.load(bench.queue)
    assert bench.page_ids(State.IN_FLIGHT) == []
    assert bench.take_ids(9) == [1, 2, 3]


def test_one_batch_may_change_a_bucket_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_cache, "OPEN_BUCKETS_BYTES", 0)
    bench = Bench()
    bench.add(*[PLAIN] * 30)
    taken = bench.take(30)
    batch = bench.engine.batch()
    for item in (*taken[::3], *taken[1::3]):
        bench.active.put_back(batch, bench.queue, [item], NOW)
    for item in taken[2::3]:
        bench.active.settle(batch, bench.queue, [item])
    bench.commit(batch)
    bench.open()
    assert bench.depths() == (20, 0, 0)
    assert bench.active.healed == 0
    assert bench.take_ids(30) == [n for n in range(1, 31) if n % 3]


# --- damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b"", b"\xff\xff", None])
@pytest.mark.parametrize("fifo", [False, True])
def test_unreadable_bucket_is_left_behind(fifo: bool, damage: bytes | None) -> None:
    bench = Bench(fifo=fifo)
    bench.add(*[("a", 0, 0)] * 9, ("b", 0, 90), *[("b", 0, 0)] * 10, ("a", 0, 0))
    flying = bench.take(3)
    bench.open()
    first = bench.bucket_keys()[0]
    if damage is None:
        del bench.table.rows[first]
    else:
        bench.table.rows[first] = damage
    # On a FIFO queue b's delayed head kept b back; the head is gone, and so is what held a.
    found = bench.found([item.key for item in flying])
    assert [item.message_id for item in found] == ([] if fifo else [11, 12])
    assert bench.take_ids(100) == ([*range(11, 22)] if fifo else [21, *range(13, 21)])
    if damage is None:
        assert (bench.aside, bench.active.healed) == ([], 1)
    else:
        assert [row[:3] for row in bench.aside] == [("buckets", first, damage)]
    assert bench.page_ids(State.IN_FLIGHT) == [*range(11, 22)]
    assert bench.depths() == (0, 0, 11)
    assert bench.active.next_due_ms() is None
    bench.open()
    assert bench.active.healed == 0
    assert first not in bench.table.rows


def test_nothing_is_written_where_a_bucket_was_put_aside() -> None:
    bench = Bench()
    bench.add(*[PLAIN] * 4)
    bench.open()
    tail = bench.bucket_keys()[0]
    bench.table.rows[tail] = b"broken"
    bench.add(PLAIN, PLAIN)
    assert bench.aside[0][1] == tail
    assert bench.bucket_keys() == [opendata.ACTIVE.key(b"q", 1 << 60 | 10)]
    assert bench.take_ids(10) == [5, 6]


@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("damage", [b"", b"\xff" * 40, None])
def test_lost_or_broken_summary_is_made_anew(fifo: bool, damage: bytes | None) -> None:
    bench = Bench(fifo=fifo)
    bench.add(*[("a", 0, 0), ("b", 0, 0), ("b", 0, 70)] * 8)
    bench.take(5)
    expected = bench.depths()
    sound = dict(bench.table.rows)
    for key in bench.summary_keys()[:2]:
        if damage is None:
            del bench.table.rows[key]
        else:
            bench.table.rows[key] = damage
    bench.open()
    assert bench.active.healed == 2
    assert bench.depths() == expected
    assert bench.active.next_due_ms() == NOW + 70
    bench.settle([])
    for key in bench.summary_keys():
        # Heads stand in no particular order.
        mended, before = decode_summary(bench.table.rows[key]), decode_summary(sound[key])
        assert mended._replace(heads=sorted(mended.heads)) == before._replace(
            heads=sorted(before.heads)
        )
    bench.open()
    assert bench.active.healed == 0


def test_summary_that_says_something_else_is_mended_when_the_bucket_is_opened() -> None:
    bench = Bench()
    bench.add(*[PLAIN] * 15)
    first, second = bench.summary_keys()
    rows = bench.table.rows
    rows[first], rows[second] = rows[second], rows[first]
    bench.open()
    assert bench.active.healed == 0, "they still add up"
    assert bench.take_ids(12) == [*range(1, 13)]
    assert bench.active.healed == 2
    assert bench.depths() == (3, 0, 12)
    bench.open()
    assert bench.active.healed == 0
    assert bench.take_ids(12) == [13, 14, 15]


# --- memory ---------------------------------------------------------------------------------


def test_memory_per_bucket_is_small() -> None:
    bench = Bench(exponent=1)
    buckets = 2_000
    for _ in range(buckets // 100):
        bench.now_ms += 1
        bench.add(*[PLAIN] * 1_000)
    assert len(bench.summary_keys()) == buckets
    del bench.active
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        bench.open()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / buckets < 700


def test_open_buckets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_cache, "OPEN_BUCKETS_BYTES", 100_000)
    bench = Bench()
    for _ in range(30):
        bench.add(*[PLAIN] * 100)
    assert sum(1 for _ in bench.page_ids(State.AVAILABLE, 100)) == 3_000
    cache = bench.active
    assert cache._open_bytes == sum(bucket.cost for bucket in cache._open.values())
    assert 0 < cache._open_bytes <= 100_000


# --- against a model ------------------------------------------------------------------------


class Model:
    """An active set that looks at everything, every time."""

    def __init__(self, *, fifo: bool) -> None:
        self.fifo = fifo
        # message id -> group, priority, visible at; in `late` while it counts as delayed
        self.waiting: dict[int, tuple[str, int, int]] = {}
        self.late: set[int] = set()
        self.flight: dict[int, tuple[str, int]] = {}
        self.turns: list[str] = []
        self.blocked: set[str] = set()

    def _place(self, message_id: int) -> tuple[int, int, int]:
        _, priority, visible_at = self.waiting[message_id]
        return (0, 0, message_id) if self.fifo else (-priority, visible_at, message_id)

    def _of(self, group: str) -> list[int]:
        """What of a group is in line, in order."""
        ids = [m for m, row in self.waiting.items() if row[0] == group]
        return sorted([m for m in ids if self.fifo or m not in self.late], key=self._place)

    def _update(self, groups: list[str]) -> None:
        """Put groups in turn that have come to have something, drop those without."""
        for group in groups:
            held = self.fifo and any(row[0] == group for row in self.flight.values())
            ready = bool(self._of(group)) and not held and group not in self.blocked
            if ready and group not in self.turns:
                self.turns.append(group)
            elif not ready and group in self.turns:
                self.turns.remove(group)

    def _put(self, message_id: int, row: tuple[str, int, int], now_ms: int) -> None:
        self.waiting[message_id] = row
        if row[2] > now_ms:
            self.late.add(message_id)
        else:
            self.blocked.discard(row[0])

    def add(self, message_id: int, row: tuple[str, int, int], now_ms: int) -> None:
        self._put(message_id, row, now_ms)
        self._update([row[0]])

    def take(self, limit: int) -> list[int]:
        taken: list[int] = []
        while self.turns and len(taken) < limit:
            want = limit - len(taken)
            visits = min(len(self.turns), want)
            for visit, group in enumerate(self.turns[:visits]):
                if len(taken) >= limit:
                    break
                room = (limit - len(taken)) // (visits - visit)
                picked = self._of(group)[:room]
                if self.fifo:
                    for index, message_id in enumerate(picked):
                        if message_id in self.late:
                            picked = picked[:index]
                            break
                    if not picked:
                        self.blocked.add(group)
                for message_id in picked:
                    self.flight[message_id] = self.waiting.pop(message_id)[:2]
                taken += picked
                self.turns.remove(group)
                self._update([group])
        return taken

    def land(self, ids: list[int], visible_at: int | None, now_ms: int) -> None:
        groups = []
        for message_id in ids:
            group, priority = self.flight.pop(message_id)
            groups.append(group)
            if visible_at is not None:
                self._put(message_id, (group, priority, visible_at), now_ms)
        self._update(groups)

    def come_due(self, now_ms: int, budget: int) -> int:
        due = sorted((self.waiting[m][2], m) for m in self.late)
        due = [row for row in due if row[0] <= now_ms][:budget]
        for _, message_id in due:
            self.late.discard(message_id)
            group = self.waiting[message_id][0]
            self.blocked.discard(group)
            self._update([group])
        return len(due)

    def remove(self, ids: list[int]) -> None:
        for message_id in ids:
            group = self.waiting.pop(message_id)[0]
            self.late.discard(message_id)
            self.blocked.discard(group)
            self._update([group])

    def reload(self) -> None:
        self.blocked.clear()
        self.turns.clear()
        self._update(sorted({row[0] for row in self.waiting.values()}))

    def oldest_ms(self, now_ms: int) -> int | None:
        ids = self.waiting.keys() - self.late
        if self.fifo:
            heads = (self._of(group)[:1] for group in {row[0] for row in self.waiting.values()})
            ids = {head for each in heads for head in each}
        times = [self.waiting[message_id][2] for message_id in ids]
        return min((time_ms for time_ms in times if time_ms <= now_ms), default=None)

    def depths(self) -> tuple[int, int, int]:
        return len(self.waiting) - len(self.late), len(self.late), len(self.flight)


class Walk:
    """A random walk through bench and model, compared at every step."""

    def __init__(self, seed: int, *, fifo: bool) -> None:
        self.clock = ManualClock(seed=seed)
        self.bench = Bench(fifo=fifo)
        self.model = Model(fifo=fifo)
        self.keys: dict[int, int] = {}

    def below(self, bound: int) -> int:
        return int(self.clock.random() * bound)

    def some(self, ids: list[int], most: int) -> list[int]:
        """Pick some, in an order of chance."""
        ids = sorted(ids)
        return [ids.pop(self.below(len(ids))) for _ in range(min(self.below(most) + 1, len(ids)))]

    def delay_ms(self) -> int:
        return self.below(40) if self.below(3) == 0 else 0

    def add(self) -> None:
        bench = self.bench
        lanes = [
            (f"g{self.below(5)}", self.below(3), self.delay_ms()) for _ in range(self.below(15))
        ]
        items = bench.items(*lanes)
        # Redriven messages come in with lower ids than those before them.
        gap = self.below(3)
        if gap == 0:
            items.reverse()
        bench.add_items(items)
        for item in items:
            group, priority = split_lane(item.lane)
            self.keys[item.message_id] = item.key
            row = (group, priority, item.visible_at_ms)
            self.model.add(item.message_id, row, bench.now_ms)

    def take(self) -> None:
        limit = self.below(12) + 1
        taken = self.bench.take(limit)
        assert [item.message_id for item in taken] == self.model.take(limit)
        for item in taken:
            assert item.key == self.keys[item.message_id], "a claim id changed"

    def land(self) -> None:
        """Settle and put back in several calls of one batch."""
        bench, batch = self.bench, self.bench.engine.batch()
        for _ in range(self.below(3) + 1):
            ids = self.some(list(self.model.flight), 6)
            items = bench.found([self.keys[m] for m in ids])
            assert [item.message_id for item in items] == ids
            visible_at = bench.now_ms + self.delay_ms()
            if self.below(2):
                for item in items:
                    item.visible_at_ms = visible_at
                bench.active.put_back(batch, bench.queue, items, bench.now_ms)
                self.model.land(ids, visible_at, bench.now_ms)
            else:
                bench.active.settle(batch, bench.queue, items)
                self.model.land(ids, None, bench.now_ms)
        bench.commit(batch)

    def remove(self) -> None:
        bench, batch = self.bench, self.bench.engine.batch()
        ids = self.some(list(self.model.waiting), 4)
        found = bench.active.waiting(bench.queue, [self.keys[m] for m in ids])
        items = [item for item in found if item is not None]
        assert [item.message_id for item in items] == ids
        bench.active.remove(batch, bench.queue, items)
        bench.commit(batch)
        self.model.remove(ids)

    def pass_time(self) -> None:
        self.bench.now_ms += self.below(15)
        budget = self.below(6) + 1 if self.below(3) == 0 else 1_000
        assert self.bench.come_due(budget) == self.model.come_due(self.bench.now_ms, budget)

    def reload(self) -> None:
        self.bench.open()
        self.model.reload()

    def compare(self) -> None:
        bench, model = self.bench, self.model
        assert bench.depths() == model.depths()
        assert bench.active.ready_groups(bench.queue) == len(model.turns)
        due = [model.waiting[m][2] for m in model.late]
        assert bench.active.next_due_ms() == min(due, default=None)
        assert bench.active.oldest_ms(bench.queue, bench.now_ms) == model.oldest_ms(bench.now_ms)
        limit = self.below(12) + 1
        oldest = [item.message_id for item in bench.active.oldest(bench.queue, limit)]
        assert oldest == sorted(model.waiting)[:limit]

    def compare_pages(self) -> None:
        bench, model = self.bench, self.model
        assert sorted(bench.page_ids(State.DELAYED)) == sorted(model.late)
        assert sorted(bench.page_ids(State.AVAILABLE)) == sorted(model.waiting.keys() - model.late)
        assert sorted(bench.page_ids(State.IN_FLIGHT)) == sorted(model.flight)
        for message_id in self.some(list(model.flight), 1):
            item = bench.active.in_flight_by_message(bench.queue, message_id)
            assert item is not None
            assert item.key == self.keys[message_id]

    def step(self) -> None:
        roll = self.below(100)
        if roll < 30:
            self.add()
        elif roll < 55:
            self.take()
        elif roll < 75:
            self.land()
        elif roll < 80:
            self.remove()
        elif roll < 92:
            self.pass_time()
        elif roll < 95:
            self.reload()
        elif roll < 97:
            self.bench.resize(self.below(4))
        else:
            self.compare_pages()
        self.compare()


@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("open_bytes", [0, 1 << 30])
@pytest.mark.parametrize("seed", range(5))
def test_random_walks_agree_with_the_model(
    seed: int, open_bytes: int, fifo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_cache, "OPEN_BUCKETS_BYTES", open_bytes)
    walk = Walk(seed, fifo=fifo)
    for _ in range(300):
        walk.step()
    walk.compare_pages()
    assert walk.bench.active.healed == 0
    assert walk.bench.aside == []


# --- through the broker ---------------------------------------------------------------------


def test_life_cycle_through_the_broker() -> None:
    clock = ManualClock()
    with penstock.open("memory:?design=buckets", background=False, clock=clock) as broker:
        broker.create_queue("q", bucket_exponent=1, max_attempts=2, backoff_base_ms=10)
        for number in range(25):
            broker.send("q", str(number).encode())
        first = broker.claim("q", limit=15)
        broker.ack([delivery.receipt for delivery in first[:5]])
        broker.release([delivery.receipt for delivery in first[5:]], delay_ms=50)
        broker.update_queue("q", bucket_exponent=2)
        clock.advance(60)
        second = broker.claim("q", limit=100)
        assert [delivery.payload for delivery in second[:10]] == [b"%d" % n for n in range(15, 25)]
        assert sorted(d.attempts for d in second) == [1] * 10 + [2] * 10
        broker.release([delivery.receipt for delivery in second[10:]])
        stats = broker.stats("q")
        assert (stats.in_flight, stats.done, stats.failed) == (10, 5, 10)
        assert broker.redrive("q") == 10
        assert broker.stats("q").available == 10
        assert broker.purge("q") == 10
        assert broker.stats("q").in_flight == 10
        assert broker.store_stats().healed_total == 0
