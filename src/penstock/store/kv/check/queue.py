"""The audit of one queue: its live messages in either design, its history and its counters."""

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
from penstock.limits import MAX_ATTEMPTS, MAX_BUCKET_EXPONENT, MAX_DURATION_MS
from penstock.model import State
from penstock.store.check_report import Kind
from penstock.store.codec import buckets, opendata, records
from penstock.store.codec.metadata import read_metadata
from penstock.store.codec.records import (
    NO_LEASE,
    decode_stored_item,
    encode_stored_item,
    with_lease,
)
from penstock.store.kv.check.tables import LARGE_PAGE, RefusedRow
from penstock.store.kv.history import cut_part
from penstock.store.kv.queues import Counts, decode_counts, encode_counts
from penstock.store.live import Item, group_of, lane_of
from penstock.store.live.bucket import OpenBucket
from penstock.store.live.indexed_directory import pack_main, pack_slot, timer_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from penstock.store.codec.records import Ended
    from penstock.store.kv.check.tables import Rows
    from penstock.store.kv.queues import Queue

# Heads of keys of history: pointers to failed messages, marks of moved ones, attempts.
POINTERS = _FAILED_INDEX, _MARKS, _ATTEMPTS = b"\x02\x0a", b"\x02\x15", b"\x02\x05"
# Acked, released, expired.
_OUTCOMES: Final = 3
_Entry = buckets.Available | buckets.InFlight


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


class QueueAudit:
    """Reads done messages first, then live, then failed ones: of two copies the first is kept.

    ``attempts`` maps the ids of all messages to their attempts, ``flight`` the leases to the keys
    in flight under them. ``misplaced`` are live messages that have lost their place in a bucket.
    """

    def __init__(self, rows: Rows, queue: Queue) -> None:
        self._rows, self._queue, self._name = rows, queue, f"queue {queue.name}"
        self._counts = self._read_counts()
        # The counters that follow from the messages.
        # Numbers up to which this repair has moved parts of history.
        self._used: dict[str, int] = {}
        self._right = msgspec.structs.replace(
            self._counts, available=0, delayed=0, in_flight=0, done=0, failed=0, live_bytes=0
        )
        self._floor_ms = self._counts.time_floor_ms
        # No message of the queue becomes visible after this.
        self._latest_ms = self._floor_ms + 2 * MAX_DURATION_MS
        # When waiting messages expire, by key.
        self._due: dict[int, int] = {}
        self.attempts: dict[int, int] = {}
        self.flight: dict[bytes, list[int]] = {}
        self.misplaced: list[Item] = []

    def run(self) -> None:
        """Check the messages of the queue, and the rows that follow from them."""
        self._check_ended(State.DONE)
        if self._rows.core.identity.design == "indexed":
            self._check_indexed()
        else:
            self._check_buckets()
        self._check_ended(State.FAILED)
        self._check_attempts()
        self._check_unclaimed()
        self._check_counters()

    def _add(self, item: Item, *, in_flight: bool, delayed: bool = False) -> bool:
        """Count a live message; False if it is there already, or done."""
        spec, right = self._queue.spec, self._right
        if item.message_id in self.attempts:
            return False
        self.attempts[item.message_id] = item.attempts
        metadata = read_metadata(item.metadata) if spec.max_bytes else None
        right.live_bytes += metadata.size if metadata else 0
        if in_flight:
            right.in_flight += 1
            self.flight.setdefault(item.lease, []).append(item.key)
            return True
        right.delayed += delayed
        right.available += not delayed
        if spec.unclaimed_retention_ms:
            self._due[item.key] = item.visible_at_ms + spec.unclaimed_retention_ms
        return True

    # --- the indexed design ------------------------------------------------------------------

    def _check_indexed(self) -> None:
        queue, prefixes = self._queue, live_prefixes("indexed", self._queue)
        held: Counter[bytes] = Counter()
        for item in self._read_items("in_progress"):
            if queue.fifo:
                held[queue.number4 + group_of(item.lane)] += 1
            item.attempts = min(item.attempts + 1, MAX_ATTEMPTS)
            self._take("in_progress", item)
        counts = {key: count.to_bytes(4, "big") for key, count in held.items()}
        text = f"{self._name}: how many messages of a group are in flight"
        self._rows.compare_all("groups", prefixes["groups"], counts, text)
        # A message whose time has come is delayed until a sweep has moved its entry.
        timers = b"\0" + queue.number4, timer_key(queue.number, self._floor_ms + 1, 0)
        unswept = {key for key, _ in rows_of(self._rows.table("visibility_index"), *timers)}
        index: dict[bytes, bytes] = {}
        for item in self._read_items("available"):
            timer = timer_key(queue.number, item.visible_at_ms, item.key)
            delayed = item.visible_at_ms > self._floor_ms or timer in unswept
            if delayed:
                index[timer] = pack_main(queue.number, item.key) + item.lane
            if queue.fifo or not delayed:
                slot = pack_slot(0 if queue.fifo else item.visible_at_ms, item.key)
                index[b"\x01" + queue.number4 + item.lane + slot] = b""
            self._take("available", item, delayed=delayed)
        text = f"{self._name}: the index of waiting messages"
        self._rows.compare_all("visibility_index", prefixes["visibility_index"], index, text)

    def _take(self, table: str, item: Item, *, delayed: bool = False) -> None:
        if not self._add(item, in_flight=table == "in_progress", delayed=delayed):
            text = f"{self._name}: message {item.key} is there twice, or done and live"
            main = pack_main(self._queue.number, item.key)
            self._rows.mend(Kind.TWICE, table, main, None, text)

    def _read_items(self, table: str) -> Iterator[Item]:
        """Read the live messages of a table; put their rows right."""
        queue, rows = self._queue, self._rows

        def parse(main: bytes, value: bytes) -> Item:
            metadata, _, attempts, forgiven, visible_at_ms, lease = decode_stored_item(value)
            if len(main) != 12:
                raise RefusedRow(Kind.STRANGER, f"a key of {len(main)} bytes, not 12")
            id_ = int.from_bytes(main[4:], "big")
            known = rows.metadata_of(id_, metadata)
            lane = lane_of(known.group, 0 if queue.fifo else known.priority)
            visible_at_ms = min(visible_at_ms, self._latest_ms)
            right = encode_stored_item(metadata, lane, attempts, forgiven, visible_at_ms)
            right = with_lease(right, lease) if table == "in_progress" else right
            text = f"{self._name}: lane, time or lease of message {id_}"
            rows.compare(table, main, value, right, text)
            return Item(id_, id_, lane, attempts, forgiven, visible_at_ms, metadata, lease)

        for _, item in rows.parse(table, queue.number4, parse):
            yield item

    # --- the bucket design -------------------------------------------------------------------

    def _check_buckets(self) -> None:
        rows, summaries, misplaced = self._rows, dict[bytes, bytes](), list[_Entry]()
        prefix, summary_prefix = live_prefixes("buckets", self._queue)["buckets"]
        found = rows.parse("buckets", prefix, _parse_bucket, page=LARGE_PAGE)
        for key, (bucket_id, entries, value) in found:
            if not entries:
                rows.violate(Kind.EMPTY, "buckets", key, f"{self._name}: an empty bucket")
            kept: dict[int, _Entry] = {}
            misplaced += [
                each for each in entries if not self._put_right(key, bucket_id, kept, each)
            ]
            if kept:
                bucket = self._open(bucket_id, _pack(kept.values()), summaries)
                for item in (*bucket.flight.values(), *bucket.waiting.values()):
                    in_flight, delayed = item.key in bucket.flight, item.key in bucket.late_claims
                    if not self._add(item, in_flight=in_flight, delayed=delayed):
                        text = f"{self._name}: message {item.message_id} is there twice, or done"
                        rows.violate(Kind.TWICE, "buckets", key, text)
                        del kept[item.key]
            right = _pack(kept.values()) if kept else None
            if right != value:
                rows.write("buckets", key, right)
        text = f"{self._name}: a summary that its bucket does not agree with"
        rows.compare_all("buckets", [summary_prefix], summaries, text)
        for entry in misplaced:
            # No lease can name a claim that no bucket can have.
            has_bucket = entry.claim_id >> 60 <= MAX_BUCKET_EXPONENT
            is_held = isinstance(entry, buckets.InFlight) and has_bucket
            lease = getattr(entry, "lease", NO_LEASE) if is_held else NO_LEASE
            item = Item(
                entry.claim_id, entry.message_id, lane_of(entry.group, entry.priority),
                entry.attempts, entry.forgiven, entry.visible_at, entry.metadata, lease,
            )  # fmt: skip
            delayed = entry.visible_at > self._floor_ms
            if self._add(item, in_flight=is_held, delayed=delayed):
                self.misplaced.append(item)

    def _put_right(
        self, key: bytes, bucket_id: int, kept: dict[int, _Entry], entry: _Entry
    ) -> bool:
        """Put an entry into its bucket, right, or into the quarantine; False if it is misplaced."""
        rows, claim, id_ = self._rows, entry.claim_id, entry.message_id
        what, other = f"{self._name}: message {id_}", kept.get(claim)
        try:
            known = rows.metadata_of(id_, entry.metadata)
        except CorruptRecord as error:
            rows.reject("buckets", key, _pack([entry]), error, id_.to_bytes(8, "big"))
            return True
        # Claims of a bucket share its exponent, so this one has a bucket.
        is_here = claim >> 60 == bucket_id >> 60 and opendata.bucket_of(claim) == bucket_id
        if not is_here or (other is not None and other.message_id != id_):
            text = f"{what} has claim {claim:#x}, of another bucket or another message"
            rows.violate(Kind.WRONG_KEY, "buckets", key, text)
            return False
        if other is not None:
            rows.violate(Kind.TWICE, "buckets", key, f"{what} is there twice")
            return True
        self._right.next_claim = max(self._right.next_claim, opendata.split_id(claim)[1] + 1)
        is_time = 0 <= entry.visible_at <= self._latest_ms
        kept[claim] = entry._replace(
            group=known.group,
            priority=0 if self._queue.fifo else known.priority,
            visible_at=entry.visible_at if is_time else self._floor_ms,
        )
        if kept[claim] != entry:
            text = f"{what}: its group or priority is not that of its metadata, or no time is this"
            rows.violate(Kind.WRONG_FIELD, "buckets", key, text)
        return True

    def _open(self, bucket_id: int, value: bytes, summaries: dict[bytes, bytes]) -> OpenBucket:
        """Open a bucket and recompute its summary."""
        key = opendata.SUMMARY.key(self._queue.id, bucket_id)
        present, told = self._rows.table("buckets").get(key), None
        with suppress(CorruptRecord):
            told = None if present is None else buckets.decode_summary(present)
        # Only the summary says whether a message whose time has come is still delayed.
        late = {bucket_id + offset for offset in told.late} if told else set()
        bucket = OpenBucket.decode(
            self._queue, bucket_id, value, lambda claim, ms: ms > self._floor_ms or claim in late
        )
        right = bucket.summary()
        is_same = told is not None and _sorted(told) == _sorted(buckets.decode_summary(right))
        summaries[key] = present if is_same and present else right
        return bucket

    # --- history -----------------------------------------------------------------------------

    def _check_ended(self, state: State) -> None:
        """Check the done or the failed messages, and the index of the failed ones."""
        queue, rows, failed = self._queue, self._rows, state is State.FAILED
        keys, what = opendata.FAILED if failed else opendata.DONE, f"{self._name}: {state.value}"
        index_prefix = _FAILED_INDEX + opendata.terminated(queue.id)
        # The numbers of the parts so far; rows to write; messages that get new numbers, and in
        # buckets of which size.
        spans, changes = list[tuple[int, int]](), dict[bytes, bytes | None]()
        moved: list[tuple[int, list[Ended]]] = []
        index: dict[bytes, bytes] = {}
        count, behind = 0, getattr(self._counts, f"next_{state.value}")

        def parse(key: bytes, value: bytes) -> tuple[int, int, bool, list[Ended]]:
            _, bucket_id, part = keys.parse(key)
            exponent = opendata.split_id(bucket_id)[0]
            is_home = opendata.bucket_of(opendata.make_id(exponent, part)) == bucket_id
            return exponent, part, is_home, records.decode_ended(value, failed=failed)

        def encode(entries: list[Ended]) -> bytes:
            return records.encode_ended(entries, failed=failed)

        def keeps(entry: Ended) -> bool:
            id_, id8 = entry.message_id, entry.message_id.to_bytes(8, "big")
            try:
                rows.metadata_of(id_, entry.metadata)
            except CorruptRecord as error:
                rows.reject("history", key, encode([entry]), error, id8)
                return False
            if id_ in self.attempts:
                rows.violate(Kind.TWICE, "history", key, f"{what} message {id_} is there twice")
                return False
            self.attempts[id_] = entry.attempts
            return True

        found = rows.parse("history", keys.prefix(queue.id), parse, page=LARGE_PAGE)
        for key, (exponent, part, is_home, told) in found:
            entries = self._with_first_claims(key, what, told)
            end = part + len(entries)
            behind = max(behind, end)
            runs = dict(cut_part(key, entries, keeps))
            kept = list(chain.from_iterable(runs.values()))
            for place, run in runs.items() if failed else ():
                index.update((index_prefix + e.message_id.to_bytes(8, "big"), place) for e in run)
            count += len(kept)
            at = bisect(spans, (part, end))
            fault: Kind | None = None
            if not is_home:
                fault = Kind.WRONG_KEY
            elif not entries:
                fault = Kind.EMPTY
            elif any(begin < end and part < last for begin, last in spans[max(0, at - 1) : at + 1]):
                fault = Kind.ORDER
            if fault is not None:
                text = f"{what} messages without any, or with numbers of another part or bucket"
                rows.violate(fault, "history", key, text)
                moved += [(exponent, kept)] if kept else []
                changes.setdefault(key, None)
                continue
            spans.insert(at, (part, end))
            if len({entry.ended_at_ms for entry in entries}) > 1:
                text = f"{what} messages of several times in one part: not found by their times"
                rows.violate(Kind.ORDER, "history", key, text)
            if runs != {key: told}:
                changes.setdefault(key, None)
                changes.update((place, encode(run)) for place, run in runs.items())
        setattr(self._right, state.value, count)
        setattr(self._right, f"next_{state.value}", behind)
        for exponent, kept in moved:
            # The begin of a bucket: the part may need all of it.
            behind = -(-behind // opendata.capacity(exponent)) * opendata.capacity(exponent)
            place = keys.key(queue.id, opendata.make_id(exponent, behind), behind)
            changes[place] = encode(kept)
            behind += len(kept)
            self._used[f"next_{state.value}"] = behind
        # From behind, and what is to go last: a message is there twice, and found by the next
        # reading, if the process dies between two commits.
        for place, row in sorted(changes.items(), key=_is_written, reverse=True):
            rows.write("history", place, row)
        if failed:
            rows.compare_all("history", [index_prefix], index, f"{what}: the index of messages")

    def _with_first_claims(self, key: bytes, what: str, entries: list[Ended]) -> list[Ended]:
        """Put right when messages were first claimed, as far as their first attempts tell."""
        history = self._rows.core.history
        known = [at for at, entry in enumerate(entries) if entry.first_claimed_ms is not None]
        ids = [entries[at].message_id for at in known]
        first_attempts = history.first_attempts(self._queue, ids) if ids else ()
        right = list(entries)
        for at, recorded_ms in zip(known, first_attempts, strict=True):
            entry = entries[at]
            claimed_ms = recorded_ms or entry.first_claimed_ms
            # Brokers that share a database have a clock each: a copy of it may have such a claim.
            is_time = entry.attempts and (recorded_ms or (claimed_ms or 0) <= entry.ended_at_ms)
            right[at] = entry._replace(first_claimed_ms=claimed_ms if is_time else None)
            if right[at] != entry:
                text = f"{what} message {entry.message_id} was not first claimed when it says"
                self._rows.violate(Kind.WRONG_FIELD, "history", key, text)
        return right

    def _check_attempts(self) -> None:
        """Check attempts, and the marks of messages that a move has brought in."""
        queue, rows = self._queue, self._rows

        def parse(key: bytes, value: bytes) -> tuple[int, int]:
            _, message_id, number = opendata.ATTEMPTS.parse(key)
            if records.decode_attempt(value).outcome >= _OUTCOMES:
                raise CorruptRecord("an attempt with an unknown outcome")
            return message_id, number

        for key, (id_, number) in rows.parse("history", queue.attempts_prefix, parse):
            if not 1 <= number <= self.attempts.get(id_, 0):
                text = f"{self._name}: attempt {number} at message {id_}, which was not made"
                rows.mend(Kind.ORPHAN_ATTEMPT, "history", key, None, text)
        marks: dict[bytes, bytes] = {}
        prefix = _MARKS + opendata.terminated(queue.id)
        for key, value in rows.scan("history", prefix):
            if int.from_bytes(key[-8:], "big") in self.attempts:
                # The key in a mark is a hint alone.
                marks[key] = value if len(value) == 8 else key[-8:]
        rows.compare_all("history", [prefix], marks, f"{self._name}: a mark of a moved message")

    # --- lists of messages to expire, counters -------------------------------------------------

    def _check_unclaimed(self) -> None:
        """Check that every waiting message of a queue with such a retention is listed to expire."""
        queue, due = self._queue, self._due

        def parse(key: bytes, packed: bytes) -> list[int]:
            if len(key) != 24 or len(packed) % 8 or key[12:] != _list_end(packed):
                raise CorruptRecord("a row that is not what its key says")
            return [int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)]

        for key, listed in self._rows.parse("unclaimed", queue.number4, parse):
            for each in listed:
                if due.get(each) == int.from_bytes(key[4:12], "big"):
                    del due[each]
        by_due: dict[int, list[bytes]] = {}
        # While a retention changes, sweeps list the others.
        for each, due_ms in due.items() if queue.name not in self._rows.core.listing else ():
            by_due.setdefault(due_ms, []).append(each.to_bytes(8, "big"))
        for due_ms, keys in by_due.items():
            packed = b"".join(keys)
            key = queue.number4 + due_ms.to_bytes(8, "big") + _list_end(packed)
            text = f"{self._name}: {len(keys)} messages are not listed to expire at {due_ms}"
            self._rows.mend(Kind.MISSING_ENTRY, "unclaimed", key, packed, text)

    def _read_counts(self) -> Counts:
        """Read the counters as they are on disk."""
        key, counts = self._queue.counts_key, self._queue.counts
        try:
            return decode_counts(self._rows.table("queues").get(key) or b"")
        except CorruptRecord:
            text = f"{self._name}: its counters are missing or do not decode"
            # Memory has the best that is known; the comparison puts the rest right.
            self._rows.mend(Kind.UNDECODABLE, "queues", key, encode_counts(counts), text)
            return msgspec.structs.replace(counts)

    def _check_counters(self) -> None:
        counts, right = self._counts, self._right
        # Messages that are not there have been removed, one way or another.
        gone = len(self.attempts) + counts.moved_out_total
        came = counts.enqueued_total + counts.moved_in_total
        right.enqueued_total += max(0, gone - came)
        right.removed_total = max(0, came - gone)
        wrong = [
            f"{name} is {getattr(counts, name)}, not {getattr(right, name)}"
            for name in Counts.__struct_fields__
            if getattr(counts, name) != getattr(right, name)
        ]
        # Behind the parts that this repair has moved: it may die before it reads again.
        row = encode_counts(msgspec.structs.replace(right, **self._used))
        if wrong:
            text = f"{self._name}: {', '.join(wrong)}"
            self._rows.mend(Kind.COUNTER, "queues", self._queue.counts_key, row, text)
        elif self._used:
            self._rows.write("queues", self._queue.counts_key, row)


def _parse_bucket(key: bytes, value: bytes) -> tuple[int, list[_Entry], bytes]:
    """Return the entries of a bucket: of two copies of a message, that in flight comes first."""
    _, bucket_id = opendata.ACTIVE.parse(key)
    if opendata.bucket_of(bucket_id) != bucket_id:
        raise RefusedRow(Kind.STRANGER, f"{bucket_id:#x} is a claim id, not that of a bucket")
    available, in_flight = buckets.decode_active(value)
    return bucket_id, [*(each for each, _ in in_flight), *(each for each, _ in available)], value


def _is_written(change: tuple[bytes, bytes | None]) -> tuple[bool, bytes]:
    return change[1] is not None, change[0]


def _pack(entries: Collection[_Entry]) -> bytes:
    return buckets.pack_active(
        [buckets.encode_available(e) for e in entries if isinstance(e, buckets.Available)],
        [buckets.encode_in_flight(e) for e in entries if isinstance(e, buckets.InFlight)],
    )


def _sorted(summary: buckets.Summary) -> tuple[object, ...]:
    """Return a summary without the order of its lists, which depends on the past."""
    late, heads, held = sorted(summary.late), sorted(summary.heads), sorted(summary.held)
    return (*summary[:4], summary.due, late, heads, held)


def _list_end(packed: bytes) -> bytes:
    return packed[:8] + crc32(packed).to_bytes(4, "big")
