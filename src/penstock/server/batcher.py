"""Gathers the requests of all connections: those of one turn of the loop are one change.

::

    connections ──▶ gathered in one turn of the loop ──▶ one joint change ──▶ synced ──▶ answered
                        ▲                                     │
    parked claims ──────┘◀──────── a queue got something ─────┘

The requests of one turn share scans, commits and the sync. Claims that find nothing are parked,
without a thread, until their queue gets something or their time is up. For subscribers with credit
the change that makes messages available claims them too (:mod:`penstock.server.waiting`).

Everything here runs on the loop's thread, but for the work of :meth:`Batcher.call`, and for joint
changes of a store at the other end of a network: threads make those, so that the loop goes on while
a database is away, and publishes, claims and settlements do not wait for each other. There is one
joint change of each kind at a time, so that publishes keep their order; of a store on this machine
all requests are of one kind.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from asyncio import Future
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from penstock import limits
from penstock.broker.requests import Ack, Change, Claim, Joint, Publish
from penstock.errors import BrokerClosed, PenstockError
from penstock.packing import pack_messages
from penstock.server.backup import ServerBackups
from penstock.server.shares import Shares, Turns
from penstock.server.waiting import MAX_CLAIMED, PushClaim, Subscriptions, WaitingClaim
from penstock.store.codec.claimed import ClaimedMessages
from penstock.validation import check_count, check_receipts, check_text

if TYPE_CHECKING:
    import concurrent.futures
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Iterable

    from penstock.broker.broker import Broker
    from penstock.broker.durability import OnDurable
    from penstock.broker.requests import Check, Request
    from penstock.model import Delivery, Message, Outcome
    from penstock.server.audit import Actor, AuditLog
    from penstock.server.native.consumers import Consumer
    from penstock.server.native.requests import PendingRequest
    from penstock.server.waiting import ClaimWait

    # The place for an answer, which is told on the loop's thread; the native request is told at
    # once, without another turn of the loop.
    Answer: TypeAlias = Future[Any] | PendingRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

# Claims for subscribers have no place for an answer.
_Gathered: TypeAlias = "tuple[Request, Answer | None]"

# The most messages of one joint change, so that no request waits long behind others.
MAX_JOINT_MESSAGES: Final = 2_000
# Verbs that may take long run on threads, in steps that hold the broker only for moments; verbs
# that only read have threads of their own, since they must not wait for a purge of millions.
CALL_THREADS: Final = 4
LOOK_THREADS: Final = 4
# Designs whose changes wait for another machine.
FAR: Final = frozenset({"sql"})


class _Kind:
    """Requests that share joint changes, and whether one is under way on a thread."""

    def __init__(self) -> None:
        self.gathered: dict[Answer, Request] = {}
        self.changing = False


class Batcher:
    """Takes requests on the loop's thread; a future is done once its change is durable."""

    def __init__(self, broker: Broker, loop: AbstractEventLoop) -> None:
        self.broker = broker
        # Called with the queue of each claim that got messages, and how long the first had waited.
        self.note_claimed: Callable[[str, int], None] = lambda *_: None
        # The backups that clients may have made: none, unless the server says where.
        self.backups = ServerBackups("", "")
        self.audit: AuditLog | None = None
        self._loop = loop
        self._scheduled = False
        # Requests whose joint change is begun and not answered yet.
        self._under_way = 0
        # Claims that may wait, from their request to their answer; and the parked ones, by queue.
        self._waiting: dict[WaitingClaim, Future[Any]] = {}
        self._waits = Shares("waiting claims", limits.MAX_ALL_WAITING_CLAIMS)
        self._parked: dict[str, dict[WaitingClaim, None]] = {}
        self._subscriptions = Subscriptions()
        # Queues that other threads have woken, until the loop comes to them.
        self._woken_queues: dict[str | None, int | None] = {}
        self._woken_lock = threading.Lock()
        # Whether claims may wait: not once the server is stopping.
        self.is_open = True
        # Set once the store is lost to this process: no request can be answered any more.
        self.lost = asyncio.Event()
        self._callers = Turns(CALL_THREADS, "penstock-batcher")
        self._lookers = Turns(LOOK_THREADS, "penstock-look")
        # Jobs that those threads have been given.
        self._jobs: dict[Answer, concurrent.futures.Future[Any]] = {}
        # Requests by kind, and the threads that make the joint changes of a far store.
        self._publishes = self._claims = self._settlements = _Kind()
        self._changer: ThreadPoolExecutor | None = None
        if broker.info().design in FAR:
            self._claims, self._settlements = _Kind(), _Kind()
            self._changer = ThreadPoolExecutor(3, thread_name_prefix="penstock-change")
        # Each of them once.
        self._kinds = dict.fromkeys((self._publishes, self._claims, self._settlements))
        broker.listen(self._wake_queue)

    @property
    def parked(self) -> int:
        """How many claims wait for messages; any thread may ask."""
        return sum(map(len, list(self._parked.values())))

    def consumers(self) -> dict[str, int]:
        """Return how many subscribers and parked claims each queue has; any thread may ask."""
        found = {queue: len(each) for queue, each in list(self._subscriptions.by_queue.items())}
        for queue, claims in list(self._parked.items()):
            found[queue] = found.get(queue, 0) + len(claims)
        return found

    # --- verbs -----------------------------------------------------------------------------

    def publish(
        self, messages: Iterable[Message], *, queue: str | None = None
    ) -> Future[list[int]]:
        """Publish, as :meth:`Broker.publish`; with ``queue`` all of them must go there."""
        return self._gather(Publish(pack_messages(messages), queue))

    def submit(self, request: Publish | Ack, answer: Answer) -> None:
        """Do a request that was checked, and tell its answer once its change is durable."""
        kind = self._publishes if type(request) is Publish else self._settlements
        kind.gathered[answer] = request
        if not self._scheduled:
            self._schedule()

    def claim(
        self,
        queue: str,
        *,
        limit: int = 1,
        lease_ms: int | None = None,
        wait_ms: int = 0,
        consumer: str = "",
        admission: ClaimWait | PendingRequest | None = None,
        holder: str = "",
    ) -> Future[ClaimedMessages]:
        """Claim, as :meth:`Broker.claim`; cancel the future when its client has gone.

        A claim with an admission counts as admitted when it comes. One that may wait takes of the
        holder's share.
        """
        check_count(limit, "limit", 1, limits.MAX_CLAIM_LIMIT)
        check_count(wait_ms, "wait_ms", high=limits.MAX_WAIT_MS)
        check_text(consumer, "consumer", limits.MAX_CONSUMER_BYTES)
        if lease_ms is not None:
            check_count(lease_ms, "lease_ms", low=1, high=limits.MAX_LEASE_MS)
        if not wait_ms or not self.is_open:
            return self._gather(Claim(queue, limit, lease_ms, consumer))
        self._waits.take(holder)
        until = self._loop.time() + wait_ms / 1000
        claim = WaitingClaim(queue, limit, lease_ms, consumer, until=until, admission=admission)
        future = self._waiting[claim] = self._gather(claim)
        future.add_done_callback(lambda _: self._forget(claim))
        future.add_done_callback(lambda _: self._waits.give(holder))
        return future

    def ack(
        self, receipts: Iterable[str], *, queue: str | None = None, check: Check | None = None
    ) -> Future[list[Outcome]]:
        """Settle messages as done, as :meth:`Broker.ack`.

        ``check``, here and below, is called with each queue that the receipts name before anything
        is changed, and raises for a queue that the caller may not consume.
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

    async def claimed(self, claiming: Future[ClaimedMessages]) -> list[Delivery]:
        """Wait for a claim; a caller that is cancelled in the turn of its answer keeps nothing."""
        try:
            return (await claiming).deliveries()
        except asyncio.CancelledError:
            if claiming.done() and not claiming.cancelled() and claiming.exception() is None:
                self.take_back(claiming.result().receipts())
            raise

    def back_up(self, name: str, actor: Actor, *, incremental: bool) -> Future[tuple[str, int]]:
        """Make a backup on a thread for long work; return its path or name, and its bytes."""

        def make(broker: Broker) -> tuple[str, int]:
            work = partial(self.backups.make, broker, name, incremental=incremental)
            told = {"backup": name, "incremental": incremental}
            return work() if self.audit is None else self.audit.run(actor, "backup", told, work)

        return self.call(make, long=True, holder=actor.holder)

    def take_back(self, receipts: list[str]) -> None:
        """Release messages that were claimed for a client that has gone.

        If that fails, their lease ends in time.
        """
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

    def subscribe(self, subscriber: Consumer) -> None:
        """Claim messages for a subscriber as they become available, while it has room."""
        self._subscriptions.add(subscriber)
        self._schedule()

    def unsubscribe(self, subscriber: Consumer) -> None:
        """Claim no more for a subscriber; it is given what is claimed by now."""
        self._subscriptions.remove(subscriber)

    def note_room(self, queue: str) -> None:
        """Look for messages of a queue: one of its subscribers may have room again."""
        self._subscriptions.mark_due(queue)
        if self._subscriptions.due:
            self._schedule()

    def change(self, work: Callable[[int], T]) -> Future[T]:
        """Make a change that the broker has prepared; it is given the time, and must be short."""
        return self._gather(Change(work))

    def call(
        self, work: Callable[[Broker], T], *, long: bool = False, holder: str = ""
    ) -> Future[T]:
        """Do anything else with the broker, on a thread; ``long`` if it may take its time.

        The holders of shares take turns. Without one it is the server's own work.
        """
        if not self.is_open:
            raise BrokerClosed("the server is stopping")
        # Threads keep a cancelled job until its turn comes: it must not keep the request.
        given = [work]
        threads = self._callers if long else self._lookers
        job = threads.submit(holder, lambda: given.pop()(self.broker))
        future = asyncio.wrap_future(job, loop=self._loop)
        self._jobs[future] = job

        def end(_: Future[T]) -> None:
            del self._jobs[future]
            given.clear()

        future.add_done_callback(end)
        return future

    def withdraw(self, answer: Answer) -> bool:
        """Cancel a request whose time is up; say whether nothing was done for it."""
        job = self._jobs.get(answer)
        untouched = self._drop(answer) if job is None else job.cancel()
        answer.cancel()
        return untouched

    # --- stopping --------------------------------------------------------------------------

    def end_waits(self) -> None:
        """Answer claims that wait with nothing, and let none wait from now on."""
        self.is_open = False
        for claim in list(self._waiting):
            self._forget(claim, answer=True)

    async def close(self) -> None:
        """Wait for the requests under way. The broker stays open."""
        self.end_waits()
        self.backups.stop()
        while self._under_way or any(kind.gathered for kind in self._kinds):
            await asyncio.sleep(0.001)
        # On a thread: it takes the broker's lock, which a slow store may hold.
        await asyncio.to_thread(self.broker.listen, None)
        for threads in (self._callers, self._lookers, self._changer):
            if threads is not None:
                await asyncio.to_thread(threads.shutdown)

    # --- gathering -------------------------------------------------------------------------

    def _gather(self, request: Request, future: Future[Any] | None = None) -> Future[Any]:
        """Add a request to the next joint change; ``future``: that of a claim that was parked."""
        if future is None:
            future = self._loop.create_future()
            if self._changer is not None:
                # It may wait long for its turn, and a cancelled request must not keep its bytes.
                future.add_done_callback(self._drop)
        if isinstance(request, Publish):
            self._publishes.gathered[future] = request
        else:
            kind = self._claims if isinstance(request, Claim) else self._settlements
            kind.gathered[future] = request
        self._schedule()
        return future

    def _schedule(self) -> None:
        """Make a joint change in the next turn of the loop, or after the one under way."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._work)

    def _drop(self, answer: Answer) -> bool:
        """Drop a request that was cancelled before its turn; say whether its turn was to come."""
        gathered = (kind.gathered for kind in self._kinds)
        request = next((each.pop(answer) for each in gathered if answer in each), None)
        if isinstance(request, Claim):
            # It may have been woken for a message that another claim could have.
            self._wake_queue(request.queue, 1)
        return request is not None

    def _work(self) -> None:
        """Make a joint change of the gathered requests of each kind."""
        self._scheduled = False
        for kind in self._kinds:
            if not kind.changing:
                self._begin_change(kind)

    def _standing(self, queue: str, available: int | None) -> list[PushClaim]:
        """Make claims for the subscribers of a queue; claims that are parked there go first."""
        if queue not in self._parked:
            return self._subscriptions.claims_of(queue, available)
        self._wake_queue(queue, available)
        return []

    def _begin_change(self, kind: _Kind) -> None:
        """Make a joint change of one kind; that of a far store on a thread."""
        joint, made, kind.gathered = self._next(kind.gathered, pushes=kind is self._claims)
        if self._changer is not None:
            if made:
                self._under_way += len(made)
                kind.changing = True
                change = self._loop.run_in_executor(self._changer, self.broker.begin, joint)
                change.add_done_callback(lambda change: self._end_change(kind, made, change))
            return
        if kind.gathered or self._subscriptions.due:
            self._schedule()
        if not made:
            return
        claims = len(joint.claims)
        if self._subscriptions.by_queue:
            joint.standing = self._standing
        number: int | None = None
        failure: Exception | None = None
        try:
            number = self.broker.begin(joint)
        except Exception as error:
            # Whatever it was, every request gets its answer.
            failure = error
        if len(joint.claims) > claims:
            made += [(claim, None) for claim in joint.claims[claims:]]
        self._under_way += len(made)
        self._end_begun(made, number, failure)

    def _end_change(self, kind: _Kind, made: list[_Gathered], change: Future[int]) -> None:
        """Go on after a joint change of a thread."""
        kind.changing = False
        error = change.exception()
        if error is None:
            self._end_begun(made, change.result(), None)
        else:
            failure = error if isinstance(error, Exception) else BrokerClosed(str(error))
            self._end_begun(made, None, failure)
        if kind.gathered or self._subscriptions.due:
            self._schedule()
        # Queues that were woken meanwhile may have claims that wait only now.
        self._retry()

    def _end_begun(
        self, made: list[_Gathered], number: int | None, failure: Exception | None
    ) -> None:
        """Park claims that wait, and answer the other requests when the change is durable.

        Without a number the change has failed, and they are answered at once.
        """
        if self._subscriptions.by_queue:
            self._subscriptions.note_found([each for each, _ in made if type(each) is PushClaim])
            if self._subscriptions.due:
                self._schedule()
        if number is None:
            self._answer(made, failure)
            return
        # At once: a wake-up from now on comes to the loop after this.
        if self._waiting:
            made = [each for each in made if not self._park(each[0])]
        if made:
            # From whatever thread: the answers are the loop's.
            answer: OnDurable = partial(self._loop.call_soon_threadsafe, self._answer, made)  # type: ignore[arg-type]
            self.broker.tell(number, answer)

    def _next(
        self, gathered: dict[Answer, Request], *, pushes: bool
    ) -> tuple[Joint, list[_Gathered], dict[Answer, Request]]:
        """Take requests for a joint change, as they came, and return those that are left.

        ``pushes``: claim for subscribers as well.
        """
        joint = Joint()
        made: list[_Gathered] = []
        room = MAX_JOINT_MESSAGES
        passed_on: dict[str, int] = {}
        left: dict[Answer, Request] = {}
        for answer, request in gathered.items():
            if room <= 0:
                left[answer] = request
                continue
            if answer.done():
                if isinstance(request, Claim):
                    # As in _drop.
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
            made.append((request, answer))
        for queue, count in passed_on.items():
            self._wake_queue(queue, count)
        # However many requests there are, so that they can't keep subscribers waiting for ever.
        self._subscriptions.room = max(room, MAX_CLAIMED)
        if pushes and self._subscriptions.due:
            for claim in self._subscriptions.take_due():
                joint.claims.append(claim)
                made.append((claim, None))
        return joint, made, left

    def _answer(self, made: list[_Gathered], failure: Exception | None) -> None:
        """Answer every request of a joint change, and give subscribers what was claimed."""
        self._under_way -= len(made)
        for request, answer in made:
            error = request.error if failure is None else failure
            request.error = None
            if error is not None:
                error = _without_frames(error)
            given_up = answer is not None and answer.done()
            if isinstance(request, Claim) and request.answer.rows:
                if given_up or error:
                    self.take_back(request.answer.receipts())
                    request.answer = ClaimedMessages()
                else:
                    self.note_claimed(request.queue, request.answer.waited_ms)
            if given_up:
                continue
            try:
                if type(request) is PushClaim:
                    if error is not None:
                        request.subscriber.fail(error)
                    request.subscriber.deliver(request)
                elif answer is not None and error is not None:
                    answer.set_exception(error)
                elif answer is not None:
                    answer.set_result(request.answer)
            except Exception:
                # One that fails must not keep the others waiting.
                log.exception("an answer could not be told")

    # --- waiting ---------------------------------------------------------------------------

    def _park(self, request: Request) -> bool:
        """Park a claim that got nothing and may wait; return whether it was parked."""
        if not isinstance(request, WaitingClaim) or request.answer or request.error is not None:
            return False
        if request not in self._waiting or request.until <= self._loop.time():
            return False
        self._parked.setdefault(request.queue, {})[request] = None
        self._under_way -= 1
        request.park(self._loop.call_at(request.until, self._forget, request, True))  # noqa: FBT003
        return True

    def _unpark(self, claim: WaitingClaim) -> bool:
        """Take a claim out of the parked ones; return whether it was parked."""
        if not claim.unpark():
            return False
        del self._parked[claim.queue][claim]
        if not self._parked[claim.queue]:
            del self._parked[claim.queue]
        return True

    def _forget(self, claim: WaitingClaim, answer: bool = False) -> None:  # noqa: FBT001, FBT002
        """End the wait of a claim: its time is up, it is answered, or it was cancelled."""
        future = self._waiting.pop(claim, None)
        if self._unpark(claim) and answer and future is not None and not future.done():
            future.set_result(ClaimedMessages())

    def _wake_queue(self, queue: str | None, available: int | None) -> None:
        """Note that a queue has something to claim; (None, None): the store is lost.

        The broker calls it on any thread, with its lock held.
        """
        if queue is None:
            self._loop.call_soon_threadsafe(self.lost.set)
        if not self._waiting and not self._subscriptions.by_queue:
            return
        with self._woken_lock:
            first = not self._woken_queues
            known = self._woken_queues.get(queue, 0)
            # One retry too many does no harm; one too few would wait for no reason.
            if known is None or available is None:
                self._woken_queues[queue] = None
            elif self._changer is not None:
                # A far store does not count again: it reports only the messages that came since.
                self._woken_queues[queue] = known + available
            else:
                self._woken_queues[queue] = max(known, available)
        if first:
            self._loop.call_soon_threadsafe(self._retry)

    def _retry(self) -> None:
        """Retry claims that wait for a queue that was woken."""
        if self._claims.changing:
            # Claims that find nothing are parked at its end.
            return
        with self._woken_lock:
            woken, self._woken_queues = self._woken_queues, {}
        if None in woken:
            woken = dict.fromkeys(self._parked)
        for queue, available in woken.items():
            self._subscriptions.mark_ready(queue or "")
            parked = list(self._parked.get(queue or "", {}))
            # As many as could get something, the first ones first; all, if the queue is gone.
            left = len(parked) if available is None else max(1, available)
            for claim in parked:
                if not left:
                    break
                self._unpark(claim)
                future = self._waiting[claim]
                if future.done():
                    continue
                if claim.admission is None or claim.admission.admit():
                    left -= 1
                    self._gather(claim, future)
                else:
                    future.cancel()
        if self._subscriptions.due:
            self._schedule()


def _without_frames(error: Exception) -> Exception:
    """Cut the frames off an error, since they know all requests of the joint change.

    The futures know the error, so only the garbage collector would free those requests. Errors that
    are not Penstock's own are logged with their frames.
    """
    if isinstance(error, PenstockError):
        error.__traceback__ = error.__cause__ = error.__context__ = None
    return error
