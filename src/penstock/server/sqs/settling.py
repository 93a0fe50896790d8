"""DeleteMessage, ChangeMessageVisibility, and their batches.

A receipt handle has Penstock's receipt, which fences: once a lease has ended it changes nothing
any more. A delete with such a handle succeeds on a standard queue, as in SQS, which promises no
more than that the message *may* be gone; on a FIFO queue, and for a visibility timeout, it is an
error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from penstock.errors import InvalidReceipt, PenstockError
from penstock.model import AttemptEnd
from penstock.server.sqs.calls import check_entries, failed_entry
from penstock.server.sqs.receiving import check_visibility
from penstock.wire.sqs.faults import SqsFault
from penstock.wire.sqs.handles import message_of, receipt_of
from penstock.wire.sqs.requests import (
    ChangeMessageVisibility,
    ChangeMessageVisibilityBatch,
    DeleteMessage,
    DeleteMessageBatch,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.broker.broker import Broker
    from penstock.model import Outcome
    from penstock.server.sqs.calls import Call, Place
    from penstock.wire.sqs.requests import SqsRequest

__all__ = ["change_visibility", "change_visibility_batch", "delete", "delete_batch"]


async def delete(place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
    """Settle a message as done."""
    request = cast(DeleteMessage, request)
    name = call.queue_of(request)
    call.principal.check("consume", name)
    view = place.catalog.known(name) or await place.catalog.view(name)
    handle = request.receipt_handle
    if not handle:
        raise SqsFault.missing("ReceiptHandle")
    receipt = receipt_of(handle)
    try:
        (outcome,) = await place.desk.ack([receipt], queue=name)
    except InvalidReceipt:
        raise SqsFault.bad_receipt() from None
    place.attempts.forget(receipt)
    if not outcome and view.fifo:
        await _check_settled(place, name, handle)
    return {}


async def delete_batch(place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
    """Settle several messages as done."""
    request = cast(DeleteMessageBatch, request)
    name = call.queue_of(request)
    call.principal.check("consume", name)
    view = await place.catalog.view(name)
    entries = request.entries or []
    check_entries(entries, "DeleteMessageBatch")
    handles = [entry.receipt_handle or "" for entry in entries]
    outcomes = await _each(handles, lambda receipts: place.desk.ack(receipts, queue=name))
    successful: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for entry, handle, outcome in zip(entries, handles, outcomes, strict=True):
        fault = outcome if isinstance(outcome, SqsFault) else None
        if fault is None:
            place.attempts.forget(receipt_of(handle))
        if fault is None and not outcome and view.fifo:
            try:
                await _check_settled(place, name, handle)
            except SqsFault as expired:
                fault = expired
        if fault is None:
            successful.append({"Id": entry.id})
        else:
            failed.append(failed_entry(entry.id, fault))
    return {"Successful": successful, "Failed": failed}


async def change_visibility(place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
    """Change when a message becomes visible again."""
    request = cast(ChangeMessageVisibility, request)
    name = call.queue_of(request)
    call.principal.check("consume", name)
    await place.catalog.view(name)
    if not request.receipt_handle:
        raise SqsFault.missing("ReceiptHandle")
    if request.visibility_timeout is None:
        raise SqsFault.missing("VisibilityTimeout")
    seconds = check_visibility(request.visibility_timeout)
    try:
        (outcome,) = await _hold(place, name, [receipt_of(request.receipt_handle)], seconds)
    except InvalidReceipt:
        raise SqsFault.bad_receipt() from None
    if not outcome:
        raise _not_held(request.receipt_handle)
    return {}


async def change_visibility_batch(place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
    """Change several."""
    request = cast(ChangeMessageVisibilityBatch, request)
    name = call.queue_of(request)
    call.principal.check("consume", name)
    await place.catalog.view(name)
    entries = request.entries or []
    check_entries(entries, "ChangeMessageVisibilityBatch")
    faults: dict[int, SqsFault] = {}
    by_timeout: dict[int, list[int]] = {}
    for index, entry in enumerate(entries):
        try:
            if entry.visibility_timeout is None:
                raise SqsFault.missing("VisibilityTimeout")
            by_timeout.setdefault(check_visibility(entry.visibility_timeout), []).append(index)
        except SqsFault as fault:
            faults[index] = fault
    for seconds, indexes in by_timeout.items():
        handles = [entries[index].receipt_handle or "" for index in indexes]
        outcomes = await _each(
            handles,
            lambda receipts, seconds=seconds: _hold(place, name, receipts, seconds),  # type: ignore[misc]
        )
        for index, handle, outcome in zip(indexes, handles, outcomes, strict=True):
            if isinstance(outcome, SqsFault):
                faults[index] = outcome
            elif not outcome:
                faults[index] = _not_held(handle)
    return {
        "Successful": [
            {"Id": entry.id} for index, entry in enumerate(entries) if index not in faults
        ],
        "Failed": [failed_entry(entries[index].id, faults[index]) for index in sorted(faults)],
    }


def _hold(place: Place, name: str, receipts: list[str], seconds: int) -> Awaitable[list[Outcome]]:
    if seconds == 0:
        return place.desk.release(
            receipts, delay_ms=0, reason="visibility timeout set to 0", queue=name
        )
    return place.desk.extend(receipts, lease_ms=seconds * 1000, queue=name)


async def _each(
    handles: list[str], verb: Callable[[list[str]], Awaitable[list[Outcome]]]
) -> list[Outcome | SqsFault]:
    """Do all of them at once, or, if one is no receipt, one by one."""
    try:
        return list(await verb([receipt_of(handle) for handle in handles]))
    except InvalidReceipt:
        pass
    outcomes: list[Outcome | SqsFault] = []
    for handle in handles:
        try:
            outcomes += await verb([receipt_of(handle)])
        except InvalidReceipt:
            outcomes.append(
                SqsFault(
                    "ReceiptHandleIsInvalid",
                    f'The input receipt handle "{handle[:200]}" is not a valid receipt handle.',
                )
            )
    return outcomes


def _not_held(handle: str) -> SqsFault:
    return SqsFault.value(
        handle,
        "ReceiptHandle",
        "Message does not exist or is not available for visibility timeout change.",
    )


async def _check_settled(place: Place, name: str, handle: str) -> None:
    """Accept a delete of what was deleted before; a client may repeat it for want of an answer."""
    number = message_of(handle)

    def deleted(broker: Broker) -> bool:
        if number is None:
            return False
        try:
            attempts = broker.attempts(name, number)
        except PenstockError:
            return False
        return bool(attempts) and attempts[-1].end is AttemptEnd.ACKED

    if not await place.desk.call(deleted):
        raise SqsFault.value(handle, "ReceiptHandle", "The receipt handle has expired.")
