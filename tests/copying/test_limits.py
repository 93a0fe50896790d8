"""Queues with limits are copied: settings, counters, and the limits themselves hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.copying.places import HOUR_MS, KINDS

import penstock
from penstock import LimitReached, Message
from penstock.copying import copy

if TYPE_CHECKING:
    from tests.copying.places import Places

    from penstock.broker.broker import Broker


def put(broker: Broker, queue: str, *payloads: bytes) -> None:
    broker.publish([Message(payload, {"queue": queue}) for payload in payloads])


@pytest.mark.parametrize("target_kind", KINDS)
@pytest.mark.parametrize("source_kind", KINDS)
def test_limits_hold_after_a_copy(places: Places, source_kind: str, target_kind: str) -> None:
    source, target = places.make(source_kind, "source"), places.make(target_kind, "target")
    with penstock.open(source, background=False) as broker:
        broker.create_queue("full", max_messages=4, max_bytes=10)
        broker.create_queue("drops", max_messages=3, max_bytes=8, overflow="drop_oldest")
        broker.create_queue("late", ordering="fifo")
        for queue in ("full", "drops", "late"):
            put(broker, queue, b"1", b"22", b"33", b"444")
        broker.claim("full", limit=1, lease_ms=HOUR_MS)
        (held,) = broker.claim("late", limit=1, lease_ms=HOUR_MS)
        # Lower than its depth, so that nothing comes in.
        broker.update_queue("late", max_messages=1, max_bytes=1)
    copy(source, target)
    with penstock.open(target, background=False, create=False) as broker:
        assert broker.check().violations == []
        assert [broker.stats(each).live_bytes for each in ("full", "drops", "late")] == [8, 7, 8]
        with pytest.raises(LimitReached, match="max_messages=4"):
            put(broker, "full", b"5")
        (done,) = broker.claim("full")
        broker.ack([done.receipt])
        with pytest.raises(LimitReached, match="max_bytes=10"):
            put(broker, "full", b"55555")
        put(broker, "full", b"5")
        put(broker, "drops", b"5555")
        assert [each.payload for each in broker.claim("drops", limit=9)] == [b"444", b"5555"]
        with pytest.raises(LimitReached, match="max_messages=1"):
            put(broker, "late", b"5")
        assert held.payload == b"1"
        # It is delayed until the lease of the source is over, and the others of its group wait.
        assert broker.claim("late") == []
        assert broker.purge("late") == 4
        put(broker, "late", b"5")
        assert broker.check().violations == []
