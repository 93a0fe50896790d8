"""From record batches to messages."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from penstock import limits
from penstock.errors import InvalidInput, InvalidMessage
from penstock.model import Message, Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.broker.broker import Broker

__all__ = ["COLUMNS", "Publisher"]

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
    """Publishes one stream of batches, in chunks that commit whole."""

    def __init__(self, broker: Broker, schema: pa.Schema) -> None:
        unknown = [name for name in schema.names if name not in COLUMNS]
        if unknown or len(set(schema.names)) < len(schema.names):
            raise InvalidInput(
                f"columns to publish are {', '.join(COLUMNS)}, each once; not "
                f"{', '.join(map(repr, unknown or schema.names))}"
            )
        if "payload" not in schema.names:
            raise InvalidInput("a column 'payload' is needed to publish")
        self._broker = broker
        self._row = 0
        self.published = 0
        self.duplicates = 0

    def publish(self, batch: pa.RecordBatch) -> None:
        """Publish a batch; what was published before a bad row stays."""
        try:
            for messages in _chunks(self._messages(batch)):
                self._publish(messages)
        except InvalidMessage as error:
            raise InvalidMessage(f"{error} ({self.published} rows before were published)") from None

    def _publish(self, messages: list[Message]) -> None:
        deduped = any(message.dedup_id is not None for message in messages)
        log = self._broker.log_stats() if deduped else None
        try:
            ids = self._broker.publish(messages)
        except InvalidMessage as error:
            found = _INDEX.match(str(error))
            assert found is not None
            where = self._row + int(found[1])
            raise InvalidMessage(f"row {where}: {str(error)[found.end() :]}") from None
        self._row += len(messages)
        self.published += len(messages)
        # A duplicate has the id of a message from before, or of one that came first in here.
        if log is not None:
            self.duplicates += len(ids) - len({id_ for id_ in ids if id_ >= log.end})

    def _messages(self, batch: pa.RecordBatch) -> Iterator[Message]:
        rows = batch.num_rows
        columns = {name: _column(batch, name) for name in batch.schema.names}
        payloads = columns["payload"].to_pylist()
        attributes = self._attributes(columns, rows)
        groups = _filled(columns.get("group"), rows, "")
        priorities = _filled(columns.get("priority"), rows, 0)
        delays = _filled(columns.get("delay_ms"), rows, 0)
        dedup_ids = _filled(columns.get("dedup_id"), rows, None)
        first = self._row
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
                            f"row {self._row + at}: attributes_json is not a flat JSON object: "
                            f"{error}"
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
        # Arrow trusts what comes over the wire; what reads it here must not crash over it.
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
