"""What a worker can be told, checked once."""

from __future__ import annotations

import os
import socket
from typing import Literal

import msgspec

from penstock import limits
from penstock.errors import InvalidInput
from penstock.validation import check_count, check_duration, check_text, cut_text

__all__ = ["Settings"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a worker; ``prefetch`` None is as many as ``concurrency``."""

    concurrency: int = 4
    mode: Literal["threads", "processes"] = "threads"
    lease_ms: int | None = None
    prefetch: int | None = None
    time_limit_ms: int | None = None
    consumer: str | None = None
    drain_ms: int = 30_000
    dequeue_max: int = 100
    wait_ms: int = 500
    scan_interval_ms: int = 100

    def checked(self) -> Settings:
        """Return these settings with nothing left open, or raise what is wrong with them."""
        check_count(self.concurrency, "concurrency", 1, limits.MAX_CONCURRENCY)
        if self.mode not in {"threads", "processes"}:
            raise InvalidInput(f"mode {self.mode!r:.100}: 'threads' or 'processes'")
        if self.lease_ms is not None:
            check_duration(self.lease_ms, "lease_ms", low=1, high=limits.MAX_LEASE_MS)
        if self.time_limit_ms is not None:
            check_duration(self.time_limit_ms, "time_limit_ms", low=1)
        prefetch = self.concurrency if self.prefetch is None else self.prefetch
        check_count(prefetch, "prefetch", 0, limits.MAX_CLAIM_LIMIT)
        check_duration(self.drain_ms, "drain_ms")
        check_count(self.dequeue_max, "dequeue_max", 1, limits.MAX_CLAIM_LIMIT)
        check_duration(self.wait_ms, "wait_ms", high=limits.MAX_WAIT_MS)
        check_duration(self.scan_interval_ms, "scan_interval_ms", low=1)
        consumer = self.consumer
        if consumer is None:
            consumer = cut_text(f"{socket.gethostname()}-{os.getpid()}", limits.MAX_CONSUMER_BYTES)
        check_text(consumer, "consumer", limits.MAX_CONSUMER_BYTES)
        return msgspec.structs.replace(self, prefetch=prefetch, consumer=consumer)
