"""Every store of the product passes the one suite."""

from penstock.testing.conformance import UrlConformance


class TestMemoryIndexed(UrlConformance):
    url = "memory:?design=indexed"


class TestMemoryBuckets(UrlConformance):
    url = "memory:?design=buckets"


class TestRocksIndexed(UrlConformance):
    url = "rocksdb:{place}/store?design=indexed"


class TestRocksBuckets(UrlConformance):
    url = "rocksdb:{place}/store?design=buckets"
