"""Filter text → tokens → tree. The bounds on text, nesting and lists are held here.

The parser takes one parenthesised group at a time, innermost first; a parsed group is an operand
of the group around it. So the stack stays shallow however deep a filter nests. Within a group there
is a method for each level of operators, from the loosest to the tightest::

    OR · AND · NOT · = <> < <= > >= BETWEEN IN IS LIKE · + - · * / · minus · names and literals
"""

from __future__ import annotations

import math
import re
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from penstock.errors import InvalidFilter
from penstock.filters import tree
from penstock.filters.evaluate import INT_MAX, PatternError, compile_like
from penstock.filters.matcher import Filter
from penstock.limits import (
    MAX_ATTRIBUTE_NAME_BYTES,
    MAX_FILTER_CHARS,
    MAX_FILTER_DEPTH,
    MAX_FILTER_IN_ITEMS,
    MAX_FILTER_LITERAL_CHARS,
    MAX_FILTER_NODES,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_ALLOWED: Final = (
    "allowed are = <> < <= > >=, AND, OR, NOT, [NOT] IN (…), [NOT] BETWEEN … AND …, "
    "[NOT] LIKE '…' [ESCAPE '…'], IS [NOT] NULL, + - * /, parentheses, attribute names, "
    "'strings', numbers, TRUE and FALSE"
)
_TOO_DEEP: Final = f"nested more than {MAX_FILTER_DEPTH} deep"
_TOO_LARGE: Final = "an integer has 64 bits: -9223372036854775808 to …807"
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
_AFTER_NUMBER: Final = re.compile(r"[\w.]")
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
_HINTS: Final = {
    "'": "this string is not closed; a quote inside a string is written twice",
    '"': "this name is not closed; a quote inside a name is written twice",
    ".": 'a name with dots is written in double quotes, as in "order.kind"',
    ";": "a filter is one condition, not a statement",
    **dict.fromkeys("`[", "names are quoted with double quotes"),
    **dict.fromkeys("?:@$", "a filter has no parameters"),
}

_COMPARISONS: Final = ("=", "<>", "<", "<=", ">", ">=")
_RANGES: Final = ("BETWEEN", "IN", "IS", "LIKE")
# Parts that a token adds to the tree, at least. LIKE is one, in the place of its pattern.
_PARTS: Final = {"operand": 1, **dict.fromkeys((*_COMPARISONS, *_RANGES[:3]), 1), "ESCAPE": -1}


class _Part(NamedTuple):
    """A token and its place; or what was parsed, from its first operand to its last."""

    kind: str  # "operand", "list" (of an IN), a keyword in capitals, or the sign itself
    start: int
    end: int
    node: tree.Node | None = None  # of an operand
    items: tuple[_Part, ...] = ()  # of a list


def parse_text(text: str) -> Filter:
    """Return the filter that the text says; see :func:`penstock.filters.parse`."""
    parsed = Filter(_parse_tree(text))
    if len(parsed.text) > MAX_FILTER_CHARS:
        problem = f"written out in full, the filter has more than {MAX_FILTER_CHARS} characters"
        _reject(text, 0, len(text), problem)
    return parsed


def _parse_tree(text: str) -> tree.Predicate:
    groups: list[list[_Part]] = [[]]
    opened: list[_Part] = []
    for token in _tokenize(text):
        if token.kind == "(":
            opened.append(token)
            groups.append([])
        elif token.kind == ")":
            group = _Group(text, groups.pop(), opened.pop().start, token.end)
            is_list = groups[-1] and groups[-1][-1].kind == "IN"
            groups[-1].append(group.list() if is_list else group.operand())
        else:
            groups[-1].append(token)
    whole = _Group(text, groups[0], 0, len(text))
    parsed = whole.predicate(whole.operand())
    for count, (_, depth) in enumerate(tree.walk(parsed), start=1):
        if depth > MAX_FILTER_DEPTH:
            _reject(text, 0, len(text), _TOO_DEEP)
        if count > MAX_FILTER_NODES:
            _reject(text, 0, len(text), f"more than {MAX_FILTER_NODES} parts")
    return parsed


def _reject(text: str, start: int, end: int, problem: str) -> NoReturn:
    """Raise InvalidFilter for the part of the text from start to end."""
    start = min(start, len(text))
    fragment = text[start : max(end, start)]
    line = text.count("\n", 0, start) + 1
    column = start - (text.rfind("\n", 0, start) + 1) + 1
    shown = fragment if len(fragment) <= _FRAGMENT_CHARS else fragment[:_FRAGMENT_CHARS] + "…"
    near = f" near {shown!r}" if shown else ""
    message = f"line {line}, column {column}{near}: {problem}"
    raise InvalidFilter(message, line=line, column=column, fragment=fragment)


# --- text → tokens --------------------------------------------------------------------------


def _tokenize(text: str) -> list[_Part]:
    """Return the tokens of a filter that keeps to the bounds; an ``!=`` comes out as ``<>``."""
    if len(text) > MAX_FILTER_CHARS:
        problem = f"a filter has at most {MAX_FILTER_CHARS} characters; this has {len(text)}"
        _reject(text, MAX_FILTER_CHARS, MAX_FILTER_CHARS + _FRAGMENT_CHARS, problem)
    if bad := _UNSTORABLE.search(text):
        _reject(text, *bad.span(), "NUL and lone surrogates can't be stored; remove the character")
    tokens: list[_Part] = []
    place = parts = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            _reject(text, place, place + 1, _HINTS.get(text[place], _ALLOWED))
        if found.lastgroup != "space":
            tokens.append(_token(text, found))
            # Of a long run of NOT or minus two or three are left, which say the same: two undo
            # each other, and the others see to it that their operand is of the right type.
            kind = tokens[-1].kind
            # Before any more is paid for.
            parts += _PARTS.get(kind, 0)
            if parts > MAX_FILTER_NODES:
                _reject(text, *found.span(), f"more than {MAX_FILTER_NODES} parts")
            if kind in ("NOT", "-") and [each.kind for each in tokens[-4:]] == [kind] * 4:
                del tokens[-4:-2]
        place = found.end()
    if not tokens:
        _reject(text, 0, 0, f"the filter is empty; TRUE takes every message; {_ALLOWED}")
    _check_sequence(text, tokens)
    return tokens


def _token(text: str, found: re.Match[str]) -> _Part:
    start, end = found.span()
    part = found.group()
    match found.lastgroup:
        case "word" if part.upper() in ("TRUE", "FALSE"):
            return _Part("operand", start, end, tree.Truth(part.upper() == "TRUE"))
        case "word" if part.upper() in tree.KEYWORDS:
            return _Part(part.upper(), start, end)
        case "word" | "name":
            name = part if found.lastgroup == "word" else part[1:-1].replace('""', '"')
            if not name or len(name.encode()) > MAX_ATTRIBUTE_NAME_BYTES:
                _reject(text, start, end, f"a name has 1 to {MAX_ATTRIBUTE_NAME_BYTES} bytes")
            return _Part("operand", start, end, tree.Attr(name))
        case "number":
            return _Part("operand", start, end, _number(text, start, end))
        case "string":
            value = part[1:-1].replace("''", "'")
            if len(value) > MAX_FILTER_LITERAL_CHARS:
                problem = f"a string has at most {MAX_FILTER_LITERAL_CHARS} characters"
                _reject(text, start, end, problem)
            return _Part("operand", start, end, tree.Text(value))
        case "comment":
            _reject(text, start, end, "comments are not allowed")
        case _:
            return _Part("<>" if part == "!=" else part, start, end)


def _number(text: str, start: int, end: int) -> tree.Number:
    if _AFTER_NUMBER.match(text, end):
        _reject(text, start, end + 1, "a number is written 12, 1.5 or 2e3, apart from what follows")
    if end - start > MAX_FILTER_LITERAL_CHARS:
        _reject(text, start, end, f"a number has at most {MAX_FILTER_LITERAL_CHARS} characters")
    digits = text[start:end]
    if digits.isdigit():
        whole = int(digits)
        # One more than the largest: the sign that makes it the smallest is not read yet.
        if whole > INT_MAX + 1:
            _reject(text, start, end, _TOO_LARGE)
        return tree.Number(whole)
    value = float(digits)
    if not math.isfinite(value):
        _reject(text, start, end, "a number goes up to about 1.8e308")
    return tree.Number(value)


def _check_sequence(text: str, tokens: list[_Part]) -> None:
    """Hold the bounds, and refuse pairs of tokens for which there is a better hint."""

    def kinds(first: int, count: int) -> list[str]:
        return [each.kind for each in tokens[max(first, 0) : first + count]]

    opened: list[_Part] = []
    before = _Part("", 0, 0)
    for index, token in enumerate(tokens):
        if token.kind == "(":
            opened.append(token)
        if len(opened) > MAX_FILTER_DEPTH:
            _reject(text, token.start, token.end, _TOO_DEEP)
        if token.kind == ")":
            if not opened:
                _reject(text, token.start, token.end, "this ')' closes nothing")
            opened.pop()
        if token.kind == "(" and before.kind == "operand":
            _reject(text, before.start, token.end, f"functions are not allowed; {_ALLOWED}")
        if token.kind == "=" and before.kind in ("=", "<", ">", "<>"):
            _reject(text, before.start, token.end, "the comparisons are = <> < <= > >=")
        if token.kind == "NOT" and before.kind == "-":
            _reject(text, before.start, token.end, "a minus sign stands only before a number")
        if token.kind == "+" and before.kind not in ("operand", ")"):
            _reject(text, token.start, token.end, "a plus sign stands only between two numbers")
        if before.kind == "IS" and token.kind != "NULL" and kinds(index, 2) != ["NOT", "NULL"]:
            _reject(text, before.start, token.end, "IS stands only before NULL or NOT NULL")
        if token.kind == "NULL" and before.kind != "IS" and kinds(index - 2, 2) != ["IS", "NOT"]:
            _reject(text, token.start, token.end, "nothing equals NULL: write IS NULL, IS NOT NULL")
        before = token
    if opened:
        _reject(text, opened[-1].start, opened[-1].end, "this '(' is never closed")


# --- tokens → tree --------------------------------------------------------------------------


class _Group:
    """The tokens between two parentheses, with the groups inside them already parsed."""

    def __init__(self, text: str, tokens: list[_Part], start: int, end: int) -> None:
        self._text = text
        self._tokens = tokens
        self._start = start
        self._end = end
        self._at = 0

    def operand(self) -> _Part:
        """Return the group as one operand: a condition, or a value if that is all it is."""
        if not self._tokens:
            empty = _Part("", self._start, self._end)
            self._refuse(empty, f"nothing between parentheses; {_ALLOWED}")
        node = self._or().node
        if self._at < len(self._tokens):
            self._unexpected()
        return _Part("operand", self._start, self._end, node)

    def list(self) -> _Part:
        """Return the group as the list of an IN; a comma may have nothing before or after."""
        items = []
        while self._at < len(self._tokens):
            if self._kind() != ",":
                items.append(self._or())
            if not self._take(",") and self._at < len(self._tokens):
                self._unexpected()
        return _Part("list", self._start, self._end, items=tuple(items))

    def predicate(self, part: _Part) -> tree.Predicate:
        """Return a condition; a name or a boolean on its own is one."""
        node = part.node
        if isinstance(node, tree.Predicate):
            return node
        if not isinstance(node, tree.Attr | tree.Truth):
            self._refuse(part, f"this is a value where a condition is needed; {_ALLOWED}")
        return tree.Flag(node)

    # --- tokens -----------------------------------------------------------------------------

    def _kind(self, ahead: int = 0) -> str:
        place = self._at + ahead
        return self._tokens[place].kind if place < len(self._tokens) else ""

    def _take(self, *kinds: str) -> str:
        """Step over the next token if it is one of these; return its kind, or an empty text."""
        kind = self._kind()
        if kind not in kinds:
            return ""
        self._at += 1
        return kind

    def _unexpected(self) -> NoReturn:
        """Reject the next token, or the last if there is no next."""
        found = self._tokens[min(self._at, len(self._tokens) - 1)]
        problem = "this can't stand here"
        if found is self._tokens[-1] and found.kind not in ("operand", "list", "NULL"):
            problem = "something is missing after this"
        self._refuse(found, f"{problem}; {_ALLOWED}")

    def _refuse(self, part: _Part, problem: str) -> NoReturn:
        _reject(self._text, part.start, part.end, problem)

    # --- operators --------------------------------------------------------------------------

    def _or(self) -> _Part:
        return self._chain("OR", tree.Or, self._and)

    def _and(self) -> _Part:
        return self._chain("AND", tree.And, self._not)

    def _chain(
        self, kind: str, join: type[tree.And | tree.Or], inner: Callable[[], _Part]
    ) -> _Part:
        """Read terms with AND or OR between them; a chain in parentheses is part of this one."""
        first = last = inner()
        terms: list[tree.Predicate] = []
        while self._kind() == kind:
            terms = terms or [self.predicate(first)]
            self._at += 1
            last = inner()
            terms.append(self.predicate(last))
        if not terms:
            return first
        flat = (term.terms if isinstance(term, join) else (term,) for term in terms)
        return _Part("operand", first.start, last.end, join(tuple(chain.from_iterable(flat))))

    def _not(self) -> _Part:
        if self._take("NOT"):
            part = self._not()
            return part._replace(node=_negated(self.predicate(part)))
        return self._comparison()

    def _comparison(self) -> _Part:
        left = self._sum()
        while True:
            negated = self._kind() == "NOT" and self._kind(1) in _RANGES
            self._at += negated
            if kind := self._take(*_COMPARISONS):
                right = self._sum()
                node = tree.Compare(kind, self._value(left), self._value(right))  # type: ignore[arg-type]
                left = _Part("operand", left.start, right.end, node)
            elif kind := self._take(*_RANGES):
                left = self._range(kind, left)
                if negated:
                    left = left._replace(node=_negated(self.predicate(left)))
            else:
                return left

    def _range(self, kind: str, left: _Part) -> _Part:
        """Read what follows BETWEEN, IN, LIKE or IS."""
        operand = self._value(left)
        if kind == "BETWEEN":
            low = self._sum()
            self._take("AND")
            last = self._sum()
            node: tree.Predicate = tree.Between(operand, self._value(low), self._value(last))
        elif kind == "IN":
            if not self._take("list"):
                problem = f"this is not part of the filter language; {_ALLOWED}"
                self._refuse(left._replace(end=self._operand().end), problem)
            items = self._tokens[self._at - 1].items
            last = items[-1] if items else left
            if not 1 <= len(items) <= MAX_FILTER_IN_ITEMS:
                problem = f"an IN list has 1 to {MAX_FILTER_IN_ITEMS} items"
                self._refuse(left._replace(end=last.end), problem)
            node = tree.In(operand, tuple(map(self._literal, items)))
        elif kind == "LIKE":
            last = pattern = self._sum()
            escape = None
            if self._take("ESCAPE"):
                last = self._operand()
                escape = self._string(last)
                if len(escape) != 1:
                    self._refuse(last, "ESCAPE takes one character, as in ESCAPE '!'")
            node = tree.Like(operand, self._string(pattern), escape)
            try:
                compile_like(node.pattern, escape)
            except PatternError as error:
                self._refuse(pattern, str(error))
        else:
            last, node = left, tree.IsNull(operand)
            if self._take("NOT"):
                node = tree.Not(node)
            if not self._take("NULL"):
                self._unexpected()
        return _Part("operand", left.start, last.end, node)

    def _sum(self) -> _Part:
        return self._arithmetic(("+", "-"), self._product)

    def _product(self) -> _Part:
        return self._arithmetic(("*", "/"), self._signed)

    def _arithmetic(self, signs: tuple[str, str], inner: Callable[[], _Part]) -> _Part:
        left = inner()
        while sign := self._take(*signs):
            right = inner()
            node = tree.Arith(sign, self._value(left), self._value(right))  # type: ignore[arg-type]
            left = _Part("operand", left.start, right.end, node)
        return left

    def _signed(self) -> _Part:
        if not self._take("-"):
            return self._operand()
        part = self._signed()
        operand = self._value(part, signed=True)
        if isinstance(operand, tree.Number):
            return part._replace(node=tree.Number(-operand.value))
        # A third sign says what the first did: overflow and type are caught by any of them.
        if isinstance(operand, tree.Neg) and isinstance(operand.operand, tree.Neg):
            return part._replace(node=operand.operand)
        return part._replace(node=tree.Neg(operand))

    def _operand(self) -> _Part:
        if not self._take("operand"):
            self._unexpected()
        return self._tokens[self._at - 1]

    # --- types ------------------------------------------------------------------------------

    def _value(self, part: _Part, *, signed: bool = False) -> tree.ValueNode:
        node = part.node
        if node is None or isinstance(node, tree.Predicate):
            problem = "this is a condition where a value is needed: join them with AND, OR"
            self._refuse(part, problem)
        match node:
            case tree.Number(int(whole)) if whole > INT_MAX and not signed:
                self._refuse(part, _TOO_LARGE)
        return node

    def _literal(self, part: _Part) -> tree.LiteralNode:
        value = self._value(part)
        if not isinstance(value, tree.LiteralNode):
            self._refuse(part, "an IN list holds only strings, numbers, TRUE and FALSE")
        return value

    def _string(self, part: _Part) -> str:
        if not isinstance(part.node, tree.Text):
            self._refuse(part, "LIKE and ESCAPE take a string, as in LIKE 'b%'")
        return part.node.value


def _negated(node: tree.Predicate) -> tree.Predicate:
    return node.operand if isinstance(node, tree.Not) else tree.Not(node)
