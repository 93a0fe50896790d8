"""A queue is filled from an archive: what the log has let go of comes once, and as it was."""

from __future__ import annotations

import copy
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed")

import penstock
from penstock import Message
from penstock.errors import InvalidInput, StoreMismatch
from penstock.spark.jobs import archive, backfill
from penstock.spark.sessions import pinned
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

HOUR_MS = 3_600_000
# The package has a function of this name.
MODULE: Any = sys.modules[backfill.__module__]


class Past:
    """A store whose log has let go of two hundred messages: archived, waiting, done or gone."""

    def __init__(self, world: Any, spark: SparkSession, place: Path) -> None:
        self.world, self.spark, self.place = world, spark, place
        self.broker: penstock.Broker = world.broker
        self.clock: penstock.ManualClock = world.clock
        self.broker.configure_log(retention_ms=1)
        for name, text in (("a", "kind <> 'k0'"), ("b", "price < 20")):
            self.broker.create_queue(name, filter=text, max_attempts=1)
        self.old = world.publish(200)
        self.middle_ms = self.clock.now_ms()
        self.take("a", 100, fail=False)
        self.take("b", 20, fail=True)
        # Archived and gone, archived and still here, and still here alone.
        archive(spark, world.location, place, queues=["a"], payload=True)
        archive(spark, world.location, place, queues=["b"], payload=False, trim=False)
        self.take("a", 20, fail=True)
        for _ in range(4):
            self.clock.advance(2 * HOUR_MS)
            self.broker.sweep()
        self.earliest = self.broker.log_stats().earliest
        assert self.earliest > max(self.old)
        self.new = world.publish(100)

    def moved_to(self, world: Any) -> Past:
        """Give the same past to a world whose store is a copy; the archive is only read."""
        other = copy.copy(self)
        other.world, other.broker, other.clock = world, world.broker, world.clock
        world.published = dict(self.world.published)
        return other

    def take(self, queue: str, count: int, *, fail: bool) -> None:
        held = [each.receipt for each in self.broker.claim(queue, limit=count)]
        assert len(held) == count
        if fail:
            self.broker.release(held, reason="no")
        else:
            self.broker.ack(held)

    def fill(self, queue: str, **settings: Any) -> Any:
        return backfill(self.spark, self.world.location, queue, archive=self.place, **settings)

    def wanted(self, text: str) -> Any:
        """Name what the filter wants of all that anybody has."""
        return self.world.naive({"q": f"({text}) AND (kind <> 'k0' OR price < 20 OR n >= 200)"})[
            "q"
        ]


@pytest.fixture(scope="module")
def made(world_type: Any, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Past:
    """Make the past once: archiving takes a while."""
    place = tmp_path_factory.mktemp("past")
    world = world_type(place / "store", routing="inline", clock=penstock.ManualClock())
    try:
        return Past(world, spark, place / "archive")
    finally:
        world.close()


@pytest.fixture
def past(made: Past, make_world: Callable[..., Any], tmp_path: Path) -> Past:
    shutil.copytree(made.world.path, tmp_path / "store0")
    clock = penstock.ManualClock(made.clock.now_ms(), seed=1)
    return made.moved_to(make_world(routing="inline", clock=clock))


def test_a_queue_is_filled_from_archive_store_and_log(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "price < 35 AND kind <> 'k5'"
    past.broker.create_queue("late", filter=text)
    wanted = past.wanted(text)
    dry = past.fill("late", dry_run=True)
    assert (dry.matched, dry.added, dry.missing) == (len(wanted), 0, 0)
    assert past.world.content()["late"] == []

    monkeypatch.setattr(MODULE, "_MESSAGES", 20)
    told: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        if len(told) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        past.fill("late", progress=stop)
    some = past.world.content()["late"]
    assert 0 < len(some) < len(wanted)
    assert_clean(past.broker)
    told.clear()
    rest = past.fill("late", progress=lambda done, total: told.append((done, total)))
    assert rest.added == len(wanted) - len(some)
    assert past.world.content()["late"] == wanted
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == rest.offsets
    again = past.fill("late")
    assert (again.offsets, again.added) == (0, 0)
    assert_clean(past.broker)

    sizes = {id_: known[3] for id_, known in past.world.published.items()}
    for delivery in past.broker.claim("late", limit=1_000):
        assert delivery.payload == b"m" * sizes[delivery.message_id]
        known = past.world.published[delivery.message_id]
        assert (delivery.attributes, delivery.group, delivery.priority) == known[:3]
    with past.broker.view() as view:
        here = len(list(view.payload_rows(0, 1 << 40)))
    past.broker.delete_queue("late")
    with past.broker.view() as view:
        assert len(list(view.payload_rows(0, 1 << 40))) < here, "those that only it held are gone"
    assert_clean(past.broker)


def test_a_part_of_it(past: Past) -> None:
    past.broker.create_queue("late", filter="n >= 0")
    wanted = past.wanted("n >= 0")
    low, high = past.old[50], past.old[100]
    assert past.fill("late", from_=low, to=high).added > 0
    assert past.world.content()["late"] == [each for each in wanted if low <= each < high]
    # By a time that the log knows nothing of any more.
    done = past.fill("late", from_time_ms=past.middle_ms)
    assert past.world.content()["late"] == wanted
    assert done.already == 0
    past.broker.update_queue("late", filter="n >= -1")
    assert past.fill("late").added == 0, "by another filter too it has had them"


def test_messages_without_payload_are_missing(
    make_world: Callable[..., Any], spark: SparkSession, tmp_path: Path
) -> None:
    world = make_world(routing="inline", clock=penstock.ManualClock())
    world.broker.configure_log(retention_ms=1)
    world.broker.create_queue("a", filter="n >= 0")
    world.broker.publish([Message(b"x", {"n": n}, delay_ms=7) for n in range(5)])
    world.clock.advance(10)
    world.broker.ack([each.receipt for each in world.broker.claim("a", limit=2)])
    archive(spark, world.location, tmp_path / "a", payload=False)
    for _ in range(4):
        world.clock.advance(2 * HOUR_MS)
        world.broker.sweep()
    world.broker.create_queue("late", filter="n >= 0")
    done = backfill(spark, world.location, "late", archive=tmp_path / "a")
    assert (done.matched, done.added, done.missing) == (5, 3, 2)
    assert_clean(world.broker)


def test_what_moves_meanwhile_is_found(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a look at what waits and one at what has failed, a message goes back."""
    past.broker.create_queue("late", filter="n >= 0")
    moved: list[int] = []

    def redrive(frame: Any) -> Any:
        found = pinned(frame)
        if not moved:
            moved.append(past.broker.redrive("a"))
        return found

    monkeypatch.setattr(MODULE, "pinned", redrive)
    past.fill("late")
    assert moved == [20]
    assert past.world.content()["late"] == past.wanted("n >= 0")


def test_what_is_refused(
    past: Past, make_world: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past.broker.create_queue("late", filter="n >= 0")
    with pytest.raises(InvalidInput, match="there is no archive at"):
        backfill(past.spark, past.world.location, "late", archive=tmp_path / "nowhere")
    other = make_world(routing="inline")
    other.broker.create_queue("late", filter="n >= 0")
    with pytest.raises(StoreMismatch, match="archive of store"):
        backfill(past.spark, other.location, "late", archive=past.place)
    coverage = past.broker._store.by_name["late"].coverage  # type: ignore[attr-defined]
    coverage.known_from = 5
    with pytest.raises(InvalidInput, match="has forgotten what it has had below offset 5"):
        past.fill("late")
    coverage.known_from = 0
    find = MODULE._Past._wanted

    def change(*args: Any) -> Any:
        found = find(*args)
        past.broker.update_queue("late", filter="n > 5")
        return found

    monkeypatch.setattr(MODULE._Past, "_wanted", change)
    with pytest.raises(InvalidInput, match="plan the backfill again"):
        past.fill("late")
    assert past.world.content()["late"] == []
