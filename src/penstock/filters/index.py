"""Where each filter is filed, so that a message finds the few it has to be tested against.

Every filter is filed under values of attributes of which a message must have one for the filter
to be true::

    kind = 'book' AND price > 10          → kind: 'book'
    kind IN ('book', 'map') AND size > 9  → kind: 'book', kind: 'map'
    kind = 'book' OR shop = 7             → kind: 'book', shop: 7
    price > 10                            → (nothing to file under: tested on every message)

Of several attributes that a filter could be filed under, the one with the fewest filters so far
is taken, so that ``kind = 'book' AND shop = 7`` does not pile up under a value that every message
has.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from penstock.filters.evaluate import Test, Value, compile_match
from penstock.filters.tree import (
    FIELDS,
    And,
    Attr,
    Compare,
    Flag,
    In,
    LiteralNode,
    Number,
    Or,
    Predicate,
    Text,
    Truth,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.filters.filter import Filter

__all__ = ["Index", "Slot"]

K = TypeVar("K", bound=Hashable)


# A name, and a value that a message must have under it.
_Place: TypeAlias = tuple[str, Value]
# A filter where it is filed: its key, and what is left to test (None: nothing).
Entry: TypeAlias = tuple[K, Test | None]
# What stands at one place: the first filter, and the others after it in order of rank. Nearly
# always there is one, and a message that finds it touches a single object to know it.
Slot: TypeAlias = tuple[K, Test | None, tuple[Entry[K], ...]]
# The slots of one name, by value.
Shelf: TypeAlias = dict[Value, Slot[K]]


class _Plan(NamedTuple):
    """Places of which a message must have one for a predicate to be true."""

    places: frozenset[_Place]
    proves: bool  # having one of them is enough


class _Filed(NamedTuple):
    filter: Filter
    rank: int
    places: frozenset[_Place] | None  # None: tested on every message


class Index(Generic[K]):
    """Filters by key, and where they are filed.

    An index made from a base shares with it whatever it does not change itself, so that one
    filter more costs a few shallow copies and no filing of the others.
    """

    __slots__ = ("_own_shelves", "_shared", "always", "fields", "filed", "next_rank", "shelves")

    def __init__(self, base: Index[K] | None = None) -> None:
        self._shared = base is not None
        self._own_shelves: set[str] = set()
        self.shelves: dict[str, Shelf[K]] = base.shelves.copy() if base else {}
        self.fields: dict[str, Shelf[K]] = base.fields.copy() if base else {}
        self.always: Slot[K] | None = base.always if base else None
        self.filed: dict[K, _Filed] = base.filed.copy() if base else {}
        self.next_rank: int = base.next_rank if base else 0

    def put(self, key: K, one: Filter) -> None:
        """File a filter, after all others or in the place of the one that had its key."""
        if key in self.filed:
            rank = self.filed[key].rank
            self.remove(key)
        else:
            rank = self.next_rank
            self.next_rank += 1
        plan, rest = self._plan_filter(one.tree)
        entry: Entry[K] = (key, None if rest is None else compile_match(rest))
        self.filed[key] = _Filed(one, rank, plan.places if plan else None)
        if plan is None:
            self.always = self._with_entry(self.always, entry)
            return
        for name, value in plan.places:
            shelf = self._own_shelf(name)
            shelf[value] = self._with_entry(shelf.get(value), entry)

    def remove(self, key: K) -> None:
        """Take a filter out; KeyError if there is none of that key."""
        places = self.filed.pop(key).places
        if places is None:
            self.always = _without_key(self.always, key)
            return
        for name, value in places:
            shelf = self._own_shelf(name)
            left = _without_key(shelf[value], key)
            if left is None:
                del shelf[value]
            else:
                shelf[value] = left
        for name in {name for name, _ in places}:
            if not self._shelves_of(name)[name]:
                del self._shelves_of(name)[name]

    def in_order(self, keys: Iterable[K]) -> list[K]:
        """Return the keys by rank."""
        return sorted(keys, key=self._rank)

    def _rank(self, key: K) -> int:
        return self.filed[key].rank

    def _with_entry(self, slot: Slot[K] | None, entry: Entry[K]) -> Slot[K]:
        entries = _entries(slot)
        place = bisect(entries, self._rank(entry[0]), key=lambda other: self._rank(other[0]))
        return _slot((*entries[:place], entry, *entries[place:]))

    def _shelves_of(self, name: str) -> dict[str, Shelf[K]]:
        return self.fields if name in FIELDS else self.shelves

    def _own_shelf(self, name: str) -> Shelf[K]:
        shelves = self._shelves_of(name)
        if self._shared and name not in self._own_shelves:
            self._own_shelves.add(name)
            shelves[name] = shelves.get(name, {}).copy()
        return shelves.setdefault(name, {})

    # --- planning ---------------------------------------------------------------------------

    def _plan_filter(self, tree: Predicate) -> tuple[_Plan | None, Predicate | None]:
        """Return where to file the filter, and what of it is left to test on those found."""
        terms = tree.terms if isinstance(tree, And) else (tree,)
        plans = [(plan, term) for term in terms if (plan := self._plan(term)) is not None]
        if not plans:
            return None, tree
        best, chosen = min(plans, key=lambda pair: self._crowd(pair[0]))
        if not best.proves:
            return best, tree
        rest = tuple(term for term in terms if term is not chosen)
        if len(rest) > 1:
            return best, And(rest)
        return best, rest[0] if rest else None

    def _plan(self, node: Predicate) -> _Plan | None:
        match node:
            case Compare("=", Attr(name), (Text() | Number() | Truth()) as literal):
                return _plan_items(name, (literal,))
            case Compare("=", (Text() | Number() | Truth()) as literal, Attr(name)):
                return _plan_items(name, (literal,))
            case In(Attr(name), items):
                return _plan_items(name, items)
            case Flag(Attr(name)):
                return _plan_items(name, (Truth(value=True),))
            case Or(terms):
                return _plan_any([self._plan(term) for term in terms])
            case And(terms):
                known = [plan for term in terms if (plan := self._plan(term)) is not None]
                return min(known, key=self._crowd)._replace(proves=False) if known else None
            case _:
                return None

    def _crowd(self, plan: _Plan) -> tuple[int, int, int]:
        """Return what it costs to file there: the least is best.

        First the filters that already stand at the fullest of the places, then the number of
        places; of equals, names with many values tell messages apart better.
        """
        fullest = values = 0
        for name, value in plan.places:
            shelf = self._shelves_of(name).get(name, {})
            values += len(shelf)
            if value in shelf:
                fullest = max(fullest, 1 + len(shelf[value][2]))
        return fullest, len(plan.places), -values


def _entries(slot: Slot[K] | None) -> tuple[Entry[K], ...]:
    return () if slot is None else (slot[:2], *slot[2])


def _slot(entries: tuple[Entry[K], ...]) -> Slot[K]:
    first, *others = entries
    return (*first, tuple(others))


def _without_key(slot: Slot[K] | None, key: K) -> Slot[K] | None:
    left = tuple(entry for entry in _entries(slot) if entry[0] != key)
    return _slot(left) if left else None


def _plan_items(name: str, items: tuple[LiteralNode, ...]) -> _Plan:
    # To Python 1 and True are one key; only a string proves that the message's value is equal.
    proves = all(isinstance(item, Text) for item in items)
    return _Plan(frozenset((name, item.value) for item in items), proves)


def _plan_any(plans: list[_Plan | None]) -> _Plan | None:
    known = [plan for plan in plans if plan is not None]
    if len(known) < len(plans):
        return None
    places = frozenset(place for plan in known for place in plan.places)
    return _Plan(places, all(plan.proves for plan in known))
