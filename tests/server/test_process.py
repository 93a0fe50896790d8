"""`penstock serve` as a process: signals, ports, readiness, logs."""

from __future__ import annotations

import logging
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest

import penstock
from penstock import Message, NotAllowed
from penstock.flight.client import FlightStore
from penstock.server import logs, running
from penstock.server.keys import add_key, remove_key

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = pa.schema([("payload", pa.binary()), ("queue", pa.string())])
ROOT = Path(__file__).parents[2]


def put(store: FlightStore, count: int = 1) -> int:
    batch = pa.record_batch({"payload": [b"secret-payload"] * count, "queue": ["q"] * count},
                            schema=ROWS)  # fmt: skip
    return store.publish([batch]).published


def test_it_serves_and_ends_in_order(serve: Callable[..., Any], tmp_path: Path) -> None:
    server = serve(native=True)
    assert list(server.ports) == ["native", "http", "flight"]
    assert server.ask("GET", "/ready").status == 200
    with penstock.connect(f"penstock://127.0.0.1:{server.ports['native']}") as client:
        client.create_queue("q")
        client.send("q", b"one")
    assert put(FlightStore(server.flight), 2) == 2
    said = server.stop()
    assert server.process.returncode == 0
    lines = said.splitlines()
    assert lines[0].startswith(f"serving rocksdb:{tmp_path}/db at penstock://127.0.0.1:")
    assert lines[1:] == ["stopping: no more calls are taken", "stopped"]
    assert not server.port_file.exists()
    with penstock.open(f"rocksdb:{tmp_path}/db") as broker:
        assert broker.store_stats().published_total == 3
        assert broker.stats("q").available == 3
        assert broker.check().ok


def test_waiting_claims_are_handed_back(serve: Callable[..., Any], wait_until: Any) -> None:
    server = serve(native=True)
    with penstock.connect(f"penstock://127.0.0.1:{server.ports['native']}") as client:
        client.create_queue("q")
        answers: list[Any] = []
        waiting = threading.Thread(
            target=lambda: answers.append(client.claim("q", wait_ms=600_000)), daemon=True
        )
        waiting.start()
        wait_until(lambda: b"penstock_parked_claims 1.0" in server.ask("GET", "/metrics").body)
        server.stop()
        waiting.join(60)
        assert answers == [[]]
    assert server.process.returncode == 0


def test_a_read_that_goes_on_is_finished(serve: Callable[..., Any], tmp_path: Path) -> None:
    with penstock.open(f"rocksdb:{tmp_path}/db", durability="relaxed") as broker:
        broker.publish([Message(b"x" * 500_000)] * 100)
    server = serve("--grace", "10m")
    store = FlightStore(server.flight)
    reader = store.read(store.plan_read("log", payload=True).tickets[0])
    rows = next(reader).num_rows
    server.signal(signal.SIGTERM)
    rows += sum(batch.num_rows for batch in reader)
    assert rows == 100
    server.finish()
    assert server.process.returncode == 0


def test_a_second_signal_ends_it_at_once(serve: Callable[..., Any], tmp_path: Path) -> None:
    with penstock.open(f"rocksdb:{tmp_path}/db", durability="relaxed") as broker:
        broker.publish([Message(b"x" * 500_000)] * 100)
    server = serve("--grace", "10m")
    store = FlightStore(server.flight)
    reader = store.read(store.plan_read("log", payload=True).tickets[0])
    next(reader)
    server.signal(signal.SIGTERM)
    assert "stopping" in server.process.stdout.readline() + server.process.stdout.readline()
    server.signal(signal.SIGTERM)
    said = server.finish()
    assert "stopping at once" in said
    assert server.process.returncode == 1
    assert not server.port_file.exists()
    with penstock.open(f"rocksdb:{tmp_path}/db") as broker:
        assert broker.store_stats().published_total == 100


def test_calls_are_served_while_it_drains(serve: Callable[..., Any], wait_until: Any) -> None:
    server = serve("--drain-delay", "3s", "--log-format", "json", native=True)
    address = f"penstock://127.0.0.1:{server.ports['native']}"
    with penstock.connect(address) as client:
        client.create_queue("q")
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.ask("GET", "/ready").status == 503)
        assert b"calls are still served" in server.ask("GET", "/ready").body
        client.send("q", b"on a connection that was there")
        with penstock.connect(address) as another:
            another.send("q", b"on a new one")
        assert put(FlightStore(server.flight)) == 1
        assert server.ask("GET", "/health").status == 200
    said = server.finish()
    assert server.process.returncode == 0
    assert said.splitlines()[1:] == [
        "stopping: not ready, and calls are served for 3 s more",
        "stopping: no more calls are taken",
        "stopped",
    ]
    records = [msgspec.json.decode(line) for line in server.log.read_text().splitlines()]
    texts = [each["message"] for each in records]
    ends = ["stopping", "no more calls are taken", "stopped"]
    assert [text for text in texts if text in ends] == ends
    assert [each["signal"] for each in records if each["message"] == "stopping"] == ["SIGTERM"]


def test_a_second_signal_ends_it_also_while_it_drains(
    serve: Callable[..., Any], wait_until: Any
) -> None:
    server = serve("--drain-delay", "10m")
    server.signal(signal.SIGTERM)
    wait_until(lambda: server.ask("GET", "/ready").status == 503)
    server.signal(signal.SIGINT)
    assert "stopping at once" in server.finish()
    assert server.process.returncode == 1
    assert "stopped at once: what was in hand was left" in server.log.read_text()


def test_a_port_that_is_taken_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, "-m", "penstock", "serve", "--store", f"rocksdb:{tmp_path}/db",
             "--flight", "127.0.0.1:0", "--http", f"127.0.0.1:{port}"],
            cwd=ROOT, env={"PYTHONPATH": "src", "PATH": ""}, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    assert f"can't listen on 127.0.0.1:{port}" in ended.stderr
    assert not (tmp_path / "db").exists()


@pytest.mark.parametrize("how", ["sighup", "by itself"])
def test_keys_come_and_go_while_it_runs(
    serve: Callable[..., Any], tmp_path: Path, wait_until: Any, how: str
) -> None:
    path = tmp_path / "keys.toml"
    first = f"first:{add_key(path, 'first', ['all'])}"
    server = serve("--keys", str(path))

    def opens(token: str) -> bool:
        return bool(server.ask("GET", "/metrics", token=token).status == 200)

    assert opens(first)
    second = f"second:{add_key(path, 'second', ['all'])}"
    remove_key(path, "first")
    if how == "sighup":
        server.signal(signal.SIGHUP)
    wait_until(lambda: opens(second) and not opens(first))
    server.stop()
    assert server.process.returncode == 0


@pytest.mark.parametrize("form", ["text", "json"])
def test_logs_tell_of_requests_and_hold_no_secrets(
    serve: Callable[..., Any], tmp_path: Path, form: str
) -> None:
    path = tmp_path / "keys.toml"
    token = f"app:{add_key(path, 'app', ['all'], sqs=True)}"
    secret = token.partition(":")[2]
    server = serve("--keys", str(path), "--log-level", "debug", "--log-format", form)
    assert put(FlightStore(server.flight, token=token)) == 1
    wrong = f"app:{secret[:-1]}"
    with pytest.raises(NotAllowed):
        put(FlightStore(server.flight, token=wrong))
    assert server.ask("GET", "/metrics", token=token).status == 200
    assert server.ask("GET", "/metrics", token=wrong).status == 401
    server.ask("POST", "/", token=token, body=b'{"QueueName": "hidden-body"}')
    # While another one is read, an answer may still be on its way into the log.
    server.stop()
    text = server.log.read_text()
    for hidden in (secret, secret[:-1], "secret-payload", "hidden-body", "Bearer"):
        assert hidden not in text
    lines = [line for line in text.splitlines() if "penstock.access" in line]
    assert lines
    if form == "json":
        records = [msgspec.json.decode(line) for line in text.splitlines()]
        seen = {
            (each["protocol"], each["operation"], each["key"], each["status"])
            for each in records
            if each["logger"] == "penstock.access"
        }
        assert ("flight", "do_put", "app", "ok") in seen
        assert ("flight", "do_put", "", "NotAllowed") in seen
        assert ("admin", "metrics", "app", "ok") in seen
        assert ("admin", "metrics", "", "NotAllowed") in seen
        assert all(each["us"] > 0 for each in records if each["logger"] == "penstock.access")
    else:
        done = r"operation=do_put queue= key=app address=127\.0\.0\.1:\d+ status=ok us=[1-9]"
        assert any(re.search(done, line) for line in lines)


def test_the_access_log_is_off_by_default(serve: Callable[..., Any]) -> None:
    server = serve()
    server.ask("GET", "/metrics")
    server.stop()
    text = server.log.read_text()
    assert "listening at http://127.0.0.1:" in text
    assert "penstock.access" not in text


def test_an_exception_is_one_json_line() -> None:
    try:
        raise ValueError("told")  # noqa: TRY301 - made to be caught
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "it %s", ("broke",), sys.exc_info())
    line = logs.JsonLines().format(record)
    assert "\n" not in line
    said = msgspec.json.decode(line)
    assert (said["level"], said["message"]) == ("error", "it broke")
    assert "ValueError: told" in said["exception"]
    assert logs.TextLines().format(record).splitlines()[-1] == "ValueError: told"


# --- in a thread --------------------------------------------------------------------------------


def test_a_server_in_a_thread_opens_and_closes_the_store(tmp_path: Path, ask: Any) -> None:
    for _ in range(2):
        with running(f"rocksdb:{tmp_path / 'db'}", http="127.0.0.1:0") as server:
            assert ask(server.addresses["http"], "GET", "/ready").status == 200
            with pytest.raises(penstock.StoreLocked):
                penstock.open(f"rocksdb:{tmp_path / 'db'}")
    with penstock.open(f"rocksdb:{tmp_path / 'db'}") as broker:
        assert broker.check().ok


def test_a_server_without_uvloop(monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with running("memory:", http="127.0.0.1:0", flight="127.0.0.1:0") as server:
        assert ask(server.addresses["http"], "GET", "/ready").status == 200
        assert FlightStore(server.location("flight")).info().store_id


def test_queueber_clients_and_keys_exclude_each_other(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.toml", "app", ["all"])
    with (
        pytest.raises(penstock.InvalidInput, match="know no login"),
        running("memory:", capnp="127.0.0.1:0", keys=tmp_path / "keys.toml"),
    ):
        pass


def test_threads_of_a_server_share_one_heap() -> None:
    # In a process of its own: what it sets is for all of a process, and for good.
    script = """
import ctypes, tempfile, threading
from penstock.server.process import _share_one_heap
_share_one_heap()
barrier = threading.Barrier(8)
library = ctypes.CDLL(None)
def allocate():
    library.malloc(1 << 10)
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
library.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as said:
    file = ctypes.c_void_p(library.fopen(said.name.encode(), b"w"))
    library.malloc_info(0, file)
    library.fclose(file)
    print(open(said.name).read().count("<heap nr="))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "1"
