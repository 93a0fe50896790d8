"""Flight behind keys and TLS: who gets in, and who may do what."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest

import penstock
from penstock import InvalidInput, Message, NotAllowed
from penstock.errors import ServerUnreachable
from penstock.flight.client import FlightStore
from penstock.flight.protocol import (
    ActionTicket,
    CopyTicket,
    LogTicket,
    ReadCommand,
    SnapshotTicket,
    encode,
)
from penstock.server import running
from penstock.server.keys import add_key
from penstock.spark.source import read_options, write_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.server import Server

ROWS = pa.schema([("payload", pa.binary()), ("queue", pa.string())])
EVERYBODY = ("root", "sender", "worker", "viewer")


@pytest.fixture
def broker() -> Iterator[penstock.Broker]:
    with penstock.open("memory:", routing="pipeline") as opened:
        for name in ("orders", "orders-eu", "mail"):
            opened.create_queue(name)
        opened.publish([Message(b"x", {"queue": "orders"})])
        penstock.route_once(opened)
        yield opened


@pytest.fixture
def server(broker: penstock.Broker, keys: dict[str, str], tmp_path: Path) -> Iterator[Server]:
    with running(broker, flight="127.0.0.1:0", keys=tmp_path / "keys.toml") as started:
        yield started


def put(store: FlightStore, *queues: str | None) -> int:
    batch = pa.record_batch({"payload": [b"p"] * len(queues), "queue": queues}, schema=ROWS)
    return store.publish([batch]).published


def copy_of(store: FlightStore) -> None:
    held = store.hold_snapshot()
    try:
        parts = list(store.read(encode(CopyTicket(held.snapshot, section=0))))
        assert len(parts) > 1
    finally:
        store.drop_snapshot(held.snapshot)


# Verb, what it does with a store, and which keys may.
MATRIX: list[tuple[str, Callable[[FlightStore], Any], set[str]]] = [
    ("publish", lambda s: put(s, "orders", "orders-eu"), {"root", "sender"}),
    ("publish elsewhere", lambda s: put(s, "orders", "mail"), {"root"}),
    ("publish anywhere", lambda s: put(s, None), {"root"}),
    (
        "read a queue",
        lambda s: s.read_table("active", queue="orders"),
        {"root", "worker", "viewer"},
    ),
    ("read another", lambda s: s.read_table("done", queue="mail"), {"root", "viewer"}),
    ("read two", lambda s: s.read_table("active", queue=["orders", "mail"]), {"root", "viewer"}),
    ("read all", lambda s: s.read_table("active"), {"root", "viewer"}),
    ("read the log", lambda s: s.read_table("log"), {"root", "viewer"}),
    ("read queues", lambda s: s.read_table("queues", queue="orders"), {"root", "viewer"}),
    ("ticket", lambda s: list(s.read(LogTicket(0, 1, 2))), {"root", "viewer"}),
    ("info", lambda s: s.info(), {"root", "viewer"}),
    ("stats", lambda s: s.stats(), {"root", "viewer"}),
    ("offset", lambda s: s.offset_at(1), {"root", "viewer"}),
    ("log stats", lambda s: s.log_stats(), {"root", "viewer"}),
    ("filters", lambda s: s.filters(1), {"root", "viewer"}),
    ("route plan", lambda s: s.route_plan(), {"root", "viewer"}),
    ("backfill plan", lambda s: s.backfill_plan("orders"), {"root", "worker", "viewer"}),
    ("redrive", lambda s: s.redrive("orders"), {"root"}),
    ("trim", lambda s: s.trim("orders", state="done", before=1), {"root"}),
    ("sweep", lambda s: s.sweep(), {"root"}),
    ("collect", lambda s: s.collect([1]), {"root"}),
    ("take epoch", lambda s: s.take_epoch(), {"root"}),
    ("stage", lambda s: s.stage("s", [], log=0, begin=1, end=2), {"root"}),
    ("fill", lambda s: s.fill([], queue="orders", begin=1, end=2), {"root"}),
    ("drop", lambda s: s.drop_stages(["s"]), {"root"}),
    ("copy", copy_of, {"root"}),
]


@pytest.mark.parametrize(("verb", "act", "allowed"), MATRIX, ids=[each[0] for each in MATRIX])
def test_who_may_do_what(
    server: Server,
    keys: dict[str, str],
    verb: str,
    act: Callable[[FlightStore], Any],
    allowed: set[str],
) -> None:
    for name in EVERYBODY:
        store = FlightStore(server.location("flight"), token=keys[name])
        if name in allowed:
            act(store)
        else:
            with pytest.raises(NotAllowed, match=f"key '{name}' may not") as caught:
                act(store)
            assert keys[name].partition(":")[2] not in str(caught.value)


def test_a_publish_that_is_refused_stores_nothing(
    server: Server, broker: penstock.Broker, keys: dict[str, str]
) -> None:
    before = broker.store_stats().published_total
    with pytest.raises(NotAllowed):
        put(FlightStore(server.location("flight"), token=keys["sender"]), "orders", "mail")
    assert broker.store_stats().published_total == before


@pytest.mark.parametrize("token", ["", "root:wrong", "nobody:x", "nonsense"])
def test_who_has_no_key_gets_nowhere(server: Server, keys: dict[str, str], token: str) -> None:
    store = FlightStore(server.location("flight"), token=token)
    for _, act, _ in MATRIX:
        with pytest.raises(NotAllowed, match=r"wants authorization: Bearer ID:SECRET"):
            act(store)


def test_snapshots_are_their_owners(server: Server, keys: dict[str, str]) -> None:
    viewer, root = (
        FlightStore(server.location("flight"), token=keys[name]) for name in ("viewer", "root")
    )
    ticket = viewer.plan_read("active").tickets[0]
    assert sum(batch.num_rows for batch in viewer.read(ticket)) == 1
    with pytest.raises(NotAllowed, match="key 'root' did not ask for this snapshot"):
        list(root.read(ticket))


def test_snapshots_that_readers_share_show_a_key_its_queues(
    server: Server, keys: dict[str, str]
) -> None:
    worker, viewer, root = (
        FlightStore(server.location("flight"), token=keys[name])
        for name in ("worker", "viewer", "root")
    )
    held = viewer.hold_snapshot().snapshot
    run = worker.check_read("active", queue="orders")
    with pytest.raises(NotAllowed):
        worker.check_read("active")

    def tickets(table: str, queue: str | None) -> tuple[SnapshotTicket, ActionTicket]:
        command = ReadCommand(table, queue=queue)
        return SnapshotTicket(held, 0, command), ActionTicket("frame", "1", 0, command, run)

    of_snapshot, of_action = tickets("active", "orders")
    for store, ticket in ((viewer, of_snapshot), (viewer, of_action), (worker, of_action)):
        assert sum(batch.num_rows for batch in store.read(ticket)) == 1
    for table, queue in (("active", "mail"), ("active", None), ("log", None)):
        with pytest.raises(NotAllowed):
            list(worker.read(tickets(table, queue)[1]))
    for call in (root.hold_snapshot, root.drop_snapshot):
        with pytest.raises(NotAllowed, match="did not ask for this snapshot"):
            call(held)
    with pytest.raises(NotAllowed, match="did not ask for this snapshot"):
        list(root.read(of_snapshot))


def test_a_spool_is_of_the_key_that_made_it(server: Server, keys: dict[str, str]) -> None:
    sender, root = (
        FlightStore(server.location("flight"), token=keys[name]) for name in ("sender", "root")
    )
    rows = pa.record_batch({"payload": [b"p"], "queue": ["orders"]}, schema=ROWS)
    elsewhere = pa.record_batch({"payload": [b"p"], "queue": ["mail"]}, schema=ROWS)
    (part,) = sender.spool("mine", "part", [rows])
    with pytest.raises(NotAllowed, match="publish"):
        sender.spool("mine", "other", [elsewhere])
    for call in (
        lambda: root.spool("mine", "part", [rows]),
        lambda: root.publish_part("mine", part),
        lambda: root.drop_spool("mine"),
    ):
        with pytest.raises(NotAllowed, match="did not make this spool"):
            call()
    assert sender.publish_part("mine", part).published == 1
    assert sender.drop_spool("mine")


def test_foreign_clients_log_in_as_flight_has_it(server: Server, keys: dict[str, str]) -> None:
    name, _, secret = keys["viewer"].partition(":")
    with fl.FlightClient(server.location("flight")) as client:
        header = client.authenticate_basic_token(name, secret)
        options = fl.FlightCallOptions(headers=[header])
        assert list(client.do_action(fl.Action("info", b""), options))
        with pytest.raises(fl.FlightUnauthenticatedError):
            client.authenticate_basic_token(name, "wrong")
        with pytest.raises(fl.FlightUnauthenticatedError):
            list(client.do_action(fl.Action("info", b"")))


def test_unknown_actions_and_bad_commands_are_told_apart(
    server: Server, keys: dict[str, str]
) -> None:
    options = fl.FlightCallOptions(headers=[(b"authorization", f"Bearer {keys['root']}".encode())])
    with fl.FlightClient(server.location("flight")) as client:
        with pytest.raises(fl.FlightServerError, match=r"^InvalidInput: no action"):
            list(client.do_action(fl.Action("nope", b""), options))
        with pytest.raises(fl.FlightServerError, match=r"^InvalidInput: trim"):
            list(client.do_action(fl.Action("trim", b"{"), options))
        with pytest.raises(fl.FlightServerError, match=r"^InvalidInput: ticket"):
            client.do_get(fl.Ticket(b"{}"), options).read_all()


def test_the_token_travels_with_the_store_and_is_not_shown(
    server: Server, keys: dict[str, str]
) -> None:
    store = FlightStore(server.location("flight"), token=keys["root"])
    copy = pickle.loads(pickle.dumps(store))
    assert copy.location.access == store.location.access
    assert copy.info() == store.info()
    secret = keys["root"].partition(":")[2]
    assert secret not in repr(store)
    assert secret not in f"{store.location} {store.location!r}"


def test_the_token_comes_from_the_environment(
    server: Server, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", keys["viewer"])
    assert FlightStore(server.location("flight")).info().store_id


def test_spark_options_carry_the_token(
    server: Server, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"location": server.location("flight"), "table": "log"}
    options = read_options({**given, "token": keys["viewer"]})
    sent = pickle.loads(pickle.dumps(options))
    assert FlightStore(sent.location).info().store_id
    assert keys["viewer"] not in repr(options)
    monkeypatch.setenv("PENSTOCK_TOKEN", keys["root"])
    assert FlightStore(write_options({"location": given["location"]}).location).sweep().total == 0


def test_calls_are_counted(server: Server, keys: dict[str, str], wait_until: Any) -> None:
    FlightStore(server.location("flight"), token=keys["viewer"]).info()
    with pytest.raises(NotAllowed):
        FlightStore(server.location("flight"), token=keys["viewer"]).sweep()
    with pytest.raises(NotAllowed):
        FlightStore(server.location("flight"), token="no:body").info()
    base = 'penstock_request_seconds_count{operation="%s",outcome="%s",protocol="flight"} 1.0'
    rows = [("info", "ok"), ("sweep", "NotAllowed"), ("do_action", "NotAllowed")]
    # A call is counted when it is over, which its client may know a moment earlier.
    wait_until(lambda: all(base % row in server.metrics.page().decode() for row in rows))


# --- TLS ----------------------------------------------------------------------------------------


def tls_settings(certs: Any, *, mutual: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"tls_certificate": certs.certificate, "tls_key": certs.key}
    return {**settings, **({"tls_client_ca": certs.ca} if mutual else {})}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.limits.MAX_UNREACHABLE_MS", 0)


@pytest.mark.usefixtures("impatient")
def test_tls(broker: penstock.Broker, certs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tls_settings(certs, mutual=False)
    with running(broker, flight="127.0.0.1:0", **settings) as server:
        place = server.location("flight")
        assert place.startswith("grpc+tls://127.0.0.1:")
        assert FlightStore(place, ca=certs.ca).info().store_id
        with pytest.raises(ServerUnreachable):
            FlightStore(place).info()
        with pytest.raises(ServerUnreachable):
            FlightStore(place.replace("grpc+tls", "grpc")).info()
        monkeypatch.setenv("PENSTOCK_CA", str(certs.ca))
        assert FlightStore(place).info().store_id


@pytest.mark.usefixtures("impatient")
def test_mutual_tls(broker: penstock.Broker, certs: Any) -> None:
    settings = tls_settings(certs, mutual=True)
    with running(broker, flight="127.0.0.1:0", **settings) as server:
        place = server.location("flight")
        own = {"certificate": certs.client_certificate, "key": certs.client_key}
        assert FlightStore(place, ca=certs.ca, **own).info().store_id
        with pytest.raises(ServerUnreachable):
            FlightStore(place, ca=certs.ca).info()


def test_files_of_tls_that_cant_be_used(broker: penstock.Broker, certs: Any) -> None:
    settings: dict[str, Any] = {"tls_certificate": certs.certificate, "tls_key": certs.client_key}
    with (
        pytest.raises(InvalidInput, match=r"TLS: .* can't be used"),
        running(broker, flight="127.0.0.1:0", **settings),
    ):
        pass
    with pytest.raises(InvalidInput, match=r"TLS: not-here.pem can't be read"):
        FlightStore("grpc+tls://127.0.0.1:1", ca="not-here.pem")


def test_who_says_which_messages_a_queue_gets_administers_all_queues(
    broker: penstock.Broker, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    token = f"team:{add_key(path, 'team', ['admin:orders*', 'consume:orders*'])}"
    with running(broker, flight="127.0.0.1:0", keys=path) as server:
        store = FlightStore(server.location("flight"), token=token)
        store.redrive("orders")
        with pytest.raises(NotAllowed, match="key 'team' may not admin on all queues"):
            store.fill([], queue="orders-eu", begin=1, end=2)
    assert broker.stats("orders-eu").available == 0
