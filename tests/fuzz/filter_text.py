"""The filter language: a text is a filter, which prints as itself and can be asked, or refused."""

from __future__ import annotations

from penstock import filters
from penstock.errors import InvalidFilter
from penstock.filters import Row

__all__ = ["SEEDS", "one"]

SEEDS = tuple(
    text.encode()
    for text in (
        "queue = 'orders' AND amount >= 10.5",
        "NOT (a IN (1, 'x', TRUE) OR b IS NOT NULL)",
        "name LIKE 'a%b_c\\%' ESCAPE '\\' AND n BETWEEN -1 AND 2e3",
        "a + 2 * -b <> c / 3",
        "\"quoted name\" = 'it''s' -- comment",
        "flag AND NOT other",
        "((((a))))",
    )
)
_ROWS = (
    Row({}),
    Row({"queue": "orders", "a": 1, "b": 2.5, "n": -1, "name": "a%b", "flag": True, "c": "x"}),
    Row({"a": "1", "b": False, "amount": 2**63 - 1, "other": True}, "g", 5, 1_767_225_600_000, 9),
)


def one(data: bytes) -> None:
    """Read a filter, print it, read that, and ask both."""
    text = data.decode("utf-8", "replace")
    try:
        found = filters.parse(text)
    except InvalidFilter:
        return
    again = filters.parse(found.text)
    assert again.text == found.text
    for row in _ROWS:
        assert again.matches(row) is found.matches(row) is (found.evaluate(row) is True)
