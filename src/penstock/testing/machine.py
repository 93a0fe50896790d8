"""A Hypothesis state machine that drives a store against the model.

Subclass :class:`StoreMachine` with a ``url`` and run its ``TestCase``, or call
``run_state_machine_as_test``. After every step the stats of all queues are compared, and ever so
often everything that can be seen of them.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.broker.requests import Change, Joint
from penstock.clock import ManualClock, TimeGuard
from penstock.errors import InvalidReceipt
from penstock.model import Message, State
from penstock.testing.model import Model
from penstock.testing.stores import Reopenable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.broker.broker import Broker
    from penstock.testing.model import Copy

__all__ = ["StoreMachine"]

DEDUP_WINDOW_MS: Final = 1_000
SETTINGS: Final[dict[str, int]] = {
    "lease_ms": 500,
    "max_attempts": 2,
    "backoff_base_ms": 100,
    "backoff_cap_ms": 300,
    "done_retention_ms": 1_000,
    "failed_retention_ms": 1_000,
    "unclaimed_retention_ms": 0,
    "bucket_exponent": 0,
}
QUEUES: Final = ("plain", "fifo", "shared", "dead")

# Few values, close together: what is rare in the world should be common here.
queue_names = st.sampled_from(QUEUES)
durations = st.sampled_from([0, 1, 100, 499, 500, 500, 1_000, 1_000, 5_000])
leases = st.sampled_from([1, 100, 500, 1_000, 10_000])
# Time that passes unseen before a verb: the verb itself must notice what is over.
pauses = st.sampled_from([0, 0, 0, 0, 1, 100, 500, 1_000])
picks = st.lists(st.integers(0, 5) | st.integers(0, 60), max_size=6)
messages = st.builds(
    lambda payload, to, shared, group, priority, delay_ms, dedup_id: Message(
        payload, {"queue": to, "shared": shared}, group, priority, delay_ms, dedup_id
    ),
    payload=st.binary(max_size=3),
    to=st.sampled_from(["plain", "fifo", "nowhere"]),
    shared=st.integers(0, 1),
    group=st.sampled_from(["", "a", "b"]),
    priority=st.sampled_from([0, 0, 1, 255]),
    delay_ms=st.sampled_from([0, 0, 0, 100, 1_000]),
    dedup_id=st.sampled_from([None, None, None, "x", "y"]),
)


class StoreMachine(RuleBasedStateMachine):
    """Random verbs, one manual clock, one model."""

    url: ClassVar[str] = "memory:"

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.place = tempfile.mkdtemp(prefix="penstock-")
        self.store = Reopenable(self.url.format(place=self.place))
        self.broker: Broker = self.store.open(
            self.clock, background=False, dedup_window_ms=DEDUP_WINDOW_MS, durability="relaxed"
        )
        self.guard = TimeGuard()
        self.model = Model(DEDUP_WINDOW_MS)
        self.receipts: list[str] = []
        # The queue, the message and the attempt that each receipt was given for.
        self.given: dict[str, tuple[str, int, int]] = {}
        self.settings: dict[str, Any] = {}

    def teardown(self) -> None:
        """Close the store and remove it."""
        self.store.close()
        shutil.rmtree(self.place, ignore_errors=True)

    @initialize(exponent=st.integers(0, 2), unclaimed=st.sampled_from([0, 0, 1_000]))
    def make_queues(self, exponent: int, unclaimed: int) -> None:
        """Make one queue of each kind."""
        self.tell_time()
        settings: dict[str, Any] = {
            **SETTINGS,
            "bucket_exponent": exponent,
            "unclaimed_retention_ms": unclaimed,
        }
        self.broker.create_queue("plain", **settings)
        self.broker.create_queue("fifo", ordering="fifo", **settings)
        self.broker.create_queue("shared", filter="shared = 1", **settings)
        self.model.queue("plain", lambda m: m.attributes["queue"] == "plain", **settings)
        self.model.queue("fifo", lambda m: m.attributes["queue"] == "fifo", fifo=True, **settings)
        self.model.queue("shared", lambda m: m.attributes["shared"] == 1, **settings)
        self.settings = settings
        self.make_dead()

    @rule()
    def make_dead(self) -> None:
        """Make the queue that only moves lead to, or find it there."""
        if "dead" not in self.model.queues:
            self.tell_time()
            self.broker.create_queue("dead", **self.settings)
            self.model.queue("dead", lambda _: False, **self.settings)

    @rule()
    def delete_dead(self) -> None:
        """Delete it: what fails for it stays where it is."""
        if "dead" in self.model.queues:
            self.tell_time()
            self.broker.delete_queue("dead")
            # The store saw to what was due first.
            self.model.catch_up()
            del self.model.queues["dead"]
            self.model.forget_turns()

    def tell_time(self, pause_ms: int = 0) -> None:
        """Give the model the time that the store will see in the verb that follows."""
        self.clock.advance(pause_ms)
        self.model.now_ms = self.guard.now_ms(self.clock.now_ms())

    def pick(self, numbers: Sequence[int]) -> list[str]:
        """Choose receipts, the latest first: good ones mostly, stale ones now and then."""
        given = self.receipts[::-1]
        return [given[number % len(given)] for number in numbers] if given else []

    # --- messages ------------------------------------------------------------------------

    @rule(batch=st.lists(messages, min_size=1, max_size=8))
    def publish(self, batch: list[Message]) -> None:
        """Publish a batch."""
        self.tell_time()
        self.model.publish(batch, self.broker.publish(batch))

    @rule(
        name=queue_names,
        limit=st.integers(1, 6),
        lease_ms=st.none() | leases,
        consumer=st.sampled_from(["", "ann"]),
        pause_ms=pauses,
    )
    def claim(
        self, name: str, limit: int, lease_ms: int | None, consumer: str, pause_ms: int
    ) -> None:
        """Claim without waiting."""
        if name not in self.model.queues:
            return
        self.tell_time(pause_ms)
        deliveries = self.broker.claim(name, limit=limit, lease_ms=lease_ms, consumer=consumer)
        default_ms = self.model.queues[name].settings["lease_ms"]
        self.model.claim(
            name, limit, default_ms if lease_ms is None else lease_ms, consumer, deliveries
        )
        self.receipts += [delivery.receipt for delivery in deliveries]
        self.given |= {each.receipt: (name, each.message_id, each.attempts) for each in deliveries}

    @rule(numbers=picks, pause_ms=pauses)
    def ack(self, numbers: list[int], pause_ms: int) -> None:
        """Ack receipts."""
        self.tell_time(pause_ms)
        self.model.ack(self.broker.ack(self.pick(numbers)))

    @rule(number=st.integers(0, 20), pause_ms=pauses)
    def ack_late(self, number: int, pause_ms: int) -> None:
        """Ack what waits again, if it was not claimed since, as SQS does."""
        for receipt in self.pick([number]):
            name, message_id, attempt = self.given[receipt]
            if name in self.model.queues:
                self.tell_time(pause_ms)
                change = Change(self.broker.acking_late([receipt], [attempt], name))
                self.broker.begin(Joint(changes=[change]))
                if isinstance(change.error, InvalidReceipt):
                    # The queue was made anew.
                    assert name == "dead"
                else:
                    self.model.ack_late(name, message_id, attempt, done=change.answer[0].ok)

    @rule(
        numbers=picks,
        delay_ms=st.none() | durations,
        reason=st.sampled_from(["", "no", "\N{SNOWMAN}"]),
        unseen=st.sampled_from([False, False, False, True]),
        pause_ms=pauses,
    )
    def release(
        self,
        numbers: list[int],
        delay_ms: int | None,
        reason: str,
        unseen: bool,  # noqa: FBT001 - drawn
        pause_ms: int,
    ) -> None:
        """Release receipts, and look up the back-off that the store chose."""
        self.tell_time(pause_ms)
        outcomes = self.broker.release(
            self.pick(numbers), delay_ms=delay_ms, reason=reason, unseen=unseen
        )
        chosen = self.model.release(outcomes, delay_ms, reason, unseen=unseen)
        for name, queue in self.model.queues.items():
            mine = [copy for copy in chosen if queue.copies.get(copy.message_id) is copy]
            if mine:
                self._take_over(name, mine)

    def _take_over(self, name: str, chosen: list[Copy]) -> None:
        times = {}
        for state in (State.DELAYED, State.AVAILABLE):
            for entry in self.broker.browse(name, state=state, limit=10_000):
                times[entry.message_id] = entry.visible_at_ms
        for copy in chosen:
            visible_at_ms = times.get(copy.message_id)
            assert visible_at_ms is not None, f"{copy.message_id} is lost after its release"
            self.model.backed_off(name, copy, visible_at_ms)

    @rule(numbers=picks, lease_ms=leases, pause_ms=pauses)
    def extend(self, numbers: list[int], lease_ms: int, pause_ms: int) -> None:
        """Extend single receipts."""
        self.tell_time(pause_ms)
        self.model.extend(self.broker.extend(self.pick(numbers), lease_ms=lease_ms), lease_ms)

    @rule(number=st.integers(0, 20), lease_ms=leases)
    def extend_lease(self, number: int, lease_ms: int) -> None:
        """Extend a whole lease."""
        for receipt in self.pick([number]):
            self.tell_time()
            token = receipt[:-17]
            outcomes = self.broker.extend(token, lease_ms=lease_ms)
            self.model.extend_lease(token, outcomes, lease_ms)

    # --- mass moves ----------------------------------------------------------------------

    @rule(
        name=queue_names,
        how=st.sampled_from(["all", "ids", "filter", "function"]),
        pause_ms=pauses,
    )
    def redrive(self, name: str, how: str, pause_ms: int) -> None:
        """Redrive all, the even ids, or by attribute."""
        if name not in self.model.queues:
            return
        self.tell_time(pause_ms)
        arguments: dict[str, Any] = {}
        if how == "ids":
            arguments = {"message_ids": range(0, 400, 2)}
        elif how == "filter":
            arguments = {"where": "shared = 1"}
        elif how == "function":
            arguments = {"where": lambda attributes: attributes["shared"] == 0}
        count = self.broker.redrive(name, **arguments)

        def is_chosen(copy: Copy) -> bool:
            if how == "ids":
                return copy.message_id in arguments["message_ids"]
            wanted = {"all": (0, 1), "filter": (1,), "function": (0,)}[how]
            return copy.message.attributes["shared"] in wanted

        self.model.redrive(name, is_chosen, count)

    @rule(
        pair=st.sampled_from([(a, b) for a in QUEUES for b in QUEUES if a != b]),
        state=st.sampled_from([State.FAILED, State.FAILED, State.AVAILABLE, State.DELAYED]),
        how=st.sampled_from(["all", "ids", "limit"]),
        pause_ms=pauses,
    )
    def move(self, pair: tuple[str, str], state: State, how: str, pause_ms: int) -> None:
        """Move all, the even ids, or three."""
        name, to = pair
        if not {name, to} <= set(self.model.queues):
            return
        self.tell_time(pause_ms)
        self.model.catch_up()
        arguments: dict[str, Any] = {}
        if how == "ids":
            known = self.model.queues[name].copies
            arguments = {"message_ids": [0, *(each for each in known if each % 2 == 0)]}
        elif how == "limit":
            arguments = {"limit": 3}
        count = self.broker.move(name, to, state=state, **arguments)
        there = {copy.message_id for copy in self.model.queues[name].in_state(state)}
        wanted = {each for each in there if how != "ids" or each % 2 == 0}
        moved = there - {e.message_id for e in self.broker.browse(name, state=state, limit=10_000)}
        assert moved <= wanted
        assert count == len(moved) == min(len(wanted), arguments.get("limit", len(wanted)))
        self.model.move(name, to, state, sorted(moved))

    @rule(name=queue_names, dead_letter=st.sampled_from(["", "dead", "dead", "plain", "shared"]))
    def choose_dead_letter(self, name: str, dead_letter: str) -> None:
        """Say where what fails is to go."""
        if name not in {"fifo", dead_letter} and {name, dead_letter} <= {"", *self.model.queues}:
            self.tell_time()
            self.broker.update_queue(name, dead_letter=dead_letter)
            self.model.queues[name].settings["dead_letter"] = dead_letter

    @rule(
        name=queue_names,
        states=st.lists(st.sampled_from(State), max_size=2, unique=True),
        pause_ms=pauses,
    )
    def purge(self, name: str, states: list[State], pause_ms: int) -> None:
        """Purge some states."""
        if name not in self.model.queues:
            return
        self.tell_time(pause_ms)
        self.model.purge(name, states, self.broker.purge(name, states=states))
        self.model.forget_turns()

    @rule(
        name=queue_names,
        change=st.sampled_from(
            [
                {"done_retention_ms": 0},
                {"done_retention_ms": 500},
                {"failed_retention_ms": 500},
                {"unclaimed_retention_ms": 0},
                {"unclaimed_retention_ms": 500},
                {"max_attempts": 1},
                {"max_attempts": 3},
                {"bucket_exponent": 0},
                {"bucket_exponent": 1},
                {"bucket_exponent": 3},
                {"lease_ms": 700},
            ]
        ),
    )
    def update(self, name: str, change: dict[str, int]) -> None:
        """Change a setting."""
        if name not in self.model.queues:
            return
        self.tell_time()
        self.broker.update_queue(name, **change)
        self.model.queues[name].settings.update(change)

    # --- time ----------------------------------------------------------------------------

    @rule(ms=durations)
    def advance(self, ms: int) -> None:
        """Let time pass."""
        self.clock.advance(ms)

    @rule(ms=st.sampled_from([1, 400, 10_000]))
    def step_back(self, ms: int) -> None:
        """Set the clock back."""
        self.clock.advance(-ms)

    @rule(ms=durations)
    def sweep(self, ms: int) -> None:
        """Let time pass, and sweep."""
        self.clock.advance(ms)
        self.tell_time()
        counts = self.broker.sweep()
        self.model.sweep()
        assert counts.next_due_ms is None or counts.next_due_ms > self.model.now_ms

    @rule()
    def reopen(self) -> None:
        """Close the store and open it again."""
        self.tell_time()
        # Time is as sure as the last thing that was stored at it.
        stray = [Message(b"", {"queue": "nowhere", "shared": 0})]
        self.model.publish(stray, self.broker.publish(stray))
        self.broker = self.store.reopen()
        self.guard = TimeGuard(self.model.now_ms)
        self.model.forget_turns()

    # --- looking -------------------------------------------------------------------------

    @rule(limit=st.sampled_from([1, 3, 1000]))
    def look_at_everything(self, limit: int) -> None:
        """Compare every message in every state, and every history."""
        self.tell_time()
        for name, queue in self.model.queues.items():
            for state in State:
                entries: list[Any] = []
                cursor: str | None = None
                while True:
                    page = self.broker.browse(name, state=state, limit=limit, cursor=cursor)
                    entries += page
                    cursor = page.next_cursor
                    if cursor is None:
                        break
                self.model.check_entries(name, state, entries)
            for message_id in [*queue.copies, *queue.removed[-20:]]:
                tries = self.broker.attempts(name, message_id)
                self.model.check_attempts(name, message_id, tries)

    @invariant()
    def stats_agree(self) -> None:
        """Compare depths and totals; none is lost."""
        if not self.model.queues:
            return
        self.tell_time()
        for name, queue in self.model.queues.items():
            stats = self.broker.stats(name)
            self.model.check_stats(stats)
            present = stats.available + stats.delayed + stats.in_flight + stats.done + stats.failed
            came = stats.enqueued_total + stats.moved_in_total
            assert came == present + stats.removed_total + stats.moved_out_total
            assert present == len(queue.copies)
        totals = self.broker.store_stats()
        assert totals.published_total == self.model.published
        assert totals.duplicates_total == self.model.duplicates
        assert totals.unrouted_total == self.model.unrouted
        assert (totals.quarantined_total, totals.healed_total) == (0, 0)
