"""Salvage of a RocksDB directory, whichever of its files are missing or damaged.

The directory itself is only read. Files of rows (``*.sst``) never change, so a scratch directory
has links to them, and beside the links a ``CURRENT``, a ``MANIFEST`` and logs that salvage writes:
RocksDB opens that, read-only, whatever became of the originals. The written manifest puts all
files side by side on level 0 without saying which keys they hold; an iterator takes the newest
version of each key by its sequence number, so it does not need to know.

The original manifest says which files count, if it is whole and every file it names is there;
otherwise every file on the disk counts. A file of rows names its table itself, in its properties.

Where a file can't be read, the scan goes on behind the damage; the keys in between are looked for
in the other files. Those may hold versions of a row that were replaced or deleted in the
unreadable file.
"""

from __future__ import annotations

import contextlib
import re
from itertools import chain
from typing import TYPE_CHECKING, Final

import rocksdict as rocks

from penstock.engines.rocksdb import check
from penstock.engines.rocksdb.check import Manifest, TableFile, check_log
from penstock.engines.rocksdb.files import keep_others_out, read_synced, release, reserve
from penstock.engines.rocksdb.tables import AFTER_ALL, RocksTable
from penstock.errors import StorageFailed, StoreDamaged
from penstock.salvage.source import SalvageSource, walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from penstock.engines.rocksdb.check import LogCheck
    from penstock.salvage.source import Row

_BYTEWISE: Final = b"leveldb.BytewiseComparator"
# Above every sequence number and file number that a store comes to.
_TOP_SEQUENCE: Final = 1 << 55
_TOP_FILE: Final = 1 << 40
# A file that is shorter has not even a footer; RocksDB divides by the size of files.
_LEAST_BYTES: Final = 53
# The name of its table in a file of rows: the end of one property, and the next, whose name shares
# its first 22 bytes with it.
_TABLE_NAME: Final = re.compile(rb"column\.family\.id(.)\x16\x04(.)name", re.DOTALL)
_TAIL_BYTES: Final = 1 << 20
# RocksDB names a file with its directory, the scratch, which is gone when somebody reads the error.
_DIRECTORY: Final = re.compile(r"\S*/(?=\d+\.sst)")


# --- files written for RocksDB --------------------------------------------------------------------


def _write_records(contents: Iterable[bytes]) -> bytes:
    """Write a log or a manifest (:mod:`penstock.engines.rocksdb.check` has the format)."""
    out = bytearray()
    header = check.FRAGMENT.size
    for record in contents:
        at, begun = 0, False
        while at < len(record) or not begun:
            room = check.BLOCK_BYTES - len(out) % check.BLOCK_BYTES
            if room < header:
                out += bytes(room)
                room = check.BLOCK_BYTES
            part = record[at : at + room - header]
            at += len(part)
            if at == len(record):
                kind = check.LAST if begun else check.FULL
            else:
                kind = check.MIDDLE if begun else check.FIRST
            checksum = check.fragment_checksum(bytes([kind]) + part)
            out += check.FRAGMENT.pack(checksum, len(part), kind) + part
            begun = True
    return bytes(out)


def _edit(*fields: int | bytes) -> bytes:
    """Write tags, numbers and strings of a manifest's record."""
    out = bytearray()
    for field in fields:
        value = field if isinstance(field, int) else len(field)
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
        out += b"" if isinstance(field, int) else field
    return bytes(out)


def _write_manifest(families: dict[int, str], files: Iterable[TableFile], log: int) -> bytes:
    """Write a manifest that has files side by side on level 0, with rows of any key in each."""
    begin = (check.COMPARATOR, _BYTEWISE, check.LOG_NUMBER, log)
    tops = (check.NEXT_FILE, _TOP_FILE, check.LAST_SEQUENCE, _TOP_SEQUENCE)
    edits = [_edit(*begin, *tops)]
    edits += [
        _edit(check.FAMILY, number, check.ADD_FAMILY, name.encode(), *begin)
        for number, name in families.items()
        if number
    ]
    # Internal keys end with 8 bytes of sequence and kind.
    span = b"\1" + bytes(7), b"\xff" * 256 + b"\1" + bytes(7)
    for at, each in enumerate(files):
        family = (check.FAMILY, each.family)
        # Files of level 0 have to differ in their sequence numbers; no read goes by them.
        sequences = (2 * at + 1, 2 * at + 2)
        file = (check.NEW_FILE, 0, each.number, each.size, *span, *sequences)
        edits.append(_edit(*family, *file, check.NO_MORE_EXTRAS))
    return _write_records(edits)


# --- the directory --------------------------------------------------------------------------------


class RocksSource(SalvageSource):
    """The readable rows of a RocksDB directory.

    With ``drop_after`` the logs end where the first of them is damaged.
    """

    def __init__(self, path: Path, scratch: Path, *, drop_after: bool = False) -> None:
        super().__init__()
        if not any(path.glob("*.sst")) and not any(path.glob("*.log")):
            raise StoreDamaged(f"{path} holds nothing of a RocksDB database")
        self._path = path
        self._scratch = scratch
        # By the files that are left out: the others, opened as a database.
        self._open: dict[frozenset[int], rocks.Rdict] = {}
        self._held = contextlib.ExitStack()
        self._held.enter_context(_keep_closed(path))
        self._on_disk = {int(p.stem): p.resolve() for p in path.glob("*.sst") if p.stem.isdigit()}
        self._logs = {int(p.stem): p for p in sorted(path.glob("*.log")) if p.stem.isdigit()}
        manifest = self._read_manifest()
        self._families = self._name_families() | (manifest.families if manifest else {})
        self._first_log = 0
        # The sequence number that the logs go on with, or one that is in files of rows already.
        self._next_sequence: int | None = None
        self._files = self._choose(manifest)
        self._copy_logs(drop_after=drop_after)

    @property
    def tables(self) -> list[str]:
        """The names of the known tables."""
        return list(self._families.values())

    def close(self) -> None:
        """Close the files."""
        for database in self._open.values():
            database.close()
        self._open.clear()
        self._held.close()

    def rows(self, table: str) -> Iterator[Row]:
        """Read every readable row of a table, ascending."""
        return self._rows(table, b"", AFTER_ALL, frozenset())

    # --- which files count -----------------------------------------------------------------

    def _read_manifest(self) -> Manifest | None:
        """Read the manifest that counts; None if it is not whole."""
        found = {each.name: each for each in sorted(self._path.glob("MANIFEST-*"))}
        try:
            named = (self._path / "CURRENT").read_text().strip()
        except (OSError, UnicodeDecodeError):
            named = ""
        if named not in found:
            self.notes.append("CURRENT is missing, or names no manifest that is there")
            named = max(found, default="the manifest")
        with contextlib.suppress(KeyError, ValueError):
            data = self._read(found[named])
            manifest = Manifest(data)
            if manifest.end == len(data) > 0:
                return manifest
        self.notes.append(
            f"{named} is missing or damaged: all files of rows were read, also such as had been "
            "replaced, and whether one is missing can't be told"
        )
        return None

    def _read(self, path: Path) -> bytes:
        """Read a file; if its disk can't, that is damage."""
        try:
            return path.read_bytes()
        except OSError as error:
            self.add_damage(path.name, str(error))
            return b""

    def _name_families(self) -> dict[int, str]:
        """Read the numbers of the tables from the options, where they stand in order."""
        for options in sorted(self._path.glob("OPTIONS-*"), reverse=True):
            names = re.findall(rb'^\[CFOptions "(\w+)"\]$', self._read(options), re.MULTILINE)
            if names[:1] == [b"default"]:
                return {at: name.decode() for at, name in enumerate(names)}
        return {0: "default"}

    def _choose(self, manifest: Manifest | None) -> list[TableFile]:
        """Choose the files to be read: those of the manifest, or all if it can't be relied on."""
        known = manifest.files if manifest else {}
        missing = [file for number, file in known.items() if number not in self._on_disk]
        for file in missing:
            self._add_damaged_file(file, *_span(file), f"{file.name} is missing")
        chosen = known
        if manifest is not None:
            log = any(manifest.oldest_log <= each < manifest.next_file for each in self._logs)
            if not log:
                text = "a write-ahead log is missing: what came since the last flush was in it"
                self.add_damage(f"{manifest.oldest_log:06}.log", text)
            unnamed = sorted(set(self._on_disk) - set(known))
            if unnamed:
                self.notes.append(
                    f"{', '.join(f'{number:06}.sst' for number in unnamed)}: not in the manifest, "
                    "which may be cut: read like all others"
                )
            if log and not missing and not unnamed:
                self._first_log = manifest.oldest_log
                self._next_sequence = manifest.last_sequence + 1
        if manifest is None or not self._first_log:
            found = {n: known.get(n) or self._describe(n, p) for n, p in self._on_disk.items()}
            chosen = {number: file for number, file in found.items() if file is not None}
        files = []
        for number, file in sorted(chosen.items()):
            size = self._on_disk[number].stat().st_size
            if size >= _LEAST_BYTES:
                files.append(file._replace(size=size))
            else:
                self._add_damaged_file(file, *_span(file), f"{file.name} has only {size} bytes")
        return files

    def _describe(self, number: int, path: Path) -> TableFile | None:
        """Read from a file of rows which table it belongs to."""
        tail = b""
        with contextlib.suppress(OSError), path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            tail = handle.read()
        names = list(_TABLE_NAME.finditer(tail))
        if not names:
            text = "its end is missing or damaged, so whose rows it has can't be told"
            self.add_damage(path.name, text)
            return None
        name = tail[names[-1].end() : names[-1].end() + names[-1][2][0]]
        family = names[-1][1][0]
        self._families.setdefault(family, name.decode(errors="replace"))
        return TableFile(number, 0, family, b"", b"")

    # --- logs ------------------------------------------------------------------------------

    def _copy_logs(self, *, drop_after: bool) -> None:
        """Write the readable records of the logs to logs in the scratch directory."""
        (self._scratch / "logs").mkdir(parents=True)
        logs = {n: path for n, path in self._logs.items() if n >= self._first_log}
        expected = self._next_sequence
        synced, synced_bytes = read_synced(self._path)
        if self._first_log and synced >= self._first_log and synced not in logs:
            self.add_damage(f"{synced:06}.log", "it is missing")
        ended = False
        for number, path in logs.items():
            data = self._read(path)
            found = check_log(data)
            # Only the end of the last log may be torn, and of it only what was not confirmed.
            least = synced_bytes if number == synced else 0
            least = max(least, 0 if number == max(logs) else found.size)
            is_damaged = self._note_log(path.name, found, least)
            kept = []
            whole = (record for _, record in check.read_records(data))
            behind = () if is_damaged and drop_after else check.read_behind(data, found.resumes)
            for record in chain(whole, behind):
                sequence, count = check.BATCH.unpack_from(record.ljust(check.BATCH.size, b"\0"))
                if expected is not None and sequence > expected:
                    text = f"{sequence - expected} changes are missing before change {sequence}"
                    self.add_damage(path.name, text)
                    ended = ended or drop_after
                expected = sequence + count
                if not ended:
                    kept.append(record)
            ended = ended or (is_damaged and drop_after)
            (self._scratch / "logs" / path.name).write_bytes(_write_records(kept))

    def _note_log(self, name: str, found: LogCheck, least: int) -> bool:
        """Note the damage of a log, of which ``least`` bytes have to be whole; say if there is."""
        if found.resumes is not None or found.end < least:
            text = (
                f"damaged at byte {found.end} of {found.size}: {found.batches} batches are whole "
                f"before that, {found.batches_behind} behind it, and it had {least} bytes or more"
            )
            self.add_damage(name, text)
            return True
        if found.end < found.size:
            self.notes.append(
                f"{name} ends with {found.size - found.end} bytes that are no whole batch: what "
                "was being written when its process was stopped, or damage to the last ones"
            )
        return False

    # --- rows ------------------------------------------------------------------------------

    def _rows(self, table: str, begin: bytes, end: bytes, without: frozenset[int]) -> Iterator[Row]:
        """Read every readable row of [begin, end), without some of the files."""
        rows = self._table(table, without)

        def pass_over(first: bytes, resume: bytes, error: StorageFailed) -> Iterator[Row]:
            why = _DIRECTORY.sub("", str(error.__cause__)).strip()
            file = self._unreadable_file(table, first, without, why)
            self._add_damaged_file(file, first, resume, why)
            return self._rows(table, first, resume, without | {file.number})

        return walk(lambda key, limit: rows.scan(key, end, limit), begin, end, pass_over)

    def _unreadable_file(
        self, table: str, begin: bytes, without: frozenset[int], why: str
    ) -> TableFile:
        """Find the file that can't be read: the error names it, or it fails by itself."""
        files = [each for each in self._files if self._families[each.family] == table]
        files = [each for each in files if each.number not in without]
        for file in files:
            if file.name in why:
                return file
        for file in files:
            alone = frozenset(each.number for each in self._files) - {file.number}
            try:
                self._table(table, alone).scan(begin, AFTER_ALL, 1)
            except StorageFailed:
                return file
        raise StorageFailed(f"RocksDB failed: {why}")

    def _table(self, name: str, without: frozenset[int]) -> RocksTable:
        """Open a table of a database that has all files but some."""
        if without not in self._open:
            self._open[without] = self._database(without)
        return RocksTable(self._open[without], name, lambda _name: None)

    def _database(self, without: frozenset[int]) -> rocks.Rdict:
        path = self._scratch / f"rows{len(self._open)}"
        path.mkdir()
        files = [file for file in self._files if file.number not in without]
        for file in files:
            (path / file.name).symlink_to(self._on_disk[file.number])
        for log in (self._scratch / "logs").iterdir():
            (path / log.name).symlink_to(log)
        manifest = _write_manifest(self._families, files, self._first_log)
        (path / "MANIFEST-000001").write_bytes(manifest)
        (path / "CURRENT").write_text("MANIFEST-000001\n")
        options = rocks.Options(raw_mode=True)
        options.set_paranoid_checks(False)
        options.set_skip_stats_update_on_db_open(True)
        options.set_max_open_files(512)
        columns = {name: rocks.Options(raw_mode=True) for name in self.tables}
        mode = rocks.AccessType.read_only()
        try:
            return rocks.Rdict(str(path), options, columns, access_type=mode)
        except Exception as error:
            raise StoreDamaged(f"nothing of {self._path} can be read: {error}") from error

    def _add_damaged_file(self, file: TableFile, begin: bytes, end: bytes | None, why: str) -> None:
        """Note unreadable rows of a file, within the keys that it can hold."""
        first, last = _span(file)
        if end is None or end == AFTER_ALL or (last is not None and last < end):
            end = last
        self.add_damage(file.name, why, self._families.get(file.family), max(begin, first), end)


@contextlib.contextmanager
def _keep_closed(path: Path) -> Iterator[None]:
    """Keep this and other processes from opening a directory; raise if one has it open."""
    with reserve(path) as inode, keep_others_out(path):
        yield
    release(inode)


def _span(file: TableFile) -> tuple[bytes, bytes | None]:
    """Return between which keys a file has rows, if that is known."""
    return file.smallest[:-8], file.largest[:-8] + b"\0" if file.largest else None
