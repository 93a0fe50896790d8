"""Messages move: back when a lease or a delay is over, and from one queue to another.

``catch_up`` does what time asks for. ``redrive`` makes failed messages available again. ``move``
and dead letters take messages into another queue.

A message is taken out of one queue and put into the other in one commit, so that it is in exactly
one of them whatever happens. It brings its attempts along, all of them forgiven. Two things need a
look before that: whether the other queue has the message already (it was routed to both, or moved
before), and what the payload's reference count becomes. Mostly neither costs anything: a payload
without a count has one holder, the queue that the message is leaving.

What came into a queue by a move is marked (``history``), because coverage knows nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.limits import MAX_ATTEMPTS
from penstock.model import State
from penstock.store import policy
from penstock.store.codec.metadata import read_metadata
from penstock.store.kv.settle import SettleVerbs
from penstock.store.kv.state import verb
from penstock.store.live import NO_LEASE, Item, lane_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.engines import Batch
    from penstock.errors import StoreDamaged
    from penstock.filters import Filter, RowTuple
    from penstock.store.codec.metadata import Metadata
    from penstock.store.kv.history import Ended
    from penstock.store.kv.queues import Queue

# A budget for verbs that must see everything that is due.
ALL: Final = 1_000_000
# Bounds of one step, which commits together: messages, and records of their attempts.
STEP_MESSAGES: Final = 1_000
STEP_ATTEMPTS: Final = 10_000


class _Leaving(NamedTuple):
    """A message that is to leave its queue, as that queue has it."""

    origin: Item | Ended
    lane: bytes
    row: RowTuple

    @property
    def message_id(self) -> int:
        return self.origin.message_id

    @property
    def attempts(self) -> int:
        return self.origin.attempts


class _Present(NamedTuple):
    """Which messages the other queue has: waiting or in flight, and in its history."""

    live: set[int]
    done: dict[int, Ended]
    failed: dict[int, Ended]


class MoveVerbs(SettleVerbs):
    """``move`` and ``redrive``, in steps of bounded size; and what is due."""

    # --- what is due -----------------------------------------------------------------------

    def is_due(self, now_ms: int) -> bool:
        """Whether ``catch_up`` may have something to do, from memory alone."""
        core = self.core
        next_due_ms = core.active.next_due_ms()
        return (
            now_ms >= core.leases.none_before_ms
            or (next_due_ms is not None and next_due_ms <= now_ms)
            or bool(core.dead_letters.pending)
        )

    @verb
    def catch_up(self, now_ms: int, budget: int) -> tuple[int, int, int, int]:
        """End leases and delays that are over, and move failed messages to dead letter queues.

        Return how many leases, delays, failures and moves: none while nothing can be written. If
        some rows can't be read, the rest is done before that is raised.
        """
        core = self.core
        expired = failures = came_due = 0
        damage: StoreDamaged | None = None
        if core.engine.away is not None:
            return 0, 0, 0, 0
        if now_ms >= core.leases.none_before_ms:
            expired, failures, damage = self.expire(now_ms, budget)
        next_due_ms = core.active.next_due_ms()
        if next_due_ms is not None and next_due_ms <= now_ms:
            batch = core.begin()
            moved = core.active.come_due(batch, now_ms, budget)
            came_due = sum(count for _, count in moved)
            core.commit(batch, [queue for queue, _ in moved], now_ms)
            for queue, _ in moved:
                core.wake(queue)
        dead = self._move_dead_letters(now_ms, budget) if core.dead_letters.pending else 0
        if damage is not None:
            raise damage
        return expired, came_due, failures, dead

    def _move_dead_letters(self, now_ms: int, budget: int) -> int:
        """Move failed messages into dead letter queues, up to a budget; return how many."""
        core = self.core
        moved = 0
        while moved < budget and core.dead_letters.pending:
            queue = core.by_number[next(iter(core.dead_letters.pending))]
            to = core.queues.get(queue.spec.dead_letter)
            if to is None or core.coverage[to.name].draining:
                core.dead_letters.park(queue)
                continue
            moved += self._move(queue, to, State.FAILED, None, budget - moved, now_ms)
            if moved < budget or not queue.counts.failed:
                core.dead_letters.pending.pop(queue.number, None)
        return moved

    # --- redrive ---------------------------------------------------------------------------

    @verb
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
        core = self.core
        queue = core.queue(queue_name)
        self.catch_up(now_ms, ALL)
        if message_ids is not None:
            chosen = self._chosen(core.history.find_failed(queue, message_ids), where)
            return self._redrive(queue, chosen, now_ms), None
        entries, further = core.history.page(
            queue, State.FAILED, after, STEP_MESSAGES, whole_parts=True
        )
        return self._redrive(queue, self._chosen(entries, where), now_ms), further

    def _chosen(
        self, entries: Sequence[Ended], where: Callable[[Metadata], bool] | None
    ) -> list[tuple[Ended, bytes]]:
        chosen = []
        for entry in entries:
            metadata = read_metadata(entry.metadata)
            if metadata is not None and (where is None or where(metadata)):
                chosen.append((entry, lane_of(metadata.group, metadata.priority)))
        return chosen

    def _redrive(self, queue: Queue, chosen: Sequence[tuple[Ended, bytes]], now_ms: int) -> int:
        if not chosen:
            return 0
        core = self.core
        batch = core.begin()
        core.history.take(batch, queue, State.FAILED, [entry for entry, _ in chosen])
        items = [
            Item(e.key, e.message_id, lane, e.attempts, e.attempts, now_ms, e.metadata)
            for e, lane in chosen
        ]
        core.active.add(batch, queue, items, now_ms)
        core.note_unclaimed(batch, queue, items)
        queue.counts.redriven_total += len(items)
        core.commit(batch, (queue,), now_ms)
        core.wake(queue)
        return len(items)

    # --- move ------------------------------------------------------------------------------

    @verb
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
        core = self.core
        queue, to = core.queue(queue_name), core.queue(to_name)
        policy.check_move(queue_name, to_name, draining=core.coverage[to_name].draining)
        self.catch_up(now_ms, ALL)
        return self._move(queue, to, state, message_ids, limit, now_ms)

    def _move(
        self,
        queue: Queue,
        to: Queue,
        state: State,
        message_ids: Sequence[int] | None,
        limit: int | None,
        now_ms: int,
    ) -> int:
        moved = 0
        compiled: dict[str, Filter] = {}
        for page in self._pages(queue, state, message_ids, now_ms):
            for step in _steps(page):
                chosen = step if limit is None else step[: limit - moved]
                self._move_step(queue, to, state, chosen, now_ms, compiled)
                moved += len(chosen)
                if moved == limit:
                    return moved
        return moved

    # --- what leaves -----------------------------------------------------------------------

    def _pages(
        self, queue: Queue, state: State, message_ids: Sequence[int] | None, now_ms: int
    ) -> Iterator[list[_Leaving]]:
        """Read a page at a time; each is read when the one before has been moved."""
        core = self.core
        if message_ids is not None:
            ids = sorted(set(message_ids))
            for start in range(0, len(ids), STEP_MESSAGES):
                chunk = ids[start : start + STEP_MESSAGES]
                if state is State.FAILED:
                    yield _leaving(core.history.find_failed(queue, chunk))
                    continue
                yield _leaving(
                    [
                        item
                        for item in core.active.live(queue, chunk)
                        if item.lease == NO_LEASE
                        and (item.visible_at_ms > now_ms) == (state is State.DELAYED)
                    ]
                )
            return
        after: bytes | None = b""
        while after is not None:
            if state is State.FAILED:
                ended, after = core.history.page(
                    queue, state, after, STEP_MESSAGES, whole_parts=True
                )
                yield _leaving(ended)
            else:
                items, after = core.active.page(queue, state, after, STEP_MESSAGES)
                yield _leaving(items)

    # --- one step --------------------------------------------------------------------------

    def _move_step(
        self,
        queue: Queue,
        to: Queue,
        state: State,
        leaving: Sequence[_Leaving],
        now_ms: int,
        compiled: dict[str, Filter],
    ) -> None:
        core = self.core
        present = self._present(to, leaving, compiled)
        batch = core.begin()
        self._take_out(batch, queue, [each.origin for each in leaving])
        merged = [each for each in leaving if each.message_id in present.live]
        core.history.forget_attempts(batch, queue, [(m.message_id, m.attempts) for m in merged])
        ended = {**present.done, **present.failed}
        # These queues hold the message both, and one of them from here on.
        let_go = [each.message_id for each in merged] + list(ended)
        if let_go:
            core.payloads.let_go(batch, let_go)
        for its_state, entries in ((State.DONE, present.done), (State.FAILED, present.failed)):
            if entries:
                core.history.take(batch, to, its_state, list(entries.values()))
        arriving = [each for each in leaving if each.message_id not in present.live]
        if arriving:
            self._put_in(batch, queue, to, state, arriving, ended, now_ms)
        queue.counts.moved_out_total += len(leaving)
        core.commit(batch, (queue, to), now_ms)
        core.wake(to)
        if queue.fifo:
            # The head of a group may be gone, which others of it have waited for.
            core.wake(queue)

    def _take_out(self, batch: Batch, queue: Queue, origins: Sequence[Item | Ended]) -> None:
        core = self.core
        items = [each for each in origins if isinstance(each, Item)]
        if items:
            core.active.remove(batch, queue, items)
        else:
            entries = [each for each in origins if not isinstance(each, Item)]
            core.history.take(batch, queue, State.FAILED, entries)

    def _put_in(
        self,
        batch: Batch,
        queue: Queue,
        to: Queue,
        state: State,
        arriving: Sequence[_Leaving],
        ended: dict[int, Ended],
        now_ms: int,
    ) -> None:
        core = self.core
        items = []
        tried = []
        for each in arriving:
            origin, id_ = each.origin, each.message_id
            # What is told of it in the other queue comes first, and attempts only grow.
            before = ended[id_].attempts if id_ in ended else 0
            attempts = min(before + each.attempts, MAX_ATTEMPTS)
            visible_at_ms = now_ms
            if isinstance(origin, Item) and state is State.DELAYED:
                visible_at_ms = max(now_ms, origin.visible_at_ms)
            items.append(
                Item(id_, id_, each.lane, attempts, attempts, visible_at_ms, origin.metadata)
            )
            tried.append((id_, each.attempts, before))
        core.history.move_attempts(batch, queue, to, tried)
        core.active.add(batch, to, items, now_ms)
        core.note_unclaimed(batch, to, items)
        core.history.mark(batch, to, items)
        to.counts.moved_in_total += len(items) - len(ended)
        to.counts.redriven_total += len(ended)

    # --- what is there already ---------------------------------------------------------------

    def _present(
        self, to: Queue, leaving: Sequence[_Leaving], compiled: dict[str, Filter]
    ) -> _Present:
        """Find out which of the messages the other queue has."""
        core = self.core
        shared = core.payloads.shared([each.message_id for each in leaving])
        marks = core.history.marks(to, sorted(shared))
        coverage = core.coverage[to.name]
        known_from = coverage.known_from or 0
        open_ids = [
            each.message_id
            for each in leaving
            if each.message_id in shared
            and (
                each.message_id in marks
                or each.message_id < known_from
                or coverage.had(each.row, each.message_id, compiled)
            )
        ]
        if not open_ids:
            return _Present(set(), {}, {})
        live = self._where_marked(to, marks)
        rest = [id_ for id_ in open_ids if id_ not in live]
        failed = {entry.message_id: entry for entry in core.history.find_failed(to, rest)}
        rest = [id_ for id_ in rest if id_ not in failed]
        if rest:
            live |= {item.message_id for item in core.active.live(to, rest)}
        rest = [id_ for id_ in rest if id_ not in live]
        done = {entry.message_id: entry for entry in core.history.find_done(to, rest)}
        return _Present(live, done, failed)

    def _where_marked(self, to: Queue, marks: dict[int, int]) -> set[int]:
        """Give the messages that are live under the key that they came in with."""
        active = self.core.active
        keys = list(marks.values())
        found = [*active.waiting(to, keys), *active.find(to, keys)] if keys else []
        return {item.message_id for item in found if item is not None} & marks.keys()


def _leaving(origins: Sequence[Item | Ended]) -> list[_Leaving]:
    """Make out lanes; a message whose metadata can't be read stays where it is."""
    leaving = []
    for origin in origins:
        m = read_metadata(origin.metadata)
        if m is None:
            continue
        row = (m.attributes, m.group, m.priority, m.published_at_ms, m.size)
        leaving.append(_Leaving(origin, lane_of(m.group, m.priority), row))
    return leaving


def _steps(leaving: Sequence[_Leaving]) -> Iterator[Sequence[_Leaving]]:
    """Cut a page into what commits together."""
    start = attempts = 0
    for at, each in enumerate(leaving):
        attempts += each.attempts
        if at > start and (at - start >= STEP_MESSAGES or attempts > STEP_ATTEMPTS):
            yield leaving[start:at]
            start, attempts = at, each.attempts
    if start < len(leaving):
        yield leaving[start:]
