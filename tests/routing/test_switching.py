"""A switch of the routing that a crash ends after any of its commits: every message comes once."""

from __future__ import annotations

import pytest
from tests.routing.test_commits import RecordingEngine
from tests.routing.test_kill import held

from penstock import Broker, ManualClock, Message, route_once
from penstock.broker.tailer import match_page
from penstock.engines.memory import MemoryEngine
from penstock.testing.checking import assert_clean
from penstock.urls import DESIGNS, make_store


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
