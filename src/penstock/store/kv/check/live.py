"""The audit of live messages: the tables of the indexed design, and those of the bucket design.

Both put the messages of a queue right one by one, collect them, and compare the rows that follow
from them: the visibility index and the counts of FIFO groups, or the summaries of buckets; and the
lists of messages to expire.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any
from zlib import crc32

from penstock.errors import CorruptRecord
from penstock.limits import MAX_ATTEMPTS, MAX_DURATION_MS
from penstock.model import State
from penstock.store.check_report import Kind
from penstock.store.codec import buckets, opendata
from penstock.store.codec.metadata import read_metadata
from penstock.store.codec.stored import NO_LEASE, decode_stored_item, encode_stored_item, with_lease
from penstock.store.kv.check.tables import LARGE_PAGE, DerivedRows, RefusedRow
from penstock.store.live import Beliefs, Item, group_of, lane_of
from penstock.store.live.bucket import OpenBucket
from penstock.store.live.indexed_directory import pack_main, pack_slot, timer_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from penstock.store.kv.check.tables import Rows
    from penstock.store.kv.queues import Queue
    from penstock.store.kv.state import Core

_PAGE = 1_000
_Entry = buckets.Available | buckets.InFlight
# The key of a live message, and whether it is in flight.
Place = tuple[int, bool]


class QueueMessages:
    """The messages of one queue, and the latest time that it has seen (``floor_ms``).

    ``waiting`` and ``flight`` map message ids to keys, ``leases`` keys in flight to their leases,
    ``attempts`` all message ids to their attempts, ``due`` waiting keys to when they expire,
    ``sizes`` live message ids to the bytes of their payloads, if the queue has ``max_bytes``.
    ``to_remove`` are live copies to remove, with their ids, ``to_add`` messages to add anew.
    """

    def __init__(self, queue: Queue, floor_ms: int) -> None:
        self.queue = queue
        self.floor_ms = floor_ms
        # No message of the queue becomes visible after this.
        self.latest_ms = floor_ms + 2 * MAX_DURATION_MS
        self.waiting: dict[int, int] = {}
        self.flight: dict[int, int] = {}
        self.leases: dict[int, bytes] = {}
        self.delayed: set[int] = set()
        self.ended: dict[State, set[int]] = {State.DONE: set(), State.FAILED: set()}
        self.attempts: dict[int, int] = {}
        self.due: dict[int, int] = {}
        # Sizes of the payloads of live messages, if the queue counts them.
        self.sizes: dict[int, int] = {}
        self.to_remove: list[tuple[int, Place]] = []
        self.to_add: list[Item] = []
        # The lowest numbers that the next parts of history and the next claim may have.
        self.next_part = {State.DONE: 0, State.FAILED: 0}
        self.next_claim = 0

    def add(self, item: Item, *, in_flight: bool, delayed: bool = False) -> None:
        """Take a live message in. Of two copies that in flight is kept, or else the first."""
        id_ = item.message_id
        if id_ in self.flight or (id_ in self.waiting and not in_flight):
            self.to_remove.append((id_, (item.key, in_flight)))
            return
        self.remove(id_)
        self.attempts[id_] = item.attempts
        metadata = read_metadata(item.metadata) if self.queue.spec.max_bytes else None
        if metadata is not None:
            self.sizes[id_] = metadata.size
        if in_flight:
            self.flight[id_] = item.key
            self.leases[item.key] = item.lease
            return
        self.waiting[id_] = item.key
        if delayed:
            self.delayed.add(id_)
        if self.queue.spec.unclaimed_retention_ms:
            self.due[item.key] = item.visible_at_ms + self.queue.spec.unclaimed_retention_ms

    def remove(self, message_id: int) -> None:
        """Remove the live copy of a message, if there is one."""
        in_flight = message_id in self.flight
        key = (self.flight if in_flight else self.waiting).pop(message_id, None)
        if key is not None:
            self.to_remove.append((message_id, (key, in_flight)))
            del self.attempts[message_id]
            self.delayed.discard(message_id)
            self.due.pop(key, None)
            self.leases.pop(key, None)
            self.sizes.pop(message_id, None)


class IndexedAudit:
    """Checks ``available``, ``in_progress``, ``visibility_index`` and ``groups``."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def prefixes(self, queue: Queue) -> dict[str, list[bytes]]:
        """Return the prefixes of a queue's rows, by table."""
        number = queue.number.to_bytes(4, "big")
        own = {name: [number] for name in ("available", "in_progress", "groups")}
        return {**own, "visibility_index": [b"\x00" + number, b"\x01" + number]}

    def place(self, queue: Queue, key: int, *, in_flight: bool) -> tuple[str, bytes]:
        """Return table and key of the row that holds a message."""
        return "in_progress" if in_flight else "available", pack_main(queue.number, key)

    def read(self, messages: QueueMessages) -> None:
        """Check the messages of a queue, those in flight first."""
        queue, prefixes = messages.queue, self.prefixes(messages.queue)
        held: dict[bytes, int] = {}
        for item in self._items(messages, in_flight=True):
            if queue.fifo:
                key = prefixes["groups"][0] + group_of(item.lane)
                held[key] = held.get(key, 0) + 1
            item.attempts = min(item.attempts + 1, MAX_ATTEMPTS)
            messages.add(item, in_flight=True)
        groups = DerivedRows(self._rows, "groups", *prefixes["groups"])
        for key, count in held.items():
            text = f"queue {queue.name}: a group has {count} messages in flight"
            groups.expect(key, count.to_bytes(4, "big"), groups.table.get(key), text)
        groups.finish(f"queue {queue.name}: the group has nothing in flight")
        index = DerivedRows(self._rows, "visibility_index", *prefixes["visibility_index"])
        items = self._items(messages, in_flight=False)
        while page := list(islice(items, _PAGE)):
            self._check_entries(messages, index, page)
        index.finish(f"queue {queue.name}: no message waits under this index entry")

    def _check_entries(self, messages: QueueMessages, index: DerivedRows, page: list[Item]) -> None:
        queue = messages.queue
        timers = [timer_key(queue.number, item.visible_at_ms, item.key) for item in page]
        ready = [_ready_key(queue, item) for item in page]
        present = index.table.multi_get(timers), index.table.multi_get(ready)
        for item, timer, key, at_timer, at_key in zip(page, timers, ready, *present, strict=True):
            # A message whose time has come is delayed until a sweep has moved its entry.
            is_timed = at_timer is not None and (queue.fifo or at_key is None)
            delayed = item.visible_at_ms > messages.floor_ms or is_timed
            main = pack_main(queue.number, item.key)
            text = f"queue {queue.name}: the index entry of message {item.key}"
            if delayed:
                index.expect(timer, main + item.lane, at_timer, text)
            if queue.fifo or not delayed:
                index.expect(key, b"", at_key, text)
            messages.add(item, in_flight=False, delayed=delayed)

    def _items(self, messages: QueueMessages, *, in_flight: bool) -> Iterator[Item]:
        queue = messages.queue
        table, first = self.place(queue, 0, in_flight=in_flight)

        def parse(main: bytes, value: bytes) -> tuple[Item, bytes]:
            metadata, _, attempts, forgiven, visible_at_ms, lease = decode_stored_item(value)
            if len(main) != len(first):
                raise RefusedRow(Kind.STRANGER, f"a key of {len(main)} bytes, not {len(first)}")
            id_ = int.from_bytes(main[4:], "big")
            known = self._rows.metadata_of(id_, metadata)
            lane = lane_of(known.group, 0 if queue.fifo else known.priority)
            visible_at_ms = min(visible_at_ms, messages.latest_ms)
            lease = lease if in_flight else NO_LEASE
            return Item(id_, id_, lane, attempts, forgiven, visible_at_ms, metadata, lease), value

        for main, (item, value) in self._rows.parse(table, first[:4], f"{table} messages", parse):
            right = encode_stored_item(
                item.metadata, item.lane, item.attempts, item.forgiven, item.visible_at_ms
            )
            if in_flight:
                right = with_lease(right, item.lease)
            text = f"queue {queue.name}: lane, time or lease of message {item.key}"
            self._rows.compare(table, main, value, right, text)
            yield item


def _ready_key(queue: Queue, item: Item) -> bytes:
    slot = pack_slot(0 if queue.fifo else item.visible_at_ms, item.key)
    return b"\x01" + queue.number.to_bytes(4, "big") + item.lane + slot


class BucketsAudit:
    """Checks ``buckets``: the buckets, their messages, and their summaries."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def prefixes(self, queue: Queue) -> dict[str, list[bytes]]:
        """Return the prefixes of a queue's rows, by table."""
        both = [opendata.ACTIVE.prefix(queue.id), opendata.SUMMARY.prefix(queue.id)]
        return {"buckets": both}

    def place(self, queue: Queue, key: int, *, in_flight: bool) -> tuple[str, bytes]:  # noqa: ARG002
        """Return table and key of the row that holds a message."""
        return "buckets", opendata.ACTIVE.key(queue.id, opendata.bucket_of(key))

    def read(self, messages: QueueMessages) -> None:
        """Check the messages of a queue; last those that have lost their place in a bucket."""
        name = messages.queue.name
        prefix, summary_prefix = self.prefixes(messages.queue)["buckets"]
        summaries = DerivedRows(self._rows, "buckets", summary_prefix)
        misplaced: list[_Entry] = []
        found = self._rows.parse("buckets", prefix, "buckets", _parse_bucket, page=LARGE_PAGE)
        for key, (entries, value) in found:
            if not entries:
                text = f"queue {name}: a bucket without messages"
                self._rows.violate(Kind.EMPTY, "buckets", key, text)
            kept: dict[int, _Entry] = {}
            misplaced += [each for each in entries if not self._keep(messages, key, kept, each)]
            right = _pack(kept.values()) if kept else None
            if right != value:
                self._rows.write("buckets", key, right)
            if right is not None:
                self._check_summary(messages, summaries, key, right)
        summaries.finish(f"queue {name}: a summary without its bucket")
        for entry in misplaced:
            if entry.message_id not in messages.attempts:
                lease = entry.lease if isinstance(entry, buckets.InFlight) else None
                item = Item(
                    entry.claim_id, entry.message_id, lane_of(entry.group, entry.priority),
                    entry.attempts, entry.forgiven, entry.visible_at, entry.metadata,
                    lease or NO_LEASE,
                )  # fmt: skip
                delayed = lease is None and entry.visible_at > messages.floor_ms
                messages.add(item, in_flight=lease is not None, delayed=delayed)
                messages.to_add.append(item)

    def _keep(
        self, messages: QueueMessages, key: bytes, kept: dict[int, _Entry], entry: _Entry
    ) -> bool:
        """Put an entry into its bucket, right, or into the quarantine; False if it is misplaced."""
        claim, id_ = entry.claim_id, entry.message_id
        what = f"queue {messages.queue.name}: message {id_}"
        try:
            known = self._rows.metadata_of(id_, entry.metadata)
        except CorruptRecord as error:
            self._rows.reject("buckets", key, _pack([entry]), error, id_.to_bytes(8, "big"))
            return True
        # Claims of a bucket share its exponent, so this one has a bucket.
        is_here = claim >> 60 == key[-8] >> 4 and opendata.bucket_of(claim) == _bucket_id(key)
        other = kept.get(claim, entry)
        if not is_here or other.message_id != id_:
            text = f"{what} has claim {claim:#x}, of another bucket or another message"
            self._rows.violate(Kind.WRONG_KEY, "buckets", key, text)
            return False
        if other is not entry:
            self._rows.violate(Kind.TWICE, "buckets", key, f"{what} is there twice")
        messages.next_claim = max(messages.next_claim, opendata.split_id(claim)[1] + 1)
        is_time = 0 <= entry.visible_at <= messages.latest_ms
        # Messages in flight come last: of two copies, that is kept.
        kept[claim] = entry._replace(
            group=known.group,
            priority=0 if messages.queue.fifo else known.priority,
            visible_at=entry.visible_at if is_time else messages.floor_ms,
        )
        if kept[claim] != entry:
            text = f"{what}: its group or priority is not that of its metadata, or no time is this"
            self._rows.violate(Kind.WRONG_FIELD, "buckets", key, text)
        return True

    def _check_summary(
        self, messages: QueueMessages, summaries: DerivedRows, key: bytes, value: bytes
    ) -> None:
        queue, bucket_id = messages.queue, _bucket_id(key)
        summary_key = opendata.SUMMARY.key(queue.id, bucket_id)
        present = summaries.table.get(summary_key)
        try:
            told = None if present is None else buckets.decode_summary(present)
        except CorruptRecord:
            told = None
        # Only the summary says whether a message whose time has come is still delayed.
        late = {bucket_id + offset for offset in told.late} if told else set()
        bucket = OpenBucket.decode(
            queue, bucket_id, value, lambda claim, time: time > messages.floor_ms or claim in late
        )
        right = bucket.summary()
        is_same = told is not None and _sorted(told) == _sorted(buckets.decode_summary(right))
        text = f"queue {queue.name}: a summary that its bucket does not agree with"
        summaries.expect(summary_key, present if is_same else right, present, text)
        self._rows.count("available messages", len(bucket.waiting))
        self._rows.count("in_progress messages", len(bucket.flight))
        for item in bucket.waiting.values():
            messages.add(item, in_flight=False, delayed=item.key in bucket.late_claims)
        for item in bucket.flight.values():
            messages.add(item, in_flight=True)


def _parse_bucket(key: bytes, value: bytes) -> tuple[list[_Entry], bytes]:
    _, bucket_id = opendata.ACTIVE.parse(key)
    if opendata.bucket_of(bucket_id) != bucket_id:
        raise RefusedRow(Kind.STRANGER, f"{bucket_id:#x} is a claim id, not that of a bucket")
    available, in_flight = buckets.decode_active(value)
    return [*(entry for entry, _ in available), *(entry for entry, _ in in_flight)], value


def _bucket_id(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def _pack(entries: Collection[_Entry]) -> bytes:
    return buckets.pack_active(
        [buckets.encode_available(e) for e in entries if isinstance(e, buckets.Available)],
        [buckets.encode_in_flight(e) for e in entries if isinstance(e, buckets.InFlight)],
    )


def _sorted(summary: buckets.Summary) -> tuple[object, ...]:
    """Return a summary without the order of its lists, which depends on the past."""
    late, heads, held = sorted(summary.late), sorted(summary.heads), sorted(summary.held)
    return (*summary[:4], summary.due, late, heads, held)


# --- lists of messages to expire ------------------------------------------------------------------


def check_unclaimed(rows: Rows, messages: QueueMessages) -> None:
    """Check that every waiting message of a queue with such a retention is listed to expire."""
    queue, due = messages.queue, messages.due
    prefix = queue.number.to_bytes(4, "big")
    for key, listed in rows.parse("unclaimed", prefix, "unclaimed rows", _parse_unclaimed):
        for each in listed:
            if due.get(each) == int.from_bytes(key[4:12], "big"):
                del due[each]
    if queue.name in rows.core.listing:
        # A sweep is about to list the others.
        return
    by_due: dict[int, list[int]] = {}
    for each, due_ms in due.items():
        by_due.setdefault(due_ms, []).append(each)
    for due_ms, keys in by_due.items():
        packed = b"".join(each.to_bytes(8, "big") for each in keys)
        key = prefix + due_ms.to_bytes(8, "big") + packed[:8] + crc32(packed).to_bytes(4, "big")
        text = f"queue {queue.name}: {len(keys)} messages are not listed to expire at {due_ms}"
        rows.mend(Kind.MISSING_ENTRY, "unclaimed", key, packed, text)


def _parse_unclaimed(key: bytes, packed: bytes) -> list[int]:
    right_end = packed[:8] + crc32(packed).to_bytes(4, "big")
    if len(key) != 24 or len(packed) % 8 or key[12:] != right_end:
        raise CorruptRecord("a row that is not what its key says")
    return [int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)]


# --- memory -------------------------------------------------------------------------------------


def wrong_beliefs(core: Core) -> list[tuple[str, str]]:
    """Compare memory with a memory that is read anew; return what differs, and how."""
    identity = core.identity
    fresh = type(core)(
        core.engine,
        identity.design,
        store_id=identity.store_id,
        routing=identity.routing,
        now_ms=0,
    )
    # Looked up when first asked for.
    fresh.leases.due(0, 1)
    believed, true = _beliefs(core), _beliefs(fresh)
    wrong = {
        key: f"memory has {believed.facts.get(key)!r:.200}, disk {true.facts.get(key)!r:.200}"
        for key in believed.facts.keys() | true.facts.keys()
        if believed.facts.get(key) != true.facts.get(key)
    }
    for key, lowest in true.bounds.items():
        says = believed.bounds.get(key)
        if says is None or says > lowest:
            wrong[key] = f"memory looks from {says!r:.200} on, and the disk has {lowest!r:.200}"
    return [(": ".join(map(str, key)), text) for key, text in sorted(wrong.items(), key=repr)]


def _beliefs(core: Core) -> Beliefs:
    """Return what the memory of a store believes of its disk."""
    log = core.log
    facts: dict[tuple[Any, ...], Any] = {
        ("totals",): core.totals,
        ("log",): (log.settings, log.segments),
        ("sequences",): (log.ids.end, core.queue_numbers.end),
        ("draining",): core.draining,
        ("listing",): core.listing,
    }
    bounds: dict[tuple[Any, ...], Any] = {("leases",): core.leases.none_before_ms}
    first_keys = (
        *(core.first_unclaimed, core.leases.first_keys, core.dedup.first_keys),
        *(core.history.first_keys, log.first_keys, *core.active.first_keys),
    )
    for key in [key for each in first_keys for key in each.overrun()]:
        facts["a key before the first one of its range", key.hex()] = True
    for lease in core.leases.differing():
        facts["a lease in memory that is not stored", lease.hex()] = True
    for (number, what), due_ms in core.retention.ranks.items():
        bounds["retention of queue", number, what] = due_ms
    for name, queue in core.by_name.items():
        covered = queue.coverage
        facts[name, "spec"] = (queue.number, queue.spec)
        facts[name, "counts"] = queue.counts
        facts[name, "coverage"] = (covered.live, covered.backfilled, covered.draining)
        if core.dead_letters.knows(queue):
            bounds[name, "dead letters"] = 0
        if core.history.may_have_marks(queue):
            bounds[name, "moved here"] = 0
        live = core.active.beliefs(queue)
        facts.update(((name, *key), value) for key, value in live.facts.items())
        bounds.update(((name, *key), value) for key, value in live.bounds.items())
    return Beliefs(facts, bounds)
