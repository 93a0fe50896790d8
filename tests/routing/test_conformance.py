"""Every store of the product routes alike."""

from penstock.testing.routing import UrlRoutingConformance


class TestMemoryIndexed(UrlRoutingConformance):
    url = "memory:?design=indexed"


class TestMemoryBuckets(UrlRoutingConformance):
    url = "memory:?design=buckets"


class TestRocksIndexed(UrlRoutingConformance):
    url = "rocksdb:{place}/store?design=indexed"


class TestRocksBuckets(UrlRoutingConformance):
    url = "rocksdb:{place}/store?design=buckets"
