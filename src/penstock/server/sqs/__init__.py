"""SQS over HTTP: the 23 operations, on a batcher.

Here requests come in: which protocol, whose key, which operation, and the name of a failure.
``messages`` and ``queues`` are the operations. The wire is in :mod:`penstock.wire.sqs`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache, partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from penstock import limits
from penstock.clock import loop_seconds
from penstock.errors import LimitReached, QueueNotFound
from penstock.server.audit import Actor, audited
from penstock.server.batcher import FAR
from penstock.server.http import Response
from penstock.server.security import ANYONE, Principal
from penstock.server.shares import Shares
from penstock.server.sqs import messages, queues
from penstock.wire.sqs import protocol, signature
from penstock.wire.sqs import queues as wire
from penstock.wire.sqs.protocol import SqsFault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.model import Delivery, QueueSpec
    from penstock.server.batcher import Batcher
    from penstock.server.http import Answering, Request
    from penstock.server.keys import Keys
    from penstock.server.metrics import Metrics
    from penstock.wire.sqs.protocol import SqsRequest
    from penstock.wire.sqs.queues import QueueView

log = logging.getLogger(__name__)

T = TypeVar("T")
Answer: TypeAlias = dict[str, Any]
Operation: TypeAlias = "Callable[[SqsCall, SqsRequest], Awaitable[Answer]]"

OPERATIONS: Final[dict[str, Operation]] = {
    "AddPermission": partial(queues.relabel, wire.with_permission),
    "CancelMessageMoveTask": queues.cancel_move,
    "ChangeMessageVisibility": partial(messages.settle, messages.change_visibility),
    "ChangeMessageVisibilityBatch": partial(
        messages.settle_batch, messages.change_visibility, "ChangeMessageVisibilityBatch"
    ),
    "CreateQueue": queues.create,
    "DeleteMessage": partial(messages.settle, messages.delete),
    "DeleteMessageBatch": partial(messages.settle_batch, messages.delete, "DeleteMessageBatch"),
    "DeleteQueue": queues.delete,
    "GetQueueAttributes": queues.get_attributes,
    "GetQueueUrl": queues.get_url,
    "ListDeadLetterSourceQueues": queues.list_sources,
    "ListMessageMoveTasks": queues.list_moves,
    "ListQueueTags": queues.list_tags,
    "ListQueues": queues.list_queues,
    "PurgeQueue": queues.purge,
    "ReceiveMessage": messages.receive,
    "RemovePermission": partial(queues.relabel, wire.without_permission),
    "SendMessage": messages.send,
    "SendMessageBatch": messages.send_batch,
    "SetQueueAttributes": queues.set_attributes,
    "StartMessageMoveTask": queues.start_move,
    "TagQueue": partial(queues.relabel, wire.with_more_tags),
    "UntagQueue": partial(queues.relabel, wire.without_tags),
}
_NOBODY: Final = Principal("")
_NO_PAGE: Final = Response(
    404,
    b"There is no such page. Pages: /health, /ready, /metrics. SQS clients send POST requests.\n",
)
# How long each operation may take; what empties a queue does so in steps that end by themselves.
_MOST_SECONDS: Final = limits.SQS_MAX_ANSWER_MS / 1000
_ANSWER_SECONDS: Final = {
    "ReceiveMessage": _MOST_SECONDS + limits.SQS_MAX_WAIT_S,
    "DeleteQueue": inf,
    "PurgeQueue": inf,
}
_XML, _JSON = protocol.QUERY_CONTENT, protocol.JSON_CONTENT
# For how long settings count as fresh that another protocol may have changed.
_FRESH_S: Final = 1.0
# The assumed size of a message beside its payload and attributes.
_MESSAGE_BYTES: Final = 1_024
_signing_key: Final = lru_cache(maxsize=1_024)(signature.signing_key)


class SqsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the service is set up.

    ``url`` is what queue URLs begin with; without it, the address that the request came to.
    ``done_retention_ms`` is how long queues that are made here remember deleted messages;
    ``purge_interval_ms`` the least time between two purges of a queue.
    """

    account: str = "000000000000"
    region: str = "us-east-1"
    url: str = ""
    done_retention_ms: int = 3_600_000
    purge_interval_ms: int = limits.SQS_PURGE_INTERVAL_MS


class SqsCall(NamedTuple):
    """One request: its principal, and the HTTP request."""

    sqs: SqsService
    principal: Principal
    http: Request

    @property
    def actor(self) -> Actor:
        """The sender of the request, for the audit log."""
        return Actor("sqs", self.principal.key_id, self.http.peer)

    def change(self, work: Callable[[Broker], T], *, long: bool = False) -> asyncio.Future[T]:
        """Do something with the broker that the audit log is to know of."""
        batcher = self.sqs.batcher
        work = audited(batcher.audit, self.actor, work)
        return batcher.call(work, long=long, holder=self.actor.holder)

    def look(self, work: Callable[[Broker], T]) -> asyncio.Future[T]:
        """Read from the broker, in turn with others."""
        return self.sqs.batcher.call(work, holder=self.actor.holder)

    async def find(self, name: str) -> QueueSpec | None:
        """Return the spec of a queue as it is now; None if it is not there."""
        return await self.look(lambda broker: _find(broker, name))

    async def spec(self, name: str) -> QueueSpec:
        """Return the spec of a queue as it is now."""
        spec = await self.find(name)
        if spec is None:
            raise QueueNotFound(name)
        return spec

    def queue_of(self, request: SqsRequest, *actions: str) -> str:
        """Return the name of a request's queue, on which one of the actions must be allowed."""
        # Clients of the query protocol post to the queue's own address.
        url = request.queue_url or (self.http.path if len(self.http.path) > 1 else "")
        if not url:
            raise SqsFault.missing("QueueUrl")
        name = url.rstrip("/").rpartition("/")[2]
        if self.principal is not ANYONE:
            self.principal.check_any(actions, name)
        return name

    def view_of(self, request: SqsRequest, action: str) -> Awaitable[QueueView]:
        """Return the settings of a request's queue, on which the action must be allowed."""
        return self.sqs.queues.view(self.queue_of(request, action), self.actor.holder)

    def url_of(self, name: str) -> str:
        """Return the URL of a queue; without a setting, at the address that the request came to."""
        options, http = self.sqs.options, self.http
        base = options.url
        if not base:
            scheme = "https" if http.secure else "http"
            base = f"{scheme}://{http.headers.get('host', 'localhost')}"
        return f"{base}/{options.account}/{name}"


class QueueCache:
    """The settings of queues that were asked for, so that requests need not ask the broker.

    The broker says whether a queue is there when a message goes in or out. Settings may be a second
    old if another protocol changed them, and a second more on SQL if another server did.
    """

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._loop = asyncio.get_running_loop()
        # With the second at which they were read.
        self._views: dict[str, tuple[QueueView, float]] = {}
        self._reading: dict[str, asyncio.Future[QueueSpec]] = {}

    async def view(self, name: str, holder: str) -> QueueView:
        """Return the settings of a queue; those that are not fresh are read again meanwhile."""
        known = self._views.get(name)
        if known is None:
            return wire.view_of(await asyncio.shield(self._read(name, holder)))
        if self._loop.time() - known[1] > _FRESH_S:
            self._read(name, holder)
        return known[0]

    def changed(self, name: str, spec: QueueSpec | None) -> None:
        """Take note of a queue that was made or changed; None: that was removed."""
        # A read that began before the change must not bring back the old settings.
        self._reading.pop(name, None)
        self._views.pop(name, None)
        if spec is not None:
            self._views[name] = wire.view_of(spec), self._loop.time()

    def _read(self, name: str, holder: str) -> asyncio.Future[QueueSpec]:
        reading = self._reading.get(name)
        if reading is None:
            reading = self._batcher.call(lambda broker: broker.queue(name), holder=holder)
            self._reading[name] = reading
            reading.add_done_callback(partial(self._keep, name))
        return reading

    def _keep(self, name: str, reading: asyncio.Future[QueueSpec]) -> None:
        # A caller that waits gets the error; otherwise the next request tries again.
        error = None if reading.cancelled() else reading.exception()
        if self._reading.get(name) is not reading:
            return
        del self._reading[name]
        if isinstance(error, QueueNotFound):
            self._views.pop(name, None)
        elif error is None and not reading.cancelled():
            self._views[name] = wire.view_of(reading.result()), self._loop.time()


def _find(broker: Broker, name: str) -> QueueSpec | None:
    if broker.info().design in FAR:
        # Of all queues: there the settings of one may be older than another server's change.
        return next((spec for spec in broker.queues() if spec.name == name), None)
    try:
        return broker.queue(name)
    except QueueNotFound:
        return None


class _Attempt(NamedTuple):
    at_ms: int
    size: int
    deliveries: list[Delivery]
    holder: str


class ReceiveAttempts:
    """The deliveries of receives by ReceiveRequestAttemptId, since a client may ask again.

    Bounded in number, bytes and time: the oldest go first, and asked again they are new receives.
    Each holder of a share has its own oldest.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], _Attempt] = {}
        self._count = Shares("attempts", limits.SQS_MAX_RECEIVE_ATTEMPTS)
        self._bytes = Shares("bytes of attempts", limits.SQS_MAX_RECEIVE_ATTEMPT_BYTES)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """The bytes of all that is remembered."""
        return self._bytes.total

    def find(self, queue: str, attempt: str, now_ms: int) -> list[Delivery]:
        """Return the deliveries of an attempt, if it is remembered."""
        kept = self._kept.get((queue, attempt))
        if kept is None or now_ms - kept.at_ms > limits.SQS_RECEIVE_ATTEMPT_MS:
            return []
        return kept.deliveries

    def remember(
        self, queue: str, attempt: str, deliveries: list[Delivery], now_ms: int, holder: str = ""
    ) -> None:
        """Keep the deliveries of an attempt."""
        self._drop((queue, attempt))
        size = sum(_size_of(each) for each in deliveries)
        before_ms = now_ms - limits.SQS_RECEIVE_ATTEMPT_MS
        while self._kept and self._kept[oldest := next(iter(self._kept))].at_ms < before_ms:
            self._drop(oldest)
        for shares, more in ((self._count, 1), (self._bytes, size)):
            while (leaves := shares.who_makes_way(holder, more)) is not None:
                self._drop(next(key for key, each in self._kept.items() if each.holder == leaves))
        if self._bytes.fits(holder, size):
            self._count.take(holder)
            self._bytes.take(holder, size)
            self._kept[queue, attempt] = _Attempt(now_ms, size, deliveries, holder)

    def _drop(self, key: tuple[str, str]) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._count.give(kept.holder)
            self._bytes.give(kept.holder, kept.size)


def _size_of(delivery: Delivery) -> int:
    named = sum(len(name) + len(str(value)) for name, value in delivery.attributes.items())
    return _MESSAGE_BYTES + len(delivery.payload) + named


class SqsService:
    """Answers SQS requests: :meth:`handle` is what HTTP calls, the rest is for the operations."""

    def __init__(
        self,
        batcher: Batcher,
        *,
        clock: Clock,
        keys: Keys | None = None,
        options: SqsOptions | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.batcher = batcher
        self.clock = clock
        self.options = options or SqsOptions()
        self.store_id = int(batcher.broker.info().store_id, 16)
        self.queues = QueueCache(batcher)
        self.attempts = ReceiveAttempts()
        # Queues are changed one at a time: each change reads a spec and writes the new one.
        self.turn = asyncio.Lock()
        # When each queue was purged; infinite while it is being purged.
        self.purged_at_ms: dict[str, float] = {}
        # By handle, the oldest first.
        self.moves: dict[str, queues.MoveTask] = {}
        self._keys = keys
        self._metrics = metrics
        # Ids of keys that can't check signatures, and that the log has named.
        self._logged: set[str] = set()
        self._requests = 0
        self._request_prefix = f"{clock.lease_id().hex()[-12:-4]}-0000-8000-8000-"

    def close(self) -> None:
        """Stop the moves that go on in the background."""
        for move in self.moves.values():
            if move.work is not None:
                move.work.cancel()

    def arn(self, name: str) -> str:
        """Name a queue as policies do."""
        return f"arn:aws:sqs:{self.options.region}:{self.options.account}:{name}"

    # --- requests ------------------------------------------------------------------------------

    def handle(self, request: Request) -> Answering:
        """Answer a request, whatever it is."""
        if request.method in {"GET", "HEAD"} and "Action=" not in request.query:
            return _NO_PAGE
        return self._handle(request)

    async def _handle(self, request: Request) -> Response:
        self._requests += 1
        request_id = f"{self._request_prefix}{self._requests:012x}"
        target = request.headers.get("x-amz-target")
        xml = target is None
        began = loop_seconds()
        operation, outcome = "unknown", "ok"
        principal, asked = _NOBODY, None
        try:
            principal = ANYONE if self._keys is None else self._known(request, self._keys)
            request.trust()
            if target is not None:
                operation = protocol.json_operation(target, OPERATIONS)
                asked = protocol.decode_json(request.body)
            else:
                fields = _fields(request)
                operation = protocol.query_operation(fields, OPERATIONS)
                asked = protocol.decode_query(operation, fields)
            request.due = began + _ANSWER_SECONDS.get(operation, _MOST_SECONDS)
            answer = await OPERATIONS[operation](SqsCall(self, principal, request), asked)
            if xml:
                body, kind = protocol.encode_query(operation, answer, request_id), _XML
            else:
                body, kind = protocol.encode_json(answer), _JSON
            return Response(200, body, kind, (("x-amzn-RequestId", request_id),))
        except asyncio.CancelledError:
            if not request.late:
                raise
            outcome, response = _refused(self._late(), operation, request_id, xml=xml)
            return response
        except Exception as error:
            # The error stays in here: kept in a variable, it would keep this call, with the body of
            # its request, until the garbage collector comes.
            outcome, response = _refused(error, operation, request_id, xml=xml)
            return response
        finally:
            if self._metrics is not None:
                about = ("sqs", operation, loop_seconds() - began, outcome, principal.key_id)
                queue = asked and (asked.queue_url or asked.queue_name or request.path)
                self._metrics.request(*about, request.peer, queue, request.waited_s)

    def _late(self) -> SqsFault:
        """Say that a request was not answered in time; one that was not begun is not begun."""
        outage = self.batcher.broker.outage
        why = "" if outage is None else f" The store can't be used: {outage.why}."
        text = f"The request was not answered in time, it may or may not have been done.{why}"
        return SqsFault("ServiceUnavailable", text, status=503)

    def _known(self, request: Request, keys: Keys) -> Principal:
        """Return whose request this is; one that is refused is noted."""
        header = request.headers.get("authorization")
        try:
            return self._principal(request, keys, signature.parse(header))
        except SqsFault as fault:
            if self._metrics is not None:
                key_id = signature.key_of(header)
                self._metrics.refusals.login("sqs", request.peer, key_id, fault.message)
            raise

    def _principal(self, request: Request, keys: Keys, claim: signature.Claim) -> Principal:
        key_id = claim.key_id
        found = keys.secrets_of(key_id)
        if not found and key_id not in self._logged and keys.keeps_no_secret(key_id):
            # Once: a stranger may name a key as often as it likes.
            self._logged.add(key_id)
            log.warning(
                "key %s was not made with --sqs: its signatures can't be checked, make it anew",
                key_id,
            )
        # An unknown key takes the same steps, so that time does not tell which keys there are.
        for secret, principal in found or [("", _NOBODY)]:
            key = _signing_key(secret, claim.date, claim.region, claim.service)
            try:
                signature.verify(
                    claim,
                    key,
                    method=request.method,
                    path=request.path,
                    query=request.query,
                    headers=request.headers,
                    body=request.body,
                    now_ms=self.clock.now_ms(),
                    unsigned_body=request.secure,
                )
            except SqsFault:
                # The last of the secrets decides.
                if found and principal is found[-1][1]:
                    raise
            else:
                if found:
                    keys.note_use(principal)
                    return principal
        text = "The security token included in the request is invalid."
        raise SqsFault("UnrecognizedClientException", text, status=403)


def _fields(request: Request) -> dict[str, str]:
    """Read the form fields of a query request: of its body, and of its address."""
    try:
        body = request.body.decode("ascii") if request.method == "POST" else ""
    except UnicodeDecodeError:
        raise SqsFault("SerializationException", "The form fields can't be read.") from None
    return protocol.query_fields("&".join(filter(None, (body, request.query))))


def _refused(
    error: Exception, operation: str, request_id: str, *, xml: bool
) -> tuple[str, Response]:
    """Return the outcome's name, and the answer."""
    fault = protocol.fault_of(error)
    if fault.code == "InternalFailure":
        log.error("%s failed", operation, exc_info=error)
    headers: tuple[tuple[str, str], ...] = (("x-amzn-RequestId", request_id),)
    if isinstance(error, LimitReached) and error.retry_after_ms is not None:
        headers += (("Retry-After", str(-(-error.retry_after_ms // 1_000))),)
    if xml:
        body, kind = protocol.encode_query_fault(fault, request_id), _XML
    else:
        body, kind = protocol.encode_json_fault(fault), _JSON
        blame = "Sender" if fault.sender else "Receiver"
        headers += (("x-amzn-query-error", f"{fault.query_code};{blame}"),)
    return fault.query_code, Response(fault.status, body, kind, headers)
