"""Long-running processes and their care: ``serve``, ``config``, ``work``, ``keys``, backups."""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
import sys
import typing
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click
import msgspec
from click.core import ParameterSource

import penstock
from penstock import limits
from penstock.cli import common
from penstock.cli.common import duration
from penstock.errors import InvalidInput, NotAllowed, PenstockError, StoreLocked
from penstock.server import backup as backups
from penstock.server import security
from penstock.server.config import SETTINGS, configure_logs, load, parse_address
from penstock.worker.outcome import resolve
from penstock.worker.stats import serve_metrics

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.client import Client
    from penstock.server.config import Setting
    from penstock.worker import WorkerStats

BACKUP_TIMEOUT_SECONDS: Final = 3_600
_METAVARS: Final = {"Duration": "DURATION", "Size": "SIZE", "Address": "HOST:PORT|off", "int": "N"}


# --- serve and config -----------------------------------------------------------------------------


def _option(setting: Setting) -> Any:
    """Return the option of a setting; not given, it is None."""
    kind = typing.get_args(setting.kind)[0]
    if kind is bool:
        names = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
        return click.option(names, setting.field, default=None, help=setting.about)
    text = f"{setting.about} [{setting.variable}]"
    return click.option(
        setting.flag, setting.field, metavar=_metavar(setting.field, kind), help=text
    )


def _metavar(field: str, kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(each for each in typing.get_args(kind) if each)
    if field == "store":
        return "URL"
    # Of a setting that has no value by default, the other of two kinds.
    kind = (*typing.get_args(kind), kind)[0]
    return _METAVARS.get(kind.__name__, "FILE" if field != "account_id" else "DIGITS")


_settings = common.options(
    click.option(
        "--config", "config_file", metavar="FILE", help="Settings, TOML. [PENSTOCK_CONFIG]"
    ),
    *(_option(setting) for setting in SETTINGS.values()),
)


@click.command("serve")
@_settings
def serve(config_file: str | None, **flags: Any) -> None:
    """Serve a store until SIGTERM or SIGINT.

    Then no more calls are taken, those that run are finished, claims that wait are handed back,
    and the store is closed; a second signal ends it at once. SIGHUP reads keys and certificate
    again. Listeners are those that are named; if none is, native, HTTP and Flight at their usual
    ports of this machine.
    """
    config = load(file=config_file, environment=os.environ, flags=flags).config
    configure_logs(config.log_level, config.log_format)
    try:
        from penstock.server import process  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise click.ClickException(
            f"{error}: serving needs pip install 'penstock[server]'"
        ) from error
    process.serve(config, _print)


def _print(line: str) -> None:
    # Standard output may be a file on a full disk, which is no reason to end.
    with contextlib.suppress(OSError):
        click.echo(line)


@click.command("config")
@common.json_option
@_settings
def config(config_file: str | None, **flags: Any) -> None:
    """Show the settings of a server and where each comes from."""
    shown = load(file=config_file, environment=os.environ, flags=flags).texts()
    if common.wants_json():
        common.emit_json({path: each._asdict() for path, each in shown.items()})
        return
    words = {True: "true", False: "false"}
    rows = [
        (path, words[value] if isinstance(value, bool) else value, source)
        for path, (value, source) in shown.items()
    ]
    common.show_table(("setting", "value", "from"), rows)


# --- work -----------------------------------------------------------------------------------------


@click.command("work")
@click.argument("handler", metavar="MODULE:FUNCTION")
@click.option("--queue", "queues", metavar="QUEUE", multiple=True, required=True,
              help="A queue to work on; repeatable.")  # fmt: skip
@click.option("--concurrency", type=click.IntRange(1, limits.MAX_CONCURRENCY), default=4,
              show_default=True, help="Messages that are worked on at a time.")  # fmt: skip
@click.option("--processes", is_flag=True, help="Run the handler in child processes, not threads.")
@click.option("--lease", "lease_ms", type=duration, help="Instead of the queue's lease.")
@click.option("--prefetch", type=click.IntRange(0, limits.MAX_CLAIM_LIMIT),
              help="Messages to claim ahead.  [default: --concurrency]")  # fmt: skip
@click.option("--dequeue-max", type=click.IntRange(1, limits.MAX_CLAIM_LIMIT), default=100,
              show_default=True, help="Messages of one claim at the most.")  # fmt: skip
@click.option("--time-limit", "time_limit_ms", type=duration, help="How long a handler may take.")
@click.option("--drain", "drain_ms", type=duration, default="30s", show_default=True,
              help="How long a stop waits for handlers that run.")  # fmt: skip
@click.option("--consumer", help="Who is claiming.  [default: HOST-PID]")
@click.option("--metrics", metavar="HOST:PORT", help="Serve the counters for Prometheus there.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]),
              default="info", show_default=True, help="What is logged.")  # fmt: skip
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text",
              show_default=True, help="How it is written.")  # fmt: skip
@common.store_option
def work(
    handler: str,
    queues: tuple[str, ...],
    store: str,
    metrics: str | None,
    log_level: str,
    log_format: str,
    *,
    processes: bool,
    **settings: Any,
) -> None:
    """Run a function for every message of a queue.

    The module is looked for in this directory first. A message whose function returns is done;
    one whose function raises is tried again. On SIGTERM or SIGINT no more messages are claimed and
    those that are worked on are finished; a second signal cuts them off. If the server wants a
    key, PENSTOCK_TOKEN holds it, as ID:SECRET.
    """
    if ":" not in handler:
        raise click.BadParameter(f"{handler!r} is not MODULE:FUNCTION", param_hint="handler")
    configure_logs(log_level, log_format)
    sys.path.insert(0, str(Path.cwd()))
    resolve(handler)
    with contextlib.ExitStack() as stack:
        worker = penstock.Worker(
            _connect(store, stack),
            queues,
            handler,
            mode="processes" if processes else "threads",
            **settings,
        )
        if metrics is not None:
            _serve_metrics(worker.stats, metrics, stack)
        worker.run()
    stats = worker.stats()
    names = ("processed", "failed", "released", "lost", "stale")
    text = ", ".join(f"{name} {getattr(stats, name)}" for name in names)
    common.answer(stats, text)


def _connect(url: str, stack: contextlib.ExitStack) -> Broker | Client:
    """Connect to a server, or open a store that is there."""
    if url.startswith(("penstock:", "penstocks:")):
        token = os.environ.get("PENSTOCK_TOKEN", "")
        return stack.enter_context(penstock.connect(url, token=token))
    return stack.enter_context(penstock.open(url, create=False))


def _serve_metrics(
    stats: Callable[[], WorkerStats], address: str, stack: contextlib.ExitStack
) -> None:
    host, port = parse_address(address)
    try:
        bound = stack.enter_context(serve_metrics(stats, host, port))
    except ImportError as error:
        raise click.ClickException(
            f"{error}: --metrics needs pip install 'penstock[server]'"
        ) from error
    except OSError as error:
        raise InvalidInput(f"metrics can't be served at {address}: {error}") from error
    click.echo(f"metrics at http://{host}:{bound}/metrics")


# --- keys -----------------------------------------------------------------------------------------

_keys_option: Final = click.option(
    "--keys",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="PENSTOCK_AUTH_KEYS",
    show_envvar=True,
    required=True,
    help="The keys file: TOML, or JSON if its name ends so.",
)


@click.group("keys")
def keys() -> None:
    """Make, list and remove the access keys of a server."""


@keys.command("add")
@click.argument("key_id")
@click.option("--allow", "permissions", metavar="ACTION:PATTERN", multiple=True, required=True,
              help="publish, consume, admin or all, on queues by name, such as "
              "publish:orders-*.")  # fmt: skip
@click.option("--sqs", is_flag=True, help="For SQS clients too: the file then holds the secret.")
@click.option("--description", default="", help="Words for people.")
@_keys_option
@common.json_option
def add(
    path: Path, key_id: str, permissions: tuple[str, ...], description: str, *, sqs: bool
) -> None:
    """Make a key and show its secret, this once.

    A running server takes it up by itself. Of the secret the file holds a salted hash only,
    except with --sqs: signatures can't be checked without the secret itself, so whoever can read
    the file can use those keys.
    """
    secret = security.add_key(path, key_id, list(permissions), sqs=sqs, description=description)
    token = f"{key_id}:{secret}"
    if common.wants_json():
        common.emit_json({"key_id": key_id, "secret": secret, "token": token})
        return
    click.echo(f"key    {key_id}\nsecret {secret}\ntoken  {token}")
    click.echo("The secret is not shown again.", err=True)
    if sqs:
        click.echo(f"{path} holds the secret itself, as SQS signatures need it.", err=True)


@keys.command("list")
@_keys_option
@common.json_option
def list_keys(path: Path) -> None:
    """List the keys and what they may do; no secrets."""
    rows = [
        (key_id, key.permissions, bool(key.secret), key.description)
        for key_id, key in sorted(security.read_keys(path).items())
    ]
    if common.wants_json():
        names = ("key_id", "permissions", "sqs", "description")
        common.emit_json([dict(zip(names, row, strict=True)) for row in rows])
        return
    texts = [(name, " ".join(may), "yes" if sqs else "no", text) for name, may, sqs, text in rows]
    common.show_table(("key", "may", "sqs", "description"), texts, empty="there are no keys")


@keys.command("remove")
@click.argument("key_id")
@_keys_option
def remove(path: Path, key_id: str) -> None:
    """Take a key away; a running server refuses it within seconds."""
    security.remove_key(path, key_id)
    click.echo(f"removed {key_id}")


@keys.command("check")
@click.option("--action", type=click.Choice(security.ACTIONS), help="May it do this?")
@click.option("--queue", default="*", show_default=True, help="On which queue?")
@_keys_option
@click.pass_context
def check(ctx: click.Context, path: Path, action: str | None, queue: str) -> None:
    """Check the keys file, and a token (ID:SECRET) if one comes by standard input.

    Ends with 1 if the token is refused, or may not do the action.
    """
    known = security.Keys(path)
    token = "" if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not token:
        click.echo(f"{path} is sound: {len(known)} keys")
        return
    principal = known.by_token(token)
    if principal is None:
        click.echo("the token is refused")
        ctx.exit(1)
    allowed = action is None or principal.may(action, queue)
    what = "" if action is None else f"; it may {'' if allowed else 'not '}{action} on {queue}"
    click.echo(f"the token is that of key {principal.key_id}{what}")
    ctx.exit(0 if allowed else 1)


# --- backups --------------------------------------------------------------------------------------


@click.command("backup")
@click.argument("destination")
@click.option("--store", metavar="URL", envvar="PENSTOCK_STORE", show_envvar=True,
              help="A store nobody has open.")  # fmt: skip
@click.option("--server", metavar="URL", envvar="PENSTOCK_SERVER", show_envvar=True,
              help="A running server's HTTP address; DESTINATION is then a name in its backup "
              "directory.")  # fmt: skip
@click.option("--ca", metavar="FILE", help="Who has signed the server's certificate.")
@click.option("--verify", is_flag=True,
              help="Check the backup DESTINATION; with --store or --server, make it "
              "first.")  # fmt: skip
@click.pass_context
def backup(
    ctx: click.Context, destination: str, store: str | None, server: str | None, ca: str | None,
    *, verify: bool,
) -> None:  # fmt: skip
    """Copy a store to a directory that is not there yet.

    The copy is there whole or not at all. With --server the server makes it, and goes on serving;
    if it wants a key, PENSTOCK_TOKEN holds one that may admin all queues, as ID:SECRET.

    --verify reads the whole backup and changes nothing of it; ends with 1 if anything is wrong.
    It makes one only if --store or --server is on the command line, not for PENSTOCK_STORE or
    PENSTOCK_SERVER.
    """
    path = Path(destination)
    # Variables are set for other commands too: they don't make a mistyped name into a backup.
    sources = (ctx.get_parameter_source(name) for name in ("store", "server"))
    if verify and ParameterSource.COMMANDLINE not in sources:
        if not path.is_dir():
            raise click.ClickException(
                f"there is no backup at {path}; --store URL or --server URL makes one"
            )
    elif server is not None:
        made = _request_backup(server, destination, ca)
        path = Path(made["path"])
        click.echo(f"backed up to {path}: {made['bytes']} bytes")
        if verify and not path.is_dir():
            raise click.ClickException(
                f"not verified: it is on the server's machine; there, penstock backup {path} "
                "--verify"
            )
    else:
        _make_backup(path, store)
    if verify:
        report = backups.verify(path)
        count = sum(report.checked.values())
        click.echo(f"{path} is sound: {count} records were read, no violations")


def _make_backup(destination: Path, store: str | None) -> None:
    if store is None:
        raise click.UsageError("which store? Give --store URL, or --server URL if it is served")
    try:
        with common.open_store(store) as broker:
            size = backups.backup(broker, destination)
    except StoreLocked as error:
        raise click.ClickException(
            f"{error}; if that is a server: penstock backup NAME --server http://HOST:PORT"
        ) from None
    click.echo(f"backed up to {destination}: {size} bytes")


def _request_backup(server: str, name: str, ca: str | None) -> dict[str, Any]:
    url = urlsplit(server)
    if url.scheme not in {"http", "https"} or not url.hostname:
        raise InvalidInput(f"{server!r:.100} is not a server's address such as http://HOST:8816")
    connect: Any = http.client.HTTPConnection
    tls: dict[str, Any] = {}
    if url.scheme == "https":
        connect = http.client.HTTPSConnection
        tls["context"] = ssl.create_default_context(cafile=ca)
    connection = connect(url.hostname, url.port, timeout=BACKUP_TIMEOUT_SECONDS, **tls)
    headers = {"content-type": "application/json"}
    if token := os.environ.get("PENSTOCK_TOKEN"):
        headers["authorization"] = f"Bearer {token}"
    try:
        connection.request("POST", "/admin/backup", msgspec.json.encode({"name": name}), headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise PenstockError(f"no answer from {server}: {error}") from None
    finally:
        connection.close()
    try:
        made: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        made = {"message": f"status {response.status}"}
    if response.status in {401, 403}:
        raise NotAllowed(str(made.get("message")))
    if response.status != 200:
        raise PenstockError(f"{server} made no backup: {made.get('message')}")
    return made


@click.command("restore")
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", "target", type=click.Path(path_type=Path), required=True,
              help="The directory of the new store: empty, or not there.")  # fmt: skip
def restore(source: Path, target: Path) -> None:
    """Make a store of a backup.

    The backup stays as it is, and is verified first.
    """
    size = backups.restore(source, target)
    click.echo(f"restored {source} to {target}: {size} bytes; open it as rocksdb:{target}")
