"""Queues and settings of several databases that are one store: the first has the truth.

Whoever changes something does so there, and then brings the others into line by what stands there.
If it dies in between, or one of them is away, somebody else does: at open, when a database is back,
and whenever a process finds them to differ. Each step names the number of the queue that it is for:
who was held up must not do it to one that was made anew under the same name.

A queue has the same number everywhere, which the first database gives out and never again. So one
that another database has and the first has not, looked at in this order, was deleted: it is not
about to be made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError, QueueNotFound, StorageFailed
from penstock.store.contract import FiltersChanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.store.sql.members import Member
    from penstock.store.sql.session import Core, Queue

__all__ = ["Agreement"]

# Looks that find others to be changing the same queues, one after the other, before it is an error.
_TRIES: Final = 20


class Agreement:
    """Brings databases into line with the first one."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._truth, *self._others = members
        # Database -> the versions at which it was last seen to be in line.
        self._agreed: dict[int, tuple[int, int]] = {}
        self._truth.store.ask_before_removal(self._gone_elsewhere)

    def check(self, now_ms: int) -> None:
        """Bring those into line that differ, by what this process knows."""
        for member in self._others:
            if member.up and self._truth.up and self._agreed.get(member.number) != self._at(member):
                self.settle(member, now_ms)

    def settle(self, member: Member, now_ms: int) -> int:
        """Bring a database into line, as of now; say how many messages went with queues."""
        removed = 0
        for _ in range(_TRIES):
            with member.use() as store:
                store.core.refresh()
            with self._truth.use() as truth:
                truth.core.refresh()
            at = self._at(member)
            try:
                with member.use():
                    count = self._mend(member, now_ms)
            except (FiltersChanged, QueueNotFound):
                # Another process is at it as well.
                continue
            if count is None:
                self._agreed[member.number] = at
                return removed
            removed += count
        raise PenstockError("queues are being changed faster than they can be brought into line")

    def _at(self, member: Member) -> tuple[int, int]:
        return self._truth.core.head.specs_version, member.core.head.specs_version

    def _mend(self, member: Member, now_ms: int) -> int | None:
        """Make what differs the same; None if nothing does, or how many messages went."""
        truth, own, store = self._truth.core, member.core, member.store
        removed, changed = 0, False
        for queue in list(own.queues.values()):
            if queue.number not in truth.by_number:
                removed += store.delete_queue(queue.name, now_ms, number=queue.number)
                changed = True
        for true in list(truth.queues.values()):
            present = own.by_number.get(true.number)
            if present is None:
                # One that is drained may have gone here already.
                if not true.coverage.draining:
                    store.create_queue(true.spec, now_ms, number=true.number)
                    changed = True
                continue
            if present.spec.version < true.spec.version:
                store.update_queue(true.spec, now_ms, leap=true.number)
                changed = True
            if true.coverage.draining and not present.coverage.draining:
                store.drain_queue(true.name, now_ms, number=true.number)
                changed = True
        if _log_of(own) != _log_of(truth):
            store.configure_log(*_log_of(truth), now_ms)
            changed = True
        return removed if changed else None

    def _gone_elsewhere(self, queue: Queue) -> bool:
        """Whether a drained queue has nothing left in any other database."""
        for member in self._others:
            if not member.up:
                return False
            try:
                with member.use() as store:
                    store.core.refresh()
            except StorageFailed:
                # It must not pass for a failure of the first one, which asks.
                return False
            if queue.number in member.core.by_number:
                return False
        return True


def _log_of(core: Core) -> tuple[int, int]:
    return core.settings.changes[-1][1], core.settings.retention_ms
