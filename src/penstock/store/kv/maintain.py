"""Timed work and mass moves: sweep, retention, purge, redrive, move, deletion of queues.

``sweep`` does what is due within a budget and says when the next thing is due; nothing here
loops on its own. What touches many messages goes in commits of bounded size, so that neither
memory nor a commit grows with the depth of a queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from penstock.errors import CorruptRecord, InvalidInput, InvalidQueue, StoreDamaged
from penstock.model import State, SweepCounts
from penstock.store.codec.metadata import decode_metadata
from penstock.store.live import Item, lane_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.engines import Batch
    from penstock.model import QueueSpec
    from penstock.store.codec.metadata import Metadata
    from penstock.store.kv.history import Ended
    from penstock.store.kv.move import Moving
    from penstock.store.kv.queues import Queue
    from penstock.store.kv.routing import Routing
    from penstock.store.kv.settle import Overdue, Settling
    from penstock.store.kv.state import Core

__all__ = ["ALL", "Upkeep"]

T = TypeVar("T")

# Messages per commit of a mass move.
CHUNK: Final = 1_000
# A budget for verbs that must see everything that is due.
ALL: Final = 1_000_000
# Rows that could not be read are left alone for so long: a disk may get over it.
LOOK_AGAIN_MS: Final = 60_000


class Upkeep:
    """Sweeping, purging, redriving."""

    def __init__(self, core: Core, settling: Settling, routing: Routing, moving: Moving) -> None:
        self._core = core
        self._settling = settling
        self._routing = routing
        self._moving = moving
        # Parts of a sweep that have met what can't be read, and when that is looked at again.
        self._stuck: dict[Callable[[int, int], object], StoreDamaged] = {}
        self._look_again_ms = 0

    # --- what is due -----------------------------------------------------------------------

    def catch_up(self, now_ms: int, budget: int) -> tuple[int, int, int, int]:
        """End leases and delays that are over, and move what has failed to where it belongs.

        Gives how many leases, delays, failures and moves: none while nothing can be written. If
        something can't be read, the rest is seen to before that is raised.
        """
        core = self._core
        overdue: list[Overdue] = []
        damage: StoreDamaged | None = None
        failures = 0
        if core.engine.away is not None:
            return 0, 0, 0, 0
        if core.leases.may_be_due(now_ms):
            overdue, damage = self._settling.overdue(now_ms, budget)
        if overdue:
            batch = core.begin()
            touched, failures = self._settling.expire(batch, overdue, now_ms)
            core.commit(batch, touched, now_ms)
        came_due = 0
        next_due_ms = core.active.next_due_ms()
        if next_due_ms is not None and next_due_ms <= now_ms:
            batch = core.begin()
            moved = core.active.come_due(batch, now_ms, budget)
            came_due = sum(count for _, count in moved)
            core.commit(batch, [queue for queue, _ in moved], now_ms)
            for queue, _ in moved:
                core.wake(queue)
        dead = self._moving.dead_letters(now_ms, budget) if core.dead_letters else 0
        if damage is not None:
            raise damage
        return len(overdue), came_due, failures, dead

    def sweep(self, now_ms: int, budget: int) -> SweepCounts:
        """Do what is due, up to about ``budget`` things; say what was done and what is next.

        If something can't be read, the rest is done before that is raised.
        """
        core = self._core
        damage: list[StoreDamaged] = []

        def do(part: Callable[[int, int], T], nothing: T) -> T:
            try:
                if part in self._stuck:
                    raise self._stuck[part].anew()
                return core.run(part, now_ms, budget)
            except StoreDamaged as error:
                damage.append(error)
                self._stuck[part] = error.anew()
                return nothing

        # Leases and delays never wait.
        self._stuck.pop(self.catch_up, None)
        leases, came_due, failures, moved = do(self.catch_up, (0, 0, 0, 0))
        do(self._list_unclaimed, None)
        parts = (self._retention, self._trim_log, self._remove_drained)
        removed = sum(do(part, 0) for part in parts)
        forgotten = do(self._forget_dedup, 0)
        core.settle_quarantine(now_ms)
        damage += [*core.unscheduled.values(), *core.active.damage.values()]
        if damage:
            self._look_again(now_ms)
            raise damage[0].anew()
        return SweepCounts(
            leases_expired=leases,
            came_due=came_due,
            failed=failures,
            moved=moved,
            removed=removed,
            dedup_forgotten=forgotten,
            next_due_ms=now_ms if self._has_more() else self.next_due_ms(),
        )

    def _look_again(self, now_ms: int) -> None:
        """Try now and then to read again what could not be read."""
        core = self._core
        if now_ms < self._look_again_ms:
            return
        self._look_again_ms = now_ms + LOOK_AGAIN_MS
        self._stuck.clear()
        for number in list(core.active.damage):
            core.active.load(core.by_number[number])
        for number, _ in list(core.unscheduled):
            core.schedule_retention(core.by_number[number])

    def _forget_dedup(self, now_ms: int, budget: int) -> int:
        batch = self._core.begin()
        forgotten = self._core.dedup.forget(batch, now_ms, budget)
        if len(batch):
            self._core.commit(batch, (), now_ms)
        return forgotten

    def _has_more(self) -> bool:
        """Whether there is something to do at once, for which the budget was too small."""
        core = self._core
        return bool(core.dead_letters or core.listing or self._drained())

    def next_due_ms(self) -> int | None:
        """Return when the next lease, delay, retention or dedup window is over."""
        core = self._core
        retention = core.retention.first()
        times = (
            core.leases.next_due_ms(),
            core.active.next_due_ms(),
            retention[0] if retention else None,
            core.dedup.next_due_ms(),
            core.log.next_due_ms(self._routing.routed_up_to()),
        )
        return min((time for time in times if time is not None), default=None)

    def soonest_ms(self) -> int | None:
        """Return a time before which no lease, delay or retention is over, from memory alone."""
        core = self._core
        if core.dead_letters or core.listing:
            return 0
        retention = core.retention.first()
        times = (
            core.leases.none_before_ms,
            core.active.next_due_ms(),
            retention[0] if retention else None,
        )
        return min((time for time in times if time is not None), default=None)

    def _retention(self, now_ms: int, budget: int) -> int:
        """Remove what is past retention; the budget counts what is looked at."""
        core = self._core
        removed = 0
        stuck: dict[tuple[int, str], StoreDamaged] = {}
        while budget > 0 and (first := core.retention.first()) and first[0] <= now_ms:
            number, what = first[1]
            try:
                looked, gone = core.run(
                    self._retain, core.by_number[number], what, now_ms, min(CHUNK, budget)
                )
            except StoreDamaged as error:
                stuck[number, what] = error.anew()
                core.unscheduled.update(stuck)
                for key in stuck:
                    # Others are not to wait for it.
                    core.retention.set(key, None)
                continue
            removed += gone
            budget -= max(1, looked)
        return removed

    def _retain(self, queue: Queue, what: str, now_ms: int, limit: int) -> tuple[int, int]:
        """Remove some of what is past one retention of a queue; give looked at, and removed."""
        core = self._core
        batch = core.begin()
        if what == "unclaimed":
            looked, gone = self._expire_unclaimed(batch, queue, now_ms, limit)
        else:
            looked = gone = self._trim(batch, queue, State(what), now_ms, limit)
        core.commit(batch, (queue,), now_ms)
        core.schedule_retention(queue)
        return looked, gone

    def _trim_log(self, now_ms: int, budget: int) -> int:
        """Close a segment that is old enough, and drop the oldest that is past retention."""
        core, log = self._core, self._core.log
        routed_up_to = self._routing.routed_up_to()
        due_ms = log.next_due_ms(routed_up_to)
        if due_ms is None or due_ms > now_ms:
            return 0
        if len(log.segments) == 1:
            batch = core.begin()
            log.roll(batch, log.end, now_ms)
            core.commit(batch, (), now_ms)
        dropped = 0
        while budget > 0 and (segment := log.droppable(now_ms, routed_up_to)) is not None:
            batch = core.begin()
            unrouted = log.drop(batch, segment, min(CHUNK, budget))
            dropped += core.payloads.drop_unheld(batch, unrouted)
            core.commit(batch, (), now_ms)
            budget -= max(1, len(unrouted))
        return dropped

    def _trim(self, batch: Batch, queue: Queue, state: State, now_ms: int, limit: int) -> int:
        spec = queue.spec
        kept_ms = spec.done_retention_ms if state is State.DONE else spec.failed_retention_ms
        entries = self._core.history.trim(batch, queue, state, now_ms - kept_ms, limit)
        self._let_go(batch, queue, entries)
        return len(entries)

    def _expire_unclaimed(
        self, batch: Batch, queue: Queue, now_ms: int, limit: int
    ) -> tuple[int, int]:
        """Look at messages that were to expire by now; say how many, and how many have."""
        core = self._core
        keys = core.take_unclaimed(batch, queue, now_ms, limit)
        kept_ms = queue.spec.unclaimed_retention_ms
        # A message may have been claimed and come back since the row was written: judge it anew.
        expired = [
            item
            for item in core.active.waiting(queue, list(dict.fromkeys(keys)))
            if item is not None and kept_ms and item.visible_at_ms + kept_ms <= now_ms
        ]
        self._remove_waiting(batch, queue, expired)
        return len(keys), len(expired)

    # --- purge and delete ------------------------------------------------------------------

    def purge(
        self, queue_name: str, states: Iterable[State], now_ms: int, *, limit: int | None = None
    ) -> int:
        """Remove messages of a queue that are in one of the states, up to a limit; say how many."""
        queue = self._core.queue(queue_name)
        self.catch_up(now_ms, ALL if limit is None else limit)
        removed = 0
        for state in states:
            while limit is None or removed < limit:
                room = CHUNK if limit is None else min(CHUNK, limit - removed)
                count = self._purge_chunk(queue, state, now_ms, room)
                removed += count
                if not count:
                    break
        if limit is None or removed < limit:
            # What memory knew of groups and lanes is void.
            self._core.active.load(queue)
        self._core.schedule_retention(queue)
        self._core.wake(queue)
        return removed

    def _purge_chunk(self, queue: Queue, state: State, now_ms: int, room: int) -> int:
        core = self._core
        batch = core.begin()
        if state in {State.DONE, State.FAILED}:
            ended = core.history.trim(batch, queue, state, now_ms, room)
            self._let_go(batch, queue, ended)
            count = len(ended)
        else:
            items, more = core.active.page(queue, state, b"", room)
            while not items and more is not None:
                items, more = core.active.page(queue, state, more, room)
            count = len(items)
            if state is State.IN_FLIGHT:
                self._settling.abandon(batch, items)
                core.active.settle(batch, queue, items)
                self.forget(batch, queue, items)
            else:
                self._remove_waiting(batch, queue, items)
        if count or core.has_aside:
            core.commit(batch, (queue,), now_ms)
        return count

    def trim(
        self,
        queue_name: str,
        state: State,
        before: int,
        now_ms: int,
        *,
        limit: int,
        created_at_ms: int | None = None,
    ) -> int:
        """Remove done or failed messages whose sequence number is below ``before``, up to a limit.

        Sequences of a queue that was deleted and made anew begin anew: nothing is removed if it
        was not made at ``created_at_ms``.
        """
        core = self._core
        queue = core.queue(queue_name)
        if created_at_ms is not None and queue.spec.created_at_ms != created_at_ms:
            return 0
        batch = core.begin()
        entries = core.history.trim_to(batch, queue, state, before, limit)
        if entries:
            self._let_go(batch, queue, entries)
            core.commit(batch, (queue,), now_ms)
        core.schedule_retention(queue)
        return len(entries)

    def delete_queue(self, queue_name: str, now_ms: int) -> int:
        """Remove a queue with everything in it; say how many messages went."""
        core = self._core
        queue = core.queue(queue_name)
        removed = self.purge(queue_name, State, now_ms)
        batch = core.begin()
        core.clear_unclaimed(batch, queue)
        core.history.clear(batch, queue)
        core.remove_queue(batch, queue)
        core.filters_changed(batch, core.log.end, now_ms)
        core.commit(batch, (), now_ms)
        core.drop(queue)
        return removed

    def drain_queue(self, queue_name: str, now_ms: int) -> None:
        """Let no more messages in; a sweep removes the queue once nothing waits in it."""
        core = self._core
        queue = core.queue(queue_name)
        batch = core.begin()
        coverage = core.coverage[queue.name]
        coverage.close(core.log.end)
        coverage.draining = True
        core.put_coverage(batch, queue, coverage)
        core.filters_changed(batch, core.log.end, now_ms)
        core.commit(batch, (queue,), now_ms)
        self._remove_drained(now_ms, CHUNK)

    def _remove_drained(self, now_ms: int, budget: int) -> int:
        """Remove drained queues with their history, up to a budget of messages."""
        removed = 0
        for name in self._drained():
            if removed < budget:
                removed += self.purge(
                    name, (State.DONE, State.FAILED), now_ms, limit=budget - removed
                )
            if removed < budget:
                removed += self.delete_queue(name, now_ms)
        return removed

    def _drained(self) -> list[str]:
        """Name the queues that take no more messages and have nothing that waits."""
        core = self._core
        if not core.draining:
            return []
        routed_up_to = self._routing.routed_up_to()
        found = []
        for name in sorted(core.draining):
            queue, live = core.queues[name], core.coverage[name].live
            counts = queue.counts
            waits = counts.available or counts.delayed or counts.in_flight
            waits = waits or queue in core.dead_letters
            if not waits and (not live or (live[-1].end or 0) <= routed_up_to):
                found.append(name)
        return found

    def _remove_waiting(self, batch: Batch, queue: Queue, items: Sequence[Item]) -> None:
        self._core.active.remove(batch, queue, items)
        self.forget(batch, queue, items)

    def forget(self, batch: Batch, queue: Queue, items: Sequence[Item]) -> None:
        """Let go of the payloads and attempts of live messages that were removed."""
        core = self._core
        core.payloads.let_go(batch, [item.message_id for item in items])
        core.history.forget_attempts(batch, queue, [(i.message_id, i.attempts) for i in items])
        queue.counts.removed_total += len(items)

    def _let_go(self, batch: Batch, queue: Queue, entries: Sequence[Ended]) -> None:
        """Let go of the payloads and attempts of messages that leave the history."""
        core = self._core
        core.payloads.let_go(batch, [entry.message_id for entry in entries])
        core.history.forget_attempts(batch, queue, [(e.message_id, e.attempts) for e in entries])
        queue.counts.removed_total += len(entries)

    # --- redrive ---------------------------------------------------------------------------

    def redrive(
        self,
        queue_name: str,
        *,
        message_ids: Sequence[int] | None,
        where: Callable[[Metadata], bool] | None,
        after: bytes,
        now_ms: int,
    ) -> tuple[int, bytes | None]:
        """Make failed messages available again, by ids or a page of them, if they are selected.

        Say how many, and where the next page begins.
        """
        core = self._core
        queue = core.queue(queue_name)
        self.catch_up(now_ms, ALL)
        if message_ids is not None:
            chosen = self._chosen(core.history.find_failed(queue, message_ids), where)
            return self._redrive(queue, chosen, now_ms), None
        entries, further = core.history.page(queue, State.FAILED, after, CHUNK, whole_parts=True)
        return self._redrive(queue, self._chosen(entries, where), now_ms), further

    def _chosen(
        self, entries: Sequence[Ended], where: Callable[[Metadata], bool] | None
    ) -> list[tuple[Ended, bytes]]:
        chosen = []
        for entry in entries:
            try:
                metadata = decode_metadata(entry.metadata)
            except CorruptRecord:
                continue
            if where is None or where(metadata):
                chosen.append((entry, lane_of(metadata.group, metadata.priority)))
        return chosen

    def _redrive(self, queue: Queue, chosen: Sequence[tuple[Ended, bytes]], now_ms: int) -> int:
        if not chosen:
            return 0
        core = self._core
        batch = core.begin()
        core.history.take(batch, queue, State.FAILED, [entry for entry, _ in chosen])
        items = [
            Item(e.key, e.message_id, lane, e.attempts, e.attempts, now_ms, e.metadata)
            for e, lane in chosen
        ]
        core.active.add(batch, queue, items, now_ms)
        core.note_unclaimed(batch, queue, items, [now_ms] * len(items))
        queue.counts.redriven_total += len(items)
        core.commit(batch, (queue,), now_ms)
        core.wake(queue)
        return len(items)

    # --- move ------------------------------------------------------------------------------

    def move(
        self,
        queue_name: str,
        to_name: str,
        *,
        state: State,
        message_ids: Sequence[int] | None,
        limit: int | None,
        now_ms: int,
    ) -> int:
        """Move messages in a state into another queue: all, by ids, so many; say how many."""
        self._moving.check(queue_name, to_name)
        self.catch_up(now_ms, ALL)
        queue, to = self._core.queue(queue_name), self._core.queue(to_name)
        return self._moving.move(queue, to, state, message_ids, limit, now_ms)

    # --- changed settings ------------------------------------------------------------------

    def _list_unclaimed(self, now_ms: int, budget: int) -> None:
        """List waiting messages to expire, of queues whose retention has changed.

        What comes into such a queue, or comes back, is listed as it does.
        """
        core = self._core
        while budget > 0 and core.listing:
            name, (state, after) = next(iter(core.listing.items()))
            queue = core.queues[name]
            try:
                items, further = core.active.page(queue, state, after, min(CHUNK, budget))
            except InvalidInput:
                # The cursor was damaged: what is listed twice does no harm.
                items, further = [], b""
            batch = core.begin()
            core.note_unclaimed(batch, queue, items, [item.visible_at_ms for item in items])
            if further is not None:
                core.put_listing(batch, queue, (state, further))
            elif state is State.DELAYED:
                core.put_listing(batch, queue, (State.AVAILABLE, b""))
            else:
                core.put_listing(batch, queue, None)
            core.commit(batch, (queue,), now_ms)
            budget -= max(1, len(items))

    def respec(self, queue: Queue, spec: QueueSpec, from_offset: int | None, now_ms: int) -> None:
        """Change a queue's settings; another filter counts from an offset on (the log's end)."""
        core = self._core
        begin = core.log.end if from_offset is None else from_offset
        lowest = self._routing.routed_up_to()
        if not lowest <= begin <= core.log.end:
            raise InvalidInput(
                f"a filter can change from an offset in {lowest} (routed up to there) to "
                f"{core.log.end} (the end of the log), not from {begin}"
            )
        retention_changed = spec.unclaimed_retention_ms != queue.spec.unclaimed_retention_ms
        coverage = core.coverage[queue.name]
        filter_changed = spec.filter != queue.spec.filter or from_offset is not None
        if filter_changed and coverage.draining:
            raise InvalidQueue(f"queue {queue.name!r} is draining: its filter can't be changed")
        batch = core.begin()
        queue.respec(spec)
        core.dead_letters.adopt(queue)
        core.put_spec(batch, queue)
        if filter_changed:
            coverage.change(begin, spec.filter)
            core.put_coverage(batch, queue, coverage)
            core.filters_changed(batch, begin, now_ms)
        if retention_changed:
            core.clear_unclaimed(batch, queue)
            listing = (State.DELAYED, b"") if spec.unclaimed_retention_ms else None
            core.put_listing(batch, queue, listing)
        core.commit(batch, (queue,), now_ms)
        core.schedule_retention(queue)
