"""The matcher: order, filing, updates. That it is right at all is in test_properties."""

from typing import Any

import pytest

from penstock.filters import Filter, Matcher, Row, default_filter, parse


def matcher(**filters: str) -> Matcher[str]:
    return Matcher({key: parse(text) for key, text in filters.items()})


def held_against(found: Matcher[str], row: Row) -> set[str]:
    """Return the keys whose filter the row is held against."""
    tested: set[str] = set()

    def spy(slot: Any) -> Any:
        return slot and ((None, lambda _row: tested.update(key for key, _ in slot)),)

    found._always = spy(found._always)
    for shelves in (found._shelves, found._fields):
        for shelf in shelves.values():
            for value in shelf:
                shelf[value] = spy(shelf[value])
    found.match([row])
    return tested


def test_keys_come_in_their_order() -> None:
    found = matcher(z="a = 1", y="TRUE", x="b = 2 OR a = 1", w="priority = 0", v="a > 0")
    assert found.match([Row({"a": 1, "b": 2}), Row({"b": 2}), Row({})]) == [
        ["v", "w", "x", "y", "z"],
        ["w", "x", "y"],
        ["w", "y"],
    ]


def test_no_filters_and_no_rows() -> None:
    assert Matcher().match([Row({"a": 1})]) == [[]]
    assert matcher(a="TRUE").match([]) == []


def test_a_filter_filed_twice_is_found_once() -> None:
    found = matcher(a="x = 1 OR y = 1 OR group = 'g'")
    assert found.match([Row({"x": 1, "y": 1}, group="g")]) == [["a"]]


def test_true_and_one_are_different_keys() -> None:
    found = matcher(one="a = 1", true="a = TRUE", flag="a", items="a IN (1, TRUE)", text="a = '1'")
    rows = [Row({"a": 1}), Row({"a": True}), Row({"a": 1.0}), Row({"a": "1"}), Row({"a": False})]
    assert found.match(rows) == [
        ["items", "one"],
        ["flag", "items", "true"],
        ["items", "one"],
        ["text"],
        [],
    ]


def test_finding_one_term_of_a_branch_does_not_prove_the_branch() -> None:
    found = matcher(key="a = 'x' AND b > 2 OR b = 'y' AND c = 'z'")
    rows = [Row({"a": "x", "b": 1}), Row({"a": "x", "b": 3}), Row({"b": "y"})]
    assert found.match([*rows, Row({"b": "y", "c": "z"})]) == [[], ["key"], [], ["key"]]


def test_a_message_is_held_only_against_filters_that_share_a_value() -> None:
    texts = {f"q{n}": f"kind = 'k{n}' AND price > {n}" for n in range(100)}
    row = Row({"kind": "k7", "price": 50})
    assert held_against(matcher(**texts), row) == {"q7"}


@pytest.mark.parametrize(
    ("text", "filed"),
    [
        ("a = 1 AND b > 2", True),
        ("1 = a", True),
        ("a IN (1, 2) AND NOT c", True),
        ("(a = 1 OR b = 2) AND c > 1", True),
        ("a = 1 AND b > 2 OR b = 2 AND a > 0", True),
        ("flag", True),
        ("priority = 3", True),
        ("a > 1", False),
        ("NOT a = 1", False),
        ("a = 1 OR b > 1", False),
        ("a = b", False),
        ("a + 1 = 2", False),
        ("TRUE", False),
    ],
)
def test_which_filters_can_be_filed(text: str, filed: bool) -> None:
    assert held_against(matcher(key=text), Row({"other": 1})) == (set() if filed else {"key"})


def test_a_common_value_does_not_collect_every_filter() -> None:
    texts = {f"q{n}": f"kind = 'book' AND shop = {n}" for n in range(50)}
    assert len(held_against(matcher(**texts), Row({"kind": "book", "shop": 7}))) <= 2


def test_filters_are_put_replaced_and_removed() -> None:
    found = matcher(a="x = 1", b="y > 1", c="x = 1 AND y = 2")
    rows = [Row({"x": 1, "y": 2})]
    assert found.match(rows) == [["a", "b", "c"]]
    found.put("d", parse("x IN (1, 5)"))
    assert found.match(rows) == [["a", "b", "c", "d"]]
    found.put("a", parse("y = 2"))
    assert found.match(rows) == [["a", "b", "c", "d"]]
    found.remove("a")
    found.remove("b")
    assert found.match(rows) == [["c", "d"]]
    with pytest.raises(KeyError):
        found.remove("a")


def test_a_matcher_emptied_again_holds_nothing() -> None:
    found = matcher(a="x = 1 OR group = 'g'", b="TRUE")
    found.remove("a")
    found.remove("b")
    assert (found._shelves, found._fields, found._always) == ({}, {}, ())


def test_filters_are_equal_by_meaning_of_their_text() -> None:
    assert parse("a=1 and (b=2)") == parse("a = 1 AND b = 2")
    assert len({parse("a=1"), parse("(a)=1"), parse("a = TRUE")}) == 2
    assert parse("a=1") != "a = 1"
    assert repr(parse("a=1")) == "parse('a = 1')"
    assert isinstance(eval(repr(parse("a='x'")), {"parse": parse}), Filter)


@pytest.mark.parametrize("name", ["orders", "it's", "a b", "größe", "", "x" * 80, "a\nb", "a-b.c"])
def test_default_filter(name: str) -> None:
    one = parse(default_filter(name))
    assert one.names == {"queue"}
    assert one.matches(Row({"queue": name}))
    assert not one.matches(Row({"queue": name + "x"}))
    assert not one.matches(Row({}))
    assert one.text == default_filter(name)
    assert one == parse(f"({default_filter(name)})")
