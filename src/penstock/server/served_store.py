"""A store that is served: its batcher, its listeners, and an end in good order.

:mod:`penstock.server.process` is the process around it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import penstock
from penstock import limits
from penstock.broker.broker import Broker
from penstock.clock import SystemClock, loop_seconds
from penstock.errors import InvalidInput, PenstockError, did_you_mean, needs_extra
from penstock.readers import note_server
from penstock.server import config as configuring
from penstock.server.access import Access
from penstock.server.audit import Actor, AuditLog
from penstock.server.backup import ServerBackups
from penstock.server.batcher import Batcher
from penstock.server.config import LISTENERS, OFF, Config, tls_files
from penstock.server.connections import (
    Connections,
    Listener,
    close_idle,
    file_limit,
    room_for_connections,
    room_for_files,
)
from penstock.server.metrics import Metrics
from penstock.server.security import is_loopback

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from penstock.clock import Clock
    from penstock.server.admin import Pages
    from penstock.server.console import Console
    from penstock.server.metrics import Gauge

log = logging.getLogger(__name__)

# How often a timer tells how late the loop is.
_LAG_SECONDS: Final = 0.25
_OPS_GRACE_MS: Final = 1_000
# How often backups are looked for that others have made.
_BACKUPS_SECONDS: Final = 600.0
# The most connections in a second, which decides how soon the descriptors are counted again.
_CONNECTIONS_PER_SECOND: Final = 20_000


class Server(Access):
    """A store that is being served. Its methods are called on the loop's thread."""

    def __init__(self, broker: Broker, config: Config, *, clock: Clock | None = None) -> None:
        super().__init__(config)
        self.broker = broker
        self.config = config
        self.clock = clock or SystemClock()
        self.audit = AuditLog(config.audit_path, self.clock) if config.audit_path else None
        self.metrics = Metrics(
            queues=config.metrics_queues,
            access_level=logging.INFO if config.log_access else logging.DEBUG,
        )
        self.connections = Connections(
            config.limits_connections,
            turned_away=self.metrics.refused,
            failed=self.metrics.refusals.handshake,
        )
        self.batcher: Batcher
        self.console: Console | None = None
        self.addresses: dict[str, tuple[str, int]] = {}
        self.closing: list[Callable[[], None]] = []
        self._watches: list[asyncio.Task[None]] = []
        self._listening = False
        self._draining = False
        self._stopped = False

    # --- life --------------------------------------------------------------------------------

    async def start(self, bound: Mapping[str, list[socket.socket]] | None = None) -> None:
        """Listen everywhere, or nowhere; ``bound`` are sockets of listeners, by their name."""
        loop = asyncio.get_running_loop()
        self.batcher = Batcher(self.broker, loop)
        self.batcher.backups = ServerBackups(self.config.store, self.config.backup_directory)
        self.batcher.note_claimed = self.metrics.queues.note_claimed
        self.batcher.audit = self.audit
        self.metrics.gauges = self.gauges
        self.metrics.watch(self.broker, seconds=self.clock.seconds)
        try:
            load_protocols(self.config)
            for name, (host, port) in self.config.addresses().items():
                listener = _KINDS[name].make(self, host, port)
                listener.take((bound or {}).get(name, []))
                await listener.start()
                self.listeners[name] = listener
                self.addresses[name] = listener.address[:2]
                log.info("listening at %s", self.location(name))
        except BaseException:
            await self.stop(grace_ms=0)
            raise
        if "native" in self.addresses:
            note_server(self.config.store, self.location("native"))
        self._warn()
        self._make_room()
        watched = (self.watch_keys, self._watch_loop, self._watch_backups)
        self._watches = [loop.create_task(each()) for each in watched]
        if "flight" in self.addresses:
            self._watches.append(loop.create_task(self._watch_flight(self.addresses["flight"][1])))
        self._listening = True

    def _make_room(self) -> None:
        """Take as many connections as there are descriptors for, beside those of the store."""
        self.connections.places.most = room_for_connections(
            self.config.limits_connections, flight="flight" in self.addresses
        )
        log.info(
            "room for %d connections: %d files may be open, of which %d are kept for the store",
            self.connections.most,
            file_limit(),
            file_limit() - room_for_files(),
        )

    def gauges(self) -> Iterator[Gauge]:
        """Give the gauges of connections and claims; any thread may ask."""
        # gRPC keeps the connections of Flight to itself.
        listeners = list(self.listeners.items())
        count = {name: len(each.connections) for name, each in listeners if name != "flight"}
        yield "connections", "Open connections.", count, "protocol"
        yield "connections_max", "Most connections at a time.", self.connections.most
        yield "buffered_bytes", "Bytes of unfinished requests.", self.connections.held_bytes
        yield "parked_claims", "Claims that wait for a message.", self.batcher.parked
        about = "Subscriptions of a queue, and claims that wait for its messages."
        yield "queue_consumers", about, self.batcher.consumers(), "queue"
        yield from super().gauges()
        if self.batcher.backups.last_ms is not None:
            about = "When the last backup was made, in seconds since the epoch."
            yield "last_backup_timestamp_seconds", about, self.batcher.backups.last_ms / 1000
        lost = 0 if self.audit is None else self.audit.lost
        yield "audit_records_lost", "Records that the audit log could not take.", lost

    def audited_for_flight(self, key_id: str, address: str) -> Broker:
        """Return the broker for one call of Flight."""
        if self.audit is None:
            return self.broker
        return self.audit.watch(self.broker, Actor("flight", key_id, address))

    def _warn(self) -> None:
        hosts = {name: host for name, (host, _) in self.addresses.items() if name != "ops"}
        exposed = [name for name, host in hosts.items() if not is_loopback(host)]
        if exposed and self.keys is None:
            log.warning("%s: anybody who can connect may do anything", ", ".join(exposed))
        elif exposed and not self.tls:
            log.warning("%s: without TLS, keys and messages can be read on the way",
                        ", ".join(exposed))  # fmt: skip

    @cached_property
    def pages(self) -> Pages:
        """The pages for operators, of whatever listener."""
        from penstock.server.admin import Pages  # noqa: PLC0415 - only if they are wanted

        return Pages(self)

    @property
    def unready(self) -> str | None:
        """Why the server takes no requests, and since when; None: it does. Never waits."""
        if not self._listening:
            return "not ready: the server is starting or stopping"
        if self._draining:
            return "not ready: the server is stopping; calls are still served"
        outage, failure = self.broker.outage, self.broker.failure
        if outage is not None:
            return f"not ready for {self.clock.seconds() - outage.since:.0f} s: {outage.why}"
        return None if failure is None else f"not ready: {failure}"

    def location(self, name: str) -> str:
        """Return the URL of a listener, for a client on this machine."""
        host, port = self.addresses[name]
        scheme = _KINDS[name].tls_scheme if self.tls else _KINDS[name].scheme
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def _watch_loop(self) -> None:
        while True:
            due = loop_seconds() + _LAG_SECONDS
            await asyncio.sleep(_LAG_SECONDS)
            self.metrics.loop_lag.add(max(0.0, loop_seconds() - due))

    async def _watch_flight(self, port: int) -> None:
        before = 0
        while True:
            closed, free = await asyncio.to_thread(close_idle, port)
            for _ in range(closed):
                self.metrics.refused("flight")
            if closed and not before:
                log.warning("idle connections of Flight are closed: they leave too few files")
            before = closed
            await asyncio.sleep(min(max(free / _CONNECTIONS_PER_SECOND, 0.02), 0.5))

    async def _watch_backups(self) -> None:
        """Look for new backups now and then: others may make them, and S3 may not answer."""
        while self.config.backup_directory:
            try:
                await asyncio.to_thread(self.batcher.backups.look)
            except PenstockError as error:
                log.warning("backup.directory can't be read: %s", error)
            await asyncio.sleep(_BACKUPS_SECONDS)

    def drain(self) -> None:
        """Be not ready from now on, so that load balancers send nobody; calls are still served."""
        self._draining = True

    async def stop(self, *, grace_ms: int | None = None) -> None:
        """Accept no more, answer the requests at work, and close; the broker stays open."""
        if self._stopped:
            return
        self._stopped, self._listening = True, False
        grace_ms = self.config.grace if grace_ms is None else grace_ms
        self.batcher.end_waits()
        for watch in self._watches:
            watch.cancel()
        # Probes are answered to the end: alive, and not ready.
        ops = self.listeners.pop("ops", None)
        stops = [listener.stop(grace_ms) for listener in self.listeners.values()]
        for name, outcome in zip(
            self.listeners, await asyncio.gather(*stops, return_exceptions=True), strict=True
        ):
            if isinstance(outcome, BaseException):
                log.error("the %s listener did not stop", name, exc_info=outcome)
        for close in self.closing:
            close()
        await self.batcher.close()
        if ops is not None:
            await ops.stop(min(grace_ms, _OPS_GRACE_MS))
        if self.audit is not None:
            self.audit.close()


# --- listeners, one for each protocol -------------------------------------------------------------


def _native(server: Server, host: str, port: int) -> Listener:
    from penstock.server.native import NativeListener  # noqa: PLC0415 - only if it is wanted

    return NativeListener(server, host, port)


def _http(server: Server, host: str, port: int) -> Listener:
    from penstock.server import admin  # noqa: PLC0415
    from penstock.server.http import HttpBounds  # noqa: PLC0415
    from penstock.server.http_connection import Http  # noqa: PLC0415
    from penstock.server.sqs import SqsOptions, SqsService  # noqa: PLC0415

    config = server.config
    service = SqsService(
        server.batcher,
        clock=server.clock,
        keys=server.keys,
        options=SqsOptions(
            account=config.account_id,
            region=config.sqs_region,
            url=config.sqs_url,
            done_retention_ms=int(config.sqs_done_retention),
            purge_interval_ms=int(config.sqs_purge_interval),
        ),
        metrics=server.metrics,
    )
    server.closing.append(service.close)
    bounds = HttpBounds(
        body_bytes=int(config.limits_body),
        first_byte_ms=int(config.limits_first_byte),
        request_ms=int(config.limits_request),
        idle_ms=int(config.limits_idle),
    )
    routes = admin.routes(server)
    console = None
    if config.console == configuring.ON:
        console = _make_console(server)
        routes["GET", "/"] = routes["GET", "/console"] = console.beside(service.handle)
    return Http(
        routes,
        service.handle,
        host=host,
        port=port,
        tls=server.tls.context("http"),
        bounds=bounds,
        slots=server.connections,
        guard=server.guard("http", host),
        tree=None if console is None else (console.prefix, console.handle),
    )


def _make_console(server: Server) -> Console:
    with needs_extra("server", "the console (--console off does without)"):
        from penstock.server.console import Console  # noqa: PLC0415 - only if it is wanted

    console = server.console = Console(server)
    console.start()
    return console


def _console(server: Server, host: str, port: int) -> Listener:
    from penstock.server.http import Response  # noqa: PLC0415
    from penstock.server.http_connection import Http  # noqa: PLC0415

    console = _make_console(server)
    return Http(
        {("GET", "/"): console.beside(None)},
        lambda _: Response(404, b"The console is at /console/.\n"),
        host=host,
        port=port,
        tls=server.tls.context("console"),
        slots=server.connections,
        guard=server.guard("console", host),
        tree=(console.prefix, console.handle),
    )


def _ops(server: Server, host: str, port: int) -> Listener:
    from penstock.server import admin  # noqa: PLC0415
    from penstock.server.http import Response  # noqa: PLC0415
    from penstock.server.http_connection import Http  # noqa: PLC0415

    # With connections of its own: a server that is full of others is alive.
    slots = Connections(limits.MAX_OPS_CONNECTIONS, turned_away=server.metrics.refused)
    return Http(
        admin.ops_routes(server),
        lambda _: Response(404, b"There are /health, /ready and /metrics.\n"),
        host=host,
        port=port,
        slots=slots,
        guard=server.guard("ops", host),
    )


class _FlightService(Listener):
    """The Flight service as a listener: it has threads of its own, and listens once it is made."""

    def __init__(self, server: Server, host: str, port: int) -> None:
        super().__init__(host, port)
        self._server = server

    async def start(self) -> None:
        """Listen."""
        from penstock.flight.listener import FlightListener  # noqa: PLC0415 - an extra

        server = self._server
        self._service = FlightListener(
            server.broker,
            *self.address,
            server.clock,
            keys=server.keys,
            metrics=server.metrics,
            audited=server.audited_for_flight,
            tls=tls_files(server.config, "flight"),
        )
        self.address = self.address[0], self._service.port

    async def stop(self, grace_ms: int) -> None:
        """Wait for the calls that run, on a thread."""
        await asyncio.to_thread(self._service.close, grace_ms=grace_ms)


def _capnp(server: Server, host: str, port: int) -> Listener:
    from penstock.server.queueber import QueueberListener  # noqa: PLC0415 - needs an extra

    return QueueberListener(
        server.batcher,
        host,
        port,
        queue=server.config.capnp_queue,
        slots=server.connections,
        metrics=server.metrics,
    )


class _Kind(NamedTuple):
    """A protocol: its modules and the extra that they need, the schemes of its URLs."""

    make: Callable[[Server, str, int], Listener]
    modules: tuple[str, ...]
    extra: str
    scheme: str
    tls_scheme: str


_KINDS: Final = {
    "native": _Kind(_native, ("penstock.server.native",), "server", "penstock", "penstocks"),
    "http": _Kind(
        _http, ("penstock.server.http_connection", "penstock.server.sqs"), "server", "http", "https"
    ),
    "ops": _Kind(_ops, ("penstock.server.http_connection",), "server", "http", "http"),
    "console": _Kind(
        _console,
        ("penstock.server.http_connection", "penstock.server.console"),
        *("server", "http", "https"),
    ),
    "flight": _Kind(_FlightService, ("penstock.flight.listener",), "flight", "grpc", "grpc+tls"),
    "capnp": _Kind(_capnp, ("penstock.server.queueber",), "queueber", "capnp", "capnp"),
}


def load_protocols(config: Config) -> None:
    """Import the modules of every protocol that is to be served."""
    for name in config.addresses():
        with needs_extra(_KINDS[name].extra, f"serving {name}"):
            for module in _KINDS[name].modules:
                importlib.import_module(module)


# --- running it ---------------------------------------------------------------------------------


def new_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop: uvloop's, or Python's own where that is not installed."""
    try:
        import uvloop  # noqa: PLC0415 - an extra
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def open_broker(config: Config, clock: Clock | None = None) -> Broker:
    """Open the store that is to be served."""
    if not config.store:
        raise InvalidInput("which store? Give --store URL, such as rocksdb:./data")
    url = config.store
    if config.min_free_bytes is not None:
        if not url.startswith("rocksdb:"):
            raise InvalidInput(
                "min_free_bytes is for stores on a disk of this machine: rocksdb:PATH"
            )
        url += f"{'&' if '?' in url else '?'}min_free_bytes={int(config.min_free_bytes)}"
    return penstock.open(
        url,
        durability=config.durability,
        dedup_window_ms=int(config.dedup_window),
        routing=config.routing or None,
        clock=clock,
    )


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
    config = _config("memory:" if isinstance(store, Broker) else store, settings)
    with ExitStack() as stack:
        if isinstance(store, str):
            store = stack.enter_context(open_broker(config, clock))
        server = Server(store, config, clock=clock)
        loop = new_loop()
        thread = threading.Thread(target=loop.run_forever, name="penstock-server", daemon=True)
        thread.start()
        stack.callback(_end, loop, thread)
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        stack.callback(lambda: asyncio.run_coroutine_threadsafe(server.stop(), loop).result())
        yield server


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    with suppress(RuntimeError):
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def _config(url: str, settings: dict[str, Any]) -> Config:
    short = {flag.removeprefix("--"): field for field, flag in configuring.FLAGS.items()}
    flags: dict[str, Any] = {f"listen_{name}": OFF for name in LISTENERS}
    for name, value in settings.items():
        field = short.get(name, name)
        if field not in configuring.SETTINGS:
            raise InvalidInput(f"no setting {name!r:.100}; {did_you_mean(name, short)}")
        flags[field] = str(value) if isinstance(value, Path) else value
    return configuring.load(environment={}, flags={**flags, "store": url}).config
