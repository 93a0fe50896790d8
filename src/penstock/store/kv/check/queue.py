"""The audit of one queue: its live messages in either design, its history and its counters.

Done messages are read first, then live ones, then failed ones: of two copies of a message the
first is kept. The rows that follow from them are recomputed and compared: the visibility index and
the counts of FIFO groups, or the summaries of buckets; the index of failed messages; the lists of
messages to expire; the counters.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Final
from zlib import crc32

import msgspec

from penstock.engines import rows_of
from penstock.errors import CorruptRecord
from penstock.limits import MAX_ATTEMPTS, MAX_DURATION_MS
from penstock.model import State
from penstock.store.check_report import Kind
from penstock.store.codec import buckets, opendata, records
from penstock.store.codec.metadata import read_metadata
from penstock.store.codec.stored import NO_LEASE, decode_stored_item, encode_stored_item, with_lease
from penstock.store.kv.check.tables import LARGE_PAGE, RefusedRow
from penstock.store.kv.history import cut_part
from penstock.store.kv.queues import Counts, decode_counts, encode_counts
from penstock.store.live import Item, group_of, lane_of
from penstock.store.live.bucket import OpenBucket
from penstock.store.live.indexed_directory import pack_main, pack_slot, timer_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from penstock.store.codec.records import EndedRecord
    from penstock.store.kv.check.tables import Rows
    from penstock.store.kv.queues import Queue

# Heads of keys of history: pointers to failed messages, marks of moved ones, attempts.
POINTERS = _FAILED_INDEX, _MARKS, _ATTEMPTS = b"\x02\x0a", b"\x02\x15", b"\x02\x05"
# Acked, released, expired.
_OUTCOMES: Final = 3
_Entry = buckets.Available | buckets.InFlight


class QueueMessages:
    """The messages of one queue: done ones are read first, then live ones, then failed ones.

    ``attempts`` maps the ids of all messages to their attempts, ``flight`` the leases to the keys
    in flight under them, ``due`` waiting keys to when they expire. ``counts`` are the counters on
    disk, ``right`` those that follow from the messages. ``misplaced`` are live messages that have lost
    their place.
    """

    def __init__(self, queue: Queue, counts: Counts) -> None:
        self.queue, self.counts = queue, counts
        self.right = msgspec.structs.replace(
            counts, available=0, delayed=0, in_flight=0, done=0, failed=0, live_bytes=0
        )
        self.floor_ms = counts.time_floor_ms
        # No message of the queue becomes visible after this.
        self.latest_ms = self.floor_ms + 2 * MAX_DURATION_MS
        self.attempts: dict[int, int] = {}
        self.flight: dict[bytes, list[int]] = {}
        self.due: dict[int, int] = {}
        self.misplaced: list[Item] = []

    def add(self, item: Item, *, in_flight: bool, delayed: bool = False) -> bool:
        """Count a live message; False if it is there already, or done."""
        spec, right = self.queue.spec, self.right
        if item.message_id in self.attempts:
            return False
        self.attempts[item.message_id] = item.attempts
        metadata = read_metadata(item.metadata) if spec.max_bytes else None
        if metadata is not None:
            right.live_bytes += metadata.size
        if in_flight:
            right.in_flight += 1
            self.flight.setdefault(item.lease, []).append(item.key)
            return True
        right.delayed += delayed
        right.available += not delayed
        if spec.unclaimed_retention_ms:
            self.due[item.key] = item.visible_at_ms + spec.unclaimed_retention_ms
        return True

    def describe_copy(self, message_id: int) -> str:
        """Describe a live message that is there already."""
        return f"queue {self.queue.name}: message {message_id} is there twice, or done and live"


def live_prefixes(design: str, queue: Queue) -> dict[str, list[bytes]]:
    """Return the prefixes of the rows of a queue's live messages, by table."""
    if design == "buckets":
        return {"buckets": [opendata.ACTIVE.prefix(queue.id), opendata.SUMMARY.prefix(queue.id)]}
    number = queue.number4
    own = {name: [number] for name in ("available", "in_progress", "groups")}
    return {**own, "visibility_index": [b"\x00" + number, b"\x01" + number]}


def flight_place(design: str, queue: Queue, key: int) -> tuple[str, bytes]:
    """Return table and key of the row that holds a message in flight."""
    if design == "buckets":
        return "buckets", opendata.ACTIVE.key(queue.id, opendata.bucket_of(key))
    return "in_progress", pack_main(queue.number, key)


# --- the indexed design --------------------------------------------------------------------------


def read_indexed(rows: Rows, messages: QueueMessages) -> None:
    """Check ``available``, ``in_progress``, ``visibility_index`` and ``groups`` of a queue."""
    queue, prefixes = messages.queue, live_prefixes("indexed", messages.queue)
    held: Counter[bytes] = Counter()
    for item in _read_items(rows, messages, "in_progress"):
        if queue.fifo:
            held[queue.number4 + group_of(item.lane)] += 1
        item.attempts = min(item.attempts + 1, MAX_ATTEMPTS)
        _take_item(rows, messages, "in_progress", item)
    counts = {key: count.to_bytes(4, "big") for key, count in held.items()}
    text = f"queue {queue.name}: how many messages of a group are in flight"
    rows.compare_all("groups", prefixes["groups"], counts, text)
    # A message whose time has come is delayed until a sweep has moved its entry.
    timers = b"\0" + queue.number4, timer_key(queue.number, messages.floor_ms + 1, 0)
    unswept = {key for key, _ in rows_of(rows.table("visibility_index"), *timers)}
    index: dict[bytes, bytes] = {}
    for item in _read_items(rows, messages, "available"):
        timer = timer_key(queue.number, item.visible_at_ms, item.key)
        delayed = item.visible_at_ms > messages.floor_ms or timer in unswept
        if delayed:
            index[timer] = pack_main(queue.number, item.key) + item.lane
        if queue.fifo or not delayed:
            slot = pack_slot(0 if queue.fifo else item.visible_at_ms, item.key)
            index[b"\x01" + queue.number4 + item.lane + slot] = b""
        _take_item(rows, messages, "available", item, delayed=delayed)
    text = f"queue {queue.name}: the index of waiting messages"
    rows.compare_all("visibility_index", prefixes["visibility_index"], index, text)


def _take_item(
    rows: Rows, messages: QueueMessages, table: str, item: Item, *, delayed: bool = False
) -> None:
    if not messages.add(item, in_flight=table == "in_progress", delayed=delayed):
        main = pack_main(messages.queue.number, item.key)
        rows.mend(Kind.TWICE, table, main, None, messages.describe_copy(item.message_id))


def _read_items(rows: Rows, messages: QueueMessages, table: str) -> Iterator[Item]:
    """Read the live messages of a queue in a table; put their rows right."""
    queue, in_flight = messages.queue, table == "in_progress"

    def parse(main: bytes, value: bytes) -> Item:
        metadata, _, attempts, forgiven, visible_at_ms, lease = decode_stored_item(value)
        if len(main) != 12:
            raise RefusedRow(Kind.STRANGER, f"a key of {len(main)} bytes, not 12")
        id_ = int.from_bytes(main[4:], "big")
        known = rows.metadata_of(id_, metadata)
        lane = lane_of(known.group, 0 if queue.fifo else known.priority)
        visible_at_ms = min(visible_at_ms, messages.latest_ms)
        right = encode_stored_item(metadata, lane, attempts, forgiven, visible_at_ms)
        if in_flight:
            right = with_lease(right, lease)
        text = f"queue {queue.name}: lane, time or lease of message {id_}"
        rows.compare(table, main, value, right, text)
        return Item(id_, id_, lane, attempts, forgiven, visible_at_ms, metadata, lease)

    for _, item in rows.parse(table, queue.number4, f"{table} messages", parse):
        yield item


# --- the bucket design ---------------------------------------------------------------------------


def read_buckets(rows: Rows, messages: QueueMessages) -> None:
    """Check the buckets of a queue, their messages, and their summaries."""
    queue = messages.queue
    prefix, summary_prefix = live_prefixes("buckets", queue)["buckets"]
    summaries: dict[bytes, bytes] = {}
    misplaced: list[_Entry] = []
    for key, (entries, value) in rows.parse(
        "buckets", prefix, "buckets", _parse_bucket, page=LARGE_PAGE
    ):
        if not entries:
            rows.violate(Kind.EMPTY, "buckets", key, f"queue {queue.name}: an empty bucket")
        kept = _right_entries(rows, messages, key, entries, misplaced)
        if kept:
            bucket = _summarize(rows, messages, summaries, key, _pack(kept.values()))
            rows.count("available messages", len(bucket.waiting))
            rows.count("in_progress messages", len(bucket.flight))
            for item in (*bucket.flight.values(), *bucket.waiting.values()):
                in_flight, delayed = item.key in bucket.flight, item.key in bucket.late_claims
                if not messages.add(item, in_flight=in_flight, delayed=delayed):
                    text = messages.describe_copy(item.message_id)
                    rows.violate(Kind.TWICE, "buckets", key, text)
                    del kept[item.key]
        right = _pack(kept.values()) if kept else None
        if right != value:
            rows.write("buckets", key, right)
    text = f"queue {queue.name}: a summary that its bucket does not agree with"
    rows.compare_all("buckets", [summary_prefix], summaries, text)
    for entry in misplaced:
        lease = entry.lease if isinstance(entry, buckets.InFlight) else None
        item = Item(
            entry.claim_id, entry.message_id, lane_of(entry.group, entry.priority),
            entry.attempts, entry.forgiven, entry.visible_at, entry.metadata, lease or NO_LEASE,
        )  # fmt: skip
        delayed = entry.visible_at > messages.floor_ms
        if messages.add(item, in_flight=lease is not None, delayed=delayed):
            messages.misplaced.append(item)


def _right_entries(
    rows: Rows, messages: QueueMessages, key: bytes, entries: list[_Entry], misplaced: list[_Entry]
) -> dict[int, _Entry]:
    """Return the entries of a bucket, right, by claim; the others go to quarantine or a list."""
    queue, bucket_id = messages.queue, _bucket_id(key)
    kept: dict[int, _Entry] = {}
    for entry in entries:
        claim, id_ = entry.claim_id, entry.message_id
        what = f"queue {queue.name}: message {id_}"
        try:
            known = rows.metadata_of(id_, entry.metadata)
        except CorruptRecord as error:
            rows.reject("buckets", key, _pack([entry]), error, id_.to_bytes(8, "big"))
            continue
        other = kept.get(claim)
        # Claims of a bucket share its exponent, so this one has a bucket.
        is_here = claim >> 60 == bucket_id >> 60 and opendata.bucket_of(claim) == bucket_id
        if not is_here or (other is not None and other.message_id != id_):
            text = f"{what} has claim {claim:#x}, of another bucket or another message"
            rows.violate(Kind.WRONG_KEY, "buckets", key, text)
            misplaced.append(entry)
            continue
        if other is not None:
            rows.violate(Kind.TWICE, "buckets", key, messages.describe_copy(id_))
            continue
        number = opendata.split_id(claim)[1]
        messages.right.next_claim = max(messages.right.next_claim, number + 1)
        is_time = 0 <= entry.visible_at <= messages.latest_ms
        kept[claim] = entry._replace(
            group=known.group,
            priority=0 if queue.fifo else known.priority,
            visible_at=entry.visible_at if is_time else messages.floor_ms,
        )
        if kept[claim] != entry:
            text = f"{what}: its group or priority is not that of its metadata, or no time is this"
            rows.violate(Kind.WRONG_FIELD, "buckets", key, text)
    return kept


def _summarize(
    rows: Rows, messages: QueueMessages, summaries: dict[bytes, bytes], key: bytes, value: bytes
) -> OpenBucket:
    """Open a bucket and recompute its summary."""
    queue, bucket_id = messages.queue, _bucket_id(key)
    summary_key = opendata.SUMMARY.key(queue.id, bucket_id)
    present, told = rows.table("buckets").get(summary_key), None
    with suppress(CorruptRecord):
        told = None if present is None else buckets.decode_summary(present)
    # Only the summary says whether a message whose time has come is still delayed.
    late = {bucket_id + offset for offset in told.late} if told else set()
    bucket = OpenBucket.decode(
        queue, bucket_id, value, lambda claim, time: time > messages.floor_ms or claim in late
    )
    right = bucket.summary()
    is_same = told is not None and _sorted(told) == _sorted(buckets.decode_summary(right))
    summaries[summary_key] = present if is_same and present else right
    return bucket


def _parse_bucket(key: bytes, value: bytes) -> tuple[list[_Entry], bytes]:
    """Return the entries of a bucket: of two copies of a message, that in flight comes first."""
    _, bucket_id = opendata.ACTIVE.parse(key)
    if opendata.bucket_of(bucket_id) != bucket_id:
        raise RefusedRow(Kind.STRANGER, f"{bucket_id:#x} is a claim id, not that of a bucket")
    available, in_flight = buckets.decode_active(value)
    return [*(entry for entry, _ in in_flight), *(entry for entry, _ in available)], value


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


# --- history ------------------------------------------------------------------------------------


def read_ended(rows: Rows, messages: QueueMessages, state: State) -> None:
    """Check the done or the failed messages of a queue, and the index of the failed ones."""
    queue, right, failed = messages.queue, messages.right, state is State.FAILED
    keys, what = opendata.FAILED if failed else opendata.DONE, f"queue {queue.name}: {state.value}"
    # The numbers of the parts so far; rows to write; messages that get new numbers, and in buckets
    # of which size.
    spans: list[tuple[int, int]] = []
    changes: dict[bytes, bytes | None] = {}
    moved: list[tuple[int, list[EndedRecord]]] = []
    index: dict[bytes, bytes] = {}
    behind = getattr(messages.counts, f"next_{state.value}")

    def parse(key: bytes, value: bytes) -> tuple[int, int, list[EndedRecord]]:
        _, bucket_id, part = keys.parse(key)
        return bucket_id, part, records.decode_ended(value, failed=failed)

    def keeps(entry: EndedRecord) -> bool:
        id_ = entry.message_id
        try:
            rows.metadata_of(id_, entry.metadata)
        except CorruptRecord as error:
            row = records.encode_ended([entry], failed=failed)
            rows.reject("history", key, row, error, id_.to_bytes(8, "big"))
            return False
        if id_ in messages.attempts:
            rows.violate(Kind.TWICE, "history", key, f"{what} message {id_} is there twice")
            return False
        messages.attempts[id_] = entry.attempts
        if failed:
            index[_FAILED_INDEX + opendata.terminated(queue.id) + id_.to_bytes(8, "big")] = key
        return True

    found = rows.parse(
        "history", keys.prefix(queue.id), f"{state.value} parts", parse, page=LARGE_PAGE
    )
    for key, (bucket_id, part, entries) in found:
        end, exponent = part + len(entries), opendata.split_id(bucket_id)[0]
        at = bisect(spans, (part, end))
        overlaps = at and spans[at - 1][1] > part or spans[at : at + 1] and spans[at][0] < end
        runs = dict(cut_part(key, entries, keeps))
        kept = list(chain.from_iterable(runs.values()))
        behind = max(behind, end)
        setattr(right, state.value, getattr(right, state.value) + len(kept))
        rows.count(f"{state.value} messages", len(entries))
        fault = (
            Kind.WRONG_KEY
            if opendata.bucket_of(opendata.make_id(exponent, part)) != bucket_id
            else Kind.EMPTY
            if not entries
            else Kind.ORDER
            if overlaps
            else None
        )
        if fault is None:
            spans.insert(at, (part, end))
        else:
            text = f"{what} messages without any, or with numbers of another part or bucket"
            rows.violate(fault, "history", key, text)
            moved += [(exponent, kept)] if kept else []
        if fault or len(kept) < len(entries):
            changes.setdefault(key, None)
        if fault is None and len(kept) < len(entries):
            changes.update(
                (at_, records.encode_ended(run, failed=failed)) for at_, run in runs.items()
            )
    setattr(right, f"next_{state.value}", behind)
    for exponent, kept in moved:
        # The begin of a bucket: the part may need all of it.
        behind = -(-behind // opendata.capacity(exponent)) * opendata.capacity(exponent)
        key = keys.key(queue.id, opendata.make_id(exponent, behind), behind)
        changes[key] = records.encode_ended(kept, failed=failed)
        behind += len(kept)
    for key, row in changes.items():
        rows.write("history", key, row)
    if failed:
        prefix = _FAILED_INDEX + opendata.terminated(queue.id)
        rows.compare_all("history", [prefix], index, f"{what}: the index of the failed messages")


def check_attempts(rows: Rows, messages: QueueMessages) -> None:
    """Check attempts, and the marks of messages that a move has brought in."""
    queue, name = messages.queue, f"queue {messages.queue.name}"

    def parse(key: bytes, value: bytes) -> tuple[int, int]:
        _, message_id, number = opendata.ATTEMPTS.parse(key)
        if records.decode_attempt(value).outcome >= _OUTCOMES:
            raise CorruptRecord("an attempt with an unknown outcome")
        return message_id, number

    for key, (id_, number) in rows.parse("history", queue.attempts_prefix, "attempts", parse):
        if not 1 <= number <= messages.attempts.get(id_, 0):
            text = f"{name}: attempt {number} at message {id_}, which was not made"
            rows.mend(Kind.ORPHAN_ATTEMPT, "history", key, None, text)
    for key, value in rows.scan("history", _MARKS + opendata.terminated(queue.id)):
        rows.count("marks of moved messages")
        id_ = int.from_bytes(key[-8:], "big")
        # The key in a mark is a hint alone.
        right = value if len(value) == 8 else key[-8:]
        right_row = right if id_ in messages.attempts else None
        rows.compare("history", key, value, right_row, f"{name}: the mark of message {id_}")


# --- lists of messages to expire, counters --------------------------------------------------------


def check_unclaimed(rows: Rows, messages: QueueMessages) -> None:
    """Check that every waiting message of a queue with such a retention is listed to expire."""
    queue, due = messages.queue, messages.due

    def parse(key: bytes, packed: bytes) -> list[int]:
        if len(key) != 24 or len(packed) % 8 or key[12:] != _list_end(packed):
            raise CorruptRecord("a row that is not what its key says")
        return [int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)]

    for key, listed in rows.parse("unclaimed", queue.number4, "unclaimed rows", parse):
        for each in listed:
            if due.get(each) == int.from_bytes(key[4:12], "big"):
                del due[each]
    by_due: dict[int, list[bytes]] = {}
    # While a retention changes, sweeps list the others.
    for each, due_ms in due.items() if queue.name not in rows.core.listing else ():
        by_due.setdefault(due_ms, []).append(each.to_bytes(8, "big"))
    for due_ms, keys in by_due.items():
        packed = b"".join(keys)
        key = queue.number4 + due_ms.to_bytes(8, "big") + _list_end(packed)
        text = f"queue {queue.name}: {len(keys)} messages are not listed to expire at {due_ms}"
        rows.mend(Kind.MISSING_ENTRY, "unclaimed", key, packed, text)


def _list_end(packed: bytes) -> bytes:
    return packed[:8] + crc32(packed).to_bytes(4, "big")


def read_counts(rows: Rows, queue: Queue) -> Counts:
    """Read a queue's counters as they are on disk."""
    try:
        return decode_counts(rows.table("queues").get(queue.counts_key) or b"")
    except CorruptRecord:
        text = f"queue {queue.name}: its counters are missing or do not decode"
        # Memory has the best that is known; the comparison puts the rest right.
        row = encode_counts(queue.counts)
        rows.mend(Kind.UNDECODABLE, "queues", queue.counts_key, row, text)
        return msgspec.structs.replace(queue.counts)


def check_counters(rows: Rows, messages: QueueMessages) -> None:
    """Compare the counters of a queue with those that follow from its messages."""
    counts, right, queue = messages.counts, messages.right, messages.queue
    # Messages that are not there have been removed, one way or another.
    gone = len(messages.attempts) + counts.moved_out_total
    came = counts.enqueued_total + counts.moved_in_total
    right.enqueued_total += max(0, gone - came)
    right.removed_total = max(0, came - gone)
    if right != counts:
        wrong = [
            f"{name} is {getattr(counts, name)}, not {getattr(right, name)}"
            for name in Counts.__struct_fields__
            if getattr(counts, name) != getattr(right, name)
        ]
        text = f"queue {queue.name}: {', '.join(wrong)}"
        rows.mend(Kind.COUNTER, "queues", queue.counts_key, encode_counts(right), text)
