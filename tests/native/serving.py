"""A native server on a thread of the test, and a broker that is reached through it."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import uvloop

import penstock
from penstock.client.calls import Verbs
from penstock.clock import SystemClock
from penstock.model import Message
from penstock.server.batcher import Batcher
from penstock.server.connections import Connections
from penstock.server.metrics import Metrics
from penstock.server.native import NativeListener
from penstock.store.codec.claimed import ClaimedFrame
from penstock.wire import native as wire
from penstock.wire.frames import FrameReader

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path
    from types import TracebackType

    from penstock.broker.broker import Broker
    from penstock.client import Client
    from penstock.clock import Clock

T = TypeVar("T")

# How long something may take that happens at once on a machine that is not busy.
SLOW_SECONDS = 60

encoder = wire.Encoder()
HELLO = encoder.frame(wire.Hello(wire.MAGIC, wire.VERSION))

VERB_NAMES = {name for name in vars(Verbs) if not name.startswith("_")}


def message(body: bytes = b"") -> Message:
    return Message(body, {"queue": "q"})


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def make_impatient(client: Client, patience_ms: int) -> None:
    """Shorten the patience of a client that has connected, however long that took."""
    connection = client._transport.connection
    connection.options = msgspec.structs.replace(connection.options, patience_ms=patience_ms)


def tls_contexts(place: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Make a server's context, and that of a client which trusts it."""
    key, certificate = place / "key.pem", place / "certificate.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", str(key)),
            *("-out", str(certificate), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
        ],
        capture_output=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    return server_side, trusting


def served_by(batcher: Batcher, **options: Any) -> Any:
    """Make a stand-in for the server of a listener: its keys, TLS context and counters."""
    tls = options.pop("tls", None)
    given: dict[str, Any] = {"keys": None, "metrics": Metrics(), "connections": Connections()}
    given["tls"] = SimpleNamespace(context=lambda _: tls)
    return SimpleNamespace(batcher=batcher, **{**given, **options})


class Served:
    """An open broker, served on a free port until it is stopped; the broker stays open."""

    def __init__(
        self,
        broker: Broker,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        """Start to serve; ``options`` are those of :func:`served_by`."""
        self.broker = broker
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="penstock-native", daemon=True
        )
        self._thread.start()
        self._running = True

        async def start() -> tuple[Batcher, NativeListener]:
            batcher = Batcher(broker, asyncio.get_running_loop())
            server = served_by(batcher, clock=clock or SystemClock(), **options)
            listener = NativeListener(server, host, port)
            try:
                await listener.start()
            except BaseException:
                await batcher.close()
                raise
            return batcher, listener

        try:
            self.batcher, self.listener = self.do(start())
        except BaseException:
            self._end()
            raise
        self.port = self.listener.address[1]
        self.url = f"penstock://{host}:{self.port}"

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self, *, grace_ms: int = SLOW_SECONDS * 1000) -> None:
        """Answer what is in hand, and end."""
        if self._running:
            self.do(self._stop(grace_ms))
            self._end()

    async def _stop(self, grace_ms: int) -> None:
        await self.listener.stop(grace_ms)
        await self.batcher.close()

    def cut(self) -> None:
        """Break every connection, as a network would."""

        async def cut() -> None:
            for connection in list(self.listener.connections):
                connection.abort()

        self.do(cut())

    def _end(self) -> None:
        self._running = False
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Raw:
    """A connection by hand."""

    def __init__(self, served: Served, greeting: bytes = HELLO) -> None:
        self.socket = socket.create_connection(("127.0.0.1", served.port), SLOW_SECONDS)
        self._reader = FrameReader()
        self.send(greeting)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, value: object) -> wire.ServerFrame:
        self.send(encoder.frame(value))
        return self.read()

    def read(self) -> wire.ServerFrame:
        while (frame := self._reader.take()) is None:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._reader.feed(data)
        return wire.decode_answer(frame)

    def result(self, kind: Any = None) -> Any:
        frame = self.read()
        assert isinstance(frame, wire.Result), frame
        return msgspec.msgpack.decode(frame.value)

    def claimed(self) -> list[dict[str, Any]]:
        """Read the messages that answer a claim."""
        frame = msgspec.convert(self.whole(), ClaimedFrame)
        return [msgspec.structs.asdict(each) for each in frame.deliveries()]

    def whole(self) -> Any:
        """Read a result that may come in parts."""
        data = b""
        while isinstance(frame := self.read(), wire.Part):
            data += frame.data
            if frame.last:
                return msgspec.msgpack.decode(data)
        assert isinstance(frame, wire.Result), frame
        return msgspec.msgpack.decode(frame.value)

    def ended(self) -> bool:
        try:
            self.read()
        except (EOFError, OSError):
            return True
        return False


class _Waiters:
    """What a test of the suites looks at to see that a claim waits."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher

    @property
    def _waiters(self) -> int:
        return self._batcher.parked


class Remote:
    """A broker whose verbs go through a client and a server; the rest is its own."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._served = Served(broker, clock=clock)
        self._runner = _Waiters(self._served.batcher)
        self.client: Client = penstock.connect(self._served.url, dedup=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client if name in VERB_NAMES else self._broker, name)

    def close(self) -> None:
        self.client.close()
        self._served.stop()
        self._broker.close()
