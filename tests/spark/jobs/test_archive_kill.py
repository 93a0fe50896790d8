"""An archive job is killed at every step: the next one, and every reader, find each row once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from penstock.spark.delta import Archive
from penstock.spark.jobs import archive
from penstock.spark.reader import TableReader, spark_schema
from penstock.spark.source import read_options
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.xdist_group("spark")]

CHILD = Path(__file__).parent / "archive_child.py"
TABLES = ("done", "failed", "attempts")


def rows(shop: Any, table: str, **options: str) -> Counter[str]:
    """Count the rows of a table by everything in them but the sequence; takes no Spark job."""
    checked = read_options({"location": shop.location, "table": table, **options}, streaming=False)
    reader = TableReader(checked, spark_schema(checked))
    return Counter(
        repr(sorted((name, value) for name, value in row.items() if name != "sequence"))
        for part in reader.partitions()
        for batch in reader.read(part)
        for row in batch.to_pylist()
    )


class Crash(Exception):
    """Raised where a run is to end."""


def end_at(spark: SparkSession, shop: Any, place: Path, step: str) -> None:
    """Run in the session that is there, and end with an error: quicker than another process."""

    def tell(now: str) -> None:
        if now == step:
            raise Crash

    with pytest.raises(Crash):
        archive(spark, shop.location, place, progress=tell)


def kill_at(shop: Any, place: Path, step: str) -> None:
    command = [sys.executable, str(CHILD), shop.location, str(place), step]
    child = subprocess.run(command, capture_output=True, timeout=900, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()[-2_000:]


# The same crashes are in test_archive as errors, which cost less than killed processes.
@pytest.mark.soak
@pytest.mark.parametrize("kills", [1, 3])
def test_a_killed_archive_loses_and_doubles_nothing(
    spark: SparkSession, shop: Any, tmp_path: Path, kills: int
) -> None:
    place = tmp_path / "archive"
    whole = {table: rows(shop, table) for table in TABLES}

    def check() -> None:
        for table in TABLES:
            assert rows(shop, table, includeArchive=str(place)) == whole[table], table

    left = []
    steps = ("committed done", "committed failed", "trimming failed of all")
    for at, step in enumerate(steps):
        if at == 2:
            # Of what the second run has archived some are redriven, and fail again.
            assert shop.broker.redrive("dear", where="price = 41") > 0
            shop.fill(60)
            for table in TABLES:
                found = rows(shop, table, includeArchive=str(place))
                assert max(found.values()) == 1
                assert not whole[table] - found
                assert not rows(shop, table) - found
                whole[table] = found
        if at > 2 - kills:
            kill_at(shop, place, step)
        else:
            end_at(spark, shop, place, step)
        left.append(sum(rows(shop, "done").values()))
        check()
    assert left[0] == left[1] > left[2], "the last one was killed while it trimmed"
    last = archive(spark, shop.location, place)
    assert last.files == 0
    assert last.trimmed > 0
    assert not rows(shop, "done")
    assert not rows(shop, "failed")
    check()
    # Each attempt is in the files once as well.
    files = Archive.at(place).tables()["attempts"].files()
    assert sum(each.rows for each in files) == sum(whole["attempts"].values())
    assert_clean(shop.broker)
