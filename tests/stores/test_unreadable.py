"""A store with a damaged block: every verb is right, or raises and changes nothing.

One byte range of one table's file is flipped, for every table of both designs. What the store was
before is known, so that less than that is not taken for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest
from botocore.exceptions import ClientError
from tests.damaging import compact, files_of, flip
from tests.native.serving import Served
from tests.sqs.serving import client_of, serving
from tests.waiting import wait_until

import penstock
from penstock import ManualClock, Message
from penstock.errors import StorageFailed, StoreDamaged
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.broker.broker import Broker
    from penstock.store.kv.store import KvStore

NOW_MS = 1_700_000_000_000
LEASE_MS = 60_000
STATES = ("available", "delayed", "in_flight", "done", "failed")
LAST = b"\xff" * 32


class Was(NamedTuple):
    """A store before it was damaged: what is in which state of each queue, and good receipts."""

    path: Path
    design: str
    messages: dict[tuple[str, str], dict[int, bytes | None]]
    stats: dict[str, Any]
    receipts: list[str]
    sweep: Any


def open_at(path: Path, *, at_ms: int = NOW_MS) -> Broker:
    return penstock.open(f"rocksdb:{path}", background=False, clock=ManualClock(at_ms))


def browse(broker: Broker, queue: str, state: str) -> dict[int, bytes | None]:
    found: dict[int, bytes | None] = {}
    cursor = None
    while True:
        page = broker.browse(queue, state=state, limit=1_000, cursor=cursor, payloads=True)
        found.update((entry.message_id, entry.payload) for entry in page)
        cursor = page.next_cursor
        if cursor is None:
            return found


def fill(broker: Broker, count: int) -> list[str]:
    """Bring messages into every state; return receipts that are good."""
    broker.create_queue("jobs", max_attempts=1, done_retention_ms=3_600_000)
    broker.create_queue("old", unclaimed_retention_ms=120_000)
    broker.create_queue("turns", ordering="fifo")
    broker.create_queue("all", filter="kind = 1")
    for start in range(0, count, 500):
        broker.publish(
            Message(
                b"%d " % number + b"x" * 100,
                {"queue": ("jobs", "jobs", "old", "turns")[number % 4], "kind": number % 3},
                group=f"g{number % 20}",
                delay_ms=30_000 if number % 7 == 0 else 0,
                dedup_id=f"d{number}",
            )
            for number in range(start, start + 500)
        )
    acked = broker.claim("jobs", limit=count // 20)
    broker.ack([each.receipt for each in acked])
    broker.release([each.receipt for each in broker.claim("jobs", limit=count // 20)])
    held = broker.claim("jobs", limit=200, lease_ms=LEASE_MS)
    held += broker.claim("turns", limit=100, lease_ms=LEASE_MS)
    return [each.receipt for each in held]


def make(path: Path, design: str, count: int) -> Was:
    """Make a store, and find out what is in it and what a sweep does with it."""
    url = f"rocksdb:{path}?design={design}"
    with penstock.open(url, background=False, clock=ManualClock(NOW_MS)) as broker:
        receipts = fill(broker, count)
    compact(path, DESIGNS[design])
    with open_at(path) as broker:
        names = [spec.name for spec in broker.queues()]
        messages = {
            (name, state): browse(broker, name, state) for name in names for state in STATES
        }
        stats = {name: broker.stats(name) for name in names}
    other = path.with_name("swept")
    shutil.copytree(path, other)
    with open_at(other, at_ms=NOW_MS + 7_200_000) as broker:
        swept = broker.sweep(budget=1_000_000)
    return Was(path, design, messages, stats, receipts, swept)


def contents(broker: Broker) -> dict[tuple[str, bytes], bytes]:
    """Return all rows that can be read: those of damaged blocks are left out."""
    engine = cast("KvStore", broker._store).engine
    found: dict[tuple[str, bytes], bytes] = {}
    for name in DESIGNS[broker.info().design]:
        table, begin = engine.table(name), b""
        try:
            while rows := table.scan(begin, LAST, 500):
                found.update(((name, key), value) for key, value in rows)
                begin = rows[-1][0] + b"\0"
        except StoreDamaged as error:
            end = LAST
            try:
                while rows := table.scan(begin, error.begin, 1):
                    found[name, rows[0][0]] = rows[0][1]
                    begin = rows[0][0] + b"\0"
            except StoreDamaged:
                pass
            try:
                while rows := table.scan_back(error.begin, end, 100):
                    found.update(((name, key), value) for key, value in rows)
                    end = rows[-1][0]
            except StoreDamaged:
                pass
    return found


def unchanged_if_it_raises(broker: Broker, verb: Callable[[], None]) -> bool:
    """Call a verb; if it raises StoreDamaged, nothing may have changed. Say whether it did not."""
    before = contents(broker)
    try:
        verb()
    except StoreDamaged:
        assert contents(broker) == before
        return False
    return True


# --- verbs ----------------------------------------------------------------------------------------


def looking(broker: Broker, was: Was) -> None:
    """Browse and stats say all there is, or raise."""
    for (name, state), expected in was.messages.items():
        try:
            assert browse(broker, name, state) == expected, (name, state)
        except StoreDamaged:
            continue
    for name, expected in was.stats.items():
        try:
            assert broker.stats(name) == expected
        except StoreDamaged:
            continue


def checking(broker: Broker, table: str) -> None:
    """A check names the table and finds fault with nothing else; a repair changes nothing."""
    before = contents(broker)
    for repair in (False, True):
        report = broker.check(repair=repair)
        assert set(report.found) <= {"unreadable"}, report.violations[:5]
        assert {each.table for each in report.violations} <= {table}
        assert not any(each.repaired for each in report.violations)
        assert contents(broker) == before
    engine = cast("KvStore", broker._store).engine
    try:
        for _ in penstock.engines.rows_of(engine.table(table), b"", LAST):
            pass
    except StoreDamaged:
        assert report.found == {"unreadable": 1}
        assert not report.ok
    else:
        assert report.clean


def publishing(broker: Broker) -> None:
    def publish() -> None:
        ids = broker.publish([Message(b"new", {"queue": "jobs", "kind": 1}, group="new")] * 3)
        engine = cast("KvStore", broker._store).engine
        for message_id in ids:
            assert engine.table("payloads").get(b"\1\1" + message_id.to_bytes(8, "big")) == b"new"

    unchanged_if_it_raises(broker, publish)


def acking(broker: Broker, was: Was) -> None:
    for start in range(0, len(was.receipts), 150):
        part = was.receipts[start : start + 150]

        def ack(part: list[str] = part) -> None:
            assert all(each.ok for each in broker.ack(part))

        unchanged_if_it_raises(broker, ack)


def claiming(broker: Broker, was: Was) -> None:
    """All that is available is claimed, but for what was told of as unreadable."""
    for name in was.stats:
        there = dict(was.messages[name, "available"])
        told = skipped = 0
        while told < 3:
            before = broker.store_stats().unreadable_total
            try:
                got = broker.claim(name, limit=10)
            except StoreDamaged:
                # What can be read goes on being served after that.
                told += 1
                continue
            finally:
                skipped += broker.store_stats().unreadable_total - before
            if not got:
                break
            for each in got:
                if each.payload != b"new":
                    assert there.pop(each.message_id) == each.payload, name
            assert all(each.ok for each in broker.ack([each.receipt for each in got]))
        # An index that can't be read does not tell how many messages it has.
        if name != "turns" and (skipped or not told):
            assert len(there) == skipped, name


def sweeping(path: Path, was: Was) -> None:
    with (
        contextlib.suppress(StoreDamaged),
        open_at(path, at_ms=NOW_MS + 7_200_000) as broker,
    ):
        assert broker.sweep(budget=1_000_000) == was.sweep


def depths(broker: Broker) -> dict[str, Any]:
    """Return how much is in which state, of the queues that can be read."""
    found = {}
    for spec in broker.queues():
        with contextlib.suppress(StoreDamaged):
            stats = broker.stats(spec.name)
            found[spec.name] = [getattr(stats, state) for state in STATES]
    return found


# --- the matrix -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[500, pytest.param(10_000, marks=pytest.mark.soak)])
def stores(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Was]:
    place = tmp_path_factory.mktemp("whole")
    return {design: make(place / design / "store", design, request.param) for design in DESIGNS}


def examine(was: Was, place: Path, table: str, at: float) -> None:
    """Flip bytes of the file of a table, part of the way through, and try all verbs."""
    files = files_of(was.path).get(table)
    assert files, f"the store has nothing in {table}"
    file = files[len(files) // 2]
    shutil.copytree(was.path, place)
    flip(place / file.name, int(file.stat().st_size * at), 100)
    shutil.copytree(place, other := place.with_name("other"))
    try:
        broker = open_at(place)
    except StorageFailed:
        # Without its index, or without the list of queues, nothing can be served.
        return
    try:
        # What can't be read may be a queue: then the store is not opened.
        assert {spec.name for spec in broker.queues()} == set(was.stats)
        looking(broker, was)
        checking(broker, table)
        publishing(broker)
        acking(broker, was)
        claiming(broker, was)
        believed = depths(broker)
    finally:
        # A file that can't be read can't be compacted either, which RocksDB says again at the end.
        with contextlib.suppress(StoreDamaged):
            broker.close()
    sweeping(other, was)
    # Whatever was raised in between, memory was as the disk is.
    with contextlib.suppress(StoreDamaged), open_at(place) as broker:
        true = depths(broker)
        assert {name: true[name] for name in believed if name in true} == {
            name: believed[name] for name in believed if name in true
        }


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 0.5])
@pytest.mark.parametrize(
    ("design", "table"), [(name, table) for name in DESIGNS for table in DESIGNS[name]]
)
def test_every_verb_is_right_or_raises_and_changes_nothing(
    stores: dict[str, Was], tmp_path: Path, design: str, table: str, at: float
) -> None:
    examine(stores[design], tmp_path / "store", table, at)


@pytest.mark.parametrize(
    ("design", "table"),
    [
        *(("indexed", table) for table in ("history", "unclaimed", "visibility_index")),
        *(("buckets", table) for table in ("history", "unclaimed")),
    ],
)
def test_sweeps_of_a_damaged_store_rebuild_no_memory_and_look_again(
    stores: dict[str, Was], tmp_path: Path, design: str, table: str
) -> None:
    place = tmp_path / "store"
    shutil.copytree(stores[design].path, place)
    file = place / files_of(place)[table][0].name
    damage = (16, 100)
    flip(file, *damage)
    clock = ManualClock(NOW_MS + 7_200_000)
    broker = penstock.open(f"rocksdb:{place}", background=False, clock=clock)
    core: Any = cast("KvStore", broker._store)
    loads, load = [], core.load
    core.load = lambda: loads.append(load())
    for _ in range(5):
        with pytest.raises(StoreDamaged, match=table):
            broker.sweep()
    # Where a change had begun before what it needs could not be read; no more than once a minute.
    assert len(loads) <= 2
    # A disk may get over it.
    flip(file, *damage)
    clock.advance(60_000)
    with pytest.raises(StoreDamaged, match=table):
        broker.sweep()
    broker.sweep(budget=1_000_000)
    assert broker.check().clean
    broker.close()


@pytest.mark.parametrize(
    ("design", "table", "at"), [("indexed", "visibility_index", 0.8), ("buckets", "buckets", 0.93)]
)
def test_leases_and_delays_of_other_queues_end(
    tmp_path: Path, design: str, table: str, at: float
) -> None:
    place = tmp_path / "store"
    url = f"rocksdb:{place}?design={design}"
    with penstock.open(url, background=False, clock=ManualClock(NOW_MS)) as broker:
        broker.create_queue("jobs")
        broker.create_queue("turns", ordering="fifo")
        broker.publish(
            Message(b"%d" % number, {"queue": "turns"}, group=f"g{number}", delay_ms=delay_ms)
            for delay_ms in (0, 30_000)
            for number in range(500)
        )
        held = len(broker.claim("turns", limit=3, lease_ms=LEASE_MS))
        for delay_ms in (0, 30_000):
            broker.send("jobs", b"job", delay_ms=delay_ms)
        held += len(broker.claim("jobs", lease_ms=LEASE_MS))
    assert held == 4
    compact(place, DESIGNS[design])
    (file,) = files_of(place)[table]
    flip(file, int(file.stat().st_size * at), 100)
    with open_at(place, at_ms=NOW_MS + 7_200_000) as broker:
        with pytest.raises(StoreDamaged, match="can't be read"):
            broker.sweep()
        with pytest.raises(StoreDamaged, match=table):
            broker.claim("turns")
        assert len(broker.claim("jobs", limit=10)) == 2


# --- what a claim passes over ---------------------------------------------------------------------


def damaged_payloads(place: Path, design: str) -> tuple[list[int], list[int]]:
    """Make a store, some of whose payloads can't be read; return the ids of its two queues."""
    url = f"rocksdb:{place}?design={design}"
    with penstock.open(url, background=False, clock=ManualClock(NOW_MS)) as broker:
        broker.create_queue("jobs")
        broker.create_queue("turns", ordering="fifo")
        # Bytes that can't be compressed, so that each share of the file has some of them.
        noise = [hashlib.shake_128(bytes([number])).digest(4_000) for number in range(40)]
        jobs = broker.publish(Message(payload, {"queue": "jobs"}) for payload in noise)
        turns = broker.publish(
            Message(payload, {"queue": "turns"}, group=f"g{number % 2}")
            for number, payload in enumerate(noise)
        )
    (file,) = files_of(place)["payloads"]
    # The block behind the first of one queue, and the block behind the first of the other.
    for share in (0.15, 0.65):
        flip(file, int(file.stat().st_size * share), 100)
    return jobs, turns


@pytest.mark.parametrize("design", list(DESIGNS))
def test_a_claim_delivers_what_can_be_read_and_leases_nothing_else(
    tmp_path: Path, design: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "store"
    jobs, turns = damaged_payloads(place, design)
    with open_at(place) as broker:
        got: list[int] = []
        while deliveries := _claim(broker, "jobs"):
            got += [each.message_id for each in deliveries]
        bad = sorted(set(jobs) - set(got))
        assert 0 < len(bad) < 10
        assert got == sorted(got)
        assert broker.store_stats().unreadable_total == len(bad)
        assert "passed over a message that can't be read: " in caplog.text
        assert "(table 'payloads' can't be read between " in caplog.text
        stats = broker.stats("jobs")
        # The ones that can't be read wait as they did, with no attempt counted.
        assert (stats.available, stats.in_flight) == (len(bad), len(got))
        entries = broker.browse("jobs", state="available", payloads=False)
        assert [(entry.message_id, entry.attempts) for entry in entries] == [
            (id_, 0) for id_ in bad
        ]
        # In a group of a FIFO queue, what is behind such a one waits for it.
        served: list[int] = []
        while deliveries := _claim(broker, "turns"):
            served += [each.message_id for each in deliveries]
            broker.ack([each.receipt for each in deliveries])
        for group in (turns[::2], turns[1::2]):
            assert [id_ for id_ in group if id_ in served] == group[: len(set(group) & set(served))]
        assert 0 < len(served) < 40
        # What comes in later is served, and is not taken for lost.
        new = broker.send("jobs", b"new")
        assert [each.message_id for each in broker.claim("jobs", limit=10)] == [new]
        # As long as some are left, nobody is told that there are none.
        for queue in ("jobs", "turns") * 2:
            with pytest.raises(StoreDamaged, match="payloads"):
                broker.claim(queue)
            with pytest.raises(StoreDamaged, match="payloads"):
                next(broker.consume(queue))
            broker.send("jobs", b"other")
            assert len(broker.claim("jobs", limit=10)) == 1
        assert broker.store_stats().unreadable_total < 20
        for queue in ("jobs", "turns"):
            broker.purge(queue)
            assert broker.claim(queue) == []


def _claim(broker: Broker, queue: str) -> list[penstock.Delivery]:
    """Claim what can be read, as long as there is any."""
    with contextlib.suppress(StoreDamaged):
        return broker.claim(queue, limit=10)
    return []


async def consume_all(url: str, got: list[bytes]) -> None:
    async with penstock.connect_async(url) as client, client.consume("jobs") as consumer:
        async for each in consumer:
            got.append(each.payload)
            each.ack()


def work_on_what_comes(store: str | Broker, broker: Broker) -> None:
    done: list[bytes] = []
    with penstock.Worker(store, "jobs", lambda each: done.append(each.payload)) as worker:
        for _ in range(3):
            wait_until(lambda: worker.stats().troubles == ("claiming from jobs",))
            broker.send("jobs", b"new")
            wait_until(functools.partial(done.__contains__, b"new"))
            done.clear()


@pytest.mark.parametrize("design", list(DESIGNS))
def test_every_consumer_is_told_of_messages_that_can_not_be_read(
    tmp_path: Path, design: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "store"
    total = len(damaged_payloads(place, design)[0])
    with penstock.open(f"rocksdb:{place}") as broker, Served(broker) as server:
        got: list[bytes] = []
        with pytest.raises(StoreDamaged, match="payloads"):
            asyncio.run(consume_all(server.url, got))
        assert total - 10 < len(got) < total
        with penstock.connect(server.url) as client, pytest.raises(StoreDamaged):
            next(client.consume("jobs"))
        # One is pushed its messages, the other claims them.
        work_on_what_comes(server.url, broker)
        work_on_what_comes(broker, broker)
        told = [each for each in caplog.messages if "claiming from jobs does not work" in each]
        assert 2 <= len(told) <= 8


def test_sqs_is_told_of_messages_that_can_not_be_read(tmp_path: Path) -> None:
    place = tmp_path / "store"
    total = len(damaged_payloads(place, "indexed")[0])
    with serving(store=f"rocksdb:{place}") as server:
        sqs = client_of(server)
        url = sqs.get_queue_url(QueueName="jobs")["QueueUrl"]
        got: list[Any] = []

        def receive() -> list[Any]:
            answer = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=20)
            return answer.get("Messages", [])  # type: ignore[no-any-return]

        while len(got) <= total - 10:
            got += receive()
        # The block has no more than ten messages, and its neighbours may have been claimed.
        assert got
        with pytest.raises(ClientError, match=r"ServiceUnavailable.*table 'payloads'"):
            wait_until(lambda: not receive())


def test_a_store_without_its_queues_is_not_opened(tmp_path: Path) -> None:
    place = tmp_path / "store"
    with penstock.open(f"rocksdb:{place}", background=False) as broker:
        for number in range(100):
            broker.create_queue(f"queue-{number}")
    (file,) = files_of(place)["queues"]
    flip(file, 16, 100)
    before = {path.name: path.read_bytes() for path in place.glob("*.sst")}
    with pytest.raises(StoreDamaged, match=r"can't be opened: .*penstock salvage.*table 'queues'"):
        penstock.open(f"rocksdb:{place}", background=False)
    assert {path.name: path.read_bytes() for path in place.glob("*.sst")} == before
