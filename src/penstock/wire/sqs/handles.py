"""Receipt handles of SQS: a receipt, and the number of its message.

::

    ps1-SSSSSSSS-QQQQQQQQ-LLLLLLLLLLLLLLLLLLLLLLLLLLLLLLLL-KKKKKKKKKKKKKKKK.N

A receipt names a place in a queue, which is given to another message once this one is settled. The
number is for a delete that comes again: was this message deleted before?
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.model import Delivery

__all__ = ["handle_of", "message_of", "receipt_of"]


def handle_of(delivery: Delivery) -> str:
    """Return the handle of a message that was received."""
    return f"{delivery.receipt}.{delivery.message_id}"


def receipt_of(handle: str) -> str:
    """Return the receipt in a handle; a receipt alone will do."""
    return handle.partition(".")[0]


def message_of(handle: str) -> int | None:
    """Return the number in a handle; None if it has none."""
    number = handle.partition(".")[2]
    # No number of a message is longer.
    return int(number) if number.isascii() and number.isdecimal() and len(number) < 20 else None
