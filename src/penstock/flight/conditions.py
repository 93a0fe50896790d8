"""Conditions on the columns of a table: which rows a batch keeps, and which ranges can hold them.

A condition is written in the language of filters, but its names are columns of the table and not
attributes: ``offset > 999000``, ``queue IN ('a', 'b') AND state = 'in_flight'``. A comparison with
null is unknown, and a row is kept only if the condition is true. Other than a filter, a condition
that compares a column with a value of another type is refused.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput, did_you_mean
from penstock.filters import canonical, parse, tree
from penstock.filters.evaluate import compile_like
from penstock.limits import MAX_OFFSET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Test: TypeAlias = Callable[[pa.RecordBatch], pa.Array]

_COMPARE: Final = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_TURNED: Final[dict[str, str]] = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LOWEST: Final = -MAX_OFFSET - 1


class Span(NamedTuple):
    """Numbers from ``low`` to ``high``, both among them; times are in microseconds."""

    low: int = _LOWEST
    high: int = MAX_OFFSET


class Condition(NamedTuple):
    """A condition that was checked, or a part of one.

    ``spans`` and ``texts`` say which numbers and texts of a column a row that is kept can have.
    """

    columns: frozenset[str]
    test: Test
    spans: Mapping[str, Span] = MappingProxyType({})
    texts: Mapping[str, frozenset[str]] = MappingProxyType({})

    def kept(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the places of the rows that are kept."""
        return pc.indices_nonzero(pc.fill_null(self.test(batch), False))  # noqa: FBT003

    def span(self, column: str) -> Span:
        """Return the numbers that a column of a row that is kept can have."""
        return self.spans.get(column, Span())

    def chosen(self, column: str, names: Iterable[str]) -> list[str]:
        """Return those of some names that a column of a row that is kept can have."""
        known = self.texts.get(column)
        return [name for name in names if known is None or name in known]


def parse_condition(text: str, schema: pa.Schema) -> Condition:
    """Check a condition on the columns of a schema."""
    return _condition(parse(text).tree, schema)


def _condition(node: tree.Predicate, schema: pa.Schema) -> Condition:
    match node:
        case tree.And(terms):
            return _all([_condition(term, schema) for term in terms])
        case tree.Or(terms):
            return _any([_condition(term, schema) for term in terms])
        case tree.Not(operand):
            part = _condition(operand, schema)
            return Condition(part.columns, lambda batch: pc.invert(part.test(batch)))
        case tree.Between(operand, low, high):
            ends = tree.Compare(">=", operand, low), tree.Compare("<=", operand, high)
            return _all([_condition(end, schema) for end in ends])
        case tree.In(operand, items):
            field = _column(operand, schema, node)
            return _compare(field, "=", [_value(field, item, node) for item in items])
        case tree.Compare(op, left, tree.Attr() as right) if not isinstance(left, tree.Attr):
            return _condition(tree.Compare(_TURNED.get(op, op), right, left), schema)  # type: ignore[arg-type]
        case tree.Compare(op, left, right):
            field = _column(left, schema, node)
            return _compare(field, op, [_value(field, right, node)])
        case tree.IsNull(operand):
            name = _column(operand, schema, node).name
            return Condition(frozenset([name]), lambda batch: pc.is_null(batch.column(name)))
        case tree.Like(operand, pattern, escape):
            return _like(_column(operand, schema, node), compile_like(pattern, escape), node)
        case tree.Flag(tree.Truth(value)):
            return Condition(frozenset(), lambda batch: pa.repeat(value, batch.num_rows))
        case tree.Flag(operand):
            field = _column(operand, schema, node)
            return _compare(field, "=", [_value(field, tree.Truth(value=True), node)])


def _all(parts: Sequence[Condition]) -> Condition:
    spans: dict[str, Span] = {}
    texts: dict[str, frozenset[str]] = {}
    for part in parts:
        for name, (low, high) in part.spans.items():
            known = spans.get(name, Span())
            spans[name] = Span(max(low, known.low), min(high, known.high))
        for name, values in part.texts.items():
            texts[name] = texts.get(name, values) & values
    return _joined(pc.and_kleene, parts, spans, texts)


def _any(parts: Sequence[Condition]) -> Condition:
    # A column is bounded only if each of the parts bounds it.
    spans: dict[str, Span] = {}
    for name in set.intersection(*(set(part.spans) for part in parts)):
        lows, highs = zip(*(part.spans[name] for part in parts), strict=True)
        spans[name] = Span(min(lows), max(highs))
    texts = {
        name: frozenset[str]().union(*(part.texts[name] for part in parts))
        for name in set.intersection(*(set(part.texts) for part in parts))
    }
    return _joined(pc.or_kleene, parts, spans, texts)


def _joined(
    join: Callable[[pa.Array, pa.Array], pa.Array],
    parts: Sequence[Condition],
    spans: Mapping[str, Span],
    texts: Mapping[str, frozenset[str]],
) -> Condition:
    columns = frozenset[str]().union(*(part.columns for part in parts))
    test: Test = lambda batch: reduce(join, (part.test(batch) for part in parts))  # noqa: E731
    return Condition(columns, test, spans, texts)


def _compare(field: pa.Field, op: str, values: Sequence[Any]) -> Condition:
    """Compare a column with a value, or with any of several."""
    name = field.name
    # Any whole number fits an int64.
    kind = pa.int64() if pa.types.is_integer(field.type) else field.type
    known = pa.array(values, kind)

    def test(batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(name).cast(kind)
        if len(known) == 1:
            return _COMPARE[op](column, known[0])
        # A null is in no list, and outside of none.
        found = pc.is_in(column, known)
        return pc.if_else(column.is_valid(), found, pa.scalar(None, pa.bool_()))

    spans: dict[str, Span] = {}
    texts: dict[str, frozenset[str]] = {}
    if op == "=" and pa.types.is_string(kind):
        texts[name] = frozenset(values)
    elif op != "<>" and (pa.types.is_integer(kind) or pa.types.is_timestamp(kind)):
        low, high = min(values), max(values)
        spans[name] = {
            "=": Span(low, high),
            "<": Span(high=high - 1),
            "<=": Span(high=high),
            ">": Span(low + 1),
            ">=": Span(low),
        }[op]
    return Condition(frozenset([name]), test, spans, texts)


def _like(field: pa.Field, fits: Callable[[str], bool], node: tree.Predicate) -> Condition:
    if not pa.types.is_string(field.type):
        raise InvalidInput(f"column {field.name} is no text: {canonical(node):.200}")

    def test(batch: pa.RecordBatch) -> pa.Array:
        values = batch.column(field.name).to_pylist()
        return pa.array([None if each is None else fits(each) for each in values], pa.bool_())

    return Condition(frozenset([field.name]), test)


def _column(node: tree.ValueNode, schema: pa.Schema, within: tree.Predicate) -> pa.Field:
    if not isinstance(node, tree.Attr):
        raise InvalidInput(
            f"a condition compares a column with values: {canonical(within):.200} does not"
        )
    if node.name not in schema.names:
        raise InvalidInput(
            f"the table has no column {node.name!r:.100}; {did_you_mean(node.name, schema.names)}. "
            "(Conditions on attributes are a filter)"
        )
    field = schema.field(node.name)
    if pa.types.is_nested(field.type) or pa.types.is_binary(field.type):
        raise InvalidInput(f"column {node.name} can't be compared: use a filter for attributes")
    return field


def _value(field: pa.Field, node: tree.ValueNode, within: tree.Predicate) -> Any:
    """Return a value of the column's type; that of a time is in microseconds."""
    kind = field.type
    match node:
        case tree.Text(value) if pa.types.is_string(kind):
            return value
        case tree.Truth(value) if pa.types.is_boolean(kind):
            return value
        case tree.Number(value) if pa.types.is_integer(kind) and _is_whole(value):
            return int(value)
        case tree.Number(value) if pa.types.is_timestamp(kind) and abs(value) < _MOST_MS:
            return int(value * 1000)
        case tree.Text(value) if pa.types.is_timestamp(kind):
            try:
                return (datetime.fromisoformat(value) - _EPOCH) // timedelta(microseconds=1)
            except (TypeError, ValueError):
                pass
    says = next(text for fits, text in _KINDS if fits(kind))
    raise InvalidInput(
        f"column {field.name} is compared with {says}, which {canonical(within):.200} is not"
    )


def _is_whole(value: float) -> bool:
    return value == int(value) and abs(value) <= MAX_OFFSET


_MOST_MS: Final = MAX_OFFSET // 1000
_KINDS: Final[tuple[tuple[Callable[[pa.DataType], bool], str], ...]] = (
    (pa.types.is_string, "a text"),
    (pa.types.is_boolean, "TRUE or FALSE"),
    (pa.types.is_integer, "a whole number"),
    (
        pa.types.is_timestamp,
        "milliseconds since the epoch, or a time with its zone like '2026-01-31T12:00:00Z'",
    ),
)
