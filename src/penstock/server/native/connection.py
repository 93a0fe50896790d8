"""One native client: bytes in, requests at work, answers out.

The server reads a connection only while its requests are within bounds and the client reads its
answers. Answers that are ready in one turn of the loop are written together.
:mod:`penstock.server.native.requests` has the verbs, and bounds the messages that are claimed for
a client at a time.
"""

from __future__ import annotations

import logging
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from penstock import limits
from penstock.clock import loop_seconds
from penstock.errors import InvalidInput, NotAllowed, PenstockError, ServerBusy, ServerUnreachable
from penstock.model import OutcomeStatus
from penstock.server.framed import TURN_SECONDS, FramedConnection
from penstock.server.native.consumers import Consumers, UnsentMessages
from penstock.server.native.requests import (
    VERBS,
    WITH_MESSAGES,
    Backpressure,
    PendingRequest,
    answer_bytes,
)
from penstock.server.security import ANYONE, told
from penstock.validation import check_count
from penstock.wire import native as wire
from penstock.wire.frames import NOT_HTTP, FrameReader, protocol_of
from penstock.wire.native import failure_of

if TYPE_CHECKING:
    import asyncio
    from asyncio import Future

    from penstock.server.connections import Slot
    from penstock.server.native import NativeListener
    from penstock.server.security import Principal
    from penstock.store.codec.claimed import ClaimedMessages

log = logging.getLogger(__name__)


class NativeConnection(FramedConnection):
    """One client's connection."""

    _listener: NativeListener

    def __init__(self, listener: NativeListener, slot: Slot) -> None:
        super().__init__(listener, listener.loop, slot)
        self._batcher = listener.batcher
        self._encoder = listener.encoder
        self._reader = FrameReader(limits.MAX_HELLO_BYTES)
        self._token = ""
        self._principal: Principal | None = None
        # While a thread checks the token.
        self._login: Future[Principal | None] | None = None
        # Requests in order of arrival, but for claims that may wait, which are by their id.
        self._at_work: dict[PendingRequest, None] = {}
        self._waits: dict[int, PendingRequest] = {}
        self._bytes_at_work = 0
        # How long the client waits for an answer, and the timer of the first request at work.
        self._patience_s = limits.MAX_ANSWER_MS / 1000
        self._time_is_up: asyncio.TimerHandle | None = None
        self._backpressure = Backpressure(listener.sizes, self._schedule_held)
        self._held_scheduled = False
        self._consumers = Consumers(listener, self._backpressure, self._write)
        self._out: list[bytes] = []
        self._out_bytes = 0
        # Messages whose answer is not written yet, and those that may not have left the process.
        self._unwritten: list[tuple[int, ClaimedMessages]] = []
        self._unsent_messages = UnsentMessages()
        self._leaving = False
        self._heard = self._loop.time()

    @property
    def idle(self) -> bool:
        """Whether no request is at work; claims that wait do not count."""
        return not self._at_work

    @property
    def busy(self) -> bool:
        """Whether something is in hand or unsent."""
        return bool(self._waits or self._out) or super().busy

    # --- called by the loop --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a greeting: one that dribbles in must not hold a connection."""
        self._due_in(limits.MAX_GREETING_MS)
        super().connection_made(transport)

    def _lost(self) -> None:
        """Cancel the claims that wait, and give back what was not sent: others get the messages."""
        self._listener.waiting.get(self._slot.share, set()).discard(self)
        self._batcher.take_back(self._unsent_messages.unsent(self._transport))
        self._out.clear()
        for pending in list(self._at_work):
            # A call that waits for a thread need not begin any more.
            if pending.future is not None and not pending.verb.batched:
                pending.future.cancel()
        self._end_claims()
        for each in (self._login, self._time_is_up):
            if each is not None:
                each.cancel()

    def _drop(self) -> None:
        self._reader = FrameReader(1)
        super()._drop()

    def eof_received(self) -> bool:
        """Close: a client that sends no more gets no answer either."""
        # Now, since closing takes as long as sending the answers before.
        self._end_claims()
        self._shut = True
        self._note_stuck()
        return False

    def pause_writing(self) -> None:
        """Claim nothing more for a client that does not read."""
        self._backpressure.shut()
        self._unsent_messages.keep_receipts()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Go on where it stopped."""
        self._stuck_since = None
        self._backpressure.reopen()
        self._consumers.retry()
        super().resume_writing()

    def refuse(self, why: str) -> None:
        """Make way for others: all connections hold too many bytes."""
        if self._stuck_since is not None:
            self.abort()
        else:
            self._farewell(PenstockError(why), final=False)

    # --- requests ------------------------------------------------------------------------------

    def _work(self, data: bytes = b"") -> None:
        """Begin the requests that have come, as far as bounds allow; read on only if they do."""
        if data:
            self._heard = self._loop.time()
            self._reader.feed(data)
            self._in_hand = self._reader.pending
        if self._shut or self._waits_for_turn:
            return
        listener, wanted = self._listener, False
        at_work = listener.at_work
        ends = loop_seconds() + TURN_SECONDS
        try:
            while not (
                len(self._at_work) >= limits.MAX_REQUESTS_AT_WORK
                or self._bytes_at_work >= limits.MAX_BYTES_AT_WORK
                or self._stuck_since is not None
                or self._login is not None
                or self._shut
            ):
                # While half is free, everybody's share is.
                if at_work.total * 2 >= at_work.most and not at_work.fits(self._slot.share):
                    listener.waiting.setdefault(self._slot.share, set()).add(self)
                    break
                if not self._reader.pending:
                    wanted = True
                    break
                if self._share <= 0 or loop_seconds() > ends:
                    self._yield_turn()
                    break
                self._share -= 1
                if (frame := self._reader.take()) is None:
                    wanted = True
                    break
                if self._principal is None:
                    self._greet(frame)
                else:
                    self._begin(frame)
        except InvalidInput as error:
            spoken = "" if self._principal else protocol_of(self._reader.next_bytes)
            if spoken:
                log.info("a client speaks %s to the native port", spoken)
            if spoken == "HTTP":
                self._end_with(NOT_HTTP)
            else:
                self._farewell(error, final=self._principal is None)
            return
        self._in_hand = self._reader.pending
        if wanted is not self._reading and not self._shut:
            self._read(wanted=wanted)

    def go_on(self) -> None:
        """Begin the requests that waited for others to end."""
        if not self._reading:
            self._work()
            self._account()

    def _greet(self, frame: memoryview) -> None:
        hello = wire.read_hello(frame)
        self._login = self._listener.log_in(hello.token, partial(self._welcome, hello))

    def _welcome(self, hello: wire.Hello, principal: Principal | None) -> None:
        self._login = None
        if self._shut:
            return
        if principal is None:
            note = self._listener.metrics.refusals.token
            why = note("native", self._slot.address, hello.token)
            text = why if hello.token else "this server wants a key: token='KEY:SECRET'"
            self._farewell(NotAllowed(text), final=True)
            return
        self._principal, self._token = principal, hello.token
        self._slot.key_id = principal.key_id
        if hello.patience_ms > 0:
            self._patience_s = min(hello.patience_ms, limits.MAX_WAIT_MS) / 1000
        try:
            self._listener.slots.trust(self._slot)
        except ServerBusy as error:
            self._farewell(error, final=False)
            return
        self.deadline = inf
        self._reader.max_frame_bytes = limits.MAX_FRAME_BYTES
        self._write(self._encoder.frame(self._listener.welcome(hello.version)))
        self.go_on()

    def _begin(self, frame: memoryview) -> None:
        request: Any = wire.read_request(frame)
        kind = type(request)
        verb = VERBS.get(kind)
        if verb is None or self._leaving:
            self._answer_at_once(request)
            return
        pending = PendingRequest(
            request, verb, len(frame), loop_seconds(), self._backpressure, self._finish
        )
        if kind is wire.Claim and request.wait_ms > 0:
            try:
                self._check_wait(request)
            except InvalidInput as error:
                self._fail(pending, error)
                return
            pending.until = pending.began + request.wait_ms / 1000
            self._waits[request.id] = pending
        else:
            if kind is wire.ReadLog:
                pending.size += answer_bytes(request)
            self._at_work[pending] = None
            if self._time_is_up is None and kind not in wire.LONG:
                self._watch_time(pending)
            self._listener.at_work.add(self._slot.share, pending.size)
        self._bytes_at_work += pending.size
        if kind not in WITH_MESSAGES or self._backpressure.admit(pending):
            self._run(pending)
        else:
            self._hold(pending)

    def _hold(self, pending: PendingRequest) -> None:
        """Hold a request until there is room; a claim that waits, no longer than its wait."""
        self._backpressure.hold(pending)
        if pending.until is not None:
            pending.alarm = self._loop.call_at(pending.until, self._give_up, pending)

    def _give_up(self, pending: PendingRequest) -> None:
        """Answer a held claim with nothing, since its time is up."""
        self._answer_empty(pending)
        self.go_on()

    def _watch_time(self, first: PendingRequest) -> None:
        at = first.began + self._patience_s
        self._time_is_up = self._loop.call_at(at, self._fail_late)

    def _fail_late(self) -> None:
        """Fail requests for which their client waits no longer; those not begun are not begun."""
        self._time_is_up = None
        before = self._loop.time() - self._patience_s
        for pending in list(self._at_work):
            if type(pending.request) in wire.LONG or pending.failure is not None:
                continue
            if pending.began > before:
                self._watch_time(pending)
                break
            answer = pending if pending.at_batcher else pending.future
            untouched = answer is None or self._batcher.withdraw(answer)
            outage = self._batcher.broker.outage
            why = "" if outage is None else f" (the store can't be used: {outage.why})"
            done = "it was not begun" if untouched else "it may or may not have been done"
            pending.failure = ServerUnreachable(
                f"{type(pending.request).__name__} was not answered within {self._patience_s:g} s"
                f"{why}: {done}"
            )
            if pending.future is None:
                self._backpressure.drop(pending)
                self._end(pending)
                self._fail(pending, pending.failure)
        self.go_on()

    def _answer_empty(self, pending: PendingRequest) -> None:
        self._backpressure.drop(pending)
        self._end(pending)
        self._write(self._encoder.frame((1, pending.request.id, None)))
        self._count(pending, "ok")

    def _run(self, pending: PendingRequest) -> None:
        request, verb = pending.request, pending.verb
        if pending.until is not None:
            pending.disarm()
            request.wait_ms = max(0, round((pending.until - self._loop.time()) * 1000))
        try:
            principal, pending.address = self._principal, self._slot.address
            assert principal is not None, "a client asks for nothing before its greeting"
            if principal is not ANYONE:
                verb.check(principal, request)
            future = verb.run(self._batcher, pending, principal)
        except Exception as error:
            self._end(pending)
            self._fail(pending, error)
            return
        if future is None:
            pending.at_batcher = True
        else:
            pending.future = future
            future.add_done_callback(partial(self._answer, pending))

    def _schedule_held(self) -> None:
        """Admit held requests in the next turn of the loop."""
        if not self._held_scheduled:
            self._held_scheduled = True
            self._loop.call_soon(self._begin_held)

    def _begin_held(self) -> None:
        """Begin held requests, as far as there is room."""
        self._held_scheduled = False
        while (pending := self._backpressure.next()) is not None:
            self._run(pending)
        # Requests that failed at once have made room without a callback.
        self.go_on()

    def _answer_at_once(self, request: wire.Request | wire.Failure) -> None:
        """Answer what needs no broker."""
        answer: object = request
        if isinstance(request, wire.Failure):
            pass
        elif isinstance(request, wire.Credit):
            self._consumers.add_credit(request)
            return
        elif self._leaving:
            answer = wire.Undone(request.id)
        elif isinstance(request, wire.Consume):
            self._consumers.begin(request, self._principal or ANYONE)
            return
        elif isinstance(request, wire.Cancel):
            self._withdraw(request)
            return
        else:
            assert isinstance(request, wire.Ping)
            answer = (1, request.id, self._listener.clock.now_ms())
        self._write(self._encoder.frame(answer))

    def _withdraw(self, request: wire.Cancel) -> None:
        """End a consumer, or a claim that waits, at the batcher or for room."""
        if request.claim in self._consumers:
            self._write(self._encoder.frame((1, request.id, True)))
            self._consumers.end(request.claim)
            return
        pending = self._waits.get(request.claim)
        held = pending is not None and (pending.future is None or pending.refused)
        done = held
        if pending is not None and pending.future is not None and not held:
            done = pending.future.cancel()
        self._write(self._encoder.frame((1, request.id, done)))
        if pending is not None and held:
            self._answer_empty(pending)

    def _check_wait(self, request: wire.Claim) -> None:
        check_count(request.wait_ms, "wait_ms", high=limits.MAX_WAIT_MS)
        if len(self._waits) >= limits.MAX_WAITING_CLAIMS:
            raise InvalidInput(f"{len(self._waits)} claims of this connection wait already")
        if request.id in self._waits:
            raise InvalidInput(f"a claim waits under the id {request.id} already")

    def _end(self, pending: PendingRequest) -> None:
        """Take a request out of those at work."""
        self._bytes_at_work -= pending.size
        if pending.until is None:
            del self._at_work[pending]
            listener = self._listener
            listener.at_work.give(self._slot.share, pending.size)
            if listener.waiting:
                listener.wake_waiting()
        else:
            self._waits.pop(pending.request.id, None)
            pending.disarm()
        if pending.taken:
            pending.leave()

    def _answer(self, pending: PendingRequest, future: Future[Any]) -> None:
        """Write the answer of a request that a future has."""
        if pending.refused:
            self._hold_again(pending)
        elif future.cancelled():
            self._finish(pending, None, None)
        else:
            error = future.exception()
            self._finish(pending, future.result() if error is None else None, error)

    def _finish(self, pending: PendingRequest, result: Any, error: BaseException | None) -> None:
        """Write the answer of a request, and go on with those that waited for room."""
        request, kind = pending.request, type(pending.request)
        if self._shut or self._transport.is_closing():
            self._end(pending)
            if kind is wire.Claim and result:
                self._batcher.take_back(result.receipts())
            return
        error = pending.failure or error
        if error is None:
            if kind is wire.Ack and request.refused_only:
                result = [each for each in result if each.status is not OutcomeStatus.DONE]
            try:
                frames = self._encoder.result(request.id, result)
                for frame in frames:
                    self._write(frame, result if kind is wire.Claim else None)
                if result and kind in WITH_MESSAGES and getattr(request, "payloads", True):
                    self._listener.sizes.learn(request.queue, sum(map(len, frames)) // len(result))
            except Exception as unwritable:
                error = unwritable
        # After it is written: others may begin only if that has left room.
        self._end(pending)
        if error is not None:
            if kind is wire.Claim and result:
                self._batcher.take_back(result.receipts())
            self._fail(pending, error)
        else:
            self._count(pending, "ok")
        if not self._reading:
            self.go_on()

    def _hold_again(self, pending: PendingRequest) -> None:
        """Hold a claim for which the batcher had something when there was no room."""
        pending.refused, pending.future = False, None
        if self._waits.get(pending.request.id) is not pending:
            # It was withdrawn, and answered, just now.
            return
        if self._leaving or self._shut:
            self._end(pending)
            self._write(self._encoder.frame(wire.Undone(pending.request.id)))
            return
        self._hold(pending)

    def _end_claims(self) -> None:
        """Cancel all claims and consumers: their messages go to other clients."""
        self._consumers.end_all()
        for pending in self._backpressure.clear():
            self._end(pending)
            self._write(self._encoder.frame(wire.Undone(pending.request.id)))
        for pending in list(self._waits.values()):
            if pending.future is not None:
                pending.future.cancel()

    def _fail(self, pending: PendingRequest, error: BaseException) -> None:
        if not isinstance(error, PenstockError):
            log.error("%s failed", type(pending.request).__name__, exc_info=error)
        failure = failure_of(pending.request.id, told(error, self._principal))
        self._write(self._encoder.frame(failure))
        self._count(pending, type(error).__name__)

    def _count(self, pending: PendingRequest, outcome: str) -> None:
        slot, request = self._slot, pending.request
        about = ("native", type(request).__name__, loop_seconds() - pending.began, outcome)
        self._listener.metrics.request(*about, slot.key_id, slot.address, request, pending.waited_s)

    # --- writing -------------------------------------------------------------------------------

    @property
    def _unsent(self) -> int:
        return self._out_bytes + super()._unsent

    def _write(self, frame: bytes, claimed: ClaimedMessages | None = None) -> None:
        """Write a frame at the end of this turn; ``claimed`` are the messages in it, if any."""
        if self._shut:
            if claimed:
                self._batcher.take_back(claimed.receipts())
            return
        if claimed:
            self._unwritten.append((self._out_bytes, claimed))
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes > limits.MAX_UNSENT_BYTES:
            # At once, so that the next request knows whether there is room for it.
            share = self._share
            self._flush()
            self._share = share

    def _flush(self) -> None:
        """Write the answers of a turn of the loop, which is over."""
        self._share = limits.MAX_TURN_ANSWERS
        out, self._out, size, self._out_bytes = self._out, [], self._out_bytes, 0
        unwritten, self._unwritten = self._unwritten, []
        if self._transport.is_closing():
            for _, claimed in unwritten:
                self._batcher.take_back(claimed.receipts())
        elif out:
            if unwritten:
                self._unsent_messages.note(unwritten, self._transport)
            self._unsent_messages.written_bytes += size
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
            if unwritten and self._stuck_since is not None:
                self._unsent_messages.keep_receipts()

    # --- the end -------------------------------------------------------------------------------

    def leave(self) -> None:
        """Begin nothing new; claims that wait are answered with nothing."""
        self._leaving = True
        bye = wire.Bye("BrokerClosed", "the server is stopping", final=False)
        self._write(self._encoder.frame(bye))
        self._end_claims()

    def close(self) -> None:
        """Send the answers that are ready, then close."""
        self._flush()
        super().close()

    def _farewell(self, error: PenstockError, *, final: bool) -> None:
        """Say why, and give the other side a moment to read it."""
        if not self._shut:
            failure = failure_of(0, error)
            self._end_with(self._encoder.frame(wire.Bye(failure.name, failure.message, final)))

    def _end_with(self, last: bytes) -> None:
        """Write the last bytes of the connection, and read no more requests."""
        self._flush()
        super()._end_with(last)
        self._end_claims()

    def check(self, now: float) -> None:
        """Close the connection if it has stalled, is idle, or its key is gone."""
        super().check(now)
        if self._shut or self._stuck_since is not None or self._principal is None:
            return
        self._unsent_messages.forget(self._transport)
        silent_ms = (now - self._heard) * 1000
        if self._reader.pending and self._reading and silent_ms > limits.MAX_STALL_MS:
            self._farewell(InvalidInput("a frame was begun and not ended"), final=False)
        elif silent_ms > limits.MAX_IDLE_MS and not self.busy:
            self._farewell(PenstockError("the connection was idle"), final=False)
        elif self._listener.keys is not None and self._login is None:
            # Keys are looked up again, so that one that was taken away is of no use any more.
            self._login = self._listener.log_in(self._token, self._check_key)

    def _check_key(self, principal: Principal | None) -> None:
        self._login, self._principal = None, principal
        if principal is None:
            self._farewell(NotAllowed("this key is not known any more"), final=True)
        else:
            self._consumers.check(principal)
            self.go_on()
