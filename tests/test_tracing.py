"""Traces from a publisher through a queue to a worker, with the spans of OpenTelemetry's SDK."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, TraceState
from tests.waiting import wait_until

import penstock
from penstock import InvalidInput, InvalidMessage, Message, QueueNotFound, limits, tracing
from penstock.server import running
from penstock.tracing import TRACEPARENT, processing, publishing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock import Broker, Delivery

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EXPORTER = InMemorySpanExporter()
PROVIDER = TracerProvider()
PROVIDER.add_span_processor(SimpleSpanProcessor(EXPORTER))


@pytest.fixture(autouse=True)
def _provider(monkeypatch: pytest.MonkeyPatch) -> None:
    # A process can set one once, and other tests may have.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", PROVIDER)


@pytest.fixture
def spans() -> Iterator[Callable[[], list[Any]]]:
    EXPORTER.clear()
    yield lambda: list(EXPORTER.get_finished_spans())
    EXPORTER.clear()


@pytest.fixture
def broker() -> Iterator[Broker]:
    with penstock.open("memory:", background=False, tracing=True) as opened:
        opened.create_queue("q")
        yield opened


def trace_of(attributes: Mapping[str, Any]) -> tuple[int, int]:
    """Return the ids of the trace and of the span that attributes carry."""
    _, trace_id, span_id, _ = attributes[TRACEPARENT].split("-")
    return int(trace_id, 16), int(span_id, 16)


def work(store: Any, handler: Callable[[Delivery], object], **options: Any) -> None:
    """Have a worker handle one message."""
    with penstock.Worker(store, "q", handler, tracing=True, **options):
        wait_until(lambda: any(each.name == "process q" for each in EXPORTER.get_finished_spans()))


def current() -> int:
    return trace.get_current_span().get_span_context().span_id


# --- from a publisher to a worker -----------------------------------------------------------------


def test_an_embedded_message_is_one_trace(broker: Broker, spans: Callable[[], list[Any]]) -> None:
    seen: list[int] = []
    with trace.get_tracer("test").start_as_current_span("order") as order:
        sent = broker.send("q", b"x", kind="book")
    work(broker, lambda _: seen.append(current()))
    publish, above, process = spans()
    assert above.name == "order"
    assert publish.name == "publish q"
    assert publish.kind is SpanKind.PRODUCER
    assert publish.parent.span_id == order.get_span_context().span_id
    assert process.name == "process q"
    assert process.kind is SpanKind.CONSUMER
    assert process.parent.span_id == publish.context.span_id
    assert {each.context.trace_id for each in spans()} == {publish.context.trace_id}
    assert seen == [process.context.span_id]
    assert dict(publish.attributes) == {
        "messaging.system": "penstock",
        "messaging.destination.name": "q",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
    }
    assert dict(process.attributes) == {
        "messaging.system": "penstock",
        "messaging.destination.name": "q",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": str(sent),
    }
    assert process.status.status_code is StatusCode.UNSET


def test_a_message_through_a_server_is_one_trace(spans: Callable[[], list[Any]]) -> None:
    seen: list[tuple[Any, ...]] = []
    with running("memory:", native="127.0.0.1:0") as server:
        url = server.location("native")
        with penstock.connect(url, tracing=True) as client:
            client.create_queue("q")
            client.send("q", b"x", priority=3, attributes={"priority": "high"})
            work(client, lambda each: seen.append((each.priority, each.attributes["priority"])))
    assert seen == [(3, "high")]
    publish, process = spans()
    assert (publish.name, publish.kind) == ("publish q", SpanKind.PRODUCER)
    assert (process.name, process.kind) == ("process q", SpanKind.CONSUMER)
    assert process.parent.span_id == publish.context.span_id
    assert process.context.trace_id == publish.context.trace_id


def test_open_traces_a_server_as_well(spans: Callable[[], list[Any]]) -> None:
    with (
        running("memory:", native="127.0.0.1:0") as server,
        penstock.open(server.location("native"), tracing=True) as client,
    ):
        client.create_queue("q")
        client.publish([Message(b"x", {"queue": "q"})])
        (delivery,) = client.claim("q")
    (publish,) = spans()
    assert trace_of(delivery.attributes) == (publish.context.trace_id, publish.context.span_id)


def test_asyncio_clients_and_handlers(spans: Callable[[], list[Any]]) -> None:
    seen: list[int] = []

    async def publish(url: str) -> list[int]:
        async with await penstock.connect_async(url, tracing=True) as client:
            await client.create_queue("q")
            ids = await client.publish([Message(b"x", {"queue": "q"})])
            with pytest.raises(QueueNotFound):
                await client.send("none", b"x")
            return ids

    async def handle(_: Delivery) -> None:
        await asyncio.sleep(0)
        seen.append(current())

    with running("memory:", native="127.0.0.1:0") as server:
        asyncio.run(publish(server.location("native")))
        work(server.broker, handle)
    made, failed, process = spans()
    assert (made.name, failed.name) == ("publish (all)", "publish none")
    assert failed.attributes["error.type"] == "QueueNotFound"
    assert process.parent.span_id == made.context.span_id
    assert seen == [process.context.span_id]


# --- publishers -----------------------------------------------------------------------------------


def test_a_batch_has_one_span(broker: Broker, spans: Callable[[], list[Any]]) -> None:
    brought = {"queue": "q", TRACEPARENT: PARENT}
    broker.publish([Message(b"a", {"queue": "q"}), Message(b"b", brought)])
    first, second = broker.claim("q", limit=2)
    (span,) = spans()
    assert span.name == "publish (all)"
    assert span.attributes["messaging.batch.message_count"] == 2
    assert trace_of(first.attributes) == (span.context.trace_id, span.context.span_id)
    # The caller's own is kept, and the span links to it.
    assert second.attributes == brought
    assert [f"{link.context.span_id:016x}" for link in span.links] == [PARENT.split("-")[2]]


def test_the_state_of_a_trace_goes_along(broker: Broker) -> None:
    context = trace.SpanContext(
        1,
        2,
        is_remote=False,
        trace_state=TraceState([("vendor", "5")]),
        trace_flags=trace.TraceFlags(1),
    )
    with trace.use_span(trace.NonRecordingSpan(context)):
        broker.send("q", b"x")
    (delivery,) = broker.claim("q")
    assert delivery.attributes["tracestate"] == "vendor=5"
    with processing(delivery) as span:
        assert span.get_span_context().trace_state.get("vendor") == "5"


def test_attributes_keep_to_their_bounds(broker: Broker) -> None:
    many = {f"a{n}": n for n in range(limits.MAX_ATTRIBUTES - 1)}
    large = {"a": "x" * (limits.MAX_ATTRIBUTES_BYTES - len("aqueueq"))}
    for attributes in (many, large):
        broker.send("q", b"x", **attributes)
        (delivery,) = broker.claim("q")
        assert delivery.attributes == {**attributes, "queue": "q"}


BAD: list[tuple[type[Exception], Any]] = [
    (InvalidInput, "text"),
    (InvalidInput, 5),
    (InvalidMessage, [b"no message"]),
    (InvalidMessage, [Message(b"", {"a": []})]),  # type: ignore[dict-item]
]


@pytest.mark.parametrize(("kind", "messages"), BAD)
def test_what_is_refused_is_refused_as_without_tracing(
    broker: Broker, kind: type[Exception], messages: Any
) -> None:
    with pytest.raises(kind) as traced, penstock.open("memory:") as plain:
        plain.publish(messages)
    with pytest.raises(kind) as caught:
        broker.publish(messages)
    assert str(caught.value) == str(traced.value)


def test_a_publish_that_fails_says_so(broker: Broker, spans: Callable[[], list[Any]]) -> None:
    with pytest.raises(QueueNotFound):
        broker.send("none", b"x")
    (span,) = spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "QueueNotFound"


def test_without_an_sdk_nothing_is_added(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", trace.NoOpTracerProvider())
    broker.send("q", b"x")
    (delivery,) = broker.claim("q")
    assert delivery.attributes == {"queue": "q"}


def test_publishers_of_other_protocols_can_stamp_messages(spans: Callable[[], list[Any]]) -> None:
    with publishing([Message(b"x")], "elsewhere") as (message,):
        assert trace_of(message.attributes)[1] == current()
    assert [span.name for span in spans()] == ["publish elsewhere"]


# --- consumers ------------------------------------------------------------------------------------


def test_a_handler_that_fails_fails_its_span(
    broker: Broker, spans: Callable[[], list[Any]]
) -> None:
    def handle(_: Delivery) -> None:
        raise KeyError("no such book")

    broker.send("q", b"x")
    work(broker, handle)
    span = spans()[-1]
    assert span.name == "process q"
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "KeyError"


class Failing:
    """Middleware whose hook fails before or after the handler."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._fail)

    def _fail(self, *_: object) -> None:
        raise ValueError


@pytest.mark.parametrize("hook", ["before", "after"])
def test_other_middleware_that_fails(
    broker: Broker, spans: Callable[[], list[Any]], hook: str
) -> None:
    broker.send("q", b"x")
    work(broker, lambda _: None, middleware=[Failing(hook)])
    assert spans()[-1].attributes["error.type"] == "ValueError"


def test_a_handler_settles_its_message_itself(
    broker: Broker, spans: Callable[[], list[Any]]
) -> None:
    def handle(delivery: Delivery) -> None:
        broker.ack([delivery.receipt])
        raise penstock.Settled

    broker.send("q", b"x")
    work(broker, handle)
    assert spans()[-1].status.status_code is StatusCode.UNSET


def test_a_child_process_gets_the_middleware(
    broker: Broker, spans: Callable[[], list[Any]]
) -> None:
    middleware = pickle.loads(pickle.dumps(tracing.TraceMiddleware()))
    broker.send("q", b"x")
    (delivery,) = broker.claim("q")
    middleware.before(delivery)
    middleware.after(delivery, None)
    assert [span.name for span in spans()] == ["publish q", "process q"]


def test_consumers_of_their_own(broker: Broker, spans: Callable[[], list[Any]]) -> None:
    broker.send("q", b"a")
    broker.send("q", b"b")
    published = [span.context.span_id for span in spans()]
    batch = broker.claim("q", limit=2)
    with processing(batch[0]) as one:
        assert current() == one.get_span_context().span_id
    with pytest.raises(ZeroDivisionError), processing(*batch):
        raise ZeroDivisionError
    single, several = spans()[2:]
    assert single.parent.span_id == published[0]
    assert single.attributes["messaging.message.id"] == str(batch[0].message_id)
    assert [link.context.span_id for link in several.links] == published
    assert several.attributes["messaging.batch.message_count"] == 2
    assert several.attributes["error.type"] == "ZeroDivisionError"


@pytest.mark.parametrize("carried", ["nonsense", 5, None, "00-0-0-00"])
def test_what_is_no_context_is_nobodys_child(
    broker: Broker, spans: Callable[[], list[Any]], carried: Any
) -> None:
    broker.send("q", b"x", traceparent=carried, tracestate=7)
    (delivery,) = broker.claim("q")
    with processing(delivery):
        pass
    assert delivery.attributes[TRACEPARENT] == carried
    assert spans()[-1].parent is None


def test_links_are_bounded(broker: Broker) -> None:
    carried = [Message(b"", {TRACEPARENT: PARENT})] * 1_000
    assert len(tracing.links_of(carried)) == 32


# --- off ------------------------------------------------------------------------------------------


def test_off_is_the_plain_class(spans: Callable[[], list[Any]]) -> None:
    with (
        running("memory:", native="127.0.0.1:0") as server,
        penstock.connect(server.location("native")) as client,
    ):
        assert type(client) is penstock.client.Client
        client.create_queue("q")
        client.send("q", b"x")
        with penstock.Worker(client, "q", lambda _: None) as worker:
            wait_until(lambda: worker.stats().processed)
    with penstock.open("memory:") as broker:
        assert type(broker) is penstock.Broker
    assert spans() == []


def test_a_class_is_made_once() -> None:
    assert tracing.traced(penstock.Broker) is tracing.traced(penstock.Broker)
    assert issubclass(tracing.traced(penstock.Broker), penstock.Broker)
