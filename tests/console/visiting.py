"""A visitor of the console: over plain HTTP with a cookie, and in a real browser with axe-core."""

from __future__ import annotations

import http.client
import re
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

from tests.clients.tools import CLIENTS, missing

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

    from penstock.server import Server

FORM = "application/x-www-form-urlencoded"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    def csrf(self) -> str:
        found = re.search(r'x-csrf-token": "([^"]*)"', self.text)
        assert found is not None
        return found[1]


class Visitor:
    """Asks for pages, and keeps the cookie that it is given."""

    def __init__(self, server: Server, listener: str = "http") -> None:
        self.address = server.addresses[listener]
        self.cookie = ""

    def ask(
        self, method: str, path: str, form: dict[str, str] | None = None, **headers: str
    ) -> Answer:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.cookie:
            sent.setdefault("cookie", self.cookie)
        if form is not None:
            sent.setdefault("content-type", FORM)
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            connection.request(method, path, None if form is None else urlencode(form), sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            text = answer.read().decode(errors="replace")
        finally:
            connection.close()
        given = found.get("set-cookie")
        if given is not None:
            self.cookie = given.partition(";")[0]
        return Answer(answer.status, found, text)

    def get(self, path: str = "", **headers: str) -> Answer:
        return self.ask("GET", f"/console/{path}", None, **headers)

    def post(self, path: str, form: dict[str, str], **headers: str) -> Answer:
        return self.ask("POST", f"/console/{path}", form, **headers)

    def log_in(self, token: str) -> Answer:
        key, _, secret = token.partition(":")
        return self.post("login", {"key": key, "secret": secret})


def axe_findings(browser: Chrome) -> list[str]:
    """Name the rules of axe-core that the page breaks seriously."""
    script = CLIENTS / "node" / "node_modules" / "axe-core" / "axe.min.js"
    if not script.exists():
        missing("axe-core")
    browser.execute_script(script.read_text())
    found: list[dict[str, Any]] = browser.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "axe.run(document, {resultTypes: ['violations']}).then(each => done(each.violations));"
    )
    return [
        f"{each['id']}: {node['html'][:200]}"
        for each in found
        if each["impact"] in {"serious", "critical"}
        for node in each["nodes"]
    ]


def foreign_requests(browser: Chrome) -> list[str]:
    """Name what the page has loaded from elsewhere."""
    loaded: list[str] = browser.execute_script(
        "return performance.getEntriesByType('resource').map(each => each.name)"
    )
    origin = browser.execute_script("return location.origin")
    return [each for each in loaded if not each.startswith(f"{origin}/console/")]
