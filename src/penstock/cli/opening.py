"""From ``--url`` to an open broker: a server's URL or a store's, its key, and the config file.

::

    --url  →  PENSTOCK_URL  →  PENSTOCK_STORE  →  url of [client] in the config file

The config file is the one that PENSTOCK_CONFIG names, which may be the server's too, or else
``~/.config/penstock/config.toml``. The key comes from the URL, PENSTOCK_TOKEN or that section;
files of TLS from options, the URL, PENSTOCK_CA, PENSTOCK_CERT and PENSTOCK_KEY, or the section. A
client has the verbs of a broker, so that most commands need not know which of the two they work
on.
"""

from __future__ import annotations

import os
import socket
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click
import msgspec

import penstock
from penstock.addresses import FILES, TlsFiles, environment_files
from penstock.client.transport import servers_of
from penstock.errors import InvalidInput, NotAllowed, ServerUnreachable, StoreLocked

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.addresses import Address
    from penstock.broker.broker import Broker
    from penstock.broker.reader import Reader
    from penstock.client import Client

Command = TypeVar("Command", bound="Callable[..., Any]")
DEFAULT_SERVER: Final = "penstock://127.0.0.1:8814"
# Parameters that errors of the client name, and the variables of the command line for them.
_VARIABLES: Final = {
    "token='KEY": "PENSTOCK_TOKEN='KEY",
    ", or with tls=": "",
}
# How long to wait for a server that has not been there yet.
PROBE_SECONDS: Final = 5.0


class ClientSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section ``[client]`` of the config file."""

    url: str = ""
    token: str = ""
    token_file: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""


def client_settings() -> ClientSettings:
    """Read the section ``[client]``."""
    named = os.environ.get("PENSTOCK_CONFIG")
    # Path.home() raises for a user without one.
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    path = Path(named or Path(home) / "penstock" / "config.toml")
    try:
        if not named and not path.is_file():
            return ClientSettings()
        with path.open("rb") as file:
            return msgspec.convert(tomllib.load(file).get("client", {}), ClientSettings)
    except OSError as error:
        raise InvalidInput(f"the file {path} can't be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        known = ", ".join(ClientSettings.__struct_fields__)
        raise InvalidInput(f"{path}, section client: {error}; there are {known}") from None
    except ValueError as error:
        raise InvalidInput(f"the file {path} is not TOML: {error}") from None


def find_url(given: str | None) -> str:
    """Return the URL that is meant, wherever it is named."""
    url = given or client_settings().url
    if not url:
        raise click.UsageError(
            f"which server or store? Give --url {DEFAULT_SERVER} (a server, which 'penstock up' "
            "starts) or --url rocksdb:./data (a store that no process has open), or set "
            "PENSTOCK_URL"
        )
    return url


def url_option(
    *names: str,
    help: str,  # noqa: A002 - click's
    needed: bool = True,
) -> Callable[[Command], Command]:
    """Make the option for the URL of a server or a store; empty if it is not given or needed."""

    def find(ctx: click.Context, _: click.Parameter, given: str | None) -> str:
        return find_url(given) if needed and not ctx.resilient_parsing else given or ""

    variables = ["PENSTOCK_URL", "PENSTOCK_STORE"]
    text = f"{help}  [env: PENSTOCK_URL]"
    url = click.option(*names, "store", metavar="URL", envvar=variables, callback=find, help=text)
    return lambda command: url(tls_options(command))


def _note_file(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
    if value:
        ctx.meta[f"{__name__}.{option.name}"] = value


def tls_options(command: Command) -> Command:
    """Add the options for files of TLS, which :func:`given_files` returns."""
    about = ("The CA of a server with TLS", "A client certificate", "The key of the certificate")
    for name, text in reversed([*zip(FILES, about, strict=True)]):
        command = click.option(
            f"--{name}",
            metavar="FILE",
            expose_value=False,
            # Before the URL, whose callback may need them.
            is_eager=True,
            callback=_note_file,
            help=f"{text}, PEM.  [env: PENSTOCK_{name.upper()}]",
        )(command)
    return command


def given_files() -> TlsFiles:
    """Return the files of TLS that options of the command name."""
    ctx = click.get_current_context(silent=True)
    meta = {} if ctx is None else ctx.meta
    return TlsFiles(*(meta.get(f"{__name__}.{name}", "") for name in FILES))


def is_server(url: str) -> bool:
    """Whether a URL names a server, not a store."""
    return url.startswith(("penstock:", "penstocks:"))


def need_store(url: str, command: str, instead: str) -> None:
    """Refuse a server where a command works on the store itself."""
    if is_server(url):
        raise click.ClickException(f"{command} works on a store, not through a server: {instead}")


def _file(path: str) -> Path:
    return Path(path).expanduser()


def connect(url: str) -> Client:
    """Connect to a server; one that is not there is an error at once."""
    settings, named = client_settings(), servers_of(url)
    token = named.token or os.environ.get("PENSTOCK_TOKEN", "")
    # The key of the config file is for the servers that the file names.
    if not token and (
        not settings.url or {*named.addresses} <= {*servers_of(settings.url).addresses}
    ):
        token = settings.token
        try:
            if settings.token_file and not token:
                token = _file(settings.token_file).read_text().strip()
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidInput(f"token_file of [client]: {error}") from None
    files = given_files().otherwise(named.files).otherwise(environment_files())
    files = files.otherwise(TlsFiles(settings.ca, settings.certificate, settings.key))
    secure = named.scheme == "penstocks"
    if any(given_files()) and not secure:
        raise InvalidInput("--ca, --cert and --key are for servers with TLS: penstocks://HOST:PORT")
    _look_for(named.addresses)
    tls = files.context() if secure else False
    try:
        return penstock.connect(url, token=token, tls=tls, name="penstock-cli")
    except (NotAllowed, ServerUnreachable) as error:
        text = str(error)
        for parameter, variable in _VARIABLES.items():
            text = text.replace(parameter, variable)
        raise type(error)(text) from None


def _look_for(addresses: tuple[Address, ...]) -> None:
    """Raise ServerUnreachable if nobody listens: a client would wait for a server to come."""
    reasons = []
    for address in addresses:
        try:
            # A name that is none is the client's to refuse.
            with suppress(UnicodeError):
                socket.create_connection(address, PROBE_SECONDS / len(addresses)).close()
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
        else:
            return
    raise ServerUnreachable(
        f"no server at {'; '.join(reasons)}; 'penstock up' starts one, 'penstock doctor' looks for "
        "what is wrong"
    )


def open_store(url: str, *, make: bool = False, background: bool = False) -> Broker:
    """Connect to a server, or open a store; a missing one is made only if that is asked for."""
    if is_server(url):
        return cast("Broker", connect(url))
    if url.partition("?")[0] == "memory:":
        raise click.ClickException(
            "a store in memory ends with the command: name one that stays, such as rocksdb:./data, "
            f"or a server, such as {DEFAULT_SERVER}"
        )
    try:
        return penstock.open(url, background=background, create=make)
    except StoreLocked as error:
        at = str(error).rpartition(" serves it at ")[2]
        at = at if is_server(at) else "penstock://HOST:8814, if it is a server"
        raise StoreLocked(f"{error}; ask that process: --url {at}") from None


def open_to_look(url: str, *, read_only: bool = False) -> Broker | Reader:
    """Open a store for looking: by a reader, if opening it would take it over."""
    if read_only and is_server(url):
        raise click.UsageError("--read-only reads a store beside its owner; a server is the owner")
    if read_only or url.startswith("slatedb+"):
        return penstock.open_reader(url)
    return open_store(url)
