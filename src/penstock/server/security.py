"""Principals, what they may do and how fast, and the guard of a server without keys."""

from __future__ import annotations

import base64
import ipaddress
import re
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from penstock import limits
from penstock.clock import loop_seconds
from penstock.errors import LimitReached, NotAllowed, QueueNotFound
from penstock.filters import default_filter, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.model import Message
    from penstock.packing import Envelope, PackedMessage

_WAY_OUT: Final = "This server asks for no keys, so it takes no requests that "
ACTIONS: Final = ("publish", "consume", "admin")


class Rate:
    """How fast one key may publish, whatever the protocol; 0: no limit. For calls from any thread.

    A key has the messages and bytes of one second saved up at most. A publish is let in while
    anything is left of them, however large it is; what it takes beyond that, the key waits for
    afterwards. So a key keeps to its rate over time, and no batch is too large to ever be let in.
    """

    def __init__(
        self, messages: int, payload_bytes: int, seconds: Callable[[], float] = loop_seconds
    ) -> None:
        self.limits = {"messages_per_second": messages, "bytes_per_second": payload_bytes}
        self._left = {name: float(limit) for name, limit in self.limits.items()}
        self._seconds = seconds
        self._at = seconds()
        self._lock = threading.Lock()

    def spend(self, key_id: str, messages: int, payload_bytes: int) -> None:
        """Count a publish, or refuse it: LimitReached names the limit and when to come again."""
        with self._lock:
            now = self._seconds()
            passed, self._at = max(0.0, now - self._at), now
            for name, limit in self.limits.items():
                self._left[name] = min(float(limit), self._left[name] + passed * limit)
            for name, limit in self.limits.items():
                if limit and self._left[name] <= 0:
                    wait_ms = int(1_000 * -self._left[name] / limit) + 1
                    raise LimitReached(
                        f"key {key_id!r} publishes too fast: {name}={limit}. Nothing was changed; "
                        f"try again in {wait_ms} ms",
                        retry_after_ms=wait_ms,
                    )
            self._left["messages_per_second"] -= messages
            self._left["bytes_per_second"] -= payload_bytes


class Principal(msgspec.Struct, eq=False):
    """The sender of a request: the id of a key and its grants, as (action, pattern of queue names).

    A connection keeps it for as long as it lasts. When the keys are read again, what it may do is
    what the file says then: nothing, if the key is gone or has another secret.
    """

    key_id: str
    grants: tuple[tuple[str, str], ...] = ()
    # Whether it logged in by the secret that a newer one is to replace.
    former: bool = False
    rate: Rate | None = None

    def may(self, action: str, queue: str | None = None) -> bool:
        """Whether an action on a queue is allowed; ``None`` or ``*`` is one on all queues."""
        # No queue has a longer name, and a stranger's is not cached.
        known = queue if queue and len(queue) <= limits.MAX_QUEUE_NAME_CHARS else "*"
        return _allows(self.grants, action, known)

    def sees(self, queue: str) -> bool:
        """Whether the name of a queue may be told: some action on it is allowed."""
        return any(self.may(action, queue) for action in ACTIONS)

    def check(self, action: str, queue: str | None = None) -> None:
        """Raise NotAllowed if an action on a queue is not allowed."""
        if not self.may(action, queue):
            where = f"queue {queue!r:.100}" if queue and queue != "*" else "all queues"
            raise NotAllowed(f"key {self.key_id!r} may not {action} on {where}")

    def spend_rate(self, messages: Iterable[Message | PackedMessage]) -> None:
        """Count messages that the key publishes; LimitReached if the key is too fast."""
        if self.rate is not None:
            sizes = [len(message.payload) for message in messages]
            self.rate.spend(self.key_id, len(sizes), sum(sizes))

    def check_any(self, actions: tuple[str, ...], queue: str | None = None) -> None:
        """Raise NotAllowed unless one of several actions is allowed."""
        for action in actions:
            if self.may(action, queue):
                return
        self.check(actions[0], queue)


ANYONE: Final = Principal("", tuple((action, "*") for action in ACTIONS))
"""The principal of every request when authentication is off."""


@lru_cache(maxsize=16_384)
def _allows(grants: tuple[tuple[str, str], ...], action: str, queue: str) -> bool:
    return any(
        granted == action
        and (pattern == "*" or re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), queue))
        for granted, pattern in grants
    )


def told(error: BaseException, principal: Principal | None) -> BaseException:
    """Return an error as a client gets it: of an unknown queue, with the nearest that it sees."""
    if isinstance(error, QueueNotFound) and principal is not None:
        return QueueNotFound(f"{error}{error.suggestion(principal.sees)}")
    return error


def check_publish(principal: Principal, messages: Iterable[Message | Envelope]) -> None:
    """Raise NotAllowed unless every message may be published: on the queue that it names."""
    if principal is ANYONE:
        return
    for queue in {message.attributes.get("queue") for message in messages}:
        principal.check("publish", queue if isinstance(queue, str) else None)


def check_receipts_of(principal: Principal, queue: str | None) -> Callable[[str], None] | None:
    """Return the check of each queue that receipts name; None: none is needed.

    A request that names its ``queue`` is checked by that, and can't settle receipts of others.
    """
    if queue is not None or principal.may("consume"):
        return None

    def check(name: str) -> None:
        if not principal.may("consume", name):
            # Without its name, which a receipt does not tell.
            raise NotAllowed(
                f"key {principal.key_id!r} may not consume on the queue that a receipt is of"
            )

    return check


def check_target(principal: Principal, queue: str) -> None:
    """Raise NotAllowed unless messages of other queues may be sent on to this one."""
    principal.check_any(("publish", "admin"), queue)


def check_settings(principal: Principal, name: str, settings: Mapping[str, Any]) -> None:
    """Raise NotAllowed unless a queue may be made or changed so; to be called on a thread.

    A filter decides which messages a queue gets, so only a key with admin on all queues may set
    one; any other queue gets the messages that are sent to it by name.
    """
    if principal is ANYONE:
        return
    principal.check("admin", name)
    text = settings.get("filter")
    if (
        isinstance(text, str)
        and not principal.may("admin")
        and parse(text).text != default_filter(name)
    ):
        raise NotAllowed(
            f"key {principal.key_id!r} may not give queue {name!r:.100} a filter of its own: that "
            "takes admin on all queues"
        )
    target = settings.get("dead_letter")
    if isinstance(target, str) and target:
        check_target(principal, target)


# --- headers and addresses -----------------------------------------------------------------------


def token_of(header: str | None) -> str | None:
    """Return the token of an ``authorization`` header: Bearer, or Basic as browsers write it."""
    scheme, _, rest = (header or "").strip().partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer":
        return rest
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode()
        except (ValueError, UnicodeDecodeError):
            return None
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- web pages ------------------------------------------------------------------------------------
#
# A server without keys trusts every client that can connect. A browser on the same machine can, and
# does so for any page: by a form that posts to the server, or under a name of the page's own that
# resolves to this machine. Browsers send headers that tell their requests from those of clients.


class PageGuard:
    """A check of headers that refuses requests of web pages.

    ``host`` is the listener's: where only this machine can reach it, a request must name this
    machine, or the host of ``url``, which is the address that the server is known by.
    """

    def __init__(self, host: str, url: str = "") -> None:
        self._local = is_loopback(host)
        self._known = _authority_of(url)
        self._known_host = _host_of(self._known)
        # The last Host header that was let through: most clients send the same.
        self._last_host: str | None = None

    def __call__(self, headers: Mapping[str, str]) -> str | None:
        """Return why a request with these headers is refused, or None."""
        page = "sec-fetch-site" in headers or "origin" in headers
        if not page and headers.get("host") == self._last_host:
            return None
        authority = headers.get("host", "").strip().lower()
        if headers.get("sec-fetch-site", "").strip().lower() == "cross-site":
            return f"{_WAY_OUT}come from web pages of other sites (Sec-Fetch-Site: cross-site)."
        origin = headers.get("origin")
        if origin is not None and _authority_of(origin) not in {authority, self._known} - {""}:
            return f"{_WAY_OUT}come from web pages of other sites (Origin)."
        if self._local and authority and not self._is_here(_host_of(authority)):
            return (
                f"{_WAY_OUT}name another host than this machine (Host): connect to localhost, set "
                "sqs.url to the address that the server is known by, or use keys."
            )
        self._last_host = headers.get("host")
        return None

    def _is_here(self, host: str) -> bool:
        return (
            is_loopback(host)
            or host.endswith(".localhost")
            or bool(self._known_host and host == self._known_host)
        )


def _authority_of(url: str) -> str:
    try:
        return urlsplit(url.strip().lower()).netloc
    except ValueError:
        return ""


def _host_of(authority: str) -> str:
    """Return the host of ``host:port``; the brackets of an IPv6 address go."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.rpartition(":")[0] if ":" in authority else authority
