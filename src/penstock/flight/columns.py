"""From decoded records to Arrow columns.

Records are decoded a batch at a time in one call, and only as far as the columns asked for need:
the attributes of a message are left packed if nobody wants them.
"""

from __future__ import annotations

from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.flight.schemas import ATTRIBUTES, TIME
from penstock.store.codec.metadata import Head, Metadata, decode_heads, decode_many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.flight.schemas import Selection
    from penstock.model import Value

__all__ = [
    "Decoded",
    "about",
    "attributes_json",
    "attributes_map",
    "decode_all",
    "decode_many",
    "needs",
    "repeated",
    "times",
]

_MS: Final = pa.timestamp("ms", tz="UTC")
_ABOUT: Final = ("published_at", "group", "priority", "size", "delay_ms")
_ATTRIBUTES: Final = ("attributes", "attributes_json")


Decoded = Metadata | Head
_encode_lines: Final = msgspec.json.Encoder().encode_lines
_encode: Final = msgspec.json.Encoder().encode
_TEXT: Final[dict[type, Callable[[Any], str | None]]] = {
    str: str,
    int: str,
    bool: lambda value: "true" if value else "false",
    float: lambda value: _encode(value).decode(),
    type(None): lambda _: None,
}


def needs(selection: Selection) -> tuple[bool, bool]:
    """Tell whether a selection needs metadata, and whether it needs the attributes in it."""
    attributes = selection.filter is not None or selection.wants(*_ATTRIBUTES)
    # How many rows with payloads make a batch is told from their sizes.
    return attributes or selection.wants(*_ABOUT, "payload"), attributes


def decode_all(encoded: Sequence[bytes], *, attributes: bool) -> Sequence[Decoded | None]:
    """Decode metadata records; None for those that do not decode."""
    return decode_many(encoded) if attributes else decode_heads(encoded)


def times(ms: Sequence[int | None]) -> pa.Array:
    """Make a column of times from milliseconds."""
    return pa.array(ms, _MS).cast(TIME)


def attributes_map(rows: Sequence[dict[str, Value]]) -> pa.Array:
    """Make the column that has every attribute as text."""
    offsets = pa.array(accumulate(map(len, rows), initial=0), pa.int32())
    keys = pa.array(chain.from_iterable(rows), pa.string())
    values: list[Any] = list(chain.from_iterable(map(dict.values, rows)))
    if set(map(type, values)) - {str, type(None)}:
        values = [each if type(each) is str else _TEXT[type(each)](each) for each in values]
    return pa.MapArray.from_arrays(offsets, keys, pa.array(values, pa.string()), ATTRIBUTES)


def attributes_json(rows: Sequence[dict[str, Value]]) -> pa.Array:
    """Make the column that has the attributes as they are, as JSON."""
    if not rows:
        return pa.array([], pa.string())
    # JSON has no raw line ends, so that one call encodes them all and one takes them apart.
    lines = _encode_lines(rows)[:-1]
    return pc.split_pattern(pa.array([lines], pa.string()), "\n").flatten()


def about(selection: Selection, rows: Sequence[Any]) -> dict[str, pa.Array]:
    """Make the columns that come from metadata (``rows`` are all decoded)."""
    wants = selection.wants
    made: dict[str, pa.Array] = {}
    if wants("published_at"):
        made["published_at"] = times([row.published_at_ms for row in rows])
    if wants("group"):
        made["group"] = pa.array([row.group for row in rows], pa.string())
    if wants("priority"):
        made["priority"] = pa.array([row.priority for row in rows], pa.int32())
    if wants("size"):
        made["size"] = pa.array([row.size for row in rows], pa.int64())
    if wants("delay_ms"):
        made["delay_ms"] = pa.array([row.delay_ms for row in rows], pa.int64())
    if wants(*_ATTRIBUTES):
        attributes = [row.attributes for row in rows]
        if wants("attributes"):
            made["attributes"] = attributes_map(attributes)
        if wants("attributes_json"):
            made["attributes_json"] = attributes_json(attributes)
    return made


def repeated(text: str, count: int) -> pa.Array:
    """Make a column of one text."""
    return pa.repeat(pa.scalar(text, pa.string()), count)


def numbers(values: Iterable[int], kind: pa.DataType) -> pa.Array:
    """Make a column of whole numbers."""
    return pa.array(values, kind)
