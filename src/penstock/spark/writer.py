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
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import MapType, StringType

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, InvalidMessage, PenstockError
from penstock.flight.client import FlightStore
from penstock.flight.writes import COLUMNS
from penstock.model import Message, Value
from penstock.spark.quarantine import Quarantine
from penstock.validation import check_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

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
# The fields of a message behind payload and attributes, and their values where a row has none.
_DEFAULTS: Final[Mapping[str, Any]] = {"group": "", "priority": 0, "delay_ms": 0, "dedup_id": None}
_SHOWN_CHARS: Final = 300
_SHOWN_VALUE_CHARS: Final = 100
_SHOWN_ROWS: Final = 3
_decode: Final = msgspec.json.Decoder(dict[str, Value]).decode
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
    """The parts of the spool that one task has sent, and how many rows they have."""

    spool: str
    partition: int
    parts: list[str]
    rows: int


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
        partition, attempt = _task()
        client = FlightStore(self._location)
        rows = Rows(f"{write}-{partition}")
        if self._on_bad_row == "fail-first":
            spool = f"{self._run}-{write}"
            # An attempt that was given up may have sent parts, which nobody publishes.
            part = f"{partition}-{attempt}"
            try:
                parts = client.spool(spool, part, rows.messages(batches, _refuse))
            except InvalidMessage:
                # The write fails: if no task comes to its end, its abort knows of no spool.
                self._drop([SpooledParts(spool, partition, [part], 0)])
                raise
            return SpooledParts(spool, partition, parts, rows.taken)
        if self._on_bad_row == "skip":
            return rows.publish(client, batches, lambda *_: None)
        with Quarantine(self._quarantine_path or "", f"{write}-{partition}") as quarantine:
            return rows.publish(client, batches, quarantine.add)

    def _commit(self, messages: list[WriterCommitMessage | None], label: str) -> None:
        """Publish what was spooled, in the order of the partitions, and log the counts."""
        client = FlightStore(self._location)
        counts = [each for each in messages if isinstance(each, TaskCounts)]
        spooled = _spooled(messages)
        rows = sum(each.rows for each in spooled)
        published = 0
        for task in sorted(spooled, key=lambda each: each.partition):
            for part in task.parts:
                try:
                    said = client.publish_part(task.spool, part)
                except PenstockError as error:
                    raise type(error)(
                        f"{error} ({published} of {rows} rows of {label} were published)"
                    ) from None
                published += said.published
                counts.append(TaskCounts(said.published, said.duplicates))
        self._drop(messages)
        _log_counts(counts, label)

    def _drop(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the spools of a write. One that nobody drops is idle, which the broker ends."""
        for spool in {each.spool for each in _spooled(messages)}:
            with contextlib.suppress(PenstockError):
                FlightStore(self._location).drop_spool(spool)


def _spooled(messages: list[WriterCommitMessage | None]) -> list[SpooledParts]:
    return [each for each in messages if isinstance(each, SpooledParts) and each.parts]


def _task() -> tuple[int, int]:
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

    Spark replays a micro-batch after a crash, so messages that were published may come again:

    - **With a column ``dedup_id``** a message is published once if its replay comes within the
      broker's dedup window (``dedup_window_ms``, five minutes unless the broker was opened with
      another; up to seven days), whatever the plan looks like.
    - **Without it** the id is made of query, micro-batch, partition and the row's content (equal
      rows of one partition are counted). A message is then published once if, besides the
      window, the replay puts the same rows into the same partitions: so it is for sources that
      replay (this one, Kafka, files) and for everything deterministic behind them. ``rand()``,
      ``uuid()`` and a changed ``spark.sql.shuffle.partitions`` break it.
    - **A replay after the window** publishes messages a second time. Restart a failed query within
      the window, or open the broker with a longer one.

    A message is never lost either way: Spark goes on only when all of a micro-batch is published.
    """

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task of a micro-batch to the broker."""
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
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


def publisher(location: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for ``mapInArrow`` that publishes the rows of a task and counts them.

    It yields a row for each task, with the columns ``published`` and ``duplicates``.
    """
    name = SystemClock().lease_id().hex()

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = Rows(f"{name}-{_task()[0]}")
        counted = rows.publish(FlightStore(location), batches, _refuse)
        columns = [pa.array([count]) for count in (counted.published, counted.duplicates)]
        yield pa.record_batch(columns, names=["published", "duplicates"])

    return run


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
        bad_rows: Callable[[pa.RecordBatch, Mapping[int, str]], None],
    ) -> TaskCounts:
        """Publish the good rows of a task; ``bad_rows`` is told the others, with reasons."""
        made = self.messages(batches, bad_rows)
        first = next(made, None)
        published = duplicates = 0
        if first is not None:
            # Every row has a dedup id by now, so lost rows may be sent again.
            said = client.publish(chain([first], made), first.schema, again=True)
            published, duplicates = said.published, said.duplicates
        return TaskCounts(published, duplicates, self._left_out, tuple(self._examples))

    def messages(
        self,
        batches: Iterable[pa.RecordBatch],
        bad_rows: Callable[[pa.RecordBatch, Mapping[int, str]], None],
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
        else:
            columns[name] = column.cast(COLUMNS[name])
    nothing = [None] * batch.num_rows
    names = ("payload", "attributes_json", "queue", *_DEFAULTS)
    rows = [columns[name].to_pylist() if name in columns else nothing for name in names]
    defaults = tuple(_DEFAULTS.values())
    for at, (payload, text, queue, *rest) in enumerate(zip(*rows, strict=True)):
        if payload is None:
            bad.setdefault(at, "payload is null")
            continue
        try:
            attributes = {} if text is None else _decode(text)
            if queue is not None:
                attributes["queue"] = queue
            fields = (d if v is None else v for v, d in zip(rest, defaults, strict=True))
            check_message(Message(payload, attributes, *fields))
        except msgspec.DecodeError as error:
            bad.setdefault(at, f"attributes are not a flat JSON object: {error}")
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
