"""The operations on messages: send, receive, delete, change the visibility, and their batches.

A receipt handle has Penstock's receipt, which fences: once a lease has ended it changes nothing
any more. But on a standard queue the last handle of a message deletes it, as in SQS, as long as
nobody has received it again; after that a delete succeeds and does nothing. With a handle that has
expired a delete on a FIFO queue, and a change of the visibility timeout, is an error.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from penstock import limits
from penstock.errors import InvalidInput, LimitReached, PenstockError
from penstock.model import AttemptEnd, Message
from penstock.server.waiting import ClaimWait
from penstock.wire.sqs import messages
from penstock.wire.sqs.messages import attempt_of, handle_of, message_of, receipt_of
from penstock.wire.sqs.protocol import AttributeValue, SqsFault, check_range, fault_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.broker.broker import Broker
    from penstock.model import Delivery
    from penstock.server.sqs import Answer, SqsCall, SqsService
    from penstock.wire.sqs.messages import Kept
    from penstock.wire.sqs.protocol import SqsEntry, SqsRequest
    from penstock.wire.sqs.queues import QueueView

Item = TypeVar("Item")
Result = TypeVar("Result")
Verb: TypeAlias = (
    "Callable[[SqsService, QueueView, list[SqsEntry]], Awaitable[list[SqsFault | None]]]"
)

_WRONG_TYPE: Final = "The request include parameter that is not valid for this queue type."
_NOT_IN_FLIGHT: Final = "Message does not exist or is not available for visibility timeout change"
_SYSTEM: Final = (
    *("SenderId", "SentTimestamp", "ApproximateReceiveCount", "ApproximateFirstReceiveTimestamp"),
    *("SequenceNumber", "MessageDeduplicationId", "MessageGroupId", "AWSTraceHeader"),
    "DeadLetterQueueSourceArn",
)
# A claim that is given back at once; long enough for that to reach the disk.
_NO_LEASE_MS: Final = 10_000
# SQS takes letters, digits and punctuation of ASCII in them.
_TOKEN: Final = re.compile(r"[!-~]{1,128}")
_ENTRY_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")


# --- send -----------------------------------------------------------------------------------------


async def send(call: SqsCall, request: SqsRequest) -> Answer:
    """Publish one message."""
    view = await call.view_of(request, "publish")
    message, answer, size = _prepare(call, view, request)
    _check_size(view, size)
    call.principal.spend_rate([message])
    (message_id,) = await call.sqs.batcher.publish([message], queue=view.name)
    return _complete(call.sqs, view, answer, message_id)


async def send_batch(call: SqsCall, request: SqsRequest) -> Answer:
    """Publish several messages; each of them succeeds or fails."""
    view = await call.view_of(request, "publish")
    failed: list[Answer] = []
    prepared: list[tuple[SqsEntry, Message, Answer]] = []
    total = 0
    for entry in check_entries(request, "SendMessageBatch"):
        if view.fifo:
            # These refuse the whole batch in SQS as well.
            _check_fifo(view, entry)
        try:
            message, answer, size = _prepare(call, view, entry)
            total += size
            if size <= limits.SQS_MAX_MESSAGE_BYTES:
                _check_size(view, size)
        except SqsFault as fault:
            failed.append(failed_entry(entry, fault))
        else:
            prepared.append((entry, message, answer))
    if total > limits.SQS_MAX_MESSAGE_BYTES:
        raise SqsFault(
            "BatchRequestTooLong",
            f"Batch requests cannot be longer than {limits.SQS_MAX_MESSAGE_BYTES} bytes. "
            f"You have sent {total} bytes.",
        )
    batch = [message for _, message, _ in prepared]
    call.principal.spend_rate(batch)
    outcomes = await _each(batch, partial(call.sqs.batcher.publish, queue=view.name))
    successful = []
    for (entry, _, answer), outcome in zip(prepared, outcomes, strict=True):
        if isinstance(outcome, SqsFault):
            failed.append(failed_entry(entry, outcome))
        else:
            successful.append({"Id": entry.id, **_complete(call.sqs, view, answer, outcome)})
    return {"Successful": successful, "Failed": failed}


def check_entries(request: SqsRequest, kind: str) -> list[SqsEntry]:
    """Return the entries of a batch, whose number and ids are checked."""
    entries = request.entries
    if not entries:
        raise SqsFault(
            "EmptyBatchRequest", f"There should be at least one {kind}RequestEntry in the request."
        )
    if len(entries) > limits.SQS_MAX_BATCH:
        raise SqsFault(
            "TooManyEntriesInBatchRequest",
            f"Maximum number of entries per request are {limits.SQS_MAX_BATCH}. "
            f"You have sent {len(entries)}.",
        )
    seen = set()
    for entry in entries:
        if entry.id is None:
            raise SqsFault.missing(f"{kind}RequestEntry.Id")
        if not _ENTRY_ID.fullmatch(entry.id):
            raise SqsFault(
                "InvalidBatchEntryId",
                "A batch entry id can only contain alphanumeric characters, hyphens and "
                "underscores. It can be at most 80 letters long.",
            )
        if entry.id in seen:
            raise SqsFault("BatchEntryIdsNotDistinct", f"Id {entry.id} repeated.")
        seen.add(entry.id)
    return entries


def failed_entry(entry: SqsEntry, fault: SqsFault) -> Answer:
    """Say of an entry of a batch why it failed."""
    return {
        "Id": entry.id,
        "SenderFault": fault.sender,
        "Code": fault.query_code,
        "Message": fault.message,
    }


async def _each(
    items: list[Item], verb: Callable[[list[Item]], Awaitable[list[Result]]]
) -> list[Result | SqsFault]:
    """Do all of them at once, or, if the broker refuses one, one by one."""
    if not items:
        return []
    try:
        return list(await verb(items))
    except (InvalidInput, LimitReached) as error:
        if len(items) == 1:
            return [fault_of(error)]
    return [result for item in items for result in await _each([item], verb)]


def _prepare(call: SqsCall, view: QueueView, entry: SqsEntry) -> tuple[Message, Answer, int]:
    """Check a message; return it, the answer so far, and its size."""
    payload = messages.check_body(entry.message_body)
    attributes = entry.message_attributes
    size = len(payload) + messages.check_attributes(attributes)
    answer: Answer = {"MD5OfMessageBody": messages.md5_of_body(payload)}
    if attributes:
        answer["MD5OfMessageAttributes"] = messages.md5_of_attributes(attributes)
    trace = _trace_of(call)
    if entry.message_system_attributes:
        trace = _trace_header(entry.message_system_attributes)
        answer["MD5OfMessageSystemAttributes"] = messages.md5_of_attributes(
            entry.message_system_attributes
        )
    group, dedup_id = entry.message_group_id, entry.message_deduplication_id
    if group is not None or dedup_id is not None:
        check_token(group, "MessageGroupId")
        check_token(dedup_id, "MessageDeduplicationId")
    delay_ms = 0 if entry.delay_seconds is None else _delay_ms(view, entry.delay_seconds)
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
        None if dedup_id is None else _scoped(view, group, dedup_id),
    )
    return message, answer, size


def check_token(text: str | None, parameter: str) -> None:
    """Check a group, a dedup id or the id of a receive, if it is given."""
    if text is not None and not _TOKEN.fullmatch(text):
        reason = "can only include alphanumeric and punctuation characters. 1 to 128 in length."
        raise SqsFault.value(text, parameter, f"{parameter} {reason}")


def _check_fifo(view: QueueView, entry: SqsEntry) -> None:
    if not entry.message_group_id:
        raise SqsFault.missing("MessageGroupId")
    if entry.message_deduplication_id is None and not view.content_dedup:
        raise SqsFault.invalid(
            "The queue should either have ContentBasedDeduplication enabled or "
            "MessageDeduplicationId provided explicitly"
        )


def _scoped(view: QueueView, group: str | None, dedup_id: str) -> str:
    """Make a dedup id that counts in this queue as it was made, or in one of its groups."""
    scoped = f"{view.created_at_ms:x}.{dedup_id}"
    if view.group_dedup and group:
        return f"{sha256(group.encode()).hexdigest()}.{scoped}"
    return scoped


def _delay_ms(view: QueueView, delay_s: int) -> int:
    high = limits.SQS_MAX_DELAY_S
    check_range(delay_s, "DelaySeconds", 0, high, f"DelaySeconds must be >= 0 and <= {high}.")
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


def _trace_of(call: SqsCall) -> str | None:
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


def _complete(sqs: SqsService, view: QueueView, answer: Answer, message_id: int) -> Answer:
    answer["MessageId"] = messages.message_uuid(sqs.store_id, message_id)
    if view.fifo:
        answer["SequenceNumber"] = f"{message_id:020d}"
    return answer


# --- receive --------------------------------------------------------------------------------------


def check_visibility(seconds: int) -> int:
    """Check a visibility timeout."""
    high = limits.SQS_MAX_VISIBILITY_S
    reason = f"Must be between 0 and {high}, if provided."
    return check_range(seconds, "VisibilityTimeout", 0, high, reason)


async def receive(call: SqsCall, request: SqsRequest) -> Answer:
    """Claim messages, for the visibility timeout."""
    view = await call.view_of(request, "consume")
    name = view.name
    limit, visibility_s, wait_s = _checked(view, request)
    system = _system_names(request)
    attempt = request.receive_request_attempt_id if view.fifo else None
    lease_ms = visibility_s * 1000 or _NO_LEASE_MS
    deliveries = await _again(call.sqs, name, attempt, lease_ms) if attempt else []
    claimed: list[Delivery] = []
    try:
        if not deliveries and not call.http.left:
            deliveries = claimed = await _claim(call, name, limit, lease_ms, wait_s * 1000)
        first_ms: dict[int, int] = {}
        if "ApproximateFirstReceiveTimestamp" in system:
            first_ms = await _first_receives(call.sqs, deliveries, lease_ms if claimed else None)
        if call.http.left:
            call.sqs.batcher.take_back([each.receipt for each in claimed])
            return {}
        if not visibility_s and claimed:
            await call.sqs.batcher.release(
                [each.receipt for each in claimed],
                delay_ms=0,
                reason="received with a visibility timeout of 0",
            )
    except BaseException:
        # The client has gone or gets an error: in both cases it gets no message.
        call.sqs.batcher.take_back([each.receipt for each in claimed])
        raise
    if not deliveries:
        return {}
    if attempt and claimed:
        now_ms, holder = call.sqs.clock.now_ms(), call.actor.holder
        call.sqs.attempts.remember(name, attempt, claimed, now_ms, holder)
    wanted = request.message_attribute_names or ()
    return {
        "Messages": [
            _shown(call.sqs, view, each, wanted, system, first_ms.get(each.message_id, 0))
            for each in deliveries
        ]
    }


async def _claim(
    call: SqsCall, name: str, limit: int, lease_ms: int, wait_ms: int
) -> list[Delivery]:
    """Take messages for a client for as long as it is there."""
    consumer = call.principal.key_id or call.http.peer
    wait = ClaimWait()
    claiming = call.sqs.batcher.claim(
        name,
        limit=limit,
        lease_ms=lease_ms,
        wait_ms=wait_ms,
        consumer=consumer,
        admission=wait,
        holder=call.actor.holder,
    )
    call.http.on_left = claiming.cancel
    try:
        return await call.sqs.batcher.claimed(claiming)
    except asyncio.CancelledError:
        if call.http.left and claiming.cancelled():
            return []
        raise
    finally:
        call.http.on_left = None
        call.http.waited_s += wait.waited_s


async def _again(sqs: SqsService, name: str, attempt: str, lease_ms: int) -> list[Delivery]:
    """Return the deliveries of an earlier attempt that are still held, with new leases."""
    deliveries = sqs.attempts.find(name, attempt, sqs.clock.now_ms())
    if not deliveries:
        return []
    outcomes = await sqs.batcher.extend([each.receipt for each in deliveries], lease_ms=lease_ms)
    return [each for each, held in zip(deliveries, outcomes, strict=True) if held]


def _checked(view: QueueView, request: SqsRequest) -> tuple[int, int, int]:
    limit = 1 if request.max_number_of_messages is None else request.max_number_of_messages
    reason = "Must be between 1 and 10, if provided."
    check_range(limit, "MaxNumberOfMessages", 1, limits.SQS_MAX_BATCH, reason)
    visibility_s = view.visibility_s
    if request.visibility_timeout is not None:
        visibility_s = check_visibility(request.visibility_timeout)
    wait_s = view.wait_s if request.wait_time_seconds is None else request.wait_time_seconds
    reason = "Must be >= 0 and <= 20, if provided."
    check_range(wait_s, "WaitTimeSeconds", 0, limits.SQS_MAX_WAIT_S, reason)
    check_token(request.receive_request_attempt_id, "ReceiveRequestAttemptId")
    return limit, visibility_s, wait_s


def _system_names(request: SqsRequest) -> frozenset[str]:
    if not (request.attribute_names or request.message_system_attribute_names):
        return frozenset()
    names = {*(request.attribute_names or ()), *(request.message_system_attribute_names or ())}
    if "All" in names:
        return frozenset(_SYSTEM)
    for name in names:
        if name not in _SYSTEM:
            raise SqsFault.attribute_name(name)
    return frozenset(names)


async def _first_receives(
    sqs: SqsService, deliveries: list[Delivery], lease_ms: int | None
) -> dict[int, int]:
    """Return when each message was received for the first time.

    ``lease_ms``: they were claimed just now, and those that are new say so themselves.
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
        attempts = await sqs.batcher.call(
            lambda broker: [broker.attempts(each.queue, each.message_id) for each in past]
        )
        for each, tried in zip(past, attempts, strict=True):
            known[each.message_id] = tried[0].claimed_at_ms if tried else each.published_at_ms
    return known


def _shown(
    sqs: SqsService,
    view: QueueView,
    delivery: Delivery,
    wanted: list[str] | tuple[()],
    system: frozenset[str],
    first_ms: int,
) -> Answer:
    """Show a message as SQS does."""
    body, encoded = messages.shown_body(delivery.payload)
    shown: Answer = {
        "MessageId": messages.message_uuid(sqs.store_id, delivery.message_id),
        "ReceiptHandle": handle_of(delivery),
        "MD5OfBody": messages.md5_of_body(body.encode() if encoded else delivery.payload),
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
        shown["MD5OfMessageAttributes"] = messages.md5_of_attributes(chosen)
    if system:
        known = _system_attributes(sqs, view, delivery, kept, first_ms)
        shown["Attributes"] = {name: text for name, text in known.items() if name in system}
    return shown


def _system_attributes(
    sqs: SqsService, view: QueueView, delivery: Delivery, kept: Kept, first_ms: int
) -> dict[str, str]:
    known = {
        "SenderId": kept.sender or sqs.options.account,
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
        known["DeadLetterQueueSourceArn"] = sqs.arn(source)
    return known


# --- delete, and change the visibility ------------------------------------------------------------


class _NotInFlight(SqsFault):
    """A change of the visibility of a message that nobody holds with this handle."""


async def settle(verb: Verb, call: SqsCall, request: SqsRequest) -> Answer:
    """Delete a message or change its visibility, by its receipt handle."""
    view = await call.view_of(request, "consume")
    if not request.receipt_handle:
        raise SqsFault.missing("ReceiptHandle")
    (fault,) = await verb(call.sqs, view, [request])
    try:
        if fault is not None:
            raise fault
    finally:
        # Its frame must not know it, or only the garbage collector would free the call.
        del fault
    return {}


async def settle_batch(verb: Verb, kind: str, call: SqsCall, request: SqsRequest) -> Answer:
    """Delete several messages or change their visibility; each of them succeeds or fails."""
    view = await call.view_of(request, "consume")
    entries = check_entries(request, kind)
    pairs = list(zip(entries, await verb(call.sqs, view, entries), strict=True))
    for entry, fault in pairs:
        if fault is not None and fault.code == "ReceiptHandleIsInvalid":
            # SQS names the handle in batches alone.
            handle = (entry.receipt_handle or "")[:200]
            fault.message = f'The input receipt handle "{handle}" is not a valid receipt handle.'
        elif isinstance(fault, _NotInFlight):
            # Clients that settle late look for this code, which SQS has in batches alone.
            fault.query_code, fault.message = "ReceiptHandleIsInvalid", _NOT_IN_FLIGHT
    return {
        "Successful": [{"Id": entry.id} for entry, fault in pairs if fault is None],
        "Failed": [failed_entry(entry, fault) for entry, fault in pairs if fault is not None],
    }


async def delete(
    sqs: SqsService, view: QueueView, entries: list[SqsEntry]
) -> list[SqsFault | None]:
    """Settle messages as done."""
    handles = [entry.receipt_handle or "" for entry in entries]
    receipts = [receipt_of(handle) for handle in handles]
    faults: list[SqsFault | None] = []
    outcomes = await _each(receipts, partial(sqs.batcher.ack, queue=view.name))
    # Of a standard queue the last handle of a message deletes it after its timeout, too.
    late = [handle for handle, ok in zip(handles, outcomes, strict=True) if not ok]
    if late and not view.fifo:
        again, attempts = map(receipt_of, late), list(map(attempt_of, late))
        await sqs.batcher.change(sqs.batcher.broker.acking_late(again, attempts, view.name))
    for handle, outcome in zip(handles, outcomes, strict=True):
        if isinstance(outcome, SqsFault):
            faults.append(outcome)
        elif outcome or not view.fifo or await _was_deleted(sqs, view.name, handle):
            faults.append(None)
        else:
            reason = "The receipt handle has expired."
            faults.append(SqsFault.value(handle, "ReceiptHandle", reason))
    return faults


async def _was_deleted(sqs: SqsService, name: str, handle: str) -> bool:
    """Whether the message was deleted before: a client repeats a delete for want of an answer."""
    number = message_of(handle)

    def look(broker: Broker) -> bool:
        if number is None:
            return False
        try:
            attempts = broker.attempts(name, number)
        except PenstockError:
            return False
        return bool(attempts) and attempts[-1].end is AttemptEnd.ACKED

    return await sqs.batcher.call(look)


async def change_visibility(
    sqs: SqsService, view: QueueView, entries: list[SqsEntry]
) -> list[SqsFault | None]:
    """Change when messages become visible again."""
    faults: list[SqsFault | None] = [None] * len(entries)
    by_timeout: dict[int, list[int]] = {}
    for index, entry in enumerate(entries):
        try:
            if entry.visibility_timeout is None:
                raise SqsFault.missing("VisibilityTimeout")
            by_timeout.setdefault(check_visibility(entry.visibility_timeout), []).append(index)
        except SqsFault as fault:
            # Without its traceback, which knows this list.
            faults[index] = fault.with_traceback(None)
    for seconds, indexes in by_timeout.items():
        change = partial(sqs.batcher.extend, lease_ms=seconds * 1000, queue=view.name)
        if not seconds:
            reason = "visibility timeout set to 0"
            change = partial(sqs.batcher.release, delay_ms=0, reason=reason, queue=view.name)
        handles = [entries[index].receipt_handle or "" for index in indexes]
        outcomes = await _each([receipt_of(handle) for handle in handles], change)
        for index, handle, outcome in zip(indexes, handles, outcomes, strict=True):
            if isinstance(outcome, SqsFault):
                faults[index] = outcome
            elif not outcome:
                faults[index] = _NotInFlight.value(handle, "ReceiptHandle", f"{_NOT_IN_FLIGHT}.")
    return faults
