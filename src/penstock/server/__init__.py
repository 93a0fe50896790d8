"""The server: everything by which other machines reach a broker.

``process`` runs the ``Server`` of a ``served_store``; the ``batcher`` gathers the requests of all
connections; ``native``, ``http`` with ``sqs``, and ``queueber`` are protocols, beside
:mod:`penstock.flight`; ``config``, ``security``, ``metrics``, ``admin`` and ``backup`` are for
operators. Needs the extra ``penstock[server]``.
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
    # Loaded when used: importing one module of this package must not load them all.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
