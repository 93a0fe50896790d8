"""Messages go from one queue to another: ``move``, and dead letters; ``redrive``, ``ack_late``.

One transaction takes a message out of a queue and puts it into the other. It brings its attempts
along, all of them forgiven.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.limits import MAX_ATTEMPTS, MAX_OFFSET
from penstock.model import OutcomeStatus, State
from penstock.store import policy
from penstock.store.codec.metadata import read_metadata
from penstock.store.life import life, log_move, log_step
from penstock.store.sql.database import columns
from penstock.store.sql.publish import Items, SqlPublish
from penstock.store.sql.session import EACH_MS, SLOTS
from penstock.store.sql.settle import SqlSettle, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.model import Outcome
    from penstock.store.codec.metadata import Metadata
    from penstock.store.sql.database import Database
    from penstock.store.sql.session import SqlQueue

log = logging.getLogger(__name__)

# Messages that one transaction moves, or marks as due.
STEP_MESSAGES: Final = 1_000
# A budget for everything that there is.
ALL: Final = 1_000_000
# As the statements number the states of live items; then all, and those unclaimed for too long.
STATES: Final = {State.AVAILABLE: 0, State.DELAYED: 1, State.IN_FLIGHT: 2}
ANY_STATE, UNCLAIMED = 3, 4


class SqlMove(SqlSettle, SqlPublish):
    """The verbs that move messages between queues."""

    def __init__(self, database: Database, random: Callable[[], float]) -> None:
        super().__init__(database, random)
        # (queue, dead letter queue that is not there) that the log has been told of.
        self._parked: set[tuple[int, str]] = set()

    def catch_up(
        self, now_ms: int, budget: int, queue: SqlQueue | None = None, into: str | None = None
    ) -> int:
        """End leases that are over, drop what queues have too much, move dead letters; count all.

        ``into``: only the dead letters of that queue, however many others there are. Delays end by
        the clock alone, and are marked here for the sake of the life-cycle log. A store that is
        being copied to stays as it is.
        """
        if self.routing == policy.COPYING:
            return 0
        leases, _ = self.expire(now_ms, budget, queue)
        if life.level:
            self.come_due(now_ms, budget, queue)
        leases += self.drop_excess(now_ms, budget)
        return leases + self.move_dead_letters(now_ms, budget, into)

    def come_due(self, now_ms: int, budget: int, queue: SqlQueue | None = None) -> int:
        """Mark delays that are over, of one queue or of all, up to a budget; return how many."""
        queues = list(self.by_number) if queue is None else [queue.number]
        marked, more = 0, True
        while more and marked < budget:
            count = min(STEP_MESSAGES, budget - marked)
            rows = self.database.ask("come_due", queues=queues, now_ms=now_ms, count=count)
            for number in {row[0] for row in rows}:
                due, ids = self.by_number.get(number), [row[1] for row in rows if row[0] == number]
                if due is not None:
                    self.wake(due, len(ids))
                    if life.level:
                        log_step("come_due", due.name, ids)
            marked, more = marked + len(rows), len(rows) == count
        return marked

    # --- verbs -----------------------------------------------------------------------------

    def ack_late(
        self,
        receipts: Sequence[str],
        attempts: Sequence[int],
        *,
        queue_name: str,
        now_ms: int,
    ) -> list[Outcome]:
        """Settle messages as done that wait again, if nobody has claimed them since."""
        keys = self.keys_of(receipts, queue_name)
        queue = self.queue(queue_name)
        self.catch_up(now_ms, ALL, queue)
        rows = self.run_alone(
            "ack_late",
            now_ms,
            queue=queue.number,
            message_ids=[message_id for _, message_id, _ in keys],
            numbers=attempts,
            leases=[lease for *_, lease in keys],
            slots=SLOTS,
            each_ms=EACH_MS,
        )
        if rows and queue.spec.done_retention_ms:
            self.due_for_retention(now_ms + queue.spec.done_retention_ms)
        if life.level:
            self.log_settled("ack", rows, "late")
        return self.outcomes_of(receipts, keys, {key_of(row): OutcomeStatus.DONE for row in rows})

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
        """Move messages in a state into another queue: all, by ids, so many; return how many."""
        self.refresh()
        self.queue(queue_name)
        policy.check_move(queue_name, to_name, draining=self.queue(to_name).coverage.draining)
        self.catch_up(now_ms, ALL, self.queue(queue_name))
        queue, to = self.queue(queue_name), self.queue(to_name)
        return self._move(queue, to, state, message_ids, limit, now_ms)

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

        Return how many, and where the next page begins.
        """
        self.refresh()
        queue = self.queue(queue_name)
        self.catch_up(now_ms, ALL, queue)
        further = None
        if message_ids is not None:
            rows = self.database.run("metadata_of", message_ids=list(message_ids))
        else:
            begin = int.from_bytes(after, "big") + 1 if after else 0
            page = self._page_failed(queue, begin, STEP_MESSAGES)
            rows = [(row[1], row[-1]) for row in page]
            if len(page) == STEP_MESSAGES:
                further = page[-1][0].to_bytes(8, "big")
        chosen = {
            message_id: metadata
            for message_id, record in rows
            if (metadata := read_metadata(record or b"")) is not None
            and (where is None or where(metadata))
        }
        redriven = []
        if chosen:
            work = partial(self._redrive, queue, chosen, now_ms)
            redriven = self.change(self.once(work, now_ms), again=True)
        if life.level:
            log_step("redrive", queue.name, redriven)
        return len(redriven), further

    def _redrive(self, queue: SqlQueue, chosen: dict[int, Metadata], now_ms: int) -> list[int]:
        if not self.database.run("share_queues", numbers=[queue.number]):
            return []
        self.hold_instance()
        taken = self.database.run(
            "take_ended", queue=queue.number, message_ids=list(chosen), states=[True]
        )
        items = Items()
        for message_id, attempts, _ in taken:
            items.add(queue, message_id, chosen[message_id], now_ms, attempts)
        self.check_room(items.counts, items.sizes, older=True)
        self.add_items(items, now_ms)
        count, size = len(taken), items.sizes.get(queue, 0)
        added = {"live": count, "live_bytes": size, "failed": -count, "redriven": count}
        self.add_counts(queue.number, now_ms, **added)
        return sorted(row[0] for row in taken)

    def _move(
        self,
        queue: SqlQueue,
        to: SqlQueue,
        state: State,
        message_ids: Sequence[int] | None,
        limit: int | None,
        now_ms: int,
        *,
        dead: bool = False,
    ) -> int:
        """Move the messages of a queue that are in a state, or those of some ids, in steps.

        ``dead``: as dead letters, which no limit refuses.
        """
        moved = 0
        ids = None if message_ids is None else sorted(set(message_ids))
        at = 0
        while limit is None or moved < limit:
            room = STEP_MESSAGES if limit is None else min(STEP_MESSAGES, limit - moved)
            if ids is not None:
                chunk = ids[at : at + room]
                at += room
            else:
                chunk = self._pick(queue, state, room, now_ms)
            if not chunk:
                break
            step = partial(self._move_step, queue, to, state, chunk, now_ms, dead=dead)
            out, in_ = self.change(self.once(step, now_ms), again=True)
            if life.level:
                log_move(queue.name, to.name, out, in_, dead=dead)
            moved += len(out)
            if not out and ids is None:
                # None of them can be read: they stay where they are.
                break
        return moved

    # --- dead letters ------------------------------------------------------------------------

    def _with_failures(self, to: str | None = None) -> list[SqlQueue]:
        """Return queues with failed messages for a dead letter queue: for any, or for this one."""
        wanted = {
            queue.number: queue
            for queue in self.by_name.values()
            if (queue.spec.dead_letter if to is None else queue.spec.dead_letter == to)
        }
        if not wanted:
            return []
        rows = self.database.ask("pending_dead_letters", queues=list(wanted))
        return [wanted[row[0]] for row in rows]

    def with_dead_letters(self) -> list[SqlQueue]:
        """Return the queues with failed messages that a dead letter queue can take."""
        return [queue for queue in self._with_failures() if self._target(queue) is not None]

    def _target(self, queue: SqlQueue) -> SqlQueue | None:
        to = self.by_name.get(queue.spec.dead_letter)
        return None if to is None or to.coverage.draining else to

    def move_dead_letters(self, now_ms: int, budget: int, into: str | None = None) -> int:
        """Move failed messages into dead letter queues, up to a budget; return how many."""
        moved = 0
        for queue in self._with_failures(into):
            to, mark = self._target(queue), (queue.number, queue.spec.dead_letter)
            if to is not None:
                self._parked.discard(mark)
                if moved < budget:
                    room = budget - moved
                    moved += self._move(queue, to, State.FAILED, None, room, now_ms, dead=True)
            elif mark not in self._parked:
                self._parked.add(mark)
                log.warning(
                    "queue %s: its dead letter queue %s is not there; what fails stays until it is",
                    queue.name,
                    queue.spec.dead_letter,
                )
        return moved

    # --- one step --------------------------------------------------------------------------

    def _page_failed(self, queue: SqlQueue, begin: int, count: int) -> list[tuple[Any, ...]]:
        return self.database.ask(
            "page_ended", queue=queue.number, failed=True, begin=begin, end=MAX_OFFSET, count=count
        )

    def _pick(self, queue: SqlQueue, state: State, count: int, now_ms: int) -> list[int]:
        if state is State.FAILED:
            rows = self._page_failed(queue, 0, count)
            return [row[1] for row in rows if read_metadata(row[-1] or b"") is not None]
        rows = self.database.ask(
            "pick_items", queue=queue.number, state=STATES[state], now_ms=now_ms, count=count
        )
        return [row[0] for row in rows]

    def _move_step(
        self,
        queue: SqlQueue,
        to: SqlQueue,
        state: State,
        message_ids: list[int],
        now_ms: int,
        *,
        dead: bool,
    ) -> tuple[list[int], list[int]]:
        """Move messages; return those that left the one queue, and that came into the other."""
        database = self.database
        if len(database.run("share_queues", numbers=[queue.number, to.number])) < 2:
            # One of them has been deleted.
            return [], []
        self.hold_instance()
        known = {
            message_id: metadata
            for message_id, record in database.run("metadata_of", message_ids=message_ids)
            if (metadata := read_metadata(record or b"")) is not None
        }
        # Before the items, as every transaction locks them.
        both = [to.number] if state is State.FAILED else sorted([queue.number, to.number])
        zones = {(number, each.group.encode()) for number in both for each in known.values()}
        database.run("lock_pointers", **columns(zones, "queues", "zones"))
        leaving = self._take_out(queue, state, list(known), now_ms)
        if not leaving:
            return [], []
        ids = sorted(leaving)
        live = {row[0] for row in database.run("find_live", queue=to.number, message_ids=ids)}
        arriving = [message_id for message_id in ids if message_id not in live]
        ended = database.run(
            "take_ended", queue=to.number, message_ids=arriving, states=[False, True]
        )
        before: dict[int, int] = {message_id: attempts for message_id, attempts, _ in ended}
        # Attempts in the other queue come first, and attempts only grow.
        rows = [(message_id, before.get(message_id, 0)) for message_id in arriving]
        own = {"queue": queue.number, "to_queue": to.number}
        database.run("move_attempts", **own, **columns(rows, "message_ids", "befores"))
        items = Items()
        for message_id, first in rows:
            attempts, vesting_ms = leaving[message_id]
            attempts, vesting_ms = min(first + attempts, MAX_ATTEMPTS), max(now_ms, vesting_ms)
            items.add(to, message_id, known[message_id], vesting_ms, attempts)
        if not dead:
            self.check_room(items.counts, items.sizes, items.largest)
        self.add_items(items, now_ms)
        self.wake(to, len(ids))
        if queue.fifo:
            # The head of a group may be gone, which other messages of it have waited for.
            self.wake(queue)
            self.zones.lower(
                {(queue.number, known[each].group.encode()): now_ms for each in ids}, now_ms
            )
        failed, size = sum(row[2] for row in ended), sum(known[each].size for each in ids)
        left = {"live": -len(ids), "live_bytes": -size}
        counts = {
            queue.number: {"failed": -len(ids)} if state is State.FAILED else left,
            to.number: {
                "live": len(arriving),
                "live_bytes": items.sizes.get(to, 0),
                "done": failed - len(ended),
                "failed": -failed,
                "moved_in": len(arriving) - len(ended),
                "redriven": len(ended),
            },
        }
        counts[queue.number]["moved_out"] = len(ids)
        for number, added in sorted(counts.items()):
            self.add_counts(number, now_ms, **added)
        # Both queues held these messages, and one of them from here on.
        if live or before:
            self._let_go([*live, *before])
        if live:
            database.run("forget_attempts", queue=queue.number, message_ids=sorted(live))
        return ids, arriving

    def _let_go(self, message_ids: Sequence[int]) -> None:
        """Take back a reference for each time that a message is named; delete those without any."""
        named = {"message_ids": list(message_ids)}
        if self.database.run("let_go", **named)[0][0]:
            self.database.run("lower_refs", **named)

    def _take_out(
        self, queue: SqlQueue, state: State, message_ids: list[int], now_ms: int
    ) -> dict[int, tuple[int, int]]:
        """Take messages out of a queue; return attempts and vesting time of each that was there."""
        own = {"queue": queue.number, "message_ids": message_ids}
        if state is State.FAILED:
            rows = self.database.run("take_ended", **own, states=[True])
            return {message_id: (attempts, now_ms) for message_id, attempts, _ in rows}
        rows = self.database.run("remove_items", **own, state=STATES[state], now_ms=now_ms)
        return {row[0]: (row[3], row[4]) for row in rows}
