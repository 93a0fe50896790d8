"""Raw SQS over HTTP: SendMessage, ReceiveMessage and DeleteMessage, every one of them fsynced.

The server runs in a process of its own and the client in another, which speaks bare HTTP and signs
nothing. Run it with ``--seconds 3`` for a quick look.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from common import describe, directory, show

import penstock
from penstock.clock import SystemClock
from penstock.server.batcher import Batcher
from penstock.server.http import Http
from penstock.server.sqs import SqsService

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

BODY = "x" * 1024


async def _serve(store: str, pipe: Connection, stop: Event) -> None:
    with penstock.open(store) as broker:
        batcher = Batcher(broker, asyncio.get_running_loop())
        service = SqsService(batcher, clock=SystemClock())
        http = Http({}, service.handle)
        await http.start()
        pipe.send(http.address)
        await asyncio.to_thread(stop.wait)
        service.close()
        batcher.end_waits()
        await http.stop(1_000)
        await batcher.close()


def serve(store: str, pipe: Connection, stop: Event) -> None:
    uvloop.run(_serve(store, pipe, stop))


class Client(asyncio.Protocol):
    """One connection: a request, its answer, and so on."""

    def __init__(self) -> None:
        self.buffer = b""
        self.answer: asyncio.Future[bytes] | None = None
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Take the answer when it is whole."""
        self.buffer += data
        head, gap, body = self.buffer.partition(b"\r\n\r\n")
        if not gap:
            return
        length = int(head.rpartition(b"Content-Length: ")[2])
        if len(body) < length or self.answer is None:
            return
        self.buffer = b""
        if not head.startswith(b"HTTP/1.1 200"):
            self.answer.set_exception(RuntimeError(body.decode()))
        else:
            self.answer.set_result(body)

    async def call(self, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        body = json.dumps(fields).encode()
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-amz-json-1.0\r\n"
            b"X-Amz-Target: AmazonSQS.%s\r\nContent-Length: %d\r\n\r\n%s"
            % (operation.encode(), len(body), body)
        )
        answer: dict[str, Any] = json.loads(await self.answer)
        return answer


async def _connect(host: str, port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, host, port)
    return client


async def _send(client: Client, url: str, batch: int) -> int:
    if batch == 1:
        await client.call("SendMessage", {"QueueUrl": url, "MessageBody": BODY})
    else:
        entries = [{"Id": str(i), "MessageBody": BODY} for i in range(batch)]
        await client.call("SendMessageBatch", {"QueueUrl": url, "Entries": entries})
    return 1


async def _receive(client: Client, url: str, batch: int) -> int:
    got = await client.call("ReceiveMessage", {"QueueUrl": url, "MaxNumberOfMessages": batch})
    messages = got.get("Messages", [])
    if not messages:
        return 1
    if batch == 1:
        handle = messages[0]["ReceiptHandle"]
        await client.call("DeleteMessage", {"QueueUrl": url, "ReceiptHandle": handle})
    else:
        entries = [
            {"Id": str(i), "ReceiptHandle": each["ReceiptHandle"]}
            for i, each in enumerate(messages)
        ]
        await client.call("DeleteMessageBatch", {"QueueUrl": url, "Entries": entries})
    return 2


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _measure(
    clients: list[Client], work: Any, url: str, batch: int, seconds: float, pid: int
) -> list[float]:
    latencies: list[float] = []
    requests = 0
    began = time.perf_counter()
    used = time.process_time(), cpu_seconds(pid)

    async def go(client: Client) -> None:
        nonlocal requests
        while time.perf_counter() - began < seconds:
            at = time.perf_counter()
            made = await work(client, url, batch)
            requests += made
            latencies.append(time.perf_counter() - at)

    await asyncio.gather(*map(go, clients))
    took = time.perf_counter() - began
    latencies.sort()
    p50, p99 = (latencies[int(len(latencies) * part)] * 1000 for part in (0.5, 0.99))
    client_s, server_s = time.process_time() - used[0], cpu_seconds(pid) - used[1]
    per_request = [spent / requests * 1e6 for spent in (client_s, server_s)]
    return [requests / took, p50, p99, *per_request]


async def run(
    host: str, port: int, seconds: float, counts: list[int], pid: int
) -> list[list[object]]:
    rows: list[list[object]] = []
    admin = await _connect(host, port)
    for connections in counts:
        clients = [await _connect(host, port) for _ in range(connections)]
        for batch in (1, 10):
            name = f"bench-{connections}-{batch}"
            url = (await admin.call("CreateQueue", {"QueueName": name}))["QueueUrl"]
            for verb, work in (("send", _send), ("receive + delete", _receive)):
                rate, p50, p99, client_us, server_us = await _measure(
                    clients, work, url, batch, seconds, pid
                )
                rows.append(
                    [
                        *(verb, connections, batch, f"{rate:,.0f}", f"{rate * batch:,.0f}"),
                        *(f"{p50:.2f}", f"{p99:.2f}", f"{client_us:.0f}", f"{server_us:.0f}"),
                    ]
                )
        for client in clients:
            client.transport.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--store", default="")
    parser.add_argument("--connections", type=int, nargs="*", default=[1, 16, 64])
    options = parser.parse_args()
    describe()
    context = multiprocessing.get_context("spawn")
    with directory() as path:
        here, there = context.Pipe()
        stop = context.Event()
        store = options.store or f"rocksdb:{path / 'store'}"
        server = context.Process(target=serve, args=(store, there, stop))
        server.start()
        host, port = here.recv()
        try:
            rows = uvloop.run(
                run(host, port, options.seconds, options.connections, server.pid or 0)
            )
        finally:
            stop.set()
        server.join()
    show(
        "SQS over HTTP, 1 KB bodies, fsync",
        [
            *("verb", "connections", "batch", "requests/s", "messages/s"),
            *("p50 ms", "p99 ms", "client µs/request", "server µs/request"),
        ],
        rows,
    )


if __name__ == "__main__":
    main()
