"""The process of a server: signals, the end in good order, and the standby that takes over.

::

    open the store ─▶ listen ─▶ ready ─▶ SIGTERM, SIGINT ─▶ not ready, parked claims handed back
                                   │                          └▶ requests at work finished ─▶ closed
                                   ├─ SIGHUP: keys and certificate read again
                                   └─ the store is lost, by a take-over or else ─▶ the same end,
                                      with an error; a standby stands by again
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, StorageFailed
from penstock.readers import watch_owner
from penstock.server import config as configuring
from penstock.server.config import OFF, Address, Config
from penstock.server.connections import bind, raise_file_limit
from penstock.server.security import Keys
from penstock.server.served_store import (
    Server,
    load_protocols,
    new_loop,
    open_broker,
    tls_of,
)
from penstock.store.sql.location import without_password

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.errors import PenstockError

log = logging.getLogger(__name__)

# The name of glibc's setting in malloc.h.
_M_ARENA_MAX: Final = -8
# A store that is lost gives every request its error at once.
_LOST_GRACE_MS: Final = 1_000
# How often a standby looks at the owner within the time after which it takes over.
_LOOKS: Final = 3


def serve(config: Config, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, in the main thread; a second signal ends it at once.

    A store that is lost meanwhile, as when another process takes it over, ends it with the error;
    a standby stands by again instead.
    """
    _share_one_heap()
    # Before the store is opened, which takes its share of it.
    raise_file_limit()
    loop = new_loop()
    try:
        again = False
        while (taken := _take(loop, config, say, again=again)) is not None:
            broker, taken_config = taken
            told_to_stop = False
            try:
                try:
                    asyncio.set_event_loop(loop)
                    in_order = loop.run_until_complete(_serve(Server(broker, taken_config), say))
                    told_to_stop = True
                finally:
                    _close(broker)
            except StorageFailed:
                _write_ports(config, None)
                if told_to_stop or not config.standby:
                    raise
                again = True
                continue
            _write_ports(config, None)
            if not in_order:
                # Threads that still work would hold up an ordinary exit.
                os._exit(1)
            break
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    say("stopped")


def _take(
    loop: asyncio.AbstractEventLoop, config: Config, say: Callable[[str], None], *, again: bool
) -> tuple[Broker, Config] | None:
    """Open the store; a standby waits until it is free, and returns None if a signal stops it."""
    # Bad settings are refused before a store is made or taken from another.
    if configuring.authenticates(config):
        Keys(Path(config.auth_keys))
    tls = tls_of(config)
    if not config.standby:
        _try_addresses(config)
        return open_broker(config), config
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(_stand_by(config, say, tls, again=again))


def _try_addresses(config: Config) -> None:
    """Refuse an address that can't be listened on while that costs nothing."""
    for name, address in config.addresses().items():
        # A standby listens for HTTP already.
        if name != "http" or not config.standby:
            for trial in bind(*address):
                trial.close()


def _close(broker: Broker) -> None:
    try:
        broker.close()
    except StorageFailed as error:
        log.error("the store was not closed in order: %s", error)  # noqa: TRY400
        raise


def _share_one_heap() -> None:
    """Make all threads allocate from one heap, where the C library is glibc.

    By default it gives eight to each core, and each keeps what any thread once needed: gRPC's
    threads, which come and go, would fill them one after the other.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _settle_in() -> None:
    """Make the garbage collector leave lasting objects alone, and look less often at the others.

    Requests make thousands of short-lived objects in a turn of the loop, and no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


async def _serve(server: Server, say: Callable[[str], None]) -> bool:
    """Return whether it ended in order, with everything answered; raise if the store is lost."""
    loop = asyncio.get_running_loop()
    stopping, at_once = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (at_once if stopping.is_set() else stopping).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    loop.add_signal_handler(signal.SIGHUP, server.reload)
    await server.start()
    places = ", ".join(map(server.location, server.addresses))
    say(f"serving {without_password(server.config.store)} at {places}")
    try:
        _write_ports(server.config, server.addresses)
    except InvalidInput:
        await server.stop(grace_ms=0)
        raise
    _settle_in()
    lost = await _stopped_or_lost(server, stopping)
    if lost is not None:
        log.error("no more is served: %s", lost)
        await server.stop(grace_ms=min(server.config.grace, _LOST_GRACE_MS))
        raise lost.with_traceback(None)
    say("stopping: no more calls are taken")
    stop = loop.create_task(server.stop())
    hurry = loop.create_task(at_once.wait())
    await asyncio.wait({stop, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not stop.done():
        say("stopping at once: what is in hand is left")
        return False
    hurry.cancel()
    await stop
    return True


async def _stopped_or_lost(server: Server, stopping: asyncio.Event) -> PenstockError | None:
    """Wait for one of the two; return why the store is lost, if it is."""
    # It may have been lost before the batcher listened.
    lost = server.broker.failure
    if lost is not None:
        return lost
    waits = [asyncio.create_task(each.wait()) for each in (stopping, server.batcher.lost)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()
    return None if stopping.is_set() else server.broker.failure


def _write_ports(config: Config, addresses: dict[str, tuple[str, int]] | None) -> None:
    """Write the ports to the port file; None: remove the file."""
    if not config.port_file:
        return
    path = Path(config.port_file)
    if addresses is None:
        path.unlink(missing_ok=True)
        return
    lines = [f"{name} {port}\n" for name, (_, port) in addresses.items()]
    if len(lines) == 1:
        lines = [lines[0].partition(" ")[2]]
    # A process that waits for the file must not find half of it.
    partial = path.with_name(path.name + ".part")
    try:
        partial.write_text("".join(lines))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InvalidInput(f"the port file {path} can't be written: {error.strerror}") from None


# --- standby --------------------------------------------------------------------------------------
#
#     watch ─▶ no sign of life for so long ─▶ look afresh ─▶ open the store ─▶ serve it
#       ▲                                         │                │
#       └────────── the owner is there ───────────┴── it fails ────┘
#
# A standby can be wrong about the owner, which may be slow or paused. That costs a change of owners
# and nothing else, since opening the store fences the owner before, whatever that one does then. A
# store that does not answer says nothing about its owner: the time begins again.


class Pulse(Protocol):
    """A number that goes up while the store has an owner."""

    def look(self) -> int:
        """Return the number now."""

    def look_again(self) -> int:
        """Return the number now, read afresh."""


class Silence:
    """How long a pulse has not changed, as far as the standby has looked."""

    def __init__(self, most_step_ms: float) -> None:
        self._most_step_ms = most_step_ms
        self._number: int | None = None
        self._looked_ms = 0.0
        self.ms = 0.0

    def look(self, number: int | None, now_ms: float) -> float:
        """Note the number of a look (None: the look failed); return how long it has not changed."""
        if number is None or number != self._number:
            self.ms = 0.0
        else:
            # If this process was paused, so may have been the other.
            self.ms += min(now_ms - self._looked_ms, self._most_step_ms)
        self._looked_ms = now_ms
        if number is not None:
            self._number = number
        return self.ms


async def _stand_by(
    config: Config, say: Callable[[str], None], tls: ssl.SSLContext | None, *, again: bool
) -> tuple[Broker, Config] | None:
    """Wait until the store is free, and take it; None if a signal said to stop before.

    ``again``: this process owned the store before, and lost it. It may be out of reach for now.
    """
    # Now, so that a standby fails at its start if one is missing.
    load_protocols(config)
    pulse = await asyncio.to_thread(
        lambda: watch_owner(config.store, routing=config.routing or None, check=not again)
    )
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    # There are no keys in use yet that could be read again.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)
    async with _standby_pages(config, tls) as port:
        say(f"standing by for {config.store}")
        while await until_silent(pulse, config.standby_after, SystemClock(), stopping):
            log.warning("the owner of %s gives no sign of life: taking over", config.store)
            try:
                _try_addresses(config)
                broker = await asyncio.to_thread(open_broker, config)
            except StorageFailed as error:
                log.error("the store can't be taken over now: %s", error)  # noqa: TRY400
                continue
            if port is None:
                return broker, config
            # HTTP stays at the port that the standby had.
            host = config.listen_http.rpartition(":")[0]
            listen_http = Address(f"{host}:{port}")
            return broker, msgspec.structs.replace(config, listen_http=listen_http)
    return None


async def until_silent(pulse: Pulse, after_ms: int, clock: Clock, stopping: asyncio.Event) -> bool:
    """Return once there has been no sign of life for so long; False if stopped before."""
    step_ms = after_ms / _LOOKS
    silence = Silence(2 * step_ms)
    while not stopping.is_set():
        number = await _look(pulse.look)
        if silence.look(number, clock.seconds() * 1000) >= after_ms:
            afresh = await _look(pulse.look_again)
            if afresh == number:
                return True
            silence.look(afresh, clock.seconds() * 1000)
        try:
            await asyncio.wait_for(stopping.wait(), step_ms / 1000)
        except TimeoutError:
            continue
    return False


async def _look(how: Callable[[], int]) -> int | None:
    try:
        return await asyncio.to_thread(how)
    except StorageFailed as error:
        log.warning("the owner can't be watched: %s", error)
        return None


@asynccontextmanager
async def _standby_pages(config: Config, tls: ssl.SSLContext | None) -> AsyncIterator[int | None]:
    """Answer /health, /ready and /metrics, if HTTP is to be served; give the port."""
    if config.listen_http == OFF:
        yield None
        return
    from penstock.server.admin import standby_routes  # noqa: PLC0415 - needs an extra
    from penstock.server.http import Http, Response  # noqa: PLC0415

    host, port = configuring.parse_address(config.listen_http)
    http = Http(
        standby_routes(config),
        lambda _: Response(503, b"standing by\n"),
        host=host,
        port=port,
        tls=tls,
    )
    await http.start()
    try:
        yield http.address[1]
    finally:
        await http.stop(1_000)
