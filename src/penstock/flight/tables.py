"""The tables of a store in Arrow: their schemas, and the record batches of a pinned store.

Records are decoded a batch at a time in one call, and only as far as the chosen columns need: the
attributes of a message stay packed if no column and no filter needs them.
"""

from __future__ import annotations

from array import array
from functools import partial
from itertools import accumulate, chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput
from penstock.filters import parse
from penstock.flight.conditions import parse_condition
from penstock.model import AttemptEnd, QueueSpec, State
from penstock.store.codec.metadata import decode_heads, decode_many
from penstock.store.codec.records import AttemptRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.filters import Filter
    from penstock.flight.conditions import Condition
    from penstock.flight.snapshots import Part, Piece
    from penstock.model import Value
    from penstock.store.snapshot import LiveRow, PinnedStore

BATCH_ROWS: Final = 32_768
# Rows that are decoded at a time, while publishers of this process wait; batches are joined.
SLICE_ROWS: Final = 1_024
# Batches with payloads end sooner: their memory must not depend on the size of payloads.
BATCH_BYTES: Final = 4 << 20
# Metadata is bounded by its own limit; this many packed bytes are decoded at a time.
BATCH_PACKED_BYTES: Final = 32 << 20

# --- schemas --------------------------------------------------------------------------------------

# Times are UTC, in microseconds, as Spark has them.
TIME: Final = pa.timestamp("us", tz="UTC")
_MS: Final = pa.timestamp("ms", tz="UTC")
TEXT_MAP: Final = pa.map_(pa.string(), pa.string())
_TYPES: Final = {
    "int": pa.int32(),
    "long": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "bool": pa.bool_(),
    "time": TIME,
    "map": TEXT_MAP,
}
_MESSAGE: Final = "published_at time, group string, priority int, size long"
_ATTRIBUTES: Final = "attributes map, attributes_json string"
_ENDED: Final = f"{_MESSAGE}, delay_ms long, {_ATTRIBUTES}"
_ATTEMPTS: Final = "attempts int, first_claimed_at time?"
_DEPTHS: Final = "available long, delayed long, in_flight long"


def make_schema(text: str) -> pa.Schema:
    """Make a schema of columns and their types; only a type with ``?`` may be null."""
    fields = []
    for column in text.split(", "):
        name, kind = column.split(" ")
        fields.append(pa.field(name, _TYPES[kind.rstrip("?")], nullable=kind.endswith("?")))
    return pa.schema(fields)


TABLES: Final[dict[str, pa.Schema]] = {
    "log": make_schema(f"log int, offset long, {_ENDED}"),
    # The log may drop a message before the last queue does: then only its size is known.
    "messages": make_schema(
        "message_id long, published_at time?, group string?, priority int?, size long, "
        "attributes map?, attributes_json string?"
    ),
    "active": make_schema(
        f"queue string, message_id long, state string, group string, priority int, {_ATTEMPTS}, "
        "published_at time, visible_at time, lease_deadline time?, consumer string?, size long, "
        f"delay_ms long, {_ATTRIBUTES}"
    ),
    "done": make_schema(
        f"queue string, message_id long, sequence long, done_at time, {_ATTEMPTS}, {_ENDED}"
    ),
    "failed": make_schema(
        f"queue string, message_id long, sequence long, failed_at time, {_ATTEMPTS}, "
        f"reason string, {_ENDED}"
    ),
    "attempts": make_schema(
        "queue string, message_id long, attempt int, consumer string, claimed_at time, "
        "ended_at time?, outcome string, reason string"
    ),
    "queues": make_schema(
        "name string, filter string, ordering string, lease_ms long, max_attempts int, "
        "backoff_base_ms long, backoff_cap_ms long, delay_ms long, done_retention_ms long, "
        "failed_retention_ms long, unclaimed_retention_ms long, bucket_exponent int, "
        "description string, dead_letter string, labels map, created_at_ms long, version long, "
        "max_messages long, max_bytes long, overflow string, "
        f"{_DEPTHS}, done long, failed long, draining bool"
    ),
    "groups": make_schema(f"queue string, group string, {_DEPTHS}, oldest_published_at time?"),
    "stats": make_schema("queue string?, metric string, value long?"),
}
# The tables of messages: they have payloads, and attributes to filter by.
WITH_PAYLOAD: Final = frozenset({"log", "messages", "active", "done", "failed"})
_PAYLOAD: Final = pa.field("payload", pa.binary())
# The log's record as it is stored (store/codec/metadata.py), for callers that name this column: it
# costs the broker no decoding. Records that do not decode are not left out.
_METADATA: Final = pa.field("metadata", pa.binary(), nullable=False)


class Selection(NamedTuple):
    """A table, the chosen columns, and the filter and the condition that rows must satisfy."""

    table: str
    schema: pa.Schema
    filter: Filter | None
    where: Condition | None = None

    def wants(self, *columns: str) -> bool:
        """Return whether any of the columns is chosen."""
        return any(column in self.schema.names for column in columns)

    def wants_attributes(self) -> bool:
        """Return whether a column or the filter needs attributes."""
        return self.filter is not None or self.wants("attributes", "attributes_json")

    def wants_metadata(self) -> bool:
        """Return whether a column or the filter needs the record of a message."""
        # Sizes tell how many rows with payloads make a batch.
        return self.wants_attributes() or self.wants(*_FROM_METADATA, "payload")

    def judged(self) -> Selection:
        """Return the selection of the columns that the condition is about."""
        table = TABLES[self.table]
        # Without a column there would be no rows to judge.
        names = sorted(self.where.columns) or table.names[:1] if self.where is not None else []
        fields = [table.field(name) for name in names]
        return Selection(self.table, pa.schema(fields), None)


def schema_of(
    table: str, *, payload: bool = False, columns: Sequence[str] | None = None
) -> pa.Schema:
    """Return the schema of a table; ``columns`` chooses and orders, the payload among them."""
    schema = TABLES.get(table)
    if schema is None:
        raise InvalidInput(f"no table {table!r:.100}; there are {', '.join(TABLES)}")
    if table in WITH_PAYLOAD:
        whole = schema.append(_PAYLOAD)
    elif payload:
        raise InvalidInput(f"table {table} has no payloads")
    else:
        whole = schema
    if columns is None:
        return whole if payload else schema
    if table == "log":
        whole = whole.append(_METADATA)
    if not columns or len(set(columns)) < len(columns):
        raise InvalidInput("columns must name at least one column, and each once")
    for name in columns:
        if name not in whole.names:
            raise InvalidInput(
                f"table {table} has no column {name!r:.100}; it has {', '.join(whole.names)}"
            )
    return pa.schema([whole.field(name) for name in columns])


def select(
    table: str,
    *,
    payload: bool = False,
    columns: Sequence[str] | None = None,
    filter_text: str | None = None,
    where: str | None = None,
) -> Selection:
    """Check a choice of rows and columns."""
    schema = schema_of(table, payload=payload, columns=columns)
    if filter_text is not None and table not in WITH_PAYLOAD:
        raise InvalidInput(f"table {table} has no attributes to filter by")
    filter_ = None if filter_text is None else parse(filter_text)
    condition = None if where is None else parse_condition(where, TABLES[table])
    return Selection(table, schema, filter_, condition)


# --- columns --------------------------------------------------------------------------------------

_encode_lines: Final = msgspec.json.Encoder().encode_lines
_encode: Final = msgspec.json.Encoder().encode
_FROM_METADATA: Final = {
    name: attrgetter(name) for name in ("group", "priority", "size", "delay_ms")
} | {"published_at": attrgetter("published_at_ms")}


def _column(selection: Selection, name: str, values: Sequence[Any]) -> pa.Array:
    """Make a column of the chosen table; its times are given in milliseconds."""
    kind = selection.schema.field(name).type
    return pa.array(values, _MS).cast(TIME) if kind == TIME else pa.array(values, kind)


def _repeated(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.string()), count)


def _as_text(value: Value) -> str | None:
    if value is None or type(value) is str:
        return value
    return str(value) if type(value) is int else _encode(value).decode()


def _attributes_map(rows: Sequence[dict[str, Value]]) -> pa.Array:
    """Make the column that has every attribute as text."""
    offsets = pa.array(accumulate(map(len, rows), initial=0), pa.int32())
    keys = pa.array(chain.from_iterable(rows), pa.string())
    values: list[Any] = list(chain.from_iterable(map(dict.values, rows)))
    if set(map(type, values)) - {str, type(None)}:
        values = list(map(_as_text, values))
    return pa.MapArray.from_arrays(offsets, keys, pa.array(values, pa.string()), TEXT_MAP)


def _attributes_json(rows: Sequence[dict[str, Value]]) -> pa.Array:
    """Make the column that has the attributes with their types, as JSON."""
    if not rows:
        return pa.array([], pa.string())
    # JSON has no raw line ends, so that one call encodes all rows and one splits them.
    lines = _encode_lines(rows)[:-1]
    return pc.split_pattern(pa.array([lines], pa.string()), "\n").flatten()


def _metadata_columns(selection: Selection, decoded: Sequence[Any]) -> dict[str, pa.Array]:
    """Make the chosen columns that come from records of messages."""
    made = {
        name: _column(selection, name, list(map(get, decoded)))
        for name, get in _FROM_METADATA.items()
        if selection.wants(name)
    }
    if selection.wants("attributes", "attributes_json"):
        attributes = [each.attributes for each in decoded]
        if selection.wants("attributes"):
            made["attributes"] = _attributes_map(attributes)
        if selection.wants("attributes_json"):
            made["attributes_json"] = _attributes_json(attributes)
    return made


def _decoded(packed: Sequence[bytes], *selections: Selection) -> Sequence[Any]:
    """Decode records of messages; None for a record that does not decode."""
    full = any(each.wants_attributes() for each in selections)
    return decode_many(packed) if full else decode_heads(packed)


def _batch(selection: Selection, made: dict[str, pa.Array]) -> pa.RecordBatch:
    arrays = [made[name] for name in selection.schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=selection.schema)


# --- reading --------------------------------------------------------------------------------------


def read(pinned: PinnedStore, part: Part, selection: Selection) -> Iterator[pa.RecordBatch]:
    """Read a part of a table, a batch of bounded size at a time."""
    reader = _READERS[selection.table]
    if selection.where is not None and reader is not _record_batches:
        reader = partial(_judged_batches, reader)
    small: list[pa.RecordBatch] = []
    rows = size = 0
    # Small batches are joined: a store may have thousands of queues with a few rows each.
    for batch in (batch for piece in part for batch in reader(pinned, piece, selection)):
        small.append(batch)
        # Of whole buffers, which is many times as fast to ask for as the bytes that rows use.
        rows, size = rows + batch.num_rows, size + batch.get_total_buffer_size()
        if rows >= BATCH_ROWS // 2 or size >= BATCH_BYTES // 2:
            yield pa.concat_batches(small) if len(small) > 1 else batch
            small, rows, size = [], 0, 0
    if small:
        yield pa.concat_batches(small)


_Reader: TypeAlias = "Callable[[PinnedStore, Piece, Selection], Iterator[pa.RecordBatch]]"


def _judged_batches(
    reader: _Reader, pinned: PinnedStore, piece: Piece, selection: Selection
) -> Iterator[pa.RecordBatch]:
    """Read batches that have the columns of the condition too, and keep what it is true of."""
    assert selection.where is not None
    others = [field for field in selection.judged().schema if not selection.wants(field.name)]
    wide = selection._replace(schema=pa.schema([*selection.schema, *others]))
    for batch in reader(pinned, piece, wide):
        kept = batch.take(selection.where.kept(batch)).select(selection.schema.names)
        if kept.num_rows:
            yield kept


def _payload_column(payloads: Sequence[Any]) -> pa.Array:
    """Make a column of payloads; Arrow would take twice their memory, and keep what it has left."""
    if None in payloads:
        return pa.array(payloads, pa.binary())
    offsets = array("i", accumulate(map(len, payloads), initial=0))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(payloads))]
    return pa.Array.from_buffers(pa.binary(), len(payloads), buffers)


_Rows = list[tuple[Any, ...]]
_TRIED: Final = {"attempts": 3, "first_claimed_at": 6}
# Of the tables whose rows have the packed record of a message: its place in a row, and the places
# of other columns.
_PLACES: Final[dict[str, tuple[int, dict[str, int]]]] = {
    "log": (1, {"offset": 0, "metadata": 1}),
    "active": (5, {"message_id": 0, "state": 1, "attempts": 2, "visible_at": 3}),
    "done": (4, {"message_id": 0, "done_at": 2, **_TRIED}),
    "failed": (4, {"message_id": 0, "failed_at": 2, **_TRIED, "reason": 5}),
}
_LEASED: Final = {"lease_deadline": "deadline_ms", "consumer": "consumer"}


def _record_batches(
    pinned: PinnedStore, piece: Piece, selection: Selection
) -> Iterator[pa.RecordBatch]:
    """Read rows that have the packed record of a message, in batches of bounded size."""
    packed, _ = _PLACES[selection.table]
    where, judged = selection.where, selection.judged()
    for gathered, all_numbers in _gathered(pinned, piece, selection.table):
        rows, numbers = gathered, all_numbers
        decoded: Sequence[Any] = ()
        if where is not None and not judged.wants_metadata():
            made = _record_batch(pinned, piece, judged, rows, numbers, decoded)
            rows, numbers, _ = _taken(where.kept(made).to_pylist(), rows, numbers, decoded)
        if rows and (selection.wants_metadata() or judged.wants_metadata()):
            decoded = _decoded([row[packed] for row in rows], selection, judged)
            kept = _kept(decoded, selection.filter)
            if kept is not None:
                rows, numbers, decoded = _taken(kept, rows, numbers, decoded)
            if where is not None and judged.wants_metadata():
                made = _record_batch(pinned, piece, judged, rows, numbers, decoded)
                kept = where.kept(made).to_pylist()
                rows, numbers, decoded = _taken(kept, rows, numbers, decoded)
        sizes = [each.size for each in decoded] if selection.wants("payload") else None
        for begin, end in _cuts(len(rows), sizes):
            cut = slice(begin, end)
            yield _record_batch(pinned, piece, selection, rows[cut], numbers[cut], decoded[cut])


def _taken(
    kept: list[int], rows: _Rows, numbers: Sequence[int], decoded: Sequence[Any]
) -> tuple[_Rows, Sequence[int], Sequence[Any]]:
    """Return the rows at some places, with their numbers and, if there are any, records."""
    some = [decoded[at] for at in kept] if decoded else ()
    return [rows[at] for at in kept], [numbers[at] for at in kept], some


def _record_batch(
    pinned: PinnedStore,
    piece: Piece,
    selection: Selection,
    rows: _Rows,
    numbers: Sequence[int],
    decoded: Sequence[Any],
) -> pa.RecordBatch:
    """Make the chosen columns of rows that have the packed record of a message."""
    made = _metadata_columns(selection, decoded)
    if selection.wants("payload"):
        payloads = pinned.payloads([row[0] for row in rows])
        made["payload"] = _payload_column(payloads)
    for name, place in _PLACES[selection.table][1].items():
        if selection.wants(name):
            made[name] = _column(selection, name, [row[place] for row in rows])
    if selection.wants("log"):
        made["log"] = pa.repeat(pa.scalar(piece.log, pa.int32()), len(rows))
    if selection.wants("queue"):
        made["queue"] = _repeated(piece.queue or "", len(rows))
    if selection.wants("sequence"):
        made["sequence"] = pa.array(numbers, pa.int64())
    if selection.table == "active" and selection.wants("first_claimed_at"):
        claims = pinned.first_claims(piece.queue or "", rows)
        made["first_claimed_at"] = _column(selection, "first_claimed_at", claims)
    if selection.wants(*_LEASED):
        leases = pinned.leases(rows)
        for name in filter(selection.wants, _LEASED):
            values = [getattr(lease, _LEASED[name], None) for lease in leases]
            made[name] = _column(selection, name, values)
    return _batch(selection, made)


def _gathered(
    pinned: PinnedStore, piece: Piece, table: str
) -> Iterator[tuple[_Rows, Sequence[int]]]:
    """Gather rows, and their sequence numbers if the table has any, until they make a slice."""
    pages: Iterable[tuple[Sequence[int], Sequence[tuple[Any, ...]]]]
    if table in {"done", "failed"}:
        pages = pinned.ended_rows(State(table), piece.keys, piece.low, piece.high)
    elif table == "log":
        pages = (((), page) for page in pinned.log_rows(piece.log, piece.low, piece.high))
    else:
        pages = (((), page) for page in pinned.live_rows(piece.keys))
    packed, _ = _PLACES[table]
    rows: _Rows = []
    numbers: list[int] = []
    size = 0
    for places, some in pages:
        rows += some
        numbers += places or range(len(some))
        # Rows of one page were published together, and their records are much alike.
        size += len(some) * len(some[-1][packed])
        if len(rows) >= SLICE_ROWS or size >= BATCH_PACKED_BYTES:
            for at in range(0, len(rows), SLICE_ROWS):
                yield rows[at : at + SLICE_ROWS], numbers[at : at + SLICE_ROWS]
            rows, numbers, size = [], [], 0
    if rows:
        yield rows, numbers


def _kept(decoded: Sequence[Any], filter_: Filter | None) -> list[int] | None:
    """Return the places of rows that decode and match; None: all of them."""
    if filter_ is not None:
        matches = filter_.matches
        return [
            at
            for at, m in enumerate(decoded)
            if m is not None
            and matches((m.attributes, m.group, m.priority, m.published_at_ms, m.size))
        ]
    if None in decoded:
        return [at for at, each in enumerate(decoded) if each is not None]
    return None


def _cuts(count: int, sizes: Sequence[int] | None) -> Iterator[tuple[int, int]]:
    """Cut rows where their payloads fill a batch."""
    begin = total = 0
    for at, size in enumerate(sizes or ()):
        total += size
        if total > BATCH_BYTES and at > begin:
            yield begin, at
            begin, total = at, size
    if begin < count:
        yield begin, count


def _messages(pinned: PinnedStore, piece: Piece, selection: Selection) -> Iterator[pa.RecordBatch]:
    rows: list[tuple[int, Any]] = []
    total = 0
    payloads = selection.wants("payload")
    # Without the column payload a batch has their sizes alone, and does not hold them in memory.
    pages: Any = pinned.payload_rows if payloads else pinned.payload_sizes
    for message_id, payload in pages(piece.low, piece.high):
        rows.append((message_id, payload))
        total += len(payload) if payloads else 0
        if len(rows) >= SLICE_ROWS or total >= BATCH_BYTES:
            yield from _payload_batch(pinned, rows, selection)
            rows, total = [], 0
    if rows:
        yield from _payload_batch(pinned, rows, selection)


def _payload_batch(
    pinned: PinnedStore, rows: list[tuple[int, Any]], selection: Selection
) -> Iterator[pa.RecordBatch]:
    """Make a batch of payloads, with the records that the log still has of them."""
    known: dict[int, Any] = {}
    if selection.wants_metadata():
        logged = [
            row
            for log in pinned.log_stats.cursors
            for page in pinned.log_rows(log, rows[0][0], rows[-1][0] + 1)
            for row in page
        ]
        decoded = _decoded([row[1] for row in logged], selection)
        known = {row[0]: each for row, each in zip(logged, decoded, strict=True)}
    found = [known.get(message_id) for message_id, _ in rows]
    if selection.filter is not None:
        kept = _kept(found, selection.filter) or []
        rows, found = [rows[at] for at in kept], [found[at] for at in kept]
    if not rows:
        return
    # The columns of messages in the log, spread out over all rows.
    there = [each for each in found if each is not None]
    numbers = iter(range(len(there)))
    places = pa.array([None if each is None else next(numbers) for each in found], pa.int64())
    made = _metadata_columns(selection, there)
    made = {name: column.take(places) for name, column in made.items()}
    made["message_id"] = pa.array([row[0] for row in rows], pa.int64())
    payloads = selection.wants("payload")
    if selection.wants("size"):
        made["size"] = pa.array([len(row[1]) if payloads else row[1] for row in rows], pa.int64())
    if payloads:
        made["payload"] = _payload_column([row[1] for row in rows])
    yield _batch(selection, made)


# By the code of a stored record; a claim that goes on has no record.
_RUNNING: Final = -1
_OUTCOMES: Final = {
    0: AttemptEnd.ACKED.value,
    1: AttemptEnd.RELEASED.value,
    2: AttemptEnd.EXPIRED.value,
    _RUNNING: AttemptEnd.RUNNING.value,
}
_FROM_ATTEMPT: Final[dict[str, Callable[[AttemptRecord], Any]]] = {
    **{name: attrgetter(name) for name in ("consumer", "claimed_at", "reason")},
    "ended_at": lambda record: None if record.outcome == _RUNNING else record.ended_at,
    "outcome": lambda record: _OUTCOMES.get(record.outcome, "unknown"),
}


def _attempts(pinned: PinnedStore, piece: Piece, selection: Selection) -> Iterator[pa.RecordBatch]:
    source = _running_attempts if piece.keys.live else _ended_attempts
    for rows in _pages(source(pinned, piece)):
        ids, numbers, records = zip(*rows, strict=True)
        made = {}
        if selection.wants("queue"):
            made["queue"] = _repeated(piece.queue or "", len(rows))
        for name, values in (("message_id", ids), ("attempt", numbers)):
            if selection.wants(name):
                made[name] = _column(selection, name, values)
        for name, get in _FROM_ATTEMPT.items():
            if selection.wants(name):
                made[name] = _column(selection, name, list(map(get, records)))
        yield _batch(selection, made)


def _pages(source: Iterable[Any]) -> Iterator[list[Any]]:
    """Gather rows until they make a slice."""
    rows = iter(source)
    while page := list(islice(rows, SLICE_ROWS)):
        yield page


def _ended_attempts(pinned: PinnedStore, piece: Piece) -> Iterator[tuple[int, int, AttemptRecord]]:
    if not piece.state:
        yield from pinned.attempt_rows(piece.keys)
        return
    for rows, _ in _gathered(pinned, piece, piece.state):
        yield from pinned.attempts_at(piece.queue or "", [(row[0], row[3]) for row in rows])


def _running_attempts(
    pinned: PinnedStore, piece: Piece
) -> Iterator[tuple[int, int, AttemptRecord]]:
    in_flight: Iterator[LiveRow] = (
        row for page in pinned.live_rows(piece.keys) for row in page if row[1] == State.IN_FLIGHT
    )
    for some in _pages(in_flight):
        for row, lease in zip(some, pinned.leases(some), strict=True):
            if lease is not None:
                record = AttemptRecord(lease.claimed_at_ms, lease.consumer, 0, _RUNNING, "")
                yield row[0], row[2], record


def _queues(pinned: PinnedStore, piece: Piece, selection: Selection) -> Iterator[pa.RecordBatch]:
    queue = piece.queue or ""
    spec = pinned.queues[queue]
    row: dict[str, Any] = {name: getattr(spec, name) for name in QueueSpec.__struct_fields__}
    row["ordering"] = spec.ordering.value
    row["labels"] = sorted(spec.labels.items())
    row |= pinned.depths(queue)._asdict()
    row["draining"] = queue in pinned.draining
    yield pa.RecordBatch.from_pylist([row], schema=selection.schema)


def _groups(pinned: PinnedStore, piece: Piece, selection: Selection) -> Iterator[pa.RecordBatch]:
    for groups in _pages(pinned.groups(piece.queue or "")):
        made = {"queue": _repeated(piece.queue or "", len(groups))}
        for name, values in zip(TABLES["groups"].names[1:], zip(*groups, strict=True), strict=True):
            if selection.wants(name):
                made[name] = _column(selection, name, values)
        yield _batch(selection, made)


def _stats(pinned: PinnedStore, piece: Piece, selection: Selection) -> Iterator[pa.RecordBatch]:
    queue = piece.queue or None
    described: list[Any] = [pinned.totals, pinned.log_stats]
    if queue is not None:
        described = [stats for stats in pinned.stats if stats.queue == queue]
    rows: list[tuple[str, int]] = []
    for stats in described:
        for metric, value in msgspec.structs.asdict(stats).items():
            if metric == "cursors":
                rows += [(f"cursor.{log}", at) for log, at in sorted(value.items())]
            elif not isinstance(value, str):
                rows.append((metric, value))
    if rows:
        dicts = [{"queue": queue, "metric": metric, "value": value} for metric, value in rows]
        yield pa.RecordBatch.from_pylist(dicts, schema=selection.schema)


_READERS: Final[dict[str, _Reader]] = {
    **dict.fromkeys(_PLACES, _record_batches),
    "messages": _messages,
    "attempts": _attempts,
    "queues": _queues,
    "groups": _groups,
    "stats": _stats,
}
