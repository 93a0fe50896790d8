"""The audit of history: done and failed parts, the index of what failed, attempts, marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import CorruptRecord
from penstock.model import State
from penstock.store.check_report import Kind, all_of, outside
from penstock.store.codec import opendata, records
from penstock.store.codec.encodings import terminated
from penstock.store.codec.metadata import decode_metadata

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.store.check_report import Findings
    from penstock.store.kv.check.census import Census, Loser
    from penstock.store.kv.queues import Queue

__all__ = ["HistoryAudit"]

_FAILED_INDEX: Final = b"\x02\x0a"
_MARKS: Final = b"\x02\x15"
# Acked, released, expired.
_OUTCOMES: Final = 3
_KEY_BYTES: Final = 8
# Parts may be large, so few are read at a time.
_PAGE: Final = 64

_Entry = records.Done | records.Failed


class HistoryAudit:
    """Checks the table ``history``."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._table = findings.table("history")

    def scan(self, census: Census) -> list[tuple[int, Loser]]:
        """Check a queue's history; give the live copies of messages that are done."""
        losers = self._scan_done(census)
        indexed = self._scan_failed(census)
        self._check_index_orphans(census, indexed)
        self._check_attempts(census)
        self._check_marks(census)
        return losers

    def _scan_done(self, census: Census) -> list[tuple[int, Loser]]:
        losers = []
        for key, value in all_of(self._table, opendata.done_prefix(census.queue.id), page=_PAGE):
            entries, part = self._part(census.queue, State.DONE, key, value)
            census.next_done = max(census.next_done, part)
            kept = []
            for entry in entries:
                if entry.message_id in census.done:
                    self._twice(census.queue, key, entry, "is done twice")
                    continue
                # An acknowledged message never comes back: of two states, done is kept.
                loser = census.forget(entry.message_id)
                if loser is not None:
                    losers.append((entry.message_id, loser))
                census.done.add(entry.message_id)
                census.attempts[entry.message_id] = entry.attempts
                kept.append(entry)
            self._rewrite(State.DONE, key, entries, kept)
        return losers

    def _scan_failed(self, census: Census) -> int:
        """Check the failed parts; give how many index entries they account for."""
        queue, indexed = census.queue, 0
        for key, value in all_of(self._table, opendata.failed_prefix(queue.id), page=_PAGE):
            entries, part = self._part(queue, State.FAILED, key, value)
            census.next_failed = max(census.next_failed, part)
            kept = []
            for entry in entries:
                if entry.message_id in census.attempts:
                    is_done = entry.message_id in census.done
                    other = "done" if is_done else "live, or has failed twice"
                    self._twice(queue, key, entry, f"has failed and is {other}")
                    continue
                census.failed.add(entry.message_id)
                census.attempts[entry.message_id] = entry.attempts
                kept.append(entry)
            self._rewrite(State.FAILED, key, entries, kept)
            indexed += self._check_index(queue, key, kept)
        return indexed

    def _twice(self, queue: Queue, key: bytes, entry: _Entry, what: str) -> None:
        text = f"queue {queue.name}: message {entry.message_id} {what}"
        self._findings.violate(Kind.TWICE, "history", key, text)

    def _part(
        self, queue: Queue, state: State, key: bytes, value: bytes
    ) -> tuple[list[_Entry], int]:
        """Decode a part; give its messages and the number after its last."""
        findings, what = self._findings, f"queue {queue.name}, {state.value}"
        findings.count(f"{state.value} parts")
        is_done = state is State.DONE
        entries: list[_Entry] = []
        try:
            parse = opendata.parse_done_key if is_done else opendata.parse_failed_key
            _, _, bucket_id, part = parse(key)
            assert part is not None, "a key of version 2 has a part"
            exponent, _ = opendata.split_id(bucket_id)
            home = opendata.bucket_of(opendata.make_id(exponent, part))
            entries += records.decode_done(value) if is_done else records.decode_failed(value)
        except CorruptRecord as error:
            findings.reject(Kind.UNDECODABLE, "history", key, value, f"{what}: {error}")
            return [], 0
        if home != bucket_id:
            text = f"{what}: part {part} is not of bucket {bucket_id:#x}"
            findings.violate(Kind.WRONG_KEY, "history", key, text)
            make = opendata.done_key if is_done else opendata.failed_key
            findings.delete("history", key)
            findings.put("history", make(queue.id, home, part), value)
        elif not entries:
            findings.violate(Kind.EMPTY, "history", key, f"{what}: a part without messages")
            findings.delete("history", key)
        findings.count(f"{state.value} messages", len(entries))
        good = [entry for entry in entries if self._has_metadata(key, entry, what)]
        if len(good) < len(entries):
            self._rewrite(state, key, entries, good)
        return good, part + len(entries)

    def _has_metadata(self, key: bytes, entry: _Entry, what: str) -> bool:
        try:
            decode_metadata(entry.metadata)
        except CorruptRecord as error:
            text = f"{what}: message {entry.message_id}: {error}"
            self._findings.violate(Kind.UNDECODABLE, "history", key, text)
            self._set_aside(key, entry, text)
            return False
        return True

    # --- the index of what failed ------------------------------------------------------------

    def _check_index(self, queue: Queue, part_key: bytes, entries: list[_Entry]) -> int:
        prefix = _FAILED_INDEX + terminated(queue.id)
        keys = [prefix + entry.message_id.to_bytes(8, "big") for entry in entries]
        values = self._table.multi_get(keys)
        for key, value, entry in zip(keys, values, entries, strict=True):
            if value != part_key:
                kind = Kind.MISSING_ENTRY if value is None else Kind.WRONG_FIELD
                what = "is not in the index" if value is None else "has another part in the index"
                text = f"queue {queue.name}: failed message {entry.message_id} {what}"
                self._findings.violate(kind, "history", key, text)
                self._findings.put("history", key, part_key)
        return sum(value is not None for value in values)

    def _check_index_orphans(self, census: Census, expected: int) -> None:
        findings, prefix = self._findings, _FAILED_INDEX + terminated(census.queue.id)
        entries = sum(1 for _ in all_of(self._table, prefix))
        findings.count("failed index entries", entries)
        if entries == expected:
            return
        for key, _ in all_of(self._table, prefix):
            if int.from_bytes(key[len(prefix) :], "big") not in census.failed:
                text = f"queue {census.queue.name}: no failed message is where this entry says"
                findings.violate(Kind.ORPHAN_ENTRY, "history", key, text)
                findings.delete("history", key)

    # --- attempts ------------------------------------------------------------------------

    def _check_attempts(self, census: Census) -> None:
        findings, queue = self._findings, census.queue
        prefix = opendata.attempts_prefix(queue.id)
        for key, value in all_of(self._table, prefix):
            findings.count("attempts")
            try:
                _, _, message_id, number = opendata.parse_attempts_key(key)
                attempt = records.decode_attempt(value)
                if attempt.outcome >= _OUTCOMES:
                    raise CorruptRecord(f"attempt v2: outcome {attempt.outcome}")  # noqa: TRY301
            except CorruptRecord as error:
                text = f"queue {queue.name}: {error}"
                findings.reject(Kind.UNDECODABLE, "history", key, value, text)
                continue
            made = census.attempts.get(message_id)
            if made is not None and 1 <= (number or 0) <= made:
                continue
            what = "is not in the queue" if made is None else f"has had {made}"
            text = f"queue {queue.name}: attempt {number} at message {message_id}, which {what}"
            findings.violate(Kind.ORPHAN_ATTEMPT, "history", key, text)
            findings.delete("history", key)

    def _check_marks(self, census: Census) -> None:
        """Check the marks of what a move has brought in; the keys in them are hints alone."""
        findings, queue = self._findings, census.queue
        prefix = _MARKS + terminated(queue.id)
        for key, value in all_of(self._table, prefix):
            findings.count("marks of moved messages")
            message_id = int.from_bytes(key[len(prefix) :], "big")
            if message_id not in census.attempts:
                text = f"queue {queue.name}: the mark of message {message_id}, which is not there"
                findings.violate(Kind.ORPHAN_ENTRY, "history", key, text)
                findings.delete("history", key)
            elif len(value) != _KEY_BYTES:
                text = f"queue {queue.name}: the mark of message {message_id} has no key"
                findings.violate(Kind.WRONG_FIELD, "history", key, text)
                findings.put("history", key, message_id.to_bytes(_KEY_BYTES, "big"))

    def strangers(self) -> None:
        """Check for records of queues that are not there."""
        findings = self._findings
        prefixes = [
            prefix
            for queue in findings.core.queues.values()
            for prefix in (
                opendata.done_prefix(queue.id),
                opendata.failed_prefix(queue.id),
                opendata.attempts_prefix(queue.id),
                _FAILED_INDEX + terminated(queue.id),
                _MARKS + terminated(queue.id),
            )
        ]
        text = "a record of a queue that is not there"
        for key, value in outside(self._table, prefixes):
            if key[:2] in {_FAILED_INDEX, _MARKS, b"\x02\x05"}:
                findings.violate(Kind.STRANGER, "history", key, text)
                findings.delete("history", key)
            else:
                findings.reject(Kind.STRANGER, "history", key, value, text)

    # --- repairs -------------------------------------------------------------------------

    def expel(self, queue: Queue, message_ids: Collection[int], why: str) -> None:
        """Move done and failed messages to the quarantine."""
        wanted = set(message_ids)
        self._findings.flush()
        for state, prefix in (
            (State.DONE, opendata.done_prefix(queue.id)),
            (State.FAILED, opendata.failed_prefix(queue.id)),
        ):
            for key, value in all_of(self._table, prefix, page=_PAGE):
                entries: list[_Entry] = []
                try:
                    entries += (
                        records.decode_done(value)
                        if state is State.DONE
                        else records.decode_failed(value)
                    )
                except CorruptRecord:
                    continue
                kept = [entry for entry in entries if entry.message_id not in wanted]
                for entry in entries:
                    if entry.message_id in wanted:
                        self._set_aside(key, entry, why)
                self._rewrite(state, key, entries, kept)

    def _rewrite(self, state: State, key: bytes, entries: list[_Entry], kept: list[_Entry]) -> None:
        """Write a part without some of its messages."""
        findings = self._findings
        if len(kept) == len(entries):
            return
        if not kept:
            findings.delete("history", key)
        elif state is State.DONE:
            done = [entry for entry in kept if isinstance(entry, records.Done)]
            findings.put("history", key, records.encode_done(done))
        else:
            failed = [entry for entry in kept if isinstance(entry, records.Failed)]
            findings.put("history", key, records.encode_failed(failed))

    def _set_aside(self, key: bytes, entry: _Entry, why: str) -> None:
        encoded = (
            records.encode_failed([entry])
            if isinstance(entry, records.Failed)
            else records.encode_done([entry])
        )
        message_id = entry.message_id.to_bytes(8, "big")
        self._findings.set_aside("history", key + message_id, encoded, why)
