"""Messages go out to workers: claim.

A claim looks at pointers that have vested, chooses among them, and visits those: one statement for
all of them compares and sets the pointers, leases items and puts the pointers back. It goes on
until it has what it wants, or no pointer is left that has vested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.codec.metadata import decode_metadata
from penstock.errors import CorruptRecord
from penstock.model import Delivery
from penstock.stores.leases import family_of
from penstock.stores.receipts import lease_token
from penstock.stores.sql.ring import choose, walk
from penstock.stores.sql.zones import NEVER_MS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from penstock.stores.plans import Want
    from penstock.stores.sql.core import Core, Queue
    from penstock.stores.sql.upkeep import Upkeep

__all__ = ["Claiming"]

# What comes due elsewhere that a claim which finds nothing sees to.
CATCH_UP_BUDGET: Final = 1_000


class Claiming:
    """Claim."""

    def __init__(self, core: Core, upkeep: Upkeep) -> None:
        self._core = core
        self._upkeep = upkeep

    def claim(self, queue_name: str, wants: Sequence[Want], now_ms: int) -> list[list[Delivery]]:
        """Take messages for several claims, each under its own lease.

        They are served in order: those at the end may get nothing.
        """
        core = self._core
        core.refresh(now_ms)
        queue = core.queue(queue_name)
        claims = [_Claim(core, queue, want, now_ms) for want in wants]
        # A group of a FIFO queue is in one lease at a time, so that claims can't share a visit.
        for together in [[claim] for claim in claims] if queue.fifo else [claims]:
            self._take(queue, together, now_ms)
        if not any(claim.deliveries for claim in claims) and self._upkeep.catch_up(
            now_ms, CATCH_UP_BUDGET
        ):
            # What another queue has failed may be here now.
            queue = core.queue(queue_name)
            for together in [[claim] for claim in claims] if queue.fifo else [claims]:
                self._take(queue, together, now_ms)
        for claim in claims:
            if claim.deliveries:
                core.due(claim.deadline_ms)
        return [claim.deliveries for claim in claims]

    def ready_zones(self, queue_name: str, now_ms: int) -> int:
        """Return how many of the zones that a claim looks at seem to have something."""
        core = self._core
        core.refresh(now_ms)
        queue = core.queue(queue_name)
        tokens = list(range(core.ring_high))
        return len(self._peek(queue, tokens, now_ms))

    def _peek(self, queue: Queue, tokens: list[int], now_ms: int) -> list[tuple[Any, ...]]:
        core = self._core
        return core.database.do(
            lambda: core.database.run(
                "peek", queue=queue.number, tokens=tokens, now_ms=now_ms,
                count=core.tunables.peek_max,
            ),
            again=True,
        )  # fmt: skip

    def _take(self, queue: Queue, claims: Sequence[_Claim], now_ms: int) -> None:
        core, tunables = self._core, self._core.tunables
        # Visits that came to nothing, because others were there: they are made again, not for ever.
        lost = 0
        while (room := sum(claim.room for claim in claims)) and lost <= tunables.selection_max:
            found = self._peek(queue, walk(core.ring_high, core.random), now_ms)
            if not found:
                return
            # In turn, whichever token they are under.
            found.sort(key=lambda row: (row[3], row[4]))
            most = len(found) if tunables.sequential else tunables.selection_max
            chosen = [found[at] for at in choose(
                len(found), tunables.selection_share, most, core.random
            )][: min(room, tunables.selection_max)]  # fmt: skip
            quotas = _shares(room, len(chosen))
            if len(found) > len(chosen):
                quotas = [min(quota, tunables.dequeue_max) for quota in quotas]
            if not self._visit(queue, claims, chosen, quotas, now_ms):
                lost += 1

    def _visit(
        self,
        queue: Queue,
        claims: Sequence[_Claim],
        chosen: Sequence[tuple[Any, ...]],
        quotas: list[int],
        now_ms: int,
    ) -> bool:
        """Visit zones, and deliver what they give; say whether anything is different now."""
        core = self._core
        lows, highs = [], []
        low = 0
        for claim in claims:
            lows.append(low)
            low += claim.room
            highs.append(low)
        rows = core.database.do(
            lambda: core.database.run(
                "visit_fifo" if queue.fifo else "visit",
                queue=queue.number,
                zones=[row[0] for row in chosen],
                tokens=[row[1] for row in chosen],
                seen=[row[2] for row in chosen],
                quotas=quotas,
                leases=[claim.lease for claim in claims],
                deadlines=[claim.deadline_ms for claim in claims],
                consumers=[claim.consumer for claim in claims],
                lows=lows,
                highs=highs,
                room_bytes=[claim.most_bytes - claim.bytes for claim in claims],
                slot=core.slot,
                turn=core.take_turns(len(chosen) + 1),
                stamp=core.stamp(),
                cool_ms=core.tunables.cool_ms,
                never_ms=NEVER_MS,
                now_ms=now_ms,
            )
        )
        core.commits += 1
        by_lease = {claim.lease: claim for claim in claims}
        visited = set()
        expired = moved = False
        broken: list[int] = []
        for zone, vesting_ms, has_expired, message_id, attempts, lease, metadata, payload in rows:
            visited.add(zone)
            expired = expired or has_expired
            moved = moved or vesting_ms > now_ms or message_id is not None
            if vesting_ms > now_ms:
                core.zones.forget((queue.number, zone))
            if message_id is not None:
                claim = by_lease[lease]
                if not claim.deliver(message_id, attempts, metadata, payload):
                    broken.append(message_id)
        core.zones.collisions += len(chosen) - len(visited)
        if expired and self._upkeep.expire(now_ms, CATCH_UP_BUDGET, queue)[0]:
            moved = True
        if broken:
            self._upkeep.remove_broken(queue, broken, now_ms)
        if any(claim.full for claim in claims):
            # Others that wait are to look again.
            core.wake(queue)
        return moved


class _Claim:
    """One of the claims that are served together."""

    def __init__(self, core: Core, queue: Queue, want: Want, now_ms: int) -> None:
        self._queue = queue.name
        self._limit = want.limit
        self.most_bytes = want.most_bytes
        self.lease = family_of(want.lease) + b"\0\0"
        self.deadline_ms = now_ms + want.lease_ms
        self.consumer = want.consumer.encode()
        self._token = lease_token(core.identity.store_id, queue.number, self.lease)
        self.bytes = 0
        self.deliveries: list[Delivery] = []

    @property
    def full(self) -> bool:
        """Whether it has all the bytes that one claim may have."""
        return self.bytes >= self.most_bytes

    @property
    def room(self) -> int:
        """How many more messages it gets."""
        return 0 if self.full else self._limit - len(self.deliveries)

    def deliver(
        self, message_id: int, attempts: int, record: bytes | None, payload: bytes | None
    ) -> bool:
        """Take a message; false if it can't be delivered."""
        try:
            if record is None or payload is None:
                return False
            metadata = decode_metadata(record)
        except CorruptRecord:
            return False
        self.bytes += len(payload)
        self.deliveries.append(
            Delivery(
                message_id,
                self._queue,
                payload,
                metadata.attributes,
                metadata.group,
                metadata.priority,
                attempts,
                metadata.published_at_ms,
                f"{self._token}-{message_id:016x}",
                self.deadline_ms,
            )
        )
        return True


def _shares(room: int, count: int) -> list[int]:
    """Share a batch between zones; what can't be shared evenly goes to the first."""
    each, more = divmod(room, count)
    return [each + (at < more) for at in range(count)]
