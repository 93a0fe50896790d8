"""A client of the Flight protocol: every command and action as a typed method.

:class:`FlightStore` holds only a :class:`~penstock.flight.location.Location`, so that it can be
pickled and sent to executors; the connection is made when it is first used, one per process. Needs
pyarrow.
"""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as fl

from penstock import limits
from penstock.clock import SystemClock
from penstock.errors import ServerBusy, ServerUnreachable
from penstock.flight import protocol
from penstock.flight.location import TURN_SECONDS, locate, reached, tls_trouble, turns
from penstock.flight.protocol import MATCHES, OFFSETS, Actions, Published, SnapshotFacts
from penstock.store.filling import Filled
from penstock.store.transfer import CopyPage, CopyStart
from penstock.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from penstock.addresses import Address

_T = TypeVar("_T")
# Waits between the tries of a call, while no server answers or it is busy; the last one repeats.
BACKOFF_MS: Final = (100, 200, 400, 800, 1_600, 3_200)
_SILENT: Final = ("Detail: TimedOut", "Detail: Unavailable", "Detail: Cancelled")
# How often a read of the log goes on after the server went away, without a row in between.
_TRIES: Final = 4
_clock: Final = SystemClock()
_clients: Final[dict[tuple[Any, ...], fl.FlightClient]] = {}
_clients_lock: Final = threading.Lock()


class ReadPlan(NamedTuple):
    """How to read a table: its schema, and a ticket for each part."""

    schema: pa.Schema
    tickets: list[bytes]
    facts: SnapshotFacts


class FlightStore(Actions):
    """A store behind a Flight server, such as ``grpc://127.0.0.1:8815``.

    Calls that change nothing, or may be made twice, are tried again for some seconds while the
    server can't be reached, or for ``retry_ms`` if it has been reached before; then
    :class:`~penstock.errors.ServerUnreachable` says so. Any call that finds the server busy is
    tried again as long; then :class:`~penstock.errors.ServerBusy` says so.
    No call waits for ever for a server that is silent: the bounds are in :mod:`penstock.limits`.
    Penstock's errors come back with their own types.
    """

    def __init__(self, location: str, **access: Any) -> None:
        """Name a server; ``token``, ``ca``, ``retry_ms`` … as :func:`locate` has them."""
        self.location = locate(location, **access)

    def briefly(self) -> FlightStore:
        """Return a client that waits some seconds at most, for calls that tidy up after an error.

        That error has often waited for the same broker, which forgets by itself what nobody uses.
        """
        brief_ms = min(self.location.patience_ms, limits.MAX_UNREACHABLE_MS)
        return FlightStore(self.location, retry_ms=brief_ms)

    def __repr__(self) -> str:
        return f"FlightStore({str(self.location)!r})"

    def _identity(self) -> tuple[Any, ...]:
        return str(self.location), self.location.access

    # --- reading -------------------------------------------------------------------------

    def plan_read(self, table: str, **selection: Any) -> ReadPlan:
        """Ask the server for a snapshot; any process can read its tickets.

        ``selection``: the fields of :class:`~penstock.flight.protocol.ReadCommand`.
        """
        command = protocol.ReadCommand(table, **selection)
        info = self._again(
            lambda client: client.get_flight_info(
                _descriptor(command), self._call(limits.MAX_WORK_CALL_MS)
            )
        )
        facts = msgspec.json.decode(bytes(info.app_metadata), type=SnapshotFacts)
        return ReadPlan(info.schema, [each.ticket.ticket for each in info.endpoints], facts)

    def schema(self, table: str, **selection: Any) -> pa.Schema:
        """Return the schema of a table; ``payload`` and ``columns`` may be chosen."""
        command = protocol.ReadCommand(table, **selection)
        return self._again(
            lambda client: client.get_schema(_descriptor(command), self._call(limits.MAX_CALL_MS))
        ).schema

    def read(
        self, ticket: bytes | msgspec.Struct, *, idle_ms: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of a ticket, a batch at a time, each within ``idle_ms``.

        Any process can make tickets: :mod:`penstock.flight.protocol` has them.
        """
        idle_ms = idle_ms or limits.MAX_WORK_CALL_MS
        body = ticket if isinstance(ticket, bytes) else protocol.encode(ticket)
        # A deadline would end the whole stream, however well it flows.
        options = self._call(None)
        reader = self._again(
            lambda client: _within(
                idle_ms,
                lambda: client.do_get(fl.Ticket(body), options),
                lambda opening: opening.add_done_callback(_cancel_late),
            )
        )
        while True:
            with _translated(self.location):
                chunk = _within(idle_ms, lambda: next(reader, None), lambda _: reader.cancel())
            if chunk is None:
                return
            yield chunk.data

    def read_table(self, table: str, **selection: Any) -> pa.Table:
        """Read a whole table, as :meth:`plan_read` selects it."""
        plan = self.plan_read(table, **selection)
        batches = [batch for ticket in plan.tickets for batch in self.read(ticket)]
        return pa.Table.from_batches(batches, plan.schema)

    def read_log(
        self, log: int, begin: int, end: int, *, columns: Sequence[str], **selection: Any
    ) -> Iterator[pa.RecordBatch]:
        """Read [begin, end) of a log, over restarts of the server if ``offset`` is read too.

        It goes on after the last offset that came. ``selection``: payload, filter and where.
        """
        tries = 0
        # A filter may pass over much of the log before it finds a row.
        filtered = any(selection.get(name) is not None for name in ("filter", "where"))
        idle_ms = limits.MAX_WORK_CALL_MS if filtered else limits.MAX_READ_IDLE_MS
        while True:
            ticket = protocol.LogTicket(log, begin, end, columns=columns, **selection)
            try:
                for batch in self.read(ticket, idle_ms=idle_ms):
                    if batch.num_rows:
                        yield batch
                        if "offset" in columns:
                            begin, tries = batch.column("offset")[-1].as_py() + 1, 0
            except (ServerBusy, ServerUnreachable):
                tries += 1
                if "offset" not in columns or tries > _TRIES:
                    raise
                self.info()
            else:
                return

    def queues(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Ask which queues there are, and when each was made; one that is not there is an error."""
        found = self.read_table("queues", queue=names, columns=["name", "created_at_ms"])
        return {row["name"]: row["created_at_ms"] for row in found.to_pylist()}

    # --- writing -------------------------------------------------------------------------

    def publish(self, batches: Iterable[pa.RecordBatch], *, again: bool = False) -> Published:
        """Publish rows; without dedup ids a call that failed may have published some of them.

        With dedup ids in all rows ``again`` may be set: then rows whose answer got lost are sent
        again, and the server counts those that had come through as duplicates.
        """
        published = duplicates = 0
        for batch in _portions(batches):
            command = protocol.PublishCommand(before=published)
            said = self._put(command, [batch], batch.schema, again=again)
            one = msgspec.json.decode(said, type=Published)
            published, duplicates = published + one.published, duplicates + one.duplicates
        return Published(published, duplicates)

    def spool(self, spool: str, part: str, batches: Iterable[pa.RecordBatch]) -> list[str]:
        """Send rows into a spool; return the names of its parts, which begin with ``part``.

        The server has checked them, and publishes none before ``publish_part`` names it.
        """
        parts = []
        for number, batch in enumerate(_portions(batches)):
            parts.append(f"{part}-{number}")
            self._put(protocol.PublishCommand(spool, parts[-1]), [batch], batch.schema)
        return parts

    def stage(self, stage: str, batches: Iterable[pa.RecordBatch], **stretch: Any) -> None:
        """Stage all assignments (offset, queue) of a stretch of a log.

        ``stretch``: the other fields of :class:`~penstock.flight.protocol.StageCommand`, but for
        ``rows``.
        """
        rows = list(batches)
        count = sum(each.num_rows for each in rows)
        self._put(protocol.StageCommand(stage, rows=count, **stretch), rows, MATCHES)

    def fill(
        self, batches: Iterable[pa.RecordBatch], schema: pa.Schema = OFFSETS, **stretch: Any
    ) -> Filled:
        """Put all messages of a stretch that its filter wants into a queue, ascending.

        The schema says whether they are messages of the log or archived ones (``ARCHIVED``).
        ``stretch``: the fields of :class:`~penstock.flight.protocol.FillCommand`, but for
        ``rows``.
        """
        rows = list(batches)
        count = sum(each.num_rows for each in rows)
        said = self._put(protocol.FillCommand(rows=count, **stretch), rows, schema)
        return msgspec.json.decode(said, type=Filled)

    # --- calls ---------------------------------------------------------------------------

    def call_action(self, action: protocol.Action[Any, Any], body: bytes) -> bytes:
        """Call an action; the methods of :class:`~penstock.flight.protocol.Actions` do."""

        def call(client: fl.FlightClient) -> bytes:
            within = self._call(getattr(limits, action.limit))
            (result,) = client.do_action(fl.Action(action.name, body), within)
            answer: bytes = result.body.to_pybytes()
            return answer

        return self._again(call, again=action.again)

    def _put(
        self,
        command: msgspec.Struct,
        batches: Sequence[pa.RecordBatch],
        schema: pa.Schema,
        *,
        again: bool = True,
    ) -> bytes:
        """Send batches, again if need be; return the server's last answer."""
        limit = (
            limits.MAX_BULK_CALL_MS
            if isinstance(command, protocol.FillCommand)
            else limits.MAX_WORK_CALL_MS
        )

        def call(client: fl.FlightClient) -> bytes:
            writer, reader = client.do_put(_descriptor(command), schema, self._call(limit))
            answer = b""
            try:
                for batch in batches:
                    writer.write_batch(batch)
                writer.done_writing()
                while (said := reader.read()) is not None:
                    answer = said.to_pybytes()
            finally:
                # An error of the server shows itself here, whatever went wrong before.
                writer.close()
            return answer

        return self._again(call, again=again)

    def _again(self, call: Callable[[fl.FlightClient], _T], *, again: bool = True) -> _T:
        """Make a call; one that may be repeated, until a server answers or patience is over.

        One that finds the server busy has changed nothing, and is repeated whatever it is.
        """
        started_ms, waits = _clock.now_ms(), chain(BACKOFF_MS, repeat(BACKOFF_MS[-1]))
        addresses, tries, hopeless = self.location.addresses, 0, 0
        failures: dict[Address, ServerUnreachable] = {}
        troubles: dict[Address, str] = {}
        while True:
            address, sent = addresses[turns.get(self.location, 0) % len(addresses)], False
            try:
                client = self._connected(address)
                sent = True
                with _translated(self._place(address)):
                    answer = call(client)
            except ServerBusy:
                reached.add(self.location)
                wait_ms = next(waits)
                if _clock.now_ms() + wait_ms > started_ms + self.location.patience_ms:
                    raise
                _pause(wait_ms)
                continue
            except ServerUnreachable as error:
                failures[address] = error
            else:
                reached.add(self.location)
                return answer
            # The next try connects anew; of several addresses, to the next.
            self._leave(address)
            tries += 1
            if address not in troubles:
                troubles[address], certain = tls_trouble(self.location, address)
                hopeless += certain
            if troubles[address]:
                failures[address] = ServerUnreachable(troubles[address])
            if (sent and not again) or hopeless == len(addresses):
                raise ServerUnreachable("; ".join(map(str, failures.values())))
            if tries % len(addresses):
                continue
            wait_ms = next(waits)
            late = _clock.now_ms() + wait_ms > started_ms + self.location.patience_ms
            # A connection that has gone silent deserves one new one, whatever it has cost.
            if not again or (late and tries > len(addresses)):
                raise ServerUnreachable("; ".join(map(str, failures.values())))
            _pause(wait_ms)

    def _place(self, address: Address) -> str:
        return f"{self.location.partition('://')[0]}://{address}"

    def _leave(self, address: Address) -> None:
        """Forget the connection to an address, and go to the next."""
        with _clients_lock:
            _clients.pop((os.getpid(), *self._identity(), address), None)
            turns[self.location] = self.location.addresses.index(address) + 1

    def _connected(self, address: Address) -> fl.FlightClient:
        """Return this process's connection to a server."""
        # A forked worker must not use its parent's connection, nor one key another's.
        key = (os.getpid(), *self._identity(), address)
        with _clients_lock:
            known = _clients.get(key)
        if known is not None:
            return known
        if len(self.location.addresses) > 1:
            # gRPC waits long for a host that is silent, and does not tell whether it sent a call.
            try:
                socket.create_connection(address, TURN_SECONDS).close()
            except (OSError, UnicodeError) as error:
                why = getattr(error, "strerror", None) or error
                raise ServerUnreachable(f"no server at {self._place(address)}: {why}") from None
        _, ca, certificate, private_key = self.location.access
        options = {"tls_root_certs": ca} if ca else {}
        if certificate:
            options |= {"cert_chain": certificate, "private_key": private_key}
        with _clients_lock:
            if key not in _clients:
                _clients[key] = fl.FlightClient(self._place(address), **options)
            return _clients[key]

    def _call(self, timeout_ms: int | None) -> fl.FlightCallOptions:
        """Return the options of a call: a deadline, if it has one, protocol and the key's token."""
        token = self.location.access[0]
        headers = [(protocol.PROTOCOL_HEADER.encode(), str(protocol.PROTOCOL).encode())]
        if token:
            headers.append((b"authorization", f"Bearer {token}".encode()))
        timeout = None if timeout_ms is None else timeout_ms / 1000
        return fl.FlightCallOptions(timeout=timeout, headers=headers)


def _pause(wait_ms: int) -> None:
    _clock.wait(Waiter(), int(wait_ms * (0.75 + _clock.random() / 2)))


def _within(idle_ms: int, call: Callable[[], _T], give_up: Callable[[Future[_T]], object]) -> _T:
    """Make a call of a read, in another thread: no deadline ends it, and it may be silent."""
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="penstock-read", daemon=True).start()
    try:
        return answer.result(idle_ms / 1000)
    except TimeoutError:
        give_up(answer)
        raise fl.FlightTimedOutError(f"a read brought nothing for {idle_ms} ms") from None


def _cancel_late(opening: Future[fl.FlightStreamReader]) -> None:
    if opening.exception() is None:
        opening.result().cancel()


def _portions(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Cut batches to the size of one call: each call has a deadline, and may be repeated."""
    for batch in batches:
        large = batch.nbytes // limits.MAX_PUT_CHUNK_BYTES + 1
        step = max(1, min(limits.MAX_PUT_CHUNK_MESSAGES, batch.num_rows // large))
        for begin in range(0, batch.num_rows, step):
            yield batch.slice(begin, step)


class RouteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far the log is routed; ``lag`` counts offsets that are left, by log."""

    routing: str
    epoch: int
    cursors: dict[int, int]
    routed_up_to: int
    end: int
    lag: dict[int, int]

    @property
    def behind(self) -> int:
        """Offsets that the slowest log has still to be routed."""
        return max(self.lag.values(), default=0)


def route_status(
    location: str, *, token: str | None = None, ca: str | Path | None = None
) -> RouteStatus:
    """Return progress and lag of whatever routes the store; asks the broker, not Spark.

    A store that routes inline is never behind: its cursors are where its log ends.

    >>> route_status("grpc://127.0.0.1:8815").behind    # doctest: +SKIP
    0
    """
    log = FlightStore(location, token=token, ca=ca).log_stats()
    inline = log.routing == "inline"
    cursors = dict.fromkeys(log.cursors, log.end) if inline else log.cursors
    return RouteStatus(
        routing=log.routing,
        epoch=0 if inline else log.epoch,
        cursors=cursors,
        routed_up_to=log.end if inline else log.routed_up_to,
        end=log.end,
        lag={number: max(0, log.end - cursor) for number, cursor in cursors.items()},
    )


class ServedSource:
    """A store that a server reads, as of the moment at which it was asked: the source of a copy."""

    def __init__(self, client: FlightStore, snapshot: str) -> None:
        self._client, self._snapshot = client, snapshot
        (start,) = self._parts()
        assert isinstance(start, CopyStart)
        self.start = start

    @classmethod
    @contextmanager
    def hold(cls, location: str) -> Iterator[ServedSource]:
        """Ask a server to hold a snapshot meanwhile."""
        client = FlightStore(location)
        held = client.hold_snapshot()
        try:
            yield cls(client, held.snapshot)
        finally:
            client.drop_snapshot(held.snapshot)

    def pages(self, section: int = 0, rows: int = 0) -> Iterator[CopyPage]:
        """Read pages from a row of a section on."""
        for part in self._parts(section=section, rows=rows, at_ms=self.start.at_ms):
            if isinstance(part, CopyPage):
                yield part

    def _parts(self, **wanted: Any) -> Iterator[CopyStart | CopyPage]:
        for batch in self._client.read(protocol.CopyTicket(self._snapshot, **wanted)):
            for part in batch.column("part"):
                yield msgspec.msgpack.decode(part.as_py(), type=CopyStart | CopyPage)


def _descriptor(command: msgspec.Struct) -> fl.FlightDescriptor:
    return fl.FlightDescriptor.for_command(protocol.encode(command))


@contextmanager
def _translated(location: str) -> Iterator[None]:
    """Raise a server's error as the exception that it was, and silence as ServerUnreachable."""
    try:
        yield
    except (fl.FlightError, pa.ArrowException, OSError) as error:
        extra: Any = getattr(error, "extra_info", None)
        ours = protocol.revive(extra)
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
