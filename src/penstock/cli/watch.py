"""Watching: ``top`` shows figures of all queues, ``tail`` follows the messages of one.

Both ask again and again: nothing is kept for them on the other side, and they cost nothing while
nobody watches. Each look reads pages of a bounded size.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import tty
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from penstock.cli import common
from penstock.cli.common import duration
from penstock.cli.opening import open_to_look
from penstock.cli.queues import count
from penstock.clock import SystemClock
from penstock.filters import Row, parse
from penstock.limits import MAX_BROWSE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from rich.table import Table

    from penstock.broker.broker import Broker
    from penstock.broker.reader import Reader
    from penstock.filters import Filter
    from penstock.model import Entry, LogRecord, QueueStats

# Messages of one page of a look.
PAGE: Final = 200
# Rows where there is no screen that decides.
ROWS: Final = 50
# Lines of a screen that are not rows.
_FRAME_LINES: Final = 6


def _polls(url: str, pause: Callable[[], object]) -> Generator[Broker | Reader]:
    """Give the open store for one look after the other; a reader shows one moment, so a new one."""
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


class Figures(msgspec.Struct, frozen=True):
    """A row of the table: depths, the age of the oldest waiting message, and rates."""

    queue: str
    available: int
    delayed: int
    in_flight: int
    failed: int
    oldest_age_ms: int | None
    in_per_second: float
    done_per_second: float


SORTS: Final[dict[str, Callable[[Figures], Any]]] = {
    "queue": lambda row: row.queue,
    "available": lambda row: -row.available,
    "in_flight": lambda row: -row.in_flight,
    "failed": lambda row: -row.failed,
    "oldest": lambda row: -(row.oldest_age_ms or 0),
    "in": lambda row: -row.in_per_second,
    "done": lambda row: -row.done_per_second,
}


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

    q or Ctrl-C ends it. With --json each look is a line; without a terminal there is one look.
    """
    as_json = common.wants_json()
    once = once or not (as_json or sys.stdout.isatty())
    clock = SystemClock()
    at = 0.0
    before: dict[str, QueueStats] = {}
    with (
        suppress(KeyboardInterrupt),
        _pauses(every_ms / 1000) as pause,
        _screen(on=not (once or as_json)) as draw,
        closing(_polls(store, pause)) as looks,
    ):
        for number, broker in enumerate(looks):
            stats, _ = count(broker, [spec.name for spec in broker.queues()])
            now = clock.seconds()
            rows = [_figures(each, before.get(name), now - at) for name, each in stats.items()]
            rows.sort(key=lambda row: (SORTS[sort](row), row.queue))
            at, before = now, stats
            if once and not number:
                continue
            if as_json:
                click.echo(msgspec.json.encode(rows[:limit]))
            else:
                draw(_table(rows, limit))
            if once:
                return


def _figures(stats: QueueStats, before: QueueStats | None, seconds: float) -> Figures:
    # A queue that was made anew counts from 0 again.
    last = stats if before is None else before
    came = stats.enqueued_total + stats.moved_in_total - last.enqueued_total - last.moved_in_total
    done = stats.acked_total - last.acked_total
    return Figures(
        stats.queue,
        stats.available,
        stats.delayed,
        stats.in_flight,
        stats.failed,
        stats.oldest_age_ms,
        round(max(0, came) / (seconds or 1), 1),
        round(max(0, done) / (seconds or 1), 1),
    )


def _table(rows: list[Figures], limit: int | None) -> Table:
    from rich import box  # noqa: PLC0415 - --json does without
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    room = limit or ROWS
    if sys.stdout.isatty():
        screen = max(1, os.get_terminal_size().lines - _FRAME_LINES)
        room = min(limit or screen, screen)
    available, failed = sum(row.available for row in rows), sum(row.failed for row in rows)
    title = f"{len(rows):,} queues, {available:,} messages available, {failed:,} failed"
    caption = "q ends" if sys.stdout.isatty() else None
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption)
    table.add_column("queue", overflow="fold")
    for heading in ("available", "delayed", "in flight", "failed", "oldest", "in/s", "done/s"):
        table.add_column(heading, justify="right")
    for row in rows[:room]:
        table.add_row(
            Text(row.queue),
            *(f"{number:,}" for number in (row.available, row.delayed, row.in_flight)),
            Text(f"{row.failed:,}", style="red" if row.failed else ""),
            _age(row.oldest_age_ms),
            *(f"{rate:,.1f}" if rate else "" for rate in (row.in_per_second, row.done_per_second)),
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


@contextmanager
def _pauses(seconds: float) -> Iterator[Callable[[], object]]:
    """Give a function that waits so long; on a terminal, q raises KeyboardInterrupt meanwhile."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield lambda: threading.Event().wait(seconds)
        return
    terminal = sys.stdin.fileno()

    def pause() -> None:
        # A terminal that is gone reads as nothing.
        if select.select([terminal], [], [], seconds)[0] and os.read(terminal, 1) in b"qQ":
            raise KeyboardInterrupt

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield pause
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


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
    looks = _polls(store, lambda: threading.Event().wait(every_ms / 1000))
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
