"""Messages come in and go out to workers: publish and claim."""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING, Final

from penstock import limits
from penstock.errors import CorruptRecord, StoreDamaged
from penstock.model import Delivery
from penstock.store.codec.metadata import Metadata, decode_heads, decode_metadata, encode_metadata
from penstock.store.codec.opendata import payload_key
from penstock.store.kv.leases import family_of
from penstock.store.live import Item, group_of, lane_of, uncount_attempt
from penstock.store.receipts import lease_token

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.engines import Batch
    from penstock.model import Message
    from penstock.store.kv.maintain import Upkeep
    from penstock.store.kv.placing import Placing
    from penstock.store.kv.queues import Queue
    from penstock.store.kv.state import Core
    from penstock.store.live import Grant
    from penstock.store.plans import Want

__all__ = ["Intake"]

# How much that has come due one claim will see to before it takes its messages.
CATCH_UP_BUDGET: Final = 1_000
# How many messages that can't be read one claim will pass over to find some that can.
UNREAD_BUDGET: Final = 1_000


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
        batch = core.batch_of_new(len(messages), sum([len(each.payload) for each in messages]))
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

    def claim(self, queue_name: str, wants: Sequence[Want], now_ms: int) -> list[list[Delivery]]:
        """Take messages for several claims in one scan and one commit, each under its own lease.

        They are served in order: those at the end may get nothing. A message that can't be read is
        passed over. That there is nothing is said only by who has read all that there may be.
        """
        unseen = None
        try:
            self._core.run(self._upkeep.catch_up, now_ms, CATCH_UP_BUDGET)
        except StoreDamaged as error:
            # Some of what has come due may not have come back.
            unseen = error
        queue = self._core.queue(queue_name)
        unseen = unseen if queue.counts.in_flight or queue.counts.delayed else None
        unseen = unseen or self._core.active.damage.get(queue.number)
        if not self._core.active.ready_groups(queue):
            if unseen is not None:
                raise unseen.anew()
            return [[] for _ in wants]
        claims, unread = self._serve(queue, wants, now_ms)
        passed = 0
        while unread and passed < UNREAD_BUDGET and not any(claim.deliveries for claim in claims):
            # Messages behind the unreadable ones may be readable.
            passed += len(unread)
            unseen = unread[0]
            claims, unread = self._serve(queue, wants, now_ms)
        if not any(claim.deliveries for claim in claims):
            unseen = unseen or self._core.active.damage.get(queue.number)
            if unseen is not None:
                raise unseen.anew()
        return [claim.deliveries for claim in claims]

    def _serve(
        self, queue: Queue, wants: Sequence[Want], now_ms: int
    ) -> tuple[list[_Claim], list[StoreDamaged]]:
        """Take messages; give the claims, and why some messages were passed over."""
        batch = self._core.begin()
        claims = [_Claim(want, now_ms) for want in wants]
        # A group of a FIFO queue is in one lease at a time, so that claims can't share a scan.
        for together in [[claim] for claim in claims] if queue.fifo else [claims]:
            self._take(batch, queue, together, now_ms)
        for claim in claims:
            if claim.deliveries:
                self._core.leases.put(
                    batch,
                    claim.lease,
                    keys=claim.keys,
                    deadline_ms=claim.deadline_ms,
                    claimed_at_ms=now_ms,
                    queue=queue.number,
                    consumer=claim.want.consumer,
                )
                queue.counts.claimed_total += len(claim.deliveries)
        if len(batch) or self._core.has_aside:
            self._core.commit(batch, (queue,), now_ms)
        return claims, self._core.take_unread(queue)

    def _take(self, batch: Batch, queue: Queue, claims: Sequence[_Claim], now_ms: int) -> None:
        """Take until the claims have what they want, or all that they may, or there is no more."""
        active = self._core.active
        while room := sum(claim.room for claim in claims):
            grants = chain.from_iterable(claim.grants for claim in claims)
            taken = active.take(batch, queue, room, grants, now_ms)
            if not taken:
                return
            kept = self._within_bounds(batch, queue, taken, claims, now_ms)
            self._deliver(batch, queue, kept, claims, now_ms)
            # What was put back stands before what this batch has taken: it can't be taken from.
            if len(kept) < len(taken) or active.unread or not active.ready_groups(queue):
                return

    def _within_bounds(
        self,
        batch: Batch,
        queue: Queue,
        taken: Sequence[Item],
        claims: Sequence[_Claim],
        now_ms: int,
    ) -> Sequence[Item]:
        """Put back what is too much for one answer, before any payload is read; give the rest."""
        sizes = [
            0 if head is None else head.size
            for head in decode_heads([item.metadata for item in taken])
        ]
        together = sum(claim.bytes for claim in claims)
        if together + sum(sizes) < limits.MAX_CLAIM_BYTES:
            return taken
        by_lease = {claim.lease: claim for claim in claims}
        kept, excess = [], []
        for item, size in zip(taken, sizes, strict=True):
            claim = by_lease[item.lease]
            if claim.full or together >= limits.MAX_JOINT_CLAIM_BYTES:
                claim.full = True
                excess.append(item)
            else:
                kept.append(item)
                together += size
                claim.bytes += size
                claim.full = claim.bytes >= limits.MAX_CLAIM_BYTES
        if excess:
            self._put_back(batch, queue, excess, now_ms)
            # Others that wait are to look again.
            self._core.wake(queue)
        return kept

    def _put_back(self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int) -> None:
        """Put messages back as if they had not been taken."""
        for item in items:
            uncount_attempt(item)
        self._core.active.put_back(batch, queue, items, now_ms)

    def _read(
        self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int
    ) -> Iterable[tuple[Item, bytes | None]]:
        """Read payloads; what can't be read is put back, and passed over from now on."""
        payloads = self._core.payloads.get_each([item.message_id for item in items])
        if StoreDamaged not in map(type, payloads):
            return zip(items, payloads, strict=True)  # type: ignore[arg-type]
        read: list[tuple[Item, bytes | None]] = []
        unread: list[Item] = []
        behind: list[Item] = []
        groups: set[bytes] = set()
        for item, payload in zip(items, payloads, strict=True):
            if isinstance(payload, StoreDamaged):
                self._core.active.unread.append(payload)
                unread.append(item)
                groups.add(group_of(item.lane))
            elif groups and queue.fifo and group_of(item.lane) in groups:
                # It waits for the one before it.
                behind.append(item)
            else:
                read.append((item, payload))
        if unread:
            self._put_back(batch, queue, [*unread, *behind], now_ms)
            self._core.active.pass_over(queue, unread)
        return read

    def _deliver(
        self,
        batch: Batch,
        queue: Queue,
        items: Sequence[Item],
        claims: Sequence[_Claim],
        now_ms: int,
    ) -> None:
        """Read payloads and make deliveries; what can't be delivered is removed."""
        name, store_id = queue.name, self._core.identity.store_id
        turns = iter(claims)
        claim: _Claim | None = None
        token = ""
        broken: list[Item] = []
        for item, payload in self._read(batch, queue, items, now_ms):
            # Items come in the order of the grants.
            while claim is None or claim.lease != item.lease:
                claim = next(turns)
                token = lease_token(store_id, queue.number, claim.lease)
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
            claim.keys.append(item.key.to_bytes(8, "big"))
            claim.deliveries.append(
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
                    claim.deadline_ms,
                )
            )
        if broken:
            self._core.active.settle(batch, queue, broken)
            self._upkeep.forget(batch, queue, broken)


class _Claim:
    """One of the claims that are served together."""

    def __init__(self, want: Want, now_ms: int) -> None:
        self.want = want
        self.lease = family_of(want.lease) + b"\0\0"
        self.deadline_ms = now_ms + want.lease_ms
        self.bytes = 0
        self.full = False
        self.keys: list[bytes] = []
        self.deliveries: list[Delivery] = []

    @property
    def room(self) -> int:
        """How many more messages it gets."""
        return 0 if self.full else self.want.limit - len(self.deliveries)

    @property
    def grants(self) -> Iterator[Grant]:
        """One grant for each of them."""
        return repeat((self.lease, self.deadline_ms), self.room)
