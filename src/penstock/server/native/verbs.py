"""The native requests: what each does, and what its key must allow. One row for each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.broker import Broker
from penstock.errors import NotAllowed
from penstock.server.batcher import Batcher
from penstock.server.security import check_publish, check_receipts_of, check_settings, check_target
from penstock.wire import native as wire

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable

    from penstock.model import Backfilled
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


def _configures(principal: Principal, request: wire.CreateQueue | wire.UpdateQueue) -> None:
    changes = request.settings if isinstance(request, wire.CreateQueue) else request.changes
    check_settings(principal, request.name, changes)


def _moves(principal: Principal, request: wire.Move) -> None:
    principal.check("admin", request.queue)
    check_target(principal, request.to)


def _looks(principal: Principal, _request: Any) -> None:
    principal.check_any(("consume", "admin"))


def _looks_at(principal: Principal, request: wire.Queue) -> None:
    principal.check_any(("consume", "publish", "admin"), request.name)


# --- actions -----------------------------------------------------------------------------------


def _fields(request: wire.Request) -> dict[str, Any]:
    """Return a request's fields, which are named as the parameters of its verb."""
    return {name: getattr(request, name) for name in request.__struct_fields__[1:]}


def _call(verb: Callable[..., Any]) -> Any:
    """Call a verb on a thread, with the broker and the request's fields."""

    def run(batcher: Batcher, pending: PendingRequest, _: Principal) -> Future[Any]:
        fields = _fields(pending.request)
        # Settings and changes are keyword arguments of their own.
        more = fields.pop("settings", None) or fields.pop("changes", {})
        return batcher.call(
            partial(verb, **fields, **more), long=type(pending.request) in wire.LONG
        )

    return run


def _browse(broker: Broker, **fields: Any) -> wire.Entries:
    page = broker.browse(**fields)
    return wire.Entries(list(page), page.next_cursor)


class _StepDoneError(Exception):
    pass


def _backfill(broker: Broker, queue: str, begin: Any, to: Any) -> wire.Step:
    """Do one step: a server that stops need not wait for a whole log."""

    def stop(done: Backfilled, end: int) -> None:
        raise _StepDoneError(wire.Step(done, end))

    begin = "earliest" if begin is None else begin
    try:
        done = broker.backfill(queue, from_=begin, to=to, progress=stop)
    except _StepDoneError as over:
        step: wire.Step = over.args[0]
        return step
    return wire.Step(done, done.next)


def _publish(batcher: Batcher, pending: PendingRequest, _: Principal) -> Future[Any]:
    return batcher.publish(pending.request.messages, queue=pending.request.queue)


def _claim(batcher: Batcher, pending: PendingRequest, _: Principal) -> Future[Any]:
    admission = None if pending.until is None else pending
    return batcher.claim(**_fields(pending.request), admission=admission)


def _settle(verb: Callable[..., Any]) -> Any:
    """Call a verb of the batcher, which checks the queues that the receipts name."""
    return lambda batcher, pending, principal: getattr(batcher, verb.__name__)(
        **_fields(pending.request), check=check_receipts_of(principal, pending.request.queue)
    )


VERBS: Final[dict[type[Any], Verb]] = {
    wire.Publish: Verb(_publishes, _publish, batched=True),
    wire.Claim: Verb(_consumes, _claim, _by_limit, batched=True),
    wire.Ack: Verb(_settles, _settle(Batcher.ack), batched=True),
    wire.Release: Verb(_settles, _settle(Batcher.release), batched=True),
    wire.Extend: Verb(_settles, _settle(Batcher.extend), batched=True),
    wire.Browse: Verb(_consumes, _call(_browse), _by_page),
    wire.Attempts: Verb(_consumes, _call(Broker.attempts)),
    wire.Stats: Verb(_consumes, _call(Broker.stats)),
    wire.StoreStats: Verb(_looks, _call(Broker.store_stats)),
    wire.Queues: Verb(_looks, _call(Broker.queues)),
    wire.Queue: Verb(_looks_at, _call(Broker.queue)),
    wire.CreateQueue: Verb(_configures, _call(Broker.create_queue)),
    wire.UpdateQueue: Verb(_configures, _call(Broker.update_queue)),
    wire.DeleteQueue: Verb(_administers, _call(Broker.delete_queue)),
    wire.Redrive: Verb(_administers, _call(Broker.redrive)),
    wire.Purge: Verb(_administers, _call(Broker.purge)),
    wire.Move: Verb(_moves, _call(Broker.move)),
    wire.ReadLog: Verb(_looks, _call(Broker.read_log), _by_records),
    wire.Assign: Verb(_administers, _call(Broker.assign)),
    wire.TakeEpoch: Verb(_administers, _call(Broker.take_epoch)),
    wire.Backfill: Verb(_administers, _call(_backfill)),
    wire.ConfigureLog: Verb(_administers, _call(Broker.configure_log)),
    wire.LogStats: Verb(_looks, _call(Broker.log_stats)),
    wire.Info: Verb(_looks, _call(Broker.info)),
}
