"""What an audit finds, and how it writes its repairs.

The stages of an audit (``queues``, ``indexed`` and so on) each check some tables and
tell a :class:`Findings` what is wrong; when it repairs, they hand it the changes as well.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.engines import rows_of
from penstock.errors import CorruptRecord
from penstock.store.codec.encodings import increment
from penstock.store.codec.log import parse_entry_key
from penstock.store.codec.opendata import parse_active_key, parse_done_key, parse_failed_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.engines import Batch, Table
    from penstock.store.kv.state import Core

__all__ = ["AuditReport", "Findings", "Kind", "Violation", "all_of", "outside", "span"]

# How many violations, and as many notes, a report shows; all are counted.
KEPT: Final = 1_000
# Bounds of one commit of repairs.
_BATCH_CHANGES: Final = 1_000
_BATCH_BYTES: Final = 4 * 1024 * 1024
# After every key that a store makes.
_LAST: Final = b"\xff" * 16


class Kind(StrEnum):
    """What can be wrong; ``docs/checking.md`` says what a repair does about each."""

    UNREADABLE = "unreadable"
    UNDECODABLE = "undecodable"
    STRANGER = "stranger"
    TWICE = "twice"
    WRONG_KEY = "wrong_key"
    WRONG_FIELD = "wrong_field"
    MISSING_ENTRY = "missing_entry"
    ORPHAN_ENTRY = "orphan_entry"
    EARLY = "early"
    GROUP_COUNT = "group_count"
    MISPLACED = "misplaced"
    SUMMARY = "summary"
    EMPTY = "empty"
    STRAY = "stray"
    NOT_HELD = "not_held"
    PAYLOAD_MISSING = "payload_missing"
    REFERENCES = "references"
    GARBAGE = "garbage"
    COUNTER = "counter"
    SEQUENCE = "sequence"
    ORPHAN_ATTEMPT = "orphan_attempt"
    UNCLAIMED = "unclaimed"
    SEGMENT = "segment"
    ORDER = "order"
    CURSOR = "cursor"
    SPEC = "spec"
    NUMBER = "number"
    COVERAGE = "coverage"
    DEDUP = "dedup"
    MEMORY = "memory"


class Violation(msgspec.Struct, frozen=True):
    """One thing that is wrong: where (``key`` is hex), and what in a sentence."""

    kind: Kind
    table: str
    key: str
    text: str
    repaired: bool = False


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit has found.

    ``checked`` says how much of what was looked at; ``found`` counts the violations by kind, of
    which ``violations`` has the first thousand. ``left`` are those that are there still. Notes
    are oddities that do no harm. ``rounds`` counts the times that the store was read.
    """

    checked: dict[str, int]
    found: dict[str, int]
    violations: list[Violation]
    notes: list[Violation]
    left: int
    rounds: int

    @property
    def ok(self) -> bool:
        """Whether the store is as it should be, now that the audit is over."""
        return not self.left

    @property
    def clean(self) -> bool:
        """Whether nothing was wrong to begin with."""
        return not self.found


class Findings:
    """Collects what one reading of the store finds, and commits repairs in bounded batches."""

    def __init__(self, core: Core, *, repair: bool, now_ms: int) -> None:
        self.core = core
        self.repair = repair
        self.checked: dict[str, int] = {}
        self.found: dict[str, int] = {}
        self.violations: list[Violation] = []
        self.notes: list[Violation] = []
        # Messages whose record is in the quarantine, or on the way there; and whether records are
        # there that may have held any messages.
        self.aside_ids: set[int] = set()
        self.aside_unknown = False
        self.now_ms = now_ms
        # A check without repair needs no store that can be written.
        self._made: Batch | None = None
        self._bytes = 0

    @property
    def _batch(self) -> Batch:
        if self._made is None:
            self._made = self.core.engine.batch()
        return self._made

    def table(self, name: str) -> Table:
        """Return a table of the store."""
        return self.core.engine.table(name)

    # --- findings ------------------------------------------------------------------------

    def count(self, what: str, number: int = 1) -> None:
        """Count what was looked at."""
        self.checked[what] = self.checked.get(what, 0) + number

    def violate(self, kind: Kind, table: str, key: bytes, text: str) -> None:
        """Report something that is wrong."""
        self.found[kind] = self.found.get(kind, 0) + 1
        if len(self.violations) < KEPT:
            self.violations.append(Violation(kind, table, key.hex(), text))

    def note(self, kind: Kind, table: str, key: bytes, text: str) -> None:
        """Report something that does no harm."""
        if len(self.notes) < KEPT:
            self.notes.append(Violation(kind, table, key.hex(), text))

    def reject(self, kind: Kind, table: str, key: bytes, value: bytes, text: str) -> None:
        """Report a record that nothing can be made of; a repair moves it to the quarantine."""
        self.violate(kind, table, key, text)
        self.set_aside(table, key, value, text)

    # --- repairs -------------------------------------------------------------------------

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Repair: write a record."""
        if self.repair:
            self._batch.put(key, value, self.table(table).family)
            self._grow(len(key) + len(value))

    def delete(self, table: str, *keys: bytes) -> None:
        """Repair: delete records."""
        if self.repair:
            for key in keys:
                self._batch.delete(key, self.table(table).family)
                self._grow(len(key))

    def set_aside(self, table: str, key: bytes, value: bytes, why: str) -> None:
        """Repair: move a record to the quarantine.

        A part of a record goes there as well: under the record's key, and its message's id.
        """
        self.note_aside(table, key)
        if self.repair:
            self.core.quarantine(table, key, value, why)
            self._grow(len(key) + len(value))

    def note_aside(self, table: str, key: bytes) -> None:
        """Remember which message, if it can be told, a quarantined record held."""
        if table in {"buckets", "history", "log"} and _is_whole(table, key):
            self.aside_unknown = True
        else:
            self.aside_ids.add(int.from_bytes(key[-8:], "big"))

    def _grow(self, size: int) -> None:
        self._bytes += size
        if len(self._batch) >= _BATCH_CHANGES or self._bytes >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Commit the repairs so far, before something is read that they may have changed."""
        if self._made is not None or self._bytes:
            self.core.commit(self._batch, (), self.now_ms)
            self._made = None
            self._bytes = 0


def _is_whole(table: str, key: bytes) -> bool:
    """Whether a quarantined record is one of many messages, not the part of one of them."""
    try:
        if table == "log":
            parse_entry_key(key)
        elif table == "buckets":
            parse_active_key(key)
        else:
            (parse_done_key if key[1:2] == b"\x03" else parse_failed_key)(key)
    except CorruptRecord:
        return False
    return True


def span(prefix: bytes) -> tuple[bytes, bytes]:
    """Give the range of all keys with a prefix."""
    return prefix, increment(prefix) or _LAST


def all_of(table: Table, prefix: bytes = b"", *, page: int = 1000) -> Iterator[tuple[bytes, bytes]]:
    """Read every row with a prefix, a page at a time."""
    return rows_of(table, *span(prefix), page=page)


def outside(table: Table, prefixes: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Read every row that has none of the prefixes, without reading those that have one."""
    begin = b""
    for first, end in sorted(map(span, prefixes)):
        if begin < first:
            yield from rows_of(table, begin, first, page=64)
        begin = max(begin, end)
    yield from rows_of(table, begin, _LAST, page=64)
