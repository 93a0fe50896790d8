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

__all__ = ["COMMANDS", "cli", "main"]

# Name of the command: the module it is in, and what --help says of it.
COMMANDS: Final = {
    "queues": ("queues", "List the queues."),
    "create": ("queues", "Make a queue."),
    "update": ("queues", "Change settings of a queue."),
    "delete": ("queues", "Remove a queue with every message in it."),
    "stats": ("queues", "Show depths and totals."),
    "publish": ("messages", "Publish to every queue whose filter matches."),
    "send": ("messages", "Publish straight to one queue."),
    "browse": ("inspect", "Look at messages without claiming them."),
    "attempts": ("inspect", "Show every attempt at a message."),
    "claim": ("claims", "Take messages under a lease."),
    "ack": ("claims", "Settle messages as done."),
    "release": ("claims", "Give messages back, to be tried again or to fail."),
    "extend": ("claims", "Move the end of a lease."),
    "work": ("work", "Run a function for every message of a queue."),
    "redrive": ("move", "Make failed messages available again."),
    "move": ("move", "Move messages into another queue."),
    "purge": ("move", "Remove messages by state."),
    "sweep": ("move", "Do what is due: expiry, delays, retention."),
    "log": ("routing", "Look at the metadata log, or change how it is kept."),
    "route": ("routing", "Put what the logs hold into the queues."),
    "backfill": ("routing", "Fill a queue from the log with what it wants and has not had."),
    "serve": ("serve", "Serve a store until SIGTERM or SIGINT."),
    "config": ("serve", "Show the settings of a server and where each comes from."),
    "keys": ("keys", "Make, list and remove the access keys of a server."),
    "backup": ("backup", "Copy a store to a directory that is not there yet."),
    "restore": ("backup", "Make a store of a backup."),
    "check": ("check", "Read the whole store and hold it to its invariants."),
    "salvage": ("salvage", "Read what can be read of the damaged STORE into a new one, TARGET."),
    "cluster": ("cluster", "Look at a store on a SQL database, and change its ring."),
    "pipeline": ("pipeline", "Work on a broker with Spark; needs penstock[spark] and Java."),
    "import": ("importing", "Bring another queue's database in."),
    "filter": ("filters", "Try filters out."),
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
        command: click.Command = module.commands[cmd_name]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands from the table, without loading any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what Penstock refuses is one line on stderr and exit code 1."""
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
