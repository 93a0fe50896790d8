"""One of several databases that are one store: whether it answers, and how it comes back.

A database that does not answer is not asked again until a thread of its own has reached it:
whoever can do without it must not wait for it with every verb.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError, ServerUnreachable, StorageFailed
from penstock.limits import MAX_CLUSTER_REPEATS
from penstock.store.contract import PartAway

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.store.sql.session import Core, Queue
    from penstock.store.sql.store import SqlStore

__all__ = ["Member"]

log = logging.getLogger(__name__)

# Between two attempts to reach a database that is away.
PROBE_S: Final = 0.25


class Member:
    """A database of the store; ``place`` is what it is called in errors."""

    def __init__(self, store: SqlStore, number: int, place: str) -> None:
        self.store = store
        self.number = number
        self.name = f"cluster {number} ({place})"
        self._identity = store.core.database.run("load_cluster")[0][:2]
        store.core.database.patience = MAX_CLUSTER_REPEATS
        self._away: str | None = None
        # Whether it was away since somebody last looked: what is known of it may be old.
        self.returned = False
        self._closed = threading.Event()
        self._probe: threading.Thread | None = None

    @property
    def core(self) -> Core:
        """What this process knows of it."""
        return self.store.core

    @property
    def up(self) -> bool:
        """Whether it has answered of late."""
        return self._away is None

    def check(self) -> None:
        """Raise if it is known to be away."""
        if self._away is not None:
            raise PartAway(f"{self.name} of the store is away: {self._away}; nothing was changed")

    @contextmanager
    def use(self) -> Iterator[SqlStore]:
        """Give the store; if it does not answer it is away from here on."""
        self.check()
        try:
            yield self.store
        except PartAway:
            raise
        except ServerUnreachable as error:
            self._lose(str(error))
            raise ServerUnreachable(f"{self.name} of the store: {error}") from error
        except StorageFailed as error:
            error.args = (f"{self.name} of the store: {error}",)
            raise

    def queue(self, name: str) -> Queue:
        """Look a queue up: one that is known is found also while the database is away."""
        known = self.core.queues.get(name)
        if known is not None:
            return known
        with self.use() as store:
            return store.core.queue(name)

    def close(self) -> None:
        """Let go of the database."""
        self._closed.set()
        if self._probe is not None:
            self._probe.join()
        self.store.close()

    def _lose(self, why: str) -> None:
        if self._away is None:
            log.warning("%s of the store is away: %s", self.name, why)
            self._away = why
            self._probe = threading.Thread(target=self._look, name="penstock-probe", daemon=True)
            self._probe.start()

    def _look(self) -> None:
        while not self._closed.wait(PROBE_S):
            database = self.core.database.another()
            try:
                rows = database.run("load_cluster")
            except PenstockError as error:
                self._away = str(error)
                continue
            finally:
                database.close()
            if not rows or rows[0][:2] != self._identity:
                # Whoever has put another database there must not have it filled.
                self._away = "another database is in its place"
                continue
            log.info("%s of the store is back", self.name)
            self.returned = True
            self._away = None
            return
