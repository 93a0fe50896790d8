"""LeaseEntry lists its messages sorted, as its schema says, however they were delivered."""

from __future__ import annotations

import pytest

from penstock import Message
from penstock.broker.broker import Broker
from penstock.clock import ManualClock
from penstock.engines.memory import MemoryEngine
from penstock.store.codec.records import decode_lease, encode_lease
from penstock.urls import DESIGNS, make_store

# A claim of three messages by "w1" at 1,700,000,000,000 ms, for a minute.
ENTRY = """
    00 00 00 00 12 00 00 00  00 00 00 00 04 00 03 00
    3c f1 53 65 00 00 00 00  60 52 e6 cf 8b 01 00 00
    00 68 e5 cf 8b 01 00 00  01 00 00 00 00 00 00 00
    09 00 00 00 1e 00 00 00  1d 00 00 00 c2 00 00 00
    25 00 00 00 1a 00 00 00
    09 00 00 00 42 00 00 00  09 00 00 00 42 00 00 00
    09 00 00 00 42 00 00 00
    00 00 00 00 00 00 00 01  00 00 00 00 00 00 00 02
    00 00 00 00 00 00 00 03
    00 00 01 8b cf e6 52 60  01 8b cf e5 68 00 70 a5
    ab aa 94 55 e3 e7 00 00
    77 31 00 00 00 00 00 00
"""


@pytest.mark.parametrize("design", DESIGNS)
def test_the_messages_of_a_lease_are_sorted(design: str) -> None:
    clock, engine = ManualClock(1_700_000_000_000), MemoryEngine(DESIGNS[design])
    with Broker(make_store(engine, design, clock), clock=clock, background=False) as broker:
        broker.create_queue("q")
        broker.publish([Message(b"x", {"queue": "q"}, priority=each) for each in (1, 3, 2)])
        taken = broker.claim("q", limit=3, lease_ms=60_000, consumer="w1")
        assert [each.message_id for each in taken] == [2, 3, 1]

        def entries() -> list[bytes]:
            return [value for _, value in engine.table("leases").scan(b"", b"\xff" * 17, 9)]

        (entry,) = entries()
        if design == "indexed":
            assert entry == bytes.fromhex(ENTRY)
        assert broker.extend(taken[0].lease, lease_ms=90_000)
        assert broker.extend([each.receipt for each in taken[:2]], lease_ms=99_000)
        for entry in entries():
            lease = decode_lease(entry)
            assert lease.ids == sorted(lease.ids)
        broker.ack([taken[1].receipt])
        assert sum(len(decode_lease(each).ids) for each in entries()) == 2
        assert broker.check().ok

        # A check finds one that is not, and mends it.
        broker.release([each.receipt for each in (taken[0], taken[2])], unseen=True)
        broker.claim("q", limit=2)
        name, entry = engine.table("leases").scan(b"", b"\xff" * 17, 1)[0]
        lease = decode_lease(entry)
        batch = engine.batch()
        wrong = encode_lease(*lease._replace(ids=lease.ids[::-1]))
        batch.put(name, wrong, engine.table("leases").family)
        engine.commit(batch)
        assert [each.kind.value for each in broker.check(repair=True).violations] == ["wrong_field"]
        assert entries() == [entry]
