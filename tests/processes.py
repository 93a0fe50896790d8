"""The processes of this machine, for tests that kill some, or that look for some that are left."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process: its parent, and its command line with a space behind each word."""

    parent: int
    command: str


def processes() -> dict[int, Process]:
    """Return the processes that run now, by their ids."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(place.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            command = place.joinpath("cmdline").read_bytes().decode(errors="replace")
        except OSError:
            # It has just ended.
            continue
        found[int(place.name)] = Process(parent, command.replace("\0", " "))
    return found
