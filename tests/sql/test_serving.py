"""Servers on one database: clients of each see what clients of the other do."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.clients.process import Served, pause
from tests.native.test_conformance import _Served
from tests.noting import notes_of
from tests.sql import test_faults as faults
from tests.sql.test_conformance import OnPostgres
from tests.waiting import wait_until

import penstock
from penstock import Message, QueueNotFound, StorageFailed
from penstock.server import running
from penstock.testing.auditor import Kind, Note, audit
from penstock.testing.checking import assert_clean
from penstock.testing.conformance import BrokerConformance
from penstock.testing.routing import RoutingConformance
from penstock.testing.suite.delivery import DeliverySuite
from penstock.testing.suite.settling import SettlingSuite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.sql.postgres import PostgresServer

    from penstock.client import Client

# Servers set their clocks by the database's, the test's clients do not.
CLOCKS_MS = 25


class TestServed(_Served, OnPostgres, DeliverySuite, SettlingSuite):
    """What is claimed and settled, through a client, a server and a database."""

    # A function can't be sent.
    test_redrive_by_function = None  # type: ignore[assignment]


@pytest.mark.soak
class TestServedWhole(_Served, OnPostgres, BrokerConformance):
    """The whole suite."""

    # A broker that is served always has its sweeper.
    test_waiting_works_without_a_sweeper = None  # type: ignore[assignment]
    # A function can't be sent.
    test_redrive_by_function = None  # type: ignore[assignment]
    # The protocol asks for no messages by their ids in these.
    test_purge_failed_messages_by_ids = None  # type: ignore[assignment]
    test_browse_one_message_in_every_state = None  # type: ignore[assignment]
    test_browse_one_message_after_retention_and_a_move = None  # type: ignore[assignment]


@pytest.mark.soak
class TestServedRouting(_Served, OnPostgres, RoutingConformance):
    """The suite begins with one log, and changes the number."""

    options = "?logs=1"


def test_messages_are_pushed(url: str) -> None:
    """A joint change on a thread claims for subscribers in a change of its own."""
    with (
        running(url, native="127.0.0.1:0") as server,
        penstock.connect(server.location("native")) as client,
    ):
        client.create_queue("q")
        consumer = client.consume("q", prefetch=10, wait_ms=60_000)
        client.publish([Message(b"%d" % n, {"queue": "q"}) for n in range(30)])
        got = []
        for _ in range(30):
            delivery = next(consumer)
            delivery.ack()
            got.append(int(delivery.payload))
        assert consumer.flush() == []
        assert sorted(got) == list(range(30))
        # Those that come later wake it.
        client.send("q", b"30")
        assert next(consumer).ack().result()


def test_messages_of_another_process_are_pushed_after_a_claim_that_found_few(url: str) -> None:
    with (
        penstock.open(url) as other,
        running(url, native="127.0.0.1:0") as server,
        penstock.connect(server.location("native")) as client,
    ):
        other.create_queue("q")
        other.publish([Message(b"%d" % n, {"queue": "q"}) for n in range(3)])
        with client.consume("q", prefetch=50, wait_ms=20_000) as consumer:
            for _ in range(3):
                assert next(consumer).ack().result()
            other.send("q", b"late")
            assert next(consumer).payload == b"late"


class Two:
    """Two servers on one database, and a native client of each."""

    def __init__(self, place: Path, url: str, stack: ExitStack) -> None:
        self.url = url
        self.servers = [
            Served(place / name, "--store", url, "--flight", "127.0.0.1:0")
            for name in ("first", "second")
        ]
        for server in self.servers:
            stack.callback(server.close)
        self.first, self.second = (
            stack.enter_context(penstock.connect(server.native)) for server in self.servers
        )


@pytest.fixture(scope="module")
def two(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    name = postgres.create()
    with ExitStack() as stack:
        found = Two(tmp_path_factory.mktemp("two"), postgres.url(name), stack)
        yield found
    for server in found.servers:
        assert server.process.returncode == 0, server.log.read_text()
        assert not server.complaints()
    with penstock.open(found.url, background=False) as broker:
        assert_clean(broker)
    postgres.drop(name)


def ask(server: Served, page: str) -> tuple[int, str]:
    """Ask for a page of a server, which may refuse."""
    try:
        with urllib.request.urlopen(f"{server.url}/{page}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def series(server: Served) -> dict[str, float]:
    """Read the page of metrics."""
    lines = [line.rpartition(" ") for line in ask(server, "metrics")[1].splitlines()]
    return {name: float(value) for name, _, value in lines if not name.startswith("#")}


def parked(server: Served) -> int:
    """How many claims wait at a server."""
    return int(series(server)["penstock_parked_claims"])


# --- native, SQS ----------------------------------------------------------------------------------


def test_published_at_one_claimed_at_the_other(two: Two) -> None:
    two.first.create_queue("native", lease_ms=60_000)
    ids = two.first.publish(
        [Message(b"%d" % n, {"queue": "native", "n": n}, group=f"{n}") for n in range(20)]
    )
    deliveries = two.second.claim("native", limit=100)
    assert sorted(each.message_id for each in deliveries) == ids
    assert {each.payload for each in deliveries} == {b"%d" % n for n in range(20)}
    # Receipts are the store's, not the server's.
    assert all(two.first.ack([each.receipt for each in deliveries[:10]]))
    assert all(two.second.ack([each.receipt for each in deliveries[10:]]))
    assert two.first.ack([deliveries[0].receipt])[0].status == "stale"
    assert two.first.stats("native").done == two.second.stats("native").done == 20
    two.second.delete_queue("native")

    def gone() -> bool:
        try:
            return bool(two.first.claim("native"))
        except QueueNotFound:
            return True

    wait_until(gone, why="every process looks at least every second")


def test_filters_that_one_changes_are_the_others(two: Two) -> None:
    two.first.create_queue("filters", filter="kind = 'a'")
    ids = two.second.publish([Message(b"", {"kind": "a"}), Message(b"", {"kind": "b"})])
    two.first.update_queue("filters", filter="kind = 'b'")
    ids += two.second.publish([Message(b"", {"kind": "a"}), Message(b"", {"kind": "b"})])
    got = two.second.claim("filters", limit=9)
    assert sorted(each.message_id for each in got) == [ids[0], ids[3]]
    two.first.delete_queue("filters")


def test_boto3_at_the_other(two: Two) -> None:
    first, second = (server.sqs() for server in two.servers)
    made = first.create_queue(QueueName="jobs", Attributes={"VisibilityTimeout": "60"})
    assert made["QueueUrl"] == f"{two.servers[0].url}/000000000000/jobs"
    url = second.get_queue_url(QueueName="jobs")["QueueUrl"]
    first.send_message(QueueUrl=made["QueueUrl"], MessageBody="from the first")
    two.first.send("jobs", b"native")
    got: dict[str, str] = {}
    while len(got) < 2:
        answer = second.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=5)
        assert answer.get("Messages"), "nothing came"
        got |= {each["Body"]: each["ReceiptHandle"] for each in answer["Messages"]}
    assert set(got) == {"from the first", "native"}
    for receipt in got.values():
        first.delete_message(QueueUrl=made["QueueUrl"], ReceiptHandle=receipt)
    second.send_message(QueueUrl=url, MessageBody="to a native client")
    (delivery,) = two.first.claim("jobs", wait_ms=10_000)
    assert delivery.payload == b"to a native client"
    assert two.second.release([delivery.receipt], delay_ms=0)[0].status == "retrying"
    (again,) = first.receive_message(QueueUrl=made["QueueUrl"], WaitTimeSeconds=5)["Messages"]
    first.delete_message(QueueUrl=made["QueueUrl"], ReceiptHandle=again["ReceiptHandle"])
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    depth = second.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
    assert depth == dict.fromkeys(names, "0")


@pytest.mark.parametrize("how", ["native", "sqs"])
def test_a_long_poll_at_one_is_answered_by_a_publish_at_the_other(two: Two, how: str) -> None:
    queue = f"poll-{how}"
    two.second.create_queue(queue)
    sqs = two.servers[0].sqs()
    address = sqs.get_queue_url(QueueName=queue)["QueueUrl"]

    def wait() -> str:
        if how == "native":
            (delivery,) = two.first.claim(queue, wait_ms=20_000)
            return delivery.payload.decode()
        answer = sqs.receive_message(QueueUrl=address, WaitTimeSeconds=20)
        return str(answer["Messages"][0]["Body"])

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        wait_until(lambda: parked(two.servers[0]), why="the claim waits")
        pause(0.3)
        assert not waiting.done()
        began = time.perf_counter()
        two.second.send(queue, b"at last")
        assert waiting.result(30) == "at last"
        # Found by looking, ten times a second; a busy machine is given time.
        assert time.perf_counter() - began < 8


def test_many_polls_at_both_get_each_message_once(two: Two) -> None:
    two.first.create_queue("polls")

    def wait(client: Client) -> list[int]:
        return [each.message_id for each in client.claim("polls", wait_ms=20_000)]

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(wait, client) for client in (two.first, two.second) * 4]
        wait_until(lambda: sum(map(parked, two.servers)) == 8, why="the claims wait")
        ids = two.second.publish([Message(b"", {"queue": "polls"})] * 8)
        got = [each for answer in waiting for each in answer.result(30)]
    assert sorted(got) == ids


# --- Flight ---------------------------------------------------------------------------------------


def test_flight_of_one_shows_what_clients_of_the_other_did(two: Two) -> None:
    pytest.importorskip("pyarrow")
    from penstock.flight.client import FlightStore  # noqa: PLC0415

    two.first.create_queue("flown", lease_ms=60_000)
    ids = two.first.publish([Message(b"x" * n, {"queue": "flown"}) for n in range(30)])
    deliveries = two.first.claim("flown", limit=12)
    two.first.ack([each.receipt for each in deliveries[:5]])
    store = FlightStore(f"grpc://127.0.0.1:{two.servers[1].ports['flight']}")
    active, done = (
        store.read_table(table, queue="flown").to_pylist() for table in ("active", "done")
    )
    states = {row["message_id"]: row["state"] for row in active}
    assert {id_ for id_, state in states.items() if state == "in_flight"} == {
        each.message_id for each in deliveries[5:]
    }
    ended = sorted(row["message_id"] for row in done)
    assert ended == sorted(each.message_id for each in deliveries[:5])
    assert sorted([*states, *ended]) == ids


# --- kill -9 --------------------------------------------------------------------------------------


def lenient(notes: Path) -> None:
    """Have leases end a little earlier in what was noted: clocks differ by some milliseconds."""
    for queue in faults.QUEUES:
        path = notes.with_name(f"{notes.name}.{queue}")
        written = [
            msgspec.structs.replace(each, deadline_ms=max(0, each.deadline_ms - CLOCKS_MS))
            for each in notes_of(path)
        ]
        path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in written))


@pytest.mark.slow
def test_a_server_that_is_killed_under_load(own_postgres: PostgresServer, tmp_path: Path) -> None:
    url, notes = own_postgres.url(own_postgres.create()), tmp_path / "notes"
    with ExitStack() as stack:
        stays = Served(tmp_path / "stays", "--store", url)
        stack.callback(stays.close)
        stack.enter_context(faults.worker(stays.native, notes, "stays"))
        port = 0
        for number in range(2):
            # The second takes the place of the first, whose clients find it by themselves.
            dies = Served(
                tmp_path / f"dies-{number}", "--store", url, "--native", f"127.0.0.1:{port}"
            )
            stack.callback(dies.close)
            if not number:
                port = dies.ports["native"]
                stack.enter_context(faults.worker(dies.native, notes, "dies"))
            faults.wait_for_acks(notes, 40)
            dies.process.kill()
            dies.process.wait()
            # Whatever it held comes back, and the clients of the other go on.
            faults.wait_for_acks(notes, 40)
        assert stays.process.poll() is None
        assert not stays.complaints()
    lenient(notes)
    faults.judge(url, notes)
    assert published_by(notes, "stays") > 0 < published_by(notes, "dies")


def published_by(notes: Path, name: str) -> int:
    return sum(
        note.kind.value == "published" and f"-{name}-" in note.body
        for queue in faults.QUEUES
        for note in notes_of(notes.with_name(f"{notes.name}.{queue}"))
    )


@pytest.mark.slow
def test_a_database_that_restarts_under_a_server(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url, notes = own_postgres.url(own_postgres.create()), tmp_path / "notes"
    with ExitStack() as stack:
        server = Served(tmp_path / "server", "--store", url)
        stack.callback(server.close)
        stack.enter_context(faults.worker(server.native, notes, "only"))
        faults.wait_for_acks(notes, 20)
        own_postgres.stop()
        pause(0.5)
        own_postgres.start()
        faults.wait_for_acks(notes, 20)
        assert server.process.poll() is None
    lenient(notes)
    faults.judge(url, notes)


def test_a_server_answers_others_while_the_database_is_away(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    # The server takes any password; it is not for whoever reads what the process says.
    url = own_postgres.url(own_postgres.create()).replace("postgres@", "postgres:geheim@")
    with ExitStack() as stack:
        server = Served(tmp_path / "server", "--store", url)
        stack.callback(server.close)
        client = stack.enter_context(penstock.connect(server.native))
        client.create_queue("q")
        own_postgres.stop()
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(client.send, "q", b"x")
            # Known by the first thing that it does in vain, such as the sweep of each second.
            wait_until(lambda: ask(server, "ready")[0] == 503)
            assert "the database does not answer: connection" in ask(server, "ready")[1]
            # Others are answered, although the verb that waits has the store.
            assert ask(server, "health") == (200, "alive\n")
            found = series(server)
            assert (found["penstock_store_healthy"], "penstock_queues" in found) == (0, False)
            own_postgres.start()
            # It waits for about ten seconds, which a slow machine may have needed.
            with suppress(StorageFailed):
                sending.result(60)
        wait_until(lambda: ask(server, "ready") == (200, "ready\n"))
        # A page is kept for a second.
        wait_until(lambda: "penstock_queues" in series(server))
        found = series(server)
        assert found["penstock_store_healthy"] == found["penstock_queues"] == 1
        assert found["penstock_reconnects_total"] > 0
        assert found["penstock_statements_total"] > 10
        assert {"penstock_collisions_total", "penstock_pointers_collected_total"} <= set(found)
        client.send("q", b"x")
        (delivery,) = client.claim("q", wait_ms=10_000)
        assert delivery.payload == b"x"
    said = server.log.read_text()
    assert "serving postgresql://postgres:...@127.0.0.1" in said
    assert "geheim" not in said


def test_the_judge_of_these_tests_is_not_too_lenient(tmp_path: Path) -> None:
    """Two leases that overlap by more than clocks differ are found."""
    notes: list[Any] = [
        Note(kind=Kind.PUBLISHING, at_ms=0, body="b"),
        Note(kind=Kind.PUBLISHED, at_ms=1, body="b", message_id=1),
        *(
            Note(
                kind=Kind.DELIVERED,
                at_ms=at_ms + 1,
                began_at_ms=at_ms,
                body="b",
                message_id=1,
                receipt=f"r{at_ms}",
                deadline_ms=at_ms + 100,
                attempts=attempts,
            )
            for attempts, at_ms in enumerate((1_000, 1_000 + 100 - CLOCKS_MS - 20), 1)
        ),
    ]
    path = tmp_path / "notes"
    for queue in faults.QUEUES:
        path.with_name(f"notes.{queue}").write_bytes(
            b"".join(msgspec.json.encode(each) + b"\n" for each in notes)
        )
    lenient(path)
    found = audit(
        notes_of(path.with_name("notes.standard")),
        in_queue=[(1, "b")], settled=[], fifo=False,
    )  # fmt: skip
    assert [each.what for each in found] == ["two leases"]
