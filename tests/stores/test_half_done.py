"""A verb of several commits that fails or dies in the middle is whole once it is repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.stores import scene as scenes
from tests.stores.failing import open_on
from tests.stores.scene import DAY_MS, Scene

from penstock import Message, State
from penstock.errors import DiskFull
from penstock.filters import parse
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.broker.broker import Broker

DESIGN = pytest.mark.parametrize("design", ["indexed", "buckets"])
# Those of one commit are among what fails everywhere (test_failing_verbs).
SEVERAL = [
    *(scenes.claim, scenes.sweep, scenes.redrive, scenes.move, scenes.purge, scenes.update_queue),
    *(scenes.delete_queue, scenes.drain_queue, scenes.backfill),
]
MODE = pytest.mark.parametrize("mode", ["fails", "dies"])


def seen(scene: Scene) -> dict[str, Any]:
    """Tell what can be seen of the queues once nothing more is due.

    Ids go on behind the block on record after a failure, and groups begin their turns anew.
    """
    broker = scene.broker
    while (due_ms := broker.sweep().next_due_ms) is not None and due_ms <= scene.clock.now_ms():
        pass
    found: dict[str, Any] = {}
    for spec in broker.queues():
        pages = [broker.browse(spec.name, state=state, limit=1_000) for state in State]
        entries = sorted(
            (each.state, each.attempts, each.reason) for page in pages for each in page
        )
        found[spec.name] = (
            spec,
            msgspec.structs.replace(broker.stats(spec.name), groups_ready=0),
            entries,
        )
    return found


def break_at(scene: Scene, number: int, mode: str, work: Callable[[], object]) -> bool:
    """Have the n-th commit fail, or the process die there; say whether it came to that."""
    scene.engine.arm(number, DiskFull("no room"), only_commits=True)
    try:
        work()
    except DiskFull:
        pass
    else:
        scene.engine.arm(None, DiskFull())
        return False
    if mode == "dies":
        scene.broker = open_on(scene.engine, scene.design, scene.clock)
    assert_clean(scene.broker)
    return True


@pytest.mark.parametrize("verb", SEVERAL, ids=lambda verb: verb.__name__)
@MODE
@DESIGN
def test_repeated_it_is_as_if_it_had_not_failed(
    design: str, mode: str, verb: Any, tmp_path: Path
) -> None:
    def prepare() -> tuple[Scene, Callable[[], object]]:
        scene = Scene("memory", design, "inline", tmp_path)
        return scene, verb(scene)

    scene, work = prepare()
    work()
    expected = seen(scene)
    number = 1
    while True:
        scene, work = prepare()
        if not break_at(scene, number, mode, work):
            break
        work()
        assert seen(scene) == expected
        assert_clean(scene.broker)
        number += 1


# --- the router follows the store ---------------------------------------------------------


def follows(broker: Broker) -> None:
    """See that a message goes into those queues that the store says."""
    store: Any = broker._store
    probes: list[dict[str, Any]] = [
        {"queue": "gone"},
        {"queue": "q", "kept": 1},
        {"queue": "z", "kept": 9},
    ]
    for attributes in probes:
        wanted = {
            live.spec.name
            for live in store.queues()
            if live.filter and parse(live.filter).matches((attributes, "", 0, 0, 1))
        }
        before = {spec.name: broker.stats(spec.name).enqueued_total for spec in broker.queues()}
        broker.publish([Message(b"1", attributes)])
        took = {name for name in before if broker.stats(name).enqueued_total > before[name]}
        assert took == wanted


@MODE
@DESIGN
def test_another_filter_and_another_retention(design: str, mode: str, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        scene = Scene("memory", design, "inline", tmp_path)

        def update(scene: Scene = scene) -> None:
            scene.broker.update_queue("kept", filter="kept = 9", unclaimed_retention_ms=DAY_MS)

        broken = break_at(scene, number, mode, update)
        assert broken == (number == 1)
        follows(scene.broker)
        # Whatever filter it has: what the log has and it has not had, a backfill brings.
        spec = scene.broker.queue("kept")
        scene.broker.backfill("kept")
        matching = [
            record.message_id
            for record in scene.broker.read_log(begin=0).records
            if parse(spec.filter).matches((record.attributes, "", 0, 0, 1))
        ]
        waiting = [scene.broker.browse("kept", state=each, limit=999) for each in State]
        assert set(matching) <= {entry.message_id for page in waiting for entry in page}
        update()
        scene.clock.advance(2 * DAY_MS)
        while scene.broker.sweep().removed:
            pass
        assert scene.broker.stats("kept").available == 0
        assert_clean(scene.broker)


@MODE
@DESIGN
def test_a_drained_queue_takes_nothing_more(design: str, mode: str, tmp_path: Path) -> None:
    commits = 0
    while True:
        commits += 1
        scene = Scene("memory", design, "inline", tmp_path)
        scene.broker.create_queue("gone", filter="queue = 'gone'")
        scene.send("gone", 2)
        scene.broker.ack([each.receipt for each in scene.broker.claim("gone", limit=2)])

        def drain(scene: Scene = scene) -> None:
            scene.broker.delete_queue("gone", drain=True)

        if not break_at(scene, commits, mode, drain):
            break
        follows(scene.broker)
        if commits > 1:
            # It drains: a sweep finishes what was begun.
            scene.broker.sweep()
            assert "gone" not in {spec.name for spec in scene.broker.queues()}
        follows(scene.broker)
        assert_clean(scene.broker)
    assert commits > 2


@DESIGN
def test_waiting_messages_are_listed_by_sweeps(design: str, tmp_path: Path) -> None:
    scene = Scene("memory", design, "inline", tmp_path)
    broker = scene.broker
    for _ in range(4):
        scene.send("f", 30, group="c")
    scene.engine.calls.clear()
    broker.update_queue("f", unclaimed_retention_ms=DAY_MS)
    assert scene.engine.calls["commit"] == 1, "however many wait"
    assert broker.sweep(budget=10).next_due_ms == scene.clock.now_ms(), "there is more to list"
    # Delayed ones that come due before they are listed, and what is claimed and comes back.
    scene.clock.advance(1_500)
    taken = broker.claim("f", limit=5)
    broker.release([each.receipt for each in taken], delay_ms=1_000)
    broker = scene.broker = open_on(scene.engine, design, scene.clock)
    while broker.sweep(budget=10).next_due_ms == scene.clock.now_ms():
        pass
    assert_clean(broker)
    scene.clock.advance(DAY_MS + 3_000)
    while broker.sweep().removed:
        pass
    stats = broker.stats("f")
    assert (stats.available, stats.delayed) == (0, 0)
    broker.update_queue("f", unclaimed_retention_ms=0)
    assert_clean(broker)
