"""Tokens → tree, with sqlglot deciding what binds to what.

sqlglot's parser is recursive and knows all of SQL; a filter may be hostile and is a small part of
it. So it is handed one parenthesised group at a time, innermost first, in which every operand
(literal, name or group already parsed) is an identifier that points back at its token. Its stack
stays shallow however deep the filter nests, it never sees a literal, and of what it gives back
only a white list of nodes is taken.

Importing sqlglot costs a good part of a second: only :func:`build`'s callers import this module,
and only when they meet a filter that needs it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, NoReturn, TypeAlias

from sqlglot import Token as SqlToken
from sqlglot import TokenType, exp
from sqlglot.errors import ErrorLevel, ParseError
from sqlglot.parser import Parser

from penstock.filters.lexer import ALLOWED, INT_MAX, OPERAND, Token, reject
from penstock.filters.like import PatternError, compile_like
from penstock.filters.tree import (
    And,
    Arith,
    ArithOp,
    Attr,
    Between,
    Compare,
    CompareOp,
    Flag,
    In,
    IsNull,
    Like,
    LiteralNode,
    Neg,
    Node,
    Not,
    Number,
    Or,
    Predicate,
    Text,
    Truth,
    ValueNode,
    walk,
)
from penstock.limits import MAX_FILTER_DEPTH, MAX_FILTER_IN_ITEMS, MAX_FILTER_NODES

__all__ = ["build"]

_SQL_TYPES: Final = {
    OPERAND: TokenType.IDENTIFIER,
    "AND": TokenType.AND,
    "BETWEEN": TokenType.BETWEEN,
    "ESCAPE": TokenType.ESCAPE,
    "IN": TokenType.IN,
    "IS": TokenType.IS,
    "LIKE": TokenType.LIKE,
    "NOT": TokenType.NOT,
    "NULL": TokenType.NULL,
    "OR": TokenType.OR,
    "=": TokenType.EQ,
    "<>": TokenType.NEQ,
    "<": TokenType.LT,
    "<=": TokenType.LTE,
    ">": TokenType.GT,
    ">=": TokenType.GTE,
    "+": TokenType.PLUS,
    "-": TokenType.DASH,
    "*": TokenType.STAR,
    "/": TokenType.SLASH,
    "(": TokenType.L_PAREN,
    ")": TokenType.R_PAREN,
    ",": TokenType.COMMA,
}
_COMPARES: Final[dict[type[exp.Expression], CompareOp]] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}
_ARITHS: Final[dict[type[exp.Expression], ArithOp]] = {
    exp.Add: "+",
    exp.Sub: "-",
    exp.Mul: "*",
    exp.Div: "/",
}
_Predicates: Final = (Flag, Compare, In, Between, Like, IsNull, Not, And, Or)
_Sql: TypeAlias = exp.Expression


def build(text: str, tokens: list[Token]) -> Predicate:
    """Return the tree of a tokenized filter."""
    groups: list[list[Token]] = [[]]
    opened: list[Token] = []
    lists: set[int] = set()  # depths at which the parenthesis is that of an IN list
    for token in tokens:
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
            groups[-1].append(Token(OPERAND, start, token.end, node))
        else:
            group.append(token)
    if opened:
        reject(text, opened[-1].start, opened[-1].end, "this '(' is never closed")
    whole = _Group(text, groups[0], 0, len(text))
    tree = whole.as_predicate(whole.node(), 0, len(text))
    _check_size(text, tree)
    return tree


def _check_size(text: str, tree: Predicate) -> None:
    for count, (_, depth) in enumerate(walk(tree), start=1):
        if depth > MAX_FILTER_DEPTH:
            reject(text, 0, len(text), f"nested more than {MAX_FILTER_DEPTH} deep")
        if count > MAX_FILTER_NODES:
            reject(text, 0, len(text), f"more than {MAX_FILTER_NODES} parts")


class _Group:
    """What stands between two parentheses, with the groups inside it already parsed."""

    def __init__(self, text: str, tokens: list[Token], start: int, end: int) -> None:
        self._text = text
        self._tokens = tokens
        self._start = start
        self._end = end

    def node(self) -> Node:
        """Return the group's tree: a predicate, or a value if that is all it is."""
        if not self._tokens:
            reject(self._text, self._start, self._end, f"nothing between parentheses; {ALLOWED}")
        return self._convert(self._parse(), 1)

    def as_predicate(self, node: Node, start: int, end: int) -> Predicate:
        """Return a condition; a name or a boolean on its own is one."""
        if isinstance(node, _Predicates):
            return node
        if not isinstance(node, Attr | Truth):
            problem = f"this is a value where a condition is needed; {ALLOWED}"
            reject(self._text, start, end, problem)
        return Flag(node)

    def _parse(self) -> _Sql:
        # A token's index goes in as its column: that is how an error finds its way back.
        sql = [
            SqlToken(_SQL_TYPES[token.kind], f"t{index}", 1, index, token.start, token.end - 1)
            for index, token in enumerate(self._tokens)
        ]
        for before, token in pairwise(sql):
            # The one place where sqlglot wants to see a string and takes nothing else.
            if before.token_type is TokenType.ESCAPE and token.token_type is TokenType.IDENTIFIER:
                token.token_type = TokenType.STRING
        parser = Parser(error_level=ErrorLevel.IMMEDIATE)
        try:
            (parsed,) = parser.parse_into(exp.Condition, sql, self._text)
        except ParseError as error:
            self._unexpected(int(error.errors[0].get("col") or 0))
        if not isinstance(parsed, _Sql):
            self._unexpected(0)
        return parsed

    def _unexpected(self, index: int) -> NoReturn:
        token = self._tokens[index]
        if index == len(self._tokens) - 1 and token.kind not in (OPERAND, ")", "NULL"):
            problem = f"something is missing after this; {ALLOWED}"
        else:
            problem = f"this can't stand here; {ALLOWED}"
        reject(self._text, token.start, token.end, problem)

    # --- sqlglot nodes → ours ---------------------------------------------------------------

    def _convert(self, sql: _Sql, depth: int) -> Node:
        if depth > MAX_FILTER_DEPTH:
            self._refuse(sql, f"nested more than {MAX_FILTER_DEPTH} deep")
        kind = type(sql)
        if kind is exp.Column or kind is exp.Literal:
            return self._operand(sql)
        if kind is exp.And or kind is exp.Or:
            return self._chain(sql, depth)
        if kind is exp.Not:
            return _negated(self._predicate(sql.this, depth))
        if kind in _COMPARES:
            self._only(sql, "this", "expression")
            left, right = self._value(sql.this, depth), self._value(sql.expression, depth)
            return Compare(_COMPARES[kind], left, right)
        if kind in _ARITHS:
            self._only(sql, "this", "expression")
            left, right = self._value(sql.this, depth), self._value(sql.expression, depth)
            return Arith(_ARITHS[kind], left, right)
        if kind is exp.Neg:
            return self._minus(sql, depth)
        if kind is exp.In:
            return self._in(sql, depth)
        if kind is exp.Between:
            self._only(sql, "this", "low", "high")
            low, high = self._value(sql.args["low"], depth), self._value(sql.args["high"], depth)
            return Between(self._value(sql.this, depth), low, high)
        if kind is exp.Like or kind is exp.Escape:
            return self._like(sql, depth)
        if kind is not exp.Is or type(sql.expression) is not exp.Null:
            self._refuse(sql, f"this is not part of the filter language; {ALLOWED}")
        self._only(sql, "this", "expression")
        return IsNull(self._value(sql.this, depth))

    def _chain(self, sql: _Sql, depth: int) -> Predicate:
        """Flatten a chain of ANDs or ORs, which sqlglot hangs on its left side, in a loop."""
        kind = type(sql)
        terms: list[Predicate] = []
        while type(sql) is kind:
            terms.append(self._predicate(sql.expression, depth))
            sql = sql.this
        terms.append(self._predicate(sql, depth))
        terms.reverse()
        if kind is exp.And:
            return And(tuple(t for term in terms for t in _terms(term, And)))
        return Or(tuple(t for term in terms for t in _terms(term, Or)))

    def _operand(self, sql: _Sql) -> Node:
        index = self._index(sql)
        node = self._tokens[index].node
        if node is None:
            # A keyword of ours that SQL at large takes for a name.
            self._unexpected(index)
        return node

    def _minus(self, sql: _Sql, depth: int) -> ValueNode:
        self._only(sql, "this")
        operand = self._value(sql.this, depth, signed=True)
        if isinstance(operand, Number):
            return Number(-operand.value)
        # A third sign says what the first did: overflow and type are caught by any of them.
        if isinstance(operand, Neg) and isinstance(operand.operand, Neg):
            return operand.operand
        return Neg(operand)

    def _in(self, sql: _Sql, depth: int) -> Predicate:
        self._only(sql, "this", "expressions")
        items: list[LiteralNode] = []
        for item in sql.expressions:
            value = self._value(item, depth)
            if not isinstance(value, Text | Number | Truth):
                self._refuse(item, "an IN list holds only strings, numbers, TRUE and FALSE")
            items.append(value)
        if not 1 <= len(items) <= MAX_FILTER_IN_ITEMS:
            self._refuse(sql, f"an IN list has 1 to {MAX_FILTER_IN_ITEMS} items")
        return In(self._value(sql.this, depth), tuple(items))

    def _like(self, sql: _Sql, depth: int) -> Predicate:
        escape: str | None = None
        like = sql
        if type(sql) is exp.Escape:
            self._only(sql, "this", "expression")
            escape = self._string(sql.expression, depth)
            if len(escape) != 1:
                self._refuse(sql.expression, "ESCAPE takes one character, as in ESCAPE '!'")
            like = sql.this
        if type(like) is exp.Not and type(like.this) is exp.Like:
            negated, like = True, like.this
        else:
            negated = bool(like.args.get("negate"))
        if type(like) is not exp.Like:
            self._refuse(sql, "ESCAPE stands only after LIKE '…'")
        self._only(like, "this", "expression", "negate")
        pattern = self._string(like.expression, depth)
        try:
            compile_like(pattern, escape)
        except PatternError as error:
            self._refuse(like.expression, str(error))
        node = Like(self._value(like.this, depth), pattern, escape)
        return Not(node) if negated else node

    def _string(self, sql: _Sql, depth: int) -> str:
        node = self._convert(sql, depth + 1)
        if not isinstance(node, Text):
            self._refuse(sql, "LIKE and ESCAPE take a string, as in LIKE 'b%'")
        return node.value

    def _predicate(self, sql: _Sql, depth: int) -> Predicate:
        node = self._convert(sql, depth + 1)
        return self.as_predicate(node, *self._span(sql))

    def _value(self, sql: _Sql, depth: int, *, signed: bool = False) -> ValueNode:
        node = self._convert(sql, depth + 1)
        if isinstance(node, _Predicates):
            self._refuse(sql, "this is a condition where a value is needed: join them with AND, OR")
        whole = node.value if isinstance(node, Number) and isinstance(node.value, int) else 0
        if whole > INT_MAX and not signed:
            self._refuse(sql, "an integer has 64 bits: -9223372036854775808 to …807")
        return node

    # --- places -----------------------------------------------------------------------------

    def _only(self, sql: _Sql, *allowed: str) -> None:
        """Refuse a node on which sqlglot understood more than the filter language has."""
        for name, value in sql.args.items():
            if value and name not in allowed:
                self._refuse(sql, f"this is not part of the filter language; {ALLOWED}")

    def _index(self, sql: _Sql) -> int:
        return int(sql.name[1:])

    def _span(self, sql: _Sql) -> tuple[int, int]:
        found = [
            self._tokens[self._index(name)] for name in sql.find_all(exp.Identifier, exp.Literal)
        ]
        if not found:
            return self._start, self._end
        return min(token.start for token in found), max(token.end for token in found)

    def _refuse(self, sql: _Sql, problem: str) -> NoReturn:
        reject(self._text, *self._span(sql), problem)


def _negated(node: Predicate) -> Predicate:
    return node.operand if isinstance(node, Not) else Not(node)


def _terms(node: Predicate, kind: type[And | Or]) -> tuple[Predicate, ...]:
    return node.terms if isinstance(node, And | Or) and type(node) is kind else (node,)
