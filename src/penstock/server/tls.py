"""The certificate of a server: a context for each listener, read again on demand, its expiry."""

from __future__ import annotations

import logging
import re
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from penstock.addresses import load_pair, read_pem
from penstock.clock import SystemClock
from penstock.errors import InvalidInput
from penstock.server.config import TLS_LISTENERS, tls_files

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.server.config import Config

log = logging.getLogger(__name__)

_PEM: Final = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# Tags of DER: the version of a certificate, and a time whose year has two digits.
_VERSION, _SHORT_TIME = 0xA0, 0x17
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


# --- expiry ---------------------------------------------------------------------------------------


def expires_at(pem: str) -> int:
    """Return the second at which the first certificate of a PEM text expires; 0: it can't be read.

    Python tells that only of certificates that it has verified.
    """
    try:
        return min(_not_after(ssl.PEM_cert_to_DER_cert(each)) for each in _PEM.findall(pem))
    except (ValueError, IndexError):
        return 0


def _not_after(der: bytes) -> int:
    # Certificate { TBSCertificate { [version,] serial, algorithm, issuer, validity { from, until
    _, at, _ = _element(der, 0)
    _, at, _ = _element(der, at)
    for _ in range(4 if der[at] == _VERSION else 3):
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)
    _, _, at = _element(der, at)
    tag, begin, end = _element(der, at)
    text = der[begin:end].decode("ascii")
    if tag == _SHORT_TIME:
        text = f"{'19' if text[:2] >= '50' else '20'}{text}"
    return int(datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp())


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of an element, and where its content begins and ends."""
    tag, size, at = der[at], der[at + 1], at + 2
    if size & 0x80:
        long = size & 0x7F
        size = int.from_bytes(der[at : at + long], "big")
        at += long
    return tag, at, at + size


def _time(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%d %H:%M UTC")
