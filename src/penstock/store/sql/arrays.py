"""Arrays as parameters of statements, in the database's binary form.

psycopg looks at each element of a list several times to find out its type. A statement has up to
thirty arrays, and says in its text of which type each is: they are written in one step, which
halves the client's share of a small statement. An empty array has its type as well, so that a
statement is prepared once.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from struct import error as StructError  # noqa: N812 - it is a class
from typing import TYPE_CHECKING, Any, Final

from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format

from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from psycopg.abc import AdaptContext

_BYTEA, _INT8, _INT4 = 17, 20, 23
# Number of dimensions (none if it is empty), whether there is a NULL, type of the elements.
_EMPTY: Final = Struct(">iii")
# The same, the length, and the index of the first element.
_HEAD: Final = Struct(">iiiii")
_LENGTH: Final = Struct(">i")
_NULL: Final = _LENGTH.pack(-1)


class _Array(bytes):
    """An array in binary form."""


class _Int8Array(_Array):
    """An array of bigint."""


class _Int4Array(_Array):
    """An array of integer."""


class _ByteaArray(_Array):
    """An array of bytea."""


class _ArrayDumper(Dumper):
    """Hands an array on as it is."""

    format = Format.BINARY

    def dump(self, obj: _Array) -> Buffer:
        """Return the bytes to send."""
        return obj


class _Int8ArrayDumper(_ArrayDumper):
    oid = 1016


class _Int4ArrayDumper(_ArrayDumper):
    oid = 1007


class _ByteaArrayDumper(_ArrayDumper):
    oid = 1001


@lru_cache(1_024)
def _numbers(count: int, letter: str) -> Struct:
    return Struct(">iiiii" + f"i{letter}" * count)


def _encode_numbers(values: Sequence[int | None], kind: int, letter: str, size: int) -> bytes:
    count = len(values)
    if not count:
        return _EMPTY.pack(0, 0, kind)
    try:
        if None in values:
            one = Struct(f">i{letter}").pack
            parts = [_NULL if value is None else one(size, value) for value in values]
            return b"".join([_HEAD.pack(1, 1, kind, count, 1), *parts])
        flat: list[Any] = [size] * (2 * count)
        flat[1::2] = values
        return _numbers(count, letter).pack(1, 0, kind, count, 1, *flat)
    except StructError as refusal:
        raise InvalidInput(f"a number has more than {size} bytes: {refusal}") from refusal


def _int8_array(values: Sequence[int | None]) -> _Int8Array:
    return _Int8Array(_encode_numbers(values, _INT8, "q", 8))


def _int4_array(values: Sequence[int | None]) -> _Int4Array:
    return _Int4Array(_encode_numbers(values, _INT4, "i", 4))


def _bytea_array(values: Sequence[bytes | None]) -> _ByteaArray:
    if not values:
        return _ByteaArray(_EMPTY.pack(0, 0, _BYTEA))
    parts = [_HEAD.pack(1, int(None in values), _BYTEA, len(values), 1)]
    for value in values:
        parts += (_NULL,) if value is None else (_LENGTH.pack(len(value)), value)
    return _ByteaArray(b"".join(parts))


# By the type that a statement names.
ENCODERS: Final[Mapping[str, Callable[[Sequence[Any]], bytes]]] = {
    "bigint": _int8_array,
    "integer": _int4_array,
    "bytea": _bytea_array,
}


def register_arrays(context: AdaptContext) -> None:
    """Let a connection take encoded arrays as parameters."""
    if context.adapters is not None:
        context.adapters.register_dumper(_Int8Array, _Int8ArrayDumper)
        context.adapters.register_dumper(_Int4Array, _Int4ArrayDumper)
        context.adapters.register_dumper(_ByteaArray, _ByteaArrayDumper)
