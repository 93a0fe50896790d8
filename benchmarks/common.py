"""What the benchmarks share: the machine's description, temporary directories, tables."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

import penstock

console = Console(width=120)


def describe() -> None:
    """Print what the figures below were measured on."""
    model = "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    console.print(
        f"penstock {penstock.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} x {model}, {platform.system()} {platform.release()}"
    )
    console.print(
        f"load average {os.getloadavg()[0]:.1f} at the start; command: {' '.join(sys.argv)}"
    )


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    """Give a directory that is removed afterwards (set TMPDIR to choose the disk)."""
    path = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)


def resident_mb() -> float:
    """Return the resident memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6
