"""Flight behind keys: who calls, what they may, and what is counted about it.

A call brings ``authorization: Bearer ID:SECRET`` (or Basic, as Flight clients log in). The
middleware finds out whose it is before anything is read; the service asks it before it acts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow.flight as fl

from penstock.errors import NotAllowed
from penstock.flight import protocol as wire
from penstock.flight.service import PUTS, FlightService, translated
from penstock.server.security import ANYONE, check_publish, token_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.model import Message
    from penstock.server.metrics import Metrics
    from penstock.server.security import Keys, Principal

__all__ = ["GuardedFlightService"]

_READ: Final = ("consume", "admin")
# Tables of one queue's messages; the others show what concerns all queues.
_BY_QUEUE: Final = {"active", "done", "failed", "attempts", "groups"}
# Actions that only look; all others change something.
_LOOKS: Final = {"info", "log_stats", "route_plan", "filters", "backfill_plan", "watermarks"}
_LOOKING: Final = {*_LOOKS, "stats"}
# Here the caller says which messages a queue gets, whatever its filter: as good as any filter.
_FILLS: Final = (wire.FillStage, wire.RestoreCommand, wire.CommitFill)


class Call(fl.ServerMiddleware):  # type: ignore[misc]
    """One call: who makes it, and what it turned out to be."""

    def __init__(self, guard: Guard, principal: Principal, operation: str, answer: str) -> None:
        self.principal = principal
        self.operation = operation
        self._guard = guard
        self._answer = answer
        self._begin = guard.clock.seconds()

    def sending_headers(self) -> dict[str, str]:
        """Answer a login with the token to use from then on."""
        return {"authorization": self._answer} if self._answer else {}

    def call_completed(self, exception: Exception | None) -> None:
        """Count the call."""
        if self._guard.metrics is not None:
            seconds = self._guard.clock.seconds() - self._begin
            self._guard.metrics.request(
                "flight", self.operation, seconds, _outcome(exception), self.principal.key_id
            )


class Guard(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Finds out who calls; a call without a key that is known goes no further."""

    def __init__(self, keys: Keys | None, metrics: Metrics | None, clock: Clock) -> None:
        self.keys = keys
        self.metrics = metrics
        self.clock = clock

    def start_call(self, info: fl.CallInfo, headers: dict[str, Any]) -> Call:
        """Look at the headers of a call."""
        operation = info.method.name.lower()
        if self.keys is None:
            return Call(self, ANYONE, operation, "")
        header = _header(headers)
        token = token_of(header)
        principal = self.keys.by_token(token) if token else None
        if principal is None:
            if self.metrics is not None:
                self.metrics.request("flight", operation, 0.0, NotAllowed.__name__)
            why = "the key is not known" if token else "it needs a key"
            error = NotAllowed(f"this server wants authorization: Bearer ID:SECRET; {why}")
            raise fl.FlightUnauthenticatedError(*wire.describe(error))
        login = bool(header) and header.lower().startswith("basic")
        return Call(self, principal, operation, f"Bearer {token}" if login else "")


def _header(headers: dict[str, Any]) -> str:
    for name, values in headers.items():
        if name.lower() == "authorization" and values:
            value = values[0]
            return value.decode("latin-1") if isinstance(value, bytes) else str(value)
    return ""


def _outcome(exception: Exception | None) -> str:
    if exception is None:
        return "ok"
    ours = wire.revive(getattr(exception, "extra_info", None))
    return type(exception if ours is None else ours).__name__


class Handshakes(fl.ServerAuthHandler):  # type: ignore[misc]
    """Lets Flight's own login through: the middleware has looked at its header."""

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        """Ask for nothing more."""

    def is_valid(self, token: bytes) -> bytes:  # noqa: ARG002 - Flight's signature
        """Know nobody by name."""
        return b""


class _Publishing:
    """A broker that one caller publishes through."""

    def __init__(self, broker: Broker, principal: Principal) -> None:
        self.log_stats = broker.log_stats
        self._broker = broker
        self._principal = principal

    def publish(self, messages: Sequence[Message]) -> list[int]:
        """Publish what the caller may."""
        check_publish(self._principal, messages)
        return self._broker.publish(messages)


class GuardedFlightService(FlightService):
    """The Flight service with permissions; see ``docs/server.md``."""

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
        super().__init__(
            broker,
            location,
            clock,
            auth_handler=Handshakes(),
            middleware={"guard": Guard(keys, metrics, clock)},
            **options,
        )

    def get_flight_info(
        self, context: fl.ServerCallContext, descriptor: fl.FlightDescriptor
    ) -> fl.FlightInfo:
        """Take a snapshot of what the caller may see."""
        principal = _principal(context)
        with translated():
            command = wire.decode(descriptor.command or b"", wire.ReadCommand, "command")
            queues = [command.queue] if isinstance(command.queue, str) else command.queue
            if command.table not in _BY_QUEUE or not queues:
                queues = ["*"]
            _check_each(principal, _READ, queues)
        info = super().get_flight_info(context, descriptor)
        for endpoint in info.endpoints:
            ticket = wire.decode(endpoint.ticket.ticket, wire.SnapshotTicket, "ticket")
            self.snapshots.find(ticket.snapshot, ticket.part).queues = queues
            break
        return info

    def owner(self, context: fl.ServerCallContext) -> str:
        """Name the key of the caller."""
        return _principal(context).key_id

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.FlightDataStream:
        """Read a snapshot of one's own, or a stretch of a log."""
        principal = _principal(context)
        with translated():
            kind = wire.decode(ticket.ticket, wire.SnapshotTicket | wire.LogTicket, "ticket")
            if isinstance(kind, wire.LogTicket):
                principal.check_any(_READ)
            else:
                snapshot = self.snapshots.find(kind.snapshot, kind.part)
                if snapshot.owner != principal.key_id:
                    raise NotAllowed(f"key {principal.key_id!r} did not ask for this snapshot")
                # Again: the key may be allowed less than when it asked.
                _check_each(principal, _READ, snapshot.queues)
        return super().do_get(context, ticket)

    def do_put(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.FlightMetadataWriter,
    ) -> None:
        """Publish what the caller may; routing and filling are for who administers."""
        with translated():
            command = wire.decode(descriptor.command or b"", PUTS, "command")
            if not isinstance(command, wire.PublishCommand):
                _principal(context).check("admin", _touched(command))
        super().do_put(context, descriptor, reader, writer)

    def publishing(self, context: fl.ServerCallContext) -> Any:
        """Give the broker that a stream of messages is published through."""
        principal = _principal(context)
        return self._broker if principal is ANYONE else _Publishing(self._broker, principal)

    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> list[fl.Result]:
        """Do an action that the caller may."""
        call: Call = context.get_middleware("guard")
        known = self._actions.get(action.type)
        if known is not None:
            call.operation = action.type
            with translated():
                command = wire.decode(action.body.to_pybytes(), known[0], action.type)
                actions = _READ if action.type in _LOOKING else ("admin",)
                call.principal.check_any(actions, _touched(command))
        results: list[fl.Result] = super().do_action(context, action)
        return results


def _touched(command: Any) -> str | None:
    """Return the queue that a command is about; None if it concerns all of them."""
    return None if isinstance(command, _FILLS) else getattr(command, "queue", None)


def _principal(context: fl.ServerCallContext) -> Principal:
    call: Call = context.get_middleware("guard")
    return call.principal


def _check_each(principal: Principal, actions: tuple[str, ...], queues: Iterable[str]) -> None:
    for queue in queues:
        principal.check_any(actions, queue)
