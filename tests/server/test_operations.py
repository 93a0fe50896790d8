"""The pages for operators, over HTTP and HTTPS, and what they count."""

from __future__ import annotations

import asyncio
import http.client
import re
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.test_committer import refuse_syncs

import penstock
from penstock import Message, StorageFailed, StoreFenced
from penstock.server import running
from penstock.server.metrics import OTHERS, Metrics, healthy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.server import Server

HTTP: dict[str, Any] = {"http": "127.0.0.1:0"}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[penstock.Broker]:
    with penstock.open(f"rocksdb:{tmp_path / 'db'}") as opened:
        yield opened


def series(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Read a page with the parser of others, which refuses what is not well-formed."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def at(page: bytes, name: str, **labels: str) -> float:
    return series(page)[name, frozenset(labels.items())]


def watching(broker: penstock.Broker, **options: Any) -> Metrics:
    metrics = Metrics(**options)
    metrics.watch(broker, seconds=lambda: 0.0)
    return metrics


# --- health -------------------------------------------------------------------------------------


def test_health_and_readiness(broker: penstock.Broker, ask: Any) -> None:
    with running(broker, **HTTP) as server:
        address = server.addresses["http"]
        assert ask(address, "GET", "/health")[:2] == (200, b"alive\n")
        assert ask(address, "GET", "/ready")[:2] == (200, b"ready\n")
        assert ask(address, "HEAD", "/ready")[:2] == (200, b"")
        server._listening = False
        answer = ask(address, "GET", "/ready")
        assert answer[:2] == (503, b"not ready: the server is starting or stopping\n")
        assert ask(address, "GET", "/health").status == 200


def test_pages_do_not_wait_for_a_store_that_hangs(
    broker: penstock.Broker, ask: Any, wait_until: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("penstock.broker.runner.BUSY_SECONDS", 0.2)
    going_on = threading.Event()
    broker.create_queue("q")
    with running(broker, **HTTP) as server, ThreadPoolExecutor(8) as threads:
        address = server.addresses["http"]
        assert at(ask(address, "GET", "/metrics").body, "penstock_queues") == 1
        hanging = threads.submit(broker._look, lambda _: going_on.wait(60))
        try:
            wait_until(lambda: ask(address, "GET", "/ready").status == 503)
            asked = [
                threads.submit(ask, address, "GET", page)
                for _ in range(500)
                for page in ("/ready", "/metrics")
            ]
            answers = [each.result(60) for each in asked]
            assert {each.status for each in answers} == {200, 503}
            waiting = [each for each in threading.enumerate() if each.name.startswith("asyncio")]
            # One asks the store, and one makes pages.
            assert len(waiting) <= 2
            for ready, metrics in zip(answers[::2], answers[1::2], strict=True):
                assert re.fullmatch(rb"not ready for \d+ s: one call has had it .*\n", ready.body)
                assert at(metrics.body, "penstock_store_healthy") == 0
                assert b"penstock_queues" not in metrics.body
        finally:
            going_on.set()
        assert hanging.result(60)
        assert ask(address, "GET", "/ready")[:2] == (200, b"ready\n")
        wait_until(lambda: b"penstock_queues 1.0" in ask(address, "GET", "/metrics").body)
    begin, end = [each.message for each in caplog.records if "the store can" in each.message]
    assert begin.startswith("the store can't be used: one call has had it")
    assert end.startswith("the store can be used again, after")


def test_a_page_that_takes_long_holds_nobody_up(
    broker: penstock.Broker, ask: Any, wait_until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, pages, going_on = Metrics.page, list[int](), threading.Event()

    def slow(metrics: Metrics) -> bytes:
        pages.append(1)
        assert going_on.wait(60)
        return page(metrics)

    monkeypatch.setattr(Metrics, "page", slow)
    with running(broker, **HTTP) as server, ThreadPoolExecutor(5) as askers:
        address = server.addresses["http"]
        asked = [askers.submit(ask, address, "GET", "/metrics") for _ in range(5)]
        wait_until(lambda: pages)
        assert ask(address, "GET", "/ready").status == 200
        going_on.set()
        assert {each.result().status for each in asked} == {200}
        assert len(pages) < 5


def test_figures_of_a_slow_store_have_an_age(
    broker: penstock.Broker, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.server.admin._FRESH_SECONDS", 0.01)
    with running(broker, **HTTP) as server:
        address = server.addresses["http"]
        asked = threading.Event()
        figures = server.metrics.read_store
        figures()
        monkeypatch.setattr(server.metrics, "read_store", lambda: asked.wait(60))
        for _ in range(2):
            page = ask(address, "GET", "/metrics").body
            assert at(page, "penstock_queues") == 0
            assert at(page, "penstock_store_figures_age_seconds") > 0
        asked.set()


def test_a_store_that_cant_sync_is_not_ready(tmp_path: Path, ask: Any) -> None:
    # Without a sweeper it stays as it is.
    broker = penstock.open(f"rocksdb:{tmp_path}/store", background=False)
    broker.create_queue("q")
    assert healthy(broker)
    with running(broker, **HTTP) as server:
        refuse_syncs(broker)
        with pytest.raises(StorageFailed):
            broker.send("q", b"x")
        assert not healthy(broker)
        assert ask(server.addresses["http"], "GET", "/ready").status == 503
        assert at(ask(server.addresses["http"], "GET", "/metrics").body,
                  "penstock_store_healthy") == 0  # fmt: skip
    with pytest.raises(StorageFailed, match="the last changes may not be durable"):
        broker.close()


def test_a_store_that_is_lost_is_shown_as_such() -> None:
    with penstock.open("memory:", background=False) as broker:
        metrics = watching(broker)
        assert at(metrics.page(), "penstock_store_healthy") == 1
        broker._runner._lose(StoreFenced("another broker has opened it"))
        assert at(metrics.page(), "penstock_store_healthy") == 0


def test_a_store_of_one_owner_has_no_contention(broker: penstock.Broker, ask: Any) -> None:
    assert broker.contention() is None
    assert broker._store.health().away is None
    with running(broker, **HTTP) as server:
        page = ask(server.addresses["http"], "GET", "/metrics").body
    assert b"penstock_store_healthy 1.0" in page
    assert b"collisions" not in page
    assert b"penstock_statements" not in page


def test_a_closed_broker_is_not_healthy() -> None:
    broker = penstock.open("memory:")
    broker.close()
    assert not healthy(broker)


# --- metrics ------------------------------------------------------------------------------------


def test_the_page_tells_what_happened(broker: penstock.Broker, ask: Any) -> None:
    broker.create_queue("q", max_attempts=1)
    broker.create_queue("other", filter="n = 1")
    broker.publish(Message(b"x", {"queue": "q"}, delay_ms=60_000 if n == 9 else 0)
                   for n in range(10))  # fmt: skip
    taken = broker.claim("q", limit=4)
    broker.ack([taken[0].receipt])
    broker.ack([taken[0].receipt])
    broker.release([taken[1].receipt])
    with running(broker, **HTTP) as server:
        answer = ask(server.addresses["http"], "GET", "/metrics")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        page = answer.body
        for state, count in [("available", 5), ("delayed", 1), ("in_flight", 2), ("done", 1)]:
            assert at(page, "penstock_queue_depth", queue="q", state=state) == count
        assert at(page, "penstock_queue_depth", queue="q", state="failed") == 1
        for name, count in [("enqueued", 10), ("claimed", 4), ("acked", 1), ("failed", 1)]:
            assert at(page, f"penstock_queue_{name}_total", queue="q") == count
        assert at(page, "penstock_published_total") == 10
        assert at(page, "penstock_stale_receipts_total") == 1
        assert at(page, "penstock_queue_oldest_seconds", queue="q") >= 0
        assert at(page, "penstock_queues") == 2
        assert at(page, "penstock_connections", protocol="http") == 1
        assert at(page, "penstock_parked_claims") == 0
        assert at(page, "penstock_routing_lag", log="0") == 0
        syncs = at(page, "penstock_sync_seconds_count")
        assert 0 < syncs <= at(page, "penstock_synced_commits_total")
        assert at(page, "penstock_sync_seconds_sum") > 0
        assert at(page, "penstock_store_healthy") == 1


def test_parked_claims_are_counted(broker: penstock.Broker, ask: Any, wait_until: Any) -> None:
    broker.create_queue("q")
    with running(broker, **HTTP) as server:

        async def park() -> Any:
            return await server.batcher.claim("q", wait_ms=600_000)

        waiting = asyncio.run_coroutine_threadsafe(park(), server.batcher._loop)
        wait_until(lambda: server.batcher.parked == 1)
        page = ask(server.addresses["http"], "GET", "/metrics").body
        assert at(page, "penstock_parked_claims") == 1
    assert waiting.result(60).rows == []


def test_the_lag_of_a_pipeline(ask: Any) -> None:
    with penstock.open("memory:", routing="pipeline") as broker:
        broker.publish([Message(b"x")] * 7)
        with running(broker, **HTTP) as server:
            page = ask(server.addresses["http"], "GET", "/metrics").body
            assert at(page, "penstock_routing_lag", log="0") == 7


def test_many_queues_do_not_make_many_series() -> None:
    with penstock.open("memory:", background=False) as broker:
        for number in range(300):
            broker.create_queue(f"q{number:03}")
        for number in (7, 250):
            broker.publish([Message(b"x", {"queue": f"q{number:03}"})] * 5)
        broker.publish([Message(b"x", {"queue": f"q{number:03}"}) for number in range(10, 20)])
        metrics = watching(broker, queues=3)
        metrics.read_store()
        found = series(metrics.page())
        names = {dict(labels).get("queue") for _, labels in found} - {None}
        assert len(names) == 4
        assert {"q007", "q250", OTHERS} <= names
        assert found["penstock_queues", frozenset()] == 300
        waiting = ("state", "available")
        depth = [found[key] for key in found if waiting in key[1]]
        assert sum(depth) == 20
        assert len(found) < 200


def test_a_queue_that_goes_while_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with penstock.open("memory:") as broker:
        broker.create_queue("a")
        broker.create_queue("b")
        metrics = watching(broker)
        stats = broker.stats

        def deleting(name: str) -> Any:
            if name == "a":
                broker.delete_queue("b")
            return stats(name)

        monkeypatch.setattr(broker, "stats", deleting)
        metrics.read_store()
        assert at(metrics.page(), "penstock_queues") == 1


def test_requests_are_histograms() -> None:
    metrics = Metrics()
    for seconds in (0.0001, 0.0005, 0.003, 100.0):
        metrics.request("native", "Publish", seconds, "ok")
    metrics.request("native", "Claim", 2.0003, "ok", waited_s=2.0)
    metrics.request("sqs", "SendMessage", 0.1, "QueueDoesNotExist")
    metrics.refused("native")
    page = metrics.page()
    labels = {"protocol": "native", "operation": "Publish", "outcome": "ok"}
    name = "penstock_request_seconds"
    assert at(page, f"{name}_bucket", le="0.0005", **labels) == 2
    assert at(page, f"{name}_bucket", le="0.005", **labels) == 3
    assert at(page, f"{name}_bucket", le="30.0", **labels) == 3
    assert at(page, f"{name}_bucket", le="+Inf", **labels) == 4
    assert at(page, f"{name}_count", **labels) == 4
    assert at(page, f"{name}_sum", **labels) == pytest.approx(100.0036)
    assert at(page, "penstock_connections_refused_total", protocol="native") == 1
    labels["operation"] = "Claim"
    assert at(page, f"{name}_bucket", le="0.0005", **labels) == 1
    assert at(page, f"{name}_bucket", le="0.00025", **labels) == 0
    assert at(page, "penstock_claim_wait_seconds_sum", protocol="native") == 2


def test_invented_operations_do_not_grow_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.metrics._MAX_SERIES", 20)
    metrics = Metrics()
    for number in range(100):
        metrics.request("sqs", f"Invented{number}", 0.1, "InvalidAction")
    assert len(metrics._requests) <= 21
    counts = [v for (name, _), v in series(metrics.page()).items() if name.endswith("_count")]
    assert sum(counts) == 100


def test_metrics_can_be_off(broker: penstock.Broker, ask: Any) -> None:
    with running(broker, **HTTP, metrics=False) as server:
        assert ask(server.addresses["http"], "GET", "/metrics").status != 200
        assert ask(server.addresses["http"], "GET", "/health").status == 200


# --- keys ---------------------------------------------------------------------------------------


@pytest.fixture
def guarded(broker: penstock.Broker, keys: dict[str, str], tmp_path: Path) -> Iterator[Server]:
    settings: dict[str, Any] = {
        "keys": tmp_path / "keys.toml",
        "backup_directory": tmp_path / "backups",
    }
    with running(broker, **HTTP, **settings) as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/metrics", {"root", "viewer"}), ("POST", "/admin/backup", {"root"})],
)
def test_who_may_see_and_do(
    guarded: Server, keys: dict[str, str], ask: Any, method: str, path: str, allowed: set[str]
) -> None:
    address = guarded.addresses["http"]
    body = msgspec.json.encode({"name": "one"})
    for name, token in keys.items():
        answer = ask(address, method, path, body=body, token=token)
        assert (answer.status == 200) == (name in allowed), answer
        if name not in allowed:
            assert answer.status == 403
            assert msgspec.json.decode(answer.body)["error"] == "NotAllowed"
    for token in ("", "root:wrong", "nobody:x"):
        answer = ask(address, method, path, body=body, token=token)
        assert answer.status == 401
        assert "bearer" in answer.headers["www-authenticate"].lower()
    for open_to_all in ("/health", "/ready"):
        assert ask(address, "GET", open_to_all).status == 200


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"name": 5}', b'{"name": "a/b"}', b'{"name": ".."}', b"\xff",
             b'{"name": "x", "directory": "/tmp"}'],
)  # fmt: skip
def test_backups_that_are_refused(guarded: Server, keys: dict[str, str], ask: Any,
                                  body: bytes) -> None:  # fmt: skip
    answer = ask(guarded.addresses["http"], "POST", "/admin/backup", body=body, token=keys["root"])
    assert answer.status == 400
    assert msgspec.json.decode(answer.body)["error"] == "InvalidInput"


def test_backups_are_off_unless_there_is_a_place(broker: penstock.Broker, ask: Any) -> None:
    with running(broker, **HTTP) as server:
        body = b'{"name": "one"}'
        answer = ask(server.addresses["http"], "POST", "/admin/backup", body=body)
        assert answer.status == 400
        assert b"set backup.directory" in answer.body


# --- TLS ----------------------------------------------------------------------------------------


def test_https(broker: penstock.Broker, certs: Any, ask: Any) -> None:
    with running(broker, **HTTP, tls_certificate=certs.certificate, tls_key=certs.key) as server:
        address = server.addresses["http"]
        assert re.match(r"https://127\.0\.0\.1:\d+$", server.location("http"))
        assert ask(address, "GET", "/health", tls=certs.context()).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(address, "GET", "/health", tls=ssl.create_default_context())
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(address, "GET", "/health")
        old = certs.context()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert ask(address, "GET", "/health", tls=old).status == 200


def test_https_with_client_certificates(broker: penstock.Broker, certs: Any, ask: Any) -> None:
    settings: dict[str, Any] = {"tls_certificate": certs.certificate, "tls_key": certs.key}
    with running(broker, **HTTP, **settings, tls_client_ca=certs.ca) as server:
        address = server.addresses["http"]
        assert ask(address, "GET", "/health", tls=certs.context(client=True)).status == 200
        with pytest.raises(OSError):  # noqa: PT011 - a reset or an alert, as the race goes
            ask(address, "GET", "/health", tls=certs.context())


def test_a_new_certificate_is_taken_up(
    broker: penstock.Broker, certs: Any, ask: Any, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    certificate.write_bytes(certs.certificate.read_bytes())
    key.write_bytes(certs.key.read_bytes())
    with running(broker, **HTTP, tls_certificate=certificate, tls_key=key) as server:
        address = server.addresses["http"]

        def seen() -> str:
            return ssl.get_server_certificate(address, timeout=60)

        before = seen()
        certificate.write_bytes(certs.client_certificate.read_bytes())
        server.reload()
        assert seen() == before
        key.write_bytes(certs.client_key.read_bytes())
        server.reload()
        assert seen() != before


def test_settings_that_are_none(broker: penstock.Broker) -> None:
    with (
        pytest.raises(penstock.InvalidInput, match="no setting 'htttp'"),
        running(broker, htttp="x"),
    ):
        pass
