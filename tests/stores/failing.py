"""An engine whose n-th call fails, over a real one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.broker.broker import Broker
from penstock.engines.memory import MemoryEngine
from penstock.engines.rocksdb import RocksEngine
from penstock.urls import DESIGNS, make_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.clock import ManualClock

READS = frozenset({"get", "multi_get", "scan", "scan_back"})


class FailingEngine:
    """Passes calls on; the one that ``left`` counts down to raises ``error`` instead, once.

    ``calls`` are counted by name, and ``rows`` those that scans gave.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.left: int | None = None
        self.only_commits = False
        self.error: BaseException = RuntimeError("not armed")
        self.calls: dict[str, int] = {}
        self.rows = 0

    def arm(self, left: int | None, error: BaseException, *, only_commits: bool = False) -> None:
        self.left, self.error, self.only_commits = left, error, only_commits

    def call(self, name: str, work: Callable[..., Any], *args: Any) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.left is not None and (name == "commit" or not self.only_commits):
            self.left -= 1
            if self.left == 0:
                self.left = None
                raise self.error
        answer = work(*args)
        if name in {"scan", "scan_back"}:
            self.rows += len(answer)
        return answer

    def table(self, name: str) -> FailingTable:
        return FailingTable(self, self.engine.table(name))

    def batch(self, *, growth: int = 0) -> Any:
        return self.call("batch", lambda: self.engine.batch(growth=growth))

    def commit(self, batch: Any) -> None:
        self.call("commit", self.engine.commit, batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class FailingTable:
    """A table whose reads are counted, and may fail."""

    def __init__(self, owner: FailingEngine, table: Any) -> None:
        self._owner = owner
        self._table = table

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._table, name)
        if name not in READS:
            return found
        return lambda *args: self._owner.call(name, found, *args)


def make_engine(kind: str, design: str, path: Path) -> FailingEngine:
    """Make a real engine, and have its calls counted."""
    tables = DESIGNS[design]
    return FailingEngine(MemoryEngine(tables) if kind == "memory" else RocksEngine(path, tables))


def open_on(engine: FailingEngine, design: str, clock: ManualClock, routing: Any = None) -> Broker:
    """Open a broker on an engine: also a second one, as after a crash of the first."""
    whole: Any = engine
    store = make_store(whole, design, clock, routing)
    return Broker(store, clock=clock, background=False, relaxed=True)
