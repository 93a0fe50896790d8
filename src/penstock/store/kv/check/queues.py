"""The audit of what a store says about itself and its queues: specs, counters, coverage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from zlib import crc32

import msgspec

from penstock.errors import CorruptRecord, InvalidFilter
from penstock.filters import parse
from penstock.store.check_report import Kind, all_of, outside
from penstock.store.codec.encodings import decode_seq_block, encode_seq_block
from penstock.store.coverage import Coverage, Stretch
from penstock.store.kv.queues import Counts, Queue, QueueTable, decode_counts, encode_counts
from penstock.store.kv.state import Identity, Totals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.store.check_report import Findings
    from penstock.store.kv.check.census import Census

__all__ = [
    "check_counters",
    "check_queues",
    "check_sequence",
    "check_system",
    "check_unclaimed",
    "counts_of",
    "unclaimed_strangers",
]

_SPECS: Final = b"\x02\x06"
_COUNTS: Final = b"\x02\x0b"
_COVERAGE: Final = b"\x02\x13"
_LISTING: Final = b"\x02\x16"
_META: Final = b"meta"
_TOTALS: Final = b"\x02\x0e"
_QUARANTINE: Final = b"\x02\x0f"
_CURSOR: Final = b"\x02\x12"
_NUMBERS: Final = b"\x02\x0cqueue"
_EPOCH: Final = b"\x02\x14"
_UNCLAIMED_KEY_BYTES: Final = 24
_FOR_EVER: Final = 1 << 64


class _Recorder:
    """A batch that keeps one value: what the store's own writers would put."""

    def __init__(self) -> None:
        self.value = b""

    def put(self, key: bytes, value: bytes, family: object, /) -> None:  # noqa: ARG002
        """Keep the value."""
        self.value = value

    def delete(self, key: bytes, family: object, /) -> None:
        """Not needed."""

    def delete_range(self, begin: bytes, end: bytes, family: object, /) -> None:
        """Not needed."""

    def __len__(self) -> int:
        return 1


# --- the store as a whole -------------------------------------------------------------------


def check_system(findings: Findings) -> dict[int, int | None]:
    """Check the table ``default``; give the logs' cursors, None for one that does not decode."""
    core = findings.core
    cursors: dict[int, int | None] = {}
    for key, value in all_of(findings.table("default")):
        findings.count("system records")
        try:
            _check_record(findings, cursors, key, value)
        except (CorruptRecord, msgspec.MsgspecError, UnicodeDecodeError) as error:
            findings.violate(Kind.UNDECODABLE, "default", key, str(error))
            _mend_system(findings, key, value, str(error))
    for key, record in ((_META, core.identity), (_TOTALS, core.totals)):
        is_due = key == _META or core.totals.published or core.totals.filters_version
        if is_due and findings.table("default").get(key) is None:
            findings.violate(Kind.MISSING_ENTRY, "default", key, "a record that every store has")
            findings.put("default", key, msgspec.msgpack.encode(record))
    return cursors


def _check_record(
    findings: Findings, cursors: dict[int, int | None], key: bytes, value: bytes
) -> None:
    core = findings.core
    if key == _META:
        if msgspec.msgpack.decode(value, type=Identity) != core.identity:
            raise CorruptRecord("not the identity that the store was opened with")
    elif key == _TOTALS:
        msgspec.msgpack.decode(value, type=Totals)
    elif key.startswith(_QUARANTINE):
        msgspec.msgpack.decode(value, type=tuple[str, bytes])
        table, _, aside = key[2:].partition(b"\0")
        findings.note_aside(table.decode(), aside)
        findings.count("quarantined records")
    elif key.startswith(_CURSOR) and len(key) == 6:
        log = int.from_bytes(key[2:], "big")
        if log >= core.log.all_logs:
            raise CorruptRecord(f"cursor of log {log}, which is not there")
        cursors[log] = int.from_bytes(value, "big") if len(value) == 8 else None
    elif key == _EPOCH:
        if len(value) != 8:
            raise CorruptRecord(f"an epoch of {len(value)} bytes, not 8")
    elif key != _NUMBERS:
        findings.reject(Kind.STRANGER, "default", key, value, "a key that nothing uses")


def _mend_system(findings: Findings, key: bytes, value: bytes, why: str) -> None:
    if key == _META:
        findings.put("default", key, msgspec.msgpack.encode(findings.core.identity))
    elif key == _TOTALS:
        findings.put("default", key, msgspec.msgpack.encode(findings.core.totals))
    else:
        findings.set_aside("default", key, value, why)


def check_sequence(findings: Findings, table: str, key: bytes, highest: int, what: str) -> None:
    """Check that a SeqBlock is above every number in use."""
    value = findings.table(table).get(key)
    end = 1
    try:
        if value is not None:
            end = sum(decode_seq_block(value))
    except CorruptRecord as error:
        findings.violate(Kind.UNDECODABLE, table, key, str(error))
        end = -1
    if end <= highest:
        if end >= 0:
            text = f"{what} up to {highest} are in use, and the next would be {end}"
            findings.violate(Kind.SEQUENCE, table, key, text)
        findings.put(table, key, encode_seq_block(highest + 1, 0))


# --- queues -----------------------------------------------------------------------------------


def check_queues(findings: Findings) -> None:
    """Check specs, coverage, and that numbers are unique."""
    core, table = findings.core, findings.table("queues")
    numbers: dict[int, str] = {}
    for queue in core.queues.values():
        findings.count("queues")
        key = _SPECS + queue.id
        if not _parses(queue.spec.filter):
            _mend_filter(findings, queue)
        elif table.get(key) != _encoded(findings, queue):
            text = f"queue {queue.name}: its spec is not the one that the store was opened with"
            findings.violate(Kind.SPEC, "queues", key, text)
            findings.put("queues", key, _encoded(findings, queue))
        if queue.number in numbers:
            text = f"queues {queue.name} and {numbers[queue.number]} have one number"
            findings.violate(Kind.NUMBER, "queues", key, text)
        numbers[queue.number] = queue.name
        if _parses(queue.spec.filter):
            _check_coverage(findings, queue)
    check_sequence(findings, "default", _NUMBERS, max(numbers, default=0), "numbers of queues")
    prefixes = (_SPECS, _COUNTS, _COVERAGE, _LISTING)
    known = {prefix + queue.id for queue in core.queues.values() for prefix in prefixes}
    for key, value in all_of(table):
        if key not in known:
            text = "a record of a queue that is not there"
            findings.reject(Kind.STRANGER, "queues", key, value, text)


def _encoded(findings: Findings, queue: Queue) -> bytes:
    recorder = _Recorder()
    QueueTable(findings.table("queues")).put_spec(recorder, queue)
    return recorder.value


def _parses(text: str) -> bool:
    try:
        parse(text)
    except InvalidFilter:
        return False
    return True


def _mend_filter(findings: Findings, queue: Queue) -> None:
    """Give a queue the filter that it was last filled by, if its own can't be read."""
    text = f"queue {queue.name}: its filter can't be read"
    findings.violate(Kind.SPEC, "queues", _SPECS + queue.id, text)
    live = findings.core.coverage[queue.name].live
    if live and _parses(live[-1].filter):
        spec = msgspec.structs.replace(queue.spec, filter=live[-1].filter)
        mended = Queue(spec, queue.number, queue.counts)
        findings.put("queues", _SPECS + queue.id, _encoded(findings, mended))


def _check_coverage(findings: Findings, queue: Queue) -> None:
    core = findings.core
    key = _COVERAGE + queue.id
    value = findings.table("queues").get(key)
    wrong = "there is none"
    if value is not None:
        try:
            wrong = _wrong_with(msgspec.msgpack.decode(value, type=Coverage), queue)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            wrong = str(error)
    if wrong:
        text = f"queue {queue.name}: what it was filled from: {wrong}"
        findings.violate(Kind.COVERAGE, "queues", key, text)
        known, now_on = core.coverage[queue.name], Stretch(core.log.end, None, queue.spec.filter)
        refiltered = Coverage(
            [*known.live[:-1], *(_reopened(each, queue) for each in known.live[-1:])],
            known.backfilled,
            known_from=known.known_from,
        )
        # If nothing is known of the past, it takes messages from here on.
        candidates = [known, refiltered, Coverage([now_on], known_from=core.log.end)]
        right = next((each for each in candidates if not _wrong_with(each, queue)), candidates[-1])
        findings.put("queues", key, msgspec.msgpack.encode(right))


def _reopened(stretch: Stretch, queue: Queue) -> Stretch:
    return Stretch(stretch.begin, None, queue.spec.filter)


def _wrong_with(coverage: Coverage, queue: Queue) -> str:
    """Say what is wrong with a queue's coverage; nothing if it is right."""
    at = 0
    if not all(_parses(each.filter) for each in (*coverage.live, *coverage.backfilled)):
        return "a filter that can't be read"
    for stretch in coverage.live:
        if stretch.begin < at:
            return "stretches that overlap"
        at = _FOR_EVER if stretch.end is None else stretch.end
    if any(stretch.end is None for stretch in coverage.backfilled):
        return "a backfilled stretch without an end"
    last = coverage.live[-1] if coverage.live else None
    if coverage.draining:
        return "" if last is None or last.end is not None else "it drains and is live"
    if last is None or last.end is not None:
        return "no filter is live"
    return "" if last.filter == queue.spec.filter else "another filter is live than its own"


# --- counters ---------------------------------------------------------------------------------


def counts_of(findings: Findings, queue: Queue) -> Counts:
    """Read a queue's counters as they are on disk."""
    key = _COUNTS + queue.id
    value = findings.table("queues").get(key)
    try:
        return decode_counts(value or b"")
    except CorruptRecord:
        text = f"queue {queue.name}: its counters are missing or do not decode"
        findings.violate(Kind.UNDECODABLE, "queues", key, text)
        # What memory has is the best that is known; the census puts the rest right.
        known = Counts(*msgspec.structs.astuple(queue.counts))
        findings.put("queues", key, encode_counts(known))
        return known


def check_counters(findings: Findings, census: Census, counts: Counts) -> None:
    """Check a queue's counters against what is there."""
    queue = census.queue
    key = _COUNTS + queue.id
    right = msgspec.structs.replace(
        counts,
        available=len(census.waiting) - len(census.delayed),
        delayed=len(census.delayed),
        in_flight=len(census.flight),
        done=len(census.done),
        failed=len(census.failed),
        next_done=max(counts.next_done, census.next_done),
        next_failed=max(counts.next_failed, census.next_failed),
        next_claim=max(counts.next_claim, census.next_claim),
    )
    for name in Counts.__struct_fields__:
        says, is_ = getattr(counts, name), getattr(right, name)
        if says != is_:
            kind = Kind.SEQUENCE if name.startswith("next_") else Kind.COUNTER
            text = f"queue {queue.name}: {name} is {says} and should be {is_}"
            findings.violate(kind, "queues", key, text)
    present = len(census.attempts)
    came = right.enqueued_total + right.moved_in_total
    went = right.removed_total + right.moved_out_total
    if came != present + went:
        text = (
            f"queue {queue.name}: {came} messages came in, {present} are there and {went} were "
            "removed or moved"
        )
        findings.violate(Kind.COUNTER, "queues", key, text)
        # What is not there has been removed, one way or another.
        right.enqueued_total += max(0, present + right.moved_out_total - came)
        came = right.enqueued_total + right.moved_in_total
        right.removed_total = came - present - right.moved_out_total
    if right != counts:
        findings.put("queues", key, encode_counts(right))


# --- retention of what nobody claims ------------------------------------------------------------


def check_unclaimed(findings: Findings, census: Census) -> None:
    """Check that every waiting message of a queue with such a retention is listed to expire."""
    queue, due = census.queue, census.due
    prefix = queue.number.to_bytes(4, "big")
    for key, packed in all_of(findings.table("unclaimed"), prefix):
        findings.count("unclaimed rows")
        well_made = (
            len(key) == _UNCLAIMED_KEY_BYTES
            and len(packed) % 8 == 0
            and key[12:] == packed[:8] + crc32(packed).to_bytes(4, "big")
        )
        if not well_made:
            text = f"queue {queue.name}: a row that is not what its key says"
            findings.violate(Kind.UNDECODABLE, "unclaimed", key, text)
            findings.delete("unclaimed", key)
            continue
        due_ms = int.from_bytes(key[4:12], "big")
        for at in range(0, len(packed), 8):
            listed = int.from_bytes(packed[at : at + 8], "big")
            if due.get(listed) == due_ms:
                del due[listed]
    if queue.name in findings.core.listing:
        # A sweep is about to list the others.
        return
    by_due: dict[int, list[int]] = {}
    for missing, due_ms in due.items():
        by_due.setdefault(due_ms, []).append(missing)
    for due_ms, keys in by_due.items():
        packed = b"".join(each.to_bytes(8, "big") for each in keys)
        key = prefix + due_ms.to_bytes(8, "big") + packed[:8] + crc32(packed).to_bytes(4, "big")
        text = f"queue {queue.name}: {len(keys)} messages are not listed to expire at {due_ms}"
        findings.violate(Kind.UNCLAIMED, "unclaimed", key, text)
        findings.put("unclaimed", key, packed)


def unclaimed_strangers(findings: Findings, by_number: Mapping[int, Queue]) -> None:
    """Check for rows of queues that are not there."""
    prefixes = [number.to_bytes(4, "big") for number in by_number]
    for key, _ in outside(findings.table("unclaimed"), prefixes):
        findings.violate(Kind.STRANGER, "unclaimed", key, "a row of a queue that is not there")
        findings.delete("unclaimed", key)
