"""Timed work and mass moves: sweep, retention, purge, redrive, deletion of queues.

Any number of processes sweep at once. Each step takes rows that nobody else is at (SKIP LOCKED)
and counts what it has taken, so that nothing is done or counted twice.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import CorruptRecord, InvalidInput, InvalidQueue
from penstock.limits import MAX_ATTEMPTS
from penstock.model import State, SweepCounts
from penstock.store.codec.metadata import decode_metadata
from penstock.store.contract import FiltersChanged
from penstock.store.coverage import Coverage, Stretch
from penstock.store.sql.session import SLOTS, Queue
from penstock.store.sql.settle import EXPIRED
from penstock.store.sql.zones import NEVER_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.model import QueueSpec
    from penstock.store.codec.metadata import Metadata
    from penstock.store.sql.move import Moving
    from penstock.store.sql.routing import Routing
    from penstock.store.sql.session import Core
    from penstock.store.sql.settle import Settling

__all__ = ["STATES", "Upkeep"]

log = logging.getLogger(__name__)

# Messages per transaction of a mass move.
CHUNK: Final = 1_000
ALL: Final = 1_000_000
# How often it is looked for ended messages of other processes that are past retention.
LOOK_MS: Final = 10_000
# A publish whose answer was lost is sent again for seconds, not for minutes.
REQUESTS_MS: Final = 600_000
# As the statements number the states of live items.
STATES: Final = {State.AVAILABLE: 0, State.DELAYED: 1, State.IN_FLIGHT: 2}


class Upkeep:
    """Sweeping, purging, redriving; queues that are made, changed and deleted."""

    def __init__(self, core: Core, settling: Settling, routing: Routing, moving: Moving) -> None:
        self._core = core
        self._settling = settling
        self._routing = routing
        self._moving = moving
        # When it was last looked how long ended messages are kept.
        self._looked_ms: int | None = None

    def _run(self, name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement by itself, which may be done twice."""
        database = self._core.database
        return database.do(lambda: database.run(name, **parameters), again=True)

    # --- what is due -----------------------------------------------------------------------

    def catch_up(
        self, now_ms: int, budget: int, queue: Queue | None = None, into: str | None = None
    ) -> int:
        """End leases that are over and move what has failed to where it belongs; say how many.

        ``into``: what belongs into that queue alone, however many others there are.
        """
        leases, _ = self.expire(now_ms, budget, queue)
        return leases + self._moving.dead_letters(now_ms, budget, into)

    def expire(self, now_ms: int, budget: int, queue: Queue | None = None) -> tuple[int, int]:
        """End leases whose deadline has come; say how many, and how many messages failed."""
        core = self._core
        if not self._run("any_expired", now_ms=now_ms):
            return 0, 0
        leases = failures = 0
        while budget > 0:
            one, failed, items = core.change(
                lambda: self._expire(now_ms, min(CHUNK, budget), queue)  # noqa: B023
            )
            leases, failures, budget = leases + one, failures + failed, budget - items
            if items < CHUNK:
                break
        return leases, failures

    def _expire(self, now_ms: int, count: int, queue: Queue | None) -> tuple[int, int, int]:
        core, settling = self._core, self._settling
        rows = core.database.run(
            "lock_expired",
            now_ms=now_ms,
            count=count,
            queue=None if queue is None else queue.number,
            most_attempts=MAX_ATTEMPTS,
        )
        over: dict[int, list[int]] = {}
        ended: dict[int, int] = {}
        back, zones_over = [], []
        for number, message_id, _, zone, is_over in rows:
            ended[number] = ended.get(number, 0) + 1
            if is_over:
                over.setdefault(number, []).append(message_id)
                zones_over.append((number, zone))
            else:
                back.append((number, message_id, zone, now_ms))
        settling.end([(row[0], row[1]) for row in rows], EXPIRED, "", now_ms)
        settling.give_back(back, zones_over, now_ms)
        for number, total in sorted(ended.items()):
            settling.fail(
                number, over.get(number, []), "lease expired", now_ms, ended=total,
                lease_expired=total,
            )  # fmt: skip
        failures = sum(map(len, over.values()))
        return len({row[2] for row in rows}), failures, len(rows)

    def sweep(self, now_ms: int, budget: int) -> SweepCounts:
        """Do what is due, up to about ``budget`` things; say what was done and what is next."""
        core = self._core
        core.refresh(now_ms)
        lease_ms, delay_ms, unclaimed_ms, dedup_ms = self._dues()
        leases = failures = came_due = removed = forgotten = 0
        if lease_ms <= now_ms:
            leases, failures = self.expire(now_ms, budget)
        if delay_ms <= now_ms:
            came_due = self._come_due(now_ms, budget)
        moved = self._moving.dead_letters(now_ms, budget)
        removed += self._retention(now_ms, budget)
        if unclaimed_ms <= now_ms:
            removed += self._expire_unclaimed(now_ms, budget)
        removed += self._routing.trim(now_ms, budget) + self.remove_drained(now_ms)
        if dedup_ms <= now_ms:
            forgotten = len(self._run("forget_dedup", now_ms=now_ms, count=budget))
        self._run("forget_requests", before_ms=now_ms - REQUESTS_MS, count=budget)
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
        return [NEVER_MS if time is None else time for time in self._run("next_due")[0]]

    def _next_due_ms(self, now_ms: int) -> int | None:
        core = self._core
        times = [*self._dues()]
        times += [time for time in (core.retention_ms, self._routing.due_ms) if time is not None]
        if self._moving.pending():
            times.append(now_ms)
        found = min(times)
        core.set_due(None if found == NEVER_MS else found)
        return core.due_ms

    def _come_due(self, now_ms: int, budget: int) -> int:
        core = self._core
        rows = self._run("come_due", now_ms=now_ms, count=budget)
        for number in {row[0] for row in rows}:
            queue = core.by_number.get(number)
            if queue is not None:
                core.wake(queue, sum(row[0] == number for row in rows))
        return len(rows)

    def look_again(self) -> None:
        """Have the next sweep find out when retention is due."""
        self._looked_ms = None

    def _retention(self, now_ms: int, budget: int) -> int:
        """Remove ended messages whose retention is over.

        What this process ends it knows of; what others end is looked for now and then.
        """
        core = self._core
        looked_ms, due_ms = self._looked_ms, core.retention_ms
        if (
            looked_ms is not None
            and looked_ms <= now_ms < looked_ms + LOOK_MS
            and (due_ms is None or now_ms < due_ms)
        ):
            return 0
        self._looked_ms = now_ms
        removed = 0
        # Once more after something was removed: the next one may be due as well.
        while removed < budget:
            due = self._first_to_end()
            count = 0
            for queue, state, at_ms in due:
                if at_ms <= now_ms and removed + count < budget:
                    room = min(CHUNK, budget - removed - count)
                    count += self._trim_old(queue, state, now_ms, room)
            removed += count
            if not count:
                core.retention_ms = min((at_ms for _, _, at_ms in due), default=None)
                break
        return removed

    def _first_to_end(self) -> list[tuple[Queue, State, int]]:
        """Return when the retention of each queue has something to do."""
        core = self._core
        kept = [
            queue
            for queue in core.queues.values()
            if queue.spec.done_retention_ms or queue.spec.failed_retention_ms
        ]
        due = []
        rows = self._run("next_retention", queues=[queue.number for queue in kept])
        for (_, done_ms, failed_ms), queue in zip(rows, kept, strict=True):
            if done_ms is not None and queue.spec.done_retention_ms:
                due.append((queue, State.DONE, done_ms + queue.spec.done_retention_ms))
            if failed_ms is not None and queue.spec.failed_retention_ms:
                due.append((queue, State.FAILED, failed_ms + queue.spec.failed_retention_ms))
        return due

    def _trim_old(self, queue: Queue, state: State, now_ms: int, count: int) -> int:
        spec = queue.spec
        kept_ms = spec.done_retention_ms if state is State.DONE else spec.failed_retention_ms
        name = "trim_done_by_time" if state is State.DONE else "trim_failed_by_time"
        return self._trim(queue, state, name, now_ms - kept_ms, count, now_ms)

    def _trim(
        self, queue: Queue, state: State, name: str, before: int, count: int, now_ms: int
    ) -> int:
        core = self._core

        def work() -> int:
            rows = core.database.run(name, queue=queue.number, before=before, count=count)
            if rows:
                ids = [row[0] for row in rows]
                gone = {state.value: -len(ids)}
                core.add_counts(queue.number, now_ms, removed=len(ids), **gone)
                self.let_go(queue, ids)
            return len(rows)

        removed: int = core.change(work)
        return removed

    def _expire_unclaimed(self, now_ms: int, budget: int) -> int:
        core = self._core

        def work() -> int:
            rows = core.database.run("expire_unclaimed", now_ms=now_ms, count=budget)
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
                    self.let_go(queue, ids)
                    core.wake(queue)
            return len(rows)

        removed: int = core.change(work)
        return removed

    def let_go(self, queue: Queue, message_ids: Sequence[int]) -> None:
        """Let go of the payloads and attempts of messages that leave a queue."""
        database = self._core.database
        database.run("let_go", message_ids=list(message_ids))
        database.run("forget_attempts", queue=queue.number, message_ids=list(message_ids))

    def remove_broken(self, queue: Queue, message_ids: Sequence[int], now_ms: int) -> None:
        """Remove messages that were just leased and can't be delivered."""
        log.error(
            "queue %s: messages %s have no payload; they are removed", queue.name, message_ids
        )
        self._core.change(lambda: self._remove(queue, message_ids, 3, now_ms))

    # --- purge and delete ------------------------------------------------------------------

    def purge(
        self,
        queue_name: str,
        states: Iterable[State],
        now_ms: int,
        *,
        limit: int | None = None,
        before: int | None = None,
        created_at_ms: int | None = None,
    ) -> int:
        """Remove messages of a queue by state, up to a limit; return how many.

        ``before``: only done or failed ones whose sequence number is below it, and none if the
        queue was not made at ``created_at_ms``.
        """
        core = self._core
        # Another process may have made it again, under another number.
        core.refresh()
        queue = core.queue(queue_name)
        if created_at_ms is not None and queue.spec.created_at_ms != created_at_ms:
            return 0
        if before is None:
            self.catch_up(now_ms, ALL, queue)
        removed = 0
        for state in states:
            while limit is None or removed < limit:
                room = CHUNK if limit is None else min(CHUNK, limit - removed)
                if state in STATES:
                    count = self._purge_live(queue, STATES[state], now_ms, room)
                else:
                    by = "by_time" if before is None else "to"
                    name = f"trim_{state.value}_{by}"
                    # Whatever another process's clock said.
                    up_to = (1 << 63) - 1 if before is None else before
                    count = self._trim(queue, state, name, up_to, room, now_ms)
                removed += count
                if not count:
                    break
        self.look_again()
        if before is None:
            core.wake(queue)
        return removed

    def _purge_live(self, queue: Queue, state: int, now_ms: int, count: int) -> int:
        core = self._core

        def work() -> int:
            rows = core.database.run(
                "pick_items", queue=queue.number, state=state, now_ms=now_ms, count=count
            )
            return self._remove(queue, [row[0] for row in rows], state, now_ms) if rows else 0

        removed: int = core.change(work)
        return removed

    def _remove(self, queue: Queue, message_ids: Sequence[int], state: int, now_ms: int) -> int:
        core = self._core
        rows = core.database.run(
            "remove_items",
            queue=queue.number,
            message_ids=list(message_ids),
            state=state,
            now_ms=now_ms,
        )
        ids = [row[0] for row in rows]
        if queue.fifo:
            core.zones.lower({(queue.number, row[1]): now_ms for row in rows}, now_ms)
        leased = sum(row[3] for row in rows)
        core.add_counts(queue.number, now_ms, live=-len(ids), in_flight=-leased, removed=len(ids))
        self.let_go(queue, ids)
        return len(ids)

    # --- queues ----------------------------------------------------------------------------

    def create_queue(self, spec: QueueSpec, now_ms: int) -> None:
        """Add a queue, which takes messages from here on."""
        core, database = self._core, self._core.database

        def work() -> Queue:
            end = core.lock_head().next_offset
            if spec.name in core.queues:
                # Another process was faster: the caller is to look at it.
                raise FiltersChanged
            live = [Stretch(end, None, spec.filter)]
            number = database.run("next_queue")[0][0]
            queue = Queue(number, spec, Coverage(live, known_from=0))
            database.run(
                "add_queue",
                number=queue.number,
                name=spec.name,
                spec=msgspec.msgpack.encode(spec),
                coverage=msgspec.msgpack.encode(queue.coverage),
                fifo=queue.fifo,
                max_attempts=spec.max_attempts,
                unclaimed_retention_ms=spec.unclaimed_retention_ms,
            )
            database.run("add_counts", number=queue.number, slots=SLOTS, now_ms=now_ms)
            core.changed(now_ms, filters_from=end)
            return queue

        queue: Queue = core.change(work)
        core.adopt(queue)

    def update_queue(self, spec: QueueSpec, now_ms: int, *, from_offset: int | None = None) -> None:
        """Change settings; another filter counts from an offset on (the log's end)."""
        core, database = self._core, self._core.database
        present = core.queue(spec.name).spec
        # Then what waits is written again, however much it is.
        much = spec.unclaimed_retention_ms != present.unclaimed_retention_ms

        def work() -> Queue:
            head = core.lock_head()
            queue = core.lock_queue(spec.name)
            if spec.version != queue.spec.version + 1:
                raise FiltersChanged
            begin = head.next_offset if from_offset is None else from_offset
            lowest = self._routing.routed_up_to()
            if not lowest <= begin <= head.next_offset:
                raise InvalidInput(
                    f"a filter can change from an offset in {lowest} (routed up to there) to "
                    f"{head.next_offset} (the end of the log), not from {begin}"
                )
            filter_changed = spec.filter != queue.spec.filter or from_offset is not None
            if filter_changed and queue.coverage.draining:
                raise InvalidQueue(f"queue {queue.name!r} is draining: its filter can't be changed")
            changed = Queue(queue.number, spec, queue.coverage)
            database.run(
                "put_spec",
                number=queue.number,
                spec=msgspec.msgpack.encode(spec),
                max_attempts=spec.max_attempts,
                unclaimed_retention_ms=spec.unclaimed_retention_ms,
            )
            if filter_changed:
                changed.coverage.change(begin, spec.filter)
                self._routing.put_coverage(changed)
            core.changed(now_ms, filters_from=begin if filter_changed else None)
            if spec.unclaimed_retention_ms != queue.spec.unclaimed_retention_ms:
                database.run(
                    "reindex_unclaimed",
                    queue=queue.number,
                    retention_ms=spec.unclaimed_retention_ms,
                )
            return changed

        with database.at_leisure() if much else nullcontext():
            queue: Queue = core.change(work)
        core.adopt(queue)
        self._moving.unpark()
        self.look_again()

    def delete_queue(self, queue_name: str, now_ms: int, *, drain: bool = False) -> int:
        """Remove a queue with everything in it; return how many messages were removed.

        ``drain``: let no more messages in; a sweep removes the queue once nothing waits in it.
        """
        if drain:
            self._drain(queue_name, now_ms)
            return 0
        removed = self.purge(queue_name, State, now_ms)
        return removed + self._delete(queue_name, now_ms)

    def _delete(self, queue_name: str, now_ms: int, *, drained: bool = False) -> int:
        """Remove a queue with what is left in it; a drained one only if nothing waits there."""
        core = self._core

        def work() -> tuple[Queue | None, int]:
            end = core.lock_head().next_offset
            # As of now: another process may have deleted it, and made it again.
            queue = core.queues.get(queue_name)
            if queue is None or not core.database.run("lock_queue", number=queue.number):
                return None, 0
            # Nothing can come any more, but what is held may end: it is done or failed then.
            live = core.database.run(
                "pick_items", queue=queue.number, state=3, now_ms=now_ms, count=ALL
            )
            if live and drained:
                return None, 0
            more = self._remove(queue, [row[0] for row in live], 3, now_ms) if live else 0
            for name in ("trim_done_by_time", "trim_failed_by_time"):
                rows = core.database.run(name, queue=queue.number, before=(1 << 63) - 1, count=ALL)
                self.let_go(queue, [row[0] for row in rows])
                more += len(rows)
            core.database.run("remove_queue", number=queue.number)
            core.changed(now_ms, filters_from=end)
            return queue, more

        queue, removed = core.change(work)
        if queue is not None:
            core.queues.pop(queue.name, None)
            core.by_number.pop(queue.number, None)
            core.wake(queue)
        self.look_again()
        return int(removed)

    def _drain(self, queue_name: str, now_ms: int) -> None:
        core = self._core
        core.queue(queue_name)

        def work() -> Queue:
            end = core.lock_head().next_offset
            queue = core.lock_queue(queue_name)
            queue.coverage.close(end)
            queue.coverage.draining = True
            self._routing.put_coverage(queue)
            core.changed(now_ms, filters_from=end)
            return queue

        queue: Queue = core.change(work)
        core.adopt(queue)
        self.remove_drained(now_ms)

    def remove_drained(self, now_ms: int) -> int:
        """Remove queues that take no more messages and have none; say how many messages went."""
        core = self._core
        draining = [queue for queue in core.queues.values() if queue.coverage.draining]
        if not draining:
            return 0
        removed = 0
        routed_up_to = self._routing.routed_up_to()
        for queue in draining:
            live = queue.coverage.live
            if live and (live[-1].end or 0) > routed_up_to:
                continue
            waits = core.database.run(
                "pick_items", queue=queue.number, state=3, now_ms=now_ms, count=1
            )
            if not waits and not self._moving.is_pending(queue):
                removed += self.purge(queue.name, (State.DONE, State.FAILED), now_ms)
                removed += self._delete(queue.name, now_ms, drained=True)
        return removed

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
        core.refresh()
        queue = core.queue(queue_name)
        self.catch_up(now_ms, ALL, queue)
        if message_ids is not None:
            rows = core.database.run(
                "find_failed", queue=queue.number, message_ids=list(message_ids)
            )
            further = None
        else:
            begin = int.from_bytes(after, "big") if after else -1
            rows = core.database.run("pick_failed", queue=queue.number, after=begin, count=CHUNK)
            further = rows[-1][0].to_bytes(8, "big") if len(rows) == CHUNK else None
        chosen = {}
        for _, message_id, record in rows:
            try:
                metadata = decode_metadata(record or b"")
            except CorruptRecord:
                continue
            if where is None or where(metadata):
                chosen[message_id] = metadata
        return self._moving.redrive(queue, chosen, now_ms), further

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
        core = self._core
        core.refresh()
        self._moving.check(queue_name, to_name)
        self.catch_up(now_ms, ALL, core.queue(queue_name))
        queue, to = core.queue(queue_name), core.queue(to_name)
        return self._moving.move(queue, to, state, message_ids, limit, now_ms)
