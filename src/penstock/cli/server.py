"""Long-running processes and their care: ``serve``, ``config``, ``up``, ``work``, ``keys``."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import typing
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

import penstock
from penstock import limits
from penstock.cli import common
from penstock.cli.common import duration, open_store, size
from penstock.clock import SystemClock
from penstock.errors import InvalidInput
from penstock.server import keys as keys_file
from penstock.server.config import LISTENERS, OFF, SETTINGS, load, parse_address
from penstock.server.logs import configure_logs, say
from penstock.worker.outcome import resolve
from penstock.worker.stats import serve_metrics

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.server.config import Setting

_METAVARS: Final = {
    "Duration": "DURATION",
    "Size": "SIZE",
    "Address": "HOST:PORT|off",
    "ConsolePlace": "HOST:PORT|on|off",
    "int": "N",
}
# How long the pipeline of 'up' may take to end; how often it is looked at, and spoken of while it
# starts.
STOP_SECONDS: Final = 45.0
LOOK_SECONDS: Final = 0.5
SAY_SECONDS: Final = 5.0
OPERATIONS: Final = "127.0.0.1:8818"


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

    process.serve(config, say)


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


# --- up -------------------------------------------------------------------------------------------


@click.command("up")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path),
                default="penstock-data")  # fmt: skip
@click.option("--spark", is_flag=True, help="Run the pipeline beside it: Spark routes.")
@click.option("--native", metavar="HOST:PORT", help="Where to serve native clients.")
@click.option("--http", metavar="HOST:PORT", help="Where to serve the console and SQS.")
@click.option("--flight", metavar="HOST:PORT", help="Where to serve Arrow Flight.")
@common.json_option
def up(directory: Path, *, spark: bool, **places: str | None) -> None:
    """Serve a local directory, with the console, and say what to try.

    Makes DIRECTORY (./penstock-data) if it is not there, with the store, backups, and for --spark
    pipeline.toml, the checkpoint and the log of the pipeline. A usual port that is taken is
    replaced by a free one. Only this machine can connect: for others, use 'penstock serve'. Ctrl-C
    ends it.
    """
    if find_spec("pyarrow") is None and places["flight"] is None:
        places["flight"] = OFF
    from penstock.server import process  # noqa: PLC0415 - needs an extra
    from penstock.server.connections import bind  # noqa: PLC0415

    if spark:
        _need_spark(places["flight"])
    flags: dict[str, Any] = {f"listen_{name}": OFF for name in LISTENERS}
    for name, given in places.items():
        default = str(SETTINGS[f"listen_{name}"].default)
        flags[f"listen_{name}"] = given or _free(default, bind)
    store = f"rocksdb:{directory / 'store'}"
    flags |= {"store": store, "backup_directory": str(directory / "backups")}
    if spark:
        flags["routing"] = "pipeline"
    config = load(environment={}, flags=flags).config
    configure_logs("warning", "text")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{directory} can't be made: {error.strerror}") from None
    with contextlib.ExitStack() as jobs:
        ends: list[Callable[[], None]] = []

        def told(line: str) -> None:
            if line.startswith("serving "):
                places_told = line.rpartition(" at ")[2].split(", ")
                urls = {url.partition(":")[0]: url for url in places_told}
                if spark:
                    operations = _free(OPERATIONS, bind)
                    _tell(directory, urls, f"http://{operations}")
                    beside = _Pipeline(directory, urls, operations)
                    jobs.callback(beside.close)
                    ends.append(beside.end)
                else:
                    _tell(directory, urls)
            elif line.startswith("stopping"):
                # First: it can't work without the server.
                for end in ends:
                    end()

        process.serve(config, told)
    if not common.wants_json():
        say("stopped")


def _free(address: str, bind: Callable[[str, int], list[Any]]) -> str:
    """Return an address, with a free port if its own is taken."""
    host, port = parse_address(address)
    try:
        sockets = bind(host, port)
    except InvalidInput:
        sockets = bind(host, 0)
    port = sockets[0].getsockname()[1]
    for each in sockets:
        each.close()
    return f"{host}:{port}"


def _tell(directory: Path, urls: dict[str, str], operations: str = "") -> None:
    """Say where the server is, by the schemes of its listeners, and what to try."""
    if common.wants_json():
        found = {"console": urls.get("http", ""), "native": urls.get("penstock", "")}
        found |= {"flight": urls.get("grpc", "")} | (
            {"operations": operations} if operations else {}
        )
        say(common.json_text({"directory": str(directory), **found}))
        return
    lines = [f"Penstock is up, in {directory}"]
    for scheme, about in (("http", "console"), ("penstock", "clients"), ("grpc", "Spark")):
        if scheme in urls:
            more = "/  (and SQS clients)" if scheme == "http" else ""
            lines.append(f"  {about:9}{urls[scheme]}{more}")
    if operations:
        lines.append(f"  {'pipeline':9}{operations}/status  (runs {directory / 'pipeline.toml'})")
    else:
        lines.append(_try_it(urls))
    say("\n".join([*lines, "Ctrl-C ends it; the directory stays."]))


def _try_it(urls: dict[str, str]) -> str:
    return (
        f"In another terminal, try:\n  export PENSTOCK_URL={urls.get('penstock', '')}\n"
        "  penstock create orders && penstock send orders hello && penstock top"
    )


def _need_spark(flight: str | None) -> None:
    missing = [name for name in ("pyspark", "pyarrow") if find_spec(name) is None]
    if missing or flight == OFF or not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        raise click.ClickException(
            "--spark needs pip install 'penstock[spark,flight]', Java 17 or newer, and Flight: "
            "'penstock doctor --need spark' says what is missing"
        )


_PIPELINE_FILE: Final = """\
# The pipeline that 'penstock up --spark' runs beside the server: docs/pipeline.md.
[spark]
quick = true

[route]
checkpoint = "checkpoint"
"""


class _Pipeline:
    """The pipeline beside the server of 'up': its process, and how far it is."""

    def __init__(self, directory: Path, urls: dict[str, str], operations: str) -> None:
        """``urls`` of the server are by their schemes."""
        self.log, self._over = directory / "pipeline.log", threading.Event()
        self._urls, self._address = urls, parse_address(operations)
        # Only a thread of the command knows its context.
        self._quiet = common.wants_json()
        file = directory / "pipeline.toml"
        if not file.exists():
            file.write_text(_PIPELINE_FILE, encoding="utf-8")
        command = [sys.executable, "-m", "penstock", "pipeline", "run", str(file),
                   "--location", urls["grpc"], "--operations", operations]  # fmt: skip
        with self.log.open("ab") as output:
            # A group of its own, with Java in it: Ctrl-C is for the server, which ends it.
            self._process = subprocess.Popen(  # noqa: S603 - this Python
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self._watcher = threading.Thread(target=self._watch, name="penstock-pipeline")
        self._watcher.start()

    def end(self) -> None:
        """Tell the pipeline to end; a second signal would end it at once."""
        if not self._over.is_set():
            self._over.set()
            self._signal(signal.SIGTERM, self._process.pid)

    def close(self) -> None:
        """End the pipeline, and wait for that."""
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL, -self._process.pid)
        self._watcher.join()
        if self._process.wait():
            click.echo(f"the pipeline was not ended in order: see {self.log}", err=True)

    def _signal(self, number: signal.Signals, pid: int) -> None:
        # To the process alone, which ends Spark in order; in the end to all of its group.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _watch(self) -> None:
        """Say how far the start is, then that routing runs, then if it ends."""
        clock, told, waiting = SystemClock(), 0.0, True
        begin = clock.seconds()
        while (code := self._process.poll()) is None:
            seconds = clock.seconds() - begin
            why = self._unready() if waiting else ""
            if waiting and not why:
                waiting = False
                self._say(f"Routing runs, after {seconds:.0f} s. {_try_it(self._urls)}")
            elif waiting and seconds >= told + SAY_SECONDS:
                told = seconds
                self._say(f"  {why} ({seconds:.0f} s; the log is {self.log})")
            self._over.wait(LOOK_SECONDS)
        if not self._over.is_set():
            click.echo(f"the pipeline has ended with {code}: see {self.log}", err=True)

    def _say(self, text: str) -> None:
        if not self._quiet and not self._over.is_set():
            say(text)

    def _unready(self) -> str:
        """Ask the pipeline why it is not ready; empty: it is."""
        connection = HTTPConnection(*self._address, timeout=5)
        try:
            connection.request("GET", "/ready")
            answer = connection.getresponse()
            text = answer.read().decode().splitlines()
        except (OSError, HTTPException):
            return "the pipeline is starting"
        finally:
            connection.close()
        return "" if answer.status == 200 else text[0]


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
            host, port = parse_address(metrics)
            try:
                port = stack.enter_context(serve_metrics(worker.stats, host, port))
            except OSError as error:
                raise InvalidInput(f"metrics can't be served at {metrics}: {error}") from error
            say(f"metrics at http://{host}:{port}/metrics")
        worker.run()
    stats = worker.stats()
    names = ("processed", "failed", "released", "lost", "stale")
    text = ", ".join(f"{name} {getattr(stats, name)}" for name in names)
    common.say_answer(stats, text)


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
    columns = ("key", "may", "sqs", ":secrets", "description", ":messages/s", ":bytes/s")
    names = ("key_id", "permissions", "sqs", "secrets", "description", *keys_file.RATES)
    rows = [
        (key_id, key.permissions, bool(key.secret), len(key.secrets), key.description,
         *keys_file.rates_of(key))
        for key_id, key in sorted(keys_file.read_keys(path).items())
    ]  # fmt: skip
    if common.wants_json():
        common.emit_json([dict(zip(names, row, strict=True)) for row in rows])
        return
    texts = [
        (key_id, " ".join(may), "yes" if sqs else "no", *more, *(each or "" for each in rates))
        for key_id, may, sqs, *more, rates in ((*row[:5], row[5:]) for row in rows)
    ]
    common.show_table(columns, texts, empty="there are no keys")


@keys.command("remove")
@click.argument("key_id")
@_keys_option
@common.json_option
def remove(path: Path, key_id: str) -> None:
    """Take a key away; a running server refuses it within seconds, unless it was the last one."""
    left = keys_file.remove_key(path, key_id)
    common.answer({"removed": key_id}, f"removed {key_id}")
    if not left:
        click.echo("It was the last: a running server keeps it until the file has a key, or until "
                   "it is restarted.", err=True)  # fmt: skip
