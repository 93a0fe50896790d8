"""The stores against the model: random verbs, a falsifying example if they disagree.

``PENSTOCK_HYPOTHESIS_PROFILE=soak`` runs many more examples, for a soak.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from penstock.testing.machine import StoreMachine

SOAK = os.environ.get("PENSTOCK_HYPOTHESIS_PROFILE") == "soak"


def run(url: str, examples: int) -> None:
    machine = type("Machine", (StoreMachine,), {"url": url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=5_000 if SOAK else examples, stateful_step_count=60, print_blob=True
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_memory(design: str) -> None:
    run(f"memory:?design={design}", 100)


@pytest.mark.slow
@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_rocksdb(design: str) -> None:
    run("rocksdb:{place}/store?design=" + design, 12)


@pytest.mark.slow
@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_slatedb(design: str) -> None:
    run("slatedb+file://{place}/store?design=" + design, 5)
