"""The history of queues by sequence number, for streams: how far it goes, and stretches of it.

A stretch is [begin, end) of the done or of the failed messages of one queue. It names the time that
the queue was made at, because one that is made again counts anew. ``since_ms`` is a time before
which no message of the stretch has ended: it tells whether retention can have removed one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock import limits
from penstock.errors import InvalidInput
from penstock.flight.protocol import HistoryEnds, QueueHistory
from penstock.flight.snapshots import Piece
from penstock.model import State
from penstock.validation import check_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.flight.protocol import HistoryStretch
    from penstock.store.snapshot import PinnedStore

STATES: Final = (State.DONE, State.FAILED)


def ends_of(pinned: PinnedStore, queues: Sequence[str] | None, since_ms: int | None) -> HistoryEnds:
    """Return how far the history of queues that are there goes, and where it begins at a time."""
    found = {}
    for queue, spec in pinned.queues.items():
        if queues is not None and queue not in queues:
            continue
        ends = {state.value: end for state, end in pinned.sequence_ends(queue).items()}
        firsts = {}
        for state in STATES if since_ms is not None else ():
            first = pinned.first_ended(state, queue, since_ms or 0)
            if first is not None:
                firsts[state.value] = first
        found[queue] = QueueHistory(spec.created_at_ms, ends, firsts)
    return HistoryEnds(pinned.store_id, pinned.at_ms, found)


def check_stretches(stretches: Sequence[HistoryStretch], table: str = "attempts") -> None:
    """Refuse stretches that no history has, and those of another state than the table's."""
    known = STATES if table == "attempts" else [table]
    for stretch in stretches:
        if stretch.state not in known:
            states = " or ".join(known)
            raise InvalidInput(f"a stretch is of {states} messages, not {stretch.state!r:.100}")
        check_count(stretch.begin, "begin", 0, limits.MAX_OFFSET)
        check_count(stretch.end, "end", stretch.begin, limits.MAX_OFFSET)


def pieces_of(pinned: PinnedStore, stretches: Sequence[HistoryStretch]) -> Iterator[Piece]:
    """Cut stretches that are there whole; rows must not be missed without a word.

    Of a stretch without ``since_ms`` the rows that are left are enough.
    """
    for stretch in stretches:
        queue, state = stretch.queue, State(stretch.state)
        spec = pinned.queues.get(queue)
        if spec is None or spec.created_at_ms != stretch.created_at_ms:
            if stretch.since_ms is not None:
                raise _lost(stretch, "the queue was deleted before they were read")
            continue
        end = pinned.sequence_ends(queue)[state]
        if stretch.end > end:
            raise InvalidInput(
                f"{state.value} messages of queue {queue} up to sequence {stretch.end} were asked "
                f"for; they end at {end}: was an older copy of the store put in its place?"
            )
        if stretch.since_ms is not None and _is_removed(pinned, stretch, state):
            raise _lost(stretch, "they are gone by retention, a purge or a trim")
        for keys in pinned.cut(state.value, queue, 1, stretch.begin):
            yield Piece(queue, keys, stretch.begin, stretch.end, state=state.value)


def _is_removed(pinned: PinnedStore, stretch: HistoryStretch, state: State) -> bool:
    """Whether messages at the begin of a stretch are gone for good, as far as the store can tell.

    Retention takes the oldest first. Numbers may be missing for other reasons too: messages are
    redriven or moved, and not every store gives out all numbers. Time tells then.
    """
    since_ms = stretch.since_ms or 0
    first = pinned.first_ended(state, stretch.queue, 0)
    if first is not None:
        number, ended_at_ms = first
        if number <= stretch.begin if pinned.ordered else ended_at_ms < since_ms:
            return False
    spec = pinned.queues[stretch.queue]
    kept_ms = spec.done_retention_ms if state is State.DONE else spec.failed_retention_ms
    return since_ms + kept_ms <= pinned.at_ms


def _lost(stretch: HistoryStretch, why: str) -> InvalidInput:
    return InvalidInput(
        f"data loss: {stretch.state} messages of queue {stretch.queue} from sequence "
        f"{stretch.begin} on are asked for, but {why}. Set failOnDataLoss to false to go on "
        "without them"
    )
