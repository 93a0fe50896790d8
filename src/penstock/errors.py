"""Every error that Penstock raises, in one tree.

::

    PenstockError
    ├── InvalidInput          the call itself is wrong; nothing was changed
    │   ├── InvalidMessage        payload, attributes, group, priority, delay or dedup id
    │   ├── InvalidQueue          queue name or a setting of its spec
    │   ├── InvalidFilter         filter text: where, what, and what is allowed
    │   ├── InvalidReceipt        not a receipt of this store
    │   └── InvalidUrl            a store URL that names no store
    ├── QueueNotFound         no queue of that name
    ├── QueueExists           create of a queue that is there with other settings
    ├── BrokerClosed          a verb after close()
    ├── NotAllowed            a server that wants a key, or a key that may not do this
    ├── LimitReached          a limit that was set for a queue or a key
    │   └── ServerBusy            the caller has its share of a bound of the server: try again
    ├── StoreLocked           another process owns the directory (the message names it)
    ├── StoreMismatch         the directory holds something else, or a newer format
    ├── CorruptRecord         a record that does not decode (quarantined where it was met)
    ├── StorageFailed         the engine refused a read or write
    │   ├── DiskFull              ... for want of space
    │   ├── StoreDamaged          ... because what is on disk can't be read (the message says where)
    │   ├── StoreFenced           ... because another broker has opened the store and owns it now
    │   └── ServerUnreachable     no broker answers at the other end of the network
    ├── ImportFailed          a foreign database that can't be read
    └── MissingExtra          a library of an extra is not installed (the message names the extra)

A stale receipt is not an error: ``ack``, ``release`` and ``extend`` answer with an
:class:`~penstock.model.Outcome` for each receipt.
"""

from __future__ import annotations

from contextlib import contextmanager
from string import ascii_lowercase, digits
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

__all__ = [
    "BrokerClosed",
    "CorruptRecord",
    "DiskFull",
    "ImportFailed",
    "InvalidFilter",
    "InvalidInput",
    "InvalidMessage",
    "InvalidQueue",
    "InvalidReceipt",
    "InvalidUrl",
    "LimitReached",
    "MissingExtra",
    "NotAllowed",
    "PenstockError",
    "QueueExists",
    "QueueNotFound",
    "ServerBusy",
    "ServerUnreachable",
    "StorageFailed",
    "StoreDamaged",
    "StoreFenced",
    "StoreLocked",
    "StoreMismatch",
]


# Names that are suggested have up to so many letters, of these: a server tries every mistake.
_MOST_LETTERS: Final = 40
_LETTERS: Final = f"{ascii_lowercase}{digits}._-"


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose."""


class InvalidInput(PenstockError, ValueError):
    """The call's arguments are wrong; the message says what is allowed. Nothing was changed."""


class InvalidMessage(InvalidInput):
    """A message that can't be published: payload, attributes, group, priority, delay, dedup id."""


class InvalidQueue(InvalidInput):
    """A queue name or a setting of a queue that is not allowed."""


class InvalidFilter(InvalidInput):
    """A filter that does not parse or is not allowed.

    ``line`` and ``column`` count from 1; ``fragment`` is the offending text.
    """

    def __init__(self, message: str, *, line: int = 1, column: int = 1, fragment: str = "") -> None:
        """Keep the position beside the message, so that an editor can point at it."""
        super().__init__(message)
        self.line = line
        self.column = column
        self.fragment = fragment


class InvalidReceipt(InvalidInput):
    """A receipt that this store never gave out."""


class InvalidUrl(InvalidInput):
    """A store URL that names no store."""


class QueueNotFound(PenstockError, KeyError):
    """No queue of that name."""

    _name: object = ""
    _names: Container[str] = ()

    @classmethod
    def among(cls, name: str, names: Container[str]) -> Self:
        """Make the error for a name that is not among those that there are."""
        error = cls(f"no queue named {name!r:.100}")
        error._name, error._names = name, names
        return error

    def suggestion(self, sees: Callable[[str], bool] = lambda _: True) -> str:
        """Return "; did you mean 'orders'?" if such a queue is there and the caller sees it.

        The error does not say it by itself: a server must not tell a client the names of queues
        that its key has no permission for.
        """
        for near in one_mistake_away(self._name):
            if near in self._names and sees(near):
                return f"; did you mean {near!r}?"
        return ""

    def suggest(self) -> None:
        """Add the suggestion to the message, for a caller that sees all queues."""
        self.args = (f"{self}{self.suggestion()}",)
        self._names = ()

    def __str__(self) -> str:
        """Undo KeyError's quoting of its message."""
        return str(self.args[0]) if self.args else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "did you mean 'design'?", or which of the few known words there are."""
    from difflib import get_close_matches  # noqa: PLC0415 - for an error alone

    words = sorted(known)
    near = get_close_matches(word[:100], words, 1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(words)}"


def one_mistake_away(name: object) -> list[str]:
    """Return the names that this one may be a mistyped form of.

    The mistakes: two letters in the wrong order, one too many, one that is missing, a wrong one.
    """
    # A mistake in a shorter name leaves nothing of it; a longer one takes a server too much time.
    if not isinstance(name, str) or not 2 < len(name) <= _MOST_LETTERS:
        return []
    cuts = [(name[:at], name[at:]) for at in range(len(name) + 1)]
    ends = [(before, end) for before, after in cuts for end in (after, after[1:])]
    return [
        *(before + after[1:2] + after[:1] + after[2:] for before, after in cuts),
        *(before + end for before, end in ends),
        *(before + letter + end for before, end in ends for letter in _LETTERS),
    ]


class QueueExists(PenstockError):
    """A queue of that name exists with other settings."""


class BrokerClosed(PenstockError):
    """A verb was called after ``close()``."""


class NotAllowed(PenstockError):
    """The caller may not do this: it has no key, a wrong one, or one without the permission."""


class LimitReached(PenstockError):
    """A queue is full, or a key publishes too fast; the message names the limit.

    Nothing of the publish was stored; a verb that goes in steps may have done some of them. The
    message of a key that is too fast says when to try again, in milliseconds; so does
    ``retry_after_ms`` at the server. A client has the message alone.
    """

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        """Keep the wait beside the message, for protocols that have a place for it."""
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class ServerBusy(LimitReached):
    """The caller has its share of something that all clients of a server share, or none is left.

    It passes, so the same call may be made again later; nothing was changed. The message names the
    bound, how much of it the caller has, and how much is free.
    """


class StoreLocked(PenstockError):
    """Another process, or another broker of this one, owns the store."""


class StoreMismatch(PenstockError):
    """The place holds something else than a store of this kind, or one of a newer version."""


class CorruptRecord(PenstockError):
    """A record on disk does not decode."""


class StorageFailed(PenstockError):
    """The storage engine refused a read or a write."""


class DiskFull(StorageFailed):
    """The disk of the store has no space left, or only its reserve. Nothing was changed."""


class StoreDamaged(StorageFailed):
    """Files of the store are missing or can't be read; the message names them. Nothing was changed.

    What can be read goes on being served. A backup, or ``penstock salvage``, brings the rest back.
    If reading a table failed, ``table`` names it, and what can't be read is in [begin, end).
    """

    def __init__(
        self, message: str, *, table: str = "", begin: bytes = b"", end: bytes = b""
    ) -> None:
        """Keep the range beside the message, so that a check can report it."""
        super().__init__(message)
        self.table = table
        self.begin = begin
        self.end = end

    def anew(self) -> StoreDamaged:
        """Make the same error again: one that was raised keeps what was open when it was."""
        return StoreDamaged(str(self), table=self.table, begin=self.begin, end=self.end)


class StoreFenced(StorageFailed):
    """Another broker has opened the store and owns it: nothing that this one does counts any more.

    A change that was being made is not there, unless it was durable before the other one came.
    """


class ServerUnreachable(StorageFailed, ConnectionError):
    """No broker answers: none is there, or it has been silent for longer than a call may last.

    A change that was asked for may or may not have been made.
    """


class ImportFailed(PenstockError):
    """A foreign database can't be read."""


class MissingExtra(PenstockError, ImportError):
    """A library is not installed that an extra of Penstock brings; the message names the extra."""


@contextmanager
def needs_extra(extra: str, user: str) -> Iterator[None]:
    """Wrap the import of a library of an extra; raise MissingExtra if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("penstock"):
            # A mistake of this package: no extra brings it.
            raise
        raise MissingExtra(
            f"{user} needs the module {error.name}: pip install 'penstock[{extra}]', or "
            f"'.[{extra}]' in a checkout",
            name=error.name,
        ) from None
