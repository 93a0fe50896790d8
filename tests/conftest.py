"""Settings for every test."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sql.postgres import PostgresServer

# The suites that are shipped to users are ordinary modules: without this their asserts are mute.
pytest.register_assert_rewrite("penstock.testing")

_slow_machine = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("check", deadline=None, suppress_health_check=_slow_machine)
settings.register_profile(
    "soak", deadline=None, suppress_health_check=_slow_machine, max_examples=5_000
)
settings.load_profile(os.environ.get("PENSTOCK_HYPOTHESIS_PROFILE", "check"))

# Tests open some thousand stores, and each waits for its disk a dozen times: their folders are in
# memory where there is room. Processes that are killed lose there what they would lose on a disk.
MEMORY: Final = Path("/dev/shm")
ROOM_BYTES: Final = 4 << 30
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Have one server for all tests of this worker, which does not wait for its disk."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    from tests.sql.postgres import serving  # noqa: PLC0415 - psycopg may be missing

    yield from serving(durable=False)


class _IdleSweeps(logging.Handler):
    """Keeps what sweeps have logged that found something due and changed nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


@pytest.fixture(autouse=True)
def idle_sweeps() -> Iterator[list[str]]:
    """Fail a test in which a sweep could not do what was due, unless the test empties the list."""
    handler, logger = _IdleSweeps(), logging.getLogger("penstock.idle")
    logger.addHandler(handler)
    yield handler.told
    logger.removeHandler(handler)
    assert handler.told == []
