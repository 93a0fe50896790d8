"""What a native request does at the desk, and what its key must allow: one row for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.errors import NotAllowed
from penstock.server.security import check_publish, check_receipts_of, check_settings, check_target
from penstock.wire.native import messages as wire

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.model import Backfilled
    from penstock.server.batcher import Desk, Turnstile
    from penstock.server.security import Principal

__all__ = ["VERBS", "Verb", "claim_in_turn"]

# What a record of the log is taken to weigh.
RECORD_BYTES: Final = 256


def _light(_request: Any, _message_bytes: int) -> int:
    return 0


def _by_limit(request: wire.Claim, message_bytes: int) -> int:
    return max(0, request.limit) * message_bytes


def _by_page(request: wire.Browse, message_bytes: int) -> int:
    return max(0, request.limit) * (message_bytes if request.payloads else RECORD_BYTES)


def _by_records(request: wire.ReadLog, _message_bytes: int) -> int:
    return max(0, request.limit) * RECORD_BYTES


class Verb(NamedTuple):
    """How a request is checked and run.

    ``weight`` says about how many bytes its answer takes, told what a message weighs.
    ``at_the_desk``: it is gathered with others and begun at once, where others wait for a thread.
    """

    check: Callable[[Any, Any], None]
    run: Callable[[Desk, Any, Principal], Future[Any]]
    weight: Callable[[Any, int], int] = _light
    at_the_desk: bool = False


# --- who may ------------------------------------------------------------------------------------


def _publishes(principal: Principal, request: wire.Publish) -> None:
    check_publish(principal, request.messages)
    if request.queue is not None:
        principal.check("publish", request.queue)


def _consumes(principal: Principal, request: Any) -> None:
    principal.check("consume", request.queue)


def _settles(principal: Principal, request: Any) -> None:
    # Without a queue, those that the receipts name are checked where the store knows them.
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


# --- what it does -------------------------------------------------------------------------------


def _at_once(work: Callable[[Broker, Any], Any]) -> Callable[[Desk, Any, Any], Future[Any]]:
    return lambda desk, request, _: desk.call(lambda broker: work(broker, request))


def _in_time(work: Callable[[Broker, Any], Any]) -> Callable[[Desk, Any, Any], Future[Any]]:
    """Do what may take as long as there are messages."""
    return lambda desk, request, _: desk.call(lambda broker: work(broker, request), long=True)


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


def _publish(desk: Desk, r: wire.Publish, _principal: Principal) -> Future[Any]:
    return desk.publish(r.messages, queue=r.queue)


def _ack(desk: Desk, r: wire.Ack, principal: Principal) -> Future[Any]:
    return desk.ack(r.receipts, queue=r.queue, check=check_receipts_of(principal, r.queue))


def _claim(desk: Desk, r: wire.Claim, _principal: Principal) -> Future[Any]:
    return claim_in_turn(desk, r, None)


def claim_in_turn(desk: Desk, r: wire.Claim, turnstile: Turnstile | None) -> Future[Any]:
    """Claim; one that has waited asks the turnstile before it looks again."""
    return desk.claim(
        r.queue,
        limit=r.limit,
        lease_ms=r.lease_ms,
        wait_ms=r.wait_ms,
        consumer=r.consumer,
        turnstile=turnstile,
    )


def _release(desk: Desk, r: wire.Release, principal: Principal) -> Future[Any]:
    return desk.release(
        r.receipts,
        delay_ms=r.delay_ms,
        reason=r.reason,
        queue=r.queue,
        unseen=r.unseen,
        check=check_receipts_of(principal, r.queue),
    )


def _extend(desk: Desk, r: wire.Extend, principal: Principal) -> Future[Any]:
    check = check_receipts_of(principal, r.queue)
    return desk.extend(r.receipts, lease_ms=r.lease_ms, queue=r.queue, check=check)


def _move(broker: Any, r: wire.Move) -> int:
    moved: int = broker.move(r.queue, r.to, state=r.state, message_ids=r.message_ids, limit=r.limit)
    return moved


VERBS: Final[dict[type[Any], Verb]] = {
    wire.Publish: Verb(_publishes, _publish, at_the_desk=True),
    wire.Claim: Verb(_consumes, _claim, _by_limit, at_the_desk=True),
    wire.Ack: Verb(_settles, _ack, at_the_desk=True),
    wire.Release: Verb(_settles, _release, at_the_desk=True),
    wire.Extend: Verb(_settles, _extend, at_the_desk=True),
    wire.Browse: Verb(_consumes, _at_once(_browse), _by_page),
    wire.Attempts: Verb(_consumes, _at_once(lambda b, r: b.attempts(r.queue, r.message_id))),
    wire.Stats: Verb(_consumes, _at_once(lambda b, r: b.stats(r.queue))),
    wire.StoreStats: Verb(_looks, _at_once(lambda b, _: b.store_stats())),
    wire.Queues: Verb(_looks, _at_once(lambda b, _: b.queues())),
    wire.Queue: Verb(_looks_at, _at_once(lambda b, r: b.queue(r.name))),
    wire.CreateQueue: Verb(_creates, _at_once(lambda b, r: b.create_queue(r.name, **r.settings))),
    wire.UpdateQueue: Verb(
        _updates,
        _at_once(lambda b, r: b.update_queue(r.name, from_offset=r.from_offset, **r.changes)),
    ),
    wire.DeleteQueue: Verb(
        _administers, _in_time(lambda b, r: b.delete_queue(r.name, drain=r.drain))
    ),
    wire.Redrive: Verb(
        _administers,
        _in_time(lambda b, r: b.redrive(r.queue, message_ids=r.message_ids, where=r.where)),
    ),
    wire.Purge: Verb(_administers, _in_time(lambda b, r: b.purge(r.queue, states=r.states))),
    wire.Move: Verb(_moves, _in_time(_move)),
    wire.ReadLog: Verb(
        _looks,
        _at_once(lambda b, r: b.read_log(r.log, begin=r.begin, limit=r.limit)),
        _by_records,
    ),
    wire.Assign: Verb(
        _administers,
        _at_once(lambda b, r: b.assign(r.log, r.cursor, r.assignments, epoch=r.epoch)),
    ),
    wire.TakeEpoch: Verb(_administers, _at_once(lambda b, _: b.take_epoch())),
    wire.Backfill: Verb(_administers, _in_time(_backfill)),
    wire.ConfigureLog: Verb(
        _administers,
        _at_once(lambda b, r: b.configure_log(logs=r.logs, retention_ms=r.retention_ms)),
    ),
    wire.LogStats: Verb(_looks, _at_once(lambda b, _: b.log_stats())),
    wire.Info: Verb(_looks, _at_once(lambda b, _: b.info())),
}
