"""Queues with limits on the key-value stores: what a crash leaves, and the counter of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.damaging import compact, files_of, flip
from tests.stores.failing import make_engine, open_on

import penstock
from penstock import ManualClock, Message
from penstock.broker.requests import Joint, Publish
from penstock.engines import rows_of
from penstock.errors import StorageFailed, StoreDamaged
from penstock.packing import pack_messages
from penstock.salvage import salvage
from penstock.store.check_report import Kind
from penstock.store.kv.store import KvStore
from penstock.testing.checking import assert_clean
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from pathlib import Path

DROPS: dict[str, Any] = {"max_messages": 2, "overflow": "drop_oldest"}


def store_of(broker: penstock.Broker) -> KvStore:
    store = broker._store
    assert isinstance(store, KvStore)
    return store


def messages(count: int) -> list[Message]:
    return [Message(b"%d" % n, {"queue": "q"}) for n in range(count)]


@pytest.fixture(params=["indexed", "buckets"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"rocksdb:{tmp_path}/store?design={request.param}"


def test_a_store_that_ended_before_it_dropped_drops_when_it_is_opened(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    with penstock.open(url, clock=clock, background=False) as broker:
        broker.create_queue("q", **DROPS)
        # As if the process had ended between the two commits.
        monkeypatch.setattr(store_of(broker), "drop_excess", lambda *_: 0)
        broker.publish(messages(5))
    with penstock.open(url, clock=clock, background=False) as broker:
        assert store_of(broker).soonest_ms() == 0
        assert broker.sweep().failed == 3
        assert broker.stats("q").available == 2
        assert store_of(broker).soonest_ms() != 0
        assert_clean(broker)


@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_a_publish_whose_excess_can_not_be_dropped_has_been_made(
    design: str, tmp_path: Path
) -> None:
    # The log keeps the error, and that the database: another folder for each.
    engine = make_engine("rocksdb", design, tmp_path / design)
    with open_on(engine, design, ManualClock()) as broker:
        broker.create_queue("q", **DROPS)
        # The first commit is the publish's, the second drops.
        engine.arm(2, StorageFailed("no"), only_commits=True)
        assert len(broker.publish(messages(3))) == 3
        assert engine.left is None
        assert broker.sweep().failed == 1
        assert_clean(broker)


def test_damage_of_a_queue_that_drops_is_not_its_neighbours(url: str, tmp_path: Path) -> None:
    path, design = tmp_path / "store", url.partition("=")[2]
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q")
        broker.create_queue("other", **DROPS)
        broker.publish([Message(b"x" * 50, {"queue": "q"}) for _ in range(300)])
    compact(path, DESIGNS[design])
    for file in files_of(path)["available" if design == "indexed" else "buckets"]:
        flip(file, 0, file.stat().st_size // 2)
    with penstock.open(url, background=False) as broker:
        broker.update_queue("q", **DROPS)
        for number in range(4):
            broker.publish([Message(b"%d" % number, {"queue": name}) for name in ("q", "other")])
        with pytest.raises(StoreDamaged):
            broker.sweep()
        assert [each.payload for each in broker.claim("other", limit=9)] == [b"2", b"3"]


def test_a_refused_publish_leaves_memory_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q", max_messages=1)
        broker.publish(messages(1))

        def load() -> None:
            pytest.fail("a refusal must not cost a look at the whole store")

        monkeypatch.setattr(store_of(broker), "load", load)
        with pytest.raises(penstock.LimitReached):
            broker.publish(messages(1))


def test_of_joint_publishes_only_those_without_room_are_refused(url: str) -> None:
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q", max_messages=3)
        broker.create_queue("other")
        publishes = [
            Publish(pack_messages([Message(b"%d" % number, {"queue": queue})] * count), None)
            for number, (queue, count) in enumerate([("q", 2), ("q", 2), ("other", 5), ("q", 1)])
        ]
        broker.begin(Joint(publishes=publishes))
        assert [len(each.answer) for each in publishes] == [2, 0, 5, 1]
        assert [type(each.error) for each in publishes if each.error] == [penstock.LimitReached]
        assert [each.payload for each in broker.claim("q", limit=9)] == [b"0", b"0", b"3"]
        assert broker.stats("other").available == 5


def test_a_check_counts_the_bytes_again(url: str) -> None:
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q", max_bytes=100)
        broker.publish(messages(9))
        store = store_of(broker)
        queue = store.queue("q")
        queue.counts.live_bytes = 77
        store.commit(store.begin(), (queue,), broker._clock.now_ms())
        (found,) = broker.check().violations
        assert found.kind is Kind.COUNTER
        assert "live_bytes is 77, not 9" in found.text
        assert broker.check(repair=True).left == 0
        assert broker.stats("q").live_bytes == 9


def test_messages_that_are_lost_take_no_room(url: str) -> None:
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q", max_bytes=9)
        broker.publish(messages(9))
        engine = store_of(broker).engine
        table = engine.table("available" if url.endswith("indexed") else "buckets")
        batch = engine.batch()
        for key, _ in rows_of(table, b"", b"\xff" * 30):
            batch.put(key, b"\xff\xff\xff", table.family)
        engine.commit(batch)
        # Until then the queue is full.
        with pytest.raises(penstock.LimitReached):
            broker.publish(messages(1))
    with penstock.open(url, background=False) as broker:
        assert broker.claim("q", limit=9) == []
        assert store_of(broker).has_aside or store_of(broker).soonest_ms() == 0
        broker.sweep()
        broker.publish(messages(9))
        assert broker.stats("q").live_bytes == 9
    with penstock.open(url, background=False) as broker:
        assert broker.stats("q").live_bytes == 9


def test_salvage_counts_them_too(url: str, tmp_path: Path) -> None:
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q", max_bytes=100)
        broker.publish(messages(9))
        (held,) = broker.claim("q")
    salvage(url.partition("?")[0], f"rocksdb:{tmp_path}/new")
    with penstock.open(f"rocksdb:{tmp_path}/new", background=False) as broker:
        assert held.payload
        assert broker.queue("q").max_bytes == 100
        assert broker.stats("q").live_bytes == 9
        assert_clean(broker)


def test_queues_without_limits_count_no_bytes(url: str) -> None:
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q", max_messages=10)
        broker.publish(messages(9))
        assert store_of(broker).queue("q").counts.live_bytes == 0
