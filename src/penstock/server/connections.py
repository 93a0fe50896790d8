"""All connections of a server, whatever their protocol: slots, listeners, and file descriptors.

Each connection takes a descriptor, and memory for the bytes that it has sent and that are not done.
Both are bounded for all of them together, so that the store has what it needs. A
connection is a stranger until it has shown a key, or has asked for something where there are no
keys. When there is no room for another, the oldest idle stranger makes way, of the host that has
the most; when too many bytes are held, the idle connection makes way that has held its own for
longest, of the key or host that holds the most. Slots and listeners run on the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import struct
from collections import Counter, deque
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from penstock import limits
from penstock.addresses import Address
from penstock.clock import loop_seconds
from penstock.errors import InvalidInput
from penstock.server.access import handshake_reason
from penstock.server.shares import Shares, holder_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from penstock.server.framed import FramedConnection

log = logging.getLogger(__name__)

_TOO_MUCH: Final = "the server has too much in hand: try again"
_BACKLOG: Final = 1024
# Accepted in one turn of the loop: the connections that make way are closed in the next.
_AT_ONCE: Final = 8
# Until it is tried again where nothing could be accepted.
_PAUSE_SECONDS: Final = 0.5
# Taken for the limit where there is none; more would be of no use.
_NO_LIMIT: Final = 1 << 20
_OWN_FILES: Final = "/proc/self/fd"
# Of what Flight's connections have for themselves, should the others take all that they may.
_FLIGHT_SHARE: Final = 4
# Of the system's struct tcp_info: milliseconds since data was sent, and since it was received.
_LAST_SENT_AT: Final = 44
_LAST_RECEIVED_AT: Final = 52
_TCP_INFO_BYTES: Final = 104


class SlotHolder(Protocol):
    """The holder of a slot: a connection, or one that is about to be."""

    @property
    def idle(self) -> bool:
        """Whether no request of it is at work, so that its end costs no answer."""

    def abort(self) -> None:
        """Close at once."""

    def refuse(self, why: str) -> None:
        """Drop its bytes at once, say why, and close."""


class Slot(msgspec.Struct, eq=False):
    """The place of one connection among all of them."""

    holder: SlotHolder
    protocol: str
    # Whether there was no room for it: its client gets an error, and it is closed.
    full: bool = False
    known: bool = False
    held_bytes: int = 0
    # For the access log: the client's address, and its key if it shows one for the connection.
    address: str = ""
    key_id: str = ""
    # The holder of the share that it takes: as a stranger, its host.
    share: str = ""

    def hold_for(self, holder: SlotHolder, transport: asyncio.BaseTransport) -> None:
        """Give the slot to the connection that has been made."""
        self.holder = holder
        self.address = _address_of(transport.get_extra_info("peername")) or self.address


def _address_of(peer: object) -> str:
    """Return the text of a client's address, if it has one."""
    return str(Address(*peer[:2])) if isinstance(peer, tuple) else ""


class _Group:
    """Connections, in the order in which they came, and the bytes that they hold."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.total_bytes = 0
        self.slots: dict[Slot, None] = {}
        # In the order in which they began to hold bytes.
        self.holding: dict[Slot, None] = {}
        # By holder of a share: its connections, and their bytes.
        self._slots_of: dict[str, dict[Slot, None]] = {}
        self._bytes_of: Counter[str] = Counter()
        # By number of connections: its holders; at the end those that have the most.
        self._holders_of: list[dict[str, None]] = [{}]

    def add(self, slot: Slot) -> None:
        self.slots[slot] = self._slots_of.setdefault(slot.share, {})[slot] = None
        self._note_count(slot.share, 1)

    def remove(self, slot: Slot) -> None:
        self.put(slot, 0)
        del self.slots[slot], self._slots_of[slot.share][slot]
        self._note_count(slot.share, -1)
        if not self._slots_of[slot.share]:
            del self._slots_of[slot.share], self._bytes_of[slot.share]

    def _note_count(self, holder: str, more: int) -> None:
        count, holders_of = len(self._slots_of[holder]), self._holders_of
        holders_of[count - more].pop(holder, None)
        if count == len(holders_of):
            holders_of.append({})
        if count:
            holders_of[count][holder] = None
        while len(holders_of) > 1 and not holders_of[-1]:
            holders_of.pop()

    def put(self, slot: Slot, size: int) -> None:
        self.total_bytes += size - slot.held_bytes
        self._bytes_of[slot.share] += size - slot.held_bytes
        slot.held_bytes = size
        if size:
            self.holding.setdefault(slot)
        else:
            self.holding.pop(slot, None)

    def oldest_idle(self) -> Slot | None:
        """Return the oldest idle connection, of the holder that has the most if it has one."""
        largest = (self._slots_of[holder] for holder in islice(self._holders_of[-1], 1))
        return next((slot for slot in chain(*largest, self.slots) if slot.holder.idle), None)

    def longest_holding(self, asking: Slot) -> Slot:
        """Return the idle connection that holds bytes for longest, of who holds the most.

        If it has none, the one that asks for more makes way, if that is one of its own.
        """
        largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
        theirs = [slot for slot in self.holding if slot.share == largest]
        first = asking if asking.share == largest else theirs[0]
        return next((slot for slot in theirs if slot.holder.idle), first)


class Turns:
    """The connections that have more to do than one turn of the loop lets each do, in order.

    What they do in a turn of the loop is bounded for all of them together, too.
    """

    def __init__(self) -> None:
        self._waiting: deque[FramedConnection] = deque()
        self._scheduled = False

    def add(self, connection: FramedConnection, loop: asyncio.AbstractEventLoop) -> None:
        """Let a connection go on when those before it have."""
        self._waiting.append(connection)
        self._schedule(loop)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = False
        until = loop_seconds() + limits.MAX_TURN_MS / 1000
        for _ in range(len(self._waiting)):
            connection = self._waiting.popleft()
            try:
                # It may come to wait again.
                connection.take_turn()
            except Exception:
                # The loop would close it, had it called it itself.
                log.exception("a connection was closed")
                connection.abort()
            if loop_seconds() > until:
                break
        self._schedule(loop)


class Connections:
    """The slots of all connections: how many there may be, and the bytes that they hold."""

    def __init__(
        self,
        most: int = limits.MAX_CONNECTIONS,
        *,
        turned_away: Callable[[str], None] = lambda _: None,
        failed: Callable[[str, str, str], None] = lambda *_: None,
    ) -> None:
        """``turned_away`` is called with the protocol of each that is refused or makes way.

        ``failed`` is called with protocol, address and reason of each TLS handshake that fails.
        """
        self.failed = failed
        self.turns = Turns()
        self._turned_away = turned_away
        self._strangers = _Group(limits.MAX_STRANGERS_BYTES)
        self._known = _Group(limits.MAX_BUFFERED_BYTES)
        self.places = Shares("connections", most, times=4)

    @property
    def most(self) -> int:
        """How many connections there may be."""
        return self.places.most

    def __len__(self) -> int:
        return len(self._strangers.slots) + len(self._known.slots)

    @property
    def held_bytes(self) -> int:
        """The bytes that all connections hold."""
        return self._strangers.total_bytes + self._known.total_bytes

    def enter(self, holder: SlotHolder, protocol: str, address: str = "") -> Slot:
        """Give a connection a slot; an idle stranger makes way if there is no room."""
        oldest = self._strangers.oldest_idle() if len(self) >= self.most else None
        slot = Slot(holder, protocol, full=len(self) >= self.most and oldest is None)
        slot.address, slot.share = address, holder_of("", address)
        self._strangers.add(slot)
        if oldest is not None:
            # Out of the count at once: it takes a turn of the loop until it is closed.
            self.leave(oldest)
            oldest.holder.abort()
        if slot.full or oldest is not None:
            self._turned_away((oldest or slot).protocol)
        return slot

    def leave(self, slot: Slot) -> None:
        """Forget a connection and what it held; once more does no harm."""
        group = self._known if slot.known else self._strangers
        if slot in group.slots:
            group.remove(slot)
            if slot.known:
                self.places.give(slot.share)

    def trust(self, slot: Slot) -> None:
        """Note that a connection has shown a key, or needs none; ServerBusy if it has too many."""
        if slot in self._strangers.slots:
            share, size = holder_of(slot.key_id, slot.address), slot.held_bytes
            self.places.take(share)
            self.leave(slot)
            slot.known, slot.share = True, share
            self._known.add(slot)
            self.hold(slot, size)

    def hold(self, slot: Slot, size: int) -> None:
        """Note the bytes that a connection holds; past the bound a connection makes way."""
        group = self._known if slot.known else self._strangers
        if slot not in group.slots:
            return
        group.put(slot, size)
        while group.total_bytes > group.most_bytes:
            oldest = group.longest_holding(slot)
            group.put(oldest, 0)
            self._turned_away(oldest.protocol)
            oldest.holder.refuse(_TOO_MUCH)
            if oldest is slot:
                break


# --- accepting ------------------------------------------------------------------------------------
#
# The loop's own servers accept whatever comes and report it when a TLS handshake is over, which a
# stranger need never begin. Here every connection has its slot as soon as it is accepted.


class _PendingSocket:
    """Holds the slot of a connection until its protocol does: with TLS, after the handshake."""

    idle = True

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    def abort(self) -> None:
        """Close it."""
        if self.task is not None:
            self.task.cancel()

    def refuse(self, why: str) -> None:  # noqa: ARG002 - nobody could read it
        """Close it."""
        self.abort()


def bind(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of a host; InvalidInput names one that can't be had."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            sockets.append(socket.create_server(address[:2], family=family, backlog=_BACKLOG))
    except OSError as error:
        for made in sockets:
            made.close()
        raise InvalidInput(f"can't listen on {host}:{port}: {error.strerror or error}") from None
    return sockets


class Listener:
    """Accepts connections at an address, as many as there is room for. One for each protocol."""

    protocol = ""
    handshake_seconds: float | None = None
    # How often every connection is checked.
    check_seconds = 1.0

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        slots: Connections | None = None,
    ) -> None:
        self.slots = Connections() if slots is None else slots
        # The open connections, which add and remove themselves.
        self.connections: set[Any] = set()
        self.stopping = False
        self.address = (host, port)
        # Replaced when the certificate is read again: it is for the connections to come.
        self.tls = tls
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = False
        self._timer: asyncio.TimerHandle | None = None

    def make_connection(self, slot: Slot) -> asyncio.Protocol:
        """Make the connection that has a slot."""
        raise NotImplementedError

    async def stop(self, grace_ms: int) -> None:
        """Accept no more, answer the requests at work, then close the connections."""
        self.stopping = True
        self.close()
        if self._timer is None:
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_ms / 1000
        for connection in list(self.connections):
            connection.leave()
        while any(each.busy for each in self.connections) and loop.time() < until:
            await asyncio.sleep(0.002)
        for connection in list(self.connections):
            connection.close()
        until = max(until, loop.time() + 0.1)
        while self.connections and loop.time() < until:
            await asyncio.sleep(0.002)
        for connection in list(self.connections):
            connection.abort()
        self._timer.cancel()
        self._timer = None

    def take(self, sockets: list[socket.socket]) -> None:
        """Accept by sockets that are bound already, once it is started."""
        self._sockets = sockets

    async def start(self) -> None:
        """Bind, and accept from now on."""
        self._sockets = self._sockets or bind(*self.address)
        self.address = self._sockets[0].getsockname()[:2]
        for made in self._sockets:
            made.setblocking(False)  # noqa: FBT003
            asyncio.get_running_loop().add_reader(made, self._accept, made)
        self._check()

    def _check(self) -> None:
        """Check every connection: one timer for all of them, so that an idle one costs nothing."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.check_seconds, self._check)
        now = loop.time()
        for connection in list(self.connections):
            connection.check(now)

    def close(self) -> None:
        """Accept no more, and close the sockets that have no connection yet."""
        while self._sockets:
            listening = self._sockets.pop()
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        for task in list(self._tasks):
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                taken, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Above all where there are no descriptors left.
                self._rest(listening, error)
                return
            self._failed = False
            taken.setblocking(False)  # noqa: FBT003
            pending = _PendingSocket()
            slot = self.slots.enter(pending, self.protocol, _address_of(peer))
            pending.task = asyncio.get_running_loop().create_task(self._serve(taken, slot))
            self._tasks.add(pending.task)
            pending.task.add_done_callback(partial(self._arrived, taken, slot))

    async def _serve(self, taken: socket.socket, slot: Slot) -> None:
        # Some loops set it only for sockets of their own.
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: self.make_connection(slot),
            taken,
            ssl=self.tls,
            ssl_handshake_timeout=self.handshake_seconds if self.tls is not None else None,
        )

    def _arrived(self, taken: socket.socket, slot: Slot, task: asyncio.Task[None]) -> None:
        """Close a socket that got no connection; its task may be cancelled before it runs."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        self.slots.leave(slot)
        taken.close()
        if isinstance(error, OSError):
            why = None if self.tls is None else handshake_reason(error)
            if why is not None:
                self.slots.failed(self.protocol, slot.address, why)
            log.debug("a connection came to nothing: %s", error)
        elif error is not None:
            log.error("a connection could not be served", exc_info=error)

    def _rest(self, listening: socket.socket, error: OSError) -> None:
        """Accept nothing for a moment: the same error would come over and over."""
        if not self._failed:
            self._failed = True
            log.error("no connection can be accepted: %s", error)
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        loop.call_later(_PAUSE_SECONDS, self._accept_again, listening)

    def _accept_again(self, listening: socket.socket) -> None:
        if listening.fileno() != -1:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)


# --- file descriptors -----------------------------------------------------------------------------
#
# A store that can't open its next file can't be written any more. So some descriptors are kept
# back, and connections get the others. gRPC makes those of Flight and knows no bound: the ones that
# have been silent for longest are closed before they touch the rest.


def file_limit() -> int:
    """Return how many files the process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Raise the number of files that the process may open as far as the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NO_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _NO_LIMIT)
    if wanted > file_limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def room_for_files() -> int:
    """Return how many files may be open before those are touched that are kept back."""
    allowed = file_limit()
    store = min(limits.MAX_STORE_FILES, allowed // limits.STORE_FILES_SHARE)
    return allowed - store - min(limits.SPARE_FILES, allowed // 8)


def _open_files() -> list[int]:
    """Return the descriptors of the process; none where the system does not tell."""
    try:
        return [int(each) for each in os.listdir(_OWN_FILES)]  # noqa: PTH208 - called often
    except FileNotFoundError:
        return []
    except OSError:
        # There is none left to list them with.
        return [each for each in range(file_limit()) if os.path.lexists(f"{_OWN_FILES}/{each}")]


def room_for_connections(most: int, *, flight: bool) -> int:
    """Return how many connections there may be beside the open descriptors, at most ``most``.

    Files do not count as open: they are the store's, for which enough is kept back.
    """
    taken = sum(1 for each in _open_files() if not _is_file(each)) or limits.SPARE_FILES
    room = room_for_files() - taken
    if flight:
        room -= room // _FLIGHT_SHARE
    return max(1, min(most, room))


def _is_file(descriptor: int) -> bool:
    try:
        return os.readlink(f"{_OWN_FILES}/{descriptor}").startswith("/")  # noqa: PTH115
    except FileNotFoundError:
        return True


def close_idle(port: int) -> tuple[int, int]:
    """Close connections of a port until they leave the descriptors that are kept back.

    The ones that have been silent for longest go first. Return how many were closed, and how many
    more files may be open.
    """
    descriptors = _open_files()
    if len(descriptors) > room_for_files():
        descriptors = [each for each in descriptors if not _is_file(each)]
    free = room_for_files() - len(descriptors)
    if free >= 0:
        return 0, free
    found = sorted(
        (silent_ms, each)
        for each in descriptors
        if (silent_ms := _connected_to(each, port)) is not None
    )
    closed = 0
    for _, each in found[free:]:
        closed += _connected_to(each, port, end=True) is not None
    return closed, 0


def _connected_to(descriptor: int, port: int, *, end: bool = False) -> int | None:
    """Return how long a connection to the port has been silent; None if it is no such thing."""
    # Without a copy of it, for which there may be no descriptor left.
    try:
        seen = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if seen.type is not socket.SOCK_STREAM or seen.getsockname()[1] != port:
            return None
        seen.getpeername()
        facts = seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if end:
            seen.shutdown(socket.SHUT_RDWR)
    except (OSError, IndexError, TypeError):
        return None
    finally:
        # gRPC closes it, once it is at its end.
        seen.detach()
    silent_ms: int = min(
        *struct.unpack_from("=I", facts, _LAST_SENT_AT),
        *struct.unpack_from("=I", facts, _LAST_RECEIVED_AT),
    )
    return silent_ms
