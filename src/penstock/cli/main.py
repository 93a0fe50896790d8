"""The command line: ``penstock COMMAND``.

This module knows the commands by name only; each is in a module of :mod:`penstock.cli` that
is loaded when the command is used, so that ``penstock --help`` loads none of them.

Exit codes::

    0  done
    1  refused or failed, with one line on standard error
    2  wrong usage
    3  no server answers
    4  another pipeline has taken over
"""

from __future__ import annotations

import importlib
from itertools import chain
from typing import Any, Final

import click

from penstock import __version__
from penstock.errors import PenstockError, ServerUnreachable

# Section of --help: name of the command: its module, and its text in --help.
SECTIONS: Final = {
    "Start": {
        "up": ("server", "Serve a local directory, with the console, and say what to try."),
        "doctor": ("doctor", "Look for what is missing on this machine."),
        "completion": ("doctor", "Print the completion script of a shell."),
    },
    "Queues": {
        "queues": ("queues", "List the queues."),
        "create": ("queues", "Make a queue."),
        "update": ("queues", "Change settings of a queue."),
        "delete": ("queues", "Remove a queue with every message in it."),
        "stats": ("queues", "Show depths and totals."),
        "top": ("queues", "Watch depths and rates of all queues."),
        "filter": ("queues", "Try filters out."),
    },
    "Messages": {
        "publish": ("messages", "Publish to every queue whose filter matches."),
        "send": ("messages", "Publish straight to one queue."),
        "browse": ("messages", "Look at messages without claiming them."),
        "attempts": ("messages", "Show every attempt at a message."),
        "explain": ("messages", "Say why a message is, or is not, in a queue, and where it is."),
        "tail": ("messages", "Follow messages as they end, or as they come."),
        "claim": ("messages", "Take messages under a lease."),
        "ack": ("messages", "Settle messages as done."),
        "release": ("messages", "Give messages back, to be tried again or to fail."),
        "extend": ("messages", "Move the end of a lease."),
        "work": ("server", "Run a function for every message of a queue."),
        "redrive": ("messages", "Make failed messages available again."),
        "move": ("messages", "Move messages into another queue."),
        "purge": ("messages", "Remove messages by state."),
        "import": ("messages", "Bring another queue's database in."),
    },
    "Server": {
        "serve": ("server", "Serve a store until SIGTERM or SIGINT."),
        "config": ("server", "Show the settings of a server and where each comes from."),
        "keys": ("server", "Make, list and remove the access keys of a server."),
        "bench": ("doctor", "Measure a server or a store with a short load."),
    },
    "Operations": {
        "backup": ("backup", "Make, list, verify and prune backups of a store."),
        "restore": ("backup", "Make a store of a backup."),
        "check": ("store", "Read the whole store and hold it to its invariants."),
        "salvage": ("store", "Read what can be read of the damaged STORE into a new one, TARGET."),
        "copy": ("store", "Bring everything of the store SOURCE into a new one, TARGET."),
        "sweep": ("messages", "Do what is due: expiry, delays, retention."),
        "cluster": ("store", "Look at a store on a SQL database, and change its ring."),
    },
    "Log and Spark": {
        "log": ("store", "Look at the metadata log, or change how it is kept."),
        "route": ("store", "Put what the logs hold into the queues."),
        "backfill": ("store", "Fill a queue from the log with what it wants and has not had."),
        "pipeline": ("spark", "Work on a broker with Spark; needs penstock[spark] and Java."),
    },
}
COMMANDS: Final = dict(chain.from_iterable(section.items() for section in SECTIONS.values()))
# Command: an example for its --help.
EXAMPLES: Final = {
    "up": "penstock up",
    "doctor": "penstock doctor --need spark --url penstock://127.0.0.1:8814",
    "completion": 'eval "$(penstock completion bash)"',
    "queues": "penstock queues --url penstock://127.0.0.1:8814",
    "create": "penstock create books --filter \"kind = 'book'\" --lease 5m --dead-letter dead",
    "update": "penstock update books --max-attempts 10 --label team=books",
    "delete": "penstock delete books --drain",
    "stats": "penstock stats books --json",
    "top": "penstock top --sort failed --every 1s",
    "filter test": 'penstock filter test "price > 10" \'{"price": 12}\'',
    "publish": "penstock publish 'a novel' -a kind=book -a price=12",
    "send": "cat orders.jsonl | penstock send orders --lines --payload-file -",
    "browse": "penstock browse orders --state failed --limit 5",
    "attempts": "penstock attempts orders 4711",
    "explain": "penstock explain orders 4711",
    "tail": "penstock tail orders --json | jq .reason",
    "claim": "penstock claim orders --limit 10 --wait 20s --json",
    "ack": "penstock ack RECEIPT",
    "release": "penstock release RECEIPT --delay 5m --reason 'no paper'",
    "extend": "penstock extend RECEIPT --lease 10m",
    "work": "penstock work shop:handle --queue orders --concurrency 8",
    "redrive": 'penstock redrive orders --where "price > 10"',
    "move": "penstock move orders dead --state failed",
    "purge": "penstock purge orders --state done --yes",
    "import queueber": "penstock import queueber ./queueber.db --queue orders",
    "serve": "penstock serve --store rocksdb:./data --http 0.0.0.0:8816 --keys keys.toml",
    "config": "penstock config --config penstock.toml",
    "keys add": "penstock keys add shop --keys keys.toml --allow publish:orders-*",
    "keys rotate": "penstock keys rotate shop --keys keys.toml",
    "keys list": "penstock keys list --keys keys.toml",
    "keys remove": "penstock keys remove shop --keys keys.toml",
    "bench": "penstock bench --workers 4 --seconds 5",
    "backup": "penstock backup monday --url penstock://127.0.0.1:8814 --verify",
    "backup copy": "penstock backup copy monday --url penstock://127.0.0.1:8814 --verify",
    "backup create": "penstock backup create s3://backups/main --url slatedb+s3://queues/main",
    "backup list": "penstock backup list s3://backups/main",
    "backup verify": "penstock backup verify s3://backups/main monday",
    "backup prune": "penstock backup prune s3://backups/main --keep 7 --keep-for 30d",
    "backup restore": "penstock backup restore s3://backups/main monday --to ./data",
    "restore": "penstock restore s3://backups/main monday --to ./data",
    "check": "penstock check --url rocksdb:./data",
    "salvage": "penstock salvage rocksdb:./data rocksdb:./new",
    "copy": "penstock copy rocksdb:./data postgresql://penstock@db/penstock",
    "sweep": "penstock sweep",
    "cluster status": "penstock cluster status --url postgresql://penstock@db/penstock",
    "cluster resize": "penstock cluster resize 16 --wait",
    "cluster split": "penstock cluster split orders",
    "log stats": "penstock log stats",
    "log configure": "penstock log configure --retention 7d",
    "log read": "penstock log read --begin 1000 --limit 50",
    "route": "penstock route",
    "backfill": "penstock backfill books --from 2030-01-31T08:00:00+00:00",
    "pipeline run": "penstock pipeline run pipeline.toml",
    "pipeline check": "penstock pipeline check pipeline.toml",
    "pipeline route": "penstock pipeline route --checkpoint ./checkpoint",
    "pipeline status": "penstock pipeline status --location grpc://127.0.0.1:8815",
    "pipeline backfill": "penstock pipeline backfill books --archive ./archive",
    "pipeline archive": "penstock pipeline archive ./archive --keep 7d",
    "pipeline collect": "penstock pipeline collect --delete",
    "pipeline report": "penstock pipeline report --save ./report",
    "pipeline redrive": "penstock pipeline redrive --queue orders --where 'attempts > 3'",
    "pipeline publish": "penstock pipeline publish orders.parquet --column group=tenant",
}


class LazyGroup(click.Group):
    """A group whose commands are looked up in :data:`COMMANDS` when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Give the names in the order of the table, which is the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Load a command, and give it its example."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"penstock.cli.{COMMANDS[cmd_name][0]}")
        found = (each for each in vars(module).values() if isinstance(each, click.Command))
        command = next(each for each in found if each.name == cmd_name)
        inner = getattr(command, "commands", {}).items()
        for words, each in [(cmd_name, command), *((f"{cmd_name} {n}", c) for n, c in inner)]:
            if words in EXAMPLES:
                each.epilog = f"\b\nExample:\n  {EXAMPLES[words]}"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands from the table, without loading any."""
        width = max(map(len, COMMANDS))
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl(
                    [(name.ljust(width), text) for name, (_, text) in commands.items()]
                )

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error of Penstock is one line on stderr and exit code 1, or 3."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            text, ours = str(error), error
            if type(error).__module__.startswith(("pyspark.", "py4j.")):
                # Spark is loaded by now. Its errors come with the stacks of two languages.
                from penstock.spark.sessions import one_line, revived  # noqa: PLC0415

                text, ours = one_line(error), revived(error) or error
            elif not isinstance(error, PenstockError):
                raise
            click.echo(f"Error: {' '.join(text.split())}", err=True)
            ctx.exit(3 if isinstance(ours, ServerUnreachable) else 1)


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="penstock")
def cli() -> None:
    """Work with a Penstock server, or a store: queues, messages, operations, Spark.

    Commands take --url (or PENSTOCK_URL): a server, such as penstock://127.0.0.1:8814, or a store
    that no process has open, such as rocksdb:./data. 'penstock up' starts a server to try.
    """


def main() -> None:
    """Run the command line."""
    cli(prog_name="penstock")
