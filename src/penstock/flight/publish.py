"""Rows that clients send: messages to publish, archived messages to restore, rows to stage."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock import limits
from penstock.errors import InvalidInput, InvalidMessage
from penstock.flight.protocol import RESTORED, FilledCounts, StageCommand, encode
from penstock.flight.stages import Stage
from penstock.model import LogRecord, Message, Value
from penstock.server.security import check_publish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow.flight as fl

    from penstock.broker.broker import Broker
    from penstock.flight.protocol import FillStage, RestoreCommand
    from penstock.server.security import Principal

COLUMNS: Final[dict[str, pa.DataType]] = {
    "payload": pa.binary(),
    "attributes": pa.map_(pa.string(), pa.string()),
    "attributes_json": pa.string(),
    "group": pa.string(),
    "priority": pa.int64(),
    "delay_ms": pa.int64(),
    "dedup_id": pa.string(),
    "queue": pa.string(),
}
_decode_json: Final = msgspec.json.Decoder(dict[str, Value]).decode
_INDEX: Final = re.compile(r"message (\d+): ")


class Publisher:
    """Publishes one stream of batches for a key, in chunks that commit whole."""

    def __init__(self, broker: Broker, schema: pa.Schema, principal: Principal) -> None:
        unknown = [name for name in schema.names if name not in COLUMNS]
        if unknown or len(set(schema.names)) < len(schema.names):
            raise InvalidInput(
                f"columns to publish are {', '.join(COLUMNS)}, each once; not "
                f"{', '.join(map(repr, unknown or schema.names))}"
            )
        if "payload" not in schema.names:
            raise InvalidInput("a column 'payload' is needed to publish")
        self._broker = broker
        self._principal = principal
        self.published = 0
        self.duplicates = 0

    def publish(self, batch: pa.RecordBatch) -> None:
        """Publish a batch; rows before a bad one stay published."""
        try:
            for messages in _chunks(self._messages(batch)):
                self._publish(messages)
        except InvalidMessage as error:
            raise InvalidMessage(f"{error} ({self.published} rows before were published)") from None

    def _publish(self, messages: list[Message]) -> None:
        deduped = any(message.dedup_id is not None for message in messages)
        log = self._broker.log_stats() if deduped else None
        check_publish(self._principal, messages)
        try:
            ids = self._broker.publish(messages)
        except InvalidMessage as error:
            found = _INDEX.match(str(error))
            assert found is not None
            where = self.published + int(found[1])
            raise InvalidMessage(f"row {where}: {str(error)[found.end() :]}") from None
        self.published += len(messages)
        # A duplicate has the id of a message from before, or of one that came first in here.
        if log is not None:
            self.duplicates += len(ids) - len({id_ for id_ in ids if id_ >= log.end})

    def _messages(self, batch: pa.RecordBatch) -> Iterator[Message]:
        rows, first = batch.num_rows, self.published
        columns = {name: _column(batch, name) for name in batch.schema.names}
        payloads = columns["payload"].to_pylist()
        attributes = self._attributes(columns, rows)
        groups = _filled(columns.get("group"), rows, "")
        priorities = _filled(columns.get("priority"), rows, 0)
        delays = _filled(columns.get("delay_ms"), rows, 0)
        dedup_ids = _filled(columns.get("dedup_id"), rows, None)
        for at, fields in enumerate(
            zip(payloads, attributes, groups, priorities, delays, dedup_ids, strict=True)
        ):
            if fields[0] is None:
                raise InvalidMessage(f"row {first + at}: payload is null")
            yield Message(*fields)

    def _attributes(self, columns: dict[str, pa.Array], rows: int) -> list[dict[str, Value]]:
        made = (
            _maps(columns["attributes"]) if "attributes" in columns else [{} for _ in range(rows)]
        )
        if "attributes_json" in columns:
            for at, text in enumerate(columns["attributes_json"].to_pylist()):
                if text is not None:
                    try:
                        made[at].update(_decode_json(text))
                    except msgspec.DecodeError as error:
                        raise InvalidMessage(
                            f"row {self.published + at}: attributes_json is not a flat JSON "
                            f"object: {error}"
                        ) from None
        if "queue" in columns:
            for attributes, queue in zip(made, columns["queue"].to_pylist(), strict=True):
                if queue is not None:
                    attributes["queue"] = queue
        return made


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    column = batch.column(name)
    wanted = COLUMNS[name]
    try:
        # Arrow trusts bytes of the network, and would crash here over wrong ones.
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise InvalidInput(f"column {name!r} is not valid: {error}") from None
    if column.type == wanted:
        return column
    try:
        if name == "payload" and pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return column.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        raise InvalidInput(f"column {name!r} is {column.type}, {wanted} is expected") from None


def _filled(column: pa.Array | None, rows: int, default: Any) -> list[Any]:
    if column is None:
        return [default] * rows
    if column.null_count and default is not None:
        column = column.fill_null(default)
    values: list[Any] = column.to_pylist()
    return values


def _maps(column: pa.Array) -> list[dict[str, Value]]:
    """Make dicts of a map column; a null row is empty."""
    offsets = column.offsets.to_pylist()
    keys, values = column.keys.to_pylist(), column.items.to_pylist()
    made = [
        dict(zip(keys[begin:end], values[begin:end], strict=True))
        for begin, end in pairwise(offsets)
    ]
    if column.null_count:
        made = [
            each if ok else {} for each, ok in zip(made, column.is_valid().to_pylist(), strict=True)
        ]
    return made


def _chunks(messages: Iterator[Message]) -> Iterator[list[Message]]:
    chunk: list[Message] = []
    total = 0
    for message in messages:
        total += len(message.payload)
        if chunk and (
            len(chunk) >= limits.MAX_PUT_CHUNK_MESSAGES or total > limits.MAX_PUT_CHUNK_BYTES
        ):
            yield chunk
            chunk, total = [], len(message.payload)
        chunk.append(message)
    if chunk:
        yield chunk


def _rows(
    reader: fl.MetadataRecordBatchReader, schema: pa.Schema, kind: str, label: str
) -> Iterator[pa.RecordBatch]:
    """Read batches that must have exactly these columns."""
    names = schema.names
    if sorted(reader.schema.names) != sorted(names):
        raise InvalidInput(
            f"{kind} has the columns {', '.join(names)}, not {', '.join(reader.schema.names)}"
        )
    for chunk in reader:
        try:
            chunk.data.validate(full=True)
            batch = chunk.data.select(names).cast(schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise InvalidInput(f"{label}: {error}") from None
        yield batch


# --- stages ---------------------------------------------------------------------------------------


def receive_stage(
    command: StageCommand | FillStage, reader: fl.MetadataRecordBatchReader, room: int
) -> Stage:
    """Read a stage's rows, not more than there is room for."""
    columns = [("offset", pa.int64())]
    if isinstance(command, StageCommand):
        columns.append(("queue", pa.string()))
    label = f"stage {command.stage!r:.100}"
    batches = []
    total = 0
    for batch in _rows(reader, pa.schema(columns), "a stage", label):
        if any(column.null_count for column in batch.columns):
            raise InvalidInput(f"{label}: a row has a null")
        if batch.num_rows:
            bounds = pc.min_max(batch.column("offset")).as_py()
            if bounds["min"] < command.begin or bounds["max"] >= command.end:
                raise InvalidInput(f"{label}: an offset is not in [{command.begin}, {command.end})")
        total += batch.nbytes
        if total > max(room, 0) + limits.MAX_STAGED_BYTES:
            raise InvalidInput(f"a stage of more than {limits.MAX_STAGED_BYTES} bytes")
        batches.append(batch)
    return Stage(command, batches)


# --- archived messages ----------------------------------------------------------------------------


class Restorer:
    """Puts streams of archived messages into queues. Thread-safe.

    All rows are in memory before the first is stored, so the rows of a stream are bounded, and so
    is the number of streams at a time.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._room = threading.BoundedSemaphore(limits.MAX_RESTORES)

    def restore(
        self,
        command: RestoreCommand,
        reader: fl.MetadataRecordBatchReader,
        answer: Callable[[bytes], None],
    ) -> FilledCounts:
        """Read a stream to its end and put its messages into the queue.

        After each batch the server tells the client how many rows have come.
        """
        with self._place():
            records: list[tuple[LogRecord, bytes | None]] = []
            size = 0
            for batch in _rows(reader, RESTORED, "a restore", "a restore"):
                rows, size = len(records) + batch.num_rows, size + batch.nbytes
                if rows > limits.MAX_RESTORE_MESSAGES or size > limits.MAX_RESTORE_BYTES:
                    raise InvalidInput(
                        f"a restore of more than {limits.MAX_RESTORE_MESSAGES} messages or "
                        f"{limits.MAX_RESTORE_BYTES} bytes: restore less at a time"
                    )
                for name in RESTORED.names:
                    if name != "payload" and batch.column(name).null_count:
                        raise InvalidInput(f"a restore: {name} of a row is null")
                records += _records(batch)
                answer(encode({"received": len(records)}))
            filled = self._broker.restore(
                command.queue, command.begin, command.end, records, filter=command.filter
            )
            return FilledCounts(filled.added, filled.already, filled.missing)

    @contextmanager
    def _place(self) -> Iterator[None]:
        if not self._room.acquire(blocking=False):
            raise InvalidInput(
                f"{limits.MAX_RESTORES} restores are under way, which is all there may be: try "
                "again when one has ended"
            )
        try:
            yield
        finally:
            self._room.release()


def _records(batch: pa.RecordBatch) -> Iterator[tuple[LogRecord, bytes | None]]:
    micros = pc.cast(batch.column("published_at"), pa.int64())
    columns = [batch.column(name).to_pylist() for name in RESTORED.names if name != "published_at"]
    for published_ms, (offset, group, priority, size, delay_ms, text, payload) in zip(
        pc.divide(micros, 1000).to_pylist(), zip(*columns, strict=True), strict=True
    ):
        try:
            attributes = _decode_json(text)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"message {offset}: attributes_json: {error}") from None
        record = LogRecord(offset, attributes, group, priority, published_ms, size, delay_ms)
        yield record, payload
