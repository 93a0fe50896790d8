"""A transport of kombu, so that Celery's broker can be ``penstock://[ID:SECRET@]HOST:PORT``.

Importing this package makes the schemes ``penstock`` and ``penstocks`` (TLS) known to kombu, which
finds transports in no other way. Each kombu connection has an asyncio client on a thread of its
own, where each channel claims for its consumers, extends leases, and acks in batches::

    the application's thread                      the connection's thread
    basic_publish ───────────────────────────────▶ publish; returns when it is stored
    basic_consume ───────────────────────────────▶ a waiting claim for each consumer
    drain_events ◀──── inbox: deliveries ───────── up to the prefetch count
    basic_ack ───────────────────────────────────▶ ack, in one call with others

A queue's binding to an exchange is a part of the queue's filter: the server routes, and one publish
reaches every bound queue. ``messages`` has names, bindings and messages, ``claims`` the claims of a
channel, ``transport`` the classes that kombu calls.
"""

from __future__ import annotations

from kombu.transport import TRANSPORT_ALIASES

from penstock.integrations.kombu.transport import Channel, SecureTransport, Transport

__all__ = ["Channel", "SecureTransport", "Transport"]

TRANSPORT_ALIASES["penstock"] = f"{__name__}:Transport"
TRANSPORT_ALIASES["penstocks"] = f"{__name__}:SecureTransport"
