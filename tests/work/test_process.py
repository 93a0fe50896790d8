"""``penstock work`` as a process, servers that come and go, and kills under load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner
from tests.judging import judge_queue
from tests.noting import notes_of
from tests.work.helping import alive, fill, reasons, wait_until

import penstock
from penstock import ManualClock, Message, SystemClock, Worker
from penstock.cli.main import cli
from penstock.testing.auditor import Kind
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("child.py")
ROUNDS = 2
FULL = Path("/dev/full")


class Running:
    """A process and what it says."""

    def __init__(self, *command: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def _said(self, text: str) -> bool:
        return any(text in line for line in list(self.lines))

    def wait_for(self, text: str) -> None:
        wait_until(lambda: self._said(text) or self.process.poll() is not None, text)
        assert self._said(text), "".join(self.lines)

    def end(self) -> int:
        code = self.process.wait(120)
        self._reader.join()
        return code


@contextmanager
def started(*command: object) -> Iterator[Running]:
    running = Running(*command)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        running._reader.join()
        assert running.process.stdout is not None
        running.process.stdout.close()


def prepared(tmp_path: Path, count: int) -> tuple[str, list[int]]:
    url = f"rocksdb:{tmp_path}/store"
    with penstock.open(url) as broker:
        broker.create_queue("q")
        messages = [
            Message(b"%d" % n, {"queue": "q", "place": str(tmp_path)}) for n in range(count)
        ]
        return url, broker.publish(messages)


def work(url: str, *options: object) -> tuple[object, ...]:
    handler = "tests.work.handlers:waits_for_file"
    return ("-m", "penstock", "work", handler, "--store", url, "--queue", "q", *options)


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_sigterm_drains(mode: str, tmp_path: Path) -> None:
    url, ids = prepared(tmp_path, 5)
    options = ["--concurrency", 1, "--prefetch", 4, "--log-format", "json"]
    options += ["--metrics", "127.0.0.1:0"] if mode == "threads" else ["--processes"]
    with started(*work(url, *options)) as running:
        wait_until((tmp_path / "began-0").exists)
        if mode == "threads":
            page = metrics_of(running)
            assert 'penstock_worker_claimed_total{queue="q"} 5.0' in page
            assert 'penstock_worker_in_progress{queue="q"} 1.0' in page
            assert 'penstock_worker_handler_seconds_count{queue="q"} 0.0' in page
            assert 'penstock_worker_lag_seconds_bucket{le="+Inf",queue="q"} 5.0' in page
            assert "process_resident_memory_bytes" in page
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("stopping: 1 messages are finished, 4 given back")
        (tmp_path / "go").touch()
        assert running.end() == 0
        said = [line for line in running.lines if line.startswith("{")]
        assert msgspec.json.decode(said[0])["message"] == f"working on q: 1 {mode}"
        assert running.lines[-1] == "processed 1, failed 0, released 4, lost 0, stale 0\n"
    with penstock.open(url) as broker:
        assert (broker.stats("q").done, broker.stats("q").available) == (1, 4)
        assert reasons(broker, "q", ids[1]) == []
        assert_clean(broker)


def test_the_ready_file_and_the_queues_of_a_process(tmp_path: Path) -> None:
    url, _ = prepared(tmp_path, 1)
    with penstock.open(url) as broker:
        broker.create_queue("other", backoff_base_ms=1, backoff_cap_ms=1)
        # It has no place to write to.
        broker.publish([Message(b"x", {"queue": "other"})])
    ready = tmp_path / "ready"
    options = ["--queue", "other", "--ready-file", ready, "--metrics", "127.0.0.1:0"]
    with started(*work(url, *options)) as running:
        wait_until(ready.exists)
        wait_until((tmp_path / "began-0").exists)
        failed = 'penstock_worker_failed_by_attempt_bucket{le="1.0",queue="other"} 1.0'
        wait_until(lambda: failed in metrics_of(running))
        page = metrics_of(running)
        assert 'penstock_worker_failed_total{queue="q"} 0.0' in page
        assert 'penstock_worker_in_progress{queue="q"} 1.0' in page
        assert 'penstock_worker_claimed_total{queue="q"} 1.0' in page
        assert 'penstock_worker_longest_seconds{queue="q"}' in page
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("stopping: 1 messages")
        wait_until(lambda: not ready.exists())
        (tmp_path / "go").touch()
        assert running.end() == 0
    with started(*work(url, "--ready-file", tmp_path / "nowhere" / "ready")) as running:
        assert running.end() == 1
        assert "no directory for the ready file" in "".join(running.lines)


def metrics_of(running: Running) -> str:
    running.wait_for("metrics at ")
    line = next(line for line in running.lines if line.startswith("metrics at "))
    with urllib.request.urlopen(line.removeprefix("metrics at ").strip()) as page:
        text: str = page.read().decode()
    return text


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_what_can_not_be_said_is_no_failure(tmp_path: Path) -> None:
    url, ready = f"rocksdb:{tmp_path}/db", tmp_path / "ready"
    with penstock.open(url) as broker:
        broker.create_queue("q")
    command = [sys.executable, "-m", "penstock", "work", "os:getpid", "--queue", "q"]
    # With that set, Python's own end has nothing to write, which would fail.
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with FULL.open("wb", buffering=0) as full:
        process = subprocess.Popen(
            [*command, "--ready-file", str(ready), "--url", url],
            env=environment,
            stdout=full,
            stderr=full,
        )
    try:
        wait_until(ready.exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    url, ids = prepared(tmp_path, 1)
    with started(*work(url, "--drain", "1h", "--json")) as running:
        wait_until((tmp_path / "began-0").exists)
        running.process.send_signal(signal.SIGTERM)
        running.wait_for("stopping: 1 messages")
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 0
    with penstock.open(url, background=False) as broker:
        assert reasons(broker, "q", ids[0]) == ["cut off: the worker was stopped"]


def test_what_the_command_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("penstock.cli.server.configure_logs", lambda *_: None)
    url, _ = prepared(tmp_path, 0)

    def refused(*command: object, code: int = 1) -> str:
        result = CliRunner().invoke(cli, ["work", *map(str, command)])
        assert result.exit_code == code, result.output
        return result.output

    here = ("--store", url, "--queue", "q")
    nothing = "tests.work.handlers:nothing"
    assert "there is no module 'nowhere'" in refused("nowhere:f", *here)
    assert "has no 'nowhere'" in refused("tests.work.handlers:nowhere", *here)
    assert "is no function" in refused("tests.work.handlers:NOT_CALLABLE", *here)
    assert "is not MODULE:FUNCTION" in refused("nothing", *here, code=2)
    assert "no queue named 'z'" in refused(nothing, "--store", url, "--queue", "z")
    assert "there is no store at" in refused(nothing, "--store", "rocksdb:/no/x", "--queue", "q")
    assert "--concurrency" in refused(nothing, *here, "--concurrency", "0", code=2)
    assert "is not a duration" in refused(nothing, *here, "--time-limit", "soon", code=2)
    assert "time_limit_ms" in refused(nothing, *here, "--time-limit", "0")
    assert "not an address" in refused(nothing, *here, "--metrics", "x")
    assert "--queue" in refused(nothing, "--store", url, code=2)


# --- servers --------------------------------------------------------------------------------------


def serve(url: str, port: object, port_file: Path) -> tuple[object, ...]:
    listen = ("--native", f"127.0.0.1:{port}", "--port-file", port_file)
    return ("-m", "penstock", "serve", "--store", url, *listen)


def test_a_server_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    url, _ = prepared(tmp_path, 0)
    port_file = tmp_path / "port"
    seen: list[bytes] = []
    with started(*serve(url, 0, port_file)) as first:
        wait_until(lambda: port_file.exists() and port_file.read_text())
        port = port_file.read_text().strip()
        client = penstock.connect(f"penstock://127.0.0.1:{port}", patience_ms=500)
        fill(client, "q", 200)  # type: ignore[arg-type]
        worker = Worker(client, "q", lambda d: seen.append(d.payload), wait_ms=20).start()
        wait_until(lambda: worker.stats().processed >= 20)
        first.process.kill()
        first.process.wait()
        wait_until(lambda: worker.stats().troubles)
    port_file.unlink(missing_ok=True)
    with started(*serve(url, port, port_file)) as second:
        wait_until(lambda: not worker.stats().troubles or second.process.poll() is not None)
        fill(client, "q", 20)  # type: ignore[arg-type]
        with client:
            wait_until(lambda: client.stats("q").done >= 20 + 20)
            worker.stop()
            wait_until(lambda: worker.join(100))
        second.process.send_signal(signal.SIGTERM)
        assert second.end() == 0
    with penstock.open(url, background=False, clock=ManualClock(SystemClock().now_ms())) as broker:
        stats = broker.stats("q")
        assert stats.done + stats.available + stats.delayed + stats.in_flight == 220
        assert stats.done <= len(seen)
        assert_clean(broker)


# --- kills under load -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_killed_under_load(mode: str, tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/store"
    clock = SystemClock()
    children: list[int] = []
    for round_ in range(ROUNDS):
        with started(CHILD, url, tmp_path / "notes", mode, round_, "q") as running:
            running.wait_for("working")
            line = next(line for line in running.lines if line.startswith("working"))
            children += map(int, line.split()[1:])
            threading.Event().wait(0.1 + clock.random() / 2)
            assert running.process.poll() is None, running.lines
    still = ManualClock(clock.now_ms())
    with penstock.open(url, background=False, clock=still) as broker:
        assert_clean(broker)
        notes = notes_of(tmp_path / "notes.q")
        waiting, over = judge_queue(broker, "q", notes)
        seen = Counter(note.kind for note in notes)
        assert seen[Kind.ACKED] > 20, seen
        assert seen[Kind.RELEASED] > 2, seen
        if mode == "processes":
            tried = [e.message_id for e in (*over, *waiting) if e.attempts]
            assert any("SIGKILL" in reason for i in tried for reason in reasons(broker, "q", i))
            assert children
    wait_until(lambda: not any(map(alive, children)), "orphans end")
    # Nothing is lost: a worker that is left alone finishes all of it.
    published = sum(1 for note in notes if note.kind is Kind.PUBLISHED)
    with Worker(url, "q", any_handler, concurrency=8, prefetch=100, wait_ms=20) as worker:
        total = len(waiting) + len(over)
        wait_until(lambda: worker.stats().processed + len(over) >= total)
    with penstock.open(url, background=False) as broker:
        assert broker.stats("q").done + broker.stats("q").failed == total >= published


def any_handler(delivery: Any) -> None:
    """Succeed."""
