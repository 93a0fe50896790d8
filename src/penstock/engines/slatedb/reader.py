"""Reading a SlateDB database that another process writes, straight from the object store.

Nothing here writes rows, and nothing disturbs the writer. A reader that is to keep to one moment
makes the library write a *checkpoint* into the manifest, so that files which the writer has
replaced are kept meanwhile; :func:`peek` does not even do that.
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
    from slatedb.uniffi import DbReader

    from penstock.engines.slatedb.location import SlateLocation

# Few: wrong credentials and missing buckets are reported soon.
_RETRIES: Final = 2
_MEMORY_BYTES: Final = 64 << 20
# The library polls once right after it has opened a reader, and then only after the interval.
_SETTLE_S: Final = 0.05


class ReaderMoved(StorageFailed):
    """The library has moved a reader on to a later moment: rows read before are of another."""


class NoDatabase(StoreMismatch):
    """There is no database at the location yet."""


class SlateReader(SlateView):
    """A database as it was when the reader was opened.

    It keeps to that moment for :data:`~penstock.limits.MAX_READER_SNAPSHOT_MS`, then refuses. A
    reader that is not ``pinned`` is for a single record, of whatever moment.
    """

    def __init__(
        self, location: SlateLocation, *, pinned: bool = True, replay: bool = True
    ) -> None:
        self.location = location
        self._pinned = pinned
        self._seconds = SystemClock().seconds
        self._until_s = self._seconds() + MAX_READER_SNAPSHOT_MS / 1000
        mode = ReaderMode.MANAGED_CHECKPOINT() if pinned else ReaderMode.FOLLOW_LATEST()
        self._reader = build(location, mode, replay=replay)
        self._moment = 0
        self.settle()
        try:
            rows = Rows(self._reader, location, self.check)
            super().__init__(rows, families_of(rows, location))
        except BaseException:
            self._shut_down()
            raise

    def settle(self) -> None:
        """Take the present state of the library's reader for the moment to keep to."""
        if self._pinned:
            threading.Event().wait(_SETTLE_S)
        self._moment = self._reader.status().durable_seq

    def check(self) -> None:
        """Raise if the library's reader has moved on, or if its moment is too long ago."""
        if self._pinned and self._reader.status().durable_seq != self._moment:
            raise ReaderMoved(f"{self.location}: the reader has moved on; open it again")
        if self._seconds() > self._until_s:
            raise StorageFailed(
                f"{self.location} was opened for reading more than "
                f"{MAX_READER_SNAPSHOT_MS // 60_000} minutes ago: open it again"
            )

    def table(self, name: str) -> SlateTable:
        """Return a table of the database."""
        if name not in self.tables:
            raise StoreMismatch(f"{self.location} has no table {name!r}: use another version")
        return self.tables[name]

    def close(self) -> None:
        """Drop the checkpoint."""
        self._shut_down()
        super().close()

    def _shut_down(self) -> None:
        with contextlib.suppress(Error, CallTimeout):
            call(self._reader.shutdown(), SILENCE_S)


def build(location: SlateLocation, mode: ReaderMode, *, replay: bool) -> DbReader:
    """Open the library's reader; with ``replay``, it reads the log too."""
    builder = DbReaderBuilder(location.path, location.store())
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
    except (Error, CallTimeout) as error:
        if isinstance(error, Error.Data) and NO_DATABASE in error.message:
            raise NoDatabase(f"{location} holds no store") from error
        translate_open(error, location)


class Peeked(NamedTuple):
    """A record of a database; None if the database has no such row."""

    record: bytes | None


def peek(location: SlateLocation, table: str, key: bytes) -> Peeked | None:
    """Read one record without writing anything; None if there is no database.

    Raises every reason not to open the database: a bucket that is not there, refused credentials,
    files of something else, missing objects.
    """
    if location.holds_something_else():
        raise StoreMismatch(f"{location.root} is not empty and holds no SlateDB database")
    if location.kind == "file":
        check_objects(location)
    record = None
    # A record that was written long ago is in a file of rows; otherwise the log is read too.
    for replay in (False, True):
        try:
            reader = SlateReader(location, pinned=False, replay=replay)
        except NoDatabase:
            check_objects(location)
            return None
        with contextlib.closing(reader):
            if table in reader.tables:
                record = reader.table(table).get(key)
        if record is not None:
            break
    if location.kind == "s3":
        # After the reader has got through: of a wrong bucket or key the library never tires here.
        check_objects(location)
    return Peeked(record)
