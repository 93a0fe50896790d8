"""A store is loaded from pages of another.

::

    table default
    02 17                     while a store is being loaded: how far, MessagePack (CopyProgress)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.model import State
from penstock.store.codec.metadata import decode_heads, decode_metadata
from penstock.store.codec.opendata import SEQ_BLOCK_KEY, encode_seq_block, payload_key
from penstock.store.kv.queues import Counts, Queue
from penstock.store.kv.state import Totals
from penstock.store.live import Item, lane_of
from penstock.store.policy import SEGMENT_MS
from penstock.store.transfer import CopyEnd, CopyPage, CopyProgress, CopyStart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engines import Batch
    from penstock.filters import Filter
    from penstock.store.kv.store import KvStore
    from penstock.store.transfer import CopiedMessage, CopyPart

_PROGRESS: Final = b"\x02\x17"


class KvLoader:
    """Loads a store whose routing is ``copying``; nobody else works on it."""

    def __init__(self, store: KvStore) -> None:
        self._store = store

    def load(self, part: CopyPart | None) -> CopyProgress | None:
        """Write a part of a copy with the position behind it; return the position."""
        store = self._store
        record = store.system.get(_PROGRESS)
        progress = None
        if record is not None:
            progress = msgspec.msgpack.decode(record, type=CopyProgress)
        if part is None:
            return progress
        if isinstance(part, CopyStart):
            return self._begin(part)
        assert progress is not None
        if isinstance(part, CopyEnd):
            batch = store.begin()
            store.put_routing(batch, part.routing)
            batch.delete(_PROGRESS, store.system.family)
            store.commit(batch, (), progress.at_ms)
            return None
        progress.section, progress.rows = part.section, part.rows
        self._load_page(part, progress)
        return progress

    def _begin(self, start: CopyStart) -> CopyProgress:
        store = self._store
        batch = store.begin()
        block = encode_seq_block(start.end - 1, 1)
        batch.put(SEQ_BLOCK_KEY, block, store.engine.table("log").family)
        store.log.put_settings(batch, start.settings)
        store.put_epoch(batch, start.epoch)
        store.put_cursors(batch, start.cursors)
        for each in start.queues:
            counts = Counts(**each.totals)
            counts.time_floor_ms = start.at_ms
            queue = Queue(each.spec, store.queue_numbers.allocate(batch, 1), counts)
            store.queue_table.put_spec(batch, queue)
            store.queue_table.put_counts(batch, queue)
            store.queue_table.put_coverage(batch, queue, each.coverage)
        store.totals = Totals(start.published, start.duplicates, start.unrouted, filters_version=1)
        store.put_totals(batch, start.at_ms)
        progress = CopyProgress(start.fingerprint(), start.at_ms, 0, 0)
        self._put_progress(batch, progress)
        store.commit(batch, (), start.at_ms)
        # Queues, ids and settings are read as they were written.
        store.load()
        return progress

    def _put_progress(self, batch: Batch, progress: CopyProgress) -> None:
        batch.put(_PROGRESS, msgspec.msgpack.encode(progress), self._store.system.family)

    def _load_page(self, page: CopyPage, progress: CopyProgress) -> None:
        store = self._store
        payloads = sum(len(each.payload) for each in page.messages)
        payloads += sum(len(payload) for _, _, payload in page.unheld)
        batch = store.begin(len(page), payloads)
        touched: list[Queue] = []
        if page.table == "log":
            self._load_log(batch, page)
        elif page.table == "unheld":
            self._load_unheld(batch, page)
        else:
            queue = store.queue(page.queue)
            touched.append(queue)
            self._load_messages(batch, queue, page, progress.at_ms)
        self._put_progress(batch, progress)
        store.commit(batch, touched, progress.at_ms)

    def _load_log(self, batch: Batch, page: CopyPage) -> None:
        log = self._store.log
        heads = decode_heads([metadata for _, _, metadata in page.log])
        run: list[tuple[int, int, bytes]] = []
        for row, head in zip(page.log, heads, strict=True):
            at_ms = 0 if head is None else head.published_at_ms
            if not log.segments:
                log.roll(batch, page.earliest, at_ms)
            if at_ms - log.segments[-1].start_ms >= SEGMENT_MS:
                self._append(batch, run)
                log.roll(batch, row[1], at_ms)
                run = []
            run.append(row)
        self._append(batch, run)

    def _append(self, batch: Batch, run: Sequence[tuple[int, int, bytes]]) -> None:
        """Append messages (log, id, metadata) to the newest segment."""
        if run:
            log = self._store.log
            rows = [(message_id, metadata) for _, message_id, metadata in run]
            into = [number for number, _, _ in run]
            log.append(batch, rows, (), None, frozenset(), log.segments[-1].start_ms, into)

    def _load_unheld(self, batch: Batch, page: CopyPage) -> None:
        store = self._store
        unrouted = []
        for message_id, routed, payload in page.unheld:
            batch.put(payload_key(message_id), payload, store.payloads.table.family)
            # One that waits for its tailer has no count.
            if routed:
                store.payloads.refer(batch, message_id, 0)
                unrouted.append(message_id)
        if unrouted:
            store.log.note_unrouted(batch, unrouted)

    def _load_messages(self, batch: Batch, queue: Queue, page: CopyPage, at_ms: int) -> None:
        store = self._store
        sizes = {each.message_id: len(each.payload) for each in page.messages}
        held = store.payloads.hold(batch, sizes)
        items = []
        for each, here in zip(page.messages, held, strict=True):
            if not here:
                store.payloads.put_again(batch, each.message_id, each.payload)
            for number, attempt in each.history:
                store.history.put_attempt(batch, queue, each.message_id, number, attempt)
            m, id_ = decode_metadata(each.metadata), each.message_id
            lane = lane_of(m.group, m.priority)
            items.append(
                Item(id_, id_, lane, each.attempts, each.forgiven, each.time_ms, each.metadata)
            )
        if page.table == "active":
            store.active.add(batch, queue, items, at_ms)
            store.note_unclaimed(batch, queue, items)
        else:
            entries = [
                (each.message_id, each.message_id, each.time_ms, each.attempts, each.metadata,
                 each.reason, each.first_claimed_ms)
                for each in page.messages
            ]  # fmt: skip
            store.history.append(batch, queue, State(page.table), entries)
        moved = _moved_in(queue, page.messages)
        if moved:
            store.history.mark(batch, queue, [item for item in items if item.message_id in moved])


def _moved_in(queue: Queue, messages: Sequence[CopiedMessage]) -> set[int]:
    """Return the messages that a move has brought into a queue: coverage does not know them."""
    coverage = queue.coverage
    compiled: dict[str, Filter] = {}
    found = set()
    for each in messages:
        m = decode_metadata(each.metadata)
        row = (m.attributes, m.group, m.priority, m.published_at_ms, m.size)
        if not coverage.had(row, each.message_id, compiled):
            found.add(each.message_id)
    return found
