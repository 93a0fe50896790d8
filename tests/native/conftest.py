"""A served broker in memory, for tests of the client and the server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import penstock
from penstock.client.transport import Link
from penstock.clock import ManualClock

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.native.serving import Served

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.broker.broker import Broker
    from penstock.client import Client


@pytest.fixture
def served() -> Iterator[Served]:
    with penstock.open("memory:") as broker, Served(broker) as server:
        broker.create_queue("q")
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with penstock.connect(served.url) as made:
        yield made


class Steered(NamedTuple):
    """A served broker and a client of it, both of which live by the test's clock."""

    clock: ManualClock
    broker: Broker
    client: Client


@pytest.fixture
def steered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steered]:
    """Give a client whose leases end when the test says so, however slow the machine is."""
    clock = ManualClock()
    monkeypatch.setattr(Link, "now_ms", lambda _: clock.now_ms())
    with (
        penstock.open("memory:", clock=clock, background=False) as broker,
        Served(broker, clock=clock) as server,
        penstock.connect(server.url) as client,
    ):
        broker.create_queue("q")
        yield Steered(clock, broker, client)
