"""Publish, and the rows of messages that come into queues by any verb."""

from __future__ import annotations

import logging
from hashlib import sha256
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.errors import PenstockError
from penstock.packing import metadata_head
from penstock.store import policy
from penstock.store.codec.metadata import Head
from penstock.store.contract import FiltersChanged
from penstock.store.life import life, log_routes
from penstock.store.policy import SEGMENT_MS, drops_oldest
from penstock.store.sql.database import columns
from penstock.store.sql.failures import Refused
from penstock.store.sql.session import DROP_MESSAGES, SLOTS, SqlOverflow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.packing import PackedMessage
    from penstock.store.codec.metadata import Metadata
    from penstock.store.sql.connection import Row
    from penstock.store.sql.session import SqlQueue
    from penstock.store.sql.zones import Zone

log = logging.getLogger(__name__)

# Attempts of a publish that find queues or dedup ids changed, before it fails.
_TRIES: Final = 100
# Scopes and dedup ids of more bytes are hashed: an index key has a bound of 2.7 KB.
_LONG_BYTES: Final = 200


class Items:
    """Messages that come into queues: rows of the table ``items``, and the zones that get them."""

    def __init__(self) -> None:
        # Queue, message id, zone, rank, when it is visible, attempts, when it expires, size.
        self.rows: list[tuple[int, int, bytes, int, int, int, int | None, int]] = []
        # When the pointer of each zone must have vested.
        self.zones: dict[Zone, int] = {}
        # Messages and bytes of payloads that each queue gets.
        self.counts: dict[SqlQueue, int] = {}
        self.sizes: dict[SqlQueue, int] = {}
        self.largest: dict[SqlQueue, int] = {}

    def add(
        self,
        queue: SqlQueue,
        message_id: int,
        about: Metadata | Head,
        vesting_ms: int,
        attempts: int = 0,
    ) -> None:
        """Add a message that is visible from a time on."""
        zone, spec = about.group.encode(), queue.spec
        # The highest priority comes first; FIFO queues have no lanes.
        rank = -1 if queue.fifo else 255 - about.priority
        retention_ms = spec.unclaimed_retention_ms
        expiry_ms = vesting_ms + retention_ms if retention_ms else None
        row = (queue.number, message_id, zone, rank, vesting_ms, attempts, expiry_ms, about.size)
        self.rows.append(row)
        key = (queue.number, zone)
        self.zones[key] = min(vesting_ms, self.zones.get(key, vesting_ms))
        self.counts[queue] = self.counts.get(queue, 0) + 1
        self.sizes[queue] = self.sizes.get(queue, 0) + about.size
        self.largest[queue] = max(self.largest.get(queue, 0), about.size)

    def columns(self) -> dict[str, Sequence[Any]]:
        """Return the rows as statements take them."""
        names = ("queues", "message_ids", "zones", "ranks", "vestings", "attempts", "expiries")
        return columns(self.rows, *names, "sizes")


class _Known(NamedTuple):
    """The store as a publish counts on it, of one moment: version, queues, number of logs."""

    version: int
    queues: Mapping[str, SqlQueue]
    fifo: frozenset[str]
    logs: int


class _Places(NamedTuple):
    """The logs that the messages of one publish go into.

    ``heads``: of logs that are locked, all of them; if the messages may go into ``any_log``, the
    first that is free, and the messages' ``logs`` are not known before.
    """

    heads: list[int]
    logs: list[int | None]
    any_log: bool


class SqlPublish(SqlOverflow):
    """Publish."""

    def publish(
        self,
        messages: Sequence[PackedMessage],
        routes: Sequence[Sequence[str]] | None,
        *,
        dedup_window_ms: int,
        now_ms: int,
        routed_at: int | None = None,
    ) -> list[int]:
        """Store messages and put each into the queues that ``routes`` names for it.

        FiltersChanged if the routes may have been made by filters that no longer count.
        """
        with self.memory:
            # Of one moment: other threads read the queues again meanwhile.
            known = self._known()
            outdated = routed_at not in {None, self.progress.filter_changes}
        if outdated:
            raise FiltersChanged
        token = self.stamp()
        for _ in range(_TRIES):
            try:
                ids = self._publish_one(known, token, messages, routes, now_ms)
                if ids is None:
                    ids = self._try_publish(known, token, messages, routes, dedup_window_ms, now_ms)
            except Refused as error:
                if error.constraint == "requests_pkey":
                    # The publish had been committed, and its answer was lost.
                    return self._resume(known, token, messages, routes, now_ms)
                if error.constraint not in {"dedup_pkey", "message_id"}:
                    raise
                # Another process has published the same dedup id since they were looked up.
                continue
            if ids is not None:
                self.progress.commits += 1
                return ids
            if self.database.ask("find_request", token=token):
                # It had been committed before queues were changed, and its answer was lost.
                return self._resume(known, token, messages, routes, now_ms)
            known = self._refresh_for_publish(known, now_ms, routed=routes is not None)
        raise PenstockError(
            "nothing was published, since queues are changed all the time: try again"
        )

    def _known(self) -> _Known:
        """Return the store as a publish counts on it; called with ``memory`` held."""
        logs = self.settings.changes[-1][1]
        return _Known(self.head.specs_version, self.by_name, self.fifo, logs)

    def _refresh_for_publish(self, known: _Known, now_ms: int, *, routed: bool) -> _Known:
        """Read queues again after a refused publish; begin a log segment if that is due."""
        self.refresh()
        if self.head.segment_ms <= now_ms - SEGMENT_MS:
            self.change(lambda: self.begin_segment(now_ms))
        with self.memory:
            found = self._known()
        if found.version != known.version and (routed or self.routing == "inline"):
            raise FiltersChanged
        return found

    def begin_segment(self, now_ms: int) -> None:
        """Begin a new segment of the log if the last one is long enough."""
        if self.lock_heads().segment_ms <= now_ms - SEGMENT_MS:
            self.database.run("roll_segment", now_ms=now_ms)

    def _publish_one(
        self,
        known: _Known,
        token: bytes,
        messages: Sequence[PackedMessage],
        routes: Sequence[Sequence[str]] | None,
        now_ms: int,
    ) -> list[int] | None:
        """Publish one message into one queue by a short statement; None if that did not do."""
        if len(messages) > 1 or routes is None or len(routes[0]) != 1 or self.limited:
            return None
        message, queue = messages[0], known.queues.get(routes[0][0])
        if queue is None or message.dedup_id is not None:
            return None
        it = message.envelope
        items = Items()
        self._place(message, [queue], 1, items, now_ms)
        number, _, zone, rank, vesting_ms, _, expires_at_ms, size = items.rows[0]
        with self.zones.recheck_if_slow(items.zones):
            zones_versions = self.zones.versions
            if self.zones.not_known_vested(items.zones, self.database.clock()):
                return None
            heads = self._choose_logs(known, [it.group], routes).heads
            tried = False

            def work() -> list[Row]:
                nonlocal tried
                if tried:
                    # A second attempt may come much later: it must not rely on the pointer.
                    self.zones.forget((number, zone))
                    return []
                tried = True
                return self.database.run(
                    "publish_one",
                    heads=heads,
                    specs_version=known.version,
                    zones_versions=zones_versions,
                    segment_length_ms=SEGMENT_MS,
                    token=token,
                    metadata=it.metadata(metadata_head(now_ms), size),
                    payload=message.payload,
                    queue=number,
                    zone=zone,
                    rank=rank,
                    vesting_ms=vesting_ms,
                    expires_at_ms=expires_at_ms,
                    size=size,
                    slots=SLOTS,
                    now_ms=now_ms,
                )

            rows = self.database.do(work, again=True)
        if not rows:
            return None
        self._note_items(items, now_ms)
        if life.level:
            log_routes("publish", rows[0][0], routes)
        return list(rows[0][0])

    def _try_publish(
        self,
        known: _Known,
        token: bytes,
        messages: Sequence[PackedMessage],
        routes: Sequence[Sequence[str]] | None,
        dedup_window_ms: int,
        now_ms: int,
    ) -> list[int] | None:
        """Publish once; None if this process's knowledge of the store is out of date."""
        keys = [_dedup_key(message) for message in messages]
        earlier = self._known_dedup_ids(keys, now_ms)
        fresh: dict[tuple[bytes, bytes], int] = {}
        # How many queues hold it, metadata, payload.
        stored: list[tuple[int, bytes, bytes]] = []
        groups: list[str] = []
        taken: list[Sequence[str]] = []
        # Of each queue of each message; message ids are counted from 1 here.
        items = Items()
        # Ids of messages that are stored already; places in the batch of those that are not.
        places: list[tuple[int | None, int]] = []
        routed = repeat((), len(messages)) if routes is None else routes
        head = metadata_head(now_ms)
        for message, key, names in zip(messages, keys, routed, strict=True):
            if key is not None and key in earlier:
                places.append((earlier[key], 0))
            elif key is not None and key in fresh:
                places.append((None, fresh[key]))
            else:
                nth = len(stored) + 1
                places.append((None, nth))
                if key is not None:
                    fresh[key] = nth
                queues = [known.queues.get(name) for name in names]
                self._place(message, queues, nth, items, now_ms)
                metadata = message.envelope.metadata(head, len(message.payload))
                stored.append((len(names), metadata, message.payload))
                groups.append(message.envelope.group)
                taken.append(names)
        if self.limited:
            self.check_room(items.counts, items.sizes, items.largest)
        unrouted = 0 if routes is None else sum(not refs for refs, _, _ in stored)
        dedup_expires_ms = now_ms + dedup_window_ms
        # In one order, so that publishes into different logs can't wait for each other.
        remembered = sorted((*key, nth) for key, nth in fresh.items())
        with self.zones.recheck_if_slow(items.zones):
            ids = self._send_batch(
                items,
                self._choose_logs(known, groups, None if routes is None else taken),
                now_ms,
                dedup={
                    **columns(remembered, "dedup_scopes", "dedup_ids", "dedup_nths"),
                    "dedup_expires_ms": dedup_expires_ms,
                },
                specs_version=known.version,
                **columns(stored, "refs", "metadata", "payloads"),
                count=len(stored),
                token=token,
                duplicates=len(messages) - len(stored),
                **columns(places, "known_ids", "nths"),
                unrouted=unrouted,
            )
        if ids is None:
            return None
        self._note_items(items, now_ms)
        if fresh:
            self.due(dedup_expires_ms)
        if life.level:
            stored_ids = dict(zip((nth for _, nth in places), ids, strict=True))
            log_routes("publish", [stored_ids[nth] for nth in range(1, len(stored) + 1)], taken)
        if self.limited:
            try:
                self.drop_excess(now_ms, max(DROP_MESSAGES, len(stored)), items.counts)
            except PenstockError as error:
                # The messages are stored; a sweep drops what is too much.
                log.warning("queues are over their limits after a publish: %s", error)
        return ids

    def _choose_logs(
        self, known: _Known, groups: Sequence[str], routes: Sequence[Sequence[str]] | None
    ) -> _Places:
        """Choose the logs that the messages of one publish go into."""
        turn = next(self.log_turns)
        ordered = bool(known.fifo) if routes is None else not known.fifo.isdisjoint(chain(*routes))
        if ordered or any(groups):
            logs = policy.logs_of(groups, routes, known.fifo, known.logs, turn)
            return _Places(sorted(set(logs)), [*logs], any_log=False)
        heads = [(turn + nth) % known.logs for nth in range(known.logs)]
        return _Places(heads, [None] * len(groups), any_log=True)

    def _place(
        self,
        message: PackedMessage,
        queues: Sequence[SqlQueue | None],
        nth: int,
        items: Items,
        now_ms: int,
    ) -> None:
        """Add a message to the queues of its route."""
        it = message.envelope
        about = Head(now_ms, it.group, it.priority, len(message.payload), it.delay_ms)
        for queue in queues:
            if queue is None:
                raise FiltersChanged
            # A message's own delay counts if it has one; the queue's is the default.
            items.add(queue, nth, about, now_ms + (it.delay_ms or queue.spec.delay_ms))

    def _known_dedup_ids(
        self, keys: Sequence[tuple[bytes, bytes] | None], now_ms: int
    ) -> dict[tuple[bytes, bytes], int]:
        given = [key for key in keys if key is not None]
        if not given:
            return {}
        rows = self.database.ask(
            "find_dedup", **columns(given, "scopes", "dedup_ids"), now_ms=now_ms
        )
        return {given[nth - 1]: message_id for nth, message_id in rows}

    def _send_batch(
        self, items: Items, places: _Places, now_ms: int, **parameters: Any
    ) -> list[int] | None:
        """Run the statement; return the ids, or None if the knowledge was out of date."""
        if places.any_log or len(places.heads) == 1:
            ids = self._run_publish("publish_free", items, places, now_ms, **parameters)
            if ids is not None:
                return ids
            # All logs are busy, or the knowledge is out of date: wait for one, and find out.
            head = places.heads[0]
            places = _Places([head], [head] * len(places.logs), any_log=False)
        return self._run_publish("publish", items, places, now_ms, **parameters)

    def _run_publish(
        self,
        name: str,
        items: Items,
        places: _Places,
        now_ms: int,
        *,
        dedup: Mapping[str, Any],
        **parameters: Any,
    ) -> list[int] | None:
        """Run one statement; None if it has published nothing."""
        zones_versions = self.zones.versions
        # A second attempt may come much later: it relies on no pointer.
        relied_ms = self.database.clock()
        first = [self.zones.not_known_vested(items.zones, relied_ms)]
        looked: dict[Zone, int] = {}
        parameters |= {
            **columns(
                sorted((each.number, n, items.sizes[each]) for each, n in items.counts.items()),
                *("count_queues", "count_numbers", "count_bytes"),
            ),
            **items.columns(),
            "heads": places.heads,
            "wanted": 1 if name == "publish_free" else len(places.heads),
            "logs": places.logs,
            "zones_versions": zones_versions,
            "segment_length_ms": SEGMENT_MS,
            "slots": SLOTS,
            "now_ms": now_ms,
        }

        def work() -> list[Row]:
            wanted = first.pop() if first else items.zones
            # In the order in which every process locks them.
            looked.clear()
            looked.update(sorted(wanted.items()))
            if not looked and not dedup["dedup_ids"] and name == "publish_free":
                return self.database.run("publish_known", **parameters)
            return self.database.run(
                name,
                **parameters,
                **columns(looked, "zone_queues", "zone_names"),
                zone_tokens=[self.zones.token(zone) for zone in looked],
                zone_vestings=list(looked.values()),
                turn=self.take_turns(1),
                stamp=self.stamp(),
                threshold_ms=self.tunables.threshold_ms,
                **dedup,
            )

        # A second attempt finds the token if the first was committed.
        rows = self.database.do(work, again=True)
        if not rows:
            return None
        # Not those that were relied on: a steady publisher would rely on them for ever.
        vested = [zone for zone, vesting_ms in looked.items() if vesting_ms <= now_ms]
        self.zones.saw_vested(vested, relied_ms, zones_versions)
        return list(rows[0][0])

    def add_items(self, items: Items, now_ms: int) -> None:
        """Put messages into queues, in the caller's transaction; the caller counts them."""
        if items.rows:
            self.zones.ensure(items.zones, now_ms)
            self.database.run("add_items", **items.columns(), now_ms=now_ms)
            self._note_items(items, now_ms)

    def _note_items(self, items: Items, now_ms: int) -> None:
        """Note queues to wake and times to sweep at."""
        for queue, count in items.counts.items():
            self.wake(queue, count)
            if drops_oldest(queue.spec):
                self.due(now_ms)
        for _, _, _, _, vesting_ms, _, expiry_ms, _ in items.rows:
            if vesting_ms > now_ms:
                self.due(vesting_ms)
            if expiry_ms is not None:
                self.due(expiry_ms)

    def _resume(
        self,
        known: _Known,
        token: bytes,
        messages: Sequence[PackedMessage],
        routes: Sequence[Sequence[str]] | None,
        now_ms: int,
    ) -> list[int]:
        """Finish a publish that had been committed, and whose answer was lost; return its ids."""
        ids: list[int] = self.database.ask("find_request", token=token)[0][0]
        self.progress.commits += 1
        items = Items()
        for message, names in zip(messages, routes or (), strict=routes is not None):
            queues = [known.queues[name] for name in names if name in known.queues]
            self._place(message, queues, 0, items, now_ms)
        # Nobody knows how long ago it was committed: claims may have raised its pointers since.
        self.zones.look_again(items.zones, self.database.clock())
        self._note_items(items, now_ms)
        if life.level:
            # With duplicates, which nobody knows any more.
            log_routes("publish", ids, repeat((), len(ids)) if routes is None else routes)
        return ids


def _dedup_key(message: PackedMessage) -> tuple[bytes, bytes] | None:
    if message.dedup_id is None:
        return None
    scope = policy.dedup_scope(message.envelope.attributes)
    return _shortened(scope), _shortened(message.dedup_id.encode())


def _shortened(text: bytes) -> bytes:
    """Return a text, or its hash if it is long; a byte that no text has tells them apart."""
    return text if len(text) <= _LONG_BYTES else b"\xff" + sha256(text).digest()
