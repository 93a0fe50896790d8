"""A tree → functions that evaluate it, under SQL's three-valued logic and JMS's typing.

Every node becomes one closure: a predicate's answers True, False or None (unknown), a value's
answers a value or None (null). The texts and numbers of a filter are only ever variables of these
closures; no source text is made from them.

The typing rules, all of which end in *unknown* and never in an error:

- Only equal types compare: strings with strings, booleans with booleans, numbers with numbers.
- Strings and booleans know ``=`` and ``<>`` only; numbers all six.
- Arithmetic is for numbers: anything else gives null, and so do division by zero, a result or
  operand outside 64-bit integers, and one that is not finite. Division is exact (``7 / 2`` is
  3.5): attributes come from JSON, where 7 and 7.0 are the same number.
- An infinite or not-a-number attribute reads as null.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from math import isfinite
from typing import Any, Final, TypeAlias

from penstock.filters import tree
from penstock.filters.tree import RowTuple, Test
from penstock.model import Explanation, Value

INT_MAX: Final = 2**63 - 1

_Reader: TypeAlias = Callable[[RowTuple], Value]
_Order: TypeAlias = Callable[[Any, Any], bool]

_COMPARE: Final[dict[tree.CompareOp, _Order]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_MIRRORED: Final[dict[str, tree.CompareOp]] = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_ARITH: Final[dict[str, Callable[[Any, Any], int | float]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


@lru_cache(maxsize=4096)
def compile_match(node: tree.Predicate) -> Test:
    """Return a test that is true exactly when the predicate is; quicker than three-valued logic.

    Equal trees get the same test: ten thousand queues that differ in one attribute have a handful
    of different conditions left to test, which stay in the processor's cache.
    """
    if not isinstance(node, tree.And):
        return compile_predicate(node)
    tests = [compile_predicate(term) for term in node.terms]
    if len(tests) == 2:
        first, second = tests
        return lambda row: first(row) is True and second(row) is True

    def match(row: RowTuple) -> bool:
        for test in tests:  # noqa: SIM110 - all() is slower by a generator
            if test(row) is not True:
                return False
        return True

    return match


def compile_predicate(node: tree.Predicate) -> Test:
    """Return the function that evaluates the predicate: True, False or None for unknown."""
    match node:
        case tree.And(terms):
            return _joined([compile_predicate(term) for term in terms], decisive=False)
        case tree.Or(terms):
            return _joined([compile_predicate(term) for term in terms], decisive=True)
        case tree.Not(operand):
            test = compile_predicate(operand)
            return lambda row: None if (result := test(row)) is None else not result
        case tree.Compare(op, left, right):
            return _compare(op, left, right)
        case tree.Between(operand, low, high):
            bounds = [_compare(">=", operand, low), _compare("<=", operand, high)]
            return _joined(bounds, decisive=False)
        case tree.In():
            return _in(node)
        case tree.Like():
            return _like(node)
        case tree.IsNull(operand):
            read = _reader(operand)
            return lambda row: read(row) is None
        case tree.Flag(operand):
            read = _reader(operand)
            return lambda row: value if (value := read(row)) is True or value is False else None


def _joined(tests: list[Test], *, decisive: bool) -> Test:
    """AND if False decides, OR if True does."""

    def joined(row: RowTuple) -> bool | None:
        result: bool | None = not decisive
        for test in tests:
            found = test(row)
            if found is decisive:
                return decisive
            if found is None:
                result = None
        return result

    return joined


def explain_node(node: tree.Predicate, row: RowTuple) -> Explanation:
    """Return the result of a condition on a message, with those of the conditions in it."""
    text, result = tree.canonical(node), compile_predicate(node)(row)
    match node:
        case tree.And(terms) | tree.Or(terms):
            return Explanation(text, result, parts=tuple(explain_node(term, row) for term in terms))
        case tree.Not(operand):
            return Explanation(text, result, parts=(explain_node(operand, row),))
        case _:
            read = tree.Attr | tree.Arith | tree.Neg
            found = [part for part in tree.children(node) if isinstance(part, read)]
            values = tuple((tree.canonical(part), _reader(part)(row)) for part in found)
            return Explanation(text, result, values=values)


# --- comparison -----------------------------------------------------------------------------


def _compare(op: tree.CompareOp, left: tree.ValueNode, right: tree.ValueNode) -> Test:
    if isinstance(left, tree.Text | tree.Number | tree.Truth):
        op, left, right = _MIRRORED.get(op, op), right, left
    order = _COMPARE[op]
    match right:
        case tree.Number(value) if isinstance(left, tree.Attr) and left.name not in tree.FIELDS:
            return _compare_attribute(left.name, order, value)
        case tree.Text(value) | tree.Truth(value):
            if op not in ("=", "<>"):
                return lambda _row: None
            return _compare_same_type(order, _raw_reader(left), value)
        case _:
            return _compare_any(op, _reader(left), _reader(right))


def _compare_attribute(attribute: str, operation: _Order, literal: float) -> Test:
    """Do as ``_compare_any`` does, for an attribute and a number, which most filters have.

    Default arguments reach their values in fewer steps through memory than a closure's cells.
    """

    def compare(
        row: RowTuple, name: str = attribute, order: _Order = operation, number: float = literal
    ) -> bool | None:
        value = row[0].get(name)
        kind = type(value)
        if kind is int or (kind is float and isfinite(value)):  # type: ignore[arg-type]
            return order(value, number)
        return None

    return compare


def _compare_same_type(order: _Order, read: _Reader, literal: str | bool) -> Test:  # noqa: FBT001
    kind = type(literal)

    def compare(row: RowTuple) -> bool | None:
        value = read(row)
        return order(value, literal) if type(value) is kind else None

    return compare


def _compare_any(op: tree.CompareOp, left: _Reader, right: _Reader) -> Test:
    order = _COMPARE[op]
    equality = op in ("=", "<>")

    def compare(row: RowTuple) -> bool | None:
        one, other = left(row), right(row)
        if _is_number(one) and _is_number(other):
            return order(one, other)
        if equality and type(one) is type(other) and type(one) in (str, bool):
            return order(one, other)
        return None

    return compare


def _in(node: tree.In) -> Test:
    read = _reader(node.operand)
    texts = frozenset(item.value for item in node.items if isinstance(item, tree.Text))
    numbers = frozenset(item.value for item in node.items if isinstance(item, tree.Number))
    truths = frozenset(item.value for item in node.items if isinstance(item, tree.Truth))
    groups = {str: texts, int: numbers, float: numbers, bool: truths}
    # Not found is unknown, not false, if the list also holds items of another type.
    miss = None if sum(map(bool, (texts, numbers, truths))) > 1 else False

    def contains(row: RowTuple) -> bool | None:
        value = read(row)
        group = groups.get(type(value))
        return (True if value in group else miss) if group else None

    return contains


def _like(node: tree.Like) -> Test:
    read = _reader(node.operand)
    fits = compile_like(node.pattern, node.escape)

    def like(row: RowTuple) -> bool | None:
        value = read(row)
        return fits(value) if type(value) is str else None

    return like


# --- values ---------------------------------------------------------------------------------


def _is_number(value: Value) -> bool:
    return type(value) is int or type(value) is float


def _reader(node: tree.ValueNode) -> _Reader:
    match node:
        case tree.Text(value) | tree.Number(value) | tree.Truth(value):
            return lambda _row: value
        case tree.Arith(op, left, right):
            return _arith(op, _reader(left), _reader(right))
        case tree.Neg(operand):
            return _arith("-", lambda _row: 0, _reader(operand))
        case tree.Attr(name):
            raw = _raw_reader(node)
            return raw if name in tree.FIELDS else lambda row: _finite(raw(row))


def _raw_reader(node: tree.ValueNode) -> _Reader:
    """Return a reader that may give a float that is not finite, for a caller that tests for it."""
    if not isinstance(node, tree.Attr):
        return _reader(node)
    name = node.name
    field = tree.FIELDS.get(name)
    if field is not None:
        return operator.itemgetter(field)
    return lambda row: row[0].get(name)


def _finite(value: Value) -> Value:
    return None if type(value) is float and not isfinite(value) else value


def _arith(op: str, left: _Reader, right: _Reader) -> _Reader:
    combine = _ARITH[op]

    def arith(row: RowTuple) -> int | float | None:
        one, other = left(row), right(row)
        if not (_in_range(one) and _in_range(other)):
            return None
        try:
            result = combine(one, other)
        except (ZeroDivisionError, OverflowError):
            return None
        return result if _in_range(result) else None

    return arith


def _in_range(value: Value) -> bool:
    """Whether this is a number to reckon with: 64-bit integers keep every step cheap."""
    if type(value) is int:
        return -INT_MAX - 1 <= value <= INT_MAX
    return type(value) is float and isfinite(value)


# --- LIKE -----------------------------------------------------------------------------------
#
# Every pattern costs time linear in the text: there is no backtracking. The pattern is cut at every
# ``%`` into pieces. The first and the last are held against the two ends of the text; each piece
# between them is taken at its earliest place after the one before, which is always right because
# ``%`` takes any run of characters. A piece of plain characters is found by ``str.find``; one with
# ``_`` in it by shift-and: one bit for every place in the piece, all of them moved on together for
# each character of the text.

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
