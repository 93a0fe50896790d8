"""The audit of a key-value store: recompute the rows that follow from others, and compare.

One reading goes through the store in this order::

    tables.py     default, queues            records of the store about itself and its queues
    live.py       available, in_progress,    live messages; derived: the index of what can be
                  buckets                    claimed, counts of groups, summaries
    here          history                    done, failed, attempts; derived: the failed index
    live.py       unclaimed                  derived: lists of messages to expire
    here          queues                     derived: counters
                  leases                     derived: the messages of a lease, lease_expiry
    tables.py     log                        entries; derived: segments and their listings
    here          payloads                   derived: reference counts, cursors
    tables.py     dedup                      derived: lists of ids to forget
    here                                     derived: everything that memory believes

The audit reads by pages. In memory it holds a few integers for each message of the queue at hand,
one integer for each copy of a message in any queue, and the messages in flight.

A repair writes the differences in bounded commits, carries out what takes more than one row (a
message is there twice, or in flight under no lease) with the store's own verbs, and reads the
store again, until a reading finds nothing, or nothing that it can mend. It writes nothing to a
store that is right, and nothing to a store of which a part can't be read: nobody knows what is
wrong there, or only seems to be.
"""

from __future__ import annotations

from array import array
from functools import partial
from heapq import merge
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.engines import describe_range, rows_of
from penstock.errors import CorruptRecord, StoreDamaged
from penstock.limits import MAX_BUCKET_EXPONENT
from penstock.model import State
from penstock.store.check_report import KEPT, AuditReport, Kind, Violation
from penstock.store.codec import opendata, records
from penstock.store.codec.opendata import SEQ_BLOCK_KEY, terminated
from penstock.store.codec.stored import decode_lease, encode_lease
from penstock.store.kv.check import tables
from penstock.store.kv.check.live import (
    BucketsAudit,
    IndexedAudit,
    Place,
    QueueMessages,
    check_unclaimed,
    wrong_beliefs,
)
from penstock.store.kv.check.tables import LARGE_PAGE, LAST, DerivedRows, LogAudit, RefusedRow, scan
from penstock.store.kv.history import cut_part
from penstock.store.kv.queues import Counts, decode_counts, encode_counts
from penstock.store.kv.state import SHARED_TABLES
from penstock.store.live import LIVE_TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from penstock.store.kv.queues import Queue
    from penstock.store.kv.state import Core
    from penstock.store.kv.store import KvStore
    from penstock.store.live import Item

__all__ = ["AuditReport", "Kind", "Violation", "audit", "held_ids"]

# Readings of one repair: one that finds nothing ends it sooner.
MAX_ROUNDS: Final = 8
_FAILED_INDEX, _MARKS, _ATTEMPTS, _REFERENCES = b"\x02\x0a", b"\x02\x15", b"\x02\x05", b"\x02\x0d"
# Acked, released, expired.
_OUTCOMES: Final = 3
# The ways to name a message: it has a payload, a reference count; a queue holds it; it is noted as
# unrouted; it is not assigned yet.
_PAYLOAD, _COUNT, _HELD, _UNROUTED, _PENDING = range(5)


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

    def read(before: _Reading | None) -> _Reading:
        reading = _Reading(core, repair=repair, now_ms=now_ms)
        reading.quarantined_many = keep_payloads
        if before is not None:
            reading.known_lost, reading.has_right_counts = before.lost, True
        reading.run()
        return reading

    first = last = read(None)
    rounds = 1
    while repair and last.found and rounds < MAX_ROUNDS:
        core.load()
        before, last = last, read(last)
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
        checked=first.checked,
        found=first.found,
        violations=violations,
        notes=last.notes,
        left=sum(last.found.values()),
        rounds=rounds,
    )


def held_ids(store: KvStore, *, now_ms: int) -> dict[str, array[int]]:
    """Return the ids of the messages of every queue, in order, done and failed ones among them."""
    reading = _Reading(store, repair=False, now_ms=now_ms)
    return {
        queue.name: array("Q", sorted(reading.read_queue(queue)))
        for queue in store.by_name.values()
    }


class _Reading(tables.Rows):
    """One reading of the store. ``lost`` are the messages that it finds without a payload."""

    def __init__(self, core: Core, *, repair: bool, now_ms: int) -> None:
        super().__init__(core, repair=repair, now_ms=now_ms)
        is_indexed = core.identity.design == "indexed"
        self._live = IndexedAudit(self) if is_indexed else BucketsAudit(self)
        self._cursors: dict[int, int | None] = {}
        self._floors_ms: dict[int, int] = {}
        # The ids of the messages of all queues; by queue number and lease, the keys in flight.
        self._held = array("Q")
        self._flight: dict[tuple[int, bytes], list[int]] = {}
        # By queue number: live messages to remove, to make available, and to add.
        self._to_remove: dict[int, list[Place]] = {}
        self._to_put_back: dict[int, list[int]] = {}
        self._to_add: dict[int, list[Item]] = {}
        self.lost: set[int] = set()
        # Whether the reading before this one has put the counters right.
        self.has_right_counts = False

    def run(self) -> None:
        """Check every table.

        A stage that meets rows that can't be read ends there. Stages that compare what all the
        others have read are left out then.
        """
        log = LogAudit(self, self._cursors)
        stages: tuple[tuple[bool, Callable[[], object]], ...] = (
            (False, lambda: self._cursors.update(tables.check_system(self))),
            (False, lambda: tables.check_queues(self)),
            *((False, partial(self.read_queue, each)) for each in self.core.by_name.values()),
            (False, self._check_strangers),
            (True, self._check_leases),
            (False, log.scan),
            (True, lambda: self._check_payloads(log)),
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
        if self.repair:
            self._settle()

    def _settle(self) -> None:
        """Repair: remove, make available and add messages with the store's own verbs."""
        core = self.core
        numbers = self._to_remove.keys() | self._to_put_back.keys() | self._to_add.keys()
        if numbers:
            core.load()
        for number in numbers:
            queue, floor_ms, active = core.by_number[number], self._floors_ms[number], core.active
            keys: dict[bool, list[int]] = {False: [], True: []}
            for key, in_flight in self._to_remove.get(number, []):
                keys[in_flight].append(key)
            to_put_back = active.find(queue, self._to_put_back.get(number, []))
            for item in filter(None, to_put_back):
                item.visible_at_ms = floor_ms
            verbs: tuple[tuple[Callable[..., None], Sequence[Item | None]], ...] = (
                (active.remove, active.waiting(queue, keys[False])),
                (active.settle, active.find(queue, keys[True])),
                (partial(active.put_back, now_ms=floor_ms), to_put_back),
                (partial(active.add, now_ms=floor_ms), self._to_add.get(number, [])),
            )
            for verb, found in verbs:
                if items := [item for item in found if item is not None]:
                    batch = core.engine.batch()
                    verb(batch, queue, items)
                    # Counters are left to the next reading.
                    core.commit(batch, (), self.now_ms)

    # --- queues ------------------------------------------------------------------------------

    def read_queue(self, queue: Queue) -> Collection[int]:
        """Check the messages of a queue; return their ids."""
        number, counts = queue.number, self._read_counts(queue)
        messages = QueueMessages(queue, counts.time_floor_ms)
        self._live.read(messages)
        self._check_ended(messages)
        self._check_attempts(messages)
        check_unclaimed(self, messages)
        self._check_counters(messages, counts)
        for id_, (key, in_flight) in messages.to_remove:
            table, row = self._live.place(queue, key, in_flight=in_flight)
            text = f"queue {queue.name}: message {id_} is there twice, or done and live"
            self.violate(Kind.TWICE, table, row, text)
            self._to_remove.setdefault(number, []).append((key, in_flight))
        for key, lease in messages.leases.items():
            self._flight.setdefault((number, lease), []).append(key)
        if messages.to_add:
            self._to_add[number] = messages.to_add
        self._floors_ms[number] = counts.time_floor_ms
        self._held.extend(messages.attempts)
        return messages.attempts.keys()

    def _check_strangers(self) -> None:
        """Check for rows of queues that are not there, and for keys that nothing uses."""
        known = {"payloads": [opendata.PAYLOAD, _REFERENCES], "dedup": [b"\x00", b"\x01"]}
        pointers = (_FAILED_INDEX, _MARKS, _ATTEMPTS)
        for queue in self.core.by_name.values():
            ended = [opendata.DONE.prefix(queue.id), opendata.FAILED.prefix(queue.id)]
            for name, prefixes in (
                ("unclaimed", [queue.number.to_bytes(4, "big")]),
                ("history", [*ended, *(each + terminated(queue.id) for each in pointers)]),
                *self._live.prefixes(queue).items(),
            ):
                known.setdefault(name, []).extend(prefixes)
        why = RefusedRow(Kind.STRANGER, "a key that nothing uses, or of a queue that is gone")
        for name, prefixes in known.items():
            begin = b""
            for first, end in [*sorted(map(tables.span, prefixes)), (LAST, LAST)]:
                for key, value in rows_of(self.table(name), begin, max(begin, first), page=64):
                    # Rows that only point at others are deleted.
                    if name in {"groups", "visibility_index", "unclaimed"} or (
                        name in {"history", "buckets"} and key[:2] in {*pointers, b"\x02\x09"}
                    ):
                        self.mend(why.kind, name, key, None, str(why))
                    else:
                        self.reject(name, key, value, why)
                begin = max(begin, end)

    # --- history -----------------------------------------------------------------------------

    def _check_ended(self, messages: QueueMessages) -> None:
        """Check done and failed messages, and the index of the failed ones."""
        queue, prefix = messages.queue, _FAILED_INDEX + terminated(messages.queue.id)
        index = DerivedRows(self, "history", prefix)
        for state, of_state in (
            (State.DONE, opendata.DONE.prefix(queue.id)),
            (State.FAILED, opendata.FAILED.prefix(queue.id)),
        ):
            what = f"queue {queue.name}: a part of {state.value} messages"
            # Keys that the repair has written ahead of where it reads; the end of the last part.
            written, end = set[bytes](), 0
            for key, (home, number, entries) in self._parts(of_state, f"{state.value} parts"):
                if key in written:
                    continue
                right_key, part = home, number
                if key != right_key:
                    self.violate(Kind.WRONG_KEY, "history", key, f"{what} in another's bucket")
                elif not entries:
                    self.violate(Kind.EMPTY, "history", key, f"{what} without any")
                elif part < end:
                    self.violate(Kind.ORDER, "history", key, f"{what} with numbers of another")
                    if self.has_right_counts:
                        right_key, part = _free_key(messages, state, key)
                else:
                    end = part + len(entries)
                self.count(f"{state.value} messages", len(entries))
                messages.next_part[state] = max(messages.next_part[state], part + len(entries))
                stays = partial(self._keep_ended, messages, state, key)
                kept = dict(cut_part(right_key, entries, stays))
                others = [at for at in kept if at != key]
                if others and any(index.table.multi_get(others)):
                    # It waits until the part that is there has got other numbers.
                    kept = {key: entries}
                for at, run in kept.items():
                    if at != key or len(run) < len(entries):
                        row = records.encode_ended(run, failed=state is State.FAILED)
                        self.write("history", at, row)
                        written.add(at)
                    if state is State.FAILED:
                        keys = [prefix + each.message_id.to_bytes(8, "big") for each in run]
                        for pointer, value in zip(keys, index.table.multi_get(keys), strict=True):
                            index.expect(pointer, at, value, f"{what}: the index entry of one")
                if key not in kept:
                    self.write("history", key, None)
        index.finish(f"queue {queue.name}: no failed message is where this entry says")

    def _parts(
        self, prefix: bytes, what: str
    ) -> Iterator[tuple[bytes, tuple[bytes, int, list[records.EndedRecord]]]]:
        """Read the parts of buckets of all sizes in the order of their numbers."""
        first, last = tables.span(prefix)
        sizes = range(1, MAX_BUCKET_EXPONENT + 1)
        borders = pairwise([first, *(prefix + bytes([size << 4]) for size in sizes), last])
        runs = [self.parse("history", run, what, _parse_part, page=LARGE_PAGE) for run in borders]
        return merge(*runs, key=lambda row: row[1][1])

    def _keep_ended(
        self, messages: QueueMessages, state: State, key: bytes, entry: records.EndedRecord
    ) -> bool:
        """Take a done or failed message in; False if it has to leave its part."""
        id_ = entry.message_id
        try:
            self.metadata_of(id_, entry.metadata)
        except CorruptRecord as error:
            row = records.encode_ended([entry], failed=state is State.FAILED)
            self.reject("history", key, row, error, id_.to_bytes(8, "big"))
            return False
        if state is State.DONE and id_ not in messages.ended[state]:
            # An acknowledged message never comes back: of two states, done is kept.
            messages.remove(id_)
        elif id_ in messages.attempts:
            text = f"queue {messages.queue.name}: message {id_} is {state.value}, and there twice"
            self.violate(Kind.TWICE, "history", key, text)
            return False
        messages.ended[state].add(id_)
        messages.attempts[id_] = entry.attempts
        return True

    def _check_attempts(self, messages: QueueMessages) -> None:
        """Check attempts, and the marks of messages that a move has brought in."""
        name, prefix = f"queue {messages.queue.name}", opendata.ATTEMPTS.prefix(messages.queue.id)
        for key, (id_, number) in self.parse("history", prefix, "attempts", _parse_attempt):
            if not 1 <= number <= messages.attempts.get(id_, 0):
                text = f"{name}: attempt {number} at message {id_}, which was not made"
                self.mend(Kind.ORPHAN_ATTEMPT, "history", key, None, text)
        for key, value in scan(self.table("history"), _MARKS + terminated(messages.queue.id)):
            self.count("marks of moved messages")
            id_ = int.from_bytes(key[-8:], "big")
            # The key in a mark is a hint alone.
            right = value if len(value) == 8 else key[-8:]
            is_there = id_ in messages.attempts
            text = f"{name}: the mark of message {id_}"
            self.compare("history", key, value, right if is_there else None, text)

    # --- counters ----------------------------------------------------------------------------

    def _read_counts(self, queue: Queue) -> Counts:
        """Read a queue's counters as they are on disk."""
        key = tables.COUNTS + queue.id
        try:
            return decode_counts(self.table("queues").get(key) or b"")
        except CorruptRecord:
            text = f"queue {queue.name}: its counters are missing or do not decode"
            # Memory has the best that is known; the comparison puts the rest right.
            self.mend(Kind.UNDECODABLE, "queues", key, encode_counts(queue.counts), text)
            return msgspec.structs.replace(queue.counts)

    def _check_counters(self, messages: QueueMessages, counts: Counts) -> None:
        # Messages that are not there have been removed, one way or another.
        gone = len(messages.attempts) + counts.moved_out_total
        came = counts.enqueued_total + counts.moved_in_total
        right = msgspec.structs.replace(
            counts,
            available=len(messages.waiting) - len(messages.delayed),
            delayed=len(messages.delayed),
            in_flight=len(messages.flight),
            done=len(messages.ended[State.DONE]),
            failed=len(messages.ended[State.FAILED]),
            enqueued_total=counts.enqueued_total + max(0, gone - came),
            removed_total=max(0, came - gone),
            next_done=max(counts.next_done, messages.next_part[State.DONE]),
            next_failed=max(counts.next_failed, messages.next_part[State.FAILED]),
            next_claim=max(counts.next_claim, messages.next_claim),
            live_bytes=sum(messages.sizes.values()),
        )
        if right != counts:
            values = zip(*map(msgspec.structs.astuple, (counts, right)), strict=True)
            wrong = [
                f"{name} is {says}, not {is_}"
                for name, (says, is_) in zip(Counts.__struct_fields__, values, strict=True)
                if says != is_
            ]
            text = f"queue {messages.queue.name}: {', '.join(wrong)}"
            key = tables.COUNTS + messages.queue.id
            self.mend(Kind.COUNTER, "queues", key, encode_counts(right), text)

    # --- leases ------------------------------------------------------------------------------

    def _check_leases(self) -> None:
        """Check that leases list the messages in flight under them, and have expiry entries."""
        queues, expiry = self.core.by_number, DerivedRows(self, "lease_expiry", b"")
        for name, lease in self.parse("leases", b"", "leases", lambda _, row: decode_lease(row)):
            keys = self._flight.pop((lease.queue, name), ())
            held = sorted({key.to_bytes(8, "big") for key in keys})
            index_key = lease.expiry_ms.to_bytes(8, "big") + name
            right = lease._replace(
                ids=held,
                index_key=index_key,
                claimed_at_ms=min(lease.claimed_at_ms, self._floors_ms.get(lease.queue, 0)),
            )
            if lease.queue not in queues:
                kind, text = Kind.STRANGER, "a lease of a queue that is not there"
            elif not held and not lease.ids:
                kind, text = Kind.EMPTY, "a lease without messages"
            elif held != sorted(lease.ids):
                kind, text = Kind.NOT_HELD, "a lease that lists other messages than are under it"
            else:
                kind, text = Kind.WRONG_FIELD, "a lease unsorted, of the future, or of a wrong end"
            encoded = encode_lease(*right) if held else None
            self.compare("leases", name, encode_lease(*lease), encoded, text, kind)
            entry = expiry.table.get(index_key)
            expiry.expect(index_key, name if held else None, entry, "the expiry entry of a lease")
        expiry.finish("an expiry entry without a lease that ends then")
        for (number, _), keys in self._flight.items():
            self._to_put_back.setdefault(number, []).extend(keys)
            for key in keys:
                table, row = self._live.place(queues[number], key, in_flight=True)
                text = f"queue {queues[number].name}: no lease lists {key}, which is in flight"
                self.violate(Kind.STRAY, table, row, text)

    # --- payloads ----------------------------------------------------------------------------

    def _check_payloads(self, log: LogAudit) -> None:
        """Check payloads, reference counts and cursors, in the order of message ids."""
        end = self.core.log.end
        highest = max(log.highest, end - 1)
        # By log, the message after which its cursor has to be.
        assigned: dict[int, int] = {}
        for id_, names in groupby(self._names(log), key=itemgetter(0)):
            highest, holders, known = max(highest, id_), 0, dict[int, int]()
            for _, how, value in names:
                holders += how == _HELD
                known[how] = value
            number = known.get(_PENDING)
            if number is not None:
                cursor = self._cursors.get(number, 0)
                has_cursor = cursor is not None and cursor <= end
                is_assigned = holders or _COUNT in known
                # A message that was assigned, or is gone, tells where a lost cursor was.
                if is_assigned or (not has_cursor and _PAYLOAD not in known):
                    assigned[number] = id_
                if not is_assigned:
                    if has_cursor and _PAYLOAD not in known:
                        self._report_lost(id_, "is not assigned yet")
                    continue
            if holders and _PAYLOAD not in known:
                self._report_lost(id_, f"is held by {holders} queues")
            else:
                self._check_references(id_, holders, known, log)
        for number in self._cursors.keys() | assigned.keys():
            cursor, last = self._cursors.get(number, 0), assigned.get(number)
            if last is not None or cursor is None or cursor > end:
                key = tables.CURSOR + number.to_bytes(4, "big")
                text = f"log {number} up to {end} was assigned up to {cursor}, {last} was as well"
                right = None if last is None else (last + 1).to_bytes(8, "big")
                self.mend(Kind.CURSOR, "default", key, right, text)
        tables.check_sequence(self, "log", SEQ_BLOCK_KEY, highest, "message ids")

    def _names(self, log: LogAudit) -> Iterator[tuple[int, int, int]]:
        """Name messages in the order of ids: (id, how, a number)."""
        prefix = opendata.PAYLOAD
        payloads = self.parse("payloads", prefix, "payloads", _parse_name, page=LARGE_PAGE)
        counts = self.parse("payloads", _REFERENCES, "reference counts", _parse_name)
        return merge(
            (name for _, name in payloads),
            (name for _, name in counts),
            ((id_, _HELD, 0) for id_ in sorted(self._held)),
            ((id_, _UNROUTED, 0) for id_ in sorted(log.unrouted)),
            sorted((id_, _PENDING, number) for number, ids in log.pending.items() for id_ in ids),
        )

    def _report_lost(self, id_: int, what: str) -> None:
        """Report a message without a payload; the next reading puts it into the quarantine."""
        text = f"message {id_} {what} and has no payload"
        self.violate(Kind.PAYLOAD_MISSING, "payloads", opendata.payload_key(id_), text)
        self.lost.add(id_)

    def _check_references(
        self, id_: int, holders: int, known: dict[int, int], log: LogAudit
    ) -> None:
        key, count_key = opendata.payload_key(id_), _REFERENCES + id_.to_bytes(8, "big")
        count = known.get(_COUNT)
        if holders or _PAYLOAD not in known:
            if count != (holders if holders > 1 else None):
                text = f"{holders} queues hold message {id_}, its count says {count}"
                right = holders.to_bytes(4, "big") if holders > 1 else None
                self.mend(Kind.REFERENCES, "payloads", count_key, right, text)
        elif count == 0 and (_UNROUTED in known or id_ >= log.earliest):
            if _UNROUTED not in known:
                text = f"message {id_} is in no queue, and the log does not know"
                self.violate(Kind.REFERENCES, "payloads", count_key, text)
                log.note_unrouted(id_)
        elif self.quarantined_many or id_ in self.quarantined_ids:
            text = f"no queue holds message {id_}, but a row in the quarantine may have"
            if len(self.notes) < KEPT:
                self.notes.append(Violation(Kind.GARBAGE, "payloads", key.hex(), text))
        else:
            self.mend(Kind.GARBAGE, "payloads", key, None, f"no queue holds message {id_}")
            self.write("payloads", count_key, None)

    # --- memory ------------------------------------------------------------------------------

    def _check_memory(self) -> None:
        """Compare memory with a memory that is read anew, if the disk is right.

        If the disk is not right, a repair rebuilds memory anyway.
        """
        # Reads that met a damaged record have counted it off, to be written with the next commit.
        if self.found or self.core.has_aside:
            return
        for name, text in wrong_beliefs(self.core):
            self.violate(Kind.MEMORY, "memory", name.encode(), f"{name}: {text}")


def _parse_part(key: bytes, value: bytes) -> tuple[bytes, int, list[records.EndedRecord]]:
    """Return the right key of a part of history, its number, and its messages."""
    failed = key[:2] != opendata.DONE.head
    keys = opendata.FAILED if failed else opendata.DONE
    queue, bucket_id, part = keys.parse(key)
    home = opendata.bucket_of(opendata.make_id(opendata.split_id(bucket_id)[0], part))
    return keys.key(queue, home, part), part, records.decode_ended(value, failed=failed)


def _free_key(messages: QueueMessages, state: State, key: bytes) -> tuple[bytes, int]:
    """Return a key behind all parts for a part that is moved there, and its number."""
    counts = messages.queue.counts
    used = counts.next_done if state is State.DONE else counts.next_failed
    exponent = key[-16] >> 4
    capacity = opendata.capacity(exponent)
    # The begin of a bucket: the part may need all of it.
    number = -(-max(used, messages.next_part[state]) // capacity) * capacity
    bucket_id = opendata.make_id(exponent, number)
    return key[:-16] + bucket_id.to_bytes(8, "big") + number.to_bytes(8, "big"), number


def _parse_attempt(key: bytes, value: bytes) -> tuple[int, int]:
    _, message_id, number = opendata.ATTEMPTS.parse(key)
    if records.decode_attempt(value).outcome >= _OUTCOMES:
        raise CorruptRecord("an attempt with an unknown outcome")
    return message_id, number


def _parse_name(key: bytes, value: bytes) -> tuple[int, int, int]:
    if len(key) != 10:
        raise CorruptRecord(f"the key of a payload or a count has {len(key)} bytes, not 10")
    is_count = key.startswith(_REFERENCES)
    how, number = (_COUNT, int.from_bytes(value, "big")) if is_count else (_PAYLOAD, 0)
    return int.from_bytes(key[2:], "big"), how, number
