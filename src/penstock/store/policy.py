"""How long a released message waits before it is tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.model import QueueSpec

__all__ = ["backoff_ms"]


def backoff_ms(spec: QueueSpec, failures: int, random: Callable[[], float]) -> int:
    """Double the base with every failure up to the cap; jitter takes away up to half of it."""
    # Past 63 doublings the cap has long been reached; the bound keeps the number small.
    full = min(spec.backoff_cap_ms, spec.backoff_base_ms << min(max(failures, 1) - 1, 63))
    return full - int(random() * (full / 2))
