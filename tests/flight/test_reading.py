from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest

from penstock import InvalidFilter, InvalidInput, Message, QueueNotFound, limits
from penstock.errors import ServerBusy
from penstock.flight import TABLES, schema_of
from penstock.flight.client import FlightStore
from penstock.flight.protocol import LogTicket
from penstock.flight.tables import WITH_PAYLOAD
from penstock.model import QueueSpec, State
from penstock.server import in_process_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.flight.conftest import Kept

    import penstock
    from penstock.clock import ManualClock
    from penstock.model import Value
    from penstock.server import FlightListener

# For what costs much and depends on the store little: one of each kind.
OTHERS = ["memory-indexed", "rocksdb-buckets", "postgresql"]
SOME = pytest.mark.parametrize("url", OTHERS, indirect=True)
SOME_KEPT = pytest.mark.parametrize("kept", OTHERS, indirect=True)
LIVE = (State.AVAILABLE, State.DELAYED, State.IN_FLIGHT)


def when(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)


def browse(broker: penstock.Broker, queue: str, state: State) -> Iterator[penstock.Entry]:
    cursor = None
    while True:
        page = broker.browse(queue, state=state, limit=7, cursor=cursor)
        yield from page
        cursor = page.next_cursor
        if cursor is None:
            return


def text_of(value: object) -> str | None:
    return value if isinstance(value, str) or value is None else msgspec.json.encode(value).decode()


def about(entry: penstock.Entry) -> dict[str, Any]:
    assert entry.payload is not None
    return {
        "queue": entry.queue,
        "message_id": entry.message_id,
        "group": entry.group,
        "priority": entry.priority,
        "attempts": entry.attempts,
        "first_claimed_at": when(entry.first_claimed_ms),
        "published_at": when(entry.published_at_ms),
        "size": len(entry.payload),
        # What `life` has published says itself which of it was delayed.
        "delay_ms": 5_000 if int(entry.attributes.get("n") or 0) % 10 == 9 else 0,
        "attributes": [(name, text_of(value)) for name, value in entry.attributes.items()],
        "attributes_json": msgspec.json.encode(entry.attributes).decode(),
        "payload": entry.payload,
    }


def rows(table: pa.Table, *by: str) -> list[dict[str, Any]]:
    table.validate(full=True)
    return sorted(table.to_pylist(), key=lambda row: tuple(row[name] for name in by))


# --- every table against what the broker says ---------------------------------------------------


def test_active_is_what_browse_shows(kept_life: penstock.Broker, kept_store: FlightStore) -> None:
    expected = [
        about(entry)
        | {
            "state": state.value,
            "visible_at": when(entry.visible_at_ms),
            "lease_deadline": when(entry.lease_deadline_ms),
            "consumer": entry.consumer,
        }
        for queue in ("q", "big", "empty")
        for state in LIVE
        for entry in browse(kept_life, queue, state)
    ]
    assert {row["state"] for row in expected} == {"available", "delayed", "in_flight"}
    expected.sort(key=lambda row: (row["queue"], row["message_id"]))
    assert rows(kept_store.read_table("active", payload=True), "queue", "message_id") == expected


@pytest.mark.parametrize("state", [State.DONE, State.FAILED])
def test_history_is_what_browse_shows(
    kept: Kept, kept_life: penstock.Broker, kept_store: FlightStore, state: State
) -> None:
    expected = []
    for entry in browse(kept_life, "q", state):
        row = about(entry) | {f"{state.value}_at": when(entry.ended_at_ms)}
        if state is State.FAILED:
            row["reason"] = entry.reason
        expected.append(row)
    assert len(expected) > 2
    found = rows(kept_store.read_table(state.value, payload=True), "queue", "sequence")
    numbers = [row.pop("sequence") for row in found]
    assert numbers == sorted(set(numbers))
    assert kept.on_sql or numbers == list(range(len(expected)))
    assert found == expected


def test_log_is_what_was_published(kept_life: penstock.Broker, kept_store: FlightStore) -> None:
    page = kept_life.read_log(0, begin=0, limit=1_000)
    found = rows(kept_store.read_table("log"), "log", "offset")
    assert len(found) == 60
    assert found == [
        {
            "log": 0,
            "offset": record.message_id,
            "published_at": when(record.published_at_ms),
            "group": record.group,
            "priority": record.priority,
            "size": record.size,
            "delay_ms": record.delay_ms,
            "attributes": [(name, text_of(value)) for name, value in record.attributes.items()],
            "attributes_json": msgspec.json.encode(record.attributes).decode(),
        }
        for record in page.records
    ]


def test_attempts_are_those_of_every_message(
    kept_life: penstock.Broker, kept_store: FlightStore
) -> None:
    expected = [
        {
            "queue": queue,
            "message_id": message_id,
            "attempt": attempt.number,
            "consumer": attempt.consumer,
            "claimed_at": when(attempt.claimed_at_ms),
            "ended_at": when(attempt.ended_at_ms),
            "outcome": attempt.end.value,
            "reason": attempt.reason,
        }
        for queue in ("big", "q")
        for message_id in range(1, 61)
        for attempt in kept_life.attempts(queue, message_id)
    ]
    found = rows(kept_store.read_table("attempts"), "queue", "message_id", "attempt")
    assert {row["outcome"] for row in found} == {"acked", "released", "expired", "running"}
    assert found == expected


def test_queues_have_their_specs_and_depths(life: penstock.Broker, store: FlightStore) -> None:
    life.delete_queue("big", drain=True)
    life.update_queue("q", dead_letter="empty", labels={"b": "", "a": "x"})
    found = rows(store.read_table("queues"), "name")
    assert [row["name"] for row in found] == ["big", "empty", "q"]
    for row in found:
        spec, stats = life.queue(row["name"]), life.stats(row["name"])
        row["labels"] = dict(row["labels"])
        for name in QueueSpec.__struct_fields__:
            assert row[name] == getattr(spec, name), name
        for name in ("available", "delayed", "in_flight", "done", "failed"):
            assert row[name] == getattr(stats, name), name
        assert row["draining"] == (row["name"] == "big")


def test_groups_count_what_active_has(kept_life: penstock.Broker, kept_store: FlightStore) -> None:
    expected: dict[tuple[str, str], dict[str, Any]] = {}
    for row in kept_store.read_table("active").to_pylist():
        group = expected.setdefault(
            (row["queue"], row["group"]),
            {"available": 0, "delayed": 0, "in_flight": 0, "oldest_published_at": None},
        )
        group[row["state"]] += 1
        if row["state"] != "in_flight":
            oldest = group["oldest_published_at"] or row["published_at"]
            group["oldest_published_at"] = min(oldest, row["published_at"])
    found = kept_store.read_table("groups", partitions=2).to_pylist()
    assert len(found) == 6
    assert {(row.pop("queue"), row.pop("group")): row for row in found} == expected


def test_stats_are_the_brokers(kept_life: penstock.Broker, kept_store: FlightStore) -> None:
    found = {
        (row["queue"], row["metric"]): row["value"]
        for row in kept_store.read_table("stats").to_pylist()
    }
    for queue in ("q", "big", "empty"):
        stats = kept_life.stats(queue)
        for name in stats.__struct_fields__[1:]:
            assert found.pop((queue, name)) == getattr(stats, name), name
    totals = kept_life.store_stats()
    for name in totals.__struct_fields__:
        assert found.pop((None, name)) == getattr(totals, name), name
    log = kept_life.log_stats()
    assert found.pop((None, "cursor.0")) == log.cursors[0]
    assert found == {
        (None, name): getattr(log, name)
        for name in log.__struct_fields__
        if name not in {"routing", "cursors"}
    }
    assert kept_store.stats().log == log
    assert kept_store.read_table("stats", queue="q").num_rows == len(stats.__struct_fields__) - 1


def test_messages_are_the_kept_payloads(
    life: penstock.Broker, store: FlightStore, clock: ManualClock
) -> None:
    everything = rows(store.read_table("messages", payload=True, partitions=3), "message_id")
    assert [row["message_id"] for row in everything] == list(range(1, 61))
    logged = {row["offset"]: row for row in store.read_table("log", payload=True).to_pylist()}
    for row in everything:
        known = logged[row.pop("message_id")]
        assert row == {name: known[name] for name in row}
    life.configure_log(retention_ms=1)
    clock.advance(2 * 3_600_000)
    life.sweep()
    life.publish([Message(b"late")])
    life.sweep()
    clock.advance(60_000)
    life.sweep()
    found = store.read_table("messages").to_pylist()
    old = [row for row in found if row["message_id"] < life.log_stats().earliest]
    assert old
    for row in old:
        assert row["published_at"] is row["group"] is row["attributes"] is row["priority"] is None
        assert row["size"] in {2, 3}
    gone = store.read_table("messages", filter="TRUE")
    assert gone.num_rows == len(found) - len(old)


def test_a_payload_that_is_gone_is_null(
    life: penstock.Broker, store: FlightStore, clock: ManualClock
) -> None:
    first = store.read_table("done", columns=["message_id"]).column(0).to_pylist()
    life.purge("q", states=list(State))
    life.purge("big", states=list(State))
    found = store.read_table("log", payload=True).to_pylist()
    assert {row["offset"] for row in found if row["payload"] is None} >= set(first)
    assert all(row["size"] > 0 for row in found)
    assert store.read_table("done").num_rows == 0


# --- schemas, columns, filters ------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_the_schema_is_the_declared_one(
    kept_life: penstock.Broker, kept_store: FlightStore, table: str
) -> None:
    for payload in {False, table in WITH_PAYLOAD}:
        plan = kept_store.plan_read(table, payload=payload, partitions=3)
        declared = schema_of(table, payload=payload)
        assert plan.schema.equals(declared, check_metadata=True)
        assert kept_store.schema(table, payload=payload).equals(declared)
        batches = [batch for ticket in plan.tickets for batch in kept_store.read(ticket)]
        assert batches
        for batch in batches:
            assert batch.schema.equals(declared)
            batch.validate(full=True)
            for field, column in zip(declared, batch.columns, strict=True):
                assert field.nullable or not column.null_count, field.name


@SOME_KEPT
@pytest.mark.parametrize("table", TABLES)
def test_each_column_can_be_asked_for_alone(
    kept_life: penstock.Broker, kept_store: FlightStore, table: str
) -> None:
    whole = kept_store.read_table(table, payload=table in WITH_PAYLOAD)
    for name in whole.schema.names:
        alone = kept_store.read_table(table, columns=[name])
        assert alone.schema.names == [name]
        assert alone.column(0).to_pylist() == whole.column(name).to_pylist(), name
    backwards = whole.schema.names[::-1]
    assert kept_store.read_table(table, columns=backwards).schema.names == backwards


@SOME_KEPT
@pytest.mark.parametrize("table", sorted(WITH_PAYLOAD))
@pytest.mark.parametrize(
    "text", ["n > 20 AND even", "\"group\" = 'g1' OR priority = 3", "size = 2", "n > 1000"]
)
def test_filters_choose_rows(
    kept_life: penstock.Broker, kept_store: FlightStore, table: str, text: str
) -> None:
    def wanted(row: dict[str, Any]) -> bool:
        attributes = msgspec.json.decode(row["attributes_json"])
        answers: dict[str, bool] = {
            "n > 20 AND even": attributes["n"] > 20 and attributes["even"],
            "size = 2": row["size"] == 2,
            "n > 1000": False,
        }
        return answers.get(text, bool(row["group"] == "g1" or row["priority"] == 3))

    whole = kept_store.read_table(table, payload=True).to_pylist()
    found = kept_store.read_table(table, payload=True, filter=text, partitions=2)
    assert sorted(map(repr, found.to_pylist())) == sorted(repr(row) for row in whole if wanted(row))
    # The columns that the filter reads need not be among those asked for.
    assert kept_store.read_table(table, columns=["size"], filter=text).num_rows == found.num_rows


def test_attributes_of_every_kind(broker: penstock.Broker, store: FlightStore) -> None:
    values: dict[str, Value] = {
        "text": 'a "quoted" \n line',
        "digits": "12",
        "int": -(2**63),
        "float": 1e300,
        "whole": 2.0,
        "yes": True,
        "no": False,
        "null": None,
        "empty": "",
    }
    broker.publish([Message(b"", {}), Message(b"", values), Message(b"", {"text": "\u2028 \x00"})])
    found = store.read_table("log", columns=["attributes", "attributes_json"]).to_pylist()
    assert [row["attributes"] for row in found] == [
        [],
        [
            ("text", 'a "quoted" \n line'),
            ("digits", "12"),
            ("int", "-9223372036854775808"),
            ("float", "1e300"),
            ("whole", "2.0"),
            ("yes", "true"),
            ("no", "false"),
            ("null", None),
            ("empty", ""),
        ],
        [("text", "\u2028 \x00")],
    ]
    assert [msgspec.json.decode(row["attributes_json"]) for row in found] == [
        {},
        values,
        {"text": "\u2028 \x00"},
    ]


# --- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("count", [2, 5, 64])
def test_parts_are_disjoint_and_the_whole(
    kept_life: penstock.Broker, kept_store: FlightStore, table: str, count: int
) -> None:
    whole = kept_store.read_table(table)
    plan = kept_store.plan_read(table, partitions=count)
    assert 1 <= len(plan.tickets) <= count
    parts = [pa.Table.from_batches(kept_store.read(ticket), plan.schema) for ticket in plan.tickets]
    together = [repr(row) for part in parts for row in part.to_pylist()]
    assert sorted(together) == sorted(map(repr, whole.to_pylist()))
    if table in {"log", "messages", "active"} and count == 5:
        assert len(parts) > 2
        assert max(part.num_rows for part in parts) < whole.num_rows


def test_several_logs_are_cut_apart(broker: penstock.Broker, store: FlightStore) -> None:
    broker.configure_log(logs=3)
    broker.publish(Message(b"", {}, group=f"g{n}") for n in range(200))
    for count in (1, 2, 3, 7):
        plan = store.plan_read("log", partitions=count)
        found = [
            (row["log"], row["offset"])
            for ticket in plan.tickets
            for batch in store.read(ticket)
            for row in batch.to_pylist()
        ]
        assert len(found) == 200
        assert sorted(offset for _, offset in found) == list(range(1, 201))
        assert {log for log, _ in found} == {0, 1, 2}
    chosen = store.read_table("log", where="log = 1").to_pylist()
    assert [row["offset"] for row in chosen] == [
        offset for log, offset in sorted(found) if log == 1
    ]
    assert store.read_table("log", where="log = 7").num_rows == 0


def test_ranges(kept_life: penstock.Broker, kept_store: FlightStore) -> None:
    for table, name in (
        ("log", "offset"),
        ("messages", "message_id"),
        ("done", "sequence"),
        ("failed", "sequence"),
    ):
        whole = sorted(kept_store.read_table(table, columns=[name]).column(0).to_pylist())
        for low, high in ((0, 4), (3, limits.MAX_OFFSET), (2, 9), (5, 5), (10_000, 10_001)):
            where = f"{name} >= {low} AND {name} < {high}"
            found = kept_store.read_table(table, columns=[name], where=where, partitions=3)
            assert sorted(found.column(0).to_pylist()) == [n for n in whole if low <= n < high]


def test_changed_bucket_sizes_leave_nothing_out(
    broker: penstock.Broker, store: FlightStore, *, on_sql: bool
) -> None:
    broker.create_queue("q")
    expected = 0
    for exponent in (0, 3, 1, 4, 2):
        broker.update_queue("q", bucket_exponent=exponent)
        broker.publish(Message(b"x", {"queue": "q"}) for _ in range(37))
        taken = broker.claim("q", limit=29)
        broker.ack([each.receipt for each in taken])
        expected += 29
    found = store.read_table("done", partitions=6).to_pylist()
    numbers = sorted(row["sequence"] for row in found)
    assert len(set(numbers)) == expected
    assert on_sql or numbers == list(range(expected))
    assert len({row["message_id"] for row in found}) == expected
    for begin in (0, 29, 50, 100, expected - 1):
        least = numbers[begin]
        some = store.read_table("done", columns=["sequence"], where=f"sequence >= {least}")
        assert sorted(some.column(0).to_pylist()) == numbers[begin:]
    assert store.read_table("active", partitions=6).num_rows == 5 * 37 - expected


def test_a_queue_with_most_of_the_messages_is_in_many_parts(
    broker: penstock.Broker, store: FlightStore
) -> None:
    for number in range(10):
        broker.create_queue(f"q{number}", filter=f"kind = {number}")
    kinds = [4 if number % 10 else number // 10 % 10 for number in range(400)]
    for begin in range(0, 400, 20):
        broker.publish(Message(b"x", {"kind": kind}) for kind in kinds[begin : begin + 20])
    for number in range(10):
        while taken := broker.claim(f"q{number}", limit=10):
            broker.ack([each.receipt for each in taken])
    for table in ("done", "attempts"):
        plan = store.plan_read(table, columns=["queue"], partitions=4)
        parts = [list(store.read(ticket)) for ticket in plan.tickets]
        sizes = [sum(batch.num_rows for batch in part) for part in parts]
        # Dealt out by their number, pieces would be 247 rows here and 12 there.
        assert (sum(sizes), len(sizes)) == (400, 4)
        assert max(sizes) <= 150, sizes


def test_queues_are_chosen(kept_life: penstock.Broker, kept_store: FlightStore) -> None:
    for table in ("active", "attempts", "groups"):
        for chosen in ("q", ["q", "empty"], ["big"], []):
            names = [chosen] if isinstance(chosen, str) else chosen
            found = (
                kept_store.read_table(table, queue=chosen, columns=["queue"]).column(0).to_pylist()
            )
            assert set(found) == set(names) - {"empty"}
    with pytest.raises(QueueNotFound, match="nope"):
        kept_store.read_table("done", queue=["q", "nope"])


# --- a snapshot ---------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_later_changes_are_not_seen(
    life: penstock.Broker, store: FlightStore, clock: ManualClock, table: str
) -> None:
    plan = store.plan_read(table, partitions=3)
    before = [[repr(b.to_pylist()) for b in store.read(ticket)] for ticket in plan.tickets]
    assert plan.facts.at_ms == clock.now_ms()
    assert plan.facts.log_end == 61
    life.publish(Message(b"new", {"queue": "q", "n": 99}) for _ in range(50))
    life.claim("q", limit=40)
    clock.advance(20_000)
    life.sweep()
    life.purge("q", states=["done", "failed"])
    life.create_queue("another")
    life.delete_queue("big")
    again = [[repr(b.to_pylist()) for b in store.read(ticket)] for ticket in plan.tickets]
    assert again == before
    now = store.read_table(table)
    assert repr(now.to_pylist()) != repr(
        [
            row
            for ticket in plan.tickets
            for batch in store.read(ticket)
            for row in batch.to_pylist()
        ]
    )


def test_writers_go_on_while_a_reader_is_slow(broker: penstock.Broker, store: FlightStore) -> None:
    broker.create_queue("q")
    payload = b"x" * 100_000
    for _ in range(10):
        broker.publish(Message(payload, {"queue": "q"}) for _ in range(100))
    reader = store.read(store.plan_read("messages", payload=True).tickets[0])
    count = next(reader).num_rows
    assert count < 1_000
    # The stream is full and its reader sleeps: nobody else may notice.
    for _ in range(20):
        broker.publish([Message(b"y", {"queue": "q"})])
        broker.ack([each.receipt for each in broker.claim("q", limit=5)])
    count += sum(batch.num_rows for batch in reader)
    assert count == 1_000


def test_parts_can_be_read_at_once(kept_life: penstock.Broker, kept_store: FlightStore) -> None:
    plan = kept_store.plan_read("active", partitions=8, payload=True)
    expected = kept_store.read_table("active", payload=True)
    found: list[list[pa.RecordBatch]] = [[] for _ in plan.tickets]

    def read(at: int) -> None:
        for _ in range(5):
            found[at] = list(kept_store.read(plan.tickets[at]))

    threads = [threading.Thread(target=read, args=(at,)) for at in range(len(plan.tickets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table = pa.Table.from_batches([batch for some in found for batch in some], plan.schema)
    assert rows(table, "queue", "message_id") == rows(expected, "queue", "message_id")


def test_idle_snapshots_expire(
    life: penstock.Broker, server: FlightListener, store: FlightStore, clock: ManualClock
) -> None:
    plan = store.plan_read("active")
    for _ in range(3):
        clock.advance(limits.MAX_VIEW_IDLE_MS - 1)
        assert sum(batch.num_rows for batch in store.read(plan.tickets[0]))
    clock.advance(limits.MAX_VIEW_IDLE_MS)
    server.service.snapshots.expire()
    assert len(server.service.snapshots) == 0
    with pytest.raises(InvalidInput, match="has expired"):
        list(store.read(plan.tickets[0]))


def test_snapshots_are_bounded(
    life: penstock.Broker, store: FlightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_UNREACHABLE_MS", 0)
    # Without keys the clients of one host have one share: half, while there are no others.
    most = life.max_views // 2
    unread = [store.plan_read("queues").tickets[0] for _ in range(most)]
    text = f"client at 127.0.0.1 has {most} of the server's {life.max_views} snapshots"
    with pytest.raises(ServerBusy, match=f"{text}, of which {most} are free"):
        store.plan_read("queues")
    with pytest.raises(ServerBusy, match="Try again in 10 seconds"):
        list(store.read(LogTicket(0, 1, 5)))
    # One that was read to its end makes room.
    list(store.read(unread[7]))
    store.plan_read("queues")
    with pytest.raises(InvalidInput, match="has expired"):
        list(store.read(unread[7]))
    assert list(store.read(unread[8]))


def test_snapshots_that_were_never_read_lock_nobody_out(
    life: penstock.Broker, store: FlightStore, clock: ManualClock
) -> None:
    kept = [store.plan_read("queues").tickets[0] for _ in range(life.max_views // 2)]
    clock.advance(limits.MIN_VIEW_IDLE_MS)
    # Each takes the place of the one that has waited longest.
    for _ in range(3):
        store.plan_read("queues")
    for gone in kept[:3]:
        with pytest.raises(InvalidInput, match="has expired"):
            list(store.read(gone))
    assert list(store.read(kept[3]))


# --- tickets for the log ------------------------------------------------------------------------


def test_a_client_makes_tickets_for_the_log(
    life: penstock.Broker, server: FlightListener, store: FlightStore
) -> None:
    for begin, end in ((1, 61), (0, 5), (17, 18), (30, 30), (25, 40)):
        ticket = LogTicket(0, begin, end, columns=["offset", "payload"])
        found = [row for batch in store.read(ticket) for row in batch.to_pylist()]
        assert [row["offset"] for row in found] == list(range(max(begin, 1), end))
        assert all(row["payload"] for row in found)
    assert len(server.service.snapshots) == 0


def test_a_stretch_that_is_not_there_is_refused(
    life: penstock.Broker, store: FlightStore, clock: ManualClock
) -> None:
    with pytest.raises(InvalidInput, match="log 0 ends at 61"):
        list(store.read(LogTicket(0, 1, 62)))
    with pytest.raises(InvalidInput, match="no log 3"):
        list(store.read(LogTicket(3, 1, 2)))
    life.configure_log(retention_ms=1)
    clock.advance(2 * 3_600_000)
    life.sweep()
    life.publish([Message(b"late")])
    clock.advance(60_000)
    life.sweep()
    assert life.log_stats().earliest == 61
    with pytest.raises(InvalidInput, match="is kept from offset 61 on"):
        list(store.read(LogTicket(0, 60, 62)))
    assert sum(batch.num_rows for batch in store.read(LogTicket(0, 61, 62))) == 1


# --- bounds and wrong inputs --------------------------------------------------------------------


@SOME
def test_batches_are_bounded(broker: penstock.Broker, store: FlightStore) -> None:
    for _ in range(7):
        broker.publish([Message(b"x", {"n": n}) for n in range(10_000)])
    sizes = [b.num_rows for b in store.read(store.plan_read("log").tickets[0])]
    assert sum(sizes) == 70_000
    assert max(sizes) <= 50_000
    assert len(sizes) <= 5
    broker.publish(Message(b"x" * 3_000_000, {}) for _ in range(20))
    ticket = LogTicket(0, 70_001, 70_021, payload=True)
    # Not even two of them together: a read that has stalled keeps a batch in memory.
    assert max(batch.nbytes for batch in store.read(ticket)) < 4_000_000


@pytest.mark.parametrize(
    ("selection", "match"),
    [
        ({"table": "nope"}, "no table 'nope'"),
        ({"table": "log", "columns": ["offset", "x"]}, "no column 'x'"),
        ({"table": "log", "columns": []}, "at least one column"),
        ({"table": "log", "columns": ["offset", "offset"]}, "each once"),
        ({"table": "attempts", "payload": True}, "has no payloads"),
        ({"table": "attempts", "filter": "a = 1"}, "no attributes to filter by"),
        ({"table": "log", "queue": "q"}, "no queues to choose from"),
        ({"table": "log", "partitions": 0}, "partitions is 0"),
        ({"table": "log", "partitions": 10_000}, "partitions is 10000"),
    ],
)
def test_wrong_selections(kept_store: FlightStore, selection: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        kept_store.read_table(**selection)


def test_a_wrong_filter_says_where(kept_store: FlightStore) -> None:
    with pytest.raises(InvalidFilter, match="column 3"):
        kept_store.read_table("log", filter="a =")


def test_two_servers_of_one_broker(kept_life: penstock.Broker, kept_store: FlightStore) -> None:
    with in_process_server(kept_life) as second:
        assert FlightStore(second.location).read_table("log").equals(kept_store.read_table("log"))
