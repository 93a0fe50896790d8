"""Messages whose metadata a store has spoiled: the others of a claim arrive all the same."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.waiting import wait_until

from penstock import Message
from penstock.packing import Envelope

if TYPE_CHECKING:
    from tests.native.serving import Served

    from penstock.client import Client

OTHERS = [b"0", b"1", b"3", b"4"]
# The ends of metadata records with the attributes {"queue": "q"}: text that is no UTF-8, a name
# that is no text, and a value that is none.
SPOILED = [b"\xa5queue\xa1\xff", b"\x05\xa1q", b"\xa5queue\x91\x01"]


@pytest.fixture(params=SPOILED)
def spoiled(request: Any, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish five messages, and spoil the third."""
    served.broker.update_queue("q", max_attempts=3, backoff_base_ms=0, backoff_cap_ms=0)
    lay_out = Envelope.metadata

    def spoil(envelope: Envelope, head: bytes, size: int) -> bytes:
        record = lay_out(envelope, head, size)
        return record[:-8] + request.param if envelope.priority else record

    with monkeypatch.context() as patch:
        patch.setattr(Envelope, "metadata", spoil)
        for n, priority in enumerate((0, 0, 1, 0, 0)):
            served.broker.publish([Message(b"%d" % n, {"queue": "q"}, priority=priority)])


@pytest.mark.usefixtures("spoiled")
def test_a_claim_gives_the_others(client: Client) -> None:
    assert [each.payload for each in client.claim("q", limit=10)] == OTHERS


@pytest.mark.usefixtures("spoiled")
def test_a_claim_that_was_not_sent_gives_all_of_them_back(served: Served) -> None:
    async def leave() -> None:
        claiming = served.batcher.claim("q", limit=10, lease_ms=3_600_000)
        waiting = asyncio.ensure_future(served.batcher.claimed(claiming))
        while not claiming.done():
            await asyncio.sleep(0)
        waiting.cancel()

    served.do(leave())
    wait_until(lambda: served.broker.stats("q").available == 5)


@pytest.mark.usefixtures("spoiled")
def test_a_consumer_gets_the_others_and_the_message_fails(client: Client, served: Served) -> None:
    # With less credit than attempts: what can't be read gives its credit back.
    consumer = client.consume("q", prefetch=2, wait_ms=60_000)
    got = []
    for _ in OTHERS:
        delivery = next(consumer)
        got.append(delivery.payload)
        assert delivery.ack().result().ok
    assert got == OTHERS
    wait_until(lambda: client.stats("q").failed == 1)
    served.broker.send("q", b"more")
    assert next(consumer).payload == b"more"
    consumer.close()


@pytest.mark.usefixtures("spoiled")
def test_an_embedded_claim_gives_the_others(served: Served) -> None:
    assert [each.payload for each in served.broker.claim("q", limit=10)] == OTHERS
