"""Native requests: a row for each verb, and which requests of a connection may begin.

::

    pending ──▶ there is room ──▶ begun ──▶ answered, which makes room
                   │    ▲           │ ▲
                   ▼    │           ▼ │ the queue got something, and there is room
                   held ┘◀──────  parked at the batcher, which takes no room

Messages that are claimed for one client are withheld from others, and the server writes them
however slowly the client reads. So it claims nothing for which there is no room. The size of an
answer is a guess: by the sizes of the queue's messages so far. Requests for little do not wait
behind requests for much. Nothing here knows of sockets or clocks.
"""

from __future__ import annotations

from asyncio import Future, TimerHandle
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec

from penstock import limits
from penstock.broker.broker import Broker
from penstock.broker.requests import Ack, Publish
from penstock.errors import InvalidQueue, NotAllowed, PenstockError, QueueNotFound, StoreDamaged
from penstock.packing import check_packed
from penstock.server.audit import Actor, audited
from penstock.server.batcher import Batcher
from penstock.server.security import check_publish, check_receipts_of, check_settings, check_target
from penstock.validation import check_count, check_receipts
from penstock.wire import native as wire

if TYPE_CHECKING:
    from penstock.model import Backfilled
    from penstock.server.security import Principal

# The assumed size of a message while none of its queue was seen: more than most have.
UNKNOWN_MESSAGE_BYTES: Final = 1024 * 1024
# Requests that expect more wait in a line of their own.
SMALL_BYTES: Final = 512 * 1024
# The least that an answer counts for, should messages be larger than those before.
LEAST_BYTES: Final = limits.MAX_BYTES_AT_WORK // limits.MAX_REQUESTS_AT_WORK
MAX_SIZES: Final = 10_000
# Answers to these hold messages, whose size is not known before.
WITH_MESSAGES: Final = frozenset({wire.Claim, wire.Browse})
# The assumed size of a record of the log.
RECORD_BYTES: Final = 256


# --- verbs ---------------------------------------------------------------------------------------


class Verb(NamedTuple):
    """How a request is checked and run.

    ``batched``: the batcher gathers it with others and begins it at once, where others wait for a
    thread. ``run`` returns the future of its answer; None: the request is told.
    """

    check: Callable[[Any, Any], None]
    run: Callable[[Batcher, PendingRequest, Principal], Future[Any] | None]
    batched: bool = False


# --- permissions --------------------------------------------------------------------------------


def _publishes(principal: Principal, request: wire.Publish) -> None:
    check_publish(principal, [message.envelope for message in request.messages])
    if request.queue is not None:
        principal.check("publish", request.queue)


def _may(*actions: str, of: str = "") -> Callable[[Principal, Any], None]:
    """Check that one of the actions is allowed: on the queue of a field, or else on all queues."""
    return lambda principal, request: principal.check_any(
        actions, getattr(request, of) if of else None
    )


def _settles(principal: Principal, request: Any) -> None:
    # Without a queue, the store names the queues of the receipts, and those are checked.
    if request.queue is not None:
        principal.check("consume", request.queue)
    elif not any(action == "consume" for action, _ in principal.grants):
        raise NotAllowed(f"key {principal.key_id!r} may not consume")


def _configures(principal: Principal, request: wire.CreateQueue | wire.UpdateQueue) -> None:
    """Check the settings too; on a thread, since that takes as long as the filter is."""
    changes = request.settings if isinstance(request, wire.CreateQueue) else request.changes
    check_settings(principal, request.name, changes)


def _moves(principal: Principal, request: wire.Move) -> None:
    principal.check("admin", request.queue)
    check_target(principal, request.to)


# --- actions -----------------------------------------------------------------------------------


def _fields(request: wire.Request) -> dict[str, Any]:
    """Return a request's fields, which are named as the parameters of its verb."""
    return {name: getattr(request, name) for name in request.__struct_fields__[1:]}


def _call(
    verb: Callable[..., Any], check: Callable[[Principal, Any], None] = lambda *_: None
) -> Any:
    """Call a verb on a thread, with the broker and the request's fields; first the check."""

    def run(batcher: Batcher, pending: PendingRequest, principal: Principal) -> Future[Any]:
        fields = _fields(pending.request)
        # Settings and changes are keyword arguments of their own.
        more = fields.pop("settings", None) or fields.pop("changes", {})
        for taken in {"self", *fields} & more.keys():
            raise InvalidQueue(f"a queue has no setting {taken!r}")
        work: Callable[[Broker], Any] = partial(verb, **fields, **more)
        if getattr(Broker, verb.__name__, None) is verb:
            # By name: the broker may be one that records its verbs.
            work = methodcaller(verb.__name__, **fields, **more)
        request, watched = pending.request, audited(batcher.audit, _actor(pending, principal), work)

        def checked(broker: Broker) -> Any:
            check(principal, request)
            return watched(broker)

        holder = _actor(pending, principal).holder
        return batcher.call(checked, long=type(request) in wire.LONG, holder=holder)

    return run


def _actor(pending: PendingRequest, principal: Principal) -> Actor:
    return Actor("native", principal.key_id, pending.address)


def _browse(broker: Broker, **fields: Any) -> wire.Entries:
    page = broker.browse(**fields)
    return wire.Entries(list(page), page.next_cursor)


def _all_stats(broker: Broker, after: str, limit: int) -> wire.StatsPage:
    check_count(limit, "limit", 1, limits.MAX_STATS_LIMIT)
    names = [spec.name for spec in broker.queues() if spec.name > after]
    stats = []
    for name in names[:limit]:
        # Queues come and go meanwhile, and one that is damaged has an error of its own.
        with suppress(QueueNotFound, StoreDamaged):
            stats.append(broker.stats(name))
    return stats, names[limit - 1] if len(names) > limit else None


def _backup(batcher: Batcher, pending: PendingRequest, principal: Principal) -> Future[Any]:
    asked = pending.request
    return batcher.back_up(asked.name, _actor(pending, principal), incremental=asked.incremental)


class _StepDoneError(Exception):
    pass


def _backfill(broker: Broker, queue: str, begin: Any, to: Any) -> wire.Step:
    """Do one step: a server that stops need not wait for a whole log."""

    def stop(done: Backfilled, end: int) -> None:
        raise _StepDoneError((done, end))

    begin = "earliest" if begin is None else begin
    try:
        done = broker.backfill(queue, from_=begin, to=to, progress=stop)
    except _StepDoneError as over:
        step: wire.Step = over.args[0]
        return step
    return done, done.next


def _explain(batcher: Batcher, pending: PendingRequest, principal: Principal) -> Future[Any]:
    def sees(queue: str | None) -> bool:
        return principal.may("consume", queue) or principal.may("admin", queue)

    fields = _fields(pending.request)
    holder = _actor(pending, principal).holder
    return batcher.call(lambda broker: broker.explain_to(sees, **fields), holder=holder)


def _publish(batcher: Batcher, pending: PendingRequest, principal: Principal) -> None:
    request = pending.request
    check_packed(request.messages)
    if principal.rate is not None:
        principal.spend_rate(request.messages)
    batcher.submit(Publish(request.messages, request.queue), pending)


def _claim(batcher: Batcher, pending: PendingRequest, principal: Principal) -> Future[Any]:
    admission = None if pending.until is None else pending
    holder = "" if admission is None else _actor(pending, principal).holder
    return batcher.claim(**_fields(pending.request), admission=admission, holder=holder)


def _ack(batcher: Batcher, pending: PendingRequest, principal: Principal) -> None:
    request = pending.request
    check = check_receipts_of(principal, request.queue)
    batcher.submit(Ack(check_receipts(request.receipts), request.queue, check), pending)


def _settle(verb: Callable[..., Any]) -> Any:
    """Call a verb of the batcher, which checks the queues that the receipts name."""
    return lambda batcher, pending, principal: getattr(batcher, verb.__name__)(
        **_fields(pending.request), check=check_receipts_of(principal, pending.request.queue)
    )


_consume: Final = _may("consume", of="queue")
_look: Final = _may("consume", "admin")
_admin: Final = _may("admin")
_owns: Final = _may("admin", of="name")
VERBS: Final[dict[type[Any], Verb]] = {
    wire.Publish: Verb(_publishes, _publish, batched=True),
    wire.Claim: Verb(_consume, _claim, batched=True),
    wire.Ack: Verb(_settles, _ack, batched=True),
    wire.Release: Verb(_settles, _settle(Batcher.release), batched=True),
    wire.Extend: Verb(_settles, _settle(Batcher.extend), batched=True),
    wire.Browse: Verb(_consume, _call(_browse)),
    wire.Attempts: Verb(_consume, _call(Broker.attempts)),
    wire.Explain: Verb(_consume, _explain),
    wire.Stats: Verb(_consume, _call(Broker.stats)),
    wire.StoreStats: Verb(_look, _call(Broker.store_stats)),
    wire.Queues: Verb(_look, _call(Broker.queues)),
    wire.Queue: Verb(_may("consume", "publish", "admin", of="name"), _call(Broker.queue)),
    wire.CreateQueue: Verb(_owns, _call(Broker.create_queue, _configures)),
    wire.UpdateQueue: Verb(_owns, _call(Broker.update_queue, _configures)),
    wire.DeleteQueue: Verb(_owns, _call(Broker.delete_queue)),
    wire.Redrive: Verb(_may("admin", of="queue"), _call(Broker.redrive)),
    wire.Purge: Verb(_may("admin", of="queue"), _call(Broker.purge)),
    wire.Move: Verb(_moves, _call(Broker.move)),
    wire.ReadLog: Verb(_look, _call(Broker.read_log)),
    wire.Assign: Verb(_admin, _call(Broker.assign)),
    wire.TakeEpoch: Verb(_admin, _call(Broker.take_epoch)),
    wire.Backfill: Verb(_may("admin", of="queue"), _call(_backfill)),
    wire.ConfigureLog: Verb(_admin, _call(Broker.configure_log)),
    wire.LogStats: Verb(_look, _call(Broker.log_stats)),
    wire.Info: Verb(_look, _call(Broker.info)),
    wire.AllStats: Verb(_look, _call(_all_stats)),
    wire.Sweep: Verb(_admin, _call(Broker.sweep)),
    wire.Backup: Verb(_admin, _backup),
}


# --- back-pressure -------------------------------------------------------------------------------


def answer_bytes(request: wire.Claim | wire.Browse | wire.ReadLog, message_bytes: int = 0) -> int:
    """Estimate the answer to a claim, a browse or a read of the log by the size of a message."""
    messages = type(request) in WITH_MESSAGES and getattr(request, "payloads", True)
    return max(0, request.limit) * (message_bytes if messages else RECORD_BYTES)


class MessageSizes:
    """The sizes of each queue's messages, as far as answers have shown."""

    def __init__(self) -> None:
        self._by_queue: dict[str, int] = {}

    def guess(self, queue: str) -> int:
        """Return the assumed size of the next message."""
        return self._by_queue.get(queue, UNKNOWN_MESSAGE_BYTES)

    def learn(self, queue: str, message_bytes: int) -> None:
        """Learn: up at once, down slowly, since the next may be as large as the largest."""
        known = self._by_queue.get(queue)
        if known is not None and message_bytes < known:
            message_bytes = known - (known - message_bytes + 7) // 8
        elif known is None and len(self._by_queue) >= MAX_SIZES:
            # Queues come and go, and a size that is forgotten is soon seen again.
            self._by_queue.clear()
        self._by_queue[queue] = message_bytes


class PendingRequest(msgspec.Struct, eq=False):
    """A request, from its arrival to its answer. While its claim is parked, it admits the claim.

    It is told the answer of a publish or an ack (:class:`penstock.server.batcher.Answer`).
    """

    request: Any
    verb: Verb
    size: int
    began: float
    backpressure: Backpressure
    finish: Callable[[PendingRequest, Any, BaseException | None], None]
    # Until when a claim waits; None: it does not.
    until: float | None = None
    future: Future[Any] | None = None
    # Whether the batcher has it and tells it the answer; whether it was told.
    at_batcher: bool = False
    over: bool = False
    # The error that answers it in place of its result: its time is up.
    failure: PenstockError | None = None
    # Bytes that it takes of the room; 0: it was not admitted.
    taken: int = 0
    # Whether the batcher had messages for it, and there was no room.
    refused: bool = False
    # Ends its wait while it is held.
    alarm: TimerHandle | None = None
    # How long its claim was parked at the batcher.
    waited_s: float = 0.0
    # Where its client is.
    address: str = ""

    def admit(self) -> bool:
        """Say whether the claim may look for messages again."""
        self.refused = not self.backpressure.admit(self)
        return not self.refused

    def leave(self) -> None:
        """Give its room to others: the claim is parked."""
        self.backpressure.leave(self)

    def done(self) -> bool:
        """Whether it was told its answer, or was cancelled."""
        return self.over

    def cancel(self) -> bool:
        """Want no answer any more: the connection has answered it."""
        self.over = True
        return True

    def set_result(self, result: Any) -> None:
        """Answer it with a result."""
        self.over = True
        self.finish(self, result, None)

    def set_exception(self, error: Exception) -> None:
        """Answer it with an error."""
        self.over = True
        self.finish(self, None, error)

    def disarm(self) -> None:
        """Cancel the alarm: the request is held no longer."""
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None


_Line: TypeAlias = "OrderedDict[PendingRequest, None]"


class Backpressure:
    """The room for messages of one connection, and the requests that are held for it, in order."""

    def __init__(self, sizes: MessageSizes, schedule_held: Callable[[], None]) -> None:
        """``schedule_held`` is called when held requests may find room; it must only pass it on."""
        self._sizes = sizes
        self._schedule_held = schedule_held
        # Whether the client reads its answers: until it does, it gets no more.
        self.is_open = True
        # For little and for much: expected bytes, and held requests. Ordered dictionaries, since
        # any request can be taken out.
        self._expected = [0, 0]
        self._held: tuple[_Line, _Line] = (OrderedDict(), OrderedDict())

    def shut(self) -> None:
        """Admit nothing: the client does not read its answers."""
        self.is_open = False

    def reopen(self) -> None:
        """Go on: the client reads again."""
        self.is_open = True
        self._free()

    def admit(self, pending: PendingRequest) -> bool:
        """Admit a request if there is room, and none of its line is held."""
        if pending.taken:
            return True
        needed = self._needed(pending)
        return not self._held[needed > SMALL_BYTES] and self._take(pending, needed)

    def leave(self, pending: PendingRequest) -> None:
        """Take back the room of a request."""
        if pending.taken:
            self._expected[pending.taken > SMALL_BYTES] -= pending.taken
            pending.taken = 0
            self._free()

    def hold(self, pending: PendingRequest) -> None:
        """Hold a request until there is room, at the end of its line."""
        self._held[self._needed(pending) > SMALL_BYTES][pending] = None
        self._free()

    def drop(self, pending: PendingRequest) -> None:
        """Hold a request no longer, if it is held; those behind it may find room."""
        for line in self._held:
            line.pop(pending, None)
        self._free()

    def next(self) -> PendingRequest | None:
        """Admit the next of the held requests for which there is room; None: there is none."""
        # Little once more, since a request that was taken for much may be for little.
        for much in (False, True, False):
            line = self._held[much]
            while line:
                pending = next(iter(line))
                # Guessed again: more is known of its queue by now.
                needed = self._needed(pending)
                if (needed > SMALL_BYTES) is not much:
                    del line[pending]
                    self._held[not much][pending] = None
                elif self._take(pending, needed):
                    del line[pending]
                    return pending
                else:
                    break
        return None

    def clear(self) -> list[PendingRequest]:
        """Return the held requests, and hold them no longer."""
        held = [pending for line in self._held for pending in line]
        for line in self._held:
            line.clear()
        return held

    def _needed(self, pending: PendingRequest) -> int:
        expected = answer_bytes(pending.request, self._sizes.guess(pending.request.queue))
        return max(LEAST_BYTES, min(expected, limits.MAX_CLAIM_BYTES))

    def _take(self, pending: PendingRequest, needed: int) -> bool:
        much = needed > SMALL_BYTES
        expected = self._expected[much]
        # A request that needs more than all the room has it alone.
        if not self.is_open or (expected and expected + needed > limits.MAX_BYTES_AT_WORK):
            return False
        self._expected[much] += needed
        pending.taken = needed
        return True

    def _free(self) -> None:
        if self.is_open and (self._held[0] or self._held[1]):
            self._schedule_held()
