"""The audit: reads a whole store, holds it to its invariants, and repairs what can be repaired.

One reading goes through the stages below, each of which owns some tables::

    queues           default, queues, unclaimed   what the store says of itself; counters
    indexed          available, in_progress,      live messages and the indexes over them
                     visibility_index, groups
    buckets          buckets                      the same, of the bucket design
    history          history                      done, failed, attempts
    leases           leases, lease_expiry         who holds what
    log              log                          segments and entries
    payloads         payloads                     payloads, references, cursors
    dedup            dedup                        dedup ids
    memory                                        what memory believes of all of them

Everything is read by pages. In memory an audit holds a few integers for each message of the queue
at hand, one integer for each copy of a message in any queue, and what is in flight.

A repair writes what a reading has found wrong, in bounded commits, and reads the store again: what
the first repair brought to light is repaired next. It ends with a reading that finds nothing, or
nothing that can be mended. A store that is right is not written to, and neither is one of which a
part can't be read: what is wrong there, or only seems to be, nobody knows.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from penstock.engines import damaged, rows_of
from penstock.errors import StoreDamaged
from penstock.store.check_report import AuditReport, Findings, Kind, Violation
from penstock.store.codec.log import SEQ_BLOCK_KEY
from penstock.store.kv.check.buckets import BucketsAudit
from penstock.store.kv.check.census import ActiveAudit, Census
from penstock.store.kv.check.dedup import check_dedup
from penstock.store.kv.check.history import HistoryAudit
from penstock.store.kv.check.indexed import IndexedAudit
from penstock.store.kv.check.leases import check_leases
from penstock.store.kv.check.log import LogAudit
from penstock.store.kv.check.memory import check_memory
from penstock.store.kv.check.payloads import check_payloads
from penstock.store.kv.check.queues import (
    check_counters,
    check_queues,
    check_sequence,
    check_system,
    check_unclaimed,
    counts_of,
    unclaimed_strangers,
)
from penstock.store.kv.state import SHARED_TABLES
from penstock.store.live.buckets import TABLES as BUCKET_TABLES
from penstock.store.live.indexed import TABLES as INDEXED_TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock.store.kv.queues import Queue
    from penstock.store.kv.state import Core
    from penstock.store.kv.store import KvStore

__all__ = ["AuditReport", "Kind", "Violation", "audit", "held_ids"]

T = TypeVar("T")

# Readings of one repair: one that finds nothing ends it sooner.
MAX_ROUNDS: Final = 8
# Rows may be large, so few are read at a time to find out whether they can be.
_PAGE: Final = 64
_LAST: Final = b"\xff" * 16


def audit(
    store: KvStore, *, repair: bool = False, now_ms: int, keep_payloads: bool = False
) -> AuditReport:
    """Check every invariant of a store; with ``repair``, mend what can be mended.

    ``keep_payloads``: of messages that no queue holds too, because records of them may be lost.

    Called like a verb: by who has the store to himself. After a repair that changed anything the
    store's memory is rebuilt from disk. A store of which a part can't be read is not repaired.
    """
    core = store.core
    repair = repair and not _unreadable(core)
    if repair:
        _settle(core, now_ms)
    first = latest = _read(core, repair=repair, now_ms=now_ms, keep_payloads=keep_payloads)
    rounds = 1
    while repair and latest.found and rounds < MAX_ROUNDS:
        core.load()
        before = latest
        latest = _read(core, repair=True, now_ms=now_ms, keep_payloads=keep_payloads)
        rounds += 1
        if latest.found and latest.violations == before.violations:
            break
    if repair and first.found:
        core.load()
        for queue in core.queues.values():
            core.wake(queue)
    return _report(first, latest, rounds)


def _settle(core: Core, now_ms: int) -> None:
    """Write what memory has put off, so that disk and memory say the same."""
    core.settle_quarantine(now_ms)
    # The bucket design puts off mended summaries until something is changed.
    batch = core.engine.batch()
    if core.identity.design == "buckets":
        core.active.come_due(batch, 0, 0)
    if len(batch):
        core.commit(batch, list(core.queues.values()), now_ms)


def _unreadable(core: Core) -> list[StoreDamaged]:
    """Read every table; give, of each that can't be read whole, what lies around the damage."""
    own = INDEXED_TABLES if core.identity.design == "indexed" else BUCKET_TABLES
    found = []
    for name in (*SHARED_TABLES, *own):
        table = core.engine.table(name)
        try:
            for _ in rows_of(table, b"", _LAST, page=_PAGE):
                pass
        except StoreDamaged as error:
            end = _LAST
            try:
                while rows := table.scan_back(error.begin, end, _PAGE):
                    end = rows[-1][0]
            except StoreDamaged as back:
                end = back.end
            found.append(damaged(name, error.begin, end, str(error.__cause__)))
    return found


def _report(first: Findings, latest: Findings, rounds: int) -> AuditReport:
    left = {(each.kind, each.table, each.key) for each in latest.violations}
    kept = [
        msgspec.structs.replace(
            each, repaired=rounds > 1 and (each.kind, each.table, each.key) not in left
        )
        for each in first.violations
    ]
    seen = {(each.kind, each.table, each.key) for each in kept}
    kept += [each for each in latest.violations if (each.kind, each.table, each.key) not in seen]
    return AuditReport(
        checked=first.checked,
        found=first.found,
        violations=kept,
        notes=latest.notes,
        left=sum(latest.found.values()),
        rounds=rounds,
    )


def held_ids(store: KvStore, *, now_ms: int) -> dict[str, array[int]]:
    """Return the ids of the messages of every queue, in order, done and failed ones among them."""
    reading = _Reading(Findings(store.core, repair=False, now_ms=now_ms))
    return {
        queue.name: array("Q", sorted(reading.read_queue(queue)))
        for queue in store.core.queues.values()
    }


def _read(core: Core, *, repair: bool, now_ms: int, keep_payloads: bool) -> Findings:
    findings = Findings(core, repair=repair, now_ms=now_ms)
    findings.aside_unknown = keep_payloads
    reading = _Reading(findings)
    reading.run()
    findings.flush()
    return findings


class _Reading:
    """One reading of the store."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        is_indexed = findings.core.identity.design == "indexed"
        self._active: ActiveAudit = IndexedAudit(findings) if is_indexed else BucketsAudit(findings)
        self._history = HistoryAudit(findings)
        # The ids of the messages of every queue.
        self._held = array("Q")
        self._flight: dict[int, dict[int, bytes]] = {}
        self._floors_ms: dict[int, int] = {}
        # Why some stage could not come to its end.
        self._damage: StoreDamaged | None = None

    def run(self) -> None:
        """Go through all stages.

        A stage that comes to something that can't be read ends there: what it has found so far is
        so. Those that compare what other stages have met are left out then.
        """
        findings, core = self._findings, self._findings.core
        cursors = self._try(lambda: check_system(findings)) or {}
        self._try(lambda: check_queues(findings))
        for queue in core.queues.values():
            self._held.extend(self._try(partial(self.read_queue, queue)) or ())
        self._try(self._active.strangers)
        self._try(self._history.strangers)
        self._try(lambda: unclaimed_strangers(findings, core.by_number))
        if self._damage is None:
            self._try(lambda: check_leases(findings, self._active, self._flight, self._floors_ms))
        log = LogAudit(findings, cursors)
        self._try(log.scan)
        if self._damage is None:
            self._try(lambda: self._check_payloads(log, cursors))
        self._try(lambda: check_dedup(findings))
        if self._damage is None:
            self._try(lambda: check_memory(findings))
        if self._damage is not None:
            for error in _unreadable(core) or [self._damage]:
                findings.violate(Kind.UNREADABLE, error.table, error.begin, str(error))

    def _try(self, stage: Callable[[], T]) -> T | None:
        try:
            return stage()
        except StoreDamaged as error:
            self._damage = error
            return None

    def _check_payloads(self, log: LogAudit, cursors: dict[int, int | None]) -> None:
        findings = self._findings
        highest = check_payloads(findings, self._held, log, cursors, self._expel)
        highest = max(highest, findings.core.log.end - 1)
        check_sequence(findings, "log", SEQ_BLOCK_KEY, highest, "message ids")

    def read_queue(self, queue: Queue) -> Collection[int]:
        """Check the messages of a queue; return their ids."""
        findings = self._findings
        counts = counts_of(findings, queue)
        census = Census(queue, counts.time_floor_ms)
        self._active.scan(census)
        losers = self._history.scan(census)
        for message_id, loser in losers:
            table, key = self._active.place(queue, loser.key, in_flight=loser.in_flight)
            text = f"queue {queue.name}: message {message_id} is done, and live as well"
            findings.violate(Kind.TWICE, table, key, text)
        self._active.drop(census, [loser for _, loser in losers])
        check_unclaimed(findings, census)
        check_counters(findings, census, counts)
        self._flight[queue.number] = census.leases
        self._floors_ms[queue.number] = counts.time_floor_ms
        return census.attempts.keys()

    def _expel(self, message_ids: Collection[int], why: str) -> None:
        for queue in self._findings.core.queues.values():
            self._active.expel(queue, message_ids, why)
            self._history.expel(queue, message_ids, why)
