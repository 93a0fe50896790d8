"""Room for answers that hold messages: which requests of a connection may begin, and which wait.

::

    asked ──▶ there is room ──▶ begun ──▶ answered, which makes room
                 │    ▲           │ ▲
                 ▼    │           ▼ │ the queue got something, and there is room
                 held ┘◀──────  parked at the desk, which takes none

What is claimed for somebody is withheld from others, so it is written, however slowly it is read;
hence nothing is claimed for which there is no room. How much an answer takes is not known
before: it is guessed by what messages of the queue have weighed so far. Requests of which little
is expected do not wait behind those of which much is. Nothing here knows of sockets or clocks.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from penstock import limits

if TYPE_CHECKING:
    from asyncio import Future, TimerHandle
    from collections.abc import Callable

    from penstock.errors import PenstockError
    from penstock.server.native.verbs import Verb

__all__ = ["Asked", "Room", "Sizes"]

# What a message is taken to weigh while none of its queue has been seen: more than most do.
UNKNOWN_MESSAGE_BYTES: Final = 1024 * 1024
# Of which more is expected waits apart from the others.
SMALL_BYTES: Final = 512 * 1024
# What an answer is taken for at least, should messages be larger than those before.
LEAST_BYTES: Final = limits.MAX_BYTES_AT_WORK // limits.MAX_REQUESTS_AT_WORK
MAX_SIZES: Final = 10_000


class Sizes:
    """What messages of each queue weigh, as far as answers have shown."""

    def __init__(self) -> None:
        self._by_queue: dict[str, int] = {}

    def guess(self, queue: str) -> int:
        """Return what the next message is taken to weigh."""
        return self._by_queue.get(queue, UNKNOWN_MESSAGE_BYTES)

    def saw(self, queue: str, message_bytes: int) -> None:
        """Learn: up at once, down by and by, since the next may be as large as the largest."""
        known = self._by_queue.get(queue)
        if known is not None and message_bytes < known:
            message_bytes = known - (known - message_bytes + 7) // 8
        elif known is None and len(self._by_queue) >= MAX_SIZES:
            # Queues come and go, and what is forgotten is soon seen again.
            self._by_queue.clear()
        self._by_queue[queue] = message_bytes


class Asked:
    """A request, from when it is asked until it is answered.

    It is the turnstile of its own claim, while that waits at the desk.
    """

    __slots__ = (
        "alarm", "began", "failure", "future", "refused", "request", "room", "size", "taken",
        "until", "verb",
    )  # fmt: skip

    def __init__(self, request: Any, verb: Verb, size: int, began: float, room: Room) -> None:
        self.request = request
        self.verb = verb
        self.size = size
        self.began = began
        self.room = room
        # Until when a claim waits; None: it does not.
        self.until: float | None = None
        self.future: Future[Any] | None = None
        # The error that answers it in place of its result: its time is up.
        self.failure: PenstockError | None = None
        # Bytes that it has been given of the room; 0: it is not inside.
        self.taken = 0
        # Whether the desk had messages for it, and there was no room.
        self.refused = False
        # What ends its wait while it is held.
        self.alarm: TimerHandle | None = None

    def enter(self) -> bool:
        """Say whether it may look for messages again."""
        self.refused = not self.room.enter(self)
        return not self.refused

    def leave(self) -> None:
        """Give its room to others: it waits."""
        self.room.leave(self)

    def disarm(self) -> None:
        """Have no alarm end it: it is held no longer."""
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None


_Lane: TypeAlias = "OrderedDict[Asked, None]"


class Room:
    """What one connection may have claimed for it, and who waits for that, in order."""

    def __init__(self, sizes: Sizes, freed: Callable[[], None]) -> None:
        """``freed`` is called when held requests may find room; it must only pass it on."""
        self._sizes = sizes
        self._freed = freed
        # Whether the other side takes its answers: until it does, what it has is enough.
        self._open = True
        # Of little and of much, each: bytes that are expected, and requests that are held.
        self._expected = [0, 0]
        # Ordered dictionaries: the first one is at hand, and each can be taken out.
        self._held: tuple[_Lane, _Lane] = (OrderedDict(), OrderedDict())

    @property
    def held(self) -> int:
        """How many requests wait for room."""
        return sum(map(len, self._held))

    def shut(self) -> None:
        """Let nobody in: answers are not read."""
        self._open = False

    def reopen(self) -> None:
        """Go on: answers are read again."""
        self._open = True
        self._free()

    def enter(self, asked: Asked) -> bool:
        """Let a request in if there is room, and nobody of its kind was here before."""
        if asked.taken:
            return True
        needed = self._needed(asked)
        return not self._held[needed > SMALL_BYTES] and self._take(asked, needed)

    def leave(self, asked: Asked) -> None:
        """Take back the room of a request."""
        if asked.taken:
            self._expected[asked.taken > SMALL_BYTES] -= asked.taken
            asked.taken = 0
            self._free()

    def hold(self, asked: Asked) -> None:
        """Have a request wait for room, behind all of its kind."""
        self._held[self._needed(asked) > SMALL_BYTES][asked] = None
        self._free()

    def drop(self, asked: Asked) -> None:
        """Hold a request no longer, if it is held; those behind it may find room."""
        for lane in self._held:
            lane.pop(asked, None)
        self._free()

    def next(self) -> Asked | None:
        """Let the next of the held requests in for which there is room; None: there is none."""
        # Little once more, since what was taken for much may be little.
        for much in (False, True, False):
            lane = self._held[much]
            while lane:
                asked = next(iter(lane))
                # Looked at anew: more is known of its queue by now.
                needed = self._needed(asked)
                if (needed > SMALL_BYTES) is not much:
                    del lane[asked]
                    self._held[not much][asked] = None
                elif self._take(asked, needed):
                    del lane[asked]
                    return asked
                else:
                    break
        return None

    def clear(self) -> list[Asked]:
        """Return the held requests, and hold them no longer."""
        held = [asked for lane in self._held for asked in lane]
        for lane in self._held:
            lane.clear()
        return held

    def _needed(self, asked: Asked) -> int:
        request = asked.request
        expected = asked.verb.weight(request, self._sizes.guess(request.queue))
        return max(LEAST_BYTES, min(expected, limits.MAX_CLAIM_BYTES))

    def _take(self, asked: Asked, needed: int) -> bool:
        much = needed > SMALL_BYTES
        expected = self._expected[much]
        # One that needs more than all has it alone.
        if not self._open or (expected and expected + needed > limits.MAX_BYTES_AT_WORK):
            return False
        self._expected[much] += needed
        asked.taken = needed
        return True

    def _free(self) -> None:
        if self._open and (self._held[0] or self._held[1]):
            self._freed()
