"""Every store of the product passes the one suite.

Opening a store on SlateDB takes a tenth of a second: what is not run here is run by ``make soak``.
"""

import os

import pytest

from penstock.testing.conformance import UrlConformance

SOAK = os.environ.get("PENSTOCK_HYPOTHESIS_PROFILE") == "soak"


class TestMemoryIndexed(UrlConformance):
    url = "memory:?design=indexed"


class TestMemoryBuckets(UrlConformance):
    url = "memory:?design=buckets"


class TestRocksIndexed(UrlConformance):
    url = "rocksdb:{place}/store?design=indexed"


class TestRocksBuckets(UrlConformance):
    url = "rocksdb:{place}/store?design=buckets"


@pytest.mark.slow
class TestSlateBuckets(UrlConformance):
    url = "slatedb+file://{place}/store?design=buckets"


if SOAK:

    class TestSlateIndexed(UrlConformance):
        url = "slatedb+file://{place}/store?design=indexed"
