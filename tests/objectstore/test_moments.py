"""A moment that many processes read: exactly the planner's, whatever the owner does meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from slatedb.uniffi import (
    AdminBuilder,
    GarbageCollectorDirectoryOptions,
    GarbageCollectorOptions,
    GarbageCollectorScheduleOptions,
)
from sortedcontainers import SortedDict

import penstock
from penstock import InvalidInput, InvalidUrl, ManualClock, Message, StorageFailed, StoreMismatch
from penstock.engines import overlay
from penstock.engines.memory import MemoryEngine
from penstock.engines.overlay import Overlay
from penstock.engines.slatedb import moment as slatedb_moment
from penstock.engines.slatedb.binding import call
from penstock.flight import TABLES, partition, read, select
from penstock.moments import Looking, Ticket, Wanted, files_of, narrowed, read_ticket
from penstock.urls import DESIGNS, place_to_read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from slatedb.uniffi import Admin

    from penstock import Broker
    from penstock.moments import Seen

DONE_S = 60.0
WITH_PAYLOAD = {"messages", "active", "done", "failed"}
NOW = GarbageCollectorDirectoryOptions(min_age_ms=0, dry_run=False)


@pytest.fixture(params=sorted(DESIGNS))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"slatedb+file://{tmp_path}/store?design={request.param}"


@pytest.fixture
def plain(tmp_path: Path) -> str:
    return f"slatedb+file://{tmp_path}/store"


# --- helpers --------------------------------------------------------------------------------------


def admin_of(url: str) -> Admin:
    place = place_to_read(url)
    return AdminBuilder(place.path, place.store()).build()


def collect_garbage(url: str) -> None:
    """Throw away everything that no manifest and no checkpoint has use for, however new."""
    options = GarbageCollectorOptions(
        manifest_options=NOW,
        wal_options=NOW,
        compacted_options=NOW,
        compactions_options=NOW,
        detach_options=GarbageCollectorScheduleOptions(),
    )
    call(admin_of(url).run_gc_once(options), DONE_S)


def to_files(broker: Broker) -> None:
    """Have everything so far written to files of rows, which ends the use of the log before."""
    broker._store.core.engine._shorten_log()  # type: ignore[attr-defined]


def logged(url: str) -> set[str]:
    return {each.name for each in (Path(urlsplit(url).path) / "wal").glob("*.sst")}


def marks(url: str) -> dict[str, int]:
    found = call(admin_of(url).list_checkpoints(None), DONE_S)
    return {each.id: each.expire_time_secs or 0 for each in found}


def fill(broker: Broker, count: int = 60) -> None:
    delays = [0, 0, 0, 60_000]
    messages = [
        Message(b"%d" % n, {"x": 1 + n % 2}, f"g{n % 3}", n % 4, delays[n % 4])
        for n in range(count)
    ]
    for at in range(0, count, 5):
        broker.publish(messages[at : at + 5])
    receipts = [each.receipt for each in broker.claim("a", limit=9, consumer="c")]
    broker.ack(receipts[:3])
    broker.release(receipts[3:6], reason="no")


def churn(broker: Broker) -> None:
    """Change something in every table."""
    fill(broker, 40)
    broker.ack([each.receipt for each in broker.claim("b", limit=50)])
    broker.redrive("a")
    broker.purge("b")
    broker.update_queue("a", max_attempts=7)
    broker.create_queue("c", filter="x = 2")


def wanted(table: str) -> Wanted:
    return Wanted(table, payload=table in WITH_PAYLOAD)


def plans(seen: Seen, tables: Sequence[str] = tuple(TABLES)) -> dict[str, list[bytes]]:
    made = {
        table: seen.plan(wanted(table), queues=None, partitions=3).tickets
        for table in tables
        if table != "log"
    }
    if "log" in tables:
        end = seen.log_stats.end
        stretches = [(0, begin, min(begin + 13, end)) for begin in range(1, end, 13)]
        made["log"] = seen.plan_log(Wanted("log", payload=True), stretches)
    return made


def rows_of(tickets: Sequence[bytes]) -> list[Any]:
    """Read tickets as another process does: with files of its own, opened now."""
    rows = []
    for packed in tickets:
        ticket = Ticket.unpacked(packed)
        files = files_of(ticket)
        try:
            rows += [row for batch in read_ticket(ticket, files) for row in batch.to_pylist()]
        finally:
            files.close()
    return sorted(rows, key=repr)


def expected(broker: Broker, clock: ManualClock) -> dict[str, list[Any]]:
    with broker._store.pin(clock.now_ms(), stats=True) as pinned:
        return {
            table: sorted(
                (
                    row
                    for part in partition(pinned, table, 1)
                    for batch in read(
                        pinned,
                        part,
                        select(table, payload=table in WITH_PAYLOAD | {"log"}),
                    )
                    for row in batch.to_pylist()
                ),
                key=repr,
            )
            for table in TABLES
        }


# --- one moment -----------------------------------------------------------------------------------


def test_tickets_show_the_planners_moment_whatever_comes_later(place: str) -> None:
    clock = ManualClock()
    broker = penstock.open(place, clock=clock, background=False)
    broker.create_queue("a", filter="x = 1", max_attempts=1)
    broker.create_queue("b", filter="x > 0", bucket_exponent=1)
    # Some in files, some in the log that a checkpoint keeps, some in the log after that.
    fill(broker)
    to_files(broker)
    fill(broker)
    clock.advance(100_000)
    fill(broker, 20)
    seen = Looking(place, clock=clock).look()
    at_the_moment = logged(place)
    tickets = plans(seen)
    before = expected(broker, clock)
    assert all(before.values()), "every table is to have rows"

    churn(broker)
    to_files(broker)
    churn_again = penstock.open(place, clock=clock, background=False)
    clock.advance(1_000_000)
    churn_again.delete_queue("b")
    fill(churn_again)
    for _ in range(4):
        fill(churn_again, 8)
        to_files(churn_again)
    collect_garbage(place)
    # Without the rows in the tickets this could not be read any more: what is left of the log is
    # the empty object that an owner begins with.
    assert len(at_the_moment & logged(place)) == 1

    for table, rows in before.items():
        got = rows_of(tickets[table])
        assert [row for row in got if row not in rows] == [], table
        assert len(got) == len(rows), table
    assert expected(churn_again, clock) != before
    churn_again.close()
    with pytest.raises(penstock.StoreFenced):
        broker.send("a", b"", x=1)
    broker.close()


def test_what_is_planned_beside_a_busy_owner_is_of_one_moment(place: str) -> None:
    stop = threading.Event()
    with penstock.open(place) as broker:
        broker.create_queue("a", filter="x = 1")

        def work() -> None:
            while not stop.is_set():
                broker.publish([Message(b"m", {"x": 1}) for _ in range(5)])
                broker.ack([each.receipt for each in broker.claim("a", limit=3)])

        worker = threading.Thread(target=work)
        worker.start()
        looking = Looking(place)
        tickets = []
        try:
            for turn in range(6):
                tickets.append(plans(looking.look(), ("queues", "active", "done", "log")))
                if turn % 2:
                    to_files(broker)
        finally:
            stop.set()
            worker.join()
        collect_garbage(place)
        ends = []
        for each in tickets:
            (queue,) = rows_of(each["queues"])
            active, done = rows_of(each["active"]), rows_of(each["done"])
            assert len(done) == queue["done"]
            assert len(active) == queue["available"] + queue["in_flight"]
            ids = [row["message_id"] for row in active + done]
            assert sorted(ids) == sorted(row["offset"] for row in rows_of(each["log"]))
            ends.append(len(ids))
        assert ends == sorted(ends)
        assert ends[-1] > ends[0]


def test_a_ticket_can_be_narrowed_to_queues(plain: str) -> None:
    with penstock.open(plain, background=False) as broker:
        broker.create_queue("a", filter="x = 1")
        broker.create_queue("b", filter="x > 0")
        fill(broker)
        (ticket,) = Looking(plain).look().plan(Wanted("active"), queues=None, partitions=1).tickets
        assert {row["queue"] for row in rows_of([ticket])} == {"a", "b"}
        assert {row["queue"] for row in rows_of([narrowed(ticket, ["b"])])} == {"b"}


# --- what tickets carry ---------------------------------------------------------------------------


def carried(tickets: Sequence[bytes]) -> dict[str, list[bytes]]:
    """Return the keys of all rows in tickets, as often as they come, by table."""
    found: dict[str, list[bytes]] = {}
    for ticket in tickets:
        for table, rows in Ticket.unpacked(ticket).rows.items():
            found.setdefault(table, []).extend(rows)
    return found


def test_all_tickets_together_carry_a_row_once(place: str) -> None:
    clock = ManualClock()
    with penstock.open(place, clock=clock, background=False) as broker:
        for name in "abcde":
            broker.create_queue(name, filter="x = 1", bucket_exponent=0)
        broker.publish([Message(b"m", {"x": 1}) for _ in range(40)])
        leases = 0
        for name in "abc":
            for turn in range(20):
                broker.claim(name, consumer=f"{name}{turn}")
                leases += 1
        seen = Looking(place, clock=clock).look()
        before = expected(broker, clock)
        for row in before["active"]:
            del row["payload"]
        for table in ("active", "attempts", "queues", "groups"):
            tickets = seen.plan(Wanted(table), queues=None, partitions=16).tickets
            assert len(tickets) >= 5
            rows = carried(tickets)
            for keys in rows.values():
                assert len(keys) == len(set(keys)), table
            if table in {"active", "attempts"}:
                assert len(rows["leases"]) == leases
            else:
                assert len(rows["queues"]) == 5 * 3
            assert rows_of(tickets) == before[table]
        (whole,) = seen.plan(Wanted("attempts"), queues=None, partitions=1).tickets
        cut = [narrowed(whole, names) for names in (["a", "e"], ["b"], ["c", "d"])]
        assert sorted(carried(cut)["leases"]) == sorted(carried([whole])["leases"])
        assert len(carried(cut[1:2])["leases"]) == 20
        assert rows_of(cut) == before["attempts"]


def test_a_lease_that_was_extended_goes_with_rows_that_are_in_files(place: str) -> None:
    clock = ManualClock()
    with penstock.open(place, clock=clock, background=False) as broker:
        for name in "ab":
            broker.create_queue(name, filter="x = 1", bucket_exponent=1)
        broker.publish([Message(b"m", {"x": 1}) for _ in range(30)])
        held = {name: broker.claim(name, limit=5) for name in "ab" for _ in range(4)}
        to_files(broker)
        clock.advance(1_000)
        for some in held.values():
            broker.extend([each.receipt for each in some], lease_ms=77_000)
        seen = Looking(place, clock=clock).look()
        tickets = seen.plan(Wanted("active"), queues=None, partitions=8).tickets
        rows = carried(tickets)
        assert len(set(rows["leases"])) == 2
        # The messages of a lease may be in more parts than one.
        assert len(rows["leases"]) < 2 * len(tickets)
        assert not rows.get("buckets")
        assert not rows.get("in_progress")
        found = [{**row, "payload": b"m"} for row in rows_of(tickets)]
        assert found == expected(broker, clock)["active"]
        assert len({row["lease_deadline"] for row in found} - {None}) == 2


# --- looking on and on ----------------------------------------------------------------------------


def test_looks_go_on_from_where_the_last_one_was(plain: str) -> None:
    with penstock.open(plain, background=False) as broker:
        broker.create_queue("a", filter="x = 1")
        looks = {True: Looking(plain, following=True), False: Looking(plain)}
        seen = {name: each.look() for name, each in looks.items()}
        for turn in range(6):
            number = broker.publish([Message(b"%d" % turn, {"x": 1})])[-1]
            if turn in {2, 3}:
                to_files(broker)
            if turn == 3:
                # What was not read yet is only in files now.
                fill(broker)
                to_files(broker)
                collect_garbage(plain)
                number = broker.log_stats().end - 1
            for name, each in looks.items():
                seen[name] = each.look()
                assert seen[name].log_stats.end == number + 1
                assert len(rows_of(plans(seen[name], ("log",))["log"])) == number
        assert len(marks(plain)) == 4


class Counted(SortedDict):  # type: ignore[misc]
    """Counts how often a row is touched, whether it is read, put or copied."""

    touched = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Counted.touched += len(self)
        within = vars(self)["irange"]

        def irange(*bounds: Any, **how: Any) -> Iterator[Any]:
            for key in within(*bounds, **how):
                Counted.touched += 1
                yield key

        self.irange = irange

    def __iter__(self) -> Iterator[Any]:
        Counted.touched += len(self)
        yield from super().__iter__()

    def __setitem__(self, key: Any, value: Any) -> None:
        Counted.touched += 1
        super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        Counted.touched += 1
        return super().get(key, default)

    def update(self, rows: Any) -> None:
        # From a tenth on, all are sorted again.
        Counted.touched += len(rows) + (len(self) if 10 * len(rows) > len(self) else 0)
        super().update(rows)


def test_a_look_costs_what_has_come_since(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (overlay, slatedb_moment):
        monkeypatch.setattr(module, "SortedDict", Counted)
    monkeypatch.setattr(Counted, "touched", 0)
    with penstock.open(plain, background=False) as broker:
        broker.create_queue("a", filter="x = 1")
        for _ in range(6):
            broker.publish([Message(b"m", {"x": 1}) for _ in range(500)])
        looking = Looking(plain, following=True)
        seen = looking.look()
        assert Counted.touched > 3_000
        engine = broker._store.core.engine  # type: ignore[attr-defined]
        for _ in range(3):
            Counted.touched = 0
            # The first sign of life is new, others are like it.
            engine._beat_at = engine._flushed_at = 0
            before, number = seen, max(logged(plain))
            engine._beat()
            assert max(logged(plain)) > number
            seen = looking.look()
            assert Counted.touched < 60
        assert seen is before
        assert Counted.touched < 5
        for turn in range(5):
            end = seen.log_stats.end
            tickets = seen.plan_log(Wanted("log"), [(0, 1, end)])
            Counted.touched = 0
            broker.publish([Message(b"new", {"x": 1}) for _ in range(3)])
            seen = looking.look()
            new = seen.plan_log(Wanted("log", payload=True), [(0, end, end + 3)])
            assert Counted.touched < 120, turn
            assert [row["payload"] for row in rows_of(new)] == [b"new"] * 3
            assert len(rows_of(tickets)) == end - 1


def test_what_was_seen_is_good_until_the_next_look(
    plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with penstock.open(plain, background=False) as broker:
        broker.create_queue("a", filter="x = 1")
        fill(broker, 20)
        looking = Looking(plain)
        seen = looking.look()
        fill(broker, 20)
        # A look that fails changes nothing.
        with monkeypatch.context() as patch:
            patch.setattr(slatedb_moment.Tail, "_manifest", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                looking.look()
        assert len(rows_of(plans(seen, ("messages",))["messages"])) == 20
        begun = seen.read_log(0, 1, 21, columns=["offset"])
        later = looking.look()
        assert len(rows_of(plans(later, ("messages",))["messages"])) == 40
        for plan in (
            lambda: list(begun),
            lambda: plans(seen, ("log",)),
            lambda: plans(seen, ("done",)),
            seen.watermarks,
        ):
            with pytest.raises(InvalidInput, match="looked at again"):
                plan()


def test_a_log_that_is_far_ahead_of_the_files(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slatedb_moment, "MAX_MOMENT_BYTES", 100_000)
    with penstock.open(plain, background=False) as broker:
        broker.create_queue("a", filter="x = 1")
        looking = Looking(plain, following=True)
        payload = bytes(10_000)
        for _ in range(20):
            broker.publish([Message(payload, {"x": 1})])
        assert looking.look().moment.rows.bytes > 200_000
        (first,) = marks(plain)
        # There are newer files: it begins again with those.
        to_files(broker)
        broker.publish([Message(payload, {"x": 1})])
        assert looking.look().moment.rows.bytes < 50_000
        assert len(marks(plain)) == 2
        assert first in marks(plain)
        # The same rows again and again are no more than the last of them.
        for _ in range(40):
            broker.update_queue("a", labels={"x": "y" * 200})
            broker.update_queue("a", labels={"x": "z" * 200})
        assert looking.look().moment.rows.bytes < 50_000
        for _ in range(40):
            broker.publish([Message(payload, {"x": 1})])
        with pytest.raises(StorageFailed, match="ahead of its files"):
            looking.look()
        to_files(broker)
        assert looking.look().log_stats.end == broker.log_stats().end


def test_a_checkpoint_is_not_used_for_long(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr(slatedb_moment, "SystemClock", lambda: clock)
    with penstock.open(plain, background=False) as broker:
        broker.create_queue("a", filter="x = 1")
        for following, kept in ((True, 2), (False, 2 + 5)):
            looking = Looking(plain, following=following)
            tickets = []
            for _ in range(5):
                fill(broker, 5)
                tickets.append(plans(looking.look(), ("log",))["log"])
                clock.advance(11 * 60_000)
            # Who follows a log gives back what it does not need; nobody knows that of others.
            assert len(marks(plain)) == kept
            assert len(rows_of(tickets[-1])) == broker.log_stats().end - 1


def test_a_snapshot_is_renewed_while_it_is_read_and_refused_when_it_is_gone(plain: str) -> None:
    with penstock.open(plain, background=False) as broker:
        broker.create_queue("a", filter="x = 1")
        fill(broker)
        to_files(broker)
        tickets = plans(Looking(plain).look(), ("active",))["active"]
        ticket = Ticket.unpacked(tickets[0])
        admin = admin_of(plain)
        call(admin.refresh_checkpoint(ticket.checkpoint, 5_000), DONE_S)
        soon = marks(plain)[ticket.checkpoint]
        files = files_of(ticket)
        assert list(read_ticket(ticket, files))
        assert marks(plain)[ticket.checkpoint] == soon
        files._renew_at_s = 0
        assert list(read_ticket(ticket, files))
        assert marks(plain)[ticket.checkpoint] > soon
        call(admin.delete_checkpoint(ticket.checkpoint), DONE_S)
        files._renew_at_s = 0
        with pytest.raises(
            StorageFailed, match=r"too old.* 20 minutes or more. Run the query again"
        ):
            list(read_ticket(ticket, files))
        files.close()
        with pytest.raises(StorageFailed, match="too old"):
            rows_of(tickets)


def test_stretches_that_the_log_does_not_have_are_refused(plain: str) -> None:
    with penstock.open(plain, background=False) as broker:
        broker.create_queue("a", filter="x = 1")
        seen = Looking(plain).look()
        assert seen.log_stats.end == 1
        fill(broker, 5)
        with pytest.raises(InvalidInput, match="ends at 1"):
            seen.plan_log(Wanted("log"), [(0, 1, 3)])
        with pytest.raises(InvalidInput, match="no log 1"):
            seen.plan_log(Wanted("log"), [(1, 1, 1)])


# --- what is not there ----------------------------------------------------------------------------


def test_a_place_without_a_store_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(StoreMismatch, match="holds no store"):
        Looking(f"slatedb+file://{tmp_path}/nothing").look()
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreMismatch, match="holds no store"):
        Looking(f"slatedb+file://{tmp_path}/empty").look()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    with pytest.raises(StoreMismatch, match="holds no SlateDB database"):
        Looking(f"slatedb+file://{tmp_path}/other").look()
    with pytest.raises(InvalidUrl, match="can't be read beside its owner"):
        Looking("memory:").look()


@pytest.mark.slow
@pytest.mark.xdist_group("seaweed")
def test_a_bucket(url: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreMismatch, match="holds no store"):
        Looking(url).look()
    clock = ManualClock()
    with penstock.open(url, clock=clock, background=False) as broker:
        broker.create_queue("a", filter="x = 1", max_attempts=1)
        broker.create_queue("b", filter="x > 0")
        fill(broker, 20)
        to_files(broker)
        fill(broker, 20)
        tickets = plans(Looking(url, clock=clock).look())
        before = expected(broker, clock)
        churn(broker)
        to_files(broker)
        collect_garbage(url)
        for table, rows in before.items():
            assert rows_of(tickets[table]) == rows, table
    with pytest.raises(InvalidUrl, match="there is no bucket"):
        Looking("slatedb+s3://no-such-bucket/store").look()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageFailed, match="refuses these credentials"):
        Looking(url).look()
    with pytest.raises(StorageFailed, match="refuses these credentials"):
        rows_of(tickets["done"])


# --- changes over rows ----------------------------------------------------------------------------


def test_changes_over_rows_read_as_one_table() -> None:
    below = MemoryEngine(["t"])
    keys = [b"%02d" % n for n in range(40)]
    below.table("t").rows.update({key: b"below" for key in keys if int(key) % 3})
    changes = {key: (None if int(key) % 4 == 0 else b"") for key in keys if int(key) % 2 == 0}
    table = Overlay(below, ["t"], {"t": changes}).table("t")
    model = dict(below.table("t").rows) | changes
    rows = [(key, value) for key, value in sorted(model.items()) if value is not None]

    def bounds() -> Iterator[tuple[bytes, bytes]]:
        for begin in (b"", *keys[::5]):
            for end in (*keys[::7], b"\xff"):
                yield begin, end

    for begin, end in bounds():
        within = [row for row in rows if begin <= row[0] < end]
        for limit in (0, 1, 2, 3, 7, 100):
            assert list(table.scan(begin, end, limit)) == within[:limit]
            assert list(table.scan_back(begin, end, limit)) == within[::-1][:limit]
    assert table.multi_get(keys) == [model.get(key) for key in keys]
