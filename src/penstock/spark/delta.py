"""The tables of an archive in Delta: the files that tasks write, and the transactions of a driver.

::

    ARCHIVE/done/date=2030-01-31/queue=orders/….parquet
    ARCHIVE/done/_delta_log/…
    ARCHIVE/failed/…   ARCHIVE/attempts/…

A transaction adds files to one table and moves *marks*: the sequence number below which the done or
failed messages of a queue (in ``attempts``: the attempts at them) are in the table. A queue that
was deleted and made again counts from the beginning, so a mark belongs to a queue's name and the
time it was made. Marks are Delta's ``txn`` actions, an application id for each, which checkpoints
of the log keep. Delta refuses a transaction if another has moved one of its marks since the table
was opened, so that of two runs that archive the same rows only one counts.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import PyFileSystem

from penstock.clock import SystemClock
from penstock.engines.disk import sync_path
from penstock.errors import InvalidInput, StorageFailed, StoreMismatch, needs_extra
from penstock.flight.tables import TIME, schema_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import date

    from deltalake import DeltaTable

    from penstock.flight.protocol import HistoryEnds

TABLES: Final[tuple[str, ...]] = ("done", "failed", "attempts")
ENDED: Final = {"done": "done_at", "failed": "failed_at", "attempts": "ended_at"}
CREATED: Final = "queue_created_at"
# The columns that rows are found by in the store.
_NUMBERS: Final = ("message_id", "sequence")
_PARTITIONS: Final = ["date", "queue"]
_STORE: Final = "penstock.store"
_WEEK_HOURS: Final = 168
_BUCKET: Final = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/\s]+)*/?")
# A task holds back at most this much: so many files, and so many bytes of each.
_OPEN_FILES: Final = 8
_GROUP_BYTES: Final = 16 << 20
_FILE_BYTES: Final = 1 << 30
_BATCH_ROWS: Final = 16_384
_Rows = TypeVar("_Rows", pa.RecordBatch, pa.Table)


class Mark(NamedTuple):
    """The name of a mark: a queue that was made at a time, and the state of its messages."""

    queue: str
    created_at_ms: int
    state: str

    @property
    def app_id(self) -> str:
        """The application id that Delta knows it by."""
        return f"penstock/{self.state}/{self.created_at_ms}/{self.queue}"


class ArchiveFile(msgspec.Struct, frozen=True):
    """A file of a table; its statistics are the lowest and the highest value of some columns."""

    path: str
    size: int
    queue: str
    date: str
    rows: int
    lows: str = "{}"
    highs: str = "{}"


FILE_COLUMNS: Final = (
    "path string, size bigint, queue string, date string, rows bigint, lows string, highs string"
)


def table_schema(name: str) -> pa.Schema:
    """Return the columns of an archived table; any may be null, as a later version may add some."""
    fields = [*schema_of(name, payload=name != "attempts"), pa.field(CREATED, TIME)]
    fields.append(pa.field("date", pa.date32()))
    return pa.schema([field.with_nullable(nullable=True) for field in fields])


def _deltalake() -> Any:
    """Load the library, which is of an extra."""
    with needs_extra("delta", "an archive"):
        import deltalake.exceptions  # noqa: PLC0415
        import deltalake.fs  # noqa: PLC0415
        import deltalake.transaction  # noqa: PLC0415
    return deltalake


class Archive(msgspec.Struct, frozen=True):
    """Where an archive is, and the access to it: of S3, the variables of the driver."""

    place: str
    storage: dict[str, str]

    def __repr__(self) -> str:
        # Without the keys.
        return f"Archive({self.place!r})"

    @classmethod
    def at(cls, place: str | Path, storage: Mapping[str, str] | None = None) -> Archive:
        """Name an archive; the access to S3 is in the environment, or in ``storage``."""
        text = str(place)
        if text.startswith("s3:"):
            if not _BUCKET.fullmatch(text):
                raise InvalidInput(
                    f"an archive on S3 is s3://BUCKET/PREFIX, as text, not {text!r:.200}"
                )
            known = {name: text for name, text in os.environ.items() if name.startswith("AWS_")}
            known |= storage or {}
            endpoint = known.get("AWS_ENDPOINT_URL", "")
            allowed = known.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true", "yes", "on"}
            if endpoint.startswith("http://") and not allowed:
                raise InvalidInput(
                    f"AWS_ENDPOINT_URL is {endpoint!r:.200}: set AWS_ALLOW_HTTP=true to send "
                    "credentials and messages without TLS"
                )
            return cls(text.rstrip("/"), known)
        if "://" in text:
            raise InvalidInput(f"an archive is a directory or s3://BUCKET/PREFIX, not {text:.200}")
        if "%" in text:
            raise InvalidInput(f"Delta takes no directory with % in its name: {text:.200}")
        return cls(str(Path(place).absolute()), {})

    @property
    def directory(self) -> Path | None:
        """The directory of the archive, if it is one."""
        return None if self.place.startswith("s3:") else Path(self.place)

    def files(self, name: str) -> PyFileSystem:
        """Return the files of a table, by paths as Delta has them."""
        handler = _deltalake().fs.DeltaStorageHandler(f"{self.place}/{name}", self.storage)
        return PyFileSystem(handler)

    def sync_file(self, name: str, path: str) -> None:
        """Sync a file of a table to disk, and the directories that it is in."""
        if self.directory is not None:
            whole = self.directory / name / path
            for each in (whole, *whole.parents[:3]):
                sync_path(each)

    def open(
        self, name: str, store_id: str | None = None, *, version: int | None = None
    ) -> ArchiveTable | None:
        """Open a table as it is now, or was, if it is there; refuse that of another store."""
        library = _deltalake()
        with self.translated(name):
            try:
                delta = library.DeltaTable(
                    f"{self.place}/{name}", version, storage_options=self.storage
                )
            except library.exceptions.TableNotFoundError:
                return None
            if delta.protocol().min_reader_version > 1:
                raise StorageFailed(
                    f"{self.place}/{name} uses features of Delta that Penstock does not read, such "
                    "as deletion vectors: read it with Spark's own Delta"
                )
            known = delta.metadata().configuration.get(_STORE)
        if store_id is not None and known != store_id:
            raise StoreMismatch(f"{self.place} is the archive of store {known}, not of {store_id}")
        return ArchiveTable(self, name, delta)

    def tables(self, store_id: str | None = None) -> dict[str, ArchiveTable]:
        """Open the tables of an archive that is there."""
        opened = {name: self.open(name, store_id) for name in TABLES}
        found = {name: table for name, table in opened.items() if table is not None}
        if not found:
            raise InvalidInput(
                f"there is no archive at {self.place:.200}: name the place that the archive job "
                "was given"
            )
        return found

    def make(self, name: str, store_id: str) -> ArchiveTable:
        """Open a table; make it, or add the columns that it lacks, if need be."""
        library = _deltalake()
        schema = table_schema(name)
        table = self.open(name, store_id)
        if table is None:
            try:
                with self.translated(name):
                    library.DeltaTable.create(
                        f"{self.place}/{name}",
                        schema,
                        partition_by=_PARTITIONS,
                        storage_options=self.storage,
                        configuration={_STORE: store_id},
                        raise_if_key_not_exists=False,
                    )
            except StorageFailed:
                # Another run may have made it at the same time.
                table = self.open(name, store_id)
                if table is None:
                    raise
            table = table or self.open(name, store_id)
            assert table is not None
            table.sync()
        known = {field.name for field in table.delta.schema().fields}
        new = [
            field for field in library.Schema.from_arrow(schema).fields if field.name not in known
        ]
        if new:
            with self.translated(name):
                table.delta.alter.add_columns(new)
            table.sync()
        return table

    @contextmanager
    def translated(self, name: str) -> Iterator[None]:
        """Raise our error for one of Delta or of the place."""
        errors = _deltalake().exceptions
        try:
            yield
        except errors.CommitFailedError as error:
            raise StorageFailed(
                f"another run has changed {self.place}/{name} at the same time, and this one adds "
                f"nothing to it: run it again ({_one_line(error)})"
            ) from None
        except (errors.DeltaError, OSError) as error:
            raise StorageFailed(f"{self.place}/{name}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """Return the text of an error of Delta, which has colours and a line for each cause."""
    return " ".join(re.sub(r"\x1b\[\d*m|↳", " ", str(error)).split())[:1_000]


class ArchiveTable(NamedTuple):
    """A table of an archive, as it was when it was opened."""

    archive: Archive
    name: str
    delta: DeltaTable

    def mark(self, mark: Mark) -> int:
        """Return the sequence number below which all is here."""
        return self.delta.transaction_version(mark.app_id) or 0

    def check(self, history: HistoryEnds) -> None:
        """Refuse a history that ends below a mark; it was asked for after the table was opened."""
        for queue, found in history.queues.items():
            for state, end in found.ends.items():
                if (mark := self.mark(Mark(queue, found.created_at_ms, state))) > end:
                    raise StoreMismatch(
                        f"{self.archive.place}/{self.name} has {state} messages of queue {queue} "
                        f"up to sequence {mark}, and in the store they end at {end}: was an older "
                        "copy of the store put in its place? New messages would count as archived: "
                        "archive this store to a new place"
                    )

    def files(self, queues: Iterable[str] | None = None, least_id: int = 0) -> list[ArchiveFile]:
        """Return the files that may have messages of queues with ids of at least that.

        Without statistics a file may have any.
        """
        wanted = None if queues is None else set(queues)
        found = []
        for row in pa.table(self.delta.get_add_actions(flatten=True)).to_pylist():
            lows, highs = (
                {
                    name: value
                    for name in _NUMBERS
                    if (value := row.get(f"{end}.{name}")) is not None
                }
                for end in ("min", "max")
            )
            queue, most = row["partition.queue"], highs.get("message_id", least_id)
            if (wanted is None or queue in wanted) and most >= least_id:
                ends = (msgspec.json.encode(each).decode() for each in (lows, highs))
                day, count = row["partition.date"].isoformat(), row["num_records"] or 0
                found.append(ArchiveFile(row["path"], row["size_bytes"], queue, day, count, *ends))
        return found

    def queues(self) -> set[str]:
        """Return the names of all queues that have rows here."""
        return {each["queue"] for each in self.delta.partitions()}

    def commit(self, files: Sequence[ArchiveFile], marks: Mapping[Mark, int]) -> None:
        """Add files and move marks, in one transaction; nothing if another run moved them."""
        library = _deltalake().transaction
        now_ms = SystemClock().now_ms()
        added = [
            library.AddAction(
                each.path,
                each.size,
                {"date": each.date, "queue": each.queue},
                now_ms,
                data_change=True,
                stats=f'{{"numRecords":{each.rows},"minValues":{each.lows},'
                f'"maxValues":{each.highs},"nullCount":{{}}}}',
            )
            for each in files
        ]
        moved = [library.Transaction(mark.app_id, end, now_ms) for mark, end in marks.items()]
        with self.archive.translated(self.name):
            self.delta.create_write_transaction(
                added,
                "append",
                self.delta.schema(),
                _PARTITIONS,
                commit_properties=library.CommitProperties(app_transactions=moved),
            )
        self.sync()

    def sync(self) -> None:
        """Sync the log to disk, from its last checkpoint on: Delta leaves that to the system.

        So are commits of runs that were killed. The table is then open as it is now.
        """
        with self.archive.translated(self.name):
            self.delta.update_incremental()
        if (place := self.archive.directory) is not None:
            log = place / self.name / "_delta_log"
            names = [path.name for path in log.iterdir()]
            # Names of the log begin with the version; what is temporary may be gone.
            whole = [name[:20] for name in names if name.endswith(".checkpoint.parquet")]
            since = max(whole, default="")
            paths = [log / name for name in names if name >= since]
            for path in (*paths, log, log.parent, place, place.parent):
                with suppress(FileNotFoundError):
                    sync_path(path)


# --- writing, in tasks ----------------------------------------------------------------------------


class _OpenFile:
    """A file that is being written; its rows are held back until they make a row group."""

    def __init__(
        self, archive: Archive, files: PyFileSystem, table: str, queue: str, day: date
    ) -> None:
        self._archive, self._files, self._table = archive, files, table
        self._queue, self._day = queue, day
        self._path = f"date={day}/queue={queue}/{SystemClock().lease_id().hex()}.parquet"
        whole = table_schema(table)
        self.schema = pa.schema([each for each in whole if each.name not in _PARTITIONS])
        self._stream = self._files.open_output_stream(self._path)
        self._writer = pq.ParquetWriter(
            self._stream, self.schema, compression="zstd", write_page_checksum=True
        )
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = self.bytes = self._rows = 0
        self._lows: dict[str, Any] = {}
        self._highs: dict[str, Any] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        self._held.append(batch)
        self._held_bytes += batch.nbytes
        self.bytes += batch.nbytes
        self._rows += batch.num_rows
        for name in ("message_id", "sequence", ENDED[self._table]):
            if name in batch.schema.names:
                low, high = pc.min_max(batch.column(name)).values()
                for known, value, best in ((self._lows, low, min), (self._highs, high, max)):
                    known[name] = best(known.get(name, value.as_py()), value.as_py())
        if self._held_bytes >= _GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        if self._held:
            rows = pa.Table.from_batches(self._held)
            self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))
        self._held, self._held_bytes = [], 0

    def close(self) -> ArchiveFile:
        """End the file, have it reach the disk, and read it back: the store forgets its rows."""
        self._write()
        self._writer.close()
        self._stream.close()
        self._archive.sync_file(self._table, self._path)
        with self._files.open_input_file(self._path) as stream:
            read = pq.ParquetFile(stream, page_checksum_verification=True)
            rows = sum(batch.num_rows for batch in read.iter_batches(_BATCH_ROWS))
            size = stream.size()
        if rows != self._rows:
            raise StorageFailed(f"{self._path} has {rows} rows where {self._rows} were written")
        stats = (msgspec.json.encode(each).decode() for each in (self._lows, self._highs))
        return ArchiveFile(self._path, size, self._queue, str(self._day), rows, *stats)


def write_rows(
    archive: Archive,
    table: str,
    created_at_ms: Mapping[str, int],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[ArchiveFile]:
    """Write rows to files that no transaction has added yet, and read them back."""
    place = archive.files(table)
    files: dict[tuple[str, date], _OpenFile] = {}
    with archive.translated(table):
        for batch in batches:
            for queue, day, rows in _by_partition(batch, ENDED[table]):
                # The one that was used last is the last.
                file = files.pop((queue, day), None)
                file = files[queue, day] = file or _OpenFile(archive, place, table, queue, day)
                made_at = pa.scalar(created_at_ms[queue] * 1000).cast(TIME)
                file.add(shaped(rows, file.schema, **{CREATED: made_at}))
                if len(files) > _OPEN_FILES or file.bytes >= _FILE_BYTES:
                    full = file.bytes >= _FILE_BYTES
                    yield files.pop((queue, day) if full else next(iter(files))).close()
        yield from (file.close() for file in files.values())


def _by_partition(batch: pa.RecordBatch, ended: str) -> Iterator[tuple[str, date, pa.RecordBatch]]:
    """Cut a batch into the rows of each queue and (UTC) day."""
    days = batch.column(ended).cast(TIME).cast(pa.date32())
    rows = batch.append_column("date", days)
    order = pc.sort_indices(
        rows.select(["queue", "date"]), [(name, "ascending") for name in ("queue", "date")]
    )
    if not np.array_equal(order, np.arange(len(order))):
        rows = rows.take(order)
    codes = [rows.column(name).dictionary_encode().indices.to_numpy() for name in ("queue", "date")]
    changes = np.flatnonzero(np.diff(codes[0]) | np.diff(codes[1])) + 1
    borders = [0, *changes.tolist(), rows.num_rows]
    for begin, end in pairwise(borders):
        if end > begin:
            part = rows.slice(begin, end - begin)
            yield part.column("queue")[0].as_py(), part.column("date")[0].as_py(), part


def shaped(rows: _Rows, schema: pa.Schema, **fixed: Any) -> _Rows:
    """Give rows the columns of a schema: fixed values, or null or 0 where they have none."""
    columns = []
    for field in schema:
        if field.name in fixed:
            column = pa.repeat(pa.scalar(fixed[field.name], field.type), rows.num_rows)
        elif field.name in rows.schema.names:
            column = rows.column(field.name).cast(field.type)
            if column.null_count and not field.nullable:
                column = column.fill_null(0)
        elif field.nullable:
            column = pa.nulls(rows.num_rows, field.type)
        else:
            column = pa.repeat(pa.scalar(0, field.type), rows.num_rows)
        columns.append(column)
    return rows.from_arrays(columns, schema=schema)


# --- reading, in tasks ----------------------------------------------------------------------------


def read_rows(
    archive: Archive, table: str, files: Iterable[ArchiveFile], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Read columns of files; one that a file lacks is null, or nought if it can't be null."""
    known = schema_of(table, payload=table != "attempts")
    wanted = pa.schema(
        [pa.field(name, TIME) if name == CREATED else known.field(name) for name in columns]
    )
    place = archive.files(table)
    for file in files:
        count = 0
        try:
            stream = place.open_input_file(file.path)
        except FileNotFoundError:
            raise StorageFailed(
                f"{archive.place}/{table} has no file {file.path} any more: it was vacuumed after "
                "this DataFrame was loaded, or removed. Load the DataFrame again"
            ) from None
        with archive.translated(table), stream, pq.ParquetFile(stream) as read:
            present = [name for name in columns if name in read.schema_arrow.names]
            # Without a column there would be no rows to count.
            for batch in read.iter_batches(_BATCH_ROWS, columns=present or ["message_id"]):
                count += batch.num_rows
                yield shaped(batch, wanted, queue=file.queue)
        if count != file.rows:
            raise StorageFailed(f"{file.path} has {count} rows where Delta's log says {file.rows}")


# --- upkeep ---------------------------------------------------------------------------------------


class Optimized(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an optimize: files that were joined, and files made of them, by table."""

    joined: dict[str, int]
    made: dict[str, int]


class Vacuumed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a vacuum: files that were removed, or would be, by table."""

    files: dict[str, int]
    dry_run: bool


def optimize(path: str | Path) -> Optimized:
    """Join the small files of an archive, within each day and queue; readers go on meanwhile.

    The files that were joined stay until a vacuum.

    >>> optimize("s3://lake/orders").joined                               # doctest: +SKIP
    """
    joined, made = Counter[str](), Counter[str]()
    for name, table in Archive.at(path).tables().items():
        with table.archive.translated(name):
            old = {each.path for each in table.files()}
            counts = table.delta.optimize.compact()
            for each in table.files():
                if each.path not in old:
                    table.archive.sync_file(name, each.path)
        table.sync()
        joined[name], made[name] = counts["numFilesRemoved"], counts["numFilesAdded"]
    return Optimized(joined=dict(joined), made=dict(made))


def vacuum(
    path: str | Path, *, retention_hours: int = _WEEK_HOURS, dry_run: bool = False
) -> Vacuumed:
    """Remove files that no version of the last hours has: joined ones, and those of killed runs.

    A reader that began longer ago than that fails, so Delta refuses less than its week.

    >>> vacuum("/srv/archive", dry_run=True).files                        # doctest: +SKIP
    """
    if retention_hours < _WEEK_HOURS:
        raise InvalidInput(f"retention_hours is at least {_WEEK_HOURS}, not {retention_hours}")
    files = {}
    for name, table in Archive.at(path).tables().items():
        with table.archive.translated(name):
            gone = table.delta.vacuum(retention_hours, dry_run=dry_run, full=True)
        files[name] = len(gone)
    return Vacuumed(files=files, dry_run=dry_run)
