"""Messages routed a second by Spark, and how long a message takes from publish to claimable.

Run ``python benchmarks/pipeline.py`` (needs pyspark and Java). Each message matches one queue,
whatever their number. "route/s" counts messages over the time that the micro-batches took: match
on the executors, stage, commit into the queues. "floor/s" is Spark reading the same log to nowhere
in the same run; the ratio says what matching, staging and committing cost on top of it. "commit"
is the share of the routing time that the broker spent assigning.

The latency of a message is the time from when publish returned to when the assignment that holds
it was committed: a claim finds it then. Broker, driver and executors share this machine.
"""

from __future__ import annotations

import argparse
import threading
from bisect import bisect_right
from time import perf_counter
from typing import TYPE_CHECKING, Any

from common import console, describe, directory, show

import penstock
from penstock.server import in_process_server
from penstock.spark import session
from penstock.spark.route import AVAILABLE_NOW, route, status

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CHUNK = 5_000


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
        timed = Timed(broker)
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
        ]


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


def main() -> None:
    options = argparse.ArgumentParser(description="Messages routed a second by Spark.")
    options.add_argument("--messages", type=int, default=200_000)
    options.add_argument("--queues", type=int, nargs="*", default=[10, 100, 1_000])
    options.add_argument("--max-offsets", type=int, default=50_000)
    options.add_argument("--rates", type=int, nargs="*", default=[1_000, 20_000])
    options.add_argument("--seconds", type=float, default=15.0)
    options.add_argument("--master", default="local[2]")
    chosen = options.parse_args()
    describe()
    spark = session(chosen.master, quick=False, conf={"spark.log.level": "ERROR"})
    with directory() as place:
        # The first query pays for starting workers and compiling.
        throughput(spark, place / "warm", 10, 20_000, chosen.max_offsets)
        rows = [
            throughput(spark, place / f"t{n}", n, chosen.messages, chosen.max_offsets)
            for n in chosen.queues
        ]
        title = f"{chosen.messages:,} messages in micro-batches of {chosen.max_offsets:,}"
        show(title, ["queues", "route/s", "floor/s", "ratio", "commit"], rows)
        rows = [latency(spark, place / f"l{r}", r, chosen.seconds) for r in chosen.rates]
        show("publish to claimable", ["rate/s", "published/s", "p50", "p99", "max"], rows)
    console.print(f"Spark {spark.version}, {chosen.master}")
    spark.stop()


if __name__ == "__main__":
    main()
