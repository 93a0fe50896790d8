"""A place of a broker that serves Flight: its addresses, the access to it, and how long to wait.

Any process that is sent a :class:`Location` can reach the broker with it. Needs no pyarrow.
"""

from __future__ import annotations

import os
import socket
import ssl
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, Final, Self

from penstock import limits
from penstock.addresses import (
    Address,
    TlsFiles,
    closed_after_handshake,
    environment_files,
    load_pair,
    parse_servers,
    read_pem,
    tls_failure,
)

if TYPE_CHECKING:
    from pathlib import Path

TOKEN_VARIABLE: Final = "PENSTOCK_TOKEN"  # noqa: S105 - a name
DEFAULT_PORT: Final = 8815
# How long one of several servers has to accept a connection.
TURN_SECONDS: Final = 3.0
_SCHEMES: Final = ("grpc", "grpc+tcp", "grpc+tls")
# Which of several addresses this process uses, by location.
turns: Final[dict[str, int]] = {}
# The locations that this process has had an answer from.
reached: Final[set[str]] = set()


class Location(str):
    """Addresses with their access: a token, and PEM of TLS roots, certificate and key.

    Its text is the addresses alone. A process that is sent one needs no settings of its own, and
    begins with the address that the sender used last: that server has its snapshots.

    ``retry_ms``: how long calls that may be repeated are, once the broker was reached. ``sent``:
    another process has planned with it, and so has reached the broker.
    """

    __slots__ = ("access", "retry_ms", "sent")
    access: tuple[str, str, str, str]
    retry_ms: int | None
    sent: bool

    def __new__(
        cls,
        address: str,
        access: tuple[str, str, str, str],
        retry_ms: int | None = None,
        *sent: bool,
    ) -> Self:
        """Put them together."""
        made = super().__new__(cls, address)
        made.access, made.retry_ms, made.sent = access, retry_ms, any(sent)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        addresses = self.addresses
        at = turns.get(self, 0) % len(addresses)
        scheme = self.partition("://")[0]
        hosts = ",".join(map(str, addresses[at:] + addresses[:at]))
        return Location, (f"{scheme}://{hosts}", self.access, self.retry_ms, True)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses, in the order of the URL."""
        return parse_servers(str(self), _SCHEMES, DEFAULT_PORT).addresses

    @property
    def patience_ms(self) -> int:
        """How long to wait now for a broker that is away: a wrong address is told soon."""
        least = limits.MAX_UNREACHABLE_MS
        if self.retry_ms is None:
            return least
        return self.retry_ms if self.sent or self in reached else min(self.retry_ms, least)


def locate(
    location: str,
    *,
    token: str | None = None,
    ca: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    retry_ms: int | None = None,
) -> Location:
    """Check a URL and add the access; ``ca``, ``certificate`` and ``key`` are files, or PEM.

    The URL may have the access, too (:mod:`penstock.addresses`). PENSTOCK_TOKEN, PENSTOCK_CA,
    PENSTOCK_CERT and PENSTOCK_KEY stand in for what is missing. A :class:`Location` keeps the
    access that it has: the environment of a process that it was sent to does not count.
    ``retry_ms`` is how long to wait for a broker that has been there and is away.
    """
    files = TlsFiles(*(str(each or "") for each in (ca, certificate, key)))
    sent = False
    if isinstance(location, Location):
        has, text, sent = location.access, str(location), location.sent
        retry_ms = location.retry_ms if retry_ms is None else retry_ms
    else:
        named = parse_servers(location, _SCHEMES, DEFAULT_PORT)
        text = f"{named.scheme}://{','.join(map(str, named.addresses))}"
        has = named.token or os.environ.get(TOKEN_VARIABLE, ""), "", "", ""
        if named.scheme == _SCHEMES[-1]:
            files = files.otherwise(named.files).otherwise(environment_files())
    files.check()
    roots, chain, private = (read_pem(each) if each else "" for each in files)
    if chain and not private:
        private = chain
    access = token or has[0], roots or has[1], chain or has[2], private or has[3]
    return Location(text, access, retry_ms, sent)


def tls_trouble(location: Location, address: Address) -> tuple[str, bool]:
    """Return what is wrong with TLS between client and server, and whether that is certain.

    An empty text: a handshake shows nothing. gRPC tells it in many words, or not at all.
    """
    _, ca, certificate, key = location.access
    secure = location.startswith(f"{_SCHEMES[-1]}:")
    context = TlsFiles(ca).context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not secure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    elif certificate:
        # Python reads a pair from files only.
        with NamedTemporaryFile("w", prefix="penstock-") as file:
            file.write(f"{certificate}\n{key}")
            file.flush()
            load_pair(context, file.name, file.name)
    try:
        with (
            socket.create_connection(address, TURN_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as wrapped,
        ):
            if not secure:
                return f"{address} speaks TLS: connect to {_SCHEMES[-1]}://{address}", True
            # With TLS 1.3 a server refuses a certificate when the handshake is over for the client.
            ended = not wrapped.recv(1)
    except ssl.SSLError as error:
        return (tls_failure(str(address), error, _SCHEMES[0]), True) if secure else ("", False)
    except OSError:
        return "", False
    return (closed_after_handshake(str(address)) if ended else ""), False
