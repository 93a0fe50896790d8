"""The bucket design: few large records, and a directory of their contents.

This is OpenData-Queue's layout. All of a queue's live messages are in its active buckets::

    table buckets
    02 02 | queue | bucket u64      active bucket: available and in-flight messages
    02 09 | queue | bucket u64      its summary (codec/buckets.py), written whenever it changes

A message's key is its claim id: four bits of exponent, the queue's at the time, and a number from
one sequence per queue. It places the message in a bucket, where it stays while it lives, retries
included. A changed exponent opens buckets of another size beside the old ones; the directory
covers them all, so claims and scans walk every exponent in use.

Memory has a directory of each queue and a bounded number of open buckets (``bucket_cache``).
"""

from __future__ import annotations

from heapq import nsmallest
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec.structs import replace

from penstock.errors import CorruptRecord, InvalidInput, StoreDamaged
from penstock.model import State
from penstock.store.codec import opendata
from penstock.store.codec.buckets import decode_summary
from penstock.store.live import MOST_HEADS, MOST_LANES, Beliefs, Item, group_of
from penstock.store.live.bucket import RANK_BITS, OpenBucket
from penstock.store.live.bucket_cache import BucketCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.engines import Batch, Engine
    from penstock.store.kv.queues import Queue
    from penstock.store.live import Grant, Quarantine

_NO_PRIORITY: Final = b"\xff"
_CURSOR_BYTES: Final = 8
_message_id: Final = attrgetter("message_id")


class BucketActive(BucketCache):
    """The active set of the bucket design."""

    def __init__(self, engine: Engine, quarantine: Quarantine) -> None:
        super().__init__(engine.table("buckets"), quarantine)

    def ready_groups(self, queue: Queue) -> int:
        """Return how many groups have something to claim; FIFO: something waiting."""
        return len(self._directories[queue.number].ring)

    def _changing(
        self, batch: Batch, queue: Queue, items: Sequence[Item]
    ) -> Iterator[tuple[Item, OpenBucket]]:
        """Yield each message with its open bucket; after the last, write the buckets."""
        self._begin(batch)
        touched: dict[int, OpenBucket] = {}
        for item in items:
            bucket_id = opendata.bucket_of(item.key)
            bucket = touched.get(bucket_id)
            if bucket is None and (bucket := self._touch(queue, bucket_id)) is not None:
                touched[bucket_id] = bucket
            if bucket is not None:
                yield item, bucket
        self._write(batch, queue, touched.values())

    # --- in ------------------------------------------------------------------------------

    def add(self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int) -> None:
        """Give each message the next claim id, and append it to that id's bucket."""
        self._begin(batch)
        counts, fifo, exponent = queue.counts, queue.fifo, queue.spec.bucket_exponent
        base, size = opendata.make_id(exponent, 0), opendata.capacity(exponent)
        filled: list[OpenBucket] = []
        delayed = 0
        end = -1
        for item in items:
            if counts.next_claim >= end:
                bucket = self._tail(queue, base, size)
                filled.append(bucket)
                end = counts.next_claim - counts.next_claim % size + size
            item.key = base | counts.next_claim
            counts.next_claim += 1
            if fifo:
                item.lane = item.lane[:-1] + _NO_PRIORITY
            delayed += self._put_waiting(queue, bucket, item, now_ms)
        counts.delayed += delayed
        counts.available += len(items) - delayed
        if queue.spec.max_bytes:
            self._count_bytes(queue, items, 1)
        self._write(batch, queue, filled)

    def _tail(self, queue: Queue, base: int, size: int) -> OpenBucket:
        """Open the bucket of the next claim id, or make it."""
        directory = self._directories[queue.number]
        while True:
            number = queue.counts.next_claim
            bucket_id = base | (number - number % size)
            if bucket_id not in directory.buckets:
                self._touched.add((queue.number, bucket_id))
                return self._keep(queue, OpenBucket(queue, bucket_id))
            try:
                bucket = self._touch(queue, bucket_id)
            except StoreDamaged as error:
                self.damage[queue.number] = error.anew()
                queue.counts.next_claim = number - number % size + size
                continue
            if bucket is not None:
                return bucket

    def _put_waiting(self, queue: Queue, bucket: OpenBucket, item: Item, now_ms: int) -> bool:
        """Put a message into a bucket; say whether it is delayed."""
        late = item.visible_at_ms > now_ms
        directory = self._directories[queue.number]
        if bucket.put_waiting(item, late=late):
            directory.set_head(item.lane, bucket.id, bucket.head(item.lane))
        if late:
            directory.late.set(bucket.id, bucket.due_rank())
            self._due.lower(queue.number, item.visible_at_ms)
        elif directory.blocked:
            # On a FIFO queue it may stand before the head that its group waits for.
            directory.unblock(group_of(item.lane))
        return late

    def come_due(self, batch: Batch, now_ms: int, budget: int) -> list[tuple[Queue, list[int]]]:
        """Write mended summaries, also if nothing is due."""
        self._begin(batch)
        return super().come_due(batch, now_ms, budget)

    def _come_due(self, batch: Batch, queue: Queue, now_ms: int, budget: int) -> list[int]:
        """Count delayed messages as ready in the order of their times; only summaries change."""
        directory = self._directories[queue.number]
        touched: dict[int, OpenBucket] = {}
        ids: list[int] = []
        while len(ids) < budget and (first := directory.late.first()):
            rank, bucket_id = first
            if rank >> RANK_BITS > now_ms:
                break
            try:
                bucket = self._touch(queue, bucket_id)
            except StoreDamaged as error:
                self.damage[queue.number] = error.anew()
                bucket = None
            if bucket is None:
                directory.late.set(bucket_id, None)
                continue
            touched[bucket_id] = bucket
            item, heads = bucket.come_due()
            directory.late.set(bucket_id, bucket.due_rank())
            if heads:
                directory.set_head(item.lane, bucket_id, bucket.head(item.lane))
            if queue.fifo:
                directory.unblock(group_of(item.lane))
            ids.append(item.message_id)
        for bucket in touched.values():
            self._write_summary(batch, queue, bucket)
        self._set_due(queue)
        return ids

    # --- claim ---------------------------------------------------------------------------

    def take(
        self, batch: Batch, queue: Queue, limit: int, grants: Iterator[Grant], now_ms: int
    ) -> list[Item]:
        """Visit groups in turn until the limit is reached or no group has more."""
        self._begin(batch)
        directory = self._directories[queue.number]
        ring = directory.ring
        changed: dict[int, OpenBucket] = {}
        taken: list[Item] = []
        while ring and len(taken) < limit:
            visits = min(len(ring), limit - len(taken))
            for visit in range(visits):
                # An unreadable bucket may have taken other groups with it.
                if not ring or len(taken) >= limit:
                    break
                group = next(iter(ring))
                # The room that one group does not use is shared among those after it.
                room = (limit - len(taken)) // (visits - visit)
                found = self._visit(queue, group, changed, room, grants, now_ms)
                taken += found
                if group in ring:
                    if found:
                        ring.move_to_end(group)
                    elif queue.fifo:
                        directory.block(group)
                    else:
                        # Whatever the directory says: it gives nothing, and has no further turn.
                        del ring[group]
        queue.counts.available -= len(taken)
        queue.counts.in_flight += len(taken)
        self._write(batch, queue, changed.values())
        return taken

    def _visit(
        self, queue: Queue, group: bytes, changed: dict[int, OpenBucket], limit: int,
        grants: Iterator[Grant], now_ms: int,
    ) -> list[Item]:  # fmt: skip
        """Take up to ``limit`` messages of a group: lane after lane, each in order of rank."""
        directory = self._directories[queue.number]
        taken: list[Item] = []
        for lane in sorted(directory.lanes[group]):
            while len(taken) < limit:
                ranking = directory.lanes.get(group, {}).get(lane)
                first = None if ranking is None else ranking.first()
                if ranking is None or first is None:
                    break
                try:
                    bucket = self._touch(queue, first[1])
                except StoreDamaged as error:
                    self.damage[queue.number] = error.anew()
                    if queue.fifo:
                        # The messages behind it wait for it.
                        return taken
                    bucket = None
                if bucket is None:
                    directory.set_head(lane, first[1], None)
                    continue
                if first != ranking.first():
                    # Opening it has shown that the directory was wrong about it.
                    continue
                bucket_id = first[1]
                ranking.set(bucket_id, None)
                following = ranking.first()
                below = None if following is None else following[0]
                count = bucket.takeable(lane, limit - len(taken), below)
                if count:
                    changed[bucket_id] = bucket
                    taken += bucket.take(lane, count, grants, now_ms)
                directory.set_head(lane, bucket_id, bucket.head(lane))
                if not count:
                    # The head of a FIFO group is not visible.
                    return taken
                if queue.fifo:
                    directory.hold(group, bucket_id, count)
        return taken

    # --- in flight -----------------------------------------------------------------------

    def find(self, queue: Queue, keys: Sequence[int]) -> list[Item | None]:
        """Look messages up in flight."""
        return self._look_up(queue, keys, "flight")

    def waiting(self, queue: Queue, keys: Sequence[int]) -> list[Item | None]:
        """Look messages up among available and delayed."""
        return self._look_up(queue, keys, "waiting")

    def _look_up(
        self, queue: Queue, keys: Sequence[int], part: Literal["flight", "waiting"]
    ) -> list[Item | None]:
        """Copy messages out of a part of their buckets; keys may be any numbers, from receipts."""
        last_id: int | None = None
        items: dict[int, Item] = {}
        found: list[Item | None] = []
        for key in keys:
            bucket_id = _bucket_of(key)
            if bucket_id != last_id:
                last_id = bucket_id
                bucket = None if bucket_id is None else self._bucket(queue, bucket_id)
                items = {} if bucket is None else getattr(bucket, part)
            item = items.get(key)
            # Callers change the item; the open bucket must not change with it.
            found.append(None if item is None else replace(item))
        return found

    def live(self, queue: Queue, message_ids: Sequence[int], most: int | None = None) -> list[Item]:
        """Look messages up by their ids, in the buckets that may have one of them."""
        wanted, highest = set(message_ids), max(message_ids, default=0)
        directory = self._directories[queue.number]
        oldest = directory.oldest.ranks.get
        likely = [
            bucket_id
            for bucket_id, known in directory.buckets.items()
            if known.in_flight or (oldest(bucket_id) or highest + 1) <= highest
        ]
        # Messages mostly come into buckets in the order of their ids.
        likely.sort(key=lambda bucket_id: abs((oldest(bucket_id) or highest) - highest))
        found: list[Item] = []
        for bucket_id in likely[:most]:
            if len(found) == len(wanted):
                break
            # Opening a bucket may remove it, or another.
            bucket = self._bucket(queue, bucket_id) if bucket_id in directory.buckets else None
            if bucket is not None:
                items = (*bucket.waiting.values(), *bucket.flight.values())
                found += [replace(item) for item in items if item.message_id in wanted]
        return found

    def in_flight_by_message(self, queue: Queue, message_id: int) -> Item | None:
        """Look a message up in flight, in every bucket that has something in flight."""
        buckets = self._holding(queue, State.IN_FLIGHT, 0)
        flying = (item for bucket in buckets for item in bucket.flight.values())
        return next((replace(item) for item in flying if item.message_id == message_id), None)

    def settle(self, batch: Batch, queue: Queue, items: Sequence[Item]) -> None:
        """Take messages out of their buckets, and free their FIFO groups."""
        self.put_back(batch, queue, items, None)

    def pass_over(self, queue: Queue, unread: Mapping[int, StoreDamaged]) -> None:
        """Make claims pass messages over, in the buckets that they are in."""
        super().pass_over(queue, unread)
        for bucket_id in set(map(opendata.bucket_of, unread)):
            bucket = self._bucket(queue, bucket_id)
            if bucket is not None:
                self._hide(queue, bucket)

    def put_back(
        self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int | None
    ) -> None:
        """Move messages from in flight to waiting, in their buckets; without a time, to nowhere."""
        counts = queue.counts
        freed: dict[bytes, list[int]] = {}
        for item, bucket in self._changing(batch, queue, items):
            if bucket.land(item.key) is None:
                continue
            counts.in_flight -= 1
            if now_ms is None and queue.spec.max_bytes:
                self._count_bytes(queue, [item], -1)
            if now_ms is not None:
                if self._put_waiting(queue, bucket, item, now_ms):
                    counts.delayed += 1
                else:
                    counts.available += 1
            if queue.fifo:
                freed.setdefault(group_of(item.lane), []).append(bucket.id)
        directory = self._directories[queue.number]
        # Groups take their turns in the order in which the items name them.
        for group, bucket_ids in freed.items():
            for bucket_id in bucket_ids:
                directory.unhold(group, bucket_id, 1)

    def relabel(self, batch: Batch, queue: Queue, items: Sequence[Item], lease: bytes) -> None:
        """Write another split of the lease into in-flight messages."""
        for item, bucket in self._changing(batch, queue, items):
            bucket.relabel(item.key, lease)

    # --- waiting -------------------------------------------------------------------------

    def remove(self, batch: Batch, queue: Queue, items: Sequence[Item]) -> None:
        """Take waiting messages out of their buckets."""
        self.unpass(queue, items)
        directory = self._directories[queue.number]
        for item, bucket in self._changing(batch, queue, items):
            removed = bucket.remove_waiting(item.key)
            if removed is None:
                continue
            if queue.spec.max_bytes:
                self._count_bytes(queue, [item], -1)
            lane, late = removed
            directory.set_head(lane, bucket.id, bucket.head(lane))
            if late:
                queue.counts.delayed -= 1
                directory.late.set(bucket.id, bucket.due_rank())
            else:
                queue.counts.available -= 1
            if queue.fifo:
                directory.unblock(group_of(lane))
        self._set_due(queue)

    def page(
        self, queue: Queue, state: State, after: bytes, limit: int
    ) -> tuple[list[Item], bytes | None]:
        """Read a page in the order of claim ids, which is that of buckets."""
        start = int.from_bytes(after, "big")
        first_id = _bucket_of(start) if len(after) in {0, _CURSOR_BYTES} else None
        if first_id is None:
            raise InvalidInput(f"not a cursor: {after.hex()[:80]}; pass a page's next_cursor")
        found: list[Item] = []
        for bucket in self._holding(queue, state, first_id):
            flying = state is State.IN_FLIGHT
            items = bucket.flight if flying else bucket.waiting
            delayed = state is State.DELAYED
            found += [
                items[key]
                for key in sorted(items)
                if key >= start and (flying or (key in bucket.late_claims) == delayed)
            ]
            if len(found) > limit:
                break
        following = found[limit].key.to_bytes(_CURSOR_BYTES, "big") if len(found) > limit else None
        return [replace(item) for item in islice(found, limit)], following

    def _holding(self, queue: Queue, state: State, at_least: int) -> Iterator[OpenBucket]:
        """Open, one after the other, the buckets from an id on that have messages in a state."""
        directory = self._directories[queue.number]
        # Looked up anew each time: opening a bucket may remove it from the directory.
        while (bucket_id := next(directory.holding(state, at_least), None)) is not None:
            bucket = self._bucket(queue, bucket_id)
            if bucket is not None:
                yield bucket
            at_least = bucket_id + 1

    def oldest_ms(self, queue: Queue, now_ms: int) -> int | None:
        """Look at the heads of lanes; only those of a FIFO queue do not tell their times."""
        lanes = self._directories[queue.number].lanes.values()
        rankings = (each for group in lanes for each in group.items())
        heads = [
            (first, lane)
            for lane, ranking in islice(rankings, MOST_LANES)
            if (first := ranking.first()) is not None
        ]
        if not queue.fifo:
            return min(heads)[0][0] >> RANK_BITS if heads else None
        times = []
        for (_, bucket_id), lane in nsmallest(MOST_HEADS, heads):
            bucket = self._bucket(queue, bucket_id)
            if bucket is not None and lane in bucket.lanes:
                times.append(bucket.waiting[bucket.lanes[lane][0][1]].visible_at_ms)
        return min((time_ms for time_ms in times if time_ms <= now_ms), default=None)

    def oldest(self, queue: Queue, limit: int) -> list[Item]:
        """Return the waiting messages with the lowest ids, from the buckets that have them."""
        oldest = self._directories[queue.number].oldest
        # The ranks of buckets that were looked into: put aside, so that the next bucket is first.
        looked: dict[int, int | None] = {}
        found: list[Item] = []
        try:
            while (first := oldest.first()) is not None:
                lowest, bucket_id = first
                if len(found) == limit and found[-1].message_id < lowest:
                    break
                bucket = self._bucket(queue, bucket_id)
                looked[bucket_id] = None if bucket is None else bucket.oldest()
                oldest.set(bucket_id, None)
                waiting = () if bucket is None else bucket.waiting.values()
                found = nsmallest(limit, chain(found, waiting), key=_message_id)
        finally:
            for bucket_id, rank in looked.items():
                oldest.set(bucket_id, rank)
        return [replace(item) for item in found]

    def beliefs(self, queue: Queue) -> Beliefs:
        """Return the contents of buckets and the groups that have a turn, now or later.

        Open buckets must be as the table has them.
        """
        directory = self._directories[queue.number]
        late, oldest = directory.late.ranks, directory.oldest.ranks
        facts: dict[tuple[Any, ...], Any] = {
            ("in flight", group): counts for group, counts in directory.held.items()
        }
        for bucket_id, row in directory.buckets.items():
            facts["bucket", bucket_id] = (row, late.get(bucket_id), oldest.get(bucket_id))
        for lanes in directory.lanes.values():
            facts.update((("lane", lane), ranking.ranks) for lane, ranking in lanes.items())
        facts.update((("turn", group), True) for group in (*directory.ring, *directory.blocked))
        for group in directory.blocked & directory.lanes.keys():
            lane, ranking = next(iter(directory.lanes[group].items()))
            first = ranking.first()
            bucket = None if first is None else self._bucket(queue, first[1])
            if bucket is None or bucket.takeable(lane, 1, None):
                facts["waits for nothing", group] = True
        for (number, bucket_id), bucket in self._open.items():
            if number == queue.number:
                record, summary = self._table.multi_get([bucket.key, bucket.summary_key])
                delayed = {bucket_id + offset for offset in decode_summary(summary or b"").late}
                if record != bucket.record() or delayed != bucket.late_claims:
                    facts["open bucket", bucket_id] = True
        due_ms = self._due.ranks.get(queue.number)
        return Beliefs(facts, {} if due_ms is None else {("delays",): due_ms})


def _bucket_of(key: int) -> int | None:
    """Return the bucket of a claim id; None for a number that is none."""
    try:
        return opendata.bucket_of(key)
    except CorruptRecord:
        return None
