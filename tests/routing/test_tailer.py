"""Tailers that follow a log: embedded and through a server, fenced, killed, stopped by signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from tests.ports import free_ports
from tests.routing.test_kill import held
from tests.waiting import wait_until

import penstock
from penstock import Broker, InvalidInput, Message, Tailer
from penstock.broker.tailer import match_page
from penstock.cli.main import cli
from penstock.server import running
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.broker.tailer import RoutedLog
    from penstock.client import Client
    from penstock.model import LogStats


class Following:
    """A tailer on a thread of its own."""

    def __init__(self, broker: RoutedLog, **options: Any) -> None:
        self.tailer = Tailer(broker, **options)
        self.read: int | None = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.read = self.tailer.run()
        except Exception as error:
            self.error = error

    def ended(self) -> Exception | None:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.error

    def stop(self) -> int | None:
        self.tailer.stop()
        assert self.ended() is None
        return self.read


@contextmanager
def piped(url: str = "memory:", logs: int = 3, **options: Any) -> Iterator[Broker]:
    with penstock.open(url, routing="pipeline", **options) as broker:
        broker.configure_log(logs=logs)
        broker.create_queue("all", filter="TRUE")
        yield broker


def test_a_tailer_follows_the_log() -> None:
    seen: list[LogStats] = []
    with piped() as broker:
        ids = broker.publish([Message(b"", group=str(number)) for number in range(30)])
        following = Following(broker, limit=4, progress=seen.append)
        for count in range(31, 36):
            ids += broker.publish([Message(b"")])
            wait_until(partial(lambda count: len(held(broker, "all")) == count, count))
        assert following.stop() == len(ids)
        assert held(broker, "all") == ids
        assert seen[0].routed_up_to <= seen[-1].routed_up_to == seen[-1].end
        assert_clean(broker)


def test_a_log_that_waits_for_another_is_routed_at_once() -> None:
    with piped(logs=2, background=False) as broker:
        by_log: dict[int, str] = {}
        for name in "abcdefgh":
            broker.publish([Message(b"", group=name)])
            (log,) = (log for log in (0, 1) if broker.read_log(log).records)
            by_log[log] = name
            penstock.route_once(broker)
        broker.publish([Message(b"", group=by_log[0])])
        page = broker.read_log(0)
        broker.assign(0, page.cursor, match_page(page))
        # Log 1 has no message up to the change, and its cursor is behind all the same.
        broker.configure_log(logs=4)
        ids = [broker.publish([Message(b"", group=name)])[0] for name in "abcdefgh"]
        assert penstock.route_once(broker) == len(ids)
        assert held(broker, "all")[-len(ids) :] == ids


def test_a_claim_waits_for_a_tailer() -> None:
    with piped() as broker:
        following = Following(broker)
        broker.publish([Message(b"x")])
        assert [each.payload for each in broker.claim("all", wait_ms=60_000)] == [b"x"]
        following.stop()


def test_the_tailer_that_was_started_last_routes() -> None:
    with piped() as broker:
        first = Following(broker)
        broker.publish([Message(b"")])
        wait_until(lambda: held(broker, "all"))
        second = Following(broker)
        ids = [*held(broker, "all"), *broker.publish([Message(b"")] * 10)]
        wait_until(lambda: held(broker, "all") == ids)
        error = first.ended()
        assert isinstance(error, InvalidInput)
        assert "another tailer or pipeline has taken over" in str(error)
        second.stop()
        assert broker.stats("all").enqueued_total == 11


def test_a_tailer_ends_when_the_store_is_switched_to_inline() -> None:
    with piped() as broker:
        following = Following(broker)
        broker.publish([Message(b"")])
        wait_until(lambda: held(broker, "all"))
        broker.configure_log(routing="inline")
        broker.publish([Message(b"")])
        assert "this store routes inline" in str(following.ended())
        assert broker.stats("all").enqueued_total == 2
        assert "this store routes inline" in str(Following(broker).ended())
    # Also where there is nothing to route.
    with penstock.open("memory:") as broker, pytest.raises(InvalidInput, match="--routing pipe"):
        penstock.route_once(broker)


def test_messages_that_are_published_through_switches_come_once() -> None:
    """Producers, a tailer and switches at the same time, as many as there is time for."""
    with piped(background=False) as broker:
        ids: list[int] = []
        enough = threading.Event()

        def produce(group: str) -> None:
            while not enough.is_set():
                ids.extend(broker.publish([Message(b"", group=group), Message(b"")]))

        producers = [threading.Thread(target=produce, args=[name]) for name in "ab"]
        for producer in producers:
            producer.start()
        try:
            for _ in range(6):
                following = Following(broker, limit=50, poll_ms=1)
                wait_until(partial(lambda at: len(ids) > at, len(ids) + 50))
                switch_to_inline(broker)
                assert "this store routes inline" in str(following.ended())
                broker.configure_log(routing="pipeline")
        finally:
            enough.set()
            for producer in producers:
                producer.join()
        switch_to_inline(broker)
        assert held(broker, "all") == sorted(ids)
        assert broker.stats("all").enqueued_total == len(ids)
        assert_clean(broker)


def switch_to_inline(broker: Broker) -> None:
    """Switch; a tailer that is far behind is waited for."""

    def switched() -> bool:
        stats = broker.log_stats()
        if stats.end - stats.routed_up_to > 5_000:
            penstock.route_once(broker)
            return False
        return broker.configure_log(routing="inline").routing == "inline"

    wait_until(switched)


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"limit": 100_001}, {"poll_ms": 0}])
def test_settings_of_a_tailer_are_bounded(wrong: dict[str, int]) -> None:
    with piped() as broker, pytest.raises(InvalidInput, match=next(iter(wrong))):
        Tailer(broker, **wrong)  # type: ignore[arg-type]


# --- through a server ---------------------------------------------------------------------------


def test_a_tailer_goes_on_when_its_server_comes_back(tmp_path: Path) -> None:
    store = f"rocksdb:{tmp_path}/store"
    address = f"127.0.0.1:{free_ports(1)[0]}"
    settings: dict[str, Any] = {"native": address, "routing": "pipeline", "grace": "1s"}
    with running(store, **settings) as server:
        server.broker.create_queue("all", filter="TRUE")
        client = penstock.connect(f"penstock://{address}", patience_ms=1_000)
        following = Following(client)
        server.broker.publish([Message(b"")])
        wait_until(lambda: held(server.broker, "all"))
    with client, running(store, **settings) as server:
        server.broker.publish([Message(b"")])
        wait_until(lambda: len(held(server.broker, "all")) == 2)
        following.stop()


def start_route(url: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", "route", "--url", url, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_tailers_assign_each_message_once(tmp_path: Path) -> None:
    """``penstock route --follow`` beside producers: killed, killed, and stopped by SIGTERM."""
    with (
        piped(f"rocksdb:{tmp_path}/store", logs=2, background=False) as broker,
        running(broker, native="127.0.0.1:0") as server,
        penstock.connect(server.location("native")) as client,
    ):
        url = server.location("native")
        ids: list[int] = []
        enough = threading.Event()
        producer = threading.Thread(target=produce, args=[client, ids, enough])
        producer.start()
        try:
            for wanted in (50, 200):
                child = start_route(url, "--follow", "--limit", "7")
                wait_until(partial(has_routed, broker, wanted))
                child.kill()
                child.communicate()
            child = start_route(url, "--follow", "--json")
            wait_until(partial(has_routed, broker, 500))
            enough.set()
            producer.join()
            # A log without a message up to the end is behind until the tailer's next look.
            wait_until(lambda: (stats := broker.log_stats()).routed_up_to == stats.end)
            child.send_signal(signal.SIGTERM)
            said, errors = child.communicate(timeout=60)
        finally:
            enough.set()
            producer.join()
            child.kill()
        assert (child.returncode, errors) == (0, "")
        answer = msgspec.json.decode(said)
        assert answer["routed_up_to"] == answer["end"]
        assert 0 < answer["read"] < len(ids)
        assert held(broker, "all") == sorted(ids)
        assert broker.stats("all").enqueued_total == len(ids)
        assert_clean(broker)


def has_routed(broker: Broker, count: int) -> bool:
    return broker.stats("all").enqueued_total > count


def produce(client: Client, ids: list[int], enough: threading.Event) -> None:
    while not enough.wait(0.001):
        ids.extend(client.publish([Message(b"", group=name) for name in ("", "a", "b")]))


def test_the_command_line_switches_and_says_why_it_does_not(tmp_path: Path) -> None:
    with (
        piped(f"rocksdb:{tmp_path}/store") as broker,
        running(broker, native="127.0.0.1:0") as server,
    ):
        url = server.location("native")
        first = start_route(url, "--follow")
        broker.publish([Message(b"")])
        try:
            wait_until(lambda: held(broker, "all"))
            command = [sys.executable, "-m", "penstock", "log", "configure", "--url", url]
            done = subprocess.run(
                [*command, "--routing", "inline"], capture_output=True, text=True, check=True
            )
            assert "inline" in done.stdout
            _, errors = first.communicate(timeout=60)
        finally:
            first.kill()
        assert first.returncode == 1
        assert "this store routes inline" in errors
        assert len(errors.splitlines()) == 1
        refused = run("route", "--url", url)
        assert (refused.exit_code, "this store routes inline" in refused.stderr) == (1, True)
    store = f"rocksdb:{tmp_path}/store"
    refused = run("serve", "--store", store, "--routing", "pipeline", "--http", "off")
    assert refused.exit_code == 1
    assert "switch: penstock log configure --routing pipeline" in refused.stderr
    assert run("log", "configure", "--url", store, "--routing", "pipeline").exit_code == 0
    assert "routed up to offset" in run("route", "--url", store).output


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, words)
