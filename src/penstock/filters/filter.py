"""A parsed filter: the text a user wrote, checked, and ready to be asked about messages."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Final

from penstock.filters.evaluate import RowTuple, Test, compile_match, compile_predicate
from penstock.filters.lexer import reject, tokenize
from penstock.filters.tree import Attr, Compare, Predicate, Text, canonical, names
from penstock.limits import MAX_FILTER_CHARS, MAX_FILTER_LITERAL_CHARS

__all__ = ["Filter", "default_filter", "parse"]

# The shape of nearly every queue's filter, told apart without loading the SQL parser.
_DEFAULT: Final = re.compile(rf"queue = '([\w.\-]{{0,{MAX_FILTER_LITERAL_CHARS}}})'")


class Filter:
    """A filter that has been checked. Equal filters have equal trees, however they were written."""

    def __init__(self, tree: Predicate) -> None:
        self.tree: Final = tree

    @cached_property
    def text(self) -> str:
        """The canonical text, which parses to the same tree."""
        return canonical(self.tree)

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name the filter reads: attributes, and fields such as ``priority``."""
        return names(self.tree)

    def evaluate(self, row: RowTuple) -> bool | None:
        """Return True, False, or None for unknown."""
        return self._evaluate(row)

    def matches(self, row: RowTuple) -> bool:
        """Return whether the filter is true of the message; unknown is not."""
        return self._match(row) is True

    @cached_property
    def _evaluate(self) -> Test:
        return compile_predicate(self.tree)

    @cached_property
    def _match(self) -> Test:
        return compile_match(self.tree)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Filter) and self.tree == other.tree

    def __hash__(self) -> int:
        return hash(self.tree)

    def __repr__(self) -> str:
        return f"parse({self.text!r})"

    def __reduce__(self) -> tuple[type[Filter], tuple[Predicate]]:
        """Travel as a tree: the compiled tests can't be pickled."""
        return Filter, (self.tree,)


def parse(text: str) -> Filter:
    """Return the filter that the text says.

    Raises InvalidFilter, with the line, the column and the offending text, for anything that is
    not in the filter language or is beyond a bound in :mod:`penstock.limits`.
    """
    if found := _DEFAULT.fullmatch(text):
        return Filter(Compare("=", Attr("queue"), Text(found[1])))
    tokens = tokenize(text)
    from penstock.filters.grammar import build  # noqa: PLC0415 - loads sqlglot, which is slow

    parsed = Filter(build(text, tokens))
    if len(parsed.text) > MAX_FILTER_CHARS:
        problem = f"written out in full, the filter has more than {MAX_FILTER_CHARS} characters"
        reject(text, 0, len(text), problem)
    return parsed


def default_filter(queue_name: str) -> str:
    """Return the filter of a queue made without one: messages sent to it by name."""
    return canonical(Compare("=", Attr("queue"), Text(queue_name)))
