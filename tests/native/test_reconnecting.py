"""What clients see when connections, or servers, go away under them."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import pytest
from tests.native.serving import SLOW_SECONDS, Served, make_impatient, pause, tls_contexts
from tests.waiting import wait_until as eventually

import penstock
from penstock.client import Uncertain
from penstock.client.connection import ClientConnection
from penstock.client.transport import Transport
from penstock.clock import ManualClock
from penstock.errors import InvalidUrl, ServerUnreachable
from penstock.model import Message, OutcomeStatus

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.client import Client


def message(body: bytes = b"", **fields: Any) -> Message:
    return Message(body, {"queue": "q"}, **fields)


class Proxy:
    """Stands between a client and a server, and can lose what either says."""

    def __init__(self, port: int) -> None:
        # Where the server is; there may be none for a while, and then one at another port.
        self.target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"penstock://127.0.0.1:{self._listening.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        # What is dropped: answers on the connections up to this one; or everything, silently.
        self.eaten = 0
        self.frozen = False
        # Bytes of answers that were dropped.
        self.lost = 0
        # How many connections are closed without a word.
        self.refuse = 0
        self._spawn(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for thread in self._threads:
            thread.join(SLOW_SECONDS)

    @property
    def made(self) -> int:
        """How many connections there have been."""
        return len(self._pairs)

    def cut(self) -> None:
        for pair in self._pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _spawn(self, work: Any, *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
                if self.refuse:
                    self.refuse -= 1
                    near.close()
                    continue
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            self._pairs.append((near, far))
            self._spawn(self._carry, near, far, None)
            self._spawn(self._carry, far, near, self.made)

    def _carry(self, source: socket.socket, sink: socket.socket, answers_of: int | None) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self.frozen or (answers_of is not None and answers_of <= self.eaten):
                    self.lost += len(data)
                    continue
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


def lose_the_answer(proxy: Proxy, client: Client, act: Any, *, until: Any) -> Any:
    """Run a call whose first answer is lost; cut once the server has done it and answered.

    A server whose client goes before the answer is written gives a claimed message back.
    """
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(act())
        except Exception as error:
            result.append(error)

    # Not those of the connection that comes after the cut, however late its answers are.
    proxy.eaten = proxy.made
    thread = threading.Thread(target=run)
    thread.start()
    eventually(until)
    eventually(lambda: proxy.lost)
    proxy.cut()
    thread.join(SLOW_SECONDS)
    assert not thread.is_alive()
    return result[0]


def test_a_cut_connection_is_made_again(served: Served) -> None:
    with Proxy(served.port) as proxy, penstock.connect(proxy.url) as client:
        for _ in range(5):
            assert client.stats("q").queue == "q"
            proxy.cut()
        assert client.stats("q").queue == "q"


def test_a_repeated_publish_is_not_doubled(served: Served) -> None:
    with Proxy(served.port) as proxy, penstock.connect(proxy.url) as client:
        ids = lose_the_answer(
            proxy,
            client,
            lambda: client.publish([message(b"1"), message(b"2")]),
            until=lambda: served.broker.stats("q").available == 2,
        )
    assert [entry.message_id for entry in served.broker.browse("q")] == ids
    assert served.broker.store_stats().duplicates_total == 2


def test_a_publish_without_dedup_ids_is_not_repeated(served: Served) -> None:
    with Proxy(served.port) as proxy, penstock.connect(proxy.url, dedup=False) as client:
        error = lose_the_answer(
            proxy,
            client,
            lambda: client.publish([message()]),
            until=lambda: served.broker.stats("q").available == 1,
        )
        assert type(error) is ServerUnreachable
        assert "without dedup ids" in str(error)
        assert client.stats("q").available == 1


def test_a_repeated_ack_says_that_it_is_uncertain(served: Served) -> None:
    with Proxy(served.port) as proxy, penstock.connect(proxy.url) as client:
        client.publish([message()])
        (delivery,) = client.claim("q")
        (outcome,) = lose_the_answer(
            proxy,
            client,
            lambda: client.ack([delivery.receipt]),
            until=lambda: served.broker.stats("q").done == 1,
        )
    assert isinstance(outcome, Uncertain)
    assert outcome.status is OutcomeStatus.STALE
    assert served.broker.attempts("q", delivery.message_id)[-1].end == "acked"


def test_a_claim_is_not_repeated(served: Served) -> None:
    with Proxy(served.port) as proxy, penstock.connect(proxy.url) as client:
        client.publish([message()])
        error = lose_the_answer(
            proxy,
            client,
            lambda: client.claim("q", lease_ms=700),
            until=lambda: served.broker.stats("q").claimed_total == 1,
        )
        assert type(error) is ServerUnreachable
        assert "comes back when its lease ends" in str(error)
        assert [d.attempts for d in client.claim("q", wait_ms=60_000)] == [2]


def test_a_half_open_connection_is_noticed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        # Outermost: the client's end frees a call that nobody answers.
        ThreadPoolExecutor() as pool,
        Proxy(served.port) as proxy,
        penstock.connect(proxy.url, patience_ms=60_000) as client,
    ):
        before = proxy.made
        proxy.frozen = True
        monkeypatch.setattr("penstock.client.connection.PING_MS", 200)
        monkeypatch.setattr("penstock.client.connection.SILENCE_MS", 300)
        asked = pool.submit(client.stats, "q")
        eventually(lambda: proxy.made > before)
        # From here on nobody is to be suspicious of what is only slow.
        monkeypatch.undo()
        proxy.frozen = False
        proxy.cut()
        assert asked.result(SLOW_SECONDS).queue == "q"


def test_nothing_is_lost_under_many_cuts(served: Served) -> None:
    rng = ManualClock(seed=5)
    with Proxy(served.port) as proxy, penstock.connect(proxy.url) as client:
        over = threading.Event()
        ids: list[int] = []

        def cut() -> None:
            seen, vain = 0, 0
            # Slower while nothing comes through: a connection must be possible in between.
            while not over.wait((0.01 + rng.random() / 10) * (1 + vain)):
                seen, vain = (len(ids), 0) if len(ids) > seen else (seen, vain + 1)
                proxy.cut()

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            for n in range(100):
                ids += client.publish([message(b"%d" % n)])
        finally:
            over.set()
            cutter.join()
        assert len(set(ids)) == 100
    bodies = sorted(int(e.payload or b"") for e in served.broker.browse("q", limit=1000))
    assert bodies == list(range(100))


def test_a_server_that_restarts(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/store"
    broker = penstock.open(url)
    broker.create_queue("q")
    served = Served(broker)
    with (
        Proxy(served.port) as proxy,
        penstock.connect(proxy.url, patience_ms=120_000) as client,
    ):
        first = client.publish([message(b"1")])
        parked: list[Any] = []
        thread = threading.Thread(
            target=lambda: parked.append(client.claim("nothing", wait_ms=600_000))
        )
        client.create_queue("nothing")
        thread.start()
        eventually(lambda: served.batcher.parked)
        served.stop()
        broker.close()
        thread.join(SLOW_SECONDS)
        assert parked == [[]]
        late: list[Any] = []
        waiting = threading.Thread(target=lambda: late.append(client.publish([message(b"2")])))
        waiting.start()
        pause(0.2)
        with penstock.open(url) as again, Served(again) as served:
            proxy.target = served.port
            waiting.join(SLOW_SECONDS)
            assert late[0][0] > first[0]
            assert client.stats("q").available == 2


KILLED = """
import sys, threading, penstock
from penstock.server import running

with penstock.open(sys.argv[1]) as broker, running(broker, native="127.0.0.1:0") as server:
    broker.create_queue("q")
    print(server.addresses["native"][1], flush=True)
    threading.Event().wait(600)
"""


def start(url: str) -> tuple[subprocess.Popen[str], int]:
    script = f"import sys; sys.path[:0] = {sys.path!r}\n{KILLED}"
    process = subprocess.Popen(
        [sys.executable, "-c", script, url], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_server_that_is_killed_loses_nothing_that_it_confirmed(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/store"
    process, port = start(url)
    try:
        with (
            Proxy(port) as proxy,
            penstock.connect(proxy.url, patience_ms=120_000) as client,
        ):
            confirmed: list[int] = []
            over = threading.Event()

            def publish() -> None:
                n = 0
                while not over.is_set():
                    confirmed.extend(client.publish([message(b"%d" % n)]))
                    n += 1

            thread = threading.Thread(target=publish)
            thread.start()
            eventually(lambda: len(confirmed) > 20)
            process.kill()
            process.communicate()
            at_kill = len(confirmed)
            process, proxy.target = start(url)
            # More than the one whose answer may have been on its way.
            eventually(lambda: len(confirmed) > at_kill + 1)
            over.set()
            thread.join(SLOW_SECONDS)
            assert not thread.is_alive()
            found = {entry.message_id for entry in client.browse("q", limit=10_000)}
            assert found == set(confirmed)
    finally:
        process.kill()
        process.communicate()


def test_the_asynchronous_client_comes_back_too(served: Served) -> None:
    async def main() -> None:
        async with await penstock.connect_async(served.url) as client:
            assert (await client.stats("q")).queue == "q"
            await asyncio.to_thread(served.cut)
            assert (await client.stats("q")).queue == "q"

    asyncio.run(main())


def test_calls_of_a_client_that_closes_raise(served: Served) -> None:
    client = penstock.connect(served.url)
    errors: list[Exception] = []

    def claim() -> None:
        try:
            client.claim("q", wait_ms=600_000)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=claim)
    thread.start()
    eventually(lambda: served.batcher.parked)
    client.close()
    thread.join(SLOW_SECONDS)
    assert [type(error) for error in errors] == [penstock.BrokerClosed]


# --- names of hosts -------------------------------------------------------------------------------


class Resolver:
    """Resolves names as the system does, until they are taken away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: int | None = None
        self.asked = 0
        self._resolve = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)
        # Libuv has a resolver of its own.
        monkeypatch.setattr("penstock.client.clients._new_loop", asyncio.new_event_loop)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.asked += 1
        if self.error is not None:
            raise socket.gaierror(self.error, "no")
        return self._resolve(*args, **options)


def test_a_name_that_nobody_has_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch)
    resolver.error = socket.EAI_NONAME
    # With all the patience in the world.
    with pytest.raises(ServerUnreachable, match=r"there is no host named 'nowhere\.invalid'"):
        penstock.connect("penstock://nowhere.invalid", patience_ms=3_600_000)
    assert resolver.asked == 1


def test_a_resolver_in_trouble_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(monkeypatch)
    resolver.error = socket.EAI_AGAIN
    with pytest.raises(ServerUnreachable, match=r"no server at nowhere\.invalid:8814"):
        penstock.connect("penstock://nowhere.invalid", patience_ms=500)
    assert resolver.asked > 1


def test_a_client_outlives_a_name_that_is_gone_for_a_while(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = Resolver(monkeypatch)
    with penstock.connect(f"penstock://localhost:{served.port}", patience_ms=60_000) as client:
        assert client.ping() > 0
        resolver.error = socket.EAI_NONAME
        asked = resolver.asked
        served.cut()
        eventually(lambda: resolver.asked > asked + 1)
        resolver.error = None
        assert client.ping() > 0


# --- TLS ------------------------------------------------------------------------------------------


def test_tls(tmp_path: Path) -> None:
    server_side, trusting = tls_contexts(tmp_path)
    with penstock.open("memory:") as broker, Served(broker, tls=server_side) as served:
        broker.create_queue("q")
        with penstock.connect(served.url, tls=trusting) as client:
            body = b"x" * 3_000_000
            client.publish([message(body)])
            assert client.claim("q")[0].payload == body
            served.cut()
            assert client.ping() > 0
        # With all the patience in the world: what is wrong with TLS is told at once.
        with pytest.raises(ServerUnreachable, match=r"certificate of .* is not trusted"):
            penstock.connect(served.url.replace("penstock:", "penstocks:"), patience_ms=3_600_000)
        with pytest.raises(ServerUnreachable, match="speaks TLS: connect to penstocks://"):
            penstock.connect(served.url, patience_ms=3_600_000)


def test_tls_with_who_speaks_none(served: Served) -> None:
    with pytest.raises(ServerUnreachable, match="does not speak TLS"):
        penstock.connect(served.url, tls=True, patience_ms=3_600_000)


def test_who_ends_greetings_and_speaks_no_tls_is_tried_again(served: Served) -> None:
    with Proxy(served.port) as proxy:
        proxy.refuse = 3
        with penstock.connect(proxy.url) as client:
            assert client.ping() > 0
        assert proxy.refuse == 0


# --- patience, and what ends the client ---------------------------------------------------------


async def never(_transport: Transport) -> None:
    await asyncio.sleep(3600)


def test_patience_is_kept_while_connecting(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.connect(served.url) as client:
        make_impatient(client, 300)
        monkeypatch.setattr(Transport, "_connect", never)
        served.cut()
        with pytest.raises(ServerUnreachable, match="no server for 300 ms"):
            client.ping()
    with pytest.raises(ServerUnreachable, match="no server at"):
        penstock.connect(served.url, patience_ms=300)


@pytest.mark.parametrize("host", ["a" * 70 + ".com", "a..b"])
def test_a_host_that_can_be_none_is_told_at_once(host: str) -> None:
    with pytest.raises(InvalidUrl, match="name of a host"):
        penstock.connect(f"penstock://{host}:1", patience_ms=3_600_000)

    async def connect() -> None:
        await penstock.connect_async(f"penstock://{host}:1", patience_ms=3_600_000)

    with pytest.raises(InvalidUrl, match="name of a host"):
        asyncio.run(connect())


def test_no_surprise_leaves_calls_waiting(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise(_connection: ClientConnection, _now_ms: int) -> None:
        raise ZeroDivisionError

    with penstock.connect(served.url) as client:
        monkeypatch.setattr(ClientConnection, "tick", surprise)
        with pytest.raises(ServerUnreachable, match="ZeroDivisionError"):
            client.claim("q", wait_ms=20_000)
    with pytest.raises(ServerUnreachable, match="ZeroDivisionError"):
        penstock.connect(served.url, patience_ms=3_600_000)
