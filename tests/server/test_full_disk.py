"""`penstock serve` on a disk that is full: what clients, pages, the log and the end of it say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config as BotoConfig
from botocore.exceptions import ClientError
from tests.server.conftest import ROOT, SLOW_SECONDS, request
from tests.small_disk import SmallDisk, small_disk

import penstock
from penstock import DiskFull, InvalidInput
from penstock.server import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FULL = Path("/dev/full")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path, 32 << 20) as mounted:
        yield mounted


@contextmanager
def native(server: Any) -> Iterator[Any]:
    with penstock.connect(f"penstock://127.0.0.1:{server.ports['native']}") as client:
        yield client


def fill(client: Any, disk: SmallDisk) -> None:
    disk.fill()
    with pytest.raises(DiskFull, match="No space left on device"):
        _send_until_refused(client)


def _send_until_refused(client: Any) -> None:
    while True:
        client.send("q", bytes(100_000))


def sqs(server: Any) -> Any:
    return boto3.client(
        "sqs",
        endpoint_url=f"http://127.0.0.1:{server.ports['http']}",
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
        config=BotoConfig(retries={"max_attempts": 0}),
    )


def metric(server: Any, name: str) -> float:
    page = server.ask("GET", "/metrics").body.decode()
    found = re.search(rf"^{name} (\S+)$", page, re.MULTILINE)
    assert found is not None, page
    return float(found[1])


@pytest.mark.slow
def test_a_server_says_so_and_is_back_by_itself(
    serve: Callable[..., Any], disk: SmallDisk, wait_until: Any
) -> None:
    server = serve("--store", f"rocksdb:{disk.path}/db", "--min-free-bytes", "0", native=True)
    with native(server) as client:
        client.create_queue("q")
        client.send("q", b"kept")
        url = sqs(server).get_queue_url(QueueName="q")["QueueUrl"]
        assert metric(server, "penstock_store_healthy") == 1
        assert metric(server, "penstock_store_free_bytes") > 16 << 20
        fill(client, disk)
        # What needs no write goes on; the rest says why not.
        assert client.browse("q")[0].payload == b"kept"
        assert client.stats("q").available > 0
        for verb, body in (("send_message", {"MessageBody": "x"}), ("receive_message", {})):
            with pytest.raises(ClientError, match="No space left on device") as caught:
                getattr(sqs(server), verb)(QueueUrl=url, **body)
            assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503
            assert caught.value.response["Error"]["Code"] == "ServiceUnavailable"
        assert server.ask("GET", "/ready").status == 503
        assert server.ask("GET", "/health").status == 200
        # The page is made once a second.
        wait_until(lambda: metric(server, "penstock_store_healthy") == 0)
        wait_until(lambda: metric(server, "penstock_store_free_bytes") < 8 << 20)
        disk.make_room()
        wait_until(lambda: server.ask("GET", "/ready").status == 200)
        wait_until(lambda: metric(server, "penstock_store_healthy") == 1)
        client.send("q", b"room again")
        (message,) = sqs(server).receive_message(QueueUrl=url)["Messages"]
        sqs(server).delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        # Told to stop while it is full, it ends in order.
        fill(client, disk)
    assert server.stop().endswith("stopped\n")
    assert server.process.returncode == 0
    log = server.log.read_text()
    assert log.count("the store can't be used: no space left") == 2
    assert len(re.findall(r"the store can be used again, after [\d.]+ s", log)) == 1
    assert "Traceback" not in log
    disk.make_room()
    with penstock.open(f"rocksdb:{disk.path}/db") as broker:
        assert broker.check().ok
        assert broker.stats("q").done == 1


def test_new_messages_are_refused_by_the_setting(tmp_path: Path) -> None:
    most = 900_000 << 30
    with running(f"rocksdb:{tmp_path}/db", min_free_bytes="900000GB", http="127.0.0.1:0") as server:
        server.broker.create_queue("q")
        with pytest.raises(DiskFull, match=f"min_free_bytes is {most}"):
            server.broker.send("q", b"x")
        assert server.broker.claim("q") == []
        assert request(server.addresses["http"], "GET", "/ready").status == 200


def test_a_reserve_is_for_a_disk_of_this_machine() -> None:
    with pytest.raises(InvalidInput, match="min_free_bytes is for stores on a disk"):
        running("memory:", min_free_bytes="1MB", http="127.0.0.1:0").__enter__()


# --- other files on a full disk -------------------------------------------------------------------


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "serve", "--http", "127.0.0.1:0", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=2 * SLOW_SECONDS,
        check=False,
    )


@pytest.mark.slow
def test_a_port_file_that_can_not_be_written_ends_it_with_a_line(
    tmp_path: Path, disk: SmallDisk
) -> None:
    disk.fill()
    said = _run("--store", f"rocksdb:{tmp_path}/db", "--port-file", f"{disk.path}/ports")
    assert said.returncode == 1
    assert "ports can't be written: No space left on device" in said.stderr
    assert "Traceback" not in said.stderr
    assert sorted(path.name for path in disk.path.iterdir()) == ["ballast"]
    # And nothing is held.
    penstock.open(f"rocksdb:{tmp_path}/db").close()


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_it_serves_also_if_nothing_can_be_logged_or_said(tmp_path: Path, wait_until: Any) -> None:
    ports = tmp_path / "ports"
    command = [sys.executable, "-m", "penstock", "serve", "--store", f"rocksdb:{tmp_path}/db"]
    command += ["--http", "127.0.0.1:0", "--port-file", str(ports), "--log-access"]
    # With that set, Python's own end has nothing to write, which would fail.
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    with FULL.open("wb", buffering=0) as full:
        process = subprocess.Popen(command, env=environment, stdout=full, stderr=full)
    try:
        wait_until(lambda: ports.exists() or process.poll() is not None)
        address = "127.0.0.1", int(ports.read_text())
        assert request(address, "GET", "/ready").status == 200
        assert request(address, "GET", "/metrics").status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(2 * SLOW_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
