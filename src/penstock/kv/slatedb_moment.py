"""One moment of a SlateDB database that several processes can read, whoever writes it meanwhile.

A *checkpoint* in the manifest keeps files of rows, but the library's reader of a checkpoint stops
where the manifest says the log ended when it was last written, which may be minutes ago; and the
objects of the log after that are not kept by the checkpoint. So a moment is a checkpoint and, on
top of it, the rows of every object of the log that there was when somebody looked: a
:class:`Tail` reads them, once, and whoever shares the moment is given those rows. Objects of the
log are numbered without gaps and never change, so this is a state that the database was in.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar, cast

from slatedb.uniffi import (
    AdminBuilder,
    CheckpointOptions,
    Error,
    ReaderMode,
    RowEntryKind,
    SlateDbWalReader,
)

from penstock.clock import SystemClock
from penstock.errors import StorageFailed, StoreMismatch
from penstock.kv.slatedb import families_of
from penstock.kv.slatedb_calls import CallTimeout, call
from penstock.kv.slatedb_place import NO_DATABASE, translate_open
from penstock.kv.slatedb_reader import NoDatabase, build
from penstock.kv.slatedb_rows import SILENCE_S, Rows, SlateTable
from penstock.limits import MAX_MOMENT_BYTES, MAX_READER_SNAPSHOT_MS

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from slatedb.uniffi import RowEntry, VersionedManifest

    from penstock.kv.overlay import Changes
    from penstock.kv.slatedb_place import Place

__all__ = ["CheckpointReader", "Moment", "Tail"]

T = TypeVar("T")

_NAME: Final = "penstock-moment"
_TRIES: Final = 5
# After this long a checkpoint is renewed by who reads it, and not used for another moment.
_FRESH_MS: Final = MAX_READER_SNAPSHOT_MS // 3
# What the library says of objects that the owner has thrown away, and of checkpoints.
_TRUNCATED: Final = "WAL was truncated"
_NO_CHECKPOINT: Final = ("checkpoint missing", "invalid DB state")


class Moment(NamedTuple):
    """A checkpoint, when it was made, and the rows on top of it: by whole key, None for gone."""

    checkpoint: str
    made_ms: int
    rows: Changes


class _Mark(NamedTuple):
    """A checkpoint: the log's objects up to ``after`` and rows up to ``seq`` are in its files."""

    checkpoint: str
    made_ms: int
    after: int
    seq: int


class _Truncated(Exception):
    """Objects of the log that were wanted are gone: they are in files of rows now."""


class Tail:
    """Looks at a database again and again, and reads only what has come to the log since.

    With ``following`` the checkpoints of moments before the last but one are given back; without,
    they end by themselves, as nobody knows who still reads them.
    """

    def __init__(self, place: Place, *, following: bool = False) -> None:
        self.place = place
        self._following = following
        self._store = place.store()
        self._admin = AdminBuilder(place.path, self._store).build()
        self._clock = SystemClock()
        self._mark: _Mark | None = None
        self._before: list[str] = []
        self._last = 0
        self._rows: dict[bytes, tuple[int, bytes | None]] = {}
        self._bytes = 0

    def look(self) -> Moment:
        """Return the moment that it is now: everything that is durable."""
        for _ in range(_TRIES):
            try:
                mark = self._mark or self._begin()
                if self._go_on(mark):
                    rows = {key: value for key, (_, value) in self._rows.items()}
                    return Moment(mark.checkpoint, mark.made_ms, rows)
            except _Truncated:
                pass
            self._mark = None
        raise StorageFailed(
            f"{self.place} has changed {_TRIES} times while it was looked at: try again"
        )

    def _begin(self) -> _Mark:
        """Make a checkpoint, and begin at the end of its files."""
        if not self._before:
            # What speaks against reading is found by a reader, which can be told not to try again.
            reader = build(self.place, ReaderMode.FOLLOW_LATEST(), replay=False)
            self._call(reader.shutdown())
        options = CheckpointOptions(lifetime_ms=MAX_READER_SNAPSHOT_MS, source=None, name=_NAME)
        made_ms = self._clock.now_ms()
        made = self._call(self._admin.create_detached_checkpoint(options))
        if self._following:
            self._give_back()
        self._before.append(made.id)
        manifest = self._manifest(made.manifest_id)
        self._mark = _Mark(made.id, made_ms, manifest.replay_after_wal_id, manifest.last_l0_seq)
        self._last = manifest.replay_after_wal_id
        self._rows, self._bytes = {}, 0
        return self._mark

    def _give_back(self) -> None:
        while len(self._before) > 1:
            # If it fails it ends by itself.
            with contextlib.suppress(Error, CallTimeout):
                call(self._admin.delete_checkpoint(self._before.pop(0)), SILENCE_S)

    def _go_on(self, mark: _Mark) -> bool:
        """Read what has come to the log; whether the mark will do."""
        log = SlateDbWalReader(self.place.path, self._store)
        last: int = self._call(log.last_wal_file_id(self._last))
        self._read(log, mark, last)
        # Nothing from where the newest files end on is ever thrown away: if that is no later than
        # what was found to be the end, none was missed.
        newest = self._manifest(None)
        if newest.replay_after_wal_id > last:
            return False
        if newest.replay_after_wal_id > mark.after and self._bytes > MAX_MOMENT_BYTES:
            return False
        if self._bytes > 4 * MAX_MOMENT_BYTES:
            raise StorageFailed(
                f"{self.place}: its log is {self._bytes >> 20} MiB ahead of its files, more than "
                "can be read beside its owner: try again in a while"
            )
        return self._clock.now_ms() - mark.made_ms < _FRESH_MS

    def _read(self, log: SlateDbWalReader, mark: _Mark, last: int) -> None:
        if last <= self._last:
            return
        objects = self._call(log.iterator(self._last + 1))
        while self._last < last:
            found = self._call(objects.next())
            if found is None or found.last_consumed_wal_file_id != self._last + 1:
                raise _Truncated
            for row in found.rows:
                if row.seq > mark.seq:
                    self._put(row)
            self._last += 1

    def _put(self, row: RowEntry) -> None:
        if row.kind is RowEntryKind.MERGE:
            raise StoreMismatch(f"{self.place} holds rows of a kind that Penstock does not write")
        known = self._rows.get(row.key)
        if known is None or known[0] <= row.seq:
            value = None if row.kind is RowEntryKind.TOMBSTONE else row.value or b""
            self._rows[row.key] = (row.seq, value)
            self._bytes += len(row.key) + len(value or b"")

    def _manifest(self, number: int | None) -> VersionedManifest:
        manifest = self._call(self._admin.read_manifest(number))
        if manifest is None:
            # The owner has written manifests meanwhile and thrown this one away.
            raise _Truncated
        return manifest

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return call(work, SILENCE_S)
        except Error.Data as error:
            if _TRUNCATED in error.message:
                raise _Truncated from error
            if NO_DATABASE in error.message:
                raise NoDatabase(f"{self.place} holds no store") from error
            translate_open(error, self.place)
        except (Error, CallTimeout) as error:
            translate_open(error, self.place)


class CheckpointReader:
    """The files of a checkpoint, as tables. It is renewed for as long as somebody reads it."""

    def __init__(
        self,
        place: Place,
        checkpoint: str,
        made_ms: int,
        families: Mapping[str, bytes] | None = None,
        rows: Mapping[bytes, bytes | None] | None = None,
    ) -> None:
        self.place = place
        self._checkpoint = checkpoint
        self._made_ms = made_ms
        self._clock = SystemClock()
        # By this machine's own clock from here on: others may be set a little differently.
        age_ms = max(0, self._clock.now_ms() - made_ms)
        self._renew_at_s = self._clock.seconds() + (_FRESH_MS - age_ms) / 1000
        try:
            self._reader = build(place, ReaderMode.CHECKPOINT(checkpoint), replay=False)
        except StoreMismatch as error:
            if not any(words in str(error) for words in _NO_CHECKPOINT):
                raise
            self._too_old(error)
        self._rows = Rows(self._reader, place, self.keep)
        try:
            self.families = families or _families(self._rows, rows or {}, place)
        except BaseException:
            self.close()
            raise
        self._tables = {
            name: SlateTable(self._rows, family, None) for name, family in self.families.items()
        }

    def table(self, name: str) -> SlateTable:
        """Return a table of the files."""
        if name not in self._tables:
            raise StoreMismatch(f"{self.place} has no table {name!r}: use another version")
        return self._tables[name]

    def keep(self) -> None:
        """Renew the checkpoint if a third of its time is over; raise if it is gone."""
        if self._clock.seconds() < self._renew_at_s:
            return
        admin = AdminBuilder(self.place.path, self.place.store()).build()
        try:
            call(admin.refresh_checkpoint(self._checkpoint, MAX_READER_SNAPSHOT_MS), SILENCE_S)
        except Error.Data as error:
            self._too_old(error)
        except (Error, CallTimeout) as error:
            translate_open(error, self.place)
        self._renew_at_s = self._clock.seconds() + _FRESH_MS / 1000

    def _too_old(self, error: BaseException) -> NoReturn:
        minutes = max(0, self._clock.now_ms() - self._made_ms) // 60_000
        raise StorageFailed(
            f"{self.place}: the snapshot that was taken {minutes} minutes ago is too old: it is "
            f"kept until nobody has read it for {MAX_READER_SNAPSHOT_MS // 60_000} minutes. Run "
            "the query again"
        ) from error

    def close(self) -> None:
        """Let go of the files; the checkpoint is left to end."""
        with contextlib.suppress(Error, CallTimeout):
            call(self._reader.shutdown(), SILENCE_S)
        self._rows.close()


class _Laid:
    """Rows on top of rows, as far as it takes to find out which tables there are."""

    def __init__(self, below: Rows, above: Mapping[bytes, bytes | None]) -> None:
        self._below = below
        self._above = above

    def get(self, key: bytes) -> bytes | None:
        return self._above[key] if key in self._above else self._below.get(key)

    def scan(self, begin: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        changed = [(key, value) for key, value in self._above.items() if value is not None]
        return changed[:limit] or self._below.scan(begin, end, limit)


def _families(
    below: Rows, above: Mapping[bytes, bytes | None], place: Place
) -> Mapping[str, bytes]:
    return families_of(cast(Rows, _Laid(below, above)), place)
