"""Answers of several databases that are one store, made one; and batches shared between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from penstock.model import Contention, LogSpan, LogStats, QueueStats, StoreStats, SweepCounts
from penstock.store.check_report import KEPT, AuditReport
from penstock.store.sql.tokens import first_offset

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.store.check_report import Violation

__all__ = [
    "join_audits",
    "join_log_stats",
    "join_queue_stats",
    "join_store_stats",
    "join_sweeps",
    "shares",
    "soonest",
]

_Counts = TypeVar("_Counts", Contention, QueueStats, StoreStats, SweepCounts)

# Fields that are not sums.
_OTHERS: Final = frozenset({"queue", "oldest_age_ms", "next_due_ms"})


def shares(room: int, zones: Sequence[int]) -> list[int]:
    """Share a batch between databases by their zones, so that each zone gets the same.

    What can't be shared evenly goes to the first.
    """
    total = sum(zones)
    each, more = divmod(room, total) if total else (0, 0)
    found = []
    for count in zones:
        extra = min(more, count)
        more -= extra
        found.append(each * count + extra)
    return found


def soonest(times_ms: Sequence[int | None]) -> int | None:
    """Return the first of some times, of which None never comes."""
    return min((each for each in times_ms if each is not None), default=None)


def _sums(parts: Sequence[_Counts]) -> dict[str, int]:
    fields = [name for name in parts[0].__struct_fields__ if name not in _OTHERS]
    return {name: sum(getattr(part, name) for part in parts) for name in fields}


def join_queue_stats(parts: Sequence[QueueStats]) -> QueueStats:
    """Add the stats of a queue up."""
    ages = [part.oldest_age_ms for part in parts if part.oldest_age_ms is not None]
    return msgspec.structs.replace(parts[0], **_sums(parts), oldest_age_ms=max(ages, default=None))


def join_store_stats(parts: Sequence[StoreStats]) -> StoreStats:
    """Add the totals up."""
    return StoreStats(**_sums(parts))


def join_contention(parts: Sequence[Contention]) -> Contention:
    """Add up what sharing the databases has cost."""
    return Contention(**_sums(parts))


def join_sweeps(parts: Sequence[SweepCounts]) -> SweepCounts:
    """Add up what was done; the next thing is due when the first of them has one."""
    return SweepCounts(**_sums(parts), next_due_ms=soonest([part.next_due_ms for part in parts]))


def join_log_stats(parts: Sequence[LogStats]) -> LogStats:
    """Describe logs of which each database has some.

    They take turns, so that none gets another number when there are more of them. Offsets of a
    database are all above those of the one before it.
    """
    cursors: dict[int, int] = {}
    spans: dict[int, LogSpan] = {}
    for number, part in enumerate(parts):
        for own, cursor in part.cursors.items():
            log = own * len(parts) + number
            cursors[log] = cursor
            spans[log] = LogSpan(first_offset(number), part.earliest, part.end)
    return LogStats(
        routing=parts[0].routing,
        logs=sum(part.logs for part in parts),
        earliest=min(part.earliest for part in parts),
        end=max(part.end for part in parts),
        routed_up_to=max(part.routed_up_to for part in parts),
        segments=sum(part.segments for part in parts),
        retention_ms=parts[0].retention_ms,
        cursors=dict(sorted(cursors.items())),
        spans=spans,
    )


def join_audits(parts: Mapping[str, AuditReport]) -> AuditReport:
    """Put reports together; each violation says whose it is."""

    def added(counts: Sequence[dict[str, int]]) -> dict[str, int]:
        total: dict[str, int] = {}
        for each in counts:
            for name, count in each.items():
                total[name] = total.get(name, 0) + count
        return total

    def told(name: str, found: Sequence[Violation]) -> list[Violation]:
        return [msgspec.structs.replace(each, text=f"{name}: {each.text}") for each in found]

    reports = list(parts.values())
    return AuditReport(
        checked=added([report.checked for report in reports]),
        found=added([report.found for report in reports]),
        violations=[v for name, r in parts.items() for v in told(name, r.violations)][:KEPT],
        notes=[v for name, r in parts.items() for v in told(name, r.notes)][:KEPT],
        left=sum(report.left for report in reports),
        rounds=max(report.rounds for report in reports),
    )
