"""Many filters against many messages, at a cost that does not grow with the filters.

A matcher files every filter under values of attributes of which a message must have one for the
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

from bisect import bisect
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from penstock.filters import tree
from penstock.filters.filter import Filter, RowTuple, Test
from penstock.model import Value

K = TypeVar("K", bound=Hashable)


# A name, and a value that a message must have under it.
_Place: TypeAlias = tuple[str, Value]
# A filter where it is filed: its key, and the test that is left to do (None: nothing).
_Entry: TypeAlias = tuple[K, Test | None]
# The filters at one place: the first, and the others after it in order of rank. Nearly always
# there is one, and a message that finds it touches a single object to know it.
_Slot: TypeAlias = tuple[K, Test | None, tuple[_Entry[K], ...]]
# The slots of one name, by value.
_Shelf: TypeAlias = dict[Value, _Slot[K]]


class _Plan(NamedTuple):
    """Places of which a message must have one for a predicate to be true."""

    places: frozenset[_Place]
    proves: bool  # having one of them is enough


class _Filed(NamedTuple):
    """A filter, its place in the order of all, and its places; None: tested on every message."""

    filter: Filter
    rank: int
    places: frozenset[_Place] | None


class Matcher(Generic[K]):
    """Filters by key, ready to be asked which of them are true of each message of a batch.

    >>> from penstock.filters import Row, parse
    >>> matcher = Matcher({"books": parse("kind = 'book'"), "dear": parse("price > 100")})
    >>> matcher.match([Row({"kind": "book", "price": 120}), Row({"kind": "map"})])
    [['books', 'dear'], []]
    """

    __slots__ = ("_always", "_fields", "_filed", "_next_rank", "_shelves")

    def __init__(self, filters: Mapping[K, Filter] | None = None) -> None:
        """Index the filters; their order is the order of the keys in every answer."""
        self._shelves: dict[str, _Shelf[K]] = {}  # by attribute
        self._fields: dict[str, _Shelf[K]] = {}  # by field of the message
        self._always: _Slot[K] | None = None  # filters that are tested on every message
        self._filed: dict[K, _Filed] = {}
        self._next_rank = 0
        for key, one in (filters or {}).items():
            self.put(key, one)

    def __reduce__(self) -> tuple[type[Matcher[K]], tuple[dict[K, Filter]]]:
        """Travel as filters: the compiled tests can't be pickled."""
        return type(self), (self.filters,)

    def __len__(self) -> int:
        return len(self._filed)

    def __contains__(self, key: object) -> bool:
        return key in self._filed

    @property
    def filters(self) -> dict[K, Filter]:
        """The filters by key, in the order in which an answer lists them."""
        return {key: self._filed[key].filter for key in self._in_order(self._filed)}

    def match(self, rows: Sequence[RowTuple]) -> list[list[K]]:
        """Return for every row the keys of the filters that are true of it.

        A row is a :class:`~penstock.filters.Row` or, quicker to make, a plain tuple of the same
        five fields. The keys come in the order of the filters.
        """
        shelves, always = self._shelves, self._always
        fields = [(tree.FIELDS[name], shelf) for name, shelf in self._fields.items()]
        answers: list[list[K]] = []
        for row in rows:
            attributes = row[0]
            slots = [] if always is None else [always]
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
            if len(slots) > 1:
                # A filter may stand under several names, and the slots know nothing of order.
                keys = {key for slot in slots for key in _true_of(slot, row)}
                answers.append(self._in_order(keys) if len(keys) > 1 else list(keys))
            elif not slots:
                answers.append([])
            elif slots[0][2]:
                answers.append(_true_of(slots[0], row))
            else:
                key, test, _ = slots[0]
                answers.append([key] if test is None or test(row) is True else [])
        return answers

    # --- filing -----------------------------------------------------------------------------

    def put(self, key: K, one: Filter) -> None:
        """File a filter, after all others or in the place of the one that had its key."""
        if key in self._filed:
            rank = self._filed[key].rank
            self.remove(key)
        else:
            rank = self._next_rank
            self._next_rank += 1
        plan, rest = self._plan_filter(one.tree)
        test = None
        if rest is not None:
            from penstock.filters.evaluate import compile_match  # noqa: PLC0415

            test = compile_match(rest)
        entry: _Entry[K] = (key, test)
        self._filed[key] = _Filed(one, rank, plan.places if plan else None)
        if plan is None:
            self._always = self._with_entry(self._always, entry)
            return
        for name, value in plan.places:
            shelf = self._shelves_of(name).setdefault(name, {})
            shelf[value] = self._with_entry(shelf.get(value), entry)

    def remove(self, key: K) -> None:
        """Remove the filter of this key; KeyError if there is none."""
        places = self._filed.pop(key).places
        if places is None:
            self._always = _without_key(self._always, key)
            return
        for name, value in places:
            shelf = self._shelves_of(name)[name]
            left = _without_key(shelf.pop(value), key)
            if left is not None:
                shelf[value] = left
            elif not shelf:
                del self._shelves_of(name)[name]

    def _in_order(self, keys: Iterable[K]) -> list[K]:
        return sorted(keys, key=self._rank)

    def _rank(self, key: K) -> int:
        return self._filed[key].rank

    def _with_entry(self, slot: _Slot[K] | None, entry: _Entry[K]) -> _Slot[K]:
        entries = _entries(slot)
        place = bisect(entries, self._rank(entry[0]), key=lambda other: self._rank(other[0]))
        return _slot((*entries[:place], entry, *entries[place:]))

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
                fullest = max(fullest, 1 + len(shelf[value][2]))
        return fullest, len(plan.places), -values


def _true_of(slot: _Slot[K], row: RowTuple) -> list[K]:
    key, test, others = slot
    keys = [key] if test is None or test(row) is True else []
    keys += [key for key, test in others if test is None or test(row) is True]
    return keys


def _entries(slot: _Slot[K] | None) -> tuple[_Entry[K], ...]:
    return () if slot is None else (slot[:2], *slot[2])


def _slot(entries: tuple[_Entry[K], ...]) -> _Slot[K]:
    first, *others = entries
    return (*first, tuple(others))


def _without_key(slot: _Slot[K] | None, key: K) -> _Slot[K] | None:
    left = tuple(entry for entry in _entries(slot) if entry[0] != key)
    return _slot(left) if left else None


def _plan_items(name: str, items: tuple[tree.LiteralNode, ...]) -> _Plan:
    # To Python 1 and True are one key; only a string proves that the message's value is equal.
    proves = all(isinstance(item, tree.Text) for item in items)
    return _Plan(frozenset((name, item.value) for item in items), proves)
