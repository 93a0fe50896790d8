"""Zones: the pointers of Q_C, what this process knows of them, and their collection.

**Nothing is orphaned.** A zone with items has a pointer, because

* a publish holds the lock of ``log_head``, and says there which ``zones_version`` it knows zones
  of. Who collects takes that lock first, so that no publish is under way; then looks, with a
  statement of its own that sees all that was committed before, whether the zone has items; and
  raises the version. A publish that trusted its memory writes nothing then, and asks anew;
* whoever else puts messages into queues (assignments, backfills, moves, redrives) locks the rows
  of p that it counts on (``FOR KEY SHARE``), which a collection skips, or waits for one to end and
  makes the zone again;
* items that come back into a zone (release, expiry) have been there all the time.

**Nothing is forgotten.** A pointer is never later than its zone's earliest item. Who raises it has
seen the zone as of a moment ago, and somebody who read p before may be about to commit an item. So
a pointer that goes from vested to not vested is first put ``cool_ms`` ahead and then looked at
again; one that is written by anybody meanwhile has another ``lease_id``, and is not raised at all.
A process that trusts its memory of p does so for ``trust_ms`` only. One that finds, when it has
committed, that this took longer (it waited for a lock, it was paused) looks at its pointers again,
and lowers what was raised meanwhile: after a publish, and after whatever else lets something be
seen (release, expiry, in FIFO queues ack and removal). Should it die before that, its item is late
by no more than the lease or the delay of another; in a zone that nothing else is in, until the
collection comes by, which finds that the zone is not empty and has it looked at.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError
from penstock.store.sql.tokens import token_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.store.sql.session import Core

__all__ = ["NEVER_MS", "Zones"]

log = logging.getLogger(__name__)

# When the pointer of an empty zone vests.
NEVER_MS: Final = 1 << 62
KNOWN_MAX: Final = 100_000
COLLECT_MAX: Final = 100
NET_PAGE: Final = 1_000

Zone = tuple[int, bytes]


class Zones:
    """Makes sure of pointers, and collects those that nobody needs."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # Zones whose pointer was seen vested, and when.
        self._vested: OrderedDict[Zone, int] = OrderedDict()
        self._version = -1
        # Zones that the transaction which is under way lets something be seen in, and from when on.
        self._lowered: dict[Zone, int] = {}
        # Zones that were to be looked at again when the database was away.
        self._owed: dict[Zone, int] = {}
        # How far the slow nets have got.
        self._idle_at: Zone = (-1, b"")
        self._orphan_at: tuple[int, int] = (-1, 0)
        self.collisions = 0
        self.collected = 0
        self.orphans = 0

    # --- what is known ---------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The ``zones_version`` that what is known here belongs to."""
        if self._version != self._core.head.zones_version:
            self._vested.clear()
            self._version = self._core.head.zones_version
        return self._version

    def unsure(self, wanted: Mapping[Zone, int], now_ms: int) -> dict[Zone, int]:
        """Return those zones of which it is not known that their pointer has vested."""
        trust_ms = self._core.tunables.trust_ms
        vested = self._vested if self.version >= 0 else {}
        return {
            zone: at_ms
            for zone, at_ms in wanted.items()
            if (seen := vested.get(zone)) is None or not seen <= now_ms <= seen + trust_ms
        }

    def saw_vested(self, zone: Zone, now_ms: int) -> None:
        """Note that a zone's pointer has vested."""
        self._vested[zone] = now_ms
        self._vested.move_to_end(zone)
        if len(self._vested) > KNOWN_MAX:
            self._vested.popitem(last=False)

    def forget(self, zone: Zone) -> None:
        """Note that a zone's pointer may have been raised."""
        self._vested.pop(zone, None)

    def token(self, zone: Zone) -> int:
        """Return the token of a zone that is made now."""
        return token_of(*zone, self._core.ring_size)

    # --- making sure -------------------------------------------------------------------------

    def ensure(self, wanted: Mapping[Zone, int], now_ms: int) -> None:
        """Have zones a pointer that is early enough, in the transaction that puts items in them."""
        core, database, zones = self._core, self._core.database, sorted(wanted)
        # A token of a ring that another process has made smaller would be looked at by nobody.
        core.ring_size, core.ring_high = database.run("read_ring")[0]
        queues, names = [queue for queue, _ in zones], [name for _, name in zones]
        while True:
            database.run(
                "make_zones",
                queues=queues,
                zones=names,
                tokens=[self.token(zone) for zone in zones],
                vestings=[wanted[zone] for zone in zones],
                turn=core.take_turns(1),
            )
            # One that was being collected is gone when its row has been waited for.
            if database.run("hold_zones", queues=queues, zones=names)[0][0] == len(zones):
                break
        self.lower(wanted, now_ms)

    def lower(self, wanted: Mapping[Zone, int], now_ms: int) -> None:
        """Have pointers vest when items do that come (back) into their zones, or are next there.

        Within a transaction of :meth:`Core.change`, which looks again if it takes long.
        """
        for zone, vesting_ms in wanted.items():
            self._lowered[zone] = min(vesting_ms, self._lowered.get(zone, vesting_ms))
        self._lower(wanted, now_ms)

    def _lower(self, wanted: Mapping[Zone, int], now_ms: int) -> None:
        zones = sorted(wanted)
        if zones:
            self._core.database.run(
                "lower_zones",
                queues=[queue for queue, _ in zones],
                zones=[name for _, name in zones],
                vestings=[wanted[zone] for zone in zones],
                now_ms=now_ms,
                threshold_ms=self._core.tunables.threshold_ms,
                turn=self._core.take_turns(1),
                stamp=self._core.stamp(),
            )

    @contextmanager
    def sure(
        self, wanted: Mapping[Zone, int] | None = None, *, since_ms: int | None = None
    ) -> Iterator[None]:
        """Have pointers early enough, however long that takes which is done and committed inside.

        Without zones, of those that :meth:`lower` is told of. ``since_ms``: as of when pointers
        were trusted, if that was before.
        """
        core = self._core
        began_ms = core.clock() if since_ms is None else min(core.clock(), since_ms)
        self._lowered = {}
        yield
        zones = self._lowered if wanted is None else wanted
        now_ms = core.clock()
        # Half of the time, for clocks of others that are not quite the same.
        patient_ms = (core.tunables.cool_ms - core.tunables.trust_ms) // 2
        late = zones if now_ms - began_ms > patient_ms else {}
        if late or self._owed:
            self.look_again(late, now_ms)

    def look_again(self, zones: Mapping[Zone, int], now_ms: int) -> None:
        """Lower pointers that somebody has raised who did not see what is committed now."""
        owed = {**self._owed, **zones}
        try:
            self._core.database.do(lambda: self._lower(owed, now_ms), again=True)
        except PenstockError as error:
            # What was asked for is committed, and must neither fail for this nor be done again.
            log.warning("%d zones are looked at again with the next change: %s", len(owed), error)
            self._owed = owed
        else:
            self._owed = {}

    # --- letting go --------------------------------------------------------------------------

    def collect(self, now_ms: int) -> int:
        """Remove the pointers of zones that have been empty for long enough; say how many."""
        core = self._core
        before_ms = now_ms - core.tunables.min_inactive_ms
        found = core.database.do(
            lambda: core.database.run("idle_zones", before_ms=before_ms, count=COLLECT_MAX),
            again=True,
        )
        gone: list[Zone] = core.change(lambda: self._collect(found, before_ms)) if found else []
        for zone in gone:
            self.forget(zone)
        self.collected += len(gone)
        if core.ring_high > core.ring_size:
            self._narrow(now_ms)
        return len(gone)

    def _narrow(self, now_ms: int) -> None:
        """Have claims look at fewer tokens, when zones of a larger ring are gone.

        No zone is missed: whoever makes one takes a token below ``ring_size``, and a change of
        that has waited for all who knew another. So nothing comes to be at the tokens above.
        """
        core, database = self._core, self._core.database
        size, high, used = database.do(lambda: database.run("ring_in_use"), again=True)[0]
        # By half or to the end: every process reads its queues again for it.
        if high > size and (used == size or used * 2 <= high):
            core.change(lambda: self._put_ring_high(now_ms), again=True)

    def _put_ring_high(self, now_ms: int) -> None:
        core = self._core
        core.lock_head()
        core.ring_high = core.database.run("put_ring_high")[0][0]
        core.changed(now_ms)

    def _collect(self, found: list[tuple[int, bytes, int]], before_ms: int) -> list[Zone]:
        core, database = self._core, self._core.database
        core.lock_head()
        held = database.run(
            "lock_pointers",
            queues=[queue for queue, _, _ in found],
            zones=[zone for _, zone, _ in found],
            tokens=[token for _, _, token in found],
        )
        if held:
            held = database.run(
                "lock_zones",
                queues=[queue for queue, _ in held],
                zones=[zone for _, zone in held],
                before_ms=before_ms,
            )
        if not held:
            return []
        gone: list[Zone] = [
            (queue, zone)
            for queue, zone in database.run(
                "collect_zones",
                queues=[queue for queue, _ in held],
                zones=[zone for _, zone in held],
            )
        ]
        kept = set(held).difference(gone)
        if kept:
            database.run(
                "revive_zones",
                queues=[queue for queue, _ in kept],
                zones=[zone for _, zone in kept],
                now_ms=before_ms + core.tunables.min_inactive_ms,
                stamp=core.stamp(),
            )
        if gone:
            version = database.run("bump_zones")[0][0]
            core.head = core.head._replace(zones_version=version)
        return gone

    def look_for_idle(self, now_ms: int) -> int:
        """Go on with the look for empty zones that nobody visits; say how many there were."""
        core = self._core
        queue, zone = self._idle_at
        rows = core.database.do(
            lambda: core.database.run("find_idle", queue=queue, zone=zone, count=NET_PAGE),
            again=True,
        )
        self._idle_at = (rows[-1][0], rows[-1][1]) if len(rows) == NET_PAGE else (-1, b"")
        idle = [(queue, zone) for queue, zone, empty in rows if empty]
        if idle:
            core.database.do(
                lambda: core.database.run(
                    "mark_idle",
                    queues=[queue for queue, _ in idle],
                    zones=[zone for _, zone in idle],
                    now_ms=now_ms,
                ),
                again=True,
            )
        return len(idle)

    def look_for_orphans(self, now_ms: int) -> int:
        """Go on with the look for items whose zone has no pointer; say how many there were."""
        core = self._core
        queue, message_id = self._orphan_at
        rows = core.database.do(
            lambda: core.database.run(
                "find_orphans", queue=queue, message_id=message_id, count=NET_PAGE
            ),
            again=True,
        )
        self._orphan_at = (rows[-1][0], rows[-1][1]) if len(rows) == NET_PAGE else (-1, 0)
        orphaned: dict[Zone, int] = {}
        for number, _, zone, vesting_ms, orphan in rows:
            if orphan and number in core.by_number:
                key = (number, zone)
                orphaned[key] = min(vesting_ms, orphaned.get(key, vesting_ms))
        if orphaned:
            log.error("%d zones had items and no pointer; they have one now", len(orphaned))
            core.change(lambda: self.ensure(orphaned, now_ms))
            self.orphans += len(orphaned)
        return len(orphaned)
