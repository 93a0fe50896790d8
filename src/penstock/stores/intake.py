"""Messages come in and go out to workers: publish and claim."""

from __future__ import annotations

from itertools import repeat
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
    from penstock.stores.placing import Placing
    from penstock.stores.queues import Queue
    from penstock.stores.upkeep import Upkeep

__all__ = ["Intake"]

# How much that has come due one claim will see to before it takes its messages.
CATCH_UP_BUDGET: Final = 1_000


class Intake:
    """Publish and claim."""

    def __init__(self, core: Core, upkeep: Upkeep, placing: Placing) -> None:
        self._core = core
        self._upkeep = upkeep
        self._placing = placing

    # --- publish -------------------------------------------------------------------------

    def publish(
        self,
        messages: Sequence[Message],
        routes: Sequence[Sequence[str]] | None,
        *,
        dedup_window_ms: int,
        now_ms: int,
    ) -> list[int]:
        """Store messages and put each into the queues that ``routes`` names for it.

        Without routes they go into the log alone, for a tailer to route.
        """
        core = self._core
        batch = core.engine.batch()
        dedup_keys = core.dedup.keys(messages)
        wanted = [key for key in dedup_keys if key is not None]
        known = core.dedup.known(wanted, now_ms) if wanted else {}
        fresh: dict[bytes, int] = {}
        first_id = next_id = core.log.ids.allocate(batch, len(messages))
        put, payloads = batch.put, core.payloads.family
        ids: list[int] = []
        placed: list[Item] = []
        rows: list[tuple[int, bytes]] = []
        taken: list[Sequence[str]] = []
        groups: list[str] = []
        routed = repeat((), len(messages)) if routes is None else routes
        for message, dedup_key, names in zip(messages, dedup_keys, routed, strict=True):
            if dedup_key is not None:
                known_id = known.get(dedup_key)
                if known_id is not None:
                    core.totals.duplicates += 1
                    ids.append(known_id)
                    continue
                known[dedup_key] = fresh[dedup_key] = next_id
            payload, attributes = message.payload, message.attributes
            group, priority, delay_ms = message.group, message.priority, message.delay_ms
            if not isinstance(attributes, dict):
                attributes = dict(attributes)
            metadata = encode_metadata(
                Metadata(now_ms, group, priority, len(payload), delay_ms, attributes)
            )
            put(payload_key(next_id), payload, payloads)
            ids.append(next_id)
            rows.append((next_id, metadata))
            lane = lane_of(group, priority)
            placed.append(Item(next_id, next_id, lane, 0, 0, now_ms + delay_ms, metadata))
            taken.append(names)
            groups.append(group)
            next_id += 1
        if fresh:
            core.dedup.remember(batch, fresh, now_ms + dedup_window_ms)
        touched: list[Queue] = []
        if placed:
            core.log.append(batch, rows, groups, now_ms)
            if routes is not None:
                touched = self._placing.place(batch, placed, taken, now_ms)
        core.totals.published += next_id - first_id
        core.put_totals(batch, now_ms)
        core.commit(batch, touched, now_ms)
        return ids

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
        items: list[Item] = []
        deliveries: list[Delivery] = []
        while len(items) < limit:
            taken = self._core.active.take(
                batch, queue, limit - len(items), lease, deadline_ms, now_ms
            )
            if not taken:
                break
            deliveries += self._deliver(batch, queue, taken, lease, deadline_ms)
            items += taken
            if not self._core.active.ready_groups(queue):
                break
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
                # A copy of what this queue had; other queues may hold a good one.
                key = queue.id + b"\0" + item.message_id.to_bytes(8, "big")
                self._core.quarantine("messages", key, item.metadata, str(error), remove=False)
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
            self._upkeep.forget(batch, queue, broken)
            items[:] = [item for item in items if item not in broken]
        return deliveries
