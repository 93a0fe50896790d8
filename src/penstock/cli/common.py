"""The commands' shared parts: options, durations, and the two ways of output."""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, cast

import click
import msgspec

from penstock.cli import opening
from penstock.cli.opening import Command
from penstock.errors import NotAllowed
from penstock.model import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.text import Text
    from rich.tree import Tree

    from penstock.broker.broker import Broker
    from penstock.model import Explanation

_PREVIEW_CHARS: Final = 60
# Tables that go to a file or a pipe are not cut to a screen's width.
_UNCUT_WIDTH: Final = 10_000
# Longer tables are lines with tabs: nobody looks at their frames, which take seconds to draw.
_DRAWN_ROWS: Final = 1_000
# Results of a condition.
WORDS: Final = {True: "true", False: "false", None: "unknown"}
_STYLES: Final = {True: "green", False: "red", None: "yellow"}
STATES: Final = [state.value for state in State]
# Messages that one call removes, while the command shows how far it is.
PURGE_STEP: Final = 50_000


def duration(value: str | int) -> int:
    """Turn ``250ms``, ``30s``, ``5m``, ``2h`` or ``7d`` into milliseconds; a bare number is ms."""
    from penstock.server.config import UNITS_MS, amount  # noqa: PLC0415 - many commands do without

    try:
        return amount(value, UNITS_MS, "a duration")
    except ValueError:
        text = f"{value!r} is not a duration such as 250ms, 30s, 5m, 2h or 7d"
        raise click.BadParameter(text) from None


def size(value: str | int) -> int:
    """Turn ``64KB``, ``16MB`` or ``2GB`` into bytes; a bare number is bytes."""
    from penstock.server.config import UNITS_BYTES, amount  # noqa: PLC0415 - as above

    try:
        return amount(value, UNITS_BYTES, "a size")
    except ValueError:
        text = f"{value!r} is not a size such as 64KB, 16MB or 2GB"
        raise click.BadParameter(text) from None


def pairs_of(given: Iterable[str], what: str = "NAME") -> dict[str, str]:
    """Take the values of an option apart that are NAME=VALUE."""
    pairs = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{each!r} is not {what}=VALUE")
        pairs[name] = value
    return pairs


def purge_in_steps(broker: Broker, queue: str, states: Sequence[str]) -> int:
    """Remove the messages of a queue that are in one of the states, and show how far that is."""
    removed = depth = 0
    # A key that may purge a queue may not be allowed to count its messages.
    with suppress(NotAllowed):
        stats = broker.stats(queue)
        depth = sum(getattr(stats, state) for state in set(states))
    with progress_bar(f"removing messages of {queue}") as bar:
        while True:
            one = broker.purge(queue, states=states, limit=PURGE_STEP)
            removed += one
            if bar is not None:
                bar(removed, max(depth, removed))
            # Messages that come meanwhile must not keep this going for ever.
            if one < PURGE_STEP or 0 < depth <= removed:
                return removed


# --- options and stores ---------------------------------------------------------------------------


def options(*decorators: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Make one decorator of several options, in the order of --help."""

    def add(command: Command) -> Command:
        for decorate in reversed(decorators):
            command = decorate(command)
        return command

    return add


def _note_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:  # noqa: FBT001
    ctx.meta[__name__] = value


# The functions below that print look it up: no command needs to pass it on.
json_option = click.option("--json", is_flag=True, expose_value=False, callback=_note_json,
                           help="Print JSON instead of a table.")  # fmt: skip
store_option = options(
    json_option,
    opening.url_option(
        "--url",
        "--store",
        help="A server, such as penstock://127.0.0.1:8814, or a store, such as rocksdb:./data; "
        "writing to a store on object storage takes it over.",
    ),
)
read_only_option = click.option(
    "--read-only", is_flag=True, help="Read a store on object storage beside its owner."
)


def _on_store(opening: Callable[..., Any], *names: str) -> Callable[[Command], Command]:
    """Make a decorator: the command gets the open broker, not its URL and the options named."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(store: str, **given: Any) -> None:
            chosen = {name: given.pop(name) for name in names}
            with opening(store, **chosen) as broker:
                command(broker, **given)

        return cast(Command, store_option(run))

    return decorate


changes_store = _on_store(opening.open_store)
reads_store = _on_store(opening.open_to_look)
reads_store_beside = options(read_only_option, _on_store(opening.open_to_look, "read_only"))


# --- output ---------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Turn structs into what JSON has; a payload that is not text becomes ``payload_base64``."""
    return _readable(msgspec.to_builtins(value, builtin_types=(bytes,)))


def _readable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_readable(each) for each in value]
    if not isinstance(value, dict):
        return value
    readable: dict[str, Any] = {}
    for name, each in value.items():
        if isinstance(each, bytes):
            try:
                readable[name] = each.decode()
            except UnicodeDecodeError:
                readable[f"{name}_base64"] = each
        else:
            readable[name] = _readable(each)
    return readable


def wants_json() -> bool:
    """Whether the command was called with --json."""
    return bool(click.get_current_context().meta.get(__name__))


def emit_json(value: Any) -> None:
    """Print a value as JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(plain(value)), indent=2))


def answer(value: Any, text: str) -> None:
    """Print a value as JSON, or the text."""
    if wants_json():
        emit_json(value)
    else:
        click.echo(text)


def show(value: Any, columns: Sequence[str], *, empty: str) -> None:
    """Print structs as JSON or as a table."""
    if wants_json():
        emit_json(value)
    else:
        show_table(columns, value, empty=empty)


def show_fields(
    value: msgspec.Struct, heading: str, column: str = ":count", *, skip: str = ""
) -> None:
    """Print one struct as JSON, or a table of its fields."""
    if wants_json():
        emit_json(value)
    else:
        fields = [(name, each) for name, each in plain(value).items() if name != skip]
        show_table((heading, column), fields)


def show_table(columns: Sequence[str], rows: Iterable[Any], *, empty: str = "") -> None:
    """Print a table, or one line if it has no rows.

    Rows are tuples or structs. A column ``heading=field`` shows a field of structs; one named
    ``:x`` holds numbers.
    """
    names = [column.removeprefix(":").partition("=") for column in columns]
    fields, headings = (
        [field or heading for heading, _, field in names],
        [each[0] for each in names],
    )
    texts = []
    for row in rows:
        cells = [_cell(row, each) for each in fields] if isinstance(row, msgspec.Struct) else row
        texts.append(["" if cell is None else printable(str(cell)) for cell in cells])
    if not texts:
        click.echo(empty)
        return
    if len(texts) > _DRAWN_ROWS:
        click.echo("\n".join(map("\t".join, [headings, *texts])))
        return
    # Loaded here: commands that print JSON, and --help, do without.
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table()
    for heading, column in zip(headings, columns, strict=True):
        right = column.startswith(":")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for cells in texts:
        table.add_row(*map(Text, cells))
    width = None if sys.stdout.isatty() else _UNCUT_WIDTH
    Console(file=sys.stdout, width=width).print(table)


def _cell(row: msgspec.Struct, field: str) -> object:
    value = getattr(row, field)
    if field.endswith("_ms"):
        return when(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return value.value
    return preview(value) if isinstance(value, bytes) else value


def plain_explanation(found: Explanation) -> dict[str, Any]:
    """Turn the explanation of a filter into what JSON has."""
    return {
        "text": found.text,
        "result": found.result,
        "values": dict(found.values),
        "parts": [plain_explanation(part) for part in found.parts],
    }


def show_explanation(found: Explanation) -> None:
    """Print the conditions of a filter as a tree, each with its result and the values it read."""
    from rich.console import Console  # noqa: PLC0415 - a JSON answer does without
    from rich.tree import Tree  # noqa: PLC0415

    tree = Tree(_label(found))
    _grow(tree, found)
    Console(file=sys.stdout, soft_wrap=True).print(tree)


def _grow(tree: Tree, found: Explanation) -> None:
    for part in found.parts:
        _grow(tree.add(_label(part)), part)


def _label(found: Explanation) -> Text:
    from rich.text import Text  # noqa: PLC0415

    label = Text(f"{WORDS[found.result]:8}", style=_STYLES[found.result])
    label.append(printable(found.text), style="default")
    if found.values:
        values = ((name, msgspec.json.encode(value).decode()) for name, value in found.values)
        read = ", ".join(f"{printable(name)} is {printable(value)}" for name, value in values)
        label.append(f"   ({read})", style="dim")
    return label


def printable(text: str) -> str:
    """Escape characters that would steer a terminal: texts of messages are anybody's."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def preview(payload: bytes | None) -> str:
    """Show the beginning of a payload."""
    if payload is None:
        return ""
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return f"{len(payload)} bytes"
    text = printable(text)
    return text if len(text) <= _PREVIEW_CHARS else f"{text[:_PREVIEW_CHARS]}…"


def when(ms: int | None) -> str:
    """Show a time, in UTC."""
    if ms is None:
        return ""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


@contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int], None] | None]:
    """Give a function to call with (done, in all), which draws a bar; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - only on a terminal
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
