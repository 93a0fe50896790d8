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
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.flight as fl

from penstock import limits
from penstock.errors import InvalidInput, NotAllowed, PenstockError
from penstock.flight import protocol
from penstock.flight.protocol import ACTIONS, PUTS, decode, describe, encode
from penstock.flight.snapshots import (
    Piece,
    Snapshot,
    Snapshots,
    TableParts,
    check_stretches,
    history_ends,
    history_pieces,
    of_queues,
    partition,
)
from penstock.flight.spools import Spools
from penstock.flight.tables import Selection, read, select
from penstock.flight.writes import Filler, Publisher, Stages, commit
from penstock.server.security import told
from penstock.store.transfer import read_pages, read_start
from penstock.validation import check_count, check_optional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.flight.listener import FlightCall
    from penstock.model import LiveFilters
    from penstock.server.security import Principal
    from penstock.store.snapshot import PinnedStore
    from penstock.store.transfer import CopyPage, CopyStart

log = logging.getLogger(__name__)

COPY_SCHEMA: Final = pa.schema([pa.field("part", pa.binary(), nullable=False)])

_READ: Final = ("consume", "admin")
_TICKETS: Final = (
    protocol.SnapshotTicket
    | protocol.ActionTicket
    | protocol.LogTicket
    | protocol.HistoryTicket
    | protocol.CopyTicket
)
# Tables of one queue's messages; the others show rows of all queues.
_BY_QUEUE: Final = {"active", "done", "failed", "attempts", "groups"}
# Actions that check the key themselves: by its queues, or as the one that made the spool.
_CHECKED_INSIDE: Final = {"check_read", "history_ends", "publish_part", "drop_spool"}

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
        audited: Callable[[str, str], Broker] | None,
        **options: Any,
    ) -> None:
        self._broker = broker
        # Gives the broker to a key at an address: one whose verbs are recorded.
        self._audited = audited or (lambda _key, _address: broker)
        self._run = clock.lease_id().hex()
        self.snapshots = Snapshots(clock, broker.max_views)
        self.stages = Stages(clock)
        self.spools = Spools(clock)
        self._filler = Filler(broker)
        super().__init__(location, **options)

    # --- reading -------------------------------------------------------------------------

    def get_flight_info(
        self, context: fl.ServerCallContext, descriptor: fl.FlightDescriptor
    ) -> fl.FlightInfo:
        """Take a snapshot for a command and say how to read it."""
        call = _call(context)
        with translated(call.principal):
            command = decode(descriptor.command, protocol.ReadCommand, "command")
            key = encode(command)
            made = self._snapshot(command.table, call, _cutting(command, call.principal), key)
            table = made.tables[key]
            endpoints = [
                fl.FlightEndpoint(encode(protocol.SnapshotTicket(made.name, part, command)), [])
                for part in range(len(table.parts))
            ]
            facts = protocol.SnapshotFacts(*_facts(made))
            schema = table.selection.schema
            return fl.FlightInfo(schema, descriptor, endpoints, -1, -1, app_metadata=encode(facts))

    def _snapshot(
        self,
        table: str | None,
        call: FlightCall,
        cut: Callable[[PinnedStore], TableParts] | None = None,
        key: bytes = b"",
    ) -> Snapshot:
        """Pin the store for the reads of one key: of a table, or of any; cut the table at once."""

        def make() -> Snapshot:
            marks = table in {"done", "failed", None}
            pinned = self._broker.view(stats=table in {"stats", None}, marks=marks)
            try:
                tables = {} if cut is None else {key: cut(pinned)}
                return Snapshot(pinned, call.principal.key_id, tables, held=table is None)
            except BaseException:
                pinned.close()
                raise

        return self.snapshots.add(make, call.holder)

    def _hold_snapshot(self, options: Any, call: FlightCall) -> protocol.HeldSnapshot:
        if options.snapshot is None:
            held = self._snapshot(None, call)
        else:
            held = self._owned(self.snapshots.find(options.snapshot), call.principal)
        return protocol.HeldSnapshot(*_facts(held), held.name)

    def _drop_snapshot(self, options: Any, call: FlightCall) -> bool:
        self._owned(self.snapshots.find(options.snapshot), call.principal)
        return self.snapshots.drop(options.snapshot)

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

    def _check_read(self, command: protocol.ReadCommand, call: FlightCall) -> str:
        _cutting(command, call.principal)
        for queue in _queues(command) or ():
            self._broker.queue(queue)
        return self._run

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.FlightDataStream:
        """Read a part of a snapshot of the same key, or a stretch of a log."""
        call = _call(context)
        with translated(call.principal):
            wanted = decode(ticket.ticket, _TICKETS, "ticket")
            if isinstance(wanted, protocol.CopyTicket):
                call.principal.check("admin")
                self._owned(self.snapshots.find(wanted.snapshot), call.principal)
                batches = self._stream(wanted.snapshot, lambda pinned: _copy(pinned, wanted))
                return fl.GeneratorStream(COPY_SCHEMA, batches)
            if isinstance(wanted, protocol.LogTicket | protocol.HistoryTicket):
                snapshot, table = self._numbered(wanted, call)
                batches = self._stream(
                    snapshot.name,
                    lambda pinned: read(pinned, table.parts[0], table.selection),
                    temporary=True,
                )
                return fl.GeneratorStream(table.selection.schema, batches)
            snapshot, table = self._found(wanted, call)
            queues = getattr(wanted, "queues", None)
            # There may be fewer parts than were wanted: the others have no rows.
            part = table.parts[wanted.part] if wanted.part < len(table.parts) else []
            batches = self._stream(
                snapshot.name,
                lambda pinned: read(pinned, of_queues(part, queues), table.selection),
                table=table if queues is None else None,
                part=wanted.part,
            )
            return fl.GeneratorStream(table.selection.schema, batches)

    def _numbered(
        self, wanted: protocol.LogTicket | protocol.HistoryTicket, call: FlightCall
    ) -> tuple[Snapshot, TableParts]:
        """Make a snapshot for rows whose numbers the client knows."""
        cut: Callable[[PinnedStore], Iterable[Piece]]
        if isinstance(wanted, protocol.LogTicket):
            call.principal.check_any(_READ)
            check_count(wanted.begin, "begin", 0, limits.MAX_OFFSET)
            check_count(wanted.end, "end", wanted.begin, limits.MAX_OFFSET)
            cut = partial(_stretch, ticket=wanted)
        else:
            _check_queues(call.principal, {each.queue for each in wanted.stretches} or ["*"])
            check_stretches(wanted.stretches, wanted.of)
            cut = partial(history_pieces, stretches=wanted.stretches)
        selection = _selection(wanted)
        snapshot = self._snapshot(
            "log", call, lambda pinned: TableParts([[*cut(pinned)]], selection)
        )
        (table,) = snapshot.tables.values()
        # Read once, and of no use to anybody if its reader never comes.
        table.unread.clear()
        return snapshot, table

    def _found(
        self, wanted: protocol.SnapshotTicket | protocol.ActionTicket, call: FlightCall
    ) -> tuple[Snapshot, TableParts]:
        """Return a table of a snapshot that has the part that a ticket wants."""
        # The key may be allowed less than when it asked.
        cut = _cutting(wanted.command, call.principal)
        check_count(wanted.part, "part", 0, wanted.command.partitions - 1)
        if isinstance(wanted, protocol.SnapshotTicket):
            snapshot = self.snapshots.find(wanted.snapshot)
        else:
            most = limits.MAX_STAGE_NAME_BYTES
            if max(len(wanted.frame), len(wanted.action)) > most:
                raise InvalidInput(f"frame and action have at most {most} characters")
            snapshot = self.snapshots.of_action(
                call.principal.key_id,
                wanted.frame,
                wanted.action,
                wanted.part,
                lambda: self._snapshot(wanted.command.table, call),
                sure=wanted.run == self._run or (wanted.part == 0 and not wanted.again),
            )
        self._owned(snapshot, call.principal)
        return snapshot, self.snapshots.table(snapshot, encode(wanted.command), cut)

    def _stream(
        self,
        name: str,
        read_rows: Callable[[PinnedStore], Iterator[pa.RecordBatch]],
        *,
        table: TableParts | None = None,
        part: int = 0,
        temporary: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """Read batches of a snapshot; a temporary one goes with the read."""
        with translated():
            try:
                yield from self.snapshots.read(name, read_rows, table, part)
            finally:
                if temporary:
                    self.snapshots.drop(name)

    # --- writing -------------------------------------------------------------------------

    def do_put(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.FlightMetadataWriter,
    ) -> None:
        """Publish, stage or fill in a stream of batches."""
        call = _call(context)
        principal = call.principal
        with translated(principal):
            command = decode(descriptor.command, PUTS, "command")
            if isinstance(command, protocol.PublishCommand):
                publisher = Publisher(self._broker, reader.schema, principal, command.before)
                if command.spool is None:
                    for chunk in reader:
                        writer.write(encode(publisher.publish(chunk.data)))
                    return
                batch = _only_batch(reader)
                publisher.check(batch)
                self.spools.add(command.spool, command.part, principal.key_id, call.holder, batch)
                writer.write(encode({"spooled": batch.num_rows}))
                return
            # A caller that says which messages a queue gets, whatever its filter, needs all queues.
            principal.check("admin")
            if isinstance(command, protocol.FillCommand):
                writer.write(encode(self._filler.fill(command, reader)))
                return
            stage = self.stages.receive(command, reader)
            self.stages.add(stage)
            self.stages.assign(self._broker)
            writer.write(encode({"staged": stage.rows}))

    def _publish_part(self, options: Any, call: FlightCall) -> protocol.Published:
        def publish(batch: pa.RecordBatch) -> protocol.Published:
            return Publisher(self._broker, batch.schema, call.principal).publish(batch)

        owner = call.principal.key_id
        return self.spools.publish(options.spool, options.part, owner, publish)

    def _drop_spool(self, options: Any, call: FlightCall) -> bool:
        return self.spools.drop(options.spool, call.principal.key_id)

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
            if name not in _CHECKED_INSIDE:
                # The queue that an action is about; None if it concerns all of them.
                queue = getattr(options, "queue", None)
                call.principal.check_any(_READ if known.reads else ("admin",), queue)
            # The service has methods for some of the actions; the others are the broker's.
            own = getattr(self, f"_{name}", None)
            answer: Any
            if own is not None:
                answer = own(options, call)
            else:
                broker = self._audited(call.principal.key_id, context.peer())
                answer = getattr(broker, name)(**msgspec.structs.asdict(options))
            return [fl.Result(encode(answer if known.field is None else {known.field: answer}))]

    def _info(self, _: Any, __: FlightCall) -> protocol.ServerInfo:
        from penstock import __version__  # noqa: PLC0415 - the package is complete by now

        info = self._broker.info()
        return protocol.ServerInfo(
            __version__, info.store_id, info.design, info.routing, protocol.PROTOCOL, self._run
        )

    def _history_ends(self, options: Any, call: FlightCall) -> protocol.HistoryEnds:
        queues = _queues(options)
        _check_queues(call.principal, queues or ["*"])
        check_optional(options.since_ms, "since_ms", 0, limits.MAX_OFFSET)
        with self._broker.view() as pinned:
            return history_ends(pinned, queues, options.since_ms)

    def _offset_at(self, options: Any, _: FlightCall) -> int:
        check_count(options.time_ms, "time_ms", 0, limits.MAX_OFFSET)
        # No message is later than that.
        time_ms = min(options.time_ms, limits.MAX_DURATION_MS)
        return self._broker.offset_at(datetime.fromtimestamp(time_ms / 1000, UTC))

    def _filters(self, options: Any, _: FlightCall) -> LiveFilters:
        return self._broker.filters_at(options.offset)

    def _commit_stages(self, options: Any, _: FlightCall) -> list[protocol.Committed]:
        done = commit(self._broker, self.stages.get(options.stages), options.epoch)
        self.stages.drop((), options.others)
        return done

    def _drop_stages(self, options: Any, _: FlightCall) -> int:
        return self.stages.drop(options.stages, options.others)

    def _stats(self, _: Any, __: FlightCall) -> protocol.Stats:
        with self._broker.view(stats=True, marks=False) as pinned:
            return protocol.Stats(list(pinned.stats), pinned.totals, pinned.log_stats)


def _call(context: fl.ServerCallContext) -> FlightCall:
    call: FlightCall = context.get_middleware("guard")
    # As gRPC writes it: ipv4:127.0.0.1:8080, or ipv6:%5B::1%5D:8080.
    call.address = unquote(context.peer().partition(":")[2])
    return call


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
    _check_queues(principal, shown)
    check_count(command.partitions, "partitions", 1, limits.MAX_PARTITIONS)
    selection = _selection(command)

    def cut(pinned: PinnedStore) -> TableParts:
        where, count = selection.where, command.partitions
        parts = partition(pinned, command.table, count, queues=queues, where=where)
        return TableParts(parts, selection)

    return cut


def _check_queues(principal: Principal, queues: Iterable[str]) -> None:
    for queue in queues:
        principal.check_any(_READ, queue)


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


def _stretch(pinned: PinnedStore, ticket: protocol.LogTicket) -> list[Piece]:
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
    return [Piece(None, None, ticket.begin, ticket.end, ticket.log)]


def _copy(pinned: PinnedStore, wanted: protocol.CopyTicket) -> Iterator[pa.RecordBatch]:
    """Read parts of a copy, one in each batch."""
    start = read_start(pinned)
    parts: Iterable[CopyStart | CopyPage] = ()
    if wanted.section is not None:
        resumed = msgspec.structs.replace(start, at_ms=wanted.at_ms or start.at_ms)
        parts = read_pages(pinned, resumed, wanted.section, wanted.rows)
    for part in chain([start], parts):
        yield pa.record_batch([[msgspec.msgpack.encode(part)]], schema=COPY_SCHEMA)
