"""Which leases are held, when they must be extended, and when they are lost. Pure bookkeeping.

Deadlines here are on the client's own clock and counted from when an answer came, so that no two
clocks need agree; a tenth of the lease is set aside for the way that the answer took.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.model import Outcome

__all__ = ["Keeper"]

# An extension is asked for this many times within a lease.
BEATS: Final = 3
MARGIN: Final = 10


class _Group:
    """Receipts that were claimed or extended together."""

    __slots__ = ("deadline_ms", "lease_ms", "next_ms", "receipts")

    def __init__(self, receipts: Iterable[str], lease_ms: int, now_ms: int) -> None:
        self.receipts = dict.fromkeys(receipts)
        self.lease_ms = lease_ms
        self.deadline_ms = now_ms + lease_ms - lease_ms // MARGIN
        self.next_ms = now_ms + lease_ms // BEATS


class Keeper:
    """The leases that a client holds."""

    def __init__(self) -> None:
        self._group_of: dict[str, _Group] = {}
        self._groups: dict[_Group, None] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def hold(self, receipts: Iterable[str], *, lease_ms: int, now_ms: int) -> None:
        """Keep these from now on; they were given or extended ``lease_ms`` at ``now_ms``."""
        group = _Group(receipts, lease_ms, now_ms)
        self.forget(group.receipts)
        if group.receipts:
            self._groups[group] = None
            self._group_of.update(dict.fromkeys(group.receipts, group))

    def forget(self, receipts: Iterable[str]) -> None:
        """Keep these no more."""
        for receipt in receipts:
            group = self._group_of.pop(receipt, None)
            if group is not None:
                del group.receipts[receipt]
                if not group.receipts:
                    self._groups.pop(group, None)

    def live(self, receipt: str, now_ms: int) -> bool:
        """Whether a receipt is held, and surely not past its deadline."""
        group = self._group_of.get(receipt)
        return group is not None and now_ms < group.deadline_ms

    def due(self, now_ms: int) -> list[tuple[list[str], int]]:
        """Return what is to be extended now, and for how long; each is returned once a beat."""
        due = []
        for group in self._groups:
            if group.next_ms <= now_ms:
                group.next_ms = now_ms + max(1, group.lease_ms // BEATS)
                due.append((list(group.receipts), group.lease_ms))
        return due

    def extended(self, outcomes: Sequence[Outcome], *, lease_ms: int, asked_ms: int) -> list[str]:
        """Note the answer to an extension that was asked for; return what is lost."""
        held = [each for each in outcomes if each.receipt in self._group_of]
        lost = [each.receipt for each in held if not each.ok]
        self.forget(lost)
        self.hold([each.receipt for each in held if each.ok], lease_ms=lease_ms, now_ms=asked_ms)
        return lost

    def lapsed(self, now_ms: int) -> list[str]:
        """Return, and keep no more, what is past its deadline."""
        lost = [
            receipt
            for group in self._groups
            if group.deadline_ms <= now_ms
            for receipt in group.receipts
        ]
        self.forget(lost)
        return lost

    def next_ms(self) -> int | None:
        """Return when something is to be done next."""
        return min((min(g.next_ms, g.deadline_ms) for g in self._groups), default=None)
