"""A store of which files are missing or damaged is refused, and left as it was to the last byte."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

import penstock
from penstock.cli.main import cli as main
from penstock.engines import Shape
from penstock.engines.rocksdb import RocksEngine
from penstock.engines.rocksdb.check import check_log, read_records
from penstock.engines.rocksdb.files import creation
from penstock.errors import StoreDamaged, StoreLocked, StoreMismatch

if TYPE_CHECKING:
    from pathlib import Path

TABLES = {"default": Shape.SYSTEM, "things": Shape.VALUES}
KINDS = {
    "the marker": "PENSTOCK",
    "CURRENT": "CURRENT",
    "MANIFEST": "MANIFEST-*",
    "OPTIONS": "OPTIONS-*",
    "IDENTITY": "IDENTITY",
    "the settings of the binding": "rocksdict-config.json",
    "a log": "*.log",
    "an SST": "*.sst",
}
KILLED = """
import os, sys
import penstock

broker = penstock.open("rocksdb:" + sys.argv[1], background=False)
for number in range(int(sys.argv[2])):
    broker.send("q", b"%d" % number)
os._exit(0)
"""


def kill_after_sending(store: Path, count: int) -> None:
    """Have a process send messages and end without closing the store."""
    subprocess.run([sys.executable, "-c", KILLED, str(store), str(count)], check=True, timeout=60)


def tree(path: Path) -> dict[str, str]:
    """Hash every file."""
    return {
        str(each.relative_to(path)): hashlib.sha256(each.read_bytes()).hexdigest()
        for each in path.rglob("*")
        if each.is_file()
    }


@pytest.fixture(scope="module", params=["indexed", "buckets"])
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return a store with messages in files of rows and in the log, whose process was killed."""
    path = tmp_path_factory.mktemp("made") / "store"
    with penstock.open(f"rocksdb:{path}?design={request.param}", background=False) as broker:
        broker.create_queue("q")
        for number in range(20):
            broker.send("q", b"%d" % number)
    kill_after_sending(path, 20)
    assert list(path.glob("*.sst"))
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


def depth(path: Path) -> int:
    with penstock.open(f"rocksdb:{path}", background=False) as broker:
        assert broker.check().ok
        return broker.stats("q").available


def refused(path: Path, *saying: str) -> None:
    """Open three times, as a supervisor's restarts would: nothing may change."""
    before = tree(path)
    for _ in range(3):
        with pytest.raises(StoreDamaged) as caught:
            penstock.open(f"rocksdb:{path}", background=False)
        assert tree(path) == before
        for each in (*saying, "Restore a backup", f"penstock salvage rocksdb:{path} TARGET"):
            assert each in str(caught.value)


# --- files that are missing -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_is_named(store: Path, kind: str) -> None:
    for each in store.glob(KINDS[kind]):
        each.unlink()
    refused(store, KINDS[kind].partition("*")[0], "missing")


def test_every_file_of_rows_is_missed(store: Path) -> None:
    for each in sorted(store.glob("*.sst")):
        aside = each.rename(store.parent / each.name)
        refused(store, f"{each.name} is missing")
        aside.rename(each)
    assert depth(store) == 40


@pytest.mark.parametrize("count", [2, 3])
def test_several_missing_files(store: Path, count: int) -> None:
    for patterns in combinations(KINDS.values(), count):
        gone = [each for pattern in patterns for each in store.glob(pattern)]
        aside = {each: each.rename(store.parent / each.name) for each in gone}
        before = tree(store)
        with pytest.raises(StoreDamaged, match="missing"):
            penstock.open(f"rocksdb:{store}", background=False)
        assert tree(store) == before
        for each, place in aside.items():
            place.rename(each)


def test_whatever_is_left_of_a_store_is_not_made_anew(store: Path) -> None:
    for each in sorted(store.iterdir()):
        if each.name not in {"LOCK", "LOG", "PENSTOCK-OWNER"}:
            each.unlink()
    before = tree(store)
    with pytest.raises((StoreDamaged, StoreMismatch)):
        penstock.open(f"rocksdb:{store}", background=False)
    assert tree(store) == before


@pytest.mark.parametrize("name", ["CURRENT", "MANIFEST-*", "*.sst"])
@pytest.mark.parametrize("how", ["emptied", "cut"])
def test_a_file_that_is_too_short(store: Path, name: str, how: str) -> None:
    path = max(store.glob(name))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 if how == "cut" else 0])
    refused(store)


def test_a_manifest_that_has_lost_its_last_records_is_refused(tmp_path: Path) -> None:
    """Cut before the record of a flush, it would have the files of rows removed as strangers."""
    engine = RocksEngine(tmp_path / "store", TABLES)
    put(engine, b"k", b"v")
    # A checkpoint writes what is in memory to files of rows.
    engine.checkpoint(tmp_path / "copy")
    engine.close()
    (manifest,) = (tmp_path / "store").glob("MANIFEST-*")
    data = manifest.read_bytes()
    ends = [end for end, _ in read_records(data)]
    # The last records: the table is made, the flush is done, older logs are let go of.
    before = tree(tmp_path / "store")
    for cut in range(ends[-3], ends[-2]):
        manifest.write_bytes(data[:cut])
        with pytest.raises(StoreDamaged, match=r"a write-ahead log .* is missing"):
            RocksEngine(tmp_path / "store", TABLES)
    manifest.write_bytes(data)
    assert tree(tmp_path / "store") == before
    manifest.write_bytes(data[: ends[-2]])
    engine = RocksEngine(tmp_path / "store", TABLES)
    assert engine.table("things").get(b"k") == b"v"
    engine.close()


def test_a_flipped_byte_anywhere_in_the_manifest(store: Path) -> None:
    current = (store / "CURRENT").read_text().strip()
    data = (store / current).read_bytes()
    for place in range(0, len(data), 97):
        (store / current).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        before = tree(store)
        with pytest.raises(StoreDamaged):
            penstock.open(f"rocksdb:{store}", background=False)
        assert tree(store) == before
    (store / current).write_bytes(data)
    assert depth(store) == 40


def test_a_file_of_rows_that_rocksdb_itself_refuses(store: Path) -> None:
    for table in store.glob("*.sst"):
        table.write_bytes(bytes(table.stat().st_size))
    refused(store, "Corruption")


# --- the log --------------------------------------------------------------------------------------


def put(engine: RocksEngine, key: bytes, value: bytes) -> None:
    batch = engine.batch()
    batch.put(key, value, engine.table("things").family)
    engine.commit(batch)


def killed(path: Path, copy: Path, values: list[bytes], *, synced: int) -> Path:
    """Put values into a new database and copy it as a killed process would leave it.

    The first so many were synced. Closing a database would write what is in its log to files of
    rows.
    """
    engine = RocksEngine(path, TABLES)
    for number, value in enumerate(values):
        put(engine, b"k%02d" % number, value)
        if number + 1 == synced:
            engine.sync()
    shutil.copytree(path, copy)
    engine.close()
    return copy


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """Return a database of which the log holds five batches, of which two were synced."""
    values = [b"v" * size for size in range(1, 6)]
    return killed(tmp_path / "store", tmp_path / "logged", values, synced=2)


def log_of(path: Path) -> Path:
    (log,) = path.glob("*.log")
    return log


def keys(path: Path) -> list[bytes]:
    engine = RocksEngine(path, TABLES)
    found = [key for key, _ in engine.table("things").scan(b"", b"z", 10)]
    engine.close()
    return found


def opened_copy(logged: Path, data: bytes) -> list[bytes] | None:
    """Put bytes in the place of a store's log; return the keys, or None if it is refused."""
    copy = logged.with_name("copy")
    shutil.copytree(logged, copy)
    log_of(copy).write_bytes(data)
    before = tree(copy)
    try:
        return keys(copy)
    except StoreDamaged:
        assert tree(copy) == before
        return None
    finally:
        shutil.rmtree(copy)


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :]


def test_a_log_that_is_cut_anywhere_in_its_last_records_ends_there(logged: Path) -> None:
    data = log_of(logged).read_bytes()
    ends = [end for end, _ in read_records(data)]
    for cut in range(ends[1], len(data) + 1):
        check = check_log(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert (check.batches, check.resumes) == (whole, None)
        if cut in ends or cut % 5 == 0:
            assert opened_copy(logged, data[:cut]) == [b"k%02d" % n for n in range(whole)]


def test_a_flipped_byte_is_a_torn_tail_in_the_last_record_only(logged: Path) -> None:
    data = log_of(logged).read_bytes()
    ends = [0, *(end for end, _ in read_records(data))]
    for place in range(ends[2], len(data)):
        check = check_log(flipped(data, place))
        whole = sum(end <= place for end in ends) - 1
        assert (check.batches, check.end) == (whole, ends[whole])
        assert check.batches_behind == 4 - whole
        assert check.resumes == (ends[whole + 1] if whole < 4 else None)
        if place in ends or place % 5 == 0:
            expected = [b"k%02d" % n for n in range(4)] if whole == 4 else None
            assert opened_copy(logged, flipped(data, place)) == expected


@pytest.mark.parametrize("known", [True, False])
def test_what_was_synced_is_no_torn_tail(tmp_path: Path, known: bool) -> None:
    values = [b"v" * size for size in range(1, 6)]
    path = killed(tmp_path / "store", tmp_path / "logged", values, synced=5)
    if not known:
        # So it may be after a crash of the machine.
        (path / "PENSTOCK-SYNCED").write_bytes(bytes(20))
    data = log_of(path).read_bytes()
    ends = [end for end, _ in read_records(data)]
    torn = [data[:cut] for cut in (0, 1, ends[0], ends[3], ends[3] + 9, ends[4] - 1)]
    for wrong in (*torn, flipped(data, ends[3] + 9), flipped(data, ends[4] - 1)):
        assert (opened_copy(path, wrong) is None) is known
    assert len(opened_copy(path, data) or ()) == 5
    assert len(opened_copy(path, data + b"torn") or ()) == 5
    if known:
        log_of(path).write_bytes(data[: ends[3]])
        lost = ends[4] - ends[3]
        refused_database(path, f"4 batches .* 0 behind .*; {lost} bytes from there on were conf")


def test_zeros_behind_the_last_record_are_a_torn_tail(logged: Path) -> None:
    data = log_of(logged).read_bytes()
    everything = [b"k%02d" % n for n in range(5)]
    assert opened_copy(logged, data + bytes(100)) == everything
    assert opened_copy(logged, data + bytes(100_000)) == everything


def test_zeros_in_the_middle_are_damage(logged: Path) -> None:
    """RocksDB takes them for the end of a block, and goes on behind it without a word."""
    data = log_of(logged).read_bytes()
    ends = [end for end, _ in read_records(data)]
    holed = data[: ends[1]] + bytes(ends[3] - ends[1]) + data[ends[3] :]
    assert check_log(holed).resumes == ends[3]
    log_of(logged).write_bytes(holed)
    refused_database(logged, rf"damaged at byte {ends[1]} of .*: 2 batches .* and 1 behind")
    refused_database(logged, "with --drop-after, salvage leaves that out")


def log_with(sizes: list[int], place: Path) -> bytes:
    """Return the log of a database with values of the given sizes."""
    values = [b"%d" % number * size for number, size in enumerate(sizes)]
    copy = killed(place, place.with_name(f"{place.name}-killed"), values, synced=0)
    return log_of(copy).read_bytes()


def test_records_of_several_blocks(tmp_path: Path) -> None:
    data = log_with([100_000, 20_000, 100_000, 10, 200_000], tmp_path / "store")
    ends = [0, *(end for end, _ in read_records(data))]
    assert len(ends) == 6
    for place in range(0, len(data), 1_009):
        whole = sum(end <= place for end in ends) - 1
        check = check_log(flipped(data, place))
        assert (check.batches, check.batches_behind) == (whole, max(0, 4 - whole))
        assert (check.resumes is None) is (whole == 4)
        cut = check_log(data[:place])
        assert (cut.batches, cut.resumes) == (whole, None)


def test_a_log_that_ends_near_the_end_of_a_block(tmp_path: Path) -> None:
    """The next record begins with as few bytes as there is room for, or in the next block."""
    # A value of more than 16,383 bytes has a length of three bytes.
    around = len(log_with([20_000], tmp_path / "one")) - 20_000
    for left in (0, 1, 6, 7, 8, 18):
        data = log_with([32_768 - around - left, 60_000], tmp_path / f"store{left}")
        ends = [end for end, _ in read_records(data)]
        assert ends[0] == 32_768 - left
        assert len(ends) == 2
        for cut in range(ends[0], ends[0] + 40):
            check = check_log(data[:cut])
            assert (check.batches, check.resumes) == (1, None)


# --- several logs ---------------------------------------------------------------------------------


@pytest.fixture
def two_logs(tmp_path: Path) -> Path:
    """Return a database with two logs that both count, of ten batches each.

    They are of before and after a flush, with the MANIFEST of before: as a crash leaves them if the
    flush is not done.
    """
    path, killed = tmp_path / "store", tmp_path / "killed"
    engine = RocksEngine(path, TABLES)
    for number in range(20):
        put(engine, b"%02d" % number, b"v")
        if number == 9:
            engine.sync()
            shutil.copytree(path, killed)
            engine.checkpoint(tmp_path / "checkpoint")
    engine.sync()
    shutil.copy(log_of(path), killed)
    shutil.copy(path / "PENSTOCK-SYNCED", killed)
    engine.close()
    return killed


def count_rows(path: Path) -> int:
    engine = RocksEngine(path, TABLES)
    count = len(engine.table("things").scan(b"", b"z", 100))
    engine.close()
    return count


def both(path: Path) -> tuple[Path, Path]:
    first, second = sorted(path.glob("*.log"))
    return first, second


def test_two_logs_are_read_one_after_the_other(two_logs: Path) -> None:
    assert count_rows(two_logs) == 20


def refused_database(path: Path, match: str) -> None:
    before = tree(path)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=match):
            RocksEngine(path, TABLES)
        assert tree(path) == before


def test_the_second_of_two_logs_is_missing(two_logs: Path) -> None:
    """No MANIFEST names it yet, but changes in it were confirmed."""
    _, second = both(two_logs)
    second.unlink()
    refused_database(two_logs, f"{second.name} is missing")


def test_the_first_of_two_logs_is_missing(two_logs: Path) -> None:
    first, _ = both(two_logs)
    first.unlink()
    refused_database(two_logs, "a write-ahead log .* missing")


@pytest.mark.parametrize("back", [0, 1, 5])
def test_the_end_of_a_log_that_another_follows_is_not_a_torn_tail(
    two_logs: Path, back: int
) -> None:
    first, _ = both(two_logs)
    data = first.read_bytes()
    ends = [end for end, _ in read_records(data)]
    # At the end of a record, and within one.
    first.write_bytes(data[: ends[-2] - back])
    whole = ends[-2] if not back else ends[-3]
    refused_database(two_logs, f"damaged at byte {whole} of {first.name}: .* and 10 behind")


def test_an_emptied_log_that_another_follows(two_logs: Path) -> None:
    first, _ = both(two_logs)
    first.write_bytes(b"")
    refused_database(two_logs, f"damaged at byte 0 of {first.name}: 0 batches .* and 10 behind")


def test_a_broken_off_write_that_the_next_log_repeats_is_no_damage(two_logs: Path) -> None:
    """So it looks when a write fails for want of room, and the process goes on in a new log."""
    first, _ = both(two_logs)
    with first.open("ab") as log:
        log.write(b"\xff" * 40)
    assert count_rows(two_logs) == 20


# --- making a store -------------------------------------------------------------------------------


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """Return a directory in which making a store was broken off."""
    path = tmp_path / "unfinished"
    RocksEngine(path, TABLES, mark="indexed").close()
    (path / "PENSTOCK").rename(path / "PENSTOCK-CREATING")
    return path


def test_a_store_has_its_mark_last(tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), creation(tmp_path, "indexed"):
        assert [each.name for each in tmp_path.iterdir()] == ["PENSTOCK-CREATING"]
        with pytest.raises(StoreLocked, match="another process is making a store"):
            RocksEngine(tmp_path, TABLES)
        raise ZeroDivisionError
    assert not (tmp_path / "PENSTOCK").exists()
    penstock.open(f"rocksdb:{tmp_path}?design=buckets", background=False).close()
    assert (tmp_path / "PENSTOCK").read_text() == "buckets"
    assert not (tmp_path / "PENSTOCK-CREATING").exists()


def test_a_creation_that_was_broken_off_is_finished(unfinished: Path) -> None:
    (unfinished / "CURRENT").unlink()
    for _ in range(2):
        penstock.open(f"rocksdb:{unfinished}", background=False).close()


@pytest.mark.parametrize("when", ["before RocksDB", "sync_path"])
def test_a_process_that_is_killed_while_it_makes_a_store(tmp_path: Path, when: str) -> None:
    script = f"""
import os, sys, rocksdict
from penstock.engines.rocksdb import files
import penstock

if {when!r} == "sync_path":
    files.sync_path = lambda path: os._exit(7)
else:
    rocksdict.Rdict = lambda *arguments: os._exit(7)
penstock.open("rocksdb:" + sys.argv[1])
"""
    path = tmp_path / "store"
    ended = subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=60)
    assert ended.returncode == 7
    with pytest.raises(StoreMismatch, match="there is no store"):
        penstock.open(f"rocksdb:{path}", create=False)
    with penstock.open(f"rocksdb:{path}", background=False) as broker:
        broker.create_queue("q")
    with penstock.open(f"rocksdb:{path}", create=False, background=False) as broker:
        assert [each.name for each in broker.queues()] == ["q"]


def test_many_threads_open_one_store(tmp_path: Path) -> None:
    """One gets it, and keeps RocksDB's lock, which any other could end by looking at it."""
    path = tmp_path / "store"

    def open_it(_: int) -> penstock.Broker | None:
        try:
            return penstock.open(f"rocksdb:{path}", background=False)
        except StoreLocked:
            return None

    with ThreadPoolExecutor(8) as pool:
        (broker,) = filter(None, pool.map(open_it, range(8)))
    other = subprocess.run([sys.executable, "-c", KILLED, str(path), "0"],
                           check=False, capture_output=True, text=True, timeout=60)  # fmt: skip
    assert "StoreLocked" in other.stderr
    broker.close()


def test_what_holds_changes_is_no_broken_creation(store: Path) -> None:
    (store / "PENSTOCK").rename(store / "PENSTOCK-CREATING")
    refused(store, "PENSTOCK is missing")


def test_an_empty_mark(store: Path) -> None:
    design = (store / "PENSTOCK").read_text()
    (store / "PENSTOCK").write_text("")
    refused(store, f"should say '{design}'")


# --- commands that only read ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("queues",),
        ("stats",),
        ("browse", "q"),
        ("attempts", "q", "1"),
        ("check",),
        ("check", "--repair"),
        ("sweep",),
        ("backup", "somewhere"),
    ],
)
@pytest.mark.parametrize("there", [False, True])
def test_reading_makes_nothing(tmp_path: Path, command: tuple[str, ...], there: bool) -> None:
    path = tmp_path / "store"
    if there:
        path.mkdir()
    for url in (f"rocksdb:{path}", f"slatedb+file://{path}"):
        ended = CliRunner().invoke(main, [*command, "--store", url])
        assert ended.exit_code == 1
        assert "no store" in ended.stderr
    assert [each.name for each in tmp_path.rglob("*")] == ["store"] * there


def test_open_without_making(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/store"
    with pytest.raises(StoreMismatch, match="there is no store at"):
        penstock.open(url, create=False)
    assert not list(tmp_path.iterdir())
    penstock.open(url).close()
    penstock.open(url, create=False).close()
