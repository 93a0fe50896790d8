"""Routing apart from publish: reading the log, assigning what a tailer matched, backfill.

::

    table default
    02 12 | log u32 BE       u64 BE: the log's cursor: everything below it has been assigned
    02 14                    u64 BE: the epoch of the pipeline that may assign

A tailing process reads a page of a log, matches it, and hands the assignments back with the
page's cursor. Assignments and cursor commit together, so a page that comes again (a replay, a
second tailer) changes nothing and is told so; one that overlaps is trimmed to what is new.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from penstock.errors import CorruptRecord, InvalidInput, InvalidQueue
from penstock.filters import parse
from penstock.model import Assigned, AssignStatus, Backfilled, Cursor, LogPage, LogStats
from penstock.store.codec.metadata import Metadata, decode_heads, decode_metadata
from penstock.store.coverage import Throughout
from penstock.store.kv.restoring import check_known
from penstock.store.live import Item, lane_of
from penstock.store.log_records import decodes, record_of
from penstock.store.plans import BackfillPlan, Filled, LiveFilters, LogStretch, RoutePlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.filters import Filter, RowTuple
    from penstock.store.kv.placing import Placing
    from penstock.store.kv.queues import Queue
    from penstock.store.kv.state import Core

__all__ = ["Routing"]

log_ = logging.getLogger(__name__)

_CURSOR: Final = b"\x02\x12"
_EPOCH: Final = b"\x02\x14"
# Offsets that one step of a backfill looks at.
BACKFILL_WINDOW: Final = 2_000
# Bounds of one step of a fill: offsets looked at, messages added.
FILL_WINDOW: Final = 20_000
FILL_MESSAGES: Final = 5_000


class Routing:
    """The log's readers and writers, other than publish."""

    def __init__(self, core: Core, placing: Placing) -> None:
        self._core = core
        self._placing = placing
        # The filters last asked for: valid from, until, in which version.
        self._live: tuple[int, int | None, int, dict[str, str]] = (0, 0, -1, {})

    def stats(self) -> LogStats:
        """Describe the log."""
        core = self._core
        return LogStats(
            routing=core.identity.routing,
            logs=core.log.logs,
            earliest=core.log.earliest,
            end=core.log.end,
            routed_up_to=self.routed_up_to(),
            segments=len(core.log.segments),
            retention_ms=core.log.settings.retention_ms,
            cursors={log: self.cursor(log) for log in range(core.log.all_logs)},
        )

    # --- tailing -------------------------------------------------------------------------

    def cursor(self, log: int) -> int:
        """Return a log's cursor: where its tailer goes on."""
        self._check_log(log)
        record = self._core.system.get(_cursor_key(log))
        stored = 0 if record is None else int.from_bytes(record, "big")
        return max(stored, self._core.log.earliest)

    def routed_up_to(self) -> int:
        """Return the offset below which every message has been routed."""
        if self._core.identity.routing == "inline":
            return self._core.log.end
        return min(self.cursor(log) for log in range(self._core.log.all_logs))

    def read_log(self, log: int, begin: int | None, limit: int) -> LogPage:
        """Read a page of a log from an offset (or the log's cursor) on.

        A page ends where the live filters change. Where the number of logs changes it ends until
        every log has been assigned up to there, so that a group that moves to another log keeps
        its order.
        """
        core = self._core
        at = self.cursor(log)
        begin = max(at if begin is None else begin, core.log.earliest)
        end = core.log.end
        filters, until = self._filters_at(begin)
        if until is not None:
            end = min(end, until)
        others = [self.cursor(other) for other in range(core.log.all_logs) if other != log]
        if core.identity.routing == "inline":
            others = []
        for change, _ in core.log.settings.changes:
            if begin < change < end and any(cursor < change for cursor in others):
                end = change
            elif change == begin and any(cursor < change for cursor in others):
                end = begin
        page = core.log.read(log, begin, limit, end=end)
        records = []
        for message_id, encoded in page.rows:
            try:
                records.append(record_of(message_id, decode_metadata(encoded)))
            except CorruptRecord:
                # Nobody can route it; it stays in the log, and the tailer goes on.
                log_.exception("message %d of log %d can't be routed", message_id, log)
        return LogPage(
            log=log,
            records=records,
            cursor=Cursor(begin, max(begin, page.next_offset), core.totals.filters_version),
            earliest=core.log.earliest,
            end=core.log.end,
            filters=filters,
        )

    def assign(
        self,
        log: int,
        cursor: Cursor,
        assignments: Mapping[int, Sequence[str]],
        now_ms: int,
        *,
        epoch: int | None = None,
    ) -> Assigned:
        """Put the messages of a page into the queues that they were matched to.

        A tailer that took an epoch names it, and is refused once another has taken a later one.
        """
        self._check_log(log)
        core = self._core
        at = self.cursor(log)
        if epoch is not None and epoch != self.epoch():
            return Assigned(AssignStatus.FENCED, at, 0)
        if cursor.end <= at:
            return Assigned(AssignStatus.STALE, at, 0)
        if cursor.begin > max(at, core.log.earliest):
            return Assigned(AssignStatus.AHEAD, at, 0)
        if self._outdated(cursor):
            return Assigned(AssignStatus.OUTDATED, at, 0)
        for message_id in (min(assignments), max(assignments)) if assignments else ():
            if not cursor.begin <= message_id < cursor.end:
                raise InvalidInput(
                    f"message {message_id} is not in the page [{cursor.begin}, {cursor.end})"
                )
        begin = max(at, cursor.begin)
        page = core.log.read(log, begin, cursor.end - begin, end=cursor.end)
        if page.next_offset < cursor.end:
            raise InvalidInput(
                f"log {log} ends at offset {page.next_offset}; the cursor to assign is {cursor.end}"
            )
        ids = [row[0] for row in page.rows]
        if not assignments.keys() <= set(ids):
            strangers = {i for i in assignments if i >= begin}.difference(ids)
            if strangers:
                raise InvalidInput(f"message {min(strangers)} is not in this page of log {log}")
        placed, routes = self._placed(page.rows, assignments, cursor.end, now_ms)
        batch = core.begin()
        touched = self._placing.place(batch, placed, routes, now_ms, late=True)
        batch.put(_cursor_key(log), cursor.end.to_bytes(8, "big"), core.system.family)
        core.put_totals(batch, now_ms)
        core.commit(batch, touched, now_ms)
        status = AssignStatus.APPLIED if begin == cursor.begin else AssignStatus.TRIMMED
        return Assigned(status, cursor.end, sum(map(len, routes)))

    def epoch(self) -> int:
        """Return the epoch of the pipeline that may assign."""
        record = self._core.system.get(_EPOCH)
        return 0 if record is None else int.from_bytes(record, "big")

    def take_epoch(self, now_ms: int) -> int:
        """Fence every pipeline that took an epoch before; return the new one."""
        core = self._core
        epoch = self.epoch() + 1
        batch = core.begin()
        batch.put(_EPOCH, epoch.to_bytes(8, "big"), core.system.family)
        core.commit(batch, (), now_ms)
        return epoch

    def route_plan(self, max_offsets: int | None) -> RoutePlan:
        """Say what may be matched next, in all not further than ``max_offsets`` from the slowest.

        The slowest log decides where the others stop, so that logs stay in step.
        """
        core = self._core
        cursors = [self.cursor(log) for log in range(core.log.all_logs)]
        limit = core.log.end if max_offsets is None else min(cursors) + max_offsets
        stretches = []
        for log, begin in enumerate(cursors):
            until = self._filters_at(begin)[1]
            end = min(limit, core.log.end, core.log.end if until is None else until)
            for change, _ in core.log.settings.changes:
                # A group that moves to another log must not overtake itself.
                if begin <= change < end and any(other < change for other in cursors):
                    end = max(begin, change)
            if begin < end:
                stretches.append(LogStretch(log, begin, end))
        return RoutePlan(
            epoch=self.epoch(),
            filters_version=core.totals.filters_version,
            stretches=stretches,
            lag={log: core.log.end - begin for log, begin in enumerate(cursors)},
        )

    def filters_at(self, offset: int) -> LiveFilters:
        """Return the filters that are live at an offset, and until where."""
        filters, until = self._filters_at(offset)
        return LiveFilters(dict(filters), self._core.totals.filters_version, until)

    def _outdated(self, cursor: Cursor) -> bool:
        """Whether filters have changed for offsets of a page since it was read."""
        version, changes = cursor.filters_version, self._core.filter_changes
        if version is None or version == self._core.totals.filters_version:
            return False
        # What happened before the oldest change on record is not known: read again, to be sure.
        if not changes or changes[0][0] > version + 1:
            return True
        return any(at > version and offset < cursor.end for at, offset in changes)

    def _placed(
        self,
        rows: Sequence[tuple[int, bytes]],
        assignments: Mapping[int, Sequence[str]],
        end: int,
        now_ms: int,
    ) -> tuple[list[Item], list[Sequence[str]]]:
        """Make items of a page's messages, and tell the queues of each that still want it."""
        live = Throughout(self._core.coverage.get, rows[0][0] if rows else end, end)
        placed: list[Item] = []
        routes: list[Sequence[str]] = []
        find = assignments.get
        heads = decode_heads([encoded for _, encoded in rows])
        for (message_id, encoded), head in zip(rows, heads, strict=True):
            names = find(message_id, ())
            if head is None or not (names or decodes(encoded)):
                continue
            lane = lane_of(head.group, head.priority)
            # What was due before it was routed is due now.
            visible_at_ms = max(head.published_at_ms + head.delay_ms, now_ms)
            placed.append(Item(message_id, message_id, lane, 0, 0, visible_at_ms, encoded))
            if type(names) in (tuple, list) and len(names) == 1 and live[names[0]]:
                routes.append(names)
            else:
                routes.append([name for name in dict.fromkeys(names) if live.at(name, message_id)])
        return placed, routes

    def _filters_at(self, offset: int) -> tuple[Mapping[str, str], int | None]:
        """Return the filters that are live at an offset, and the offset at which they change."""
        core = self._core
        begin, until, version, live = self._live
        if (
            version == core.totals.filters_version
            and begin <= offset
            and (until is None or offset < until)
        ):
            return live, until
        live, begin, until = {}, 0, None
        for name in sorted(core.queues):
            coverage = core.coverage[name]
            text = coverage.filter_at(offset)
            if text is not None:
                live[name] = text
            for border in coverage.borders():
                if border > offset:
                    until = border if until is None else min(until, border)
                else:
                    begin = max(begin, border)
        self._live = (begin, until, core.totals.filters_version, live)
        return live, until

    def configure_log(self, logs: int | None, retention_ms: int | None, now_ms: int) -> None:
        """Spread messages over another number of logs from here on; keep them for another time."""
        core = self._core
        batch = core.begin()
        settings = core.log.settings
        if retention_ms is not None:
            settings.retention_ms = retention_ms
        if logs is None:
            logs = core.log.logs
        known = core.log.all_logs
        if logs != core.log.logs:
            settings.changes.append((core.log.end, logs))
        for log in range(known, logs):
            # A log that was not there before holds nothing to be tailed.
            end = core.log.end.to_bytes(8, "big")
            batch.put(_cursor_key(log), end, core.system.family)
        core.log.put_settings(batch, settings)
        core.commit(batch, (), now_ms)

    # --- backfill ------------------------------------------------------------------------

    def backfill(self, queue_name: str, begin: int, end: int, now_ms: int) -> Backfilled:
        """Do one step of filling a queue from [begin, end) of the log; go on from ``next``."""
        core = self._core
        queue = core.queue(queue_name)
        coverage = core.coverage[queue.name]
        if coverage.draining:
            raise InvalidQueue(f"queue {queue_name!r} is draining: it takes no more messages")
        filter_text = queue.spec.filter
        start = coverage.skip(max(begin, core.log.earliest), filter_text)
        stop = min(end, core.log.end, start + BACKFILL_WINDOW)
        if start >= stop:
            return Backfilled(scanned=0, added=0, missing=0, next=max(start, begin))
        rows: list[tuple[int, bytes]] = []
        for log in range(core.log.all_logs):
            rows += core.log.read(log, start, BACKFILL_WINDOW, end=stop).rows
        rows.sort()
        items = self._wanted(queue, rows)
        batch = core.batch_of_new(len(items))
        held = core.payloads.hold(batch, [item.message_id for item in items])
        kept = [item for item, alive in zip(items, held, strict=True) if alive]
        if kept:
            self._placing.enqueue(batch, queue, kept, now_ms, late=True)
        coverage.note(start, stop, filter_text)
        core.put_coverage(batch, queue, coverage)
        core.commit(batch, (queue,), now_ms)
        return Backfilled(
            scanned=len(rows), added=len(kept), missing=len(items) - len(kept), next=stop
        )

    def _wanted(self, queue: Queue, rows: Sequence[tuple[int, bytes]]) -> list[Item]:
        coverage = self._core.coverage[queue.name]
        wanted = parse(queue.spec.filter)
        compiled: dict[str, Filter] = {wanted.text: wanted}
        items = []
        for message_id, encoded in rows:
            try:
                metadata = decode_metadata(encoded)
            except CorruptRecord:
                continue
            row = _row(metadata)
            if not wanted.matches(row) or coverage.had(row, message_id, compiled):
                continue
            visible_at_ms = metadata.published_at_ms + metadata.delay_ms
            lane = lane_of(metadata.group, metadata.priority)
            items.append(Item(message_id, message_id, lane, 0, 0, visible_at_ms, encoded))
        # Coverage does not know of what a move has brought in.
        moved = self._core.history.marks(queue, [item.message_id for item in items])
        return [item for item in items if item.message_id not in moved]

    def backfill_plan(
        self, queue_name: str, begin: int, end: int, *, archived: bool = False
    ) -> BackfillPlan:
        """Return what of [begin, end) a queue has not been filled from by its present filter.

        With ``archived`` that begins with what the log has let go of.
        """
        core = self._core
        queue = core.queue(queue_name)
        coverage = core.coverage[queue.name]
        text = queue.spec.filter
        end = min(end, self.routed_up_to())
        # Offsets begin at 1.
        at = max(begin, 1 if archived else core.log.earliest)
        if archived and at < core.log.earliest:
            check_known(coverage, queue_name, at)
        return BackfillPlan(coverage.missing(at, end, text), text, end, core.log.earliest)

    def fill(
        self,
        queue_name: str,
        begin: int,
        end: int,
        offsets: Sequence[int],
        filter_text: str,
        now_ms: int,
    ) -> Filled:
        """Do one step of filling a queue with messages that were matched elsewhere.

        ``offsets`` are all messages of [begin, end) that the queue's filter wants, ascending.
        Coverage decides which of them it has had; go on from ``next``.
        """
        core = self._core
        queue = core.queue(queue_name)
        coverage = core.coverage[queue.name]
        if coverage.draining:
            raise InvalidQueue(f"queue {queue_name!r} is draining: it takes no more messages")
        if queue.spec.filter != filter_text:
            raise InvalidInput(
                f"queue {queue_name!r} now takes messages where {queue.spec.filter}; these were "
                f"matched by {filter_text}: plan the backfill again"
            )
        start = min(end, coverage.skip(begin, filter_text))
        first = bisect_left(offsets, start)
        stop = min(end, start + FILL_WINDOW)
        last = bisect_left(offsets, stop, lo=first)
        if last - first > FILL_MESSAGES:
            last = first + FILL_MESSAGES
            stop = offsets[last]
        if start >= stop:
            return Filled(0, first, 0, end)
        chosen = set(offsets[first:last])
        rows: list[tuple[int, bytes]] = []
        for log in range(core.log.all_logs) if chosen else ():
            page = core.log.read(log, start, FILL_WINDOW, end=stop)
            rows += [row for row in page.rows if row[0] in chosen]
        rows.sort()
        items = self._wanted(queue, rows)
        batch = core.batch_of_new(len(items))
        held = core.payloads.hold(batch, [item.message_id for item in items])
        kept = [item for item, alive in zip(items, held, strict=True) if alive]
        if kept:
            self._placing.enqueue(batch, queue, kept, now_ms, late=True)
        coverage.note(start, stop, filter_text)
        core.put_coverage(batch, queue, coverage)
        core.commit(batch, (queue,), now_ms)
        missing = len(chosen) - len(rows) + len(items) - len(kept)
        return Filled(len(kept), first + len(rows) - len(items), missing, stop)

    def _check_log(self, log: int) -> None:
        known = self._core.log.all_logs
        if not 0 <= log < known:
            raise InvalidInput(f"no log {log}; there are logs 0 to {known - 1}")


def _row(metadata: Metadata) -> RowTuple:
    return (
        metadata.attributes,
        metadata.group,
        metadata.priority,
        metadata.published_at_ms,
        metadata.size,
    )


def _cursor_key(log: int) -> bytes:
    return _CURSOR + log.to_bytes(4, "big")
