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

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock import errors, model
from penstock.broker.broker import Broker
from penstock.clock import Clock, ManualClock, SystemClock
from penstock.errors import *  # noqa: F403 - every error is public
from penstock.model import *  # noqa: F403 - its __all__ has the public nouns
from penstock.urls import open  # noqa: A004 - penstock.open is the way in

if TYPE_CHECKING:
    from penstock.broker.reader import Reader
    from penstock.broker.tailer import Tailer, route_once
    from penstock.client import connect, connect_async
    from penstock.readers import open_reader
    from penstock.worker import Retry, Settled, Worker, WorkerStats
else:
    # Loaded when used: a process that opens a store of its own needs none of these.
    _LAZY = {
        "Reader": "penstock.broker.reader",
        **dict.fromkeys(("Tailer", "route_once"), "penstock.broker.tailer"),
        **dict.fromkeys(("connect", "connect_async"), "penstock.client"),
        "open_reader": "penstock.readers",
        **dict.fromkeys(("Retry", "Settled", "Worker", "WorkerStats"), "penstock.worker"),
    }

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LAZY[name]), name)


__version__ = "0.1.0"

__all__ = [
    "Broker",
    "Clock",
    "ManualClock",
    "Reader",
    "Retry",
    "Settled",
    "SystemClock",
    "Tailer",
    "Worker",
    "WorkerStats",
    "__version__",
    "connect",
    "connect_async",
    "open",
    "open_reader",
    "route_once",
]
__all__ += errors.__all__
__all__ += model.__all__
