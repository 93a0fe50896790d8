"""Archive: done, failed and their attempts into Delta tables, then out of the store.

::

    how far? ─▶ tasks: write Parquet, read it back ─▶ commit done ─▶ failed ─▶ attempts ─▶ trim
                └─ a crash leaves files that no table has ─┘ └──── the next run goes on ────┘

A run takes history by sequence numbers, from each table's marks (``penstock.spark.delta``) to where
the broker says that it ends: no later message gets a lower number. A commit adds the files of one
table and moves its marks in one transaction, so a run that ends between two commits is completed by
the next one. Attempts come last, because an archived attempt is looked for by its archived
message. The store is trimmed when all tables have the rows.

A message that was archived as failed, and redriven before it was trimmed, ends a second time: of
its attempts those are left out that are archived already. They are looked for in the files that
have messages as late as the first of the run, by Delta's statistics.

:func:`follow` does it again and again: a stream whose progress is in the tables alone.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, QueueNotFound, StorageFailed
from penstock.flight.client import FlightStore
from penstock.flight.protocol import HistoryStretch, HistoryTicket
from penstock.flight.tables import schema_of
from penstock.spark.delta import (
    FILE_COLUMNS,
    TABLES,
    Archive,
    ArchiveFile,
    Mark,
    read_rows,
    write_rows,
)
from penstock.spark.positions import deal
from penstock.spark.sessions import located, parallelism, pinned, translated
from penstock.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from penstock.flight.protocol import HistoryEnds
    from penstock.spark.delta import ArchiveTable

    Batches = Iterable[pa.RecordBatch]

_STATES: Final = ("done", "failed")
_MESSAGE: Final = ["queue", "message_id"]
_ATTEMPT: Final = ["queue", "message_id", "attempt", "claimed_at"]
_RACES: Final = 5
logger = logging.getLogger(__name__)
_stretches: Final = msgspec.json.Decoder(list[HistoryStretch]).decode


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run: rows by table, files added, messages trimmed from the store."""

    rows: dict[str, int]
    files: int
    trimmed: int
    dry_run: bool


def archive(
    spark: SparkSession,
    location: str,
    path: str | Path,
    *,
    queues: Sequence[str] | None = None,
    states: Sequence[str] = _STATES,
    keep_ms: int = 0,
    payload: bool = True,
    trim: bool = True,
    dry_run: bool = False,
    token: str | None = None,
    ca: str | Path | None = None,
    retry_for: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Archived:
    """Move the history of queues to Delta tables at ``path``, partitioned by (UTC) date and queue.

    ``path`` is a directory that driver and executors share, or ``s3://BUCKET/PREFIX`` with the
    variables ``AWS_…`` of the driver. What ended less than ``keep_ms`` ago stays.
    ``payload=False`` leaves payloads out: the store drops those that nothing else needs.
    Failed messages that are archived can't be redriven any more; ``states=["done"]`` leaves them.
    ``trim=False`` only copies; a later run trims. ``progress`` is told each step by name.

    >>> archive(spark, "grpc://127.0.0.1:8815", "/srv/archive", keep_ms=86_400_000)
    ...                                                        # doctest: +SKIP
    """
    if not states or not set(states) <= set(_STATES) or len(set(states)) < len(states):
        raise InvalidInput(f"states to archive are done and failed, not {list(states)!r:.100}")
    place = Archive.at(path)
    client = FlightStore(located(location, token=token, ca=ca, retry_for=retry_for))
    tell = progress or (lambda _: None)
    named = None if queues is None else list(queues)
    known = client.history_ends(named)
    for queue in named or ():
        if queue not in known.queues:
            raise QueueNotFound.among(queue, known.queues)
    names = [name for name in TABLES if name in {*states, "attempts"}]
    opened = place.open if dry_run else place.make
    tables = {name: opened(name, known.store_id) for name in names}
    # Asked for now, so that it goes as far as any run that the tables have.
    history = client.history_ends(named, since_ms=0)
    young_ms = max(0, history.at_ms - keep_ms + 1)
    until = client.history_ends(named, since_ms=young_ms) if keep_ms else None
    for table in tables.values():
        if table is not None:
            table.check(history)
    job = _Job(spark, client, place, tables, *_choose(history, until, tables))
    tell("chosen")
    files: dict[str, list[ArchiveFile]] = {}
    with translated():
        if dry_run:
            rows = {name: job.count(name) for name in names}
            return Archived(rows=rows, files=0, trimmed=0, dry_run=True)
        for name in names:
            first_id = job.first_id(chain(*files.values())) if name == "attempts" else 0
            files[name] = job.write(name, first_id, payload=payload)
    tell("written")
    for name, table in tables.items():
        if table is not None and (marks := job.marks(name)):
            table.commit(files[name], marks)
            tell(f"committed {name}")
    trimmed = job.trim(_firsts(history), tell) if trim else 0
    tell("trimmed")
    return Archived(
        rows={name: sum(each.rows for each in some) for name, some in files.items()},
        files=sum(map(len, files.values())),
        trimmed=trimmed,
        dry_run=False,
    )


def follow(
    spark: SparkSession,
    location: str,
    path: str | Path,
    *,
    every_ms: int = 10_000,
    **settings: Any,
) -> Generator[Archived, None, None]:
    """Archive what has ended, again and again, until the caller stops; yield each run's result.

    ``settings`` are those of :func:`archive`. Each row gets into the tables once, whatever is
    killed and started again: the tables themselves say how far they are, in the transactions that
    add the rows, and there is no checkpoint. A run that another job gets ahead of, or whose
    place fails, is made again, with a warning in the log, up to five times in a row.

    >>> for done in follow(spark, "grpc://127.0.0.1:8815", "/srv/archive"):   # doctest: +SKIP
    ...     print(done.rows)
    """
    races = 0
    while True:
        try:
            done = archive(spark, location, path, **settings)
            races = 0
        except StorageFailed as error:
            races += 1
            if races > _RACES:
                raise
            logger.warning("archive run failed, try %d of %d: %s", races, _RACES + 1, error)
        else:
            yield done
        SystemClock().wait(Waiter(), every_ms)


def _firsts(history: HistoryEnds) -> dict[Mark, int]:
    """Return the sequence numbers that history begins with."""
    return {
        Mark(queue, found.created_at_ms, state): first
        for queue, found in history.queues.items()
        for state, (first, _) in found.firsts.items()
    }


def _choose(
    history: HistoryEnds, until: HistoryEnds | None, tables: Mapping[str, ArchiveTable | None]
) -> tuple[dict[str, dict[Mark, int]], dict[Mark, int]]:
    """Compare the history, up to where it is too young, with the marks of the tables.

    Return where the marks of each table are, and where they will be.
    """
    # Processes that share a store give numbers out in no order of time: what is old can be beyond
    # what is young, and stays, because what is trimmed is told by numbers.
    young = {} if until is None else _firsts(until)
    ends = {
        mark: young.get(mark, end)
        for queue, found in (until or history).queues.items()
        for state, end in found.ends.items()
        if state in tables and (mark := Mark(queue, found.created_at_ms, state))
    }
    begins = {
        name: {
            mark: 0 if table is None else table.mark(mark)
            for mark in ends
            if name in {mark.state, "attempts"}
        }
        for name, table in tables.items()
    }
    return begins, ends


class _Job(NamedTuple):
    """A run: from where each table's marks are, to where they will be."""

    spark: SparkSession
    client: FlightStore
    place: Archive
    tables: Mapping[str, ArchiveTable | None]
    begins: dict[str, dict[Mark, int]]
    ends: dict[Mark, int]

    def marks(self, table: str) -> dict[Mark, int]:
        """Return the marks that a table moves."""
        begins = self.begins[table]
        return {mark: end for mark, end in self.ends.items() if begins.get(mark, end) < end}

    def count(self, table: str) -> int:
        """Count the rows that a table is to get."""
        new = self._new_attempts(0) if table == "attempts" else None
        return (self._rows(table) if new is None else new).count()

    def write(self, table: str, first_id: int, *, payload: bool) -> list[ArchiveFile]:
        """Write the rows that a table is to get, in tasks, and return the files.

        No message of them has an id below ``first_id``.
        """
        if not self.marks(table):
            return []
        rows = self._stretches(table)
        read: Callable[[Batches], Batches] = partial(_read_history, self.client, table, payload)
        if table == "attempts" and (new := self._new_attempts(first_id)) is not None:
            # A join has mixed them up, and a task has few files open at a time.
            rows, read = new.sortWithinPartitions("queue", "ended_at"), iter
        made_at = {mark.queue: mark.created_at_ms for mark in self.ends}
        write = partial(_write, self.place, table, made_at, read)
        return [
            ArchiveFile(**row.asDict()) for row in rows.mapInArrow(write, FILE_COLUMNS).collect()
        ]

    def trim(self, firsts: Mapping[Mark, int], tell: Callable[[str], None]) -> int:
        """Remove messages from the store that the run was to take and that all tables have."""
        tables = {name: table for name, table in self.tables.items() if table is not None}
        due = {mark: self.ends.get(mark, 0) for mark in sorted(firsts)}
        due = {mark: end for mark, end in due.items() if firsts[mark] < end}
        # An earlier run may have been killed after a commit, before it was on disk.
        for table in tables.values() if due else ():
            table.sync()
        trimmed = 0
        for mark, end in due.items():
            tell(f"trimming {mark.state} of {mark.queue}")
            before = min(end, *(tables[name].mark(mark) for name in (mark.state, "attempts")))
            # A queue that is gone has nothing to trim, and one that was made anew is another.
            with contextlib.suppress(QueueNotFound):
                trimmed += self.client.trim(
                    mark.queue, state=mark.state, before=before, created_at_ms=mark.created_at_ms
                )
        return trimmed

    def first_id(self, files: Iterable[ArchiveFile]) -> int:
        """Return the lowest id of the messages whose attempts are archived, from their files."""
        begins = self.begins
        for mark in self.marks("attempts"):
            if begins["attempts"][mark] != begins[mark.state][mark]:
                # The files of some are of an earlier run.
                return 0
        ids = (msgspec.json.decode(file.lows, type=dict[str, Any])["message_id"] for file in files)
        return min(ids, default=0)

    def _stretches(self, table: str) -> DataFrame:
        begins, marks = self.begins[table], self.marks(table)
        stretches = [HistoryStretch(*mark, begins[mark], end) for mark, end in marks.items()]
        dealt = deal(stretches, parallelism(self.spark))
        named = [(msgspec.json.encode(each).decode(),) for each in dealt]
        rows = self.spark.createDataFrame(named, "stretches string")
        return rows.repartition(max(1, len(named)))

    def _rows(self, table: str) -> DataFrame:
        read = partial(_read_history, self.client, table, False)  # noqa: FBT003
        return self._stretches(table).mapInArrow(read, from_arrow_schema(schema_of(table)))

    def _new_attempts(self, first_id: int) -> DataFrame | None:
        """Return the attempts that are not archived yet; None: none of them is."""
        failed = self._archived("failed", _MESSAGE, first_id)
        known = self._archived("attempts", _ATTEMPT, first_id)
        if failed is None or known is None:
            return None
        attempts = self._rows("attempts")
        messages = attempts.select(*_MESSAGE).distinct()
        twice = pinned(messages.join(failed, _MESSAGE, "left_semi"))
        if twice.isEmpty():
            return None
        there = known.join(twice, _MESSAGE, "left_semi")
        return attempts.join(there, _ATTEMPT, "left_anti").select(*attempts.columns)

    def _archived(self, name: str, columns: Sequence[str], first_id: int) -> DataFrame | None:
        """Return rows that the archive had before the run; None if it has no file of such."""
        table = self.tables.get(name) or self.place.open(name)
        queues = {mark.queue for mark in self.marks("attempts")}
        files = [] if table is None else table.files(queues, first_id)
        if not files:
            return None
        named = [msgspec.structs.astuple(each) for each in files]
        given = self.spark.createDataFrame(named, FILE_COLUMNS)
        given = given.repartition(min(len(files), parallelism(self.spark)))
        schema = from_arrow_schema(schema_of(name, columns=columns))
        return given.mapInArrow(partial(_read_archived, self.place, name, columns), schema)


# --- in tasks -------------------------------------------------------------------------------------


def _read_history(
    client: FlightStore,
    table: str,
    payload: bool,  # noqa: FBT001 - partial() gives it a name
    batches: Batches,
) -> Iterator[pa.RecordBatch]:
    for text in (text for batch in batches for text in batch.column(0).to_pylist()):
        with_payload = payload and table != "attempts"
        yield from client.read(HistoryTicket(table, _stretches(text), with_payload))


def _write(
    place: Archive,
    table: str,
    made_at: Mapping[str, int],
    read: Callable[[Batches], Batches],
    batches: Batches,
) -> Iterator[pa.RecordBatch]:
    for file in write_rows(place, table, made_at, read(batches)):
        yield pa.RecordBatch.from_pylist([msgspec.structs.asdict(file)])


def _read_archived(
    place: Archive, table: str, columns: Sequence[str], batches: Batches
) -> Iterator[pa.RecordBatch]:
    rows = (row for batch in batches for row in batch.to_pylist())
    yield from read_rows(place, table, (ArchiveFile(**row) for row in rows), columns)
