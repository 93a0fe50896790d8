"""The URL of a server, or of several servers of one store: addresses, the key, the files of TLS.

::

    penstock://[KEY:SECRET@]HOST[:PORT][,HOST[:PORT]…]
    penstocks://…[?ca=FILE&cert=FILE&key=FILE]

Native clients, clients of Arrow Flight (``grpc://``, ``grpc+tls://``) and the command line read it
alike. PENSTOCK_CA, PENSTOCK_CERT and PENSTOCK_KEY stand in for files that a URL does not name.
"""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn
from urllib.parse import parse_qsl, unquote

from penstock import limits
from penstock.errors import InvalidInput, InvalidUrl, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

# Files of TLS as a URL, the variables and the options of the command line name them.
FILES: Final = ("ca", "cert", "key")
_PARTS: Final = re.compile(r"([a-z+]+)://(?:([^/?#]*)@)?([^/?#@]*)/*(?:\?([^#]*))?")
_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|([^\[\]:]+))(?::([0-9]{1,5}))?")

# Reasons of a server's alert: what is the matter with the client's certificate.
_ALERTS: Final = {
    "CERTIFICATE_REQUIRED": "wants a client certificate",
    "HANDSHAKE_FAILURE": "wants a client certificate, or another version of TLS",
    "UNKNOWN_CA": "does not know the CA of the client certificate",
    "CERTIFICATE_EXPIRED": "says that the client certificate has expired",
    "BAD_CERTIFICATE": "does not accept the client certificate",
}
_GIVE_ONE: Final = (
    "give one by cert=FILE and key=FILE in the URL, or PENSTOCK_CERT and PENSTOCK_KEY"
)
# X509 codes of certificates that are not accepted: what is the matter, and what to do.
_OTHER_HOST: Final = (
    "is for another host ({0}): connect by a name that the certificate has, or have one issued for "
    "this name"
)
_FAULTS: Final = {
    9: "is not valid yet: compare the clocks of both machines",
    10: "has expired: renew it on the server, and send the server SIGHUP",
    62: _OTHER_HOST,
    64: _OTHER_HOST,
}
_NOT_TRUSTED: Final = (
    "is not trusted: name the file of its CA by ca=FILE in the URL, or PENSTOCK_CA ({0})"
)


class Address(NamedTuple):
    """Host and port of a server; its text has an IPv6 host in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class TlsFiles(NamedTuple):
    """The files of a client: of the CA that it trusts, of its certificate, and of its key.

    A certificate without a key has its key in the same file.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""

    def otherwise(self, other: TlsFiles) -> TlsFiles:
        """Take what is missing from others; a certificate and its key stay together."""
        pair = self if self.cert or self.key else other
        return TlsFiles(self.ca or other.ca, pair.cert, pair.key)

    def check(self) -> None:
        """Refuse a key without a certificate."""
        if self.key and not self.cert:
            raise InvalidInput(
                f"TLS: {self.key} is a key without a certificate: name that too, by cert="
            )

    def context(self) -> ssl.SSLContext:
        """Make the context of a client: it checks the server's certificate and its name."""
        self.check()
        try:
            context = ssl.create_default_context(cadata=read_pem(self.ca) if self.ca else None)
        except ssl.SSLError as error:
            raise InvalidInput(f"TLS: {self.ca} holds no certificate: {error}") from None
        if self.cert:
            load_pair(context, self.cert, self.key or self.cert)
        return context


class ServerUrl(NamedTuple):
    """The parts of a URL: at least one address, and what it names beside."""

    scheme: str
    addresses: tuple[Address, ...]
    token: str
    files: TlsFiles


def environment_files(environment: Mapping[str, str] = os.environ) -> TlsFiles:
    """Return the files that PENSTOCK_CA, PENSTOCK_CERT and PENSTOCK_KEY name."""
    return TlsFiles(*(environment.get(f"PENSTOCK_{name.upper()}", "") for name in FILES))


def parse_servers(url: object, schemes: tuple[str, ...], default_port: int) -> ServerUrl:
    """Take the URL of one server or of several apart; InvalidUrl says what is wrong with it."""
    plain = schemes[0]
    like = f"{plain}://HOST:{default_port}"
    # A secret is not for the eyes of those who read an error.
    shown = repr(re.sub(r"//.*@", "//...@", str(url), flags=re.DOTALL))[:200]
    found = _PARTS.fullmatch(url) if isinstance(url, str) else None
    if found is None or found[1] not in schemes or not found[3]:
        extra = re.match(r"[a-z+]+://[^/?#]+[/#]", str(url))
        what = "has more than addresses" if extra else "names no server"
        raise InvalidUrl(f"{shown} {what}; the URL of a server is {like}")
    scheme, user, hosts, query = found.groups(default="")
    if "@" in user:
        raise InvalidUrl(
            f"{shown} has several keys: one is for all addresses, "
            f"{plain}://KEY:SECRET@HOST:PORT,HOST:PORT"
        )
    named = [_address(each, shown, default_port) for each in hosts.split(",")]
    addresses = tuple(dict.fromkeys(named))
    if len(addresses) > (most := limits.MAX_ADDRESSES):
        raise InvalidUrl(f"{shown} has {len(addresses)} addresses; there may be {most}")
    key_id, colon, secret = user.partition(":")
    token = f"{unquote(key_id)}:{unquote(secret)}" if key_id or colon else ""
    files = _files(query, shown)
    if any(files) and scheme != schemes[-1]:
        raise InvalidUrl(f"{shown} names files of TLS, and no TLS: begin it with {schemes[-1]}://")
    return ServerUrl(scheme, addresses, token, files)


def _address(text: str, shown: str, default_port: int) -> Address:
    found = _ADDRESS.fullmatch(text)
    port = default_port if found is None or found[3] is None else int(found[3])
    if found is None or not 0 < port <= 65_535:
        hint = ", an IPv6 host in brackets" if text.count(":") > 1 else ""
        raise InvalidUrl(f"{text!r:.100} in {shown} is not an address: HOST or HOST:PORT{hint}")
    return Address(found[1] or found[2], port)


def _files(query: str, shown: str) -> TlsFiles:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for unknown in options.keys() - set(FILES):
        hint = did_you_mean(unknown, FILES)
        raise InvalidUrl(f"{shown} has an unknown option {unknown!r:.100}; {hint}")
    return TlsFiles(**options)


def closed_after_handshake(where: str) -> str:
    """Describe a server that said nothing when the client had finished the handshake."""
    return (
        f"{where} closed the connection after the TLS handshake: it wants a client certificate, or "
        f"does not accept this one ({_GIVE_ONE}); its log says which"
    )


def tls_failure(where: str, error: ssl.SSLError, plain: str = "penstock") -> str:
    """Describe why there is no TLS with a server, and what to try, as far as the error tells."""
    if isinstance(error, ssl.SSLCertVerificationError):
        fault = _FAULTS.get(error.verify_code, _NOT_TRUSTED)
        return f"the certificate of {where} {fault.format(error.verify_message)}"
    if error.reason == "WRONG_VERSION_NUMBER":
        return f"{where} does not speak TLS: connect to {plain}://{where} ({error})"
    for name, said in _ALERTS.items():
        if name in (error.reason or ""):
            return f"{where} {said}: {_GIVE_ONE}"
    return f"no TLS with {where}: {error}"


# --- files ----------------------------------------------------------------------------------------


def read_pem(file: str | Path) -> str:
    """Read a PEM file; text that is PEM already stays as it is."""
    if str(file).startswith("-----BEGIN "):
        return str(file)
    try:
        text = Path(file).expanduser().read_text()
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidInput(f"TLS: {file} can't be read: {why}") from None
    except UnicodeDecodeError:
        text = ""
    if "-----BEGIN " not in text:
        raise InvalidInput(f"TLS: {file} is not PEM, which begins with -----BEGIN")
    return text


def load_pair(context: ssl.SSLContext, certificate: str | Path, key: str | Path) -> None:
    """Give a context its certificate and key; InvalidInput says what is wrong with them."""

    def ask() -> NoReturn:
        # OpenSSL would ask at the terminal, and wait.
        raise InvalidInput(
            f"TLS: the key {key} is encrypted: 'openssl pkey -in {key} -out FILE' decrypts it"
        )

    for each in (certificate, key):
        read_pem(each)
    try:
        context.load_cert_chain(Path(certificate).expanduser(), Path(key).expanduser(), ask)
    except ssl.SSLError as error:
        why = "the key is not that of the certificate" if "MISMATCH" in str(error.reason) else error
        raise InvalidInput(f"TLS: {certificate} and {key} can't be used: {why}") from None
