"""How the audit reads rows, and the tables that it can check on their own.

A *primary* row that does not parse goes to the quarantine. *Derived* rows follow from primary
ones: the audit recomputes and compares them, and a repair writes the difference.
"""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from penstock.engines import rows_of
from penstock.errors import CorruptRecord, InvalidFilter
from penstock.filters import parse
from penstock.limits import MAX_DURATION_MS
from penstock.store.check_report import KEPT, Kind, Violation
from penstock.store.codec import opendata, records
from penstock.store.codec.metadata import Metadata, decode_metadata
from penstock.store.policy import Coverage, LogSettings, Stretch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.engines import Batch, Table
    from penstock.store.kv.queues import Queue
    from penstock.store.kv.state import Core

T = TypeVar("T")

# After every key that a store makes.
LAST: Final = b"\xff" * 16
# Rows of many messages are large: few are read at a time.
LARGE_PAGE: Final = 64
# Bounds of one commit of repairs.
_BATCH_CHANGES: Final = 1_000
_BATCH_BYTES: Final = 4 * 1024 * 1024
# Keys of the rows that hold many messages.
_OF_MANY: Final = {
    "buckets": (opendata.ACTIVE.parse,),
    "history": (opendata.DONE.parse, opendata.FAILED.parse),
    "log": (opendata.parse_entry_key,),
}
_META, _TOTALS, _NUMBERS, _EPOCH = b"meta", b"\x02\x0e", b"\x02\x0cqueue", b"\x02\x14"
_QUARANTINE, CURSOR = b"\x02\x0f", b"\x02\x12"
_SPECS, _COUNTS, _COVERAGE, _LISTING = b"\x02\x06", b"\x02\x0b", b"\x02\x13", b"\x02\x16"
_SETTINGS, _UNROUTED = b"\x02\x10", b"\x02\x11"
_USER_SEGMENTS: Final = b"\x03\x01\x00\x00\x00\x01"
_pair: Final = struct.Struct(">QQ")


class RefusedRow(CorruptRecord):
    """A row or a message that decodes, and has to go to the quarantine all the same."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def span(prefix: bytes) -> tuple[bytes, bytes]:
    """Return the range of all keys with a prefix."""
    return prefix, opendata.increment(prefix) or LAST


class Rows:
    """Reads rows; keeps the violations that one reading of the store finds, and their repairs.

    ``known_lost``: messages without payload, by the reading before this one.
    """

    def __init__(self, core: Core, known_lost: set[int], *, repair: bool, now_ms: int) -> None:
        self.core, self.known_lost, self.repair, self.now_ms = core, known_lost, repair, now_ms
        self.checked, self.found = Counter[str](), Counter[str]()
        self.violations, self.notes = list[Violation](), list[Violation]()
        # A check without repair needs no store that can be written.
        self._batch: Batch | None = None
        self._bytes = 0
        # Messages with a row in the quarantine; and whether it has rows of unknown messages.
        self.quarantined_ids: set[int] = set()
        self.quarantined_many = False

    def table(self, name: str) -> Table:
        """Return a table of the store."""
        return self.core.engine.table(name)

    def scan(self, name: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Read every row of a table with a prefix, a page at a time."""
        return self._read(name, *span(prefix), page=1000)

    def _read(
        self, table: str, begin: bytes, end: bytes, *, page: int
    ) -> Iterator[tuple[bytes, bytes]]:
        for row in rows_of(self.table(table), begin, end, page=page):
            self.checked[table] += 1
            yield row

    def violate(self, kind: Kind, table: str, key: bytes, text: str) -> None:
        """Report a violation."""
        self.found[kind] += 1
        if len(self.violations) < KEPT:
            self.violations.append(Violation(kind, table, key.hex(), text))

    def mend(self, kind: Kind, table: str, key: bytes, right: bytes | None, text: str) -> None:
        """Report a violation; repair it by the right row, None to delete it."""
        self.violate(kind, table, key, text)
        self.write(table, key, right)

    def compare(
        self, table: str, key: bytes, present: bytes | None, right: bytes | None, text: str,
        kind: Kind | None = None,
    ) -> None:  # fmt: skip
        """Compare a row with the right one, None if there is none; report and repair it."""
        if present != right:
            told = Kind.ORPHAN_ENTRY if right is None else Kind.WRONG_FIELD
            told = kind or (Kind.MISSING_ENTRY if present is None else told)
            self.mend(told, table, key, right, text)

    def compare_all(
        self, table: str, prefixes: Sequence[bytes], right: dict[bytes, bytes], text: str
    ) -> None:
        """Compare all rows with these prefixes with the right ones, which are used up."""
        for prefix in prefixes:
            for key, value in self.scan(table, prefix):
                self.compare(table, key, value, right.pop(key, None), text)
        for key, value in right.items():
            self.compare(table, key, None, value, text)

    def write(self, table: str, key: bytes, right: bytes | None) -> None:
        """Repair: write a row, or delete it."""
        if self.repair:
            batch, family = self._room(len(key) + len(right or b"")), self.table(table).family
            if right is None:
                batch.delete(key, family)
            else:
                batch.put(key, right, family)

    def _room(self, size: int) -> Batch:
        is_full = self._batch and len(self._batch) >= _BATCH_CHANGES
        if self._batch is None or is_full or self._bytes >= _BATCH_BYTES:
            self.flush()
            self._batch = self.core.engine.batch()
        self._bytes += size
        return self._batch

    def flush(self) -> None:
        """Commit the repairs so far."""
        if self._batch is not None:
            self.core.commit(self._batch, (), self.now_ms)
        self._batch, self._bytes = None, 0

    def parse(
        self, table: str, where: bytes | tuple[bytes, bytes],
        parse_row: Callable[[bytes, bytes], T], *, page: int = 1000,
    ) -> Iterator[tuple[bytes, T]]:  # fmt: skip
        """Parse the rows with a prefix, or of a range; quarantine those that do not parse."""
        begin, end = span(where) if isinstance(where, bytes) else where
        for key, value in self._read(table, begin, end, page=page):
            try:
                row = parse_row(key, value)
            except (CorruptRecord, struct.error, msgspec.MsgspecError, ValueError) as error:
                self.reject(table, key, value, error)
            else:
                yield key, row

    def reject(
        self, table: str, key: bytes, value: bytes, why: Exception, part: bytes = b""
    ) -> None:
        """Report a row, or the message ``part`` in it, and move that to the quarantine."""
        self.violate(getattr(why, "kind", Kind.UNDECODABLE), table, key, str(why))
        self.note_quarantined(table, key + part)
        if self.repair:
            # The next commit moves it.
            self._room(len(key) + len(value))
            self.core.quarantine(table, key + part, value, str(why))

    def note_quarantined(self, table: str, key: bytes) -> None:
        """Remember the message of a quarantined row, or that the row holds many."""
        for parse_key in _OF_MANY.get(table, ()):
            with suppress(CorruptRecord):
                parse_key(key)
                self.quarantined_many = True
                return
        self.quarantined_ids.add(int.from_bytes(key[-8:], "big"))

    def metadata_of(self, message_id: int, encoded: bytes) -> Metadata:
        """Decode a message's metadata; refuse a message that has lost its payload."""
        if message_id in self.known_lost:
            raise RefusedRow(Kind.PAYLOAD_MISSING, f"message {message_id}: the payload is missing")
        return decode_metadata(encoded)


# --- the store and its queues -------------------------------------------------------------------


def check_system(rows: Rows, cursors: dict[int, int | None]) -> None:
    """Check the table ``default``; read the logs' cursors, None for one that does not decode."""
    core = rows.core

    def parse_row(key: bytes, value: bytes) -> None:
        if key.startswith(_QUARANTINE):
            msgspec.msgpack.decode(value, type=tuple[str, bytes])
            table, _, aside = key[2:].partition(b"\0")
            rows.note_quarantined(table.decode(), aside)
        elif key.startswith(CURSOR) and len(key) == 6:
            log = int.from_bytes(key[2:], "big")
            if log >= core.log.all_logs:
                raise CorruptRecord(f"cursor of log {log}, which is not there")
            cursors[log] = int.from_bytes(value, "big") if len(value) == 8 else None
        elif key == _EPOCH and len(value) != 8:
            raise CorruptRecord(f"an epoch of {len(value)} bytes, not 8")
        elif key not in {_META, _TOTALS, _NUMBERS, _EPOCH}:
            raise RefusedRow(Kind.STRANGER, "a key that nothing uses")

    for _ in rows.parse("default", b"", parse_row):
        pass
    _check_own(rows, "default", _META, core.identity)
    if core.totals.published or core.totals.filters_version:
        _check_own(rows, "default", _TOTALS, core.totals, exactly=False)


def _check_own(
    rows: Rows, table: str, key: bytes, known: msgspec.Struct, *, exactly: bool = True
) -> None:
    """Compare a record of the store about itself with memory."""
    present, right = rows.table(table).get(key), msgspec.msgpack.encode(known)
    with suppress(msgspec.MsgspecError, ValueError):
        if msgspec.msgpack.decode(present or b"", type=type(known)) == known or not exactly:
            right = present or b""
    rows.compare(table, key, present, right, "a record of the store about itself")


def check_sequence(rows: Rows, table: str, key: bytes, highest: int, what: str) -> None:
    """Check that a SeqBlock is above every number in use."""
    value = rows.table(table).get(key)
    kind, text = Kind.SEQUENCE, f"{what} up to {highest} are in use, and would be given out again"
    try:
        if value is not None and sum(opendata.decode_seq_block(value)) > highest:
            return
    except CorruptRecord as error:
        kind, text = Kind.UNDECODABLE, str(error)
    if value is not None or highest > 0:
        rows.mend(kind, table, key, opendata.encode_seq_block(highest + 1, 0), text)


def check_queues(rows: Rows) -> None:
    """Check specs and coverage against memory, and that numbers are unique."""
    core, table = rows.core, rows.table("queues")
    numbers: dict[int, str] = {}
    for queue in core.by_name.values():
        name, key, right = f"queue {queue.name}", _SPECS + queue.id, queue.spec
        if _parses(right.filter):
            text = f"{name}: its spec is not the one that the store was opened with"
            encoded = records.encode_queue_spec(right, queue.number)
            rows.compare("queues", key, table.get(key), encoded, text, Kind.SPEC)
            _check_coverage(rows, queue)
        else:
            # The filter that the queue was last filled by is as good.
            last = [each.filter for each in queue.coverage.live[-1:] if _parses(each.filter)]
            right = msgspec.structs.replace(right, filter=[right.filter, *last][-1])
            encoded = records.encode_queue_spec(right, queue.number)
            rows.mend(Kind.SPEC, "queues", key, encoded, f"{name}: its filter can't be read")
        if queue.number in numbers:
            text = f"{name} and queue {numbers[queue.number]} have one number"
            rows.violate(Kind.NUMBER, "queues", key, text)
        numbers[queue.number] = queue.name
    check_sequence(rows, "default", _NUMBERS, max(numbers, default=0), "numbers of queues")
    prefixes = (_SPECS, _COUNTS, _COVERAGE, _LISTING)
    known = {prefix + queue.id for queue in core.by_name.values() for prefix in prefixes}
    why = RefusedRow(Kind.STRANGER, "a row of a queue that is not there")
    for key, value in rows.scan("queues"):
        if key not in known:
            rows.reject("queues", key, value, why)


def _parses(text: str) -> bool:
    try:
        parse(text)
    except InvalidFilter:
        return False
    return True


def _check_coverage(rows: Rows, queue: Queue) -> None:
    end, key, wanted = rows.core.log.end, _COVERAGE + queue.id, queue.spec.filter
    value, known = rows.table("queues").get(key), queue.coverage
    try:
        fault = _fault(msgspec.msgpack.decode(value or b"", type=Coverage), wanted)
    except (msgspec.MsgspecError, ValueError) as error:
        fault = str(error)
    if fault:
        reopened = [
            *known.live[:-1],
            *(Stretch(each.begin, None, wanted) for each in known.live[-1:]),
        ]
        # If nothing is known of the past, the queue takes messages from here on.
        candidates = (
            known,
            Coverage(reopened, known.backfilled, known_from=known.known_from),
            Coverage([Stretch(end, None, wanted)], known_from=end),
        )
        right = next(each for each in candidates if not _fault(each, wanted))
        text = f"queue {queue.name}: what it was filled from: {fault}"
        rows.compare("queues", key, value, msgspec.msgpack.encode(right), text, Kind.COVERAGE)


def _fault(coverage: Coverage, wanted: str) -> str:
    """Say what is wrong with the coverage of a queue with this filter; nothing if it is right."""
    live, past, drains = coverage.live, coverage.backfilled, coverage.draining
    ends = [0, *(inf if each.end is None else each.end for each in live)]
    is_live = ends[-1] == inf
    rules = (
        (not all(_parses(each.filter) for each in (*live, *past)), "a filter that can't be read"),
        (any(each.begin < end for end, each in zip(ends, live, strict=False)), "an overlap"),
        (any(each.end is None for each in past), "a backfilled stretch without an end"),
        (drains is is_live, "it drains and is live, or neither"),
        (is_live and live[-1].filter != wanted, "another filter is live than its own"),
    )
    return next((text for is_wrong, text in rules if is_wrong), "")


def check_dedup(rows: Rows) -> None:
    """Check that each dedup id is listed to be forgotten; memory holds one dedup window."""
    decode: Final = msgspec.msgpack.Decoder(list[bytes]).decode
    lists: dict[bytes, list[bytes]] = {}
    listed: set[tuple[bytes, int]] = set()
    for row, (expires_at_ms, keys) in rows.parse(
        "dedup", b"\x01", lambda key, row: (_pair.unpack(key[1:])[0], decode(row))
    ):
        lists[row] = keys
        listed.update((key, expires_at_ms) for key in keys)
    longer: set[bytes] = set()
    ids = rows.parse("dedup", b"\x00", lambda _, row: _pair.unpack(row))
    for key, (message_id, expires_at_ms) in ids:
        if (key, expires_at_ms) not in listed:
            text = f"the dedup id of message {message_id} would never be forgotten"
            rows.violate(Kind.MISSING_ENTRY, "dedup", key, text)
            row = b"\x01" + _pair.pack(expires_at_ms, message_id)
            lists.setdefault(row, []).append(key)
            longer.add(row)
    for row in longer:
        rows.write("dedup", row, msgspec.msgpack.encode(lists[row]))


# --- the log ------------------------------------------------------------------------------------


class _Segment:
    """A log segment by its entries: the starts that their keys imply, first time, end, logs."""

    def __init__(self) -> None:
        self.starts: set[int] = set()
        self.first_ms = self.end = 0
        self.logs: set[bytes] = set()


class LogAudit:
    """Checks the table ``log``.

    ``unrouted`` are the messages that no queue took, ``pending`` by log those that are not assigned
    yet, ``highest`` is the highest id in the log.
    """

    def __init__(self, rows: Rows, cursors: dict[int, int | None]) -> None:
        identity, logs = rows.core.identity, range(rows.core.log.all_logs)
        self._rows = rows
        name = f"{identity.store_id:08x}"
        self._logs = {opendata.metadata_log_key(name, str(log)): log for log in logs}
        # The first message of each log that is not assigned; inline, all are.
        self._cursors = cursors if identity.routing == "pipeline" else dict.fromkeys(logs, 1 << 64)
        self._last_ids: dict[bytes, int] = {}
        self._segments: dict[int, _Segment] = {}
        # By segment, start and time as its description says.
        self._told: dict[int, tuple[int, int]] = {}
        self.unrouted: set[int] = set()
        self.pending: dict[int, array[int]] = {log: array("Q") for log in logs}
        self.highest = 0

    def scan(self) -> None:
        """Check the whole log."""
        rows, settings = self._rows, self._rows.core.log.settings
        if settings != LogSettings() or rows.table("log").get(_SETTINGS) is not None:
            _check_own(rows, "log", _SETTINGS, settings)
        for where, parse_row in (
            ((b"", _USER_SEGMENTS), self._read_system),
            ((_USER_SEGMENTS, LAST), self._read_entry),
        ):
            for _ in rows.parse("log", where, parse_row, page=LARGE_PAGE):
                pass
        self._check_segments()
        for _ in rows.parse("log", _UNROUTED, self._read_unrouted):
            pass

    def _read_system(self, key: bytes, value: bytes) -> None:
        if key.startswith(opendata.SEGMENT_META_PREFIX):
            number = opendata.parse_segment_meta_key(key)
            self._told[number] = opendata.decode_segment_meta(value)
        elif key not in {_SETTINGS, opendata.SEQ_BLOCK_KEY} and not key.startswith(_UNROUTED):
            raise RefusedRow(Kind.STRANGER, "a key that nothing uses")

    def _read_unrouted(self, key: bytes, packed: bytes) -> None:
        if len(key) != 14 or packed[:8] != key[6:]:
            raise CorruptRecord("a row of unrouted messages that is not what its key says")
        if int.from_bytes(key[2:6], "big") not in self._told:
            raise RefusedRow(Kind.STRANGER, "unrouted messages of a segment that is not there")
        self.unrouted.update(struct.unpack(f">{len(packed) // 8}Q", packed))

    def _read_entry(self, key: bytes, value: bytes) -> None:
        if key[6:7] == b"\x40":
            opendata.parse_listing_key(key)
            return
        number, log_key, relative = opendata.parse_entry_key(key)
        messages = opendata.decode_metadata_batch(value)
        if log_key not in self._logs or not messages:
            raise CorruptRecord("an entry of a log that is not there, or without messages")
        ids = [id_ for id_, _ in messages]
        if ids != sorted(set(ids)) or ids[0] <= self._last_ids.get(log_key, 0):
            text = f"ids from {ids[0]} on are not above those before them in their log"
            raise RefusedRow(Kind.ORDER, text)
        segment = self._segments.setdefault(number, _Segment())
        segment.starts.add(ids[0] - relative)
        segment.logs.add(log_key)
        segment.end = max(segment.end, ids[-1] + 1)
        self._last_ids[log_key] = ids[-1]
        self.highest = max(self.highest, ids[-1])
        kept = [each for each in messages if self._keeps(key, segment, self._logs[log_key], *each)]
        if len(kept) < len(messages):
            self._rows.write("log", key, None)
            if kept:
                moved = opendata.entry_key(number, log_key, relative + kept[0][0] - ids[0])
                self._rows.write("log", moved, opendata.encode_metadata_batch(kept))

    def _keeps(self, key: bytes, segment: _Segment, log: int, id_: int, encoded: bytes) -> bool:
        """Take a message of an entry in; False if it goes to the quarantine."""
        is_pending = id_ >= (self._cursors.get(log, 0) or 0)
        # A message that was assigned stays in the log without its payload.
        decode = partial(self._rows.metadata_of, id_) if is_pending else decode_metadata
        wrong = CorruptRecord(f"message {id_}: published in the future, or delayed for too long")
        at_ms = -1
        try:
            found = decode(encoded)
            if 0 <= found.delay_ms <= MAX_DURATION_MS:
                at_ms = found.published_at_ms
        except CorruptRecord as error:
            wrong = error
        # The clock may have been set back, but not by centuries.
        if not 0 <= at_ms <= self._rows.now_ms + MAX_DURATION_MS:
            self._rows.reject("log", key, encoded, wrong, id_.to_bytes(8, "big"))
            return False
        # Logs of a segment follow upon each other here: the first message may be in any.
        segment.first_ms = min(segment.first_ms or at_ms, at_ms)
        if is_pending:
            self.pending[log].append(id_)
        return True

    def _check_segments(self) -> None:
        """Check where segments begin, in offset and in time, and which logs they list."""
        at = at_ms = 0
        for number in sorted(self._told.keys() | self._segments.keys()):
            segment, told = self._segments.get(number, _Segment()), self._told.get(number)
            starts = segment.starts
            # Entries that agree know best. A segment begins after the one before it.
            guesses = [*(starts if len(starts) == 1 else ()), *(told or ())[:1], *sorted(starts)]
            start = next((each for each in guesses if each >= at), at)
            at_ms = max(at_ms, told[1] if told else segment.first_ms)
            if starts - {start}:
                self._move_entries(number, start)
            key, right = opendata.segment_meta_key(number), (start, at_ms)
            present, encoded = (
                each and opendata.encode_segment_meta(*each) for each in (told, right)
            )
            text = f"segment {number} begins at offset {start}, by its entries and its neighbours"
            self._rows.compare("log", key, present, encoded, text)
            self._told[number] = right
            at = max(start, segment.end)
            for log_key in segment.logs:
                key = opendata.listing_key(number, log_key)
                present, text = self._rows.table("log").get(key), f"a log that segment {number} has"
                self._rows.compare("log", key, present, b"", text)

    def _move_entries(self, number: int, start: int) -> None:
        """Move the entries of a segment whose keys do not go with its start."""
        for key, value in self._rows.scan("log", opendata.entry_prefix(number, b"")[:7]):
            with suppress(CorruptRecord):
                _, log_key, relative = opendata.parse_entry_key(key)
                first = next((id_ for id_, _ in opendata.decode_metadata_batch(value)), start)
                why = RefusedRow(Kind.WRONG_KEY, f"the key does not go with ids from {first} on")
                if first < start:
                    self._rows.reject("log", key, value, why)
                elif first - relative != start:
                    self._rows.mend(why.kind, "log", key, None, str(why))
                    moved = opendata.entry_key(number, log_key, first - start)
                    self._rows.write("log", moved, value)

    @property
    def earliest(self) -> int:
        """The lowest offset that the log keeps."""
        return min((start for start, _ in self._told.values()), default=self.highest + 1)

    def note_unrouted(self, message_id: int) -> None:
        """Repair: note a message that no queue took, under its segment."""
        before = [number for number, (start, _) in self._told.items() if start <= message_id]
        number, id8 = max(before, default=1), message_id.to_bytes(8, "big")
        self._rows.write("log", _UNROUTED + number.to_bytes(4, "big") + id8, id8)
