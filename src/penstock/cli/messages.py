"""Messages: bring them in, look at them, follow, claim and settle them, move and remove many.

``tail`` asks again and again, as ``top`` does: nothing is kept for them on the other side, and they
cost nothing while nobody watches. Each look reads pages of a bounded size.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing, suppress
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click
import msgspec

from penstock.cli import common
from penstock.cli.common import duration, open_store, url_option
from penstock.errors import InvalidMessage
from penstock.filters import Row, parse
from penstock.limits import MAX_BROWSE_LIMIT
from penstock.model import LogRecord, Message, State, SweepCounts
from penstock.validation import attributes_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.broker.broker import Broker
    from penstock.broker.reader import Reader
    from penstock.filters import Filter
    from penstock.model import Entry, Outcome

LINES_PER_PUBLISH: Final = 1_000
# Messages of one page of a look at messages that are followed.
PAGE: Final = 200


# --- in -------------------------------------------------------------------------------------------


def _attributes(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Read numbers, booleans, null and quoted strings as JSON has them; the rest is text."""
    attributes: dict[str, Any] = {}
    for name, text in common.pairs_of(given).items():
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError:
            value = text
        attributes[name] = text if isinstance(value, dict | list) else value
    return attributes


_message_options = common.options(
    click.argument("payload", required=False),
    click.option(
        "--payload-file",
        type=click.File("rb"),
        help="Read the payload from a file; - is standard input.",
    ),
    click.option(
        "-a",
        "--attribute",
        "attributes",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_attributes,
        help="An attribute; a number, true, false or null is taken as such.",
    ),
    click.option("--group", default="", help="Fairness, or order on a FIFO queue."),
    click.option("--priority", type=int, default=0, help="0 to 255; higher first."),
    click.option("--delay", "delay_ms", type=duration, default=0, help="Hide it for so long."),
    click.option("--dedup-id", help="A repeated publish with the same id is stored once."),
    click.option("--lines", is_flag=True, help="One message for each line of the payload."),
)


@click.command("publish")
@_message_options
@common.store_option
def publish(store: str, **given: Any) -> None:
    """Publish to every queue whose filter matches."""
    # Before the store is opened, which may take it from its owner.
    batches = _batches(**given)
    with open_store(store) as broker:
        _publish(broker, batches)


@click.command("send")
@click.argument("queue")
@_message_options
@common.store_option
def send(store: str, queue: str, **given: Any) -> None:
    """Publish straight to one queue."""
    given["attributes"] = attributes_to(queue, given["attributes"], {})
    batches = _batches(**given)
    with open_store(store) as broker:
        _publish(broker, _checked(broker, queue, batches))


def _batches(
    *,
    payload: str | None,
    payload_file: BinaryIO | None,
    lines: bool,
    dedup_id: str | None,
    attributes: dict[str, Any],
    **fields: Any,
) -> Iterator[list[Message]]:
    if (payload is None) == (payload_file is None):
        raise click.UsageError("give either PAYLOAD or --payload-file")
    if lines and dedup_id:
        raise click.UsageError("--lines makes many messages: they can't share one --dedup-id")
    file = BytesIO((payload or "").encode()) if payload_file is None else payload_file
    bodies = (row.rstrip(b"\r\n") for row in file) if lines else iter([file.read()])
    messages = (Message(each, attributes, dedup_id=dedup_id, **fields) for each in bodies)
    return iter(lambda: list(islice(messages, LINES_PER_PUBLISH)), [])


def _checked(
    broker: Broker, queue: str, batches: Iterator[list[Message]]
) -> Iterator[list[Message]]:
    compiled = parse(broker.queue(queue).filter)
    for batch in batches:
        for each in batch:
            row = Row(each.attributes, each.group, each.priority, size=len(each.payload))
            if not compiled.matches(row):
                raise InvalidMessage(
                    f"queue {queue!r} takes messages where {compiled.text}; this one does not match"
                )
        yield batch


def _publish(broker: Broker, batches: Iterator[list[Message]]) -> None:
    ids = [message_id for batch in batches for message_id in broker.publish(batch)]
    count = f"message {ids[0]}" if len(ids) == 1 else f"{len(ids)} messages"
    common.answer({"ids": ids}, f"published {count}")


@click.group("import")
def import_group() -> None:
    """Bring another queue's database in."""


@import_group.command("queueber")
@click.argument("path", type=click.Path(path_type=Path))
@url_option("--into", "--url", help="A server, or a store, which is made if it is not there.")
@click.option("--queue", required=True, help="The queue, made if it is not there.")
@click.option("--batch", type=int, default=500, show_default=True, help="Items in one commit.")
@click.option("--restart", is_flag=True, help="Forget what was imported before: all once more.")
@common.json_option
def import_queueber(path: Path, store: str, queue: str, batch: int, *, restart: bool) -> None:
    """Publish every item of a Queueber database to a queue, once.

    The database at PATH is only read. An import that was interrupted goes on where it was.
    """
    # Loaded here: the other commands do without.
    from penstock.importers.queueber import import_queueber as run  # noqa: PLC0415
    from penstock.importers.queueber_source import Source  # noqa: PLC0415

    # A wrong path must not leave an empty store behind.
    Source(path).close()
    with (
        open_store(store, make=True) as broker,
        common.progress_bar("importing") as progress,
    ):
        report = run(path, broker, queue, batch=batch, progress=progress, restart=restart)
    if common.wants_json():
        common.emit_json({**common.plain(report), "imported": report.imported})
        return
    rows = [
        (name.replace("_", " "), value)
        for name, value in common.plain(report).items()
        if isinstance(value, int)
    ]
    common.show_table((f"imported into {queue}", ":count"), [*rows, ("total", report.imported)])
    common.show_table(("problem at=key", "what=reason"), report.problems)


def _state_option(states: list[str], default: State) -> Callable[[Any], Any]:
    choice = click.Choice(states)
    return click.option(
        "--state", type=choice, default=default.value, show_default=True, help="Which messages."
    )


# --- looking --------------------------------------------------------------------------------------


@click.command("browse")
@click.argument("queue")
@_state_option(common.STATES, State.AVAILABLE)
@click.option("--limit", type=int, default=20, show_default=True, help="How many at most.")
@click.option("--cursor", help="Go on after a page: what the page gave as its next cursor.")
@click.option("--id", "message_id", type=int, help="Only this message, in whatever state it is.")
@common.reads_store
def browse(broker: Broker | Reader, queue: str, state: str, **given: Any) -> None:
    """Look at messages without claiming them."""
    page = broker.browse(queue, state=state, **given)
    if common.wants_json():
        common.emit_json({"entries": list(page), "next_cursor": page.next_cursor})
        return
    # By --id a message is shown in whatever state it is.
    state = page[0].state.value if page else state
    times = {"available": "visible=visible_at_ms", "delayed": "visible=visible_at_ms",
             "in_flight": "lease ends=lease_deadline_ms"}  # fmt: skip
    about = (":id=message_id", "payload", "attributes", "group", ":attempts")
    moments = ("published=published_at_ms", times.get(state, "ended=ended_at_ms"))
    note = "note=consumer" if state == State.IN_FLIGHT else "note=reason"
    empty = f"no messages are {state.replace('_', ' ')}"
    common.show_table((*about, *moments, note), page, empty=empty)
    if page.next_cursor is not None:
        click.echo(f"there is more: --cursor {page.next_cursor}")


@click.command("attempts")
@click.argument("queue")
@click.argument("message_id", type=int)
@common.reads_store
def attempts(broker: Broker | Reader, queue: str, message_id: int) -> None:
    """Show every attempt at a message."""
    times = ("claimed=claimed_at_ms", "ended=ended_at_ms")
    columns = (":attempt=number", "consumer", *times, "how=end", "reason")
    common.show(broker.attempts(queue, message_id), columns, empty="no attempts")


@click.command("explain")
@click.argument("queue")
@click.argument("message_id", type=int)
@common.reads_store
def explain(broker: Broker | Reader, queue: str, message_id: int) -> None:
    """Say why a message is, or is not, in a queue, and where it is."""
    found = broker.explain(queue, message_id)
    filters = {"its filter": found.filter, "the filter at its offset": found.filter_then}
    if common.wants_json():
        trees = [each and common.plain_explanation(each) for each in filters.values()]
        shown = {"filter": trees[0], "filter_then": trees[1], "state": found.state}
        common.emit_json({**common.plain(found), **shown})
        return
    click.echo(common.printable(found.text))
    for title, each in filters.items():
        if each is not None:
            click.echo(f"{title}:")
            common.show_explanation(each)
    places = {} if found.state is None else {queue: found.state}
    rows = [(name, state.value) for name, state in {**places, **found.elsewhere}.items()]
    common.show_table(("queue", "state"), rows, empty="no queue that was looked at has it")
    if found.counts_from is not None:
        click.echo(f"the filter counts from offset {found.counts_from} on")
    if found.looked < found.queues:
        click.echo(f"looked at {found.looked} of {found.queues} queues")


# --- following ------------------------------------------------------------------------------------


@click.command("tail")
@click.argument("queue", required=False)
@click.option("--log", "from_log", is_flag=True,
              help="Follow the metadata log: messages as they are published, those that QUEUE's "
              "filter takes or all.")  # fmt: skip
@click.option("--state", "states", type=click.Choice(["done", "failed"]), multiple=True,
              help="Only messages that end so.")  # fmt: skip
@click.option("--from-start", is_flag=True, help="Begin with what is there already.")
@click.option("--limit", type=click.IntRange(1), help="End after so many messages.")
@common.every_option
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
    looks = common.polls(store, every_ms)
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
            found: Iterator[Entry | LogRecord]
            found = chain.from_iterable(follower.read(broker) for follower in followers)
            for each in found:
                if json:
                    click.echo(msgspec.json.encode(common.plain(each)))
                else:
                    click.echo(common.printable("  ".join(filter(None, _parts(each)))))
                shown += 1
                if shown == limit:
                    return


def _parts(each: Entry | LogRecord) -> tuple[str, ...]:
    """Return what a line tells of a message that has ended, or was published."""
    if isinstance(each, LogRecord):
        attributes = msgspec.json.encode(each.attributes).decode()
        at = common.when(each.published_at_ms)
        return (at, str(each.message_id), each.group, attributes, f"{each.size} bytes")
    return (
        common.when(each.ended_at_ms),
        f"{each.state.value:6}",
        str(each.message_id),
        f"attempt {each.attempts}",
        each.group,
        common.preview(each.payload),
        f"({each.reason})" if each.reason else "",
    )


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

    def read(self, broker: Broker | Reader) -> Iterator[Entry]:
        """Give the messages that have ended since the last time."""
        return chain.from_iterable(self._pages(broker, PAGE, payloads=True))

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


class LogFollower:
    """Messages in the order in which they were published, those that a filter takes or all."""

    def __init__(self, broker: Broker | Reader, wanted: Filter | None, *, from_start: bool) -> None:
        """Begin behind the last message that was published, or with the first one kept."""
        stats = broker.log_stats()
        self._at = dict.fromkeys(stats.cursors, 0 if from_start else stats.end)
        self._wanted = wanted

    def read(self, broker: Broker | Reader) -> Iterator[LogRecord]:
        """Give the messages published since the last time."""
        for log in broker.log_stats().cursors:
            while True:
                page = broker.read_log(log, begin=self._at.setdefault(log, 0), limit=PAGE)
                yield from filter(self._takes, page.records)
                self._at[log] = max(self._at[log], page.cursor.end)
                if not page.records:
                    break

    def _takes(self, each: LogRecord) -> bool:
        row = Row(each.attributes, each.group, each.priority, each.published_at_ms, each.size)
        return self._wanted is None or self._wanted.matches(row)


# --- claiming and settling ------------------------------------------------------------------------


@click.command("claim")
@click.argument("queue")
@click.option("--limit", type=int, default=1, show_default=True, help="How many at most.")
@click.option("--lease", "lease_ms", type=duration, help="How long to hold them.")
@click.option("--wait", "wait_ms", type=duration, default=0, help="Wait for the first so long.")
@click.option("--consumer", default="penstock-cli", show_default=True, help="Who is claiming.")
@common.changes_store
def claim(broker: Broker, queue: str, **given: Any) -> None:
    """Take messages under a lease."""
    about = (":id=message_id", "payload", "group", ":attempt=attempts")
    columns = (*about, "lease ends=lease_deadline_ms", "receipt")
    common.show(broker.claim(queue, **given), columns, empty="nothing to claim")


_receipts = click.argument("receipts", metavar="RECEIPT...", nargs=-1, required=True)


@click.command("ack")
@_receipts
@common.changes_store
def ack(broker: Broker, receipts: tuple[str, ...]) -> None:
    """Settle messages as done."""
    _show_outcomes(broker.ack(receipts))


@click.command("release")
@_receipts
@click.option("--delay", "delay_ms", type=duration, help="Instead of the queue's back-off.")
@click.option("--reason", default="", help="Why; kept in the history.")
@common.changes_store
def release(broker: Broker, receipts: tuple[str, ...], **given: Any) -> None:
    """Give messages back, to be tried again or to fail."""
    _show_outcomes(broker.release(receipts, **given))


@click.command("extend")
@_receipts
@click.option("--lease", "lease_ms", type=duration, required=True, help="From now, so long.")
@common.changes_store
def extend(broker: Broker, receipts: tuple[str, ...], lease_ms: int) -> None:
    """Move the end of a lease."""
    _show_outcomes(broker.extend(receipts, lease_ms=lease_ms))


def _show_outcomes(outcomes: list[Outcome]) -> None:
    columns = ("receipt", "outcome=status", "lease ends=lease_deadline_ms")
    common.show(outcomes, columns, empty="no receipts")
    refused = sum(not outcome for outcome in outcomes)
    if refused:
        # A script must see that something was not settled.
        raise click.ClickException(f"{refused} of {len(outcomes)} receipts were refused")


# --- many at once ---------------------------------------------------------------------------------

_ids = click.option(
    "--id", "ids", type=int, multiple=True, help="Only this message; can be repeated."
)


@click.command("redrive")
@click.argument("queue")
@_ids
@click.option("--where", help='Only those that a filter selects, such as "price > 10".')
@common.changes_store
def redrive(broker: Broker, queue: str, ids: tuple[int, ...], where: str | None) -> None:
    """Make failed messages available again."""
    count = broker.redrive(queue, message_ids=ids or None, where=where)
    common.answer({"queue": queue, "redriven": count}, f"{count} messages are available again")


@click.command("move")
@click.argument("queue")
@click.argument("to")
@_state_option(["failed", "available", "delayed"], State.FAILED)
@_ids
@click.option("--limit", type=click.IntRange(1), help="At most so many.")
@common.changes_store
def move(broker: Broker, queue: str, to: str, ids: tuple[int, ...], **given: Any) -> None:
    """Move messages into another queue."""
    count = broker.move(queue, to, message_ids=ids or None, **given)
    common.answer({"queue": queue, "to": to, "moved": count}, f"moved {count} messages to {to}")


@click.command("purge")
@click.argument("queue")
@click.option(
    "--state",
    "states",
    type=click.Choice(common.STATES),
    multiple=True,
    default=(State.AVAILABLE.value, State.DELAYED.value),
    show_default=True,
    help="Which messages; can be repeated.",
)
@_ids
@click.option("--yes", is_flag=True, help="Do not ask.")
@common.changes_store
def purge(
    broker: Broker, queue: str, states: tuple[str, ...], ids: tuple[int, ...], *, yes: bool
) -> None:
    """Remove messages by state."""
    broker.queue(queue)
    if not yes:
        which = ", ".join(states)
        click.confirm(f"Remove messages of {queue} that are {which}?", abort=True, err=True)
    if ids:
        count = broker.purge(queue, states=states, message_ids=ids)
    else:
        count = common.purge_in_steps(broker, queue, states)
    common.answer({"queue": queue, "removed": count}, f"removed {count} messages")


@click.command("sweep")
@common.changes_store
def sweep(broker: Broker) -> None:
    """Do what is due: expiry, delays, retention."""
    sums: Counter[str] = Counter()
    while (counts := broker.sweep()).total:
        sums.update({name: n or 0 for name, n in msgspec.structs.asdict(counts).items()})
    summed = msgspec.convert({**sums, "next_due_ms": counts.next_due_ms}, SweepCounts)
    common.show_fields(summed, "swept", skip="next_due_ms")
