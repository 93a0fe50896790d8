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
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar, cast

from slatedb.uniffi import (
    AdminBuilder,
    CheckpointOptions,
    Error,
    ReaderMode,
    RowEntryKind,
    SlateDbWalReader,
)
from sortedcontainers import SortedDict

from penstock.clock import SystemClock
from penstock.engines.overlay import MISSING
from penstock.engines.slatedb.binding import CallTimeout, call
from penstock.engines.slatedb.engine import families_of
from penstock.engines.slatedb.files import TRUNCATED
from penstock.engines.slatedb.location import NO_DATABASE, translate_open
from penstock.engines.slatedb.reader import NoDatabase, build
from penstock.engines.slatedb.tables import SILENCE_S, Rows, SlateTable
from penstock.errors import StorageFailed, StoreDamaged, StoreMismatch
from penstock.limits import MAX_MOMENT_BYTES, MAX_READER_SNAPSHOT_MS

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from slatedb.uniffi import RowEntry, VersionedManifest

    from penstock.engines.overlay import Changes
    from penstock.engines.slatedb.location import Place

__all__ = ["Ahead", "CheckpointReader", "Moment", "Tail"]

T = TypeVar("T")

_NAME: Final = "penstock-moment"
_TRIES: Final = 5
# After this long a checkpoint is renewed by who reads it, and not used for another moment.
_FRESH_MS: Final = MAX_READER_SNAPSHOT_MS // 3
# What a row takes in memory besides its bytes: two objects, and its places in a dictionary and in
# a list.
_ROW_BYTES: Final = 160
# An owner writes a file from 32 MiB on and has as much again come in meanwhile: of small rows that
# is about this many times the bound.
_REFUSED: Final = 3
# Words of the library for checkpoints that are gone.
_NO_CHECKPOINT: Final = ("checkpoint missing", "invalid DB state")


class Ahead:
    """Rows that are in the log and in no file yet: in order, by table, None for one that is gone.

    They are kept once, however often somebody looks, so a look changes what earlier ones have
    found: ``version`` says so.
    """

    def __init__(self) -> None:
        self._tables: dict[bytes, Any] = {}
        self.bytes = 0
        self.version = 0

    def table(self, family: bytes) -> Any:
        """Return the rows of a table, a SortedDict."""
        return self._tables.setdefault(family, SortedDict())

    def get(self, key: bytes) -> Any:
        """Return what is known of a whole key; MISSING if that is nothing."""
        rows = self._tables.get(key[:1])
        return MISSING if rows is None else rows.get(key[1:], MISSING)

    def first(self) -> tuple[bytes, bytes] | None:
        """Return some row that is there."""
        rows = (
            (family + key, value) for family, t in self._tables.items() for key, value in t.items()
        )
        return next((row for row in rows if row[1] is not None), None)

    def take(self, fresh: _Fresh) -> None:
        """Take changes over."""
        if not fresh.changes:
            return
        found: dict[bytes, Changes] = {}
        for key, value in fresh.changes.items():
            found.setdefault(key[:1], {})[key[1:]] = value
        for family, rows in found.items():
            self.table(family).update(rows)
        self.bytes = fresh.bytes
        self.version += 1

    def end(self) -> None:
        """Let go of the rows: whoever still has them is told so."""
        for rows in self._tables.values():
            rows.clear()
        self.version += 1


class _Fresh:
    """What a look finds that is not known: nothing is changed until all of it was read."""

    def __init__(self, known: Ahead) -> None:
        self._known = known
        self.changes: Changes = {}
        self.bytes = known.bytes

    def put(self, key: bytes, value: bytes | None) -> None:
        before = self.changes.get(key, MISSING)
        if before is MISSING:
            before = self._known.get(key)
        if before is MISSING:
            self.bytes += _ROW_BYTES + len(key) + len(value or b"")
        elif before == value:
            # Such as the sign of life of an owner that has nothing to do.
            return
        else:
            self.bytes += len(value or b"") - len(before or b"")
        self.changes[key] = value


class Moment(NamedTuple):
    """A checkpoint, when it was made, and the rows on top of it, good for one version of them."""

    checkpoint: str
    made_ms: int
    rows: Ahead
    version: int


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
        self._ahead = Ahead()

    def look(self) -> Moment:
        """Return the moment that it is now: everything that is durable."""
        for _ in range(_TRIES):
            try:
                mark = self._mark or self._begin()
                if self._go_on(mark):
                    ahead = self._ahead
                    return Moment(mark.checkpoint, mark.made_ms, ahead, ahead.version)
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
        self._ahead.end()
        self._ahead = Ahead()
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
        fresh = _Fresh(self._ahead)
        self._read(log, mark, last, fresh)
        # Nothing from where the newest files end on is ever thrown away: if that is no later than
        # what was found to be the end, none was missed.
        newest = self._manifest(None)
        if newest.replay_after_wal_id > last:
            return False
        if newest.replay_after_wal_id > mark.after and fresh.bytes > MAX_MOMENT_BYTES:
            return False
        if fresh.bytes > _REFUSED * MAX_MOMENT_BYTES:
            raise StorageFailed(
                f"{self.place}: its log is ahead of its files by {fresh.bytes >> 20} MiB or more, "
                "more than can be read beside its owner: try again in a while"
            )
        if self._clock.now_ms() - mark.made_ms >= _FRESH_MS:
            return False
        self._ahead.take(fresh)
        self._last = last
        return True

    def _read(self, log: SlateDbWalReader, mark: _Mark, last: int, fresh: _Fresh) -> None:
        """Read objects up to the last, or until they are too many."""
        at = self._last
        if last <= at:
            return
        objects = self._call(log.iterator(at + 1))
        while at < last and fresh.bytes <= _REFUSED * MAX_MOMENT_BYTES:
            found = self._call(objects.next())
            at += 1
            if found is None or found.last_consumed_wal_file_id != at:
                raise _Truncated
            # An object may have a key more than once; its rows are later than those before it.
            for row in sorted(found.rows, key=attrgetter("seq")):
                if row.seq > mark.seq:
                    fresh.put(row.key, self._value(row))

    def _value(self, row: RowEntry) -> bytes | None:
        if row.kind is RowEntryKind.MERGE:
            raise StoreMismatch(f"{self.place} holds rows of a kind that Penstock does not write")
        return None if row.kind is RowEntryKind.TOMBSTONE else row.value or b""

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
            if TRUNCATED in error.message:
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
        rows: Ahead | None = None,
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
        except StoreDamaged as error:
            if not any(words in str(error) for words in _NO_CHECKPOINT):
                raise
            self._too_old(error)
        self._rows = Rows(self._reader, place, self.keep)
        try:
            self.families = families or _families(self._rows, rows or Ahead(), place)
        except BaseException:
            self.close()
            raise
        self._tables = {
            name: SlateTable(self._rows, name, family, None)
            for name, family in self.families.items()
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
        # It may have been read last when it was not to be renewed yet.
        kept = (MAX_READER_SNAPSHOT_MS - _FRESH_MS) // 60_000
        raise StorageFailed(
            f"{self.place}: the snapshot that was taken {minutes} minutes ago is too old: nobody "
            f"has read it for {kept} minutes or more. Run the query again"
        ) from error

    def close(self) -> None:
        """Let go of the files; the checkpoint is left to end."""
        with contextlib.suppress(Error, CallTimeout):
            call(self._reader.shutdown(), SILENCE_S)
        self._rows.close()


class _Laid:
    """Rows on top of rows, as far as it takes to find out which tables there are."""

    def __init__(self, below: Rows, above: Ahead) -> None:
        self._below = below
        self._above = above

    def get(self, key: bytes) -> bytes | None:
        known: bytes | None = self._above.get(key)
        return self._below.get(key) if known is MISSING else known

    def scan(self, begin: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        row = self._above.first()
        return self._below.scan(begin, end, limit) if row is None else [row]


def _families(below: Rows, above: Ahead, place: Place) -> Mapping[str, bytes]:
    return families_of(cast(Rows, _Laid(below, above)), place)
