"""Every verb of the client, once: its request, its answer, and whether it may be repeated.

:class:`Verbs` is the table. Most verbs are a method of the broker whose parameters are the fields
of a request: :func:`_ask` makes those. The others are functions with the signature of the broker's
method, which return a :class:`Call`, or are generators of calls if they take several. A verb is a
method of both clients: of ``Client`` it returns the result, of ``AsyncClient`` a coroutine of it,
with the same parameters either way; type checkers see both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import partial, wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

import msgspec

from penstock import limits
from penstock.broker.broker import Broker
from penstock.errors import InvalidInput, InvalidReceipt
from penstock.model import (
    Assigned,
    Attempt,
    Backfilled,
    Cursor,
    Delivery,
    LogPage,
    LogStats,
    Message,
    MessageExplanation,
    Ordering,
    Outcome,
    OutcomeStatus,
    Page,
    QueueSpec,
    QueueStats,
    StoreInfo,
    StoreStats,
    SweepCounts,
    Value,
)
from penstock.packing import pack_messages
from penstock.store.codec.claimed import read_claimed
from penstock.validation import (
    attributes_to,
    check_assignments,
    check_count,
    check_ids,
    check_queue_name,
    check_receipts,
    check_state,
    check_states,
    cut_text,
)
from penstock.wire import native as wire

if TYPE_CHECKING:
    from penstock.client.clients import AsyncClient, Client

P = ParamSpec("P")
R = TypeVar("R")


class Repeat(Enum):
    """Whether a call may be sent again when its connection was lost before the answer."""

    ALWAYS = "always"
    """It changes nothing, or nothing more the second time."""
    SETTLES = "settles"
    """The second time is refused if the first took effect: the answer must say so."""
    DEDUPED = "deduped"
    """If every message has a dedup id."""
    NEVER = "never"
    """It might take effect twice, or its answer be lost for good: the caller must decide."""


class Uncertain(Outcome, frozen=True):
    """A receipt that was stale when ``ack`` or ``release`` had to be sent a second time.

    The answer to the first time was lost with its connection. If the first took effect, that is
    why the second was refused; if the lease had ended before, it is not. ``attempts()`` tells.
    """


class Call(msgspec.Struct, Generic[R], frozen=True):
    """A request to be sent, and how to read its answer.

    ``answer`` is the type of the answer; ``finish`` makes the verb's result of it. ``on_push`` is
    called with each frame of messages that come before the answer.
    """

    request: wire.Request
    answer: Any
    repeat: Repeat = Repeat.ALWAYS
    finish: Callable[[Any], R] | None = None
    on_push: Callable[[wire.Deliveries], None] | None = None


Plan: TypeAlias = Generator[Call[Any], Any, R]
"""A verb of several calls: yields them, is sent their results, returns its own."""


def may_repeat(call: Call[Any]) -> bool:
    """Whether a call whose answer was lost may be sent again."""
    if call.repeat is Repeat.DEDUPED:
        assert isinstance(call.request, wire.Publish)
        return all(message.dedup_id is not None for message in call.request.messages)
    return call.repeat is not Repeat.NEVER


def doubtful(outcomes: list[Outcome]) -> list[Outcome]:
    """Mark stale receipts: the first, unanswered try may have settled them."""
    return [
        Uncertain(each.receipt, each.status, each.lease_deadline_ms)
        if each.status is OutcomeStatus.STALE
        else each
        for each in outcomes
    ]


# --- messages -------------------------------------------------------------------------------------


def publish(messages: Iterable[Message]) -> Call[list[int]]:
    """Store messages, each into every queue whose filter it satisfies; return their ids."""
    return Call(wire.Publish(0, pack_messages(messages)), list[int], Repeat.DEDUPED)


def send(
    queue: str,
    payload: bytes,
    /,
    *,
    delay_ms: int = 0,
    priority: int = 0,
    group: str = "",
    dedup_id: str | None = None,
    attributes: Mapping[str, Value] | None = None,
    **more: Value,
) -> Call[int]:
    """Publish one message straight to a queue; see :meth:`Broker.send`."""
    given = attributes_to(queue, attributes, more)
    batch = pack_messages([Message(payload, given, group, priority, delay_ms, dedup_id)])
    request = wire.Publish(0, batch, queue)
    return Call(request, list[int], Repeat.DEDUPED, lambda ids: ids[0])


def claim(
    queue: str, *, limit: int = 1, lease_ms: int | None = None, wait_ms: int = 0, consumer: str = ""
) -> Call[list[Delivery]]:
    """Take up to ``limit`` messages under one lease, waiting up to ``wait_ms`` for the first."""
    request = wire.Claim(0, queue, limit, lease_ms, wait_ms, consumer)
    return Call(request, msgspec.Raw, Repeat.NEVER, _deliveries)


def _deliveries(answer: msgspec.Raw) -> list[Delivery]:
    claimed = read_claimed(answer)
    return [] if claimed is None else claimed.deliveries()


def ack(receipts: Iterable[str], *, queue: str | None = None) -> Call[list[Outcome]]:
    """Settle messages as done. ``queue`` makes receipts of another queue an error."""
    batch = _receipts(receipts)
    request = wire.Ack(0, batch, queue, refused_only=True)
    return Call(request, list[Outcome], Repeat.SETTLES, partial(_settled, batch))


def _settled(receipts: list[str], refused: list[Outcome]) -> list[Outcome]:
    """Add the outcomes that an answer with refusals alone leaves out."""
    done = OutcomeStatus.DONE
    if not refused:
        return [Outcome(receipt, done) for receipt in receipts]
    left: dict[str, list[Outcome]] = {}
    for each in refused:
        left.setdefault(each.receipt, []).append(each)
    # From behind: of a receipt that is there twice, the second is refused.
    outcomes = [
        left[each].pop() if left.get(each) else Outcome(each, done) for each in reversed(receipts)
    ]
    return outcomes[::-1]


def release(
    receipts: Iterable[str],
    *,
    delay_ms: int | None = None,
    reason: str = "",
    queue: str | None = None,
    unseen: bool = False,
) -> Call[list[Outcome]]:
    """Give messages back: they are tried again, or fail if they are out of attempts."""
    batch = _receipts(receipts)
    reason = cut_text(reason, limits.MAX_REASON_BYTES)
    request = wire.Release(0, batch, delay_ms, reason, queue, bool(unseen))
    return Call(request, list[Outcome], Repeat.SETTLES)


def extend(
    receipts: Iterable[str] | str, *, lease_ms: int, queue: str | None = None
) -> Call[list[Outcome]]:
    """Move the deadline of receipts, or of a whole lease, to now + ``lease_ms``."""
    batch = receipts if isinstance(receipts, str) else _receipts(receipts)
    check_count(lease_ms, "lease_ms", 1, limits.MAX_LEASE_MS)
    return Call(wire.Extend(0, batch, lease_ms, queue), list[Outcome])


def all_stats() -> Plan[list[QueueStats]]:
    """Return the stats of all queues, by name; those that damage hides are left out."""
    found: list[QueueStats] = []
    after: str | None = ""
    while after is not None:
        request = wire.AllStats(0, after, limits.MAX_STATS_LIMIT)
        stats, after = yield Call(request, wire.StatsPage)
        found += stats
    return found


# --- queues ---------------------------------------------------------------------------------------


def create_queue(
    name: str,
    *,
    filter: str | None = None,  # noqa: A002 - the word that users know
    ordering: Ordering | str = Ordering.STANDARD,
    **settings: Any,
) -> Call[QueueSpec]:
    """Make a queue and return its spec; the settings are the fields of :class:`QueueSpec`."""
    check_queue_name(name)
    everything = {"filter": filter, "ordering": ordering, **settings}
    return Call(wire.CreateQueue(0, name, everything), QueueSpec)


def update_queue(name: str, *, from_offset: int | None = None, **changes: Any) -> Call[QueueSpec]:
    """Change settings of a queue; messages that are in it stay. Ordering can't change."""
    return Call(wire.UpdateQueue(0, name, changes, from_offset), QueueSpec, Repeat.NEVER)


# --- the metadata log -----------------------------------------------------------------------------


def assign(
    log: int, cursor: Cursor, assignments: Mapping[int, Sequence[str]], *, epoch: int | None = None
) -> Call[Assigned]:
    """Put the messages of a page into queues: message id to queue names."""
    check_assignments(cursor, assignments)
    plain = {message_id: list(names) for message_id, names in assignments.items()}
    return Call(wire.Assign(0, log, cursor, plain, epoch), Assigned, Repeat.NEVER)


def backfill(
    queue: str,
    *,
    from_: int | datetime | Literal["earliest"] = "earliest",
    to: int | datetime | None = None,
    progress: Callable[[Backfilled, int], None] | None = None,
) -> Plan[Backfilled]:
    """Fill a queue from the retained log, step by step: what its filter wants and it has not had.

    ``progress`` is called after each step with the sums so far and the offset to reach.
    """
    begin = None if from_ == "earliest" else _place(from_, "from_")
    until = None if to is None else _place(to, "to")
    total: Backfilled | None = None
    while True:
        done, end = yield Call(wire.Backfill(0, queue, begin, until), wire.Step, Repeat.NEVER)
        nothing = not done.scanned and done.next >= end
        if total is not None:
            done = Backfilled(
                scanned=total.scanned + done.scanned,
                added=total.added + done.added,
                missing=total.missing + done.missing,
                next=done.next,
            )
        total = done
        if progress is not None and not nothing:
            progress(total, end)
        if total.next >= end:
            return total
        begin, until = total.next, end


def backup(name: str, *, incremental: bool = False) -> Call[tuple[str, int]]:
    """Copy the store into the server's backup directory; return the path there and the bytes.

    Of an ``incremental`` backup: its name, which is the time if none is given, and the new bytes.
    """
    return Call(wire.Backup(0, name, incremental), tuple[str, int], Repeat.NEVER)


def ping() -> Call[int]:
    """Return the server's time in milliseconds."""
    return Call(wire.Ping(0), int)


def cancel(claim_id: int) -> Call[bool]:
    """End the wait of a claim whose caller has gone."""
    return Call(wire.Cancel(0, claim_id), bool, Repeat.NEVER)


def _receipts(receipts: Iterable[str]) -> list[str]:
    batch = check_receipts(receipts)
    for receipt in batch:
        if type(receipt) is not str:
            raise InvalidReceipt(f"not a receipt: {receipt!r:.100}; receipts come from claim()")
    return batch


def _place(place: int | datetime | str, name: str) -> int | datetime:
    if isinstance(place, datetime):
        # One without a zone means the local one, which the server would not know.
        return place.astimezone()
    if isinstance(place, str):
        raise InvalidInput(f"{name} is an offset, a datetime or 'earliest', not {place!r:.100}")
    return check_count(place, name, 0, limits.MAX_OFFSET)


# --- verbs as methods -----------------------------------------------------------------------------


class Verb(Protocol[P, R]):
    """A method of either client, as type checkers see it; at run time it is a plain function."""

    __wrapped__: Callable[P, Call[R]] | Callable[P, Plan[R]]

    @overload
    def __get__(self, client: None, owner: type) -> Verb[P, R]: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, R]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, Coroutine[Any, Any, R]]: ...


def _verb(make: Callable[P, Call[R]] | Callable[P, Plan[R]]) -> Verb[P, R]:
    """Make the method of a function that makes calls; its signature names the result."""

    @wraps(make)
    def run(client: Client | AsyncClient, /, *args: P.args, **options: P.kwargs) -> Any:
        return client._run(make, *args, **options)  # noqa: SLF001 - the clients' seam

    made = inspect.signature(make)
    result = made.return_annotation
    if result.startswith(("Call[", "Plan[")):
        result = result[len("Call[") : -1]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [own, *made.parameters.values()]
    signature = made.replace(parameters=parameters, return_annotation=result)
    run.__signature__ = signature  # type: ignore[attr-defined]
    return cast("Verb[P, R]", run)


# --- verbs that ask the server to call a method of the broker ------------------------------------


def _check_where(where: object) -> object:
    if not isinstance(where, str):
        raise InvalidInput("a server can't be sent a function: give where as the text of a filter")
    return where


# Checks of arguments before they are sent, by parameter; what a check returns is sent. The broker
# at the other end checks the others.
_CHECKS: Final[dict[str, Callable[[Any], Any]]] = {
    "state": check_state,
    "states": check_states,
    "message_id": lambda message_id: check_ids([message_id])[0],
    "message_ids": check_ids,
    "where": _check_where,
    "payloads": bool,
    "drain": bool,
}


def _ask(
    method: Callable[Concatenate[Broker, P], R],
    request: type[wire.Request],
    answer: Any,
    repeat: Repeat = Repeat.ALWAYS,
    finish: Callable[[Any], R] | None = None,
) -> Verb[P, R]:
    """Make the verb of a method whose parameters are the fields of its request."""
    signature = inspect.signature(method)
    signature = signature.replace(parameters=[*signature.parameters.values()][1:])

    @wraps(method)
    def make(*args: P.args, **options: P.kwargs) -> Call[R]:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        fields = {
            name: value if value is None or name not in _CHECKS else _CHECKS[name](value)
            for name, value in given.arguments.items()
        }
        return Call(request(0, **fields), answer, repeat, finish)

    make.__signature__ = signature  # type: ignore[attr-defined]
    return _verb(make)


class Verbs:
    """The verbs of :class:`penstock.Broker` that a server can be asked for."""

    publish = _verb(publish)
    send = _verb(send)
    claim = _verb(claim)
    ack = _verb(ack)
    release = _verb(release)
    extend = _verb(extend)

    browse = _ask(
        Broker.browse, wire.Browse, wire.Entries, finish=lambda it: Page(it.entries, it.next_cursor)
    )
    attempts = _ask(Broker.attempts, wire.Attempts, list[Attempt])
    explain = _ask(Broker.explain, wire.Explain, MessageExplanation)
    stats = _ask(Broker.stats, wire.Stats, QueueStats)
    store_stats = _ask(Broker.store_stats, wire.StoreStats, StoreStats)
    all_stats = _verb(all_stats)
    redrive = _ask(Broker.redrive, wire.Redrive, int, Repeat.NEVER)
    purge = _ask(Broker.purge, wire.Purge, int, Repeat.NEVER)
    move = _ask(Broker.move, wire.Move, int, Repeat.NEVER)

    create_queue = _verb(create_queue)
    update_queue = _verb(update_queue)
    delete_queue = _ask(Broker.delete_queue, wire.DeleteQueue, int, Repeat.NEVER)
    queues = _ask(Broker.queues, wire.Queues, list[QueueSpec])
    queue = _ask(Broker.queue, wire.Queue, QueueSpec)

    read_log = _ask(Broker.read_log, wire.ReadLog, LogPage)
    assign = _verb(assign)
    take_epoch = _ask(Broker.take_epoch, wire.TakeEpoch, int)
    backfill = _verb(backfill)
    configure_log = _ask(Broker.configure_log, wire.ConfigureLog, LogStats)
    log_stats = _ask(Broker.log_stats, wire.LogStats, LogStats)
    info = _ask(Broker.info, wire.Info, StoreInfo)
    sweep = _ask(Broker.sweep, wire.Sweep, SweepCounts)
    backup = _verb(backup)
    ping = _verb(ping)
