"""Filters, alone and many together.

A :class:`Matcher` holds many filters against many messages, at a cost that does not grow with the
filters. It files every filter under values of attributes of which a message must have one for the
filter to be true. A message looks its own values up there, and is tested only against the filters
it finds, and only on the conditions that the finding does not already prove::

    kind = 'book' AND price > 10          → kind: 'book'
    kind IN ('book', 'map') AND size > 9  → kind: 'book', kind: 'map'
    kind = 'book' OR shop = 7             → kind: 'book', shop: 7
    price > 10                            → (nothing to file under: tested on every message)

Of several attributes that a filter could be filed under, the one with the fewest filters so far
is taken, so that ``kind = 'book' AND shop = 7`` does not pile up under a value that every message
has.
"""

from __future__ import annotations

import re
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeAlias, TypeVar

from penstock.errors import InvalidFilter
from penstock.filters import tree
from penstock.filters.tree import RowTuple, Test
from penstock.limits import MAX_FILTER_LITERAL_CHARS
from penstock.model import Explanation, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
        return explain(self, row).result

    def matches(self, row: RowTuple) -> bool:
        """Return whether the filter is true of the message; unknown is not."""
        return self._match(row) is True

    @cached_property
    def _match(self) -> Test:
        return _compile(self.tree)

    def __reduce__(self) -> tuple[type[Filter], tuple[tree.Predicate]]:
        """Travel as a tree: the compiled tests can't be pickled."""
        return Filter, (self.tree,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Filter) and self.tree == other.tree

    def __hash__(self) -> int:
        return hash(self.tree)

    def __repr__(self) -> str:
        return f"parse({self.text!r})"


# The shape of nearly every queue's filter, at a fiftieth of the cost.
_DEFAULT: Final = re.compile(rf"queue = '([\w.\-]{{0,{MAX_FILTER_LITERAL_CHARS}}})'")


def parse(text: str) -> Filter:
    """Return the filter that the text says.

    Raises InvalidFilter, with the line, the column and the offending text, for anything that is
    not in the filter language or is beyond a bound in :mod:`penstock.limits`.
    """
    if not isinstance(text, str):
        # Of a program without types, or another client.
        raise InvalidFilter(f"a filter is text such as \"kind = 'book'\", not {text!r:.40}")
    if found := _DEFAULT.fullmatch(text):
        return Filter(tree.Compare("=", tree.Attr("queue"), tree.Text(found[1])))
    from penstock.filters.parser import parse_text  # noqa: PLC0415

    return parse_text(text)


def default_filter(queue_name: str) -> str:
    """Return the filter of a queue made without one: messages sent to it by name."""
    return tree.canonical(tree.Compare("=", tree.Attr("queue"), tree.Text(queue_name)))


def _compile(predicate: tree.Predicate) -> Test:
    # Loaded when used: the filters of most programs are plain, and need no test.
    from penstock.filters.evaluate import compile_match  # noqa: PLC0415

    return compile_match(predicate)


def explain(filter: Filter, row: RowTuple) -> Explanation:  # noqa: A002 - the noun it is about
    """Return the filter's result on a message, with that of every condition in it."""
    from penstock.filters.evaluate import explain_node  # noqa: PLC0415

    return explain_node(filter.tree, row)


# --- many filters ---------------------------------------------------------------------------------

K = TypeVar("K", str, int)

# A name, and a value that a message must have under it.
_Place: TypeAlias = tuple[str, Value]
# The filters at one place, by key: each with the test that is left to do (None: nothing).
_Slot: TypeAlias = tuple[tuple[K, Test | None], ...]
# The slots of one name, by value.
_Shelf: TypeAlias = dict[Value, _Slot[K]]


class _Plan(NamedTuple):
    """Places of which a message must have one for a predicate to be true."""

    places: frozenset[_Place]
    proves: bool  # having one of them is enough


class Matcher(Generic[K]):
    """Filters by key, ready to be asked which of them are true of each message of a batch.

    >>> from penstock.filters import Row, parse
    >>> matcher = Matcher({"books": parse("kind = 'book'"), "dear": parse("price > 100")})
    >>> matcher.match([Row({"kind": "book", "price": 120}), Row({"kind": "map"})])
    [['books', 'dear'], []]
    """

    def __init__(self, filters: Mapping[K, Filter] | None = None) -> None:
        """Index the filters."""
        self._shelves: dict[str, _Shelf[K]] = {}  # by attribute
        self._fields: dict[str, _Shelf[K]] = {}  # by field of the message
        self._always: _Slot[K] = ()  # filters that are tested on every message
        # Where each filter is filed; None: it is tested on every message.
        self._places: dict[K, frozenset[_Place] | None] = {}
        for key, one in (filters or {}).items():
            self.put(key, one)

    def match(self, rows: Sequence[RowTuple]) -> list[list[K]]:
        """Return for every row the keys of the filters that are true of it, in their order.

        A row is a :class:`~penstock.filters.Row` or, quicker to make, a plain tuple of the same
        five fields.
        """
        shelves, always = self._shelves, self._always
        fields = [(tree.FIELDS[name], shelf) for name, shelf in self._fields.items()]
        answers: list[list[K]] = []
        for row in rows:
            attributes = row[0]
            slots = [always] if always else []
            # Whichever are fewer: the names that are indexed, or those that the message has.
            if len(shelves) <= len(attributes):
                for name, shelf in shelves.items():
                    if (slot := shelf.get(attributes.get(name))) is not None:
                        slots.append(slot)
            else:
                for name, value in attributes.items():
                    if name in shelves and (slot := shelves[name].get(value)) is not None:
                        slots.append(slot)
            for field, shelf in fields:
                if (slot := shelf.get(row[field])) is not None:  # type: ignore[arg-type]
                    slots.append(slot)
            keys = []
            for slot in slots:
                for key, test in slot:
                    if test is None or test(row) is True:
                        keys.append(key)
            # A filter may stand under several names, and each slot has an order of its own.
            answers.append(sorted(set(keys)) if len(slots) > 1 else keys)
        return answers

    def put(self, key: K, one: Filter) -> None:
        """File a filter, in the place of the one that had its key."""
        if key in self._places:
            self.remove(key)
        plan, rest = self._plan_filter(one.tree)
        entry = key, None if rest is None else _compile(rest)
        self._places[key] = plan.places if plan else None
        if plan is None:
            self._always = _with_entry(self._always, entry)
            return
        for name, value in plan.places:
            shelf = self._shelves_of(name).setdefault(name, {})
            shelf[value] = _with_entry(shelf.get(value, ()), entry)

    def remove(self, key: K) -> None:
        """Remove the filter of this key; KeyError if there is none."""
        places = self._places.pop(key)
        if places is None:
            self._always = _without_key(self._always, key)
            return
        for name, value in places:
            shelf = self._shelves_of(name)[name]
            if left := _without_key(shelf.pop(value), key):
                shelf[value] = left
            elif not shelf:
                del self._shelves_of(name)[name]

    def _shelves_of(self, name: str) -> dict[str, _Shelf[K]]:
        return self._fields if name in tree.FIELDS else self._shelves

    def _plan_filter(self, whole: tree.Predicate) -> tuple[_Plan | None, tree.Predicate | None]:
        """Return where to file the filter, and the rest of it to test on messages found there."""
        terms = whole.terms if isinstance(whole, tree.And) else (whole,)
        plans = [(plan, term) for term in terms if (plan := self._plan(term)) is not None]
        if not plans:
            return None, whole
        best, chosen = min(plans, key=lambda pair: self._crowd(pair[0]))
        if not best.proves:
            return best, whole
        rest = tuple(term for term in terms if term is not chosen)
        if len(rest) > 1:
            return best, tree.And(rest)
        return best, rest[0] if rest else None

    def _plan(self, node: tree.Predicate) -> _Plan | None:
        match node:
            case tree.Compare("=", tree.Attr(name), literal) | tree.Compare(
                "=", literal, tree.Attr(name)
            ) if isinstance(literal, tree.LiteralNode):
                return _plan_items(name, (literal,))
            case tree.In(tree.Attr(name), items):
                return _plan_items(name, items)
            case tree.Flag(tree.Attr(name)):
                return _plan_items(name, (tree.Truth(value=True),))
            case tree.Or(terms):
                plans = [self._plan(term) for term in terms]
                known = [plan for plan in plans if plan is not None]
                if len(known) < len(plans):
                    return None
                places = frozenset(place for plan in known for place in plan.places)
                return _Plan(places, all(plan.proves for plan in known))
            case tree.And(terms):
                known = [plan for term in terms if (plan := self._plan(term)) is not None]
                return min(known, key=self._crowd)._replace(proves=False) if known else None
            case _:
                return None

    def _crowd(self, plan: _Plan) -> tuple[int, int, int]:
        """Return the cost of filing there: the least is best.

        First the filters that already stand at the fullest of the places, then the number of
        places; of equals, names with many values tell messages apart better.
        """
        fullest = values = 0
        for name, value in plan.places:
            shelf = self._shelves_of(name).get(name, {})
            values += len(shelf)
            if value in shelf:
                fullest = max(fullest, len(shelf[value]))
        return fullest, len(plan.places), -values


def _with_entry(slot: _Slot[K], entry: tuple[K, Test | None]) -> _Slot[K]:
    return tuple(sorted(slot + (entry,), key=itemgetter(0)))  # noqa: RUF005 - mypy and K


def _without_key(slot: _Slot[K], key: K) -> _Slot[K]:
    return tuple(entry for entry in slot if entry[0] != key)


def _plan_items(name: str, items: tuple[tree.LiteralNode, ...]) -> _Plan:
    # To Python 1 and True are one key; only a string proves that the message's value is equal.
    proves = all(isinstance(item, tree.Text) for item in items)
    return _Plan(frozenset((name, item.value) for item in items), proves)
