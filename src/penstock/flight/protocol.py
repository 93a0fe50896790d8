"""The Flight protocol, shared by server and client; ``docs/flight.md`` describes it.

Commands, tickets, options of actions and answers are JSON. The server refuses unknown fields and
wrong types, so that a misspelt option is an error and not a default. An error travels twice: as
text that begins with the name of its class, for people and foreign clients, and as JSON beside it,
from which :func:`revive` makes the exception again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar, overload

import msgspec

from penstock import errors
from penstock.errors import InvalidInput, PenstockError
from penstock.flight.tables import make_schema
from penstock.model import (
    BackfillPlan,
    Collected,
    LiveFilters,
    LogStats,
    QueueStats,
    RoutePlan,
    StoreStats,
    SweepCounts,
)

P = ParamSpec("P")
T = TypeVar("T")

# To be raised with every change of a command, a ticket or an action: a server refuses Penstock's
# clients of another number. Clients that say none are somebody else's, who writes the JSON himself.
PROTOCOL: Final = 4
PROTOCOL_HEADER: Final = "penstock-protocol"
# gRPC bounds headers to 8 KiB, and the text travels twice.
MAX_ERROR_CHARS: Final = 1_000
# The columns of a fill: messages of the log, or archived ones. Only the payload may be null.
OFFSETS: Final = make_schema("offset long?")
ARCHIVED: Final = make_schema(
    "offset long?, published_at time?, group string?, priority int?, size long?, delay_ms long?, "
    "attributes_json string?, payload binary?"
)
# The columns of a stage: messages of the log, and the queues that want them.
MATCHES: Final = make_schema("offset long?, queue string?")
# Any sequence will do for a list.
encode: Final = msgspec.json.Encoder(enc_hook=list).encode

# --- commands and tickets -------------------------------------------------------------------------


class _Command(msgspec.Struct, forbid_unknown_fields=True):
    """A command, or the options of an action; as it is, those of an action that has none."""


class ReadCommand(_Command):
    """GetFlightInfo: which rows and columns of which table, in how many parts."""

    table: str
    queue: str | Sequence[str] | None = None
    payload: bool = False
    columns: Sequence[str] | None = None
    filter: str | None = None
    partitions: int = 1
    where: str | None = None


class SnapshotTicket(_Command, tag_field="table", tag="snapshot"):
    """DoGet: a part of a table of a snapshot; of these queues, if it says so."""

    snapshot: str
    part: int
    command: ReadCommand
    queues: Sequence[str] | None = None


class ActionTicket(_Command, tag_field="table", tag="action"):
    """DoGet: a part of a table as of one moment for all readers of an action of a DataFrame.

    ``run`` is the server's, when the DataFrame was planned; ``again``: a second try.
    """

    frame: str
    action: str
    part: int
    command: ReadCommand
    run: str
    again: bool = False


class LogTicket(_Command, tag_field="table", tag="log"):
    """DoGet: a stretch of a log, from a client that knows the offsets."""

    log: int
    begin: int
    end: int
    payload: bool = False
    columns: Sequence[str] | None = None
    filter: str | None = None
    where: str | None = None


class CopyTicket(_Command, tag_field="table", tag="copy"):
    """DoGet: a whole store as parts of a copy (:mod:`penstock.store.transfer`), MessagePack each.

    Of a snapshot that ``hold_snapshot`` has taken. The first part is the start; pages follow, from
    a row of a section on, unless ``section`` is None. ``at_ms``: when the copy was begun.
    """

    snapshot: str
    section: int | None = None
    rows: int = 0
    at_ms: int | None = None


class HistoryStretch(_Command):
    """[begin, end) of the done or failed messages of a queue that was made at a time.

    ``since_ms``: none of them has ended before; without it, those that are left are read.
    """

    queue: str
    created_at_ms: int
    state: str
    begin: int
    end: int
    since_ms: int | None = None


class HistoryTicket(_Command, tag_field="table", tag="history"):
    """DoGet: stretches of history; done, failed, or (``of``) the attempts at these messages."""

    of: str
    stretches: Sequence[HistoryStretch]
    payload: bool = False
    columns: Sequence[str] | None = None
    filter: str | None = None
    where: str | None = None


class PublishCommand(_Command, tag_field="op", tag="publish"):
    """DoPut: rows to publish, or a part of a spool that ``publish_part`` publishes.

    ``before``: rows of the same write that other calls have published, for messages of errors.
    """

    spool: str | None = None
    part: str = ""
    before: int = 0


class StageCommand(_Command, tag_field="op", tag="stage"):
    """DoPut: all assignments of a stretch of a log.

    ``rows``: how many there are, since a stream whose sender dies ends like any other. ``assign``:
    the server assigns them as soon as the log's cursor has come to them, if it can. ``part``: these
    are some of the assignments of the stretch; the commit names the stages of all others.
    """

    stage: str
    log: int
    begin: int
    end: int
    rows: int
    filters_version: int | None = None
    epoch: int | None = None
    assign: bool = False
    part: bool = False


class FillCommand(_Command, tag_field="op", tag="fill"):
    """DoPut: all messages of a stretch that a backfill puts into a queue.

    ``rows``: how many there are. ``filter`` is the one that they were matched by, from
    backfill_plan.
    """

    queue: str
    begin: int
    end: int
    rows: int
    filter: str | None = None


PUTS: Final = PublishCommand | StageCommand | FillCommand


def decode(body: bytes | None, kind: Any, what: str) -> Any:
    """Read JSON that a client has sent; an empty body is an empty object."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{what}: {error}") from None


# --- answers --------------------------------------------------------------------------------------


class ServerInfo(msgspec.Struct, frozen=True):
    """Which store a server has open, which protocol it speaks, and which run of it this is."""

    version: str
    store_id: str
    design: str
    routing: str
    protocol: int
    run: str = ""


class SnapshotFacts(msgspec.Struct, frozen=True):
    """The time of a snapshot, and the bounds of the log at that time."""

    at_ms: int
    log_end: int
    earliest: int
    store_id: str


class QueueHistory(msgspec.Struct, frozen=True):
    """Of a queue: when it was made, and by state the next sequence number.

    ``firsts``: by state, sequence and time of the first message that ended at the time asked for.
    ``number``: no queue that is made later gets it.
    """

    created_at_ms: int
    ends: dict[str, int]
    firsts: dict[str, tuple[int, int]] = {}
    number: int = 0


class HistoryEnds(msgspec.Struct, frozen=True):
    """How far the history of queues goes at a time; no later message gets a lower number."""

    store_id: str
    at_ms: int
    queues: dict[str, QueueHistory]


class HeldSnapshot(SnapshotFacts, frozen=True):
    """A snapshot that is read by its name."""

    snapshot: str


class Published(msgspec.Struct, frozen=True):
    """How many rows a publish took, and how many of them it had seen before."""

    published: int
    duplicates: int


class Committed(msgspec.Struct, frozen=True):
    """The outcome of the stages of one log; the status is one of AssignStatus."""

    log: int
    status: str
    cursor: int
    placed: int


class Stats(msgspec.Struct, frozen=True):
    """Everything that is counted."""

    queues: list[QueueStats]
    store: StoreStats
    log: LogStats


# --- actions --------------------------------------------------------------------------------------


class _HoldSnapshot(_Command):
    snapshot: str | None = None


class _DropSnapshot(_Command):
    snapshot: str


class _HistoryEnds(_Command):
    queue: str | Sequence[str] | None = None
    since_ms: int | None = None


class _RoutePlan(_Command):
    max_offsets: int | None = None


class _Filters(_Command):
    offset: int


class _OffsetAt(_Command):
    time_ms: int


class _DropStages(_Command):
    stages: Sequence[str]
    others: str | None = None


class _CommitStages(_DropStages):
    epoch: int | None = None


class DropSpool(_Command):
    """Options of drop_spool."""

    spool: str


class PublishPart(DropSpool):
    """Options of publish_part."""

    part: str


class _BackfillPlan(_Command, rename={"from_": "from"}):
    queue: str
    from_: int | str = "earliest"
    to: int | None = None
    archived: bool = False


class _Redrive(_Command):
    queue: str
    message_ids: Sequence[int] | None = None
    where: str | None = None


class _Trim(_Command):
    queue: str
    state: str
    before: int
    created_at_ms: int | None = None


class _Collect(_Command):
    message_ids: Sequence[int]
    dry_run: bool = True


@dataclass(eq=False)
class Action(Generic[P, T]):
    """An action: on the server, how to treat it; on a client, the method that calls it.

    ``limit`` names the bound on a client's wait. A key that may consume may call an action that
    only ``reads``. An answer with a ``field`` is one value, which travels as an object. A client
    that gets no answer calls ``again`` if that does no harm.
    """

    options: Callable[P, Any]
    answer: type[T]
    text: str
    limit: str = "MAX_BULK_CALL_MS"
    reads: bool = False
    field: str | None = None
    again: bool = True
    name: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.__doc__ = name, self.text

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...

    @overload
    def __get__(self, client: object, owner: type) -> Callable[P, T]: ...

    def __get__(self, client: object, owner: type) -> Any:
        return self if client is None else partial(self, client)

    def __call__(self, client: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the action through a client."""
        body: bytes = client.call_action(self, encode(self.options(*args, **kwargs)))
        if self.field is None:
            return msgspec.json.decode(body, type=self.answer)
        fields: dict[str, T] = msgspec.json.decode(body, type=dict[str, self.answer])  # type: ignore[name-defined]
        return fields[self.field]


_QUICK: Final = "MAX_CALL_MS"


class Actions:
    """Every action of the protocol. A client inherits them as methods."""

    info = Action(_Command, ServerInfo, "Which store this is.", _QUICK, reads=True)
    check_read = Action(
        ReadCommand, str, "Check a read; which run of the server it is.", reads=True, field="run"
    )
    hold_snapshot = Action(
        _HoldSnapshot,
        HeldSnapshot,
        "Take a snapshot, or keep it for ten more minutes.",
        reads=True,
    )
    drop_snapshot = Action(
        _DropSnapshot, bool, "Forget a snapshot.", _QUICK, reads=True, field="dropped"
    )
    publish_part = Action(
        PublishPart, Published, "Publish a part of a spool, once.", "MAX_WORK_CALL_MS"
    )
    drop_spool = Action(DropSpool, bool, "Forget a spool.", _QUICK, field="dropped")
    log_stats = Action(_Command, LogStats, "The metadata log.", _QUICK, reads=True)
    offset_at = Action(
        _OffsetAt, int, "The first offset of a time.", _QUICK, reads=True, field="offset"
    )
    history_ends = Action(
        _HistoryEnds, HistoryEnds, "How far the history of queues goes.", reads=True
    )
    route_plan = Action(_RoutePlan, RoutePlan, "What to match next.", _QUICK, reads=True)
    filters = Action(_Filters, LiveFilters, "The live filters at an offset.", _QUICK, reads=True)
    take_epoch = Action(_Command, int, "Fence earlier pipelines.", _QUICK, field="epoch")
    commit_stages = Action(
        _CommitStages,
        list[Committed],
        "Assign what is staged.",
        "MAX_WORK_CALL_MS",
        field="results",
    )
    drop_stages = Action(_DropStages, int, "Forget stages.", _QUICK, field="dropped")
    backfill_plan = Action(_BackfillPlan, BackfillPlan, "What is to be filled.", reads=True)
    redrive = Action(
        _Redrive, int, "Make failed messages available.", field="redriven", again=False
    )
    trim = Action(_Trim, int, "Remove old done or failed messages.", field="removed")
    collect = Action(_Collect, Collected, "Free payloads that nobody holds.")
    sweep = Action(_Command, SweepCounts, "Do what is due.")
    stats = Action(_Command, Stats, "Stats of every queue and the store.", reads=True)


ACTIONS: Final[dict[str, Action[Any, Any]]] = {
    name: action for name, action in vars(Actions).items() if isinstance(action, Action)
}

# --- errors ---------------------------------------------------------------------------------------


def describe(error: BaseException) -> tuple[str, bytes]:
    """Give an error as text and as JSON."""
    name, text = type(error).__name__, str(error)
    if len(text) > MAX_ERROR_CHARS:
        text = text[:MAX_ERROR_CHARS] + "…"
    return f"{name}: {text}", encode({"error": name, "message": text})


def revive(extra: bytes | None) -> PenstockError | None:
    """Make an exception again from its JSON; None if it is not one of ours."""
    try:
        found = msgspec.json.decode(extra or b"", type=dict[str, str])
        name, message = found["error"], found["message"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        return None
    return error_named(name, message) or PenstockError(message)


def error_named(name: str, message: str) -> PenstockError | None:
    """Make an exception of the class with this name; None if Penstock has no such class."""
    kind = getattr(errors, name, None)
    known = isinstance(kind, type) and issubclass(kind, PenstockError)
    return kind(message) if kind and known else None
