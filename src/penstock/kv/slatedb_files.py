"""Looking whether all objects are there that a SlateDB database needs, before it is opened.

::

    manifest/N     the newest names the files of rows and the last object of the log in them
    compacted/ID   files of rows
    wal/N          objects of the log, numbered without gaps

The library takes the first missing object of the log for the log's end, and a place without a
manifest for an empty one: it would go on there, and what lies behind would be lost. Nothing is
written here. Of a directory every file is looked for. A bucket can't be listed through the
library: the log is probed, and a missing file of rows is met when it is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from slatedb.uniffi import AdminBuilder, Error, SlateDbWalReader

from penstock.errors import StoreDamaged
from penstock.kv.slatedb_calls import CallTimeout, call
from penstock.kv.slatedb_place import translate_open

if TYPE_CHECKING:
    from slatedb.uniffi import ObjectStore, VersionedManifest

    from penstock.kv.slatedb_place import Place

__all__ = ["check_objects"]

_ANSWER_S: Final = 60.0
# How far beyond the log's end in a bucket it is probed for objects that a gap hides.
_PROBES: Final = [1 << n for n in range(17)]
# What the library says of a log whose first object is not number 1.
_TRUNCATED: Final = "WAL was truncated"
_SHOWN: Final = 5


def check_objects(place: Place) -> None:
    """Raise StoreDamaged if objects are missing; do nothing if there is no database at all."""
    if place.kind == "file" and not Path(place.root).is_dir():
        return
    store = place.store()
    try:
        manifest = _manifest(place, store)
        while missing := (
            _missing_files(place, manifest)
            if place.kind == "file"
            else _missing_log(place, store, manifest)
        ):
            # An owner may have moved on meanwhile, and thrown away what it needs no more.
            before, manifest = manifest, _manifest(place, store)
            if (before and before.id) == (manifest and manifest.id):
                shown = ", ".join(missing[:_SHOWN]) + (" …" if len(missing) > _SHOWN else "")
                raise StoreDamaged(
                    f"{place} is damaged: {len(missing)} of its objects are missing ({shown}). "
                    "Nothing was changed. Bring them back from a copy of the objects, or save "
                    "the rest with 'penstock salvage'"
                )
    except (Error, CallTimeout) as error:
        translate_open(error, place)


def _manifest(place: Place, store: ObjectStore) -> VersionedManifest | None:
    return call(AdminBuilder(place.path, store).build().read_manifest(None), _ANSWER_S)


def _missing_files(place: Place, manifest: VersionedManifest | None) -> list[str]:
    """Name the files that a manifest, or the log's own numbers, say must be in the directory."""
    root = Path(place.root)
    log = {int(each.stem) for each in (root / "wal").glob("*.sst") if each.stem.isdigit()}
    rows = {each.stem for each in (root / "compacted").glob("*.sst")}
    if manifest is None:
        return ["manifest/*"] if log or rows else []
    end = max([manifest.next_wal_sst_id - 1, *log])
    trees = [manifest, *manifest.segments]
    views = [view for tree in trees for view in tree.l0]
    views += [view for tree in trees for run in tree.compacted for view in run.sst_views]
    needed = {view.sst.id.value for view in views}
    return [
        *(f"compacted/{name}.sst" for name in sorted(needed - rows)),
        *(
            f"wal/{number:020}.sst"
            for number in range(manifest.replay_after_wal_id + 1, end + 1)
            if number not in log
        ),
    ]


def _missing_log(place: Place, store: ObjectStore, manifest: VersionedManifest | None) -> list[str]:
    """Name the first object of the log in a bucket that is missing before others."""
    reader = SlateDbWalReader(place.path, store)
    if manifest is None:
        try:
            found = call(reader.last_wal_file_id(0), _ANSWER_S) > 0
        except Error.Data as error:
            found = _TRUNCATED in error.message
        return ["manifest/*"] if found else []
    end: int = call(reader.last_wal_file_id(manifest.replay_after_wal_id), _ANSWER_S)
    hidden = end + 1 < manifest.next_wal_sst_id or any(
        call(reader.last_wal_file_id(end + probe), _ANSWER_S) > end + probe for probe in _PROBES
    )
    return [f"wal/{end + 1:020}.sst"] if hidden else []
