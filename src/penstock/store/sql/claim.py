"""Messages go out to workers: claim.

A claim looks at pointers that have vested, chooses among them, and visits those: one statement for
all of them compares and sets the pointers, leases items and puts the pointers back. It goes on
until it has what it wants, or no pointer is left that has vested.

A visit is told of more zones than it takes, and takes the first that are free: zones that others
are at cost nothing but being passed by. If fewer were free than it wanted, others need them too,
and the next visits of that queue take fewer at a time; if none was, and the claim has nothing yet,
it waits for a moment.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock import limits
from penstock.errors import CorruptRecord
from penstock.model import Delivery
from penstock.store.codec.metadata import decode_metadata
from penstock.store.receipts import FAMILY_BYTES, lease_token
from penstock.store.sql.claim_pacing import Crowding
from penstock.store.sql.tokens import choose, walk
from penstock.store.sql.zones import NEVER_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.model import Want
    from penstock.store.sql.maintain import Upkeep
    from penstock.store.sql.session import Core, Queue

__all__ = ["Claiming"]

# What comes due elsewhere that a claim which finds nothing sees to.
CATCH_UP_BUDGET: Final = 1_000
# Zones that a visit is told of beside those that it is to take.
SPARE: Final = 7
# How often a visit is made again that came to nothing because others were there.
LOST_MAX: Final = 3


class Pointer(NamedTuple):
    """A pointer that had vested when it was looked at."""

    zone: bytes
    token: int
    vesting_ms: int
    turn: int


class Claiming:
    """Claim."""

    def __init__(
        self, core: Core, upkeep: Upkeep, pause: Callable[[float], object] | None = None
    ) -> None:
        self._core = core
        self._upkeep = upkeep
        self._crowding = Crowding()
        # Waits for so many seconds.
        self._pause = pause or threading.Event().wait

    def claim(self, queue_name: str, wants: Sequence[Want], now_ms: int) -> list[list[Delivery]]:
        """Take messages for several claims, each under its own lease.

        They are served in order: those at the end may get nothing.
        """
        core = self._core
        core.refresh(now_ms)
        queue = core.queue(queue_name)
        claims = [_Claim(core, queue, want, now_ms) for want in wants]
        if self._serve(queue, claims, now_ms) and self._upkeep.catch_up(
            now_ms, CATCH_UP_BUDGET, into=queue_name
        ):
            # What another queue has failed may be here now.
            self._serve(queue, claims, now_ms)
        for claim in claims:
            if claim.deliveries:
                core.due(claim.deadline_ms)
        return [claim.deliveries for claim in claims]

    def _serve(self, queue: Queue, claims: Sequence[_Claim], now_ms: int) -> bool:
        """Take messages for claims in order; say whether there are none, and nobody in the way."""
        # A group of a FIFO queue is in one lease at a time, so that claims can't share a visit.
        for together in [[claim] for claim in claims] if queue.fifo else [claims]:
            if not self._take(queue, together, now_ms):
                # Waits are bounded for all claims together: the broker lets nobody else in.
                return False
        return not any(claim.deliveries for claim in claims)

    def _peek(self, queue: Queue, tokens: list[int], now_ms: int) -> list[Pointer]:
        core = self._core
        rows = core.database.do(
            lambda: core.database.run(
                "peek", queue=queue.number, tokens=tokens, now_ms=now_ms,
                count=core.tunables.peek_max,
            ),
            again=True,
        )  # fmt: skip
        return [Pointer(*row) for row in rows]

    def _take(self, queue: Queue, claims: Sequence[_Claim], now_ms: int) -> bool:
        """Visit zones until nothing is wanted or left; false if others were in the way."""
        core, tunables = self._core, self._core.tunables
        found: list[Pointer] = []
        # Whether there may be vested pointers beside those that were found.
        more = True
        lost = 0
        while room := sum(claim.room for claim in claims):
            if not found:
                found = self._peek(queue, walk(core.ring_high, core.random), now_ms) if more else []
                if not found:
                    return True
                more = len(found) >= tunables.peek_max
                # In turn, whichever token they are under.
                found.sort(key=lambda pointer: (pointer.vesting_ms, pointer.turn))
            most = tunables.selection_max
            width = min(room, len(found), self._crowding.width(queue.number, most))
            places = self._choose(len(found), width)
            visit = self._visit(queue, claims, [found[at] for at in places], width, now_ms)
            self._crowding.note(
                queue.number, most, wanted=width, won=visit.won, passed=visit.passed
            )
            # Whoever was passed by is looked at anew: others have been there.
            more = more or bool(visit.passed)
            gone = set(places[: visit.won + visit.passed])
            found = [pointer for at, pointer in enumerate(found) if at not in gone] + visit.left
            if not visit.moved:
                lost += 1
                if lost > LOST_MAX or any(claim.deliveries for claim in claims):
                    return lost <= LOST_MAX
                found, more = [], True
                pause_ms = self._crowding.pause_ms(queue.number) * (0.5 + core.random())
                self._pause(pause_ms / 1000)
        return True

    def _choose(self, count: int, width: int) -> Sequence[int]:
        """Choose zones to visit among those that were found, and some to spare."""
        tunables = self._core.tunables
        wanted = min(count, width + SPARE)
        if count <= tunables.selection_max or tunables.sequential:
            return range(wanted)
        return choose(count, wanted, self._core.random)

    def _visit(
        self,
        queue: Queue,
        claims: Sequence[_Claim],
        offered: Sequence[Pointer],
        width: int,
        now_ms: int,
    ) -> _Visit:
        """Visit the first zones that are free, and deliver what they give."""
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
                zones=[pointer.zone for pointer in offered],
                tokens=[pointer.token for pointer in offered],
                width=width,
                room=low,
                quota_max=core.tunables.dequeue_max if len(offered) > width else low,
                leases=[claim.lease for claim in claims],
                deadlines=[claim.deadline_ms for claim in claims],
                consumers=[claim.consumer for claim in claims],
                lows=lows,
                highs=highs,
                room_bytes=[limits.MAX_CLAIM_BYTES - claim.bytes for claim in claims],
                slot=core.slot,
                turn=core.take_turns(len(offered) + 1),
                stamp=core.stamp(),
                cool_ms=core.tunables.cool_ms,
                never_ms=NEVER_MS,
                now_ms=now_ms,
            )
        )
        core.progress.commits += 1
        by_lease = {claim.lease: claim for claim in claims}
        # Place of a zone -> whether it has more to give
        visited: dict[int, bool] = {}
        expired = moved = False
        broken: list[int] = []
        for nth, vesting_ms, has_expired, message_id, attempts, lease, metadata, payload in rows:
            visited[nth - 1] = vesting_ms <= now_ms
            expired = expired or has_expired
            moved = moved or vesting_ms > now_ms or message_id is not None
            if vesting_ms > now_ms:
                core.zones.forget((queue.number, offered[nth - 1].zone))
            if message_id is not None:
                claim = by_lease[lease]
                if not claim.deliver(message_id, attempts, metadata, payload):
                    broken.append(message_id)
        # Those behind the last that was wanted were not looked at.
        reached = max(visited) + 1 if len(visited) == width else len(offered)
        passed = reached - len(visited)
        core.zones.collisions += passed
        if expired and self._upkeep.expire(now_ms, CATCH_UP_BUDGET, queue)[0]:
            moved = True
        if broken:
            self._upkeep.remove_broken(queue, broken, now_ms)
        if any(claim.full for claim in claims):
            # Others that wait are to look again.
            core.wake(queue)
        left = [offered[at] for at, gives in sorted(visited.items()) if gives]
        return _Visit(moved, len(visited), passed, left)


class _Visit(NamedTuple):
    """What came of a visit.

    ``moved``: anything is different now. ``won``: zones that were free, ``passed`` those before
    the last of them that were not. ``left``: of those visited, who has more to give.
    """

    moved: bool
    won: int
    passed: int
    left: list[Pointer]


class _Claim:
    """One of the claims that are served together."""

    def __init__(self, core: Core, queue: Queue, want: Want, now_ms: int) -> None:
        self._queue = queue.name
        self._limit = want.limit
        self.lease = want.lease[:FAMILY_BYTES] + b"\0\0"
        self.deadline_ms = now_ms + want.lease_ms
        self.consumer = want.consumer.encode()
        self._token = lease_token(core.identity.store_id, queue.number, self.lease)
        self.bytes = 0
        self.deliveries: list[Delivery] = []

    @property
    def full(self) -> bool:
        """Whether it has all the bytes that one claim may have."""
        return self.bytes >= limits.MAX_CLAIM_BYTES

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
