"""Reading without leasing: browse, attempts, stats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import limits
from penstock.errors import CorruptRecord, InvalidInput
from penstock.model import Attempt, AttemptEnd, Entry, Page, QueueStats, State, StoreStats
from penstock.store.codec.metadata import decode_metadata
from penstock.store.sql.maintain import ALL
from penstock.store.sql.settle import ENDINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.store.codec.metadata import Metadata
    from penstock.store.sql.maintain import Upkeep
    from penstock.store.sql.session import Core, Queue

__all__ = ["Views"]


class _Row(NamedTuple):
    """A message of a page; ``place`` is where it stands."""

    place: int
    message_id: int
    attempts: int
    metadata: Metadata
    visible_at_ms: int | None = None
    lease_deadline_ms: int | None = None
    consumer: str | None = None
    ended_at_ms: int | None = None
    reason: str = ""


class Views:
    """The verbs that only look."""

    def __init__(self, core: Core, upkeep: Upkeep) -> None:
        self._core = core
        self._upkeep = upkeep

    def browse(
        self,
        queue_name: str,
        state: State,
        *,
        limit: int,
        cursor: str | None,
        payloads: bool,
        now_ms: int,
    ) -> Page:
        """Read a page of messages in a state."""
        core = self._core
        core.refresh(now_ms)
        queue = core.queue(queue_name)
        after = _parse_cursor(cursor, queue, state)
        self._upkeep.catch_up(now_ms, ALL, queue)
        found = core.database.do(
            lambda: core.database.run(
                f"page_{state.value}",
                queue=queue.number,
                after=after,
                count=limit + 1,
                **({} if state in {State.DONE, State.FAILED} else {"now_ms": now_ms}),
            ),
            again=True,
        )
        rows = [row for each in found[:limit] if (row := _row(state, each)) is not None]
        following = found[limit - 1][0] if len(found) > limit else None
        bodies: dict[int, bytes] = {}
        if payloads and rows:
            fitting = _fitting(rows)
            if fitting < len(rows):
                rows, following = rows[:fitting], rows[fitting - 1].place
            bodies = dict(
                core.database.run("payloads", message_ids=[row.message_id for row in rows])
            )
        entries = [_entry(queue, state, row, bodies.get(row.message_id)) for row in rows]
        head = _cursor_head(queue, state)
        return Page(entries, None if following is None else f"{head}{following:016x}")

    def attempts(self, queue_name: str, message_id: int, now_ms: int) -> list[Attempt]:
        """Return every attempt at a message, the running one last."""
        core = self._core
        core.refresh(now_ms)
        queue = core.queue(queue_name)
        if message_id >= 1 << 63:
            return []
        self._upkeep.catch_up(now_ms, ALL, queue)
        found = [
            Attempt(
                number,
                consumer.decode(),
                claimed_at_ms,
                ended_at_ms,
                AttemptEnd(ENDINGS[ending]),
                reason.decode(errors="replace"),
            )
            for number, consumer, claimed_at_ms, ended_at_ms, ending, reason in core.database.run(
                "attempts", queue=queue.number, message_id=message_id
            )
        ]
        for number, consumer, claimed_at_ms in core.database.run(
            "running", queue=queue.number, message_id=message_id, now_ms=now_ms
        ):
            found.append(
                Attempt(number, consumer.decode(), claimed_at_ms, None, AttemptEnd.RUNNING)
            )
        return found

    def queue_stats(self, queue_name: str, now_ms: int) -> QueueStats:
        """Return a queue's depths and totals."""
        core, database = self._core, self._core.database
        core.refresh(now_ms)
        queue = core.queue(queue_name)
        self._upkeep.catch_up(now_ms, ALL, queue)
        sums = [int(each or 0) for each in database.run("sum_counts", queue=queue.number)[0]]
        live, in_flight, done, failed, *totals = sums
        delayed = database.run("count_delayed", queue=queue.number, now_ms=now_ms)[0][0]
        available = max(0, live - in_flight - delayed)
        age_ms, ready = None, 0
        # Who has nothing to show would be looked for among all that are delayed.
        if available:
            oldest = database.run("oldest", queue=queue.number, now_ms=now_ms)
            if oldest:
                age_ms = max(0, now_ms - decode_metadata(oldest[0][0]).published_at_ms)
            ready = database.run(
                "groups_ready_fifo" if queue.fifo else "groups_ready",
                queue=queue.number,
                now_ms=now_ms,
            )[0][0]
        return QueueStats(
            queue=queue.name,
            available=available,
            delayed=delayed,
            in_flight=in_flight,
            done=done,
            failed=failed,
            oldest_age_ms=age_ms,
            groups_ready=ready,
            enqueued_total=totals[0],
            claimed_total=totals[1],
            acked_total=totals[2],
            released_total=totals[3],
            lease_expired_total=totals[4],
            failed_total=totals[5],
            redriven_total=totals[6],
            removed_total=totals[7],
            moved_in_total=totals[8],
            moved_out_total=totals[9],
        )

    def store_stats(self) -> StoreStats:
        """Return what concerns the whole store."""
        core = self._core
        head = core.read_head()
        return StoreStats(
            published_total=head.published,
            duplicates_total=head.duplicates,
            unrouted_total=head.unrouted,
            quarantined_total=0,
            healed_total=core.zones.orphans,
            stale_receipts_total=core.stale_receipts,
        )


def _row(state: State, row: tuple[Any, ...]) -> _Row | None:
    try:
        metadata = decode_metadata(row[-1] or b"")
    except CorruptRecord:
        return None
    if state in {State.DONE, State.FAILED}:
        place, message_id, attempts, ended_at_ms, reason, _ = row
        said = reason.decode(errors="replace")
        return _Row(place, message_id, attempts, metadata, ended_at_ms=ended_at_ms, reason=said)
    message_id, attempts, visible_at_ms, vesting_ms, consumer, *_ = row
    if state is State.IN_FLIGHT:
        return _Row(
            message_id,
            message_id,
            attempts,
            metadata,
            visible_at_ms=visible_at_ms,
            lease_deadline_ms=vesting_ms,
            consumer=consumer.decode(),
        )
    return _Row(message_id, message_id, attempts, metadata, visible_at_ms=visible_at_ms)


def _entry(queue: Queue, state: State, row: _Row, body: bytes | None) -> Entry:
    return Entry(
        message_id=row.message_id,
        queue=queue.name,
        state=state,
        payload=body,
        attributes=row.metadata.attributes,
        group=row.metadata.group,
        priority=row.metadata.priority,
        attempts=row.attempts,
        published_at_ms=row.metadata.published_at_ms,
        visible_at_ms=row.visible_at_ms,
        lease_deadline_ms=row.lease_deadline_ms,
        consumer=row.consumer,
        ended_at_ms=row.ended_at_ms,
        reason=row.reason,
    )


def _fitting(rows: Sequence[_Row]) -> int:
    """Return how many messages, and at least one, have payloads that fit into a page."""
    size = 0
    for count, row in enumerate(rows):
        size += row.metadata.size
        if size > limits.MAX_PAGE_BYTES:
            return max(1, count)
    return len(rows)


def _cursor_head(queue: Queue, state: State) -> str:
    return f"{state.value}:{queue.number:x}:"


def _parse_cursor(cursor: str | None, queue: Queue, state: State) -> int:
    if cursor is None:
        return -1
    head = _cursor_head(queue, state)
    rest = cursor.removeprefix(head)
    after = -1
    if cursor.startswith(head) and len(rest) == 16 and rest.isascii() and rest.isalnum():
        try:
            after = int(rest, 16)
        except ValueError:
            after = -1
    if not 0 <= after < 1 << 63:
        raise InvalidInput(
            f"not a cursor of {state.value} messages of {queue.name}: {cursor[:80]!r}; "
            "pass a page's next_cursor"
        )
    return after
