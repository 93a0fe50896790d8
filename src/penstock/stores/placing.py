"""From a route to a place in queues: what inline routing and the pipeline have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from penstock.stores.active import Item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.kv import Batch
    from penstock.stores.core import Core
    from penstock.stores.queues import Queue

__all__ = ["Placed", "Placing"]

# Message id, lane, visible at, metadata.
Placed: TypeAlias = tuple[int, bytes, int, bytes]


class Placing:
    """Puts messages into the queues that their routes name."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def place(
        self,
        batch: Batch,
        messages: Sequence[Placed],
        routes: Sequence[Sequence[str]],
        now_ms: int,
    ) -> list[Queue]:
        """Enqueue new messages and set their reference counts; return the queues touched."""
        core = self._core
        per_queue: dict[str, list[Item]] = {}
        unrouted: list[int] = []
        for (message_id, lane, visible_at_ms, metadata), names in zip(
            messages, routes, strict=True
        ):
            for name in names:
                item = Item(message_id, message_id, lane, 0, 0, visible_at_ms, metadata)
                items = per_queue.get(name)
                if items is None:
                    per_queue[name] = [item]
                else:
                    items.append(item)
            if len(names) != 1:
                core.payloads.refer(batch, message_id, len(names))
                if not names:
                    unrouted.append(message_id)
        if unrouted:
            core.log.note_unrouted(batch, unrouted)
            core.totals.unrouted += len(unrouted)
        touched = []
        for name, items in per_queue.items():
            queue = core.queue(name)
            touched.append(queue)
            self.enqueue(batch, queue, items, now_ms)
        return touched

    def enqueue(self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int) -> None:
        """Put messages into one queue."""
        core, delay_ms = self._core, queue.spec.delay_ms
        if delay_ms:
            for item in items:
                # A message's own delay counts if it has one; the queue's is the default.
                if item.visible_at_ms <= now_ms:
                    item.visible_at_ms = now_ms + delay_ms
        core.active.add(batch, queue, items, now_ms)
        if queue.spec.unclaimed_retention_ms:
            core.note_unclaimed(batch, queue, items, [item.visible_at_ms for item in items])
        queue.counts.enqueued_total += len(items)
        core.wake(queue)
