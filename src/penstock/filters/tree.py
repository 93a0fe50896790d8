"""The filter tree: frozen nodes, the canonical text they print as, and the rows they read.

::

    Predicate                              Value
    ├── Flag      flag                     ├── Attr     price, "order.kind"
    ├── Compare   a < b                    ├── Text     'book'
    ├── In        a IN (1, 2)              ├── Number   10, 2.5
    ├── Between   a BETWEEN 1 AND 2        ├── Truth    TRUE, FALSE
    ├── Like      a LIKE 'x%' ESCAPE '!'   ├── Arith    a + b
    ├── IsNull    a IS NULL                └── Neg      -a
    ├── Not       NOT p
    ├── And       p AND q AND …
    └── Or        p OR q OR …

A predicate is true, false or unknown; a value is a string, a number, a boolean or null. ``And``
and ``Or`` are flat: neither holds another of its own kind. Numbers and booleans are nodes of
different types because Python takes ``1 == True`` for true, and a filter must not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from msgspec import Struct
from msgspec.structs import astuple

from penstock.model import Value

CompareOp: TypeAlias = Literal["=", "<>", "<", "<=", ">", ">="]
ArithOp: TypeAlias = Literal["+", "-", "*", "/"]

RowTuple: TypeAlias = tuple[Mapping[str, Value], str, int, int, int]
"""The fields of :class:`Row` as a plain tuple, which is quicker to make for every message."""
Test: TypeAlias = Callable[[RowTuple], bool | None]
"""Answers True, False or None (unknown) for a message."""


class Row(NamedTuple):
    """A message as filters see it. ``size`` is that of its payload in bytes."""

    attributes: Mapping[str, Value]
    group: str = ""
    priority: int = 0
    published_at_ms: int = 0
    size: int = 0


# Names that read the message itself, and where in a Row each of them stands. Every other name,
# ``queue`` among them, is an attribute.
FIELDS: Final[dict[str, int]] = {"group": 1, "priority": 2, "published_at": 3, "size": 4}

KEYWORDS: Final = frozenset(
    ("AND", "BETWEEN", "ESCAPE", "FALSE", "IN", "IS", "LIKE", "NOT", "NULL", "OR", "TRUE")
)

_BARE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Attr(Struct, frozen=True, gc=False):
    """The value of an attribute, or of the message's own field if the name is in ``FIELDS``."""

    name: str


class Text(Struct, frozen=True, gc=False):
    """A string literal."""

    value: str


class Number(Struct, frozen=True, gc=False):
    """A number literal: a 64-bit integer or a finite float."""

    value: int | float


class Truth(Struct, frozen=True, gc=False):
    """``TRUE`` or ``FALSE``."""

    value: bool


class Arith(Struct, frozen=True, gc=False):
    """Two numbers combined."""

    op: ArithOp
    left: ValueNode
    right: ValueNode


class Neg(Struct, frozen=True, gc=False):
    """A number with its sign turned; never of a literal, which carries its own sign."""

    operand: ValueNode


LiteralNode: TypeAlias = Text | Number | Truth
ValueNode: TypeAlias = Attr | Text | Number | Truth | Arith | Neg


class Flag(Struct, frozen=True, gc=False):
    """A value that is itself the condition: unknown unless it is a boolean."""

    operand: ValueNode


class Compare(Struct, frozen=True, gc=False):
    """Two values compared; unknown if they are of different types, or not ordered."""

    op: CompareOp
    left: ValueNode
    right: ValueNode


class In(Struct, frozen=True, gc=False):
    """A value against a list of literals; the same as ``=`` with each of them, joined by OR."""

    operand: ValueNode
    items: tuple[LiteralNode, ...]


class Between(Struct, frozen=True, gc=False):
    """The same as ``operand >= low AND operand <= high``."""

    operand: ValueNode
    low: ValueNode
    high: ValueNode


class Like(Struct, frozen=True, gc=False):
    """A string against a pattern: ``%`` for any run of characters, ``_`` for exactly one."""

    operand: ValueNode
    pattern: str
    escape: str | None = None


class IsNull(Struct, frozen=True, gc=False):
    """Whether a value is missing; never unknown."""

    operand: ValueNode


class Not(Struct, frozen=True, gc=False):
    """A predicate turned round; unknown stays unknown. Never of another ``Not``."""

    operand: Predicate


class And(Struct, frozen=True, gc=False):
    """False if any term is false, else unknown if any is unknown, else true."""

    terms: tuple[Predicate, ...]


class Or(Struct, frozen=True, gc=False):
    """True if any term is true, else unknown if any is unknown, else false."""

    terms: tuple[Predicate, ...]


Predicate: TypeAlias = Flag | Compare | In | Between | Like | IsNull | Not | And | Or
Node: TypeAlias = Predicate | ValueNode


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes directly below this one, in the order they are written."""
    fields = (field if isinstance(field, tuple) else (field,) for field in astuple(node))
    return tuple(part for some in fields for part in some if isinstance(part, Node))


def walk(node: Node) -> Iterator[tuple[Node, int]]:
    """Yield every node with its depth, the root's being 1. Needs no stack, however deep."""
    todo = [(node, 1)]
    while todo:
        current, depth = todo.pop()
        yield current, depth
        todo.extend((child, depth + 1) for child in children(current))


def names(node: Node) -> frozenset[str]:
    """Return every name the tree reads, those of the message's own fields among them."""
    return frozenset(found.name for found, _ in walk(node) if isinstance(found, Attr))


# --- canonical text -------------------------------------------------------------------------

_OR, _AND, _NOT, _ATOM, _SUM, _PRODUCT, _SIGN, _LEAF = range(8)
_STRENGTH_OF_OP: Final = {"+": _SUM, "-": _SUM, "*": _PRODUCT, "/": _PRODUCT}


def canonical(node: Node) -> str:
    """Print a node so that parsing the text gives an equal node: one spelling for every tree."""
    return _print(node)[0]


def _print(node: Node) -> tuple[str, int]:
    """Return the text and how tightly it holds together."""
    match node:
        case Or(terms):
            return " OR ".join(_at_least(_AND, term) for term in terms), _OR
        case And(terms):
            return " AND ".join(_at_least(_NOT, term) for term in terms), _AND
        case Not(In() | Between() | Like() | IsNull() as atom):
            return _print_atom(atom, "NOT "), _ATOM
        case Not(operand):
            return f"NOT {_at_least(_ATOM, operand)}", _NOT
        case Flag(operand):
            return _print(operand)
        case Compare(op, left, right):
            return f"{_at_least(_SUM, left)} {op} {_at_least(_SUM, right)}", _ATOM
        case In() | Between() | Like() | IsNull():
            return _print_atom(node, ""), _ATOM
        case Arith(op, left, right):
            strength = _STRENGTH_OF_OP[op]
            return f"{_at_least(strength, left)} {op} {_at_least(strength + 1, right)}", strength
        case Neg(operand):
            text = _at_least(_SIGN, operand)
            # Two dashes in a row would read as a comment.
            return (f"- {text}" if text.startswith("-") else f"-{text}"), _SIGN
        case _:
            return _print_leaf(node), _LEAF


def _at_least(strength: int, node: Node) -> str:
    text, has = _print(node)
    return text if has >= strength else f"({text})"


def _print_atom(node: In | Between | Like | IsNull, negation: str) -> str:
    operand = _at_least(_SUM, node.operand)
    match node:
        case In(_, items):
            return f"{operand} {negation}IN ({', '.join(map(_print_leaf, items))})"
        case Between(_, low, high):
            bounds = f"{_at_least(_SUM, low)} AND {_at_least(_SUM, high)}"
            return f"{operand} {negation}BETWEEN {bounds}"
        case Like(_, pattern, escape):
            tail = "" if escape is None else f" ESCAPE {_quote(escape)}"
            return f"{operand} {negation}LIKE {_quote(pattern)}{tail}"
        case IsNull():
            return f"{operand} IS {negation}NULL"


def _print_leaf(node: Attr | Text | Number | Truth) -> str:
    match node:
        case Attr(name):
            if _BARE_NAME.fullmatch(name) and name.upper() not in KEYWORDS:
                return name
            return '"' + name.replace('"', '""') + '"'
        case Text(value):
            return _quote(value)
        case Number(value):
            return repr(value)
        case Truth(value):
            return "TRUE" if value else "FALSE"


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
