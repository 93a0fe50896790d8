"""The edge: what others reach a broker by over the network.

``process`` runs what ``serving`` makes of a store; ``desk`` is where the requests of all
connections meet; ``native``, ``http`` with ``sqs``, ``flight`` and ``queueber`` are the protocols;
``config``, ``security``, ``metrics``, ``logs``, ``tracing``, ``operations`` and ``backup`` are for
who runs it. Needs the extra ``penstock[server]``, and for Flight ``penstock[flight]``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.server.listening import FlightListener, in_process_server
    from penstock.server.serving import Server, running

__all__ = ["FlightListener", "Server", "in_process_server", "running"]

_MODULES: Final = {
    "FlightListener": "listening",
    "in_process_server": "listening",
    "Server": "serving",
    "running": "serving",
}


def __getattr__(name: str) -> Any:
    # Loaded when used: who imports one module of this package need not load them all.
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
