"""The contract of routing as a pytest suite: filters, the metadata log, tailers and backfill.

A store joins with one class that overrides ``open``, ``reopen`` and ``open_as`` (and
``payload_kept`` if it can tell), just as for :mod:`penstock.testing.conformance`. A store that
:func:`penstock.open` knows joins with its URL::

    class TestMemory(UrlRoutingConformance):
        url = "memory:?design=indexed"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from penstock.store.kv.store import KvStore
from penstock.testing.stores import Reopenable
from penstock.testing.suite.backfilling import BackfillSuite
from penstock.testing.suite.fan_out import FanOutSuite
from penstock.testing.suite.logs import LogsSuite
from penstock.testing.suite.moved import MovedSuite
from penstock.testing.suite.tailing import TailingSuite

if TYPE_CHECKING:
    from penstock.broker.broker import Broker
    from penstock.clock import Clock

__all__ = ["RoutingConformance", "UrlRoutingConformance"]


class RoutingConformance(FanOutSuite, TailingSuite, LogsSuite, BackfillSuite, MovedSuite):
    """All of routing."""


class UrlRoutingConformance(RoutingConformance):
    """The suite over a store URL; ``{place}`` in it stands for the test's directory."""

    url: ClassVar[str]

    def open(self, clock: Clock, **options: Any) -> Broker:
        """Open a new store."""
        self._opened = Reopenable(self.url.format(place=self.place))
        return self._opened.open(clock, **options)

    def reopen(self) -> Broker:
        """Open it again."""
        return self._opened.reopen()

    def open_as(self, **options: Any) -> Broker:
        """Open it again with other options."""
        self._opened.close()
        return self._opened.open(self.clock, **options)

    def payload_kept(self, message_id: int) -> bool | None:
        """Look into the payload table of a key-value store."""
        store = self.broker._store  # noqa: SLF001 - no verb shows a payload that nobody refers to
        if isinstance(store, KvStore):
            return store.core.payloads.get([message_id]) != [None]
        return None
