"""Incremental backups of RocksDB stores: in a directory, through a server, broken off, pruned."""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import penstock
from penstock import BrokerClosed, InvalidInput, Message, StorageFailed
from penstock.cli.main import cli as main
from penstock.clock import ManualClock
from penstock.engines.places import Directory
from penstock.server import backup as incremental
from penstock.server import running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from click.testing import Result


def cli(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], env=environment)


def run(*arguments: object) -> Any:
    """Run a command that has to succeed; return its answer."""
    done = cli(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"rocksdb:{tmp_path}/store"
    with penstock.open(url) as broker:
        broker.create_queue("q")
        publish(broker, 0)
    return url


def publish(broker: penstock.Broker, first: int, count: int = 1000) -> None:
    broker.publish(
        Message(b"%d" % n + b"x" * 1000, {"queue": "q"}) for n in range(first, first + count)
    )


def waiting(url: str) -> int:
    with penstock.open(url, background=False, create=False) as broker:
        assert broker.check().ok
        return broker.stats("q").available


def stored_bytes(place: Path) -> int:
    return sum(each.stat().st_size for each in (place / "files").iterdir())


def test_there_and_back(url: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    first = run("backup", "create", place, "--url", url, "--name", "one")
    with penstock.open(url) as broker:
        publish(broker, 1000, 10)
    run("backup", "create", place, "--url", url, "--name", "two")
    third = run("backup", "create", place, "--url", url)
    listed = run("backup", "list", place)
    assert [each["name"] for each in listed] == ["one", "two", third["name"]]
    assert first["new_bytes"] == listed[0]["bytes"]
    # Nothing has come since the second but what every opening writes.
    assert third["new_bytes"] < listed[2]["bytes"] / 10
    assert stored_bytes(place) < sum(each["bytes"] for each in listed)
    assert run("backup", "verify", place)["name"] == third["name"]
    assert run("backup", "verify", place, "one")["records"] > 1000
    assert run("restore", place, "one", "--to", tmp_path / "r1")["url"] == f"rocksdb:{tmp_path}/r1"
    run("backup", "restore", place, "--to", f"rocksdb:{tmp_path}/r3")
    assert [waiting(f"rocksdb:{tmp_path}/{name}") for name in ("r1", "r3")] == [1000, 1010]
    assert not list((place / "working").iterdir())
    assert not (tmp_path / "store" / "PENSTOCK-BACKUP").exists()


def test_files_of_rows_are_not_read_again(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = Directory.read

    def note(directory: Directory, name: str) -> Any:
        if directory.root.name == "PENSTOCK-BACKUP":
            read.append(name)
        return real(directory, name)

    monkeypatch.setattr(Directory, "read", note)
    place = Directory(tmp_path / "place")
    with penstock.open(url) as broker:
        incremental.create(place, url, "one", broker)
        assert any(name.endswith(".sst") for name in read)
        read.clear()
        made = incremental.create(place, url, "two", broker)
        # Within one second.
        clock = ManualClock()
        monkeypatch.setattr(incremental, "SystemClock", lambda: clock)
        names = [incremental.create(place, url, "", broker).backup.name for _ in range(3)]
        assert names[1:] == [f"{names[0]}-2", f"{names[0]}-3"]
    assert not [name for name in read if name.endswith(".sst")]
    assert any(each.path.endswith(".sst") for each in made.backup.files)


def test_what_is_refused(url: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    run("backup", "create", place, "--url", url, "--name", "one")
    taken = cli("backup", "create", place, "--url", url, "--name", "one")
    assert "there is a backup one at" in taken.output
    assert (
        "is not a backup's name"
        in cli("backup", "create", place, "--url", url, "--name", "../x").output
    )
    assert cli("backup", "create", "--url", url).exit_code == 2
    assert "there is no backup 'two'" in cli("backup", "verify", place, "two").output
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    full = cli("restore", place, "--to", tmp_path / "full")
    assert "is not empty" in full.output
    wrong = cli("restore", place, "--to", "slatedb+s3://bucket/store")
    assert "is of a rocksdb store" in wrong.output
    assert "say which backups to keep" in cli("backup", "prune", place).output
    assert "a place is a directory or s3://" in cli("backup", "list", "gs://x/y").output
    locked = penstock.open(url)
    assert "ask that process" in cli("backup", "create", place, "--url", url).output
    locked.close()
    memory = incremental.create
    with penstock.open("memory:") as broker, pytest.raises(InvalidInput, match="not backed up"):
        memory(Directory(place), "memory:", "m", broker)
    assert [each["name"] for each in run("backup", "list", place)] == ["one"]


@pytest.mark.parametrize("harm", ["gone", "changed", "cut", "list"])
def test_a_damaged_backup_is_neither_sound_nor_restored(
    url: str, tmp_path: Path, harm: str
) -> None:
    place = tmp_path / "place"
    run("backup", "create", place, "--url", url)
    largest = max((place / "files").iterdir(), key=lambda each: each.stat().st_size)
    body = bytearray(largest.read_bytes())
    if harm == "gone":
        largest.unlink()
    elif harm == "cut":
        largest.write_bytes(body[:-1])
    elif harm == "changed":
        body[len(body) // 2] ^= 1
        largest.write_bytes(body)
    else:
        (listed,) = (place / "backups").iterdir()
        listed.write_bytes(listed.read_bytes()[:-10])
    for arguments in (("backup", "verify", place), ("restore", place, "--to", tmp_path / "back")):
        done = cli(*arguments)
        assert done.exit_code == 1
        assert str(place) in done.output
    assert not (tmp_path / "back").exists()
    assert not list(tmp_path.glob("*.part-*"))
    if harm == "list":
        # Nothing may go while it is not known what is needed.
        before = sorted((place / "files").iterdir())
        assert cli("backup", "prune", place, "--keep", "1").exit_code == 1
        assert sorted((place / "files").iterdir()) == before
    elif harm != "changed":
        # The next backup brings the file back, for both.
        run("backup", "create", place, "--url", url, "--name", "again")
        assert run("backup", "verify", place, "again")


def test_a_backup_that_is_broken_off_is_not_listed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Directory(tmp_path / "place")
    real, left = Directory.write, 4

    def fail(directory: Directory, name: str, source: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise StorageFailed("the place is full")
        real(directory, name, source)

    with penstock.open(url) as broker:
        monkeypatch.setattr(Directory, "write", fail)
        with pytest.raises(StorageFailed, match="full"):
            incremental.create(place, url, "one", broker)
        monkeypatch.undo()
        assert incremental.backups_at(place) == []
        assert incremental.last_backup_ms(place) is None
        assert place.sizes("files")
        assert not place.sizes("working")
        whole = incremental.create(place, url, "one", broker)
        assert whole.new_bytes < whole.backup.size
    assert incremental.verify_backup(place, "one")[0] == "one"


def test_prune_keeps_what_is_needed(url: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    with penstock.open(url) as broker:
        for number in range(4):
            publish(broker, 1000 * number, 100)
            incremental.create(Directory(place), url, f"b{number}", broker)
    (place / "files" / ("0" * 64)).write_bytes(b"of a backup that was broken off")
    done = run("backup", "prune", place, "--keep", "9", "--keep-for", "1ms")
    assert (done["removed"], len(done["kept"])) == ([], 4)
    assert done["freed_bytes"] == 31
    assert run("backup", "prune", place, "--keep", "1", "--keep-for", "1h")["removed"] == []
    done = run("backup", "prune", place, "--keep", "2")
    assert (done["removed"], done["kept"]) == (["b0", "b1"], ["b2", "b3"])
    for name in done["kept"]:
        assert run("backup", "verify", place, name)
    threading.Event().wait(0.01)
    # The newest stays, however old.
    assert run("backup", "prune", place, "--keep-for", "1ms")["kept"] == ["b3"]
    assert run("backup", "verify", place)["name"] == "b3"
    needed = sum(each.size for each in {f.sha256: f for f in files(place)}.values())
    assert stored_bytes(place) == needed


def files(place: Path) -> list[incremental.BackupFile]:
    return [file for each in incremental.backups_at(Directory(place)) for file in each.files]


def test_a_prune_and_a_backup_exclude_each_other(url: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    run("backup", "create", place, "--url", url, "--name", "one")
    with incremental._working(Directory(place), "create", unless="prune"):
        refused = cli("backup", "prune", place, "--keep", "1")
        assert "is in use: working/create-" in refused.output
        # Two backups do not disturb each other.
        run("backup", "create", place, "--url", url, "--name", "two")
    with incremental._working(Directory(place), "prune", unless="create"):
        assert "is in use: working/prune-" in cli("backup", "create", place, "--url", url).output
    # What a process that was killed has left counts for a while.
    (place / "working" / f"prune-{1:015}-dead").touch()
    run("backup", "create", place, "--url", url, "--name", "three")
    assert not list((place / "working").iterdir())


def test_a_server_makes_them_in_its_directory(serve: Callable[..., Any], tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/db"
    with penstock.open(url) as broker:
        broker.create_queue("q")
        publish(broker, 0, 100)
    place = tmp_path / "place"
    server = serve("--backup-directory", str(place), "--log-format", "json", native=True)
    address = f"penstock://127.0.0.1:{server.ports['native']}"
    name = run("backup", "create", "--url", address)["name"]
    body = b'{"name": "page", "incremental": true}'
    assert server.ask("POST", "/admin/backup", body=body).status == 200
    run("backup", "plain", "--url", address)
    assert "is not a backup's name" in cli("backup", "files", "--url", address).output
    assert cli("backup", "create", place, "--url", address).exit_code == 2
    server.stop()
    records = [json.loads(line) for line in server.log.read_text().splitlines()]
    made = [each["backup"] for each in records if each["message"] == "a backup was made"]
    assert made == [name, "page", "plain"]
    assert [each["name"] for each in run("backup", "list", place)] == [name, "page"]
    run("restore", place, name, "--to", tmp_path / "r1")
    run("restore", place / "plain", "--to", tmp_path / "r2")
    assert [waiting(f"rocksdb:{tmp_path}/{each}") for each in ("r1", "r2")] == [100, 100]
    newest = max(each["made_at_ms"] for each in run("backup", "list", place))
    for directory, least in ((place, newest), (tmp_path / "none", 0)):
        backups = incremental.ServerBackups(url, str(directory))
        backups.look()
        assert backups.last_ms is not None
        assert backups.last_ms >= least
        assert bool(backups.last_ms) == bool(least)


def test_a_server_that_stops_breaks_its_backup_off(tmp_path: Path) -> None:
    url, directory = f"rocksdb:{tmp_path}/db", tmp_path / "place"
    with running(url, native="127.0.0.1:0", backup_directory=directory) as server:
        backups = server.batcher.backups
        assert backups.make(server.broker, "whole", incremental=True)[0] == "whole"
    with penstock.open(url) as broker:
        broker.create_queue("q")
        publish(broker, 0, 10)
        with pytest.raises(BrokerClosed, match="the backup was broken off"):
            backups.make(broker, "late", incremental=True)
        assert not list((tmp_path / "db").glob("PENSTOCK-BACKUP*"))
    assert not list(directory.glob("working/*"))
    assert [each["name"] for each in run("backup", "list", directory)] == ["whole"]


def test_a_place_that_does_not_answer_keeps_no_server_from_starting(
    monkeypatch: pytest.MonkeyPatch, ask: Any
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {"ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
                     "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "REGION": "us-east-1",
                     "ALLOW_HTTP": "true"}  # fmt: skip
        for name, value in variables.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        with running("memory:", http="127.0.0.1:0", backup_directory="s3://backups/x") as server:
            address = server.addresses["http"]
            assert ask(address, "GET", "/ready").status == 200
            # It has not been seen yet whether there are any.
            assert b"penstock_last_backup" not in ask(address, "GET", "/metrics").body
            silent.close()


def test_a_kill_leaves_no_half_backup(
    serve: Callable[..., Any], tmp_path: Path, wait_until: Any
) -> None:
    url = f"rocksdb:{tmp_path}/db"
    with penstock.open(url, durability="relaxed") as broker:
        broker.create_queue("q")
        for first in range(0, 20_000, 5_000):
            publish(broker, first, 5_000)
    place = tmp_path / "place"
    server = serve("--backup-directory", str(place), native=True)
    address = f"penstock://127.0.0.1:{server.ports['native']}"
    asking = threading.Thread(target=lambda: cli("backup", "create", "--url", address))
    asking.start()
    wait_until(lambda: list(place.glob("files/*")))
    server.kill()
    asking.join(60)
    for each in run("backup", "list", place):
        run("backup", "verify", place, each["name"])
    run("backup", "create", place, "--url", url, "--name", "after")
    assert waiting(url) == 20_000
    assert run("backup", "verify", place, "after")
    assert not list((tmp_path / "db").glob("PENSTOCK-BACKUP*"))
