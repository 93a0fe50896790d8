"""The verbs that only look: of a broker, and of a reader beside a store's owner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

from penstock import limits
from penstock.filters import Matcher, parse
from penstock.model import State
from penstock.validation import check_count, check_ids, check_optional, check_state, check_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.filters import RowTuple
    from penstock.model import (
        Attempt,
        LogPage,
        LogStats,
        MessageExplanation,
        Page,
        QueueSpec,
        QueueStats,
        StoreStats,
    )
    from penstock.store.contract import FullStore

T = TypeVar("T")


class StoreReader(ABC):
    """The verbs that only look: the base of :class:`~penstock.Broker` and of readers."""

    _store: FullStore

    @abstractmethod
    def _look(self, read: Callable[[int], T]) -> T:
        """Read, told the time, while nobody else is let in."""

    def queues(self) -> list[QueueSpec]:
        """Return the specs of all queues, by name."""
        return self._look(lambda _: [queue.spec for queue in self._store.queues()])

    def queue(self, name: str) -> QueueSpec:
        """Return the spec of a queue."""
        return self._look(lambda _: self._store.spec(name))

    def browse(
        self,
        queue: str,
        *,
        state: State | str = State.AVAILABLE,
        limit: int = 100,
        cursor: str | None = None,
        payloads: bool = True,
        message_id: int | None = None,
    ) -> Page:
        """Look at messages without leasing them; go on with ``cursor=page.next_cursor``.

        With ``message_id`` the page has that message alone, in whatever state it is, if the queue
        has it.
        """
        check_count(limit, "limit", 1, limits.MAX_BROWSE_LIMIT)
        checked = check_state(state)
        if cursor is not None:
            check_text(cursor, "cursor", limits.MAX_CURSOR_BYTES)
        if message_id is not None:
            check_ids([message_id])
        return self._look(
            lambda now_ms: self._store.browse(
                queue,
                checked,
                limit=limit,
                cursor=cursor,
                payloads=payloads,
                now_ms=now_ms,
                message_id=message_id,
            )
        )

    def attempts(self, queue: str, message_id: int) -> list[Attempt]:
        """Return every attempt at a message of a queue, the running one last."""
        check_ids([message_id])
        return self._look(lambda now_ms: self._store.attempts(queue, message_id, now_ms))

    def explain(self, queue: str, message_id: int) -> MessageExplanation:
        """Explain why a message is, or is not, in a queue, and say where it is."""
        # Loaded when used: most programs never ask.
        from penstock.broker.explain import explain_message  # noqa: PLC0415

        check_ids([message_id])
        return explain_message(self._look, self._store, self._takers, queue, message_id)

    def _takers(self, row: RowTuple) -> list[str]:
        """Return the queues whose filters would take a message now."""
        live = self._look(lambda _: self._store.queues())
        filters = {each.spec.name: parse(each.filter) for each in live if each.filter is not None}
        return Matcher(filters).match([row])[0]

    def stats(self, queue: str) -> QueueStats:
        """Return a queue's depth by state, oldest age and totals."""
        return self._look(lambda now_ms: self._store.queue_stats(queue, now_ms))

    def store_stats(self) -> StoreStats:
        """Return the totals of the whole store."""
        return self._look(lambda _: self._store.store_stats())

    def read_log(self, log: int = 0, *, begin: int | None = None, limit: int = 1_000) -> LogPage:
        """Read a page of a metadata log, from an offset or (None) from the log's cursor on."""
        check_count(log, "log", 0, limits.MAX_LOGS)
        check_count(limit, "limit", 1, limits.MAX_LOG_LIMIT)
        check_optional(begin, "begin", 0, limits.MAX_OFFSET)
        return self._look(lambda _: self._store.read_log(log, begin, limit))

    def log_stats(self) -> LogStats:
        """Describe the metadata log: offsets, logs, cursors, retention."""
        return self._look(lambda _: self._store.log_stats())
