"""``includeArchive``: the rows of an archive beside live ones, every row once.

A DataFrame is planned once, and each of its actions reads the present. So its tasks are of two
kinds:

- some read the files of ``done`` or ``failed`` that the archive had when the DataFrame was planned,
  as many tasks as there are partitions;
- the others share the queues out. Such a task reads the snapshot of its action: live rows that the
  planned files do not have, told by the marks of that version of the archive. Then it opens the
  archive as it is now, later than the snapshot, so that whatever is trimmed there is here; and
  reads rows that came after the planned version and are not live. It compares them one by one:
  sixteen bytes of memory for each live row of a queue that was archived since.

Attempts have no sequence numbers: tasks of the second kind read all of their files, so that one
task reads those of a queue.

A snapshot that the user keeps is earlier than the version that is planned, so that whatever is
trimmed in it is there; but marks do not tell which of its rows are in files, as some may have been
redriven in between. Its live rows are read as without an archive. A task that reads files leaves
out what is live in the snapshot: it asks for rows with numbers such as the files have, by Delta's
statistics, of which there are none where all that is archived was trimmed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace
from pyspark.sql.datasource import InputPartition

from penstock.errors import InvalidInput, QueueNotFound
from penstock.filters import parse
from penstock.flight.client import FlightStore
from penstock.flight.protocol import ReadCommand, SnapshotTicket
from penstock.limits import MAX_OFFSET
from penstock.spark.delta import CREATED, ENDED, Archive, ArchiveFile, Mark, read_rows
from penstock.spark.log import COLUMNS, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.flight.protocol import ActionTicket, HeldSnapshot
    from penstock.spark.delta import ArchiveTable
    from penstock.spark.source import Options

    Ticket: TypeAlias = ActionTicket | SnapshotTicket

SHARES: Final = 64
"""The most tasks that share the queues out: each reads another choice of queues of a snapshot."""

# Beyond this, an id and an attempt do not fit into 63 bits.
_MAX_ID: Final = 1 << 47
T = TypeVar("T")


@dataclass
class ArchivedPartition(InputPartition):
    """Files that the archive had when the DataFrame was planned.

    ``ticket``: for any part of a snapshot that the user keeps, whose live rows other tasks read.
    """

    archive: Archive
    files: list[ArchiveFile]
    ticket: SnapshotTicket | None = None
    until_ms: int | None = None


@dataclass
class PresentPartition(InputPartition):
    """A share of the queues: live rows, and archived ones that no other task reads.

    ``version`` is that of the table when the DataFrame was planned, and ``ticket`` is for any part
    of the snapshot to be read.
    """

    archive: Archive
    ticket: Ticket
    share: int
    shares: int
    version: int | None


class ArchivePlan(NamedTuple):
    """The archive of a DataFrame: its version, parts of it, and the wanted queues that are live."""

    archive: Archive
    queues: list[str] | None
    version: int | None
    parts: list[ArchivedPartition]


def plan(client: FlightStore, options: Options, held: HeldSnapshot | None) -> ArchivePlan:
    """Open the archive and deal its files out."""
    archive = Archive.at(options.include_archive or "", options.storage)
    tables = archive.tables(client.info().store_id)
    table = tables.get(options.table)
    live = None
    if options.queues is not None:
        made = client.queues()
        live = [queue for queue in options.queues if queue in made]
        archived = set() if table is None else table.queues()
        for queue in options.queues:
            if queue not in made and queue not in archived:
                raise QueueNotFound(f"no queue named {queue!r:.100}, nor is one archived")
    if held is not None:
        ticket = SnapshotTicket(held.snapshot, 0, ReadCommand(options.table))
        if live is not None:
            live = list(_queues(client, live, ticket, 0, 1))
        return ArchivePlan(archive, live, None, _of_snapshot(client, options, table, ticket, held))
    if table is None or options.table == "attempts":
        return ArchivePlan(archive, live, None, [])
    files = [(each.rows, each) for each in table.files(options.queues)]
    dealt = _dealt(files, options.partitions)
    parts = [ArchivedPartition(archive, some) for some in dealt]
    return ArchivePlan(archive, live, table.delta.version(), parts)


def _of_snapshot(
    client: FlightStore,
    options: Options,
    table: ArchiveTable | None,
    ticket: SnapshotTicket,
    held: HeldSnapshot,
) -> list[ArchivedPartition]:
    """Deal the files out that tasks compare with a snapshot: files of one queue are neighbours."""
    if table is None:
        return []
    table.check(client.history_ends(options.queues and list(options.queues)))
    files = sorted(table.files(options.queues), key=lambda each: (each.queue, each.date))
    count = min(options.partitions, SHARES, len(files))
    # Twice, to deal by the middle of each file.
    total, before = 2 * sum(each.rows for each in files), 0
    parts = [ArchivedPartition(table.archive, [], ticket, held.at_ms) for _ in range(count)]
    for each in files:
        at = (before + each.rows) * count // max(1, total)
        parts[min(count - 1, at)].files.append(each)
        before += 2 * each.rows
    return [part for part in parts if part.files]


def _dealt(weighed: Sequence[tuple[int, T]], count: int) -> list[list[T]]:
    """Deal items out into as many heaps, of about the same weight."""
    heaps: list[list[T]] = [[] for _ in range(min(count, len(weighed)))]
    weights = [0] * len(heaps)
    for weight, item in sorted(weighed, key=lambda each: -each[0]):
        lightest = weights.index(min(weights))
        heaps[lightest].append(item)
        weights[lightest] += weight
    return heaps


# --- reading --------------------------------------------------------------------------------------


def read_archived(
    options: Options, columns: Sequence[str], partition: ArchivedPartition
) -> Iterator[pa.RecordBatch]:
    """Read files without what is live in a snapshot that the user keeps."""
    archive, files, ticket = partition.archive, partition.files, partition.ticket
    if ticket is None:
        yield from read_files(options, columns, archive, files)
        return
    client, names = FlightStore(options.location), _needed(options, columns)
    wanted = list({each.queue for each in files})
    queues = _queues(client, wanted, ticket, 0, 1)
    number = "message_id" if options.table == "attempts" else "sequence"
    lows, highs = (
        [msgspec.json.decode(text).get(number, unknown) for text in texts]
        for texts, unknown in (((f.lows for f in files), 0), ((f.highs for f in files), MAX_OFFSET))
    )
    where = f"{number} BETWEEN {min(lows)} AND {max(highs)}"
    live: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for batch in _live(client, options, queues, _needed(options, ()), ticket, where):
        for queue in pc.unique(batch.column("queue")).to_pylist():
            rows = batch.filter(pc.equal(batch.column("queue"), queue))
            live[queue].append(_coded(options.table, rows))
    for queue, some in groupby(files, lambda each: each.queue):
        known = _Known(live.pop(queue, []))
        for batch in read_files(options, names, archive, some, partition.until_ms):
            yield batch.filter(known.absent(*_coded(options.table, batch)))


def read_present(
    options: Options, columns: Sequence[str], partition: PresentPartition, ticket: Ticket
) -> Iterator[pa.RecordBatch]:
    """Read live rows, and archived ones of the same queues; batches have at least the columns."""
    client = FlightStore(options.location)
    wanted = None if options.queues is None else list(options.queues)
    # This takes the snapshot; the archive is opened after it.
    own = _queues(client, wanted, ticket, partition.share, partition.shares)
    archive = partition.archive
    now = archive.open(options.table)
    if now is not None and not partition.share:
        # One task for all: a store in PostgreSQL locks its counts to tell.
        now.check(client.history_ends(wanted))
    then = None
    if partition.version is not None:
        same = now is not None and now.delta.version() == partition.version
        then = now if same else archive.open(options.table, version=partition.version)
    new: dict[str, list[ArchiveFile]] = defaultdict(list)
    known = set() if then is None else {each.path for each in then.files(wanted)}
    added = [] if now is None else [each for each in now.files(wanted) if each.path not in known]
    if added:
        # Queues that are gone are the first task's.
        whole = {} if partition.share else _queues(client, wanted, ticket, 0, 1)
        for each in added:
            if each.queue in own or (not partition.share and each.queue not in whole):
                new[each.queue].append(each)

    @cache
    def mark(queue: str, created_at_ms: int) -> int:
        return 0 if then is None else then.mark(Mark(queue, created_at_ms, options.table))

    names = _needed(options, columns)
    live: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for batch in _live(client, options, own, names, ticket):
        fresh = batch
        if then is not None:
            by_queue = lambda queue: mark(queue, own[queue])  # noqa: E731
            fresh = batch.filter(_after_marks(batch, batch.column("queue"), by_queue))
        for queue in new.keys() & set(pc.unique(fresh.column("queue")).to_pylist()):
            rows = fresh.filter(pc.equal(fresh.column("queue"), queue))
            live[queue].append(_coded(options.table, rows))
        yield fresh
    for queue, files in new.items():
        rows_live = _Known(live.pop(queue, []))
        for batch in read_files(options, (*names, CREATED), archive, files):
            fresh = batch
            if then is not None:
                made_at = pc.divide(batch.column(CREATED).cast(pa.int64()), 1000)
                fresh = batch.filter(_after_marks(batch, made_at, partial(mark, queue)))
            yield fresh.filter(rows_live.absent(*_coded(options.table, fresh)))


def _live(
    client: FlightStore,
    options: Options,
    queues: Mapping[str, int],
    columns: Sequence[str],
    ticket: Ticket,
    where: str | None = None,
) -> Iterator[pa.RecordBatch]:
    if queues:
        payload = "payload" in columns
        command = ReadCommand(
            options.table, list(queues), payload, columns, options.filter, where=where
        )
        yield from client.read(replace(ticket, part=0, command=command))


def _queues(
    client: FlightStore, names: list[str] | None, ticket: Ticket, share: int, shares: int
) -> dict[str, int]:
    """Return a share of the queues of the snapshot, with the times that they were made at."""
    columns = ["name", "created_at_ms"]
    command = ReadCommand("queues", names, columns=columns, partitions=shares)
    try:
        batches = list(client.read(replace(ticket, part=share, command=command)))
    except QueueNotFound:
        # One of them is gone.
        each = names if names is not None and len(names) > 1 else []
        found = [_queues(client, [name], ticket, share, shares) for name in each]
        return {name: made for some in found for name, made in some.items()}
    rows = [row for batch in batches for row in batch.to_pylist()]
    return {row["name"]: row["created_at_ms"] for row in rows}


def _after_marks(batch: pa.RecordBatch, keys: pa.Array, mark: Callable[[Any], int]) -> pa.Array:
    """Tell which rows came after the planned version of the table, by the mark of each key."""
    coded = keys.dictionary_encode()
    ends = pa.array([mark(key) for key in coded.dictionary.to_pylist()], pa.int64())
    return pc.greater_equal(batch.column("sequence"), ends.take(coded.indices))


def _needed(options: Options, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a read, with those that tell rows apart."""
    if options.table == "attempts":
        needed: tuple[str, ...] = ("queue", "message_id", "attempt", "claimed_at")
    else:
        needed = ("queue", "message_id", "attempts", ENDED[options.table], "sequence")
    return tuple(dict.fromkeys((*columns, *needed)))


def _coded(table: str, batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return message and attempt as one number, and a time, of each row: none has both alike.

    A row of an earlier queue of the same name has another time.
    """
    attempt, time = ("attempt", "claimed_at") if table == "attempts" else ("attempts", ENDED[table])
    ids = batch.column("message_id").to_numpy(zero_copy_only=False)
    if len(ids) and ids.max() >= _MAX_ID:
        raise InvalidInput(f"message {ids.max()} is beyond what archived rows are told by")
    attempts = batch.column(attempt).to_numpy(zero_copy_only=False).astype(np.int64)
    times = batch.column(time).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return ids * (1 << 16) + attempts, times


class _Known:
    """The live rows of a queue, in the order of their codes."""

    def __init__(self, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        none = [np.empty(0, np.int64)]
        codes = np.concatenate([each for each, _ in parts] or none)
        times = np.concatenate([each for _, each in parts] or none)
        order = np.argsort(codes)
        self._codes, self._times = codes[order], times[order]

    def absent(self, codes: np.ndarray, times: np.ndarray) -> pa.Array:
        """Tell which rows are not among them."""
        places = np.searchsorted(self._codes, codes)
        ends = np.searchsorted(self._codes, codes, side="right")
        missing = np.ones(len(codes), bool)
        # Few have a code in common, which then differ in time.
        while len(rows := np.flatnonzero(missing & (places < ends))):
            missing[rows] = self._times[places[rows]] != times[rows]
            places[rows] += 1
        return pa.array(missing)


def read_files(
    options: Options,
    columns: Iterable[str],
    archive: Archive,
    files: Iterable[ArchiveFile],
    until_ms: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read the rows of files that satisfy the filter, and had ended by a time."""
    chosen = None if options.filter is None else parse(options.filter)
    ended = ENDED[options.table]
    added = (*(COLUMNS[1:] if chosen else ()), *(() if until_ms is None else (ended,)))
    names = tuple(dict.fromkeys((*columns, *added)))
    for batch in read_rows(archive, options.table, files, names):
        rows = batch
        if until_ms is not None:
            times = rows.column(ended).cast(pa.int64())
            rows = rows.filter(pc.less_equal(times, until_ms * 1000))
        if chosen is not None:
            matches = [chosen.matches(row) for row in rows_of(rows)]
            rows = rows.filter(pa.array(matches, pa.bool_()))
        yield rows
