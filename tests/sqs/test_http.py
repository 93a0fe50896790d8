"""HTTP, byte by byte: what is well-formed is answered in order, the rest once and for all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import select
import socket
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sqs.serving import Served, client_of, serving
from tests.waiting import wait_until

from penstock import limits
from penstock.errors import InvalidInput
from penstock.server.http import Answering, Handler, HttpBounds, Request, Response
from penstock.server.http_connection import Http

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENT = HttpBounds(
    body_bytes=64 * 1024,
    first_byte_ms=600_000,
    request_ms=600_000,
    idle_ms=600_000,
    stalled_write_ms=600_000,
)


def bounds(**tight: int) -> HttpBounds:
    """Make bounds that no slow machine comes to, but for those that a test is about."""
    return msgspec.structs.replace(PATIENT, **tight)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(bounds=PATIENT) as server:
        client_of(server).create_queue(QueueName="q")
        yield server


def post(operation: str, fields: dict[str, Any], *extra: str, close: bool = False) -> bytes:
    body = json.dumps(fields).encode()
    headers = [
        "POST / HTTP/1.1",
        "Host: here",
        f"X-Amz-Target: AmazonSQS.{operation}",
        f"Content-Length: {len(body)}",
        *(["Connection: close"] if close else []),
        *extra,
    ]
    return "\r\n".join(headers).encode() + b"\r\n\r\n" + body


def send(body: str = "x", **extra: Any) -> bytes:
    return post("SendMessage", {"QueueUrl": "q", "MessageBody": body}, **extra)


@contextlib.contextmanager
def connected(served: Served, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    place = (served.host, served.port)
    with socket.create_connection(place, timeout=60, source_address=(host, 0)) as connection:
        yield connection


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def statuses(answers: bytes) -> list[int]:
    found = []
    while answers:
        head, _, rest = answers.partition(b"\r\n\r\n")
        found.append(int(head.split(b" ", 2)[1]))
        length = 0
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        answers = rest[length:]
    return found


def exchange(served: Served, data: bytes) -> bytes:
    with connected(served) as connection:
        # Who is refused may find the door closed before it has said everything.
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        return read_all(connection)


def test_a_request_may_come_byte_by_byte(served: Served) -> None:
    data = send("whole", close=True)
    with connected(served) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index in range(len(data)):
            connection.sendall(data[index : index + 1])
        assert statuses(read_all(connection)) == [200]


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    bodies = [f"piped {index}" for index in range(60)]
    data = b"".join(send(body) for body in bodies)
    answers = exchange(served, data + post("Nonsense", {}, close=True))
    assert statuses(answers) == [200] * 60 + [404]
    positions = [answers.index(hashlib.md5(body.encode()).hexdigest().encode()) for body in bodies]
    assert positions == sorted(positions)


def test_a_connection_is_kept_or_closed_as_asked(served: Served) -> None:
    with connected(served) as connection:
        for _ in range(3):
            connection.sendall(send())
            assert b"200 OK" in connection.recv(65_536)
        connection.sendall(send(close=True))
        assert b"Connection: close" in read_all(connection)
    old = send().replace(b"HTTP/1.1", b"HTTP/1.0")
    assert b"Connection: close" in exchange(served, old)
    kept = old.replace(b"Host: here", b"Host: here\r\nConnection: keep-alive")
    with connected(served) as connection:
        connection.sendall(kept)
        assert b"Connection: keep-alive" in connection.recv(65_536)


def test_chunked_bodies(served: Served) -> None:
    whole = json.dumps({"QueueUrl": "q", "MessageBody": "chunked"}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in whole) + b"0\r\n\r\n"
    head = (
        b"POST / HTTP/1.1\r\nHost: h\r\nX-Amz-Target: AmazonSQS.SendMessage\r\n"
        b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )
    assert statuses(exchange(served, head + chunks)) == [200]
    too_large = b"FFFF\r\n" + b"x" * 0xFFFF + b"\r\n"
    assert statuses(exchange(served, head + too_large * 3)) == [413]
    assert statuses(exchange(served, head + b"nonsense\r\n")) == [400]


def test_who_expects_it_is_told_to_continue(served: Served) -> None:
    data = send(close=True).replace(b"Host: here", b"Host: here\r\nExpect: 100-continue")
    head, _, body = data.partition(b"\r\n\r\n")
    with connected(served) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert statuses(read_all(connection)) == [200]
    huge = b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 9999999\r\n\r\n"
    assert statuses(exchange(served, huge)) == [413]


CHUNKED = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_trailers_are_no_headers() -> None:
    seen: list[Request] = []

    def fallback(request: Request) -> Response:
        seen.append(request)
        return Response(200)

    with serving(bounds=PATIENT, wrap=lambda _: fallback) as here:
        trailers = b"".join(b"t%d: x\r\n" % index for index in range(98))
        data = CHUNKED + b"1\r\nx\r\n0\r\nX-Amz-Target: y\r\n" + trailers[:-8] + b"\r\n"
        head = b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
        # As many bytes as headers may have, after as many of a request before it.
        longest = b"X: " + b"a" * (32_768 - 9 - 19 - 5) + b"\r\n\r\n"
        assert statuses(exchange(here, data * 2 + head + longest)) == [200, 200, 200]
    assert [set(each.headers) for each in seen[:2]] == [{"host", "transfer-encoding"}] * 2
    assert [each.body for each in seen] == [b"x", b"x", b""]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50, 400),
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nHost: h\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 400),
        (
            b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding:chunked\r\n\r\n",
            400,
        ),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 65537\r\n\r\n" + b"x" * 70_000, 413),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: " + b"9" * 19 + b"\r\n\r\n", 413),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: h\r\n" + b"a: b\r\n" * 60_000, 431),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 300_000, 431),
        (
            b"GET / HTTP/1.1\r\nHost: h\r\n"
            + b"".join(b"a%d: b\r\n" % i for i in range(150))
            + b"\r\n",
            431,
        ),
        (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 400),
        # One byte more than all headers may have, and one header more, all of the same name.
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * (32_768 - 9 - 4) + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: h\r\n" + b"a:\r\n" * 100 + b"\r\n", 431),
        (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n", 501),
        (CHUNKED + b"0\r\n" + b"a:\r\n" * 100 + b"\r\n", 431),
        (CHUNKED + b"0\r\na: " + b"b" * 1_000_000, 431),
        (CHUNKED + b"1;" + b"b" * 1_000_000, 431),
    ],
)
def test_bad_input_is_answered_and_the_connection_closed(
    served: Served, data: bytes, status: int
) -> None:
    answers = exchange(served, data)
    assert statuses(answers) == [status]
    assert b"Connection: close" in answers


def test_an_offer_of_another_protocol_is_not_taken(served: Served) -> None:
    offer = "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk"
    data = post("SendMessage", {"QueueUrl": "q", "MessageBody": "x"}, offer)
    assert statuses(exchange(served, data + data + send(close=True))) == [200, 200, 200]


def test_bad_input_after_good_requests(served: Served) -> None:
    assert statuses(exchange(served, send() + send() + b"nonsense\r\n\r\n")) == [200, 200, 400]


@settings(suppress_health_check=list(HealthCheck), max_examples=60)
@given(st.binary(min_size=1, max_size=200))
def test_garbage_gets_an_answer_or_the_door(served: Served, data: bytes) -> None:
    with connected(served) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        answers = read_all(connection)
        assert not answers or statuses(answers)[-1] >= 400


def test_damaged_requests_cost_nobody_else_anything(served: Served) -> None:
    data = send(close=True)
    for at in range(0, len(data), 7):
        damaged = data[:at] + b"\x00" + data[at + 1 :]
        with connected(served) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(damaged)
                connection.shutdown(socket.SHUT_WR)
            read_all(connection)
    assert statuses(exchange(served, data)) == [200]


def test_who_says_nothing_is_let_go() -> None:
    with serving(bounds=bounds(first_byte_ms=1_500)) as served:
        began = time.perf_counter()
        with connected(served) as connection:
            assert read_all(connection) == b""
        assert time.perf_counter() - began > 1


def test_who_dribbles_is_let_go() -> None:
    with serving(bounds=bounds(request_ms=1_000)) as served, connected(served) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: here\r\nEndless: ")

        def answered() -> bool:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"x")
            return bool(select.select([connection], [], [], 0)[0])

        wait_until(answered)
        assert statuses(read_all(connection)) == [408]


def test_who_does_not_read_is_let_go() -> None:
    asked: list[Request] = []

    def noting(handler: Handler) -> Handler:
        def handle(request: Request) -> Answering:
            asked.append(request)
            return handler(request)

        return handle

    with serving(bounds=bounds(stalled_write_ms=1_000), wrap=noting) as served:
        served.broker.create_queue("big", max_attempts=1_000, backoff_base_ms=0)
        served.broker.send("big", b"x" * 60_000)
        data = post("ReceiveMessage", {"QueueUrl": "big", "VisibilityTimeout": 0}) * 300
        with connected(served) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            wait_until(lambda: asked)
            wait_until(lambda: not served.http.connections)
        assert len(asked) < 300
        assert statuses(exchange(served, post("ListQueues", {}, close=True))) == [200]


@pytest.mark.parametrize("last", [b"", post("ListQueues", {}, close=True)])
def test_who_does_not_read_the_last_answers_is_let_go(last: bytes) -> None:
    """However few there are, and whoever ends the connection."""
    asked: list[Request] = []

    def answer(request: Request) -> Response:
        asked.append(request)
        return Response(body=b"x" * 60_000)

    with (
        serving(bounds=bounds(stalled_write_ms=200), wrap=lambda _: answer) as served,
        connected(served) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        unsent = 0
        while not unsent:
            asked.clear()
            connection.sendall(post("ListQueues", {}))
            wait_until(lambda: asked)
            unsent = sum(each._unsent for each in served.http.connections)
        connection.sendall(last)
        if not last:
            connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: not served.http.connections)


def test_a_half_closed_connection_is_still_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HTTP_HALF_CLOSED_MS", 60_000)
    with connected(served) as connection:
        connection.sendall(send())
        connection.shutdown(socket.SHUT_WR)
        assert statuses(read_all(connection)) == [200]


def test_a_poll_of_a_client_that_left_is_forgotten(served: Served) -> None:
    sqs = client_of(served)
    url = sqs.create_queue(QueueName="left")["QueueUrl"]
    with connected(served) as connection:
        connection.sendall(post("ReceiveMessage", {"QueueUrl": url, "WaitTimeSeconds": 20}))
        wait_until(lambda: served.batcher.parked)
    wait_until(lambda: not served.batcher.parked)
    sqs.send_message(QueueUrl=url, MessageBody="1")
    assert len(sqs.receive_message(QueueUrl=url)["Messages"]) == 1


def test_connections_are_bounded() -> None:
    ask = post("ListQueues", {}, close=True)
    with serving() as served:
        served.http.slots.places.most = 40
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(connected(served)) for _ in range(40)]
            wait_until(lambda: len(served.http.connections) == 40)
            # The one that came first and has asked for nothing makes way.
            assert statuses(exchange(served, ask)) == [200]
            assert read_all(idle[0]) == b""
            for connection in idle[1:33]:
                connection.sendall(post("ListQueues", {}))
                assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
            # A host has four fifths of them, and others have theirs.
            idle[33].sendall(post("ListQueues", {}))
            refused = idle[33].recv(65_536)
            assert b"RequestThrottled" in refused
            assert b"has 32 of the server's 40 connections, of which 8 are free" in refused
            other = stack.enter_context(connected(served, "127.0.0.2"))
            other.sendall(post("ListQueues", {}))
            assert other.recv(65_536).startswith(b"HTTP/1.1 200 ")
            for connection in idle[33:]:
                connection.close()
            wait_until(lambda: len(served.http.connections) == 33)
            served.http.slots.places.most = 33
            # All of these have asked for something: none of them makes way.
            with connected(served) as connection:
                assert statuses(read_all(connection)) == [503]
        wait_until(lambda: not served.http.connections)
        assert statuses(exchange(served, ask)) == [200]


def test_idle_connections_cost_nothing() -> None:
    with serving(bounds=PATIENT) as served, contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connected(served))
        assert statuses(exchange(served, post("ListQueues", {}, close=True))) == [200]
        wait_until(lambda: len(served.http.connections) == 300)


# --- the listener itself -------------------------------------------------------------------------


class Slow:
    """A handler that answers when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self._may_end = asyncio.Event()

    async def __call__(self, request: Request) -> Response:
        self.begun.set()
        await self._may_end.wait()
        return Response(200, b"slow " + request.body)

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self._may_end.set)


def run_listener(talk: Any, slow: Handler | None = None, **options: Any) -> Any:
    """Run a listener with a few routes, and talk to it from a thread."""

    async def broken(_: Request) -> Response:
        raise RuntimeError("broken")

    def worse(_: Request) -> Response:
        raise RuntimeError("worse")

    async def main() -> Any:
        http = Http(
            {
                ("GET", "/health"): lambda _: Response(200, b"fine"),
                ("POST", "/slow"): slow or Slow(),
                ("GET", "/broken"): broken,
                ("GET", "/worse"): worse,
            },
            lambda request: Response(404, f"{request.path}|{request.query}".encode()),
            **options,
        )
        await http.start()
        try:
            host, port = http.address
            loop = asyncio.get_running_loop()
            return await asyncio.to_thread(lambda: talk(host, port, http, loop))
        finally:
            await http.stop(60_000)
            assert not http.connections

    return asyncio.run(main())


def ask(host: str, port: int, data: bytes) -> bytes:
    with socket.create_connection((host, port), timeout=60) as connection:
        connection.sendall(data)
        return read_all(connection)


def test_routes_and_fallback() -> None:
    def talk(host: str, port: int, _: Http, __: Any) -> None:
        def get(target: str, method: str = "GET") -> bytes:
            head = f"{method} {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
            return ask(host, port, head.encode())

        assert get("/health").endswith(b"\r\n\r\nfine")
        head = get("/health", "HEAD")
        assert head.endswith(b"Content-Length: 4\r\n\r\n")
        assert get("/other?a=b").endswith(b"/other|a=b")
        assert get("http://h/abs?c").endswith(b"/abs|c")
        assert get("/health", "POST").endswith(b"/health|")

    run_listener(talk)


def test_a_handler_that_fails_is_an_error_500(caplog: pytest.LogCaptureFixture) -> None:
    def talk(host: str, port: int, _: Http, __: Any) -> None:
        data = b"GET /broken HTTP/1.1\r\nHost: h\r\n\r\nGET /worse HTTP/1.1\r\nHost: h\r\n\r\n"
        good = b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        answers = ask(host, port, data + good)
        assert statuses(answers) == [500, 500, 200]
        assert b"RuntimeError" not in answers

    run_listener(talk)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_a_burst_of_requests_gives_others_their_turn() -> None:
    turns: list[int] = []
    turn = 0

    async def story() -> None:
        nonlocal turn

        def note(_: Request) -> Answering:
            turns.append(turn)
            return Response(200)

        http = Http({}, note, bounds=PATIENT)
        await http.start()
        reader, writer = await asyncio.open_connection(*http.address)
        burst = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 4_999
        writer.write(burst + b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        reading = asyncio.ensure_future(reader.read())
        while not reading.done():
            turn += 1
            assert http.slots.held_bytes < 300_000
            await asyncio.sleep(0)
        assert len(statuses(await reading)) == len(turns) == 5_000
        writer.close()
        await http.stop(0)

    asyncio.run(asyncio.wait_for(story(), 60))
    assert max(Counter(turns).values()) <= limits.MAX_TURN_ANSWERS


def test_stopping_lets_what_is_in_hand_be_answered() -> None:
    slow = Slow()

    def talk(host: str, port: int, http: Http, loop: Any) -> None:
        with (
            socket.create_connection((host, port), timeout=60) as busy,
            socket.create_connection((host, port), timeout=60) as idle,
        ):
            wait_until(lambda: len(http.connections) == 2)
            busy.sendall(b"POST /slow HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx")
            assert slow.begun.wait(60)
            stopping = asyncio.run_coroutine_threadsafe(http.stop(600_000), loop)
            assert idle.recv(10) == b""
            assert not stopping.done()
            slow.end(loop)
            answer = read_all(busy)
            assert answer.endswith(b"slow x")
            assert b"Connection: close" in answer
            stopping.result(60)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((host, port), timeout=60)

    run_listener(talk, slow)


def test_stopping_does_not_wait_for_ever() -> None:
    slow = Slow()

    def talk(host: str, port: int, http: Http, loop: Any) -> None:
        with socket.create_connection((host, port), timeout=60) as busy:
            busy.sendall(b"POST /slow HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
            assert slow.begun.wait(60)
            asyncio.run_coroutine_threadsafe(http.stop(50), loop).result(60)
            assert read_all(busy) == b""

    run_listener(talk, slow)


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput, match=f"127.0.0.1:{port}"):
            run_listener(lambda *_: None, port=port)


def test_a_server_that_stops_answers_its_polls() -> None:
    answers: list[Any] = []
    with serving() as served:
        sqs = client_of(served)
        url = sqs.create_queue(QueueName="waiting")["QueueUrl"]
        poll = threading.Thread(
            target=lambda: answers.append(sqs.receive_message(QueueUrl=url, WaitTimeSeconds=20))
        )
        poll.start()
        wait_until(lambda: served.batcher.parked)
    poll.join(60)
    assert len(answers) == 1
    assert "Messages" not in answers[0]
