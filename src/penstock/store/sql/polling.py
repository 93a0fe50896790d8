"""Who waits for messages of others: other processes publish too, and nobody tells this one.

A claim that finds nothing makes this process look, every tenth of a second, whether a pointer of
that queue has vested. After a while it wakes whoever may still wait: if somebody does, he looks,
finds nothing, and the watch goes on; else it ends by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.model import SweepCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.model import Delivery, Want
    from penstock.store.sql.claim import Claiming
    from penstock.store.sql.maintain import Upkeep
    from penstock.store.sql.session import Core

__all__ = ["Watching"]

# For how long a queue is watched after a claim has found nothing in it.
WATCH_MS: Final = 10_000
# How many waiting claims are woken for a pointer that has vested: nobody knows what is behind it.
WOKEN: Final = 100
# After a sweep that could do nothing of what is due.
STUCK_MS: Final = 50
# Between two sweeps in the background that look at everything, and between two steps of the nets.
UPKEEP_MS: Final = 200
NET_MS: Final = 5_000
FOLLOW_MS: Final = 60_000
# For how long the server keeps plans. Planning costs more than a claim, and less than it does to be
# wrong for long about how large a table is.
PLANS_MS: Final = 5_000


class Watching:
    """Claims and sweeps of a process that is not alone."""

    def __init__(self, core: Core, claiming: Claiming, upkeep: Upkeep, *, background: bool) -> None:
        self._core = core
        self._claiming = claiming
        self._upkeep = upkeep
        # Whether a thread sweeps all the time: then it looks for others' work as well.
        self._background = background
        # Number of a queue -> until when it is watched
        self._watched: dict[int, int] = {}
        self._now_ms = 0
        self._upkeep_ms = self._net_ms = self._follow_ms = self._plans_ms = 0
        # Told every minute, so that a clock can follow the database's.
        self.follow: Callable[[], None] | None = None

    def claim(self, queue_name: str, wants: Sequence[Want], now_ms: int) -> list[list[Delivery]]:
        """Claim; what is looked for in vain is watched."""
        self._now_ms = now_ms
        self._forget_plans(now_ms)
        answers = self._claiming.claim(queue_name, wants, now_ms)
        if not all(answers):
            # One that finds something does not end this: another claim may still wait.
            queue = self._core.queues.get(queue_name)
            if queue is not None:
                self._watched[queue.number] = now_ms + WATCH_MS
        return answers

    def take_woken(self) -> dict[str, int | None]:
        """Return the queues that may have got something to claim since the last call.

        With each, about how many messages it has got; None: the queue is gone.
        """
        if not self._core.woken:
            return {}
        woken, self._core.woken = self._core.woken, {}
        known = self._core.queues
        return {name: count if name in known else None for name, count in woken.items()}

    def soonest_ms(self) -> int | None:
        """Return a time before which nothing is due, from memory alone."""
        due_ms = self._core.due_ms
        if not self._watched:
            return due_ms
        poll_ms = self._now_ms + self._jittered(self._core.tunables.poll_ms)
        return poll_ms if due_ms is None else min(due_ms, poll_ms)

    def sweep(self, now_ms: int, budget: int) -> SweepCounts:
        """Do what is due, and look whether others have published."""
        self._now_ms = now_ms
        self._forget_plans(now_ms)
        self._look(now_ms)
        due_ms = self._core.due_ms
        if self._background and now_ms < self._upkeep_ms and (due_ms is None or now_ms < due_ms):
            # Woken for the sake of a claim that waits: the rest can wait as well.
            counts = SweepCounts(next_due_ms=min(self._upkeep_ms, due_ms or self._upkeep_ms))
        else:
            self._upkeep_ms = now_ms + UPKEEP_MS
            counts = self._upkeep.sweep(now_ms, budget)
            self._cast_nets(now_ms)
        if not self._background:
            return counts
        tunables = self._core.tunables
        ahead_ms = tunables.poll_ms if self._watched else tunables.idle_poll_ms
        next_ms = now_ms + self._jittered(ahead_ms)
        if counts.next_due_ms is not None:
            next_ms = min(next_ms, counts.next_due_ms)
        if next_ms <= now_ms and not counts.total:
            # What is due and was not done another process is at: it is not asked for all the time.
            next_ms = now_ms + STUCK_MS
        return SweepCounts(
            leases_expired=counts.leases_expired,
            came_due=counts.came_due,
            failed=counts.failed,
            moved=counts.moved,
            removed=counts.removed,
            dedup_forgotten=counts.dedup_forgotten,
            next_due_ms=next_ms,
        )

    def _look(self, now_ms: int) -> None:
        """Wake claims that wait for queues which have a vested pointer."""
        core = self._core
        for number, until_ms in list(self._watched.items()):
            if now_ms >= until_ms or number not in core.by_number:
                del self._watched[number]
                queue = core.by_number.get(number)
                if queue is not None:
                    core.wake(queue, WOKEN)
        if not self._watched:
            return
        rows = core.database.do(
            lambda: core.database.run(
                "vested_queues",
                queues=list(self._watched),
                tokens=list(range(core.ring_high)),
                now_ms=now_ms,
            ),
            again=True,
        )
        for (number,) in rows:
            queue = core.by_number.get(number)
            if queue is not None:
                core.wake(queue, WOKEN)

    def _forget_plans(self, now_ms: int) -> None:
        if self._plans_ms <= now_ms < self._plans_ms + PLANS_MS:
            return
        database = self._core.database
        # Nothing is kept yet when the store has just been opened.
        if self._plans_ms and database.dialect == "postgresql":
            database.do(lambda: database.run("forget_plans"), again=True)
        self._plans_ms = now_ms

    def _cast_nets(self, now_ms: int) -> None:
        if self.follow is not None and not self._follow_ms <= now_ms < self._follow_ms + FOLLOW_MS:
            self._follow_ms = now_ms
            self.follow()
        if self._net_ms <= now_ms < self._net_ms + NET_MS:
            return
        self._net_ms = now_ms
        self._core.zones.look_for_idle(now_ms)
        self._core.zones.look_for_orphans(now_ms)

    def _jittered(self, wait_ms: int) -> int:
        return int(wait_ms * (0.8 + 0.4 * self._core.random()))
