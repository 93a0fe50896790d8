"""Snapshots that several readers share: those of an action of a DataFrame, and those of a name."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import InvalidInput, Message, limits
from penstock.flight.client import FlightStore
from penstock.flight.protocol import ActionTicket, ReadCommand, SnapshotTicket
from penstock.server import in_process_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.server import FlightListener

PARTS = 4
ACTIVE = ReadCommand("active", columns=["message_id"], partitions=PARTS)


@pytest.fixture
def broker() -> Iterator[penstock.Broker]:
    with penstock.open("memory:") as opened:
        opened.create_queue("q", filter="n >= 0")
        opened.publish(Message(b"", {"n": number}) for number in range(40))
        yield opened


@pytest.fixture
def server(broker: penstock.Broker) -> Iterator[FlightListener]:
    with in_process_server(broker) as listener:
        yield listener


@pytest.fixture
def store(server: FlightListener) -> FlightStore:
    return FlightStore(server.location)


@pytest.fixture
def read(store: FlightStore) -> Callable[..., list[int]]:
    """Give a way to read parts in an action."""
    run = store.info().run

    def reading(action: str, *parts: int, **ticket: Any) -> list[int]:
        found = []
        for part in parts or range(PARTS):
            given: dict[str, Any] = {"command": ACTIVE, "run": run, **ticket}
            for batch in store.read(ActionTicket("frame", action, part, **given)):
                found += batch.column("message_id").to_pylist()
        return sorted(found)

    return reading


def publish(broker: penstock.Broker) -> None:
    broker.publish([Message(b"", {"n": 1}) for _ in range(10)])


def test_an_action_sees_one_moment_and_the_next_a_later_one(
    broker: penstock.Broker, read: Callable[..., list[int]]
) -> None:
    first = read("1", 0, 1)
    publish(broker)
    assert sorted(first + read("1", 2, 3)) == list(range(1, 41))
    assert read("1") == list(range(1, 41))
    assert read("2") == list(range(1, 51))
    # Whichever part comes first, and when a later action has begun.
    publish(broker)
    assert read("3", 3, 1, 0, 2) == list(range(1, 61))
    assert read("2") == list(range(1, 51))


def test_a_cached_frame_goes_on_where_it_was(
    broker: penstock.Broker, read: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later action that reads only the parts that nobody has read sees the earlier moment."""
    shown = read("show", 0)
    publish(broker)
    monkeypatch.setattr(limits, "SNAPSHOT_GUESS_MS", 1)
    assert sorted(shown + read("count", 1, 2, 3)) == list(range(1, 41))
    # Another that reads the first part too begins anew.
    assert read("again") == list(range(1, 51))


def test_a_part_waits_for_the_first_of_its_action(
    broker: penstock.Broker, read: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SNAPSHOT_GUESS_MS", 60_000)
    read("show", 0)
    publish(broker)
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.extend(read("count", 1, 2, 3)))
    waiting.start()
    waiting.join(0.2)
    assert not found
    found += read("count", 0)
    waiting.join(60)
    assert sorted(found) == list(range(1, 51))


def test_a_part_of_an_earlier_run_waits_for_the_first(read: Callable[..., list[int]]) -> None:
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.extend(read("1", 1, 2, 3, run="before")))
    waiting.start()
    waiting.join(0.2)
    assert not found
    found += read("1", 0, run="before")
    waiting.join(60)
    assert sorted(found) == list(range(1, 41))


def test_parts_of_two_runs_of_a_server_are_not_mixed(
    broker: penstock.Broker, server: FlightListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_SNAPSHOT_WAIT_MS", 1)
    run = FlightStore(server.location).info().run
    with in_process_server(broker) as other:
        store = FlightStore(other.location)

        def read(action: str, part: int, *, again: bool = False) -> int:
            given: dict[str, Any] = {"command": ACTIVE, "run": run, "again": again}
            batches = store.read(ActionTicket("frame", action, part, **given))
            return sum(batch.num_rows for batch in batches)

        for part, again in ((1, False), (0, True)):
            with pytest.raises(InvalidInput, match="the server was restarted"):
                read("1", part, again=again)
        # An action that begins with its first part is all of this run.
        assert sum(read("2", part) for part in range(PARTS)) == 40
        assert read("2", 0, again=True) == read("2", 0) > 0


def test_a_moment_that_has_expired(
    broker: penstock.Broker,
    server: FlightListener,
    read: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_SNAPSHOT_WAIT_MS", 1)
    read("1", 0)
    server.service.snapshots.close()
    with pytest.raises(InvalidInput, match="has expired"):
        read("1", 1)
    with pytest.raises(InvalidInput, match=r"first wants unpersist\(\)"):
        read("2", 1)
    assert read("3") == list(range(1, 41))


def test_a_held_snapshot_has_every_table(broker: penstock.Broker, store: FlightStore) -> None:
    held = store.hold_snapshot()
    # It is not in the way of others, nor they in its.
    for _ in range(broker.max_views + 5):
        store.read_table("queues")
    (delivery,) = broker.claim("q")
    broker.ack([delivery.receipt])
    publish(broker)

    def count(table: str, **selection: Any) -> int:
        command = ReadCommand(table, partitions=2, **selection)
        tickets = [SnapshotTicket(held.snapshot, part, command) for part in range(2)]
        return sum(batch.num_rows for each in tickets for batch in store.read(each))

    assert (count("active"), count("done"), count("log"), count("attempts")) == (40, 0, 40, 0)
    assert count("active", filter="n < 5") == 5
    assert count("stats", queue=["q"]) > 0
    assert store.hold_snapshot(held.snapshot) == held
    with pytest.raises(InvalidInput, match="part is 2; allowed are 0 to 1"):
        list(store.read(SnapshotTicket(held.snapshot, 2, ReadCommand("done", partitions=2))))
    assert store.drop_snapshot(held.snapshot)
    for call in (store.hold_snapshot, store.drop_snapshot):
        with pytest.raises(InvalidInput, match="has expired"):
            call(held.snapshot)


def test_a_read_is_checked_beforehand(server: FlightListener, store: FlightStore) -> None:
    assert store.check_read("active", queue=["q"], filter="n > 1") == store.info().run
    for selection, says in (
        ({"table": "nope"}, "no table 'nope'"),
        ({"table": "active", "filter": "n >"}, "something is missing"),
        ({"table": "active", "partitions": 0}, "partitions is 0"),
    ):
        with pytest.raises(InvalidInput, match=says):
            store.check_read(**selection)
    with pytest.raises(penstock.QueueNotFound, match="no queue named 'r'"):
        store.check_read("active", queue=["q", "r"])
    assert len(server.service.snapshots) == 0


def test_reads_of_one_snapshot_are_bounded(
    store: FlightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_SNAPSHOT_READS", 2)
    held = store.hold_snapshot()
    tables = [ReadCommand(table) for table in ("active", "done", "failed")]
    for command in tables[:2]:
        list(store.read(SnapshotTicket(held.snapshot, 0, command)))
    with pytest.raises(InvalidInput, match="at most 2 different reads"):
        list(store.read(SnapshotTicket(held.snapshot, 0, tables[2])))
