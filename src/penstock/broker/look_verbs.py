"""The verbs that only look, for whoever has a store: its broker, or a reader beside the owner."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from penstock import limits
from penstock.model import State
from penstock.validation import check_count, check_ids, check_state, check_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.model import Attempt, Page, QueueSpec, QueueStats, StoreStats
    from penstock.store.contract import Store

__all__ = ["LookVerbs"]

T = TypeVar("T")


class LookVerbs:
    """A part of :class:`~penstock.Broker` and of :class:`~penstock.Reader`."""

    _store: Store

    def _look(self, read: Callable[[int], T]) -> T:
        """Read, told the time, while nobody else is let in."""
        raise NotImplementedError

    def queues(self) -> list[QueueSpec]:
        """Return the specs of all queues, by name."""
        return self._look(lambda _: self._store.specs())

    def browse(
        self,
        queue: str,
        *,
        state: State | str = State.AVAILABLE,
        limit: int = 100,
        cursor: str | None = None,
        payloads: bool = True,
    ) -> Page:
        """Look at messages without leasing them; go on with ``cursor=page.next_cursor``."""
        check_count(limit, "limit", 1, limits.MAX_BROWSE_LIMIT)
        checked = check_state(state)
        if cursor is not None:
            check_text(cursor, "cursor", limits.MAX_CURSOR_BYTES)
        return self._look(
            lambda now_ms: self._store.browse(
                queue,
                checked,
                limit=limit,
                cursor=cursor,
                payloads=payloads,
                now_ms=now_ms,
            )
        )

    def attempts(self, queue: str, message_id: int) -> list[Attempt]:
        """Return every attempt at a message of a queue, the running one last."""
        check_ids([message_id])
        return self._look(lambda now_ms: self._store.attempts(queue, message_id, now_ms))

    def stats(self, queue: str) -> QueueStats:
        """Return a queue's depth by state, oldest age and totals."""
        return self._look(lambda now_ms: self._store.queue_stats(queue, now_ms))

    def store_stats(self) -> StoreStats:
        """Return the totals of the whole store."""
        return self._look(lambda _: self._store.store_stats())
