"""A real server, and more connections and bytes than it has room for: the store must not notice."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.config import Config
from tests.clients.sockets import connect, frame, read_all, status
from tests.waiting import wait_until

import penstock
from penstock import limits
from penstock.flight.client import FlightStore
from penstock.server.connections import Connections, Listener
from penstock.server.keys import add_key
from penstock.wire import native as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.server.conftest import Certificates, Process

# It reads the description of SQS once, not for each client.
BOTO = boto3.session.Session()

pytestmark = pytest.mark.slow

MEGABYTE = 1024 * 1024
BODY = b"x" * (5 * MEGABYTE)
HEAD = (
    "POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.SendMessage\r\n"
    f"Content-Length: {len(BODY)}\r\n"
)
SIGNED = (
    "Authorization: AWS4-HMAC-SHA256 Credential={key}/20260101/us-east-1/sqs/aws4_request, "
    f"SignedHeaders=host, Signature={'0' * 64}\r\nX-Amz-Date: 20260101T000000Z\r\n"
)


@pytest.fixture
def token(tmp_path: Path) -> str:
    return f"root:{add_key(tmp_path / 'keys.toml', 'root', ['all'], sqs=True)}"


def native_url(server: Process) -> str:
    return f"penstock://127.0.0.1:{server.ports['native']}"


def sqs_of(server: Process, token: str) -> Any:
    key_id, _, secret = token.partition(":")
    return BOTO.client(
        "sqs",
        region_name="us-east-1",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        endpoint_url=f"http://127.0.0.1:{server.ports['http']}",
        config=Config(retries={"max_attempts": 0}, read_timeout=60),
    )


# --- memory ---------------------------------------------------------------------------------------


def post(port: int, more: str = "", *, whole: bool = True) -> bytes:
    """Send a body, or all of it but a byte, on a connection of its own; return the answer."""
    with connect(port) as connection:
        head = f"{HEAD}{more}\r\n".encode()
        connection.sendall(head + (BODY if whole else BODY[:-1]))
        return connection.recv(65_536) if whole else b""


def publish(port: int, token: str, *, whole: bool = True) -> None:
    """Publish to a queue that is not there, or begin to."""
    message = [BODY, {"queue": "nowhere"}]
    request = frame([1, 1, [message], "nowhere"])
    with connect(port) as connection:
        connection.sendall(frame(wire.Hello(wire.MAGIC, wire.VERSION, token)))
        connection.recv(1_000)
        # Without a key it is refused, and closed, while this is still being sent.
        with suppress(ConnectionError):
            connection.sendall(request if whole else request[:-1])
            if whole:
                connection.recv(1_000)


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "open"])
def test_what_was_sent_goes_with_its_connection(
    serve: Callable[..., Process], tmp_path: Path, token: str, keys: bool
) -> None:
    # Without a garbage collector, which comes after thousands of objects: of bodies that is much.
    options = ("--keys", str(tmp_path / "keys.toml")) if keys else ()
    server = serve(*options, native=True, collects=False)
    http, native = server.ports["http"], server.ports["native"]
    ways: list[Callable[[], object]] = [
        lambda: post(http, whole=False),
        lambda: post(http),
        lambda: post(http, SIGNED.format(key="root")),
        lambda: post(http, SIGNED.format(key="nobody")),
        lambda: post(http, "Content-Type: application/x-www-form-urlencoded\r\n"),
        lambda: publish(native, "", whole=False),
        lambda: publish(native, token, whole=False),
        lambda: publish(native, token),
    ]
    if not keys:
        # What keys are looked at for is the same for all.
        ways = [*ways[:2], *ways[-2:]]
    for way in ways:
        way()
    before = server.resident_bytes
    for way in ways:
        for _ in range(10):
            way()
    assert server.ask("GET", "/ready").status == 200
    # 200 or 400 MB were sent, of which the server kept all, and whole bodies twice.
    assert server.resident_bytes - before < 80 * MEGABYTE


def test_tls_keeps_nothing_either(serve: Callable[..., Process], certs: Certificates) -> None:
    options = ("--tls-certificate", str(certs.certificate), "--tls-key", str(certs.key))
    server = serve(*options, collects=False)
    context = certs.context()

    def begin() -> None:
        with (
            connect(server.ports["http"]) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(f"{HEAD}\r\n".encode() + BODY[:-1])

    begin()
    before = server.resident_bytes
    for _ in range(30):
        begin()
    assert server.ask("GET", "/ready", tls=context).status == 200
    assert server.resident_bytes - before < 50 * MEGABYTE


def test_bodies_of_strangers_are_bounded_together(
    serve: Callable[..., Process], tmp_path: Path, token: str
) -> None:
    server = serve("--keys", str(tmp_path / "keys.toml"), native=True)
    sqs = sqs_of(server, token)
    url = sqs.create_queue(QueueName="q")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="x")
    before = server.resident_bytes
    with ExitStack() as stack:
        held = []
        for _ in range(40):
            held.append(stack.enter_context(connect(server.ports["http"])))
            held[-1].sendall(f"{HEAD}\r\n".encode() + BODY[:-1])
        # Who came first is told so, and closed; who came last still has its turn.
        assert status(read_all(held[0])) == 503
        wait_until(lambda: 0 < buffered(server, token) <= limits.MAX_STRANGERS_BYTES)
        held[-1].sendall(BODY[-1:])
        assert status(held[-1].recv(65_536)) == 403
        # Others are served meanwhile: those that are known, and those that become so.
        sqs.send_message(QueueUrl=url, MessageBody="y" * 500_000)
        sqs_of(server, token).send_message(QueueUrl=url, MessageBody="z" * 500_000)
        with penstock.connect(native_url(server), token=token) as client:
            assert client.stats("q").available == 3
        # 200 MB were sent.
        assert server.resident_bytes - before < limits.MAX_STRANGERS_BYTES + 100 * MEGABYTE
    # But for the request that asks for it.
    wait_until(lambda: buffered(server, token) < 10_000)


def metric(server: Process, token: str, name: str) -> float:
    page = server.ask("GET", "/metrics", token=token).body.decode()
    (line,) = [each for each in page.splitlines() if each.startswith(f"{name} ")]
    return float(line.split()[1])


def buffered(server: Process, token: str) -> float:
    return metric(server, token, "penstock_buffered_bytes")


# --- descriptors ----------------------------------------------------------------------------------

FILES = 256
FLOOD = 400
BURST = 50


def closed(connection: socket.socket) -> bool:
    """Say whether the other side has ended a connection; what came before does not count."""
    connection.setblocking(False)
    try:
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def settled(held: list[socket.socket], most: int) -> list[bool]:
    """Wait until no more are open than there may be; say of each whether it is."""
    kept = [True] * len(held)

    def looked() -> bool:
        for index, each in enumerate(held):
            kept[index] = kept[index] and not closed(each)
        return sum(kept) <= most

    wait_until(looked)
    return kept


def check_that_all_goes_on(server: Process, token: str, client: Any) -> None:
    """Write until the store needs new files, look, and come in anew."""
    for _ in range(80):
        client.send("q", b"x" * MEGABYTE)
    assert server.ask("GET", "/ready").status == 200
    assert metric(server, token, "penstock_store_healthy") == 1
    with penstock.connect(native_url(server), token=token) as another:
        assert another.stats("q").available == 80
    assert FlightStore(server.flight, token=token).info().store_id
    sqs_of(server, token).list_queues()


def test_a_flood_of_idle_connections_leaves_the_store_its_files(
    serve: Callable[..., Process], tmp_path: Path, token: str
) -> None:
    keys = ("--keys", str(tmp_path / "keys.toml"))
    server = serve(*keys, "--durability", "relaxed", native=True, files=FILES)
    most = int(metric(server, token, "penstock_connections_max"))
    assert f"room for {most} connections: {FILES} files may be open" in server.log.read_text()
    with ExitStack() as stack:
        client = stack.enter_context(penstock.connect(native_url(server), token=token))
        client.create_queue("q")
        for listener in ("native", "http"):
            held = []
            for _ in range(FLOOD):
                held.append(stack.enter_context(connect(server.ports[listener])))
                assert server.open_files < FILES
            kept = settled(held, most)
            # Those went that came first, and of the others none.
            assert kept == sorted(kept)
            assert sum(kept) > most // 2
        check_that_all_goes_on(server, token, client)
        # Who has shown its key was not sent away.
        assert client.ping()


def test_flights_connections_leave_the_store_its_files(
    serve: Callable[..., Process], tmp_path: Path, token: str
) -> None:
    # gRPC takes what comes, and is told to let go afterwards: until then it takes more room. A
    # burst of hundreds may take all of it for a moment, as docs/server.md says.
    keys = ("--keys", str(tmp_path / "keys.toml"))
    server = serve(*keys, "--durability", "relaxed", native=True, files=2 * FILES)
    with ExitStack() as stack:
        client = stack.enter_context(penstock.connect(native_url(server), token=token))
        client.create_queue("q")
        for _ in range(2 * FLOOD // BURST):
            for _ in range(BURST):
                stack.enter_context(connect(server.ports["flight"]))
            wait_until(lambda: server.open_files < 2 * FILES * 3 // 4)
        check_that_all_goes_on(server, token, client)


def test_handshakes_that_are_never_begun_make_way(
    serve: Callable[..., Process], certs: Certificates
) -> None:
    options = ("--tls-certificate", str(certs.certificate), "--tls-key", str(certs.key))
    server = serve(*options, files=FILES)
    with ExitStack() as stack:
        held = []
        for _ in range(FLOOD):
            held.append(stack.enter_context(connect(server.ports["http"])))
            assert server.open_files < FILES
        kept = settled(held, FILES // 2)
        assert kept == sorted(kept)
        assert sum(kept) > 50
        assert server.ask("GET", "/ready", tls=certs.context()).status == 200


def test_queuebers_clients_count_too(serve: Callable[..., Process]) -> None:
    server = serve("--capnp", "127.0.0.1:0", files=FILES, collects=False)
    before = server.resident_bytes
    for size in (8, 1_000, 60_000, *([len(BODY)] * 20)):
        # A message that says how long it is, sent at once, and closed before it is whole.
        with connect(server.ports["capnp"]) as connection:
            connection.sendall(struct.pack("<II", 0, size // 8 + 10) + BODY[:size])
    assert server.ask("GET", "/ready").status == 200
    assert server.resident_bytes - before < 60 * MEGABYTE
    with ExitStack() as stack:
        begun = []
        for _ in range(30):
            begun.append(stack.enter_context(connect(server.ports["capnp"])))
            begun[-1].sendall(struct.pack("<II", 0, len(BODY) // 8 + 10) + BODY)
        kept = settled(begun, limits.MAX_STRANGERS_BYTES // len(BODY) + 1)
        assert kept == sorted(kept)
        assert kept[-1]
    with ExitStack() as stack:
        held = [stack.enter_context(connect(server.ports["capnp"])) for _ in range(FLOOD)]
        kept = settled(held, FILES // 2)
        assert not kept[0]
        assert kept[-1]
        assert server.open_files < FILES
        assert server.ask("GET", "/ready").status == 200
    assert server.ask("GET", "/ready").status == 200


@pytest.fixture
def few_files() -> Iterator[Callable[[int], None]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_acceptor_without_descriptors_rests(few_files: Callable[[int], None]) -> None:
    tries = 0
    served: list[socket.socket] = []

    class Counted(Listener):
        def _accept(self, listening: socket.socket) -> None:
            nonlocal tries
            tries += 1
            super()._accept(listening)

        async def _serve(self, taken: socket.socket, slot: object) -> None:
            served.append(taken)

    async def story() -> None:
        acceptor = Counted("127.0.0.1", 0)
        await acceptor.start()
        with socket.socket() as client:
            lowest = 1 + max(int(each.name) for each in Path("/proc/self/fd").iterdir())
            with ExitStack() as stack:
                # So that not one below the limit is free.
                while (filler := stack.enter_context(socket.socket())).fileno() < lowest:
                    pass
                few_files(filler.fileno())
                await asyncio.get_running_loop().sock_connect(client, acceptor.address)
                await asyncio.sleep(0.3)
                assert tries == 1
                assert not served
            while not served:
                await asyncio.sleep(0.01)
        acceptor.close()
        served[0].close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_those_that_make_way_before_they_were_begun_are_closed_at_once() -> None:
    class Never(Listener):
        async def _serve(self, taken: socket.socket, slot: object) -> None:
            await asyncio.Event().wait()

    async def story() -> None:
        connections = Connections(2)
        acceptor = Never("127.0.0.1", 0, slots=connections)
        await acceptor.start()
        before = len(list(Path("/proc/self/fd").iterdir()))
        with ExitStack() as stack:
            # All of them are there before the loop looks, and are accepted in one turn of it.
            clients = [stack.enter_context(connect(acceptor.address[1])) for _ in range(6)]
            gc.disable()
            try:
                await asyncio.sleep(0.05)
                assert len(connections) == 2
                assert len(list(Path("/proc/self/fd").iterdir())) == before + len(clients) + 2
                acceptor.close()
                await asyncio.sleep(0.05)
                assert len(connections) == 0
            finally:
                gc.enable()

    asyncio.run(asyncio.wait_for(story(), 60))
