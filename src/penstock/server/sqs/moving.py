"""Message move tasks: what is in a dead letter queue goes back, or elsewhere, in the background.

Tasks live in memory. A server that stops leaves what was not moved where it was, and the task has
to be started again.
"""

from __future__ import annotations

import asyncio
import logging
from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from penstock import limits
from penstock.errors import NotAllowed, PenstockError
from penstock.model import State
from penstock.server.security import Principal, check_target
from penstock.wire.sqs.faults import SqsFault
from penstock.wire.sqs.queues import name_of_arn
from penstock.wire.sqs.requests import (
    CancelMessageMoveTask,
    ListMessageMoveTasks,
    StartMessageMoveTask,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.broker.broker import Broker
    from penstock.model import QueueSpec
    from penstock.server.sqs.calls import Call, Place
    from penstock.wire.sqs.requests import SqsRequest

__all__ = ["Mover"]

log = logging.getLogger(__name__)

_STEP: Final = 100
_STEPS_PER_SECOND: Final = 10
_NO_SOURCE: Final = "CouldNotDetermineMessageSource"


class _Task(msgspec.Struct, kw_only=True):
    """A move; ``destination`` is empty if each message goes back to where it came from.

    It goes on after its request, and stops where whoever asked for it may not send messages to.
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


class Mover:
    """The tasks, by handle, the oldest first."""

    def __init__(self) -> None:
        self._tasks: dict[str, _Task] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def start(self, place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
        """Begin to move."""
        request = cast(StartMessageMoveTask, request)
        source = _named(request.source_arn, "SourceArn")
        call.principal.check("admin", source)
        destination = ""
        if request.destination_arn:
            destination = _named(request.destination_arn, "DestinationArn")
            check_target(call.principal, destination)
        specs = {spec.name: spec for spec in await place.catalog.specs()}
        _check_there(specs, source, "SourceArn")
        if destination:
            _check_there(specs, destination, "DestinationArn")
        rate = request.max_number_of_messages_per_second
        if rate is not None and not 1 <= rate <= limits.SQS_MAX_MOVES_PER_SECOND:
            raise SqsFault.value(
                rate,
                "MaxNumberOfMessagesPerSecond",
                f"Must be between 1 and {limits.SQS_MAX_MOVES_PER_SECOND}.",
            )
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
            handle=urlsafe_b64encode(place.clock.lease_id() + source.encode()).decode(),
            source=source,
            destination=destination,
            rate=rate,
            principal=call.principal,
            started_ms=place.clock.now_ms(),
        )
        self._keep(task)
        running = asyncio.get_running_loop().create_task(_run(place, task))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return {"TaskHandle": task.handle}

    async def cancel(self, place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:  # noqa: ARG002
        """Stop a move; what was moved stays moved."""
        handle = cast(CancelMessageMoveTask, request).task_handle
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

    async def list(self, place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
        """List the moves out of a queue, the latest first."""
        request = cast(ListMessageMoveTasks, request)
        source = _named(request.source_arn, "SourceArn")
        call.principal.check("admin", source)
        specs = {spec.name: spec for spec in await place.catalog.specs()}
        _check_there(specs, source, "SourceArn")
        count = 1 if request.max_results is None else request.max_results
        if not 1 <= count <= 10:
            raise SqsFault.value(count, "MaxResults", "Must be between 1 and 10.")
        found = [each for each in self._tasks.values() if each.source == source]
        return {"Results": [_shown(place, task) for task in reversed(found[-count:])]}

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
    """Return the name in an ARN; whether there is such a queue is told only who may use it."""
    if not arn:
        raise SqsFault.missing(parameter)
    name = name_of_arn(arn)
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


def _shown(place: Place, task: _Task) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "Status": task.status,
        "SourceArn": place.arn(task.source),
        "ApproximateNumberOfMessagesMoved": task.moved,
        "ApproximateNumberOfMessagesToMove": task.to_move,
        "StartedTimestamp": task.started_ms,
    }
    if _active(task):
        shown["TaskHandle"] = task.handle
    if task.destination:
        shown["DestinationArn"] = place.arn(task.destination)
    if task.rate is not None:
        shown["MaxNumberOfMessagesPerSecond"] = task.rate
    if task.reason:
        shown["FailureReason"] = task.reason
    return shown


async def _run(place: Place, task: _Task) -> None:
    """Move in steps until all is moved that was there when the task began, or it is cancelled."""
    step, pause_s = _STEP, 0.0
    if task.rate is not None:
        step = max(1, task.rate // _STEPS_PER_SECOND)
        pause_s = step / task.rate
    try:
        stats = await place.desk.call(lambda broker: broker.stats(task.source))
        task.to_move = stats.available
        while task.status == "RUNNING" and task.moved < task.to_move:
            limit = min(step, task.to_move - task.moved)
            moved = await place.desk.call(lambda broker, limit=limit: _step(broker, task, limit))  # type: ignore[misc]
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
    """Nobody knows where a message came from."""


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
        # Where it was sent to; what was published by attributes goes to the only possible source.
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
