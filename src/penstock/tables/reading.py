"""From a part of a table to record batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from penstock.model import AttemptEnd, QueueSpec, State
from penstock.stores.pinned import live_keys
from penstock.tables.columns import about, decode_all, needs, repeated, times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.stores.pinned import LiveRow, Pinned
    from penstock.tables.partitions import Numbers, Part, QueueKeys, WholeQueue
    from penstock.tables.schemas import Selection

__all__ = ["read"]

BATCH_ROWS: Final = 32_768
# Batches with payloads end sooner: what is in memory at once must not depend on their size.
BATCH_BYTES: Final = 16 << 20
# Metadata is bounded by its own limit; this many packed bytes are decoded at a time.
BATCH_PACKED_BYTES: Final = 32 << 20
_ENDS: Final = (AttemptEnd.ACKED.value, AttemptEnd.RELEASED.value, AttemptEnd.EXPIRED.value)

# A row on its way to a batch: its metadata is the last field.
_Rows = list[tuple[Any, ...]]


def read(pinned: Pinned, part: Part, selection: Selection) -> Iterator[pa.RecordBatch]:
    """Read a part of a table, a batch of bounded size at a time."""
    reader: Callable[[Pinned, Any, Selection], Iterator[pa.RecordBatch]] = _READERS[selection.table]
    for piece in part:
        yield from reader(pinned, piece, selection)


# --- what carries metadata --------------------------------------------------------------------


def _log(pinned: Pinned, piece: Numbers, selection: Selection) -> Iterator[pa.RecordBatch]:
    def columns(rows: _Rows) -> dict[str, Any]:
        return {
            "log": lambda: pa.repeat(pa.scalar(piece.log, pa.int32()), len(rows)),
            "offset": lambda: pa.array([row[0] for row in rows], pa.int64()),
        }

    entries = pinned.log_rows(piece.log, piece.begin, piece.end)
    for rows in _gathered(entries):
        yield from _batches(pinned, rows, selection, columns)


def _live(pinned: Pinned, piece: QueueKeys, selection: Selection) -> Iterator[pa.RecordBatch]:
    def columns(rows: _Rows) -> dict[str, Any]:
        leases = {}
        if selection.wants("lease_deadline", "consumer"):
            names = {row[4] for row in rows if row[1] is State.IN_FLIGHT}
            leases = pinned.leases(sorted(names))
        found = [leases.get(row[4]) for row in rows] if leases else [None] * len(rows)
        return {
            "queue": lambda: repeated(piece.queue, len(rows)),
            "message_id": lambda: pa.array([row[0] for row in rows], pa.int64()),
            "state": lambda: pa.array([row[1].value for row in rows], pa.string()),
            "attempts": lambda: pa.array([row[2] for row in rows], pa.int32()),
            "visible_at": lambda: times([row[3] for row in rows]),
            "lease_deadline": lambda: times([None if f is None else f.expiry_ms for f in found]),
            "consumer": lambda: pa.array(
                [None if f is None else f.consumer for f in found], pa.string()
            ),
        }

    source = pinned.live_rows(piece.table, piece.begin, piece.end)
    for rows in _gathered(source):
        yield from _batches(pinned, rows, selection, columns)


def _ended(pinned: Pinned, piece: QueueKeys, selection: Selection) -> Iterator[pa.RecordBatch]:
    state = State.DONE if selection.table == "done" else State.FAILED

    def columns(rows: _Rows) -> dict[str, Any]:
        return {
            "queue": lambda: repeated(piece.queue, len(rows)),
            "message_id": lambda: pa.array([row[0] for row in rows], pa.int64()),
            "sequence": lambda: pa.array([row[1] for row in rows], pa.int64()),
            f"{state.value}_at": lambda: times([row[2] for row in rows]),
            "attempts": lambda: pa.array([row[3] for row in rows], pa.int32()),
            "reason": lambda: pa.array([row[4] for row in rows], pa.string()),
        }

    source = pinned.ended_rows(state, piece.begin, piece.end, piece.low, piece.high)
    for rows in _gathered(source):
        yield from _batches(pinned, rows, selection, columns)


def _gathered(source: Iterable[Sequence[tuple[Any, ...]]]) -> Iterator[_Rows]:
    """Gather rows until they make a batch."""
    rows: _Rows = []
    packed = 0
    for some in source:
        rows += some
        packed += len(some) * len(some[-1][-1]) if some else 0
        while len(rows) >= BATCH_ROWS:
            yield rows[:BATCH_ROWS]
            rows = rows[BATCH_ROWS:]
            packed = 0
        if packed >= BATCH_PACKED_BYTES:
            yield rows
            rows, packed = [], 0
    if rows:
        yield rows


def _batches(
    pinned: Pinned,
    rows: _Rows,
    selection: Selection,
    columns: Callable[[_Rows], dict[str, Any]],
) -> Iterator[pa.RecordBatch]:
    """Turn rows into batches: one, or several if they carry payloads."""
    metadata, attributes = needs(selection)
    decoded: Sequence[Any] = ()
    if metadata:
        decoded = decode_all([row[-1] for row in rows], attributes=attributes)
        if None in decoded:
            kept = [at for at, each in enumerate(decoded) if each is not None]
            rows, decoded = [rows[at] for at in kept], [decoded[at] for at in kept]
        if selection.filter is not None:
            matches = selection.filter.matches
            kept = [
                at
                for at, m in enumerate(decoded)
                if matches((m.attributes, m.group, m.priority, m.published_at_ms, m.size))
            ]
            if len(kept) < len(rows):
                rows, decoded = [rows[at] for at in kept], [decoded[at] for at in kept]
    sizes = [each.size for each in decoded] if selection.wants("payload") else None
    for begin, end in _cuts(len(rows), sizes):
        some, known = rows[begin:end], decoded[begin:end]
        made = about(selection, known)
        own = columns(some)
        if selection.wants("payload"):
            payloads = pinned.payloads([row[0] for row in some])
            made["payload"] = pa.array(payloads, pa.binary())
        yield _batch(selection, made, own)


def _batch(selection: Selection, made: dict[str, Any], own: dict[str, Any]) -> pa.RecordBatch:
    arrays = [made[name] if name in made else own[name]() for name in selection.schema.names]
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


def _messages(pinned: Pinned, piece: Numbers, selection: Selection) -> Iterator[pa.RecordBatch]:
    rows: list[tuple[int, bytes]] = []
    total = 0
    keep = selection.wants("payload")
    for message_id, payload in pinned.payload_rows(piece.begin, piece.end):
        # Only its size is asked for: a batch must not hold the payloads themselves.
        rows.append((message_id, payload if keep else len(payload).to_bytes(4, "big")))
        total += len(payload) if keep else 0
        if len(rows) >= BATCH_ROWS or total >= BATCH_BYTES:
            yield from _kept(pinned, rows, selection)
            rows, total = [], 0
    if rows:
        yield from _kept(pinned, rows, selection)


def _kept(
    pinned: Pinned, rows: list[tuple[int, bytes]], selection: Selection
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
        matches = selection.filter.matches
        kept = [
            at
            for at, m in enumerate(found)
            if m is not None
            and matches((m.attributes, m.group, m.priority, m.published_at_ms, m.size))
        ]
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
        sizes = [len(row[1]) if has_payload else int.from_bytes(row[1], "big") for row in rows]
        made["size"] = pa.array(sizes, pa.int64())
    if has_payload:
        made["payload"] = pa.array([row[1] for row in rows], pa.binary())
    yield _batch(selection, made, {})


# --- attempts ---------------------------------------------------------------------------------


def _attempts(pinned: Pinned, piece: QueueKeys, selection: Selection) -> Iterator[pa.RecordBatch]:
    source = _ended_attempts if piece.table == "history" else _running_attempts
    rows: _Rows = []
    for row in source(pinned, piece):
        rows.append(row)
        if len(rows) >= BATCH_ROWS:
            yield _attempts_batch(piece, rows, selection)
            rows = []
    if rows:
        yield _attempts_batch(piece, rows, selection)


def _ended_attempts(pinned: Pinned, piece: QueueKeys) -> Iterator[tuple[Any, ...]]:
    for message_id, attempt, stored in pinned.attempt_rows(piece.begin, piece.end):
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


def _running_attempts(pinned: Pinned, piece: QueueKeys) -> Iterator[tuple[Any, ...]]:
    for some in _pages(pinned.live_rows(piece.table, piece.begin, piece.end)):
        leases = pinned.leases(sorted({row.lease for row in some}))
        for row in some:
            lease = leases.get(row.lease)
            if lease is not None:
                yield (
                    row.message_id,
                    row.attempts,
                    lease.consumer,
                    lease.claimed_at_ms,
                    None,
                    AttemptEnd.RUNNING.value,
                    "",
                )


def _pages(source: Iterable[list[LiveRow]]) -> Iterator[list[LiveRow]]:
    rows: list[LiveRow] = []
    for some in source:
        rows += [row for row in some if row.state is State.IN_FLIGHT]
        if len(rows) >= BATCH_ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


def _attempts_batch(piece: QueueKeys, rows: _Rows, selection: Selection) -> pa.RecordBatch:
    own = {
        "queue": lambda: repeated(piece.queue, len(rows)),
        "message_id": lambda: pa.array([row[0] for row in rows], pa.int64()),
        "attempt": lambda: pa.array([row[1] for row in rows], pa.int32()),
        "consumer": lambda: pa.array([row[2] for row in rows], pa.string()),
        "claimed_at": lambda: times([row[3] for row in rows]),
        "ended_at": lambda: times([row[4] for row in rows]),
        "outcome": lambda: pa.array([row[5] for row in rows], pa.string()),
        "reason": lambda: pa.array([row[6] for row in rows], pa.string()),
    }
    return _batch(selection, {}, own)


# --- queues as a whole ------------------------------------------------------------------------


def _queues(pinned: Pinned, piece: WholeQueue, selection: Selection) -> Iterator[pa.RecordBatch]:
    queue = pinned.queues[piece.queue]
    row: dict[str, Any] = {name: getattr(queue.spec, name) for name in QueueSpec.__struct_fields__}
    row["ordering"] = queue.spec.ordering.value
    for name in ("available", "delayed", "in_flight", "done", "failed"):
        row[name] = getattr(queue.counts, name)
    row["draining"] = piece.queue in pinned.draining
    yield _rows_batch(selection, [row])


def _groups(pinned: Pinned, piece: WholeQueue, selection: Selection) -> Iterator[pa.RecordBatch]:
    found: dict[str, dict[str, Any]] = {}
    for table, begin, end in live_keys(pinned.identity.design, pinned.queues[piece.queue]):
        for rows in _gathered(pinned.live_rows(table, begin, end)):
            decoded = decode_all([row[-1] for row in rows], attributes=False)
            for row, metadata in zip(rows, decoded, strict=True):
                if metadata is not None:
                    _count(found, piece.queue, row[1], metadata)
    rows_ = list(found.values())
    for at in range(0, len(rows_), BATCH_ROWS):
        yield _rows_batch(selection, rows_[at : at + BATCH_ROWS])


def _count(found: dict[str, dict[str, Any]], queue: str, state: State, metadata: Any) -> None:
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
    row[state.value] += 1
    if state is not State.IN_FLIGHT:
        oldest = row["oldest_published_at"]
        published = metadata.published_at_ms
        row["oldest_published_at"] = published if oldest is None else min(oldest, published)


def _stats(pinned: Pinned, piece: WholeQueue, selection: Selection) -> Iterator[pa.RecordBatch]:
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
    own = {
        field.name: times([row[field.name] for row in rows])
        if pa.types.is_timestamp(field.type)
        else pa.array([row[field.name] for row in rows], field.type)
        for field in selection.schema
    }
    return _batch(selection, own, {})


_READERS: Final[dict[str, Callable[[Pinned, Any, Selection], Iterator[pa.RecordBatch]]]] = {
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
