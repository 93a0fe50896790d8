"""The shipped suites, unchanged, through a client and a server; the rest of it in ``make soak``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.native.serving import Remote
from tests.soaking import SOAK

from penstock.testing.conformance import ShortUrlConformance, UrlConformance
from penstock.testing.routing import UrlRoutingConformance
from penstock.testing.suite.base import Suite

if TYPE_CHECKING:
    from penstock.broker.broker import Broker
    from penstock.clock import Clock


class _Served(Suite):
    _clock: Clock

    def open(self, clock: Clock, **options: Any) -> Broker:
        self._clock = clock
        return cast("Broker", Remote(super().open(clock, **options), clock))

    def reopen(self) -> Broker:
        self.broker.close()
        return cast("Broker", Remote(super().reopen(), self._clock))

    def open_as(self, **options: Any) -> Broker:
        self.broker.close()
        embedded: Broker = super().open_as(**options)  # type: ignore[misc]  # the routing suite's
        return cast("Broker", Remote(embedded, self._clock))


class _ServedConformance(_Served, UrlConformance):
    # A broker that is served always has its sweeper.
    test_waiting_works_without_a_sweeper = None  # type: ignore[assignment]
    # A function can't be sent.
    test_redrive_by_function = None  # type: ignore[assignment]


class TestMemory(_ServedConformance):
    url = "memory:?design=indexed"


class TestMemoryRouting(_Served, UrlRoutingConformance):
    url = "memory:?design=buckets"


if SOAK:

    class TestSlate(_ServedConformance):
        url = "slatedb+file://{place}/store"

    class TestRocks(_ServedConformance):
        url = "rocksdb:{place}/store?design=indexed"

    class TestRocksRouting(_Served, UrlRoutingConformance):
        url = "rocksdb:{place}/store?design=buckets"

    class TestSlateRouting(_Served, UrlRoutingConformance):
        url = "slatedb+file://{place}/store"

else:

    @pytest.mark.slow
    class TestSlateShort(_Served, ShortUrlConformance):
        test_redrive_by_function = None  # type: ignore[assignment]
        url = "slatedb+file://{place}/store"
