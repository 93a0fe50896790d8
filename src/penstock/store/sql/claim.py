"""Claim.

A claim looks at vested pointers, chooses among them, and visits those: one statement for all of
them compares and sets the pointers, leases items and puts the pointers back. It goes on until it
has enough messages, or no vested pointer is left. The process remembers which zones it has seen
vested: most claims need not look (:class:`VestedZones`). A zone of a standard queue that had more
to give than it was asked for is not visited, but taken from: its pointer may stay as it is.

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
from collections import Counter, OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from penstock import limits
from penstock.errors import CorruptRecord
from penstock.store.codec.claimed import FAMILY_BYTES, ClaimedMessages, lease_token
from penstock.store.codec.metadata import decode_metadata
from penstock.store.life import life, log_step
from penstock.store.sql.database import columns
from penstock.store.sql.failures import Lost
from penstock.store.sql.move import ALL
from penstock.store.sql.queues import SqlQueues
from penstock.store.sql.zones import KNOWN_MAX, NEVER_MS, choose, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.model import LeaseRequest
    from penstock.store.codec.claimed import StoredRow
    from penstock.store.sql.connection import Row
    from penstock.store.sql.database import Database
    from penstock.store.sql.session import SqlQueue
    from penstock.store.sql.zones import Zone

# Expired leases and dead letters that a claim which finds nothing sees to.
CATCH_UP_BUDGET: Final = 1_000
# Zones that a visit names beside those that it is to take.
SPARE: Final = 7
# Claims that are served from the zones that were seen vested, between two looks at all of them. A
# claim that takes from deep zones is told of those that have vested meanwhile; by a clock that is
# behind, a pointer may vest before the last look.
LOOK_EVERY: Final = 19
# Zones of each token that a claim which takes from deep zones is told of.
NEWS: Final = 10
# Before every pointer that has vested.
START: Final = (-1, 0)
# How often a claim repeats a visit that found no zone free.
LOST_MAX: Final = 3
# For how long a queue is watched after a claim has found less in it than it asked for.
WATCH_MS: Final = 10_000
# Waiting claims that a vested pointer wakes: how many messages are behind it is not known.
WOKEN: Final = 100
# Visits that met no other process, between two steps up to more zones at a time.
PATIENCE: Final = 4
# A visit in vain doubles the wait, any other makes it a little shorter: so the wait settles where
# about one visit in ten is in vain, however fast the database is.
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
            if self._calm >= PATIENCE:
                self.width, self._calm = min(self._most, self.width + 1), 0


# A zone, its token, and whether it is known to have more to give than it is asked for.
Place = tuple[bytes, int, bool]
# The lane of a zone that gives items, and the time from which on it has some. Unknown after a look:
# items that come late have an earlier time.
Position = tuple[int | None, int]
UNKNOWN: Final[Position] = (None, -1)


class VestedZones:
    """The zones of one queue that this process has seen vested, in the order of their turns.

    A claim serves the first ones and puts those that have more behind the others. If all vested
    zones were seen, they are kept for the next claims; zones that have come are put in front of
    those that were just taken from, and every few claims look at all. If there are more than a
    claim looks at, each of those seen is served once, and the next look goes on behind them.
    Several threads may use it at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Zone -> token.
        self._zones: OrderedDict[bytes, int] = OrderedDict()
        # Zones that had more to give than they were asked for, the last seen of them.
        # With each, where its items begin, and the number of looks before that was found.
        self._deep: OrderedDict[bytes, tuple[Position, int]] = OrderedDict()
        self._looks = 0
        # Whether there are no others, or where the next look begins.
        self.whole = False
        self.after = START
        # Claims that are served before the next look, and when the last one was.
        self._left = 0
        self._looked_ms = 0

    def begin(self) -> bool:
        """Count a claim; return whether it is to look at the zones again."""
        with self._lock:
            self._left -= 1
            return self._left < 0

    def put(self, tokens: dict[bytes, int], left: int, now_ms: int) -> bool:
        """Put the zones that were found behind those of them that are known; false: none."""
        with self._lock:
            self._looked_ms = now_ms
            kept = [zone for zone in self._zones if zone in tokens]
            self._zones = OrderedDict((zone, tokens[zone]) for zone in kept)
            for zone, token in tokens.items():
                self._zones.setdefault(zone, token)
            self._left = left
            self._looks += 1
            return bool(self._zones)

    def positions(self, zones: Sequence[Place]) -> tuple[list[Position], int]:
        """Return where the items of deep zones begin, as found since the last look; its number."""
        with self._lock:
            found = [self._deep.get(zone, (UNKNOWN, 0)) for zone, _, _ in zones]
            places = [place if looks == self._looks else UNKNOWN for place, looks in found]
            return places, self._looks

    def seen(self) -> tuple[list[bytes], int]:
        """Return the zones that are known, and when all were last looked at."""
        with self._lock:
            return list(self._zones), self._looked_ms

    def add(self, zone: bytes, token: int) -> None:
        """Put a zone behind the others that has vested since all were looked at."""
        with self._lock:
            if self.whole:
                self._zones.setdefault(zone, token)

    def clear(self) -> None:
        """Forget the zones."""
        with self._lock:
            self._zones.clear()

    def first(self, count: int) -> tuple[list[Place], int]:
        """Return the first zones with their tokens and whether they are deep; and how many are."""
        with self._lock:
            places = islice(self._zones.items(), count)
            return [(zone, token, zone in self._deep) for zone, token in places], len(self._zones)

    def served(
        self,
        zone: bytes,
        token: int,
        *,
        more: bool,
        position: Position = UNKNOWN,
        looks: int = 0,
    ) -> None:
        """Take a zone from its place; it goes behind the others if it has more to give.

        ``position``: where its items begin, as found after so many ``looks``.
        """
        with self._lock:
            self._zones.pop(zone, None)
            self._deep.pop(zone, None)
            if more:
                self._deep[zone] = position, looks
                if self.whole:
                    self._zones[zone] = token
            if len(self._deep) > KNOWN_MAX:
                self._deep.popitem(last=False)

    def gave_less(self, zone: bytes) -> None:
        """Note that a zone keeps its place, and had less to give than it was asked for."""
        with self._lock:
            self._deep.pop(zone, None)


class SqlClaim(SqlQueues):
    """Claim, and the watch for messages of other processes."""

    def __init__(self, database: Database, random: Callable[[], float]) -> None:
        super().__init__(database, random)
        # Number of a queue -> its contention.
        self._paces: dict[int, ClaimPace] = {}
        # Number of a queue -> its zones that were seen vested.
        self._vested: dict[int, VestedZones] = {}
        self._pause: Callable[[float], object] = threading.Event().wait
        # Number of a queue -> until when it is watched.
        self._watched: dict[int, int] = {}
        self._now_ms = 0

    def claim(
        self, queue_name: str, wants: Sequence[LeaseRequest], now_ms: int
    ) -> list[ClaimedMessages]:
        """Take messages for several claims, each under its own lease.

        They are served in order: those at the end may get nothing.
        """
        self._now_ms = now_ms
        self.refresh(now_ms)
        queue = self.queue(queue_name)
        claims = [_Claim(self.store_id, queue, want, now_ms) for want in wants]
        # A visit does not tell which messages were marked as delayed.
        if life.level:
            self.come_due(now_ms, ALL, queue)
        if self._serve(queue, claims, now_ms) and self.catch_up(
            now_ms, CATCH_UP_BUDGET, into=queue_name
        ):
            # Dead letters of another queue may be here now.
            self._serve(queue, claims, now_ms)
        for claim in claims:
            if claim.rows:
                self.due(claim.deadline_ms)
                if life.level:
                    claim.log_step()
        if any(claim.room for claim in claims):
            # Also if it found something: a server claims for its subscribers again once it is told.
            # A claim that finds all it asked for does not end the watch: another may still wait.
            self._watched[queue.number] = now_ms + WATCH_MS
        return [claim.claimed() for claim in claims]

    def _serve(self, queue: SqlQueue, claims: Sequence[_Claim], now_ms: int) -> bool:
        """Take messages for claims in order; true if there are none, and no process in the way."""
        # A group of a FIFO queue is in one lease at a time, so that claims can't share a visit.
        for together in [[claim] for claim in claims] if queue.fifo else [claims]:
            if not self._take(queue, together, now_ms):
                # Waits are bounded for all claims together.
                return False
        return not any(claim.rows for claim in claims)

    def _look(self, queue: SqlQueue, known: VestedZones, now_ms: int) -> bool:
        """Look at vested pointers, in turn, whichever token they are under; false: none was new.

        Zones that are known and have vested keep their places.
        """
        tunables = self.tunables
        while True:
            began = known.after
            rows = self.database.ask(
                "peek",
                queue=queue.number,
                tokens=walk(self.ring_high, self.random),
                now_ms=now_ms,
                after_ms=began[0],
                after_turn=began[1],
                count=tunables.peek_max,
            )
            if rows or began == START:
                break
            known.after = START
        found = sorted(rows, key=lambda pointer: pointer[2:])
        full = len(found) >= tunables.peek_max
        known.whole = began == START and not full
        # Of several tokens the first ones are looked at, from a random one on.
        known.after = found[-1][2:] if full and self.ring_high == 1 else START
        if len(found) > tunables.selection_max and not tunables.sequential:
            # Other processes look at the same zones.
            found = [found[at] for at in choose(len(found), len(found), self.random)]
        tokens = {pointer[0]: pointer[1] for pointer in found}
        return known.put(tokens, LOOK_EVERY if known.whole else tunables.peek_max, now_ms)

    def _take(self, queue: SqlQueue, claims: Sequence[_Claim], now_ms: int) -> bool:
        """Serve zones until claims are full or no zone is left; false if others were in the way."""
        tunables = self.tunables
        pace = self._paces.setdefault(queue.number, ClaimPace(tunables.selection_max))
        known = self._vested.setdefault(queue.number, VestedZones())
        is_due = known.begin()
        # Whether the zones were looked at by this claim, and whether there may be others.
        looked, more = False, True
        lost = 0
        while room := sum(claim.room for claim in claims):
            places, count = known.first(min(room, pace.width) + SPARE)
            if not places or (is_due and not looked):
                if not more or not self._look(queue, known, now_ms):
                    return True
                looked, more = True, not known.whole
                continue
            width = min(room, count, pace.width)
            quota_max = room
            if not known.whole or count > width:
                quota_max = tunables.dequeue_max
            deep = [] if queue.fifo else [place for place in places[:width] if place[2]]
            if deep and places[0][2]:
                self._take_deep(queue, claims, known, deep, quota_max, now_ms)
                continue
            offered = [place for place in places if queue.fifo or not place[2]]
            width = min(width, len(offered))
            moved, won, passed = self._visit(
                queue, claims, known, offered, width, quota_max, now_ms
            )
            if not looked:
                # Zones that were not free may have been emptied since they were seen. Nothing may
                # be there to take but what another process is at: a look, and a wait after it.
                is_due = is_due or not moved
                continue
            pace.note(wanted=width, won=won, passed=passed)
            self.zones.count(collisions=passed)
            # Zones that were passed by are looked at again: other processes have been there.
            more = more or bool(passed)
            if not moved:
                lost += 1
                if lost > LOST_MAX or any(claim.rows for claim in claims):
                    return lost <= LOST_MAX
                known.clear()
                more = True
                self._pause(pace.pause_ms * (0.5 + self.random()) / 1000)
        return True

    def _wants(self, claims: Sequence[_Claim]) -> dict[str, Any]:
        """Return the claims as statements take them."""
        asked = []
        room = 0
        for claim in claims:
            left = limits.MAX_CLAIM_BYTES - claim.bytes
            bounds = (room, room + claim.room)
            asked.append((claim.lease, claim.deadline_ms, claim.consumer, *bounds, left))
            room += claim.room
        names = ("leases", "deadlines", "consumers", "lows", "highs", "room_bytes")
        return columns(asked, *names)

    def _take_deep(
        self,
        queue: SqlQueue,
        claims: Sequence[_Claim],
        known: VestedZones,
        zones: Sequence[Place],
        quota_max: int,
        now_ms: int,
    ) -> None:
        """Deliver messages of zones that are known to have more than they are asked for."""
        room = sum(claim.room for claim in claims)
        # The first ones give what is left over when the room is shared.
        quotas = [
            min(quota_max, (room + len(zones) - 1 - at) // len(zones)) for at in range(len(zones))
        ]
        all_known, since_ms = known.seen()
        positions, looks = known.positions(zones)
        if len(claims) == len(zones) == 1:
            statement, claim = "take_one", claims[0]
            (rank, from_ms), (zone, _, _) = positions[0], zones[0]
            asked: dict[str, Any] = {
                "zone": zone,
                "quota": quotas[0],
                "rank": rank,
                "from_ms": from_ms,
                "lease": claim.lease,
                "deadline_ms": claim.deadline_ms,
                "consumer": claim.consumer,
                "room_bytes": limits.MAX_CLAIM_BYTES - claim.bytes,
            }
        else:
            statement = "take"
            asked = columns(zones, "zones") | columns(positions, "ranks", "froms")
            asked |= {"quotas": quotas, **self._wants(claims)}
        found = self.database.do(
            lambda: self.database.run(
                statement,
                queue=queue.number,
                **asked,
                tokens=list(range(self.ring_high)),
                known=all_known,
                since_ms=since_ms,
                count=NEWS,
                slot=self.slot,
                now_ms=now_ms,
            )
        )
        self.progress.commits += 1
        rows = [row for row in found if row[0]]
        # Before those that are taken from take their places behind the others.
        for nth, token, _, _, zone, *_ in found:
            if not nth:
                known.add(zone, token)
        given = Counter(row[0] for row in rows)
        # Of the last item of each zone.
        reached: dict[int, Position] = {row[0]: (row[8], row[7]) for row in rows}
        for at, (zone, token, _) in enumerate(zones):
            if given[at + 1] == quotas[at]:
                known.served(zone, token, more=True, position=reached[at + 1], looks=looks)
            else:
                # A visit is to see to its pointer.
                known.gave_less(zone)
        self._deliver(queue, claims, [row[2:8] for row in rows], now_ms)
        if rows and rows[0][1]:
            self.expire(now_ms, CATCH_UP_BUDGET, queue)

    def _deliver(
        self,
        queue: SqlQueue,
        claims: Sequence[_Claim],
        rows: Sequence[tuple[Any, ...]],
        now_ms: int,
    ) -> None:
        """Give messages to the claims under whose leases they are; remove those without payload."""
        by_lease = {claim.lease: claim for claim in claims}
        broken = [
            message_id
            for message_id, attempts, lease, metadata, payload, visible_at_ms in rows
            if not by_lease[lease].deliver(message_id, attempts, metadata, payload, visible_at_ms)
        ]
        if broken:
            self.remove_broken(queue, broken, now_ms)
        if any(claim.full for claim in claims):
            # Other claims that wait are to look again.
            self.wake(queue)

    def _visit(
        self,
        queue: SqlQueue,
        claims: Sequence[_Claim],
        known: VestedZones,
        offered: Sequence[Place],
        width: int,
        quota_max: int,
        now_ms: int,
    ) -> tuple[bool, int, int]:
        """Visit the first zones that are free, and deliver the messages that they give.

        Return whether that changed anything, how many zones were free, and how many before the last
        of them were not.
        """
        sent_ms = now_ms

        def visit() -> list[Row]:
            nonlocal sent_ms
            sent_ms = max(now_ms, self.database.clock())
            return self.database.run(
                "visit_fifo" if queue.fifo else "visit",
                queue=queue.number,
                **columns(offered, "zones", "tokens"),
                width=width,
                room=sum(claim.room for claim in claims),
                quota_max=quota_max,
                **self._wants(claims),
                slot=self.slot,
                turn=self.take_turns(len(offered) + 1),
                stamp=self.stamp(),
                cool_ms=self.tunables.cool_ms,
                clock_ms=sent_ms,
                never_ms=NEVER_MS,
                now_ms=now_ms,
            )

        try:
            rows = self.database.do(visit)
        except Lost:
            # It may be done yet, and nobody will say when.
            self.zones.owe((queue.number, place[0]) for place in offered)
            raise
        self.progress.commits += 1
        # Place of a zone -> whether it has more to give.
        visited: dict[int, bool] = {}
        raised: list[Zone] = []
        expired = moved = False
        for nth, vesting_ms, has_expired, message_id, *_ in rows:
            visited[nth - 1] = vesting_ms <= now_ms
            expired = expired or has_expired
            moved = moved or vesting_ms > now_ms or message_id is not None
            if vesting_ms > now_ms:
                raised.append((queue.number, offered[nth - 1][0]))
        self.zones.note_raised(raised, sent_ms)
        # The visit did not look at zones behind the last that it wanted.
        reached = max(visited) + 1 if len(visited) == width else len(offered)
        for at in range(reached):
            known.served(*offered[at][:2], more=visited.get(at, False))
        if expired and self.expire(now_ms, CATCH_UP_BUDGET, queue)[0]:
            moved = True
        self._deliver(queue, claims, [row[3:] for row in rows if row[3] is not None], now_ms)
        return moved, len(visited), reached - len(visited)

    # --- messages of other processes -------------------------------------------------------

    def take_woken(self) -> dict[str, int | None]:
        """Return the queues that may have got messages to claim since the last call.

        With each, about how many messages it has got; None: the queue is gone.
        """
        if not self.woken:
            return {}
        with self.memory:
            woken, self.woken = self.woken, {}
        return {name: count if name in self.by_name else None for name, count in woken.items()}

    def wake_watched(self, now_ms: int) -> None:
        """Wake claims that wait for queues which have a vested pointer."""
        for number in [*self._vested] if len(self._vested) > len(self.by_number) else ():
            if number not in self.by_number:
                self._vested.pop(number, None)
                self._paces.pop(number, None)
        awake = []
        for number, until_ms in list(self._watched.items()):
            if now_ms >= until_ms or number not in self.by_number:
                self._watched.pop(number, None)
                awake.append(number)
        watched = list(self._watched)
        if watched:
            tokens = list(range(self.ring_high))
            told = {"queues": watched, "tokens": tokens, "now_ms": now_ms}
            awake += [row[0] for row in self.database.ask("vested_queues", **told)]
        for number in awake:
            queue = self.by_number.get(number)
            if queue is not None:
                self.wake(queue, WOKEN)


class _Claim:
    """One of the claims that are served together."""

    def __init__(self, store_id: int, queue: SqlQueue, want: LeaseRequest, now_ms: int) -> None:
        self._queue = queue.name
        self._limit = want.limit
        # Since when its first message could be claimed.
        self._now_ms = self._visible_at_ms = now_ms
        self.lease = want.lease[:FAMILY_BYTES] + b"\0\0"
        self.deadline_ms = now_ms + want.lease_ms
        self.consumer = want.consumer.encode()
        self._token = lease_token(store_id, queue.number, self.lease)
        self.bytes = 0
        self.rows: list[StoredRow] = []

    @property
    def full(self) -> bool:
        """Whether it has all the bytes that one claim may have."""
        return self.bytes >= limits.MAX_CLAIM_BYTES

    @property
    def room(self) -> int:
        """How many more messages it gets."""
        return 0 if self.full else self._limit - len(self.rows)

    def log_step(self) -> None:
        """Write a record of the life-cycle log."""
        ids = [row[0] for row in self.rows]
        log_step("claim", self._queue, ids, self._token, self.consumer.decode())

    def claimed(self) -> ClaimedMessages:
        """Return its messages."""
        waited_ms = max(0, self._now_ms - self._visible_at_ms)
        return ClaimedMessages(self._queue, self._token, self.deadline_ms, self.rows, waited_ms)

    def deliver(
        self,
        message_id: int,
        attempts: int,
        record: bytes | None,
        payload: bytes | None,
        visible_at_ms: int,
    ) -> bool:
        """Add a message; false if it can't be delivered."""
        try:
            if record is None or payload is None:
                return False
            decode_metadata(record)
        except CorruptRecord:
            return False
        if not self.rows:
            self._visible_at_ms = visible_at_ms
        self.bytes += len(payload)
        self.rows.append((message_id, message_id, attempts, record, payload))
        return True
