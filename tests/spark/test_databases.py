"""Spark over a store of two databases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.sql.test_clusters import FIRST, SECOND

import penstock
from penstock import Message
from penstock.server import in_process_server
from penstock.spark.jobs.archive import archive
from penstock.spark.jobs.backfill import backfill
from penstock.spark.jobs.common import read

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession
    from tests.sql.postgres import PostgresServer

    from penstock.broker.broker import Broker


def put(broker: Broker, count: int) -> None:
    broker.publish(
        Message(b"p%d" % n, {"queue": "q", "n": n}, (FIRST, SECOND)[n % 2]) for n in range(count)
    )


@pytest.mark.soak
def test_streams_archives_and_backfills(
    spark: SparkSession, postgres: PostgresServer, tmp_path: Path
) -> None:
    urls = [postgres.url(postgres.create()) for _ in range(2)]
    with penstock.open(urls) as broker, in_process_server(broker) as server:
        location = server.location

        def streamed() -> list[int]:
            rows = spark.readStream.format("penstock").options(
                location=location, table="log", startingOffsets="earliest", maxOffsetsPerTrigger=30
            )
            query = rows.load().select("offset").writeStream.format("parquet")
            query = query.option("checkpointLocation", str(tmp_path / "checkpoint"))
            query.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination()
            return sorted(
                row["offset"] for row in spark.read.parquet(str(tmp_path / "out")).collect()
            )

        broker.create_queue("q", max_attempts=1)
        put(broker, 50)
        first = streamed()
        broker.configure_log(logs=4)
        put(broker, 30)
        offsets = streamed()
        assert (len(first), len(offsets), len(set(offsets))) == (50, 80, 80)

        done: list[int] = []
        for _ in range(2):
            held = broker.claim("q", limit=25)
            broker.release([each.receipt for each in held[20:]])
            broker.ack([each.receipt for each in held[:20]])
            done += [each.message_id for each in held[:20]]
            archived = archive(spark, location, tmp_path / "archive")
            assert (archived.rows["done"], archived.rows["failed"]) == (20, 5)
            assert archived.trimmed == 25
        found = read(spark, location, "done", includeArchive=str(tmp_path / "archive"))
        assert sorted(row["message_id"] for row in found.collect()) == sorted(done)
        attempts = read(spark, location, "attempts", includeArchive=str(tmp_path / "archive"))
        assert attempts.count() == 50

        broker.create_queue("late", filter="n >= 0")
        filled = backfill(spark, location, "late")
        assert (filled.scanned, filled.matched) == (80, 80)
        # What was done had its payload archived.
        assert filled.added + filled.missing == 80
        assert backfill(spark, location, "late").offsets == 0
