"""The report of an audit; and the findings of one reading of a key-value store, with repairs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from penstock.engines import Batch, Table
    from penstock.store.kv.state import Core

# A report shows so many violations, and as many notes; it counts all of them.
KEPT: Final = 1_000
# Bounds of one commit of repairs.
_BATCH_CHANGES: Final = 1_000
_BATCH_BYTES: Final = 4 * 1024 * 1024


class Kind(StrEnum):
    """The kinds of violations; ``docs/checking.md`` says how a repair mends each."""

    UNREADABLE = "unreadable"
    UNDECODABLE = "undecodable"
    STRANGER = "stranger"
    TWICE = "twice"
    WRONG_KEY = "wrong_key"
    WRONG_FIELD = "wrong_field"
    MISSING_ENTRY = "missing_entry"
    ORPHAN_ENTRY = "orphan_entry"
    EARLY = "early"
    EMPTY = "empty"
    STRAY = "stray"
    NOT_HELD = "not_held"
    PAYLOAD_MISSING = "payload_missing"
    REFERENCES = "references"
    GARBAGE = "garbage"
    COUNTER = "counter"
    SEQUENCE = "sequence"
    ORPHAN_ATTEMPT = "orphan_attempt"
    ORDER = "order"
    CURSOR = "cursor"
    SPEC = "spec"
    NUMBER = "number"
    COVERAGE = "coverage"
    MEMORY = "memory"


class Violation(msgspec.Struct, frozen=True):
    """One violation: the table and the key (in hex) that it is at, and a sentence about it."""

    kind: Kind
    table: str
    key: str
    text: str
    repaired: bool = False


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the things that an audit ``checked``, and of the violations that it ``found``.

    ``violations`` has the first thousand; ``left`` counts those that are still there. ``notes`` are
    oddities that do no harm. ``rounds`` counts the readings of the store.
    """

    checked: dict[str, int]
    found: dict[str, int]
    violations: list[Violation]
    notes: list[Violation]
    left: int
    rounds: int

    @property
    def ok(self) -> bool:
        """Whether the store is right after the audit."""
        return not self.left

    @property
    def clean(self) -> bool:
        """Whether the store was right before the audit."""
        return not self.found


class Findings:
    """The violations that one reading of the store finds, and the batch of its repairs."""

    def __init__(self, core: Core, *, repair: bool, now_ms: int) -> None:
        self.core = core
        self.repair = repair
        self.now_ms = now_ms
        self.checked, self.found = dict[str, int](), dict[str, int]()
        self.violations, self.notes = list[Violation](), list[Violation]()
        # A check without repair needs no store that can be written.
        self._batch: Batch | None = None
        self._bytes = 0

    def table(self, name: str) -> Table:
        """Return a table of the store."""
        return self.core.engine.table(name)

    def count(self, what: str, number: int = 1) -> None:
        """Count things that the audit looked at."""
        self.checked[what] = self.checked.get(what, 0) + number

    def violate(self, kind: Kind, table: str, key: bytes, text: str) -> None:
        """Report a violation."""
        self.found[kind] = self.found.get(kind, 0) + 1
        if len(self.violations) < KEPT:
            self.violations.append(Violation(kind, table, key.hex(), text))

    def mend(self, kind: Kind, table: str, key: bytes, right: bytes | None, text: str) -> None:
        """Report a violation; repair it by the right row, None to delete it."""
        self.violate(kind, table, key, text)
        self.write(table, key, right)

    def compare(
        self, table: str, key: bytes, present: bytes | None, right: bytes | None, text: str,
        kind: Kind | None = None,
    ) -> None:  # fmt: skip
        """Compare a row with the right one, None if there is none; report and repair it."""
        if present != right:
            told = Kind.ORPHAN_ENTRY if right is None else Kind.WRONG_FIELD
            told = kind or (Kind.MISSING_ENTRY if present is None else told)
            self.mend(told, table, key, right, text)

    def write(self, table: str, key: bytes, right: bytes | None) -> None:
        """Repair: write a row, or delete it."""
        if self.repair:
            batch, family = self._room(len(key) + len(right or b"")), self.table(table).family
            if right is None:
                batch.delete(key, family)
            else:
                batch.put(key, right, family)

    def _room(self, size: int) -> Batch:
        is_full = self._batch and len(self._batch) >= _BATCH_CHANGES
        if self._batch is None or is_full or self._bytes >= _BATCH_BYTES:
            self.flush()
            self._batch = self.core.engine.batch()
        self._bytes += size
        return self._batch

    def flush(self) -> None:
        """Commit the repairs so far."""
        if self._batch is not None:
            self.core.commit(self._batch, (), self.now_ms)
        self._batch, self._bytes = None, 0
