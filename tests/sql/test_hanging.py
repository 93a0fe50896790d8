"""A database that hangs: stopped where it is, held by somebody's lock, or not there at all.

Verbs end in their time and say whether they may have been done, pages of a server answer all the
while, its log has two lines, and afterwards nothing is lost or doubled.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError
from tests.clients.process import Served
from tests.sql.test_serving import ask, series
from tests.waiting import wait_until

import penstock
from penstock import Message, ServerUnreachable, StorageFailed, SystemClock
from penstock.store.sql.store import SqlStore
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.sql.postgres import PostgresServer

    from penstock.client import Client

# A verb has 1.5 s, a statement 1 s at the server, and 0.5 s for a lock.
SHORT = "?verb_timeout_ms=1500&statement_timeout_ms=1000&lock_timeout_ms=500&connect_timeout=2"
# However slow the machine: far beyond every timeout above, and less than any default.
LONG_S = 30
OTHERS_AT_WORK = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND state = 'active' AND pid <> pg_backend_pid()
"""
SECONDS = SystemClock().seconds


@contextmanager
def locked(server: PostgresServer, url: str) -> Iterator[None]:
    """Hold a table, as VACUUM FULL and ALTER do."""
    name = url.partition("?")[0].rpartition("/")[2]
    with server.connect(name) as admin, admin.transaction():
        admin.execute("LOCK TABLE penstock.items")
        yield


@contextmanager
def down(server: PostgresServer) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.start()


Outage = "Callable[[PostgresServer, str], AbstractContextManager[None]]"
OUTAGES: dict[str, Any] = {
    "frozen": lambda server, _: server.frozen(),
    "locked": locked,
    "refused": lambda server, _: down(server),
}
every_outage = pytest.mark.parametrize("outage", OUTAGES.values(), ids=OUTAGES)


def fails_in_time(verb: Callable[[], object]) -> str:
    """Have a verb fail long before anybody would call it hanging; return what it says."""
    began = SECONDS()
    with pytest.raises(StorageFailed) as failed:
        verb()
    assert SECONDS() - began < LONG_S
    return str(failed.value)


# --- embedded -------------------------------------------------------------------------------------


@every_outage
def test_verbs_end_in_time(own_postgres: PostgresServer, outage: Any) -> None:
    url = own_postgres.url(own_postgres.create()) + SHORT
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q", lease_ms=600_000)
        broker.publish([Message(b"before", {"queue": "q"})] * 2)
        (held,) = broker.claim("q")
        with outage(own_postgres, url), ThreadPoolExecutor(12) as threads:
            # All at once: each ends in its own time, not in that of all before it.
            verbs: list[Callable[[], object]] = [
                lambda: broker.send("q", b"maybe"),
                lambda: broker.claim("q"),
                lambda: broker.ack([held.receipt]),
                lambda: broker.stats("q"),
            ]
            began = SECONDS()
            said = [each.result() for each in [threads.submit(fails_in_time, v) for v in verbs * 3]]
            assert SECONDS() - began < LONG_S
            assert broker._store.health().away is not None
            assert any("the database" in each for each in said)
        # Whatever was sent may yet be done, and is done once.
        assert broker.stats("q").in_flight >= 1
        wait_until(lambda: broker.send("q", b"again") and broker._store.health().away is None)
        after = broker.send("q", b"after")
        assert_clean(broker)
        broker.ack([held.receipt])
        ids = [each.message_id for each in broker.claim("q", limit=99)]
        assert len(set(ids)) == len(ids)
        assert after in ids


def test_what_hangs_may_have_been_done_and_says_so(own_postgres: PostgresServer) -> None:
    url = own_postgres.url(own_postgres.create()) + SHORT
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q")
        # So often that the server has the statement, and is sent nothing but what to do.
        broker.send("q", b"before")
        broker.send("q", b"before")
        with own_postgres.frozen():
            said = fails_in_time(lambda: broker.send("q", b"x"))
        assert "it may or may not have been done" in said
        name = url.partition("?")[0].rpartition("/")[2]
        with own_postgres.connect(name) as admin:
            # The server has the statement: it goes on with it, or ends it for taking too long.
            wait_until(lambda: admin.execute(OTHERS_AT_WORK).fetchone() == (0,))
            sent = broker.stats("q").available
            assert sent in {2, 3}
            with admin.transaction():
                admin.execute("LOCK TABLE penstock.items")
                said = fails_in_time(lambda: broker.send("q", b"y"))
        assert "lock timeout" in said
        assert "may or may not" not in said
        assert broker.stats("q").available == sent
        assert_clean(broker)


def test_a_worker_that_is_stopped_at_once_does_not_wait(
    own_postgres: PostgresServer,
) -> None:
    url = own_postgres.url(own_postgres.create())
    done: list[bytes] = []
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q")
        broker.send("q", b"before")
    worker = penstock.Worker(url, "q", lambda each: done.append(each.payload)).start()
    wait_until(lambda: worker.stats().processed)
    with own_postgres.frozen():
        claiming = worker._claimers[0]
        # Until the claim that waits looks again, or the next one does: then it hangs.
        threading.Event().wait(1)
        worker.stop()
        worker.stop(at_once=True)
        # Its calls last for a minute.
        assert worker.join(LONG_S * 1000)
        assert claiming.is_alive()
    wait_until(lambda: not claiming.is_alive())


def test_maintenance_has_longer(url: str, postgres: PostgresServer) -> None:
    short = url + "?statement_timeout_ms=100&bulk_timeout_ms=60000"
    with penstock.open(short, background=False) as broker:
        broker.create_queue("q")
        store = broker._store
        assert isinstance(store, SqlStore)
        database = store.database
        with pytest.raises(StorageFailed, match=r"nothing was changed.*statement_timeout_ms"):
            database.execute("SELECT pg_sleep(0.3)")
        with database.at_leisure():
            database.execute("SELECT pg_sleep(0.3)")
            # One that is made anew meanwhile has as long.
            postgres.cut()
            database.do(lambda: database.execute("SELECT pg_sleep(0.3)"), again=True)
        with pytest.raises(StorageFailed, match="statement_timeout_ms"):
            database.execute("SELECT pg_sleep(0.3)")
        with broker.view() as view:
            view._database.execute("SELECT pg_sleep(0.3)")  # type: ignore[attr-defined]
        assert_clean(broker)


def test_a_url_says_how_long_connecting_takes(url: str) -> None:
    told = "?connect_timeout=3&tcp_user_timeout=7000&keepalives_idle=4"
    with penstock.open(url + told, background=False) as broker:
        store = broker._store
        assert isinstance(store, SqlStore)
        info = store.database.connect().info.get_parameters()
        assert info["connect_timeout"] == "3"
        assert (info["tcp_user_timeout"], info["keepalives_idle"]) == ("7000", "4")


# --- served ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_whose_database_hangs(own_postgres: PostgresServer, tmp_path: Path) -> None:
    url = own_postgres.url(own_postgres.create()) + SHORT
    with ExitStack() as stack:
        server = Served(tmp_path / "server", "--store", url)
        stack.callback(server.close)
        client = stack.enter_context(penstock.connect(server.native, patience_ms=1_000))
        client.create_queue("q", lease_ms=600_000)
        got: list[str] = []
        for name, outage in OUTAGES.items():
            client.send("q", f"before {name}".encode())
            assert series(server)["penstock_queues"] == 1
            with outage(own_postgres, url):
                hang(server, client)
            wait_until(lambda: ask(server, "ready") == (200, "ready\n"))
            client.send("q", f"after {name}".encode())
            wait_until(lambda: take(client, got) and f"after {name}" in got)  # noqa: B023
            wait_until(lambda: "penstock_queues" in series(server))
    said = server.log.read_text()
    assert said.count("the store can't be used: the database does not answer") == 3, said
    assert said.count("the store can be used again, after") == 3, said
    assert "Traceback" not in said, said
    for name in OUTAGES:
        # What may have been stored was stored once: a client's publish has a dedup id.
        assert got.count(f"before {name}") == got.count(f"after {name}") == 1
    with penstock.open(url, background=False) as broker:
        assert_clean(broker)


def hang(server: Served, client: Client) -> None:
    """Ask for everything while the database does not answer."""
    verbs: list[Callable[[], object]] = [
        lambda: client.send("q", b"maybe"),
        lambda: client.claim("q"),
        lambda: client.stats("q"),
    ]
    sqs = server.sqs()
    with ThreadPoolExecutor(9) as threads:
        calls = [threads.submit(fails_in_time, verb) for verb in verbs * 2]
        wait_until(lambda: ask(server, "ready")[0] == 503)
        began = SECONDS()
        for _ in range(10):
            status, why = ask(server, "ready")
            assert status == 503
            assert re.fullmatch(r"not ready for \d+ s: the database does not answer: .+\n", why)
            found = series(server)
            assert (found["penstock_store_healthy"], "penstock_queues" in found) == (0, False)
        assert SECONDS() - began < LONG_S
        for each in calls:
            assert re.search("answer|was lost|was free", each.result())
    address = f"{server.url}/000000000000/q"
    with pytest.raises(ClientError) as refused:
        sqs.send_message(QueueUrl=address, MessageBody="maybe")
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503


def take(client: Client, got: list[str]) -> bool:
    with suppress(ServerUnreachable):
        got += [each.payload.decode() for each in client.claim("q", limit=99)]
    return True
