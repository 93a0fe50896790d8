"""Messages move: back when a lease or a delay is over, and from one queue to another.

``catch_up`` does what time asks for. ``redrive`` makes failed messages available again,
``ack_late`` settles those that wait again. ``move`` and dead letters take messages into another
queue.

A message is taken out of one queue and put into the other in one commit, so that it is in exactly
one of them whatever happens. It brings its attempts along, all of them forgiven. Two things need a
look before that: whether the other queue has the message already (it was routed to both, or moved
before), and what the payload's reference count becomes. Mostly neither costs anything: a payload
without a count has one holder, the queue that the message is leaving.

What came into a queue by a move is marked (``history``), because coverage knows nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from penstock.errors import InvalidReceipt
from penstock.limits import MAX_ATTEMPTS
from penstock.model import OutcomeStatus, State
from penstock.store import policy
from penstock.store.codec.claimed import TOKEN_CHARS, parse_receipts
from penstock.store.codec.metadata import read_metadata
from penstock.store.codec.records import NO_LEASE
from penstock.store.kv.publish import PublishVerbs
from penstock.store.kv.settle import SettleVerbs, outcomes_of
from penstock.store.kv.state import verb
from penstock.store.life import life, log_move, log_step
from penstock.store.live import Item, lane_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.engines import Batch
    from penstock.errors import StoreDamaged
    from penstock.filters import Filter
    from penstock.model import Outcome
    from penstock.store.codec.metadata import Metadata
    from penstock.store.codec.records import Ended
    from penstock.store.kv.queues import Queue
    from penstock.store.kv.settle import Answer

# A budget for verbs that must see everything that is due.
ALL: Final = 1_000_000
# Bounds of one step, which commits together: messages, and records of their attempts.
STEP_MESSAGES: Final = 1_000
STEP_ATTEMPTS: Final = 10_000
# A message that leaves its queue, as that queue has it, and its metadata.
Leaving: TypeAlias = "tuple[Item | Ended, Metadata]"


class MoveVerbs(SettleVerbs, PublishVerbs):
    """``move`` and ``redrive``, in steps of bounded size; and what is due."""

    # --- what is due -----------------------------------------------------------------------

    def is_due(self, now_ms: int) -> bool:
        """Whether ``catch_up`` may have something to do, from memory alone."""
        next_due_ms = self.active.next_due_ms()
        return (
            now_ms >= self.leases.none_before_ms
            or (next_due_ms is not None and next_due_ms <= now_ms)
            or bool(self.dead_letters.pending or self.overfull)
        )

    @verb
    def catch_up(self, now_ms: int, budget: int) -> tuple[int, int, int, int]:
        """End leases and delays that are over, drop what queues have too much, move dead letters.

        Return how many leases, delays, failures and moves: none while nothing can be written, or
        the store is being copied to. If some rows can't be read, the rest is done before that is
        raised.
        """
        expired = failures = came_due = 0
        damage: StoreDamaged | None = None
        if self.engine.away is not None or self.identity.routing == policy.COPYING:
            return 0, 0, 0, 0
        if now_ms >= self.leases.none_before_ms:
            expired, failures, damage = self.expire(now_ms, budget)
        next_due_ms = self.active.next_due_ms()
        if next_due_ms is not None and next_due_ms <= now_ms:
            batch = self.begin()
            moved = self.active.come_due(batch, now_ms, budget)
            came_due = sum(len(ids) for _, ids in moved)
            if len(batch):
                self.commit(batch, [queue for queue, _ in moved], now_ms)
            for queue, ids in moved:
                self.wake(queue)
                if life.level:
                    log_step("come_due", queue.name, ids)
        if self.overfull:
            failures += self.drop_excess(now_ms, budget)
        dead = self._move_dead_letters(now_ms, budget) if self.dead_letters.pending else 0
        if damage is not None:
            raise damage
        return expired, came_due, failures, dead

    def _move_dead_letters(self, now_ms: int, budget: int) -> int:
        """Move failed messages into dead letter queues, up to a budget; return how many."""
        moved = 0
        while moved < budget and self.dead_letters.pending:
            queue = self.by_number[next(iter(self.dead_letters.pending))]
            to = self.by_name.get(queue.spec.dead_letter)
            if to is None or to.coverage.draining:
                self.dead_letters.park(queue)
                continue
            moved += self._move(queue, to, State.FAILED, None, budget - moved, now_ms, dead=True)
            if moved < budget or not queue.counts.failed:
                self.dead_letters.pending.pop(queue.number, None)
        return moved

    # --- late acks -------------------------------------------------------------------------

    @verb
    def ack_late(
        self,
        receipts: Sequence[str],
        attempts: Sequence[int],
        *,
        queue_name: str,
        now_ms: int,
    ) -> list[Outcome]:
        """Settle messages as done that wait again, if nobody has claimed them since."""
        queue = self.queue(queue_name)
        tokens, keys = parse_receipts(self.identity.store_id, receipts)
        if any(token.queue != queue.number for token in tokens):
            raise InvalidReceipt(f"a receipt is of another queue than {queue_name!r}")
        self.catch_up(now_ms, ALL)
        answers: list[Answer] = [OutcomeStatus.STALE] * len(receipts)
        places: dict[int, int] = {}
        for place, item in enumerate([] if queue.fifo else self.active.waiting(queue, keys)):
            # At the bound attempts are not counted any more: none is known to be the last.
            if item is not None and 0 < item.attempts == attempts[place] < MAX_ATTEMPTS:
                answers[places.setdefault(item.key, place)] = item
        items = [item for item in answers if isinstance(item, Item)]
        if items:
            batch = self.begin()
            self.active.remove(batch, queue, items)
            self.history.add(batch, queue, State.DONE, [(items, None)], "", now_ms)
            if queue.spec.done_retention_ms:
                due_ms = now_ms + queue.spec.done_retention_ms
                self.retention.lower((queue.number, "done"), due_ms)
            consumers = [self.history.ack_attempt(batch, queue, item, now_ms) for item in items]
            self.commit(batch, (queue,), now_ms)
            for item, consumer in zip(items, consumers, strict=True) if life.level else ():
                lease = receipts[places[item.key]][:TOKEN_CHARS]
                log_step("ack", queue.name, [item.message_id], lease, consumer, "late")
        self.stale_receipts += len(receipts) - len(items)
        return outcomes_of(receipts, answers, OutcomeStatus.DONE)

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
        """Make failed messages available again; return how many, and where the next page begins."""
        queue = self.queue(queue_name)
        self.catch_up(now_ms, ALL)
        further: bytes | None = None
        if message_ids is not None:
            entries = self.history.find_failed(queue, message_ids)
        else:
            entries, further = self.history.page(
                queue, State.FAILED, after, STEP_MESSAGES, whole_parts=True
            )
        chosen = [
            (entry, metadata)
            for entry in entries
            if (metadata := read_metadata(entry.metadata)) is not None
            and (where is None or where(metadata))
        ]
        items = [
            Item(e.key, e.message_id, lane_of(m.group, m.priority), e.attempts, e.attempts, now_ms,
                 e.metadata)
            for e, m in chosen
        ]  # fmt: skip
        if items:
            self.check_room(queue, len(items), sum(m.size for _, m in chosen), older=True)
            batch = self.begin()
            self.history.take(batch, queue, State.FAILED, [entry for entry, _ in chosen])
            self.active.add(batch, queue, items, now_ms)
            self.note_unclaimed(batch, queue, items)
            queue.counts.redriven_total += len(items)
            self.commit(batch, (queue,), now_ms)
            self.wake(queue)
            if life.level:
                log_step("redrive", queue.name, [item.message_id for item in items])
        return len(items), further

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
        queue, to = self.queue(queue_name), self.queue(to_name)
        policy.check_move(queue_name, to_name, draining=to.coverage.draining)
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
        *,
        dead: bool = False,
    ) -> int:
        """Move messages in steps; ``dead``: as dead letters, which no limit refuses."""
        moved = 0
        for step in self._steps(queue, state, message_ids, now_ms):
            chosen = step if limit is None else step[: limit - moved]
            self._move_step(queue, to, state, chosen, now_ms, dead=dead)
            moved += len(chosen)
            if moved == limit:
                break
        return moved

    def _pages(
        self, queue: Queue, state: State, message_ids: Sequence[int] | None, now_ms: int
    ) -> Iterator[Sequence[Item | Ended]]:
        """Read the messages to move, a page at a time: the next when the one before was moved."""
        if message_ids is None:
            after: bytes | None = b""
            while after is not None:
                page, after = self.page(queue, state, after, STEP_MESSAGES, whole_parts=True)
                yield page
            return
        ids = sorted(set(message_ids))
        for start in range(0, len(ids), STEP_MESSAGES):
            chunk = ids[start : start + STEP_MESSAGES]
            if state is State.FAILED:
                yield self.history.find_failed(queue, chunk)
            else:
                yield [
                    item
                    for item in self.active.live(queue, chunk)
                    if item.lease == NO_LEASE
                    and (item.visible_at_ms > now_ms) == (state is State.DELAYED)
                ]

    def _steps(
        self, queue: Queue, state: State, message_ids: Sequence[int] | None, now_ms: int
    ) -> Iterator[list[Leaving]]:
        """Cut pages into steps; a message whose metadata can't be read stays where it is."""
        for page in self._pages(queue, state, message_ids, now_ms):
            rest = list(page)
            while rest:
                step: list[Leaving] = []
                attempts = taken = 0
                for origin in rest:
                    attempts += origin.attempts
                    if step and (len(step) >= STEP_MESSAGES or attempts > STEP_ATTEMPTS):
                        break
                    taken += 1
                    metadata = read_metadata(origin.metadata)
                    if metadata is not None:
                        step.append((origin, metadata))
                if step:
                    yield step
                rest = rest[taken:]
                if rest and state is State.FAILED:
                    # The step before may have cut the parts that the others are in.
                    rest[:] = self.history.find_failed(queue, [each.message_id for each in rest])

    def _move_step(
        self,
        queue: Queue,
        to: Queue,
        state: State,
        leaving: Sequence[Leaving],
        now_ms: int,
        *,
        dead: bool,
    ) -> None:
        live, ended = self._present(to, leaving)
        arriving = [each for each in leaving if each[0].message_id not in live]
        if not dead:
            sizes = [metadata.size for _, metadata in arriving]
            self.check_room(to, len(arriving), sum(sizes), largest=max(sizes, default=0))
        batch = self.begin()
        items = [origin for origin, _ in leaving if isinstance(origin, Item)]
        if items:
            self.active.remove(batch, queue, items)
        else:
            entries = [origin for origin, _ in leaving if not isinstance(origin, Item)]
            self.history.take(batch, queue, State.FAILED, entries)
        merged = [(o.message_id, o.attempts) for o, _ in leaving if o.message_id in live]
        self.history.forget_attempts(batch, queue, merged)
        known = {**ended[State.DONE], **ended[State.FAILED]}
        # Both queues hold these messages, and one of them from here on.
        let_go = [message_id for message_id, _ in merged] + list(known)
        if let_go:
            self.payloads.let_go(batch, let_go)
        for its_state, found in ended.items():
            if found:
                self.history.take(batch, to, its_state, list(found.values()))
        if arriving:
            self._put_in(batch, queue, to, state, arriving, known, now_ms)
        queue.counts.moved_out_total += len(leaving)
        self.commit(batch, (queue, to), now_ms)
        if life.level:
            out, in_ = ([origin.message_id for origin, _ in some] for some in (leaving, arriving))
            log_move(queue.name, to.name, out, in_, dead=dead)
        self.wake(to)
        if queue.fifo:
            # The head of a group may be gone, which others of it have waited for.
            self.wake(queue)

    def _put_in(
        self,
        batch: Batch,
        queue: Queue,
        to: Queue,
        state: State,
        arriving: Sequence[Leaving],
        ended: dict[int, Ended],
        now_ms: int,
    ) -> None:
        items = []
        tried = []
        for origin, m in arriving:
            id_ = origin.message_id
            # Its attempts in the other queue come first, and attempts only grow.
            before = ended[id_].attempts if id_ in ended else 0
            attempts = min(before + origin.attempts, MAX_ATTEMPTS)
            due_ms = now_ms
            if isinstance(origin, Item) and state is State.DELAYED:
                due_ms = max(now_ms, origin.visible_at_ms)
            lane = lane_of(m.group, m.priority)
            items.append(Item(id_, id_, lane, attempts, attempts, due_ms, origin.metadata))
            tried.append((id_, origin.attempts, before))
        self.history.move_attempts(batch, queue, to, tried)
        self.active.add(batch, to, items, now_ms)
        self.note_unclaimed(batch, to, items)
        self.history.mark(batch, to, items)
        to.counts.moved_in_total += len(items) - len(ended)
        to.counts.redriven_total += len(ended)

    def _present(
        self, to: Queue, leaving: Sequence[Leaving]
    ) -> tuple[set[int], dict[State, dict[int, Ended]]]:
        """Find the messages that the other queue has: live ones, and ended ones by state."""
        ended: dict[State, dict[int, Ended]] = {State.DONE: {}, State.FAILED: {}}
        shared = self.payloads.shared([origin.message_id for origin, _ in leaving])
        marks = self.history.marks(to, sorted(shared))
        coverage = to.coverage
        compiled: dict[str, Filter] = {}
        known_from = coverage.known_from or 0
        rest = []
        for origin, m in leaving:
            id_ = origin.message_id
            if id_ in shared:
                row = (m.attributes, m.group, m.priority, m.published_at_ms, m.size)
                if id_ in marks or id_ < known_from or coverage.had(row, id_, compiled):
                    rest.append(id_)
        if not rest:
            return set(), ended
        # Marked messages are live under the key that they came in with, if they are.
        keys = list(marks.values())
        found = [*self.active.waiting(to, keys), *self.active.find(to, keys)] if keys else []
        live = {item.message_id for item in found if item is not None} & marks.keys()
        rest = [id_ for id_ in rest if id_ not in live]
        failed = {entry.message_id: entry for entry in self.history.find_failed(to, rest)}
        rest = [id_ for id_ in rest if id_ not in failed]
        if rest:
            live |= {item.message_id for item in self.active.live(to, rest)}
        rest = [id_ for id_ in rest if id_ not in live]
        done = {entry.message_id: entry for entry in self.history.find_done(to, rest)}
        return live, {State.DONE: done, State.FAILED: failed}
