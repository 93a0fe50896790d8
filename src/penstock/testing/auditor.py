"""Judges what clients of one queue saw. Knows nothing of the store.

Clients note what they are about to do, and what came of it once the call *returned*. The auditor
reads the notes of all clients and says what can't be::

    lost          confirmed, not settled by anybody, and not in the queue at the end
    unexpected    delivered or found, but nobody began to publish it
    wrong body    delivered with another payload than was published under that id
    two leases    delivered while an earlier delivery of it was certainly live
    came back     delivered, or in the queue at the end, after an ack that was confirmed
    attempts      a later delivery whose number of attempts is not higher
    order         of a FIFO group, delivered before an earlier message was settled

A client that was killed may have done what it did not live to note, and two clients' notes may be
written in another order than the store saw their calls. So a call that was begun and has no end
counts as possibly done, and only what no order of events could explain is a finding. Each has a
witness: the fewest notes that show it.
"""

from __future__ import annotations

from collections import defaultdict
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Finding", "Kind", "Note", "audit"]


class Kind(StrEnum):
    """The kinds of notes of a client: ``...ING`` before the call, the other after it."""

    PUBLISHING = "publishing"
    PUBLISHED = "published"
    DELIVERED = "delivered"
    SETTLING = "settling"
    ACKED = "acked"
    RELEASED = "released"
    FAILED = "failed"
    REFUSED = "refused"
    EXTENDING = "extending"
    EXTENDED = "extended"


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One note of one client.

    ``at_ms`` is when it was noted, ``began_at_ms`` when a call that has returned began, both on
    the store's clock. ``body`` names a message before it has an id: no two bodies are the same.
    ``unseen``: the client gives back a message that it did not begin; that is no attempt.
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
    unseen: bool = False


class Finding(msgspec.Struct, frozen=True):
    """Something that can't be, and the notes that show it."""

    what: str
    message_id: int
    witness: tuple[Note, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.what}: message {self.message_id}", *map(str, self.witness)])


class _Story:
    """All notes about one message."""

    def __init__(self, message_id: int) -> None:
        self.message_id = message_id
        self.published: Note | None = None
        self.deliveries: list[Note] = []
        self.settling: dict[str, Note] = {}
        self.settled: dict[str, Note] = {}
        self.extending: dict[str, list[Note]] = defaultdict(list)
        self.extended: dict[str, list[Note]] = defaultdict(list)

    @property
    def acked(self) -> Note | None:
        """The note of a confirmed ack."""
        return next((n for n in self.settled.values() if n.kind is Kind.ACKED), None)

    def may_be_over(self, by_ms: int) -> bool:
        """Whether an ack or a last release may have happened by then."""
        for receipt, begun in self.settling.items():
            end = self.settled.get(receipt)
            over = end is None or end.kind in {Kind.ACKED, Kind.FAILED}
            if over and begun.at_ms <= by_ms:
                return True
        return False

    def live_until_ms(self, delivery: Note) -> int:
        """Return the time up to which a delivery was certainly live."""
        asked, given = self.extending[delivery.receipt], self.extended[delivery.receipt]
        until_ms = given[-1].deadline_ms if given else delivery.deadline_ms
        if len(asked) > len(given):
            # One that never returned may have shortened the lease.
            until_ms = min([until_ms, *(note.at_ms for note in asked)])
        begun = self.settling.get(delivery.receipt)
        return until_ms if begun is None else min(until_ms, begun.at_ms)


def audit(
    notes: Iterable[Note],
    *,
    in_queue: Iterable[tuple[int, str]] = (),
    settled: Iterable[int] = (),
    fifo: bool = False,
) -> list[Finding]:
    """Judge the notes of all clients; return what can't be, the smallest witness first.

    ``in_queue`` is what is waiting or in flight at the end, as (id, body); ``settled`` are the ids
    that are done or failed then.
    """
    begun, stories, findings = _read(notes)
    over = set(settled)
    for story in stories.values():
        findings += _judge(story, begun)
    if fifo:
        findings += _judge_order(stories, over)
    findings += _judge_end(stories, begun, dict(in_queue), over)
    return sorted(findings, key=lambda finding: len(finding.witness))


def _read(notes: Iterable[Note]) -> tuple[set[str], dict[int, _Story], list[Finding]]:
    begun: set[str] = set()
    stories: dict[int, _Story] = {}
    by_receipt: dict[str, _Story] = {}
    findings = []
    ordered = sorted(notes, key=lambda note: note.at_ms)
    for note in ordered:
        if note.kind is Kind.PUBLISHING:
            begun.add(note.body)
        elif note.kind in {Kind.PUBLISHED, Kind.DELIVERED}:
            story = stories.setdefault(note.message_id, _Story(note.message_id))
            if note.kind is Kind.PUBLISHED:
                story.published = note
            else:
                story.deliveries.append(note)
                by_receipt[note.receipt] = story
    for note in ordered:
        if note.kind in {Kind.PUBLISHING, Kind.PUBLISHED, Kind.DELIVERED}:
            continue
        held = by_receipt.get(note.receipt)
        if held is None:
            findings.append(Finding("unexpected", note.message_id, (note,)))
        elif note.kind is Kind.SETTLING:
            held.settling.setdefault(note.receipt, note)
        elif note.kind is Kind.EXTENDING:
            held.extending[note.receipt].append(note)
        elif note.kind is Kind.EXTENDED:
            held.extended[note.receipt].append(note)
        else:
            held.settled[note.receipt] = note
    return begun, stories, findings


def _judge(story: _Story, begun: set[str]) -> Iterator[Finding]:
    """Judge one message by itself."""
    for note in story.deliveries:
        if story.published is None and note.body not in begun:
            yield Finding("unexpected", story.message_id, (note,))
        elif story.published is not None and story.published.body != note.body:
            yield Finding("wrong body", story.message_id, (story.published, note))
    acked = story.acked
    by_attempt = sorted(story.deliveries, key=lambda note: (note.attempts, note.at_ms))
    if acked is not None:
        last = next(note for note in by_attempt if note.receipt == acked.receipt)
        for note in by_attempt:
            if note.attempts > last.attempts:
                yield Finding("came back", story.message_id, (acked, note))
                break
    for earlier, later in pairwise(by_attempt):
        given_back = story.settling.get(earlier.receipt)
        uncounted = given_back is not None and given_back.unseen
        repeated = earlier.attempts == later.attempts and not uncounted
        if repeated or later.at_ms < earlier.began_at_ms:
            yield Finding("attempts", story.message_id, (earlier, later))
        elif later.at_ms < story.live_until_ms(earlier):
            yield Finding("two leases", story.message_id, (earlier, later))


def _judge_order(stories: dict[int, _Story], over: set[int]) -> Iterator[Finding]:
    """Of a FIFO group, what came before must be over, or be under the same lease."""
    groups: dict[str, list[_Story]] = defaultdict(list)
    for _, story in sorted(stories.items()):
        if story.published is not None:
            groups[story.published.group].append(story)
    for group in groups.values():
        for at, story in enumerate(group):
            for note in story.deliveries:
                early = next((e for e in group[:at] if _is_passed(e, note, over)), None)
                if early is not None:
                    shown = [early.published, *early.deliveries[-1:], note]
                    witness = tuple(n for n in shown if n is not None)
                    yield Finding("order", story.message_id, witness)


def _is_passed(earlier: _Story, delivery: Note, over: set[int]) -> bool:
    if earlier.may_be_over(delivery.at_ms):
        return False
    # Over, and no client did it: it failed when a lease expired, nobody can say when.
    if earlier.message_id in over and earlier.acked is None:
        return False
    lease = delivery.receipt[:-17]
    return all(note.receipt[:-17] != lease for note in earlier.deliveries)


def _judge_end(
    stories: dict[int, _Story], begun: set[str], present: dict[int, str], over: set[int]
) -> Iterator[Finding]:
    """Compare the notes with what is found at the end."""
    for message_id, body in present.items():
        story = stories.get(message_id)
        if body not in begun and (story is None or story.published is None):
            yield Finding("unexpected", message_id, ())
        if story is not None and story.acked is not None:
            yield Finding("came back", message_id, (story.acked,))
    for message_id, story in stories.items():
        if message_id in present or message_id in over:
            continue
        if story.acked is None and not story.may_be_over(1 << 62):
            first = story.published or story.deliveries[0]
            yield Finding("lost", message_id, (first,))
