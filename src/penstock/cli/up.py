"""``penstock up``: a server on a local directory, and the route job in Spark if that is wanted.

::

    DIRECTORY/store        the store
    DIRECTORY/backups      where 'penstock backup NAME' writes
    DIRECTORY/checkpoint   of the route job, and route.log, what it says

The server runs in this process, so that nothing is left behind however it ends; the route job is
a process of its own, which ends with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli import common
from penstock.errors import InvalidInput
from penstock.server.config import LISTENERS, OFF, SETTINGS, configure_logs, load, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How long the route job may take to end.
STOP_SECONDS: Final = 15.0


@click.command("up")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path),
                default="penstock-data")  # fmt: skip
@click.option(
    "--spark", is_flag=True, help="Route with Spark, in a store whose routing is pipeline."
)
@click.option("--native", metavar="HOST:PORT", help="Where to serve native clients.")
@click.option("--http", metavar="HOST:PORT", help="Where to serve the console and SQS.")
@click.option("--flight", metavar="HOST:PORT", help="Where to serve Arrow Flight.")
@common.json_option
def up(directory: Path, *, spark: bool, **places: str | None) -> None:
    """Serve a local directory, with the console, and say what to try.

    Makes DIRECTORY (./penstock-data) if it is not there. A usual port that is taken is replaced by
    a free one. Only this machine can connect: for others, use 'penstock serve'. Ctrl-C ends it.
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

        def say(line: str) -> None:
            if line.startswith("serving "):
                places_told = line.rpartition(" at ")[2].split(", ")
                urls = {url.partition(":")[0]: url for url in places_told}
                if spark:
                    ends.append(jobs.enter_context(_route_job(directory, urls["grpc"])))
                _tell(directory, urls)
            elif line.startswith("stopping"):
                # First: it can't work without the server.
                for end in ends:
                    end()

        process.serve(config, say)
    if not common.wants_json():
        click.echo("stopped")


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


def _tell(directory: Path, urls: dict[str, str]) -> None:
    """Say where the server is, by the schemes of its listeners, and what to try."""
    native = urls.get("penstock", "")
    if common.wants_json():
        found = {"console": urls.get("http", ""), "native": native, "flight": urls.get("grpc", "")}
        common.emit_json({"directory": str(directory), **found})
    else:
        click.echo(f"Penstock is up, in {directory}")
        for scheme, about in (("http", "console"), ("penstock", "clients"), ("grpc", "Spark")):
            if scheme in urls:
                more = "/  (and SQS clients)" if scheme == "http" else ""
                click.echo(f"  {about:9}{urls[scheme]}{more}")
        click.echo(
            f"In another terminal, try:\n  export PENSTOCK_URL={native}\n"
            "  penstock create orders && penstock send orders hello && penstock top\n"
            "Ctrl-C ends it; the directory stays."
        )
    sys.stdout.flush()


# --- the route job --------------------------------------------------------------------------------


def _need_spark(flight: str | None) -> None:
    missing = [name for name in ("pyspark", "pyarrow") if find_spec(name) is None]
    if missing or flight == OFF or not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        raise click.ClickException(
            "--spark needs pip install 'penstock[spark,flight]', Java 17 or newer, and Flight: "
            "'penstock doctor --need spark' says what is missing"
        )


@contextlib.contextmanager
def _route_job(directory: Path, location: str) -> Iterator[Callable[[], None]]:
    """Run the route job until the end of the block; give a function that tells it to end."""
    log = directory / "route.log"
    command = [sys.executable, "-m", "penstock", "pipeline", "route", "--location", location,
               "--checkpoint", str(directory / "checkpoint")]  # fmt: skip
    ending = threading.Event()
    with log.open("ab") as output:
        # A group of its own, with Java in it: Ctrl-C is for the server, which ends the job.
        job = subprocess.Popen(  # noqa: S603 - this Python
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    def end() -> None:
        ending.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)

    def watch() -> None:
        code = job.wait()
        if not ending.is_set():
            click.echo(f"the route job has ended with {code}: see {log}", err=True)

    watcher = threading.Thread(target=watch, name="penstock-route-job")
    watcher.start()
    try:
        yield end
    finally:
        end()
        watcher.join(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        watcher.join()
