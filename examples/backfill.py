"""A queue that comes late: filled with last week from the log.

A shop has sold for a week, and one queue has handled its orders. Now somebody wants a second one,
for refunds, and wants what is past as well. The log keeps what was published (for a week by
default), payloads are kept as long as a queue holds them or the log knows them unrouted: so the
new queue can be filled from it. Every message comes once, however often that is repeated.

The clock is one that we move by hand, so the week passes in no time.

    python examples/backfill.py
"""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta

import penstock
from penstock import Backfilled, Broker, ManualClock, Message

HOUR_MS = 3_600_000
MONDAY = datetime(2024, 1, 1, tzinfo=UTC)


def a_week_of_trade(broker: Broker, clock: ManualClock) -> None:
    """Publish forty events an hour, for seven days."""
    for hour in range(7 * 24):
        broker.publish(
            Message(
                b"event %d of hour %d" % (number, hour),
                {"kind": "refund" if number % 20 == 0 else "order", "day": hour // 24},
            )
            for number in range(40)
        )
        clock.advance(HOUR_MS)


def show(sums: Backfilled, end: int) -> None:
    """Report a step: each is durable, so a backfill that is interrupted here can go on later."""
    print(f"    {sums.next / end:4.0%}  {sums.scanned} looked at, {sums.added} added")


def main() -> None:
    clock = ManualClock(int(MONDAY.timestamp() * 1000))
    with (
        tempfile.TemporaryDirectory() as directory,
        penstock.open(f"rocksdb:{directory}", clock=clock, background=False) as broker,
    ):
        broker.create_queue("orders", filter="kind = 'order'")
        a_week_of_trade(broker, clock)
        print(
            f"After a week: {broker.stats('orders').available} orders, "
            f"{broker.store_stats().unrouted_total} messages that no queue wanted."
        )

        broker.create_queue("refunds", filter="kind = 'refund'")
        print(
            f"\nA new queue for refunds has {broker.stats('refunds').available} of them; "
            "it is filled from the log:"
        )
        broker.backfill("refunds", progress=show)
        print(f"    now it has {broker.stats('refunds').available}")
        again = broker.backfill("refunds")
        print(f"    once more: {again.added} added, for it has had them all")

        print("\nA queue for the weekend alone:")
        broker.create_queue("weekend", filter="TRUE")
        saturday = MONDAY + timedelta(days=5)
        broker.backfill("weekend", from_=saturday, to=saturday + timedelta(days=2))
        first, *_ = broker.browse("weekend", limit=1)
        published = datetime.fromtimestamp(first.published_at_ms / 1000, UTC)
        print(
            f"    {broker.stats('weekend').available} messages, the first of {published:%A %H:%M}"
        )


if __name__ == "__main__":
    main()
