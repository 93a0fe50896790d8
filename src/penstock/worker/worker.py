"""The public face: a worker claims from queues, runs a handler for each message, and settles it.

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

Its parts, each with threads of its own::

             claim               take              finish
    store ──────────▶ state ──────────▶ pool ──────────────▶ settler ──ack, release──▶ store
           claimer      ▲   handler's end │                     ▲
           (one a queue)│ ◀───────────────┘                     │ given back
                        └── lost ── heartbeat ──extend──▶ store └── over limit, cut off
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Final, Literal, Self, cast

from penstock import limits
from penstock.broker.broker import Broker
from penstock.clock import Clock, SystemClock
from penstock.errors import BrokerClosed, InvalidInput, StoreFenced
from penstock.urls import open as open_store
from penstock.validation import check_count, check_optional, check_queue_name, check_text, cut_text
from penstock.waiter import Inbox
from penstock.worker.leases import Claimer, Heartbeat, Settler
from penstock.worker.outcome import check_middleware, is_async, resolve
from penstock.worker.pools import (
    AsyncPool,
    Pool,
    ProcessPool,
    ThreadPool,
    check_child_options,
    check_children_possible,
)
from penstock.worker.state import WorkerSettings, WorkerState
from penstock.worker.stats import WorkerCounters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.client import Client
    from penstock.model import Delivery
    from penstock.worker.outcome import Handler
    from penstock.worker.stats import WorkerStats

log = logging.getLogger("penstock.worker")

# Events for the thread that supervises a worker.
STOP: Final = "stop"
STOP_AT_ONCE: Final = "stop at once"
CHANGED: Final = "changed"
BROKEN: Final = "broken"

# How long handlers that were cut off may take to end, and the store to confirm the last calls.
CUT_MS: Final = 1_000
LAST_SETTLE_MS: Final = 5_000
# Time that each step of the end has at least.
LEAST_MS: Final = 100


class Worker:
    """Runs a handler for every message of one or more queues.

    ``store`` is a URL, which the worker opens and closes, or an open broker or client, which it
    leaves open. ``handler`` is a function of a :class:`penstock.Delivery`, plain or ``async``, or
    the name of one, ``MODULE:FUNCTION``. Its return acks the message; an error that it raises
    releases it with the error as the reason (see :class:`penstock.Retry`,
    :class:`penstock.Settled`).
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
        child_messages: int | None = None,
        child_memory_bytes: int | None = None,
        ready_file: str | Path | None = None,
        clock: Clock | None = None,
        tracing: bool = False,
    ) -> None:
        """Check the options; nothing is opened before :meth:`run` or :meth:`start`."""
        if mode not in {"threads", "processes"}:
            raise InvalidInput(f"mode is 'threads' or 'processes', not {mode!r:.100}")
        if mode == "threads" and (child_messages is not None or child_memory_bytes is not None):
            raise InvalidInput(
                "child_messages and child_memory_bytes are for mode='processes': a thread can't "
                "be replaced"
            )
        self._mode = mode
        check_optional(lease_ms, "lease_ms", 1, limits.MAX_LEASE_MS)
        check_optional(time_limit_ms, "time_limit_ms", 1)
        check_count(concurrency, "concurrency", 1, limits.MAX_CONCURRENCY)
        check_optional(prefetch, "prefetch", 0, limits.MAX_CLAIM_LIMIT)
        self._ready_file = None if ready_file is None else Path(ready_file)
        if tracing:
            # Loaded when used: it needs an extra.
            from penstock.tracing import TraceMiddleware  # noqa: PLC0415

            middleware = (TraceMiddleware(), *middleware)
        if consumer is None:
            consumer = cut_text(f"{socket.gethostname()}-{os.getpid()}", limits.MAX_CONSUMER_BYTES)
        self._settings = WorkerSettings(
            handler,
            tuple(middleware),
            concurrency=concurrency,
            prefetch=prefetch,
            lease_ms=lease_ms,
            time_limit_ms=time_limit_ms,
            consumer=check_text(consumer, "consumer", limits.MAX_CONSUMER_BYTES),
            drain_ms=check_count(drain_ms, "drain_ms"),
            dequeue_max=check_count(dequeue_max, "dequeue_max", 1, limits.MAX_CLAIM_LIMIT),
            wait_ms=check_count(wait_ms, "wait_ms", high=limits.MAX_WAIT_MS),
            scan_interval_ms=check_count(scan_interval_ms, "scan_interval_ms", 1),
            child_messages=child_messages,
            child_memory_bytes=child_memory_bytes,
        )
        self._queues = list(dict.fromkeys([queue] if isinstance(queue, str) else queue))
        if not self._queues:
            raise InvalidInput("a worker needs at least one queue")
        for name in self._queues:
            check_queue_name(name)
        self._function = resolve(handler)
        check_middleware(self._function, self._settings.middleware)
        if mode == "processes":
            check_child_options(self._settings)
        self._store = store
        self._clock = clock or SystemClock()
        self._broker: Broker | None = None
        self._started = self._hurried = False
        self._error: BaseException | None = None
        self._ended = threading.Event()
        # A signal handler may put into it at any moment, also into the middle of another put.
        self._events: Inbox[tuple[str, BaseException | None]] = Inbox()

    # --- running -----------------------------------------------------------------------------

    def run(self) -> None:
        """Work until it is stopped: by :meth:`stop`, or on the main thread by SIGTERM or SIGINT.

        A second signal stops it at once. Raises errors that can't get better: a queue that is not
        there at the start, or a store that this process has lost.
        """
        self._open()
        with _signals(self):
            self._supervise()
        self._raise()

    def start(self) -> Self:
        """Work in the background until :meth:`stop`; returns once it has begun."""
        self._open()
        threading.Thread(target=self._supervise, name="penstock-worker", daemon=True).start()
        return self

    def stop(self, *, at_once: bool = False) -> None:
        """Ask it to stop, from any thread, and return; :meth:`join` waits for the end.

        No more is claimed, messages that have not begun are given back, handlers that run may
        finish within ``drain_ms``, and the rest is released. ``at_once`` does not wait for
        handlers that run.
        """
        self._events.put((STOP_AT_ONCE if at_once else STOP, None))

    def join(self, timeout_ms: int | None = None) -> bool:
        """Wait for the end, for so long at the most; say whether it has come.

        Raises what :meth:`run` would have raised. A worker whose start failed is at its end.
        """
        if not self._ended.is_set():
            self._check_started()
        ended = self._ended.wait(None if timeout_ms is None else timeout_ms / 1000)
        if ended:
            self._raise()
        return ended

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        self.stop()
        self._ended.wait()
        if error is None:
            self._raise()

    # --- looking -----------------------------------------------------------------------------

    def stats(self) -> WorkerStats:
        """Return its counters since the start, and how many messages it holds."""
        if not self._started:
            return WorkerCounters(self._clock, self._report_error, self._queues).snapshot()
        return self._state.stats()

    def is_lost(self, delivery: Delivery) -> bool:
        """Whether the lease of a message was lost: a handler may look, and give up.

        Not from a child process, which has no worker.
        """
        self._check_started()
        return not self._heartbeat.is_live(delivery.receipt)

    def _check_started(self) -> None:
        if not self._started:
            raise InvalidInput("the worker has not been started")

    # --- its parts -------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._started:
            raise InvalidInput("a worker runs once: make another")
        if self._ready_file is not None:
            if not self._ready_file.parent.is_dir():
                raise InvalidInput(f"no directory for the ready file {self._ready_file}")
            # That of a worker that was killed.
            self._ready_file.unlink(missing_ok=True)
        self._ended.clear()
        try:
            if self._mode == "processes":
                check_children_possible()
            broker = open_store(self._store) if isinstance(self._store, str) else self._store
            # A client has the verbs of a broker.
            self._broker = cast("Broker", broker)
            self._make_parts(self._broker)
            self._started = True
            for start in (self._heartbeat.start, self._settler.start, self._pool.start):
                start()
            for claimer in self._claimers:
                claimer.start()
        except BaseException:
            if self._started:
                # Such as no more threads: those that have begun are to end.
                self._state.close()
                self._state.end()
            self._close()
            self._ended.set()
            raise
        names = ", ".join(self._queues)
        log.info("working on %s: %d %s", names, self._settings.concurrency, self._mode)

    def _make_parts(self, broker: Broker) -> None:
        clock, settings = self._clock, self._settings
        counters = WorkerCounters(clock, self._report_error, self._queues)
        self._heartbeat = Heartbeat(broker, clock, counters)
        self._settler = Settler(broker, clock, counters, self._heartbeat)
        self._state = WorkerState(
            settings,
            # A child process is a slot once it is ready.
            0 if self._mode == "processes" else settings.concurrency,
            clock=clock,
            counters=counters,
            heartbeat=self._heartbeat,
            settler=self._settler,
            on_change=lambda: self._events.put((CHANGED, None)),
        )
        make_pool: type[Pool] = AsyncPool if is_async(self._function) else ThreadPool
        if self._mode == "processes":
            make_pool = ProcessPool
        self._pool = make_pool(self._state, self._report_broken)
        # A thread over its time limit goes on beside the handler of its group's next message.
        fifo = make_pool is not ThreadPool or settings.time_limit_ms is None
        make_claimer: type[Claimer] = Claimer
        # With credit for several queues a server would push more than there are free slots.
        exact = settings.prefetch == 0 and len(self._queues) > 1
        if hasattr(broker, "subscribe") and not exact:
            # Loaded when used: an embedded broker needs nothing of the client.
            from penstock.worker.subscriber import Subscriber  # noqa: PLC0415

            make_claimer = Subscriber
        self._claimers = [
            make_claimer(broker, queue, self._state, fifo=fifo) for queue in self._queues
        ]

    def _close(self) -> None:
        """Close a store of its own."""
        broker, self._broker = self._broker, None
        if not isinstance(self._store, str) or broker is None:
            return
        threads = [*self._claimers, self._heartbeat, self._settler] if self._started else []
        if any(each.is_alive() for each in threads):
            # It would wait for their calls.
            log.warning("the store does not answer: it is left to close by itself")
            threading.Thread(target=_close_in_the_end, args=(broker,), daemon=True).start()
        else:
            broker.close()

    # --- the thread that supervises it -----------------------------------------------------------

    def _report_broken(self, error: BaseException) -> None:
        self._events.put((BROKEN, error))

    def _report_error(self, error: Exception) -> None:
        if is_final(error, self._broker):
            self._report_broken(error)

    def _supervise(self) -> None:
        try:
            broken = self._wait()
            self._finish(settle=broken is None or not is_final(broken, self._broker))
            self._error = broken
            self._close()
        except BaseException as error:
            # Raised by run() and join(): nobody would see it on a thread of its own.
            self._error = error
        finally:
            log.info("stopped")
            self._ended.set()

    def _wait(self) -> BaseException | None:
        """Wait until the worker is to end; return the error that has broken it, if one has."""
        event, error = CHANGED, None
        while event == CHANGED:
            self._note_ready()
            event, error = self._events.take()
        self._hurried = event == STOP_AT_ONCE
        if event != STOP:
            return error
        back = self._close_state()
        log.info("stopping: %d messages are finished, %d given back", self._state.counts[0], back)
        until = self._clock.seconds() + self._settings.drain_ms / 1000
        while not self._drained():
            left = until - self._clock.seconds()
            if left <= 0:
                return None
            try:
                event, error = self._events.take(left)
            except Empty:
                return None
            if event in {STOP_AT_ONCE, BROKEN}:
                self._hurried = event == STOP_AT_ONCE
                return error
        return None

    def _close_state(self) -> int:
        """Claim and begin no more messages; return how many have not begun."""
        back = self._state.close()
        self._note_ready()
        for claimer in self._claimers:
            claimer.stop()
        return back

    def _note_ready(self) -> None:
        """Make the ready file while the worker can take messages, and remove it when it can't."""
        if self._ready_file is None:
            return
        try:
            if self._state.ready:
                self._ready_file.touch()
            else:
                self._ready_file.unlink(missing_ok=True)
        except OSError as error:
            log.error("the ready file %s: %s", self._ready_file, error)  # noqa: TRY400

    def _drained(self) -> bool:
        """Whether a worker that is stopping has nothing left to do."""
        if not all(claimer.ended for claimer in self._claimers):
            return False
        self._state.give_back()
        return self._state.idle

    def _finish(self, *, settle: bool) -> None:
        """Cut off handlers, settle what can be, and end; without ``settle``, only end.

        A store may hang in the call of any thread: each is waited for for so long.
        """
        until = self._clock.seconds() + CUT_MS / 1000

        def within(ms: int) -> int:
            """Return how long a step may take: in a hurry, what is left of the time for all."""
            left_ms = int(1000 * (until - self._clock.seconds()))
            return max(LEAST_MS, min(ms, left_ms)) if self._hurried else ms

        self._close_state()
        # A claim that is under way would take again the messages that are given back.
        last_claim_ms = self._settings.wait_ms + LAST_SETTLE_MS
        for claimer in self._claimers:
            claimer.join(within(last_claim_ms if settle else CUT_MS) / 1000)
        self._state.give_back()
        if not self._state.idle and self._pool.cut():
            self._state.wait_for_idle(within(CUT_MS))
        cut_off = self._state.abandon()
        left = self._settler.finish(within(LAST_SETTLE_MS) if settle else 0)
        self._state.end()
        self._heartbeat.stop(within_ms=within(CUT_MS))
        self._pool.join(within(CUT_MS))
        if cut_off:
            log.warning("%d handlers were cut off; their messages were given back", cut_off)
        if left:
            log.warning("%d messages could not be settled; they come back with their lease", left)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def is_final(error: BaseException, broker: object) -> bool:
    """Whether trying again can't help, so that the worker ends.

    That is so if a broker of this very process is closed or has lost its store to another, or a
    client was closed or refused for good.
    """
    if isinstance(broker, Broker):
        return isinstance(error, BrokerClosed | StoreFenced)
    # Not by the error: a server that is stopping says that it is closed, and the next one may be on
    # its way; a client that was refused for good raises what it was refused with.
    return bool(getattr(broker, "closed", False))


def _close_in_the_end(broker: Broker) -> None:
    try:
        broker.close()
    except Exception as error:
        log.warning("the store was not closed in order: %s", error)


@contextmanager
def _signals(worker: Worker) -> Iterator[None]:
    """Let SIGTERM and SIGINT stop a worker, if this is the thread that gets them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def stop(number: int, _: object) -> None:
        worker.stop(at_once=bool(seen))
        seen.append(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            # A handler that was not set from Python can't be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
