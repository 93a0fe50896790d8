"""A real PostgreSQL server for the tests of the SQL store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.sql.postgres import PostgresServer, serving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def durable_postgres() -> Iterator[PostgresServer]:
    yield from serving(durable=True)


@pytest.fixture
def own_postgres(durable_postgres: PostgresServer) -> Iterator[PostgresServer]:
    """Have a server that can be killed: what it has committed is on its disk."""
    yield durable_postgres
    if not durable_postgres.running:
        durable_postgres.start()


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    """Name a database that is empty."""
    name = postgres.create()
    yield postgres.url(name)
    postgres.drop(name)
