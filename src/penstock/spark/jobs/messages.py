"""Jobs over messages: collect unneeded payloads, redrive failed messages, publish rows.

The broker drops a payload with its last reference; collect finds those that a crash or an older
version has left. Spark proposes, the broker decides: it looks at every queue again before it
deletes.
"""

from __future__ import annotations

from functools import partial, reduce
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import functions as F  # noqa: N812 - what everybody calls it

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, InvalidMessage
from penstock.flight.client import FlightStore
from penstock.flight.writes import COLUMNS
from penstock.spark.sessions import FROM_SPARK, located, pinned, read, revived
from penstock.spark.writer import (
    Rows,
    SpooledParts,
    check_schema,
    drop_spools,
    publish_spooled,
    spool_rows,
    task_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

_COLLECTED: Final = 10_000
_REDRIVEN: Final = 5_000
_SAMPLE: Final = 10
_HOLDERS: Final = ("active", "done", "failed")
FORMATS: Final = ("parquet", "json", "csv")
_SHOWN: Final = 5
_ROW_CHARS: Final = 200


def _chunks(
    rows: DataFrame, size: int, total: int, progress: Callable[[int, int], None] | None
) -> Iterator[list[int]]:
    """Yield message ids, some at a time; tell ``progress`` after each."""
    ids = (row["message_id"] for row in rows.select("message_id").toLocalIterator())
    tried = 0
    while chunk := list(islice(ids, size)):
        yield chunk
        tried += len(chunk)
        if progress is not None:
            progress(tried, total)


class CollectReport(msgspec.Struct, frozen=True, kw_only=True):
    """Payloads that no queue refers to, and those that the broker has freed (or would free)."""

    candidates: int
    candidate_bytes: int
    freed_messages: int
    freed_bytes: int
    dry_run: bool


def collect(
    spark: SparkSession,
    location: str,
    *,
    dry_run: bool = True,
    token: str | None = None,
    ca: str | Path | None = None,
    retry_for: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CollectReport:
    """Free payloads that no queue refers to, below all that is still in the log.

    >>> collect(spark, "grpc://127.0.0.1:8815").freed_bytes               # doctest: +SKIP
    >>> collect(spark, "grpc://127.0.0.1:8815", dry_run=False)            # doctest: +SKIP
    """
    client = FlightStore(located(location, token=token, ca=ca, retry_for=retry_for))
    location = client.location
    log = client.log_stats()
    below = F.col("message_id") < min(log.earliest, log.routed_up_to)
    kept = read(spark, location, "messages", columns=("message_id", "size"))
    # Payloads first: one whose reference goes meanwhile is at worst left to the next run, and one
    # whose reference is made later than this is above the watermark.
    kept = pinned(kept.where(below))
    held = reduce(
        lambda first, second: first.union(second),
        (read(spark, location, table, columns=("message_id",)) for table in _HOLDERS),
    )
    free = pinned(kept.join(held, "message_id", "left_anti").orderBy("message_id"))
    sums = free.agg(F.count("*").alias("rows"), F.sum("size").alias("bytes")).collect()[0]
    messages = size = 0
    for chunk in _chunks(free, _COLLECTED, sums["rows"], progress):
        freed = client.collect(chunk, dry_run=dry_run)
        messages += freed.freed_messages
        size += freed.freed_bytes
    return CollectReport(
        candidates=sums["rows"],
        candidate_bytes=sums["bytes"] or 0,
        freed_messages=messages,
        freed_bytes=size,
        dry_run=dry_run,
    )


class RedriveReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages were selected and redriven, and a few of them."""

    queue: str
    selected: int
    redriven: int
    sample: list[dict[str, Any]]
    dry_run: bool


def redrive(
    spark: SparkSession,
    location: str,
    queue: str,
    *,
    where: str | None = None,
    dry_run: bool = False,
    token: str | None = None,
    ca: str | Path | None = None,
    retry_for: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RedriveReport:
    """Make failed messages of a queue available again: all, or those that ``where`` selects.

    ``where`` is SQL over the table ``failed``; with ``dry_run`` they are only counted and shown.
    Selected messages that are no longer failed when their turn comes are left alone.

    >>> redrive(spark, "grpc://127.0.0.1:8815", "orders",
    ...         where="reason LIKE '%timed out%' AND attributes['country'] = 'NO'",
    ...         dry_run=True).selected                              # doctest: +SKIP
    17
    """
    client = FlightStore(located(location, token=token, ca=ca, retry_for=retry_for))
    location = client.location
    client.queues([queue])
    columns = ("message_id", "failed_at", "attempts", "reason", "group", "attributes_json")
    rows = pinned(
        _selected(read(spark, location, "failed", queues=[queue]), where).select(*columns)
    )
    selected = rows.count()
    sample = [row.asDict() for row in rows.orderBy("message_id").limit(_SAMPLE).collect()]
    redriven = 0
    if not dry_run:
        for chunk in _chunks(rows, _REDRIVEN, selected, progress):
            redriven += client.redrive(queue, message_ids=chunk)
    return RedriveReport(
        queue=queue, selected=selected, redriven=redriven, sample=sample, dry_run=dry_run
    )


def _selected(frame: DataFrame, where: str | None) -> DataFrame:
    if where is None:
        return frame
    try:
        return frame.where(where)
    except (AnalysisException, ParseException) as error:
        said = str(error).strip().splitlines()[0]
        raise InvalidInput(
            f"the condition can't be asked of failed messages: {said} (columns: "
            f"{', '.join(frame.columns)})"
        ) from None


# --- publish --------------------------------------------------------------------------------------


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows were read, published, and published before.

    ``duplicates`` had been published before: their dedup ids were known to the broker.
    """

    rows: int
    published: int
    duplicates: int
    dry_run: bool


def publish(
    spark: SparkSession,
    location: str,
    paths: str | Sequence[str] | None = None,
    *,
    query: str | None = None,
    format: str | None = None,  # noqa: A002 - Spark's word
    options: Mapping[str, str] | None = None,
    columns: Mapping[str, str] | None = None,
    dry_run: bool = False,
    token: str | None = None,
    ca: str | Path | None = None,
    retry_for: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PublishReport:
    """Publish rows of files (``format`` parquet, json or csv) or of a SQL ``query``.

    ``columns`` says what messages are made of: SQL expressions over the rows, by name of the
    message's column (payload, attributes, group, priority, delay_ms, dedup_id, queue). Columns of
    these names are taken as they are; without a payload the whole row as JSON is the payload.

    Every row is checked before any is published; a bad one is shown with its file and its content.
    Until then the rows wait in a spool of the broker. A task that is tried again publishes nothing
    twice; to run a job again that failed half-way, give a ``dedup_id`` and do it within the
    broker's dedup window. ``progress`` is told rows: published, and in all.

    >>> publish(spark, "grpc://127.0.0.1:8815", "orders/*.csv", format="csv",
    ...         columns={"attributes": "struct(kind, price)", "group": "tenant",
    ...                  "dedup_id": "order_id"})                         # doctest: +SKIP
    """
    client = FlightStore(located(location, token=token, ca=ca, retry_for=retry_for))
    rows = _rows(spark, paths, query, format, options or {})
    spool = SystemClock().lease_id().hex()
    try:
        messages = _mapped(rows, columns or {})
        check_schema(messages.drop("_place", "_row").schema)
        send = partial(_send, client, spool, dry_run)
        told = messages.mapInArrow(send, "told string").collect()
        sent = [msgspec.json.decode(row["told"], type=_Sent) for row in told]
        bad = [each for task in sent for each in task.bad]
        if bad:
            raise InvalidMessage(f"nothing was published: {' | '.join(bad[:_SHOWN])}")
        said = publish_spooled(client, [each.spooled for each in sent], "the job", progress)
    except FROM_SPARK as error:
        ours = revived(error)
        if ours is not None:
            raise ours from None
        raise InvalidInput(f"the rows can't be read or published: {_cause(error)}") from None
    finally:
        drop_spools(client, [] if dry_run else [spool])
    return PublishReport(
        rows=sum(each.spooled.rows for each in sent),
        published=said.published - said.duplicates,
        duplicates=said.duplicates,
        dry_run=dry_run,
    )


def _rows(
    spark: SparkSession,
    paths: str | Sequence[str] | None,
    query: str | None,
    format_: str | None,
    options: Mapping[str, str],
) -> DataFrame:
    if (paths is None) == (query is None):
        raise InvalidInput("give files to publish, or a query: one of the two")
    try:
        if query is not None:
            return spark.sql(query).withColumn("_place", F.lit("query"))
        many = [paths] if isinstance(paths, str) else list(paths or ())
        kind = format_ or many[0].rpartition(".")[2].lower()
        if kind not in FORMATS:
            raise InvalidInput(f"format {kind!r:.50} is not known; there are {', '.join(FORMATS)}")
        # A row that does not parse must stop the job, not become a row of nulls.
        reader = spark.read.options(mode="FAILFAST")
        if kind == "csv":
            reader = reader.options(header="true", inferSchema="true")
        return (
            reader.options(**options)
            .format(kind)
            .load(many)
            .withColumn("_place", F.col("_metadata.file_name"))
        )
    except FROM_SPARK as error:
        raise InvalidInput(f"the rows to publish can't be read: {_cause(error)}") from None


def _mapped(rows: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    """Make the columns of messages, and beside them the file and the text of each row."""
    unknown = sorted(set(columns) - set(COLUMNS))
    if unknown:
        raise InvalidInput(f"no column {unknown[0]!r:.100} of messages; {', '.join(COLUMNS)} are")
    names = [name for name in rows.columns if name != "_place"]
    made = {name: F.col(f"`{name}`") for name in COLUMNS if name in names}
    made |= {name: F.expr(text) for name, text in columns.items()}
    if "attributes" in columns:
        made.pop("attributes_json", None)
    whole = F.to_json(F.struct(*(f"`{name}`" for name in names)))
    made.setdefault("payload", whole)
    for name in ("group", "dedup_id", "queue"):
        if name in made:
            made[name] = made[name].cast("string")
    for name in ("priority", "delay_ms"):
        if name in made:
            made[name] = made[name].cast("int" if name == "priority" else "bigint")
    shown = F.substring(whole, 1, _ROW_CHARS)
    return rows.select(
        *(column.alias(name) for name, column in made.items()), "_place", shown.alias("_row")
    )


class _Sent(NamedTuple):
    """The rows that a task has spooled, and its first bad ones."""

    spooled: SpooledParts
    bad: list[str]


def _send(
    client: FlightStore,
    spool: str,
    dry_run: bool,  # noqa: FBT001 - partial() gives it a name
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Check the rows of a task, and send them into a spool unless this is a dry run."""
    bad: list[str] = []

    def note(batch: pa.RecordBatch, reasons: Mapping[int, str]) -> None:
        for at, reason in reasons.items():
            place, row = (batch.column(name)[at].as_py() for name in ("_place", "_row"))
            bad.append(f"{place}: {reason}; it is {row}")
        del bad[_SHOWN:]

    partition, _ = task_numbers()
    rows = Rows(f"{spool}-{partition}")
    if dry_run:
        for _ in rows.messages(batches, note):
            pass
        spooled = SpooledParts(spool, partition, [], rows.taken)
    else:
        spooled = spool_rows(client, spool, rows, batches, note)
    told = msgspec.json.encode(_Sent(spooled, bad)).decode()
    yield pa.record_batch([pa.array([told])], names=["told"])


def _cause(error: Exception) -> str:
    """Return the line of an error of Spark that says what was wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = (line for line in lines if line.startswith("Caused by:"))
    return next(causes, lines[0] if lines else type(error).__name__)
