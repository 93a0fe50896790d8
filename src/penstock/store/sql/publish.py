"""Messages come in: publish, and how an item of a queue is made from a message."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

from penstock.errors import PenstockError
from penstock.store.codec.metadata import Metadata, encode_metadata
from penstock.store.contract import FiltersChanged
from penstock.store.kv.log import SEGMENT_MS
from penstock.store.sql.database import Refused

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.model import Message
    from penstock.store.sql.session import Core, Queue

__all__ = ["Arrival", "Intake", "add_items", "rank_of"]

# Publishes that find what they know out of date, one after the other, before it is an error.
_TRIES: Final = 100


class Arrival(NamedTuple):
    """A message that comes into a queue."""

    queue: Queue
    message_id: int
    zone: bytes
    priority: int
    vesting_ms: int
    attempts: int
    size: int


def rank_of(queue: Queue, priority: int) -> int:
    """Return the lane of a priority: the highest comes first, FIFO queues have none."""
    return -1 if queue.fifo else 255 - priority


def expiry_of(queue: Queue, vesting_ms: int) -> int | None:
    """Return when a message that waits from a time on is removed."""
    retention_ms = queue.spec.unclaimed_retention_ms
    return vesting_ms + retention_ms if retention_ms else None


def add_items(core: Core, arrivals: Sequence[Arrival], now_ms: int) -> None:
    """Put messages into queues, other than by publish; the counters are the caller's."""
    if not arrivals:
        return
    zones: dict[tuple[int, bytes], int] = {}
    for each in arrivals:
        key = (each.queue.number, each.zone)
        zones[key] = min(each.vesting_ms, zones.get(key, each.vesting_ms))
    core.zones.ensure(zones, now_ms)
    core.database.run(
        "add_items",
        queues=[each.queue.number for each in arrivals],
        message_ids=[each.message_id for each in arrivals],
        zones=[each.zone for each in arrivals],
        ranks=[rank_of(each.queue, each.priority) for each in arrivals],
        vestings=[each.vesting_ms for each in arrivals],
        attempts=[each.attempts for each in arrivals],
        expiries=[expiry_of(each.queue, each.vesting_ms) for each in arrivals],
        sizes=[each.size for each in arrivals],
        now_ms=now_ms,
    )
    for each in arrivals:
        core.wake(each.queue)
        if each.vesting_ms > now_ms:
            core.due(each.vesting_ms)


class _Batch:
    """The rows of one publish, column by column, as the statement takes them."""

    def __init__(self, core: Core, now_ms: int) -> None:
        self._core = core
        self._now_ms = now_ms
        self.refs: list[int] = []
        self.logs: list[int] = []
        self.metadata: list[bytes] = []
        self.payloads: list[bytes] = []
        # One entry for each queue of each message; nth counts the messages from 0.
        self.queues: list[int] = []
        self.nths: list[int] = []
        self.zones: list[bytes] = []
        self.ranks: list[int] = []
        self.vestings: list[int] = []
        self.expiries: list[int | None] = []
        self.sizes: list[int] = []
        self.by_queue: dict[str, int] = {}
        self.wanted: dict[tuple[int, bytes], int] = {}
        # Zones whose pointers were looked at when it was stored: of the others nothing is new.
        self.looked: Collection[tuple[int, bytes]] = ()

    def add(self, message: Message, names: Sequence[str]) -> None:
        """Take a message with the names of its queues."""
        core, now_ms = self._core, self._now_ms
        nth, zone, size = len(self.refs), message.group.encode(), len(message.payload)
        self.refs.append(len(names))
        self.logs.append(crc32(zone) % core.settings.changes[-1][1])
        self.metadata.append(
            encode_metadata(
                Metadata(
                    now_ms,
                    message.group,
                    message.priority,
                    size,
                    message.delay_ms,
                    dict(message.attributes),
                )
            )
        )
        self.payloads.append(message.payload)
        for name in names:
            queue = core.queues.get(name)
            if queue is None:
                raise FiltersChanged
            # A message's own delay counts if it has one; the queue's is the default.
            vesting_ms = now_ms + (message.delay_ms or queue.spec.delay_ms)
            self.queues.append(queue.number)
            self.nths.append(nth)
            self.zones.append(zone)
            self.ranks.append(rank_of(queue, message.priority))
            self.vestings.append(vesting_ms)
            self.expiries.append(expiry_of(queue, vesting_ms))
            self.sizes.append(size)
            self.by_queue[name] = self.by_queue.get(name, 0) + 1
            key = (queue.number, zone)
            self.wanted[key] = min(vesting_ms, self.wanted.get(key, vesting_ms))


class Intake:
    """Publish."""

    def __init__(self, core: Core) -> None:
        self._core = core

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
        core = self._core
        if core.head.specs_version < 0:
            core.reload()
            raise FiltersChanged
        token = core.stamp()
        for _ in range(_TRIES):
            try:
                ids = self._try(token, messages, routes, dedup_window_ms, now_ms)
            except Refused as error:
                if error.constraint == "requests_pkey":
                    # It had been done, and the answer was lost.
                    return self._answer(token, messages, now_ms)
                if error.constraint not in {"dedup_pkey", "message_id"}:
                    raise
                # Another process has published the same dedup id since they were looked up.
                continue
            if ids is not None:
                core.progress.commits += 1
                return ids
            if core.database.run("find_request", token=token):
                # It had been done before queues were changed, and the answer was lost.
                return self._answer(token, messages, now_ms)
            self._catch_up(now_ms, routed=routes is not None)
        raise PenstockError("queues are being changed faster than messages can be published")

    def _catch_up(self, now_ms: int, *, routed: bool) -> None:
        """Bring up to date what a publish was refused for."""
        core = self._core
        version = core.head.specs_version
        core.refresh()
        if core.head.segment_ms <= now_ms - SEGMENT_MS:
            core.change(lambda: self._roll(now_ms))
        if core.head.specs_version != version and routed:
            raise FiltersChanged

    def _roll(self, now_ms: int) -> None:
        core = self._core
        if core.lock_head().segment_ms <= now_ms - SEGMENT_MS:
            core.database.run("roll_segment", now_ms=now_ms)
            core.head = core.head._replace(segment_ms=now_ms)

    def _try(
        self,
        token: bytes,
        messages: Sequence[Message],
        routes: Sequence[Sequence[str]] | None,
        dedup_window_ms: int,
        now_ms: int,
    ) -> list[int] | None:
        """Publish; None if something that this process knows is out of date."""
        core = self._core
        keys = [_dedup_key(message) for message in messages]
        known = self._known([key for key in keys if key is not None], now_ms)
        fresh: dict[tuple[bytes, bytes], int] = {}
        batch = _Batch(core, now_ms)
        # Ids of messages that are there already; places in the batch of those that are not.
        places: list[tuple[int | None, int]] = []
        routed = repeat((), len(messages)) if routes is None else routes
        for message, key, names in zip(messages, keys, routed, strict=True):
            if key is not None and key in known:
                places.append((known[key], 0))
                continue
            if key is not None and key in fresh:
                places.append((None, fresh[key]))
                continue
            places.append((None, len(batch.refs)))
            if key is not None:
                fresh[key] = len(batch.refs)
            batch.add(message, names)
        duplicates = len(messages) - len(batch.refs)
        unrouted = 0 if routes is None else batch.refs.count(0)
        with core.zones.sure(batch.wanted, since_ms=now_ms):
            first_id = self._send(
                token, batch, fresh, now_ms + dedup_window_ms, now_ms, (duplicates, unrouted)
            )
        if first_id is None:
            return None
        self._after(batch, bool(fresh), now_ms + dedup_window_ms, now_ms)
        return [first_id + nth if found is None else found for found, nth in places]

    def _known(
        self, keys: Sequence[tuple[bytes, bytes]], now_ms: int
    ) -> dict[tuple[bytes, bytes], int]:
        if not keys:
            return {}
        rows = self._core.database.do(
            lambda: self._core.database.run(
                "find_dedup",
                scopes=[scope for scope, _ in keys],
                dedup_ids=[dedup_id for _, dedup_id in keys],
                now_ms=now_ms,
            ),
            again=True,
        )
        return {keys[nth - 1]: message_id for nth, message_id in rows}

    def _send(
        self,
        token: bytes,
        batch: _Batch,
        fresh: dict[tuple[bytes, bytes], int],
        dedup_expires_ms: int,
        now_ms: int,
        counted: tuple[int, int],
    ) -> int | None:
        core = self._core
        # A try after the first may come much later: what was known of zones then is not trusted.
        first = [core.zones.unsure(batch.wanted, now_ms)]
        counts = sorted((core.queues[name].number, n) for name, n in batch.by_queue.items())

        def work() -> list[tuple[Any, ...]]:
            wanted = first.pop() if first else batch.wanted
            # In the order in which everybody locks them.
            zones = dict(sorted(wanted.items()))
            batch.looked = zones.keys()
            return core.database.run(
                "publish",
                token=token,
                count=len(batch.refs),
                duplicates=counted[0],
                unrouted=counted[1],
                specs_version=core.head.specs_version,
                zones_version=core.zones.version,
                segment_length_ms=SEGMENT_MS,
                refs=batch.refs,
                logs=batch.logs,
                metadata=batch.metadata,
                payloads=batch.payloads,
                dedup_scopes=[scope for scope, _ in fresh],
                dedup_ids=[dedup_id for _, dedup_id in fresh],
                dedup_nths=list(fresh.values()),
                dedup_expires_ms=dedup_expires_ms,
                queues=batch.queues,
                nths=batch.nths,
                zones=batch.zones,
                ranks=batch.ranks,
                vestings=batch.vestings,
                expiries=batch.expiries,
                sizes=batch.sizes,
                count_queues=[queue for queue, _ in counts],
                count_numbers=[number for _, number in counts],
                slot=core.slot,
                zone_queues=[queue for queue, _ in zones],
                zone_names=[name for _, name in zones],
                zone_tokens=[core.zones.token(zone) for zone in zones],
                zone_vestings=list(zones.values()),
                turn=core.take_turns(1),
                stamp=core.stamp(),
                threshold_ms=core.tunables.threshold_ms,
                now_ms=now_ms,
            )

        # The token is there if it had been done.
        rows = core.database.do(work, again=True)
        return int(rows[0][0]) if rows else None

    def _after(self, batch: _Batch, remembers: bool, expires_ms: int, now_ms: int) -> None:  # noqa: FBT001
        core = self._core
        for zone, vesting_ms in batch.wanted.items():
            if vesting_ms > now_ms:
                core.due(vesting_ms)
            elif zone in batch.looked:
                # Not those that were trusted: a steady publisher would trust them for ever.
                core.zones.saw_vested(zone, now_ms)
        for name, count in batch.by_queue.items():
            core.wake(core.queues[name], count)
        for vesting_ms in batch.vestings:
            if vesting_ms > now_ms:
                core.due(vesting_ms)
        for expiry_ms in batch.expiries:
            if expiry_ms is not None:
                core.due(expiry_ms)
        if remembers:
            core.due(expires_ms)

    def _answer(self, token: bytes, messages: Sequence[Message], now_ms: int) -> list[int]:
        """Work out the ids of a publish that has been done."""
        core = self._core
        first_id = int(core.database.run("find_request", token=token)[0][0])
        keys = [_dedup_key(message) for message in messages]
        known = self._known([key for key in keys if key is not None], now_ms)
        ids = []
        for key in keys:
            if key is not None and key in known:
                ids.append(known[key])
                # The first of its kind took a number of this publish.
                first_id += known[key] == first_id
            else:
                ids.append(first_id)
                first_id += 1
        core.progress.commits += 1
        for queue in core.queues.values():
            core.wake(queue)
        return ids


def _dedup_key(message: Message) -> tuple[bytes, bytes] | None:
    if message.dedup_id is None:
        return None
    scope = message.attributes.get("queue")
    name = scope.encode() if isinstance(scope, str) else b""
    return name, message.dedup_id.encode()
