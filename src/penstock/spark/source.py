"""The data source ``penstock``: its options choose a reader or a writer.

Spark finds it by itself, as ``pyspark_penstock.DefaultSource``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.errors import InvalidInput
from penstock.flight.tables import make_schema
from penstock.spark.options import (
    FEEDS,
    ROUTING_TABLES,
    read_options,
    remembered,
    table_metadata,
    with_memory,
    write_options,
)
from penstock.spark.reader import TableReader, spark_schema
from penstock.spark.route import AssignmentWriter, RouteStreamReader
from penstock.spark.stream import FeedStreamReader, LogStreamReader
from penstock.spark.writer import BatchPublisher, StreamPublisher

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


# The columns of a table that INSERT INTO publishes to.
_MESSAGE_COLUMNS: Final = from_arrow_schema(
    make_schema(
        "payload string?, attributes string?, group string?, priority int?, delay_ms long?, "
        "dedup_id string?, queue string?"
    )
)


class PenstockSource(DataSource):
    """Read the tables of a broker, tail its log, and publish to it.

    Everything goes to the Flight port of a broker, named by ``option("server", …)`` or by the
    environment variable ``PENSTOCK_FLIGHT``::

        spark = penstock.spark.session()
        reader = spark.read.format("penstock").option("server", "grpc://127.0.0.1:8815")
        reader.option("table", "queues").load().select("name", "available", "done").show()
        reader.option("table", "done").option("queue", "books").option("filter", "price > 10")

        spark.readStream.format("penstock").option("table", "log")
        df.selectExpr("payload", "struct(kind, price) AS attributes").write.format(
            "penstock").mode("append").save()

    **Tables**: ``log``, ``messages``, ``active``, ``done``, ``failed``, ``attempts``, ``queues``,
    ``groups`` and ``stats``. Each action reads the present; :func:`penstock.spark.snapshot` keeps
    a moment for several tables and actions. The broker applies ``queue``, ``filter``, ``where``
    and ``columns``, so that it sends no more than that. ``includeArchive`` adds the rows of an
    archive. **Streams**: ``log``, and the change feed ``done``, ``failed`` and ``attempts``, with
    the options that Kafka's source has. ``docs/spark.md`` describes all of it.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format()``."""
        return "penstock"

    def schema(self) -> StructType:
        """Return the columns of the table that the options name."""
        made = table_metadata(self.options)
        if made is None:
            return spark_schema(read_options(self.options))
        if "table" in made:
            return with_memory(spark_schema(read_options(self.options)), made)
        write_options(self.options)
        return with_memory(_MESSAGE_COLUMNS, made)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a table in a batch."""
        options = remembered(self.options, schema)
        return TableReader(read_options(options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        """Return the reader that tails the log, or follows the history of queues."""
        options = read_options(remembered(self.options, schema), streaming=True)
        if options.table in ROUTING_TABLES:
            return RouteStreamReader(options, schema)
        if options.table in FEEDS:
            return FeedStreamReader(options, schema)
        return LogStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        """Return the writer that publishes a DataFrame."""
        options = write_options(remembered(self.options, schema))
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
        options = write_options(remembered(self.options, schema))
        _append_only(overwrite=overwrite)
        if options.table == "assignments":
            return AssignmentWriter(options, schema)
        return StreamPublisher(options, schema)


def _append_only(*, overwrite: bool) -> None:
    if overwrite:
        raise InvalidInput("messages can only be added: use mode('append') or outputMode('append')")
