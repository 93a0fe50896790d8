"""One connection to the database: made again when it is lost, errors translated, time bounded.

One thread at a time uses it; :class:`~penstock.store.sql.database.Database` sees to that. The
server may be silent for ``statement_timeout_ms`` and a little, and for what is left of the verb's
time. The connection to a server that is silent for longer is closed: a stopped process still
acknowledges packets, and keeps no timeout of its own. Only silence counts, so that a long answer
over a slow line is not cut off.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import psycopg
from psycopg import sql
from psycopg.adapt import PyFormat, Transformer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.generators import execute
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.types.numeric import Int8BinaryDumper

from penstock.errors import (
    InvalidUrl,
    PenstockError,
    ServerUnreachable,
)
from penstock.limits import MAX_DATABASE_CONNECT_MS
from penstock.store.sql.arrays import register_arrays
from penstock.store.sql.failures import (
    AMBIGUOUS,
    LOCKED,
    NAMES_DIFFER,
    OF_THE_STORE,
    READ_ONLY,
    Lost,
    said,
    translated,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from psycopg import abc
    from psycopg.pq.abc import PGresult

    from penstock.store.sql.location import SqlPlace

T = TypeVar("T")

Row = tuple[Any, ...]
# By name, or those of a text with $1, $2 and so on.
Parameters: TypeAlias = "Mapping[str, Any] | list[Any]"

# A process that is stopped in the middle of a transaction must not stop the others for longer.
IDLE_IN_TRANSACTION_MS: Final = 5_000
# How often a silent server is looked at.
TICK_S: Final = 0.1
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
# For how long the server keeps plans. Planning costs more than a claim, and less than a plan that
# is wrong for long about the size of a table.
PLANS_MS: Final = 5_000


class _Silent(psycopg.OperationalError):
    """The server has said nothing for too long."""


class Liveness:
    """Whether the database answers, as all connections of a process have found."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        # Why the last attempt to reach the server failed.
        self.failed: str | None = None
        # The statement that last failed through no fault of its caller, the error, and until when
        # that counts: other statements may be answered meanwhile.
        self._stuck: tuple[Any, str, int] | None = None
        # Grows with every answer, though not always by one: threads do not wait for each other.
        self.answers = 0

    @property
    def away(self) -> str | None:
        """Why the database does not answer at present; from any thread, at once."""
        stuck = self._stuck
        if self.failed is None and stuck is not None and self._clock() < stuck[2]:
            return stuck[1]
        return self.failed

    def note_answer(self, text: Any = None) -> None:
        """Note that the server has answered; ``text``: the statement that it has done."""
        self.answers += 1
        self.failed = None
        stuck = self._stuck
        if text is not None and stuck is not None and stuck[0] == text:
            self._stuck = None

    def note_stuck(self, text: Any, why: str, lock_timeout_ms: int) -> None:
        """Note that a statement has waited for a lock in vain, or can't be done at present."""
        # Until one more attempt would have waited as long.
        self._stuck = text, why, self._clock() + 2 * lock_timeout_ms


class _Silence:
    """Counts how long the server has been silent, and how long it may be: at a time, in all."""

    def __init__(self, liveness: Liveness, most_s: float) -> None:
        self._liveness = liveness
        self.most_s = most_s
        self.left_s = inf
        self._now_s = 0.0
        # Answers to all connections, when this one was last heard.
        self._answers = 0

    def wait(self, seconds: float) -> None:
        """Count time in which nothing was heard."""
        self._now_s += seconds
        self.left_s -= seconds
        # A statement that takes long while other connections get answers is no outage, nor is one
        # that may take its time.
        alone = self._liveness.answers == self._answers and self.left_s < inf
        if alone and self._now_s >= _SILENT_S:
            self._liveness.failed = "it is silent"
        if self._now_s >= self.most_s or self.left_s <= 0:
            raise _Silent(f"it was silent for {self._now_s:.1f} s")

    def during(self, steps: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        """Run the steps of a statement, which yield whenever they wait for the server."""
        self._now_s, self._answers = 0.0, self._liveness.answers
        try:
            wanted = next(steps)
            while True:
                # Empty if neither side could send or read for the time of a tick.
                ready = yield wanted
                if ready:
                    self._now_s, self._answers = 0.0, self._liveness.answers
                else:
                    self.wait(TICK_S)
                wanted = steps.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result


class _PatientConnection(psycopg.Connection[Row]):
    """A connection that waits for its server only as long as it may."""

    silence: _Silence | None = None

    def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
        """Run the steps of a statement to their end."""
        if self.silence is None:
            return super().wait(gen)
        return super().wait(self.silence.during(gen), interval=TICK_S)


class Connection:
    """One connection, made again when it is lost."""

    def __init__(
        self,
        place: SqlPlace,
        liveness: Liveness,
        number: int,
        *,
        clock: Callable[[], int],
        relaxed: bool,
        bulk: bool,
    ) -> None:
        """Connect when first asked. ``number``: of this one among those of its process."""
        self.number = number
        # The thread that has it, if one has.
        self.thread: int | None = None
        self._conninfo = _conninfo(place.conninfo)
        self._schema = place.schema
        self._dialect = place.dialect
        self._tunables = place.tunables
        self._prepare = place.prepare
        self._liveness = liveness
        self._clock = clock
        self._relaxed = relaxed
        self._bulk = self._always_bulk = bulk
        self.silence = _Silence(liveness, self._most_s(bulk=bulk))
        self._made: psycopg.Connection[Row] | None = None
        # Statements that the server keeps prepared: how their values are written and read, and
        # their names by text and types of parameters.
        self._prepared: dict[bytes, abc.Transformer] = {}
        self._names: dict[tuple[bytes, tuple[int, ...] | None], bytes] = {}
        # Since when the server has kept plans.
        self._plans_ms = 0
        # Counters of statements, of aborted transactions, and of attempts to connect again.
        self.statements = 0
        self.repeated = 0
        self.reconnected = 0

    # --- connecting ------------------------------------------------------------------------

    def connect(self) -> psycopg.Connection[Row]:
        """Return the driver's connection; make one if there is none."""
        if self._made is not None and not self._made.closed:
            return self._made
        told_s = conninfo_to_dict(self._conninfo)["connect_timeout"]
        wait_s = max(_LEAST_CONNECT_S, ceil(min(float(told_s or 0), self.silence.left_s)))
        made = None
        try:
            # The driver would prepare statements of its own, and with the first ROLLBACK take the
            # names of all others away, ours included.
            made = _PatientConnection.connect(
                self._conninfo, autocommit=True, connect_timeout=wait_s, prepare_threshold=None
            )
            made.silence = self.silence
            if self._prepare and self._dialect == "postgresql":
                self._refuse_shared_sessions(made)
            self._configure(made)
        except BaseException as error:
            if made is not None:
                made.close()
            if isinstance(error, psycopg.errors.ConnectionTimeout):
                self.silence.left_s -= wait_s
            if isinstance(error, psycopg.ProgrammingError) and error.__context__ is not None:
                # The driver took it for a wrong value, as it does with whatever comes while it
                # reads one: also with an exception out of a signal handler.
                raise error.__context__ from None
            if isinstance(error, psycopg.Error | InvalidUrl):
                raise self._refusal(error) from error
            raise
        self._made, self._plans_ms = made, self._clock()
        self._forget_prepared()
        return made

    def _refusal(self, error: psycopg.Error | InvalidUrl) -> PenstockError:
        """Translate the refusal of a connection.

        A database that has answered before is no wrong URL: a password is being changed, a rule of
        pg_hba.conf, or the database is being restored. So the verb is tried again.
        """
        told: PenstockError
        if isinstance(error, InvalidUrl):
            told, why = error, str(error)
        else:
            told, why = translated(error), said(error)
        self._liveness.failed = why
        if isinstance(told, InvalidUrl) and self._liveness.answers:
            return ServerUnreachable(f"{told}; it could be before")
        return told

    def _refuse_shared_sessions(self, connection: psycopg.Connection[Row]) -> None:
        """Refuse a pooler that hands each transaction to another session, as PgBouncer may do.

        Before anything is set: sessions of such a pooler are other clients' as well.
        """
        session = _session_of(connection)
        if session == connection.info.backend_pid:
            return
        # There is a pooler. Does another of its clients, while in a transaction, get the session of
        # this one, or this one another?
        try:
            with _PatientConnection.connect(self._conninfo, prepare_threshold=None) as other:
                other.silence = self.silence
                shared = _session_of(other) == session or _session_of(connection) != session
        except psycopg.Error:
            # It has no session for another client.
            return
        if shared:
            raise InvalidUrl(
                "between Penstock and the database is a pooler that hands each transaction to "
                "another session (PgBouncer: pool_mode = transaction): add ?prepare=off to the "
                "URL, or let it keep sessions (pool_mode = session)"
            )

    def _configure(self, connection: psycopg.Connection[Row]) -> None:
        # One type for all numbers: a statement is prepared once, not for each width of them.
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        register_arrays(connection)
        if self._prepare:
            connection.execute(_settings(self._session_settings(bulk=self._bulk)))
            return
        # Sessions are other clients' as well: the database must have set it for all of them.
        wanted = self._session_settings(bulk=False)
        del wanted["application_name"]
        text = "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)"
        found: dict[str, str] = dict(connection.execute(text, [list(wanted)]).fetchall())
        missing = {name: value for name, value in wanted.items() if found.get(name) != value}
        if missing:
            told = "; ".join(f"ALTER ROLE CURRENT_USER SET {n} = '{v}'" for n, v in missing.items())
            raise InvalidUrl(
                "with ?prepare=off Penstock sets nothing in a session; let the database do it for "
                f"the user of the store, and the pooler connect again: {told}"
            )

    def _session_settings(self, *, bulk: bool) -> dict[str, str]:
        """Return the settings that every session must have."""
        settings = {
            **self._timeouts(bulk=bulk),
            "search_path": self._schema,
            "idle_in_transaction_session_timeout": str(IDLE_IN_TRANSACTION_MS),
            "application_name": "penstock",
            "default_transaction_isolation": "read committed",
        }
        if self._dialect == "cockroachdb":
            settings["default_transaction_isolation"] = "serializable"
        else:
            # Statements of many parts look expensive to the planner, and are not.
            settings["jit"] = "off"
            # Tables grow faster than the planner's idea of them: every statement has its index.
            settings |= {"enable_seqscan": "off", "enable_bitmapscan": "off"}
            # And every join goes from the few rows that are named to that index.
            settings |= {"enable_hashjoin": "off", "enable_mergejoin": "off"}
            # To plan for the parameters of each call costs more than the call.
            settings["plan_cache_mode"] = "force_generic_plan"
            if self._relaxed:
                settings["synchronous_commit"] = "off"
        return settings

    def close(self) -> None:
        """Close the connection; the next statement makes another."""
        if self._made is not None:
            self._made.close()
            self._made = None
            self._forget_prepared()

    def close_if_left(self) -> None:
        """Close it if an exception of a signal handler has left it in the middle of something.

        One that reads in bulk is left in a transaction on purpose.
        """
        made = self._made
        if made is None or self._always_bulk:
            return
        if self._bulk or made.pgconn.transaction_status != TransactionStatus.IDLE:
            self.close()
            self._bulk = False
            self.silence.most_s = self._most_s(bulk=False)

    def _forget_prepared(self) -> None:
        self._prepared.clear()
        self._names.clear()

    # --- time limits -----------------------------------------------------------------------

    @contextmanager
    def at_leisure(self) -> Iterator[None]:
        """Give the statements inside ``bulk_timeout_ms`` each."""
        if self._bulk:
            yield
            return
        # Sent within the usual limits, so that a server that hangs is noticed first.
        settings = _settings(self._timeouts(bulk=True)) if self._prepare else sql.SQL("SELECT 1")
        try:
            self.execute(settings)
        except Lost:
            # The connection was cut before anything was begun: a new one will do.
            self.execute(settings)
        silence, left_s = self.silence, self.silence.left_s
        self._bulk, silence.most_s, silence.left_s = True, self._most_s(bulk=True), inf
        try:
            yield
        finally:
            self._bulk, silence.most_s, silence.left_s = False, self._most_s(bulk=False), left_s
            if self._prepare:
                self.execute_or_close(_settings(self._timeouts(bulk=False)))

    def _timeouts(self, *, bulk: bool) -> dict[str, str]:
        """Return the server's own timeouts: for locks, and for whole statements."""
        tunables = self._tunables
        lock_ms, statement_ms = tunables.lock_timeout_ms, tunables.statement_timeout_ms
        if bulk:
            lock_ms = statement_ms = tunables.bulk_timeout_ms
        return {"lock_timeout": str(lock_ms), "statement_timeout": str(statement_ms)}

    def _most_s(self, *, bulk: bool) -> float:
        """Return how long the server may be silent at a time."""
        return int(self._timeouts(bulk=bulk)["statement_timeout"]) / 1000 + _GRACE_S

    # --- statements ------------------------------------------------------------------------

    def execute(
        self, text: Any, parameters: Parameters | None = None, *, prepare: bool = False
    ) -> list[Row]:
        """Run any text and return its rows; a list of parameters goes with ``$1`` and so on."""
        self.statements += 1
        if self.silence.left_s <= 0:
            raise ServerUnreachable(f"the database does not answer: {self._liveness.away}")
        try:
            connection = self.connect()
            if prepare and self._prepare and isinstance(parameters, list):
                rows = self._run_prepared(connection, text, parameters)
            else:
                kind = psycopg.RawCursor if isinstance(parameters, list) else psycopg.Cursor
                # A text without parameters may hold many statements, which have no binary answer.
                cursor = kind(connection).execute(
                    text, parameters, prepare=False, binary=parameters is not None
                )
                rows = [] if cursor.description is None else cursor.fetchall()
        except psycopg.Error as error:
            raise self._judged(error, text) from error
        self._liveness.note_answer(text)
        return rows

    def _run_prepared(
        self, connection: psycopg.Connection[Row], text: bytes, parameters: list[Any]
    ) -> list[Row]:
        """Run a statement that the server keeps prepared; a cursor would cost twice as much."""
        try:
            return self._send_prepared(connection, text, parameters)
        except psycopg.Error:
            raise
        except BaseException:
            # Interrupted: an answer may yet come, and a name be taken.
            self.close()
            raise

    def _send_prepared(
        self, connection: psycopg.Connection[Row], text: bytes, parameters: list[Any]
    ) -> list[Row]:
        statement = self._prepared.get(text)
        if statement is None:
            statement = self._prepared[text] = Transformer(connection)
        values = statement.dump_sequence(parameters, [PyFormat.AUTO] * len(parameters))
        session = connection.pgconn
        # A parameter that is NULL has no type.
        key = text, statement.types
        name = self._names.get(key)
        if name is None:
            name = b"penstock_%d" % len(self._names)
            session.send_prepare(name, text, param_types=statement.types)
            _result(connection)
            self._names[key] = name
        session.send_query_prepared(
            name, values, param_formats=statement.formats, result_format=Format.BINARY
        )
        result = _result(connection)
        statement.set_pgresult(result)
        rows = statement.load_rows(0, result.ntuples, tuple)
        # The answer is not to be kept until the next.
        statement.set_pgresult(None)
        return rows

    def _judged(self, error: psycopg.Error, text: Any) -> PenstockError:
        """Translate an error; Lost if the connection is gone."""
        if isinstance(error, _Silent):
            # The statement may yet be done, and its answer must not be read as another one's.
            self.close()
            self._liveness.failed = said(error)
        code = error.sqlstate or ""
        if code == LOCKED or code.startswith(OF_THE_STORE):
            self._liveness.note_stuck(text, said(error), self._tunables.lock_timeout_ms)
        if code in NAMES_DIFFER:
            # The statement was not begun, and a new session has no names.
            self.close()
            lost = Lost(
                f"the database has lost a prepared statement: {said(error)}; a pooler that hands "
                "each transaction to another session needs ?prepare=off in the store's URL"
            )
            lost.unknown = False
            return lost
        if code == READ_ONLY:
            # A new connection may lead to the primary.
            self.close()
            return translated(error)
        if self._made is None or self._made.closed or self._made.broken:
            self.close()
            return Lost(f"the connection to the database was lost: {said(error)}")
        self._liveness.note_answer()
        if code == AMBIGUOUS:
            return Lost(f"the database does not know whether it was done: {said(error)}")
        return translated(error)

    def execute_or_close(self, text: sql.SQL | sql.Composed) -> None:
        """Execute a text that a new connection does not need: one is made if it fails."""
        try:
            if self._made is not None and not self._made.closed:
                self._made.execute(text)
        except psycopg.Error:
            # The server undoes a transaction when it finds the connection closed.
            self.close()

    def forget_plans(self) -> None:
        """Let the server plan again, if that was long ago: tables grow."""
        now_ms = self._clock()
        if self._plans_ms <= now_ms < self._plans_ms + PLANS_MS:
            return
        self._plans_ms = now_ms
        self.statements += 1
        self.execute_or_close(sql.SQL("DISCARD PLANS"))


def _result(connection: psycopg.Connection[Row]) -> PGresult:
    """Wait for the answer to what was sent."""
    results: list[PGresult] = connection.wait(execute(connection.pgconn))
    result = results[-1]
    if result.status == ExecStatus.FATAL_ERROR:
        raise psycopg.errors.error_from_result(result)
    return result


def _session_of(connection: psycopg.Connection[Row]) -> int:
    """Return the number of the session that does a statement."""
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    return int(row[0])


def _conninfo(conninfo: str) -> str:
    """Add the settings by which a connection notices that the other end is gone."""
    try:
        told = conninfo_to_dict(conninfo)
    except psycopg.Error as error:
        raise InvalidUrl(f"the database can't be opened: {said(error)}") from error
    wait_s = told.get("connect_timeout", "0")
    if not re.fullmatch(r"-?\d{1,9}", str(wait_s)):
        raise InvalidUrl(f"connect_timeout is {wait_s!r:.100}; it must be a number of seconds")
    return make_conninfo(
        conninfo, **{name: value for name, value in _ALIVE.items() if name not in told}
    )


def _settings(settings: Mapping[str, str]) -> sql.Composed:
    parts = [
        sql.SQL("SET {} = {}").format(sql.Identifier(name), sql.Literal(value))
        for name, value in settings.items()
    ]
    return sql.SQL("; ").join(parts)
