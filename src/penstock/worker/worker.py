"""The public face: a worker that draws from queues, runs a handler, and settles what it did.

>>> import penstock
>>> done = []
>>> with penstock.open("memory:") as broker:
...     _ = broker.create_queue("orders")
...     with penstock.Worker(broker, "orders", lambda d: done.append(d.payload)) as worker:
...         _ = broker.send("orders", b"one book")
...         while not worker.stats().processed:
...             worker.join(10)
>>> done
[b'one book']
"""

from __future__ import annotations

import logging
import queue as queues
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast

from penstock.clock import Clock, SystemClock
from penstock.errors import InvalidInput
from penstock.urls import open as open_store
from penstock.validation import check_queue_name
from penstock.worker.handling import check_middleware, is_async, resolve
from penstock.worker.retry import is_final
from penstock.worker.runtime import Runtime
from penstock.worker.settings import Settings
from penstock.worker.source import Collisions, source_of
from penstock.worker.stats import Meters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType, TracebackType

    from penstock.broker.broker import Broker
    from penstock.client import Client
    from penstock.model import Delivery
    from penstock.worker.handling import Handler
    from penstock.worker.stats import WorkerStats

__all__ = ["Worker"]

log = logging.getLogger("penstock.worker")

# What the thread that looks after a worker is told.
STOP: Final = "stop"
AT_ONCE: Final = "at once"
IDLE: Final = "idle"
BROKEN: Final = "broken"


class Worker:
    """Runs a handler for every message of one or more queues.

    ``store`` is a URL, which the worker opens and closes, or an open broker or client, which it
    leaves open. ``handler`` is a function of a :class:`penstock.Delivery`, plain or ``async``, or
    the name of one, ``MODULE:FUNCTION``. Its return acks the message; what it raises releases it
    with the error as the reason (see :class:`penstock.Retry`, :class:`penstock.Settled`).
    """

    def __init__(
        self,
        store: str | Broker | Client,
        queue: str | Sequence[str],
        handler: Handler | str,
        *,
        concurrency: int = 4,
        mode: Literal["threads", "processes"] = "threads",
        lease_ms: int | None = None,
        prefetch: int | None = None,
        time_limit_ms: int | None = None,
        consumer: str | None = None,
        middleware: Sequence[object] = (),
        drain_ms: int = 30_000,
        dequeue_max: int = 100,
        wait_ms: int = 500,
        scan_interval_ms: int = 100,
        clock: Clock | None = None,
    ) -> None:
        """Check what is asked for; nothing is opened before :meth:`run` or :meth:`start`."""
        self._settings = Settings(
            concurrency=concurrency,
            mode=mode,
            lease_ms=lease_ms,
            prefetch=prefetch,
            time_limit_ms=time_limit_ms,
            consumer=consumer,
            drain_ms=drain_ms,
            dequeue_max=dequeue_max,
            wait_ms=wait_ms,
            scan_interval_ms=scan_interval_ms,
        ).checked()
        self._queues = _queues(queue)
        self._handler = handler
        self._middleware = tuple(middleware)
        function = resolve(handler)
        check_middleware(function, self._middleware)
        # A thread over its time limit goes on beside whoever gets the next message of its group.
        can_end = mode == "processes" or is_async(function)
        self._fifo = can_end or time_limit_ms is None
        if mode == "processes":
            from penstock.worker.pool_processes import check_sendable  # noqa: PLC0415

            check_sendable(handler, self._middleware)
        self._store = store
        self._clock = clock or SystemClock()
        self._runtime: Runtime | None = None
        self._broker: Broker | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()
        # A signal handler may put into it at any moment, also into the middle of another put.
        self._told: queues.SimpleQueue[tuple[str, BaseException | None]] = queues.SimpleQueue()

    # --- running -----------------------------------------------------------------------------

    def run(self) -> None:
        """Work until it is stopped: by :meth:`stop`, or on the main thread by SIGTERM or SIGINT.

        A second signal stops it at once. Raises what can't get better: a queue that is not there
        at the start, or a store that this process has lost.
        """
        self._open()
        with _signals(self):
            self._look_after()
        self._raise()

    def start(self) -> Self:
        """Work in the background until :meth:`stop`; returns once it has begun."""
        self._open()
        self._thread = threading.Thread(
            target=self._look_after, name="penstock-worker", daemon=True
        )
        self._thread.start()
        return self

    def stop(self, *, at_once: bool = False) -> None:
        """Ask it to stop, from any thread, and return; :meth:`join` waits for the end.

        No more is claimed, what has not begun is given back, what runs may finish within
        ``drain_ms``, and the rest is released. ``at_once`` does not wait for what runs.
        """
        self._told.put((AT_ONCE if at_once else STOP, None))

    def join(self, timeout_ms: int | None = None) -> bool:
        """Wait for the end, for so long at the most; say whether it has come.

        Raises what :meth:`run` would have raised. One whose start failed is at its end.
        """
        if not self._over.is_set():
            self._running()
        over = self._over.wait(None if timeout_ms is None else timeout_ms / 1000)
        if over:
            self._raise()
        return over

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._over.wait()
        if error is None:
            self._raise()

    # --- looking -----------------------------------------------------------------------------

    def stats(self) -> WorkerStats:
        """Return what it has done so far, and what it has in its hands."""
        if self._runtime is None:
            return Meters().shown(in_progress=0, prefetched=0, unsettled=0, troubles=())
        return self._runtime.stats()

    def is_lost(self, delivery: Delivery) -> bool:
        """Whether the lease of a message was lost: a handler may look, and give up.

        Not from a child process, which has no worker.
        """
        return not self._running().live(delivery.receipt)

    def _running(self) -> Runtime:
        if self._runtime is None:
            raise InvalidInput("the worker has not been started")
        return self._runtime

    # --- the thread that looks after it ----------------------------------------------------------

    def _open(self) -> None:
        if self._runtime is not None:
            raise InvalidInput("a worker runs once: make another")
        self._over.clear()
        settings = self._settings
        try:
            if settings.mode == "processes":
                from penstock.worker.pool_processes import check_possible  # noqa: PLC0415

                check_possible()
            # A client has the verbs of a broker: who is given either need not know which.
            broker = open_store(self._store) if isinstance(self._store, str) else self._store
            self._broker = cast("Broker", broker)
            collisions = Collisions(self._broker)
            sources = [
                source_of(
                    self._broker,
                    name,
                    clock=self._clock,
                    lease_ms=settings.lease_ms,
                    consumer=settings.consumer or "",
                    fifo=self._fifo,
                    collisions=collisions,
                )
                for name in self._queues
            ]
            runtime = Runtime(
                self._broker,
                sources,
                self._handler,
                self._middleware,
                settings,
                self._clock,
                on_idle=lambda: self._told.put((IDLE, None)),
                on_error=self._failed,
                on_broken=lambda error: self._told.put((BROKEN, error)),
            )
            self._runtime = runtime
            runtime.start()
        except BaseException:
            self._close()
            self._over.set()
            raise
        log.info(
            "working on %s: %d %s", ", ".join(self._queues), settings.concurrency, settings.mode
        )

    def _failed(self, error: Exception) -> None:
        if is_final(error, self._broker):
            self._told.put((BROKEN, error))

    def _close(self) -> None:
        """Close a store of its own."""
        broker, self._broker = self._broker, None
        if isinstance(self._store, str) and broker is not None:
            broker.close()

    def _look_after(self) -> None:
        runtime = self._running()
        try:
            broken = self._wait()
            runtime.finish(settle=broken is None or not is_final(broken, self._broker))
            self._error = broken
            self._close()
        except BaseException as error:
            # Raised by run() and join(): nobody would see it on a thread of its own.
            self._error = error
        finally:
            log.info("stopped")
            self._over.set()

    def _wait(self) -> BaseException | None:
        """Wait until the worker is to end; return what has broken it, if anything has."""
        word, error = self._told.get()
        while word == IDLE:
            word, error = self._told.get()
        if word != STOP:
            return error
        self._running().drain()
        until = self._clock.seconds() + self._settings.drain_ms / 1000
        while not self._running().drained():
            left = until - self._clock.seconds()
            if left <= 0:
                return None
            try:
                word, error = self._told.get(timeout=left)
            except queues.Empty:
                return None
            if word in {AT_ONCE, BROKEN}:
                return error
        return None

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


@contextmanager
def _signals(worker: Worker) -> Iterator[None]:
    """Have signals stop a worker, if this is the thread that gets them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def told(number: int, _: FrameType | None) -> None:
        worker.stop(at_once=bool(seen))
        seen.append(number)

    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            # One that was not set from Python can't be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _queues(queue: str | Sequence[str]) -> list[str]:
    names = [queue] if isinstance(queue, str) else list(queue)
    if not names:
        raise InvalidInput("a worker needs at least one queue")
    for name in names:
        check_queue_name(name)
    return list(dict.fromkeys(names))
