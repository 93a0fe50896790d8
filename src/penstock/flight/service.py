"""The Flight service over a broker; the protocol is described in ``docs/flight.md``.

gRPC calls the handlers from many threads at once. What they share (snapshots, stages, the broker)
is thread-safe; only making a snapshot holds the broker up, reading one never does.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.flight as fl

from penstock import limits
from penstock.errors import InvalidInput, PenstockError
from penstock.flight import partition, read, schema_of, select
from penstock.flight import protocol as wire
from penstock.flight import stages as staging
from penstock.flight.partitions import Numbers, of_queues
from penstock.flight.publish import Publisher
from penstock.flight.restore import Restorer
from penstock.flight.snapshots import Snapshot, Snapshots
from penstock.validation import check_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.store.plans import Filled
    from penstock.store.snapshot import PinnedStore

__all__ = ["PUTS", "FlightService", "translated"]

log = logging.getLogger(__name__)

PUTS: Final = wire.PublishCommand | wire.StageCommand | wire.FillStage | wire.RestoreCommand


class FlightService(fl.FlightServerBase):  # type: ignore[misc]
    """Serves a broker. It listens as soon as it is made."""

    def __init__(self, broker: Broker, location: str, clock: Clock, **options: Any) -> None:
        self._broker = broker
        self._clock = clock
        self.snapshots = Snapshots(clock, broker.max_views)
        self.stages = staging.Stages(clock)
        self._restorer = Restorer(broker)
        self._actions: Final[dict[str, tuple[type[Any], Callable[[Any], Any], str]]] = {
            "info": (wire.Nothing, self._info, "Which store this is."),
            "log_stats": (wire.Nothing, lambda _: broker.log_stats(), "The metadata log."),
            "route_plan": (wire.RoutePlanCommand, self._route_plan, "What to match next."),
            "filters": (wire.FilterCommand, self._filters, "The live filters at an offset."),
            "take_epoch": (wire.Nothing, self._take_epoch, "Fence earlier pipelines."),
            "commit_stages": (wire.CommitStages, self._commit_stages, "Assign what is staged."),
            "drop_stages": (wire.DropStages, self._drop_stages, "Forget stages."),
            "commit_fill": (wire.CommitFill, self._commit_fill, "Fill a queue from stages."),
            "backfill_plan": (wire.BackfillCommand, self._backfill_plan, "What is to be filled."),
            "redrive": (wire.RedriveCommand, self._redrive, "Make failed messages available."),
            "trim": (wire.TrimCommand, self._trim, "Remove old done or failed messages."),
            "collect": (wire.CollectCommand, self._collect, "Free payloads that nobody holds."),
            "watermarks": (wire.Nothing, self._watermarks, "How far the logs are routed."),
            "sweep": (wire.Nothing, lambda _: broker.sweep(), "Do what is due."),
            "stats": (wire.Nothing, self._stats, "Stats of every queue and the store."),
        }
        super().__init__(location, **options)

    # --- reading -------------------------------------------------------------------------

    def owner(self, context: fl.ServerCallContext) -> str:  # noqa: ARG002 - for keys
        """Name the key that a call's snapshots belong to; without keys all belong to everybody."""
        return ""

    def get_flight_info(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
    ) -> fl.FlightInfo:
        """Take a snapshot for a command and say how to read it."""
        with translated():
            command: wire.ReadCommand = wire.decode(
                descriptor.command or b"", wire.ReadCommand, "command"
            )
            check_count(command.partitions, "partitions", 1, limits.MAX_PARTITIONS)
            for name, value in (("begin", command.begin), ("end", command.end)):
                if value is not None:
                    check_count(value, name, 0, limits.MAX_OFFSET)
            made: list[Snapshot] = []

            owner = self.owner(context)

            def make() -> Snapshot:
                made.append(self._snapshot(command, owner))
                return made[0]

            name = self.snapshots.add(make, owner)
            snapshot = made[0]
            endpoints = [
                fl.FlightEndpoint(wire.encode(wire.SnapshotTicket(snapshot=name, part=part)), [])
                for part in range(len(snapshot.parts))
            ]
            facts = wire.encode(_facts(snapshot.pinned))
            schema = snapshot.selection.schema
            return fl.FlightInfo(schema, descriptor, endpoints, -1, -1, app_metadata=facts)

    def _snapshot(self, command: wire.ReadCommand, owner: str) -> Snapshot:
        selection = select(
            command.table,
            payload=command.payload,
            columns=command.columns,
            filter_text=command.filter,
        )
        queues = [command.queue] if isinstance(command.queue, str) else command.queue
        table = command.table
        pinned = self._broker.view(stats=table == "stats", marks=table in {"done", "failed"})
        try:
            parts = partition(
                pinned,
                command.table,
                command.partitions,
                queues=queues,
                begin=command.begin,
                end=command.end,
                logs=command.logs,
            )
        except BaseException:
            pinned.close()
            raise
        return Snapshot(pinned, parts, selection, owner)

    def get_schema(
        self,
        context: fl.ServerCallContext,  # noqa: ARG002
        descriptor: fl.FlightDescriptor,
    ) -> fl.SchemaResult:
        """Return the schema that a command would have, without a snapshot."""
        with translated():
            command = wire.decode(descriptor.command or b"", wire.ReadCommand, "command")
            return fl.SchemaResult(
                schema_of(command.table, payload=command.payload, columns=command.columns)
            )

    def do_get(
        self,
        context: fl.ServerCallContext,
        ticket: fl.Ticket,
    ) -> fl.FlightDataStream:
        """Read a part of a snapshot, or a stretch of a log."""
        with translated():
            kind = wire.decode(ticket.ticket, wire.SnapshotTicket | wire.LogTicket, "ticket")
            if isinstance(kind, wire.LogTicket):
                name, part, queues = self._log_snapshot(kind, self.owner(context)), 0, None
            else:
                name, part, queues = kind.snapshot, kind.part, kind.queues
            schema = self.snapshots.find(name, part).selection.schema
            temporary = isinstance(kind, wire.LogTicket)
            batches = self._batches(name, part, queues, temporary=temporary)
            return fl.GeneratorStream(schema, batches)

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

    def _log_snapshot(self, ticket: wire.LogTicket, owner: str) -> str:
        selection = select(
            "log", payload=ticket.payload, columns=ticket.columns, filter_text=ticket.filter
        )
        check_count(ticket.begin, "begin", 0, limits.MAX_OFFSET)
        check_count(ticket.end, "end", ticket.begin, limits.MAX_OFFSET)

        def make() -> Snapshot:
            pinned = self._broker.view(marks=False)
            try:
                _check_stretch(pinned, ticket)
            except BaseException:
                pinned.close()
                raise
            stretch = Numbers(ticket.log, ticket.begin, ticket.end)
            snapshot = Snapshot(pinned, [[stretch]], selection, owner)
            # Read once, and of no use to anybody if its reader never came.
            snapshot.unread.clear()
            return snapshot

        return self.snapshots.add(make, owner)

    # --- writing -------------------------------------------------------------------------

    def publishing(self, context: fl.ServerCallContext) -> Any:  # noqa: ARG002
        """Give what a stream of messages is published through: the broker."""
        return self._broker

    def do_put(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.FlightMetadataWriter,
    ) -> None:
        """Publish, or stage, a stream of batches."""
        with translated():
            command = wire.decode(descriptor.command or b"", PUTS, "command")
            if isinstance(command, wire.PublishCommand):
                publisher = Publisher(self.publishing(context), reader.schema)
                for chunk in reader:
                    publisher.publish(chunk.data)
                    counts = {
                        "published": publisher.published,
                        "duplicates": publisher.duplicates,
                    }
                    writer.write(wire.encode(counts))
            elif isinstance(command, wire.RestoreCommand):
                done = self._restorer.restore(command, reader, writer.write)
                writer.write(wire.encode(_counts(done)))
            else:
                stage = staging.receive(command, reader, self.stages.room())
                if isinstance(command, wire.FillStage):
                    stage.filter = self._broker.queue(command.queue).filter
                self.stages.add(stage)
                writer.write(wire.encode({"staged": stage.rows}))

    # --- actions -------------------------------------------------------------------------

    def list_actions(
        self,
        context: fl.ServerCallContext,  # noqa: ARG002
    ) -> list[fl.ActionType]:
        """Name the actions."""
        return [fl.ActionType(name, text) for name, (_, _, text) in self._actions.items()]

    def do_action(
        self,
        context: fl.ServerCallContext,  # noqa: ARG002
        action: fl.Action,
    ) -> list[fl.Result]:
        """Do an action and answer with one JSON value."""
        with translated():
            known = self._actions.get(action.type)
            if known is None:
                raise InvalidInput(
                    f"no action {action.type!r:.100}; there are {', '.join(self._actions)}"
                )
            kind, act, _ = known
            answer = act(wire.decode(action.body.to_pybytes(), kind, action.type))
            return [fl.Result(wire.encode(answer))]

    def _info(self, _: wire.Nothing) -> dict[str, Any]:
        from penstock import __version__  # noqa: PLC0415 - the package is complete by now

        known = msgspec.to_builtins(self._broker.info())
        return {"version": __version__, "protocol": wire.PROTOCOL, **known}

    def _route_plan(self, command: wire.RoutePlanCommand) -> Any:
        return self._broker.route_plan(max_offsets=command.max_offsets)

    def _filters(self, command: wire.FilterCommand) -> Any:
        return self._broker.filters_at(command.offset)

    def _take_epoch(self, _: wire.Nothing) -> dict[str, int]:
        return {"epoch": self._broker.take_epoch()}

    def _commit_stages(self, command: wire.CommitStages) -> dict[str, Any]:
        stages = self.stages.get(list(dict.fromkeys(command.stages)))
        results = staging.commit(self._broker, stages, command.epoch)
        return {"results": [each._asdict() for each in results]}

    def _drop_stages(self, command: wire.DropStages) -> dict[str, int]:
        return {"dropped": self.stages.drop(command.stages)}

    def _commit_fill(self, command: wire.CommitFill) -> dict[str, int]:
        stages = self.stages.get(list(dict.fromkeys(command.stages)))
        if stages and all(stage.committed for stage in stages):
            return {"added": 0, "already": 0, "missing": 0}
        offsets = staging.fill_offsets(stages, command)
        # Who does not say what was matched by is taken to mean the filter of the time of staging.
        text = command.filter or next((stage.filter for stage in stages), None)
        filled = self._broker.fill(command.queue, command.begin, command.end, offsets, filter=text)
        for stage in stages:
            stage.clear()
        return _counts(filled)

    def _backfill_plan(self, command: wire.BackfillCommand) -> Any:
        from_: Any = "earliest" if command.from_ is None else command.from_
        if command.from_time_ms is not None:
            if command.from_ is not None:
                raise InvalidInput("give 'from' or 'from_time_ms', not both")
            check_count(command.from_time_ms, "from_time_ms", 0, limits.MAX_DURATION_MS)
            from_ = datetime.fromtimestamp(command.from_time_ms / 1000, UTC)
        return self._broker.backfill_plan(
            command.queue, from_=from_, to=command.to, archived=command.archived
        )

    def _redrive(self, command: wire.RedriveCommand) -> dict[str, int]:
        redriven = self._broker.redrive(
            command.queue, message_ids=command.message_ids, where=command.where
        )
        return {"redriven": redriven}

    def _trim(self, command: wire.TrimCommand) -> dict[str, int]:
        removed = self._broker.trim(
            command.queue,
            state=command.state,
            before=command.before,
            created_at_ms=command.created_at_ms,
        )
        return {"removed": removed}

    def _collect(self, command: wire.CollectCommand) -> Any:
        return self._broker.collect(command.message_ids, dry_run=command.dry_run)

    def _watermarks(self, _: wire.Nothing) -> dict[str, Any]:
        stats = self._broker.log_stats()
        return {
            "cursors": stats.cursors,
            "routed_up_to": stats.routed_up_to,
            "earliest": stats.earliest,
            "end": stats.end,
        }

    def _stats(self, _: wire.Nothing) -> dict[str, Any]:
        with self._broker.view(stats=True, marks=False) as pinned:
            return {
                "queues": pinned.stats,
                "store": pinned.totals,
                "log": pinned.log_stats,
            }


def _counts(filled: Filled) -> dict[str, int]:
    return {"added": filled.added, "already": filled.already, "missing": filled.missing}


def _facts(pinned: PinnedStore) -> dict[str, Any]:
    return {
        "at_ms": pinned.at_ms,
        "log_end": pinned.log_stats.end,
        "earliest": pinned.log_stats.earliest,
        "store_id": pinned.store_id,
    }


def _check_stretch(pinned: PinnedStore, ticket: wire.LogTicket) -> None:
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


class translated:  # noqa: N801 - reads as a clause
    """Turn Penstock's errors into Flight's; others are told of in the log, not to clients."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, PenstockError):
            text, extra = wire.describe(error)
            raise fl.FlightServerError(text, extra) from None
        if isinstance(error, Exception) and not isinstance(error, pa.ArrowException):
            log.error("a Flight call failed", exc_info=error)
            raise fl.FlightInternalError(f"{kind.__name__ if kind else ''}: {error}") from None
