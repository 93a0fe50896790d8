"""A small store with something of everything, as its broker was killed, and what is in it."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import penstock
from penstock import Message, State
from penstock.clock import ManualClock
from penstock.engines.rocksdb import RocksEngine
from penstock.engines.slatedb import _TO_ROWS
from penstock.engines.slatedb.binding import call

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.model import Entry

__all__ = ["KINDS", "Contents", "Pristine", "clock", "contents_of", "fingerprint", "make", "opened"]

KINDS = {
    "rocksdb-indexed": "rocksdb:{}?design=indexed",
    "rocksdb-buckets": "rocksdb:{}?design=buckets",
    "slatedb-buckets": "slatedb+file://{}?design=buckets",
}
# By queue and id: state, payload, attributes, group, attempts.
Contents = dict[tuple[str, int], tuple[str, bytes | None, str, str, int]]


class Pristine(NamedTuple):
    """A store and what was in it."""

    kind: str
    path: Path
    truth: Contents

    def url(self, path: Path) -> str:
        """Return the URL of a copy."""
        return KINDS[self.kind].format(path)

    def files(self) -> list[str]:
        """Name every file."""
        paths = sorted(self.path.rglob("*"))
        return [str(path.relative_to(self.path)) for path in paths if path.is_file()]


def clock() -> ManualClock:
    """Make a clock at which nothing of the store comes due."""
    return ManualClock(1_700_000_100_000)


def opened(url: str) -> penstock.Broker:
    """Open a store."""
    return penstock.open(url, background=False, clock=clock())


def contents_of(broker: penstock.Broker) -> Contents:
    """Read every message of every queue."""
    return {
        (spec.name, entry.message_id): (
            state.value,
            entry.payload,
            repr(sorted(entry.attributes.items())),
            entry.group,
            entry.attempts,
        )
        for spec in broker.queues()
        for state in State
        for entry in _browse(broker, spec.name, state)
    }


def _browse(broker: penstock.Broker, queue: str, state: State) -> Iterator[Entry]:
    cursor: str | None = None
    while True:
        page = broker.browse(queue, state=state, limit=1000, cursor=cursor)
        yield from page
        cursor = page.next_cursor
        if cursor is None:
            return


def fingerprint(path: Path) -> dict[str, bytes]:
    """Return every byte below a directory."""
    found = {}
    for each in path.rglob("*"):
        # SlateDB throws objects of its log away that it needs no more, also after it has failed.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            found[str(each.relative_to(path))] = each.read_bytes()
    return found


def make(kind: str, place: Path) -> Pristine:
    """Make a store: part of it in files of rows, part of it in the log, all of it confirmed."""
    live = place / "live"
    broker = penstock.open(
        KINDS[kind].format(live), background=False, clock=ManualClock(1_700_000_000_000)
    )
    broker.create_queue("jobs", max_attempts=1, done_retention_ms=0)
    broker.create_queue("steps", ordering="fifo")
    broker.create_queue("all", filter="kind = 'job' OR kind = 'step'")
    _fill(broker, 0, 120)
    engine: Any = broker._store.engine  # type: ignore[attr-defined]
    if isinstance(engine, RocksEngine):
        for table in engine._tables.values():
            table.column.flush()
        del table
    else:
        call(engine._db.flush_with_options(_TO_ROWS), 10)
    _fill(broker, 1, 40)
    shutil.copytree(live, place / "killed")
    truth = contents_of(broker)
    del engine
    broker.close()
    (place / "killed" / "PENSTOCK-OWNER").unlink(missing_ok=True)
    assert {state for state, *_ in truth.values()} == {state.value for state in State}
    return Pristine(kind, place / "killed", truth)


def _fill(broker: penstock.Broker, round_: int, count: int) -> None:
    """Publish, and take some of it through every state."""
    body = b"x" * 500
    broker.publish(
        [
            Message(
                body + f"job {round_} {at}".encode(),
                {"queue": "jobs", "kind": "job", "at": at},
                dedup_id=f"{round_}-{at}",
                priority=at % 3,
            )
            for at in range(count)
        ]
    )
    broker.publish(
        [
            Message(
                body + f"step {round_} {at}".encode(),
                {"queue": "steps", "kind": "step"},
                group=f"g{at % 5}",
            )
            for at in range(count // 4)
        ]
    )
    broker.publish(
        [Message(b"later", {"queue": "jobs", "kind": "x"}, delay_ms=3_600_000) for _ in range(5)]
    )
    broker.publish([Message(b"nobody", {"kind": "none"})])
    taken = broker.claim("jobs", limit=count // 4, lease_ms=7_200_000, consumer="w")
    broker.ack([each.receipt for each in taken[: count // 8]])
    broker.release([each.receipt for each in taken[count // 8 : count // 8 + 3]], reason="broken")
    first = broker.claim("steps", limit=3, lease_ms=7_200_000)
    broker.ack([each.receipt for each in first[:2]])
