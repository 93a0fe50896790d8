"""Archiving loses nothing and doubles nothing, wherever it is interrupted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from penstock.errors import InvalidInput, StorageFailed, StoreMismatch
from penstock.spark.archive import Runs
from penstock.spark.jobs import archive

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


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
    assert (first.run, first.trimmed) == (None, 0)
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
    assert (again.run, again.trimmed, again.rows["done"]) == (None, 0, 0)


def test_a_crash_loses_nothing_and_doubles_nothing(
    spark: SparkSession, shop: Any, tmp_path: Path
) -> None:
    place = tmp_path / "a"
    before = counts(shop)
    whole = live(shop)

    def check(state: str) -> None:
        assert keys(history(spark, shop, place, state)) == whole[state]

    for step, recorded in (("written", 0), ("verified", 0), ("recorded", 1)):
        with pytest.raises(Crash):
            archive(spark, shop.location, place, progress=crash_at(step))
        assert len(Runs(place).runs) == recorded
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
    assert archive(spark, shop.location, place).run is None
    check("done")
    attempts = history(spark, shop, place, "attempts").collect()
    named = Counter((r["queue"], r["message_id"], r["attempt"], r["claimed_at"]) for r in attempts)
    assert max(named.values()) == 1
    ended = set(whole["done"]) | set(whole["failed"])
    assert {(r["queue"], r["message_id"]) for r in attempts} == ended
    tries = Counter((queue, message_id) for queue, message_id, *_ in named)
    assert {tries[each] for each in redriven} == {4}


def test_files_that_do_not_read_back_stop_the_run(
    spark: SparkSession, shop: Any, tmp_path: Path
) -> None:
    before = counts(shop)

    def damage(step: str) -> None:
        if step == "written":
            next((tmp_path / "a" / "done").rglob("*.parquet")).unlink()

    with pytest.raises(StorageFailed, match="do not read back"):
        archive(spark, shop.location, tmp_path / "a", progress=damage)
    assert counts(shop) == before
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
    assert (kept.run, kept.trimmed) == (None, 0)
    archive(spark, shop.location, tmp_path / "a", queues=["dear"], payload=False, trim=False)
    assert min(counts(shop)) > 0
    other = make_world(routing="inline")
    with pytest.raises(StoreMismatch, match="archive of store"):
        archive(spark, other.location, tmp_path / "a")
    with pytest.raises(InvalidInput, match="done and failed"):
        archive(spark, shop.location, tmp_path / "a", states=["active"])
    with pytest.raises(InvalidInput, match="shared mount"):
        archive(spark, shop.location, "s3://bucket/archive")
    with Runs(tmp_path / "a").locked(), pytest.raises(StorageFailed, match="another run"):
        archive(spark, shop.location, tmp_path / "a")
    assert archive(spark, shop.location, tmp_path / "a", queues=["dear"]).trimmed > 0
