"""A client of the Flight protocol: every command and action as a typed method.

:class:`FlightStore` holds only the location, so that it can be pickled and sent to executors; the
connection is made when it is first used, one per process. Needs pyarrow.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as fl

from penstock.clock import SystemClock
from penstock.errors import InvalidUrl
from penstock.model import LogStats, QueueStats, StoreStats, SweepCounts
from penstock.stores.plans import BackfillPlan, Collected, LiveFilters, RoutePlan
from penstock.tables import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "Committed",
    "FilledCounts",
    "FlightStore",
    "Published",
    "ReadPlan",
    "ServerInfo",
    "SnapshotFacts",
    "Stats",
    "Watermarks",
]

_T = TypeVar("_T")
# Waits before the tries of a call that may be repeated, while the server is not there.
BACKOFF_MS: Final = (100, 200, 400, 800, 1_600, 3_200, 3_200)
_clock: Final = SystemClock()
_waiting: Final = threading.Condition()
_clients: Final[dict[tuple[int, str], fl.FlightClient]] = {}
_clients_lock: Final = threading.Lock()


class ServerInfo(msgspec.Struct, frozen=True):
    """Which store a server has open, and which protocol it speaks."""

    version: str
    store_id: str
    design: str
    routing: str
    protocol: int


class SnapshotFacts(msgspec.Struct, frozen=True):
    """When a snapshot was taken, and what the log was like then."""

    at_ms: int
    log_end: int
    earliest: int
    store_id: str


class ReadPlan(msgspec.Struct, frozen=True):
    """How to read a table: its schema, and a ticket for each part."""

    schema: Any
    tickets: list[bytes]
    facts: SnapshotFacts


class Published(msgspec.Struct, frozen=True):
    """How many rows a publish took, and how many of them it had seen before."""

    published: int
    duplicates: int


class Committed(msgspec.Struct, frozen=True):
    """What became of the stages of one log; the status is one of AssignStatus."""

    log: int
    status: str
    cursor: int
    placed: int


class FilledCounts(msgspec.Struct, frozen=True):
    """What a fill did."""

    added: int
    already: int
    missing: int


class Watermarks(msgspec.Struct, frozen=True):
    """How far the logs are routed."""

    cursors: dict[int, int]
    routed_up_to: int
    earliest: int
    end: int


class Stats(msgspec.Struct, frozen=True):
    """Everything that is counted."""

    queues: list[QueueStats]
    store: StoreStats
    log: LogStats


class _Results(msgspec.Struct):
    results: list[Committed]


class FlightStore:
    """A store behind a Flight server, such as ``grpc://127.0.0.1:8815``.

    Calls that change nothing, or may be made twice, are tried again for some seconds while the
    server can't be reached. Penstock's errors come back as what they were.
    """

    def __init__(self, location: str) -> None:
        if not str(location).startswith(("grpc://", "grpc+tcp://")):
            raise InvalidUrl(f"no Flight server is named by {location!r:.200}: grpc://HOST:PORT")
        self.location = location

    def __repr__(self) -> str:
        return f"FlightStore({self.location!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlightStore) and self.location == other.location

    def __hash__(self) -> int:
        return hash(self.location)

    # --- reading -------------------------------------------------------------------------

    def plan_read(
        self,
        table: str,
        *,
        queue: str | Sequence[str] | None = None,
        payload: bool = False,
        columns: Sequence[str] | None = None,
        filter: str | None = None,  # noqa: A002 - the word that users know
        partitions: int = 1,
        begin: int | None = None,
        end: int | None = None,
        logs: Sequence[int] | None = None,
    ) -> ReadPlan:
        """Have a snapshot taken; its tickets can be read from any process."""
        command = wire.ReadCommand(
            table=table,
            queue=queue if queue is None or isinstance(queue, str) else list(queue),
            payload=payload,
            columns=None if columns is None else list(columns),
            filter=filter,
            partitions=partitions,
            begin=begin,
            end=end,
            logs=None if logs is None else list(logs),
        )
        info = self._again(lambda client: client.get_flight_info(_descriptor(command)))
        facts = msgspec.json.decode(bytes(info.app_metadata), type=SnapshotFacts)
        return ReadPlan(info.schema, [each.ticket.ticket for each in info.endpoints], facts)

    def schema(
        self, table: str, *, payload: bool = False, columns: Sequence[str] | None = None
    ) -> pa.Schema:
        """Return the schema of a table."""
        command = wire.ReadCommand(
            table=table, payload=payload, columns=None if columns is None else list(columns)
        )
        return self._again(lambda client: client.get_schema(_descriptor(command))).schema

    @staticmethod
    def log_ticket(
        log: int,
        begin: int,
        end: int,
        *,
        payload: bool = False,
        columns: Sequence[str] | None = None,
        filter: str | None = None,  # noqa: A002
    ) -> bytes:
        """Make a ticket for [begin, end) of a log."""
        ticket = wire.LogTicket(
            log=log,
            begin=begin,
            end=end,
            payload=payload,
            columns=None if columns is None else list(columns),
            filter=filter,
        )
        return wire.encode(ticket)

    def read(self, ticket: bytes) -> Iterator[pa.RecordBatch]:
        """Read what a ticket stands for, a batch at a time."""
        reader = self._again(lambda client: client.do_get(fl.Ticket(ticket)))
        with _translated():
            for chunk in reader:
                yield chunk.data

    def read_table(self, table: str, **selection: Any) -> pa.Table:
        """Read a whole table, as :meth:`plan_read` selects it."""
        plan = self.plan_read(table, **selection)
        batches = [batch for ticket in plan.tickets for batch in self.read(ticket)]
        return pa.Table.from_batches(batches, plan.schema)

    # --- writing -------------------------------------------------------------------------

    def publish(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Published:
        """Publish rows; without dedup ids a call that failed may have published some of them."""
        last: list[bytes] = [b'{"published":0,"duplicates":0}']
        with _translated():
            _put(_client(self.location), wire.PublishCommand(), batches, schema, last.append)
        return msgspec.json.decode(last[-1], type=Published)

    def stage(
        self,
        stage: str,
        batches: Iterable[pa.RecordBatch],
        *,
        log: int,
        begin: int,
        end: int,
        filters_version: int | None = None,
        epoch: int | None = None,
    ) -> None:
        """Stage all assignments (offset, queue) of [begin, end) of a log."""
        command = wire.StageCommand(
            stage=stage, log=log, begin=begin, end=end, filters_version=filters_version, epoch=epoch
        )
        schema = pa.schema([("offset", pa.int64()), ("queue", pa.string())])
        self._stage(command, batches, schema)

    def fill_stage(
        self, stage: str, batches: Iterable[pa.RecordBatch], *, queue: str, begin: int, end: int
    ) -> None:
        """Stage all messages (offset) of [begin, end) that a backfill puts into a queue."""
        command = wire.FillStage(stage=stage, queue=queue, begin=begin, end=end)
        self._stage(command, batches, pa.schema([("offset", pa.int64())]))

    def _stage(
        self, command: msgspec.Struct, batches: Iterable[pa.RecordBatch], schema: pa.Schema
    ) -> None:
        # All at hand before the first is sent: a stage that ends early would be taken for whole.
        rows = list(batches)
        self._again(lambda client: _put(client, command, rows, schema, None))

    # --- actions -------------------------------------------------------------------------

    def info(self) -> ServerInfo:
        """Say which store the server has open."""
        return self._act("info", wire.Nothing(), ServerInfo)

    def log_stats(self) -> LogStats:
        """Describe the metadata log."""
        return self._act("log_stats", wire.Nothing(), LogStats)

    def route_plan(self, *, max_offsets: int | None = None) -> RoutePlan:
        """Say what a router may match next."""
        return self._act("route_plan", wire.RoutePlanCommand(max_offsets=max_offsets), RoutePlan)

    def filters(self, offset: int) -> LiveFilters:
        """Return the filters that are live at an offset."""
        return self._act("filters", wire.FilterCommand(offset=offset), LiveFilters)

    def take_epoch(self) -> int:
        """Fence every pipeline that took an epoch before."""
        answer: dict[str, int] = self._act("take_epoch", wire.Nothing(), dict[str, int])
        return answer["epoch"]

    def commit_stages(self, stages: Sequence[str], *, epoch: int | None = None) -> list[Committed]:
        """Assign what is staged; doing it twice is harmless."""
        command = wire.CommitStages(stages=list(stages), epoch=epoch)
        return self._act("commit_stages", command, _Results).results

    def drop_stages(self, stages: Sequence[str]) -> int:
        """Forget stages; return how many there were."""
        command = wire.DropStages(stages=list(stages))
        answer: dict[str, int] = self._act("drop_stages", command, dict[str, int])
        return answer["dropped"]

    def commit_fill(
        self,
        stages: Sequence[str],
        *,
        queue: str,
        begin: int,
        end: int,
        filter: str | None = None,  # noqa: A002
    ) -> FilledCounts:
        """Fill a queue from stages; what it has had is left alone."""
        command = wire.CommitFill(
            stages=list(stages), queue=queue, begin=begin, end=end, filter=filter
        )
        return self._act("commit_fill", command, FilledCounts)

    def backfill_plan(
        self,
        queue: str,
        *,
        from_: int | str | None = None,
        from_time_ms: int | None = None,
        to: int | None = None,
    ) -> BackfillPlan:
        """Say what a backfill of a queue has still to do."""
        command = wire.BackfillCommand(queue=queue, from_=from_, from_time_ms=from_time_ms, to=to)
        return self._act("backfill_plan", command, BackfillPlan)

    def redrive(
        self,
        queue: str,
        *,
        message_ids: Sequence[int] | None = None,
        where: str | None = None,
    ) -> int:
        """Make failed messages available again; return how many."""
        ids = None if message_ids is None else list(message_ids)
        command = wire.RedriveCommand(queue=queue, message_ids=ids, where=where)
        answer: dict[str, int] = self._act("redrive", command, dict[str, int], again=False)
        return answer["redriven"]

    def trim(self, queue: str, *, state: str, before: int) -> int:
        """Remove done or failed messages with a sequence below ``before``; return how many."""
        command = wire.TrimCommand(queue=queue, state=state, before=before)
        answer: dict[str, int] = self._act("trim", command, dict[str, int])
        return answer["removed"]

    def collect(self, message_ids: Sequence[int], *, dry_run: bool = True) -> Collected:
        """Free payloads that nobody can ask for any more; by default only count them."""
        command = wire.CollectCommand(message_ids=list(message_ids), dry_run=dry_run)
        return self._act("collect", command, Collected)

    def watermarks(self) -> Watermarks:
        """Say how far the logs are routed."""
        return self._act("watermarks", wire.Nothing(), Watermarks)

    def sweep(self) -> SweepCounts:
        """Have the broker do what is due."""
        return self._act("sweep", wire.Nothing(), SweepCounts)

    def stats(self) -> Stats:
        """Return everything that is counted."""
        return self._act("stats", wire.Nothing(), Stats)

    # --- calls ---------------------------------------------------------------------------

    def _act(self, name: str, command: msgspec.Struct, kind: type[_T], *, again: bool = True) -> _T:
        def call(client: fl.FlightClient) -> bytes:
            results = list(client.do_action(fl.Action(name, wire.encode(command))))
            body: bytes = results[0].body.to_pybytes()
            return body

        if again:
            answer = self._again(call)
        else:
            with _translated():
                answer = call(_client(self.location))
        return msgspec.json.decode(answer, type=kind)

    def _again(self, call: Callable[[fl.FlightClient], _T]) -> _T:
        """Make a call that may be repeated, until the server is there or patience is over."""
        for wait_ms in BACKOFF_MS:
            try:
                with _translated():
                    return call(_client(self.location))
            except fl.FlightUnavailableError:
                _forget(self.location)
                with _waiting:
                    _clock.wait(_waiting, int(wait_ms * (0.75 + _clock.random() / 2)))
        with _translated():
            return call(_client(self.location))


def _put(
    client: fl.FlightClient,
    command: msgspec.Struct,
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    answer: Callable[[bytes], None] | None,
) -> None:
    """Send batches; ``answer`` is called with what the server says after each."""
    writer, reader = client.do_put(_descriptor(command), schema)
    try:
        for batch in batches:
            writer.write_batch(batch)
            if answer is not None and (said := reader.read()) is not None:
                answer(said.to_pybytes())
        writer.done_writing()
        while (said := reader.read()) is not None:
            if answer is not None:
                answer(said.to_pybytes())
    finally:
        # An error of the server shows itself here, whatever went wrong before.
        writer.close()


def _descriptor(command: msgspec.Struct) -> fl.FlightDescriptor:
    return fl.FlightDescriptor.for_command(wire.encode(command))


def _client(location: str) -> fl.FlightClient:
    # A forked worker must not use its parent's connection.
    key = (os.getpid(), location)
    with _clients_lock:
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = fl.FlightClient(location)
        return client


def _forget(location: str) -> None:
    with _clients_lock:
        _clients.pop((os.getpid(), location), None)


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what the server has said into the exception that it was."""
    try:
        yield
    except (fl.FlightError, pa.ArrowException) as error:
        extra: Any = getattr(error, "extra_info", None)
        ours = wire.revive(extra)
        if ours is None:
            raise
        raise ours from None
