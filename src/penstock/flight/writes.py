"""Rows that clients write: messages to publish, messages of a backfill, rows of stages.

A stage holds all assignments of a stretch of one log, which executors have matched, until the
driver commits them. It lives in memory: after a restart the server tells the caller that it is not
here, and the caller stages again. A committed stage gives its rows back and keeps its place until
others have followed, so that committing it again is answered (stale), not refused.

A stage may ask to be assigned before it is committed: as soon as the cursor of its log has come to
it. Then the server assigns while executors match what follows. Where that fails, it is left to the
commit, which tells why.
"""

from __future__ import annotations

import contextlib
import re
import threading
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock import limits
from penstock.errors import InvalidInput, InvalidMessage, LimitReached, PenstockError, ServerBusy
from penstock.flight.protocol import ARCHIVED, MATCHES, OFFSETS, Committed, Published
from penstock.model import AssignStatus, Cursor, LogRecord, Message, Value
from penstock.server.security import check_publish
from penstock.validation import check_count, check_messages, check_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pyarrow.flight as fl

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.flight.protocol import FillCommand, StageCommand
    from penstock.server.security import Principal
    from penstock.store.filling import Filled

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
# The fields of a message behind payload and attributes, and their values where a row has none.
_DEFAULTS: Final = {"group": "", "priority": 0, "delay_ms": 0, "dedup_id": None}
_decode_json: Final = msgspec.json.Decoder(dict[str, Value]).decode
_INDEX: Final = re.compile(r"message (\d+): ")

KEPT_COMMITTED: Final = 2_000
"""How many committed stages keep their places: as many as may be committed again."""

# --- messages to publish --------------------------------------------------------------------------


class Publisher:
    """Publishes one stream of batches for a key, in chunks that commit whole."""

    def __init__(
        self, broker: Broker, schema: pa.Schema, principal: Principal, before: int = 0
    ) -> None:
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
        # Rows that others have published before this stream count in the messages of errors.
        self._before = before
        self._published = 0
        self._duplicates = 0

    @property
    def _row(self) -> int:
        """The number of the next row."""
        return self._before + self._published

    def publish(self, batch: pa.RecordBatch) -> Published:
        """Publish a batch and return the counts so far; rows before a bad one stay published."""
        try:
            for messages in _chunks(self._messages(batch)):
                self._publish(messages)
        except InvalidMessage as error:
            raise InvalidMessage(f"{error} ({self._row} rows before were published)") from None
        except LimitReached as error:
            if not self._row:
                raise
            before = f"{self._row} rows before were published"
            raise LimitReached(str(error).replace("Nothing was changed", before)) from None
        return Published(self._published, self._duplicates)

    def check(self, batch: pa.RecordBatch) -> None:
        """Refuse a batch that has a row that could not be published."""
        for messages in _chunks(self._messages(batch)):
            check_publish(self._principal, messages)
            with self._naming_rows():
                check_messages(messages)
            self._published += len(messages)

    def _publish(self, messages: list[Message]) -> None:
        deduped = any(message.dedup_id is not None for message in messages)
        log = self._broker.log_stats() if deduped else None
        check_publish(self._principal, messages)
        self._principal.spend_rate(messages)
        with self._naming_rows():
            ids = self._broker.publish(messages)
        self._published += len(messages)
        # A duplicate has the id of a message from before, or of one that came first in here.
        if log is not None:
            self._duplicates += len(ids) - len({id_ for id_ in ids if id_ >= log.end})

    @contextlib.contextmanager
    def _naming_rows(self) -> Iterator[None]:
        try:
            yield
        except InvalidMessage as error:
            found = _INDEX.match(str(error))
            assert found is not None
            where = self._row + int(found[1])
            raise InvalidMessage(f"row {where}: {str(error)[found.end() :]}") from None

    def _messages(self, batch: pa.RecordBatch) -> Iterator[Message]:
        columns = {name: _column(batch, name) for name in batch.schema.names}
        first = self._row
        for at, made in enumerate(messages_of(columns)):
            if isinstance(made, str):
                raise InvalidMessage(f"row {first + at}: {made}")
            yield made


def messages_of(columns: Mapping[str, pa.Array]) -> Iterator[Message | str]:
    """Make a message of each row, or say why there is none; ``columns``: of :data:`COLUMNS`."""
    rows = len(columns["payload"])
    attributes = (
        _maps(columns["attributes"]) if "attributes" in columns else [{} for _ in range(rows)]
    )
    values = [
        _filled(columns.get(name), rows, default)
        for name, default in {"attributes_json": None, "queue": None, **_DEFAULTS}.items()
    ]
    payloads = columns["payload"].to_pylist()
    every = zip(payloads, attributes, *values, strict=True)
    for payload, named, text, queue, group, priority, delay_ms, dedup_id in every:
        if payload is None:
            yield "payload is null"
            continue
        try:
            if text is not None:
                named.update(_decode_json(text))
        except msgspec.DecodeError as error:
            yield f"attributes are not a flat JSON object: {error}"
            continue
        if queue is not None:
            named["queue"] = queue
        yield Message(payload, named, group, priority, delay_ms, dedup_id)


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
    keys, values = column.keys.to_pylist(), column.items.to_pylist()
    present = column.is_valid().to_pylist()
    return [
        dict(zip(keys[begin:end], values[begin:end], strict=True)) if there else {}
        for (begin, end), there in zip(pairwise(column.offsets.to_pylist()), present, strict=True)
    ]


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
    reader: fl.MetadataRecordBatchReader, schema: pa.Schema, kind: str, label: str, rows: int
) -> Iterator[pa.RecordBatch]:
    """Read batches that must have exactly these columns, and so many rows in all.

    A stream whose sender has died ends like one that is whole.
    """
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
        rows -= batch.num_rows
        yield batch
    if rows:
        raise InvalidInput(f"{label}: it ended {rows} rows early, or says so; nothing was stored")


# --- messages of a backfill -----------------------------------------------------------------------


class Filler:
    """Puts streams of messages into queues: offsets of the log, or archived messages. Thread-safe.

    All rows are in memory before the first is stored, so the rows of a stream are bounded, and so
    is the number of streams at a time.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._room = threading.BoundedSemaphore(limits.MAX_RESTORES)

    def fill(self, command: FillCommand, reader: fl.MetadataRecordBatchReader) -> Filled:
        """Read a stream to its end and put its messages into the queue."""
        archived = reader.schema.names != OFFSETS.names
        schema = ARCHIVED if archived else OFFSETS
        kind = "a fill of archived messages" if archived else "a fill"
        most = limits.MAX_RESTORE_MESSAGES if archived else limits.MAX_OFFSET
        with self._place():
            rows: list[Any] = []
            size = 0
            for batch in _rows(reader, schema, kind, kind, command.rows):
                size += batch.nbytes
                if len(rows) + batch.num_rows > most or size > limits.MAX_RESTORE_BYTES:
                    messages = f"{most} archived messages or " if archived else ""
                    raise InvalidInput(
                        f"a fill of more than {messages}{limits.MAX_RESTORE_BYTES} bytes: fill "
                        "less at a time"
                    )
                for name in schema.names:
                    if name != "payload" and batch.column(name).null_count:
                        raise InvalidInput(f"{kind}: {name} of a row is null")
                rows += _records(batch) if archived else _ints(batch.column("offset"))
            fill = self._broker.restore if archived else self._broker.fill
            return fill(command.queue, command.begin, command.end, rows, filter=command.filter)

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        if not self._room.acquire(timeout=limits.MAX_CALL_MS / 1000):
            raise ServerBusy(
                f"{limits.MAX_RESTORES} fills are under way, which is all there may be: try again "
                "when one has ended"
            )
        try:
            yield
        finally:
            self._room.release()


def _records(batch: pa.RecordBatch) -> Iterator[tuple[LogRecord, bytes | None]]:
    micros = pc.cast(batch.column("published_at"), pa.int64())
    columns = [batch.column(name).to_pylist() for name in ARCHIVED.names if name != "published_at"]
    for published_ms, (offset, group, priority, size, delay_ms, text, payload) in zip(
        pc.divide(micros, 1000).to_pylist(), zip(*columns, strict=True), strict=True
    ):
        try:
            attributes = _decode_json(text)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"message {offset}: attributes_json: {error}") from None
        record = LogRecord(offset, attributes, group, priority, published_ms, size, delay_ms)
        yield record, payload


# --- stages ---------------------------------------------------------------------------------------


class Stage:
    """A staged stretch: rows as Arrow arrays, which are small and need no unpacking until used."""

    def __init__(self, command: StageCommand, batches: Sequence[pa.RecordBatch]) -> None:
        check_text(command.stage, "stage", limits.MAX_STAGE_NAME_BYTES)
        check_count(command.begin, "begin", 0, limits.MAX_OFFSET)
        check_count(command.end, "end", command.begin, limits.MAX_OFFSET)
        if command.assign and command.part:
            raise InvalidInput("a part of a stretch is assigned with the others, by their commit")
        self.command = command
        self.committed = False
        # Assigned when the cursor has come to it; tried once, the commit tries again.
        self.awaits_cursor = command.assign
        # Names repeat: once each, they take next to nothing.
        self._batches = [
            batch.set_column(1, "queue", batch.column("queue").dictionary_encode())
            for batch in batches
        ]
        self.rows = sum(batch.num_rows for batch in batches)
        self.bytes: int = sum(batch.nbytes for batch in self._batches)
        self.used_at_ms = 0

    def clear(self) -> None:
        """Note that it was committed, and give the rows back."""
        self.committed = True
        self._batches, self.bytes = [], 0

    def assignments(self, from_offset: int, into: dict[int, Sequence[str]]) -> None:
        """Add the assignments from an offset on."""
        for batch in self._batches:
            queues = batch.column("queue")
            names = queues.dictionary.to_pylist()
            offsets, indices = _ints(batch.column("offset")), _ints(queues.indices)
            # Most messages go to one queue, and share its name with all others that do.
            alone = [(name,) for name in names]
            found = dict(zip(offsets, map(alone.__getitem__, indices), strict=True))
            once = len(found) == len(offsets) and min(found, default=0) >= from_offset
            if once and into.keys().isdisjoint(found):
                into.update(found)
                continue
            for offset, index in zip(offsets, indices, strict=True):
                if offset >= from_offset:
                    known = into.get(offset, ())
                    if isinstance(known, list):
                        known.append(names[index])
                    else:
                        into[offset] = [*known, names[index]]


def _ints(column: pa.Array) -> list[int]:
    """Return whole numbers without nulls, many times as fast as pyarrow does."""
    if not len(column):
        return []
    view = memoryview(column.buffers()[1]).cast("q" if column.type == pa.int64() else "i")
    return view[column.offset : column.offset + len(column)].tolist()


class Stages:
    """The stages of a server. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._assigning = threading.Lock()
        self._staged: dict[str, Stage] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._staged)

    def receive(self, command: StageCommand, reader: fl.MetadataRecordBatchReader) -> Stage:
        """Read a stage's rows, not more than there is room for."""
        with self._lock:
            room = limits.MAX_STAGED_BYTES - sum(each.bytes for each in self._staged.values())
        label = f"stage {command.stage!r:.100}"
        batches = []
        total = 0
        for batch in _rows(reader, MATCHES, "a stage", label, command.rows):
            if any(column.null_count for column in batch.columns):
                raise InvalidInput(f"{label}: a row has a null")
            if batch.num_rows:
                bounds = pc.min_max(batch.column("offset")).as_py()
                if bounds["min"] < command.begin or bounds["max"] >= command.end:
                    raise InvalidInput(
                        f"{label}: an offset is not in [{command.begin}, {command.end})"
                    )
            total += batch.nbytes
            if total > max(room, 0) + limits.MAX_STAGED_BYTES:
                raise InvalidInput(f"a stage of more than {limits.MAX_STAGED_BYTES} bytes")
            batches.append(batch)
        return Stage(command, batches)

    def add(self, stage: Stage) -> None:
        """Keep a stage; one of the same name is replaced."""
        name = stage.command.stage
        self.expire()
        with self._lock:
            done = [key for key, each in self._staged.items() if each.committed]
            for key in done[: max(0, len(done) - KEPT_COMMITTED)]:
                del self._staged[key]
            others = [each for key, each in self._staged.items() if key != name]
            if len(others) >= limits.MAX_STAGES:
                raise LimitReached(f"{len(others)} stages wait to be committed, which is too many")
            total = sum(each.bytes for each in others) + stage.bytes
            if total > limits.MAX_STAGED_BYTES:
                raise LimitReached(
                    f"{total} bytes would be staged; at most {limits.MAX_STAGED_BYTES}: commit or "
                    "drop stages first, or route less at a time"
                )
            stage.used_at_ms = self._clock.now_ms()
            self._staged[name] = stage

    def get(self, names: Sequence[str]) -> list[Stage]:
        """Return stages by name, each once."""
        with self._lock:
            found = []
            for name in dict.fromkeys(names):
                stage = self._staged.get(name)
                if stage is None:
                    raise InvalidInput(
                        f"stage {name!r:.100} is not here (server restarted?): stage it again"
                    )
                stage.used_at_ms = self._clock.now_ms()
                found.append(stage)
            return found

    def assign(self, broker: Broker) -> None:
        """Assign the stages to which the cursors of their logs have come, one after the other.

        If another thread is doing that, it goes on with what this one has added.
        """
        while (stage := self._following(broker)) and self._assigning.acquire(blocking=False):
            try:
                stage.awaits_cursor = False
                with contextlib.suppress(PenstockError):
                    _assign(broker, stage.command.log, [stage], None)
            finally:
                self._assigning.release()

    def _following(self, broker: Broker) -> Stage | None:
        with self._lock:
            waiting = [stage for stage in self._staged.values() if stage.awaits_cursor]
        cursors = broker.log_stats().cursors if waiting else {}
        for stage in waiting:
            command, at = stage.command, cursors.get(stage.command.log, -1)
            if command.end <= at:
                # Of a task that ran twice: another has staged the same.
                stage.awaits_cursor = False
                stage.clear()
            elif command.begin <= at:
                return stage
        return None

    def drop(self, names: Sequence[str], prefix: str | None = None) -> int:
        """Forget stages, and those not committed that begin so; return how many there were."""
        with self._lock:
            begun = (
                ()
                if not prefix
                else [
                    name
                    for name, each in self._staged.items()
                    if name.startswith(prefix) and not each.committed
                ]
            )
            return sum(self._staged.pop(name, None) is not None for name in (*names, *begun))

    def expire(self) -> None:
        """Forget stages that nobody has used for a while."""
        before_ms = self._clock.now_ms() - limits.MAX_STAGE_IDLE_MS
        with self._lock:
            for name in [n for n, stage in self._staged.items() if stage.used_at_ms <= before_ms]:
                del self._staged[name]


def commit(broker: Broker, stages: Sequence[Stage], epoch: int | None) -> list[Committed]:
    """Assign stages, those of one log as one page."""
    pages: dict[int, list[Stage]] = {}
    for stage in sorted(stages, key=lambda each: (each.command.begin, each.command.end)):
        pages.setdefault(stage.command.log, []).append(stage)
    # All are checked before the first is assigned: a gap in one log leaves all as they were.
    for log, page in sorted(pages.items()):
        at = page[0].command.begin
        for command in (stage.command for stage in page):
            if command.begin > at:
                raise InvalidInput(f"the stages of log {log} leave a gap: [{at}, {command.begin})")
            at = max(at, command.end)
    return [_assign(broker, log, page, epoch) for log, page in sorted(pages.items())]


def _assign(broker: Broker, log: int, page: Sequence[Stage], epoch: int | None) -> Committed:
    if all(stage.committed for stage in page):
        # They may have been assigned before their commit.
        end = max(stage.command.end for stage in page)
        return Committed(log, AssignStatus.STALE.value, end, 0)
    assignments: dict[int, Sequence[str]] = {}
    begin = at = page[0].command.begin
    for (_, end), group in groupby(page, lambda each: (each.command.begin, each.command.end)):
        # Offsets that an earlier stage covers are its own: the same task may have run twice. Parts
        # of one stretch are all of it together.
        same = list(group)
        for stage in [each for each in same if each.command.part] or same[:1]:
            stage.assignments(at, assignments)
        at = max(at, end)
    # The oldest version decides: any change since then may concern one of the stages.
    version = _lowest(stage.command.filters_version for stage in page)
    lowest = _lowest([epoch, *(stage.command.epoch for stage in page)])
    answer = broker.assign(log, Cursor(begin, at, version), assignments, epoch=lowest)
    if answer.status in {AssignStatus.APPLIED, AssignStatus.TRIMMED, AssignStatus.STALE}:
        for stage in page:
            stage.clear()
    return Committed(log, answer.status.value, answer.cursor, answer.placed)


def _lowest(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)
