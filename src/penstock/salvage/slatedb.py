"""Salvage of a SlateDB database, whichever of its objects are missing or damaged.

Nothing is written to the database. Of a directory, a scratch directory has links to the objects;
salvage leaves unreadable manifests out of it one after the other, so that the library falls back
to the one before. Of a bucket that can't be done: there the newest manifest has to be good.

Salvage reads the objects of the log one by one, because the library's own reading of the log ends
at the first missing one. Objects stay for some minutes after their rows are in files of rows, and
all of them are read: the last value of a key in the log also stands for unreadable files.
"""

from __future__ import annotations

import contextlib
import re
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from slatedb.uniffi import AdminBuilder, Error, ReaderMode, RowEntryKind, SlateDbWalReader

from penstock.engines.slatedb.binding import CallTimeout, SlateLocation, call, translate_open
from penstock.engines.slatedb.objects import build, log_object
from penstock.engines.slatedb.tables import LAYOUT_KEY, SILENCE_S, Rows, read_layout
from penstock.errors import PenstockError, StorageFailed, StoreDamaged
from penstock.salvage.source import SalvageSource, walk

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from slatedb.uniffi import DbReader, RowEntry

    from penstock.salvage.source import Row

T = TypeVar("T")

_END: Final = b"\xff" * 300
_OBJECT: Final = re.compile(r"((?:compacted|wal)/\w+\.sst)")


class SlateSource(SalvageSource):
    """The readable rows of a SlateDB database."""

    def __init__(self, location: SlateLocation, scratch: Path, *, drop_after: bool = False) -> None:
        self._location = _link_objects(location, scratch) if location.kind == "file" else location
        super().__init__(scratch=self._location.root, original=location.root)
        self._drop_after = drop_after
        # By key: its value in the log, or None if it was deleted.
        self._log: dict[bytes, bytes | None] = {}
        self._reader = self._open()
        self._rows = Rows(self._reader, self._location, lambda: None)
        admin = AdminBuilder(self._location.path, self._location.store()).build()
        manifest = self._call(admin.read_manifest(None))
        self._read_log(manifest.replay_after_wal_id, manifest.last_l0_seq)
        layout = self._log.get(LAYOUT_KEY) or self._rows.get(LAYOUT_KEY)
        if layout is None:
            raise StoreDamaged(f"nothing is left of {location} that says which tables it has")
        self._families = read_layout(layout, location)

    @property
    def tables(self) -> list[str]:
        """The names of the known tables."""
        return list(self._families)

    def rows(self, table: str) -> Iterator[Row]:
        """Read every readable row of a table."""
        family = self._families[table]
        for key, value in self._in_files(family, table):
            if key not in self._log:
                yield key[1:], value
        for key, logged in self._log.items():
            if key.startswith(family) and logged is not None:
                yield key[1:], logged

    def close(self) -> None:
        """Close the reader."""
        with contextlib.suppress(Error, CallTimeout):
            call(self._reader.shutdown(), SILENCE_S)
        self._rows.close()

    def _open(self) -> DbReader:
        """Open by the newest manifest whose files can be read at least at their beginning."""
        manifests = sorted((Path(self._location.root) / "manifest").glob("*"), reverse=True)
        if self._location.kind == "file" and not manifests:
            raise StoreDamaged(
                "none of its manifests is there, and nothing can be read without one: bring one "
                "back from a copy of the objects"
            )
        while True:
            try:
                reader = build(self._location, ReaderMode.FOLLOW_LATEST(), replay=False)
                Rows(reader, self._location, lambda: None).scan(b"\0", b"\1", 1)
            except PenstockError as error:
                if self._location.kind != "file" or len(manifests) < 2:
                    raise StoreDamaged(f"nothing of it can be read: {error}") from error
                newest = manifests.pop(0)
                newest.unlink()
                text = f"can't be used, the one before it was: {error}"
                self.add_damage(f"manifest/{newest.name}", text)
            else:
                return reader

    def _in_files(self, family: bytes, table: str) -> Iterator[Row]:
        """Read every readable row of a table that is in a file of rows."""
        end = family + _END

        def pass_over(begin: bytes, resume: bytes, error: StorageFailed) -> Iterator[Row]:
            named = _OBJECT.search(str(error))
            until = None if resume == end else resume[1:]
            self.add_damage(named[1] if named else "", str(error), table, begin[1:], until)
            return iter(())

        def scan(key: bytes, limit: int) -> list[tuple[bytes, bytes]]:
            return self._rows.scan(key, end, limit)

        return walk(scan, family, end, pass_over)

    def _read_log(self, flushed: int, last_seq: int) -> None:
        """Read every object of the log, also of rows that are in files of rows already."""
        logs = SlateDbWalReader(self._location.path, self._location.store())
        if self._location.kind == "file":
            folder = Path(self._location.root) / "wal"
            numbers = sorted(int(each.stem) for each in folder.glob("*.sst"))
        else:
            numbers = list(range(flushed + 1, self._call(logs.last_wal_file_id(flushed)) + 1))
        before = min([flushed, *(number - 1 for number in numbers)])
        due = last_seq + 1
        for number in numbers:
            rows: list[RowEntry] = []
            wrong = f"{number - before - 1} objects are missing" if number > before + 1 else ""
            try:
                found = call(call(logs.iterator(number), SILENCE_S).next(), SILENCE_S)
                rows = sorted(found.rows if found else [], key=attrgetter("seq"))
            except (Error, CallTimeout) as error:
                wrong = str(getattr(error, "message", error))
            if rows and rows[0].seq > due:
                wrong = wrong or f"{rows[0].seq - due} commits before it are missing"
            if wrong and number <= flushed:
                # Earlier changes are in files of rows, and missing ones may have overwritten them.
                self._log.clear()
            elif wrong:
                self.add_damage(log_object(number), wrong)
                if self._drop_after:
                    return
            before = number
            for row in rows:
                self._log[row.key] = None if row.kind is RowEntryKind.TOMBSTONE else row.value
                due = max(due, row.seq + 1)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return call(work, SILENCE_S)
        except (Error, CallTimeout) as error:
            translate_open(error, self._location)


def _link_objects(location: SlateLocation, scratch: Path) -> SlateLocation:
    """Make a directory of links to the objects."""
    root = Path(location.root)
    if not root.is_dir() or location.holds_something_else():
        raise StoreDamaged(f"{root} holds nothing of a SlateDB database")
    for folder in ("manifest", "wal", "compacted"):
        (scratch / folder).mkdir(parents=True)
        for each in (root / folder).glob("*"):
            (scratch / folder / each.name).symlink_to(each.resolve())
    return SlateLocation("file", str(scratch), "")
