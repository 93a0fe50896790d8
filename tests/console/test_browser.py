"""The console in a real Chromium: live numbers, keyboard, phone, dark and light, accessibility."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from tests.console.visiting import axe_findings, foreign_requests
from tests.waiting import wait_until

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver import Chrome

    from penstock.server import Server

# One process has a browser.
pytestmark = pytest.mark.xdist_group("browser")

PAGES = ["", "health", "pipeline", "nothing"]


@pytest.fixture(autouse=True)
def clean(browser: Chrome) -> Iterator[None]:
    """Find nothing in the browser's log that a page should not have caused."""
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    wrong = [each["message"] for each in browser.get_log("browser")]  # type: ignore[no-untyped-call]
    assert [each for each in wrong if "404 (Not Found)" not in each] == []


def scheme(browser: Chrome, name: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": name}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def visit(browser: Chrome, server: Server, path: str = "") -> None:
    browser.get(f"{server.location('http')}/console/{path}")


def text_of(browser: Chrome, key: str) -> str:
    return str(browser.find_element(By.CSS_SELECTOR, f'[data-live="{key}"]').text)


def ground(browser: Chrome) -> Any:
    return browser.execute_script("return getComputedStyle(document.body).backgroundColor")


@pytest.mark.parametrize("name", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_pages_are_accessible_and_load_nothing_from_elsewhere(
    browser: Chrome, server: Server, path: str, name: str
) -> None:
    scheme(browser, name)
    visit(browser, server, path)
    assert foreign_requests(browser) == []
    assert axe_findings(browser) == []


@pytest.mark.parametrize("path", PAGES)
def test_pages_fit_a_phone(browser: Chrome, server: Server, path: str) -> None:
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    visit(browser, server, path)
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= 360
    assert axe_findings(browser) == []


def test_numbers_change_by_themselves(browser: Chrome, server: Server) -> None:
    visit(browser, server)
    wait_until(lambda: browser.find_element(By.ID, "live").text == "Live")
    before = int(text_of(browser, "emails:available"))
    server.broker.publish([penstock.Message(b"x", {"queue": "emails"})])
    wait_until(lambda: text_of(browser, "emails:available") == str(before + 1))
    assert server.console is not None
    figures = server.console.figures
    history = figures.queues["emails"].history
    assert history is not None
    history.put(figures.minute - 9, 5)
    line = browser.find_element(By.CSS_SELECTOR, '[data-live="emails:line"]')
    wait_until(lambda: line.get_attribute("points"))


def test_the_filter_narrows_the_table_while_one_types(browser: Chrome, server: Server) -> None:
    visit(browser, server)
    field = browser.find_element(By.ID, "filter")
    field.send_keys("mail")
    wait_until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 1)
    assert text_of(browser, "all:queues") != "0"
    # Typing goes on in the same field, and the address is of this page.
    assert browser.switch_to.active_element == field
    wait_until(lambda: "filter=mail" in browser.current_url)


def test_a_queue_is_reached_by_the_keyboard(browser: Chrome, server: Server) -> None:
    visit(browser, server)
    reached: list[str] = []
    for _ in range(30):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        here = browser.switch_to.active_element
        reached.append(here.text or here.get_attribute("aria-label") or "")
        outline = here.value_of_css_property("outline-style")
        assert outline != "none", f"{reached[-1]} does not show that it has the focus"
        if here.text == "orders":
            break
    assert reached[0] == "Skip to the content"
    assert "Health" in reached
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    wait_until(lambda: browser.current_url.endswith("/console/queues/orders"))


def test_light_and_dark_can_be_chosen(browser: Chrome, server: Server) -> None:
    scheme(browser, "light")
    visit(browser, server)
    light = ground(browser)
    browser.find_element(By.ID, "scheme").click()
    dark = ground(browser)
    assert dark != light
    visit(browser, server, "health")
    assert ground(browser) == dark
    browser.execute_script("localStorage.clear()")
    visit(browser, server)
    assert ground(browser) == light
    scheme(browser, "dark")
    assert ground(browser) == dark


def test_logging_in_and_out(browser: Chrome, guarded: Server, tokens: dict[str, str]) -> None:
    scheme(browser, "light")
    visit(browser, guarded, "health")
    assert axe_findings(browser) == []
    key, _, secret = tokens["viewer"].partition(":")
    browser.switch_to.active_element.send_keys(key, Keys.TAB)
    browser.switch_to.active_element.send_keys(secret, Keys.ENTER)
    wait_until(lambda: browser.current_url.endswith("/console/health"))
    assert browser.execute_script("return document.cookie") == ""
    assert axe_findings(browser) == []
    browser.find_element(By.XPATH, "//button[text()='Log out']").click()
    wait_until(lambda: "/console/login" in browser.current_url)
    visit(browser, guarded)
    assert "/console/login" in browser.current_url
