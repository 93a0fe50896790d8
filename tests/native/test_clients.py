"""Both clients against a running server: verbs, threads, cancelled calls."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, assert_type

import pytest
from tests.native.serving import SLOW_SECONDS, VERB_NAMES

import penstock
from penstock.client import AsyncClient, Client
from penstock.client.calls import Verbs
from penstock.errors import (
    BrokerClosed,
    InvalidFilter,
    InvalidInput,
    InvalidMessage,
    InvalidUrl,
    QueueNotFound,
    ServerUnreachable,
)
from penstock.model import Backfilled, Delivery, Message, State

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.native.serving import Served

# Verbs that a broker of this process has no need of.
OWN = {"all_stats", "backup", "ping"}


def message(body: bytes = b"", **fields: Any) -> Message:
    return Message(body, {"queue": "q"}, **fields)


def run(served: Served, work: Callable[[AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with await penstock.connect_async(served.url, **options) as client:
            await asyncio.wait_for(work(client), 2 * SLOW_SECONDS)

    asyncio.run(main())


@pytest.mark.parametrize("name", sorted(VERB_NAMES - OWN))
def test_verbs_have_the_signatures_of_the_broker(name: str) -> None:
    theirs = inspect.signature(getattr(penstock.Broker, name)).parameters.values()
    for kind in (Client, AsyncClient):
        ours = inspect.signature(getattr(kind, name)).parameters.values()
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]
        assert [p.kind for p in ours][1:] == [p.kind for p in theirs][1:]
    assert getattr(Verbs, name).__doc__


def test_help_shows_a_verb_as_a_method(client: Client) -> None:
    plain = vars(pydoc)["plaintext"]
    # Python 3.14 shows types without quotes.
    of_class = pydoc.render_doc(AsyncClient.attempts, renderer=plain).replace("'", "")
    assert "attempts(self, /, queue: str, message_id: int) -> list[Attempt]" in of_class
    of_client = pydoc.render_doc(client.attempts, renderer=plain).replace("'", "")
    assert "attempts(queue: str, message_id: int) -> list[Attempt]" in of_client
    assert "Return every attempt at a message" in of_client


def test_all_verbs_answer_as_the_embedded_broker_does(served: Served, client: Client) -> None:
    broker = served.broker
    client.create_queue("all", filter="TRUE", description="ä")
    ids = client.publish([message(b"%d" % n, priority=n) for n in range(5)])
    assert ids == [entry.message_id for entry in broker.browse("q", limit=9)][::-1]
    assert client.send("q", b"x", n=1, s="ß", f=0.5, b=True, none=None) == ids[-1] + 1
    first = client.claim("q", limit=2, consumer="me")
    assert [d.payload for d in first] == [b"4", b"3"]
    assert client.attempts("q", first[0].message_id) == broker.attempts("q", first[0].message_id)
    assert client.extend(first[0].lease, lease_ms=60_000)[0].ok
    assert client.ack([first[0].receipt], queue="q")[0].status == "done"
    assert client.release([first[1].receipt], reason="no")[0].status == "retrying"
    for state in State:
        page, expected = client.browse("q", state=state), broker.browse("q", state=state)
        assert list(page) == list(expected)
        assert page.next_cursor == expected.next_cursor
    assert client.browse("all", limit=2).next_cursor == broker.browse("all", limit=2).next_cursor
    assert client.queues() == broker.queues()
    assert client.queue("all") == broker.queue("all")
    assert client.update_queue("q", max_attempts=1) == broker.queue("q")
    delivery = client.claim("q")[0]
    assert client.release([delivery.receipt])[0].status == "failed"
    client.create_queue("dead", labels={"a": "b"})
    assert client.move("q", "dead") == 1
    assert client.move("dead", "q", state="available", message_ids=[delivery.message_id]) == 1
    assert client.queue("dead").labels == {"a": "b"}
    delivery = next(d for d in client.claim("q", limit=9) if d.message_id == delivery.message_id)
    assert client.release([delivery.receipt])[0].status == "failed"
    assert client.redrive("q", where="queue = 'q'") == 1
    assert client.store_stats() == broker.store_stats()
    assert client.info() == broker.info()
    assert client.log_stats() == broker.log_stats()
    assert client.read_log(begin=0) == broker.read_log(begin=0)
    assert client.configure_log(retention_ms=5).retention_ms == 5
    assert client.purge("q", states=list(State)) == 6
    assert client.delete_queue("all") == 6
    assert client.stats("q").acked_total == 1


def test_errors_are_the_same_classes(client: Client) -> None:
    with pytest.raises(QueueNotFound, match="nowhere"):
        client.claim("nowhere")
    with pytest.raises(InvalidFilter) as caught:
        client.create_queue("f", filter="a = \n  b c")
    assert caught.value.line == 2
    with pytest.raises(InvalidMessage):
        client.publish([Message(b"", {"a": [1]})])  # type: ignore[dict-item]
    with pytest.raises(InvalidInput, match="text of a filter"):
        client.redrive("q", where=lambda _: True)
    with pytest.raises(InvalidInput):
        client.claim("q", limit=0)


def test_backfill_goes_in_steps_and_tells(served: Served, client: Client) -> None:
    client.publish([message() for _ in range(3000)])
    client.create_queue("late", filter="queue = 'q'")
    served.broker.create_queue("late2", filter="queue = 'q'")
    ours: list[tuple[Backfilled, int]] = []
    theirs: list[tuple[Backfilled, int]] = []
    done = client.backfill("late", progress=lambda *at: ours.append(at))
    assert done == served.broker.backfill("late2", progress=lambda *at: theirs.append(at))
    assert ours == theirs
    assert len(ours) > 1
    assert done.added == 3000
    assert client.backfill("late", from_=done.next).added == 0
    with pytest.raises(InvalidInput, match="'earliest'"):
        client.backfill("late", from_="soon")  # type: ignore[arg-type]


def test_open_gives_a_client(served: Served) -> None:
    with penstock.open(served.url) as broker:
        assert broker.send("q", b"x") == 1
    with pytest.raises(InvalidUrl):
        penstock.open(served.url, durability="relaxed")


@pytest.mark.parametrize(
    "url", ["penstock:", "penstock://", "penstock://h:99999", "http://h:1", "penstock://h/x", ""]
)
def test_urls_that_name_no_server(url: str) -> None:
    with pytest.raises(InvalidUrl):
        penstock.connect(url)


def test_nobody_there() -> None:
    with pytest.raises(ServerUnreachable, match="no server at"):
        penstock.connect("penstock://127.0.0.1:1", patience_ms=100)


def test_a_closed_client_raises(served: Served) -> None:
    client = penstock.connect(served.url)
    client.close()
    client.close()
    with pytest.raises(BrokerClosed):
        client.stats("q")


def test_large_answers(client: Client) -> None:
    client.publish([message(bytes([n]) * 1_000_000) for n in range(5)])
    deliveries = client.claim("q", limit=5)
    assert sorted(d.payload for d in deliveries) == [bytes([n]) * 1_000_000 for n in range(5)]


def test_a_publish_larger_than_a_frame_is_refused(client: Client) -> None:
    with pytest.raises(InvalidInput, match="at once"):
        client.publish([message(b"x" * (16 << 20)) for _ in range(4)])
    assert client.stats("q").available == 0


def test_twenty_threads_share_a_connection(served: Served, client: Client) -> None:
    def work(thread: int) -> list[int]:
        ids = []
        for n in range(30):
            ids += client.publish([message(b"%d %d" % (thread, n))])
        return ids

    with ThreadPoolExecutor(20) as pool:
        ids = [each for some in pool.map(work, range(20)) for each in some]
    assert len(set(ids)) == 600
    assert served.broker.stats("q").available == 600
    assert len(served.listener.connections) == 1

    def drain(_: int) -> int:
        taken = 0
        while deliveries := client.claim("q", limit=7):
            taken += sum(map(bool, client.ack([d.receipt for d in deliveries])))
        return taken

    with ThreadPoolExecutor(20) as pool:
        assert sum(pool.map(drain, range(20))) == 600


def test_the_asynchronous_client_has_the_same_verbs(served: Served) -> None:
    async def work(client: AsyncClient) -> None:
        ids = await client.publish([message(b"1"), message(b"2")])
        deliveries = await client.claim("q", limit=2)
        assert [d.message_id for d in deliveries] == ids
        outcomes = await client.ack([d.receipt for d in deliveries])
        assert all(outcomes)
        await client.create_queue("late", filter="TRUE")
        assert (await client.backfill("late")).added == 2
        with pytest.raises(QueueNotFound):
            await client.stats("nowhere")
        with pytest.raises(InvalidMessage):
            await client.publish([Message("text")])  # type: ignore[arg-type]

    run(served, work)


def test_type_checkers_know_both_clients(served: Served, client: Client) -> None:
    assert_type(client.publish([]), list[int])
    assert_type(client.claim("q", limit=2), list[Delivery])
    assert_type(client.backfill("q"), Backfilled)

    async def work(client: AsyncClient) -> None:
        assert_type(await client.publish([]), list[int])
        assert_type(await client.claim("q", limit=2), list[Delivery])
        assert_type(await client.backfill("q"), Backfilled)
        with pytest.raises(TypeError):
            await client.claim("q", 5)  # type: ignore[call-arg]

    run(served, work)


def test_requests_are_pipelined(served: Served) -> None:
    async def work(client: AsyncClient) -> None:
        waiting = asyncio.ensure_future(client.claim("q", wait_ms=600_000))
        await asyncio.gather(*(client.stats("q") for _ in range(50)))
        assert not waiting.done()
        await client.send("q", b"x")
        assert len(await waiting) == 1

    run(served, work)


def test_a_cancelled_claim_takes_nothing(served: Served) -> None:
    async def work(client: AsyncClient) -> None:
        waiting = asyncio.ensure_future(client.claim("q", wait_ms=600_000))
        while not served.batcher.parked:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await client.ping()
        assert served.batcher.parked == 0
        await client.send("q", b"x")
        assert len(await client.claim("q")) == 1

    run(served, work)
