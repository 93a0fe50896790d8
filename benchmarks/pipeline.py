"""What the Spark jobs do in a second, and how long a message takes from publish to claimable.

Run ``python benchmarks/pipeline.py`` (needs pyspark and Java); ``--parts`` runs some of it only:

route
    Messages routed a second. Each matches one queue, whatever their number. "routed/s" counts
    messages over the time that the micro-batches took: match on the executors, stage, commit into
    the queues. "floor/s" is Spark reading the same log to nowhere in the same run; the ratio says
    what matching, staging and committing cost on top of it. "assign" is the share of the routing
    time that the broker spent assigning, most of it while executors matched. "CPU µs" is what all
    processes of a kind spent on a message: they share this machine, and tell more than times do
    while it has other work.
assign
    The broker alone: CPU time to assign a message of a page of 10,000. Best and median of the
    pages, which other work on the machine falsifies less than times.
latency
    The time from when publish returned to when the assignment that holds a message was committed:
    a claim finds it then. Broker, driver and executors share this machine.
scale
    The same routing with one task at a time and with two: ``local[1]`` and ``local[2]`` (one JVM),
    then a standalone cluster of the pip package, here, with one and with two executors of a core.
jobs
    Rows archived a second (written, read back, trimmed), and rows reported on.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
from bisect import bisect_right
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import pyspark
from common import console, describe, directory

import penstock
from penstock.broker.tailer import match_page
from penstock.filters import Matcher, parse
from penstock.server import in_process_server
from penstock.spark import session
from penstock.spark.jobs.archive import archive
from penstock.spark.jobs.report import report, save_report
from penstock.spark.route import AVAILABLE_NOW, route, status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CHUNK = 5_000
PARTS = ("route", "assign", "latency", "scale", "jobs")
TICKS = os.sysconf("SC_CLK_TCK")
QUIET = {"spark.log.level": "ERROR"}


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as Markdown, as ``docs/figures.md`` has it."""
    lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
    console.print(f"{title}\n", *lines, "", sep="\n", markup=False, soft_wrap=True)


class Spent:
    """CPU seconds that this process and those below it have spent since, by kind."""

    def __init__(self) -> None:
        self._before = self._now()

    def per_message(self, count: int) -> list[str]:
        """Return µs of CPU for a message: broker (and driver program), JVMs.

        Spark's Python workers come and go, and what they spent goes with them.
        """
        now = self._now()
        kinds = ("broker", "java")
        return [f"{(now[kind] - self._before[kind]) * 1e6 / count:.1f}" for kind in kinds]

    @staticmethod
    def _now() -> dict[str, float]:
        parents: dict[int, int] = {}
        spent: dict[int, float] = {}
        names: dict[int, str] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                head, _, rest = stat.read_text().rpartition(")")
            except OSError:
                continue
            fields = rest.split()
            pid = int(stat.parent.name)
            parents[pid], names[pid] = int(fields[1]), head.partition("(")[2]
            # What its children spent counts once they have ended.
            own = 2 if pid == os.getpid() else 4
            spent[pid] = sum(map(int, fields[11 : 11 + own])) / TICKS
        found: dict[str, float] = defaultdict(float)
        for pid, seconds in spent.items():
            above = pid
            while above not in (os.getpid(), 0):
                above = parents.get(above, 0)
            if above:
                java = names[pid] == "java"
                kind = "broker" if pid == above else "java" if java else "python"
                found[kind] += seconds
        return found


def mixed_filter(number: int) -> str:
    kind = f"kind = 'k{number}'"
    match number % 28:
        case 3:
            return f"{kind} AND price BETWEEN 10 AND 90 AND title LIKE 'The %'"
        case 10:
            return f"kind IN ('k{number}', 'other{number}') AND priority < 9"
        case _:
            return f"{kind} AND price > 10"


def messages(queues: int, start: int, count: int) -> list[penstock.Message]:
    """Return messages with four attributes, for queues all over the range."""
    return [
        penstock.Message(
            b"x" * 100,
            {
                "kind": f"k{number * 7919 % queues}",
                "price": 20 + number % 50,
                "tenant": f"t{number % 100}",
                "title": "The Wind in the Willows",
            },
        )
        for number in range(start, start + count)
    ]


class Timed:
    """Notes how long the broker assigns, and how far it is after each time."""

    def __init__(self, broker: penstock.Broker) -> None:
        self.seconds = 0.0
        self.done: list[tuple[int, float]] = []
        self._assign = broker.assign
        broker.assign = self  # type: ignore[method-assign]

    def __call__(self, *given: Any, **settings: Any) -> penstock.Assigned:
        """Assign, and note the time."""
        start = perf_counter()
        answer = self._assign(*given, **settings)
        end = perf_counter()
        self.seconds += end - start
        self.done.append((answer.cursor, end))
        return answer


def busy_s(query: StreamingQuery) -> float:
    """Return the seconds that micro-batches with data took, without the start of the query."""
    taken = [progress for progress in query.recentProgress if progress.numInputRows]
    return sum(progress.durationMs["triggerExecution"] for progress in taken) / 1000


def throughput(spark: SparkSession, place: Path, queues: int, count: int, most: int) -> list[str]:
    with (
        penstock.open(f"rocksdb:{place}/store", routing="pipeline") as broker,
        in_process_server(broker) as server,
    ):
        for number in range(queues):
            broker.create_queue(f"q{number}", filter=mixed_filter(number))
        for start in range(0, count, CHUNK):
            broker.publish(messages(queues, start, min(CHUNK, count - start)))
        log = spark.readStream.format("penstock").options(
            location=server.location,
            table="log",
            startingOffsets="earliest",
            maxOffsetsPerTrigger=str(most),
            minPartitions="2",
        )
        writer = log.load().writeStream.format("noop").trigger(availableNow=True)
        floor = writer.option("checkpointLocation", f"{place}/floor").start()
        floor.awaitTermination()
        timed, spent = Timed(broker), Spent()
        query = route(
            server.location,
            spark=spark,
            checkpoint=place / "route",
            trigger=AVAILABLE_NOW,
            max_offsets=most,
        )
        query.awaitTermination()
        assert status(server.location).behind == 0
        placed = sum(broker.stats(spec.name).enqueued_total for spec in broker.queues())
        assert placed == count, (placed, count)
        routed_s, floor_s = busy_s(query), busy_s(floor)
        return [
            f"{queues:,}",
            f"{count / routed_s:,.0f}",
            f"{count / floor_s:,.0f}",
            f"{floor_s / routed_s:.2f}",
            f"{timed.seconds / routed_s:.0%}",
            *spent.per_message(count),
        ]


def assigning(place: Path, queues: int, count: int) -> list[str]:
    with penstock.open(
        f"rocksdb:{place}/store", routing="pipeline", durability="relaxed"
    ) as broker:
        for number in range(queues):
            broker.create_queue(f"q{number}", filter=mixed_filter(number))
        for start in range(0, count, CHUNK):
            broker.publish(messages(queues, start, min(CHUNK, count - start)))
        spent = []
        while (page := broker.read_log(limit=10_000)).records:
            matcher = Matcher({name: parse(text) for name, text in page.filters.items()})
            routes = match_page(page, matcher)
            before = process_time()
            assert broker.assign(0, page.cursor, routes).placed == len(page.records)
            spent.append((process_time() - before) * 1e6 / len(page.records))
        return [f"{queues:,}", f"{min(spent):.1f}", f"{median(spent):.1f}"]


def latency(spark: SparkSession, place: Path, rate: int, seconds: float) -> list[str]:
    queues = 100
    with (
        penstock.open(f"rocksdb:{place}/store", routing="pipeline") as broker,
        in_process_server(broker) as server,
    ):
        for number in range(queues):
            broker.create_queue(f"q{number}", filter=mixed_filter(number))
        broker.publish(messages(queues, 0, 1_000))
        query = route(server.location, spark=spark, checkpoint=place / "route")
        pause = threading.Event()
        while status(server.location).behind:
            pause.wait(0.1)
        # Compilers and workers warm up on the first micro-batches.
        publish_at(broker, queues, rate, seconds / 2)
        timed = Timed(broker)
        published = publish_at(broker, queues, rate, seconds)
        while status(server.location).behind and query.isActive:
            pause.wait(0.1)
        query.stop()
        cursors = [cursor for cursor, _ in timed.done]
        waits: list[float] = []
        sent = 0
        for first, last, moment in published:
            # A message is in its queues once the cursor is past it.
            ends = (timed.done[bisect_right(cursors, i)][1] for i in range(first, last + 1))
            waits += [end - moment for end in ends]
            sent += last - first + 1
        waits.sort()
        took_s = published[-1][2] - published[0][2]
        shown = [f"{waits[int(len(waits) * part)]:.2f} s" for part in (0.5, 0.99)]
        return [f"{rate:,}", f"{sent / took_s:,.0f}", *shown, f"{waits[-1]:.2f} s"]


def publish_at(
    broker: penstock.Broker, queues: int, rate: int, seconds: float
) -> list[tuple[int, int, float]]:
    """Publish at a rate; return first and last id of each batch, and when it had returned."""
    step_s = 0.02
    batch = messages(queues, 0, max(1, int(rate * step_s)))
    pause = threading.Event()
    start = perf_counter()
    sent = []
    for number in range(int(seconds / step_s)):
        pause.wait(max(0.0, start + number * step_s - perf_counter()))
        ids = broker.publish(batch)
        sent.append((ids[0], ids[-1], perf_counter()))
    return sent


@contextmanager
def cluster(place: Path) -> Iterator[str]:
    """Run a standalone cluster of the pip package, with two workers of a core each."""
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_WORKER_DIR": str(place / "work"),
        "SPARK_LOCAL_DIRS": str(place / "local"),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "300m",
    }

    def start(kind: str, *arguments: str) -> subprocess.Popen[bytes]:
        name = f"org.apache.spark.deploy.{kind.lower()}.{kind}"
        return subprocess.Popen(
            [str(home / "bin" / "spark-class"), name, "--host", "127.0.0.1", *arguments],
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = [start("Master", "--port", str(port), "--webui-port", "0")]
    try:
        for _ in range(150):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            threading.Event().wait(0.2)
        address = f"spark://127.0.0.1:{port}"
        sizes = ("--cores", "1", "--memory", "1g", "--webui-port", "0")
        running += [start("Worker", *sizes, address) for _ in range(2)]
        yield address
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def scale(place: Path, count: int, most: int) -> list[list[str]]:
    rows: list[list[str]] = []
    with cluster(place / "cluster") as address:
        for master, executors in (("local[1]", 1), ("local[2]", 2), (address, 1), (address, 2)):
            settings = dict(QUIET)
            name = master
            if master == address:
                name = f"cluster, {executors} x 1 core"
                settings |= {
                    "spark.cores.max": str(executors),
                    "spark.executor.memory": "700m",
                    "spark.driver.host": "127.0.0.1",
                    "spark.executorEnv.PYTHONPATH": str(Path(penstock.__file__).parents[1]),
                }
            spark = session(master, quick=False, conf=settings)
            mine = place / f"scale{len(rows)}"
            throughput(spark, mine / "warm", 10, 20_000, most)
            rows.append([name, *throughput(spark, mine / "main", 100, count, most)[1:]])
            spark.stop()
    return rows


def jobs(spark: SparkSession, place: Path, count: int) -> list[list[str]]:
    with (
        penstock.open(f"rocksdb:{place}/store", durability="relaxed") as broker,
        in_process_server(broker) as server,
    ):
        for number in range(10):
            broker.create_queue(f"q{number}", filter=f"kind = 'k{number}'")
        for start in range(0, count, CHUNK):
            broker.publish(messages(10, start, min(CHUNK, count - start)))
        for queue in broker.queues():
            while claimed := broker.claim(queue.name, limit=1_000):
                broker.ack([each.receipt for each in claimed])
        # The first pays for starting workers and compiling.
        save_report(report(spark, server.location), place / "first")
        begin = perf_counter()
        save_report(report(spark, server.location), place / "report")
        reported_s = perf_counter() - begin
        begin = perf_counter()
        done = archive(spark, server.location, place / "archive")
        archived_s = perf_counter() - begin
        total = sum(done.rows.values())
        assert total == 2 * count, (done, count)
        return [
            ["report", f"{total:,}", f"{reported_s:.1f} s", f"{total / reported_s:,.0f}"],
            ["archive and trim", f"{total:,}", f"{archived_s:.1f} s", f"{total / archived_s:,.0f}"],
        ]


ROUTED = ("routed/s", "floor/s", "ratio", "assign", "CPU µs: broker", "JVM")


def on_one_session(chosen: argparse.Namespace, place: Path) -> None:
    """Run the parts that share a session."""
    spark = session(chosen.master, quick=False, conf=QUIET)
    console.print(f"Spark {spark.version}, {chosen.master}\n")
    if "route" in chosen.parts:
        # The first query pays for starting workers and compiling.
        throughput(spark, place / "warm", 10, 20_000, chosen.max_offsets)
        rows = [
            throughput(spark, place / f"t{turn}", n, chosen.messages, chosen.max_offsets)
            for turn, n in enumerate(chosen.queues)
        ]
        title = f"{chosen.messages:,} messages in micro-batches of {chosen.max_offsets:,}"
        table(title, ["queues", *ROUTED], rows)
    if "latency" in chosen.parts:
        rows = [
            latency(spark, place / f"l{turn}", rate, chosen.seconds)
            for turn, rate in enumerate(chosen.rates)
        ]
        table("Publish to claimable", ["rate/s", "published/s", "p50", "p99", "max"], rows)
    if "jobs" in chosen.parts:
        rows = jobs(spark, place / "jobs", chosen.job_messages)
        title = "Jobs: rows are messages done and attempts at them, 100 bytes of payload each"
        table(title, ["job", "rows", "time", "rows/s"], rows)
    spark.stop()


def main() -> None:
    options = argparse.ArgumentParser(description="What the Spark jobs do in a second.")
    options.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    options.add_argument("--messages", type=int, default=200_000)
    options.add_argument(
        "--queues", type=int, nargs="*", default=[10, 100, 1_000], help="the same again to repeat"
    )
    options.add_argument("--max-offsets", type=int, default=50_000)
    options.add_argument("--rates", type=int, nargs="*", default=[1_000, 20_000])
    options.add_argument("--seconds", type=float, default=15.0)
    options.add_argument("--job-messages", type=int, default=100_000)
    options.add_argument("--master", default="local[2]", help="of route, latency and jobs")
    chosen = options.parse_args()
    describe()
    with directory() as place:
        if "assign" in chosen.parts:
            rows = [
                assigning(place / f"a{turn}", queues, chosen.messages)
                for turn, queues in enumerate(chosen.queues)
            ]
            table("Assign, CPU µs a message", ["queues", "best", "median"], rows)
        if set(chosen.parts) - {"scale", "assign"}:
            on_one_session(chosen, place)
        if "scale" in chosen.parts:
            rows = scale(place, chosen.messages, chosen.max_offsets)
            title = f"Scale: 100 queues, {chosen.messages:,} messages; broker on the same cores"
            table(title, ["master", *ROUTED], rows)


if __name__ == "__main__":
    main()
