"""Snapshots that clients read: a pinned store, and a table of it cut into parts.

A part is a list of pieces, a piece is a range of keys (or of offsets, or of ids). Each row of the
table is in exactly one piece of exactly one part, so that readers may read parts side by side.

A snapshot keeps deleted data on disk, so the server closes it when no client has taken a batch of
it for a while. When there is no room for another, or its key has its share, the server closes one
of which no batch is made at that moment: a finished one first, then one whose reader has not come
or has stalled for a while, then one of the key that holds the most.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from penstock import limits
from penstock.errors import InvalidInput, QueueNotFound
from penstock.flight.protocol import HistoryEnds, QueueHistory
from penstock.flight.tables import BATCH_BYTES
from penstock.limits import MAX_OFFSET
from penstock.model import State
from penstock.server.shares import Shares
from penstock.store.snapshot import cut_range
from penstock.validation import check_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from penstock.clock import Clock
    from penstock.flight.conditions import Condition
    from penstock.flight.protocol import HistoryStretch
    from penstock.flight.tables import Selection
    from penstock.store.snapshot import PinnedStore


class Piece(NamedTuple):
    """A range of a table: rows of a queue (the empty name: of the store), or of no queue.

    Of a queue, those of ``keys``, or all; else offsets of a ``log``, or message ids. ``low`` and
    ``high`` bound offsets, ids or sequence numbers. Attempts of a ``state`` are those at messages
    in it.
    """

    queue: str | None
    keys: Any = None
    low: int = 0
    high: int = MAX_OFFSET
    log: int = 0
    state: str = ""


Part: TypeAlias = list[Piece]
# Of one DataFrame: an action that is still under way is among its last ones.
_MOMENTS: Final = 64
# The column of a table that rows are found by.
_FOUND_BY: Final = {
    "log": "offset",
    "messages": "message_id",
    "attempts": "message_id",
    "done": "sequence",
    "failed": "sequence",
}
_WAITING: Final = (State.AVAILABLE.value, State.DELAYED.value)


def partition(
    pinned: PinnedStore,
    table: str,
    count: int,
    *,
    queues: Sequence[str] | None = None,
    where: Condition | None = None,
) -> list[Part]:
    """Cut a table into at most ``count`` parts; at least one, which may have no rows.

    Rows that ``where`` is not true of may be left out.
    """
    if queues is not None and table in {"log", "messages"}:
        raise InvalidInput(f"table {table} has no queues to choose from")
    low, high = 0, MAX_OFFSET
    if where is not None:
        span = where.span(_FOUND_BY.get(table, ""))
        low, high = max(low, span.low), min(high, span.high + 1)
    pieces: list[Piece] = []
    # About how many rows each piece has, where pieces differ much.
    weights: list[int] = []
    if low >= high:
        # Nothing can be in it.
        count = 1
    elif table == "log":
        stats = pinned.log_stats
        first, last = (0, MAX_OFFSET) if where is None else where.span("log")
        logs = [log for log in sorted(stats.cursors) if first <= log <= last]
        low, high = max(low, stats.earliest), min(high, stats.end)
        if logs and low < high:
            each = -(-count // len(logs))
            pieces = [
                Piece(None, None, *cut, log) for log in logs for cut in cut_range(low, high, each)
            ]
    elif table == "messages":
        # The ids whose payload is kept.
        ends = pinned.message_ends(low, high)
        cuts = [] if ends is None else cut_range(ends[0], ends[1] + 1, count)
        pieces = [Piece(None, None, *cut) for cut in cuts]
    else:
        chosen = list(pinned.queues) if queues is None else list(dict.fromkeys(queues))
        for name in chosen:
            if name not in pinned.queues:
                raise QueueNotFound.among(name, pinned.queues)
        if where is not None:
            chosen = where.chosen("name" if table == "queues" else "queue", chosen)
        if table in {"queues", "groups", "stats"}:
            pieces = [Piece(queue) for queue in chosen]
            if table == "stats":
                pieces += [Piece("")] if queues is None else []
                count = 1
        else:
            held = where is not None and not where.chosen("state", _WAITING)
            for some, depth in _queue_pieces(pinned, table, chosen, count, low, high, held=held):
                pieces += some
                weights += [-(-depth // len(some))] * len(some)
    return _dealt(pieces, weights or [1] * len(pieces), count)


def _dealt(pieces: Sequence[Piece], weights: Sequence[int], count: int) -> list[Part]:
    """Deal pieces out into parts of about the same weight; neighbours stay together."""
    parts: list[Part] = [[] for _ in range(count)]
    total, before = sum(weights), 0
    for piece, weight in zip(pieces, weights, strict=True):
        parts[(2 * before + weight) * count // (2 * total)].append(piece)
        before += weight
    return [part for part in parts if part] or [[]]


def _queue_pieces(
    pinned: PinnedStore,
    table: str,
    queues: Sequence[str],
    count: int,
    low: int,
    high: int,
    *,
    held: bool,
) -> Iterator[tuple[list[Piece], int]]:
    """Cut each queue into as many pieces as its share of the rows asks for; and say how many rows.

    ``held``: of active messages only those in flight, which are cut as for their attempts.
    """
    depths = [max(1, pinned.about(table, queue)) for queue in queues]
    total = sum(depths)
    for queue, depth in zip(queues, depths, strict=True):
        share = -(-depth * count // total)
        ranges = pinned.cut("attempts" if held else table, queue, share, low, high)
        pieces = [Piece(queue, keys, low, high) for keys in ranges if keys.live or not held]
        if pieces:
            yield pieces, depth


def of_queues(part: Part, queues: Sequence[str] | None) -> Part:
    """Return the pieces of a part that belong to these queues; None: all of them."""
    if queues is None:
        return part
    if any(piece.queue is None for piece in part):
        raise InvalidInput("a part of the log, or of all messages, has no queues to choose from")
    chosen = set(queues)
    return [piece for piece in part if piece.queue in chosen]


@dataclass(eq=False)
class TableParts:
    """A table of a snapshot, cut into parts, and the numbers of those that nobody has read."""

    parts: list[Part]
    selection: Selection

    def __post_init__(self) -> None:
        self.unread = set(range(len(self.parts)))


@dataclass(eq=False)
class Snapshot:
    """A pinned store, and the tables of it that are read, by the command that asked for them.

    ``owner`` is the key that it was made for, empty if there are no keys; ``holder`` has the share
    that it takes. ``held``: a client wants it by its name. ``readers``: reads that have begun and
    not ended; ``making``: those of which a batch is being made.
    """

    pinned: PinnedStore
    owner: str
    tables: dict[bytes, TableParts] = field(default_factory=dict)
    held: bool = False
    holder: str = ""
    name: str = ""
    used_at_ms: int = 0
    readers: int = 0
    making: int = 0

    @property
    def waits(self) -> bool:
        """Whether somebody may still want to read it: it is held, or has parts not read whole."""
        tables = list(self.tables.values())
        unread = self.held or not tables or any(table.unread for table in tables)
        return unread or self.readers > 0


@dataclass(eq=False)
class Moment:
    """A snapshot that actions of a DataFrame share: their names, and the parts that they read."""

    snapshot: str
    actions: set[str]
    parts: set[int] = field(default_factory=set)


class Snapshots:
    """The live snapshots of a server. Thread-safe."""

    def __init__(self, clock: Clock, most: int) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._live: dict[str, Snapshot] = {}
        hint = f"Try again in {limits.MIN_VIEW_IDLE_MS // 1000} seconds"
        self._places = Shares("snapshots", most, hint=hint)
        self._unread = Shares("bytes of batches not read yet", limits.MAX_UNREAD_BYTES, clock)
        self._closed = False
        # Of each DataFrame of a key the moments that it was read at, the latest last.
        self._moments: dict[tuple[str, str], list[Moment]] = {}
        self._remembered = Shares("DataFrames", limits.MAX_REMEMBERED_FRAMES)
        self._taken = threading.Condition()

    def __len__(self) -> int:
        with self._lock:
            return len(self._live)

    def add(self, make: Callable[[], Snapshot], holder: str = "") -> Snapshot:
        """Make a snapshot for a holder of a share, if there is room for it, and give it a name."""
        self.expire()
        with self._lock:
            self._make_room(holder)
            self._places.take(holder)
        try:
            snapshot = make()
        except BaseException:
            self._places.give(holder)
            raise
        snapshot.name, snapshot.holder = self._clock.lease_id().hex(), holder
        with self._lock:
            snapshot.used_at_ms = self._clock.now_ms()
            self._live[snapshot.name] = snapshot
        return snapshot

    def _make_room(self, holder: str) -> None:
        """Close snapshots until the holder may have one more, as far as any can make way."""
        held, now_ms = self._places.held, self._clock.now_ms()
        while not self._places.fits(holder):
            candidates = [
                (snapshot.waits, -held(snapshot.holder), snapshot.used_at_ms, at, name)
                for at, (name, snapshot) in enumerate(self._live.items())
                if not snapshot.making
                and (
                    not snapshot.waits
                    or (held(snapshot.holder) >= held(holder) and _is_stale(snapshot, now_ms))
                    or (held(snapshot.holder) > held(holder) + 1 and not snapshot.readers)
                )
            ]
            if not candidates:
                raise self._places.refusal(holder)
            self._let_go(self._live.pop(min(candidates)[-1]))

    def _let_go(self, snapshot: Snapshot) -> None:
        """Close a snapshot that is out of the live ones."""
        self._places.give(snapshot.holder)
        snapshot.pinned.close()

    def find(self, name: str) -> Snapshot:
        """Return a snapshot, which does not expire for a while."""
        with self._lock:
            return self._find(name)

    def _find(self, name: str) -> Snapshot:
        snapshot = self._live.get(name)
        if snapshot is None:
            raise InvalidInput(
                f"the snapshot {name[:64]} has expired, or the server was restarted: ask for a "
                "new one"
            )
        snapshot.used_at_ms = self._clock.now_ms()
        return snapshot

    def table(
        self, snapshot: Snapshot, command: bytes, make: Callable[[PinnedStore], TableParts]
    ) -> TableParts:
        """Return a table of a snapshot; who asks first for it has it cut into parts."""
        with self._taken:
            known = snapshot.tables.get(command)
            if known is None:
                if len(snapshot.tables) >= limits.MAX_SNAPSHOT_READS:
                    raise InvalidInput(
                        f"one snapshot has at most {limits.MAX_SNAPSHOT_READS} different reads"
                    )
                known = snapshot.tables[command] = make(snapshot.pinned)
            return known

    def read(
        self,
        name: str,
        rows: Callable[[PinnedStore], Iterator[pa.RecordBatch]],
        table: TableParts | None = None,
        part: int = 0,
    ) -> Iterator[pa.RecordBatch]:
        """Read batches of a snapshot, in turn with other reads; note that a part was read whole.

        A batch counts for the holder's share of memory until its client has taken it.
        """
        with self._lock:
            snapshot = self._find(name)
            snapshot.readers += 1
        size = BATCH_BYTES
        try:
            batches = rows(snapshot.pinned)
            while True:
                self._unread.take(snapshot.holder, size, wait_ms=limits.MAX_UNREAD_WAIT_MS)
                try:
                    with self._making(snapshot):
                        batch = next_batch(batches)
                    if batch is None:
                        break
                    yield batch
                finally:
                    self._unread.give(snapshot.holder, size)
                # The next is likely to be as large.
                size = max(BATCH_BYTES, batch.nbytes)
            if table is not None:
                table.unread.discard(part)
        finally:
            with self._lock:
                snapshot.readers -= 1

    @contextmanager
    def _making(self, snapshot: Snapshot) -> Iterator[None]:
        """Make a batch of a snapshot, which is not closed meanwhile."""
        with self._lock:
            snapshot.making += 1
        try:
            yield
        finally:
            with self._lock:
                snapshot.making -= 1
                snapshot.used_at_ms = self._clock.now_ms()

    def of_action(
        self,
        owner: str,
        frame: str,
        action: str,
        part: int,
        make: Callable[[], Snapshot],
        *,
        sure: bool,
    ) -> Snapshot:
        """Return the snapshot of an action of a key's DataFrame; its first reader has it made.

        Every part of an action is read from one snapshot, and the next action has its own. But an
        action may also read only the parts that a cached DataFrame has not kept from an earlier
        one: a part that no action has read yet waits a moment for the first part of its action,
        and without it is read from the snapshot of the earlier action.

        Not ``sure`` is a reader that may have read other parts from a server that ran before
        this one, or is a second try there: only the first part's first reader begins anew.
        """
        with self._taken:
            moments = self._remember(owner, frame)
            begin_ms = self._clock.now_ms()
            while not any(action in each.actions for each in moments):
                earlier = next((each for each in moments[::-1] if part not in each.parts), None)
                if sure and (part == 0 or earlier is None):
                    moments.append(Moment(make().name, {action}))
                    del moments[:-_MOMENTS]
                    self._taken.notify_all()
                    break
                live = earlier is not None and earlier.snapshot in self._live
                wait_ms = limits.SNAPSHOT_GUESS_MS if live else limits.MAX_SNAPSHOT_WAIT_MS
                left_ms = begin_ms + wait_ms - self._clock.now_ms()
                if left_ms > 0 and not self._closed:
                    self._clock.wait(self._taken, left_ms)
                elif earlier is not None and live:
                    earlier.actions.add(action)
                else:
                    raise InvalidInput(
                        "the snapshot that other parts were read from is gone, as the server was "
                        "restarted or nobody has read it for long: do it again, with a DataFrame "
                        "that is loaded anew (a cached one first wants unpersist())"
                    )
            moment = next(each for each in moments if action in each.actions)
            snapshot = self.find(moment.snapshot)
            moment.parts.add(part)
        return snapshot

    def _remember(self, owner: str, frame: str) -> list[Moment]:
        """Return the moments of a DataFrame; those that a key has read last are remembered."""
        moments = self._moments.pop((owner, frame), None)
        if moments is None:
            while (leaves := self._remembered.who_makes_way(owner)) is not None:
                del self._moments[next(key for key in self._moments if key[0] == leaves)]
                self._remembered.give(leaves)
            self._remembered.take(owner)
            moments = []
        # The same list, also if it has none yet: another reader may wait for its first.
        self._moments[owner, frame] = moments
        return moments

    def drop(self, name: str) -> bool:
        """Close a snapshot; return whether it was there."""
        return bool(self._close(lambda snapshot: snapshot.name == name))

    def expire(self) -> int:
        """Close snapshots that nobody has used for a while; return how many."""
        before_ms = self._clock.now_ms() - limits.MAX_VIEW_IDLE_MS
        return self._close(
            lambda snapshot: not snapshot.making and snapshot.used_at_ms <= before_ms
        )

    def close(self) -> None:
        """Close all snapshots; a read that goes on gets an error."""
        with self._taken:
            self._closed = True
            self._taken.notify_all()
        self._close(lambda _: True)

    def _close(self, chosen: Callable[[Snapshot], bool]) -> int:
        with self._lock:
            gone = [snapshot for snapshot in self._live.values() if chosen(snapshot)]
            for snapshot in gone:
                del self._live[snapshot.name]
        for snapshot in gone:
            self._let_go(snapshot)
        return len(gone)


def _is_stale(snapshot: Snapshot, now_ms: int) -> bool:
    """Whether a snapshot has waited long enough for its reader that it may make way."""
    idle_ms = limits.MAX_READ_STALL_MS if snapshot.readers else limits.MIN_VIEW_IDLE_MS
    return snapshot.used_at_ms <= now_ms - idle_ms


# --- history by sequence number -------------------------------------------------------------------

# A stretch is [begin, end) of the done or of the failed messages of one queue. It names the time
# that the queue was made at, because one that is made again counts anew. ``since_ms`` is a time
# before which no message of it has ended: it tells whether retention can have removed one.
_ENDED: Final = (State.DONE, State.FAILED)


def history_ends(
    pinned: PinnedStore, queues: Sequence[str] | None, since_ms: int | None
) -> HistoryEnds:
    """Return how far the history of queues that are there goes, and where it begins at a time."""
    found = {}
    for queue, spec in pinned.queues.items():
        if queues is not None and queue not in queues:
            continue
        ends = {state.value: end for state, end in pinned.sequence_ends(queue).items()}
        firsts = {}
        for state in _ENDED if since_ms is not None else ():
            first = pinned.first_ended(state, queue, since_ms or 0)
            if first is not None:
                firsts[state.value] = first
        found[queue] = QueueHistory(spec.created_at_ms, ends, firsts, pinned.number(queue))
    return HistoryEnds(pinned.store_id, pinned.at_ms, found)


def check_stretches(stretches: Sequence[HistoryStretch], table: str) -> None:
    """Refuse stretches that no history has, and those of another state than the table's."""
    known = _ENDED if table == "attempts" else [table]
    for stretch in stretches:
        if stretch.state not in known:
            states = " or ".join(known)
            raise InvalidInput(f"a stretch is of {states} messages, not {stretch.state!r:.100}")
        check_count(stretch.begin, "begin", 0, limits.MAX_OFFSET)
        check_count(stretch.end, "end", stretch.begin, limits.MAX_OFFSET)


def history_pieces(pinned: PinnedStore, stretches: Sequence[HistoryStretch]) -> Iterator[Piece]:
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


# --- turns ----------------------------------------------------------------------------------------

# How long a reader waits for its turn before it reads without.
TURN_MS: Final = 250
# How long a thread that makes a batch keeps the interpreter when another wants it.
SWITCH_MS: Final = 0.5
# One for the process, as the interpreter is.
_turn: Final = threading.Lock()


def next_batch(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    """Make the next batch of a read, one thread at a time; None: there is none.

    Several readers would share the interpreter, and none of them would be ready sooner; but a
    publisher would wait for each of them.
    """
    # A store that answers slowly must not hold up the readers of others for long.
    if not _turn.acquire(timeout=TURN_MS / 1000):
        return next(batches, None)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_MS / 1000)
    try:
        return next(batches, None)
    finally:
        sys.setswitchinterval(usual)
        _turn.release()
