"""Pins the store at a moment, so that it can be read in bulk and trimmed up to what was read.

Why what was read may be trimmed
--------------------------------
An archive reads done and failed messages and then trims all up to the highest sequence number that
it has seen. That is sound if no row with a lower number appears later. Numbers are given out by
sixteen rows of ``queue_counts``, by each in order, but one may be far behind another, and a
transaction that has its numbers need not have committed. So, with ``marks``, before the snapshot
all rows are locked and, still locked, raised to the highest number of their queue, the mark:

* whoever had taken a number had updated such a row, and the lock was waited for: it has ended, and
  if it was committed, the snapshot sees its rows;
* whoever takes one later waits until the locks are let go of, and gets one from the mark on;
* the snapshot is taken in between, so that every row in it is below the mark.

That nothing came in between is looked at in the snapshot itself: a queue that was made meanwhile
had no rows to lock, and a database may order its transactions otherwise than it lets them wait. If
a number from a mark on was given out, it is all done again; the locks see to it that this ends.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from penstock.limits import MAX_VIEW_IDLE_MS
from penstock.store.sql.database import Aborted
from penstock.store.sql.session import Head
from penstock.store.sql.snapshot import SqlPinned

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.store.sql.database import Database
    from penstock.store.sql.session import Core

__all__ = ["Pins"]

# Connections that are kept for the next who reads.
SPARE: Final = 4
# A server lets go of a snapshot that nobody reads; this is for servers that hang.
IDLE_MS: Final = MAX_VIEW_IDLE_MS + 60_000
_BEGIN: Final = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY; "
    f"SET LOCAL idle_in_transaction_session_timeout = {IDLE_MS}"
)


class Pins:
    """Makes pinned states, and has the connections that they are read on."""

    def __init__(self, core: Core, catch_up: Callable[[int], object]) -> None:
        self._core = core
        self._catch_up = catch_up
        self._lock = threading.Lock()
        self._spare: list[Database] = []
        self._live: set[SqlPinned] = set()
        self._closed = False

    def pin(self, now_ms: int, *, stats: bool, marks: bool) -> SqlPinned:
        """Pin what is committed; leases that are over are ended before, as for who browses."""
        core = self._core
        core.refresh(now_ms)
        self._catch_up(now_ms)
        database = self._take()
        try:
            # Here, and not where it would be repeated: who waits for a connection holds up others.
            database.connect()
            head = core.database.do(lambda: self._begin(database, marks=marks), again=True)
            pinned = SqlPinned(database, core, head, now_ms, self._let_go, stats=stats)
        except BaseException:
            database.close()
            raise
        with self._lock:
            self._live.add(pinned)
        return pinned

    def close(self) -> None:
        """Let go of everything; who still reads is told so."""
        with self._lock:
            self._closed = True
            live = list(self._live)
        for pinned in live:
            pinned.close()
        for database in self._spare:
            database.close()

    def _take(self) -> Database:
        own = self._core.database
        with self._lock:
            if self._spare:
                return self._spare.pop()
        return own.another(bulk=True)

    def _let_go(self, pinned: SqlPinned, database: Database, *, whole: bool) -> None:
        """Take a connection back, whose transaction has ended."""
        with self._lock:
            self._live.discard(pinned)
            if whole and not self._closed and len(self._spare) < SPARE:
                self._spare.append(database)
                return
        database.close()

    def _begin(self, database: Database, *, marks: bool) -> Head:
        # One that was begun by an attempt before this one.
        database.execute("ROLLBACK")
        if not marks:
            return _snapshot(database)
        own = self._core.database
        with own.transaction():
            known: dict[int, int] = dict(own.run("lock_sequences"))
            own.run("raise_sequences", queues=list(known), marks=list(known.values()))
            head = _snapshot(database)
        if any(given > known.get(queue, 0) for queue, given in database.run("pinned_sequences")):
            raise Aborted("messages have ended while the store was being pinned")
        return head


def _snapshot(database: Database) -> Head:
    """Begin a transaction. It sees what is committed when its first statement begins."""
    database.execute(_BEGIN)
    return Head(*database.run("read_head")[0])
