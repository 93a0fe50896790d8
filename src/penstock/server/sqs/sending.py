"""SendMessage and SendMessageBatch."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, cast

from penstock import limits
from penstock.errors import InvalidInput
from penstock.model import Message
from penstock.server.sqs.calls import check_entries, check_token, failed_entry
from penstock.wire.sqs import digests, messages
from penstock.wire.sqs.faults import SqsFault
from penstock.wire.sqs.requests import SendMessage, SendMessageBatch

if TYPE_CHECKING:
    from penstock.server.sqs.calls import Call, Place
    from penstock.wire.sqs.queues import QueueView
    from penstock.wire.sqs.requests import AttributeValue, SendEntry, SqsRequest

__all__ = ["send", "send_batch"]

_WRONG_TYPE: Final = "The request include parameter that is not valid for this queue type."


async def send(place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
    """Publish one message."""
    request = cast(SendMessage, request)
    name = call.queue_of(request)
    call.principal.check("publish", name)
    view = place.catalog.known(name) or await place.catalog.view(name)
    message, answer, size = _prepare(call, view, request)
    _check_size(view, size)
    (message_id,) = await place.desk.publish([message], queue=name)
    return _complete(place, view, answer, message_id)


async def send_batch(place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
    """Publish several messages; each of them succeeds or fails."""
    request = cast(SendMessageBatch, request)
    name = call.queue_of(request)
    call.principal.check("publish", name)
    view = await place.catalog.view(name)
    entries = request.entries or []
    check_entries(entries, "SendMessageBatch")
    failed: list[dict[str, Any]] = []
    ready: list[tuple[SendEntry, Message, dict[str, Any]]] = []
    total = 0
    for entry in entries:
        if view.fifo:
            # These refuse the whole batch in SQS as well.
            _check_fifo(view, entry)
        try:
            message, answer, size = _prepare(call, view, entry)
            total += size
            if size <= limits.SQS_MAX_MESSAGE_BYTES:
                _check_size(view, size)
        except SqsFault as fault:
            failed.append(failed_entry(entry.id, fault))
            continue
        ready.append((entry, message, answer))
    if total > limits.SQS_MAX_MESSAGE_BYTES:
        raise SqsFault(
            "BatchRequestTooLong",
            f"Batch requests cannot be longer than {limits.SQS_MAX_MESSAGE_BYTES} bytes. "
            f"You have sent {total} bytes.",
        )
    successful = []
    for (entry, _, answer), outcome in zip(ready, await _publish(place, view, ready), strict=True):
        if isinstance(outcome, SqsFault):
            failed.append(failed_entry(entry.id, outcome))
        else:
            successful.append({"Id": entry.id, **_complete(place, view, answer, outcome)})
    return {"Successful": successful, "Failed": failed}


async def _publish(
    place: Place, view: QueueView, ready: list[tuple[SendEntry, Message, dict[str, Any]]]
) -> list[int | SqsFault]:
    if not ready:
        return []
    try:
        return list(await place.desk.publish([message for _, message, _ in ready], queue=view.name))
    except InvalidInput:
        outcomes: list[int | SqsFault] = []
        for _, message, _ in ready:
            try:
                outcomes += await place.desk.publish([message], queue=view.name)
            except InvalidInput as error:
                outcomes.append(SqsFault.invalid(str(error)))
        return outcomes


def _prepare(
    call: Call, view: QueueView, entry: SendMessage | SendEntry
) -> tuple[Message, dict[str, Any], int]:
    """Check a message; return it, what can be answered already, and its size."""
    payload = messages.check_body(entry.message_body)
    attributes = entry.message_attributes
    size = len(payload) + messages.check_attributes(attributes)
    answer: dict[str, Any] = {"MD5OfMessageBody": digests.of_body(payload)}
    if attributes:
        answer["MD5OfMessageAttributes"] = digests.of_attributes(attributes)
    trace = _trace_of(call)
    if entry.message_system_attributes:
        trace = _trace_header(entry.message_system_attributes)
        answer["MD5OfMessageSystemAttributes"] = digests.of_attributes(
            entry.message_system_attributes
        )
    group = entry.message_group_id
    check_token(group, "MessageGroupId")
    dedup_id = entry.message_deduplication_id
    check_token(dedup_id, "MessageDeduplicationId")
    delay_ms = _delay_ms(view, entry.delay_seconds)
    kept_id = dedup_id
    if view.fifo:
        _check_fifo(view, entry)
        if dedup_id is None:
            dedup_id = sha256(payload).hexdigest()
    message = Message(
        payload,
        messages.to_attributes(
            view.name,
            attributes,
            trace=trace,
            dedup_id=kept_id,
            sender=call.principal.key_id or None,
        ),
        group or "",
        0,
        delay_ms,
        _scoped(view, group, dedup_id),
    )
    return message, answer, size


def _check_fifo(view: QueueView, entry: SendMessage | SendEntry) -> None:
    if not entry.message_group_id:
        raise SqsFault.missing("MessageGroupId")
    if entry.message_deduplication_id is None and not view.content_dedup:
        raise SqsFault.invalid(
            "The queue should either have ContentBasedDeduplication enabled or "
            "MessageDeduplicationId provided explicitly"
        )


def _scoped(view: QueueView, group: str | None, dedup_id: str | None) -> str | None:
    """Make a dedup id that counts in this queue as it was made, or in one of its groups."""
    if dedup_id is None:
        return None
    scoped = f"{view.created_at_ms:x}.{dedup_id}"
    if view.group_dedup and group:
        return f"{sha256(group.encode()).hexdigest()}.{scoped}"
    return scoped


def _delay_ms(view: QueueView, delay_s: int | None) -> int:
    if delay_s is None:
        return 0
    if not 0 <= delay_s <= limits.SQS_MAX_DELAY_S:
        raise SqsFault.value(
            delay_s,
            "DelaySeconds",
            f"DelaySeconds must be >= 0 and <= {limits.SQS_MAX_DELAY_S}.",
        )
    if view.fifo:
        if delay_s:
            raise SqsFault.value(delay_s, "DelaySeconds", _WRONG_TYPE)
        return 0
    # No delay at all would mean the queue's own.
    return delay_s * 1000 if delay_s or not view.delay_s else 1


def _trace_header(attributes: dict[str, AttributeValue]) -> str:
    for name, value in attributes.items():
        if name != "AWSTraceHeader":
            raise SqsFault.invalid(f"Message system attribute name '{name[:100]}' is invalid.")
        if value.data_type != "String" or not value.string_value:
            raise SqsFault.invalid(
                "The message system attribute 'AWSTraceHeader' must be a String."
            )
    messages.check_attributes({"trace": attributes["AWSTraceHeader"]})
    return attributes["AWSTraceHeader"].string_value or ""


def _trace_of(call: Call) -> str | None:
    """Return the trace header of the request, which holds for messages that have none of their own.

    Proxies add it: one that can't be kept is left out, and refuses nothing.
    """
    trace = call.http.headers.get("x-amzn-trace-id")
    if not trace or len(trace) > limits.SQS_MAX_TRACE_CHARS or not messages.speakable(trace):
        return None
    return trace


def _check_size(view: QueueView, size: int) -> None:
    if size > view.max_bytes:
        raise SqsFault.invalid(
            "One or more parameters are invalid. Reason: Message must be shorter than "
            f"{view.max_bytes} bytes."
        )


def _complete(
    place: Place, view: QueueView, answer: dict[str, Any], message_id: int
) -> dict[str, Any]:
    answer["MessageId"] = messages.message_uuid(place.store_id, message_id)
    if view.fifo:
        answer["SequenceNumber"] = f"{message_id:020d}"
    return answer
