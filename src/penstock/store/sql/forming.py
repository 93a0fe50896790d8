"""Is this a store, of several databases: asked of all of them before anything is written."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import InvalidInput, InvalidUrl, PenstockError, StoreMismatch
from penstock.limits import MAX_CLUSTERS
from penstock.store.sql.clusters import ClusterStore
from penstock.store.sql.database import Database
from penstock.store.sql.members import Member
from penstock.store.sql.schema import applied, migrations
from penstock.store.sql.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.store.sql.location import SqlPlace
    from penstock.store.sql.store import SqlStore

__all__ = ["Found", "arrange", "open_clusters"]

# The step of the schema that says which of several databases one is.
_CLUSTERED = 2


class Found(NamedTuple):
    """What a database says of itself; ``clusters`` is negative until all have been made."""

    store_id: int
    cluster: int
    clusters: int


def open_clusters(
    sources: Sequence[SqlPlace],
    *,
    store_id: int,
    routing: str | None,
    random: Callable[[], float],
    now_ms: int,
    clock: Callable[[], int] | None = None,
    relaxed: bool = False,
    background: bool = False,
) -> ClusterStore:
    """Open a store of several databases, making it if all of them are empty."""
    if routing == "pipeline":
        raise InvalidInput("a store of several databases routes inline, not by a pipeline")
    if len(sources) > MAX_CLUSTERS:
        raise InvalidUrl(f"{len(sources)} databases: a store has up to {MAX_CLUSTERS}")
    if len({(source.conninfo, source.schema) for source in sources}) < len(sources):
        raise InvalidUrl("a database is named twice")
    found = []
    for source in sources:
        with _naming(source):
            found.append(_look(source))
    numbers = arrange(found, [source.shown for source in sources])
    known = next((each.store_id for each in found if each is not None), store_id)
    made = all(each is not None and each.clusters > 0 for each in found)
    stores: list[SqlStore] = []
    try:
        # The first one first: if several processes make the store, it says under which id.
        for number, source in sorted(zip(numbers, sources, strict=True)):
            with _naming(source):
                store = open_store(
                    source.conninfo,
                    schema=source.schema,
                    dialect=source.dialect,
                    ring_size=source.ring_size,
                    tuned=source.tuned,
                    store_id=known,
                    routing="inline",
                    random=random,
                    now_ms=now_ms,
                    clock=clock,
                    relaxed=relaxed,
                    background=background,
                    cluster=number,
                    clusters=len(sources) if made else -len(sources),
                )
            stores.append(store)
            known = stores[0].core.identity.store_id
            _check_same(store, known, source)
        if not made:
            for store in stores:
                store.core.database.run("finish_cluster")
        shown = dict(zip(numbers, (source.shown for source in sources), strict=True))
        members = [Member(store, number, shown[number]) for number, store in enumerate(stores)]
        joined = ClusterStore(members)
    except BaseException:
        for store in stores:
            store.close()
        raise
    try:
        joined.begin(now_ms)
    except BaseException:
        joined.close()
        raise
    return joined


@contextmanager
def _naming(source: SqlPlace) -> Iterator[None]:
    """Have an error say which database it is about."""
    try:
        yield
    except PenstockError as error:
        error.args = (f"{source.shown}: {error}",)
        raise


def _check_same(store: SqlStore, store_id: int, source: SqlPlace) -> None:
    if store.core.identity.store_id != store_id:
        raise StoreMismatch(f"{source.shown} is of another store than the first of them")


def _look(source: SqlPlace) -> Found | None:
    """Return what is there; None: nothing. Nothing is written."""
    database = Database(source.conninfo, source.schema, source.dialect)
    try:
        database.connect()
        steps = applied(database, migrations())
        if not steps:
            return None
        place = "cluster, clusters" if steps >= _CLUSTERED else "0, 1"
        rows = database.execute(f"SELECT store_id, {place} FROM instance")  # noqa: S608
        return Found(*rows[0]) if rows else None
    finally:
        database.close()


def arrange(found: Sequence[Found | None], shown: Sequence[str]) -> list[int]:
    """Return the number of each database, whatever order they were named in."""
    count = len(found)
    known = [(each, place) for each, place in zip(found, shown, strict=True) if each is not None]
    taken: dict[int, str] = {}
    for each, place in known:
        clusters = abs(each.clusters)
        if clusters == 1:
            raise StoreMismatch(
                f"{place} is a store of its own: it can't become one of {count} databases"
            )
        if clusters != count:
            raise StoreMismatch(
                f"{place} is one of {clusters} databases that are a store, and {count} were named; "
                "their number can't be changed"
            )
        if each.store_id != known[0][0].store_id:
            raise StoreMismatch(f"{place} is of another store than {known[0][1]}")
        if each.cluster in taken:
            raise StoreMismatch(f"{place} and {taken[each.cluster]} are the same database")
        taken[each.cluster] = place
    free = [number for number in range(count) if number not in taken]
    if free and any(each.clusters > 0 for each, _ in known):
        empty = next(place for each, place in zip(found, shown, strict=True) if each is None)
        raise StoreMismatch(
            f"{empty} is empty, and not number {free[0]} of the {count} databases of the store"
        )
    return [free.pop(0) if each is None else each.cluster for each in found]
