"""The sweep: everything that is due, and retention; the audit.

Any number of processes sweep at once. Each step takes rows that no other process is at (SKIP
LOCKED) and counts them in the same transaction, so that nothing is done or counted twice.

The audit checks the invariants that no constraint can state, and repairs the tables. Its statements
read one snapshot, of one moment, while all other verbs go on. Clocks of processes differ a little:
an audit that finds anything therefore looks twice, and reports what both have found. A repair keeps
publishes out while it mends (it holds all ``log_heads``).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.model import State, SweepCounts
from penstock.store.check_report import KEPT, AuditReport, Kind, Violation
from penstock.store.policy import SEGMENT_MS
from penstock.store.sql.claim import SqlClaim
from penstock.store.sql.move import UNCLAIMED
from penstock.store.sql.queues import CHUNK
from penstock.store.sql.session import sequence_at
from penstock.store.sql.zones import NEVER_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.store.sql.session import SqlQueue

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


# The invariants: kind and table of the damage, what it is, and the statement that finds it. A
# statement of the same name after ``mend_`` repairs it, but for zones, which get pointers.
CHECKS: Final = (
    (Kind.COUNTER, "queue_counts", "a counter does not match its rows", "wrong_counts"),
    (Kind.ORPHAN_ENTRY, "pointers", "Q_C and the pointer index differ", "pointers_apart"),
    (Kind.MISSING_ENTRY, "pointers", "a zone has items and no pointer", "zones_unpointed"),
    (Kind.EARLY, "pointers", "a pointer vests later than its zone's earliest item",
     "pointers_late"),
    (Kind.REFERENCES, "messages", "a message's references do not match its queues", "wrong_refs"),
    (Kind.PAYLOAD_MISSING, "messages", "a queue holds a message that is not there",
     "messages_missing"),
    (Kind.TWICE, "items", "a message is live, and done or failed as well", "items_twice"),
    (Kind.STRANGER, "items", "a row belongs to no queue", "rows_of_no_queue"),
    (Kind.ORPHAN_ATTEMPT, "attempts", "attempts at a message that the queue does not have",
     "attempts_orphaned"),
    (Kind.GARBAGE, "messages", "a message below the log that no queue holds", "messages_garbage"),
    (Kind.SEQUENCE, "message_ids", "an id was used that would be given out again",
     "log_beyond_end"),
    (Kind.WRONG_FIELD, "items", "an item's marks contradict each other", "items_marked_wrong"),
)  # fmt: skip


class SqlMaintain(SqlClaim):
    """The sweep."""

    # Whether a thread sweeps all the time: then it looks for other processes' messages too.
    _background: bool
    _swept_ms = -SWEEP_MS
    _searched_ms = _followed_ms = 0
    # Called every minute, so that a clock can follow the database's.
    on_minute: Callable[[], None] | None = None

    def soonest_ms(self) -> int | None:
        """Return a time before which nothing is due, from memory alone."""
        due_ms = self.due_ms
        if not self._watched:
            return due_ms
        poll_ms = self._now_ms + self._jittered(self.tunables.poll_ms)
        return poll_ms if due_ms is None else min(due_ms, poll_ms)

    def sweep(self, now_ms: int, budget: int) -> SweepCounts:
        """Do what is due, up to about ``budget`` things, and look for other processes' messages."""
        self._now_ms = now_ms
        self.wake_watched(now_ms)
        due_ms = self.due_ms
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
        tunables = self.tunables
        ahead_ms = tunables.poll_ms if self._watched else tunables.idle_poll_ms
        next_ms = now_ms + self._jittered(ahead_ms)
        if counts.next_due_ms is not None:
            next_ms = min(next_ms, counts.next_due_ms)
        if next_ms <= now_ms and not counts.total:
            # Another process is at what is due: it is not asked for all the time.
            next_ms = now_ms + STUCK_MS
        return msgspec.structs.replace(counts, next_due_ms=next_ms)

    def _sweep_all(self, now_ms: int, budget: int) -> SweepCounts:
        ask = self.database.ask
        self.refresh(now_ms)
        lease_ms, delay_ms, unclaimed_ms, dedup_ms = self._dues()
        leases = failures = came_due = removed = forgotten = 0
        if lease_ms <= now_ms:
            leases, failures = self.expire(now_ms, budget)
        if delay_ms <= now_ms:
            came_due = self.come_due(now_ms, budget)
        dropped = self.drop_excess(now_ms, budget)
        failures += dropped
        moved = self.move_dead_letters(now_ms, budget)
        removed += self._trim_ended(now_ms, budget)
        if unclaimed_ms <= now_ms:
            removed += self._remove_unclaimed(now_ms, budget)
        removed += self.trim_log(now_ms, budget)
        drained = self.remove_drained(now_ms, budget)
        removed += drained
        if dedup_ms <= now_ms:
            forgotten = len(ask("forget_dedup", now_ms=now_ms, count=budget))
        ask("forget_requests", before_ms=now_ms - REQUESTS_MS, count=budget)
        self.zones.collect(now_ms)
        return SweepCounts(
            leases_expired=leases,
            came_due=came_due,
            failed=failures,
            moved=moved,
            removed=removed,
            dedup_forgotten=forgotten,
            next_due_ms=now_ms if max(dropped, drained) >= budget else self._next_due_ms(now_ms),
        )

    def _dues(self) -> list[int]:
        """Return when the next lease, delay, unclaimed retention and dedup window is over."""
        rows = self.database.ask("next_due", queues=list(self.by_number))
        return [NEVER_MS if time is None else time for time in rows[0]]

    def _next_due_ms(self, now_ms: int) -> int | None:
        # Before the look: what other threads note meanwhile counts as well.
        self.due_ms = None
        times = [*self._dues()]
        times += [time for time in (self.retention_ms, self.log_due_ms) if time is not None]
        if self.with_dead_letters():
            times.append(now_ms)
        found = min(times)
        if found != NEVER_MS:
            self.due(found)
        return self.due_ms

    def _search_zones(self, now_ms: int) -> None:
        followed_ms = self._followed_ms
        if self.on_minute is not None and not followed_ms <= now_ms < followed_ms + FOLLOW_MS:
            self._followed_ms = now_ms
            self.on_minute()
        if self._searched_ms <= now_ms < self._searched_ms + SEARCH_MS:
            return
        self._searched_ms = now_ms
        self.zones.look_for_idle(now_ms)
        self.zones.look_for_orphans(now_ms)

    def _jittered(self, wait_ms: int) -> int:
        return int(wait_ms * (0.8 + 0.4 * self.random()))

    # --- retention of messages ---------------------------------------------------------------

    def _trim_ended(self, now_ms: int, budget: int) -> int:
        """Remove ended messages whose retention is over; return how many.

        This process knows of the messages that it ends, and looks now and then for those of others.
        """
        looked_ms, due_ms = self._retention_looked_ms, self.retention_ms
        if (
            looked_ms is not None
            and looked_ms <= now_ms < looked_ms + LOOK_MS
            and (due_ms is None or now_ms < due_ms)
        ):
            return 0
        self._retention_looked_ms = now_ms
        removed, count = 0, 1
        # Once more after some were removed: the next ones may be due as well.
        while count and removed < budget:
            count, self.retention_ms = 0, None
            for queue, state, at_ms, kept_ms in self._first_to_trim():
                self.due_for_retention(at_ms)
                if at_ms <= now_ms and removed < budget:
                    room, before = min(CHUNK, budget - removed), sequence_at(now_ms - kept_ms + 1)
                    gone = self._trim(queue, state, now_ms, room, before, "retention")
                    count, removed = count + gone, removed + gone
        return removed

    def _first_to_trim(self) -> list[tuple[SqlQueue, State, int, int]]:
        """Return queue, state, when its first message is to be removed, and how long it is kept."""
        queues = list(self.by_name.values())
        due = []
        rows = self.database.ask("next_retention", queues=[queue.number for queue in queues])
        for (_, done, failed), queue in zip(rows, queues, strict=True):
            for state, sequence, kept_ms in (
                (State.DONE, done, queue.spec.done_retention_ms),
                (State.FAILED, failed, queue.spec.failed_retention_ms),
            ):
                if sequence is not None and kept_ms:
                    due.append((queue, state, sequence // sequence_at(1) + kept_ms, kept_ms))
        return due

    def _remove_unclaimed(self, now_ms: int, budget: int) -> int:
        """Remove messages that waited for longer than their queue keeps them; return how many."""
        removed = 0
        gone: dict[int, list[int]] = {}
        for number, message_id in self.database.ask("pick_unclaimed", now_ms=now_ms, count=budget):
            gone.setdefault(number, []).append(message_id)
        for number, ids in gone.items():
            queue = self.numbered(number)
            if queue is not None:
                removed += self._remove_live(queue, ids, UNCLAIMED, now_ms)
                self.wake(queue)
        return removed

    # --- retention of the log ----------------------------------------------------------------

    def _segment_due_ms(self) -> int | None:
        """Return when retention has a segment to drop, or to close."""
        segments, retention_ms = self._segments(), self.settings.retention_ms
        if not segments or not retention_ms:
            return None
        if len(segments) > 1:
            _, start_offset, start_ms = segments[1]
            return int(start_ms) + retention_ms if start_offset <= self.routed_up_to() else None
        _, start_offset, start_ms = segments[0]
        return int(start_ms) + SEGMENT_MS if start_offset < self.head.next_id else None

    def trim_log(self, now_ms: int, budget: int) -> int:
        """Close a segment that is old enough, drop those past retention; return how many messages.

        Messages of a dropped segment are below the log, and are removed step by step.
        """
        looked_ms = self._log_looked_ms
        if looked_ms is not None and looked_ms <= now_ms < looked_ms + LOOK_MS:
            return 0
        self._log_looked_ms = now_ms
        self.refresh()
        due_ms = self._segment_due_ms()
        if due_ms is not None and due_ms <= now_ms:
            self.change(lambda: self._drop_segments(now_ms))
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
        self.lock_heads()
        segments, retention_ms = self._segments(), self.settings.retention_ms
        if len(segments) == 1:
            self.begin_segment(now_ms)
            segments = self._segments()
        routed_up_to = self.routed_up_to()
        while len(segments) > 1:
            _, start_offset, start_ms = segments[1]
            if start_ms + retention_ms > now_ms or start_offset > routed_up_to:
                break
            self.database.run("drop_segment", number=segments[0][0])
            segments = segments[1:]

    # --- the audit -----------------------------------------------------------------------------

    def audit(self, *, repair: bool, now_ms: int) -> AuditReport:
        """Check every invariant; with ``repair``, mend the rows that can be mended, look again."""
        with self.database.at_leisure():
            first: list[Violation] = self.change(lambda: self._find_damage(now_ms))
            if first:
                # Rows that another process was just committing are sound the second time.
                again = set(self.change(lambda: self._find_damage(now_ms)))
                first = [each for each in first if each in again]
            left, rounds = first, 1
            while repair and left and rounds < 4:
                kinds = {each.kind for each in left}
                self.change(lambda: self._mend(kinds, now_ms))  # noqa: B023
                left = self.change(lambda: self._find_damage(now_ms))
                rounds += 1
            counted = self.database.run("count_rows")[0]
        if repair and first:
            self.reload()
            for queue in self.by_name.values():
                self.wake(queue)
        still = {(each.kind, each.key) for each in left}
        tables = ("queues", "items", "done", "failed", "messages", "zones")
        return AuditReport(
            checked=dict(zip(tables, counted, strict=True)),
            found=dict(Counter(each.kind for each in first)),
            violations=[
                msgspec.structs.replace(v, repaired=repair and (v.kind, v.key) not in still)
                for v in first[:KEPT]
            ],
            notes=[],
            left=len(left),
            rounds=rounds,
        )

    def _find_damage(self, now_ms: int) -> list[Violation]:
        # Every transaction leaves the store sound, so that nobody has to wait for this one.
        self.database.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        self.database.run("read_heads")
        # As of the snapshot, which the first statement makes.
        now_ms = max(now_ms, self.database.clock())
        if self.database.dialect == "postgresql":
            # These read whole tables, unlike all others.
            for way in ("seqscan", "hashjoin", "mergejoin"):
                self.database.execute(f"SET LOCAL enable_{way} = on")
        found = []
        for kind, table, text, find in CHECKS:
            for key, told, *_ in self._run_check(find, now_ms):
                found.append(Violation(kind, table, bytes(key).hex(), f"{text}: {told}"))
        return found

    def _mend(self, kinds: set[Kind], now_ms: int) -> None:
        self.lock_heads()
        self.hold_instance()
        # It may have waited for the heads, and others have gone on.
        now_ms = max(now_ms, self.database.clock())
        for kind, _, _, find in CHECKS:
            if kind not in kinds:
                continue
            if find != "zones_unpointed":
                self._run_check(f"mend_{find}", now_ms)
                continue
            zones = {
                (queue, zone): vesting_ms
                for zone, _, queue, vesting_ms in self.database.run(find)
                if queue in self.by_number
            }
            self.zones.ensure(zones, now_ms)
        self.database.run("bump_zones", logs=None)

    def _run_check(self, statement: str, now_ms: int) -> list[tuple[Any, ...]]:
        known = {
            "now_ms": now_ms,
            "threshold_ms": self.tunables.threshold_ms,
            "cool_ms": self.tunables.cool_ms,
            "slot": self.slot,
        }
        names = self.database.parameters(statement)
        return self.database.run(statement, **{name: known[name] for name in names})
