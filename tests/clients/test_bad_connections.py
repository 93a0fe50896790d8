"""Idle, dribbling, half-closed and oversized: answered in kind, and at nobody else's expense."""

from __future__ import annotations

import socket
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from tests.clients.process import eventually, pause
from tests.clients.sockets import (
    HELLO,
    Bye,
    connect,
    frame,
    frames,
    last_frame,
    post,
    read_all,
    room_for_files,
    status,
)

import penstock
from penstock.wire import native as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.clients.process import Served

pytestmark = pytest.mark.slow

IDLE = 10_000
# What the test and the server need for themselves.
SPARE_FILES = 400
IDLE_BYTES = 16 * 1024


# Longer than any test waits: who is let go in time is not let go for this.
PATIENT = ("--limits-request", "30m", "--limits-first-byte", "30m", "--limits-idle", "30m")


@pytest.fixture
def server(serve: Callable[..., Served]) -> Served:
    return serve(*PATIENT, "--limits-body", "64KB")


@contextmanager
def others(served: Served) -> Iterator[Callable[[], None]]:
    """Have other clients work meanwhile; gives what waits until they have got somewhere."""
    rounds = {"http": 0, "native": 0}
    failures: list[BaseException] = []
    stop = threading.Event()
    sqs = served.sqs()
    url = sqs.create_queue(QueueName="others")["QueueUrl"]

    def by_http() -> None:
        sqs.send_message(QueueUrl=url, MessageBody="x")
        [message] = sqs.receive_message(QueueUrl=url)["Messages"]
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])

    def natively(client: Any) -> None:
        client.send("native", b"x")
        [delivery] = client.claim("native")
        client.ack([delivery.receipt])

    def work(how: str, do: Callable[[], None]) -> None:
        try:
            while not stop.is_set():
                do()
                rounds[how] += 1
                stop.wait(0.02)
        except BaseException as error:
            failures.append(error)

    def go_on() -> None:
        before = dict(rounds)
        eventually(
            lambda: failures or all(rounds[how] > before[how] + 2 for how in rounds),
            "others to be served",
        )
        assert not failures

    with penstock.connect(served.native) as client:
        client.create_queue("native")
        threads = [
            threading.Thread(target=work, args=("http", by_http)),
            threading.Thread(target=work, args=("native", lambda: natively(client))),
        ]
        for thread in threads:
            thread.start()
        try:
            yield go_on
            go_on()
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


# --- idle -----------------------------------------------------------------------------------------


def test_ten_thousand_idle_connections(serve: Callable[..., Served]) -> None:
    with room_for_files(IDLE + SPARE_FILES) as allowed, ExitStack() as stack:
        count = min(IDLE, allowed - SPARE_FILES)
        assert count >= 500, f"{allowed} open files are too few to try"
        # Nobody is to be let go for being silent while they are counted.
        server = serve(*PATIENT)
        with others(server) as go_on:
            for _ in range(3):
                go_on()
        before = server.resident_bytes
        for number in range(count):
            if number % 2:
                stack.enter_context(connect(server.ports["http"]))
            else:
                stack.enter_context(connect(server.ports["native"])).sendall(HELLO)
        eventually(lambda: open_connections(server) >= count, "the connections to be taken")
        with others(server) as go_on:
            for _ in range(10):
                go_on()
        each = (server.resident_bytes - before) / count
        sys.stdout.write(f"{count} idle connections, {each:.0f} bytes each\n")
        assert each < IDLE_BYTES, f"{each:.0f} bytes for each of {count} idle connections"
        assert open_connections(server) >= count
        stack.close()
        eventually(lambda: open_connections(server) < 10, "the connections to be let go")


def open_connections(server: Served) -> int:
    """Count the sockets that the server says it has, by HTTP and natively."""
    with connect(server.ports["http"]) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        page = read_all(connection).decode()
    lines = [line for line in page.splitlines() if line.startswith("penstock_connections{")]
    assert lines, page[:2_000]
    return round(sum(float(line.split()[-1]) for line in lines))


# --- dribbling ------------------------------------------------------------------------------------


def dribble(connection: socket.socket, data: bytes, every: float) -> None:
    """Send byte by byte until either side has had enough."""
    with suppress(OSError):
        for byte in data:
            connection.sendall(bytes([byte]))
            pause(every)


def test_who_dribbles_keeps_nobody_waiting(server: Served) -> None:
    request = post("ListQueues", {"QueueNamePrefix": "x" * 500})
    hello = HELLO + frame([25, 1])
    with others(server) as go_on, ExitStack() as stack:
        threads = []
        for port, data in ((server.ports["http"], request), (server.ports["native"], hello)):
            slow = [stack.enter_context(connect(port)) for _ in range(20)]
            threads += [
                threading.Thread(target=dribble, args=(each, data[:-1], 0.1)) for each in slow[:10]
            ]
            for each in slow[10:]:
                each.sendall(data[:-1])
        for thread in threads:
            thread.start()
        go_on()
        stack.close()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


def test_who_dribbles_is_told_and_let_go(serve: Callable[..., Served]) -> None:
    server = serve("--limits-request", "3s")
    request = post("ListQueues", {"QueueNamePrefix": "x" * 500})
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(server.ports["http"])) for _ in range(50)]
        threads = [
            threading.Thread(target=dribble, args=(each, request[number:], 0.1))
            for number, each in enumerate(slow[:20])
        ]
        for each in slow[20:]:
            each.sendall(request[:-1])
        for thread in threads:
            thread.start()
        answers = [read_all(each) for each in slow]
        for thread in threads:
            thread.join(60)
    # Of those that went on sending, some find the connection reset before they read.
    assert {status(each) for each in answers[20:]} == {408}
    assert {status(each) for each in answers[:20] if each} <= {400, 408}


def test_dribbled_requests_in_time_are_answered(server: Served) -> None:
    with connect(server.ports["http"]) as connection:
        request = post("ListQueues", {}, more="Connection: close\r\n")
        dribble(connection, request, 0.001)
        assert status(read_all(connection)) == 200


def test_a_native_greeting_may_be_dribbled(server: Served) -> None:
    with connect(server.ports["native"]) as connection:
        dribble(connection, HELLO, 0.001)
        assert connection.recv(4)


# --- half-closed ----------------------------------------------------------------------------------


def test_half_a_request_and_then_no_more(server: Served) -> None:
    request = post("ListQueues", {})
    with others(server):
        for cut in (0, 1, 20, len(request) - 1):
            with connect(server.ports["http"]) as connection:
                connection.sendall(request[:cut])
                connection.shutdown(socket.SHUT_WR)
                read_all(connection)
        hello = HELLO + frame([25, 1])
        began = time.perf_counter()
        for cut in (0, 3, len(HELLO) - 1, len(hello) - 1):
            with connect(server.ports["native"]) as connection:
                connection.sendall(hello[:cut])
                connection.shutdown(socket.SHUT_WR)
                read_all(connection)
        # A minute is what all four take that are closed for being silent only.
        assert time.perf_counter() - began < 40


def test_a_whole_request_and_then_no_more_is_answered(server: Served) -> None:
    def answered() -> bool:
        with connect(server.ports["http"]) as connection:
            connection.sendall(post("ListQueues", {}))
            connection.shutdown(socket.SHUT_WR)
            answer = read_all(connection)
        return answer != b"" and status(answer) == 200

    # An answer that is long in the making is dropped: on a busy machine, any may be.
    eventually(answered, "an answer")


# --- too large ------------------------------------------------------------------------------------

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.ListQueues\r\n"
MANY = b"".join(b"A%d: b\r\n" % each for each in range(1_000))
CHUNK = b"2000\r\n" + b"x" * 0x2000 + b"\r\n"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (HEAD + b"Content-Length: 70000\r\n\r\n" + b"x" * 70_000, 413),
        (HEAD + b"Content-Length: 99999999999\r\n\r\n", 413),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK * 10, 413),
        (HEAD + b"X-Long: " + b"x" * 200_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n", 431),
        (HEAD + MANY + b"\r\n", 431),
    ],
    ids=["body", "announced", "chunks", "header", "line", "headers"],
)
def test_oversized_http_is_refused(server: Served, request_: bytes, expected: int) -> None:
    with others(server), ExitStack() as stack:
        connections = [stack.enter_context(connect(server.ports["http"])) for _ in range(10)]
        for each in connections:
            threading.Thread(target=swallow, args=(each, request_), daemon=True).start()
        for each in connections:
            assert status(read_all(each)) == expected


def swallow(connection: socket.socket, data: bytes) -> None:
    """Send what the other side may not care to read."""
    with suppress(OSError):
        connection.sendall(data)


@pytest.mark.parametrize(
    "data",
    [
        (9_000).to_bytes(4, "big") + b"x" * 9_000,
        HELLO + (2**31).to_bytes(4, "big") + b"x" * 100_000,
        HELLO + bytes(4),
    ],
    ids=["greeting", "frame", "nothing"],
)
def test_oversized_frames_get_a_farewell(server: Served, data: bytes) -> None:
    before = server.resident_bytes
    with others(server), ExitStack() as stack:
        connections = [stack.enter_context(connect(server.ports["native"])) for _ in range(10)]
        for each in connections:
            swallow(each, data)
        for each in connections:
            bye = last_frame(read_all(each))
            assert isinstance(bye, Bye)
            assert bye.name == "InvalidInput"
            assert "allowed are 1 to" in bye.message
    assert server.resident_bytes - before < 64 * 1024 * 1024


def test_a_large_frame_that_is_begun_costs_what_has_come(server: Served) -> None:
    with others(server) as go_on, ExitStack() as stack:
        go_on()
        before = server.resident_bytes
        for _ in range(50):
            connection = stack.enter_context(connect(server.ports["native"]))
            connection.sendall(HELLO + (60_000_000).to_bytes(4, "big") + b"x" * 1_000)
        pause(1)
        assert server.resident_bytes - before < 32 * 1024 * 1024


# --- spoilt ---------------------------------------------------------------------------------------


def test_a_text_that_is_not_utf8_costs_only_its_request(server: Served) -> None:
    spoilt = frame([8, 1, "name"]).replace(b"name", b"n\xe5me")
    with connect(server.ports["native"]) as connection:
        connection.sendall(HELLO + spoilt + frame([25, 2]))
        refused, answered = frames(connection, 3)[1:]
    assert isinstance(refused, wire.Failure)
    assert (refused.id, refused.name) == (1, "InvalidInput")
    assert isinstance(answered, wire.Result)
    assert answered.id == 2
    assert not server.complaints()


def test_a_greeting_that_is_not_utf8_gets_a_farewell(server: Served) -> None:
    with connect(server.ports["native"]) as connection:
        connection.sendall(HELLO.replace(b"p", b"\xe5"))
        assert isinstance(last_frame(read_all(connection)), Bye)
    assert not server.complaints()


def test_a_policy_of_great_depth_is_refused(server: Served) -> None:
    deep = post("CreateQueue", {"QueueName": "q", "Attributes": {"RedrivePolicy": "[" * 10_000}},
                more="Connection: close\r\n")  # fmt: skip
    with connect(server.ports["http"]) as connection:
        connection.sendall(deep)
        answer = read_all(connection)
    assert status(answer) == 400
    assert b"not a JSON object" in answer


def test_faults_of_the_query_protocol_are_xml_whatever_was_asked(server: Served) -> None:
    with connect(server.ports["http"]) as connection:
        connection.sendall(
            b"GET /?Action=%01%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        answer = read_all(connection)
    assert status(answer) == 400
    assert ET.fromstring(answer.partition(b"\r\n\r\n")[2]).tag.endswith("ErrorResponse")
