"""The native client: a broker at the other end of a connection.

``connection`` decides everything (which frames to send, which calls to repeat) and
touches neither sockets nor clocks; ``calls`` has every verb, once; ``transport`` runs a connection
on an event loop. ``Client`` has a loop of its own on a thread, ``AsyncClient`` runs on yours.
"""

from __future__ import annotations

from penstock.client.calls import Uncertain
from penstock.client.clients import AsyncClient, Client, connect, connect_async

__all__ = ["AsyncClient", "Client", "Uncertain", "connect", "connect_async"]
