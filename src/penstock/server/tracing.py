"""OpenTelemetry spans around the batcher's verbs; optional, and off unless asked for.

A publish continues the trace that a message brings, and gives its own to messages that bring none;
a claim links to the traces of its deliveries.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.broker.requests import Ack, Publish
from penstock.packing import unpack_messages
from penstock.server.batcher import Batcher
from penstock.tracing import (
    COUNT,
    TRACEPARENT,
    api,
    context_of,
    fail_span,
    links_of,
    stamp,
    start_span,
)

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future
    from collections.abc import Callable, Iterable

    from penstock.broker.broker import Broker
    from penstock.model import Message, Outcome
    from penstock.server.batcher import Answer
    from penstock.server.waiting import PushClaim
    from penstock.store.codec.claimed import ClaimedMessages

T = TypeVar("T")


class TracedBatcher(Batcher):
    """A batcher that makes a span of every verb."""

    def __init__(self, broker: Broker, loop: AbstractEventLoop, tracer: Any = None) -> None:
        api()
        super().__init__(broker, loop)
        self._span = partial(start_span, tracer=tracer)
        # The futures of requests that are told their answers.
        self._told: dict[Answer, Future[Any]] = {}

    def publish(
        self, messages: Iterable[Message], *, queue: str | None = None
    ) -> Future[list[int]]:
        """Publish; the span continues the first trace that a message brings."""
        batch = list(messages)
        brought = next((m.attributes for m in batch if TRACEPARENT in m.attributes), {})
        span = self._span("publish", queue, context=context_of(brought))
        span.set_attribute(COUNT, len(batch))
        return self._ending(span, partial(super().publish, stamp(batch, span), queue=queue))

    def submit(self, request: Publish | Ack, answer: Answer) -> None:
        """Publish or ack, and tell the answer."""
        if isinstance(request, Publish):
            future: Future[Any] = self.publish(
                unpack_messages(request.messages), queue=request.queue
            )
        else:
            future = self.ack(request.receipts, queue=request.queue, check=request.check)
        self._told[answer] = future
        future.add_done_callback(partial(self._tell_of, answer))

    def withdraw(self, answer: Answer) -> bool:
        """Cancel a request whose time is up, with its span."""
        untouched = super().withdraw(self._told.get(answer, answer))
        answer.cancel()
        return untouched

    def _tell_of(self, answer: Answer, future: Future[Any]) -> None:
        """Tell a request the answer that its future has."""
        del self._told[answer]
        if answer.done() or future.cancelled():
            return
        error = future.exception()
        if isinstance(error, Exception):
            answer.set_exception(error)
        else:
            answer.set_result(future.result())

    def claim(self, queue: str, **options: Any) -> Future[ClaimedMessages]:
        """Claim; the span links to the traces of the deliveries."""
        span = self._span("claim", queue)
        claim = partial(super().claim, queue, **options)
        return self._ending(span, claim, partial(_link, span))

    def _deliver(self, push: PushClaim) -> None:
        """Give a subscriber what was claimed; the span is that of a claim."""
        if push.answer:
            span = self._span("claim", push.queue)
            _link(span, push.answer)
            span.end()
        super()._deliver(push)

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

    def _ending(
        self, span: Any, verb: Callable[[], Future[T]], seen: Callable[[T], None] | None = None
    ) -> Future[T]:
        """Begin a verb, and end its span when its future is done."""

        def done(future: Future[T]) -> None:
            if future.cancelled():
                # Its client has gone, or it comes again: nothing has failed.
                span.add_event("cancelled")
            elif (error := future.exception()) is not None:
                fail_span(span, error)
            elif seen is not None:
                seen(future.result())
            span.end()

        try:
            future = verb()
        except BaseException as error:
            fail_span(span, error)
            span.end()
            raise
        future.add_done_callback(done)
        return future


def _link(span: Any, claimed: ClaimedMessages) -> None:
    """Link the span of a claim to the traces of its deliveries."""
    span.set_attribute(COUNT, len(claimed))
    for found in links_of(claimed.deliveries()):
        span.add_link(found.context)
