"""From a route to a place in queues: what inline routing and the pipeline have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.store.codec.metadata import decode_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engines import Batch
    from penstock.store.kv.queues import Queue
    from penstock.store.kv.state import Core
    from penstock.store.live import Item

__all__ = ["Placing"]


class Placing:
    """Puts messages into the queues that their routes name."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def place(
        self,
        batch: Batch,
        messages: Sequence[Item],
        routes: Sequence[Sequence[str]],
        now_ms: int,
        *,
        late: bool = False,
    ) -> list[Queue]:
        """Enqueue new messages and set their reference counts; return the queues touched."""
        core = self._core
        per_queue: dict[str, list[Item]] = {}
        unrouted: list[int] = []
        for message, names in zip(messages, routes, strict=True):
            if len(names) == 1:
                items = per_queue.get(names[0])
                if items is None:
                    per_queue[names[0]] = [message]
                else:
                    items.append(message)
                continue
            core.payloads.refer(batch, message.message_id, len(names))
            if not names:
                unrouted.append(message.message_id)
            for name in names:
                # Each queue has an item of its own: key, state and times differ between them.
                per_queue.setdefault(name, []).append(msgspec.structs.replace(message))
        if unrouted:
            core.log.note_unrouted(batch, unrouted)
            core.totals.unrouted += len(unrouted)
        touched = []
        for name, items in per_queue.items():
            queue = core.queue(name)
            touched.append(queue)
            self.enqueue(batch, queue, items, now_ms, late=late)
        return touched

    def enqueue(
        self,
        batch: Batch,
        queue: Queue,
        items: Sequence[Item],
        now_ms: int,
        *,
        late: bool = False,
    ) -> None:
        """Put messages into one queue; ``late`` if they may have been published before now."""
        core, delay_ms = self._core, queue.spec.delay_ms
        if delay_ms:
            heads = decode_heads([item.metadata for item in items])
            for item, head in zip(items, heads, strict=True):
                # A message's own delay counts if it has one; the queue's is the default.
                if head is not None and not head.delay_ms:
                    item.visible_at_ms = head.published_at_ms + delay_ms
        if late:
            for item in [each for each in items if each.visible_at_ms < now_ms]:
                item.visible_at_ms = now_ms
        core.active.add(batch, queue, items, now_ms)
        if queue.spec.unclaimed_retention_ms:
            core.note_unclaimed(batch, queue, items, [item.visible_at_ms for item in items])
        queue.counts.enqueued_total += len(items)
        core.wake(queue)
