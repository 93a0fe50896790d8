"""Cutting a table into parts that can be read side by side.

A part is a list of pieces, a piece is a range of keys (or of offsets, or of ids). Each row of the
table is in exactly one piece of exactly one part.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.codec import opendata
from penstock.errors import InvalidInput, QueueNotFound
from penstock.limits import MAX_BUCKET_EXPONENT, MAX_OFFSET
from penstock.stores.pinned import live_keys
from penstock.tables.schemas import RANGED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.kv import Table
    from penstock.stores.pinned import Pinned
    from penstock.stores.queues import Queue

__all__ = ["Numbers", "Part", "Piece", "QueueKeys", "WholeQueue", "of_queues", "partition"]

_NUMBER_BITS: Final = 60


class Numbers(NamedTuple):
    """Offsets of a log, or message ids (``log`` is 0 then): [begin, end)."""

    log: int
    begin: int
    end: int


class QueueKeys(NamedTuple):
    """Keys [begin, end) of a table that hold rows of one queue, numbered [low, high) if at all."""

    queue: str
    table: str
    begin: bytes
    end: bytes
    low: int = 0
    high: int = MAX_OFFSET


class WholeQueue(NamedTuple):
    """Everything of one queue (the empty name: of the store)."""

    queue: str


Piece: TypeAlias = Numbers | QueueKeys | WholeQueue
Part: TypeAlias = list[Piece]


def partition(
    pinned: Pinned,
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
            pieces = [WholeQueue(queue.name) for queue in chosen]
        elif table == "stats":
            pieces = [WholeQueue(queue.name) for queue in chosen]
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


def _chosen(pinned: Pinned, names: Sequence[str] | None) -> list[Queue]:
    if names is None:
        return list(pinned.queues.values())
    for name in names:
        if name not in pinned.queues:
            raise QueueNotFound(f"no queue named {name!r:.100}")
    return [pinned.queues[name] for name in dict.fromkeys(names)]


def _dealt(pieces: list[Piece], count: int) -> list[Part]:
    """Deal pieces out so that neighbours stay together."""
    count = max(1, min(count, len(pieces)))
    return [
        pieces[len(pieces) * at // count : len(pieces) * (at + 1) // count] for at in range(count)
    ]


def _cut(low: int, high: int, count: int) -> Iterator[tuple[int, int]]:
    """Cut [low, high) into at most ``count`` ranges of about the same width."""
    count = max(1, min(count, high - low))
    borders = [low + (high - low) * at // count for at in range(count + 1)]
    yield from pairwise(borders)


def _log_pieces(
    pinned: Pinned, count: int, low: int, high: int, logs: Sequence[int] | None
) -> list[Piece]:
    stats = pinned.log_stats
    known = sorted(stats.cursors)
    for log in logs or ():
        if log not in stats.cursors:
            raise InvalidInput(f"no log {log}; there are logs 0 to {known[-1]}")
    chosen = known if logs is None else list(dict.fromkeys(logs))
    low, high = max(low, stats.earliest), min(high, stats.end)
    if low >= high or not chosen:
        return []
    each = -(-count // len(chosen))
    return [Numbers(log, *cut) for log in chosen for cut in _cut(low, high, each)]


def _message_pieces(pinned: Pinned, count: int, low: int, high: int) -> list[Piece]:
    table = pinned.table("payloads")
    bounds = _ends(table, opendata.payload_key(low), opendata.payload_key(high))
    if bounds is None:
        return []
    first, last = (int.from_bytes(key[2:], "big") for key in bounds)
    return [Numbers(0, *cut) for cut in _cut(first, last + 1, count)]


def _ends(table: Table, begin: bytes, end: bytes) -> tuple[bytes, bytes] | None:
    first = table.scan(begin, end, 1)
    if not first:
        return None
    return first[0][0], table.scan_back(begin, end, 1)[0][0]


def _queue_pieces(
    pinned: Pinned, table: str, queues: Sequence[Queue], count: int, low: int, high: int
) -> Iterator[QueueKeys]:
    """Cut each queue into as many pieces as its share of the rows asks for."""
    depths = [max(1, _depth(table, queue)) for queue in queues]
    total = sum(depths)
    for queue, depth in zip(queues, depths, strict=True):
        share = max(1, -(-depth * count // total))
        for name, prefix, width in _ranges(pinned, table, queue):
            for begin, end in _key_ranges(pinned, name, prefix, width, share, low):
                yield QueueKeys(queue.name, name, begin, end, low, high)


def _depth(table: str, queue: Queue) -> int:
    counts = queue.counts
    if table == "active":
        return counts.available + counts.delayed + counts.in_flight
    if table == "attempts":
        return counts.acked_total + counts.released_total + counts.lease_expired_total
    return counts.done if table == "done" else counts.failed


def _ranges(pinned: Pinned, table: str, queue: Queue) -> list[tuple[str, bytes, int]]:
    """Return tables, prefixes, and how many bytes follow the eight that are counted by."""
    if table == "done":
        return [("history", opendata.done_prefix(queue.id), 8)]
    if table == "failed":
        return [("history", opendata.failed_prefix(queue.id), 8)]
    live = live_keys(pinned.identity.design, queue)
    if table == "active":
        return [(name, begin, 0) for name, begin, _ in live]
    # Running attempts are told from what is in flight.
    return [
        ("history", opendata.attempts_prefix(queue.id), 2),
        *((name, begin, 0) for name, begin, _ in live if name != "available"),
    ]


def _key_ranges(
    pinned: Pinned, table: str, prefix: bytes, width: int, count: int, least: int
) -> Iterator[tuple[bytes, bytes]]:
    """Cut the keys under a prefix by the u64 after it, from the one on that may hold ``least``.

    In a bucket's number the highest bits are its size, so that numbers lie in a few dense runs.
    """
    source = pinned.table(table)
    for run in range(MAX_BUCKET_EXPONENT + 1):
        start = least - least % opendata.capacity(run)
        if start >> _NUMBER_BITS:
            return
        low = prefix + (run << _NUMBER_BITS | start).to_bytes(8, "big")
        # One byte longer than any key of the run.
        high = prefix + ((run + 1 << _NUMBER_BITS) - 1).to_bytes(8, "big") + b"\xff" * (width + 1)
        bounds = _ends(source, low, high)
        if bounds is None:
            continue
        at = len(prefix)
        first, last = (int.from_bytes(key[at : at + 8], "big") for key in bounds)
        for cut_low, cut_high in _cut(first, last + 1, count):
            yield prefix + cut_low.to_bytes(8, "big"), prefix + cut_high.to_bytes(8, "big")
