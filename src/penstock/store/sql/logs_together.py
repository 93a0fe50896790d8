"""The metadata logs of several databases that are one store, and queues filled from their past.

The logs of the databases take turns: with two of them, log 0 is the first one's and log 1 the
second one's, and so on, so that no log gets another number when there are more of them. Offsets
are message ids, and say which database they are of. A range of them may go over several; a step
never does.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.errors import InvalidInput
from penstock.model import Backfilled
from penstock.store.plans import BackfillPlan, Filled
from penstock.store.sql.joining import join_log_stats
from penstock.store.sql.tokens import cluster_of_id, first_offset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.model import LogPage, LogRecord, LogStats
    from penstock.store.plans import LiveFilters
    from penstock.store.sql.agreeing import Agreement
    from penstock.store.sql.members import Member

__all__ = ["Logs"]


class _Part(NamedTuple):
    """The database that a range begins in, and the offset from which on it is another one's."""

    member: Member
    end: int


class Logs:
    """Verbs of the log."""

    def __init__(self, members: Sequence[Member], agreement: Agreement) -> None:
        self._members = members
        self._agreement = agreement

    def _part(self, begin: int, end: int) -> _Part | None:
        """Return where [begin, end) begins; None: beyond every database."""
        number = cluster_of_id(begin)
        if number >= len(self._members):
            return None
        last = number + 1 == len(self._members)
        return _Part(self._members[number], end if last else min(end, first_offset(number + 1)))

    # --- reading -----------------------------------------------------------------------------

    def read_log(self, log: int, begin: int | None, limit: int) -> LogPage:
        """Read a page of a log from an offset, or from its cursor, on."""
        own, number = divmod(log, len(self._members))
        known = self._members[number].core.settings.changes
        if own >= max(count for _, count in known):
            raise InvalidInput(f"no log {log}: there are {len(self.log_stats().cursors)}")
        with self._members[number].use() as store:
            return msgspec.structs.replace(store.read_log(own, begin, limit), log=log)

    def filters_at(self, offset: int) -> LiveFilters:
        """Return the filters that are live at an offset, in the database that has it."""
        part = self._part(offset, offset + 1)
        with (self._members[0] if part is None else part.member).use() as store:
            return store.filters_at(offset)

    def offsets_at(self, time_ms: int) -> list[int]:
        """Return an offset at or before the first message of that time, of each database."""
        found = []
        for member in self._members:
            with member.use() as store:
                found.append(store.offset_at(time_ms))
        return found

    def log_stats(self) -> LogStats:
        """Describe the logs of all databases."""
        for member in self._members:
            member.check()
        parts = []
        for member in self._members:
            with member.use() as store:
                parts.append(store.log_stats())
        return join_log_stats(parts)

    # --- filling -----------------------------------------------------------------------------

    def backfill(self, queue_name: str, begin: int, end: int, now_ms: int) -> Backfilled:
        """Do one bounded step of filling a queue from the log of one database."""
        part = self._part(begin, end)
        if part is None:
            return Backfilled(scanned=0, added=0, missing=0, next=end)
        self._agreement.check(now_ms)
        with part.member.use() as store:
            log = store.log_stats()
            # There is nothing between the end of a log and the beginning of the next one.
            begin, until = max(begin, log.earliest), min(part.end, log.routed_up_to)
            if begin >= until:
                return Backfilled(scanned=0, added=0, missing=0, next=part.end)
            step = store.backfill(queue_name, begin, until, now_ms)
        return step if step.next < until else msgspec.structs.replace(step, next=part.end)

    def backfill_plan(
        self, queue_name: str, begin: int, end: int, *, archived: bool = False
    ) -> BackfillPlan:
        """Return what of [begin, end) a queue has not been filled from; no stretch is of two."""
        plans: list[BackfillPlan] = []
        for member in self._members:
            low = max(begin, first_offset(member.number))
            high = min(end, first_offset(member.number + 1))
            with member.use() as store:
                plans.append(
                    store.backfill_plan(queue_name, low, max(low, high), archived=archived)
                )
        if any(plan.filter != plans[0].filter for plan in plans):
            raise InvalidInput(
                f"queue {queue_name!r} is being changed: it has not the same filter in all "
                "databases yet; plan the backfill again"
            )
        return BackfillPlan(
            [stretch for plan in plans for stretch in plan.stretches],
            plans[0].filter,
            max(plan.end for plan in plans),
            min(plan.earliest for plan in plans),
        )

    def fill(
        self,
        queue_name: str,
        begin: int,
        end: int,
        offsets: Sequence[int],
        filter_text: str,
        now_ms: int,
    ) -> Filled:
        """Do one bounded step of filling a queue with messages that were matched elsewhere."""
        part = self._part(begin, end)
        if part is None:
            return Filled(0, 0, len(offsets), end)
        self._agreement.check(now_ms)
        with part.member.use() as store:
            # What is beyond the end of this log has not been published yet.
            until = min(part.end, store.log_stats().routed_up_to)
            strange = bisect_left(offsets, part.end) - bisect_left(offsets, until)
            if begin >= until:
                return Filled(0, 0, strange, part.end)
            own = offsets[: bisect_left(offsets, until)]
            step = store.fill(queue_name, begin, until, own, filter_text, now_ms)
        if step.next < until:
            return step
        return Filled(step.added, step.already, step.missing + strange, part.end)

    def restore(
        self,
        queue_name: str,
        begin: int,
        end: int,
        records: Sequence[tuple[LogRecord, bytes | None]],
        filter_text: str,
        now_ms: int,
    ) -> Filled:
        """Do one bounded step of filling a queue with archived messages, below a log."""
        part = self._part(begin, end)
        if part is None:
            return Filled(0, 0, len(records), end)
        own = [each for each in records if each[0].message_id < part.end]
        self._agreement.check(now_ms)
        with part.member.use() as store:
            until = part.end
            earliest = store.log_stats().earliest
            if until < end and (not own or own[-1][0].message_id < earliest):
                # It goes on in the next database, so that it can't have meant this one's log.
                until = min(until, earliest)
            if begin >= until:
                return Filled(0, 0, 0, part.end)
            step = store.restore(queue_name, begin, until, own, filter_text, now_ms)
        return step if step.next < until else msgspec.structs.replace(step, next=part.end)
