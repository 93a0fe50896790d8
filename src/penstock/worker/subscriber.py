"""Claims for a worker by subscription: the server pushes as many messages as there is room for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, cast

from penstock import limits
from penstock.client.consumers import Subscription
from penstock.worker.leases import Claimer

if TYPE_CHECKING:
    from penstock.client import Client
    from penstock.model import Delivery
    from penstock.worker.state import WorkerState

# How long the loop's thread may take to end a subscription.
CLOSE_SECONDS: Final = 5.0
# How long one has to stand after another has failed, before it is taken to work again.
PROVE_SECONDS: Final = 0.25


class _Pushes(Subscription):
    """The subscription of a worker to one queue."""

    def __init__(self, client: Client, queue: str, state: WorkerState, **options: Any) -> None:
        size = limits.MAX_CREDIT_BYTES
        super().__init__(client.transport, queue, credit_bytes=size, **options)
        self._state = state
        # Messages that were asked for and have not come.
        self._asked = options["credit"]
        # Why it has ended.
        self.error: BaseException | None = None
        self.over = threading.Event()

    def pushed(self, deliveries: list[Delivery], left_ms: int) -> None:
        """Hand messages to the worker."""
        self._asked -= len(deliveries)
        self._state.add(deliveries, lease_ms=max(1, left_ms), queue=self.queue)

    def freed(self, count: int, size: int) -> None:  # noqa: ARG002 - the worker counts for itself
        """Give credit for the bytes; the worker asks for messages when it has room."""
        if self.error is None:
            self.grant(0, size)

    def ended(self, error: BaseException) -> None:
        """Let the worker's thread look why."""
        self.error = error
        self._state.ask(self.queue, -self._asked)
        self.over.set()

    def ask(self, count: int) -> None:
        """Ask for so many messages more, on the loop's thread."""
        if self.error is None:
            self._asked += count
            self.grant(count, 0)
        else:
            self._state.ask(self.queue, -count)

    def stop(self) -> None:
        """End it, on the loop's thread."""
        self.close()
        self.over.set()


class Subscriber(Claimer):
    """The thread that gives credit for one queue of a server.

    FIFO queues it claims from; others too, for good, once it has met a server that does not push.
    """

    def run(self) -> None:
        """Give credit until the worker is closing, and then end the subscription."""
        client = cast("Client", self._broker)
        call = client.transport.loop.call_soon_threadsafe
        pushes: _Pushes | None = None
        self._state.ask(self._queue, 0)
        while room := min(self._state.wait_for_room(self._queue), limits.MAX_CREDIT):
            if pushes is not None and pushes.error is not None:
                self._pause(pushes.error)
                pushes = None
                continue
            try:
                if pushes is None:
                    self._read_settings()
                    if self._in_order:
                        break
                    pushes = _Pushes(
                        client,
                        self._queue,
                        self._state,
                        credit=room,
                        lease_ms=self._settings.lease_ms,
                        consumer=self._settings.consumer,
                    )
                    self._state.ask(self._queue, room)
                    client.subscribe(pushes)
                    # Why it ends, if it can't be, is told later.
                    if self._activity.in_trouble and pushes.over.wait(PROVE_SECONDS):
                        continue
                else:
                    self._state.ask(self._queue, room)
                    call(pushes.ask, room)
            except Exception as error:  # the thread must outlive every error
                self._pause(error)
                continue
            self._activity.worked()
        if pushes is not None and not client.closed:
            call(pushes.stop)
            pushes.over.wait(CLOSE_SECONDS)
        super().run()

    def _pause(self, error: BaseException) -> None:
        failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self._state.pause(self._activity.failed(failure))
