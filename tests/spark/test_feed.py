"""The change feed: done, failed and attempts as streams."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import msgspec
from pyspark.errors import PythonException, StreamingQueryException

import penstock
from penstock import InvalidInput, ManualClock
from penstock.flight.client import FlightStore
from penstock.flight.protocol import HistoryEnds, HistoryStretch, QueueHistory
from penstock.spark.positions import (
    FeedOffset,
    Position,
    deal,
    gone,
    next_positions,
    packed,
    starting_positions,
    stretches_between,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

DAY_MS = 86_400_000


def feed(spark: SparkSession, world: Any, table: str, **options: str) -> DataFrame:
    reader = spark.readStream.format("penstock").options(location=world.location, table=table)
    return reader.options(**{"startingOffsets": "earliest", **options}).load()


def follow(frame: DataFrame, place: Path) -> StreamingQuery:
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(place / "ckpt"))
    return writer.trigger(availableNow=True).start(str(place / "out"))


def rows_of(spark: SparkSession, place: Path, *columns: str) -> list[tuple[Any, ...]]:
    found = spark.read.parquet(str(place / "out")).select(*columns).collect()
    return sorted(tuple(row) for row in found)


def send(world: Any, queue: str, count: int) -> None:
    world.broker.publish([penstock.Message(b"x", {"queue": queue}) for _ in range(count)])


def finish(world: Any, queue: str, count: int, *, fail: bool = False) -> list[int]:
    """Ack messages, or let them fail; return their ids."""
    done: list[int] = []
    while len(done) < count:
        taken = world.broker.claim(queue, limit=min(7, count - len(done)), consumer="w")
        receipts = [each.receipt for each in taken]
        if fail:
            world.broker.release(receipts, delay_ms=0, reason="no")
        else:
            world.broker.ack(receipts)
        done += [each.message_id for each in taken]
    return done


@pytest.fixture
def inline(make_world: Callable[..., Any]) -> Any:
    """Give a broker with two queues, and a clock that a test moves."""
    world = make_world(routing="inline", clock=ManualClock())
    for name in ("a", "b"):
        world.broker.create_queue(name, max_attempts=1)
        send(world, name, 60)
    return world


def test_a_stream_of_done_goes_on_from_its_checkpoint(
    spark: SparkSession, inline: Any, tmp_path: Path
) -> None:
    ids: list[int] = []
    for count in (15, 0, 5):
        ids += finish(inline, "a", count) + finish(inline, "b", count // 5)
        # Start options count only the first time.
        start = "latest" if count == 5 else "earliest"
        frame = feed(spark, inline, "done", maxOffsetsPerTrigger="10", startingOffsets=start)
        query = follow(frame, tmp_path)
        query.awaitTermination()
        told = [each for each in query.recentProgress if each.numInputRows]
        assert [each.numInputRows for each in told] == ([10, 8] if count == 15 else [6][:count])
        lags = [msgspec.json.decode(each.sources[0].latestOffset)["lag"] for each in told]
        assert [sum(lag.values()) for lag in lags] == ([8, 0] if count == 15 else [0][:count])
        assert [row[0] for row in rows_of(spark, tmp_path, "message_id")] == sorted(ids)
    numbers = rows_of(spark, tmp_path, "queue", "sequence")
    assert numbers == [("a", n) for n in range(20)] + [("b", n) for n in range(4)]


def test_a_failure_comes_once_whatever_is_redriven(
    spark: SparkSession, inline: Any, tmp_path: Path
) -> None:
    failed = finish(inline, "a", 7, fail=True)
    first = feed(spark, inline, "failed", queue="a", maxOffsetsPerTrigger="3")
    query = first.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "ckpt"))
    running = query.start(str(tmp_path / "out"))
    running.processAllAvailable()
    running.stop()
    failed += finish(inline, "a", 7, fail=True)
    # One that was read, and two that were not, behind which others wait in the same part.
    inline.broker.redrive("a", message_ids=[failed[1], failed[7], failed[9]])
    again = finish(inline, "a", 3, fail=True)
    follow(first, tmp_path).awaitTermination()
    ids = [row[0] for row in rows_of(spark, tmp_path, "message_id")]
    assert ids == sorted([*failed[:7], failed[8], *failed[10:], *again])


def test_attempts_follow_their_messages(spark: SparkSession, inline: Any, tmp_path: Path) -> None:
    failed = finish(inline, "a", 3, fail=True)
    follow(feed(spark, inline, "attempts"), tmp_path).awaitTermination()
    inline.broker.delete_queue("b")
    inline.broker.redrive("a", message_ids=failed[:1])
    done = finish(inline, "a", 1)
    follow(feed(spark, inline, "attempts"), tmp_path).awaitTermination()
    found = spark.read.parquet(str(tmp_path / "out")).drop("reason", "consumer", "ended_at")
    # The earlier attempt at a message that was redriven comes again, and its key is the same.
    assert found.count() == 5
    once = found.dropDuplicates(["queue", "message_id", "attempt", "claimed_at"])
    rows = sorted((row.message_id, row.attempt, row.outcome) for row in once.collect())
    assert done == failed[:1]
    assert rows == sorted([(id_, 1, "released") for id_ in failed] + [(done[0], 2, "acked")])


def test_queues_come_and_go(spark: SparkSession, inline: Any, tmp_path: Path) -> None:
    def run() -> None:
        follow(feed(spark, inline, "done"), tmp_path).awaitTermination()
        inline.clock.advance(1)

    ids = finish(inline, "a", 5)
    run()
    inline.broker.create_queue("c")
    inline.broker.delete_queue("a")
    send(inline, "c", 4)
    ids += finish(inline, "c", 4)
    run()
    inline.broker.create_queue("a")
    send(inline, "a", 3)
    ids += finish(inline, "a", 3)
    run()
    found = rows_of(spark, tmp_path, "message_id", "queue", "sequence")
    assert [row[0] for row in found] == sorted(ids)
    assert sorted(row[2] for row in found if row[1] == "a") == [0, 0, 1, 1, 2, 2, 3, 4]


def test_what_retention_took_is_told(spark: SparkSession, inline: Any, tmp_path: Path) -> None:
    ids = finish(inline, "a", 10)
    follow(feed(spark, inline, "done"), tmp_path).awaitTermination()
    finish(inline, "a", 10)
    inline.clock.advance(DAY_MS)
    inline.broker.sweep()
    ids += finish(inline, "a", 5)
    query = follow(feed(spark, inline, "done"), tmp_path)
    says = "data loss: done messages of queue a from sequence 10 on"
    with pytest.raises(StreamingQueryException, match=says) as told:
        query.awaitTermination()
    assert "Traceback" not in str(told.value)
    follow(feed(spark, inline, "done", failOnDataLoss="false"), tmp_path).awaitTermination()
    assert [row[0] for row in rows_of(spark, tmp_path, "message_id")] == ids


def test_an_error_of_a_task_is_told_in_one_line(
    spark: SparkSession, inline: Any, tmp_path: Path
) -> None:
    finish(inline, "a", 3)
    told: list[str] = []

    def read_late(batch: DataFrame, _: int) -> None:
        inline.broker.delete_queue("a")
        with pytest.raises(PythonException) as error:
            batch.collect()
        told.append(str(error.value))

    hides = "spark.sql.execution.pyspark.udf.hideTraceback.enabled"
    spark.conf.set(hides, "false")
    try:
        writer = feed(spark, inline, "done").writeStream.foreachBatch(read_late)
        writer = writer.option("checkpointLocation", str(tmp_path / "ckpt"))
        writer.trigger(availableNow=True).start().awaitTermination()
    finally:
        spark.conf.set(hides, "true")
    assert "data loss: done messages of queue a from sequence 0 on" in told[0]
    assert "the queue was deleted before they were read" in told[0]
    assert "Traceback" not in told[0]


def test_a_lost_commit_replays_the_same_rows(
    spark: SparkSession, inline: Any, tmp_path: Path
) -> None:
    finish(inline, "a", 12)
    seen: list[tuple[int, list[int]]] = []

    def note(batch: DataFrame, number: int) -> None:
        seen.append((number, sorted(row["sequence"] for row in batch.collect())))

    def run() -> None:
        frame = feed(spark, inline, "done", maxOffsetsPerTrigger="8", columns="sequence")
        writer = frame.writeStream.foreachBatch(note)
        writer = writer.option("checkpointLocation", str(tmp_path / "ckpt"))
        writer.trigger(availableNow=True).start().awaitTermination()

    run()
    (tmp_path / "ckpt" / "commits" / "1").unlink()
    (tmp_path / "ckpt" / "commits" / ".1.crc").unlink(missing_ok=True)
    finish(inline, "a", 3)
    run()
    stretch = list(range(8, 12))
    assert seen == [(0, list(range(8))), (1, stretch), (1, stretch), (2, [12, 13, 14])]


def test_a_stream_begins_where_it_is_told_to(
    spark: SparkSession, inline: Any, tmp_path: Path
) -> None:
    times = []
    for _ in range(3):
        times.append(inline.clock.now_ms())
        finish(inline, "a", 2)
        finish(inline, "b", 1)
        inline.clock.advance(1_000)
    by_queue = msgspec.json.encode({"a": times[2], "b": times[1]}).decode()
    for number, (start, expected) in enumerate(
        (
            ({"startingOffsets": '{"a": 5, "b": -2}'}, {"a": [5], "b": [0, 1, 2]}),
            ({"startingTimestamp": str(times[1])}, {"a": [2, 3, 4, 5], "b": [1, 2]}),
            ({"startingTimestamp": by_queue}, {"a": [4, 5], "b": [1, 2]}),
        )
    ):
        reader = spark.readStream.format("penstock").options(location=inline.location, table="done")
        place = tmp_path / str(number)
        follow(reader.options(**start).load(), place).awaitTermination()
        rows = rows_of(spark, place, "queue", "sequence")
        assert rows == [(name, each) for name, some in expected.items() for each in some]


def test_every_row_comes_once_through_restarts(
    spark: SparkSession, make_world: Callable[..., Any], tmp_path: Path
) -> None:
    world = make_world(routing="inline")
    for name in ("a", "b"):
        world.broker.create_queue(name, max_attempts=1)
    over = threading.Event()
    ids: list[int] = []

    def work() -> None:
        """Let every third message fail, and redrive it now and then."""
        while not over.is_set() or world.broker.redrive("a") + world.broker.redrive("b"):
            for queue in ("a", "b"):
                if not over.is_set():
                    send(world, queue, 5)
                for each in world.broker.claim(queue, limit=10):
                    if each.attempts == 1 and each.message_id % 3 == 0:
                        world.broker.release([each.receipt])
                    else:
                        world.broker.ack([each.receipt])
                        ids.append(each.message_id)
            world.broker.redrive("a")

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(3):
            frame = feed(spark, world, "done", maxOffsetsPerTrigger="500")
            writer = frame.writeStream.format("parquet")
            writer = writer.option("checkpointLocation", str(tmp_path / "ckpt"))
            query = writer.start(str(tmp_path / "out"))
            while query.lastProgress is None or not query.lastProgress.numInputRows:
                query.awaitTermination(1)
            # In the middle of a micro-batch, as it comes.
            query.stop()
    finally:
        over.set()
        worker.join()
    follow(feed(spark, world, "done"), tmp_path).awaitTermination()
    assert [row[0] for row in rows_of(spark, tmp_path, "message_id")] == sorted(ids)


def started(ends: HistoryEnds, states: tuple[str, ...], place: Any) -> dict[str, tuple[int, int]]:
    found = starting_positions(ends, states, place)
    return {name: (each.done, each.failed) for name, each in found.items()}


ENDS = HistoryEnds(
    "s",
    900,
    {
        "a": QueueHistory(10, {"done": 50, "failed": 5}, {"done": (20, 700)}),
        "b": QueueHistory(20, {"done": 0, "failed": 0}),
    },
)


def test_places() -> None:
    done, both = ("done",), ("done", "failed")
    assert started(ENDS, done, "earliest") == {"a": (20, -1), "b": (0, -1)}
    assert started(ENDS, both, "latest") == {"a": (50, 5), "b": (0, 0)}
    assert started(ENDS, done, {"a": 30, "b": -2}) == {"a": (30, -1), "b": (0, -1)}
    assert started(ENDS, both, {"a": {"done": 30, "failed": -1}, "b": -1})["a"] == (30, 5)
    # None that is still to be read has ended before.
    assert starting_positions(ENDS, done, "earliest")["a"].since == 700
    assert starting_positions(ENDS, done, "latest")["a"].since == 900
    assert starting_positions(ENDS, done, {"a": 30, "b": -2})["a"].since == 10


@pytest.mark.parametrize(
    ("states", "place", "says"),
    [
        (["done"], {"a": 1}, "startingOffsets must name every queue"),
        (["done"], {"a": 1, "b": 0, "c": 0}, "and no other: a, b"),
        (["done"], {"a": 51, "b": 0}, "queue a is 51; done has numbers up to 50"),
        (["done"], {"a": -3, "b": 0}, "queue a is -3"),
        (["done", "failed"], {"a": 1, "b": 0}, "must say where done and failed begin"),
        (["done"], {"a": {"failed": 1}, "b": 0}, "of queue a must say where"),
    ],
)
def test_places_that_are_not_there(states: list[str], place: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        starting_positions(ENDS, states, place)


def test_a_limit_is_shared_by_what_waits() -> None:
    start = FeedOffset("s", 800, {"a": Position(10, 700, 20, 0)})
    end = FeedOffset("s", 900, next_positions(start, ENDS, ("done", "failed"), 7))
    found = stretches_between(start, end, ("done", "failed"))
    assert [(each.queue, each.state, each.begin, each.end) for each in found] == [
        ("a", "done", 20, 26),
        ("a", "failed", 0, 1),
    ]
    # What is left has not ended before the time that was known.
    assert end.queues["a"].since == 700
    assert end.queues["b"].since == 900
    whole = next_positions(start, ENDS, ("done", "failed"), None)
    assert (whole["a"].done, whole["a"].failed, whole["a"].since) == (50, 5, 900)


def test_tasks_have_many_short_stretches_or_a_part_of_a_long_one() -> None:
    short = [HistoryStretch(f"q{n}", 1, "done", 0, 3) for n in range(10)]
    tasks = deal(short, 4, least=5)
    assert [sum(each.end - each.begin for each in some) for some in tasks] == [8, 8, 8, 6]
    parts = deal([HistoryStretch("q", 1, "done", 5, 105)], 4, least=5)
    bounds = [(each.begin, each.end) for some in parts for each in some]
    assert bounds == [(5, 30), (30, 55), (55, 80), (80, 105)]


# --- offsets in checkpoints -----------------------------------------------------------------------

# As Penstock wrote it before it packed offsets.
NAMED = """
{"store": "0c2f9a11", "at": 1893456000000, "queues": {
    "a": {"created": 10, "since": 1893456000000, "done": 905},
    "b": {"created": 20, "since": 1893455999000, "done": 7, "failed": 1}}}
"""
# Version 1: queue number 3 at done 905, number 70000 at done 7 and failed 1, made by hand.
PACKED = "AXicY85lEGRgZECAFwzMSDyGTnYULsN/xv8MyBAApVQJ+g=="


def ends_of(numbers: dict[str, int]) -> HistoryEnds:
    made = {"a": 10, "b": 20}
    return HistoryEnds(
        "0c2f9a11",
        1893456000000,
        {
            name: QueueHistory(made.get(name, 30), {"done": 9, "failed": 9}, number=number)
            for name, number in numbers.items()
        },
    )


def test_offsets_are_packed_and_those_of_earlier_versions_are_read() -> None:
    ends = ends_of({"a": 3, "b": 70_000, "c": 4})
    at = 1893456000000
    read = unpacked(msgspec.json.decode(NAMED), ends)
    assert read == FeedOffset(
        "0c2f9a11",
        at,
        {"a": Position(10, at, 905), "b": Position(20, at - 1000, 7, 1)},
    )
    again = packed(read, ends)
    assert unpacked(again, ends) == read
    assert unpacked({"store": "0c2f9a11", "at": at, "packed": PACKED}, ends) == read
    # Another queue of the same name has another number, and one that is gone has none.
    assert list(unpacked(again, ends_of({"a": 5, "b": 70_000})).queues) == ["b"]
    # The store was restored, and its next queue has the number of one that the backup had not.
    anew = ends_of({"a": 3, "new": 70_000})
    anew.queues["new"] = msgspec.structs.replace(anew.queues["new"], created_at_ms=at + 1)
    assert list(unpacked(again, anew).queues) == ["a"]
    assert gone(packed(FeedOffset("s", at, {}), ends), again, anew) == [70_000]
    read.queues["a"].failed = 905
    assert unpacked(packed(read, ends), ends) == read
    # The broker that made queue c has a clock that goes before.
    late = msgspec.structs.replace(ends.queues["c"], created_at_ms=at + 50)
    ahead = msgspec.structs.replace(ends, queues={**ends.queues, "c": late})
    read.queues["c"] = Position(at + 50, at, 3)
    assert unpacked(packed(read, ahead), ahead).queues == read.queues
    with pytest.raises(InvalidInput, match="has format 03, this Penstock reads formats 01 and 02"):
        unpacked({**again, "packed": "Aw=="}, ends)


def test_an_offset_of_ten_thousand_queues_is_short() -> None:
    names = [f"queue-of-customer-{number}" for number in range(10_000)]
    ends = ends_of({name: 2 * number for number, name in enumerate(names)})
    # Spread as chance would have it: a sorted row of numbers would be shorter.
    far = [number * 7_919_777 % 9_999_991 for number in range(10_000)]
    queues = {
        name: Position(30, ends.at_ms - far[at] % 90_000 * (at % 5 == 0), far[at], far[at] % 99_991)
        for at, name in enumerate(names)
    }
    offset = FeedOffset("0c2f9a11", ends.at_ms, queues)
    plain = packed(offset, ends)
    assert len(msgspec.json.encode(plain)) < 128_000
    assert unpacked(plain, ends) == offset
    assert packed(FeedOffset("s", 5, {}), ends)["packed"]
    assert unpacked(packed(FeedOffset("s", 5, {}), ends), ends) == FeedOffset("s", 5, {})


def test_a_checkpoint_of_an_earlier_version_goes_on(
    spark: SparkSession, inline: Any, tmp_path: Path
) -> None:
    def run(**options: str) -> None:
        follow(feed(spark, inline, "done", **options), tmp_path).awaitTermination()

    ids = finish(inline, "a", 5) + finish(inline, "b", 2)
    run()
    offsets = tmp_path / "ckpt" / "offsets"
    head, told = (offsets / "0").read_text().rsplit("\n", 1)
    ends = FlightStore(inline.location).history_ends()
    named = unpacked(msgspec.json.decode(told), ends)
    assert "packed" in told
    (offsets / ".0.crc").unlink(missing_ok=True)
    (offsets / "0").write_text(f"{head}\n{msgspec.json.encode(named).decode()}")
    ids += finish(inline, "a", 3)
    run()
    assert "packed" in (offsets / "1").read_text()
    assert [row[0] for row in rows_of(spark, tmp_path, "message_id")] == sorted(ids)


def test_a_replay_of_messages_whose_queue_is_gone(
    spark: SparkSession, inline: Any, tmp_path: Path
) -> None:
    def run(**options: str) -> None:
        writer = feed(spark, inline, "done", **options).writeStream.format("noop")
        writer = writer.option("checkpointLocation", str(tmp_path / "ckpt"))
        writer.trigger(availableNow=True).start().awaitTermination()

    finish(inline, "b", 1)
    run()
    (tmp_path / "ckpt" / "commits" / "0").unlink()
    (tmp_path / "ckpt" / "commits" / ".0.crc").unlink(missing_ok=True)
    inline.broker.delete_queue("b")
    with pytest.raises(StreamingQueryException, match="queue was deleted before they were read"):
        run()
    run(failOnDataLoss="false")
