"""Commands, with their options, and files that a page of the docs names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from penstock.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
# Decisions tell of their time.
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.parent.name != "decisions"
]
# A line of a block, or a piece of code within a sentence.
SHOWN = re.compile(r"(?:^(?:\$ |export [^\n]* && )?|`)(penstock [a-z][^`\n]*)", re.MULTILINE)
# Where a shell would begin another command, and brackets of what may be left out.
ENDS = re.compile(r" (?:&&|\|\|?|;|#) .*| {4,}.*|[\[\]…]|\.\.\.")

FILE = re.compile(r"`((?:tests|benchmarks|examples|deploy|src)/[\w./-]+)`")


def shown_on(page: Path) -> Iterator[str]:
    for found in SHOWN.finditer(page.read_text()):
        yield ENDS.sub("", found[1]).rstrip("\\ .,")


def wrong_in(text: str) -> str | None:
    """Say what is wrong with a command; None: nothing."""
    command: click.Command = cli
    words = shlex.split(text.replace("'", "").replace('"', ""))[1:]
    known = {"--help", "--version"}
    context = click.Context(cli)
    for word in words:
        if word.startswith("-"):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known:
                return f"no option {name}"
        elif isinstance(command, click.Group):
            if word.isupper():
                return None
            inner = command.get_command(context, word)
            if inner is None:
                return f"no command {word}"
            command = inner
            known |= {
                each for parameter in command.params
                for each in (*parameter.opts, *parameter.secondary_opts)
            }  # fmt: skip
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_a_page_exist(page: Path) -> None:
    wrong = {text: why for text in shown_on(page) if (why := wrong_in(text))}
    assert wrong == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert [name for name in FILE.findall(page.read_text()) if not (ROOT / name).exists()] == []


def test_commands_are_found_and_judged() -> None:
    assert sum(len(list(shown_on(page))) for page in PAGES) > 80
    assert wrong_in("penstock queue create books") == "no command queue"
    assert wrong_in("penstock stats orders --colour red") == "no option --colour"
    assert wrong_in("penstock pipeline route --location grpc://HOST:8815 --once") is None
