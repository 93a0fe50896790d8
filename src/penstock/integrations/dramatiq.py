"""A broker for Dramatiq: ``dramatiq.set_broker(PenstockBroker("penstock://localhost:8814"))``.

Retries are Dramatiq's own: each is a new message. Only a worker that dies uses up an attempt of
Penstock's. Penstock itself keeps delayed messages back: there is no queue NAME.DQ. Dead letters,
and messages that are out of attempts, go to the queue NAME.XQ.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dramatiq import Broker, Consumer, Message, MessageProxy
from dramatiq.common import xq_name
from dramatiq.errors import ConnectionClosed, DecodeError, QueueJoinTimeout

import penstock
from penstock import limits
from penstock.integrations import open_broker
from penstock.worker.leases import Heartbeat
from penstock.worker.stats import WorkerCounters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class PenstockBroker(Broker):
    """Keeps messages in Penstock. ``prefix`` comes before the names of queues there.

    Further settings are those of a queue of Penstock's: ``lease_ms`` is how long the messages of a
    worker that died stay away, ``max_attempts`` how many workers may die of one message. The option
    ``broker_priority`` of a message (0 to 255) puts it before others of its ``penstock_group``.
    """

    def __init__(
        self, url: str, *, token: str = "", prefix: str = "", middleware: Any = None, **queue: Any
    ) -> None:
        """Take the settings; nothing is opened before the first message."""
        super().__init__(middleware=middleware)
        self._url, self._token, self._prefix, self._settings = url, token, prefix, queue
        self._guard = threading.RLock()
        self._pid, self._prepared = 0, set[str]()

    @property
    def store(self) -> penstock.Broker:
        """Penstock, opened when it is first used in a process; with it, the heartbeat."""
        with self._guard:
            if self._pid != os.getpid():
                self._store = open_broker(self._url, token=self._token, name="dramatiq")
                counters = WorkerCounters(clock := penstock.SystemClock(), self.logger.debug)
                # For all consumers: a message may outlive the consumer that claimed it.
                self.heartbeat = Heartbeat(self._store, clock, counters)
                self.heartbeat.start()
                self._pid = os.getpid()
            return self._store

    def close(self) -> None:
        """Close Penstock; messages that are still held come back when their leases end."""
        with self._guard:
            if self._pid == os.getpid():
                self.heartbeat.stop()
                self._store.close()
            self._pid = 0

    def declare_queue(self, queue_name: str) -> None:
        """Declare a queue; it is created when it is first used."""
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = None
            self.emit_after("declare_queue", queue_name)

    def prepare(self, queue_name: str) -> str:
        """Create a queue with that of its dead letters, if need be; return its name in Penstock."""
        queue = self._prefix + queue_name
        if queue not in self._prepared:
            try:
                self.store.queue(queue)
            except penstock.QueueNotFound:
                dead, week_ms = xq_name(queue), 7 * 86_400_000  # as with Dramatiq's other brokers
                self.store.create_queue(dead, unclaimed_retention_ms=week_ms)
                self.store.create_queue(queue, dead_letter=dead, **self._settings)
            self._prepared.add(queue)
        return queue

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Publish a message, to be worked on after ``delay`` milliseconds."""
        self.emit_before("enqueue", message, delay)
        self.publish(self.prepare(message.queue_name), message, delay_ms=delay or 0)
        self.emit_after("enqueue", message, delay)
        return message

    def publish(self, queue: str, message: Any, **more: Any) -> None:
        """Publish a message to a queue of Penstock."""
        more["group"] = message.options.get("penstock_group", "")
        more["priority"] = message.options.get("broker_priority", 0)
        attributes = {"queue": queue, "actor": message.actor_name}
        self.store.publish([penstock.Message(message.encode(), attributes, **more)])

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5_000) -> Consumer:
        """Return an iterator over messages, which waits ``timeout`` milliseconds for each."""
        return PenstockConsumer(self, queue_name, prefetch, timeout)

    def flush(self, queue_name: str) -> None:
        """Drop the messages of a queue that no worker holds."""
        self.store.purge(self.prepare(queue_name))

    def flush_all(self) -> None:
        """Drop the messages of all declared queues that no worker holds."""
        for queue_name in self.queues:
            self.flush(queue_name)

    def join(self, queue_name: str, *, interval: int = 100, timeout: int | None = None) -> None:
        """Wait until nothing is left to be done in a queue, delayed messages included."""
        queue, clock = self.prepare(queue_name), penstock.SystemClock()
        until = clock.seconds() + (timeout or limits.MAX_WAIT_MS) / 1000
        while (found := self.store.stats(queue)).available + found.delayed + found.in_flight:
            if clock.seconds() >= until:
                raise QueueJoinTimeout(queue_name)  # type: ignore[no-untyped-call]
            threading.Event().wait(interval / 1000)


@contextmanager
def connecting() -> Iterator[None]:
    """Raise the error after which Dramatiq tries again, if Penstock is away."""
    try:
        yield
    except (penstock.StorageFailed, penstock.BrokerClosed) as error:
        raise ConnectionClosed(error) from error  # type: ignore[no-untyped-call]


class PenstockConsumer(Consumer):
    """Claims up to ``prefetch`` messages. Dramatiq's worker threads settle them."""

    @connecting()
    def __init__(self, broker: PenstockBroker, name: str, prefetch: int, wait_ms: int) -> None:
        self._broker, self._queue = broker, broker.prepare(name)
        self._prefetch, self._wait_ms = min(prefetch, limits.MAX_CLAIM_LIMIT), wait_ms
        self._lease_ms = broker.store.queue(self._queue).lease_ms
        self._ahead: deque[Any] = deque()
        self._held: set[str] = set()
        self._settled = threading.Event()

    @connecting()
    def __next__(self) -> MessageProxy | None:
        """Return the next message, or None after a wait."""
        if not self._ahead:
            self._settled.clear()
            if room := self._prefetch - len(self._held):
                self._claim(room)
            else:
                self._settled.wait(self._wait_ms / 1000)
        return self._ahead.popleft() if self._ahead else None

    def _claim(self, room: int) -> None:
        worker, store = f"{socket.gethostname()}-{os.getpid()}", self._broker.store
        claimed = store.claim(self._queue, limit=room, wait_ms=self._wait_ms, consumer=worker)
        receipts = [each.receipt for each in claimed]
        self._broker.heartbeat.hold(receipts, lease_ms=self._lease_ms)
        self._held.update(receipts)
        for each in claimed:
            try:
                message: Any = MessageProxy(Message.decode(each.payload))
                message.receipt = each.receipt
                self._ahead.append(message)
            except DecodeError as error:
                # It is tried again, by a program that may know its encoding, and dead at last.
                self._settle(store.release, [each.receipt], reason=f"{error} {error.error}")

    @connecting()
    def _settle(self, verb: Any, receipts: list[str], **how: Any) -> None:
        if receipts and not all(verb(receipts, **how)):
            self._broker.logger.warning("a lease had ended: its message may be worked on twice")
        self._broker.heartbeat.forget(receipts)
        self._held.difference_update(receipts)
        self._settled.set()

    def ack(self, message: Any) -> None:
        """Settle a message as done."""
        self._settle(self._broker.store.ack, [message.receipt])

    @connecting()
    def nack(self, message: Any) -> None:
        """Put a message among the dead letters, once even if it is tried again."""
        self._broker.publish(xq_name(self._queue), message, dedup_id=message.receipt)
        self.ack(message)

    def requeue(self, messages: Iterable[Any]) -> None:
        """Give messages back that were not begun, to their old places."""
        receipts = [message.receipt for message in messages]
        self._settle(self._broker.store.release, receipts, unseen=True)

    def close(self) -> None:
        """Give back what was claimed ahead."""
        self.requeue(self._ahead)
        self._ahead.clear()
