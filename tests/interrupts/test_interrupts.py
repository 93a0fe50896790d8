"""A program whose signal handler raises in the middle of the library, on every store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.sql.postgres import PostgresServer

CHILD = Path(__file__).parent / "child.py"
# The child ends itself before.
HANG_S = 120


def run(url: str, seconds: float, error: str) -> None:
    """Run the program; it fails by itself if it hangs, or if anything is not as it was told."""
    command = [sys.executable, "-W", "ignore", str(CHILD), url, str(seconds), error, "7"]
    done = subprocess.run(
        command, timeout=seconds + HANG_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-10_000:]
    sys.stdout.write(done.stdout)


STORES = ["memory:", "rocksdb:{}", "rocksdb:{}?design=buckets", "slatedb+file://{}"]


@pytest.mark.parametrize(
    ("store", "error"), [*zip(STORES, ["alarm", "interrupt"] * 2, strict=True)]
)
def test_interrupted_verbs(store: str, error: str, tmp_path: Path) -> None:
    run(store.format(tmp_path / "store"), 1, error)


def test_interrupted_verbs_on_postgresql(postgres: PostgresServer) -> None:
    name = postgres.create()
    run(postgres.url(name), 1, "alarm")
    postgres.drop(name)


@pytest.mark.soak
@pytest.mark.parametrize("error", ["alarm", "interrupt"])
@pytest.mark.parametrize("store", STORES)
def test_interrupted_verbs_for_a_minute(store: str, error: str, tmp_path: Path) -> None:
    run(store.format(tmp_path / "store"), 60, error)


@pytest.mark.soak
@pytest.mark.parametrize("error", ["alarm", "interrupt"])
def test_interrupted_verbs_for_a_minute_on_postgresql(postgres: PostgresServer, error: str) -> None:
    name = postgres.create()
    run(postgres.url(name), 60, error)
    postgres.drop(name)
