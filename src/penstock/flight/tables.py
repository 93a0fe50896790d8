"""From a part of a table to record batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from penstock.flight.columns import about, decode_all, needs, repeated, times
from penstock.flight.schemas import TIME
from penstock.model import AttemptEnd, QueueSpec, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.filters import Filter
    from penstock.flight.partitions import Numbers, Part, QueueKeys, WholeQueue
    from penstock.flight.schemas import Selection
    from penstock.store.snapshot import Held, LiveRow, PinnedStore

__all__ = ["read"]

BATCH_ROWS: Final = 32_768
# Batches with payloads end sooner: what is in memory at once must not depend on their size.
BATCH_BYTES: Final = 4 << 20
# Metadata is bounded by its own limit; this many packed bytes are decoded at a time.
BATCH_PACKED_BYTES: Final = 32 << 20
_ENDS: Final = (AttemptEnd.ACKED.value, AttemptEnd.RELEASED.value, AttemptEnd.EXPIRED.value)

# Rows on their way to a batch.
_Rows = list[tuple[Any, ...]]


def read(pinned: PinnedStore, part: Part, selection: Selection) -> Iterator[pa.RecordBatch]:
    """Read a part of a table, a batch of bounded size at a time."""
    reader: Callable[[PinnedStore, Any, Selection], Iterator[pa.RecordBatch]] = _READERS[
        selection.table
    ]
    yield from _joined(batch for piece in part for batch in reader(pinned, piece, selection))


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small batches: a store may have thousands of queues with a few rows each."""
    small: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        small.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= BATCH_ROWS // 2 or size >= BATCH_BYTES:
            yield pa.concat_batches(small) if len(small) > 1 else batch
            small, rows, size = [], 0, 0
    if small:
        yield pa.concat_batches(small)


# --- what carries metadata --------------------------------------------------------------------


class _Source(NamedTuple):
    """Rows that carry metadata, and how to make the columns that are not told from it.

    ``rows`` come a few at a time, with their numbers. ``metadata`` is where in a row the packed
    metadata is. A column is made from rows and their numbers, if it is wanted.
    """

    rows: Iterable[tuple[Sequence[int], Sequence[tuple[Any, ...]]]]
    metadata: int
    columns: dict[str, Callable[[_Rows, Sequence[int]], pa.Array]]


def _log(pinned: PinnedStore, piece: Numbers, selection: Selection) -> Iterator[pa.RecordBatch]:
    entries = pinned.log_rows(piece.log, piece.begin, piece.end)
    source = _Source(
        ((range(len(rows)), rows) for rows in entries),
        1,
        {
            "log": lambda rows, _: pa.repeat(pa.scalar(piece.log, pa.int32()), len(rows)),
            "offset": lambda rows, _: pa.array([row[0] for row in rows], pa.int64()),
            "metadata": lambda rows, _: pa.array([row[1] for row in rows], pa.binary()),
        },
    )
    return _batches(pinned, source, selection)


def _live(pinned: PinnedStore, piece: QueueKeys, selection: Selection) -> Iterator[pa.RecordBatch]:
    leases: Callable[[Any], Sequence[Held | None]] = pinned.leases
    found = pinned.live_rows(piece.keys)
    source = _Source(
        ((range(len(rows)), rows) for rows in found),
        5,
        {
            "queue": lambda rows, _: repeated(piece.queue, len(rows)),
            "message_id": lambda rows, _: pa.array([row[0] for row in rows], pa.int64()),
            "state": lambda rows, _: pa.array([row[1] for row in rows], pa.string()),
            "attempts": lambda rows, _: pa.array([row[2] for row in rows], pa.int32()),
            "visible_at": lambda rows, _: times([row[3] for row in rows]),
            "lease_deadline": lambda rows, _: times(
                [None if held is None else held.deadline_ms for held in leases(rows)]
            ),
            "consumer": lambda rows, _: pa.array(
                [None if held is None else held.consumer for held in leases(rows)], pa.string()
            ),
        },
    )
    return _batches(pinned, source, selection)


def _ended(pinned: PinnedStore, piece: QueueKeys, selection: Selection) -> Iterator[pa.RecordBatch]:
    state = State.DONE if selection.table == "done" else State.FAILED
    source = _Source(
        pinned.ended_rows(state, piece.keys, piece.low, piece.high),
        4,
        {
            "queue": lambda rows, _: repeated(piece.queue, len(rows)),
            "message_id": lambda rows, _: pa.array([row[0] for row in rows], pa.int64()),
            "sequence": lambda _, numbers: pa.array(numbers, pa.int64()),
            f"{state.value}_at": lambda rows, _: times([row[2] for row in rows]),
            "attempts": lambda rows, _: pa.array([row[3] for row in rows], pa.int32()),
            "reason": lambda rows, _: pa.array([row[5] for row in rows], pa.string()),
        },
    )
    return _batches(pinned, source, selection)


def _gathered(source: _Source) -> Iterator[tuple[_Rows, list[int]]]:
    """Gather rows, and their numbers, until they make a batch."""
    rows: _Rows = []
    numbers: list[int] = []
    packed = 0
    for places, some in source.rows:
        rows += some
        numbers += places
        # Those that come together were published together, and are much alike.
        packed += len(some) * len(some[-1][source.metadata])
        if len(rows) >= BATCH_ROWS or packed >= BATCH_PACKED_BYTES:
            for at in range(0, len(rows), BATCH_ROWS):
                yield rows[at : at + BATCH_ROWS], numbers[at : at + BATCH_ROWS]
            rows, numbers, packed = [], [], 0
    if rows:
        yield rows, numbers


def _batches(
    pinned: PinnedStore, source: _Source, selection: Selection
) -> Iterator[pa.RecordBatch]:
    """Turn rows into batches of bounded size."""
    metadata, attributes = needs(selection)
    for gathered, all_numbers in _gathered(source):
        rows, numbers = gathered, all_numbers
        decoded: Sequence[Any] = ()
        if metadata:
            packed = [row[source.metadata] for row in rows]
            decoded = decode_all(packed, attributes=attributes)
            kept = _kept_rows(decoded, selection.filter)
            if kept is not None:
                rows = [rows[at] for at in kept]
                numbers = [numbers[at] for at in kept]
                decoded = [decoded[at] for at in kept]
        sizes = [each.size for each in decoded] if selection.wants("payload") else None
        for begin, end in _cuts(len(rows), sizes):
            some = rows[begin:end]
            made = about(selection, decoded[begin:end])
            if selection.wants("payload"):
                payloads = pinned.payloads([row[0] for row in some])
                made["payload"] = pa.array(payloads, pa.binary())
            for name, make in source.columns.items():
                if selection.wants(name):
                    made[name] = make(some, numbers[begin:end])
            yield _batch(selection, made)


def _kept_rows(decoded: Sequence[Any], filter_: Filter | None) -> list[int] | None:
    """Return which rows stay; None: all of them."""
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


def _batch(selection: Selection, made: dict[str, pa.Array]) -> pa.RecordBatch:
    arrays = [made[name] for name in selection.schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=selection.schema)


def _cuts(count: int, sizes: Sequence[int] | None) -> Iterator[tuple[int, int]]:
    begin = total = 0
    for at, size in enumerate(sizes or ()):
        total += size
        if total > BATCH_BYTES and at > begin:
            yield begin, at
            begin, total = at, size
    if begin < count:
        yield begin, count


# --- messages ---------------------------------------------------------------------------------


def _messages(
    pinned: PinnedStore, piece: Numbers, selection: Selection
) -> Iterator[pa.RecordBatch]:
    rows: list[tuple[int, Any]] = []
    total = 0
    keep = selection.wants("payload")
    # Where only sizes are asked for, a batch must not hold the payloads themselves.
    found: Iterator[tuple[int, Any]] = (
        pinned.payload_rows(piece.begin, piece.end)
        if keep
        else pinned.payload_sizes(piece.begin, piece.end)
    )
    for message_id, payload in found:
        rows.append((message_id, payload))
        total += len(payload) if keep else 0
        if len(rows) >= BATCH_ROWS or total >= BATCH_BYTES:
            yield from _kept(pinned, rows, selection)
            rows, total = [], 0
    if rows:
        yield from _kept(pinned, rows, selection)


def _kept(
    pinned: PinnedStore, rows: list[tuple[int, Any]], selection: Selection
) -> Iterator[pa.RecordBatch]:
    wanted, attributes = needs(selection)
    known: dict[int, Any] = {}
    if wanted:
        logged = [
            row
            for log in pinned.log_stats.cursors
            for entry in pinned.log_rows(log, rows[0][0], rows[-1][0] + 1)
            for row in entry
        ]
        decoded = decode_all([row[1] for row in logged], attributes=attributes)
        known = {row[0]: each for row, each in zip(logged, decoded, strict=True)}
    found = [known.get(message_id) for message_id, _ in rows]
    if selection.filter is not None:
        kept = _kept_rows(found, selection.filter) or []
        rows, found = [rows[at] for at in kept], [found[at] for at in kept]
    if not rows:
        return
    has_payload = selection.wants("payload")
    # Columns of those that the log knows, spread out over all rows.
    places, count = [], 0
    for each in found:
        places.append(None if each is None else count)
        count += each is not None
    made = about(selection, [each for each in found if each is not None])
    spread = pa.array(places, pa.int64())
    made = {name: column.take(spread) for name, column in made.items()}
    made["message_id"] = pa.array([row[0] for row in rows], pa.int64())
    if selection.wants("size"):
        sizes = [len(row[1]) if has_payload else row[1] for row in rows]
        made["size"] = pa.array(sizes, pa.int64())
    if has_payload:
        made["payload"] = pa.array([row[1] for row in rows], pa.binary())
    yield _batch(selection, made)


# --- attempts ---------------------------------------------------------------------------------


def _attempts(
    pinned: PinnedStore, piece: QueueKeys, selection: Selection
) -> Iterator[pa.RecordBatch]:
    source = _running_attempts if piece.keys.live else _ended_attempts
    rows: _Rows = []
    for row in source(pinned, piece):
        rows.append(row)
        if len(rows) >= BATCH_ROWS:
            yield _attempts_batch(piece, rows, selection)
            rows = []
    if rows:
        yield _attempts_batch(piece, rows, selection)


def _ended_attempts(pinned: PinnedStore, piece: QueueKeys) -> Iterator[tuple[Any, ...]]:
    for message_id, attempt, stored in pinned.attempt_rows(piece.keys):
        outcome = _ENDS[stored.outcome] if stored.outcome < len(_ENDS) else "unknown"
        yield (
            message_id,
            attempt,
            stored.consumer,
            stored.claimed_at,
            stored.ended_at,
            outcome,
            stored.reason,
        )


def _running_attempts(pinned: PinnedStore, piece: QueueKeys) -> Iterator[tuple[Any, ...]]:
    for some in _pages(pinned.live_rows(piece.keys)):
        for row, held in zip(some, pinned.leases(some), strict=True):
            if held is not None:
                yield (
                    row[0],
                    row[2],
                    held.consumer,
                    held.claimed_at_ms,
                    None,
                    AttemptEnd.RUNNING.value,
                    "",
                )


def _pages(source: Iterable[list[LiveRow]]) -> Iterator[list[LiveRow]]:
    rows: list[LiveRow] = []
    for some in source:
        rows += [row for row in some if row[1] == State.IN_FLIGHT]
        if len(rows) >= BATCH_ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


def _attempts_batch(piece: QueueKeys, rows: _Rows, selection: Selection) -> pa.RecordBatch:
    made = {"queue": repeated(piece.queue, len(rows))}
    names = ("message_id", "attempt", "consumer", "claimed_at", "ended_at", "outcome", "reason")
    for at, name in enumerate(names):
        if selection.wants(name):
            values = [row[at] for row in rows]
            kind = selection.schema.field(name).type
            made[name] = times(values) if kind == TIME else pa.array(values, kind)
    return _batch(selection, made)


# --- queues as a whole ------------------------------------------------------------------------


def _queues(
    pinned: PinnedStore, piece: WholeQueue, selection: Selection
) -> Iterator[pa.RecordBatch]:
    spec = pinned.queues[piece.queue]
    row: dict[str, Any] = {name: getattr(spec, name) for name in QueueSpec.__struct_fields__}
    row["ordering"] = spec.ordering.value
    row["labels"] = sorted(spec.labels.items())
    row |= pinned.depths(piece.queue)._asdict()
    row["draining"] = piece.queue in pinned.draining
    yield _rows_batch(selection, [row])


def _groups(
    pinned: PinnedStore, piece: WholeQueue, selection: Selection
) -> Iterator[pa.RecordBatch]:
    found: dict[str, dict[str, Any]] = {}
    for keys in pinned.cut("active", piece.queue, 1):
        found_rows = pinned.live_rows(keys)
        source = _Source(((range(len(rows)), rows) for rows in found_rows), 5, {})
        for rows, _ in _gathered(source):
            decoded = decode_all([row[5] for row in rows], attributes=False)
            for row, metadata in zip(rows, decoded, strict=True):
                if metadata is not None:
                    _count(found, piece.queue, row[1], metadata)
    groups = list(found.values())
    for at in range(0, len(groups), BATCH_ROWS):
        yield _rows_batch(selection, groups[at : at + BATCH_ROWS])


def _count(found: dict[str, dict[str, Any]], queue: str, state: str, metadata: Any) -> None:
    row = found.get(metadata.group)
    if row is None:
        row = found[metadata.group] = {
            "queue": queue,
            "group": metadata.group,
            "available": 0,
            "delayed": 0,
            "in_flight": 0,
            "oldest_published_at": None,
        }
    row[state] += 1
    if state != State.IN_FLIGHT:
        oldest = row["oldest_published_at"]
        published = metadata.published_at_ms
        row["oldest_published_at"] = published if oldest is None else min(oldest, published)


def _stats(
    pinned: PinnedStore, piece: WholeQueue, selection: Selection
) -> Iterator[pa.RecordBatch]:
    rows: list[dict[str, Any]] = []
    described: list[Any] = [stats for stats in pinned.stats if stats.queue == piece.queue]
    if not piece.queue:
        described = [pinned.totals, pinned.log_stats]
    for stats in described:
        for metric in stats.__struct_fields__:
            value = getattr(stats, metric)
            if metric == "cursors":
                rows += [
                    {"queue": None, "metric": f"cursor.{log}", "value": at}
                    for log, at in sorted(value.items())
                ]
            elif not isinstance(value, str):
                rows.append({"queue": piece.queue or None, "metric": metric, "value": value})
    if rows:
        yield _rows_batch(selection, rows)


def _rows_batch(selection: Selection, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    made = {}
    for field in selection.schema:
        values = [row[field.name] for row in rows]
        made[field.name] = times(values) if field.type == TIME else pa.array(values, field.type)
    return _batch(selection, made)


_READERS: Final[dict[str, Callable[[PinnedStore, Any, Selection], Iterator[pa.RecordBatch]]]] = {
    "log": _log,
    "messages": _messages,
    "active": _live,
    "done": _ended,
    "failed": _ended,
    "attempts": _attempts,
    "queues": _queues,
    "groups": _groups,
    "stats": _stats,
}
