"""A Flight service that listens: address and TLS, the key of each call, and the way it ends."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.flight as fl

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, NotAllowed
from penstock.flight.protocol import PROTOCOL, PROTOCOL_HEADER, describe, revive
from penstock.flight.service import FlightService
from penstock.server.security import ANYONE, token_of
from penstock.server.shares import holder_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.server.keys import Keys
    from penstock.server.metrics import Metrics
    from penstock.server.security import Principal

log = logging.getLogger(__name__)

JANITOR_MS: Final = 15_000
GRACE_MS: Final = 30_000


def _tls_options(files: Sequence[Path | None]) -> dict[str, Any]:
    """Return files of certificate, key, and the authority of clients as options of a server."""
    try:
        certificate, key, roots = (each and each.read_bytes() for each in files)
    except OSError as error:
        raise InvalidInput(f"TLS: {error.filename} can't be read: {error.strerror}") from None
    return {
        "tls_certificates": [(certificate, key)],
        "verify_client": roots is not None,
        "root_certificates": roots,
    }


class FlightListener:
    """A running Flight service; clients connect to its ``location``.

    ``tls``: the files of certificate, key, and the authority of clients' certificates or None.
    """

    def __init__(
        self,
        broker: Broker,
        host: str,
        port: int,
        clock: Clock,
        *,
        keys: Keys | None = None,
        metrics: Metrics | None = None,
        audited: Callable[[str, str], Broker] | None = None,
        tls: Sequence[Path | None] | None = None,
    ) -> None:
        scheme = "grpc" if tls is None else "grpc+tls"
        place = f"{scheme}://{_bracketed(host)}:{port}"
        try:
            self.service = FlightService(
                broker,
                place,
                clock,
                audited,
                auth_handler=AcceptedHandshakes(),
                middleware={"guard": FlightGuard(keys, metrics, clock)},
                **({} if tls is None else _tls_options(tls)),
            )
        except pa.ArrowException as error:
            raise InvalidInput(f"can't listen on {host}:{port}: {error}") from error
        self._clock = clock
        self.port: int = self.service.port
        self.location = f"{scheme}://{_bracketed(_reachable(host))}:{self.port}"
        self._closing = threading.Condition()
        self._closed = False
        self._janitor = threading.Thread(
            target=self._tidy, name="penstock-flight-janitor", daemon=True
        )
        self._janitor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, grace_ms: int = GRACE_MS) -> None:
        """Take no more calls, wait for those that run, and let go of every snapshot.

        After ``grace_ms`` a read that still goes on gets an error. The broker stays open.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._closing.notify_all()
        self._janitor.join()
        stopping = threading.Thread(target=self.service.shutdown, daemon=True)
        stopping.start()
        stopping.join(grace_ms / 1000)
        if stopping.is_alive():
            log.warning("reads go on after %d ms: they are ended", grace_ms)
        self.service.snapshots.close()
        self.service.spools.close()
        stopping.join(grace_ms / 1000)

    def _tidy(self) -> None:
        """Expire idle snapshots, stages and spools, also when nobody calls."""
        with self._closing:
            while not self._closed:
                self.service.snapshots.expire()
                self.service.stages.expire()
                self.service.spools.expire()
                self._clock.wait(self._closing, JANITOR_MS)


def in_process_server(
    broker: Broker, *, host: str = "127.0.0.1", port: int = 0, clock: Clock | None = None
) -> FlightListener:
    """Serve an open broker from this process, by default on a free port of this machine.

    ::

        with penstock.open("memory:") as broker, in_process_server(broker) as server:
            FlightStore(server.location).info()
    """
    return FlightListener(broker, host, port, clock or SystemClock())


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _reachable(host: str) -> str:
    """Return an address that clients can connect to, for one that listens everywhere."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


# --- calls ----------------------------------------------------------------------------------------


class FlightCall(fl.ServerMiddleware):  # type: ignore[misc]
    """One call: its key, and its name for the metrics."""

    def __init__(
        self, guard: FlightGuard, principal: Principal, operation: str, answer: str
    ) -> None:
        self.principal = principal
        self.operation = operation
        # Known once the call is served: who has made it, and what it asks for.
        self.address = ""
        self.request: object = ""
        self._guard = guard
        self._answer = answer
        self._begin = guard.clock.seconds()

    @property
    def holder(self) -> str:
        """The holder of the shares that the call takes."""
        return holder_of(self.principal.key_id, self.address)

    def sending_headers(self) -> dict[str, str]:
        """Answer a login with the token to use from then on."""
        return {"authorization": self._answer} if self._answer else {}

    def call_completed(self, exception: Exception | None) -> None:
        """Count the call."""
        if self._guard.metrics is None:
            return
        outcome = "ok"
        if exception is not None:
            ours = revive(getattr(exception, "extra_info", None))
            outcome = type(exception if ours is None else ours).__name__
        seconds = self._guard.clock.seconds() - self._begin
        self._guard.metrics.request(
            "flight",
            self.operation,
            seconds,
            outcome,
            self.principal.key_id,
            self.address,
            self.request,
        )


class FlightGuard(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Finds the key of each call, and refuses one without a known key or of another protocol."""

    def __init__(self, keys: Keys | None, metrics: Metrics | None, clock: Clock) -> None:
        self.keys = keys
        self.metrics = metrics
        self.clock = clock

    def start_call(self, info: fl.CallInfo, headers: dict[str, Any]) -> FlightCall:
        """Look at the headers of a call."""
        begin = self.clock.seconds()
        operation = info.method.name.lower()
        spoken = _header(headers, PROTOCOL_HEADER) or str(PROTOCOL)
        if spoken != str(PROTOCOL):
            error = InvalidInput(
                f"the client speaks version {spoken:.20} of the Flight protocol, this server "
                f"version {PROTOCOL}: install the same Penstock on both sides"
            )
            raise fl.FlightServerError(*describe(error))
        if self.keys is None:
            return FlightCall(self, ANYONE, operation, "")
        header = _header(headers, "authorization")
        token = token_of(header)
        principal = self.keys.by_token(token) if token else None
        if principal is None:
            if self.metrics is not None:
                seconds = self.clock.seconds() - begin
                self.metrics.request("flight", operation, seconds, NotAllowed.__name__)
                # Flight does not tell the address before a call is let in.
                self.metrics.refusals.token("flight", "", token)
            why = "the key is not known" if token else "it needs a key"
            refused = NotAllowed(f"this server wants authorization: Bearer ID:SECRET; {why}")
            raise fl.FlightUnauthenticatedError(*describe(refused))
        login = header.lower().startswith("basic")
        return FlightCall(self, principal, operation, f"Bearer {token}" if login else "")


def _header(headers: dict[str, Any], wanted: str) -> str:
    for name, values in headers.items():
        if name.lower() == wanted and values:
            value = values[0]
            return value.decode("latin-1") if isinstance(value, bytes) else str(value)
    return ""


class AcceptedHandshakes(fl.ServerAuthHandler):  # type: ignore[misc]
    """Accepts Flight's own login: the middleware has checked its header."""

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        """Ask for nothing more."""

    def is_valid(self, token: bytes) -> bytes:  # noqa: ARG002 - Flight's signature
        """Return no name: the middleware knows the key."""
        return b""
