"""A disk that fills up under load, and has room again: on a real RocksDB and a real small disk."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.crash.child import begin_enduring
from tests.crash.test_crash import DESIGNS, PATIENCE_S, QUEUES, child, seen
from tests.judging import entries, judge_queue
from tests.noting import notes_of
from tests.small_disk import SmallDisk, small_disk
from tests.waiting import wait_until

import penstock
from penstock import DiskFull, ManualClock, Message, State, StorageFailed, SystemClock
from penstock.errors import InvalidUrl
from penstock.testing.auditor import Kind
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock import Broker

MIB = 1 << 20
wait = partial(wait_until, seconds=PATIENCE_S)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path, 48 * MIB) as mounted:
        yield mounted


def counts(place: Path, kind: Kind) -> int:
    return min(seen(place, queue)[kind] for queue in QUEUES)


def more(place: Path, kind: Kind, count: int = 5) -> Callable[[], bool]:
    """Give the question whether each queue has so many more notes of a kind than now."""
    before = {queue: seen(place, queue)[kind] for queue in QUEUES}
    return lambda: all(seen(place, queue)[kind] >= before[queue] + count for queue in QUEUES)


def judge(url: str, place: Path) -> None:
    """Hold what clients have noted against the store; time stands still meanwhile."""
    still = ManualClock(SystemClock().now_ms())
    with penstock.open(url, background=False, clock=still) as broker:
        assert_clean(broker)
        for queue in QUEUES:
            notes = notes_of(place / f"notes.{queue}")
            waiting, over = judge_queue(broker, queue, notes, fifo=queue == "fifo")
            ids = Counter(entry.message_id for entry in (*waiting, *over))
            assert set(ids.values()) == {1}
            confirmed = {note.message_id for note in notes if note.kind is Kind.PUBLISHED}
            assert confirmed <= set(ids)


# --- the whole cycle ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_full_and_back_under_load(
    design: str, disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"rocksdb:{disk.path}/store?design={design}"
    caplog.set_level(logging.WARNING)
    with penstock.open(f"{url}&min_free_bytes={16 * MIB}") as broker:
        broker.create_queue("other")
        threads = begin_enduring(broker, str(tmp_path / "notes"))
        wait(more(tmp_path, Kind.ACKED))
        # Into the reserve: nothing new, but what is there is given out and settled.
        disk.fill(leave_bytes=14 * MIB)
        with pytest.raises(DiskFull, match=f"min_free_bytes is {16 * MIB}; nothing was stored"):
            send_until_refused(broker, "other", b"no room for this")
        wait(more(tmp_path, Kind.ACKED))
        assert broker._store.health().away is None
        # Really full: nothing can be written, everything can be read.
        disk.fill()
        wait(lambda: "No space left" in str(broker._store.health().away))
        with pytest.raises(DiskFull, match=r"has taken no writes for .* No space left"):
            broker.create_queue("another")
        depth = broker.stats("standard").available
        assert len(list(entries(broker, "standard", State.AVAILABLE))) == depth
        assert broker.check().ok
        assert {spec.name for spec in broker.queues()} == {*QUEUES, "other"}
        with broker.view() as pinned:
            assert list(pinned.payload_rows(0, 5))
        # And back, by itself.
        disk.make_room()
        wait(lambda: broker._store.health().away is None)
        assert broker.check().ok
        wait(more(tmp_path, Kind.ACKED))
        wait(more(tmp_path, Kind.PUBLISHED))
        broker.create_queue("another")
    for thread in threads:
        thread.join()
    judge(url, tmp_path)
    lines = [each.getMessage() for each in caplog.records if each.name == "penstock.broker.runner"]
    assert [line.split(" be used")[0] for line in lines] == ["the store can't", "the store can"]


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_killed_while_full(design: str, disk: SmallDisk, tmp_path: Path) -> None:
    url = f"rocksdb:{disk.path}/store?design={design}"
    with child("endure", url, tmp_path / "notes") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        wait(more(tmp_path, Kind.ACKED))
        disk.fill()
        assert process.stdout.readline() == "away\n"
        process.kill()
    disk.make_room()
    judge(url, tmp_path)


@pytest.mark.parametrize("design", DESIGNS)
def test_files_that_can_not_grow(design: str, tmp_path: Path) -> None:
    """For everybody: a limit of this process instead of a small disk."""
    url = f"rocksdb:{tmp_path}/store?design={design}"
    with child("fill", url, "-", 1_000_000) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        raised, found, confirmed = msgspec.json.decode(process.stdout.readline())
        assert raised == ["DiskFull", "DiskFull"]
        assert len(confirmed) > 5
        assert found == [3 * len(confirmed), 3 * len(confirmed), True]
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert "File too large" in process.stdout.readline()
        last = int(process.stdout.readline())
        process.wait(PATIENCE_S)
    with penstock.open(url, background=False) as broker:
        assert_clean(broker)
        for queue in ("a", "b"):
            present = {entry.message_id: entry for entry in entries(broker, queue, State.AVAILABLE)}
            for number, ids in enumerate(confirmed):
                assert {present[i].payload for i in ids} == {b"%06d" % number * 1000}
            # A verb that was refused has changed nothing.
            assert set(present) == {i for ids in confirmed for i in ids} | {last}


# --- what ends while the disk is full -------------------------------------------------------------


def send_until_refused(broker: Broker, queue: str, payload: bytes) -> None:
    while True:
        broker.send(queue, payload)


def filled(broker: Broker, disk: SmallDisk) -> None:
    """Have a store that has something meet a full disk."""
    broker.create_queue("q")
    broker.send("q", b"kept")
    disk.fill()
    with pytest.raises(DiskFull):
        send_until_refused(broker, "q", bytes(100_000))


@pytest.mark.parametrize("durability", ["fsync", "relaxed"])
def test_a_store_is_let_go_of_on_a_full_disk(disk: SmallDisk, durability: str) -> None:
    url = f"rocksdb:{disk.path}/store?min_free_bytes=0"
    broker = penstock.open(url, durability=durability, background=False)  # type: ignore[arg-type]
    filled(broker, disk)
    view = broker._store.engine.view()  # type: ignore[attr-defined]
    # Of what nobody waited for, some may not be durable; of what somebody did, all is.
    with suppress(DiskFull) if durability == "relaxed" else nullcontext():
        broker.close()
    with pytest.raises(StorageFailed, match="the store was"):
        view.table("payloads").scan(b"", b"\xff", 1)
    assert not (disk.path / "store" / "PENSTOCK-OWNER").exists()
    with pytest.raises(StorageFailed, match="can't open"):
        penstock.open(url)
    disk.make_room()
    with penstock.open(url) as again:
        assert_clean(again)
        assert again.browse("q")[0].payload == b"kept"


def test_the_error_of_a_full_disk_is_not_hidden_by_the_close(disk: SmallDisk) -> None:
    def meet() -> None:
        with penstock.open(f"rocksdb:{disk.path}/store?min_free_bytes=0") as broker:
            broker.create_queue("q")
            disk.fill()
            send_until_refused(broker, "q", bytes(100_000))

    with pytest.raises(DiskFull, match="No space left"):
        meet()


def test_a_broker_without_a_sweeper_is_back_with_a_sweep(disk: SmallDisk) -> None:
    url = f"rocksdb:{disk.path}/store?min_free_bytes=0"
    with penstock.open(url, background=False) as broker:
        filled(broker, disk)
        pinned = broker.view()
        with pytest.raises(DiskFull):
            broker.sweep()
        disk.make_room()
        wait(lambda: _swept(broker))
        broker.send("q", b"room again")
        assert broker.browse("q")[0].payload == b"kept"
        assert broker.stats("q").available == len(broker.browse("q", limit=10_000))
        # What was pinned went with the database that it was of.
        with pytest.raises(StorageFailed, match="the store was closed, or opened again"):
            list(pinned.payload_rows(0, 1_000))
        pinned.close()


def _swept(broker: Broker) -> bool:
    try:
        broker.sweep()
    except DiskFull:
        return False
    return True


# --- the reserve ----------------------------------------------------------------------------------


def test_the_reserve_is_for_what_is_there(disk: SmallDisk) -> None:
    with penstock.open(f"rocksdb:{disk.path}/store?min_free_bytes={8 * MIB}") as broker:
        broker.create_queue("q", lease_ms=60_000)
        broker.publish([Message(b"%d" % n, {"queue": "q"}) for n in range(10)])
        held = broker.claim("q", limit=3)
        assert broker.free_bytes() is not None
        disk.fill(leave_bytes=4 * MIB)
        broker.create_queue("late", filter="queue = 'q'")
        broker.create_queue("other")
        # It is looked once a second.
        wait(lambda: not _sent(broker))
        for refused in (
            lambda: broker.send("q", b"x"),
            lambda: broker.publish([Message(b"x", {"queue": "q"})]),
            lambda: broker.backfill("late"),
        ):
            with pytest.raises(DiskFull, match="bytes free"):
                refused()
        first, second, third = (delivery.receipt for delivery in held)
        assert all(broker.ack([first]) + broker.release([second]))
        assert all(broker.extend([third], lease_ms=90_000))
        assert len(broker.claim("q", limit=2)) == 2
        broker.sweep()
        assert broker.purge("q") == 6
        assert broker._store.health().away is None
        disk.make_room()
        wait(lambda: _sent(broker))
        assert broker.backfill("late").added


def _sent(broker: Broker) -> bool:
    try:
        broker.send("other", b"x")
    except DiskFull:
        return False
    return True


def test_a_reserve_of_nothing_refuses_nothing(disk: SmallDisk) -> None:
    with penstock.open(f"rocksdb:{disk.path}/store?min_free_bytes=0") as broker:
        broker.create_queue("q")
        disk.fill(leave_bytes=2 * MIB)
        broker.send("q", b"x")


@pytest.mark.parametrize(
    "url",
    [
        "rocksdb:./data?min_free_bytes=lots",
        "rocksdb:./data?min_free_bytes=-1",
        "rocksdb:./data?min_free_bytes=",
        "memory:?min_free_bytes=1",
    ],
)
def test_a_reserve_is_a_number_of_bytes_of_a_disk(url: str) -> None:
    with pytest.raises(InvalidUrl, match="min_free_bytes"):
        penstock.open(url)
