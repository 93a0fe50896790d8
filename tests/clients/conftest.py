"""Servers that the clients share: one that wants signatures, started once for each module."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if not os.environ.get("CI"):
    pytest.importorskip("boto3")
    pytest.importorskip("uvloop")

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.clients.process import Served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give a server that checks every signature."""
    server = Served(tmp_path_factory.mktemp("served"), keys=True)
    yield server
    server.close()
    assert server.process.returncode == 0, server.log.read_text()
    assert not server.complaints()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Give what starts a server with options of the test's own."""
    started: list[Served] = []

    def start(*options: str, keys: bool = False) -> Served:
        started.append(Served(tmp_path / f"server-{len(started)}", *options, keys=keys))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def name() -> str:
    """Give a name for a queue that no other test has."""
    return f"clients-{next(_NUMBERS)}"
