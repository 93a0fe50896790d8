"""The overview, health and pipeline: order, filter, pages, and text that is somebody else's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.console.visiting import Visitor
from tests.waiting import wait_until

import penstock
from penstock import limits
from penstock.server import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.server import Server

MANY = 250
SIZE = limits.CONSOLE_PAGE_QUEUES


@pytest.fixture(scope="module")
def many() -> Iterator[Server]:
    """Serve more queues than a page shows; each is deeper than the one before."""
    with penstock.open("memory:") as broker:
        for number in range(MANY):
            broker.create_queue(f"queue-{number:03}")
            broker.publish([penstock.Message(b"x", {"queue": f"queue-{number:03}"})] * number)
        with running(broker, http="127.0.0.1:0") as server:
            # A page does not wait for the figures of all queues; the first ones have looked.
            wait_until(lambda: len(rows(Visitor(server), "page=3")) == MANY % SIZE)
            yield server


def rows(visitor: Visitor, query: str = "") -> list[str]:
    page = visitor.get(f"?{query}").text
    return re.findall(r'<th scope="row"><a href="/console/queues/([^"]+)"', page)


def test_the_deepest_queues_come_first(many: Server) -> None:
    visitor = Visitor(many)
    names = [f"queue-{number:03}" for number in reversed(range(MANY))]
    assert rows(visitor) == names[:SIZE]
    assert rows(visitor, "page=2") == names[SIZE : 2 * SIZE]
    assert rows(visitor, "page=3") == rows(visitor, "page=99999") == names[2 * SIZE :]
    assert rows(visitor, "up=1") == list(reversed(names))[:SIZE]
    assert rows(visitor, "sort=name") == list(reversed(names))[:SIZE]
    assert rows(visitor, "sort=name&up=1") == names[:SIZE]


@pytest.mark.parametrize(
    "query",
    ["page=-1", "page=x", "page=" + "9" * 50, "sort=nothing", "up=2", "page=%C2%B2", "=&&="],
)
def test_a_query_that_is_none_is_the_first_page(many: Server, query: str) -> None:
    assert rows(Visitor(many), query)[0] == f"queue-{MANY - 1:03}"


@pytest.mark.parametrize("column", ["available", "delayed", "in_flight", "failed", "came", "done",
                                    "oldest"])  # fmt: skip
def test_every_column_can_be_sorted_by(many: Server, column: str) -> None:
    page = Visitor(many).get(f"?sort={column}")
    assert page.text.count("aria-sort") == 1
    assert len(re.findall(r'<th scope="row">', page.text)) == SIZE


def test_queues_are_found_by_a_part_of_their_name(many: Server) -> None:
    visitor = Visitor(many)
    assert rows(visitor, "filter=-01") == [f"queue-{number:03}" for number in range(19, 9, -1)]
    assert rows(visitor, "filter=QUEUE-007") == ["queue-007"]
    page = visitor.get("?filter=%22%3E%3Cscript%3Ealert(1)").text
    assert "No queue has" in page
    assert "<script>alert" not in page


def test_htmx_gets_only_the_part_that_it_asks_for(many: Server) -> None:
    visitor = Visitor(many)
    part = visitor.get("?filter=007", hx_request="true", hx_target="queues").text
    assert part.strip().startswith('<div id="queues"')
    assert "queue-007" in part
    main = visitor.get("?filter=007", hx_request="true").text
    assert "<h1>" in main
    assert "<html" not in main
    # A page that the browser's history asks for is whole.
    whole = visitor.get("", hx_request="true", hx_history_restore_request="true").text
    assert "<html" in whole


def test_sums_are_over_all_queues(many: Server) -> None:
    page = Visitor(many).get().text
    assert f'data-live="all:queues">{MANY}<' in page
    assert f'data-live="all:available">{sum(range(MANY)):,}<' in page


def test_a_server_without_queues_says_so() -> None:
    with running("memory:", http="127.0.0.1:0") as server:
        assert "There are no queues" in Visitor(server).get().text


def test_health_tells_how_the_server_is(visitor: Visitor, server: Server) -> None:
    page = visitor.get("health").text
    for text in (server.broker.info().store_id, "Penstock 0.1.0", "inline", "memory:", "Ready"):
        assert text in page
    assert server.location("http") in page


def test_health_shows_no_password(visitor: Visitor, server: Server) -> None:
    config = server.config
    try:
        object.__setattr__(server, "config", penstock_config("postgresql://me:hush@db/x"))
        page = visitor.get("health").text
    finally:
        object.__setattr__(server, "config", config)
    assert "hush" not in page
    assert "db/x" in page


def penstock_config(store: str) -> object:
    from penstock.server.config import Config  # noqa: PLC0415

    return Config(store=store)


def test_the_pipeline_tells_how_far_routing_is(visitor: Visitor, tmp_path: Path) -> None:
    page = visitor.get("pipeline").text
    assert "nothing can lag behind" in page
    assert "penstock log configure --routing pipeline" in page
    assert "Starts of routers" not in page
    with running(f"rocksdb:{tmp_path}/store", http="127.0.0.1:0", routing="pipeline") as far:
        far.broker.configure_log(logs=2)
        far.broker.create_queue("q")
        far.broker.publish([penstock.Message(b"x", {"queue": "q"})] * 7)
        page = Visitor(far).get("pipeline").text
        assert "no router has come yet" in page
        assert re.findall(r'data-live="Log \d:Behind">(\d+)<', page) == ["7", "7"]
        # They wait, and no batch has come yet.
        assert 'data-live="Now:Behind">7<' in page
        assert "nobody has routed through this server for a minute" in page
        assert "log configure --routing pipeline" not in page
        far.broker.take_epoch()
        page = Visitor(far).get("pipeline").text
        assert 'data-live="Routing:Epoch of the router">1<' in page
        assert "nobody has routed through this server" in page
        penstock.route_once(far.broker)
        page = Visitor(far).get("pipeline").text
        assert 'data-live="Now:Behind">0<' in page
        assert re.search(r'data-live="Now:Last batch">[\d,]+ m?s ago<', page)
        assert 'data-live="Now:Starts of routers">1<' in page
        assert "for a minute" not in page
        assert re.findall(r"Log (\d), 1 to 8</dt>", page) == ["1", "0"]
        put = re.findall(r"applied, put (\d) times into queues, 20\d\d", page)
        assert sorted(put) == ["0", "7"]
        assert "nothing can lag behind" not in page
        far.broker.configure_log(routing="inline")
        assert "nothing can lag behind" in Visitor(far).get("pipeline").text
        assert 'data-live="Store:Routing">inline<' in Visitor(far).get("health").text


# --- documentation --------------------------------------------------------------------------------


@pytest.fixture
def documented(server: Server, tmp_path: Path) -> Iterator[Server]:
    site = tmp_path / "site"
    (site / "guide").mkdir(parents=True)
    (site / "index.html").write_text("<script>1</script>")
    (site / "guide" / "index.html").write_text("a guide")
    (site / "style.css").write_text("a {}")
    (tmp_path / "secret.txt").write_text("hush")
    (site / "link.txt").symlink_to(tmp_path / "secret.txt")
    assert server.console is not None
    before, server.console.site = server.console.site, site
    yield server
    server.console.site = before


def test_the_documentation_is_served(documented: Server) -> None:
    visitor = Visitor(documented)
    assert 'href="/console/docs/"' in visitor.get().text
    page = visitor.get("docs/")
    assert page.text == "<script>1</script>"
    assert "script-src 'self' 'unsafe-inline'" in page.headers["content-security-policy"]
    assert visitor.get("docs/guide/").text == "a guide"
    assert visitor.get("docs/style.css").headers["content-type"] == "text/css; charset=utf-8"


@pytest.mark.parametrize(
    "path",
    ["../secret.txt", "%2e%2e/secret.txt", "..%2fsecret.txt", "guide/../../secret.txt", "link.txt",
     "%2fetc%2fpasswd", "/etc/passwd", "nothing.html", "%00", "x" * 5_000, "style.css/x"],
)  # fmt: skip
def test_nothing_else_is_served_as_documentation(documented: Server, path: str) -> None:
    answer = Visitor(documented).get(f"docs/{path}")
    assert answer.status == 404
    assert "hush" not in answer.text
    assert "root:" not in answer.text


def test_without_documentation_there_is_no_link(server: Server) -> None:
    assert server.console is not None
    before, server.console.site = server.console.site, None
    try:
        assert "/console/docs/" not in Visitor(server).get().text
    finally:
        server.console.site = before
