"""The messages that a worker holds, which its claimers, pool, heartbeat and settler share.

::

    add ──▶ waiting ──take──▶ running ──finish──▶ settled as its handler says      (IN_TIME)
              │                 │  ├─ its lease was lost: nothing is settled        (LOST)
              │                 │  └─ released before its handler returned          (LATE)
              └─ lose, strand   └─ release_overdue, abandon: released; its slot stays taken

No message is begun whose lease may have ended, and none is settled before its handler has returned,
unless it is given back. Once the worker is closing, no message is begun; waiting ones are given
back when no claim of this worker could take them again. Waiting messages are stranded, and given
back at once, if there is no slot, or every slot has a handler whose return does not count any more.
"""

from __future__ import annotations

import logging
import threading
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock import limits
from penstock.model import Delivery
from penstock.worker.outcome import CUT_OFF, Action, Settlement, over_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.clock import Clock
    from penstock.worker.leases import Heartbeat, Settler
    from penstock.worker.outcome import Handler
    from penstock.worker.stats import WorkerCounters, WorkerStats

log = logging.getLogger("penstock.worker")

# With no prefetch given, messages are held ahead for so long a time, of about so many bytes, and at
# most so many.
AHEAD_MS: Final = 250
AHEAD_BYTES: Final = 16 * 1024 * 1024
MAX_AHEAD: Final = 1_000
# The mean time of a handler is that of about so many messages.
MEAN_OF: Final = 32
NOT_BEGUN: Final = Settlement(Action.GIVE_BACK, reason="not begun: the worker was stopped")
STRANDED: Final = Settlement(Action.GIVE_BACK, reason="not begun: no handler is free")


class WorkerSettings(NamedTuple):
    """The options of a :class:`~penstock.Worker`, which checks and describes them."""

    handler: Handler | str
    middleware: tuple[object, ...] = ()
    concurrency: int = 1
    prefetch: int | None = 1
    lease_ms: int | None = None
    time_limit_ms: int | None = None
    consumer: str = ""
    drain_ms: int = 0
    dequeue_max: int = 100
    wait_ms: int = 0
    scan_interval_ms: int = 100
    child_messages: int | None = None
    child_memory_bytes: int | None = None


class HandlerEnd(Enum):
    """How a handler's return counts."""

    IN_TIME = "in time"
    LOST = "lost"
    LATE = "late"


class Task(msgspec.Struct, eq=False):
    """A message that a worker holds."""

    delivery: Delivery
    began_ms: int = 0
    end: HandlerEnd = HandlerEnd.IN_TIME


class WorkerState:
    """The messages that a worker holds. Thread-safe."""

    def __init__(
        self,
        settings: WorkerSettings,
        slots: int,
        *,
        clock: Clock,
        heartbeat: Heartbeat,
        settler: Settler,
        counters: WorkerCounters,
        on_change: Callable[[], None],
    ) -> None:
        """``on_change`` is called when the worker may have become ready, not ready, or idle."""
        self.settings = settings
        self._slots = slots
        self.clock = clock
        self._heartbeat = heartbeat
        heartbeat.on_lost = self.lose
        self._settler = settler
        settler.on_settled = self._look_for_room
        self.counters = counters
        self.on_change = on_change
        self._waiting: dict[str, Task] = {}
        self._running: dict[str, Task] = {}
        # Running tasks whose end does not count any more; nobody knows how long they take.
        self._detached = 0
        # Messages that a server was asked to push and has not, by queue.
        self.asked: dict[str, int] = {}
        # Messages to hold ahead if the settings do not say; the mean time of a handler, and the
        # mean size of a message.
        self._ahead = settings.concurrency
        self._mean_ms: float | None = None
        self._mean_bytes = 1024.0
        self.closing = False
        self._ended = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        # Called when messages can be taken, for a pool that can't wait in take().
        self.on_ready: Callable[[], None] = lambda: None
        # Called when a message has begun, for the watch over time limits.
        self.on_begun: Callable[[], None] = lambda: None

    @property
    def counts(self) -> tuple[int, int]:
        """How many messages run, and how many wait."""
        return len(self._running), len(self._waiting)

    def stats(self) -> WorkerStats:
        """Return the counters, and the messages that are held."""
        with self._lock:
            began = [(task.delivery.queue, task.began_ms) for task in self._running.values()]
            waiting = [task.delivery.queue for task in self._waiting.values()]
        now_ms = self._heartbeat.now_ms()
        running = [(queue, (now_ms - began_ms) / 1000) for queue, began_ms in began]
        return self.counters.snapshot(running, waiting, unsettled=self._settler.unsettled)

    @property
    def idle(self) -> bool:
        """Whether no message is left that could still end in good order."""
        with self._lock:
            return self._is_idle()

    def _is_idle(self) -> bool:
        return not self._waiting and self._detached == len(self._running)

    # --- for claimers ------------------------------------------------------------------------

    def room(self, queue: str = "") -> int:
        """Return how many more to claim now: none while more than half of the prefetch waits.

        Of a queue, or of any of them.
        """
        no_slot = self._slots <= self._detached
        prefetch = self.settings.prefetch
        if prefetch is None:
            prefetch = self._ahead
        waiting = len(self._waiting)
        if self.asked:
            waiting += self.asked.get(queue, 0) if queue else min(self.asked.values())
        if self.closing or no_slot or waiting > prefetch // 2:
            return 0
        return max(0, self._slots + prefetch - waiting - len(self._running))

    def ask(self, queue: str, count: int) -> None:
        """Note that a server is to push so many messages of a queue more, or fewer."""
        with self._lock:
            self.asked[queue] = self.asked.get(queue, 0) + count
            if count < 0:
                self._room.notify_all()

    def wait_for_room(self, queue: str = "") -> int:
        """Return how many messages to claim; 0 if the worker is closing."""
        with self._lock:
            while not self.closing:
                room = self.room(queue)
                if room and self._settler.unsettled < limits.MAX_UNSETTLED:
                    return room
                self.clock.wait(self._room, None)
            return 0

    def pause(self, ms: int) -> None:
        """Wait for so long, or until the worker is closing."""
        self._wait_until(lambda: self.closing, ms)

    def _wait_until(self, condition: Callable[[], bool], within_ms: int) -> None:
        until_ms = self._heartbeat.now_ms() + within_ms
        with self._lock:
            while not condition() and (left_ms := until_ms - self._heartbeat.now_ms()) > 0:
                self.clock.wait(self._room, left_ms)

    def add(self, deliveries: Sequence[Delivery], *, lease_ms: int, queue: str = "") -> None:
        """Take claimed messages in; with ``queue``, they were asked for."""
        self.counters.add_claimed(deliveries, lease_ms=lease_ms)
        self._heartbeat.hold([each.receipt for each in deliveries], lease_ms=lease_ms)
        with self._lock:
            self._waiting.update((each.receipt, Task(each)) for each in deliveries)
            if queue:
                self.asked[queue] -= len(deliveries)
            self._strand()
            self._work.notify(len(deliveries))
        self.on_ready()

    # --- for pools -----------------------------------------------------------------------------

    def take(self, *, wait: bool = True) -> Task | None:
        """Begin the next message; None if there is none: now, or with ``wait`` ever."""
        while True:
            with self._lock:
                while self.closing or not self._waiting:
                    if not wait or self._ended:
                        return None
                    self.clock.wait(self._work, None)
                receipt = next(iter(self._waiting))
                task = None
                if self._heartbeat.is_live(receipt):
                    task = self._running[receipt] = self._waiting.pop(receipt)
                    task.began_ms = self._heartbeat.now_ms()
                    if self.room():
                        self._room.notify_all()
                else:
                    lost = self._lose([receipt])
            if task is None:
                self._report_lost(*lost)
                continue
            self.on_begun()
            return task

    def finish(self, task: Task, settlement: Settlement) -> None:
        """Note that a handler has returned, and settle its message; its slot is free."""
        receipt = task.delivery.receipt
        with self._lock:
            # In one step: a thread that sees that nothing runs must find the receipt with the
            # settler.
            del self._running[receipt]
            if task.end is not HandlerEnd.IN_TIME:
                self._detached -= 1
            settled = task.end is HandlerEnd.IN_TIME and settlement.action is not Action.LEAVE
            if settled:
                alone = not (self._running or self._waiting)
                self._settler.put(settlement, [receipt], hurry=alone)
            # Not for every message: each claimer that wakes takes the lock from the handlers.
            if self.closing or self.room():
                self._room.notify_all()
        if not settled:
            self._heartbeat.forget([receipt])
        if task.end is HandlerEnd.LATE:
            self.counters.add("late", queue=task.delivery.queue)
        else:
            self._count(task, settlement)
        self._report_idle()

    def _count(self, task: Task, settlement: Settlement) -> None:
        took_ms = self._heartbeat.now_ms() - task.began_ms
        seconds = took_ms / 1000
        mean_ms = took_ms if self._mean_ms is None else self._mean_ms
        self._mean_ms = mean_ms = mean_ms + (took_ms - mean_ms) / MEAN_OF
        self._mean_bytes += (len(task.delivery.payload) - self._mean_bytes) / MEAN_OF
        slots = self.settings.concurrency
        ahead = int(
            min(slots * AHEAD_MS / max(mean_ms, 0.1), AHEAD_BYTES / max(1, self._mean_bytes))
        )
        self._ahead = max(slots, min(ahead, MAX_AHEAD))
        self.counters.add_handled(task.delivery, settlement, seconds)

    @property
    def ready(self) -> bool:
        """Whether the worker claims messages, and could work on one."""
        return self._slots > 0 and not self.closing

    def open_slot(self) -> None:
        """Note that one more message can be worked on at a time."""
        with self._lock:
            self._slots += 1
            self._room.notify_all()
        self.on_change()

    def shut_slot(self) -> None:
        """Note that one message less can be worked on, nobody knows for how long."""
        with self._lock:
            self._slots -= 1
            self._strand()
        self.on_change()

    def _strand(self) -> None:
        """Give back the waiting messages if no slot can take them."""
        if self._slots <= self._detached and self._waiting and not self.closing:
            count = len(self._waiting)
            log.warning("no handler is free: %d messages that wait are given back", count)
            self._give_back_waiting(STRANDED)

    def _give_back_waiting(self, settlement: Settlement) -> None:
        self._settler.put(settlement, list(self._waiting), hurry=True)
        self._waiting.clear()

    # --- for the heartbeat, time limits and the settler ------------------------------------------

    def lose(self, receipts: Iterable[str]) -> None:
        """Note that leases were lost: such messages do not begin, and are not settled."""
        with self._lock:
            lost = self._lose(receipts)
        if any(lost):
            self._report_lost(*lost)

    def _lose(self, receipts: Iterable[str]) -> tuple[list[Task], list[Task]]:
        unbegun, running = [], []
        for receipt in receipts:
            task = self._waiting.pop(receipt, None)
            if task is not None:
                unbegun.append(task)
            elif (task := self._running.get(receipt)) and task.end is HandlerEnd.IN_TIME:
                self._detach(task, HandlerEnd.LOST)
                running.append(task)
        if unbegun or running:
            # An extension whose answer is on its way must not hold them again.
            self._heartbeat.forget([task.delivery.receipt for task in (*unbegun, *running)])
            self._strand()
            self._room.notify_all()
        return unbegun, running

    def _report_lost(self, unbegun: list[Task], running: list[Task]) -> None:
        for task in (*unbegun, *running):
            self.counters.add("lost", queue=task.delivery.queue)
        for task in running:
            text = "the lease of message %d of %s was lost: what its handler does will not count"
            log.warning(text, task.delivery.message_id, task.delivery.queue)
        if unbegun:
            log.warning("the leases of %d messages were lost before they began", len(unbegun))
        self._report_idle()

    def release_overdue(self, limit_ms: int) -> int | None:
        """Release messages that run for too long; return in how many ms to look again."""
        now_ms = self._heartbeat.now_ms()
        settlement = over_limit(limit_ms)
        with self._lock:
            left_ms = {task: task.began_ms + limit_ms - now_ms for task in self._in_time()}
            overdue = [task for task, left in left_ms.items() if left <= 0]
            self._release(overdue, settlement)
            self._strand()
        for task in overdue:
            self._count(task, settlement)
        if overdue:
            self._report_idle()
        return min((left for left in left_ms.values() if left > 0), default=None)

    def _in_time(self) -> list[Task]:
        return [task for task in self._running.values() if task.end is HandlerEnd.IN_TIME]

    def _release(self, tasks: list[Task], settlement: Settlement) -> None:
        for task in tasks:
            self._detach(task, HandlerEnd.LATE)
        self._settler.put(settlement, [task.delivery.receipt for task in tasks], hurry=True)

    def _detach(self, task: Task, end: HandlerEnd) -> None:
        task.end = end
        self._detached += 1

    def _look_for_room(self) -> None:
        """Let claimers look again: messages were settled."""
        with self._lock:
            self._room.notify_all()

    # --- for the end of the worker ---------------------------------------------------------------

    def close(self) -> int:
        """Claim and begin no more messages; return how many have not begun."""
        with self._lock:
            self.closing = True
            count = len(self._waiting)
            self._room.notify_all()
        self._report_idle()
        return count

    def give_back(self) -> None:
        """Give back waiting messages; called when no claim of this worker can take them again."""
        with self._lock:
            self._give_back_waiting(NOT_BEGUN)

    def abandon(self) -> int:
        """Give back all messages that have not ended, and return how many of them had begun."""
        with self._lock:
            self.closing = True
            self._give_back_waiting(NOT_BEGUN)
            running = self._in_time()
            self._release(running, CUT_OFF)
            self._room.notify_all()
        for task in running:
            self._count(task, CUT_OFF)
        return len(running)

    def wait_for_idle(self, within_ms: int) -> None:
        """Wait until no message is left that could end in good order, for so long at the most."""
        self._wait_until(self._is_idle, within_ms)

    def end(self) -> None:
        """Let all threads that wait in :meth:`take` go."""
        with self._lock:
            self._ended = True
            self._work.notify_all()

    def _report_idle(self) -> None:
        if self.closing and self.idle:
            self.on_change()
