from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from tests.ports import free_ports
from tests.waiting import wait_until

import penstock
from penstock import InvalidInput, InvalidUrl, Message, QueueNotFound, limits
from penstock.errors import ServerUnreachable
from penstock.flight import protocol, read
from penstock.flight.client import FlightStore
from penstock.server import in_process_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.flight.conftest import Kept

    from penstock.server import FlightListener

ROOT = Path(__file__).parents[2]
PAYLOADS = pa.schema([("payload", pa.binary()), ("dedup_id", pa.string())])


class Served:
    """`penstock serve` as a process of its own."""

    def __init__(self, place: Path, port: int = 0) -> None:
        self.port_file = place / "port"
        self.port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "penstock", "serve", "--store", f"rocksdb:{place}/db"]
        command += ["--flight", f"127.0.0.1:{port}", "--port-file", str(self.port_file)]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wait_until(lambda: self.port_file.exists() or self.process.poll() is not None)
        assert self.port_file.exists(), self.finish()
        self.port = int(self.port_file.read_text())
        self.store = FlightStore(f"grpc://127.0.0.1:{self.port}")

    def finish(self) -> str:
        return self.process.communicate(timeout=60)[0]

    def kill(self) -> None:
        self.process.kill()
        self.finish()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path)
    yield server
    if server.process.poll() is None:
        server.kill()


def publish(store: FlightStore, *ids: str) -> int:
    batch = pa.record_batch(
        {"payload": [each.encode() for each in ids], "dedup_id": list(ids)}, schema=PAYLOADS
    )
    return store.publish([batch]).published


# --- a process ----------------------------------------------------------------------------------


def test_sigterm_ends_it_in_order(served: Served, tmp_path: Path) -> None:
    assert publish(served.store, "a", "b") == 2
    served.process.send_signal(signal.SIGTERM)
    said = served.finish()
    assert served.process.returncode == 0, said
    assert "stopping" in said
    assert said.endswith("stopped\n")
    assert not served.port_file.exists()
    with penstock.open(f"rocksdb:{tmp_path}/db") as broker:
        assert broker.store_stats().published_total == 2


def test_what_was_published_outlives_a_kill(tmp_path: Path) -> None:
    served = Served(tmp_path, free_ports(1)[0])
    try:
        assert publish(served.store, "a", "b", "c") == 3
        plan = served.store.plan_read("log")
    finally:
        served.kill()
    again = Served(tmp_path, served.port)
    try:
        # The same client, on the same port: it connects anew by itself.
        assert served.store.read_table("log").num_rows == 3
        assert served.store.info() == again.store.info()
        with pytest.raises(InvalidInput, match="has expired, or the server was restarted"):
            list(served.store.read(plan.tickets[0]))
        with pytest.raises(InvalidInput, match=r"is not here \(server restarted\?\)"):
            served.store.commit_stages(["s"])
        assert publish(served.store, "c", "d") == 2
        assert served.store.read_table("log").num_rows == 4
    finally:
        again.kill()


def test_a_store_that_is_open_elsewhere(served: Served, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"is open in process {served.process.pid}"):
        Served(tmp_path)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:", ":80", "127.0.0.1:99999"])
def test_wrong_addresses(address: str) -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--store", "memory:"]
    ended = subprocess.run(
        [*command, "--flight", address],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert "is not an address such as" in ended.stderr


def test_a_port_that_is_taken(broker: penstock.Broker, server: FlightListener) -> None:
    with pytest.raises(InvalidInput, match="can't listen on"):
        in_process_server(broker, port=server.port)


# --- stopping and coming back -------------------------------------------------------------------


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold every read after its first batch until this is set.

    A client that does not read holds it up as well, but nobody knows how much fits into buffers.
    """
    let_on = threading.Event()

    def held(*args: Any) -> Iterator[pa.RecordBatch]:
        batches = iter(read(*args))
        yield next(batches)
        let_on.wait(600)
        yield from batches

    monkeypatch.setattr("penstock.flight.service.read", held)
    yield let_on
    let_on.set()


def test_closing_waits_for_a_read(broker: penstock.Broker, go_on: threading.Event) -> None:
    broker.publish(Message(b"x" * 500_000) for _ in range(100))
    server = in_process_server(broker)
    store = FlightStore(server.location)
    reader = store.read(store.plan_read("log", payload=True).tickets[0])
    count = next(reader).num_rows
    assert count < 100
    closing = threading.Thread(target=server.close, kwargs={"grace_ms": 600_000})
    closing.start()
    closing.join(0.3)
    assert closing.is_alive()
    go_on.set()
    lost = ""
    try:
        count += sum(batch.num_rows for batch in reader)
    except ServerUnreachable as error:
        # The server has sent all of it and closed the connection. If something of the client's was
        # still under way, that resets it, and what the client has not read yet is lost.
        lost = str(error)
    assert count == 100 or "reset by peer" in lost
    closing.join(60)
    assert not closing.is_alive()
    assert broker.log_stats().end == 101


def test_a_read_that_never_ends_is_ended(broker: penstock.Broker, go_on: threading.Event) -> None:
    broker.publish(Message(b"x" * 500_000) for _ in range(100))
    server = in_process_server(broker)
    store = FlightStore(server.location)
    reader = store.read(store.plan_read("log", payload=True).tickets[0])
    assert next(reader).num_rows < 100
    closing = threading.Thread(target=server.close, kwargs={"grace_ms": 300})
    closing.start()
    # It gives up on the read before it ends, and does not wait for whoever reads to notice.
    closing.join(60)
    assert not closing.is_alive()
    go_on.set()
    with pytest.raises(InvalidInput, match="closed while it was being read"):
        list(reader)


def test_a_client_waits_for_a_server_to_come_back(
    broker: penstock.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.flight.client.BACKOFF_MS", (100,))
    monkeypatch.setattr(limits, "MAX_UNREACHABLE_MS", 60_000)
    server = in_process_server(broker, port=free_ports(1)[0])
    store = FlightStore(server.location)
    before = store.info()
    port = server.port
    server.close()
    server.close()
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(store.info()))
    asking.start()
    asking.join(0.3)
    assert not found
    with in_process_server(broker, port=port):
        asking.join(60)
        assert [each.store_id for each in found] == [before.store_id]
        assert found[0].run != before.run


def test_a_server_that_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.limits.MAX_UNREACHABLE_MS", 0)
    store = FlightStore("grpc://127.0.0.1:9")
    with pytest.raises(ServerUnreachable):
        store.info()
    with pytest.raises(ServerUnreachable):
        publish(store, "a")


# --- the client ---------------------------------------------------------------------------------


def test_a_store_travels_by_pickle(broker: penstock.Broker, store: FlightStore) -> None:
    store.info()
    copy = pickle.loads(pickle.dumps(store))
    assert copy.info() == store.info()
    assert repr(copy) == f"FlightStore({store.location!r})"
    assert len(pickle.dumps(store)) < 200


def test_info_says_which_store(broker: penstock.Broker, store: FlightStore) -> None:
    info = store.info()
    assert info.version == penstock.__version__
    assert (info.design, info.routing, info.protocol) == (broker.info().design, "inline", 4)
    assert info.store_id == store.plan_read("log").facts.store_id
    assert store.log_stats() == broker.log_stats()
    assert store.sweep().total == 0


def test_a_client_of_another_protocol_is_refused_in_one_line(
    store: FlightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "PROTOCOL", 5)
    text = "the client speaks version 5 of the Flight protocol, this server version 4: install"
    reads = (
        store.info,
        lambda: store.plan_read("log"),
        lambda: list(store.read_log(0, 0, 1, columns=["offset"])),
    )
    for call in reads:
        with pytest.raises(InvalidInput, match=text):
            call()
    rows = pa.table({"payload": [b"x"]})
    with pytest.raises(InvalidInput, match=text):
        store.publish(rows.to_batches())


def test_locations_are_checked() -> None:
    with pytest.raises(InvalidUrl, match="grpc://HOST:8815"):
        FlightStore("rocksdb:./data")


# --- what a foreign client sees -----------------------------------------------------------------


@pytest.fixture
def client(server: FlightListener) -> Iterator[fl.FlightClient]:
    with fl.FlightClient(server.location) as opened:
        yield opened


@pytest.fixture
def kept_client(kept: Kept) -> Iterator[fl.FlightClient]:
    with fl.FlightClient(kept.location) as opened:
        yield opened


def test_errors_begin_with_their_name(client: fl.FlightClient) -> None:
    action = fl.Action("trim", b'{"queue": "q", "state": "done", "before": 1}')
    with pytest.raises(fl.FlightServerError, match=r"^QueueNotFound: no queue named 'q'"):
        list(client.do_action(action))


@pytest.mark.parametrize(
    ("name", "body", "match"),
    [
        ("nope", b"", "no action 'nope'; there are info"),
        ("trim", b"", "missing required field `queue`"),
        ("trim", b"{", "trim: "),
        ("trim", b"\xff", "trim: "),
        ("info", b'{"verbose": true}', "unknown field `verbose`"),
        ("filters", b'{"offset": "1"}', r"Expected `int`, got `str`"),
        ("filters", b'{"offset": -1}', "offset is -1"),
        ("route_plan", b'{"max_offsets": 0}', "max_offsets"),
    ],
)
def test_wrong_actions(kept_client: fl.FlightClient, name: str, body: bytes, match: str) -> None:
    with pytest.raises(fl.FlightServerError, match=rf"^InvalidInput: .*{match}"):
        list(kept_client.do_action(fl.Action(name, body)))


@pytest.mark.parametrize("body", [b"", b"{}", b'{"table": "done"}', b"\x00", b'{"table": "log"}'])
def test_wrong_tickets(kept_client: fl.FlightClient, body: bytes) -> None:
    with pytest.raises(fl.FlightServerError, match=r"^InvalidInput: ticket: "):
        kept_client.do_get(fl.Ticket(body)).read_all()
    for part in (1, -1):
        info = kept_client.get_flight_info(fl.FlightDescriptor.for_command(b'{"table": "queues"}'))
        other = info.endpoints[0].ticket.ticket.replace(b'"part":0', b'"part":%d' % part)
        with pytest.raises(fl.FlightServerError, match=r"part is -?1; allowed are 0 to 0"):
            kept_client.do_get(fl.Ticket(other)).read_all()


def test_wrong_commands(client: fl.FlightClient) -> None:
    for body in (b"", b"{}", b'{"table": 1}', b'{"table": "log", "what": 1}'):
        with pytest.raises(fl.FlightServerError, match=r"^InvalidInput: "):
            client.get_flight_info(fl.FlightDescriptor.for_command(body))
    with pytest.raises(fl.FlightServerError, match=r"^InvalidInput: "):
        client.get_flight_info(fl.FlightDescriptor.for_path("log"))
    for body in (b"{}", b'{"op": "nope"}', b'{"op": "stage", "stage": "s"}'):
        writer, _ = client.do_put(fl.FlightDescriptor.for_command(body), PAYLOADS)
        with pytest.raises(fl.FlightServerError, match=r"^InvalidInput: command: "):
            writer.close()
    body = b'{"op": "stage", "stage": "s", "log": 0, "begin": 1, "end": 2, "rows": 0}'
    writer, _ = client.do_put(fl.FlightDescriptor.for_command(body), PAYLOADS)
    with pytest.raises(fl.FlightServerError, match="a stage has the columns offset, queue"):
        writer.close()


def test_actions_are_listed(client: fl.FlightClient, store: FlightStore) -> None:
    names = [each.type for each in client.list_actions()]
    page = (ROOT / "docs" / "flight.md").read_text()
    for name in names:
        assert f"`{name}`" in page, f"docs/flight.md does not tell of {name}"
    with pytest.raises(QueueNotFound):
        store.redrive("nope")


def test_a_fault_of_ours_is_not_told_to_clients(
    broker: penstock.Broker,
    store: FlightStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(broker, "log_stats", fail)
    with pytest.raises(fl.FlightInternalError, match="ZeroDivisionError: oops"):
        store.log_stats()
    assert "a Flight call failed" in caplog.text


def test_importing_penstock_loads_no_arrow() -> None:
    code = "import penstock, penstock.cli.main, sys; sys.exit('pyarrow' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0
