"""The contract in plain Python: dictionaries, lists, loops over everything.

Nothing here is fast or durable; all of it is meant to be seen to be right. The model is told what
a store answered and either agrees, following the store where the contract leaves it a choice
(which group is next, how long a back-off is), or raises ``AssertionError``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from penstock.model import Attempt, AttemptEnd, OutcomeStatus, QueueStats, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.model import Delivery, Entry, Message, Outcome, Value

__all__ = ["Copy", "Model", "ModelQueue"]

WAITING = (State.AVAILABLE, State.DELAYED)
TOTALS = (
    "enqueued_total",
    "claimed_total",
    "acked_total",
    "released_total",
    "lease_expired_total",
    "failed_total",
    "redriven_total",
    "removed_total",
    "moved_in_total",
    "moved_out_total",
)


@dataclass
class Copy:
    """A message as one queue has it."""

    message_id: int
    message: Message
    published_at_ms: int
    visible_at_ms: int
    state: State
    attempts: int = 0
    forgiven: int = 0
    receipt: str = ""
    deadline_ms: int = 0
    consumer: str = ""
    claimed_at_ms: int = 0
    ended_at_ms: int = 0
    reason: str = ""
    history: list[Attempt] = field(default_factory=list)

    @property
    def group(self) -> str:
        """The message's group."""
        return self.message.group

    @property
    def first_claimed_ms(self) -> int | None:
        """When the first attempt began: one that ended, or the one that is under way."""
        begun = [each.claimed_at_ms for each in self.history if each.number == 1]
        if self.state is State.IN_FLIGHT and self.attempts == 1:
            begun = [self.claimed_at_ms]
        return begun[0] if begun else None


@dataclass
class ModelQueue:
    """A queue: its settings, the messages in it, and its totals."""

    name: str
    takes: Callable[[Message], bool]
    fifo: bool
    settings: dict[str, Any]
    copies: dict[int, Copy] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0))
    # Ids that have left the queue, the latest last.
    removed: list[int] = field(default_factory=list)
    # waiting group -> {other group: claims that served it meanwhile}
    passed_over: dict[str, dict[str, int]] = field(default_factory=dict)

    def in_state(self, *states: State) -> list[Copy]:
        """Return the messages in a state, by id."""
        return [copy for _, copy in sorted(self.copies.items()) if copy.state in states]

    def order(self, group: str) -> list[Copy]:
        """Return what can be claimed of a group now, in the order in which it must be."""
        if not self.fifo:
            ready = [copy for copy in self.in_state(State.AVAILABLE) if copy.group == group]
            return sorted(ready, key=lambda c: (-c.message.priority, c.visible_at_ms))
        mine = [copy for copy in self.copies.values() if copy.group == group]
        if any(copy.state is State.IN_FLIGHT for copy in mine):
            return []
        line = sorted((c for c in mine if c.state in WAITING), key=lambda c: c.message_id)
        return list(takewhile(lambda c: c.state is State.AVAILABLE, line))

    def since_ms(self) -> int | None:
        """Return since when the message can be claimed that can be for longest.

        Of a FIFO queue the first messages of its groups count, also while others are in flight.
        """
        firsts = self.in_state(*WAITING)
        if self.fifo:
            firsts = list({copy.group: copy for copy in reversed(firsts)}.values())
        times = [copy.visible_at_ms for copy in firsts if copy.state is State.AVAILABLE]
        return min(times, default=None)

    def groups(self) -> list[str]:
        """Return the groups that something can be claimed of."""
        names = {copy.group for copy in self.copies.values()}
        return [name for name in sorted(names) if self.order(name)]


class Model:
    """The queues of a store and the dedup window, at a time that the caller sets."""

    def __init__(self, dedup_window_ms: int) -> None:
        self.now_ms = 0
        self.queues: dict[str, ModelQueue] = {}
        self.published = self.duplicates = self.unrouted = 0
        self._dedup_window_ms = dedup_window_ms
        self._dedup: dict[tuple[str, str], tuple[int, int]] = {}
        self._highest_id = 0

    def queue(
        self,
        name: str,
        takes: Callable[[Message], bool],
        *,
        fifo: bool = False,
        **settings: Any,
    ) -> None:
        """Add a queue."""
        self.queues[name] = ModelQueue(name, takes, fifo, settings)

    # --- time ----------------------------------------------------------------------------

    def catch_up(self) -> None:
        """End leases and delays that are over, and move dead letters."""
        for queue in self.queues.values():
            for copy in queue.in_state(State.IN_FLIGHT):
                if copy.deadline_ms <= self.now_ms:
                    queue.totals["lease_expired_total"] += 1
                    copy.visible_at_ms = self.now_ms
                    self._end_attempt(copy, AttemptEnd.EXPIRED, "")
                    self._retry_or_fail(queue, copy, "lease expired")
            for copy in queue.in_state(State.DELAYED):
                if copy.visible_at_ms <= self.now_ms:
                    copy.state = State.AVAILABLE
        for queue in self.queues.values():
            to = self.queues.get(queue.settings.get("dead_letter", ""))
            if to is not None:
                for copy in queue.in_state(State.FAILED):
                    self._move(queue, to, copy)

    def sweep(self) -> None:
        """Catch up, then remove what is past its retention."""
        self.catch_up()
        for queue in self.queues.values():
            for copy in list(queue.copies.values()):
                if copy.state in WAITING:
                    since_ms, setting = copy.visible_at_ms, "unclaimed_retention_ms"
                elif copy.state is State.IN_FLIGHT:
                    continue
                else:
                    since_ms, setting = copy.ended_at_ms, f"{copy.state.value}_retention_ms"
                kept_ms = queue.settings[setting]
                if kept_ms and since_ms + kept_ms <= self.now_ms:
                    self._remove(queue, copy)

    # --- publish -------------------------------------------------------------------------

    def publish(self, messages: Sequence[Message], ids: Sequence[int]) -> None:
        """Follow a publish that returned these ids."""
        assert len(ids) == len(messages)
        for message, message_id in zip(messages, ids, strict=True):
            if message.dedup_id is not None:
                scope = message.attributes.get("queue")
                key = (scope if isinstance(scope, str) else "", message.dedup_id)
                known_id, expires_ms = self._dedup.get(key, (0, 0))
                if expires_ms > self.now_ms:
                    assert message_id == known_id, f"{message_id}, a duplicate of {known_id}"
                    self.duplicates += 1
                    continue
                self._dedup[key] = (message_id, self.now_ms + self._dedup_window_ms)
            assert message_id > self._highest_id, f"id {message_id} after {self._highest_id}"
            self._highest_id = message_id
            self.published += 1
            takers = [queue for queue in self.queues.values() if queue.takes(message)]
            self.unrouted += not takers
            for queue in takers:
                delay_ms = message.delay_ms or queue.settings.get("delay_ms", 0)
                state = State.DELAYED if delay_ms else State.AVAILABLE
                queue.copies[message_id] = Copy(
                    message_id, message, self.now_ms, self.now_ms + delay_ms, state
                )
                queue.totals["enqueued_total"] += 1

    # --- claim ---------------------------------------------------------------------------

    def claim(
        self, name: str, limit: int, lease_ms: int, consumer: str, deliveries: Sequence[Delivery]
    ) -> None:
        """Follow a claim that returned these deliveries."""
        self.catch_up()
        queue = self.queues[name]
        orders = {group: queue.order(group) for group in queue.groups()}
        got: dict[str, list[int]] = {}
        for delivery in deliveries:
            copy = queue.copies.get(delivery.message_id)
            assert copy is not None, f"message {delivery.message_id} is not in {name}"
            assert copy.state is State.AVAILABLE, f"{delivery.message_id} is {copy.state.value}"
            got.setdefault(copy.group, []).append(delivery.message_id)
        self._check_order(orders, got)
        self._check_amount(queue, orders, got, limit)
        self._check_turns(queue, orders, got)
        assert len({delivery.lease for delivery in deliveries}) <= 1
        for delivery in deliveries:
            copy = queue.copies[delivery.message_id]
            copy.attempts += 1
            assert delivery.attempts == copy.attempts
            assert delivery.lease_deadline_ms == self.now_ms + lease_ms
            assert delivery.payload == copy.message.payload
            assert delivery.attributes == copy.message.attributes
            assert (delivery.group, delivery.priority) == (copy.group, copy.message.priority)
            assert delivery.published_at_ms == copy.published_at_ms
            copy.state = State.IN_FLIGHT
            copy.receipt = delivery.receipt
            copy.deadline_ms = delivery.lease_deadline_ms
            copy.consumer, copy.claimed_at_ms = consumer, self.now_ms
        queue.totals["claimed_total"] += len(deliveries)

    def _check_order(self, orders: dict[str, list[Copy]], got: dict[str, list[int]]) -> None:
        """Of each group, exactly its first messages; ties of time are in the order of ids."""
        for group, ids in got.items():
            expected = [copy.message_id for copy in orders.get(group, [])][: len(ids)]
            assert ids == expected, f"group {group!r} gave {ids}, its order is {expected}"

    def _check_amount(
        self,
        queue: ModelQueue,
        orders: dict[str, list[Copy]],
        got: dict[str, list[int]],
        limit: int,
    ) -> None:
        total = sum(map(len, got.values()))
        ready = sum(map(len, orders.values()))
        assert total <= limit, f"{total} messages for a limit of {limit}"
        if queue.fifo:
            # A group is visited once per claim, so that it may give less than it has, and the
            # shares of the others are rounded up to fill the batch: the last may have to wait.
            if total < limit:
                assert set(got) == set(orders), f"groups {set(orders) - set(got)} were left out"
            assert bool(total) == bool(ready)
        else:
            assert total == min(limit, ready), f"{total} of {ready} ready, limit {limit}"
        if limit >= len(orders) and not queue.fifo:
            assert set(got) == set(orders), f"groups {set(orders) - set(got)} got no share"

    def _check_turns(
        self, queue: ModelQueue, orders: dict[str, list[Copy]], got: dict[str, list[int]]
    ) -> None:
        """While a group waits, no other is served in more than one claim."""
        waiting = {group: queue.passed_over.get(group, {}) for group in set(orders) - set(got)}
        for group, served in waiting.items():
            for other in got:
                served[other] = served.get(other, 0) + 1
                assert served[other] <= 1, f"{other!r} was served twice while {group!r} waited"
        queue.passed_over = waiting

    def forget_turns(self) -> None:
        """Let turns begin anew: a restart or a removal may change who is next."""
        for queue in self.queues.values():
            queue.passed_over = {}

    # --- receipts ------------------------------------------------------------------------

    def _held(self, receipt: str) -> tuple[ModelQueue, Copy] | None:
        for queue in self.queues.values():
            for copy in queue.copies.values():
                if copy.state is State.IN_FLIGHT and copy.receipt == receipt:
                    return queue, copy
        return None

    def _judge(self, outcomes: Sequence[Outcome]) -> list[tuple[ModelQueue, Copy, Outcome]]:
        """Return what was accepted, having checked that the rest had to be refused."""
        accepted: list[tuple[ModelQueue, Copy, Outcome]] = []
        for outcome in outcomes:
            held = self._held(outcome.receipt)
            if held is None or any(held[1] is copy for _, copy, _ in accepted):
                assert outcome.status is OutcomeStatus.STALE, outcome
            elif held[1].deadline_ms <= self.now_ms:
                assert not outcome, outcome
            else:
                assert outcome, f"a good receipt was refused: {outcome}"
                accepted.append((*held, outcome))
        return accepted

    def ack(self, outcomes: Sequence[Outcome]) -> None:
        """Follow an ack."""
        for queue, copy, outcome in self._judge(outcomes):
            assert outcome.status is OutcomeStatus.DONE
            self._end_attempt(copy, AttemptEnd.ACKED, "")
            copy.state, copy.ended_at_ms = State.DONE, self.now_ms
            queue.totals["acked_total"] += 1

    def ack_late(self, name: str, message_id: int, attempt: int, *, done: bool) -> None:
        """Follow a late ack. A store may refuse one after a move, or if nobody saw the claim."""
        self.catch_up()
        queue = self.queues[name]
        copy = queue.copies.get(message_id)
        if done:
            assert copy is not None
            assert copy.state in WAITING
            assert not queue.fifo
            assert copy.attempts == attempt
            if copy.history and copy.history[-1].number == attempt:
                del copy.history[-1]
            self._end_attempt(copy, AttemptEnd.ACKED, "")
            copy.state, copy.ended_at_ms = State.DONE, self.now_ms
            queue.totals["acked_total"] += 1

    def release(
        self,
        outcomes: Sequence[Outcome],
        delay_ms: int | None,
        reason: str,
        *,
        unseen: bool = False,
    ) -> list[Copy]:
        """Follow a release; return what waits for a back-off that the store has chosen."""
        chosen = []
        for queue, copy, outcome in self._judge(outcomes):
            queue.totals["released_total"] += 1
            if unseen:
                assert outcome.status is OutcomeStatus.RETRYING
                copy.state, copy.receipt = State.AVAILABLE, ""
                copy.attempts -= 1
                continue
            self._end_attempt(copy, AttemptEnd.RELEASED, reason)
            copy.visible_at_ms = self.now_ms + (delay_ms or 0)
            default = f"released {queue.settings['max_attempts']} times"
            self._retry_or_fail(queue, copy, reason or default)
            failed = copy.state is State.FAILED
            assert outcome.status is (OutcomeStatus.FAILED if failed else OutcomeStatus.RETRYING)
            if delay_ms is None and not failed:
                chosen.append(copy)
        return chosen

    def backed_off(self, name: str, copy: Copy, visible_at_ms: int) -> None:
        """Take a back-off over from the store if it is one that the queue's settings allow."""
        settings = self.queues[name].settings
        failures = copy.attempts - copy.forgiven
        full = min(settings["backoff_cap_ms"], settings["backoff_base_ms"] * 2 ** (failures - 1))
        wait_ms = visible_at_ms - self.now_ms
        assert full / 2 <= wait_ms <= full, f"{wait_ms} ms after {failures} failures"
        copy.visible_at_ms = visible_at_ms
        copy.state = State.DELAYED if wait_ms else State.AVAILABLE

    def extend(self, outcomes: Sequence[Outcome], lease_ms: int) -> None:
        """Follow an extend of receipts."""
        for _, copy, outcome in self._judge(outcomes):
            assert outcome.status is OutcomeStatus.EXTENDED
            assert outcome.lease_deadline_ms == self.now_ms + lease_ms
            copy.deadline_ms = self.now_ms + lease_ms

    def extend_lease(self, token: str, outcomes: Sequence[Outcome], lease_ms: int) -> None:
        """Follow an extend of a whole lease: all of it that is still held must be there."""
        live = {
            copy.receipt
            for queue in self.queues.values()
            for copy in queue.in_state(State.IN_FLIGHT)
            if copy.receipt.startswith(token) and copy.deadline_ms > self.now_ms
        }
        assert live == {outcome.receipt for outcome in outcomes if outcome}
        self.extend(outcomes, lease_ms)

    def _end_attempt(self, copy: Copy, end: AttemptEnd, reason: str) -> None:
        copy.history.append(
            Attempt(copy.attempts, copy.consumer, copy.claimed_at_ms, self.now_ms, end, reason)
        )
        copy.receipt = ""

    def _retry_or_fail(self, queue: ModelQueue, copy: Copy, reason: str) -> None:
        if copy.attempts - copy.forgiven >= queue.settings["max_attempts"]:
            copy.state, copy.ended_at_ms, copy.reason = State.FAILED, self.now_ms, reason
            queue.totals["failed_total"] += 1
        else:
            later = copy.visible_at_ms > self.now_ms
            copy.state = State.DELAYED if later else State.AVAILABLE

    # --- mass moves ----------------------------------------------------------------------

    def redrive(self, name: str, chosen: Callable[[Copy], bool], count: int) -> None:
        """Follow a redrive of the failed messages that are chosen."""
        self.catch_up()
        queue = self.queues[name]
        moved = [copy for copy in queue.in_state(State.FAILED) if chosen(copy)]
        assert count == len(moved), f"{count} redriven, {len(moved)} were to be"
        for copy in moved:
            copy.state, copy.forgiven = State.AVAILABLE, copy.attempts
            copy.visible_at_ms = self.now_ms
            copy.reason = ""
        queue.totals["redriven_total"] += count

    def move(self, name: str, to: str, state: State, moved: Iterable[int]) -> None:
        """Follow a move of messages in a state: these are gone from the first queue."""
        queue = self.queues[name]
        for message_id in moved:
            copy = queue.copies[message_id]
            assert copy.state is state, f"{message_id} was moved and is {copy.state.value}"
            self._move(queue, self.queues[to], copy)

    def _move(self, queue: ModelQueue, to: ModelQueue, copy: Copy) -> None:
        message_id = copy.message_id
        del queue.copies[message_id]
        queue.removed.append(message_id)
        queue.totals["moved_out_total"] += 1
        queue.passed_over, to.passed_over = {}, {}
        there = to.copies.get(message_id)
        if there is not None and there.state not in {State.DONE, State.FAILED}:
            return
        before = 0 if there is None else there.attempts
        to.totals["moved_in_total" if there is None else "redriven_total"] += 1
        later = copy.state is State.DELAYED
        to.copies[message_id] = Copy(
            message_id,
            copy.message,
            copy.published_at_ms,
            copy.visible_at_ms if later else self.now_ms,
            State.DELAYED if later else State.AVAILABLE,
            attempts=before + copy.attempts,
            forgiven=before + copy.attempts,
            history=[
                *(() if there is None else there.history),
                *(replace(each, number=before + each.number) for each in copy.history),
            ],
        )

    def purge(self, name: str, states: Iterable[State], count: int) -> None:
        """Follow a purge."""
        self.catch_up()
        queue = self.queues[name]
        doomed = queue.in_state(*states)
        assert count == len(doomed), f"{count} purged, {len(doomed)} were to be"
        for copy in doomed:
            self._remove(queue, copy)

    def _remove(self, queue: ModelQueue, copy: Copy) -> None:
        del queue.copies[copy.message_id]
        queue.removed.append(copy.message_id)
        queue.totals["removed_total"] += 1
        queue.passed_over = {}

    # --- what can be seen ----------------------------------------------------------------

    def check_stats(self, stats: QueueStats) -> None:
        """Compare a queue's stats, all but the number of ready groups, which may be too high."""
        self.catch_up()
        queue = self.queues[stats.queue]
        since_ms = queue.since_ms()
        expected: dict[str, Any] = {state.value: len(queue.in_state(state)) for state in State}
        expected |= queue.totals
        expected["oldest_age_ms"] = None if since_ms is None else self.now_ms - since_ms
        actual = {name: getattr(stats, name) for name in expected}
        assert actual == expected, f"stats {actual}, expected {expected}"
        assert stats.groups_ready >= len(queue.groups())

    def check_entries(self, name: str, state: State, entries: Sequence[Entry]) -> None:
        """Compare all that a queue has in a state."""
        self.catch_up()
        expected = {copy.message_id: copy for copy in self.queues[name].in_state(state)}
        assert sorted(entry.message_id for entry in entries) == sorted(expected)
        for entry in entries:
            copy = expected[entry.message_id]
            attributes: dict[str, Value] = dict(copy.message.attributes)
            assert (entry.payload, entry.attributes) == (copy.message.payload, attributes)
            assert (entry.group, entry.priority) == (copy.group, copy.message.priority)
            assert (entry.state, entry.attempts) == (state, copy.attempts)
            assert entry.published_at_ms == copy.published_at_ms
            assert entry.first_claimed_ms == copy.first_claimed_ms
            if state in WAITING:
                assert entry.visible_at_ms == copy.visible_at_ms
            elif state is State.IN_FLIGHT:
                held = (entry.lease_deadline_ms, entry.consumer)
                assert held == (copy.deadline_ms, copy.consumer)
            else:
                assert entry.ended_at_ms == copy.ended_at_ms
                assert entry.reason == copy.reason

    def check_attempts(self, name: str, message_id: int, attempts: Sequence[Attempt]) -> None:
        """Compare the history of a message."""
        self.catch_up()
        copy = self.queues[name].copies.get(message_id)
        expected = [] if copy is None else list(copy.history)
        if copy is not None and copy.state is State.IN_FLIGHT:
            expected.append(
                Attempt(copy.attempts, copy.consumer, copy.claimed_at_ms, None, AttemptEnd.RUNNING)
            )
        assert list(attempts) == expected
