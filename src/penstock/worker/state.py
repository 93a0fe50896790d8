"""Where feeders, pools, leases and the settler meet: the hands of a worker, behind one lock.

Feeders wait here for room and bring messages; pools take them and say what came of them. Nothing
is begun whose lease may have ended, and nothing is settled before its handler has returned, unless
it is given back.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock import limits
from penstock.worker.hands import End
from penstock.worker.outcome import Act, Verdict, over_limit, released

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.clock import Clock
    from penstock.model import Delivery
    from penstock.worker.hands import Hands, Task
    from penstock.worker.heartbeat import Leases
    from penstock.worker.retry import Failures
    from penstock.worker.settler import Settler
    from penstock.worker.source import Source
    from penstock.worker.stats import Meters

__all__ = ["CUT_OFF", "Floor"]

log = logging.getLogger("penstock.worker")

CUT_OFF: Final = released("cut off: the worker was stopped", failed=True)
NOT_BEGUN: Final = Verdict(Act.GIVE_BACK, reason="not begun: the worker was stopped")
STRANDED: Final = Verdict(Act.GIVE_BACK, reason="not begun: no handler is free")


class Floor:
    """What a worker has in its hands. Thread-safe."""

    def __init__(
        self,
        hands: Hands,
        *,
        clock: Clock,
        leases: Leases,
        settler: Settler,
        meters: Meters,
        failures: Failures,
        on_idle: Callable[[], None],
    ) -> None:
        self._hands = hands
        self._clock = clock
        self._leases = leases
        self._settler = settler
        self._meters = meters
        self._failures = failures
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._ended = False
        # Told when something can be taken, for a pool that can't wait in take().
        self.on_ready: Callable[[], None] | None = None
        # Told when something has begun, for who watches over time limits.
        self.on_begun: Callable[[], None] | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """How many run, and how many wait."""
        return self._hands.running, self._hands.waiting

    @property
    def idle(self) -> bool:
        """Whether nothing is left that could still end in good order."""
        with self._lock:
            return self._hands.idle

    @property
    def closing(self) -> bool:
        """Whether no more messages are wanted."""
        return self._hands.closing

    # --- for feeders -------------------------------------------------------------------------

    def wait_for_room(self) -> int:
        """Return how many messages to bring; 0 if no more are wanted, ever."""
        with self._lock:
            while not self._hands.closing:
                room = self._hands.room()
                if room and self._settler.unsettled < limits.MAX_UNSETTLED:
                    return room
                self._clock.wait(self._room, None)
            return 0

    def pause(self, ms: int) -> None:
        """Wait for so long, or until no more messages are wanted."""
        until_ms = self._leases.now_ms() + ms
        with self._lock:
            while not self._hands.closing and (left_ms := until_ms - self._leases.now_ms()) > 0:
                self._clock.wait(self._room, left_ms)

    def bring(self, source: Source, deliveries: Sequence[Delivery]) -> None:
        """Take claimed messages in."""
        self._meters.claimed(deliveries, lease_ms=source.lease_ms)
        self._leases.hold([each.receipt for each in deliveries], lease_ms=source.lease_ms)
        with self._lock:
            self._hands.add(deliveries)
            self._give_back_stranded()
            self._work.notify(len(deliveries))
        if self.on_ready is not None:
            self.on_ready()

    # --- for pools -----------------------------------------------------------------------------

    def take(self, *, wait: bool = True) -> Task | None:
        """Begin the next message; None if there is none: now, or with ``wait`` ever."""
        while True:
            with self._lock:
                while (receipt := self._hands.next_receipt()) is None:
                    if not wait or self._ended:
                        return None
                    self._clock.wait(self._work, None)
                task = None
                if self._leases.live(receipt):
                    task = self._hands.begin(self._leases.now_ms())
                    if self._hands.room():
                        self._room.notify_all()
                else:
                    lost = self._lose([receipt])
            if task is None:
                self._tell_lost(*lost)
                continue
            if self.on_begun is not None:
                self.on_begun()
            return task

    def done(self, task: Task, verdict: Verdict) -> None:
        """Say what came of a message that was taken."""
        delivery = task.delivery
        with self._lock:
            # In one step: who sees that nothing runs must find its end with the settler.
            end = self._hands.finish(task)
            settled = end is End.ENDED and verdict.act is not Act.LEAVE
            if settled:
                alone = not (self._hands.running or self._hands.waiting)
                self._settler.put(verdict, [delivery.receipt], hurry=alone)
            self._room.notify_all()
        if not settled:
            self._leases.forget([delivery.receipt])
        if end is End.LATE:
            self._meters.add("late")
        else:
            self._count(task, verdict)
        self._tell_idle()

    def _count(self, task: Task, verdict: Verdict) -> None:
        delivery = task.delivery
        seconds = (self._leases.now_ms() - task.began_ms) / 1000
        self._meters.handled(seconds, failed=verdict.failed, attempts=delivery.attempts)
        if verdict.failed:
            self._failures.tell(verdict, delivery.queue, delivery.message_id)

    def open_slot(self) -> None:
        """Say that one more message can be worked on at a time."""
        with self._lock:
            self._hands.open_slot()
            self._room.notify_all()

    def shut_slot(self) -> None:
        """Say that one message less can be worked on, nobody knows for how long."""
        with self._lock:
            self._hands.shut_slot()
            self._give_back_stranded()
        self._tell_idle()

    # --- for leases, limits and the settler ----------------------------------------------------

    def lost(self, receipts: list[str]) -> None:
        """Note leases that were lost."""
        with self._lock:
            unbegun, running = self._lose(receipts)
        self._tell_lost(unbegun, running)

    def _lose(self, receipts: list[str]) -> tuple[list[Task], list[Task]]:
        unbegun, running = self._hands.lose(receipts)
        # An extension whose answer is on its way must not hold them again.
        self._leases.forget([task.delivery.receipt for task in (*unbegun, *running)])
        self._give_back_stranded()
        self._room.notify_all()
        return unbegun, running

    def _tell_lost(self, unbegun: list[Task], running: list[Task]) -> None:
        self._meters.add("lost", len(unbegun) + len(running))
        for task in running:
            log.warning(
                "the lease of message %d of %s was lost: what its handler does will not count",
                task.delivery.message_id,
                task.delivery.queue,
            )
        if unbegun:
            log.warning("the leases of %d messages were lost before they began", len(unbegun))
        self._tell_idle()

    def give_back_overdue(self, limit_ms: int) -> int | None:
        """Give back what runs for too long; return in how many ms to look again."""
        now_ms = self._leases.now_ms()
        verdict = over_limit(limit_ms)
        with self._lock:
            overdue, next_ms = self._hands.overdue(now_ms, limit_ms)
            self._settler.put(verdict, [task.delivery.receipt for task in overdue], hurry=True)
            self._give_back_stranded()
        for task in overdue:
            self._count(task, verdict)
        if overdue:
            self._tell_idle()
        return None if next_ms is None else max(0, next_ms - now_ms)

    def settled(self) -> None:
        """Let feeders look again: there may be room."""
        with self._lock:
            self._room.notify_all()

    # --- for who stops -------------------------------------------------------------------------

    def close(self) -> int:
        """Want no more messages; return how many are set aside because they have not begun."""
        with self._lock:
            aside = self._hands.close()
            self._room.notify_all()
        self._tell_idle()
        return aside

    def give_back(self) -> None:
        """Give back what was set aside; called when no claim of this worker could take it."""
        with self._lock:
            back = self._hands.give_back()
            self._settler.put(NOT_BEGUN, [task.delivery.receipt for task in back], hurry=True)

    def abandon(self) -> int:
        """Give back whatever has not ended, and return how many of it had begun."""
        with self._lock:
            unbegun, running = self._hands.abandon()
            self._room.notify_all()
        self._settler.put(NOT_BEGUN, [task.delivery.receipt for task in unbegun], hurry=True)
        self._settler.put(CUT_OFF, [task.delivery.receipt for task in running], hurry=True)
        for task in running:
            self._count(task, CUT_OFF)
        return len(running)

    def wait_for_idle(self, within_ms: int) -> None:
        """Wait until nothing is left that could end in good order, for so long at the most."""
        until_ms = self._leases.now_ms() + within_ms
        with self._lock:
            while not self._hands.idle and (left_ms := until_ms - self._leases.now_ms()) > 0:
                self._clock.wait(self._room, left_ms)

    def end(self) -> None:
        """Let everybody who waits in :meth:`take` go."""
        with self._lock:
            self._ended = True
            self._work.notify_all()

    def _give_back_stranded(self) -> None:
        back = self._hands.stranded()
        if back:
            log.warning("no handler is free: %d messages that wait are given back", len(back))
            self._settler.put(STRANDED, [task.delivery.receipt for task in back], hurry=True)

    def _tell_idle(self) -> None:
        if self._hands.closing and self.idle:
            self._on_idle()
