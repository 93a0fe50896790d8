"""Archiving loses nothing and doubles nothing, wherever it is interrupted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from penstock.errors import InvalidInput, StorageFailed, StoreMismatch
from penstock.spark.jobs import archive, read_history
from penstock.spark.jobs.archive_runs import Runs

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
        history = read_history(spark, shop.location, tmp_path / "a", state)
        assert history.columns == shop.world.reader(spark, state).columns
        assert keys(history) == before[state]
    found = read_history(spark, None, tmp_path / "a", "failed", payload=True, queues=["dear"])
    assert {row["queue"] for row in found.collect()} == {"dear"}
    assert all(bytes(row["payload"]) == payloads[row["message_id"]] for row in found.collect())

    again = archive(spark, shop.location, tmp_path / "a")
    assert (again.run, again.trimmed, again.rows["done"]) == (None, 0, 0)


@pytest.mark.parametrize("step", ["written", "verified", "recorded", "trimmed"])
def test_a_crash_loses_nothing_and_doubles_nothing(
    spark: SparkSession, shop: Any, tmp_path: Path, step: str
) -> None:
    place = tmp_path / "a"
    whole = live(shop)
    with pytest.raises(Crash):
        archive(spark, shop.location, place, progress=crash_at(step))
    recorded = step in {"recorded", "trimmed"}
    assert len(Runs(place).runs) == recorded
    for state in ("done", "failed"):
        assert keys(read_history(spark, shop.location, place, state)) == whole[state]

    redriven = shop.broker.redrive("dear")
    shop.fill(100)
    for state, had in whole.items():
        now = live(shop)[state]
        # A failed message that was archived, redriven and has failed again has failed twice.
        whole[state] = had + (now - had) if state == "done" else had | now
    made = archive(spark, shop.location, place)
    assert (redriven > 0) is (step != "trimmed")
    assert counts(shop) == [0, 0, 0, 0]
    done = keys(read_history(spark, shop.location, place, "done"))
    assert done == whole["done"]
    failed = keys(read_history(spark, shop.location, place, "failed"))
    assert set(failed) == set(whole["failed"])
    twice = sum(count == 2 for count in failed.values())
    assert twice == (redriven if recorded and step != "trimmed" else 0)
    assert made.rows["done"] < done.total() or not recorded
    attempts = read_history(spark, shop.location, place, "attempts").collect()
    named = Counter((r["queue"], r["message_id"], r["attempt"], r["claimed_at"]) for r in attempts)
    assert max(named.values()) == 1
    assert {(r["queue"], r["message_id"]) for r in attempts} == set(done) | set(failed)


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
    old = keys(read_history(spark, None, place, "done"))
    shop.broker.delete_queue("dear")
    shop.make("dear", "price > 30")
    shop.fill(100)
    new = live(shop)["done"]
    assert keys(read_history(spark, shop.location, place, "done")) == old + new
    archive(spark, shop.location, place)
    assert keys(read_history(spark, shop.location, place, "done")) == old + new


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
