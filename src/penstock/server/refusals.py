"""Clients that are turned away: TLS handshakes that fail, and logins that are refused.

Each is counted. Each is logged too, with the client's address and the id of its key, but the same
line only once in a while: strangers decide how many there are. Safe for threads.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from penstock import limits
from penstock.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

# Within so many seconds the same line is logged once.
WINDOW_SECONDS: Final = 60.0
# A secret is at least so long: an unknown id that is, may be one that was mistaken for an id.
_SECRET_CHARS: Final = 40


class _Line(msgspec.Struct):
    message: str
    fields: dict[str, str]
    more: int = 0


class Refusals:
    """The clients that a server turns away; ``count`` is told the protocol and the series."""

    def __init__(
        self, count: Callable[[str, str], None], seconds: Callable[[], float] | None = None
    ) -> None:
        self._count = count
        self._seconds = seconds or SystemClock().seconds
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, ...], _Line] = {}
        self._others = 0
        self._until = 0.0

    def handshake(self, protocol: str, address: str, why: str) -> None:
        """Note a TLS handshake that failed."""
        self._count(protocol, "handshakes_failed")
        self._note("a TLS handshake failed", protocol=protocol, address=address, why=why)

    def login(self, protocol: str, address: str, key_id: str, why: str) -> None:
        """Note a login that was refused."""
        self._count(protocol, "logins_refused")
        shown = key_id if len(key_id) < _SECRET_CHARS else f"({len(key_id)} characters)"
        self._note("a login was refused", protocol=protocol, key=shown, address=address, why=why)

    def token(self, protocol: str, address: str, token: str | None) -> str:
        """Note a token that is not known, or that there was none; return why it was refused."""
        why = "the key is not known, or its secret is another" if token else "no key"
        self.login(protocol, address, id_of(token), why)
        return why

    def report(self) -> None:
        """Log how often lines were left out, if their time is over; called now and then."""
        with self._lock:
            if self._seconds() < self._until or not self._lines:
                return
            lines, self._lines = self._lines, {}
            others, self._others = self._others, 0
        for line in lines.values():
            if line.more:
                fields = {**line.fields, "more": str(line.more)}
                log.warning("%s, again and again", line.message, extra={"fields": fields})
        if others:
            log.warning("%d other clients were turned away and not logged", others)

    def _note(self, message: str, **fields: str) -> None:
        self.report()
        fields = {name: value for name, value in fields.items() if value}
        # A client has another port each time.
        host = fields.get("address", "").rpartition(":")[0]
        key = (message, *({**fields, "address": host}).values())
        with self._lock:
            if not self._lines:
                self._until = self._seconds() + WINDOW_SECONDS
            known = self._lines.get(key)
            if known is not None:
                known.more += 1
                return
            if len(self._lines) >= limits.MAX_REFUSAL_LINES:
                self._others += 1
                return
            self._lines[key] = _Line(message, fields)
        log.warning(message, extra={"fields": fields})


def id_of(token: str | None) -> str:
    """Return the id of a token, ``ID:SECRET``, as far as it may be shown."""
    key_id, colon, _ = (token or "").partition(":")
    return "".join(each if each.isprintable() else "?" for each in key_id[:64]) if colon else ""
