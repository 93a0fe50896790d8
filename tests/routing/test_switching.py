"""A switch of the routing that a crash ends at any moment: every message comes once, in order."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest
from tests.routing.test_commits import RecordingEngine
from tests.routing.test_kill import held
from tests.waiting import wait_until

import penstock
from penstock import Broker, ManualClock, Message, route_once
from penstock.broker.tailer import match_page
from penstock.engines.memory import MemoryEngine
from penstock.testing.checking import assert_clean
from penstock.urls import DESIGNS, make_store

CHILD = Path(__file__).with_name("switching_child.py")


@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_a_crash_after_any_commit_leaves_a_store_that_goes_on(design: str) -> None:
    clock = ManualClock()
    engine = RecordingEngine(design, clock)
    with Broker(make_store(engine, design, clock), clock=clock, background=False) as broker:
        broker.configure_log(logs=3)
        broker.create_queue("all", filter="TRUE")
        ids = broker.publish([Message(b"", group=str(number)) for number in range(6)])
        first = len(engine.copies)
        broker.configure_log(routing="pipeline")
        for _ in range(3):
            ids += broker.publish([Message(b"", group=str(number)) for number in range(3)])
            ids += broker.publish([Message(b"")])
        page = broker.read_log(1, limit=2)
        broker.assign(1, page.cursor, match_page(page))
        broker.configure_log(routing="inline")
        ids += broker.publish([Message(b"")])
    routings = [check_copy(design, *copied, ids) for copied in engine.copies[first - 1 :]]
    assert routings[0] == routings[-1] == "inline"
    # The last messages of three logs are assigned before the commit of the switch itself.
    assert routings.count("pipeline") == 1 + 6 + 1 + 3


def check_copy(
    design: str, now_ms: int, rows: dict[str, dict[bytes, bytes]], ids: list[int]
) -> str:
    engine = MemoryEngine(DESIGNS[design])
    for name, copied in rows.items():
        engine.table(name).rows = copied.copy()
    clock = ManualClock(now_ms)
    with Broker(make_store(engine, design, clock), clock=clock, background=False) as broker:
        assert_clean(broker)
        routing = broker.info().routing
        published = ids[: broker.store_stats().published_total]
        if routing == "pipeline":
            route_once(broker)
        assert held(broker, "all") == published
        # What was cut off can be done again.
        broker.configure_log(routing="pipeline")
        published += broker.publish([Message(b"")])
        broker.configure_log(routing="inline")
        published += broker.publish([Message(b"")])
        assert held(broker, "all") == published
        assert_clean(broker)
    return routing


@pytest.mark.parametrize("url", ["rocksdb:{}?design=buckets", "slatedb+file://{}"])
def test_killed_processes_leave_a_store_that_goes_on(tmp_path: Path, url: str) -> None:
    kill_while_switching(url.format(tmp_path / "store"), rounds=3)


def kill_while_switching(url: str, rounds: int) -> None:
    """Kill processes that publish, tail and switch; look whether every message came once."""
    with penstock.open(url, background=False) as broker:
        broker.configure_log(logs=3)
        broker.create_queue("all", filter="TRUE")
        broker.create_queue("fifo", filter="TRUE", ordering="fifo")
    told: list[int] = []
    for _ in range(rounds):
        told += ids_until_killed(url, 60)
        with penstock.open(url, background=False) as broker:
            assert_clean(broker)
            while broker.info().routing == "pipeline" and route_once(broker):
                pass
            stored = logged(broker)
            assert held(broker, "all") == stored
            assert set(told) <= set(stored)
            assert broker.stats("all").enqueued_total == len(stored)
            assert broker.stats("fifo").enqueued_total == len(stored)
    with penstock.open(url, background=False) as broker:
        by_group: dict[str, list[int]] = defaultdict(list)
        while deliveries := broker.claim("fifo", limit=500):
            for delivery in deliveries:
                by_group[delivery.group].append(delivery.message_id)
            broker.ack([delivery.receipt for delivery in deliveries])
        assert sorted(chain(*by_group.values())) == stored
        assert all(ids == sorted(ids) for ids in by_group.values())
        assert_clean(broker)


def ids_until_killed(url: str, publishes: int) -> list[int]:
    """Kill a process after so many publishes; return the ids that it has told of."""
    lines: list[bytes] = []
    with subprocess.Popen([sys.executable, CHILD, url], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        reader = threading.Thread(target=lines.extend, args=[child.stdout])
        reader.start()
        try:
            wait_until(lambda: len(lines) >= publishes)
        finally:
            child.kill()
            reader.join()
    return [int(each) for line in lines if line.endswith(b"\n") for each in line.split()]


def logged(broker: Broker) -> list[int]:
    """Return the ids of all messages that the logs have."""
    pages = [broker.read_log(log, begin=0, limit=100_000) for log in broker.log_stats().cursors]
    return sorted(record.message_id for page in pages for record in page.records)
