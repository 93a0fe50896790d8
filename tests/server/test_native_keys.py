"""Native clients behind keys and TLS, as the server sets them up."""

from __future__ import annotations

import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.waiting import wait_until

import penstock
from penstock import NotAllowed, PenstockError
from penstock.server import running
from penstock.server.keys import add_key, read_keys, write_keys

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


def test_a_consumer_goes_on_when_its_key_is_made_anew(keys: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    with (
        running("memory:", **NATIVE, keys=path) as server,
        penstock.connect(server.location("native"), token=keys["root"]) as root,
        penstock.connect(server.location("native"), token=keys["worker"]) as worker,
    ):
        root.create_queue("orders")
        root.send("orders", b"first")
        with worker.consume("orders", wait_ms=10_000) as consumer:
            assert next(consumer).payload == b"first"
            found = read_keys(path)
            found["worker"] = msgspec.structs.replace(
                found["worker"], hash="", secret=keys["worker"].partition(":")[2]
            )
            write_keys(path, found)
            server.reload()
            root.send("orders", b"second")
            assert next(consumer).payload == b"second"
            write_keys(path, {name: key for name, key in found.items() if name != "worker"})
            server.reload()
            with pytest.raises(NotAllowed):
                next(consumer)
            # The client is refused for good, unless the key is there again when a call comes.
            wait_until(lambda: worker.closed)
            with pytest.raises(NotAllowed):
                worker.claim("orders")
            write_keys(path, found)
            server.reload()
            root.send("orders", b"third")

            def claims() -> bool:
                with suppress(NotAllowed):
                    return [each.payload for each in worker.claim("orders")] == [b"third"]
                return False

            wait_until(claims)


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


@pytest.fixture
def team(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "keys.toml"
    grants = {
        "root": ["all"],
        "team": ["admin:team-*", "consume:team-*"],
        "sender": ["admin:team-*", "publish:secret"],
    }
    return {name: f"{name}:{add_key(path, name, each)}" for name, each in grants.items()}


def test_a_filter_takes_admin_on_all_queues(team: dict[str, str], tmp_path: Path) -> None:
    with running("memory:", **NATIVE, keys=tmp_path / "keys.toml") as server:
        place = server.location("native")
        with (
            penstock.connect(place, token=team["root"]) as root,
            penstock.connect(place, token=team["team"]) as mine,
        ):
            root.create_queue("secret")
            root.send("secret", b"x")
            mine.create_queue("team-a", filter="queue='team-a'")
            mine.create_queue("team-b")
            for text in ("queue = 'secret'", "true", "queue = 'team-a' OR queue = 'secret'"):
                with pytest.raises(NotAllowed, match="a filter of its own: that takes admin"):
                    mine.create_queue("team-spy", filter=text)
                with pytest.raises(NotAllowed, match="a filter of its own: that takes admin"):
                    mine.update_queue("team-a", filter=text)
            with pytest.raises(NotAllowed, match="may not admin on queue 'secret'"):
                mine.update_queue("secret", filter="queue = 'secret'")
            mine.update_queue("team-a", filter="queue = 'team-a'", lease_ms=5_000)
            assert {spec.name for spec in root.queues()} == {"secret", "team-a", "team-b"}
            mine.backfill("team-a")
            assert mine.claim("team-a") == []
            assert root.update_queue("team-a", filter="queue = 'secret'").name == "team-a"


def test_targets_take_publish_or_admin(team: dict[str, str], tmp_path: Path) -> None:
    with running("memory:", **NATIVE, keys=tmp_path / "keys.toml") as server:
        place = server.location("native")
        with (
            penstock.connect(place, token=team["root"]) as root,
            penstock.connect(place, token=team["team"]) as mine,
            penstock.connect(place, token=team["sender"]) as sender,
        ):
            root.create_queue("secret")
            mine.create_queue("team-dead")
            with pytest.raises(NotAllowed, match="may not publish on queue 'secret'"):
                mine.create_queue("team-a", dead_letter="secret", max_attempts=1)
            mine.create_queue("team-a", dead_letter="team-dead", max_attempts=1)
            with pytest.raises(NotAllowed, match="may not publish on queue 'secret'"):
                mine.update_queue("team-a", dead_letter="secret")
            root.send("team-a", b"x")
            with pytest.raises(NotAllowed, match="may not publish on queue 'secret'"):
                mine.move("team-a", "secret", state="available")
            assert root.stats("secret").available == 0
            assert sender.update_queue("team-a", dead_letter="secret").dead_letter == "secret"
            assert sender.move("team-a", "secret", state="available") == 1
            assert mine.update_queue("team-a", dead_letter="").dead_letter == ""
