"""Queues are created, changed, drained and deleted; messages are purged and trimmed."""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import InvalidInput, InvalidQueue, QueueNotFound
from penstock.limits import MAX_OFFSET
from penstock.model import Ordering, State
from penstock.store.contract import FiltersChanged, LiveQueue
from penstock.store.life import life, log_step
from penstock.store.policy import Coverage, Stretch, drops_oldest
from penstock.store.sql.move import ALL, ANY_STATE, STATES, UNCLAIMED, SqlMove
from penstock.store.sql.routing import SqlRouting
from penstock.store.sql.session import SLOTS, SqlQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.model import QueueSpec

log = logging.getLogger(__name__)

# Messages that one transaction removes.
CHUNK: Final = 1_000
# Live messages are removed in whatever state only if they can't be delivered.
WHY_REMOVED: Final = {UNCLAIMED: "retention", ANY_STATE: "broken"}


class SqlQueues(SqlMove, SqlRouting):
    """The verbs that change queues, or remove messages from them."""

    # When a sweep last looked for ended messages that are past retention.
    _retention_looked_ms: int | None = None

    def spec(self, queue_name: str) -> QueueSpec:
        """Return the settings of a queue."""
        return self.queue(queue_name).spec

    def queues(self) -> list[LiveQueue]:
        """Return all queues, by name."""
        self.refresh()
        live = self.live_filters()
        return [
            LiveQueue(queue.spec, live.get(name), queue.coverage.draining, queue.coverage)
            for name, queue in sorted(self.by_name.items())
        ]

    # --- create and change -----------------------------------------------------------------

    def create_queue(self, spec: QueueSpec, now_ms: int) -> None:
        """Add a queue, which takes messages from here on."""

        def work() -> None:
            end = self.lock_heads().end
            if spec.name in self.by_name:
                # Another process was faster: the caller is to look at the queue.
                raise FiltersChanged
            live = [Stretch(end, None, spec.filter)]
            self.add_queue(spec, Coverage(live, known_from=0), now_ms)
            self.changed(now_ms, filters_from=end)

        # After a commit whose answer was lost it is there, and the caller looks at it.
        self.change_queues(work, again=True)

    def add_queue(self, spec: QueueSpec, coverage: Coverage, now_ms: int) -> SqlQueue:
        """Write a queue, in the caller's transaction."""
        rows = self.database.run(
            "add_queue",
            name=spec.name,
            coverage=msgspec.msgpack.encode(coverage),
            fifo=spec.ordering is Ordering.FIFO,
            **_spec_columns(spec),
            slots=SLOTS,
            now_ms=now_ms,
        )
        return SqlQueue(rows[0][0], spec, coverage)

    def update_queue(self, spec: QueueSpec, now_ms: int, *, from_offset: int | None = None) -> None:
        """Change settings; another filter counts from an offset on (the log's end)."""
        database = self.database
        number, present = self.queue(spec.name).number, self.queue(spec.name).spec
        # Rewrites the waiting messages, however many they are.
        reindex = spec.unclaimed_retention_ms != present.unclaimed_retention_ms

        def work() -> None:
            end = self.lock_heads().end
            queue = self.lock_queue(spec.name)
            if spec.version != queue.spec.version + 1:
                raise FiltersChanged
            begin = end if from_offset is None else from_offset
            lowest = self.routed_up_to()
            if not lowest <= begin <= end:
                raise InvalidInput(
                    f"a filter can change from an offset in {lowest} (routed up to there) to "
                    f"{end} (the end of the log), not from {begin}"
                )
            filter_changed = spec.filter != queue.spec.filter or from_offset is not None
            if filter_changed and queue.coverage.draining:
                raise InvalidQueue(f"queue {queue.name!r} is draining: its filter can't be changed")
            database.run("put_spec", number=queue.number, **_spec_columns(spec))
            if filter_changed:
                queue.coverage.change(begin, spec.filter)
                self.put_coverage(queue)
            self.changed(now_ms, filters_from=begin if filter_changed else None)
            if spec.unclaimed_retention_ms != queue.spec.unclaimed_retention_ms:
                database.run(
                    "reindex_unclaimed",
                    queue=queue.number,
                    retention_ms=spec.unclaimed_retention_ms,
                )

        with database.at_leisure() if reindex else nullcontext():
            self.change_queues(self.once(work, now_ms), again=True)
        if spec.dead_letter != present.dead_letter:
            self._parked.discard((number, present.dead_letter))
        self._retention_looked_ms = None
        if drops_oldest(spec):
            self.due(now_ms)

    # --- drain and delete ------------------------------------------------------------------

    def delete_queue(self, queue_name: str, now_ms: int, *, drain: bool = False) -> int:
        """Remove a queue with everything in it; return how many messages were removed.

        ``drain``: let no more messages in; a sweep removes the queue once no message waits in it.
        """
        if drain:
            self._drain(queue_name, now_ms)
            return 0
        removed = self.purge(queue_name, State, now_ms)
        return removed + self._delete(queue_name, now_ms)

    def _delete(self, queue_name: str, now_ms: int, *, drained: bool = False) -> int:
        """Remove a queue with the rest of its messages; a drained one only if none waits there."""
        database = self.database

        def work() -> tuple[SqlQueue | None, list[int]]:
            end = self.lock_heads().end
            # As of now: another process may have deleted it, and made it again.
            queue = self.by_name.get(queue_name)
            if queue is None or not database.run("lock_queue", number=queue.number):
                return None, []
            # No message can come any more, but a claim may end: its message is done or failed then.
            if drained and (not queue.coverage.draining or self._has_live(queue, now_ms)):
                return None, []
            # Before the rest, as every transaction locks them.
            self.changed(now_ms, filters_from=end)
            database.run("lock_pointers_of", queue=queue.number)
            rows = database.run("clear_queue", number=queue.number)
            rows += database.run("remove_queue", number=queue.number)
            ids = [row[0] for row in rows]
            self._let_go(ids)
            return queue, ids

        queue, removed = self.change_queues(self.once(work, now_ms), again=True)
        if queue is not None:
            self.wake(queue)
            self._log_removed(queue, removed, "purge")
        self._retention_looked_ms = None
        return len(removed)

    def _drain(self, queue_name: str, now_ms: int) -> None:
        self.queue(queue_name)

        def work() -> None:
            end = self.lock_heads().end
            queue = self.lock_queue(queue_name)
            queue.coverage.close(end)
            queue.coverage.draining = True
            self.put_coverage(queue)
            self.changed(now_ms, filters_from=end)

        self.change_queues(self.once(work, now_ms), again=True)
        self.remove_drained(now_ms, CHUNK)

    def remove_drained(self, now_ms: int, budget: int) -> int:
        """Remove drained queues that have no live messages, up to about a budget of messages.

        Return how many messages went.
        """
        draining = [queue for queue in self.by_name.values() if queue.coverage.draining]
        if not draining:
            return 0
        removed, routed_up_to = 0, self.routed_up_to()
        for queue in draining:
            live = queue.coverage.live
            if live and (live[-1].end or 0) > routed_up_to:
                continue
            pending = {each.number for each in self.with_dead_letters()}
            if queue.number in pending or self._has_live(queue, now_ms):
                continue
            ended, made_ms = (State.DONE, State.FAILED), queue.spec.created_at_ms
            # Another process may be faster.
            with suppress(QueueNotFound):
                if removed < budget:
                    removed += self.purge(
                        queue.name, ended, now_ms, limit=budget - removed, created_at_ms=made_ms
                    )
                if removed < budget:
                    removed += self._delete(queue.name, now_ms, drained=True)
        return removed

    def _has_live(self, queue: SqlQueue, now_ms: int) -> bool:
        found = {"queue": queue.number, "state": ANY_STATE, "now_ms": now_ms, "count": 1}
        return bool(self.database.run("pick_items", **found))

    # --- purge and trim --------------------------------------------------------------------

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
        """Remove messages in one of the states, up to a limit; return how many.

        ``before``: only done or failed ones whose sequence number is below it. None if the queue
        was not made at ``created_at_ms``. ``message_ids``: only those, which have failed.
        """
        # Another process may have made the queue again, under another number.
        self.refresh()
        queue = self.queue(queue_name)
        if created_at_ms is not None and queue.spec.created_at_ms != created_at_ms:
            return 0
        if before is None:
            self.catch_up(now_ms, ALL, queue)
        if message_ids is not None:
            own: dict[str, Any] = {"message_ids": list(message_ids), "states": [True]}
            return self._remove_ended("take_ended", queue, State.FAILED, now_ms, **own)
        removed = 0
        for state in states:
            while limit is None or removed < limit:
                room = CHUNK if limit is None else min(CHUNK, limit - removed)
                if state in STATES:
                    ids = self._pick(queue, state, room, now_ms)
                    count = self._remove_live(queue, ids, STATES[state], now_ms) if ids else 0
                else:
                    count = self._trim(queue, state, now_ms, room, before)
                removed += count
                if not count:
                    break
        self._retention_looked_ms = None
        if before is None:
            self.wake(queue)
        return removed

    def _remove_live(
        self, queue: SqlQueue, message_ids: Sequence[int], state: int, now_ms: int
    ) -> int:
        """Remove live messages that are in a state; return how many."""
        own = {"queue": queue.number, "message_ids": list(message_ids)}

        def work() -> list[int]:
            if queue.fifo:
                # Before the items, as every transaction locks them.
                self.database.run("lock_pointers_of_items", **own)
            rows = self.database.run("remove_items", **own, state=state, now_ms=now_ms)
            ids = [row[0] for row in rows]
            if queue.fifo:
                self.zones.lower({(queue.number, row[1]): now_ms for row in rows}, now_ms)
            leased, count, size = sum(row[2] for row in rows), len(ids), sum(r[5] for r in rows)
            gone = {"live": -count, "live_bytes": -size, "in_flight": -leased, "removed": count}
            self.add_counts(queue.number, now_ms, **gone)
            self._forget_messages(queue, ids)
            return ids

        ids = self.change(self.once(work, now_ms), again=True)
        return self._log_removed(queue, ids, WHY_REMOVED.get(state, "purge"))

    def _trim(
        self,
        queue: SqlQueue,
        state: State,
        now_ms: int,
        count: int,
        before: int | None = None,
        reason: str = "purge",
    ) -> int:
        """Remove done or failed messages: all, or those below a sequence number."""
        before = MAX_OFFSET if before is None else before
        own: dict[str, Any] = {"failed": state is State.FAILED, "before": before, "count": count}
        return self._remove_ended("trim_ended", queue, state, now_ms, reason, **own)

    def _remove_ended(
        self,
        statement: str,
        queue: SqlQueue,
        state: State,
        now_ms: int,
        reason: str = "purge",
        **parameters: Any,
    ) -> int:
        """Remove the done or failed messages that a statement deletes; return how many."""

        def work() -> list[int]:
            ids = [row[0] for row in self.database.run(statement, queue=queue.number, **parameters)]
            if ids:
                gone = {state.value: -len(ids)}
                self.add_counts(queue.number, now_ms, removed=len(ids), **gone)
                self._forget_messages(queue, ids)
            return ids

        ids = self.change(self.once(work, now_ms), again=True)
        return self._log_removed(queue, ids, reason)

    def _log_removed(self, queue: SqlQueue, message_ids: Sequence[int], reason: str) -> int:
        """Write to the life-cycle log which messages were removed; return how many."""
        if life.level:
            log_step("remove", queue.name, message_ids, reason=reason)
        return len(message_ids)

    def _forget_messages(self, queue: SqlQueue, message_ids: Sequence[int]) -> None:
        """Remove the attempts at messages that leave a queue, and payloads that no queue holds."""
        self._let_go(message_ids)
        self.database.run("forget_attempts", queue=queue.number, message_ids=list(message_ids))

    def remove_broken(self, queue: SqlQueue, message_ids: Sequence[int], now_ms: int) -> None:
        """Remove messages that were just leased and can't be delivered."""
        log.error(
            "queue %s: messages %s have no payload; they are removed", queue.name, message_ids
        )
        self._remove_live(queue, message_ids, ANY_STATE, now_ms)


def _spec_columns(spec: QueueSpec) -> dict[str, Any]:
    return {
        "spec": msgspec.msgpack.encode(spec),
        "max_attempts": spec.max_attempts,
        "unclaimed_retention_ms": spec.unclaimed_retention_ms,
    }
