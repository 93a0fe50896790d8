"""The Flight service over a broker; ``docs/flight.md`` describes the protocol.

gRPC calls the handlers from many threads at once. Snapshots, stages and the broker are thread-safe;
only making a snapshot holds the broker up, reading one never does.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.flight as fl

from penstock import limits
from penstock.errors import InvalidInput, NotAllowed, PenstockError
from penstock.flight import protocol, stages
from penstock.flight.auth import AcceptedHandshakes, FlightGuard
from penstock.flight.protocol import ACTIONS, PUTS, decode, encode
from penstock.flight.publish import Publisher, Restorer, receive_stage
from penstock.flight.snapshots import Numbers, Snapshot, Snapshots, of_queues, partition
from penstock.flight.tables import read, schema_of, select
from penstock.validation import check_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.flight.auth import FlightCall
    from penstock.model import BackfillPlan
    from penstock.server.metrics import Metrics
    from penstock.server.security import Keys, Principal
    from penstock.store.snapshot import PinnedStore

log = logging.getLogger(__name__)

_READ: Final = ("consume", "admin")
# Tables of one queue's messages; the others show rows of all queues.
_BY_QUEUE: Final = {"active", "done", "failed", "attempts", "groups"}
# Here the caller says which messages a queue gets, whatever its filter: as good as any filter.
_FILLS: Final = (protocol.FillStage, protocol.RestoreCommand, protocol.CommitFill)


@contextmanager
def translated() -> Iterator[None]:
    """Raise Penstock's errors as Flight's; others go to the log, without details to clients."""
    try:
        yield
    except PenstockError as error:
        raise fl.FlightServerError(*protocol.describe(error)) from None
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
        **options: Any,
    ) -> None:
        self._broker = broker
        self.snapshots = Snapshots(clock, broker.max_views)
        self.stages = stages.Stages(clock)
        self._restorer = Restorer(broker)
        # The other actions are methods of the broker.
        self._handlers: Final[dict[str, Callable[[Any], Any]]] = {
            "info": self._info,
            "filters": lambda options: broker.filters_at(options.offset),
            "commit_stages": self._commit_stages,
            "drop_stages": lambda options: self.stages.drop(options.stages),
            "commit_fill": self._commit_fill,
            "backfill_plan": self._backfill_plan,
            "watermarks": self._watermarks,
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
        with translated():
            command = decode(descriptor.command, protocol.ReadCommand, "command")
            principal = _principal(context)
            queues = [command.queue] if isinstance(command.queue, str) else command.queue
            shown = queues if queues and command.table in _BY_QUEUE else ["*"]
            _check_read(principal, shown)
            check_count(command.partitions, "partitions", 1, limits.MAX_PARTITIONS)
            for name, value in (("begin", command.begin), ("end", command.end)):
                if value is not None:
                    check_count(value, name, 0, limits.MAX_OFFSET)

            def make() -> Snapshot:
                table = command.table
                selection = select(
                    table,
                    payload=command.payload,
                    columns=command.columns,
                    filter_text=command.filter,
                )
                pinned = self._broker.view(
                    stats=table == "stats", marks=table in {"done", "failed"}
                )
                with _closed_on_error(pinned):
                    parts = partition(
                        pinned,
                        table,
                        command.partitions,
                        queues=queues,
                        begin=command.begin,
                        end=command.end,
                        logs=command.logs,
                    )
                return Snapshot(pinned, parts, selection, principal.key_id, shown)

            made = self.snapshots.add(make, principal.key_id)
            endpoints = [
                fl.FlightEndpoint(
                    encode(protocol.SnapshotTicket(snapshot=made.name, part=part)), []
                )
                for part in range(len(made.parts))
            ]
            stats = made.pinned.log_stats
            facts = protocol.SnapshotFacts(
                made.pinned.at_ms, stats.end, stats.earliest, made.pinned.store_id
            )
            schema = made.selection.schema
            return fl.FlightInfo(schema, descriptor, endpoints, -1, -1, app_metadata=encode(facts))

    def get_schema(
        self,
        context: fl.ServerCallContext,  # noqa: ARG002
        descriptor: fl.FlightDescriptor,
    ) -> fl.SchemaResult:
        """Return the schema that a command would have, without a snapshot."""
        with translated():
            command = decode(descriptor.command, protocol.ReadCommand, "command")
            return fl.SchemaResult(
                schema_of(command.table, payload=command.payload, columns=command.columns)
            )

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.FlightDataStream:
        """Read a part of a snapshot of the same key, or a stretch of a log."""
        with translated():
            principal = _principal(context)
            wanted = decode(ticket.ticket, protocol.SnapshotTicket | protocol.LogTicket, "ticket")
            if isinstance(wanted, protocol.LogTicket):
                principal.check_any(_READ)
                snapshot = self._log_snapshot(wanted, principal.key_id)
                batches = self._batches(snapshot.name, 0, None, temporary=True)
            else:
                snapshot = self.snapshots.find(wanted.snapshot, wanted.part)
                if snapshot.owner != principal.key_id:
                    raise NotAllowed(f"key {principal.key_id!r} did not ask for this snapshot")
                # Again: the key may be allowed less than when it asked.
                _check_read(principal, snapshot.queues)
                batches = self._batches(snapshot.name, wanted.part, wanted.queues, temporary=False)
            return fl.GeneratorStream(snapshot.selection.schema, batches)

    def _batches(
        self, name: str, part: int, queues: list[str] | None, *, temporary: bool
    ) -> Iterator[pa.RecordBatch]:
        with translated():
            try:
                with self.snapshots.reading(name, part, queues) as snapshot:
                    pieces = of_queues(snapshot.parts[part], queues)
                    yield from read(snapshot.pinned, pieces, snapshot.selection)
            finally:
                if temporary:
                    self.snapshots.drop(name)

    def _log_snapshot(self, ticket: protocol.LogTicket, owner: str) -> Snapshot:
        selection = select(
            "log", payload=ticket.payload, columns=ticket.columns, filter_text=ticket.filter
        )
        check_count(ticket.begin, "begin", 0, limits.MAX_OFFSET)
        check_count(ticket.end, "end", ticket.begin, limits.MAX_OFFSET)

        def make() -> Snapshot:
            pinned = self._broker.view(marks=False)
            with _closed_on_error(pinned):
                _check_stretch(pinned, ticket)
            stretch = Numbers(ticket.log, ticket.begin, ticket.end)
            snapshot = Snapshot(pinned, [[stretch]], selection, owner)
            # Read once, and of no use to anybody if its reader never came.
            snapshot.unread.clear()
            return snapshot

        return self.snapshots.add(make, owner)

    # --- writing -------------------------------------------------------------------------

    def do_put(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.FlightMetadataWriter,
    ) -> None:
        """Publish, restore or stage a stream of batches."""
        with translated():
            principal = _principal(context)
            command = decode(descriptor.command, PUTS, "command")
            if isinstance(command, protocol.PublishCommand):
                publisher = Publisher(self._broker, reader.schema, principal)
                for chunk in reader:
                    publisher.publish(chunk.data)
                    counts = protocol.Published(publisher.published, publisher.duplicates)
                    writer.write(encode(counts))
                return
            principal.check("admin", _touched(command))
            if isinstance(command, protocol.RestoreCommand):
                writer.write(encode(self._restorer.restore(command, reader, writer.write)))
                return
            stage = receive_stage(command, reader, self.stages.room())
            if isinstance(command, protocol.FillStage):
                stage.filter = self._broker.queue(command.queue).filter
            self.stages.add(stage)
            writer.write(encode({"staged": stage.rows}))

    # --- actions -------------------------------------------------------------------------

    def list_actions(
        self,
        context: fl.ServerCallContext,  # noqa: ARG002
    ) -> list[fl.ActionType]:
        """Name the actions."""
        return [fl.ActionType(name, action.text) for name, action in ACTIONS.items()]

    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> list[fl.Result]:
        """Do an action and answer with one JSON value."""
        with translated():
            name = action.type
            known = ACTIONS.get(name)
            if known is None:
                raise InvalidInput(f"no action {name!r:.100}; there are {', '.join(ACTIONS)}")
            call: FlightCall = context.get_middleware("guard")
            call.operation = name
            options = decode(action.body.to_pybytes(), known.options, name)
            call.principal.check_any(_READ if known.reads else ("admin",), _touched(options))
            if name in self._handlers:
                answer = self._handlers[name](options)
            else:
                answer = getattr(self._broker, name)(**msgspec.structs.asdict(options))
            return [fl.Result(encode(answer if known.field is None else {known.field: answer}))]

    def _info(self, _: Any) -> protocol.ServerInfo:
        from penstock import __version__  # noqa: PLC0415 - the package is complete by now

        info = self._broker.info()
        return protocol.ServerInfo(
            __version__, info.store_id, info.design, info.routing, protocol.PROTOCOL
        )

    def _commit_stages(self, options: Any) -> list[protocol.Committed]:
        found = self.stages.get(list(dict.fromkeys(options.stages)))
        return stages.commit(self._broker, found, options.epoch)

    def _commit_fill(self, options: protocol.CommitFill) -> protocol.FilledCounts:
        found = self.stages.get(list(dict.fromkeys(options.stages)))
        if found and all(stage.committed for stage in found):
            return protocol.FilledCounts(0, 0, 0)
        offsets = stages.fill_offsets(found, options)
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

    def _watermarks(self, _: Any) -> protocol.Watermarks:
        stats = self._broker.log_stats()
        return protocol.Watermarks(stats.cursors, stats.routed_up_to, stats.earliest, stats.end)

    def _stats(self, _: Any) -> protocol.Stats:
        with self._broker.view(stats=True, marks=False) as pinned:
            return protocol.Stats(list(pinned.stats), pinned.totals, pinned.log_stats)


def _principal(context: fl.ServerCallContext) -> Principal:
    call: FlightCall = context.get_middleware("guard")
    return call.principal


def _check_read(principal: Principal, queues: Iterable[str]) -> None:
    for queue in queues:
        principal.check_any(_READ, queue)


def _touched(command: Any) -> str | None:
    """Return the queue that a command is about; None if it concerns all of them."""
    return None if isinstance(command, _FILLS) else getattr(command, "queue", None)


@contextmanager
def _closed_on_error(pinned: PinnedStore) -> Iterator[None]:
    try:
        yield
    except BaseException:
        pinned.close()
        raise


def _check_stretch(pinned: PinnedStore, ticket: protocol.LogTicket) -> None:
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
