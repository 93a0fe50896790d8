"""A shop's orders through the Spark pipeline: published, routed, worked off, reported.

A server in this process has a broker whose routing is ``pipeline``. Many tenants publish orders;
the Spark route job matches them against the queues' filters and hands them over; workers claim
them, and now and then fail. Then Spark fills a queue that came late and redrives what failed; the
driver makes a report from the history, and a browser takes pictures of the console. In the end
nothing may be missing or there twice: the exit code says so. ``--keep`` leaves the server on, for a
look at the console.

    python examples/pipeline_demo.py --orders 30000 --report ./report --keep

Needs ``penstock[spark]`` and Java 17 or 21.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

import penstock
from penstock import Message, SystemClock
from penstock.filters import Row, parse
from penstock.server import running
from penstock.spark import session
from penstock.spark.jobs import backfill, redrive, report, save_report
from penstock.spark.route import route, status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock import Broker, Delivery

FILTERS = {
    "orders": "kind = 'order'",
    "big-orders": "kind = 'order' AND amount >= 1500",
    "north": "kind = 'order' AND country IN ('NO', 'SE', 'FI')",
    "refunds": "kind = 'refund'",
}
LATE = ("audit", "amount >= 1900")
COUNTRIES = ("NO", "SE", "FI", "DE", "FR", "IT")
FAIL_SHARE = 0.02
BROKEN_AMOUNT = 1_777
BATCH = 200
CONSOLE = Console(width=None if sys.stdout.isatty() else 120)


class Shop:
    """What was published, and what workers have done with it."""

    def __init__(self, broker: Broker, orders: int, tenants: int) -> None:
        self.broker = broker
        self.clock = SystemClock()
        self.orders = orders
        self.tenants = [f"shop-{number:03}" for number in range(tenants)]
        self.published: dict[int, dict[str, Any]] = {}
        self.acked: dict[str, Counter[int]] = {name: Counter() for name in (*FILTERS, LATE[0])}
        self.repaired = threading.Event()
        self.finished = threading.Event()
        self.lock = threading.Lock()

    def produce(self) -> None:
        """Publish orders of all tenants, in a stream."""
        for begin in range(0, self.orders, BATCH):
            messages = [self.order() for _ in range(min(BATCH, self.orders - begin))]
            ids = self.broker.publish(messages)
            for message_id, message in zip(ids, messages, strict=True):
                self.published[message_id] = dict(message.attributes)
            # A stream, not one heap: routing and working go on meanwhile.
            self.finished.wait(0.15)

    def order(self) -> Message:
        """Make an order, or now and then a refund."""
        pick = self.clock.random
        tenant = self.tenants[int(pick() ** 2 * len(self.tenants))]
        attributes = {
            "kind": "refund" if pick() < 0.05 else "order",
            "amount": int(pick() * 2_000),
            "country": COUNTRIES[int(pick() * len(COUNTRIES))],
        }
        return Message(msgspec.json.encode(attributes), attributes, group=tenant)

    def work(self, queue: str) -> None:
        """Claim, fail now and then, and ack the rest, until the story is over."""
        while not self.finished.is_set():
            batch = self.broker.claim(queue, limit=BATCH, consumer=f"{queue}-worker", wait_ms=100)
            good = [each for each in batch if not self.fails(each)]
            bad = [each.receipt for each in batch if each not in good]
            if bad:
                self.broker.release(bad, reason="payment service timed out")
            if good:
                self.broker.ack([each.receipt for each in good])
                with self.lock:
                    self.acked[queue].update(each.message_id for each in good)

    def fails(self, delivery: Delivery) -> bool:
        """Decide; one amount always fails until it is repaired."""
        if delivery.attributes["amount"] == BROKEN_AMOUNT:
            return not self.repaired.is_set()
        return self.clock.random() < FAIL_SHARE

    def wanted(self, queue: str) -> set[int]:
        """Evaluate a queue's filter on everything that was published."""
        chosen = parse({**FILTERS, LATE[0]: LATE[1]}[queue])
        return {
            message_id
            for message_id, attributes in self.published.items()
            if chosen.matches(Row(attributes, "", 0, 0, 0))
        }

    def waiting(self) -> int:
        """Count what waits or is in flight."""
        stats = [self.broker.stats(queue.name) for queue in self.broker.queues()]
        return sum(each.available + each.delayed + each.in_flight for each in stats)


class Measured(dict[str, str]):
    """What was measured, by name; each is printed when it is known."""

    def __setitem__(self, what: str, value: str) -> None:
        """Print it and keep it."""
        CONSOLE.print(f"{what}: {value}")
        super().__setitem__(what, value)


def run(shop: Shop, spark: SparkSession, location: str, scratch: Path) -> dict[str, str]:
    """Run the story; return what was measured."""
    clock, measured = shop.clock, Measured()
    query = route(location, spark=spark, checkpoint=scratch / "checkpoint")
    with ThreadPoolExecutor(len(FILTERS) + 2) as pool:
        try:
            started_ms = clock.now_ms()
            # Spark compiles its first micro-batch; the orders are not to wait for that.
            shop.broker.publish([Message(b"", {"kind": "greeting"})])
            _until(shop, query, lambda: not status(location).behind)
            measured["the route job runs"] = _took(clock, started_ms)
            started_ms = clock.now_ms()
            making = pool.submit(shop.produce)
            staff = [pool.submit(shop.work, queue) for queue in FILTERS]
            _until(shop, query, making.done)
            making.result()
            measured["published"] = _took(clock, started_ms)
            _until(shop, query, lambda: not status(location).behind)
            measured["routed"] = _took(clock, started_ms)
            _until(shop, query, lambda: not shop.waiting())
            measured["worked off"] = _took(clock, started_ms)

            shop.broker.create_queue(LATE[0], filter=LATE[1], max_attempts=20, backoff_base_ms=10)
            filled = backfill(spark, location, LATE[0])
            measured["filled a late queue"] = f"{filled.added:,} of {filled.scanned:,} messages"
            staff.append(pool.submit(shop.work, LATE[0]))
            shop.repaired.set()
            redriven = sum(
                redrive(spark, location, queue, where="reason LIKE '%timed out%'").redriven
                for queue in FILTERS
            )
            measured["redriven after the repair"] = f"{redriven:,} messages"
            _until(shop, query, lambda: not shop.waiting())
            measured["everything done"] = _took(clock, started_ms)
        finally:
            shop.finished.set()
            query.stop()
        for job in staff:
            job.result()
    return measured


def _took(clock: SystemClock, since_ms: int) -> str:
    return f"after {(clock.now_ms() - since_ms) / 1000:.1f} s"


def _until(shop: Shop, query: StreamingQuery, what: Any, patience_ms: int = 600_000) -> None:
    """Wait, and show how far it is; an error of the route job ends it."""
    end_ms = shop.clock.now_ms() + patience_ms
    with CONSOLE.status("…") as line:
        while not what():
            if not query.isActive:
                raise query.exception() or RuntimeError("the route job has ended")
            if shop.clock.now_ms() > end_ms:
                raise TimeoutError("the pipeline does not come to rest")
            done = sum(map(len, shop.acked.values()))
            line.update(
                f"{len(shop.published):,} published, {done:,} done, {shop.waiting():,} wait"
            )
            shop.finished.wait(0.1)


@contextmanager
def _errors_to(file: Path) -> Iterator[None]:
    """Let programs that are started within write their warnings and errors to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = os.dup(2)
    try:
        with file.open("wb") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def check(shop: Shop, frames: dict[str, DataFrame]) -> list[str]:
    """Say what does not add up; nothing should."""
    wrong = []
    reported = {row["queue"]: row for row in frames["queues"].collect()}
    for queue, acked in shop.acked.items():
        wanted = shop.wanted(queue)
        if set(acked) != wanted:
            wrong.append(f"{queue}: {len(acked)} messages were done, {len(wanted)} should be")
        if any(times > 1 for times in acked.values()):
            wrong.append(f"{queue}: a message was done twice")
        row = reported[queue]
        if (row["done"], row["failed"], row["available"]) != (len(wanted), 0, 0):
            wrong.append(f"{queue}: the report says {row['done']} done, {row['failed']} failed")
    return wrong


def show(
    console: Console, title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]
) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(f"{each:,}" if isinstance(each, int) else str(each) for each in row))
    console.print(table)


def take_pictures(address: str, folder: Path) -> list[Path]:
    """Save what the console shows now; nothing, if there is no browser for it."""
    if not (find_spec("selenium") and which("chromium") and which("chromedriver")):
        return []
    screenshots: Any = import_module("screenshots")
    picture = screenshots.Picture
    pages = [picture("queues", ""), picture("orders", "queues/orders?state=done", height=1_000)]
    driver = screenshots.browser()
    try:
        for page in pages:
            screenshots.picture(driver, address, page, folder)
    finally:
        driver.quit()
    return [folder / f"console-{page.name}.png" for page in pages]


def story(
    scratch: Path, kept: Path, orders: int, tenants: int, master: str, *, keep: bool = False
) -> int:
    """Run it all; return the exit code."""
    console = CONSOLE
    # Java warns of its own modules, Spark of libraries that are not needed here.
    console.print("starting Spark…")
    with _errors_to(kept / "spark.log"):
        spark = session(master, conf={"spark.log.level": "ERROR", "spark.ui.enabled": "false"})
    with (
        penstock.open(f"rocksdb:{scratch / 'store'}", routing="pipeline") as broker,
        running(broker, flight="127.0.0.1:0", http="127.0.0.1:0") as server,
    ):
        location, address = server.location("flight"), server.location("http")
        for name, text in FILTERS.items():
            broker.create_queue(name, filter=text, max_attempts=3, backoff_base_ms=50)
        shop = Shop(broker, orders, tenants)
        measured = run(shop, spark, location, scratch)
        with console.status("the report…"):
            frames = report(spark, location)
            written = save_report(frames, kept)
        wrong = check(shop, frames)
        show(console, "Run", ("what", "measured"), list(measured.items()))
        times = [
            f"{what}_{share}_ms" for what in ("first_claim", "done") for share in ("p50", "p99")
        ]
        columns = ("queue", "done", "attempts_mean", "done_per_second", *times)
        rows = [tuple(row) for row in frames["queues"].select(*columns).collect()]
        heads = (
            "queue",
            "done",
            "attempts",
            "per s",
            "claim p50",
            "claim p99",
            "done p50",
            "done p99",
        )
        show(console, "Queues, times from publish in ms", heads, rows)
        columns = ("queue", "group", "done", "done_p50_ms", "done_p99_ms")
        rows = [tuple(row) for row in frames["slowest"].select(*columns).limit(5).collect()]
        show(console, "Slowest tenants", columns, rows)
        columns = ("queue", "outcome", "reason", "attempts")
        rows = [tuple(row) for row in frames["reasons"].select(*columns).collect()]
        show(console, "Why attempts did not succeed", columns, rows)
        for text in wrong:
            console.print(f"WRONG: {text}", style="bold red")
        if not wrong:
            console.print(f"{orders:,} orders: each done once in every queue that wants it")
        for path in [written, *take_pictures(address, kept)]:
            console.print(f"saved: {path}", soft_wrap=True)
        spark.stop()
        if keep:
            console.print(f"the console: {address}/ – Ctrl-C ends it", soft_wrap=True)
            with suppress(KeyboardInterrupt):
                threading.Event().wait()
    return 1 if wrong else 0


@click.command()
@click.option("--orders", type=click.IntRange(min=10), default=20_000, show_default=True)
@click.option("--tenants", type=click.IntRange(min=1), default=60, show_default=True)
@click.option("--master", default="local[2]", show_default=True)
@click.option(
    "--report", "kept", type=click.Path(path_type=Path), default="pipeline-report",
    show_default=True, help="Where the report goes.",
)  # fmt: skip
@click.option("--keep", is_flag=True, help="Leave the server on, for a look at the console.")
def main(orders: int, tenants: int, master: str, kept: Path, *, keep: bool) -> None:
    """Run a shop's orders through the Spark pipeline and check that the numbers add up."""
    with tempfile.TemporaryDirectory(prefix="penstock-pipeline-") as scratch:
        raise SystemExit(story(Path(scratch), kept, orders, tenants, master, keep=keep))


if __name__ == "__main__":
    main()
