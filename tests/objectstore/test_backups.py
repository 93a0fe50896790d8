"""Backups to S3, and of stores on object storage while their owner goes on."""

from __future__ import annotations

import io
import threading
from typing import TYPE_CHECKING, Any

import pytest
from slatedb.uniffi import (
    AdminBuilder,
    GarbageCollectorDirectoryOptions,
    GarbageCollectorOptions,
)
from tests.server.test_incremental import cli, publish, run, waiting
from tests.waiting import wait_until

import penstock
from penstock import InvalidInput, StorageFailed, StoreDamaged, StoreMismatch
from penstock.engines.places import Directory, place_at
from penstock.engines.slatedb.binding import call
from penstock.engines.slatedb.copying import place_of
from penstock.readers import fill_objects, held_objects, locate
from penstock.server import running

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.engines.places import Place

pytestmark = pytest.mark.slow


@pytest.fixture
def backups(url: str) -> str:
    """Name a place on S3 that nobody has used."""
    return url.replace("slatedb+s3:", "s3:").replace("/some/", "/backups/")


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"slatedb+file://{tmp_path}/store"
    found: str = request.getfixturevalue("url")
    return found


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, backups: str) -> str:
    return str(tmp_path / "place") if request.param == "file" else backups


def test_a_rocksdb_store_is_backed_up_to_s3(backups: str, tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/store"
    with penstock.open(url) as broker:
        broker.create_queue("q")
        publish(broker, 0)
    for name in ("one", "two", "three"):
        run("backup", "create", backups, "--url", url, "--name", name)
    listed = run("backup", "list", backups)
    assert [each["name"] for each in listed] == ["one", "two", "three"]
    assert run("backup", "verify", backups, "two")["records"] > 1000
    done = run("backup", "prune", backups, "--keep", "1")
    assert done["removed"] == ["one", "two"]
    assert run("backup", "verify", backups)["name"] == "three"
    run("restore", backups, "--to", tmp_path / "back")
    assert waiting(f"rocksdb:{tmp_path}/back") == 1000
    largest = max(place_at(backups).sizes("files").items(), key=lambda each: each[1])[0]
    place_at(backups).write(largest, io.BytesIO(b"something else"))
    broken = cli("backup", "verify", backups)
    assert broken.exit_code == 1
    assert "is damaged" in broken.output


def test_a_store_is_backed_up_while_its_owner_goes_on(
    store: str, place: str, tmp_path: Path, backups: str
) -> None:
    sent, ending = [0], threading.Event()
    bounds = []
    with penstock.open(store) as owner:
        owner.create_queue("q")

        def send() -> None:
            while not ending.is_set():
                owner.send("q", b"%d" % sent[0])
                sent[0] += 1

        sender = threading.Thread(target=send)
        sender.start()
        try:
            for name in ("one", "two"):
                before, at = sent[0], threading.Event()
                while sent[0] < before + 20:
                    at.wait(0.01)
                before = sent[0]
                run("backup", "create", place, "--url", store, "--name", name)
                bounds.append((before, sent[0] + 1))
        finally:
            ending.set()
            sender.join()
        owner.send("q", b"it has not been fenced")
    for name, (low, high) in zip(("one", "two"), bounds, strict=True):
        assert run("backup", "verify", place, name)["name"] == name
        for target in (f"slatedb+file://{tmp_path}/{name}", f"slatedb+{backups}-{name}"):
            assert run("restore", place, name, "--to", target)["url"] == target
            with penstock.open(target, create=False) as back:
                assert back.check().ok
                payloads = [each.payload for each in back.browse("q", limit=10_000)]
                assert payloads == [b"%d" % n for n in range(len(payloads))]
                assert low <= len(payloads) <= high
                back.send("q", b"it goes on")
            again = cli("restore", place, name, "--to", target)
            assert "is not empty" in again.output


def test_an_owner_that_removes_its_log_meanwhile(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(place_at("s3://some/store") if "s3:" in store else Directory(tmp_path))
    real = kind.read
    gone: list[str] = []
    with penstock.open(store) as owner:
        owner.create_queue("q")
        publish(owner, 0, 300)

        def read(place: Any, name: str) -> Any:
            if name.startswith("wal/") and not gone:
                gone.append(max(place.sizes("wal")))
                # The owner writes the rows of its log to a file of rows.
                for number in range(300):
                    owner.send("q", b"%d" % number)
                wait_until(lambda: collected(store, gone[0]), seconds=30)
            return real(place, name)

        monkeypatch.setattr(kind, "read", read)
        run("backup", "create", tmp_path / "place", "--url", store)
        assert gone
        run("restore", tmp_path / "place", "--to", tmp_path / "back")
        assert waiting(f"slatedb+file://{tmp_path}/back") == 600
        location = locate(store)
        admin = AdminBuilder(location.path, location.store()).build()  # type: ignore[union-attr]
        assert call(admin.list_checkpoints("penstock-backup"), 60) == []


def collected(store: str, name: str) -> bool:
    """Have SlateDB remove objects that it needs no more, however young; say whether one is gone."""
    location = locate(store)
    admin = AdminBuilder(location.path, location.store()).build()  # type: ignore[union-attr]
    now = GarbageCollectorDirectoryOptions(min_age_ms=0, dry_run=False)
    call(
        admin.run_gc_once(
            GarbageCollectorOptions(
                manifest_options=now,
                wal_options=now,
                compacted_options=now,
                compactions_options=now,
                disable_boundary_files=True,
            )
        ),
        60,
    )
    return name not in place_of(location).sizes("wal")  # type: ignore[arg-type]


def test_a_restore_that_is_broken_off_is_not_taken_for_a_store(store: str, url: str) -> None:
    with penstock.open(store) as owner:
        owner.create_queue("q")
        publish(owner, 0, 10)
    target = f"{url}-target"
    with held_objects(store) as held:
        copy = [(name, b"".join(held.place.read(name))) for name in held.names]

    def fill(place: Place) -> None:
        for name, body in copy[:-1]:
            place.write(name, io.BytesIO(body))
            # As a kill would leave it.
            with pytest.raises(StoreDamaged, match="manifest"):
                penstock.open(target)
        raise StorageFailed("the bucket is lost")

    with pytest.raises(StorageFailed, match="lost"), fill_objects(target) as place:
        fill(place)
    assert place.sizes() == {}


def test_what_is_refused(
    store: str, bucket: str, backups: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreMismatch, match=r"holds no store|identity"), held_objects(store):
        pass
    assert "a place on S3 is s3://BUCKET/PREFIX" in cli("backup", "list", "s3://").output
    assert cli("backup", "list", backups).output == "no backups\n"
    missing = cli("backup", "create", "s3://no-such-bucket-here/x", "--url", store)
    assert missing.exit_code == 1
    with penstock.open(store) as owner, pytest.raises(InvalidInput, match="penstock backup create"):
        owner.checkpoint(tmp_path / "copy")
    run("backup", "create", backups, "--url", store)
    refused = cli("restore", backups, "--to", f"rocksdb:{tmp_path}/back")
    assert "is of a slatedb store" in refused.output
    monkeypatch.setenv("AWS_ALLOW_HTTP", "false")
    assert "set AWS_ALLOW_HTTP=true" in cli("backup", "list", backups).output


def test_an_owner_that_is_served_is_backed_up_through_its_server(store: str, backups: str) -> None:
    with running(store, native="127.0.0.1:0", backup_directory=backups) as server:
        server.broker.create_queue("q")
        server.broker.send("q", b"one")
        name = run("backup", "create", "--url", server.location("native"))["name"]
        assert server.batcher.backups.last_ms
        copied = cli("backup", "copy", "plain", "--url", server.location("native"))
        assert "penstock backup create makes an incremental backup there" in copied.output
    assert run("backup", "verify", backups)["name"] == name


class BreaksOff(io.BytesIO):
    """A file whose disk fails after its first piece."""

    def read(self, size: int | None = -1, /) -> bytes:
        piece = super().read(size)
        if not piece:
            raise OSError(5, "Input/output error")
        return piece


def test_a_file_that_is_broken_off_is_not_there(place: str) -> None:
    files = place_at(place)
    with pytest.raises(StorageFailed, match="Input/output error"):
        files.write("files/one", BreaksOff(b"x" * 100))
    assert files.sizes() == {}
    files.delete("files/one")
    files.write("files/one", io.BytesIO(b""))
    files.write("two", io.BytesIO(b"22"))
    assert files.sizes() == {"files/one": 0, "two": 2}
    assert files.sizes("files") == {"files/one": 0}
    assert b"".join(files.read("two")) == b"22"
