"""Save pictures of the console for the documentation: ``python examples/screenshots.py``.

Starts a server with sample data on ``memory:``, opens its pages in a headless Chromium, and writes
``docs/images/console-NAME.png``. PAGES has a line for each picture.
"""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from penstock.model import Message
from penstock.server import running

if TYPE_CHECKING:
    from penstock.broker.broker import Broker
    from penstock.server.console.figures import Figures

IMAGES: Final = Path(__file__).parent.parent / "docs" / "images"
WIDTH: Final = 1200
LEASE_MS: Final = 600_000


class Picture(NamedTuple):
    """A page, and the name, scheme and height of its picture."""

    name: str
    path: str
    scheme: str = "light"
    height: int = 800


PAGES: Final = [
    Picture("overview", ""),
    Picture("overview-dark", "", "dark"),
    Picture("health", "health", height=700),
    Picture("failed", "queues/webhooks?state=failed"),
    Picture("message", "queues/payments/messages/{payment}?why=orders", height=1_450),
]
# Queue: its filter, messages that it gets, the part of them that is done, and that fails.
QUEUES: Final = {
    "orders": ("kind = 'order'", 4_200, 0.9, 0.002),
    "orders-eu": ("kind = 'order' AND region = 'eu'", 0, 0.85, 0.0),
    "invoices": ("kind = 'order' AND total > 500", 0, 0.5, 0.01),
    "emails": ("kind IN ('order', 'welcome')", 900, 0.97, 0.004),
    "thumbnails": ("kind = 'image'", 1_800, 0.35, 0.0),
    "search-index": ("kind IN ('order', 'product')", 600, 1.0, 0.0),
    "webhooks": ("kind = 'webhook'", 350, 0.6, 0.12),
    "audit": ("TRUE", 0, 0.2, 0.0),
    "reports": ("kind = 'report'", 40, 0.0, 0.0),
}


def fill(broker: Broker) -> None:
    """Make queues with messages in every state."""
    for name, (text, *_) in QUEUES.items():
        broker.create_queue(name, filter=text, max_attempts=1)
    kinds = {"orders": "order", "emails": "welcome", "thumbnails": "image"}
    kinds |= {"search-index": "product", "webhooks": "webhook", "reports": "report"}
    regions = ("eu", "us", "asia")
    for name, kind in kinds.items():
        for begin in range(0, QUEUES[name][1], 500):
            numbers = range(begin, min(begin + 500, QUEUES[name][1]))
            broker.publish(message(kind, number, regions[number % 3]) for number in numbers)
    for name, (_, _, done, failed) in QUEUES.items():
        depth = broker.stats(name).available
        settle(broker, name, int(depth * done), int(depth * failed))
    broker.claim("thumbnails", limit=12, lease_ms=LEASE_MS, consumer="resizer-2")
    broker.claim("orders", limit=25, lease_ms=LEASE_MS, consumer="orders-worker-7")
    broker.publish([Message(b"later", {"kind": "report"}, delay_ms=LEASE_MS) for _ in range(15)])


def message(kind: str, number: int, region: str) -> Message:
    """Make the message of a number."""
    payload = f'{{"id": {number}, "kind": "{kind}", "region": "{region}", "items": ["map"]}}'
    attributes: dict[str, Any] = {"kind": kind, "region": region, "total": number % 900}
    return Message(payload.encode(), attributes, group=f"customer-{number % 40}")


def settle(broker: Broker, queue: str, done: int, failed: int) -> None:
    """Ack so many messages of a queue, and let some fail."""
    while done > 0:
        taken = broker.claim(queue, limit=min(done, 500), consumer="worker-1")
        broker.ack(each.receipt for each in taken)
        done -= len(taken)
    for each in broker.claim(queue, limit=failed, consumer="worker-2") if failed else []:
        broker.release([each.receipt], reason="HTTP 503 from the customer's endpoint")


def draw_an_hour(figures: Figures) -> None:
    """Note figures of the last hour, as if the server had run for so long."""
    lines = [(figures.waiting, 9_000.0), (figures.published, 45.0)]
    lines += [
        (found.history, found.stats.available + found.stats.in_flight)
        for _, found in sorted(figures.queues.items())
        if found.history is not None
    ]
    for number, (history, level) in enumerate(lines):
        for ago in reversed(range(1, 60)):
            wave = math.sin(ago / (3 + number)) / 3 + math.sin(ago * (number + 2)) / 14
            history.put(figures.minute - ago, level * (1 + wave - ago / (90 + 20 * number)))


def work(broker: Broker, stopped: threading.Event) -> None:
    """Publish and settle messages, some in each second."""
    number = 10_000
    while not stopped.wait(0.1):
        kinds = ("order", "order", "image", "welcome", "webhook")
        broker.publish(message(kind, number, "eu") for kind in kinds)
        number += 1
        for name in ("orders", "orders-eu", "emails", "search-index", "webhooks", "thumbnails"):
            broker.ack(each.receipt for each in broker.claim(name, limit=2))


def pay(broker: Broker, stopped: threading.Event) -> int:
    """Let a payment fail at its third attempt, and another queue have it meanwhile."""
    broker.create_queue("payments", filter="kind = 'payment'", max_attempts=3)
    broker.create_queue("ledger", filter="kind IN ('payment', 'refund')")
    payload = (
        b'{"payment": 4711, "card": "**** 1881", "amount": {"total": 129.9, "currency": "EUR"}}'
    )
    attributes: dict[str, Any] = {"kind": "payment", "region": "eu", "total": 129.9}
    (message_id,) = broker.publish([Message(payload, attributes, group="customer-17")])
    reasons = ("the bank did not answer", "the bank did not answer", "card declined")
    for number, reason in enumerate(reasons):
        stopped.wait(1 + number)
        booked = broker.claim("ledger", consumer="ledger-1")
        for each in broker.claim("payments", consumer=f"payments-worker-{number % 2 + 1}"):
            stopped.wait(1.5)
            broker.release([each.receipt], delay_ms=0, reason=reason)
        broker.ack(each.receipt for each in booked)
    return message_id


def picture(driver: Chrome, address: str, page: Picture, folder: Path = IMAGES) -> None:
    """Save one picture."""
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": page.scheme}]},
    )
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": WIDTH, "height": page.height, "deviceScaleFactor": 1, "mobile": False},
    )
    driver.get(f"{address}/console/{page.path}")
    WebDriverWait(driver, 20).until(lambda found: found.find_element(By.TAG_NAME, "h1"))
    folder.mkdir(exist_ok=True)
    driver.save_screenshot(str(folder / f"console-{page.name}.png"))


def browser() -> Chrome:
    """Start a headless Chromium."""
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    return Chrome(options, ChromeService("/usr/bin/chromedriver"))


def main(names: list[str]) -> None:
    with running("memory:", http="127.0.0.1:0", native="127.0.0.1:0") as server:
        fill(server.broker)
        console = server.console
        assert console is not None
        console.figures.look(10)
        draw_an_hour(console.figures)
        stopped = threading.Event()
        worker = threading.Thread(target=work, args=(server.broker, stopped))
        worker.start()
        driver = browser()
        try:
            # Until there are rates to show.
            driver.get(f"{server.location('http')}/console/")
            payment = pay(server.broker, stopped)
            for page in PAGES:
                if not names or page.name in names:
                    path = page.path.format(payment=payment)
                    picture(driver, server.location("http"), page._replace(path=path))
        finally:
            driver.quit()
            stopped.set()
            worker.join()


if __name__ == "__main__":
    main(sys.argv[1:])
