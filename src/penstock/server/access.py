"""The keys and the certificate of a process that serves, or stands by; both are read again."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.addresses import load_pair, read_pem
from penstock.clock import SystemClock
from penstock.errors import InvalidInput
from penstock.server.config import TLS_LISTENERS, authenticates, tls_files
from penstock.server.keys import Keys
from penstock.server.logs import lost_lines
from penstock.server.security import PageGuard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.server.config import Config
    from penstock.server.connections import Listener
    from penstock.server.metrics import Gauge

log = logging.getLogger(__name__)

_WATCH_SECONDS: Final = 2.0
_PEM: Final = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# The validity of a certificate in DER: a sequence of two times, of which the second is wanted. The
# year of a time has two digits before 2050.
_VALIDITY: Final = re.compile(
    rb"\x30.(?:\x17\r\d{12}Z|\x18\x0f\d{14}Z)(?:\x17\r(\d{12})|\x18\x0f(\d{14}))Z", re.DOTALL
)
# Reasons of OpenSSL for a handshake that failed, in the words of the log.
_REASONS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client has shown no certificate",
    "HTTP_REQUEST": "the client speaks HTTP, not TLS",
    "WRONG_VERSION_NUMBER": "the client does not speak TLS",
    "UNKNOWN_CA": "the client does not trust the CA of the server's certificate",
    "CERTIFICATE_UNKNOWN": "the client does not accept the server's certificate",
    "BAD_CERTIFICATE": "the client does not accept the server's certificate",
    "CERTIFICATE_EXPIRED": "the client says that the server's certificate has expired",
    "UNSUPPORTED_PROTOCOL": "the client speaks an older TLS than 1.2",
    "NO_SHARED_CIPHER": "client and server have no cipher in common",
}


class Access:
    """Keys, certificate, and the listeners that use them; InvalidInput if a file can't be used."""

    def __init__(self, config: Config) -> None:
        self.keys = Keys(Path(config.auth_keys)) if authenticates(config) else None
        self.tls = ServerTls(config)
        self.listeners: dict[str, Listener] = {}
        self._url = config.sqs_url
        # The files are read by one thread at a time, so that what it read last is what counts.
        self._reloading = threading.Lock()

    def guard(self, listener: str, host: str) -> PageGuard | None:
        """Return the check of headers for a listener of HTTP; None: it asks for keys."""
        if listener == "ops":
            return PageGuard(host)
        return PageGuard(host, self._url) if self.keys is None else None

    def gauges(self) -> Iterator[Gauge]:
        """Give the gauges of keys and certificate; any thread may ask."""
        about = "When the first certificate of a file expires."
        yield "certificate_expiry_timestamp_seconds", about, self.tls.expiry, "file"
        used = {} if self.keys is None else self.keys.former_used
        about = "When the former secret of a key with two was last used; 0: not yet."
        yield "key_former_secret_used_timestamp_seconds", about, used, "key"
        yield "log_lines_lost", "Lines of the log that could not be written.", lost_lines()

    def reload_soon(self) -> None:
        """Read the files again on a thread: thousands of keys would hold up the loop."""
        asyncio.get_running_loop().run_in_executor(None, self.reload)

    def reload(self) -> None:
        """Read keys and certificate again; a file that can't be used changes nothing."""
        with self._reloading:
            self._reload()

    def _reload(self) -> None:
        if self.keys is not None:
            self.keys.reload()
        if self.tls.reload():
            for name, listener in self.listeners.items():
                listener.tls = self.tls.context(name)
            if "flight" in self.listeners:
                log.warning(
                    "Flight keeps the certificate that it has until the server is restarted"
                )

    async def watch_keys(self) -> None:
        """Read the keys again whenever their file has changed."""
        while self.keys is not None:
            await asyncio.sleep(_WATCH_SECONDS)
            await asyncio.to_thread(self._refresh, self.keys)

    def _refresh(self, keys: Keys) -> None:
        with self._reloading:
            keys.refresh()


class ServerTls:
    """The TLS of all listeners; without a certificate there is none."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._contexts: dict[str, ssl.SSLContext] = {}
        # By file: the second at which the first of its certificates expires.
        self.expiry: dict[str, int] = {}
        self._read()

    def __bool__(self) -> bool:
        return bool(self._config.tls_certificate)

    def context(self, listener: str) -> ssl.SSLContext | None:
        """Return the context of a listener, as it is now; None: it has no TLS."""
        return self._contexts.get(listener)

    def _read(self) -> None:
        """Read the files; one that can't be used changes nothing."""
        contexts = {
            listener: make_context(*files)
            for listener in TLS_LISTENERS
            if (files := tls_files(self._config, listener)) is not None
        }
        paths = {
            "certificate": self._config.tls_certificate,
            "client_ca": self._config.tls_client_ca,
        }
        found = {name: expires_at(read_pem(path)) for name, path in paths.items() if path}
        expiry = {name: second for name, second in found.items() if second}
        self._contexts, self.expiry = contexts, expiry
        for name, second in expiry.items():
            if second * 1000 <= SystemClock().now_ms():
                log.warning("tls.%s %s has expired at %s", name, paths[name], _time(second))

    def reload(self) -> bool:
        """Read the files again; return whether they could be used."""
        if not self:
            return False
        before = self.expiry.get("certificate")
        try:
            self._read()
        except InvalidInput as error:
            log.error("the certificate stays as it was: %s", error)  # noqa: TRY400
            return False
        now = self.expiry.get("certificate", 0)
        same = "as before" if now == before else f"before: until {_time(before or 0)}"
        path = self._config.tls_certificate
        log.info("read the certificate %s again: valid until %s (%s)", path, _time(now), same)
        return True


def make_context(certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """Make the context of a listener; with ``client_ca`` clients must show a certificate too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_pair(context, certificate, key)
    if client_ca is not None:
        try:
            context.load_verify_locations(cadata=read_pem(client_ca))
        except ssl.SSLError as error:
            raise InvalidInput(f"TLS: {client_ca} holds no certificate: {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def handshake_reason(error: OSError) -> str | None:
    """Return why a handshake failed; None: the client has gone, which is no failure."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return None
    if isinstance(error, ssl.SSLError):
        known = (text for name, text in _REASONS.items() if name in (error.reason or ""))
        return next(known, f"OpenSSL says {error.reason or error}")
    if isinstance(error, TimeoutError) or "taking longer" in str(error):
        return "the client did not finish it in time"
    return None


def expires_at(pem: str) -> int:
    """Return the second at which the first certificate of a PEM text expires; 0: it can't be read.

    Python tells that only of certificates that it has verified.
    """
    try:
        return min(_not_after(ssl.PEM_cert_to_DER_cert(each)) for each in _PEM.findall(pem))
    except ValueError:
        return 0


def _not_after(der: bytes) -> int:
    found = _VALIDITY.search(der)
    if found is None:
        raise ValueError("a certificate without times")
    short, long = found.groups()
    text = (long or (b"19" if short[:2] >= b"50" else b"20") + short).decode()
    return int(datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp())


def _time(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M UTC")
