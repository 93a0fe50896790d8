"""The filters of all queues on the executors: record batches of the log in, matches out.

A worker process of Spark lives through many tasks, so compiled filters are kept in the module,
under the texts that they were made of.
"""

from __future__ import annotations

import gc
from functools import cache, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.filters import Matcher, parse
from penstock.flight.protocol import MATCHES
from penstock.store.codec.metadata import decode_many

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.filters import RowTuple, Value

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
