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

from penstock.testing.stores import OnUrl
from penstock.testing.suite.dead_letters import DeadLetterSuite
from penstock.testing.suite.delivery import DeliverySuite
from penstock.testing.suite.explaining import ExplainingSuite
from penstock.testing.suite.fifo import FifoSuite
from penstock.testing.suite.first_claims import FirstClaimSuite
from penstock.testing.suite.keeping import KeepingSuite
from penstock.testing.suite.limits import LimitSuite
from penstock.testing.suite.moving import MovingSuite
from penstock.testing.suite.queues import QueuesSuite
from penstock.testing.suite.recording import LifeLogSuite
from penstock.testing.suite.restarting import RestartingSuite, WaitingSuite
from penstock.testing.suite.settling import SettlingSuite

__all__ = ["BrokerConformance", "ShortConformance", "ShortUrlConformance", "UrlConformance"]


class BrokerConformance(
    DeliverySuite,
    SettlingSuite,
    FifoSuite,
    FirstClaimSuite,
    KeepingSuite,
    MovingSuite,
    ExplainingSuite,
    DeadLetterSuite,
    LimitSuite,
    QueuesSuite,
    LifeLogSuite,
    RestartingSuite,
    WaitingSuite,
):
    """The whole contract. Override ``open`` and ``reopen``, and ``payload_kept`` if possible."""


class ShortConformance(DeliverySuite, SettlingSuite, RestartingSuite):
    """The part of the contract that every message passes: for combinations of tested parts."""


class UrlConformance(OnUrl, BrokerConformance):
    """The suite over a store URL; ``{place}`` in it stands for the test's directory."""


class ShortUrlConformance(OnUrl, ShortConformance):
    """The short suite over a store URL."""
