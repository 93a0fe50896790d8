"""Long-running processes and their care: ``serve``, ``config``, ``work``, ``keys``."""

from __future__ import annotations

import contextlib
import os
import sys
import typing
from pathlib import Path
from typing import Any, Final

import click

import penstock
from penstock import limits
from penstock.cli import common
from penstock.cli.common import duration, size
from penstock.cli.opening import open_store
from penstock.errors import InvalidInput
from penstock.server import keys as keys_file
from penstock.server.config import SETTINGS, configure_logs, load, parse_address
from penstock.server.security import ACTIONS
from penstock.worker.outcome import resolve
from penstock.worker.stats import serve_metrics

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.server.config import Setting
    from penstock.worker import WorkerStats

_METAVARS: Final = {
    "Duration": "DURATION",
    "Size": "SIZE",
    "Address": "HOST:PORT|off",
    "ConsolePlace": "HOST:PORT|on|off",
    "int": "N",
}


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

    Then it is not ready, and serves for the drain delay. After that no more calls are taken, those
    that run are finished, claims that wait are handed back, and the store is closed; a second
    signal ends it at once. SIGHUP reads keys and certificate
    again. Listeners are those that are named; if none is, native, HTTP and Flight at their usual
    ports of this machine.
    """
    config = load(file=config_file, environment=os.environ, flags=flags).config
    configure_logs(config.log_level, config.log_format, steps=config.log_life)
    from penstock.server import process  # noqa: PLC0415 - needs an extra

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
              help="Messages to claim ahead.  [default: adapts]")  # fmt: skip
@click.option("--dequeue-max", type=click.IntRange(1, limits.MAX_CLAIM_LIMIT), default=100,
              show_default=True, help="Messages of one claim at the most.")  # fmt: skip
@click.option("--time-limit", "time_limit_ms", type=duration, help="How long a handler may take.")
@click.option("--drain", "drain_ms", type=duration, default="30s", show_default=True,
              help="How long a stop waits for handlers that run.")  # fmt: skip
@click.option("--consumer", help="Who is claiming.  [default: HOST-PID]")
@click.option("--child-messages", type=click.IntRange(1), metavar="N",
              help="Replace a child process after so many messages.")  # fmt: skip
@click.option("--child-memory", "child_memory_bytes", type=size, metavar="SIZE",
              help="Replace a child process that takes more memory after a message.")  # fmt: skip
@click.option("--ready-file", metavar="FILE",
              help="A file that is there while messages can be taken.")  # fmt: skip
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
    those that are worked on are finished; a second signal cuts them off.
    """
    if ":" not in handler:
        raise click.BadParameter(f"{handler!r} is not MODULE:FUNCTION", param_hint="handler")
    configure_logs(log_level, log_format)
    sys.path.insert(0, str(Path.cwd()))
    resolve(handler)
    with contextlib.ExitStack() as stack:
        worker = penstock.Worker(
            stack.enter_context(open_store(store, background=True)),
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


def _serve_metrics(
    stats: Callable[[], WorkerStats], address: str, stack: contextlib.ExitStack
) -> None:
    host, port = parse_address(address)
    try:
        bound = stack.enter_context(serve_metrics(stats, host, port))
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
@click.option("--messages-per-second", type=click.IntRange(0), default=0,
              help="How fast it may publish; 0: no limit.")  # fmt: skip
@click.option("--bytes-per-second", type=click.IntRange(0), default=0,
              help="The same in bytes of payloads.")  # fmt: skip
@_keys_option
@common.json_option
def add(path: Path, key_id: str, permissions: tuple[str, ...], **settings: Any) -> None:
    """Make a key and show its secret, this once.

    A running server takes it up by itself. Of the secret the file holds a salted hash only,
    except with --sqs: signatures can't be checked without the secret itself, so whoever can read
    the file can use those keys.
    """
    secret = keys_file.add_key(path, key_id, list(permissions), **settings)
    _show_secret(path, key_id, secret)


def _show_secret(path: Path, key_id: str, secret: str) -> None:
    token = f"{key_id}:{secret}"
    if common.wants_json():
        common.emit_json({"key_id": key_id, "secret": secret, "token": token})
        return
    click.echo(f"key    {key_id}\nsecret {secret}\ntoken  {token}")
    click.echo("The secret is not shown again.", err=True)
    if keys_file.read_keys(path)[key_id].secret:
        click.echo(f"{path} holds the secret itself, as SQS signatures need it.", err=True)


@keys.command("rotate")
@click.argument("key_id")
@click.option("--finish", is_flag=True, help="Take the former secret away.")
@_keys_option
@common.json_option
def rotate(path: Path, key_id: str, *, finish: bool) -> None:
    """Give a key a new secret and show it, this once; the former one stays good until --finish.

    The metric penstock_key_former_secret_used_timestamp_seconds says when a server last saw it.
    """
    if finish:
        keys_file.finish_rotation(path, key_id)
        common.answer({"finished": key_id}, f"the former secret of {key_id} is refused from now on")
        return
    _show_secret(path, key_id, keys_file.rotate_key(path, key_id))


@keys.command("list")
@_keys_option
@common.json_option
def list_keys(path: Path) -> None:
    """List the keys and what they may do; no secrets."""
    rows = [
        (key_id, key.permissions, bool(key.secret), len(key.secrets), key.description,
         keys_file.rates_of(key))
        for key_id, key in sorted(keys_file.read_keys(path).items())
    ]  # fmt: skip
    if common.wants_json():
        names = ("key_id", "permissions", "sqs", "secrets", "description", *keys_file.RATES)
        common.emit_json([dict(zip(names, (*row, *rates), strict=True)) for *row, rates in rows])
        return
    texts = [
        (
            name,
            " ".join(may),
            "yes" if sqs else "no",
            secrets,
            text,
            *(each or "" for each in rates),
        )
        for name, may, sqs, secrets, text, rates in rows
    ]
    columns = ("key", "may", "sqs", ":secrets", "description", ":messages/s", ":bytes/s")
    common.show_table(columns, texts, empty="there are no keys")


@keys.command("remove")
@click.argument("key_id")
@_keys_option
@common.json_option
def remove(path: Path, key_id: str) -> None:
    """Take a key away; a running server refuses it within seconds."""
    keys_file.remove_key(path, key_id)
    common.answer({"removed": key_id}, f"removed {key_id}")


@keys.command("check")
@click.option("--action", type=click.Choice(ACTIONS), help="May it do this?")
@click.option("--queue", default="*", show_default=True, help="On which queue?")
@_keys_option
@common.json_option
@click.pass_context
def check(ctx: click.Context, path: Path, action: str | None, queue: str) -> None:
    """Check the keys file, and a token (ID:SECRET) if one comes by standard input.

    Ends with 1 if the token is refused, or may not do the action.
    """
    known = keys_file.Keys(path)
    token = "" if sys.stdin.isatty() else sys.stdin.readline().strip()
    if not token:
        common.answer({"keys": len(known)}, f"{path} is sound: {len(known)} keys")
        return
    principal = known.by_token(token)
    if principal is None:
        common.answer({"key_id": None, "allowed": False}, "the token is refused")
        ctx.exit(1)
    allowed = action is None or principal.may(action, queue)
    what = "" if action is None else f"; it may {'' if allowed else 'not '}{action} on {queue}"
    text = f"the token is that of key {principal.key_id}{what}"
    common.answer({"key_id": principal.key_id, "allowed": allowed}, text)
    ctx.exit(0 if allowed else 1)
