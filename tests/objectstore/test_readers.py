"""Reading a store beside its owner: all tables, both designs, and the command line."""

from __future__ import annotations

import itertools
import json
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

import penstock
from penstock import InvalidUrl, ManualClock, Message, SystemClock
from penstock.cli.main import cli
from penstock.flight import TABLES, partition, read, select
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from pathlib import Path

    from penstock import Broker
    from penstock.store.snapshot import PinnedStore


@pytest.fixture(params=sorted(DESIGNS))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"slatedb+file://{tmp_path}/store?design={request.param}"


def fill(broker: Broker) -> None:
    broker.create_queue("a", filter="x = 1", max_attempts=1)
    broker.create_queue("b", filter="x > 0", bucket_exponent=1)
    delays = [0, 0, 0, 60_000]
    for n in range(60):
        message = Message(b"%d" % n, {"x": 1 + n % 2}, f"g{n % 3}", n % 4, delays[n % 4])
        broker.publish([message])
    taken = broker.claim("a", limit=9, consumer="c")
    receipts = [each.receipt for each in taken]
    broker.ack(receipts[:3])
    broker.release(receipts[3:6], reason="no")


def tables(pinned: PinnedStore) -> dict[str, list[Any]]:
    found = {}
    for table in TABLES:
        payload = table == "messages"
        chosen = select(table, payload=payload)
        batches = [
            batch for part in partition(pinned, table, 3) for batch in read(pinned, part, chosen)
        ]
        rows = pa.Table.from_batches(batches, chosen.schema).to_pylist()
        found[table] = sorted(rows, key=repr)
    return found


def test_a_reader_has_the_same_tables_as_the_owner(url: str) -> None:
    clock = ManualClock()
    with penstock.open(url, clock=clock, background=False) as broker:
        fill(broker)
        clock.advance(1_000)
        with penstock.open_reader(url, clock=clock) as reader:
            # Delays are over by now, which nobody has written down yet.
            clock.advance(120_000)
            with reader.pin(stats=True) as pinned:
                seen = tables(pinned)
            end = reader.log_stats().end
            report = reader.check()
            assert report.ok, report.violations
            assert report.checked
            assert [record.message_id for record in reader.read_log(begin=10, limit=3).records]
        with broker._store.pin(clock.now_ms(), stats=True) as pinned:
            expected = tables(pinned)
        assert all(expected.values()), "every table is to have rows"
        for table, rows in expected.items():
            assert [row for row in seen[table] if row not in rows] == [], table
            assert len(seen[table]) == len(rows), table
        # The owner was not disturbed, and its next message is where the reader saw the end.
        (number,) = broker.publish([Message(b"after", {"x": 1})])
        assert number == end


def test_readers_come_and_go_while_the_owner_works(url: str) -> None:
    stop = threading.Event()
    with penstock.open(url) as broker:
        broker.create_queue("a", filter="x = 1")

        def work() -> None:
            for number in itertools.count():
                if stop.is_set():
                    return
                broker.publish([Message(b"m", {"x": 1}) for _ in range(5)])
                # No more are to gather than one page of browsing holds.
                limit = 3 if number < 1_000 else 5
                broker.ack([each.receipt for each in broker.claim("a", limit=limit)])

        worker = threading.Thread(target=work)
        worker.start()
        seen: list[int] = []
        clock = SystemClock()
        until = clock.seconds() + 120
        try:
            while len(seen) < 8 or (seen[-1] == seen[0] and clock.seconds() < until):
                with penstock.open_reader(url) as reader:
                    stats = reader.stats("a")
                    entries = reader.browse("a", limit=10_000, payloads=False)
                    # Counters and rows of one moment.
                    assert len(entries) == stats.available
                    assert stats.available + stats.in_flight + stats.done == stats.enqueued_total
                    seen.append(stats.enqueued_total)
        finally:
            stop.set()
            worker.join()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


def test_the_command_line_looks_without_taking_over(url: str) -> None:
    with penstock.open(url) as broker:
        broker.create_queue("q")
        number = broker.send("q", b"hello")

        def run(*words: str) -> Any:
            result = CliRunner().invoke(cli, [*words, "--store", url, "--json"])
            assert result.exit_code == 0, result.output
            return json.loads(result.stdout)

        assert run("stats")["queues"][0]["available"] == 1
        assert run("browse", "q", "--read-only")["entries"][0]["payload"] == "hello"
        assert run("attempts", "q", str(number)) == []
        assert [spec["name"] for spec in run("queues")] == ["q"]
        assert run("log", "stats")["end"] == number + 1
        assert [record["message_id"] for record in run("log", "read")] == [number]
        assert run("check")["ok"]
        broker.send("q", b"still the owner")
        assert run("stats", "q", "--read-only")["queues"][0]["available"] == 2


def test_other_stores_can_not_be_read_beside_their_owner(tmp_path: Path) -> None:
    for url in ("memory:", f"rocksdb:{tmp_path}/store"):
        with pytest.raises(InvalidUrl, match="can't be read beside its owner"):
            penstock.open_reader(url)
        result = CliRunner().invoke(cli, ["stats", "--read-only", "--store", url])
        assert result.exit_code == 1
        assert "beside its owner" in result.output
