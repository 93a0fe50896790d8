"""The audit of the metadata log: segments in order, entries in their segments, listings."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.errors import CorruptRecord
from penstock.limits import MAX_DURATION_MS
from penstock.store.check_report import Kind, all_of
from penstock.store.codec import log as codec
from penstock.store.codec.metadata import decode_metadata
from penstock.store.kv.log import LogSettings

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.store.check_report import Findings

__all__ = ["LogAudit"]

_SETTINGS: Final = b"\x02\x10"
_UNROUTED: Final = b"\x02\x11"
_USER_SEGMENTS: Final = b"\x03\x01\x00\x00\x00\x01"
# Entries are up to 1 MiB.
_PAGE: Final = 64


class _Entry(NamedTuple):
    """An entry of the log: where it is, and what its segment's start would be by it."""

    key: bytes
    implied_start: int
    last_id: int


class _Segment:
    """What was met of a segment."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.entries: list[_Entry] = []
        self.first_ms: int | None = None
        self.listed: set[bytes] = set()
        self.used: set[bytes] = set()


class LogAudit:
    """Checks the table ``log``.

    ``unrouted`` are the messages that are noted as taken by no queue, ``pending`` by log those
    that have not been assigned yet, ``highest`` is the highest id in the log.
    """

    def __init__(self, findings: Findings, cursors: Mapping[int, int | None]) -> None:
        self._findings = findings
        self._table = findings.table("log")
        self._cursors = cursors
        core = findings.core
        self._pipeline = core.identity.routing == "pipeline"
        instance = f"{core.identity.store_id:08x}"
        self._logs = {
            codec.metadata_log_key(instance, str(log)): log for log in range(core.log.all_logs)
        }
        self._last_ids: dict[bytes, int] = {}
        self._metas: dict[int, tuple[int, int]] = {}
        # By segment, the offset after its last message.
        self._ends: dict[int, int] = {}
        self.unrouted: set[int] = set()
        self.pending: dict[int, array[int]] = {log: array("Q") for log in self._logs.values()}
        self.highest = 0

    @property
    def earliest(self) -> int:
        """The lowest offset that is kept."""
        return min((start for start, _ in self._metas.values()), default=self.highest + 1)

    def scan(self) -> None:
        """Check the whole log."""
        self._check_settings()
        self._read_metas()
        segment: _Segment | None = None
        for key, value in all_of(self._table, b"\x03", page=_PAGE):
            if key < _USER_SEGMENTS:
                continue
            number = int.from_bytes(key[2:6], "big")
            if segment is None or segment.number != number:
                if segment is not None:
                    self._finish(segment)
                segment = _Segment(number)
            self._take_in(segment, key, value)
        if segment is not None:
            self._finish(segment)
        self._check_order()
        self._read_unrouted()

    # --- system records --------------------------------------------------------------------

    def _check_settings(self) -> None:
        findings = self._findings
        value = self._table.get(_SETTINGS)
        if value is not None:
            try:
                settings = msgspec.msgpack.decode(value, type=LogSettings)
                wrong = "" if settings == findings.core.log.settings else "not those in use"
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                wrong = str(error)
            if wrong:
                text = f"the log's settings: {wrong}"
                findings.violate(Kind.UNDECODABLE, "log", _SETTINGS, text)
                right = msgspec.msgpack.encode(findings.core.log.settings)
                findings.put("log", _SETTINGS, right)
        known = (_SETTINGS, codec.SEQ_BLOCK_KEY)
        for key, stray in all_of(self._table, page=_PAGE):
            if key >= _USER_SEGMENTS:
                break
            if key not in known and not key.startswith((_UNROUTED, codec.SEGMENT_META_PREFIX)):
                findings.reject(Kind.STRANGER, "log", key, stray, "a key that nothing uses")

    def _read_metas(self) -> None:
        for key, value in all_of(self._table, codec.SEGMENT_META_PREFIX):
            self._findings.count("segments")
            try:
                number = codec.parse_segment_meta_key(key)
                self._metas[number] = codec.decode_segment_meta(value)
            except CorruptRecord as error:
                self._findings.reject(Kind.UNDECODABLE, "log", key, value, str(error))

    def _read_unrouted(self) -> None:
        findings = self._findings
        for key, packed in all_of(self._table, _UNROUTED):
            findings.count("unrouted rows")
            number = int.from_bytes(key[2:6], "big")
            if len(key) != 14 or len(packed) % 8 or packed[:8] != key[6:]:
                text = "a row of unrouted messages that is not what its key says"
                findings.reject(Kind.UNDECODABLE, "log", key, packed, text)
            elif number not in self._metas:
                text = f"unrouted messages of segment {number}, which is not there"
                findings.violate(Kind.STRANGER, "log", key, text)
                findings.delete("log", key)
            else:
                ids = (
                    int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)
                )
                self.unrouted.update(ids)

    # --- entries -----------------------------------------------------------------------------

    def _take_in(self, segment: _Segment, key: bytes, value: bytes) -> None:
        findings = self._findings
        try:
            if key[6:7] == b"\x40":
                _, log_key = codec.parse_listing_key(key)
                segment.listed.add(log_key)
                return
            _, log_key, relative = codec.parse_entry_key(key)
            rows = codec.decode_metadata_batch(value)
            findings.count("log entries")
            if log_key not in self._logs:
                raise CorruptRecord(f"an entry of log {log_key!r}, which is not there")  # noqa: TRY301
            if not rows:
                raise CorruptRecord("an entry without messages")  # noqa: TRY301
        except CorruptRecord as error:
            findings.reject(Kind.UNDECODABLE, "log", key, value, str(error))
            return
        segment.used.add(log_key)
        ids = [message_id for message_id, _ in rows]
        if ids != sorted(set(ids)) or ids[0] <= self._last_ids.get(log_key, 0):
            text = f"ids from {ids[0]} on are not above what comes before them in their log"
            findings.reject(Kind.ORDER, "log", key, value, text)
            return
        findings.count("log messages", len(rows))
        self._last_ids[log_key] = ids[-1]
        self.highest = max(self.highest, ids[-1])
        segment.entries.append(_Entry(key, ids[0] - relative, ids[-1]))
        self._check_metadata(segment, key, rows)
        if self._pipeline:
            log = self._logs[log_key]
            cursor = self._cursors.get(log, 0) or 0
            self.pending[log].extend(id_ for id_ in ids if id_ >= cursor)

    def _check_metadata(self, segment: _Segment, key: bytes, rows: list[tuple[int, bytes]]) -> None:
        good = []
        for row in rows:
            try:
                metadata = decode_metadata(row[1])
                # The clock may have been set back, but not by centuries.
                if not 0 <= metadata.published_at_ms <= self._findings.now_ms + MAX_DURATION_MS:
                    raise CorruptRecord("published at a time that has yet to come")  # noqa: TRY301
                if not 0 <= metadata.delay_ms <= MAX_DURATION_MS:
                    raise CorruptRecord("a delay that is longer than any")  # noqa: TRY301
            except CorruptRecord as error:
                text = f"message {row[0]}: {error}"
                self._findings.violate(Kind.UNDECODABLE, "log", key, text)
                id8 = row[0].to_bytes(8, "big")
                self._findings.set_aside("log", key + id8, row[1], text)
                continue
            good.append(row)
            if segment.first_ms is None:
                segment.first_ms = metadata.published_at_ms
        if len(good) < len(rows):
            self._rewrite(key, rows, good)

    def _rewrite(
        self, key: bytes, rows: list[tuple[int, bytes]], kept: list[tuple[int, bytes]]
    ) -> None:
        """Write an entry without some of its messages; its key goes by the first."""
        self._findings.delete("log", key)
        if kept:
            segment, log_key, relative = codec.parse_entry_key(key)
            moved = codec.entry_key(segment, log_key, relative + kept[0][0] - rows[0][0])
            self._findings.put("log", moved, codec.encode_metadata_batch(kept))

    # --- segments ----------------------------------------------------------------------------

    def _finish(self, segment: _Segment) -> None:
        """Check a segment as a whole."""
        findings, number = self._findings, segment.number
        self._ends[number] = max((entry.last_id + 1 for entry in segment.entries), default=0)
        self._check_listing(segment)
        meta = self._metas.get(number)
        starts = {entry.implied_start for entry in segment.entries}
        if not starts or (meta is not None and starts == {meta[0]}):
            return
        meta_key = codec.segment_meta_key(number)
        if len(starts) == 1:
            (start,) = starts
            start_ms = segment.first_ms or 0 if meta is None else meta[1]
            said = "is not described" if meta is None else f"starts at {meta[0]}, it says"
            text = f"segment {number} {said}; by its entries it starts at {start}"
            findings.violate(Kind.SEGMENT, "log", meta_key, text)
            self._metas[number] = (start, start_ms)
            findings.put("log", meta_key, codec.encode_segment_meta(start, start_ms))
            return
        if meta is None:
            text = f"segment {number} is not described, and its entries do not agree"
            findings.violate(Kind.SEGMENT, "log", meta_key, text)
            self._metas[number] = meta = (min(starts), segment.first_ms or 0)
            findings.put("log", meta_key, codec.encode_segment_meta(*meta))
        for entry in segment.entries:
            if entry.implied_start != meta[0]:
                text = f"an entry whose key does not go with its ids up to {entry.last_id}"
                findings.violate(Kind.WRONG_KEY, "log", entry.key, text)
                self._move(entry, meta[0])

    def _move(self, entry: _Entry, start: int) -> None:
        segment, log_key, relative = codec.parse_entry_key(entry.key)
        value = self._table.get(entry.key)
        moved = relative + entry.implied_start - start
        self._findings.delete("log", entry.key)
        if value is not None and moved >= 0:
            self._findings.put("log", codec.entry_key(segment, log_key, moved), value)
        elif value is not None:
            self._findings.set_aside("log", entry.key, value, "before the start of its segment")

    def _check_listing(self, segment: _Segment) -> None:
        findings = self._findings
        for log_key in segment.used - segment.listed:
            key = codec.listing_key(segment.number, log_key)
            text = f"segment {segment.number} has entries of a log that it does not list"
            findings.violate(Kind.MISSING_ENTRY, "log", key, text)
            findings.put("log", key, b"")
        for log_key in segment.listed - segment.used:
            key = codec.listing_key(segment.number, log_key)
            text = f"segment {segment.number} lists a log that it has no entries of"
            findings.note(Kind.ORPHAN_ENTRY, "log", key, text)

    def _check_order(self) -> None:
        """Check that segments follow one another in offset and in time."""
        at, at_ms = 0, 0
        for number, (start, start_ms) in sorted(self._metas.items()):
            if start < at or start_ms < at_ms:
                key = codec.segment_meta_key(number)
                text = f"segment {number} begins before the one before it"
                self._findings.violate(Kind.SEGMENT, "log", key, text)
                # Its entries, if it has any, have had their say about where it starts.
                right = start if self._ends.get(number) else max(start, at)
                meta = codec.encode_segment_meta(right, max(start_ms, at_ms))
                self._findings.put("log", key, meta)
            at, at_ms = max(at, start, self._ends.get(number, 0)), max(at_ms, start_ms)

    # --- repairs -----------------------------------------------------------------------------

    def expel(self, message_ids: Collection[int], why: str) -> None:
        """Move messages to the quarantine that can't be routed any more."""
        wanted = set(message_ids)
        self._findings.flush()
        for key, value in all_of(self._table, b"\x03", page=_PAGE):
            if key < _USER_SEGMENTS or key[6:7] != b"\x10":
                continue
            try:
                rows = codec.decode_metadata_batch(value)
            except CorruptRecord:
                continue
            kept = [row for row in rows if row[0] not in wanted]
            for message_id, metadata in rows:
                if message_id in wanted:
                    id8 = message_id.to_bytes(8, "big")
                    self._findings.set_aside("log", key + id8, metadata, why)
            if len(kept) < len(rows):
                self._rewrite(key, rows, kept)

    def note_unrouted(self, message_ids: Collection[int]) -> None:
        """Note messages as taken by no queue, under the segments that they are in."""
        for message_id in sorted(message_ids):
            number = max(
                (number for number, (start, _) in self._metas.items() if start <= message_id),
                default=min(self._metas, default=1),
            )
            id8 = message_id.to_bytes(8, "big")
            self._findings.put("log", _UNROUTED + number.to_bytes(4, "big") + id8, id8)
