"""Clients at a port of another protocol: each hears which one is spoken there, and what to try."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import trustme
from tests.waiting import wait_until

import penstock
from penstock.client.connection import ClientConnection, Options, Phase
from penstock.errors import ServerUnreachable
from penstock.server import running
from penstock.server.config import Config
from penstock.wire.frames import protocol_of
from penstock.wire.native import DEFAULT_PORT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.server import Server

ALL: dict[str, Any] = dict.fromkeys(("native", "http", "flight"), "127.0.0.1:0")
# All the patience in the world: a wrong port is told at once.
PATIENT: dict[str, Any] = {"patience_ms": 3_600_000}


class Secure(NamedTuple):
    server: Server
    trusting: ssl.SSLContext


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with running("memory:", **ALL) as server:
        yield server


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    place = tmp_path_factory.mktemp("tls")
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    issued = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
    issued.private_key_pem.write_to_path(place / "key.pem")
    issued.cert_chain_pems[0].write_to_path(place / "certificate.pem")
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    files: dict[str, Any] = {
        "tls_certificate": place / "certificate.pem",
        "tls_key": place / "key.pem",
    }
    with running("memory:", **ALL, **files) as server:
        yield Secure(server, trusting)


def where(server: Server, listener: str) -> str:
    return "{}:{}".format(*server.addresses[listener])


@pytest.mark.parametrize(
    ("listener", "spoken"),
    [
        ("http", "speaks HTTP, for SQS clients and browsers"),
        ("flight", "speaks gRPC, for Arrow Flight and Spark"),
    ],
)
def test_a_native_client_at_another_port(plain: Server, listener: str, spoken: str) -> None:
    place = where(plain, listener)
    with pytest.raises(ServerUnreachable) as caught:
        penstock.connect(f"penstock://{place}", **PATIENT)
    assert str(caught.value) == (
        f"{place} {spoken}: penstock:// needs the native port, {DEFAULT_PORT} unless it was set"
    )


def test_tls_where_none_is_spoken(plain: Server) -> None:
    place = where(plain, "native")
    with pytest.raises(ServerUnreachable, match=rf"{place} does not speak TLS: connect to pens"):
        penstock.connect(f"penstocks://{place}", **PATIENT)


def test_other_ports_behind_tls(secure: Secure) -> None:
    for listener in ALL:
        place = where(secure.server, listener)
        with pytest.raises(ServerUnreachable, match=f"{place} speaks TLS: connect to penstocks://"):
            penstock.connect(f"penstock://{place}", **PATIENT)
    place = where(secure.server, "http")
    with pytest.raises(ServerUnreachable, match=f"{place} speaks HTTP"):
        penstock.connect(f"penstocks://{place}", tls=secure.trusting, **PATIENT)
    with pytest.raises(ServerUnreachable, match="is not trusted: name the file of its CA"):
        penstock.connect(f"penstocks://{place}", **PATIENT)


def test_a_client_that_was_connected_tries_again() -> None:
    # Whatever answers there for now, its server may come back.
    connection = ClientConnection(Options(), now_ms=0, random=lambda: 0.5, fresh=bytes(16))
    connection.connected(0)
    connection.received(b"HTTP/1.1 503 Service Unavailable\r\n\r\n", 0)
    assert connection.hang_up
    assert connection.turns.why.startswith("the server speaks HTTP")
    connection.lost(connection.turns.why, 0)
    assert connection.phase is Phase.AWAY
    assert connection.connect_at_ms > 0


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_an_http_client_at_the_native_port(plain: Server, method: str) -> None:
    client = http.client.HTTPConnection(*plain.addresses["native"], timeout=60)
    client.request(method, "/", body=b"x" * 20_000 if method == "POST" else None)
    answer = client.getresponse()
    body = answer.read()
    client.close()
    assert answer.status == 400
    if method != "HEAD":
        said = json.loads(body)["message"]
        assert said.startswith("this is the native port")
        assert f"({Config().listen_http.rpartition(':')[2]} unless" in said


def test_an_sqs_client_at_the_native_port(plain: Server) -> None:
    boto3 = pytest.importorskip("boto3")
    sqs = boto3.client(
        "sqs",
        endpoint_url="http://{}:{}".format(*plain.addresses["native"]),
        region_name="us-east-1",
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )
    with pytest.raises(Exception, match=r"this is the native port, .* HTTP and SQS have another"):
        sqs.list_queues()
    sqs.close()


def test_the_log_names_the_protocol(plain: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.server.native.connection")
    for begin in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"):
        with socket.create_connection(plain.addresses["native"]) as stranger:
            stranger.sendall(begin)
            wait_until(lambda: stranger.recv(4096) == b"")
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"a client speaks {name} to the native port" for name in ("gRPC", "TLS")]


def test_bytes_of_no_protocol_that_is_known() -> None:
    assert protocol_of(b"\x00\x00\x00\x05\x93") == ""
    assert protocol_of(b"") == protocol_of(b"GE") == protocol_of(b"SSH-2.0") == ""
