"""A queue is filled from the past: from the log, by matches made elsewhere, from an archive.

Each step is one transaction that holds the queue's row: what it has been filled from (its
coverage) decides what it has had, so that nobody else may change that meanwhile. Coverage knows
nothing of what a move has brought in, so that what is there already is looked for as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.model import BackfillPlan, Filled
from penstock.store import policy
from penstock.store.codec.metadata import Metadata, encode_metadata
from penstock.store.sql.publish import Arrival, add_items
from penstock.store.sql.routing import delayed_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from penstock.model import LogRecord
    from penstock.store.sql.routing import Routing
    from penstock.store.sql.session import Core, Queue

__all__ = ["Filling"]

_ROWS: Final = 1 << 40


class Filling:
    """``backfill_plan`` and ``fill``."""

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
            policy.check_known(coverage, queue_name, at)
        return BackfillPlan(coverage.missing(at, end, text), text, end, earliest)

    def fill(
        self,
        queue_name: str,
        begin: int,
        end: int,
        now_ms: int,
        *,
        filter_text: str | None = None,
        offsets: Sequence[int] | None = None,
        records: Sequence[tuple[LogRecord, bytes | None]] | None = None,
    ) -> Filled:
        """Do one step of filling a queue from [begin, end); go on from ``next``.

        ``offsets`` (in the log) or ``records`` (archived, each with its payload if that is known)
        are all messages of it that ``filter_text`` has matched elsewhere, ascending. Without either
        the store matches the log itself. Coverage decides which messages the queue has had.
        """
        archived = {record.message_id: (record, body) for record, body in records or ()}
        matched = offsets if records is None else list(archived)
        sizes = None if records is None else [record.size for record, _ in records]

        def work() -> Filled:
            queue = self._core.lock_queue(queue_name)
            coverage, text = queue.coverage, queue.spec.filter
            policy.check_fill(queue_name, queue.spec, coverage, filter_text)
            log = (self._routing.earliest(), self._core.head.next_offset)
            if records is not None:
                policy.check_archived(queue_name, coverage, begin, end, log[0])
            start, stop, passed, chosen = policy.fill_step(
                coverage, text, (begin, end), log, matched, sizes
            )
            if start >= stop:
                return Filled(0, passed, 0, max(start, begin) if chosen is None else end)
            rows: Sequence[tuple[Any, ...]]
            if records is not None:
                rows = [
                    (each, encode_metadata(policy.metadata_of(archived[each][0])))
                    for each in chosen or ()
                ]
            else:
                rows = self._routing.rows(None, start, stop, _ROWS) if chosen != [] else []
                if chosen is not None:
                    some = set(chosen)
                    rows = [row for row in rows if row[0] in some]
            wanted = self._wanted(queue, rows)
            kept = self._hold(wanted)
            kept |= self._restore(
                {each: wanted[each] for each in wanted if each not in kept and each in archived},
                archived,
            )
            self._enqueue(queue, dict(sorted(kept.items())), now_ms)
            self._note(queue, start, stop)
            asked = len(rows) if chosen is None else len(chosen)
            missing = asked - len(rows) + len(wanted) - len(kept)
            return Filled(len(kept), passed + len(rows) - len(wanted), missing, stop)

        core = self._core
        core.refresh()
        core.queue(queue_name)
        done: Filled = core.change(work)
        return done

    # --- parts -----------------------------------------------------------------------------

    def _restore(
        self,
        gone: dict[int, Metadata],
        archived: dict[int, tuple[LogRecord, bytes | None]],
    ) -> dict[int, Metadata]:
        """Store messages again whose payload the archive has; return those."""
        again = {each: m for each, m in gone.items() if archived[each][1] is not None}
        if again:
            self._core.database.run(
                "restore_messages",
                message_ids=list(again),
                metadata=[encode_metadata(m) for m in again.values()],
                payloads=[archived[each][1] for each in again],
            )
        return again

    def _wanted(self, queue: Queue, rows: Sequence[tuple[Any, ...]]) -> dict[int, Metadata]:
        """Return those messages that a queue wants and has not had."""
        wanted = policy.wanted(queue.spec.filter, queue.coverage, rows)
        found = {message_id: metadata for message_id, (metadata, _) in wanted.items()}
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
