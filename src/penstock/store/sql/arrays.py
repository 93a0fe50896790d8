"""Arrays as parameters of statements, in the database's binary form.

psycopg looks at each element of a list several times to find out its type. A statement has up to
thirty arrays, and says in its text of which type each is: they are written in one step, which
halves the client's share of a small statement. An empty array has its type as well, so that a
statement is prepared once.
"""

from __future__ import annotations

from functools import lru_cache, partial
from struct import Struct
from struct import error as StructError  # noqa: N812 - it is a class
from typing import TYPE_CHECKING, Any, Final

from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format

from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from psycopg.abc import AdaptContext

# Number of dimensions (none if it is empty), whether there is a NULL, type of the elements.
_EMPTY: Final = Struct(">iii")
# The same, the length, and the index of the first element.
_HEAD: Final = Struct(">iiiii")
_LENGTH: Final = Struct(">i")
_NULL: Final = _LENGTH.pack(-1)


class _Int8Array(bytes):
    """An array of bigint, encoded."""

    element, array = 20, 1016
    letter, size = "q", 8


class _Int4Array(bytes):
    """An array of integer, encoded."""

    element, array = 23, 1007
    letter, size = "i", 4


class _ByteaArray(bytes):
    """An array of bytea, encoded."""

    element, array = 17, 1001


class _ArrayDumper(Dumper):
    """Hands an encoded array on as it is."""

    format = Format.BINARY

    def __init__(self, cls: Any, context: AdaptContext | None = None) -> None:
        super().__init__(cls, context)
        self.oid = cls.array

    def dump(self, obj: bytes) -> Buffer:
        """Return the bytes to send."""
        return obj


@lru_cache(1_024)
def _numbers(count: int, letter: str) -> Struct:
    return Struct(">iiiii" + f"i{letter}" * count)


def _encode_numbers(kind: type[_Int8Array | _Int4Array], values: Sequence[int | None]) -> bytes:
    count, size = len(values), kind.size
    if not count:
        return kind(_EMPTY.pack(0, 0, kind.element))
    try:
        if None in values:
            one = Struct(f">i{kind.letter}").pack
            parts = [_NULL if value is None else one(size, value) for value in values]
            return kind(b"".join([_HEAD.pack(1, 1, kind.element, count, 1), *parts]))
        flat: list[Any] = [size] * (2 * count)
        flat[1::2] = values
        return kind(_numbers(count, kind.letter).pack(1, 0, kind.element, count, 1, *flat))
    except StructError as refusal:
        raise InvalidInput(f"a number has more than {size} bytes: {refusal}") from refusal


def _encode_bytes(values: Sequence[bytes | None]) -> bytes:
    if not values:
        return _ByteaArray(_EMPTY.pack(0, 0, _ByteaArray.element))
    parts = [_HEAD.pack(1, int(None in values), _ByteaArray.element, len(values), 1)]
    for value in values:
        parts += (_NULL,) if value is None else (_LENGTH.pack(len(value)), value)
    return _ByteaArray(b"".join(parts))


# By the type that a statement names.
ENCODERS: Final[Mapping[str, Callable[[Sequence[Any]], bytes]]] = {
    "bigint": partial(_encode_numbers, _Int8Array),
    "integer": partial(_encode_numbers, _Int4Array),
    "bytea": _encode_bytes,
}


def register_arrays(context: AdaptContext) -> None:
    """Let a connection take encoded arrays as parameters."""
    assert context.adapters is not None
    for kind in (_Int8Array, _Int4Array, _ByteaArray):
        context.adapters.register_dumper(kind, _ArrayDumper)
