"""Pages of queues and messages over HTTP: permissions, forged forms, hostile content, changes."""

from __future__ import annotations

import http.client
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.console.visiting import Visitor

import penstock
from penstock import Message, QueueNotFound, State, limits
from penstock.server import running
from penstock.server.console import messages, overview, queues
from penstock.server.console.messages import preview
from penstock.server.console.queues import reason_key
from penstock.server.keys import add_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.console.visiting import Answer

    from penstock import Broker
    from penstock.model import QueueStats
    from penstock.server import Server
    from penstock.server.console.visits import Route

HOSTILE = "<script>alert(1)</script>\"'&{{ 7 * 7 }}"
KEYS = {
    "elsewhere": ["all:other"],
    "publish": ["publish:*"],
    "consume-a": ["consume:a"],
    "admin-a": ["admin:a"],
    "viewer": ["consume:*"],
    "root": ["all"],
}


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with penstock.open("memory:") as opened:
        yield opened


@pytest.fixture(scope="module")
def server(broker: Broker) -> Iterator[Server]:
    with running(broker, http="127.0.0.1:0") as started:
        yield started


@pytest.fixture
def csrf(visitor: Visitor) -> str:
    return visitor.get().csrf()


@pytest.fixture
def q(broker: Broker) -> Iterator[Broker]:
    """Have a queue with three failed messages, two of the same reason, and three that wait."""
    broker.create_queue("q", filter="kind = 'order'", max_attempts=1)
    broker.create_queue("other", filter="FALSE")
    broker.publish(
        Message(b'{"n": %d}' % number, {"kind": "order", "price": number}, group=f"g{number}")
        for number in range(6)
    )
    for number, each in enumerate(broker.claim("q", limit=3, consumer="ann")):
        broker.release([each.receipt], reason="timeout" if number else "declined")
    yield broker
    for name in ("q", "other", "made"):
        if name in {spec.name for spec in broker.queues()}:
            broker.delete_queue(name)


def failed(broker: Broker) -> list[int]:
    return [entry.message_id for entry in broker.browse("q", state="failed")]


def counts(broker: Broker) -> QueueStats:
    """Return the figures of the queue but for its age."""
    return msgspec.structs.replace(broker.stats("q"), oldest_age_ms=None)


# --- permissions ----------------------------------------------------------------------------------

ROUTES = [*queues.ROUTES, *messages.ROUTES]
# Keys that may see queue a, and those that may change it, as docs/console.md tells.
SEE, CHANGE = {"consume-a", "admin-a", "viewer", "root"}, {"admin-a", "root"}
WHO: dict[tuple[str, str], set[str]] = {
    ("GET", "/create"): {"elsewhere", "admin-a", "root"},
    ("POST", "/create"): {"elsewhere", "admin-a", "root"},
    ("POST", "/filter"): set(KEYS),
    ("GET", "/queues/{queue}"): SEE,
    ("GET", "/queues/{queue}/live"): SEE,
    ("GET", "/queues/{queue}/groups"): SEE,
    ("GET", "/queues/{queue}/consumers"): SEE,
    ("GET", "/queues/{queue}/settings"): SEE,
    ("POST", "/queues/{queue}/settings"): CHANGE,
    ("POST", "/queues/{queue}/delete"): CHANGE,
    ("GET", "/queues/{queue}/messages/{message}"): SEE,
    ("GET", "/queues/{queue}/messages/{message}/payload"): SEE,
    ("POST", "/queues/{queue}/act"): CHANGE,
}


class World:
    """A server with keys, and a visitor for each of them; queues a and b share a message."""

    def __init__(self, broker: Broker, server: Server, tokens: dict[str, str]) -> None:
        self.broker = broker
        broker.create_queue("a", filter="kind = 'x'")
        broker.create_queue("b", filter="kind = 'x' AND secret = 'yes'")
        broker.create_queue("c", filter="kind = 'y'")
        self.shared, self.foreign = broker.publish(
            [
                Message(b"shared", {"kind": "x", "secret": "yes"}),
                Message(b"foreign", {"kind": "y", "colour": "violet"}),
            ]
        )
        self.visitors = {name: Visitor(server) for name in tokens}
        for name, visitor in self.visitors.items():
            assert visitor.log_in(tokens[name]).status == 303

    def post(self, key: str, path: str, **form: str) -> Answer:
        visitor = self.visitors[key]
        return visitor.post(path, {"csrf": visitor.get().csrf(), **form})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    tokens = {name: f"{name}:{add_key(path, name, grants)}" for name, grants in KEYS.items()}
    with (
        penstock.open("memory:") as opened,
        running(opened, http="127.0.0.1:0", keys=path) as started,
    ):
        yield World(opened, started, tokens)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_a_page_is_for_those_who_may_see_it(world: World, route: Route) -> None:
    path = route.path.format(queue="a", message=world.shared).removeprefix("/")
    allowed = set()
    for key, visitor in world.visitors.items():
        if route.method == "POST":
            # A form that asks for nothing that can be done.
            status = world.post(key, path, name="wrong name", lease_ms="wrong").status
        else:
            # The stream of figures goes on for ever.
            method = "HEAD" if path.endswith("live") else "GET"
            status = visitor.ask(method, f"/console/{path}").status
        assert status in {200, 400, 403}
        allowed |= set() if status == 403 else {key}
    assert allowed == WHO[route.method, route.path]
    # Nobody without a key.
    stranger = Visitor.__new__(Visitor)
    stranger.address, stranger.cookie = world.visitors["root"].address, ""
    answer = stranger.ask(route.method, f"/console/{path}", {} if route.method == "POST" else None)
    assert (answer.status, answer.headers["location"].split("?")[0]) == (303, "/console/login")


def test_every_route_is_in_the_table() -> None:
    assert {(route.method, route.path) for route in ROUTES} == WHO.keys()


def test_a_message_tells_nothing_of_queues_that_a_key_may_not_see(world: World) -> None:
    page = world.visitors["consume-a"].get(f"queues/a/messages/{world.shared}")
    assert page.status == 200
    assert "/console/queues/a" in page.text
    assert "/console/queues/b" not in page.text
    # The log knows the message, and queue c has it: neither is this key's.
    page = world.visitors["consume-a"].get(f"queues/a/messages/{world.foreign}")
    assert page.status == 404
    assert "violet" not in page.text
    assert "violet" in world.visitors["viewer"].get(f"queues/a/messages/{world.foreign}").text
    for key, status in (("consume-a", 403), ("viewer", 200)):
        path = f"queues/a/messages/{world.shared}?why=b"
        assert world.visitors[key].get(path).status == status
    why = world.visitors["viewer"].get(f"queues/a/messages/{world.foreign}")
    assert "Queue a does not have it: its filter does not take it." in why.text
    assert (
        "Queue b has it (available): its filter took it." in world.visitors["viewer"].get(path).text
    )
    missing = world.visitors["viewer"].get("queues/a/messages/4000")
    assert (missing.status, "No message has this id" in missing.text) == (404, True)


def test_a_filter_shows_messages_only_to_those_who_may_see_all(world: World) -> None:
    for key in KEYS:
        page = world.post(key, "filter", filter="colour IS NOT NULL").text
        assert ("violet" in page) is (key in {"viewer", "root"})
        assert "something is missing" in world.post(key, "filter", filter="colour =").text


def test_only_a_key_for_all_queues_may_set_filters(world: World) -> None:
    form = {**queues.write_settings(penstock.QueueSpec(name="a", filter="kind = 'x'"))}
    del form["version"]
    for filter_text, status in (("kind = 'z'", 403), ("queue = 'a'", 303), ("kind = 'x'", 403)):
        answer = world.post("admin-a", "queues/a/settings", **{**form, "filter": filter_text})
        assert answer.status == status
    assert world.broker.queue("a").filter == "queue = 'a'"
    assert world.post("root", "queues/a/settings", **form).status == 303
    assert world.broker.queue("a").filter == "kind = 'x'"
    # What is as it was needs no permission.
    assert world.post("admin-a", "queues/a/settings", **{**form, "lease_ms": "7s"}).status == 303
    assert world.broker.queue("a").lease_ms == 7_000
    dead = {**form, "lease_ms": "7s", "dead_letter": "b"}
    assert world.post("admin-a", "queues/a/settings", **dead).status == 403
    assert world.post("admin-a", "create", **{**form, "name": "mine"}).status == 403
    assert "mine" not in {spec.name for spec in world.broker.queues()}


def test_messages_are_moved_only_where_a_key_may_publish(world: World) -> None:
    move = {"action": "move", "state": "available", "scope": "all", "confirmed": "yes"}
    assert world.post("admin-a", "queues/a/act", **move, to="b").status == 403
    assert world.broker.stats("a").available == 1
    assert world.post("root", "queues/a/act", **move, to="c").status == 303
    assert world.broker.stats("c").available == 2


# --- forged forms ---------------------------------------------------------------------------------


def test_a_forged_form_changes_nothing(q: Broker, visitor: Visitor, csrf: str) -> None:
    forms: dict[str, dict[str, str]] = {
        "create": {**queues.write_settings(penstock.QueueSpec(name="made", filter=""))},
        "filter": {"filter": "TRUE"},
        "queues/q/settings": {"lease_ms": "1s"},
        "queues/q/delete": {"name": "q"},
        "queues/q/act": {"action": "purge", "state": "failed", "scope": "all", "confirmed": "yes"},
    }
    assert {f"/{path}".replace("/q/", "/{queue}/") for path in forms} == {
        route.path for route in ROUTES if route.method == "POST"
    }
    before = [q.queues(), counts(q)]
    for path, form in forms.items():
        assert visitor.post(path, form).status == 403
        assert visitor.post(path, {**form, "csrf": csrf[:-1]}).status == 403
        assert visitor.post(path, {**form, "csrf": csrf}, origin="http://evil.test").status == 403
        # A link or a picture of another site can only GET.
        assert visitor.get(f"{path}?confirmed=yes&action=purge&name=q").status in {200, 404}
    assert [q.queues(), counts(q)] == before


# --- hostile content ------------------------------------------------------------------------------


def test_hostile_content_is_shown_as_text(q: Broker, visitor: Visitor) -> None:
    payload = f"</pre>{HOSTILE}".encode()
    attributes: dict[str, Any] = {"kind": "order", HOSTILE: HOSTILE}
    (message_id,) = q.publish([Message(payload, attributes, group=HOSTILE, priority=9)])
    (held,) = [
        each for each in q.claim("q", limit=9, consumer=HOSTILE) if each.message_id == message_id
    ]
    pages = ["queues/q?state=in_flight", "queues/q/groups", "queues/q/consumers"]
    pages = [visitor.get(path).text for path in pages]
    q.release([held.receipt], reason=HOSTILE)
    paths = ["queues/q?state=failed", f"queues/q/messages/{message_id}"]
    paths += [f"queues/q/messages/{message_id}?view={view}&why=other" for view in ("text", "hex")]
    pages += [visitor.get(path).text for path in paths]
    for page in pages:
        assert "&lt;script&gt;" in page
        assert "<script>" not in page
        assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", page)
        # A template is not evaluated twice.
        assert "49" not in re.findall(r"&amp;(.{5})", page)
    hostile = visitor.get("queues/q?where=%3Cscript%3E&state=failed").text
    assert "<script>" not in hostile

    file = visitor.get(f"queues/q/messages/{message_id}/payload")
    assert file.text.encode() == payload
    assert file.headers["content-type"] == "application/octet-stream"
    assert file.headers["x-content-type-options"] == "nosniff"
    disposition = f'attachment; filename="message-{message_id}.bin"'
    assert file.headers["content-disposition"] == disposition


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("queues/nothing", 404),
        ("queues/%3Cscript%3E", 404),
        ("queues/%2e%2e%2fq", 404),
        ("queues/q%00", 404),
        ("queues/q%0d%0aX:1", 404),
        ("queues/" + "x" * 5_000, 404),
        ("queues/q?state=%3Cscript%3E", 400),
        ("queues/q?cursor=%3Cscript%3E", 400),
        ("queues/q?cursor=" + "f" * 5_000, 400),
        ("queues/q?state=failed&reason=%3Cscript%3E", 200),
        ("queues/q?did=%3Cscript%3E&count=%3Cscript%3E", 200),
        ("queues/q?where=" + "9" * 40, 303),
        ("queues/q/groups?cursor=x", 400),
        ("queues/q/messages/x", 404),
        ("queues/q/messages/-1", 404),
        ("queues/q/messages/" + "9" * 40, 404),
        ("queues/q/messages/18446744073709551615", 404),
        ("queues/q/messages/99999/payload", 404),
        ("queues/q/messages/1?why=%3Cscript%3E", 404),
    ],
)
def test_strange_addresses(q: Broker, visitor: Visitor, path: str, status: int) -> None:
    assert q.stats("q").failed == 3
    answer = visitor.get(path)
    assert answer.status == status
    assert "<script>" not in answer.text


def test_every_page_is_shown_in_part_too(q: Broker, visitor: Visitor) -> None:
    """What htmx asks for is a page, or the part of it that it replaces."""
    failed = q.browse("q", state=State.FAILED)[0].message_id
    names = {"queue": "q", "message": str(failed)}
    routes = [*overview.ROUTES, *queues.ROUTES, *messages.ROUTES]
    gets = [each.path for each in routes if each.method == "GET" and "live" not in each.path]
    paths = [each.format(**names).removeprefix("/") for each in gets]
    paths += [f"queues/q/messages/{failed}?why=q", "queues/q?state=failed&where=a+%3D+1"]
    for path in paths:
        whole = visitor.get(path)
        part = visitor.get(path, hx_request="true", hx_target="none")
        assert part.status in ({whole.status} if whole.status != 303 else {200}), path
    form = {"csrf": visitor.get().csrf(), "name": "q", "check": "1", "filter": "a = 1"}
    acted = {"scope": "all", "state": "failed", "action": "redrive"}
    for path, more in (("create", {}), ("queues/q/settings", {}), ("queues/q/act", acted)):
        assert visitor.post(path, {**form, **more}, hx_request="true").status == 200, path


@pytest.mark.parametrize(
    ("payload", "view", "text"),
    [
        (b'{"a": [1, "\xc3\xa9"]}', "json", '{\n  "a": [\n    1,\n    "é"\n  ]\n}'),
        (b"plain\ttext\n", "text", "plain\ttext\n"),
        (b"", "text", ""),
        (b"\0\1abc", "hex", f"00000000  {'00 01 61 62 63':47}  ..abc"),
        (b"\xff\xfe", "hex", f"00000000  {'ff fe':47}  .."),
        # What turns the direction of a text, or can't be seen, is named.
        ("a\u202eb\x1b".encode(), "text", "a\\u202eb\\u001b"),
        (b"[" * 5_000 + b"]" * 5_000, "text", "[" * 5_000 + "]" * 5_000),
        # The same on every Python, whatever its bound on recursion.
        (b"[" * 65 + b"]" * 65, "text", "[" * 65 + "]" * 65),
        (b'["' + b"[" * 65 + b'\\"["]', "json", '[\n  "' + "[" * 65 + '\\"["\n]'),
    ],
)
def test_a_payload_is_written_as_what_it_is(payload: bytes, view: str, text: str) -> None:
    assert preview(payload) == (view, text, False)


def test_a_long_payload_is_cut() -> None:
    most = limits.CONSOLE_PREVIEW_BYTES
    for long in (b"x" * most * 2, "é".encode() * most, b"[" + b"1," * most + b"1]"):
        found = preview(long)
        assert (found.view, found.is_cut) == ("text", True)
        assert len(found.text) <= most
    nested = b"[" * 64 + b",".join([b"1"] * 20_000) + b"]" * 64
    assert preview(nested).is_cut
    assert preview(b"\0" * most).is_cut
    # A view that was asked for and does not fit is text.
    assert preview(b"{", "json").view == "text"


# --- looking --------------------------------------------------------------------------------------


def test_a_search_by_filter_and_by_id(q: Broker, visitor: Visitor) -> None:
    waiting = [entry.message_id for entry in q.browse("q")]
    page = visitor.get("queues/q?where=price+%3E+4").text
    assert re.findall(r'messages/(\d+)"', page) == [str(waiting[-1])]
    assert "Looked at 3 messages." in page
    assert "column 7" in visitor.get("queues/q?where=price+%3E").text
    found = visitor.get(f"queues/q?where={waiting[0]}")
    assert found.headers["location"] == f"/console/queues/q/messages/{waiting[0]}"


def test_pages_of_messages_follow_each_other(q: Broker, visitor: Visitor) -> None:
    q.publish([Message(b"x", {"kind": "order", "price": 100})] * 120)
    seen: list[str] = []
    path = "/console/queues/q?where=price+%3E+1"
    while path:
        page = visitor.ask("GET", path).text
        seen += re.findall(r'messages/(\d+)"', page)
        following = re.search(r'href="([^"]*)" rel="next"', page)
        path = following[1].replace("&amp;", "&") if following else ""
    assert len(seen) == len(set(seen)) == 123


def test_failed_messages_are_grouped_by_reason(q: Broker, visitor: Visitor) -> None:
    page = visitor.get("queues/q?state=failed").text
    links = re.findall(r'reason=(\w+)">(\w+)</a></th>\s*<td class="num">(\d+)</td>', page)
    assert [(text, count) for _, text, count in links] == [("timeout", "2"), ("declined", "1")]
    page = visitor.get(f"queues/q?state=failed&reason={links[1][0]}").text
    assert re.findall(r'messages/(\d+)"', page) == [str(failed(q)[0])]


def test_the_figures_are_streamed(q: Broker, visitor: Visitor) -> None:
    assert q.stats("q").failed == 3
    connection = http.client.HTTPConnection(*visitor.address, timeout=30)
    connection.request("GET", "/console/queues/q/live")
    answer = connection.getresponse()
    assert answer.headers["content-type"] == "text/event-stream"
    event = msgspec.json.decode(answer.readline().removeprefix(b"data: "))
    assert (event["available"], event["failed"]) == ("3", "3")
    connection.close()


# --- changing -------------------------------------------------------------------------------------


def act(visitor: Visitor, csrf: str, **form: str) -> Answer:
    return visitor.post("queues/q/act", {"csrf": csrf, **form})


def hidden(page: str) -> dict[str, str]:
    """Return the fields of the form that confirms."""
    main = page[page.index("<main") :]
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', main))


def test_a_selection_is_redriven_once_it_is_confirmed(
    q: Broker, visitor: Visitor, csrf: str
) -> None:
    ids = failed(q)
    form = {"action": "redrive", "state": "failed", "scope": "chosen"}
    page = act(visitor, csrf, **form, ids=f"{ids[0]},{ids[2]}")
    assert (page.status, "Redrive 2 messages?" in page.text) == (200, True)
    assert failed(q) == ids
    done = visitor.post("queues/q/act", hidden(page.text))
    assert done.headers["location"] == "/console/queues/q?state=failed&did=redrive&count=2"
    assert failed(q) == [ids[1]]
    assert "2 messages were redriven." in visitor.ask("GET", done.headers["location"]).text


def test_what_a_search_finds_is_purged(q: Broker, visitor: Visitor, csrf: str) -> None:
    ids = failed(q)
    form = {"action": "purge", "state": "failed", "scope": "found", "where": "price > 0"}
    page = act(visitor, csrf, **form)
    assert "Purge 2 messages?" in page.text
    assert visitor.post("queues/q/act", hidden(page.text)).status == 303
    assert failed(q) == ids[:1]
    page = act(visitor, csrf, **form)
    assert "Purge 0 messages?" in page.text
    assert "<button>" not in page.text


def test_a_reason_is_moved_to_another_queue(q: Broker, visitor: Visitor, csrf: str) -> None:
    ids, reason = failed(q), reason_key("timeout")
    form = {"action": "move", "state": "failed", "scope": "found", "reason": reason, "to": "other"}
    page = act(visitor, csrf, **form)
    assert "Move 2 messages?" in page.text
    assert visitor.post("queues/q/act", hidden(page.text)).status == 303
    assert failed(q) == ids[:1]
    assert [entry.message_id for entry in q.browse("other")] == ids[1:]


@pytest.mark.parametrize("state", ["available", "failed"])
def test_all_messages_of_a_state_are_purged(
    q: Broker, visitor: Visitor, csrf: str, state: str
) -> None:
    page = act(visitor, csrf, action="purge", state=state, scope="all")
    assert "Purge 3 messages?" in page.text
    assert visitor.post("queues/q/act", hidden(page.text)).status == 303
    left = q.stats("q")
    assert (left.available + left.failed, getattr(left, state)) == (3, 0)


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"action": "redrive", "scope": "chosen"}, 400),
        ({"action": "redrive", "scope": "chosen", "ids": "1,x"}, 400),
        ({"action": "redrive", "scope": "chosen", "ids": "9" * 20}, 400),
        ({"action": "redrive", "scope": "found", "where": "price >"}, 400),
        ({"action": "redrive", "scope": "some"}, 400),
        ({"action": "redrive", "scope": "all", "state": "available"}, 400),
        ({"action": "purge", "scope": "chosen", "state": "available", "ids": "1"}, 400),
        ({"action": "move", "scope": "all", "to": "nothing"}, 404),
        ({"action": "move", "scope": "all", "to": ""}, 404),
        ({"action": "move", "scope": "all", "to": "q"}, 400),
        ({"action": "move", "scope": "all", "state": "done", "to": "other"}, 400),
        ({"action": "destroy", "scope": "all"}, 400),
        ({}, 400),
    ],
)
def test_a_change_that_can_not_be_is_refused(
    q: Broker, visitor: Visitor, csrf: str, form: dict[str, str], status: int
) -> None:
    before = counts(q)
    answer = act(visitor, csrf, **{"state": "failed", "confirmed": "yes", **form})
    assert answer.status == status
    assert counts(q) == before


def test_a_queue_is_made_once_its_settings_are_right(
    q: Broker, visitor: Visitor, csrf: str
) -> None:
    form = {**queues.write_settings(penstock.QueueSpec(name="made", filter="")), "csrf": csrf}
    wrong = {
        "column 6": {"filter": "kind == 'order'"},
        "Lease: &#39;soon&#39; is not a duration": {"lease_ms": "soon"},
        "Attempts: &#39;&#39; is not a number": {"max_attempts": ""},
        "max_attempts": {"max_attempts": "0"},
        "no queue named &#39;nothing&#39;": {"dead_letter": "nothing"},
        "exists with other settings": {"name": "q"},
        "queue name": {"name": "<script>"},
        "ordering": {"ordering": "random"},
    }
    for text, field in wrong.items():
        answer = visitor.post("create", {**form, **field})
        assert (answer.status, text in answer.text) == (400, True), text
        # The rest of the form is as it was written.
        assert 'value="14d"' in answer.text
        with pytest.raises(QueueNotFound):
            q.queue("made")
    q.publish([Message(b"", {"colour": "violet"})] * 2)
    checked = visitor.post("create", {**form, "filter": "colour = 'violet'", "check": "1"})
    assert "<strong>2</strong> of the last" in checked.text
    done = visitor.post("create", {**form, "filter": "price > 3", "lease_ms": "2 m"})
    assert done.headers["location"] == "/console/queues/made?did=created"
    assert (q.queue("made").filter, q.queue("made").lease_ms) == ("price > 3", 120_000)


def test_a_queue_without_a_filter_takes_what_names_it(
    q: Broker, visitor: Visitor, csrf: str
) -> None:
    form = {**queues.write_settings(penstock.QueueSpec(name="made", filter="")), "csrf": csrf}
    assert visitor.post("create", form).status == 303
    assert q.queue("made").filter == "queue = 'made'"


def test_settings_are_changed_one_by_one(q: Broker, visitor: Visitor, csrf: str) -> None:
    before = q.update_queue("q", labels={"team": "x"}, delay_ms=1_234)
    form = {**queues.write_settings(before), "csrf": csrf}
    assert form["delay_ms"] == "1234ms"
    assert visitor.post("queues/q/settings", {**form, "filter": "price >"}).status == 400
    assert q.queue("q") == before
    same = visitor.post("queues/q/settings", form)
    assert same.headers["location"].endswith("did=changed&count=0")
    assert q.queue("q") == before
    form |= {"max_attempts": "9", "filter": "kind = 'order'\r\nAND price > 1"}
    assert visitor.post("queues/q/settings", form).status == 303
    after = q.queue("q")
    assert (after.max_attempts, after.filter) == (9, "kind = 'order' AND price > 1")
    assert (after.labels, after.delay_ms) == ({"team": "x"}, 1_234)
    # A form that is older than the settings.
    assert "meanwhile" in visitor.post("queues/q/settings", {**form, "delay_ms": "0"}).text
    assert q.queue("q") == after


def test_a_queue_is_deleted_once_its_name_is_typed(q: Broker, visitor: Visitor, csrf: str) -> None:
    assert "3 failed. This" in visitor.get("queues/q/settings").text
    for name in ("", "Q", "other"):
        answer = visitor.post("queues/q/delete", {"csrf": csrf, "name": name})
        assert answer.status == 400
    assert q.stats("q").failed == 3
    drained = visitor.post("queues/q/delete", {"csrf": csrf, "name": "q", "drain": "1"})
    assert drained.status == 303
    assert q.stats("q").failed == 3
    assert visitor.post("queues/q/delete", {"csrf": csrf, "name": "q"}).status == 303
    with pytest.raises(QueueNotFound):
        q.queue("q")
