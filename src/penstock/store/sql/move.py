"""Messages go from one queue to another: by the verb ``move``, or because they have failed.

What has failed may also go back to where it was (``redrive``). A message is taken out of one queue
and put into the other in one transaction. It brings its attempts along, all of them forgiven.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import CorruptRecord, InvalidInput, InvalidQueue
from penstock.limits import MAX_ATTEMPTS
from penstock.model import State
from penstock.store.codec.metadata import decode_metadata
from penstock.store.sql.publish import Arrival, add_items

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.store.codec.metadata import Metadata
    from penstock.store.sql.session import Core, Queue

__all__ = ["Moving"]

log = logging.getLogger(__name__)

STEP_MESSAGES: Final = 1_000
_STATES: Final = {State.AVAILABLE: 0, State.DELAYED: 1}


class _Leaving(NamedTuple):
    """A message that has left its queue; ``vesting_ms`` if it was waiting."""

    message_id: int
    attempts: int
    vesting_ms: int


class Moving:
    """Moves messages between queues, in steps of bounded size."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # (queue, dead letter queue) that is not there, of which was told.
        self._parked: set[tuple[int, str]] = set()

    def check(self, queue_name: str, to_name: str) -> None:
        """Refuse a move that can't be made."""
        core = self._core
        if core.queue(queue_name) is core.queue(to_name):
            raise InvalidInput(f"queue {queue_name!r} can't be moved to itself: name another")
        if core.queue(to_name).coverage.draining:
            raise InvalidQueue(f"queue {to_name!r} is draining: it takes no more messages")

    def move(
        self,
        queue: Queue,
        to: Queue,
        state: State,
        message_ids: Sequence[int] | None,
        limit: int | None,
        now_ms: int,
    ) -> int:
        """Move the messages of a queue that are in a state, or those of some ids; say how many."""
        core = self._core
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
            count = core.change(lambda: self._step(queue, to, state, chunk, now_ms))  # noqa: B023
            moved += count
            if not count and ids is None:
                # None of them can be read: they stay where they are.
                break
        return moved

    def redrive(self, queue: Queue, chosen: dict[int, Metadata], now_ms: int) -> int:
        """Make failed messages of a queue available again, if they still are; say how many."""
        core = self._core

        def work() -> int:
            if not core.database.run("share_queues", numbers=[queue.number]):
                return 0
            taken = core.database.run("take_failed", queue=queue.number, message_ids=list(chosen))
            arrivals = [
                Arrival(
                    queue,
                    message_id,
                    chosen[message_id].group.encode(),
                    chosen[message_id].priority,
                    now_ms,
                    attempts,
                    chosen[message_id].size,
                )
                for message_id, attempts in taken
            ]
            add_items(core, arrivals, now_ms)
            count = len(arrivals)
            core.add_counts(queue.number, now_ms, live=count, failed=-count, redriven=count)
            return count

        return core.change(work) if chosen else 0

    # --- dead letters ------------------------------------------------------------------------

    def _with_failures(self, to: str | None = None) -> list[Queue]:
        """Return queues with failed messages for a dead letter queue: for any, or for this one."""
        core = self._core
        wanted = {
            queue.number: queue
            for queue in core.queues.values()
            if (queue.spec.dead_letter if to is None else queue.spec.dead_letter == to)
        }
        if not wanted:
            return []
        rows = core.database.do(
            lambda: core.database.run("pending_dead_letters", queues=list(wanted)), again=True
        )
        return [wanted[row[0]] for row in rows]

    def pending(self) -> list[Queue]:
        """Return the queues that have failed messages which another one is to get."""
        return [queue for queue in self._with_failures() if self._target(queue) is not None]

    def is_pending(self, queue: Queue) -> bool:
        """Whether a queue has failed messages which another one is to get."""
        return any(each.number == queue.number for each in self.pending())

    def unpark(self) -> None:
        """Tell again of dead letter queues that are not there."""
        self._parked = {
            (number, name)
            for number, name in self._parked
            if number in self._core.by_number
            and self._core.by_number[number].spec.dead_letter == name
        }

    def _target(self, queue: Queue) -> Queue | None:
        to = self._core.queues.get(queue.spec.dead_letter)
        return None if to is None or to.coverage.draining else to

    def dead_letters(self, now_ms: int, budget: int, into: str | None = None) -> int:
        """Move what has failed into dead letter queues, up to a budget; say how many."""
        moved = 0
        for queue in self._with_failures(into):
            to, mark = self._target(queue), (queue.number, queue.spec.dead_letter)
            if to is not None:
                self._parked.discard(mark)
                if moved < budget:
                    moved += self.move(queue, to, State.FAILED, None, budget - moved, now_ms)
            elif mark not in self._parked:
                self._parked.add(mark)
                log.warning(
                    "queue %s: its dead letter queue %s is not there; what fails stays until it is",
                    queue.name,
                    queue.spec.dead_letter,
                )
        return moved

    # --- one step --------------------------------------------------------------------------

    def _pick(self, queue: Queue, state: State, count: int, now_ms: int) -> list[int]:
        database = self._core.database
        if state is State.FAILED:
            rows = database.run("pick_failed", queue=queue.number, after=-1, count=count)
            return [row[1] for row in rows if _decoded(row[2]) is not None]
        rows = database.run(
            "pick_items", queue=queue.number, state=_STATES[state], now_ms=now_ms, count=count
        )
        return [row[0] for row in rows]

    def _step(
        self, queue: Queue, to: Queue, state: State, message_ids: list[int], now_ms: int
    ) -> int:
        core, database = self._core, self._core.database
        if len(database.run("share_queues", numbers=[queue.number, to.number])) < 2:
            # One of them has been deleted.
            return 0
        known = {
            message_id: metadata
            for message_id, record in database.run("metadata_of", message_ids=message_ids)
            if (metadata := _decoded(record)) is not None
        }
        leaving = self._take_out(queue, state, list(known), now_ms)
        if not leaving:
            return 0
        ids = [each.message_id for each in leaving]
        live = {row[0] for row in database.run("find_live", queue=to.number, message_ids=ids)}
        rest = [message_id for message_id in ids if message_id not in live]
        done: dict[int, int] = dict(database.run("take_done", queue=to.number, message_ids=rest))
        failed: dict[int, int] = dict(
            database.run("take_failed", queue=to.number, message_ids=rest)
        )
        before = done | failed
        # These queues hold the message both, and one of them from here on.
        let_go = [*(each for each in ids if each in live), *before]
        if let_go:
            database.run("let_go", message_ids=let_go)
        if live:
            database.run(
                "forget_attempts", queue=queue.number, message_ids=sorted(live.intersection(ids))
            )
        arriving = [each for each in leaving if each.message_id not in live]
        self._put_in(queue, to, arriving, before, known, now_ms)
        gone = len(ids)
        counts = {
            queue.number: {
                "failed" if state is State.FAILED else "live": -gone,
                "moved_out": gone,
            },
            to.number: {
                "live": len(arriving),
                "done": -len(done),
                "failed": -len(failed),
                "moved_in": len(arriving) - len(before),
                "redriven": len(before),
            },
        }
        for number, added in sorted(counts.items()):
            core.add_counts(number, now_ms, **added)
        core.wake(to, gone)
        if queue.fifo:
            # The head of a group may be gone, which others of it have waited for.
            core.wake(queue)
            core.zones.lower(
                {(queue.number, known[each].group.encode()): now_ms for each in ids}, now_ms
            )
        return gone

    def _take_out(
        self, queue: Queue, state: State, message_ids: list[int], now_ms: int
    ) -> list[_Leaving]:
        database = self._core.database
        if state is State.FAILED:
            rows = database.run("take_failed", queue=queue.number, message_ids=message_ids)
            return [_Leaving(message_id, attempts, now_ms) for message_id, attempts in sorted(rows)]
        rows = database.run(
            "remove_items",
            queue=queue.number,
            message_ids=message_ids,
            state=_STATES[state],
            now_ms=now_ms,
        )
        return [_Leaving(row[0], row[4], row[5]) for row in sorted(rows, key=lambda row: row[0])]

    def _put_in(
        self,
        queue: Queue,
        to: Queue,
        arriving: Sequence[_Leaving],
        before: dict[int, int],
        known: dict[int, Metadata],
        now_ms: int,
    ) -> None:
        if not arriving:
            return
        self._core.database.run(
            "move_attempts",
            queue=queue.number,
            to_queue=to.number,
            message_ids=[each.message_id for each in arriving],
            # What is told of it in the other queue comes first, and attempts only grow.
            befores=[before.get(each.message_id, 0) for each in arriving],
        )
        arrivals = []
        for each in arriving:
            metadata = known[each.message_id]
            attempts = min(before.get(each.message_id, 0) + each.attempts, MAX_ATTEMPTS)
            arrivals.append(
                Arrival(
                    to,
                    each.message_id,
                    metadata.group.encode(),
                    metadata.priority,
                    max(now_ms, each.vesting_ms),
                    attempts,
                    metadata.size,
                )
            )
        add_items(self._core, arrivals, now_ms)


def _decoded(record: bytes | None) -> Metadata | None:
    try:
        return None if record is None else decode_metadata(record)
    except CorruptRecord:
        return None
