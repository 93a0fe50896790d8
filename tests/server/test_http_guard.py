"""Web pages can't drive a server that asks for no keys; everybody else on the machine can."""

from __future__ import annotations

import http.client
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock.server import running
from penstock.server.security import PageGuard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.server import Server

FORM = b"Action=CreateQueue&QueueName=made&Version=2012-11-05"


@pytest.fixture
def server() -> Iterator[Server]:
    with penstock.open("memory:") as broker, running(broker, http="127.0.0.1:0") as started:
        yield started


def post(server: Server, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server.addresses["http"], timeout=60)
    try:
        connection.request(
            "POST", "/", FORM, {"content-type": "application/x-www-form-urlencoded", **headers}
        )
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def guarded(guard: PageGuard, **headers: str) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return 200 if guard(named) is None else 403


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"origin": "https://evil.example"}, b"(Origin)"),
        ({"origin": "null"}, b"(Origin)"),
        ({"origin": "http://localhost:1"}, b"(Origin)"),
        ({"sec-fetch-site": "cross-site"}, b"Sec-Fetch-Site"),
        ({"host": "evil.example:8816"}, b"(Host)"),
        ({"host": "localhost.evil.example"}, b"(Host)"),
        ({"host": "evil.example", "origin": "http://evil.example"}, b"(Host)"),
    ],
)
def test_pages_are_refused(server: Server, headers: dict[str, str], why: bytes) -> None:
    status, body = post(server, headers)
    assert status == 403
    assert why in body
    assert body.startswith(b"This server asks for no keys")
    assert server.broker.queues() == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:8816"},
        {"host": "LOCALHOST"},
        {"host": "[::1]:8816"},
        {"host": "sqs.localhost:8816"},
        {"host": "127.0.0.2:1"},
        {"host": "localhost:8816", "origin": "http://localhost:8816"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-mode": "cors"},
    ],
)
def test_clients_of_this_machine_are_served(server: Server, headers: dict[str, str]) -> None:
    assert post(server, headers)[0] == 200
    assert [spec.name for spec in server.broker.queues()] == ["made"]


def test_the_pages_for_operators_are_guarded_too(server: Server) -> None:
    connection = http.client.HTTPConnection(*server.addresses["http"], timeout=60)
    connection.request("GET", "/metrics", headers={"host": "evil.example"})
    assert connection.getresponse().status == 403
    connection.close()


def test_the_address_that_the_server_is_known_by() -> None:
    guard = PageGuard("127.0.0.1", "https://queues.test:444/path")
    assert guarded(guard, host="queues.test:444") == 200
    assert guarded(guard, host="queues.test", origin="https://queues.test:444") == 200
    assert guarded(guard, host="other.test:444") == 403
    assert guarded(guard, host="queues.test", origin="https://other.test:444") == 403


def test_a_server_that_others_reach_takes_any_host_but_no_foreign_page() -> None:
    guard = PageGuard("0.0.0.0")
    assert guarded(guard, host="any.example") == 200
    assert guarded(guard) == 200
    assert guarded(guard, host="any.example", origin="http://any.example") == 200
    assert guarded(guard, host="any.example", origin="http://evil.example") == 403
    assert guarded(guard, host="any.example", sec_fetch_site="cross-site") == 403
    assert guarded(guard, origin="null") == 403


def test_with_keys_the_key_decides(keys: dict[str, str], tmp_path: Path, ask: Any) -> None:
    with running("memory:", http="127.0.0.1:0", keys=tmp_path / "keys.toml") as server:
        assert post(server, {"host": "any.example", "origin": "http://evil.example"})[0] == 403
        answer = ask(server.addresses["http"], "GET", "/metrics", token=keys["root"])
        assert answer.status == 200
        connection = http.client.HTTPConnection(*server.addresses["http"], timeout=60)
        bearer = {"authorization": f"Bearer {keys['root']}", "host": "any.example"}
        connection.request("GET", "/metrics", headers=bearer)
        assert connection.getresponse().status == 200
        connection.close()


def test_a_host_that_was_let_through_lets_nothing_else_through() -> None:
    guard = PageGuard("127.0.0.1")
    assert guarded(guard, host="localhost:1") == 200
    assert guarded(guard, host="localhost:1", origin="http://evil.test") == 403
    assert guarded(guard, host="localhost:1", sec_fetch_site="cross-site") == 403
    assert guarded(guard, host="evil.test") == 403
    assert guarded(guard, host="localhost:1") == 200
