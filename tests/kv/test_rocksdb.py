"""What only a directory can go through: other owners, other contents, no room, a killed process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import rocksdict
from tests.waiting import wait_until

import penstock
from penstock.engines import Shape, rocksdb
from penstock.engines.rocksdb import RocksEngine
from penstock.errors import InvalidUrl, StorageFailed, StoreDamaged, StoreLocked, StoreMismatch
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TABLES = {"default": Shape.SYSTEM, "things": Shape.VALUES}
OWNER = "PENSTOCK-OWNER"

OPEN_AND = """
import os, resource, sys
from pathlib import Path
from penstock.errors import PenstockError
from penstock.engines import Shape
from penstock.engines.rocksdb import RocksEngine

engine = RocksEngine(Path(sys.argv[1]), {"default": Shape.SYSTEM, "things": Shape.VALUES})

def put(key, value):
    batch = engine.batch()
    batch.put(key, value, engine.table("things").family)
    engine.commit(batch)
"""


@contextmanager
def process(place: Path, then: str) -> Iterator[subprocess.Popen[str]]:
    """Have another process open the directory and go on from there."""
    command = [sys.executable, "-c", OPEN_AND + then, str(place)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        try:
            yield child
        finally:
            child.kill()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


# --- one owner ------------------------------------------------------------------------------------


def test_the_owner_file_names_this_process_while_the_engine_is_open(tmp_path: Path) -> None:
    engine = RocksEngine(tmp_path, TABLES)
    owner = json.loads((tmp_path / OWNER).read_bytes())
    assert owner == {"pid": os.getpid(), "host": socket.gethostname(), "served_at": ""}
    engine.close()
    assert not (tmp_path / OWNER).exists()


def test_a_second_engine_in_this_process_is_told_to_share(tmp_path: Path) -> None:
    engine = RocksEngine(tmp_path, TABLES)
    with pytest.raises(StoreLocked, match=rf"pid {os.getpid()}\): share one broker"):
        RocksEngine(tmp_path, TABLES)
    # The one that was refused must not have taken the first one's file along.
    assert (tmp_path / OWNER).exists()
    engine.close()
    RocksEngine(tmp_path, TABLES).close()


def test_a_second_process_is_told_who_has_it(tmp_path: Path) -> None:
    with process(tmp_path, "print('open', flush=True); sys.stdin.read()") as child:
        assert said(child) == "open"
        with pytest.raises(StoreLocked, match=f"open in process {child.pid} on "):
            RocksEngine(tmp_path, TABLES)
        with pytest.raises(StoreLocked, match="one process owns a store"):
            RocksEngine(tmp_path, TABLES)


@pytest.mark.parametrize("content", [None, b"", b"not json", b'{"pid": "x"}'])
def test_a_lock_without_a_readable_owner_file_is_still_told(
    tmp_path: Path, content: bytes | None
) -> None:
    engine = RocksEngine(tmp_path, TABLES)
    (tmp_path / OWNER).unlink()
    if content is not None:
        (tmp_path / OWNER).write_bytes(content)
    with pytest.raises(StoreLocked, match="is open in another process"):
        RocksEngine(tmp_path, TABLES)
    engine.close()


def test_a_killed_owner_holds_nothing_and_its_commits_are_kept(tmp_path: Path) -> None:
    then = "put(b'k', b'not synced'); print('put', flush=True); sys.stdin.read()"
    with process(tmp_path, then) as child:
        assert said(child) == "put"
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert json.loads((tmp_path / OWNER).read_bytes())["pid"] == child.pid
    engine = RocksEngine(tmp_path, TABLES)
    assert engine.table("things").get(b"k") == b"not synced"
    assert json.loads((tmp_path / OWNER).read_bytes())["pid"] == os.getpid()
    engine.close()


def test_a_closed_engine_lets_go_for_good(tmp_path: Path) -> None:
    engine = RocksEngine(tmp_path, TABLES)
    table = engine.table("things")
    engine.close()
    # A table that is still referred to must not keep the database open.
    RocksEngine(tmp_path, TABLES).close()
    assert table.family is None


# --- what the engine refuses ----------------------------------------------------------------------


@pytest.mark.parametrize("late", ["files.SyncedLog", "FreeSpace"])
def test_an_opening_that_fails_late_lets_go_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    def refuse(*_: object) -> None:
        raise StorageFailed("too many open files")

    RocksEngine(tmp_path, TABLES).close()
    with monkeypatch.context() as patched:
        patched.setattr(f"{rocksdb.__name__}.{late}", refuse)
        # The error is kept, and with it the frames that it came through.
        with pytest.raises(StorageFailed, match="too many") as kept:
            RocksEngine(tmp_path, TABLES)
    assert not (tmp_path / OWNER).exists()
    RocksEngine(tmp_path, TABLES).close()
    assert kept.value is not None


def test_no_room_is_said_to_be_no_room(tmp_path: Path) -> None:
    then = """
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    for number in range(64):
        put(b"%d" % number, os.urandom(1 << 17))
    print("no error")
except PenstockError as error:
    print(type(error).__name__, flush=True)
os._exit(0)
"""
    with process(tmp_path, then) as child:
        assert said(child) == "DiskFull"


def test_a_place_where_no_directory_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageFailed, match="can't make the directory"):
        RocksEngine(tmp_path / "file" / "store", TABLES)


def test_a_damaged_database_is_not_taken_for_one_that_is_locked(tmp_path: Path) -> None:
    # The engine's words for it name the path, in which "lock" may be part of a word.
    place = tmp_path / "blocks"
    RocksEngine(place, TABLES).close()
    (place / "CURRENT").write_bytes(b"MANIFEST-999999\n")
    with pytest.raises(StoreDamaged, match="MANIFEST-999999 is missing"):
        RocksEngine(place, TABLES)


# --- what is in a directory -----------------------------------------------------------------------


def test_a_directory_of_other_files_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("keep me")
    with pytest.raises(StoreMismatch, match="is not empty and holds no RocksDB database"):
        penstock.open(f"rocksdb:{tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_the_directory_above_a_store_names_the_store(tmp_path: Path) -> None:
    penstock.open(f"rocksdb:{tmp_path / 'store'}").close()
    with pytest.raises(StoreMismatch, match=f"did you mean {tmp_path / 'store'}[?]"):
        penstock.open(f"rocksdb:{tmp_path}")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("//./data", "rocksdb:./data is the directory$"),
        ("//../data", "rocksdb:../data is the directory$"),
        ("///./data", "rocksdb:./data is the directory$"),
        ("//data", "rocksdb:data is the directory, or rocksdb:/data at the root$"),
        ("//host/path", "rocksdb:host/path is the directory, or rocksdb:/host/path at the root$"),
    ],
)
def test_a_url_with_a_host_is_refused_with_the_right_spelling(wrong: str, right: str) -> None:
    with pytest.raises(InvalidUrl, match=right):
        penstock.open(f"rocksdb:{wrong}")


def test_a_url_with_an_empty_host_names_an_absolute_directory(tmp_path: Path) -> None:
    penstock.open(f"rocksdb://{tmp_path}", background=False).close()
    penstock.open(f"rocksdb:{tmp_path}", background=False).close()


def test_a_file_is_no_database(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("keep me")
    with pytest.raises(StoreMismatch):
        penstock.open(f"rocksdb:{place}")
    assert place.read_text() == "keep me"


def test_a_database_that_can_not_be_read_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "CURRENT").write_bytes(b"\xffgarbage")
    with pytest.raises(StoreDamaged, match="CURRENT names no MANIFEST"):
        penstock.open(f"rocksdb:{tmp_path}")


def test_somebody_elses_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    other = rocksdict.Rdict(str(tmp_path), rocksdict.Options(raw_mode=True))
    other.create_column_family("leases", rocksdict.Options(raw_mode=True))
    other[b"theirs"] = b"kept"
    other.close()
    with pytest.raises(StoreMismatch, match=r"not a Penstock store.*default, leases"):
        penstock.open(f"rocksdb:{tmp_path}")
    other = rocksdict.Rdict(str(tmp_path))
    assert other[b"theirs"] == b"kept"
    other.close()


@pytest.mark.parametrize(("made", "asked"), [("indexed", "buckets"), ("buckets", "indexed")])
def test_a_store_of_the_other_design_is_refused(tmp_path: Path, made: str, asked: str) -> None:
    penstock.open(f"rocksdb:{tmp_path}?design={made}", background=False).close()
    with pytest.raises(StoreMismatch, match=f"of the {made} design, not {asked}"):
        penstock.open(f"rocksdb:{tmp_path}?design={asked}", background=False)
    # Without being asked for a design, the store says which it has.
    penstock.open(f"rocksdb:{tmp_path}", background=False).close()


def test_a_store_keeps_how_it_routes(tmp_path: Path) -> None:
    penstock.open(f"rocksdb:{tmp_path}", routing="pipeline", background=False).close()
    with pytest.raises(StoreMismatch, match="has routing='pipeline'"):
        penstock.open(f"rocksdb:{tmp_path}", routing="inline", background=False)
    with penstock.open(f"rocksdb:{tmp_path}", background=False) as broker:
        assert broker.log_stats().routing == "pipeline"


def identity_of(format_: int) -> bytes:
    fields = {"design": "indexed", "store_id": 1, "created_at_ms": 0, "routing": "inline"}
    return msgspec.msgpack.encode({"format": format_, **fields})


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        (identity_of(format_=4), "format 4; .* reads formats 2 and 3: use a newer one"),
        (identity_of(format_=1), "format 1; .* reads formats 2 and 3: use the one that made it"),
        (b"\xc1", "identity record does not decode"),
    ],
)
def test_an_identity_of_tomorrow_or_of_nobody_is_refused(
    tmp_path: Path, identity: bytes, says: str
) -> None:
    penstock.open(f"rocksdb:{tmp_path}", background=False).close()
    engine = RocksEngine(tmp_path, DESIGNS["indexed"])
    batch = engine.batch()
    batch.put(b"meta", identity, engine.table("default").family)
    engine.commit(batch)
    engine.close()
    with pytest.raises(StoreMismatch, match=says):
        penstock.open(f"rocksdb:{tmp_path}", background=False)
    # A store that was refused is let go of.
    RocksEngine(tmp_path, DESIGNS["indexed"]).close()


def test_memory_is_set_by_the_url_whenever_a_store_is_opened(tmp_path: Path) -> None:
    def options() -> str:
        newest = max(tmp_path.glob("OPTIONS-*"), key=lambda path: int(path.name[8:]))
        return newest.read_text()

    payloads = [bytes([number]) * 1_000_000 for number in range(12)]
    with penstock.open(f"rocksdb:{tmp_path}?write_buffer_mb=8&block_cache_mb=9") as broker:
        broker.create_queue("q")
        for payload in payloads:
            broker.send("q", payload)
        assert "db_write_buffer_size=8388608" in options()
        # Twelve megabytes do not fit in the buffers.
        wait_until(lambda: list(tmp_path.glob("*.sst")))
    with penstock.open(f"rocksdb:{tmp_path}") as broker:
        assert "db_write_buffer_size=67108864" in options()
        assert [one.payload for one in broker.claim("q", limit=12)] == payloads


def test_files_of_other_settings_stay_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = dict.fromkeys(Shape, (4, False, False))
    with monkeypatch.context() as tuned:
        tuned.setattr(rocksdb, "_TUNING", plain)
        engine = RocksEngine(tmp_path, TABLES)
        batch = engine.batch()
        for number in range(2_000):
            key = number.to_bytes(8, "big")
            batch.put(key, key * 100, engine.table("things").family)
        engine.commit(batch)
        engine.close()
    (path,) = (each for each in tmp_path.glob("*.sst"))
    assert path.stat().st_size > 1_000_000
    engine = RocksEngine(tmp_path, TABLES)
    things = engine.table("things")
    assert len(things.scan(b"", b"\xff", 3_000)) == 2_000
    assert things.get(bytes(8)) == bytes(800)
    engine.close()


# --- views ----------------------------------------------------------------------------------------


def test_scans_of_a_view_step_over_deleted_keys_once_and_miss_nothing(tmp_path: Path) -> None:
    engine = RocksEngine(tmp_path, TABLES)
    family, kept = engine.table("things").family, [b"%03d" % n for n in (7, 20, 21, 60, 90)]
    batch = engine.batch()
    for number in range(100):
        batch.put(b"%03d" % number, b"", family)
    for number in range(100):
        if b"%03d" % number not in kept:
            batch.delete(b"%03d" % number, family)
    engine.commit(batch)
    view = engine.view()
    things: Any = view.table("things")
    seeks: list[bytes] = []
    rows = things._iterator

    class Noting:
        key, value, next, status = rows.key, rows.value, rows.next, rows.status

        def seek(self, key: bytes) -> None:
            seeks.append(key)
            rows.seek(key)

    things._iterator = Noting()
    # In an order that meets each gap from its middle, from its beginning and again.
    places = [n * 37 % 100 for n in range(100)] * 2
    for begin in places:
        for end in (begin + 1, begin + 13, 100):
            found = things.scan(b"%03d" % begin, b"%03d" % end, 3)
            expected = [key for key in kept if b"%03d" % begin <= key < b"%03d" % end][:3]
            assert [key for key, _ in found] == expected, (begin, end)
    seeks.clear()
    assert things.scan(b"095", b"099", 16) == things.scan(b"061", b"089", 16) == []
    assert not seeks
    view.close()
    engine.close()
