"""A store is loaded from pages of another: ``load_copy``.

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
from penstock.store.kv.routing import RoutingVerbs
from penstock.store.kv.state import Totals, verb
from penstock.store.live import Item, lane_of
from penstock.store.policy import SEGMENT_MS
from penstock.store.transfer import CopyEnd, CopyPage, CopyProgress, CopyStart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engines import Batch
    from penstock.filters import Filter
    from penstock.store.transfer import CopiedMessage, CopyPart

_PROGRESS: Final = b"\x02\x17"


class LoadVerbs(RoutingVerbs):
    """``load_copy``."""

    @verb
    def load_copy(self, part: CopyPart | None) -> CopyProgress | None:
        """Write a part of a copy with the position behind it; return the position."""
        record = self.system.get(_PROGRESS)
        progress = None
        if record is not None:
            progress = msgspec.msgpack.decode(record, type=CopyProgress)
        if part is None:
            return progress
        if isinstance(part, CopyStart):
            return self._begin_load(part)
        assert progress is not None
        if isinstance(part, CopyEnd):
            batch = self.begin()
            self.put_routing(batch, part.routing)
            batch.delete(_PROGRESS, self.system.family)
            self.commit(batch, (), progress.at_ms)
            self.load()
            return None
        progress.section, progress.rows = part.section, part.rows
        self._load_page(part, progress)
        return progress

    def _begin_load(self, start: CopyStart) -> CopyProgress:
        batch = self.begin()
        block = encode_seq_block(start.end - 1, 1)
        batch.put(SEQ_BLOCK_KEY, block, self.engine.table("log").family)
        self.log.put_settings(batch, start.settings)
        self._put_epoch(batch, start.epoch)
        self._put_cursors(batch, start.cursors)
        for each in start.queues:
            counts = Counts(**each.totals)
            counts.time_floor_ms = start.at_ms
            queue = Queue(each.spec, self.queue_numbers.allocate(batch, 1), counts)
            self.queue_table.put_spec(batch, queue)
            self.queue_table.put_counts(batch, queue)
            self.queue_table.put_coverage(batch, queue, each.coverage)
        self.totals = Totals(start.published, start.duplicates, start.unrouted, filters_version=1)
        self.put_totals(batch, start.at_ms)
        progress = CopyProgress(start.fingerprint(), start.at_ms, 0, 0)
        self._put_progress(batch, progress)
        self.commit(batch, (), start.at_ms)
        # Queues, ids and settings are read as they were written.
        self.load()
        return progress

    def _put_progress(self, batch: Batch, progress: CopyProgress) -> None:
        batch.put(_PROGRESS, msgspec.msgpack.encode(progress), self.system.family)

    def _load_page(self, page: CopyPage, progress: CopyProgress) -> None:
        payloads = sum(len(each.payload) for each in page.messages)
        payloads += sum(len(payload) for _, _, payload in page.unheld)
        batch = self.begin(len(page), payloads)
        touched: list[Queue] = []
        if page.table == "log":
            self._load_log(batch, page)
        elif page.table == "unheld":
            self._load_unheld(batch, page)
        else:
            queue = self.queue(page.queue)
            touched.append(queue)
            self._load_messages(batch, queue, page, progress.at_ms)
        self._put_progress(batch, progress)
        self.commit(batch, touched, progress.at_ms)

    def _load_log(self, batch: Batch, page: CopyPage) -> None:
        log = self.log
        spread: dict[int, list[tuple[int, bytes]]] = {}
        heads = decode_heads([metadata for _, _, metadata in page.log])
        for (number, message_id, metadata), head in zip(page.log, heads, strict=True):
            at_ms = log.segments[-1].start_ms if head is None and log.segments else 0
            at_ms = at_ms if head is None else head.published_at_ms
            if not log.segments or at_ms - log.segments[-1].start_ms >= SEGMENT_MS:
                if spread:
                    log.put_rows(batch, log.segments[-1], spread)
                    spread = {}
                log.roll(batch, message_id if log.segments else page.earliest, at_ms)
            spread.setdefault(number, []).append((message_id, metadata))
        log.put_rows(batch, log.segments[-1], spread)

    def _load_unheld(self, batch: Batch, page: CopyPage) -> None:
        unrouted = []
        for message_id, routed, payload in page.unheld:
            batch.put(payload_key(message_id), payload, self.payloads.table.family)
            # One that waits for its tailer has no count.
            if routed:
                self.payloads.refer(batch, message_id, 0)
                unrouted.append(message_id)
        if unrouted:
            self.log.note_unrouted(batch, unrouted)

    def _load_messages(self, batch: Batch, queue: Queue, page: CopyPage, at_ms: int) -> None:
        held = self.payloads.hold(batch, [each.message_id for each in page.messages])
        items = []
        for each, here in zip(page.messages, held, strict=True):
            if not here:
                self.payloads.put_again(batch, each.message_id, each.payload)
            for number, attempt in each.history:
                self.history.put_attempt(batch, queue, each.message_id, number, attempt)
            m, id_ = decode_metadata(each.metadata), each.message_id
            lane = lane_of(m.group, m.priority)
            items.append(
                Item(id_, id_, lane, each.attempts, each.forgiven, each.time_ms, each.metadata)
            )
        if page.table == "active":
            self.active.add(batch, queue, items, at_ms)
            self.note_unclaimed(batch, queue, items)
        else:
            entries = [
                (each.message_id, each.message_id, each.time_ms, each.attempts, each.metadata,
                 each.reason)
                for each in page.messages
            ]  # fmt: skip
            self.history.append(batch, queue, State(page.table), entries)
        moved = _moved_in(queue, page.messages)
        if moved:
            self.history.mark(batch, queue, [item for item in items if item.message_id in moved])


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
