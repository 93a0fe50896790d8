"""Many brokers on one PostgreSQL: throughput, contention, many zones, fairness.

Starts a PostgreSQL of its own (fsync on), in a directory of its own. Parts:

* throughput: publish, and claim and ack, by 1 to 8 broker processes, and what a message costs: CPU
  of the brokers and of PostgreSQL, statements, transactions;
* compare: the same beside a bare table with SKIP LOCKED and pgmq's statements with its archive,
  with a backlog, for several batch sizes and numbers of processes;
* locks: for which part of their time processes that publish wait for each other's locks, without a
  group, with one each and with many in a batch;
* contention: claims that came to nothing or were aborted, for each that won, with fewer zones than
  claimers and with many: this store's way, the same without randomness and tokens, and two naive
  claimers at the head of one table;
* zones: what a claim costs with few vested zones among 1,000 and among 100,000;
* writes: what the life of a message writes: rows, index entries, bytes of the write-ahead log;
* fairness: claims until a group of one message is served, alone and beside a large group.

    python benchmarks/cluster.py [--parts throughput compare …] [--seconds 2]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import psycopg
from common import console, describe, show
from sql_peers import QUEUES

from penstock.store.sql.store import open_store

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.sql.postgres import MISSING, PostgresServer

import penstock
from penstock.broker.broker import Broker
from penstock.clock import SystemClock
from penstock.store.sql.location import Tunables, parse_sql

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from penstock.store.sql.store import SqlStore

PAYLOAD = b"x" * 1_000
TICKS = os.sysconf("SC_CLK_TCK")
SPAWN = multiprocessing.get_context("spawn")
Start: TypeAlias = "Callable[[], None]"
# Messages of one claim in the part on contention.
CLAIM = 5


# --- brokers and their cost -----------------------------------------------------------------------


def open_broker(
    url: str, *, tunables: Tunables | None = None, relaxed: bool = False, background: bool = True
) -> tuple[Broker, SqlStore]:
    """Open a store with tunables of one's own; return its parts as well, which count."""
    clock = SystemClock()
    place = parse_sql(url)._replace(tunables=tunables or Tunables())
    store = open_store(
        place,
        store_id=1,
        routing=None,
        random=clock.random,
        clock=clock.now_ms,
        relaxed=relaxed,
        background=background,
    )
    return Broker(store, clock=clock, relaxed=relaxed, background=background), store


def fill(broker: Broker, messages: int, zones: int, queue: str = "q") -> None:
    for first in range(0, messages, 1_000):
        size = min(1_000, messages - first)
        broker.publish(
            [
                penstock.Message(PAYLOAD, {"queue": queue}, group=f"g{(first + n) % zones}")
                for n in range(size)
            ]
        )


class Server:
    """A PostgreSQL server, its databases and what they have cost."""

    def __init__(self) -> None:
        self._server = PostgresServer(durable=True)
        self._server.start()
        with self._server.connect() as one:
            row = one.execute("SELECT pg_backend_pid()").fetchone()
            assert row is not None
            # Every backend is a child of the one that is asked for.
            self._parent = int(_stat(str(row[0]))[1])

    def url(self) -> str:
        """Make a database."""
        return self._server.url(self._server.create())

    def seconds(self) -> float:
        """Return the CPU time of all its processes so far, of those that have ended as well."""
        ticks = sum(map(int, _stat(str(self._parent))[11:15]))
        for place in Path("/proc").iterdir():
            try:
                fields = _stat(place.name) if place.name.isdigit() else []
            except OSError:
                continue
            if fields and int(fields[1]) == self._parent:
                ticks += sum(map(int, fields[11:13]))
        return ticks / TICKS

    def transactions(self, url: str) -> int:
        """Return how many transactions a database has had, aborted ones as well."""
        with psycopg.connect(url) as one:
            row = one.execute(
                "SELECT xact_commit + xact_rollback FROM pg_stat_database "
                "WHERE datname = current_database()"
            ).fetchone()
        assert row is not None
        return int(row[0])

    def remove(self) -> None:
        """End it, and remove its directory."""
        self._server.remove()


def _stat(process: str) -> list[str]:
    """Return the fields of a process after its name, which may hold anything."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _serve(pipe: Connection) -> None:
    """Do what the crew is told, one thing after the other."""
    while (told := pipe.recv()) is not None:
        work, arguments = told

        def start() -> None:
            pipe.send(None)
            pipe.recv()

        pipe.send(work(start, *arguments))


class Crew:
    """Processes that are started once: on a busy machine that takes longer than what they do."""

    def __init__(self, processes: int) -> None:
        self._pipes: list[Connection] = []
        self._workers = []
        for _ in range(processes):
            mine, its = SPAWN.Pipe()
            self._pipes.append(mine)
            self._workers.append(SPAWN.Process(target=_serve, args=(its,), daemon=True))
            self._workers[-1].start()

    def do(
        self, work: Callable[..., Counter[str]], processes: int, *arguments: Any
    ) -> Counter[str]:
        """Do something in so many processes at once; return what they have counted, in sum."""
        pipes = self._pipes[:processes]
        for pipe in pipes:
            pipe.send((work, arguments))
        # All are ready before any begins.
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send(None)
        counted: Counter[str] = Counter()
        for pipe in pipes:
            counted.update(pipe.recv())
        return counted

    def close(self) -> None:
        """End them."""
        for pipe, worker in zip(self._pipes, self._workers, strict=True):
            pipe.send(None)
            worker.join()


# --- throughput -----------------------------------------------------------------------------------


def _statements(broker: Broker) -> int:
    """Count the statements of a broker's store so far."""
    contention = broker.contention()
    assert contention is not None
    return contention.statements


def publishing(
    start: Start, url: str, batch: int, seconds: float, groups: int = 64
) -> Counter[str]:
    """Publish for a while; without groups, or each message in the next of them."""
    with penstock.open(url) as broker:
        start()
        began, cpu, statements, done = perf_counter(), process_time(), _statements(broker), 0
        while perf_counter() - began < seconds:
            fill_one = [
                penstock.Message(
                    PAYLOAD, {"queue": "q"}, group=f"g{(done + n) % groups}" if groups else ""
                )
                for n in range(batch)
            ]
            done += len(broker.publish(fill_one))
        return _counted(broker, done, perf_counter() - began, process_time() - cpu, statements)


def working(start: Start, url: str, batch: int, seconds: float) -> Counter[str]:
    """Claim and ack for a while, or until nothing is left."""
    with penstock.open(url) as broker:
        start()
        began, cpu, statements, done = perf_counter(), process_time(), _statements(broker), 0
        while perf_counter() - began < seconds:
            deliveries = broker.claim("q", limit=batch, lease_ms=60_000)
            if not deliveries:
                break
            done += sum(map(bool, broker.ack([each.receipt for each in deliveries])))
        return _counted(broker, done, perf_counter() - began, process_time() - cpu, statements)


def _counted(broker: Broker, done: int, spent: float, cpu: float, statements: int) -> Counter[str]:
    return Counter(
        {
            "messages": done,
            "rate": round(done / spent),
            "cpu_us": round(cpu * 1e6),
            "statements": _statements(broker) - statements,
        }
    )


def opening(start: Start, url: str) -> Counter[str]:
    """Open a store and close it: what it costs is not the messages'."""
    with penstock.open(url):
        start()
    return Counter()


def throughput(server: Server, crew: Crew, options: argparse.Namespace) -> Iterator[list[object]]:
    """Measure both verbs for each number of processes."""
    for processes in options.processes:
        url = server.url()
        with penstock.open(url) as broker:
            broker.create_queue("q")
            fill(broker, options.ahead, 64)
        before = server.transactions(url)
        crew.do(opening, 1, url)
        threading.Event().wait(0.5)
        opened = server.transactions(url) - before
        for verb, work in (("publish", publishing), ("claim and ack", working)):
            cpu = server.seconds()
            before = server.transactions(url)
            run = crew.do(work, processes, url, options.batch, options.seconds)
            # Connections that were closed are counted when their processes have ended.
            threading.Event().wait(0.5)
            messages = max(1, run["messages"])
            cpu = server.seconds() - cpu
            made = server.transactions(url) - before - processes * opened
            yield [
                f"{verb}, {processes} processes",
                f"{run['rate']:,}",
                f"{run['cpu_us'] / messages:,.0f}",
                f"{cpu * 1e6 / messages:,.0f}",
                f"{run['statements'] / messages:.2f}" if run["statements"] else "",
                f"{made / messages:.2f}",
            ]


# --- beside plain tables --------------------------------------------------------------------------


def filling(start: Start, name: str, url: str, messages: int) -> Counter[str]:
    """Publish a backlog."""
    with QUEUES[name](url, PAYLOAD) as queue:
        start()
        for _ in range(0, messages, 1_000):
            queue.publish(1_000)
    return Counter()


def using(start: Start, name: str, verb: str, url: str, batch: int, seconds: float) -> Counter[str]:
    """Publish, or claim and ack, for a while."""
    with QUEUES[name](url, PAYLOAD) as queue:
        work = queue.publish if verb == "publish" else queue.work
        work(batch)
        start()
        began, cpu, done = perf_counter(), process_time(), 0
        while perf_counter() - began < seconds:
            done += work(batch)
        spent = perf_counter() - began
        return Counter(messages=done, rate=round(done / spent),
                       cpu_us=round((process_time() - cpu) * 1e6))  # fmt: skip


def compare(server: Server, crew: Crew, options: argparse.Namespace) -> Iterator[list[object]]:
    """Measure each verb on each queue in turn; give the rate of the first as a share of theirs."""
    urls = {}
    for name, kind in QUEUES.items():
        urls[name] = server.url()
        kind.make(urls[name])
        crew.do(filling, 1, name, urls[name], options.backlog)
        with psycopg.connect(urls[name], autocommit=True) as one:
            one.execute("VACUUM ANALYZE")
    for processes in options.compared:
        for batch in options.batches:
            for verb in ("publish", "claim and ack"):
                rates = {}
                row: list[object] = [f"{verb}, {batch} at a time, {processes} processes"]
                for name, url in urls.items():
                    cpu = server.seconds()
                    run = crew.do(using, processes, name, verb, url, batch, options.seconds)
                    threading.Event().wait(0.5)
                    messages = max(1, run["messages"])
                    rates[name] = run["rate"]
                    theirs = (server.seconds() - cpu) * 1e6 / messages
                    row += [
                        f"{run['rate']:,}",
                        f"{run['cpu_us'] / messages:,.0f} + {theirs:,.0f}",
                    ]
                ours, *others = rates.values()
                yield row + [f"{ours / max(1, other):.2f}" for other in others]


# --- locks ----------------------------------------------------------------------------------------


def sampling(url: str, over: threading.Event) -> Counter[str]:
    """Look again and again at who waits for a lock, and on which table."""
    counts: Counter[str] = Counter()
    with psycopg.connect(url, autocommit=True) as one:
        while not over.wait(0.005):
            counts["looks"] += 1
            for (event,) in one.execute(
                "SELECT wait_event::text FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                "AND datname = current_database()"
            ):
                counts["waits"] += 1
                counts[f"on {event}"] += 1
    return counts


def locks(server: Server, crew: Crew, options: argparse.Namespace) -> Iterator[list[object]]:
    """Have processes publish into one queue, and count those that wait for a lock."""
    processes = max(options.processes)
    for name, batch, groups in (
        ("1, no group", 1, 0),
        ("10, no group", 10, 0),
        ("1, of 64 groups", 1, 64),
        ("10, of 64 groups", 10, 64),
    ):
        url = server.url()
        with penstock.open(url) as broker:
            broker.create_queue("q")
            fill(broker, 1, 1)
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(sampling, url, over)
            run = crew.do(publishing, processes, url, batch, options.seconds, groups)
            over.set()
            seen = looking.result()
        events = {name: seen[name] for name in seen if name.startswith("on ")}
        yield [
            name,
            f"{run['rate']:,}",
            f"{seen['looks']:,}",
            f"{seen['waits'] / max(1, seen['looks'] * processes):.1%}",
            max(events, key=events.__getitem__, default=""),
        ]


# --- contention -----------------------------------------------------------------------------------


class Way(NamedTuple):
    """A way to claim: its name, and how a process does it."""

    name: str
    work: Callable[..., Counter[str]]
    argument: Any


def visiting(start: Start, url: str, seconds: float, tunables: Tunables) -> Counter[str]:
    """Claim and ack by the store; count the visits that won nothing."""
    broker, core = open_broker(url, tunables=tunables)
    counts: Counter[str] = Counter()
    run = core.database.run

    def counting(name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
        rows = run(name, **parameters)
        if name == "visit":
            counts["won" if any(row[3] is not None for row in rows) else "lost"] += 1
        return rows

    core.database.run = counting  # type: ignore[method-assign]
    with broker:
        start()
        began, repeated = perf_counter(), core.database.repeated
        while perf_counter() - began < seconds:
            deliveries = broker.claim("q", limit=CLAIM, lease_ms=60_000)
            counts["messages"] += len(deliveries)
            broker.ack([each.receipt for each in deliveries])
        counts["rate"] = round(counts["messages"] / (perf_counter() - began))
        counts["lost"] += core.database.repeated - repeated
        counts["passed"] = core.zones.collisions
    return counts


# Both take the oldest messages of one table, whatever their zone.
_LOCK_HEAD = "SELECT id FROM naive WHERE vesting_ms <= %s ORDER BY id LIMIT %s FOR UPDATE"
_SEE_HEAD = "SELECT id, lease_id FROM naive WHERE vesting_ms <= %s ORDER BY id LIMIT %s"
_LEASE = "UPDATE naive SET vesting_ms = %s, lease_id = %s WHERE id = ANY (%s)"
_CHANGE = """
UPDATE naive n SET vesting_ms = %s, lease_id = %s
FROM unnest(%s::bigint[], %s::bigint[]) AS s (id, lease_id)
WHERE n.id = s.id AND n.lease_id IS NOT DISTINCT FROM s.lease_id RETURNING n.id
"""


def naive(start: Start, url: str, seconds: float, how: str) -> Counter[str]:
    """Claim and ack at the head of one table; count what was aborted or came to nothing."""
    counts: Counter[str] = Counter()
    clock = SystemClock()
    with psycopg.connect(url, autocommit=True) as one:
        one.execute("SET enable_seqscan = off")
        if how == "serializable":
            one.execute("SET default_transaction_isolation = 'serializable'")
        start()
        began = perf_counter()
        while perf_counter() - began < seconds:
            now_ms, lease = clock.now_ms(), int(clock.random() * (1 << 62))
            try:
                if how == "serializable":
                    with one.transaction():
                        ids = [row[0] for row in one.execute(_LOCK_HEAD, (now_ms, CLAIM))]
                        one.execute(_LEASE, (now_ms + 60_000, lease, ids))
                else:
                    seen = one.execute(_SEE_HEAD, (now_ms, CLAIM)).fetchall()
                    told = ([row[0] for row in seen], [row[1] for row in seen])
                    ids = [row[0] for row in one.execute(_CHANGE, (now_ms + 60_000, lease, *told))]
            except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
                counts["lost"] += 1
                continue
            counts["won" if ids else "lost"] += 1
            counts["messages"] += len(ids)
            _ack(one, ids)
        counts["rate"] = round(counts["messages"] / (perf_counter() - began))
    return counts


def _ack(one: psycopg.Connection[Any], ids: list[int]) -> None:
    """Delete what was claimed, again while that is aborted: only claims are compared."""
    while True:
        try:
            one.execute("DELETE FROM naive WHERE id = ANY (%s)", (ids,))
        except psycopg.errors.SerializationFailure:
            continue
        return


def contention(server: Server, crew: Crew, options: argparse.Namespace) -> Iterator[list[object]]:
    """Have many processes claim from one queue, each way."""
    ways = (
        Way("random selection, 16 tokens", visiting, Tunables(ring_size=16)),
        Way("random selection, 1 token", visiting, Tunables(ring_size=1)),
        Way("sequential, 1 token", visiting, Tunables(ring_size=1, sequential=True)),
        Way("naive: head FOR UPDATE, SERIALIZABLE", naive, "serializable"),
        Way("naive: compare and set on the head", naive, "compare"),
    )
    for zones in options.contended:
        for name, work, argument in ways:
            url = server.url()
            if work is naive:
                with psycopg.connect(url, autocommit=True) as one:
                    one.execute("CREATE TABLE naive (id bigint PRIMARY KEY, vesting_ms bigint, "
                                "lease_id bigint, payload bytea)")  # fmt: skip
                    one.execute("CREATE INDEX ON naive (vesting_ms, id)")
                    one.execute("INSERT INTO naive SELECT n, 0, NULL, %s "
                                "FROM generate_series(1, 100000) n", (PAYLOAD,))  # fmt: skip
                    one.execute("VACUUM ANALYZE naive")
            else:
                broker, _ = open_broker(url, tunables=argument, relaxed=True)
                with broker:
                    broker.create_queue("q")
                    fill(broker, options.messages, zones)
            cpu = server.seconds()
            run = crew.do(work, options.claimers, url, options.seconds, argument)
            # Connections that were closed are counted when their processes have ended.
            threading.Event().wait(0.5)
            cpu = server.seconds() - cpu
            won = max(1, run["won"])
            yield [
                f"{zones} zones, {name}" if work is not naive else name,
                f"{run['rate']:,}",
                f"{run['won']:,}",
                f"{run['lost']:,}",
                f"{run['lost'] / won:.3f}",
                f"{run['passed'] / won:.2f}" if work is not naive else "",
                f"{cpu * 1e6 / max(1, run['messages']):,.0f}",
            ]


# --- many zones -----------------------------------------------------------------------------------

# Zones that were emptied a moment ago: they have a pointer that does not vest.
_EMPTY_ZONES = """
WITH named AS (
    SELECT convert_to('g' || n, 'UTF8') AS zone FROM generate_series(0, %(zones)s - 1) n
), indexed AS (
    INSERT INTO penstock.pointer_index
    SELECT %(queue)s, zone, 0, %(never_ms)s, NULL FROM named
)
INSERT INTO penstock.pointers SELECT %(queue)s, 0, zone, %(never_ms)s, 0, NULL FROM named
"""


def plan_of(core: SqlStore, statement: str, **parameters: Any) -> tuple[int, int]:
    """Have a statement explained while it runs: rows that its scans gave, blocks it touched."""
    found = core.database._statements[statement]  # noqa: SLF001
    explained = core.database.execute(
        b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + found.text, found.values(parameters)
    )[0][0]
    rows = 0
    todo = [explained[0]["Plan"]]
    blocks = todo[0]["Shared Hit Blocks"] + todo[0]["Shared Read Blocks"]
    while todo:
        node = todo.pop()
        todo += node.get("Plans", [])
        if node.get("Relation Name") or "Index Name" in node:
            rows += round((node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
                          * node["Actual Loops"])  # fmt: skip
    return rows, blocks


def sparse(url: str, zones: int, vested: int, rounds: int) -> list[float]:
    """Serve a few zones among many; return what a claim costs.

    Milliseconds of a claim and of a look, statements of a claim, rows and blocks of its scan.
    """
    broker, core = open_broker(url, relaxed=True, background=False)
    with broker:
        broker.create_queue("q")
        number = core.queue("q").number
        told = {"zones": zones, "queue": number, "never_ms": 1 << 62}
        with psycopg.connect(url, autocommit=True) as one:
            one.execute(_EMPTY_ZONES, told)
            one.execute("VACUUM ANALYZE penstock.pointers")
            one.execute("VACUUM ANALYZE penstock.pointer_index")
        claims: list[float] = []
        looks: list[float] = []
        statements = rows = blocks = 0
        for nth in range(rounds):
            broker.publish(
                [
                    penstock.Message(
                        b"x", {"queue": "q"}, group=f"g{(n * (zones // vested) + nth) % zones}"
                    )
                    for n in range(vested)
                ]
            )
            now_ms = SystemClock().now_ms()
            rows, blocks = plan_of(
                core,
                "peek",
                queue=number,
                tokens=[0],
                now_ms=now_ms,
                after_ms=-1,
                after_turn=0,
                count=100,
            )
            left = vested
            while left > 0:
                began = perf_counter()
                core.database.run("vested_queues", queues=[number], tokens=[0], now_ms=now_ms)
                looks.append(perf_counter() - began)
                before, began = core.database.statements, perf_counter()
                deliveries = broker.claim("q", limit=10)
                claims.append(perf_counter() - began)
                statements += core.database.statements - before
                left -= len(deliveries)
                broker.ack([each.receipt for each in deliveries])
            # An emptied zone is looked at once more after a moment, which is not measured.
            threading.Event().wait(0.4)
            assert not broker.claim("q", limit=1_000)
    return [
        statistics.median(claims) * 1e3,
        statistics.median(looks) * 1e3,
        statements / len(claims),
        rows,
        blocks,
    ]


def many_zones(server: Server, _: Crew, options: argparse.Namespace) -> Iterator[list[object]]:
    """Compare few zones with many, for the same number of vested ones."""
    for vested in options.vested:
        rounds = max(2, 100 // vested)
        few = sparse(server.url(), max(1_000, vested), vested, rounds)
        many = sparse(server.url(), options.zones, vested, rounds)
        for zones, costs in ((max(1_000, vested), few), (options.zones, many)):
            yield [
                f"{vested:,} of {zones:,}",
                f"{costs[0]:.2f}",
                f"{costs[1]:.2f}",
                f"{costs[2]:.2f}",
                f"{costs[3]:,}",
                f"{costs[4]:,}",
            ]
        yield ["ratio", *(f"{b / a:.2f}" if a else "" for a, b in zip(few, many, strict=True))]


# --- depth ----------------------------------------------------------------------------------------


def depth(server: Server, _: Crew, options: argparse.Namespace) -> Iterator[list[object]]:
    """Compare what a claim costs on stores with few and with many waiting messages and groups.

    They take turns: each round publishes ten messages, claims ten and acks them.
    """
    for title, small, large in (
        ("messages waiting, 10 groups", (1_000, 10), (options.deep, 10)),
        (f"groups, {options.deep:,} waiting", (options.deep, 10), (options.deep, options.zones)),
    ):
        with ExitStack() as stack:
            sides: list[tuple[Broker, int, int, list[float], list[float]]] = []
            for messages, groups in (small, large):
                url = server.url()
                broker, core = open_broker(url, relaxed=True, background=False)
                stack.enter_context(broker)
                broker.create_queue("q")
                fill(broker, messages, groups)
                with psycopg.connect(url, autocommit=True) as one:
                    one.execute("VACUUM ANALYZE")
                session = core.database.connect().info.backend_pid
                sides.append((broker, groups, session, [], []))
            for nth in range(options.rounds):
                for broker, groups, session, clock, cpu in sides:
                    broker.publish(
                        [
                            penstock.Message(
                                PAYLOAD, {"queue": "q"}, group=f"g{(nth + n) % groups}"
                            )
                            for n in range(10)
                        ]
                    )
                    began, spent = perf_counter(), _cpu_us(session) + process_time() * 1e6
                    deliveries = broker.claim("q", limit=10)
                    cpu.append(_cpu_us(session) + process_time() * 1e6 - spent)
                    clock.append(perf_counter() - began)
                    assert len(deliveries) == 10
                    broker.ack([each.receipt for each in deliveries])
            costs = [
                (statistics.median(clock) * 1e3, statistics.mean(cpu)) for *_, clock, cpu in sides
            ]
        few, many = (small, large) if title.startswith("messages") else (small[::-1], large[::-1])
        for (count, _other), (claim_ms, cpu_us) in zip((few, many), costs, strict=True):
            yield [f"{count:,} {title}", f"{claim_ms:.2f}", f"{cpu_us:,.0f}"]
        yield ["ratio", *(f"{b / a:.2f}" for a, b in zip(*costs, strict=True))]


def _cpu_us(process: int) -> float:
    """Return the processor time of a session of PostgreSQL so far."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e3


# --- writes ---------------------------------------------------------------------------------------

# Records of the write-ahead log, by what they write.
_WRITES = {
    "inserted": ("Heap/INSERT", "Heap/INSERT+INIT"),
    "updated": ("Heap/UPDATE", "Heap/UPDATE+INIT"),
    "updated in place": ("Heap/HOT_UPDATE",),
    "deleted": ("Heap/DELETE",),
    "locked": ("Heap/LOCK",),
    "index entries": ("Btree/INSERT_LEAF", "Btree/INSERT_POST", "Btree/SPLIT_L", "Btree/SPLIT_R"),
}


class Writes:
    """Counts what a database has written since the last look, by its write-ahead log."""

    def __init__(self, url: str) -> None:
        self._one = psycopg.connect(url, autocommit=True)
        self._one.execute("CREATE EXTENSION IF NOT EXISTS pg_walinspect WITH SCHEMA public")
        self._at = self._now()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._one.close()

    def _now(self) -> str:
        row = self._one.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        return str(row[0])

    def look(self) -> Counter[str]:
        """Return the rows, index entries and bytes since the last look."""
        # Records can be read once they are flushed.
        self._one.execute("SELECT pg_switch_wal()")
        since, self._at = self._at, self._now()
        text = (
            'SELECT "resource_manager/record_type", count, record_size '
            "FROM public.pg_get_wal_stats(%s, %s, true)"
        )
        counted: Counter[str] = Counter()
        for record, count, size in self._one.execute(text, (since, self._at)):
            counted["bytes"] += int(size)
            for name, records in _WRITES.items():
                counted[name] += int(count) if record in records else 0
        return counted


def lifetime(url: str, messages: int, batch: int, ordering: str) -> Iterator[list[object]]:
    """Publish, claim, ack and remove messages; yield what each step writes for a message."""
    clock = penstock.ManualClock()
    with penstock.open(url, clock=clock, background=False) as broker, Writes(url) as writes:
        broker.create_queue("q", ordering=ordering, done_retention_ms=3_600_000)
        # Statistics and plans are made before it is measured.
        fill(broker, 100, 10)
        while found := broker.claim("q", limit=10):
            broker.ack([each.receipt for each in found])
        writes.look()
        held: list[penstock.Delivery] = []

        def publish() -> None:
            for first in range(0, messages, batch):
                told = [
                    penstock.Message(PAYLOAD, {"queue": "q"}, group=f"g{n % 10}")
                    for n in range(first, first + batch)
                ]
                broker.publish(told)

        def claim() -> None:
            while len(held) < messages:
                found = broker.claim("q", limit=batch)
                held.extend(found)
                if ordering == "fifo":
                    # A group is in one lease at a time.
                    broker.ack([each.receipt for each in found])

        def ack() -> None:
            for first in range(0, messages, batch):
                broker.ack([each.receipt for each in held[first : first + batch]])

        def remove() -> None:
            clock.advance(3_600_001)
            broker.sweep(budget=2 * messages)

        total: Counter[str] = Counter()
        fifo = ordering == "fifo"
        steps = {"publish": publish, "claim and ack" if fifo else "claim": claim}
        for name, step in ({**steps, "removal": remove} if fifo
                           else {**steps, "ack": ack, "removal": remove}).items():  # fmt: skip
            step()
            written = writes.look()
            total.update(written)
            yield [f"{ordering}, {batch} a verb: {name}", *_written(written, messages)]
        yield [f"{ordering}, {batch} a verb: all", *_written(total, messages)]


def _written(counted: Counter[str], messages: int) -> list[str]:
    return [f"{counted[name] / messages:.2f}" for name in (*_WRITES, "bytes")]


def writes(server: Server, _: Crew, options: argparse.Namespace) -> Iterator[list[object]]:
    """Count what the life of a message writes, one by one and in batches."""
    for ordering in ("standard", "fifo"):
        for batch in (1, 100):
            yield from lifetime(server.url(), options.written, batch, ordering)


# --- fairness -------------------------------------------------------------------------------------


def claims_until_served(broker: Broker, small: int, limit: int, prefix: str) -> list[int]:
    """Count the claims that each group of one message waits for."""
    for _ in range(5):
        broker.ack([each.receipt for each in broker.claim("q", limit=limit)])
    broker.publish(
        [penstock.Message(b"x", {"queue": "q"}, group=f"{prefix}-{n}") for n in range(small)]
    )
    waited: list[int] = []
    claims = 0
    while len(waited) < small:
        claims += 1
        deliveries = broker.claim("q", limit=limit)
        waited += [claims for each in deliveries if each.group != "large"]
        broker.ack([each.receipt for each in deliveries])
        assert claims <= 10 * (small + 10), "small groups starve"
    return sorted(waited)


def fairness(server: Server, _: Crew, options: argparse.Namespace) -> Iterator[list[object]]:
    """Compare groups of one message alone with the same beside a large one."""
    counts: dict[tuple[int, str], list[int]] = {}
    for name, large in (("alone", 0), ("beside", options.large)):
        broker, _core = open_broker(server.url(), relaxed=True)
        with broker:
            broker.create_queue("q")
            for _first in range(0, large, 1_000):
                broker.publish([penstock.Message(b"x", {"queue": "q"}, group="large")] * 1_000)
            for limit in (1, 10):
                for small in (1, options.small):
                    counts[limit * 1_000_000 + small, name] = claims_until_served(
                        broker, small, limit, f"s{limit}-{small}"
                    )
    for limit in (1, 10):
        for small in (1, options.small):
            alone, beside = (
                counts[limit * 1_000_000 + small, name] for name in ("alone", "beside")
            )
            at = int(small * 0.99)
            yield [
                f"{small} groups, {limit} per claim",
                alone[small // 2],
                beside[small // 2],
                alone[at],
                beside[at],
                f"{beside[at] / alone[at]:.2f}",
            ]


# --- all ------------------------------------------------------------------------------------------

Part: TypeAlias = "Callable[[Server, Crew, argparse.Namespace], Iterator[list[object]]]"
PARTS: dict[str, tuple[Part, str,
                       Sequence[str]]] = {
    "throughput": (
        throughput,
        "brokers on one PostgreSQL, {batch} messages a verb, 1 KB, 64 groups",
        ("", "messages/s", "broker CPU us", "PostgreSQL CPU us", "statements", "transactions"),
    ),
    "compare": (
        compare,
        "messages/s and CPU us of client + PostgreSQL, {backlog:,} waiting, 1 KB",
        ("", *(cell for name in QUEUES for cell in (name, "CPU")),
         *(f"of {name}" for name in list(QUEUES)[1:])),
    ),
    "locks": (
        locks,
        "processes publish into one queue, messages of 1 KB: time that they wait for locks",
        ("messages a publish", "messages/s", "looks", "waiting", "most"),
    ),
    "contention": (
        contention,
        "{claimers} processes claim and ack from one queue, {batch_claim} messages a claim",
        ("", "messages/s", "won", "lost or aborted", "for each won", "pointers passed by",
         "PostgreSQL CPU us"),
    ),
    "zones": (
        many_zones,
        "vested zones of all zones: claims of 10, relaxed",
        ("", "claim, ms", "look, ms", "statements/claim", "rows scanned", "blocks"),
    ),
    "depth": (
        depth,
        "claims of 10 on top of what waits, relaxed",
        ("", "claim, ms (median)", "CPU of client + PostgreSQL, us (mean)"),
    ),
    "writes": (
        writes,
        "what the life of a message of 1 KB in 10 groups writes, by the write-ahead log",
        ("", *_WRITES, "bytes"),
    ),
    "fairness": (
        fairness,
        "claims until served: groups of one message, alone and beside a group of {large:,}",
        ("", "p50 alone", "p50 beside", "p99 alone", "p99 beside", "p99 ratio"),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batch", type=int, default=10, help="messages of one verb")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    parser.add_argument("--ahead", type=int, default=5_000, help="messages there beforehand")
    parser.add_argument("--backlog", type=int, default=200_000, help="messages that wait: compare")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 10, 100], help="compare")
    parser.add_argument("--compared", type=int, nargs="+", default=[1, 4, 8], help="processes")
    parser.add_argument("--claimers", type=int, default=8)
    parser.add_argument("--contended", type=int, nargs="+", default=[4, 256], help="zones")
    parser.add_argument("--messages", type=int, default=10_000, help="that are contended for")
    parser.add_argument("--zones", type=int, default=100_000)
    parser.add_argument("--vested", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("--written", type=int, default=1_000, help="messages whose writes count")
    parser.add_argument("--deep", type=int, default=1_000_000, help="messages that wait: depth")
    parser.add_argument("--rounds", type=int, default=600, help="claims: depth")
    parser.add_argument("--large", type=int, default=100_000)
    parser.add_argument("--small", type=int, default=100)
    options = parser.parse_args()
    if MISSING:
        sys.exit(MISSING)
    describe()
    with ExitStack() as stack:
        crew = Crew(max(options.claimers, *options.processes, *options.compared))
        stack.callback(crew.close)
        server = Server()
        stack.callback(server.remove)
        with psycopg.connect(server.url()) as one:
            console.print(f"PostgreSQL {one.info.server_version // 10_000}, fsync on")
        for name, (part, title, header) in PARTS.items():
            if name in options.parts:
                rows = list(part(server, crew, options))
                show(title.format(batch_claim=CLAIM, **vars(options)), header, rows)


if __name__ == "__main__":
    main()
