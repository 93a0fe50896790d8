"""The audit of the bucket design: buckets, what is in them, and their summaries.

The key map is at the top of ``buckets``. What counts as delayed is written in the summaries and
nowhere else; if a summary is lost, it is told from the time that the queue has last seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.errors import CorruptRecord
from penstock.store.check_report import Kind, all_of, outside
from penstock.store.codec import opendata, records
from penstock.store.codec.metadata import decode_metadata
from penstock.store.codec.summaries import Summary, decode_summary
from penstock.store.live.bucket import OpenBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from penstock.store.check_report import Findings
    from penstock.store.kv.check.census import Census, Loser
    from penstock.store.kv.queues import Queue

__all__ = ["BucketsAudit"]

# Buckets may be large, so few are read at a time.
_PAGE: Final = 64

_Entry: TypeAlias = records.Available | records.InFlight
_Change: TypeAlias = "Callable[[_Contents], None]"


class _Contents(NamedTuple):
    """The messages of a bucket, by claim id; ``late`` are those that count as delayed."""

    waiting: dict[int, records.Available]
    flight: dict[int, records.InFlight]
    late: set[int]

    def encode(self) -> bytes:
        """Encode the bucket."""
        return records.pack_active(
            [records.encode_available(entry) for entry in self.waiting.values()],
            [records.encode_in_flight(entry) for entry in self.flight.values()],
        )


class BucketsAudit:
    """Checks the table ``buckets``."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._table = findings.table("buckets")

    def place(self, queue: Queue, key: int, *, in_flight: bool) -> tuple[str, bytes]:  # noqa: ARG002
        """Give table and key of the record that holds a message."""
        return "buckets", opendata.active_key(queue.id, opendata.bucket_of(key))

    # --- checks --------------------------------------------------------------------------

    def scan(self, census: Census) -> None:
        """Check the live messages of a queue."""
        queue, findings = census.queue, self._findings
        losers: list[Loser] = []
        homeless: list[_Entry] = []
        summaries = 0
        for key, value in all_of(self._table, opendata.active_prefix(queue.id), page=_PAGE):
            findings.count("buckets")
            bucket_id = self._bucket_id(queue, key, value)
            if bucket_id is None:
                continue
            summary = self._table.get(opendata.bucket_summary_key(queue.id, bucket_id))
            summaries += summary is not None
            try:
                available, in_flight = records.decode_active(value)
            except CorruptRecord as error:
                text = f"queue {queue.name}: {error}"
                findings.reject(Kind.UNDECODABLE, "buckets", key, value, text)
                summaries -= summary is not None
                continue
            if not available and not in_flight:
                text = f"queue {queue.name}: a bucket without messages"
                findings.violate(Kind.EMPTY, "buckets", key, text)
                self._delete(queue, bucket_id)
                continue
            late = _late_of(bucket_id, summary)
            contents = _Contents({}, {}, set())
            is_right = True
            for entry in _entries(available, in_flight):
                is_right &= self._take_in(census, key, bucket_id, contents, entry, homeless)
            rushed = self._tell_late(census, bucket_id, contents, late)
            losers += self._meet(census, contents)
            if not is_right:
                findings.put("buckets", key, contents.encode())
            self._check_summary(queue, bucket_id, contents, summary, known_wrong=rushed)
        self._check_orphans(queue, summaries)
        self.drop(census, losers)
        self._settle(census, [entry for entry in homeless if _meet_homeless(census, entry)])

    def _bucket_id(self, queue: Queue, key: bytes, value: bytes) -> int | None:
        try:
            _, _, bucket_id = opendata.parse_active_key(key)
            if opendata.bucket_of(bucket_id) == bucket_id:
                return bucket_id
            text = f"queue {queue.name}: {bucket_id:#x} is a claim id, not that of a bucket"
        except CorruptRecord as error:
            text = f"queue {queue.name}: {error}"
        self._findings.reject(Kind.STRANGER, "buckets", key, value, text)
        return None

    def _take_in(
        self,
        census: Census,
        key: bytes,
        bucket_id: int,
        contents: _Contents,
        entry: _Entry,
        homeless: list[_Entry],
    ) -> bool:
        """Sort an entry into a bucket; False if it is wrong there, or in itself."""
        findings, queue = self._findings, census.queue
        what = f"queue {queue.name}: message {entry.message_id}"
        try:
            known = decode_metadata(entry.metadata)
        except CorruptRecord as error:
            findings.violate(Kind.UNDECODABLE, "buckets", key, f"{what}: {error}")
            self._set_aside(key, entry, str(error))
            return False
        try:
            home = opendata.bucket_of(entry.claim_id)
        except CorruptRecord:
            home = None
        if home != bucket_id:
            text = f"{what} has claim {entry.claim_id:#x}, which is of another bucket"
            findings.violate(Kind.MISPLACED, "buckets", key, text)
            homeless.append(entry)
            return False
        census.next_claim = max(census.next_claim, opendata.split_id(entry.claim_id)[1] + 1)
        other = contents.waiting.get(entry.claim_id) or contents.flight.get(entry.claim_id)
        if other is not None:
            text = f"{what} has claim {entry.claim_id:#x}, as message {other.message_id} has"
            findings.violate(Kind.TWICE, "buckets", key, text)
            if other.message_id != entry.message_id:
                homeless.append(entry)
                return False
            if isinstance(entry, records.InFlight):
                contents.waiting.pop(entry.claim_id, None)
        group, priority = known.group, 0 if queue.fifo else known.priority
        visible_at = entry.visible_at
        if not 0 <= visible_at <= census.latest_ms:
            visible_at = census.floor_ms
        is_right = (entry.group, entry.priority, entry.visible_at) == (group, priority, visible_at)
        if not is_right:
            text = f"{what}: its group or priority is not that of its metadata, or no time is this"
            findings.violate(Kind.WRONG_FIELD, "buckets", key, text)
            entry = entry._replace(group=group, priority=priority, visible_at=visible_at)
        if isinstance(entry, records.Available):
            contents.waiting[entry.claim_id] = entry
        else:
            contents.flight[entry.claim_id] = entry
        return is_right and other is None

    def _meet(self, census: Census, contents: _Contents) -> list[Loser]:
        """Enter the messages of a bucket into the census."""
        found = []
        for claim_id, waiting in contents.waiting.items():
            self._findings.count("available messages")
            loser = census.meet_waiting(
                waiting.message_id,
                claim_id,
                attempts=waiting.attempts,
                visible_at_ms=waiting.visible_at,
                delayed=claim_id in contents.late,
            )
            found.append((waiting.message_id, loser))
        for claim_id, flying in contents.flight.items():
            self._findings.count("in_progress messages")
            loser = census.meet_in_flight(
                flying.message_id, claim_id, attempts=flying.attempts, lease=flying.lease
            )
            found.append((flying.message_id, loser))
        losers = []
        for message_id, loser in found:
            if loser is not None:
                losers.append(loser)
                text = f"queue {census.queue.name}: message {message_id} is there twice"
                table, place = self.place(census.queue, loser.key, in_flight=loser.in_flight)
                self._findings.violate(Kind.TWICE, table, place, text)
        return losers

    def _tell_late(
        self, census: Census, bucket_id: int, contents: _Contents, late: set[int] | None
    ) -> bool:
        """Work out what is delayed; say whether the summary has let anything go too early."""
        rushed = False
        for claim_id, entry in contents.waiting.items():
            early = entry.visible_at > census.floor_ms
            if early or (late is not None and claim_id in late):
                contents.late.add(claim_id)
            if early and late is not None and claim_id not in late:
                rushed = True
                key = opendata.bucket_summary_key(census.queue.id, bucket_id)
                text = (
                    f"queue {census.queue.name}: message {entry.message_id} counts as available "
                    "before its time"
                )
                self._findings.violate(Kind.EARLY, "buckets", key, text)
        return rushed

    def _check_summary(
        self,
        queue: Queue,
        bucket_id: int,
        contents: _Contents,
        present: bytes | None,
        *,
        known_wrong: bool,
    ) -> None:
        findings = self._findings
        findings.count("summaries")
        key = opendata.bucket_summary_key(queue.id, bucket_id)
        if not contents.waiting and not contents.flight:
            self._delete(queue, bucket_id)
            return
        right = _summary_of(queue, bucket_id, contents)
        text = ""
        try:
            if present is None:
                text = "a bucket without its summary"
            elif _comparable(decode_summary(present)) != _comparable(decode_summary(right)):
                text = "a summary that its bucket does not agree with"
        except CorruptRecord as error:
            text = str(error)
        if text:
            if not known_wrong:
                findings.violate(Kind.SUMMARY, "buckets", key, f"queue {queue.name}: {text}")
            findings.put("buckets", key, right)

    def _check_orphans(self, queue: Queue, expected: int) -> None:
        prefix = opendata.bucket_summary_prefix(queue.id)
        if sum(1 for _ in all_of(self._table, prefix)) == expected:
            return
        for key, _ in all_of(self._table, prefix):
            value = self._table.get(opendata.active_prefix(queue.id) + key[len(prefix) :])
            try:
                if value is not None and records.decode_active(value):
                    continue
            except CorruptRecord:
                pass
            text = f"queue {queue.name}: a summary without its bucket"
            self._findings.violate(Kind.ORPHAN_ENTRY, "buckets", key, text)
            self._findings.delete("buckets", key)

    def strangers(self) -> None:
        """Check for records of queues that are not there."""
        findings = self._findings
        queues = findings.core.queues.values()
        prefixes = [opendata.active_prefix(queue.id) for queue in queues]
        prefixes += [opendata.bucket_summary_prefix(queue.id) for queue in queues]
        text = "a record of a queue that is not there"
        for key, value in outside(self._table, prefixes):
            if key[1:2] == bytes([opendata.RecordType.BUCKET_SUMMARY]):
                findings.violate(Kind.STRANGER, "buckets", key, text)
                findings.delete("buckets", key)
            else:
                findings.reject(Kind.STRANGER, "buckets", key, value, text)

    # --- repairs -------------------------------------------------------------------------

    def drop(self, census: Census, losers: Collection[Loser]) -> None:
        """Remove live copies of messages."""
        by_bucket: dict[int, list[Loser]] = {}
        for loser in losers:
            by_bucket.setdefault(opendata.bucket_of(loser.key), []).append(loser)
        for bucket_id, group in by_bucket.items():

            def remove(contents: _Contents, group: list[Loser] = group) -> None:
                for loser in group:
                    (contents.flight if loser.in_flight else contents.waiting).pop(loser.key, None)

            self._rewrite(census.queue, census.floor_ms, bucket_id, remove)

    def put_back(self, queue: Queue, floor_ms: int, keys: Collection[int]) -> None:
        """Make messages in flight available."""
        by_bucket: dict[int, list[int]] = {}
        for key in keys:
            by_bucket.setdefault(opendata.bucket_of(key), []).append(key)
        for bucket_id, group in by_bucket.items():

            def land(contents: _Contents, group: list[int] = group) -> None:
                for key in group:
                    entry = contents.flight.pop(key, None)
                    if entry is not None:
                        contents.waiting[key] = _landed(entry, key, floor_ms)

            self._rewrite(queue, floor_ms, bucket_id, land)

    def expel(self, queue: Queue, message_ids: Collection[int], why: str) -> None:
        """Move live messages to the quarantine."""
        wanted = set(message_ids)
        self._findings.flush()
        for key, value in all_of(self._table, opendata.active_prefix(queue.id), page=_PAGE):
            try:
                available, in_flight = records.decode_active(value)
            except CorruptRecord:
                continue
            entries = _entries(available, in_flight)
            doomed = [entry for entry in entries if entry.message_id in wanted]
            if not doomed:
                continue
            for entry in doomed:
                self._set_aside(key, entry, why)
            claims = [entry.claim_id for entry in doomed]

            def remove(contents: _Contents, claims: list[int] = claims) -> None:
                for claim_id in claims:
                    contents.waiting.pop(claim_id, None)
                    contents.flight.pop(claim_id, None)

            bucket_id = int.from_bytes(key[-8:], "big")
            self._rewrite(queue, queue.counts.time_floor_ms, bucket_id, remove)

    def _settle(self, census: Census, homeless: Iterable[_Entry]) -> None:
        """Move messages to the bucket of their claim, or to a new one if that claim is taken."""
        number = max(census.next_claim, census.queue.counts.next_claim)
        for entry in homeless:
            if not self._move_in(census, entry):
                self._rehome(census, entry, number)
                number += 1

    def _move_in(self, census: Census, entry: _Entry) -> bool:
        """Put a message into the bucket of its claim; False if that has it taken."""
        is_free = True

        def move_in(contents: _Contents) -> None:
            nonlocal is_free
            if entry.claim_id in contents.waiting or entry.claim_id in contents.flight:
                is_free = False
            elif isinstance(entry, records.Available):
                contents.waiting[entry.claim_id] = entry
            else:
                contents.flight[entry.claim_id] = entry

        try:
            home = opendata.bucket_of(entry.claim_id)
        except CorruptRecord:
            return False
        self._rewrite(census.queue, census.floor_ms, home, move_in)
        return is_free

    def _rehome(self, census: Census, entry: _Entry, number: int) -> None:
        """Give a message a claim of its own: a lease can't list it, so it waits."""
        queue = census.queue
        claim_id = opendata.make_id(queue.spec.bucket_exponent, number)

        def move_in(contents: _Contents) -> None:
            if isinstance(entry, records.InFlight):
                contents.waiting[claim_id] = _landed(entry, claim_id, census.floor_ms)
            else:
                contents.waiting[claim_id] = entry._replace(claim_id=claim_id)

        self._rewrite(queue, census.floor_ms, opendata.bucket_of(claim_id), move_in)

    def _rewrite(self, queue: Queue, floor_ms: int, bucket_id: int, change: _Change) -> None:
        """Change a bucket as it is on disk, and its summary with it."""
        findings = self._findings
        if not findings.repair:
            return
        findings.flush()
        key = opendata.active_key(queue.id, bucket_id)
        value = self._table.get(key)
        available, in_flight = ([], []) if value is None else records.decode_active(value)
        contents = _Contents(
            {entry.claim_id: entry for entry, _ in available},
            {entry.claim_id: entry for entry, _ in in_flight},
            set(),
        )
        change(contents)
        if not contents.waiting and not contents.flight:
            self._delete(queue, bucket_id)
            return
        summary = self._table.get(opendata.bucket_summary_key(queue.id, bucket_id))
        late = _late_of(bucket_id, summary) or set()
        for claim_id, entry in contents.waiting.items():
            if claim_id in late or entry.visible_at > floor_ms:
                contents.late.add(claim_id)
        right = _summary_of(queue, bucket_id, contents)
        findings.put("buckets", key, contents.encode())
        findings.put("buckets", opendata.bucket_summary_key(queue.id, bucket_id), right)
        findings.flush()

    def _delete(self, queue: Queue, bucket_id: int) -> None:
        self._findings.delete(
            "buckets",
            opendata.active_key(queue.id, bucket_id),
            opendata.bucket_summary_key(queue.id, bucket_id),
        )

    def _set_aside(self, key: bytes, entry: _Entry, why: str) -> None:
        encoded = (
            records.encode_available(entry)
            if isinstance(entry, records.Available)
            else records.encode_in_flight(entry)
        )
        message_id = entry.message_id.to_bytes(8, "big")
        self._findings.set_aside("buckets", key + message_id, encoded, why)


def _entries(
    available: list[tuple[records.Available, bytes]],
    in_flight: list[tuple[records.InFlight, bytes]],
) -> list[_Entry]:
    return [*(entry for entry, _ in available), *(entry for entry, _ in in_flight)]


def _meet_homeless(census: Census, entry: _Entry) -> bool:
    """Enter a message that is in the wrong bucket; False if the queue has another copy of it."""
    if entry.message_id in census.waiting or entry.message_id in census.flight:
        return False
    if isinstance(entry, records.InFlight):
        census.meet_in_flight(
            entry.message_id, entry.claim_id, attempts=entry.attempts, lease=entry.lease
        )
    else:
        census.meet_waiting(
            entry.message_id,
            entry.claim_id,
            attempts=entry.attempts,
            visible_at_ms=entry.visible_at,
            delayed=entry.visible_at > census.floor_ms,
        )
    return True


def _landed(entry: records.InFlight, claim_id: int, floor_ms: int) -> records.Available:
    return records.Available(
        entry.message_id,
        claim_id,
        entry.attempts,
        entry.metadata,
        floor_ms,
        entry.forgiven,
        entry.priority,
        entry.group,
    )


def _late_of(bucket_id: int, summary: bytes | None) -> set[int] | None:
    """Give the claims that a summary counts as delayed; None if it can't be told."""
    try:
        offsets = decode_summary(summary or b"").late
    except CorruptRecord:
        return None
    return {bucket_id + offset for offset in offsets}


def _summary_of(queue: Queue, bucket_id: int, contents: _Contents) -> bytes:
    """Make the summary that a bucket should have."""
    late = contents.late
    bucket = OpenBucket.decode(
        queue, bucket_id, contents.encode(), lambda claim_id, _: claim_id in late
    )
    return bucket.summary()


def _comparable(summary: Summary) -> tuple[object, ...]:
    """Give a summary without the order of its lists, which depends on what happened when."""
    return (
        *summary[:4],
        sorted(summary.late),
        summary.due,
        sorted(summary.heads),
        sorted(summary.held),
    )
