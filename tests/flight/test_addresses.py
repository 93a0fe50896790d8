"""Flight clients that name several servers, and files of TLS in the URL."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.ports import free_ports
from tests.server.conftest import issue

import penstock
from penstock import limits
from penstock.errors import InvalidUrl, ServerUnreachable
from penstock.flight.client import FlightStore
from penstock.flight.listener import in_process_server
from penstock.flight.location import locate
from penstock.server import running
from penstock.spark.sessions import place_of
from penstock.spark.source import read_options

if TYPE_CHECKING:
    from pathlib import Path

ATTRIBUTES = pa.array([[("queue", "q")]] * 2, pa.map_(pa.string(), pa.string()))
ROWS = pa.record_batch({"payload": [b"1", b"2"], "attributes": ATTRIBUTES})


def test_the_first_is_down() -> None:
    (nobody,) = free_ports(1)
    with penstock.open("memory:") as broker, in_process_server(broker) as server:
        broker.create_queue("q")
        store = FlightStore(f"grpc://127.0.0.1:{nobody},127.0.0.1:{server.port}")
        # Rows without dedup ids are sent once: to a server that is there.
        assert store.publish([ROWS]).published == 2
        assert store.read_table("active", queue="q").num_rows == 2
        # Other processes begin with the server that has the snapshots.
        sent = pickle.loads(pickle.dumps(store))
        assert str(sent.location) == f"grpc://127.0.0.1:{server.port},127.0.0.1:{nobody}"


def test_a_server_that_goes_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNREACHABLE_MS", 0)
    with penstock.open("memory:") as broker:
        broker.create_queue("q")
        first, second = in_process_server(broker), in_process_server(broker)
        ports = [first.port, second.port]
        store = FlightStore(f"grpc://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}")
        run = store.info().run
        first.close()
        # A call that may not be repeated fails once, and the next goes to the other.
        with pytest.raises(ServerUnreachable):
            store.publish([ROWS])
        assert store.publish([ROWS]).published == 2
        assert store.info().run != run
        second.close()
        with pytest.raises(ServerUnreachable) as caught:
            store.info()
        assert all(f"grpc://127.0.0.1:{port}: Connection refused" in str(caught.value)
                   for port in ports)  # fmt: skip


def test_access_in_the_url(tmp_path: Path) -> None:
    certs = issue(tmp_path)
    settings: dict[str, Any] = {"tls_certificate": certs.certificate, "tls_key": certs.key}
    with running("memory:", flight="127.0.0.1:0", tls_client_ca=certs.ca, **settings) as server:
        place = server.location("flight")
        url = f"{place}?ca={certs.ca}&cert={certs.client_certificate}&key={certs.client_key}"
        assert FlightStore(url).info().store_id
        # Spark's executors get the files with the options, not their names.
        options = place_of(locate(url.replace("//", "//key:secret@")))
        assert options["server"] == place
        assert options["token"] == "key:secret"
        assert options["key"] == certs.client_key.read_text()
        sent = pickle.loads(pickle.dumps(read_options({**options, "table": "log"})))
        assert FlightStore(sent.location).info().store_id
        assert "BEGIN" not in repr(sent)
    with pytest.raises(InvalidUrl, match="names files of TLS, and no TLS"):
        locate("grpc://a?ca=f")
