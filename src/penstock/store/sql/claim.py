"""Claim.

A claim looks at vested pointers, chooses among them, and visits those: one statement for all of
them compares and sets the pointers, leases items and puts the pointers back. It goes on until it
has enough messages, or no vested pointer is left.

A visit names more zones than it takes, and takes the first that are free: passing by a zone that
another process is at costs nothing. If fewer were free than it wanted, other processes need them
too, and the next visits of that queue take fewer at a time; if none was, and the claim has no
message yet, it waits for a moment.

A claim that finds less than it asked for makes this process look, every tenth of a second, whether
a pointer of that queue has vested: other processes publish too, and do not tell this one. After a
while it wakes the claims that may still wait: if there are any they look, find nothing, and the
watch goes on.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from penstock import limits
from penstock.errors import CorruptRecord
from penstock.model import Delivery
from penstock.store.codec.metadata import decode_metadata
from penstock.store.receipts import FAMILY_BYTES, lease_token
from penstock.store.sql.database import columns
from penstock.store.sql.queues import SqlQueues
from penstock.store.sql.zones import NEVER_MS, choose, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.model import LeaseRequest
    from penstock.store.sql.database import Database
    from penstock.store.sql.session import SqlQueue

# Expired leases and dead letters that a claim which finds nothing sees to.
CATCH_UP_BUDGET: Final = 1_000
# Zones that a visit names beside those that it is to take.
SPARE: Final = 7
# How often a claim repeats a visit that found no zone free.
LOST_MAX: Final = 3
# For how long a queue is watched after a claim has found less in it than it asked for.
WATCH_MS: Final = 10_000
# Waiting claims that a vested pointer wakes: how many messages are behind it is not known.
WOKEN: Final = 100
# For how long the server keeps plans. Planning costs more than a claim, and less than a plan that
# is wrong for long about the size of a table.
PLANS_MS: Final = 5_000
# Visits that met no other process, between two steps up to more zones at a time.
PATIENCE: Final = 4
# A visit in vain doubles the wait, any other makes it a little shorter: so the wait settles where
# about one visit in ten is in vain, however fast the database is. The broker lets no other call in
# while a claim waits, therefore the limit.
PAUSE_MIN_MS: Final = 4.0
PAUSE_MAX_MS: Final = 40.0
SHORTER: Final = 0.93


class ClaimPace:
    """Estimate of the contention in one queue: zones to take at a time, and the wait after none.

    A zone is one claimer's at a time. Where zones are scarce a claim does not take all that are
    free. Nothing here waits or draws: the caller does.
    """

    def __init__(self, most: int) -> None:
        self._most = self.width = most
        self.pause_ms = PAUSE_MIN_MS
        # Visits that met no other process, since the width was last changed.
        self._calm = 0

    def note(self, *, wanted: int, won: int, passed: int) -> None:
        """Learn from a visit: how many zones it wanted, won, and passed by."""
        longer = self.pause_ms * (SHORTER if won else 2)
        self.pause_ms = min(PAUSE_MAX_MS, max(PAUSE_MIN_MS, longer))
        if won < wanted:
            self.width, self._calm = max(1, won // 2), 0
        elif not passed:
            self._calm += 1
            if self._calm == PATIENCE:
                self.width, self._calm = min(self._most, self.width + 1), 0


# A pointer that had vested when a claim looked at it: zone, token, when it vests, turn.
_Pointer = tuple[Any, ...]


class SqlClaim(SqlQueues):
    """Claim, and the watch for messages of other processes."""

    def __init__(self, database: Database, random: Callable[[], float]) -> None:
        super().__init__(database, random)
        # Number of a queue -> its contention.
        self._paces: dict[int, ClaimPace] = {}
        self._pause: Callable[[float], object] = threading.Event().wait
        # Number of a queue -> until when it is watched.
        self._watched: dict[int, int] = {}
        self._now_ms = 0
        self._plans_ms = 0

    def claim(
        self, queue_name: str, wants: Sequence[LeaseRequest], now_ms: int
    ) -> list[list[Delivery]]:
        """Take messages for several claims, each under its own lease.

        They are served in order: those at the end may get nothing.
        """
        self._now_ms = now_ms
        self._forget_plans(now_ms)
        self.refresh(now_ms)
        queue = self.queue(queue_name)
        claims = [_Claim(self.store_id, queue, want, now_ms) for want in wants]
        if self._serve(queue, claims, now_ms) and self.catch_up(
            now_ms, CATCH_UP_BUDGET, into=queue_name
        ):
            # Dead letters of another queue may be here now.
            self._serve(queue, claims, now_ms)
        for claim in claims:
            if claim.deliveries:
                self.due(claim.deadline_ms)
        if any(claim.room for claim in claims):
            # Also if it found something: a server claims for its subscribers again once it is told.
            # A claim that finds all it asked for does not end the watch: another may still wait.
            self._watched[queue.number] = now_ms + WATCH_MS
        return [claim.deliveries for claim in claims]

    def _serve(self, queue: SqlQueue, claims: Sequence[_Claim], now_ms: int) -> bool:
        """Take messages for claims in order; true if there are none, and no process in the way."""
        # A group of a FIFO queue is in one lease at a time, so that claims can't share a visit.
        for together in [[claim] for claim in claims] if queue.fifo else [claims]:
            if not self._take(queue, together, now_ms):
                # Waits are bounded for all claims together: the broker lets no other call in.
                return False
        return not any(claim.deliveries for claim in claims)

    def _peek(self, queue: SqlQueue, now_ms: int) -> list[_Pointer]:
        """Look at vested pointers, in turn, whichever token they are under."""
        rows = self.database.ask(
            "peek",
            queue=queue.number,
            tokens=walk(self.ring_high, self.random),
            now_ms=now_ms,
            count=self.tunables.peek_max,
        )
        return sorted(rows, key=lambda pointer: pointer[2:])

    def _take(self, queue: SqlQueue, claims: Sequence[_Claim], now_ms: int) -> bool:
        """Visit zones until claims are full or no zone is left; false if others were in the way."""
        tunables = self.tunables
        pace = self._paces.setdefault(queue.number, ClaimPace(tunables.selection_max))
        found: list[_Pointer] = []
        # Whether there may be vested pointers beside those that were found.
        more = True
        lost = 0
        while room := sum(claim.room for claim in claims):
            if not found:
                found = self._peek(queue, now_ms) if more else []
                if not found:
                    return True
                more = len(found) >= tunables.peek_max
            width = min(room, len(found), pace.width)
            named = min(len(found), width + SPARE)
            places: Sequence[int] = range(named)
            if len(found) > tunables.selection_max and not tunables.sequential:
                places = choose(len(found), named, self.random)
            offered = [found[at] for at in places]
            moved, won, passed, left = self._visit(queue, claims, offered, width, now_ms)
            pace.note(wanted=width, won=won, passed=passed)
            # Zones that were passed by are looked at again: other processes have been there.
            more = more or bool(passed)
            gone = set(places[: won + passed])
            found = [pointer for at, pointer in enumerate(found) if at not in gone] + left
            if not moved:
                lost += 1
                if lost > LOST_MAX or any(claim.deliveries for claim in claims):
                    return lost <= LOST_MAX
                found, more = [], True
                self._pause(pace.pause_ms * (0.5 + self.random()) / 1000)
        return True

    def _visit(
        self,
        queue: SqlQueue,
        claims: Sequence[_Claim],
        offered: Sequence[_Pointer],
        width: int,
        now_ms: int,
    ) -> tuple[bool, int, int, list[_Pointer]]:
        """Visit the first zones that are free, and deliver the messages that they give.

        Return whether that changed anything, how many zones were free, how many before the last of
        them were not, and the visited zones that have more to give.
        """
        asked = []
        room = 0
        for claim in claims:
            left = limits.MAX_CLAIM_BYTES - claim.bytes
            bounds = (room, room + claim.room)
            asked.append((claim.lease, claim.deadline_ms, claim.consumer, *bounds, left))
            room += claim.room
        names = ("leases", "deadlines", "consumers", "lows", "highs", "room_bytes")
        rows = self.database.do(
            lambda: self.database.run(
                "visit_fifo" if queue.fifo else "visit",
                queue=queue.number,
                **columns(offered, "zones", "tokens"),
                width=width,
                room=room,
                quota_max=self.tunables.dequeue_max if len(offered) > width else room,
                **columns(asked, *names),
                slot=self.slot,
                turn=self.take_turns(len(offered) + 1),
                stamp=self.stamp(),
                cool_ms=self.tunables.cool_ms,
                never_ms=NEVER_MS,
                now_ms=now_ms,
            )
        )
        self.progress.commits += 1
        by_lease = {claim.lease: claim for claim in claims}
        # Place of a zone -> whether it has more to give.
        visited: dict[int, bool] = {}
        expired = moved = False
        broken: list[int] = []
        for nth, vesting_ms, has_expired, message_id, attempts, lease, metadata, payload in rows:
            visited[nth - 1] = vesting_ms <= now_ms
            expired = expired or has_expired
            moved = moved or vesting_ms > now_ms or message_id is not None
            if vesting_ms > now_ms:
                self.zones.forget((queue.number, offered[nth - 1][0]))
            if message_id is not None and not by_lease[lease].deliver(
                message_id, attempts, metadata, payload
            ):
                broken.append(message_id)
        # The visit did not look at zones behind the last that it wanted.
        reached = max(visited) + 1 if len(visited) == width else len(offered)
        passed = reached - len(visited)
        self.zones.collisions += passed
        if expired and self.expire(now_ms, CATCH_UP_BUDGET, queue)[0]:
            moved = True
        if broken:
            self.remove_broken(queue, broken, now_ms)
        if any(claim.full for claim in claims):
            # Other claims that wait are to look again.
            self.wake(queue)
        left_over = [offered[at] for at, gives in sorted(visited.items()) if gives]
        return moved, len(visited), passed, left_over

    # --- messages of other processes -------------------------------------------------------

    def take_woken(self) -> dict[str, int | None]:
        """Return the queues that may have got messages to claim since the last call.

        With each, about how many messages it has got; None: the queue is gone.
        """
        if not self.woken:
            return {}
        woken, self.woken = self.woken, {}
        return {name: count if name in self.by_name else None for name, count in woken.items()}

    def wake_watched(self, now_ms: int) -> None:
        """Wake claims that wait for queues which have a vested pointer."""
        awake = []
        for number, until_ms in list(self._watched.items()):
            if now_ms >= until_ms or number not in self.by_number:
                del self._watched[number]
                awake.append(number)
        if self._watched:
            tokens = list(range(self.ring_high))
            told = {"queues": list(self._watched), "tokens": tokens, "now_ms": now_ms}
            awake += [row[0] for row in self.database.ask("vested_queues", **told)]
        for number in awake:
            queue = self.by_number.get(number)
            if queue is not None:
                self.wake(queue, WOKEN)

    def _forget_plans(self, now_ms: int) -> None:
        if self._plans_ms <= now_ms < self._plans_ms + PLANS_MS:
            return
        # No plan is kept yet when the store has just been opened.
        if self._plans_ms and self.database.dialect == "postgresql":
            self.database.ask("forget_plans")
        self._plans_ms = now_ms


class _Claim:
    """One of the claims that are served together."""

    def __init__(self, store_id: int, queue: SqlQueue, want: LeaseRequest, now_ms: int) -> None:
        self._queue = queue.name
        self._limit = want.limit
        self.lease = want.lease[:FAMILY_BYTES] + b"\0\0"
        self.deadline_ms = now_ms + want.lease_ms
        self.consumer = want.consumer.encode()
        self._token = lease_token(store_id, queue.number, self.lease)
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
        """Add a message; false if it can't be delivered."""
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
