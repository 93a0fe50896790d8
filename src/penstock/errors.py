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
    ├── StoreLocked           another process owns the directory (the message names it)
    ├── StoreMismatch         the directory holds something else, or a newer format
    ├── CorruptRecord         a record that does not decode (quarantined where it was met)
    ├── StorageFailed         the engine refused a read or write
    │   ├── DiskFull              ... for want of space
    │   ├── StoreDamaged          ... because what is on disk can't be read (the message says where)
    │   ├── StoreFenced           ... because another broker has opened the store and owns it now
    │   └── ServerUnreachable     no broker answers at the other end of the network
    └── ImportFailed          a foreign database that can't be read

A stale receipt is not an error: ``ack``, ``release`` and ``extend`` answer with an
:class:`~penstock.model.Outcome` for each receipt.
"""

from __future__ import annotations

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
    "NotAllowed",
    "PenstockError",
    "QueueExists",
    "QueueNotFound",
    "ServerUnreachable",
    "StorageFailed",
    "StoreDamaged",
    "StoreFenced",
    "StoreLocked",
    "StoreMismatch",
]


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

    def __str__(self) -> str:
        """Undo KeyError's quoting of its message."""
        return str(self.args[0]) if self.args else ""


class QueueExists(PenstockError):
    """A queue of that name exists with other settings."""


class BrokerClosed(PenstockError):
    """A verb was called after ``close()``."""


class NotAllowed(PenstockError):
    """The caller may not do this: it has no key, a wrong one, or one without the permission."""


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
