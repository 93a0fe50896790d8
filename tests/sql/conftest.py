"""A real PostgreSQL server for the tests of the SQL store."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.sql.postgres import MISSING, PostgresServer

if TYPE_CHECKING:
    from collections.abc import Iterator


def _server(*, durable: bool) -> Iterator[PostgresServer]:
    if MISSING:
        if os.environ.get("CI") == "true":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    server = PostgresServer(durable=durable)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Have one server for all tests of this worker, which does not wait for its disk."""
    yield from _server(durable=False)


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """Have a server that can be killed: what it has committed is on its disk."""
    yield from _server(durable=True)


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    """Name a database that is empty."""
    name = postgres.create()
    yield postgres.url(name)
    postgres.drop(name)
