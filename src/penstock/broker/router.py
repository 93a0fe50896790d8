"""Routing by filters: which queues take a message, and storing messages by their routes.

A router keeps the compiled filters of all queues, and follows the changes that this process or
another one makes to them.
"""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidMessage
from penstock.filters import Matcher, parse
from penstock.store.contract import FiltersChanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.filters import RowTuple
    from penstock.packing import PackedMessage
    from penstock.store.contract import FullStore

_envelope_of: Final = attrgetter("envelope")


class Router:
    """Routes messages by the filters of a store's queues. Called inside a change of the runner."""

    def __init__(self, store: FullStore, dedup_window_ms: int) -> None:
        self._store = store
        self._dedup_window_ms = dedup_window_ms
        # The filters that the matcher was made from, and the store's count of their changes.
        self._matcher: Matcher[str] = Matcher()
        self._live: dict[str, str] = {}
        self._matched = -1
        # Whether a filter may read the size of payloads, by its text.
        self._reads_payloads = False
        # Held while the matcher matches or is changed.
        self._lock = threading.Lock()
        self._follow_filters()

    def publish(
        self, messages: Sequence[PackedMessage], target: str | None, now_ms: int
    ) -> list[int]:
        """Store messages, which must all go to the target if there is one; return their ids."""
        routed_at = self._store.progress.filter_changes
        routes = self.route(messages, now_ms, targeted=target is not None)
        if target is not None:
            self.check_target(target, routes)
        return self.put(messages, routes, now_ms, routed_at)

    def route(
        self, messages: Sequence[PackedMessage], now_ms: int, *, targeted: bool
    ) -> list[list[str]]:
        """Return the queues of each message; a pipeline needs them only if they are to be checked.

        ``targeted``: some must go to a queue.
        """
        if self._matched != self._store.progress.filter_changes:
            self._follow_filters()
        if not self._inline and not targeted:
            return []
        with self._lock:
            if self._reads_payloads:
                return self._matcher.match(
                    [
                        (it.attributes, it.group, it.priority, now_ms, len(message.payload))
                        for message in messages
                        for it in (message.envelope,)
                    ]
                )
            # Messages with the same envelope go the same way: most of a producer's do.
            envelopes = list(map(_envelope_of, messages))
            numbers = list(map(id, envelopes))
            different = dict(zip(numbers, envelopes, strict=True))
            found = self._matcher.match(
                [(it.attributes, it.group, it.priority, now_ms, 0) for it in different.values()]
            )
        routes = dict(zip(different, found, strict=True))
        return list(map(routes.__getitem__, numbers))

    def check_target(self, target: str, routes: Sequence[Sequence[str]]) -> None:
        """Refuse messages that must go to a queue if one of them does not."""
        spec = self._store.spec(target)
        if self._matched != self._store.progress.filter_changes:
            # Another process has made the queue, and the routes do not know it.
            raise FiltersChanged
        if any(target not in names for names in routes):
            raise InvalidMessage(
                f"queue {target!r} takes messages where {spec.filter}; this one does not match"
            )

    def put(
        self,
        messages: Sequence[PackedMessage],
        routes: list[list[str]],
        now_ms: int,
        routed_at: int,
    ) -> list[int]:
        """Store messages by their routes; return their ids.

        ``routed_at``: the store's count of changed filters, before the routes were made.
        """
        if not messages:
            return []
        return self._store.publish(
            messages,
            routes if self._inline else None,
            dedup_window_ms=self._dedup_window_ms,
            now_ms=now_ms,
            routed_at=routed_at,
        )

    def takers(self, row: RowTuple) -> list[str]:
        """Return the queues whose filters would take a message now."""
        if self._matched != self._store.progress.filter_changes:
            self._follow_filters()
        with self._lock:
            return self._matcher.match([row])[0]

    def _follow_filters(self) -> None:
        """Follow the live filters and the routing, whichever process has changed them."""
        # Before the look: another thread may find them changed meanwhile.
        changes = self._store.progress.filter_changes
        queues = self._store.queues()
        live = {queue.spec.name: queue.filter for queue in queues if queue.filter is not None}
        with self._lock:
            if changes >= self._matched:
                # After the queues, which a store reads again if another process has changed them.
                self._inline = self._store.info().routing == "inline"
                for name in self._live.keys() - live.keys():
                    self._matcher.remove(name)
                for name, text in sorted(live.items() - self._live.items()):
                    self._matcher.put(name, parse(text))
                self._live = live
                self._reads_payloads = any("size" in text for text in live.values())
                self._matched = changes
