"""Messages that were tried: one as often as can be counted, and many that are browsed at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.damaging import compact, files_of, flip
from tests.stores.failing import make_engine, open_on

import penstock
from penstock import Message, State, limits
from penstock.clock import ManualClock
from penstock.errors import StoreDamaged
from penstock.store.codec import opendata, records
from penstock.store.kv.history import History
from penstock.testing.checking import assert_clean
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.broker.broker import Broker


def tried(broker: Broker, attempts: int) -> None:
    """Have the failed message of queue q have been tried so often, the last one on record."""
    core: Any = broker._store
    queue = core.queue("q")
    ((entry,), _) = core.history.page(queue, State.FAILED, b"", 9)
    table = core.engine.table("history")
    batch = core.engine.batch()
    failed = entry._replace(attempts=attempts)
    batch.put(entry.part, records.encode_ended([failed], failed=True), table.family)
    key = opendata.ATTEMPTS.prefix(queue.id) + (entry.message_id << 16 | 1).to_bytes(10, "big")
    last = opendata.ATTEMPTS.prefix(queue.id) + (entry.message_id << 16 | attempts).to_bytes(
        10, "big"
    )
    batch.put(last, table.get(key), table.family)
    batch.delete(key, table.family)
    core.engine.commit(batch)


@pytest.mark.parametrize("before", [limits.MAX_ATTEMPTS - 1, limits.MAX_ATTEMPTS])
@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_attempts_stay_at_their_bound(design: str, before: int, tmp_path: Path) -> None:
    clock = ManualClock()
    broker = open_on(make_engine("memory", design, tmp_path), design, clock)
    broker.create_queue("q", max_attempts=1)
    broker.send("q", b"1")
    broker.release([broker.claim("q")[0].receipt])
    tried(broker, before)
    for _ in range(3):
        assert broker.redrive("q") == 1
        (delivery,) = broker.claim("q", limit=5)
        assert delivery.attempts == limits.MAX_ATTEMPTS
        (outcome,) = broker.release([delivery.receipt], reason="no")
        assert outcome.status == "failed"
        assert broker.attempts("q", delivery.message_id)[-1].number == limits.MAX_ATTEMPTS
        assert_clean(broker)
    broker.redrive("q")
    assert broker.ack([broker.claim("q")[0].receipt])[0].ok
    assert broker.purge("q", states=["done"]) == 1
    assert_clean(broker)


@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_what_is_too_much_for_one_answer_loses_no_attempt(
    design: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CLAIM_BYTES", 10)
    broker = open_on(make_engine("memory", design, tmp_path), design, ManualClock())
    broker.create_queue("q", max_attempts=1)
    broker.publish([Message(b"x" * 10, {"queue": "q"})])
    broker.release([broker.claim("q")[0].receipt])
    tried(broker, limits.MAX_ATTEMPTS)
    broker.publish([Message(b"y" * 10, {"queue": "q"}, priority=9)])
    broker.redrive("q")
    first, second = broker.claim("q", limit=9), broker.claim("q", limit=9)
    assert [each.attempts for each in (*first, *second)] == [1, limits.MAX_ATTEMPTS]
    assert_clean(broker)


@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_an_ack_does_not_need_a_first_attempt_that_can_not_be_read(
    design: str, tmp_path: Path
) -> None:
    url, path = f"rocksdb:{tmp_path}/store?design={design}", tmp_path / "store"
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q", backoff_base_ms=0, backoff_cap_ms=0)
        broker.publish([Message(b"x", {"queue": "q"}) for _ in range(300)])
        broker.release([each.receipt for each in broker.claim("q", limit=300)], delay_ms=0)
    compact(path, DESIGNS[design])
    for file in files_of(path)["history"]:
        flip(file, 0, file.stat().st_size // 2)
    with penstock.open(url, background=False) as broker:
        deliveries = broker.claim("q", limit=10)
        assert all(broker.ack([each.receipt for each in deliveries]))
        with pytest.raises(StoreDamaged):
            broker.attempts("q", deliveries[0].message_id)
        assert broker.stats("q").done == 10


@pytest.mark.parametrize("design", DESIGNS)
def test_browsing_looks_first_attempts_up_together(
    design: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    first_attempts = History.first_attempts

    def noting(self: Any, queue: Any, ids: Any) -> Any:
        asked.append(len(ids))
        return first_attempts(self, queue, ids)

    monkeypatch.setattr(History, "first_attempts", noting)
    clock = ManualClock()
    with penstock.open(f"memory:?design={design}", clock=clock) as broker:
        began_ms = clock.now_ms()
        broker.create_queue("q", backoff_base_ms=0, backoff_cap_ms=0)
        broker.publish([Message(b"", {"queue": "q"})] * 20)
        held = broker.claim("q", limit=20)
        clock.advance(5)
        broker.release([each.receipt for each in held], delay_ms=0)
        page = broker.browse("q", state="available")
        assert [each.first_claimed_ms for each in page] == [began_ms] * 20
        for _ in range(2):
            broker.claim("q", limit=10)
        page = broker.browse("q", state="in_flight")
        assert [each.first_claimed_ms for each in page] == [began_ms] * 20
    assert asked == [20, 10, 10]
