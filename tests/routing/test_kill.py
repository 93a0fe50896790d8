"""A tailer that is killed at any moment: assignments and cursor are there together, or neither."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import penstock
from penstock import Broker, route_once
from penstock.testing.checking import assert_clean

CHILD = Path(__file__).with_name("tailing_child.py")
ROUNDS = 3


def held(broker: Broker, queue: str) -> list[int]:
    ids: list[int] = []
    cursor = None
    while True:
        page = broker.browse(queue, limit=10_000, cursor=cursor, payloads=False)
        ids += [entry.message_id for entry in page]
        cursor = page.next_cursor
        if cursor is None:
            return sorted(ids)


def check(broker: Broker) -> int:
    """Compare the queues with the logs up to their cursors; return how much was routed."""
    stats = broker.log_stats()
    everything, odd = [], []
    for log, cursor in stats.cursors.items():
        records = broker.read_log(log, begin=0, limit=100_000).records
        routed = [record for record in records if record.message_id < cursor]
        everything += [record.message_id for record in routed]
        odd += [record.message_id for record in routed if record.attributes["odd"]]
    assert held(broker, "all") == sorted(everything)
    assert held(broker, "odd") == sorted(odd)
    assert broker.stats("all").available == len(everything)
    return len(everything)


@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_a_killed_tailer_leaves_queues_and_cursors_in_step(tmp_path: Path, design: str) -> None:
    url = f"rocksdb:{tmp_path}/store?design={design}"
    with penstock.open(url, routing="pipeline", background=False) as broker:
        broker.configure_log(logs=2)
        broker.create_queue("all", filter="TRUE")
        broker.create_queue("odd", filter="odd")
    before = 0
    for round_ in range(ROUNDS):
        with subprocess.Popen([sys.executable, CHILD, url], stdout=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                assert child.stdout.readline() == b"routing\n"
                threading.Event().wait(0.05 + 0.1 * round_)
            finally:
                child.kill()
        with penstock.open(url, background=False) as broker:
            assert_clean(broker)
            routed = check(broker)
            assert routed > before
            before = routed
    with penstock.open(url, background=False) as broker:
        while route_once(broker):
            pass
        end = broker.log_stats().end
        assert set(broker.log_stats().cursors.values()) == {end}
        check(broker)
