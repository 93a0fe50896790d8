"""A soak runs more than other runs: examples, and combinations of designs, engines and suites."""

from __future__ import annotations

import os

from hypothesis import settings

SOAK = os.environ.get("PENSTOCK_HYPOTHESIS_PROFILE") == "soak"


def examples(count: int) -> settings:
    """Try so many examples of a property; a soak tries those of its profile."""
    return settings() if SOAK else settings(max_examples=count)
