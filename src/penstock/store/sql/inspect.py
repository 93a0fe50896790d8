"""Reading without leasing: browse, attempts, stats; logs, and how zones are spread over tokens."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.errors import InvalidInput
from penstock.limits import MAX_OFFSET, MAX_PAGE_BYTES
from penstock.model import Attempt, AttemptEnd, Entry, Page, QueueStats, State, StoreStats
from penstock.store.codec.metadata import read_metadata
from penstock.store.sql.move import ALL, ANY_STATE, STATES, SqlMove
from penstock.store.sql.settle import ENDINGS
from penstock.store.sql.zones import token_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.store.codec.metadata import Metadata
    from penstock.store.sql.session import LogHead, SqlQueue, SqlSession

# Zones that the count of old tokens reads at a time.
PAGE: Final = 10_000
# In the order of the statement sum_counts.
_TOTALS: Final = [name for name in QueueStats.__struct_fields__ if name.endswith("_total")]


def queue_stats_of(
    run: Callable[..., list[tuple[Any, ...]]], queue: SqlQueue, now_ms: int
) -> QueueStats:
    """Return a queue's depths and totals; ``run`` runs a statement, now or in a snapshot."""
    # No row of a queue that another process has just deleted.
    rows = run("sum_counts", queue=queue.number) or [(0,) * 16]
    _, live, in_flight, done, failed, *totals, live_bytes = rows[0]
    at = {"queue": queue.number, "now_ms": now_ms}
    delayed = run("count_delayed", **at)[0][0]
    available = max(0, live - in_flight - delayed)
    since_ms, claimed_ms, ready = None, None, 0
    # A queue without available messages is not searched: the search would pass all delayed ones.
    if available:
        since_ms = run("oldest", **at)[0][0]
        ready = run("groups_ready_fifo" if queue.fifo else "groups_ready", **at)[0][0]
    if in_flight:
        claimed_ms = run("oldest_claim", **at)[0][0]
    return QueueStats(
        queue=queue.name,
        available=available,
        delayed=delayed,
        in_flight=in_flight,
        done=done,
        failed=failed,
        oldest_age_ms=None if since_ms is None else max(0, now_ms - since_ms),
        oldest_in_flight_ms=None if claimed_ms is None else max(0, now_ms - claimed_ms),
        groups_ready=ready,
        live_bytes=live_bytes if queue.spec.max_bytes else 0,
        **dict(zip(_TOTALS, totals, strict=True)),
    )


def store_stats_of(session: SqlSession, head: LogHead) -> StoreStats:
    """Return the totals of the store."""
    return StoreStats(
        published_total=head.published,
        duplicates_total=head.duplicates,
        unrouted_total=head.unrouted,
        quarantined_total=0,
        healed_total=session.zones.orphans,
        stale_receipts_total=session.stale_receipts,
    )


class LogStatus(msgspec.Struct, frozen=True):
    """One log: its head, how many messages it got, how many a second, and sessions that wait.

    Every message below ``head`` is committed. ``waiting``: sessions of any process that wait for
    the head at this moment, to publish or to change queues.
    """

    log: int
    head: int
    published: int
    per_second: float
    waiting: int


class TokenStatus(msgspec.Struct, frozen=True):
    """One token: its pointers, the vested ones, and for how long the oldest has been vested."""

    token: int
    pointers: int
    vested: int
    oldest_lag_ms: int


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A store on a SQL database.

    ``ring_size``: new zones get a token below it; ``ring_high``: claims look at tokens below it.
    ``zones``: those with a pointer; ``empty_zones``: those without items, which are collected when
    they stay empty; ``old_tokens``: those whose token is not the one that the present ring gives.
    ``waiting`` has the delayed messages too. ``next_id``: the id that the next message gets.
    """

    store_id: str
    routing: str
    ring_size: int
    ring_high: int
    zones: int
    empty_zones: int
    old_tokens: int
    vested: int
    oldest_lag_ms: int
    waiting: int
    in_flight: int
    next_id: int
    logs: list[LogStatus]
    tokens: list[TokenStatus]

    @property
    def rehashed(self) -> float:
        """The part of the zones that have the token of the present ring, from 0 to 1."""
        return 1 - self.old_tokens / self.zones if self.zones else 1.0


class SqlInspect(SqlMove):
    """The verbs that only read."""

    def browse(
        self,
        queue_name: str,
        state: State,
        *,
        limit: int,
        cursor: str | None,
        payloads: bool,
        now_ms: int,
        message_id: int | None = None,
    ) -> Page:
        """Read a page of messages in a state, or one message in whatever state it is."""
        queue = self._caught_up(queue_name, now_ms)
        begin = _parse_cursor(cursor, queue, state) + 1
        span = {"queue": queue.number, "begin": begin, "end": MAX_OFFSET, "count": limit + 1}
        if message_id is not None:
            state, rows = self._find(queue, message_id, now_ms)
        elif state in STATES:
            rows = self.database.ask("page_items", **span, state=STATES[state], now_ms=now_ms)
        else:
            rows = self.database.ask("page_ended", **span, failed=state is State.FAILED)
        following = rows[limit - 1][0] if len(rows) > limit else None
        entries: list[Entry] = []
        size = place = 0
        for row in rows[:limit]:
            metadata = read_metadata(row[-1] or b"")
            if metadata is None:
                continue
            size += metadata.size
            if payloads and entries and size > MAX_PAGE_BYTES:
                following = place
                break
            place = row[0]
            entries.append(_entry(queue, state, row, metadata))
        if payloads and entries:
            ids = [entry.message_id for entry in entries]
            bodies: dict[int, bytes] = dict(self.database.run("payload_of", message_ids=ids))
            entries = [
                msgspec.structs.replace(entry, payload=bodies.get(entry.message_id))
                for entry in entries
            ]
        head = _cursor_head(queue, state)
        return Page(entries, None if following is None else f"{head}{following:016x}")

    def _find(
        self, queue: SqlQueue, message_id: int, now_ms: int
    ) -> tuple[State, list[tuple[Any, ...]]]:
        """Look a message up, and say in which state it is."""
        if message_id >= MAX_OFFSET:
            return State.DONE, []
        span = {"queue": queue.number, "begin": message_id, "end": message_id + 1, "count": 1}
        rows = self.database.ask("page_items", **span, state=ANY_STATE, now_ms=now_ms)
        if not rows:
            rows = self.database.ask("ended_message", queue=queue.number, message_id=message_id)
            failed = bool(rows) and rows[0][0]
            return State.FAILED if failed else State.DONE, [row[1:] for row in rows]
        _, _, _, vesting_ms, is_leased, *_ = rows[0]
        if is_leased:
            return State.IN_FLIGHT, rows
        return State.DELAYED if vesting_ms > now_ms else State.AVAILABLE, rows

    def attempts(self, queue_name: str, message_id: int, now_ms: int) -> list[Attempt]:
        """Return every attempt at a message, the running one last."""
        if message_id >= 1 << 63:
            self.queue(queue_name)
            return []
        queue = self._caught_up(queue_name, now_ms)
        rows = self.database.run(
            "attempts", queue=queue.number, message_id=message_id, now_ms=now_ms
        )
        return [
            Attempt(
                number,
                consumer.decode(),
                claimed_at_ms,
                ended_at_ms,
                AttemptEnd(ENDINGS[ending]),
                reason.decode(errors="replace"),
            )
            for number, consumer, claimed_at_ms, ended_at_ms, ending, reason in rows
        ]

    def queue_stats(self, queue_name: str, now_ms: int) -> QueueStats:
        """Return a queue's depths and totals."""
        return queue_stats_of(self.database.run, self._caught_up(queue_name, now_ms), now_ms)

    def store_stats(self) -> StoreStats:
        """Return the totals of the store."""
        return store_stats_of(self, self.read_head())

    def _caught_up(self, queue_name: str, now_ms: int) -> SqlQueue:
        """Look a queue up, and end its leases that are over."""
        self.refresh(now_ms)
        queue = self.queue(queue_name)
        self.catch_up(now_ms, ALL, queue)
        return queue

    # --- logs and tokens ---------------------------------------------------------------------

    def _look_at_logs(self, over_s: float) -> list[LogStatus]:
        """Look at the heads of logs twice, and count who waits for them in between."""
        database = self.database
        before = {log: published for log, _, published in database.run("log_status")}
        threading.Event().wait(over_s)
        waits: dict[int, int] = {}
        if database.dialect == "postgresql":
            waits = dict(database.run("head_waits"))
        found = []
        for log, head, published in database.run("log_status"):
            per_second = (published - before.get(log, 0)) / over_s if over_s else 0.0
            found.append(LogStatus(log, head, published, per_second, waits.get(log, 0)))
        return found

    def cluster_status(self, now_ms: int, over_s: float = 0) -> ClusterStatus:
        """Count logs, tokens, zones and messages, as of about now; only reads.

        Messages a second are counted for a while, ``over_s``.
        """
        database = self.database
        logs = self._look_at_logs(over_s)
        _, _, ring_size, ring_high, *_ = database.run("load_instance")[0]
        tokens = [TokenStatus(*row) for row in database.run("token_status", now_ms=now_ms)]
        depths = [row[1:3] for row in database.run("sum_counts", queue=None)]
        zones, old_tokens = self.count_old_tokens()
        return ClusterStatus(
            store_id=f"{self.store_id:08x}",
            routing=self.routing,
            ring_size=ring_size,
            ring_high=ring_high,
            zones=zones,
            empty_zones=int(database.run("count_empty_zones")[0][0]),
            old_tokens=old_tokens,
            vested=sum(each.vested for each in tokens),
            oldest_lag_ms=max((each.oldest_lag_ms for each in tokens), default=0),
            waiting=sum(live - in_flight for live, in_flight in depths),
            in_flight=sum(in_flight for _, in_flight in depths),
            next_id=self.read_head().next_id,
            logs=logs,
            tokens=tokens,
        )

    def count_old_tokens(self) -> tuple[int, int]:
        """Count all zones, and those of another ring, whose tokens this process computes.

        Zones that come and go meanwhile may be missed, or counted though they are gone.
        """
        ring_size = self.database.run("load_instance")[0][2]
        queue, zone = -1, b""
        zones = old = 0
        while True:
            rows = self.database.run("page_tokens", queue=queue, zone=zone, count=PAGE)
            zones += len(rows)
            old += sum(token != token_of(q, z, ring_size) for q, z, token in rows)
            if len(rows) < PAGE:
                return zones, old
            queue, zone, _ = rows[-1]


def _entry(queue: SqlQueue, state: State, row: tuple[Any, ...], metadata: Metadata) -> Entry:
    # The last but the metadata.
    more: dict[str, Any] = {"first_claimed_ms": row[-2] or None}
    if state in STATES:
        message_id, attempts, more["visible_at_ms"], vesting_ms, _, consumer, *_ = row
        if state is State.IN_FLIGHT:
            more |= {"lease_deadline_ms": vesting_ms, "consumer": consumer.decode()}
    else:
        _, message_id, attempts, more["ended_at_ms"], reason, *_ = row
        more["reason"] = reason.decode(errors="replace")
    return Entry(
        message_id=message_id,
        queue=queue.name,
        state=state,
        payload=None,
        attributes=metadata.attributes,
        group=metadata.group,
        priority=metadata.priority,
        attempts=attempts,
        published_at_ms=metadata.published_at_ms,
        size=metadata.size,
        **more,
    )


def _cursor_head(queue: SqlQueue, state: State) -> str:
    return f"{state.value}:{queue.number:x}:"


def _parse_cursor(cursor: str | None, queue: SqlQueue, state: State) -> int:
    if cursor is None:
        return -1
    found = re.fullmatch(f"{_cursor_head(queue, state)}([0-7][0-9a-f]{{15}})", cursor)
    if found is None:
        raise InvalidInput(
            f"not a cursor of {state.value} messages of {queue.name}: {cursor[:80]!r}; "
            "pass a page's next_cursor"
        )
    return int(found[1], 16)
