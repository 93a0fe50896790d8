"""The operations on queues: made, changed, listed, tagged, purged, removed."""

from __future__ import annotations

import asyncio
from base64 import b64decode, urlsafe_b64encode
from typing import TYPE_CHECKING, Any, Final, cast

from penstock import limits
from penstock.model import Ordering, State
from penstock.server.security import check_target
from penstock.wire.sqs import policies, queues
from penstock.wire.sqs.faults import SqsFault
from penstock.wire.sqs.requests import (
    AddPermission,
    CreateQueue,
    DeleteQueue,
    GetQueueAttributes,
    GetQueueUrl,
    ListDeadLetterSourceQueues,
    ListQueues,
    ListQueueTags,
    PurgeQueue,
    RemovePermission,
    SetQueueAttributes,
    TagQueue,
    UntagQueue,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.model import QueueSpec, QueueStats
    from penstock.server.sqs.calls import Call, Place
    from penstock.wire.sqs.requests import SqsRequest

__all__ = ["Manager", "get_attributes", "get_url", "list_queues", "list_sources", "list_tags"]

# Publishers ask for a queue's URL and settings as well as consumers.
_ANY: Final = ("consume", "publish", "admin")


class Manager:
    """Changes of queues, one at a time: each reads what is there and writes it anew."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._purging: set[str] = set()
        self._purged_at_ms: dict[str, int] = {}

    # --- queues ------------------------------------------------------------------------------

    async def create(self, place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
        """Make a queue, or find that it is there with what is asked for."""
        request = cast(CreateQueue, request)
        name = queues.check_name(request.queue_name)
        call.principal.check("admin", name)
        fifo = name.endswith(".fifo")
        attributes = queues.checked_attributes(request.attributes or {}, fifo=fifo)
        if fifo and attributes.get("FifoQueue") != "true":
            raise SqsFault.invalid(
                "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in "
                "length; the suffix .fifo is for queues with the attribute FifoQueue."
            )
        tags = policies.checked_tags(request.tags or {}, name)
        async with self._turn:
            specs = await place.catalog.specs()
            present = next((spec for spec in specs if spec.name == name), None)
            if present is not None:
                _check_same(place, present, attributes)
                return {"QueueUrl": call.url_of(name)}
            _check_dead_letter(place, call, name, attributes, specs)
            settings = queues.new_queue(place.options.done_retention_ms)
            settings |= queues.settings_for(attributes, queues.with_tags({}, tags))
            ordering = Ordering.FIFO if fifo else Ordering.STANDARD
            spec = await place.desk.call(
                lambda broker: broker.create_queue(name, ordering=ordering, **settings)
            )
            place.catalog.learn(spec)
        return {"QueueUrl": call.url_of(name)}

    async def delete(self, place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
        """Remove a queue."""
        name = call.queue_of(cast(DeleteQueue, request))
        call.principal.check("admin", name)
        async with self._turn:
            await place.desk.call(lambda broker: broker.delete_queue(name), long=True)
            place.catalog.forget(name)
            self._purged_at_ms.pop(name, None)
        return {}

    async def purge(self, place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
        """Remove every message that is not deleted yet, in flight ones too."""
        name = call.queue_of(cast(PurgeQueue, request))
        call.principal.check("admin", name)
        await place.catalog.view(name)
        last_ms = self._purged_at_ms.get(name, -limits.SQS_PURGE_PAUSE_MS)
        paused = place.clock.now_ms() - last_ms < limits.SQS_PURGE_PAUSE_MS
        if paused or name in self._purging:
            raise SqsFault(
                "PurgeQueueInProgress",
                f"Only one PurgeQueue operation on {name} is allowed every 60 seconds.",
                status=403,
            )
        states = (State.AVAILABLE, State.DELAYED, State.IN_FLIGHT)
        self._purging.add(name)
        try:
            await place.desk.call(lambda broker: broker.purge(name, states=states), long=True)
        finally:
            self._purging.discard(name)
        self._purged_at_ms[name] = place.clock.now_ms()
        return {}

    # --- attributes, tags, permissions ---------------------------------------------------------

    async def set_attributes(self, place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
        """Change settings."""
        request = cast(SetQueueAttributes, request)
        name = call.queue_of(request)
        call.principal.check("admin", name)
        if not request.attributes:
            raise SqsFault.missing("Attributes")
        async with self._turn:
            specs = await place.catalog.specs()
            spec = _find(specs, name)
            fifo = spec.ordering is Ordering.FIFO
            attributes = queues.checked_attributes(request.attributes, fifo=fifo)
            if attributes.get("FifoQueue", "true" if fifo else "false") != str(fifo).lower():
                raise SqsFault.attribute_value("FifoQueue")
            _check_dead_letter(place, call, name, attributes, specs)
            settings = queues.settings_for(attributes, spec.labels)
            await _update(place, name, settings)
        return {}

    async def add_permission(self, place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
        """Add a statement to the queue's policy."""
        request = cast(AddPermission, request)
        name = call.queue_of(request)

        def change(labels: dict[str, str]) -> dict[str, str]:
            return policies.with_permission(
                labels, place.arn(name), request.label, request.aws_account_ids, request.actions
            )

        return await self._relabel(place, call, name, change)

    async def remove_permission(
        self, place: Place, call: Call, request: SqsRequest
    ) -> dict[str, Any]:
        """Take a statement out of the queue's policy."""
        request = cast(RemovePermission, request)
        return await self._relabel(
            place,
            call,
            call.queue_of(request),
            lambda labels: policies.without_permission(labels, request.label),
        )

    async def tag(self, place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
        """Add tags."""
        request = cast(TagQueue, request)
        name = call.queue_of(request)

        def change(labels: dict[str, str]) -> dict[str, str]:
            if not request.tags:
                raise SqsFault.missing("Tags")
            tags = {**queues.tags_of(labels), **request.tags}
            return queues.with_tags(labels, policies.checked_tags(tags, name))

        return await self._relabel(place, call, name, change)

    async def untag(self, place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
        """Remove tags; those that are not there do not matter."""
        request = cast(UntagQueue, request)
        gone = request.tag_keys

        def change(labels: dict[str, str]) -> dict[str, str]:
            if not gone:
                raise SqsFault.invalid("Tag keys must be between 1 and 128 characters in length.")
            tags = queues.tags_of(labels)
            return queues.with_tags(labels, {k: v for k, v in tags.items() if k not in gone})

        return await self._relabel(place, call, call.queue_of(request), change)

    async def _relabel(
        self,
        place: Place,
        call: Call,
        name: str,
        change: Callable[[dict[str, str]], dict[str, str]],
    ) -> dict[str, Any]:
        call.principal.check("admin", name)
        async with self._turn:
            spec = await place.catalog.spec(name)
            await _update(place, name, {"labels": change(dict(spec.labels))})
        return {}


async def get_attributes(place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
    """Return settings and depth."""
    request = cast(GetQueueAttributes, request)
    name = call.queue_of(request)
    call.principal.check_any(_ANY, name)
    names = queues.check_requested(request.attribute_names)
    counted = any(each == "All" or each.startswith("Approximate") for each in names)

    def look(broker: Broker) -> tuple[list[QueueSpec], QueueStats | None]:
        # The stats first: it is they who know that a queue is gone.
        stats = broker.stats(name) if counted else None
        return broker.queues(), stats

    specs, stats = await place.desk.call(look)
    spec = _find(specs, name)
    known = queues.attributes_of(spec, stats, place.options.region, place.options.account)
    if "All" not in names:
        known = {each: known[each] for each in names if each in known}
    return {"Attributes": known} if known and names else {}


async def get_url(place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
    """Find a queue by its name."""
    name = cast(GetQueueUrl, request).queue_name
    if not name:
        raise SqsFault.missing("QueueName")
    call.principal.check_any(_ANY, name)
    await place.catalog.spec(name)
    return {"QueueUrl": call.url_of(name)}


async def list_queues(place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
    """List the queues that the asker may do something with."""
    request = cast(ListQueues, request)
    prefix = request.queue_name_prefix or ""
    names = [
        spec.name
        for spec in await place.catalog.specs()
        if spec.name.startswith(prefix) and _may_see(call, spec.name)
    ]
    page, token = _page(names, request.next_token, request.max_results)
    answer: dict[str, Any] = {"QueueUrls": [call.url_of(name) for name in page]} if page else {}
    return answer | token


async def list_sources(place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
    """List the queues whose failed messages go to a queue, of those that the asker may know."""
    request = cast(ListDeadLetterSourceQueues, request)
    name = call.queue_of(request)
    call.principal.check_any(_ANY, name)
    specs = await place.catalog.specs()
    _find(specs, name)
    sources = [
        spec.name for spec in specs if spec.dead_letter == name and _may_see(call, spec.name)
    ]
    page, token = _page(sources, request.next_token, request.max_results)
    return {"queueUrls": [call.url_of(each) for each in page]} | token


async def list_tags(place: Place, call: Call, request: SqsRequest) -> dict[str, Any]:
    """Return a queue's tags."""
    name = call.queue_of(cast(ListQueueTags, request))
    call.principal.check_any(_ANY, name)
    tags = queues.tags_of((await place.catalog.spec(name)).labels)
    return {"Tags": tags} if tags else {}


def _may_see(call: Call, name: str) -> bool:
    return any(call.principal.may(action, name) for action in _ANY)


def _find(specs: list[QueueSpec], name: str) -> QueueSpec:
    for spec in specs:
        if spec.name == name:
            return spec
    raise SqsFault.no_queue()


async def _update(place: Place, name: str, settings: dict[str, Any]) -> None:
    now_s = place.clock.now_ms() // 1000
    settings["labels"] = {**settings["labels"], queues.CHANGED_LABEL: str(now_s)}
    spec = await place.desk.call(lambda broker: broker.update_queue(name, **settings))
    place.catalog.learn(spec)


def _check_same(place: Place, spec: QueueSpec, attributes: dict[str, str]) -> None:
    """Raise if a queue that is there differs in what is asked for."""
    known = queues.attributes_of(spec, None, place.options.region, place.options.account)
    for name, value in attributes.items():
        if known.get(name, "false" if name == "FifoQueue" else "") != value:
            raise SqsFault(
                "QueueNameExists",
                "A queue already exists with the same name and a different value for attribute "
                f"{name}",
            )


def _check_dead_letter(
    place: Place, call: Call, name: str, attributes: dict[str, str], specs: list[QueueSpec]
) -> None:
    """Raise unless the queue that a RedrivePolicy names is there, is alike and allows it."""
    target = queues.dead_letter_of(attributes)
    if target is None:
        return
    check_target(call.principal, target)
    policy = attributes["RedrivePolicy"]
    spec = next((spec for spec in specs if spec.name == target), None)
    if spec is None:
        raise SqsFault.value(policy, "RedrivePolicy", "Dead letter target does not exist.")
    if (spec.ordering is Ordering.FIFO) != name.endswith(".fifo"):
        raise SqsFault.value(
            policy,
            "RedrivePolicy",
            "Dead-letter queue must be same type of queue as the source.",
        )
    if not policies.allows_source(spec.labels, place.arn(name)):
        raise SqsFault.value(
            policy, "RedrivePolicy", "The dead-letter queue's RedriveAllowPolicy forbids it."
        )


def _page(
    names: list[str], token: str | None, max_results: int | None
) -> tuple[list[str], dict[str, str]]:
    """Cut a page out of sorted names; the token of the next is the last name of this one."""
    if max_results is not None and not 1 <= max_results <= limits.SQS_MAX_LISTED:
        raise SqsFault.value(
            max_results, "MaxResults", f"Must be between 1 and {limits.SQS_MAX_LISTED}."
        )
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
