"""Commands that run for a while, or look at the machine: top, tail, up, doctor, bench."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import tomllib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

import penstock
from penstock.cli import messages
from penstock.cli.doctor import EXTRAS
from penstock.cli.main import cli
from penstock.model import Message
from penstock.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.client import Client

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("cli")


def run(*words: object, url: str = "", **environment: str) -> Result:
    env = {"PENSTOCK_URL": url, "PENSTOCK_STORE": "", **environment}
    return CliRunner().invoke(cli, [*map(str, words)], env=env)


def start(*words: object, url: str = "", **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *map(str, words)],
        stdout=options.pop("stdout", subprocess.PIPE),
        env={**os.environ, "PENSTOCK_URL": url},
        text=True,
        **options,
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running("memory:", native="127.0.0.1:0") as server:
        yield server.location("native")


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with penstock.connect(url) as client:
        yield client


def work(client: Client, queue: str, *, fail: str = "") -> None:
    """Send a message and bring it to its end."""
    client.send(queue, b"hello")
    (taken,) = client.claim(queue, wait_ms=60_000)
    if fail:
        client.release([taken.receipt], reason=fail)
    else:
        client.ack([taken.receipt])


# --- top ------------------------------------------------------------------------------------------


@contextmanager
def top_on_a_terminal(url: str) -> Iterator[tuple[Any, int]]:
    """Start it on a terminal; give the process and our end, and leave neither behind."""
    ours, theirs = pty.openpty()
    child = start("top", "--every", "50ms", url=url, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        yield child, ours
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def test_top_on_a_terminal_that_can_not_replace_what_it_shows(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    client.create_queue("shown")
    said = b""
    with top_on_a_terminal(url) as (child, ours):
        # It ends when the child does, since nobody else has the terminal open.
        with suppress(OSError):
            while select.select([ours], [], [], 60)[0] and (part := os.read(ours, 4096)):
                said += part
        assert child.wait(60) == 0
    assert b"shown" in said


def test_top_on_a_terminal_until_ctrl_c(
    url: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    client.create_queue("shown")
    said = b""
    with top_on_a_terminal(url) as (child, ours):
        while b"shown" not in said:
            assert select.select([ours], [], [], 60)[0], said
            said += os.read(ours, 4096)
        child.send_signal(signal.SIGINT)
        # The terminal is read on, or the child could not write its last lines.
        with suppress(OSError):
            while os.read(ours, 4096):
                pass
        assert child.wait(60) == 0


def test_top_measures_rates(url: str, client: Client) -> None:
    client.create_queue("busy")
    busy = threading.Event()

    def load() -> None:
        while not busy.is_set():
            work(client, "busy")

    thread = threading.Thread(target=load)
    thread.start()
    try:
        result = run("top", "--json", "--once", "--every", "300ms", "--sort", "done", url=url)
    finally:
        busy.set()
        thread.join()
    first = json.loads(result.stdout)[0]
    assert first["queue"] == "busy"
    assert first["in_per_second"] > 0
    assert first["done_per_second"] > 0
    limited = run("top", "--json", "--once", "--every", "1ms", "--limit", "1", url=url)
    assert len(json.loads(limited.stdout)) == 1


def test_top_on_a_store_of_its_own(tmp_path: Path) -> None:
    store = f"rocksdb:{tmp_path / 'store'}"
    assert run("create", "mine", url=store).exit_code == 0
    assert "mine" in run("top", "--every", "1ms", url=store).stdout


# --- tail -----------------------------------------------------------------------------------------


def follow(client: Client, queue: str, *words: str, url: str, fail: str = "") -> list[Any]:
    """Follow until two messages were shown, while messages end; return them."""
    child = start("tail", *words, "--every", "20ms", "--limit", "2", "--json", url=url)
    while child.poll() is None:
        work(client, queue, fail=fail)
        threading.Event().wait(0.02)
    assert child.stdout is not None
    with child.stdout as lines:
        return [json.loads(line) for line in lines]


def test_tail_follows_ends_and_arrivals(url: str, client: Client) -> None:
    client.create_queue("followed", max_attempts=1)
    client.send("followed", b"before")
    (taken,) = client.claim("followed")
    client.ack([taken.receipt])
    done = follow(client, "followed", "followed", url=url)
    assert {each["payload"] for each in done} == {"hello"}
    assert {each["state"] for each in done} == {"done"}
    failed = follow(client, "followed", "followed", "--state", "failed", url=url, fail="torn")
    assert {(each["state"], each["reason"]) for each in failed} == {("failed", "torn")}
    last = client.log_stats().end
    came = follow(client, "followed", "followed", "--log", url=url)
    assert all(each["message_id"] >= last for each in came)
    assert {each["attributes"]["queue"] for each in came} == {"followed"}
    lines = run("tail", "--log", "--from-start", "--limit", "3", url=url).stdout
    assert len(lines.splitlines()) == 3
    assert run("tail", "--log", "--state", "done", url=url).exit_code == 2
    assert run("tail", url=url).exit_code == 2
    assert run("tail", "nowhere", url=url).exit_code == 1


def test_tail_ends_in_order_by_ctrl_c(url: str, client: Client) -> None:
    client.create_queue("quiet")
    work(client, "quiet")
    child = start("tail", "quiet", "--from-start", url=url)
    assert child.stdout is not None
    assert "hello" in child.stdout.readline()
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[0] == ""
    assert child.returncode == 0


def test_texts_of_messages_do_not_steer_the_terminal(url: str, client: Client) -> None:
    client.create_queue("hostile", max_attempts=1)
    client.publish([Message(b"\x1b[2J", {"queue": "hostile", "a": "\x9b"}, group="\x1b]0;x\x07")])
    (taken,) = client.claim("hostile")
    client.release([taken.receipt], reason="\x1b[31mred\n")
    for words in (
        ("tail", "hostile", "--from-start", "--limit", "1"),
        ("tail", "hostile", "--log", "--from-start", "--limit", "1"),
        ("browse", "hostile", "--state", "failed"),
        ("attempts", "hostile", str(taken.message_id)),
    ):
        said = run(*words, url=url).stdout
        assert not {"\x1b", "\x9b", "\x07"} & set(said)
        assert "\\x" in said or "\\u00" in said


def test_tail_shows_each_end_once_across_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PAGE", 3)
    monkeypatch.setattr(messages, "MAX_BROWSE_LIMIT", 5)
    with penstock.open("memory:") as broker:
        broker.create_queue("q", max_attempts=1)

        def end(count: int) -> list[int]:
            ids = [broker.send("q", b"x") for _ in range(count)]
            broker.release([each.receipt for each in broker.claim("q", limit=count)])
            return ids

        def read(follower: messages.EndFollower) -> list[int]:
            return [entry.message_id for entry in follower.read(broker)]

        first = end(7)
        fresh = messages.EndFollower(broker, "q", "failed", from_start=False)
        whole = messages.EndFollower(broker, "q", "failed", from_start=True)
        assert read(fresh) == []
        assert read(whole) == first
        for count in (1, 2, 3, 10):
            ended = end(count)
            assert read(fresh) == read(whole) == ended
            assert read(fresh) == []
        # One that is redriven and fails again has ended twice.
        broker.redrive("q", message_ids=[first[0]])
        broker.release([each.receipt for each in broker.claim("q")])
        assert read(fresh) == read(whole) == [first[0]]


# --- up -------------------------------------------------------------------------------------------


def test_up_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    words = ("--native", "127.0.0.1:0", "--http", "127.0.0.1:0", "--flight", "off", "--json")
    child = start("up", tmp_path / "data", *words, start_new_session=True)
    assert child.stdout is not None
    said = ""
    try:
        while "}" not in said:
            line = child.stdout.readline()
            assert line, said
            said += line
        native = json.loads(said)["native"]
        assert run("create", "orders", url=native).exit_code == 0
        assert run("send", "orders", "hello", url=native).exit_code == 0
        assert run("backup", "one", "--url", native, "--verify").exit_code == 0
        second = run("up", tmp_path / "data", *words)
        assert second.exit_code == 1
        assert f"serves it at {native}" in second.stderr
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)
    assert child.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    with penstock.open(f"rocksdb:{tmp_path / 'data' / 'store'}") as broker:
        assert broker.stats("orders").available == 1


def test_up_takes_free_ports_and_says_what_to_try(tmp_path: Path) -> None:
    children: list[subprocess.Popen[str]] = []
    urls = set()
    try:
        for name in ("one", "two"):
            children.append(start("up", tmp_path / name))
            output = children[-1].stdout
            assert output is not None
            said = ""
            while "Ctrl-C" not in said:
                line = output.readline()
                assert line, said
                said += line
            url = said.partition("PENSTOCK_URL=")[2].split()[0]
            urls.add(url)
            assert run("queues", url=url).stdout == "no queues\n"
            assert "console  http://127.0.0.1:" in said
            assert "penstock create orders" in said
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.communicate(timeout=60)
    assert len(urls) == 2
    assert [child.returncode for child in children] == [0, 0]


# --- doctor, bench, completion --------------------------------------------------------------------


def test_doctor_ends_with_1_only_for_what_was_asked_for(url: str) -> None:
    nowhere = {"PATH": "", "JAVA_HOME": "/nonexistent"}
    found = {each["what"]: each for each in json.loads(run("doctor", "--json", **nowhere).stdout)}
    assert found["Java"]["state"] == "note"
    assert "Java 17 or newer" in found["Java"]["hint"]
    assert found["penstock[server]"]["state"] == "ok"
    assert run("doctor", **nowhere).exit_code == 0
    assert run("doctor", "--need", "spark", **nowhere).exit_code == 1
    assert run("doctor", "--need", "server", url=url).exit_code == 0
    away = run("doctor", "--url", "penstock://127.0.0.1:9")
    assert away.exit_code == 1
    assert "no server at 127.0.0.1:9" in away.stdout
    assert run("doctor", "--url", "rocksdb:/nonexistent/store").exit_code == 1


def test_doctor_knows_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(extras["optional-dependencies"])


def test_bench_leaves_nothing_behind(url: str, client: Client) -> None:
    before = client.queues()
    result = run("bench", "--seconds", "100ms", "--workers", "2", "--batch", "3", "--json", url=url)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["workers"], found["batch"], found["on"]) == (2, 3, url)
    assert {each["verb"] for each in found["figures"]} == {"publish", "claim", "ack"}
    assert all(each["messages_per_second"] > 0 for each in found["figures"])
    assert client.queues() == before


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    script = run("completion", shell).stdout
    assert "_PENSTOCK_COMPLETE" in script
    words = {"COMP_WORDS": "penstock comp", "COMP_CWORD": "1" if shell != "fish" else "comp"}
    child = subprocess.run(
        [sys.executable, "-m", "penstock"],
        env={**os.environ, **words, "_PENSTOCK_COMPLETE": f"{shell}_complete"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "completion" in child.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
