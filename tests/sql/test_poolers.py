"""Brokers behind PgBouncer, which hands sessions out by client, or by transaction."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tests.sql.pgbouncer import pooling
from tests.waiting import wait_until

import penstock
from penstock import InvalidUrl, Message
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sql.postgres import PostgresServer

LONG_S = 60
SESSIONS = 3


@pytest.fixture
def pooled(postgres: PostgresServer, url: str) -> Iterator[str]:
    """Name a database whose sessions are handed out by transaction, to a user of its own."""
    name = url.rpartition("/")[2]
    with postgres.connect(name) as admin:
        admin.execute("CREATE ROLE pooled LOGIN")
        admin.execute(f"GRANT CREATE ON DATABASE {name} TO pooled")
    try:
        with pooling(postgres, name, "transaction", SESSIONS) as address:
            yield address.replace("postgres@", "pooled@")
    finally:
        with postgres.connect(name) as admin:
            admin.execute("DROP OWNED BY pooled")
            admin.execute("DROP ROLE pooled")


def allow(postgres: PostgresServer, pooled: str) -> str:
    """Have the database set what Penstock asks for; return the URL to open."""
    off = f"{pooled}?prepare=off"
    with pytest.raises(InvalidUrl, match="ALTER ROLE CURRENT_USER SET") as refused:
        penstock.open(off)
    name = pooled.rpartition("/")[2]
    with postgres.connect(name) as admin:
        admin.execute("SET ROLE pooled")
        admin.execute(str(refused.value).partition("connect again: ")[2])
    # Sessions that the pooler has made before have it not.
    with postgres.connect() as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE usename = 'pooled'"
        )
    return off


def work(broker: penstock.Broker, name: str, count: int) -> set[bytes]:
    """Publish, claim, extend, release and ack; return the payloads that were acked."""
    done: set[bytes] = set()
    for n in range(count):
        broker.publish([Message(f"{name} {n}".encode(), {"queue": "q"}, group=name)])
        for each in broker.claim("q", limit=5):
            assert broker.extend([each.receipt], lease_ms=60_000)[0].ok
            if each.attempts == 1 and n % 7 == 0:
                assert broker.release([each.receipt], delay_ms=0)[0].ok
            else:
                assert broker.ack([each.receipt])[0].ok
                done.add(each.payload)
    return done


def test_sessions_by_transaction(postgres: PostgresServer, pooled: str) -> None:
    with pytest.raises(InvalidUrl, match="pool_mode = transaction"):
        penstock.open(pooled)
    off = allow(postgres, pooled)
    with (
        penstock.open(off, background=False) as first,
        penstock.open(off, background=False) as second,
    ):
        first.create_queue("q")
        began = threading.Barrier(4)

        def one(n: int) -> set[bytes]:
            began.wait(LONG_S)
            return work((first, second)[n % 2], f"w{n}", 25)

        # More clients than there are sessions.
        with ThreadPoolExecutor(4) as threads:
            done = set().union(*threads.map(one, range(4)))

        def finished() -> bool:
            left = first.claim("q", limit=50)
            assert all(second.ack([each.receipt for each in left]))
            done.update(each.payload for each in left)
            return len(done) == 100

        wait_until(finished)
        second.update_queue("q", description="changed")
        with first.view() as view:
            assert view.depths("q").done == 100
            second.send("q", b"later")
            assert view.depths("q").available == 0
        assert first.check().found == {}
        assert_clean(second)
    with postgres.connect() as admin:
        text = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'pooled'"
        row = admin.execute(text).fetchone()
    assert row is not None
    assert 0 < int(str(row[0])) <= SESSIONS


def test_sessions_that_are_cut_behind_the_pooler(postgres: PostgresServer, pooled: str) -> None:
    off = allow(postgres, pooled)
    with penstock.open(off, background=False) as broker:
        broker.create_queue("q")
        for n in range(5):
            with postgres.connect() as admin:
                admin.execute(
                    "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
                    "WHERE usename = 'pooled'"
                )
            broker.send("q", b"%d" % n)
        assert sorted(each.payload for each in broker.claim("q", limit=9)) == [
            b"%d" % n for n in range(5)
        ]
        assert_clean(broker)


def test_sessions_by_client(postgres: PostgresServer, url: str) -> None:
    name = url.rpartition("/")[2]
    with (
        pooling(postgres, name, "session", 20) as address,
        penstock.open(address, background=False) as broker,
    ):
        broker.create_queue("q")
        assert len(work(broker, "w", 5)) >= 4
        assert_clean(broker)
