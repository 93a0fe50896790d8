"""The sweep: everything that is due, and retention.

Any number of processes sweep at once. Each step takes rows that no other process is at (SKIP
LOCKED) and counts them in the same transaction, so that nothing is done or counted twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.model import State, SweepCounts
from penstock.store.kv.log import SEGMENT_MS
from penstock.store.sql.claim import SqlClaim
from penstock.store.sql.queues import CHUNK
from penstock.store.sql.zones import NEVER_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.store.sql.session import Session, SqlQueue

# How often a sweep looks for segments and for ended messages of other processes past retention.
LOOK_MS: Final = 10_000
# A publish whose answer was lost is sent again for seconds, not for minutes.
REQUESTS_MS: Final = 600_000
# Rows of the log that one sweep removes at most, of each log.
TRIM_ROWS: Final = 10_000
# After a sweep that could do nothing of what is due.
STUCK_MS: Final = 50
# Between two sweeps in the background that look at everything; between two pages of the slow
# searches for idle and orphaned zones; between two looks at the database's clock.
SWEEP_MS: Final = 200
SEARCH_MS: Final = 5_000
FOLLOW_MS: Final = 60_000


class SqlMaintain(SqlClaim):
    """The sweep."""

    def __init__(self, core: Session, *, background: bool) -> None:
        super().__init__(core)
        # Whether a thread sweeps all the time: then it looks for other processes' messages too.
        self._background = background
        self._swept_ms = -SWEEP_MS
        self._searched_ms = self._followed_ms = 0
        # Called every minute, so that a clock can follow the database's.
        self.on_minute: Callable[[], None] | None = None

    def soonest_ms(self) -> int | None:
        """Return a time before which nothing is due, from memory alone."""
        due_ms = self.core.due_ms
        if not self._watched:
            return due_ms
        poll_ms = self._now_ms + self._jittered(self.core.tunables.poll_ms)
        return poll_ms if due_ms is None else min(due_ms, poll_ms)

    def sweep(self, now_ms: int, budget: int) -> SweepCounts:
        """Do what is due, up to about ``budget`` things, and look for other processes' messages."""
        self._now_ms = now_ms
        self._forget_plans(now_ms)
        self.wake_watched(now_ms)
        due_ms = self.core.due_ms
        next_ms = self._swept_ms + SWEEP_MS
        if self._background and now_ms < next_ms and (due_ms is None or now_ms < due_ms):
            # Woken for the sake of a claim that waits: the rest can wait as well.
            counts = SweepCounts(next_due_ms=min(next_ms, due_ms or next_ms))
        else:
            self._swept_ms = now_ms
            counts = self._sweep_all(now_ms, budget)
            self._search_zones(now_ms)
        if not self._background:
            return counts
        tunables = self.core.tunables
        ahead_ms = tunables.poll_ms if self._watched else tunables.idle_poll_ms
        next_ms = now_ms + self._jittered(ahead_ms)
        if counts.next_due_ms is not None:
            next_ms = min(next_ms, counts.next_due_ms)
        if next_ms <= now_ms and not counts.total:
            # Another process is at what is due: it is not asked for all the time.
            next_ms = now_ms + STUCK_MS
        return msgspec.structs.replace(counts, next_due_ms=next_ms)

    def _sweep_all(self, now_ms: int, budget: int) -> SweepCounts:
        core, ask = self.core, self.database.ask
        core.refresh(now_ms)
        lease_ms, delay_ms, unclaimed_ms, dedup_ms = self._dues()
        leases = failures = came_due = removed = forgotten = 0
        if lease_ms <= now_ms:
            leases, failures = self.expire(now_ms, budget)
        if delay_ms <= now_ms:
            came_due = self._come_due(now_ms, budget)
        moved = self.move_dead_letters(now_ms, budget)
        removed += self._trim_ended(now_ms, budget)
        if unclaimed_ms <= now_ms:
            removed += core.change(lambda: self._expire_unclaimed(now_ms, budget))
        removed += self.trim_log(now_ms, budget) + self.remove_drained(now_ms)
        if dedup_ms <= now_ms:
            forgotten = len(ask("forget_dedup", now_ms=now_ms, count=budget))
        ask("forget_requests", before_ms=now_ms - REQUESTS_MS, count=budget)
        core.zones.collect(now_ms)
        return SweepCounts(
            leases_expired=leases,
            came_due=came_due,
            failed=failures,
            moved=moved,
            removed=removed,
            dedup_forgotten=forgotten,
            next_due_ms=self._next_due_ms(now_ms),
        )

    def _dues(self) -> list[int]:
        """Return when the next lease, delay, unclaimed retention and dedup window is over."""
        return [NEVER_MS if time is None else time for time in self.database.ask("next_due")[0]]

    def _next_due_ms(self, now_ms: int) -> int | None:
        core = self.core
        times = [*self._dues()]
        times += [time for time in (core.retention_ms, self.log_due_ms) if time is not None]
        if self.with_dead_letters():
            times.append(now_ms)
        found = min(times)
        core.due_ms = None if found == NEVER_MS else found
        return core.due_ms

    def _come_due(self, now_ms: int, budget: int) -> int:
        rows = self.database.ask("come_due", now_ms=now_ms, count=budget)
        for number in {row[0] for row in rows}:
            queue = self.core.by_number.get(number)
            if queue is not None:
                self.core.wake(queue, sum(row[0] == number for row in rows))
        return len(rows)

    def _search_zones(self, now_ms: int) -> None:
        followed_ms = self._followed_ms
        if self.on_minute is not None and not followed_ms <= now_ms < followed_ms + FOLLOW_MS:
            self._followed_ms = now_ms
            self.on_minute()
        if self._searched_ms <= now_ms < self._searched_ms + SEARCH_MS:
            return
        self._searched_ms = now_ms
        self.core.zones.look_for_idle(now_ms)
        self.core.zones.look_for_orphans(now_ms)

    def _jittered(self, wait_ms: int) -> int:
        return int(wait_ms * (0.8 + 0.4 * self.core.random()))

    # --- retention of messages ---------------------------------------------------------------

    def _trim_ended(self, now_ms: int, budget: int) -> int:
        """Remove ended messages whose retention is over; return how many.

        This process knows of the messages that it ends, and looks now and then for those of others.
        """
        core = self.core
        looked_ms, due_ms = self._retention_looked_ms, core.retention_ms
        if (
            looked_ms is not None
            and looked_ms <= now_ms < looked_ms + LOOK_MS
            and (due_ms is None or now_ms < due_ms)
        ):
            return 0
        self._retention_looked_ms = now_ms
        removed = 0
        # Once more after some were removed: the next ones may be due as well.
        while removed < budget:
            due = self._first_to_trim()
            count = 0
            for queue, state, at_ms in due:
                if at_ms <= now_ms and removed + count < budget:
                    room = min(CHUNK, budget - removed - count)
                    spec, done = queue.spec, state is State.DONE
                    kept_ms = spec.done_retention_ms if done else spec.failed_retention_ms
                    count += self._trim(
                        queue, state, now_ms, room, ended_before_ms=now_ms - kept_ms
                    )
            removed += count
            if not count:
                core.retention_ms = min((at_ms for _, _, at_ms in due), default=None)
                break
        return removed

    def _first_to_trim(self) -> list[tuple[SqlQueue, State, int]]:
        """Return when retention next has a message to remove, by queue and state."""
        kept = [
            queue
            for queue in self.core.queues.values()
            if queue.spec.done_retention_ms or queue.spec.failed_retention_ms
        ]
        due = []
        rows = self.database.ask("next_retention", queues=[queue.number for queue in kept])
        for (_, done_ms, failed_ms), queue in zip(rows, kept, strict=True):
            if done_ms is not None and queue.spec.done_retention_ms:
                due.append((queue, State.DONE, done_ms + queue.spec.done_retention_ms))
            if failed_ms is not None and queue.spec.failed_retention_ms:
                due.append((queue, State.FAILED, failed_ms + queue.spec.failed_retention_ms))
        return due

    def _expire_unclaimed(self, now_ms: int, budget: int) -> int:
        """Remove messages that waited for longer than their queue keeps them; return how many."""
        core = self.core
        rows = self.database.run("expire_unclaimed", now_ms=now_ms, count=budget)
        fifo = {(number, zone): now_ms for number, _, zone, rank in rows if rank < 0}
        core.zones.lower(fifo, now_ms)
        gone: dict[int, list[int]] = {}
        for number, message_id, _, _ in sorted(rows):
            gone.setdefault(number, []).append(message_id)
        for number, ids in gone.items():
            core.add_counts(number, now_ms, live=-len(ids), removed=len(ids))
        for number, ids in gone.items():
            queue = core.numbered(number)
            if queue is not None:
                self._forget_messages(queue, ids)
                core.wake(queue)
        return len(rows)

    # --- retention of the log ----------------------------------------------------------------

    def _segment_due_ms(self) -> int | None:
        """Return when retention has a segment to drop, or to close."""
        core = self.core
        segments, retention_ms = self._segments(), core.settings.retention_ms
        if not segments or not retention_ms:
            return None
        if len(segments) > 1:
            _, start_offset, start_ms = segments[1]
            return int(start_ms) + retention_ms if start_offset <= self.routed_up_to() else None
        _, start_offset, start_ms = segments[0]
        return int(start_ms) + SEGMENT_MS if start_offset < core.head.next_offset else None

    def trim_log(self, now_ms: int, budget: int) -> int:
        """Close a segment that is old enough, drop those past retention; return how many messages.

        Messages of a dropped segment are below the log, and are removed step by step.
        """
        core = self.core
        looked_ms = self._log_looked_ms
        if looked_ms is not None and looked_ms <= now_ms < looked_ms + LOOK_MS:
            return 0
        self._log_looked_ms = now_ms
        core.refresh()
        due_ms = self._segment_due_ms()
        if due_ms is not None and due_ms <= now_ms:
            core.change(lambda: self._drop_segments(now_ms))
            due_ms = self._segment_due_ms()
        self.log_due_ms = due_ms
        earliest = min(self.earliest(), self.routed_up_to())
        if earliest <= 1:
            return 0
        trimmed = 0
        for log in self._logs():
            rows = self.database.run("trim_log", log=log, earliest=earliest, count=TRIM_ROWS)
            trimmed = max(trimmed, len(rows))
        dropped = len(self.database.run("drop_unheld", earliest=earliest, count=budget))
        if trimmed == TRIM_ROWS or dropped == budget:
            self._log_looked_ms = None
        return dropped

    def _drop_segments(self, now_ms: int) -> None:
        core = self.core
        head = core.lock_head()
        segments, retention_ms = self._segments(), core.settings.retention_ms
        if len(segments) == 1 and segments[0][2] + SEGMENT_MS <= now_ms:
            self.database.run("roll_segment", now_ms=now_ms)
            core.head = head._replace(segment_ms=now_ms)
            segments = self._segments()
        routed_up_to = self.routed_up_to()
        while len(segments) > 1:
            _, start_offset, start_ms = segments[1]
            if start_ms + retention_ms > now_ms or start_offset > routed_up_to:
                break
            self.database.run("drop_segment", number=segments[0][0])
            segments = segments[1:]
