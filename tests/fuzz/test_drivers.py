"""The fuzzer's drivers hold for their seeds, for seeds that were spoilt, and for any bytes."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if not os.environ.get("CI"):
    pytest.importorskip("httptools")

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.fuzz import run

if TYPE_CHECKING:
    from collections.abc import Callable

DRIVERS: dict[str, Any] = {name: import_module(f"tests.fuzz.{name}") for name in run.PARSERS}


@st.composite
def spoilt(draw: Callable[[st.SearchStrategy[Any]], Any], seeds: tuple[bytes, ...]) -> bytes:
    """Cut a seed, change some of its bytes, and put something behind it."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for at, byte in draw(
        st.lists(st.tuples(st.integers(0, 1_000), st.integers(0, 255)), max_size=4)
    ):
        if data:
            data[at % len(data)] = byte
    cut = draw(st.integers(0, len(data)))
    rest: bytes = draw(st.one_of(st.just(bytes(data[cut:])), st.binary(max_size=40)))
    return bytes(data[:cut]) + rest


@pytest.mark.parametrize("name", run.PARSERS)
def test_seeds(name: str) -> None:
    driver = DRIVERS[name]
    for seed in driver.SEEDS:
        driver.one(seed)
        for end in range(len(seed)):
            driver.one(seed[:end])
        driver.one(seed + seed)


@pytest.mark.parametrize("name", run.PARSERS)
@given(data=st.data())
def test_spoilt_seeds(name: str, data: st.DataObject) -> None:
    driver = DRIVERS[name]
    driver.one(data.draw(spoilt(driver.SEEDS)))


@pytest.mark.parametrize("name", run.PARSERS)
@given(garbage=st.binary(max_size=200))
def test_garbage(name: str, garbage: bytes) -> None:
    DRIVERS[name].one(garbage)


def test_every_driver_is_run() -> None:
    here = {path.stem for path in Path(__file__).parent.glob("*.py")}
    assert here - {"run", "test_drivers"} == set(run.PARSERS)
