"""Watching: ``top`` shows figures of all queues, ``tail`` follows messages, ``bench`` measures.

``top`` and ``tail`` ask again and again: nothing is kept for them on the other side, and they cost
nothing while nobody watches. Each look reads pages of a bounded size.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

import penstock
from penstock.cli import common
from penstock.cli.common import duration, is_server, open_store, open_to_look
from penstock.cli.queues import count
from penstock.clock import SystemClock
from penstock.filters import Row, parse
from penstock.limits import MAX_BROWSE_LIMIT, MAX_CLAIM_LIMIT, MAX_CONCURRENCY, MAX_PAYLOAD_BYTES
from penstock.model import Message
from penstock.store.sql.location import without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from rich.table import Table

    from penstock.broker.broker import Broker
    from penstock.broker.reader import Reader
    from penstock.filters import Filter
    from penstock.model import Entry, LogRecord, QueueStats

T = TypeVar("T")
# Messages of one page of a look.
PAGE: Final = 200
# Rows where there is no screen that decides.
ROWS: Final = 50
# Lines of a screen that are not rows.
_FRAME_LINES: Final = 6
# What top sorts by: the figure whose largest values come first, or the name.
SORTS: Final = {
    "queue": "queue",
    "available": "available",
    "in_flight": "in_flight",
    "failed": "failed",
    "oldest": "oldest_age_ms",
    "in": "in_per_second",
    "done": "done_per_second",
}
VERBS: Final = ("publish", "claim", "ack")
# Messages of bench that wait at the most, for each worker: claims find some, and a disk is not
# filled.
AHEAD: Final = 1_000


def _polls(url: str, every_ms: int) -> Generator[Broker | Reader]:
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


_every_option = click.option(
    "--every", "every_ms", type=duration, default="1s", show_default=True, help="Look so often."
)


# --- top ------------------------------------------------------------------------------------------


@click.command("top")
@click.option("--sort", type=click.Choice(list(SORTS)), default="available", show_default=True,
              help="What comes first.")  # fmt: skip
@click.option(
    "--limit", type=click.IntRange(1), help="Rows at the most.  [default: the screen, or 50]"
)
@click.option("--once", is_flag=True, help="Look twice, for the rates, print once, and end.")
@_every_option
@common.store_option
def top(store: str, sort: str, limit: int | None, every_ms: int, *, once: bool) -> None:
    """Watch depths and rates of all queues.

    Ctrl-C ends it. With --json each look is a line; without a terminal there is one look.
    """
    as_json = common.wants_json()
    once = once or not (as_json or sys.stdout.isatty())
    clock = SystemClock()
    at = 0.0
    before: dict[str, QueueStats] = {}
    with (
        suppress(KeyboardInterrupt),
        _screen(on=not (once or as_json)) as draw,
        closing(_polls(store, every_ms)) as looks,
    ):
        for number, broker in enumerate(looks):
            stats, _ = count(broker, [spec.name for spec in broker.queues()])
            now = clock.seconds()
            rows = [_figures(each, before.get(name), now - at) for name, each in stats.items()]
            rows.sort(key=lambda row: str(row["queue"]))
            if sort != "queue":
                rows.sort(key=lambda row: -(row[SORTS[sort]] or 0))
            at, before = now, stats
            if once and not number:
                continue
            if as_json:
                click.echo(msgspec.json.encode(rows[:limit]))
            else:
                draw(_table(rows, limit))
            if once:
                return


def _figures(stats: QueueStats, before: QueueStats | None, seconds: float) -> dict[str, Any]:
    """Return the row of a queue: depths, the age of its oldest waiting message, and rates."""
    last = before or stats
    came = stats.enqueued_total + stats.moved_in_total - last.enqueued_total - last.moved_in_total
    done = stats.acked_total - last.acked_total
    names = ("queue", "available", "delayed", "in_flight", "failed", "oldest_age_ms")
    return {
        **{name: getattr(stats, name) for name in names},
        # A queue that was made anew counts from 0 again.
        "in_per_second": round(max(0, came) / (seconds or 1), 1),
        "done_per_second": round(max(0, done) / (seconds or 1), 1),
    }


def _table(rows: list[dict[str, Any]], limit: int | None) -> Table:
    from rich import box  # noqa: PLC0415 - --json does without
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    room = limit or ROWS
    if sys.stdout.isatty():
        screen = max(1, os.get_terminal_size().lines - _FRAME_LINES)
        room = min(limit or screen, screen)
    available, failed = (sum(row[name] for row in rows) for name in ("available", "failed"))
    title = f"{len(rows):,} queues, {available:,} messages available, {failed:,} failed"
    table = Table(box=box.SIMPLE_HEAD, title=title)
    table.add_column("queue", overflow="fold")
    for heading in ("available", "delayed", "in flight", "failed", "oldest", "in/s", "done/s"):
        table.add_column(heading, justify="right")
    for row in rows[:room]:
        table.add_row(
            Text(row["queue"]),
            *(f"{row[name]:,}" for name in ("available", "delayed", "in_flight")),
            Text(f"{row['failed']:,}", style="red" if row["failed"] else ""),
            _age(row["oldest_age_ms"]),
            *(
                f"{rate:,.1f}" if (rate := row[f"{name}_per_second"]) else ""
                for name in ("in", "done")
            ),
        )
    if len(rows) > room:
        table.add_row(f"… and {len(rows) - room:,} more")
    return table


def _age(age_ms: int | None) -> str:
    if age_ms is None:
        return ""
    for unit, ms in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000)):
        if age_ms >= 2 * ms:
            return f"{age_ms // ms}{unit}"
    return f"{age_ms / 1000:.1f}s"


@contextmanager
def _screen(*, on: bool) -> Iterator[Callable[[Table], object]]:
    """Give a function that shows a table: in place of the one before, or below it."""
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    if not on:
        yield console.print
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda table: live.update(table, refresh=True)


# --- tail -----------------------------------------------------------------------------------------


@click.command("tail")
@click.argument("queue", required=False)
@click.option("--log", "from_log", is_flag=True,
              help="Follow the metadata log: messages as they are published, those that QUEUE's "
              "filter takes or all.")  # fmt: skip
@click.option("--state", "states", type=click.Choice(["done", "failed"]), multiple=True,
              help="Only messages that end so.")  # fmt: skip
@click.option("--from-start", is_flag=True, help="Begin with what is there already.")
@click.option("--limit", type=click.IntRange(1), help="End after so many messages.")
@_every_option
@common.store_option
def tail(
    store: str, queue: str | None, *, from_log: bool, states: tuple[str, ...], from_start: bool,
    limit: int | None, every_ms: int,
) -> None:  # fmt: skip
    """Follow messages as they end, or as they come.

    Shows each message of QUEUE that is done or has failed, with the reason, until Ctrl-C. With
    --json each is a line.
    """
    if queue is None and not from_log:
        raise click.UsageError("name a QUEUE, or follow the whole log with --log")
    if from_log and states:
        raise click.UsageError("--state is how messages end; --log shows them as they come")
    json = common.wants_json()
    shown = 0
    followers: list[LogFollower | EndFollower] = []
    looks = _polls(store, every_ms)
    with suppress(KeyboardInterrupt), closing(looks):
        for broker in looks:
            if not followers and from_log:
                wanted = None if queue is None else parse(broker.queue(queue).filter)
                followers = [LogFollower(broker, wanted, from_start=from_start)]
            elif not followers:
                followers = [
                    EndFollower(broker, str(queue), state, from_start=from_start)
                    for state in states or ("done", "failed")
                ]
            for follower in followers:
                for each, line in follower.read(broker):
                    text = (
                        msgspec.json.encode(common.plain(each)) if json else common.printable(line)
                    )
                    click.echo(text)
                    shown += 1
                    if shown == limit:
                        return


class EndFollower:
    """Messages of a queue in the order in which they end, in one state."""

    def __init__(
        self, broker: Broker | Reader, queue: str, state: str, *, from_start: bool
    ) -> None:
        """Begin behind the last message that has ended, or with the first one."""
        self._queue, self._state = queue, state
        # A page that is not full has no next cursor: what it showed is remembered instead.
        self._cursor: str | None = None
        self._seen: set[tuple[int, int, int | None]] = set()
        if not from_start:
            # Large steps first; then small ones, since each look reads the last step again.
            for step in (MAX_BROWSE_LIMIT, PAGE):
                for _ in self._pages(broker, step, payloads=False):
                    pass

    def read(self, broker: Broker | Reader) -> Iterator[tuple[Entry, str]]:
        """Give the messages that have ended since the last time, each with a line about it."""
        for page in self._pages(broker, PAGE, payloads=True):
            yield from ((each, self._line(each)) for each in page)

    def _pages(
        self, broker: Broker | Reader, step: int, *, payloads: bool
    ) -> Iterator[list[Entry]]:
        while True:
            page = broker.browse(
                self._queue, state=self._state, limit=step, cursor=self._cursor, payloads=payloads
            )
            # A message that was redriven ends again.
            keys = {(each.message_id, each.attempts, each.ended_at_ms): each for each in page}
            new = [each for key, each in keys.items() if key not in self._seen]
            if page.next_cursor is None:
                self._seen = set(keys)
                yield new
                return
            self._cursor = page.next_cursor
            yield new

    def _line(self, entry: Entry) -> str:
        parts = (
            common.when(entry.ended_at_ms),
            f"{entry.state.value:6}",
            str(entry.message_id),
            f"attempt {entry.attempts}",
            entry.group,
            common.preview(entry.payload),
            f"({entry.reason})" if entry.reason else "",
        )
        return "  ".join(filter(None, parts))


class LogFollower:
    """Messages in the order in which they were published, those that a filter takes or all."""

    def __init__(self, broker: Broker | Reader, wanted: Filter | None, *, from_start: bool) -> None:
        """Begin behind the last message that was published, or with the first one kept."""
        stats = broker.log_stats()
        self._at = dict.fromkeys(stats.cursors, 0 if from_start else stats.end)
        self._wanted = wanted

    def read(self, broker: Broker | Reader) -> Iterator[tuple[LogRecord, str]]:
        """Give the messages published since the last time, each with a line about it."""
        for log in broker.log_stats().cursors:
            while True:
                page = broker.read_log(log, begin=self._at.setdefault(log, 0), limit=PAGE)
                yield from ((each, self._line(each)) for each in page.records if self._takes(each))
                self._at[log] = max(self._at[log], page.cursor.end)
                if not page.records:
                    break

    def _takes(self, each: LogRecord) -> bool:
        row = Row(each.attributes, each.group, each.priority, each.published_at_ms, each.size)
        return self._wanted is None or self._wanted.matches(row)

    def _line(self, record: LogRecord) -> str:
        attributes = msgspec.json.encode(record.attributes).decode()
        parts = (common.when(record.published_at_ms), str(record.message_id), record.group)
        return "  ".join((*filter(None, parts), attributes, f"{record.size} bytes"))


# --- bench ----------------------------------------------------------------------------------------


class Load:
    """Publishes, claims and acks until the time is over; every call is timed.

    Workers are threads of this process, which share one connection or broker: the figures are those
    of one Python program, and no more than that.
    """

    def __init__(self, broker: Broker, queue: str, batch: int, size: int, seconds: float) -> None:
        self._broker, self._queue, self._batch = broker, queue, batch
        self._message = Message(b"x" * size, {"queue": queue})
        self._seconds = SystemClock().seconds
        self._until = self._seconds() + seconds
        self._lock = threading.Lock()
        self.times: dict[str, list[float]] = {verb: [] for verb in VERBS}
        self.messages = dict.fromkeys(VERBS, 0)

    def work(self, room: int) -> None:
        """Publish while there is room, claim, and ack; one worker of several."""
        while self._seconds() < self._until:
            if self.messages["publish"] - self.messages["ack"] < room:
                batch = [self._message] * self._batch
                self._time("publish", partial(self._broker.publish, batch))
            claim = partial(self._broker.claim, self._queue, limit=self._batch)
            if taken := self._time("claim", claim):
                receipts = [each.receipt for each in taken]
                self._time("ack", partial(self._broker.ack, receipts))

    def _time(self, verb: str, call: Callable[[], list[T]]) -> list[T]:
        begin = self._seconds()
        answer = call()
        took = self._seconds() - begin
        with self._lock:
            # An empty claim is no claim of messages.
            if answer:
                self.times[verb].append(took)
                self.messages[verb] += len(answer)
        return answer


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
    metadata log for as long as that is kept. A missing store is not made, memory: is.
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
            load = Load(broker, queue, batch, size, run_ms / 1000)
            begin = clock.seconds()
            with ThreadPoolExecutor(workers) as threads:
                for done in [threads.submit(load.work, workers * AHEAD) for _ in range(workers)]:
                    done.result()
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
    figures = [_measured(verb, load, took) for verb in VERBS]
    if common.wants_json():
        common.emit_json({**ran, "figures": figures})
        return
    rows = [tuple(each.values()) for each in figures]
    common.show_table(("verb", ":calls", ":messages/s", ":p50 ms", ":p99 ms"), rows)
    click.echo(
        "{on} ({kind}, {design}); {workers} threads, {batch} messages of {payload_bytes} bytes in "
        "a call, for {seconds} s; Python {python}, {machine}, Penstock {penstock}".format(**ran)
    )


def _measured(verb: str, load: Load, seconds: float) -> dict[str, Any]:
    """Return how often a verb was called, messages in a second, and how long a call took."""
    times = sorted(load.times[verb]) or [0.0]
    p50, p99 = (round(times[int(share * (len(times) - 1))] * 1000, 3) for share in (0.5, 0.99))
    rate = round(load.messages[verb] / seconds, 1)
    return {
        "verb": verb,
        "calls": len(load.times[verb]),
        "messages_per_second": rate,
        "p50_ms": p50,
        "p99_ms": p99,
    }
