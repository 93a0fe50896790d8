"""Messages come in: publish, from a route to a place in queues, and the limits of queues.

A commit notes the queues that it leaves with more than they may have, if they drop their oldest;
publish and ``catch_up`` drop the excess in commits of their own, of bounded size. A store that was
closed in between notes such queues when it is opened.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from itertools import chain, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.errors import PenstockError, StoreDamaged
from penstock.model import State
from penstock.packing import metadata_head
from penstock.store import policy
from penstock.store.codec.metadata import decode_heads
from penstock.store.codec.opendata import PAYLOAD
from penstock.store.kv.state import Core, verb
from penstock.store.life import life, log_routes, log_step
from penstock.store.live import Item, lane_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engines import Batch
    from penstock.packing import Envelope, PackedMessage
    from penstock.store.kv.queues import Queue

log = logging.getLogger(__name__)

# Messages that one commit drops.
DROP_MESSAGES: Final = 1_000
_log_row: Final = attrgetter("message_id", "metadata")


class PublishVerbs(Core):
    """``publish``, the two steps that it shares with routing and backfill, and limits."""

    @verb
    def publish(
        self,
        messages: Sequence[PackedMessage],
        routes: Sequence[Sequence[str]] | None,
        *,
        dedup_window_ms: int,
        now_ms: int,
        routed_at: int | None = None,  # noqa: ARG002 - filters do not change meanwhile
    ) -> list[int]:
        """Store messages and put each into the queues that ``routes`` names for it.

        Without routes they go into the log alone, for a tailer to route.
        """
        payload_bytes = 0
        dedup_keys: list[bytes] = []
        for message in messages:
            payload_bytes += len(message.payload)
            if message.dedup_id is not None:
                key = self.dedup.key(message.envelope.attributes, message.dedup_id)
                dedup_keys.append(key)
        known = self.dedup.known(dedup_keys, now_ms) if dedup_keys else {}
        if self.limited and routes is not None:
            self.check_published(messages, routes, dedup_keys, known)
        batch = self.begin(len(messages), payload_bytes)
        keys_left = iter(dedup_keys)
        fresh: dict[bytes, int] = {}
        first_id = next_id = self.log.ids.allocate(batch, len(messages))
        put, payloads = batch.put, self.payloads.table.family
        ids: list[int] = []
        placed: list[Item] = []
        taken: list[Sequence[str]] = []
        groups: list[str] = []
        spread = self.log.settings.changes[-1][1] > 1
        head = metadata_head(now_ms)
        last: Envelope | None = None
        size, metadata, lane, visible_at_ms = -1, b"", b"", now_ms
        routed = repeat((), len(messages)) if routes is None else routes
        for message, names in zip(messages, routed, strict=True):
            if message.dedup_id is not None:
                dedup_key = next(keys_left)
                known_id = known.get(dedup_key)
                if known_id is not None:
                    self.totals.duplicates += 1
                    ids.append(known_id)
                    continue
                known[dedup_key] = fresh[dedup_key] = next_id
            payload, envelope = message.payload, message.envelope
            # Messages that follow one another often have these in common.
            if envelope is not last or len(payload) != size:
                last, size = envelope, len(payload)
                metadata = envelope.metadata(head, size)
                lane = lane_of(envelope.group, envelope.priority)
                visible_at_ms = now_ms + envelope.delay_ms
            put(PAYLOAD + next_id.to_bytes(8, "big"), payload, payloads)
            ids.append(next_id)
            placed.append(Item(next_id, next_id, lane, 0, 0, visible_at_ms, metadata))
            taken.append(names)
            if spread:
                groups.append(envelope.group)
            next_id += 1
        if fresh:
            self.dedup.remember(batch, fresh, now_ms + dedup_window_ms)
        touched: list[Queue] = []
        if placed:
            among = None if routes is None else taken
            rows = list(map(_log_row, placed))
            self.log.append(batch, rows, groups, among, self.fifo, now_ms)
            if routes is not None:
                touched = self.place(batch, placed, taken, now_ms)
        self.totals.published += next_id - first_id
        # Ids that duplicates did not need go back: the log would seem to have messages there.
        self.log.ids.next = next_id
        self.put_totals(batch, now_ms)
        self.commit(batch, touched, now_ms)
        if life.level:
            log_routes("publish", [item.message_id for item in placed], taken)
        if self.overfull:
            self.drop_if_possible(now_ms, len(messages))
        return ids

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
        per_queue: defaultdict[str, list[Item]] = defaultdict(list)
        unrouted: list[int] = []
        for message, names in zip(messages, routes, strict=True):
            if len(names) == 1:
                per_queue[names[0]].append(message)
                continue
            self.payloads.refer(batch, message.message_id, len(names))
            if not names:
                unrouted.append(message.message_id)
            for name in names:
                # Each queue has an item of its own: key, state and times differ between them.
                per_queue[name].append(msgspec.structs.replace(message))
        if unrouted:
            self.log.note_unrouted(batch, unrouted)
            self.totals.unrouted += len(unrouted)
        touched = []
        for name, items in per_queue.items():
            queue = self.by_name.get(name) or self.queue(name)
            touched.append(queue)
            self.enqueue(batch, queue, items, now_ms, late=late)
        return touched

    def enqueue(
        self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int, *, late: bool = False
    ) -> None:
        """Put messages into one queue; ``late`` if they may have been published before now."""
        delay_ms = queue.spec.delay_ms
        if delay_ms:
            heads = decode_heads([item.metadata for item in items])
            for item, head in zip(items, heads, strict=True):
                # A message's own delay counts if it has one; the queue's is the default.
                if head is not None and not head.delay_ms:
                    item.visible_at_ms = head.published_at_ms + delay_ms
        if late:
            for item in items:
                item.visible_at_ms = max(item.visible_at_ms, now_ms)
        self.active.add(batch, queue, items, now_ms)
        if queue.spec.unclaimed_retention_ms:
            self.note_unclaimed(batch, queue, items)
        queue.counts.enqueued_total += len(items)
        self.woken.add(queue.name)

    def take_woken(self) -> dict[str, int | None]:
        """Return the queues that may have something to claim since the last call."""
        woken: dict[str, int | None] = {}
        for name in self.woken:
            queue = self.by_name.get(name)
            woken[name] = None if queue is None else queue.counts.available
        self.woken.clear()
        return woken

    # --- limits ------------------------------------------------------------------------------

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
            self.check_room(self.by_name[name], len(sizes), sum(sizes), largest=max(sizes))

    def check_room(
        self,
        queue: Queue,
        messages: int,
        message_bytes: int,
        *,
        largest: int = 0,
        older: bool = False,
    ) -> None:
        """Refuse messages that a queue with limits has no room for."""
        load = queue.counts.load
        policy.check_room(queue.spec, *load, messages, message_bytes, largest=largest, older=older)

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
            self.fail(batch, queue, items, policy.drop_reason(queue.spec), now_ms)
            self.commit(batch, (queue,), now_ms)
            dropped += len(items)
            if life.level:
                ids = [item.message_id for item in items]
                log_step("fail", queue.name, ids, reason=policy.drop_reason(queue.spec))
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
        items = self.active.oldest(queue, min(limit, policy.guess_excess(spec, *counts.load)))
        heads = decode_heads([item.metadata for item in items])
        sizes = [0 if head is None else head.size for head in heads]
        return items[: policy.count_excess(spec, *counts.load, sizes)]

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
        for items in chain.from_iterable(self.live_pages(queue, state) for state in states):
            heads = decode_heads([item.metadata for item in items])
            total += sum(head.size for head in heads if head is not None)
        queue.counts.live_bytes = total
