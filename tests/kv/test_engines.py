"""What every engine does, as one suite: an engine joins with a class that can open it."""

from __future__ import annotations

import threading
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.soaking import examples

from penstock.engines import Shape, rows_of
from penstock.engines.memory import MemoryEngine, Overlay
from penstock.engines.rocksdb import RocksEngine
from penstock.engines.slatedb import SlateEngine
from penstock.engines.slatedb.binding import SlateLocation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.engines import Engine, Table

TABLES: Mapping[str, Shape] = {
    "default": Shape.SYSTEM,
    "one": Shape.VALUES,
    "two": Shape.SHORT_LIVED,
    "three": Shape.TIME_INDEX,
    "four": Shape.APPEND,
}
# Prefixes of one another, and every byte that some comparison could get wrong.
KEYS = [b"\0", b"\0\0", b"\0\xff", b"\x01", b"a", b"a\0", b"a\xff", b"ab", b"b", b"\x7f", b"\x80"]
KEYS += [b"\xff", b"\xff\0", b"\xff\xff"]
LAST = b"\xff" * 8


class EngineSuite:
    """Subclasses say how to open an engine with :data:`TABLES`, and how to open it again."""

    engine: Engine

    def open(self, place: Path) -> Engine:
        raise NotImplementedError

    def reopen(self, place: Path) -> Engine:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _opened(self, tmp_path: Path) -> Iterator[None]:
        self.place = tmp_path / "engine"
        self.engine = self.open(self.place)
        yield
        self.engine.close()

    # --- short words -----------------------------------------------------------------------

    def restart(self) -> None:
        self.engine.close()
        self.engine = self.reopen(self.place)

    def table(self, name: str = "one") -> Table:
        return self.engine.table(name)

    def put(self, rows: Mapping[bytes, bytes], name: str = "one") -> None:
        batch = self.engine.batch()
        for key, value in rows.items():
            batch.put(key, value, self.table(name).family)
        self.engine.commit(batch)

    def rows(self, name: str = "one") -> dict[bytes, bytes]:
        return dict(self.table(name).scan(b"", LAST, 1_000))

    # --- values ----------------------------------------------------------------------------

    def test_a_key_that_is_not_there_reads_as_none(self) -> None:
        assert self.table().get(b"nothing") is None

    def test_a_value_reads_as_it_was_put_and_the_last_put_counts(self) -> None:
        self.put({b"k": b"first"})
        self.put({b"k": b"second"})
        assert self.table().get(b"k") == b"second"

    @pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)), b"x" * (1 << 20)])
    def test_any_bytes_are_a_value(self, value: bytes) -> None:
        self.put({b"k": value})
        assert self.table().get(b"k") == value
        assert self.rows() == {b"k": value}

    def test_a_key_of_no_bytes_comes_before_all_others(self) -> None:
        self.put({b"": b"empty", b"\0": b"nul"})
        assert self.table().get(b"") == b"empty"
        assert list(self.rows()) == [b"", b"\0"]

    def test_many_values_come_in_the_order_asked(self) -> None:
        self.put({b"a": b"1", b"b": b"", b"c": b"3"})
        asked = [b"c", b"missing", b"b", b"c", b"a"]
        assert self.table().multi_get(asked) == [b"3", None, b"", b"3", b"1"]
        assert self.table().multi_get([]) == []

    @pytest.mark.parametrize(
        "numbers",
        [
            range(100),
            range(-5, 130),
            # The last is as far from the first as in a run without gaps.
            [0, 90, *range(1, 18), 19],
            [5, *reversed(range(40)), 46],
            [*range(20), *range(20)],
            [0, 0, *range(2, 20), 20],
            [*range(40, 60), 10],
        ],
    )
    def test_many_numbered_keys(self, numbers: Sequence[int]) -> None:
        def key(number: int) -> bytes:
            return b"k" + (1_000 + number).to_bytes(8, "big")

        rows = {key(number): str(number).encode() for number in range(100) if number % 7}
        self.put(rows)
        asked = [key(number) for number in numbers]
        assert self.table().multi_get(asked) == [rows.get(each) for each in asked]

    def test_many_keys_with_longer_ones_between(self) -> None:
        names = [b"1", *(b"1-%02d" % number for number in range(40)), b"2"]
        rows = {b"kind %s" % name: name for name in names}
        self.put(rows)
        asked = [b"kind 1", *(b"kind 1.%02d" % number for number in range(20)), b"kind 2"]
        assert self.table().multi_get(asked) == [rows.get(each) for each in asked]

    def test_tables_are_apart(self) -> None:
        for name in TABLES:
            self.put({b"k": name.encode()}, name)
        batch = self.engine.batch()
        batch.delete(b"k", self.table("two").family)
        batch.delete_range(b"", LAST, self.table("three").family)
        self.engine.commit(batch)
        left = {name: self.table(name).get(b"k") for name in TABLES}
        assert left == {
            "default": b"default",
            "one": b"one",
            "two": None,
            "three": None,
            "four": b"four",
        }

    def test_a_table_that_was_not_named_at_open_is_not_there(self) -> None:
        with pytest.raises(KeyError):
            self.engine.table("other")

    # --- batches ---------------------------------------------------------------------------

    def test_a_batch_shows_nothing_before_its_commit_and_all_of_it_after(self) -> None:
        self.put({b"gone": b"x"})
        batch = self.engine.batch()
        batch.put(b"a", b"1", self.table("one").family)
        batch.put(b"b", b"2", self.table("two").family)
        batch.delete(b"gone", self.table("one").family)
        assert self.rows("one") == {b"gone": b"x"}
        assert self.rows("two") == {}
        self.engine.commit(batch)
        assert self.rows("one") == {b"a": b"1"}
        assert self.rows("two") == {b"b": b"2"}

    def test_a_batch_that_is_dropped_changes_nothing(self) -> None:
        batch = self.engine.batch()
        batch.put(b"a", b"1", self.table().family)
        del batch
        assert self.rows() == {}

    def test_changes_of_a_batch_apply_in_their_order(self) -> None:
        self.put({b"c": b"old", b"d": b"old"})
        family = self.table().family
        batch = self.engine.batch()
        batch.put(b"a", b"1", family)
        batch.put(b"a", b"2", family)
        batch.put(b"b", b"1", family)
        batch.delete(b"b", family)
        batch.delete(b"c", family)
        batch.put(b"c", b"new", family)
        batch.put(b"e", b"before the range", family)
        batch.delete_range(b"d", b"f", family)
        batch.put(b"d", b"after the range", family)
        self.engine.commit(batch)
        assert self.rows() == {b"a": b"2", b"c": b"new", b"d": b"after the range"}

    def test_a_batch_counts_its_changes(self) -> None:
        family = self.table().family
        batch = self.engine.batch()
        assert len(batch) == 0
        batch.put(b"a", b"", family)
        batch.delete(b"b", family)
        batch.delete_range(b"c", b"d", family)
        assert len(batch) == 3

    def test_an_empty_batch_commits(self) -> None:
        self.put({b"a": b"1"})
        self.engine.commit(self.engine.batch())
        assert self.rows() == {b"a": b"1"}

    def test_deleting_what_is_not_there_is_no_error(self) -> None:
        batch = self.engine.batch()
        batch.delete(b"nothing", self.table().family)
        batch.delete_range(b"n", b"o", self.table().family)
        self.engine.commit(batch)
        assert self.rows() == {}

    def test_a_range_is_deleted_with_its_begin_and_without_its_end(self) -> None:
        self.put(dict.fromkeys(KEYS, b""))
        batch = self.engine.batch()
        batch.delete_range(b"a", b"ab", self.table().family)
        batch.delete_range(b"\xff", b"\xff", self.table().family)
        self.engine.commit(batch)
        assert set(KEYS) - set(self.rows()) == {b"a", b"a\0"} | {
            key for key in KEYS if b"a" < key < b"ab"
        }

    # --- order -----------------------------------------------------------------------------

    def test_keys_sort_as_bytes(self) -> None:
        self.put(dict.fromkeys(reversed(KEYS), b""))
        assert list(self.rows()) == sorted(KEYS)

    def test_a_scan_is_half_open_both_ways(self) -> None:
        self.put({key: key[::-1] for key in KEYS})
        ordered = sorted(KEYS)
        for first, begin in enumerate(ordered):
            for last, end in enumerate(ordered[first + 1 :], first + 1):
                expected = [(key, key[::-1]) for key in ordered[first:last]]
                assert list(self.table().scan(begin, end, 100)) == expected
                assert list(self.table().scan_back(begin, end, 100)) == expected[::-1]

    @pytest.mark.parametrize("end", [b"b", b"a", b""])
    def test_a_range_that_ends_where_it_begins_or_before_is_empty(self, end: bytes) -> None:
        self.put({b"a": b"", b"b": b"", b"c": b""})
        assert list(self.table().scan(b"b", end, 10)) == []
        assert list(self.table().scan_back(b"b", end, 10)) == []

    def test_the_borders_of_a_scan_need_not_be_keys(self) -> None:
        self.put({b"b": b"", b"d": b"", b"f": b""})
        table = self.table()
        assert [key for key, _ in table.scan(b"a", b"e", 9)] == [b"b", b"d"]
        assert [key for key, _ in table.scan(b"c", b"g", 9)] == [b"d", b"f"]
        assert [key for key, _ in table.scan_back(b"a", b"e", 9)] == [b"d", b"b"]
        assert [key for key, _ in table.scan_back(b"c", b"g", 9)] == [b"f", b"d"]
        assert not table.scan(b"g", b"h", 9)
        assert not table.scan_back(b"a", b"b", 9)

    def test_a_scan_gives_no_more_than_its_limit(self) -> None:
        self.put(dict.fromkeys(KEYS, b""))
        ordered = sorted(KEYS)
        for limit in (0, 1, 3, len(KEYS)):
            assert [key for key, _ in self.table().scan(b"", LAST, limit)] == ordered[:limit]
            backwards = [key for key, _ in self.table().scan_back(b"", LAST, limit)]
            assert backwards == ordered[::-1][:limit]

    def test_a_scan_that_was_read_does_not_change(self) -> None:
        self.put({b"a": b"1", b"b": b"2"})
        rows = self.table().scan(b"", LAST, 10)
        self.put({b"a": b"changed", b"c": b"3"})
        assert list(rows) == [(b"a", b"1"), (b"b", b"2")]

    @pytest.mark.parametrize("page", [1, 2, 5, 100])
    def test_rows_of_pages_over_everything_once(self, page: int) -> None:
        self.put({key: key * 2 for key in KEYS})
        found = list(rows_of(self.table(), b"", LAST, page=page))
        assert found == [(key, key * 2) for key in sorted(KEYS)]
        assert [key for key, _ in rows_of(self.table(), b"a", b"b", page=page)] == [
            key for key in sorted(KEYS) if b"a" <= key < b"b"
        ]

    # --- views -----------------------------------------------------------------------------

    def test_a_view_shows_the_moment_it_was_made_at(self) -> None:
        rows = {key: key[::-1] for key in KEYS}
        self.put(rows)
        self.put({b"k": b"before"}, "two")
        view = self.engine.view()
        batch = self.engine.batch()
        batch.delete_range(b"a", b"b", self.table().family)
        batch.put(b"\0", b"changed", self.table().family)
        batch.put(b"new", b"", self.table().family)
        batch.put(b"k", b"after", self.table("two").family)
        self.engine.commit(batch)
        table, ordered = view.table("one"), sorted(rows.items())
        assert list(table.scan(b"", LAST, 100)) == ordered
        assert list(table.scan_back(b"", LAST, 100)) == ordered[::-1]
        assert list(table.scan(b"a", b"b", 2)) == [row for row in ordered if row[0] >= b"a"][:2]
        assert list(table.scan_back(b"a", b"b", 1)) == [(b"a\xff", b"\xffa")]
        assert table.multi_get([b"new", b"a", b"\0"]) == [None, b"a", b"\0"]
        assert view.table("two").get(b"k") == b"before"
        assert self.table("two").get(b"k") == b"after"
        view.close()

    @pytest.mark.parametrize("end", [b"b", b"a", b""])
    def test_an_empty_range_of_a_view_is_empty(self, end: bytes) -> None:
        self.put({b"a": b"", b"b": b"", b"c": b""})
        view = self.engine.view()
        assert list(view.table("one").scan(b"b", end, 10)) == []
        assert list(view.table("one").scan_back(b"b", end, 10)) == []
        view.close()

    def test_a_view_that_was_closed_does_not_keep_the_engine(self) -> None:
        self.put({b"a": b"1"})
        view = self.engine.view()
        assert view.table("one").get(b"a") == b"1"
        view.close()
        self.restart()
        assert self.rows() == {b"a": b"1"}

    # --- keeping ---------------------------------------------------------------------------

    def test_what_was_committed_is_there_after_a_restart(self) -> None:
        self.put(dict.fromkeys(KEYS, b"v"))
        self.put({b"k": b"other"}, "four")
        batch = self.engine.batch()
        batch.delete(b"\0", self.table().family)
        batch.delete_range(b"a", b"b", self.table().family)
        self.engine.commit(batch)
        before = self.rows()
        self.restart()
        assert self.rows() == before
        assert self.rows("four") == {b"k": b"other"}
        self.restart()
        assert self.rows() == before

    def test_sync_may_come_from_another_thread_while_commits_go_on(self) -> None:
        done = threading.Event()
        failures: list[BaseException] = []

        def sync() -> None:
            try:
                while not done.is_set():
                    self.engine.sync()
            except BaseException as error:
                failures.append(error)

        syncer = threading.Thread(target=sync)
        syncer.start()
        for number in range(300):
            self.put({number.to_bytes(2, "big"): b"v"})
        done.set()
        syncer.join()
        assert failures == []
        assert len(self.rows()) == 300


class TestMemory(EngineSuite):
    def open(self, place: Path) -> Engine:
        return MemoryEngine(TABLES)

    def reopen(self, place: Path) -> Engine:
        return self.engine


class TestRocks(EngineSuite):
    def open(self, place: Path) -> Engine:
        return RocksEngine(place, TABLES)

    def reopen(self, place: Path) -> Engine:
        return self.open(place)


class TestSlate(EngineSuite):
    def open(self, place: Path) -> Engine:
        return SlateEngine(SlateLocation("file", str(place), ""), TABLES)

    def reopen(self, place: Path) -> Engine:
        return self.open(place)


# --- all against a plain dictionary ---------------------------------------------------------------

keys = st.one_of(st.sampled_from(KEYS), st.binary(min_size=1, max_size=3))
tables = st.sampled_from(["one", "three"])
changes = st.one_of(
    st.tuples(st.just("put"), tables, keys, st.binary(max_size=3)),
    st.tuples(st.just("delete"), tables, keys, st.just(b"")),
    st.tuples(st.just("delete_range"), tables, keys, keys).map(
        lambda change: (*change[:2], min(change[2:]), max(change[2:]))
    ),
)
histories = st.lists(st.lists(changes, max_size=6), max_size=6)
Change = tuple[str, str, bytes, bytes]


def replay(engine: Engine, history: Sequence[Sequence[Change]]) -> dict[str, dict[bytes, bytes]]:
    """Apply batches to an engine and, one change after the other, to dictionaries."""
    model: dict[str, dict[bytes, bytes]] = {"one": {}, "three": {}}
    for batch_of in history:
        batch = engine.batch()
        for verb, name, first, second in batch_of:
            family, rows = engine.table(name).family, model[name]
            if verb == "put":
                batch.put(first, second, family)
                rows[first] = second
            elif verb == "delete":
                batch.delete(first, family)
                rows.pop(first, None)
            else:
                batch.delete_range(first, second, family)
                model[name] = {k: v for k, v in rows.items() if not first <= k < second}
        engine.commit(batch)
    return model


def agrees(engine: Engine, model: Mapping[str, Mapping[bytes, bytes]]) -> None:
    for name, rows in model.items():
        table = engine.table(name)
        ordered = sorted(rows.items())
        assert list(table.scan(b"", LAST, 1_000)) == ordered
        assert list(table.scan_back(b"", LAST, 1_000)) == ordered[::-1]
        assert table.multi_get(list(rows)) == list(rows.values())


@given(history=histories)
def test_memory_agrees_with_a_dictionary(history: Sequence[Sequence[Change]]) -> None:
    engine = MemoryEngine(TABLES)
    agrees(engine, replay(engine, history))


@examples(25)
@given(history=histories)
def test_rocksdb_agrees_with_a_dictionary(history: Sequence[Sequence[Change]]) -> None:
    with TemporaryDirectory() as place:
        engine = RocksEngine(Path(place), TABLES)
        model = replay(engine, history)
        agrees(engine, model)
        engine.close()
        engine = RocksEngine(Path(place), TABLES)
        agrees(engine, model)
        engine.close()


@examples(15)
@given(history=histories)
def test_slatedb_agrees_with_a_dictionary(history: Sequence[Sequence[Change]]) -> None:
    with TemporaryDirectory() as place:
        engine = SlateEngine(SlateLocation("file", place, ""), TABLES)
        model = replay(engine, history)
        agrees(engine, model)
        engine.close()
        engine = SlateEngine(SlateLocation("file", place, ""), TABLES)
        agrees(engine, model)
        engine.close()


def test_an_overlay_reads_changes_and_rows_as_one_table() -> None:
    below = MemoryEngine(["t"])
    keys = [b"%02d" % n for n in range(40)]
    below.table("t").rows.update({key: b"below" for key in keys if int(key) % 3})
    changes = {key: (None if int(key) % 4 == 0 else b"") for key in keys if int(key) % 2 == 0}
    overlay = Overlay(below.view(), ["t"])
    table = overlay.table("t")
    batch = overlay.batch()
    for key, value in changes.items():
        if value is None:
            batch.delete(key, table)
        else:
            batch.put(key, value, table)
    overlay.commit(batch)
    model = dict(below.table("t").rows) | changes
    rows = [(key, value) for key, value in sorted(model.items()) if value is not None]
    for begin, end in product((b"", *keys[::5]), (*keys[::7], b"\xff")):
        within = [row for row in rows if begin <= row[0] < end]
        for limit in (0, 1, 2, 3, 7, 100):
            assert list(table.scan(begin, end, limit)) == within[:limit]
            assert list(table.scan_back(begin, end, limit)) == within[::-1][:limit]
    assert table.multi_get(keys) == [model.get(key) for key in keys]
