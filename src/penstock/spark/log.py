"""The log in tasks: its offsets and stretches, and the filters of all queues matched with it.

Message ids are offsets, given out over all logs together: log 0 may hold 1, 4, 5 and log 1 the
rest. A stretch is [begin, end) of one log. A stream's offset is one JSON object: where each log is
read next, and the store that it was read from::

    {"0": 905, "1": 900, "store": "0c2f9a11"}                the table log
    {"0": 905, "1": 900, "store": "0c2f9a11", "filters": 3}  the tables of the route job

A worker process of Spark lives through many tasks, so compiled filters are kept in the module,
under the texts that they were made of.
"""

from __future__ import annotations

import gc
from functools import cache, lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock import limits
from penstock.errors import InvalidInput, StoreMismatch
from penstock.filters import Matcher, parse
from penstock.flight.protocol import MATCHES
from penstock.store.codec.metadata import decode_many

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.filters import RowTuple, Value
    from penstock.flight.client import FlightStore
    from penstock.model import LiveFilters, LogStats
    from penstock.spark.source import Place


LEAST_PIECE: Final = 20_000
"""Offsets below which a stretch is not worth a second task."""

FIRST: Final = 1
"""The offset that the first message of a store gets."""

EARLIEST: Final = -2
LATEST: Final = -1

Offset: TypeAlias = dict[str, int | str]
"""A stream's offset, as Spark writes it into the checkpoint."""


class Stretch(NamedTuple):
    """[begin, end) of one log."""

    log: int
    begin: int
    end: int


def resolve(place: Place, stats: LogStats, name: str) -> dict[int, int]:
    """Turn ``earliest``, ``latest`` or offsets by log into an offset for every log."""
    if place == "earliest":
        return dict.fromkeys(stats.cursors, stats.earliest)
    if place == "latest":
        return dict.fromkeys(stats.cursors, stats.end)
    assert isinstance(place, dict)
    try:
        wanted = {int(log): int(offset) for log, offset in place.items()}
    except (TypeError, ValueError):
        raise InvalidInput(f'{name} is JSON like {{"0": 5}}, log to offset') from None
    check_names(name, "log", wanted, stats.cursors)
    found = {}
    for log, offset in wanted.items():
        if offset < EARLIEST or offset > stats.end:
            raise InvalidInput(
                f"{name} of log {log} is {offset}; there are offsets up to {stats.end}"
            )
        found[log] = {EARLIEST: stats.earliest, LATEST: stats.end}.get(offset, offset)
    return found


def check_names(option: str, noun: str, given: Iterable[Any], known: Iterable[Any]) -> None:
    """Refuse an option that leaves out a log or a queue that is read, or names another."""
    names = sorted(known)
    if sorted(given) != names:
        raise InvalidInput(
            f"{option} must name every {noun} that is read, and no other: "
            f"{', '.join(map(str, names))}"
        )


def logs_of(offset: Mapping[str, int | str]) -> dict[int, int]:
    """Return the offsets by log of a stream's offset."""
    return {int(name): int(value) for name, value in offset.items() if name.isdigit()}


def limited(start: Mapping[int, int], ends: Mapping[int, int], most: int | None) -> dict[int, int]:
    """Return where a micro-batch ends that takes at most ``most`` messages."""
    begins = {log: _begin(start, log, ends[log]) for log in ends}
    if most is None:
        return {log: max(begins[log], end) for log, end in ends.items()}
    # Ids are shared by the logs: one bound for all of them holds for their sum.
    behind = min((begins[log] for log, end in ends.items() if begins[log] < end), default=0)
    return {log: max(begins[log], min(end, behind + most)) for log, end in ends.items()}


def between(start: Mapping[int, int], end: Mapping[int, int]) -> list[Stretch]:
    """Return the stretches between two offsets, log by log."""
    found = [Stretch(log, _begin(start, log, until), until) for log, until in sorted(end.items())]
    return [stretch for stretch in found if stretch.begin < stretch.end]


def _begin(start: Mapping[int, int], log: int, end: int) -> int:
    # A log that was added since holds nothing older than where the others stood.
    return start[log] if log in start else min(start.values(), default=end)


def cut(stretches: Iterable[Stretch], pieces: int, least: int = LEAST_PIECE) -> list[Stretch]:
    """Cut stretches into about ``pieces`` of like width, but none for the sake of a few offsets."""
    whole = list(stretches)
    width = sum(stretch.end - stretch.begin for stretch in whole)
    step = max(least, -(-width // max(1, pieces)))
    parts: list[Stretch] = []
    for log, begin, end in whole:
        count = -(-(end - begin) // step)
        borders = [begin + (end - begin) * number // count for number in range(count + 1)]
        parts += [Stretch(log, *pair) for pair in pairwise(borders)]
    return parts


def check_kept(stretches: Sequence[Stretch], stats: LogStats, *, fail: bool) -> list[Stretch]:
    """Refuse (or, if not ``fail``, leave out) offsets that the log's retention has removed."""
    kept = []
    for log, begin, end in stretches:
        earliest = stats.earliest
        if max(begin, FIRST) < earliest and fail:
            raise InvalidInput(
                f"data loss: offsets {begin} to {min(end, earliest)} of log {log} are asked for, "
                f"but the log begins at {earliest}: its retention has removed them. Set "
                "failOnDataLoss to false to go on without them"
            )
        if max(begin, earliest) < end:
            kept.append(Stretch(log, max(begin, earliest), end))
    return kept


def check_store(offset: Mapping[str, int | str], store_id: str) -> None:
    """Refuse a checkpoint that was made over another store."""
    if offset.get("store", store_id) != store_id:
        raise StoreMismatch(
            f"the checkpoint belongs to store {offset['store']}, the broker serves store "
            f"{store_id}: use another checkpoint directory, or the broker that it was made with"
        )


def offsets_at(
    client: FlightStore, times: int | Mapping[str, int], stats: LogStats, name: str
) -> dict[int, int]:
    """Return for each log an offset from which on its messages were published then or later.

    The time is one for all logs, or one for each.
    """
    by_log = dict.fromkeys(map(str, stats.cursors), times) if isinstance(times, int) else times
    check_names(name, "log", by_log, map(str, stats.cursors))
    # Ids are shared by the logs, and time in a store never goes back along them.
    found = {at_ms: client.offset_at(max(0, at_ms)) for at_ms in set(by_log.values())}
    return {log: found[by_log[str(log)]] for log in stats.cursors}


def lag_of(reached: Mapping[int, int], ends: Mapping[int, int]) -> dict[str, int]:
    """Return how many offsets are left, by log."""
    return {str(log): max(0, end - reached.get(log, end)) for log, end in sorted(ends.items())}


def offset_of(by_log: dict[int, int], store_id: str) -> Offset:
    """Return the offset of a stream."""
    return {**{str(log): offset for log, offset in sorted(by_log.items())}, "store": store_id}


class LiveAt:
    """The filters that are live at offsets; the broker is asked once where they are the same."""

    def __init__(self, client: FlightStore) -> None:
        self._client = client
        self._live: tuple[int, LiveFilters] | None = None

    def at(self, offset: int) -> LiveFilters:
        """Return the filters that are live at an offset, and until where."""
        known = self._live
        if known is None or not known[0] <= offset < (known[1].until or limits.MAX_OFFSET):
            known = self._live = offset, self._client.filters(offset)
        return known[1]


# --- matching -------------------------------------------------------------------------------------

COLUMNS: Final = ("offset", "attributes_json", "group", "priority", "published_at", "size")
"""The columns of the log that :func:`match_batch` needs."""

PACKED_COLUMNS: Final = ("offset", "metadata")
"""The columns that it can do with instead: the broker decodes nothing for them."""

# So few rows are let go of before the garbage collector takes them for something that lasts, and
# goes through them again and again: twice as fast as a whole batch at once.
_AT_ONCE: Final = 2_000
_decode: Final = msgspec.json.Decoder(dict[str, str | int | float | bool | None]).decode
_decode_all: Final = msgspec.json.Decoder(list[dict[str, str | int | float | bool | None]]).decode


def matcher_of(filters: Mapping[str, str]) -> Matcher[str]:
    """Return the matcher of these filters, compiled once in a process."""
    return compiled(frozenset(filters.items()))


@lru_cache(maxsize=8)
def compiled(filters: frozenset[tuple[str, str]]) -> Matcher[str]:
    """Compile filters, given as pairs of a queue and its filter."""
    return Matcher({name: parse(text) for name, text in sorted(filters)})


@cache
def freeze_imports() -> None:
    """Keep the garbage collector away from the objects that imports have made, from now on.

    Spark has a worker collect after every task. Going through the modules of Arrow, Spark and
    Penstock takes longer than a small task does, and finds nothing.
    """
    gc.freeze()


def match_batch(
    matcher: Matcher[str],
    batch: pa.RecordBatch,
    extra: Mapping[str, Sequence[Value]] | None = None,
) -> pa.RecordBatch:
    """Return the pairs (offset, queue) of a batch of the log, or of its metadata as stored.

    ``extra`` are values by name that count as attributes too, before those of the message.
    """
    found: list[pa.RecordBatch] = []
    for at in range(0, batch.num_rows, _AT_ONCE):
        part = batch.slice(at, _AT_ONCE)
        offsets = part.column("offset")
        if "metadata" in batch.schema.names:
            decoded = decode_many(part.column("metadata").to_pylist())
            if None in decoded:
                # Nobody can route a record that does not decode.
                offsets = offsets.filter(pa.array([each is not None for each in decoded]))
            rows: list[RowTuple] = [
                (each.attributes, each.group, each.priority, each.published_at_ms, each.size)
                for each in decoded
                if each is not None
            ]
        else:
            added = {name: values[at : at + _AT_ONCE] for name, values in (extra or {}).items()}
            rows = rows_of(part, added)
        found.append(_pairs(matcher, offsets, rows))
    return pa.concat_batches(found) if found else pa.RecordBatch.from_pylist([], MATCHES)


def _pairs(matcher: Matcher[str], offsets: pa.Array, rows: list[RowTuple]) -> pa.RecordBatch:
    routes = matcher.match(rows)
    lengths = np.fromiter(map(len, routes), dtype=np.int64, count=len(routes))
    repeated = np.repeat(offsets.to_numpy(zero_copy_only=False), lengths)
    queues = pa.array(chain.from_iterable(routes), pa.string(), size=int(lengths.sum()))
    return pa.record_batch([pa.array(repeated, pa.int64()), queues], schema=MATCHES)


def rows_of(
    batch: pa.RecordBatch, extra: Mapping[str, Sequence[Value]] | None = None
) -> list[RowTuple]:
    """Return the rows of a batch as filters take them; it needs :data:`COLUMNS` but the offset."""
    attributes = _attributes(batch.column("attributes_json"))
    for name, values in (extra or {}).items():
        for row, value in zip(attributes, values, strict=True):
            row[name] = value
    times = pc.divide(pc.cast(batch.column("published_at"), pa.int64()), 1000)
    numbers = (batch.column("priority"), times, batch.column("size"))
    groups = batch.column("group").to_pylist()
    return list(zip(attributes, groups, *map(_numbers, numbers), strict=True))


def _attributes(column: pa.Array) -> list[dict[str, Value]]:
    texts = column.to_pylist()
    if not column.null_count:
        try:
            found: list[dict[str, Value]] = _decode_all(f"[{','.join(texts)}]")
        except msgspec.DecodeError:
            found = []
        # A transformation may have made anything of them: decoding one by one finds the wrong one.
        if len(found) == len(texts):
            return found
    return [{} if text is None else _decode(text) for text in texts]


def _numbers(column: pa.Array) -> list[int]:
    # A transformation may have made nulls, for which NumPy's whole numbers have no room.
    whole = pa.types.is_integer(column.type) and not column.null_count
    values: list[int] = column.to_numpy().tolist() if whole else column.to_pylist()
    return values
