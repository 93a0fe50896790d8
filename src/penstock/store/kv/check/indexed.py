"""The audit of the indexed design: records, their index entries, and the counts of FIFO groups.

The key map is at the top of ``indexed``. An index entry that every record accounts for is no
orphan: so entries are counted first, and looked up one by one only if there are too many.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import CorruptRecord
from penstock.limits import MAX_ATTEMPTS
from penstock.store.check_report import Kind, all_of, outside
from penstock.store.codec.metadata import decode_metadata
from penstock.store.codec.stored import decode_stored_item, encode_stored_item
from penstock.store.live import NO_LEASE, group_of, lane_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from penstock.store.check_report import Findings
    from penstock.store.kv.check.census import Census, Loser
    from penstock.store.kv.queues import Queue

__all__ = ["IndexedAudit"]

_PAGE: Final = 1_000
_NEVER_MS: Final = 1 << 63
_slot: Final = Struct(">QQ").pack
_TABLES: Final = ("available", "in_progress")


class _Record(NamedTuple):
    """A decoded record and what its keys should be."""

    main: bytes
    message_id: int
    lane: bytes
    attempts: int
    forgiven: int
    visible_at_ms: int
    metadata: bytes
    lease: bytes
    ready_key: bytes
    timer_key: bytes

    def encode(self) -> bytes:
        """Encode the record as it should be."""
        return encode_stored_item(
            self.metadata,
            self.ready_key,
            self.main[4:],
            self.attempts,
            self.forgiven,
            self.visible_at_ms,
            self.lease,
        )


class IndexedAudit:
    """Checks ``available``, ``in_progress``, ``visibility_index`` and ``groups``."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._index = findings.table("visibility_index")

    def place(self, queue: Queue, key: int, *, in_flight: bool) -> tuple[str, bytes]:
        """Give table and key of the record that holds a message."""
        return _TABLES[in_flight], _number(queue) + key.to_bytes(8, "big")

    # --- checks --------------------------------------------------------------------------

    def scan(self, census: Census) -> None:
        """Check the live messages of a queue."""
        self._scan_in_flight(census)
        losers: list[Loser] = []
        ready = timers = 0
        for page in self._pages(census, "available"):
            present = self._index.multi_get([r.ready_key for r in page])
            timed = self._index.multi_get([r.timer_key for r in page])
            for record, at_ready, at_timer in zip(page, present, timed, strict=True):
                delayed = self._check_entries(census, record, at_ready, at_timer)
                loser = census.meet_waiting(
                    record.message_id,
                    record.message_id,
                    attempts=record.attempts,
                    visible_at_ms=record.visible_at_ms,
                    delayed=delayed,
                )
                if loser is not None:
                    losers.append(loser)
                    self._twice(census.queue, record)
            ready += sum(value is not None for value in present)
            timers += sum(value is not None for value in timed)
        self._check_orphans(census.queue, b"\x01", ready)
        self._check_orphans(census.queue, b"\x00", timers)
        self.drop(census, losers)

    def _scan_in_flight(self, census: Census) -> None:
        queue = census.queue
        groups: dict[bytes, int] = {}
        for page in self._pages(census, "in_progress"):
            for record in page:
                attempts = min(record.attempts + 1, MAX_ATTEMPTS)
                census.meet_in_flight(
                    record.message_id, record.message_id, attempts=attempts, lease=record.lease
                )
                if queue.fifo:
                    group = group_of(record.lane)
                    groups[group] = groups.get(group, 0) + 1
        self._check_groups(queue, groups)

    def _twice(self, queue: Queue, record: _Record) -> None:
        self._findings.violate(
            Kind.TWICE,
            "available",
            record.main,
            f"queue {queue.name}: message {record.message_id} waits and is in flight",
        )

    def _pages(self, census: Census, table: str) -> Iterator[list[_Record]]:
        queue = census.queue
        page: list[_Record] = []
        for main, value in all_of(self._findings.table(table), _number(queue)):
            self._findings.count(f"{table} messages")
            record = self._decode(queue, table, main, value, census.latest_ms)
            if record is not None:
                page.append(record)
            if len(page) == _PAGE:
                yield page
                page = []
        yield page

    def _decode(
        self, queue: Queue, table: str, main: bytes, value: bytes, latest_ms: int
    ) -> _Record | None:
        findings = self._findings
        try:
            metadata, index_key, id8, attempts, forgiven, visible_at, lease = decode_stored_item(
                value
            )
            known = decode_metadata(metadata)
        except CorruptRecord as error:
            findings.reject(Kind.UNDECODABLE, table, main, value, f"queue {queue.name}: {error}")
            return None
        if len(main) != 12:
            text = f"queue {queue.name}: a key of {len(main)} bytes, not 12"
            findings.reject(Kind.STRANGER, table, main, value, text)
            return None
        lane = lane_of(known.group, 0 if queue.fifo else known.priority)
        number, message_id = _number(queue), int.from_bytes(main[4:], "big")
        stored_at, visible_at = visible_at, min(visible_at, latest_ms)
        ready_key = b"\x01" + number + lane + _slot(0 if queue.fifo else visible_at, message_id)
        timer_key = b"\x00" + number + _slot(visible_at, message_id)
        record = _Record(
            main, message_id, lane, attempts, forgiven, visible_at, metadata, lease, ready_key,
            timer_key,
        )  # fmt: skip
        wrong = [
            name
            for name, is_wrong in (
                ("id", id8 != main[4:]),
                ("index key", index_key != ready_key),
                ("time", visible_at != stored_at),
                ("lease", table == "available" and lease != NO_LEASE),
            )
            if is_wrong
        ]
        if wrong:
            text = f"queue {queue.name}: {' and '.join(wrong)} of message {message_id} is wrong"
            findings.violate(Kind.WRONG_FIELD, table, main, text)
            if table == "available":
                record = record._replace(lease=NO_LEASE)
            findings.put(table, main, record.encode())
        return record

    def _check_entries(
        self, census: Census, record: _Record, at_ready: bytes | None, at_timer: bytes | None
    ) -> bool:
        """Check the index entries of a waiting message; say whether it is delayed."""
        findings, fifo = self._findings, census.queue.fifo
        what = f"queue {census.queue.name}: message {record.message_id}"
        early = record.visible_at_ms > census.floor_ms
        if at_timer is not None and (fifo or at_ready is None):
            early = True
        rushed = early and at_timer is None and at_ready is not None
        if rushed:
            text = f"{what} counts as available before its time"
            findings.violate(Kind.EARLY, "visibility_index", record.ready_key, text)
        for key, value, wanted in (
            (record.ready_key, at_ready, record.main if fifo or not early else None),
            (record.timer_key, at_timer, record.main + record.lane if early else None),
        ):
            if value == wanted:
                continue
            if wanted is None:
                if not rushed:
                    text = f"{what} stands in the index as available and as delayed"
                    findings.violate(Kind.TWICE, "visibility_index", key, text)
                findings.delete("visibility_index", key)
                continue
            if value is not None:
                text = f"{what}: its index entry names another message or lane"
                findings.violate(Kind.WRONG_FIELD, "visibility_index", key, text)
            elif not rushed:
                text = f"{what} has no index entry"
                findings.violate(Kind.MISSING_ENTRY, "visibility_index", key, text)
            findings.put("visibility_index", key, wanted)
        return early

    def _check_orphans(self, queue: Queue, kind: bytes, expected: int) -> None:
        """Look for index entries without a record, if there are more entries than records."""
        prefix = kind + _number(queue)
        entries = sum(1 for _ in all_of(self._index, prefix))
        self._findings.count("index entries", entries)
        if entries == expected:
            return
        page: list[tuple[bytes, bytes]] = []
        for key, _ in all_of(self._index, prefix):
            page.append((key, _number(queue) + key[-8:]))
            if len(page) == _PAGE:
                self._report_orphans(queue, page)
                page = []
        self._report_orphans(queue, page)

    def _report_orphans(self, queue: Queue, page: Sequence[tuple[bytes, bytes]]) -> None:
        findings = self._findings
        values = findings.table("available").multi_get([main for _, main in page])
        for (key, main), value in zip(page, values, strict=True):
            if value is not None and key in self._keys_of(queue, main, value):
                continue
            text = f"queue {queue.name}: no message waits under this index entry"
            findings.violate(Kind.ORPHAN_ENTRY, "visibility_index", key, text)
            findings.delete("visibility_index", key)

    def _keys_of(self, queue: Queue, main: bytes, value: bytes) -> tuple[bytes, ...]:
        """Give the keys that a record's index entries have, if it can be told."""
        try:
            metadata, _, _, _, _, visible_at, _ = decode_stored_item(value)
            known = decode_metadata(metadata)
        except CorruptRecord:
            return ()
        lane = lane_of(known.group, 0 if queue.fifo else known.priority)
        slot = (0).to_bytes(8, "big") if queue.fifo else visible_at.to_bytes(8, "big")
        timer = b"\x00" + _number(queue) + visible_at.to_bytes(8, "big") + main[4:]
        return b"\x01" + _number(queue) + lane + slot + main[4:], timer

    def _check_groups(self, queue: Queue, groups: dict[bytes, int]) -> None:
        findings, table = self._findings, self._findings.table("groups")
        wanted = {
            _number(queue) + group: count.to_bytes(4, "big") for group, count in groups.items()
        }
        for key, value in all_of(table, _number(queue)):
            findings.count("groups")
            right = wanted.pop(key, None)
            if value != right:
                text = (
                    f"queue {queue.name}: a group counts {int.from_bytes(value, 'big')} in flight, "
                    f"{int.from_bytes(right or b'', 'big')} are"
                )
                findings.violate(Kind.GROUP_COUNT, "groups", key, text)
                if right is None:
                    findings.delete("groups", key)
                else:
                    findings.put("groups", key, right)
        for key, right in wanted.items():
            text = (
                f"queue {queue.name}: a group has {int.from_bytes(right, 'big')} in flight "
                "and no count"
            )
            findings.violate(Kind.GROUP_COUNT, "groups", key, text)
            findings.put("groups", key, right)

    def strangers(self) -> None:
        """Check for records of queues that are not there."""
        findings = self._findings
        numbers = [number.to_bytes(4, "big") for number in findings.core.by_number]
        text = "a record of a queue that is not there"
        for name in _TABLES:
            for key, value in outside(findings.table(name), numbers):
                findings.reject(Kind.STRANGER, name, key, value, text)
        for name, prefixes in (
            ("groups", numbers),
            ("visibility_index", [kind + n for kind in (b"\x00", b"\x01") for n in numbers]),
        ):
            for key, _ in outside(findings.table(name), prefixes):
                findings.violate(Kind.STRANGER, name, key, text)
                findings.delete(name, key)

    # --- repairs -------------------------------------------------------------------------

    def drop(self, census: Census, losers: Collection[Loser]) -> None:
        """Remove live copies of messages."""
        queue, findings = census.queue, self._findings
        for loser in losers:
            table, main = self.place(queue, loser.key, in_flight=loser.in_flight)
            value = findings.table(table).get(main)
            findings.delete(table, main)
            if value is not None and not loser.in_flight:
                findings.delete("visibility_index", *self._keys_of(queue, main, value))

    def put_back(self, queue: Queue, floor_ms: int, keys: Collection[int]) -> None:
        """Make messages in flight available."""
        findings = self._findings
        findings.flush()
        mains = [_number(queue) + key.to_bytes(8, "big") for key in keys]
        values = findings.table("in_progress").multi_get(mains)
        for main, value in zip(mains, values, strict=True):
            record = (
                None
                if value is None
                else self._decode(queue, "in_progress", main, value, _NEVER_MS)
            )
            if record is None:
                continue
            slot = _slot(0 if queue.fifo else floor_ms, record.message_id)
            back = record._replace(
                attempts=min(record.attempts + 1, MAX_ATTEMPTS),
                visible_at_ms=floor_ms,
                lease=NO_LEASE,
                ready_key=b"\x01" + _number(queue) + record.lane + slot,
            )
            findings.delete("in_progress", main)
            findings.put("available", main, back.encode())
            findings.put("visibility_index", back.ready_key, main)

    def expel(self, queue: Queue, message_ids: Collection[int], why: str) -> None:
        """Move live messages to the quarantine."""
        findings = self._findings
        findings.flush()
        mains = [_number(queue) + message_id.to_bytes(8, "big") for message_id in message_ids]
        for table in _TABLES:
            for main, value in zip(mains, findings.table(table).multi_get(mains), strict=True):
                if value is not None:
                    findings.set_aside(table, main, value, why)
                    if table == "available":
                        findings.delete("visibility_index", *self._keys_of(queue, main, value))


def _number(queue: Queue) -> bytes:
    return queue.number.to_bytes(4, "big")
