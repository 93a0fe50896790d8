"""A Queueber database, read without changing a byte of it.

The namespaces of ``penstock.importers.queueber_keys`` lie in column families of their own, or all
in ``default``, or (while Queueber is moving from the one to the other) in both. Where a key is in
both, the family of its own has the newer record.

RocksDB and its binding leave log and configuration files in the directory they open, even for
reading. So what is opened is a scratch directory of links to the database's files.
"""

from __future__ import annotations

import heapq
import importlib
import tempfile
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import rocksdict as rocks

from penstock.errors import CorruptRecord, ImportFailed
from penstock.importers import queueber_keys as keys
from penstock.store import codec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

__all__ = ["Found", "Lease", "Source", "StoredItem"]

NAMESPACES: Final = (
    keys.AVAILABLE,
    keys.IN_PROGRESS,
    keys.LEASE_EXPIRY,
    keys.LEASES,
    keys.VISIBILITY_INDEX,
)
_OWN: Final = {namespace[:-1].decode(): (namespace,) for namespace in NAMESPACES}
# Families that a Penstock store has and a Queueber database has not.
_OURS: Final = frozenset({"payloads", "history", "queues"})


class Found(NamedTuple):
    """A record of an item, as it lies in the database."""

    id: bytes
    namespace: bytes
    old_family: bool
    key: bytes
    value: bytes


class StoredItem(NamedTuple):
    """A decoded item; ``visible_at_secs`` is None if its record does not say."""

    contents: bytes
    index_key: bytes
    visible_at_secs: int | None


class Lease(NamedTuple):
    """A decoded lease; ``expiry_secs`` is 0 in records from before leases kept it."""

    ids: list[bytes]
    expiry_secs: int


class Source:
    """A Queueber database, open for reading; close it, or use it as a context manager."""

    def __init__(self, path: Path) -> None:
        """Open the database at ``path``, or raise ImportFailed for anything else."""
        self.path = path
        self._schema = _schema()
        _check_directory(path)
        self._view = tempfile.TemporaryDirectory(prefix="penstock-import-")
        try:
            view = Path(self._view.name)
            for file in path.resolve().iterdir():
                (view / file.name).symlink_to(file)
            self._db, self._tables = _open(path, view)
        except BaseException:
            self._view.cleanup()
            raise
        try:
            self._check_keys()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the database."""
        self._tables.clear()
        self._db.close()
        self._view.cleanup()

    @property
    def identity(self) -> str:
        """What tells this database from others: RocksDB's own id moves with it."""
        try:
            return (self.path / "IDENTITY").read_text().strip()
        except (OSError, UnicodeDecodeError):
            return str(self.path.resolve())

    # --- records -------------------------------------------------------------------------

    def items(self, after: bytes) -> Iterator[list[Found]]:
        """Give the records of each item whose id is beyond ``after``, in the order of ids."""
        streams = [
            self._found(namespace, family, after)
            for namespace in (keys.AVAILABLE, keys.IN_PROGRESS)
            for family in self._families(namespace)
        ]
        by_id = attrgetter("id")
        for _, records in groupby(heapq.merge(*streams, key=by_id), by_id):
            yield list(records)

    def _found(self, namespace: bytes, family: str, after: bytes) -> Iterator[Found]:
        begin = namespace + after + b"\0" if after else namespace
        old, skip = family == "default", len(namespace)
        for key, value in self._rows(family, begin, _end(namespace)):
            yield Found(key[skip:], namespace, old, key, value)

    def count_items(self) -> int:
        """Count the records of items."""
        return sum(
            1 for namespace in (keys.AVAILABLE, keys.IN_PROGRESS) for _, _ in self.keys(namespace)
        )

    def keys(self, namespace: bytes) -> Iterator[tuple[str, bytes]]:
        """Give the keys of a namespace, each with the family it is in."""
        for family in self._families(namespace):
            for key in self._keys(family, namespace, _end(namespace)):
                yield family, key

    def newest(self, namespace: bytes, key: bytes) -> bytes | None:
        """Return the record at a key: that of the namespace's own family before the old one's."""
        try:
            for family in self._families(namespace):
                value: bytes | None = self._tables[family].get(key)
                if value is not None:
                    return value
        except Exception as error:
            raise self._unreadable(error) from error
        return None

    def has(self, namespace: bytes, key: bytes) -> bool:
        """Return whether there is a record at a key."""
        try:
            return any(key in self._tables[family] for family in self._families(namespace))
        except Exception as error:
            raise self._unreadable(error) from error

    def foreign_keys(self) -> Iterator[tuple[str, bytes]]:
        """Give the keys that are in no namespace, or in the family of another."""
        for family in self._tables:
            own = NAMESPACES if family == "default" else _OWN.get(family, ())
            begin = b""
            for namespace in own:
                for key in self._keys(family, begin, namespace):
                    yield family, key
                begin = _end(namespace)
            for key in self._keys(family, begin, None):
                yield family, key

    # --- decoding --------------------------------------------------------------------------

    def decode_item(self, record: Found) -> StoredItem:
        """Decode an item, or raise CorruptRecord."""
        with _decoding(self._schema.StoredItem, record.value) as stored:
            id_, index_key = bytes(stored.id), bytes(stored.visibilityTsIndexKey)
            contents = bytes(stored.contents)
        if id_ != record.id:
            raise CorruptRecord(f"the record names the item {id_.hex() or '(none)'}")
        try:
            visible_at_secs, indexed_id = keys.parse_visibility_key(index_key)
        except CorruptRecord:
            return StoredItem(contents, index_key, None)
        return StoredItem(contents, index_key, visible_at_secs if indexed_id == id_ else None)

    def decode_lease(self, value: bytes) -> Lease:
        """Decode a lease, or raise CorruptRecord."""
        with _decoding(self._schema.LeaseEntry, value) as entry:
            return Lease([bytes(id_) for id_ in entry.ids], int(entry.expiryTsSecs))

    # --- rows ------------------------------------------------------------------------------

    def _families(self, namespace: bytes) -> list[str]:
        own = namespace[:-1].decode()
        return [own, "default"] if own in self._tables else ["default"]

    def _rows(self, family: str, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        for row in self._walk(family, begin, end):
            yield row.key(), row.value()

    def _keys(self, family: str, begin: bytes, end: bytes | None) -> Iterator[bytes]:
        for row in self._walk(family, begin, end):
            yield row.key()

    def _walk(self, family: str, begin: bytes, end: bytes | None) -> Iterator[Any]:
        """Give the iterator at each row: the binding's generators end at a damaged block."""
        try:
            rows: Any = self._tables[family].iter(_until(end))
            rows.seek(begin)
            while rows.valid():
                yield rows
                rows.next()
            rows.status()
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> ImportFailed:
        return ImportFailed(
            f"RocksDB can't read {self.path} any further: {error}; if Queueber is running on it, "
            "stop it, and import again: the import goes on where it was"
        )

    def _check_keys(self) -> None:
        known = any(True for namespace in NAMESPACES for _ in self.keys(namespace))
        if known:
            return
        stranger = next(self.foreign_keys(), None)
        if stranger is not None:
            raise ImportFailed(
                f"{self.path} is not a Queueber database: no key is in a namespace of it, and "
                f"family {stranger[0]} holds {stranger[1][:40]!r}"
            )
        if "available" not in self._tables:
            raise ImportFailed(f"{self.path} is an empty RocksDB database: nothing to import")


def _schema() -> Any:
    try:
        capnp = importlib.import_module("capnp")
    except ImportError as error:
        raise ImportFailed(
            "reading Queueber's records needs pycapnp, which is not installed: "
            "pip install 'penstock[queueber]'"
        ) from error
    return capnp.load(str(Path(codec.__path__[0]) / "queueber.capnp"))


class _decoding:  # noqa: N801 - reads as a verb in `with`
    """Read a record, turning whatever the library raises into CorruptRecord."""

    def __init__(self, struct: Any, value: bytes) -> None:
        self._struct, self._value = struct, value

    def __enter__(self) -> Any:
        try:
            self._reader = self._struct.from_bytes(self._value)
            return self._reader.__enter__()
        except Exception as error:
            raise CorruptRecord(_first_line(error)) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reader.__exit__(kind, error, trace)
        # Pointers are followed when a field is read, so a bad one shows only then.
        if isinstance(error, Exception):
            raise CorruptRecord(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return f"not a Cap'n Proto record: {str(error).partition('stack:')[0].strip()}"


def _check_directory(path: Path) -> None:
    if not path.exists():
        raise ImportFailed(f"there is nothing at {path}")
    if not path.is_dir() or not (path / "CURRENT").exists():
        raise ImportFailed(f"{path} is not the directory of a RocksDB database")


def _open(path: Path, view: Path) -> tuple[rocks.Rdict, dict[str, Any]]:
    try:
        names = rocks.Rdict.list_cf(str(view), rocks.Options(raw_mode=True))
    except Exception as error:
        raise ImportFailed(f"{path} is not a RocksDB database that can be read: {error}") from error
    if set(names) >= _OURS:
        raise ImportFailed(f"{path} is a Penstock store, not a Queueber database")
    families = [name for name in names if name != "default"]
    try:
        db = rocks.Rdict(
            str(view),
            rocks.Options(raw_mode=True),
            {name: rocks.Options(raw_mode=True) for name in families},
            access_type=rocks.AccessType.read_only(error_if_log_file_exist=False),
        )
    except Exception as error:
        raise ImportFailed(f"RocksDB can't open {path} for reading: {error}") from error
    tables = {name: db.get_column_family(name) for name in families}
    return db, {**tables, "default": db}


def _until(end: bytes | None) -> rocks.ReadOptions:
    bound = rocks.ReadOptions()
    if end is not None:
        bound.set_iterate_upper_bound(end)
    return bound


def _end(namespace: bytes) -> bytes:
    """Return the key after every key of a namespace."""
    return namespace[:-1] + bytes([namespace[-1] + 1])
