"""The lines of a server's logs: the life-cycle log, and the access log of every protocol."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import capnp
import pytest
from tests.server.conftest import ROOT, SLOW_SECONDS, Process, request
from tests.waiting import wait_until

import penstock
from penstock import limits
from penstock.errors import NotAllowed
from penstock.model import Message
from penstock.server import queueber, running
from penstock.server.keys import add_key
from penstock.server.logs import LogLines, TextLines

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA: Any = capnp.load(str(Path(queueber.__file__).with_suffix(".capnp")))
ACCESS = {"protocol", "operation", "queue", "key", "address", "status", "us"}


def sqs_of(url: str, key_id: str = "x", secret: str = "x") -> Any:
    return boto3.Session().client(
        "sqs",
        region_name="us-east-1",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        endpoint_url=url,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    options = ("--capnp", "127.0.0.1:0", "--log-access", "--log-life", "--log-format", "json")
    process = Process(tmp_path_factory.mktemp("logs"), *options, native=True)
    try:
        yield process
    finally:
        process.kill()


def lines_of(server: Process, logger: str, last: str) -> list[dict[str, Any]]:
    """Return the lines of a logger once the last one is there, as a thread writes them."""
    wait_until(lambda: f'{last}"' in server.log.read_text(), why=f"no {last} in the log")
    found = [json.loads(line) for line in server.log.read_text().splitlines()]
    return [each for each in found if each["logger"] == logger]


def test_a_life_in_json(server: Process) -> None:
    with penstock.connect(f"penstock://127.0.0.1:{server.ports['native']}") as client:
        client.create_queue("life")
        (id_,) = client.publish([Message(b"x", {"queue": "life"})])
        (delivery,) = client.claim("life", consumer="w1")
        client.ack([delivery.receipt])
    steps = [each for each in lines_of(server, "penstock.life", "ack") if each["queue"] == "life"]
    held = {"lease": delivery.lease, "consumer": "w1"}
    common = {"queue": "life", "count": 1, "messages": [id_]}
    about = {"time", "level", "logger", "message"}
    assert [{k: v for k, v in each.items() if k not in about} for each in steps] == [
        {"event": "publish", **common},
        {"event": "claim", **common, **held},
        {"event": "ack", **common, **held},
    ]
    assert steps[0]["message"] == f"publish queue=life count=1 messages=[{id_}]"
    lines = lines_of(server, "penstock.access", "Ack")
    access = [each for each in lines if each["queue"] == "life"]
    assert [each["operation"] for each in access] == ["CreateQueue", "Claim"]
    # Which queues a publish goes into, and whose receipts an ack has, the request does not name.
    assert {"Publish", "Ack"} <= {each["operation"] for each in lines}


def test_the_access_log_of_sqs_and_queueber(server: Process) -> None:
    sqs = sqs_of(f"http://127.0.0.1:{server.ports['http']}")
    url = sqs.create_queue(QueueName="boto")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="x")

    async def story() -> None:
        async with capnp.kj_loop():
            port = server.ports["capnp"]
            stream = await capnp.AsyncIoStream.create_connection("127.0.0.1", port)
            client = capnp.TwoPartyClient(stream)
            queue = client.bootstrap().cast_as(SCHEMA.Queue)
            await queue.add({"items": [{"contents": b"x", "visibilityTimeoutSecs": 0}]})
            with pytest.raises(capnp.KjException, match="InvalidInput"):
                await queue.poll({"leaseValiditySecs": 0, "numItems": 1, "timeoutSecs": 1})
            await queue.remove({"id": b"no id", "lease": b"none"})
            client.close()

    asyncio.run(story())
    access = lines_of(server, "penstock.access", "remove")
    seen = [(each["operation"], each["queue"], each["status"]) for each in access
            if each["protocol"] in {"sqs", "capnp"}]  # fmt: skip
    assert seen == [
        ("CreateQueue", "boto", "ok"),
        ("SendMessage", "boto", "ok"),
        ("add", "queueber", "ok"),
        ("poll", "queueber", "InvalidInput"),
        ("remove", "queueber", "ok"),
    ]
    for each in access:
        assert each.keys() >= ACCESS
        assert each["address"].startswith("127.0.0.1:")
        assert isinstance(each["us"], int)
        assert each["us"] > 0


def test_the_access_log_names_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = tmp_path / "keys.toml"
    secret = add_key(keys, "worker", ["consume:q", "admin:q"], sqs=True)
    with (
        caplog.at_level(logging.INFO, "penstock.access"),
        running(
            "memory:",
            auth_keys=str(keys),
            log_access=True,
            native="127.0.0.1:0",
            http="127.0.0.1:0",
        ) as server,
        penstock.connect(server.location("native"), token=f"worker:{secret}") as client,
    ):
        client.create_queue("q")
        client.claim("q")
        with pytest.raises(NotAllowed):
            client.claim("bad\nqueue" * 50)
        sqs_of(server.location("http"), "worker", secret).get_queue_url(QueueName="q")
    records = [each for each in caplog.records if each.name == "penstock.access"]
    fields = [each.__dict__["fields"] for each in records]
    assert [
        (each["operation"], each["queue"][:9], each["key"], each["status"]) for each in fields
    ] == [
        ("CreateQueue", "q", "worker", "ok"),
        ("Claim", "q", "worker", "ok"),
        ("Claim", "bad\nqueue", "worker", "NotAllowed"),
        ("GetQueueUrl", "q", "worker", "ok"),
    ]
    assert len(fields[2]["queue"]) == 80
    text = TextLines().format(records[2])
    assert "\n" not in text
    assert r"queue='bad\nqueue" in text


# --- where nobody reads ---------------------------------------------------------------------------


def fill_pipe() -> tuple[int, int]:
    """Make a pipe that takes nothing until it is read."""
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    with suppress(BlockingIOError):
        while True:
            os.write(ends[1], b"-" * 65_536 + b"\n")
    os.set_blocking(ends[1], True)
    return ends


@pytest.mark.slow
def test_a_log_that_nobody_reads_holds_up_nobody(tmp_path: Path) -> None:
    """Standard output and the access log of some hundred requests are one stuck pipe."""
    ports, (read, write) = tmp_path / "ports", fill_pipe()
    command = [sys.executable, "-m", "penstock", "serve", "--store", "memory:", "--log-access"]
    command += ["--native", "127.0.0.1:0", "--http", "127.0.0.1:0", "--port-file", str(ports)]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=write, stderr=write
    )
    try:
        wait_until(lambda: ports.exists() or process.poll() is not None)
        at = dict(line.split() for line in ports.read_text().splitlines())
        with penstock.connect(f"penstock://127.0.0.1:{at['native']}") as client:
            client.create_queue("q")
            for _ in range(300):
                client.send("q", b"x")
        assert request(("127.0.0.1", int(at["http"])), "GET", "/health").status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(SLOW_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(read)
        os.close(write)


def test_lines_that_are_lost_are_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LOG_BYTES", 4_000)
    read, write = fill_pipe()
    handler = LogLines(write)
    handler.setFormatter(TextLines())

    def log(name: str, count: int) -> int:
        made = [{"name": name, "msg": "x" * 50, "levelno": logging.INFO} for _ in range(count)]
        records = [logging.makeLogRecord(each) for each in made]
        for each in records:
            handler.handle(each)
        return sum(hasattr(each, "lost") for each in records)

    lost = log("penstock.access", 100)
    assert 0 < lost < 100
    # Half of the room is for what counts.
    assert log("penstock.audit", 5) == 0
    lost += log("penstock.audit", 100)
    assert lost == handler.lines.lost
    said = b""
    while b"lines of the log were lost" not in said:
        said += os.read(read, 65_536)
    told = sum(map(int, re.findall(rb"(\d+) lines of the log were lost", said)))
    assert told == lost
    handler.flush()
    # And if nobody can read any more.
    os.close(read)
    assert log("penstock.access", 1) == 0
    wait_until(lambda: handler.lines.lost == lost + 1)
    os.close(write)


FORK = """
import logging, os, threading
from penstock.server import logs
logs.configure_logs("info", "text")
lines = logging.getLogger().handlers[0].lines
forked, taken = threading.Event(), threading.Event()


def hold():
    with lines._changed:
        taken.set()
        forked.wait()


threading.Thread(target=hold).start()
taken.wait()
if not (child := os.fork()):
    logging.info("of the child")
    logs.say("of the child, too")
    logs.drain()
    os._exit(0)
os.waitpid(child, 0)
forked.set()
"""


def test_a_fork_writes_its_own_lines() -> None:
    """Also if another thread of its parent was about to log at that moment."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        env=env, capture_output=True, text=True, timeout=SLOW_SECONDS, check=False,
    )  # fmt: skip
    assert done.stdout == "of the child, too\n"
    assert done.stderr.endswith(" info root of the child\n")
