"""A standby takes over from an owner that is killed or paused, under load, on S3 and on disk."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from tests.crash.child import publisher, worker
from tests.noting import Notebook, notes_of
from tests.objectstore.test_owners import PATIENCE_S, QUEUES, acked, judge, wait
from tests.ports import free_ports

import penstock
from penstock import InvalidInput, InvalidUrl, PenstockError, StorageFailed, SystemClock
from penstock.engines import slatedb as engine_module
from penstock.readers import watch_owner
from penstock.server import config as configuring
from penstock.server import process, running
from penstock.server.process import Silence, Stop, until_free
from penstock.testing.auditor import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock import Broker
    from penstock.engines.slatedb.objects import OwnerHeartbeat

ROOT = Path(__file__).parents[2]
# Long enough for an owner that has stalled not to be taken for one that is gone.
AFTER = "6s"
CLOCK = SystemClock()

pytestmark = pytest.mark.slow


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.soak)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"slatedb+file://{tmp_path}/store"
    found: str = request.getfixturevalue("url")
    return found


def status_of(port: int, path: str) -> int | None:
    """Ask a page; None if nobody answers."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        link.request("GET", path)
        return link.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        link.close()


def page_of(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as page:
        text: str = page.read().decode()
    return text


class Served:
    """`penstock serve` as a process."""

    def __init__(self, url: str, said: Path, native: int, *options: str) -> None:
        (self.http,) = free_ports(1)
        self.native = f"penstock://127.0.0.1:{native}"
        self._said = said
        command = [sys.executable, "-m", "penstock", "serve", "--store", url]
        command += ["--native", f"127.0.0.1:{native}", "--http", f"127.0.0.1:{self.http}"]
        with said.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *options],
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                stdout=output,
                stderr=output,
            )

    def ready(self) -> bool:
        assert self.process.poll() is None, self.said()
        return status_of(self.http, "/ready") == 200

    def said(self) -> str:
        return self._said.read_text()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def serve(place: str, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start an owner, or with more options a standby."""
    with ExitStack() as stack:

        def start(name: str, native: int, *options: str) -> Served:
            served = Served(place, tmp_path / name, native, *options)
            stack.callback(served.close)
            wait(
                served.ready if not options else lambda: status_of(served.http, "/health") == 200,
            )
            return served

        yield start


@contextmanager
def load(address: str, notes: Path, name: str) -> Iterator[None]:
    """Have clients publish, claim and settle, over whatever happens to their server."""
    stop = threading.Event()
    client = penstock.connect(address, patience_ms=1_000 * PATIENCE_S)
    # It has the verbs of one.
    broker = cast("Broker", client)
    threads = []

    def publish(book: Notebook, queue: str, number: int) -> None:
        publisher(broker, book, queue, f"{queue}-{name}-{number}")

    def work(book: Notebook, queue: str, _: int) -> None:
        worker(broker, book, queue)

    def keep_on(task: Callable[[Notebook, str, int], None], book: Notebook, queue: str) -> None:
        number = 0
        while not stop.is_set():
            try:
                task(book, queue, number)
            except PenstockError:
                number += 1
                stop.wait(0.05)

    for queue in QUEUES:
        client.create_queue(queue, ordering="fifo" if queue == "fifo" else "standard",
                            max_attempts=1000, bucket_exponent=1)  # fmt: skip
        book = Notebook(str(notes), queue)
        threads += [
            threading.Thread(target=keep_on, args=(task, book, queue)) for task in (publish, work)
        ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        client.close()
        for thread in threads:
            thread.join()


def confirmed_since(notes: Path, begun_ms: int) -> list[int]:
    """Tell when publishes were confirmed that began after a moment."""
    written = notes_of(notes.with_name(f"{notes.name}.standard"))
    return [n.at_ms for n in written if n.kind is Kind.PUBLISHED and n.began_at_ms > begun_ms]


def test_a_standby_takes_over_from_an_owner_that_is_killed(
    place: str,
    serve: Callable[..., Served],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    notes = tmp_path / "notes"
    (port,) = free_ports(1)
    owner = serve("owner", port)
    standby = serve("standby", port, "--standby", "--standby-after", AFTER)
    with load(owner.native, notes, "a"):
        threading.Event().wait(0.7)
        wait(lambda: acked(notes) > 5)
        assert owner.ready()
        assert status_of(standby.http, "/ready") == 503
        page = page_of(standby.http, "/metrics")
        assert 'penstock_role{role="standby"} 1.0' in page
        assert 'penstock_role{role="owner"} 0.0' in page
        assert "process_resident_memory_bytes" in page
        owner.process.kill()
        killed_ms = CLOCK.now_ms()
        wait(lambda: confirmed_since(notes, killed_ms))
        gap_ms = min(confirmed_since(notes, killed_ms)) - killed_ms
        assert standby.ready()
        before = acked(notes)
        threading.Event().wait(0.3)
        wait(lambda: acked(notes) > before + 5)
    with capsys.disabled():
        sys.stdout.write(f"\n{place.partition(':')[0]}: {gap_ms} ms without an owner, {AFTER} of it"
                         " waited on purpose\n")  # fmt: skip
    assert "has an owner that gives no sign of life: taking over" in standby.said()
    assert standby.stop() == 0
    assert judge(place, notes) > 5


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_clients_that_name_both_go_to_the_one_that_serves(
    place: str, serve: Callable[..., Served], tmp_path: Path
) -> None:
    """The standby's address is the first: it refuses connections until it takes over."""
    notes = tmp_path / "notes"
    first, second, ops = free_ports(3)
    owner = serve("owner", second)
    options = ("--standby", "--standby-after", AFTER, "--ops-address", f"127.0.0.1:{ops}")
    standby = serve("standby", first, *options)
    assert (status_of(ops, "/health"), status_of(ops, "/ready")) == (200, 503)
    with load(f"{standby.native},127.0.0.1:{second}", notes, "a"):
        wait(lambda: acked(notes) > 5)
        owner.process.kill()
        killed_ms = CLOCK.now_ms()
        wait(lambda: confirmed_since(notes, killed_ms))
        assert standby.ready()
        assert status_of(ops, "/ready") == status_of(ops, "/metrics") == 200
    assert standby.stop() == 0
    assert judge(place, notes) > 5


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_an_owner_that_was_paused_is_fenced(
    place: str, serve: Callable[..., Served], tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    ports = free_ports(2)
    owner = serve("owner", ports[0])
    standby = serve("standby", ports[1], "--standby", "--standby-after", AFTER)
    with load(owner.native, notes, "a"):
        threading.Event().wait(0.7)
        wait(lambda: acked(notes) > 5)
        owner.process.send_signal(signal.SIGSTOP)
        before = acked(notes)
        wait(standby.ready)
        with load(standby.native, notes, "b"):
            threading.Event().wait(0.5)
            # What had been asked of it goes on now, and must not be seen by anybody.
            owner.process.send_signal(signal.SIGCONT)
            assert owner.process.wait(PATIENCE_S) == 1
            assert status_of(owner.http, "/ready") is None
            assert "no more is served: another broker has opened" in owner.said()
            threading.Event().wait(0.3)
            wait(lambda: acked(notes) > before + 5)
            assert standby.ready()
    # It opens the store, and takes it over.
    assert judge(place, notes) > 5
    wait(lambda: standby.said().count("standing by for") == 2)
    assert status_of(standby.http, "/ready") == 503
    assert standby.stop() == 0


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_of_two_standbys_one_takes_over(serve: Callable[..., Served]) -> None:
    ports = free_ports(3)
    owner = serve("owner", ports[0])
    options = ("--standby", "--standby-after", AFTER)
    standbys = [serve(f"standby-{port}", port, *options) for port in ports[1:]]
    with penstock.connect(owner.native) as client:
        client.create_queue("q")
        sent = [client.send("q", b"to the first")]
    owner.process.kill()

    def statuses() -> list[int]:
        return sorted(status_of(each.http, "/ready") or 0 for each in standbys)

    # Both may have taken it, one after the other: the first of them stands by again then.
    wait(lambda: statuses() == [200, 503])
    threading.Event().wait(2)
    wait(lambda: statuses() == [200, 503])
    (second,) = [each for each in standbys if each.ready()]
    with penstock.connect(second.native) as client:
        sent.append(client.send("q", b"to the next"))
        assert [entry.message_id for entry in client.browse("q")] == sent
    assert [each.stop() for each in standbys] == [0, 0]


def silent(pulse: OwnerHeartbeat, after_ms: int, give_up_s: float) -> bool:
    async def wait_for_it() -> bool:
        told = Stop(asyncio.get_running_loop())
        asyncio.get_running_loop().call_later(give_up_s, told.begun.set)
        try:
            return bool(await until_free(pulse, after_ms, CLOCK, told))
        finally:
            told.close()

    return asyncio.run(wait_for_it())


def test_an_idle_owner_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "HEARTBEAT_MS", 300)
    url = f"slatedb+file://{tmp_path}/store"
    assert watch_owner(url).look() == 0
    with penstock.open(url) as broker:
        broker.create_queue("q")
        pulse = watch_owner(url)
        first = pulse.look()
        assert first > 0
        wait(lambda: pulse.look() > first + 2)
        assert not silent(pulse, 3_000, give_up_s=4)
        broker.send("q", b"it was not disturbed")
    assert silent(pulse, 900, give_up_s=PATIENCE_S)
    last = pulse.look()
    assert pulse.look_again() == last
    assert watch_owner(url).look() == last


def test_a_server_whose_store_is_taken_over_is_not_ready(tmp_path: Path) -> None:
    url = f"slatedb+file://{tmp_path}/store"
    with running(url, http="127.0.0.1:0") as server:
        port = server.addresses["http"][1]
        assert status_of(port, "/ready") == 200
        with penstock.open(url):
            wait(lambda: status_of(port, "/ready") == 503)
            assert status_of(port, "/health") == 200


def test_a_standby_is_for_object_storage(tmp_path: Path) -> None:
    flags = {"store": f"rocksdb:{tmp_path}/db", "standby": True}
    config = configuring.load(environment={}, flags=flags).config
    with pytest.raises(InvalidUrl, match="that is for stores on object storage"):
        process.serve(config, lambda _: None)
    with pytest.raises(InvalidInput, match="standby_after is at least 3000 ms"):
        configuring.load(environment={}, flags={"standby_after": "1s"})


@pytest.mark.slow
def test_a_standby_that_is_told_to_stop_ends_also_if_its_store_can_not_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = penstock.Broker.close

    def fail(broker: penstock.Broker) -> None:
        close(broker)
        raise StorageFailed("the last sync failed")

    monkeypatch.setattr(penstock.Broker, "close", fail)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line.partition(" ")[0])
        if said[-1] == "serving" or said.count("standing") > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    store = f"slatedb+file://{tmp_path}/store"
    flags = {"store": store, "standby": True, "standby_after": "3s", "listen_native": "127.0.0.1:0"}
    flags |= {"listen_http": "off", "listen_flight": "off"}
    config = configuring.load(environment={}, flags=flags).config
    with pytest.raises(StorageFailed, match="the last sync failed"):
        process.serve(config, say)
    assert said == ["standing", "serving", "stopping:"]


def test_silence_is_the_time_of_looks_that_found_nothing_new() -> None:
    silence = Silence(most_step_ms=200)
    assert silence.look(5, 1_000) == 0
    assert silence.look(5, 1_100) == 100
    assert silence.look(5, 1_250) == 250
    assert silence.look(6, 1_300) == 0
    assert silence.look(6, 1_400) == 100
    # A store that does not answer says nothing.
    assert silence.look(None, 1_500) == 0
    assert silence.look(6, 1_600) == 100
    # Nor does the time in which nobody looked.
    assert silence.look(6, 9_000) == 300
