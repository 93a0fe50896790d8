"""Looking whether all objects are there that a SlateDB database needs, before it is opened.

::

    manifest/N     the newest names the files of rows and the last object of the log in them
    compacted/ID   files of rows
    wal/N          objects of the log, numbered without gaps

The library begins with the first object of the log that it finds, takes the next missing one for
the log's end, one of no bytes for the mark of a writer that came, and a place without a manifest
for an empty one: it would go on there, and what lies behind would be lost. Nothing is written here.
Of a directory every file is looked for. A bucket can't be listed through the library: its log is
asked for object by object and probed beyond the end; a missing file of rows is met when it is read.
"""

from __future__ import annotations

import contextlib
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from slatedb.uniffi import AdminBuilder, Error, SlateDbWalReader

from penstock.engines.slatedb.binding import CallTimeout, call, call_all
from penstock.engines.slatedb.location import translate_open
from penstock.errors import StoreDamaged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slatedb.uniffi import ObjectStore, VersionedManifest

    from penstock.engines.slatedb.location import Place

__all__ = ["TRUNCATED", "check_objects"]

_ANSWER_S: Final = 60.0
# How far beyond the log's end in a bucket it is probed for objects that a gap hides.
_PROBES: Final = [1 << n for n in range(17)]
# Words of the library for an object of the log that is not there.
TRUNCATED: Final = "WAL was truncated"
_SHOWN: Final = 5
# Objects of the log in a bucket that are asked for at the same time.
_AT_ONCE: Final = 32


def check_objects(place: Place) -> None:
    """Raise StoreDamaged if objects are missing; do nothing if there is no database at all."""
    if place.kind == "file" and not Path(place.root).is_dir():
        return
    store = place.store()
    try:
        manifest = _manifest(place, store)
        while missing := (
            _missing_files(place, store, manifest)
            if place.kind == "file"
            else _missing_log(place, store, manifest)
        ):
            # An owner may have moved on meanwhile, and thrown away what it needs no more.
            before, manifest = manifest, _manifest(place, store)
            if (before and before.id) == (manifest and manifest.id):
                shown = ", ".join(missing[:_SHOWN]) + (" …" if len(missing) > _SHOWN else "")
                raise StoreDamaged(
                    f"{place} holds a damaged store: objects are missing or empty ({shown}). "
                    "Nothing was changed. Restore a copy of its objects, or read what is left into "
                    f"a new store: penstock salvage {place} TARGET"
                )
    except (Error, CallTimeout) as error:
        translate_open(error, place)


def _manifest(place: Place, store: ObjectStore) -> VersionedManifest | None:
    return call(AdminBuilder(place.path, store).build().read_manifest(None), _ANSWER_S)


def _missing_files(
    place: Place, store: ObjectStore, manifest: VersionedManifest | None
) -> list[str]:
    """Name the files that a manifest, or the log's own numbers, say must be in the directory."""
    root = Path(place.root)
    log = _log_sizes(root)
    rows = {each.stem for each in (root / "compacted").glob("*.sst")}
    if manifest is None:
        return ["manifest/*"] if log or rows else []
    end = max([manifest.next_wal_sst_id - 1, *log])
    trees = [manifest, *manifest.segments]
    views = [view for tree in trees for view in tree.l0]
    views += [view for tree in trees for run in tree.compacted for view in run.sst_views]
    needed = {view.sst.id.value for view in views}
    missing = [
        *(f"compacted/{name}.sst" for name in sorted(needed - rows)),
        *(
            _log_name(number)
            for number in range(manifest.replay_after_wal_id + 1, end + 1)
            if number not in log
        ),
    ]
    # An owner may have written some while the directory was listed.
    missing = [name for name in missing if not (root / name).exists()]
    return missing or _emptied(SlateDbWalReader(place.path, store), manifest, log)


def _log_sizes(root: Path) -> dict[int, int]:
    """Return how large the objects of the log in a directory are; an owner may throw some away."""
    sizes: dict[int, int] = {}
    for each in (root / "wal").glob("*.sst"):
        with contextlib.suppress(FileNotFoundError):
            if each.stem.isdigit():
                sizes[int(each.stem)] = each.stat().st_size
    return sizes


def _log_name(number: int) -> str:
    return f"wal/{number:020}.sst"


def _emptied(
    logs: SlateDbWalReader, manifest: VersionedManifest, sizes: dict[int, int]
) -> list[str]:
    """Name the objects of no bytes between which changes are missing: these were no marks."""
    flushed = manifest.replay_after_wal_id
    whole = sorted(number for number, size in sizes.items() if size and number > flushed)
    for before, after in pairwise([flushed, *whole]):
        if after - before > 1:
            ended = [manifest.last_l0_seq] if before == flushed else _sequences(logs, before)
            begun = _sequences(logs, after)
            if ended and begun and begun[0] > ended[-1] + 1:
                return [_log_name(number) for number in range(before + 1, after)]
    return []


def _all_there(logs: SlateDbWalReader, numbers: Sequence[int]) -> bool:
    """Whether none of several objects of the log is missing."""
    try:
        begun = call_all([logs.iterator(number) for number in numbers], _ANSWER_S)
        call_all([each.next() for each in begun], _ANSWER_S)
    except Error.Data as error:
        if TRUNCATED not in error.message:
            raise
        return False
    return True


def _sequences(logs: SlateDbWalReader, number: int) -> list[int] | None:
    """Return the sequence numbers of an object of the log, in order; None if it is not there."""
    try:
        found = call(call(logs.iterator(number), _ANSWER_S).next(), _ANSWER_S)
    except Error.Data as error:
        if TRUNCATED not in error.message:
            raise
        return None
    return sorted(row.seq for row in found.rows) if found is not None else []


def _missing_log(place: Place, store: ObjectStore, manifest: VersionedManifest | None) -> list[str]:
    """Name the first object of the log in a bucket that is missing before others."""
    if manifest is None:
        # The library reads no log without a manifest; but every owner has a list of compactions.
        admin = AdminBuilder(place.path, store).build()
        found = call(admin.read_compactions(None), _ANSWER_S) is not None
        return ["manifest/*"] if found else []
    reader = SlateDbWalReader(place.path, store)
    first = manifest.replay_after_wal_id + 1
    # The library looks for the end in steps that grow: it may step over a gap.
    end: int = call(reader.last_wal_file_id(first - 1), _ANSWER_S)
    for begin in range(first, end, _AT_ONCE):
        numbers = range(begin, min(begin + _AT_ONCE, end))
        if not _all_there(reader, numbers):
            return [_log_name(n) for n in numbers if _sequences(reader, n) is None]
    hidden = end + 1 < manifest.next_wal_sst_id or any(
        call(reader.last_wal_file_id(end + probe), _ANSWER_S) > end + probe for probe in _PROBES
    )
    # An owner may have written it meanwhile, and others after it.
    is_missing = hidden and _sequences(reader, end + 1) is None
    return [_log_name(end + 1)] if is_missing else []
