"""All connections of a server, whatever they speak: how many there may be, and how much they hold.

Each takes a descriptor, and memory for what it has sent and nobody is done with. Both are bounded
for all of them together, so that the store has what it needs whoever connects. A connection is a
stranger until it has shown a key, or has asked for something where there are no keys. When there
is no room for another, the stranger that came first and has nothing at work makes way; when too
much is held, the connection makes way that has held on to what it sent for longest. Everything
here runs on the loop's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from penstock import limits

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Connections", "Holder", "Slot"]

_TOO_MUCH: Final = "the server has too much in hand: try again"


class Holder(Protocol):
    """The holder of a slot: a connection, or one that is about to be."""

    @property
    def idle(self) -> bool:
        """Whether nothing of it is at work, so that its end costs nobody an answer."""

    def abort(self) -> None:
        """Close at once."""

    def refuse(self, why: str) -> None:
        """Let go of what it holds at once, say why, and close."""


class Slot:
    """The place of one connection among all of them."""

    __slots__ = ("full", "held_bytes", "holder", "known", "protocol")

    def __init__(self, holder: Holder, protocol: str) -> None:
        self.holder = holder
        self.protocol = protocol
        # Whether there was no room for it: it is told so, and closed.
        self.full = False
        self.known = False
        self.held_bytes = 0


class _Pool:
    """Bytes that some of the connections hold; who began first comes first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.total_bytes = 0
        self.slots: dict[Slot, None] = {}

    def put(self, slot: Slot, size: int) -> None:
        self.total_bytes += size - slot.held_bytes
        slot.held_bytes = size
        if size:
            self.slots.setdefault(slot)
        else:
            self.slots.pop(slot, None)


class Connections:
    """How many connections there may be, who makes way, and what all of them hold."""

    def __init__(
        self,
        most: int = limits.MAX_CONNECTIONS,
        *,
        turned_away: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``turned_away`` is told the protocol of each that is refused or has to make way."""
        self.most = most
        self._turned_away = turned_away
        # In the order in which they came.
        self._strangers: dict[Slot, None] = {}
        self._known: set[Slot] = set()
        self._pools = {
            False: _Pool(limits.MAX_STRANGERS_BYTES),
            True: _Pool(limits.MAX_BUFFERED_BYTES),
        }

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)

    @property
    def held_bytes(self) -> int:
        """The bytes that all connections hold."""
        return sum(pool.total_bytes for pool in self._pools.values())

    def enter(self, holder: Holder, protocol: str) -> Slot:
        """Give a connection a slot; the oldest idle stranger makes way if there is no room."""
        oldest = None
        if len(self) >= self.most:
            oldest = next((slot for slot in self._strangers if slot.holder.idle), None)
        slot = Slot(holder, protocol)
        slot.full = len(self) >= self.most and oldest is None
        self._strangers[slot] = None
        if oldest is not None:
            # Out of the count at once: it takes a turn of the loop until it is closed.
            self.leave(oldest)
            oldest.holder.abort()
        if slot.full or oldest is not None:
            self._turned_away((oldest or slot).protocol)
        return slot

    def leave(self, slot: Slot) -> None:
        """Forget a connection and what it held; once more does no harm."""
        self._pools[slot.known].put(slot, 0)
        self._strangers.pop(slot, None)
        self._known.discard(slot)

    def trust(self, slot: Slot) -> None:
        """Take note that a connection has shown a key, or needs none."""
        if slot.known or slot not in self._strangers:
            return
        size = slot.held_bytes
        self._pools[False].put(slot, 0)
        del self._strangers[slot]
        self._known.add(slot)
        slot.known = True
        self.hold(slot, size)

    def hold(self, slot: Slot, size: int) -> None:
        """Take note of what a connection holds now; past the bound somebody is dropped for it."""
        if slot not in (self._known if slot.known else self._strangers):
            return
        pool = self._pools[slot.known]
        pool.put(slot, size)
        while pool.total_bytes > pool.most_bytes:
            # Where all are at work there is nobody to blame but the one that wants more.
            oldest = next((each for each in pool.slots if each.holder.idle), slot)
            pool.put(oldest, 0)
            self._turned_away(oldest.protocol)
            oldest.holder.refuse(_TOO_MUCH)
            if oldest is slot:
                break
