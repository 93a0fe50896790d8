"""One spelling for every tree."""

import pytest

from penstock.filters import parse

SPELLINGS = [
    ("a=1", "a = 1"),
    ("a!=1", "a <> 1"),
    ("( ( a ) = ( 1 ) )", "a = 1"),
    ("a and b or c", "a AND b OR c"),
    ("a AND (b OR c)", "a AND (b OR c)"),
    ("(a AND b) AND (c AND d)", "a AND b AND c AND d"),
    ("(a OR b) OR (c OR d)", "a OR b OR c OR d"),
    ("not (a and b)", "NOT (a AND b)"),
    ("not a = 1", "NOT a = 1"),
    ("NOT NOT a", "a"),
    ("NOT " * 9 + "a", "NOT a"),
    ("NOT " * 4_000 + "a", "a"),
    ("NOT " * 10 + "a IS NOT NULL", "a IS NOT NULL"),
    ("NOT " * 9 + "- " * 9 + "a = 1", "NOT -a = 1"),
    ("- " * 9 + "a = 1", "-a = 1"),
    ("a = " + "- " * 8_000 + "1", "a = 1"),
    ("a = " + "- " * 10 + "b", "a = - -b"),
    ("a " + "- " * 10 + "b = 0", "a - -b = 0"),
    ("a " + "- " * 9 + "b = 0", "a - - -b = 0"),
    ("NOT (NOT (NOT a))", "NOT a"),
    ("NOT a IN (1)", "a NOT IN (1)"),
    ("NOT a NOT IN (1)", "a IN (1)"),
    ("NOT a BETWEEN 1 AND 2", "a NOT BETWEEN 1 AND 2"),
    ("NOT a LIKE 'x' ESCAPE '!'", "a NOT LIKE 'x' ESCAPE '!'"),
    ("NOT a IS NULL", "a IS NOT NULL"),
    ("NOT a IS NOT NULL", "a IS NULL"),
    ("a-(b-c)=0", "a - (b - c) = 0"),
    ("(a-b)-c=0", "a - b - c = 0"),
    ("a/(b*c)=0", "a / (b * c) = 0"),
    ("a*(b/c)=0", "a * (b / c) = 0"),
    ("a*(b+c)=0", "a * (b + c) = 0"),
    ("(a*b)+c=0", "a * b + c = 0"),
    ("-(a+b)=0", "-(a + b) = 0"),
    ("(-a)+b=0", "-a + b = 0"),
    ("- -a=0", "- -a = 0"),
    ("-(-(-a))=0", "-a = 0"),
    ("-(-(-(-a)))=0", "- -a = 0"),
    ("a = - 5", "a = -5"),
    ("a = - - 5", "a = 5"),
    ("a - -5 = 0", "a - -5 = 0"),
    ("a=1.50", "a = 1.5"),
    ("a=1e2", "a = 100.0"),
    ("a=007", "a = 7"),
    ('"a"=1', "a = 1"),
    ('"a.b"=1', '"a.b" = 1'),
    ('"AND"=1', '"AND" = 1'),
    ('"null"=1', '"null" = 1'),
    ('"1a"=1', '"1a" = 1'),
    ("größe=1", '"größe" = 1'),
    ("a='it''s'", "a = 'it''s'"),
    ("a in('x',true,-1)", "a IN ('x', TRUE, -1)"),
    ("a IN ((1), ('x'))", "a IN (1, 'x')"),
    ("a BETWEEN (1) AND b+1 AND c", "a BETWEEN 1 AND b + 1 AND c"),
    ("true", "TRUE"),
    ("(((a)))", "a"),
]


@pytest.mark.parametrize(("text", "canonical"), SPELLINGS)
def test_canonical(text: str, canonical: str) -> None:
    assert parse(text).text == canonical
    assert parse(canonical).text == canonical
    assert parse(canonical) == parse(text)


@pytest.mark.parametrize("sign", ["-", "NOT "])
def test_a_tower_of_signs_still_parses_when_written_out(sign: str) -> None:
    tower = f"{sign}(" * 41 + "a" + ")" * 41
    one = parse(f"{tower} = 1" if sign == "-" else tower)
    assert parse(one.text) == one
