"""A big tenant beside small ones: groups make a queue fair.

One tenant sends ten thousand messages at once; a moment later nine others send one each. In a
plain queue the nine would wait for the ten thousand. Here every tenant is a group, and groups
take turns: the small ones are served at once, the big one gets everything that is left.

    python examples/fair_tenants.py
"""

from __future__ import annotations

import tempfile

import penstock
from penstock import Broker, Message

BACKLOG = 10_000
SMALL = [f"tenant-{number}" for number in range(1, 10)]


def message(queue: str, tenant: str) -> Message:
    """Make a tenant's message; only one of the two queues is told whose it is."""
    attributes = {"queue": queue, "tenant": tenant}
    return Message(b"work", attributes, group=tenant if queue == "fair" else "")


def claims_until_served(broker: Broker, queue: str) -> int:
    """Take messages ten at a time until every small tenant was served; return how many it took."""
    waiting, taken = set(SMALL), 0
    while waiting:
        deliveries = broker.claim(queue, limit=10)
        broker.ack([delivery.receipt for delivery in deliveries])
        waiting -= {str(delivery.attributes["tenant"]) for delivery in deliveries}
        taken += len(deliveries)
    return taken


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        penstock.open(f"rocksdb:{directory}") as broker,
    ):
        for queue in ("fair", "plain"):
            broker.create_queue(queue)
            broker.publish(message(queue, "megacorp") for _ in range(BACKLOG))
            broker.publish(message(queue, tenant) for tenant in SMALL)

        print(f"megacorp has sent {BACKLOG} messages, then {len(SMALL)} tenants one each.")
        plain = claims_until_served(broker, "plain")
        print(f"    without groups the last of them was served after {plain} messages")
        fair = claims_until_served(broker, "fair")
        print(f"    with the tenant as the group, after {fair}")

        rest = broker.stats("fair").available
        tenants = {str(next_.attributes["tenant"]) for next_ in broker.claim("fair", limit=5)}
        print(f"megacorp loses nothing: {rest} wait, the next five are for {tenants.pop()}.")


if __name__ == "__main__":
    main()
