"""Logins, cookies, forged forms, permissions, headers; and SQS beside the console."""

from __future__ import annotations

import http.client
import re
from asyncio import wrap_future
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import boto3
import pytest
from tests.console.visiting import FORM, Visitor
from tests.server.conftest import issue

import penstock
from penstock import limits
from penstock.clock import ManualClock
from penstock.errors import InvalidInput
from penstock.server import running
from penstock.server.config import Config, authenticates, load
from penstock.server.keys import add_key, remove_key

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.server import Server

FAILED = "This key is not known here."


# --- login ----------------------------------------------------------------------------------------


def test_a_stranger_is_sent_to_the_login_and_back(
    stranger: Visitor, tokens: dict[str, str]
) -> None:
    sent = stranger.get("health?x=1")
    assert (sent.status, sent.headers["location"]) == (303, "/console/login?next=health%3Fx%3D1")
    page = stranger.ask("GET", sent.headers["location"])
    assert 'name="next" value="health?x=1"' in page.text
    key, _, secret = tokens["root"].partition(":")
    form = {"key": key, "secret": secret, "next": "health?x=1"}
    back = stranger.post("login", form)
    assert (back.status, back.headers["location"]) == (303, "/console/health?x=1")
    assert stranger.get("health").status == 200


def test_the_cookie_is_for_this_server_alone(stranger: Visitor, tokens: dict[str, str]) -> None:
    given = stranger.log_in(tokens["viewer"]).headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/console/"} <= set(given.split("; "))
    # Neither the key nor its secret is kept in the browser.
    assert tokens["viewer"].partition(":")[2] not in given
    assert "Secure" not in given


def test_with_tls_the_cookie_is_secure(
    tmp_path: Path, keys_file: Path, tokens: dict[str, str]
) -> None:
    files = issue(tmp_path / "tls")
    tls: dict[str, Any] = {"tls_certificate": str(files.certificate), "tls_key": str(files.key)}
    with running("memory:", http="127.0.0.1:0", keys=keys_file, **tls) as server:
        key, _, secret = tokens["root"].partition(":")
        connection = http.client.HTTPSConnection(
            *server.addresses["http"], timeout=60, context=files.context()
        )
        body = urlencode({"key": key, "secret": secret})
        connection.request("POST", "/console/login", body, {"content-type": FORM})
        given = connection.getresponse().headers["set-cookie"]
        connection.close()
    assert given.endswith("; Secure")


def test_the_whole_token_may_be_pasted(stranger: Visitor, tokens: dict[str, str]) -> None:
    assert stranger.post("login", {"key": "", "secret": tokens["root"]}).status == 303
    assert stranger.get().status == 200


@pytest.mark.parametrize(
    "form",
    [
        {"key": "root", "secret": "wrong"},
        {"key": "nobody", "secret": "wrong"},
        {"secret": ":"},
        {"secret": "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")},
        {"key": "x" * 10_000, "secret": "y" * 10_000},
        {},
    ],
)
def test_a_wrong_key_says_nothing_of_what_was_wrong(
    stranger: Visitor, form: dict[str, str]
) -> None:
    answer = stranger.post("login", form)
    assert answer.status == 403
    assert FAILED in answer.text
    assert "set-cookie" not in answer.headers
    assert stranger.get().status == 303


@pytest.mark.parametrize("address", ["//evil.example", "https://evil.example", "\\\\evil", "a\nb"])
def test_a_login_leads_nowhere_else(
    stranger: Visitor, tokens: dict[str, str], address: str
) -> None:
    key, _, secret = tokens["root"].partition(":")
    answer = stranger.post("login", {"key": key, "secret": secret, "next": address})
    assert answer.headers["location"].startswith("/console/")


def test_logging_out_ends_the_session(stranger: Visitor, tokens: dict[str, str]) -> None:
    stranger.log_in(tokens["root"])
    cookie = stranger.cookie
    answer = stranger.post("logout", {"csrf": stranger.get().csrf()})
    assert "Max-Age=0" in answer.headers["set-cookie"]
    assert stranger.get(cookie=cookie).status == 303


def test_logging_in_again_ends_the_session_before(
    stranger: Visitor, tokens: dict[str, str]
) -> None:
    stranger.log_in(tokens["root"])
    first = stranger.cookie
    assert stranger.log_in(tokens["viewer"]).status == 303
    assert stranger.get(cookie=first).status == 303
    assert stranger.get().status == 200


def test_a_session_ends_by_itself(tmp_path: Path) -> None:
    clock = ManualClock()
    token = f"root:{add_key(tmp_path / 'keys.toml', 'root', ['all'])}"
    settings = {"http": "127.0.0.1:0", "keys": tmp_path / "keys.toml"}
    with running("memory:", clock=clock, **settings) as server:
        idle, busy = Visitor(server), Visitor(server)
        idle.log_in(token)
        busy.log_in(token)
        steps, step_ms = 0, limits.CONSOLE_SESSION_IDLE_MS // 2
        while busy.get().status == 200:
            clock.advance(step_ms)
            steps += 1
        assert steps == limits.CONSOLE_SESSION_MS // step_ms
        assert idle.get().status == 303
        idle.log_in(token)
        clock.advance(limits.CONSOLE_SESSION_IDLE_MS)
        assert idle.get().status == 303


def test_a_key_that_is_removed_ends_its_sessions(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    tokens = {name: f"{name}:{add_key(path, name, ['all'])}" for name in ("one", "two")}
    with running("memory:", http="127.0.0.1:0", keys=path) as server:
        visitors = {name: Visitor(server) for name in tokens}
        for name, visitor in visitors.items():
            visitor.log_in(tokens[name])
        remove_key(path, "one")
        assert server.keys is not None
        server.keys.refresh()
        assert visitors["one"].get().status == 303
        assert visitors["two"].get().status == 200


def test_sessions_are_bounded(stranger: Visitor, guarded: Server, tokens: dict[str, str]) -> None:
    stranger.log_in(tokens["root"])
    first = stranger.cookie
    assert guarded.console is not None
    # A key alone has half of them.
    most = limits.CONSOLE_MAX_SESSIONS // 2
    for _ in range(most):
        stranger.cookie = ""
        stranger.log_in(tokens["root"])
    # Other keys may have some, of the tests before.
    assert most <= len(guarded.console.sessions) < most + 10
    assert stranger.get(cookie=first).status == 303
    assert stranger.get().status == 200


# --- forged forms ---------------------------------------------------------------------------------


def test_a_form_needs_the_token_of_its_session(
    guarded: Server, stranger: Visitor, tokens: dict[str, str]
) -> None:
    other = Visitor(guarded)
    other.log_in(tokens["root"])
    stranger.log_in(tokens["root"])
    for form in ({}, {"csrf": ""}, {"csrf": "x"}, {"csrf": other.get().csrf()}):
        assert stranger.post("logout", form).status == 403
    own = {"csrf": stranger.get().csrf()}
    assert stranger.post("logout", own, origin="https://evil.example").status == 403
    assert stranger.post("logout", own, content_type="text/plain").status == 400
    assert stranger.get().status == 200
    host = f"{stranger.address[0]}:{stranger.address[1]}"
    assert stranger.post("logout", own, origin=f"http://{host}").status == 303


def test_a_form_of_htmx_has_its_token_in_a_header(
    stranger: Visitor, tokens: dict[str, str]
) -> None:
    stranger.log_in(tokens["root"])
    answer = stranger.post("logout", {}, x_csrf_token=stranger.get().csrf(), hx_request="true")
    assert (answer.status, answer.headers["hx-redirect"]) == (200, "/console/login")


def test_without_keys_forms_need_a_token_too(visitor: Visitor) -> None:
    assert visitor.post("logout", {}).status == 403
    assert visitor.post("logout", {"csrf": visitor.get().csrf()}).status == 303
    assert visitor.get("login").headers["location"] == "/console/"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"sec_fetch_site": "cross-site"},
        {"host": "evil.example"},
    ],
)
def test_without_keys_other_sites_are_refused(visitor: Visitor, headers: dict[str, str]) -> None:
    assert visitor.get(**headers).status == 403


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"x" * (limits.CONSOLE_MAX_FORM_BYTES + 1), "application/x-www-form-urlencoded"),
        (b"&".join([b"a=b"] * (limits.CONSOLE_MAX_FORM_FIELDS + 1)),
         "application/x-www-form-urlencoded"),
        (b"{}", "application/json"),
        (b"--x\r\n", "multipart/form-data; boundary=x"),
    ],
)  # fmt: skip
def test_a_form_that_is_none_is_refused(visitor: Visitor, body: bytes, kind: str) -> None:
    connection = http.client.HTTPConnection(*visitor.address, timeout=60)
    connection.request("POST", "/console/logout", body, {"content-type": kind})
    assert connection.getresponse().status == 400
    connection.close()


# --- permissions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "queues", "status", "may_change"),
    [
        ("root", {"orders", "emails", "invoices"}, 200, True),
        ("viewer", {"orders", "emails", "invoices"}, 200, False),
        ("worker", {"orders"}, 403, False),
        ("sender", set(), 403, False),
    ],
)
def test_a_key_sees_what_it_may(
    stranger: Visitor,
    tokens: dict[str, str],
    name: str,
    queues: set[str],
    status: int,
    may_change: bool,
) -> None:
    stranger.log_in(tokens[name])
    page = stranger.get().text
    assert set(re.findall(r'href="/console/queues/([^"]+)"', page)) == queues
    assert ("Create a queue" in page) is may_change
    assert f'data-live="all:queues">{len(queues)}<' in page
    for path in ("health", "pipeline"):
        assert stranger.get(path).status == status
        assert stranger.ask("HEAD", f"/console/{path}/live").status == status
        assert (f'href="/console/{path}"' in page) is (status == 200)


def test_a_queue_that_is_not_there_names_the_nearest_that_the_key_sees(
    stranger: Visitor, tokens: dict[str, str]
) -> None:
    stranger.log_in(tokens["viewer"])
    answer = stranger.get("queues/invoice")
    assert answer.status == 404
    assert "did you mean &#39;invoices&#39;?" in answer.text
    stranger.log_in(tokens["worker"])
    assert stranger.get("queues/invoice").status == 403


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "health", "pipeline", "login", "nothing", "queues/nothing"])
def test_pages_come_with_their_headers(stranger: Visitor, path: str) -> None:
    found = stranger.get(path).headers
    policy = found["content-security-policy"]
    assert policy.startswith("default-src 'self'; ")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert found["x-frame-options"] == "DENY"
    assert found["x-content-type-options"] == "nosniff"
    assert found["referrer-policy"] == "same-origin"
    assert found["cache-control"] == "no-store"


def test_pages_have_no_script_or_style_inside(visitor: Visitor) -> None:
    inside = re.compile(r"<style|<script(?![^>]* src=)| style=| on\w+=|(src|href)=\W*http")
    for path in ("", "health", "pipeline", "nothing"):
        assert not inside.search(visitor.get(path).text)


@pytest.mark.parametrize(
    "path",
    ["nothing", "static/", "static/../__init__.py", "static/%2e%2e/__init__.py", "static/nothing",
     "docs/../../../../etc/passwd", "queues/%ff%00", "a" * 5_000],
)  # fmt: skip
def test_pages_that_are_not_there(visitor: Visitor, path: str) -> None:
    assert visitor.get(path).status == 404
    assert visitor.post(path, {}).status in {403, 404}


def test_assets_may_be_kept_and_have_their_kind(visitor: Visitor) -> None:
    page = visitor.get().text
    for asset in re.findall(r'"(/console/static/[^"]+)"', page):
        found = visitor.ask("GET", asset)
        assert found.status == 200
        assert "immutable" in found.headers["cache-control"]
    assert visitor.get("static/console.js").headers["content-type"].startswith("text/javascript")


def test_a_failure_says_nothing_of_its_inside(
    visitor: Visitor, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.console is not None
    monkeypatch.setattr(server.console.figures, "look", lambda _: 1 / 0)
    answer = visitor.get()
    assert answer.status == 500
    assert "ZeroDivisionError" not in answer.text
    assert "division" not in answer.text


def test_a_store_that_does_not_answer_in_time(
    visitor: Visitor, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.console is not None
    assert visitor.get().status == 200
    never: Future[None] = Future()
    monkeypatch.setattr(limits, "CONSOLE_MAX_ANSWER_MS", 100)
    monkeypatch.setattr(server.console, "look", lambda *_: wrap_future(never))
    answer = visitor.get("queues/orders")
    assert (answer.status, "did not answer in time" in answer.text) == (503, True)


def test_a_page_that_is_live_has_no_deadline(
    visitor: Visitor, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its handler had to wait for the first numbers."""
    monkeypatch.setattr(limits, "CONSOLE_MAX_ANSWER_MS", 500)
    connection = http.client.HTTPConnection(*visitor.address, timeout=1.5)
    connection.request("GET", "/console/live", headers={"cookie": visitor.cookie})
    stream = connection.getresponse()
    assert stream.status == 200
    # Nothing has changed, so that nothing comes, and the connection stays.
    with pytest.raises(TimeoutError):
        stream.read()
    connection.close()


# --- where it is ----------------------------------------------------------------------------------


def test_sqs_is_as_it_was(server: Server, visitor: Visitor) -> None:
    answer = visitor.ask("GET", "/?Action=ListQueues&Version=2012-11-05")
    assert "<QueueUrl>" in answer.text
    sqs = boto3.client(
        "sqs",
        endpoint_url=server.location("http"),
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
    )
    url = sqs.create_queue(QueueName="console")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="hello")
    assert sqs.receive_message(QueueUrl=url)["Messages"][0]["Body"] == "hello"
    sqs.delete_queue(QueueUrl=url)


def test_the_first_page_leads_to_the_console(visitor: Visitor) -> None:
    for path in ("/", "/console"):
        answer = visitor.ask("GET", path)
        assert (answer.status, answer.headers["location"]) == (303, "/console/")


def test_a_console_that_is_off_is_not_there() -> None:
    with running("memory:", http="127.0.0.1:0", console="off") as server:
        visitor = Visitor(server)
        assert server.console is None
        assert visitor.ask("GET", "/").status == visitor.get().status == 404


def test_a_console_at_its_own_address() -> None:
    with running("memory:", http="127.0.0.1:0", console="127.0.0.1:0") as server:
        visitor = Visitor(server, "console")
        assert visitor.get().status == 200
        assert visitor.ask("GET", "/").headers["location"] == "/console/"
        # SQS and the pages for operators are not there.
        assert visitor.ask("GET", "/?Action=ListQueues").status == 303
        for path in ("/metrics", "/ready", "/health", "/000000000000/orders"):
            assert visitor.ask("GET", path).status == 404
        assert visitor.ask("POST", "/", {"Action": "ListQueues"}).status == 404
        assert Visitor(server).get().status == 404
        assert server.location("console").startswith("http://127.0.0.1:")


def test_a_console_for_other_machines_needs_keys() -> None:
    config = load(environment={}, flags={"console": "0.0.0.0:8817"}).config
    with pytest.raises(InvalidInput, match=r"console 0\.0\.0\.0:8817 can be reached"):
        authenticates(config)
    with pytest.raises(InvalidInput, match=r"console \(from --console\).* nor on nor off"):
        load(environment={}, flags={"console": "maybe"})
    assert Config().addresses().keys() == {"native", "http", "flight"}


def test_requests_are_counted(visitor: Visitor) -> None:
    visitor.get("health")
    counted = visitor.ask("GET", "/metrics").text
    assert re.search(r'penstock_request_seconds_count\{.*operation="facts".*protocol="console"',
                     counted)  # fmt: skip


def test_two_servers_on_one_host_have_cookies_of_their_own(
    keys_file: Path, stranger: Visitor, tokens: dict[str, str]
) -> None:
    stranger.log_in(tokens["root"])
    with penstock.open("memory:") as broker, running(
        broker, http="127.0.0.1:0", keys=keys_file
    ) as server:  # fmt: skip
        other = Visitor(server)
        other.log_in(tokens["root"])
        assert other.cookie.partition("=")[0] != stranger.cookie.partition("=")[0]
        both = f"{stranger.cookie}; {other.cookie}"
        assert other.get(cookie=both).status == stranger.get(cookie=both).status == 200
