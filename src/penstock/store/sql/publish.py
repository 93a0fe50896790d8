"""Publish, and the rows of messages that come into queues by any verb."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

from penstock.errors import PenstockError
from penstock.store import policy
from penstock.store.codec.metadata import Metadata, encode_metadata
from penstock.store.contract import FiltersChanged
from penstock.store.policy import SEGMENT_MS
from penstock.store.sql.database import Refused, columns
from penstock.store.sql.session import SqlSession

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.model import Message
    from penstock.store.codec.metadata import Head
    from penstock.store.sql.session import SqlQueue

# Attempts of a publish that find queues or dedup ids changed, before it fails.
_TRIES: Final = 100


class Arrival(NamedTuple):
    """A message that comes into a queue, to be visible from a time on."""

    queue: SqlQueue
    message_id: int
    metadata: Metadata | Head
    vesting_ms: int
    attempts: int = 0


def rank_of(queue: SqlQueue, priority: int) -> int:
    """Return the lane of a priority: the highest comes first, FIFO queues have none."""
    return -1 if queue.fifo else 255 - priority


def expiry_of(queue: SqlQueue, vesting_ms: int) -> int | None:
    """Return when an unclaimed message that is visible from a time on is removed."""
    retention_ms = queue.spec.unclaimed_retention_ms
    return vesting_ms + retention_ms if retention_ms else None


def add_items(session: SqlSession, arrivals: Sequence[Arrival], now_ms: int) -> None:
    """Put messages into queues, in the caller's transaction; the caller counts them."""
    if not arrivals:
        return
    zones: dict[tuple[int, bytes], int] = {}
    rows = []
    for queue, message_id, metadata, vesting_ms, attempts in arrivals:
        zone = metadata.group.encode()
        key = (queue.number, zone)
        zones[key] = min(vesting_ms, zones.get(key, vesting_ms))
        rank, expiry = rank_of(queue, metadata.priority), expiry_of(queue, vesting_ms)
        rows.append(
            (queue.number, message_id, zone, rank, vesting_ms, attempts, expiry, metadata.size)
        )
    session.zones.ensure(zones, now_ms)
    names = ("queues", "message_ids", "zones", "ranks", "vestings", "attempts", "expiries", "sizes")
    session.database.run("add_items", **columns(rows, *names), now_ms=now_ms)
    for each in arrivals:
        session.wake(each.queue)
        if each.vesting_ms > now_ms:
            session.due(each.vesting_ms)


class _Batch:
    """The rows of one publish."""

    def __init__(self, session: SqlSession, now_ms: int) -> None:
        self._session = session
        self._now_ms = now_ms
        # How many queues hold it, log, metadata, payload.
        self.messages: list[tuple[int, int, bytes, bytes]] = []
        # One for each queue of each message: queue, place of the message, zone, rank, when it is
        # visible, when it expires, size.
        self.items: list[tuple[int, int, bytes, int, int, int | None, int]] = []
        self.by_queue: dict[str, int] = {}
        # When the pointer of each zone must have vested.
        self.wanted: dict[tuple[int, bytes], int] = {}
        # Zones whose pointers the statement looked at: the others were relied on.
        self.looked: Collection[tuple[int, bytes]] = ()

    def add(self, message: Message, names: Sequence[str]) -> None:
        """Add a message with the names of its queues."""
        session, now_ms = self._session, self._now_ms
        nth, zone, size = len(self.messages), message.group.encode(), len(message.payload)
        log = crc32(zone) % session.settings.changes[-1][1]
        metadata = Metadata(
            now_ms,
            message.group,
            message.priority,
            size,
            message.delay_ms,
            dict(message.attributes),
        )
        self.messages.append((len(names), log, encode_metadata(metadata), message.payload))
        for name in names:
            queue = session.by_name.get(name)
            if queue is None:
                raise FiltersChanged
            # A message's own delay counts if it has one; the queue's is the default.
            vesting_ms = now_ms + (message.delay_ms or queue.spec.delay_ms)
            rank, expiry = rank_of(queue, message.priority), expiry_of(queue, vesting_ms)
            self.items.append((queue.number, nth, zone, rank, vesting_ms, expiry, size))
            self.by_queue[name] = self.by_queue.get(name, 0) + 1
            key = (queue.number, zone)
            self.wanted[key] = min(vesting_ms, self.wanted.get(key, vesting_ms))

    def columns(self) -> dict[str, list[Any]]:
        """Return the rows as the statement takes them."""
        counts = sorted(
            (self._session.by_name[name].number, n) for name, n in self.by_queue.items()
        )
        items = ("queues", "nths", "zones", "ranks", "vestings", "expiries", "sizes")
        return {
            **columns(self.messages, "refs", "logs", "metadata", "payloads"),
            **columns(self.items, *items),
            **columns(counts, "count_queues", "count_numbers"),
        }


class SqlPublish(SqlSession):
    """Publish."""

    def publish(
        self,
        messages: Sequence[Message],
        routes: Sequence[Sequence[str]] | None,
        *,
        dedup_window_ms: int,
        now_ms: int,
    ) -> list[int]:
        """Store messages and put each into the queues that ``routes`` names for it.

        FiltersChanged if the routes may have been made by filters that no longer count.
        """
        if self.head.specs_version < 0:
            self.reload()
            raise FiltersChanged
        token = self.stamp()
        for _ in range(_TRIES):
            try:
                ids = self._try_publish(token, messages, routes, dedup_window_ms, now_ms)
            except Refused as error:
                if error.constraint == "requests_pkey":
                    # The publish had been committed, and its answer was lost.
                    return self._ids_of_request(token, messages, now_ms)
                if error.constraint not in {"dedup_pkey", "message_id"}:
                    raise
                # Another process has published the same dedup id since they were looked up.
                continue
            if ids is not None:
                self.progress.commits += 1
                return ids
            if self.database.run("find_request", token=token):
                # It had been committed before queues were changed, and its answer was lost.
                return self._ids_of_request(token, messages, now_ms)
            self._refresh_for_publish(now_ms, routed=routes is not None)
        raise PenstockError("queues are being changed faster than messages can be published")

    def _refresh_for_publish(self, now_ms: int, *, routed: bool) -> None:
        """Read queues again after a refused publish; begin a log segment if that is due."""
        version = self.head.specs_version
        self.refresh()
        if self.head.segment_ms <= now_ms - SEGMENT_MS:
            self.change(lambda: self._begin_segment(now_ms))
        if self.head.specs_version != version and routed:
            raise FiltersChanged

    def _begin_segment(self, now_ms: int) -> None:
        if self.lock_head().segment_ms <= now_ms - SEGMENT_MS:
            self.database.run("roll_segment", now_ms=now_ms)
            self.head = self.head._replace(segment_ms=now_ms)

    def _try_publish(
        self,
        token: bytes,
        messages: Sequence[Message],
        routes: Sequence[Sequence[str]] | None,
        dedup_window_ms: int,
        now_ms: int,
    ) -> list[int] | None:
        """Publish once; None if this process's knowledge of the store is out of date."""
        keys = [_dedup_key(message) for message in messages]
        known = self._known_dedup_ids(keys, now_ms)
        fresh: dict[tuple[bytes, bytes], int] = {}
        batch = _Batch(self, now_ms)
        # Ids of messages that are stored already; places in the batch of those that are not.
        places: list[tuple[int | None, int]] = []
        routed = repeat((), len(messages)) if routes is None else routes
        for message, key, names in zip(messages, keys, routed, strict=True):
            if key is not None and key in known:
                places.append((known[key], 0))
            elif key is not None and key in fresh:
                places.append((None, fresh[key]))
            else:
                places.append((None, len(batch.messages)))
                if key is not None:
                    fresh[key] = len(batch.messages)
                batch.add(message, names)
        unrouted = 0 if routes is None else sum(not refs for refs, _, _, _ in batch.messages)
        dedup_expires_ms = now_ms + dedup_window_ms
        with self.zones.recheck_if_slow(batch.wanted, since_ms=now_ms):
            first_id = self._send_batch(
                batch,
                now_ms,
                token=token,
                duplicates=len(messages) - len(batch.messages),
                unrouted=unrouted,
                dedup_scopes=[scope for scope, _ in fresh],
                dedup_ids=[dedup_id for _, dedup_id in fresh],
                dedup_nths=list(fresh.values()),
                dedup_expires_ms=dedup_expires_ms,
            )
        if first_id is None:
            return None
        self._note_published(batch, now_ms)
        if fresh:
            self.due(dedup_expires_ms)
        return [first_id + nth if found is None else found for found, nth in places]

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

    def _send_batch(self, batch: _Batch, now_ms: int, **parameters: Any) -> int | None:
        """Run the statement; return the first id, or None if the knowledge was out of date."""
        # A second attempt may come much later: it relies on no pointer.
        first = [self.zones.not_known_vested(batch.wanted, now_ms)]

        def work() -> list[tuple[Any, ...]]:
            wanted = first.pop() if first else batch.wanted
            # In the order in which every process locks them.
            zones = dict(sorted(wanted.items()))
            batch.looked = zones.keys()
            return self.database.run(
                "publish",
                **parameters,
                **batch.columns(),
                count=len(batch.messages),
                specs_version=self.head.specs_version,
                zones_version=self.zones.version,
                segment_length_ms=SEGMENT_MS,
                slot=self.slot,
                **columns(zones, "zone_queues", "zone_names"),
                zone_tokens=[self.zones.token(zone) for zone in zones],
                zone_vestings=list(zones.values()),
                turn=self.take_turns(1),
                stamp=self.stamp(),
                threshold_ms=self.tunables.threshold_ms,
                now_ms=now_ms,
            )

        # A second attempt finds the token if the first was committed.
        rows = self.database.do(work, again=True)
        return int(rows[0][0]) if rows else None

    def _note_published(self, batch: _Batch, now_ms: int) -> None:
        """Note vested pointers, queues to wake and times to sweep at."""
        for zone, vesting_ms in batch.wanted.items():
            # Not those that were relied on: a steady publisher would rely on them for ever.
            if vesting_ms <= now_ms and zone in batch.looked:
                self.zones.saw_vested(zone, now_ms)
        for name, count in batch.by_queue.items():
            self.wake(self.by_name[name], count)
        for _, _, _, _, vesting_ms, expiry_ms, _ in batch.items:
            if vesting_ms > now_ms:
                self.due(vesting_ms)
            if expiry_ms is not None:
                self.due(expiry_ms)

    def _ids_of_request(self, token: bytes, messages: Sequence[Message], now_ms: int) -> list[int]:
        """Work out the ids of a publish that had been committed."""
        first_id = int(self.database.run("find_request", token=token)[0][0])
        keys = [_dedup_key(message) for message in messages]
        known = self._known_dedup_ids(keys, now_ms)
        ids = []
        for key in keys:
            if key is not None and key in known:
                ids.append(known[key])
                # The first of its kind took a number of this publish.
                first_id += known[key] == first_id
            else:
                ids.append(first_id)
                first_id += 1
        self.progress.commits += 1
        for queue in self.by_name.values():
            self.wake(queue)
        return ids


def _dedup_key(message: Message) -> tuple[bytes, bytes] | None:
    if message.dedup_id is None:
        return None
    return policy.dedup_scope(message), message.dedup_id.encode()
