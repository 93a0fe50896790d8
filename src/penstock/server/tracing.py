"""OpenTelemetry spans around the batcher's verbs; optional, and off unless asked for.

A message carries its trace in the attribute ``traceparent`` (W3C): a publish continues the trace
that a message brings, gives its own to messages that bring none, and a claim links to the traces
of its deliveries. The OpenTelemetry SDK, configured in the usual way, decides where the spans go.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from penstock import limits
from penstock.errors import InvalidInput
from penstock.server.batcher import Batcher

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.broker.broker import Broker
    from penstock.model import Delivery, Message, Outcome

TRACEPARENT: Final = "traceparent"
T = TypeVar("T")
_MAX_LINKS: Final = 32
_COUNT: Final = "messaging.batch.message_count"


def _api() -> Any:
    try:
        from opentelemetry import trace  # noqa: PLC0415 - an extra
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415
    except ImportError as error:
        raise InvalidInput(f"{error}: tracing needs pip install 'penstock[tracing]'") from None
    return trace, tracecontext.TraceContextTextMapPropagator()


def traced(messages: Iterable[Message]) -> list[Message]:
    """Give the current span's context to messages that carry none; for publishers."""
    trace, propagator = _api()
    return _stamped(messages, propagator, trace.context_api.get_current())


def _stamped(messages: Iterable[Message], propagator: Any, context: Any) -> list[Message]:
    carrier: dict[str, str] = {}
    propagator.inject(carrier, context)
    parent = carrier.get(TRACEPARENT)
    if parent is None:
        return list(messages)
    return [
        message
        if TRACEPARENT in message.attributes or len(message.attributes) >= limits.MAX_ATTRIBUTES
        else msgspec.structs.replace(
            message, attributes={**message.attributes, TRACEPARENT: parent}
        )
        for message in messages
    ]


class TracedBatcher(Batcher):
    """A batcher that makes a span of every verb."""

    def __init__(self, broker: Broker, loop: AbstractEventLoop, tracer: Any = None) -> None:
        super().__init__(broker, loop)
        self._trace, self._propagator = _api()
        self._tracer = tracer or self._trace.get_tracer("penstock")

    def publish(
        self, messages: Iterable[Message], *, queue: str | None = None
    ) -> Future[list[int]]:
        """Publish; the span continues the first trace that a message brings."""
        batch = list(messages)
        brought = next((m.attributes for m in batch if TRACEPARENT in m.attributes), {})
        span = self._span("publish", queue, self._context(brought))
        span.set_attribute(_COUNT, len(batch))
        stamped = _stamped(batch, self._propagator, self._trace.set_span_in_context(span))
        return self._ending(span, partial(super().publish, stamped, queue=queue))

    def claim(self, queue: str, **options: Any) -> Future[list[Delivery]]:
        """Claim; the span links to the traces of the deliveries."""
        span = self._span("claim", queue)

        def link(deliveries: Sequence[Delivery]) -> None:
            span.set_attribute(_COUNT, len(deliveries))
            for delivery in deliveries[:_MAX_LINKS]:
                found = self._trace.get_current_span(self._context(delivery.attributes) or {})
                if found.get_span_context().is_valid:
                    span.add_link(found.get_span_context())

        return self._ending(span, partial(super().claim, queue, **options), link)

    def ack(self, receipts: Iterable[str], **options: Any) -> Future[list[Outcome]]:
        """Settle messages as done."""
        span = self._span("ack", options.get("queue"))
        return self._ending(span, partial(super().ack, receipts, **options))

    def release(self, receipts: Iterable[str], **options: Any) -> Future[list[Outcome]]:
        """Give messages back."""
        span = self._span("release", options.get("queue"))
        return self._ending(span, partial(super().release, receipts, **options))

    def extend(self, receipts: Iterable[str] | str, **options: Any) -> Future[list[Outcome]]:
        """Move deadlines."""
        span = self._span("extend", options.get("queue"))
        return self._ending(span, partial(super().extend, receipts, **options))

    def _context(self, attributes: Mapping[str, Any]) -> Any:
        """Return the context of the trace that attributes carry, or None."""
        parent = attributes.get(TRACEPARENT)
        return self._propagator.extract({TRACEPARENT: parent}) if isinstance(parent, str) else None

    def _span(self, verb: str, queue: str | None, context: Any = None) -> Any:
        attributes: dict[str, Any] = {"messaging.system": "penstock", "messaging.operation": verb}
        if queue is not None:
            attributes["messaging.destination.name"] = queue
        kind = self._trace.SpanKind
        return self._tracer.start_span(
            f"{verb} {queue}" if queue else verb,
            context=context,
            kind=kind.PRODUCER if verb == "publish" else kind.CONSUMER,
            attributes=attributes,
        )

    def _ending(
        self, span: Any, verb: Callable[[], Future[T]], seen: Callable[[T], None] | None = None
    ) -> Future[T]:
        """Begin a verb, and end its span when its future is done."""

        def done(future: Future[T]) -> None:
            if future.cancelled():
                # Its client has gone, or it comes again: nothing has failed.
                span.add_event("cancelled")
            elif (error := future.exception()) is not None:
                span.set_status(self._trace.StatusCode.ERROR, type(error).__name__)
            elif seen is not None:
                seen(future.result())
            span.end()

        try:
            future = verb()
        except BaseException as error:
            span.set_status(self._trace.StatusCode.ERROR, type(error).__name__)
            span.end()
            raise
        future.add_done_callback(done)
        return future
