"""Queueber's wire: its interface in Cap'n Proto, and the ids and leases that its clients see."""

from __future__ import annotations

from penstock.wire.queueber.names import (
    item_id,
    lease_data,
    lease_of,
    message_of,
)

__all__ = ["item_id", "lease_data", "lease_of", "message_of"]
