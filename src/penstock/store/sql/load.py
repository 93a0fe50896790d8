"""A store is loaded from pages of another.

The position is a row of ``requests`` whose token is longer than that of a publish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.store.codec.metadata import decode_heads
from penstock.store.policy import SEGMENT_MS
from penstock.store.sql.database import columns
from penstock.store.sql.publish import Items
from penstock.store.sql.session import EACH_MS, SLOTS
from penstock.store.sql.zones import NEVER_MS
from penstock.store.transfer import CopyEnd, CopyPage, CopyProgress, CopyStart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.store.codec.records import AttemptRecord
    from penstock.store.sql.session import SqlQueue
    from penstock.store.sql.store import SqlStore
    from penstock.store.transfer import CopiedMessage, CopyPart

_TOKEN: Final = b"copy\0"
_ACKED: Final = 0


class SqlLoader:
    """Loads a store whose routing is ``copying``; nobody else works on it."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._run = store.database.run

    def load(self, part: CopyPart | None) -> CopyProgress | None:
        """Write a part of a copy with the position behind it; return the position."""
        store = self._store
        progress = None
        for token, numbers, at_ms in store.database.ask("find_position"):
            progress = CopyProgress(token.removeprefix(_TOKEN), at_ms, *numbers)
        if part is None:
            return progress
        if isinstance(part, CopyStart):
            progress = CopyProgress(part.fingerprint(), part.at_ms, 0, 0)
            store.change(lambda: self._begin(part, progress))
            store.reload()
            return progress
        assert progress is not None
        if isinstance(part, CopyEnd):
            store.change(lambda: self._run("end_load", routing=part.routing))
            store.reload()
            return None
        progress.section, progress.rows = part.section, part.rows
        # A commit without an answer is an error: the position tells the next run what was written.
        store.change(lambda: self._load_page(part, progress))
        return progress

    def _put_progress(self, progress: CopyProgress) -> None:
        self._run(
            "load_position",
            token=_TOKEN + progress.fingerprint,
            numbers=[progress.section, progress.rows],
            at_ms=progress.at_ms,
        )

    def _begin(self, start: CopyStart, progress: CopyProgress) -> None:
        # From here on messages are spread over as many logs as those of a new store.
        own, settings = self._store.settings.changes[-1][1], start.settings
        if settings.changes[-1][1] != own:
            changes = [*settings.changes, (start.end, own)]
            settings = msgspec.structs.replace(settings, changes=changes)
        logs = max(count for _, count in settings.changes)
        self._run(
            "load_store",
            end=start.end,
            epoch=start.epoch,
            logs=logs,
            never=NEVER_MS,
            segment_ms=-(1 << 62),
            published=start.published,
            duplicates=start.duplicates,
            unrouted=start.unrouted,
        )
        self._run("put_log_settings", value=msgspec.msgpack.encode(settings))
        if start.cursors:
            for log in range(logs):
                self._run("lock_cursor", log=log, cursor=start.cursors.get(log, start.end))
        for each in start.queues:
            queue = self._store.add_queue(each.spec, each.coverage, start.at_ms)
            self._run("load_totals", queue=queue.number, **each.totals)
        self._put_progress(progress)

    def _load_page(self, page: CopyPage, progress: CopyProgress) -> None:
        if page.table == "log":
            self._load_log(page)
        elif page.table == "unheld":
            logs = list(range(max(count for _, count in self._store.settings.changes)))
            rows = [(message_id, payload) for message_id, _, payload in page.unheld]
            self._run("load_unheld", **columns(rows, "message_ids", "payloads"), logs=logs)
        else:
            self._load_messages(self._store.queue(page.queue), page, progress.at_ms)
        self._put_progress(progress)

    def _load_log(self, page: CopyPage) -> None:
        segments = self._run("load_segments")
        begun_ms = segments[-1][2] if segments else None
        rows = []
        heads = decode_heads([metadata for _, _, metadata in page.log])
        for (log, message_id, metadata), head in zip(page.log, heads, strict=True):
            at_ms = (begun_ms or 0) if head is None else head.published_at_ms
            if begun_ms is None or at_ms - begun_ms >= SEGMENT_MS:
                first = page.earliest if begun_ms is None else message_id
                self._run("load_segment", start_offset=first, start_ms=at_ms)
                begun_ms = at_ms
            rows.append((log, message_id, at_ms, metadata))
        names = columns(rows, "logs", "message_ids", "times", "metadata")
        self._run("load_log", **names)

    def _load_messages(self, queue: SqlQueue, page: CopyPage, at_ms: int) -> None:
        stored = [(each.message_id, each.metadata, each.payload) for each in page.messages]
        self._run("load_messages", **columns(stored, "message_ids", "metadata", "payloads"))
        count = len(page.messages)
        if page.table == "active":
            size = self._load_items(queue, page.messages, at_ms)
            self._store.add_counts(queue.number, at_ms, live=count, live_bytes=size)
        else:
            failed = page.table == "failed"
            self._load_ended(queue, page.messages, failed=failed)
            self._store.add_counts(queue.number, at_ms, **{page.table: count})
        rows: list[tuple[Any, ...]] = []
        for each in page.messages:
            for number, record in each.history:
                if page.table == "done" and _is_last(each, number, record):
                    continue
                claimed, consumer, ended, ending, reason = record
                texts = consumer.encode(), reason.encode()
                rows.append((each.message_id, number, claimed, texts[0], ended, ending, texts[1]))
        if rows:
            names = ("message_ids", "numbers", "claimed", "consumers", "ended", "endings")
            told = columns(rows, *names, "reasons")
            self._run("load_attempts", queue=queue.number, **told)

    def _load_items(self, queue: SqlQueue, messages: Sequence[CopiedMessage], at_ms: int) -> int:
        """Write live messages; return the bytes of their payloads."""
        items = Items()
        heads = decode_heads([each.metadata for each in messages])
        for each, head in zip(messages, heads, strict=True):
            assert head is not None
            items.add(queue, each.message_id, head, each.time_ms, each.attempts)
        self._store.add_items(items, at_ms)
        # Others have all of their attempts forgiven.
        tried = [(each.message_id, each.forgiven) for each in messages if each.attempts]
        if tried:
            told = columns(tried, "message_ids", "forgiven")
            self._run("load_forgiven", queue=queue.number, **told)
        return items.sizes[queue]

    def _load_ended(
        self, queue: SqlQueue, messages: Sequence[CopiedMessage], *, failed: bool
    ) -> None:
        """Write ended messages under sequence numbers that begin with the time of each."""
        span = {"queue": queue.number, "low": 0, "high": (1 << 63) - 1}
        last = self._run("ended_ends", failed=failed, **span)[0][1]
        following = 0 if last is None else last // SLOTS + 1
        rows = []
        for each in messages:
            consumer, claimed_ms = b"", 0
            for number, record in each.history:
                if not failed and _is_last(each, number, record):
                    consumer, claimed_ms = record.consumer.encode(), record.claimed_at
            following = max(following, each.time_ms * EACH_MS)
            row = (following * SLOTS, each.message_id, each.time_ms, each.attempts)
            rows.append((*row, each.reason.encode(), consumer, claimed_ms))
            following += 1
        names = ("sequences", "message_ids", "ended", "attempts", "reasons", "consumers", "claimed")
        self._run("load_ended", queue=queue.number, failed=failed, **columns(rows, *names))
        self._run("raise_sequences", queues=[queue.number], marks=[following], slots=SLOTS)


def _is_last(message: CopiedMessage, number: int, record: AttemptRecord) -> bool:
    """Whether an attempt is the one that ended a done message."""
    return number == message.attempts and record.outcome == _ACKED
