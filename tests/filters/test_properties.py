"""Filters against an evaluator written straight from the truth tables, over random trees."""

from fractions import Fraction
from functools import reduce
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from tests.soaking import examples

from penstock.errors import InvalidFilter
from penstock.filters import Matcher, Row, Value, canonical, parse
from penstock.filters.tree import (
    And,
    Arith,
    Attr,
    Between,
    Compare,
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

T, F, U = True, False, None

# --- the evaluator of the tests ---------------------------------------------------------------

AND = {
    (T, T): T, (T, F): F, (T, U): U,
    (F, T): F, (F, F): F, (F, U): F,
    (U, T): U, (U, F): F, (U, U): U,
}  # fmt: skip
OR = {
    (T, T): T, (T, F): T, (T, U): T,
    (F, T): T, (F, F): F, (F, U): U,
    (U, T): T, (U, F): U, (U, U): U,
}  # fmt: skip
NOT = {T: F, F: T, U: U}
FIELDS = {
    "group": "group",
    "priority": "priority",
    "published_at": "published_at_ms",
    "size": "size",
}


def value_of(node: ValueNode, row: Row) -> Value:
    match node:
        case Attr(name):
            return getattr(row, FIELDS[name]) if name in FIELDS else row.attributes.get(name)
        case Text(value) | Number(value) | Truth(value):
            return value
        case Neg(operand):
            return reckon("-", 0, value_of(operand, row))
        case Arith(op, left, right):
            return reckon(op, value_of(left, row), value_of(right, row))


def sort_of(value: Value) -> str | None:
    if isinstance(value, bool):
        return "boolean"
    return {str: "string", int: "number", float: "number"}.get(type(value))


def reckon(op: str, left: Any, right: Any) -> Value:
    if sort_of(left) != "number" or sort_of(right) != "number":
        return None
    if any(isinstance(v, int) and not -(2**63) <= v < 2**63 for v in (left, right)):
        return None
    try:
        if op == "+":
            result = left + right
        elif op == "-":
            result = left - right
        elif op == "*":
            result = left * right
        else:
            result = left / right
    except ArithmeticError:
        return None
    if isinstance(result, int):
        return result if -(2**63) <= result < 2**63 else None
    return result if result - result == 0 else None


def compare(op: str, left: Any, right: Any) -> bool | None:
    if sort_of(left) is None or sort_of(left) != sort_of(right):
        return U
    if sort_of(left) != "number":
        return {"=": left == right, "<>": left != right}.get(op)
    order = Fraction(left) - Fraction(right)
    return {
        "=": order == 0, "<>": order != 0, "<": order < 0,
        "<=": order <= 0, ">": order > 0, ">=": order >= 0,
    }[op]  # fmt: skip


def like(text: str, pattern: str) -> bool:
    """Fill the table of which starts of the pattern fit which starts of the text."""
    fits = [True] + [False] * len(text)
    for wanted in pattern:
        after = [wanted == "%" and fits[0]]
        for place, character in enumerate(text):
            if wanted == "%":
                after.append(after[place] or fits[place + 1])
            else:
                after.append(fits[place] and wanted in ("_", character))
        fits = after
    return fits[-1]


def truth_of(node: Predicate, row: Row) -> bool | None:
    match node:
        case And(terms):
            return reduce(lambda a, b: AND[a, b], (truth_of(term, row) for term in terms))
        case Or(terms):
            return reduce(lambda a, b: OR[a, b], (truth_of(term, row) for term in terms))
        case Not(operand):
            return NOT[truth_of(operand, row)]
        case Flag(operand):
            value = value_of(operand, row)
            return value if isinstance(value, bool) else U
        case Compare(op, left, right):
            return compare(op, value_of(left, row), value_of(right, row))
        case In(operand, items):
            value = value_of(operand, row)
            equals = [compare("=", value, value_of(item, row)) for item in items]
            return reduce(lambda a, b: OR[a, b], equals)
        case Between(operand, low, high):
            value = value_of(operand, row)
            above = compare(">=", value, value_of(low, row))
            return AND[above, compare("<=", value, value_of(high, row))]
        case Like(operand, pattern):
            value = value_of(operand, row)
            return like(value, pattern) if isinstance(value, str) else U
        case IsNull(operand):
            return value_of(operand, row) is None


# --- random trees and messages ----------------------------------------------------------------

NAMES = ["a", "b", "c", "order.kind", 'q"', "not", "queue", "group", "priority", "size"]
TEXTS = ["", "x", "y", "it's", "xyx", "1", "TRUE", "\n", "ß"]
NUMBERS = [0, 1, 2, -1, 7, 0.0, 1.0, 0.5, -2.5, 1e300, -(2**63), 2**63 - 1]

attrs = st.builds(Attr, st.sampled_from(NAMES))
literals = st.one_of(
    st.builds(Text, st.sampled_from(TEXTS)),
    st.builds(Number, st.sampled_from(NUMBERS)),
    st.builds(Truth, st.booleans()),
)
values = st.recursive(
    attrs | attrs | literals,
    lambda inner: (
        st.builds(Neg, inner)
        | st.builds(Arith, st.sampled_from(["+", "-", "*", "/"]), inner, inner)
    ),
    max_leaves=4,
).filter(
    lambda node: node != Neg(Number(-(2**63))) and "9223372036854775808" not in canonical(node)
)
equalities = st.builds(Compare, st.just("="), attrs, literals)
atoms = st.one_of(
    equalities,
    equalities,
    st.builds(In, attrs, st.lists(literals, min_size=1, max_size=4).map(tuple)),
    st.builds(Compare, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), values, values),
    st.builds(In, values, st.lists(literals, min_size=1, max_size=4).map(tuple)),
    st.builds(Between, values, values, values),
    st.builds(Like, values, st.text("xy%_", max_size=5)),
    st.builds(IsNull, values),
    st.builds(Flag, attrs | st.builds(Truth, st.booleans())),
)


def joined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Predicate]:
    terms = st.lists(inner, min_size=2, max_size=4).map(tuple)
    return st.one_of(st.builds(And, terms), st.builds(Or, terms), st.builds(Not, inner))


trees = st.recursive(atoms, joined, max_leaves=6)
scalars = st.sampled_from([*TEXTS, *NUMBERS, True, False, None, 10**30])
rows = st.builds(
    Row,
    st.dictionaries(st.sampled_from(NAMES), scalars, max_size=6),
    st.sampled_from(["", "x", "y"]),
    st.integers(0, 3),
    st.just(1_000),
    st.sampled_from([0, 1, 7]),
)


@examples(100)
@given(trees, st.lists(rows, min_size=1, max_size=4))
def test_a_filter_says_what_the_tables_say(tree: Predicate, messages: list[Row]) -> None:
    # The tree is random and not in normal form: printing and parsing must not change its meaning.
    one = parse(canonical(tree))
    for row in messages:
        assert one.evaluate(row) is truth_of(tree, row)
        assert one.matches(row) is (truth_of(tree, row) is True)


@examples(100)
@given(trees)
def test_the_canonical_text_parses_to_the_same_tree(tree: Predicate) -> None:
    one = parse(canonical(tree))
    again = parse(one.text)
    assert again.tree == one.tree
    assert again.text == one.text


@examples(60)
@given(
    st.lists(trees, min_size=1, max_size=8),
    st.lists(rows, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 9), st.none() | trees), max_size=6),
)
def test_the_matcher_finds_what_evaluating_every_filter_finds(
    start: list[Predicate], messages: list[Row], changes: list[tuple[int, Predicate | None]]
) -> None:
    expected = dict(enumerate(start))
    matcher = Matcher({key: parse(canonical(tree)) for key, tree in expected.items()})
    for key, tree in [(0, start[0]), *changes]:
        if tree is not None:
            expected[key] = tree
            matcher.put(key, parse(canonical(tree)))
        elif key in expected:
            del expected[key]
            matcher.remove(key)
        assert matcher.match(messages) == [
            sorted(key for key, tree in expected.items() if truth_of(tree, row) is True)
            for row in messages
        ]


WORDS = """
    a b "c.d" 'x' 1 2.5 TRUE FALSE NULL AND OR NOT IN BETWEEN LIKE ESCAPE IS ( ( ) ) , = <> < > <=
    >= != + - - * / '!' '%x' SELECT CASE END -- ; . 'open ? :p 1x
"""
words = st.sampled_from(WORDS.split())


@examples(250)
@given(st.lists(words, max_size=14).map(" ".join) | st.text(max_size=40))
@example("a IN (1)(2)")
@example("a IN ((1), (b)) IN (TRUE)")
@example("* = *")
@example("a * * b")
@example("NOT")
@example("a NOT")
@example("a NOT NULL")
@example("a IS NOT")
@example("a LIKE 'x' ESCAPE")
@example("a BETWEEN 1 AND")
@example("IN (1)")
@example("a IN (")
def test_any_text_parses_or_is_refused(text: str) -> None:
    refused: InvalidFilter | None = None
    try:
        one = parse(text)
    except InvalidFilter as error:
        refused = error
    if refused is None:
        assert parse(one.text).tree == one.tree
    else:
        assert 1 <= refused.line <= text.count("\n") + 1
        assert refused.column >= 1
        assert refused.fragment in text
