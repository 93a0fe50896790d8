"""``penstock up --spark``: a server and the pipeline in one command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from tests.ports import free_ports
from tests.processes import processes
from tests.waiting import wait_until

pytest.importorskip("pyspark", reason="pyspark is not installed")

from typing import TYPE_CHECKING

import penstock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.xdist_group("spark")]


@pytest.mark.usefixtures("java")
def test_what_is_published_is_routed_and_nothing_is_left_behind(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    ports = free_ports(3)
    listeners = [
        word
        for name, port in zip(("native", "http", "flight"), ports, strict=True)
        for word in (f"--{name}", f"127.0.0.1:{port}")
    ]
    child = subprocess.Popen(
        [sys.executable, "-m", "penstock", "up", str(directory), "--spark", *listeners],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PENSTOCK_URL": ""},
        text=True,
    )
    assert child.stdout is not None
    said = ""
    try:
        # It says what starts, how far that is, and then what to try.
        while "penstock create orders" not in said:
            line = child.stdout.readline()
            assert line, said
            said += line
        before, _, after = said.partition("Routing runs, after ")
        assert f"(runs {directory / 'pipeline.toml'})" in before
        assert f"the log is {directory / 'pipeline.log'})" in before
        assert f"export PENSTOCK_URL=penstock://127.0.0.1:{ports[0]}\n" in after
        with penstock.connect(f"penstock://127.0.0.1:{ports[0]}") as client:
            client.create_queue("orders")
            client.send("orders", b"hello")
            wait_until(
                lambda: client.stats("orders").available == 1,
                seconds=180,
                why="nothing was routed",
            )
    finally:
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=120)
    log = (directory / "pipeline.log").read_text()
    assert (child.returncode, told) == (0, ""), log
    assert log.endswith(" info penstock.pipeline stopped\n")
    about = str(directory)
    wait_until(lambda: not any(about in each.command for each in processes().values()))
