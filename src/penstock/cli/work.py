"""Running a handler for every message: ``penstock work``."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import penstock
from penstock import limits
from penstock.cli.common import answer, duration, store_option
from penstock.errors import InvalidInput
from penstock.server.config import configure_logs, parse_address
from penstock.worker.outcome import resolve
from penstock.worker.stats import serve_metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.broker.broker import Broker
    from penstock.client import Client
    from penstock.worker import WorkerStats


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
@store_option
def work(
    handler: str,
    queues: tuple[str, ...],
    store: str,
    metrics: str | None,
    log_level: str,
    log_format: str,
    *,
    processes: bool,
    as_json: bool,
    **options: Any,
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
    with ExitStack() as stack:
        worker = penstock.Worker(
            _open(store, stack),
            queues,
            handler,
            mode="processes" if processes else "threads",
            **options,
        )
        if metrics is not None:
            _serve_metrics(worker.stats, metrics, stack)
        worker.run()
    stats = worker.stats()
    names = ("processed", "failed", "released", "lost", "stale")
    text = ", ".join(f"{name} {getattr(stats, name)}" for name in names)
    answer(stats, text, as_json=as_json)


def _open(url: str, stack: ExitStack) -> Broker | Client:
    """Connect to a server, or open a store that is there."""
    if url.startswith(("penstock:", "penstocks:")):
        token = os.environ.get("PENSTOCK_TOKEN", "")
        return stack.enter_context(penstock.connect(url, token=token))
    return stack.enter_context(penstock.open(url, create=False))


def _serve_metrics(stats: Callable[[], WorkerStats], address: str, stack: ExitStack) -> None:
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
