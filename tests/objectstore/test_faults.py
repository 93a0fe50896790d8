"""An object store that is slow, fails, or loses its answers, under load: nothing is made up."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.crash.child import Notebook, publisher, worker
from tests.objectstore.test_owners import QUEUES, judge, notes_of

import penstock
from penstock import BrokerClosed, PenstockError, StorageFailed, SystemClock
from penstock.kv import slatedb as engine_module
from penstock.testing.auditor import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.objectstore.conftest import Proxy

CLOCK = SystemClock()

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("seaweed")]


@contextmanager
def load(url: str, notes: Path) -> Iterator[list[PenstockError]]:
    """Have threads publish, claim and settle until an error ends each; give the errors."""
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
        yield errors
    finally:
        broker.close()
        for thread in threads:
            thread.join()


def confirmed(notes: Path) -> int:
    kinds = {Kind.PUBLISHED, Kind.ACKED, Kind.RELEASED, Kind.FAILED, Kind.DELIVERED}
    files = [notes.with_name(f"{notes.name}.{queue}") for queue in QUEUES]
    return sum(note.kind in kinds for each in files for note in notes_of(each))


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_slow_and_failing_for_a_while(url: str, proxy: Proxy, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with load(url, notes) as errors:
        pause(0.5)
        proxy.delay_s = 0.2
        pause(0.6)
        proxy.delay_s = 0
        # The last: what is asked for is done, and the answer says that it has failed.
        for status, only, done in ((503, None, False), (500, "PUT", False), (500, "PUT", True)):
            proxy.only, proxy.status, proxy.done = only, status, done
            # What was under way when it began has been answered by now.
            pause(0.3)
            before = confirmed(notes)
            pause(0.4)
            assert confirmed(notes) == before, "confirmed while nothing could be written"
            proxy.status = None
            until = CLOCK.seconds() + 20
            while confirmed(notes) == before:
                assert CLOCK.seconds() < until, "it does not go on"
                pause(0.1)
        assert not errors, errors[0]
    assert proxy.failed >= 3
    assert judge(url, notes) > 10


def test_failing_for_too_long(
    url: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    with load(url, notes) as errors:
        pause(0.4)
        monkeypatch.setattr(engine_module, "SILENCE_S", 1.0)
        proxy.only, proxy.status = "PUT", 503
        pause(0.3)
        before = confirmed(notes)
        until = CLOCK.seconds() + 20
        while len(errors) < 6:
            assert CLOCK.seconds() < until, "verbs go on waiting"
            pause(0.1)
        assert all(isinstance(each, StorageFailed) for each in errors)
        assert confirmed(notes) == before
        # Whatever had been begun may get there now; it was not confirmed, and is not in the way.
        proxy.status = None
    assert judge(url, notes) > 0


def test_an_owner_with_nothing_to_do_outlives_a_store_that_is_away(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "HEARTBEAT_MS", 200)
    with penstock.open(url) as broker:
        broker.create_queue("q")
        monkeypatch.setattr(engine_module, "SILENCE_S", 0.3)
        proxy.only, proxy.status = "PUT", 503
        pause(1.2)
        # It has tried to give a sign of life, and has given up on that alone.
        assert proxy.failed > 0
        proxy.status = None
        monkeypatch.setattr(engine_module, "SILENCE_S", 10.0)
        number = broker.send("q", b"still here")
    with penstock.open(url) as broker:
        assert [entry.message_id for entry in broker.browse("q")] == [number]
