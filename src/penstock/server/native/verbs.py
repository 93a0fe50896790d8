"""The native requests: what each does, and what its key must allow. One row for each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.broker import Broker
from penstock.errors import NotAllowed
from penstock.server.security import check_publish, check_receipts_of, check_settings, check_target
from penstock.wire.native import messages as wire

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable

    from penstock.model import Backfilled
    from penstock.server.batcher import Batcher
    from penstock.server.native.backpressure import PendingRequest
    from penstock.server.security import Principal

# The assumed size of a record of the log.
RECORD_BYTES: Final = 256


def _by_limit(request: wire.Claim, message_bytes: int) -> int:
    return max(0, request.limit) * message_bytes


def _by_page(request: wire.Browse, message_bytes: int) -> int:
    return max(0, request.limit) * (message_bytes if request.payloads else RECORD_BYTES)


def _by_records(request: wire.ReadLog, _message_bytes: int) -> int:
    return max(0, request.limit) * RECORD_BYTES


class Verb(NamedTuple):
    """How a request is checked and run.

    ``weight`` estimates the bytes of its answer from the size of a message; None: few. ``batched``:
    the batcher gathers it with others and begins it at once, where others wait for a thread.
    """

    check: Callable[[Any, Any], None]
    run: Callable[[Batcher, PendingRequest, Principal], Future[Any]]
    weight: Callable[[Any, int], int] | None = None
    batched: bool = False


# --- permissions --------------------------------------------------------------------------------


def _publishes(principal: Principal, request: wire.Publish) -> None:
    check_publish(principal, request.messages)
    if request.queue is not None:
        principal.check("publish", request.queue)


def _consumes(principal: Principal, request: Any) -> None:
    principal.check("consume", request.queue)


def _settles(principal: Principal, request: Any) -> None:
    # Without a queue, the store names the queues of the receipts, and those are checked.
    if request.queue is not None:
        principal.check("consume", request.queue)
    elif not any(action == "consume" for action, _ in principal.grants):
        raise NotAllowed(f"key {principal.key_id!r} may not consume")


def _administers(principal: Principal, request: Any) -> None:
    principal.check("admin", getattr(request, "queue", None) or getattr(request, "name", None))


def _creates(principal: Principal, request: wire.CreateQueue) -> None:
    check_settings(principal, request.name, request.settings)


def _updates(principal: Principal, request: wire.UpdateQueue) -> None:
    check_settings(principal, request.name, request.changes)


def _moves(principal: Principal, request: wire.Move) -> None:
    principal.check("admin", request.queue)
    check_target(principal, request.to)


def _looks(principal: Principal, _request: Any) -> None:
    principal.check_any(("consume", "admin"))


def _looks_at(principal: Principal, request: wire.Queue) -> None:
    principal.check_any(("consume", "publish", "admin"), request.name)


# --- actions -----------------------------------------------------------------------------------


def _call(verb: Callable[..., Any], *, long: bool = False) -> Any:
    """Call the broker's verb on a thread: the request's fields are named as its parameters.

    ``long``: it takes as long as there are messages.
    """
    return lambda batcher, pending, _: batcher.call(
        partial(_call_broker, verb.__name__, pending.request), long=long
    )


def _call_broker(name: str, request: wire.Request, broker: Broker) -> Any:
    arguments = {field: getattr(request, field) for field in request.__struct_fields__[1:]}
    # Settings and changes are keyword arguments of their own.
    more = arguments.pop("settings", None) or arguments.pop("changes", {})
    return getattr(broker, name)(**arguments, **more)


def _on_thread(work: Callable[[Broker, Any], Any], *, long: bool = False) -> Any:
    return lambda batcher, pending, _: batcher.call(
        lambda broker: work(broker, pending.request), long=long
    )


def _browse(broker: Broker, request: wire.Browse) -> wire.Entries:
    page = broker.browse(
        request.queue,
        state=request.state,
        limit=request.limit,
        cursor=request.cursor,
        payloads=request.payloads,
    )
    return wire.Entries(list(page), page.next_cursor)


class _StepDoneError(Exception):
    def __init__(self, step: wire.Step) -> None:
        self.step = step


def _backfill(broker: Broker, request: wire.Backfill) -> wire.Step:
    """Do one step: a server that stops need not wait for a whole log."""

    def stop(done: Backfilled, end: int) -> None:
        raise _StepDoneError(wire.Step(done, end))

    begin = "earliest" if request.begin is None else request.begin
    try:
        done = broker.backfill(request.queue, from_=begin, to=request.to, progress=stop)  # type: ignore[arg-type]
    except _StepDoneError as over:
        return over.step
    return wire.Step(done, done.next)


def _publish(batcher: Batcher, pending: PendingRequest, _: Principal) -> Future[Any]:
    return batcher.publish(pending.request.messages, queue=pending.request.queue)


def _ack(batcher: Batcher, pending: PendingRequest, principal: Principal) -> Future[Any]:
    r = pending.request
    return batcher.ack(r.receipts, queue=r.queue, check=check_receipts_of(principal, r.queue))


def _claim(batcher: Batcher, pending: PendingRequest, _: Principal) -> Future[Any]:
    r = pending.request
    return batcher.claim(
        r.queue,
        limit=r.limit,
        lease_ms=r.lease_ms,
        wait_ms=r.wait_ms,
        consumer=r.consumer,
        admission=None if pending.until is None else pending,
    )


def _release(batcher: Batcher, pending: PendingRequest, principal: Principal) -> Future[Any]:
    r = pending.request
    return batcher.release(
        r.receipts,
        delay_ms=r.delay_ms,
        reason=r.reason,
        queue=r.queue,
        unseen=r.unseen,
        check=check_receipts_of(principal, r.queue),
    )


def _extend(batcher: Batcher, pending: PendingRequest, principal: Principal) -> Future[Any]:
    r = pending.request
    check = check_receipts_of(principal, r.queue)
    return batcher.extend(r.receipts, lease_ms=r.lease_ms, queue=r.queue, check=check)


VERBS: Final[dict[type[Any], Verb]] = {
    wire.Publish: Verb(_publishes, _publish, batched=True),
    wire.Claim: Verb(_consumes, _claim, _by_limit, batched=True),
    wire.Ack: Verb(_settles, _ack, batched=True),
    wire.Release: Verb(_settles, _release, batched=True),
    wire.Extend: Verb(_settles, _extend, batched=True),
    wire.Browse: Verb(_consumes, _on_thread(_browse), _by_page),
    wire.Attempts: Verb(_consumes, _call(Broker.attempts)),
    wire.Stats: Verb(_consumes, _call(Broker.stats)),
    wire.StoreStats: Verb(_looks, _call(Broker.store_stats)),
    wire.Queues: Verb(_looks, _call(Broker.queues)),
    wire.Queue: Verb(_looks_at, _call(Broker.queue)),
    wire.CreateQueue: Verb(_creates, _call(Broker.create_queue)),
    wire.UpdateQueue: Verb(_updates, _call(Broker.update_queue)),
    wire.DeleteQueue: Verb(_administers, _call(Broker.delete_queue, long=True)),
    wire.Redrive: Verb(_administers, _call(Broker.redrive, long=True)),
    wire.Purge: Verb(_administers, _call(Broker.purge, long=True)),
    wire.Move: Verb(_moves, _call(Broker.move, long=True)),
    wire.ReadLog: Verb(_looks, _call(Broker.read_log), _by_records),
    wire.Assign: Verb(_administers, _call(Broker.assign)),
    wire.TakeEpoch: Verb(_administers, _call(Broker.take_epoch)),
    wire.Backfill: Verb(_administers, _on_thread(_backfill, long=True)),
    wire.ConfigureLog: Verb(_administers, _call(Broker.configure_log)),
    wire.LogStats: Verb(_looks, _call(Broker.log_stats)),
    wire.Info: Verb(_looks, _call(Broker.info)),
}
