"""Penstock: a durable message queue.

>>> import penstock
>>> with penstock.open("memory:") as broker:
...     _ = broker.create_queue("orders")
...     _ = broker.send("orders", b"one book", kind="book")
...     for delivery in broker.claim("orders"):
...         print(delivery.payload, delivery.attributes["kind"])
...         _ = broker.ack([delivery.receipt])
b'one book' book
"""

from __future__ import annotations

from penstock.broker import Broker
from penstock.clock import Clock, ManualClock, SystemClock
from penstock.errors import (
    BrokerClosed,
    CorruptRecord,
    DiskFull,
    ImportFailed,
    InvalidFilter,
    InvalidInput,
    InvalidMessage,
    InvalidQueue,
    InvalidReceipt,
    InvalidUrl,
    PenstockError,
    QueueExists,
    QueueNotFound,
    StorageFailed,
    StoreLocked,
    StoreMismatch,
)
from penstock.model import (
    Assigned,
    AssignStatus,
    Attempt,
    AttemptEnd,
    Backfilled,
    Cursor,
    Delivery,
    Entry,
    LogPage,
    LogRecord,
    LogStats,
    Message,
    Ordering,
    Outcome,
    OutcomeStatus,
    Page,
    QueueSpec,
    QueueStats,
    State,
    StoreStats,
    SweepCounts,
)
from penstock.opening import open  # noqa: A004 - penstock.open is the way in
from penstock.tailing import route_once

__version__ = "0.1.0"

__all__ = [
    "AssignStatus",
    "Assigned",
    "Attempt",
    "AttemptEnd",
    "Backfilled",
    "Broker",
    "BrokerClosed",
    "Clock",
    "CorruptRecord",
    "Cursor",
    "Delivery",
    "DiskFull",
    "Entry",
    "ImportFailed",
    "InvalidFilter",
    "InvalidInput",
    "InvalidMessage",
    "InvalidQueue",
    "InvalidReceipt",
    "InvalidUrl",
    "LogPage",
    "LogRecord",
    "LogStats",
    "ManualClock",
    "Message",
    "Ordering",
    "Outcome",
    "OutcomeStatus",
    "Page",
    "PenstockError",
    "QueueExists",
    "QueueNotFound",
    "QueueSpec",
    "QueueStats",
    "State",
    "StorageFailed",
    "StoreLocked",
    "StoreMismatch",
    "StoreStats",
    "SweepCounts",
    "SystemClock",
    "__version__",
    "open",
    "route_once",
]
