"""Publish, and the rows of messages that come into queues by any verb."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from penstock.errors import PenstockError
from penstock.store import policy
from penstock.store.codec.metadata import Metadata, encode_metadata
from penstock.store.contract import FiltersChanged
from penstock.store.policy import SEGMENT_MS
from penstock.store.sql.database import Refused, columns
from penstock.store.sql.session import SqlSession

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.model import Message
    from penstock.store.codec.metadata import Head
    from penstock.store.sql.session import SqlQueue
    from penstock.store.sql.zones import Zone

# Attempts of a publish that find queues or dedup ids changed, before it fails.
_TRIES: Final = 100


class Items:
    """Messages that come into queues: rows of the table ``items``, and the zones that get them."""

    def __init__(self) -> None:
        # Queue, message id, zone, rank, when it is visible, attempts, when it expires, size.
        self.rows: list[tuple[int, int, bytes, int, int, int, int | None, int]] = []
        # When the pointer of each zone must have vested.
        self.zones: dict[Zone, int] = {}
        self.counts: dict[SqlQueue, int] = {}

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

    def columns(self) -> dict[str, list[Any]]:
        """Return the rows as statements take them."""
        names = ("queues", "message_ids", "zones", "ranks", "vestings", "attempts", "expiries")
        return columns(self.rows, *names, "sizes")


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
        raise PenstockError(
            "nothing was published, since queues are changed all the time: try again"
        )

    def _refresh_for_publish(self, now_ms: int, *, routed: bool) -> None:
        """Read queues again after a refused publish; begin a log segment if that is due."""
        version = self.head.specs_version
        self.refresh()
        if self.head.segment_ms <= now_ms - SEGMENT_MS:
            self.change(lambda: self.begin_segment(now_ms))
        if self.head.specs_version != version and routed:
            raise FiltersChanged

    def begin_segment(self, now_ms: int) -> None:
        """Begin a new segment of the log if the last one is long enough."""
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
        # How many queues hold it, log, metadata, payload.
        stored: list[tuple[int, int, bytes, bytes]] = []
        # Of each queue of each message; message ids are counted from 0 here.
        items = Items()
        # Ids of messages that are stored already; places in the batch of those that are not.
        places: list[tuple[int | None, int]] = []
        routed = repeat((), len(messages)) if routes is None else routes
        for message, key, names in zip(messages, keys, routed, strict=True):
            if key is not None and key in known:
                places.append((known[key], 0))
            elif key is not None and key in fresh:
                places.append((None, fresh[key]))
            else:
                places.append((None, len(stored)))
                if key is not None:
                    fresh[key] = len(stored)
                metadata = self._place(message, names, len(stored), items, now_ms)
                log = crc32(message.group.encode()) % self.settings.changes[-1][1]
                stored.append((len(names), log, encode_metadata(metadata), message.payload))
        unrouted = 0 if routes is None else sum(not refs for refs, _, _, _ in stored)
        dedup_expires_ms = now_ms + dedup_window_ms
        with self.zones.recheck_if_slow(items.zones, since_ms=now_ms):
            first_id = self._send_batch(
                items,
                now_ms,
                **columns(stored, "refs", "logs", "metadata", "payloads"),
                count=len(stored),
                token=token,
                duplicates=len(messages) - len(stored),
                unrouted=unrouted,
                **columns(fresh, "dedup_scopes", "dedup_ids"),
                dedup_nths=list(fresh.values()),
                dedup_expires_ms=dedup_expires_ms,
            )
        if first_id is None:
            return None
        self._note_items(items, now_ms)
        if fresh:
            self.due(dedup_expires_ms)
        return [first_id + nth if found is None else found for found, nth in places]

    def _place(
        self, message: Message, names: Sequence[str], nth: int, items: Items, now_ms: int
    ) -> Metadata:
        """Add a message to the queues of its route; return its metadata."""
        metadata = Metadata(
            now_ms,
            message.group,
            message.priority,
            len(message.payload),
            message.delay_ms,
            dict(message.attributes),
        )
        for name in names:
            queue = self.by_name.get(name)
            if queue is None:
                raise FiltersChanged
            # A message's own delay counts if it has one; the queue's is the default.
            items.add(queue, nth, metadata, now_ms + (message.delay_ms or queue.spec.delay_ms))
        return metadata

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

    def _send_batch(self, items: Items, now_ms: int, **parameters: Any) -> int | None:
        """Run the statement; return the first id, or None if the knowledge was out of date."""
        # A second attempt may come much later: it relies on no pointer.
        first = [self.zones.not_known_vested(items.zones, now_ms)]
        looked: dict[Zone, int] = {}

        def work() -> list[tuple[Any, ...]]:
            wanted = first.pop() if first else items.zones
            # In the order in which every process locks them.
            looked.clear()
            looked.update(sorted(wanted.items()))
            return self.database.run(
                "publish",
                **parameters,
                **items.columns(),
                **columns(
                    sorted((queue.number, count) for queue, count in items.counts.items()),
                    "count_queues",
                    "count_numbers",
                ),
                specs_version=self.head.specs_version,
                zones_version=self.zones.version,
                segment_length_ms=SEGMENT_MS,
                slot=self.slot,
                **columns(looked, "zone_queues", "zone_names"),
                zone_tokens=[self.zones.token(zone) for zone in looked],
                zone_vestings=list(looked.values()),
                turn=self.take_turns(1),
                stamp=self.stamp(),
                threshold_ms=self.tunables.threshold_ms,
                now_ms=now_ms,
            )

        # A second attempt finds the token if the first was committed.
        rows = self.database.do(work, again=True)
        if not rows:
            return None
        for zone, vesting_ms in looked.items():
            # Not those that were relied on: a steady publisher would rely on them for ever.
            if vesting_ms <= now_ms:
                self.zones.saw_vested(zone, now_ms)
        return int(rows[0][0])

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
        for _, _, _, _, vesting_ms, _, expiry_ms, _ in items.rows:
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
