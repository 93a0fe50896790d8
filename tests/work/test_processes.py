"""Workers whose handlers run in child processes, some of which die."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from tests.work.handlers import Noting
from tests.work.helping import alive, fill, reasons, wait_until

import penstock
from penstock import InvalidInput, Message, Worker
from penstock.testing.checking import assert_clean
from penstock.work.pool_processes import ProcessPool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock import Broker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with penstock.open(f"rocksdb:{tmp_path}/store", durability="relaxed") as made:
        made.create_queue("q", backoff_base_ms=1, backoff_cap_ms=1, max_attempts=100)
        yield made
        assert_clean(made)


def pids(worker: Worker) -> list[int]:
    runtime = worker._runtime
    assert runtime is not None
    assert isinstance(runtime.pool, ProcessPool)
    return runtime.pool.pids


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


def test_what_can_not_be_sent_to_a_child(broker: Broker) -> None:
    with pytest.raises(InvalidInput, match="can't be sent to another process"):
        Worker(broker, "q", lambda _: None, mode="processes")
