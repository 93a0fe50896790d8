"""The contract as a pytest suite: every store passes it, unchanged.

A store joins with one class::

    class TestMine(BrokerConformance):
        def open(self, clock, **options):
            return my_store.open(self.place, clock=clock, **options)

        def reopen(self):
            ...

``self.place`` is an empty directory of the test. ``open`` is given the options of
:func:`penstock.open`; ``reopen`` closes what ``open`` gave and opens the same store again with
the same clock and options. A store that :func:`penstock.open` knows joins with its URL::

    class TestMemory(UrlConformance):
        url = "memory:?design=indexed"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from penstock.store.kv.store import KvStore
from penstock.testing.stores import Reopenable
from penstock.testing.suite.dead_letters import DeadLetterSuite
from penstock.testing.suite.delivery import DeliverySuite
from penstock.testing.suite.fifo import FifoSuite
from penstock.testing.suite.keeping import KeepingSuite
from penstock.testing.suite.moving import MovingSuite
from penstock.testing.suite.queues import QueuesSuite
from penstock.testing.suite.restarting import RestartingSuite, WaitingSuite
from penstock.testing.suite.settling import SettlingSuite

if TYPE_CHECKING:
    from penstock.broker.broker import Broker
    from penstock.clock import Clock

__all__ = ["BrokerConformance", "UrlConformance"]


class BrokerConformance(
    DeliverySuite,
    SettlingSuite,
    FifoSuite,
    KeepingSuite,
    MovingSuite,
    DeadLetterSuite,
    QueuesSuite,
    RestartingSuite,
    WaitingSuite,
):
    """The whole contract. Override ``open`` and ``reopen``, and ``payload_kept`` if possible."""


class UrlConformance(BrokerConformance):
    """The suite over a store URL; ``{place}`` in it stands for the test's directory."""

    url: ClassVar[str]

    def open(self, clock: Clock, **options: Any) -> Broker:
        """Open a new store."""
        self._opened = Reopenable(self.url.format(place=self.place))
        return self._opened.open(clock, **options)

    def reopen(self) -> Broker:
        """Open it again."""
        return self._opened.reopen()

    def payload_kept(self, message_id: int) -> bool | None:
        """Look into the payload table of a key-value store."""
        store = self.broker._store  # noqa: SLF001 - no verb shows a payload that nobody refers to
        if isinstance(store, KvStore):
            return store.core.payloads.get([message_id]) != [None]
        return None
