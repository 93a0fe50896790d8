"""The command line: ``penstock COMMAND``.

This module knows the commands by name only; each is in a module of :mod:`penstock.cli` that
is loaded when the command is used, so that ``penstock --help`` loads none of them.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import click

from penstock import __version__
from penstock.errors import PenstockError

# Name of the command: its module, and its text in --help.
COMMANDS: Final = {
    "queues": ("queues", "List the queues."),
    "create": ("queues", "Make a queue."),
    "update": ("queues", "Change settings of a queue."),
    "delete": ("queues", "Remove a queue with every message in it."),
    "stats": ("queues", "Show depths and totals."),
    "publish": ("messages", "Publish to every queue whose filter matches."),
    "send": ("messages", "Publish straight to one queue."),
    "browse": ("messages", "Look at messages without claiming them."),
    "attempts": ("messages", "Show every attempt at a message."),
    "claim": ("messages", "Take messages under a lease."),
    "ack": ("messages", "Settle messages as done."),
    "release": ("messages", "Give messages back, to be tried again or to fail."),
    "extend": ("messages", "Move the end of a lease."),
    "work": ("server", "Run a function for every message of a queue."),
    "redrive": ("messages", "Make failed messages available again."),
    "move": ("messages", "Move messages into another queue."),
    "purge": ("messages", "Remove messages by state."),
    "sweep": ("messages", "Do what is due: expiry, delays, retention."),
    "log": ("store", "Look at the metadata log, or change how it is kept."),
    "route": ("store", "Put what the logs hold into the queues."),
    "backfill": ("store", "Fill a queue from the log with what it wants and has not had."),
    "serve": ("server", "Serve a store until SIGTERM or SIGINT."),
    "config": ("server", "Show the settings of a server and where each comes from."),
    "keys": ("server", "Make, list and remove the access keys of a server."),
    "backup": ("server", "Copy a store to a directory that is not there yet."),
    "restore": ("server", "Make a store of a backup."),
    "check": ("store", "Read the whole store and hold it to its invariants."),
    "salvage": ("store", "Read what can be read of the damaged STORE into a new one, TARGET."),
    "cluster": ("store", "Look at a store on a SQL database, and change its ring."),
    "pipeline": ("spark", "Work on a broker with Spark; needs penstock[spark] and Java."),
    "import": ("messages", "Bring another queue's database in."),
    "filter": ("queues", "Try filters out."),
}


class LazyGroup(click.Group):
    """A group whose commands are looked up in :data:`COMMANDS` when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Give the names in the order of the table, which is the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Load a command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"penstock.cli.{COMMANDS[cmd_name][0]}")
        found = (each for each in vars(module).values() if isinstance(each, click.Command))
        return next(each for each in found if each.name == cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands from the table, without loading any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error of Penstock is one line on stderr and exit code 1."""
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            raise click.ClickException(" ".join(str(error).split())) from error


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="penstock")
def cli() -> None:
    """Work with a Penstock store: queues, messages, imports."""


def main() -> None:
    """Run the command line."""
    cli(prog_name="penstock")
