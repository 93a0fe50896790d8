"""Filters written to hurt: every one is answered at once, by a filter or by InvalidFilter."""

from time import thread_time

import pytest

from penstock import limits
from penstock.errors import InvalidFilter
from penstock.filters import Row, parse
from penstock.filters.evaluate import compile_like
from penstock.filters.tree import And, Or

REFUSED = {
    "100k parentheses": "(" * 100_000 + "a = 1" + ")" * 100_000,
    "parentheses up to the text's bound": "(" * 8_000 + "a = 1" + ")" * 8_000,
    "open parentheses": "(" * 16_000,
    "closed parentheses": ")" * 16_000,
    "one parenthesis too many": "(" * 65 + "a = 1" + ")" * 65,
    "NOTs before a value": "NOT " * 4_000 + "1",
    "minus signs before a string": "a = " + "- " * 8_000 + "'x' OR",
    "NOTs and minus signs": "NOT - " * 2_500 + "a",
    "minus signs and NOTs": "- NOT " * 2_500 + "a",
    "10k terms": " AND ".join(["a = 1"] * 10_000),
    "too many operands": "a IN (" + ",".join("1" for _ in range(5_000)) + ")",
    "too long an IN list": "a IN (" + ",".join(["1"] * 1_001) + ")",
    "nested IN lists": "a IN (" * 2_000 + "1" + ")" * 2_000,
    "a long sum": "a" + " + 1" * 2_000 + " = 1",
    "a long chain of comparisons": "a" + " = 1" * 2_000,
    "a long chain of IS NULL": "a" + " IS NULL" * 1_500,
    "a long chain of LIKE": "a" + " LIKE 'x'" * 1_500,
    "a long chain of BETWEEN": "a" + " BETWEEN 1 AND 2" * 900,
    "sums in nested parentheses": "(" * 60 + "a" + " + 1 + 1)" * 60 + " = 1",
    "a long string": "a = '" + "x" * 1_025 + "'",
    "a long number": "a = " + "1" * 10_000,
    "a long float": "a = 0." + "1" * 10_000,
    "a long name": "a" * 257 + " = 1",
    "a long quoted name": '"' + "é" * 129 + '" = 1',
    "quotes": "'" * 16_383,
    "double quotes": '"' * 16_383,
    "NULs": "\0" * 16_000,
    "nested CASE": "CASE WHEN " * 1_500,
    "operators only": "= < > " * 2_500,
    "commas": "a IN (" + "," * 16_000 + ")",
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_refused_at_once(text: str) -> None:
    start = thread_time()
    with pytest.raises(InvalidFilter):
        parse(text)
    assert thread_time() - start < 20


@pytest.mark.parametrize(("word", "kind"), [("AND", And), ("OR", Or)])
def test_a_long_chain_is_one_flat_node(word: str, kind: type[And | Or]) -> None:
    terms = 1_000
    parsed = parse(f" {word} ".join(f"a{n} = 1" for n in range(terms)))
    assert isinstance(parsed.tree, kind)
    assert len(parsed.tree.terms) == terms
    row = Row({f"a{n}": 1 for n in range(terms)})
    assert parsed.matches(row)


def test_the_deepest_filter_allowed_works_from_a_deep_stack() -> None:
    text = "(" * limits.MAX_FILTER_DEPTH + "a = 1" + ")" * limits.MAX_FILTER_DEPTH
    nested = "NOT (b = 1 OR " * 31 + "a = 1" + ")" * 31

    def deeper(levels: int) -> bool:
        if levels:
            return deeper(levels - 1)
        return parse(text).matches(Row({"a": 1})) and not parse(nested).matches(Row({"a": 1}))

    assert deeper(500)


def test_the_canonical_text_keeps_to_the_bound_too() -> None:
    assert parse("AND".join(["(a)=(1)"] * 10)).text == " AND ".join(["a = 1"] * 10)
    grown = "OR ".join(["é<'a'"] * 1_300)
    assert len(grown) < limits.MAX_FILTER_CHARS
    with pytest.raises(InvalidFilter, match="written out in full"):
        parse(grown)


LIKE_PATTERNS = ["%a" * 400 + "b", "%" * 1_000 + "b", "%a_" * 300 + "b", "%" + "a_" * 500 + "b%"]


@pytest.mark.parametrize("pattern", LIKE_PATTERNS, ids=["%a%a", "%%%", "%a_", "a_a_b"])
def test_like_does_not_backtrack(pattern: str) -> None:
    value = "a" * 60_000
    start = thread_time()
    assert not compile_like(pattern)(value)
    assert thread_time() - start < 20


def test_conditions_in_each_other_without_parentheses() -> None:
    with pytest.raises(InvalidFilter, match="can't stand here"):
        parse("a = NOT " * 1_000 + "b")


def test_too_many_parts_are_refused_before_all_are_read() -> None:
    with pytest.raises(InvalidFilter, match="more than 4096 parts") as refused:
        parse(" OR ".join(["a=1"] * 2_000) + " this is not looked at (")
    # The sign between the second and the third part of a term.
    assert refused.value.column == 7 * (limits.MAX_FILTER_NODES // 3) + 2
    # An escape is no part of its own.
    assert parse(" OR ".join(["a LIKE 'b' ESCAPE 'c'"] * 100 + ["a=1"] * 1_290)).names
