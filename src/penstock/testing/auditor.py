"""Judges what clients of one queue saw. Knows nothing of the store.

Clients note each operation when it *returned* (and deliveries with their deadline); the auditor
replays the notes of all clients in the order of time and says what can't be::

    lost          confirmed, never acked, and not in the queue at the end
    unexpected    delivered or found, but nobody says to have published it
    two leases    delivered while another delivery of it was live
    came back     delivered after its ack had been confirmed
    attempts      a later delivery with a number of attempts that is not higher
    order         of a FIFO group, delivered before an earlier message was settled
    wrong body    delivered with another payload than was published

A client that was killed may have done something that it did not live to note. So an operation that
was begun and has no end may or may not have happened, and the auditor takes neither for wrong.
Each finding has a witness: the fewest notes that show it.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Auditor", "Finding", "Kind", "Note", "audit"]


class Kind(str, Enum):
    """What a client notes."""

    PUBLISHING = "publishing"
    PUBLISHED = "published"
    DELIVERED = "delivered"
    ACKING = "acking"
    ACKED = "acked"
    RELEASED = "released"
    EXTENDED = "extended"
    FAILED = "failed"


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One note of one client.

    ``body`` names a message before it has an id: clients publish bodies that are all different.
    ``began_at_ms`` and ``at_ms`` are the client's clock before and after the call.
    """

    kind: Kind
    at_ms: int
    began_at_ms: int = 0
    body: str = ""
    message_id: int = 0
    receipt: str = ""
    deadline_ms: int = 0
    attempts: int = 0
    group: str = ""


class Finding(msgspec.Struct, frozen=True):
    """Something that can't be, and the notes that show it."""

    what: str
    message_id: int
    witness: tuple[Note, ...]

    def __str__(self) -> str:
        lines = [f"{self.what}: message {self.message_id}"]
        lines += [f"  {note}" for note in self.witness]
        return "\n".join(lines)


class _Seen:
    """What is known of one message."""

    def __init__(self) -> None:
        self.published: Note | None = None
        self.delivered: Note | None = None
        # The end of the latest delivery's lease, as far as its client knows.
        self.live_until_ms = 0
        self.acked: Note | None = None
        self.failed: Note | None = None
        self.acking = False


class Auditor:
    """Takes notes in the order of time; gathers findings."""

    def __init__(self, *, fifo: bool = False) -> None:
        self._fifo = fifo
        self._seen: dict[int, _Seen] = {}
        self._ids_by_body: dict[str, int] = {}
        self._begun: set[str] = set()
        self._receipts: dict[str, Note] = {}
        self.findings: list[Finding] = []

    def take(self, note: Note) -> None:
        """Judge one note."""
        if note.kind is Kind.PUBLISHING:
            self._begun.add(note.body)
            return
        if note.kind is Kind.PUBLISHED:
            self._ids_by_body[note.body] = note.message_id
            self._of(note.message_id).published = note
            return
        if note.kind is Kind.DELIVERED:
            self._delivered(note)
            return
        delivered = self._receipts.get(note.receipt)
        if delivered is None:
            self._find("unexpected", note.message_id, note)
            return
        self._settled(note, delivered)

    def _settled(self, note: Note, delivered: Note) -> None:
        seen = self._of(delivered.message_id)
        mine = seen.delivered is delivered
        if note.kind is Kind.ACKING:
            seen.acking = True
        elif note.kind is Kind.ACKED:
            seen.acked = note
        elif note.kind is Kind.FAILED:
            seen.failed = note
        if mine:
            seen.live_until_ms = note.deadline_ms if note.kind is Kind.EXTENDED else 0
            if note.kind is Kind.ACKING:
                # Until it is confirmed, the message may be held or not.
                seen.live_until_ms = 0

    def _delivered(self, note: Note) -> None:
        seen = self._of(note.message_id)
        known = seen.published is not None or note.body in self._begun
        if not known:
            self._find("unexpected", note.message_id, note)
        if seen.published is not None and seen.published.body != note.body:
            self._find("wrong body", note.message_id, seen.published, note)
        if seen.acked is not None:
            self._find("came back", note.message_id, seen.acked, note)
        before = seen.delivered
        if before is not None:
            if seen.live_until_ms > note.at_ms:
                self._find("two leases", note.message_id, before, note)
            if note.attempts <= before.attempts:
                self._find("attempts", note.message_id, before, note)
        if self._fifo:
            self._check_order(note)
        self._ids_by_body.setdefault(note.body, note.message_id)
        seen.delivered, seen.live_until_ms = note, note.deadline_ms
        self._receipts[note.receipt] = note

    def _check_order(self, note: Note) -> None:
        """Everything before it in its group must be settled, or under the same lease."""
        for message_id, seen in self._seen.items():
            earlier = seen.published
            if earlier is None or message_id >= note.message_id or earlier.group != note.group:
                continue
            if seen.acked is not None or seen.failed is not None or seen.acking:
                continue
            with_it = seen.delivered is not None and seen.delivered.receipt[:-17] == (
                note.receipt[:-17]
            )
            if not with_it:
                notes = [earlier, seen.delivered, note]
                self._find("order", note.message_id, *(n for n in notes if n is not None))
                return

    def end(self, in_queue: Iterable[tuple[int, str]], settled: Iterable[int] = ()) -> None:
        """Compare with what is found at the end: (id, body) in the queue, and ids done or failed.

        What is in the queue must not have been acked; what was published must be somewhere.
        """
        present = dict(in_queue)
        over = set(settled)
        for message_id, body in present.items():
            known = self._seen.get(message_id)
            if body not in self._begun and (known is None or known.published is None):
                self.findings.append(Finding("unexpected", message_id, ()))
            if known is not None and known.acked is not None:
                self._find("came back", message_id, known.acked)
        for message_id, seen in self._seen.items():
            if message_id in present or message_id in over or seen.acked is not None:
                continue
            first = seen.published or seen.delivered
            if first is not None and seen.failed is None and not seen.acking:
                self._find("lost", message_id, first)

    def _of(self, message_id: int) -> _Seen:
        seen = self._seen.get(message_id)
        if seen is None:
            seen = self._seen[message_id] = _Seen()
        return seen

    def _find(self, what: str, message_id: int, *witness: Note) -> None:
        self.findings.append(Finding(what, message_id, witness))

    @property
    def smallest(self) -> Finding | None:
        """The finding with the shortest witness."""
        return min(self.findings, key=lambda finding: len(finding.witness), default=None)


def audit(
    notes: Iterable[Note],
    *,
    in_queue: Sequence[tuple[int, str]] = (),
    settled: Sequence[int] = (),
    fifo: bool = False,
) -> list[Finding]:
    """Judge the notes of all clients; return what can't be, the smallest witness first."""
    auditor = Auditor(fifo=fifo)
    for note in sorted(notes, key=lambda note: note.at_ms):
        auditor.take(note)
    auditor.end(in_queue, settled)
    return sorted(auditor.findings, key=lambda finding: len(finding.witness))
