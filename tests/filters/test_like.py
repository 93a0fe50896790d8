"""LIKE against a regular expression that says the same."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.filters.evaluate import PatternError, compile_like


def oracle(pattern: str, text: str) -> bool:
    said = "".join(".*" if c == "%" else "." if c == "_" else re.escape(c) for c in pattern)
    return re.fullmatch(said, text, re.DOTALL) is not None


@given(st.text("ab%_", max_size=10), st.text("ab\n", max_size=14))
def test_like_is_what_the_regular_expression_says(pattern: str, text: str) -> None:
    assert compile_like(pattern)(text) == oracle(pattern, text)


@given(st.text("ab%_!", max_size=8))
def test_an_escaped_text_is_like_itself_only(text: str) -> None:
    escaped = "".join("!" + c if c in "%_!" else c for c in text)
    test = compile_like(escaped, "!")
    assert test(text)
    assert not test(text + "a")
    assert not test("a" + text)


@pytest.mark.parametrize(
    ("pattern", "text", "result"),
    [
        ("a%a", "a", False),
        ("a%a", "aa", True),
        ("ab%ba", "aba", False),
        ("%ab%bc%", "abc", False),
        ("%ab%bc%", "abbc", True),
        ("_%_", "a", False),
        ("_%_", "ab", True),
        ("%__%", "a", False),
        ("%a_c%c", "abcc", True),
        ("%a_c%c", "abc", False),
        ("_", "\U0001f600", True),
        ("a%", "a\nb", True),
    ],
)
def test_like(pattern: str, text: str, result: bool | None) -> None:
    assert compile_like(pattern)(text) is result


@pytest.mark.parametrize("pattern", ["!", "a!", "!a", "!!!"])
def test_an_escape_needs_something_to_escape(pattern: str) -> None:
    with pytest.raises(PatternError):
        compile_like(pattern, "!")


def test_the_escape_may_be_a_wildcard_itself() -> None:
    assert compile_like("%%a%_", "%")("%a_")
    assert not compile_like("%%a%_", "%")("xax")
