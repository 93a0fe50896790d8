"""The process of a server: signals, the end in good order, and the standby that takes over.

::

    open the store ─▶ listen ─▶ ready ─▶ SIGTERM, SIGINT ─▶ not ready, served for drain_delay
                                   │      └▶ listeners and parked claims ended ─▶ requests at work
                                   │         finished ─▶ the store closed: a standby takes it over
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
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, StorageFailed
from penstock.readers import watch_owner
from penstock.server import logs
from penstock.server.access import Access
from penstock.server.audit import AuditLog
from penstock.server.connections import bind, raise_file_limit
from penstock.server.served_store import (
    Server,
    load_protocols,
    new_loop,
    open_broker,
)
from penstock.store.sql.location import without_password

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Iterable

    from penstock.broker.broker import Broker
    from penstock.clock import Clock
    from penstock.errors import PenstockError
    from penstock.server.config import Config

log = logging.getLogger(__name__)

# The name of glibc's setting in malloc.h.
_M_ARENA_MAX: Final = -8
# A store that is lost gives every request its error at once.
_LOST_GRACE_MS: Final = 1_000
# How often a standby looks at the owner within the time after which it takes over.
_LOOKS: Final = 3
# Listeners that a standby has.
_STANDBY_LISTENERS: Final = ("http", "ops")


class _Taken(NamedTuple):
    """A store that this process has opened, and the sockets that a standby has bound."""

    broker: Broker
    bound: dict[str, list[socket.socket]]
    told: Stop


class Stop:
    """The signals that end the process: the first one in order, a second one at once.

    Handlers of a loop would not do: uvloop drops signals that come while it does not run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.begun, self.at_once = asyncio.Event(), asyncio.Event()
        self._loop = loop
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._before = {each: signal.signal(each, self._signalled) for each in numbers}

    def close(self) -> None:
        """Handle the signals as before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _signalled(self, number: int, _: object) -> None:
        if self.begun.is_set() and not self._loop.is_running():
            # The store is being closed, and may not answer.
            os._exit(1)
        self._loop.call_soon_threadsafe(self._tell, signal.Signals(number))

    def _tell(self, number: signal.Signals) -> None:
        if self.begun.is_set():
            self.at_once.set()
            return
        log.info("stopping", extra={"fields": {"signal": number.name}})
        self.begun.set()

    async def within(self, seconds: float) -> bool:
        """Wait for the first signal; False if it does not come in time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.begun.wait(), seconds)
        return self.begun.is_set()


def serve(config: Config, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, in the main thread; a second signal ends it at once.

    A store that is lost meanwhile, as when another process takes it over, ends it with the error;
    a standby stands by again instead.
    """
    _share_one_heap()
    # Before the store is opened, which takes its share of it.
    raise_file_limit()
    loop = new_loop()
    told: Stop | None = None
    try:
        while (taken := _take(loop, config, say, told)) is not None:
            told = taken.told
            try:
                try:
                    asyncio.set_event_loop(loop)
                    server = Server(taken.broker, config)
                    in_order = loop.run_until_complete(_serve(server, say, taken))
                finally:
                    _close_sockets(taken.bound)
                    _close(taken.broker)
            except StorageFailed:
                _write_ports(config, None)
                if told.begun.is_set() or not config.standby:
                    raise
                continue
            _write_ports(config, None)
            if not in_order:
                log.warning("stopped at once: what was in hand was left")
                logs.drain()
                # Threads that still work would hold up an ordinary exit.
                os._exit(1)
            break
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        if told is not None:
            told.close()
        asyncio.set_event_loop(None)
        loop.close()
    log.info("stopped")
    say("stopped")


def _take(
    loop: asyncio.AbstractEventLoop, config: Config, say: Callable[[str], None], told: Stop | None
) -> _Taken | None:
    """Open the store; a standby waits until it is free, and returns None if a signal stops it.

    ``told``: this process owned the store before, and lost it.
    """
    # Bad settings are refused before a store is made or taken from another.
    load_protocols(config)
    Access(config)
    if config.audit_path:
        AuditLog(config.audit_path, SystemClock()).close()
    if not config.standby:
        _close_sockets(_bind(config, config.addresses()))
        return _Taken(open_broker(config), {}, Stop(loop))
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(_stand_by(config, say, told))


def _bind(config: Config, names: Iterable[str]) -> dict[str, list[socket.socket]]:
    """Bind the sockets of listeners, all or none; InvalidInput names an address that is taken."""
    addresses = config.addresses()
    bound: dict[str, list[socket.socket]] = {}
    try:
        for name in names:
            bound[name] = bind(*addresses[name])
    except InvalidInput:
        _close_sockets(bound)
        raise
    return bound


def _close_sockets(bound: dict[str, list[socket.socket]]) -> None:
    """Close sockets; those that their listener has closed already are left out."""
    for sockets in bound.values():
        for each in sockets:
            each.close()


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


async def _serve(server: Server, say: Callable[[str], None], taken: _Taken) -> bool:
    """Return whether it ended in order, with everything answered; raise if the store is lost."""
    loop = asyncio.get_running_loop()
    told = taken.told
    loop.add_signal_handler(signal.SIGHUP, server.reload_soon)
    await server.start(taken.bound)
    places = ", ".join(map(server.location, server.addresses))
    say(f"serving {without_password(server.config.store)} at {places}")
    try:
        _write_ports(server.config, server.addresses)
    except InvalidInput:
        await server.stop(grace_ms=0)
        raise
    _settle_in()
    lost = await _stopped_or_lost(server, told.begun)
    if lost is not None:
        log.error("no more is served: %s", lost)
        await server.stop(grace_ms=min(server.config.grace, _LOST_GRACE_MS))
        raise lost.with_traceback(None)
    stop = loop.create_task(_drain_and_stop(server, say))
    hurry = loop.create_task(told.at_once.wait())
    await asyncio.wait({stop, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not stop.done():
        say("stopping at once: what is in hand is left")
        return False
    hurry.cancel()
    await stop
    return True


async def _drain_and_stop(server: Server, say: Callable[[str], None]) -> None:
    """Go on serving until load balancers have seen that the server is not ready; then stop it."""
    delay_s = server.config.drain_delay / 1000
    if delay_s:
        server.drain()
        say(f"stopping: not ready, and calls are served for {delay_s:g} s more")
        # Nobody is served by a store that is lost.
        with suppress(TimeoutError):
            await asyncio.wait_for(server.batcher.lost.wait(), delay_s)
    log.info("no more calls are taken")
    say("stopping: no more calls are taken")
    await server.stop()


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
#     watch ─▶ no sign of life for so long, ─▶ look afresh ─▶ bind ─▶ open the store ─▶ serve it
#       ▲      or the owner has closed it          │           │           │
#       └─────────── the owner is there ───────────┴───────────┴─ it fails ┘
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

    def closed(self) -> bool:
        """Whether the owner had closed the store by the last look, or there was none yet."""


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


async def _stand_by(config: Config, say: Callable[[str], None], told: Stop | None) -> _Taken | None:
    """Wait until the store is free, and take it; None if a signal said to stop before."""
    # A store that this process has lost may be out of reach for now.
    check = told is None
    pulse = await asyncio.to_thread(
        lambda: watch_owner(config.store, routing=config.routing or None, check=check)
    )
    told = told or Stop(asyncio.get_running_loop())
    async with _standby_pages(config) as http:
        say(f"standing by for {config.store}")
        while (why := await until_free(pulse, config.standby_after, SystemClock(), told)) != "":
            log.warning("%s %s: taking over", config.store, why)
            try:
                return await _take_over(config, http, told)
            except (InvalidInput, StorageFailed) as error:
                log.error("the store can't be taken over now: %s", error)  # noqa: TRY400
            await told.within(config.standby_after / 1000)
    told.close()
    return None


async def _take_over(config: Config, http: dict[str, list[socket.socket]], told: Stop) -> _Taken:
    """Bind what is not bound yet, then open the store: an owner is fenced only if both can be."""
    names = [name for name in config.addresses() if name not in http]
    with ExitStack() as stack:
        bound = _bind(config, names)
        stack.callback(_close_sockets, bound)
        # gRPC binds its own: that its port is free has to do.
        _close_sockets({"flight": bound.pop("flight", [])})
        # HTTP stays at the port that the standby has, which it closes for itself.
        bound |= {name: [each.dup() for each in sockets] for name, sockets in http.items()}
        broker = await asyncio.to_thread(open_broker, config)
        stack.pop_all()
    return _Taken(broker, bound, told)


async def until_free(pulse: Pulse, after_ms: int, clock: Clock, told: Stop) -> str:
    """Return why the store has no owner, once it has none; empty if stopped before."""
    step_ms = after_ms / _LOOKS
    silence = Silence(2 * step_ms)
    while not told.begun.is_set():
        number = await _look(pulse.look)
        silent = silence.look(number, clock.seconds() * 1000) >= after_ms
        closed = number is not None and bool(await _look(pulse.closed))
        if silent or closed:
            afresh = await _look(pulse.look_again)
            if afresh == number:
                return "has no owner" if closed else "has an owner that gives no sign of life"
            silence.look(afresh, clock.seconds() * 1000)
        await told.within(step_ms / 1000)
    return ""


async def _look(how: Callable[[], int]) -> int | None:
    try:
        return await asyncio.to_thread(how)
    except StorageFailed as error:
        log.warning("the owner can't be watched: %s", error)
        return None


@asynccontextmanager
async def _standby_pages(config: Config) -> AsyncIterator[dict[str, list[socket.socket]]]:
    """Answer /health, /ready and /metrics where there will be pages; give the sockets, by name."""
    from penstock.server.admin import Standby  # noqa: PLC0415 - needs an extra
    from penstock.server.http import Response  # noqa: PLC0415
    from penstock.server.http_connection import Http  # noqa: PLC0415

    loop, standby = asyncio.get_running_loop(), Standby(config)
    loop.add_signal_handler(signal.SIGHUP, standby.reload_soon)
    hosts = {name: host for name, (host, _) in config.addresses().items()}
    bound = _bind(config, [name for name in hosts if name in _STANDBY_LISTENERS])
    async with AsyncExitStack() as stack:
        stack.callback(loop.create_task(standby.watch_keys()).cancel)
        for name, sockets in bound.items():
            http = standby.listeners[name] = Http(
                standby.routes(keyless=name == "ops"),
                lambda _: Response(503, b"standing by\n"),
                tls=standby.tls.context(name),
                guard=standby.guard(name, hosts[name]),
            )
            http.take(sockets)
            await http.start()
            stack.push_async_callback(http.stop, 1_000)
        yield bound
