"""Tracing: spans around the batcher's verbs, and traces that travel in messages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import penstock
from penstock import InvalidInput, Message, QueueNotFound
from penstock.broker.requests import Publish
from penstock.packing import pack_messages
from penstock.server import running
from penstock.server.tracing import TracedBatcher
from penstock.tracing import TRACEPARENT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans_of(work: Callable[[TracedBatcher], Awaitable[Any]]) -> tuple[Any, list[Any]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def run() -> Any:
        batcher = TracedBatcher(broker, asyncio.get_running_loop(), provider.get_tracer("test"))
        try:
            return await work(batcher)
        finally:
            await batcher.close()

    with penstock.open("memory:", background=False) as broker:
        broker.create_queue("q")
        return asyncio.run(run()), list(exporter.get_finished_spans())


def test_a_trace_goes_through_a_queue() -> None:
    async def work(batcher: TracedBatcher) -> Any:
        await batcher.publish([Message(b"a", {"queue": "q"}), Message(b"b", {"queue": "q"})])
        taken = await batcher.claim("q", limit=5)
        await batcher.extend([taken[0].receipt], lease_ms=1_000)
        await batcher.ack([taken[0].receipt])
        await batcher.release([taken[1].receipt])
        return taken

    taken, spans = spans_of(work)
    assert [each.name for each in spans] == ["publish (all)", "claim q", "extend", "ack", "release"]
    publish, claim = spans[:2]
    own = f"{publish.context.trace_id:032x}-{publish.context.span_id:016x}"
    assert [each.attributes[TRACEPARENT][3:-3] for each in taken] == [own, own]
    assert [link.context.span_id for link in claim.links] == [publish.context.span_id] * 2
    assert claim.context.trace_id != publish.context.trace_id
    assert publish.attributes["messaging.batch.message_count"] == 2
    assert claim.attributes["messaging.destination.name"] == "q"


def test_a_trace_that_a_message_brings_is_continued() -> None:
    async def work(batcher: TracedBatcher) -> Any:
        brought = {"queue": "q", TRACEPARENT: PARENT}
        await batcher.publish([Message(b"a", brought), Message(b"b", {"queue": "q"})])
        return await batcher.claim("q", limit=5)

    taken, (publish, claim) = spans_of(work)
    assert f"{publish.parent.span_id:016x}" == PARENT.split("-")[2]
    assert taken[0].attributes[TRACEPARENT] == PARENT
    assert f"{publish.context.span_id:016x}" in taken[1].attributes[TRACEPARENT]
    assert len(claim.links) == 2


@pytest.mark.parametrize("brought", ["nonsense", 5, None])
def test_what_is_no_trace_is_left_alone(brought: Any) -> None:
    async def work(batcher: TracedBatcher) -> Any:
        await batcher.publish([Message(b"a", {"queue": "q", TRACEPARENT: brought})])
        return await batcher.claim("q")

    taken, (publish, claim) = spans_of(work)
    assert taken[0].attributes[TRACEPARENT] == brought
    assert publish.parent is None
    assert not claim.links


def test_failures_are_told() -> None:
    async def work(batcher: TracedBatcher) -> None:
        with pytest.raises(QueueNotFound):
            await batcher.claim("nope")
        with pytest.raises(InvalidInput):
            await batcher.claim("q", limit=0)

    _, spans = spans_of(work)
    assert [each.status.status_code for each in spans] == [StatusCode.ERROR] * 2
    assert [each.status.description for each in spans] == ["QueueNotFound", "InvalidInput"]


def test_a_request_that_is_late_before_its_turn_is_not_done() -> None:
    async def work(batcher: TracedBatcher) -> bool:
        late: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = Publish(pack_messages([Message(b"", {"queue": "q"})]), None)
        batcher.submit(request, late)
        untouched = batcher.withdraw(late)
        await asyncio.sleep(0.01)
        assert late.cancelled()
        assert batcher.broker.stats("q").available == 0
        return untouched

    untouched, (span,) = spans_of(work)
    assert untouched
    assert [event.name for event in span.events] == ["cancelled"]


def test_a_claim_that_is_cancelled_has_not_failed() -> None:
    async def work(batcher: TracedBatcher) -> None:
        waiting = batcher.claim("q", wait_ms=60_000)
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.sleep(0)

    _, (span,) = spans_of(work)
    assert span.status.status_code is StatusCode.UNSET
    assert [event.name for event in span.events] == ["cancelled"]


def test_a_server_traces_if_told_to() -> None:
    with running("memory:", tracing=True, flight="127.0.0.1:0") as server:
        assert isinstance(server.batcher, TracedBatcher)
    with running("memory:", flight="127.0.0.1:0") as server:
        assert not isinstance(server.batcher, TracedBatcher)
