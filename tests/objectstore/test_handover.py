"""A planned stop hands a store to its standby; one that can't listen leaves the owner alone."""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from tests.objectstore.test_owners import acked, judge, wait
from tests.objectstore.test_standby import (
    AFTER,
    CLOCK,
    Served,
    confirmed_since,
    load,
    serve,
    status_of,
)
from tests.ports import free_ports
from tests.server.conftest import issue, request

import penstock
from penstock.readers import watch_owner
from penstock.server.keys import add_key, remove_key

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow

STANDBY = ("--standby", "--standby-after", AFTER)
__all__ = ["serve"]


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"slatedb+file://{tmp_path}/store"
    found: str = request.getfixturevalue("url")
    return found


def gap_ms(owner: Served, standby: Served, notes: Path, number: signal.Signals) -> int:
    """End the owner under load; return how long no publish was confirmed."""
    before = acked(notes)
    wait(lambda: acked(notes) > before + 5)
    owner.process.send_signal(number)
    ended_ms = CLOCK.now_ms()
    wait(lambda: confirmed_since(notes, ended_ms) and standby.ready())
    return min(confirmed_since(notes, ended_ms)) - ended_ms


def test_a_planned_stop_hands_the_store_over(
    place: str,
    serve: Callable[..., Served],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    notes = tmp_path / "notes"
    (port,) = free_ports(1)
    first = serve("first", port, *STANDBY)
    wait(first.ready)
    # There was no store yet, so nobody was waited for.
    assert "has no owner: taking over" in first.said()
    second = serve("second", port, *STANDBY)
    with load(first.native, notes, "a"):
        planned_ms = gap_ms(first, second, notes, signal.SIGTERM)
        assert first.process.wait(60) == 0
        third = serve("third", port, *STANDBY)
        killed_ms = gap_ms(second, third, notes, signal.SIGKILL)
    assert "has no owner: taking over" in second.said()
    assert "no sign of life" not in second.said()
    assert "has an owner that gives no sign of life: taking over" in third.said()
    with capsys.disabled():
        sys.stdout.write(f"\n{place.partition(':')[0]}: {planned_ms} ms without an owner after a "
                         f"planned stop, {killed_ms} ms after a kill: "
                         f"{planned_ms / killed_ms:.2f} of it\n")  # fmt: skip
    assert third.stop() == 0
    assert judge(place, notes) > 10


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_standby_that_can_not_listen_leaves_the_owner_alone(
    serve: Callable[..., Served],
) -> None:
    (port,) = free_ports(1)
    owner = serve("owner", port)
    standby = serve("standby", port, "--standby", "--standby-after", "3s")
    with penstock.connect(owner.native) as client:
        client.create_queue("q")
        owner.process.send_signal(signal.SIGSTOP)
        wait(lambda: f"can't listen on 127.0.0.1:{port}" in standby.said())
        assert status_of(standby.http, "/ready") == 503
        owner.process.send_signal(signal.SIGCONT)
        client.send("q", b"it still owns the store")
        threading.Event().wait(0.5)
        client.send("q", b"and has not been fenced since")
        assert owner.ready()
        assert owner.stop() == 0
        wait(standby.ready)
        assert len(client.browse("q")) == 2
    assert standby.stop() == 0


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_signal_counts_while_the_store_is_being_lost(
    place: str, serve: Callable[..., Served]
) -> None:
    (port,) = free_ports(1)
    owner = serve("owner", port, *STANDBY)
    wait(owner.ready)
    with penstock.open(place):
        wait(lambda: "no more is served" in owner.said())
        owner.process.send_signal(signal.SIGTERM)
        # It says so either way: as an owner that has lost its store, or as a standby.
        assert owner.process.wait(60) in {0, 1}
        assert "stopping" in owner.said()


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_standby_reads_keys_and_certificate_again(
    place: str, serve: Callable[..., Served], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    first = f"first:{add_key(keys, 'first', ['all'])}"
    before, after = issue(tmp_path / "before"), issue(tmp_path / "after")
    native, ops = free_ports(2)
    with penstock.open(place):
        options = ["--tls-certificate", str(before.certificate), "--tls-key", str(before.key)]
        options += ["--keys", str(keys), "--ops-address", f"127.0.0.1:{ops}"]
        standby = Served(place, tmp_path / "standby", native, *STANDBY, *options)
        try:
            wait(lambda: status_of(ops, "/health") == 200)
            address = ("127.0.0.1", standby.http)

            def status(token: str, context: ssl.SSLContext) -> int:
                return request(address, "GET", "/metrics", token=token, tls=context).status

            assert status(first, before.context()) == 200
            page = request(("127.0.0.1", ops), "GET", "/metrics").body
            assert b'penstock_certificate_expiry_timestamp_seconds{file="certificate"}' in page
            # A page of another site is no operator.
            with socket.create_connection(("127.0.0.1", ops)) as browser:
                browser.sendall(b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n")
                assert browser.recv(100).startswith(b"HTTP/1.1 403")
            second = f"second:{add_key(keys, 'second', ['all'])}"
            remove_key(keys, "first")
            wait(lambda: status(second, before.context()) == 200)
            assert status(first, before.context()) == 401
            shutil.copy(after.certificate, before.certificate)
            shutil.copy(after.key, before.key)
            standby.process.send_signal(signal.SIGHUP)
            wait(lambda: "read the certificate" in standby.said())
            assert status(second, after.context()) == 200
            assert standby.stop() == 0
        finally:
            standby.close()


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_standby_with_bad_settings_takes_nothing(place: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    audit = str(tmp_path / "nowhere" / "audit")
    standby = Served(place, tmp_path / "standby", port, *STANDBY, "--audit-path", audit)
    try:
        assert standby.process.wait(60) == 1
        assert f"the audit log {audit} can't be written" in standby.said()
        assert not (tmp_path / "store").exists()
    finally:
        standby.close()


def test_a_store_is_closed_until_somebody_opens_it(place: str) -> None:
    pulse = watch_owner(place)
    pulse.look()
    assert pulse.closed()
    with penstock.open(place) as broker:
        pulse.look()
        assert not pulse.closed()
        broker.create_queue("q")
        for number in range(40):
            broker.send("q", b"%d" % number)
            pulse.look()
            assert not pulse.closed()
    pulse.look()
    assert pulse.closed()
    assert watch_owner(place).look() == pulse.look_again()
    with penstock.open(place) as broker:
        pulse.look()
        assert not pulse.closed()
        assert broker.stats("q").available == 40
