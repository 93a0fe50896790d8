"""Marks and trims of an archive, and reads beside it, where no Spark session is needed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")
pytest.importorskip("deltalake", reason="deltalake is not installed")

import penstock
from penstock.errors import StorageFailed, StoreMismatch
from penstock.flight.client import FlightStore
from penstock.flight.protocol import HistoryStretch, HistoryTicket
from penstock.spark import delta
from penstock.spark.delta import TABLES, Archive, Mark, write_rows
from penstock.spark.jobs import archive, follow
from penstock.spark.reader import TableReader, spark_schema
from penstock.spark.source import read_options

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# A run that finds nothing to write starts no Spark job.
NO_SPARK: Any = None


class Site:
    """A store with one queue, and an archive of it."""

    def __init__(self, world: Any, place: Path) -> None:
        self.world = world
        self.place = place
        world.broker.create_queue(
            "q", filter="n >= 0", max_attempts=1, backoff_base_ms=0, backoff_cap_ms=0
        )

    @property
    def location(self) -> str:
        location: str = self.world.location
        return location

    def work(self, count: int, *, failing: int = 0) -> None:
        """Publish messages and end them, the last ones by failing."""
        broker = self.world.broker
        broker.publish([penstock.Message(b"x", {"n": 1})] * count)
        held = [each.receipt for each in broker.claim("q", limit=count)]
        good = count - failing
        broker.ack(held[:good])
        broker.release(held[good:], delay_ms=0, reason="no")

    def copy(self) -> None:
        """Archive all history and trim nothing, as a run does in its tasks and its driver."""
        client = FlightStore(self.location)
        history = client.history_ends(None)
        found, target = history.queues["q"], Archive.at(self.place)
        for name in TABLES:
            table = target.make(name, history.store_id)
            states = found.ends if name == "attempts" else [name]
            marks = {Mark("q", found.created_at_ms, state): found.ends[state] for state in states}
            stretches = [
                HistoryStretch(*mark, table.mark(mark), end)
                for mark, end in marks.items()
                if table.mark(mark) < end
            ]
            rows = client.read(HistoryTicket(name, stretches, name != "attempts"))
            files = write_rows(target, name, {"q": found.created_at_ms}, rows)
            table.commit(list(files), marks)

    def rows(self, table: str, **options: str) -> list[dict[str, Any]]:
        """Read a table with the archive, as the tasks of Spark do."""
        whole = {"location": self.location, "table": table, "includeArchive": str(self.place)}
        checked = read_options({**whole, **options}, streaming=False)
        reader = TableReader(checked, spark_schema(checked))
        batches = (batch for part in reader.partitions() for batch in reader.read(part))
        return [row for batch in batches for row in batch.to_pylist()]

    def left(self) -> tuple[int, int]:
        """Count the done and the failed messages of the store."""
        stats = self.world.broker.stats("q")
        return stats.done, stats.failed


@pytest.fixture
def site(make_world: Callable[..., Any], tmp_path: Path) -> Site:
    return Site(make_world(routing="inline"), tmp_path / "archive")


def test_young_messages_stay_though_they_are_copied(site: Site) -> None:
    site.work(6, failing=2)
    site.copy()
    made = archive(NO_SPARK, site.location, site.place, keep_ms=3_600_000)
    assert made.trimmed == 0
    assert site.left() == (4, 2)
    made = archive(NO_SPARK, site.location, site.place)
    assert (made.files, made.trimmed) == (0, 6)
    assert site.left() == (0, 0)


def test_an_older_copy_of_the_store_is_refused(site: Site, tmp_path: Path) -> None:
    site.work(3, failing=1)
    site.world.close()
    shutil.copytree(site.world.path, tmp_path / "backup")
    site.world.open()
    site.work(6, failing=2)
    site.copy()
    assert (len(site.rows("done")), len(site.rows("attempts"))) == (6, 9)
    site.world.close()
    shutil.rmtree(site.world.path)
    (tmp_path / "backup").rename(site.world.path)
    site.world.open()
    site.work(2)
    before = site.left()
    for dry_run in (False, True):
        with pytest.raises(StoreMismatch, match=r"older copy of the store .* to a new place"):
            archive(NO_SPARK, site.location, site.place, dry_run=dry_run)
    for table in TABLES:
        with pytest.raises(StoreMismatch, match="an older copy of the store"):
            site.rows(table)
    assert site.left() == before == (4, 1)


def test_a_snapshot_has_rows_that_were_redriven_before_an_archive(site: Site) -> None:
    site.work(5, failing=4)
    client = FlightStore(site.location)
    held = client.hold_snapshot()
    failed = site.world.broker.browse("q", state="failed")
    site.world.broker.redrive("q", message_ids=[failed[1].message_id])
    site.copy()
    archive(NO_SPARK, site.location, site.place)
    assert site.left() == (0, 0)
    # Ended later than the snapshot, and in the archive only.
    site.work(3, failing=1)
    site.copy()
    found = {table: site.rows(table, snapshot=held.snapshot) for table in TABLES}
    assert sorted(row["message_id"] for row in found["failed"]) == [
        each.message_id for each in failed
    ]
    assert (len(found["done"]), len(found["attempts"])) == (1, 5)
    client.drop_snapshot(held.snapshot)


def test_commits_of_killed_runs_are_synced_before_the_trim(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "sync_path", lambda _: None)
    for _ in range(2):
        site.work(3, failing=1)
        site.copy()
    synced: list[Path] = []
    before: list[Path] = []
    monkeypatch.setattr(delta, "sync_path", synced.append)

    def tell(step: str) -> None:
        if step.startswith("trimming") and not before:
            before.extend(synced)

    assert archive(NO_SPARK, site.location, site.place, progress=tell).trimmed == 6
    for name in TABLES:
        log = site.place / name / "_delta_log"
        commits = sorted(log.glob("*.json"))
        assert len(commits) == 3
        assert {*commits, log} <= {*before}
    # With nothing to trim, nothing is synced.
    synced.clear()
    archive(NO_SPARK, site.location, site.place)
    assert not synced


def test_following_tells_of_each_run_that_fails(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.place.touch()
    with pytest.raises(StorageFailed):
        next(follow(NO_SPARK, site.location, site.place, every_ms=1))
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(told) == 5
    assert all(str(site.place) in each for each in told)
