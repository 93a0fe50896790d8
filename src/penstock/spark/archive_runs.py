"""The manifest of an archive: which runs are in it, and what each of them holds.

::

    ARCHIVE/done/run=000001/queue=orders/date=2030-01-31/part-….parquet
    ARCHIVE/failed/run=000001/…
    ARCHIVE/attempts/run=000001/…
    ARCHIVE/_runs/000001.json          written last: a run without it never happened
    ARCHIVE/_runs/lock                 held by the run that is under way

A queue that was deleted and made again counts its history from the beginning, so ranges belong to
the queue's name and the time it was made.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.engines.disk import sync_path
from penstock.errors import InvalidInput, StorageFailed, StoreMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["TABLES", "Part", "Reach", "Run", "Runs"]

TABLES: Final = ("done", "failed", "attempts")
_VERSION: Final = 1


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Sequence numbers [begin, end) of one state of one queue."""

    queue: str
    created_at_ms: int
    state: str
    begin: int
    end: int
    rows: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of a run: how many rows, and a checksum of their content."""

    table: str
    queue: str
    date: str
    rows: int
    checksum: str


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run that was verified."""

    version: int
    store_id: str
    number: int
    at_ms: int
    payload: bool
    reaches: list[Reach]
    parts: list[Part]


class Runs:
    """The runs of an archive, in order."""

    def __init__(self, place: str | Path) -> None:
        if "://" in str(place):
            raise InvalidInput(
                f"an archive is a directory of this machine or a shared mount, not {place!s:.200}"
            )
        self.place = Path(place).absolute()
        self._index = self.place / "_runs"
        self.runs: list[Run] = []
        self.load()

    def load(self) -> None:
        """Read which runs there are."""
        self.runs = []
        for path in sorted(self._index.glob("[0-9]*.json")):
            try:
                run = msgspec.json.decode(path.read_bytes(), type=Run)
            except msgspec.MsgspecError as error:
                raise StorageFailed(f"{path} is damaged: {error}") from None
            if run.version != _VERSION:
                raise StoreMismatch(f"{path} has version {run.version}, not {_VERSION}")
            self.runs.append(run)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs away, until this process ends at the latest."""
        self._index.mkdir(parents=True, exist_ok=True)
        with (self._index / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StorageFailed(f"another run is archiving to {self.place}") from None
            self.load()
            yield

    def exists(self) -> bool:
        """Whether anything was ever archived here, or began to be."""
        return self._index.is_dir()

    def check_store(self, store_id: str) -> None:
        """Refuse an archive of another store."""
        for run in self.runs:
            if run.store_id != store_id:
                raise StoreMismatch(
                    f"{self.place} is the archive of store {run.store_id}, not of {store_id}"
                )

    def reached(self) -> dict[tuple[str, int, str], int]:
        """Return below which sequence all is archived, by (queue, created_at_ms, state)."""
        ends: dict[tuple[str, int, str], int] = {}
        for run in self.runs:
            for reach in run.reaches:
                key = (reach.queue, reach.created_at_ms, reach.state)
                ends[key] = max(reach.end, ends.get(key, 0))
        return ends

    def ends(self, state: str, born: Mapping[str, int]) -> dict[str, int]:
        """Return below which sequence all is archived of queues that were made at these times."""
        return {
            queue: end
            for (queue, created_at_ms, of), end in self.reached().items()
            if of == state and born.get(queue) == created_at_ms
        }

    def folder(self, table: str, number: int) -> Path:
        """Return where a run keeps a table."""
        return self.place / table / f"run={number:06}"

    def folders(self, table: str) -> list[Path]:
        """Return where the rows of a table are, in all runs that have any."""
        return [
            self.folder(table, run.number)
            for run in self.runs
            if any(part.table == table for part in run.parts)
        ]

    def remove_leftovers(self) -> int:
        """Remove what runs have written that did not come to their end; return how many folders."""
        known = {f"run={run.number:06}" for run in self.runs}
        left = [
            folder
            for table in TABLES
            for folder in (self.place / table).glob("run=*")
            if folder.name not in known
        ]
        for folder in left:
            shutil.rmtree(folder)
        return len(left)

    def next_number(self) -> int:
        """Return the number of the next run."""
        return max((run.number for run in self.runs), default=0) + 1

    def record(self, run: Run) -> None:
        """Make a run count: its files first reach the disk, then its name appears at once."""
        for table in TABLES:
            _sync(self.folder(table, run.number))
        new = self._index / f"{run.number:06}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1))
        _sync(new)
        try:
            # A link, unlike a rename, never replaces a run of that number.
            os.link(new, self._index / f"{run.number:06}.json")
        except FileExistsError:
            raise StorageFailed(f"run {run.number} of {self.place} is there already") from None
        new.unlink()
        for folder in (self._index, self.place):
            sync_path(folder)
        self.runs.append(run)


def _sync(path: Path) -> None:
    """Have a file, or everything in a folder and the folder's own name, reach the disk."""
    if not path.exists():
        return
    for each in [*path.rglob("*"), path, path.parent]:
        sync_path(each)
