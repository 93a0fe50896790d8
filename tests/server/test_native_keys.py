"""Native clients behind keys and TLS, as the server sets them up."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import NotAllowed, PenstockError
from penstock.server import running

if TYPE_CHECKING:
    from pathlib import Path

NATIVE: dict[str, Any] = {"native": "127.0.0.1:0"}


def test_keys(keys: dict[str, str], tmp_path: Path) -> None:
    with running("memory:", **NATIVE, keys=tmp_path / "keys.toml") as server:
        place = server.location("native")
        with penstock.connect(place, token=keys["root"]) as root:
            root.create_queue("orders")
            root.create_queue("mail")
        with penstock.connect(place, token=keys["sender"]) as sender:
            sender.send("orders", b"x")
            with pytest.raises(NotAllowed, match="key 'sender' may not publish on queue 'mail'"):
                sender.send("mail", b"x")
            with pytest.raises(NotAllowed):
                sender.claim("orders")
        with penstock.connect(place, token=keys["worker"]) as worker:
            assert len(worker.claim("orders")) == 1
            with pytest.raises(NotAllowed):
                worker.delete_queue("orders")
        for token in ("", "root:wrong"):
            with pytest.raises(NotAllowed), penstock.connect(place, token=token) as nobody:
                nobody.queues()
        page = server.metrics.page().decode()
        assert 'operation="Claim",outcome="NotAllowed",protocol="native"} 1.0' in page


def test_tls_both_ways(certs: Any) -> None:
    settings: dict[str, Any] = {"tls_certificate": certs.certificate, "tls_key": certs.key}
    with running("memory:", **NATIVE, **settings, tls_client_ca=certs.ca) as server:
        place = server.location("native")
        assert place.startswith("penstocks://")
        with penstock.connect(place, tls=certs.context(client=True)) as client:
            assert client.queues() == []
        for context in (certs.context(), ssl.create_default_context()):
            with (
                pytest.raises((PenstockError, OSError)),
                penstock.connect(place, tls=context, patience_ms=300) as stranger,
            ):
                stranger.queues()
