"""A Queueber database, read without changing a byte of it.

Key map; each namespace is also a column family::

    available/<id>               StoredItem    an item that can be polled
    in_progress/<id>             StoredItem    an item under a lease
    visibility_index/<s>/<id>    available/<id>    by the second from which it is visible
    leases/<lease>               LeaseEntry    the items of a lease
    lease_expiry/<s>/<lease>     leases/<lease>    by the second at which it ends

``<s>`` is seconds since the epoch, u64 big-endian. Ids and leases are UUIDv7, 16 bytes, but
nothing depends on their length, and an import must not stop at an item of another name. The
records are in ``queueber.capnp``. Older databases have every namespace in the family ``default``,
and while Queueber moves them they are in both: the record in the family of its own is the newer.

RocksDB and its binding leave log and configuration files in the directory they open, even for
reading. So the reader opens a scratch directory of links to the database's files.
"""

from __future__ import annotations

import heapq
import importlib
import tempfile
from contextlib import ExitStack, contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import rocksdict as rocks

from penstock.errors import CorruptRecord, ImportFailed, needs_extra
from penstock.store import codec

if TYPE_CHECKING:
    from collections.abc import Iterator

AVAILABLE: Final = b"available/"
IN_PROGRESS: Final = b"in_progress/"
LEASE_EXPIRY: Final = b"lease_expiry/"
LEASES: Final = b"leases/"
VISIBILITY_INDEX: Final = b"visibility_index/"
_NAMESPACES: Final = (AVAILABLE, IN_PROGRESS, LEASE_EXPIRY, LEASES, VISIBILITY_INDEX)
_OWN: Final = {namespace[:-1].decode(): (namespace,) for namespace in _NAMESPACES}
# Families that a Penstock store has and a Queueber database has not.
_OURS: Final = frozenset({"payloads", "history", "queues"})


def parse_timed_key(namespace: bytes, key: bytes) -> tuple[int, bytes]:
    """Give the second and the id of an entry of an index."""
    rest = key.removeprefix(namespace)
    if len(rest) == len(key) or len(rest) < 10 or rest[8:9] != b"/":
        raise CorruptRecord(f"Queueber key: {key!r} is not {namespace.decode()}<seconds>/<id>")
    return int.from_bytes(rest[:8], "big"), rest[9:]


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
    visible_at_secs: int | None


class Source:
    """A Queueber database, open for reading; close it, or use it as a context manager."""

    def __init__(self, path: Path) -> None:
        """Open the database at ``path``, or raise ImportFailed for anything else."""
        self.path = path
        self._schema = _schema()
        if not path.exists():
            raise ImportFailed(f"there is nothing at {path}")
        if not path.is_dir() or not (path / "CURRENT").exists():
            raise ImportFailed(f"{path} is not the directory of a RocksDB database")
        with ExitStack() as opened:
            scratch = tempfile.TemporaryDirectory(prefix="penstock-import-")
            view = Path(opened.enter_context(scratch))
            for file in path.resolve().iterdir():
                (view / file.name).symlink_to(file)
            self._db, self._tables = _open(path, view)
            opened.callback(self._db.close)
            opened.callback(self._tables.clear)
            self._check_keys()
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and delete the scratch directory."""
        self._opened.close()

    @property
    def identity(self) -> str:
        """RocksDB's own id of this database, which moves with it; else its path."""
        try:
            return (self.path / "IDENTITY").read_text().strip()
        except (OSError, UnicodeDecodeError):
            return str(self.path.resolve())

    # --- records -------------------------------------------------------------------------

    def items(self, after: bytes) -> Iterator[list[Found]]:
        """Give the records of each item whose id is beyond ``after``, in the order of ids."""
        streams = [
            self._found(namespace, family, after)
            for namespace in (AVAILABLE, IN_PROGRESS)
            for family in self._families(namespace)
        ]
        by_id = attrgetter("id")
        for _, records in groupby(heapq.merge(*streams, key=by_id), by_id):
            yield list(records)

    def _found(self, namespace: bytes, family: str, after: bytes) -> Iterator[Found]:
        begin = namespace + after + b"\0" if after else namespace
        old, skip = family == "default", len(namespace)
        for row in self._walk(family, begin, _end(namespace)):
            key = row.key()
            yield Found(key[skip:], namespace, old, key, row.value())

    def count_items(self) -> int:
        """Count the records of items."""
        return sum(1 for namespace in (AVAILABLE, IN_PROGRESS) for _, _ in self.keys(namespace))

    def keys(self, namespace: bytes) -> Iterator[tuple[str, bytes]]:
        """Give the keys of a namespace, each with the family it is in."""
        for family in self._families(namespace):
            for row in self._walk(family, namespace, _end(namespace)):
                yield family, row.key()

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

    def foreign_keys(self) -> Iterator[tuple[str, bytes]]:
        """Give the keys that are in no namespace, or in the family of another."""
        for family in self._tables:
            own = _NAMESPACES if family == "default" else _OWN.get(family, ())
            # Between the namespaces, before the first and after the last.
            begins = [b"", *map(_end, own)]
            for begin, end in zip(begins, [*own, None], strict=True):
                for row in self._walk(family, begin, end):
                    yield family, row.key()

    # --- decoding --------------------------------------------------------------------------

    def decode_item(self, record: Found) -> StoredItem:
        """Decode an item, or raise CorruptRecord."""
        with _decoding(self._schema.StoredItem, record.value) as stored:
            id_, index_key = bytes(stored.id), bytes(stored.visibilityTsIndexKey)
            contents = bytes(stored.contents)
        if id_ != record.id:
            raise CorruptRecord(f"the record names the item {id_.hex() or '(none)'}")
        try:
            visible_at_secs, indexed_id = parse_timed_key(VISIBILITY_INDEX, index_key)
        except CorruptRecord:
            return StoredItem(contents, None)
        return StoredItem(contents, visible_at_secs if indexed_id == id_ else None)

    def decode_lease(self, value: bytes) -> tuple[list[bytes], int]:
        """Return the items of a lease and the second at which it ends, or raise CorruptRecord.

        The second is 0 in records from before leases kept it.
        """
        with _decoding(self._schema.LeaseEntry, value) as entry:
            return [bytes(id_) for id_ in entry.ids], int(entry.expiryTsSecs)

    # --- rows ------------------------------------------------------------------------------

    def _families(self, namespace: bytes) -> list[str]:
        own = namespace[:-1].decode()
        return [own, "default"] if own in self._tables else ["default"]

    def _walk(self, family: str, begin: bytes, end: bytes | None) -> Iterator[Any]:
        """Give the iterator at each row: the binding's generators end at a damaged block."""
        try:
            options = rocks.ReadOptions()
            if end is not None:
                options.set_iterate_upper_bound(end)
            rows: Any = self._tables[family].iter(options)
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
        if any(True for namespace in _NAMESPACES for _ in self.keys(namespace)):
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
    with needs_extra("queueber", "reading a Queueber database"):
        capnp = importlib.import_module("capnp")
    return capnp.load(str(Path(codec.__path__[0]) / "queueber.capnp"))


@contextmanager
def _decoding(struct: Any, value: bytes) -> Iterator[Any]:
    """Read a record; CorruptRecord for anything that the library raises.

    The library follows a pointer when its field is read, so a bad one shows only in the block.
    """
    try:
        with struct.from_bytes(value) as reader:
            yield reader
    except Exception as error:
        reason = str(error).partition("stack:")[0].strip()
        raise CorruptRecord(f"not a Cap'n Proto record: {reason}") from error


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


def _end(namespace: bytes) -> bytes:
    """Return the key after every key of a namespace."""
    return namespace[:-1] + bytes([namespace[-1] + 1])
