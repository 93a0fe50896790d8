"""A shop's orders through one embedded broker: fairness, order, failures, stalls and redrive.

One tenant dumps a large backlog while many small ones trickle in. Every order goes to ``orders``
or ``big-orders`` (standard queues, told apart by their filters) and to ``ledger`` (FIFO, in order
for each tenant); it is stored once. Workers fail and stall on purpose. In the end nothing may be
missing, and what is printed was measured in this run.

    python examples/demo.py --orders 40000 --directory ./demo-data
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

import penstock
from penstock import Message, SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock import Broker, Delivery
    from penstock.model import Value

BIG_TENANT = "megamart"
STANDARD_QUEUES = ("orders", "big-orders")
QUEUES = (*STANDARD_QUEUES, "ledger")
LEASE_MS = 2_000
FAIL_SHARE = 0.02
STALL_SHARE = 0.002
BROKEN_EVERY = 200
REPORT_WIDTH = 120


class Shop:
    """The run: what was published, what workers saw, and the switch that repairs them."""

    def __init__(self, broker: Broker, orders: int, tenants: int) -> None:
        self.broker = broker
        self.clock = SystemClock()
        self.small_tenants = [f"shop-{number:02}" for number in range(1, tenants)]
        self.each_small = orders * 4 // 10 // len(self.small_tenants)
        self.big_orders = orders - self.each_small * len(self.small_tenants)
        self.repaired = threading.Event()
        self.finished = threading.Event()
        self.published: set[int] = set()
        self.waits_ms: dict[str, list[int]] = defaultdict(list)
        self.done: dict[str, Counter[int]] = {name: Counter() for name in QUEUES}
        self.stalled = 0
        self.refused = 0
        self.lock = threading.Lock()

    # --- producers -------------------------------------------------------------------------

    def order(self, tenant: str, number: int) -> Message:
        """Make an order of some amount."""
        amount = int(self.clock.random() * 2_000)
        body = {"tenant": tenant, "number": number, "amount": amount}
        attributes: dict[str, Value] = {
            "kind": "order",
            "tenant": tenant,
            "amount": amount,
            "number": number,
        }
        return Message(msgspec.json.encode(body), attributes, group=tenant)

    def produce_backlog(self) -> None:
        """Publish the big tenant's orders as fast as it goes."""
        for begin in range(0, self.big_orders, 200):
            numbers = range(begin, min(begin + 200, self.big_orders))
            self.publish([self.order(BIG_TENANT, number) for number in numbers])

    def produce_trickle(self, share: int, of: int) -> None:
        """Publish the orders of this share of the small tenants, a few at a time."""
        tenants = self.small_tenants[share::of]
        if not tenants:
            return
        for number in range(self.each_small):
            self.publish([self.order(tenant, number) for tenant in tenants])
            # A trickle, so that small tenants come while the backlog is being worked off.
            self.finished.wait(0.002)

    def publish(self, messages: list[Message]) -> None:
        """Publish, and remember the ids to check against in the end."""
        ids = self.broker.publish(messages)
        with self.lock:
            self.published.update(ids)

    # --- workers ---------------------------------------------------------------------------

    def work(self, queue: str, name: str) -> None:
        """Claim and settle until the run is over."""
        while not self.finished.is_set():
            deliveries = self.broker.claim(queue, limit=20, wait_ms=100, consumer=name)
            if deliveries:
                self.note_waits(queue, deliveries)
                self.settle(queue, deliveries)

    def note_waits(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        """Note how long each message waited for its first claim."""
        if queue == "ledger":
            return
        now_ms = self.clock.now_ms()
        with self.lock:
            for each in deliveries:
                if each.attempts == 1:
                    self.waits_ms[each.group].append(now_ms - each.published_at_ms)

    def settle(self, queue: str, deliveries: Sequence[Delivery]) -> None:
        """Process a claim: ack what went well, release what did not, and sometimes do neither."""
        good: list[Delivery] = []
        failed: dict[str, list[str]] = defaultdict(list)
        blocked: set[str] = set()
        for each in deliveries:
            if queue == "ledger" and each.group in blocked:
                failed["an earlier order of the tenant has to come first"].append(each.receipt)
            elif (reason := self.process(queue, each)) is None:
                good.append(each)
            elif reason == "stalled":
                with self.lock:
                    self.stalled += 1
            else:
                failed[reason].append(each.receipt)
                blocked.add(each.group)
        outcomes = self.broker.ack(each.receipt for each in good)
        with self.lock:
            for each, outcome in zip(good, outcomes, strict=True):
                if outcome:
                    self.done[queue][each.message_id] += 1
                else:
                    self.refused += 1
        for reason, receipts in failed.items():
            self.broker.release(receipts, reason=reason)

    def process(self, queue: str, delivery: Delivery) -> str | None:
        """Pretend to work; return what went wrong."""
        luck = self.clock.random()
        if queue == "ledger":
            return "ledger page was locked" if luck < FAIL_SHARE / 10 else None
        if int(delivery.attributes["amount"] or 0) % BROKEN_EVERY == 0:
            return None if self.repaired.is_set() else "tax table has no such amount"
        if luck < STALL_SHARE:
            return "stalled"
        return "payment service timed out" if luck < FAIL_SHARE else None

    def settled(self) -> bool:
        """Return whether no message waits or is in flight."""
        counts = [self.broker.stats(name) for name in QUEUES]
        return not any(each.available + each.delayed + each.in_flight for each in counts)


def run(shop: Shop, workers: int, producers: int) -> tuple[dict[str, float], Counter[str]]:
    """Run the whole story; return seconds by phase, and why messages failed for good."""
    clock, broker = shop.clock, shop.broker
    started_ms = clock.now_ms()
    seconds: dict[str, float] = {}
    with ThreadPoolExecutor(producers + 2 + workers) as pool:
        making = [pool.submit(shop.produce_backlog)]
        making += [pool.submit(shop.produce_trickle, n, producers) for n in range(producers)]
        staff = [
            pool.submit(shop.work, queue, f"{queue}-worker-{number}")
            for number, queue in zip(range(workers), _in_turn(QUEUES), strict=False)
        ]
        try:
            for job in making:
                job.result()
            seconds["publishing (workers running)"] = (clock.now_ms() - started_ms) / 1000
            _until_settled(shop)
            seconds["everything worked off"] = (clock.now_ms() - started_ms) / 1000
            reasons: Counter[str] = Counter()
            for name in QUEUES:
                reasons.update(entry.reason for entry in _browse(broker, name, "failed"))
            shop.repaired.set()
            for name in QUEUES:
                broker.redrive(name)
            _until_settled(shop)
            seconds["failed ones redriven"] = (clock.now_ms() - started_ms) / 1000
        finally:
            shop.finished.set()
        for job in staff:
            job.result()
    return seconds, reasons


def _in_turn(names: Sequence[str]) -> Iterator[str]:
    while True:
        yield from names


def _until_settled(shop: Shop) -> None:
    while not shop.settled():
        shop.finished.wait(0.1)


def _browse(broker: Broker, queue: str, state: str) -> Iterator[penstock.Entry]:
    cursor: str | None = None
    while True:
        page = broker.browse(queue, state=state, limit=1_000, cursor=cursor, payloads=False)
        yield from page
        cursor = page.next_cursor
        if cursor is None:
            return


# --- report ----------------------------------------------------------------------------------


def _table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(f"{each:,}" if isinstance(each, int) else str(each) for each in row))
    console.print(table)


def _percentile(values: Sequence[int], share: float) -> int:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def report(shop: Shop, seconds: dict[str, float], reasons: Counter[str], console: Console) -> None:
    """Print what was measured."""
    stats = [shop.broker.stats(name) for name in QUEUES]
    deliveries = sum(each.claimed_total for each in stats)
    acked = sum(each.acked_total for each in stats)
    whole = seconds["everything worked off"]
    phases = [(name, f"{took:.2f} s") for name, took in seconds.items()]
    rates = [
        ("orders published", len(shop.published)),
        ("deliveries", deliveries),
        ("acked per second, durable", int(acked / whole)),
    ]
    _table(console, "Run", ("what", "measured"), [*phases, *rates])
    _table(
        console,
        "Queues",
        ("queue", "enqueued", "claimed", "acked", "released", "expired", "failed", "redriven",
         "done now", "waiting now"),
        [
            (s.queue, s.enqueued_total, s.claimed_total, s.acked_total, s.released_total,
             s.lease_expired_total, s.failed_total, s.redriven_total, s.done,
             s.available + s.delayed + s.in_flight)
            for s in stats
        ],
    )  # fmt: skip
    attempts = {
        name: Counter(e.attempts for e in _browse(shop.broker, name, "done")) for name in QUEUES
    }
    highest = sorted({number for counts in attempts.values() for number in counts})
    _table(
        console,
        "Attempts until done",
        ("attempts", *QUEUES),
        [(str(number), *(attempts[name][number] for name in QUEUES)) for number in highest],
    )
    _table(
        console,
        "Why attempts did not succeed (history of the redone messages)",
        ("reason", "attempts"),
        _reasons(shop.broker).most_common(),
    )
    _table(console, "Failed for good, then redriven", ("reason", "messages"), reasons.most_common())
    rows = []
    small = [
        wait for tenant, waits in shop.waits_ms.items() if tenant != BIG_TENANT for wait in waits
    ]
    for name, waits in ((BIG_TENANT, shop.waits_ms[BIG_TENANT]), ("all small tenants", small)):
        if waits:
            rows.append((name, len(waits), _percentile(waits, 0.5), _percentile(waits, 0.99)))
    slowest = sorted(
        ((t, w) for t, w in shop.waits_ms.items() if t != BIG_TENANT),
        key=lambda pair: -_percentile(pair[1], 0.99),
    )
    rows += [
        (f"  {tenant}", len(waits), _percentile(waits, 0.5), _percentile(waits, 0.99))
        for tenant, waits in slowest[:5]
    ]
    _table(
        console,
        "Fairness: wait before the first claim, by tenant (below: the five slowest small ones)",
        ("tenant", "orders", "p50 ms", "p99 ms"),
        rows,
    )


def _reasons(broker: Broker) -> Counter[str]:
    found: Counter[str] = Counter()
    for name in QUEUES:
        for entry in _browse(broker, name, "done"):
            if entry.attempts > 1:
                for attempt in broker.attempts(name, entry.message_id):
                    if attempt.end.value != "acked":
                        found[attempt.reason or f"({attempt.end.value})"] += 1
    return found


def check(shop: Shop) -> list[str]:
    """Say what is wrong with the outcome; nothing should be."""
    wrong = [
        f"{each.queue}: {each.done} done of {each.enqueued_total}"
        for each in (shop.broker.stats(name) for name in QUEUES)
        if each.failed or each.done != each.enqueued_total
    ]
    standard = set(shop.done["orders"]) | set(shop.done["big-orders"])
    if standard != shop.published or set(shop.done["ledger"]) != shop.published:
        wrong.append("not every order was processed in both kinds of queue")
    if any(times > 1 for counts in shop.done.values() for times in counts.values()):
        wrong.append("an order was acked twice")
    # The store's history is in the order of the acks; threads that note an ack after it returned
    # may overtake each other.
    ledger: dict[str, list[int]] = defaultdict(list)
    for entry in _browse(shop.broker, "ledger", "done"):
        ledger[entry.group].append(int(entry.attributes["number"] or 0))
    wrong += [
        f"ledger of {tenant} is out of order"
        for tenant, numbers in ledger.items()
        if numbers != sorted(numbers)
    ]
    return wrong


def story(directory: Path, orders: int, tenants: int, producers: int, workers: int) -> int:
    """Run it all in a directory; return the exit code."""
    console = Console(width=None if sys.stdout.isatty() else REPORT_WIDTH)
    with penstock.open(f"rocksdb:{directory}") as broker:
        settings: dict[str, Any] = {
            "lease_ms": LEASE_MS,
            "backoff_base_ms": 50,
            "backoff_cap_ms": 400,
        }
        cheap, dear = "kind = 'order' AND amount < 1000", "kind = 'order' AND amount >= 1000"
        broker.create_queue("orders", filter=cheap, max_attempts=3, **settings)
        broker.create_queue("big-orders", filter=dear, max_attempts=3, **settings)
        broker.create_queue(
            "ledger", filter="kind = 'order'", ordering="fifo", max_attempts=100, **settings
        )
        shop = Shop(broker, orders, tenants)
        seconds, reasons = run(shop, workers, producers)
        report(shop, seconds, reasons, console)
        console.print(f"{shop.stalled} deliveries stalled until their lease expired; "
                      f"{shop.refused} late acks were refused")  # fmt: skip
        wrong = check(shop)
    for text in wrong:
        console.print(f"WRONG: {text}", style="bold red")
    if not wrong:
        console.print("every order was done once in each of its queues, the ledger in order")
    return 1 if wrong else 0


@click.command()
@click.option("--orders", type=click.IntRange(min=10), default=40_000, show_default=True)
@click.option("--tenants", type=click.IntRange(min=2), default=30, show_default=True)
@click.option("--producers", type=click.IntRange(min=1), default=2, show_default=True,
              help="Threads for the small tenants; the big one has its own.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=3), default=6, show_default=True)
@click.option(
    "--directory", type=click.Path(path_type=Path), help="Keep the store here; it must be new."
)
def main(orders: int, tenants: int, producers: int, workers: int, directory: Path | None) -> None:
    """Run a shop's orders through an embedded broker and print what was measured."""
    if directory is not None:
        if directory.exists() and any(directory.iterdir()):
            raise click.UsageError(f"{directory} is not empty: the demo wants a store of its own")
        raise SystemExit(story(directory, orders, tenants, producers, workers))
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as scratch:
        raise SystemExit(story(Path(scratch), orders, tenants, producers, workers))


if __name__ == "__main__":
    main()
