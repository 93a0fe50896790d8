"""One key takes as much as it can get of what all share, and another goes on: every such bound."""

from __future__ import annotations

import asyncio
import socket
import threading
from asyncio import CancelledError
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.waiting import wait_until

import penstock
from penstock import InvalidInput, ManualClock, Message, ServerBusy, limits
from penstock.flight import tables
from penstock.flight.client import FlightStore
from penstock.flight.snapshots import Snapshot, Snapshots, TableParts, partition
from penstock.server import running
from penstock.server.batcher import Batcher
from penstock.server.connections import Connections, Slot
from penstock.server.console.visits import Sessions
from penstock.server.keys import Keys
from penstock.server.metrics import Refusals
from penstock.server.shares import Shares, Turns, holder_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def broker() -> Iterator[penstock.Broker]:
    with penstock.open("memory:") as opened:
        for name in ("orders", "mail"):
            opened.create_queue(name)
        yield opened


@pytest.fixture
def start(
    broker: penstock.Broker, keys: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Serve with keys; what is refused is not tried again."""
    assert keys
    monkeypatch.setattr(limits, "MAX_UNREACHABLE_MS", 0)
    return lambda **settings: running(broker, keys=tmp_path / "keys.toml", **settings)


def grab(act: Callable[[], Any], match: str, most: int = 200) -> int:
    """Act until it is refused; return how often it was let in."""
    done = 0

    def act_on() -> None:
        nonlocal done
        for _ in range(most):
            act()
            done += 1

    with pytest.raises(ServerBusy, match=match):
        act_on()
    return done


# --- shares and turns -----------------------------------------------------------------------------


def test_each_has_half_of_what_the_others_leave() -> None:
    shares = Shares("places", 64)
    taken = {}
    for holder in "abcdefgh":
        taken[holder] = grab(partial(shares.take, holder), f"{holder} has")
    assert list(taken.values()) == [32, 16, 8, 4, 2, 1, 1, 0]
    with pytest.raises(ServerBusy, match="h has 0 of the server's 64 places, of which 0 are free"):
        shares.take("h")
    # As one leaves, the next comes in; and those that have much get no more.
    shares.give("a", 8)
    shares.take("h", 4)
    with pytest.raises(ServerBusy, match=r"b has 16 of .* 4 are free"):
        shares.take("b")
    for holder in taken:
        shares.give(holder, shares.held(holder))
    assert shares.total == 0
    assert Shares("places", 1).fits("a")


def test_one_that_does_not_fit_may_wait() -> None:
    clock = ManualClock()
    shares = Shares("places", 2, clock)
    shares.take("a")
    with pytest.raises(ServerBusy):
        shares.take("a")
    got = threading.Event()

    def take() -> None:
        shares.take("a", wait_ms=1_000)
        got.set()

    thread = threading.Thread(target=take)
    thread.start()
    shares.give("a")
    assert got.wait(60)
    thread.join()


def test_of_what_is_remembered_the_holders_own_makes_way() -> None:
    shares = Shares("sessions", 4)
    for holder in "aab":
        shares.take(holder)
    assert [shares.who_makes_way(each) for each in "abc"] == ["a", "b", None]
    shares.take("c")
    assert [shares.who_makes_way(each) for each in "abcd"] == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("address", "holder"),
    [
        ("1.2.3.4:5", "1.2.3.4"),
        ("[2001:db8:0:1::2]:3", "[2001:db8:0:1::/64]"),
        ("[2001:db8:0:1:ffff::2]:4", "[2001:db8:0:1::/64]"),
        ("[fe80::1%eth0]:3", "[fe80::/64]"),
        ("ipv6:[2001:db8:0:1::2]:3", "ipv6:[2001:db8:0:1::/64]"),
        ("[::ffff:1.2.3.4]:5", "[::ffff:1.2.3.4]"),
        ("[::1]:5", "[::1]"),
        ("", ""),
    ],
)
def test_a_network_of_ipv6_is_one_holder(address: str, holder: str) -> None:
    assert holder_of("", address) == f"the client at {holder}"


def test_jobs_of_several_holders_take_turns() -> None:
    turns = Turns(4, "test")
    begun: list[str] = []
    go = threading.Semaphore(0)

    def work(name: str) -> None:
        begun.append(name)
        assert go.acquire(timeout=60)

    jobs = [turns.submit("hog", lambda: work("hog")) for _ in range(100)]
    # It has half of the threads, however many jobs it has.
    wait_until(lambda: len(begun) == 2)
    others = [turns.submit("other", lambda: work("other")) for _ in range(3)]
    wait_until(lambda: len(begun) == 3)
    assert jobs[-1].cancel()
    for _ in range(101):
        go.release()
    others[-1].result(60)
    # One in turn, on half of the threads each at the most.
    assert begun[:3] == ["hog", "hog", "other"]
    assert begun.index("other", begun.index("other", 3) + 1) <= 10
    go.release()
    turns.shutdown()
    assert (len(begun), jobs[0].result(), jobs[-1].cancelled()) == (102, None, True)


def test_a_free_thread_does_a_job_that_may_begin() -> None:
    turns = Turns(4, "test")
    begun: list[str] = []
    ends = {name: threading.Event() for name in ("a1", "b1", "c1", "a2", "b2")}

    def work(name: str) -> None:
        begun.append(name)
        assert ends[name].wait(60)

    for count, name in enumerate(("a1", "b1", "c1"), 1):
        turns.submit(name[0], partial(work, name))
        wait_until(lambda count=count: len(begun) == count)  # type: ignore[misc]
    # One thread is left, for somebody else.
    jobs = [turns.submit(name[0], partial(work, name)) for name in ("b2", "a2")]
    ends["a1"].set()
    # Now two are, of which each gets one.
    wait_until(lambda: {*begun[3:]} == {"a2", "b2"})
    for end in ends.values():
        end.set()
    turns.shutdown()
    assert all(job.done() for job in jobs)


# --- Flight ---------------------------------------------------------------------------------------


@pytest.fixture
def stores(start: Callable[..., Any], keys: dict[str, str]) -> Iterator[dict[str, FlightStore]]:
    with start(flight="127.0.0.1:0") as server:
        url = server.location("flight")
        yield {name: FlightStore(url, token=token) for name, token in keys.items()}


def test_snapshots(broker: penstock.Broker, stores: dict[str, FlightStore]) -> None:
    half = broker.max_views // 2
    greedy, other = stores["viewer"], stores["root"]
    assert grab(lambda: greedy.plan_read("active"), "key 'viewer' has 32") == half
    # Others have room, and what they have and want is not taken from them.
    tickets = other.plan_read("active").tickets
    with pytest.raises(ServerBusy):
        greedy.plan_read("active")
    assert list(other.read(tickets[0])) == []


def test_spools(stores: dict[str, FlightStore]) -> None:
    row = pa.record_batch({"payload": [b"p"], "queue": ["orders"]})
    numbers = iter(range(1_000))

    def spool(name: str) -> None:
        stores[name].spool(f"{name}-{next(numbers)}", "part", [row])

    assert grab(lambda: spool("sender"), "key 'sender' has 32 of the server's 64 spools") == 32
    spool("root")


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Snapshots, ManualClock, Any]]:
    """Snapshots of four places, of a store with three batches of payloads, and a reader of one."""
    monkeypatch.setattr(limits, "MAX_UNREAD_BYTES", 16 * tables.BATCH_BYTES)
    clock = ManualClock()
    selection = tables.select("messages", payload=True, columns=None, filter_text=None, where=None)
    with penstock.open("memory:") as broker:
        broker.publish(Message(b"x" * 3_000_000) for _ in range(5))
        snapshots = Snapshots(clock, 4)

        def begin(holder: str) -> Iterator[pa.RecordBatch]:
            pinned = broker.view()
            parts = TableParts(partition(pinned, "messages", 1), selection)
            made = snapshots.add(lambda: Snapshot(pinned, holder, {b"": parts}), holder)
            reading = snapshots.read(
                made.name, lambda pinned: tables.read(pinned, parts.parts[0], selection), parts
            )
            next(reading)
            clock.advance(1)
            return reading

        yield snapshots, clock, begin
        snapshots.close()


def test_reads_that_have_stalled(snapshots: tuple[Snapshots, ManualClock, Any]) -> None:
    known, clock, begin = snapshots
    stalled = [begin("hog") for _ in range(2)]
    with pytest.raises(ServerBusy, match="hog has 2 of the server's 4 snapshots"):
        begin("hog")
    honest = begin("other")
    clock.advance(limits.MAX_READ_STALL_MS)
    # The hog's own read makes way for it, not that of the other, though that is as slow.
    stalled.append(begin("hog"))
    assert len(known) == 3
    with pytest.raises(InvalidInput, match="closed while it was being read"):
        list(stalled[0])
    assert len(list(honest)) == 2
    assert len(list(stalled[1])) == 2
    clock.advance(limits.MAX_VIEW_IDLE_MS)
    known.expire()
    assert len(known) == 0
    with pytest.raises(InvalidInput, match="closed while it was being read"):
        list(stalled[2])


def test_batches_that_are_not_read(snapshots: tuple[Snapshots, ManualClock, Any]) -> None:
    known, _, begin = snapshots
    known._unread.take("hog", 8 * tables.BATCH_BYTES)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(limits, "MAX_UNREAD_WAIT_MS", 0)
        with pytest.raises(ServerBusy, match="hog has 33554432 of the server's 67108864 bytes"):
            begin("hog")
    assert len(list(begin("other"))) == 2
    # Those that are read give their place to others, as do those whose client goes.
    known._unread.give("hog", tables.BATCH_BYTES)
    reading = begin("hog")
    assert known._unread.held("hog") == 8 * tables.BATCH_BYTES
    reading.close()
    assert known._unread.held("hog") == 7 * tables.BATCH_BYTES


def test_dataframes_that_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_REMEMBERED_FRAMES", 4)
    with penstock.open("memory:") as broker:
        known = Snapshots(ManualClock(), 64)

        def act(owner: str, frame: str) -> Snapshot:
            return known.of_action(
                owner,
                frame,
                "1",
                0,
                lambda: known.add(lambda: Snapshot(broker.view(), owner), owner),
                sure=True,
            )

        first = act("honest", "frame")
        for number in range(20):
            act("hog", f"frame-{number}")
        # The same action has the snapshot that it had.
        assert act("honest", "frame") is first
        known.close()


# --- the other listeners --------------------------------------------------------------------------


def test_claims_that_wait(
    start: Callable[..., Any], keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_ALL_WAITING_CLAIMS", 8)

    async def story(url: str) -> None:
        async with (
            penstock.connect_async(url, token=keys["worker"]) as hog,
            penstock.connect_async(url, token=keys["viewer"]) as other,
        ):
            claims = [asyncio.ensure_future(hog.claim("orders", wait_ms=60_000)) for _ in range(9)]
            refused, _ = await asyncio.wait(claims, return_when=asyncio.FIRST_EXCEPTION)
            text = str(next(iter(refused)).exception())
            assert "key 'worker' has 4 of the server's 8 waiting claims" in text
            assert await other.claim("mail", wait_ms=1) == []
            for each in claims:
                each.cancel()
            outcomes = await asyncio.gather(*claims, return_exceptions=True)
            assert all(isinstance(each, ServerBusy | CancelledError) for each in outcomes)

    with start(native="127.0.0.1:0") as server:
        asyncio.run(story(server.location("native")))


def test_looks_of_a_key_hold_up_nobody(broker: penstock.Broker) -> None:
    looks = 0
    go = threading.Event()

    def look(_: penstock.Broker) -> None:
        nonlocal looks
        assert go.wait(60)
        looks += 1

    async def story() -> int:
        batcher = Batcher(broker, asyncio.get_running_loop())
        hogs = [batcher.call(look, holder="hog") for _ in range(500)]
        # Though all of the hog's came before it, and none of those under way ends meanwhile.
        stats = await batcher.call(lambda each: each.stats("orders"), holder="other")
        assert stats.available == 0
        before = looks
        go.set()
        await asyncio.gather(*hogs)
        await batcher.close()
        return before

    assert asyncio.run(story()) == 0
    assert looks == 500


def test_console_sessions(
    broker: penstock.Broker,
    keys: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CONSOLE_MAX_SESSIONS", 8)

    async def story() -> None:
        clock = ManualClock()
        sessions = Sessions(Keys(tmp_path / "keys.toml"), clock, "store")
        admin = await sessions.log_in(keys["root"])
        assert admin is not None
        mine = []
        for _ in range(20):
            clock.advance(1)
            mine.append(await sessions.log_in(keys["worker"]))
        assert sessions.lasts(admin)
        assert [each is not None and sessions.lasts(each) for each in mine].count(True) == 4
        assert mine[-1] is not None
        assert sessions.lasts(mine[-1])
        for session in (admin, *mine):
            assert session is not None
            sessions.end(session)
        assert len(sessions) == sessions._places.total == 0

    asyncio.run(story())


def test_lines_about_clients_that_were_turned_away(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals(lambda *_: None, lambda: 0.0)
    for number in range(200):
        refusals.login("native", f"1.2.3.4:{number}", f"key-{number}", "no key")
    assert len(caplog.records) == limits.MAX_REFUSAL_LINES // 2
    refusals.login("native", "5.6.7.8:1", "key", "no key")
    assert len(caplog.records) == limits.MAX_REFUSAL_LINES // 2 + 1


class Holder:
    """A connection that has a slot."""

    def __init__(self, name: str, gone: list[str]) -> None:
        self.idle = True
        self._name, self._gone = name, gone

    def abort(self) -> None:
        self._gone.append(self._name)

    def refuse(self, why: str) -> None:
        assert why
        self._gone.append(self._name)


def test_connections_of_strangers_and_of_keys() -> None:
    slots, gone = Connections(10), list[str]()

    def come(name: str, host: str, key: str = "") -> Slot:
        slot = slots.enter(Holder(name, gone), "native", f"{host}:{name}")
        slot.key_id = key
        if key:
            slots.trust(slot)
        return slot

    come("1", "honest")
    for number in range(9):
        come(f"1{number}", "hog")
    # The oldest of the host that has the most makes way, not the oldest of all.
    honest = come("2", "honest", "key")
    assert gone == ["10"]
    # A key has up to four fifths; the one that is refused stays a stranger.
    assert grab(lambda: come("3", "many", "greedy"), "key 'greedy' has 8 of .* 1 are free") == 8
    come("4", "other", "key-4")
    assert honest in slots._known.slots
    for slot in [*slots._known.slots, *slots._strangers.slots]:
        slots.leave(slot)
    assert slots.places.total == len(slots) == 0


def test_who_makes_way_as_connections_come_and_go() -> None:
    slots, gone, clock = Connections(30), list[str](), ManualClock()
    there: dict[str, Slot] = {}
    for number in range(2_000):
        host = f"host-{int(8 * clock.random())}"
        if there and clock.random() < 0.4:
            slots.leave(there.pop(list(there)[int(len(there) * clock.random())]))
            continue
        before = Counter(slot.share for slot in there.values())
        there[f"{number}"] = slots.enter(Holder(f"{number}", gone), "native", f"{host}:1")
        for name in gone:
            assert before[there.pop(name).share] == max(before.values())
        gone.clear()
    assert len(there) == len(slots)


@pytest.mark.parametrize("key", ["", "key"])
def test_bytes_of_connections(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(limits, "MAX_STRANGERS_BYTES", 100)
    monkeypatch.setattr(limits, "MAX_BUFFERED_BYTES", 100)
    slots, gone = Connections(100), list[str]()

    def come(name: str, owner: str) -> Slot:
        slot = slots.enter(Holder(name, gone), "native", f"{owner}:{name}")
        if key:
            slot.key_id = f"{key}-{owner}"
            slots.trust(slot)
        return slot

    slots.hold(come("first", "honest"), 10)
    many = [come(f"hog-{number}", "hog") for number in range(20)]
    for slot in many:
        slots.hold(slot, 10)
    # Those of the hog make way, the oldest first; the other has held its bytes for longer.
    assert gone == [f"hog-{number}" for number in range(11)]
    for slot in many:
        slot.holder.idle = False  # type: ignore[misc]
    gone.clear()
    slots.hold(come("second", "honest"), 10)
    assert gone == ["hog-11"]
    assert slots.held_bytes == 100


def test_requests_at_work(start: Callable[..., Any], keys: dict[str, str]) -> None:
    with start(native="127.0.0.1:0") as server:
        listener, url = server.listeners["native"], server.location("native")
        half = listener.at_work.most // 2
        with (
            penstock.connect(url, token=keys["worker"]) as hog,
            penstock.connect(url, token=keys["viewer"]) as other,
        ):
            listener.at_work.add("key 'worker'", half)
            stats = threading.Thread(target=hog.stats, args=["orders"])
            stats.start()
            wait_until(lambda: any(listener.waiting.values()))
            assert other.stats("orders").available == 0
            assert stats.is_alive()
            listener.at_work.give("key 'worker'", half)
            # Whose request ends lets those go on that waited.
            assert other.stats("orders").available == 0
            stats.join(60)
            assert not stats.is_alive()
        assert listener.at_work.total == 0


def test_connections_of_queuebers_clients(broker: penstock.Broker) -> None:
    with running(broker, capnp="127.0.0.1:0") as server, ExitStack() as stack:
        places = server.listeners["capnp"].places  # type: ignore[attr-defined]
        places.most = 5

        def come(host: str) -> socket.socket:
            place = server.addresses["capnp"]
            return stack.enter_context(
                socket.create_connection(place, timeout=60, source_address=(host, 0))
            )

        for _ in range(4):
            come("127.0.0.1")
        wait_until(lambda: places.total == 4)
        assert come("127.0.0.1").recv(1) == b""
        come("127.0.0.2")
        wait_until(lambda: places.total == 5)
    assert places.total == 0
