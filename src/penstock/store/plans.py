"""What workers want of a store; what the pipeline asks before it works, and is told after."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

__all__ = [
    "BackfillPlan",
    "Collected",
    "Filled",
    "LiveFilters",
    "LogStretch",
    "RoutePlan",
    "StoreInfo",
    "Want",
]


class Want(NamedTuple):
    """One claim: how many messages, for how long, for whom; ``lease`` is sixteen fresh bytes."""

    limit: int
    lease_ms: int
    consumer: str
    lease: bytes


class StoreInfo(msgspec.Struct, frozen=True):
    """Which store this is."""

    store_id: str
    design: str
    routing: str


class LogStretch(msgspec.Struct, frozen=True):
    """Offsets [begin, end) of one log."""

    log: int
    begin: int
    end: int


class RoutePlan(msgspec.Struct, frozen=True):
    """What a router may match next: stretches within which the live filters do not change.

    ``epoch`` is the one that may assign now; ``lag`` counts offsets, by log.
    """

    epoch: int
    filters_version: int
    stretches: list[LogStretch]
    lag: dict[int, int]


class LiveFilters(msgspec.Struct, frozen=True):
    """The filters that are live at an offset, and the offset at which they change, if any."""

    filters: dict[str, str]
    filters_version: int
    until: int | None


class BackfillPlan(msgspec.Struct, frozen=True):
    """The stretches that a queue has not been filled from by its present filter.

    ``earliest`` is where the log begins; what lies below comes from an archive.
    """

    stretches: list[tuple[int, int]]
    filter: str
    end: int
    earliest: int


class Filled(msgspec.Struct, frozen=True):
    """What one step of a fill did, and where the next begins.

    ``already``: the queue has had the message, or its filter does not want it. ``missing``: the
    log or the payload store has it no longer.
    """

    added: int
    already: int
    missing: int
    next: int


class Collected(msgspec.Struct, frozen=True):
    """Payloads that nobody can ever ask for again, and their bytes."""

    freed_messages: int
    freed_bytes: int
