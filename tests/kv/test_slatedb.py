"""What only SlateDB has: its places, other owners, its memory of late, the way it is called."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from slatedb.uniffi import Db, DbBuilder, WriteBatch
from tests.waiting import wait_until

import penstock
from penstock import Message
from penstock.engines import Shape, slatedb
from penstock.engines.memory import Overlay
from penstock.engines.slatedb import SlateEngine
from penstock.engines.slatedb.binding import (
    CallTimeout,
    SlateLocation,
    call,
    call_all,
    make_batch,
    parse_location,
)
from penstock.engines.slatedb.objects import NoDatabase, ReaderMoved, SlateReader, peek
from penstock.engines.slatedb.tables import SILENCE_S, UNKNOWN, ReadCache
from penstock.errors import (
    InvalidInput,
    InvalidUrl,
    StorageFailed,
    StoreDamaged,
    StoreFenced,
    StoreMismatch,
)
from penstock.readers import open_reader
from penstock.store.kv.state import FORMAT
from penstock.urls import DESIGNS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.engines import Table

TABLES = {"default": Shape.SYSTEM, "things": Shape.VALUES}


@pytest.fixture
def place(tmp_path: Path) -> SlateLocation:
    return SlateLocation("file", str(tmp_path / "db"), "")


@pytest.fixture
def engine(place: SlateLocation) -> Iterator[SlateEngine]:
    engine = SlateEngine(place, TABLES)
    yield engine
    engine.close()


def put(engine: Any, name: str = "things", **rows: str | None) -> None:
    batch = engine.batch()
    for key, value in rows.items():
        if value is None:
            batch.delete(key.encode(), engine.table(name).family)
        else:
            batch.put(key.encode(), value.encode(), engine.table(name).family)
    engine.commit(batch)


# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("slatedb+file:///a/b", SlateLocation("file", "/a/b", "")),
        ("slatedb+file:///a%20b/", SlateLocation("file", "/a b", "")),
        ("slatedb+s3://some-bucket", SlateLocation("s3", "some-bucket", "")),
        ("slatedb+s3://some.bucket/", SlateLocation("s3", "some.bucket", "")),
        ("slatedb+s3://bucket1/a/b/", SlateLocation("s3", "bucket1", "a/b")),
    ],
)
def test_a_url_names_a_place(url: str, expected: SlateLocation) -> None:
    scheme, _, rest = url.partition(":")
    assert parse_location(scheme, rest, {}) == expected


@pytest.mark.parametrize(
    "url",
    [
        "slatedb+file:",
        "slatedb+file:relative",
        "slatedb+file://host/dir",
        "slatedb+file:///",
        "slatedb+file://./x",
        "slatedb+file:///./x",
        "slatedb+file:///tmp/../x",
        "slatedb+s3:",
        "slatedb+s3:///prefix",
        "slatedb+s3://b",
        "slatedb+s3://Bucket/x",
        "slatedb+s3://bucket/a//b",
        "slatedb+s3://bucket/../b",
        "slatedb+ftp://bucket/x",
        "slatedb+file:///tmp/x?flush_ms=fast",
        "slatedb+file:///tmp/x?flush_ms=99999",
        "slatedb+file:///tmp/x?other=1",
        "rocksdb:x?flush_ms=1",
    ],
)
def test_a_url_that_names_no_place(url: str) -> None:
    with pytest.raises(InvalidUrl):
        penstock.open(url)


def test_a_relative_directory_is_refused_with_the_right_spelling() -> None:
    with pytest.raises(InvalidUrl, match=f"slatedb\\+file://{Path.cwd()}/x would be one"):
        penstock.open("slatedb+file://./x")


def test_importing_penstock_does_not_load_slatedb() -> None:
    code = "import sys, penstock; sys.exit('slatedb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- what is there --------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_is(place: SlateLocation) -> None:
    assert peek(place, "default", b"k") is None
    with pytest.raises(NoDatabase):
        SlateReader(place)


def test_a_directory_of_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("keep me")
    with pytest.raises(StoreMismatch, match="holds no SlateDB database"):
        penstock.open(f"slatedb+file://{tmp_path}")
    with pytest.raises(StoreMismatch, match="holds no SlateDB database"):
        penstock.open(f"slatedb+file://{tmp_path}/letter.txt")
    with pytest.raises(StoreMismatch):
        open_reader(f"slatedb+file://{tmp_path}")
    assert [each.name for each in tmp_path.iterdir()] == ["letter.txt"]


def test_somebody_elses_database_is_refused_and_not_taken_over(place: SlateLocation) -> None:
    theirs: Db = call(DbBuilder("", place.store()).build(), SILENCE_S)
    call(theirs.put(b"theirs", b"kept"), SILENCE_S)
    call(theirs.flush(), SILENCE_S)
    with pytest.raises(StoreMismatch, match="not a Penstock store"):
        penstock.open(str(place))
    # They are still the owner.
    call(theirs.put(b"more", b"kept"), SILENCE_S)
    call(theirs.flush(), SILENCE_S)
    call(theirs.shutdown(), SILENCE_S)


def test_a_damaged_manifest_is_told_of(place: SlateLocation, tmp_path: Path) -> None:
    SlateEngine(place, TABLES).close()
    for manifest in (tmp_path / "db" / "manifest").iterdir():
        manifest.write_bytes(b"garbage")
    with pytest.raises(StoreDamaged, match="can't be read"):
        penstock.open(str(place))


@pytest.mark.parametrize("changes", [{"format": FORMAT + 1}, {"design": "shoebox"}])
def test_a_store_of_tomorrow_is_refused_and_not_taken_over(
    place: SlateLocation, changes: dict[str, object]
) -> None:
    penstock.open(str(place), background=False).close()
    owner = SlateEngine(place, DESIGNS["buckets"])
    record = owner.table("default").get(b"meta")
    assert record is not None
    identity = {**msgspec.msgpack.decode(record), **changes}
    batch = owner.batch()
    batch.put(b"meta", msgspec.msgpack.encode(identity), owner.table("default").family)
    owner.commit(batch)
    owner.sync()
    with pytest.raises(StoreMismatch, match="use a newer one"):
        penstock.open(str(place))
    put(owner, "default", still="the owner")
    owner.sync()
    owner.close()


def test_a_layout_of_tomorrow_is_refused(place: SlateLocation) -> None:
    owner = SlateEngine(place, TABLES)
    layout = msgspec.msgpack.encode((2, ["default"]))
    call(owner._db.write(make_batch([(b"\0layout", layout)])), SILENCE_S)
    owner.sync()
    with pytest.raises(StoreMismatch, match=r"layout 2.*use a newer one"):
        peek(place, "default", b"meta")
    owner.close()


def test_buckets_are_the_default_and_a_design_is_kept(place: SlateLocation) -> None:
    with penstock.open(str(place), background=False) as broker:
        assert broker.info().design == "buckets"
    with pytest.raises(StoreMismatch, match="of the buckets design, not indexed"):
        penstock.open(f"{place}?design=indexed")
    with pytest.raises(StoreMismatch, match="has routing='inline'"):
        penstock.open(str(place), routing="pipeline")


def test_tables_keep_their_bytes_when_more_come(place: SlateLocation) -> None:
    engine = SlateEngine(place, ["a", "b"])
    put(engine, "a", k="of a")
    put(engine, "b", k="of b")
    engine.close()
    engine = SlateEngine(place, ["b", "c", "a"])
    put(engine, "c", k="of c")
    assert [engine.table(name).get(b"k") for name in "abc"] == [b"of a", b"of b", b"of c"]
    engine.close()


# --- owners ---------------------------------------------------------------------------------------


def test_a_second_engine_fences_the_first(place: SlateLocation) -> None:
    first = SlateEngine(place, TABLES)
    told = threading.Event()
    first.on_lost(lambda _: told.set())
    put(first, k="durable")
    first.sync()
    put(first, k="not durable")
    second = SlateEngine(place, TABLES)
    with pytest.raises(StoreFenced, match="another broker has opened"):
        first.sync()
    for verb in (
        lambda: first.table("things").get(b"k"),
        lambda: first.table("things").scan(b"", b"z", 1),
        lambda: put(first, k="late"),
        first.view,
        first.sync,
    ):
        with pytest.raises(StoreFenced):
            verb()
    assert told.wait(60)
    first.close()
    assert second.table("things").get(b"k") == b"durable"
    second.close()


def test_an_engine_that_does_nothing_finds_out_by_itself(place: SlateLocation) -> None:
    first = SlateEngine(place, TABLES)
    told = threading.Event()
    first.on_lost(lambda _: told.set())
    second = SlateEngine(place, TABLES)
    assert told.wait(60)
    with pytest.raises(StoreFenced):
        first.check()
    first.close()
    second.close()


def test_a_copy_is_refused(engine: SlateEngine, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="can't be copied"):
        engine.checkpoint(tmp_path / "copy")


def test_a_long_log_is_made_short(place: SlateLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engines.slatedb._LONG_LOG", 5)
    engine = SlateEngine(place, TABLES)
    for number in range(6):
        put(engine, **{f"k{number}": "v"})
        engine.sync()
    for _ in range(1_200):
        if engine._log_objects < 5:
            break
        threading.Event().wait(0.05)
    assert engine._log_objects < 5
    engine.close()
    engine = SlateEngine(place, TABLES)
    assert len(engine.table("things").scan(b"", b"z", 100)) == 6
    engine.close()


# --- readers --------------------------------------------------------------------------------------


def test_a_reader_keeps_to_one_moment(engine: SlateEngine, place: SlateLocation) -> None:
    put(engine, a="1", b="2")
    put(engine, c="not durable")
    engine.sync()
    reader = SlateReader(place)
    put(engine, a="changed", b=None, d="new")
    engine.sync()
    rows = reader.table("things").scan(b"", b"z", 10)
    assert list(rows) == [(b"a", b"1"), (b"b", b"2"), (b"c", b"not durable")]
    reader.close()
    again = SlateReader(place)
    assert again.table("things").multi_get([b"a", b"b"]) == [b"changed", None]
    again.close()
    with pytest.raises(StorageFailed):
        again.table("things").get(b"a")


def test_a_reader_that_has_moved_on(engine: SlateEngine, place: SlateLocation) -> None:
    put(engine, a="1")
    engine.sync()
    for pinned in (True, False):
        reader = SlateReader(place, pinned=pinned)
        # As if the library had come to the owner's next write meanwhile.
        reader._moment -= 1
        if pinned:
            with pytest.raises(ReaderMoved):
                reader.table("things").get(b"a")
        else:
            assert reader.table("things").get(b"a") == b"1"
        reader.close()


def test_a_reader_refuses_when_its_moment_is_long_ago(
    engine: SlateEngine, place: SlateLocation
) -> None:
    reader = SlateReader(place)
    reader._until_s = 0
    with pytest.raises(StorageFailed, match="minutes ago: open it again"):
        reader.table("things").get(b"a")
    reader.close()


def test_what_is_done_to_an_overlay_stays_in_it(engine: SlateEngine, place: SlateLocation) -> None:
    put(engine, a="1", b="2", c="3", d="4")
    engine.sync()
    overlay = Overlay(SlateReader(place), TABLES)
    before = overlay.view()
    put(overlay, a="changed", b=None, e="new")
    batch = overlay.batch()
    batch.delete_range(b"c", b"d", overlay.table("things").family)
    overlay.commit(batch)
    table: Table = overlay.table("things")
    changed = [(b"a", b"changed"), (b"d", b"4"), (b"e", b"new")]
    assert list(table.scan(b"", b"z", 10)) == changed
    assert list(table.scan_back(b"", b"z", 2)) == changed[:0:-1]
    assert list(table.scan(b"", b"z", 1)) == changed[:1]
    assert table.multi_get([b"b", b"c", b"d"]) == [None, None, b"4"]
    assert [key for key, _ in before.table("things").scan(b"", b"z", 9)] == [b"a", b"b", b"c", b"d"]
    before.close()
    overlay.close()
    assert engine.table("things").get(b"a") == b"1"


# --- what is remembered of late -------------------------------------------------------------------


def test_what_was_written_of_late_is_read_without_the_library(
    engine: SlateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(engine, a="1", b="2")
    put(engine, b=None)
    monkeypatch.setattr(engine._rows, "get_all", lambda keys: pytest.fail(f"read {keys}"))
    assert engine.table("things").multi_get([b"a", b"b", b"a"]) == [b"1", None, b"1"]


def test_the_cache_keeps_to_its_bytes_and_forgets_the_oldest() -> None:
    cache = ReadCache(2_000)
    cache.put([(b"%02d" % n, b"x" * 78) for n in range(20)])
    assert cache.get_all([b"00", b"09"]) == [UNKNOWN, UNKNOWN]
    assert cache.get_all([b"10", b"19"]) == [b"x" * 78] * 2
    cache.put([(b"10", b"again")])
    cache.put([(b"new", b"x" * 78)])
    assert cache.get_all([b"10", b"11"]) == [b"again", UNKNOWN]
    cache.put([(b"10", b"x" * 1_000)])
    assert cache.get_all([b"10"])[0] is UNKNOWN


def test_what_was_read_before_a_commit_is_not_remembered_after_it() -> None:
    cache = ReadCache(2_000)
    commits = cache.commits
    cache.begin()
    cache.put([(b"k", b"old")], commits)
    assert cache.get_all([b"k"])[0] is UNKNOWN
    during = cache.commits
    cache.put([(b"k", b"new")])
    cache.put([(b"k", b"old")], during)
    assert cache.get_all([b"k"])[0] == b"new"
    cache.put([(b"other", None)], cache.commits)
    assert cache.get_all([b"other"])[0] is None


@pytest.mark.parametrize("step", [1, 2, 1_000])
def test_keys_that_lie_close_are_read_as_those_that_do_not(place: SlateLocation, step: int) -> None:
    engine = SlateEngine(place, TABLES)
    keys = [b"k" + (n * step).to_bytes(8, "big") for n in range(50)]
    batch = engine.batch()
    for key in keys[::2]:
        batch.put(key, key, engine.table("things").family)
    engine.commit(batch)
    view = engine.view()
    asked = [*reversed(keys), keys[0], b"short"]
    expected = {key: key for key in keys[::2]}
    assert view.table("things").multi_get(asked) == [expected.get(key) for key in asked]
    view.close()
    engine.close()


# --- how the library is called --------------------------------------------------------------------


def test_a_batch_has_the_rows_that_the_bindings_own_methods_would_write(
    place: SlateLocation,
) -> None:
    rows = [(b"a", b"1"), (b"\0nul", b"x\0y"), (b"empty", b""), (b"a", b"2"), (b"gone", b"x")]
    theirs = WriteBatch()
    for key, value in rows:
        theirs.put(key, value)
    theirs.delete(b"gone")
    found = []
    for name, batch in (("one", make_batch([*rows, (b"gone", None)])), ("two", theirs)):
        db: Db = call(DbBuilder(name, place.store()).build(), SILENCE_S)
        call(db.write(batch), SILENCE_S)
        keys = [b"a", b"\0nul", b"empty", b"gone"]
        found.append(call_all([db.get(key) for key in keys], SILENCE_S))
        call(db.shutdown(), SILENCE_S)
    assert found == [[b"2", b"x\0y", b"", None]] * 2


def test_an_engine_may_be_used_by_who_runs_an_event_loop(engine: SlateEngine) -> None:
    async def use() -> bytes | None:
        put(engine, k="v")
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is not None
        return engine.view().table("things").get(b"k")

    assert asyncio.run(use()) == b"v"


def test_an_error_of_one_call_ends_them_all() -> None:
    ended = []

    async def fine() -> int:
        try:
            return int(await asyncio.get_running_loop().create_future())
        finally:
            ended.append("fine")

    async def bad() -> int:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        call_all([fine(), bad()], 1)
    assert ended == ["fine"]


def test_silence_has_an_end() -> None:
    async def silent() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(CallTimeout):
        call(silent(), 0.05)


# --- objects that are missing ---------------------------------------------------------------------


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of 100 messages as a killed broker leaves it: in files of rows, and in the log."""
    monkeypatch.setattr(slatedb, "_LONG_LOG", 10)
    store = tmp_path / "owned"
    with penstock.open(f"slatedb+file://{store}") as broker:
        broker.create_queue("q")
        for at in range(20):
            broker.publish([Message(b"x", {"queue": "q"}) for _ in range(5)])
            if at == 12:
                wait_until(lambda: any((store / "compacted").glob("*.sst")))
        shutil.copytree(store, tmp_path / "store")
    return tmp_path / "store"


def test_what_a_killed_broker_leaves_is_whole(killed: Path) -> None:
    with penstock.open(f"slatedb+file://{killed}") as broker:
        assert broker.stats("q").available == 100


@pytest.mark.parametrize("kind", ["manifest", "compacted", "wal"])
def test_a_store_with_objects_missing_is_refused_and_left_alone(killed: Path, kind: str) -> None:
    url = f"slatedb+file://{killed}"
    gone = sorted((killed / kind).iterdir())
    # The last one of the log could never have been written, for all that anybody can tell.
    for each in gone[-3:-1] if kind == "wal" else gone:
        each.unlink()
    before = contents(killed)
    for _ in range(3):
        with pytest.raises(StoreDamaged, match=f"{kind}/.*Nothing was changed.*salvage"):
            penstock.open(url)
        with pytest.raises(StoreDamaged, match=f"{kind}/"):
            penstock.open_reader(url)
    assert contents(killed) == before


def contents(place: Path) -> dict[Path, bytes]:
    return {each: each.read_bytes() for each in place.rglob("*") if each.is_file()}
