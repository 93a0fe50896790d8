"""Keeps web pages out of a server without keys.

Such a server trusts who can connect. A browser on the same machine can, and does so for any page:
by a form that posts to it, or under a name of the page's own that resolves to this machine. What
browsers say about a request tells them from other clients, which send none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from penstock.server.http.messages import Response
from penstock.server.security import is_loopback

if TYPE_CHECKING:
    from penstock.server.http.messages import Request

__all__ = ["PageGuard"]

_WAY_OUT: Final = "This server asks for no keys, so it takes no requests that "


class PageGuard:
    """Says why a request is refused.

    ``host`` is what is listened on: where only this machine can reach it, a request must name this
    machine, or the host of ``url``, which is the address that the server is known by.
    """

    def __init__(self, host: str, url: str = "") -> None:
        self._local = is_loopback(host)
        self._known = _authority_of(url)
        self._known_host = _host_of(self._known)

    def __call__(self, request: Request) -> Response | None:
        """Return a refusal, or None."""
        headers = request.headers
        authority = headers.get("host", "").strip().lower()
        if headers.get("sec-fetch-site", "").strip().lower() == "cross-site":
            return _refused("come from web pages of other sites (Sec-Fetch-Site: cross-site).")
        origin = headers.get("origin")
        if origin is not None and _authority_of(origin) not in {authority, self._known} - {""}:
            return _refused("come from web pages of other sites (Origin).")
        if self._local and authority and not self._is_here(_host_of(authority)):
            return _refused(
                "name another host than this machine (Host): connect to localhost, set sqs.url to "
                "the address that the server is known by, or use keys."
            )
        return None

    def _is_here(self, host: str) -> bool:
        return (
            is_loopback(host)
            or host.endswith(".localhost")
            or bool(self._known_host and host == self._known_host)
        )


def _refused(why: str) -> Response:
    return Response(403, f"{_WAY_OUT}{why}\n".encode())


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
