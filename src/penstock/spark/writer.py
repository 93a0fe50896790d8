"""Writers of the data source: they check every row, and publish messages made of rows.

By default a write publishes nothing if one of its rows is bad. Its tasks send their rows into a
spool of the broker, and the driver publishes the spool once all tasks are through. A write that
goes on without bad rows (``onBadRow``) publishes as its tasks go.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import MapType, StringType

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, InvalidMessage, NotAllowed, PenstockError
from penstock.flight.client import FlightStore
from penstock.flight.location import Location, locate
from penstock.flight.protocol import Published
from penstock.flight.writes import COLUMNS, messages_of
from penstock.validation import check_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pyspark.sql.types import StructType

    from penstock.spark.source import Options

    # Is told the rows of a batch that can't be messages, by their numbers, with the reasons.
    BadRows = Callable[[pa.RecordBatch, Mapping[int, str]], None]

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
_SHOWN_CHARS: Final = 300
_SHOWN_VALUE_CHARS: Final = 100
_SHOWN_ROWS: Final = 3
_encode: Final = msgspec.json.Encoder(order="sorted", decimal_format="number").encode


def check_schema(schema: StructType) -> None:
    """Refuse columns that no message can be made of."""
    wrong = []
    for field in schema.fields:
        types, words = _TYPES.get(field.name, (set(), ""))
        if not types:
            wrong.append(f"{field.name} is not a column of messages")
        elif field.dataType.typeName() not in types:
            wrong.append(f"{field.name} is {words}, not {field.dataType.simpleString()}")
        elif isinstance(field.dataType, MapType) and field.dataType.keyType != StringType():
            wrong.append(f"{field.name} has names of text, not {field.dataType.simpleString()}")
    if {"attributes", "attributes_json"} <= set(schema.names):
        wrong.append("attributes and attributes_json say the same: give one of them")
    if "payload" not in schema.names:
        wrong.append("payload is missing")
    if wrong:
        raise InvalidInput(
            f"messages can't be made of these columns: {'; '.join(wrong)}. There are "
            f"{', '.join(_TYPES)}; to make attributes of columns: struct(a, b) AS attributes"
        )


# --- writers --------------------------------------------------------------------------------------


@dataclass
class TaskCounts(WriterCommitMessage):
    """The rows of one task that were published, with those published before, and those left out.

    ``examples`` shows the first rows that were left out.
    """

    published: int
    duplicates: int
    left_out: int = 0
    examples: tuple[str, ...] = ()


@dataclass
class SpooledParts(WriterCommitMessage):
    """The parts of a spool that one task has sent, and how many rows they have."""

    spool: str
    partition: int
    parts: list[str]
    rows: int


def spool_rows(
    client: FlightStore,
    spool: str,
    rows: Rows,
    batches: Iterable[pa.RecordBatch],
    bad_rows: BadRows,
) -> SpooledParts:
    """Send the good rows of a task into a spool of the broker."""
    partition, attempt = task_numbers()
    # An attempt that was given up may have sent parts, which nobody publishes.
    parts = client.spool(spool, f"{partition}-{attempt}", rows.messages(batches, bad_rows))
    return SpooledParts(spool, partition, parts, rows.taken)


def publish_spooled(
    client: FlightStore,
    tasks: Iterable[SpooledParts],
    label: str,
    progress: Callable[[int, int], None] | None = None,
) -> Published:
    """Publish what tasks have spooled, in the order of the partitions."""
    ordered = sorted(tasks, key=lambda each: each.partition)
    rows = sum(each.rows for each in ordered)
    published = duplicates = 0
    for spool, part in ((each.spool, part) for each in ordered for part in each.parts):
        try:
            said = client.publish_part(spool, part)
        except PenstockError as error:
            raise type(error)(
                f"{error} ({published} of {rows} rows of {label} were published)"
            ) from None
        published, duplicates = published + said.published, duplicates + said.duplicates
        if progress is not None:
            progress(published, rows)
    return Published(published, duplicates)


class _Publishing:
    """The common part of the writers: here a write is a batch, or a micro-batch of a stream."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_schema(schema)
        self._location = options.location
        self._on_bad_row = options.on_bad_row
        self._quarantine_path = options.quarantine_path
        self._run = SystemClock().lease_id().hex()

    def _write(self, batches: Iterable[pa.RecordBatch], write: str) -> WriterCommitMessage:
        """Publish the rows of a task, or send them into a spool."""
        client = FlightStore(self._location)
        task = f"{write}-{task_numbers()[0]}"
        rows = Rows(task)
        if self._on_bad_row == "fail-first":
            spool = f"{self._run}-{write}"
            try:
                return spool_rows(client, spool, rows, batches, _refuse)
            except InvalidMessage:
                # The write fails: if no task comes to its end, its abort knows of no spool.
                drop_spools(client, [spool])
                raise
        if self._on_bad_row == "skip":
            return rows.publish(client, batches, lambda *_: None)
        with Quarantine(self._quarantine_path or "", task) as quarantine:
            return rows.publish(client, batches, quarantine.add)

    def _commit(self, messages: list[WriterCommitMessage | None], label: str) -> None:
        """Publish what was spooled, and log the counts."""
        spooled = [each for each in messages if isinstance(each, SpooledParts)]
        said = publish_spooled(FlightStore(self._location), spooled, label)
        counts = [each for each in messages if isinstance(each, TaskCounts)]
        self._drop(messages)
        _log_counts([*counts, TaskCounts(said.published, said.duplicates)], label)

    def _drop(self, messages: list[WriterCommitMessage | None]) -> None:
        spools = {each.spool for each in messages if isinstance(each, SpooledParts)}
        drop_spools(FlightStore(self._location), spools)


def drop_spools(client: FlightStore, spools: Iterable[str]) -> None:
    """Drop spools. One that nobody drops is idle, which the broker ends."""
    for spool in spools:
        with contextlib.suppress(PenstockError):
            client.briefly().drop_spool(spool)


def reach(location: str) -> None:
    """Fail soon at an address where nobody is: who was reached once is waited for, as told."""
    place = locate(location)
    # A key that may only publish gets an answer, too.
    with contextlib.suppress(NotAllowed):
        FlightStore(Location(place, place.access, place.retry_ms)).info()


def task_numbers() -> tuple[int, int]:
    """Return the partition of this task, and the number of the attempt at it."""
    context = TaskContext.get()
    return (0, 0) if context is None else (context.partitionId(), context.taskAttemptId())


class BatchPublisher(_Publishing, DataSourceArrowWriter):
    """Publishes a DataFrame: ``df.write.format("penstock").mode("append").save()``.

    A DataFrame with a bad row is refused, and nothing of it is published, unless the option
    ``onBadRow`` is ``skip`` or ``quarantine``. A task that is tried again publishes nothing twice:
    messages without a ``dedup_id`` get one that is made of this write, the partition and the row's
    content. To run a whole job again without publishing twice, give ``dedup_id`` yourself, from
    what identifies a row.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        reach(options.location)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task to the broker."""
        return self._write(iterator, self._run)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish, now that every row was checked; say how many there were."""
        self._commit(messages, "this write")

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the spool. Messages that were published stay."""
        self._drop(messages)


class StreamPublisher(_Publishing, DataSourceStreamArrowWriter):
    """Publishes a stream: ``writeStream.format("penstock").option("checkpointLocation", …)``.

    A micro-batch with a bad row ends the query, and nothing of it is published, unless the option
    ``onBadRow`` is ``skip`` or ``quarantine``.

    Spark replays a micro-batch after a crash. Its messages are published once if the replay comes
    within the broker's dedup window, and if they have a column ``dedup_id``, or the replay puts
    the same rows into the same partitions, as deterministic queries over sources that replay do.
    A message is never lost either way: Spark goes on only when all of a micro-batch is published.
    """

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task of a micro-batch to the broker."""
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if batch == "0":
            reach(self._location)
        return self._write(iterator, f"{query}-{batch}")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Publish, now that every row was checked; say how many there were."""
        self._commit(messages, f"micro-batch {batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Drop the spool. Published messages stay: the replay knows them by their dedup ids."""
        self._drop(messages)


def _log_counts(counts: list[TaskCounts], label: str) -> None:
    published, duplicates, left_out = (
        sum(getattr(each, name) for each in counts)
        for name in ("published", "duplicates", "left_out")
    )
    logger.info("%s: %d published, %d of them duplicates", label, published, duplicates)
    if left_out:
        shown = [row for each in counts for row in each.examples][:_SHOWN_ROWS]
        more = "; …" if left_out > len(shown) else ""
        logger.warning("%s: bad rows left out: %d: %s%s", label, left_out, "; ".join(shown), more)


# --- rows -----------------------------------------------------------------------------------------


def _refuse(batch: pa.RecordBatch, bad: Mapping[int, str]) -> None:
    at, reason = next(iter(bad.items()))
    raise InvalidMessage(
        f"a row can't be published: {reason}: {shown_row(batch, at)} (the option onBadRow goes on "
        "without such rows: 'skip' or 'quarantine')"
    )


class Rows:
    """The rows of one task: checks them, makes messages of the good ones, and counts them.

    A message without a dedup id gets one that is made of the task's name, the content of its row,
    and a count of equal rows.
    """

    def __init__(self, task: str) -> None:
        self.taken = 0
        self._left_out = 0
        self._examples: list[str] = []
        self._task = task
        self._seen: dict[bytes, int] = {}

    def publish(
        self,
        client: FlightStore,
        batches: Iterable[pa.RecordBatch],
        bad_rows: BadRows,
    ) -> TaskCounts:
        """Publish the good rows of a task; ``bad_rows`` is told the others, with reasons."""
        # Every row has a dedup id by now, so lost rows may be sent again.
        said = client.publish(self.messages(batches, bad_rows), again=True)
        return TaskCounts(said.published, said.duplicates, self._left_out, tuple(self._examples))

    def messages(
        self,
        batches: Iterable[pa.RecordBatch],
        bad_rows: BadRows,
    ) -> Iterator[pa.RecordBatch]:
        """Yield batches as the broker wants them: JSON attributes, exact types, a dedup id each."""
        for batch in batches:
            columns, bad = _checked(batch)
            if bad:
                bad_rows(batch, bad)
                self._left_out += len(bad)
                for at in list(bad)[: _SHOWN_ROWS - len(self._examples)]:
                    self._examples.append(f"{shown_row(batch, at)}: {bad[at]}")
                good = pa.array([at not in bad for at in range(batch.num_rows)])
                columns = {name: column.filter(good) for name, column in columns.items()}
            made = self._with_ids(columns)
            if made.num_rows:
                self.taken += made.num_rows
                yield made

    def _with_ids(self, columns: dict[str, pa.Array]) -> pa.RecordBatch:
        given = columns.get("dedup_id")
        if given is None or given.null_count:
            rows = zip(
                *(column.to_pylist() for name, column in columns.items() if name != "dedup_id"),
                strict=True,
            )
            known = [None] * len(columns["payload"]) if given is None else given.to_pylist()
            derived = [own or self._id(list(row)) for own, row in zip(known, rows, strict=True)]
            columns["dedup_id"] = pa.array(derived, pa.string())
        return pa.record_batch(list(columns.values()), names=list(columns))

    def _id(self, content: list[Any]) -> str:
        digest = hashlib.blake2b(
            msgspec.msgpack.encode(content, order="deterministic"), digest_size=12
        ).digest()
        count = self._seen.get(digest, 0)
        self._seen[digest] = count + 1
        return f"{self._task}-{digest.hex()}-{count}"


def _checked(batch: pa.RecordBatch) -> tuple[dict[str, pa.Array], dict[int, str]]:
    """Return the columns of messages, and why some rows can't be messages, by their number."""
    columns: dict[str, pa.Array] = {}
    bad: dict[int, str] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name == "attributes":
            columns["attributes_json"] = _json(column, bad)
        elif name in COLUMNS:
            columns[name] = column.cast(COLUMNS[name])
    for at, made in enumerate(messages_of(columns)):
        if isinstance(made, str):
            bad.setdefault(at, made)
            continue
        try:
            check_message(made)
        except InvalidMessage as error:
            bad.setdefault(at, str(error))
    return columns, bad


def _json(column: pa.Array, bad: dict[int, str]) -> pa.Array:
    """Return attributes as JSON objects; a map's or struct's values keep their types."""
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string())
    texts: list[str | None] = []
    for at, value in enumerate(column.to_pylist()):
        attributes = {} if value is None else dict(value)
        for name, one in attributes.items():
            # JSON has no such numbers: they would become null.
            if type(one) is float and not isfinite(one):
                bad[at] = f"attribute {name!r:.100} is {one}: numbers must be finite"
        texts.append(None if value is None else _encode(attributes).decode())
    return pa.array(texts, pa.string())


def shown_row(batch: pa.RecordBatch, at: int) -> str:
    """Return the content of a row as JSON, cut to a line."""
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        value = column[at].as_py()
        if value is not None:
            # Arrow gives a map as a list of pairs.
            row[name] = dict(value) if isinstance(value, list) else _cut(value)
    text = json.dumps(row, default=lambda value: str(_cut(value)), ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _cut(value: Any) -> Any:
    if isinstance(value, bytes):
        value = value[: 4 * _SHOWN_VALUE_CHARS].decode(errors="replace")
    if isinstance(value, str) and len(value) > _SHOWN_VALUE_CHARS:
        return f"{value[:_SHOWN_VALUE_CHARS]}…"
    return value


# --- bad rows -------------------------------------------------------------------------------------


class Quarantine:
    """The file of one task, which is made when the first row comes.

    It has its name when it is whole. A task that is tried again replaces it.
    """

    def __init__(self, directory: str, name: str) -> None:
        self._files, place = _located(directory)
        self._path = f"{place}/{name}.parquet"
        # Readers of directories leave names out that begin so.
        self._unfinished = f"{place}/_{name}-{SystemClock().lease_id().hex()}"
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._writer is None:
            return
        self._writer.close()
        if kind is None:
            self._files.move(self._unfinished, self._path)
        else:
            with contextlib.suppress(OSError):
                self._files.delete_file(self._unfinished)

    def add(self, batch: pa.RecordBatch, bad: Mapping[int, str]) -> None:
        """Write rows of a batch, by their numbers, with the reasons."""
        rows = batch.take(pa.array(bad, pa.int64()))
        rows = rows.append_column("reason", pa.array(bad.values(), pa.string()))
        if self._writer is None:
            self._files.create_dir(self._path.rpartition("/")[0], recursive=True)
            self._writer = pq.ParquetWriter(self._unfinished, rows.schema, filesystem=self._files)
        self._writer.write_batch(rows)


def _located(directory: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the file system of a directory, and the path there."""
    try:
        files, path = pyarrow.fs.FileSystem.from_uri(directory)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidInput(f"quarantinePath {directory!r:.200} can't be used: {error}") from None
    return files, path.rstrip("/")
