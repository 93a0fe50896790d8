"""Engines on damaged files: what is read is right, or reading raises; never silently less."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from hashlib import sha256
from typing import TYPE_CHECKING

import pytest
from tests.damaging import compact, files_of, flip

from penstock.engines import Shape, damage_error
from penstock.engines.rocksdb import RocksEngine
from penstock.engines.slatedb import SlateEngine
from penstock.engines.slatedb.binding import SlateLocation
from penstock.errors import StorageFailed, StoreDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.engines import Engine, Table

SHAPES = {"default": Shape.SYSTEM} | {shape.name: shape for shape in Shape}
LAST = b"\xff" * 9
ROWS = 1_000


def row(number: int) -> tuple[bytes, bytes]:
    return number.to_bytes(8, "big"), sha256(b"%d" % number).digest() + b"-" * 60


ALL = dict(map(row, range(ROWS)))


def fill(engine: Engine, name: str) -> None:
    batch = engine.batch()
    for key, value in ALL.items():
        batch.put(key, value, engine.table(name).family)
    engine.commit(batch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a database with the same rows in a table of each shape."""
    place: Path = tmp_path_factory.mktemp("whole") / "store"
    engine = RocksEngine(place, SHAPES)
    for name in SHAPES:
        fill(engine, name)
    engine.close()
    compact(place, SHAPES)
    return place


def in_pages(scan: Callable[[bytes, bytes, int], object], page: int) -> Callable[[], object]:
    """Read everything by pages, forward or back."""

    def read() -> object:
        found: dict[bytes, bytes] = {}
        begin, end = b"", LAST
        while rows := list(scan(begin, end, page)):  # type: ignore[call-overload]
            found.update(rows)
            if rows[0] == row(len(found) - len(rows)):
                begin = rows[-1][0] + b"\0"
            else:
                end = rows[-1][0]
        return found

    return read


def readings(table: Table) -> Iterator[tuple[str, Callable[[], object]]]:
    """Give every way to read all of a table, each for the same answer."""
    for page in (7, 900, 10_000):
        yield f"scan by {page}", in_pages(table.scan, page)
        yield f"scan back by {page}", in_pages(table.scan_back, page)
    yield "get", lambda: {key: table.get(key) for key in ALL}
    yield "multi_get", lambda: dict(zip(ALL, table.multi_get(list(ALL)), strict=True))


def judge(table: Table, name: str) -> set[bool]:
    """Read a table in all ways; return whether it could be read."""
    outcomes = set()
    for how, read in readings(table):
        try:
            assert read() == ALL, how
        except StoreDamaged as error:
            met = error
            outcomes.add(False)
        else:
            outcomes.add(True)
            continue
        assert (met.table, met.begin < met.end) == (name, True), how
        assert repr(name) in str(met)
    return outcomes


@pytest.mark.parametrize("shape", Shape)
def test_a_flipped_byte_anywhere_in_a_file_is_harmless_or_raises(
    whole: Path, tmp_path: Path, shape: Shape
) -> None:
    (file,) = files_of(whole)[shape.name]
    size = file.stat().st_size
    # Data from the front; filter, index, properties and footer are in the last two thousand bytes.
    places = [size // 2, size // 7, *range(size - 4_000, size, 450), size - 10]
    seen: set[bool] = set()
    for at in places:
        place = tmp_path / str(at)
        shutil.copytree(whole, place)
        flip(place / file.name, at)
        try:
            engine = RocksEngine(place, SHAPES)
        except StorageFailed:
            continue
        outcomes = judge(engine.table(shape.name), shape.name)
        view = engine.view()
        outcomes |= judge(view.table(shape.name), shape.name)
        assert judge(engine.table("default"), "default") == {True}
        view.close()
        assert len(outcomes) == 1, f"one way of reading saw damage at {at}, another did not"
        seen |= outcomes
        engine.close()
    assert False in seen


def test_what_lies_around_the_damage_can_be_read(whole: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(whole, place)
    (file,) = files_of(whole)["TIME_INDEX"]
    flip(place / file.name, file.stat().st_size // 2, 100)
    engine = RocksEngine(place, SHAPES)
    for table in (engine.table("TIME_INDEX"), engine.view().table("TIME_INDEX")):
        good = []
        for number in range(ROWS):
            key, value = row(number)
            try:
                assert table.get(key) == value
                good.append(number)
            except StoreDamaged:
                pass
        first_bad = min(set(range(ROWS)) - set(good))
        after = max(set(range(ROWS)) - set(good)) + 1
        assert 0 < after - first_bad < 100
        # As far as to the damage, and not a step further than asked.
        bound, behind = row(first_bad)[0], row(after)[0]
        assert len(table.scan(b"", LAST, first_bad)) == first_bad
        assert len(table.scan_back(behind, LAST, ROWS)) == ROWS - after
        assert len(table.scan_back(b"", row(first_bad - 1)[0], ROWS)) == first_bad - 1
        with pytest.raises(StoreDamaged) as forward:
            table.scan(b"", LAST, ROWS)
        assert row(first_bad - 1)[0] < forward.value.begin <= bound
        with pytest.raises(StoreDamaged) as back:
            table.scan_back(b"", LAST, ROWS)
        assert back.value.end in {behind, row(after + 1)[0]}
    upto = row(first_bad - 1)[0]
    assert len(engine.table("TIME_INDEX").scan(b"", upto, ROWS)) == first_bad - 1
    del table
    engine.close()


def test_a_view_that_has_met_damage_goes_on_reading_what_can_be_read(
    whole: Path, tmp_path: Path
) -> None:
    place = tmp_path / "store"
    shutil.copytree(whole, place)
    (file,) = files_of(whole)["TIME_INDEX"]
    for part in (2, 4):
        flip(place / file.name, file.stat().st_size // part, 3)
    engine = RocksEngine(place, SHAPES)
    # A table makes an iterator for each reading, a view has one for all.
    table, viewed = engine.table("TIME_INDEX"), engine.view().table("TIME_INDEX")

    def outcome(scan: Callable[[bytes, bytes, int], object], number: int) -> object:
        try:
            return scan(row(number)[0], row(number + 2)[0], 2)
        except StoreDamaged:
            return None

    bad = next(number for number in range(ROWS) if outcome(table.scan, number) is None)
    numbers = [each for number in range(0, ROWS, 5) for each in (number, bad, number)]
    met = [outcome(table.scan, number) for number in numbers]
    assert [outcome(viewed.scan, number) for number in numbers] == met
    met = [outcome(table.scan_back, number) for number in numbers]
    assert [outcome(viewed.scan_back, number) for number in numbers] == met
    del viewed
    engine.close()


def test_slatedb_raises_too(tmp_path: Path) -> None:
    place = SlateLocation("file", str(tmp_path / "store"), "")
    engine = SlateEngine(place, ["default", "t"])
    fill(engine, "t")
    # A log of few objects is left as it is: many make a file of rows.
    for number in range(40):
        batch = engine.batch()
        batch.put(b"%d" % number, b"", engine.table("default").family)
        engine.commit(batch)
        engine.sync()
    engine.close()
    rows = max(
        (tmp_path / "store" / "compacted").glob("*.sst"), key=lambda file: file.stat().st_size
    )
    flip(rows, rows.stat().st_size // 2, 100)
    engine = SlateEngine(place, ["default", "t"])
    assert judge(engine.table("t"), "t") == {False}
    view = engine.view()
    assert judge(view.table("t"), "t") == {False}
    view.close()
    assert len(engine.table("t").scan(b"", LAST, 10)) == 10
    engine.close()


def test_the_error_shows_keys_in_hex_and_names_in_letters() -> None:
    error = damage_error("queues", b"", b"\x00\x00orders", "Corruption")
    said, _, place = str(error).partition(" (")
    assert said.startswith("a part of the store can't be read, because its files are damaged; ")
    assert "'penstock check' shows how much it is; restore a backup, or " in said
    assert said.endswith(" with 'penstock salvage'")
    assert place == (
        "table 'queues' can't be read between the first key and 00006f7264657273 (..orders): "
        "Corruption)"
    )


def test_a_block_that_cannot_be_read_does_not_stop_writes(whole: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    shutil.copytree(whole, place)
    (file,) = files_of(whole)["VALUES"]
    flip(place / file.name, file.stat().st_size // 2, 100)

    def rewrite(engine: RocksEngine) -> None:
        # As many files as it takes for RocksDB to compact them.
        for _ in range(8):
            fill(engine, "VALUES")
            engine.table("VALUES").column.flush()

    # A compaction comes upon the block before anybody has read it: writes fail once.
    engine = RocksEngine(place, SHAPES)
    with pytest.raises(Exception, match="Corruption"):
        rewrite(engine)
    with pytest.raises(StoreDamaged):
        fill(engine, "SYSTEM")
    # Opened anew, here or by the next process, it leaves the table uncompacted.
    engine.recover(nullcontext(), lambda: None)
    rewrite(engine)
    fill(engine, "SYSTEM")
    engine.close()
    engine = RocksEngine(place, SHAPES)
    rewrite(engine)
    engine.close()
    # It is read first.
    shutil.copytree(whole, other := tmp_path / "other")
    flip(other / file.name, file.stat().st_size // 2, 100)
    engine = RocksEngine(other, SHAPES)
    with pytest.raises(StoreDamaged):
        engine.table("VALUES").scan(b"", LAST, ROWS)
    rewrite(engine)
    engine.close()
