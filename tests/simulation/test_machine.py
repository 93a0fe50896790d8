"""The stores against the model: random verbs, a falsifying example if they disagree.

``PENSTOCK_HYPOTHESIS_PROFILE=soak`` runs many more examples, for a soak.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from tests.soaking import examples

from penstock.testing.machine import StoreMachine


def run(url: str, count: int) -> None:
    machine = type("Machine", (StoreMachine,), {"url": url})
    run_state_machine_as_test(
        machine, settings=settings(examples(count), stateful_step_count=60, print_blob=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_memory(design: str) -> None:
    run(f"memory:?design={design}", 40)


@pytest.mark.slow
@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_rocksdb(design: str) -> None:
    run("rocksdb:{place}/store?design=" + design, 6)


@pytest.mark.slow
@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_slatedb(design: str) -> None:
    run("slatedb+file://{place}/store?design=" + design, 3)
