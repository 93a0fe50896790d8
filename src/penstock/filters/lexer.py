"""Filter text → tokens, each with its place. The bounds on text and nesting are held here.

Nothing that is not in the filter language gets past this module: the parser behind it sees only
the words, operators and literals listed in ``ALLOWED``.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple, NoReturn

from penstock.errors import InvalidFilter
from penstock.filters.tree import KEYWORDS, Attr, Node, Number, Text, Truth
from penstock.limits import (
    MAX_ATTRIBUTE_NAME_BYTES,
    MAX_FILTER_CHARS,
    MAX_FILTER_DEPTH,
    MAX_FILTER_LITERAL_CHARS,
    MAX_FILTER_NODES,
)

__all__ = ["ALLOWED", "INT_MAX", "OPERAND", "Token", "reject", "tokenize"]

ALLOWED: Final = (
    "allowed are = <> < <= > >=, AND, OR, NOT, [NOT] IN (…), [NOT] BETWEEN … AND …, "
    "[NOT] LIKE '…' [ESCAPE '…'], IS [NOT] NULL, + - * /, parentheses, attribute names, "
    "'strings', numbers, TRUE and FALSE"
)
OPERAND: Final = "operand"
INT_MAX: Final = 2**63 - 1

_FRAGMENT_CHARS: Final = 40

_TOKEN: Final = re.compile(
    r"""
    (?P<space>   [ \t\r\n\f]+ )
  | (?P<word>    [^\W\d]\w* )
  | (?P<number>  (?: [0-9]+ (?: \.[0-9]* )? | \.[0-9]+ ) (?: [eE][+-]?[0-9]+ )? )
  | (?P<string>  ' [^']*+ (?: '' [^']*+ )*+ ' )
  | (?P<name>    " [^"]*+ (?: "" [^"]*+ )*+ " )
  | (?P<comment> -- | /\* | \# )
  | (?P<sign>    <> | != | <= | >= | [=<>+\-*/(),] )
    """,
    re.VERBOSE,
)
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
_HINTS: Final = {
    "'": "this string is not closed; a quote inside a string is written twice",
    '"': "this name is not closed; a quote inside a name is written twice",
    ".": 'a name with dots is written in double quotes, as in "order.kind"',
    ";": "a filter is one condition, not a statement",
    "`": "names are quoted with double quotes",
    "[": "names are quoted with double quotes",
    "?": "a filter has no parameters",
    ":": "a filter has no parameters",
    "@": "a filter has no parameters",
    "$": "a filter has no parameters",
}


class Token(NamedTuple):
    """A word, sign or operand of a filter, and where it stands in the text."""

    kind: str  # OPERAND, a keyword in capitals, or the sign itself
    start: int
    end: int
    node: Node | None = None  # an operand's


def reject(text: str, start: int, end: int, problem: str) -> NoReturn:
    """Raise InvalidFilter for the part of the text from start to end."""
    start = min(start, len(text))
    fragment = text[start : max(end, start)]
    line = text.count("\n", 0, start) + 1
    column = start - (text.rfind("\n", 0, start) + 1) + 1
    shown = fragment if len(fragment) <= _FRAGMENT_CHARS else fragment[:_FRAGMENT_CHARS] + "…"
    near = f" near {shown!r}" if shown else ""
    message = f"line {line}, column {column}{near}: {problem}"
    raise InvalidFilter(message, line=line, column=column, fragment=fragment)


def tokenize(text: str) -> list[Token]:
    """Return the tokens of a filter that keeps to the bounds; an ``!=`` comes out as ``<>``."""
    if len(text) > MAX_FILTER_CHARS:
        problem = f"a filter has at most {MAX_FILTER_CHARS} characters; this has {len(text)}"
        reject(text, MAX_FILTER_CHARS, MAX_FILTER_CHARS + _FRAGMENT_CHARS, problem)
    if bad := _UNSTORABLE.search(text):
        reject(text, *bad.span(), "NUL and lone surrogates can't be stored; remove the character")
    tokens: list[Token] = []
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            reject(text, place, place + 1, _HINTS.get(text[place], ALLOWED))
        if found.lastgroup != "space":
            tokens.append(_token(text, found))
        place = found.end()
    if not tokens:
        reject(text, 0, 0, f"the filter is empty; TRUE takes every message; {ALLOWED}")
    tokens = _shortened(tokens)
    _check_sequence(text, tokens)
    return tokens


def _shortened(tokens: list[Token]) -> list[Token]:
    """Take pairs out of long runs of NOT or minus, so that no parser's stack grows with them.

    Two or three are left, which say the same: two that are taken out undo each other, and another
    two still see to it that what stands behind them is of the right type.
    """
    kept: list[Token] = []
    for token in tokens:
        kept.append(token)
        if token.kind in ("NOT", "-") and [each.kind for each in kept[-4:]] == [token.kind] * 4:
            del kept[-4:-2]
    return kept


def _token(text: str, found: re.Match[str]) -> Token:
    start, end = found.span()
    part = found.group()
    match found.lastgroup:
        case "word" if part.upper() in ("TRUE", "FALSE"):
            return Token(OPERAND, start, end, Truth(part.upper() == "TRUE"))
        case "word" if part.upper() in KEYWORDS:
            return Token(part.upper(), start, end)
        case "word":
            return Token(OPERAND, start, end, _attr(text, start, end, part))
        case "name":
            name = part[1:-1].replace('""', '"')
            return Token(OPERAND, start, end, _attr(text, start, end, name))
        case "number":
            return Token(OPERAND, start, end, _number(text, start, end))
        case "string":
            value = part[1:-1].replace("''", "'")
            if len(value) > MAX_FILTER_LITERAL_CHARS:
                problem = f"a string has at most {MAX_FILTER_LITERAL_CHARS} characters"
                reject(text, start, end, problem)
            return Token(OPERAND, start, end, Text(value))
        case "comment":
            reject(text, start, end, "comments are not allowed")
        case _:
            return Token("<>" if part == "!=" else part, start, end)


def _attr(text: str, start: int, end: int, name: str) -> Attr:
    if not name or len(name.encode()) > MAX_ATTRIBUTE_NAME_BYTES:
        reject(text, start, end, f"a name has 1 to {MAX_ATTRIBUTE_NAME_BYTES} bytes")
    return Attr(name)


def _number(text: str, start: int, end: int) -> Number:
    if re.compile(r"[\w.]").match(text, end):
        reject(text, start, end + 1, "a number is written 12, 1.5 or 2e3, apart from what follows")
    if end - start > MAX_FILTER_LITERAL_CHARS:
        reject(text, start, end, f"a number has at most {MAX_FILTER_LITERAL_CHARS} characters")
    digits = text[start:end]
    if digits.isdigit():
        whole = int(digits)
        # One more than the largest: the sign that makes it the smallest is not read yet.
        if whole > INT_MAX + 1:
            reject(text, start, end, "an integer has 64 bits: -9223372036854775808 to …807")
        return Number(whole)
    value = float(digits)
    if not math.isfinite(value):
        reject(text, start, end, "a number goes up to about 1.8e308")
    return Number(value)


def _check_sequence(text: str, tokens: list[Token]) -> None:
    """Hold the bounds, and refuse what a general SQL parser would take and a filter does not."""
    depth = operands = 0
    before = Token("", 0, 0)
    for index, token in enumerate(tokens):
        depth += (token.kind == "(") - (token.kind == ")")
        operands += token.kind == OPERAND
        if depth > MAX_FILTER_DEPTH:
            reject(text, token.start, token.end, f"nested more than {MAX_FILTER_DEPTH} deep")
        if depth < 0:
            reject(text, token.start, token.end, "this ')' closes nothing")
        if operands > MAX_FILTER_NODES:
            reject(text, token.start, token.end, f"more than {MAX_FILTER_NODES} operands")
        if token.kind == "(" and before.kind == OPERAND:
            reject(text, before.start, token.end, f"functions are not allowed; {ALLOWED}")
        if token.kind == "=" and before.kind in "=<>" and before.kind:
            reject(text, before.start, token.end, "the comparisons are = <> < <= > >=")
        if token.kind == "NOT" and before.kind == "-":
            reject(text, before.start, token.end, "a minus sign stands only before a number")
        if token.kind == "+" and before.kind not in (OPERAND, ")"):
            reject(text, token.start, token.end, "a plus sign stands only between two numbers")
        if before.kind == "IS" and not _is_null_at(tokens, index):
            reject(text, before.start, token.end, "IS stands only before NULL or NOT NULL")
        if token.kind == "NULL" and before.kind != "IS" and not _is_not_at(tokens, index):
            reject(text, token.start, token.end, "nothing equals NULL: write IS NULL, IS NOT NULL")
        before = token


def _is_null_at(tokens: list[Token], index: int) -> bool:
    kinds = [token.kind for token in tokens[index : index + 2]]
    return kinds[:1] == ["NULL"] or kinds == ["NOT", "NULL"]


def _is_not_at(tokens: list[Token], index: int) -> bool:
    return [token.kind for token in tokens[max(index - 2, 0) : index]] == ["IS", "NOT"]
