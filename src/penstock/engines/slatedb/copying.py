"""The objects of a database at one moment, held for as long as somebody copies them.

Nobody has to own the database, and its owner is not disturbed: a checkpoint in the manifest keeps
the files of rows that the copy needs. Objects of the log that came after that manifest are not
kept: once an owner has written their rows to a file of rows, it removes them within minutes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from slatedb.uniffi import AdminBuilder, CheckpointOptions, Error, SlateDbWalReader

from penstock.engines.places import Bucket, Directory
from penstock.engines.slatedb.binding import CallTimeout, call, translate_open
from penstock.engines.slatedb.objects import log_object
from penstock.errors import StorageFailed
from penstock.limits import MAX_BACKUP_MS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slatedb.uniffi import Admin

    from penstock.engines.places import Place
    from penstock.engines.slatedb.binding import SlateLocation

_ANSWER_S: Final = 60.0
# So that somebody who looks at the checkpoints of a database knows what it is for.
_NAME: Final = "penstock-backup"


def place_of(location: SlateLocation) -> Place:
    """Return the files of a database."""
    if location.kind == "file":
        return Directory(Path(location.root))
    return Bucket(location.root, location.path)


@contextlib.contextmanager
def held_objects(location: SlateLocation) -> Iterator[list[str]]:
    """Hold the database as it is now; give the names of its objects, the manifest last.

    Objects of the log may be gone nevertheless: then another moment has to be held.

    Copied in this order, a copy that is broken off is known to be damaged: the list of compactions
    is there first, and the manifest is missing.
    """
    store = location.store()
    admin = AdminBuilder(location.path, store).build()
    try:
        compactions = call(admin.read_compactions(None), _ANSWER_S)
        options = CheckpointOptions(lifetime_ms=MAX_BACKUP_MS, source=None, name=_NAME)
        held = call(admin.create_detached_checkpoint(options), _ANSWER_S)
    except (Error, CallTimeout) as error:
        translate_open(error, location)
    try:
        names = [] if compactions is None else [f"compactions/{compactions.id:020}.compactions"]
        names += _needed(admin, location, held.manifest_id)
        yield names
    finally:
        # It ends by itself if this fails.
        with contextlib.suppress(Error, CallTimeout):
            call(admin.delete_checkpoint(held.id), _ANSWER_S)


def _needed(admin: Admin, location: SlateLocation, manifest_id: int) -> list[str]:
    try:
        manifest = call(admin.read_manifest(manifest_id), _ANSWER_S)
        if manifest is None or manifest.external_dbs:
            raise StorageFailed(f"{location}: manifest {manifest_id} can't be copied")
        flushed = manifest.replay_after_wal_id
        logs = SlateDbWalReader(location.path, location.store())
        last = call(logs.last_wal_file_id(flushed), _ANSWER_S)
    except (Error, CallTimeout) as error:
        translate_open(error, location)
    trees = [manifest, *manifest.segments]
    views = [view for tree in trees for view in tree.l0]
    views += [view for tree in trees for run in tree.compacted for view in run.sst_views]
    rows = sorted({f"compacted/{view.sst.id.value}.sst" for view in views})
    log = [log_object(number) for number in range(flushed + 1, last + 1)]
    return [*rows, *log, f"manifest/{manifest_id:020}.manifest"]
