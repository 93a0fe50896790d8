"""The consumers of one connection: their credit, and the messages that are claimed for them.

A consumer has the credit that its client gave it, less one for each message pushed and less the
bytes of their payloads. Nothing is claimed for it without credit, nor while the client does not
read, nor while the messages that are claimed for the connection and not written yet are many. The
size of a message is known only once it is claimed, so that the last claim may take more bytes than
the credit has left, by as much as these messages are larger than those before.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from penstock import limits
from penstock.errors import InvalidInput, NotAllowed, PenstockError
from penstock.server.security import ANYONE, told
from penstock.validation import check_count, check_text
from penstock.wire.frames import sent_bytes
from penstock.wire.native import Undone, failure_of

if TYPE_CHECKING:
    from asyncio import Transport
    from collections.abc import Callable

    from penstock.server.native import NativeListener
    from penstock.server.native.requests import Backpressure
    from penstock.server.security import Principal
    from penstock.server.waiting import PushClaim
    from penstock.store.codec.claimed import ClaimedMessages
    from penstock.wire.native import Consume, Credit


log = logging.getLogger(__name__)


class Consumer:
    """A subscription of a client to a queue."""

    def __init__(self, consumers: Consumers, request: Consume) -> None:
        check_count(request.credit, "credit", 0, limits.MAX_CREDIT)
        check_count(
            request.credit_bytes, "credit_bytes", -limits.MAX_OFFSET, limits.MAX_CREDIT_BYTES
        )
        check_text(request.consumer, "consumer", limits.MAX_CONSUMER_BYTES)
        if request.lease_ms is not None:
            check_count(request.lease_ms, "lease_ms", 1, limits.MAX_LEASE_MS)
        self.id = request.id
        self.queue = request.queue
        self.lease_ms = request.lease_ms
        self.consumer = request.consumer
        self._owner = consumers
        self._credit = request.credit
        self._credit_bytes = request.credit_bytes

    def add(self, more: Credit) -> None:
        """Add credit, up to the most that a consumer may have."""
        check_count(more.credit, "credit", 0, limits.MAX_CREDIT)
        check_count(more.credit_bytes, "credit_bytes", 0, limits.MAX_CREDIT_BYTES)
        self._credit = min(self._credit + more.credit, limits.MAX_CREDIT)
        self._credit_bytes = min(self._credit_bytes + more.credit_bytes, limits.MAX_CREDIT_BYTES)

    def reserve(self, most: int) -> tuple[int, int]:
        """Take credit for up to so many messages; return for how many, and their likely bytes."""
        owner = self._owner
        left = limits.MAX_BYTES_AT_WORK - owner.reserved_bytes if owner.backpressure.is_open else 0
        if left <= 0 or not owner.principal.may("consume", self.queue):
            # If the keys were read again, which changes what a principal may do, the next check
            # ends the consumer, unless the key is there again by then.
            owner.refused.add(self)
            return 0, 0
        room_bytes = min(self._credit_bytes, left)
        if self._credit <= 0 or room_bytes <= 0:
            return 0, 0
        size = owner.sizes.guess(self.queue)
        limit = min(most, self._credit, max(1, room_bytes // max(1, size)))
        self._credit -= limit
        self._credit_bytes -= limit * size
        owner.reserved_bytes += limit * size
        return limit, limit * size

    def deliver(self, claim: PushClaim) -> None:
        """Push the messages of a claim, and give the credit back that it did not need.

        If the consumer has gone, the messages are given back.
        """
        owner, claimed = self._owner, claim.answer
        self._credit += claim.limit - len(claimed)
        size = sum([len(row[-1]) for row in claimed.rows])
        self._credit_bytes += claim.reserved_bytes - size
        owner.reserved_bytes -= claim.reserved_bytes
        if owner.by_id.get(self.id) is not self:
            owner.batcher.take_back(claimed.receipts())
        elif claimed:
            for part in claimed.parts(limits.MAX_ANSWER_PART_BYTES):
                left_ms = max(0, part.deadline_ms - owner.clock.now_ms())
                frame = owner.encoder.push(self.id, left_ms, part)
                owner.write(frame, part)
                owner.sizes.learn(self.queue, len(frame) // len(part))
        if self.id in owner.by_id:
            # It may have got bytes back, and messages that seemed not to fit may fit now.
            owner.batcher.note_room(self.queue)
        if owner.refused:
            owner.retry()

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self._owner.end(self.id, error)


class Consumers:
    """The consumers of one connection, by the ids of their requests."""

    def __init__(
        self,
        listener: NativeListener,
        backpressure: Backpressure,
        write: Callable[[bytes, ClaimedMessages | None], None],
    ) -> None:
        """``write`` writes a frame of the connection, and is told which messages are in it."""
        self.backpressure = backpressure
        self.sizes = listener.sizes
        self.batcher = listener.batcher
        self.clock = listener.clock
        self.encoder = listener.encoder
        self.write = write
        self.principal = ANYONE
        self.by_id: dict[int, Consumer] = {}
        # The likely size of messages that are claimed, or about to be, and not written.
        self.reserved_bytes = 0
        # Consumers that found no room for bytes.
        self.refused: set[Consumer] = set()

    def __contains__(self, consumer_id: int) -> bool:
        return consumer_id in self.by_id

    def begin(self, request: Consume, principal: Principal) -> None:
        """Begin to push messages of a queue, or answer why not."""
        self.principal = principal
        try:
            principal.check("consume", request.queue)
            if len(self.by_id) >= limits.MAX_CONSUMERS:
                raise InvalidInput(f"a connection may have {limits.MAX_CONSUMERS} consumers")
            if request.id in self.by_id:
                raise InvalidInput(f"there is a consumer under the id {request.id} already")
            consumer = Consumer(self, request)
        except PenstockError as error:
            self._answer(request.id, error)
            return
        self.by_id[request.id] = consumer
        self.batcher.subscribe(consumer)

    def add_credit(self, more: Credit) -> None:
        """Add to the credit of a consumer; one that has ended meanwhile needs none."""
        consumer = self.by_id.get(more.id)
        if consumer is None:
            return
        try:
            consumer.add(more)
        except InvalidInput as error:
            log.warning("a consumer of %s was ended: %s", consumer.queue, error)
            self.end(more.id, error)
        self.batcher.note_room(consumer.queue)

    def end(self, consumer_id: int, error: BaseException | None = None) -> bool:
        """End a consumer and answer its request; return whether there was one."""
        consumer = self.by_id.pop(consumer_id, None)
        if consumer is None:
            return False
        self.batcher.unsubscribe(consumer)
        self.refused.discard(consumer)
        self._answer(consumer_id, error)
        return True

    def end_all(self) -> None:
        """End all consumers: their client may begin them elsewhere."""
        for consumer in self.by_id.values():
            self.batcher.unsubscribe(consumer)
            self.write(self.encoder.frame(Undone(consumer.id)), None)
        self.by_id.clear()
        self.refused.clear()

    def check(self, principal: Principal) -> None:
        """End consumers of queues that the key of the client may not consume any more."""
        self.principal = principal
        for consumer in list(self.by_id.values()):
            try:
                principal.check("consume", consumer.queue)
            except NotAllowed as error:
                self.end(consumer.id, error)
        self.retry()

    def _answer(self, request_id: int, error: BaseException | None) -> None:
        answer: object = (1, request_id, None)
        if error is not None:
            answer = failure_of(request_id, told(error, self.principal))
        self.write(self.encoder.frame(answer), None)

    def retry(self) -> None:
        """Look for messages of the consumers that found no room, if the client reads."""
        if self.backpressure.is_open:
            refused, self.refused = self.refused, set()
            for consumer in refused:
                self.batcher.note_room(consumer.queue)


class UnsentMessages:
    """Messages that are written to a connection, and whose bytes may be with the process yet."""

    def __init__(self) -> None:
        # Of the whole connection; and where in them each answer begins, with its messages, or their
        # receipts alone.
        self.written_bytes = 0
        self._begins: deque[tuple[int, ClaimedMessages | list[str]]] = deque()

    def note(self, begins: list[tuple[int, ClaimedMessages]], transport: Transport) -> None:
        """Note where messages begin in the bytes that are written next."""
        if self._begins:
            self.forget(transport)
        for begin, claimed in begins:
            self._begins.append((self.written_bytes + begin, claimed))

    def forget(self, transport: Transport) -> None:
        """Forget messages whose first bytes have left the process."""
        left = self.written_bytes - transport.get_write_buffer_size()
        while self._begins and self._begins[0][0] < left:
            self._begins.popleft()

    def keep_receipts(self) -> None:
        """Keep no payloads: the client does not read, and it may take long."""
        self._begins = deque(
            (begin, each if isinstance(each, list) else each.receipts())
            for begin, each in self._begins
        )

    def unsent(self, transport: Transport) -> list[str]:
        """Return the receipts of messages that have never been on the line."""
        sent = sent_bytes(transport) if self._begins else None
        found: list[str] = []
        for begin, each in self._begins:
            if sent is not None and begin >= sent:
                found += each if isinstance(each, list) else each.receipts()
        return found
