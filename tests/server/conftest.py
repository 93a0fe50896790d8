"""What the tests of the server share: certificates, HTTP, and a process."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import trustme
from tests.waiting import wait_until as wait_for

from penstock.server.keys import add_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]


# How long something may take that happens at once on a machine that is not busy.
SLOW_SECONDS = 60


class Certificates(NamedTuple):
    """Files of an authority, of a server and of a client that it has signed for."""

    ca: Path
    certificate: Path
    key: Path
    client_certificate: Path
    client_key: Path

    def context(self, *, client: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        if client:
            context.load_cert_chain(self.client_certificate, self.client_key)
        return context


def issue(place: Path) -> Certificates:
    place.mkdir(exist_ok=True)
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    files = Certificates(*(place / f"{name}.pem" for name in Certificates._fields))
    server = authority.issue_cert("localhost", "127.0.0.1", key_type=trustme.KeyType.ECDSA)
    client = authority.issue_cert("client@example.org", key_type=trustme.KeyType.ECDSA)
    files.ca.write_bytes(authority.cert_pem.bytes())
    files.certificate.write_bytes(b"".join(each.bytes() for each in server.cert_chain_pems))
    files.key.write_bytes(server.private_key_pem.bytes())
    files.client_certificate.write_bytes(b"".join(each.bytes() for each in client.cert_chain_pems))
    files.client_key.write_bytes(client.private_key_pem.bytes())
    return files


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]


def request(
    address: tuple[str, int],
    method: str,
    path: str,
    *,
    body: bytes = b"",
    token: str = "",
    tls: ssl.SSLContext | None = None,
) -> Answer:
    connection: http.client.HTTPConnection
    if tls is None:
        connection = http.client.HTTPConnection(*address, timeout=SLOW_SECONDS)
    else:
        connection = http.client.HTTPSConnection(*address, timeout=SLOW_SECONDS, context=tls)
    try:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, response.read(), found)
    finally:
        connection.close()


class Process:
    """`penstock serve` as a process of its own, with native, HTTP and Flight listeners.

    ``files``: as many may it have open. ``collects``: whether there is a garbage collector.
    """

    def __init__(
        self,
        place: Path,
        *options: str,
        native: bool = False,
        files: int = 0,
        collects: bool = True,
    ) -> None:
        self.place = place
        self.port_file = place / "ports"
        self.log = place / "log"
        program = "runpy.run_module('penstock', None, '__main__')"
        without = ("-c", f"import gc, runpy; gc.disable(); {program}")
        command = [sys.executable, *(("-m", "penstock") if collects else without)]
        command += ["serve", "--store", f"rocksdb:{place}/db"]
        if files:
            command = ["prlimit", f"--nofile={min(files, 200)}:{files}", *command]
        command += ["--http", "127.0.0.1:0", "--flight", "127.0.0.1:0"]
        command += ["--port-file", str(self.port_file), *options]
        if native:
            command += ["--native", "127.0.0.1:0"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        wait_for(lambda: self.port_file.exists() or self.process.poll() is not None)
        assert self.port_file.exists(), self.log.read_text()
        lines = [line.split() for line in self.port_file.read_text().splitlines()]
        self.ports = {name: int(port) for name, port in lines}

    @property
    def http(self) -> tuple[str, int]:
        return "127.0.0.1", self.ports["http"]

    @property
    def flight(self) -> str:
        return f"grpc://127.0.0.1:{self.ports['flight']}"

    def ask(self, method: str, path: str, **options: Any) -> Answer:
        return request(self.http, method, path, **options)

    @property
    def resident_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (found,) = [line for line in lines if line.startswith("VmRSS:")]
        return int(found.split()[1]) * 1024

    @property
    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self) -> str:
        said = self.process.communicate(timeout=2 * SLOW_SECONDS)[0]
        return str(said)

    def stop(self) -> str:
        self.signal(signal.SIGTERM)
        return self.finish()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.finish()
        elif self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    return wait_for


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return issue(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def ask() -> Callable[..., Answer]:
    return request


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start servers on the store of this test; those that are left are killed."""
    started: list[Process] = []

    def start(*options: str, **more: Any) -> Process:
        started.append(Process(tmp_path, *options, **more))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Tokens of keys that may do this and that; the file is ``keys.toml``."""
    path = tmp_path / "keys.toml"
    grants = {
        "root": ["all"],
        "sender": ["publish:orders*"],
        "worker": ["consume:orders"],
        "viewer": ["consume:*"],
    }
    return {name: f"{name}:{add_key(path, name, each)}" for name, each in grants.items()}
