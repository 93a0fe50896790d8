"""Messages: bring them in, look at them, claim and settle them, move and remove many."""

from __future__ import annotations

from collections import Counter
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click
import msgspec

from penstock.cli import common
from penstock.cli.common import duration, open_store, url_option
from penstock.errors import InvalidMessage
from penstock.filters import Row, parse
from penstock.model import Message, State, SweepCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.broker.broker import Broker
    from penstock.broker.reader import Reader
    from penstock.model import Outcome

LINES_PER_PUBLISH: Final = 1_000


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
@common.changes_store
def publish(broker: Broker, **given: Any) -> None:
    """Publish to every queue whose filter matches."""
    _publish(broker, _batches(**given))


@click.command("send")
@click.argument("queue")
@_message_options
@common.changes_store
def send(broker: Broker, queue: str, **given: Any) -> None:
    """Publish straight to one queue."""
    given["attributes"]["queue"] = queue
    _publish(broker, _checked(broker, queue, _batches(**given)))


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
