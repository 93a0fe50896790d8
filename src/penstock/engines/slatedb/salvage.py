"""Reading what is left of a SlateDB database, whichever of its objects are missing or damaged.

Nothing is written to it. Of a directory, a scratch directory has links to the objects; manifests
that can't be read are left out of it one after the other, so that the library falls back to the
one before. Of a bucket that can't be done: there the newest manifest has to be good.

Objects of the log are read one by one, apart from the library's own reading of the log, which ends
at the first that is missing. They stay for some minutes after their rows are in files of rows, and
all of them are read: what they say of a key is the last that was said of it, so that it stands for
files that can't be read.
"""

from __future__ import annotations

import contextlib
import re
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from slatedb.uniffi import AdminBuilder, Error, ReaderMode, RowEntryKind, SlateDbWalReader

from penstock.engines import Damage
from penstock.engines.readable import next_readable
from penstock.engines.slatedb.binding import CallTimeout, call
from penstock.engines.slatedb.engine import LAYOUT_KEY, read_layout
from penstock.engines.slatedb.location import Place, translate_open
from penstock.engines.slatedb.reader import build
from penstock.engines.slatedb.tables import SILENCE_S, Rows
from penstock.errors import PenstockError, StorageFailed, StoreDamaged

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from slatedb.uniffi import DbReader, RowEntry

__all__ = ["SlateRemains"]

T = TypeVar("T")

_PAGE: Final = 500
_END: Final = b"\xff" * 300
_OBJECT: Final = re.compile(r"((?:compacted|wal)/\w+\.sst)")


class SlateRemains:
    """The rows of a SlateDB database that can be read; see :class:`~penstock.engines.Remains`."""

    def __init__(self, place: Place, scratch: Path, *, drop_after: bool = False) -> None:
        self.damage: list[Damage] = []
        self.notes: list[str] = []
        self._source = place
        self._place = _linked(place, scratch) if place.kind == "file" else place
        self._drop_after = drop_after
        # By key: its value in the log, or None if it was deleted.
        self._log: dict[bytes, bytes | None] = {}
        self._reader = self._open()
        self._rows = Rows(self._reader, self._place, lambda: None)
        admin = AdminBuilder(self._place.path, self._place.store()).build()
        manifest = self._call(admin.read_manifest(None))
        self._read_log(manifest.replay_after_wal_id, manifest.last_l0_seq)
        layout = self._log.get(LAYOUT_KEY) or self._rows.get(LAYOUT_KEY)
        if layout is None:
            raise StoreDamaged(f"nothing is left of {place} that says which tables it has")
        self._families = read_layout(layout, place)

    @property
    def tables(self) -> list[str]:
        """The names of the tables that are known."""
        return list(self._families)

    def rows(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        """Read every row of a table that can be read."""
        family = self._families[table]
        for key, value in self._in_files(family, table):
            if key not in self._log:
                yield key[1:], value
        for key, logged in self._log.items():
            if key.startswith(family) and logged is not None:
                yield key[1:], logged

    def close(self) -> None:
        """Let go of the reader."""
        with contextlib.suppress(Error, CallTimeout):
            call(self._reader.shutdown(), SILENCE_S)
        self._rows.close()

    # --- inside ----------------------------------------------------------------------------

    def _open(self) -> DbReader:
        """Open by the newest manifest whose files can be read at least at their beginning."""
        manifests = sorted((Path(self._place.root) / "manifest").glob("*"), reverse=True)
        if self._place.kind == "file" and not manifests:
            raise StoreDamaged(
                "none of its manifests is there, and nothing can be read without one: bring one "
                "back from a copy of the objects"
            )
        while True:
            try:
                reader = build(self._place, ReaderMode.FOLLOW_LATEST(), replay=False)
                Rows(reader, self._place, lambda: None).scan(b"\0", b"\1", 1)
            except PenstockError as error:
                if self._place.kind != "file" or len(manifests) < 2:
                    raise StoreDamaged(f"nothing of it can be read: {error}") from error
                newest = manifests.pop(0)
                newest.unlink()
                text = f"can't be used, the one before it was: {error}"
                self._damaged(f"manifest/{newest.name}", text)
            else:
                return reader

    def _in_files(self, family: bytes, table: str) -> Iterator[tuple[bytes, bytes]]:
        source, end = self._rows, family + _END
        begin, limit = family, _PAGE

        def look(key: bytes) -> tuple[bool, bytes | None]:
            try:
                rows = source.scan(key, end, 1)
            except StorageFailed:
                return False, None
            return True, rows[0][0] if rows else None

        while True:
            try:
                rows = source.scan(begin, end, limit)
            except StorageFailed as error:
                if limit > 1:
                    # One by one, up to the damage.
                    limit = 1
                    continue
                resume = next_readable(look, begin, end) or end
                self._note(table, begin[1:], resume, str(error))
                if resume == end:
                    return
                begin, limit = resume, _PAGE
                continue
            yield from rows
            if len(rows) < limit:
                return
            begin = rows[-1][0] + b"\0"

    def _note(self, table: str, begin: bytes, resume: bytes, why: str) -> None:
        named = _OBJECT.search(why)
        file = named.group(1) if named else ""
        end = None if resume.endswith(_END) else resume[1:]
        self._damaged(file, why, table, begin, end)

    def _damaged(
        self,
        file: str,
        why: str,
        table: str | None = None,
        begin: bytes = b"",
        end: bytes | None = None,
    ) -> None:
        why = why.replace(self._place.root, self._source.root)
        self.damage.append(Damage(file, table, begin, end, why))

    def _read_log(self, flushed: int, last_seq: int) -> None:
        """Read every object of the log that is there, also if it is in files of rows already."""
        logs = SlateDbWalReader(self._place.path, self._place.store())
        if self._place.kind == "file":
            folder = Path(self._place.root) / "wal"
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
                # What came before is in files of rows, and what is missing may have changed it.
                self._log.clear()
            elif wrong:
                self._damaged(_log_name(number), wrong)
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
            translate_open(error, self._place)


def _log_name(number: int) -> str:
    return f"wal/{number:020}.sst"


def _linked(place: Place, scratch: Path) -> Place:
    """Make a directory of links to the objects."""
    root = Path(place.root)
    if not root.is_dir() or place.holds_something_else():
        raise StoreDamaged(f"{root} holds nothing of a SlateDB database")
    for folder in ("manifest", "wal", "compacted"):
        (scratch / folder).mkdir(parents=True)
        for each in (root / folder).glob("*"):
            (scratch / folder / each.name).symlink_to(each.resolve())
    return Place("file", str(scratch), "")
