"""Two servers on one database, whose clients name both: one is killed under load."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tests.clients.process import Served
from tests.waiting import wait_until

import penstock
from penstock.flight.client import FlightStore
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def until_over(over: threading.Event, step: Callable[[int], None]) -> threading.Thread:
    def run() -> None:
        n = 0
        while not over.is_set():
            step(n)
            n += 1

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_server_that_is_killed_under_load(url: str, tmp_path: Path) -> None:
    options = ("--store", url, "--flight", "127.0.0.1:0")
    first, second = (Served(tmp_path / name, *options) for name in ("a", "b"))
    servers = f"{first.native},{second.native.removeprefix('penstock://')}"
    flights = ",".join(f"127.0.0.1:{each.ports['flight']}" for each in (first, second))
    table = FlightStore(f"grpc://{flights}")
    over = threading.Event()
    confirmed: list[int] = []
    acked: list[int] = []
    failed: list[BaseException] = []
    try:
        with (
            penstock.connect(servers, patience_ms=60_000) as client,
            penstock.connect(servers, patience_ms=60_000) as consumer,
        ):
            client.create_queue("q", lease_ms=5_000)
            assert table.info().store_id

            def publish(n: int) -> None:
                try:
                    confirmed.append(client.send("q", b"%d" % n))
                except BaseException as error:
                    failed.append(error)
                    raise

            def work(_: int) -> None:
                for delivery in consumer.consume("q", wait_ms=200):
                    if delivery.ack().result():
                        acked.append(delivery.message_id)  # noqa: PERF401 - as they come

            threads = [until_over(over, publish) for _ in range(3)] + [until_over(over, work)]
            wait_until(lambda: len(confirmed) > 50 and len(acked) > 20)
            first.process.kill()
            first.process.wait()
            at_kill = len(confirmed), len(acked)
            wait_until(lambda: len(confirmed) > at_kill[0] + 50 and len(acked) > at_kill[1] + 20)
            over.set()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)
            assert not failed
            # What the server that was killed had given out comes back when its lease ends.
            wait_until(lambda: not client.stats("q").in_flight)
            left = {each.message_id for each in client.browse("q", limit=10_000)}
            done = {each.message_id for each in client.browse("q", state="done", limit=10_000)}
            assert left | done == set(confirmed)
            assert len(confirmed) == len(set(confirmed))
            assert set(acked) <= done
            # Flight goes to the other as well, and so do reads that begin anew.
            assert table.read_table("queues").num_rows == 1
        with penstock.open(url, background=False) as broker:
            assert_clean(broker)
    finally:
        over.set()
        for server in (first, second):
            server.close()
