"""OpenTelemetry spans of publishers and consumers, and the trace context that messages carry.

A publish makes a span of kind PRODUCER and puts its context into each message that brings none: the
attributes ``traceparent`` and ``tracestate`` (W3C). A worker makes a span of kind CONSUMER for each
message, a child of that context. All of it is off unless ``tracing=True`` asks for it. The
OpenTelemetry SDK, configured in the usual way, decides where the spans go; their names and
attributes are those of the semantic conventions for messaging.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec

from penstock.errors import InvalidMessage, needs_extra
from penstock.model import Message
from penstock.validation import attributes_to, check_attributes, check_messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from penstock.model import Delivery, Value

K = TypeVar("K")

TRACEPARENT: Final = "traceparent"
_TRACESTATE: Final = "tracestate"
COUNT: Final = "messaging.batch.message_count"
# A span of a large batch must not become large itself.
_MAX_LINKS: Final = 32
# The conventions' type of an operation, by verb; that of all others is settle.
_TYPES: Final = {"publish": "send", "claim": "receive", "process": "process"}


@cache
def api() -> Any:
    """Return OpenTelemetry's module of traces, and the propagator of W3C's context."""
    with needs_extra("tracing", "tracing"):
        from opentelemetry import trace  # noqa: PLC0415
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415
    return trace, tracecontext.TraceContextTextMapPropagator()


def start_span(verb: str, queue: str | None, *, tracer: Any = None, **options: Any) -> Any:
    """Begin a span of a verb on a queue, or on whichever queues it concerns."""
    trace, _ = api()
    attributes = {
        "messaging.system": "penstock",
        "messaging.operation.name": verb,
        "messaging.operation.type": _TYPES.get(verb, "settle"),
    }
    name = f"{verb} (all)" if verb == "publish" else verb
    if queue is not None:
        attributes["messaging.destination.name"] = queue
        name = f"{verb} {queue}"
    kind = trace.SpanKind.PRODUCER if verb == "publish" else trace.SpanKind.CONSUMER
    tracer = tracer or trace.get_tracer("penstock")
    return tracer.start_span(name, kind=kind, attributes=attributes, **options)


def fail_span(span: Any, error: BaseException) -> None:
    """Note in a span why its work has failed."""
    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(api()[0].StatusCode.ERROR, type(error).__name__)


def context_of(attributes: Mapping[str, Any]) -> Any:
    """Return the context that a message carries, or None."""
    carrier = {name: attributes.get(name) for name in (TRACEPARENT, _TRACESTATE)}
    texts = {name: value for name, value in carrier.items() if isinstance(value, str)}
    return api()[1].extract(texts) if TRACEPARENT in texts else None


def links_of(messages: Iterable[Message | Delivery]) -> list[Any]:
    """Return links to the contexts that messages carry, up to a bound."""
    trace, _ = api()
    carried = [each.attributes for each in messages if TRACEPARENT in each.attributes]
    spans = (trace.get_current_span(context_of(each) or {}) for each in carried[:_MAX_LINKS])
    contexts = (span.get_span_context() for span in spans)
    return [trace.Link(context) for context in contexts if context.is_valid]


def stamp(messages: Iterable[Message], span: Any) -> list[Message]:
    """Give the context of a span to the messages that carry none and have room for it."""
    trace, propagator = api()
    carrier: dict[str, str] = {}
    propagator.inject(carrier, trace.set_span_in_context(span))
    return [_stamped(message, carrier) for message in messages]


def _stamped(message: Message, carrier: dict[str, str]) -> Message:
    if TRACEPARENT in message.attributes or not carrier:
        return message
    attributes = {**carrier, **message.attributes}
    try:
        check_attributes(attributes)
    except InvalidMessage:
        # A message that is within its bounds is published, traced or not.
        return message
    return msgspec.structs.replace(message, attributes=attributes)


@contextmanager
def _current(span: Any) -> Iterator[Any]:
    """Make a span the current one; it ends with the block."""
    with api()[0].use_span(span, True, False, False):  # noqa: FBT003 - end, record, set status
        try:
            yield span
        except BaseException as error:
            fail_span(span, error)
            raise


# --- publishers -----------------------------------------------------------------------------------


@contextmanager
def publishing(messages: Iterable[Message], queue: str | None = None) -> Iterator[list[Message]]:
    """Make the span of a publish; give the messages, with its context in those that bring none."""
    batch = check_messages(messages)
    with _current(start_span("publish", queue, links=links_of(batch))) as span:
        if queue is None:
            span.set_attribute(COUNT, len(batch))
        yield stamp(batch, span)


@contextmanager
def sending(
    queue: str,
    payload: bytes,
    /,
    attributes: Mapping[str, Value] | None = None,
    group: str = "",
    priority: int = 0,
    delay_ms: int = 0,
    dedup_id: str | None = None,
    **more: Value,
) -> Iterator[dict[str, Any]]:
    """Make the span of a send; give its options, with the span's context."""
    given = attributes_to(queue, attributes, more)
    sent = Message(payload, given, group, priority, delay_ms, dedup_id)
    with publishing([sent], queue) as (message,):
        options = msgspec.structs.asdict(message)
        del options["payload"]
        yield options


class _TracedVerbs:
    """Verbs of a broker or a client that publish, each with a span."""

    def publish(self, messages: Iterable[Message]) -> Any:
        with publishing(messages) as batch:
            return super().publish(batch)  # type: ignore[misc]

    def send(self, queue: str, payload: bytes, /, **given: Any) -> Any:
        with sending(queue, payload, **given) as options:
            return super().send(queue, payload, **options)  # type: ignore[misc]


class _TracedAsyncVerbs:
    """The same verbs of a client for asyncio."""

    async def publish(self, messages: Iterable[Message]) -> Any:
        with publishing(messages) as batch:
            return await super().publish(batch)  # type: ignore[misc]

    async def send(self, queue: str, payload: bytes, /, **given: Any) -> Any:
        with sending(queue, payload, **given) as options:
            return await super().send(queue, payload, **options)  # type: ignore[misc]


@cache
def traced(kind: type[K], *, awaited: bool = False) -> type[K]:
    """Return a class of brokers or clients like this one, whose publishes make spans."""
    api()
    verbs = _TracedAsyncVerbs if awaited else _TracedVerbs
    names = {"__module__": kind.__module__}
    return cast("type[K]", type(f"Traced{kind.__name__}", (verbs, kind), names))


# --- consumers ------------------------------------------------------------------------------------


def processing(*deliveries: Delivery) -> AbstractContextManager[Any]:
    """Make the span of handling messages of one queue, as a context manager that gives it.

    The span of one message is a child of the context that it carries; that of several has links.
    """
    first = deliveries[0]
    if len(deliveries) == 1:
        span = start_span("process", first.queue, context=context_of(first.attributes))
        span.set_attribute("messaging.message.id", str(first.message_id))
    else:
        span = start_span("process", first.queue, links=links_of(deliveries))
        span.set_attribute(COUNT, len(deliveries))
    return _current(span)


class TraceMiddleware:
    """Makes a span around the handler of each message; ``tracing=True`` adds it to a worker."""

    def __init__(self) -> None:
        api()
        self._spans: dict[str, AbstractContextManager[Any]] = {}

    def before(self, delivery: Delivery) -> None:
        """Begin the span of a message."""
        self._spans[delivery.receipt] = span = processing(delivery)
        span.__enter__()

    def after(self, delivery: Delivery, _: object) -> None:
        """End the span of a message that was handled."""
        self._spans.pop(delivery.receipt).__exit__(None, None, None)

    def on_error(self, delivery: Delivery, error: BaseException) -> None:
        """End the span of a message that failed, if it has not ended before."""
        span = self._spans.pop(delivery.receipt, None)
        if span is not None:
            span.__exit__(type(error), error, error.__traceback__)
