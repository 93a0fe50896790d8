"""The native client: a broker at the other end of a connection.

``core`` decides everything (what to send, whose answer came, what may be repeated) and touches
neither sockets nor clocks; ``calls`` has every verb, once; ``link`` runs a core on an event loop;
``keeping`` knows which leases must be extended when. ``Client`` and ``AsyncClient`` are thin
shells around these: the first has a loop of its own on a thread, the second runs on yours.
"""

from __future__ import annotations

from penstock.client.async_ import AsyncClient, connect_async
from penstock.client.calls import Uncertain
from penstock.client.sync import Client, connect

__all__ = ["AsyncClient", "Client", "Uncertain", "connect", "connect_async"]
