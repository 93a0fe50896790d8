"""Standing by: waiting until a store on object storage has no owner, and then taking it over.

::

    watch ─▶ no sign of life for so long ─▶ look afresh ─▶ open the store ─▶ to be served
      ▲                                         │                │
      └──────────── there is one after all ─────┴── it fails ────┘

A standby can be wrong about the owner: it may be slow, or paused. That costs a change of owners and
nothing else, since opening the store fences the one before, whatever that one does then. A store
that does not answer says nothing about its owner: time begins anew.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from penstock.errors import InvalidInput, StorageFailed
from penstock.server.config import LISTENERS, OFF, Address, Config, parse_address
from penstock.urls import watch_owner

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from penstock.broker.broker import Broker
    from penstock.clock import Clock

__all__ = ["Silence", "Taken", "stand_by", "until_silent"]

log = logging.getLogger(__name__)

# What serving each protocol needs, loaded ahead: what is missing is to be missed at the start.
_MODULES: Final = {
    "native": ("penstock.server.native.listener",),
    "http": ("penstock.server.admin", "penstock.server.sqs"),
    "flight": ("penstock.flight.listener",),
    "capnp": ("penstock.server.queueber",),
}
# Looks at the owner within the time after which it is taken for gone.
_LOOKS: Final = 3


class Taken(NamedTuple):
    """A store that is owned by this process now, and the settings to serve it with."""

    broker: Broker
    config: Config


class Watched(Protocol):
    """The pulse of an owner: a number that goes up while there is one."""

    def look(self) -> int:
        """Return the number now."""

    def look_again(self) -> int:
        """Return the number now, found without what was known before."""


class Silence:
    """How long a number has not changed, as far as somebody has looked."""

    def __init__(self, most_step_ms: float) -> None:
        self._most_step_ms = most_step_ms
        self._number: int | None = None
        self._looked_ms = 0.0
        self.ms = 0.0

    def look(self, number: int | None, now_ms: float) -> float:
        """Take down what a look has found (None: nothing could be found out); return the time."""
        if number is None or number != self._number:
            self.ms = 0.0
        else:
            # If this process was paused, so may have been the other.
            self.ms += min(now_ms - self._looked_ms, self._most_step_ms)
        self._looked_ms = now_ms
        if number is not None:
            self._number = number
        return self.ms


async def stand_by(
    config: Config,
    take: Callable[[], Broker],
    say: Callable[[str], None],
    *,
    clock: Clock,
    tls: ssl.SSLContext | None,
    again: bool = False,
) -> Taken | None:
    """Wait until the store is free, and take it; None if a signal said to stop before.

    ``again``: the store was owned before, and was lost. It may be out of reach for now.
    """
    _load(config)
    pulse = await asyncio.to_thread(
        lambda: watch_owner(config.store, routing=config.routing or None, check=not again)
    )
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    # There are no keys in use yet that could be read again.
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    async with _pages(config, tls) as port:
        say(f"standing by for {config.store}")
        while await until_silent(pulse, config.standby_after, clock, stopping):
            log.warning("the owner of %s gives no sign of life: taking over", config.store)
            try:
                broker = await asyncio.to_thread(take)
            except StorageFailed as error:
                log.error("the store can't be taken over now: %s", error)  # noqa: TRY400
                continue
            return Taken(broker, _with_port(config, port))
    return None


def _load(config: Config) -> None:
    for name in LISTENERS:
        if getattr(config, f"listen_{name}") == OFF:
            continue
        try:
            for module in _MODULES[name]:
                importlib.import_module(module)
        except ImportError as error:
            raise InvalidInput(f"{error}: a standby that is to serve {name} needs it") from None


async def until_silent(
    pulse: Watched, after_ms: int, clock: Clock, stopping: asyncio.Event
) -> bool:
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
async def _pages(config: Config, tls: ssl.SSLContext | None) -> AsyncIterator[int | None]:
    """Answer /health and /ready, if HTTP is to be served; give the port."""
    if config.listen_http == OFF:
        yield None
        return
    from penstock.server.http.listener import Http, Response  # noqa: PLC0415 - needs an extra

    host, port = parse_address(config.listen_http)
    http = Http(
        {("GET", "/health"): lambda _: Response(body=b"alive\n")},
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


def _with_port(config: Config, port: int | None) -> Config:
    """Have HTTP stay at the port that it has been at."""
    if port is None:
        return config
    host = config.listen_http.rpartition(":")[0]
    return msgspec.structs.replace(config, listen_http=Address(f"{host}:{port}"))
