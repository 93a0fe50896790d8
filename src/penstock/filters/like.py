"""``LIKE``: a text against a pattern, in time linear in the text: there is no backtracking.

The pattern is cut at every ``%`` into pieces. The first and the last are held against the two ends
of the text; each piece between them is taken at its earliest place after the one before, which is
always right because ``%`` takes any run of characters. A piece of plain characters is found by
``str.find``; one with ``_`` in it by shift-and: one bit for every place in the piece, all of them
moved on together for each character of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

# The characters of a piece, with None for "any one character".
_Piece: TypeAlias = list[str | None]
# Finds a piece in a text, from a place on and before an end; -1 if it is not there.
_Finder: TypeAlias = Callable[[str, int, int], int]

_ANY: Final = None


class PatternError(ValueError):
    """A pattern whose escape character stands before something it can't escape."""


def compile_like(pattern: str, escape: str | None = None) -> Callable[[str], bool]:
    """Return the test of a text against the pattern."""
    pieces = _cut(pattern, escape)
    if len(pieces) == 1:
        fits, size = _fits(pieces[0]), len(pieces[0])
        return lambda text: len(text) == size and fits(text, 0)
    head, *middle, tail = pieces
    head_fits, tail_fits = _fits(head), _fits(tail)
    head_chars, tail_chars = len(head), len(tail)
    least_chars = sum(map(len, pieces))
    steps = [(_finder(piece), len(piece)) for piece in middle if piece]

    def test(text: str) -> bool:
        if len(text) < least_chars:
            return False
        end = len(text) - tail_chars
        if not (head_fits(text, 0) and tail_fits(text, end)):
            return False
        start = head_chars
        for find, chars in steps:
            start = find(text, start, end)
            if start < 0:
                return False
            start += chars
        return True

    return test


def _cut(pattern: str, escape: str | None) -> list[_Piece]:
    pieces: list[_Piece] = [[]]
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            escaped = next(characters, None)
            if escaped is None or escaped not in ("%", "_", escape):
                raise PatternError(f"{escape!r} must stand before %, _ or another {escape!r}")
            pieces[-1].append(escaped)
        elif character == "%":
            pieces.append([])
        else:
            pieces[-1].append(_ANY if character == "_" else character)
    return pieces


def _fits(piece: _Piece) -> Callable[[str, int], bool]:
    """Return the test for a piece at one place; the text must be long enough to hold it."""
    if _ANY not in piece:
        plain = "".join(map(str, piece))
        return lambda text, start: text.startswith(plain, start)
    wanted = [(offset, character) for offset, character in enumerate(piece) if character]
    return lambda text, start: all(text[start + offset] == char for offset, char in wanted)


def _finder(piece: _Piece) -> _Finder:
    if _ANY not in piece:
        plain = "".join(map(str, piece))
        return lambda text, start, end: text.find(plain, start, end)
    anywhere = sum(1 << place for place, character in enumerate(piece) if character is _ANY)
    masks = {
        character: anywhere | sum(1 << place for place, own in enumerate(piece) if own == character)
        for character in piece
        if character is not _ANY
    }
    done = 1 << (len(piece) - 1)

    def find(text: str, start: int, end: int) -> int:
        state = 0
        for place in range(start, end):
            state = ((state << 1) | 1) & masks.get(text[place], anywhere)
            if state & done:
                return place + 1 - len(piece)
        return -1

    return find
