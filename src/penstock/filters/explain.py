"""Why a filter did or did not take a message: its result, taken apart down to the atoms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.filters.evaluate import RowTuple, Value, compile_predicate, read_value
from penstock.filters.tree import (
    And,
    Arith,
    Attr,
    Neg,
    Not,
    Or,
    Predicate,
    canonical,
    children,
)

if TYPE_CHECKING:
    from penstock.filters.filter import Filter

__all__ = ["Explanation", "explain"]


class Explanation(Struct, frozen=True):
    """What one condition of a filter came to.

    ``result`` is True, False or None for unknown. An atom such as ``price > 10`` gives in
    ``values`` what it read, as ``("price", 12)``; AND, OR and NOT give ``parts`` instead.
    """

    text: str
    result: bool | None
    values: tuple[tuple[str, Value], ...] = ()
    parts: tuple[Explanation, ...] = ()


def explain(filter: Filter, row: RowTuple) -> Explanation:  # noqa: A002 - the noun it is about
    """Return the filter's result on a message, with that of every condition in it."""
    return _explain(filter.tree, row)


def _explain(node: Predicate, row: RowTuple) -> Explanation:
    text, result = canonical(node), compile_predicate(node)(row)
    match node:
        case And(terms) | Or(terms):
            return Explanation(text, result, parts=tuple(_explain(term, row) for term in terms))
        case Not(operand):
            return Explanation(text, result, parts=(_explain(operand, row),))
        case _:
            read = [part for part in children(node) if isinstance(part, Attr | Arith | Neg)]
            values = tuple((canonical(part), read_value(part, row)) for part in read)
            return Explanation(text, result, values=values)
