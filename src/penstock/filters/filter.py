"""A filter, the message that it sees, and the way from a text to a filter.

The parser and the evaluation are loaded when they are used. Many programs have no filter but the
default one, which needs neither: the matcher finds it by the attribute ``queue``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

from penstock.filters import tree
from penstock.limits import MAX_FILTER_LITERAL_CHARS
from penstock.model import Explanation, Value

RowTuple: TypeAlias = tuple[Mapping[str, Value], str, int, int, int]
"""The fields of :class:`Row` as a plain tuple, which is quicker to make for every message."""


class Row(NamedTuple):
    """A message as filters see it. ``size`` is that of its payload in bytes.

    A filter reads ``group``, ``priority``, ``published_at`` and ``size`` from here; every other
    name, ``queue`` among them, is an attribute.
    """

    attributes: Mapping[str, Value]
    group: str = ""
    priority: int = 0
    published_at_ms: int = 0
    size: int = 0


Test: TypeAlias = Callable[[RowTuple], bool | None]
"""Answers True, False or None (unknown) for a message."""


class Filter:
    """A filter that has been checked. Equal filters have equal trees, however they were written."""

    def __init__(self, predicate: tree.Predicate) -> None:
        self.tree: Final = predicate

    @cached_property
    def text(self) -> str:
        """The canonical text, which parses to the same tree."""
        return tree.canonical(self.tree)

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name the filter reads: attributes, and fields such as ``priority``."""
        return tree.names(self.tree)

    def evaluate(self, row: RowTuple) -> bool | None:
        """Return True, False, or None for unknown."""
        return self._evaluate(row)

    def matches(self, row: RowTuple) -> bool:
        """Return whether the filter is true of the message; unknown is not."""
        return self._match(row) is True

    @cached_property
    def _evaluate(self) -> Test:
        from penstock.filters.evaluate import compile_predicate  # noqa: PLC0415

        return compile_predicate(self.tree)

    @cached_property
    def _match(self) -> Test:
        from penstock.filters.evaluate import compile_match  # noqa: PLC0415

        return compile_match(self.tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Filter) and self.tree == other.tree

    def __hash__(self) -> int:
        return hash(self.tree)

    def __repr__(self) -> str:
        return f"parse({self.text!r})"

    def __reduce__(self) -> tuple[type[Filter], tuple[tree.Predicate]]:
        """Travel as a tree: the compiled tests can't be pickled."""
        return Filter, (self.tree,)


# The shape of nearly every queue's filter, at a fiftieth of the cost.
_DEFAULT: Final = re.compile(rf"queue = '([\w.\-]{{0,{MAX_FILTER_LITERAL_CHARS}}})'")


def parse(text: str) -> Filter:
    """Return the filter that the text says.

    Raises InvalidFilter, with the line, the column and the offending text, for anything that is
    not in the filter language or is beyond a bound in :mod:`penstock.limits`.
    """
    if found := _DEFAULT.fullmatch(text):
        return Filter(tree.Compare("=", tree.Attr("queue"), tree.Text(found[1])))
    from penstock.filters.parser import parse_text  # noqa: PLC0415

    return parse_text(text)


def default_filter(queue_name: str) -> str:
    """Return the filter of a queue made without one: messages sent to it by name."""
    return tree.canonical(tree.Compare("=", tree.Attr("queue"), tree.Text(queue_name)))


def explain(filter: Filter, row: RowTuple) -> Explanation:  # noqa: A002 - the noun it is about
    """Return the filter's result on a message, with that of every condition in it."""
    from penstock.filters.evaluate import explain_node  # noqa: PLC0415

    return explain_node(filter.tree, row)
