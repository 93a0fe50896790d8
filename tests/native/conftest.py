"""A served broker in memory, for tests of the client and the server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.native.serving import Served

if TYPE_CHECKING:
    from collections.abc import Iterator

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
