"""Cutting a table into parts that can be read side by side.

A part is a list of pieces, a piece is a range of keys (or of offsets, or of ids). Each row of the
table is in exactly one piece of exactly one part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock.errors import InvalidInput, QueueNotFound
from penstock.flight.schemas import RANGED
from penstock.limits import MAX_OFFSET
from penstock.store.snapshot import cut_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.store.snapshot import Keys, PinnedStore

__all__ = ["Numbers", "Part", "Piece", "QueueKeys", "WholeQueue", "of_queues", "partition"]


class Numbers(NamedTuple):
    """Offsets of a log, or message ids (``log`` is 0 then): [begin, end)."""

    log: int
    begin: int
    end: int


class QueueKeys(NamedTuple):
    """A range of one queue's rows, numbered [low, high) if at all."""

    queue: str
    keys: Keys
    low: int = 0
    high: int = MAX_OFFSET


class WholeQueue(NamedTuple):
    """Everything of one queue (the empty name: of the store)."""

    queue: str


Piece: TypeAlias = Numbers | QueueKeys | WholeQueue
Part: TypeAlias = list[Piece]


def partition(
    pinned: PinnedStore,
    table: str,
    count: int,
    *,
    queues: Sequence[str] | None = None,
    begin: int | None = None,
    end: int | None = None,
    logs: Sequence[int] | None = None,
) -> list[Part]:
    """Cut a table into at most ``count`` parts; at least one, which may have no rows."""
    if (begin is not None or end is not None) and table not in RANGED:
        raise InvalidInput(f"table {table} has no begin and end; those that have: {_names(RANGED)}")
    if logs is not None and table != "log":
        raise InvalidInput(f"logs are for the table log, not for {table}")
    if queues is not None and table in {"log", "messages"}:
        raise InvalidInput(f"table {table} has no queues to choose from")
    low = 0 if begin is None else begin
    high = MAX_OFFSET if end is None else end
    if table == "log":
        pieces = _log_pieces(pinned, count, low, high, logs)
    elif table == "messages":
        pieces = _message_pieces(pinned, count, low, high)
    else:
        chosen = _chosen(pinned, queues)
        if table in {"queues", "groups"}:
            pieces = [WholeQueue(queue) for queue in chosen]
        elif table == "stats":
            pieces = [WholeQueue(queue) for queue in chosen]
            pieces += [WholeQueue("")] if queues is None else []
            count = 1
        else:
            pieces = list(_queue_pieces(pinned, table, chosen, count, low, high))
    return _dealt(pieces, count)


def of_queues(part: Part, queues: Sequence[str] | None) -> Part:
    """Return the pieces of a part that belong to these queues; None: all of them."""
    if queues is None:
        return part
    wanted = set(queues)
    if any(isinstance(piece, Numbers) for piece in part):
        raise InvalidInput("a part of the log, or of all messages, has no queues to choose from")
    return [piece for piece in part if not isinstance(piece, Numbers) and piece.queue in wanted]


def _names(of: object) -> str:
    return ", ".join(sorted(of)) if isinstance(of, dict) else ""


def _chosen(pinned: PinnedStore, names: Sequence[str] | None) -> list[str]:
    if names is None:
        return list(pinned.queues)
    for name in names:
        if name not in pinned.queues:
            raise QueueNotFound(f"no queue named {name!r:.100}")
    return list(dict.fromkeys(names))


def _dealt(pieces: list[Piece], count: int) -> list[Part]:
    """Deal pieces out so that neighbours stay together."""
    count = max(1, min(count, len(pieces)))
    return [
        pieces[len(pieces) * at // count : len(pieces) * (at + 1) // count] for at in range(count)
    ]


def _log_pieces(
    pinned: PinnedStore, count: int, low: int, high: int, logs: Sequence[int] | None
) -> list[Piece]:
    stats = pinned.log_stats
    known = sorted(stats.cursors)
    for log in logs or ():
        if log not in stats.cursors:
            raise InvalidInput(f"no log {log}; there are logs 0 to {known[-1]}")
    chosen = known if logs is None else list(dict.fromkeys(logs))
    low, high = max(low, stats.earliest), min(high, stats.end)
    if not chosen or low >= high:
        return []
    each = -(-count // len(chosen))
    return [Numbers(log, *cut) for log in chosen for cut in cut_range(low, high, each)]


def _message_pieces(pinned: PinnedStore, count: int, low: int, high: int) -> list[Piece]:
    """Cut the ids whose payload is kept into pieces."""
    ends = pinned.message_ends(low, high)
    if ends is None:
        return []
    return [Numbers(0, *cut) for cut in cut_range(ends[0], ends[1] + 1, count)]


def _queue_pieces(
    pinned: PinnedStore, table: str, queues: Sequence[str], count: int, low: int, high: int
) -> Iterator[QueueKeys]:
    """Cut each queue into as many pieces as its share of the rows asks for."""
    depths = [max(1, pinned.about(table, queue)) for queue in queues]
    total = sum(depths)
    for queue, depth in zip(queues, depths, strict=True):
        share = max(1, -(-depth * count // total))
        for keys in pinned.cut(table, queue, share, low):
            yield QueueKeys(queue, keys, low, high)
