"""The state of a client: frames to send, calls that wait, calls to repeat, when to reconnect.

::

              connected()            welcome
    away ──────────────────▶ greeting ──────▶ ready ──── bye ────▶ leaving
      ▲                          │              │                     │
      └───────── lost() ─────────┴──────────────┴─────────────────────┘
                                                  close(), or a refusal for good: closed

It is given bytes and the time, and leaves the rest to its transport: bytes to write (``output``),
calls that are over (``done``), and when to connect (``connect_at_ms``). A call that was not sent
waits for the next connection. One that was sent and not answered before its connection was lost is
sent again only if that is safe; otherwise it fails. ``turns`` has the addresses.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock import errors, limits
from penstock.client.calls import Call, Repeat, cancel, doubtful, may_repeat, ping, release
from penstock.client.turns import Turns
from penstock.errors import BrokerClosed, InvalidInput, ServerUnreachable, StoreFenced
from penstock.wire import native as wire
from penstock.wire.frames import FrameReader, protocol_of
from penstock.wire.native import error_of

if TYPE_CHECKING:
    from penstock.client.consumers import Subscription
    from penstock.errors import PenstockError
    from penstock.wire.frames import Progress

log = logging.getLogger(__name__)

# How long the other side may be silent before it is asked, and then until it is given up. It has
# to answer only once it has the question, which waits behind the bytes that were written before.
PING_MS: Final = 10_000
SILENCE_MS: Final = 10_000
# The same for one of several servers that owes an answer, at the least.
LEAST_SILENCE_MS: Final = 1_000
# How long calls fail at once after a refusal of the key; then one tries again.
REFUSED_MS: Final = 1_000
# How long the pause is after a server has lost its store, as if it had been tried so often.
FENCED_TRIES: Final = 3
# The share of a server's dedup window in which a publish may be sent again: the rest is for the
# way there.
REPEAT_SHARE: Final = 0.8
# The share of a call's patience that the server may use up: the rest is for the way there and back.
ANSWER_SHARE: Final = 0.9

# The decoder of a type of answers.
_decoder: Final = cache(msgspec.msgpack.Decoder)
# Errors for what can't be put into bytes.
_UNSENDABLE: Final[dict[type[wire.Request], type[InvalidInput]]] = {
    wire.Publish: errors.InvalidMessage,
    wire.CreateQueue: errors.InvalidQueue,
    wire.UpdateQueue: errors.InvalidQueue,
}

_NATIVE: Final = f"penstock:// needs the native port, {wire.DEFAULT_PORT} unless it was set"
_FOREIGN: Final = {
    "HTTP": f"speaks HTTP, for SQS clients and browsers: {_NATIVE}",
    "gRPC": f"speaks gRPC, for Arrow Flight and Spark: {_NATIVE}",
    "TLS": "speaks TLS: connect to penstocks://, or with tls=",
}

Callback = Callable[[Any, BaseException | None], None]
"""Called once with the result of a call, or its error."""


class Phase(Enum):
    """The phase of the connection."""

    AWAY = "away"
    GREETING = "greeting"
    READY = "ready"
    LEAVING = "leaving"
    CLOSED = "closed"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of :func:`penstock.connect`.

    ``patience_ms``: how long a call waits for a connection, and then for its answer.
    """

    token: str = ""
    name: str = ""
    patience_ms: int = 10_000
    dedup: bool = False


class _PendingCall(msgspec.Struct, eq=False):
    """A call that is not over.

    ``callback`` None: nobody waits for it, or nobody does any more. ``sent_ms`` is when it was sent
    for the first time, ``fenced_ms`` when a server first said that another process owns the store.
    """

    call: Call[Any]
    callback: Callback | None
    since_ms: int
    sent_ms: int | None = None
    fenced_ms: int | None = None
    repeated: bool = False

    @property
    def useless(self) -> bool:
        """Whether it need not be sent again: only messages are given back for nobody."""
        return self.callback is None and not isinstance(self.call.request, wire.Release)


class ClientConnection:
    """The state of one client, across all of its connections. For one thread."""

    def __init__(
        self,
        options: Options,
        *,
        now_ms: int,
        random: Callable[[], float],
        fresh: bytes,
        addresses: Sequence[str] = ("",),
    ) -> None:
        self.options = options
        self.turns = Turns(addresses, random)
        # Dedup ids are this client's own sixteen bytes and a number.
        self._fresh = fresh.hex()
        self._made = 0
        self.phase = Phase.AWAY
        self.welcome: wire.Welcome | None = None
        self.failure: PenstockError | None = None
        # When a client that had been connected was refused; None: it is closed for good, or not.
        self._refused_ms: int | None = None
        self.connect_at_ms = now_ms
        self.hang_up = False
        self.paused = False
        self._away_since_ms = now_ms
        # Which protocol the server speaks, if it is another than this one, and what to try.
        self.foreign = ""
        # The error of a server that has lost its store: the client leaves it.
        self._fenced = ""
        self._max_frame_bytes = limits.MAX_FRAME_BYTES
        self._repeat_ms: float = limits.MAX_REPEAT_MS
        self._encoder = wire.Encoder()
        self._reader = FrameReader()
        self._next_id = 1
        self._waiting: deque[_PendingCall] = deque()
        self._sent: dict[int, _PendingCall] = {}
        self._parts: dict[int, list[bytes]] = {}
        # Told of calls that settle or extend, since they may be of messages that were pushed.
        self.subscriptions: set[Subscription] = set()
        self.output: list[bytes] = []
        self.done: list[tuple[Callback, Any, BaseException | None]] = []
        self._heard_ms = self._connected_ms = now_ms
        self._asked_ms: int | None = None
        # Bytes that the server had taken at the last look, whether these were all, and whether
        # it was also the question; and when it was last seen to take more of what it had not, or to
        # be in the middle of an answer.
        self._taken, self._all_taken = 0, True
        self._question_came = False
        self._moved_ms = now_ms

    # --- calls -----------------------------------------------------------------------------

    def submit(
        self, call: Call[Any], callback: Callback | None, now_ms: int
    ) -> _PendingCall | None:
        """Take a call; ``callback`` is called when it is over. None: it is over already."""
        pending = _PendingCall(call, callback, now_ms)
        if self._refused_ms is not None and now_ms >= self._refused_ms + REFUSED_MS:
            self.phase, self.failure, self._refused_ms = Phase.AWAY, None, None
            self.connect_at_ms = self._away_since_ms = now_ms
            self.turns.welcomed(now_ms)
        if self.phase is Phase.CLOSED:
            self._fail(pending, self.failure or BrokerClosed("the client is closed"))
            return None
        if self.options.dedup and isinstance(call.request, wire.Publish):
            for each in call.request.messages:
                if each.dedup_id is None:
                    self._made += 1
                    each.dedup_id = f"{self._fresh}-{self._made:x}"
        if self.phase is Phase.READY and not self.paused and not self._waiting:
            self._send(pending, now_ms)
        else:
            self._waiting.append(pending)
        if self.subscriptions:
            self._tell_subscriptions(call.request)
        return pending

    def _tell_subscriptions(self, request: wire.Request) -> None:
        """Tell subscriptions of receipts that a call settles or extends."""
        for each in list(self.subscriptions):
            if isinstance(request, wire.Ack | wire.Release):
                each.settling(request.receipts)
            elif isinstance(request, wire.Extend):
                each.extending(request.receipts, request.lease_ms)

    def grant(self, pending: _PendingCall | None, credit: int, credit_bytes: int) -> None:
        """Give the server credit for a subscription; one that is not sent yet asks for more."""
        if pending is None:
            return
        request = pending.call.request
        assert isinstance(request, wire.Consume), "only these have credit"
        request.credit += credit
        request.credit_bytes += credit_bytes
        if self._sent.get(request.id) is pending and self.phase is Phase.READY:
            self.output.append(self._encoder.frame(wire.Credit(request.id, credit, credit_bytes)))

    def withdraw(self, pending: _PendingCall, now_ms: int) -> None:
        """Forget a call whose caller has gone; a claim that waits at the server is ended."""
        pending.callback = None
        request = pending.call.request
        if (
            self._sent.get(request.id) is pending
            and isinstance(request, wire.Claim | wire.Consume)
            and self.phase in {Phase.READY, Phase.LEAVING}
        ):
            self._send(_PendingCall(cancel(request.id), None, now_ms), now_ms)

    def give_back(self, call: Call[Any], result: Any, now_ms: int) -> None:
        """Release the messages of a claim whose caller had gone by then."""
        if not result or not isinstance(call.request, wire.Claim):
            return
        back = release([each.receipt for each in result], reason="withdrawn", unseen=True)
        self.submit(back, None, now_ms)

    def abandon(self, error: PenstockError, now_ms: int) -> None:
        """Fail claims and consumers, and end them at the server before the connection ends."""
        for pending in list(self._sent.values()):
            kind = wire.Claim | wire.Consume
            if isinstance(pending.call.request, kind) and pending.callback is not None:
                self._fail(pending, error)
                self.withdraw(pending, now_ms)

    @property
    def giving_back(self) -> bool:
        """Whether the server has yet to hear, or to say, what becomes of messages of those gone."""
        back = wire.Claim | wire.Consume | wire.Release
        return any(
            (pending.callback is None and isinstance(pending.call.request, back))
            or isinstance(pending.call.request, wire.Ack)
            or getattr(pending.call.request, "unseen", False)
            for pending in chain(self._sent.values(), self._waiting)
        )

    # --- the connection --------------------------------------------------------------------

    @property
    def turn_ms(self) -> int:
        """How long a server has for its greeting."""
        return self.turns.turn_ms(SILENCE_MS, self.options.patience_ms)

    def connected(self, now_ms: int) -> None:
        """Greet: a connection stands."""
        self.phase = Phase.GREETING
        self.hang_up = False
        self.foreign = ""
        self.paused = False
        self._reader = FrameReader()
        self._heard_ms, self._asked_ms = now_ms, None
        self._connected_ms = now_ms
        options = self.options
        patience_ms = int(options.patience_ms * ANSWER_SHARE)
        hello = wire.Hello(wire.MAGIC, wire.VERSION, options.token, options.name, patience_ms)
        self.output = [self._encoder.frame(hello)]

    def lost(self, why: str, now_ms: int) -> None:
        """Repeat or fail the calls of a connection that has ended, or was never made."""
        if self.phase is Phase.CLOSED:
            return
        ready = self.phase in {Phase.READY, Phase.LEAVING}
        if ready:
            self._away_since_ms = now_ms
        self.phase = Phase.AWAY
        self.hang_up = False
        self.connect_at_ms = self.turns.lost(why, now_ms, ready=ready)
        self.output.clear()
        self._parts.clear()
        sent, self._sent = self._sent, {}
        again = []
        for pending in sent.values():
            if pending.useless:
                continue
            if may_repeat(pending.call) and not self._is_late(pending, now_ms):
                pending.repeated = True
                pending.since_ms = now_ms
                again.append(pending)
            else:
                self._fail_unanswered(pending, now_ms)
        self._waiting.extendleft(reversed(again))

    def refuse(self, error: PenstockError, now_ms: int, at: int | None = None) -> None:
        """Note that an address is of no use as it is; if none is of any, close for good."""
        current = self.turns.at
        failure = self.turns.refuse(error, current if at is None else at)
        if failure is not None:
            self.close(failure)
            if self.welcome is not None and isinstance(failure, errors.NotAllowed):
                # A key that was good may be so again.
                self._refused_ms = now_ms
        elif at in {None, current}:
            self._give_up(str(error))

    def received(self, data: bytes, now_ms: int) -> None:
        """Take bytes from the server."""
        self._heard_ms, self._asked_ms = now_ms, None
        if self.phase is Phase.GREETING and (spoken := protocol_of(data)):
            self.foreign = _FOREIGN[spoken]
            self._give_up(f"the server {self.foreign}")
            return
        reader = self._reader
        reader.feed(data)
        try:
            while not self.hang_up and reader.pending and (frame := reader.take()) is not None:
                try:
                    answer = wire.decode_answer(frame)
                except (msgspec.ValidationError, UnicodeDecodeError):
                    answer = wire.read_spoiled(frame)
                if type(answer) is wire.Result:
                    self._settle(answer.id, answer.value, now_ms)
                else:
                    self._read(answer, now_ms)
        except (InvalidInput, *wire.UNREADABLE) as error:
            self._give_up(f"the server sent what can't be read: {error}")
        if reader.pending or self._parts:
            # The other answers may be behind this one.
            self._moved_ms = now_ms
        if self._fenced:
            # Now that everything is read which it had said before.
            self._give_up(self._fenced)
            self._fenced = ""
        elif self.phase is Phase.LEAVING and self.turns.several and not self._sent:
            # Another server takes the calls that wait: no need to stay until this one has stopped.
            self._give_up(self.turns.reason)

    def resume(self, now_ms: int) -> None:
        """Send the calls that waited: the connection is ready, or takes bytes again."""
        self.paused = False
        while self._waiting and self.phase is Phase.READY and not self.paused:
            pending = self._waiting.popleft()
            if pending.useless:
                continue
            if self._is_late(pending, now_ms):
                self._fail_unanswered(pending, now_ms)
            else:
                self._send(pending, now_ms)

    def progressed(self, progress: Progress, now_ms: int) -> None:
        """Note how many of the written bytes the server has taken.

        While a server takes what it had not, it is not silent and no call is late.
        """
        if progress.taken > self._taken and not self._all_taken:
            self._moved_ms = now_ms
        if self._asked_ms is not None and not self._question_came:
            if progress.all:
                self._question_came = True
            elif progress.taken > self._taken:
                self._asked_ms = now_ms
        self._taken, self._all_taken = progress

    def tick(self, now_ms: int) -> None:
        """Do what time asks for: ask a silent server, give up on it, give up on waiting calls."""
        if self.phase is not Phase.AWAY:
            silent_ms = now_ms - (self._heard_ms if self._asked_ms is None else self._asked_ms)
            ping_ms, most_ms = PING_MS, SILENCE_MS
            why = "has been silent for too long"
            if self.phase is Phase.GREETING:
                # Its whole time: one that dribbles in keeps the client from the other addresses.
                silent_ms, most_ms = now_ms - self._connected_ms, self.turn_ms
                why = f"sent no whole greeting within {most_ms} ms"
            elif self.turns.several and self._sent:
                # Another server may answer while the patience of the calls lasts.
                ping_ms = most_ms = max(LEAST_SILENCE_MS, self.turn_ms // 2)
            if self._asked_ms is not None or self.phase is not Phase.READY:
                if silent_ms >= most_ms:
                    self._give_up(f"the server {why}")
            elif silent_ms >= ping_ms:
                self._asked_ms, self._question_came = now_ms, False
                self._send(_PendingCall(ping(), None, now_ms), now_ms)
        self._fail_late(now_ms)
        for subscription in list(self.subscriptions):
            subscription.tick(now_ms)
        if self.phase is Phase.READY:
            return
        patience_ms = self.options.patience_ms
        while self._waiting:
            pending = self._waiting[0]
            if now_ms < max(pending.since_ms, self._away_since_ms) + patience_ms:
                break
            self._waiting.popleft()
            text = f"no server for {patience_ms} ms: {self.turns.why}"
            if pending.repeated:
                text = f"{_unanswered(pending.call, self.turns.reason)}; {text}"
            self._fail(pending, ServerUnreachable(text))

    def _fail_late(self, now_ms: int) -> None:
        """Fail calls that were sent, and not answered for as long as they may take.

        Not while bytes go out or an answer comes in: theirs may be behind it.
        """
        for pending in list(self._sent.values()):
            request, patience_ms = pending.call.request, self.options.patience_ms
            if pending.callback is None or type(request) in wire.LONG:
                continue
            late_ms = max(pending.since_ms, self._moved_ms) + patience_ms
            if isinstance(request, wire.Claim):
                late_ms += request.wait_ms
            if now_ms >= late_ms:
                # A late answer is dropped; the messages of a late claim are released.
                name, rest = type(request).__name__, _rest(pending.call)
                text = f"the server did not answer {name} within {patience_ms} ms: {rest}"
                self._fail(pending, ServerUnreachable(text))
                self.withdraw(pending, now_ms)

    def close(self, error: PenstockError | None = None) -> None:
        """End for good; every call that is not over fails."""
        self.phase, self._refused_ms = Phase.CLOSED, None
        self.failure = error
        self.hang_up = True
        everything = list(chain(self._sent.values(), self._waiting))
        self._sent.clear()
        self._waiting.clear()
        for pending in everything:
            self._fail(pending, error or BrokerClosed("the client was closed"))

    # --- inside ----------------------------------------------------------------------------

    def _read(self, frame: wire.ServerFrame, now_ms: int) -> None:
        if isinstance(frame, wire.Failure):
            pending = self._sent.pop(frame.id, None)
            if pending is not None:
                error = error_of(frame)
                if isinstance(error, StoreFenced):
                    self._leave(pending, error, now_ms)
                else:
                    self._fail(pending, error)
        elif isinstance(frame, wire.Part):
            parts = self._parts.setdefault(frame.id, [])
            parts.append(frame.data)
            if frame.last:
                del self._parts[frame.id]
                self._settle(frame.id, b"".join(parts), now_ms)
        elif isinstance(frame, wire.Deliveries):
            self._push(frame, now_ms)
        elif isinstance(frame, wire.Undone):
            pending = self._sent.pop(frame.id, None)
            if pending is not None and not pending.useless:
                pending.since_ms = now_ms
                if not pending.repeated:
                    pending.sent_ms = None
                self._waiting.append(pending)
        elif isinstance(frame, wire.Bye):
            self.turns.reason = f"the server said: {frame.message}"
            if frame.final:
                self.refuse(error_of(frame), now_ms)
            elif self.phase is Phase.READY:
                self.phase = Phase.LEAVING
        elif isinstance(frame, wire.Welcome) and self.phase is Phase.GREETING:
            if frame.version < wire.OLDEST_VERSION:
                text = f"the server speaks version {frame.version} of the protocol: upgrade it"
                self.refuse(ServerUnreachable(text), now_ms)
                return
            known = self.welcome
            if self.turns.several and known is not None and known.store_id != frame.store_id:
                # Receipts and dedup ids of one store mean nothing to another.
                text = f"the server has store {frame.store_id}, the others {known.store_id}"
                error = ServerUnreachable(f"{text}: all addresses must be of one store")
                self.refuse(error, now_ms)
                return
            self.welcome = frame
            self.turns.welcomed(now_ms)
            self._max_frame_bytes = frame.limits.get("frame_bytes", limits.MAX_FRAME_BYTES)
            window_ms = frame.limits.get("dedup_window_ms", limits.MAX_REPEAT_MS / REPEAT_SHARE)
            self._repeat_ms = min(limits.MAX_REPEAT_MS, window_ms * REPEAT_SHARE)
            self.phase = Phase.READY
            self.resume(now_ms)

    def _push(self, frame: wire.Deliveries, now_ms: int) -> None:
        """Hand messages to their subscription; those of one that has gone are given back."""
        pending = self._sent.get(frame.id)
        if pending is None or pending.call.on_push is None:
            return
        if pending.callback is not None:
            pending.fenced_ms = None
            pending.call.on_push(frame)
            if frame.claimed.unread:
                unread, queue = list(frame.claimed.unread), frame.claimed.queue
                log.warning("the metadata of %d messages of %s is damaged", len(unread), queue)
                # Not unseen: they fail when they are out of attempts.
                self.submit(release(unread, reason="its metadata is damaged"), None, now_ms)
            return
        receipts = [each.receipt for each in frame.claimed.deliveries()]
        self.submit(release(receipts, reason="withdrawn", unseen=True), None, now_ms)

    def _leave(self, pending: _PendingCall, error: StoreFenced, now_ms: int) -> None:
        """Turn away from a server whose store has another owner: that one may answer by now."""
        patience_ms = self.options.patience_ms
        # A subscription may have been good for long since the last time.
        if pending.fenced_ms is None or now_ms - pending.since_ms >= patience_ms:
            pending.fenced_ms = now_ms
        patient = now_ms - pending.fenced_ms < patience_ms
        if patient and may_repeat(pending.call):
            # Settled with all others that this server does not answer any more.
            self._sent[pending.call.request.id] = pending
        else:
            self._fail(pending, error)
        # It greets until it has ended, and each time there would be no pause before the next.
        self.turns.tries = max(self.turns.tries, FENCED_TRIES)
        self._fenced = f"the server said: {error}"

    def _settle(self, request_id: int, value: msgspec.Raw | bytes, now_ms: int) -> None:
        pending = self._sent.pop(request_id, None)
        if pending is None:
            return
        call = pending.call
        try:
            result = _decoder(call.answer).decode(value)
            if call.finish is not None:
                result = call.finish(result)
        except wire.UNREADABLE as error:
            self._fail(pending, ServerUnreachable(f"the server's answer can't be read: {error}"))
            return
        if pending.repeated and call.repeat is Repeat.SETTLES:
            result = doubtful(result)
        if pending.callback is None:
            # If it is a claim, it was made just before its caller went.
            self.give_back(call, result, now_ms)
        else:
            self.done.append((pending.callback, result, None))

    def _is_late(self, pending: _PendingCall, now_ms: int) -> bool:
        """Whether the server may have forgotten the dedup ids of a publish that was sent before."""
        if pending.sent_ms is None or pending.call.repeat is not Repeat.DEDUPED:
            return False
        return now_ms - pending.sent_ms > self._repeat_ms

    def _send(self, pending: _PendingCall, now_ms: int) -> None:
        request = pending.call.request
        request.id = self._next_id
        self._next_id += 1
        try:
            frame = self._encoder.frame(request)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            kind = _UNSENDABLE.get(type(request), InvalidInput)
            self._fail(pending, kind(f"{type(request).__name__} can't be sent: {error}"))
            return
        if len(frame) > self._max_frame_bytes:
            most = self._max_frame_bytes
            text = f"a call of {len(frame)} bytes; the server takes {most}: send less at once"
            self._fail(pending, InvalidInput(text))
            return
        pending.since_ms = now_ms
        if pending.sent_ms is None:
            pending.sent_ms = now_ms
        self._sent[request.id] = pending
        self.output.append(frame)

    def _fail(self, pending: _PendingCall, error: BaseException) -> None:
        if pending.callback is not None:
            self.done.append((pending.callback, None, error))

    def _fail_unanswered(self, pending: _PendingCall, now_ms: int) -> None:
        text = _unanswered(pending.call, self.turns.reason)
        if self._is_late(pending, now_ms):
            text += ", and the server may have forgotten its dedup ids by now"
        self._fail(pending, ServerUnreachable(text))

    def _give_up(self, why: str) -> None:
        self.turns.reason = why
        self.hang_up = True


def _rest(call: Call[Any]) -> str:
    """Describe the possible effect of a call that was sent and not answered."""
    if isinstance(call.request, wire.Claim):
        return "what it may have claimed comes back when its lease ends"
    if call.repeat is Repeat.ALWAYS:
        return "it was sent at least once"
    if call.repeat is not Repeat.DEDUPED:
        return "it may or may not have been done"
    rest = "it may or may not have been stored"
    return rest if may_repeat(call) else f"{rest}, and without dedup ids it is not sent again"


def _unanswered(call: Call[Any], why: str) -> str:
    name = type(call.request).__name__
    return f"the connection was lost before {name} was answered ({why}): {_rest(call)}"
