"""Errors of the database: what they mean for a verb, and which of Penstock's they become."""

from __future__ import annotations

import re
from typing import Final

import psycopg

from penstock.errors import (
    DiskFull,
    InvalidInput,
    InvalidUrl,
    PenstockError,
    ServerUnreachable,
    StorageFailed,
    StoreMismatch,
)

# 40001 serialization_failure, 40P01 deadlock_detected, 55P03 lock_not_available.
LOCKED: Final = "55P03"
_ABORTED: Final = frozenset({"40001", "40P01", LOCKED})
# A message came into a queue twice, with what was tried.
_COMES_TWICE: Final = frozenset({"items_pkey", "attempts_pkey"})
_NULL_COLUMN: Final = re.compile(r'null value in column "(\w+)"')
# CockroachDB: the outcome of a transaction is not known.
AMBIGUOUS: Final = "40003"
# Classes and codes that say that there is no such place: invalid_authorization, no such database.
_WRONG_PLACE: Final = ("28", "3D")
# The same in the words of libpq, which gives no code when it connects; and what looks like it.
_WRONG_SIGNS: Final = ("password", "authentication", "does not exist", "no pg_hba.conf", "role ")
_TOO_MANY: Final = "too many connections"
# Shutting down, crashed, starting up, too many connections.
_AWAY: Final = ("08", "57P", "53300")
# The session has lost a prepared statement, or has one that this process knows nothing of.
NAMES_DIFFER: Final = frozenset({"26000", "42P05"})
# It only reads: a standby, or a primary that has become one.
READ_ONLY: Final = "25006"
# Classes and codes that other calls meet as well: a table is missing, a right, a schema.
OF_THE_STORE: Final = ("42", "3F", READ_ONLY, *NAMES_DIFFER)


class Lost(StorageFailed):
    """The connection was lost; ``unknown``: what was asked for last may have been done."""

    unknown = True


class Aborted(StorageFailed):
    """The server has undone the transaction for the sake of another; it may be repeated.

    ``waited``: it waited for a lock for as long as it may.
    """

    waited = False


class Refused(StorageFailed):
    """A statement broke a constraint, which ``constraint`` names."""

    def __init__(self, message: str, constraint: str) -> None:
        super().__init__(message)
        self.constraint = constraint


def translated(error: psycopg.Error) -> PenstockError:
    """Translate an error of the driver into Penstock's."""
    code = error.sqlstate or ""
    told = said(error)
    if code in _ABORTED:
        aborted = Aborted(f"the database has aborted a transaction: {told}")
        aborted.waited = code == LOCKED
        return aborted
    if code.startswith("23"):
        rule = error.diag.constraint_name or error.diag.column_name or ""
        if not rule and (column := _NULL_COLUMN.search(told)):
            # CockroachDB names the column in its message alone.
            rule = column[1]
        if rule in _COMES_TWICE:
            # Another process has put the same message into the queue: the next attempt sees it.
            return Aborted(f"a message has come into a queue meanwhile: {told}")
        return Refused(told, rule)
    if code.startswith(_WRONG_PLACE):
        return InvalidUrl(f"the database can't be opened: {told}")
    if code == "42501":
        return StorageFailed(
            f"the database does not allow it: {told}; the user needs the right to make and use "
            "the tables of its schema"
        )
    if code.startswith("42"):
        return StoreMismatch(f"the database has not the tables that were expected: {told}")
    if code == "57014":
        return StorageFailed(
            f"the database has cancelled a statement, and nothing was changed: {told}; one that "
            "needs longer is given it by ?statement_timeout_ms= of the store's URL"
        )
    if code.startswith(("22", "54")):
        return InvalidInput(f"the database can't hold it, and nothing was changed: {told}")
    if code in {"53100", "53200"}:
        return DiskFull(f"the database has no room left: {told}")
    if code.startswith(_AWAY) or (not code and isinstance(error, psycopg.OperationalError)):
        if _TOO_MANY not in told and any(sign in told for sign in _WRONG_SIGNS):
            return InvalidUrl(f"the database can't be opened: {told}")
        return ServerUnreachable(f"the database does not answer: {told}")
    return StorageFailed(f"the database has failed: {told}")


def said(error: psycopg.Error) -> str:
    """Return the words of an error, on one line."""
    primary = error.diag.message_primary or str(error) or type(error).__name__
    return " ".join(primary.split())
