"""Timed work and the life of queues: sweep, retention, purge, trim; create, change, delete.

``sweep`` does what is due within a budget and says when the next thing is due; nothing here
loops on its own. A verb over many messages goes in commits of bounded size, so that neither memory
nor a commit grows with the depth of a queue.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.errors import InvalidInput, InvalidQueue, StoreDamaged
from penstock.model import Collected, State, SweepCounts
from penstock.store.kv.move import ALL, MoveVerbs
from penstock.store.kv.queues import Counts, Queue
from penstock.store.kv.routing import RoutingVerbs
from penstock.store.kv.state import verb
from penstock.store.life import life, log_step
from penstock.store.policy import Coverage, Stretch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.engines import Batch
    from penstock.model import QueueSpec
    from penstock.store.codec.records import Ended
    from penstock.store.live import Item

# By itself, so that a test can tell.
idle_log = logging.getLogger("penstock.idle")

T = TypeVar("T")

# Messages per commit of a mass move.
CHUNK: Final = 1_000
# Unreadable rows are left alone for so long: a disk may get over it.
LOOK_AGAIN_MS: Final = 60_000
# The pause after a sweep that has changed nothing, although something is due.
IDLE_MS: Final = 1_000


class MaintainVerbs(MoveVerbs, RoutingVerbs):
    """``sweep``, ``purge``, ``trim``, and the verbs that make, change and delete queues."""

    # --- what is due -----------------------------------------------------------------------

    @verb
    def sweep(self, now_ms: int, budget: int) -> SweepCounts:
        """Do what is due, up to about ``budget`` things; say what was done and what is next.

        If something can't be read, the rest is done before that is raised.
        """
        damage: list[StoreDamaged] = []
        commits = self.progress.commits

        def do(part: Callable[[int, int], T], nothing: T) -> T:
            try:
                if part in self.stuck:
                    raise self.stuck[part].anew()
                return part(now_ms, budget)
            except StoreDamaged as error:
                damage.append(error)
                self.stuck[part] = error.anew()
                return nothing

        # Leases and delays never wait.
        self.stuck.pop(self.catch_up, None)
        leases, came_due, failures, moved = do(self.catch_up, (0, 0, 0, 0))
        do(self._list_unclaimed, None)
        parts = (self._retention, self._trim_log, self._remove_drained)
        removed = sum(do(part, 0) for part in parts)
        forgotten = do(self._forget_dedup, 0)
        self.settle_quarantine(now_ms)
        do(self.recount_lost, None)
        damage += [*self.unscheduled.values(), *self.active.damage.values()]
        if damage:
            self._look_again(now_ms)
            raise damage[0].anew()
        # The budget was too small for these.
        pending = self.dead_letters.pending or self.overfull
        has_more = pending or self.listing or self._drained()
        next_due_ms = now_ms if has_more else self.next_due_ms()
        is_idle = self.progress.commits == commits
        if is_idle and next_due_ms is not None and next_due_ms <= now_ms:
            next_due_ms = self._wait_idle(next_due_ms, now_ms)
        else:
            self.was_idle = False
        return SweepCounts(
            leases_expired=leases,
            came_due=came_due,
            failed=failures,
            moved=moved,
            removed=removed,
            dedup_forgotten=forgotten,
            next_due_ms=next_due_ms,
        )

    def _wait_idle(self, due_ms: int, now_ms: int) -> int:
        """Log it, once, that a sweep can't do what is due; return when the next one may try."""
        if self.engine.away is None and not self.was_idle:
            idle_log.error(
                "what has been due since %d ms was not done by a sweep, which changed nothing; "
                "sweeps try again each second: stop the process and run 'penstock check'",
                now_ms - due_ms,
            )
            self.was_idle = True
        return now_ms + IDLE_MS

    def _look_again(self, now_ms: int) -> None:
        """Try now and then to read again what could not be read."""
        if now_ms < self.look_again_ms:
            return
        self.look_again_ms = now_ms + LOOK_AGAIN_MS
        self.stuck.clear()
        for number in list(self.active.damage):
            self.active.load(self.by_number[number])
        for number, _ in list(self.unscheduled):
            self.schedule_retention(self.by_number[number])

    @verb
    def _forget_dedup(self, now_ms: int, budget: int) -> int:
        batch = self.begin()
        forgotten = self.dedup.forget(batch, now_ms, budget)
        if len(batch):
            self.commit(batch, (), now_ms)
        return forgotten

    def next_due_ms(self) -> int | None:
        """Return when the next lease, delay, retention or dedup window is over."""
        log_ms = self.log.next_due_ms(self.routed_up_to())
        return self._earliest_ms(self.leases.next_due_ms(), self.dedup.next_due_ms(), log_ms)

    def soonest_ms(self) -> int | None:
        """Return a time before which no lease, delay or retention is over, from memory alone."""
        if self.dead_letters.pending or self.overfull or self.listing or self.has_lost:
            return 0
        return self._earliest_ms(self.leases.none_before_ms)

    def _earliest_ms(self, *others: int | None) -> int | None:
        """Return the earliest of the next delay's end, the next retention's, and other times."""
        retention = self.retention.first()
        times = (*others, self.active.next_due_ms(), retention[0] if retention else None)
        return min((time for time in times if time is not None), default=None)

    @verb
    def _retention(self, now_ms: int, budget: int) -> int:
        """Remove what is past retention; the budget counts what is looked at."""
        removed = 0
        stuck: dict[tuple[int, str], StoreDamaged] = {}
        while budget > 0 and (first := self.retention.first()) and first[0] <= now_ms:
            number, what = first[1]
            try:
                queue = self.by_number[number]
                looked, gone = self._retain(queue, what, now_ms, min(CHUNK, budget))
            except StoreDamaged as error:
                stuck[number, what] = error.anew()
                self.unscheduled.update(stuck)
                for key in stuck:
                    # Others are not to wait for it.
                    self.retention.set(key, None)
                continue
            if not looked and self.retention.first() == first:
                # It would find the same again.
                break
            removed += gone
            budget -= max(1, looked)
        return removed

    @verb
    def _retain(self, queue: Queue, what: str, now_ms: int, limit: int) -> tuple[int, int]:
        """Remove messages past one retention of a queue; return how many were due, and went."""
        batch = self.begin()
        gone: Sequence[Item | Ended]
        if what == "unclaimed":
            keys = self.take_unclaimed(batch, queue, now_ms, limit)
            looked, kept_ms = len(keys), queue.spec.unclaimed_retention_ms
            # A message may have been claimed and come back since the row was written.
            gone = expired = [
                item
                for item in self.active.waiting(queue, list(dict.fromkeys(keys)))
                if item is not None and kept_ms and item.visible_at_ms + kept_ms <= now_ms
            ]
            self.active.remove(batch, queue, expired)
        else:
            state, spec = State(what), queue.spec
            kept_ms = spec.done_retention_ms if state is State.DONE else spec.failed_retention_ms
            gone = self.history.trim(batch, queue, state, limit, ended_by_ms=now_ms - kept_ms)
            looked = len(gone)
        self.forget(batch, queue, gone)
        if len(batch):
            self.commit(batch, (queue,), now_ms)
        self.log_removed(queue, gone, "retention")
        self.schedule_retention(queue)
        return looked, len(gone)

    @verb
    def _trim_log(self, now_ms: int, budget: int) -> int:
        """Close a segment that is old enough, and drop the oldest that is past retention."""
        log, routed_up_to = self.log, self.routed_up_to()
        dropped = 0
        while budget > 0:
            due_ms = log.next_due_ms(routed_up_to)
            if due_ms is None or due_ms > now_ms:
                break
            batch = self.begin()
            if len(log.segments) == 1:
                log.roll(batch, log.end, now_ms)
            else:
                unrouted = log.drop(batch, log.segments[0], min(CHUNK, budget))
                dropped += self.payloads.drop_unheld(batch, unrouted)
                budget -= max(1, len(unrouted))
            self.commit(batch, (), now_ms)
        return dropped

    # --- purge and delete ------------------------------------------------------------------

    @verb
    def purge(
        self,
        queue_name: str,
        states: Iterable[State],
        now_ms: int,
        *,
        limit: int | None = None,
        before: int | None = None,
        created_at_ms: int | None = None,
        message_ids: Sequence[int] | None = None,
    ) -> int:
        """Remove messages of a queue by state, up to a limit; return how many."""
        queue = self.queue(queue_name)
        # Sequences of a queue that was deleted and made anew begin anew.
        if created_at_ms is not None and queue.spec.created_at_ms != created_at_ms:
            return 0
        if before is None:
            self.catch_up(now_ms, ALL if limit is None else limit)
        if message_ids is not None:
            return self._purge_failed(queue, message_ids, now_ms)
        removed = 0
        for state in states:
            while limit is None or removed < limit:
                room = CHUNK if limit is None else min(CHUNK, limit - removed)
                count = self._purge_chunk(queue, state, now_ms, room, before)
                removed += count
                if not count:
                    break
        if before is None:
            if limit is None or removed < limit:
                # Groups and lanes in memory are void.
                self.active.load(queue)
            self.wake(queue)
        self.schedule_retention(queue)
        return removed

    def _purge_failed(self, queue: Queue, message_ids: Sequence[int], now_ms: int) -> int:
        """Remove failed messages by their ids; return how many."""
        gone = self.history.find_failed(queue, message_ids)
        if gone:
            batch = self.begin()
            self.history.take(batch, queue, State.FAILED, gone)
            self.forget(batch, queue, gone)
            self.commit(batch, (queue,), now_ms)
            self.log_removed(queue, gone, "purge")
        return len(gone)

    def _purge_chunk(
        self, queue: Queue, state: State, now_ms: int, room: int, before: int | None
    ) -> int:
        batch = self.begin()
        gone: Sequence[Item | Ended]
        if state in {State.DONE, State.FAILED}:
            by_ms = now_ms if before is None else None
            gone = self.history.trim(batch, queue, state, room, ended_by_ms=by_ms, before=before)
        else:
            items, more = self.active.page(queue, state, b"", room)
            while not items and more is not None:
                items, more = self.active.page(queue, state, more, room)
            gone = items
            if state is State.IN_FLIGHT:
                self.abandon(batch, items)
                self.active.settle(batch, queue, items)
            else:
                self.active.remove(batch, queue, items)
        self.forget(batch, queue, gone)
        if gone or self.has_aside:
            self.commit(batch, (queue,), now_ms)
        self.log_removed(queue, gone, "purge")
        return len(gone)

    @verb
    def collect(self, message_ids: Sequence[int], now_ms: int, *, dry_run: bool) -> Collected:
        """Delete payloads that nothing refers to.

        The caller has made sure that the log has let go of them and that no queue holds them.
        """
        batch = self.begin()
        count, freed = self.payloads.discard(batch, message_ids)
        if count and not dry_run:
            self.commit(batch, (), now_ms)
        return Collected(count, freed)

    # --- queues ----------------------------------------------------------------------------

    @verb
    def delete_queue(self, queue_name: str, now_ms: int, *, drain: bool = False) -> int:
        """Remove a queue, or (``drain``) have a sweep remove it once nothing waits in it."""
        queue = self.queue(queue_name)
        if drain:
            batch = self.begin()
            coverage = queue.coverage
            coverage.close(self.log.end)
            coverage.draining = True
            self.put_coverage(batch, queue, coverage)
            self.filters_changed(batch, self.log.end, now_ms)
            self.commit(batch, (queue,), now_ms)
            self._remove_drained(now_ms, CHUNK)
            return 0
        removed = self.purge(queue_name, State, now_ms)
        batch = self.begin()
        self.clear_unclaimed(batch, queue)
        self.history.clear(batch, queue)
        self.queue_table.remove(batch, queue)
        self.filters_changed(batch, self.log.end, now_ms)
        self.commit(batch, (), now_ms)
        self.drop(queue)
        return removed

    @verb
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
        if not self.draining:
            return []
        routed_up_to = self.routed_up_to()
        found = []
        for name in sorted(self.draining):
            queue = self.by_name[name]
            counts, live = queue.counts, queue.coverage.live
            waits = counts.available or counts.delayed or counts.in_flight
            waits = waits or queue.number in self.dead_letters.pending
            if not waits and (not live or (live[-1].end or 0) <= routed_up_to):
                found.append(name)
        return found

    def forget(self, batch: Batch, queue: Queue, messages: Sequence[Item | Ended]) -> None:
        """Let go of the payloads and attempts of messages that were removed."""
        self.payloads.let_go(batch, [each.message_id for each in messages])
        attempts = [(each.message_id, each.attempts) for each in messages]
        self.history.forget_attempts(batch, queue, attempts)
        queue.counts.removed_total += len(messages)

    def log_removed(self, queue: Queue, messages: Sequence[Item | Ended], reason: str) -> None:
        """Write the records of the life-cycle log for messages that were removed."""
        if life.level:
            log_step("remove", queue.name, [each.message_id for each in messages], reason=reason)

    # --- changed settings ------------------------------------------------------------------

    @verb
    def _list_unclaimed(self, now_ms: int, budget: int) -> None:
        """List waiting messages to expire, of queues whose retention has changed.

        What comes into such a queue, or comes back, is listed as it does.
        """
        while budget > 0 and self.listing:
            name, (state, after) = next(iter(self.listing.items()))
            queue = self.by_name[name]
            try:
                items, further = self.active.page(queue, state, after, min(CHUNK, budget))
            except InvalidInput:
                # The cursor was damaged: what is listed twice does no harm.
                items, further = [], b""
            batch = self.begin()
            self.note_unclaimed(batch, queue, items)
            if further is not None:
                self.put_listing(batch, queue, (state, further))
            elif state is State.DELAYED:
                self.put_listing(batch, queue, (State.AVAILABLE, b""))
            else:
                self.put_listing(batch, queue, None)
            self.commit(batch, (queue,), now_ms)
            budget -= max(1, len(items))

    @verb
    def create_queue(self, spec: QueueSpec, now_ms: int) -> None:
        """Add a queue, which takes messages from here on."""
        batch = self.begin()
        queue = Queue(spec, self.queue_numbers.allocate(batch, 1), Counts())
        self.queue_table.put_spec(batch, queue)
        live = [Stretch(self.log.end, None, spec.filter)]
        self.put_coverage(batch, queue, Coverage(live, known_from=0))
        self.filters_changed(batch, self.log.end, now_ms)
        self.commit(batch, (queue,), now_ms)
        self.adopt(queue)

    @verb
    def update_queue(self, spec: QueueSpec, now_ms: int, *, from_offset: int | None = None) -> None:
        """Change a queue's settings; another filter counts from an offset on (the log's end)."""
        queue = self.queue(spec.name)
        begin = self.log.end if from_offset is None else from_offset
        lowest = self.routed_up_to()
        if not lowest <= begin <= self.log.end:
            raise InvalidInput(
                f"a filter can change from an offset in {lowest} (routed up to there) to "
                f"{self.log.end} (the end of the log), not from {begin}"
            )
        retention_changed = spec.unclaimed_retention_ms != queue.spec.unclaimed_retention_ms
        coverage = queue.coverage
        filter_changed = spec.filter != queue.spec.filter or from_offset is not None
        if filter_changed and coverage.draining:
            raise InvalidQueue(f"queue {queue.name!r} is draining: its filter can't be changed")
        recount = bool(spec.max_bytes) != bool(queue.spec.max_bytes)
        batch = self.begin()
        queue.respec(spec)
        self.note_limits(queue)
        if recount:
            self.recount_bytes(queue)
        self.dead_letters.adopt(queue)
        self.queue_table.put_spec(batch, queue)
        if filter_changed:
            coverage.change(begin, spec.filter)
            self.put_coverage(batch, queue, coverage)
            self.filters_changed(batch, begin, now_ms)
        if retention_changed:
            self.clear_unclaimed(batch, queue)
            listing = (State.DELAYED, b"") if spec.unclaimed_retention_ms else None
            self.put_listing(batch, queue, listing)
        self.commit(batch, (queue,), now_ms)
        self.schedule_retention(queue)
