"""Pages of queues and messages in a real browser: whole flows, and axe-core on each page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from tests.console.visiting import axe_findings, foreign_requests

import penstock
from penstock import Message, QueueNotFound
from penstock.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

    from penstock import Broker
    from penstock.server import Server

# One process has a browser.
pytestmark = pytest.mark.xdist_group("browser")


def order(number: int) -> Message:
    return Message(b'{"number": %d}' % number, {"kind": "order", "price": number * 3}, group="g")


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """Have messages in every state, the first of which has failed at its third attempt."""
    with penstock.open("memory:") as opened:
        opened.create_queue("orders", filter="kind = 'order'", max_attempts=3, backoff_base_ms=0)
        opened.create_queue("large", filter="kind = 'order' AND price > 100")
        opened.publish([order(number) for number in range(5)])
        for number in range(3):
            for each in opened.claim("orders", limit=5, consumer=f"worker-{number}"):
                opened.release([each.receipt], delay_ms=0, reason="no answer")
        opened.publish([order(number) for number in range(5, 60)])
        opened.ack(each.receipt for each in opened.claim("orders", limit=5))
        opened.claim("orders", limit=5, lease_ms=600_000, consumer="worker-9")
        opened.publish([Message(b"\0\1", {"kind": "order"}, delay_ms=600_000)])
        yield opened


@pytest.fixture(scope="module")
def server(broker: Broker) -> Iterator[Server]:
    with running(broker, http="127.0.0.1:0") as started:
        yield started


class Reader:
    """A person at the browser."""

    def __init__(self, browser: Chrome, server: Server) -> None:
        self.browser = browser
        self.base = f"{server.location('http')}/console/"

    def open(self, path: str) -> None:
        self.browser.get(self.base + path)

    def find(self, selector: str, text: str = "") -> WebElement:
        """Wait for an element that has a text."""

        def look(browser: Chrome) -> WebElement | None:
            found = browser.find_elements(By.CSS_SELECTOR, selector)
            return next((each for each in found if text in each.text), None)

        waiting = WebDriverWait(self.browser, 20, ignored_exceptions=[Exception])
        return waiting.until(look)  # type: ignore[return-value]

    def write(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def click(self, selector: str, text: str = "") -> None:
        element = self.find(selector, text)
        # Not under the bar of actions, which stays in view.
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()


@pytest.fixture
def reader(browser: Chrome, server: Server) -> Reader:
    return Reader(browser, server)


def test_a_queue_is_made_with_a_filter_that_is_checked_as_it_is_written(
    reader: Reader, broker: Broker
) -> None:
    reader.open("")
    reader.click("a.button", "Create a queue")
    reader.write("#name", "cheap")
    reader.write("#filter", "price == 3")
    assert reader.find("#check mark").text == "=="
    reader.find("#check .note.bad", "the comparisons are")
    reader.click("form.card button", "Create")
    reader.find("[role=alert]", "the comparisons are")
    with pytest.raises(QueueNotFound):
        broker.queue("cheap")
    reader.write("#filter", "price < 12")
    reader.find("#check summary", "4 of the last 61 messages match.")
    assert len(reader.browser.find_elements(By.CSS_SELECTOR, "#check tbody tr")) == 4
    reader.click("form.card button", "Create")
    reader.find("[role=status]", "The queue is there.")
    assert broker.queue("cheap").filter == "price < 12"
    # And away with it, once its name is typed.
    reader.click(".tabs a", "Settings")
    reader.write("#typed", "cheep")
    reader.click("button.danger")
    reader.find("[role=alert]", "not the name")
    reader.write("#typed", "cheap")
    reader.click("button.danger")
    reader.find("h1", "Queues")
    with pytest.raises(QueueNotFound):
        broker.queue("cheap")


def test_a_message_is_found_and_its_life_is_told(reader: Reader, broker: Broker) -> None:
    first = broker.browse("orders", state="failed")[0].message_id
    reader.open("queues/orders")
    reader.click(".tabs a", "Failed")
    reader.click("th a", "no answer")
    reader.write("#where", "price < 3")
    reader.click(".search button")
    reader.find(".pager", "Looked at 5 messages.")
    reader.click("tbody th a", str(first))
    reader.find("h1", f"Message {first}")
    assert '"number": 0' in reader.find("#payload pre").text
    assert len(reader.browser.find_elements(By.CSS_SELECTOR, ".lanes rect.released")) == 3
    consumers = reader.find("[aria-label=Attempts]").text
    assert all(f"worker-{number}" in consumers for number in range(3))
    reader.click("#payload .tabs a", "Hex")
    reader.find("#payload pre", "7b 22 6e 75 6d 62 65 72")
    reader.write("#queue", "large")
    reader.click("#why button")
    reader.find("#why", "large does not have it: its filter does not take it.")
    reader.find("#why .tree", "price is 0")


def test_a_selection_is_redriven(reader: Reader, broker: Broker) -> None:
    chosen = [entry.message_id for entry in broker.browse("orders", state="failed")][1:3]
    reader.open("queues/orders?state=failed")
    for message_id in chosen:
        reader.click(f"input[value='{message_id}']")
    reader.click(".toolbar button", "Redrive")
    reader.find("h1", "Redrive 2 messages?")
    assert broker.stats("orders").failed == 5
    reader.click("form button", "Redrive 2 messages")
    reader.find("[role=status]", "2 messages were redriven.")
    assert broker.stats("orders").failed == 3
    left = [entry.message_id for entry in broker.browse("orders", state="failed")]
    assert not set(chosen) & set(left)


def test_the_figures_of_a_queue_are_live(reader: Reader, broker: Broker) -> None:
    broker.create_queue("busy")
    reader.open("queues/busy")
    reader.find("#live", "Live")
    broker.send("busy", b"x")
    reader.find("[data-live=available]", "1")
    broker.delete_queue("busy")


PAGES = [
    "create",
    "queues/orders",
    "queues/orders?state=in_flight",
    "queues/orders?state=done&where=price%20%3E",
    "queues/orders?state=failed",
    "queues/orders/groups",
    "queues/orders/consumers",
    "queues/orders/settings",
    "queues/orders/messages/1?why=large",
]


@pytest.mark.parametrize("path", PAGES)
def test_pages_are_for_everybody(reader: Reader, path: str) -> None:
    """No serious finding of axe-core in both schemes, nothing from elsewhere, fit for a phone."""
    browser = reader.browser
    # What other tests have left there.
    browser.get_log("browser")  # type: ignore[no-untyped-call]
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        reader.open(path)
        assert axe_findings(browser) == []
    assert foreign_requests(browser) == []
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        reader.open(path)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    refused = [each for each in browser.get_log("browser") if each["level"] == "SEVERE"]  # type: ignore[no-untyped-call]
    assert refused == []
