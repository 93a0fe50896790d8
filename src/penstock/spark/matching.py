"""The filters of all queues on the executors: record batches of the log in, matches out.

A worker process of Spark lives through many tasks, so compiled filters are kept in the module,
under the texts that they were made of.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.filters import Matcher, parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.filters import RowTuple, Value

__all__ = ["COLUMNS", "MATCHES", "match_batch", "matcher_of"]

COLUMNS: Final = ("offset", "attributes_json", "group", "priority", "published_at", "size")
"""What matching needs of the log."""

MATCHES: Final = pa.schema([("offset", pa.int64()), ("queue", pa.string())])

_KEPT: Final = 8
_matchers: dict[frozenset[tuple[str, str]], Matcher[str]] = {}
_decode: Final = msgspec.json.Decoder(dict[str, str | int | float | bool | None]).decode


def matcher_of(filters: Mapping[str, str]) -> Matcher[str]:
    """Return the matcher of these filters, compiled once in a process."""
    key = frozenset(filters.items())
    found = _matchers.get(key)
    if found is None:
        while len(_matchers) >= _KEPT:
            del _matchers[next(iter(_matchers))]
        found = Matcher({name: parse(text) for name, text in sorted(filters.items())})
        _matchers[key] = found
    return found


def match_batch(
    matcher: Matcher[str],
    batch: pa.RecordBatch,
    extra: Mapping[str, Sequence[Value]] | None = None,
) -> pa.RecordBatch:
    """Return the pairs (offset, queue) of a batch of the log.

    ``extra`` are values by name that count as attributes too, before those of the message.
    """
    routes = matcher.match(_rows(batch, extra or {}))
    lengths = np.fromiter(map(len, routes), dtype=np.int64, count=len(routes))
    offsets = np.repeat(batch.column("offset").to_numpy(zero_copy_only=False), lengths)
    queues = pa.array(chain.from_iterable(routes), pa.string(), size=int(lengths.sum()))
    return pa.record_batch([pa.array(offsets, pa.int64()), queues], schema=MATCHES)


def _rows(batch: pa.RecordBatch, extra: Mapping[str, Sequence[Value]]) -> list[RowTuple]:
    attributes: list[dict[str, Value]] = [
        {} if text is None else _decode(text)
        for text in batch.column("attributes_json").to_pylist()
    ]
    for name, values in extra.items():
        for row, value in zip(attributes, values, strict=True):
            row[name] = value
    micros = pc.cast(batch.column("published_at"), pa.int64())
    times = pc.divide(micros, 1000)
    return list(
        zip(
            attributes,
            batch.column("group").to_pylist(),
            batch.column("priority").to_pylist(),
            times.to_pylist(),
            batch.column("size").to_pylist(),
            strict=True,
        )
    )
