"""JMS's typing rules, arithmetic, names, and the message's own fields."""

import math

import pytest

from penstock.filters import Row, Value, parse

T, F, U = True, False, None
BIG = 2**63 - 1

TYPES = [
    # (filter, value of a, result)
    ("a = 1", True, U), ("a = 0", False, U), ("a = TRUE", 1, U), ("a = FALSE", 0, U),
    ("a <> 1", True, U), ("a IN (1, 0)", True, U), ("a IN (TRUE)", 1, U),
    ("a BETWEEN 0 AND 2", True, U),
    ("a = '1'", 1, U), ("a = 1", "1", U), ("a <> '1'", 1, U), ("a <> 'TRUE'", True, U),
    ("a = TRUE", True, T), ("a = TRUE", False, F), ("a <> TRUE", False, T),
    ("a < TRUE", False, U), ("a >= TRUE", True, U),
    ("a < 'b'", "a", U), ("a <= 'a'", "a", U), ("a > 'a'", "b", U), ("'a' < a", "b", U),
    ("a = 1", 1.0, T), ("a = 1.0", 1, T), ("a < 1.5", 1, T), ("a IN (1.0)", 1, T),
    ("a = 9007199254740993", 9007199254740992.0, F), ("a = 9007199254740993", 2**53 + 1, T),
    ("a", True, T), ("a", False, F), ("a", 1, U), ("a", "TRUE", U), ("NOT a", 1, U),
    ("a = b", 1, U), ("a = a", "x", T), ("a = a", True, T), ("a < a", "x", U), ("a = a", 1, T),
    ("a IS NULL", math.nan, T), ("a IS NULL", math.inf, T), ("a = a", math.nan, U),
    ("a <> 1", math.nan, U), ("a > 1", math.inf, U), ("NOT a < 1", -math.inf, U),
    ("a IN (1, 2)", math.nan, U), ("a NOT IN (1, 2)", math.inf, U), ("a = 1.5", 10**400, F),
    ("a > 1", 10**400, T),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value", "result"), TYPES)
def test_types(text: str, value: Value, result: bool | None) -> None:
    assert parse(text).evaluate(Row({"a": value})) is result


ARITHMETIC = [
    ("a + 1 = 3", 2, T), ("a - 1 = 1", 2, T), ("a * 3 = 6", 2, T), ("a / 4 = 0.5", 2, T),
    ("7 / a = 3.5", 2, T), ("-a = -2", 2, T), ("- - a = 2", 2, T),
    ("a / 0 IS NULL", 2, T), ("a / 0.0 IS NULL", 2, T), ("1 / a = 1", 0, U),
    ("1 / a IS NULL", -0.0, T),
    ("a + 1 = 2", True, U), ("a + 1 IS NULL", True, T), ("a + 1 IS NULL", "1", T),
    ("-a IS NULL", "x", T), ("-a IS NULL", True, T), ("a + 'x' IS NULL", "x", T),
    ("a * TRUE IS NULL", 1, T), ("a + 1 IS NULL", None, T),
    ("a + 1 IS NULL", BIG, T), ("a - 1 IS NULL", -BIG - 1, T), ("a * a IS NULL", BIG, T),
    ("-a IS NULL", -BIG - 1, T), ("a + 0 IS NULL", 2**63, T), ("a + 0 IS NULL", 10**400, T),
    ("a * 1e308 IS NULL", 10, T), ("a * 1.5 IS NULL", 10**400, T), ("a * 0 IS NULL", math.inf, T),
    ("a - a IS NULL", math.nan, T), ("a - a IS NULL", 2**63, T), ("a - a IS NULL", 10**400, T),
    ("a + 0 = 9223372036854775807", BIG, T),
    ("a = -9223372036854775808", -BIG - 1, T),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value", "result"), ARITHMETIC)
def test_arithmetic(text: str, value: Value, result: bool | None) -> None:
    assert parse(text).evaluate(Row({"a": value})) is result


def test_fields_read_the_message_and_not_its_attributes() -> None:
    hidden: dict[str, Value] = {
        "group": "no",
        "priority": 9,
        "published_at": 9,
        "size": 9,
        "queue": "q",
    }
    row = Row(hidden, group="g", priority=3, published_at_ms=1_000, size=42)
    text = "group = 'g' AND priority = 3 AND published_at = 1000 AND size = 42 AND queue = 'q'"
    assert parse(text).matches(row)
    assert parse("\"group\" = 'g'").matches(row)
    assert parse("size BETWEEN 40 AND 50 AND group LIKE '_' AND priority IN (3)").matches(row)
    assert parse(text).names == {"group", "priority", "published_at", "size", "queue"}


def test_a_row_may_be_a_plain_tuple() -> None:
    assert parse("a = 1 AND size > 1").matches(({"a": 1}, "", 0, 0, 2))


def test_names_are_case_sensitive_and_keywords_are_not() -> None:
    row = Row({"Kind": "book", "kind": "map"})
    assert parse("Kind = 'book' and kind = 'map' and not (KIND is not null)").matches(row)


def test_quoted_names() -> None:
    row = Row({"order.kind": 1, "sale-code": 2, 'a"b': 3, "and": 4, "größe": 5, " ": 6})
    text = """"order.kind" = 1 AND "sale-code" = 2 AND "a""b" = 3 AND "and" = 4 AND " " = 6"""
    assert parse(text).matches(row)
    assert parse("größe = 5").matches(row)


@pytest.mark.parametrize("word", ["select", "case", "end", "date", "order", "show", "table", "x"])
def test_words_that_only_sql_reserves_are_names(word: str) -> None:
    assert parse(f"{word} = 1 AND {word} < 2").matches(Row({word: 1}))


def test_a_quote_in_a_string_is_written_twice() -> None:
    assert parse("a = 'it''s'").matches(Row({"a": "it's"}))
    assert parse("a = 'two\nlines -- ; /* \\'").matches(Row({"a": "two\nlines -- ; /* \\"}))


@pytest.mark.parametrize("text", ["1", "1.", ".5", "0.5", "1e3", "1.5E-3", "00012", "1e+2"])
def test_numbers(text: str) -> None:
    assert parse(f"a = {text}").matches(Row({"a": float(text)}))
