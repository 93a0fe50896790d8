"""Whatever call of the engine fails in whatever verb, memory says what the disk says after it."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Any

import pytest
from tests.stores import scene as scenes
from tests.stores.failing import open_on
from tests.stores.scene import VERBS, Scene

from penstock.errors import DiskFull, StorageFailed
from penstock.testing.checking import assert_clean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

ERRORS = (StorageFailed, struct.error, KeyboardInterrupt)


def fails_everywhere(scene: Scene, verb: Callable[[Scene], Callable[[], object]]) -> int:
    """Have each call of the engine fail in turn, until the verb comes to its end; say how often."""
    work = verb(scene)
    engine = scene.engine
    for failures in range(1_000):
        error = ERRORS[failures % 3]("this call fails")
        engine.arm(failures + 1, error)
        with contextlib.suppress(type(error)):
            work()
        has_failed = engine.left is None
        engine.arm(None, error)
        assert_clean(scene.broker)
        if not has_failed:
            return failures
    raise AssertionError("the verb never came to its end")


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_any_call_may_fail(design: str, verb: Any, tmp_path: Path) -> None:
    scene = Scene("memory", design, "inline", tmp_path)
    assert fails_everywhere(scene, verb)
    finish(scene)


@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_any_call_may_fail_with_a_pipeline(design: str, tmp_path: Path) -> None:
    scene = Scene("memory", design, "pipeline", tmp_path)
    for verb in (scenes.route, scenes.publish, scenes.update_queue, scenes.drain_queue):
        assert fails_everywhere(scene, verb)
    finish(scene)


def fail_on_rocksdb(design: str, verbs: Sequence[Any], path: Path) -> None:
    scene = Scene("rocksdb", design, "inline", path)
    for verb in verbs:
        assert fails_everywhere(scene, verb)
    finish(scene)
    scene.broker.close()


@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_any_call_may_fail_on_rocksdb(design: str, tmp_path: Path) -> None:
    fail_on_rocksdb(design, (scenes.claim, scenes.release, scenes.update_queue), tmp_path / "db")


@pytest.mark.soak
@pytest.mark.parametrize("design", ["indexed", "buckets"])
def test_any_call_of_any_verb_may_fail_on_rocksdb(design: str, tmp_path: Path) -> None:
    fail_on_rocksdb(design, VERBS, tmp_path / "db")


def finish(scene: Scene) -> None:
    """Work the store to its end."""
    scene.refill()
    scene.clock.advance(60_000)
    for name in [spec.name for spec in scene.broker.queues()]:
        while taken := scene.broker.claim(name, limit=100):
            assert all(each.ok for each in scene.broker.ack([each.receipt for each in taken]))
        stats = scene.broker.stats(name)
        assert (stats.available, stats.delayed, stats.in_flight) == (0, 0, 0)
    assert_clean(scene.broker)
    assert_clean(open_on(scene.engine, scene.design, scene.clock))


def test_what_can_t_be_rebuilt_at_once_is_rebuilt_before_the_next_verb(tmp_path: Path) -> None:
    scene = Scene("memory", "indexed", "inline", tmp_path)
    core: Any = scene.broker._store
    work: Any = scenes.ack(scene)
    scene.engine.arm(1, DiskFull("no room"), only_commits=True)
    load, core.load = core.load, lambda: 1 / 0
    with pytest.raises(DiskFull):
        work()
    with pytest.raises(ZeroDivisionError):
        scene.broker.claim("q")
    core.load = load
    assert all(each.ok for each in work())
    finish(scene)
