"""A store in a bucket: the life of messages, bad input, trouble on the way, readers beside it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import pytest
from tests.copying.places import fill, show
from tests.objectstore.test_owners import wait
from tests.waiting import wait_until

import penstock
from penstock import InvalidUrl, Message, StorageFailed, StoreDamaged, StoreMismatch, SystemClock
from penstock.copying import copy
from penstock.engines import Shape
from penstock.engines import slatedb as engine_module
from penstock.engines.slatedb import SlateEngine
from penstock.engines.slatedb.binding import SlateLocation
from penstock.engines.slatedb.objects import check_objects
from penstock.readers import open_reader, place_to_read
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from pathlib import Path

    from tests.objectstore.conftest import Proxy, SeaweedFS

    from penstock import Broker

pytestmark = pytest.mark.slow

CLOCK = SystemClock()
COLLECTED = ("wal", "manifest", "compacted", "compactions")


class Confirmed(NamedTuple):
    message_id: int
    began_ms: int
    at_ms: int


def bodies(broker: Broker, queue: str = "q") -> list[bytes]:
    return sorted(entry.payload or b"" for entry in broker.browse(queue, limit=1_000))


def test_a_store_is_copied_to_a_bucket_and_from_there_beside_its_owner(
    url: str, tmp_path: Path
) -> None:
    with penstock.open(f"rocksdb:{tmp_path}/source", background=False) as broker:
        fill(broker)
    report = copy(f"rocksdb:{tmp_path}/source", url)
    with penstock.open(url, background=False, create=False) as broker:
        assert_clean(broker)
        copy(url, f"rocksdb:{tmp_path}/back")
        shown = show(broker)
    with penstock.open(f"rocksdb:{tmp_path}/back", background=False) as broker:
        assert show(broker) == shown
    with penstock.open(f"rocksdb:{tmp_path}/source", background=False) as broker:
        assert shown == show(broker, copied_at_ms=report.at_ms)


# --- life -----------------------------------------------------------------------------------------


def test_stores_of_one_bucket_share_nothing(url: str) -> None:
    with penstock.open(f"{url}/a") as one, penstock.open(f"{url}/b") as other:
        for broker, body in ((one, b"a"), (other, b"b")):
            broker.create_queue("q")
            broker.publish([Message(body, {"queue": "q"}, dedup_id="same")])
        # Opening a store fences its own owner alone.
        with penstock.open(f"{url}/a") as heir:
            assert bodies(heir) == [b"a"]
            assert [each.payload for each in other.claim("q")] == [b"b"]
            with pytest.raises(penstock.StoreFenced):
                one.claim("q")


def test_messages_live_and_are_there_after_a_restart(url: str) -> None:
    with penstock.open(url) as broker:
        broker.create_queue("q")
        ids = broker.publish([Message(b"%d" % n, {"queue": "q"}) for n in range(50)])
        taken = broker.claim("q", limit=20)
        assert all(broker.ack([each.receipt for each in taken[:10]]))
        held = taken[10:]
    with penstock.open(url) as broker:
        assert all(broker.ack([each.receipt for each in held]))
        rest = broker.claim("q", limit=100)
        assert sorted(each.message_id for each in rest) == ids[20:]
        assert [each.payload for each in rest] == [b"%d" % n for n in range(20, 50)]
        assert broker.stats("q").done == 20
        assert_clean(broker)


def test_two_prefixes_of_a_bucket_are_two_stores(bucket: str) -> None:
    with (
        penstock.open(f"slatedb+s3://{bucket}/one") as one,
        penstock.open(f"slatedb+s3://{bucket}/two") as two,
        penstock.open(f"slatedb+s3://{bucket}/one/below") as root,
    ):
        for name, broker in (("one", one), ("two", two), ("root", root)):
            broker.create_queue("q")
            broker.send("q", name.encode())
        assert [bodies(broker) for broker in (one, two, root)] == [[b"one"], [b"two"], [b"root"]]


def test_verbs_that_wait_together_share_a_write_of_the_log(bucket: str) -> None:
    engine = SlateEngine(SlateLocation("s3", bucket, "engine"), {"t": Shape.SYSTEM}, flush_ms=50)
    before = engine.requests()
    for number in range(200):
        batch = engine.batch()
        batch.put(b"%d" % number, b"v", engine.table("t").family)
        engine.commit(batch)
    engine.sync()
    after = engine.requests()
    puts = sum(after[name] - before.get(name, 0) for name in after if name.startswith("put"))
    # Signs of life and the library's own upkeep are among them, if it takes long.
    assert 1 <= puts <= 20, after
    engine.close()


# --- bad input ------------------------------------------------------------------------------------


def test_a_missing_bucket_is_said_to_be_missing(bucket: str) -> None:
    with pytest.raises(InvalidUrl, match="there is no bucket nowhere-at-all"):
        penstock.open("slatedb+s3://nowhere-at-all/x")


@pytest.mark.parametrize(
    ("variable", "reason"),
    [("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"), ("AWS_ACCESS_KEY_ID", "InvalidAccessKey")],
)
def test_wrong_credentials_are_said_to_be_wrong(
    url: str, variable: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "wrong")
    with pytest.raises(StorageFailed, match=f"refuses these credentials.*{reason}"):
        penstock.open(url)
    with pytest.raises(StorageFailed, match="refuses these credentials"):
        open_reader(url)


def test_plain_http_has_to_be_allowed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(InvalidUrl, match="AWS_ALLOW_HTTP=true"):
        penstock.open(url)


def test_an_endpoint_where_nobody_is(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StorageFailed, match="does not answer"):
        penstock.open(url)


def test_reading_where_there_is_no_store(url: str) -> None:
    with pytest.raises(StoreMismatch, match="holds no store"):
        open_reader(url)


# --- trouble --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 503])
def test_what_fails_for_a_while_is_tried_again(url: str, proxy: Proxy, status: int) -> None:
    with penstock.open(url) as broker:
        broker.create_queue("q")
        proxy.status = status

        def mend() -> None:
            wait(lambda: proxy.failed)
            threading.Event().wait(1.0)
            proxy.status = None

        mended = threading.Thread(target=mend)
        mended.start()
        ids = broker.publish([Message(b"through", {"queue": "q"})])
        assert not proxy.broken(), "confirmed before the store had taken it"
        mended.join()
    with penstock.open(url) as broker:
        assert [entry.message_id for entry in broker.browse("q")] == ids


def test_a_slow_store_is_waited_for(url: str, proxy: Proxy) -> None:
    with penstock.open(url) as broker:
        broker.create_queue("q")
        proxy.delay_s = 0.4
        proxy.puts_go_on.clear()
        puts = proxy.log_puts()
        threads = [threading.Thread(target=broker.send, args=("q", b"%d" % n)) for n in range(20)]
        for thread in threads:
            thread.start()
        wait(lambda: broker.stats("q").available == 20)
        waiting = [thread.is_alive() for thread in threads]
        proxy.puts_go_on.set()
        assert all(waiting), "confirmed before it was written"
        for thread in threads:
            thread.join()
        # The first goes alone, and the others share what comes after it.
        assert 1 <= proxy.log_puts() - puts <= 5
        proxy.delay_s = 0
        assert len(bodies(broker)) == 20


def test_what_can_not_be_written_is_not_confirmed(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = penstock.open(url)
    broker.create_queue("q")
    broker.send("q", b"before")
    monkeypatch.setattr(engine_module, "SILENCE_S", 1.5)
    proxy.status = 503
    with pytest.raises(StorageFailed, match=r"no answer for 1\.5 s"):
        broker.send("q", b"lost?")
    # What the store has is not known any more: nothing goes on as if it were.
    with pytest.raises(StorageFailed):
        broker.claim("q")
    with pytest.raises(StorageFailed):
        broker.send("q", b"after")
    with pytest.raises(StorageFailed, match="may not be durable"):
        broker.close()
    proxy.status = None
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")


def test_the_server_is_killed_and_comes_back(url: str, seaweed: SeaweedFS) -> None:
    with penstock.open(url) as broker:
        broker.create_queue("q")
        confirmed: list[Confirmed] = []
        stop = threading.Event()

        def publish(name: int) -> None:
            number = 0
            while not stop.is_set():
                began_ms = CLOCK.now_ms()
                (message_id,) = broker.publish([Message(b"%d-%d" % (name, number), {"queue": "q"})])
                confirmed.append(Confirmed(message_id, began_ms, CLOCK.now_ms()))
                number += 1

        threads = [threading.Thread(target=publish, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        stop.wait(0.5)
        wait(lambda: confirmed)
        seaweed.kill()
        killed_ms = CLOCK.now_ms()
        stop.wait(1.0)
        started_ms = CLOCK.now_ms()
        seaweed.start()
        wait(lambda: any(each.began_ms > killed_ms for each in list(confirmed)))
        stop.set()
        for thread in threads:
            thread.join()
        # What had been begun before may have been written, and be confirmed late.
        early = [each for each in confirmed if killed_ms < each.began_ms <= each.at_ms < started_ms]
        assert not early, "confirmed while there was no store"
    with penstock.open(url) as broker:
        found = [entry.message_id for entry in broker.browse("q", limit=10_000, payloads=False)]
        assert {each.message_id for each in confirmed} <= set(found)
        assert_clean(broker)


# --- readers --------------------------------------------------------------------------------------


def test_a_reader_shows_one_moment_and_disturbs_nobody(url: str) -> None:
    with penstock.open(url) as broker:
        broker.create_queue("q")
        broker.publish([Message(b"%d" % n, {"queue": "q"}) for n in range(30)])
        taken = broker.claim("q", limit=5)
        broker.ack([each.receipt for each in taken[:2]])
        with open_reader(url) as reader:
            seen = reader.stats("q")
            assert (seen.available, seen.in_flight, seen.done) == (25, 3, 2)
            broker.send("q", b"later")
            broker.ack([each.receipt for each in taken[2:]])
            assert reader.stats("q").available == 25
            entries = reader.browse("q", limit=100)
            assert [entry.payload for entry in entries] == [b"%d" % n for n in range(5, 30)]
            ended = reader.browse("q", state="done")
            assert [entry.message_id for entry in ended] == [each.message_id for each in taken[:2]]
            with reader.pin(stats=True) as pinned:
                rows = [row for rows in pinned.log_rows(0, 0, 1_000) for row in rows]
                assert len(rows) == 30
                assert len(list(pinned.payload_rows(0, 1_000))) == 30
        assert broker.stats("q").done == 5
        with open_reader(url) as reader:
            assert reader.stats("q").available == 26


# --- objects that are not needed any more ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_objects_that_nobody_needs_go_again_and_again(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(engine_module, "_COLLECT_EVERY", "500ms")
    monkeypatch.setattr(engine_module, "_COLLECT_AFTER", dict.fromkeys(COLLECTED, "1s"))
    monkeypatch.setattr(engine_module, "_LONG_LOG", 5)
    store = tmp_path / "store"
    url = f"slatedb+file://{store}" if kind == "file" else request.getfixturevalue("url")

    def names(part: str) -> list[str]:
        if kind == "file":
            return sorted(each.name for each in (store / part).iterdir())
        bucket, _, prefix = url.removeprefix("slatedb+s3://").partition("/")
        seaweed: SeaweedFS = request.getfixturevalue("seaweed")
        return seaweed.names(bucket, f"{prefix}/{part}/")

    with penstock.open(url) as broker:
        broker.create_queue("q")
        for part in ("manifest", "wal"):
            for _ in range(2):
                newest = names(part)[-1]
                wait_until(
                    lambda: broker.send("q", b"x") and newest not in names(part),  # noqa: B023
                    why=f"{newest} goes",
                )


# --- objects that are missing ---------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["manifest", "wal"])
def test_a_store_with_objects_missing_is_refused(
    url: str, seaweed: SeaweedFS, missing: str
) -> None:
    with penstock.open(url) as broker:
        broker.create_queue("q")
        for _ in range(5):
            broker.send("q", b"x")
    bucket, _, prefix = url.removeprefix("slatedb+s3://").partition("/")
    found = seaweed.names(bucket, f"{prefix}/{missing}/")
    # All manifests; of the log, one before the last.
    for name in found if missing == "manifest" else found[2:3]:
        seaweed.delete(bucket, name)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=f"{missing}.*salvage"):
            penstock.open(url)
    with pytest.raises(StoreDamaged, match=missing):
        open_reader(url)
    assert seaweed.names(bucket, f"{prefix}/{missing}/") == [
        each for each in found if each not in (found if missing == "manifest" else found[2:3])
    ]


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_store_that_is_being_written_to_is_not_taken_for_damaged(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    url = f"slatedb+file://{tmp_path}/store"
    if kind == "s3":
        url = request.getfixturevalue("url")
    stopped = threading.Event()

    def publish(broker: Broker) -> None:
        while not stopped.is_set():
            broker.send("q", b"x")

    with penstock.open(f"{url}?flush_ms=0") as broker:
        broker.create_queue("q")
        owner = threading.Thread(target=publish, args=(broker,))
        owner.start()
        try:
            checks = 0
            while checks < 10 or broker.stats("q").available <= 10:
                check_objects(place_to_read(url))
                checks += 1
        finally:
            stopped.set()
            owner.join()
