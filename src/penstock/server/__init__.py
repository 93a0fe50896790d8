"""The edge: what others reach a broker by over the network.

``process`` runs what ``serving`` makes of a store; ``batcher`` is where the requests of all
connections meet; ``native``, ``http`` with ``sqs``, ``flight`` and ``queueber`` are the protocols;
``config``, ``security``, ``metrics``, ``logs``, ``tracing``, ``operations`` and ``backup`` are for
who runs it. Needs the extra ``penstock[server]``, and for Flight ``penstock[flight]``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.flight.listener import FlightListener, in_process_server
    from penstock.server.served_store import Server, running

__all__ = ["FlightListener", "Server", "in_process_server", "running"]

_MODULES: Final = {
    "FlightListener": "penstock.flight.listener",
    "in_process_server": "penstock.flight.listener",
    "Server": "penstock.server.served_store",
    "running": "penstock.server.served_store",
}


def __getattr__(name: str) -> Any:
    # Loaded when used: who imports one module of this package need not load them all.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
