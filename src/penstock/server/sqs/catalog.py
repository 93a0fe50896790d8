"""What is known of the queues, without asking the broker for every request.

Whether a queue is there is for the broker to say when a message goes in or out; what is kept here
are its settings, which may be a second old if somebody changed them by other means than SQS.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from penstock.wire.sqs.faults import SqsFault
from penstock.wire.sqs.queues import QueueView, view_of

if TYPE_CHECKING:
    from penstock.model import QueueSpec
    from penstock.server.batcher import Desk

__all__ = ["Catalog"]

_FRESH_S: Final = 1.0


class Catalog:
    """The queues by name."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._views: dict[str, QueueView] = {}
        self._read_at = float("-inf")
        self._reading: asyncio.Task[list[QueueSpec]] | None = None

    async def view(self, name: str) -> QueueView:
        """Return what the verbs need to know of a queue."""
        view = self._views.get(name)
        if view is None:
            await self.specs()
            view = self._views.get(name)
            if view is None:
                raise SqsFault.no_queue()
        elif asyncio.get_running_loop().time() - self._read_at > _FRESH_S:
            self._start_reading()
        return view

    def known(self, name: str) -> QueueView | None:
        """Return a view that is fresh enough, without waiting; None if it takes a look."""
        if asyncio.get_running_loop().time() - self._read_at > _FRESH_S:
            self._start_reading()
        return self._views.get(name)

    async def specs(self) -> list[QueueSpec]:
        """Return the specs of all queues as they are now, by name."""
        return await asyncio.shield(self._start_reading())

    async def spec(self, name: str) -> QueueSpec:
        """Return the spec of a queue as it is now."""
        for spec in await self.specs():
            if spec.name == name:
                return spec
        raise SqsFault.no_queue()

    def learn(self, spec: QueueSpec) -> None:
        """Take note of a queue that was made or changed."""
        self._views[spec.name] = view_of(spec)
        self._outdate()

    def forget(self, name: str) -> None:
        """Take note that a queue is gone."""
        self._views.pop(name, None)
        self._outdate()

    def _outdate(self) -> None:
        # A look that began before the change must not bring back what was before it.
        self._reading = None
        self._read_at = float("-inf")

    def _start_reading(self) -> asyncio.Task[list[QueueSpec]]:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read())
            self._reading.add_done_callback(_retrieve)
        return self._reading

    async def _read(self) -> list[QueueSpec]:
        me = asyncio.current_task()
        specs = await self._desk.call(lambda broker: broker.queues())
        if self._reading is me:
            self._views = {spec.name: view_of(spec) for spec in specs}
            self._read_at = asyncio.get_running_loop().time()
        return specs


def _retrieve(task: asyncio.Task[list[QueueSpec]]) -> None:
    # Who waits for it gets the error; if nobody does, it is tried again with the next request.
    if not task.cancelled():
        task.exception()
