"""The audit of a key-value store: recompute the rows that follow from others, and compare.

One reading goes through the store in this order::

    tables.py     default, queues            records of the store about itself and its queues
    queue.py      available, in_progress,    live messages; derived: the index of what can be
                  buckets                    claimed, counts of groups, summaries
                  history                    done, failed, attempts; derived: the failed index
                  unclaimed                  derived: lists of messages to expire
                  queues                     derived: counters
    here          leases                     derived: the messages of a lease, lease_expiry
    tables.py     log                        entries; derived: segments and their listings
    here          payloads                   derived: reference counts, cursors
    tables.py     dedup                      derived: lists of ids to forget
    here                                     derived: everything that memory believes

The audit reads by pages. In memory it holds a few integers and the right derived rows of the queue
at hand, one integer for each copy of a message in any queue, and the messages in flight.

A repair writes the differences in bounded commits, and reads the store again until a reading finds
nothing, or nothing that it can mend. It writes nothing to a store that is right, and nothing to a
store of which a part can't be read: nobody knows what is wrong there, or only seems to be.
"""

from __future__ import annotations

from array import array
from functools import partial
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.engines import describe_range, rows_of
from penstock.errors import CorruptRecord, StoreDamaged
from penstock.store.check_report import KEPT, AuditReport, Kind, Violation
from penstock.store.codec import opendata
from penstock.store.codec.records import decode_lease, encode_lease
from penstock.store.kv.check import tables
from penstock.store.kv.check.queue import POINTERS, QueueAudit, flight_place, live_prefixes
from penstock.store.kv.check.tables import LARGE_PAGE, LAST, LogAudit, RefusedRow
from penstock.store.kv.state import SHARED_TABLES
from penstock.store.live import LIVE_TABLES, Beliefs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from penstock.store.kv.queues import Queue
    from penstock.store.kv.state import Core
    from penstock.store.kv.store import KvStore
    from penstock.store.live import Item

__all__ = ["AuditReport", "Kind", "Violation", "audit", "held_ids"]

# Readings of one repair: one that finds nothing ends it sooner.
MAX_ROUNDS: Final = 8
_REFERENCES: Final = b"\x02\x0d"


def audit(
    store: KvStore, *, repair: bool = False, now_ms: int, keep_payloads: bool = False
) -> AuditReport:
    """Check every invariant of a store; with ``repair``, mend what can be mended.

    ``keep_payloads`` keeps those of messages that no queue holds, because their rows may be lost.

    The caller must have the store to himself, as for a verb. After a repair the store's memory is
    rebuilt from disk. The audit does not repair a store of which a part can't be read.
    """
    core = store
    repair = repair and not _unreadable(core)
    if repair:
        core.settle_quarantine(now_ms)
        # The bucket design puts off mended summaries until something is changed.
        batch = core.engine.batch()
        core.active.come_due(batch, 0, 0)
        if len(batch):
            core.commit(batch, list(core.by_name.values()), now_ms)

    first = last = _Reading(core, set(), repair=repair, now_ms=now_ms, keep_payloads=keep_payloads)
    first.run()
    rounds = 1
    while repair and last.found and rounds < MAX_ROUNDS:
        core.load()
        before = last
        last = _Reading(core, before.lost, repair=True, now_ms=now_ms, keep_payloads=keep_payloads)
        last.run()
        rounds += 1
        if last.violations == before.violations:
            break
    if repair and first.found:
        core.load()
        for queue in core.by_name.values():
            core.wake(queue)
    return _report(first, last, rounds)


def _unreadable(core: Core) -> list[StoreDamaged]:
    """Read every table; return, of each that can't be read whole, the keys around the damage."""
    found = []
    for name in (*SHARED_TABLES, *LIVE_TABLES[core.identity.design]):
        table = core.engine.table(name)
        try:
            for _ in rows_of(table, b"", LAST, page=LARGE_PAGE):
                pass
        except StoreDamaged as error:
            end = LAST
            try:
                while rows := table.scan_back(error.begin, end, LARGE_PAGE):
                    end = rows[-1][0]
            except StoreDamaged as back:
                end = back.end
            text = describe_range(name, error.begin, end, str(error.__cause__))
            found.append(StoreDamaged(text, table=name, begin=error.begin, end=end))
    return found


def _report(first: tables.Rows, last: tables.Rows, rounds: int) -> AuditReport:
    seen, left = ({(v.kind, v.table, v.key) for v in each.violations} for each in (first, last))
    violations = [
        msgspec.structs.replace(v, repaired=rounds > 1 and (v.kind, v.table, v.key) not in left)
        for v in first.violations
    ]
    violations += [v for v in last.violations if (v.kind, v.table, v.key) not in seen]
    return AuditReport(
        checked=dict(first.checked),
        found=dict(first.found),
        violations=violations,
        notes=last.notes,
        left=sum(last.found.values()),
        rounds=rounds,
    )


def held_ids(store: KvStore, *, now_ms: int) -> dict[str, array[int]]:
    """Return the ids of the messages of every queue, in order, done and failed ones among them."""
    reading = _Reading(store, set(), repair=False, now_ms=now_ms, keep_payloads=True)
    return {
        queue.name: array("Q", sorted(reading.read_queue(queue)))
        for queue in store.by_name.values()
    }


class _Reading(tables.Rows):
    """One reading of the store. ``lost`` are the messages that it finds without a payload."""

    def __init__(
        self, core: Core, known_lost: set[int], *, repair: bool, now_ms: int, keep_payloads: bool
    ) -> None:
        super().__init__(core, known_lost, repair=repair, now_ms=now_ms)
        self.quarantined_many = keep_payloads
        self._cursors: dict[int, int | None] = {}
        self._log = LogAudit(self, self._cursors)
        # The ids of the messages of all queues; by queue number and lease, the keys in flight.
        self._held = array("Q")
        self._flight: dict[tuple[int, bytes], list[int]] = {}
        # By queue: messages that have lost their place; keys in flight that no lease holds.
        self._misplaced: dict[str, list[Item]] = {}
        self._strays: dict[str, list[int]] = {}
        self.lost: set[int] = set()

    def run(self) -> None:
        """Check every table.

        A stage that meets rows that can't be read ends there. Stages that compare what all the
        others have read are left out then.
        """
        stages: tuple[tuple[bool, Callable[[], object]], ...] = (
            (False, lambda: tables.check_system(self, self._cursors)),
            (False, lambda: tables.check_queues(self)),
            *((False, partial(self.read_queue, each)) for each in self.core.by_name.values()),
            (False, self._check_strangers),
            (True, self._check_leases),
            (False, self._log.scan),
            (True, self._check_payloads),
            (False, lambda: tables.check_dedup(self)),
            (True, self._check_memory),
        )
        damage: StoreDamaged | None = None
        for needs_all, stage in stages:
            try:
                if not needs_all or damage is None:
                    stage()
            except StoreDamaged as error:
                damage = error
        if damage is not None:
            for each in _unreadable(self.core) or [damage]:
                self.violate(Kind.UNREADABLE, each.table, each.begin, str(each))
        self.flush()
        if self.repair and (self._misplaced or self._strays):
            self._place()

    def _place(self) -> None:
        """Repair: let misplaced messages and strays wait in their queues."""
        self.core.load()
        active = self.core.active
        for name in self._misplaced.keys() | self._strays.keys():
            batch, queue = self.core.engine.batch(), self.core.by_name[name]
            floor_ms = queue.counts.time_floor_ms
            active.add(batch, queue, self._misplaced.get(name, []), floor_ms)
            found = active.find(queue, self._strays.get(name, []))
            strays = [item for item in found if item is not None]
            for item in strays:
                item.visible_at_ms = floor_ms
            active.put_back(batch, queue, strays, floor_ms)
            # Counters are left to the next reading.
            self.core.commit(batch, (), self.now_ms)

    def read_queue(self, queue: Queue) -> Collection[int]:
        """Check the messages of a queue; return their ids."""
        found = QueueAudit(self, queue)
        found.run()
        self._flight.update(((queue.number, lease), keys) for lease, keys in found.flight.items())
        if found.misplaced:
            self._misplaced[queue.name] = found.misplaced
        self._held.extend(found.attempts)
        return found.attempts

    def _check_strangers(self) -> None:
        """Check for rows of queues that are not there, and for keys that nothing uses."""
        known = {"payloads": [opendata.PAYLOAD, _REFERENCES], "dedup": [b"\x00", b"\x01"]}
        for queue in self.core.by_name.values():
            ended = [opendata.DONE.prefix(queue.id), opendata.FAILED.prefix(queue.id)]
            for name, prefixes in (
                ("unclaimed", [queue.number4]),
                ("history", [*ended, *(each + opendata.terminated(queue.id) for each in POINTERS)]),
                *live_prefixes(self.core.identity.design, queue).items(),
            ):
                known.setdefault(name, []).extend(prefixes)
        why = RefusedRow(Kind.STRANGER, "a key that nothing uses, or of a queue that is gone")
        for name, prefixes in known.items():
            begin = b""
            for first, end in [*sorted(map(tables.span, prefixes)), (LAST, LAST)]:
                for key, value in rows_of(self.table(name), begin, max(begin, first), page=64):
                    # Rows that only point at others are deleted.
                    if name in {"groups", "visibility_index", "unclaimed"} or (
                        name in {"history", "buckets"} and key[:2] in {*POINTERS, b"\x02\x09"}
                    ):
                        self.mend(why.kind, name, key, None, str(why))
                    else:
                        self.reject(name, key, value, why)
                begin = max(begin, end)

    def _check_leases(self) -> None:
        """Check that leases list the messages in flight under them, and have expiry entries."""
        queues, expiry = self.core.by_number, dict[bytes, bytes]()
        for name, lease in self.parse("leases", b"", lambda _, row: decode_lease(row)):
            keys = self._flight.pop((lease.queue, name), ())
            held = sorted({key.to_bytes(8, "big") for key in keys})
            queue = queues.get(lease.queue)
            floor_ms = queue.counts.time_floor_ms if queue else 0
            right = lease._replace(
                ids=held,
                index_key=lease.expiry_ms.to_bytes(8, "big") + name,
                claimed_at_ms=min(lease.claimed_at_ms, floor_ms),
            )
            if queue is None:
                kind, text = Kind.STRANGER, "a lease of a queue that is not there"
            elif not held and not lease.ids:
                kind, text = Kind.EMPTY, "a lease without messages"
            elif held != sorted(lease.ids):
                kind, text = Kind.NOT_HELD, "a lease that lists other messages than are under it"
            else:
                kind, text = Kind.WRONG_FIELD, "a lease unsorted, of the future, or of a wrong end"
            encoded = encode_lease(*right) if held else None
            self.compare("leases", name, encode_lease(*lease), encoded, text, kind)
            expiry[right.index_key] = name
        self.compare_all("lease_expiry", [b""], expiry, "the expiry entry of a lease")
        for (number, _), keys in self._flight.items():
            queue = queues[number]
            self._strays.setdefault(queue.name, []).extend(keys)
            for key in keys:
                table, row = flight_place(self.core.identity.design, queue, key)
                text = f"queue {queue.name}: no lease lists {key}, which is in flight"
                self.violate(Kind.STRAY, table, row, text)

    def _check_payloads(self) -> None:
        """Check payloads, reference counts and cursors, in the order of message ids."""
        log, end = self._log, self.core.log.end
        highest = max(log.highest, end - 1)
        # By log, the message after which its cursor has to be.
        assigned: dict[int, int] = {}
        for id_, names in groupby(self._names(), key=itemgetter(0)):
            highest, holders, known = max(highest, id_), 0, dict[str, int]()
            for _, how, value in names:
                holders += how == "held"
                known[how] = value
            number, has_payload, is_needed = known.get("pending"), "payload" in known, holders > 0
            if number is not None:
                cursor = self._cursors.get(number, 0)
                has_cursor = cursor is not None and cursor <= end
                is_assigned = holders or "count" in known
                # A message that was assigned, or is gone, tells where a lost cursor was.
                if is_assigned or not (has_cursor or has_payload):
                    assigned[number] = id_
                if not is_assigned and (has_payload or not has_cursor):
                    continue
                is_needed = is_needed or not is_assigned
            if has_payload or not is_needed:
                self._check_references(id_, holders, known)
            else:
                # The next reading puts it into the quarantine.
                text = (
                    f"message {id_} is held by {holders} queues, or not assigned, without payload"
                )
                self.violate(Kind.PAYLOAD_MISSING, "payloads", opendata.payload_key(id_), text)
                self.lost.add(id_)
        for number in self._cursors.keys() | assigned.keys():
            cursor, last = self._cursors.get(number, 0), assigned.get(number)
            if last is not None or cursor is None or cursor > end:
                key = tables.CURSOR + number.to_bytes(4, "big")
                text = f"log {number} up to {end} was assigned up to {cursor}, {last} was as well"
                right = None if last is None else (last + 1).to_bytes(8, "big")
                self.mend(Kind.CURSOR, "default", key, right, text)
        tables.check_sequence(self, "log", opendata.SEQ_BLOCK_KEY, highest, "message ids")

    def _names(self) -> Iterator[tuple[int, str, int]]:
        """Name messages in the order of ids: (id, what is known of it, a number)."""

        def parse(key: bytes, value: bytes) -> tuple[int, str, int]:
            if len(key) != 10:
                raise CorruptRecord(f"the key of a payload or a count has {len(key)} bytes, not 10")
            is_count = key.startswith(_REFERENCES)
            how, number = ("count", int.from_bytes(value, "big")) if is_count else ("payload", 0)
            return int.from_bytes(key[2:], "big"), how, number

        pending = self._log.pending.items()
        payloads = self.parse("payloads", opendata.PAYLOAD, parse, page=LARGE_PAGE)
        counts = self.parse("payloads", _REFERENCES, parse)
        return merge(
            (name for _, name in payloads),
            (name for _, name in counts),
            ((id_, "held", 0) for id_ in sorted(self._held)),
            ((id_, "unrouted", 0) for id_ in sorted(self._log.unrouted)),
            sorted((id_, "pending", number) for number, ids in pending for id_ in ids),
        )

    def _check_references(self, id_: int, holders: int, known: dict[str, int]) -> None:
        key, count_key = opendata.payload_key(id_), _REFERENCES + id_.to_bytes(8, "big")
        log, count = self._log, known.get("count")
        if holders or "payload" not in known:
            if count != (holders if holders > 1 else None):
                text = f"{holders} queues hold message {id_}, its count says {count}"
                right = holders.to_bytes(4, "big") if holders > 1 else None
                self.mend(Kind.REFERENCES, "payloads", count_key, right, text)
        elif count == 0 and "unrouted" in known:
            pass
        elif count == 0 and id_ >= log.earliest:
            text = f"message {id_} is in no queue, and the log does not know"
            self.violate(Kind.REFERENCES, "payloads", count_key, text)
            log.note_unrouted(id_)
        elif self.quarantined_many or id_ in self.quarantined_ids:
            text = f"no queue holds message {id_}, but a row in the quarantine may have"
            self.notes.append(Violation(Kind.GARBAGE, "payloads", key.hex(), text))
            del self.notes[KEPT:]
        else:
            self.mend(Kind.GARBAGE, "payloads", key, None, f"no queue holds message {id_}")
            self.write("payloads", count_key, None)

    def _check_memory(self) -> None:
        """Compare memory with a memory that is read anew, if the disk is right.

        If the disk is not right, a repair rebuilds memory anyway.
        """
        core, identity = self.core, self.core.identity
        # Reads that met a damaged record have counted it off, to be written with the next commit.
        if self.found or core.has_aside:
            return
        id_, routing = identity.store_id, identity.routing
        fresh = type(core)(core.engine, identity.design, store_id=id_, routing=routing, now_ms=0)
        # Looked up when first asked for.
        fresh.leases.due(0, 1)
        believed, true = _beliefs(core), _beliefs(fresh)
        wrong = {
            key: f"memory has {believed.facts.get(key)!r:.200}, disk {true.facts.get(key)!r:.200}"
            for key in believed.facts.keys() | true.facts.keys()
            if believed.facts.get(key) != true.facts.get(key)
        }
        for key, lowest in true.bounds.items():
            says = believed.bounds.get(key)
            if says is None or says > lowest:
                wrong[key] = f"memory looks from {says!r:.200} on, and the disk has {lowest!r:.200}"
        for key, text in sorted(wrong.items(), key=repr):
            name = ": ".join(map(str, key))
            self.violate(Kind.MEMORY, "memory", name.encode(), f"{name}: {text}")


def _beliefs(core: Core) -> Beliefs:
    """Return what the memory of a store believes of its disk."""
    log = core.log
    facts: dict[tuple[Any, ...], Any] = {
        ("totals",): core.totals,
        ("log",): (log.settings, log.segments),
        ("sequences",): (log.ids.end, core.queue_numbers.end),
        ("draining",): core.draining,
        ("listing",): core.listing,
    }
    bounds: dict[tuple[Any, ...], Any] = {("leases",): core.leases.none_before_ms}
    first_keys = (
        *(core.first_unclaimed, core.leases.first_keys, core.dedup.first_keys),
        *(core.history.first_keys, log.first_keys, *core.active.first_keys),
    )
    for key in [key for each in first_keys for key in each.overrun()]:
        facts["a key before the first one of its range", key.hex()] = True
    for lease in core.leases.differing():
        facts["a lease in memory that is not stored", lease.hex()] = True
    for due, due_ms in core.retention.ranks.items():
        bounds["retention of queue", *due] = due_ms
    for name, queue in core.by_name.items():
        covered, live = queue.coverage, core.active.beliefs(queue)
        facts[name, "spec"] = (queue.number, queue.spec, queue.counts)
        facts[name, "coverage"] = (covered.live, covered.backfilled, covered.draining)
        if core.dead_letters.knows(queue):
            bounds[name, "dead letters"] = 0
        if core.history.may_have_marks(queue):
            bounds[name, "moved here"] = 0
        facts.update(((name, *key), value) for key, value in live.facts.items())
        bounds.update(((name, *key), value) for key, value in live.bounds.items())
    return Beliefs(facts, bounds)
