"""The native protocol: a type for every frame, the encoder of frames, and errors.

A frame is a length of four bytes, big-endian, and as many bytes of msgpack: an array that begins
with the number of the frame's kind. Messages are packed (:mod:`penstock.packing`); the other values
inside are maps by field name, straight from :mod:`penstock.model`.

To add a verb, take the next number, and to add a field to a request, append it with a default;
either way raise ``VERSION`` by one and note in the class which version has it first. A number is
never used again. Both sides speak the lower of their two versions, so that neither is sent what
it can't know: a request that is longer than its kind allows is refused, not cut.
"""

from __future__ import annotations

from datetime import datetime
from functools import reduce
from operator import or_
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Raw

from penstock import errors, limits
from penstock.errors import InvalidFilter, InvalidInput, InvalidMessage, PenstockError
from penstock.model import Backfilled, Cursor, Entry, QueueStats
from penstock.packing import PackedMessage, read_envelope, write_envelope
from penstock.store.codec.claimed import ClaimedFrame, ClaimedMessages, LooseFrame
from penstock.wire.frames import HEADER_BYTES

MAGIC: Final = "penstock"
VERSION: Final = 5
OLDEST_VERSION: Final = 5
DEFAULT_PORT: Final = 8814

Id: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Hello(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """The client's first frame. ``version`` is the newest that it speaks, ``token`` its key.

    ``patience_ms`` is how long it waits for the answer to a request, from when the server has it
    whole; 0: as long as the server likes. Servers that do not know of it pass it by.
    """

    magic: str
    version: int
    token: str = ""
    client: str = ""
    patience_ms: int = 0


class Request(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False, omit_defaults=False
):
    """A request of a client. Its ``id`` comes back with the answer."""

    id: Id


class Publish(Request, tag=1):
    """Answered with the ids. With ``queue``, every message must go there."""

    messages: Annotated[list[PackedMessage], Meta(max_length=limits.MAX_PUBLISH_MESSAGES)]
    queue: str | None = None


class Claim(Request, tag=2):
    """Answered with messages (ClaimedFrame), or with nil when ``wait_ms`` is over."""

    queue: str
    limit: int = 1
    lease_ms: int | None = None
    wait_ms: int = 0
    consumer: str = ""


class Ack(Request, tag=3):
    """Answered with an outcome for each receipt, as the next two are.

    ``refused_only``: only with those of receipts that were refused.
    """

    receipts: list[str]
    queue: str | None = None
    refused_only: bool = False


class Release(Request, tag=4):
    """Give messages back. ``unseen``: nobody has begun to work on them."""

    receipts: list[str]
    delay_ms: int | None = None
    reason: str = ""
    queue: str | None = None
    unseen: bool = False


class Extend(Request, tag=5):
    """Receipts, or the token of a lease."""

    receipts: list[str] | str
    lease_ms: int
    queue: str | None = None


class Browse(Request, tag=6):
    """Answered with :class:`Entries`."""

    queue: str
    state: str = "available"
    limit: int = 100
    cursor: str | None = None
    payloads: bool = True
    message_id: int | None = None


class Attempts(Request, tag=7):
    """Answered with a list of attempts."""

    queue: str
    message_id: int


class Stats(Request, tag=8):
    """Answered with the stats of a queue."""

    queue: str


class StoreStats(Request, tag=9):
    """Answered with the stats of the store."""


class Queues(Request, tag=10):
    """Answered with the specs of all queues."""


class Queue(Request, tag=11):
    """Answered with the spec of a queue."""

    name: str


class CreateQueue(Request, tag=12):
    """Answered with the spec. Settings are checked by the broker, hence any value."""

    name: str
    settings: dict[str, Any] = {}


class UpdateQueue(Request, tag=13):
    """Answered with the new spec."""

    name: str
    changes: dict[str, Any] = {}
    from_offset: int | None = None


class DeleteQueue(Request, tag=14):
    """Answered with the number of messages removed."""

    name: str
    drain: bool = False


class Redrive(Request, tag=15):
    """Answered with the number of messages, as the next two are; ``where`` is a filter."""

    queue: str
    message_ids: list[int] | None = None
    where: str | None = None


class Purge(Request, tag=16):
    """Remove messages in some states."""

    queue: str
    states: list[str]
    message_ids: list[int] | None = None
    limit: int | None = None


class Move(Request, tag=17):
    """Take messages from one queue into another."""

    queue: str
    to: str
    state: str = "failed"
    message_ids: list[int] | None = None
    limit: int | None = None


class ReadLog(Request, tag=18):
    """Answered with a page of the log."""

    log: int = 0
    begin: int | None = None
    limit: int = 1_000


class Assign(Request, tag=19):
    """Answered with what became of the page."""

    log: int
    cursor: Cursor
    assignments: dict[int, list[str]]
    epoch: int | None = None


class TakeEpoch(Request, tag=20):
    """Answered with the new epoch."""


class Backfill(Request, tag=21):
    """One step of a backfill; answered with a ``Step``. ``begin`` None: the earliest."""

    queue: str
    begin: int | datetime | None = None
    to: int | datetime | None = None


class ConfigureLog(Request, tag=22):
    """Answered with the stats of the log."""

    logs: int | None = None
    retention_ms: int | None = None
    routing: str | None = None


class LogStats(Request, tag=23):
    """Answered with the stats of the log."""


class Info(Request, tag=24):
    """Answered with what store this is."""


class Ping(Request, tag=25):
    """Answered with the server's time in milliseconds."""


class Cancel(Request, tag=26):
    """End the wait of a claim, or a consumer; answered with whether it was still there.

    A claim that was ended is answered with nil.
    """

    claim: int


class AllStats(Request, tag=27):
    """Answered with a ``StatsPage`` of up to ``limit`` queues whose names are behind ``after``."""

    after: str = ""
    limit: int = 1_000


class Sweep(Request, tag=28):
    """Answered with the counts of one sweep."""

    budget: int = 1_000


class Backup(Request, tag=29):
    """Copy the store into the server's backup directory, under a name.

    Answered with the path on the server's machine, and the bytes; an ``incremental`` backup with
    its name, which the server chooses if it is empty, and the bytes that were new.
    """

    name: str
    incremental: bool = False


class Consume(Request, tag=30):
    """Push deliveries of a queue, as far as the credit goes.

    Each message pushed takes one of ``credit``, and its payload as many of ``credit_bytes``. It is
    answered once, with nil, when the consumer was cancelled, or with the error that has ended it.
    """

    queue: str
    credit: int
    credit_bytes: int
    lease_ms: int | None = None
    consumer: str = ""


class Credit(Request, tag=31):
    """More credit for the consumer whose request has this id. Not answered."""

    credit: int
    credit_bytes: int


class Explain(Request, tag=32):
    """Why a message is, or is not, in a queue; answered with an explanation."""

    queue: str
    message_id: int


class Entries(msgspec.Struct, array_like=True):
    """A page of entries."""

    entries: list[Entry]
    next_cursor: str | None

    def __len__(self) -> int:
        return len(self.entries)


# Stats of queues, without those that damage hides, and the name to go on after, or None.
StatsPage: TypeAlias = tuple[list[QueueStats], str | None]
# The counts of one step of a backfill, and the offset that the whole of it is to reach.
Step: TypeAlias = tuple[Backfilled, int]

# --- what a server sends --------------------------------------------------------------------------


class Welcome(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """The answer to a hello: the version that both speak, the id of the store, and bounds."""

    version: int
    server: str
    store_id: str
    limits: dict[str, int]


class Result(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """The answer to a request; the type of its value follows from the request."""

    id: int
    value: Raw


class Failure(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """The answer to a request that raised: the name of the class and its message.

    ``place`` is where in a filter the mistake is: line, column and fragment.
    """

    id: int
    name: str
    message: str
    place: tuple[int, int, str] | None = None


class Part(msgspec.Struct, array_like=True, tag=3, frozen=True, gc=False):
    """A part of an answer that is longer than a frame should be; all parts make up one value."""

    id: int
    data: bytes
    last: bool


class Bye(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """The last frame before the server closes the connection, and why.

    What it has not answered by then, it has not done, unless the answer was lost on the way.
    ``final``: connecting again would end the same way.
    """

    name: str
    message: str
    final: bool


class Undone(msgspec.Struct, array_like=True, tag=5, frozen=True, gc=False):
    """A request that was not done, since the server is stopping: send it elsewhere, or later."""

    id: int


class Deliveries(msgspec.Struct, array_like=True, tag=6, frozen=True, gc=False):
    """Messages that were claimed for a consumer, by the id of its request.

    Their lease has ``left_ms`` left when they are written.
    """

    id: int
    left_ms: int
    claimed: ClaimedFrame


class _LooseDeliveries(msgspec.Struct, array_like=True, tag=6):
    id: int
    left_ms: int
    claimed: LooseFrame


# Requests that take as long as there are messages, in steps each of which ends in time: their whole
# has no deadline.
LONG: Final = frozenset({DeleteQueue, Redrive, Purge, Move, Backfill, Backup, Consume})
ServerFrame: TypeAlias = Welcome | Result | Failure | Part | Bye | Undone | Deliveries


class _Head(msgspec.Struct, array_like=True):
    kind: int
    id: Id


class _Message(msgspec.Struct, array_like=True):
    payload: memoryview
    envelope: memoryview


class _LongPublish(msgspec.Struct, array_like=True):
    kind: int
    id: Id
    messages: Annotated[list[_Message], Meta(max_length=limits.MAX_PUBLISH_MESSAGES)]


_LAST_KIND: Final = len(Request.__subclasses__())
# Requests that may be longer than MAX_PLAIN_FRAME_BYTES, since they have lists of ids; beside
# those with messages.
_WITH_IDS: Final = frozenset({15, 16, 17, 19})
# Errors of a decoder for bytes that are no frame of this protocol.
UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_hellos: Final = msgspec.msgpack.Decoder(Hello)
_heads: Final = msgspec.msgpack.Decoder(_Head)
_long_publishes: Final = msgspec.msgpack.Decoder(_LongPublish)
_requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(
    reduce(or_, Request.__subclasses__()), dec_hook=read_envelope
)
_decode_request: Final = _requests.decode
_answers: Final[msgspec.msgpack.Decoder[ServerFrame]] = msgspec.msgpack.Decoder(ServerFrame)
# It raises the errors of UNREADABLE.
decode_answer: Final = _answers.decode
_loose_deliveries: Final = msgspec.msgpack.Decoder(_LooseDeliveries)


def read_hello(frame: memoryview | bytes) -> Hello:
    """Read the first frame of a client."""
    try:
        hello = _hellos.decode(frame)
    except UNREADABLE as error:
        raise InvalidInput(f"not a greeting: {error}") from None
    if hello.magic != MAGIC or hello.version < OLDEST_VERSION:
        raise InvalidInput(
            f"not a greeting of this protocol: {hello.magic!r:.40} version {hello.version!r:.40}; "
            f"spoken here are versions {OLDEST_VERSION} to {VERSION}"
        )
    return hello


def _check_long(frame: memoryview | bytes) -> None:
    """Check a frame of over MAX_PLAIN_FRAME_BYTES, whose values may take far more memory than it.

    The decoder of requests reads a whole value in the place of an envelope before it refuses it.
    """
    kind = _heads.decode(frame).kind
    if kind == 1:
        _long_publishes.decode(frame)
    elif kind not in _WITH_IDS:
        most = limits.MAX_PLAIN_FRAME_BYTES
        raise msgspec.ValidationError(f"{len(frame)} bytes; a request of its kind has up to {most}")


def read_request(frame: memoryview | bytes) -> Request | Failure:
    """Read a request, or return the failure that answers it.

    A frame that is no request at all, so that there is no id to answer to, raises
    :class:`~penstock.errors.InvalidInput`.
    """
    name = "InvalidInput"
    try:
        if len(frame) > limits.MAX_PLAIN_FRAME_BYTES:
            _check_long(frame)
        return _decode_request(frame)
    except msgspec.ValidationError as error:
        why = str(error)
        if isinstance(error.__cause__, InvalidMessage):
            name = "InvalidMessage"
    except UnicodeDecodeError as error:
        why = f"a text is not UTF-8: {error}"
    except UNREADABLE as error:
        raise InvalidInput(f"not a request: {error}") from None
    try:
        head = _heads.decode(frame)
    except UNREADABLE as error:
        raise InvalidInput(f"not a request: {error}") from None
    if not 1 <= head.kind <= _LAST_KIND:
        why = f"there is no request of kind {head.kind} in version {VERSION} of the protocol"
    return Failure(head.id, name, why)


def read_spoiled(frame: memoryview | bytes) -> Deliveries:
    """Read messages of which some have metadata that a store has spoiled, and leave those out.

    It raises one of :data:`UNREADABLE` for any other frame.
    """
    loose = _loose_deliveries.decode(frame)
    return Deliveries(loose.id, loose.left_ms, loose.claimed.readable())


class Encoder:
    """Makes frames. For one thread at a time."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder(enc_hook=write_envelope).encode

    def frame(self, value: object) -> bytes:
        """Make a frame of any of the types above."""
        body = self._encode(value)
        return len(body).to_bytes(HEADER_BYTES, "big") + body

    def push(self, request_id: int, left_ms: int, claimed: ClaimedMessages) -> bytes:
        """Make the frame of messages that were claimed for a consumer."""
        head = b"\x94\x06" + self._encode(request_id) + self._encode(left_ms)
        messages = claimed.encode()
        size = len(head) + len(messages)
        return b"".join((size.to_bytes(HEADER_BYTES, "big"), head, messages))

    def result(self, request_id: int, value: object) -> list[bytes]:
        """Make the answer to a request: one frame, or several if it is long."""
        if type(value) is ClaimedMessages:
            value = Raw(value.encode()) if value else None
        body = self._encode((1, request_id, value))
        size = limits.MAX_ANSWER_PART_BYTES
        if len(body) + HEADER_BYTES <= size:
            return [len(body).to_bytes(HEADER_BYTES, "big") + body]
        whole = self._encode(value)
        return [
            self.frame(Part(request_id, whole[at : at + size], at + size >= len(whole)))
            for at in range(0, len(whole), size)
        ]


# --- errors: sent by the name of their class, and raised as the same class ------------------------

_CLASSES: Final[dict[str, type[PenstockError]]] = {
    name: getattr(errors, name) for name in errors.__all__
}


def failure_of(request_id: int, error: BaseException) -> Failure:
    """Make the answer to a request that failed; of a foreign error it has only the kind."""
    if not isinstance(error, PenstockError):
        name = type(error).__name__
        return Failure(request_id, "PenstockError", f"the server failed ({name}); its log says why")
    place = None
    if isinstance(error, InvalidFilter):
        place = error.line, error.column, error.fragment
    # The nearest class of the tree, if it is one that a client can't know.
    known = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _CLASSES)
    return Failure(request_id, known, str(error), place)


def error_of(failure: Failure | Bye) -> PenstockError:
    """Make the error that the other side had; one of a class that is not known is the base's."""
    kind = _CLASSES.get(failure.name, PenstockError)
    if kind is InvalidFilter and isinstance(failure, Failure) and failure.place is not None:
        line, column, fragment = failure.place
        return InvalidFilter(failure.message, line=line, column=column, fragment=fragment)
    return kind(failure.message)
