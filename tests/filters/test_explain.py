"""Explanations: every condition with its result and what it read."""

from penstock.filters import Explanation, Row, explain, parse


def test_explain_goes_down_to_the_atoms() -> None:
    text = "kind = 'book' AND (price * 2 > 30 OR stock NOT IN (0, 1)) AND flag"
    found = explain(parse(text), Row({"kind": "book", "price": 12, "stock": 1}))
    assert found == Explanation(
        text,
        False,
        parts=(
            Explanation("kind = 'book'", True, values=(("kind", "book"),)),
            Explanation(
                "price * 2 > 30 OR stock NOT IN (0, 1)",
                False,
                parts=(
                    Explanation("price * 2 > 30", False, values=(("price * 2", 24),)),
                    Explanation(
                        "stock NOT IN (0, 1)",
                        False,
                        parts=(Explanation("stock IN (0, 1)", True, values=(("stock", 1),)),),
                    ),
                ),
            ),
            Explanation("flag", None, values=(("flag", None),)),
        ),
    )


def test_an_atom_lists_all_it_read_and_no_literals() -> None:
    found = explain(parse("size BETWEEN low AND 10"), Row({"low": "x"}, size=5))
    assert found == Explanation("size BETWEEN low AND 10", None, values=(("size", 5), ("low", "x")))
    assert explain(parse("TRUE"), Row({})) == Explanation("TRUE", True)
