"""What is refused, where the error points, and what it says."""

import pytest

from penstock.errors import InvalidFilter, InvalidInput
from penstock.filters import parse

REFUSED = [
    # (filter, line, column, fragment, a part of the message)
    ("", 1, 1, "", "empty"),
    ("  \n ", 1, 1, "", "empty"),
    ("a = 1 AND", 1, 7, "AND", "something is missing after"),
    ("a =", 1, 3, "=", "something is missing after"),
    ("a b", 1, 3, "b", "can't stand here"),
    ("ESCAPE", 1, 1, "ESCAPE", "something is missing after"),
    ("ESCAPE = 1", 1, 1, "ESCAPE", "can't stand here"),
    ("a = 1 b = 2", 1, 7, "b", "can't stand here"),
    ("a = 1\n  AND\n  OR b = 2", 3, 3, "OR", "can't stand here"),
    ("a\n=\n1 1", 3, 3, "1", "can't stand here"),
    ("(a = 1", 1, 1, "(", "never closed"),
    ("a = 1)", 1, 6, ")", "closes nothing"),
    ("a = (1 AND", 1, 5, "(", "never closed"),
    ("()", 1, 1, "()", "nothing between"),
    ("a = 'x", 1, 5, "'", "string is not closed"),
    ("a = 'it''s", 1, 5, "'", "string is not closed"),
    ('"a = 1', 1, 1, '"', "name is not closed"),
    ('"" = 1', 1, 1, '""', "a name has 1 to"),
    ("a.b = 1", 1, 2, ".", "double quotes"),
    ("`a` = 1", 1, 1, "`", "double quotes"),
    ("[a] = 1", 1, 1, "[", "double quotes"),
    ("a == 1", 1, 3, "==", "the comparisons are"),
    ("a <=> 1", 1, 5, ">", "can't stand here"),
    ("a & 1", 1, 3, "&", "allowed are"),
    ("a || 'x' = 'y'", 1, 3, "|", "allowed are"),
    ("a % 2 = 0", 1, 3, "%", "allowed are"),
    ("a = 1; DROP TABLE t", 1, 6, ";", "not a statement"),
    ("SELECT 1", 1, 8, "1", "can't stand here"),
    ("a IN (SELECT b FROM c)", 1, 14, "b", "can't stand here"),
    ("EXISTS (SELECT 1)", 1, 1, "EXISTS (", "functions"),
    ("lower(a) = 'x'", 1, 1, "lower(", "functions"),
    ("CAST(a AS INT) = 1", 1, 1, "CAST(", "functions"),
    ("a::int = 1", 1, 2, ":", "parameters"),
    ("a = ?", 1, 5, "?", "parameters"),
    ("a = :name", 1, 5, ":", "parameters"),
    ("a = @x", 1, 5, "@", "parameters"),
    ("a = $1", 1, 5, "$", "parameters"),
    ("a = 1 -- why", 1, 7, "--", "comments"),
    ("a /* b */ = 1", 1, 3, "/*", "comments"),
    ("# a\na = 1", 1, 1, "#", "comments"),
    ("a = NULL", 1, 5, "NULL", "IS NULL"),
    ("a IN (1, NULL)", 1, 10, "NULL", "IS NULL"),
    ("a IS TRUE", 1, 3, "IS TRUE", "NOT NULL"),
    ("a IS NOT 1", 1, 3, "IS NOT", "NOT NULL"),
    ("a IN ()", 1, 1, "a", "1 to 1000 items"),
    ("a IN 5", 1, 1, "a IN 5", "not part of the filter language"),
    ("a IN (b)", 1, 7, "b", "holds only"),
    ("a IN (1 + 1)", 1, 7, "1 + 1", "holds only"),
    ("a IN (b = 1)", 1, 7, "b = 1", "condition where a value"),
    ("a LIKE b", 1, 8, "b", "take a string"),
    ("a LIKE 5", 1, 8, "5", "take a string"),
    ("a LIKE 'x' ESCAPE 'yz'", 1, 19, "'yz'", "one character"),
    ("a LIKE 'x' ESCAPE ''", 1, 19, "''", "one character"),
    ("a LIKE 'x' ESCAPE b", 1, 19, "b", "take a string"),
    ("a LIKE 'x!y' ESCAPE '!'", 1, 8, "'x!y'", "must stand before"),
    ("a LIKE 'x!' ESCAPE '!'", 1, 8, "'x!'", "must stand before"),
    ("a = 1 = 2", 1, 1, "a = 1", "condition where a value"),
    ("(a = 1) + 1 = 2", 1, 1, "(a = 1)", "condition where a value"),
    ("(a = 1) IS NULL", 1, 1, "(a = 1)", "condition where a value"),
    ("a + 1", 1, 1, "a + 1", "value where a condition"),
    ("b AND 1", 1, 7, "1", "value where a condition"),
    ("NOT 'x'", 1, 5, "'x'", "value where a condition"),
    ("(a, b) = 1", 1, 3, ",", "can't stand here"),
    ("a = +1", 1, 5, "+", "plus sign"),
    ("a BETWEEN 1", 1, 11, "1", "can't stand here"),
    ("1abc = 2", 1, 1, "1a", "a number is written"),
    ("1.2.3 = a", 1, 1, "1.2.", "a number is written"),
    ("0x1F = a", 1, 1, "0x", "a number is written"),
    ("a = 1e999", 1, 5, "1e999", "1.8e308"),
    ("a = 9223372036854775808", 1, 5, "9223372036854775808", "64 bits"),
    ("a = -9223372036854775809", 1, 6, "9223372036854775809", "64 bits"),
    ("a = 'x\0y'", 1, 7, "\0", "NUL"),
    ("a = '\ud800'", 1, 6, "\ud800", "surrogates"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "column", "fragment", "message"), REFUSED)
def test_refused(text: str, line: int, column: int, fragment: str, message: str) -> None:
    with pytest.raises(InvalidFilter) as caught:
        parse(text)
    error = caught.value
    assert (error.line, error.column, error.fragment) == (line, column, fragment)
    assert message in str(error)
    assert str(error).startswith(f"line {line}, column {column}")


def test_the_message_shows_only_the_start_of_a_long_fragment() -> None:
    with pytest.raises(InvalidFilter) as caught:
        parse("a = '" + "x" * 2_000 + "'")
    assert len(caught.value.fragment) == 2_002
    assert len(str(caught.value)) < 200


def test_it_is_an_invalid_input() -> None:
    with pytest.raises(InvalidInput):
        parse("nonsense nonsense")
