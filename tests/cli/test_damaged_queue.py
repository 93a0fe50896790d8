"""One queue whose index can't be read: the others are shown, and the damage is named."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from tests.damaging import compact, files_of, flip

import penstock
from penstock.cli.main import cli
from penstock.errors import StoreDamaged
from penstock.server.metrics import Metrics
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = tmp_path / "store"
    with penstock.open(f"rocksdb:{path}") as broker:
        broker.create_queue("bad")
        broker.create_queue("good")
        broker.publish([penstock.Message(b"1", {"queue": "bad"}) for _ in range(2000)])
        broker.send("good", b"2")
    compact(path, DESIGNS["indexed"])
    (index,) = files_of(path)["visibility_index"]
    flip(index, index.stat().st_size // 4, 100)
    url = f"rocksdb:{path}"
    with penstock.open(url) as broker, contextlib.suppress(StoreDamaged):
        while broker.claim("bad", limit=500):
            pass
    return url


@pytest.mark.parametrize("command", ["queues", "stats"])
def test_commands_show_the_other_queues(url: str, command: str) -> None:
    shown = CliRunner().invoke(cli, [command, "--store", url])
    assert shown.exit_code == 1
    assert "good" in shown.stdout
    assert "table 'visibility_index' can't be read" in shown.stderr


def test_settings_need_no_figures(url: str) -> None:
    shown = CliRunner().invoke(cli, ["queues", "--store", url, "--json"])
    assert shown.exit_code == 0, shown.stderr
    assert '"bad"' in shown.stdout


def test_the_page_of_metrics_counts_it(url: str) -> None:
    metrics = Metrics()
    with penstock.open(url) as broker:
        metrics.watch(broker, seconds=lambda: 0.0)
        metrics.read_store()
        page = metrics.page().decode()
    assert "penstock_queues 2.0" in page
    assert "penstock_queues_unreadable 1.0" in page
    assert 'penstock_queue_depth{queue="good",state="available"} 1.0' in page
