"""An object store that is slow, fails, or loses its answers, under load: nothing is made up."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.crash.child import publisher, worker
from tests.noting import Notebook, notes_of
from tests.objectstore.test_owners import QUEUES, acked, judge, wait

import penstock
from penstock import BrokerClosed, PenstockError, StorageFailed, SystemClock
from penstock.engines import slatedb as engine_module
from penstock.testing.auditor import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.objectstore.conftest import Proxy

    from penstock import Broker
    from penstock.testing.auditor import Note

CLOCK = SystemClock()

pytestmark = pytest.mark.slow


@contextmanager
def load(url: str, notes: Path) -> Iterator[tuple[Broker, list[PenstockError]]]:
    """Have threads publish, claim and settle until an error ends each; give broker and errors."""
    broker = penstock.open(url)
    errors: list[PenstockError] = []

    def run(task: Callable[..., None], *arguments: object) -> None:
        try:
            task(broker, *arguments)
        except BrokerClosed:
            pass
        except PenstockError as error:
            errors.append(error)

    threads = []
    for queue in QUEUES:
        broker.create_queue(queue, ordering="fifo" if queue == "fifo" else "standard",
                            max_attempts=1000, bucket_exponent=1)  # fmt: skip
        book = Notebook(str(notes), queue)
        threads += [
            threading.Thread(target=run, args=(publisher, book, queue, f"{queue}-{number}"))
            for number in range(2)
        ]
        threads += [threading.Thread(target=run, args=(worker, book, queue))]
    for thread in threads:
        thread.start()
    try:
        yield broker, errors
    finally:
        broker.close()
        for thread in threads:
            thread.join()


def confirmed(notes: Path, begun_ms: int, before_ms: int = 1 << 62) -> list[Note]:
    """List what was confirmed of what began after a moment, up to another moment.

    While the store is out of order, what began before that may still be confirmed, whenever its
    thread gets round to it: it may have been written just before. What began later can't.
    """
    kinds = {Kind.PUBLISHED, Kind.ACKED, Kind.RELEASED, Kind.FAILED, Kind.DELIVERED}
    files = [notes.with_name(f"{notes.name}.{queue}") for queue in QUEUES]
    return [
        note
        for each in files
        for note in notes_of(each)
        if note.kind in kinds and begun_ms < note.began_at_ms <= note.at_ms < before_ms
    ]


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_slow_and_failing_for_a_while(url: str, proxy: Proxy, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with load(url, notes) as (_, errors):
        pause(0.5)
        proxy.delay_s = 0.2
        pause(0.6)
        proxy.delay_s = 0
        # The last: what is asked for is done, and the answer says that it has failed.
        for status, only, done in ((503, None, False), (500, "PUT", False), (500, "PUT", True)):
            failed = proxy.failed
            proxy.only, proxy.done, proxy.status = only, done, status
            begun_ms = CLOCK.now_ms()
            wait(lambda: proxy.failed > failed)  # noqa: B023 - called within the turn
            pause(0.7)
            before_ms = CLOCK.now_ms()
            proxy.status = None
            early = confirmed(notes, begun_ms, before_ms)
            assert not early, f"confirmed while nothing could be written: {early[0]}"
            wait(lambda: confirmed(notes, before_ms))  # noqa: B023
        wait(lambda: acked(notes) > 10)
        assert not errors, errors[0]
    assert judge(url, notes) > 10


# That it fails, that it is full, and that it has been closed for writing.
@pytest.mark.parametrize("status", [503, 507, 403])
def test_failing_for_too_long(
    url: str,
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: int,
) -> None:
    notes = tmp_path / "notes"
    with load(url, notes) as (broker, errors):
        pause(0.4)
        wait(lambda: acked(notes))
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "SILENCE_S", 1.0)
            patch.setattr(engine_module, "_AWAY_S", 0.2)
            # A sync that has begun waits for as long as it was told to then.
            pause(0.3)
            proxy.only, proxy.status = "PUT", status
            begun_ms = CLOCK.now_ms()
            # It is known before anybody is told that his change may or may not have been made.
            wait(lambda: broker._store.health().away)
            assert "has taken no write for" in (broker._store.health().away or "")
            # A worker that finds nothing to claim is not told.
            wait(lambda: len(errors) >= 4)
            assert all(isinstance(each, StorageFailed) for each in errors)
            assert not confirmed(notes, begun_ms)
            depth = broker.stats("standard").available
            assert len(broker.browse("standard", limit=10_000)) == depth
            with pytest.raises(StorageFailed, match="takes no writes, and tries again"):
                broker.create_queue("another")
            # What had been begun may get there now; it was not confirmed, and is not in the way.
            proxy.status = None
            wait(lambda: broker._store.health().away is None)
        broker.create_queue("another")
        assert broker.check().ok
        wait(lambda: "the store can be used again, after" in caplog.text)
        told = [each for each in caplog.records if each.name == "penstock.broker.runner"]
        assert len(told) == 2, told
    assert judge(url, notes) > 0


def test_an_owner_with_nothing_to_do_outlives_a_store_that_is_away(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "HEARTBEAT_MS", 200)
    with penstock.open(url) as broker:
        broker.create_queue("q")
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "SILENCE_S", 0.3)
            patch.setattr(engine_module, "_AWAY_S", 0.3)
            proxy.only, proxy.status = "PUT", 503
            # It tries to give a sign of life, and gives up on that alone.
            wait(lambda: proxy.failed)
            pause(1.0)
            proxy.status = None
        number = broker.send("q", b"still here")
    with penstock.open(url) as broker:
        assert [entry.message_id for entry in broker.browse("q")] == [number]
