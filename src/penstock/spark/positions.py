"""Positions of the change feed: where each queue is read next, and how an offset packs them.

An offset in a checkpoint is one JSON object. For ten thousand queues it has to be short, so each
queue goes by its number, which no later queue of the store gets::

    {"store": "0c2f9a11", "at": 1893456000000, "packed": "AXicY2BkYGRgZmBh…"}

``packed`` is Base64 of a byte with the version of the format, 1, and of a zlib stream of four rows
of 64-bit whole numbers, a column for each queue, in the order of their numbers: the number less the
one before, ``at`` less ``since``, and the next done and failed number (-1: not read). If both are
read the version is 2, and the last row has the failed number less the done one: on a SQL database
they are the same where all was read. The bytes of a row come lowest first for all queues, then the
next ones: most of them are zeros in a row. For another format: another version, and
:func:`unpacked` reads all.

Offsets of earlier versions have names, and are still read::

    {"store": "0c2f9a11", "at": 1893456000000,
     "queues": {"orders": {"created": 1893450000000, "since": 1893456000000, "done": 905}}}
"""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from penstock.errors import InvalidInput
from penstock.flight.protocol import HistoryStretch
from penstock.spark.log import EARLIEST, LATEST, LEAST_PIECE, check_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.flight.protocol import HistoryEnds, QueueHistory

_ONE_STATE: Final = b"\x01"
_BOTH_STATES: Final = b"\x02"
_ROWS: Final = 4


class Position(msgspec.Struct, omit_defaults=True):
    """Where a queue is read next: when it was made, and the next number by state.

    No message that is still to be read has ended before ``since``.
    """

    created: int
    since: int
    done: int = -1
    failed: int = -1


class FeedOffset(msgspec.Struct):
    """The offset of a stream: the time of the broker, and the position in each queue."""

    store: str
    at: int
    queues: dict[str, Position]


# --- as a checkpoint has them ---------------------------------------------------------------------


def packed(offset: FeedOffset, ends: HistoryEnds) -> dict[str, Any]:
    """Return an offset as Spark writes it; ``ends`` has the numbers of its queues."""
    # Brokers of one database have a clock each: no queue of an offset is younger than it.
    at = max(offset.at, *(each.created for each in offset.queues.values()), 0)
    rows = sorted(
        (ends.queues[queue].number, at - each.since, each.done, each.failed)
        for queue, each in offset.queues.items()
    )
    table = np.array(rows, "<i8").reshape(-1, _ROWS).T.copy()
    table[0] = np.diff(table[0], prepend=0)
    version = _BOTH_STATES if (table[2:] >= 0).all() else _ONE_STATE
    if version == _BOTH_STATES:
        table[3] -= table[2]
    columns = table.view(np.uint8).reshape(_ROWS, -1, 8).transpose(0, 2, 1).tobytes()
    text = base64.b64encode(version + zlib.compress(columns)).decode()
    return {"store": offset.store, "at": at, "packed": text}


def _numbered(offset: Mapping[str, Any]) -> dict[int, tuple[int, int, int]]:
    """Return what is packed by the number of the queue: age of since, done, failed."""
    content = base64.b64decode(offset["packed"])
    if content[:1] not in (_ONE_STATE, _BOTH_STATES):
        raise InvalidInput(
            f"the checkpoint's offset has format {content[:1].hex()}, this Penstock reads formats "
            "01 and 02: use the version of Penstock that wrote it, or a later one"
        )
    columns = np.frombuffer(zlib.decompress(content[1:]), np.uint8)
    table = columns.reshape(_ROWS, 8, -1).transpose(0, 2, 1).copy().view("<i8")[:, :, 0]
    if content[:1] == _BOTH_STATES:
        table[3] += table[2]
    numbers = np.cumsum(table[0]).tolist()
    return dict(zip(numbers, zip(*table[1:].tolist(), strict=True), strict=True))


def unpacked(offset: Mapping[str, Any], ends: HistoryEnds) -> FeedOffset:
    """Return an offset as a checkpoint has it; queues that ``ends`` has not are gone, or left out.

    Another queue of the same name has another number, and counts as one that was not read yet. So
    does one of the same number that was made after the offset.
    """
    if "packed" not in offset:
        return msgspec.convert(offset, FeedOffset)
    numbered = _numbered(offset)
    queues = {}
    for queue, found in ends.queues.items():
        known = numbered.get(found.number)
        if known is not None and _is_meant(found, offset):
            age_ms, done, failed = known
            queues[queue] = Position(found.created_at_ms, offset["at"] - age_ms, done, failed)
    return FeedOffset(offset["store"], offset["at"], queues)


def _is_meant(found: QueueHistory, offset: Mapping[str, Any]) -> bool:
    """Whether an offset can mean a queue: a store that a backup has restored gives numbers anew."""
    meant: bool = found.created_at_ms <= offset["at"]
    return meant


def gone(start: Mapping[str, Any], end: Mapping[str, Any], ends: HistoryEnds) -> list[int]:
    """Return the numbers of queues with messages between two offsets that ``ends`` has not."""
    if "packed" not in start or "packed" not in end:
        # By its name a queue is looked for when it is read.
        return []
    begins = _numbered(start)
    there = {found.number for found in ends.queues.values() if _is_meant(found, end)}
    moved = set()
    for number, (_, *after) in _numbered(end).items():
        _, *before = begins.get(number, (0, *(min(each, 0) for each in after)))
        if after != before:
            moved.add(number)
    return sorted(moved - there)


# --- from one to the next -------------------------------------------------------------------------


def starting_positions(
    ends: HistoryEnds, states: Sequence[str], place: str | Mapping[str, Any]
) -> dict[str, Position]:
    """Turn ``earliest``, ``latest`` or numbers by queue into a position for every queue.

    ``earliest`` is where the history begins that the broker was asked for.
    """
    wanted: Mapping[str, Any]
    if isinstance(place, str):
        wanted = dict.fromkeys(ends.queues, EARLIEST if place == "earliest" else LATEST)
    else:
        wanted = place
        check_names("startingOffsets", "queue", wanted, ends.queues)
    return {
        queue: _starting(queue, found, ends.at_ms, states, wanted[queue])
        for queue, found in ends.queues.items()
    }


def _starting(
    queue: str, found: QueueHistory, at_ms: int, states: Sequence[str], wanted: Any
) -> Position:
    position = Position(found.created_at_ms, at_ms)
    if isinstance(wanted, int) and (len(states) == 1 or wanted < 0):
        wanted = dict.fromkeys(states, wanted)
    if not isinstance(wanted, dict) or set(wanted) != set(states):
        raise InvalidInput(
            f"startingOffsets of queue {queue} must say where done and failed begin, like "
            '{"done": 5, "failed": 3}'
        )
    for state, number in wanted.items():
        end = found.ends[state]
        if not EARLIEST <= number <= end:
            raise InvalidInput(
                f"startingOffsets of queue {queue} is {number}; {state} has numbers up to {end}"
            )
        places = {EARLIEST: found.firsts.get(state, (end, at_ms)), LATEST: (end, at_ms)}
        begin, since_ms = places.get(number, (number, found.created_at_ms))
        setattr(position, state, begin)
        position.since = min(position.since, since_ms)
    return position


def next_positions(
    start: FeedOffset, ends: HistoryEnds, states: Sequence[str], most: int | None
) -> dict[str, Position]:
    """Return where a micro-batch ends that takes at most ``most`` numbers, shared by what waits."""
    positions = {
        queue: _begin(start, queue, found.created_at_ms, states)
        for queue, found in ends.queues.items()
    }
    waits = sorted(
        (width, queue, state)
        for queue, position in positions.items()
        for state in states
        if (width := ends.queues[queue].ends[state] - getattr(position, state)) > 0
    )
    left, total = most, sum(width for width, _, _ in waits)
    behind = set()
    # The short ones first: each gets its share, and at least one number while there are any.
    for width, queue, state in waits:
        share = width if left is None else min(width, -(-width * left // total))
        setattr(positions[queue], state, getattr(positions[queue], state) + share)
        total -= width
        if left is not None:
            left -= share
        if share < width:
            behind.add(queue)
    for queue in positions.keys() - behind:
        positions[queue].since = ends.at_ms
    return positions


def _begin(start: FeedOffset, queue: str, created_at_ms: int, states: Sequence[str]) -> Position:
    """Return where a queue is read from; one that is new, or was made again, from its first."""
    known = start.queues.get(queue)
    if known is not None and known.created == created_at_ms:
        return msgspec.structs.replace(known)
    return Position(created_at_ms, created_at_ms, **dict.fromkeys(states, 0))


def stretches_between(
    start: FeedOffset, end: FeedOffset, states: Sequence[str]
) -> list[HistoryStretch]:
    """Return the stretches between two offsets.

    A queue that the stream has not read before, and that is older than it, is read from what is
    left of its history.
    """
    found = []
    for queue, until in end.queues.items():
        begin = _begin(start, queue, until.created, states)
        is_chosen_late = queue not in start.queues and until.created < start.at
        since_ms = None if is_chosen_late else begin.since
        for state in states:
            numbers = getattr(begin, state), getattr(until, state)
            if numbers[0] < numbers[1]:
                found.append(HistoryStretch(queue, until.created, state, *numbers, since_ms))
    return found


def deal(
    stretches: Iterable[HistoryStretch], pieces: int, least: int = LEAST_PIECE
) -> list[list[HistoryStretch]]:
    """Deal stretches out to about ``pieces`` tasks of like width; a task may have many queues."""
    whole = list(stretches)
    step = max(least, -(-sum(each.end - each.begin for each in whole) // max(1, pieces)))
    tasks: list[list[HistoryStretch]] = []
    room = 0
    for stretch in whole:
        begin = stretch.begin
        while begin < stretch.end:
            if not room:
                tasks.append([])
                room = step
            end = min(stretch.end, begin + room)
            tasks[-1].append(msgspec.structs.replace(stretch, begin=begin, end=end))
            room -= end - begin
            begin = end
    return tasks
