"""Many filters against many messages, at a cost that does not grow with the filters.

A message looks its own values up in the :class:`~penstock.filters.index.Index` and is tested only
against the filters it finds there, and only on what the finding does not already prove.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.filters.index import Index, Slot
from penstock.filters.tree import FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.filters.evaluate import RowTuple
    from penstock.filters.filter import Filter

__all__ = ["Matcher"]

K = TypeVar("K", bound=Hashable)


class Matcher(Generic[K]):
    """Filters by key, ready to be asked which of them are true of each message of a batch.

    A matcher never changes; ``with_filter`` and ``without`` return another, which shares nearly
    everything with this one.

    >>> from penstock.filters import Row, parse
    >>> matcher = Matcher({"books": parse("kind = 'book'"), "dear": parse("price > 100")})
    >>> matcher.match([Row({"kind": "book", "price": 120}), Row({"kind": "map"})])
    [['books', 'dear'], []]
    """

    __slots__ = ("_fields", "_index")

    def __init__(self, filters: Mapping[K, Filter] | Index[K] | None = None) -> None:
        """Index the filters; their order is the order of the keys in every answer."""
        if isinstance(filters, Index):
            self._index = filters
        else:
            self._index = Index()
            for key, one in (filters or {}).items():
                self._index.put(key, one)
        self._fields = [(FIELDS[name], shelf) for name, shelf in self._index.fields.items()]

    def __reduce__(self) -> tuple[type[Matcher[K]], tuple[dict[K, Filter]]]:
        """Travel as filters: the compiled tests can't be pickled."""
        return type(self), (self.filters,)

    def __len__(self) -> int:
        return len(self._index.filed)

    def __contains__(self, key: object) -> bool:
        return key in self._index.filed

    @property
    def filters(self) -> dict[K, Filter]:
        """The filters by key, in the order in which an answer lists them."""
        filed = self._index.filed
        return {key: filed[key].filter for key in self._index.in_order(filed)}

    def with_filter(self, key: K, one: Filter) -> Matcher[K]:
        """Return a matcher that has this filter too, or in the place of the one of that key."""
        index = Index(self._index)
        index.put(key, one)
        return Matcher(index)

    def without(self, key: K) -> Matcher[K]:
        """Return a matcher without the filter of this key; KeyError if there is none."""
        index = Index(self._index)
        index.remove(key)
        return Matcher(index)

    def match(self, rows: Sequence[RowTuple]) -> list[list[K]]:
        """Return for every row the keys of the filters that are true of it.

        A row is a :class:`~penstock.filters.Row` or, quicker to make, a plain tuple of the same
        five fields. The keys come in the order of the filters.
        """
        shelves, always, fields = self._index.shelves, self._index.always, self._fields
        answers: list[list[K]] = []
        for row in rows:
            attributes = row[0]
            found = always
            several: list[Slot[K]] | None = None
            # Whichever are fewer: the names that are indexed, or those that the message has.
            if len(shelves) <= len(attributes):
                for name, shelf in shelves.items():
                    slot = shelf.get(attributes.get(name))
                    if slot is not None:
                        if found is not None:
                            several = [*(several or [found]), slot]
                        found = slot
            else:
                for name, value in attributes.items():
                    if name in shelves:
                        slot = shelves[name].get(value)
                        if slot is not None:
                            if found is not None:
                                several = [*(several or [found]), slot]
                            found = slot
            for field, shelf in fields:
                slot = shelf.get(row[field])  # type: ignore[arg-type]
                if slot is not None:
                    if found is not None:
                        several = [*(several or [found]), slot]
                    found = slot
            if several is not None:
                # A filter may stand under several names, and the slots know nothing of order.
                keys = {key for slot in several for key in _true_of(slot, row)}
                answers.append(self._index.in_order(keys) if len(keys) > 1 else list(keys))
            elif found is None:
                answers.append([])
            elif found[2]:
                answers.append(_true_of(found, row))
            else:
                test = found[1]
                answers.append([found[0]] if test is None or test(row) is True else [])
        return answers


def _true_of(slot: Slot[K], row: RowTuple) -> list[K]:
    key, test, others = slot
    keys = [key] if test is None or test(row) is True else []
    keys += [key for key, test in others if test is None or test(row) is True]
    return keys
