"""The edge: what others reach a broker by over the network. So far, Arrow Flight.

``flight`` is the service, ``snapshots`` and ``stages`` what it keeps between calls,
``publishing`` turns record batches into messages, ``listening`` starts and stops it. Needs
pyarrow (``pip install penstock[flight]``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.server.listening import FlightListener, in_process_server

__all__ = ["FlightListener", "in_process_server"]


def __getattr__(name: str) -> Any:
    # Loaded when used: who imports one module of this package need not load them all.
    if name in __all__:
        from penstock.server import listening  # noqa: PLC0415

        return getattr(listening, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
