"""Zones: the pointers of Q_C, what this process knows of them, their tokens and their collection.

**No zone is orphaned.** A zone with items has a pointer, because

* a publish holds the heads of its logs, and says there which ``zones_version`` its knowledge of
  zones has. A collection first locks the head of the zone's log (all heads, for the zone of the
  messages without a group), so that no publish into the zone is under way; then looks, with a
  statement of its own that sees everything committed before, whether the zone has items; and raises
  the version in those heads. A publish that relied on its memory writes nothing then, and looks
  again;
* other verbs that put messages into queues (assign, fill, move, redrive) lock the rows of p that
  they rely on (``FOR KEY SHARE``). A collection skips those rows; a verb that waited for a
  collection makes the zone again;
* items that come back into a zone (release, expiry) have been there all the time.

**No item is forgotten.** A pointer is never later than its zone's earliest item. A claim that
raises a pointer has seen the zone as of a moment ago, and a process that read p before may be about
to commit an item. So a pointer that goes from vested to not vested is first put ``cool_ms`` ahead
and then looked at again; a pointer that another process has written meanwhile has another
``lease_id``, and is not raised at all. A process relies on its memory of p for ``trust_ms`` only.
If its commit took longer (it waited for a lock, it was paused), it looks at its pointers again and
lowers those that were raised meanwhile: after a publish, and after every change that makes an item
visible (release, expiry, in FIFO queues ack and removal). A visit that took long may have been
committed after the time of that second look: it has its zones looked at once more. If a process
dies before that, an item is late by no more than the lease or the delay of another; in a zone with
no other item, until the collection finds that the zone is not empty and has it looked at.

**Tokens.** Pointers of one token lie together, and a claim walks the tokens from a random one on,
so that claims on many machines begin at different places. A zone keeps its token until its pointer
is collected: the ring may grow or shrink at any time.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from zlib import crc32

from penstock.errors import PenstockError
from penstock.store.sql.database import columns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from penstock.store.sql.session import SqlSession

log = logging.getLogger(__name__)

# When the pointer of an empty zone vests.
NEVER_MS: Final = 1 << 62
KNOWN_MAX: Final = 100_000
# Zones that one sweep collects at most, in a transaction for each log.
COLLECT_MAX: Final = 1_000
NET_PAGE: Final = 1_000

Zone = tuple[int, bytes]


def token_of(queue: int, zone: bytes, ring_size: int) -> int:
    """Return the token of a zone that is made now."""
    return crc32(zone, crc32(queue.to_bytes(4, "big"))) % ring_size


def walk(ring_high: int, random: Callable[[], float]) -> list[int]:
    """Return every token that may be in use, in order, from a random one on."""
    if ring_high == 1:
        return [0]
    start = int(random() * ring_high)
    return [(start + step) % ring_high for step in range(ring_high)]


def choose(count: int, wanted: int, random: Callable[[], float]) -> Sequence[int]:
    """Choose which of ``count`` pointers to visit, at random."""
    return sorted(range(count), key=lambda _: random())[:wanted]


class Zones:
    """Creates, lowers and collects pointers."""

    def __init__(self, session: SqlSession) -> None:
        self._session = session
        # Zones whose pointer was seen vested, and when.
        self._vested: OrderedDict[Zone, int] = OrderedDict()
        self._versions: list[int] = []
        # Zones that get visible items by the transaction of a thread, and from when on.
        self._lowered = threading.local()
        # Zones that could not be looked at again because the database was away.
        self._owed: dict[Zone, int] = {}
        # Where the slow searches for idle and orphaned zones go on.
        self._idle_at: Zone = (-1, b"")
        self._orphan_at: tuple[int, int] = (-1, 0)
        self.collisions = 0
        self.collected = 0
        self.orphans = 0

    # --- what is known ---------------------------------------------------------------------

    @property
    def versions(self) -> list[int]:
        """The ``zones_version`` of this process's knowledge, by the row of ``log_heads``.

        A publish takes them before it relies on the knowledge, which may be newer then.
        """
        with self._session.memory:
            if self._versions != self._session.head.zones_versions:
                self._vested.clear()
                self._versions = self._session.head.zones_versions
            return self._versions

    def not_known_vested(self, wanted: Mapping[Zone, int], now_ms: int) -> dict[Zone, int]:
        """Return the zones whose pointer is not known to have vested."""
        trust_ms = self._session.tunables.trust_ms
        vested = self._vested if self.versions else {}
        with self._session.memory:
            return {
                zone: at_ms
                for zone, at_ms in wanted.items()
                if (seen := vested.get(zone)) is None or not seen <= now_ms <= seen + trust_ms
            }

    def saw_vested(self, zones: Iterable[Zone], now_ms: int, versions: list[int]) -> None:
        """Note that pointers of zones had vested, when zones had these versions."""
        with self._session.memory:
            if versions != self._versions:
                return
            for zone in zones:
                self._vested[zone] = now_ms
                self._vested.move_to_end(zone)
                if len(self._vested) > KNOWN_MAX:
                    self._vested.popitem(last=False)

    def note_raised(self, zones: Collection[Zone], sent_ms: int) -> None:
        """Note that a visit, sent at a time, has raised pointers; let none of them stay too early.

        A visit that took long was committed long after the time by which it put pointers ahead.
        """
        for zone in zones:
            self.forget(zone)
        now_ms = self._session.database.clock()
        if zones and now_ms - sent_ms > self._patient_ms:
            again_ms = now_ms + self._session.tunables.cool_ms
            self.look_again(dict.fromkeys(zones, again_ms), now_ms)

    def owe(self, zones: Iterable[Zone]) -> None:
        """Note zones whose pointers may have been raised; the next change looks at them."""
        again_ms = self._session.database.clock() + self._session.tunables.cool_ms
        with self._session.memory:
            for zone in zones:
                self._owed.setdefault(zone, again_ms)

    def forget(self, zone: Zone) -> None:
        """Note that a zone's pointer may have been raised."""
        with self._session.memory:
            self._vested.pop(zone, None)

    def count(self, *, collisions: int = 0, collected: int = 0, orphans: int = 0) -> None:
        """Add to the counters."""
        with self._session.memory:
            self.collisions += collisions
            self.collected += collected
            self.orphans += orphans

    def token(self, zone: Zone) -> int:
        """Return the token of a zone that is made now."""
        return token_of(*zone, self._session.ring_size)

    # --- creating and lowering ---------------------------------------------------------------

    def ensure(self, wanted: Mapping[Zone, int], now_ms: int) -> None:
        """Create or lower the pointers of these zones, in the caller's transaction.

        The caller holds the row of the store: no claim looks at a token of a ring that another
        process has made smaller.
        """
        session, database, zones = self._session, self._session.database, sorted(wanted)
        names = columns(zones, "queues", "zones")
        while True:
            database.run(
                "make_zones",
                **names,
                tokens=[self.token(zone) for zone in zones],
                vestings=[wanted[zone] for zone in zones],
                turn=session.take_turns(1),
            )
            # A zone that was being collected is gone once its row could be locked.
            if database.run("hold_zones", **names)[0][0] == len(zones):
                break
        self.lower(wanted, now_ms)

    def lower(self, wanted: Mapping[Zone, int], now_ms: int) -> None:
        """Let pointers vest when the items that come into their zones do.

        Within a transaction of :meth:`SqlSession.change`, which looks again if it takes long.
        """
        lowered: dict[Zone, int] = self._lowered.__dict__.setdefault("zones", {})
        for zone, vesting_ms in wanted.items():
            lowered[zone] = min(vesting_ms, lowered.get(zone, vesting_ms))
        self._lower(wanted, now_ms)

    def _lower(self, wanted: Mapping[Zone, int], now_ms: int) -> None:
        zones = sorted(wanted)
        if zones:
            self._session.database.run(
                "lower_zones",
                **columns(zones, "queues", "zones"),
                vestings=[wanted[zone] for zone in zones],
                now_ms=now_ms,
                threshold_ms=self._session.tunables.threshold_ms,
                turn=self._session.take_turns(1),
                stamp=self._session.stamp(),
            )

    @property
    def _patient_ms(self) -> int:
        """How long a statement may take before pointers are to be looked at again."""
        tunables = self._session.tunables
        # Half of the time, because clocks of other processes differ a little.
        return (tunables.cool_ms - tunables.trust_ms) // 2

    @contextmanager
    def recheck_if_slow(self, wanted: Mapping[Zone, int] | None = None) -> Iterator[None]:
        """Look at pointers again after the block, if the block took long.

        ``wanted``: the zones; else those that :meth:`lower` got. The block has a connection: the
        wait for one does not count, since nothing is relied on before.
        """
        session, clock = self._session, self._session.database.clock
        with session.database.connection():
            began_ms = clock()
            lowered: dict[Zone, int] = {}
            self._lowered.zones = lowered
            yield
            zones = lowered if wanted is None else wanted
            now_ms = clock()
            late = zones if now_ms - began_ms > self._patient_ms else {}
            if late or self._owed:
                self.look_again(late, now_ms)

    def look_again(self, zones: Mapping[Zone, int], now_ms: int) -> None:
        """Lower pointers that another process has raised without seeing our commit."""
        with self._session.memory:
            owed, self._owed = {**self._owed, **zones}, {}
        try:
            self._session.database.do(lambda: self._lower(owed, now_ms), again=True)
        except PenstockError as error:
            # The verb is committed, and must neither fail for this nor be done again.
            log.warning("%d zones are looked at again with the next change: %s", len(owed), error)
            with self._session.memory:
                self._owed = {**owed, **self._owed}

    # --- collecting --------------------------------------------------------------------------

    def collect(self, now_ms: int) -> int:
        """Remove the pointers of zones that have been empty for long enough; return how many."""
        session = self._session
        before_ms = now_ms - session.tunables.min_inactive_ms
        found = session.database.ask("idle_zones", before_ms=before_ms, count=COLLECT_MAX)
        by_log: dict[int, list[tuple[int, bytes, int]]] = {}
        for row in found:
            by_log.setdefault(self._log_of(row[1]), []).append(row)
        collected = 0
        for log, rows in by_log.items():
            gone = session.change(lambda: self._collect(log, rows, before_ms))  # noqa: B023
            for zone in gone:
                self.forget(zone)
            collected += len(gone)
            if gone:
                # Publishes of this process would be refused once.
                session.refresh()
        self.count(collected=collected)
        if session.ring_high > session.ring_size:
            self._narrow(now_ms)
        return collected

    def _log_of(self, zone: bytes) -> int:
        """Return the log that messages of a zone go into; -1: any log, without a group."""
        return crc32(zone) % self._session.settings.changes[-1][1] if zone else -1

    def _narrow(self, now_ms: int) -> None:
        """Let claims look at fewer tokens, when zones of a larger ring are gone.

        No zone is missed: a new zone gets a token below ``ring_size``, and a change of that has
        waited for every process that knew another. So no zone comes to the tokens above.
        """
        session = self._session
        size, high, used = session.database.ask("ring_in_use")[0]
        # By half or to the end: every process reads its queues again for it.
        if high > size and (used == size or used * 2 <= high):
            session.change_queues(lambda: self.put_ring_high(now_ms), again=True)

    def put_ring_high(self, now_ms: int) -> None:
        """Let claims look at the tokens that zones have, in the caller's transaction."""
        session = self._session
        session.lock_heads()
        session.database.run("put_ring_high")
        session.changed(now_ms)

    def _collect(self, log: int, found: list[tuple[int, bytes, int]], before_ms: int) -> list[Zone]:
        """Remove the pointers of those zones of a log that are empty; return them."""
        session, database = self._session, self._session.database
        logs = None if log < 0 else [log]
        session.lock_heads(logs)
        # Another process may have changed the number of logs.
        found = [row for row in found if self._log_of(row[1]) == log]
        names = columns(found, "queues", "zones", "tokens")
        held = database.run("lock_zones", **names, before_ms=before_ms)
        if not held:
            return []
        rows = database.run("collect_zones", **columns(held, "queues", "zones"))
        gone: list[Zone] = [(queue, zone) for queue, zone in rows]
        kept = set(held).difference(gone)
        if kept:
            database.run(
                "revive_zones",
                **columns(kept, "queues", "zones"),
                now_ms=before_ms + session.tunables.min_inactive_ms,
                stamp=session.stamp(),
            )
        if gone:
            database.run("bump_zones", logs=logs)
        return gone

    def look_for_idle(self, now_ms: int) -> int:
        """Search one more page for empty zones that no claim visits; return how many there were."""
        database = self._session.database
        queue, zone = self._idle_at
        rows = database.ask("find_idle", queue=queue, zone=zone, count=NET_PAGE)
        self._idle_at = (rows[-1][0], rows[-1][1]) if len(rows) == NET_PAGE else (-1, b"")
        idle = [(queue, zone) for queue, zone, empty in rows if empty]
        if idle:
            database.ask("mark_idle", **columns(idle, "queues", "zones"), now_ms=now_ms)
        return len(idle)

    def look_for_orphans(self, now_ms: int) -> int:
        """Search one more page for zones with items and no pointer; return how many there were."""
        session = self._session
        queue, message_id = self._orphan_at
        rows = session.database.ask(
            "find_orphans", queue=queue, message_id=message_id, count=NET_PAGE
        )
        self._orphan_at = (rows[-1][0], rows[-1][1]) if len(rows) == NET_PAGE else (-1, 0)
        orphaned: dict[Zone, int] = {}
        for number, _, zone, vesting_ms, orphan in rows:
            if orphan and number in session.by_number:
                key = (number, zone)
                orphaned[key] = min(vesting_ms, orphaned.get(key, vesting_ms))
        if orphaned:
            log.error("%d zones had items and no pointer; they have one now", len(orphaned))
            session.change(lambda: self._point_to(orphaned, now_ms))
            self.count(orphans=len(orphaned))
        return len(orphaned)

    def _point_to(self, orphaned: Mapping[Zone, int], now_ms: int) -> None:
        self._session.hold_instance()
        self.ensure(orphaned, now_ms)
