"""Filter text → tokens → tree. The bounds on text, nesting and lists are held here.

The parser takes one parenthesised group at a time, innermost first; a parsed group is an operand
of the group around it. So the stack stays shallow however deep a filter nests. Within a group the
operators bind by ``_POWERS``. The syntax of a group is checked before the types of its operands.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple, NoReturn

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

# Operators from the loosest to the tightest; those of one line take their operands from the left.
# << and >> are in no filter: two signs in a row are refused as one.
_LEVELS: Final = ("OR", "AND", "= <>", "< <= > >=", "BETWEEN IN IS LIKE NOT", "<< >>", "+ -", "* /")
_POWERS: Final = {
    kind: power for power, kinds in enumerate(_LEVELS, start=1) for kind in kinds.split()
}
_EQUALITY, _RANGE, _SHIFT, _OPERAND_ONLY = 3, 5, 6, 9


class _Part(NamedTuple):
    """A token and its place; or an operator with its operands, from the first to the last of them.

    ``start`` is -1 if there is no operand.
    """

    kind: str  # "operand", a keyword in capitals, the sign itself, "minus" or "misplaced"
    start: int
    end: int
    node: tree.Node | None = None  # of an operand; None: a keyword in the place of a name
    parts: tuple[_Part, ...] = ()


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
    lists: set[int] = set()  # depths at which the parenthesis is that of an IN list
    for token in _tokenize(text):
        group = groups[-1]
        if token.kind == "(":
            opened.append(token)
            if group and group[-1].kind == "IN":
                lists.add(len(opened))
                group.append(token)
            else:
                groups.append([])
        elif token.kind == ")" and len(opened) in lists:
            lists.discard(len(opened))
            opened.pop()
            group.append(token)
        elif token.kind == ")":
            start = opened.pop().start
            groups.pop()
            node = _Group(text, group, start, token.end).node()
            groups[-1].append(_Part("operand", start, token.end, node))
        else:
            group.append(token)
    if opened:
        _reject(text, opened[-1].start, opened[-1].end, "this '(' is never closed")
    whole = _Group(text, groups[0], 0, len(text))
    parsed = whole.as_predicate(whole.node(), 0, len(text))
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
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            _reject(text, place, place + 1, _HINTS.get(text[place], _ALLOWED))
        if found.lastgroup != "space":
            tokens.append(_token(text, found))
            # Of a long run of NOT or minus two or three are left, which say the same: two undo
            # each other, and the others see to it that their operand is of the right type.
            kind = tokens[-1].kind
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
    depth = operands = 0
    before = _Part("", 0, 0)
    for index, token in enumerate(tokens):
        depth += (token.kind == "(") - (token.kind == ")")
        operands += token.kind == "operand"
        preceding = [each.kind for each in tokens[max(index - 2, 0) : index]]
        following = [each.kind for each in tokens[index : index + 2]]
        if depth > MAX_FILTER_DEPTH:
            _reject(text, token.start, token.end, _TOO_DEEP)
        if depth < 0:
            _reject(text, token.start, token.end, "this ')' closes nothing")
        if operands > MAX_FILTER_NODES:
            _reject(text, token.start, token.end, f"more than {MAX_FILTER_NODES} operands")
        if token.kind == "(" and before.kind == "operand":
            _reject(text, before.start, token.end, f"functions are not allowed; {_ALLOWED}")
        if token.kind == "=" and before.kind in ("=", "<", ">", "<>"):
            _reject(text, before.start, token.end, "the comparisons are = <> < <= > >=")
        if token.kind == "NOT" and before.kind == "-":
            _reject(text, before.start, token.end, "a minus sign stands only before a number")
        if token.kind == "+" and before.kind not in ("operand", ")"):
            _reject(text, token.start, token.end, "a plus sign stands only between two numbers")
        if before.kind == "IS" and token.kind != "NULL" and following != ["NOT", "NULL"]:
            _reject(text, before.start, token.end, "IS stands only before NULL or NOT NULL")
        if token.kind == "NULL" and before.kind != "IS" and preceding != ["IS", "NOT"]:
            _reject(text, token.start, token.end, "nothing equals NULL: write IS NULL, IS NOT NULL")
        before = token


# --- tokens → tree --------------------------------------------------------------------------


class _Group:
    """The tokens between two parentheses, with the groups inside them already parsed."""

    def __init__(self, text: str, tokens: list[_Part], start: int, end: int) -> None:
        self._text = text
        self._tokens = tokens
        self._start = start
        self._end = end
        self._at = 0
        self._nested = 0

    def node(self) -> tree.Node:
        """Return the group's tree: a predicate, or a value if that is all it is."""
        if not self._tokens:
            _reject(self._text, self._start, self._end, f"nothing between parentheses; {_ALLOWED}")
        part = self._expression(1)
        if part is None or self._at < len(self._tokens):
            self._unexpected()
        return self._convert(part, 1)

    def as_predicate(self, node: tree.Node, start: int, end: int) -> tree.Predicate:
        """Return a condition; a name or a boolean on its own is one."""
        if isinstance(node, tree.Predicate):
            return node
        if not isinstance(node, tree.Attr | tree.Truth):
            problem = f"this is a value where a condition is needed; {_ALLOWED}"
            _reject(self._text, start, end, problem)
        return tree.Flag(node)

    # --- syntax -----------------------------------------------------------------------------

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

    def _part(self, kind: str, *parts: _Part | None) -> _Part:
        """Join an operator and its operands; a missing operand is an error at the next token."""
        known = tuple(part for part in parts if part is not None)
        if len(known) < len(parts):
            self._unexpected()
        placed = [part for part in known if part.start >= 0]
        start, end = (placed[0].start, placed[-1].end) if placed else (-1, -1)
        return _Part(kind, start, end, parts=known)

    def _expression(self, least: int) -> _Part | None:
        """Read operators that bind at least this tightly; None if there is not even an operand."""
        left = self._prefix()
        most = _OPERAND_ONLY
        while True:
            kind, following = self._kind(), self._kind(1)
            if kind in ("<", ">") and following == kind and least <= _SHIFT <= most:
                kind += following
            power = _POWERS.get(kind, 0)
            if not least <= power <= most:
                return left
            if kind == "NOT" and following not in ("BETWEEN", "IN", "IS", "LIKE", "NULL"):
                return left
            most = power
            if power == _RANGE:
                left = self._range(left)
                continue
            self._at += 2 if power == _SHIFT else 1
            right = self._expression(power + 1)
            if power in (_EQUALITY, _EQUALITY + 1):
                left, right = self._no_null_test(left), self._no_null_test(right)
            left = self._part(kind, left, right)

    def _no_null_test(self, part: _Part | None) -> _Part | None:
        """Mark IS [NOT] NULL as an operand that a comparison does not take."""
        inner = part.parts[0] if part is not None and part.kind == "NOT" else part
        return self._part("misplaced", part) if inner is not None and inner.kind == "IS" else part

    def _prefix(self) -> _Part | None:
        if self._take("NOT"):
            self._nested += 1
            if self._nested > MAX_FILTER_DEPTH:
                _reject(self._text, *self._tokens[self._at - 1][1:3], _TOO_DEEP)
            negated = self._part("NOT", self._expression(_EQUALITY))
            self._nested -= 1
            return negated
        if self._take("-"):
            return self._part("minus", self._prefix())
        return self._operand()

    def _operand(self) -> _Part | None:
        if self._take("*", "NULL"):
            return self._part("misplaced")
        if self._take("("):  # only after an IN that stands in the place of a name
            return self._part("misplaced", *self._items())
        # A keyword may read as a name; it is refused when the syntax of the group is right.
        if self._take("operand", "ESCAPE", "IN", "IS"):
            return self._tokens[self._at - 1]._replace(kind="operand")
        return None

    def _items(self) -> list[_Part]:
        """Read a list up to its closing parenthesis; a comma may have nothing before or after."""
        items = [self._expression(1)]
        while self._take(","):
            items.append(self._expression(1))
        if not self._take(")"):
            self._unexpected()
        return [item for item in items if item is not None]

    def _range(self, left: _Part | None) -> _Part:
        """Read [NOT] BETWEEN, IN, LIKE or IS NULL, whose left operand is read."""
        negated = self._take("NOT")
        kind = self._take("BETWEEN", "IN", "IS", "LIKE", "NULL")
        if kind == "BETWEEN":
            low = self._expression(_SHIFT)
            self._take("AND")
            high = self._expression(_SHIFT)
            if left is not None and left.kind == "IS":
                left = self._part("misplaced", left)
            part = self._part(kind, left, low, high)
        elif kind == "IN" and self._take("("):
            part = self._part(kind, left, *self._items())
        elif kind == "IN":
            field = self._operand()
            part = self._part("misplaced", left, field) if field else self._part(kind, left)
        elif kind == "LIKE":
            part = self._part("NOT LIKE" if negated else kind, left, self._expression(_SHIFT))
            if self._take("ESCAPE"):
                escape = self._operand() if self._kind() == "operand" else None
                part = self._part(part.kind, *part.parts, escape)
        else:
            not_null = kind == "IS" and self._take("NOT")
            if kind == "IS" and not self._take("NULL"):
                self._unexpected()
            part = self._part("IS", left)
            if not_null:
                part = self._part("NOT", part)
        if negated and kind != "LIKE":
            part = self._part("NOT", part)
        if part.kind.startswith("NOT") and _POWERS.get(self._kind()) == _RANGE:
            part = self._part("misplaced", part)
        return part

    def _unexpected(self, token: _Part | None = None) -> NoReturn:
        """Reject a token: if none is given, the next one, or the last if there is no next."""
        last = self._tokens[-1]
        found = token or (self._tokens[self._at] if self._at < len(self._tokens) else last)
        problem = f"this can't stand here; {_ALLOWED}"
        if found.start == last.start and last.kind not in ("operand", ")", "NULL"):
            problem = f"something is missing after this; {_ALLOWED}"
        _reject(self._text, found.start, found.end, problem)

    # --- types ------------------------------------------------------------------------------

    def _convert(self, part: _Part, depth: int) -> tree.Node:
        if depth > MAX_FILTER_DEPTH:
            self._refuse(part, _TOO_DEEP)
        kind, parts = part.kind, part.parts
        match kind:
            case "operand":
                return part.node if part.node is not None else self._unexpected(part)
            case "AND" | "OR":
                return self._chain(part, depth)
            case "NOT":
                negated = self._predicate(parts[0], depth)
                return negated.operand if isinstance(negated, tree.Not) else tree.Not(negated)
            case "=" | "<>" | "<" | "<=" | ">" | ">=":
                left, right = self._value(parts[0], depth), self._value(parts[1], depth)
                return tree.Compare(kind, left, right)
            case "+" | "-" | "*" | "/":
                left, right = self._value(parts[0], depth), self._value(parts[1], depth)
                return tree.Arith(kind, left, right)
            case "minus":
                return self._minus(parts[0], depth)
            case "IN":
                return self._in(part, depth)
            case "BETWEEN":
                low, high = self._value(parts[1], depth), self._value(parts[2], depth)
                return tree.Between(self._value(parts[0], depth), low, high)
            case "LIKE" | "NOT LIKE":
                return self._like(part, depth)
            case "IS":
                return tree.IsNull(self._value(parts[0], depth))
        return self._refuse(part, f"this is not part of the filter language; {_ALLOWED}")

    def _chain(self, part: _Part, depth: int) -> tree.Predicate:
        """Flatten a chain of ANDs or ORs, which hangs on its left side, in a loop."""
        join = tree.And if part.kind == "AND" else tree.Or
        terms: list[tree.Predicate] = []
        rest = part
        while rest.kind == part.kind:
            terms.append(self._predicate(rest.parts[1], depth))
            rest = rest.parts[0]
        terms.append(self._predicate(rest, depth))
        flat = (term.terms if isinstance(term, join) else (term,) for term in reversed(terms))
        return join(tuple(term for some in flat for term in some))

    def _minus(self, part: _Part, depth: int) -> tree.ValueNode:
        operand = self._value(part, depth, signed=True)
        if isinstance(operand, tree.Number):
            return tree.Number(-operand.value)
        # A third sign says what the first did: overflow and type are caught by any of them.
        if isinstance(operand, tree.Neg) and isinstance(operand.operand, tree.Neg):
            return operand.operand
        return tree.Neg(operand)

    def _in(self, part: _Part, depth: int) -> tree.Predicate:
        items: list[tree.LiteralNode] = []
        for item in part.parts[1:]:
            value = self._value(item, depth)
            if not isinstance(value, tree.LiteralNode):
                self._refuse(item, "an IN list holds only strings, numbers, TRUE and FALSE")
            items.append(value)
        if not 1 <= len(items) <= MAX_FILTER_IN_ITEMS:
            self._refuse(part, f"an IN list has 1 to {MAX_FILTER_IN_ITEMS} items")
        return tree.In(self._value(part.parts[0], depth), tuple(items))

    def _like(self, part: _Part, depth: int) -> tree.Predicate:
        operand, pattern_part, *escapes = part.parts
        escape = self._string(escapes[0], depth) if escapes else None
        if escape is not None and len(escape) != 1:
            self._refuse(escapes[0], "ESCAPE takes one character, as in ESCAPE '!'")
        pattern = self._string(pattern_part, depth)
        try:
            compile_like(pattern, escape)
        except PatternError as error:
            self._refuse(pattern_part, str(error))
        node = tree.Like(self._value(operand, depth), pattern, escape)
        return tree.Not(node) if part.kind == "NOT LIKE" else node

    def _string(self, part: _Part, depth: int) -> str:
        node = self._convert(part, depth + 1)
        if not isinstance(node, tree.Text):
            self._refuse(part, "LIKE and ESCAPE take a string, as in LIKE 'b%'")
        return node.value

    def _predicate(self, part: _Part, depth: int) -> tree.Predicate:
        return self.as_predicate(self._convert(part, depth + 1), *self._span(part))

    def _value(self, part: _Part, depth: int, *, signed: bool = False) -> tree.ValueNode:
        node = self._convert(part, depth + 1)
        if isinstance(node, tree.Predicate):
            problem = "this is a condition where a value is needed: join them with AND, OR"
            self._refuse(part, problem)
        match node:
            case tree.Number(int(whole)) if whole > INT_MAX and not signed:
                self._refuse(part, _TOO_LARGE)
        return node

    def _span(self, part: _Part) -> tuple[int, int]:
        return (self._start, self._end) if part.start < 0 else (part.start, part.end)

    def _refuse(self, part: _Part, problem: str) -> NoReturn:
        _reject(self._text, *self._span(part), problem)
