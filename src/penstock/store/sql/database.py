"""The database as a process uses it: a few connections, repeated transactions, statements by name.

A statement, or a transaction of several, runs on a connection that no other thread uses meanwhile;
a thread that has one keeps to it until the end of the transaction. Threads that find none free
wait. A statement by itself is a transaction by itself: the server commits it, even if the process
that sent it dies.

:meth:`Database.do` repeats

* a transaction that the server has aborted (a serialization failure, a deadlock), always;
* a transaction whose connection was lost before COMMIT was sent, always;
* a transaction whose connection was lost later, if the caller says ``again``: the transaction
  finds out by itself whether it had been committed. Others fail with StorageFailed: the outcome is
  not known.

A verb is what a thread does between two calls of :meth:`Database.limit`. It has
``verb_timeout_ms`` in all: for connections that are not free, for a server that is silent, and for
pauses between attempts.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from itertools import takewhile
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from psycopg import sql

from penstock.errors import ServerUnreachable
from penstock.limits import MAX_DATABASE_REPEATS
from penstock.store.sql.arrays import ENCODERS
from penstock.store.sql.connection import TICK_S, Connection, Liveness
from penstock.store.sql.failures import Aborted, Lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    import psycopg

    from penstock.store.sql.connection import Parameters, Row
    from penstock.store.sql.location import SqlPlace

T = TypeVar("T")

# How queries.sql is written.
_BLOCK: Final = re.compile(r"^-- (name|part): ", re.MULTILINE)
_MARKS: Final = ("each", "dialect", "plan")
# Not a cast, which has two colons.
_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z]\w*)")
_ARRAY: Final = re.compile(rf"(?<![:\w]):([a-z]\w*)::({'|'.join(ENCODERS)})\[\]")
# Words of a statement that changes something, or locks it.
_WRITES: Final = re.compile(r"\b(INSERT|UPDATE|DELETE|SHARE|ALTER|nextval|setval)\b")
_RETRY_WAIT_S: Final = 0.05


class _Verb(threading.local):
    """The verb of a thread: its connection, if it has one, and the time that it has left.

    ``doubts``: its attempts whose outcome is not known.
    """

    connection: Connection | None = None
    in_transaction = False
    left_s = inf
    doubts = 0


class _Turn:
    """The turn of a thread to get a connection: it can take ``came`` once it has one."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.came = threading.Lock()
        self.came.acquire()


class _Pool:
    """The connections of a process; threads that find none free get one in turn.

    Each connection says which thread has it, and nothing else does: so a thread that an exception
    out of a signal handler has met between two steps finds it with its next verb.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._lock = threading.Lock()
        # The first that is free is taken: as many are made as are needed at a time.
        self._connections = connections
        self._turns: deque[_Turn] = deque()

    def take(self, thread: int) -> Connection | None:
        """Return the connection of a thread, or one that is free and that no thread waits for."""
        with self._lock:
            return self._find(thread) or (None if self._turns else self._hand_to(thread))

    @contextmanager
    def turn(self, thread: int) -> Iterator[_Turn]:
        """Wait in turn."""
        turn = _Turn(thread)
        try:
            with self._lock:
                self._turns.append(turn)
                self._call_next()
            yield turn
        finally:
            with self._lock, suppress(ValueError):
                self._turns.remove(turn)

    def give(self, thread: int) -> None:
        """Take back what a thread has, for the thread that has waited longest."""
        with self._lock:
            while (connection := self._find(thread)) is not None:
                connection.thread = None
            self._call_next()

    def _find(self, thread: int | None) -> Connection | None:
        return next((each for each in self._connections if each.thread == thread), None)

    def _hand_to(self, thread: int) -> Connection | None:
        connection = self._find(None)
        if connection is not None:
            connection.thread = thread
        return connection

    def _call_next(self) -> None:
        while self._turns and self._hand_to(self._turns[0].thread) is not None:
            self._turns.popleft().came.release()


class Database:
    """The connections of a process to a database, up to ``connections`` of its URL."""

    def __init__(
        self,
        place: SqlPlace,
        *,
        clock: Callable[[], int],
        relaxed: bool = False,
        bulk: bool = False,
    ) -> None:
        """Connect when first asked.

        ``bulk``: there is one connection, and every statement may take ``bulk_timeout_ms``.
        """
        self._place = place
        self.schema = place.schema
        self.dialect = place.dialect
        self.tunables = place.tunables
        # The time after a long statement; without a clock no statement takes any time.
        self.clock = clock
        self._liveness = Liveness(clock)
        self._bulk = bulk
        count = 1 if bulk else place.tunables.connections
        self._connections = [
            Connection(place, self._liveness, number, clock=clock, relaxed=relaxed, bulk=bulk)
            for number in range(count)
        ]
        self._pool = _Pool(self._connections)
        self._forgets_plans = place.dialect == "postgresql" and place.prepare and not bulk
        self._verb = _Verb()
        self._statements = statements_of(place.dialect)
        # Attempts to connect again before a verb fails.
        self.patience = MAX_DATABASE_REPEATS

    # --- counters --------------------------------------------------------------------------

    @property
    def away(self) -> str | None:
        """Why the database does not answer at present; from any thread, at once."""
        return self._liveness.away

    @property
    def statements(self) -> int:
        """How many statements were sent."""
        return sum(connection.statements for connection in self._connections)

    @property
    def repeated(self) -> int:
        """How many transactions the server has aborted that were done again."""
        return sum(connection.repeated for connection in self._connections)

    @property
    def reconnected(self) -> int:
        """How many attempts were made again because the server did not answer."""
        return sum(connection.reconnected for connection in self._connections)

    @property
    def doubts(self) -> int:
        """How many attempts of this thread had an outcome that is not known."""
        return self._verb.doubts

    @property
    def number(self) -> int:
        """The number of the connection that this thread has; 0 if it has none."""
        connection = self._verb.connection
        return 0 if connection is None else connection.number

    # --- connections -----------------------------------------------------------------------

    def connect(self) -> psycopg.Connection[Row]:
        """Return the driver's connection of this thread, or the first; make one if need be."""
        return (self._verb.connection or self._connections[0]).connect()

    def limit(self, seconds: float) -> None:
        """Bound how long this thread waits for the database, in all, from here on."""
        if self._verb.connection is not None:
            # Its last verb was interrupted.
            self._give_back()
        self._verb.left_s = seconds

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Give this thread a connection of its own, or the one that it has."""
        if self._verb.connection is not None:
            yield self._verb.connection
            return
        try:
            yield self._borrow()
        finally:
            self._give_back()

    def _borrow(self) -> Connection:
        """Give this thread a connection, which it has none of."""
        verb = self._verb
        connection = verb.connection = self._take(verb)
        connection.silence.left_s = verb.left_s
        connection.close_if_left()
        if self._forgets_plans:
            connection.forget_plans()
        return connection

    def _give_back(self) -> None:
        """Take the connection of this thread back, if it has one."""
        verb = self._verb
        if verb.connection is not None:
            verb.left_s = verb.connection.silence.left_s
        verb.connection, verb.in_transaction = None, False
        self._pool.give(threading.get_ident())

    def _take(self, verb: _Verb) -> Connection:
        """Wait for a connection that is free, for as long as the verb may."""
        thread = threading.get_ident()
        connection = self._pool.take(thread)
        if connection is not None:
            return connection
        began_s = verb.left_s
        with self._pool.turn(thread) as turn:
            while not turn.came.acquire(timeout=TICK_S):
                verb.left_s -= TICK_S
                if verb.left_s <= 0:
                    raise ServerUnreachable(
                        f"no connection to the database was free for {began_s:.1f} s "
                        f"({self.away or 'other calls have them'}): ?connections= of the store's "
                        "URL allows more"
                    )
        connection = self._pool.take(thread)
        assert connection is not None
        return connection

    @contextmanager
    def at_leisure(self) -> Iterator[None]:
        """Give the statements inside ``bulk_timeout_ms`` each; a transaction keeps its own."""
        with self.connection() as connection:
            if self._verb.in_transaction:
                yield
            else:
                with connection.at_leisure():
                    yield

    def close(self) -> None:
        """Close all connections, which no thread uses any more."""
        for connection in self._connections:
            connection.close()

    def another(self) -> Database:
        """Return a Database for another connection to the same place, to read in bulk."""
        another = Database(self._place, clock=self.clock, bulk=True)
        # It is known that there is such a place.
        another._liveness.answers = self._liveness.answers
        return another

    # --- statements ------------------------------------------------------------------------

    def run(self, name: str, /, **parameters: Any) -> list[Row]:
        """Run a statement and return its rows.

        One that only reads is run again if its answer was lost, unless it is a part of more.
        """
        statement = self._statements[name]
        values = statement.values(parameters)

        def send() -> list[Row]:
            return self.execute(statement.text, values, prepare=statement.planned_once)

        def read() -> list[Row]:
            try:
                return send()
            except Lost as error:
                error.unknown = False
                raise

        # A snapshot is a transaction that nobody else knows of.
        is_part = self._verb.connection is not None or self._bulk
        return self.do(read) if statement.only_reads and not is_part else send()

    def ask(self, name: str, /, **parameters: Any) -> list[Row]:
        """Run a statement that may be run twice; again if it was aborted or its answer was lost."""
        return self.do(lambda: self.run(name, **parameters), again=True)

    def parameters(self, name: str) -> AbstractSet[str]:
        """Return the names of a statement's parameters."""
        return self._statements[name].parameters.keys()

    def execute(
        self, text: Any, parameters: Parameters | None = None, *, prepare: bool = False
    ) -> list[Row]:
        """Run any text and return its rows; a list of parameters goes with ``$1`` and so on."""
        held = self._verb.connection
        if held is not None:
            return held.execute(text, parameters, prepare=prepare)
        with self.connection() as connection:
            return connection.execute(text, parameters, prepare=prepare)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the statements inside as one transaction; one inside another is part of it."""
        verb = self._verb
        if verb.in_transaction:
            yield
            return
        with self.connection() as connection:
            try:
                self.execute("BEGIN")
                verb.in_transaction = True
                yield
            except BaseException as error:
                verb.in_transaction = False
                connection.execute_or_close(sql.SQL("ROLLBACK"))
                if isinstance(error, Lost):
                    # COMMIT was not sent.
                    error.unknown = False
                raise
            verb.in_transaction = False
            self.execute("COMMIT")

    # --- repeating -------------------------------------------------------------------------

    def do(self, work: Callable[[], T], *, again: bool = False) -> T:
        """Call ``work``, which is one transaction, again if the server has aborted it.

        ``again``: also if the connection was lost, because doing it twice does no harm.
        """
        verb = self._verb
        if verb.in_transaction:
            return work()
        if verb.connection is not None:
            return self._repeat(work, verb.connection, again=again)
        try:
            return self._repeat(work, self._borrow(), again=again)
        finally:
            self._give_back()

    def _repeat(self, work: Callable[[], T], connection: Connection, *, again: bool) -> T:
        verb, silence = self._verb, connection.silence
        lost = 0
        doubts = verb.doubts
        for left in range(MAX_DATABASE_REPEATS, -1, -1):
            try:
                return work()
            except Aborted as error:
                # One that waits for a lock once more needs the time to hear of it.
                lock_s = self.tunables.lock_timeout_ms / 1000 if error.waited else 0
                if not left or silence.left_s <= lock_s:
                    raise
                connection.repeated += 1
                wait_s = 0.0
            except (Lost, ServerUnreachable) as error:
                # A database that restarts gets time; one that stays away fails the verb.
                lost += 1
                verb.doubts += isinstance(error, Lost) and error.unknown
                in_doubt = verb.doubts > doubts
                gives_up = not left or lost > self.patience or silence.left_s <= 0
                if gives_up or (in_doubt and not again):
                    if in_doubt:
                        error.args = (f"{error}; it may or may not have been done",)
                    raise
                connection.reconnected += 1
                wait_s = _RETRY_WAIT_S * lost
            if wait_s:
                silence.left_s -= wait_s
                threading.Event().wait(wait_s)
        raise AssertionError("the loop ends by itself")


def columns(rows: Iterable[Sequence[Any]], *names: str) -> dict[str, Sequence[Any]]:
    """Return rows as named columns, as statements take them."""
    held = tuple(zip(*rows, strict=True))
    # Rows may have more columns than are named.
    return dict(zip(names, held or ((),) * len(names), strict=False))


# --- statements ----------------------------------------------------------------------------------


Encoder: TypeAlias = "Callable[[Sequence[Any]], bytes]"


class Statement(NamedTuple):
    """A statement: what it is for, its text with ``$1`` and so on, and its parameters in order.

    ``parameters``: with each name the way to write it, if it is an array. ``planned_once``: the
    server may keep a plan that does not depend on the parameters. ``only_reads``: it takes no lock,
    either.
    """

    purpose: str
    text: bytes
    parameters: Mapping[str, Encoder | None]
    planned_once: bool
    only_reads: bool

    def values(self, given: Mapping[str, Any]) -> list[Any]:
        """Return the values of all parameters as the driver takes them."""
        # One that is missing is a KeyError below.
        assert len(given) == len(self.parameters), given.keys() ^ self.parameters.keys()
        return [
            value if encode is None or value is None else encode(value)
            for name, encode in self.parameters.items()
            for value in (given[name],)
        ]


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
                parameters: dict[str, Encoder | None] = dict.fromkeys(_PARAMETER.findall(code))
                parameters |= {each: ENCODERS[kind] for each, kind in _ARRAY.findall(code)}
                found[name] = Statement(
                    purpose.replace("{each}", word),
                    _numbered(code, list(parameters)),
                    parameters,
                    marks.get("plan") == "once",
                    _WRITES.search(code) is None,
                )
    return found


def _numbered(code: str, order: list[str]) -> bytes:
    """Write parameters as the server does: psycopg would look for names at each call."""
    return _PARAMETER.sub(lambda named: f"${order.index(named[1]) + 1}", code).encode()


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
