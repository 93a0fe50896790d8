"""Messages that the log has let go of come into a queue again, from an archive.

Offsets are message ids, so what an archive holds has its place among what a queue was filled from:
coverage tells whether the queue has had a message, whichever way it came.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidInput, InvalidQueue
from penstock.filters import parse
from penstock.store.codec.metadata import encode_metadata
from penstock.store.live import Item, lane_of
from penstock.store.log_records import metadata_of
from penstock.store.plans import Filled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engines import Batch
    from penstock.filters import Filter
    from penstock.model import LogRecord
    from penstock.store.coverage import Coverage
    from penstock.store.kv.placing import Placing
    from penstock.store.kv.state import Core

__all__ = ["Restoring", "check_known", "step_end"]

# Bounds of one step: what commits together.
RESTORE_MESSAGES: Final = 1_000
RESTORE_BYTES: Final = 16 << 20


class Restoring:
    """Puts archived messages into queues."""

    def __init__(self, core: Core, placing: Placing) -> None:
        self._core = core
        self._placing = placing

    def restore(
        self,
        queue_name: str,
        begin: int,
        end: int,
        records: Sequence[tuple[LogRecord, bytes | None]],
        filter_text: str,
        now_ms: int,
    ) -> Filled:
        """Do one step of filling a queue from below the log; go on from ``next``.

        ``records`` are all messages of [begin, end) that the queue's filter wants, ascending, each
        with its payload if that is known.
        """
        core = self._core
        queue = core.queue(queue_name)
        coverage = core.coverage[queue.name]
        self._check(queue_name, begin, end, filter_text)
        start = min(end, coverage.skip(begin, filter_text))
        ids = [record.message_id for record, _ in records]
        first = bisect_left(ids, start)
        last = step_end(records, first)
        stop = end if last == len(records) else ids[last]
        if start >= stop:
            return Filled(0, first, 0, end)
        chosen = self._wanted(coverage, records[first:last], filter_text)
        # Coverage does not know of what a move has brought in.
        moved = core.history.marks(queue, [record.message_id for record, _ in chosen])
        chosen = [each for each in chosen if each[0].message_id not in moved]
        batch = core.batch_of_new(len(chosen), sum(len(payload or b"") for _, payload in chosen))
        kept = self._kept(batch, chosen)
        if kept:
            self._placing.enqueue(batch, queue, kept, now_ms, late=True)
        coverage.note(start, stop, filter_text)
        core.put_coverage(batch, queue, coverage)
        core.commit(batch, (queue,), now_ms)
        already = first + (last - first) - len(chosen)
        return Filled(len(kept), already, len(chosen) - len(kept), stop)

    def _check(self, queue_name: str, begin: int, end: int, filter_text: str) -> None:
        core = self._core
        queue = core.queue(queue_name)
        coverage = core.coverage[queue.name]
        if coverage.draining:
            raise InvalidQueue(f"queue {queue_name!r} is draining: it takes no more messages")
        if queue.spec.filter != filter_text:
            raise InvalidInput(
                f"queue {queue_name!r} now takes messages where {queue.spec.filter}; these were "
                f"matched by {filter_text}: plan the backfill again"
            )
        if end > core.log.earliest:
            raise InvalidInput(
                f"the log is kept from offset {core.log.earliest} on: what is there is filled from "
                f"the log, so that a restore can't go to {end}"
            )
        check_known(coverage, queue_name, begin)

    def _wanted(
        self,
        coverage: Coverage,
        records: Sequence[tuple[LogRecord, bytes | None]],
        filter_text: str,
    ) -> list[tuple[LogRecord, bytes | None]]:
        wanted = parse(filter_text)
        compiled: dict[str, Filter] = {wanted.text: wanted}
        chosen = []
        for record, payload in records:
            row = (
                record.attributes,
                record.group,
                record.priority,
                record.published_at_ms,
                record.size,
            )
            if wanted.matches(row) and not coverage.had(row, record.message_id, compiled):
                chosen.append((record, payload))
        return chosen

    def _kept(self, batch: Batch, chosen: Sequence[tuple[LogRecord, bytes | None]]) -> list[Item]:
        """Hold the payloads that are here, store those that are not; give what has one."""
        payloads = self._core.payloads
        held = payloads.hold(batch, [record.message_id for record, _ in chosen])
        kept = []
        for (record, payload), here in zip(chosen, held, strict=True):
            if not here:
                if payload is None:
                    continue
                payloads.put_again(batch, record.message_id, payload)
            kept.append(_item(record))
        return kept


def check_known(coverage: Coverage, queue_name: str, begin: int) -> None:
    """Refuse offsets of which nobody knows any more what the queue has had."""
    known_from = coverage.known_from or 0
    # Offsets begin at 1.
    if max(begin, 1) < known_from:
        raise InvalidInput(
            f"queue {queue_name!r} has forgotten what it has had below offset {known_from}, so "
            f"that messages might come twice: an archive can fill it from offset {known_from} on"
        )


def step_end(records: Sequence[tuple[LogRecord, bytes | None]], first: int) -> int:
    """Return where a step of bounded size ends that begins with a record."""
    size = 0
    for at in range(first, len(records)):
        size += records[at][0].size
        if at - first >= RESTORE_MESSAGES or (size > RESTORE_BYTES and at > first):
            return at
    return len(records)


def _item(record: LogRecord) -> Item:
    metadata = encode_metadata(metadata_of(record))
    visible_at_ms = record.published_at_ms + record.delay_ms
    lane = lane_of(record.group, record.priority)
    return Item(record.message_id, record.message_id, lane, 0, 0, visible_at_ms, metadata)
