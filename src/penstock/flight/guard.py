"""The calls of a Flight server: the key and the protocol of each, and its metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow.flight as fl

from penstock.errors import InvalidInput, NotAllowed
from penstock.flight.protocol import PROTOCOL, PROTOCOL_HEADER, describe, revive
from penstock.server.security import ANYONE, token_of

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.server.keys import Keys
    from penstock.server.metrics import Metrics
    from penstock.server.security import Principal


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
