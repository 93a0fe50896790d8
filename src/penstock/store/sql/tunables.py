"""What can be tuned, with what to start from."""

from __future__ import annotations

import msgspec

__all__ = ["Tunables"]


class Tunables(msgspec.Struct, frozen=True, kw_only=True):
    """How claims look for zones, and when zones are let go of.

    ``ring_size``: tokens of a new store. ``peek_max``: pointers that a claim looks at. Of these it
    visits up to ``selection_max`` at a time, fewer if it wants fewer messages or others are at
    them; if there are more, random ones, unless ``sequential`` turns the randomness off.
    ``dequeue_max``: what one zone gives at a visit while others wait. ``threshold_ms``: a pointer
    that is this little late for a delayed message is left alone. ``trust_ms``: for how long a
    pointer that was seen vested is not looked at by an enqueue; ``cool_ms``, longer than that, is
    when a zone that was found empty is looked at once more. ``min_inactive_ms``: how long a zone is
    empty before its pointer is collected. ``poll_ms``: how often a process looks for messages of
    others while a claim waits, ``idle_poll_ms`` else.

    ``verb_timeout_ms``: how long a verb waits for the database in all before it fails, and for
    other calls of its process before that. The server ends a statement that takes
    ``statement_timeout_ms``, or waits for a lock for ``lock_timeout_ms``; maintenance (a check, a
    new schema, what reads in bulk) has ``bulk_timeout_ms`` for each.
    """

    ring_size: int = 1
    peek_max: int = 100
    selection_max: int = 10
    sequential: bool = False
    dequeue_max: int = 10
    threshold_ms: int = 250
    trust_ms: int = 100
    cool_ms: int = 300
    min_inactive_ms: int = 30_000
    poll_ms: int = 100
    idle_poll_ms: int = 1_000
    verb_timeout_ms: int = 30_000
    statement_timeout_ms: int = 20_000
    lock_timeout_ms: int = 10_000
    bulk_timeout_ms: int = 600_000
