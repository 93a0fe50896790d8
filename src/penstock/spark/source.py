"""The data source ``penstock``: which reader or writer serves which options.

Spark finds it by itself, as ``pyspark_penstock.DefaultSource``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from penstock.errors import InvalidInput
from penstock.spark.options import ROUTING_TABLES, read_options, write_options
from penstock.spark.publishing import BatchPublisher, StreamPublisher
from penstock.spark.reader import LogStreamReader, TableReader, spark_schema
from penstock.spark.route import AssignmentWriter, RouteStreamReader

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class PenstockSource(DataSource):
    """Read the tables of a broker, tail its log, and publish to it.

    Everything goes to the Flight port of a broker, named by ``option("location", …)`` or by the
    environment variable ``PENSTOCK_FLIGHT``::

        spark = penstock.spark.session()
        reader = spark.read.format("penstock").option("location", "grpc://127.0.0.1:8815")

    **Tables.** ``log``, ``messages``, ``active``, ``done``, ``failed``, ``attempts``, ``queues``,
    ``groups`` and ``stats``, each a snapshot of the moment in which the query was planned::

        >>> reader.option("table", "queues").load().select(
        ...     "name", "filter", "available", "in_flight", "done").show()
        +------+-------------+---------+---------+----+
        |  name|       filter|available|in_flight|done|
        +------+-------------+---------+---------+----+
        | books|kind = 'book'|        2|        0|   1|
        |orders| queue='or…' |        0|        0|   0|
        +------+-------------+---------+---------+----+

    ``queue`` picks queues (``"books,orders"``), ``filter`` is a filter in the language of queues,
    ``columns`` picks columns and ``payload`` adds the payload. All four are applied by the broker,
    so that it sends no more than that::

        >>> (reader.option("table", "done").option("queue", "books")
        ...  .option("filter", "price > 10").option("payload", "true").load()
        ...  .selectExpr("message_id", "attributes['kind'] AS kind",
        ...              "variant_get(parse_json(attributes_json), '$.price', 'int') AS price",
        ...              "string(payload) AS payload").show())
        +----------+----+-----+--------+
        |message_id|kind|price| payload|
        +----------+----+-----+--------+
        |         0|book|   12|one book|
        +----------+----+-----+--------+

    ``attributes`` is a map of text; ``attributes_json`` keeps the types. ``includeArchive`` names
    the directory of an archive, whose rows ``done``, ``failed`` and ``attempts`` then have too.

    **The log**, as a batch or as a stream, with the options that Kafka's source has:
    ``startingOffsets`` and ``endingOffsets`` (``earliest``, ``latest``, ``{"0": 5}``),
    ``startingTimestamp``, ``maxOffsetsPerTrigger``, ``minPartitions``, ``failOnDataLoss``::

        >>> (spark.readStream.format("penstock").option("table", "log")
        ...  .option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "10000").load()
        ...  .writeStream.format("parquet").option("checkpointLocation", "ckpt")
        ...  .trigger(availableNow=True).start("log.parquet"))

    **Publishing.** A DataFrame with ``payload`` and, if wanted, ``attributes`` (a map, a struct
    or JSON text), ``group``, ``priority``, ``delay_ms``, ``dedup_id`` and ``queue``::

        >>> df.selectExpr("payload", "struct(kind, price) AS attributes").write.format(
        ...     "penstock").mode("append").save()

    :class:`~penstock.spark.publishing.StreamPublisher` says what a replay of a stream publishes.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format()``."""
        return "penstock"

    def schema(self) -> StructType:
        """Return the columns of the table that the options name."""
        return spark_schema(read_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a table in a batch."""
        return TableReader(read_options(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        """Return the reader that tails the log."""
        options = read_options(self.options, streaming=True)
        if options.table in ROUTING_TABLES:
            return RouteStreamReader(options, schema)
        return LogStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        """Return the writer that publishes a DataFrame."""
        options = write_options(self.options)
        _append_only(overwrite=overwrite)
        if options.table != "messages":
            raise InvalidInput("only messages can be written in a batch")
        return BatchPublisher(options, schema)

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        """Return the writer that publishes a stream, or hands matches to the broker."""
        options = write_options(self.options)
        _append_only(overwrite=overwrite)
        if options.table == "assignments":
            return AssignmentWriter(options, schema)
        return StreamPublisher(options, schema)


def _append_only(*, overwrite: bool) -> None:
    if overwrite:
        raise InvalidInput("messages can only be added: use mode('append') or outputMode('append')")
