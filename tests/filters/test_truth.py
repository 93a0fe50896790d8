"""Three-valued logic, as the tables of the SQL standard have it."""

import pytest

from penstock.filters import Row, parse

T, F, U = True, False, None

# t, f and u are attributes; u is missing, and a missing attribute is unknown as a condition.
ROW = Row({"t": True, "f": False, "one": 1, "two": 2, "three": 3, "word": "book", "nil": None})
NAME = {T: "t", F: "f", U: "u"}


def evaluate(text: str) -> bool | None:
    return parse(text).evaluate(ROW)


AND = [
    (T, T, T),
    (T, F, F),
    (T, U, U),
    (F, T, F),
    (F, F, F),
    (F, U, F),
    (U, T, U),
    (U, F, F),
    (U, U, U),
]
OR = [
    (T, T, T),
    (T, F, T),
    (T, U, T),
    (F, T, T),
    (F, F, F),
    (F, U, U),
    (U, T, T),
    (U, F, U),
    (U, U, U),
]
NOT = [(T, F), (F, T), (U, U)]


@pytest.mark.parametrize(("left", "right", "result"), AND)
def test_and(left: bool | None, right: bool | None, result: bool | None) -> None:
    assert evaluate(f"{NAME[left]} AND {NAME[right]}") is result


@pytest.mark.parametrize(("left", "right", "result"), OR)
def test_or(left: bool | None, right: bool | None, result: bool | None) -> None:
    assert evaluate(f"{NAME[left]} OR {NAME[right]}") is result


@pytest.mark.parametrize(("operand", "result"), NOT)
def test_not(operand: bool | None, result: bool | None) -> None:
    assert evaluate(f"NOT {NAME[operand]}") is result
    assert evaluate(f"NOT NOT {NAME[operand]}") is operand


COMPARE = [
    ("one = 1", T), ("one = 2", F), ("u = 1", U), ("u = u", U), ("nil = nil", U),
    ("one <> 1", F), ("one <> 2", T), ("u <> 1", U), ("one != 2", T),
    ("one < 1", F), ("one < 2", T), ("u < 1", U), ("1 < one", F), ("0 < one", T), ("1 < u", U),
    ("one <= 1", T), ("one <= 0", F), ("u <= 1", U), ("1 <= one", T), ("2 <= one", F),
    ("one > 1", F), ("one > 0", T), ("u > 1", U), ("1 > one", F), ("2 > one", T),
    ("one >= 1", T), ("one >= 2", F), ("u >= 1", U), ("1 >= one", T), ("0 >= one", F),
    ("one < two", T), ("two < one", F), ("one < u", U), ("word = word", T), ("t <> f", T),
]  # fmt: skip

IS_NULL = [
    ("one IS NULL", F), ("u IS NULL", T), ("nil IS NULL", T), ("f IS NULL", F), ("'' IS NULL", F),
    ("one IS NOT NULL", T), ("u IS NOT NULL", F), ("nil IS NOT NULL", F),
    ("one + u IS NULL", T), ("one + two IS NULL", F), ("NOT u IS NULL", F),
]  # fmt: skip

IN = [
    ("one IN (1)", T), ("one IN (2, 1)", T), ("one IN (2, 3)", F), ("u IN (1, 2)", U),
    ("one NOT IN (1)", F), ("one NOT IN (2, 3)", T), ("u NOT IN (1, 2)", U),
    ("NOT one IN (2)", T), ("word IN ('map', 'book')", T), ("word IN ('map')", F),
    # With an item of another type in the list, "not found" can't be told: = is unknown with it.
    ("word IN ('book', 1)", T), ("word IN ('map', 1)", U), ("word NOT IN ('map', 1)", U),
    ("word NOT IN ('book', 1)", F), ("one IN ('1')", U), ("one NOT IN ('1')", U),
    ("one IN (1, 'x')", T), ("one IN (2, TRUE)", U), ("t IN (TRUE)", T), ("t IN (FALSE)", F),
    ("t IN (1)", U), ("t IN (FALSE, 1)", U), ("one + 1 IN (2.0)", T), ("one IN (-1)", F),
]  # fmt: skip

BETWEEN = [
    ("two BETWEEN 1 AND 3", T), ("two BETWEEN 2 AND 2", T), ("two BETWEEN 3 AND 1", F),
    ("two BETWEEN 3 AND 4", F), ("two BETWEEN 0 AND 1", F), ("u BETWEEN 1 AND 2", U),
    ("two BETWEEN u AND 3", U), ("two BETWEEN 1 AND u", U),
    # One bound alone can settle it.
    ("two BETWEEN u AND 1", F), ("two BETWEEN 3 AND u", F),
    ("two NOT BETWEEN 1 AND 3", F), ("two NOT BETWEEN 3 AND 4", T), ("u NOT BETWEEN 1 AND 2", U),
    ("two NOT BETWEEN u AND 1", T), ("two NOT BETWEEN u AND 3", U),
    ("one + one BETWEEN one AND three", T), ("word BETWEEN 'a' AND 'z'", U),
]  # fmt: skip

LIKE = [
    ("word LIKE 'book'", T), ("word LIKE 'boo'", F), ("word LIKE 'b%'", T), ("word LIKE '%k'", T),
    ("word LIKE '%oo%'", T), ("word LIKE 'b__k'", T), ("word LIKE 'b_k'", F), ("word LIKE '%'", T),
    ("word LIKE ''", F), ("word LIKE 'B%'", F), ("u LIKE '%'", U), ("one LIKE '%'", U),
    ("word NOT LIKE 'b%'", F), ("word NOT LIKE 'm%'", T), ("u NOT LIKE '%'", U),
    ("word LIKE 'b!%' ESCAPE '!'", F), ("word NOT LIKE 'b!%' ESCAPE '!'", T),
    ("'b%' LIKE 'b!%' ESCAPE '!'", T), ("'a_b' LIKE 'a!_b' ESCAPE '!'", T),
    ("'axb' LIKE 'a!_b' ESCAPE '!'", F), ("'a!b' LIKE 'a!!b' ESCAPE '!'", T),
]  # fmt: skip


@pytest.mark.parametrize(("text", "result"), COMPARE + IS_NULL + IN + BETWEEN + LIKE)
def test_atom(text: str, result: bool | None) -> None:
    assert evaluate(text) is result
    assert parse(text).matches(ROW) is (result is True)


PRECEDENCE = [
    # AND binds tighter than OR, NOT tighter than AND, a comparison tighter than NOT.
    ("t OR f AND f", T),
    ("(t OR f) AND f", F),
    ("NOT f AND f", F),
    ("NOT (f AND f)", T),
    ("NOT one = 2 AND t", T),
    ("two BETWEEN 1 AND 3 AND f", F),
    ("two + one * two = 4", T),
    ("(two + one) * two = 6", T),
    ("three - two - one = 0", T),
    ("three - (two - one) = 2", T),
    ("8 / two / two = 2", T),
    ("-one + two = 1", T),
    ("-(one + two) = -3", T),
    ("two - -one = 3", T),
    ("TRUE", T),
    ("FALSE OR t", T),
    ("1 = 1", T),
]


@pytest.mark.parametrize(("text", "result"), PRECEDENCE)
def test_precedence(text: str, result: bool | None) -> None:
    assert evaluate(text) is result
