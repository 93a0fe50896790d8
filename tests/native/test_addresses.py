"""The URL of several servers: how it is read, and how clients go from one server to the next."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from tests.native.serving import SLOW_SECONDS, Served, message
from tests.ports import free_ports
from tests.waiting import wait_until

import penstock
from penstock.addresses import Address, TlsFiles, parse_servers
from penstock.client.turns import BACKOFF_BASE_MS, GOOD_MS, Turns
from penstock.errors import InvalidUrl, NotAllowed, ServerUnreachable
from penstock.server import running
from penstock.server.keys import add_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMES = ("penstock", "penstocks")


@pytest.mark.parametrize(
    ("url", "addresses", "token"),
    [
        ("penstock://a", ["a:8814"], ""),
        ("penstock://a:1,b:2/", ["a:1", "b:2"], ""),
        ("penstock://a,b:2,a", ["a:8814", "b:2"], ""),
        ("penstock://[::1]:9,[fe80::2%eth0]", ["[::1]:9", "[fe80::2%eth0]:8814"], ""),
        ("penstock://k:s%3A%2C%40@a,b", ["a:8814", "b:8814"], "k:s:,@"),
    ],
)
def test_addresses(url: str, addresses: list[str], token: str) -> None:
    found = parse_servers(url, SCHEMES, 8814)
    assert [str(each) for each in found.addresses] == addresses
    assert found.token == token


def test_files_of_tls() -> None:
    found = parse_servers("penstocks://a?ca=%2Fetc%2Fca.pem&cert=c&key=k", SCHEMES, 1)
    assert found.files == TlsFiles("/etc/ca.pem", "c", "k")
    # A certificate and its key are of one place.
    assert TlsFiles(cert="a").otherwise(TlsFiles("ca", "b", "k")) == TlsFiles("ca", "a", "")


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("penstock://a,", r"'' in .* is not an address: HOST or HOST:PORT"),
        ("penstock://::1", r"'::1' in .* is not an address.* an IPv6 host in brackets"),
        ("penstock://a:0", "'a:0' in"),
        ("penstock://a:65536", "'a:65536' in"),
        ("penstock://a/path", "has more than addresses"),
        ("penstock://", "names no server; the URL of a server is penstock://HOST:8814"),
        ("penstock://k:hunter2@a,k:hunter2@b", "has several keys: one is for all"),
        ("penstocks://a?cret=f", "unknown option 'cret'; did you mean 'cert'"),
        ("penstock://a?ca=f", "names files of TLS, and no TLS: begin it with penstocks://"),
        ("penstock://" + ",".join(f"h{n}" for n in range(17)), "17 addresses; there may be 16"),
    ],
)
def test_urls_that_name_no_servers(url: str, match: str) -> None:
    with pytest.raises(InvalidUrl, match=match) as caught:
        penstock.connect(url)
    assert "hunter2" not in str(caught.value)


def test_each_address_has_its_turn_before_a_pause() -> None:
    turns = Turns(["a", "b", "c"], lambda: 1.0)
    begin = now = 1_000_000
    for at in (1, 2):
        assert turns.lost("no", now, ready=False) == now
        assert turns.at == at
    assert turns.lost("no", now, ready=False) == now + BACKOFF_BASE_MS
    # A server that says welcome and goes at once does not keep clients busy.
    for _ in range(30):
        now = turns.lost("no", now, ready=False)
        turns.welcomed(now)
        now = turns.lost("fenced", now, ready=True)
    assert now - begin >= 20 * BACKOFF_BASE_MS
    turns.welcomed(now)
    at = turns.at
    assert turns.lost("cut", now + GOOD_MS, ready=True) == now + GOOD_MS
    said = {at: "cut", turns.at: "no answer yet"}
    told = [f"{name}: {said.get(n, 'not tried yet')}" for n, name in enumerate("abc")]
    assert turns.why == "; ".join(told)


# --- real servers ---------------------------------------------------------------------------------


@pytest.fixture
def broker() -> Iterator[penstock.Broker]:
    with penstock.open("memory:") as opened:
        opened.create_queue("q")
        yield opened


def both(first: int, second: int) -> str:
    return f"penstock://127.0.0.1:{first},127.0.0.1:{second}"


def test_the_first_is_down(broker: penstock.Broker) -> None:
    (nobody,) = free_ports(1)
    with Served(broker) as served:
        url = both(nobody, served.port)
        with penstock.connect(url) as client, penstock.open(url) as opened:
            assert client.ping() > 0
            assert opened.queues()[0].name == "q"

        async def ping() -> float:
            async with penstock.connect_async(url) as client:
                return float(await client.ping())

        assert asyncio.run(ping()) > 0


def test_every_address_has_its_reason(broker: penstock.Broker) -> None:
    first, second = free_ports(2)
    with pytest.raises(ServerUnreachable, match="no server at any address: ") as caught:
        penstock.connect(both(first, second), patience_ms=400)
    for port in (first, second):
        assert f"127.0.0.1:{port}" in str(caught.value)
    assert "is 'penstock serve' running there?" in str(caught.value)
    with (
        Served(broker) as served,
        penstock.connect(f"{served.url},127.0.0.1:{second}", patience_ms=400) as client,
    ):
        served.stop()
        with pytest.raises(ServerUnreachable, match="no server for 400 ms") as caught:
            client.ping()
        assert all(f"127.0.0.1:{each}" in str(caught.value) for each in (served.port, second))


def test_ipv6(broker: penstock.Broker) -> None:
    (nobody,) = free_ports(1)
    with running(broker, native="[::1]:0") as server:
        place = server.location("native").removeprefix("penstock://")
        assert place.startswith("[::1]:")
        with penstock.connect(f"penstock://[::1]:{nobody},{place}") as client:
            assert client.ping() > 0


def test_a_server_that_accepts_and_says_nothing_is_left(broker: penstock.Broker) -> None:
    # As one that is paused, or whose process is about to open its store.
    with socket.create_server(("127.0.0.1", 0)) as silent, Served(broker) as served:
        url = both(silent.getsockname()[1], served.port)
        with penstock.connect(url, patience_ms=2_000) as client:
            assert client.ping() > 0
        with pytest.raises(ServerUnreachable, match="no whole greeting within 350 ms"):
            penstock.connect(url.partition(",")[0] + ",127.0.0.1:1", patience_ms=700)


def test_a_greeting_that_dribbles_in_is_left(broker: penstock.Broker) -> None:
    over = threading.Event()

    def dribble(listening: socket.socket) -> None:
        with listening.accept()[0] as connection, suppress(OSError):
            # A frame of so many bytes has begun; a tick of the client is longer than a pause.
            connection.sendall(b"\0\1\0\0")
            while not over.wait(0.05):
                connection.sendall(b"\x93")

    with socket.create_server(("127.0.0.1", 0)) as first, Served(broker) as served:
        thread = threading.Thread(target=dribble, args=(first,))
        thread.start()
        url = both(first.getsockname()[1], served.port)
        try:
            with penstock.connect(url, patience_ms=4_000) as client:
                assert client.ping() > 0
        finally:
            over.set()
            thread.join()


def test_a_server_that_hangs_is_left_while_calls_have_patience(broker: penstock.Broker) -> None:
    going_on = threading.Event()
    with (
        Served(broker) as first,
        Served(broker) as second,
        penstock.connect(both(first.port, second.port), patience_ms=4_000) as client,
    ):
        assert client.ping() > 0
        first.loop.call_soon_threadsafe(going_on.wait, SLOW_SECONDS)
        try:
            client.send("q", b"x")
        finally:
            going_on.set()
        assert len(second.listener.connections) == 1
        # The first one may have done it too, and then knew the dedup id.
        wait_until(lambda: not first.listener.connections)
        assert client.stats("q").available == 1


def test_a_server_that_stops_is_left_while_it_is_still_at_work(broker: penstock.Broker) -> None:
    with (
        Served(broker) as first,
        Served(broker) as second,
        penstock.connect(both(first.port, second.port)) as client,
    ):
        waiting = client.consume("q", wait_ms=SLOW_SECONDS * 1000)
        assert client.ping() > 0
        # The server would close it only when nobody's request is at work any more.
        for connection in list(first.listener.connections):
            first.loop.call_soon_threadsafe(connection.leave)
        wait_until(lambda: len(second.listener.connections) == 1)
        client.send("q", b"x")
        assert next(waiting).ack().result()


def test_calls_under_way_are_repeated_at_the_next_server(broker: penstock.Broker) -> None:
    with (
        Served(broker) as first,
        Served(broker) as second,
        penstock.connect(both(first.port, second.port), patience_ms=60_000) as client,
    ):
        for n in range(200):
            client.publish([message(b"%d" % n)])
            if n % 20 == 10:
                (first if n % 40 == 10 else second).cut()
        assert client.stats("q").available == 200


def test_a_worker_goes_to_the_next_server(broker: penstock.Broker) -> None:
    done = set()
    with (
        Served(broker) as first,
        Served(broker) as second,
        penstock.connect(url := both(first.port, second.port)) as client,
    ):
        worker = penstock.Worker(url, "q", lambda each: done.add(each.payload), concurrency=2)
        worker.start()
        try:
            client.publish([message(b"%d" % n) for n in range(20)])
            wait_until(lambda: len(done) == 20)
            first.stop(grace_ms=0)
            client.publish([message(b"%d" % n) for n in range(20, 40)])
            wait_until(lambda: len(done) == 40)
        finally:
            worker.stop()


def test_servers_of_two_stores_are_told(broker: penstock.Broker) -> None:
    with (
        penstock.open("memory:") as other,
        Served(broker) as first,
        Served(other) as second,
        penstock.connect(both(first.port, second.port), patience_ms=800) as client,
    ):
        assert client.ping() > 0
        first.stop(grace_ms=0)
        with pytest.raises(ServerUnreachable, match="all addresses must be of one store"):
            client.ping()


def test_a_key_that_one_server_does_not_know_yet(broker: penstock.Broker, tmp_path: Path) -> None:
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    add_key(old, "other", ["all"])
    token = f"app:{add_key(new, 'app', ['all'])}"
    with (
        running(broker, native="127.0.0.1:0", auth_keys=old) as first,
        running(broker, native="127.0.0.1:0", auth_keys=new) as second,
    ):
        ports = [each.addresses["native"][1] for each in (first, second)]
        with penstock.connect(both(*ports), token=token) as client:
            assert client.ping() > 0
        # With all the patience in the world.
        with pytest.raises(NotAllowed, match="the key is not known") as caught:
            penstock.connect(both(*ports), token="app:wrong", patience_ms=3_600_000)
        assert all(f"127.0.0.1:{port}: the key" in str(caught.value) for port in ports)


def test_an_address_names_its_ipv6_host_in_brackets() -> None:
    assert str(Address("::1", 5)) == "[::1]:5"
