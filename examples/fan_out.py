"""One order, three queues: filters say who gets it, and it is stored once.

A shop publishes each order a single time. Billing wants every order, the warehouse only what has
to be shipped, and fraud control only what is dear or comes from a new customer. None of them is
named by the shop: each has a queue, and the queue's filter picks its orders.

    python examples/fan_out.py
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import penstock
from penstock import Message

if TYPE_CHECKING:
    from penstock.model import Value

ORDERS: list[tuple[bytes, dict[str, Value]]] = [
    (b"a paperback", {"kind": "book", "price": 12, "customer": "old"}),
    (b"an e-book", {"kind": "download", "price": 9, "customer": "old"}),
    (b"a first edition", {"kind": "book", "price": 4_500, "customer": "old"}),
    (b"a film to stream", {"kind": "download", "price": 5, "customer": "new"}),
]
FILTERS = {
    "billing": "price > 0",
    "warehouse": "kind <> 'download'",
    "fraud": "price >= 1000 OR customer = 'new'",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, penstock.open(f"rocksdb:{directory}") as shop:
        for queue, text in FILTERS.items():
            shop.create_queue(queue, filter=text)
        shop.publish(Message(payload, attributes) for payload, attributes in ORDERS)

        for queue, text in FILTERS.items():
            print(f"{queue} takes orders where {text}:")
            for order in shop.browse(queue):
                print(f"    {order.message_id}  {(order.payload or b'').decode()}")

        print("\nEach queue is worked on its own. The warehouse ships what it has:")
        for delivery in shop.claim("warehouse", limit=10):
            shop.ack([delivery.receipt])
        for queue in FILTERS:
            stats = shop.stats(queue)
            print(f"    {queue:10}{stats.available} to do, {stats.done} done")

        print("\nA gift card costs nothing and is not shipped, so nobody wants it:")
        shop.publish([Message(b"a gift card", {"kind": "download", "price": 0})])
        print(f"    messages that no queue took: {shop.store_stats().unrouted_total}")
        print("    (it stays in the log for a week; examples/backfill.py fetches such messages)")


if __name__ == "__main__":
    main()
