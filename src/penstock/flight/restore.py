"""Archived messages on their way into a queue: rows of a Flight stream, taken in and restored.

All rows are at hand before the first is stored, so what one stream may bring is bounded, and so is
how many streams bring something at a time.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock import limits
from penstock.errors import InvalidInput
from penstock.flight.protocol import RESTORED, encode
from penstock.model import LogRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow.flight as fl

    from penstock.broker.broker import Broker
    from penstock.flight.protocol import RestoreCommand
    from penstock.model import Value
    from penstock.store.plans import Filled

__all__ = ["Restorer"]

_NULLABLE: Final = {"payload"}
_decode: Final = msgspec.json.Decoder(dict[str, str | int | float | bool | None]).decode


class Restorer:
    """Takes streams of archived messages in. Thread-safe."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._room = threading.BoundedSemaphore(limits.MAX_RESTORES)

    def restore(
        self,
        command: RestoreCommand,
        reader: fl.MetadataRecordBatchReader,
        answer: Callable[[bytes], None],
    ) -> Filled:
        """Read a stream to its end and put its messages into the queue.

        After each batch the client is told how many rows have come.
        """
        with self._place():
            records: list[tuple[LogRecord, bytes | None]] = []
            for batch in _batches(reader):
                records += _records(batch)
                answer(encode({"received": len(records)}))
            return self._broker.restore(
                command.queue, command.begin, command.end, records, filter=command.filter
            )

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


def _batches(reader: fl.MetadataRecordBatchReader) -> Iterator[pa.RecordBatch]:
    names = RESTORED.names
    if sorted(reader.schema.names) != sorted(names):
        raise InvalidInput(
            f"a restore has the columns {', '.join(names)}, not {', '.join(reader.schema.names)}"
        )
    rows = size = 0
    for chunk in reader:
        rows, size = rows + chunk.data.num_rows, size + chunk.data.nbytes
        if rows > limits.MAX_RESTORE_MESSAGES or size > limits.MAX_RESTORE_BYTES:
            raise InvalidInput(
                f"a restore of more than {limits.MAX_RESTORE_MESSAGES} messages or "
                f"{limits.MAX_RESTORE_BYTES} bytes: restore less at a time"
            )
        try:
            chunk.data.validate(full=True)
            batch = chunk.data.select(names).cast(RESTORED)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise InvalidInput(f"a restore: {error}") from None
        for name in names:
            if name not in _NULLABLE and batch.column(name).null_count:
                raise InvalidInput(f"a restore: {name} of a row is null")
        yield batch


def _records(batch: pa.RecordBatch) -> Iterator[tuple[LogRecord, bytes | None]]:
    micros = pc.cast(batch.column("published_at"), pa.int64())
    columns = [batch.column(name).to_pylist() for name in RESTORED.names if name != "published_at"]
    for published_ms, (offset, group, priority, size, delay_ms, attributes, payload) in zip(
        pc.divide(micros, 1000).to_pylist(), zip(*columns, strict=True), strict=True
    ):
        record = LogRecord(
            offset, _attributes(attributes, offset), group, priority, published_ms, size, delay_ms
        )
        yield record, payload


def _attributes(text: str, offset: int) -> dict[str, Value]:
    try:
        return _decode(text)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"message {offset}: attributes_json: {error}") from None
