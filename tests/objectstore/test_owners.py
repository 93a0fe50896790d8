"""One owner at a time: processes that are killed, paused and taken over from, on S3 and on disk."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.judging import judge_queue
from tests.noting import notes_of
from tests.waiting import wait_until

import penstock
from penstock import ManualClock, StoreFenced, SystemClock
from penstock.testing.auditor import Kind
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator


CHILD = Path(__file__).parent.parent / "crash" / "child.py"
QUEUES = ("standard", "fifo")
PLACES = ["file", "s3"]
PATIENCE_S = 120

pytestmark = pytest.mark.slow


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"slatedb+file://{tmp_path}/store"
    found: str = request.getfixturevalue("url")
    return found


@contextmanager
def worker(url: str, notes: Path, name: object) -> Iterator[subprocess.Popen[str]]:
    """Have a process publish, claim and settle, and note what it does."""
    process = subprocess.Popen(
        [sys.executable, str(CHILD), "work", url, str(notes), str(name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        yield process
    finally:
        process.kill()
        process.communicate()


wait = partial(wait_until, seconds=PATIENCE_S)


def acked(notes: Path) -> int:
    """Count what all processes have noted to be acked so far."""
    files = [notes.with_name(f"{notes.name}.{queue}") for queue in QUEUES]
    written = (note for each in files if each.exists() for note in notes_of(each))
    return sum(note.kind is Kind.ACKED for note in written)


def judge(url: str, notes: Path) -> int:
    """Hold what all processes have noted against what is there; return how many were acked."""
    still = ManualClock(SystemClock().now_ms())
    with penstock.open(url, background=False, clock=still) as broker:
        assert_clean(broker)
        for queue in QUEUES:
            written = notes_of(notes.with_name(f"{notes.name}.{queue}"))
            judge_queue(broker, queue, written, fifo=queue == "fifo")
    return acked(notes)


def test_killed_at_any_moment(place: str, tmp_path: Path) -> None:
    notes, clock = tmp_path / "notes", SystemClock()
    for round_ in range(3):
        with worker(place, notes, round_) as process:
            threading.Event().wait(0.7 + clock.random())
            wait(lambda: acked(notes) > 4 * (round_ + 1))  # noqa: B023 - called within the round
            assert process.poll() is None, "the worker ended by itself"
    assert judge(place, notes) > 10


def test_taken_over_while_at_work(place: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with worker(place, notes, 0) as first:
        threading.Event().wait(0.7)
        wait(lambda: acked(notes) > 5)
        with worker(place, notes, 1) as second:
            # Its threads die of the error; a verb of each has failed by now.
            _, said = first.communicate(timeout=PATIENCE_S)
            assert said.count("penstock.errors.StoreFenced") >= 4
            before = acked(notes)
            threading.Event().wait(0.7)
            wait(lambda: acked(notes) > before + 5)
            assert second.poll() is None
    assert judge(place, notes) > 10


def test_taken_over_while_paused(place: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with worker(place, notes, 0) as first:
        threading.Event().wait(0.7)
        wait(lambda: acked(notes) > 5)
        first.send_signal(signal.SIGSTOP)
        before = acked(notes)
        with worker(place, notes, 1) as second:
            threading.Event().wait(0.7)
            # What it had begun goes on now, and must not be seen by anybody.
            first.send_signal(signal.SIGCONT)
            _, said = first.communicate(timeout=PATIENCE_S)
            assert said.count("penstock.errors.StoreFenced") >= 4
            threading.Event().wait(0.5)
            wait(lambda: acked(notes) > before + 5)
            assert second.poll() is None
    assert judge(place, notes) > 10


def test_every_verb_of_a_fenced_broker_fails(place: str) -> None:
    first = penstock.open(place)
    first.create_queue("q")
    first.send("q", b"one")
    (held,) = first.claim("q", lease_ms=3_600_000)
    second = penstock.open(place)
    with pytest.raises(StoreFenced, match="another broker has opened"):
        first.send("q", b"two")
    # Those that only look come first: nobody but the refused write has told them.
    for verb in (
        first.queues,
        lambda: first.stats("q"),
        lambda: first.browse("q"),
        lambda: first.ack([held.receipt]),
        lambda: first.extend([held.receipt], lease_ms=3_600_000),
        lambda: first.claim("q"),
        lambda: first.create_queue("other"),
    ):
        with pytest.raises(StoreFenced):
            verb()
    first.close()
    assert [spec.name for spec in second.queues()] == ["q"]
    assert all(second.ack([held.receipt]))
    assert second.stats("q").enqueued_total == 1
    assert_clean(second)
    second.close()


def test_a_fenced_broker_that_only_waits_finds_out(place: str) -> None:
    first = penstock.open(place)
    first.create_queue("q")
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            first.claim("q", wait_ms=2_000 * PATIENCE_S)
        except StoreFenced as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with penstock.open(place):
        waiting.join(PATIENCE_S)
        assert len(failures) == 1
        with pytest.raises(StoreFenced):
            first.stats("q")
    first.close()
