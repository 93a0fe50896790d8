"""The data source ``penstock``: its options choose a reader or a writer.

Spark finds it by itself, as ``pyspark_penstock.DefaultSource``. Names of options are those that
Spark users know from Kafka where there is one, and case does not matter. A name that is not known
is an error: a misspelt ``startingOffset`` must not read everything.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructField, StructType

from penstock import limits
from penstock.errors import InvalidInput, did_you_mean
from penstock.flight.location import locate
from penstock.flight.tables import TABLES as SCHEMAS
from penstock.flight.tables import make_schema
from penstock.spark.reader import TableReader, spark_schema
from penstock.spark.route import AssignmentWriter, RouteStreamReader
from penstock.spark.sessions import milliseconds
from penstock.spark.stream import FeedStreamReader, LogStreamReader
from penstock.spark.writer import BatchPublisher, StreamPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )

LOCATION_VARIABLE: Final = "PENSTOCK_FLIGHT"

TABLES: Final = tuple(SCHEMAS)
"""The tables of a batch read."""

ROUTING_TABLES: Final = ("matches", "stretches")
"""The tables that only a stream of the route job reads."""

FEEDS: Final = ("done", "failed", "attempts")
"""The tables that can be read as a stream by sequence number, and that an archive has too."""

ON_BAD_ROW: Final = ("fail-first", "skip", "quarantine")
"""The ways of a write to treat a row that can't be a message."""

DEFAULT_PARTITIONS: Final = 4

DEFAULT_TRIGGER_DELAY_MS: Final = 900_000
"""How long a stream waits for minOffsetsPerTrigger: a quarter of an hour, as Kafka's does."""

Place = str | dict[Any, Any]
"""``earliest``, ``latest``, or the offset to begin (or end) at for each log or queue."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options that were checked."""

    location: str
    table: str
    payload: bool = False
    queues: tuple[str, ...] | None = None
    filter: str | None = None
    where: str | None = None
    columns: tuple[str, ...] | None = None
    partitions: int = DEFAULT_PARTITIONS
    starting: Place | None = None
    ending: Place = "latest"
    starting_ms: int | dict[str, int] | None = None
    ending_ms: int | dict[str, int] | None = None
    max_offsets: int | None = None
    min_offsets: int | None = None
    trigger_delay_ms: int = DEFAULT_TRIGGER_DELAY_MS
    fail_on_data_loss: bool = True
    include_archive: str | None = None
    storage: dict[str, str] = {}
    snapshot: str | None = None
    stretches: tuple[tuple[int, int, int], ...] | None = None
    epoch: int | None = None
    on_bad_row: str = "fail-first"
    quarantine_path: str | None = None


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ValueError
    return names


def _number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not low <= int(text) <= high:
            raise ValueError
        return int(text)

    return parse


def _on_bad_row(text: str) -> str:
    if text not in ON_BAD_ROW:
        raise ValueError
    return text


def _writable(text: str) -> str:
    if not text.startswith("/") and "://" not in text:
        raise ValueError
    return text


def _place(text: str) -> Place:
    if text in {"earliest", "latest"}:
        return text
    return msgspec.json.decode(text, type=dict[str, int | dict[str, int]])


def _end(text: str) -> Place:
    if text == "earliest":
        raise ValueError
    return _place(text)


def _time_ms(text: str) -> int:
    if text.isdigit():
        return int(text)
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError
    return int(time.timestamp() * 1000)


def _times(text: str) -> int | dict[str, int]:
    if not text.startswith("{"):
        return _time_ms(text)
    by_name = msgspec.json.decode(text, type=dict[str, int | str])
    return {name: _time_ms(str(time)) for name, time in by_name.items()}


_TIME: Final = (
    "milliseconds since the epoch, a time with its zone like 2026-01-31T12:00:00Z, or JSON like "
    '{"0": 1893456000000} (by log or queue)'
)
_offsets: Final = (_number(1, limits.MAX_OFFSET), f"a number from 1 to {limits.MAX_OFFSET}")
_stretches: Final = msgspec.json.Decoder(tuple[tuple[int, int, int], ...]).decode
_parts: Final = _number(1, limits.MAX_PARTITIONS)
# The options of a read: the field, how its text is parsed, and what the text may be.
_PARSED: Final[dict[str, tuple[str, Callable[[str], Any], str]]] = {
    "payload": ("payload", _boolean, "true or false"),
    "includeArchive": ("include_archive", str, "a directory or s3://BUCKET/PREFIX"),
    "snapshot": ("snapshot", str, "the name of a snapshot"),
    "queue": ("queues", _names, "a list of names with commas"),
    "filter": ("filter", str, "a filter"),
    "where": ("where", str, "a condition"),
    "columns": ("columns", _names, "a list of names with commas"),
    "partitions": ("partitions", _parts, f"a number from 1 to {limits.MAX_PARTITIONS}"),
    "minPartitions": ("partitions", _parts, f"a number from 1 to {limits.MAX_PARTITIONS}"),
    "startingOffsets": (
        "starting",
        _place,
        "'earliest', 'latest' or JSON like {\"0\": 5} (by log or queue; -2: earliest, -1: latest)",
    ),
    "endingOffsets": ("ending", _end, "'latest' or JSON like {\"0\": 5}"),
    "startingTimestamp": ("starting_ms", _times, _TIME),
    "endingTimestamp": ("ending_ms", _times, _TIME),
    "maxOffsetsPerTrigger": ("max_offsets", *_offsets),
    "minOffsetsPerTrigger": ("min_offsets", *_offsets),
    "maxTriggerDelay": ("trigger_delay_ms", milliseconds, "a time like 15m, 30s or 500ms"),
    "retryFor": ("retry_ms", milliseconds, "a time like 5m, 30s or 500ms"),
    "failOnDataLoss": ("fail_on_data_loss", _boolean, "true or false"),
    "stretches": ("stretches", _stretches, "JSON like [[0, 5, 900]] (log, begin, end)"),
    "onBadRow": ("on_bad_row", _on_bad_row, f"one of {', '.join(map(repr, ON_BAD_ROW))}"),
    "quarantinePath": (
        "quarantine_path",
        _writable,
        "a directory (from the root) or a URL that executors can write to",
    ),
    "epoch": ("epoch", _number(0, limits.MAX_OFFSET), f"a number from 0 to {limits.MAX_OFFSET}"),
}
_PLACE: Final = {"server", "location", "token", "ca", "certificate", "key", "table", "retryfor"}
_BAD_ROWS: Final = {"onbadrow", "quarantinepath"}
_READ: Final = _PLACE | {name.lower() for name in _PARSED} - _BAD_ROWS
_WRITE: Final = _PLACE | _BAD_ROWS | {"epoch", "checkpointlocation"}
# Penstock's own jobs give these.
_OF_JOBS: Final = {"epoch", "stretches"}
# Spark itself puts these beside the user's.
_OF_SPARK: Final = {"path", "checkpointlocation", "queryname"}
_STREAM_ONLY: Final = {"maxoffsetspertrigger", "minoffsetspertrigger", "maxtriggerdelay"}
_BATCH_ONLY: Final = {
    *("endingoffsets", "endingtimestamp", "stretches", "snapshot", "includearchive"),
}
_LOG_ONLY: Final = {
    *("startingoffsets", "endingoffsets", "startingtimestamp", "endingtimestamp"),
    *("failondataloss", "stretches", *_STREAM_ONLY),
}


def read_options(given: Mapping[str, str], *, streaming: bool | None = None) -> Options:
    """Check the options of a read; ``streaming`` is None where that is not known yet."""
    options = _lowered(given, _READ)
    table = options.get("table")
    known = TABLES if streaming is False else (*TABLES, *ROUTING_TABLES)
    if table is None:
        raise InvalidInput(
            f"option 'table' is missing: one of {', '.join(TABLES)}. (A table that CREATE TABLE "
            "made without it only takes messages; one that was made with columns of its own "
            "does not know its options)"
        )
    if table not in known:
        raise InvalidInput(f"no table {table!r:.100}; there are {', '.join(TABLES)}")
    streams = {"log", *FEEDS, *ROUTING_TABLES}
    if streaming and table not in streams:
        names = ", ".join(("log", *FEEDS))
        raise InvalidInput(f"table {table!r} can't be read as a stream; {names} can")
    if table not in streams or (table in FEEDS and streaming is False):
        _refuse(options, _LOG_ONLY, f"are for the table 'log' and for streams, not {table!r}")
    if table not in FEEDS:
        _refuse(options, {"includearchive"}, f"are for {', '.join(FEEDS)}, not {table!r}")
    if streaming:
        _refuse(options, _BATCH_ONLY, "are for batch reads, not for a stream")
    elif streaming is False:
        _refuse(options, _STREAM_ONLY, "are for streams, not for a batch read")
    if "where" in options and "includearchive" in options:
        raise InvalidInput(
            "where is for rows of the broker: with includeArchive use where() of Spark"
        )
    for side in ("starting", "ending"):
        if f"{side}timestamp" in options and f"{side}offsets" in options:
            raise InvalidInput(f"{side}Offsets and {side}Timestamp exclude each other")
    parsed = _parsed(options, table)
    if (parsed.min_offsets or 0) > (parsed.max_offsets or limits.MAX_OFFSET):
        raise InvalidInput("minOffsetsPerTrigger is more than maxOffsetsPerTrigger")
    return parsed


def write_options(given: Mapping[str, str]) -> Options:
    """Check the options of a write: ``messages`` are published, ``assignments`` are routed."""
    options = _lowered(given, _WRITE)
    table = options.get("table", "messages")
    if table not in {"messages", "assignments"}:
        raise InvalidInput(f"table {table!r:.100} can't be written; 'messages' can be published")
    if table == "assignments":
        _refuse(options, _BAD_ROWS, "are for messages")
    made = _parsed(options, table)
    if (made.on_bad_row == "quarantine") != (made.quarantine_path is not None):
        raise InvalidInput("onBadRow 'quarantine' and quarantinePath go together: give both")
    return made


def _parsed(options: Mapping[str, str], table: str) -> Options:
    fields = {}
    for name, (field, parse, says) in _PARSED.items():
        text = options.get(name.lower())
        if text is not None:
            try:
                fields[field] = parse(text)
            except (InvalidInput, KeyError, ValueError, msgspec.MsgspecError):
                raise InvalidInput(f"{name} is {says}, not {text!r:.100}") from None
    if fields.get("payload") and "payload" not in fields.get("columns", ("payload",)):
        fields["columns"] += ("payload",)
    location = options.get("server") or options.get("location")
    if location != options.get("location", location):
        raise InvalidInput("options 'server' and 'location' name two brokers: give one of them")
    location = location or os.environ.get(LOCATION_VARIABLE)
    if not location:
        raise InvalidInput(
            "where is the broker? Give option('server', 'grpc://127.0.0.1:8815') or set "
            f"{LOCATION_VARIABLE}"
        )
    # The key goes along to the executors, whose environment may be another.
    access = {name: options.get(name) for name in ("token", "ca", "certificate", "key")}
    retry_ms = fields.pop("retry_ms", limits.MAX_AWAY_MS)
    located = locate(location, **access, retry_ms=retry_ms)
    storage = {name.upper(): text for name, text in options.items() if name.startswith("aws_")}
    return Options(location=located, table=table, storage=storage, **fields)


def _lowered(given: Mapping[str, str], known: set[str]) -> dict[str, str]:
    options = {name.lower(): value for name, value in given.items()}
    if "provider" in options:
        options = _of_statement(options)
    if "store" in options:
        raise InvalidInput(
            "there is no option 'store': Spark reads and writes every store through its server. "
            f"Start one (penstock serve --store {options['store']:.200}) and give its Flight "
            "address as 'server'. To read a bucket without a server, and without Spark, use "
            "penstock.open_reader"
        )
    # The access to an archive on S3.
    storage = {name for name in options if name.startswith("aws_") and "includearchive" in options}
    unknown = sorted(set(options) - known - _OF_SPARK - storage)
    if unknown:
        hint = did_you_mean(unknown[0], known - _OF_JOBS)
        raise InvalidInput(f"unknown option {unknown[0]!r:.100}; {hint}")
    return options


# --- tables of Spark's catalog --------------------------------------------------------------------

# Options that Spark itself adds to a table that CREATE TABLE makes.
_OF_TABLE: Final = {"provider", "owner", "comment", "collation", "external", "is_managed_location"}
_METADATA: Final = "penstock"


def _of_statement(given: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a CREATE TABLE; Spark gives each a second time, with a prefix."""
    return {
        name: value
        for name, value in given.items()
        if name not in _OF_TABLE and not name.startswith("option.")
    }


def table_metadata(given: Mapping[str, str]) -> dict[str, str] | None:
    """Return the options that a table of the catalog remembers; None if no CREATE TABLE gave them.

    Spark gives the options of CREATE TABLE to the data source once, when the table is made, and
    none to its reads and writes: those find them with the first column of the table.
    """
    lowered = {name.lower(): value for name, value in given.items()}
    if "provider" not in lowered:
        return None
    options = _of_statement(lowered)
    if (
        {"token", "key"} & options.keys()
        or "@" in options.get("server", options.get("location", ""))
        or any(name.startswith("aws_") for name in options)
    ):
        raise InvalidInput(
            "a token has no place in a catalog, which everybody may read: start Spark with "
            "PENSTOCK_TOKEN (of S3: AWS_SECRET_ACCESS_KEY …), or use CREATE TEMPORARY VIEW"
        )
    return options


def remembered(given: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """Return the options of a read or write, with those that the table's first column has."""
    known = schema.fields[0].metadata.get(_METADATA, "{}") if schema.fields else "{}"
    return {**msgspec.json.decode(known, type=dict[str, str]), **given}


def with_memory(schema: StructType, options: Mapping[str, str]) -> StructType:
    """Return a schema whose first column remembers options, and shows them as its comment."""
    first, *others = schema.fields
    # DESCRIBE shows comments, and Spark keeps no other text of a Python source for it.
    shown = ", ".join(
        f"{name} '{value}'"
        for name, value in sorted(options.items())
        if name not in {"ca", "certificate"}
    )
    memory = {_METADATA: msgspec.json.encode(options).decode(), "comment": shown}
    metadata = {**first.metadata, **memory}
    named = StructField(first.name, first.dataType, first.nullable, metadata)
    return StructType([named, *others])


def _refuse(options: Mapping[str, str], names: set[str], why: str) -> None:
    wrong = sorted(names & set(options))
    if wrong:
        raise InvalidInput(f"options {', '.join(wrong)} {why}")


# --- the source -----------------------------------------------------------------------------------

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
