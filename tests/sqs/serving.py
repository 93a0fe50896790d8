"""A server on loopback, in a thread of its own, for clients that nobody here wrote."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import boto3
import uvloop
from botocore.config import Config

import penstock
from penstock.clock import SystemClock
from penstock.server.batcher import Batcher
from penstock.server.http_connection import Http
from penstock.server.sqs import SqsOptions, SqsService

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.broker.broker import Broker
    from penstock.server.http import Handler, HttpBounds
    from penstock.server.keys import Keys
    from penstock.server.metrics import Metrics

# It reads the description of SQS once, not for each client.
BOTO = boto3.session.Session()


class Served(NamedTuple):
    broker: Broker
    host: str
    port: int
    loop: asyncio.AbstractEventLoop
    batcher: Batcher
    http: Http

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextmanager
def serving(
    *,
    store: str = "memory:",
    port: int = 0,
    options: SqsOptions | None = None,
    keys: Keys | None = None,
    bounds: HttpBounds | None = None,
    metrics: Metrics | None = None,
    wrap: Callable[[Handler], Handler] = lambda handler: handler,
) -> Iterator[Served]:
    """Serve a fresh store over SQS."""
    started = threading.Event()
    stop = threading.Event()
    box: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ask_to_stop = asyncio.Event()
        with penstock.open(store) as broker:
            batcher = Batcher(broker, loop)
            service = SqsService(
                batcher, clock=SystemClock(), keys=keys, options=options, metrics=metrics
            )
            http = Http({}, wrap(service.handle), port=port, bounds=bounds)
            await http.start()
            box.extend([Served(broker, *http.address, loop, batcher, http), ask_to_stop])
            started.set()
            await ask_to_stop.wait()
            service.close()
            batcher.end_waits()
            await http.stop(60_000)
            await batcher.close()
        stop.set()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        except BaseException as error:
            box.insert(0, error)
            raise
        finally:
            started.set()

    thread = threading.Thread(target=run, name="sqs-under-test")
    thread.start()
    started.wait(60)
    if not box or isinstance(box[0], BaseException):
        raise RuntimeError("the server did not start") from (box[0] if box else None)
    served: Served = box[0]
    try:
        yield served
    finally:
        served.loop.call_soon_threadsafe(box[1].set)
        thread.join(120)
    assert stop.is_set(), "the server did not stop"


def pause(seconds: float) -> None:
    """Let real time pass: the server under test runs by the machine's clock."""
    threading.Event().wait(seconds)


def client_of(served: Served, **options: Any) -> Any:
    """Return a boto3 client for a server."""
    settings = {
        "region_name": "us-east-1",
        "aws_access_key_id": "AKIATEST",
        "aws_secret_access_key": "not-a-secret",
        "endpoint_url": served.url,
        "config": Config(retries={"max_attempts": 0}, read_timeout=60, max_pool_connections=64),
        **options,
    }
    return BOTO.client("sqs", **settings)
