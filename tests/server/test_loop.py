"""What costs more than a millisecond does not run on the loop, where it would hold up everybody."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from tests.console.visiting import Visitor

import penstock
from penstock import NotAllowed
from penstock.filters import parser
from penstock.server import running
from penstock.server.keys import add_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.server import Server

LOOP = "penstock-server"
# In another form than the default filter has, which is told by its shape.
FILTER = "(queue) = 'a'"


class Noted(NamedTuple):
    """The threads that have run a function, by name; ``take`` empties the list."""

    threads: list[str]

    def take(self) -> list[str]:
        taken = self.threads[:]
        self.threads.clear()
        return taken


@pytest.fixture
def note(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], Noted]:
    """Note the threads that run a function, which does what it did."""

    def noting(place: Any, name: str) -> Noted:
        noted, function = Noted([]), getattr(place, name)

        def run(*given: Any, **named: Any) -> Any:
            noted.threads.append(threading.current_thread().name)
            return function(*given, **named)

        monkeypatch.setattr(place, name, run)
        return noted

    return noting


@pytest.fixture
def token(tmp_path: Path) -> str:
    secret = add_key(tmp_path / "keys.toml", "low", ["admin:a", "publish:a", "consume:a"])
    return f"low:{secret}"


@pytest.fixture
def server(token: str, tmp_path: Path) -> Iterator[Server]:
    assert token
    keys = tmp_path / "keys.toml"
    with running("memory:", native="127.0.0.1:0", http="127.0.0.1:0", keys=keys) as started:
        yield started


def test_filters_are_parsed_on_threads(
    server: Server, token: str, note: Callable[[Any, str], Noted]
) -> None:
    parsed = note(parser, "parse_text")
    with penstock.connect(server.location("native"), token=token) as client:
        client.create_queue("a", filter=FILTER)
        assert parsed.take()
        client.update_queue("a", filter=FILTER)
        with pytest.raises(NotAllowed, match="a filter of its own"):
            client.update_queue("a", filter=f"{FILTER} OR TRUE")
        found = parsed.take()
        assert found
        assert LOOP not in found
    visitor = Visitor(server)
    visitor.log_in(token)
    csrf = visitor.get("queues/a").csrf()
    settings = {"csrf": csrf, "version": "2", "name": "a", "filter": FILTER, "lease_ms": "30s"}
    for path, form in (
        ("filter", {"filter": FILTER}),
        ("filter", {"filter": "queue = ("}),
        ("queues/a/settings", {**settings, "check": "1"}),
        ("queues/a/settings", {**settings, "filter": f"{FILTER} OR TRUE"}),
        ("queues/a/act", {"scope": "found", "where": "x = 1", "action": "purge"}),
    ):
        visitor.post(path, {"csrf": csrf, **form})
        found = parsed.take()
        assert found, path
        assert LOOP not in found, path
    visitor.get("queues/a?where=x+%3D+1")
    assert parsed.take()[0] != LOOP
