"""Messages that came in or were claimed just now: a claim or an ack that follows needs no read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.engines import get_each
from penstock.errors import CorruptRecord
from penstock.store.codec.stored import decode_stored_item
from penstock.store.live import Item, count_attempt
from penstock.store.live.indexed_directory import lane_of_key, main_of, pack_main

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.engines import Table
    from penstock.errors import StoreDamaged
    from penstock.store.live import Quarantine

__all__ = ["RECENT_BYTES", "Recent", "item_of", "visible_at_of"]

# Bounds of what is kept: some 20 MB of each kind at the very most.
RECENT_ITEMS: Final = 20_000
RECENT_BYTES: Final = 1_024


class Recent:
    """``fresh``: key of `available` to record and item; ``claimed``: (queue, id) to item."""

    def __init__(self) -> None:
        self.fresh: dict[bytes, tuple[bytes, Item]] = {}
        self.claimed: dict[tuple[int, int], Item] = {}

    def clear(self) -> None:
        """Forget them all."""
        self.fresh.clear()
        self.claimed.clear()

    def bound(self) -> None:
        """Make room for more."""
        if len(self.fresh) > RECENT_ITEMS:
            self.fresh.clear()
        if len(self.claimed) > RECENT_ITEMS:
            self.claimed.clear()

    def entries(
        self, rows: Sequence[tuple[bytes, bytes]], available: Table, quarantine: Quarantine
    ) -> Iterator[tuple[bytes, bytes, bytes | StoreDamaged | None, Item | None]]:
        """Find the records of index entries, from memory where they are fresh.

        Gives keys of index entries, of messages, records, items; a record may be the reason why it
        can't be read.
        """
        # The entry's key names its message; what its value says is for other readers.
        mains = [main_of(key) for key, _ in rows]
        known = [self.fresh.pop(main, None) for main in mains]
        if None not in known:
            for (key, _), main, (record, item) in zip(rows, mains, known, strict=True):  # type: ignore[misc]
                yield key, main, record, item
            return
        stored = get_each(available, mains)
        for (key, _), main, found in zip(rows, mains, stored, strict=True):
            item = None
            if isinstance(found, bytes):
                try:
                    item = item_of(found)
                except CorruptRecord as error:
                    quarantine("available", main, found, str(error))
            yield key, main, found, item

    def differing(self, number: int, available: Table, in_progress: Table) -> Iterator[bytes]:
        """Give the keys of a queue's messages that are not kept as the tables have them."""
        prefix = pack_main(number, 0)[:4]
        mains = [main for main in self.fresh if main[:4] == prefix]
        for main, record in zip(mains, available.multi_get(mains), strict=True):
            if record is None or self.fresh[main] != (record, item_of(record)):
                yield main
        items = [item for (of, _), item in self.claimed.items() if of == number]
        mains = [pack_main(number, item.key) for item in items]
        for main, item, record in zip(mains, items, in_progress.multi_get(mains), strict=True):
            stored = None if record is None else item_of(record)
            if stored is not None:
                count_attempt(stored)
            if stored != item:
                yield main


def item_of(record: bytes) -> Item:
    """Decode a record of `available` or `in_progress`."""
    contents, index_key, id8, attempts, forgiven, visible_at, lease = decode_stored_item(record)
    key = int.from_bytes(id8, "big")
    lane = lane_of_key(index_key)
    return Item(key, key, lane, attempts, forgiven, visible_at, contents, lease)


def visible_at_of(record: bytes) -> int:
    """Return when a message becomes visible; 0 if its record does not decode."""
    try:
        return decode_stored_item(record)[5]
    except CorruptRecord:
        return 0
