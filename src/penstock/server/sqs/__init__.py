"""SQS over HTTP: the 23 operations, on a batcher.

Here requests come in: which protocol, whose key, which operation, and the name of a failure.
``messages`` and ``queues`` are the operations, ``context`` is what they share. The wire is in
:mod:`penstock.wire.sqs`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from penstock import limits
from penstock.errors import (
    BrokerClosed,
    InvalidInput,
    InvalidReceipt,
    NotAllowed,
    QueueExists,
    QueueNotFound,
    StorageFailed,
)
from penstock.server.http import Response
from penstock.server.security import ANYONE, Principal
from penstock.server.sqs import messages, queues
from penstock.server.sqs.context import QueueCache, ReceiveAttempts, SqsCall, SqsContext, SqsOptions
from penstock.server.sqs.queues import MoveTasks, QueueManager
from penstock.wire.sqs import jsonwire, querywire, signature
from penstock.wire.sqs.faults import SqsFault
from penstock.wire.sqs.requests import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.clock import Clock
    from penstock.server.batcher import Batcher
    from penstock.server.http import Request
    from penstock.server.security import Keys
    from penstock.server.sqs.context import Answer

__all__ = ["SqsOptions", "SqsService"]

log = logging.getLogger(__name__)

Operation: TypeAlias = "Callable[[SqsCall, Any], Awaitable[Answer]]"

_NOBODY: Final = Principal("")
_NO_PAGE: Final = Response(
    404,
    b"There is no such page. Pages: /health, /ready, /metrics. SQS clients send POST requests.\n",
)
# How long each operation may take; what empties a queue does so in steps that end by themselves.
_MOST_SECONDS: Final = limits.SQS_MAX_ANSWER_MS / 1000
_ANSWER_SECONDS: Final[dict[str, float | None]] = {
    "ReceiveMessage": _MOST_SECONDS + limits.SQS_MAX_WAIT_S,
    "DeleteQueue": None,
    "PurgeQueue": None,
}
_signing_key: Final = lru_cache(maxsize=1_024)(signature.signing_key)


class Observer(Protocol):
    """Counts requests."""

    def request(
        self, protocol: str, operation: str, seconds: float, outcome: str, key_id: str = ""
    ) -> None:
        """Take note of a request that was answered."""


class SqsService:
    """Answers SQS requests; :meth:`handle` is what HTTP calls."""

    def __init__(
        self,
        batcher: Batcher,
        *,
        clock: Clock,
        keys: Keys | None = None,
        options: SqsOptions | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._keys = keys
        self._observer = observer
        self._options = options or SqsOptions()
        store_id = int(batcher.broker.info().store_id, 16)
        self._context = SqsContext(
            batcher, QueueCache(batcher), clock, self._options, store_id, ReceiveAttempts()
        )
        self._manager = QueueManager()
        self._moves = MoveTasks()
        self._told: set[str] = set()
        self._requests = 0
        self._request_prefix = clock.lease_id().hex()[-12:]
        self._operations = self._table()

    def close(self) -> None:
        """Stop what goes on in the background."""
        self._moves.close()

    def _table(self) -> dict[str, Operation]:
        manager, moves = self._manager, self._moves
        table: dict[str, Operation] = {
            "AddPermission": manager.add_permission,
            "CancelMessageMoveTask": moves.cancel,
            "ChangeMessageVisibility": messages.change_visibility,
            "ChangeMessageVisibilityBatch": messages.change_visibility_batch,
            "CreateQueue": manager.create,
            "DeleteMessage": messages.delete,
            "DeleteMessageBatch": messages.delete_batch,
            "DeleteQueue": manager.delete,
            "GetQueueAttributes": queues.get_attributes,
            "GetQueueUrl": queues.get_url,
            "ListDeadLetterSourceQueues": queues.list_sources,
            "ListMessageMoveTasks": moves.list,
            "ListQueueTags": queues.list_tags,
            "ListQueues": queues.list_queues,
            "PurgeQueue": manager.purge,
            "ReceiveMessage": messages.receive,
            "RemovePermission": manager.remove_permission,
            "SendMessage": messages.send,
            "SendMessageBatch": messages.send_batch,
            "SetQueueAttributes": manager.set_attributes,
            "StartMessageMoveTask": moves.start,
            "TagQueue": manager.tag,
            "UntagQueue": manager.untag,
        }
        assert table.keys() == OPERATIONS.keys()
        return table

    # --- requests ------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Response:
        """Answer a request, whatever it is."""
        if request.method in {"GET", "HEAD"} and "Action=" not in request.query:
            return _NO_PAGE
        self._requests += 1
        request_id = f"{self._request_prefix[:8]}-0000-8000-8000-{self._requests:012x}"
        target = request.headers.get("x-amz-target")
        xml = target is None
        loop = asyncio.get_running_loop()
        began = loop.time()
        operation, outcome = "unknown", "ok"
        principal = _NOBODY
        try:
            principal = self._principal(request)
            request.trust()
            if target is not None:
                operation = jsonwire.operation_of(target)
                typed = jsonwire.decode(operation, request.body)
            else:
                fields = _fields(request)
                operation = querywire.operation_of(fields)
                typed = querywire.decode(operation, fields)
            consumer = principal.key_id or request.peer
            call = SqsCall(self._context, principal, self._base_url(request), request, consumer)
            async with asyncio.timeout(_ANSWER_SECONDS.get(operation, _MOST_SECONDS)):
                answer = await self._operations[operation](call, typed)
            return _answered(answer, operation, request_id, xml=xml)
        except Exception as error:
            # The error stays in here: kept in a variable, it would keep this call, with the body of
            # its request, until the garbage collector comes.
            late = isinstance(error, TimeoutError)
            outcome, response = _refused(
                self._late() if late else error, operation, request_id, xml=xml
            )
            return response
        finally:
            if self._observer is not None:
                seconds = loop.time() - began
                self._observer.request("sqs", operation, seconds, outcome, principal.key_id)

    def _late(self) -> SqsFault:
        """Say that a request was not answered in time; one that was not begun is not begun."""
        outage = self._context.batcher.broker.outage
        why = "" if outage is None else f" The store can't be used: {outage.why}."
        text = f"The request was not answered in time, it may or may not have been done.{why}"
        return SqsFault("ServiceUnavailable", text, status=503)

    def _principal(self, request: Request) -> Principal:
        if self._keys is None:
            return ANYONE
        claim = signature.parse(request.headers.get("authorization"))
        found = self._keys.secret_of(claim.key_id)
        if found is None and self._keys.keeps_no_secret(claim.key_id):
            self._tell(claim.key_id)
        # An unknown key takes the same steps, so that time does not tell which keys there are.
        secret, principal = found or ("", _NOBODY)
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
                now_ms=self._context.clock.now_ms(),
                unsigned_body=request.secure,
            )
        except SqsFault:
            if found is None:
                raise _unsigned() from None
            raise
        if found is None:
            raise _unsigned()
        return principal

    def _tell(self, key_id: str) -> None:
        # Once: a stranger may name a key as often as it likes.
        if key_id not in self._told:
            self._told.add(key_id)
            log.warning(
                "key %s was not made with --sqs: its signatures can't be checked, make it anew",
                key_id,
            )

    def _base_url(self, request: Request) -> str:
        base = self._options.url
        if not base:
            scheme = "https" if request.secure else "http"
            base = f"{scheme}://{request.headers.get('host', 'localhost')}"
        return f"{base}/{self._options.account}/"


def _unsigned() -> SqsFault:
    # A new one each time: one for all would keep the calls that it was raised in, for ever.
    return SqsFault(
        "UnrecognizedClientException",
        "The security token included in the request is invalid.",
        status=403,
    )


def _fields(request: Request) -> dict[str, str]:
    """Read the form fields of a query request: of its body, and of its address."""
    text = request.query
    if request.method == "POST" and request.body:
        try:
            body = request.body.decode("ascii")
        except UnicodeDecodeError:
            raise SqsFault("SerializationException", "The form fields can't be read.") from None
        text = f"{body}&{text}" if text else body
    return querywire.fields_of(text)


def _fault_of(error: Exception, operation: str) -> SqsFault:
    """Make an error of the broker one of SQS."""
    match error:
        case SqsFault():
            return error
        case QueueNotFound():
            return SqsFault.no_queue()
        case NotAllowed():
            return SqsFault("AccessDeniedException", str(error), status=403)
        case InvalidReceipt():
            return SqsFault.bad_receipt()
        case QueueExists():
            return SqsFault("QueueNameExists", str(error))
        case InvalidInput():
            return SqsFault.invalid(str(error))
        case BrokerClosed():
            return SqsFault("ServiceUnavailable", "The server is stopping.", status=503)
        case StorageFailed():
            # The runner logs a store that can't be used, once.
            return SqsFault("ServiceUnavailable", f"The store failed: {error}.", status=503)
    log.error("%s failed", operation, exc_info=error)
    return SqsFault(
        "InternalFailure", "The request failed because of an error of the server.", status=500
    )


def _answered(answer: Answer, operation: str, request_id: str, *, xml: bool) -> Response:
    if xml:
        body, kind = querywire.encode(operation, answer, request_id), querywire.CONTENT_TYPE
    else:
        body, kind = jsonwire.encode(answer), jsonwire.CONTENT_TYPE
    return Response(200, body, kind, (("x-amzn-RequestId", request_id),))


def _refused(
    error: Exception, operation: str, request_id: str, *, xml: bool
) -> tuple[str, Response]:
    """Return the outcome's name, and the answer."""
    fault = _fault_of(error, operation)
    headers: tuple[tuple[str, str], ...] = (("x-amzn-RequestId", request_id),)
    if xml:
        body, kind = querywire.encode_fault(fault, request_id), querywire.CONTENT_TYPE
    else:
        body, kind = jsonwire.encode_fault(fault), jsonwire.CONTENT_TYPE
        blame = "Sender" if fault.sender else "Receiver"
        headers += (("x-amzn-query-error", f"{fault.query_code};{blame}"),)
    return fault.query_code, Response(fault.status, body, kind, headers)
