"""This machine: ``doctor`` looks for what is missing, ``completion`` prints a shell's script.

``bench`` measures a server or a store from here.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import click
import msgspec
from click.shell_completion import get_completion_class

import penstock
from penstock.cli import common
from penstock.cli.common import duration, is_server, open_store
from penstock.client.transport import servers_of
from penstock.clock import SystemClock
from penstock.errors import NotAllowed, PenstockError
from penstock.limits import MAX_CLAIM_LIMIT, MAX_CONCURRENCY, MAX_PAYLOAD_BYTES
from penstock.model import Message
from penstock.server.security import is_loopback
from penstock.store.sql.location import without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.broker.broker import Broker

# Extra: the modules that it brings.
EXTRAS: Final = {
    "server": ("uvloop", "httptools", "jinja2", "prometheus_client"),
    "flight": ("pyarrow",),
    "spark": ("pyspark", "pyarrow", "pandas"),
    "connect": ("pyspark", "grpc"),
    "delta": ("deltalake",),
    "sql": ("psycopg",),
    "slatedb": ("slatedb",),
    "queueber": ("capnp",),
    "tracing": ("opentelemetry",),
    "celery": ("celery",),
    "django": ("django",),
    "dramatiq": ("dramatiq",),
    "testing": ("pytest", "hypothesis"),
}
OLDEST_JAVA: Final = 17
# Fewer files or bytes are worth a word.
FEW_FILES: Final = 4_096
LITTLE_ROOM_BYTES: Final = 1 << 30

VERBS: Final = ("publish", "claim", "ack")
# Messages of bench that wait at the most, for each worker: claims find some, and a disk is not
# filled.
AHEAD: Final = 1_000


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at: fine, missing though it was asked for, or worth a word."""

    what: str
    state: Literal["ok", "missing", "note"]
    text: str
    hint: str = ""


@click.command("doctor")
@click.option("--need", "needs", type=click.Choice(list(EXTRAS)), multiple=True,
              help="It must be there; can be repeated.")  # fmt: skip
@common.url_option("--url", "--store", needed=False, help="A server or a store that must answer.")
@common.json_option
@click.pass_context
def doctor(ctx: click.Context, needs: tuple[str, ...], store: str) -> None:
    """Look for what is missing on this machine.

    Ends with 1 if something that was asked for, by --need or --url, is missing.
    """
    findings = [*_machine(), *_extras(needs), *_java(needed="spark" in needs)]
    if url := store or common.client_settings().url:
        findings += _url(url)
    common.show(findings, ("what", "state", "found=text", "how to get it=hint"), empty="")
    if any(each.state == "missing" for each in findings):
        ctx.exit(1)


def _found(what: str, text: str, hint: str, *, fine: bool, needed: bool = False) -> Finding:
    """Make a finding; what is not fine is missing if it is needed, and else worth a word."""
    if fine:
        return Finding(what, "ok", text)
    return Finding(what, "missing" if needed else "note", text, hint)


def _machine() -> Iterator[Finding]:
    yield Finding(
        "Penstock", "ok", f"{penstock.__version__}, on Python {platform.python_version()}"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unbounded = hard == resource.RLIM_INFINITY
    text = f"{soft:,} now, up to {'any number' if unbounded else f'{hard:,}'}"
    hint = "a server takes one for each connection: ulimit -Hn 65536"
    yield _found("open files", text, hint, fine=unbounded or hard >= FEW_FILES)
    free = shutil.disk_usage(Path.cwd()).free
    text, hint = f"{free / (1 << 30):.1f} GiB free here", "a full disk takes no more messages"
    yield _found("disk", text, hint, fine=free >= LITTLE_ROOM_BYTES)


def _extras(needs: tuple[str, ...]) -> Iterator[Finding]:
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if find_spec(name) is None]
        what = f"penstock[{extra}]"
        text, hint = f"no {', '.join(missing)}" if missing else "installed", f"pip install '{what}'"
        yield _found(what, text, hint, fine=not missing, needed=extra in needs)


def _java(*, needed: bool) -> Iterator[Finding]:
    """Look for the Java that Spark would start."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home) / "bin" / "java") if home else "java")
    version = 0
    if java is not None:
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(  # noqa: S603 - the Java that Spark would start
                [java, "-version"], capture_output=True, text=True, timeout=30, check=True
            )
            if found := re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout):
                version = int(found[1])
    text = f"{version}, {java}" if version else f"none (JAVA_HOME is {home or 'not set'})"
    hint = f"Spark needs Java {OLDEST_JAVA} or newer: apt install default-jre-headless"
    yield _found("Java", text, hint, fine=version >= OLDEST_JAVA, needed=needed)


def _url(url: str) -> Iterator[Finding]:
    """Try a server or a store: that it answers, and what the key may do."""
    shown = without_password(url)
    seconds = SystemClock().seconds
    try:
        with common.open_to_look(url) as broker:
            begin = seconds()
            try:
                count = f"{len(broker.queues()):,} queues"
            except NotAllowed as error:
                count = f"the key is known, and may not list queues ({error})"
            yield Finding(shown, "ok", f"answers in {(seconds() - begin) * 1000:.1f} ms; {count}")
    except (PenstockError, click.ClickException) as error:
        # Other errors say by themselves what to do.
        hint = "'penstock keys add' makes a key" if isinstance(error, NotAllowed) else ""
        yield Finding(shown, "missing", getattr(error, "message", str(error)), hint)
        return
    if url.startswith("penstocks:"):
        yield Finding("TLS", "ok", "the certificate is trusted")
    elif is_server(url) and not all(is_loopback(each.host) for each in servers_of(url).addresses):
        hint = "penstocks://, and tls.certificate of the server"
        yield Finding("TLS", "note", "keys and messages can be read on the way", hint)


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    Put it where the shell looks for it, or evaluate it in the shell's own start file.
    """
    found: Any = get_completion_class(shell)
    click.echo(found(ctx.find_root().command, {}, "penstock", "_PENSTOCK_COMPLETE").source())


# --- bench ----------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of bench that was timed."""

    verb: str
    seconds: float
    messages: int


def _load(broker: Broker, message: Message, batch: int, seconds: float) -> list[Call]:
    """Publish, claim and ack until the time is over; one worker of several, on a thread."""
    calls: list[Call] = []
    now = SystemClock().seconds
    until = now() + seconds
    queue = str(message.attributes["queue"])

    def timed(verb: str, call: Callable[[], list[Any]]) -> list[Any]:
        begin = now()
        answer = call()
        # An empty claim is no claim of messages.
        if answer:
            calls.append(Call(verb, now() - begin, len(answer)))
        return answer

    ahead = 0
    while now() < until:
        if ahead < AHEAD:
            ahead += len(timed("publish", partial(broker.publish, [message] * batch)))
        if taken := timed("claim", partial(broker.claim, queue, limit=batch)):
            receipts = [each.receipt for each in taken]
            ahead -= len(timed("ack", partial(broker.ack, receipts)))
    return calls


@click.command("bench")
@click.option("--seconds", "run_ms", type=duration, default="5s", show_default=True,
              help="How long.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, MAX_CONCURRENCY), default=4, show_default=True,
              help="Threads that publish, claim and ack.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1, MAX_CLAIM_LIMIT), default=10, show_default=True,
              help="Messages of one call.")  # fmt: skip
@click.option("--size", type=click.IntRange(0, MAX_PAYLOAD_BYTES), default=100, show_default=True,
              help="Bytes of a payload.")  # fmt: skip
@common.store_option
def bench(store: str, run_ms: int, workers: int, batch: int, size: int) -> None:
    """Measure a server or a store with a short load.

    It publishes to a queue of its own, which is removed at the end; what it published stays in the
    metadata log for as long as that is kept. A missing store is not made, memory: is. Workers share
    one connection or broker: the figures are those of one Python program, and no more than that.
    """
    clock = SystemClock()
    queue = f"penstock-bench-{clock.lease_id().hex()[-12:]}"
    memory = store == "memory:"
    with penstock.open(store) if memory else open_store(store, background=True) as broker:
        info = broker.info()
        if info.routing != "inline":
            raise click.ClickException("bench can't wait for the pipeline that routes this store")
        broker.create_queue(queue, description="of penstock bench")
        try:
            message = Message(b"x" * size, {"queue": queue})
            begin = clock.seconds()
            with ThreadPoolExecutor(workers) as threads:
                loads = [threads.submit(_load, broker, message, batch, run_ms / 1000)
                         for _ in range(workers)]  # fmt: skip
                calls = [call for load in loads for call in load.result()]
            took = clock.seconds() - begin
        finally:
            broker.delete_queue(queue)
    ran = {
        "on": without_password(store), "design": info.design, "penstock": penstock.__version__,
        "kind": "a server" if is_server(store) else "a store of this process",
        "workers": workers, "batch": batch, "payload_bytes": size, "seconds": round(took, 2),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
    }  # fmt: skip
    figures = [_measured(verb, calls, took) for verb in VERBS]
    if common.wants_json():
        common.emit_json({**ran, "figures": figures})
        return
    rows = [tuple(each.values()) for each in figures]
    common.show_table(("verb", ":calls", ":messages/s", ":p50 ms", ":p99 ms"), rows)
    click.echo(
        "{on} ({kind}, {design}); {workers} threads, {batch} messages of {payload_bytes} bytes in "
        "a call, for {seconds} s; Python {python}, {machine}, Penstock {penstock}".format(**ran)
    )


def _measured(verb: str, calls: list[Call], seconds: float) -> dict[str, Any]:
    """Return how often a verb was called, messages in a second, and how long a call took."""
    mine = [call for call in calls if call.verb == verb]
    times = sorted(call.seconds for call in mine) or [0.0]
    return {
        "verb": verb,
        "calls": len(mine),
        "messages_per_second": round(sum(call.messages for call in mine) / seconds, 1),
        "p50_ms": round(times[(len(times) - 1) // 2] * 1000, 3),
        "p99_ms": round(times[int(0.99 * (len(times) - 1))] * 1000, 3),
    }
