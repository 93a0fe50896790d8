"""Reading a SlateDB database that somebody else writes, straight from the object store.

Nothing here writes rows, and nothing disturbs the writer. A reader that is to keep to one moment
has the library write a *checkpoint* into the manifest, so that files which the writer has replaced
are kept meanwhile; a look (:func:`peek`) does not even do that.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from slatedb.uniffi import DbReaderBuilder, Error, ReaderMode, ReaderOptions

from penstock.clock import SystemClock
from penstock.engines.slatedb.binding import CallTimeout, call
from penstock.engines.slatedb.engine import families_of
from penstock.engines.slatedb.files import check_objects
from penstock.engines.slatedb.location import NO_DATABASE, translate_open
from penstock.engines.slatedb.tables import SILENCE_S, Rows, SlateTable, SlateView
from penstock.errors import StorageFailed, StoreMismatch
from penstock.limits import MAX_READER_SNAPSHOT_MS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slatedb.uniffi import DbReader

    from penstock.engines.slatedb.location import Place

__all__ = ["Found", "NoDatabase", "ReaderMoved", "SlateReader", "build", "peek"]

# Few: wrong credentials and missing buckets are told of soon.
_RETRIES: Final = 2
_MEMORY_BYTES: Final = 64 << 20
# The library polls once right after it has opened a reader, and then only after the interval.
_SETTLE_S: Final = 0.05


class ReaderMoved(StorageFailed):
    """The library has moved a reader on to a later moment: what was read before is another."""


class NoDatabase(StoreMismatch):
    """There is nothing at the place yet."""


class SlateReader:
    """A database as it was when the reader was opened. It takes no writes.

    It keeps to that moment for :data:`~penstock.limits.MAX_READER_SNAPSHOT_MS`, then refuses. One
    that is not ``pinned`` is for a single record, of whatever moment.
    """

    def __init__(self, place: Place, *, pinned: bool = True, replay: bool = True) -> None:
        self.place = place
        self._pinned = pinned
        self._seconds = SystemClock().seconds
        self._until_s = self._seconds() + MAX_READER_SNAPSHOT_MS / 1000
        mode = ReaderMode.MANAGED_CHECKPOINT() if pinned else ReaderMode.FOLLOW_LATEST()
        self._reader = build(place, mode, replay=replay)
        self._rows = Rows(self._reader, place, self.check)
        self._moment = 0
        self.settle()
        try:
            self.families: Mapping[str, bytes] = families_of(self._rows, place)
        except BaseException:
            self.close()
            raise
        self._tables = {
            name: SlateTable(self._rows, name, family, None)
            for name, family in self.families.items()
        }

    def settle(self) -> None:
        """Take the present state of the library's reader for the moment to keep to."""
        if self._pinned:
            threading.Event().wait(_SETTLE_S)
        self._moment = self._reader.status().durable_seq

    def check(self) -> None:
        """Raise if the library's reader has moved on, or if its moment is too long ago."""
        if self._pinned and self._reader.status().durable_seq != self._moment:
            raise ReaderMoved(f"{self.place}: the reader has moved on; open it again")
        if self._seconds() > self._until_s:
            raise StorageFailed(
                f"{self.place} was opened for reading more than "
                f"{MAX_READER_SNAPSHOT_MS // 60_000} minutes ago: open it again"
            )

    def table(self, name: str) -> SlateTable:
        """Return a table of the database."""
        if name not in self._tables:
            raise StoreMismatch(f"{self.place} has no table {name!r}: use another version")
        return self._tables[name]

    def view(self) -> SlateView:
        """Return the one moment that this reader shows."""
        return SlateView(self._reader, self.place, self.families, self.check)

    def close(self) -> None:
        """Let go of the checkpoint."""
        with contextlib.suppress(Error, CallTimeout):
            call(self._reader.shutdown(), SILENCE_S)
        self._rows.close()


def build(place: Place, mode: ReaderMode, *, replay: bool) -> DbReader:
    """Open the library's reader."""
    builder = DbReaderBuilder(place.path, place.store())
    builder.with_reader_mode(mode)
    builder.with_options(
        ReaderOptions(
            # A poll would move the reader on; it would also renew the checkpoint.
            manifest_poll_interval_ms=MAX_READER_SNAPSHOT_MS,
            checkpoint_lifetime_ms=3 * MAX_READER_SNAPSHOT_MS,
            max_memtable_bytes=_MEMORY_BYTES,
            skip_wal_replay=not replay,
            object_store_max_retries=_RETRIES,
        )
    )
    try:
        return call(builder.build(), SILENCE_S)
    except Error.Data as error:
        if NO_DATABASE in error.message:
            raise NoDatabase(f"{place} holds no store") from error
        translate_open(error, place)
    except (Error, CallTimeout) as error:
        translate_open(error, place)


class Found(NamedTuple):
    """What a look has found: the tables, and one record."""

    tables: frozenset[str]
    record: bytes | None


def peek(place: Place, table: str, key: bytes) -> Found | None:
    """Look at a database and one of its records, without writing; None if there is nothing.

    Raises whatever speaks against opening: a bucket that is not there, credentials that are
    refused, files of something else, objects that are missing.
    """
    if place.holds_something_else():
        raise StoreMismatch(f"{place.root} is not empty and holds no SlateDB database")
    if place.kind == "file":
        check_objects(place)
    found = Found(frozenset(), None)
    # A record that was written long ago is in a file of rows; if it was not, the log is read too.
    for replay in (False, True):
        try:
            reader = SlateReader(place, pinned=False, replay=replay)
        except NoDatabase:
            check_objects(place)
            return None
        try:
            tables = frozenset(reader.families)
            found = Found(tables, reader.table(table).get(key) if table in tables else None)
        finally:
            reader.close()
        if found.record is not None:
            break
    if place.kind == "s3":
        # After the reader has got through: of a wrong bucket or key the library never tires here.
        check_objects(place)
    return found
