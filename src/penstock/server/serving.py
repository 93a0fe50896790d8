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
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import penstock
from penstock.broker import Broker
from penstock.clock import SystemClock
from penstock.errors import InvalidInput, StorageFailed
from penstock.server import config as configuring
from penstock.server import descriptors
from penstock.server.config import LISTENERS, OFF, Config
from penstock.server.connections import Connections
from penstock.server.desk import Desk
from penstock.server.logs import AccessLog
from penstock.server.metrics import Metrics
from penstock.server.security import Keys, is_loopback, server_tls
from penstock.server.standing import Taken, stand_by
from penstock.stores.sql_place import without_password

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Iterator

    from penstock.clock import Clock
    from penstock.errors import PenstockError
    from penstock.server.listening import FlightListener

__all__ = ["Listener", "Server", "new_loop", "running", "serve"]

log = logging.getLogger(__name__)

_SCHEMES: Final = {"native": "penstock", "http": "http", "flight": "grpc", "capnp": "capnp"}
_TLS_SCHEMES: Final = {"native": "penstocks", "http": "https", "flight": "grpc+tls"}
_EXTRAS: Final = {"flight": "flight", "capnp": "queueber"}
_WATCH_SECONDS: Final = 2.0
# The name of glibc's setting in malloc.h.
_M_ARENA_MAX: Final = -8
# As fast as somebody may connect: how soon it is looked again whether there are too many.
_CONNECTIONS_PER_SECOND: Final = 20_000
# A store that is lost gives every request its error at once.
_LOST_GRACE_MS: Final = 1_000


class Listener(Protocol):
    """What the server starts and stops; one for each protocol."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on, once it was started."""

    async def start(self) -> None:
        """Listen; InvalidInput names an address that can't be listened on."""

    async def stop(self, grace_ms: int) -> None:
        """Accept nothing more, let what is in hand be answered, then close the connections."""


class Server:
    """A store that is being served. Its methods are called on the loop's thread."""

    def __init__(self, broker: Broker, config: Config, *, clock: Clock | None = None) -> None:
        self.broker = broker
        self.config = config
        self.clock = clock or SystemClock()
        self.keys = Keys(Path(config.auth_keys)) if configuring.authenticates(config) else None
        self.tls = _tls(config)
        self.metrics = Metrics(
            queues=config.metrics_queues, access=AccessLog(info=config.log_access)
        )
        self.connections = Connections(config.limits_connections, turned_away=self.metrics.refused)
        self.desk: Desk
        self.addresses: dict[str, tuple[str, int]] = {}
        self.closing: list[Callable[[], None]] = []
        self._listeners: dict[str, Listener] = {}
        self._watches: list[asyncio.Task[None]] = []
        self._listening = False
        self._stopped = False

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen everywhere, or nowhere."""
        self.desk = self._make_desk()
        self.metrics.watch(
            self.broker,
            parked=lambda: self.desk.parked,
            connections=self._connections,
            seconds=self.clock.seconds,
            held=self.connections,
        )
        try:
            for name in LISTENERS:
                address = getattr(self.config, f"listen_{name}")
                if address == OFF:
                    continue
                host, port = configuring.parse_address(address)
                listener = _make(name, self, host, port)
                await listener.start()
                self._listeners[name] = listener
                self.addresses[name] = listener.address[:2]
                log.info("listening at %s", self.location(name))
        except BaseException:
            await self.stop(grace_ms=0)
            raise
        self._warn()
        self._make_room()
        loop = asyncio.get_running_loop()
        self._watches = [loop.create_task(self._watch_keys())]
        if "flight" in self.addresses:
            self._watches.append(loop.create_task(self._watch_flight(self.addresses["flight"][1])))
        self._listening = True

    def _make_room(self) -> None:
        """Take as many connections as there are descriptors for, beside those of the store."""
        self.connections.most = descriptors.room_for_connections(
            self.config.limits_connections, flight="flight" in self.addresses
        )
        log.info(
            "room for %d connections: %d files may be open, of which %d are kept for the store",
            self.connections.most,
            descriptors.limit(),
            descriptors.limit() - descriptors.room_for_files(),
        )

    def _make_desk(self) -> Desk:
        loop = asyncio.get_running_loop()
        if not self.config.tracing:
            return Desk(self.broker, loop)
        from penstock.server.tracing import TracedDesk  # noqa: PLC0415 - an extra

        return TracedDesk(self.broker, loop)

    def _connections(self) -> dict[str, int]:
        # Flight keeps its connections to itself.
        found = {name: getattr(each, "connections", None) for name, each in self._listeners.items()}
        return {
            name: count if isinstance(count, int) else len(count)
            for name, count in found.items()
            if count is not None
        }

    def _warn(self) -> None:
        exposed = [name for name, (host, _) in self.addresses.items() if not is_loopback(host)]
        if exposed and self.keys is None:
            log.warning("%s: anybody who can connect may do anything", ", ".join(exposed))
        elif exposed and self.tls is None:
            log.warning("%s: without TLS, keys and messages can be read on the way",
                        ", ".join(exposed))  # fmt: skip

    @property
    def unready(self) -> str | None:
        """Say that requests are not welcome, since when, and why; None: they are. Never waits."""
        if not self._listening:
            return "not ready: the server is starting or stopping"
        outage, failure = self.broker.outage, self.broker.failure
        if outage is not None:
            return f"not ready for {self.clock.seconds() - outage.since:.0f} s: {outage.why}"
        return None if failure is None else f"not ready: {failure}"

    def location(self, name: str) -> str:
        """Return the URL of a listener, for a client on this machine."""
        host, port = self.addresses[name]
        scheme = (_SCHEMES if self.tls is None else _SCHEMES | _TLS_SCHEMES)[name]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def reload(self) -> None:
        """Read keys and certificate again; what can't be used leaves things as they are."""
        if self.keys is not None:
            self.keys.reload()
        if self.tls is not None:
            try:
                # In a context of its own first: one that does not take a pair is spoilt by it.
                _tls(self.config)
                self.tls.load_cert_chain(self.config.tls_certificate, self.config.tls_key)
            except (InvalidInput, OSError) as error:
                log.error("the certificate stays as it was: %s", error)  # noqa: TRY400

    async def _watch_keys(self) -> None:
        while self.keys is not None:
            await asyncio.sleep(_WATCH_SECONDS)
            self.keys.refresh()

    async def _watch_flight(self, port: int) -> None:
        before = 0
        while True:
            closed, free = await asyncio.to_thread(descriptors.close_idle, port)
            for _ in range(closed):
                self.metrics.refused("flight")
            if closed and not before:
                log.warning("idle connections of Flight are closed: they leave too few files")
            before = closed
            await asyncio.sleep(min(max(free / _CONNECTIONS_PER_SECOND, 0.02), 0.5))

    async def stop(self, *, grace_ms: int | None = None) -> None:
        """Take nothing more, answer what is in hand, and let go; the broker stays open."""
        if self._stopped:
            return
        self._stopped, self._listening = True, False
        grace_ms = self.config.grace if grace_ms is None else grace_ms
        self.desk.hand_back()
        for watch in self._watches:
            watch.cancel()
        stops = [listener.stop(grace_ms) for listener in self._listeners.values()]
        for name, outcome in zip(
            self._listeners, await asyncio.gather(*stops, return_exceptions=True), strict=True
        ):
            if isinstance(outcome, BaseException):
                log.error("the %s listener did not stop", name, exc_info=outcome)
        for close in self.closing:
            close()
        await self.desk.close()


class _FlightEdge:
    """The Flight service, which has threads of its own, as a listener."""

    def __init__(self, server: Server, host: str, port: int) -> None:
        import pyarrow.flight  # noqa: F401, PLC0415 - an extra, which must be there

        self._server = server
        self._place = host, port
        self._listener: FlightListener | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        assert self._listener is not None
        return self._place[0], self._listener.port

    async def start(self) -> None:
        """Listen."""
        from penstock.server.listening import FlightListener, TlsFiles  # noqa: PLC0415 - an extra

        server, config = self._server, self._server.config
        tls = None
        if config.tls_certificate:
            ca = Path(config.tls_client_ca) if config.tls_client_ca else None
            tls = TlsFiles(Path(config.tls_certificate), Path(config.tls_key), ca)
        self._listener = FlightListener(
            server.broker,
            *self._place,
            server.clock,
            keys=server.keys,
            metrics=server.metrics,
            tls=tls,
        )

    async def stop(self, grace_ms: int) -> None:
        """Wait for the calls that run, on a thread."""
        assert self._listener is not None
        listener = self._listener
        await asyncio.to_thread(lambda: listener.close(grace_ms=grace_ms))


def _native(server: Server, host: str, port: int) -> Listener:
    from penstock.server.native import NativeListener  # noqa: PLC0415 - only if it is wanted

    return NativeListener(
        server.desk,
        host,
        port,
        clock=server.clock,
        keys=server.keys,
        tls=server.tls,
        metrics=server.metrics,
        connections=server.connections,
    )


def _http(server: Server, host: str, port: int) -> Listener:
    from penstock.server import operations  # noqa: PLC0415 - needs an extra
    from penstock.server.http import Http, HttpBounds  # noqa: PLC0415
    from penstock.server.http_guard import PageGuard  # noqa: PLC0415
    from penstock.server.sqs import SqsOptions, SqsService  # noqa: PLC0415

    config = server.config
    service = SqsService(
        server.desk,
        clock=server.clock,
        keys=server.keys,
        options=SqsOptions(
            account=config.account_id,
            region=config.sqs_region,
            url=config.sqs_url,
            done_retention_ms=int(config.sqs_done_retention),
        ),
        observer=server.metrics,
    )
    server.closing.append(service.close)
    bounds = HttpBounds(
        body_bytes=int(config.limits_body),
        first_byte_ms=int(config.limits_first_byte),
        request_ms=int(config.limits_request),
        idle_ms=int(config.limits_idle),
    )
    return Http(
        operations.routes(server),
        service.handle,
        host=host,
        port=port,
        tls=server.tls,
        bounds=bounds,
        connections=server.connections,
        guard=PageGuard(host, config.sqs_url) if server.keys is None else None,
    )


def _capnp(server: Server, host: str, port: int) -> Listener:
    if server.keys is not None:
        raise InvalidInput(
            "Queueber's clients know no login: set listen.capnp to off, or auth.mode to off"
        )
    from penstock.server.queueber import QueueberListener  # noqa: PLC0415 - needs an extra

    return QueueberListener(
        server.desk,
        host,
        port,
        queue=server.config.capnp_queue,
        connections=server.connections,
    )


_MAKERS: Final[dict[str, Callable[[Server, str, int], Listener]]] = {
    "native": _native,
    "http": _http,
    "flight": _FlightEdge,
    "capnp": _capnp,
}


def _make(name: str, server: Server, host: str, port: int) -> Listener:
    try:
        return _MAKERS[name](server, host, port)
    except ImportError as error:
        raise InvalidInput(
            f"{error}: serving {name} needs pip install 'penstock[{_EXTRAS.get(name, 'server')}]'"
        ) from None


def _tls(config: Config) -> ssl.SSLContext | None:
    if not config.tls_certificate:
        return None
    ca = Path(config.tls_client_ca) if config.tls_client_ca else None
    return server_tls(Path(config.tls_certificate), Path(config.tls_key), ca)


# --- running it ---------------------------------------------------------------------------------


def new_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop: uvloop's, or Python's own where that is not installed."""
    try:
        import uvloop  # noqa: PLC0415 - an extra
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _open(config: Config, clock: Clock | None = None) -> Broker:
    if not config.store:
        raise InvalidInput("which store? Give --store URL, such as rocksdb:./data")
    return penstock.open(
        _url(config),
        durability=config.durability,
        dedup_window_ms=int(config.dedup_window),
        routing=config.routing or None,
        clock=clock,
    )


def _url(config: Config) -> str:
    """Return the store's URL, with what is set apart from it."""
    if config.min_free_bytes is None:
        return config.store
    if not config.store.startswith("rocksdb:"):
        raise InvalidInput("min_free_bytes is for stores on a disk of this machine: rocksdb:PATH")
    mark = "&" if "?" in config.store else "?"
    return f"{config.store}{mark}min_free_bytes={int(config.min_free_bytes)}"


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
            try:
                in_order = _serve_once(loop, taken, say)
            except StorageFailed:
                _write_ports(config, None)
                if not config.standby:
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
    # What the server will refuse is refused before a store is made or taken from another.
    if configuring.authenticates(config):
        Keys(Path(config.auth_keys))
    tls = _tls(config)
    if not config.standby:
        _try_addresses(config, LISTENERS)
        return Taken(_open(config), config)

    def take() -> Broker:
        # A standby listens for HTTP already.
        _try_addresses(config, [name for name in LISTENERS if name != "http"])
        return _open(config)

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


def _serve_once(loop: asyncio.AbstractEventLoop, taken: Taken, say: Callable[[str], None]) -> bool:
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(_serve(Server(taken.broker, taken.config), say))
    finally:
        try:
            taken.broker.close()
        except StorageFailed as error:
            log.error("the store was not closed in order: %s", error)  # noqa: TRY400
            raise


def _share_one_heap() -> None:
    """Have all threads allocate from one heap, where the C library is glibc.

    By default it gives eight to each core, and each keeps what any thread once needed: gRPC's
    threads, which come and go, would fill them one after the other.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _settle_in() -> None:
    """Have the garbage collector leave alone what lasts, and look less often at what does not.

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
    # Whoever waits for the file must not find half of it.
    partial = path.with_name(path.name + ".part")
    try:
        partial.write_text("".join(lines))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InvalidInput(f"the port file {path} can't be written: {error.strerror}") from None


@contextmanager
def running(
    store: Broker | str, *, clock: Clock | None = None, **settings: Any
) -> Iterator[Server]:
    """Serve a broker, or the store that a URL names, from a thread of this process.

    ::

        with running("memory:", native="127.0.0.1:0") as server:
            server.location("native")

    Settings are the fields of :class:`Config` or the names of their flags; listeners that are not
    named are off.
    """
    broker = store if isinstance(store, Broker) else None
    url = "memory:" if isinstance(store, Broker) else store
    config = _config(url, settings)
    opened = broker or _open(config, clock)
    try:
        with _thread(opened, config, clock) as server:
            yield server
    finally:
        if broker is None:
            opened.close()


def _config(url: str, settings: dict[str, Any]) -> Config:
    short = {flag.removeprefix("--"): field for field, flag in configuring.FLAGS.items()}
    flags: dict[str, Any] = {f"listen_{name}": OFF for name in LISTENERS}
    for name, value in settings.items():
        field = short.get(name, name)
        if field not in configuring.SETTINGS:
            raise InvalidInput(f"no setting {name!r:.100}; there are {', '.join([*short])} …")
        flags[field] = str(value) if isinstance(value, Path) else value
    return configuring.load(environment={}, flags={**flags, "store": url}).config


@contextmanager
def _thread(broker: Broker, config: Config, clock: Clock | None) -> Iterator[Server]:
    loop = new_loop()
    server = Server(broker, config, clock=clock)
    thread = threading.Thread(target=loop.run_forever, name="penstock-server", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    finally:
        with suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
