"""Messages come in and go out to workers: publish and claim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.codec.metadata import Metadata, decode_metadata, encode_metadata
from penstock.codec.opendata import payload_key
from penstock.errors import CorruptRecord
from penstock.model import Delivery
from penstock.stores.active import Item, lane_of
from penstock.stores.leases import family_of
from penstock.stores.receipts import lease_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.kv import Batch
    from penstock.model import Message
    from penstock.stores.core import Core
    from penstock.stores.queues import Queue
    from penstock.stores.upkeep import Upkeep

__all__ = ["Intake"]

# How much that has come due one claim will see to before it takes its messages.
CATCH_UP_BUDGET: Final = 1_000


class Intake:
    """Publish and claim."""

    def __init__(self, core: Core, upkeep: Upkeep) -> None:
        self._core = core
        self._upkeep = upkeep

    # --- publish -------------------------------------------------------------------------

    def publish(
        self,
        messages: Sequence[Message],
        routes: Sequence[Sequence[str]],
        *,
        dedup_window_ms: int,
        now_ms: int,
    ) -> list[int]:
        """Store messages and put each into the queues that ``routes`` names for it."""
        batch = self._core.engine.batch()
        dedup_keys = self._core.dedup.keys(messages)
        wanted = [key for key in dedup_keys if key is not None]
        known = self._core.dedup.known(wanted, now_ms) if wanted else {}
        fresh: dict[bytes, int] = {}
        first_id = next_id = self._core.message_ids.allocate(batch, len(messages))
        totals = self._core.totals
        put, payloads = batch.put, self._core.payloads.family
        per_queue: dict[str, list[Item]] = {}
        ids: list[int] = []
        for message, dedup_key, names in zip(messages, dedup_keys, routes, strict=True):
            if dedup_key is not None:
                known_id = known.get(dedup_key)
                if known_id is not None:
                    totals.duplicates += 1
                    ids.append(known_id)
                    continue
                known[dedup_key] = fresh[dedup_key] = next_id
            message_id = next_id
            next_id += 1
            ids.append(message_id)
            payload = message.payload
            priority = message.priority
            group = message.group
            delay_ms = message.delay_ms
            attributes = message.attributes
            if not isinstance(attributes, dict):
                attributes = dict(attributes)
            metadata = encode_metadata(
                Metadata(now_ms, group, priority, len(payload), delay_ms, attributes)
            )
            put(payload_key(message_id), payload, payloads)
            lane = lane_of(group, priority)
            visible_at = now_ms + delay_ms
            for name in names:
                item = Item(message_id, message_id, lane, 0, 0, visible_at, metadata)
                items = per_queue.get(name)
                if items is None:
                    per_queue[name] = [item]
                else:
                    items.append(item)
            if len(names) != 1:
                if names:
                    self._core.payloads.refer(batch, message_id, len(names))
                else:
                    totals.unrouted += 1
        if fresh:
            self._core.dedup.remember(batch, fresh, now_ms + dedup_window_ms)
        touched = []
        for name, items in per_queue.items():
            queue = self._core.queue(name)
            touched.append(queue)
            self._enqueue(batch, queue, items, now_ms)
        totals.published += next_id - first_id
        self._core.put_totals(batch, now_ms)
        self._core.commit(batch, touched, now_ms)
        return ids

    def _enqueue(self, batch: Batch, queue: Queue, items: list[Item], now_ms: int) -> None:
        delay_ms = queue.spec.delay_ms
        if delay_ms:
            for item in items:
                # A message's own delay counts if it has one; the queue's is the default.
                if item.visible_at_ms == now_ms:
                    item.visible_at_ms += delay_ms
        self._core.active.add(batch, queue, items, now_ms)
        self._core.note_unclaimed(batch, queue, items, [item.visible_at_ms for item in items])
        queue.counts.enqueued_total += len(items)
        self._core.wake(queue)

    # --- claim ---------------------------------------------------------------------------

    def claim(
        self,
        queue_name: str,
        *,
        limit: int,
        lease_ms: int,
        consumer: str,
        lease: bytes,
        now_ms: int,
    ) -> list[Delivery]:
        """Take up to ``limit`` messages under a new lease."""
        queue = self._core.queue(queue_name)
        self._upkeep.catch_up(now_ms, CATCH_UP_BUDGET)
        if not self._core.active.ready_groups(queue):
            return []
        batch = self._core.engine.batch()
        lease = family_of(lease) + b"\0\0"
        deadline_ms = now_ms + lease_ms
        items = self._core.active.take(batch, queue, limit, lease, deadline_ms, now_ms)
        deliveries = self._deliver(batch, queue, items, lease, deadline_ms)
        if deliveries:
            self._core.leases.put(
                batch,
                lease,
                keys=[item.key.to_bytes(8, "big") for item in items],
                deadline_ms=deadline_ms,
                claimed_at_ms=now_ms,
                queue=queue.number,
                consumer=consumer,
            )
            queue.counts.claimed_total += len(deliveries)
        if len(batch) or self._core.has_aside:
            self._core.commit(batch, (queue,), now_ms)
        return deliveries

    def _deliver(
        self, batch: Batch, queue: Queue, items: list[Item], lease: bytes, deadline_ms: int
    ) -> list[Delivery]:
        """Read payloads and make deliveries; what can't be delivered is removed from ``items``."""
        name = queue.name
        token = lease_token(self._core.identity.store_id, queue.number, lease)
        payloads = self._core.payloads.get([item.message_id for item in items]) if items else []
        deliveries: list[Delivery] = []
        broken: list[Item] = []
        for item, payload in zip(items, payloads, strict=True):
            try:
                if payload is None:
                    raise CorruptRecord("the payload is missing")  # noqa: TRY301
                metadata = decode_metadata(item.metadata)
            except CorruptRecord as error:
                self._core.quarantine(
                    "payloads", payload_key(item.message_id), payload or b"", str(error)
                )
                broken.append(item)
                continue
            deliveries.append(
                Delivery(
                    item.message_id,
                    name,
                    payload,
                    metadata.attributes,
                    metadata.group,
                    metadata.priority,
                    item.attempts,
                    metadata.published_at_ms,
                    f"{token}-{item.key:016x}",
                    deadline_ms,
                )
            )
        if broken:
            self._core.active.settle(batch, queue, broken)
            queue.counts.removed_total += len(broken)
            items[:] = [item for item in items if item not in broken]
        return deliveries
