"""One moment of a store on object storage, read by many processes without its broker.

Who plans a read looks at the store (:class:`Looking`), works out what is due and cuts the table
into parts. Each part becomes a *ticket*: which checkpoint holds the files, and the rows of the part
that are not in them yet. Whoever has a ticket and the credentials reads exactly what the planner
saw, whatever the owner does meanwhile. Needs ``penstock[slatedb]`` and pyarrow.
"""

from __future__ import annotations

import logging
import zlib
from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgspec

from penstock.clock import SystemClock, TimeGuard
from penstock.engines.memory import MemoryEngine
from penstock.engines.overlay import Overlay
from penstock.engines.slatedb.moment import CheckpointReader as Files
from penstock.engines.slatedb.moment import Tail
from penstock.errors import CorruptRecord, InvalidInput
from penstock.flight import partition, read, select
from penstock.flight.partitions import Numbers, QueueKeys, WholeQueue, of_queues
from penstock.limits import MAX_OFFSET
from penstock.model import LogStats, QueueStats, StoreStats
from penstock.store.codec import log as log_codec
from penstock.store.codec import opendata
from penstock.store.codec.stored import decode_lease
from penstock.store.kv.log import MetadataLog
from penstock.store.kv.snapshot import Pinned
from penstock.store.kv.state import Identity
from penstock.store.snapshot import Keys
from penstock.urls import DESIGNS, identity_in, make_store, place_to_read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from penstock.clock import Clock
    from penstock.engines import View
    from penstock.engines.overlay import Below, Changes, OverlayTable
    from penstock.engines.slatedb.moment import Moment
    from penstock.flight import Part, Selection
    from penstock.flight.partitions import Piece
    from penstock.store.kv.log import Segment
    from penstock.store.kv.store import KvStore

__all__ = [
    "Files",
    "Looking",
    "Plan",
    "Seen",
    "Ticket",
    "Wanted",
    "files_of",
    "narrowed",
    "read_ticket",
]

log_ = logging.getLogger(__name__)

_KINDS: Final[Mapping[Any, str]] = {Numbers: "n", QueueKeys: "k", WholeQueue: "q"}
_NO_TOTALS: Final = StoreStats(**dict.fromkeys(StoreStats.__struct_fields__, 0))
# In the table of the log: what is neither an entry nor a note of messages that no queue took.
_LOG_FACTS: Final = ((b"", b"\x02\x11"), (b"\x02\x12", b"\x03\x01\x00\x00\x00\x01"))
_ENTRY_END: Final = b"\xff" * 10
# Where the messages are that leases hold, and the tables that say who holds them.
_HELD: Final[Mapping[str, str]] = {"buckets": "buckets", "indexed": "in_progress"}
_LEASED: Final = {"active", "attempts"}
_LEVEL: Final = 1


class Wanted(msgspec.Struct, frozen=True):
    """What of a table is to be read."""

    table: str
    payload: bool = False
    columns: list[str] | None = None
    filter: str | None = None

    def selection(self) -> Selection:
        """Return it as the tables have it."""
        return select(
            self.table, payload=self.payload, columns=self.columns, filter_text=self.filter
        )


class Ticket(msgspec.Struct, frozen=True):
    """A part of a table at one moment, for any process."""

    url: str
    checkpoint: str
    made_ms: int
    families: dict[str, bytes]
    identity: Identity
    at_ms: int
    log: LogStats
    totals: StoreStats
    stats: list[QueueStats]
    wanted: Wanted
    pieces: list[list[Any]]
    # Of tables that leases belong to: the names of queues by their numbers.
    numbers: dict[int, str]
    rows: dict[str, dict[bytes, bytes | None]]

    def packed(self) -> bytes:
        """Return it as bytes."""
        return zlib.compress(msgspec.msgpack.encode(self), _LEVEL)

    @classmethod
    def unpacked(cls, packed: bytes) -> Ticket:
        """Make it again."""
        return msgspec.msgpack.decode(zlib.decompress(packed), type=cls)

    def part(self) -> Part:
        """Return the pieces."""
        return [_decoded(*each) for each in self.pieces]


class Plan(NamedTuple):
    """How to read a table: its schema, a ticket for each part, and when the moment was."""

    schema: Any
    tickets: list[bytes]
    at_ms: int


def narrowed(ticket: bytes, queues: Sequence[str]) -> bytes:
    """Make of a ticket one for some of its queues alone."""
    known = Ticket.unpacked(ticket)
    part = of_queues(known.part(), queues)
    tables = DESIGNS[known.identity.design].tables
    numbers = {number: name for number, name in known.numbers.items() if name in queues}
    rows = _KeyRows(Overlay(MemoryEngine(tables), tables, known.rows), known.identity, numbers)
    cut = {piece.keys.table for piece in known.part() if isinstance(piece, QueueKeys)} | {"leases"}
    kept = {table: each for table, each in known.rows.items() if table not in cut}
    made = {**kept, **rows.of(part)}
    return msgspec.structs.replace(known, pieces=_coded(part), numbers=numbers, rows=made).packed()


def files_of(ticket: Ticket) -> Files:
    """Open the files that a ticket is read from; they may be shared by tickets of a moment."""
    place = place_to_read(ticket.url)
    return Files(place, ticket.checkpoint, ticket.made_ms, ticket.families)


def read_ticket(ticket: Ticket, files: Files) -> Iterator[pa.RecordBatch]:
    """Read what a ticket stands for, over the files of its checkpoint."""
    tables = DESIGNS[ticket.identity.design].tables
    view = Overlay(_Kept(files), tables, ticket.rows)
    with Pinned(
        view,
        ticket.identity,
        at_ms=ticket.at_ms,
        log=ticket.log,
        totals=ticket.totals,
        stats=ticket.stats,
    ) as pinned:
        yield from read(pinned, ticket.part(), ticket.wanted.selection())


class Looking:
    """A store on object storage that is looked at again and again.

    A look costs what has come since the one before, and what that one has seen can't be planned on
    any more; tickets are good on. ``following``: only tickets of the last moment and the one before
    are read; what earlier ones kept is given back.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, following: bool = False) -> None:
        self.url = url
        self._clock = clock or SystemClock()
        self._place = place_to_read(url)
        self._tail = Tail(self._place, following=following)
        self._below: Files | None = None
        self._checkpoint = ""
        self._seen: Seen | None = None

    def look(self) -> Seen:
        """Return what is durable now."""
        moment = self._tail.look()
        if self._seen is not None and self._seen.moment == moment:
            return self._seen
        if self._below is None or self._checkpoint != moment.checkpoint:
            self.close()
            self._below = Files(self._place, moment.checkpoint, moment.made_ms, rows=moment.rows)
            self._checkpoint = moment.checkpoint
        self._seen = Seen(self.url, moment, self._below, self._clock)
        return self._seen

    def close(self) -> None:
        """Let go of the files."""
        self._seen = None
        if self._below is not None:
            self._below.close()
            self._below = None


class Seen:
    """A store at one moment: planned here, before the next look, and read anywhere."""

    def __init__(self, url: str, moment: Moment, below: Files, clock: Clock) -> None:
        self._url = url
        self.moment = moment
        self._families = dict(below.families)
        self._clock = clock
        changes = {name: moment.rows.table(family) for name, family in self._families.items()}
        files = _Kept(below)
        system = Overlay(files, ["default"], changes).table("default")
        self.identity: Identity = identity_in(url, system)
        self._tables = DESIGNS[self.identity.design].tables
        # Nothing may be written to it: these rows are every look's.
        self._engine = Overlay(files, self._tables, changes)
        self._log = MetadataLog(self._engine.table("log"), self.store_id, _leave_out)
        self.log_stats = self._stats_of_log()

    @property
    def store_id(self) -> str:
        """Which store it is."""
        return f"{self.identity.store_id:08x}"

    def table(self, name: str) -> OverlayTable:
        """Return a table; raise if somebody has looked since, and it is another one now."""
        if self.moment.rows.version != self.moment.version:
            raise InvalidInput(f"{self._url} was looked at again: plan on what was seen then")
        return self._engine.table(name)

    def close(self) -> None:
        """Do nothing: what is open belongs to whoever looks."""

    def _opened(self) -> tuple[Overlay, KvStore]:
        # What opening a store changes goes on top.
        engine = Overlay(self, self._tables)
        return engine, make_store(engine, self.identity.design, self._clock)

    # --- tables --------------------------------------------------------------------------

    def plan(self, wanted: Wanted, *, queues: Sequence[str] | None, partitions: int) -> Plan:
        """Work out what is due, and cut a table into parts."""
        selection = wanted.selection()
        engine, store = self._opened()
        now_ms = TimeGuard(store.time_floor_ms()).now_ms(self._clock.now_ms())
        with store.pin(now_ms, stats=wanted.table == "stats") as pinned:
            pinned.log_stats = self._ended(pinned.log_stats)
            parts = partition(pinned, wanted.table, partitions, queues=queues)
            rows = _KeyRows(engine, self.identity, self._numbers(wanted, pinned))
            tickets = [self._ticket(wanted, part, pinned, rows) for part in parts]
            return Plan(selection.schema, tickets, pinned.at_ms)

    def watermarks(self) -> LogStats:
        """Describe the log, with how far it is routed."""
        return self._ended(self._opened()[1].log_stats())

    def _ended(self, stats: LogStats) -> LogStats:
        # A store that is opened begins a new block of ids; its owner goes on in its own.
        end = min(stats.end, self.log_stats.end)
        return msgspec.structs.replace(stats, end=end, routed_up_to=min(stats.routed_up_to, end))

    def _numbers(self, wanted: Wanted, pinned: Pinned) -> dict[int, str]:
        return pinned.numbers if wanted.table in _LEASED else {}

    def _ticket(self, wanted: Wanted, part: Part, pinned: Pinned, rows: _KeyRows) -> bytes:
        named = {piece.queue for piece in part if not isinstance(piece, Numbers)}
        stats = pinned.stats
        if wanted.table == "stats":
            stats = [each for each in stats if each.queue in named]
        return Ticket(
            url=self._url,
            checkpoint=self.moment.checkpoint,
            made_ms=self.moment.made_ms,
            families=self._families,
            identity=self.identity,
            at_ms=pinned.at_ms,
            log=pinned.log_stats,
            totals=pinned.totals,
            stats=list(stats),
            wanted=wanted,
            pieces=_coded(part),
            numbers={number: name for number, name in rows.numbers.items() if name in named},
            rows=self._rows_of(wanted, part, pinned, rows),
        ).packed()

    def _rows_of(
        self, wanted: Wanted, part: Part, pinned: Pinned, rows: _KeyRows
    ) -> dict[str, Changes]:
        """Return the rows that reading a part may come across and that are in no file yet."""
        found = rows.of(part)

        def add(table: str, begin: bytes = b"", end: bytes | None = None) -> None:
            found.setdefault(table, {}).update(rows.changes(table, begin, end))

        for piece in part:
            if isinstance(piece, Numbers):
                every = wanted.table == "messages"
                if every or wanted.payload:
                    first, last = map(opendata.payload_key, (piece.begin, piece.end))
                    add("payloads", first, last)
                for log in self.log_stats.cursors if every else [piece.log]:
                    self._add_log(add, rows.table("log"), log, piece.begin, piece.end)
            elif isinstance(piece, WholeQueue) and wanted.table in {"queues", "groups"}:
                found.setdefault("queues", {}).update(rows.by_queue.get(piece.queue.encode(), {}))
                if wanted.table == "groups":
                    for keys in pinned.live_keys(piece.queue):
                        add(*keys)
        if wanted.payload and wanted.table not in {"log", "messages"}:
            # A payload that is in no file yet belongs to rows that are in none either.
            for message_id in self._ids(wanted, part, pinned, found):
                key = opendata.payload_key(message_id)
                add("payloads", key, key + b"\0")
        return found

    def _ids(
        self, wanted: Wanted, part: Part, pinned: Pinned, rows: dict[str, Changes]
    ) -> Iterator[int]:
        tables = self._tables
        chosen = select(wanted.table, columns=["message_id"])
        alone = self._pinned(Overlay(MemoryEngine(tables), tables, rows), pinned.at_ms)
        for batch in read(alone, part, chosen):
            yield from batch.column("message_id").to_pylist()

    def _pinned(self, view: View, at_ms: int) -> Pinned:
        return Pinned(
            view, self.identity, at_ms=at_ms, log=self.log_stats, totals=_NO_TOTALS, stats=()
        )

    # --- the log -------------------------------------------------------------------------

    def plan_log(self, wanted: Wanted, stretches: Iterable[tuple[int, int, int]]) -> list[bytes]:
        """Make tickets for stretches (log, begin, end) of the log."""
        pinned = self._pinned(self, self._clock.now_ms())
        rows = _KeyRows(self, self.identity, {})
        tickets = []
        for log, begin, end in stretches:
            self._check_stretch(log, begin, end)
            tickets.append(self._ticket(wanted, [Numbers(log, begin, end)], pinned, rows))
        return tickets

    def read_log(
        self, log: int, begin: int, end: int, *, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Read a stretch of a log here."""
        pinned = self._pinned(self, self._clock.now_ms())
        part: Part = [Numbers(log, begin, end)]
        return read(pinned, part, select("log", columns=list(columns)))

    def _check_stretch(self, log: int, begin: int, end: int) -> None:
        """Refuse what can't be read whole: rows must not be missed without a word."""
        stats = self.log_stats
        if log not in stats.cursors:
            raise InvalidInput(f"no log {log}; there are logs 0 to {max(stats.cursors)}")
        # Offsets begin at 1.
        if max(begin, 1) < min(stats.earliest, end):
            raise InvalidInput(
                f"offsets from {begin} on were asked for; log {log} is kept from offset "
                f"{stats.earliest} on"
            )
        if end > stats.end:
            raise InvalidInput(f"offsets up to {end} were asked for; log {log} ends at {stats.end}")

    def _stats_of_log(self) -> LogStats:
        """Describe the log without opening the whole store; cursors are where the log begins."""
        log = self._log
        earliest = log.segments[0].start_offset if log.segments else 1
        return LogStats(
            routing=self.identity.routing,
            logs=log.logs,
            earliest=earliest,
            end=max(earliest, self._last() + 1),
            routed_up_to=earliest,
            segments=len(log.segments),
            retention_ms=log.settings.retention_ms,
            cursors=dict.fromkeys(range(log.all_logs), earliest),
        )

    def _last(self) -> int:
        """Return the offset of the last message of the log."""
        # The owner sets ids aside in blocks, so that what it notes down is no end.
        for segment in reversed(self._log.segments):
            last = max(self._last_of(segment, log) for log in range(self._log.all_logs))
            if last:
                return last
        return 0

    def _last_of(self, segment: Segment, log: int) -> int:
        table = self._engine.table("log")
        prefix = log_codec.entry_prefix(segment.number, self._log_key(log))
        end = prefix + _ENTRY_END
        while rows := table.scan_back(prefix, end, 1):
            try:
                return log_codec.decode_metadata_batch(rows[0][1])[-1][0]
            except (CorruptRecord, IndexError):
                end = rows[0][0]
        return 0

    def _log_key(self, log: int) -> bytes:
        return log_codec.metadata_log_key(self.store_id, str(log))

    def _add_log(
        self, add: Callable[..., None], table: OverlayTable, log: int, begin: int, end: int
    ) -> None:
        """Add the entries of a stretch, with the one that it may begin in."""
        for facts in _LOG_FACTS:
            add("log", *facts)
        key = self._log_key(log)
        for segment in self._log.segments:
            if segment.start_offset >= end:
                break
            prefix = log_codec.entry_prefix(segment.number, key)
            at = max(0, begin - segment.start_offset)
            exact = log_codec.entry_key(segment.number, key, at)
            first = table.changed_before(prefix, exact + b"\0") or prefix
            width = min(end, MAX_OFFSET) - segment.start_offset
            add("log", first, log_codec.entry_key(segment.number, key, width))


class _Over(Protocol):
    """Changes over tables."""

    def table(self, name: str) -> OverlayTable:
        """Return a table."""


class _KeyRows:
    """Changed rows, by the parts of a table that have use for them."""

    def __init__(self, over: _Over, identity: Identity, numbers: Mapping[int, str]) -> None:
        self.table = over.table
        self.numbers = numbers
        self._design = identity.design

    def changes(self, table: str, begin: bytes = b"", end: bytes | None = None) -> Changes:
        """Return the changes to keys of a table."""
        return self.table(table).changes(begin, end)

    def of(self, part: Part) -> dict[str, Changes]:
        """Return those in the keys of a part, and the leases under which its messages are held."""
        found: dict[str, Changes] = {}
        for piece in part:
            if not isinstance(piece, QueueKeys):
                continue
            keys = piece.keys
            rows = self.changes(keys.table, keys.begin, keys.end)
            found.setdefault(keys.table, {}).update(rows)
            if self.numbers and keys.table == _HELD[self._design]:
                held = self._held
                first, last = (bisect_left(held, (key,)) for key in (keys.begin, keys.end))
                names = {name for _, name in held[first:last]}
                found.setdefault("leases", {}).update((name, self._leases[name]) for name in names)
        return found

    @cached_property
    def by_queue(self) -> dict[bytes, Changes]:
        """What is kept of a queue as a whole: under its name, behind two bytes."""
        found: dict[bytes, Changes] = {}
        for key, value in self.changes("queues").items():
            found.setdefault(key[2:], {})[key] = value
        return found

    @cached_property
    def _leases(self) -> Changes:
        return self.changes("leases")

    @cached_property
    def _held(self) -> list[tuple[bytes, bytes]]:
        """The keys of rows that leases hold, each with the lease's own; in order."""
        # Told from the lease, not from the rows: of one that was extended the rows may be in files.
        found: set[tuple[bytes, bytes]] = set()
        for name, record in self._leases.items():
            try:
                lease = None if record is None else decode_lease(record)
                queue = None if lease is None else self.numbers.get(lease.queue)
                if lease is not None and queue is not None:
                    found.update(
                        (self._row_key(lease.queue, queue, each), name) for each in lease.ids
                    )
            except CorruptRecord:
                # Whoever reads it leaves it out.
                continue
        return sorted(found)

    def _row_key(self, number: int, queue: str, claim: bytes) -> bytes:
        if self._design == "buckets":
            bucket = opendata.bucket_of(int.from_bytes(claim, "big"))
            return opendata.active_key(queue.encode(), bucket)
        return number.to_bytes(4, "big") + claim


class _Kept:
    """Tables that somebody else closes."""

    def __init__(self, below: Below) -> None:
        self.table = below.table

    def close(self) -> None:
        """Do nothing."""


def _coded(part: Part) -> list[list[Any]]:
    return [[_KINDS[type(piece)], *piece] for piece in part]


def _decoded(kind: str, *fields: Any) -> Piece:
    if kind == "n":
        return Numbers(*fields)
    if kind == "q":
        return WholeQueue(*fields)
    queue, keys, *numbers = fields
    return QueueKeys(queue, Keys(*keys), *numbers)


def _leave_out(table: str, key: bytes, value: bytes, why: str, *, remove: bool = True) -> bool:  # noqa: ARG001
    log_.warning("left out a record of %s, key %s: %s", table, key.hex(), why)
    return False
