"""How a client gets to a Flight server: its address, a key's token, and whom TLS trusts.

All of it travels with the address, so that a process that is sent one needs no settings of its
own; what is shown of it is the address alone.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Final, Self

import pyarrow.flight as fl

from penstock.errors import InvalidInput, InvalidUrl

__all__ = ["CA_VARIABLE", "TOKEN_VARIABLE", "Location", "client", "forget", "identity", "locate"]

TOKEN_VARIABLE: Final = "PENSTOCK_TOKEN"  # noqa: S105 - a name
CA_VARIABLE: Final = "PENSTOCK_CA"
_clients: Final[dict[tuple[int, str, Any], fl.FlightClient]] = {}
_clients_lock: Final = threading.Lock()
_SCHEMES: Final = ("grpc://", "grpc+tcp://", "grpc+tls://")


class Location(str):
    """An address with its access: a token, and PEM of roots, certificate and key."""

    __slots__ = ("access",)
    access: tuple[str, str, str, str]

    def __new__(cls, address: str, access: tuple[str, str, str, str]) -> Self:
        """Put them together."""
        made = super().__new__(cls, address)
        made.access = access
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Location, (str(self), self.access)


def locate(
    location: str,
    *,
    token: str | None = None,
    ca: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
) -> str:
    """Check an address and add what is needed to get in; ``ca`` and the others are files.

    What is not given comes from PENSTOCK_TOKEN and PENSTOCK_CA, or with the address.
    """
    if not str(location).startswith(_SCHEMES):
        raise InvalidUrl(
            f"no Flight server is named by {location!r:.200}: grpc://HOST:PORT, or grpc+tls://"
        )
    has = location.access if isinstance(location, Location) else ("", "", "", "")
    secure = location.startswith("grpc+tls://")
    access = (
        token or has[0] or os.environ.get(TOKEN_VARIABLE, ""),
        _pem(ca) or has[1] or (_pem(os.environ.get(CA_VARIABLE)) if secure else ""),
        _pem(certificate) or has[2],
        _pem(key) or has[3],
    )
    return Location(location, access) if any(access) else str(location)


def _pem(file: str | Path | None) -> str:
    if not file:
        return ""
    try:
        return Path(file).read_text()
    except OSError as error:
        raise InvalidInput(f"TLS: {file} can't be read: {error.strerror}") from None


def identity(location: str) -> tuple[str, Any]:
    """Return what tells two ways to a server apart."""
    return str(location), getattr(location, "access", None)


def client(location: str) -> fl.FlightClient:
    """Return this process's connection to a server."""
    # A forked worker must not use its parent's connection, nor one key another's.
    key = (os.getpid(), *identity(location))
    with _clients_lock:
        found = _clients.get(key)
        if found is None:
            found = _clients[key] = _connect(location)
        return found


def forget(location: str) -> None:
    """Let the next call connect anew."""
    with _clients_lock:
        _clients.pop((os.getpid(), *identity(location)), None)


def _connect(location: str) -> fl.FlightClient:
    token, ca, certificate, key = getattr(location, "access", ("", "", "", ""))
    options: dict[str, Any] = {}
    if ca:
        options["tls_root_certs"] = ca
    if certificate:
        options |= {"cert_chain": certificate, "private_key": key}
    if token:
        options["middleware"] = [_Bearers(token)]
    return fl.FlightClient(str(location), **options)


class _Bearer(fl.ClientMiddleware):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._token = token

    def sending_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._token}"}


class _Bearers(fl.ClientMiddlewareFactory):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._token = token

    def start_call(self, info: fl.CallInfo) -> _Bearer:  # noqa: ARG002 - Flight's signature
        return _Bearer(self._token)
