"""Workers whose handlers run in child processes, some of which die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from tests.work.handlers import Noting
from tests.work.helping import PATIENCE_SECONDS, alive, fill, reasons, wait_until

import penstock
from penstock import InvalidInput, Message, Worker
from penstock.testing.checking import assert_clean
from penstock.worker import pools
from penstock.worker.pools import ProcessPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock import Broker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with penstock.open(f"rocksdb:{tmp_path}/store", durability="relaxed") as made:
        made.create_queue("q", backoff_base_ms=1, backoff_cap_ms=1, max_attempts=100)
        yield made
        assert_clean(made)


def pids(worker: Worker) -> list[int]:
    assert isinstance(worker._pool, ProcessPool)
    return [child.process.pid or 0 for child in worker._pool._children]


def test_what_becomes_of_messages_and_of_children_that_die(broker: Broker, tmp_path: Path) -> None:
    bodies = [b"fine", b"fail", b"retry", b"die"]
    ids = broker.publish([Message(body, {"queue": "q"}) for body in bodies])
    worker = Worker(
        broker,
        "q",
        "tests.work.handlers:mixed",
        mode="processes",
        concurrency=2,
        wait_ms=20,
        middleware=[Noting(tmp_path)],
    )
    with worker:
        wait_until(lambda: worker.stats().processed == 4)
        children = pids(worker)
    first = [reasons(broker, "q", message_id)[0] for message_id in ids]
    assert first == ["", "ValueError: not today", "later", "the child process was ended by SIGKILL"]
    stats = worker.stats()
    assert (stats.failed, stats.released, stats.replaced) == (3, 3, 1)
    ran_in = {int(path.name.partition("-")[2]) for path in tmp_path.glob("before-*")}
    assert ran_in
    assert os.getpid() not in ran_in
    assert children
    assert not any(map(alive, children))


def test_a_child_over_its_limit_is_killed_and_replaced(broker: Broker) -> None:
    (message_id,) = fill(broker, "q", 1)
    worker = Worker(
        broker,
        "q",
        "tests.work.handlers:stuck_once",
        mode="processes",
        concurrency=1,
        time_limit_ms=500,
        wait_ms=20,
    )
    with worker:
        wait_until(lambda: worker.stats().processed == 1)
    assert reasons(broker, "q", message_id)[0] == "over the time limit of 500 ms"
    assert worker.stats().replaced >= 1
    assert worker.stats().late == 0


@pytest.mark.parametrize("worn", [{"child_messages": 2}, {"child_memory_bytes": 120_000_000}])
def test_children_are_recycled(broker: Broker, tmp_path: Path, worn: dict[str, int]) -> None:
    fill(broker, "q", 7)
    worker = Worker(
        broker,
        "q",
        "tests.work.handlers:leaks",
        mode="processes",
        concurrency=1,
        wait_ms=20,
        middleware=[Noting(tmp_path)],
        **worn,  # type: ignore[arg-type]
    )
    with worker:
        wait_until(lambda: worker.stats().processed == 7)
    stats = worker.stats()
    assert stats.recycled >= 2
    assert (stats.claimed, stats.failed, stats.released, stats.replaced) == (7, 0, 0, 0)
    ran_in = {int(path.name.partition("-")[2]) for path in tmp_path.glob("before-*")}
    assert len(ran_in) >= 3
    assert not any(map(alive, ran_in))
    if "child_messages" in worn:
        assert stats.recycled == 3


def test_a_worker_of_threads_recycles_nothing() -> None:
    with pytest.raises(InvalidInput, match="a thread can't be replaced"):
        Worker("memory:", "q", "tests.work.handlers:nothing", child_messages=2)


def test_the_ready_file_of_children(broker: Broker, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.touch()
    options: dict[str, Any] = {"mode": "processes", "wait_ms": 20, "ready_file": ready}
    worker = Worker(broker, "q", "tests.work.only_in_parent:handler", **options)
    with worker:
        wait_until(lambda: worker.stats().troubles)
        assert not ready.exists()
    with Worker(broker, "q", "tests.work.handlers:nothing", **options):
        wait_until(ready.exists)
    assert not ready.exists()


def test_a_stop_at_once_kills_the_children(broker: Broker) -> None:
    (message_id,) = fill(broker, "q", 1)
    worker = Worker(
        broker,
        "q",
        "tests.work.handlers:stuck_once_async",
        mode="processes",
        concurrency=1,
        wait_ms=20,
    ).start()
    wait_until(lambda: worker.stats().in_progress == 1)
    (child,) = pids(worker)
    # They leave it to the worker what signals mean.
    os.kill(child, signal.SIGTERM)
    os.kill(child, signal.SIGINT)
    worker.stop(at_once=True)
    wait_until(lambda: worker.join(100))
    assert reasons(broker, "q", message_id) == ["cut off: the worker was stopped"]
    assert not alive(child)
    assert worker.stats().replaced == 0


def test_children_that_can_not_start(broker: Broker) -> None:
    fill(broker, "q", 1)
    worker = Worker(
        broker,
        "q",
        "tests.work.only_in_parent:handler",
        mode="processes",
        concurrency=1,
        prefetch=0,
        wait_ms=20,
    )
    with worker:
        wait_until(lambda: worker.stats().troubles == ("starting child processes",))
    assert broker.stats("q").done == 0
    assert broker.stats("q").available == 1


def test_children_that_can_not_be_replaced_hold_nothing(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was claimed ahead goes back, and no more is claimed, until a child is there again."""
    real = pools.Child
    made: list[int] = []
    mended = threading.Event()

    class Child(real):  # type: ignore[misc, valid-type]
        def __init__(self, *given: object) -> None:
            made.append(1)
            if len(made) > 1 and not mended.is_set():
                raise RuntimeError("no more children")
            super().__init__(*given)

    monkeypatch.setattr(pools, "Child", Child)
    bodies = [b"die", b"fine", b"fine"]
    ids = broker.publish([Message(body, {"queue": "q"}) for body in bodies])
    worker = Worker(
        broker,
        "q",
        "tests.work.handlers:mixed",
        mode="processes",
        concurrency=1,
        prefetch=2,
        wait_ms=20,
    )
    with worker:
        wait_until(lambda: worker.stats().released >= 3)
        # By then a claim that was under way has been answered.
        wait_until(lambda: len(made) >= 4)
        wait_until(lambda: broker.stats("q").available == 3)
        claimed = worker.stats().claimed
        tried = len(made)
        wait_until(lambda: len(made) > tried)
        assert worker.stats().claimed == claimed
        assert worker.stats().troubles == ("starting child processes",)
        mended.set()
        wait_until(lambda: worker.stats().processed == 3)
    assert [each.number for each in broker.attempts("q", ids[1])] == [1]


def test_nothing_is_claimed_before_a_child_is_ready(broker: Broker) -> None:
    fill(broker, "q", 3)
    with Worker(
        broker,
        "q",
        "tests.work.only_in_parent:handler",
        mode="processes",
        concurrency=2,
        wait_ms=20,
    ) as worker:
        wait_until(lambda: worker.stats().troubles == ("starting child processes",))
    assert worker.stats().claimed == 0


def test_a_death_is_noticed_whoever_the_child_has_left_behind(
    broker: Broker, tmp_path: Path
) -> None:
    (message_id,) = broker.publish([Message(b"x", {"queue": "q", "place": str(tmp_path)})])
    left_behind = tmp_path / "left-behind"
    try:
        with Worker(
            broker,
            "q",
            "tests.work.handlers:leaves_somebody_behind",
            mode="processes",
            concurrency=1,
            wait_ms=20,
        ) as worker:
            wait_until(lambda: worker.stats().processed == 1)
            assert alive(int(left_behind.read_text()))
    finally:
        os.kill(int(left_behind.read_text()), signal.SIGKILL)
    assert reasons(broker, "q", message_id)[0] == "the child process was ended by SIGKILL"


def test_what_a_handler_starts_gets_signals(broker: Broker) -> None:
    (message_id,) = fill(broker, "q", 1)
    with Worker(
        broker,
        "q",
        "tests.work.handlers:ends_what_it_started",
        mode="processes",
        concurrency=1,
        wait_ms=20,
    ) as worker:
        wait_until(lambda: worker.stats().processed + worker.stats().failed)
    assert reasons(broker, "q", message_id) == [""]


def test_processes_are_not_started_where_they_can_not_work(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(mode: Literal["threads", "processes"]) -> Worker:
        return Worker(broker, "q", "tests.work.handlers:nothing", mode=mode, wait_ms=20)

    here = multiprocessing.current_process()
    with monkeypatch.context() as patch:
        patch.setattr(here, "_inheriting", True, raising=False)
        refused = made("processes")
        with pytest.raises(InvalidInput, match="__main__"):
            refused.start()
        assert refused.join(0)
        with made("threads"):
            pass
    monkeypatch.setitem(here._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match="daemonic"):
        made("processes").start()


UNGUARDED = """
import penstock

broker = penstock.open("memory:")
broker.create_queue("q")
broker.send("q", b"x")
worker = penstock.Worker(
    broker, "q", "tests.work.handlers:nothing", mode="processes", concurrency=1
)
worker.start()
while not worker.stats().troubles:
    worker.join(10)
worker.stop()
worker.join()
print(f"claimed {worker.stats().claimed}")
"""


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
    )
    assert ended.stdout == "claimed 0\n", ended.stderr
    assert 'if __name__ == "__main__"' in ended.stderr


def test_what_can_not_be_sent_to_a_child(broker: Broker) -> None:
    with pytest.raises(InvalidInput, match="can't be sent to another process"):
        Worker(broker, "q", lambda _: None, mode="processes")
