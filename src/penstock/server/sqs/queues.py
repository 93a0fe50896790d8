"""The operations on queues: made, changed, listed, tagged, purged, removed; and move tasks."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64decode, urlsafe_b64encode
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock import limits
from penstock.errors import NotAllowed, PenstockError
from penstock.model import Ordering, State
from penstock.server.security import Principal, check_target
from penstock.server.sqs.context import check_range
from penstock.wire.sqs import queues as wire
from penstock.wire.sqs.faults import SqsFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.broker.broker import Broker
    from penstock.model import QueueSpec, QueueStats
    from penstock.server.sqs.context import Answer, SqsCall, SqsContext
    from penstock.wire.sqs import requests

log = logging.getLogger(__name__)

# Publishers ask for a queue's URL and settings as well as consumers.
_ANY: Final = ("consume", "publish", "admin")
_STEP: Final = 100
_STEPS_PER_SECOND: Final = 10
_NO_SOURCE: Final = "CouldNotDetermineMessageSource"


class QueueManager:
    """Changes queues, one at a time: each change reads a spec and writes the new one."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._purging: set[str] = set()
        self._purged_at_ms: dict[str, int] = {}

    # --- queues ------------------------------------------------------------------------------

    async def create(self, call: SqsCall, request: requests.CreateQueue) -> Answer:
        """Make a queue, or find one of the same attributes."""
        name = wire.check_name(request.queue_name)
        call.principal.check("admin", name)
        fifo = name.endswith(".fifo")
        attributes = wire.checked_attributes(request.attributes or {}, fifo=fifo)
        if fifo and attributes.get("FifoQueue") != "true":
            raise SqsFault.invalid(
                "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in "
                "length; the suffix .fifo is for queues with the attribute FifoQueue."
            )
        tags = wire.checked_tags(request.tags or {}, name)
        async with self._turn:
            specs = await call.sqs.queues.specs()
            present = next((spec for spec in specs if spec.name == name), None)
            if present is not None:
                _check_same(call.sqs, present, attributes)
                return {"QueueUrl": call.url_of(name)}
            _check_dead_letter(call, name, attributes, specs)
            settings = wire.new_queue(call.sqs.options.done_retention_ms)
            settings |= wire.settings_for(attributes, wire.with_tags({}, tags))
            ordering = Ordering.FIFO if fifo else Ordering.STANDARD
            spec = await call.sqs.batcher.call(
                lambda broker: broker.create_queue(name, ordering=ordering, **settings)
            )
            call.sqs.queues.learn(spec)
        return {"QueueUrl": call.url_of(name)}

    async def delete(self, call: SqsCall, request: requests.DeleteQueue) -> Answer:
        """Remove a queue."""
        name = call.queue_of(request, "admin")
        async with self._turn:
            await call.sqs.batcher.call(lambda broker: broker.delete_queue(name), long=True)
            call.sqs.queues.forget(name)
            self._purged_at_ms.pop(name, None)
        return {}

    async def purge(self, call: SqsCall, request: requests.PurgeQueue) -> Answer:
        """Remove every message that is not deleted yet, in flight ones too."""
        name = call.queue_of(request, "admin")
        await call.sqs.queues.view(name)
        last_ms = self._purged_at_ms.get(name, -limits.SQS_PURGE_PAUSE_MS)
        paused = call.sqs.clock.now_ms() - last_ms < limits.SQS_PURGE_PAUSE_MS
        if paused or name in self._purging:
            raise SqsFault(
                "PurgeQueueInProgress",
                f"Only one PurgeQueue operation on {name} is allowed every 60 seconds.",
                status=403,
            )
        states = (State.AVAILABLE, State.DELAYED, State.IN_FLIGHT)
        self._purging.add(name)
        try:
            await call.sqs.batcher.call(lambda broker: broker.purge(name, states=states), long=True)
        finally:
            self._purging.discard(name)
        self._purged_at_ms[name] = call.sqs.clock.now_ms()
        return {}

    # --- attributes, tags, permissions ---------------------------------------------------------

    async def set_attributes(self, call: SqsCall, request: requests.SetQueueAttributes) -> Answer:
        """Change settings."""
        name = call.queue_of(request, "admin")
        if not request.attributes:
            raise SqsFault.missing("Attributes")
        async with self._turn:
            specs = await call.sqs.queues.specs()
            spec = _find(specs, name)
            fifo = spec.ordering is Ordering.FIFO
            attributes = wire.checked_attributes(request.attributes, fifo=fifo)
            if attributes.get("FifoQueue", "true" if fifo else "false") != str(fifo).lower():
                raise SqsFault.attribute_value("FifoQueue")
            _check_dead_letter(call, name, attributes, specs)
            settings = wire.settings_for(attributes, spec.labels)
            await _update(call.sqs, name, settings)
        return {}

    async def add_permission(self, call: SqsCall, request: requests.AddPermission) -> Answer:
        """Add a statement to the queue's policy."""

        def change(labels: dict[str, str], name: str) -> dict[str, str]:
            return wire.with_permission(
                labels, call.sqs.arn(name), request.label, request.aws_account_ids, request.actions
            )

        return await self._relabel(call, request, change)

    async def remove_permission(self, call: SqsCall, request: requests.RemovePermission) -> Answer:
        """Take a statement out of the queue's policy."""
        return await self._relabel(
            call, request, lambda labels, _: wire.without_permission(labels, request.label)
        )

    async def tag(self, call: SqsCall, request: requests.TagQueue) -> Answer:
        """Add tags."""

        def change(labels: dict[str, str], name: str) -> dict[str, str]:
            if not request.tags:
                raise SqsFault.missing("Tags")
            tags = {**wire.tags_of(labels), **request.tags}
            return wire.with_tags(labels, wire.checked_tags(tags, name))

        return await self._relabel(call, request, change)

    async def untag(self, call: SqsCall, request: requests.UntagQueue) -> Answer:
        """Remove tags; missing ones are no error."""

        def change(labels: dict[str, str], _: str) -> dict[str, str]:
            gone = request.tag_keys
            if not gone:
                raise SqsFault.invalid("Tag keys must be between 1 and 128 characters in length.")
            tags = wire.tags_of(labels)
            return wire.with_tags(labels, {k: v for k, v in tags.items() if k not in gone})

        return await self._relabel(call, request, change)

    async def _relabel(
        self,
        call: SqsCall,
        request: requests.OnQueue,
        change: Callable[[dict[str, str], str], dict[str, str]],
    ) -> Answer:
        name = call.queue_of(request, "admin")
        async with self._turn:
            spec = await call.sqs.queues.spec(name)
            await _update(call.sqs, name, {"labels": change(dict(spec.labels), name)})
        return {}


async def get_attributes(call: SqsCall, request: requests.GetQueueAttributes) -> Answer:
    """Return settings and depth."""
    name = call.queue_of(request, *_ANY)
    names = wire.check_requested(request.attribute_names)
    counted = any(each == "All" or each.startswith("Approximate") for each in names)

    def look(broker: Broker) -> tuple[list[QueueSpec], QueueStats | None]:
        # The stats first: they fail if the queue is gone.
        stats = broker.stats(name) if counted else None
        return broker.queues(), stats

    specs, stats = await call.sqs.batcher.call(look)
    spec = _find(specs, name)
    known = wire.attributes_of(spec, stats, call.sqs.options.region, call.sqs.options.account)
    if "All" not in names:
        known = {each: known[each] for each in names if each in known}
    return {"Attributes": known} if known and names else {}


async def get_url(call: SqsCall, request: requests.GetQueueUrl) -> Answer:
    """Find a queue by its name."""
    name = request.queue_name
    if not name:
        raise SqsFault.missing("QueueName")
    call.principal.check_any(_ANY, name)
    await call.sqs.queues.spec(name)
    return {"QueueUrl": call.url_of(name)}


async def list_queues(call: SqsCall, request: requests.ListQueues) -> Answer:
    """List the queues that the asker may do something with."""
    prefix = request.queue_name_prefix or ""
    names = [
        spec.name
        for spec in await call.sqs.queues.specs()
        if spec.name.startswith(prefix) and _may_see(call, spec.name)
    ]
    page, token = _page(names, request.next_token, request.max_results)
    answer: dict[str, Any] = {"QueueUrls": [call.url_of(name) for name in page]} if page else {}
    return answer | token


async def list_sources(call: SqsCall, request: requests.ListDeadLetterSourceQueues) -> Answer:
    """List the queues whose failed messages go to a queue, as far as the caller may see them."""
    name = call.queue_of(request, *_ANY)
    specs = await call.sqs.queues.specs()
    _find(specs, name)
    sources = [
        spec.name for spec in specs if spec.dead_letter == name and _may_see(call, spec.name)
    ]
    page, token = _page(sources, request.next_token, request.max_results)
    return {"queueUrls": [call.url_of(each) for each in page]} | token


async def list_tags(call: SqsCall, request: requests.ListQueueTags) -> Answer:
    """Return a queue's tags."""
    name = call.queue_of(request, *_ANY)
    tags = wire.tags_of((await call.sqs.queues.spec(name)).labels)
    return {"Tags": tags} if tags else {}


def _may_see(call: SqsCall, name: str) -> bool:
    return any(call.principal.may(action, name) for action in _ANY)


def _find(specs: list[QueueSpec], name: str) -> QueueSpec:
    for spec in specs:
        if spec.name == name:
            return spec
    raise SqsFault.no_queue()


async def _update(sqs: SqsContext, name: str, settings: dict[str, Any]) -> None:
    now_s = sqs.clock.now_ms() // 1000
    settings["labels"] = {**settings["labels"], wire.CHANGED_LABEL: str(now_s)}
    spec = await sqs.batcher.call(lambda broker: broker.update_queue(name, **settings))
    sqs.queues.learn(spec)


def _check_same(sqs: SqsContext, spec: QueueSpec, attributes: dict[str, str]) -> None:
    """Raise if a queue has other attributes than the requested ones."""
    known = wire.attributes_of(spec, None, sqs.options.region, sqs.options.account)
    for name, value in attributes.items():
        if known.get(name, "false" if name == "FifoQueue" else "") != value:
            raise SqsFault(
                "QueueNameExists",
                "A queue already exists with the same name and a different value for attribute "
                f"{name}",
            )


def _check_dead_letter(
    call: SqsCall, name: str, attributes: dict[str, str], specs: list[QueueSpec]
) -> None:
    """Raise unless the queue that a RedrivePolicy names is there, is alike and allows it."""
    target = wire.dead_letter_of(attributes)
    if target is None:
        return
    check_target(call.principal, target)
    policy = attributes["RedrivePolicy"]
    spec = next((spec for spec in specs if spec.name == target), None)
    if spec is None:
        raise SqsFault.value(policy, "RedrivePolicy", "Dead letter target does not exist.")
    if (spec.ordering is Ordering.FIFO) != name.endswith(".fifo"):
        raise SqsFault.value(
            policy, "RedrivePolicy", "Dead-letter queue must be same type of queue as the source."
        )
    if not wire.allows_source(spec.labels, call.sqs.arn(name)):
        raise SqsFault.value(
            policy, "RedrivePolicy", "The dead-letter queue's RedriveAllowPolicy forbids it."
        )


def _page(
    names: list[str], token: str | None, max_results: int | None
) -> tuple[list[str], dict[str, str]]:
    """Cut a page out of sorted names; the token of the next is the last name of this one."""
    if max_results is not None:
        check_range(max_results, "MaxResults", 1, limits.SQS_MAX_LISTED)
    if token:
        try:
            after = b64decode(token.encode(), b"-_", validate=True).decode()
        except ValueError:
            raise SqsFault.value(token, "NextToken", "It comes from an answer.") from None
        names = [name for name in names if name > after]
    page = names[: max_results or limits.SQS_MAX_LISTED]
    if max_results is None or len(page) == len(names):
        return page, {}
    return page, {"NextToken": urlsafe_b64encode(page[-1].encode()).decode()}


# --- move tasks: the messages of a dead letter queue go back, or elsewhere, in the background -----
#
# Tasks live in memory. A server that stops leaves the messages that were not moved, and the task
# has to be started again.


class _Task(msgspec.Struct, kw_only=True):
    """A move; ``destination`` is empty if each message goes back to where it came from.

    It goes on after its request, and stops at a queue that its principal may not send to.
    """

    handle: str
    source: str
    destination: str
    rate: int | None
    principal: Principal
    started_ms: int
    to_move: int = 0
    moved: int = 0
    status: str = "RUNNING"
    reason: str = ""


class MoveTasks:
    """The tasks, by handle, the oldest first."""

    def __init__(self) -> None:
        self._tasks: dict[str, _Task] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def start(self, call: SqsCall, request: requests.StartMessageMoveTask) -> Answer:
        """Begin to move."""
        source = _named(request.source_arn, "SourceArn")
        call.principal.check("admin", source)
        destination = ""
        if request.destination_arn:
            destination = _named(request.destination_arn, "DestinationArn")
            check_target(call.principal, destination)
        specs = {spec.name: spec for spec in await call.sqs.queues.specs()}
        _check_there(specs, source, "SourceArn")
        if destination:
            _check_there(specs, destination, "DestinationArn")
        rate = request.max_number_of_messages_per_second
        if rate is not None:
            most = limits.SQS_MAX_MOVES_PER_SECOND
            check_range(rate, "MaxNumberOfMessagesPerSecond", 1, most)
        if not destination:
            origins = [spec.name for spec in specs.values() if spec.dead_letter == source]
            _check_origins(call.principal, origins)
        _check_source(specs, source, destination)
        if any(each.source == source and _active(each) for each in self._tasks.values()):
            raise SqsFault.invalid(
                "There is already a task running. Only one active task is allowed for a source "
                "queue arn at a given time."
            )
        task = _Task(
            handle=urlsafe_b64encode(call.sqs.clock.lease_id() + source.encode()).decode(),
            source=source,
            destination=destination,
            rate=rate,
            principal=call.principal,
            started_ms=call.sqs.clock.now_ms(),
        )
        self._keep(task)
        running = asyncio.get_running_loop().create_task(_run(call.sqs, task))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return {"TaskHandle": task.handle}

    async def cancel(self, call: SqsCall, request: requests.CancelMessageMoveTask) -> Answer:
        """Stop a move; messages that were moved stay there."""
        handle = request.task_handle
        if not handle:
            raise SqsFault.missing("TaskHandle")
        task = self._tasks.get(handle)
        if task is None:
            raise _not_found("Task does not exist.")
        call.principal.check("admin", task.source)
        if not _active(task):
            raise _not_found("Only active tasks can be cancelled.")
        task.status = "CANCELLING"
        return {"ApproximateNumberOfMessagesMoved": task.moved}

    async def list(self, call: SqsCall, request: requests.ListMessageMoveTasks) -> Answer:
        """List the moves out of a queue, the latest first."""
        source = _named(request.source_arn, "SourceArn")
        call.principal.check("admin", source)
        specs = {spec.name: spec for spec in await call.sqs.queues.specs()}
        _check_there(specs, source, "SourceArn")
        count = 1 if request.max_results is None else request.max_results
        check_range(count, "MaxResults", 1, 10)
        found = [each for each in self._tasks.values() if each.source == source]
        return {"Results": [_shown(call.sqs, task) for task in reversed(found[-count:])]}

    def close(self) -> None:
        """Stop every move."""
        for running in list(self._running):
            running.cancel()

    def _keep(self, task: _Task) -> None:
        self._tasks[task.handle] = task
        while len(self._tasks) > limits.SQS_MAX_MOVE_TASKS:
            ended = next((key for key, each in self._tasks.items() if not _active(each)), None)
            if ended is None:
                break
            del self._tasks[ended]


def _active(task: _Task) -> bool:
    return task.status in {"RUNNING", "CANCELLING"}


def _not_found(message: str) -> SqsFault:
    return SqsFault("ResourceNotFoundException", message, status=404)


def _named(arn: str | None, parameter: str) -> str:
    """Return the name in an ARN, whether or not there is such a queue."""
    if not arn:
        raise SqsFault.missing(parameter)
    name = wire.name_of_arn(arn)
    if name is None:
        raise SqsFault.value(arn, parameter, "It is not the ARN of a queue.")
    return name


def _check_there(specs: dict[str, QueueSpec], name: str, parameter: str) -> None:
    if name not in specs:
        raise _not_found(
            f"The resource that you specified for the {parameter} parameter doesn't exist."
        )


def _check_origins(principal: Principal, origins: Iterable[str]) -> None:
    """Raise NotAllowed, without a name, if messages would go back to queues of others."""
    for origin in origins:
        if not (principal.may("publish", origin) or principal.may("admin", origin)):
            raise NotAllowed(
                f"key {principal.key_id!r} may not publish on every queue that messages would go "
                "back to"
            )


def _check_source(specs: dict[str, QueueSpec], source: str, destination: str) -> None:
    if not any(spec.dead_letter == source for spec in specs.values()):
        raise SqsFault.invalid("Source queue must be configured as a Dead Letter Queue.")
    if destination == source:
        raise SqsFault.invalid("Source queue arn and destination queue arn cannot be the same.")
    if destination and specs[destination].ordering is not specs[source].ordering:
        raise SqsFault.invalid("Source and destination must be of the same type of queue.")


def _shown(sqs: SqsContext, task: _Task) -> Answer:
    shown: dict[str, Any] = {
        "Status": task.status,
        "SourceArn": sqs.arn(task.source),
        "ApproximateNumberOfMessagesMoved": task.moved,
        "ApproximateNumberOfMessagesToMove": task.to_move,
        "StartedTimestamp": task.started_ms,
    }
    if _active(task):
        shown["TaskHandle"] = task.handle
    if task.destination:
        shown["DestinationArn"] = sqs.arn(task.destination)
    if task.rate is not None:
        shown["MaxNumberOfMessagesPerSecond"] = task.rate
    if task.reason:
        shown["FailureReason"] = task.reason
    return shown


async def _run(sqs: SqsContext, task: _Task) -> None:
    """Move in steps until all is moved that was there when the task began, or it is cancelled."""
    step, pause_s = _STEP, 0.0
    if task.rate is not None:
        step = max(1, task.rate // _STEPS_PER_SECOND)
        pause_s = step / task.rate
    try:
        stats = await sqs.batcher.call(lambda broker: broker.stats(task.source))
        task.to_move = stats.available
        while task.status == "RUNNING" and task.moved < task.to_move:
            limit = min(step, task.to_move - task.moved)
            moved = await sqs.batcher.call(lambda broker, limit=limit: _step(broker, task, limit))  # type: ignore[misc]
            if not moved:
                break
            task.moved += moved
            await asyncio.sleep(pause_s)
        task.status = "CANCELLED" if task.status == "CANCELLING" else "COMPLETED"
    except _SourceUnknown:
        task.status, task.reason = "FAILED", _NO_SOURCE
    except PenstockError as error:
        task.status, task.reason = "FAILED", str(error)
    except asyncio.CancelledError:
        task.status = "CANCELLED"
        raise
    except Exception:
        log.exception("a move out of queue %s failed", task.source)
        task.status, task.reason = "FAILED", "InternalError"


class _SourceUnknown(Exception):
    """The queue that a message came from is not known."""


def _step(broker: Broker, task: _Task, limit: int) -> int:
    """Move up to ``limit`` messages; called on a thread."""
    if task.destination:
        check_target(task.principal, task.destination)
        return broker.move(task.source, task.destination, state=State.AVAILABLE, limit=limit)
    page = broker.browse(task.source, state=State.AVAILABLE, limit=limit, payloads=False)
    specs = broker.queues()
    known = {spec.name for spec in specs}
    sources = [spec.name for spec in specs if spec.dead_letter == task.source]
    by_origin: dict[str, list[int]] = {}
    for entry in page:
        # The queue it was sent to; a message that was routed by a filter has one possible source.
        origin = entry.attributes.get("queue")
        if not isinstance(origin, str) or origin == task.source or origin not in known:
            if len(sources) != 1:
                raise _SourceUnknown
            (origin,) = sources
        by_origin.setdefault(origin, []).append(entry.message_id)
    _check_origins(task.principal, by_origin)
    return sum(
        broker.move(task.source, origin, state=State.AVAILABLE, message_ids=ids)
        for origin, ids in by_origin.items()
    )
