"""The process that serves: a store, a desk, the listeners, and an end in good order.

::

    open the store ─▶ listen ─▶ ready ─▶ SIGTERM, SIGINT ─▶ not ready, parked claims handed back
                                   │                          └▶ what is in hand finished ─▶ closed
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
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.clock import SystemClock
from penstock.errors import InvalidInput, StorageFailed
from penstock.server import config as configuring
from penstock.server import descriptors
from penstock.server.config import LISTENERS, OFF, Config
from penstock.server.security import Keys
from penstock.server.served_store import Server, new_loop, open_broker, tls_of
from penstock.server.standby import Taken, stand_by
from penstock.store.sql.location import without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.broker.broker import Broker
    from penstock.errors import PenstockError

__all__ = ["serve"]

log = logging.getLogger(__name__)

# The name of glibc's setting in malloc.h.
_M_ARENA_MAX: Final = -8
# A store that is lost gives every request its error at once.
_LOST_GRACE_MS: Final = 1_000


def serve(config: Config, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, in the main thread; a second signal ends it at once.

    A store that is lost meanwhile, as when another process takes it over, ends it with the error;
    a standby stands by again instead.
    """
    _share_one_heap()
    # Before the store is opened, which takes its share of it.
    descriptors.raise_limit()
    loop = new_loop()
    try:
        again = False
        while (taken := _take(loop, config, say, again=again)) is not None:
            told_to_stop = False
            try:
                try:
                    asyncio.set_event_loop(loop)
                    server = Server(taken.broker, taken.config)
                    in_order = loop.run_until_complete(_serve(server, say))
                    told_to_stop = True
                finally:
                    _close(taken.broker)
            except StorageFailed:
                _write_ports(config, None)
                if told_to_stop or not config.standby:
                    raise
                again = True
                continue
            _write_ports(config, None)
            if not in_order:
                # Threads that still work for somebody would hold up an ordinary exit.
                os._exit(1)
            break
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    say("stopped")


def _take(
    loop: asyncio.AbstractEventLoop, config: Config, say: Callable[[str], None], *, again: bool
) -> Taken | None:
    """Open the store; a standby does so when it is free, or never if it is told to stop."""
    # Bad settings are refused before a store is made or taken from another.
    if configuring.authenticates(config):
        Keys(Path(config.auth_keys))
    tls = tls_of(config)
    if not config.standby:
        _try_addresses(config, LISTENERS)
        return Taken(open_broker(config), config)

    def take() -> Broker:
        # A standby listens for HTTP already.
        _try_addresses(config, [name for name in LISTENERS if name != "http"])
        return open_broker(config)

    asyncio.set_event_loop(loop)
    return loop.run_until_complete(
        stand_by(
            config,
            take,
            say,
            clock=SystemClock(),
            tls=tls,
            again=again,
        )
    )


def _try_addresses(config: Config, names: Iterable[str]) -> None:
    """Refuse an address that can't be listened on while that costs nothing."""
    for name in names:
        address = getattr(config, f"listen_{name}")
        if address == OFF:
            continue
        host, port = configuring.parse_address(address)
        try:
            for family, kind, protocol, _, place in socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                with socket.socket(family, kind, protocol) as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    trial.bind(place)
        except OSError as error:
            raise InvalidInput(
                f"can't listen on {host}:{port}: {error.strerror or error}"
            ) from None


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
    # It may have been lost before anybody listened.
    lost = server.broker.failure
    if lost is not None:
        return lost
    waits = [asyncio.create_task(each.wait()) for each in (stopping, server.desk.lost)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()
    return None if stopping.is_set() else server.broker.failure


def _write_ports(config: Config, addresses: dict[str, tuple[str, int]] | None) -> None:
    """Tell who waits for the file the ports; None: take it away."""
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
