"""Speed of the server: every verb durable, client and server in processes of their own.

python benchmarks/server.py [--seconds 3] [--connections 1,16,64] [--batch 1,10,100] [--depth 8]
python benchmarks/server.py --consume [--messages 60000] [--rates 100,1000,5000,20000]
python benchmarks/server.py ... --flame server.svg

Each connection has ``depth`` requests under way at a time. A run publishes 1 KB messages for some
seconds, then claims and acks them; latencies are those of one request (publish; claim and ack
together). CPU is that of the client and of the server, in cores, and of the server for each
message.

With ``--consume`` one connection consumes a queue that is full, and acks each message by itself or
a hundred by one call; then another connection publishes at even rates, and the time is taken from
the call of a publish to the delivery of its message. CPU is that of the server for each message.

With ``--flame`` py-spy looks at the first server of the run a hundred times a second, which slows
it down, and draws where its time went.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import uvloop
from common import describe, directory, show

import penstock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from penstock.client import AsyncClient

BODY = b"x" * 1024


class Phase(NamedTuple):
    """What one phase of a run gave."""

    rate: float
    p50_ms: float
    p99_ms: float
    client_cpu: float
    server_cpu: float

    def cells(self) -> list[str]:
        """Write it for a table."""
        return [
            f"{self.rate:,.0f}",
            f"{self.p50_ms:.1f}",
            f"{self.p99_ms:.1f}",
            f"{self.client_cpu:.2f}",
            f"{self.server_cpu:.2f}",
            f"{self.server_cpu / self.rate * 1e6:.1f}",
        ]


# --- the server's process -------------------------------------------------------------------------


@contextlib.contextmanager
def server(store: str, flames: list[str] | None = None) -> Iterator[tuple[int, int]]:
    """Run `penstock serve` as anybody would; give its port and process id.

    ``flames`` has the name of a file for a flame graph, until one is drawn.
    """
    program = [sys.executable, "-c", "from penstock.cli.main import main; main()", "serve"]
    settings = ["--native", "127.0.0.1:0", "--log-level", "error"]
    with subprocess.Popen(
        [*program, "--store", store, *settings], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("serving"), "the server did not start"
        with flame_graph(process.pid, flames.pop()) if flames else contextlib.nullcontext():
            yield int(said.rpartition(":")[2]), process.pid
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def flame_graph(pid: int, path: str) -> Iterator[None]:
    """Draw where a process spends its time, by function."""
    command = ["py-spy", "record", "--pid", str(pid), "--output", path, "--function"]
    with subprocess.Popen([*command, "--rate", "100"], stdout=subprocess.DEVNULL) as spy:
        try:
            yield
        finally:
            spy.send_signal(signal.SIGINT)
            spy.wait(60)


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- the client's process -------------------------------------------------------------------------


async def measure(
    work: list[Callable[[], Awaitable[int]]], seconds: float, depth: int, pid: int
) -> Phase:
    """Run ``depth`` workers for each of ``work`` until the time is up or one finds nothing."""
    latencies: list[float] = []
    done = 0
    begin = time.perf_counter()
    client_cpu, server_cpu = time.process_time(), cpu_of(pid)

    async def worker(step: Callable[[], Awaitable[int]]) -> None:
        nonlocal done
        while (at := time.perf_counter()) < begin + seconds:
            count = await step()
            if not count:
                return
            done += count
            latencies.append(time.perf_counter() - at)

    await asyncio.gather(*(worker(step) for step in work for _ in range(depth)))
    took = time.perf_counter() - begin
    latencies.sort()
    return Phase(
        done / took,
        latencies[len(latencies) // 2] * 1000,
        latencies[len(latencies) * 99 // 100] * 1000,
        (time.process_time() - client_cpu) / took,
        (cpu_of(pid) - server_cpu) / took,
    )


def publishing(client: AsyncClient, batch: int) -> Callable[[], Awaitable[int]]:
    messages = [penstock.Message(BODY, {"queue": "q"})] * batch

    async def step() -> int:
        return len(await client.publish(messages))

    return step


def working(client: AsyncClient, batch: int) -> Callable[[], Awaitable[int]]:
    async def step() -> int:
        deliveries = await client.claim("q", limit=batch)
        if deliveries:
            await client.ack([delivery.receipt for delivery in deliveries])
        return len(deliveries)

    return step


async def native(
    port: int, pid: int, connections: int, batch: int, seconds: float, depth: int, *, dedup: bool
) -> tuple[Phase, Phase]:
    """Measure the native client."""
    url = f"penstock://127.0.0.1:{port}"
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(await penstock.connect_async(url, dedup=dedup))
            for _ in range(connections)
        ]
        await clients[0].create_queue("q")
        published = await measure([publishing(c, batch) for c in clients], seconds, depth, pid)
        worked = await measure([working(c, batch) for c in clients], seconds, depth, pid)
    return published, worked


async def consuming(port: int, pid: int, messages: int, batch: int) -> list[str]:
    """Consume a full queue, and ack so many messages by one call."""
    async with penstock.connect_async(f"penstock://127.0.0.1:{port}", dedup=False) as client:
        name = f"c{batch}"
        await client.create_queue(name)
        for _ in range(messages // 1000):
            await client.publish([penstock.Message(BODY, {"queue": name})] * 1000)
        begin, server_cpu, client_cpu = time.perf_counter(), cpu_of(pid), time.process_time()
        got, receipts, acks = 0, [], []
        async with client.consume(name, prefetch=1000) as consumer:
            async for delivery in consumer:
                got += 1
                if batch == 1:
                    delivery.ack()
                else:
                    receipts.append(delivery.receipt)
                    if len(receipts) == batch:
                        acks.append(asyncio.ensure_future(client.ack(receipts)))
                        receipts = []
                if got == messages:
                    break
            await asyncio.gather(*acks)
            await consumer.flush()
        took = time.perf_counter() - begin
        server_us = (cpu_of(pid) - server_cpu) / got * 1e6
        client_us = (time.process_time() - client_cpu) / got * 1e6
    return [f"{got / took:,.0f}", f"{server_us:.1f}", f"{client_us:.1f}"]


async def delivering(port: int, rate: int, seconds: float) -> list[str]:
    """Publish at an even rate, and take the time until each message is delivered."""
    url, name = f"penstock://127.0.0.1:{port}", f"r{rate}"
    async with (
        penstock.connect_async(url, dedup=False) as publisher,
        penstock.connect_async(url) as client,
    ):
        await client.create_queue(name)
        count, latencies = int(rate * seconds), []
        consumer = client.consume(name, prefetch=1000)

        async def receive() -> None:
            async for delivery in consumer:
                sent = float(delivery.payload[:20])
                latencies.append(time.perf_counter() - sent)
                delivery.ack()
                if len(latencies) == count:
                    return

        receiving = asyncio.ensure_future(receive())
        begin, sending = time.perf_counter(), set()
        for n in range(count):
            if (early := begin + n / rate - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            body = f"{time.perf_counter():020.9f}".encode() + BODY[20:]
            message = penstock.Message(body, {"queue": name})
            sending.add(task := asyncio.ensure_future(publisher.publish([message])))
            task.add_done_callback(sending.discard)
        await asyncio.wait_for(receiving, 60)
        await consumer.close()
    latencies.sort()
    achieved = count / (time.perf_counter() - begin)
    p50, p99 = latencies[count // 2] * 1000, latencies[count * 99 // 100] * 1000
    return [f"{achieved:,.0f}", f"{p50:.1f}", f"{p99:.1f}"]


def measure_consumers(
    store: str, messages: int, rates: list[int], seconds: float, flames: list[str]
) -> None:
    rows = []
    for batch in (1, 100):
        with directory() as place, server(store.format(place=place), flames) as (port, pid):
            rows.append([f"acked × {batch}", *uvloop.run(consuming(port, pid, messages, batch))])
    header = ["consume + ack", "messages/s", "server CPU µs", "client CPU µs"]
    show("Pushed messages, 1 KB, one connection", header, rows)
    rows = []
    for rate in rates:
        with directory() as place, server(store.format(place=place)) as (port, _):
            rows.append([f"{rate:,}/s", *uvloop.run(delivering(port, rate, seconds))])
    show("Publish to delivery", ["published", "reached/s", "p50 ms", "p99 ms"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="rocksdb:{place}/store")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--connections", default="1,16,64")
    parser.add_argument("--batch", default="1,10,100")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--dedup", action="store_true", help="let the client add dedup ids")
    parser.add_argument("--consume", action="store_true", help="measure pushed messages instead")
    parser.add_argument("--messages", type=int, default=60_000)
    parser.add_argument("--rates", default="100,1000,5000,20000")
    parser.add_argument("--flame", metavar="FILE", help="draw a flame graph of the server (SVG)")
    options = parser.parse_args()
    flames = [options.flame] if options.flame else []
    describe()
    if options.consume:
        rates = [int(each) for each in options.rates.split(",") if each]
        measure_consumers(options.store, options.messages, rates, options.seconds, flames)
        return
    rows = []
    counts = [[int(n) for n in text.split(",")] for text in (options.connections, options.batch)]
    for connections, batch in itertools.product(*counts):
        with (
            directory() as place,
            server(options.store.format(place=place), flames) as (port, pid),
        ):
            published, worked = uvloop.run(
                native(
                    port,
                    pid,
                    connections,
                    batch,
                    options.seconds,
                    options.depth,
                    dedup=options.dedup,
                )
            )
        for verb, phase in (("publish", published), ("claim+ack", worked)):
            rows.append([f"{verb} × {batch}", connections, *phase.cells()])
    header = ["native", "connections", "messages/s", "p50 ms", "p99 ms"]
    header += ["client CPU", "server CPU", "server µs"]
    show(f"Server, 1 KB, {options.depth} requests under way per connection", header, rows)


if __name__ == "__main__":
    main()
