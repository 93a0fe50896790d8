"""Which messages wait, which are being worked on, and how much more is wanted. Pure bookkeeping.

::

    claimed ──▶ waiting ──begin──▶ running ──finish──▶ its verdict counts        (ENDED)
                  │                  │  ├─ its lease was lost: nothing is settled (LOST)
                  │                  │  └─ given back before it returned          (LATE)
                  └─ lose, stranded  └─ overdue, abandon: given back, its slot stays taken

Once it is closing, what waits is set aside to be given back. What is stranded goes back as well,
because every slot is taken by a handler whose end does not count any more, or there is no slot.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.model import Delivery

__all__ = ["End", "Hands", "Task"]


class End(Enum):
    """How a handler's return counts."""

    ENDED = "ended"
    LOST = "lost"
    LATE = "late"


class Task:
    """A message in the hands of a worker."""

    __slots__ = ("began_ms", "delivery", "given_back", "lost")

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.began_ms = 0
        self.lost = False
        self.given_back = False


class Hands:
    """What a worker has in its hands."""

    def __init__(self, slots: int, prefetch: int) -> None:
        self._slots = slots
        self._prefetch = prefetch
        # Slots that are taken by what was lost or given back: nobody knows for how long.
        self._stuck = 0
        self._waiting: dict[str, Task] = {}
        self._running: dict[str, Task] = {}
        self._aside: dict[str, Task] = {}
        self.closing = False

    @property
    def waiting(self) -> int:
        """How many have not begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many slots are taken."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether nothing is left that could still end in good order."""
        left = self._waiting or self._aside
        return not left and all(t.given_back or t.lost for t in self._running.values())

    def room(self) -> int:
        """Return how many more to claim now: none while more than half of the prefetch waits."""
        if self.closing or not self._able or len(self._waiting) > self._prefetch // 2:
            return 0
        taken = len(self._waiting) + len(self._running)
        return max(0, self._slots + self._prefetch - taken)

    @property
    def _able(self) -> bool:
        """Whether a slot is free, or will be."""
        return self._slots > self._stuck

    def open_slot(self) -> None:
        """Note one more slot."""
        self._slots += 1

    def shut_slot(self) -> None:
        """Note that a slot is gone, until it is opened again."""
        self._slots -= 1

    def stranded(self) -> list[Task]:
        """Return what waits and no slot can take, to be given back."""
        if self._able:
            return []
        back = list(self._waiting.values())
        self._waiting.clear()
        return back

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """Take messages in."""
        held = self._aside if self.closing else self._waiting
        held.update((each.receipt, Task(each)) for each in deliveries)

    def next_receipt(self) -> str | None:
        """Return the receipt of the next one to work on."""
        return next(iter(self._waiting), None)

    def begin(self, now_ms: int) -> Task | None:
        """Return the next one to work on."""
        receipt = self.next_receipt()
        if receipt is None:
            return None
        task = self._running[receipt] = self._waiting.pop(receipt)
        task.began_ms = now_ms
        return task

    def finish(self, task: Task) -> End:
        """Note that a handler has returned; its slot is free."""
        if self._running.pop(task.delivery.receipt, None) and (task.given_back or task.lost):
            self._stuck -= 1
        if task.given_back:
            return End.LATE
        return End.LOST if task.lost else End.ENDED

    def lose(self, receipts: Iterable[str]) -> tuple[list[Task], list[Task]]:
        """Note leases that were lost; return what is not begun any more, and what runs."""
        unbegun, running = [], []
        for receipt in receipts:
            task = self._waiting.pop(receipt, None) or self._aside.pop(receipt, None)
            if task is not None:
                unbegun.append(task)
                continue
            task = self._running.get(receipt)
            if task is not None and not (task.lost or task.given_back):
                task.lost = True
                self._stuck += 1
                running.append(task)
        return unbegun, running

    def overdue(self, now_ms: int, limit_ms: int) -> tuple[list[Task], int | None]:
        """Return what has run for too long, to be given back, and when to look again."""
        due, next_ms = [], None
        for task in self._running.values():
            if task.given_back or task.lost:
                continue
            at_ms = task.began_ms + limit_ms
            if at_ms <= now_ms:
                task.given_back = True
                self._stuck += 1
                due.append(task)
            else:
                next_ms = at_ms if next_ms is None else min(next_ms, at_ms)
        return due, next_ms

    def close(self) -> int:
        """Want no more messages; return how many are set aside."""
        self.closing = True
        self._aside.update(self._waiting)
        self._waiting.clear()
        return len(self._aside)

    def give_back(self) -> list[Task]:
        """Return what was set aside, to be given back."""
        back = list(self._aside.values())
        self._aside.clear()
        return back

    def abandon(self) -> tuple[list[Task], list[Task]]:
        """Return whatever has not ended, to be given back: not begun, and running."""
        self.closing = True
        unbegun = [*self.give_back(), *self._waiting.values()]
        self._waiting.clear()
        running = [t for t in self._running.values() if not (t.given_back or t.lost)]
        for task in running:
            task.given_back = True
        self._stuck += len(running)
        return unbegun, running
