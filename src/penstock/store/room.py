"""The limits of a queue: whether messages have room in it, and how many must go. All stores agree.

A limit counts the messages that wait or are in flight, and the bytes of their payloads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import LimitReached
from penstock.model import Overflow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.model import QueueSpec


def is_limited(spec: QueueSpec) -> bool:
    """Whether a queue has a limit."""
    return bool(spec.max_messages or spec.max_bytes)


def drops_oldest(spec: QueueSpec) -> bool:
    """Whether a queue has a limit, and lets its oldest messages fail for it."""
    return is_limited(spec) and spec.overflow is Overflow.DROP_OLDEST


def check_room(
    spec: QueueSpec, live: int, live_bytes: int, messages: int, message_bytes: int
) -> None:
    """Refuse messages that would pass a limit of a queue, unless it drops its oldest for them."""
    if spec.overflow is Overflow.DROP_OLDEST or not messages:
        return
    for name, limit, has, more, what in (
        ("max_messages", spec.max_messages, live, messages, "messages"),
        ("max_bytes", spec.max_bytes, live_bytes, message_bytes, "bytes of payload"),
    ):
        if not limit or has + more <= limit:
            continue
        why = f"{has} {what} wait or are in flight, and {more} more would pass {name}={limit}"
        hint = "consume or purge messages, raise the limit, or set overflow to 'drop_oldest'"
        if more > limit:
            hint = f"so many at once never fit: send fewer, or raise the limit; {hint}"
        # A verb that goes in steps may have brought others in before.
        came = f"None of {messages} came in" if messages > 1 else "The message did not come in"
        raise LimitReached(f"queue {spec.name!r} is full: {why}. {came}; {hint}")


def is_over(spec: QueueSpec, live: int, live_bytes: int) -> bool:
    """Whether a queue has more than its limits allow."""
    return bool(
        (spec.max_messages and live > spec.max_messages)
        or (spec.max_bytes and live_bytes > spec.max_bytes)
    )


def guess_excess(spec: QueueSpec, live: int, live_bytes: int) -> int:
    """Guess how many messages a queue has too many, by their mean size; at least one."""
    over = live - spec.max_messages if spec.max_messages else 0
    if spec.max_bytes and live_bytes > spec.max_bytes:
        over = max(over, (live_bytes - spec.max_bytes) * live // live_bytes)
    return max(1, over)


def count_excess(spec: QueueSpec, live: int, live_bytes: int, sizes: Iterable[int]) -> int:
    """Return how many of the oldest messages, of these sizes, must go for the limits to hold."""
    count = 0
    for size in sizes:
        if not is_over(spec, live, live_bytes):
            break
        live, live_bytes, count = live - 1, live_bytes - size, count + 1
    return count


def drop_reason(spec: QueueSpec) -> str:
    """Return the reason that is kept with messages which failed because their queue was full."""
    limits = (("max_messages", spec.max_messages), ("max_bytes", spec.max_bytes))
    told = " and ".join(f"{name}={limit}" for name, limit in limits if limit)
    return f"dropped as the oldest of a full queue: {told}"
