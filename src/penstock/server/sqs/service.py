"""The way in: which protocol, who asks, which operation, and what a failure is called."""

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
from penstock.server.http.listener import Response
from penstock.server.security import ANYONE, Principal
from penstock.server.sqs import managing, sending, settling
from penstock.server.sqs.attempts import Attempts
from penstock.server.sqs.calls import Call, Place, SqsOptions
from penstock.server.sqs.catalog import Catalog
from penstock.server.sqs.managing import Manager
from penstock.server.sqs.moving import Mover
from penstock.server.sqs.receiving import receive
from penstock.wire.sqs import jsonwire, querywire, signature
from penstock.wire.sqs.faults import SqsFault
from penstock.wire.sqs.requests import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.clock import Clock
    from penstock.server.batcher import Desk
    from penstock.server.http.listener import Request
    from penstock.server.security import Keys
    from penstock.wire.sqs.requests import SqsRequest

__all__ = ["Observer", "SqsOptions", "SqsService"]

log = logging.getLogger(__name__)

Operation: TypeAlias = "Callable[[Place, Call, SqsRequest], Awaitable[dict[str, Any]]]"

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
    """Who counts requests."""

    def request(
        self, protocol: str, operation: str, seconds: float, outcome: str, key_id: str = ""
    ) -> None:
        """Take note of a request that was answered."""


class SqsService:
    """Answers SQS requests; :meth:`handle` is what HTTP calls."""

    def __init__(
        self,
        desk: Desk,
        *,
        clock: Clock,
        keys: Keys | None = None,
        options: SqsOptions | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._keys = keys
        self._observer = observer
        self._options = options or SqsOptions()
        store_id = int(desk.broker.info().store_id, 16)
        self._place = Place(desk, Catalog(desk), clock, self._options, store_id, Attempts())
        self._manager = Manager()
        self._mover = Mover()
        self._told: set[str] = set()
        self._requests = 0
        self._request_prefix = clock.lease_id().hex()[-12:]
        self._operations = self._table()

    def close(self) -> None:
        """Stop what goes on in the background."""
        self._mover.close()

    def _table(self) -> dict[str, Operation]:
        manager, mover = self._manager, self._mover
        table: dict[str, Operation] = {
            "AddPermission": manager.add_permission,
            "CancelMessageMoveTask": mover.cancel,
            "ChangeMessageVisibility": settling.change_visibility,
            "ChangeMessageVisibilityBatch": settling.change_visibility_batch,
            "CreateQueue": manager.create,
            "DeleteMessage": settling.delete,
            "DeleteMessageBatch": settling.delete_batch,
            "DeleteQueue": manager.delete,
            "GetQueueAttributes": managing.get_attributes,
            "GetQueueUrl": managing.get_url,
            "ListDeadLetterSourceQueues": managing.list_sources,
            "ListMessageMoveTasks": mover.list,
            "ListQueueTags": managing.list_tags,
            "ListQueues": managing.list_queues,
            "PurgeQueue": manager.purge,
            "ReceiveMessage": receive,
            "RemovePermission": manager.remove_permission,
            "SendMessage": sending.send,
            "SendMessageBatch": sending.send_batch,
            "SetQueueAttributes": manager.set_attributes,
            "StartMessageMoveTask": mover.start,
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
        loop = asyncio.get_running_loop()
        began = loop.time()
        operation, outcome = "unknown", "ok"
        principal = _NOBODY
        try:
            principal = self._principal(request)
            request.trust()
            fields = {} if target is not None else _fields(request)
            if target is not None:
                operation = jsonwire.operation_of(target)
                typed = jsonwire.decode(operation, request.body)
            else:
                operation = querywire.operation_of(fields)
                typed = querywire.decode(operation, fields)
            call = Call(
                principal, self._base_url(request), request, principal.key_id or request.peer
            )
            async with asyncio.timeout(_ANSWER_SECONDS.get(operation, _MOST_SECONDS)):
                answer = await self._operations[operation](self._place, call, typed)
            if target is not None:
                return _json_response(answer, request_id)
            return _xml_response(operation, answer, request_id)
        except Exception as error:
            # The error stays in here: kept in a variable, it would keep this call, with the body of
            # its request, until the garbage collector comes.
            refuse = _xml_refusal if target is None else _json_refusal
            late = isinstance(error, TimeoutError)
            outcome, response = refuse(self._late() if late else error, operation, request_id)
            return response
        finally:
            if self._observer is not None:
                seconds = loop.time() - began
                self._observer.request("sqs", operation, seconds, outcome, principal.key_id)

    def _late(self) -> SqsFault:
        """Say that a request was not answered in time; one that was not begun is not begun."""
        outage = self._place.desk.broker.outage
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
                now_ms=self._place.clock.now_ms(),
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
        # Once: anybody may name a key, and as often as they like.
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
    # Made anew each time: one for all would keep the calls that it was raised in, for ever.
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
    """Say in SQS's words what went wrong."""
    if isinstance(error, SqsFault):
        return error
    if isinstance(error, QueueNotFound):
        return SqsFault.no_queue()
    if isinstance(error, NotAllowed):
        return SqsFault("AccessDeniedException", str(error), status=403)
    if isinstance(error, InvalidReceipt):
        return SqsFault.bad_receipt()
    if isinstance(error, QueueExists):
        return SqsFault("QueueNameExists", str(error))
    if isinstance(error, InvalidInput):
        return SqsFault.invalid(str(error))
    if isinstance(error, BrokerClosed):
        return SqsFault("ServiceUnavailable", "The server is stopping.", status=503)
    if isinstance(error, StorageFailed):
        # Of a store that can't be used it is told once, by who watches it.
        return SqsFault("ServiceUnavailable", f"The store failed: {error}.", status=503)
    log.error("%s failed", operation, exc_info=error)
    return SqsFault(
        "InternalFailure", "The request failed because of an error of the server.", status=500
    )


def _json_response(answer: dict[str, Any], request_id: str) -> Response:
    headers = (("x-amzn-RequestId", request_id),)
    return Response(200, jsonwire.encode(answer), jsonwire.CONTENT_TYPE, headers)


def _json_refusal(error: Exception, operation: str, request_id: str) -> tuple[str, Response]:
    """Return the outcome's name, and the answer."""
    fault = _fault_of(error, operation)
    blame = "Sender" if fault.sender else "Receiver"
    return fault.query_code, Response(
        fault.status,
        jsonwire.encode_fault(fault),
        jsonwire.CONTENT_TYPE,
        (
            ("x-amzn-RequestId", request_id),
            ("x-amzn-query-error", f"{fault.query_code};{blame}"),
        ),
    )


def _xml_response(operation: str, answer: dict[str, Any], request_id: str) -> Response:
    body = querywire.encode(operation, answer, request_id)
    headers = (("x-amzn-RequestId", request_id),)
    return Response(200, body, querywire.CONTENT_TYPE, headers)


def _xml_refusal(error: Exception, operation: str, request_id: str) -> tuple[str, Response]:
    """Return the outcome's name, and the answer."""
    fault = _fault_of(error, operation)
    body = querywire.encode_fault(fault, request_id)
    headers = (("x-amzn-RequestId", request_id),)
    return fault.query_code, Response(fault.status, body, querywire.CONTENT_TYPE, headers)
