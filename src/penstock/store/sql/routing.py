"""The metadata log: reading it, assigning matched messages, and filling queues from it.

Assignments and the log's cursor commit together, so that a page that comes again changes nothing.
A publish holds the heads of its logs from before it takes offsets until it commits, so that the
offsets of one log appear in order. Those of different logs need not: the log as a whole ends where
all logs are known to be complete. A reader first lets the heads of logs that nothing is published
into catch up (:meth:`SqlSession.reach_end`), and reads rows after that.

A queue is filled from the log, by matches made elsewhere, or from an archive. Each step is one
transaction that locks the queue's row: coverage decides which messages the queue has had, so that
no other process may change it meanwhile. Coverage does not know of messages that a move has brought
in, so that the queue is searched for them as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

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
from penstock.store import filling, policy
from penstock.store.codec.metadata import encode_metadata
from penstock.store.filling import Filled
from penstock.store.life import life, log_routes, log_step
from penstock.store.policy import LogSettings
from penstock.store.sql.publish import Items, SqlPublish

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.model import LogRecord
    from penstock.store.codec.metadata import Head, Metadata
    from penstock.store.policy import Coverage
    from penstock.store.sql.session import LogHead, SqlQueue

Rows = list[tuple[Any, ...]]


def describe_log(run: Callable[..., Rows], head: LogHead, segments: Rows) -> LogStats:
    """Describe the log by a head, and by segments that were read after it.

    ``run`` runs a statement, now or in a snapshot. Without segments the log begins at its end: one
    that is known later may be behind messages that were published meanwhile.
    """
    _, routing, _, _, epoch, encoded, _ = run("load_instance")[0]
    settings = msgspec.msgpack.decode(encoded, type=LogSettings)
    stored: dict[int, int] = dict(run("load_cursors"))
    earliest = segments[0][1] if segments else head.end
    logs = range(max(count for _, count in settings.changes))
    at = {log: max(stored.get(log, 0), earliest) for log in logs}
    return LogStats(
        routing=routing,
        logs=settings.changes[-1][1],
        earliest=earliest,
        end=head.end,
        routed_up_to=head.end if routing == "inline" else min(at.values()),
        segments=len(segments),
        retention_ms=settings.retention_ms,
        cursors=at,
        epoch=epoch,
    )


class SqlRouting(SqlPublish):
    """The verbs of the log, other than publish."""

    # When a sweep last looked for segments past retention, and when there will be some.
    _log_looked_ms: int | None = None
    log_due_ms: int | None = None

    def log_stats(self) -> LogStats:
        """Describe the log."""
        self.reach_end()
        return self._log()

    def _log(self) -> LogStats:
        head = self.head
        return describe_log(self.database.run, head, self._segments())

    def _segments(self) -> Rows:
        """Return number, first offset and first time of each segment."""
        return self.database.run("load_segments")

    def earliest(self) -> int:
        """Return the lowest offset that is kept."""
        head, segments = self.head, self._segments()
        return int(segments[0][1]) if segments else head.end

    def routed_up_to(self) -> int:
        """Return the offset below which every message has been routed."""
        if self.routing == "inline":
            return self.head.end
        return self._log().routed_up_to

    def _logs(self) -> list[int]:
        return list(range(max(count for _, count in self.settings.changes)))

    def offset_at(self, time_ms: int) -> int:
        """Return an offset at or before the first message of that time."""
        self.reach_end()
        head, segments = self.head, self._segments()
        begin = segments[0][1] if segments else head.end
        for _, start_offset, start_ms in segments:
            if start_ms <= time_ms:
                begin = start_offset
        told = {"logs": self._logs(), "earliest": begin, "time_ms": time_ms}
        found = self.database.run("offset_at", **told)[0][0]
        return head.end if found is None else int(found)

    # --- tailing -------------------------------------------------------------------------

    def read_log(self, log: int, begin: int | None, limit: int) -> LogPage:
        """Read a page of a log from an offset (or the log's cursor) on.

        A page ends where the live filters change. Where the number of logs changes it ends until
        every log has been assigned up to there, so that a group that moves to another log keeps
        its order.
        """
        self.reach_end()
        policy.check_log(log, len(self._logs()))
        head, segments = self.head, self._segments()
        stats = describe_log(self.database.run, head, segments)
        # Before the filters: another thread may find them changed meanwhile.
        filters_version = self.head.filters_version
        begin = max(stats.cursors[log] if begin is None else begin, stats.earliest)
        filters, until = self._filters_at(begin)
        end = stats.end if until is None else min(stats.end, until)
        others = [cursor for other, cursor in stats.cursors.items() if other != log]
        if self.routing == "inline":
            others = []
        end = policy.page_end(begin, end, self.settings.changes, others)
        rows = self._rows(log, begin, end, limit + 1)
        if segments and begin < segments[-1][1] and begin < self.earliest():
            # Retention was faster: removed messages must not pass for messages that never were.
            return self.read_log(log, begin, limit)
        following = rows[limit][0] if len(rows) > limit else end
        return LogPage(
            log=log,
            records=policy.records_of(((row[0], row[1]) for row in rows[:limit]), log),
            cursor=Cursor(begin, max(begin, following), filters_version),
            earliest=stats.earliest,
            end=stats.end,
            filters=filters,
        )

    def _rows(self, log: int, begin: int, end: int, count: int) -> Rows:
        return self.database.run("read_log", log=log, begin=begin, end=end, count=count)

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
        self.refresh()
        policy.check_log(log, len(self._logs()))
        self._log_looked_ms = None
        assigned, routes = self.change(
            lambda: self._assign(log, cursor, assignments, now_ms, epoch)
        )
        if life.level:
            log_routes("assign", routes, routes.values())
        return assigned

    def _assign(
        self,
        log: int,
        cursor: Cursor,
        assignments: Mapping[int, Sequence[str]],
        now_ms: int,
        epoch: int | None,
    ) -> tuple[Assigned, dict[int, Sequence[str]]]:
        """Assign a page; return the answer, and the queues that each message came into."""
        database = self.database
        earliest = self.earliest()
        at = max(database.run("lock_cursor", log=log, cursor=earliest)[0][0], earliest)
        # Other processes may change queues until here, and no more from here on.
        names = {name for each in assignments.values() for name in each}
        numbers = sorted(self.by_name[name].number for name in names if name in self.by_name)
        if numbers:
            database.run("share_queues", numbers=numbers)
        epoch_now, routing = self.hold_instance()
        if epoch not in {None, epoch_now}:
            return Assigned(AssignStatus.FENCED, at, 0), {}
        policy.check_pipeline(routing)
        refusal = filling.refuse_page(cursor, at, earliest)
        if refusal is not None:
            return Assigned(refusal, at, 0), {}
        self.refresh()
        if filling.is_outdated(cursor, self.head.filters_version, self.filter_changes):
            return Assigned(AssignStatus.OUTDATED, at, 0), {}
        begin = max(at, cursor.begin)
        filling.check_page(log, cursor, assignments, self.head.end)
        rows = self._rows(log, begin, cursor.end, cursor.end - begin)
        filling.check_assigned(log, begin, assignments, (row[0] for row in rows))
        items, routes = self._items(rows, assignments, begin, cursor.end, now_ms)
        self._enqueue(items, now_ms)
        held = {message_id: len(names) for message_id, names in routes.items() if names}
        if held:
            database.run("refer", message_ids=list(held), refs=list(held.values()))
        database.run("move_cursor", log=log, cursor=cursor.end, unrouted=len(routes) - len(held))
        status = AssignStatus.APPLIED if begin == cursor.begin else AssignStatus.TRIMMED
        return Assigned(status, cursor.end, len(items.rows)), routes

    def _items(
        self,
        rows: Rows,
        assignments: Mapping[int, Sequence[str]],
        begin: int,
        end: int,
        now_ms: int,
    ) -> tuple[Items, dict[int, Sequence[str]]]:
        """Make items of a page's messages for the queues that still want them; return those too."""
        queues = self.by_name

        def coverage(name: str) -> Coverage | None:
            return queues[name].coverage if name in queues else None

        items = Items()
        routes: dict[int, Sequence[str]] = {}
        wanting = filling.queues_wanting(coverage, begin, end)
        for message_id, _, head, kept in filling.assigned(rows, assignments, wanting):
            routes[message_id] = kept
            for name in kept:
                _add_logged(items, queues[name], message_id, head, now_ms)
        return items, routes

    def _enqueue(self, items: Items, now_ms: int) -> None:
        """Put messages into queues, and count them."""
        self.add_items(items, now_ms)
        for queue, count in sorted(items.counts.items(), key=lambda each: each[0].number):
            self.add_counts(
                queue.number, now_ms, live=count, live_bytes=items.sizes[queue], enqueued=count
            )

    def take_epoch(self, now_ms: int) -> int:  # noqa: ARG002 - the contract's
        """Fence every pipeline that took an epoch before; return the new one."""
        rows = self.database.ask("take_epoch")
        self.progress.commits += 1
        return int(rows[0][0])

    def route_plan(self, max_offsets: int | None) -> RoutePlan:
        """Return the stretches that may be matched next, up to ``max_offsets`` from the slowest."""
        self.reach_end()
        policy.check_pipeline(self.routing)
        filters_version = self.head.filters_version
        stats = self._log()
        stretches = filling.route_stretches(
            stats.cursors,
            stats.end,
            max_offsets,
            self.settings.changes,
            lambda at: self._filters_at(at)[1],
        )
        return RoutePlan(
            epoch=stats.epoch,
            filters_version=filters_version,
            stretches=stretches,
            lag={log: stats.end - begin for log, begin in stats.cursors.items()},
            cursors=stats.cursors,
            store_id=f"{self.store_id:08x}",
            end=stats.end,
            earliest=stats.earliest,
        )

    def filters_at(self, offset: int) -> LiveFilters:
        """Return the filters that are live at an offset, and until where."""
        self.refresh()
        filters_version = self.head.filters_version
        filters, until = self._filters_at(offset)
        return LiveFilters(filters, filters_version, until)

    def _filters_at(self, offset: int) -> tuple[dict[str, str], int | None]:
        """Return the filters that are live at an offset, and the offset at which they change."""
        coverages = [(name, queue.coverage) for name, queue in self.by_name.items()]
        live, _, until = policy.filters_at(coverages, offset)
        return live, until

    # --- filling -------------------------------------------------------------------------

    def backfill_plan(
        self, queue_name: str, begin: int, end: int, *, archived: bool = False
    ) -> BackfillPlan:
        """Return the stretches of [begin, end) that a queue was not filled from by its filter.

        With ``archived`` they begin below the log.
        """
        # A fill by another process changes no version.
        self.reload()
        self.reach_end()
        queue = self.queue(queue_name)
        stats = self._log()
        end = min(end, stats.routed_up_to)
        return filling.backfill_plan(
            queue.spec, queue.coverage, begin, end, stats.earliest, archived=archived
        )

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
        """Do one step of filling a queue from [begin, end); go on from ``next``.

        ``offsets`` (in the log) or ``records`` (archived, each with its payload if that is known)
        are all messages of it that ``filter_text`` has matched elsewhere, ascending. Without either
        the store matches the log itself. Coverage decides which messages the queue has had.
        """
        archived = {record.message_id: (record, body) for record, body in records or ()}
        matched = offsets if records is None else list(archived)
        sizes = None if records is None else [record.size for record, _ in records]

        def work() -> tuple[Filled, SqlQueue, Sequence[int]]:
            queue = self.lock_queue(queue_name)
            self.hold_instance()
            filling.check_fill(queue_name, queue.spec, queue.coverage, filter_text)
            log = (self.earliest(), self.head.end)
            if records is not None:
                filling.check_archived(queue_name, queue.coverage, begin, end, log[0])
            start, stop, passed, chosen = filling.fill_step(
                queue.coverage, queue.spec.filter, (begin, end), log, matched, sizes
            )
            if start >= stop:
                further = max(start, begin) if chosen is None else end
                return Filled(0, passed, 0, further), queue, ()
            rows: Rows
            if records is not None:
                told = [archived[each][0] for each in chosen or ()]
                rows = [
                    (each.message_id, encode_metadata(filling.metadata_of(each))) for each in told
                ]
            else:
                rows = self._rows_of_all(start, stop, chosen)
            wanted = self._wanted(queue, rows)
            kept = self._hold(wanted, {each: body for each, (_, body) in archived.items()})
            items = Items()
            for each in kept:
                _add_logged(items, queue, each, wanted[each], now_ms)
            self.check_room(items.counts, items.sizes)
            self._enqueue(items, now_ms)
            queue.coverage.note(start, stop, queue.spec.filter)
            self.put_coverage(queue)
            missing = 0 if chosen is None else len(chosen) - len(rows)
            missing += len(wanted) - len(kept)
            filled = Filled(len(kept), passed + len(rows) - len(wanted), missing, stop)
            return filled, queue, kept

        self.reach_end()
        self.queue(queue_name)
        filled, queue, kept = self.change(work)
        if life.level:
            log_step("backfill", queue_name, kept)
        known = self.by_number.get(queue.number)
        if known is not None:
            # It changes no version.
            known.coverage, known.records = queue.coverage, None
        return filled

    def _rows_of_all(self, begin: int, end: int, chosen: Sequence[int] | None) -> Rows:
        """Read messages of all logs: all of [begin, end), or the chosen ones."""
        if chosen is not None and not chosen:
            return []
        rows = [row for log in self._logs() for row in self._rows(log, begin, end, end - begin)]
        some = None if chosen is None else set(chosen)
        return sorted(row for row in rows if some is None or row[0] in some)

    def _wanted(self, queue: SqlQueue, rows: Rows) -> dict[int, Metadata]:
        """Return the messages that a queue wants and has not had."""
        wanted = filling.wanted(queue.spec.filter, queue.coverage, rows)
        ids = list(wanted)
        present = (
            self.database.run("find_present", queue=queue.number, message_ids=ids) if ids else []
        )
        there = {row[0] for row in present}
        return {each: metadata for each, (metadata, _) in wanted.items() if each not in there}

    def _hold(self, wanted: dict[int, Metadata], bodies: Mapping[int, bytes | None]) -> list[int]:
        """Hold messages for one more queue, stored again from ``bodies`` if they are gone.

        Return the ids of those that are there.
        """
        if not wanted:
            return []
        once = {"message_ids": list(wanted), "refs": [1] * len(wanted)}
        there = {row[0] for row in self.database.run("refer", **once)}
        again = [each for each in wanted if each not in there and bodies.get(each) is not None]
        if again:
            self.database.run(
                "restore_messages",
                message_ids=again,
                metadata=[encode_metadata(wanted[each]) for each in again],
                payloads=[bodies[each] for each in again],
            )
        return sorted(there.union(again))

    def put_coverage(self, queue: SqlQueue) -> None:
        """Write the coverage of a queue."""
        queue.coverage.bound(self.earliest())
        self.database.run(
            "put_coverage", number=queue.number, coverage=msgspec.msgpack.encode(queue.coverage)
        )

    # --- settings ------------------------------------------------------------------------

    def configure_log(
        self,
        logs: int | None,
        retention_ms: int | None,
        now_ms: int,
        *,
        routing: str | None = None,
    ) -> None:
        """Change the number of logs, how long they are kept, or who routes from here on."""
        routes: dict[int, Sequence[str]] = {}

        def work() -> None:
            routes.clear()
            end = self.lock_heads().end
            settings = msgspec.structs.replace(self.settings, changes=list(self.settings.changes))
            known = len(self._logs())
            if retention_ms is not None:
                settings.retention_ms = retention_ms
            wanted = settings.changes[-1][1] if logs is None else logs
            if wanted != settings.changes[-1][1]:
                settings.changes.append((end, wanted))
            for log in range(known, wanted):
                # A log that was not there before holds nothing to be tailed.
                self.database.run("lock_cursor", log=log, cursor=end)
            if wanted > known:
                self.database.run("add_heads", first=known, last=wanted - 1)
            if routing not in {None, self.routing}:
                routes.update(self._switch(routing, end, now_ms))
            self.database.run("put_log_settings", value=msgspec.msgpack.encode(settings))
            self.changed(now_ms)

        self._log_looked_ms = None
        self.change_queues(self.once(work, now_ms), again=True)
        if life.level:
            log_routes("assign", routes, routes.values())

    def _switch(self, routing: str, end: int, now_ms: int) -> dict[int, Sequence[str]]:
        """Let publish or a tailer route from the end of the log on; fence every tailer.

        Return the queues of messages that were not routed yet, and are now.
        """
        routes: dict[int, Sequence[str]] = {}
        logs, earliest = self._logs(), self.earliest()
        # A tailer locks a cursor first, and then waits for the commit here.
        for log in logs:
            self.database.run("lock_cursor", log=log, cursor=earliest)
        if routing == "pipeline":
            for log in logs:
                self.database.run("move_cursor", log=log, cursor=end, unrouted=0)
        else:
            filling.check_switch(self.routed_up_to(), end)
            while self.routed_up_to() < end:
                for log in logs:
                    page = self.read_log(log, None, filling.SWITCH_OFFSETS)
                    matched = filling.match_page(page)
                    routes |= self._assign(log, page.cursor, matched, now_ms, None)[1]
        self.database.run("switch_routing", routing=routing)
        return routes


def _add_logged(
    items: Items, queue: SqlQueue, message_id: int, about: Metadata | Head, now_ms: int
) -> None:
    """Add a message of the log. A delay that is over leaves it visible now."""
    # A message's own delay counts if it has one; the queue's is the default.
    vesting_ms = about.published_at_ms + (about.delay_ms or queue.spec.delay_ms)
    items.add(queue, message_id, about, max(vesting_ms, now_ms))
