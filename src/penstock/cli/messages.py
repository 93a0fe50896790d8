"""Messages in: publish and send."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

import click
import msgspec

from penstock.cli.common import duration, emit_json, open_store, store_option
from penstock.errors import InvalidMessage
from penstock.filters import Row, parse
from penstock.model import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.broker.broker import Broker

__all__ = ["commands"]

_Command = TypeVar("_Command", bound="Callable[..., Any]")
LINES_PER_PUBLISH: Final = 1_000


def _attribute(
    ctx: click.Context, param: click.Parameter, given: tuple[str, ...]
) -> dict[str, Any]:
    attributes = {}
    for pair in given:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE", ctx, param)
        attributes[name] = _value(text)
    return attributes


def _value(text: str) -> Any:
    """Read numbers, booleans, null and quoted strings as JSON has them; the rest is text."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return text if isinstance(value, dict | list) else value


def _message_options(command: _Command) -> _Command:
    for option in (
        click.option("--lines", is_flag=True, help="One message for each line of the payload."),
        click.option("--dedup-id", help="A repeated publish with the same id is stored once."),
        click.option("--delay", "delay_ms", type=duration, default=0, help="Hide it for so long."),
        click.option("--priority", type=int, default=0, help="0 to 255; higher first."),
        click.option("--group", default="", help="Fairness, or order on a FIFO queue."),
        click.option(
            "-a",
            "--attribute",
            "attributes",
            multiple=True,
            metavar="NAME=VALUE",
            callback=_attribute,
            help="An attribute; a number, true, false or null is taken as such.",
        ),
        click.option(
            "--payload-file",
            type=click.File("rb"),
            help="Read the payload from a file; - is standard input.",
        ),
        click.argument("payload", required=False),
    ):
        command = option(command)
    return command


@click.command("publish")
@_message_options
@store_option
def publish(store: str, *, as_json: bool, **options: Any) -> None:
    """Publish to every queue whose filter matches."""
    batches = _batches(options, {})
    with open_store(store) as broker:
        _publish(broker, batches, as_json=as_json)


@click.command("send")
@click.argument("queue")
@_message_options
@store_option
def send(queue: str, store: str, *, as_json: bool, **options: Any) -> None:
    """Publish straight to one queue."""
    batches = _batches(options, {"queue": queue})
    with open_store(store) as broker:
        _publish(broker, _checked(broker, queue, batches), as_json=as_json)


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


def _batches(options: dict[str, Any], more: dict[str, str]) -> Iterator[list[Message]]:
    payload: str | None = options["payload"]
    file: BinaryIO | None = options["payload_file"]
    if (payload is None) == (file is None):
        raise click.UsageError("give either PAYLOAD or --payload-file")
    if options["lines"] and options["dedup_id"]:
        raise click.UsageError("--lines makes many messages: they can't share one --dedup-id")
    attributes = {**options["attributes"], **more}

    def message(body: bytes) -> Message:
        return Message(
            body,
            attributes,
            group=options["group"],
            priority=options["priority"],
            delay_ms=options["delay_ms"],
            dedup_id=options["dedup_id"],
        )

    if not options["lines"]:
        body = file.read() if file is not None else (payload or "").encode()
        return iter([[message(body)]])
    lines = file if file is not None else iter((payload or "").encode().splitlines())
    bodies = (line.rstrip(b"\r\n") for line in lines)
    messages = (message(body) for body in bodies)
    return iter(lambda: list(islice(messages, LINES_PER_PUBLISH)), [])


def _publish(broker: Broker, batches: Iterator[list[Message]], *, as_json: bool) -> None:
    ids: list[int] = []
    for batch in batches:
        ids.extend(broker.publish(batch))
    if as_json:
        emit_json({"ids": ids})
    elif len(ids) == 1:
        click.echo(f"published message {ids[0]}")
    else:
        click.echo(f"published {len(ids)} messages")


commands: Final = {"publish": publish, "send": send}
