"""Every store of the product routes alike: each design in full on one engine.

The other combinations of a design and an engine run a short form, and ``make soak`` runs all of
them in full.
"""

import pytest
from tests.soaking import SOAK

from penstock.testing.routing import ShortUrlRoutingConformance, UrlRoutingConformance

Short = UrlRoutingConformance if SOAK else ShortUrlRoutingConformance


class TestRocksIndexed(UrlRoutingConformance):
    url = "rocksdb:{place}/store?design=indexed"


@pytest.mark.slow
class TestSlateBuckets(UrlRoutingConformance):
    url = "slatedb+file://{place}/store?design=buckets"


class TestMemoryIndexed(Short):  # type: ignore[misc, valid-type]
    url = "memory:?design=indexed"


class TestMemoryBuckets(Short):  # type: ignore[misc, valid-type]
    url = "memory:?design=buckets"


class TestRocksBuckets(Short):  # type: ignore[misc, valid-type]
    url = "rocksdb:{place}/store?design=buckets"


@pytest.mark.slow
class TestSlateIndexed(Short):  # type: ignore[misc, valid-type]
    url = "slatedb+file://{place}/store?design=indexed"
