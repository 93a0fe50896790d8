"""Limits of a queue that several processes share: what may be passed, and what is dropped once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

import penstock
from penstock import LimitReached, Message
from penstock.store.check_report import Kind
from penstock.store.sql.store import SqlStore
from penstock.testing.checking import assert_clean

PUBLISHERS = 4


def publish_all(url: str, times: int, **settings: Any) -> penstock.Broker:
    """Publish single messages by several brokers at once; return one of them."""
    brokers = [penstock.open(url) for _ in range(PUBLISHERS)]
    brokers[0].create_queue("q", **settings)

    def publish(broker: penstock.Broker) -> None:
        for _ in range(times):
            with suppress(LimitReached):
                broker.publish([Message(b"x", {"queue": "q"})])

    with ThreadPoolExecutor(PUBLISHERS) as threads:
        list(threads.map(publish, brokers))
    for broker in brokers[1:]:
        broker.close()
    return brokers[0]


def test_a_limit_is_passed_by_what_is_under_way_at_most(url: str) -> None:
    with publish_all(url, 10, max_messages=5) as broker:
        live = broker.stats("q").available
        assert 5 <= live < 5 + PUBLISHERS
        with pytest.raises(LimitReached):
            broker.send("q", b"")
        assert_clean(broker)


def test_what_is_too_much_is_dropped_once(url: str) -> None:
    with publish_all(url, 10, max_messages=5, overflow="drop_oldest") as broker:
        stats = broker.stats("q")
        assert (stats.available, stats.failed) == (5, 10 * PUBLISHERS - 5)
        assert_clean(broker)


def test_the_bytes_of_live_messages_are_audited(url: str) -> None:
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q", max_bytes=100)
        broker.send("q", b"12345")
        store = broker._store
        assert isinstance(store, SqlStore)
        store.database.execute("UPDATE queue_counts SET live_bytes = 7 WHERE slot = 0")
        (found,) = broker.check().violations
        assert found.kind is Kind.COUNTER
        assert broker.check(repair=True).left == 0
        assert broker.stats("q").live_bytes == 5
