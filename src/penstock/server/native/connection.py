"""One native client: bytes in, requests at work, answers out.

A connection is read only while what it has asked for is within bounds and it takes its answers;
answers that are ready in one turn of the loop are written together. What may be claimed for it at
a time is up to :mod:`penstock.server.native.backpressure`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from penstock import limits
from penstock.errors import InvalidInput, NotAllowed, PenstockError, ServerUnreachable
from penstock.server.native.backpressure import Asked, Room
from penstock.server.native.verbs import VERBS, claim_in_turn
from penstock.server.security import ANYONE
from penstock.validation import check_duration
from penstock.wire.native import messages as wire
from penstock.wire.native.messages import FrameReader, failure_of
from penstock.wire.native.progress import progress_of

if TYPE_CHECKING:
    from asyncio import Future

    from penstock.model import Delivery
    from penstock.server.connections import Slot
    from penstock.server.native.listener import NativeListener
    from penstock.server.security import Principal

__all__ = ["Connection"]

log = logging.getLogger(__name__)

# How long the other side has to read a farewell before the connection is closed under it.
LINGER_SECONDS: Final = 1.0
WANTS_A_KEY: Final = "this server wants a key: token='KEY:SECRET'"
# Answers to these hold messages, of which nobody knows the size before.
WITH_MESSAGES: Final = frozenset({wire.Claim, wire.Browse})


class Connection(asyncio.Protocol):
    """A connection, as the loop calls it."""

    def __init__(self, listener: NativeListener, slot: Slot) -> None:
        self._listener = listener
        self._slot = slot
        self._loop = listener.loop
        self._desk = listener.desk
        self._encoder = listener.encoder
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(limits.MAX_HELLO_BYTES)
        self._token = ""
        self._principal: Principal | None = None
        self._at_work = 0
        self._bytes_at_work = 0
        # How long the client waits for an answer; requests that have to be answered in that time,
        # in order, and what looks after the first of them.
        self._patience_s = limits.MAX_ANSWER_MS / 1000
        self._in_time: OrderedDict[Asked, None] = OrderedDict()
        self._time_is_up: asyncio.TimerHandle | None = None
        # Claims that may wait, by the id of their request.
        self._waits: dict[int, Asked] = {}
        self._room = Room(listener.sizes, self._freed)
        self._letting_in = False
        # What was not begun yet when the connection ends, nobody needs.
        self._calls: set[Future[Any]] = set()
        self._out: list[bytes] = []
        self._out_bytes = 0
        # Messages whose answer is among what is to be written.
        self._unwritten: list[Delivery] = []
        self._flushing = False
        self._buffered = 0
        self._reading = True
        self._stuck_since: float | None = None
        self._stuck_taken = 0
        self._leaving = False
        self._deaf = False
        self._made = self._heard = self._loop.time()

    @property
    def busy(self) -> bool:
        """Whether something is in hand or unsent."""
        in_hand = self._at_work or self._waits or self._out
        return bool(in_hand) or self._stuck_since is not None

    # --- called by the loop --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a greeting."""
        # A loop's transports need not be of asyncio's classes.
        made = cast(asyncio.Transport, transport)
        self._transport = made
        made.set_write_buffer_limits(high=limits.MAX_UNSENT_BYTES)
        listener = self._listener
        listener.connections.add(self)
        self._slot.holder = self
        if self._slot.full:
            self._farewell(PenstockError("too many connections"), final=False)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - whatever it was
        """Forget the claims that wait: what comes for them goes to somebody else."""
        self._transport = None
        self._listener.connections.discard(self)
        self._listener.all.leave(self._slot)
        self._listener.waiting.discard(self)
        self._reader = FrameReader(1)
        self._out.clear()
        self._account()
        for future in list(self._calls):
            future.cancel()
        self._let_claims_go()
        if self._time_is_up is not None:
            self._time_is_up.cancel()

    def data_received(self, data: bytes) -> None:
        """Take bytes in whatever pieces."""
        self._heard = self._loop.time()
        if not self._deaf:
            self._reader.feed(data)
            self._work()
            self._account()

    def eof_received(self) -> bool:
        """Close: who sends nothing more is not answered either."""
        # Now, since it takes as long to close as it does to send what was answered before.
        self._let_claims_go()
        return False

    def pause_writing(self) -> None:
        """Read nothing from who does not read, and have nothing more claimed."""
        self._stuck_since = self._loop.time()
        if self._transport is not None:
            self._stuck_taken = progress_of(self._transport).taken
        self._room.shut()
        self._account()

    def resume_writing(self) -> None:
        """Go on where it stopped."""
        self._stuck_since = None
        self._room.reopen()
        self._work()
        self._account()

    def _account(self) -> None:
        """Count what waits here: to be whole, to be begun, or to be read by the client."""
        pending = self._reader.pending
        if self._stuck_since is not None:
            pending += self._unsent
        if pending != self._buffered:
            self._buffered = pending
            self._listener.all.hold(self._slot, pending)

    @property
    def idle(self) -> bool:
        """Whether no request is at work; claims that wait are nobody's loss."""
        return not self._at_work

    def refuse(self, why: str) -> None:
        """Make way for others: they have more in hand than there may be."""
        if self._stuck_since is not None:
            self.abort()
        else:
            self._farewell(PenstockError(why), final=False)

    # --- requests ------------------------------------------------------------------------------

    def _may_go_on(self) -> bool:
        return (
            self._at_work < limits.MAX_REQUESTS_AT_WORK
            and self._bytes_at_work < limits.MAX_BYTES_AT_WORK
            and self._stuck_since is None
            and not self._deaf
            and self._has_room()
        )

    def _has_room(self) -> bool:
        """Whether all connections together have not too much at work; if so, wait for less."""
        listener = self._listener
        if listener.bytes_at_work < limits.MAX_ALL_BYTES_AT_WORK:
            return True
        listener.waiting.add(self)
        return False

    def _work(self) -> None:
        """Begin what has come, as far as bounds allow; read on only if they do."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        try:
            while self._may_go_on() and (frame := self._reader.take()) is not None:
                if self._principal is None:
                    self._greet(frame)
                else:
                    self._begin(frame)
        except InvalidInput as error:
            self._farewell(error, final=self._principal is None)
            return
        if self._deaf:
            return
        wanted = self._may_go_on()
        if wanted is not self._reading:
            self._reading = wanted
            (transport.resume_reading if wanted else transport.pause_reading)()

    def go_on(self) -> None:
        """Begin what had to wait until others were through."""
        if not self._reading:
            self._work()
            self._account()

    def _greet(self, frame: memoryview) -> None:
        hello = wire.read_hello(frame)
        principal = self._listener.who(hello.token)
        if principal is None:
            log.warning("a native client was refused: no such key")
            text = "the key is not known, or its secret is another" if hello.token else WANTS_A_KEY
            self._farewell(NotAllowed(text), final=True)
            return
        self._principal, self._token = principal, hello.token
        if hello.patience_ms > 0:
            self._patience_s = min(hello.patience_ms, limits.MAX_WAIT_MS) / 1000
        self._listener.all.trust(self._slot)
        self._reader.max_frame_bytes = limits.MAX_FRAME_BYTES
        self._write(self._encoder.frame(self._listener.welcome(hello.version)))

    def _begin(self, frame: memoryview) -> None:
        request: Any = wire.read_request(frame)
        kind = type(request)
        verb = VERBS.get(kind)
        if verb is None or self._leaving:
            self._answer_at_once(request)
            return
        asked = Asked(request, verb, len(frame), self._loop.time(), self._room)
        if kind is wire.Claim and request.wait_ms > 0:
            try:
                self._check_wait(request)
            except InvalidInput as error:
                self._fail(asked, error)
                return
            asked.until = asked.began + request.wait_ms / 1000
            self._waits[request.id] = asked
        else:
            if kind not in WITH_MESSAGES:
                asked.size += verb.weight(request, 0)
            self._at_work += 1
            if kind not in wire.LONG:
                self._in_time[asked] = None
                if self._time_is_up is None:
                    self._watch_time(asked)
            self._listener.work_of(asked.size)
        self._bytes_at_work += asked.size
        if kind in WITH_MESSAGES and not self._room.enter(asked):
            self._hold(asked)
        else:
            self._run(asked)

    def _hold(self, asked: Asked) -> None:
        """Have a request wait for room: a claim that waits for messages no longer than for them."""
        self._room.hold(asked)
        if asked.until is not None:
            asked.alarm = self._loop.call_at(asked.until, self._give_up, asked)

    def _give_up(self, asked: Asked) -> None:
        """Answer a held claim with nothing, since its time is up."""
        self._answer_empty(asked)
        self.go_on()

    def _watch_time(self, first: Asked) -> None:
        at = first.began + self._patience_s
        self._time_is_up = self._loop.call_at(at, self._fail_late)

    def _fail_late(self) -> None:
        """Fail requests for which their client waits no longer; those not begun are not begun."""
        self._time_is_up = None
        before = self._loop.time() - self._patience_s
        while self._in_time:
            asked = next(iter(self._in_time))
            if asked.began > before:
                self._watch_time(asked)
                return
            del self._in_time[asked]
            untouched = asked.future is None or self._desk.withdraw(asked.future)
            outage = self._desk.broker.outage
            why = "" if outage is None else f" (the store can't be used: {outage.why})"
            done = "it was not begun" if untouched else "it may or may not have been done"
            asked.failure = ServerUnreachable(
                f"{type(asked.request).__name__} was not answered within {self._patience_s:g} s"
                f"{why}: {done}"
            )
            if asked.future is None:
                self._room.drop(asked)
                self._end(asked)
                self._fail(asked, asked.failure)
        self.go_on()

    def _answer_empty(self, asked: Asked) -> None:
        self._room.drop(asked)
        self._end(asked)
        self._write(self._encoder.frame((1, asked.request.id, [])))
        self._count(asked, "ok")

    def _run(self, asked: Asked) -> None:
        request, verb = asked.request, asked.verb
        asked.disarm()
        try:
            principal = self._principal
            assert principal is not None, "who has not greeted asks for nothing"
            if principal is not ANYONE:
                verb.check(principal, request)
            if asked.until is None:
                future = verb.run(self._desk, request, principal)
            else:
                left_ms = round((asked.until - self._loop.time()) * 1000)
                request.wait_ms = max(0, left_ms)
                future = claim_in_turn(self._desk, request, asked)
        except Exception as error:
            self._end(asked)
            self._fail(asked, error)
            return
        asked.future = future
        if not verb.at_the_desk:
            self._calls.add(future)
        future.add_done_callback(partial(self._answer, asked))

    def _freed(self) -> None:
        if not self._letting_in:
            self._letting_in = True
            self._loop.call_soon(self._let_in)

    def _let_in(self) -> None:
        """Begin what was held, as far as there is room."""
        self._letting_in = False
        while (asked := self._room.next()) is not None:
            self._run(asked)
        # Those that failed at once have made way, and nobody else tells.
        self.go_on()

    def _answer_at_once(self, request: wire.Request | wire.Failure) -> None:
        """Answer what needs no broker."""
        answer: object = request
        if isinstance(request, wire.Failure):
            pass
        elif self._leaving:
            answer = wire.Undone(request.id)
        elif isinstance(request, wire.Cancel):
            self._withdraw(request)
            return
        else:
            assert isinstance(request, wire.Ping)
            answer = (1, request.id, self._listener.clock.now_ms())
        self._write(self._encoder.frame(answer))

    def _withdraw(self, request: wire.Cancel) -> None:
        """End a claim that waits, at the desk or for room."""
        asked = self._waits.get(request.claim)
        at_the_desk = asked is not None and asked.future is not None and not asked.refused
        done = asked is not None
        if asked is not None and at_the_desk:
            assert asked.future is not None
            done = asked.future.cancel()
        self._write(self._encoder.frame((1, request.id, done)))
        if asked is not None and not at_the_desk:
            self._answer_empty(asked)

    def _check_wait(self, request: wire.Claim) -> None:
        check_duration(request.wait_ms, "wait_ms", high=limits.MAX_WAIT_MS)
        if len(self._waits) >= limits.MAX_WAITING_CLAIMS:
            raise InvalidInput(
                f"{limits.MAX_WAITING_CLAIMS} claims of this connection wait already"
            )
        if request.id in self._waits:
            raise InvalidInput(f"a claim waits under the id {request.id} already")

    def _end(self, asked: Asked) -> None:
        """Have a request at work no longer."""
        self._bytes_at_work -= asked.size
        if asked.until is None:
            self._at_work -= 1
            self._in_time.pop(asked, None)
            self._listener.work_of(-asked.size)
        else:
            self._waits.pop(asked.request.id, None)
            asked.disarm()
        if asked.taken:
            asked.leave()

    def _answer(self, asked: Asked, future: Future[Any]) -> None:
        """Write what came of a request, and go on with those that had to wait for room."""
        if asked.refused:
            self._put_off(asked)
            return
        request = asked.request
        if not asked.verb.at_the_desk:
            self._calls.discard(future)
        if self._is_over:
            self._end(asked)
            self._take_back(request, future)
            return
        error: BaseException | None = asked.failure
        if error is None and not future.cancelled():
            error = future.exception()
        if error is None:
            result = [] if future.cancelled() else future.result()
            try:
                self._write_result(request, result)
            except Exception as unwritable:
                error = unwritable
                self._take_back(request, future)
        # After it is written: others may begin only if that has left room.
        self._end(asked)
        if error is not None:
            self._fail(asked, error)
        elif self._listener.metrics is not None:
            self._count(asked, "ok")
        self.go_on()

    def _put_off(self, asked: Asked) -> None:
        """Hold a claim for which the desk had something when there was no room."""
        asked.refused, asked.future = False, None
        if self._waits.get(asked.request.id) is not asked:
            # It was withdrawn, and answered, just now.
            return
        if self._leaving or self._deaf or self._transport is None:
            self._end(asked)
            self._write(self._encoder.frame(wire.Undone(asked.request.id)))
            return
        self._hold(asked)

    def _let_claims_go(self) -> None:
        """Forget claims for good: what comes for them goes to somebody else."""
        for asked in self._room.clear():
            self._end(asked)
        for asked in list(self._waits.values()):
            if asked.future is not None:
                asked.future.cancel()

    def _write_result(self, request: Any, result: Any) -> None:
        frames = self._encoder.result(request.id, result)
        for frame in frames:
            self._write(frame)
        kind = type(request)
        if kind is wire.Claim and self._out:
            self._unwritten += result
        if result and (kind is wire.Claim or (kind is wire.Browse and request.payloads)):
            self._listener.sizes.saw(request.queue, sum(map(len, frames)) // len(result))

    @property
    def _is_over(self) -> bool:
        """Whether nothing that is written now would be sent."""
        return self._deaf or self._transport is None or self._transport.is_closing()

    def _take_back(self, request: wire.Request, future: Future[Any]) -> None:
        """Give back at once what was claimed for who can't be told."""
        if future.cancelled() or future.exception() is not None:
            return
        if isinstance(request, wire.Claim):
            self._desk.take_back(future.result())

    def _fail(self, asked: Asked, error: BaseException) -> None:
        if not isinstance(error, PenstockError):
            log.error("%s failed", type(asked.request).__name__, exc_info=error)
        self._write(self._encoder.frame(failure_of(asked.request.id, error)))
        self._count(asked, type(error).__name__)

    def _count(self, asked: Asked, outcome: str) -> None:
        metrics = self._listener.metrics
        if metrics is not None:
            seconds = self._loop.time() - asked.began
            metrics.request("native", type(asked.request).__name__, seconds, outcome)

    # --- writing -------------------------------------------------------------------------------

    @property
    def _unsent(self) -> int:
        waiting = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._out_bytes + waiting

    def _write(self, frame: bytes) -> None:
        if self._deaf:
            return
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes > limits.MAX_UNSENT_BYTES:
            # At once, so that what comes next knows whether there is room for it.
            self._flush()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        out, self._out, self._out_bytes = self._out, [], 0
        unwritten, self._unwritten = self._unwritten, []
        if self._transport is None or self._transport.is_closing():
            self._desk.take_back(unwritten)
        elif out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    # --- the end -------------------------------------------------------------------------------

    def leave(self) -> None:
        """Begin nothing new; claims that wait are answered with nothing."""
        self._leaving = True
        self._write(
            self._encoder.frame(wire.Bye("BrokerClosed", "the server is stopping", final=False))
        )
        for asked in self._room.clear():
            self._end(asked)
            self._write(self._encoder.frame(wire.Undone(asked.request.id)))
        for asked in list(self._waits.values()):
            if asked.future is not None:
                asked.future.cancel()

    def close(self) -> None:
        """Send what is ready, then close."""
        self._flush()
        self._deaf = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _farewell(self, error: PenstockError, *, final: bool) -> None:
        """Say why, and give the other side a moment to read it."""
        if self._deaf:
            return
        failure = failure_of(0, error)
        self._write(self._encoder.frame(wire.Bye(failure.name, failure.message, final)))
        self._flush()
        # What still comes is read and dropped: closing over unread bytes would take the farewell
        # back before it is read.
        self._deaf = True
        self._let_claims_go()
        self._reader = FrameReader(1)
        if self._transport is not None:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            if not self._reading:
                self._reading = True
                self._transport.resume_reading()
        self._loop.call_later(LINGER_SECONDS, self.abort)

    def tidy(self, now: float) -> None:
        """Close what has stalled, is idle, or whose key is gone."""
        silent_ms = (now - self._heard) * 1000
        if self._stuck_since is not None and self._transport is not None:
            taken = progress_of(self._transport).taken
            if taken > self._stuck_taken:
                # Slow as it may be, it reads.
                self._stuck_since = now
            self._stuck_taken = taken
            if (now - self._stuck_since) * 1000 > limits.MAX_STALL_MS:
                log.warning("a native client that does not read its answers was cut off")
                self.abort()
            return
        if self._principal is None:
            # Since it was made: a greeting that dribbles in must not hold a connection.
            if (now - self._made) * 1000 > limits.MAX_GREETING_MS:
                self.abort()
            return
        if self._reader.pending and self._reading and silent_ms > limits.MAX_STALL_MS:
            self._farewell(InvalidInput("a frame was begun and not ended"), final=False)
        elif silent_ms > limits.MAX_IDLE_MS and not self.busy:
            self._farewell(PenstockError("the connection was idle"), final=False)
        elif self._listener.keys is not None:
            # Keys are looked up again, so that one that was taken away is of no use any more.
            self._principal = self._listener.who(self._token)
            if self._principal is None:
                self._farewell(NotAllowed("this key is not known any more"), final=True)
