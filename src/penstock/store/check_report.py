"""The report of an audit."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

# A report shows so many violations, and as many notes; it counts all of them.
KEPT: Final = 1_000


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
