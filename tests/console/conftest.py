"""Servers with a console, and one browser for all tests."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from tests.clients.tools import missing
from tests.console.visiting import Visitor

import penstock
from penstock.server import running
from penstock.server.keys import add_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.server import Server

GRANTS = {
    "root": ["all"],
    "viewer": ["consume:*"],
    "worker": ["consume:orders"],
    "sender": ["publish:*"],
}


@pytest.fixture(scope="session")
def browser() -> Iterator[Chrome]:
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        missing("chromium or chromedriver")
    options = ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = Chrome(options, ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Serve a few queues without keys."""
    with penstock.open("memory:") as broker:
        broker.create_queue("orders", max_attempts=1)
        broker.create_queue("emails")
        broker.publish(penstock.Message(b"x", {"queue": "orders"}) for _ in range(1_234))
        broker.publish([penstock.Message(b"x", {"queue": "emails"})])
        for each in broker.claim("orders", limit=3):
            broker.release([each.receipt], reason="<script>alert(1)</script>")
        with running(broker, http="127.0.0.1:0") as started:
            yield started


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.toml"


@pytest.fixture(scope="module")
def tokens(keys_file: Path) -> dict[str, str]:
    """Make keys, and return their tokens by the name of the key."""
    return {name: f"{name}:{add_key(keys_file, name, each)}" for name, each in GRANTS.items()}


@pytest.fixture(scope="module")
def guarded(keys_file: Path, tokens: dict[str, str]) -> Iterator[Server]:
    """Serve a few queues to those that have a key."""
    with penstock.open("memory:") as broker:
        for name in ("orders", "emails", "invoices"):
            broker.create_queue(name)
        with running(broker, http="127.0.0.1:0", keys=keys_file) as started:
            yield started


@pytest.fixture
def visitor(server: Server) -> Visitor:
    return Visitor(server)


@pytest.fixture
def stranger(guarded: Server) -> Visitor:
    """Visit a server that asks for keys, without one."""
    return Visitor(guarded)
