"""SQS over HTTP: requests a second, and the server's CPU for each, every verb fsynced.

python benchmarks/server_sqs.py [--seconds 0.5] [--rounds 8] [--connections 64] [--beside SRC]

The server is `penstock serve` as anybody would run it. The client has its requests as bytes, writes
the next one when an answer is whole, and reads nothing of an answer but its length and its receipt
handles, so that it is not the bound. The best of many short rounds counts: other work on the
machine only adds to them. ``--beside`` runs the server of another source tree in turn, for a ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import boto3
import uvloop
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from common import describe, directory, show

import penstock
from penstock.server.keys import add_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BODY = "x" * 1024
KEY_ID, REGION = "bench", "us-east-1"
# By the size of a batch: more than can be received in a second.
MESSAGES_PER_SECOND = {1: 8_000, 10: 25_000}
HANDLES = re.compile(rb'"ReceiptHandle":"([^"]+)"')


class Place(NamedTuple):
    """A server: its port, its process, and the secret of its key, if it asks for one."""

    port: int
    pid: int
    secret: str

    @property
    def url(self) -> str:
        """The address."""
        return f"http://127.0.0.1:{self.port}/"


@contextlib.contextmanager
def server(source: Path, *, signed: bool) -> Iterator[Place]:
    """Run the server of a source tree."""
    with directory() as path:
        keys = path / "keys.toml"
        secret = add_key(keys, KEY_ID, ["all"], sqs=True) if signed else ""
        settings = [f"--store=rocksdb:{path / 'store'}", "--http=127.0.0.1:0", "--log-level=error"]
        settings += ["--auth=required", f"--keys={keys}"] if signed else []
        program = [sys.executable, "-c", "from penstock.cli.main import main; main()", "serve"]
        with subprocess.Popen(
            [*program, *settings],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(source)},
        ) as process:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said.startswith("serving"), "the server did not start"
            yield Place(int(said.rpartition(":")[2]), process.pid, secret)
            process.terminate()
            process.wait(60)


def cpu_seconds(pid: int) -> float:
    """Return the processor time that the threads of a process have used, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1e9


# --- requests as bytes ----------------------------------------------------------------------------


def request(place: Place, operation: str, **fields: Any) -> bytes:
    """Write a request; signed, if the server asks for that."""
    body = json.dumps(fields).encode()
    headers = {
        "Content-Type": "application/x-amz-json-1.0",
        "X-Amz-Target": f"AmazonSQS.{operation}",
    }
    if place.secret:
        made = AWSRequest("POST", place.url, headers=headers, data=body)
        SigV4Auth(Credentials(KEY_ID, place.secret), "sqs", REGION).add_auth(made)
        headers = dict(made.headers.items())
    headers |= {"Host": f"127.0.0.1:{place.port}", "Content-Length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST / HTTP/1.1\r\n{head}\r\n".encode() + body


class Work(NamedTuple):
    """Requests that a connection sends in turn; the second has the handles that it got."""

    first: bytes
    second: Callable[[list[bytes]], bytes] | None = None


def sending(place: Place, url: str, batch: int) -> Work:
    if batch == 1:
        return Work(request(place, "SendMessage", QueueUrl=url, MessageBody=BODY))
    entries = [{"Id": str(i), "MessageBody": BODY} for i in range(batch)]
    return Work(request(place, "SendMessageBatch", QueueUrl=url, Entries=entries))


def receiving(place: Place, url: str, batch: int) -> Work:
    first = request(place, "ReceiveMessage", QueueUrl=url, MaxNumberOfMessages=batch)
    head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-amz-json-1.0\r\n"
    head += b"X-Amz-Target: AmazonSQS.DeleteMessage%s\r\nContent-Length: %%d\r\n\r\n"
    head %= b"Batch" if batch > 1 else b""

    def deleting(handles: list[bytes]) -> bytes:
        if batch == 1:
            body = b'{"QueueUrl":"%s","ReceiptHandle":"%s"}' % (url.encode(), handles[0])
        else:
            entries = [b'{"Id":"%d","ReceiptHandle":"%s"}' % each for each in enumerate(handles)]
            body = b'{"QueueUrl":"%s","Entries":[%s]}' % (url.encode(), b",".join(entries))
        return head % len(body) + body

    return Work(first, deleting)


# --- the client -----------------------------------------------------------------------------------


class Client(asyncio.Protocol):
    """One connection: a request, its answer, and so on until the time is up."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.buffer = b""
        self.work = Work(b"")
        self.until = self.sent_at = 0.0
        self.handles: list[bytes] = []
        self.answers = 0
        self.latencies: list[float] = []
        self.done: asyncio.Future[bytes]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = transport

    def go(self, work: Work, seconds: float) -> asyncio.Future[bytes]:
        """Begin; what is returned is done with the last answer."""
        self.work, self.until = work, time.perf_counter() + seconds
        self.answers, self.latencies = 0, []
        self.done = asyncio.get_running_loop().create_future()
        self.send(work.first)
        return self.done

    def send(self, data: bytes) -> None:
        """Send one request."""
        self.sent_at = time.perf_counter()
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Send the next request when the answer is whole."""
        data = self.buffer + data if self.buffer else data
        end = data.find(b"\r\n\r\n") + 4
        at = data.find(b"Content-Length: ", 0, end) + 16
        if end == 3 or len(data) < end + int(data[at : data.index(b"\r", at)]):
            self.buffer = data
            return
        self.buffer = b""
        now = time.perf_counter()
        self.answers += 1
        self.latencies.append(now - self.sent_at)
        if not data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(data.decode()))
            return
        if self.work.second is not None and not self.handles:
            self.handles = HANDLES.findall(data)
            if self.handles:
                self.send(self.work.second(self.handles))
            else:
                # The queue is empty: an answer without messages is not what is measured.
                self.done.set_result(b"")
            return
        self.handles = []
        if now > self.until:
            self.done.set_result(data[end:])
        else:
            self.send(self.work.first)


class Figures(NamedTuple):
    """The figures of one short run: requests a second, latencies, CPU for each request."""

    rate: float
    p50_ms: float
    p99_ms: float
    client_us: float
    server_us: float


def figures_of(latencies: list[float], took: float, client_s: float, server_s: float) -> Figures:
    latencies.sort()
    count = len(latencies)
    p50, p99 = (latencies[int(count * part)] * 1000 for part in (0.5, 0.99))
    return Figures(count / took, p50, p99, client_s / count * 1e6, server_s / count * 1e6)


async def connect(place: Place) -> Client:
    loop = asyncio.get_running_loop()
    return (await loop.create_connection(Client, "127.0.0.1", place.port))[1]


async def measure(place: Place, clients: list[Client], work: Work, seconds: float) -> Figures:
    began, client_s, server_s = time.perf_counter(), time.process_time(), cpu_seconds(place.pid)
    await asyncio.gather(*(client.go(work, seconds) for client in clients))
    took = time.perf_counter() - began
    client_s, server_s = time.process_time() - client_s, cpu_seconds(place.pid) - server_s
    return figures_of([each for c in clients for each in c.latencies], took, client_s, server_s)


async def run_raw(place: Place, connections: int, seconds: float) -> dict[str, Figures]:
    """Measure every form once."""
    clients = [await connect(place) for _ in range(connections)]
    found: dict[str, Figures] = {}
    for batch in (1, 10):
        name = f"bench-{batch}"
        made = await clients[0].go(Work(request(place, "CreateQueue", QueueName=name)), 0)
        url = json.loads(made)["QueueUrl"]
        times = f" × {batch}" if batch > 1 else ""
        sign = ", signed" if place.secret else ""
        found[f"send{times}{sign}"] = await measure(
            place, clients, sending(place, url, batch), seconds
        )
        if place.secret:
            continue
        sent = 0
        while sent < seconds * MESSAGES_PER_SECOND[batch]:
            await measure(place, clients, sending(place, url, 10), 0.1)
            sent += 10 * sum(client.answers for client in clients)
        found[f"receive{times} + delete{times}"] = await measure(
            place, clients, receiving(place, url, batch), seconds
        )
    for client in clients:
        client.transport.close()
    return found


def run_boto(place: Place, seconds: float) -> dict[str, Figures]:
    """Send, receive and delete with one boto3 client, one after the other."""
    client = boto3.client(
        "sqs",
        endpoint_url=place.url,
        region_name=REGION,
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=place.secret,
    )
    url = client.create_queue(QueueName="bench-boto3")["QueueUrl"]
    latencies: list[float] = []
    began, client_s, server_s = time.perf_counter(), time.process_time(), cpu_seconds(place.pid)
    while time.perf_counter() < began + seconds:
        times = [time.perf_counter()]
        client.send_message(QueueUrl=url, MessageBody=BODY)
        times.append(time.perf_counter())
        (got,) = client.receive_message(QueueUrl=url)["Messages"]
        times.append(time.perf_counter())
        client.delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
        times.append(time.perf_counter())
        latencies += [after - before for before, after in pairwise(times)]
    took = time.perf_counter() - began
    client_s, server_s = time.process_time() - client_s, cpu_seconds(place.pid) - server_s
    client.close()
    return {"boto3, signed": figures_of(latencies, took, client_s, server_s)}


# --- rounds ---------------------------------------------------------------------------------------


def run(places: list[Place], connections: int, seconds: float) -> dict[str, Figures]:
    """Measure the servers of a source tree once: one that asks for no key, and one that does."""
    found: dict[str, Figures] = {}
    for place in places:
        found |= uvloop.run(run_raw(place, connections, seconds))
    return found | run_boto(places[-1], seconds)


def best(runs: list[dict[str, Figures]], form: str) -> Figures:
    """Return the best of each figure."""
    rates, *others = zip(*(run[form] for run in runs), strict=True)
    return Figures(max(rates), *map(min, others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--beside", type=Path, help="another source tree to run in turn")
    options = parser.parse_args()
    describe()
    here = Path(penstock.__file__).parent.parent
    sources = [here] if options.beside is None else [options.beside, here]
    runs: dict[Path, list[dict[str, Figures]]] = {source: [] for source in sources}
    with contextlib.ExitStack() as stack:
        places = {
            source: [stack.enter_context(server(source, signed=signed)) for signed in (False, True)]
            for source in sources
        }
        for _ in range(options.rounds):
            for source in sources:
                runs[source].append(run(places[source], options.connections, options.seconds))
    rows = []
    for form in runs[here][0]:
        found = best(runs[here], form)
        row = [
            *(form, f"{found.rate:,.0f}", f"{found.p50_ms:.1f}", f"{found.p99_ms:.1f}"),
            *(f"{found.client_us:.0f}", f"{found.server_us:.0f}"),
        ]
        if options.beside is not None:
            before = best(runs[options.beside], form)
            ratios = found.rate / before.rate, found.server_us / before.server_us
            row += [f"{before.rate:,.0f}", f"{before.server_us:.0f}", *(f"{r:.2f}" for r in ratios)]
        rows.append(row)
    header = ["form", "requests/s", "p50 ms", "p99 ms", "client µs", "server µs"]
    if options.beside is not None:
        header += ["before: requests/s", "server µs", "ratio: requests/s", "server µs"]
    show(f"SQS over HTTP, 1 KB, fsync, {options.connections} connections", header, rows)


if __name__ == "__main__":
    main()
