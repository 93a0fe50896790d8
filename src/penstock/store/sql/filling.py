"""A queue is filled from the past: from the log, by matches made elsewhere, from an archive.

Each step is one transaction that holds the queue's row: what it has been filled from (its
coverage) decides what it has had, so that nobody else may change that meanwhile. Coverage knows
nothing of what a move has brought in, so that what is there already is looked for as well.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from penstock.errors import CorruptRecord, InvalidInput, InvalidQueue
from penstock.filters import parse
from penstock.model import Backfilled
from penstock.store.codec.metadata import Metadata, decode_metadata, encode_metadata
from penstock.store.kv.restoring import check_known, step_end
from penstock.store.kv.routing import BACKFILL_WINDOW, FILL_MESSAGES, FILL_WINDOW
from penstock.store.log_records import metadata_of
from penstock.store.plans import BackfillPlan, Filled
from penstock.store.sql.publish import Arrival, add_items
from penstock.store.sql.routing import delayed_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from penstock.filters import Filter
    from penstock.model import LogRecord
    from penstock.store.sql.routing import Routing
    from penstock.store.sql.session import Core, Queue

__all__ = ["Filling"]

_ROWS: Final = 1 << 40


class Filling:
    """Backfill, fill and restore."""

    def __init__(self, core: Core, routing: Routing) -> None:
        self._core = core
        self._routing = routing

    def backfill_plan(
        self, queue_name: str, begin: int, end: int, *, archived: bool = False
    ) -> BackfillPlan:
        """Return what of [begin, end) a queue has not been filled from by its present filter.

        With ``archived`` that begins with what the log has let go of.
        """
        core = self._core
        # What others have filled it from moves no version.
        core.reload()
        queue = core.queue(queue_name)
        text, coverage = queue.spec.filter, queue.coverage
        earliest = self._routing.earliest()
        end = min(end, self._routing.routed_up_to())
        # Offsets begin at 1.
        at = max(begin, 1 if archived else earliest)
        if archived and at < earliest:
            check_known(coverage, queue_name, at)
        return BackfillPlan(coverage.missing(at, end, text), text, end, earliest)

    def backfill(self, queue_name: str, begin: int, end: int, now_ms: int) -> Backfilled:
        """Do one step of filling a queue from [begin, end) of the log; go on from ``next``."""
        core = self._core

        def work() -> Backfilled:
            queue = self._lock(queue_name)
            text = queue.spec.filter
            start = queue.coverage.skip(max(begin, self._routing.earliest()), text)
            stop = min(end, core.head.next_offset, start + BACKFILL_WINDOW)
            if start >= stop:
                return Backfilled(scanned=0, added=0, missing=0, next=max(start, begin))
            rows = self._routing.rows(None, start, stop, _ROWS)
            wanted = self._wanted(queue, rows)
            kept = self._hold(wanted)
            self._enqueue(queue, kept, now_ms)
            self._note(queue, start, stop)
            return Backfilled(
                scanned=len(rows), added=len(kept), missing=len(wanted) - len(kept), next=stop
            )

        done: Backfilled = self._change(queue_name, work)
        return done

    def fill(
        self,
        queue_name: str,
        begin: int,
        end: int,
        offsets: Sequence[int],
        filter_text: str,
        now_ms: int,
    ) -> Filled:
        """Do one step of filling a queue with messages that were matched elsewhere.

        ``offsets`` are all messages of [begin, end) that the queue's filter wants, ascending.
        Coverage decides which of them it has had; go on from ``next``.
        """

        def work() -> Filled:
            queue = self._lock(queue_name, filter_text)
            start = min(end, queue.coverage.skip(begin, filter_text))
            first = bisect_left(offsets, start)
            stop = min(end, start + FILL_WINDOW)
            last = bisect_left(offsets, stop, lo=first)
            if last - first > FILL_MESSAGES:
                last = first + FILL_MESSAGES
                stop = offsets[last]
            if start >= stop:
                return Filled(0, first, 0, end)
            chosen = set(offsets[first:last])
            rows = self._routing.rows(None, start, stop, _ROWS) if chosen else []
            rows = [row for row in rows if row[0] in chosen]
            wanted = self._wanted(queue, rows)
            kept = self._hold(wanted)
            self._enqueue(queue, kept, now_ms)
            self._note(queue, start, stop)
            missing = len(chosen) - len(rows) + len(wanted) - len(kept)
            return Filled(len(kept), first + len(rows) - len(wanted), missing, stop)

        done: Filled = self._change(queue_name, work)
        return done

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

        def work() -> Filled:
            queue = self._lock(queue_name, filter_text)
            earliest = self._routing.earliest()
            if end > earliest:
                raise InvalidInput(
                    f"the log is kept from offset {earliest} on: what is there is filled from the "
                    f"log, so that a restore can't go to {end}"
                )
            check_known(queue.coverage, queue_name, begin)
            start = min(end, queue.coverage.skip(begin, filter_text))
            ids = [record.message_id for record, _ in records]
            first = bisect_left(ids, start)
            last = step_end(records, first)
            stop = end if last == len(records) else ids[last]
            if start >= stop:
                return Filled(0, first, 0, end)
            part = {record.message_id: (metadata_of(record), body)
                    for record, body in records[first:last]}  # fmt: skip
            wanted = self._wanted(
                queue, [(each, encode_metadata(metadata)) for each, (metadata, _) in part.items()]
            )
            kept = self._hold(wanted)
            again = {
                each: part[each]
                for each in wanted
                if each not in kept and part[each][1] is not None
            }
            if again:
                self._core.database.run(
                    "restore_messages",
                    message_ids=list(again),
                    metadata=[encode_metadata(metadata) for metadata, _ in again.values()],
                    payloads=[body for _, body in again.values()],
                )
                kept |= {each: wanted[each] for each in again}
            self._enqueue(queue, dict(sorted(kept.items())), now_ms)
            self._note(queue, start, stop)
            already = first + (last - first) - len(wanted)
            return Filled(len(kept), already, len(wanted) - len(kept), stop)

        done: Filled = self._change(queue_name, work)
        return done

    # --- parts -----------------------------------------------------------------------------

    def _change(self, queue_name: str, work: Any) -> Any:
        core = self._core
        core.refresh()
        core.queue(queue_name)
        return core.change(work)

    def _lock(self, queue_name: str, filter_text: str | None = None) -> Queue:
        """Hold a queue, as it is now; whoever changes it holds log_head and then its row."""
        queue = self._core.lock_queue(queue_name)
        if queue.coverage.draining:
            raise InvalidQueue(f"queue {queue_name!r} is draining: it takes no more messages")
        if filter_text is not None and queue.spec.filter != filter_text:
            raise InvalidInput(
                f"queue {queue_name!r} now takes messages where {queue.spec.filter}; these were "
                f"matched by {filter_text}: plan the backfill again"
            )
        return queue

    def _wanted(self, queue: Queue, rows: Sequence[tuple[Any, ...]]) -> dict[int, Metadata]:
        """Return those messages that a queue wants and has not had."""
        matcher = parse(queue.spec.filter)
        compiled: dict[str, Filter] = {matcher.text: matcher}
        found = {}
        for message_id, encoded in rows:
            try:
                m = decode_metadata(encoded)
            except CorruptRecord:
                continue
            row = (m.attributes, m.group, m.priority, m.published_at_ms, m.size)
            if matcher.matches(row) and not queue.coverage.had(row, message_id, compiled):
                found[message_id] = m
        if found:
            for (message_id,) in self._core.database.run(
                "find_present", queue=queue.number, message_ids=list(found)
            ):
                del found[message_id]
        return found

    def _hold(self, wanted: dict[int, Metadata]) -> dict[int, Metadata]:
        """Hold messages; return those that are there."""
        if not wanted:
            return {}
        rows = self._core.database.run("hold", message_ids=list(wanted))
        held = {row[0] for row in rows}
        return {each: metadata for each, metadata in wanted.items() if each in held}

    def _enqueue(self, queue: Queue, kept: dict[int, Metadata], now_ms: int) -> None:
        arrivals = [
            Arrival(
                queue,
                message_id,
                m.group.encode(),
                m.priority,
                max(now_ms, delayed_until(queue, m.published_at_ms, m.delay_ms)),
                0,
                m.size,
            )
            for message_id, m in kept.items()
        ]
        add_items(self._core, arrivals, now_ms)
        if arrivals:
            count = len(arrivals)
            self._core.add_counts(queue.number, now_ms, live=count, enqueued=count)

    def _note(self, queue: Queue, begin: int, end: int) -> None:
        queue.coverage.note(begin, end, queue.spec.filter)
        self._routing.put_coverage(queue)
        known = self._core.by_number.get(queue.number)
        if known is not None:
            known.coverage = queue.coverage
