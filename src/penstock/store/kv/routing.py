"""Routing apart from publish: reading the log, assigning what a tailer matched, backfill.

::

    table default
    02 12 | log u32 BE       u64 BE: the log's cursor: everything below it has been assigned
    02 14                    u64 BE: the epoch of the pipeline that may assign

A tailing process reads a page of a log, matches it, and hands the assignments back with the
page's cursor. Assignments and cursor commit together, so a page that comes again (a replay, a
second tailer) changes nothing, and its answer says so; of one that overlaps, the new part counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.model import (
    Assigned,
    AssignStatus,
    BackfillPlan,
    Cursor,
    LiveFilters,
    LogPage,
    LogStats,
    RoutePlan,
)
from penstock.store import policy
from penstock.store.codec.metadata import decode_heads, encode_metadata
from penstock.store.kv.publish import PublishVerbs
from penstock.store.kv.state import verb
from penstock.store.life import life, log_routes, log_step
from penstock.store.live import Item, lane_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.engines import Batch
    from penstock.model import LogRecord
    from penstock.store.filling import Filled
    from penstock.store.policy import Coverage

_CURSOR: Final = b"\x02\x12"
_EPOCH: Final = b"\x02\x14"
# Rows of the log that are decoded at once.
_PART_ROWS: Final = 1_000


class RoutingVerbs(PublishVerbs):
    """The log's readers and writers, other than publish."""

    @verb
    def log_stats(self) -> LogStats:
        """Describe the log."""
        return LogStats(
            routing=self.identity.routing,
            logs=self.log.logs,
            earliest=self.log.earliest,
            end=self.log.end,
            routed_up_to=self.routed_up_to(),
            segments=len(self.log.segments),
            retention_ms=self.log.settings.retention_ms,
            cursors={log: self.cursor(log) for log in range(self.log.all_logs)},
            epoch=self.epoch(),
        )

    # --- tailing -------------------------------------------------------------------------

    def cursor(self, log: int) -> int:
        """Return a log's cursor: where its tailer goes on."""
        policy.check_log(log, self.log.all_logs)
        record = self.system.get(_cursor_key(log)) or b""
        return max(int.from_bytes(record, "big"), self.log.earliest)

    def routed_up_to(self) -> int:
        """Return the offset below which every message has been routed."""
        if self.identity.routing == "inline":
            return self.log.end
        return min(self.cursor(log) for log in range(self.log.all_logs))

    @verb
    def read_log(self, log: int, begin: int | None, limit: int) -> LogPage:
        """Read a page of a log; it ends where the live filters or the number of logs change."""
        at = self.cursor(log)
        begin = max(at if begin is None else begin, self.log.earliest)
        filters, until = self._filters_at(begin)
        end = self.log.end if until is None else min(self.log.end, until)
        others = []
        if self.identity.routing != "inline":
            others = [self.cursor(other) for other in range(self.log.all_logs) if other != log]
        end = policy.page_end(begin, end, self.log.settings.changes, others)
        rows, further = self.log.read(log, begin, limit, end=end)
        return LogPage(
            log=log,
            records=policy.records_of(rows, log),
            cursor=Cursor(begin, max(begin, further), self.totals.filters_version),
            earliest=self.log.earliest,
            end=self.log.end,
            filters=filters,
        )

    @verb
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
        from penstock.store import filling  # noqa: PLC0415 - loaded when used

        at = self.cursor(log)
        if epoch is not None and epoch != self.epoch():
            return Assigned(AssignStatus.FENCED, at, 0)
        policy.check_pipeline(self.identity.routing)
        refusal = filling.refuse_page(cursor, at, self.log.earliest)
        if refusal is None and filling.is_outdated(
            cursor, self.totals.filters_version, self.filter_history
        ):
            refusal = AssignStatus.OUTDATED
        if refusal is not None:
            return Assigned(refusal, at, 0)
        filling.check_page(log, cursor, assignments, self.log.end)
        begin = max(at, cursor.begin)
        wanting = filling.queues_wanting(self._coverage_of, begin, cursor.end)
        ids: list[int] = []
        placed: list[Item] = []
        routes: list[Sequence[str]] = []
        for rows in _parts(self.log.entries(log, begin, cursor.end)):
            ids += [row[0] for row in rows]
            for message_id, encoded, head, names in filling.assigned(rows, assignments, wanting):
                lane = lane_of(head.group, head.priority)
                due_ms = head.published_at_ms + head.delay_ms
                placed.append(Item(message_id, message_id, lane, 0, 0, due_ms, encoded))
                routes.append(names)
        filling.check_assigned(log, begin, assignments, ids)
        batch = self.begin()
        touched = self.place(batch, placed, routes, now_ms, late=True)
        batch.put(_cursor_key(log), cursor.end.to_bytes(8, "big"), self.system.family)
        self.put_totals(batch, now_ms)
        self.commit(batch, touched, now_ms)
        if life.level:
            log_routes("assign", [item.message_id for item in placed], routes)
        status = AssignStatus.APPLIED if begin == cursor.begin else AssignStatus.TRIMMED
        return Assigned(status, cursor.end, sum(map(len, routes)))

    def epoch(self) -> int:
        """Return the epoch of the pipeline that may assign."""
        return int.from_bytes(self.system.get(_EPOCH) or b"", "big")

    @verb
    def take_epoch(self, now_ms: int) -> int:
        """Fence every pipeline that took an epoch before; return the new one."""
        epoch = self.epoch() + 1
        batch = self.begin()
        self.put_epoch(batch, epoch)
        self.commit(batch, (), now_ms)
        return epoch

    @verb
    def route_plan(self, max_offsets: int | None) -> RoutePlan:
        """Return the stretches that a router may match next."""
        from penstock.store import filling  # noqa: PLC0415 - loaded when used

        policy.check_pipeline(self.identity.routing)
        cursors = {log: self.cursor(log) for log in range(self.log.all_logs)}
        changes = self.log.settings.changes
        return RoutePlan(
            epoch=self.epoch(),
            filters_version=self.totals.filters_version,
            stretches=filling.route_stretches(
                cursors, self.log.end, max_offsets, changes, lambda at: self._filters_at(at)[1]
            ),
            lag={log: self.log.end - begin for log, begin in cursors.items()},
            cursors=cursors,
            store_id=f"{self.identity.store_id:08x}",
            end=self.log.end,
            earliest=self.log.earliest,
        )

    @verb
    def filters_at(self, offset: int) -> LiveFilters:
        """Return the filters that are live at an offset, and until where."""
        filters, until = self._filters_at(offset)
        return LiveFilters(dict(filters), self.totals.filters_version, until)

    def _coverage_of(self, queue_name: str) -> Coverage | None:
        queue = self.by_name.get(queue_name)
        return None if queue is None else queue.coverage

    def _filters_at(self, offset: int) -> tuple[Mapping[str, str], int | None]:
        """Return the filters that are live at an offset, and the offset at which they change."""
        begin, until, version, live = self.filters_asked
        if (
            version == self.totals.filters_version
            and begin <= offset
            and (until is None or offset < until)
        ):
            return live, until
        coverages = [(name, queue.coverage) for name, queue in self.by_name.items()]
        live, begin, until = policy.filters_at(coverages, offset)
        self.filters_asked = (begin, until, self.totals.filters_version, live)
        return live, until

    @verb
    def offset_at(self, time_ms: int) -> int:
        """Return an offset at or before the first message of that time."""
        return self.log.offset_at(time_ms)

    @verb
    def configure_log(
        self, logs: int | None, retention_ms: int | None, now_ms: int, *, routing: str | None = None
    ) -> None:
        """Change the number of logs, how long they are kept, or who routes from here on."""
        if routing == self.identity.routing:
            routing = None
        if routing == "inline":
            self._route_rest(now_ms)
        batch = self.begin()
        settings = self.log.settings
        if retention_ms is not None:
            settings.retention_ms = retention_ms
        if logs is None:
            logs = self.log.logs
        known = self.log.all_logs
        if logs != self.log.logs:
            settings.changes.append((self.log.end, logs))
        if self.identity.routing == "pipeline":
            # A log that was not there before holds nothing to be tailed.
            self.put_cursors(batch, dict.fromkeys(range(known, logs), self.log.end))
        if routing is not None:
            self._switch(batch, routing)
        self.log.put_settings(batch, settings)
        self.commit(batch, (), now_ms)

    def put_cursors(self, batch: Batch, cursors: Mapping[int, int]) -> None:
        """Set the cursors of logs."""
        for log, offset in cursors.items():
            batch.put(_cursor_key(log), offset.to_bytes(8, "big"), self.system.family)

    def put_epoch(self, batch: Batch, epoch: int) -> None:
        """Set the epoch of the pipeline that may assign."""
        batch.put(_EPOCH, epoch.to_bytes(8, "big"), self.system.family)

    def _switch(self, batch: Batch, routing: str) -> None:
        """Let publish or a tailer route from the end of the log on; fence every tailer."""
        logs = range(self.log.all_logs)
        if routing == "pipeline":
            # Nothing in them is left to be tailed.
            self.put_cursors(batch, dict.fromkeys(logs, self.log.end))
        else:
            # Only a store that is tailed has cursors: salvage tells by them, if it must.
            for log in logs:
                batch.delete(_cursor_key(log), self.system.family)
        self.put_epoch(batch, self.epoch() + 1)
        self.put_routing(batch, routing)

    def _route_rest(self, now_ms: int) -> None:
        """Assign the messages that are not routed yet, page by page, each in its own commit."""
        from penstock.store import filling  # noqa: PLC0415 - loaded when used

        filling.check_switch(self.routed_up_to(), self.log.end)
        while self.routed_up_to() < self.log.end:
            for log in range(self.log.all_logs):
                page = self.read_log(log, None, filling.SWITCH_OFFSETS)
                self.assign(log, page.cursor, filling.match_page(page), now_ms)

    # --- backfill ------------------------------------------------------------------------

    @verb
    def backfill_plan(
        self, queue_name: str, begin: int, end: int, *, archived: bool = False
    ) -> BackfillPlan:
        """Return the stretches that a queue has not been filled from by its present filter."""
        from penstock.store import filling  # noqa: PLC0415 - loaded when used

        queue = self.queue(queue_name)
        end = min(end, self.routed_up_to())
        return filling.backfill_plan(
            queue.spec, queue.coverage, begin, end, self.log.earliest, archived=archived
        )

    @verb
    def fill(
        self,
        queue_name: str,
        begin: int,
        end: int,
        now_ms: int,
        *,
        filter_text: str | None = None,
        offsets: Sequence[int] | None = None,
        records: Sequence[tuple[LogRecord, bytes | None]] | None = None,
    ) -> Filled:
        """Do one step of filling a queue; its coverage says which messages the queue has had."""
        from penstock.store import filling  # noqa: PLC0415 - loaded when used

        log = self.log
        queue = self.queue(queue_name)
        coverage, text = queue.coverage, queue.spec.filter
        filling.check_fill(queue_name, queue.spec, coverage, filter_text)
        sizes: list[int] | None = None
        archived: dict[int, LogRecord] = {}
        if records is not None:
            filling.check_archived(queue_name, coverage, begin, end, log.earliest)
            archived = {record.message_id: record for record, _ in records}
            offsets, sizes = list(archived), [record.size for record, _ in records]
        start, stop, passed, chosen = filling.fill_step(
            coverage, text, (begin, end), (log.earliest, log.end), offsets, sizes
        )
        if start >= stop:
            return filling.Filled(0, passed, 0, max(start, begin) if chosen is None else end)
        if records is None:
            rows = self._rows_between(start, stop, chosen)
        else:
            rows = [
                (id_, encode_metadata(filling.metadata_of(archived[id_]))) for id_ in chosen or ()
            ]
        items = []
        for message_id, (m, encoded) in filling.wanted(text, coverage, rows).items():
            lane, visible_at_ms = lane_of(m.group, m.priority), m.published_at_ms + m.delay_ms
            items.append(Item(message_id, message_id, lane, 0, 0, visible_at_ms, encoded))
        # Coverage does not know of messages that a move has brought in.
        moved = self.history.marks(queue, [item.message_id for item in items])
        items = [item for item in items if item.message_id not in moved]
        heads = decode_heads([item.metadata for item in items])
        bytes_of = {
            item.message_id: head.size if head else 0
            for item, head in zip(items, heads, strict=True)
        }
        self.check_room(queue, len(items), sum(bytes_of.values()))
        payloads = {record.message_id: payload for record, payload in records or ()}
        brought = {item.message_id: payloads.get(item.message_id) for item in items}
        batch = self.begin(len(items), sum(len(payload or b"") for payload in brought.values()))
        kept = []
        for item, here in zip(items, self.payloads.hold(batch, bytes_of), strict=True):
            payload = brought[item.message_id]
            if not here and payload is not None:
                self.payloads.put_again(batch, item.message_id, payload)
            if here or payload is not None:
                kept.append(item)
        if kept:
            self.enqueue(batch, queue, kept, now_ms, late=True)
        coverage.note(start, stop, text)
        self.put_coverage(batch, queue, coverage)
        self.commit(batch, (queue,), now_ms)
        if life.level:
            log_step("backfill", queue_name, [item.message_id for item in kept])
        asked = len(rows) if chosen is None else len(chosen)
        already = passed + len(rows) - len(items)
        missing = asked - len(rows) + len(items) - len(kept)
        return filling.Filled(len(kept), already, missing, stop)

    def _rows_between(
        self, start: int, stop: int, chosen: Sequence[int] | None
    ) -> list[tuple[int, bytes]]:
        """Read messages of all logs, or the chosen ones of them."""
        log = self.log
        some = None if chosen is None else set(chosen)
        return sorted(
            row
            for number in range(log.all_logs if some is None or some else 0)
            for entry in log.entries(number, start, stop)
            for row in entry
            if some is None or row[0] in some
        )


def _parts(entries: Iterable[list[tuple[int, bytes]]]) -> Iterator[list[tuple[int, bytes]]]:
    """Join entries of the log to parts of about the same number of rows.

    So few rows are let go of before the garbage collector takes them for something that lasts.
    """
    rows: list[tuple[int, bytes]] = []
    for entry in entries:
        rows += entry
        if len(rows) >= _PART_ROWS:
            yield rows
            rows = []
    yield rows


def _cursor_key(log: int) -> bytes:
    return _CURSOR + log.to_bytes(4, "big")
