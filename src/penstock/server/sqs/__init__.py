"""SQS over HTTP: the 23 operations, on a batcher.

Here requests come in: which protocol, whose key, which operation, and the name of a failure.
``messages`` and ``queues`` are the operations, ``context`` is what they share. The wire is in
:mod:`penstock.wire.sqs`.
"""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache, partial
from math import inf
from typing import TYPE_CHECKING, Final, TypeAlias

from penstock import limits
from penstock.clock import loop_seconds
from penstock.errors import (
    BrokerClosed,
    InvalidInput,
    InvalidReceipt,
    LimitReached,
    NotAllowed,
    QueueExists,
    QueueNotFound,
    StorageFailed,
)
from penstock.server.http import Response
from penstock.server.security import ANYONE, Principal
from penstock.server.sqs import messages, queues
from penstock.server.sqs.context import (
    QueueCache,
    ReceiveAttempts,
    SqsCall,
    SqsOptions,
    limit_fault,
)
from penstock.server.steps import Steps, begin
from penstock.wire.sqs import protocol, signature
from penstock.wire.sqs import queues as wire
from penstock.wire.sqs.protocol import SqsFault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.clock import Clock
    from penstock.server.batcher import Batcher
    from penstock.server.http import Request
    from penstock.server.keys import Keys
    from penstock.server.metrics import Metrics
    from penstock.server.sqs.context import Answer
    from penstock.wire.sqs.protocol import SqsRequest

__all__ = ["SqsOptions", "SqsService"]

log = logging.getLogger(__name__)

Operation: TypeAlias = "Callable[[SqsCall, SqsRequest], Awaitable[Answer]]"

OPERATIONS: Final[dict[str, Operation]] = {
    "AddPermission": partial(queues.relabel, wire.with_permission),
    "CancelMessageMoveTask": queues.cancel_move,
    "ChangeMessageVisibility": messages.change_visibility,
    "ChangeMessageVisibilityBatch": messages.change_visibility_batch,
    "CreateQueue": queues.create,
    "DeleteMessage": messages.delete,
    "DeleteMessageBatch": messages.delete_batch,
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
# Error of the broker: code, text and status of the fault. The first that fits counts.
_FAULTS: Final = (
    (QueueNotFound, "QueueDoesNotExist", "The specified queue does not exist.", 400),
    (NotAllowed, "AccessDeniedException", "{}", 403),
    (InvalidReceipt, "ReceiptHandleIsInvalid", "The input receipt handle is invalid.", 400),
    (QueueExists, "QueueNameExists", "{}", 400),
    (InvalidInput, "InvalidParameterValueException", "{}", 400),
    (BrokerClosed, "ServiceUnavailable", "The server is stopping.", 503),
    # The runner logs a store that can't be used, once.
    (StorageFailed, "ServiceUnavailable", "The store failed: {}.", 503),
)
_signing_key: Final = lru_cache(maxsize=1_024)(signature.signing_key)


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
        self.purging: set[str] = set()
        self.purged_at_ms: dict[str, int] = {}
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
        for task in self.moves.values():
            task.stop()

    def arn(self, name: str) -> str:
        """Name a queue as policies do."""
        return wire.arn_of(self.options.region, self.options.account, name)

    # --- requests ------------------------------------------------------------------------------

    def handle(self, request: Request) -> Response | Steps[Response]:
        """Answer a request, whatever it is."""
        if request.method in {"GET", "HEAD"} and "Action=" not in request.query:
            return _NO_PAGE
        return begin(self._handle(request))

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
    text = request.query
    if request.method == "POST" and request.body:
        try:
            body = request.body.decode("ascii")
        except UnicodeDecodeError:
            raise SqsFault("SerializationException", "The form fields can't be read.") from None
        text = f"{body}&{text}" if text else body
    return protocol.query_fields(text)


def _fault_of(error: Exception, operation: str) -> SqsFault:
    """Make an error of the broker one of SQS."""
    if isinstance(error, SqsFault):
        return error
    limit = limit_fault(error)
    if limit is not None:
        return limit
    for kind, code, text, status in _FAULTS:
        if isinstance(error, kind):
            return SqsFault(code, text.format(error), status=status)
    log.error("%s failed", operation, exc_info=error)
    text = "The request failed because of an error of the server."
    return SqsFault("InternalFailure", text, status=500)


def _refused(
    error: Exception, operation: str, request_id: str, *, xml: bool
) -> tuple[str, Response]:
    """Return the outcome's name, and the answer."""
    fault = _fault_of(error, operation)
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
