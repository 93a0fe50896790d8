"""The metadata log: reading, assigning what a tailer matched, its retention.

Assignments and the log's cursor commit together, so that a page that comes again changes nothing.
What is read is what was committed before: offsets appear in order, because a publish holds the
lock of ``log_head`` from the moment that it takes them until it commits.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.errors import InvalidInput
from penstock.model import (
    Assigned,
    AssignStatus,
    Cursor,
    LiveFilters,
    LogPage,
    LogStats,
    RoutePlan,
)
from penstock.store import policy
from penstock.store.codec.metadata import decode_heads
from penstock.store.coverage import Throughout
from penstock.store.kv.log import SEGMENT_MS
from penstock.store.sql.publish import Arrival, add_items

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from penstock.store.coverage import Coverage
    from penstock.store.sql.session import Core, Queue

__all__ = ["Routing", "delayed_until"]

log_ = logging.getLogger(__name__)

# Rows of the log that one sweep removes at most, of each log.
TRIM_ROWS: Final = 10_000
# How often it is looked what is past retention.
LOOK_MS: Final = 10_000


class Routing:
    """The log's readers and writers, other than publish."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # When it was last looked what is past retention, and when that has something to do.
        self._looked_ms: int | None = None
        self.due_ms: int | None = None

    # --- where things are ------------------------------------------------------------------

    @property
    def _all_logs(self) -> int:
        return max(count for _, count in self._core.settings.changes)

    def _segments(self) -> list[tuple[int, int, int]]:
        return [(row[0], row[1], row[2]) for row in self._core.database.run("load_segments")]

    def earliest(self) -> int:
        """Return the lowest offset that is kept."""
        segments = self._segments()
        return segments[0][1] if segments else self._core.head.next_offset

    def _cursors(self, earliest: int) -> dict[int, int]:
        stored: dict[int, int] = dict(self._core.database.run("load_cursors"))
        return {log: max(stored.get(log, 0), earliest) for log in range(self._all_logs)}

    def routed_up_to(self) -> int:
        """Return the offset below which every message has been routed."""
        core = self._core
        if core.identity.routing == "inline":
            return core.head.next_offset
        return min(self._cursors(self.earliest()).values())

    def stats(self) -> LogStats:
        """Describe the log."""
        core = self._core
        core.refresh()
        segments = self._segments()
        earliest = segments[0][1] if segments else core.head.next_offset
        cursors = self._cursors(earliest)
        inline = core.identity.routing == "inline"
        return LogStats(
            routing=core.identity.routing,
            logs=core.settings.changes[-1][1],
            earliest=earliest,
            end=core.head.next_offset,
            routed_up_to=core.head.next_offset if inline else min(cursors.values()),
            segments=len(segments),
            retention_ms=core.settings.retention_ms,
            cursors=cursors,
        )

    def offset_at(self, time_ms: int) -> int:
        """Return an offset at or before the first message of that time."""
        core = self._core
        core.refresh()
        segments = self._segments()
        begin = segments[0][1] if segments else core.head.next_offset
        for _, start_offset, start_ms in segments:
            if start_ms <= time_ms:
                begin = start_offset
        found = core.database.run(
            "offset_at", logs=list(range(self._all_logs)), earliest=begin, time_ms=time_ms
        )[0][0]
        return core.head.next_offset if found is None else int(found)

    # --- tailing -------------------------------------------------------------------------

    def read_log(self, log: int, begin: int | None, limit: int) -> LogPage:
        """Read a page of a log from an offset (or the log's cursor) on.

        A page ends where the live filters change. Where the number of logs changes it ends until
        every log has been assigned up to there, so that a group that moves to another log keeps
        its order.
        """
        core = self._core
        core.refresh()
        policy.check_log(log, self._all_logs)
        log_end, segments = core.head.next_offset, self._segments()
        earliest = segments[0][1] if segments else log_end
        cursors = self._cursors(earliest)
        begin = max(cursors[log] if begin is None else begin, earliest)
        filters, until = self._filters_at(begin)
        end = log_end if until is None else min(log_end, until)
        others = [cursor for other, cursor in cursors.items() if other != log]
        if core.identity.routing == "inline":
            others = []
        end = policy.page_end(begin, end, core.settings.changes, others)
        rows = self.rows(log, begin, end, limit + 1)
        if segments and begin < segments[-1][1] and begin < self.earliest():
            # Retention was faster: what is gone must not be passed by as if it had not been.
            return self.read_log(log, begin, limit)
        following = rows[limit][0] if len(rows) > limit else end
        return LogPage(
            log=log,
            records=policy.records_of(((row[0], row[1]) for row in rows[:limit]), log),
            cursor=Cursor(begin, max(begin, following), core.head.filters_version),
            earliest=earliest,
            end=log_end,
            filters=filters,
        )

    def rows(self, log: int | None, begin: int, end: int, count: int) -> list[tuple[Any, ...]]:
        """Read messages of one log, or of all."""
        database = self._core.database
        if log is None:
            return database.run(
                "read_logs", logs=list(range(self._all_logs)), begin=begin, end=end, count=count
            )
        return database.run("read_log", log=log, begin=begin, end=end, count=count)

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
        core = self._core
        core.refresh()
        policy.check_log(log, self._all_logs)

        def work() -> Assigned:
            return self._assign(log, cursor, assignments, now_ms, epoch)

        self._looked_ms = None
        return core.change(work)

    def _assign(
        self,
        log: int,
        cursor: Cursor,
        assignments: Mapping[int, Sequence[str]],
        now_ms: int,
        epoch: int | None,
    ) -> Assigned:
        core, database = self._core, self._core.database
        earliest = self.earliest()
        found = database.run("lock_cursor", log=log)
        if not found:
            database.run("make_cursor", log=log, cursor=earliest)
            found = database.run("lock_cursor", log=log)
        at = max(found[0][0], earliest)
        if epoch is not None and epoch != database.run("read_epoch")[0][0]:
            return Assigned(AssignStatus.FENCED, at, 0)
        refusal = policy.refuse_page(cursor, at, earliest)
        if refusal is not None:
            return Assigned(refusal, at, 0)
        # Queues may be changed until here, and no more from here on.
        names = {name for each in assignments.values() for name in each}
        numbers = sorted(core.queues[name].number for name in names if name in core.queues)
        if numbers:
            database.run("share_queues", numbers=numbers)
        core.refresh()
        if policy.is_outdated(cursor, core.head.filters_version, core.filter_changes):
            return Assigned(AssignStatus.OUTDATED, at, 0)
        begin = max(at, cursor.begin)
        rows = self._page(log, begin, cursor, assignments)
        arrivals, refs = self._arrivals(rows, assignments, cursor.end, now_ms)
        add_items(core, arrivals, now_ms)
        self._count(arrivals, now_ms)
        held = {message_id: count for message_id, count in refs.items() if count}
        if held:
            database.run("refer", message_ids=list(held), refs=list(held.values()))
        database.run("move_cursor", log=log, cursor=cursor.end, unrouted=len(refs) - len(held))
        status = AssignStatus.APPLIED if begin == cursor.begin else AssignStatus.TRIMMED
        return Assigned(status, cursor.end, len(arrivals))

    def _page(
        self,
        log: int,
        begin: int,
        cursor: Cursor,
        assignments: Mapping[int, Sequence[str]],
    ) -> list[tuple[Any, ...]]:
        """Read what is assigned, and refuse what is not there."""
        policy.check_assigned(cursor, assignments)
        end = self._core.head.next_offset
        if end < cursor.end:
            raise InvalidInput(
                f"log {log} ends at offset {end}; the cursor to assign is {cursor.end}"
            )
        rows = self.rows(log, begin, cursor.end, cursor.end - begin)
        strangers = {i for i in assignments if i >= begin}.difference(row[0] for row in rows)
        if strangers:
            raise InvalidInput(f"message {min(strangers)} is not in this page of log {log}")
        return rows

    def _coverage(self, queue_name: str) -> Coverage | None:
        queue = self._core.queues.get(queue_name)
        return None if queue is None else queue.coverage

    def _arrivals(
        self,
        rows: Sequence[tuple[Any, ...]],
        assignments: Mapping[int, Sequence[str]],
        end: int,
        now_ms: int,
    ) -> tuple[list[Arrival], dict[int, int]]:
        """Make items of a page's messages for the queues that still want them; count those."""
        core = self._core
        live = Throughout(self._coverage, rows[0][0] if rows else end, end)
        arrivals: list[Arrival] = []
        refs: dict[int, int] = {}
        heads = decode_heads([row[1] for row in rows])
        for (message_id, encoded), head in zip(rows, heads, strict=True):
            names = assignments.get(message_id, ())
            if head is None or not (names or policy.decodes(encoded)):
                continue
            kept = [name for name in dict.fromkeys(names) if live.at(name, message_id)]
            refs[message_id] = len(kept)
            for name in kept:
                queue = core.queues[name]
                vesting_ms = delayed_until(queue, head.published_at_ms, head.delay_ms)
                arrivals.append(
                    Arrival(
                        queue,
                        message_id,
                        head.group.encode(),
                        head.priority,
                        # What was due before it was routed is due now.
                        max(vesting_ms, now_ms),
                        0,
                        head.size,
                    )
                )
        return arrivals, refs

    def _count(self, arrivals: Sequence[Arrival], now_ms: int) -> None:
        counts: dict[int, int] = {}
        for each in arrivals:
            counts[each.queue.number] = counts.get(each.queue.number, 0) + 1
        for number, count in sorted(counts.items()):
            self._core.add_counts(number, now_ms, live=count, enqueued=count)

    def take_epoch(self, now_ms: int) -> int:  # noqa: ARG002 - the contract's
        """Fence every pipeline that took an epoch before; return the new one."""
        core = self._core
        rows = core.database.do(lambda: core.database.run("take_epoch"), again=True)
        core.progress.commits += 1
        return int(rows[0][0])

    def route_plan(self, max_offsets: int | None) -> RoutePlan:
        """Say what may be matched next, in all not further than ``max_offsets`` from the slowest.

        The slowest log decides where the others stop, so that logs stay in step.
        """
        core = self._core
        core.refresh()
        log_end = core.head.next_offset
        cursors = self._cursors(self.earliest())
        changes = core.settings.changes
        return RoutePlan(
            epoch=core.database.run("load_instance")[0][6],
            filters_version=core.head.filters_version,
            stretches=policy.route_stretches(
                cursors, log_end, max_offsets, changes, lambda at: self._filters_at(at)[1]
            ),
            lag={log: log_end - begin for log, begin in cursors.items()},
        )

    def filters_at(self, offset: int) -> LiveFilters:
        """Return the filters that are live at an offset, and until where."""
        self._core.refresh()
        filters, until = self._filters_at(offset)
        return LiveFilters(filters, self._core.head.filters_version, until)

    def _filters_at(self, offset: int) -> tuple[dict[str, str], int | None]:
        """Return the filters that are live at an offset, and the offset at which they change."""
        coverages = [(name, queue.coverage) for name, queue in self._core.queues.items()]
        live, _, until = policy.filters_at(coverages, offset)
        return live, until

    def configure_log(self, logs: int | None, retention_ms: int | None, now_ms: int) -> None:
        """Spread messages over another number of logs from here on; keep them for another time."""
        core = self._core

        def work() -> None:
            end = core.lock_head().next_offset
            settings = msgspec.structs.replace(core.settings, changes=list(core.settings.changes))
            known = self._all_logs
            if retention_ms is not None:
                settings.retention_ms = retention_ms
            wanted = settings.changes[-1][1] if logs is None else logs
            if wanted != settings.changes[-1][1]:
                settings.changes.append((end, wanted))
            for log in range(known, wanted):
                # A log that was not there before holds nothing to be tailed.
                core.database.run("make_cursor", log=log, cursor=end)
            core.database.run("put_settings", log_settings=msgspec.msgpack.encode(settings))
            core.changed(now_ms)
            core.settings = settings

        self._looked_ms = None
        core.change(work)

    def put_coverage(self, queue: Queue) -> None:
        """Write what a queue has been filled from."""
        queue.coverage.bound(self.earliest())
        self._core.database.run(
            "put_coverage", number=queue.number, coverage=msgspec.msgpack.encode(queue.coverage)
        )

    # --- retention -----------------------------------------------------------------------

    def _due_ms(self) -> int | None:
        """Return when retention has something to do: a segment to drop, or to close."""
        core = self._core
        segments, retention_ms = self._segments(), core.settings.retention_ms
        if not segments or not retention_ms:
            return None
        if len(segments) > 1:
            _, start_offset, start_ms = segments[1]
            return start_ms + retention_ms if start_offset <= self.routed_up_to() else None
        _, start_offset, start_ms = segments[0]
        return start_ms + SEGMENT_MS if start_offset < core.head.next_offset else None

    def trim(self, now_ms: int, budget: int) -> int:
        """Close a segment that is old enough, drop those that are past retention; count messages.

        What a dropped segment held is removed by and by: it is below the log.
        """
        core = self._core
        if self._looked_ms is not None and self._looked_ms <= now_ms < self._looked_ms + LOOK_MS:
            return 0
        self._looked_ms = now_ms
        core.refresh()
        due_ms = self._due_ms()
        if due_ms is not None and due_ms <= now_ms:
            core.change(lambda: self._drop_segments(now_ms))
            due_ms = self._due_ms()
        self.due_ms = due_ms
        earliest = min(self.earliest(), self.routed_up_to())
        if earliest <= 1:
            return 0
        trimmed = 0
        for log in range(self._all_logs):
            rows = core.database.run("trim_log", log=log, earliest=earliest, count=TRIM_ROWS)
            trimmed = max(trimmed, len(rows))
        dropped = len(core.database.run("drop_unheld", earliest=earliest, count=budget))
        if trimmed == TRIM_ROWS or dropped == budget:
            self._looked_ms = None
        return dropped

    def _drop_segments(self, now_ms: int) -> None:
        core = self._core
        head = core.lock_head()
        segments, retention_ms = self._segments(), core.settings.retention_ms
        if len(segments) == 1 and segments[0][2] + SEGMENT_MS <= now_ms:
            core.database.run("roll_segment", now_ms=now_ms)
            core.head = head._replace(segment_ms=now_ms)
            segments = self._segments()
        routed_up_to = self.routed_up_to()
        while len(segments) > 1:
            _, start_offset, start_ms = segments[1]
            if start_ms + retention_ms > now_ms or start_offset > routed_up_to:
                break
            core.database.run("drop_segment", number=segments[0][0])
            segments = segments[1:]


def delayed_until(queue: Queue, published_at_ms: int, delay_ms: int) -> int:
    """Return when a message is visible: its own delay counts if it has one, or the queue's."""
    return published_at_ms + (delay_ms or queue.spec.delay_ms)
