"""A store with a history, for the jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    import penstock


class Shop:
    """A store with two queues; every price that ends in 1 fails for good after two attempts."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.broker: penstock.Broker = world.broker
        self.location: str = world.location
        self.make("all", "n >= 0")
        self.make("dear", "price > 30")

    def make(self, name: str, text: str) -> None:
        self.broker.create_queue(
            name, filter=text, max_attempts=2, backoff_base_ms=0, backoff_cap_ms=0
        )

    def fill(self, count: int) -> None:
        """Publish, and work everything off."""
        self.world.publish(count)
        self.work()

    def work(self) -> None:
        for queue in ("all", "dear"):
            while batch := self.broker.claim(queue, limit=200, consumer="worker"):
                good = [each for each in batch if int(each.attributes["price"] or 0) % 10 != 1]
                bad = [each for each in batch if int(each.attributes["price"] or 0) % 10 == 1]
                if good:
                    self.broker.ack([each.receipt for each in good])
                if bad:
                    receipts = [each.receipt for each in bad]
                    self.broker.release(receipts, delay_ms=0, reason="out of stock")


@pytest.fixture
def shop(make_world: Callable[..., Any]) -> Shop:
    """Give a store with done, failed and waiting messages."""
    shop = Shop(make_world(routing="inline"))
    shop.fill(400)
    shop.world.publish(50)
    return shop
