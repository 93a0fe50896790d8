"""History: done and failed messages, and every attempt, in the RFC's records (version 2).

::

    table history
    02 03 | queue | bucket u64 | part u64       done messages of one commit
    02 04 | queue | bucket u64 | part u64       failed messages of one commit
    02 05 | queue | message u64 | attempt u16   one attempt that has ended
    02 0a | queue | message u64                 key of the failed part that holds the message
    02 15 | queue | message u64                 u64 BE: the key that a message came in with that was
                                                moved here from another queue; while it is here

Parts are numbered by a sequence per queue and state, so they lie in the order of time and
retention takes them from the front. All messages of a part have ended at one time, however they
came here, so that a message is found by its time. The bucket is the RFC's: exponent and number, the
number being the part's rounded down to the bucket's capacity. A message keeps its number when
others leave its part: those behind them become a part of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import groupby, islice, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from penstock import limits
from penstock.engines import get_each, rows_of
from penstock.errors import CorruptRecord, StoreDamaged
from penstock.model import Attempt, AttemptEnd, State
from penstock.store.codec import opendata
from penstock.store.codec.records import (
    AttemptRecord,
    Ended,
    claimed_at_of,
    decode_attempt,
    decode_ended,
    encode_attempt,
    encode_ended,
)
from penstock.store.kv.tables import FirstKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.engines import Batch, Table
    from penstock.store.codec.records import EndedFields
    from penstock.store.kv.queues import Queue
    from penstock.store.live import Item, Quarantine

_FAILED_INDEX: Final = opendata.QueueKeys(b"\x02\x0a", ">Q", "failed index key")
_MARKS: Final = opendata.QueueKeys(b"\x02\x15", ">Q", "mark's key")
_ENDS: Final = (AttemptEnd.ACKED, AttemptEnd.RELEASED, AttemptEnd.EXPIRED)
_CODES: Final = {end: code for code, end in enumerate(_ENDS)}
_INDEX_BYTES: Final = 2
_KEYS: Final = {State.DONE: opendata.DONE, State.FAILED: opendata.FAILED}
_ended_at: Final = itemgetter(2)
# Parts read at a time: each may hold many messages.
_PAGE: Final = 64


class History:
    """Done and failed parts, attempts, and the way from a failed message to its part."""

    def __init__(self, table: Table, quarantine: Quarantine) -> None:
        self._table = table
        self._quarantine = quarantine
        self.first_keys = FirstKeys(table)
        # Numbers of the queues that have marks, or have had some.
        self._marked: set[int] = set()

    def load(self, queue: Queue) -> None:
        """Find out whether a queue has messages that were moved here."""
        prefix = _MARKS.prefix(queue.id)
        try:
            has_some = bool(self._table.scan(prefix, prefix + b"\xff" * 9, 1))
        except StoreDamaged:
            # A verb that looks for one finds out.
            has_some = True
        (self._marked.add if has_some else self._marked.discard)(queue.number)

    def forget(self, queue: Queue) -> None:
        """Drop what memory keeps about a queue that was deleted."""
        self._marked.discard(queue.number)
        for state in _KEYS:
            self.first_keys.forget(*(begin for begin, _ in _runs(queue, state)))

    # --- in ------------------------------------------------------------------------------

    def add(
        self,
        batch: Batch,
        queue: Queue,
        state: State,
        held: Sequence[tuple[Sequence[Item], int | None]],
        reason: str,
        now_ms: int,
    ) -> None:
        """Append messages that are done, or that have failed and share a reason.

        With those of each lease comes the time of its claim; with those that waited, None.
        """
        entries: list[EndedFields] = []
        one_ms: int | None = None
        for items, claimed_at_ms in held:
            again = not claimed_at_ms
            for item in items:
                if item.attempts != 1:
                    again = True
            if again:
                claims = self.first_claims(queue, items, claimed_at_ms)
                entries += [
                    (i.message_id, i.key, now_ms, i.attempts, i.metadata, reason, claimed_ms)
                    for i, claimed_ms in zip(items, claims, strict=True)
                ]
                continue
            one_ms = claimed_at_ms if len(held) == 1 else None
            entries += [
                (i.message_id, i.key, now_ms, 1, i.metadata, reason, claimed_at_ms) for i in items
            ]
        self._append(batch, queue, state, entries, one_ms)
        if state is State.FAILED:
            queue.counts.failed_total += len(entries)
        else:
            queue.counts.acked_total += len(entries)

    def append(
        self, batch: Batch, queue: Queue, state: State, entries: Sequence[EndedFields]
    ) -> None:
        """Append messages that have ended at any times."""
        for _, same in groupby(entries, _ended_at):
            self._append(batch, queue, state, list(same), None)

    def _append(
        self,
        batch: Batch,
        queue: Queue,
        state: State,
        rest: list[EndedFields],
        claimed_ms: int | None,
    ) -> None:
        """Append messages of one time; ``claimed_ms``: the first claim of all, if it is one."""
        counts, exponent, count = queue.counts, queue.spec.bucket_exponent, len(rest)
        failed = state is State.FAILED
        number = counts.next_failed if failed else counts.next_done
        capacity = opendata.capacity(exponent)
        begin, _ = _run(queue.id, state, exponent)
        while rest:
            # A part ends where its bucket does.
            first = number - number % capacity
            room = first + capacity - number
            chunk, rest = rest[:room], rest[room:]
            bucket = (exponent << 60 | first).to_bytes(8, "big")
            key = begin[:-8] + bucket + number.to_bytes(8, "big")
            self.first_keys.note(begin, key)
            record = encode_ended(chunk, failed=failed, claimed_ms=claimed_ms)
            batch.put(key, record, self._table.family)
            for entry in chunk if failed else ():
                batch.put(_FAILED_INDEX.key(queue.id, entry[0]), key, self._table.family)
            number += len(chunk)
        if failed:
            counts.next_failed, counts.failed = number, counts.failed + count
        else:
            counts.next_done, counts.done = number, counts.done + count

    def add_attempts(
        self,
        batch: Batch,
        queue: Queue,
        items: Sequence[Item],
        claimed_at_ms: int,
        consumer: str,
        end: AttemptEnd,
        reason: str,
        now_ms: int,
    ) -> None:
        """Record the end of attempts that began in one claim and end in one call."""
        record = _attempt(claimed_at_ms, consumer, now_ms, _CODES[end], reason)
        put, family, prefix = batch.put, self._table.family, queue.attempts_prefix
        for item in items:
            suffix = (item.message_id << 16 | item.attempts).to_bytes(10, "big")
            put(prefix + suffix, record, family)

    def ack_attempt(self, batch: Batch, queue: Queue, item: Item, now_ms: int) -> str:
        """Record that the last attempt at a message, which is over, was acked now; say whose."""
        claimed_at_ms, consumer = now_ms, ""
        for each in self.attempts(queue, item.message_id):
            if each.number == item.attempts:
                claimed_at_ms, consumer = each.claimed_at_ms, each.consumer
        acked = AttemptEnd.ACKED
        self.add_attempts(batch, queue, [item], claimed_at_ms, consumer, acked, "", now_ms)
        return consumer

    def put_attempt(
        self, batch: Batch, queue: Queue, message_id: int, number: int, record: AttemptRecord
    ) -> None:
        """Record an attempt that has ended elsewhere."""
        suffix = (message_id << 16 | number).to_bytes(10, "big")
        batch.put(queue.attempts_prefix + suffix, encode_attempt(record), self._table.family)

    # --- out -----------------------------------------------------------------------------

    def attempts(self, queue: Queue, message_id: int) -> list[Attempt]:
        """Read the ended attempts of a message."""
        prefix = queue.attempts_prefix + message_id.to_bytes(8, "big")
        found = []
        for key, record in rows_of(self._table, prefix, prefix + b"\xff\xff\xff"):
            try:
                claimed_at, consumer, ended_at, outcome, reason = decode_attempt(record)
                end = _ENDS[outcome]
            except (CorruptRecord, IndexError) as error:
                self._quarantine("history", key, record, str(error))
                continue
            number = int.from_bytes(key[-2:], "big")
            found.append(Attempt(number, consumer, claimed_at, ended_at, end, reason))
        return found

    def first_claims(
        self, queue: Queue, items: Sequence[Item], claimed_at_ms: int | None
    ) -> list[int | None]:
        """Return when the first attempt at each message began; None: it had none, or who knows.

        ``claimed_at_ms``: when the claim was made that all of them are in flight under, or were
        until now; None: they wait, and all their attempts have been recorded.
        """
        found = [claimed_at_ms or None if item.attempts == 1 else None for item in items]
        least = 1 if claimed_at_ms is None else 2
        recorded = [at for at, item in enumerate(items) if item.attempts >= least]
        if recorded:
            ids = [items[at].message_id for at in recorded]
            for at, claimed_ms in zip(recorded, self.first_attempts(queue, ids), strict=True):
                found[at] = claimed_ms
        return found

    def first_attempts(self, queue: Queue, message_ids: Sequence[int]) -> list[int | None]:
        """Return when the first attempts at messages began, of those that can be read."""
        prefix = queue.attempts_prefix
        keys = [prefix + (id_ << 16 | 1).to_bytes(10, "big") for id_ in message_ids]
        return [
            claimed_at_of(record) if isinstance(record, bytes) else None
            for record in get_each(self._table, keys)
        ]

    def page(
        self, queue: Queue, state: State, after: bytes, limit: int, *, whole_parts: bool = False
    ) -> tuple[list[Ended], bytes | None]:
        """Read a page in the order of ending, and where the next begins (part key, index).

        With ``whole_parts`` it ends at the end of a part, for a caller who rewrites them.
        """
        first = after[:-_INDEX_BYTES]
        begin = sequence_of(first) + int.from_bytes(after[-_INDEX_BYTES:], "big")
        page: list[Ended] = []
        for key, record in self._parts_from(queue, state, first):
            # The part of that key may have shrunk or gone meanwhile.
            number = sequence_of(key)
            skip = begin - number if sequence_of(first) <= number < begin else 0
            if whole_parts and len(page) >= limit:
                return page, key + bytes(_INDEX_BYTES)
            entries = self._decode(queue, state, key, record)
            for index in range(skip, len(entries)):
                if len(page) >= limit and not whole_parts:
                    return page, key + index.to_bytes(_INDEX_BYTES, "big")
                page.append(entries[index])
        return page, None

    def find_failed(self, queue: Queue, message_ids: Sequence[int]) -> list[Ended]:
        """Look failed messages up by id; unknown ids are left out."""
        keys = [_FAILED_INDEX.key(queue.id, message_id) for message_id in message_ids]
        parts = {part for part in self._table.multi_get(keys) if part is not None}
        wanted = set(message_ids)
        return [
            entry
            for part in sorted(parts)
            for entry in self._part(queue, part)
            if entry.message_id in wanted
        ]

    def find_done(self, queue: Queue, message_ids: Sequence[int]) -> list[Ended]:
        """Look done messages up by the attempts that acked them; others in all there are."""
        ids = set(message_ids) if queue.counts.done else set()
        found = [entry for message_id in ids for entry in self.find_acked(queue, message_id)]
        ids -= {entry.message_id for entry in found}
        after: bytes | None = b"" if ids else None
        while after is not None and ids:
            page, after = self.page(queue, State.DONE, after, 1_000)
            some = [entry for entry in page if entry.message_id in ids]
            ids -= {entry.message_id for entry in some}
            found += some
        return found

    def find_acked(self, queue: Queue, message_id: int) -> list[Ended]:
        """Look a done message up by the attempt that acked it."""
        acked = [each for each in self.attempts(queue, message_id) if each.end is AttemptEnd.ACKED]
        at_ms = (acked[-1].ended_at_ms or 0) if acked else 0
        for exponent in range(limits.MAX_BUCKET_EXPONENT + 1) if acked else ():
            since = self.since(queue, State.DONE, exponent, at_ms)
            for _, entry in takewhile(lambda each: each[1].ended_at_ms <= at_ms, since):
                if entry.message_id == message_id:
                    return [entry]
        return []

    def since(
        self, queue: Queue, state: State, exponent: int, time_ms: int
    ) -> Iterator[tuple[int, Ended]]:
        """Find the messages of a run that ended at a time or later, with their numbers.

        The parts of a run lie in the order of time.
        """
        begin, end = _run(queue.id, state, exponent)
        capacity = opendata.capacity(exponent)

        def entries_from(number: int) -> Iterator[tuple[int, Ended]]:
            bucket = opendata.make_id(exponent, number - number % capacity)
            key = begin[:-8] + bucket.to_bytes(8, "big") + number.to_bytes(8, "big")
            for part, record in rows_of(self._table, key, end, page=1):
                yield from enumerate(self._decode(queue, state, part, record), sequence_of(part))

        def time_from(number: int) -> int:
            first = next(entries_from(number), None)
            return limits.MAX_OFFSET if first is None else first[1].ended_at_ms

        if rows := self.first_keys.scan(begin, end, 1):
            counts = queue.counts
            last = counts.next_done if state is State.DONE else counts.next_failed
            numbers = range(sequence_of(rows[0][0]), last)
            yield from entries_from(numbers.start + bisect_left(numbers, time_ms, key=time_from))

    def take(self, batch: Batch, queue: Queue, state: State, entries: Sequence[Ended]) -> None:
        """Remove messages from their parts: they are live again, here or in another queue."""
        gone = {entry.message_id for entry in entries}
        failed = state is State.FAILED
        family = self._table.family
        for part in {entry.part for entry in entries}:
            held = self._part(queue, part, state)
            rests = dict(cut_part(part, held, lambda entry: entry.message_id not in gone))
            if part not in rests:
                batch.delete(part, family)
            for key, run in rests.items():
                batch.put(key, encode_ended(run, failed=failed), family)
                for entry in run if failed and key != part else ():
                    batch.put(_FAILED_INDEX.key(queue.id, entry.message_id), key, family)
        self._forget_ended(batch, queue, state, entries)

    def _forget_ended(
        self, batch: Batch, queue: Queue, state: State, entries: Sequence[Ended]
    ) -> None:
        """Count messages that are gone from their parts, and delete their index entries."""
        if state is State.DONE:
            queue.counts.done -= len(entries)
            return
        queue.counts.failed -= len(entries)
        for entry in entries:
            batch.delete(_FAILED_INDEX.key(queue.id, entry.message_id), self._table.family)

    def trim(
        self,
        batch: Batch,
        queue: Queue,
        state: State,
        limit: int,
        *,
        ended_by_ms: int | None = None,
        before: int | None = None,
    ) -> list[Ended]:
        """Remove parts from the front of each run, up to about ``limit`` messages.

        Only parts whose messages have all ended by then, or are all numbered below ``before``.
        """
        removed: list[Ended] = []
        for begin, end in _runs(queue, state):
            if len(removed) >= limit:
                break
            for key, record in self.first_keys.rows(begin, end, page=_PAGE):
                entries = self._decode(queue, state, key, record)
                if entries and ended_by_ms is not None and _all_ended_at(entries) > ended_by_ms:
                    break
                if entries and before is not None and sequence_of(key) + len(entries) > before:
                    break
                batch.delete(key, self._table.family)
                self._forget_ended(batch, queue, state, entries)
                removed += entries
                if len(removed) >= limit:
                    break
        return removed

    def forget_attempts(
        self, batch: Batch, queue: Queue, messages: Sequence[tuple[int, int]]
    ) -> None:
        """Delete the attempts of messages that leave the queue: (message id, attempts)."""
        delete, family, prefix = batch.delete, self._table.family, queue.attempts_prefix
        for message_id, attempts in messages:
            for attempt in range(1, attempts + 1):
                delete(prefix + (message_id << 16 | attempt).to_bytes(10, "big"), family)
        if self.may_have_marks(queue):
            for message_id, _ in messages:
                delete(_MARKS.key(queue.id, message_id), family)

    # --- from one queue to another ---------------------------------------------------------

    def move_attempts(
        self, batch: Batch, queue: Queue, to: Queue, messages: Sequence[tuple[int, int, int]]
    ) -> None:
        """Move attempts to another queue: (message id, attempts, those there before them)."""
        old, new = queue.attempts_prefix, to.attempts_prefix
        numbers = [
            (message_id, number, before + number)
            for message_id, attempts, before in messages
            for number in range(1, attempts + 1)
        ]
        keys = [old + (id_ << 16 | number).to_bytes(10, "big") for id_, number, _ in numbers]
        for (id_, _, number), record in zip(numbers, self._table.multi_get(keys), strict=True):
            if record is not None and number <= limits.MAX_ATTEMPTS:
                batch.put(
                    new + (id_ << 16 | number).to_bytes(10, "big"), record, self._table.family
                )
        self.forget_attempts(batch, queue, [(id_, attempts) for id_, attempts, _ in messages])

    def mark(self, batch: Batch, queue: Queue, items: Sequence[Item]) -> None:
        """Note that messages have come in by a move, and their keys."""
        for item in items:
            key = _MARKS.key(queue.id, item.message_id)
            batch.put(key, item.key.to_bytes(8, "big"), self._table.family)
        self._marked.add(queue.number)

    def may_have_marks(self, queue: Queue) -> bool:
        """Whether messages may have come into a queue by a move: known without a look."""
        return queue.number in self._marked

    def marks(self, queue: Queue, message_ids: Sequence[int]) -> dict[int, int]:
        """Return those messages that a move has brought into a queue, and the keys they got."""
        if not self.may_have_marks(queue) or not message_ids:
            return {}
        keys = [_MARKS.key(queue.id, message_id) for message_id in message_ids]
        return {
            message_id: int.from_bytes(record, "big")
            for message_id, record in zip(message_ids, self._table.multi_get(keys), strict=True)
            if record is not None
        }

    def clear(self, batch: Batch, queue: Queue) -> None:
        """Delete whatever a queue that is deleted may still have here."""
        for keys in (*_KEYS.values(), opendata.ATTEMPTS, _FAILED_INDEX, _MARKS):
            prefix = keys.prefix(queue.id)
            batch.delete_range(prefix, prefix + b"\xff" * 17, self._table.family)

    def first_ended_at_ms(self, queue: Queue, state: State) -> int | None:
        """Return by when all messages of the first part that retention can take had ended."""
        times = []
        for begin, end in _runs(queue, state):
            # A few of each run, in case the first ones do not decode.
            parts = self.first_keys.scan(begin, end, 4)
            found = (self._decode(queue, state, key, record) for key, record in parts)
            times += [_all_ended_at(first) for first in islice(filter(None, found), 1)]
        return min(times, default=None)

    # --- parts ---------------------------------------------------------------------------

    def _parts_from(
        self, queue: Queue, state: State, first: bytes
    ) -> Iterator[tuple[bytes, bytes]]:
        """Read parts in the order of keys, from one on or (empty) from the first there is."""
        for begin, end in _runs(queue, state):
            if first <= begin:
                yield from self.first_keys.rows(begin, end, page=_PAGE)
            elif first < end:
                yield from rows_of(self._table, first, end, page=_PAGE)

    def _part(self, queue: Queue, key: bytes, state: State = State.FAILED) -> list[Ended]:
        record = self._table.get(key)
        return [] if record is None else self._decode(queue, state, key, record)

    def _recount(self, queue: Queue, state: State) -> None:
        """Count a state's messages anew: nobody knows how many a part held that is lost."""
        prefix = _KEYS[state].prefix(queue.id)
        count = sum(
            len(self._decode(queue, state, key, record))
            for key, record in rows_of(self._table, prefix, prefix + b"\xff" * 17, page=_PAGE)
        )
        if state is State.DONE:
            queue.counts.done = count
        else:
            queue.counts.failed = count

    def _decode(self, queue: Queue, state: State, key: bytes, record: bytes) -> list[Ended]:
        try:
            return decode_ended(record, failed=state is State.FAILED, part=key)
        except CorruptRecord as error:
            if self._quarantine("history", key, record, f"queue {queue.name}: {error}"):
                self._recount(queue, state)
            return []


def sequence_of(key: bytes) -> int:
    """Return the number of a part's first message, from the part's key."""
    return int.from_bytes(key[-8:], "big")


def cut_part(
    part: bytes, entries: Iterable[Ended], stays: Callable[[Ended], bool]
) -> Iterator[tuple[bytes, list[Ended]]]:
    """Give the messages that stay in a part, under keys by which they keep their numbers.

    One key for each time at which messages have ended: that of a sound part is the part's own.
    """
    number = sequence_of(part)
    for (are_staying, _), some in groupby(entries, lambda each: (stays(each), each.ended_at_ms)):
        run = list(some)
        if are_staying:
            yield part[:-8] + number.to_bytes(8, "big"), run
        number += len(run)


def _all_ended_at(entries: Sequence[Ended]) -> int:
    """Return by when all messages of a part had ended."""
    return entries[-1].ended_at_ms


def _runs(queue: Queue, state: State) -> Iterator[tuple[bytes, bytes]]:
    """Give the ranges of a state's parts: each bucket size has a run of its own."""
    for exponent in range(limits.MAX_BUCKET_EXPONENT + 1):
        yield _run(queue.id, state, exponent)


@lru_cache(maxsize=1024)
def _run(queue: bytes, state: State, exponent: int) -> tuple[bytes, bytes]:
    prefix = _KEYS[state].prefix(queue)
    begin, end = opendata.make_id(exponent, 0), opendata.make_id(exponent, (1 << 60) - 1)
    return prefix + begin.to_bytes(8, "big"), prefix + end.to_bytes(8, "big")


@lru_cache(maxsize=64)
def _attempt(
    claimed_at_ms: int, consumer: str, ended_at_ms: int, outcome: int, reason: str
) -> bytes:
    """Encode how an attempt went; those of claims that were made together mostly went alike."""
    return encode_attempt(AttemptRecord(claimed_at_ms, consumer, ended_at_ms, outcome, reason))
