"""Queueber's interface, driven by a Cap'n Proto client that knows nothing but its schema."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import capnp
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.errors import InvalidInput
from penstock.server import queueber
from penstock.server.batcher import Batcher
from penstock.server.queueber import QueueberListener, item_id, lease_of, message_of
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from penstock import Broker

SCHEMA: Any = capnp.load(str(Path(queueber.__file__).with_suffix(".capnp")))


@pytest.fixture(params=["indexed", "buckets"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with penstock.open(f"rocksdb:{tmp_path / 'store'}?design={request.param}") as opened:
        yield opened
        assert_clean(opened)


class Door:
    """Where clients connect; each gets a queue."""

    def __init__(self, listener: QueueberListener, batcher: Batcher) -> None:
        self._listener = listener
        self._batcher = batcher
        self.slots = listener.slots
        self.clients: list[Any] = []

    async def __call__(self) -> Any:
        stream = await capnp.AsyncIoStream.create_connection(*self._listener.address)
        self.clients.append(capnp.TwoPartyClient(stream))
        return self.clients[-1].bootstrap().cast_as(SCHEMA.Queue)

    async def until_waiting(self, count: int) -> None:
        while self._batcher.parked != count:
            await asyncio.sleep(0.005)


def run(broker: Broker, story: Callable[[Door], Awaitable[None]]) -> None:
    async def whole() -> None:
        batcher = Batcher(broker, asyncio.get_running_loop())
        listener = QueueberListener(batcher, "127.0.0.1", 0, queue="work")
        await listener.start()
        door = Door(listener, batcher)
        try:
            await asyncio.wait_for(story(door), 120)
        finally:
            for client in door.clients:
                client.close()
            await listener.stop(1_000)
            await batcher.close()

    uvloop.run(whole())


async def add(queue: Any, *contents: bytes, delay: int = 0) -> list[bytes]:
    items = [{"contents": each, "visibilityTimeoutSecs": delay} for each in contents]
    return list((await queue.add({"items": items})).resp.ids)


async def poll(queue: Any, number: int = 1, *, lease: int = 30, timeout: int = 1) -> Any:
    request = {"leaseValiditySecs": lease, "numItems": number, "timeoutSecs": timeout}
    return (await queue.poll(request)).resp


async def remove(queue: Any, item: bytes, lease: bytes) -> bool:
    return bool((await queue.remove({"id": item, "lease": lease})).resp.removed)


async def extend(queue: Any, lease: bytes, secs: int) -> bool:
    return bool((await queue.extend({"lease": lease, "leaseValiditySecs": secs})).resp.extended)


def test_the_interface_is_queuebers() -> None:
    # A call names it by a number that is made of the schema file's and of its name.
    assert SCHEMA.schema.node.id == 0xBAB6E22DE0402699

    def fields(kind: Any, wrapper: str) -> list[str]:
        return list(kind.fields[wrapper].schema.fields)

    assert {
        name: (fields(method.param_type, "req"), fields(method.result_type, "resp"))
        for name, method in SCHEMA.Queue.schema.methods.items()
    } == {
        "add": (["items"], ["ids"]),
        "remove": (["id", "lease"], ["removed"]),
        "poll": (["leaseValiditySecs", "numItems", "timeoutSecs"], ["items", "lease"]),
        "extend": (["lease", "leaseValiditySecs"], ["extended"]),
    }


def test_a_life(broker: Broker) -> None:
    async def story(connect: Any) -> None:
        queue = await connect()
        ids = await add(queue, b"one", b"two", b"three")
        assert [len(each) for each in ids] == [16] * 3
        assert sorted(ids) == ids
        got = await poll(queue, 2)
        assert [(item.contents, item.id) for item in got.items] == [
            (b"one", ids[0]),
            (b"two", ids[1]),
        ]
        assert await extend(queue, got.lease, 60)
        assert await remove(queue, ids[0], got.lease)
        assert not await remove(queue, ids[0], got.lease)
        # Not in this lease; not in progress; no such lease; nonsense.
        assert not await remove(queue, ids[2], got.lease)
        other = await poll(queue, 0)
        assert [item.id for item in other.items] == [ids[2]]
        assert not await remove(queue, ids[1], other.lease)
        assert not await remove(queue, ids[1], b"x" * 16)
        assert not await remove(queue, b"\xff" * 16, got.lease)
        assert not await remove(queue, b"", b"")
        assert await remove(queue, ids[1], got.lease)
        assert await remove(queue, ids[2], other.lease)
        assert not await extend(queue, got.lease, 60)
        assert not await extend(queue, b"\x00", 60)

    run(broker, story)
    assert broker.stats("work").done == 3
    # Nothing is left to sweep.
    assert broker.sweep().leases_expired == 0


def test_leases_are_never_shared(broker: Broker) -> None:
    async def story(connect: Any) -> None:
        one, two = await connect(), await connect()
        waiting = [asyncio.ensure_future(poll(each, timeout=0)) for each in (one, two)]
        await connect.until_waiting(2)
        ids = await add(one, b"a", b"b")
        first, second = await asyncio.gather(*waiting)
        assert first.lease != second.lease
        assert sorted(item.id for got in (first, second) for item in got.items) == ids

    run(broker, story)


def test_timeouts_delays_and_expiry(broker: Broker) -> None:
    async def story(connect: Any) -> None:
        queue = await connect()
        empty = await poll(queue, timeout=1)
        assert (len(empty.items), empty.lease) == (0, b"")
        (late,) = await add(queue, b"later", delay=1)
        got = await poll(queue, lease=1, timeout=60)
        assert [item.id for item in got.items] == [late]
        again = await poll(queue, timeout=60)
        assert [item.id for item in again.items] == [late]
        assert not await remove(queue, late, got.lease)
        assert not await extend(queue, got.lease, 5)
        assert await remove(queue, late, again.lease)

    run(broker, story)


def test_what_is_wrong_is_the_calls_error(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(connect: Any) -> None:
        queue = await connect()
        with pytest.raises(capnp.KjException, match="InvalidInput: lease_ms") as refused:
            await poll(queue, lease=0)
        assert "Traceback" not in str(refused.value)
        assert "queueber.py" not in str(refused.value)
        with monkeypatch.context() as patched:
            patched.setattr(queueber, "check_count", lambda *_: 1 // 0)
            with pytest.raises(capnp.KjException) as failed:
                await add(queue, b"x")
        assert "the server failed (ZeroDivisionError); its log says why" in str(failed.value)
        assert "Traceback" not in str(failed.value)
        assert "ZeroDivisionError: " in caplog.text
        with pytest.raises(capnp.KjException, match="delay"):
            await add(queue, b"never", delay=(1 << 64) - 1)
        assert await add(queue) == []
        assert len(await add(queue, b"fine")) == 1
        slots, other = connect.slots, await connect()
        while len(slots) < 2:
            await asyncio.sleep(0.005)
        slots.places.most = 1
        with pytest.raises(capnp.KjException, match="ServerBusy: the client at 127") as busy:
            await add(other, b"never")
        assert "Traceback" not in str(busy.value)

    run(broker, story)


def test_a_client_that_leaves_takes_nothing_with_it(broker: Broker) -> None:
    async def story(connect: Any) -> None:
        gone, stays = await connect(), await connect()
        leaving = asyncio.ensure_future(poll(gone, timeout=0))
        await connect.until_waiting(1)
        leaving.cancel()
        await connect.until_waiting(0)
        await add(stays, b"one")
        got = await poll(stays, timeout=20)
        assert len(got.items) == 1

    run(broker, story)


def test_a_port_that_is_taken(broker: Broker) -> None:
    async def story() -> None:
        batcher = Batcher(broker, asyncio.get_running_loop())
        with socket.create_server(("127.0.0.1", 0)) as taken:
            listener = QueueberListener(batcher, *taken.getsockname(), queue="work")
            with pytest.raises(InvalidInput, match="can't listen"):
                await listener.start()
        await batcher.close()

    asyncio.run(story())


@given(st.integers(0, (1 << 64) - 1))
def test_ids_name_messages(message_id: int) -> None:
    data = item_id(message_id)
    assert message_of(data) == message_id
    assert data[6] >> 4 == 8
    assert data[8] >> 6 == 0b10


@given(st.binary(max_size=20))
def test_other_bytes_name_none(data: bytes) -> None:
    found = message_of(data)
    assert found is None or item_id(found) == data
    assert lease_of(data) is None or data.isascii()


@given(st.lists(st.integers(0, (1 << 64) - 1)))
def test_ids_sort_as_messages_do(ids: list[int]) -> None:
    assert sorted(map(item_id, ids)) == list(map(item_id, sorted(ids)))
