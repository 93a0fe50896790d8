"""Backups: of a store that is closed, of one that is served, under load and through kills."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

import penstock
from penstock import InvalidInput, Message, StorageFailed, StoreDamaged, StoreMismatch
from penstock.cli.main import cli as main
from penstock.engines.rocksdb import RocksEngine
from penstock.flight.client import FlightStore
from penstock.server import backup as backups
from penstock.server.keys import add_key
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from click.testing import Result

ROWS = pa.schema([("payload", pa.binary()), ("queue", pa.string())])


def cli(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], env=environment)


def contents(path: Path) -> tuple[int, list[bytes | None]]:
    """Open a copy of a store, check it, and return what was published and what waits in q."""
    with penstock.open(f"rocksdb:{path}", background=False) as broker:
        assert broker.check().ok
        payloads = [each.payload for each in broker.browse("q", limit=10_000)]
        return broker.store_stats().published_total, payloads


@pytest.fixture(params=["indexed", "buckets"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "store"
    with penstock.open(f"rocksdb:{path}?design={request.param}") as broker:
        broker.create_queue("q")
        broker.publish(Message(b"%d" % n, {"queue": "q"}) for n in range(50))
        taken = broker.claim("q", limit=5)
        broker.ack([each.receipt for each in taken])
    return path


def test_there_and_back(store: Path, tmp_path: Path) -> None:
    made = cli("backup", tmp_path / "copy", "--store", f"rocksdb:{store}")
    assert made.exit_code == 0, made.stderr
    assert "backed up to" in made.stdout
    # What comes later is not in it.
    with penstock.open(f"rocksdb:{store}") as broker:
        broker.send("q", b"later")
    back = cli("restore", tmp_path / "copy", "--to", tmp_path / "back")
    assert back.exit_code == 0, back.stderr
    checked = cli("check", "--store", f"rocksdb:{tmp_path / 'back'}")
    assert checked.exit_code == 0, checked.stdout
    assert contents(tmp_path / "back") == (50, [b"%d" % n for n in range(5, 50)])
    again = cli("restore", tmp_path / "copy", "--to", tmp_path / "twice")
    assert again.exit_code == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["back", "copy", "store", "twice"]


def test_a_restored_store_goes_on(store: Path, tmp_path: Path) -> None:
    with penstock.open(f"rocksdb:{store}") as broker:
        held = broker.claim("q", limit=1)
        backups.backup(broker, tmp_path / "copy")
    backups.restore(tmp_path / "copy", tmp_path / "back")
    with penstock.open(f"rocksdb:{tmp_path / 'back'}") as broker:
        assert broker.ack([held[0].receipt])[0]
        assert broker.send("q", b"new") > 50


def test_what_is_refused(store: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    with penstock.open(f"rocksdb:{store}") as broker:
        with pytest.raises(InvalidInput, match="is there already"):
            backups.backup(broker, full)
        backups.backup(broker, tmp_path / "copy")
        locked = cli("backup", tmp_path / "other", "--store", f"rocksdb:{store}")
        assert locked.exit_code == 1
        assert "ask that process: --url penstock://" in locked.stderr
    with pytest.raises(InvalidInput, match="is not empty"):
        backups.restore(tmp_path / "copy", full)
    with pytest.raises(StoreMismatch, match="is not a backup"):
        backups.restore(full, tmp_path / "back")
    with penstock.open("memory:") as broker, pytest.raises(InvalidInput, match="in memory"):
        backups.backup(broker, tmp_path / "memory")
    assert (full / "file").read_text() == "mine"
    assert not (tmp_path / "back").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    backups.restore(tmp_path / "copy", empty)
    assert cli("backup", tmp_path / "x").exit_code == 2
    assert cli("backup", tmp_path / "x", "--store", f"rocksdb:{tmp_path}/none").exit_code == 1
    assert not list(tmp_path.glob("*.part-*"))


def test_a_broken_backup_is_not_restored(store: Path, tmp_path: Path) -> None:
    with penstock.open(f"rocksdb:{store}") as broker:
        backups.backup(broker, tmp_path / "copy")
    for table in (tmp_path / "copy").glob("*.sst"):
        body = bytearray(table.read_bytes())
        # The copy shares its files with the store: break a file of its own.
        table.unlink()
        table.write_bytes(bytes(len(body)))
    with pytest.raises((StorageFailed, StoreMismatch)):
        backups.restore(tmp_path / "copy", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert not list(tmp_path.glob("*.part-*"))
    assert contents(store)[0] == 50


# --- verified -----------------------------------------------------------------------------------


def tree(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


def test_a_backup_is_verified_and_stays_as_it_is(store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    made = cli("backup", copy, "--store", f"rocksdb:{store}", "--verify")
    assert made.exit_code == 0, made.stderr
    assert "backed up to" in made.stdout
    assert f"{copy} is sound" in made.stdout
    before = tree(copy)
    again = cli("backup", copy, "--verify")
    assert again.exit_code == 0, again.stderr
    assert "backed up" not in again.stdout
    # The backup of yesterday does not pass for the one that was asked for.
    refused = cli("backup", copy, "--store", f"rocksdb:{store}", "--verify")
    assert refused.exit_code == 1
    assert "is there already" in refused.stderr
    assert tree(copy) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["copy", "store"]
    # A backup can be opened as it is, too.
    assert contents(copy)[0] == 50


def test_a_mistyped_name_is_not_made_into_a_backup(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PENSTOCK_STORE", "PENSTOCK_URL"):
        monkeypatch.setenv(name, f"rocksdb:{store}")
        verified = cli("backup", tmp_path / "cpoy", "--verify")
        assert verified.exit_code == 1
        assert f"there is no backup at {tmp_path / 'cpoy'}" in verified.stderr
    assert not (tmp_path / "cpoy").exists()


def test_a_backup_of_an_older_version_has_no_identity(store: Path, tmp_path: Path) -> None:
    with penstock.open(f"rocksdb:{store}") as broker:
        backups.backup(broker, tmp_path / "copy")
    (tmp_path / "copy" / "IDENTITY").unlink()
    assert backups.verify(tmp_path / "copy").ok
    backups.restore(tmp_path / "copy", tmp_path / "back")
    assert contents(tmp_path / "back")[0] == 50


@pytest.mark.parametrize("name", ["CURRENT", "MANIFEST-*", "*.sst", "*.log", "OPTIONS-*"])
def test_a_backup_with_a_missing_file_is_neither_sound_nor_restored(
    store: Path, tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "copy"
    with penstock.open(f"rocksdb:{store}") as broker:
        backups.backup(broker, copy)
    next(copy.glob(name)).unlink()
    before = tree(copy)
    verified = cli("backup", copy, "--verify")
    assert verified.exit_code == 1
    assert f"{copy} holds a damaged store" in verified.stderr
    with pytest.raises(StoreDamaged, match="missing"):
        backups.restore(copy, tmp_path / "back")
    assert tree(copy) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["copy", "store"]


def test_a_backup_that_breaks_an_invariant(store: Path, tmp_path: Path) -> None:
    with penstock.open(f"rocksdb:{store}") as broker:
        backups.backup(broker, tmp_path / "copy")
    design = (tmp_path / "copy" / "PENSTOCK").read_text()
    engine = RocksEngine(tmp_path / "copy", DESIGNS[design])
    batch = engine.batch()
    batch.delete(
        engine.table("payloads").scan(b"", b"\xff", 1)[0][0], engine.table("payloads").family
    )
    engine.commit(batch)
    engine.close()
    verified = cli("backup", tmp_path / "copy", "--verify")
    assert verified.exit_code == 1
    assert "breaks 1 invariants of a store" in verified.stderr
    assert f"penstock salvage rocksdb:{tmp_path / 'copy'} TARGET" in verified.stderr
    with pytest.raises(StorageFailed, match="breaks 1 invariants"):
        backups.restore(tmp_path / "copy", tmp_path / "back")


def test_of_two_backups_of_one_name_one_is_kept_whole(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    sync = backups.sync_tree

    def together(directory: Path) -> int:
        both.wait(60)
        return sync(directory)

    monkeypatch.setattr(backups, "sync_tree", together)
    outcomes: list[object] = []

    def run(broker: penstock.Broker) -> None:
        try:
            outcomes.append(backups.backup(broker, tmp_path / "copy"))
        except BaseException as error:
            outcomes.append(error)

    with penstock.open(f"rocksdb:{store}") as broker:
        threads = [threading.Thread(target=run, args=(broker,)) for _ in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(120)
    assert sorted(type(each).__name__ for each in outcomes) == ["InvalidInput", "int"]
    assert "is there already" in str(outcomes)
    assert not list(tmp_path.glob("*.part-*"))
    monkeypatch.undo()
    backups.restore(tmp_path / "copy", tmp_path / "back")
    assert contents(tmp_path / "back")[0] == 50


def test_a_disk_that_is_full_leaves_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backups, "sync_tree", fail)
    with (
        penstock.open(f"rocksdb:{store}") as broker,
        pytest.raises(StorageFailed, match="No space left"),
    ):
        backups.backup(broker, tmp_path / "copy")
    assert [each.name for each in tmp_path.iterdir()] == ["store"]


# --- of a store that is served ------------------------------------------------------------------


class Load:
    """Publishes numbered messages, one by one, and remembers those that were answered."""

    def __init__(self, location: str) -> None:
        self.answered = 0
        self.sent = 0
        self._ending = threading.Event()
        self._store = FlightStore(location)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            self.sent += 1
            row = pa.record_batch({"payload": [b"%d" % self.sent], "queue": ["q"]}, schema=ROWS)
            try:
                self._store.publish([row])
            except Exception:
                return
            self.answered = self.sent

    def end(self) -> None:
        self._ending.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_backups_under_load_and_a_kill(
    serve: Callable[..., Any], tmp_path: Path, wait_until: Any
) -> None:
    with penstock.open(f"rocksdb:{tmp_path}/db") as broker:
        broker.create_queue("q")
    server = serve("--native", "127.0.0.1:0", "--backup-directory", str(tmp_path / "backups"))
    load = Load(server.flight)
    place = f"penstock://127.0.0.1:{server.ports['native']}"
    bounds = []
    for number in range(3):
        wait_until(lambda: load.answered > 10 * (number + 1))  # noqa: B023 - asked at once
        before = load.answered
        if number < 2:
            made = cli("backup", f"b{number}", "--url", place, "--verify")
            assert made.exit_code == 0, made.stderr
            assert "is sound" in made.stdout
        else:
            assert server.ask("POST", "/admin/backup", body=b'{"name": "b2"}').status == 200
        bounds.append((before, load.sent))
    # A fourth one meets a kill.
    killing = threading.Thread(target=lambda: _try(server))
    killing.start()
    server.kill()
    killing.join(60)
    load.end()
    for number, (low, high) in enumerate(bounds):
        backups.restore(tmp_path / "backups" / f"b{number}", tmp_path / f"r{number}")
        published, payloads = contents(tmp_path / f"r{number}")
        assert payloads == [b"%d" % n for n in range(1, published + 1)]
        assert low <= published <= high
    # The store has everything that was answered; the last backup is whole, or not there.
    published, _ = contents(tmp_path / "db")
    assert load.answered <= published <= load.sent
    last = tmp_path / "backups" / "b3"
    if last.exists():
        backups.restore(last, tmp_path / "r3")


def _try(server: Any) -> None:
    with contextlib.suppress(OSError):
        server.ask("POST", "/admin/backup", body=b'{"name": "b3"}')


def test_the_server_wants_a_key_for_it(serve: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    root = f"root:{add_key(keys, 'root', ['all'])}"
    low = f"low:{add_key(keys, 'low', ['consume:*'])}"
    native = ("--native", "127.0.0.1:0")
    server = serve(*native, "--keys", keys, "--backup-directory", tmp_path / "backups")
    place = f"penstock://127.0.0.1:{server.ports['native']}"
    ended = cli("backup", "one", "--url", place)
    assert ended.exit_code == 1
    assert "wants a key: PENSTOCK_TOKEN='KEY:SECRET'" in ended.stderr
    ended = cli("backup", "one", "--url", place, PENSTOCK_TOKEN=low)
    assert "key 'low' may not admin on all queues" in ended.stderr
    assert not (tmp_path / "backups").exists()
    assert cli("backup", "one", "--url", place, PENSTOCK_TOKEN=root).exit_code == 0
    ended = cli("backup", "one", "--url", place, PENSTOCK_TOKEN=root)
    assert "is there already" in ended.stderr
    ended = cli("backup", "two", "--url", place.replace("//", f"//{root}@"))
    assert ended.exit_code == 0, ended.stderr
    ended = cli("backup", "one", "--url", "grpc://x")
    assert "no store is named by" in ended.stderr
    ended = cli("backup", "one", "--url", "penstock://127.0.0.1:9")
    assert (ended.exit_code, "no server at" in ended.stderr) == (3, True)
