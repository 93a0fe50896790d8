"""The contract of routing as a pytest suite: filters, the metadata log, tailers and backfill.

A store joins with one class that overrides ``open``, ``reopen`` and ``open_as`` (and
``payload_kept`` if it can tell), just as for :mod:`penstock.testing.conformance`. A store that
:func:`penstock.open` knows joins with its URL::

    class TestMemory(UrlRoutingConformance):
        url = "memory:?design=indexed"
"""

from __future__ import annotations

from penstock.testing.stores import OnUrl
from penstock.testing.suite.backfilling import BackfillSuite
from penstock.testing.suite.fan_out import FanOutSuite
from penstock.testing.suite.logs import LogsSuite
from penstock.testing.suite.moved import MovedSuite
from penstock.testing.suite.switching import SwitchingSuite
from penstock.testing.suite.tailing import TailingSuite

__all__ = [
    "RoutingConformance",
    "ShortRoutingConformance",
    "ShortUrlRoutingConformance",
    "UrlRoutingConformance",
]


class RoutingConformance(
    FanOutSuite, TailingSuite, LogsSuite, SwitchingSuite, BackfillSuite, MovedSuite
):
    """All of routing."""


class ShortRoutingConformance(FanOutSuite):
    """The queues that a message goes to; the log is the same in every design."""


class UrlRoutingConformance(OnUrl, RoutingConformance):
    """The suite over a store URL; ``{place}`` in it stands for the test's directory."""


class ShortUrlRoutingConformance(OnUrl, ShortRoutingConformance):
    """The short suite over a store URL."""
