"""Settings for every test."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# The suites that are shipped to users are ordinary modules: without this their asserts are mute.
pytest.register_assert_rewrite("penstock.testing")

_slow_machine = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("check", deadline=None, suppress_health_check=_slow_machine)
settings.register_profile(
    "soak", deadline=None, suppress_health_check=_slow_machine, max_examples=5_000
)
settings.load_profile(os.environ.get("PENSTOCK_HYPOTHESIS_PROFILE", "check"))
