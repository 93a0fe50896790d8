"""Ways to open a store without owning it: for reading, to watch its owner, for a salvage."""

from __future__ import annotations

import errno
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.reader import Reader
from penstock.clock import Clock, SystemClock
from penstock.engines.disk import sync_path
from penstock.errors import InvalidInput, InvalidUrl, StorageFailed, StoreMismatch
from penstock.urls import (
    DESIGNS,
    IDENTITY_KEY,
    check_identity,
    make_store,
    open_engine,
    parse_url,
    rocksdb_design,
    slatedb_design,
    slatedb_place,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.engines import Engine
    from penstock.engines.places import Place
    from penstock.engines.slatedb.binding import SlateLocation
    from penstock.engines.slatedb.objects import OwnerHeartbeat

TAKEN: Final = "{} is there already: name a directory that is not"


def open_reader(url: str, *, clock: Clock | None = None) -> Reader:
    """Open a store on object storage for reading, as it is now, whoever owns it.

    The owner is not asked and not disturbed. Needs the same credentials as a broker: a mark in the
    database keeps the files of this moment for as long as the reader is open.
    """
    place = place_to_read(url)
    from penstock.engines.memory import Overlay  # noqa: PLC0415
    from penstock.engines.slatedb.objects import ReaderMoved, SlateReader, peek  # noqa: PLC0415

    clock = clock or SystemClock()
    # The reasons not to open it are reasons not to read it.
    peek(place, "default", IDENTITY_KEY)
    below = SlateReader(place)
    try:
        while True:
            try:
                record = below.table("default").get(IDENTITY_KEY) or b""
                design = check_identity(url, record, parse_url(url).design, None).design
                engine = Overlay(below, DESIGNS[design])
                return Reader(make_store(engine, design, clock), clock)
            except ReaderMoved:
                # Once at most before its first interval is over.
                below.settle()
    except BaseException:
        below.close()
        raise


def open_copy(path: Path, *, clock: Clock | None = None) -> Reader:
    """Open a backup, or a store on RocksDB that no process has open; nothing of it is changed."""
    from penstock.engines.memory import Overlay  # noqa: PLC0415
    from penstock.engines.rocksdb import open_for_reading  # noqa: PLC0415

    design = rocksdb_design(path, create=False)
    tables = DESIGNS[design]
    clock = clock or SystemClock()
    below = open_for_reading(path, tables)
    try:
        return Reader(make_store(Overlay(below, tables), design, clock), clock)
    except BaseException:
        below.close()
        raise


class HeldObjects(NamedTuple):
    """The objects of a store on object storage at one moment, the manifest last."""

    store_id: str
    place: Place
    names: list[str]


@contextmanager
def held_objects(url: str) -> Iterator[HeldObjects]:
    """Hold a store on object storage as it is now, whoever owns it, so that it can be copied."""
    location = place_to_read(url)
    from penstock.engines.slatedb import copying, objects  # noqa: PLC0415

    record = objects.peek(location, "default", IDENTITY_KEY) or b""
    store_id = check_identity(url, record, None, None).store_id
    with copying.held_objects(location) as names:
        yield HeldObjects(f"{store_id:08x}", copying.place_of(location), names)


@contextmanager
def fill_objects(url: str) -> Iterator[Place]:
    """Give the files of a store on object storage that is to be; if that fails, they are removed.

    Refuse a location where anything is.
    """
    location = slatedb_place(parse_url(url))
    from penstock.engines.slatedb import copying  # noqa: PLC0415

    place = copying.place_of(location)
    if place.sizes():
        raise StoreMismatch(f"{location} is not empty: a store is restored to where nothing is")
    try:
        yield place
    except BaseException:
        # The manifest first: what is left without it is not taken for a store.
        for name in sorted(place.sizes(), key=lambda name: not name.startswith("manifest/")):
            place.delete(name)
        raise


@contextmanager
def fill_directory(target: Path) -> Iterator[Path]:
    """Give a path beside the target; what is made there becomes the target if all goes well.

    The target is not there, or empty.
    """
    # A name of its own: others may be about to write the same target, from any process.
    partial = target.with_name(f"{target.name}.part-{SystemClock().lease_id().hex()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        try:
            partial.rename(target)
        except OSError as error:
            # Another has come first.
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                raise InvalidInput(TAKEN.format(target)) from None
            raise
        sync_path(target.parent)
    except OSError as error:
        raise StorageFailed(f"can't write {target}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def place_to_read(url: str) -> SlateLocation:
    """Return where a store is that can be read beside its owner; nothing is made or opened."""
    named = parse_url(url)
    if not named.scheme.startswith("slatedb"):
        raise InvalidUrl(
            f"{url!r:.200} can't be read beside its owner: that works on object storage alone "
            "(slatedb+s3, slatedb+file); ask the server that owns it, or read a backup"
        )
    place = slatedb_place(named)
    if place.holds_something_else():
        raise StoreMismatch(f"{place.root} is not empty and holds no SlateDB database")
    if place.kind == "file" and not Path(place.root).is_dir():
        raise StoreMismatch(f"{place} holds no store: look at the URL again")
    return place


def watch_owner(url: str, *, routing: str | None = None, check: bool = True) -> OwnerHeartbeat:
    """Watch whether a store on object storage has an owner, for a process that would be the next.

    With ``check``, reasons not to open the store are raised now.
    """
    named = parse_url(url)
    if not named.scheme.startswith("slatedb"):
        raise InvalidUrl(
            f"{url!r:.200} has no standby: that is for stores on object storage, slatedb+s3 and "
            "slatedb+file"
        )
    place = slatedb_place(named)
    from penstock.engines.slatedb.objects import OwnerHeartbeat  # noqa: PLC0415

    if check:
        slatedb_design(place, named, routing)
    return OwnerHeartbeat(place)


def note_server(url: str, served_at: str) -> None:
    """Note beside a RocksDB store where it is served, for the errors of other processes."""
    if url.startswith("rocksdb:"):
        from penstock.engines.rocksdb.files import write_owner  # noqa: PLC0415

        write_owner(Path(parse_url(url).place), served_at)


def make_engine(url: str, design: str) -> Engine:
    """Make a database for a store of a design where nothing is."""
    named = parse_url(url)
    if named.design not in {None, design}:
        raise StoreMismatch(f"{url!r:.200}: the store has the {design} design: leave ?design= out")
    if named.scheme.startswith("slatedb"):
        place = slatedb_place(named)
        from penstock.engines.slatedb.objects import peek  # noqa: PLC0415

        if peek(place, "default", IDENTITY_KEY) is not None:
            raise StoreMismatch(f"{place} is not empty: name a place where nothing is yet")
    return open_engine(named._replace(design=design), None, create=True)[0]


def locate(url: str) -> Path | SlateLocation:
    """Return the directory of a RocksDB store, or the location of a SlateDB store; open nothing."""
    named = parse_url(url)
    if named.scheme == "memory":
        raise InvalidUrl("memory: keeps nothing once its process has ended: name a store on disk")
    return Path(named.place) if named.scheme == "rocksdb" else slatedb_place(named)
