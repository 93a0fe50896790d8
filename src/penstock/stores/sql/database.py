"""A connection to the database: transactions that are repeated, and errors in our own words.

One thread at a time uses it, as the broker sees to. A statement by itself is a transaction by
itself: it is committed by the server, whatever becomes of the process that has sent it.

What may be done again:

* a transaction that the server has aborted (a serialization failure, a deadlock), always;
* one whose connection was lost before it was told to commit, always;
* one whose connection was lost later, if it says that it can be repeated (``again``): it finds
  out by itself whether it had been committed. Others fail with StorageFailed: nobody knows.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.numeric import Int8BinaryDumper

from penstock.errors import (
    DiskFull,
    InvalidUrl,
    PenstockError,
    ServerUnreachable,
    StorageFailed,
    StoreMismatch,
)
from penstock.limits import MAX_DATABASE_CONNECT_MS, MAX_DATABASE_REPEATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.stores.sql.statements import Statement

__all__ = ["Aborted", "Database", "Lost", "Refused", "translated"]

log = logging.getLogger(__name__)

T = TypeVar("T")

Row = tuple[Any, ...]

# A process that is stopped in the middle of a transaction must not stop the others for longer.
IDLE_IN_TRANSACTION_MS: Final = 5_000
# 40001 serialization_failure, 40P01 deadlock_detected, 55P03 lock_not_available.
_ABORTED: Final = frozenset({"40001", "40P01", "55P03"})
# A message came into a queue twice, with what was tried.
_COMES_TWICE: Final = frozenset({"items_pkey", "attempts_pkey"})
# Classes and codes that say that there is no such place: invalid_authorization, no such database.
_WRONG_PLACE: Final = ("28", "3D")
# Shutting down, crashed, starting up, too many connections.
_AWAY: Final = ("08", "57P", "53300")
_RETRY_WAIT_S: Final = 0.05
_ALIVE: Final = {
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


class Lost(StorageFailed):
    """The connection was lost; ``unknown``: what was asked for last may have been done."""

    unknown = True


class Database:
    """One connection, made again when it is lost."""

    def __init__(self, conninfo: str, schema: str, dialect: str, *, relaxed: bool = False) -> None:
        self._conninfo = _conninfo(conninfo)
        self.schema = schema
        self.dialect = dialect
        self._relaxed = relaxed
        self._statements: Mapping[str, Statement] = {}
        self._connection: psycopg.Connection[Row] | None = None
        self._depth = 0
        # How often it is tried to connect again before a verb fails.
        self.patience = MAX_DATABASE_REPEATS
        # What the store has cost so far, and had to do again.
        self.statements = 0
        self.repeated = 0
        self.reconnected = 0
        # Why the last try to connect has failed, if it has.
        self.away: str | None = None

    def use(self, statements: Mapping[str, Statement]) -> None:
        """Take the statements that :meth:`run` knows by name."""
        self._statements = statements

    # --- connecting ------------------------------------------------------------------------

    def connect(self) -> psycopg.Connection[Row]:
        """Return the connection; make one if there is none."""
        connection = self._connection
        if connection is not None and not connection.closed:
            return connection
        try:
            connection = psycopg.connect(
                self._conninfo, autocommit=True, connect_timeout=MAX_DATABASE_CONNECT_MS // 1000
            )
        except psycopg.Error as error:
            self.away = _said(error)
            raise translated(error) from error
        try:
            self._configure(connection)
        except psycopg.Error as error:
            connection.close()
            self.away = _said(error)
            raise translated(error) from error
        self._connection = connection
        self.away = None
        return connection

    def _configure(self, connection: psycopg.Connection[Row]) -> None:
        # One type for all numbers: a statement is prepared once, not for each width of them.
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        settings = {
            "search_path": self.schema,
            "idle_in_transaction_session_timeout": str(IDLE_IN_TRANSACTION_MS),
            "application_name": "penstock",
            "default_transaction_isolation": "read committed",
        }
        if self.dialect == "cockroachdb":
            settings["default_transaction_isolation"] = "serializable"
            settings["enable_multiple_modifications_of_table"] = "on"
        else:
            # Statements of many parts look dear to the planner, and are not.
            settings["jit"] = "off"
            # Tables grow faster than the planner's idea of them: every statement has its index.
            settings |= {"enable_seqscan": "off", "enable_bitmapscan": "off"}
            if self._relaxed:
                settings["synchronous_commit"] = "off"
        parts = [
            sql.SQL("SET {} = {}").format(sql.Identifier(name), sql.Literal(value))
            for name, value in settings.items()
        ]
        connection.execute(sql.SQL("; ").join(parts))

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def server(self) -> tuple[object, object]:
        """Where it is: host and port."""
        told = conninfo_to_dict(self._conninfo)
        return told.get("host"), told.get("port")

    def another(self) -> Database:
        """Return what makes another connection to the same place."""
        twin = Database(self._conninfo, self.schema, self.dialect)
        twin.use(self._statements)
        return twin

    # --- statements ------------------------------------------------------------------------

    def run(self, name: str, /, **parameters: Any) -> list[Row]:
        """Run a statement and return its rows."""
        statement = self._statements[name]
        assert parameters.keys() == statement.parameters, (
            f"{name}: {parameters.keys() ^ statement.parameters}"
        )
        return self.execute(statement.text, parameters, prepare=statement.planned_once)

    def parameters(self, name: str) -> frozenset[str]:
        """Return the parameters of a statement."""
        return self._statements[name].parameters

    def execute(
        self, text: Any, parameters: Mapping[str, Any] | None = None, *, prepare: bool = False
    ) -> list[Row]:
        """Run any text."""
        self.statements += 1
        try:
            # A text without parameters may hold many statements, which have no binary answer.
            cursor = self.connect().execute(
                text, parameters, prepare=prepare, binary=parameters is not None
            )
            return [] if cursor.description is None else cursor.fetchall()
        except psycopg.Error as error:
            raise self._judged(error) from error

    def _judged(self, error: psycopg.Error) -> PenstockError:
        """Translate an error; tell apart those after which the connection is gone."""
        if self._connection is None or self._connection.closed or self._connection.broken:
            self.close()
            return Lost(f"the connection to the database was lost: {_said(error)}")
        return translated(error)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make everything inside one transaction; one inside another is part of it."""
        if self._depth:
            yield
            return
        try:
            self.execute("BEGIN")
            self._depth = 1
            yield
        except BaseException as error:
            self._depth = 0
            self._roll_back()
            if isinstance(error, Lost):
                # It was not told to commit, so that it did not.
                error.unknown = False
            raise
        self._depth = 0
        self.execute("COMMIT")

    def _roll_back(self) -> None:
        try:
            if self._connection is not None and not self._connection.closed:
                self._connection.execute("ROLLBACK")
        except psycopg.Error:
            self.close()

    # --- repeating -------------------------------------------------------------------------

    def do(self, work: Callable[[], T], *, again: bool = False) -> T:
        """Do something that is one transaction, again if the server has aborted it.

        ``again``: also if the connection was lost, because it does no harm if it had been done.
        """
        if self._depth:
            return work()
        lost = 0
        for left in range(MAX_DATABASE_REPEATS, -1, -1):
            try:
                return work()
            except Aborted:
                if not left:
                    raise
                self.repeated += 1
                wait_s = 0.0
            except (Lost, ServerUnreachable) as error:
                # A database that restarts is given time; one that stays away fails the verb.
                lost += 1
                gives_up = not left or lost > self.patience
                if gives_up or (isinstance(error, Lost) and error.unknown and not again):
                    raise
                self.reconnected += 1
                wait_s = _RETRY_WAIT_S * lost
            if wait_s:
                threading.Event().wait(wait_s)
        raise AssertionError("the loop ends by itself")


class Aborted(StorageFailed):
    """The server has undone the transaction, for the sake of another; it may be tried again."""


class Refused(StorageFailed):
    """A row that must not be there is, or the other way round; ``constraint`` names the rule."""

    def __init__(self, message: str, constraint: str) -> None:
        super().__init__(message)
        self.constraint = constraint


def _conninfo(conninfo: str) -> str:
    """Add what a connection needs to notice that the other end is gone, unless it is said."""
    try:
        told = conninfo_to_dict(conninfo)
    except psycopg.Error as error:
        raise InvalidUrl(f"the database can't be opened: {_said(error)}") from error
    return make_conninfo(
        conninfo, **{name: value for name, value in _ALIVE.items() if name not in told}
    )


def translated(error: psycopg.Error) -> PenstockError:
    """Put an error of the database in our own words."""
    code = error.sqlstate or ""
    said = _said(error)
    if code in _ABORTED:
        return Aborted(f"the database has aborted a transaction: {said}")
    if code.startswith("23"):
        rule = error.diag.constraint_name or error.diag.column_name or ""
        if rule in _COMES_TWICE:
            # Another process has brought the same message into the queue: it is seen next time.
            return Aborted(f"a message has come into a queue meanwhile: {said}")
        return Refused(said, rule)
    if code.startswith(_WRONG_PLACE):
        return InvalidUrl(f"the database can't be opened: {said}")
    if code == "42501":
        return StorageFailed(
            f"the database does not allow it: {said}; the user needs the right to make and use "
            "the tables of its schema"
        )
    if code.startswith("42"):
        return StoreMismatch(f"the database has not the tables that were expected: {said}")
    if code in {"53100", "53200"}:
        return DiskFull(f"the database has no room left: {said}")
    if code.startswith(_AWAY) or (not code and isinstance(error, psycopg.OperationalError)):
        wrong = _wrong_place(said)
        if wrong:
            return InvalidUrl(f"the database can't be opened: {said}")
        return ServerUnreachable(f"the database does not answer: {said}")
    return StorageFailed(f"the database has failed: {said}")


def _wrong_place(said: str) -> bool:
    """Whether a connection was refused for what it asked for; libpq gives no code then."""
    return any(
        sign in said
        for sign in ("password", "authentication", "does not exist", "no pg_hba.conf", "role ")
    )


def _said(error: psycopg.Error) -> str:
    primary = error.diag.message_primary or str(error) or type(error).__name__
    return " ".join(primary.split())
