"""A server with a store that all tests of a module share, and a queue for each test."""

from __future__ import annotations

import itertools
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("boto3")
pytest.importorskip("uvloop")

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.sqs.serving import Served, client_of, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="module", params=["memory", "slatedb", "postgresql"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    store = "memory:"
    if request.param == "slatedb":
        store = f"slatedb+file://{tmp_path_factory.mktemp('sqs')}/store"
    with ExitStack() as stack:
        if request.param == "postgresql":
            postgres = request.getfixturevalue("postgres")
            name = postgres.create()
            stack.callback(postgres.drop, name)
            store = postgres.url(name)
        yield stack.enter_context(serving(store=store))


@pytest.fixture(scope="module")
def sqs(served: Served) -> Any:
    return client_of(served)


@pytest.fixture
def make(sqs: Any) -> Callable[..., str]:
    """Return what makes a queue with attributes and gives its URL."""

    def make(suffix: str = "", **attributes: str) -> str:
        name = f"q{next(_NUMBERS)}{suffix}"
        if suffix == ".fifo":
            attributes["FifoQueue"] = "true"
        url: str = sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
        return url

    return make


@pytest.fixture
def url(make: Callable[..., str]) -> str:
    return make()
