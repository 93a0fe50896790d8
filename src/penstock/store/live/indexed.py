"""The indexed design: one record per message, and a sorted index of what can be claimed.

Claims delete at the head of the index, and an LSM tree steps over what was deleted until it is
compacted. So memory keeps, for every lane in use, the lowest key that may be alive, and a scan
starts there. The key map is at the top of :mod:`penstock.store.live.indexed_directory`.
"""

from __future__ import annotations

import logging
from collections import Counter
from heapq import nsmallest
from itertools import islice, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from penstock.engines import get_each, rows_of, scan_readable
from penstock.errors import CorruptRecord, InvalidInput, StoreDamaged
from penstock.limits import MAX_ATTEMPTS
from penstock.model import State
from penstock.store.codec.records import NO_LEASE, item_head, with_lease
from penstock.store.kv.tables import FirstKeys
from penstock.store.live import MOST_HEADS, MOST_LANES, ActiveSet, Item, count_attempt, group_of
from penstock.store.live.indexed_directory import (
    DELAYED,
    PAST,
    READY,
    RECENT_BYTES,
    RECENT_ITEMS,
    Directory,
    differing,
    item_of,
    lane_of_key,
    main_of,
    pack_main,
    pack_slot,
    past,
    slot_of,
    timer_key,
    unpack_main,
    visible_at_of,
    visible_at_of_timer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.engines import Batch, Engine
    from penstock.store.kv.queues import Queue
    from penstock.store.live import Beliefs, Grant, Quarantine

log = logging.getLogger(__name__)

_NO_PRIORITY: Final = b"\xff"
_REGION_BYTES: Final = 5
_MAX_ID: Final = (1 << 64) - 1
_key_of: Final = attrgetter("key")


class IndexedActive(ActiveSet[Directory]):
    """The active set of the indexed design."""

    def __init__(self, engine: Engine, quarantine: Quarantine) -> None:
        self._available = engine.table("available")
        self._in_progress = engine.table("in_progress")
        self._index = engine.table("visibility_index")
        self._groups = engine.table("groups")
        first_keys = [FirstKeys(each) for each in (self._available, self._in_progress, self._index)]
        self._first_available, self._first_in_progress, self._first_timer = first_keys
        super().__init__(quarantine, first_keys)
        # Messages that were just published (key of `available`: record and item) or claimed (queue
        # and id: item), so that the claim or the ack that follows reads nothing.
        self._fresh: dict[bytes, tuple[bytes, Item]] = {}
        self._claimed: dict[tuple[int, int], Item] = {}
        # FIFO queues that lost a message in flight to corruption: which group is unknown.
        self._recount: set[int] = set()

    # --- memory --------------------------------------------------------------------------

    def load(self, queue: Queue) -> None:
        """Find out which groups are held, which lanes are in use, and what is due first."""
        self._fresh.clear()
        self._claimed.clear()
        self.forget(queue)
        directory = self._directories[queue.number] = Directory(queue.number, self._groups)
        self._queues[queue.number] = queue
        for find in (self._find_held, self._find_timer, lambda _, it: it.find_lanes(self._index)):
            try:
                find(queue, directory)
            except StoreDamaged as error:
                log.error("queue %s: not all of it is known: %s", queue.name, str(error))  # noqa: TRY400
                self.damage[queue.number] = error.anew()
        if queue.fifo and queue.number in self.damage:
            # Order can't be kept without knowing all of it.
            del self._directories[queue.number]
            self._due.set(queue.number, None)

    def drop(self, queue: Queue) -> None:
        """Let go of a queue that was deleted, and of where its ranges begin."""
        super().drop(queue)
        for first_keys in (self._first_available, self._first_in_progress):
            first_keys.forget(queue.number4)
        self._first_timer.forget(DELAYED + queue.number4, READY + queue.number4)

    def _find_held(self, queue: Queue, directory: Directory) -> None:
        if queue.fifo and directory.find_held(self._quarantine):
            self._recount.add(queue.number)

    def _find_timer(self, queue: Queue, directory: Directory) -> None:
        delayed = DELAYED + directory.prefix[1:]
        first = self._first_timer.scan(delayed, past(delayed), 1)
        self._due.set(queue.number, visible_at_of_timer(first[0][0]) if first else None)

    def ready_groups(self, queue: Queue) -> int:
        """Return how many groups have something to claim, as far as memory knows."""
        return len(self._directories[queue.number].ring) or len(self._recount)

    # --- in ------------------------------------------------------------------------------

    def add(self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int) -> None:
        """Write the record and its index entry for each message."""
        directory = self._directories[queue.number]
        put = batch.put
        available, index = self._available.family, self._index.family
        number4, fifo, fresh = queue.number4, queue.fifo, self._fresh
        if len(fresh) > RECENT_ITEMS:
            fresh.clear()
        delayed = 0
        ready: dict[bytes, list[bytes]] = {}
        # Messages that follow one another often have all of these in common.
        last_lane, last_time, attempts, forgiven = b"", -1, -1, -1
        for item in items:
            if fifo:
                item.lane = item.lane[:-1] + _NO_PRIORITY
            lane, visible_at = item.lane, item.visible_at_ms
            if (
                lane != last_lane
                or visible_at != last_time
                or item.attempts != attempts
                or item.forgiven != forgiven
            ):
                last_lane, last_time = lane, visible_at
                attempts, forgiven = item.attempts, item.forgiven
                key_start = directory.prefix + lane + (0 if fifo else visible_at).to_bytes(8, "big")
                head = item_head(lane, attempts, forgiven, visible_at)
                keys = ready.setdefault(lane, [])
            message_id = item.key = item.message_id
            id8 = message_id.to_bytes(8, "big")
            main, key = number4 + id8, key_start + id8
            record = head + item.metadata
            put(main, record, available)
            if visible_at > now_ms:
                delayed += 1
                timer = timer_key(queue.number, visible_at, message_id)
                put(timer, main + lane, index)
                self._first_timer.note(timer[:_REGION_BYTES], timer)
                self._due.lower(queue.number, visible_at)
                if not fifo:
                    continue
            if len(record) <= RECENT_BYTES:
                fresh[main] = (record, item)
            put(key, b"", index)
            keys.append(key)
        for lane, keys in ready.items():
            is_first = keys and directory.add(lane, keys, learn=not fifo and not self.damage)
            if is_first and fifo and delayed < len(items):
                # It may stand before the head that the group waits for.
                directory.unblock(lane[:-1])
        lowest = pack_main(queue.number, min(map(_key_of, items), default=_MAX_ID))
        if lowest < self._first_available.get(number4, number4):
            self._first_available[number4] = lowest
        queue.counts.delayed += delayed
        queue.counts.available += len(items) - delayed
        if queue.spec.max_bytes:
            self._count_bytes(queue, items, 1)

    def _come_due(self, batch: Batch, queue: Queue, now_ms: int, budget: int) -> list[int]:
        """Move index entries from delayed to ready, in the order in which they came due."""
        prefix = DELAYED + queue.number4
        # One more than the budget tells when the next is due.
        try:
            rows = self._first_timer.scan(prefix, past(prefix), budget + 1)
        except StoreDamaged as error:
            self.damage[queue.number] = error.anew()
            rows, _ = scan_readable(self._index, prefix, past(prefix), budget + 1)
        due = list(takewhile(lambda row: visible_at_of_timer(row[0]) <= now_ms, rows[:budget]))
        for key, value in due:
            self._move_due(batch, queue, key, value)
        rest = rows[len(due) :]
        self._due.set(queue.number, visible_at_of_timer(rest[0][0]) if rest else None)
        return [int.from_bytes(key[-8:], "big") for key, _ in due]

    def _move_due(self, batch: Batch, queue: Queue, key: bytes, value: bytes) -> None:
        directory = self._directories[queue.number]
        batch.delete(key, self._index.family)
        main, lane = main_of(key), value[12:]
        if value[:12] != main or not lane:
            # The entry's value is damaged; the message knows its lane.
            item = self._waiting(queue, [main])[0]
            if item is None:
                self._heal(batch, queue, key)
                return
            lane = item.lane
        if queue.fifo:
            ready = directory.prefix + lane + bytes(8) + main[4:]
        else:
            ready = directory.prefix + lane + key[-16:]
            batch.put(ready, b"", self._index.family)
        directory.offer(lane, ready)
        directory.unblock(group_of(lane))

    # --- claim ---------------------------------------------------------------------------

    def take(
        self,
        batch: Batch,
        queue: Queue,
        limit: int,
        grants: Iterator[Grant],
        now_ms: int,  # noqa: ARG002
    ) -> list[Item]:
        """Visit groups in turn until the limit is reached or no group has more."""
        directory = self._directories[queue.number]
        if queue.number in self._recount:
            self._recount_held(batch, queue, directory)
        ring = directory.ring
        taken: list[Item] = []
        while ring and len(taken) < limit:
            want = limit - len(taken)
            visits = min(len(ring), want)
            keys: list[tuple[bytes, bytes]] = []
            for visit in range(visits):
                group, lanes = next(iter(ring.items()))
                # Groups after this one share the room that it does not use.
                room = (want - len(keys)) // (visits - visit)
                if queue.fifo:
                    keys += self._visit_fifo(batch, queue, group, room)
                else:
                    rows = self._visit(queue, lanes, room)
                    keys += [r for r in rows if not self._is_passed(r)] if self.passed else rows
                    if lanes:
                        ring.move_to_end(group)
                    else:
                        del ring[group]
            taken += self._move_to_in_progress(batch, queue, keys, grants)
        queue.counts.available -= len(taken)
        queue.counts.in_flight += len(taken)
        return taken

    def _is_passed(self, entry: tuple[bytes, bytes]) -> bool:
        number, key = unpack_main(main_of(entry[0]))
        return key in self.passed.get(number, ())

    def _visit(
        self, queue: Queue, lanes: dict[bytes, bytes], limit: int
    ) -> list[tuple[bytes, bytes]]:
        """Read up to ``limit`` index entries of a group and move its lanes' lowest keys on."""
        directory = self._directories[queue.number]
        picked: list[tuple[bytes, bytes]] = []
        for lane in sorted(lanes) if len(lanes) > 1 else list(lanes):
            room = limit - len(picked)
            if not room:
                break
            if lane in directory.known:
                picked += directory.take_known(lanes, lane, room)
                continue
            end = directory.prefix + lane + PAST
            rows, damage = scan_readable(self._index, lanes[lane], end, room + 1)
            if damage is not None:
                self.damage[queue.number] = damage.anew()
            if len(rows) > room:
                lanes[lane] = rows[room][0]
            elif damage is None or not queue.fifo:
                del lanes[lane]
            elif rows:
                lanes[lane] = rows[-1][0] + b"\0"
            picked += rows[:room]
        return picked

    def _visit_fifo(
        self, batch: Batch, queue: Queue, group: bytes, limit: int
    ) -> list[tuple[bytes, bytes]]:
        """Read the visible head of a FIFO group and hold the group while it is in flight."""
        directory = self._directories[queue.number]
        lanes = directory.ring.pop(group)
        rows = self._visit(queue, lanes, limit)
        visible = self._without_timer(queue, rows)
        if visible < len(rows):
            lane = lane_of_key(rows[visible][0])
            lanes[lane] = min(rows[visible][0], lanes.get(lane, b"\xff"))
        if rows or lanes:
            directory.hold(batch, group, visible, lanes)
        return rows[:visible]

    def _without_timer(self, queue: Queue, rows: Sequence[tuple[bytes, bytes]]) -> int:
        """Count the first entries of a FIFO group up to one whose message is delayed.

        A message is delayed while its timer is there, however late the timer may be moved.
        """
        if self.passed:
            rows = list(takewhile(lambda row: not self._is_passed(row), rows))
        due_ms = self._due.ranks.get(queue.number)
        if due_ms is None:
            return len(rows)
        mains = [main_of(key) for key, _ in rows]
        # A record that does not decode does not hold the group: it is put aside further on.
        times = [
            visible_at_of(record) if isinstance(record, bytes) else 0
            for record in get_each(self._available, mains)
        ]
        timers = [
            timer_key(queue.number, time, int.from_bytes(main[4:], "big"))
            for time, main in zip(times, mains, strict=True)
        ]
        found = get_each(self._index, timers) if max(times, default=0) >= due_ms else []
        self.unread += [timer for timer in found if isinstance(timer, StoreDamaged)]
        return next((at for at, timer in enumerate(found) if timer is not None), len(rows))

    def _move_to_in_progress(
        self, batch: Batch, queue: Queue, rows: list[tuple[bytes, bytes]], grants: Iterator[Grant]
    ) -> list[Item]:
        directory = self._directories[queue.number]
        put, delete = batch.put, batch.delete
        available, index = self._available.family, self._index.family
        in_progress = self._in_progress.family
        number, fresh, claimed = queue.number, self._fresh, self._claimed
        if len(claimed) > RECENT_ITEMS:
            claimed.clear()
        unknown = []
        for key, _ in rows:
            main = key[1:5] + key[-8:]
            if main not in fresh:
                unknown.append(main)
        found = get_each(self._available, unknown) if unknown else ()
        read = dict(zip(unknown, found, strict=True))
        items: list[Item] = []
        unread: set[bytes] = set()
        for key, _ in rows:
            main = key[1:5] + key[-8:]
            record, item = fresh.pop(main, None) or (read.get(main), None)
            if isinstance(record, StoreDamaged):
                # A kept error keeps the frames that it came through, with handles of tables.
                self.pass_over(queue, {unpack_main(main)[1]: record.anew()})
                unread.add(group_of(lane_of_key(key)))
            if unread and queue.fifo and (group := group_of(lane_of_key(key))) in unread:
                # The messages behind it wait for it.
                directory.offer(lane_of_key(key), key)
                directory.unhold(batch, group, 1)
                continue
            if isinstance(record, StoreDamaged):
                continue
            delete(key, index)
            if record is None:
                self._heal(batch, queue, key)
                continue
            delete(main, available)
            try:
                item = item or item_of(main, record)
            except CorruptRecord as error:
                self._quarantine("available", main, record, str(error))
                queue.counts.available -= 1
                directory.unhold(batch, group_of(lane_of_key(key)), 1)
                continue
            item.lease = lease = next(grants)[0]
            put(main, with_lease(record, lease), in_progress)
            if item.attempts < MAX_ATTEMPTS:
                item.attempts += 1
            if len(record) <= RECENT_BYTES:
                claimed[number, item.key] = item
            items.append(item)
        if items:
            lowest, number4 = pack_main(number, min(map(_key_of, items))), queue.number4
            if lowest < self._first_in_progress.get(number4, number4):
                self._first_in_progress[number4] = lowest
            self._first_available.note_gone(number4, number4 + PAST, len(items))
        return items

    def _heal(self, batch: Batch, queue: Queue, key: bytes) -> None:
        """Count and tell of an index entry without its message; the caller has deleted it."""
        self.healed += 1
        queue.counts.available = max(0, queue.counts.available - 1)
        log.warning("queue %s: removed an index entry without a message: %s", queue.name, key.hex())
        self._directories[queue.number].unhold(batch, group_of(lane_of_key(key)), 1)

    def _lose_entries(self, queue: Queue, main: bytes) -> None:
        """Put the index entries of a lost message aside: nothing else knows which they are."""
        for region in (DELAYED + queue.number4, READY + queue.number4):
            for key, value in rows_of(self._index, region, past(region)):
                if key[-8:] == main[4:]:
                    self._lose(queue, key, value)

    def _lose(self, queue: Queue, key: bytes, value: bytes) -> None:
        """Put an index entry aside that leads to no message, and count its message off."""
        if not self._quarantine("visibility_index", key, value, "leads to no message"):
            return
        self.healed += 1
        counts = queue.counts
        region = DELAYED + queue.number4
        timers = rows_of(self._index, region, past(region)) if queue.fifo else ()
        if key[:1] == DELAYED:
            counts.delayed = max(0, counts.delayed - 1)
        elif not any(timer[-8:] == key[-8:] for timer, _ in timers):
            counts.available = max(0, counts.available - 1)

    # --- in flight -----------------------------------------------------------------------

    def find(self, queue: Queue, keys: Sequence[int]) -> list[Item | None]:
        """Look messages up in flight."""
        number, claimed = queue.number, self._claimed
        found = [claimed.get((number, key)) for key in keys]
        if None not in found:
            return found
        missing = [at for at, item in enumerate(found) if item is None]
        mains = [pack_main(number, keys[at]) for at in missing]
        records = self._in_progress.multi_get(mains)
        for at, main, record in zip(missing, mains, records, strict=True):
            if record is not None:
                found[at] = self._item(queue, State.IN_FLIGHT, main, record)
        return found

    def live(
        self,
        queue: Queue,
        message_ids: Sequence[int],
        most: int | None = None,  # noqa: ARG002
    ) -> list[Item]:
        """Look messages up by their ids, which are their keys here."""
        found = [*self.waiting(queue, message_ids), *self.find(queue, message_ids)]
        return [item for item in found if item is not None]

    def in_flight_by_message(self, queue: Queue, message_id: int) -> Item | None:
        """Look a message up in flight: here its id is its key."""
        return self.find(queue, [message_id])[0]

    def settle(self, batch: Batch, queue: Queue, items: Sequence[Item]) -> None:
        """Delete in-progress records, and let go of FIFO groups."""
        delete, family, number = batch.delete, self._in_progress.family, queue.number
        forget = self._claimed.pop
        for item in items:
            forget((number, item.key), None)
            delete(pack_main(number, item.key), family)
        queue.counts.in_flight -= len(items)
        if queue.spec.max_bytes:
            self._count_bytes(queue, items, -1)
        if queue.fifo:
            self._directories[number].unhold_all(batch, items)

    def put_back(self, batch: Batch, queue: Queue, items: Sequence[Item], now_ms: int) -> None:
        """Move in-progress records back to available."""
        for item in items:
            item.lease = NO_LEASE
        # Added first: on a FIFO queue the group is let go with its head back in place.
        self.add(batch, queue, items, now_ms)
        self.settle(batch, queue, items)

    def relabel(self, batch: Batch, queue: Queue, items: Sequence[Item], lease: bytes) -> None:
        """Write another split of the lease into in-progress records."""
        mains = [pack_main(queue.number, item.key) for item in items]
        for main, record in zip(mains, self._in_progress.multi_get(mains), strict=True):
            assert record is not None
            batch.put(main, with_lease(record, lease), self._in_progress.family)
        for item in items:
            item.lease = lease

    def _recount_held(self, batch: Batch, queue: Queue, directory: Directory) -> None:
        """Count anew what each FIFO group has in flight."""
        counts: Counter[bytes] = Counter()
        for main, record in rows_of(self._in_progress, queue.number4, past(queue.number4)):
            item = self._item(queue, State.IN_FLIGHT, main, record)
            if item is not None:
                counts[group_of(item.lane)] += 1
        self._recount.discard(queue.number)
        for group, held in list(directory.held.items()):
            if held.count:
                directory.unhold(batch, group, held.count - counts[group])

    # --- waiting -------------------------------------------------------------------------

    def waiting(self, queue: Queue, keys: Sequence[int]) -> list[Item | None]:
        """Look messages up among available and delayed."""
        return self._waiting(queue, [pack_main(queue.number, key) for key in keys])

    def _waiting(self, queue: Queue, mains: list[bytes]) -> list[Item | None]:
        return [
            None if record is None else self._item(queue, State.AVAILABLE, main, record)
            for main, record in zip(mains, self._available.multi_get(mains), strict=True)
        ]

    def remove(self, batch: Batch, queue: Queue, items: Sequence[Item]) -> None:
        """Delete records with whichever index entries they have."""
        self.unpass(queue, items)
        directory = self._directories[queue.number]
        timers = [timer_key(queue.number, item.visible_at_ms, item.message_id) for item in items]
        for item in items:
            self._fresh.pop(pack_main(queue.number, item.key), None)
        gone: dict[bytes, set[bytes]] = {}
        for item, timer, delayed in zip(items, timers, self._index.multi_get(timers), strict=True):
            slot = pack_slot(0 if queue.fifo else item.visible_at_ms, item.message_id)
            key = directory.prefix + item.lane + slot
            batch.delete(pack_main(queue.number, item.key), self._available.family)
            batch.delete(key, self._index.family)
            gone.setdefault(item.lane, set()).add(key)
            if delayed is None:
                queue.counts.available -= 1
            else:
                batch.delete(timer, self._index.family)
                queue.counts.delayed -= 1
        if queue.spec.max_bytes:
            self._count_bytes(queue, items, -1)
        for lane, keys in gone.items():
            directory.move_on(lane, keys, self._index)
            if queue.fifo:
                directory.unblock(group_of(lane))

    def page(
        self, queue: Queue, state: State, after: bytes, limit: int
    ) -> tuple[list[Item], bytes | None]:
        """Read a page: available in claim order, delayed by due time, in flight by id."""
        number = queue.number4
        prefix = {State.IN_FLIGHT: b"", State.AVAILABLE: READY, State.DELAYED: DELAYED}[state]
        if after and not after.startswith(prefix + number):
            raise InvalidInput("not a cursor of this queue and state; pass a page's next_cursor")
        if state is State.IN_FLIGHT:
            rows = self._first_in_progress.page(number, past(number), after, limit + 1)
            found = [self._item(queue, state, main, record) for main, record in rows[:limit]]
        else:
            if state is State.AVAILABLE and not (after or self.passed or self.damage):
                after = self._directories[queue.number].lowest()
            region = prefix + number
            rows = self._first_timer.page(region, past(region), after, limit + 1)
            mains = [main_of(key) for key, _ in rows[:limit]]
            found = self._waiting(queue, mains)
            for (key, value), item in zip(rows, found, strict=False):
                if item is None:
                    self._lose(queue, key, value)
        items = [item for item in found if item is not None]
        if state is State.AVAILABLE and queue.fifo:
            # A delayed FIFO message stands in the order too; it is shown as delayed only.
            timers = [timer_key(queue.number, item.visible_at_ms, item.key) for item in items]
            delayed = self._index.multi_get(timers)
            items = [item for item, timer in zip(items, delayed, strict=True) if timer is None]
        return items, rows[limit][0] if len(rows) > limit else None

    def oldest_ms(self, queue: Queue, now_ms: int) -> int | None:
        """Read the first messages of the lanes whose lowest keys are oldest."""
        directory = self._directories[queue.number]
        keys = (key for lanes in directory.all_lanes() for key in lanes.values())
        mains = [
            main_of(row[0])
            for key in nsmallest(MOST_HEADS, islice(keys, MOST_LANES), key=slot_of)
            for row in self._index.scan(key, directory.prefix + lane_of_key(key) + PAST, 1)
        ]
        items = self._waiting(queue, mains)
        times = [item.visible_at_ms for item in items if item is not None]
        return min((time_ms for time_ms in times if time_ms <= now_ms), default=None)

    def oldest(self, queue: Queue, limit: int) -> list[Item]:
        """Return the waiting messages with the lowest ids."""
        rows = self._first_available.scan(queue.number4, past(queue.number4), limit)
        found = [self._item(queue, State.AVAILABLE, *row) for row in rows]
        return [item for item in found if item is not None]

    def beliefs(self, queue: Queue) -> Beliefs:
        """Tell what the directory says; what is kept of late must be as the tables have it."""
        number, directory = queue.number, self._directories[queue.number]
        found = directory.beliefs(self._index, lambda head: not self._without_timer(queue, head))
        due_ms = self._due.ranks.get(number)
        if due_ms is not None:
            found.bounds["delays",] = due_ms
        for main in differing(
            number, self._fresh, self._claimed, self._available, self._in_progress
        ):
            found.facts["kept of late", main] = True
        return found

    def _item(self, queue: Queue, state: State, main: bytes, record: bytes) -> Item | None:
        """Decode a record, or have it put aside."""
        in_flight = state is State.IN_FLIGHT
        try:
            item = item_of(main, record)
        except CorruptRecord as error:
            table = "in_progress" if in_flight else "available"
            if not self._quarantine(table, main, record, str(error)):
                return None
            if in_flight:
                queue.counts.in_flight -= 1
                if queue.fifo:
                    self._recount.add(queue.number)
            else:
                self._lose_entries(queue, main)
            return None
        if in_flight:
            count_attempt(item)
        return item
