"""The base of the routing suites."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pytest

from penstock.broker.tailer import match_page, route_once
from penstock.model import Message, State
from penstock.testing.suite.base import Suite

if TYPE_CHECKING:
    from penstock.broker.broker import Broker
    from penstock.model import Assigned, LogPage, Value

__all__ = ["Mode", "RoutedSuite", "made"]

Mode: TypeAlias = Literal["inline", "pipeline"]


def made(payload: bytes = b"", /, **attributes: Value) -> Message:
    """Make a message of these attributes."""
    return Message(payload, attributes)


class RoutedSuite(Suite):
    """The seam for a store, and short words for routing."""

    @pytest.fixture(params=["inline", "pipeline"])
    def mode(self, request: pytest.FixtureRequest) -> Mode:
        found: Mode = request.param
        return found

    def open_as(self, **options: Any) -> Broker:
        """Close the broker and open the same store with other options, on the same clock."""
        raise NotImplementedError

    def begin(self, mode: Mode = "pipeline") -> Broker:
        """Open a new store that routes this way."""
        self.broker = self.open(self.clock, background=False, routing=mode)
        return self.broker

    def route(self, limit: int = 10_000) -> None:
        """Route everything, whichever way the store does it."""
        if self.broker.log_stats().routing == "pipeline":
            for _ in range(1_000):
                route_once(self.broker, limit=limit)
                stats = self.broker.log_stats()
                if max(stats.routed_up_to, stats.earliest) >= stats.end:
                    return
            pytest.fail(f"routing comes to no end: {stats}")

    def publish(self, *messages: Message) -> list[int]:
        """Publish and route."""
        ids = self.broker.publish(messages)
        self.route()
        return ids

    def hand_back(self, page: LogPage) -> Assigned:
        """Match a page and assign it."""
        return self.broker.assign(page.log, page.cursor, match_page(page))

    def held(self, queue: str) -> list[int]:
        """Return the ids of the messages in a queue, in whatever state, ascending."""
        return sorted(
            entry.message_id for state in State for entry in self.everything(state, queue=queue)
        )

    def drained(self, queue: str) -> list[int]:
        """Claim and ack everything there is; return the ids in the order of delivery."""
        ids = []
        while deliveries := self.broker.claim(queue, limit=100):
            ids += [delivery.message_id for delivery in deliveries]
            assert all(self.broker.ack([delivery.receipt for delivery in deliveries]))
        return ids

    def is_kept(self, message_id: int) -> bool:
        """Whether a payload is kept; skips the rest of the test if the store can't tell."""
        kept = self.payload_kept(message_id)
        if kept is None:
            pytest.skip("the store has no way to tell whether a payload is kept")
        return kept
