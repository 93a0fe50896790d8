"""The data source ``penstock``: its options choose a reader or a writer; the writers publish.

Spark finds it by itself, as ``pyspark_penstock.DefaultSource``. Messages are made of the columns:

===========  =====================================================  ==============================
column       type                                                   without it
===========  =====================================================  ==============================
payload      binary or string                                       an error
attributes   map<string, …>, struct or string (a JSON object)       no attributes
group        string                                                 the default group
priority     int                                                    0
delay_ms     bigint                                                 no delay
dedup_id     string                                                 derived, see below
queue        string: sets the attribute ``queue``                   only the filters decide
===========  =====================================================  ==============================
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.clock import SystemClock
from penstock.errors import InvalidInput
from penstock.flight.client import FlightStore
from penstock.flight.tables import make_schema
from penstock.flight.writes import COLUMNS
from penstock.spark.options import (
    ROUTING_TABLES,
    read_options,
    remembered,
    table_metadata,
    with_memory,
    write_options,
)
from penstock.spark.reader import LogStreamReader, TableReader, spark_schema
from penstock.spark.route import AssignmentWriter, RouteStreamReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from penstock.spark.options import Options

logger = logging.getLogger(__name__)

# The names of Spark's types that a column may have, and how to say so.
_WHOLE: Final = {"byte", "short", "integer", "long"}
_TYPES: Final = {
    "payload": ({"binary", "string"}, "binary or string"),
    "attributes": ({"map", "struct", "string"}, "a map, a struct or a string of JSON"),
    "attributes_json": ({"string"}, "a string"),
    "group": ({"string"}, "a string"),
    "priority": (_WHOLE, "an int"),
    "delay_ms": (_WHOLE, "a bigint"),
    "dedup_id": ({"string"}, "a string"),
    "queue": ({"string"}, "a string"),
}
# The columns of a table that INSERT INTO publishes to.
_MESSAGE_COLUMNS: Final = from_arrow_schema(
    make_schema(
        "payload string?, attributes string?, group string?, priority int?, delay_ms long?, "
        "dedup_id string?, queue string?"
    )
)


@dataclass
class TaskCounts(WriterCommitMessage):
    """How many messages one task has published, and how many had been published before."""

    published: int
    duplicates: int


class PenstockSource(DataSource):
    """Read the tables of a broker, tail its log, and publish to it.

    Everything goes to the Flight port of a broker, named by ``option("server", …)`` or by the
    environment variable ``PENSTOCK_FLIGHT``::

        spark = penstock.spark.session()
        reader = spark.read.format("penstock").option("server", "grpc://127.0.0.1:8815")

    **Tables.** ``log``, ``messages``, ``active``, ``done``, ``failed``, ``attempts``, ``queues``,
    ``groups`` and ``stats``. Each action reads the present;
    :func:`penstock.spark.snapshot` keeps a moment for several tables and actions::

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

    :class:`~StreamPublisher` says what a replay of a stream publishes.
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
        """Return the reader that tails the log."""
        options = read_options(remembered(self.options, schema), streaming=True)
        if options.table in ROUTING_TABLES:
            return RouteStreamReader(options, schema)
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


# --- writers --------------------------------------------------------------------------------------


class BatchPublisher(DataSourceArrowWriter):
    """Publishes a DataFrame: ``df.write.format("penstock").mode("append").save()``.

    Tasks publish as they go; a job that fails has published a part of its rows. A task that is
    tried again publishes nothing twice: messages without a ``dedup_id`` get one that is made of
    this write, the partition and the row's content. To run a whole job again without publishing
    twice, give ``dedup_id`` yourself, from what identifies a row.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        check_schema(schema)
        self._location = options.location
        self._name = SystemClock().lease_id().hex()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish the rows of one task."""
        return _publish(self._location, iterator, self._name)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Say how many there were: the tasks have published."""
        _log_counts(messages, "this write")


class StreamPublisher(DataSourceStreamArrowWriter):
    """Publishes a stream: ``writeStream.format("penstock").option("checkpointLocation", …)``.

    Spark replays a micro-batch after a crash, so messages that its tasks had published come again:

    - **With a column ``dedup_id``** a message is published once if its replay comes within the
      broker's dedup window (``dedup_window_ms``, five minutes unless the broker was opened with
      another; up to seven days), whatever the plan looks like.
    - **Without it** the id is made of query, micro-batch, partition and the row's content (equal
      rows of one partition are counted). A message is then published once if, besides the
      window, the replay puts the same rows into the same partitions: so it is for sources that
      replay (this one, Kafka, files) and for everything deterministic behind them. ``rand()``,
      ``uuid()`` and a changed ``spark.sql.shuffle.partitions`` break it.
    - **A replay after the window** publishes messages of its tasks a second time. Restart
      a failed query within the window, or open the broker with a longer one.

    A message is never lost either way: Spark goes on only when all of a micro-batch is published.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        check_schema(schema)
        self._location = options.location

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish the rows of one task of a micro-batch."""
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        return _publish(self._location, iterator, f"{query}-{batch}")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Say how many there were: the tasks have published."""
        _log_counts(messages, f"micro-batch {batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: published messages stay, and the replay knows them by their dedup ids."""


def _log_counts(messages: list[WriterCommitMessage | None], what: str) -> None:
    known = [each for each in messages if isinstance(each, TaskCounts)]
    rows, duplicates = (sum(getattr(e, n) for e in known) for n in ("published", "duplicates"))
    logger.info("%s: %d published, %d of them duplicates", what, rows, duplicates)


def publisher(location: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for ``mapInArrow`` that publishes the rows of a task and counts them.

    It yields a row for each task, with the columns ``published`` and ``duplicates``.
    """
    name = SystemClock().lease_id().hex()

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counted = _publish(location, batches, name)
        columns = [pa.array([count]) for count in (counted.published, counted.duplicates)]
        yield pa.record_batch(columns, names=["published", "duplicates"])

    return run


def check_schema(schema: StructType) -> None:
    """Refuse columns that no message can be made of."""
    wrong = []
    for field in schema.fields:
        types, words = _TYPES.get(field.name, (set(), ""))
        if not types:
            wrong.append(f"{field.name} is not a column of messages")
        elif field.dataType.typeName() not in types:
            wrong.append(f"{field.name} is {words}, not {field.dataType.simpleString()}")
    if {"attributes", "attributes_json"} <= set(schema.names):
        wrong.append("attributes and attributes_json say the same: give one of them")
    if "payload" not in schema.names:
        wrong.append("payload is missing")
    if wrong:
        raise InvalidInput(
            f"messages can't be made of these columns: {'; '.join(wrong)}. There are "
            f"{', '.join(_TYPES)}; to make attributes of columns: struct(a, b) AS attributes"
        )


def _publish(location: str, batches: Iterator[pa.RecordBatch], name: str) -> TaskCounts:
    context = TaskContext.get()
    partition = 0 if context is None else context.partitionId()
    ids = _Ids(f"{name}-{partition}")
    client = FlightStore(location)
    made = (_message_columns(batch, ids) for batch in batches if batch.num_rows)
    first = next(made, None)
    if first is None:
        return TaskCounts(0, 0)
    # Every row has a dedup id by now, so lost rows may be sent again.
    counted = client.publish(chain([first], made), first.schema, again=True)
    return TaskCounts(counted.published, counted.duplicates)


class _Ids:
    """Derives dedup ids from the place of a row, its content, and a count of equal rows."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._seen: dict[bytes, int] = {}

    def of(self, content: list[Any]) -> str:
        digest = hashlib.blake2b(
            msgspec.msgpack.encode(content, order="deterministic"), digest_size=12
        ).digest()
        count = self._seen.get(digest, 0)
        self._seen[digest] = count + 1
        return f"{self._prefix}-{digest.hex()}-{count}"


def _message_columns(batch: pa.RecordBatch, ids: _Ids) -> pa.RecordBatch:
    """Return a batch as the broker wants it: JSON attributes, exact types, a dedup id each."""
    columns: dict[str, pa.Array] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "attributes":
            columns["attributes_json"] = _json(column)
        else:
            columns[name] = column.cast(COLUMNS[name])
    given = columns.get("dedup_id")
    if given is None or given.null_count:
        rows = zip(
            *(column.to_pylist() for name, column in columns.items() if name != "dedup_id"),
            strict=True,
        )
        known = [None] * batch.num_rows if given is None else given.to_pylist()
        derived = [own or ids.of(list(row)) for own, row in zip(known, rows, strict=True)]
        columns["dedup_id"] = pa.array(derived, pa.string())
    return pa.record_batch(list(columns.values()), names=list(columns))


def _json(column: pa.Array) -> pa.Array:
    """Return attributes as JSON objects; a map's or struct's values keep their types."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string())
    encode = msgspec.json.Encoder(order="sorted", decimal_format="number").encode
    texts = [
        None if value is None else encode(dict(value)).decode() for value in column.to_pylist()
    ]
    return pa.array(texts, pa.string())
