"""Penstock's server beside other queues, in one run: RabbitMQ, Redis, a table in PostgreSQL.

    pip install aio-pika redis; apt-get install rabbitmq-server redis-server
    python benchmarks/peers.py [--seconds 3] [--connections 16] [--rounds 3] [--peers NAME …]

Every server runs on this machine with its data on the same disk, and confirms a message once it is
synced. One client process drives each through its Python library, with a connection for each of
its tasks: single messages, then batches of 100. A consumer acknowledges what it was given; so does
Penstock's, which also keeps the history. Peers that are not installed are left out. The figures are
the medians of the rounds, in which the peers take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from common import describe, directory, show

from server import server as penstock_server

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.ports import free_ports
from tests.sql import postgres

import penstock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

BODY = b"x" * 1024
BATCH = 100
QUEUE = "peers"


class Connection(ABC):
    """One client's connection to a queue."""

    @abstractmethod
    async def publish(self, bodies: list[bytes]) -> None:
        """Publish messages; return once the server has confirmed all of them."""

    @abstractmethod
    async def consume(self, limit: int) -> int:
        """Take up to ``limit`` messages and acknowledge them; return how many."""


# --- Penstock -------------------------------------------------------------------------------------


class Penstock(Connection):
    """The native client: a publish is fsynced, an ack as well, which nobody waits for."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.consumer: Any = None

    async def publish(self, bodies: list[bytes]) -> None:
        await self.client.publish([penstock.Message(body, {"queue": QUEUE}) for body in bodies])

    async def consume(self, limit: int) -> int:
        if self.consumer is None:
            self.consumer = self.client.consume(QUEUE, wait_ms=1_000)
        taken = 0
        async for delivery in self.consumer:
            delivery.ack()
            taken += 1
            if taken == limit:
                break
        return taken


@contextlib.contextmanager
def serve_penstock(place: Path) -> Iterator[Callable[[], Awaitable[Connection]]]:
    with penstock_server(f"rocksdb:{place}/store") as (port, _):
        with penstock.connect(f"penstock://127.0.0.1:{port}") as client:
            client.create_queue(QUEUE)

        async def connect() -> Connection:
            return Penstock(await penstock.connect_async(f"penstock://127.0.0.1:{port}"))

        yield connect


# --- PostgreSQL -----------------------------------------------------------------------------------


class Table(Connection):
    """The usual table: a row for each message, SKIP LOCKED, deleted in the consumer's commit."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def publish(self, bodies: list[bytes]) -> None:
        await self.connection.execute(
            "INSERT INTO jobs (body) SELECT unnest(%s::bytea[])", [bodies]
        )

    async def consume(self, limit: int) -> int:
        # Worker and database commit together: no lease, no attempts, no history.
        found = await self.connection.execute(
            "DELETE FROM jobs WHERE id IN (SELECT id FROM jobs ORDER BY id LIMIT %s"
            " FOR UPDATE SKIP LOCKED) RETURNING body",
            [limit],
        )
        return len(await found.fetchall())


@contextlib.contextmanager
def serve_postgresql(_: Path) -> Iterator[Callable[[], Awaitable[Connection]]]:
    import psycopg  # noqa: PLC0415

    server = postgres.PostgresServer(durable=True)
    server.start()
    try:
        url = f"postgresql://postgres@127.0.0.1:{server.port}/postgres"
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE jobs (id bigserial PRIMARY KEY, body bytea NOT NULL)")

        async def connect() -> Connection:
            return Table(await psycopg.AsyncConnection.connect(url, autocommit=True))

        yield connect
    finally:
        server.stop()


# --- Redis ----------------------------------------------------------------------------------------


class Stream(Connection):
    """A stream with one group of consumers; the log is synced before each answer."""

    def __init__(self, client: Any, name: str) -> None:
        self.client, self.name = client, name

    async def publish(self, bodies: list[bytes]) -> None:
        async with self.client.pipeline(transaction=False) as pipe:
            for body in bodies:
                pipe.xadd(QUEUE, {"body": body})
            await pipe.execute()

    async def consume(self, limit: int) -> int:
        found = await self.client.xreadgroup("workers", self.name, {QUEUE: ">"}, count=limit)
        ids = [message_id for _, entries in found for message_id, _ in entries]
        if ids:
            async with self.client.pipeline(transaction=False) as pipe:
                pipe.xack(QUEUE, "workers", *ids).xdel(QUEUE, *ids)
                await pipe.execute()
        return len(ids)


@contextlib.contextmanager
def serve_redis(place: Path) -> Iterator[Callable[[], Awaitable[Connection]]]:
    import redis.asyncio  # noqa: PLC0415

    (port,) = free_ports(1)
    options = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--dir", str(place)]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", *options]
    with process(command):
        url = f"redis://127.0.0.1:{port}"

        async def prepare() -> None:
            async with redis.asyncio.Redis.from_url(url) as client:
                await client.xgroup_create(QUEUE, "workers", id="0", mkstream=True)

        until_done(prepare)
        names = itertools.count()

        async def connect() -> Connection:
            return Stream(redis.asyncio.Redis.from_url(url), f"worker-{next(names)}")

        yield connect


# --- RabbitMQ -------------------------------------------------------------------------------------


class Rabbit(Connection):
    """A quorum queue of one node, with publisher confirms."""

    def __init__(self, channel: Any, queue: Any) -> None:
        self.channel, self.queue = channel, queue
        self.messages: asyncio.Queue[Any] | None = None

    async def publish(self, bodies: list[bytes]) -> None:
        import aio_pika  # noqa: PLC0415

        send = self.channel.default_exchange.publish
        persistent = aio_pika.DeliveryMode.PERSISTENT
        messages = [aio_pika.Message(body, delivery_mode=persistent) for body in bodies]
        await asyncio.gather(*(send(each, routing_key=QUEUE) for each in messages))

    async def consume(self, limit: int) -> int:
        if self.messages is None:
            self.messages = asyncio.Queue()
            await self.queue.consume(self.messages.put)
        taken = 0
        with contextlib.suppress(TimeoutError):
            while taken < limit:
                last = await asyncio.wait_for(self.messages.get(), 1)
                taken += 1
                if taken == limit or self.messages.empty():
                    await last.ack(multiple=True)
                    break
        return taken


@contextlib.contextmanager
def serve_rabbitmq(place: Path) -> Iterator[Callable[[], Awaitable[Connection]]]:
    import aio_pika  # noqa: PLC0415

    port, distribution, names = free_ports(3)
    environment = {
        **os.environ,
        "HOME": str(place),
        "ERL_EPMD_PORT": str(names),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_NODENAME": "peers@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_MNESIA_BASE": str(place / "data"),
        "RABBITMQ_LOG_BASE": str(place / "log"),
        "RABBITMQ_PID_FILE": str(place / "pid"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "plugins"),
    }
    url = f"amqp://guest:guest@127.0.0.1:{port}/"
    # It starts a daemon of Erlang's for names of nodes, unless that runs already.
    with (
        process(["epmd", "-port", str(names), "-address", "127.0.0.1"], environment),
        process(["/usr/lib/rabbitmq/bin/rabbitmq-server"], environment),
    ):

        async def prepare() -> None:
            connection = await aio_pika.connect(url)
            channel = await connection.channel()
            kind: Any = {"x-queue-type": "quorum"}
            await channel.declare_queue(QUEUE, durable=True, arguments=kind)
            await connection.close()

        until_done(prepare)

        async def connect() -> Connection:
            channel = await (await aio_pika.connect(url)).channel()
            await channel.set_qos(prefetch_count=BATCH)
            return Rabbit(channel, await channel.get_queue(QUEUE))

        yield connect


# --- running them ---------------------------------------------------------------------------------


@contextlib.contextmanager
def process(command: list[str], environment: dict[str, str] | None = None) -> Iterator[None]:
    running = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        running.terminate()
        running.wait(60)


def until_done(prepare: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Try until the server answers."""
    for left in reversed(range(240)):
        try:
            asyncio.run(prepare())
        except Exception as error:
            # Each library has an error of its own for a server that does not listen yet.
            if not left or "onnect" not in type(error).__name__:
                raise
            time.sleep(0.5)  # noqa: TID251
        else:
            return


async def rate(
    step: Callable[[Connection], Awaitable[int]], connections: list[Connection], seconds: float
) -> float:
    """Repeat a step on all connections for some seconds, or until it gives nothing more."""
    begin = time.perf_counter()
    done, last = 0, begin

    async def repeat(connection: Connection) -> None:
        nonlocal done, last
        while time.perf_counter() - begin < seconds:
            count = await step(connection)
            if not count:
                return
            done, last = done + count, time.perf_counter()

    await asyncio.gather(*map(repeat, connections))
    return done / (last - begin)


async def measure(
    connect: Callable[[], Awaitable[Connection]], connections: int, seconds: float
) -> list[float]:
    """Return messages a second: publish and consume, of single messages and of batches."""
    opened = [await connect() for _ in range(connections)]
    figures = []
    for size in (1, BATCH):

        async def publish(connection: Connection, size: int = size) -> int:
            await connection.publish([BODY] * size)
            return size

        async def consume(connection: Connection, size: int = size) -> int:
            return await connection.consume(size)

        figures.append(await rate(publish, opened, seconds))
        figures.append(await rate(consume, opened, seconds))
    return figures


PEERS = {
    "penstock": ("Penstock on RocksDB, native client", serve_penstock, "", ""),
    "rabbitmq": ("RabbitMQ, quorum queue", serve_rabbitmq, "rabbitmq-server", "aio_pika"),
    "redis": ("Redis streams, fsync always", serve_redis, "redis-server", "redis"),
    "postgresql": ("PostgreSQL 18, table, SKIP LOCKED", serve_postgresql, "", "psycopg"),
}


def present(name: str) -> bool:
    """Whether a peer's server and its Python client are installed."""
    _, _, program, module = PEERS[name]
    found = not program or shutil.which(program) is not None
    try:
        __import__(module or "penstock")
    except ImportError:
        found = False
    if not found:
        print(f"{name} is not installed, and is left out")
    return found and (name != "postgresql" or not postgres.MISSING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    options = parser.parse_args()
    describe()
    # The client of RabbitMQ logs every try at a server that does not listen yet.
    logging.disable()
    names = [name for name in options.peers if present(name)]
    rounds: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            with directory() as place, PEERS[name][1](place) as connect:
                figures = uvloop.run(measure(connect, options.connections, options.seconds))
            rounds[name].append(figures)
    show(
        f"Messages of 1 KB a second, {options.connections} connections, every answer synced",
        ("", "publish", "consume + ack", f"publish ×{BATCH}", f"consume + ack ×{BATCH}"),
        [
            [
                PEERS[name][0],
                *(f"{statistics.median(each):,.0f}" for each in zip(*found, strict=True)),
            ]
            for name, found in rounds.items()
        ],
    )


if __name__ == "__main__":
    main()
