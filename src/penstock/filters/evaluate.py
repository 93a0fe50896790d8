"""A tree → functions that evaluate it, under SQL's three-valued logic and JMS's typing.

Every node becomes one closure: a predicate's answers True, False or None (unknown), a value's
answers a value or None (null). What a filter holds is only ever a variable of these closures; no
source text is made from it.

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
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import isfinite
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.filters.lexer import INT_MAX
from penstock.filters.like import compile_like
from penstock.filters.tree import (
    FIELDS,
    And,
    Arith,
    Attr,
    Between,
    Compare,
    CompareOp,
    Flag,
    In,
    IsNull,
    Like,
    Neg,
    Not,
    Number,
    Or,
    Predicate,
    Text,
    Truth,
    ValueNode,
)
from penstock.model import Value

__all__ = ["Row", "RowTuple", "Test", "Value", "compile_match", "compile_predicate", "read_value"]

RowTuple: TypeAlias = tuple[Mapping[str, Value], str, int, int, int]
"""The fields of :class:`Row` as a plain tuple, which is quicker to make for every message."""


class Row(NamedTuple):
    """A message as filters see it. ``size`` is that of its payload in bytes.

    A filter reads ``group``, ``priority``, ``published_at`` and ``size`` from here; every other
    name, ``queue`` among them, is an attribute.
    """

    attributes: Mapping[str, Value]
    group: str = ""
    priority: int = 0
    published_at_ms: int = 0
    size: int = 0


Test: TypeAlias = Callable[[RowTuple], bool | None]
_Reader: TypeAlias = Callable[[RowTuple], Value]
_Order: TypeAlias = Callable[[Any, Any], bool]

_COMPARE: Final[dict[CompareOp, _Order]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_MIRRORED: Final[dict[CompareOp, CompareOp]] = {
    "=": "=",
    "<>": "<>",
    "<": ">",
    "<=": ">=",
    ">": "<",
    ">=": "<=",
}
_ARITH: Final[dict[str, Callable[[Any, Any], int | float]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


@lru_cache(maxsize=4096)
def compile_match(tree: Predicate) -> Test:
    """Return a test that is true exactly when the tree is; quicker than three-valued logic.

    Equal trees get the same test: ten thousand queues that differ in one attribute have a handful
    of different conditions left to test, which stay in the processor's cache.
    """
    if not isinstance(tree, And):
        return compile_predicate(tree)
    tests = [compile_predicate(term) for term in tree.terms]
    if len(tests) == 2:
        first, second = tests
        return lambda row: first(row) is True and second(row) is True

    def match(row: RowTuple) -> bool:
        for test in tests:  # noqa: SIM110 - all() is slower by a generator
            if test(row) is not True:
                return False
        return True

    return match


def compile_predicate(node: Predicate) -> Test:
    """Return the function that evaluates the predicate: True, False or None for unknown."""
    match node:
        case And(terms):
            return _joined([compile_predicate(term) for term in terms], decisive=False)
        case Or(terms):
            return _joined([compile_predicate(term) for term in terms], decisive=True)
        case Not(operand):
            test = compile_predicate(operand)
            return lambda row: None if (result := test(row)) is None else not result
        case Compare(op, left, right):
            return _compare(op, left, right)
        case Between(operand, low, high):
            bounds = [_compare(">=", operand, low), _compare("<=", operand, high)]
            return _joined(bounds, decisive=False)
        case In():
            return _in(node)
        case Like():
            return _like(node)
        case IsNull(operand):
            read = _reader(operand)
            return lambda row: read(row) is None
        case Flag(operand):
            read = _reader(operand)
            return lambda row: value if (value := read(row)) is True or value is False else None


def read_value(node: ValueNode, row: RowTuple) -> Value:
    """Return what a value node stands for in this message; None for null."""
    return _reader(node)(row)


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


# --- comparison -----------------------------------------------------------------------------


def _compare(op: CompareOp, left: ValueNode, right: ValueNode) -> Test:
    if isinstance(left, Text | Number | Truth):
        op, left, right = _MIRRORED[op], right, left
    order = _COMPARE[op]
    match right:
        case Number(value) if isinstance(left, Attr) and left.name not in FIELDS:
            return _compare_attribute(left.name, order, value)
        case Number(value):
            return _compare_number(order, _raw_reader(left), value)
        case Text(value) | Truth(value):
            if op not in ("=", "<>"):
                return lambda _row: None
            return _compare_same_type(order, _raw_reader(left), value)
        case _:
            return _compare_any(op, _reader(left), _reader(right))


def _compare_attribute(attribute: str, operation: _Order, literal: float) -> Test:
    """Do as ``_compare_number`` does, for what most filters have.

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


def _compare_number(order: _Order, read: _Reader, number: float) -> Test:
    def compare(row: RowTuple) -> bool | None:
        value = read(row)
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


def _compare_any(op: CompareOp, left: _Reader, right: _Reader) -> Test:
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


def _in(node: In) -> Test:
    read = _reader(node.operand)
    texts = frozenset(item.value for item in node.items if isinstance(item, Text))
    numbers = frozenset(item.value for item in node.items if isinstance(item, Number))
    truths = frozenset(item.value for item in node.items if isinstance(item, Truth))
    # Not found is unknown, not false, if the list also holds items of another type.
    text_miss = None if numbers or truths or not texts else False
    number_miss = None if texts or truths or not numbers else False
    truth_miss = None if texts or numbers or not truths else False

    def contains(row: RowTuple) -> bool | None:
        value = read(row)
        kind = type(value)
        if kind is str:
            return True if value in texts else text_miss
        if kind is int or kind is float:
            return True if value in numbers else number_miss
        if kind is bool:
            return True if value in truths else truth_miss
        return None

    return contains


def _like(node: Like) -> Test:
    read = _reader(node.operand)
    fits = compile_like(node.pattern, node.escape)

    def like(row: RowTuple) -> bool | None:
        value = read(row)
        return fits(value) if type(value) is str else None

    return like


# --- values ---------------------------------------------------------------------------------


def _is_number(value: Value) -> bool:
    return type(value) is int or type(value) is float


def _reader(node: ValueNode) -> _Reader:
    match node:
        case Text(value) | Number(value) | Truth(value):
            return lambda _row: value
        case Arith(op, left, right):
            return _arith(op, _reader(left), _reader(right))
        case Neg(operand):
            return _arith("-", lambda _row: 0, _reader(operand))
        case Attr(name):
            raw = _raw_reader(node)
            return raw if name in FIELDS else lambda row: _finite(raw(row))


def _raw_reader(node: ValueNode) -> _Reader:
    """Return a reader that may give a float that is not finite, for a caller that tests for it."""
    if not isinstance(node, Attr):
        return _reader(node)
    name = node.name
    field = FIELDS.get(name)
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
