"""What is confirmed is seen soon by other processes, and nobody is busy with what he can't do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import penstock
from penstock import ManualClock, Message
from penstock.model import LeaseRequest
from penstock.store.sql.store import SqlStore
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    import pytest
    from tests.sql.postgres import PostgresServer

    from penstock import Broker

STEP_MS = 50
# A look at an emptied zone, a publisher's trust, and a step.
SOON_MS = 300 + 100 + STEP_MS


def store_of(broker: Broker) -> SqlStore:
    store = broker._store
    assert isinstance(store, SqlStore)
    return store


def a_want(clock: ManualClock) -> LeaseRequest:
    return LeaseRequest(1, 60_000, "", clock.lease_id())


def test_a_steady_publisher_is_seen_by_others(url: str) -> None:
    clock = ManualClock()
    sent: dict[int, int] = {}
    late: list[int] = []
    with (
        penstock.open(url, clock=clock, background=False) as publisher,
        penstock.open(url, clock=clock, background=False) as worker,
    ):
        publisher.create_queue("q", lease_ms=60_000)
        for _ in range(60):
            (message_id,) = publisher.publish([Message(b"", {"queue": "q"})])
            sent[message_id] = clock.now_ms()
            late += [
                clock.now_ms() - sent.pop(each.message_id) for each in worker.claim("q", limit=10)
            ]
            clock.advance(STEP_MS)
        clock.advance(SOON_MS)
        late += [
            clock.now_ms() - sent.pop(each.message_id) for each in worker.claim("q", limit=100)
        ]
        assert not sent
        assert max(late[:-20]) <= SOON_MS
        assert_clean(worker)


def test_what_another_process_is_at_is_not_asked_for_all_the_time(
    url: str, postgres: PostgresServer
) -> None:
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q")
        broker.send("q", b"x")
        broker.claim("q", lease_ms=1)
        store = store_of(broker)
        with postgres.connect(url.rpartition("/")[2]) as other, other.transaction():
            other.execute("SELECT * FROM penstock.items FOR UPDATE")
            store._background = True
            now_ms = store.server_ms() + 1_000
            counts = store.sweep(now_ms, 100)
            assert counts.total == 0
            assert counts.next_due_ms is not None
            assert counts.next_due_ms > now_ms
            store._background = False


def test_pauses_do_not_add_up(url: str, postgres: PostgresServer) -> None:
    pauses: list[float] = []
    with penstock.open(url, background=False) as broker:
        broker.create_queue("q", ordering="fifo")
        broker.publish([Message(b"", {"queue": "q"}, group="g")])
        store = store_of(broker)
        store._pause = pauses.append
        now_ms = store.server_ms() + 1_000
        wants = [a_want(ManualClock(now_ms, seed=n)) for n in range(20)]
        with postgres.connect(url.rpartition("/")[2]) as other, other.transaction():
            other.execute("SELECT * FROM penstock.pointers FOR UPDATE")
            assert not any(store.claim("q", wants, now_ms))
        assert len(pauses) <= 3
        assert sum(map(len, store.claim("q", wants, now_ms))) == 1


def test_an_empty_claim_does_not_ask_after_others_dead_letters(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with penstock.open(url, background=False, clock=ManualClock()) as broker:
        for name in ("dead", "other", "q"):
            broker.create_queue(name)
        for n in range(5):
            broker.create_queue(f"a{n}", dead_letter="other", max_attempts=1)
        broker.create_queue("b", dead_letter="dead", max_attempts=1)
        store = store_of(broker)
        asked: list[list[int]] = []
        run = store.database.run

        def noting(name: str, /, **parameters: object) -> object:
            if name == "pending_dead_letters":
                asked.append(parameters["queues"])  # type: ignore[arg-type]
            return run(name, **parameters)

        monkeypatch.setattr(store.database, "run", noting)
        assert broker.claim("q") == []
        assert asked == []
        broker.send("b", b"x")
        broker.release([broker.claim("b")[0].receipt])
        assert [each.payload for each in broker.claim("dead")] == [b"x"]
        assert asked[-1] == [store.queue("b").number]
