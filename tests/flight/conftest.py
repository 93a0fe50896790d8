from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import pytest
from tests.soaking import SOAK

import penstock
from penstock import Message
from penstock.clock import ManualClock
from penstock.flight.client import FlightStore
from penstock.server import in_process_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.server import FlightListener

PLACES = {"memory": "memory:", "rocksdb": "rocksdb:{}/store", "slatedb": "slatedb+file://{}/store"}
DESIGNS = ["indexed", "buckets"]
# Each design on one engine; `make soak` has every combination.
KINDS = ["rocksdb-indexed", "slatedb-buckets", "postgresql"]
if SOAK:
    KINDS = [*(f"{place}-{design}" for place in PLACES for design in DESIGNS), "postgresql"]


def url_of(kind: str, place: Path) -> str:
    engine, design = kind.split("-")
    return f"{PLACES[engine].format(place)}?design={design}"


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "postgresql":
        server = request.getfixturevalue("postgres")
        # One log at first, as in the other stores.
        yield server.emptied(str(tmp_path)) + "?logs=1"
        server.forget_places()
        return
    yield url_of(request.param, tmp_path)


@pytest.fixture
def on_sql(url: str) -> bool:
    """Whether the store is on a SQL database, which numbers and keeps some things otherwise."""
    return url.startswith("postgresql:")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(url: str, clock: ManualClock) -> Iterator[penstock.Broker]:
    with penstock.open(url, clock=clock, background=False) as opened:
        yield opened


@pytest.fixture
def piped(url: str, clock: ManualClock) -> Iterator[penstock.Broker]:
    """A broker whose routing is left to a pipeline."""
    with penstock.open(url, clock=clock, background=False, routing="pipeline") as opened:
        yield opened


@pytest.fixture
def server(broker: penstock.Broker, clock: ManualClock) -> Iterator[FlightListener]:
    with in_process_server(broker, clock=clock) as listener:
        yield listener


@pytest.fixture
def store(server: FlightListener) -> FlightStore:
    return FlightStore(server.location)


@pytest.fixture
def piped_store(piped: penstock.Broker, clock: ManualClock) -> Iterator[FlightStore]:
    with in_process_server(piped, clock=clock) as listener:
        yield FlightStore(listener.location)


def fill(broker: penstock.Broker, clock: ManualClock) -> None:
    """Make everything happen in a store: all states, groups, priorities, attempts."""
    broker.create_queue("q", max_attempts=2, backoff_base_ms=0, bucket_exponent=1)
    broker.create_queue("big", filter="n >= 20", ordering="fifo")
    broker.create_queue("empty")
    for start in (0, 30):
        broker.publish(
            Message(
                b"p%d" % n,
                {"queue": "q", "n": n, "f": n / 4, "even": n % 2 == 0, "none": None, "é": "ü"},
                group=f"g{n % 3}",
                priority=n % 4,
                delay_ms=5_000 if n % 10 == 9 else 0,
            )
            for n in range(start, start + 30)
        )
        clock.advance(1_000)
    taken = broker.claim("q", limit=25, consumer="w1")
    clock.advance(10)
    broker.ack([each.receipt for each in taken[:10]])
    broker.release([each.receipt for each in taken[10:15]], reason="no good")
    broker.release([each.receipt for each in taken[15:18]], delay_ms=9_000)
    for _ in range(2):
        again = broker.claim("q", limit=4, consumer="w2", lease_ms=50)
        clock.advance(100)
        broker.release([each.receipt for each in again], reason="expired anyway")
    broker.claim("big", limit=4, consumer="w3")


@pytest.fixture
def life(broker: penstock.Broker, clock: ManualClock) -> penstock.Broker:
    """A store of the test's own in which everything has happened."""
    fill(broker, clock)
    return broker


class Kept(NamedTuple):
    """A served store for several tests, none of which writes to it."""

    broker: penstock.Broker
    location: str
    on_sql: bool


@pytest.fixture(scope="module", params=KINDS)
def kept(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kept]:
    """A store in which everything has happened, the same for all tests that only read."""
    with ExitStack() as stack:
        if request.param == "postgresql":
            postgres = request.getfixturevalue("postgres")
            name = postgres.create()
            stack.callback(postgres.drop, name)
            url = postgres.url(name) + "?logs=1"
        else:
            url = url_of(request.param, tmp_path_factory.mktemp("kept"))
        clock = ManualClock()
        broker = stack.enter_context(penstock.open(url, clock=clock, background=False))
        fill(broker, clock)
        server = stack.enter_context(in_process_server(broker, clock=clock))
        yield Kept(broker, server.location, on_sql=request.param == "postgresql")


@pytest.fixture
def kept_life(kept: Kept) -> penstock.Broker:
    return kept.broker


@pytest.fixture
def kept_store(kept: Kept) -> FlightStore:
    return FlightStore(kept.location)
