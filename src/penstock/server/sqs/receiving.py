"""ReceiveMessage: claims, long polls, and retries of a receive that may have got lost."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, cast

from penstock import limits
from penstock.server.sqs.calls import check_token
from penstock.wire.sqs import digests, messages
from penstock.wire.sqs.faults import SqsFault
from penstock.wire.sqs.handles import handle_of
from penstock.wire.sqs.requests import AttributeValue, ReceiveMessage

if TYPE_CHECKING:
    from penstock.model import Delivery
    from penstock.server.sqs.calls import Call, Place
    from penstock.wire.sqs.messages import Kept
    from penstock.wire.sqs.queues import QueueView
    from penstock.wire.sqs.requests import SqsRequest

__all__ = ["check_visibility", "receive"]

_SYSTEM: Final = (
    "SenderId",
    "SentTimestamp",
    "ApproximateReceiveCount",
    "ApproximateFirstReceiveTimestamp",
    "SequenceNumber",
    "MessageDeduplicationId",
    "MessageGroupId",
    "AWSTraceHeader",
    "DeadLetterQueueSourceArn",
)
# A claim that is given back at once; long enough for that to reach the disk.
_NO_LEASE_MS: Final = 10_000


def check_visibility(seconds: int) -> int:
    """Check a visibility timeout."""
    if not 0 <= seconds <= limits.SQS_MAX_VISIBILITY_S:
        raise SqsFault.value(
            seconds,
            "VisibilityTimeout",
            f"Must be between 0 and {limits.SQS_MAX_VISIBILITY_S}, if provided.",
        )
    return seconds


async def receive(place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
    """Take messages."""
    request = cast(ReceiveMessage, request)
    name = call.queue_of(request)
    call.principal.check("consume", name)
    view = place.catalog.known(name) or await place.catalog.view(name)
    limit, visibility_s, wait_s = _checked(view, request)
    system = _system_names(request)
    attempt = request.receive_request_attempt_id if view.fifo else None
    lease_ms = visibility_s * 1000 or _NO_LEASE_MS
    deliveries = await _again(place, name, attempt, lease_ms) if attempt else []
    claimed: list[Delivery] = []
    try:
        if not deliveries and not call.http.left:
            deliveries = claimed = await _claim(place, call, name, limit, lease_ms, wait_s * 1000)
            if attempt and claimed:
                place.attempts.remember(name, attempt, claimed, place.clock.now_ms())
        first_ms: dict[int, int] = {}
        if "ApproximateFirstReceiveTimestamp" in system:
            first_ms = await _first_receives(place, deliveries, lease_ms if claimed else None)
        if call.http.left:
            _give_back(place, claimed)
            return {}
        if not visibility_s and claimed:
            await place.desk.release(
                [each.receipt for each in claimed],
                delay_ms=0,
                reason="received with a visibility timeout of 0",
            )
    except BaseException:
        # Whether it has gone or is told of an error: it gets none of them.
        _give_back(place, claimed)
        raise
    if not deliveries:
        return {}
    wanted = request.message_attribute_names or ()
    return {
        "Messages": [
            _shown(place, view, each, wanted, system, first_ms.get(each.message_id, 0))
            for each in deliveries
        ]
    }


async def _claim(
    place: Place, call: Call, name: str, limit: int, lease_ms: int, wait_ms: int
) -> list[Delivery]:
    """Take messages for a client for as long as it is there."""
    claiming = place.desk.claim(
        name, limit=limit, lease_ms=lease_ms, wait_ms=wait_ms, consumer=call.consumer
    )
    call.http.on_left = claiming.cancel
    try:
        return await place.desk.claimed(claiming)
    except asyncio.CancelledError:
        if call.http.left and claiming.cancelled():
            return []
        raise
    finally:
        call.http.on_left = None


async def _again(place: Place, name: str, attempt: str, lease_ms: int) -> list[Delivery]:
    """Return what an attempt got before, as far as it is still held, held anew."""
    deliveries = place.attempts.find(name, attempt, place.clock.now_ms())
    if not deliveries:
        return []
    outcomes = await place.desk.extend([each.receipt for each in deliveries], lease_ms=lease_ms)
    return [each for each, held in zip(deliveries, outcomes, strict=True) if held]


def _give_back(place: Place, deliveries: list[Delivery]) -> None:
    """Give back messages whose client went away before it got its answer."""
    for each in deliveries:
        place.attempts.forget(each.receipt)
    place.desk.take_back(deliveries)


def _checked(view: QueueView, request: ReceiveMessage) -> tuple[int, int, int]:
    limit = 1 if request.max_number_of_messages is None else request.max_number_of_messages
    if not 1 <= limit <= limits.SQS_MAX_BATCH:
        raise SqsFault.value(limit, "MaxNumberOfMessages", "Must be between 1 and 10, if provided.")
    visibility_s = view.visibility_s
    if request.visibility_timeout is not None:
        visibility_s = check_visibility(request.visibility_timeout)
    wait_s = view.wait_s if request.wait_time_seconds is None else request.wait_time_seconds
    if not 0 <= wait_s <= limits.SQS_MAX_WAIT_S:
        raise SqsFault.value(wait_s, "WaitTimeSeconds", "Must be >= 0 and <= 20, if provided.")
    check_token(request.receive_request_attempt_id, "ReceiveRequestAttemptId")
    return limit, visibility_s, wait_s


def _system_names(request: ReceiveMessage) -> frozenset[str]:
    names = {*(request.attribute_names or ()), *(request.message_system_attribute_names or ())}
    if not names:
        return frozenset()
    if "All" in names:
        return frozenset(_SYSTEM)
    for name in names:
        if name not in _SYSTEM:
            raise SqsFault.attribute_name(name)
    return frozenset(names)


async def _first_receives(
    place: Place, deliveries: list[Delivery], lease_ms: int | None
) -> dict[int, int]:
    """Return when each message was received for the first time.

    What was claimed just now, with a lease of ``lease_ms``, says so itself if it is the first time.
    """
    known: dict[int, int] = {}
    if lease_ms is not None:
        known = {
            each.message_id: each.lease_deadline_ms - lease_ms
            for each in deliveries
            if each.attempts == 1
        }
    past = [each for each in deliveries if each.message_id not in known]
    if past:
        attempts = await place.desk.call(
            lambda broker: [broker.attempts(each.queue, each.message_id) for each in past]
        )
        for each, tried in zip(past, attempts, strict=True):
            known[each.message_id] = tried[0].claimed_at_ms if tried else each.published_at_ms
    return known


def _shown(
    place: Place,
    view: QueueView,
    delivery: Delivery,
    wanted: list[str] | tuple[()],
    system: frozenset[str],
    first_ms: int,
) -> dict[str, Any]:
    """Show a message as SQS does."""
    body, encoded = messages.shown_body(delivery.payload)
    shown: dict[str, Any] = {
        "MessageId": messages.message_uuid(place.store_id, delivery.message_id),
        "ReceiptHandle": handle_of(delivery),
        "MD5OfBody": digests.of_body(body.encode() if encoded else delivery.payload),
        "Body": body,
    }
    if not (wanted or system or encoded):
        return shown
    attributes, kept = messages.shown_attributes(delivery.attributes)
    chosen = messages.select(attributes, wanted)
    if encoded:
        chosen = {**chosen, messages.ENCODING_ATTRIBUTE: AttributeValue("String", "base64")}
    if chosen:
        shown["MessageAttributes"] = chosen
        shown["MD5OfMessageAttributes"] = digests.of_attributes(chosen)
    if system:
        known = _system_attributes(place, view, delivery, kept, first_ms)
        shown["Attributes"] = {name: text for name, text in known.items() if name in system}
    return shown


def _system_attributes(
    place: Place, view: QueueView, delivery: Delivery, kept: Kept, first_ms: int
) -> dict[str, str]:
    known = {
        "SenderId": kept.sender or place.options.account,
        "SentTimestamp": str(delivery.published_at_ms),
        "ApproximateReceiveCount": str(delivery.attempts),
        "ApproximateFirstReceiveTimestamp": str(first_ms),
    }
    if delivery.group and messages.speakable(delivery.group):
        known["MessageGroupId"] = delivery.group
    if view.fifo:
        known["SequenceNumber"] = f"{delivery.message_id:020d}"
        known["MessageDeduplicationId"] = sha256(delivery.payload).hexdigest()
    if kept.dedup_id is not None:
        known["MessageDeduplicationId"] = kept.dedup_id
    if kept.trace is not None:
        known["AWSTraceHeader"] = kept.trace
    source = delivery.attributes.get("queue")
    if isinstance(source, str) and source != delivery.queue:
        known["DeadLetterQueueSourceArn"] = place.arn(source)
    return known
