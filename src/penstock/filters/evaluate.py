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
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from math import isfinite
from typing import Any, Final, NamedTuple, TypeAlias

from msgspec import Struct

from penstock.filters import tree
from penstock.model import Value

INT_MAX: Final = 2**63 - 1

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


class Filter:
    """A filter that has been checked. Equal filters have equal trees, however they were written."""

    def __init__(self, predicate: tree.Predicate) -> None:
        self.tree: Final = predicate

    @cached_property
    def text(self) -> str:
        """The canonical text, which parses to the same tree."""
        return tree.canonical(self.tree)

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name the filter reads: attributes, and fields such as ``priority``."""
        return tree.names(self.tree)

    def evaluate(self, row: RowTuple) -> bool | None:
        """Return True, False, or None for unknown."""
        return self._evaluate(row)

    def matches(self, row: RowTuple) -> bool:
        """Return whether the filter is true of the message; unknown is not."""
        return self._match(row) is True

    @cached_property
    def _evaluate(self) -> Test:
        return compile_predicate(self.tree)

    @cached_property
    def _match(self) -> Test:
        return compile_match(self.tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Filter) and self.tree == other.tree

    def __hash__(self) -> int:
        return hash(self.tree)

    def __repr__(self) -> str:
        return f"parse({self.text!r})"

    def __reduce__(self) -> tuple[type[Filter], tuple[tree.Predicate]]:
        """Travel as a tree: the compiled tests can't be pickled."""
        return Filter, (self.tree,)


class Explanation(Struct, frozen=True):
    """Why a filter did or did not take a message: the result of one condition of the filter.

    ``result`` is True, False or None for unknown. An atom such as ``price > 10`` gives in
    ``values`` the values it read, as ``("price", 12)``; AND, OR and NOT give ``parts`` instead.
    """

    text: str
    result: bool | None
    values: tuple[tuple[str, Value], ...] = ()
    parts: tuple[Explanation, ...] = ()


def explain(filter: Filter, row: RowTuple) -> Explanation:  # noqa: A002 - the noun it is about
    """Return the filter's result on a message, with that of every condition in it."""
    return _explain(filter.tree, row)


def _explain(node: tree.Predicate, row: RowTuple) -> Explanation:
    text, result = tree.canonical(node), compile_predicate(node)(row)
    match node:
        case tree.And(terms) | tree.Or(terms):
            return Explanation(text, result, parts=tuple(_explain(term, row) for term in terms))
        case tree.Not(operand):
            return Explanation(text, result, parts=(_explain(operand, row),))
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
        case tree.Number(value):
            return _compare_number(order, _raw_reader(left), value)
        case tree.Text(value) | tree.Truth(value):
            if op not in ("=", "<>"):
                return lambda _row: None
            return _compare_same_type(order, _raw_reader(left), value)
        case _:
            return _compare_any(op, _reader(left), _reader(right))


def _compare_attribute(attribute: str, operation: _Order, literal: float) -> Test:
    """Do as ``_compare_number`` does, for an attribute, which most filters have.

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
    # Imported here, and by the parser: few processes have a filter with LIKE.
    from penstock.filters.like import compile_like  # noqa: PLC0415

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
