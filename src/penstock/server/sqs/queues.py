"""The operations on queues: made, changed, listed, tagged, purged, removed; and move tasks."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64decode, urlsafe_b64encode
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock import limits
from penstock.errors import NotAllowed, PenstockError, QueueNotFound
from penstock.model import Ordering, State
from penstock.server.audit import Actor
from penstock.server.security import Principal, check_target
from penstock.wire.sqs import queues as wire
from penstock.wire.sqs.protocol import SqsFault, check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.broker.broker import Broker
    from penstock.model import QueueSpec
    from penstock.server.sqs import Answer, SqsCall, SqsService
    from penstock.wire.sqs.protocol import SqsRequest

log = logging.getLogger(__name__)

# Publishers ask for a queue's URL and settings as well as consumers.
_ANY: Final = ("consume", "publish", "admin")
_STEP: Final = 100
_STEPS_PER_SECOND: Final = 10


# --- queues ---------------------------------------------------------------------------------------


async def create(call: SqsCall, request: SqsRequest) -> Answer:
    """Make a queue, or find one of the same attributes."""
    sqs = call.sqs
    name = wire.check_name(request.queue_name)
    call.principal.check("admin", name)
    fifo = name.endswith(".fifo")
    attributes = wire.checked_attributes(request.attributes or {}, fifo=fifo)
    if fifo and attributes.get("FifoQueue") != "true":
        raise SqsFault.invalid(
            "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in "
            "length; the suffix .fifo is for queues with the attribute FifoQueue."
        )
    labels = wire.with_tags({}, request.new_queue_tags or {}, name)
    async with sqs.turn:
        known = await call.find(name)
        if known is not None:
            _check_same(sqs, known, attributes)
            return {"QueueUrl": call.url_of(name)}
        await _check_dead_letter(call, name, attributes)
        settings = wire.new_queue(sqs.options.done_retention_ms)
        settings |= wire.settings_for(attributes, labels)
        ordering = Ordering.FIFO if fifo else Ordering.STANDARD
        spec = await call.change(
            lambda broker: broker.create_queue(name, ordering=ordering, **settings)
        )
        sqs.queues.changed(name, spec)
    return {"QueueUrl": call.url_of(name)}


async def delete(call: SqsCall, request: SqsRequest) -> Answer:
    """Remove a queue."""
    name = call.queue_of(request, "admin")
    async with call.sqs.turn:
        await call.change(lambda broker: broker.delete_queue(name), long=True)
        call.sqs.queues.changed(name, None)
        call.sqs.purged_at_ms.pop(name, None)
    return {}


async def purge(call: SqsCall, request: SqsRequest) -> Answer:
    """Remove every message that is not deleted yet, in flight ones too."""
    sqs = call.sqs
    name = (await call.view_of(request, "admin")).name
    last_ms = sqs.purged_at_ms.get(name, -inf)
    interval_ms = sqs.options.purge_interval_ms
    if sqs.clock.now_ms() - last_ms < interval_ms:
        seconds = -(-interval_ms // 1_000)
        text = f"Only one PurgeQueue operation on {name} is allowed every {seconds} seconds."
        raise SqsFault("PurgeQueueInProgress", text, status=403)
    states = (State.AVAILABLE, State.DELAYED, State.IN_FLIGHT)
    sqs.purged_at_ms[name] = inf
    try:
        await call.change(lambda broker: broker.purge(name, states=states), long=True)
        last_ms = sqs.clock.now_ms()
    finally:
        sqs.purged_at_ms[name] = last_ms
    return {}


async def set_attributes(call: SqsCall, request: SqsRequest) -> Answer:
    """Change settings of a queue."""
    name = call.queue_of(request, "admin")
    if not request.attributes:
        raise SqsFault.missing("Attributes")
    async with call.sqs.turn:
        spec = await call.spec(name)
        fifo = spec.ordering is Ordering.FIFO
        attributes = wire.checked_attributes(request.attributes, fifo=fifo)
        if attributes.get("FifoQueue", "true" if fifo else "false") != str(fifo).lower():
            raise SqsFault.attribute_value("FifoQueue")
        await _check_dead_letter(call, name, attributes)
        await _update(call, name, wire.settings_for(attributes, spec.labels))
    return {}


async def relabel(
    change: Callable[[dict[str, str], SqsRequest, str], dict[str, str]],
    call: SqsCall,
    request: SqsRequest,
) -> Answer:
    """Change tags or permissions: ``change`` makes the new labels of a queue, given its ARN."""
    name = call.queue_of(request, "admin")
    async with call.sqs.turn:
        spec = await call.spec(name)
        labels = change(dict(spec.labels), request, call.sqs.arn(name))
        await _update(call, name, {"labels": labels})
    return {}


async def get_attributes(call: SqsCall, request: SqsRequest) -> Answer:
    """Return settings and depth of a queue."""
    name = call.queue_of(request, *_ANY)
    names = request.attribute_names or []
    for each in names:
        if each not in wire.READABLE:
            raise SqsFault.attribute_name(each)
    counted = any(each == "All" or each.startswith("Approximate") for each in names)
    spec = await call.spec(name)
    stats = await call.look(lambda broker: broker.stats(name)) if counted else None
    known = wire.attributes_of(spec, stats, call.sqs.arn)
    if "All" not in names:
        known = {each: known[each] for each in names if each in known}
    return {"Attributes": known} if known and names else {}


async def get_url(call: SqsCall, request: SqsRequest) -> Answer:
    """Find a queue by its name."""
    name = request.queue_name
    if not name:
        raise SqsFault.missing("QueueName")
    call.principal.check_any(_ANY, name)
    await call.spec(name)
    return {"QueueUrl": call.url_of(name)}


async def list_queues(call: SqsCall, request: SqsRequest) -> Answer:
    """List the queues that the caller may do something with."""
    prefix = request.queue_name_prefix or ""

    def read(broker: Broker) -> Answer:
        names = [spec.name for spec in broker.queues() if spec.name.startswith(prefix)]
        return _page(call, request, names, "QueueUrls")

    page = await call.look(read)
    return page if page["QueueUrls"] else {}


async def list_sources(call: SqsCall, request: SqsRequest) -> Answer:
    """List the queues whose failed messages go to a queue, as far as the caller may see them."""
    name = call.queue_of(request, *_ANY)

    def read(broker: Broker) -> Answer:
        specs = broker.queues()
        if not any(spec.name == name for spec in specs):
            raise QueueNotFound(name)
        sources = [spec.name for spec in specs if spec.dead_letter == name]
        return _page(call, request, sources, "queueUrls")

    return await call.look(read)


async def list_tags(call: SqsCall, request: SqsRequest) -> Answer:
    """Return a queue's tags."""
    spec = await call.spec(call.queue_of(request, *_ANY))
    tags = wire.tags_of(spec.labels)
    return {"Tags": tags} if tags else {}


async def _update(call: SqsCall, name: str, settings: dict[str, Any]) -> None:
    sqs = call.sqs
    now_s = sqs.clock.now_ms() // 1000
    settings["labels"] = {**settings["labels"], wire.CHANGED_LABEL: str(now_s)}
    spec = await call.change(lambda broker: broker.update_queue(name, **settings))
    sqs.queues.changed(name, spec)


def _check_same(sqs: SqsService, spec: QueueSpec, attributes: dict[str, str]) -> None:
    """Raise if a queue has other attributes than the requested ones."""
    known = wire.attributes_of(spec, None, sqs.arn)
    for name, value in attributes.items():
        if known.get(name, "false" if name == "FifoQueue" else "") != value:
            raise SqsFault(
                "QueueNameExists",
                "A queue already exists with the same name and a different value for attribute "
                f"{name}",
            )


async def _check_dead_letter(call: SqsCall, name: str, attributes: dict[str, str]) -> None:
    """Raise unless the queue that a RedrivePolicy names is there, is alike and allows it."""
    policy = wire.redrive_policy_of(attributes)
    if policy is None:
        return
    target = policy.dead_letter or ""
    check_target(call.principal, target)
    spec = await call.find(target)
    if spec is None:
        reason = "Dead letter target does not exist."
    elif (spec.ordering is Ordering.FIFO) != name.endswith(".fifo"):
        reason = "Dead-letter queue must be same type of queue as the source."
    elif not wire.allows_source(spec.labels, call.sqs.arn(name)):
        reason = "The dead-letter queue's RedriveAllowPolicy forbids it."
    else:
        return
    raise SqsFault.value(attributes["RedrivePolicy"], "RedrivePolicy", reason)


def _page(call: SqsCall, request: SqsRequest, names: list[str], field: str) -> Answer:
    """Answer with a page of the queues that the caller may see, out of sorted names; on a thread.

    The token of the next page is the last name of this one.
    """
    names = [name for name in names if any(call.principal.may(each, name) for each in _ANY)]
    most = request.max_results
    if most is not None:
        check_range(most, "MaxResults", 1, limits.SQS_MAX_LISTED)
    if token := request.next_token:
        try:
            after = b64decode(token.encode(), b"-_", validate=True).decode()
        except ValueError:
            raise SqsFault.value(token, "NextToken", "It comes from an answer.") from None
        names = [name for name in names if name > after]
    page = names[: most or limits.SQS_MAX_LISTED]
    answer: Answer = {field: [call.url_of(name) for name in page]}
    if most is not None and len(page) < len(names):
        answer["NextToken"] = urlsafe_b64encode(page[-1].encode()).decode()
    return answer


# --- move tasks: the messages of a dead letter queue go back, or elsewhere, in the background -----
#
# Tasks live in memory. A server that stops leaves the messages that were not moved, and the task
# has to be started again.


class MoveTask(msgspec.Struct, kw_only=True):
    """A move; ``destination`` is empty if each message goes back to where it came from.

    It goes on after its request, and stops at a queue that its principal may not send to.
    """

    handle: str
    source: str
    destination: str
    rate: int | None
    principal: Principal
    actor: Actor
    started_ms: int
    to_move: int = 0
    moved: int = 0
    status: str = "RUNNING"
    reason: str = ""
    work: asyncio.Task[None] | None = None

    @property
    def active(self) -> bool:
        """Whether it still moves messages."""
        return self.status in {"RUNNING", "CANCELLING"}


async def start_move(call: SqsCall, request: SqsRequest) -> Answer:
    """Begin to move messages of a dead letter queue."""
    sqs = call.sqs
    source, specs = await _source_of(call, request)
    destination = ""
    if request.destination_arn:
        destination = _name_in(request.destination_arn, "DestinationArn")
        check_target(call.principal, destination)
        _check_there(specs, destination, "DestinationArn")
    rate = request.max_number_of_messages_per_second
    if rate is not None:
        check_range(rate, "MaxNumberOfMessagesPerSecond", 1, limits.SQS_MAX_MOVES_PER_SECOND)
    origins = [spec.name for spec in specs.values() if spec.dead_letter == source]
    if not destination:
        _check_origins(call.principal, origins)
    if not origins:
        raise SqsFault.invalid("Source queue must be configured as a Dead Letter Queue.")
    if destination == source:
        raise SqsFault.invalid("Source queue arn and destination queue arn cannot be the same.")
    if destination and specs[destination].ordering is not specs[source].ordering:
        raise SqsFault.invalid("Source and destination must be of the same type of queue.")
    if any(each.source == source and each.active for each in sqs.moves.values()):
        raise SqsFault.invalid(
            "There is already a task running. Only one active task is allowed for a source "
            "queue arn at a given time."
        )
    task = MoveTask(
        handle=urlsafe_b64encode(sqs.clock.lease_id() + source.encode()).decode(),
        source=source,
        destination=destination,
        rate=rate,
        principal=call.principal,
        actor=call.actor,
        started_ms=sqs.clock.now_ms(),
    )
    sqs.moves[task.handle] = task
    ended = [handle for handle, each in sqs.moves.items() if not each.active]
    for handle in ended[: max(0, len(sqs.moves) - limits.SQS_MAX_MOVE_TASKS)]:
        del sqs.moves[handle]
    task.work = asyncio.get_running_loop().create_task(_run(sqs, task))
    return {"TaskHandle": task.handle}


async def cancel_move(call: SqsCall, request: SqsRequest) -> Answer:
    """Stop a move; messages that were moved stay there."""
    handle = request.task_handle
    if not handle:
        raise SqsFault.missing("TaskHandle")
    task = call.sqs.moves.get(handle)
    if task is None:
        raise _not_found("Task does not exist.")
    call.principal.check("admin", task.source)
    if not task.active:
        raise _not_found("Only active tasks can be cancelled.")
    task.status = "CANCELLING"
    return {"ApproximateNumberOfMessagesMoved": task.moved}


async def list_moves(call: SqsCall, request: SqsRequest) -> Answer:
    """List the moves out of a queue, the latest first."""
    source, _ = await _source_of(call, request)
    count = 1 if request.max_results is None else request.max_results
    check_range(count, "MaxResults", 1, 10)
    found = [each for each in call.sqs.moves.values() if each.source == source]
    return {"Results": [_shown(call.sqs, task) for task in reversed(found[-count:])]}


def _shown(sqs: SqsService, task: MoveTask) -> Answer:
    shown = {
        "Status": task.status,
        "SourceArn": sqs.arn(task.source),
        "ApproximateNumberOfMessagesMoved": task.moved,
        "ApproximateNumberOfMessagesToMove": task.to_move,
        "StartedTimestamp": task.started_ms,
        "TaskHandle": task.handle if task.active else None,
        "DestinationArn": sqs.arn(task.destination) if task.destination else None,
        "MaxNumberOfMessagesPerSecond": task.rate,
        "FailureReason": task.reason or None,
    }
    return {name: value for name, value in shown.items() if value is not None}


async def _source_of(call: SqsCall, request: SqsRequest) -> tuple[str, dict[str, QueueSpec]]:
    """Return the queue that messages are moved out of, and the specs of all queues."""
    source = _name_in(request.source_arn, "SourceArn")
    call.principal.check("admin", source)
    specs = await call.look(lambda broker: {each.name: each for each in broker.queues()})
    _check_there(specs, source, "SourceArn")
    return source, specs


def _name_in(arn: str | None, parameter: str) -> str:
    """Return the name in an ARN, whether or not there is such a queue."""
    if not arn:
        raise SqsFault.missing(parameter)
    name = wire.name_of_arn(arn)
    if name is None:
        raise SqsFault.value(arn, parameter, "It is not the ARN of a queue.")
    return name


def _not_found(message: str) -> SqsFault:
    return SqsFault("ResourceNotFoundException", message, status=404)


def _check_there(specs: Mapping[str, QueueSpec], name: str, parameter: str) -> None:
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


async def _run(sqs: SqsService, task: MoveTask) -> None:
    """Move in steps until all is moved that was there when the task began, or it is cancelled."""
    step, pause_s = _STEP, 0.0
    failure: Exception | None = None
    if task.rate is not None:
        step = max(1, task.rate // _STEPS_PER_SECOND)
        pause_s = step / task.rate
    try:
        stats = await sqs.batcher.call(lambda broker: broker.stats(task.source))
        task.to_move = stats.available
        while task.status == "RUNNING" and task.moved < task.to_move:
            limit = min(step, task.to_move - task.moved)
            moved = await sqs.batcher.call(partial(_step, task, limit))
            if not moved:
                break
            task.moved += moved
            await asyncio.sleep(pause_s)
        task.status = "CANCELLED" if task.status == "CANCELLING" else "COMPLETED"
    except asyncio.CancelledError:
        task.status = "CANCELLED"
        raise
    except Exception as error:
        failure, task.status, task.reason = error, "FAILED", str(error)
        if not isinstance(error, PenstockError):
            log.exception("a move out of queue %s failed", task.source)
            task.reason = "InternalError"
    finally:
        if sqs.batcher.audit is not None:
            about = {"queue": task.source, "to": task.destination, "task": task.status}
            sqs.batcher.audit.record(
                task.actor,
                "move",
                about,
                began_ms=task.started_ms,
                count=task.moved,
                error=failure,
            )


def _step(task: MoveTask, limit: int, broker: Broker) -> int:
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
                raise PenstockError("CouldNotDetermineMessageSource")
            (origin,) = sources
        by_origin.setdefault(origin, []).append(entry.message_id)
    _check_origins(task.principal, by_origin)
    return sum(
        broker.move(task.source, origin, state=State.AVAILABLE, message_ids=ids)
        for origin, ids in by_origin.items()
    )
