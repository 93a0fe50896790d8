"""Two archive jobs race for the same rows on S3: each row is archived once, and none is lost."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

from deltalake import DeltaTable
from tests.objectstore.conftest import PREFIXES, bucket, seaweed

from penstock.errors import InvalidInput, StorageFailed
from penstock.spark.delta import Archive
from penstock.spark.jobs import archive
from penstock.spark.sessions import read
from penstock.spark.source import read_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]
# Fixtures of the object storage.
__all__ = ["bucket", "seaweed"]


# The session is there before the variables are set: its tasks know S3 from the driver alone.
def test_jobs_that_race_archive_each_row_once(spark: SparkSession, shop: Any, bucket: str) -> None:
    place = f"s3://{bucket}/lake/archive-{next(PREFIXES)}"
    before = {
        name: shop.world.reader(spark, name).count() for name in ("done", "failed", "attempts")
    }
    together = threading.Barrier(2)
    trimmed: list[int] = []
    refused: list[str] = []

    def run() -> None:
        def tell(step: str) -> None:
            if step == "written" and not trimmed and not refused:
                together.wait(timeout=300)

        try:
            trimmed.append(archive(spark, shop.location, place, progress=tell).trimmed)
        except StorageFailed as error:
            refused.append(str(error))

    jobs = [threading.Thread(target=run) for _ in range(2)]
    for each in jobs:
        each.start()
    for each in jobs:
        each.join()
    assert trimmed == [before["done"] + before["failed"]]
    assert len(refused) == 1
    assert f"another run has changed {place}/done" in refused[0]
    assert archive(spark, shop.location, place).files == 0
    storage = Archive.at(place).storage
    for name, rows in before.items():
        assert DeltaTable(f"{place}/{name}", storage_options=storage).count() == rows
        assert read(spark, shop.location, name, includeArchive=place).count() == rows
    assert shop.world.reader(spark, "done").count() == 0
    with pytest.raises(InvalidInput, match="unknown option 'aws_region'"):
        read_options({"server": "grpc://x:1", "table": "done", "AWS_REGION": "x"})
