"""The base of every listener's connections, whatever they speak.

A protocol says what it does with the bytes that came (``_work``), how it ends, and which deadline
it has. From here it has its slot and the count of the bytes that it holds, the end
of clients that do not read, the last words, and its share of each turn of the loop.

A connection with more to do than its share goes on when the others have had their turn, and nothing
is read from it until then.
"""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import TYPE_CHECKING, Any, Final, cast

from penstock import limits
from penstock.wire.frames import progress_of

if TYPE_CHECKING:
    from penstock.server.connections import Slot

log = logging.getLogger(__name__)

# How long a client has to read the last words before its connection is closed.
LINGER_MS: Final = 1_000
TURN_SECONDS: Final = limits.MAX_TURN_MS / 1000
# So many that have come count as a request in a connection's share of a turn: to read and to drop
# them takes time, too.
BYTES_OF_A_REQUEST: Final = 4096


class FramedConnection(asyncio.Protocol):
    """One client's connection; the loop calls it, and its listener."""

    # Bytes that wait for a client to read, from which on it counts as one that does not.
    unsent_bytes = limits.MAX_UNSENT_BYTES

    def __init__(self, listener: Any, loop: asyncio.AbstractEventLoop, slot: Slot) -> None:
        self._listener = listener
        self._loop = loop
        self._slot = slot
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        # Bytes that have come and are not done with.
        self._in_hand = 0
        # Nothing more is taken from the client: it has its last words, or has gone.
        self._shut = False
        self._reading = True
        # Since when the client has taken nothing, and what it had taken by then.
        self._stuck_since: float | None = None
        self._stuck_taken = 0
        # Requests that may begin before other connections have their turn.
        self._share = limits.MAX_TURN_ANSWERS
        self._waits_for_turn = False
        # When the listener calls `overdue`, by the loop's clock.
        self.deadline = inf

    # --- what a protocol adds ------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request is unanswered, so that its end costs no answer."""
        return True

    @property
    def stall_ms(self) -> int:
        """How long a client may take nothing of what is written to it."""
        return limits.MAX_STALL_MS

    @property
    def busy(self) -> bool:
        """Whether a listener that stops waits for it."""
        return not self.idle or self._stuck_since is not None

    def _work(self, data: bytes = b"") -> None:
        """Take what has come, begin requests while the turn lasts, and read on if all are begun.

        The turn lasts for :data:`TURN_SECONDS`, and while ``_share`` is above 0, less one for each
        request. What is left waits (``_yield_turn``); while it does, bytes are taken only.
        """
        raise NotImplementedError

    def _drop(self) -> None:
        """Drop all bytes that have come."""
        self._in_hand = 0
        self._account()

    def _lost(self) -> None:
        """Stop working for a client that has gone."""

    def refuse(self, why: str) -> None:  # noqa: ARG002 - not every protocol has a way to say it
        """Drop its bytes at once, say why, and close."""
        self.abort()

    def overdue(self) -> None:
        """End the connection, whose deadline has passed."""
        self.abort()

    def leave(self) -> None:
        """Begin nothing new: the server stops."""

    # --- called by the loop --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a client, unless there are too many."""
        # A loop's transports need not be of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self.unsent_bytes)
        self._slot.hold_for(self, transport)
        self._listener.connections.add(self)
        if self._slot.full or self._listener.stopping:
            self.refuse("too many connections: share clients, or raise limits.connections")

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - whatever it was
        """Forget the client and what it sent."""
        self._listener.connections.discard(self)
        self._listener.slots.leave(self._slot)
        self._shut = True
        self._drop()
        self._lost()

    def data_received(self, data: bytes) -> None:
        """Take bytes in whatever pieces."""
        self._share -= len(data) // BYTES_OF_A_REQUEST
        if not self._shut:
            self._work(data)
            if self._in_hand or self._slot.held_bytes:
                self._account()
        elif self._share <= 0:
            self._read(wanted=False)
            self._yield_turn()

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read."""
        self._note_stuck()
        self._read(wanted=False)
        self._account()

    def resume_writing(self) -> None:
        """Go on where it stopped."""
        self._stuck_since = None
        if not self._shut:
            self._work()
        self._account()

    # --- turns ---------------------------------------------------------------------------------

    def _yield_turn(self) -> None:
        """Go on in another turn of the loop."""
        if not self._waits_for_turn:
            self._waits_for_turn = True
            self._listener.slots.turns.add(self, self._loop)

    def take_turn(self) -> None:
        """Go on after other connections have had their turn."""
        self._waits_for_turn = False
        self._share = limits.MAX_TURN_ANSWERS
        if self._shut:
            self._read(wanted=True)
        else:
            self._work()
            self._account()

    # --- bytes ---------------------------------------------------------------------------------

    @property
    def _unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    def _account(self) -> None:
        """Report the bytes that are kept here; past the bound of all, `refuse` is called."""
        held = self._in_hand if self._stuck_since is None else self._in_hand + self._unsent
        if held != self._slot.held_bytes:
            self._listener.slots.hold(self._slot, held)

    def _note_stuck(self) -> None:
        self._stuck_since = self._loop.time()
        self._stuck_taken = progress_of(self._transport).taken

    def _read(self, *, wanted: bool) -> None:
        """Read on, or read no further."""
        if wanted is not self._reading and not self._transport.is_closing():
            self._reading = wanted
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    # --- the end -------------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """End a connection that is late, or whose client does not read."""
        if self.deadline <= now:
            self.deadline = inf
            self.overdue()
        elif self._stuck_since is not None:
            taken = progress_of(self._transport).taken
            if taken > self._stuck_taken:
                # Slow as it may be, it reads.
                self._stuck_since = now
            self._stuck_taken = taken
            if (now - self._stuck_since) * 1000 > self.stall_ms:
                log.warning(
                    "a client that does not read its answers was cut off (%s)", self._slot.protocol
                )
                self.abort()

    def _due_in(self, ms: int) -> None:
        self.deadline = self._loop.time() + ms / 1000

    def _end_with(self, last: bytes) -> None:
        """Write the last bytes, and close in a moment; what still comes is read and dropped.

        Closing over unread bytes would have the system reset the connection, and the client might
        never see the last ones.
        """
        self._shut = True
        self._drop()
        self._transport.write(last)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._read(wanted=True)
        self._due_in(LINGER_MS)

    def close(self) -> None:
        """Send what is written, then close; a client that does not read that is cut off."""
        self._shut = True
        self._note_stuck()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._shut = True
        self._drop()
        self._transport.abort()
