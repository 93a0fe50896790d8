"""A client of the Flight protocol: every command and action as a typed method.

:class:`FlightStore` holds only the location, so that it can be pickled and sent to executors; the
connection is made when it is first used, one per process. Needs pyarrow.
"""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as fl

from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import InvalidMessage, ServerUnreachable
from penstock.flight import protocol as wire
from penstock.flight.access import client as _client
from penstock.flight.access import forget as _forget
from penstock.flight.access import identity, locate
from penstock.model import LogStats, QueueStats, StoreStats, SweepCounts
from penstock.store.plans import BackfillPlan, Collected, LiveFilters, RoutePlan

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
# Calls that only ask, or note a word: who waits longer than this for one waits for nobody.
_QUICK: Final = frozenset(
    {"info", "log_stats", "route_plan", "filters", "take_epoch", "drop_stages", "watermarks"}
)
_WORK: Final = frozenset({"commit_stages"})
_ROW: Final = re.compile(r"^row (\d+)")
_BEFORE: Final = re.compile(r"\((\d+) rows before were published\)$")
_SILENT: Final = ("Detail: TimedOut", "Detail: Unavailable", "Detail: Cancelled")
_clock: Final = SystemClock()
_waiting: Final = threading.Condition()


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
    server can't be reached; then :class:`~penstock.errors.ServerUnreachable` says so. No call waits
    for ever for a server that is silent: the bounds are in :mod:`penstock.limits`. Penstock's
    errors come back as what they were.
    """

    def __init__(self, location: str, **access: Any) -> None:
        """Name a server; ``token``, ``ca``, ``certificate``, ``key`` as :func:`locate` has them."""
        self.location = locate(location, **access)

    def __repr__(self) -> str:
        return f"FlightStore({str(self.location)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlightStore) and identity(self.location) == identity(
            other.location
        )

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
        info = self._again(
            lambda client: client.get_flight_info(
                _descriptor(command), _within(limits.MAX_WORK_CALL_MS)
            )
        )
        facts = msgspec.json.decode(bytes(info.app_metadata), type=SnapshotFacts)
        return ReadPlan(info.schema, [each.ticket.ticket for each in info.endpoints], facts)

    def schema(
        self, table: str, *, payload: bool = False, columns: Sequence[str] | None = None
    ) -> pa.Schema:
        """Return the schema of a table."""
        command = wire.ReadCommand(
            table=table, payload=payload, columns=None if columns is None else list(columns)
        )
        return self._again(
            lambda client: client.get_schema(_descriptor(command), _within(limits.MAX_CALL_MS))
        ).schema

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

    def read(self, ticket: bytes, *, idle_ms: int | None = None) -> Iterator[pa.RecordBatch]:
        """Read what a ticket stands for, a batch at a time, each within ``idle_ms``."""
        idle_ms = idle_ms or limits.MAX_WORK_CALL_MS
        reader = self._again(lambda client: _opened(client, ticket, idle_ms))
        while True:
            with _translated(self.location):
                chunk = _next_chunk(reader, idle_ms)
            if chunk is None:
                return
            yield chunk.data

    @staticmethod
    def narrowed(ticket: bytes, queues: Sequence[str]) -> bytes:
        """Make of a ticket of a snapshot one for some of its queues alone."""
        known = wire.decode(ticket, wire.SnapshotTicket, "ticket")
        return wire.encode(msgspec.structs.replace(known, queues=list(queues)))

    def read_table(self, table: str, **selection: Any) -> pa.Table:
        """Read a whole table, as :meth:`plan_read` selects it."""
        plan = self.plan_read(table, **selection)
        batches = [batch for ticket in plan.tickets for batch in self.read(ticket)]
        return pa.Table.from_batches(batches, plan.schema)

    # --- writing -------------------------------------------------------------------------

    def publish(
        self, batches: Iterable[pa.RecordBatch], schema: pa.Schema, *, again: bool = False
    ) -> Published:
        """Publish rows; without dedup ids a call that failed may have published some of them.

        With dedup ids in all rows ``again`` may be set: then rows whose answer got lost are sent
        again, and those that had come through are counted as duplicates.
        """
        counted = Published(0, 0)
        for batch in _portions(batches):
            said: list[bytes] = []
            send = partial(_put, wire.PublishCommand(), [batch], schema, said.append)
            try:
                if again:
                    self._again(send)
                else:
                    with _translated(self.location):
                        send(_client(self.location))
            except InvalidMessage as error:
                raise _moved(error, counted.published) from None
            one = msgspec.json.decode(said[-1], type=Published)
            counted = Published(
                counted.published + one.published, counted.duplicates + one.duplicates
            )
        return counted

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

    def restore(
        self,
        batches: Iterable[pa.RecordBatch],
        *,
        queue: str,
        begin: int,
        end: int,
        filter: str | None = None,  # noqa: A002
    ) -> FilledCounts:
        """Put archived messages (:data:`wire.RESTORED`) of [begin, end) into a queue."""
        command = wire.RestoreCommand(queue=queue, begin=begin, end=end, filter=filter)
        rows, said = list(batches), list[bytes]()
        self._again(partial(_put, command, rows, wire.RESTORED, said.append))
        return msgspec.json.decode(said[-1], type=FilledCounts)

    def _stage(
        self, command: msgspec.Struct, batches: Iterable[pa.RecordBatch], schema: pa.Schema
    ) -> None:
        # All at hand before the first is sent: a stage that ends early would be taken for whole.
        rows = list(batches)
        self._again(partial(_put, command, rows, schema, None))

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
        archived: bool = False,
    ) -> BackfillPlan:
        """Say what a backfill of a queue has still to do; ``archived``: below the log too."""
        command = wire.BackfillCommand(
            queue=queue, from_=from_, from_time_ms=from_time_ms, to=to, archived=archived
        )
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

    def trim(self, queue: str, *, state: str, before: int, created_at_ms: int | None = None) -> int:
        """Remove done or failed messages with a sequence below ``before``; return how many."""
        command = wire.TrimCommand(
            queue=queue, state=state, before=before, created_at_ms=created_at_ms
        )
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
            action = fl.Action(name, wire.encode(command))
            results = list(client.do_action(action, _within(_patience_ms(name))))
            body: bytes = results[0].body.to_pybytes()
            return body

        if again:
            answer = self._again(call)
        else:
            with _translated(self.location):
                answer = call(_client(self.location))
        return msgspec.json.decode(answer, type=kind)

    def _again(self, call: Callable[[fl.FlightClient], _T]) -> _T:
        """Make a call that may be repeated, until the server is there or patience is over."""
        started_ms = _clock.now_ms()
        for number, wait_ms in enumerate(BACKOFF_MS):
            try:
                with _translated(self.location):
                    return call(_client(self.location))
            except ServerUnreachable:
                _forget(self.location)
                # A connection that has gone silent deserves one new one, whatever it has cost.
                if number and _clock.now_ms() - started_ms > limits.MAX_UNREACHABLE_MS:
                    raise
                with _waiting:
                    _clock.wait(_waiting, int(wait_ms * (0.75 + _clock.random() / 2)))
        with _translated(self.location):
            return call(_client(self.location))


def _patience_ms(action: str) -> int:
    if action in _QUICK:
        return limits.MAX_CALL_MS
    return limits.MAX_WORK_CALL_MS if action in _WORK else limits.MAX_BULK_CALL_MS


def _within(timeout_ms: int) -> fl.FlightCallOptions:
    return fl.FlightCallOptions(timeout=timeout_ms / 1000)


def _opened(client: fl.FlightClient, ticket: bytes, idle_ms: int) -> fl.FlightStreamReader:
    """Open a stream, or give up if its schema does not come.

    A deadline would end the whole stream, however well it flows, and opening can't be cancelled:
    so it is waited for from beside it.
    """
    made: list[fl.FlightStreamReader] = []
    failed: list[BaseException] = []
    given_up = threading.Event()

    def open_it() -> None:
        try:
            made.append(client.do_get(fl.Ticket(ticket)))
        except BaseException as error:
            failed.append(error)
        if made and given_up.is_set():
            made[0].cancel()

    opening = threading.Thread(target=open_it, name="penstock-open", daemon=True)
    opening.start()
    opening.join(idle_ms / 1000)
    if failed:
        raise failed[0]
    if not made:
        given_up.set()
        raise fl.FlightTimedOutError(f"a read did not begin within {idle_ms} ms")
    return made[0]


def _next_chunk(reader: fl.FlightStreamReader, idle_ms: int) -> fl.FlightStreamChunk | None:
    """Return the next chunk of a stream, or None at its end; ends a stream that is silent."""
    late = threading.Event()

    def end() -> None:
        late.set()
        reader.cancel()

    timer = threading.Timer(idle_ms / 1000, end)
    timer.daemon = True
    timer.start()
    try:
        return reader.read_chunk()
    except StopIteration:
        return None
    except fl.FlightCancelledError:
        if late.is_set():
            raise fl.FlightTimedOutError(f"a read brought nothing for {idle_ms} ms") from None
        raise
    finally:
        timer.cancel()


def _portions(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Cut batches to what one call is given: each call has a deadline, and may be repeated."""
    for batch in batches:
        large = batch.nbytes // limits.MAX_PUT_CHUNK_BYTES + 1
        step = max(1, min(limits.MAX_PUT_CHUNK_MESSAGES, batch.num_rows // large))
        for begin in range(0, batch.num_rows, step):
            yield batch.slice(begin, step)


def _moved(error: InvalidMessage, rows: int) -> InvalidMessage:
    """Count the rows of an error from the first of the publish, not of its portion."""
    text = _ROW.sub(lambda found: f"row {int(found[1]) + rows}", str(error))
    return InvalidMessage(
        _BEFORE.sub(lambda found: f"({int(found[1]) + rows} rows before were published)", text)
    )


def _put(
    command: msgspec.Struct,
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    answer: Callable[[bytes], None] | None,
    client: fl.FlightClient,
) -> None:
    """Send batches; ``answer`` is called with what the server says after each."""
    writer, reader = client.do_put(_descriptor(command), schema, _within(limits.MAX_WORK_CALL_MS))
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


@contextmanager
def _translated(location: str) -> Iterator[None]:
    """Turn what the server has said into the exception that it was, and silence into its own."""
    try:
        yield
    except (fl.FlightError, pa.ArrowException, OSError) as error:
        extra: Any = getattr(error, "extra_info", None)
        ours = wire.revive(extra)
        if ours is not None:
            raise ours from None
        if _is_silence(error):
            said = " ".join(str(error).split())
            raise ServerUnreachable(
                f"no broker answers at {location}: is it serving Flight there? ({said:.300})"
            ) from None
        raise


def _is_silence(error: BaseException) -> bool:
    if isinstance(
        error, fl.FlightUnavailableError | fl.FlightTimedOutError | fl.FlightCancelledError
    ):
        # A server that closes cancels the calls that it has not answered.
        return True
    # Arrow forgets the kind for some of its calls, and only tells it in words.
    return isinstance(error, OSError) and str(error).endswith(_SILENT)
