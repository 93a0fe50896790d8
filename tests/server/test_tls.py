"""TLS of a server: pages without it, client certificates, failures, expiry, and two secrets."""

from __future__ import annotations

import logging
import signal
import socket
import ssl
import subprocess
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import boto3
import pytest
import trustme
from botocore.config import Config as BotoConfig
from botocore.exceptions import ClientError
from click.testing import CliRunner
from tests.server.conftest import SLOW_SECONDS, Certificates, issue
from tests.waiting import wait_until

import penstock
from penstock import limits
from penstock.cli.main import cli
from penstock.errors import InvalidInput, NotAllowed, ServerUnreachable
from penstock.flight.client import FlightStore
from penstock.server import running
from penstock.server.access import expires_at
from penstock.server.keys import Keys, add_key, finish_rotation, rotate_key
from penstock.server.metrics import WINDOW_SECONDS, Refusals, id_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.server.conftest import Answer, Process

    from penstock.server.served_store import Server

ANYWHERE = "127.0.0.1:0"


def mutual(certs: Certificates, **more: Any) -> dict[str, Any]:
    files = {"tls_certificate": certs.certificate, "tls_key": certs.key}
    return {**files, "tls_client_ca": certs.ca, **more}


def url_of(server: Server, **files: object) -> str:
    query = "&".join(f"{name}={file}" for name, file in files.items())
    return f"{server.location('native')}?{query}"


def sample(page: bytes, name: str) -> float:
    """Return the value of a series."""
    (line,) = [each for each in page.decode().splitlines() if each.startswith(f"{name} ")]
    return float(line.rpartition(" ")[2])


# --- the address for operations -------------------------------------------------------------------


def test_probes_need_neither_a_certificate_nor_a_key(
    serve: Callable[..., Process],
    certs: Certificates,
    keys: dict[str, str],
    ask: Callable[..., Answer],
    tmp_path: Path,
) -> None:
    options = [f"--{name.replace('_', '-')}={file}" for name, file in mutual(certs).items()]
    options += ["--keys", str(tmp_path / "keys.toml"), "--ops-address", ANYWHERE]
    server = serve(*options, native=True)
    address = ("127.0.0.1", server.ports["ops"])
    assert ask(address, "GET", "/health")[:2] == (200, b"alive\n")
    assert ask(address, "GET", "/ready")[:2] == (200, b"ready\n")
    assert b"penstock_certificate_expiry_timestamp_seconds" in ask(address, "GET", "/metrics").body
    # Nothing else is there.
    for method, path in (("POST", "/"), ("POST", "/admin/backup"), ("GET", "/console/")):
        assert ask(address, method, path).status == 404
    # Browsers must not read it for a page of somebody else.
    with socket.create_connection(address, SLOW_SECONDS) as browser:
        browser.sendall(b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert browser.recv(100).startswith(b"HTTP/1.1 403")
    # The HTTP listener wants both, as before.
    with pytest.raises((ssl.SSLError, ConnectionError)):
        server.ask("GET", "/health", tls=certs.context())
    trusted = certs.context(client=True)
    assert server.ask("GET", "/health", tls=trusted).status == 200
    assert server.ask("GET", "/metrics", tls=trusted).status == 401
    assert server.ask("GET", "/metrics", tls=trusted, token=keys["root"]).status == 200
    server.stop()


def test_the_address_for_operations_is_open_beside_listeners_that_are_named(
    ask: Callable[..., Answer],
) -> None:
    with running("memory:", native=ANYWHERE, ops_address="[::1]:0") as server:
        assert set(server.addresses) == {"native", "ops"}
        assert server.location("ops").startswith("http://[::1]:")
        assert ask(server.addresses["ops"], "GET", "/ready").status == 200
        # It is of no use for anything else, so no keys are asked for either.
    with running("memory:", native=ANYWHERE, ops_address="0.0.0.0:0") as server:
        assert server.keys is None


# --- client certificates --------------------------------------------------------------------------


def test_one_listener_asks_for_client_certificates(
    certs: Certificates, ask: Callable[..., Answer]
) -> None:
    listeners: dict[str, Any] = {"native": ANYWHERE, "http": ANYWHERE, "flight": ANYWHERE}
    settings = mutual(certs, tls_client_listeners="native")
    with running("memory:", **listeners, **settings) as server:
        assert ask(server.addresses["http"], "GET", "/ready", tls=certs.context()).status == 200
        assert FlightStore(f"{server.location('flight')}?ca={certs.ca}").info().store_id
        with pytest.raises(ServerUnreachable, match="wants a client certificate"):
            penstock.connect(url_of(server, ca=certs.ca), patience_ms=3_600_000)
        pair = {"cert": certs.client_certificate, "key": certs.client_key}
        with penstock.connect(url_of(server, ca=certs.ca, **pair)) as client:
            assert client.ping() > 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"tls_client_listeners": "nativ"}, "no listener 'nativ' has TLS; did you mean 'native'"),
        ({"tls_client_listeners": "native", "tls_client_ca": ""}, "give tls.client_ca too"),
    ],
)
def test_listeners_that_cant_ask(certs: Certificates, settings: dict[str, str], match: str) -> None:
    with pytest.raises(InvalidInput, match=match), running("memory:", **mutual(certs) | settings):
        pass


def test_files_and_the_environment_for_native_clients(
    certs: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("memory:", native=ANYWHERE, **mutual(certs)) as server:
        for name in ("ca", "cert", "key"):
            monkeypatch.setenv(f"PENSTOCK_{name.upper()}", str(certs.ca))
        pair = {"cert": certs.client_certificate, "key": certs.client_key}
        # The URL counts before the environment.
        with penstock.open(url_of(server, **pair)) as client:
            assert client.queues() == []
        monkeypatch.setenv("PENSTOCK_CERT", str(certs.client_certificate))
        monkeypatch.setenv("PENSTOCK_KEY", str(certs.client_key))
        with penstock.connect(server.location("native")) as client:
            assert client.ping() > 0
        # Options of the command line count before both.
        words = ["queues", "--url", server.location("native")]
        options = ["--ca", str(certs.ca), "--cert", *map(str, pair.values())]
        options.insert(-1, "--key")
        found = CliRunner().invoke(cli, words + options, env={"PENSTOCK_CA": "/nowhere"})
        assert (found.exit_code, found.stdout) == (0, "no queues\n"), found.stderr
        found = CliRunner().invoke(cli, words, env={"PENSTOCK_CA": "/nowhere"})
        assert "TLS: /nowhere can't be read: No such file" in found.stderr


# --- certificates that are wrong ------------------------------------------------------------------


class Wrong:
    """Certificates of servers that clients must refuse, all of one authority."""

    def __init__(self, place: Path) -> None:
        authority = trustme.CA()
        self.ca, self.place = place / "authority.pem", place
        self.ca.write_bytes(authority.cert_pem.bytes())
        self.authority = authority

    def files(self, *names: str, **more: Any) -> dict[str, Any]:
        made = self.authority.issue_cert(*names, **more)
        certificate, key = self.place / "wrong.pem", self.place / "wrong.key"
        certificate.write_bytes(made.cert_chain_pems[0].bytes())
        key.write_bytes(made.private_key_pem.bytes())
        return {"tls_certificate": certificate, "tls_key": key}


@pytest.mark.parametrize(
    ("names", "more", "match"),
    [
        (("127.0.0.1",), {"not_after": datetime(2020, 1, 1, tzinfo=UTC)}, "has expired: renew it"),
        (("elsewhere.example",), {}, "is for another host .*: connect by a name"),
    ],
)
def test_a_certificate_that_is_wrong_is_told_at_once(
    tmp_path: Path, names: tuple[str], more: dict[str, Any], match: str
) -> None:
    wrong = Wrong(tmp_path)
    settings = wrong.files(*names, **more)
    with running("memory:", native=ANYWHERE, flight=ANYWHERE, **settings) as server:
        with pytest.raises(ServerUnreachable, match=match):
            penstock.connect(url_of(server, ca=wrong.ca), patience_ms=3_600_000)
        with pytest.raises(ServerUnreachable, match=match):
            FlightStore(f"{server.location('flight')}?ca={wrong.ca}").info()


def test_files_that_cant_be_used_are_named(certs: Certificates, tmp_path: Path) -> None:
    place = "penstocks://127.0.0.1:1"
    encrypted = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-in", str(certs.client_key), "-aes128", "-passout", "pass:abcd"]
    subprocess.run([*command, "-out", str(encrypted)], check=True)
    (junk := tmp_path / "junk").write_text("junk")
    for query, match in (
        (f"ca={tmp_path}/no.pem", r"no\.pem can't be read: No such file"),
        (f"ca={junk}", "junk is not PEM"),
        (f"ca={certs.client_key}", "holds no certificate"),
        (f"key={certs.key}", "is a key without a certificate"),
        (f"cert={certs.certificate}&key={certs.client_key}", "the key is not that of the cert"),
        (f"cert={certs.client_certificate}&key={encrypted}", "is encrypted: 'openssl pkey"),
    ):
        with pytest.raises(InvalidInput, match=match):
            penstock.connect(f"{place}?{query}")
    settings: dict[str, Any] = {"tls_certificate": certs.client_certificate, "tls_key": encrypted}
    with pytest.raises(InvalidInput, match="is encrypted"), running("memory:", **settings):
        pass


@pytest.mark.parametrize("year", [2031, 2049, 2050, 2077])
def test_expiry_is_read_as_openssl_reads_it(tmp_path: Path, year: int) -> None:
    wrong = Wrong(tmp_path)
    files = wrong.files("a.example", not_after=datetime(year, 2, 3, 4, 5, 6, tzinfo=UTC))
    certificate = files["tls_certificate"]
    said = subprocess.run(
        ["openssl", "x509", "-noout", "-enddate", "-in", certificate],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert expires_at(certificate.read_text()) == ssl.cert_time_to_seconds(said.strip()[9:])
    # Of several, the first that expires; of none, nothing.
    both = certificate.read_text() + wrong.ca.read_text()
    assert expires_at(both) <= expires_at(certificate.read_text())
    assert expires_at("") == 0


def test_a_certificate_is_read_again(
    serve: Callable[..., Process], tmp_path: Path, ask: Callable[..., Answer]
) -> None:
    certs = issue(tmp_path / "tls")
    options = [f"--{name.replace('_', '-')}={file}" for name, file in mutual(certs).items()]
    server = serve(*options, "--ops-address", ANYWHERE)
    ops = ("127.0.0.1", server.ports["ops"])
    name = 'penstock_certificate_expiry_timestamp_seconds{file="certificate"}'
    assert sample(ask(ops, "GET", "/metrics").body, name) == expires_at(
        certs.certificate.read_text()
    )
    before = certs.context(client=True)
    assert server.ask("GET", "/health", tls=before).status == 200
    # Another authority, of the server and of the clients.
    issue(tmp_path / "tls")
    server.signal(signal.SIGHUP)
    wait_until(lambda: f"read the certificate {certs.certificate} again" in server.log.read_text())
    assert server.ask("GET", "/health", tls=certs.context(client=True)).status == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        server.ask("GET", "/health", tls=before)
    certs.key.write_text("junk")
    server.signal(signal.SIGHUP)
    wait_until(lambda: "the certificate stays as it was: TLS: " in server.log.read_text())
    assert server.ask("GET", "/health", tls=certs.context(client=True)).status == 200
    text = server.log.read_text()
    assert "Flight keeps" in text
    assert "Traceback" not in text
    server.stop()


# --- refusals -------------------------------------------------------------------------------------


def fields_of(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, str]]:
    return [vars(each)["fields"] for each in caplog.records if each.getMessage() == message]


def broken_handshakes(server: Server, listener: str, times: int) -> None:
    for _ in range(times):
        with socket.create_connection(server.addresses[listener], SLOW_SECONDS) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while stranger.recv(1000):
                pass


def test_handshakes_that_fail_are_counted_and_logged_once(
    certs: Certificates, ask: Callable[..., Answer], caplog: pytest.LogCaptureFixture
) -> None:
    with running(
        "memory:", native=ANYWHERE, http=ANYWHERE, ops_address=ANYWHERE, **mutual(certs)
    ) as server:
        broken_handshakes(server, "native", 30)
        broken_handshakes(server, "http", 20)
        with pytest.raises(ServerUnreachable):
            penstock.connect(url_of(server, ca=certs.ca))
        # One that only looks whether somebody listens is no failure.
        for _ in range(20):
            socket.create_connection(server.addresses["native"], SLOW_SECONDS).close()
        ops, name = server.addresses["ops"], "penstock_handshakes_failed_total"

        def count(protocol: str) -> float:
            series = f'{name}{{protocol="{protocol}"}}'
            return sample(ask(ops, "GET", "/metrics").body, series)

        wait_until(lambda: count("http") == 20)
        wait_until(lambda: count("native") == 33)
    lines = fields_of(caplog, "a TLS handshake failed")
    assert [(each["protocol"], each["why"]) for each in lines] == [
        ("native", "the client speaks HTTP, not TLS"),
        ("http", "the client speaks HTTP, not TLS"),
        ("native", "the client has shown no certificate"),
    ]
    assert all(each["address"].startswith("127.0.0.1:") for each in lines)


def test_logins_that_are_refused_are_counted_and_logged(
    keys: dict[str, str],
    tmp_path: Path,
    ask: Callable[..., Answer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    listeners: dict[str, Any] = {"native": ANYWHERE, "http": ANYWHERE, "flight": ANYWHERE}
    path, secret = tmp_path / "keys.toml", keys["root"].partition(":")[2]
    with running("memory:", **listeners, ops_address=ANYWHERE, auth_keys=path) as server:
        for token in ("root:wrong", "", f"{secret}:root", "nobody:at\nall"):
            with pytest.raises(NotAllowed):
                penstock.connect(server.location("native"), token=token)
        with pytest.raises(NotAllowed):
            FlightStore(server.location("flight"), token="viewer:wrong").info()
        assert ask(server.addresses["http"], "GET", "/metrics", token="worker:no").status == 401
        with pytest.raises(ClientError, match="security token"):
            sqs(server, "sender", "wrong").list_queues()
        page = ask(server.addresses["ops"], "GET", "/metrics").body
        name = "penstock_logins_refused_total"
        counts = {"native": 4, "flight": 1, "admin": 1, "sqs": 1}
        for protocol, count in counts.items():
            assert sample(page, f'{name}{{protocol="{protocol}"}}') == count
    lines = fields_of(caplog, "a login was refused")
    assert [(each["protocol"], each.get("key", "")) for each in lines] == [
        ("native", "root"),
        ("native", ""),
        ("native", "(40 characters)"),
        ("native", "nobody"),
        ("flight", "viewer"),
        ("admin", "worker"),
        ("sqs", "sender"),
    ]
    assert all("address" in each for each in lines if each["protocol"] != "flight")
    assert secret not in caplog.text


def test_a_flood_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now, counted = [0.0], list[str]()
    refusals = Refusals(lambda _, what: counted.append(what), lambda: now[0])
    for n in range(5_000):
        refusals.login("native", f"10.0.0.1:{n}", "app", "no")
        refusals.login("native", f"10.0.{n % 250}.{n // 250}:1", f"key{n}", "no")
        refusals.handshake("http", f"[::1]:{n}", "no TLS")
    assert len(counted) == 15_000
    assert len(caplog.records) == limits.MAX_REFUSAL_LINES
    caplog.clear()
    now[0] += WINDOW_SECONDS
    refusals.login("native", "10.0.0.1:5", "app", "no")
    assert [each.levelno for each in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    ("token", "shown"), [("a:b", "a"), ("secret", ""), ("", ""), (None, ""), ("a\n\x1b:b", "a??")]
)
def test_of_a_token_the_id_is_shown(token: str | None, shown: str) -> None:
    assert id_of(token) == shown


# --- two secrets ----------------------------------------------------------------------------------


def sqs(server: Server, key_id: str, secret: str) -> Any:
    return boto3.client(
        "sqs",
        region_name="us-east-1",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        endpoint_url=server.location("http"),
        config=BotoConfig(retries={"max_attempts": 0}),
    )


def test_a_secret_is_replaced_while_clients_are_connected(
    tmp_path: Path, ask: Callable[..., Answer]
) -> None:
    path = tmp_path / "keys.toml"
    old = add_key(path, "app", ["all"], sqs=True)
    series = 'penstock_key_former_secret_used_timestamp_seconds{key="app"}'
    listeners: dict[str, Any] = {"native": ANYWHERE, "http": ANYWHERE, "ops_address": ANYWHERE}
    with running("memory:", **listeners, auth_keys=path) as server:
        url, ops = server.location("native"), server.addresses["ops"]
        with penstock.connect(url, token=f"app:{old}") as before:
            new = rotate_key(path, "app")
            wait_until(lambda: sqs_answers(server, new))
            page = ask(ops, "GET", "/metrics").body
            wait_until(lambda: sample(ask(ops, "GET", "/metrics").body, series) > 0, why=str(page))
            # Both are good: of connections that stand, of new ones, and of signatures.
            assert before.ping() > 0
            assert sqs_answers(server, old)
            for secret in (old, new):
                with penstock.connect(url, token=f"app:{secret}") as client:
                    assert client.ping() > 0
            with pytest.raises(InvalidInput, match="has two secrets already"):
                rotate_key(path, "app")
            with penstock.connect(url, token=f"app:{new}") as after:
                finish_rotation(path, "app")
                wait_until(lambda: not sqs_answers(server, old))
                with pytest.raises(NotAllowed):
                    before.queues()
                assert after.queues() == []
                assert sqs_answers(server, new)
            with pytest.raises(NotAllowed):
                penstock.connect(url, token=f"app:{old}")
            assert series not in ask(ops, "GET", "/metrics").body.decode()


def sqs_answers(server: Server, secret: str) -> bool:
    try:
        sqs(server, "app", secret).list_queues()
    except ClientError:
        return False
    return True


def test_the_command_rotates(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"

    def run(*words: str) -> Any:
        return CliRunner().invoke(cli, ["keys", *words, "--keys", str(path)])

    old = add_key(path, "app", ["all"], description="the shop")
    before = path.read_text()
    new = run("rotate", "app").stdout.split()[3]
    assert new != old
    assert new not in path.read_text()
    keys = Keys(path)
    found = [keys.by_token(f"app:{secret}") for secret in (old, new)]
    assert [each and each.former for each in found] == [True, False]
    assert keys.former_used["app"] > 0
    assert "2" in run("list").stdout
    again = run("rotate", "app")
    assert again.exit_code == 1
    assert "'penstock keys rotate app --finish'" in again.stderr
    assert run("rotate", "app", "--finish").exit_code == 0
    keys = Keys(path)
    assert keys.by_token(f"app:{old}") is None
    assert keys.by_token(f"app:{new}") is not None
    assert len(path.read_text()) == len(before)
    assert "has one secret" in run("rotate", "app", "--finish").stderr
    assert "there is no key 'other'" in run("rotate", "other").stderr
