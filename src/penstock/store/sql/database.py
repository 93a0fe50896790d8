"""A connection to the database: repeats transactions, translates errors, reads queries.sql.

One thread at a time uses it; the broker sees to that. A statement by itself is a transaction by
itself: the server commits it, even if the process that sent it dies.

:meth:`Database.do` repeats

* a transaction that the server has aborted (a serialization failure, a deadlock), always;
* a transaction whose connection was lost before COMMIT was sent, always;
* a transaction whose connection was lost later, if the caller says ``again``: the transaction
  finds out by itself whether it had been committed. Others fail with StorageFailed: the outcome is
  not known.

Time limits: the server may be silent for ``statement_timeout_ms`` and a little, and for
``verb_timeout_ms`` in all between two calls of :meth:`Database.limit`, pauses between attempts
included. The connection to a server that is silent for longer is closed: a stopped process still
acknowledges packets, and keeps no timeout of its own. Only silence counts, so that a long answer
over a slow line is not cut off.
"""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from itertools import takewhile
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

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
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from penstock.store.sql.location import SqlPlace

T = TypeVar("T")

Row = tuple[Any, ...]

# How queries.sql is written.
_BLOCK: Final = re.compile(r"^-- (name|part): ", re.MULTILINE)
_MARKS: Final = ("each", "dialect", "plan")
# Not a cast, which has two colons.
_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z]\w*)")
# A process that is stopped in the middle of a transaction must not stop the others for longer.
IDLE_IN_TRANSACTION_MS: Final = 5_000
# 40001 serialization_failure, 40P01 deadlock_detected, 55P03 lock_not_available.
_LOCKED: Final = "55P03"
_ABORTED: Final = frozenset({"40001", "40P01", _LOCKED})
# A message came into a queue twice, with what was tried.
_COMES_TWICE: Final = frozenset({"items_pkey", "attempts_pkey"})
# Classes and codes that say that there is no such place: invalid_authorization, no such database.
_WRONG_PLACE: Final = ("28", "3D")
# The same in the words of libpq, which gives no code when it connects.
_WRONG_SIGNS: Final = ("password", "authentication", "does not exist", "no pg_hba.conf", "role ")
# Shutting down, crashed, starting up, too many connections.
_AWAY: Final = ("08", "57P", "53300")
_RETRY_WAIT_S: Final = 0.05
# How often a silent server is looked at.
_TICK_S: Final = 0.1
# A server that has been silent for so long counts as away; an answer takes moments.
_SILENT_S: Final = 2.0
# Seconds that an error of the server's own timeouts may take to arrive.
_GRACE_S: Final = 2.0
# The least that psycopg takes for an attempt to connect.
_LEAST_CONNECT_S: Final = 2
_ALIVE: Final = {
    "connect_timeout": str(MAX_DATABASE_CONNECT_MS // 1000),
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


class Lost(StorageFailed):
    """The connection was lost; ``unknown``: what was asked for last may have been done."""

    unknown = True


class _Silent(psycopg.OperationalError):
    """The server has said nothing for too long."""


class _Silence:
    """Counts how long the server has been silent, and how long it may be: at a time, in all."""

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self.left_s = inf
        self.now_s = 0.0

    def wait(self, seconds: float) -> None:
        """Count time in which nothing was heard."""
        self.now_s += seconds
        self.left_s -= seconds
        if self.now_s >= self.most_s or self.left_s <= 0:
            raise _Silent(f"it was silent for {self.now_s:.1f} s")

    def during(self, steps: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        """Run the steps of a statement, which yield whenever they wait for the server."""
        try:
            wanted = next(steps)
            while True:
                # Empty if neither side could send or read for the time of a tick.
                ready = yield wanted
                if ready:
                    self.now_s = 0.0
                else:
                    self.wait(_TICK_S)
                wanted = steps.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            self.now_s = 0.0


class _Connection(psycopg.Connection[Row]):
    """A connection that waits for its server only as long as it may."""

    silence: _Silence | None = None

    def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
        """Run the steps of a statement to their end."""
        if self.silence is None:
            return super().wait(gen)
        return super().wait(self.silence.during(gen), interval=_TICK_S)


class Database:
    """One connection, made again when it is lost."""

    def __init__(
        self,
        place: SqlPlace,
        *,
        clock: Callable[[], int],
        relaxed: bool = False,
        bulk: bool = False,
    ) -> None:
        """Connect when first asked. ``bulk``: every statement may take ``bulk_timeout_ms``."""
        self._place = place
        self._conninfo = _conninfo(place.conninfo)
        self.schema = place.schema
        self.dialect = place.dialect
        self.tunables = place.tunables
        # The time after a long statement; without a clock no statement takes any time.
        self.clock = clock
        self._relaxed = relaxed
        self._bulk = bulk
        self._silence = _Silence(self._most_s(bulk=bulk))
        self._statements = statements_of(place.dialect)
        self._connection: psycopg.Connection[Row] | None = None
        self._depth = 0
        # Attempts to connect again before a verb fails.
        self.patience = MAX_DATABASE_REPEATS
        # Counters of statements, of aborted transactions, of attempts to connect again, and of
        # attempts whose outcome is not known.
        self.statements = 0
        self.repeated = 0
        self.reconnected = 0
        self.doubts = 0
        # Why the last attempt to reach the server failed.
        self._failed: str | None = None
        # The statement that last failed to get a lock, the error, and until when that counts:
        # other statements may be answered meanwhile.
        self._locked_out: tuple[Any, str, int] | None = None

    @property
    def away(self) -> str | None:
        """Why the database does not answer at present; from any thread, at once."""
        locked_out = self._locked_out
        if self._failed is not None:
            return self._failed
        if locked_out is not None and self.clock() < locked_out[2]:
            return locked_out[1]
        return "it is silent" if not self._bulk and self._silence.now_s >= _SILENT_S else None

    # --- connecting ------------------------------------------------------------------------

    def connect(self) -> psycopg.Connection[Row]:
        """Return the connection; make one if there is none."""
        connection = self._connection
        if connection is not None and not connection.closed:
            return connection
        told_s = conninfo_to_dict(self._conninfo)["connect_timeout"]
        wait_s = max(_LEAST_CONNECT_S, ceil(min(float(told_s or 0), self._silence.left_s)))
        made = None
        try:
            made = _Connection.connect(self._conninfo, autocommit=True, connect_timeout=wait_s)
            made.silence = self._silence
            self._configure(made)
        except psycopg.Error as error:
            if made is not None:
                made.close()
            if isinstance(error, psycopg.errors.ConnectionTimeout):
                self._silence.left_s -= wait_s
            self._failed = _said(error)
            raise translated(error) from error
        self._connection = made
        return made

    def _configure(self, connection: psycopg.Connection[Row]) -> None:
        # One type for all numbers: a statement is prepared once, not for each width of them.
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        settings = {
            **self._timeouts(bulk=self._bulk),
            "search_path": self.schema,
            "idle_in_transaction_session_timeout": str(IDLE_IN_TRANSACTION_MS),
            "application_name": "penstock",
            "default_transaction_isolation": "read committed",
        }
        if self.dialect == "cockroachdb":
            settings["default_transaction_isolation"] = "serializable"
            settings["enable_multiple_modifications_of_table"] = "on"
        else:
            # Statements of many parts look expensive to the planner, and are not.
            settings["jit"] = "off"
            # Tables grow faster than the planner's idea of them: every statement has its index.
            settings |= {"enable_seqscan": "off", "enable_bitmapscan": "off"}
            if self._relaxed:
                settings["synchronous_commit"] = "off"
        connection.execute(_settings(settings))

    # --- time limits -----------------------------------------------------------------------

    def limit(self, seconds: float) -> None:
        """Bound the silence of the server in all statements from here on."""
        self._silence.left_s = seconds

    @contextmanager
    def at_leisure(self) -> Iterator[None]:
        """Give the statements inside ``bulk_timeout_ms`` each."""
        if self._bulk or self._depth:
            yield
            return
        # Sent within the usual limits, so that a server that hangs is noticed first.
        settings = _settings(self._timeouts(bulk=True))
        try:
            self.execute(settings)
        except Lost:
            # The connection was cut before anything was begun: a new one will do.
            self.execute(settings)
        left_s = self._silence.left_s
        self._bulk, self._silence.most_s, self._silence.left_s = True, self._most_s(bulk=True), inf
        try:
            yield
        finally:
            self._bulk, self._silence.most_s = False, self._most_s(bulk=False)
            self._silence.left_s = left_s
            self._execute_or_close(_settings(self._timeouts(bulk=False)))

    def _timeouts(self, *, bulk: bool) -> dict[str, str]:
        """Return the server's own timeouts: for locks, and for whole statements."""
        tunables = self.tunables
        lock_ms, statement_ms = tunables.lock_timeout_ms, tunables.statement_timeout_ms
        if bulk:
            lock_ms = statement_ms = tunables.bulk_timeout_ms
        return {"lock_timeout": str(lock_ms), "statement_timeout": str(statement_ms)}

    def _most_s(self, *, bulk: bool) -> float:
        """Return how long the server may be silent at a time."""
        return int(self._timeouts(bulk=bulk)["statement_timeout"]) / 1000 + _GRACE_S

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def another(self) -> Database:
        """Return a Database for another connection to the same place, to read in bulk."""
        return Database(self._place, clock=self.clock, bulk=True)

    # --- statements ------------------------------------------------------------------------

    def run(self, name: str, /, **parameters: Any) -> list[Row]:
        """Run a statement and return its rows."""
        statement = self._statements[name]
        assert parameters.keys() == statement.parameters, (
            f"{name}: {parameters.keys() ^ statement.parameters}"
        )
        return self.execute(statement.text, parameters, prepare=statement.planned_once)

    def ask(self, name: str, /, **parameters: Any) -> list[Row]:
        """Run a statement that may be run twice; again if it was aborted or its answer was lost."""
        return self.do(lambda: self.run(name, **parameters), again=True)

    def parameters(self, name: str) -> frozenset[str]:
        """Return the parameters of a statement."""
        return self._statements[name].parameters

    def execute(
        self, text: Any, parameters: Mapping[str, Any] | None = None, *, prepare: bool = False
    ) -> list[Row]:
        """Run any text and return its rows."""
        self.statements += 1
        if self._silence.left_s <= 0:
            raise ServerUnreachable(f"the database does not answer: {self.away}")
        try:
            # A text without parameters may hold many statements, which have no binary answer.
            cursor = self.connect().execute(
                text, parameters, prepare=prepare, binary=parameters is not None
            )
            rows = [] if cursor.description is None else cursor.fetchall()
        except psycopg.Error as error:
            raise self._judged(error, text) from error
        self._failed = None
        if self._locked_out is not None and self._locked_out[0] == text:
            self._locked_out = None
        return rows

    def _judged(self, error: psycopg.Error, text: Any) -> PenstockError:
        """Translate an error; Lost if the connection is gone."""
        if isinstance(error, _Silent):
            # The statement may yet be done, and its answer must not be read as another one's.
            self.close()
        self._failed = _said(error) if isinstance(error, _Silent) else None
        if error.sqlstate == _LOCKED:
            # Until one more attempt would have waited as long.
            until_ms = self.clock() + 2 * self.tunables.lock_timeout_ms
            self._locked_out = text, _said(error), until_ms
        if self._connection is None or self._connection.closed or self._connection.broken:
            self.close()
            return Lost(f"the connection to the database was lost: {_said(error)}")
        return translated(error)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the statements inside as one transaction; one inside another is part of it."""
        if self._depth:
            yield
            return
        try:
            self.execute("BEGIN")
            self._depth = 1
            yield
        except BaseException as error:
            self._depth = 0
            self._execute_or_close(sql.SQL("ROLLBACK"))
            if isinstance(error, Lost):
                # COMMIT was not sent.
                error.unknown = False
            raise
        self._depth = 0
        self.execute("COMMIT")

    def _execute_or_close(self, text: sql.SQL | sql.Composed) -> None:
        """Execute a text that a new connection does not need: one is made if it fails."""
        try:
            if self._connection is not None and not self._connection.closed:
                self._connection.execute(text)
        except psycopg.Error:
            # The server undoes a transaction when it finds the connection closed.
            self.close()

    # --- repeating -------------------------------------------------------------------------

    def do(self, work: Callable[[], T], *, again: bool = False) -> T:
        """Call ``work``, which is one transaction, again if the server has aborted it.

        ``again``: also if the connection was lost, because doing it twice does no harm.
        """
        if self._depth:
            return work()
        lost = 0
        doubts = self.doubts
        for left in range(MAX_DATABASE_REPEATS, -1, -1):
            try:
                return work()
            except Aborted:
                # One that waits for a lock once more needs the time to hear of it.
                lock_s = self.tunables.lock_timeout_ms / 1000 if self._locked_out else 0
                if not left or self._silence.left_s <= lock_s:
                    raise
                self.repeated += 1
                wait_s = 0.0
            except (Lost, ServerUnreachable) as error:
                # A database that restarts gets time; one that stays away fails the verb.
                lost += 1
                self.doubts += isinstance(error, Lost) and error.unknown
                in_doubt = self.doubts > doubts
                gives_up = not left or lost > self.patience or self._silence.left_s <= 0
                if gives_up or (in_doubt and not again):
                    if in_doubt:
                        error.args = (f"{error}; it may or may not have been done",)
                    raise
                self.reconnected += 1
                wait_s = _RETRY_WAIT_S * lost
            if wait_s:
                self._silence.left_s -= wait_s
                threading.Event().wait(wait_s)
        raise AssertionError("the loop ends by itself")


class Aborted(StorageFailed):
    """The server has undone the transaction for the sake of another; it may be repeated."""


class Refused(StorageFailed):
    """A statement broke a constraint, which ``constraint`` names."""

    def __init__(self, message: str, constraint: str) -> None:
        super().__init__(message)
        self.constraint = constraint


def columns(rows: Iterable[Sequence[Any]], *names: str) -> dict[str, list[Any]]:
    """Return rows as named columns, as statements take them."""
    held = list(rows)
    return {name: [row[at] for row in held] for at, name in enumerate(names)}


def _conninfo(conninfo: str) -> str:
    """Add the settings by which a connection notices that the other end is gone."""
    try:
        told = conninfo_to_dict(conninfo)
    except psycopg.Error as error:
        raise InvalidUrl(f"the database can't be opened: {_said(error)}") from error
    return make_conninfo(
        conninfo, **{name: value for name, value in _ALIVE.items() if name not in told}
    )


def _settings(settings: Mapping[str, str]) -> sql.Composed:
    parts = [
        sql.SQL("SET {} = {}").format(sql.Identifier(name), sql.Literal(value))
        for name, value in settings.items()
    ]
    return sql.SQL("; ").join(parts)


def translated(error: psycopg.Error) -> PenstockError:
    """Translate an error of the driver into Penstock's."""
    code = error.sqlstate or ""
    said = _said(error)
    if code in _ABORTED:
        return Aborted(f"the database has aborted a transaction: {said}")
    if code.startswith("23"):
        rule = error.diag.constraint_name or error.diag.column_name or ""
        if rule in _COMES_TWICE:
            # Another process has put the same message into the queue: the next attempt sees it.
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
    if code == "57014":
        return StorageFailed(
            f"the database has cancelled a statement, and nothing was changed: {said}; one that "
            "needs longer is given it by ?statement_timeout_ms= of the store's URL"
        )
    if code in {"53100", "53200"}:
        return DiskFull(f"the database has no room left: {said}")
    if code.startswith(_AWAY) or (not code and isinstance(error, psycopg.OperationalError)):
        if any(sign in said for sign in _WRONG_SIGNS):
            return InvalidUrl(f"the database can't be opened: {said}")
        return ServerUnreachable(f"the database does not answer: {said}")
    return StorageFailed(f"the database has failed: {said}")


def _said(error: psycopg.Error) -> str:
    primary = error.diag.message_primary or str(error) or type(error).__name__
    return " ".join(primary.split())


# --- statements ----------------------------------------------------------------------------------


class Statement(NamedTuple):
    """A statement: what it is for, its text for psycopg and its parameters.

    ``planned_once``: the server may keep a plan that does not depend on the parameters.
    """

    purpose: str
    text: str
    parameters: frozenset[str]
    planned_once: bool


def parse_statements(text: str, dialect: str) -> dict[str, Statement]:
    """Read named statements, but for those of another dialect."""
    found: dict[str, Statement] = {}
    parts: dict[str, str] = {}
    _, *pieces = _BLOCK.split(text)
    for kind, block in zip(pieces[::2], pieces[1::2], strict=True):
        title, *lines = block.splitlines()
        about = [line[2:].strip() for line in takewhile(_is_comment, lines)]
        marks = {name: rest for name, colon, rest in (a.partition(": ") for a in about) if colon}
        body = _code(lines).format_map({**parts, "each": "{each}"})
        if kind == "part":
            parts[title] = body
        elif marks.get("dialect", dialect) == dialect:
            purpose = " ".join(line for line in about if line.partition(": ")[0] not in _MARKS)
            for word in marks.get("each", "-").split():
                name, code = title.replace("{each}", word), body.replace("{each}", word)
                if name in found:
                    raise ValueError(f"two statements are named {name}")
                found[name] = Statement(
                    purpose.replace("{each}", word),
                    # Parameters go in binary: payloads are not to be spelt out.
                    _PARAMETER.sub(r"%(\1)b", code.replace("%", "%%")),
                    frozenset(_PARAMETER.findall(code)),
                    marks.get("plan") == "once",
                )
    return found


def _code(lines: list[str]) -> str:
    """Return the text of a statement on one line, without comments."""
    code = [line.partition("-- ")[0].strip() for line in lines if not _is_comment(line)]
    return " ".join(code).strip().rstrip(";")


def _is_comment(line: str) -> bool:
    return line.startswith("--")


@cache
def statements_of(dialect: str) -> Mapping[str, Statement]:
    """Return every statement of the store for a dialect."""
    return parse_statements(read_sql("queries.sql"), dialect)


@cache
def read_sql(name: str) -> str:
    """Return the text of a file of this package."""
    return (files("penstock.store.sql") / name).read_text("utf-8")
