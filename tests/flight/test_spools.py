"""Messages that a writer sends ahead: kept on disk, published when it says so, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.flight as fl
import pytest

import penstock
from penstock import InvalidInput, InvalidMessage, limits
from penstock.errors import DiskFull, ServerBusy
from penstock.flight import protocol
from penstock.flight.client import FlightStore
from penstock.flight.protocol import Published
from penstock.server import in_process_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.clock import ManualClock
    from penstock.server import FlightListener

SCHEMA = pa.schema([("payload", pa.binary()), ("priority", pa.int64()), ("dedup_id", pa.string())])


def rows(count: int, begin: int = 0) -> pa.RecordBatch:
    numbers = range(begin, begin + count)
    columns = [[b"%d" % n for n in numbers], [0] * count, [f"id-{n}" for n in numbers]]
    return pa.record_batch(columns, schema=SCHEMA)


@pytest.fixture
def broker(clock: ManualClock) -> Iterator[penstock.Broker]:
    with penstock.open("memory:", clock=clock, background=False) as opened:
        yield opened


def published(broker: penstock.Broker) -> int:
    return broker.store_stats().published_total


def test_a_spool_is_published_part_by_part_and_each_part_once(
    broker: penstock.Broker, store: FlightStore
) -> None:
    first = store.spool("write", "0-7", [rows(25_000)])
    assert first == ["0-7-0", "0-7-1", "0-7-2"]
    (second,) = store.spool("write", "1-8", [rows(5, begin=24_998)])
    assert published(broker) == 0
    counts = [store.publish_part("write", part) for part in first]
    assert sum(each.published for each in counts) == published(broker) == 25_000
    # As a client does that has lost the answer.
    assert store.publish_part("write", first[0]) == counts[0] == Published(10_000, 0)
    assert store.publish_part("write", second) == Published(5, 2)
    assert published(broker) == 25_003
    assert store.drop_spool("write")
    assert not store.drop_spool("write")
    with pytest.raises(InvalidInput, match="is not here"):
        store.publish_part("write", second)


def test_a_part_that_is_sent_again_is_kept_once(
    broker: penstock.Broker, store: FlightStore
) -> None:
    for _ in range(2):
        parts = store.spool("write", "part", [rows(3)])
    assert [store.publish_part("write", part).published for part in parts] == [3]
    assert published(broker) == 3


def test_bad_rows_and_wrong_parts_are_refused(
    broker: penstock.Broker, server: FlightListener, store: FlightStore
) -> None:
    bad = rows(3).set_column(1, "priority", pa.array([0, 300, 0]))
    with pytest.raises(InvalidMessage, match="row 1: priority"):
        store.spool("write", "part", [bad])
    command = protocol.encode(protocol.PublishCommand("write", "part"))
    with fl.FlightClient(server.location) as client:
        for batches in ([], [rows(1), rows(1)], [rows(10_001)]):
            writer, _ = client.do_put(fl.FlightDescriptor.for_command(command), SCHEMA)
            for batch in batches:
                writer.write_batch(batch)
            with pytest.raises(fl.FlightServerError, match="one batch of 1 to 10000 rows"):
                writer.close()
    with pytest.raises(InvalidInput, match="spool"):
        store.spool("s" * 300, "part", [rows(1)])
    assert store.drop_spool("write") is False
    assert published(broker) == 0


@pytest.mark.parametrize(
    ("bound", "most", "says"),
    [
        ("MAX_SPOOLS", 1, "has 1 of the server's 1 spools, of which 0 are free"),
        ("MAX_SPOOLED_PARTS", 1, "has 1 of the server's 1 parts of spools"),
        ("MAX_SPOOLED_BYTES", 10_000, r"bytes of spools.* write less at a time, or .*'skip'"),
    ],
)
def test_spools_have_bounds(
    broker: penstock.Broker, monkeypatch: pytest.MonkeyPatch, bound: str, most: int, says: str
) -> None:
    monkeypatch.setattr(limits, bound, most)
    monkeypatch.setattr(limits, "MAX_UNREACHABLE_MS", 0)
    with in_process_server(broker) as server:
        store = FlightStore(server.location)
        store.spool("write", "part", [rows(100)])
        name = "other" if bound == "MAX_SPOOLS" else "write"
        with pytest.raises(ServerBusy, match=f"(?i){says}"):
            store.spool(name, "more", [rows(1_000)])
        # What was taken is given back.
        store.drop_spool("write")
        assert store.spool("other", "part", [rows(100)])


def test_an_idle_spool_is_forgotten_and_the_disk_keeps_its_reserve(
    server: FlightListener,
    store: FlightStore,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (part,) = store.spool("write", "part", [rows(100)])
    monkeypatch.setattr(limits, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(DiskFull, match="TMPDIR"):
        store.spool("write", "more", [rows(1)])
    clock.advance(limits.MAX_STAGE_IDLE_MS)
    server.service.spools.expire()
    with pytest.raises(InvalidInput, match=r"server restarted\?"):
        store.publish_part("write", part)
