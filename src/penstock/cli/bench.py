"""``penstock bench``: a short load on a server or a store, in a queue that is removed afterwards.

Workers are threads of this process, which share one connection or broker: the figures are those of
one Python program, and no more than that.
"""

from __future__ import annotations

import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import click
import msgspec

import penstock
from penstock.cli import common
from penstock.cli.common import duration
from penstock.cli.opening import is_server, open_store
from penstock.clock import SystemClock
from penstock.limits import MAX_CLAIM_LIMIT, MAX_CONCURRENCY, MAX_PAYLOAD_BYTES
from penstock.model import Message
from penstock.store.sql.location import without_password

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker

T = TypeVar("T")
VERBS: Final = ("publish", "claim", "ack")
# Messages that wait at the most, for each worker: claims find some, and a disk is not filled.
AHEAD: Final = 1_000


class Figure(msgspec.Struct, frozen=True):
    """A verb: how often it was called, messages in a second, and how long a call took."""

    verb: str
    calls: int
    messages_per_second: float
    p50_ms: float
    p99_ms: float


class Load:
    """Publishes, claims and acks until the time is over; every call is timed."""

    def __init__(self, broker: Broker, queue: str, batch: int, size: int, seconds: float) -> None:
        self._broker, self._queue, self._batch = broker, queue, batch
        self._message = Message(b"x" * size, {"queue": queue})
        self._seconds = SystemClock().seconds
        self._until = self._seconds() + seconds
        self._lock = threading.Lock()
        self.times: dict[str, list[float]] = {verb: [] for verb in VERBS}
        self.messages = dict.fromkeys(VERBS, 0)

    def work(self, room: int) -> None:
        """Publish while there is room, claim, and ack; one worker of several."""
        while self._seconds() < self._until:
            if self.messages["publish"] - self.messages["ack"] < room:
                batch = [self._message] * self._batch
                self._time("publish", partial(self._broker.publish, batch))
            claim = partial(self._broker.claim, self._queue, limit=self._batch)
            if taken := self._time("claim", claim):
                receipts = [each.receipt for each in taken]
                self._time("ack", partial(self._broker.ack, receipts))

    def _time(self, verb: str, call: Callable[[], list[T]]) -> list[T]:
        begin = self._seconds()
        answer = call()
        took = self._seconds() - begin
        with self._lock:
            # An empty claim is no claim of messages.
            if answer:
                self.times[verb].append(took)
                self.messages[verb] += len(answer)
        return answer


@click.command("bench")
@click.option("--seconds", "run_ms", type=duration, default="5s", show_default=True,
              help="How long.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, MAX_CONCURRENCY), default=4, show_default=True,
              help="Threads that publish, claim and ack.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1, MAX_CLAIM_LIMIT), default=10, show_default=True,
              help="Messages of one call.")  # fmt: skip
@click.option("--size", type=click.IntRange(0, MAX_PAYLOAD_BYTES), default=100, show_default=True,
              help="Bytes of a payload.")  # fmt: skip
@common.store_option
def bench(store: str, run_ms: int, workers: int, batch: int, size: int) -> None:
    """Measure a server or a store with a short load.

    It publishes to a queue of its own, which is removed at the end; what it published stays in the
    metadata log for as long as that is kept. A missing store is not made, memory: is.
    """
    clock = SystemClock()
    queue = f"penstock-bench-{clock.lease_id().hex()[-12:]}"
    memory = store == "memory:"
    with penstock.open(store) if memory else open_store(store, background=True) as broker:
        info = broker.info()
        if info.routing != "inline":
            raise click.ClickException("bench can't wait for the pipeline that routes this store")
        broker.create_queue(queue, description="of penstock bench")
        try:
            load = Load(broker, queue, batch, size, run_ms / 1000)
            begin = clock.seconds()
            with ThreadPoolExecutor(workers) as threads:
                for done in [threads.submit(load.work, workers * AHEAD) for _ in range(workers)]:
                    done.result()
            took = clock.seconds() - begin
        finally:
            broker.delete_queue(queue)
    ran = {
        "on": without_password(store), "design": info.design, "penstock": penstock.__version__,
        "kind": "a server" if is_server(store) else "a store of this process",
        "workers": workers, "batch": batch, "payload_bytes": size, "seconds": round(took, 2),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }  # fmt: skip
    figures = [_figure(verb, load, took) for verb in VERBS]
    if common.wants_json():
        common.emit_json({**ran, "figures": figures})
        return
    rows = [
        (each.verb, f"{each.calls:,}", f"{each.messages_per_second:,.0f}", each.p50_ms, each.p99_ms)
        for each in figures
    ]
    common.show_table(("verb", ":calls", ":messages/s", ":p50 ms", ":p99 ms"), rows)
    click.echo(
        "{on} ({kind}, {design}); {workers} threads, {batch} messages of {payload_bytes} bytes in "
        "a call, for {seconds} s; Python {python}, {machine}, Penstock {penstock}".format(**ran)
    )


def _figure(verb: str, load: Load, seconds: float) -> Figure:
    times = sorted(load.times[verb]) or [0.0]
    p50, p99 = (round(times[int(share * (len(times) - 1))] * 1000, 3) for share in (0.5, 0.99))
    rate = round(load.messages[verb] / seconds, 1)
    return Figure(verb, len(load.times[verb]), rate, p50, p99)
