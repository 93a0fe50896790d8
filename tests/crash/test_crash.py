"""Processes that die, and directories that are taken: on a real RocksDB."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.judging import entries, judge_queue
from tests.noting import notes_of
from tests.waiting import wait_until

import penstock
from penstock import ManualClock, State, StoreLocked, SystemClock
from penstock.testing.auditor import Kind
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator


CHILD = Path(__file__).with_name("child.py")
DESIGNS = ["indexed", "buckets"]
ROUNDS = 4
QUEUES = ("standard", "fifo")
PATIENCE_S = 120


@contextmanager
def child(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start a program of child.py, and see to it that it ends."""
    process = subprocess.Popen(
        [sys.executable, str(CHILD), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def seen(place: Path, queue: str) -> Counter[Kind]:
    """Count the notes of a queue by their kind."""
    return Counter(note.kind for note in notes_of(place / f"notes.{queue}"))


wait = partial(wait_until, seconds=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_killed_at_any_moment(design: str, tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/store?design={design}"
    clock = SystemClock()

    def has_worked(rounds: int) -> bool:
        counts = [seen(tmp_path, queue) for queue in QUEUES]
        acked, released = (min(each[k] for each in counts) for k in (Kind.ACKED, Kind.RELEASED))
        return acked > 6 * rounds and released > 2 * rounds

    for round_ in range(ROUNDS):
        with child("work", url, tmp_path / "notes", round_) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "working\n"
            threading.Event().wait(0.3 + clock.random())
            wait(lambda: has_worked(round_ + 1))  # noqa: B023 - called before the round is over
            assert process.poll() is None, "the child ended by itself"
    # Time stands still from here: nothing moves from one state to another between two looks.
    still = ManualClock(clock.now_ms())
    with penstock.open(url, background=False, clock=still) as broker:
        assert_clean(broker)
        for queue in QUEUES:
            notes = notes_of(tmp_path / f"notes.{queue}")
            waiting, over = judge_queue(broker, queue, notes, fifo=queue == "fifo")
            stats = broker.stats(queue)
            assert stats.available + stats.delayed + stats.in_flight == len(waiting)
            assert stats.done + stats.failed == len(over)
        totals = broker.store_stats()
        assert (totals.quarantined_total, totals.healed_total) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_killed_in_a_move(design: str, tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/store?design={design}"
    clock = SystemClock()
    with penstock.open(url, background=False) as broker:
        for queue in "abc":
            broker.create_queue(queue, max_attempts=1, bucket_exponent=1)
        sent = [penstock.Message(b"%d" % n, {"queue": "a"}) for n in range(500)]
        ids = broker.publish(sent)
    moved = tried = 0
    for round_ in range(ROUNDS):
        with child("move", url) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "moving\n"
            threading.Event().wait(0.2 + clock.random() / 2)
            # In one round at least a kill comes after much has been moved.
            while round_ == ROUNDS - 1 and moved + int(process.stdout.readline()) <= len(sent):
                pass
            assert process.poll() is None, "the child ended by itself"
        with penstock.open(url, background=False, clock=ManualClock(clock.now_ms())) as broker:
            assert_clean(broker)
            found = [entry for queue in "abc" for entry in entries(broker, queue, *State)]
            assert sorted(entry.message_id for entry in found) == ids
            by_id = {entry.message_id: entry.payload for entry in found}
            assert [by_id[id_] for id_ in ids] == [message.payload for message in sent]
            for entry in found[::50]:
                tries = [each.number for each in broker.attempts(entry.queue, entry.message_id)]
                assert tries == list(range(1, entry.attempts + 1))
            totals = sum(broker.stats(queue).moved_in_total for queue in "abc")
            assert totals >= moved
            moved, tried = totals, tried + sum(entry.attempts for entry in found)
    assert moved > 500
    assert tried > 0


def test_a_store_has_one_owner(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/store"
    with child("hold", url) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        with pytest.raises(StoreLocked, match=rf"\b{process.pid}\b"):
            penstock.open(url)
    with penstock.open(url), pytest.raises(StoreLocked, match="this process"):
        penstock.open(url)
    with penstock.open(url) as broker:
        assert broker.queues() == []
