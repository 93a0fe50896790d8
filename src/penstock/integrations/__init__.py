"""Penstock in the frameworks that people use already."""

from __future__ import annotations

from typing import cast

import penstock


def is_server(url: str) -> bool:
    """Whether a URL names a server."""
    return url.startswith(("penstock:", "penstocks:"))


def open_broker(
    url: str, *, token: str = "", patience_ms: int = 10_000, name: str = ""
) -> penstock.Broker:
    """Connect to a server, or open a store, which needs no token."""
    if not is_server(url):
        return penstock.open(url)
    client = penstock.connect(url, token=token, patience_ms=patience_ms, name=name)
    return cast(penstock.Broker, client)  # which has the verbs of a broker
