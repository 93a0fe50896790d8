"""``penstock up --spark``: a server and the route job in one command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import wait_until

pytest.importorskip("pyspark", reason="pyspark is not installed")

import penstock

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.xdist_group("spark")]


def processes_about(text: str) -> list[bytes]:
    """Return the command lines of this machine's processes that name a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes()
        except OSError:
            continue
        if text.encode() in line:
            found.append(line)
    return found


@pytest.mark.usefixtures("java")
def test_what_is_published_is_routed_and_nothing_is_left_behind(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    listeners = [
        word for name in ("native", "http", "flight") for word in (f"--{name}", "127.0.0.1:0")
    ]
    child = subprocess.Popen(
        [sys.executable, "-m", "penstock", "up", str(directory), "--spark", "--json", *listeners],
        stdout=subprocess.PIPE,
        env={**os.environ, "PENSTOCK_URL": ""},
        text=True,
    )
    assert child.stdout is not None
    said = ""
    try:
        while "}" not in said:
            line = child.stdout.readline()
            assert line, said
            said += line
        with penstock.connect(json.loads(said)["native"]) as client:
            client.create_queue("orders")
            client.send("orders", b"hello")
            wait_until(
                lambda: client.stats("orders").available == 1,
                seconds=180,
                why="nothing was routed",
            )
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=120)
    assert child.returncode == 0, (directory / "route.log").read_text()
    wait_until(lambda: not processes_about(str(directory)))
