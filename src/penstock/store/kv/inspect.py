"""Reading without leasing: browse, attempts, stats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import limits
from penstock.errors import CorruptRecord, InvalidInput
from penstock.model import Attempt, AttemptEnd, Entry, Page, QueueStats, State, StoreStats
from penstock.store.codec.metadata import decode_heads, decode_metadata, read_metadata
from penstock.store.codec.stored import decode_lease
from penstock.store.kv.move import ALL, MoveVerbs
from penstock.store.kv.state import verb
from penstock.store.live import Item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.store.codec.stored import LeaseRecord
    from penstock.store.kv.history import Ended
    from penstock.store.kv.queues import Queue


class InspectVerbs(MoveVerbs):
    """The verbs that only look."""

    @verb
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
        core = self.core
        queue = core.queue(queue_name)
        after = _parse_cursor(cursor, queue, state)
        self.catch_up(now_ms, ALL)
        found, following = self._page(queue, state, after, limit)
        if payloads and (fitting := _fitting(found)) < len(found):
            found, following = self._page(queue, state, after, fitting)
        bodies: list[bytes | None] = [None] * len(found)
        if payloads and found:
            bodies = core.payloads.get([row.message_id for row in found])
        leases = self._leases_of(found) if state is State.IN_FLIGHT else {}
        entries = [
            entry
            for row, body in zip(found, bodies, strict=True)
            if (entry := _entry(queue, state, row, body, leases)) is not None
        ]
        core.settle_quarantine(now_ms)
        head = _cursor_head(queue, state)
        return Page(entries, None if following is None else head + following.hex())

    def _page(
        self, queue: Queue, state: State, after: bytes, limit: int
    ) -> tuple[Sequence[Item | Ended], bytes | None]:
        if state in {State.DONE, State.FAILED}:
            return self.core.history.page(queue, state, after, limit)
        return self.core.active.page(queue, state, after, limit)

    @verb
    def attempts(self, queue_name: str, message_id: int, now_ms: int) -> list[Attempt]:
        """Return every attempt at a message, the running one last."""
        core = self.core
        queue = core.queue(queue_name)
        self.catch_up(now_ms, ALL)
        found = core.history.attempts(queue, message_id)
        running = core.active.in_flight_by_message(queue, message_id)
        if running is not None:
            lease = self._leases_of([running]).get(running.lease)
            if lease is not None:
                found.append(
                    Attempt(
                        running.attempts,
                        lease.consumer,
                        lease.claimed_at_ms,
                        None,
                        AttemptEnd.RUNNING,
                    )
                )
        core.settle_quarantine(now_ms)
        return found

    @verb
    def queue_stats(self, queue_name: str, now_ms: int) -> QueueStats:
        """Return a queue's depths and totals."""
        core = self.core
        queue = core.queue(queue_name)
        self.catch_up(now_ms, ALL)
        if queue.number in core.active.damage:
            raise core.active.damage[queue.number].anew()
        oldest = core.active.oldest(queue)
        age_ms = None
        if oldest is not None:
            age_ms = max(0, now_ms - decode_metadata(oldest.metadata).published_at_ms)
        core.settle_quarantine(now_ms)
        counts = queue.counts
        return QueueStats(
            queue=queue.name,
            available=counts.available,
            delayed=counts.delayed,
            in_flight=counts.in_flight,
            done=counts.done,
            failed=counts.failed,
            oldest_age_ms=age_ms,
            groups_ready=core.active.ready_groups(queue),
            enqueued_total=counts.enqueued_total,
            claimed_total=counts.claimed_total,
            acked_total=counts.acked_total,
            released_total=counts.released_total,
            lease_expired_total=counts.lease_expired_total,
            failed_total=counts.failed_total,
            redriven_total=counts.redriven_total,
            removed_total=counts.removed_total,
            moved_in_total=counts.moved_in_total,
            moved_out_total=counts.moved_out_total,
        )

    @verb
    def store_stats(self) -> StoreStats:
        """Return what concerns the whole store."""
        core = self.core
        return StoreStats(
            published_total=core.totals.published,
            duplicates_total=core.totals.duplicates,
            unrouted_total=core.totals.unrouted,
            quarantined_total=core.totals.quarantined,
            unreadable_total=core.unreadable,
            healed_total=core.active.healed,
            stale_receipts_total=core.stale_receipts,
        )

    def _leases_of(self, rows: Sequence[Item | Ended]) -> dict[bytes, LeaseRecord]:
        names = list({row.lease for row in rows if isinstance(row, Item)})
        found = {}
        for name, record in zip(names, self.core.leases.get(names), strict=True):
            if record is not None:
                try:
                    found[name] = decode_lease(record)
                except CorruptRecord:
                    continue
        return found


def _entry(
    queue: Queue,
    state: State,
    row: Item | Ended,
    body: bytes | None,
    leases: dict[bytes, LeaseRecord],
) -> Entry | None:
    metadata = read_metadata(row.metadata)
    if metadata is None:
        return None
    live = row if isinstance(row, Item) else None
    ended = row if not isinstance(row, Item) else None
    lease = leases.get(live.lease) if live else None
    return Entry(
        message_id=row.message_id,
        queue=queue.name,
        state=state,
        payload=body,
        attributes=metadata.attributes,
        group=metadata.group,
        priority=metadata.priority,
        attempts=row.attempts,
        published_at_ms=metadata.published_at_ms,
        visible_at_ms=live.visible_at_ms if live else None,
        lease_deadline_ms=lease.expiry_ms if lease else None,
        consumer=lease.consumer if lease else None,
        ended_at_ms=ended.ended_at_ms if ended else None,
        reason=ended.reason if ended else "",
    )


def _cursor_head(queue: Queue, state: State) -> str:
    return f"{state.value}:{queue.number:x}:"


def _fitting(found: Sequence[Item | Ended]) -> int:
    """Return how many messages, and at least one, have payloads that fit into a page."""
    size = 0
    for count, head in enumerate(decode_heads([row.metadata for row in found])):
        size += 0 if head is None else head.size
        if size > limits.MAX_PAGE_BYTES:
            return max(1, count)
    return len(found)


def _parse_cursor(cursor: str | None, queue: Queue, state: State) -> bytes:
    if cursor is None:
        return b""
    head = _cursor_head(queue, state)
    try:
        after = bytes.fromhex(cursor.removeprefix(head)) if cursor.startswith(head) else b""
    except ValueError:
        after = b""
    if len(after) < 4:
        raise InvalidInput(
            f"not a cursor of {state.value} messages of {queue.name}: {cursor[:80]!r}; "
            "pass a page's next_cursor"
        )
    return after
