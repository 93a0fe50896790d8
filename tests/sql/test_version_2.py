"""A store of schema version 2, from before rows told first claims: it is opened as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.sql.test_pinned import rows_of
from tests.sql.test_schema import described

import penstock
from penstock import ManualClock, State
from penstock.store.sql.store import SqlStore
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sql.postgres import PostgresServer

    from penstock import Broker

FILE = Path(__file__).with_name("version_2.sql")
EPOCH_MS = 1_700_000_000_000
NOW_MS = EPOCH_MS + 26_010
# Payload -> queue, state, attempts, first claim.
HELD = {
    b"done at once": ("q", State.DONE, 1, 2_000),
    b"done at the second attempt": ("q", State.DONE, 2, 4_500),
    b"failed": ("q", State.FAILED, 2, 8_500),
    b"redriven": ("q", State.IN_FLIGHT, 4, 12_500),
    b"in flight": ("q", State.IN_FLIGHT, 1, 19_010),
    b"given back": ("q", State.DELAYED, 1, 21_010),
    b"never claimed": ("q", State.AVAILABLE, 0, None),
    b"dropped": ("dead", State.AVAILABLE, 0, None),
    b"dead letter": ("dead", State.AVAILABLE, 1, 25_510),
}


@pytest.fixture
def old_url(postgres: PostgresServer, url: str) -> str:
    with postgres.connect(url.rpartition("/")[2]) as connection:
        connection.execute("CREATE SCHEMA penstock; SET search_path = penstock")
        connection.execute(FILE.read_bytes())
    return url


@pytest.fixture
def broker(old_url: str) -> Iterator[Broker]:
    with penstock.open(old_url, clock=ManualClock(NOW_MS), background=False) as opened:
        yield opened
        assert_clean(opened)


def test_it_has_the_tables_of_today(postgres: PostgresServer, old_url: str) -> None:
    """So processes of both versions may work on it at once: who changes them has to migrate it."""
    fresh = postgres.create()
    penstock.open(postgres.url(fresh), background=False).close()
    reading = f"{old_url}?options=-c%20default_transaction_read_only%3Don"
    with penstock.open(reading, clock=ManualClock(NOW_MS), background=False) as broker:
        first, second = broker.browse("q", state="done")
        assert (first.first_claimed_ms, second.first_claimed_ms) == (
            EPOCH_MS + 2_000,
            EPOCH_MS + 4_500,
        )
    assert described(postgres, old_url.rpartition("/")[2]) == described(postgres, fresh)


def test_first_claims_are_told_of_all_its_messages(broker: Broker) -> None:
    found = {}
    for queue in ("q", "few", "dead"):
        for state in State:
            for each in broker.browse(queue, state=state, payloads=True):
                (same,) = broker.browse(queue, message_id=each.message_id)
                assert same.first_claimed_ms == each.first_claimed_ms
                claimed_ms = each.first_claimed_ms and each.first_claimed_ms - EPOCH_MS
                found[each.payload] = (queue, state, each.attempts, claimed_ms)
    assert found == HELD
    told = {}
    with broker.view() as view:
        for table in ("active", "done", "failed"):
            for row in rows_of(view, table):
                at = row["first_claimed_at"]
                told[row["message_id"]] = at and round(at.timestamp() * 1000) - EPOCH_MS
    assert [told[number] for number in range(1, 10)] == [each[3] for each in HELD.values()]


def test_it_goes_on(broker: Broker) -> None:
    """What began before ends now, with the first claim of before."""
    clock = broker._clock
    assert isinstance(clock, ManualClock)
    clock.advance(3_600_000)
    broker.redrive("q")
    held = broker.claim("q", limit=9)
    assert len(held) == 5
    broker.ack([each.receipt for each in held])
    broker.move("dead", "q", state="available")
    broker.ack([each.receipt for each in broker.claim("q", limit=9)])
    store = broker._store
    assert isinstance(store, SqlStore)
    claims = {}
    for each in broker.browse("q", state="done", payloads=True):
        assert each.first_claimed_ms is not None
        claims[each.payload] = each.first_claimed_ms
    known = {payload: EPOCH_MS + at for payload, (_, _, _, at) in HELD.items() if at is not None}
    now = dict.fromkeys(HELD.keys() - known.keys(), clock.now_ms())
    assert claims == known | now
