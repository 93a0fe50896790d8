"""The desk: where the requests of all connections meet.

::

    connections ──▶ gathered in one turn of the loop ──▶ one joint change ──▶ synced ──▶ answered
                        ▲                                     │
    parked claims ──────┘◀──────── a queue got something ─────┘

What comes in one turn of the event loop shares scans, commits and the sync. Claims that find
nothing are parked, without a thread, until their queue gets something or their time is up.
Everything here runs on the loop's thread, but for what :meth:`Desk.call` is given, and for joint
changes of a store that is at the other end of a network: one thread waits for them, and for a
database that is away, while the loop goes on. Still there is one joint change at a time.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import Future
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from penstock import limits
from penstock.broker.requests import Ack, Change, Claim, Joint, Publish
from penstock.errors import BrokerClosed, InvalidInput, PenstockError
from penstock.validation import (
    check_count,
    check_duration,
    check_messages,
    check_receipts,
    check_text,
)

if TYPE_CHECKING:
    import concurrent.futures
    from asyncio import AbstractEventLoop, TimerHandle
    from collections.abc import Callable, Iterable

    from penstock.broker.broker import Broker
    from penstock.broker.requests import Check, Request
    from penstock.model import Delivery, Message, Outcome

__all__ = ["Desk", "Turnstile"]

T = TypeVar("T")

_Made: TypeAlias = "tuple[Request, Future[Any]]"

# What one joint change does at most, so that nobody waits long behind others.
MAX_JOINT_MESSAGES: Final = 2_000
# Verbs that may take long run here, in steps that hold the broker only for moments; and apart
# from them those that only look, which must not wait until a purge of millions is through.
CALL_THREADS: Final = 4
LOOK_THREADS: Final = 4
# Designs whose changes wait for somebody else's machine.
FAR: Final = frozenset({"sql"})


class Turnstile(Protocol):
    """Who says whether a claim that waits may have what has come for it."""

    def enter(self) -> bool:
        """Say whether it may look now; if not, it is cancelled, and others look instead."""

    def leave(self) -> None:
        """Be told that it found nothing and waits, until it enters again."""


class _Waiting:
    """A claim that may wait: until when, and the alarm that ends it while it is parked."""

    __slots__ = ("alarm", "claim", "future", "turnstile", "until")

    def __init__(
        self, claim: Claim, future: Future[Any], until: float, turnstile: Turnstile | None
    ) -> None:
        self.claim = claim
        self.future = future
        self.until = until
        self.turnstile = turnstile
        self.alarm: TimerHandle | None = None


class Desk:
    """Takes requests on the loop's thread; every future is done once its change is durable."""

    def __init__(self, broker: Broker, loop: AbstractEventLoop) -> None:
        self.broker = broker
        self._loop = loop
        self._gathered: OrderedDict[Future[Any], Request] = OrderedDict()
        self._scheduled = False
        self._under_way = 0
        # Claims that may wait, from their request to their answer; and those that do, by queue.
        self._waiting: dict[int, _Waiting] = {}
        self._parked: dict[str, dict[int, _Waiting]] = {}
        # What other threads have told, until the loop comes to it.
        self._news: dict[str | None, int | None] = {}
        self._news_lock = threading.Lock()
        self._open = True
        # Set once the store is lost to this process: no request can be answered any more.
        self.lost = asyncio.Event()
        self._callers = ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="penstock-desk")
        self._lookers = ThreadPoolExecutor(LOOK_THREADS, thread_name_prefix="penstock-look")
        # Jobs that those threads have been given.
        self._jobs: dict[Future[Any], concurrent.futures.Future[Any]] = {}
        self._changer: ThreadPoolExecutor | None = None
        if broker.info().design in FAR:
            self._changer = ThreadPoolExecutor(1, thread_name_prefix="penstock-change")
        # Whether the thread makes a joint change.
        self._changing = False
        broker.listen(self._woken)

    @property
    def parked(self) -> int:
        """How many claims wait for messages."""
        return sum(map(len, self._parked.values()))

    @property
    def under_way(self) -> int:
        """How many requests are gathered or not durable yet."""
        return self._under_way

    @property
    def is_open(self) -> bool:
        """Whether claims may wait: not once the server is stopping."""
        return self._open

    # --- verbs -----------------------------------------------------------------------------

    def publish(
        self, messages: Iterable[Message], *, queue: str | None = None
    ) -> Future[list[int]]:
        """Publish, as :meth:`Broker.publish`; with ``queue`` all of them must go there."""
        return self._gather(Publish(check_messages(messages), queue))

    def claim(
        self,
        queue: str,
        *,
        limit: int = 1,
        lease_ms: int | None = None,
        wait_ms: int = 0,
        consumer: str = "",
        turnstile: Turnstile | None = None,
    ) -> Future[list[Delivery]]:
        """Claim, as :meth:`Broker.claim`; cancel the future when nobody waits for it any more.

        One with a turnstile is taken to be inside when it comes.
        """
        check_count(limit, "limit", 1, limits.MAX_CLAIM_LIMIT)
        check_duration(wait_ms, "wait_ms", high=limits.MAX_WAIT_MS)
        check_text(consumer, "consumer", limits.MAX_CONSUMER_BYTES)
        if lease_ms is not None:
            check_duration(lease_ms, "lease_ms", low=1, high=limits.MAX_LEASE_MS)
        if wait_ms and len(self._waiting) >= limits.MAX_ALL_WAITING_CLAIMS:
            raise InvalidInput(
                f"{limits.MAX_ALL_WAITING_CLAIMS} claims wait already, at this server"
            )
        claim = Claim(queue, limit, lease_ms, consumer)
        future = self._gather(claim)
        if wait_ms and self._open:
            waiting = _Waiting(claim, future, self._loop.time() + wait_ms / 1000, turnstile)
            self._waiting[id(claim)] = waiting
            future.add_done_callback(lambda _: self._forget(waiting))
        return future

    def ack(
        self, receipts: Iterable[str], *, queue: str | None = None, check: Check | None = None
    ) -> Future[list[Outcome]]:
        """Settle messages as done, as :meth:`Broker.ack`.

        ``check``, here and below, is told the queues that the receipts name before anything is
        changed, and raises for one that the caller has no business with.
        """
        return self._gather(Ack(check_receipts(receipts), queue, check))

    def release(
        self,
        receipts: Iterable[str],
        *,
        delay_ms: int | None = None,
        reason: str = "",
        queue: str | None = None,
        unseen: bool = False,
        check: Check | None = None,
    ) -> Future[list[Outcome]]:
        """Give messages back, as :meth:`Broker.release`."""
        return self.change(
            self.broker.releasing(receipts, delay_ms, reason, queue, unseen=unseen, check=check)
        )

    async def claimed(self, claiming: Future[list[Delivery]]) -> list[Delivery]:
        """Wait for a claim; who is cancelled in the very moment of its answer keeps nothing."""
        try:
            return await claiming
        except asyncio.CancelledError:
            if claiming.done() and not claiming.cancelled() and claiming.exception() is None:
                self.take_back(claiming.result())
            raise

    def take_back(self, deliveries: Iterable[Delivery]) -> None:
        """Give back messages that were claimed for somebody who has gone: others want them.

        If that fails, their lease ends in time; nobody is there to be told.
        """
        receipts = [each.receipt for each in deliveries]
        if receipts:
            self.release(receipts, unseen=True).add_done_callback(Future.exception)

    def extend(
        self,
        receipts: Iterable[str] | str,
        *,
        lease_ms: int,
        queue: str | None = None,
        check: Check | None = None,
    ) -> Future[list[Outcome]]:
        """Move deadlines, as :meth:`Broker.extend`."""
        return self.change(self.broker.extending(receipts, lease_ms, queue, check))

    def change(self, work: Callable[[int], T]) -> Future[T]:
        """Make a change that the broker has prepared; it is told the time, and must be short."""
        return self._gather(Change(work))

    def call(self, work: Callable[[Broker], T], *, long: bool = False) -> Future[T]:
        """Do anything else with the broker, on a thread; ``long`` if it may take its time."""
        if not self._open:
            raise BrokerClosed("the server is stopping")
        # Threads keep a job that was cancelled until its turn comes: there must be nothing in it.
        given = [work]
        job = (self._callers if long else self._lookers).submit(lambda: given.pop()(self.broker))
        future = asyncio.wrap_future(job, loop=self._loop)
        self._jobs[future] = job

        def end(_: Future[T]) -> None:
            del self._jobs[future]
            given.clear()

        future.add_done_callback(end)
        return future

    def withdraw(self, future: Future[Any]) -> bool:
        """Cancel a request whose time is up; say whether nothing was done for it."""
        job = self._jobs.get(future)
        untouched = future in self._gathered if job is None else job.cancel()
        future.cancel()
        return untouched

    # --- stopping --------------------------------------------------------------------------

    def hand_back(self) -> None:
        """Answer claims that wait with nothing, and let none wait from now on."""
        self._open = False
        for waiting in list(self._waiting.values()):
            self._forget(waiting, answer=True)

    async def close(self) -> None:
        """Wait for what is under way. The broker stays open."""
        self.hand_back()
        while self._under_way:
            await asyncio.sleep(0.001)
        # On a thread: who has the store may wait for it.
        await asyncio.to_thread(self.broker.listen, None)
        for threads in (self._callers, self._lookers, self._changer):
            if threads is not None:
                await asyncio.to_thread(threads.shutdown)

    # --- gathering -------------------------------------------------------------------------

    def _gather(self, request: Request) -> Future[Any]:
        future = self._loop.create_future()
        self._add(request, future)
        if self._changer is not None:
            # It may wait long for its turn, and nobody counts what it holds once it is cancelled.
            future.add_done_callback(self._drop)
        return future

    def _drop(self, future: Future[Any]) -> None:
        """Let go of a request that was cancelled before its turn."""
        request = self._gathered.pop(future, None)
        if request is not None:
            self._under_way -= 1
        if isinstance(request, Claim):
            # It may have been woken for a message that another one could have.
            self._woken(request.queue, 1)

    def _add(self, request: Request, future: Future[Any]) -> None:
        self._gathered[future] = request
        self._under_way += 1
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._work)

    def _work(self) -> None:
        """Make one joint change of what has gathered."""
        joint, made = self._next()
        self._scheduled = bool(self._gathered)
        if not made:
            if self._scheduled:
                self._loop.call_soon(self._work)
            return
        if self._changer is not None:
            self._changing = self._scheduled = True
            change = self._loop.run_in_executor(self._changer, self.broker.begin, joint)
            change.add_done_callback(lambda change: self._changed(made, change))
            return
        if self._scheduled:
            self._loop.call_soon(self._work)
        try:
            number = self.broker.begin(joint)
        except Exception as error:
            # Whatever it was, they must be told.
            self._answer(made, error)
            return
        self._began(made, number)

    def _changed(self, made: list[_Made], change: Future[int]) -> None:
        """Go on after a joint change that the thread has made."""
        error = change.exception()
        if error is None:
            self._began(made, change.result())
        else:
            self._answer(made, error if isinstance(error, Exception) else BrokerClosed(str(error)))
        self._changing = False
        self._scheduled = bool(self._gathered)
        if self._scheduled:
            self._loop.call_soon(self._work)
        # What was told meanwhile may be for claims that wait only now.
        self._retry()

    def _began(self, made: list[_Made], number: int) -> None:
        """Park claims that wait, and have the others answered when the change is durable."""
        # At once: whatever wakes them from now on comes to the loop after this.
        made = [each for each in made if not self._park(each[0])]
        if made:
            self.broker.tell(
                number, lambda error: self._loop.call_soon_threadsafe(self._answer, made, error)
            )

    def _next(self) -> tuple[Joint, list[_Made]]:
        """Take what one joint change may do, in the order of arrival."""
        joint = Joint()
        made: list[_Made] = []
        room = MAX_JOINT_MESSAGES
        gathered = self._gathered
        passed_on: dict[str, int] = {}
        while gathered and room > 0:
            future, request = gathered.popitem(last=False)
            if future.done():
                self._under_way -= 1
                if isinstance(request, Claim):
                    # As above.
                    passed_on[request.queue] = passed_on.get(request.queue, 0) + 1
                continue
            if isinstance(request, Publish):
                joint.publishes.append(request)
                room -= len(request.messages)
            elif isinstance(request, Claim):
                joint.claims.append(request)
                room -= request.limit
            elif isinstance(request, Ack):
                joint.acks.append(request)
                room -= len(request.receipts)
            else:
                joint.changes.append(request)
                room -= 1
            made.append((request, future))
        for queue, count in passed_on.items():
            self._woken(queue, count)
        return joint, made

    def _answer(self, made: list[_Made], failure: Exception | None) -> None:
        """Answer everybody of a joint change."""
        self._under_way -= len(made)
        for request, future in made:
            error = request.error if failure is None else failure
            if isinstance(request, Claim) and (future.done() or error):
                self.take_back(request.answer)
            request.error = None
            if future.done():
                continue
            if error is not None:
                future.set_exception(_without_frames(error))
            else:
                future.set_result(request.answer)

    # --- waiting ---------------------------------------------------------------------------

    def _park(self, request: Request) -> bool:
        """Have a claim wait that got nothing and may; say whether it does."""
        if not isinstance(request, Claim) or request.answer or request.error is not None:
            return False
        waiting = self._waiting.get(id(request))
        if waiting is None or waiting.until <= self._loop.time():
            return False
        waiting.alarm = self._loop.call_at(waiting.until, self._forget, waiting, True)  # noqa: FBT003
        self._parked.setdefault(request.queue, {})[id(request)] = waiting
        self._under_way -= 1
        if waiting.turnstile is not None:
            waiting.turnstile.leave()
        return True

    def _unpark(self, waiting: _Waiting) -> bool:
        """Take a claim out of those that wait; say whether it was among them."""
        if waiting.alarm is None:
            return False
        waiting.alarm.cancel()
        waiting.alarm = None
        queue = waiting.claim.queue
        del self._parked[queue][id(waiting.claim)]
        if not self._parked[queue]:
            del self._parked[queue]
        return True

    def _forget(self, waiting: _Waiting, answer: bool = False) -> None:  # noqa: FBT001, FBT002
        """Let a claim wait no longer: its time is up, it is answered, or nobody wants it."""
        self._waiting.pop(id(waiting.claim), None)
        if self._unpark(waiting) and answer and not waiting.future.done():
            waiting.future.set_result([])

    def _woken(self, queue: str | None, available: int | None) -> None:
        """Pass on that a queue has something, or that the store is lost.

        Called on any thread, with the broker's lock held.
        """
        if queue is None:
            self._loop.call_soon_threadsafe(self.lost.set)
        if not self._waiting:
            return
        with self._news_lock:
            first = not self._news
            known = self._news.get(queue, 0)
            # One too many that looks is no harm, where one too few would wait for no reason.
            if known is None or available is None:
                self._news[queue] = None
            elif self._changer is not None:
                # What is far away is not counted anew: it tells only what has come since.
                self._news[queue] = known + available
            else:
                self._news[queue] = max(known, available)
        if first:
            self._loop.call_soon_threadsafe(self._retry)

    def _retry(self) -> None:
        """Have claims look again that wait for a queue of which there is news."""
        if self._changing:
            return
        with self._news_lock:
            news, self._news = self._news, {}
        if None in news:
            news = dict.fromkeys(self._parked)
        for queue, available in news.items():
            parked = list(self._parked.get(queue or "", {}).values())
            # The first ones, as many as could get something; all of them, if the queue is gone.
            left = len(parked) if available is None else max(1, available)
            for waiting in parked:
                if not left:
                    break
                self._unpark(waiting)
                if waiting.future.done():
                    continue
                if waiting.turnstile is None or waiting.turnstile.enter():
                    left -= 1
                    self._add(waiting.claim, waiting.future)
                else:
                    waiting.future.cancel()


def _without_frames(error: Exception) -> Exception:
    """Cut the way from an error back to the requests that were made together with its own.

    Its frames know them, and all that was sent in them, and their futures know the error: only the
    garbage collector would let go of it. Others than Penstock's own are logged, with their frames.
    """
    if isinstance(error, PenstockError):
        error.__traceback__ = error.__cause__ = error.__context__ = None
    return error
