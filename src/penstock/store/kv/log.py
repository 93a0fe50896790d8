"""The metadata log: what was published, in order, for routing, backfill, audit and analytics.

An instance of the OpenData-Log (codec/opendata.py), plus two records of our own::

    table log
    03 01 | segment | 10 | log's key | offset     Array<MessageMetadata>: messages of one publish
    03 01 | 00000000 | 20                         SeqBlock: message ids are the Log's sequence
    03 01 | 00000000 | 30 | segment               where and when a segment begins
    03 01 | segment | 40 | log's key              which logs a segment has entries of
    02 10                                         Settings of the logs, MessagePack
    02 11 | segment u32 | id u64                  packed u64 ids of messages that no queue took

A message's id is its offset. There are one or more logs; a message goes to the one that its
group hashes to, so a group's order is one log's order; messages without a group spread over the
logs (policy.logs_of). The number of logs can change: from the offset on that the change is noted
at, the new number decides. An entry's sequence is the first id in it.

Segments are what retention drops: a segment goes when its successor is older than the retention.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

import msgspec

from penstock.engines import rows_of
from penstock.errors import CorruptRecord
from penstock.store.codec import opendata
from penstock.store.codec.metadata import decode_metadata
from penstock.store.codec.opendata import decode_seq_block, encode_seq_block, var_u64
from penstock.store.codec.records import unpack
from penstock.store.kv.tables import FirstKeys, pages_of
from penstock.store.policy import SEGMENT_MS, LogSettings, logs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from penstock.engines import Batch, Table
    from penstock.store.live import Quarantine

_SETTINGS: Final = b"\x02\x10"
_UNROUTED: Final = b"\x02\x11"
# Numbers that one record reserves.
BLOCK_SIZE: Final = 4096
# Bounds of one entry: a publish of more is cut into several.
ENTRY_MESSAGES: Final = 4_096
ENTRY_BYTES: Final = 1 << 20


class Segment(NamedTuple):
    """A stretch of the log."""

    number: int
    start_offset: int
    start_ms: int


class SeqBlocks:
    """Numbers that never repeat, handed out in blocks: RFC 0002's SeqBlock.

    The record under ``key`` of ``table`` says which numbers may have been used; ``end`` is the end
    of that block. An opened store goes on after it, so a crash leaves a gap and never a repetition.
    The record of a new block goes into the batch that first uses it. ``next`` is handed out next.
    """

    def __init__(self, table: Table, key: bytes) -> None:
        self._table = table
        self._key = key
        record = table.get(key)
        base, size = (1, 0) if record is None else decode_seq_block(record)
        self.next = self.end = base + size

    def allocate(self, batch: Batch, count: int) -> int:
        """Return the first of ``count`` consecutive fresh numbers."""
        first = self.next
        self.next = first + count
        if self.next > self.end:
            size = max(self.next - self.end, BLOCK_SIZE)
            batch.put(self._key, encode_seq_block(self.end, size), self._table.family)
            self.end += size
        return first


class MetadataLog:
    """Appends to and reads from the logs of one store."""

    def __init__(self, table: Table, instance_id: str, quarantine: Quarantine) -> None:
        self._table = table
        self._instance_id = instance_id
        self._quarantine = quarantine
        self.first_keys = FirstKeys(table)
        self.ids = SeqBlocks(table, opendata.SEQ_BLOCK_KEY)
        # The turn of the logs to get messages without a group; a store that is opened for one
        # publish each time begins at another log each time.
        self._turn = crc32(self.ids.next.to_bytes(8, "big"))
        record = self._table.get(_SETTINGS)
        self.settings = LogSettings()
        if record is not None:
            self.settings = unpack(record, LogSettings, "settings of the metadata log")
        prefix = opendata.SEGMENT_META_PREFIX
        self.segments = [
            Segment(opendata.parse_segment_meta_key(key), *opendata.decode_segment_meta(value))
            for key, value in rows_of(self._table, prefix, prefix + b"\xff" * 5)
        ]
        # The newest segment's entries of each log begin so; a log that is not here is not listed.
        self._prefixes: dict[int, bytes] = {}

    # --- settings ------------------------------------------------------------------------

    @property
    def logs(self) -> int:
        """The number of logs that new messages are spread over."""
        return self.settings.changes[-1][1]

    @property
    def all_logs(self) -> int:
        """The number of logs that may hold anything."""
        return max(count for _, count in self.settings.changes)

    def put_settings(self, batch: Batch, settings: LogSettings) -> None:
        """Change the settings."""
        self.settings = settings
        self._prefixes.clear()
        batch.put(_SETTINGS, msgspec.msgpack.encode(settings), self._table.family)

    def _key(self, log: int) -> bytes:
        return opendata.metadata_log_key(self._instance_id, str(log))

    # --- in ------------------------------------------------------------------------------

    def append(
        self,
        batch: Batch,
        rows: Sequence[tuple[int, bytes]],
        groups: Sequence[str],
        routes: Sequence[Sequence[str]] | None,
        fifo: AbstractSet[str],
        now_ms: int,
        into: Sequence[int] | None = None,
    ) -> None:
        """Append the messages (id, metadata) of one publish in the order of their ids.

        ``into``: the log of each, whatever its group and its route.
        """
        segments = self.segments
        if segments and now_ms - segments[-1].start_ms < SEGMENT_MS:
            segment = segments[-1]
        else:
            segment = self.roll(batch, rows[0][0], now_ms)
        logs = self.settings.changes[-1][1]
        spread: Mapping[int, Sequence[tuple[int, bytes]]] = {0: rows}
        if logs > 1 or into is not None:
            self._turn += 1
            chosen = into or logs_of(groups, routes, fifo, logs, self._turn)
            spread = parts = defaultdict[int, list[tuple[int, bytes]]](list)
            for row, log in zip(rows, chosen, strict=True):
                parts[log].append(row)
        family = self._table.family
        for log, part in spread.items():
            prefix = self._prefixes.get(log)
            if prefix is None:
                key = self._key(log)
                prefix = self._prefixes[log] = opendata.entry_prefix(segment.number, key)
                batch.put(opendata.listing_key(segment.number, key), b"", family)
            for entry in (part,) if len(part) == 1 else _entries(part):
                offset = entry[0][0] - segment.start_offset
                batch.put(prefix + var_u64(offset), opendata.encode_metadata_batch(entry), family)

    def roll(self, batch: Batch, offset: int, now_ms: int) -> Segment:
        """Begin a new segment at an offset."""
        number = self.segments[-1].number + 1 if self.segments else 1
        segment = Segment(number, offset, now_ms)
        meta = opendata.encode_segment_meta(segment.start_offset, segment.start_ms)
        batch.put(opendata.segment_meta_key(segment.number), meta, self._table.family)
        self.segments.append(segment)
        self._prefixes.clear()
        return segment

    def note_unrouted(self, batch: Batch, message_ids: Sequence[int]) -> None:
        """Remember messages that no queue took, for when their segment is dropped."""
        by_segment: dict[int, list[int]] = {}
        for message_id in message_ids:
            by_segment.setdefault(self.segment_of(message_id).number, []).append(message_id)
        for number, ids in by_segment.items():
            packed = b"".join(message_id.to_bytes(8, "big") for message_id in ids)
            prefix = _unrouted_prefix(number)
            batch.put(prefix + packed[:8], packed, self._table.family)
            self.first_keys.note(prefix, prefix + packed[:8])

    # --- out -----------------------------------------------------------------------------

    @property
    def earliest(self) -> int:
        """The lowest offset that is kept."""
        return self.segments[0].start_offset if self.segments else self.end

    @property
    def end(self) -> int:
        """The offset that the next message gets."""
        return self.ids.next

    def segment_of(self, offset: int) -> Segment:
        """Return the segment that an offset lies in (the first, if it is older)."""
        starts = [segment.start_offset for segment in self.segments]
        return self.segments[max(0, bisect_right(starts, offset) - 1)]

    def offset_at(self, time_ms: int) -> int:
        """Return the first offset whose message was published at that time or later."""
        # Time never goes back in a store, so offsets can be searched by halves.
        low, high = self.earliest, self.end
        while low < high:
            middle = (low + high) // 2
            entries = (next(self.entries(n, middle, self.end), ()) for n in range(self.all_logs))
            rows = [entry[0] for entry in entries if entry]
            if rows and decode_metadata(min(rows)[1]).published_at_ms < time_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def read(
        self, log: int, begin: int, limit: int, *, end: int
    ) -> tuple[list[tuple[int, bytes]], int]:
        """Read up to ``limit`` messages (id, metadata) of [begin, end), and where to go on from."""
        end = min(end, self.end)
        rows: list[tuple[int, bytes]] = []
        for entry in self.entries(log, begin, end):
            rows += entry
            if len(rows) > limit:
                return rows[:limit], rows[limit][0]
        return rows, max(begin, end)

    def entries(self, log: int, begin: int, end: int) -> Iterator[list[tuple[int, bytes]]]:
        """Read messages (id, metadata) of [begin, end) of a log, one stored entry at a time."""
        ends = [segment.start_offset for segment in self.segments[1:]]
        for segment, segment_end in zip(self.segments, [*ends, end], strict=False):
            start = segment.start_offset
            if start >= end or segment_end <= begin:
                continue
            prefix = first = opendata.entry_prefix(segment.number, self._key(log))
            if begin > start:
                # The entry that begin lies in may begin before it.
                exact = prefix + var_u64(begin - start)
                before = self._table.scan_back(prefix, exact + b"\0", 1)
                first = before[0][0] if before else prefix
            for key, entry in pages_of(self._table, first, prefix + var_u64(end - start)):
                try:
                    rows = opendata.decode_metadata_batch(entry)
                except CorruptRecord as error:
                    self._quarantine("log", key, entry, str(error))
                    continue
                if rows and (rows[0][0] < begin or rows[-1][0] >= end):
                    rows = [row for row in rows if begin <= row[0] < end]
                if rows:
                    yield rows

    # --- retention -----------------------------------------------------------------------

    def next_due_ms(self, routed_up_to: int) -> int | None:
        """Return when retention has something to do: to drop the oldest segment, or close the only.

        A segment is dropped when it was routed to its end.
        """
        if not self.segments or not self.settings.retention_ms:
            return None
        if len(self.segments) > 1:
            following = self.segments[1]
            routed = following.start_offset <= routed_up_to
            return following.start_ms + self.settings.retention_ms if routed else None
        newest = self.segments[-1]
        return newest.start_ms + SEGMENT_MS if newest.start_offset < self.end else None

    def drop(self, batch: Batch, segment: Segment, limit: int) -> list[int]:
        """Return messages of a segment that no queue took, of up to ``limit`` publishes.

        The call that gives the last of them deletes the segment.
        """
        family = self._table.family
        prefix = _unrouted_prefix(segment.number)
        rows = self.first_keys.scan(prefix, prefix + b"\xff" * 9, limit)
        ids: list[int] = []
        for key, packed in rows:
            batch.delete(key, family)
            ids += [int.from_bytes(packed[at : at + 8], "big") for at in range(0, len(packed), 8)]
        if len(rows) < limit:
            begin = opendata.entry_key(segment.number, b"", 0)[:6]
            batch.delete_range(begin, begin + b"\xff", family)
            batch.delete(opendata.segment_meta_key(segment.number), family)
            self.segments.remove(segment)
        return ids


def _unrouted_prefix(segment: int) -> bytes:
    return _UNROUTED + segment.to_bytes(4, "big")


def _entries(rows: Sequence[tuple[int, bytes]]) -> Iterator[Sequence[tuple[int, bytes]]]:
    """Cut messages into entries of bounded count and size."""
    start = size = 0
    for at, (_, metadata) in enumerate(rows):
        size += len(metadata)
        if at > start and (size > ENTRY_BYTES or at - start >= ENTRY_MESSAGES):
            yield rows[start:at]
            start, size = at, len(metadata)
    yield rows[start:]
