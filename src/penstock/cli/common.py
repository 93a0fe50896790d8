"""Parts that the commands share: from ``--url`` to an open broker, options, and output.

The URL of a server or a store::

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
import sys
import threading
import tomllib
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import Enum
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click
import msgspec

import penstock
from penstock.addresses import FILES, TlsFiles, environment_files
from penstock.client.transport import servers_of
from penstock.errors import InvalidInput, NotAllowed, ServerUnreachable, StoreLocked
from penstock.model import State
from penstock.server.logs import say

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from penstock.addresses import Address
    from penstock.broker.broker import Broker
    from penstock.broker.reader import Reader
    from penstock.client import Client
    from penstock.model import Explanation

Command = TypeVar("Command", bound="Callable[..., Any]")
DEFAULT_SERVER: Final = "penstock://127.0.0.1:8814"
# How long to wait for a server that has not been there yet.
PROBE_SECONDS: Final = 5.0
_PREVIEW_CHARS: Final = 60
# Tables that go to a file or a pipe are not cut to a screen's width.
_UNCUT_WIDTH: Final = 10_000
# Longer tables are lines with tabs: nobody looks at their frames, which take seconds to draw.
_DRAWN_ROWS: Final = 1_000
# Results of a condition.
WORDS: Final = {True: "true", False: "false", None: "unknown"}
_STYLES: Final = {True: "green", False: "red", None: "yellow"}
STATES: Final = [state.value for state in State]
# Messages that one call removes, while the command shows how far it is.
PURGE_STEP: Final = 50_000


# --- opening --------------------------------------------------------------------------------------


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


def is_server(url: str) -> bool:
    """Whether a URL names a server, not a store."""
    return url.startswith(("penstock:", "penstocks:"))


def need_store(url: str, command: str, instead: str) -> None:
    """Refuse a server where a command works on the store itself."""
    if is_server(url):
        raise click.ClickException(f"{command} works on a store, not through a server: {instead}")


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
                token = Path(settings.token_file).expanduser().read_text().strip()
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidInput(f"token_file of [client]: {error}") from None
    given, secure = given_files(), named.scheme == "penstocks"
    if any(given) and not secure:
        raise InvalidInput("--ca, --cert and --key are for servers with TLS: penstocks://HOST:PORT")
    files = given.otherwise(named.files).otherwise(environment_files())
    files = files.otherwise(TlsFiles(settings.ca, settings.certificate, settings.key))
    _look_for(named.addresses)
    tls = files.context() if secure else False
    try:
        return penstock.connect(url, token=token, tls=tls, name="penstock-cli")
    except (NotAllowed, ServerUnreachable) as error:
        # The parameters of penstock.connect() as the command line has them.
        text = str(error).replace("token='KEY", "PENSTOCK_TOKEN='KEY").replace(", or with tls=", "")
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


# --- options --------------------------------------------------------------------------------------


def duration(value: str | int) -> int:
    """Turn ``250ms``, ``30s``, ``5m``, ``2h`` or ``7d`` into milliseconds; a bare number is ms."""
    return _amount(value, "UNITS_MS", "a duration such as 250ms, 30s, 5m, 2h or 7d")


def size(value: str | int) -> int:
    """Turn ``64KB``, ``16MB`` or ``2GB`` into bytes; a bare number is bytes."""
    return _amount(value, "UNITS_BYTES", "a size such as 64KB, 16MB or 2GB")


def _amount(value: str | int, units: str, what: str) -> int:
    from penstock.server import config  # noqa: PLC0415 - many commands do without

    try:
        return config.amount(value, getattr(config, units), what)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not {what}") from None


def pairs_of(given: Iterable[str], what: str = "NAME") -> dict[str, str]:
    """Take the values of an option apart that are NAME=VALUE."""
    pairs = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{each!r} is not {what}=VALUE")
        pairs[name] = value
    return pairs


def options(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Make one decorator of several options, in the order of --help."""

    def add(command: Command) -> Command:
        for decorate in reversed(decorators):
            command = decorate(command)
        return command

    return add


def _note(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    """Keep the value of an option where functions of this module look it up."""
    ctx.meta[f"{__name__}.{option.name}"] = value


json_option = click.option("--json", is_flag=True, expose_value=False, callback=_note,
                           help="Print JSON instead of a table.")  # fmt: skip


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
            callback=_note,
            help=f"{text}, PEM.  [env: PENSTOCK_{name.upper()}]",
        )(command)
    return command


def given_files() -> TlsFiles:
    """Return the files of TLS that options of the command name."""
    ctx = click.get_current_context(silent=True)
    meta = {} if ctx is None else ctx.meta
    return TlsFiles(*(meta.get(f"{__name__}.{name}") or "" for name in FILES))


store_option = options(
    json_option,
    url_option(
        "--url",
        "--store",
        help="A server, such as penstock://127.0.0.1:8814, or a store, such as rocksdb:./data; "
        "writing to a store on object storage takes it over.",
    ),
)


def _on_store(opening: Callable[..., Any], *names: str) -> Callable[[Command], Command]:
    """Make a decorator: the command gets the open broker, not its URL and the options named."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(store: str, **given: Any) -> None:
            chosen = {name: given.pop(name) for name in names}
            with opening(store, **chosen) as broker:
                command(broker, **given)

        return cast(Command, store_option(run))

    return decorate


changes_store = _on_store(open_store)
reads_store = options(
    click.option(
        "--read-only", is_flag=True, help="Read a store on object storage beside its owner."
    ),
    _on_store(open_to_look, "read_only"),
)


def polls(url: str, every_ms: int) -> Generator[Broker | Reader]:
    """Give the open store for one look after the other; a reader shows one moment, so a new one."""
    pause = partial(threading.Event().wait, every_ms / 1000)
    while url.startswith("slatedb+"):
        with open_to_look(url) as reader:
            yield reader
        pause()
    with open_to_look(url) as broker:
        while True:
            yield broker
            pause()


every_option = click.option(
    "--every", "every_ms", type=duration, default="1s", show_default=True, help="Look so often."
)


# --- output ---------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Turn structs into what JSON has; a payload that is not text becomes ``payload_base64``."""
    return _readable(msgspec.to_builtins(value, builtin_types=(bytes,)))


def _readable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_readable(each) for each in value]
    if not isinstance(value, dict):
        return value
    readable: dict[str, Any] = {}
    for name, each in value.items():
        if isinstance(each, bytes):
            try:
                readable[name] = each.decode()
            except UnicodeDecodeError:
                readable[f"{name}_base64"] = each
        else:
            readable[name] = _readable(each)
    return readable


def wants_json() -> bool:
    """Whether the command was called with --json."""
    return bool(click.get_current_context().meta.get(f"{__name__}.json"))


def emit_json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(json_text(value))


def json_text(value: Any) -> str:
    """Write a value as JSON."""
    return msgspec.json.format(msgspec.json.encode(plain(value)), indent=2).decode()


def answer(value: Any, text: str) -> None:
    """Print a value as JSON, or the text."""
    if wants_json():
        emit_json(value)
    else:
        click.echo(text)


def say_answer(value: Any, text: str) -> None:
    """Do the same at the end of a command that runs on if that can't be said."""
    say(json_text(value) if wants_json() else text)


def show(value: Any, columns: Sequence[str], *, empty: str) -> None:
    """Print structs as JSON or as a table."""
    if wants_json():
        emit_json(value)
    else:
        show_table(columns, value, empty=empty)


def show_fields(
    value: msgspec.Struct, heading: str, column: str = ":count", *, skip: str = ""
) -> None:
    """Print one struct as JSON, or a table of its fields."""
    if wants_json():
        emit_json(value)
    else:
        fields = [(name, each) for name, each in plain(value).items() if name != skip]
        show_table((heading, column), fields)


def show_table(columns: Sequence[str], rows: Iterable[Any], *, empty: str = "") -> None:
    """Print a table, or one line if it has no rows.

    Rows are tuples or structs. A column ``heading=field`` shows a field of structs; one named
    ``:x`` holds numbers.
    """
    names = [column.removeprefix(":").partition("=") for column in columns]
    fields, headings = (
        [field or heading for heading, _, field in names],
        [each[0] for each in names],
    )
    texts = []
    for row in rows:
        cells = [_cell(row, each) for each in fields] if isinstance(row, msgspec.Struct) else row
        texts.append(["" if cell is None else printable(str(cell)) for cell in cells])
    if not texts:
        click.echo(empty)
        return
    if len(texts) > _DRAWN_ROWS:
        click.echo("\n".join(map("\t".join, [headings, *texts])))
        return
    # Loaded here: commands that print JSON, and --help, do without.
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table()
    for heading, column in zip(headings, columns, strict=True):
        right = column.startswith(":")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for cells in texts:
        table.add_row(*map(Text, cells))
    width = None if sys.stdout.isatty() else _UNCUT_WIDTH
    Console(file=sys.stdout, width=width).print(table)


def _cell(row: msgspec.Struct, field: str) -> object:
    value = getattr(row, field)
    if field.endswith("_ms"):
        return when(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return msgspec.json.encode(value).decode()
    return preview(value) if isinstance(value, bytes) else value


def plain_explanation(found: Explanation) -> dict[str, Any]:
    """Turn the explanation of a filter into what JSON has."""
    return {
        "text": found.text,
        "result": found.result,
        "values": dict(found.values),
        "parts": [plain_explanation(part) for part in found.parts],
    }


def show_explanation(found: Explanation) -> None:
    """Print the conditions of a filter as a tree, each with its result and the values it read."""
    from rich.console import Console  # noqa: PLC0415 - a JSON answer does without
    from rich.text import Text  # noqa: PLC0415
    from rich.tree import Tree  # noqa: PLC0415

    def grow(part: Explanation, add: Callable[[Text], Tree]) -> Tree:
        label = Text(f"{WORDS[part.result]:8}", style=_STYLES[part.result])
        label.append(printable(part.text), style="default")
        if part.values:
            values = ((name, msgspec.json.encode(value).decode()) for name, value in part.values)
            read = ", ".join(f"{printable(name)} is {printable(value)}" for name, value in values)
            label.append(f"   ({read})", style="dim")
        branch = add(label)
        for each in part.parts:
            grow(each, branch.add)
        return branch

    Console(file=sys.stdout, soft_wrap=True).print(grow(found, Tree))


def printable(text: str) -> str:
    """Escape characters that would steer a terminal: texts of messages are anybody's."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def preview(payload: bytes | None) -> str:
    """Show the beginning of a payload."""
    if payload is None:
        return ""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return f"{len(payload)} bytes"
    text = printable(text)
    return text if len(text) <= _PREVIEW_CHARS else f"{text[:_PREVIEW_CHARS]}…"


def when(ms: int | None) -> str:
    """Show a time, in UTC."""
    if ms is None:
        return ""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


@contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function to call with (done, in all), which draws a bar if there is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console  # noqa: PLC0415 - only on a terminal
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def purge_in_steps(broker: Broker, queue: str, states: Sequence[str]) -> int:
    """Remove the messages of a queue that are in one of the states, and show how far that is."""
    removed = depth = 0
    # A key that may purge a queue may not be allowed to count its messages.
    with suppress(NotAllowed):
        stats = broker.stats(queue)
        depth = sum(getattr(stats, state) for state in set(states))
    with progress_bar(f"removing messages of {queue}") as bar:
        while True:
            one = broker.purge(queue, states=states, limit=PURGE_STEP)
            removed += one
            bar(removed, max(depth, removed))
            # Messages that come meanwhile must not keep this going for ever.
            if one < PURGE_STEP or 0 < depth <= removed:
                return removed
