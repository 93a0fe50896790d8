"""Every store of the product routes alike.

Opening a store on SlateDB takes a tenth of a second: what is not run here is run by ``make soak``.
"""

import os

import pytest

from penstock.testing.routing import UrlRoutingConformance

SOAK = os.environ.get("PENSTOCK_HYPOTHESIS_PROFILE") == "soak"


class TestMemoryIndexed(UrlRoutingConformance):
    url = "memory:?design=indexed"


class TestMemoryBuckets(UrlRoutingConformance):
    url = "memory:?design=buckets"


class TestRocksIndexed(UrlRoutingConformance):
    url = "rocksdb:{place}/store?design=indexed"


class TestRocksBuckets(UrlRoutingConformance):
    url = "rocksdb:{place}/store?design=buckets"


@pytest.mark.slow
class TestSlateBuckets(UrlRoutingConformance):
    url = "slatedb+file://{place}/store?design=buckets"


if SOAK:

    class TestSlateIndexed(UrlRoutingConformance):
        url = "slatedb+file://{place}/store?design=indexed"
