"""An archive of done, failed and attempts: the manifest of its runs, and reading it with live rows.

::

    ARCHIVE/done/run=000001/queue=orders/date=2030-01-31/part-….parquet
    ARCHIVE/failed/run=000001/…
    ARCHIVE/attempts/run=000001/…
    ARCHIVE/_runs/000001.json          written last: a run without it never happened
    ARCHIVE/_runs/lock                 held by the run that is under way

A queue that was deleted and made again counts its history from the beginning, so ranges belong to
the queue's name and the time it was made.

The option ``includeArchive`` reads archived rows beside live ones, and every row comes once. To
that end the archive's manifest is read, the live snapshot is taken, and the manifest is read again:
if a run was recorded meanwhile, all of it is done again.
The snapshot is then later than every run that counts, so that what a run has trimmed is in its
files, and

- of done and failed, live rows whose sequence lies below what is archived of their queue are the
  archive's: moving down, as sequences do when messages are redriven, they stay below it;
- of attempts, archived ones that are live too (their message was archived and not trimmed yet, or
  redriven) are left to the store. One task reads both of a queue, so that nothing is shuffled.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.datasource import InputPartition

from penstock.engines.disk import sync_path
from penstock.errors import InvalidInput, QueueNotFound, StorageFailed, StoreMismatch
from penstock.filters import parse
from penstock.flight.client import FlightStore
from penstock.flight.tables import schema_of
from penstock.spark.matching import COLUMNS, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.spark.options import Options

TABLES: Final = ("done", "failed", "attempts")
_VERSION: Final = 1


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Sequence numbers [begin, end) of one state of one queue."""

    queue: str
    created_at_ms: int
    state: str
    begin: int
    end: int
    rows: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of a run: how many rows, and a checksum of their content."""

    table: str
    queue: str
    date: str
    rows: int
    checksum: str


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run that was verified."""

    version: int
    store_id: str
    number: int
    at_ms: int
    payload: bool
    reaches: list[Reach]
    parts: list[Part]


class Runs:
    """The runs of an archive, in order."""

    def __init__(self, place: str | Path) -> None:
        if "://" in str(place):
            raise InvalidInput(
                f"an archive is a directory of this machine or a shared mount, not {place!s:.200}"
            )
        self.place = Path(place).absolute()
        self._index = self.place / "_runs"
        self.runs: list[Run] = []
        self.load()

    @classmethod
    def existing(cls, place: str | Path) -> Runs:
        """Return the runs of an archive that is there, even if its first run did not end."""
        runs = cls(place)
        if not runs._index.is_dir():
            raise InvalidInput(
                f"there is no archive at {place!s:.200}: name the directory that the archive job "
                "was given"
            )
        return runs

    def load(self) -> None:
        """Read which runs there are."""
        self.runs = []
        for path in sorted(self._index.glob("[0-9]*.json")):
            try:
                run = msgspec.json.decode(path.read_bytes(), type=Run)
            except msgspec.MsgspecError as error:
                raise StorageFailed(f"{path} is damaged: {error}") from None
            if run.version != _VERSION:
                raise StoreMismatch(f"{path} has version {run.version}, not {_VERSION}")
            self.runs.append(run)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs away, until this process ends at the latest."""
        self._index.mkdir(parents=True, exist_ok=True)
        with (self._index / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StorageFailed(f"another run is archiving to {self.place}") from None
            self.load()
            yield

    def check_store(self, store_id: str) -> None:
        """Refuse an archive of another store."""
        for run in self.runs:
            if run.store_id != store_id:
                raise StoreMismatch(
                    f"{self.place} is the archive of store {run.store_id}, not of {store_id}"
                )

    def reached(self) -> dict[tuple[str, int, str], int]:
        """Return below which sequence all is archived, by (queue, created_at_ms, state)."""
        ends: dict[tuple[str, int, str], int] = {}
        for run in self.runs:
            for reach in run.reaches:
                key = (reach.queue, reach.created_at_ms, reach.state)
                ends[key] = max(reach.end, ends.get(key, 0))
        return ends

    def ends(self, state: str, made_at: Mapping[str, int]) -> dict[str, int]:
        """Return below which sequence all is archived of queues that were made at these times."""
        return {
            queue: end
            for (queue, created_at_ms, of), end in self.reached().items()
            if of == state and made_at.get(queue) == created_at_ms
        }

    def folder(self, table: str, number: int) -> Path:
        """Return where a run keeps a table."""
        return self.place / table / f"run={number:06}"

    def part_folder(self, run: Run, part: Part) -> Path:
        """Return where a run keeps a partition; Spark writes some characters in another way."""
        place = self.folder(part.table, run.number)
        named = (each for each in place.glob("queue=*") if unquote(each.name)[6:] == part.queue)
        return next(named, place / f"queue={part.queue}") / f"date={part.date}"

    def folders(self, table: str) -> list[Path]:
        """Return where the rows of a table are, in all runs that have any."""
        return [
            self.folder(table, run.number)
            for run in self.runs
            if any(part.table == table for part in run.parts)
        ]

    def remove_leftovers(self) -> None:
        """Remove folders of runs that did not come to their end."""
        known = {f"run={run.number:06}" for run in self.runs}
        for folder in (each for table in TABLES for each in (self.place / table).glob("run=*")):
            if folder.name not in known:
                shutil.rmtree(folder)

    def record(self, run: Run) -> None:
        """Make a run count: its files first reach the disk, then its name appears at once."""
        for table in TABLES:
            _sync(self.folder(table, run.number))
        new = self._index / f"{run.number:06}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1))
        _sync(new)
        try:
            # A link, unlike a rename, never replaces a run of that number.
            os.link(new, self._index / f"{run.number:06}.json")
        except FileExistsError:
            raise StorageFailed(f"run {run.number} of {self.place} is there already") from None
        new.unlink()
        for folder in (self._index, self.place):
            sync_path(folder)
        self.runs.append(run)


def _sync(path: Path) -> None:
    """Sync a file, or everything in a folder and the folder's own name, to the disk."""
    if not path.exists():
        return
    for each in [*path.rglob("*"), path, path.parent]:
        sync_path(each)


# --- parts of a read ------------------------------------------------------------------------------

_TRIES: Final = 10
_KEY: Final = ("message_id", "attempt", "claimed_at")
_BATCH_ROWS: Final = 16_384
# Beyond this, an id and an attempt do not fit into 63 bits.
_MAX_ID: Final = 1 << 47
T = TypeVar("T")


class _Files(NamedTuple):
    """One partition of a run: its files, and how many rows they must have."""

    queue: str
    rows: int
    folder: str


@dataclass
class FreshPartition(InputPartition):
    """Live rows of done or failed, without those that are archived: end of sequence by queue."""

    ticket: bytes
    ends: dict[str, int]


@dataclass
class ArchivedPartition(InputPartition):
    """Archived rows of done or failed."""

    files: list[_Files]


@dataclass
class AttemptsPartition(InputPartition):
    """Live and archived attempts of some queues: files by queue, none for those without."""

    ticket: bytes | None
    queues: dict[str, list[_Files]]


# --- planning a read ------------------------------------------------------------------------------


def plan(options: Options, columns: Sequence[str]) -> list[InputPartition]:
    """Pin the live rows and find the archived ones that belong to them."""
    client = FlightStore(options.location)
    for _ in range(_TRIES):
        runs = Runs.existing(options.include_archive or "")
        runs.check_store(client.info().store_id)
        made_at = _queues(client)
        live = _live(client, options, columns, runs, made_at)
        again = Runs.existing(options.include_archive or "")
        same = [run.number for run in runs.runs] == [run.number for run in again.runs]
        # A queue that was made anew meanwhile has a history of its own.
        now = _queues(client)
        if same and all(now.get(queue) == made_at.get(queue) for queue in _archived(runs)):
            return _partitions(client, options, runs, made_at, live)
    raise StorageFailed(
        f"the archive {options.include_archive} or its queues have changed {_TRIES} times while a "
        "read was planned: try again when no archive job is running"
    )


def _archived(runs: Runs) -> set[str]:
    return {reach.queue for run in runs.runs for reach in run.reaches}


def _queues(client: FlightStore) -> dict[str, int]:
    return client.queues().created_at_ms


def _live(
    client: FlightStore,
    options: Options,
    columns: Sequence[str],
    runs: Runs,
    made_at: Mapping[str, int],
) -> list[bytes]:
    wanted = options.queues
    for queue in wanted or ():
        if queue not in made_at and queue not in _archived(runs):
            raise QueueNotFound(f"no queue named {queue!r:.100}, nor is one archived")
    # One that is no longer there may still have an archive.
    there = None if wanted is None else [queue for queue in wanted if queue in made_at]
    if there == []:
        return []
    attempts = options.table == "attempts"
    needed = ("queue", *_KEY) if attempts else ("queue", "sequence")
    found = client.plan_read(
        options.table,
        queue=there,
        payload=options.payload,
        columns=tuple(dict.fromkeys((*columns, *needed))),
        filter=options.filter,
        partitions=1 if attempts else options.partitions,
    )
    return found.tickets


def _partitions(
    client: FlightStore,
    options: Options,
    runs: Runs,
    made_at: Mapping[str, int],
    live: Sequence[bytes],
) -> list[InputPartition]:
    files = [
        _Files(part.queue, part.rows, str(runs.part_folder(run, part)))
        for run in runs.runs
        for part in run.parts
        if part.table == options.table and (options.queues is None or part.queue in options.queues)
    ]
    if options.table != "attempts":
        ends = runs.ends(options.table, made_at)
        made: list[InputPartition] = [FreshPartition(ticket, ends) for ticket in live]
        dealt = _dealt([(each.rows, each) for each in files], options.partitions)
        return made + [ArchivedPartition(some) for some in dealt]
    there = made_at if options.queues is None else set(options.queues) & set(made_at)
    queues: dict[str, list[_Files]] = {queue: [] for queue in sorted(there)}
    for each in files:
        queues.setdefault(each.queue, []).append(each)
    weights = [(1 + sum(each.rows for each in some), name) for name, some in queues.items()]
    # A task gets the live rows of its own queues alone.
    return [
        AttemptsPartition(
            client.narrowed(live[0], some) if live else None, {name: queues[name] for name in some}
        )
        for some in _dealt(weights, options.partitions)
    ]


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


def read_part(
    options: Options, columns: Sequence[str], partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """Read one part; batches have at least the columns."""
    client = FlightStore(options.location)
    if isinstance(partition, FreshPartition):
        for batch in client.read(partition.ticket):
            yield batch.filter(_fresh(batch, partition.ends))
    elif isinstance(partition, ArchivedPartition):
        for files in partition.files:
            yield from _rows(options, columns, files)
    elif isinstance(partition, AttemptsPartition):
        yield from _read_attempts(client, options, columns, partition)


def _fresh(batch: pa.RecordBatch, ends: Mapping[str, int]) -> pa.Array:
    queues = batch.column("queue").dictionary_encode()
    known = pa.array([ends.get(name, 0) for name in queues.dictionary.to_pylist()], pa.int64())
    return pc.greater_equal(batch.column("sequence"), known.take(queues.indices))


def _read_attempts(
    client: FlightStore, options: Options, columns: Sequence[str], partition: AttemptsPartition
) -> Iterator[pa.RecordBatch]:
    ticket = partition.ticket
    alone = [name for name, files in partition.queues.items() if not files]
    if ticket is not None and alone:
        yield from client.read(client.narrowed(ticket, alone))
    for name, files in partition.queues.items():
        if not files:
            continue
        parts = []
        for batch in () if ticket is None else client.read(client.narrowed(ticket, [name])):
            parts.append(_coded(batch))
            yield batch
        # The live attempts of the queue in order: sixteen bytes for each.
        keys, claimed = map(np.concatenate, zip(*parts, strict=True)) if parts else (_NONE, _NONE)
        order = np.argsort(keys, kind="stable")
        keys, claimed = keys[order], claimed[order]
        needed = tuple(dict.fromkeys((*columns, *_KEY)))
        for batch in (batch for each in files for batch in _rows(options, needed, each)):
            yield batch if not len(keys) else batch.filter(_absent(batch, keys, claimed))


_NONE: Final = np.empty(0, np.int64)


def _absent(batch: pa.RecordBatch, keys: np.ndarray, claimed: np.ndarray) -> pa.Array:
    """Tell which attempts of a batch are not among the live ones.

    An attempt at the same message of an earlier queue of that name has another time.
    """
    codes, times = _coded(batch)
    places = np.minimum(np.searchsorted(keys, codes), len(keys) - 1)
    return pa.array((keys[places] != codes) | (claimed[places] != times))


def _coded(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return message and attempt as one number, and the time of the claim, of each row."""
    ids = batch.column("message_id").to_numpy(zero_copy_only=False)
    if len(ids) and ids.max() >= _MAX_ID:
        raise InvalidInput(f"message {ids.max()} is beyond what archived attempts are told by")
    attempts = batch.column("attempt").to_numpy(zero_copy_only=False).astype(np.int64)
    claimed = batch.column("claimed_at").cast(pa.int64()).to_numpy(zero_copy_only=False)
    return ids * (1 << 16) + attempts, claimed


def _rows(options: Options, columns: Sequence[str], files: _Files) -> Iterator[pa.RecordBatch]:
    """Read the rows of a partition of a run that satisfy the filter."""
    chosen = None if options.filter is None else parse(options.filter)
    names = tuple(dict.fromkeys((*columns, *(COLUMNS[1:] if chosen else ()))))
    table = schema_of(options.table, payload=options.table != "attempts")
    wanted = pa.schema([table.field(name) for name in names])
    count = 0
    for path in sorted(Path(files.folder).glob("*.parquet")):
        # Spark writes times in another unit than everybody else.
        with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
            count += file.metadata.num_rows
            present = [name for name in names if name in file.schema_arrow.names]
            # Without a column there would be no rows to count.
            needed = present or file.schema_arrow.names[:1]
            for batch in file.iter_batches(_BATCH_ROWS, columns=needed):
                shaped = _shaped(batch, wanted, files.queue)
                if chosen is not None:
                    matches = [chosen.matches(row) for row in rows_of(shaped)]
                    shaped = shaped.filter(pa.array(matches, pa.bool_()))
                yield shaped
    if count != files.rows:
        raise StorageFailed(
            f"the archive has {count} rows in {files.folder} where its record says {files.rows}: "
            "files are missing or were changed"
        )


def _shaped(batch: pa.RecordBatch, wanted: pa.Schema, queue: str) -> pa.RecordBatch:
    """Give a batch the columns of the table, whatever its run has left out."""
    made = []
    for field in wanted:
        if field.name == "queue":
            column = pa.repeat(pa.scalar(queue, pa.string()), batch.num_rows)
        elif field.name in batch.schema.names:
            column = batch.column(field.name)
            if pa.types.is_timestamp(column.type):
                column = column.cast(pa.timestamp("us")).cast(pa.int64())
            column = column.cast(field.type)
        elif field.nullable:
            column = pa.nulls(batch.num_rows, field.type)
        else:
            # Columns that came later: numbers, which were nought.
            column = pa.repeat(pa.scalar(0, field.type), batch.num_rows)
        made.append(column)
    return pa.RecordBatch.from_arrays(made, schema=wanted)
