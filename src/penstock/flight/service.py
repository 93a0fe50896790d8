"""The Flight service over a broker; ``docs/flight.md`` describes the protocol.

gRPC calls the handlers from many threads at once. Snapshots, stages and the broker are thread-safe;
only making a snapshot holds the broker up, reading one never does.

A call brings ``authorization: Bearer ID:SECRET`` (or Basic, as Flight clients log in). The
middleware finds the key before anything is read; the handlers check its permissions.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.flight as fl

from penstock import limits
from penstock.errors import InvalidInput, NotAllowed, PenstockError
from penstock.flight import protocol
from penstock.flight.copies import COPY_SCHEMA, copy_batches
from penstock.flight.guard import AcceptedHandshakes, FlightCall, FlightGuard
from penstock.flight.history import check_stretches, ends_of, pieces_of
from penstock.flight.protocol import ACTIONS, PUTS, decode, describe, encode
from penstock.flight.snapshots import (
    Part,
    Piece,
    Snapshot,
    Snapshots,
    TableParts,
    next_batch,
    of_queues,
    partition,
)
from penstock.flight.spools import Spools
from penstock.flight.tables import Selection, read, select
from penstock.flight.writes import Publisher, Restorer, Stages, commit, fill_offsets
from penstock.server.security import told
from penstock.validation import check_count, check_optional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.model import BackfillPlan
    from penstock.server.keys import Keys
    from penstock.server.metrics import Metrics
    from penstock.server.security import Principal
    from penstock.store.snapshot import PinnedStore

log = logging.getLogger(__name__)

_READ: Final = ("consume", "admin")
_TICKETS: Final = (
    protocol.SnapshotTicket
    | protocol.ActionTicket
    | protocol.LogTicket
    | protocol.HistoryTicket
    | protocol.CopyTicket
)
# The command of a snapshot that was made for one table.
_ALONE: Final = b""
# Tables of one queue's messages; the others show rows of all queues.
_BY_QUEUE: Final = {"active", "done", "failed", "attempts", "groups"}
# Actions that check the key themselves: by its queues, or as the one that made the spool.
_CHECKED_INSIDE: Final = (
    *("check_read", "check_history", "history_ends"),
    *("publish_part", "drop_spool"),
)
# Here the caller says which messages a queue gets, whatever its filter: as good as any filter.
_FILLS: Final = (protocol.FillStage, protocol.RestoreCommand, protocol.CommitFill)

# --- the service ----------------------------------------------------------------------------------


@contextmanager
def translated(principal: Principal | None = None) -> Iterator[None]:
    """Raise Penstock's errors as Flight's; others go to the log, without details to clients."""
    try:
        yield
    except PenstockError as error:
        raise fl.FlightServerError(*describe(told(error, principal))) from None
    except pa.ArrowException:
        raise
    except Exception as error:
        log.exception("a Flight call failed")
        raise fl.FlightInternalError(f"{type(error).__name__}: {error}") from None


class FlightService(fl.FlightServerBase):  # type: ignore[misc]
    """Serves a broker, to callers whose keys permit it. It listens as soon as it is made."""

    def __init__(
        self,
        broker: Broker,
        location: str,
        clock: Clock,
        *,
        keys: Keys | None = None,
        metrics: Metrics | None = None,
        audited: Callable[[str, str], Broker] | None = None,
        **options: Any,
    ) -> None:
        self._broker = broker
        # Gives the broker to a key at an address: one whose verbs are recorded.
        self._audited = audited or (lambda _key, _address: broker)
        self._run = clock.lease_id().hex()
        self.snapshots = Snapshots(clock, broker.max_views)
        self.stages = Stages(clock)
        self.spools = Spools(clock)
        self._restorer = Restorer(broker)
        # The other actions are methods of the broker.
        self._handlers: Final[dict[str, Callable[[Any], Any]]] = {
            "info": self._info,
            "filters": lambda options: broker.filters_at(options.offset),
            "commit_stages": lambda options: commit(
                broker, self.stages.get(options.stages), options.epoch
            ),
            "drop_stages": lambda options: self.stages.drop(options.stages),
            "commit_fill": self._commit_fill,
            "backfill_plan": self._backfill_plan,
            "watermarks": lambda _: msgspec.convert(
                broker.log_stats(), protocol.Watermarks, from_attributes=True
            ),
            "stats": self._stats,
        }
        super().__init__(
            location,
            auth_handler=AcceptedHandshakes(),
            middleware={"guard": FlightGuard(keys, metrics, clock)},
            **options,
        )

    # --- reading -------------------------------------------------------------------------

    def get_flight_info(
        self, context: fl.ServerCallContext, descriptor: fl.FlightDescriptor
    ) -> fl.FlightInfo:
        """Take a snapshot for a command and say how to read it."""
        principal = _principal(context)
        with translated(principal):
            command = decode(descriptor.command, protocol.ReadCommand, "command")
            made = self._snapshot(command.table, _cutting(command, principal), principal)
            table = made.tables[_ALONE]
            endpoints = [
                fl.FlightEndpoint(
                    encode(protocol.SnapshotTicket(snapshot=made.name, part=part)), []
                )
                for part in range(len(table.parts))
            ]
            facts = protocol.SnapshotFacts(*_facts(made))
            schema = table.selection.schema
            return fl.FlightInfo(schema, descriptor, endpoints, -1, -1, app_metadata=encode(facts))

    def _snapshot(
        self,
        table: str | None,
        cut: Callable[[PinnedStore], TableParts] | None,
        principal: Principal,
    ) -> Snapshot:
        """Pin the store for the reads of one key: of one table, or of any."""

        def make() -> Snapshot:
            marks = table in {"done", "failed", None}
            pinned = self._broker.view(stats=table in {"stats", None}, marks=marks)
            try:
                tables = {} if cut is None else {_ALONE: cut(pinned)}
                return Snapshot(pinned, principal.key_id, tables, held=table is None)
            except BaseException:
                pinned.close()
                raise

        return self.snapshots.add(make, principal.key_id)

    def _hold_snapshot(self, name: str | None, principal: Principal) -> protocol.HeldSnapshot:
        if name is None:
            held = self._snapshot(None, None, principal)
        else:
            held = self._owned(self.snapshots.find(name), principal)
        return protocol.HeldSnapshot(*_facts(held), held.name)

    def _drop_snapshot(self, name: str, principal: Principal) -> bool:
        self._owned(self.snapshots.find(name), principal)
        return self.snapshots.drop(name)

    @staticmethod
    def _owned(snapshot: Snapshot, principal: Principal) -> Snapshot:
        if snapshot.owner != principal.key_id:
            raise NotAllowed(f"key {principal.key_id!r} did not ask for this snapshot")
        return snapshot

    def get_schema(
        self,
        context: fl.ServerCallContext,  # noqa: ARG002
        descriptor: fl.FlightDescriptor,
    ) -> fl.SchemaResult:
        """Return the schema that a command would have, without a snapshot."""
        with translated():
            command = decode(descriptor.command, protocol.ReadCommand, "command")
            return fl.SchemaResult(_selection(command).schema)

    def _check_read(self, command: protocol.ReadCommand, principal: Principal) -> str:
        _cutting(command, principal)
        for queue in _queues(command) or ():
            self._broker.queue(queue)
        return self._run

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.FlightDataStream:
        """Read a part of a snapshot of the same key, or a stretch of a log."""
        principal = _principal(context)
        with translated(principal):
            wanted = decode(ticket.ticket, _TICKETS, "ticket")
            if isinstance(wanted, protocol.LogTicket):
                principal.check_any(_READ)
                check_count(wanted.begin, "begin", 0, limits.MAX_OFFSET)
                check_count(wanted.end, "end", wanted.begin, limits.MAX_OFFSET)
                return self._read_once(wanted, lambda pinned: _stretch(pinned, wanted), principal)
            if isinstance(wanted, protocol.HistoryTicket):
                _check_read(principal, {each.queue for each in wanted.stretches} or ["*"])
                check_stretches(wanted.stretches, wanted.of)
                return self._read_once(
                    wanted, lambda pinned: [[*pieces_of(pinned, wanted.stretches)]], principal
                )
            if isinstance(wanted, protocol.CopyTicket):
                principal.check("admin")
                self._owned(self.snapshots.find(wanted.snapshot), principal)
                return fl.GeneratorStream(COPY_SCHEMA, self._copy(wanted))
            snapshot, table = self._found(wanted, principal)
            # Again: the key may be allowed less than when it asked.
            _check_read(principal, table.queues)
            queues = getattr(wanted, "queues", None)
            batches = self._batches(snapshot.name, table, wanted.part, queues, temporary=False)
            return fl.GeneratorStream(table.selection.schema, batches)

    def _read_once(
        self,
        wanted: protocol.LogTicket | protocol.HistoryTicket,
        cut: Callable[[PinnedStore], list[Part]],
        principal: Principal,
    ) -> fl.FlightDataStream:
        """Read from a snapshot of its own what a client knows the numbers of."""
        selection = _selection(wanted)
        snapshot = self._snapshot(
            "log", lambda pinned: TableParts(cut(pinned), selection, ()), principal
        )
        table = snapshot.tables[_ALONE]
        # Read once, and of no use to anybody if its reader never comes.
        table.unread.clear()
        batches = self._batches(snapshot.name, table, 0, None, temporary=True)
        return fl.GeneratorStream(selection.schema, batches)

    def _found(
        self, wanted: protocol.SnapshotTicket | protocol.ActionTicket, principal: Principal
    ) -> tuple[Snapshot, TableParts]:
        """Return a table of a snapshot that has the part that a ticket wants."""
        if wanted.command is None:
            snapshot = self._owned(self.snapshots.find(wanted.snapshot), principal)
            table = snapshot.tables.get(_ALONE)
            if table is None:
                raise InvalidInput("the ticket has no command, which says what to read")
            check_count(wanted.part, "part", 0, len(table.parts) - 1)
        else:
            cut = _cutting(wanted.command, principal)
            # There may be fewer parts than were wanted: the others have no rows.
            check_count(wanted.part, "part", 0, wanted.command.partitions - 1)
            if isinstance(wanted, protocol.SnapshotTicket):
                snapshot = self.snapshots.find(wanted.snapshot)
            else:
                most = limits.MAX_STAGE_NAME_BYTES
                if max(len(wanted.frame), len(wanted.action)) > most:
                    raise InvalidInput(f"frame and action have at most {most} characters")
                snapshot = self.snapshots.of_action(
                    f"{principal.key_id} {wanted.frame}",
                    wanted.action,
                    wanted.part,
                    lambda: self._snapshot(wanted.command.table, None, principal),
                    sure=wanted.run == self._run or (wanted.part == 0 and not wanted.again),
                )
            self._owned(snapshot, principal)
            table = self.snapshots.table(snapshot, encode(wanted.command), cut)
        return snapshot, table

    def _batches(
        self,
        name: str,
        table: TableParts,
        part: int,
        queues: list[str] | None,
        *,
        temporary: bool,
    ) -> Iterator[pa.RecordBatch]:
        with translated():
            try:
                with self.snapshots.reading(name, table, part, queues) as snapshot:
                    pieces = of_queues(table.parts[part] if part < len(table.parts) else [], queues)
                    batches = read(snapshot.pinned, pieces, table.selection)
                    while (batch := next_batch(batches)) is not None:
                        yield batch
            finally:
                if temporary:
                    self.snapshots.drop(name)

    def _copy(self, wanted: protocol.CopyTicket) -> Iterator[pa.RecordBatch]:
        with translated(), self.snapshots.reading(wanted.snapshot, None) as snapshot:
            batches = copy_batches(snapshot.pinned, wanted)
            while (batch := next_batch(batches)) is not None:
                yield batch

    # --- writing -------------------------------------------------------------------------

    def do_put(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.FlightMetadataWriter,
    ) -> None:
        """Publish, restore or stage a stream of batches."""
        principal = _principal(context)
        with translated(principal):
            command = decode(descriptor.command, PUTS, "command")
            if isinstance(command, protocol.PublishCommand):
                publisher = Publisher(self._broker, reader.schema, principal)
                if command.spool is not None:
                    batch = _only_batch(reader)
                    publisher.check(batch)
                    self.spools.add(command.spool, command.part, principal.key_id, batch)
                    writer.write(encode({"spooled": batch.num_rows}))
                    return
                for chunk in reader:
                    writer.write(encode(publisher.publish(chunk.data)))
                return
            principal.check("admin", _touched(command))
            if isinstance(command, protocol.RestoreCommand):
                writer.write(encode(self._restorer.restore(command, reader, writer.write)))
                return
            stage = self.stages.receive(command, reader)
            if isinstance(command, protocol.FillStage):
                stage.filter = self._broker.queue(command.queue).filter
            self.stages.add(stage)
            self.stages.assign(self._broker)
            writer.write(encode({"staged": stage.rows}))

    def _publish_part(
        self, options: protocol.PublishPart, principal: Principal
    ) -> protocol.Published:
        def publish(batch: pa.RecordBatch) -> protocol.Published:
            return Publisher(self._broker, batch.schema, principal).publish(batch)

        return self.spools.publish(options.spool, options.part, principal.key_id, publish)

    def _drop_spool(self, options: protocol.DropSpool, principal: Principal) -> bool:
        return self.spools.drop(options.spool, principal.key_id)

    # --- actions -------------------------------------------------------------------------

    def list_actions(
        self,
        context: fl.ServerCallContext,  # noqa: ARG002
    ) -> list[fl.ActionType]:
        """Name the actions."""
        return [fl.ActionType(name, action.text) for name, action in ACTIONS.items()]

    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> list[fl.Result]:
        """Do an action and answer with one JSON value."""
        call = _call(context)
        with translated(call.principal):
            name = action.type
            known = ACTIONS.get(name)
            if known is None:
                raise InvalidInput(f"no action {name!r:.100}; there are {', '.join(ACTIONS)}")
            call.operation = name
            call.request = options = decode(action.body.to_pybytes(), known.options, name)
            answer: Any
            if name in _CHECKED_INSIDE:
                answer = getattr(self, f"_{name}")(options, call.principal)
                return [fl.Result(encode(answer if known.field is None else {known.field: answer}))]
            call.principal.check_any(_READ if known.reads else ("admin",), _touched(options))
            if name in {"hold_snapshot", "drop_snapshot"}:
                answer = getattr(self, f"_{name}")(options.snapshot, call.principal)
            elif name in self._handlers:
                answer = self._handlers[name](options)
            else:
                broker = self._audited(call.principal.key_id, context.peer())
                answer = getattr(broker, name)(**msgspec.structs.asdict(options))
            return [fl.Result(encode(answer if known.field is None else {known.field: answer}))]

    def _info(self, _: Any) -> protocol.ServerInfo:
        from penstock import __version__  # noqa: PLC0415 - the package is complete by now

        info = self._broker.info()
        return protocol.ServerInfo(
            __version__, info.store_id, info.design, info.routing, protocol.PROTOCOL, self._run
        )

    def _history_ends(self, options: Any, principal: Principal) -> protocol.HistoryEnds:
        queues = _queues(options)
        _check_read(principal, queues or ["*"])
        check_optional(options.since_ms, "since_ms", 0, limits.MAX_OFFSET)
        with self._broker.view() as pinned:
            return ends_of(pinned, queues, options.since_ms)

    def _check_history(self, options: Any, principal: Principal) -> bool:
        _check_read(principal, {each.queue for each in options.stretches} or ["*"])
        check_stretches(options.stretches)
        with self._broker.view(marks=False) as pinned:
            return all(pieces_of(pinned, options.stretches))

    def _commit_fill(self, options: protocol.CommitFill) -> protocol.FilledCounts:
        found = self.stages.get(options.stages)
        if found and all(stage.committed for stage in found):
            return protocol.FilledCounts(0, 0, 0)
        offsets = fill_offsets(found, options)
        # Without a filter in the options, the one of the time of staging is meant.
        text = options.filter or next((stage.filter for stage in found), None)
        filled = self._broker.fill(options.queue, options.begin, options.end, offsets, filter=text)
        for stage in found:
            stage.clear()
        return protocol.FilledCounts(filled.added, filled.already, filled.missing)

    def _backfill_plan(self, options: Any) -> BackfillPlan:
        from_: Any = "earliest" if options.from_ is None else options.from_
        if options.from_time_ms is not None:
            if options.from_ is not None:
                raise InvalidInput("give 'from' or 'from_time_ms', not both")
            check_count(options.from_time_ms, "from_time_ms", 0, limits.MAX_DURATION_MS)
            from_ = datetime.fromtimestamp(options.from_time_ms / 1000, UTC)
        return self._broker.backfill_plan(
            options.queue, from_=from_, to=options.to, archived=options.archived
        )

    def _stats(self, _: Any) -> protocol.Stats:
        with self._broker.view(stats=True, marks=False) as pinned:
            return protocol.Stats(list(pinned.stats), pinned.totals, pinned.log_stats)


def _call(context: fl.ServerCallContext) -> FlightCall:
    call: FlightCall = context.get_middleware("guard")
    # As gRPC writes it: ipv4:127.0.0.1:8080, or ipv6:%5B::1%5D:8080.
    call.address = unquote(context.peer().partition(":")[2])
    return call


def _principal(context: fl.ServerCallContext) -> Principal:
    return _call(context).principal


def _only_batch(reader: fl.MetadataRecordBatchReader) -> pa.RecordBatch:
    """Read a part of a spool."""
    batches = [chunk.data for chunk in islice(reader, 2)]
    if len(batches) != 1 or not 0 < batches[0].num_rows <= limits.MAX_PUT_CHUNK_MESSAGES:
        raise InvalidInput(
            f"a part of a spool is one batch of 1 to {limits.MAX_PUT_CHUNK_MESSAGES} rows"
        )
    return batches[0]


def _facts(snapshot: Snapshot) -> tuple[int, int, int, str]:
    pinned, stats = snapshot.pinned, snapshot.pinned.log_stats
    return pinned.at_ms, stats.end, stats.earliest, pinned.store_id


def _queues(command: Any) -> Sequence[str] | None:
    return [command.queue] if isinstance(command.queue, str) else command.queue


def _cutting(
    command: protocol.ReadCommand, principal: Principal
) -> Callable[[PinnedStore], TableParts]:
    """Check a command; return the function that cuts its table into parts."""
    queues = _queues(command)
    shown = queues if queues and command.table in _BY_QUEUE else ["*"]
    _check_read(principal, shown)
    check_count(command.partitions, "partitions", 1, limits.MAX_PARTITIONS)
    for name, value in (("begin", command.begin), ("end", command.end)):
        if value is not None:
            check_count(value, name, 0, limits.MAX_OFFSET)
    selection = _selection(command)

    def cut(pinned: PinnedStore) -> TableParts:
        parts = partition(
            pinned,
            command.table,
            command.partitions,
            queues=queues,
            begin=command.begin,
            end=command.end,
            logs=command.logs,
            where=selection.where,
        )
        return TableParts(parts, selection, shown)

    return cut


def _check_read(principal: Principal, queues: Iterable[str]) -> None:
    for queue in queues:
        principal.check_any(_READ, queue)


def _touched(command: Any) -> str | None:
    """Return the queue that a command is about; None if it concerns all of them."""
    return None if isinstance(command, _FILLS) else getattr(command, "queue", None)


def _selection(
    command: protocol.ReadCommand | protocol.LogTicket | protocol.HistoryTicket,
) -> Selection:
    table = command.table if isinstance(command, protocol.ReadCommand) else "log"
    table = command.of if isinstance(command, protocol.HistoryTicket) else table
    return select(
        table,
        payload=command.payload,
        columns=command.columns,
        filter_text=command.filter,
        where=command.where,
    )


def _stretch(pinned: PinnedStore, ticket: protocol.LogTicket) -> list[Part]:
    """Refuse a stretch that can't be read whole: rows must not be missed without a word."""
    stats = pinned.log_stats
    if ticket.log not in stats.cursors:
        raise InvalidInput(f"no log {ticket.log}; there are logs 0 to {max(stats.cursors)}")
    if max(ticket.begin, 1) < min(stats.earliest, ticket.end):
        raise InvalidInput(
            f"offsets from {ticket.begin} on were asked for; log {ticket.log} is kept from offset "
            f"{stats.earliest} on"
        )
    if ticket.end > stats.end:
        raise InvalidInput(
            f"offsets up to {ticket.end} were asked for; log {ticket.log} ends at {stats.end}"
        )
    return [[Piece(None, None, ticket.begin, ticket.end, ticket.log)]]
