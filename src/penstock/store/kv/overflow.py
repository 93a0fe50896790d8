"""Queues with limits: room for messages, and the fall of the oldest from a queue that is full.

A commit notes the queues that it leaves with more than they may have, if they drop their oldest;
publish and ``catch_up`` drop the excess in commits of their own, of bounded size. A store that was
closed in between notes such queues when it is opened.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError, StoreDamaged
from penstock.model import State
from penstock.store import room
from penstock.store.codec.metadata import decode_heads
from penstock.store.kv.state import Core, verb
from penstock.store.life import life, log_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.packing import PackedMessage
    from penstock.store.kv.queues import Queue
    from penstock.store.live import Item

log = logging.getLogger(__name__)

# Messages that one commit drops.
DROP_MESSAGES: Final = 1_000


class OverflowVerbs(Core):
    """The checks of limits, and the dropping of messages."""

    def check_published(
        self,
        messages: Sequence[PackedMessage],
        routes: Sequence[Sequence[str]],
        dedup_keys: Sequence[bytes],
        known: dict[bytes, int],
    ) -> None:
        """Refuse a publish whole if one of its queues has no room for what is new of it."""
        seen, keys = set(known), iter(dedup_keys)
        added: dict[str, list[int]] = {}
        for message, names in zip(messages, routes, strict=True):
            if message.dedup_id is not None:
                key = next(keys)
                if key in seen:
                    continue
                seen.add(key)
            for name in self.limited.intersection(names):
                added.setdefault(name, []).append(len(message.payload))
        for name, sizes in added.items():
            self.check_room(self.by_name[name], len(sizes), sum(sizes))

    def check_room(self, queue: Queue, messages: int, message_bytes: int) -> None:
        """Refuse messages that a queue has no room for."""
        room.check_room(queue.spec, *queue.counts.load, messages, message_bytes)

    @verb
    def drop_excess(self, now_ms: int, budget: int) -> int:
        """Let the oldest waiting messages of queues fail that are over a limit; return how many."""
        dropped = 0
        while dropped < budget and self.overfull:
            queue = self.by_number[next(iter(self.overfull))]
            try:
                items = self._excess(queue, min(DROP_MESSAGES, budget - dropped))
            except StoreDamaged as error:
                # Other queues do not wait for it, and a sweep tells of it.
                self.active.damage[queue.number] = error.anew()
                items = []
            if not items:
                # The messages left are in flight, or can't be read.
                self.overfull.discard(queue.number)
                continue
            batch = self.begin()
            self.active.remove(batch, queue, items)
            self.fail(batch, queue, items, room.drop_reason(queue.spec), now_ms)
            self.commit(batch, (queue,), now_ms)
            dropped += len(items)
            if life.level:
                ids = [item.message_id for item in items]
                log_step("fail", queue.name, ids, reason=room.drop_reason(queue.spec))
        return dropped

    def drop_if_possible(self, now_ms: int, published: int) -> None:
        """Drop after a publish: its messages are stored, whatever becomes of others."""
        try:
            self.drop_excess(now_ms, max(DROP_MESSAGES, published))
        except PenstockError as error:
            # A sweep tries again, and tells of it.
            log.warning("queues are over their limits after a publish: %s", error)

    def _excess(self, queue: Queue, limit: int) -> list[Item]:
        """Return the oldest waiting messages that must go, up to a limit."""
        spec, counts = queue.spec, queue.counts
        items = self.active.oldest(queue, min(limit, room.guess_excess(spec, *counts.load)))
        heads = decode_heads([item.metadata for item in items])
        sizes = [0 if head is None else head.size for head in heads]
        return items[: room.count_excess(spec, *counts.load, sizes)]

    @verb
    def recount_lost(self, now_ms: int, budget: int) -> None:  # noqa: ARG002 - a part of sweeps
        """Count the bytes of all queues after records were put aside: nobody knows their sizes."""
        if self.has_lost:
            self.has_lost = False
            queues = [self.by_name[name] for name in self.limited]
            for queue in queues:
                self.recount_bytes(queue)
            self.commit(self.begin(), queues, now_ms)

    def recount_bytes(self, queue: Queue) -> None:
        """Count the bytes of a queue that may have ``max_bytes``: reads all its messages.

        Called while nothing of the queue is about to be written.
        """
        total = 0
        states = (State.AVAILABLE, State.DELAYED, State.IN_FLIGHT) if queue.spec.max_bytes else ()
        for state in states:
            after: bytes | None = b""
            while after is not None:
                items, after = self.active.page(queue, state, after, DROP_MESSAGES)
                heads = decode_heads([item.metadata for item in items])
                total += sum(head.size for head in heads if head is not None)
        queue.counts.live_bytes = total
