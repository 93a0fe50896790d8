"""The importer, on Queueber databases written as its documents describe them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import capnp
import pytest
import rocksdict as rocks
from tests.damaging import files_of, flip
from tests.docs.blocks import run_blocks

import penstock
from penstock import ManualClock
from penstock.errors import ImportFailed, InvalidInput, MissingExtra
from penstock.importers import queueber_source as keys
from penstock.importers.queueber import ID_ATTRIBUTE, import_queueber, progress_queue
from penstock.store import codec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sql.postgres import PostgresServer

NOW_SECS = 1_700_000_000

SCHEMA: Any = capnp.load(str(Path(codec.__path__[0]) / "queueber.capnp"))
FAMILIES = ("available", "in_progress", "visibility_index", "leases", "lease_expiry")


def uuid(number: int) -> bytes:
    return bytes.fromhex(f"018bcfe5{number:08x}7000800000000000")


def timed(namespace: bytes, secs: int, id_: bytes) -> bytes:
    """Make the key of an entry of an index."""
    return namespace + secs.to_bytes(8, "big") + b"/" + id_


class Queueber:
    """A database being written. ``layout``: single, multi, or mixed (odd ids in old places)."""

    def __init__(self, path: Path, layout: str = "multi") -> None:
        self.path = path
        self.layout = layout
        options = rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.create_missing_column_families(True)
        families = () if layout == "single" else FAMILIES
        self._db = rocks.Rdict(
            str(path), options, {name: rocks.Options(raw_mode=True) for name in families}
        )
        self._tables: dict[str, Any] = {name: self._db.get_column_family(name) for name in families}

    def close(self) -> None:
        self._tables.clear()
        self._db.close()
        # Queueber does not use the binding that leaves this behind.
        (self.path / "rocksdict-config.json").unlink()

    def put(self, key: bytes, value: bytes, *, old: bool | None = None) -> None:
        if old is None:
            old = self.layout == "single" or (self.layout == "mixed" and key[-9] % 2 == 1)
        family = key.partition(b"/")[0].decode()
        table: Any = self._db if old else self._tables[family]
        table[key] = value

    def put_into(self, family: str, key: bytes, value: bytes) -> None:
        table: Any = self._db if family == "default" else self._tables[family]
        table[key] = value

    def add(
        self, id_: bytes, contents: bytes, visible_at_secs: int, *, old: bool | None = None
    ) -> None:
        index_key = timed(keys.VISIBILITY_INDEX, visible_at_secs, id_)
        self.put(keys.AVAILABLE + id_, item(id_, contents, index_key), old=old)
        self.put(index_key, keys.AVAILABLE + id_, old=old)

    def hold(self, id_: bytes, contents: bytes, *, old: bool | None = None) -> None:
        index_key = timed(keys.VISIBILITY_INDEX, 1, id_)
        self.put(keys.IN_PROGRESS + id_, item(id_, contents, index_key), old=old)

    def lease(
        self, lease: bytes, ids: list[bytes], expiry_secs: int, *, says_when: bool = True
    ) -> None:
        index_key = timed(keys.LEASE_EXPIRY, expiry_secs, lease)
        entry = SCHEMA.LeaseEntry.new_message(ids=sorted(ids))
        if says_when:
            entry.expiryTsSecs = expiry_secs
            entry.expiryTsIndexKey = index_key
        self.put(keys.LEASES + lease, entry.to_bytes())
        self.put(index_key, keys.LEASES + lease)


def item(id_: bytes, contents: bytes, index_key: bytes) -> bytes:
    made: bytes = SCHEMA.StoredItem.new_message(
        contents=contents, visibilityTsIndexKey=index_key, id=id_
    ).to_bytes()
    return made


def fill(path: Path, count: int, *, layout: str = "multi") -> list[bytes]:
    """Write ``count`` plain items and return their contents."""
    source = Queueber(path, layout)
    for number in range(count):
        source.add(uuid(number), b"item %d" % number, 1)
    source.close()
    return [b"item %d" % number for number in range(count)]


def states(broker: penstock.Broker, queue: str) -> dict[bytes, tuple[str, int | None]]:
    """Return the state and visible second of every message, by payload; no payload twice."""
    found: dict[bytes, tuple[str, int | None]] = {}
    for state in ("available", "delayed"):
        cursor = None
        while True:
            page = broker.browse(queue, state=state, limit=1000, cursor=cursor)
            for entry in page:
                assert entry.payload is not None
                assert entry.payload not in found
                at_ms = entry.visible_at_ms
                seconds = None if state == "available" or at_ms is None else at_ms // 1000
                found[entry.payload] = (state, seconds)
            cursor = page.next_cursor
            if cursor is None:
                break
    return found


def files(path: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        file.name: (file.stat().st_size, file.stat().st_mtime_ns, file.read_bytes())
        for file in path.iterdir()
    }


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_SECS * 1000)


@pytest.fixture
def broker(clock: ManualClock) -> Any:
    with penstock.open("memory:", clock=clock, background=False) as opened:
        yield opened


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Name a store that nothing was imported into: the parameter, in a place of the test's own."""
    if request.param != "postgresql":
        yield request.param.format(place=tmp_path)
        return
    postgres: PostgresServer = request.getfixturevalue("postgres")
    yield postgres.emptied(str(tmp_path))
    postgres.forget_places()


ROCKSDB, SLATEDB, POSTGRESQL = "rocksdb:{place}/store", "slatedb+file://{place}/store", "postgresql"


def test_the_python_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "queueber", 3)
    page = Path(__file__).parents[2] / "docs" / "importing.md"
    run_blocks(page, "/var/lib/queueber", str(tmp_path / "queueber"))
    assert capsys.readouterr().out == "3 0 ()\n"


@pytest.mark.parametrize(
    ("layout", "url"),
    [
        ("single", "memory:"),
        ("multi", "memory:"),
        ("mixed", "memory:"),
        ("mixed", SLATEDB),
        ("mixed", POSTGRESQL),
    ],
    indirect=["url"],
)
def test_every_kind_of_item(tmp_path: Path, url: str, clock: ManualClock, layout: str) -> None:
    source = Queueber(tmp_path / "q", layout)
    for number in (0, 1):
        source.add(uuid(number), b"available %d" % number, NOW_SECS)
    for number in (2, 3):
        source.add(uuid(number), b"delayed %d" % number, NOW_SECS + 60 + number)
    for number in range(4, 10):
        source.hold(uuid(number), b"held %d" % number)
    source.lease(uuid(100), [uuid(4), uuid(5)], NOW_SECS + 30)
    source.lease(uuid(101), [uuid(6)], NOW_SECS)  # ends this second: expired
    source.lease(uuid(103), [uuid(7), uuid(5)], NOW_SECS + 40, says_when=False)
    source.lease(uuid(104), [uuid(8)], NOW_SECS - 5, says_when=False)
    source.close()
    before = files(tmp_path / "q")

    with penstock.open(url, clock=clock, background=False) as broker:
        report = import_queueber(tmp_path / "q", broker, "orders", clock=clock)
        found = states(broker, "orders")

    assert found == {
        b"available 0": ("available", None),
        b"available 1": ("available", None),
        b"delayed 2": ("delayed", NOW_SECS + 62),
        b"delayed 3": ("delayed", NOW_SECS + 63),
        b"held 4": ("delayed", NOW_SECS + 30),
        b"held 5": ("delayed", NOW_SECS + 40),
        b"held 6": ("available", None),
        b"held 7": ("delayed", NOW_SECS + 40),
        b"held 8": ("available", None),
        b"held 9": ("available", None),
    }
    assert (report.available, report.delayed) == (2, 2)
    assert (report.leased, report.lease_ended) == (3, 3)
    assert report.imported == 10
    assert (report.skipped, report.problems, report.imported_before) == (0, (), 0)
    assert files(tmp_path / "q") == before


def test_a_message_says_where_it_came_from(
    tmp_path: Path, broker: penstock.Broker, clock: ManualClock
) -> None:
    fill(tmp_path / "q", 1)
    import_queueber(tmp_path / "q", broker, "orders", clock=clock)
    [entry] = broker.browse("orders")
    assert entry.attributes == {"queue": "orders", ID_ATTRIBUTE: uuid(0).hex()}
    assert broker.queue("orders").filter == "queue = 'orders'"


def test_records_that_contradict_each_other(
    tmp_path: Path, broker: penstock.Broker, clock: ManualClock
) -> None:
    source = Queueber(tmp_path / "q", "mixed")
    # In both states: held for longer than delayed, delayed for longer than held, lease gone.
    for number, delayed_until, held_until in ((1, 10, 50), (2, 60, 20), (3, 70, -1), (4, -5, -1)):
        source.add(uuid(number), b"both %d" % number, NOW_SECS + delayed_until)
        source.hold(uuid(number), b"both %d" % number)
        source.lease(uuid(100 + number), [uuid(number)], NOW_SECS + held_until)
    # In both families: the newer one counts.
    source.add(uuid(10), b"older", NOW_SECS + 5, old=True)
    source.add(uuid(10), b"newer", NOW_SECS + 9, old=False)
    source.close()

    report = import_queueber(tmp_path / "q", broker, "orders", clock=clock)

    assert states(broker, "orders") == {
        b"both 1": ("delayed", NOW_SECS + 50),
        b"both 2": ("delayed", NOW_SECS + 60),
        b"both 3": ("delayed", NOW_SECS + 70),
        b"both 4": ("available", None),
        b"newer": ("delayed", NOW_SECS + 9),
    }
    assert (report.in_both, report.in_two_families) == (4, 1)
    assert (report.leased, report.delayed, report.available) == (2, 2, 1)


def test_indexes_that_lead_nowhere(
    tmp_path: Path, broker: penstock.Broker, clock: ManualClock
) -> None:
    source = Queueber(tmp_path / "q", "multi")
    source.add(uuid(0), b"fine", 1)
    source.put(timed(keys.VISIBILITY_INDEX, 1, uuid(1)), keys.AVAILABLE + uuid(1))
    source.put_into("visibility_index", b"visibility_index/short", b"")
    source.put(timed(keys.LEASE_EXPIRY, 1, uuid(100)), keys.LEASES + uuid(100))
    source.put(keys.AVAILABLE + uuid(2), item(uuid(2), b"no entry", b""))
    lost = timed(keys.VISIBILITY_INDEX, NOW_SECS + 5, uuid(3))
    source.put(keys.AVAILABLE + uuid(3), item(uuid(3), b"lost entry", lost))
    source.close()

    report = import_queueber(tmp_path / "q", broker, "orders", clock=clock)

    assert states(broker, "orders") == {
        b"fine": ("available", None),
        b"no entry": ("available", None),
        b"lost entry": ("delayed", NOW_SECS + 5),
    }
    assert (report.problems, report.foreign_keys) == ((), 0)


def test_what_is_corrupt_is_skipped_and_reported(
    tmp_path: Path, broker: penstock.Broker, clock: ManualClock
) -> None:
    source = Queueber(tmp_path / "q", "mixed")
    good = item(uuid(0), b"good", timed(keys.VISIBILITY_INDEX, 1, uuid(0)))
    pointer = bytearray(good)
    pointer[24:32] = b"\xfd\xff\xff\x7f\xff\xff\xff\xff"
    for number, value in enumerate(
        (b"", b"garbage", bytes(8), b"\xff" * 64, good[:-8], bytes(pointer), good), start=1
    ):
        source.put(keys.AVAILABLE + uuid(number), value)
    source.put(keys.AVAILABLE + uuid(20), b"broken", old=False)
    source.put(keys.AVAILABLE + uuid(20), item(uuid(20), b"old copy", b""), old=True)
    source.put(keys.LEASES + uuid(100), b"\xff" * 64)
    source.put_into("default", b"settings", b"?")
    source.put_into("leases", b"bare", b"?")
    source.close()

    report = import_queueber(tmp_path / "q", broker, "orders", clock=clock)

    assert set(states(broker, "orders")) == {b"old copy"}
    assert (report.imported, report.skipped, report.corrupt_leases) == (1, 7, 1)
    assert report.foreign_keys == 2
    reasons = {problem.key: problem.reason for problem in report.problems}
    assert "names the item" in reasons["available/" + uuid(7).hex()]
    assert "Cap'n Proto" in reasons["available/" + uuid(1).hex()]
    assert len(reasons) == 11
    assert not any("stack" in reason or "\n" in reason for reason in reasons.values())


def test_items_that_are_not_allowed_are_skipped(
    tmp_path: Path,
    broker: penstock.Broker,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Queueber(tmp_path / "q")
    source.add(uuid(0), bytes(4096), 1)
    source.add(uuid(1), bytes(4097), 1)
    source.close()
    monkeypatch.setattr("penstock.limits.MAX_PAYLOAD_BYTES", 4096)
    report = import_queueber(tmp_path / "q", broker, "orders", clock=clock)
    assert (report.imported, report.skipped) == (1, 1)
    assert "payload has 4097 bytes" in report.problems[0].reason


# --- resuming -----------------------------------------------------------------------------


class StopError(Exception):
    pass


@pytest.mark.parametrize(
    ("layout", "url"),
    [("single", ROCKSDB), ("mixed", ROCKSDB), ("multi", SLATEDB), ("multi", POSTGRESQL)],
    indirect=["url"],
)
def test_interrupted_at_every_batch_border(tmp_path: Path, layout: str, url: str) -> None:
    contents = fill(tmp_path / "q", 23, layout=layout)
    clock = ManualClock(NOW_SECS * 1000)
    seen: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        raise StopError

    for _ in range(20):
        with penstock.open(url, clock=clock, background=False) as broker:
            try:
                report = import_queueber(
                    tmp_path / "q", broker, "orders", batch=4, progress=stop, clock=clock
                )
                break
            except StopError:
                # Far beyond any dedup window, and everything so far was consumed.
                clock.advance(3 * 86_400_000)
                taken = [d.receipt for d in broker.claim("orders", limit=100)]
                assert all(broker.ack(taken))
    assert seen == [(done, 23) for done in (4, 8, 12, 16, 20, 23)]
    assert (report.imported, report.imported_before) == (23, 23)
    with penstock.open(url, clock=clock, background=False) as broker:
        assert broker.stats("orders").enqueued_total == len(contents)
        assert broker.stats("orders").acked_total == len(contents)


def test_interrupted_in_between(tmp_path: Path, clock: ManualClock) -> None:
    contents = fill(tmp_path / "q", 9)
    with penstock.open("memory:", clock=clock, background=False) as broker:
        publish = broker.publish
        for fail_at in (0, 0, 1, 1, 2, 5):
            calls = Counter[str]()

            def failing(messages: Any, limit: int = fail_at, calls: Any = calls) -> list[int]:
                if calls["publish"] == limit:
                    raise StopError
                calls["publish"] += 1
                return publish(messages)

            broker.publish = failing  # type: ignore[method-assign]
            try:
                import_queueber(tmp_path / "q", broker, "orders", batch=2, clock=clock)
            except StopError:
                pass
            finally:
                broker.publish = publish  # type: ignore[method-assign]
        assert sorted(states(broker, "orders")) == contents


def test_an_item_that_moves_between_two_runs_comes_once(
    tmp_path: Path, broker: penstock.Broker, clock: ManualClock
) -> None:
    fill(tmp_path / "q", 4)

    def stop(_done: int, _total: int) -> None:
        raise StopError

    with pytest.raises(StopError):
        import_queueber(tmp_path / "q", broker, "orders", batch=2, progress=stop, clock=clock)
    source = Queueber(tmp_path / "q")
    source.hold(uuid(0), b"item 0, held since")
    source.hold(uuid(3), b"item 3")
    source.add(uuid(9), b"item 9", 1)
    source.close()
    report = import_queueber(tmp_path / "q", broker, "orders", batch=2, clock=clock)
    assert sorted(states(broker, "orders")) == [b"item %d" % n for n in (0, 1, 2, 3, 9)]
    assert (report.imported, report.imported_before, report.in_both) == (5, 2, 1)


def test_again_takes_what_is_new_and_restart_takes_everything(
    tmp_path: Path, broker: penstock.Broker, clock: ManualClock
) -> None:
    fill(tmp_path / "q", 3)
    for _ in range(2):
        report = import_queueber(tmp_path / "q", broker, "orders", clock=clock)
        assert report.imported == 3
    assert broker.stats("orders").enqueued_total == 3
    broker.purge("orders")
    report = import_queueber(tmp_path / "q", broker, "orders", restart=True, clock=clock)
    assert (report.imported, report.imported_before) == (3, 0)
    assert broker.stats("orders").available == 3
    broker.delete_queue("orders")
    with pytest.raises(ImportFailed, match="'orders' is gone since 3 messages"):
        import_queueber(tmp_path / "q", broker, "orders", clock=clock)


def test_only_the_last_record_of_progress_is_kept(
    tmp_path: Path, broker: penstock.Broker, clock: ManualClock
) -> None:
    fill(tmp_path / "q", 150)
    import_queueber(tmp_path / "q", broker, "orders", batch=1, clock=clock)
    [own] = [spec.name for spec in broker.queues() if spec.name != "orders"]
    identity = (tmp_path / "q" / "IDENTITY").read_text().strip()
    assert own == progress_queue(identity, "orders")
    clock.advance(10)
    broker.sweep()
    stats = broker.stats(own)
    assert (stats.available, stats.in_flight, stats.done) == (1, 0, 0)


def test_a_store_that_is_routed_by_a_pipeline(tmp_path: Path, clock: ManualClock) -> None:
    contents = fill(tmp_path / "q", 5)

    def stop(_done: int, _total: int) -> None:
        raise StopError

    with penstock.open("memory:", clock=clock, background=False, routing="pipeline") as broker:
        with pytest.raises(StopError):
            import_queueber(tmp_path / "q", broker, "orders", batch=2, progress=stop, clock=clock)
        with pytest.raises(ImportFailed, match="run the routing pipeline"):
            import_queueber(tmp_path / "q", broker, "orders", batch=2, clock=clock)
        for finished in (False, True):
            page = broker.read_log()
            routes = {
                record.message_id: [str(record.attributes["queue"])] for record in page.records
            }
            broker.assign(page.log, page.cursor, routes)
            if not finished:
                import_queueber(tmp_path / "q", broker, "orders", batch=2, clock=clock)
        assert sorted(states(broker, "orders")) == contents


CHILD = """
import os, sys
sys.path[:0] = {path!r}
import penstock
from penstock.importers.queueber import import_queueber

def pause(done, total):
    if done >= 60:
        print("ready", flush=True)
        sys.stdin.read()

with penstock.open({url!r}) as broker:
    import_queueber({source!r}, broker, "orders", batch=20, progress=pause)
"""


@pytest.mark.parametrize("url", [ROCKSDB], indirect=True)
def test_a_killed_process_goes_on_where_it_was(tmp_path: Path, url: str) -> None:
    contents = fill(tmp_path / "q", 100, layout="mixed")
    script = CHILD.format(path=sys.path, url=url, source=str(tmp_path / "q"))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    with penstock.open(url) as broker:
        assert broker.stats("orders").available == 60
        report = import_queueber(tmp_path / "q", broker, "orders", batch=20)
        assert report.imported_before == 60
        assert sorted(states(broker, "orders")) == sorted(contents)


# --- refusals -----------------------------------------------------------------------------


def test_places_that_hold_no_queueber_database(tmp_path: Path, broker: penstock.Broker) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "CURRENT").write_text("MANIFEST-000001\n")
    penstock.open(f"rocksdb:{tmp_path / 'ours'}").close()
    stranger = Queueber(tmp_path / "stranger", "single")
    stranger.put_into("default", b"users/1", b"x")
    stranger.close()
    Queueber(tmp_path / "blank", "single").close()
    for name, text in {
        "missing": "there is nothing at",
        "empty": "not the directory of a RocksDB database",
        "file": "not the directory of a RocksDB database",
        "broken": "not a RocksDB database that can be read",
        "ours": "is a Penstock store",
        "stranger": "not a Queueber database.*users/1",
        "blank": "empty RocksDB database",
    }.items():
        with pytest.raises(ImportFailed, match=text):
            import_queueber(tmp_path / name, broker, "orders")
    assert broker.queues() == []
    Queueber(tmp_path / "no items", "multi").close()
    assert import_queueber(tmp_path / "no items", broker, "orders").imported == 0


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("queue = 'orders' AND kind = 'book'", 0),
        ("queue = 'orders' AND size < 7", 0),
        ("queue = 'orders' AND size <= 7", 11),
        ("\"queueber.id\" LIKE '018bcfe5%'", 11),
    ],
)
def test_a_queue_that_would_not_take_everything(
    tmp_path: Path, broker: penstock.Broker, clock: ManualClock, text: str, taken: int
) -> None:
    fill(tmp_path / "q", 11)
    broker.create_queue("orders", filter=text)
    if taken:
        assert import_queueber(tmp_path / "q", broker, "orders", clock=clock).imported == taken
        assert broker.stats("orders").available == taken
        return
    with pytest.raises(ImportFailed, match="queue 'orders' takes messages where"):
        import_queueber(tmp_path / "q", broker, "orders", batch=1, clock=clock)
    assert broker.store_stats().published_total == 0
    assert [spec.name for spec in broker.queues()] == ["orders"]


def test_no_queue_gets_the_records_of_progress(
    tmp_path: Path, broker: penstock.Broker, clock: ManualClock
) -> None:
    fill(tmp_path / "q", 3)
    broker.create_queue("all", filter="size >= 0")
    with pytest.raises(ImportFailed, match=r'add AND "penstock\.import" IS NULL'):
        import_queueber(tmp_path / "q", broker, "orders", clock=clock)
    assert [spec.name for spec in broker.queues()] == ["all"]
    broker.update_queue("all", filter='size >= 0 AND "penstock.import" IS NULL')
    import_queueber(tmp_path / "q", broker, "orders", batch=1, clock=clock)
    assert broker.stats("all").available == 3


def test_without_pycapnp(
    tmp_path: Path, broker: penstock.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "q", 1)
    monkeypatch.setitem(sys.modules, "capnp", None)
    with pytest.raises(MissingExtra, match=r"pip install 'penstock\[queueber\]'"):
        import_queueber(tmp_path / "q", broker, "orders")


def test_arguments(tmp_path: Path, broker: penstock.Broker) -> None:
    fill(tmp_path / "q", 1)
    for batch in (0, 10_000):
        with pytest.raises(InvalidInput, match="batch"):
            import_queueber(tmp_path / "q", broker, "orders", batch=batch)
    with pytest.raises(InvalidInput, match="queue name"):
        import_queueber(tmp_path / "q", broker, "no/such")
    assert broker.queues() == []


def test_a_source_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "q", 1)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    with keys.Source(tmp_path / "q") as source:
        assert [[each.id for each in records] for records in source.items(b"")] == [[uuid(0)]]
        assert list((tmp_path / "scratch").iterdir()) != []
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_damaged_block_ends_an_import_with_an_error(tmp_path: Path) -> None:
    fill(tmp_path / "q", 5_000)
    rows = files_of(tmp_path / "q")["available"][0]
    flip(rows, rows.stat().st_size // 2, 100)
    with (
        penstock.open("memory:") as broker,
        pytest.raises(ImportFailed, match="any further: Corruption"),
    ):
        import_queueber(tmp_path / "q", broker, queue="jobs")
