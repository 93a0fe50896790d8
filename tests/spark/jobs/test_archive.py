"""Archiving loses nothing and doubles nothing, wherever it is interrupted."""

from __future__ import annotations

from collections import Counter
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from penstock.errors import InvalidInput, StorageFailed, StoreMismatch
from penstock.spark.delta import Archive
from penstock.spark.jobs import archive, follow

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

TABLES = ("done", "failed", "attempts")


class Crash(Exception):
    """Raised where a run is to end."""


def crash_at(step: str) -> Callable[[str], None]:
    def tell(now: str) -> None:
        if now == step:
            raise Crash

    return tell


def history(spark: SparkSession, shop: Any, place: Path, table: str, **options: str) -> DataFrame:
    return shop.world.reader(spark, table, includeArchive=str(place), **options)  # type: ignore[no-any-return]


def keys(frame: DataFrame) -> Counter[tuple[str, int]]:
    return Counter((row["queue"], row["message_id"]) for row in frame.collect())


def live(shop: Any) -> dict[str, Counter[tuple[str, int]]]:
    return {
        state: Counter(
            (queue, entry.message_id)
            for queue in ("all", "dear")
            for entry in shop.broker.browse(queue, state=state, limit=10_000)
        )
        for state in ("done", "failed")
    }


def counts(shop: Any) -> list[int]:
    stats = [shop.broker.stats(queue) for queue in ("all", "dear")]
    return [each for one in stats for each in (one.done, one.failed)]


def test_what_is_archived_is_what_was_there(spark: SparkSession, shop: Any, tmp_path: Path) -> None:
    before = live(shop)
    attempts = shop.world.reader(spark, "attempts").count()
    payloads = {
        row["message_id"]: bytes(row["payload"])
        for row in shop.world.reader(spark, "failed", payload="true").collect()
    }
    first = archive(spark, shop.location, tmp_path / "a", dry_run=True)
    assert (first.files, first.trimmed) == (0, 0)
    assert not (tmp_path / "a").exists()

    made = archive(spark, shop.location, tmp_path / "a")
    assert made.rows == first.rows
    assert made.rows["done"] == before["done"].total() > 300
    assert made.rows["failed"] == before["failed"].total() == made.trimmed - made.rows["done"]
    assert made.rows["attempts"] == attempts > made.trimmed
    assert counts(shop) == [0, 0, 0, 0]
    for state in ("done", "failed"):
        whole = history(spark, shop, tmp_path / "a", state)
        assert whole.columns == shop.world.reader(spark, state).columns
        assert keys(whole) == before[state]
    found = history(spark, shop, tmp_path / "a", "failed", payload="true", queue="dear")
    assert {row["queue"] for row in found.collect()} == {"dear"}
    assert all(bytes(row["payload"]) == payloads[row["message_id"]] for row in found.collect())

    again = archive(spark, shop.location, tmp_path / "a")
    assert (again.files, again.trimmed, again.rows["done"]) == (0, 0, 0)


def test_a_crash_loses_nothing_and_doubles_nothing(
    spark: SparkSession, shop: Any, tmp_path: Path
) -> None:
    place = tmp_path / "a"
    before = counts(shop)
    whole = live(shop)

    def check(state: str) -> None:
        assert keys(history(spark, shop, place, state)) == whole[state]

    for step, committed in (
        ("written", ()),
        ("committed done", ("done",)),
        ("committed failed", ("done", "failed")),
        ("committed attempts", TABLES),
    ):
        with pytest.raises(Crash):
            archive(spark, shop.location, place, progress=crash_at(step))
        tables = Archive.at(place).tables()
        assert tuple(name for name in TABLES if tables[name].files()) == committed
        assert counts(shop) == before
        check("done")
    check("failed")

    # Archived and not trimmed yet: of these, some are redriven and fail again.
    redriven = keys(
        shop.world.reader(spark, "failed", queue="dear", filter="price = 41").select(
            "queue", "message_id"
        )
    )
    assert shop.broker.redrive("dear", where="price = 41") == redriven.total() > 0
    shop.fill(100)
    done, failed = live(shop).values()
    whole["done"] |= done
    whole["failed"] = (whole["failed"] | failed) + redriven
    with pytest.raises(Crash):
        archive(spark, shop.location, place, progress=crash_at("trimmed"))
    assert counts(shop) == [0, 0, 0, 0]
    check("done")
    check("failed")
    assert archive(spark, shop.location, place).files == 0
    check("done")
    attempts = history(spark, shop, place, "attempts").collect()
    named = Counter((r["queue"], r["message_id"], r["attempt"], r["claimed_at"]) for r in attempts)
    assert max(named.values()) == 1
    ended = set(whole["done"]) | set(whole["failed"])
    assert {(r["queue"], r["message_id"]) for r in attempts} == ended
    tries = Counter((queue, message_id) for queue, message_id, *_ in named)
    assert {tries[each] for each in redriven} == {4}


def test_following_archives_each_row_once(spark: SparkSession, shop: Any, tmp_path: Path) -> None:
    place = tmp_path / "a"
    whole = live(shop)

    def check() -> None:
        tables = Archive.at(place).tables()
        for state in ("done", "failed"):
            assert sum(each.rows for each in tables[state].files()) == whole[state].total()
            assert keys(history(spark, shop, place, state)) == whole[state]

    runs = follow(spark, shop.location, place, every_ms=1, trim=False)
    assert next(runs).rows["done"] == whole["done"].total()
    shop.fill(60)
    # Another job gets ahead of it, and it goes on from there.
    ahead = archive(spark, shop.location, place, queues=["all"], trim=False)
    assert ahead.rows["done"] > 0
    assert next(runs).rows["done"] > 0
    runs.close()
    whole = live(shop)
    check()
    # Killed, and started again: it finds in the tables how far they are.
    again = follow(spark, shop.location, place, every_ms=1)
    made = next(again)
    again.close()
    assert made.rows == {"done": 0, "failed": 0, "attempts": 0}
    assert made.trimmed == whole["done"].total() + whole["failed"].total()
    check()


def test_a_place_that_takes_no_files_stops_the_run(
    spark: SparkSession, shop: Any, tmp_path: Path
) -> None:
    before = counts(shop)
    today = shop.broker.browse("all", state="done", limit=1)[0].ended_at_ms // 86_400_000
    in_the_way = tmp_path / "a" / "done" / f"date={date(1970, 1, 1) + timedelta(today)}"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    with pytest.raises(StorageFailed, match="a/done"):
        archive(spark, shop.location, tmp_path / "a")
    assert counts(shop) == before
    in_the_way.unlink()
    assert archive(spark, shop.location, tmp_path / "a").trimmed == sum(before)


def test_a_queue_that_is_made_anew_is_archived_anew(
    spark: SparkSession, shop: Any, tmp_path: Path
) -> None:
    place = tmp_path / "a"
    archive(spark, shop.location, place, states=["done"], keep_ms=0)
    assert counts(shop)[0] == counts(shop)[2] == 0
    assert counts(shop)[1] > 0
    old = keys(history(spark, shop, place, "done"))
    shop.broker.delete_queue("dear")
    shop.make("dear", "price > 30")
    shop.fill(100)
    new = live(shop)["done"]
    assert keys(history(spark, shop, place, "done")) == old + new
    archive(spark, shop.location, place)
    assert keys(history(spark, shop, place, "done")) == old + new


def test_what_is_not_allowed(
    spark: SparkSession, shop: Any, tmp_path: Path, make_world: Callable[..., Any]
) -> None:
    kept = archive(spark, shop.location, tmp_path / "a", keep_ms=3_600_000)
    assert (kept.files, kept.trimmed) == (0, 0)
    archive(spark, shop.location, tmp_path / "a", queues=["dear"], payload=False, trim=False)
    assert min(counts(shop)) > 0
    other = make_world(routing="inline")
    with pytest.raises(StoreMismatch, match="archive of store"):
        archive(spark, other.location, tmp_path / "a")
    with pytest.raises(InvalidInput, match="done and failed"):
        archive(spark, shop.location, tmp_path / "a", states=["active"])
    for place in ("hdfs://host/archive", "s3://", "s3:/bucket/x"):
        with pytest.raises(InvalidInput, match="s3://BUCKET/PREFIX"):
            archive(spark, shop.location, place)
    assert archive(spark, shop.location, tmp_path / "a", queues=["dear"]).trimmed > 0
