"""The parts that SQS operations share: a call, the queues' settings, earlier receives, checks."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from penstock import limits
from penstock.errors import LimitReached
from penstock.server.audit import Actor, audited
from penstock.server.security import ANYONE
from penstock.wire.sqs.protocol import SqsFault
from penstock.wire.sqs.queues import QueueView, view_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.model import Delivery, QueueSpec
    from penstock.server.batcher import Batcher
    from penstock.server.http import Request
    from penstock.server.security import Principal
    from penstock.server.sqs import SqsService
    from penstock.wire.sqs.protocol import SqsEntry, SqsRequest

Answer: TypeAlias = dict[str, Any]
T = TypeVar("T")

# For how long settings count as fresh that another protocol may have changed.
_FRESH_S: Final = 1.0
# The assumed size of a message beside its payload and attributes.
_MESSAGE_BYTES: Final = 1_024
# SQS takes letters, digits and punctuation of ASCII in them.
_TOKEN: Final = re.compile(r"[!-~]{1,128}")
_ENTRY_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")


def limit_fault(error: Exception) -> SqsFault | None:
    """Make the fault of a limit: one that SDKs try again after a while, or that of a full queue."""
    if not isinstance(error, LimitReached):
        return None
    if error.retry_after_ms is not None:
        return SqsFault("RequestThrottled", str(error))
    return SqsFault("OverLimit", str(error), status=403)


class SqsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the service is set up.

    ``url`` is what queue URLs begin with; without it, the address that the request came to.
    ``done_retention_ms`` is how long queues that are made here remember deleted messages.
    """

    account: str = "000000000000"
    region: str = "us-east-1"
    url: str = ""
    done_retention_ms: int = 3_600_000


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
        return batcher.call(audited(batcher.audit, self.actor, work), long=long)

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

    async def view_of(self, request: SqsRequest, action: str) -> QueueView:
        """Return the settings of a request's queue, on which the action must be allowed."""
        name = self.queue_of(request, action)
        queues = self.sqs.queues
        return queues.fresh_view(name) or await queues.view(name)

    def url_of(self, name: str) -> str:
        """Return the URL of a queue; without a setting, at the address that the request came to."""
        options, http = self.sqs.options, self.http
        base = options.url
        if not base:
            scheme = "https" if http.secure else "http"
            base = f"{scheme}://{http.headers.get('host', 'localhost')}"
        return f"{base}/{options.account}/{name}"


class QueueCache:
    """The settings of the queues, so that requests need not ask the broker for them.

    The broker says whether a queue is there when a message goes in or out. Settings may be a second
    old if another protocol changed them.
    """

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._loop = asyncio.get_running_loop()
        self._views: dict[str, QueueView] = {}
        self._read_at = float("-inf")
        self._reading: asyncio.Task[list[QueueSpec]] | None = None

    def fresh_view(self, name: str) -> QueueView | None:
        """Return the settings of a queue if they are known and fresh."""
        if self._loop.time() - self._read_at > _FRESH_S:
            return None
        return self._views.get(name)

    async def view(self, name: str) -> QueueView:
        """Return the settings of a queue; those that are not fresh are read again meanwhile."""
        if self._loop.time() - self._read_at > _FRESH_S:
            self._start_reading()
        if name not in self._views:
            await self.specs()
        view = self._views.get(name)
        if view is None:
            raise SqsFault.no_queue()
        return view

    async def specs(self) -> dict[str, QueueSpec]:
        """Return the specs of all queues as they are now, in the order of their names."""
        specs = await asyncio.shield(self._start_reading())
        return {spec.name: spec for spec in specs}

    async def spec(self, name: str) -> QueueSpec:
        """Return the spec of a queue as it is now."""
        specs = await self.specs()
        if name not in specs:
            raise SqsFault.no_queue()
        return specs[name]

    def changed(self, name: str, spec: QueueSpec | None) -> None:
        """Take note of a queue that was made or changed; None: that was removed."""
        self._views.pop(name, None)
        if spec is not None:
            self._views[name] = view_of(spec)
        # A read that began before the change must not bring back the old settings.
        self._reading = None
        self._read_at = float("-inf")

    def _start_reading(self) -> asyncio.Task[list[QueueSpec]]:
        if self._reading is None or self._reading.done():
            self._reading = self._loop.create_task(self._read())
            # A caller that waits gets the error; otherwise the next request tries again.
            self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._reading

    async def _read(self) -> list[QueueSpec]:
        me = asyncio.current_task()
        specs = await self._batcher.call(lambda broker: broker.queues())
        if self._reading is me:
            self._views = {spec.name: view_of(spec) for spec in specs}
            self._read_at = self._loop.time()
        return specs


class _Got(NamedTuple):
    at_ms: int
    deliveries: dict[str, Delivery]


class ReceiveAttempts:
    """The deliveries of receives by ReceiveRequestAttemptId, since a client may ask again.

    Bounded in number, bytes and time: the oldest go first, and asked again they are new receives.
    """

    def __init__(self) -> None:
        self._got: OrderedDict[tuple[str, str], _Got] = OrderedDict()
        self._by_receipt: dict[str, tuple[str, str]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._got)

    def find(self, queue: str, attempt: str, now_ms: int) -> list[Delivery]:
        """Return what an attempt got, if it is remembered."""
        got = self._got.get((queue, attempt))
        if got is None or now_ms - got.at_ms > limits.SQS_RECEIVE_ATTEMPT_MS:
            return []
        return list(got.deliveries.values())

    def remember(self, queue: str, attempt: str, deliveries: list[Delivery], now_ms: int) -> None:
        """Keep what an attempt got."""
        key = (queue, attempt)
        self._drop(key)
        self._got[key] = _Got(now_ms, {each.receipt: each for each in deliveries})
        for each in deliveries:
            self._by_receipt[each.receipt] = key
            self.bytes += _weight(each)
        while self._got:
            oldest = next(iter(self._got))
            if (
                now_ms - self._got[oldest].at_ms <= limits.SQS_RECEIVE_ATTEMPT_MS
                and len(self._got) <= limits.SQS_MAX_RECEIVE_ATTEMPTS
                and self.bytes <= limits.SQS_MAX_RECEIVE_ATTEMPT_BYTES
            ):
                break
            self._drop(oldest)

    def forget(self, receipt: str) -> None:
        """Drop a message that is deleted."""
        key = self._by_receipt.pop(receipt, None)
        if key is None:
            return
        deliveries = self._got[key].deliveries
        self.bytes -= _weight(deliveries.pop(receipt))
        if not deliveries:
            del self._got[key]

    def _drop(self, key: tuple[str, str]) -> None:
        got = self._got.pop(key, None)
        for receipt, each in got.deliveries.items() if got is not None else ():
            del self._by_receipt[receipt]
            self.bytes -= _weight(each)


def _weight(delivery: Delivery) -> int:
    named = sum(len(name) + len(str(value)) for name, value in delivery.attributes.items())
    return _MESSAGE_BYTES + len(delivery.payload) + named


# --- entries of batches ---------------------------------------------------------------------------


def check_entries(request: SqsRequest, kind: str) -> list[SqsEntry]:
    """Return the entries of a batch, whose number and ids are checked."""
    entries = request.entries
    if not entries:
        raise SqsFault(
            "EmptyBatchRequest", f"There should be at least one {kind}RequestEntry in the request."
        )
    if len(entries) > limits.SQS_MAX_BATCH:
        raise SqsFault(
            "TooManyEntriesInBatchRequest",
            f"Maximum number of entries per request are {limits.SQS_MAX_BATCH}. "
            f"You have sent {len(entries)}.",
        )
    seen = set()
    for entry in entries:
        if entry.id is None:
            raise SqsFault.missing(f"{kind}RequestEntry.Id")
        if not _ENTRY_ID.fullmatch(entry.id):
            raise SqsFault(
                "InvalidBatchEntryId",
                "A batch entry id can only contain alphanumeric characters, hyphens and "
                "underscores. It can be at most 80 letters long.",
            )
        if entry.id in seen:
            raise SqsFault("BatchEntryIdsNotDistinct", f"Id {entry.id} repeated.")
        seen.add(entry.id)
    return entries


def check_range(value: int, parameter: str, low: int, high: int, reason: str = "") -> int:
    """Check a number; ``reason`` is what SQS says of one that is out of bounds."""
    if not low <= value <= high:
        raise SqsFault.value(value, parameter, reason or f"Must be between {low} and {high}.")
    return value


def check_token(text: str | None, parameter: str) -> None:
    """Check a group, a dedup id or the id of a receive, if it is given."""
    if text is not None and not _TOKEN.fullmatch(text):
        raise SqsFault.value(
            text,
            parameter,
            f"{parameter} can only include alphanumeric and punctuation characters. 1 to 128 in "
            "length.",
        )


def failed_entry(entry: SqsEntry, fault: SqsFault) -> Answer:
    """Say of an entry of a batch why it failed."""
    return {
        "Id": entry.id,
        "SenderFault": fault.sender,
        "Code": fault.query_code,
        "Message": fault.message,
    }
