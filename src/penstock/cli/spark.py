"""Spark over a broker that serves Flight: routing, and the jobs on its history."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import click

from penstock.cli import common
from penstock.cli.common import Command, duration, given_files, is_server, tls_options
from penstock.clock import SystemClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.pipeline.file import Settings
    from penstock.spark.jobs import Archived

Job: TypeAlias = Callable[..., Any]


@click.group("pipeline")
def pipeline() -> None:
    """Work on a broker with Spark; needs penstock[spark] and Java."""


def _check_flight(_: click.Context, __: click.Parameter, location: str) -> str:
    if is_server(location):
        raise click.BadParameter(
            f"{location} is the native port, and Spark reads over Arrow Flight: name that address "
            "of the server, such as grpc://127.0.0.1:8815"
        )
    from penstock.flight.location import locate  # noqa: PLC0415 - needs an extra

    # It has the access with it, wherever it goes.
    ca, certificate, key = given_files()
    retry_ms = click.get_current_context().meta[_RETRY]
    return locate(location, ca=ca, certificate=certificate, key=key, retry_ms=retry_ms)


def _note_retry(ctx: click.Context, _: click.Parameter, retry_ms: int) -> None:
    ctx.meta[_RETRY] = retry_ms


_RETRY = f"{__name__}.retry-for"
_location_option = common.options(
    click.option(
        "--url",
        "--location",
        "location",
        metavar="URL",
        envvar="PENSTOCK_FLIGHT",
        required=True,
        show_envvar=True,
        callback=_check_flight,
        help="The broker's Flight address, such as grpc://127.0.0.1:8815.",
    ),
    # Before the URL, whose callback needs it.
    click.option(
        "--retry-for",
        type=duration,
        default="5m",
        show_default=True,
        is_eager=True,
        expose_value=False,
        callback=_note_retry,
        help="How long to wait for a broker that was there and is away.",
    ),
    tls_options,
)
_spark_options = common.options(
    common.json_option,
    _location_option,
    click.option(
        "--master", help="Where Spark runs its tasks: local[*] unless Spark's own settings say it."
    ),
)
_queues_option = click.option(
    "--queue", "queues", multiple=True, help="Only this queue; may be repeated."
)


def _session(master: str | None) -> SparkSession:
    """Start Spark; it is loaded only here, so that --help and status do without."""
    from penstock.spark import session  # noqa: PLC0415 - needs an extra

    # The command itself tells an error, in one line.
    return session(master, conf={"spark.log.level": "OFF", "spark.ui.enabled": "false"})


def _runs_jobs(command: Command) -> Command:
    """Let a command call ``job(name, ...)``: a job of :mod:`penstock.spark.jobs` on the broker."""

    @wraps(command)
    def run(location: str, master: str | None, **given: Any) -> None:
        def job(name: str, *args: Any, **options: Any) -> Any:
            spark = _session(master)
            from penstock.spark import jobs  # noqa: PLC0415 - needs an extra

            return getattr(jobs, name)(spark, location, *args, **options)

        command(job, **given)

    return cast(Command, _spark_options(run))


# --- the whole pipeline ---------------------------------------------------------------------------

_file_options = common.options(
    click.argument("file", type=click.Path(path_type=Path)),
    click.option("--url", "--location", "location", metavar="URL", envvar="PENSTOCK_FLIGHT",
                 show_envvar=True, help="The broker's Flight address, instead of the file's."),
    click.option("--operations", metavar="HOST:PORT|off",
                 help="The operations address, instead of the file's."),
)  # fmt: skip


@pipeline.command("run")
@click.option("--check", is_flag=True, help="Only check the file and this machine, as 'check'.")
@_file_options
def run(file: Path, location: str | None, operations: str | None, *, check: bool) -> None:
    """Run everything that FILE says, until SIGTERM or SIGINT: route, archive, reports.

    A part that fails is started again, and the others go on. Exit code 4: another pipeline has
    taken over.
    """
    settings = _checked(file, location, operations)
    if check:
        _say_settings(settings)
        return
    from penstock.pipeline.process import run as run_file  # noqa: PLC0415 - needs extras

    run_file(file, settings)


@pipeline.command("check")
@_file_options
@common.json_option
def check_file(file: Path, location: str | None, operations: str | None) -> None:
    """Say everything that is wrong with FILE, the file of a pipeline; starts no Spark."""
    _say_settings(_checked(file, location, operations))


def _checked(path: Path, location: str | None, address: str | None) -> Settings:
    """Read a file; end with a line for each thing that is wrong with it, or that is lacking."""
    from penstock.pipeline import file as files  # noqa: PLC0415 - needs an extra

    settings, problems = files.read(path, location=location, address=address)
    problems = problems or (files.lacking(path, settings) if settings is not None else [])
    for each in problems:
        click.echo(f"Error: {each}", err=True)
    if problems or settings is None:
        click.get_current_context().exit(1)
    return settings


def _say_settings(settings: Settings) -> None:
    from penstock.pipeline.file import texts  # noqa: PLC0415 - needs an extra

    shown = texts(settings)
    if common.wants_json():
        common.emit_json({section: dict(keys) for section, keys in shown.items()})
        return
    rows = [(f"[{name}]", key, value) for name, keys in shown.items() for key, value in keys]
    common.show_table(("section", "key", "value"), rows)


# --- routing --------------------------------------------------------------------------------------


@pipeline.command("route")
@click.option("--checkpoint", type=click.Path(path_type=Path), required=True,
              help="A directory for the query's checkpoint.")  # fmt: skip
@click.option("--once", is_flag=True, help="Route what there is, and end.")
@click.option("--max-offsets", type=click.IntRange(min=1),
              help="Messages in one micro-batch at the most; by default 20,000 for each core of "
              "Spark, and at least 100,000.")  # fmt: skip
@_spark_options
def route(
    location: str, master: str | None, checkpoint: Path, max_offsets: int | None, *, once: bool
) -> None:
    """Put what the logs hold into the queues, until it is stopped.

    For a store whose routing is pipeline. Starting it fences every pipeline that ran before.
    """
    spark = _session(master)
    from penstock.spark.route import AVAILABLE_NOW, status  # noqa: PLC0415
    from penstock.spark.route import route as start  # noqa: PLC0415

    trigger = AVAILABLE_NOW if once else "0 seconds"
    seconds = SystemClock().seconds
    before, placed, begin = status(location), _placed(location), seconds()
    query = start(
        location, spark=spark, checkpoint=checkpoint, trigger=trigger, max_offsets=max_offsets
    )
    try:
        query.awaitTermination()
    except KeyboardInterrupt:
        query.stop()
    now, took = status(location), seconds() - begin
    count, matches = now.routed_up_to - before.routed_up_to, _placed(location) - placed
    text = f"routed {count} messages in {took:.1f} s, {count / took:,.0f}/s: {matches} matches; "
    common.say_answer(now, f"{text}up to offset {now.routed_up_to} of {now.end}")


def _placed(location: str) -> int:
    """Count messages that have come into queues."""
    from penstock.flight.client import FlightStore  # noqa: PLC0415 - needs an extra

    rows = FlightStore(location).read_table("stats", where="metric = 'enqueued_total'").to_pylist()
    return sum(row["value"] or 0 for row in rows)


@pipeline.command("status")
@common.json_option
@_location_option
def status(location: str) -> None:
    """Show how far the logs are routed; asks the broker, needs penstock[flight] and no Spark."""
    from penstock.flight.client import route_status  # noqa: PLC0415 - needs an extra

    now = route_status(location)
    if common.wants_json():
        common.emit_json(now)
        return
    click.echo(f"routing {now.routing}, epoch {now.epoch}, routed up to {now.routed_up_to}")
    common.show_table(
        (":log", ":cursor", ":end", ":lag"),
        [(log, at, now.end, now.lag[log]) for log, at in sorted(now.cursors.items())],
        empty="no logs",
    )


# --- jobs -----------------------------------------------------------------------------------------


@pipeline.command("backfill")
@click.argument("queue")
@click.option("--from", "from_", type=int, metavar="OFFSET", help="By default all that is kept.")
@click.option("--from-time-ms", type=int, help="Instead: what was published from this time on.")
@click.option("--to", type=int, metavar="OFFSET", help="By default all that is routed.")
@click.option("--archive", metavar="PATH",
              help="Where the log has let go of messages, take them from here.")  # fmt: skip
@click.option("--window", type=click.IntRange(min=1), default=200_000, show_default=True,
              help="Offsets between two commits.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only count what matches.")
@_runs_jobs
def backfill(job: Job, queue: str, *, dry_run: bool, **given: Any) -> None:
    """Fill a queue from the log with what it wants and has not had."""
    with common.progress_bar(f"filling {queue}") as bar:
        done = job("backfill", queue, dry_run=dry_run, progress=bar, **given)
    text = f"looked at {done.scanned} messages, {done.matched} match"
    common.answer(done, text if dry_run else f"{text}, added {done.added} to {queue}")


@pipeline.command("archive")
@click.argument("path")
@_queues_option
@click.option("--state", "states", multiple=True, type=click.Choice(["done", "failed"]),
              help="Only this state. Archived failed messages can't be redriven.")  # fmt: skip
@click.option("--keep", type=duration, default="0", help="Leave what ended less long ago.")
@click.option("--no-payload", is_flag=True, help="Leave payloads out.")
@click.option("--no-trim", is_flag=True, help="Only copy; a later run removes it from the store.")
@click.option("--follow", is_flag=True, help="Go on with what ends later, until it is stopped.")
@click.option("--every", type=duration, default="10s", show_default=True,
              help="With --follow: how often to look.")  # fmt: skip
@click.option("--optimize", is_flag=True, help="Then join small files.")
@click.option("--vacuum", is_flag=True,
              help="Then remove files that no table has had for --retention-hours.")  # fmt: skip
@click.option("--retention-hours", type=click.IntRange(min=168), default=168, show_default=True)
@click.option("--dry-run", is_flag=True, help="Only count.")
@_runs_jobs
def archive(
    job: Job, path: str, queues: tuple[str, ...], states: tuple[str, ...], keep: int, *,
    no_payload: bool, no_trim: bool, follow: bool, every: int, dry_run: bool, **upkeep: Any,
) -> None:  # fmt: skip
    """Move done and failed messages, and the attempts at them, to Delta tables.

    PATH is a directory, or s3://BUCKET/PREFIX with the variables AWS_... for the access.
    """
    settings = {
        "queues": queues or None,
        "states": states or ("done", "failed"),
        "keep_ms": keep,
        "payload": not no_payload,
        "trim": not no_trim,
    }
    if follow:
        if dry_run or upkeep["optimize"] or upkeep["vacuum"]:
            raise click.UsageError("--follow goes without --dry-run, --optimize and --vacuum")
        runs = job("follow", path, every_ms=every, **settings)
        with contextlib.suppress(KeyboardInterrupt):
            for done in (each for each in runs if each.files or each.trimmed):
                _say_archived(done)
        return
    done = job("archive", path, dry_run=dry_run, progress=partial(click.echo, err=True), **settings)
    _say_archived(done)
    _upkeep(path, dry_run=dry_run, **upkeep)


def _say_archived(done: Archived) -> None:
    rows = ", ".join(f"{count} {table}" for table, count in done.rows.items())
    verb = "would archive" if done.dry_run else "archived"
    common.say_answer(done, f"{verb} {rows}; trimmed {done.trimmed} messages")


def _upkeep(
    path: str, *, dry_run: bool, optimize: bool, vacuum: bool, retention_hours: int
) -> None:
    """Optimize and vacuum an archive; a dry run only says what a vacuum would remove."""
    from penstock.spark import jobs  # noqa: PLC0415 - needs an extra

    said = common.wants_json()
    if optimize and not dry_run:
        made = jobs.optimize(path)
        text = ", ".join(f"{count} of {name}" for name, count in made.joined.items())
        click.echo(f"joined files: {text}, to {sum(made.made.values())}", err=said)
    if vacuum:
        gone = jobs.vacuum(path, retention_hours=retention_hours, dry_run=dry_run)
        text = ", ".join(f"{count} of {name}" for name, count in gone.files.items())
        click.echo(f"{'would remove' if dry_run else 'removed'} files: {text}", err=said)


@pipeline.command("collect")
@click.option("--delete", is_flag=True, help="Free them; by default they are only counted.")
@_runs_jobs
def collect(job: Job, *, delete: bool) -> None:
    """Find payloads that nobody refers to any more, and free them."""
    with common.progress_bar("asking the broker") as bar:
        done = job("collect", dry_run=not delete, progress=bar)
    verb = "freed" if delete else "would free"
    text = f"{verb} {done.freed_messages} payloads, {done.freed_bytes} bytes"
    common.answer(done, text)


@pipeline.command("report")
@_queues_option
@click.option("--save", type=click.Path(path_type=Path),
              help="Write report.html and Parquet files into this directory.")  # fmt: skip
@click.option("--archive", metavar="PATH", help="With the history in this archive.")
@_runs_jobs
def report(job: Job, queues: tuple[str, ...], save: Path | None, archive: str | None) -> None:
    """Show throughput, waiting, attempts and failures of each queue."""
    frames = job("report", queues=queues or None, archive=archive)
    if common.wants_json():
        common.emit_json({name: frame.toArrow().to_pylist() for name, frame in frames.items()})
    else:
        counts = ("done", "failed", "available", "done_per_second", "attempts_mean")
        times = ("first_claim_p50_ms", "first_claim_p99_ms", "done_p50_ms", "done_p99_ms")
        columns = [*counts, *times]
        rows = frames["queues"].select("queue", *columns).collect()
        names = ["queue", *(f":{name}" for name in columns)]
        common.show_table(names, [tuple(row) for row in rows], empty="no queues")
    if save is not None:
        from penstock.spark.jobs import save_report  # noqa: PLC0415 - needs an extra

        click.echo(f"written: {save_report(frames, save)}", err=common.wants_json())


@pipeline.command("redrive")
@click.option("--queue", required=True, help="The queue whose failed messages are meant.")
@click.option("--where", metavar="SQL", help="A condition on the table failed; default: all.")
@click.option("--dry-run", is_flag=True, help="Only count them and show a few.")
@_runs_jobs
def redrive(job: Job, queue: str, where: str | None, *, dry_run: bool) -> None:
    """Make the failed messages that a SQL condition selects available again."""
    with common.progress_bar(f"redriving {queue}") as bar:
        done = job("redrive", queue, where=where, dry_run=dry_run, progress=bar)
    if common.wants_json():
        common.emit_json(done)
        return
    if dry_run:
        common.show_table(
            (":message", "failed", ":attempts", "reason", "group", "attributes"),
            [tuple(row.values()) for row in done.sample],
            empty="none is selected",
        )
    click.echo(f"{done.selected} selected, {done.redriven} redriven")


@pipeline.command("publish")
@click.argument("paths", nargs=-1)
@click.option("--query", metavar="SQL", help="Publish the rows of a query instead of files.")
@click.option("--format", type=click.Choice(["parquet", "json", "csv"]),
              help="By default what the first file's name ends in.")  # fmt: skip
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE",
              help="An option of Spark's reader, such as sep=;")  # fmt: skip
@click.option("--column", "columns", multiple=True, metavar="COLUMN=SQL",
              help="What a column of messages is made of, such as group=tenant.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only check every row.")
@_runs_jobs
def publish(job: Job, paths: tuple[str, ...], *, dry_run: bool, **given: Any) -> None:
    """Publish the rows of files, or of a SQL query, as messages."""
    for option, name in (("options", "NAME"), ("columns", "COLUMN")):
        pairs = common.pairs_of(given[option], name)
        given[option] = {each.strip(): value for each, value in pairs.items()}
    with common.progress_bar("publishing") as bar:
        done = job("publish", paths or None, dry_run=dry_run, progress=bar, **given)
    text = f"checked {done.rows} rows" if dry_run else f"published {done.published} rows"
    if done.duplicates:
        text += f"; {done.duplicates} had been published before"
    common.answer(done, text)
